"""The worker's loop over a link in memory: what it says, and what it makes of what it hears."""

from __future__ import annotations

import os
import queue
import threading
import time
from array import array
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from radixrt.messages import (
    Abort,
    Draining,
    Heartbeat,
    Register,
    Resync,
    Run,
    Sampling,
    Saved,
    StepDone,
    Stop,
    Stored,
    ToRouter,
    Unknown,
)
from radixrt.messages.digests import prefix_digest
from radixrt.process.watchdog import Watchdog
from radixrt.worker import loop
from radixrt.worker.execution.fake_runner import FakeRunner, fake_token
from radixrt.worker.execution.torch_runner import ModelRunner
from radixrt.worker.loop import Identity, Worker
from radixrt.worker.plan import DeviceLost
from radixrt.worker.request import from_run
from radixrt.worker.scheduler.scheduler import Limits
from radixrt.worker.scheduler.state_checkpoints import TAIL
from radixrt.worker.speculative.ngram import Drafter
from radixrt.worker.status import INCARNATION
from tests.waiting import eventually

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ToRouter).decode
GREEDY = Sampling(max_tokens=8, temperature=0.0)


class MemoryLink:
    """One end; the test holds the queues."""

    def __init__(self, router: Router) -> None:
        self.router, self.inbox, self.outbox, self.closed = router, router.inbox, router.outbox, False
        self.breaks = router.breaks

    def send(self, payload: bytes) -> None:
        assert not self.closed
        if self.router.deaf:
            raise TimeoutError
        self.outbox.put(_decode(payload))

    def recv(self, timeout: float | None) -> bytes | None:
        try:
            return self.inbox.get(block=timeout != 0, timeout=timeout or None)
        except queue.Empty:
            return None

    def broke(self) -> bool:
        before, self.breaks = self.breaks, self.router.breaks
        return before != self.breaks

    def close(self) -> None:
        self.closed = True


class Router:
    """The test's side of the link."""

    def __init__(self) -> None:
        self.inbox: queue.Queue = queue.Queue()
        self.outbox: queue.Queue = queue.Queue()
        self.messages: list = []
        self.deaf = False
        """It reads nothing."""
        self.breaks = 0
        """Of the connection."""

    def connect(self) -> MemoryLink:
        return MemoryLink(self)

    def tell(self, message: object) -> None:
        self.inbox.put(message if isinstance(message, bytes) else _encode(message))

    def hear(self, until, seconds: float = 30.0) -> list:
        """Receive until `until(messages so far)`; heartbeats are left out."""
        deadline = time.monotonic() + seconds
        while not until(self.messages):
            message = self.outbox.get(timeout=max(0.01, deadline - time.monotonic()))
            if not isinstance(message, Heartbeat):
                self.messages.append(message)
        return self.messages

    def outputs(self, id: int) -> list:
        steps = [m for m in self.messages if isinstance(m, StepDone)]
        return [output for step in steps for output in step.outputs if output.id == id]

    def finished(self, *ids: int) -> None:
        self.hear(lambda _: all(any(o.finish for o in self.outputs(id)) for id in ids))


