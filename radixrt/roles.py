"""What a process of the stack is: a router, a worker or a front end. Each role imports what it needs, and no more."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from radixrt import wire
from radixrt.config import FrontendConfig, RouterConfig, WorkerConfig, check, flag, gpu_count
from radixrt.garbage import settle
from radixrt.messages import Leave
from radixrt.wire.addresses import check_shared
from radixrt.wire.watch import watched

if TYPE_CHECKING:
    from radixrt.worker.drafting import Drafter
    from radixrt.worker.loop import Worker
    from radixrt.worker.plan import Runner

log = logging.getLogger("radixrt.roles")

ROLES = {"router": RouterConfig, "worker": WorkerConfig, "frontend": FrontendConfig}
ORPHAN_SECONDS = 10.0
"""Time that a process has to leave after its parent is gone."""
FAKE_VOCAB = 32_000
FAKE_TOKENS = 1 << 20
"""Token slots of a worker without a model, unless said otherwise."""


def read_config(role: str) -> Any:
    """The configuration that the parent has written to this process's stdin."""
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=ROLES[role])


def follow_parent() -> None:
    """From now on this process ends when its stdin closes: by SIGTERM, and for good if that is not enough."""

    def watch() -> None:
        # Not through sys.stdin: its lock, held by a daemon thread, would abort the interpreter's own exit.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def check_role(config: Any) -> None:
    """ValueError, in one line, names a setting of a process that cannot be."""
    check(config)
    if isinstance(config, RouterConfig):
        check_address("client_address", config.client_address, listens=True)
        check_address("worker_address", config.worker_address, listens=True)
    else:
        check_address("router", config.router)


def check_address(name: str, address: str, *, listens: bool = False) -> None:
    """ValueError, with the flag of the setting `name`, for one where processes cannot meet."""
    try:
        check_shared(address, listens=listens)
    except ValueError as problem:
        raise ValueError(f"{flag(name)}: {problem}") from None


def run_role(role: str, config: Any) -> None:
    """Be the process `role` until SIGTERM or SIGINT. Imports what that role needs, and no more."""
    match role:
        case "router":
            if config.http:
                from radixrt.frontend import server

                server.run_with_router(config)
            else:
                from radixrt.router import process

                process.run(config)
        case "frontend":
            from radixrt.frontend import server

            with watched(config.router):
                server.run(config)
        case "worker":
            worker = make_worker(config)
            settle()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: worker.stop())
            with watched(config.router):
                _serve(worker)
            for number in (signal.SIGTERM, signal.SIGINT):  # it ends: told once more, it still ends well
                signal.signal(number, signal.SIG_IGN)
            if worker.dismissed:  # it has ended well for who would start it again
                log.error("worker %s ends: %s", config.name, worker.dismissed)
            from radixrt.worker.status import LIFE

            say_leave(config.router, config.name, "stopped", os.getpid(), LIFE, planned=True)


def _serve(worker: Worker) -> None:
    """Run until told to stop. If the device is lost, or the ranks no longer agree, the process ends at once: kernels on
    the GPU may wait for ever, for example for a rank that is gone."""
    from radixrt.worker.plan import DeviceLost, GroupLost

    try:
        worker.run()
    except (DeviceLost, GroupLost):
        log.exception("the worker ends")
        os._exit(1)


def make_worker(config: WorkerConfig) -> Worker:
    """The worker of a resolved `config`, its model loaded (or none, with `fake`)."""
    runner = make_runner(config)
    try:
        return _worker_of(config, runner)
    except BaseException:
        runner.close()
        raise


