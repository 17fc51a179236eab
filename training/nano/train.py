"""Train the model:  python -m training.nano.train --out radixrt/assets/nano

The learning rate follows the clock, so that a run always ends within its minutes, decayed. In pieces: give
`--total-minutes 16 --minutes 8 --state FILE`, then the same with `--resume`. `--init FOLDER` begins with the weights of
an exported checkpoint, and with its log; `--start 0.4` then leaves out the part with short contexts:

    python -m training.nano.train --minutes 3 --init FOLDER --start 0.5 --lr 0.005 --adam-lr 0.001 --seed 1

The log, JSON lines, goes to stdout and to training.jsonl beside the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.nano import tokenizer
from training.nano.data import (
    ANSWER,
    ANSWER_WEIGHT,
    CONTEXT,
    KINDS,
    SHARES,
    Batch,
    Feed,
    evaluation_batches,
    longest_context,
)
from training.nano.export import export, load
from training.nano.model import QUICK, Model, Shape, attend_each, attend_flash, check_flash
from training.nano.muon import Muon
from training.nano.tasks import evaluation

WARM_UP, DECAY_FROM = 0.02, 0.45
"""Shares of the training: the learning rate rises, stays, and falls to zero, each time in a line."""
RESERVE_S = 12
"""For the last evaluation and the export."""
FORBIDDEN_ITEMS = 200
"""Evaluation items of every kind and tag, the first ones, that no training example may equal."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="training.nano.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("radixrt/assets/nano"))
    parser.add_argument("--minutes", type=float, default=8.5, help="of this run, start and export included")
    parser.add_argument("--total-minutes", type=float, help="of all pieces; default: --minutes")
    parser.add_argument("--state", type=Path, help="file for all that a later piece needs")
    parser.add_argument("--resume", action="store_true", help="go on from --state")
    parser.add_argument("--init", type=Path, help="checkpoint folder to begin with")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a smaller model, for a look on a CPU")
    parser.add_argument("--tokens", type=int, default=65_536, help="a step")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--lr", type=float, default=0.01, help="of matrices, by Muon")
    parser.add_argument("--adam-lr", type=float, default=0.002, help="of embeddings and norms")
    parser.add_argument("--weight-decay", type=float, default=0.05, help="of matrices, as a share of the learning rate")
    parser.add_argument(
        "--context-weight", type=float, default=0.05, help="of tokens that the assistant only reads, in the loss"
    )
    parser.add_argument("--start", type=float, default=0.0, help="share of the curriculum that is skipped")
    parser.add_argument("--shares", nargs="+", default=[], metavar="KIND=SHARE", help="of tokens; 0 leaves a kind out")
    parser.add_argument(
        "--answer-weight", nargs="+", default=[], metavar="KIND=WEIGHT", help="of an answer's token in the loss"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=float, default=30.0, help="seconds")
    parser.add_argument("--check-every", type=float, default=120.0, help="seconds")
    parser.add_argument("--check-items", type=int, default=40, help="of every kind and tag")
    parser.add_argument(
        "--forbidden-items",
        type=int,
        default=FORBIDDEN_ITEMS,
        help="evaluation items that no training example may equal",
    )
    args = parser.parse_args()
    if args.resume and not args.state:
        parser.error("--resume needs --state")
    shares = dict(SHARES) | by_kind(parser, "--shares", args.shares)
    args.shares = {kind: share for kind, share in shares.items() if share > 0}
    args.answer_weight = ANSWER_WEIGHT | by_kind(parser, "--answer-weight", args.answer_weight)
    return args


def by_kind(parser: argparse.ArgumentParser, option: str, items: list[str]) -> dict[str, float]:
    """["recall=0.2"] -> {"recall": 0.2}; what is not KIND=NUMBER is the parser's error."""
    found: dict[str, float] = {}
    for item in items:
        kind, equals, number = item.partition("=")
        if not equals or kind not in KINDS:
            parser.error(f"{option}: no kind {kind}" if equals else f"{option}: {item} is not KIND=NUMBER")
        try:
            found[kind] = float(number)
        except ValueError:
            parser.error(f"{option}: {number} is no number")
    return found


def rate(progress: float, start: float = 0.0) -> float:
    """The learning rate's share of its peak, in a training that began at `start`."""
    done = (progress - start) / (1 - start)
    return max(0.0, min(1.0, done / WARM_UP, (1 - progress) / (1 - DECAY_FROM)))