@pytest.fixture(autouse=True, params=[False, True], ids=["one-by-one", "overlapped"])
def overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every test, with steps one after the other and with a step planned while the one before runs."""
    monkeypatch.setattr(FakeRunner, "OVERLAPS", request.param, raising=False)
    return request.param


@contextmanager
def worker(runner: FakeRunner | None = None, drafter: Drafter | None = None, **limits):
    router = Router()
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 8} | limits
    runner = runner or FakeRunner(num_pages=400, check=True)
    runner.overlaps = FakeRunner.OVERLAPS
    limits = Limits(**sizes)
    serving = Worker(runner, Identity("w", "model"), router.connect, limits=limits, check=True, drafter=drafter)
    thread = threading.Thread(target=serving.run)
    thread.start()
    try:
        yield router, serving
    finally:
        serving.stop()
        router.tell(Stop())  # it need not wait until it looks up by itself
        thread.join(5)
        assert not thread.is_alive()


def run(id: int, tokens, sampling: Sampling = GREEDY, **changes) -> Run:
    fields = {"namespace": "n", "ids": array("i", tokens).tobytes(), "prompt_len": len(tokens)} | changes
    return Run(id=id, sampling=sampling, **fields)


def test_a_pool_that_shortens_contexts_is_warned_of(caplog):
    for pages, length in ((400, 399), (401, 400)):
        caplog.clear()
        with worker(FakeRunner(num_pages=pages, max_model_len=400)) as (router, _):
            assert router.hear(bool)[0].max_model_len == length
        assert ("at most 399 tokens, not 400" in caplog.text) == (length < 400)


def test_what_steps_of_decodes_take_is_learned(monkeypatch):
    """From the end of the step before to their own; after a pause, from when they were launched."""
    clock = SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: clock.now, now=0.0)
    monkeypatch.setattr(loop, "time", clock)

    class Steady(FakeRunner):
        def launch(self, plan):
            wait = super().launch(plan)

            def read():
                clock.now += 0.01
                return wait()

            return read

    steps, drafter = [], Drafter(8, overlaps=True)
    drafter.begins = lambda request, requests: False
    monkeypatch.setattr(drafter.costs, "add", lambda rows, seconds: steps.append((rows, seconds)))
    with worker(Steady(num_pages=400), drafter=drafter) as (router, serving):
        for id in (1, 2):
            router.tell(run(id, range(3, 20)))  # the second is cached, and a decode from the first step on
            router.finished(id)
            eventually(lambda: not serving._inflight and not serving.scheduler.has_work)
            clock.now += 0.3
    assert 12 <= len(steps) <= 16 and {rows for rows, _ in steps} == {1}
    assert [seconds for _, seconds in steps] == pytest.approx([0.01] * len(steps))


def test_it_registers_first_and_serves():
    with worker() as (router, serving):
        router.tell(run(1, [5, 6, 7]))
        router.finished(1)
        first = router.messages[0]
        assert isinstance(first, Register)
        assert (first.name, first.model, first.total_pages, first.vocab_size) == ("w", "model", 399, 32_000)
        tokens = [t for o in router.outputs(1) for t in o.tokens]
        expected, last = [], 7
        for position in range(2, 10):
            expected.append(last := fake_token(last, position, 32_000))
        assert tokens == expected
        assert router.outputs(1)[-1].finish == "length"


def test_one_message_a_step():
    with worker() as (router, serving):
        for id in range(1, 6):
            router.tell(run(id, [id] * 5))
        router.finished(*range(1, 6))
        steps = [m for m in router.messages if isinstance(m, StepDone) and m.outputs]
        assert len(steps) <= serving.scheduler.steps and max(len(s.outputs) for s in steps) > 1


def test_its_load_has_what_the_step_under_way_computes(overlaps):
    """Nothing of a prompt is out of sight: it is queued, or in the step that has just begun."""
    with worker(FakeRunner(num_pages=800, decode_step=0.002, check=True)) as (router, _):
        router.tell(run(1, [5, 6, 7], Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)))
        router.hear(lambda _: router.outputs(1))
        router.tell(run(2, range(10, 210)))
        router.finished(2)
        loads = [m.load for m in router.messages if isinstance(m, StepDone)]
    assert loads[0].newest_run == 1 and loads[-1].newest_run == 2
    after = [load for load in loads if load.newest_run == 2]
    launched = sum(load.launched_tokens for load in after)
    assert launched in (199, 200) if overlaps else launched == 0  # the last one alone is no chunk
    first = after[0].queued_tokens + after[0].launched_tokens
    assert 195 <= first <= 200 if overlaps else first == 137


def test_its_load_has_what_is_kept():
    """Of requests that end while others wait."""
    with worker(FakeRunner(num_pages=100, check=True)) as (router, serving):
        serving.scheduler.cache.retained.continuation_rate = 1.0
        for id in range(1, 4):
            router.tell(run(id, [id] * 60))
        router.finished(1, 2, 3)
        loads = [m.load for m in router.messages if isinstance(m, StepDone)]
    assert any(load.waiting and load.kept_tokens >= 59 for load in loads) and not loads[-1].kept_tokens


def test_its_load_has_requests_that_wait_for_their_grammar():
    serving = Worker(FakeRunner(num_pages=400), Identity("w", "model"), Router().connect, limits=Limits(64, 8))
    serving._compiling._waiting[1] = from_run(run(1, range(5, 35)), 100, 1000, frozenset()), Future(), 1e9
    assert serving._load().queued_tokens == 30


def test_events_are_numbered_without_gaps():
    with worker(FakeRunner(num_pages=40, check=True)) as (router, serving):
        for id in range(1, 12):
            router.tell(run(id, [id, 2, 3, 4, 5, 6, 7, 8]))
        router.finished(*range(1, 12))
        steps = [m for m in router.messages if isinstance(m, StepDone)]
        expected = 0
        for step in steps:
            assert step.seq == expected
            expected += len(step.events)
        assert any(not isinstance(e, Stored) for s in steps for e in s.events), "something was evicted"
        router.tell(Resync())
        answer = router.hear(lambda messages: isinstance(messages[-1], StepDone) and messages[-1].resync)[-1]
        stored = sum(len(e.ids) // 4 for e in answer.events if isinstance(e, Stored))
        assert stored == serving.cache.prefixes.tree.tokens and answer.seq == serving._seq


def test_the_router_is_told_where_prefixes_can_be_continued():
    prompt = list(range(3, 203))
    with worker(FakeRunner(num_pages=900, check=True, num_states=9)) as (router, serving):
        router.tell(run(1, prompt))
        router.finished(1)
        router.tell(Resync())
        *steps, answer = router.hear(lambda messages: isinstance(messages[-1], StepDone) and messages[-1].resync)
    assert steps[0].num_states == 9
    saved = [e for step in steps[1:] for e in step.events if isinstance(e, Saved)]
    assert saved == [e for e in answer.events if isinstance(e, Saved)]
    assert saved[0].tokens == 200 - TAIL < 200 < saved[1].tokens, "within the prompt, and at the end of the answer"
    assert saved[0].digest == prefix_digest("n", array("i", prompt[:-TAIL]).tobytes())


def test_an_aborted_request_frees_its_pages():
    slow = FakeRunner(num_pages=400, decode_step=0.002, check=True)
    with worker(slow) as (router, serving):
        router.tell(run(1, [5, 6, 7], Sampling(max_tokens=300, temperature=0.0)))
        router.hear(lambda _: len(router.outputs(1)) > 3)
        router.tell(Abort([1, 99]))
        router.tell(run(2, [8, 9]))
        router.finished(2)
        assert not any(o.finish for o in router.outputs(1))
        assert serving.cache.leased_pages == 0 and not serving.scheduler.has_work


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (run(1, []), "ids"),
        (run(1, [5], ids=b"abc"), "ids"),
        (run(1, [-1, 5]), "vocabulary"),
        (run(1, [32_000]), "vocabulary"),
        (run(1, [5, 6], prompt_len=3), "prompt_len"),
        (run(1, [5, 6], prompt_len=0), "prompt_len"),
        (run(1, [5] * 500), "at most 399"),
        (run(1, [5, 6], score_from=0), "score_from"),
        (run(1, [5, 6], score_from=3), "score_from"),
        (run(1, [5, 6], adapter="sql"), "adapter: 'sql' is not loaded"),
    ],
)
def test_a_bad_run_fails_and_others_go_on(bad, word):
    with worker() as (router, _):
        router.tell(bad)
        router.tell(run(2, [5, 6, 7]))
        router.finished(1, 2)
        last = router.outputs(1)[-1]
        assert last.finish == "error" and word in last.error and not last.field, "the router's fault"
        assert router.outputs(2)[-1].finish == "length"


@pytest.mark.parametrize(
    "garbage", [b"", b"\xc1", b"\x81\xa4type", _encode({"type": "dance"}), _encode([1, 2]), b"x" * 999]
)
def test_garbage_is_dropped(garbage):
    with worker() as (router, _):
        router.tell(garbage)
        router.tell(run(1, [5, 6, 7]))
        router.finished(1)
        assert router.outputs(1)[-1].finish == "length"


class FailingRunner(FakeRunner):
    """Fails in the steps numbered `failing`."""

    failing = (2,)

    def launch(self, plan):
        if plan.step in self.failing:
            raise RuntimeError("out of memory, say")
        return super().launch(plan)


def test_a_step_that_fails_takes_only_its_requests_along():
    with worker(FailingRunner(num_pages=400, check=True)) as (router, serving):
        router.tell(run(1, [5, 6, 7]))
        router.finished(1)
        assert "out of memory, say" in router.outputs(1)[-1].error
        router.tell(run(2, [5, 6, 7]))
        router.finished(2)
        assert router.outputs(2)[-1].finish == "length"
        assert serving.cache.leased_pages == 0


def test_a_step_behind_a_failed_one_is_not_sampled():
    """It is waited for, and fails as well; the worker goes on."""

    class Broken(FakeRunner):
        def launch(self, plan):
            wait = super().launch(plan)
            return (lambda: 1 / 0) if plan.step == 3 else wait

    with worker(Broken(num_pages=400, check=True)) as (router, serving):
        for id in (1, 2):
            router.tell(run(id, [5, 6, 7], Sampling(max_tokens=8, temperature=0.0, logprobs=0)))
            router.finished(id)
        assert [router.outputs(id)[-1].finish for id in (1, 2)] == ["error", "length"]
        assert serving.cache.leased_pages == 0


@pytest.mark.parametrize("when", ["launch", "wait", "draw"])
def test_a_worker_whose_device_is_lost_ends(when, overlaps):
    """It fails nothing: who is sent its requests anew does better."""

    class Broken(FakeRunner):
        left = False

        def fail(self, where):
            if where == when and self.steps_done > 3:
                raise RuntimeError("an illegal memory access, say")

        @property
        def steps_done(self):
            return len(self.steps)

        def launch(self, plan):
            self.fail("launch")
            wait = super().launch(plan)
            return lambda: self.fail("wait") or wait()

        def sample_deferred(self, inputs):
            self.fail("draw")
            super().sample_deferred(inputs)

        def works(self):
            return self.steps_done <= 3

        def close(self):
            self.left = True

    runner, router = Broken(num_pages=400, check=True), Router()
    runner.overlaps = overlaps
    serving = Worker(runner, Identity("w", "model"), router.connect, limits=Limits(64, 8), check=True)
    router.tell(run(1, [5, 6, 7], Sampling(temperature=0.0, logprobs=0)))
    late = threading.Timer(5, serving.stop)
    late.start()
    with pytest.raises(DeviceLost, match="illegal memory access"):
        serving.run()
    late.cancel()
    while not router.outbox.empty():
        router.messages.append(router.outbox.get())
    assert [o.tokens for o in router.outputs(1)] and not any(o.finish for o in router.outputs(1))
    assert runner.left


def test_a_gpu_that_raises_whatever_it_is_asked_is_lost(monkeypatch):
    asked = []

    def synchronize(device):
        asked.append(device)
        if len(asked) > 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("torch.cuda.synchronize", synchronize)
    gpu, cpu = (SimpleNamespace(_device=SimpleNamespace(type=kind)) for kind in ("cuda", "cpu"))
    assert [ModelRunner.works(one) for one in (cpu, gpu, gpu, cpu)] == [True, True, False, True]
    assert asked == [gpu._device] * 2


class LateRunner(FakeRunner):
    """The first step fails when its result is asked for."""

    def launch(self, plan):
        wait = super().launch(plan)

        def fail():
            raise RuntimeError("out of memory, say")

        return fail if plan.step == 1 else wait


def test_what_a_step_reads_of_one_that_fails_before_it_is_not_cached(overlaps):
    """The second request leases what the first was to compute, and its own step is in flight when that fails."""
    runner = LateRunner(num_pages=400, check=True)
    runner.overlaps = overlaps
    serving = Worker(runner, Identity("w", "model"), Router().connect, limits=Limits(64, 8), check=True)
    prompt, outputs = list(range(5, 55)), []
    serving._add(run(1, prompt))
    outputs += serving._step()
    serving._add(run(2, [*prompt, 3]))
    outputs += serving._step()
    failed = {(o.id, o.error) for o in outputs if o.finish == "error"}
    assert failed == {(id, "the step failed: out of memory, say") for id in ((1, 2) if overlaps else (1,))}
    if overlaps:
        assert serving.cache.prefixes.tree.tokens == 0 and serving._inflight is None and not serving.scheduler.has_work
    serving._add(run(3, [*prompt, 4]))
    while serving.scheduler.has_work or serving._inflight:
        outputs = serving._step()
    assert outputs[-1].finish == "length" and outputs[-1].cached_tokens == (0 if overlaps else 50)


def test_a_router_that_has_started_anew():
    """Requests of the one before are dropped, what is cached stays, and their ids mean others now."""
    long, prompt = Sampling(max_tokens=300, temperature=0.0, ignore_eos=True), list(range(5, 40))
    with worker(FakeRunner(num_pages=400, decode_step=0.005, check=True)) as (router, serving):
        router.tell(run(1, prompt, long))
        router.tell(run(2, prompt, long))
        router.hear(lambda _: router.outputs(1) and router.outputs(2))
        router.tell(Unknown())
        router.hear(lambda messages: sum(isinstance(m, Register) for m in messages) == 2)
        assert serving._newest_run == 0, "its ids begin anew"
        router.messages.clear()
        router.tell(run(1, prompt))
        router.finished(1)
        assert sum(len(o.tokens) for o in router.outputs(1)) == GREEDY.max_tokens
        assert router.outputs(1)[-1].cached_tokens == len(prompt) - 1
        assert not router.outputs(2) and not serving.scheduler.ids
        router.tell(Resync())
        router.hear(lambda messages: any(isinstance(m, StepDone) and m.resync for m in messages))


def test_a_connection_that_breaks():
    """What was under way is lost, in either direction: all requests come again, and steps are counted anew."""
    long, prompt = Sampling(max_tokens=300, temperature=0.0, ignore_eos=True), list(range(5, 40))
    with worker(FakeRunner(num_pages=400, decode_step=0.005, check=True)) as (router, serving):
        router.tell(run(1, prompt, long))
        router.hear(lambda _: len(router.outputs(1)) > 2)
        assert [m.number for m in router.messages if isinstance(m, StepDone)][:3] == [1, 2, 3]
        router.breaks += 1
        router.hear(lambda messages: sum(isinstance(m, Register) for m in messages) == 2)
        router.messages.clear()
        router.tell(run(2, prompt))
        router.finished(2)
        assert not router.outputs(1) and not serving.scheduler.ids
        steps = [m.number for m in router.messages if isinstance(m, StepDone)]
        assert steps == list(range(1, len(steps) + 1))


def test_a_router_that_does_not_read_for_long(monkeypatch):
    """Requests are dropped, what is cached is kept, and the first that it reads again is a Register."""
    monkeypatch.setattr(loop, "HEARTBEAT_SECONDS", 0.02)
    long, prompt = Sampling(max_tokens=300, temperature=0.0, ignore_eos=True), list(range(5, 40))
    with worker(FakeRunner(num_pages=400, decode_step=0.002, check=True)) as (router, serving):
        router.tell(run(1, prompt, long))
        router.hear(lambda _: router.outputs(1))
        router.deaf = True
        eventually(lambda: not serving.scheduler.ids)
        time.sleep(0.1)
        while not router.outbox.empty():
            router.outbox.get()
        router.messages.clear()
        router.deaf = False
        assert isinstance(router.hear(len)[0], Register)
        router.tell(run(1, prompt))
        router.finished(1)
        assert router.outputs(1)[-1].cached_tokens == len(prompt) - 1
        router.hear(lambda messages: any(isinstance(m, StepDone) for m in messages))


def test_stop_ends_the_loop():
    with worker() as (router, serving):
        first = router.hear(len)[0]
        assert isinstance(first, Register) and (first.pid, first.incarnation) == (os.getpid(), INCARNATION)
        router.tell(Stop())
        assert serving._stopped.wait(30)
        assert not serving.dismissed


def test_why_a_worker_must_stop_is_kept():
    with worker() as (router, serving):
        router.tell(Stop("two are called so"))
        assert serving._stopped.wait(5) and serving.dismissed == "two are called so"


def test_no_step_is_under_way_when_the_runner_is_closed():
    """What a step waits for on a device may end with the runner."""

    class Counting(FakeRunner):
        under_way, left = 0, None

        def launch(self, plan):
            wait = super().launch(plan)
            self.under_way += 1

            def read():
                result = wait()
                self.under_way -= 1
                return result

            return read

        def close(self):
            self.left = self.under_way

    runner = Counting(num_pages=4096, decode_step=0.01)
    with worker(runner) as (router, serving):
        router.tell(run(1, [5, 6, 7], Sampling(max_tokens=2000, temperature=0.0, ignore_eos=True)))
        router.hear(lambda seen: any(isinstance(message, StepDone) and message.outputs for message in seen))
        serving.stop()
    assert runner.left == 0


def test_a_long_step_does_not_stop_the_heart(monkeypatch):
    monkeypatch.setattr(loop, "HEARTBEAT_SECONDS", 0.05)
    begun, goes_on = threading.Event(), threading.Event()

    class Long(FakeRunner):
        def launch(self, plan):
            begun.set()
            assert goes_on.wait(30)
            return super().launch(plan)

    with worker(Long(num_pages=400)) as (router, _):
        router.tell(run(1, [5, 6, 7]))
        assert begun.wait(30)
        with router.outbox.mutex:
            router.outbox.queue.clear()
        for _ in range(3):
            beat = router.outbox.get(timeout=30)
            assert isinstance(beat, Heartbeat) and (beat.pid, beat.incarnation) == (os.getpid(), INCARNATION)
        goes_on.set()


def test_what_depends_on_the_tokens_before_is_sampled_when_they_are_known(overlaps):
    """A request with penalties is launched on a token that the host may not know, and drawn when it does."""
    seen, late = [], []

    class Watching(FakeRunner):
        def launch(self, plan):
            seen.extend(int(t) for r, t in zip(plan.requests, plan.tokens, strict=False) if r.needs_host_tokens)
            self.plan = plan
            return super().launch(plan)

        def sample_deferred(self, inputs):
            super().sample_deferred(inputs)
            for b, (tokens, over) in enumerate(self.histories(self.plan)):
                if self.plan.samples[b] and not over:
                    late.append(int(self.plan.starts[b] + self.plan.counts[b]) - len(tokens))

    with worker(Watching(num_pages=400, check=True)) as (router, _):
        router.tell(run(1, [5, 6, 7], Sampling(max_tokens=8, temperature=0.0, frequency_penalty=0.5)))
        router.tell(run(2, [5, 6, 8]))
        router.finished(1, 2)
    assert (-1 in seen) == overlaps
    assert late and set(late) == {0}, "all tokens before the one to be drawn"
    expected, last = [], 7
    for position in range(2, 10):
        expected.append(last := fake_token(last, position, 32_000))
    assert [t for o in router.outputs(1) for t in o.tokens] == expected


@pytest.mark.parametrize(("rate", "seconds"), [(0.0, 0.01 + 2 * 0.001), (100.0, 0.01 + 2 * 0.001 + 5 / 100)])
def test_steps_of_the_fake_take_as_long_as_is_said(rate, seconds):
    runner = FakeRunner(prefill_rate=rate, decode_step=0.01, decode_each=0.001)
    plan = SimpleNamespace(tokens=np.zeros(7), counts=np.array([1, 5, 1]), moves=None)
    assert runner._seconds(plan) == pytest.approx(seconds)


# ---------------------------------------------------------------- getting on, and leaving


class Stuck(FakeRunner):
    """Its steps wait for `go`, once it is clear."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.go = threading.Event()
        self.go.set()

    def launch(self, plan):
        wait = super().launch(plan)

        def read():
            assert self.go.wait(30)
            return wait()

        return read


