"""A worker that is killed at any moment and started again: what it reads of disk is what it wrote, and the router's
index is right from its first message on."""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import pytest

from radixrt.messages import Heartbeat, Run, Sampling, StepDone, Stop, ToRouter
from radixrt.router.placement.index import Index
from tests.worker.test_simulation import VOCAB, alone

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ToRouter).decode
PAGES = 4000


class PipeLink:
    """A worker's end. That of its heartbeats has no pipe."""

    def __init__(self, pipe: Connection | None) -> None:
        self._pipe = pipe

    def send(self, payload: bytes) -> None:
        if self._pipe is not None:
            self._pipe.send_bytes(payload)

    def recv(self, timeout: float | None) -> bytes | None:
        assert self._pipe is not None
        return self._pipe.recv_bytes() if self._pipe.poll(timeout) else None

    def broke(self) -> bool:
        return False

    def close(self) -> None:
        pass


def serve(pipe: Connection, folder: Path, overlaps: bool) -> None:
    """The process: a worker with a fake runner that checks what it reads."""
    from radixrt.worker.cache import disk_policy
    from radixrt.worker.disk import DiskStore
    from radixrt.worker.execution.fake_runner import FakeRunner
    from radixrt.worker.loop import Identity, Worker
    from radixrt.worker.scheduler.scheduler import Limits

    disk_policy.READ_SECONDS, disk_policy.MIN_WAIT = -1e9, 30.0
    runner = FakeRunner(
        PAGES, 1, VOCAB, check=True, overlaps=overlaps, num_host_pages=PAGES,
        store=lambda: DiskStore(folder, 64 << 20, "test", min_free=0),
    )  # fmt: skip
    links = iter([PipeLink(pipe), PipeLink(None)])
    limits = Limits(max_num_batched_tokens=64, max_num_seqs=8)
    Worker(runner, Identity("w", "model"), lambda: next(links), limits=limits, check=True).run()


class Process:
    """A worker's process, and the router's side of its link."""

    def __init__(self, folder: Path, overlaps: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, folder, overlaps), daemon=True)
        self._process.start()
        theirs.close()
        self.index = Index()
        self.index.add_worker(0, fresh=True)
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, int] = {}
        """By id, its cached tokens."""
        self.receive(lambda: self.heard)

    heard = 0
    """How often it has told its state."""

    def send(self, message: object) -> None:
        self._pipe.send_bytes(_encode(message))

    def receive(self, until, seconds: float = 60.0) -> bool:
        """Whether it came so far in that time."""
        deadline = time.monotonic() + seconds
        while not until():
            if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                return False
            message = _decode(self._pipe.recv_bytes())
            if isinstance(message, StepDone):
                assert self.index.apply(0, message), "no event is missing"
                self.heard += 1
                for output in message.outputs:
                    assert not output.error, output.error
                    self.tokens.setdefault(output.id, []).extend(output.tokens)
                    if output.finish:
                        self.ended[output.id] = output.cached_tokens
            else:
                assert not isinstance(message, Heartbeat)
        return True

    def finish(self, id: int) -> None:
        assert self.receive(lambda: id in self.ended)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def stop(self) -> None:
        self.send(Stop())
        self._process.join(20)
        assert self._process.exitcode == 0


def ids(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def ask(worker: Process, id: int, prompt: list[int], namespace: str) -> int:
    """Returns what the index expects to be cached."""
    known = worker.index.match(namespace, ids(prompt)).get(0, 0)
    sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
    worker.send(Run(id=id, namespace=namespace, ids=ids(prompt), prompt_len=len(prompt), sampling=sampling))
    return min(known, len(prompt) - 1)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [3, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("overlaps", [False, True], ids=["one-by-one", "overlapped"])
def test_a_worker_that_is_killed_at_any_moment_serves_no_wrong_token(
    tmp_path: Path, kills: int, overlaps: bool
) -> None:
    """Conversations in two namespaces that begin alike; the worker is killed while some of their turns are under way.
    Of what was under way, the client asks again."""
    rng, id, read = random.Random(kills), 0, 0
    trunk = [rng.randint(3, 900) for _ in range(40)]
    histories = [trunk + [rng.randint(3, 900) for _ in range(5)] for _ in range(6)]
    for kill in range(kills + 1):
        worker = Process(tmp_path, overlaps)
        for n in rng.sample(range(len(histories)), 3):  # at once: the first request meets an index that is right
            id += 1
            prompt = histories[n] = [*histories[n], rng.randint(3, 900)]
            expected = ask(worker, id, prompt, f"tenant{n % 2}\n\n\n")
            worker.finish(id)
            assert worker.tokens[id] == alone(prompt, 8)
            assert worker.ended[id] == expected, "what the index says is what there is"
            read += expected
            histories[n] = prompt + worker.tokens[id]
        time.sleep(rng.choice([0, 0.005, 0.02, 0.1]))
        for n in rng.sample(range(len(histories)), 2):
            id += 1
            ask(worker, id, [*histories[n], rng.randint(3, 900)], f"tenant{n % 2}\n\n\n")
        worker.receive(lambda: False, rng.random() * 0.05)
        if kill < kills:
            worker.kill()
    worker.stop()
    assert read > 40 * kills, "most of it was on disk"
    again = Process(tmp_path, overlaps)
    for n, history in enumerate(histories):
        if len(history) > 100:
            assert again.index.match(f"tenant{n % 2}\n\n\n", ids(history)).get(0, 0) >= 40
    again.stop()


def test_a_conversation_hits_to_its_last_token_after_kill_9(tmp_path: Path) -> None:
    prompt = list(range(3, 200))
    worker = Process(tmp_path, True)
    ask(worker, 1, prompt, "a\n\n\n")
    assert worker.receive(lambda: 1 in worker.ended)
    history = prompt + worker.tokens[1]
    time.sleep(1.0)  # the last unwritten moments may be lost
    worker.kill()
    again = Process(tmp_path, True)
    assert ask(again, 2, [*history, 7], "a\n\n\n") == len(history) - 1, "the index knows before the first request"
    assert again.receive(lambda: 2 in again.ended)
    assert again.tokens[2] == alone([*history, 7], 8) and again.ended[2] >= len(history) - 1
    again.kill()
