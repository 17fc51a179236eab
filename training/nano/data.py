"""Training batches, made by worker processes: whole examples one after the other in a row of fixed length."""

from __future__ import annotations

import multiprocessing
import queue
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import sentencepiece

from training.nano.render import BOS, END, MARKS, turns_of
from training.nano.tasks import TAGS, Example, Words, draw

KINDS = tuple(TAGS)
SHARES = {
    "recall": 0.26, "recall_several": 0.10, "tools": 0.20, "arithmetic": 0.10, "lookup": 0.06, "choose": 0.14,
    "json": 0.11, "chat": 0.03,
}  # fmt: skip
"""Of tokens."""
ANSWER_WEIGHT = {"choose": 2.0, "recall": 1.5, "tools": 2.0}
"""Of an answer's token in the loss, where it is not 1: short answers that need much of the context."""
NOTHING, CONTEXT, ANSWER = 0, 1, 2
"""What a target is: padding or another example's, what the assistant reads, what it says."""
TOOL_TAGS = ("1", "3", "6", "6", "two", "two", "none")
"""Of training, the harder ones more often."""
FIRST_CONTEXT, LAST_CONTEXT = 192, 4096
SMALLEST_CONTEXT = 60
GROW = (0.08, 0.40)
"""Between these shares of the training the longest context grows from the first to the last, evenly on a log scale."""
QUEUED = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """`columns`: int16[5, T], by row: tokens, targets (the token after), what the target is (NOTHING, CONTEXT, ANSWER),
    positions within the example, groups (the index of the kind, or in evaluation of the example). `starts`:
    int32[n + 1], where examples begin, and T. longest: tokens of the longest example."""

    columns: np.ndarray
    starts: np.ndarray

    @property
    def longest(self) -> int:
        return int(np.diff(self.starts).max())


class Encoder:
    """Examples to token ids."""

    def __init__(self, model: bytes) -> None:
        self._sp = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._bos, self._end = self._sp.piece_to_id(BOS), self._sp.piece_to_id(END)
        self._marks = {role: self._sp.piece_to_id(mark) for role, mark in MARKS.items()}
        self.pad = self._sp.pad_id()

    def encode(self, example: Example) -> tuple[list[int], list[int]]:
        """Ids of the whole chat, and for each id whether it is CONTEXT or ANSWER: text of the assistant, and the mark
        that ends it."""
        turns = turns_of(example)
        ids, kinds = [self._bos], [CONTEXT]
        for (role, _), body in zip(turns, self._sp.encode([text for _, text in turns], num_threads=1), strict=True):
            ids += [self._marks[role], *body, self._end]
            kinds += [CONTEXT] + [ANSWER if role == "assistant" else CONTEXT] * (len(body) + 1)
        return ids, kinds


Encoded = tuple[list[int], list[int], int]
"""Ids, what each is, group."""


def pack(examples: list[Encoded], length: int, pad: int) -> tuple[Batch, list[Encoded]]:
    """A batch of as many of the examples as fit, in order; and those that did not. ValueError if one never will."""
    columns = np.zeros((5, length), dtype=np.int16)
    columns[0] = pad
    starts, left, at = [], [], 0
    for example in examples:
        ids, kinds, group = example
        if len(ids) > length:
            raise ValueError(f"an example has {len(ids)} tokens, a batch {length}")
        end = at + len(ids)
        if end > length:
            left.append(example)
            continue
        columns[0, at:end] = ids
        columns[1, at : end - 1] = ids[1:]
        columns[2, at : end - 1] = kinds[1:]
        columns[3, at:end] = np.arange(len(ids))
        columns[4, at:end] = group
        starts.append(at)
        at = end
    if at < length:
        columns[3, at:] = np.arange(length - at) % LAST_CONTEXT
        starts += range(at, length, LAST_CONTEXT)
    return Batch(columns, np.array([*starts, length], dtype=np.int32)), left


def longest_context(progress: float) -> int:
    """Tokens of the longest context at a share of the training."""
    begin, end = GROW
    grown = min(1.0, max(0.0, (progress - begin) / (end - begin)))
    return int(FIRST_CONTEXT * (LAST_CONTEXT / FIRST_CONTEXT) ** grown)


def training_example(words: Words, kind: str, progress: float) -> Example:
    """Of any tag; recall has a context of any length there may be, short ones more often, and several questions; so
    have tools and choose."""
    if kind == "choose":
        return draw(words, kind, words.pick(TAGS[kind]), turns=words.between(1, 6))
    if kind == "tools":
        return draw(words, kind, words.pick(TOOL_TAGS), turns=words.between(1, 8))
    if not kind.startswith("recall"):
        return draw(words, kind, words.pick(TAGS[kind]))
    most = longest_context(progress)
    size = int(SMALLEST_CONTEXT * (most / SMALLEST_CONTEXT) ** (words.random() ** 0.8))
    return draw(words, kind, str(size), turns=words.between(1, min(16, 2 + size // 150)))


def stream(
    model: bytes, seed: int, length: int, progress: Sequence[float], forbidden: frozenset[str], shares: dict[str, float]
) -> Iterator[Batch]:
    """Training batches without end, with `shares` of their tokens from each kind; `progress[0]` is read for each
    example. No example that is in `forbidden` (fingerprints) comes."""
    encoder, words = Encoder(model), Words(random.Random(f"stream/{seed}"), "train")
    made = dict.fromkeys(shares, 0.0)
    waiting: list[Encoded] = []
    size = 0
    while True:
        while size < length:
            kind = min(made, key=lambda k: made[k] / shares[k])
            example = training_example(words, kind, progress[0])
            if example.fingerprint() in forbidden:
                continue
            ids, what = encoder.encode(example)
            made[kind] += len(ids)
            waiting.append((ids, what, KINDS.index(kind)))
            size += len(ids)
        words.rng.shuffle(waiting)
        batch, waiting = pack(waiting, length, encoder.pad)
        size = sum(len(ids) for ids, *_ in waiting)
        yield batch


def evaluation_batches(model: bytes, examples: Sequence[Example], length: int) -> list[Batch]:
    """The examples packed; a batch's groups are indices into `examples`."""
    encoder = Encoder(model)
    left = [(*encoder.encode(example), i) for i, example in enumerate(examples)]
    left.sort(key=lambda item: -len(item[0]))
    batches = []
    while left:
        batch, left = pack(left, length, encoder.pad)
        batches.append(batch)
    return batches


class Feed:
    """Batches from `workers` processes, forked: make it before CUDA is used."""

    def __init__(
        self,
        model: bytes,
        workers: int,
        seed: int,
        length: int,
        forbidden: frozenset[str],
        shares: dict[str, float],
        progress: float = 0.0,
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._progress = context.Array("d", [progress])
        self._queue = context.Queue(QUEUED)
        each = [(model, seed * 1000 + i, length, self._progress.get_obj(), forbidden, shares) for i in range(workers)]
        self._workers = [context.Process(target=_work, args=(self._queue, *args), daemon=True) for args in each]
        for worker in self._workers:
            worker.start()

    def next(self, progress: float) -> Batch:
        """The next batch; later ones will be for this share of the training."""
        self._progress[0] = progress
        while True:
            try:
                return Batch(*self._queue.get(timeout=20))
            except queue.Empty:
                if not all(worker.is_alive() for worker in self._workers):
                    raise RuntimeError("a process that makes batches died") from None

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()


def _work(out: multiprocessing.Queue, *args: object) -> None:
    for batch in stream(*args):
        out.put((batch.columns, batch.starts))