def beats(router: Router, until) -> Heartbeat:
    """The first heartbeat that `until` holds of; other messages are kept."""
    while True:
        message = router.outbox.get(timeout=30)
        if not isinstance(message, Heartbeat):
            router.messages.append(message)
        elif until(message):
            return message


def test_heartbeats_say_for_how_long_no_step_has_ended(monkeypatch):
    monkeypatch.setattr(loop, "HEARTBEAT_SECONDS", 0.02)
    hung, runner = threading.Event(), Stuck(num_pages=400)
    with worker(runner) as (router, serving):
        serving.watchdog = Watchdog(0.1)
        serving.on_hang = hung.set
        router.tell(run(1, [5, 6, 7]))
        router.finished(1)
        beats(router, lambda beat: beat.stalled == 0.0)
        runner.go.clear()
        router.tell(run(2, [5, 6, 7]))
        assert not beats(router, lambda beat: beat.stalled > 0.0).stuck
        assert beats(router, lambda beat: beat.stuck).stalled > 0.1
        assert hung.wait(30)
        runner.go.set()
        router.finished(2)
        beats(router, lambda beat: beat.stalled == 0.0 and not beat.stuck)
        assert not any(beats(router, lambda _: True).stuck for _ in range(20)), "it has nothing to do"


def test_whatever_the_loop_waits_for_is_noticed(monkeypatch):
    """Not only a step: a plan, or an adapter that is put into its slot."""
    monkeypatch.setattr(loop, "HEARTBEAT_SECONDS", 0.02)
    go = threading.Event()
    with worker() as (router, serving):
        serving.watchdog = Watchdog(0.1)
        plan = serving.scheduler.plan
        monkeypatch.setattr(serving.scheduler, "plan", lambda: (go.wait(30), plan())[1])
        router.tell(run(1, [5, 6, 7]))
        beats(router, lambda beat: beat.stuck)
        go.set()
        router.finished(1)