class Log:
    def __init__(self, path: Path, keep: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a" if keep else "w", encoding="utf-8")

    def write(self, **fields: Any) -> None:
        line = json.dumps(fields)
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


Host = tuple[Tensor, Tensor, int]
"""A batch's columns, its starts, and tokens of its longest example."""


def on_host(batch: Batch, pin: bool) -> Host:
    columns, starts = torch.from_numpy(batch.columns), torch.from_numpy(batch.starts)
    return (columns.pin_memory(), starts.pin_memory(), batch.longest) if pin else (columns, starts, batch.longest)


class Ahead:
    """Batches of a feed, taken and pinned by a thread while the device computes."""

    def __init__(self, feed: Feed, progress: float, pin: bool) -> None:
        self._feed, self._progress, self._pin = feed, progress, pin
        self._ready: queue.Queue[Host | Exception] = queue.Queue(2)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def next(self, progress: float) -> Host:
        """The next batch; later ones will be for this share of the training."""
        self._progress = progress
        found = self._ready.get()
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stopped.is_set():
            try:
                found: Host | Exception = on_host(self._feed.next(self._progress), self._pin)
            except Exception as error:
                found = error
                self._stopped.set()
            self._offer(found)

    def _offer(self, found: Host | Exception) -> None:
        while True:
            try:
                return self._ready.put(found, timeout=0.2)
            except queue.Full:
                if self._stopped.is_set():
                    return None


class Trainer:
    def __init__(self, args: argparse.Namespace, began: float) -> None:
        self.args, self.began = args, began
        args.out.mkdir(parents=True, exist_ok=True)
        pieces = self._tokenizer()
        self.checks = list(evaluation(args.check_items, tuple(args.shares)))
        batches = evaluation_batches(pieces, self.checks, args.tokens)
        self.check_batches = [on_host(batch, pin=False) for batch in batches]
        forbidden = frozenset(example.fingerprint() for example in evaluation(args.forbidden_items))
        state = torch.load(args.state, map_location="cpu", weights_only=True) if args.resume else None
        seed = args.seed + (state["step"] if state else 0)
        self.begin = state["progress"] if state else args.start
        self.feed = Feed(pieces, args.workers, seed, args.tokens, forbidden, args.shares, self.begin)
        self.device = torch.device(args.device)
        self.on_gpu = self.device.type == "cuda"
        torch.manual_seed(args.seed)
        self.shape = QUICK if args.quick else Shape()
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.model = Model(self.shape, dtype, attend_flash if self.on_gpu else attend_each)
        if args.init:
            load(self.model, args.init)
        self.model.to(self.device)
        matrices = self.model.matrices()
        others = [p for p in self.model.parameters() if not any(p is m for m in matrices)]
        self.optimizers = [
            Muon(matrices, args.lr, weight_decay=args.weight_decay),
            torch.optim.AdamW(others, args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=self.on_gpu),
        ]
        self.step, self.spent, self.pieces_done = 0, 0.0, 0
        self.marked = self.checked = 0.0
        self.marked_step, self.waited = 0, 0.0
        self.sums = torch.zeros(len(KINDS), 3, device=self.device)
        if state:
            self._restore(state)
        self.answer_weight = torch.tensor([args.answer_weight.get(kind, 1.0) for kind in KINDS], device=self.device)
        self.ahead = Ahead(self.feed, self.begin, self.on_gpu)
        self.log = Log(args.out / "training.jsonl", keep=self._log_goes_on())

    def _tokenizer(self) -> bytes:
        """The checkpoint's own; made where there is none."""
        source = self.args.init or (self.args.out if self.args.resume else None)
        model = (source / "tokenizer.model").read_bytes() if source else tokenizer.train()
        tokenizer.write(self.args.out, model)
        return model

    def _log_goes_on(self) -> bool:
        """Whether there is a log to append to: this run's, or that of the checkpoint that it begins with."""
        before = self.args.init / "training.jsonl" if self.args.init else None
        if self.args.resume or before is None or not before.exists():
            return self.args.resume
        if before.resolve() != (self.args.out / "training.jsonl").resolve():
            shutil.copy(before, self.args.out)
        return True

    # ------------------------------------------------------------ the run

    def run(self) -> None:
        args = self.args
        note = {"flash_error": check_flash(self.shape, self.device)} if self.on_gpu else {}
        if self.on_gpu:
            self.model.compile()
        count = sum(p.numel() for p in self.model.parameters())
        self.log.write(
            event="start", parameters=count, shape=self.shape.as_dict(), step=self.step, torch=torch.__version__,
            device=torch.cuda.get_device_name() if self.on_gpu else "cpu", tokens_a_step=args.tokens,
            workers=args.workers, shares=args.shares,
            answer_weight=args.answer_weight, start=args.start,
            lr=args.lr, adam_lr=args.adam_lr, weight_decay=args.weight_decay,
            context_weight=args.context_weight, seed=args.seed,
            minutes=args.minutes, init=str(args.init) if args.init else None, checks=len(self.checks),
            seconds=round(time.monotonic() - self.began, 1), **note,
        )  # fmt: skip
        loss, _ = self._loss(self.ahead.next(self.begin))
        loss.backward()  # compiles, before the clock of the curriculum starts
        self._zero_grad()
        self._check(self.begin)
        progress = self.begin
        first = self.spent
        ends = self.began + args.minutes * 60 - RESERVE_S
        pieces = round((args.total_minutes or args.minutes) / args.minutes)
        later = max(0, pieces - self.pieces_done - 1) * args.minutes * 60
        start = self.marked = self.checked = time.monotonic()
        self.marked_step = self.step
        while (now := time.monotonic()) < ends:
            self.spent = first + now - start
            remaining = ends - now + later
            progress = args.start + (1 - args.start) * self.spent / (self.spent + remaining)
            self._train_step(progress)
            self._reports(now, progress)
        self._check(progress)
        export(self.model, self.args.out)
        self.log.write(event="exported", step=self.step, seconds=round(time.monotonic() - self.began, 1))
        if args.state:
            self._save(progress)
        self.ahead.close()
        self.feed.close()
        self.log.close()

    def _train_step(self, progress: float) -> None:
        waited = time.monotonic()
        batch = self.ahead.next(progress)
        self.waited += time.monotonic() - waited
        loss, sums = self._loss(batch)
        loss.backward()
        factor = rate(progress, self.args.start)
        for optimizer, peak in zip(self.optimizers, (self.args.lr, self.args.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        torch.nn.utils.clip_grad_norm_(self.optimizers[1].param_groups[0]["params"], 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self._zero_grad()
        self.step += 1
        self.sums += sums

    def _loss(self, batch: Host) -> tuple[Tensor, Tensor]:
        """The loss; and sums by kind, [kinds, 3], of answers' tokens: their loss, how many are right, how many."""
        columns, starts, longest = self._to_device(batch)
        tokens, targets, what, positions, groups = columns.unbind(0)
        losses, right = self.model.losses(self.model(tokens, positions, starts, longest), targets)
        answers = (what == ANSWER).float()
        weights = answers * self.answer_weight[groups] + (what == CONTEXT).float() * self.args.context_weight
        kinds = torch.nn.functional.one_hot(groups, len(KINDS)).float()
        sums = kinds.T @ torch.stack([losses.detach() * answers, right * answers, answers], 1)
        return (losses * weights).sum() / weights.sum(), sums

    def _zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _to_device(self, batch: Host) -> Host:
        columns, starts, longest = batch
        columns = columns.to(self.device, non_blocking=True).long()
        return columns, starts.to(self.device, non_blocking=True), longest

    # ------------------------------------------------------------ what it says

    def _reports(self, now: float, progress: float) -> None:
        if now - self.marked >= self.args.log_every:
            loss, right, count = self.sums.T.tolist()
            seconds = time.monotonic() - self.marked
            self.log.write(
                event="step", step=self.step, progress=round(progress, 4), seconds=round(now - self.began, 1),
                tokens_per_s=round((self.step - self.marked_step) * self.args.tokens / seconds),
                waiting=round(self.waited / seconds, 3), longest_context=longest_context(progress),
                loss={k: round(s / n, 4) for k, s, n in zip(KINDS, loss, count, strict=True) if n},
                right={k: round(r / n, 4) for k, r, n in zip(KINDS, right, count, strict=True) if n},
            )  # fmt: skip
            self.marked, self.marked_step, self.waited = time.monotonic(), self.step, 0.0
            self.sums.zero_()
        if now - self.checked >= self.args.check_every:
            self._check(progress)
            self.checked = time.monotonic()
            self.marked += self.checked - now

    @torch.no_grad()
    def _check(self, progress: float) -> None:
        """The share of evaluation items whose answers are, token for token, what the model finds likeliest."""
        began = time.monotonic()
        good = torch.ones(len(self.checks), device=self.device)
        for batch in self.check_batches:
            columns, starts, longest = self._to_device(batch)
            tokens, targets, what, positions, groups = columns.unbind(0)
            _, right = self.model.losses(self.model(tokens, positions, starts, longest), targets)
            fine = (right | (what != ANSWER)).float()
            good.scatter_reduce_(0, groups, fine, "amin")
        found: dict[str, dict[str, list[float]]] = {}
        for example, value in zip(self.checks, good.tolist(), strict=True):
            found.setdefault(example.kind, {}).setdefault(example.tag, []).append(value)
        shares = {k: {t: round(sum(v) / len(v), 3) for t, v in tags.items()} for k, tags in found.items()}
        seconds = time.monotonic()
        self.log.write(
            event="check", step=self.step, progress=round(progress, 4), seconds=round(seconds - self.began, 1),
            took=round(seconds - began, 1), exact=shares,
        )  # fmt: skip

    # ------------------------------------------------------------ pieces

    def _save(self, progress: float) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "spent": self.spent,
            "pieces_done": self.pieces_done + 1,
            "progress": progress,
        }
        self.args.state.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.args.state)

    def _restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.step, self.spent, self.pieces_done = state["step"], state["spent"], state["pieces_done"]


def main() -> None:
    began = time.monotonic()
    Trainer(arguments(), began).run()


if __name__ == "__main__":
    main()
