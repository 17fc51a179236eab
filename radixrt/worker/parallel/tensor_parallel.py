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
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from radixrt.checkpoint.lora_modules import LoraModule
from radixrt.config import WorkerConfig
from radixrt.messages.ranks import (
    Bind,
    MakeMoves,
    PutAdapter,
    ReadPart,
    RequestInfo,
    RunStep,
    ToRank,
    TreePath,
    WritePart,
)
from radixrt.worker.cache.host_disk import HostDisk
from radixrt.worker.parallel.group import leave
from radixrt.worker.parallel.ranked_disk import FollowerDisk, RankedDisk
from radixrt.worker.plan import GroupLost, Moves, Plan, Result, SampleInputs

if TYPE_CHECKING:
    from radixrt.worker.execution.torch_runner import ModelRunner

log = logging.getLogger("radixrt.ranks")

STOP_SECONDS = 10.0
"""How long followers may take to end before they are killed."""
FAIL_SECONDS = 2.0
"""How long rank 0 may take to end in order after a follower has ended."""


# ---------------------------------------------------------------- messages


class PlanEncoder:
    """Packs plans for the other ranks."""

    def __init__(self) -> None:
        self._before: tuple[tuple[RequestInfo, ...], tuple[TreePath, ...]] = (), ()

    def pack(self, plan: Plan) -> RunStep:
        """The message that runs the next step."""
        (before, paths), self._before = self._before, (plan.requests, plan.paths)
        requests: list[RequestInfo | int] | None = None
        if plan.requests is not before:
            known = {request.number for request in before}
            requests = [request.number if request.number in known else request for request in plan.requests]
        return RunStep(
            msgspec.Raw(_encode_plan(replace(plan, requests=(), paths=()))),
            requests,
            None if plan.paths is paths else list(plan.paths),
        )


class PlanDecoder:
    """Unpacks what a PlanEncoder has packed, in the same order."""

    def __init__(self) -> None:
        self._requests: tuple[RequestInfo, ...] = ()
        self._paths: tuple[TreePath, ...] = ()

    def unpack(self, step: RunStep) -> Plan:
        if step.requests is not None:
            known = {request.number: request for request in self._requests}
            self._requests = tuple(known[one] if isinstance(one, int) else one for one in step.requests)
        if step.paths is not None:
            self._paths = tuple(step.paths)
        return replace(_decode_plan(step.plan), requests=self._requests, paths=self._paths)


def _pack_array(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    if not isinstance(array, np.ndarray):
        raise NotImplementedError(f"a plan has no {type(array).__name__}")
    return array.dtype.str, array.shape, array.tobytes()


def _unpack_array(kind: type, packed: Any) -> np.ndarray:
    """A writable copy: torch warns of read-only arrays."""
    dtype, shape, content = packed
    return np.frombuffer(content, dtype).reshape(shape).copy()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ToRank).decode
_encode_plan = msgspec.msgpack.Encoder(enc_hook=_pack_array).encode
_decode_moves = msgspec.msgpack.Decoder(Moves, dec_hook=_unpack_array).decode
_decode_plan = msgspec.msgpack.Decoder(Plan, dec_hook=_unpack_array).decode


@dataclass(frozen=True, slots=True)
class RankConfig:
    """What a follower needs: the worker's config, its rank, the folder through which the ranks join their group, and
    the file descriptors of its pipes from rank 0, and to it."""

    worker: WorkerConfig
    rank: int
    folder: str
    pipe: int
    answers: int


# ---------------------------------------------------------------- rank 0


class Followers:
    """The processes of the other ranks, and the pipes to them. If one of them ends, so does this process."""

    def __init__(self, config: WorkerConfig) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="radixrt-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)  # in case `close` is not called
        self._closing = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self.answers: list[Connection] = []
        """What other ranks say."""
        for rank in range(1, config.tensor_parallel_size):
            (theirs, mine), (answers, say) = Pipe(duplex=False), Pipe(duplex=False)
            with theirs, say:
                ends = theirs.fileno(), say.fileno()
                self._processes.append(_start(RankConfig(config, rank, str(self.folder), *ends)))
            self._pipes.append(mine)
            self.answers.append(answers)
            threading.Thread(target=self._watch, args=(rank,), name=f"rank-{rank}", daemon=True).start()

    def send(self, message: ToRank) -> None:
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
        for pipe in (*self._pipes, *self.answers):
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
            assert process.stdin is not None
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
        pass_fds=(config.pipe, config.answers),
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already: `_watch` reports that
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
    return process


class Leader:
    """The Runner of rank 0, which sends each step to the followers before it launches it."""

    def __init__(self, runner: ModelRunner, followers: Followers) -> None:
        self._runner = runner
        self._followers = followers
        self._plans = PlanEncoder()
        self._sent = self._lost = False
        runner.on_planned = self._send
        if isinstance(own := getattr(runner, "disk", None), HostDisk):
            runner.disk = RankedDisk(own, followers.send, followers.answers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def _send(self, plan: Plan) -> None:
        self._sent = True
        self._followers.send(self._plans.pack(plan))

    def bind(self, table: np.ndarray) -> None:
        self._followers.send(Bind(*table.shape))
        self._runner.bind(table)

    def move(self, moves: Moves) -> None:
        self._followers.send(MakeMoves(msgspec.Raw(_encode_plan(moves))))
        self._runner.move(moves)

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

    def sample_deferred(self, inputs: SampleInputs) -> None:
        self._runner.sample_deferred(inputs)

    def kill(self) -> None:
        self._followers.kill()

    def close(self) -> None:
        self._followers.dismiss()
        if not self._lost:  # otherwise ranks may wait for each other on the device
            self._runner.close()
            leave()
        self._followers.close()


# ---------------------------------------------------------------- the other ranks


def follow(runner: ModelRunner, pipe: Connection, answers: Connection | None = None) -> None:
    """Run the steps that rank 0 sends. Raises EOFError when rank 0 has closed the pipe."""
    plans = PlanDecoder()
    disk = None
    if isinstance(own := getattr(runner, "disk", None), HostDisk) and answers is not None:
        disk = FollowerDisk(own, answers)
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
        if isinstance(message, WritePart | ReadPart):
            assert disk is not None
            disk.do(message)
            continue
        if isinstance(message, MakeMoves):
            runner.move(_decode_moves(message.moves))
            continue
        plan = plans.unpack(message)
        rows, columns, pages = plan.table_writes
        table[rows, columns] = pages
        wait = runner.launch(plan)
        if wait_before is not None:
            wait_before()
        wait_before = wait if runner.overlaps else None