def test_who_plans_nothing_though_there_is_work_does_not_get_on(monkeypatch):
    monkeypatch.setattr(loop, "HEARTBEAT_SECONDS", 0.02)
    with worker() as (router, serving):
        serving.watchdog = Watchdog(0.1)
        plan = serving.scheduler.plan
        monkeypatch.setattr(serving.scheduler, "plan", lambda: None)
        router.tell(run(1, [5, 6, 7]))
        beats(router, lambda beat: beat.stuck)
        serving.scheduler.plan = plan
        router.finished(1)


def test_a_worker_that_is_told_to_stop_says_so_and_finishes():
    runner = Stuck(num_pages=400)
    with worker(runner) as (router, serving):
        serving._shutdown_timeout = 60.0
        runner.go.clear()
        router.tell(run(1, [5, 6, 7]))
        eventually(lambda: serving.scheduler.has_work or serving._inflight)
        serving.drain()
        runner.go.set()
        router.finished(1)
        router.hear(lambda messages: any(isinstance(m, Draining) for m in messages))
        (said,) = (m for m in router.messages if isinstance(m, Draining))
        assert (said.name, said.pid, said.incarnation) == ("w", os.getpid(), INCARNATION)
        assert not serving._stopped.is_set(), "the router says when"
        router.tell(Stop(restart=True))
        eventually(serving._stopped.is_set)
        assert serving.restart and not serving.dismissed