def _worker_of(config: WorkerConfig, runner: Runner) -> Worker:
    from radixrt.worker.grammar import Grammars
    from radixrt.worker.loop import Identity, Worker
    from radixrt.worker.scheduler import Limits
    from radixrt.worker.status import LIFE

    ends, stopped = itertools.count(), threading.Event()

    def connect() -> wire.Link:
        identity = f"{config.name}/{LIFE:x}/{next(ends)}".encode()  # each thread has its own
        return wire.Link(config.router, identity, stopped=stopped, monitored=True)

    more = 0 if config.fake else config.tensor_parallel_size - 1
    device = f"{config.device} and {more} more" if more else config.device
    identity = Identity(config.name, config.served_model_name, getattr(runner, "kv_dtype", ""), device)
    limits = Limits(max_num_batched_tokens=config.max_num_batched_tokens, max_num_seqs=config.max_num_seqs)
    return Worker(
        runner,
        identity,
        connect,
        limits=limits,
        drafter=make_drafter(config, runner),
        max_model_len=config.max_model_len,
        check=config.check,
        grammars=Grammars(config.model, runner.vocab_size, runner.eos_ids, jump_forward=config.jump_forward),
        max_pinned_share=config.max_pinned_share,
        stopped=stopped,
    )


def make_drafter(config: WorkerConfig, runner: Runner) -> Drafter | None:
    """What drafts tokens, if anything does. ValueError names a bad setting."""
    from radixrt.worker.drafting import MOST_SPARSE, Drafter

    if config.speculative_algorithm not in ("auto", "ngram", "none"):
        raise ValueError(f"speculative_algorithm: {config.speculative_algorithm!r}; expected auto, ngram or none")
    if config.speculative_num_draft_tokens < 1:
        raise ValueError(f"speculative_num_draft_tokens: {config.speculative_num_draft_tokens}, at least 1")
    if config.speculative_algorithm != "ngram":
        return None
    among = MOST_SPARSE if runner.sparse else sys.maxsize
    return Drafter(config.speculative_num_draft_tokens, overlaps=runner.overlaps, among=among)


def make_runner(config: WorkerConfig) -> Runner:
    """The model on its device, or the fake with the time model of `config.fake`. ValueError names a bad setting."""
    if not config.fake:
        # OpenMP's threads would spin for each other: where anything else wants a core, a step takes ten times as long.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from radixrt.worker.loading import load_runner

        try:
            return load_runner(config)
        except (RuntimeError, AssertionError) as error:  # torch's, which comes before all else
            if has_device(config.device):
                raise
            why = str(error).partition("\n")[0] or type(error).__name__
            raise ValueError(f"--device {config.device}: there is none ({why})") from error
    from radixrt.worker.fake import FakeRunner

    try:
        prefill_rate, decode_step = (float(part) for part in config.fake.split(","))
    except ValueError:
        raise ValueError(f"fake: expected PREFILL_TOKENS_PER_S,DECODE_STEP_S, not {config.fake!r}") from None
    num_pages = (config.max_total_tokens or FAKE_TOKENS) // config.page_size + 1
    vocab_size = fake_vocab_size(config.model)
    return FakeRunner(num_pages, config.page_size, vocab_size, prefill_rate=prefill_rate, decode_step=decode_step)


def has_device(name: str) -> bool:
    """Whether there is a device of that name, as far as this can be told without torch."""
    kind, _, number = name.partition(":")
    return kind != "cuda" or int(number or 0) < gpu_count()


def fake_vocab_size(folder: str) -> int:
    """The vocabulary of the checkpoint that a fake stands for, so that its tokens are text; FAKE_VOCAB without one."""
    path = Path(folder, "config.json")
    return msgspec.json.decode(path.read_bytes()).get("vocab_size", FAKE_VOCAB) if path.is_file() else FAKE_VOCAB


def say_leave(router: str, name: str, reason: str, pid: int | None, life: int = 0, *, planned: bool = False) -> None:
    """Tell the router that worker `name` is gone, if that is process `pid` (None: any) of a `life` (0: any); `planned`
    as of a Leave."""
    with wire.Link(router) as link:
        link.send(wire.encode(Leave(name, reason, pid or 0, life, planned)))
        link.close(linger=1.0)
