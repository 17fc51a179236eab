"""Threads that tenants share, and what a step waits for."""

from __future__ import annotations

import threading
import time

import pytest

from radixrt.worker.structured import fair, watch
from radixrt.worker.structured.fair import FairThreads
from radixrt.worker.structured.watch import Task, Watch
from tests.waiting import eventually


class Gate:
    """Work that is held until `open`."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.held = threading.Event()

    def work(self, name: str):
        def run() -> str:
            self.begun.append(name)
            assert self.held.wait(20)
            return name

        return run


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.held.set()


def test_a_tenants_hopeless_work_holds_up_nobody_else(gate):
    threads = FairThreads("test", most=3, each=2)
    held = [threads.submit("a", gate.work(f"a{n}")) for n in range(5)]
    assert threads.submit("b", lambda: "b").future.result(20) == "b"
    assert gate.begun == ["a0", "a1"] and threads.queued("a") == 3 and threads.queued("b") == 0
    assert held[0].is_overdue(0.0, time.monotonic() + 1) and not held[4].is_overdue(0.0, time.monotonic() + 1)
    gate.held.set()
    assert [job.future.result(20) for job in held] == ["a0", "a1", "a2", "a3", "a4"]


def test_each_tenant_has_a_thread(gate, monkeypatch):
    """However many have hopeless work, up to a bound."""
    monkeypatch.setattr(fair, "MAX_THREADS", 7)
    threads = FairThreads("test", most=3, each=2)
    jobs = [threads.submit(f"evil {n // 2}", gate.work(f"{n}")) for n in range(10)]
    assert threads.submit("good", lambda: "good").future.result(20) == "good"
    eventually(lambda: len(gate.begun) == 6)
    assert sorted(gate.begun) == ["0", "1", "2", "4", "6", "8"]
    last = threads.submit("one", gate.work("one")), threads.submit("too many", gate.work("too many"))
    assert threads.queued("too many") == 1
    gate.held.set()
    assert [job.future.result(20) for job in jobs] == [f"{n}" for n in range(10)]
    assert [job.future.result(20) for job in last] == ["one", "too many"]


def test_tenants_take_turns(gate, monkeypatch):
    monkeypatch.setattr(fair, "MAX_THREADS", 1)
    threads = FairThreads("test", most=1, each=1)
    first, order = threads.submit("a", gate.work("first")), []
    jobs = [threads.submit(tenant, lambda name=tenant: order.append(name)) for tenant in "aaabbc"]
    gate.held.set()
    for job in (first, *jobs):
        job.future.result(20)
    assert order == ["a", "b", "c", "a", "b", "a"]


def test_what_no_thread_has_begun_can_be_cancelled(gate):
    threads = FairThreads("test", most=1, each=1)
    first, second = threads.submit("a", gate.work("first")), threads.submit("a", gate.work("second"))
    assert threads.cancel(second) and not threads.cancel(second) and not threads.cancel(first)
    gate.held.set()
    assert first.future.result(20) == "first" and second.future.cancelled()
    assert threads.submit("a", lambda: 1 / 1).future.result(20) == 1
    assert isinstance(threads.submit("a", lambda: 1 / 0).future.exception(20), ZeroDivisionError)
    assert gate.begun == ["first"]


def test_a_step_goes_on_without_a_late_task(gate, monkeypatch):
    monkeypatch.setattr(watch, "LATE_SECONDS", 0.05)
    done: list[int] = []
    tasks = [Task(tenant, lambda n=n: done.append(n)) for n, tenant in enumerate("babaca")]
    tasks[1] = Task("a", gate.work("late"))
    one = Watch()
    one.run(tasks)
    assert [task.done for task in tasks] == [True, False, True, False, True, False], "the others of its tenant wait"
    assert [task.begun for task in tasks] == [True, True, True, False, True, False] and done == [0, 2, 4]
    again = [Task("a", lambda: done.append(9)), Task("b", lambda: done.append(10))]
    one.run(again)
    assert done[3:] == [9, 10] and all(task.done for task in again), "another thread serves the next step"


def test_the_late_task_may_be_the_last(gate, monkeypatch):
    monkeypatch.setattr(watch, "LATE_SECONDS", 0.05)
    tasks = [Task("b", lambda: None), Task("a", gate.work("late"))]
    Watch().run(tasks)
    assert [task.done for task in tasks] == [True, False]


def test_many_tasks_of_a_tenant_are_late_together(monkeypatch):
    monkeypatch.setattr(watch, "LATE_SECONDS", 0.1)
    tasks = [Task("a", lambda: time.sleep(0.03)) for _ in range(20)] + [Task("b", lambda: None)]
    Watch().run(tasks)
    assert tasks[0].done and not tasks[19].done and not tasks[19].begun and tasks[20].done
