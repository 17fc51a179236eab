"""Tensor parallelism over several GPUs. Rank 0 schedules; the other ranks, each a process, follow its plans.

    rank 0   plan step n | send    | launch n | plan n+1 | send    | launch n+1 ...
    rank 1                 receive | launch n            | receive | launch n+1 ...

A follower runs the same steps with its part of the model. It plans the kernels' work itself, from the same integers, so
that all ranks make the same calls in the same order. Only rank 0's sampled tokens count: they are copied to the other
ranks on the device when the next step begins. If one rank fails, the others cannot recover: the worker ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from radixrt.checkpoint.lora_modules import LoraModule
from radixrt.config import WorkerConfig
from radixrt.messages import Run, Sampling
from radixrt.worker.execution.prefix_sharing import Path as Nodes
from radixrt.worker.parallel.group import leave
from radixrt.worker.plan import GroupLost, Moves, Plan, Result, StateWork
from radixrt.worker.request import Request

if TYPE_CHECKING:
    from radixrt.worker.execution.torch_runner import ModelRunner

log = logging.getLogger("radixrt.ranks")

STOP_SECONDS = 10.0
"""How long followers may take to end before they are killed."""
FAIL_SECONDS = 2.0
"""How long rank 0 may take to end in order after a follower has ended."""
KEPT_REQUESTS = 1 << 14
"""How many requests a follower remembers, beyond those of the step."""


# ---------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class ReceivedPlan(Plan):
    """A Plan as a follower has it: its requests are stand-ins, so `wants_logits` was sent along."""

    logits_wanted: bool = False

    @property
    def wants_logits(self) -> bool:
        return self.logits_wanted


class Bind(msgspec.Struct, tag="bind", array_like=True):
    """The page table's rows and columns (`Runner.bind`)."""

    rows: int
    columns: int


class PutAdapter(msgspec.Struct, tag="adapter", array_like=True):
    """Read a LoRA adapter and make it the one of number `slot` (`Runner.put_adapter`)."""

    slot: int
    name: str
    path: str


class Step(msgspec.Struct, tag="step", array_like=True):
    """A Plan: its arrays as bytes, its requests by `Request.number`, `Plan.wants_logits`, and the tree paths
    (`sharing.Path`) that rank 0 looked up, by index of the request."""

    step: int
    requests: list[int]
    rows: bytes
    starts: bytes
    counts: bytes
    tokens: bytes
    slots: bytes
    wants: bytes
    samples: bytes
    table_writes: bytes
    wants_logits: bool
    paths: dict[int, list[tuple[int, int]]]
    states: tuple[bytes, bytes, bytes, bytes, bytes] | None = None
    """Slots, restores, saves, within and runs of `Plan.states`."""
    adapters: bytes | None = None
    moves: tuple[bytes, bytes, bytes, bytes] | None = None
    """The fields of `Plan.moves`."""

    @classmethod
    def of(cls, plan: Plan, paths: Mapping[int, Nodes]) -> Step:
        arrays = (plan.rows, plan.starts, plan.counts, plan.tokens, plan.slots, plan.wants, plan.samples)
        return cls(
            plan.step,
            [request.number for request in plan.requests],
            *(array.tobytes() for array in arrays),
            plan.table_writes.tobytes(),
            plan.wants_logits,
            {index: list(path) for index, path in paths.items()},
            (work := plan.states)
            and tuple(x.tobytes() for x in (work.slots, work.restores, work.saves, work.within, work.runs)),
            None if plan.adapters is None else plan.adapters.tobytes(),
            (moves := plan.moves)
            and tuple(x.tobytes() for x in (moves.offload, moves.onload, moves.states_offload, moves.states_onload)),
        )

    def plan(self, requests: tuple[Request, ...]) -> Plan:
        """The Plan with stand-ins for its requests."""
        arrays = (self.rows, self.starts, self.counts, self.tokens, self.slots, self.wants)
        integers = [_array(array, np.int32) for array in arrays]
        writes = _array(self.table_writes, np.int32).reshape(3, -1)
        states = None
        if self.states is not None:
            slots, *copies, within, runs = (_array(x, np.int32) for x in self.states)
            states = StateWork(slots, *(x.reshape(2, -1) for x in copies), within.reshape(3, -1), runs)
        adapters = None if self.adapters is None else _array(self.adapters, np.int32)
        moves = self.moves and Moves(*(_array(x, np.int32).reshape(2, -1) for x in self.moves))
        return ReceivedPlan(
            self.step, requests, *integers, _array(self.samples, np.bool_), writes, states=states, adapters=adapters,
            moves=moves, logits_wanted=self.wants_logits,
        )  # fmt: skip


def _array(content: bytes, dtype: type) -> np.ndarray:
    """A writable copy: torch warns of read-only arrays."""
    return np.frombuffer(content, dtype).copy()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Bind | PutAdapter | Step).decode


@dataclass(frozen=True, slots=True)
class RankConfig:
    """What a follower needs: the worker's config, its rank, the folder through which the ranks join their group, and
    the file descriptor of its pipe from rank 0."""

    worker: WorkerConfig
    rank: int
    folder: str
    pipe: int


# ---------------------------------------------------------------- rank 0


