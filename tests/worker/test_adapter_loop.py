"""The worker's loop while LoRA adapters come and go."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from radixrt.messages import (
    Adapter,
    AdapterLoaded,
    Grammar,
    LoadAdapter,
    Register,
    Sampling,
    Stop,
    Unknown,
    UnloadAdapter,
)
from radixrt.worker.execution.fake_runner import FakeRunner
from radixrt.worker.loop import Identity, Worker
from radixrt.worker.scheduler.scheduler import Limits
from radixrt.worker.structured.fair import Job
from tests.worker.test_loop import Router, run

LONG = 300


class Watched(FakeRunner):
    """Knows how many of its steps are in flight when an adapter is put into a slot."""

    def __init__(self, overlaps: bool) -> None:
        super().__init__(num_pages=4000, decode_step=0.0005, check=True, overlaps=overlaps)
        self.flying = 0
        self.put: list[tuple[int, str]] = []

    def launch(self, plan):
        wait = super().launch(plan)
        self.flying += 1

        def landed():
            self.flying -= 1
            return wait()

        return landed

    def read_adapter(self, module):
        return module.path

    def put_adapter(self, slot, module, adapter):
        assert self.flying == 0, "a step that may use the slot is running"
        self.put.append((slot, adapter))


@contextmanager
def worker(overlaps: bool, grammars=None):
    router, runner = Router(), Watched(overlaps)
    identity = Identity("w", "model", adapters=("first",), max_loras=1)
    limits = Limits(max_num_batched_tokens=64, max_num_seqs=8)
    serving = Worker(runner, identity, router.connect, limits=limits, grammars=grammars, check=True)
    thread = threading.Thread(target=serving.run)
    thread.start()
    try:
        yield router, runner
    finally:
        serving.stop()
        router.tell(Stop())
        thread.join(5)
        assert not thread.is_alive()


def loaded(router: Router, count: int) -> list[AdapterLoaded]:
    router.hear(lambda _: sum(isinstance(m, AdapterLoaded) for m in router.messages) >= count)
    return [m for m in router.messages if isinstance(m, AdapterLoaded)]


def long_run(id: int, name: str, version: int):
    sampling = Sampling(max_tokens=LONG, temperature=0.0, ignore_eos=True)
    return run(id, [5, 6, id], sampling, adapter=name, version=version, namespace=f"{name} {version}")


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_former_version_serves_until_its_last_request_has_ended(overlaps):
    with worker(overlaps) as (router, runner):
        router.tell(long_run(1, "first", 0))
        router.hear(lambda _: router.outputs(1))
        router.tell(LoadAdapter(Adapter("first", 7, "seven")))
        assert loaded(router, 1) == [AdapterLoaded(Adapter("first", 7, "seven"))]
        router.tell(long_run(2, "first", 0))  # it was sent before the router knew
        router.tell(UnloadAdapter("first", 0))
        router.tell(long_run(3, "first", 0))
        router.tell(LoadAdapter(Adapter("first", 8, "eight")))
        router.tell(long_run(4, "first", 7))
        router.hear(lambda _: router.outputs(4) and router.outputs(3))
        assert runner.put == [(1, "seven")], "version 8 has to wait: requests 1 and 2 run"
        assert [o.error for o in router.outputs(3)] == ["adapter: 'first' is not loaded"]
        assert loaded(router, 2)[1] == AdapterLoaded(Adapter("first", 8, "eight"))
        assert runner.put == [(1, "seven"), (0, "eight")]
        assert all(sum(len(o.tokens) for o in router.outputs(id)) == LONG for id in (1, 2))
        router.finished(4)


def test_a_request_that_waits_for_its_grammar_keeps_its_adapter():
    job = Job("", lambda: None)
    grammars = SimpleNamespace(job=lambda grammar, tenant: job, cancel=lambda grammar, tenant: None)
    with worker(True, grammars) as (router, runner):
        router.tell(run(1, [5, 6, 7], Sampling(grammar=Grammar("json")), adapter="first"))
        router.tell(LoadAdapter(Adapter("first", 7, "seven")))
        loaded(router, 1)
        router.tell(UnloadAdapter("first", 0))
        router.tell(LoadAdapter(Adapter("first", 8, "eight")))
        router.tell(long_run(2, "first", 7))
        router.finished(2)
        assert runner.put == [(1, "seven")], "version 8 has to wait for request 1"
        job.future.set_exception(ValueError("grammar: it is none"))
        loaded(router, 2)
        assert runner.put == [(1, "seven"), (0, "eight")]
        router.hear(lambda _: router.outputs(1))
        assert [o.error for o in router.outputs(1)] == ["grammar: it is none"]


def test_it_joins_again_with_what_it_has_now():
    with worker(True) as (router, _):
        router.tell(LoadAdapter(Adapter("sql", 7, "seven")))
        loaded(router, 1)
        router.tell(UnloadAdapter("first", 0))
        router.tell(Unknown())
        router.hear(lambda _: sum(isinstance(m, Register) for m in router.messages) == 2)
        first, second = (m for m in router.messages if isinstance(m, Register))
        assert (first.adapters, first.max_loras) == ([Adapter("first")], 1)
        assert second.adapters == [Adapter("sql", 7, "seven")]


def test_what_cannot_be_read_is_told_and_disturbs_nobody():
    with worker(True) as (router, runner):
        runner.read_adapter = lambda module: FakeRunner.read_adapter(runner, module)
        router.tell(long_run(1, "first", 0))
        router.tell(LoadAdapter(Adapter("sql", 7, "/nowhere")))
        assert loaded(router, 1)[0].error == "sql: there is no folder /nowhere"
        router.finished(1)
        assert runner.put == []