def test_a_worker_that_drains_says_so_again_when_it_joins_again():
    """A router that has started anew does not know."""
    with worker(FakeRunner(num_pages=400, decode_step=0.005)) as (router, serving):
        serving._shutdown_timeout = 60.0
        router.tell(run(1, [5, 6, 7], Sampling(max_tokens=300, temperature=0.0, ignore_eos=True)))
        eventually(lambda: serving.scheduler.has_work)
        serving.drain()
        router.hear(lambda messages: any(isinstance(m, Draining) for m in messages))
        router.messages.clear()
        router.tell(Unknown())
        router.hear(lambda messages: any(isinstance(m, Draining) for m in messages), 0.5)
        assert [type(m) for m in router.messages if isinstance(m, Register | Draining)] == [Register, Draining]


def test_told_twice_or_without_a_router_it_stops_by_itself(monkeypatch):
    monkeypatch.setattr(loop, "NO_ROUTER_SECONDS", 0.05)
    for times, timeout in ((1, 60.0), (2, 60.0), (1, 0.0)):
        with worker() as (_, serving):
            serving._shutdown_timeout = timeout
            for _ in range(times):
                serving.drain()
            assert serving._stopped.is_set() == (times == 2 or not timeout)
            eventually(serving._stopped.is_set)


def test_a_worker_that_cannot_finish_in_time_stops():
    runner = FakeRunner(num_pages=40_000, decode_step=0.01)
    with worker(runner) as (router, serving):
        serving._shutdown_timeout = 0.05
        router.tell(run(1, [5, 6, 7], Sampling(max_tokens=30_000, ignore_eos=True)))
        eventually(lambda: serving.scheduler.has_work)
        serving.drain()
        eventually(serving._stopped.is_set)