class Followers:
    """The processes of the other ranks, and the pipes to them. If one of them ends, so does this process."""

    def __init__(self, config: WorkerConfig) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="radixrt-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)  # in case `close` is not called
        self._closing = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        for rank in range(1, config.tensor_parallel_size):
            theirs, mine = Pipe(duplex=False)
            with theirs:
                self._processes.append(_start(RankConfig(config, rank, str(self.folder), theirs.fileno())))
            self._pipes.append(mine)
            threading.Thread(target=self._watch, args=(rank,), name=f"rank-{rank}", daemon=True).start()

    def send(self, message: Bind | PutAdapter | Step) -> None:
        payload = _encode(message)
        for pipe in self._pipes:
            pipe.send_bytes(payload)

    def _watch(self, rank: int) -> None:
        """End this process if a follower ends: rank 0 would otherwise wait for it on the device for ever."""
        code = self._processes[rank - 1].wait()
        if not self._closing.is_set():
            log.error("rank %d ended with code %s: the worker ends", rank, code)
            if not self._closing.wait(FAIL_SECONDS):
                shutil.rmtree(self.folder, ignore_errors=True)
                os._exit(1)

    def dismiss(self) -> None:
        """Close the pipes, at which followers leave the group. Idempotent."""
        self._closing.set()
        for pipe in self._pipes:
            pipe.close()

    def kill(self) -> None:
        """End the processes at once: they may be stopped, or wait on the device."""
        self._closing.set()
        for process in self._processes:
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """End the processes, and wait for them. Idempotent."""
        self.dismiss()
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.stdin.close()  # followers end when it closes
        for process in self._processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _start(config: RankConfig) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "radixrt.worker.parallel.follower"],
        stdin=subprocess.PIPE,
        start_new_session=True,
        pass_fds=(config.pipe,),
    )
    with contextlib.suppress(BrokenPipeError):  # it has ended already: `_watch` reports that
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
    return process


class Leader:
    """The Runner of rank 0, which sends each step to the followers before it launches it."""

    def __init__(self, runner: ModelRunner, followers: Followers) -> None:
        self._runner = runner
        self._followers = followers
        self._sent = self._lost = False
        runner.on_planned = self._send

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def _send(self, plan: Plan, paths: Mapping[int, Nodes]) -> None:
        self._sent = True
        self._followers.send(Step.of(plan, paths))

    def bind(self, table: np.ndarray) -> None:
        self._followers.send(Bind(*table.shape))
        self._runner.bind(table)

    def put_adapter(self, slot: int, module: LoraModule, adapter: Any) -> None:
        """Here first: what does not fit is refused before the others hear of it."""
        self._runner.put_adapter(slot, module, adapter)
        self._followers.send(PutAdapter(slot, *module))

    def launch(self, plan: Plan) -> Callable[[], Result]:
        self._sent = False
        try:
            wait = self._runner.launch(plan)
        except Exception as error:
            if not self._sent:
                raise
            raise self._lose(plan) from error

        def read() -> Result:
            try:
                return wait()
            except Exception as error:
                raise self._lose(plan) from error

        return read

    def _lose(self, plan: Plan) -> GroupLost:
        self._lost = True
        return GroupLost(f"step {plan.step} failed on rank 0 alone")

    def sample_deferred(self) -> None:
        self._runner.sample_deferred()

    def kill(self) -> None:
        self._followers.kill()

    def close(self) -> None:
        self._followers.dismiss()
        if not self._lost:  # otherwise ranks may wait for each other on the device
            self._runner.close()
            leave()
        self._followers.close()


# ---------------------------------------------------------------- the other ranks


class _LeaseStandIn:
    """Takes the place of a request's lease: its path is the one that rank 0 sent last."""

    __slots__ = ("nodes",)

    def __init__(self) -> None:
        self.nodes: Nodes | None = None

    def path(self) -> Nodes:
        if self.nodes is None:
            raise GroupLost("rank 0 has not looked up a path that this rank wants")
        return self.nodes


class StandIns:
    """A follower's stand-ins for rank 0's requests: always the same one for the same number."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def plan(self, step: Step) -> Plan:
        for number in step.requests:
            self._requests[number] = self._requests.pop(number, None) or _stand_in(number)
        while len(self._requests) > KEPT_REQUESTS + len(step.requests):
            del self._requests[next(iter(self._requests))]
        requests = tuple(self._requests[number] for number in step.requests)
        for index, request in enumerate(requests):
            path = step.paths.get(index)
            request.lease.nodes = None if path is None else tuple(path)
        return step.plan(requests)


def _stand_in(number: int) -> Request:
    """A greedy request: how it samples does not matter, as only rank 0's tokens count."""
    run = Run(id=number, namespace="", ids=bytes(4), prompt_len=1, sampling=Sampling(temperature=0.0))
    request = Request(run, 1, frozenset())
    request.lease = _LeaseStandIn()
    return request


def follow(runner: ModelRunner, pipe: Connection) -> None:
    """Run the steps that rank 0 sends. Raises EOFError when rank 0 has closed the pipe."""
    book = StandIns()
    wait_before: Callable[[], Result] | None = None
    table = np.zeros((0, 0), dtype=np.int32)
    while True:
        message = _decode(pipe.recv_bytes())
        if isinstance(message, Bind):
            table = np.zeros((message.rows, message.columns), dtype=np.int32)
            runner.bind(table)
            continue
        if isinstance(message, PutAdapter):
            if wait_before is not None:
                wait_before()
                wait_before = None
            module = LoraModule(message.name, message.path)
            runner.put_adapter(message.slot, module, runner.read_adapter(module))
            continue
        plan = book.plan(message)
        rows, columns, pages = plan.table_writes
        table[rows, columns] = pages
        wait = runner.launch(plan)
        if wait_before is not None:
            wait_before()
        wait_before = wait if runner.overlaps else None
