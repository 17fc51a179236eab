"""Scheduler, cache and a checking fake runner under random loads: what comes out is what each request gives alone."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixrt.messages import Run, Sampling
from radixrt.worker.cache.eviction import POLICIES
from radixrt.worker.cache.page_cache import PageCache
from radixrt.worker.execution.fake_runner import EOS, FakeRunner, fake_logprob, fake_token
from radixrt.worker.plan import Plan
from radixrt.worker.request import Request
from radixrt.worker.scheduler.scheduler import Limits, Scheduler
from tests.worker.engine import draw

VOCAB = 1000


class Bench:
    """A scheduler over a fake runner that checks every KV slot it would read."""

    overlaps = False

    def __init__(
        self,
        pages: int = 200,
        page_size: int = 1,
        chunk: int = 16,
        rows: int = 4,
        max_len: int = 128,
        states: int = 0,
        host: int = 0,
        host_states: int = 0,
        policy: str = "lru",
    ):
        self.runner = FakeRunner(
            pages + 1, page_size, VOCAB, max_len, check=True, overlaps=self.overlaps, num_states=states and states + 1,
            num_host_pages=host and host + 1, num_host_states=host_states and host_states + 1,
        )  # fmt: skip
        self.cache = PageCache(
            pages + 1, page_size, rows, max_len, num_states=self.runner.num_states,
            num_host_pages=self.runner.num_host_pages, num_host_states=self.runner.num_host_states,
            eviction_policy=policy,
        )  # fmt: skip
        self.scheduler = Scheduler(self.cache, Limits(chunk, rows))
        self.runner.bind(self.cache.requests.table)
        self.runner.histories = self.scheduler.histories
        self.mirror = np.zeros_like(self.cache.requests.table)
        """What a device has of the page table, which is told what changes."""
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, str] = {}
        self.cached: dict[int, int] = {}
        self.scores: dict[int, list[float]] = {}
        self.inflight = None

    def add(self, id: int, prompt: list[int], max_tokens: int = 8, namespace: str = "", **extra: object) -> Request:
        ids = np.array(prompt, dtype=np.int32).tobytes()
        run = Run(id=id, namespace=namespace, ids=ids, prompt_len=len(prompt),
                  sampling=Sampling(max_tokens=max_tokens, ignore_eos=True), **extra)  # fmt: skip
        request = Request(run, len(prompt) + max_tokens, frozenset({EOS}))
        self.scheduler.add(request)
        self.tokens[id] = []
        return request

    def step(self) -> int:
        """One step; how many tokens it computed. With a runner that overlaps, the result taken in is the one before."""
        plan = self.plan()
        self.cache.check()
        finishing, self.inflight = self.inflight, (plan, self.runner.launch(plan)) if plan else None
        if finishing:
            self.finish_step(*finishing)
        if plan:
            draw(self.scheduler, self.runner, plan)
        if not self.runner.overlaps:
            finishing, self.inflight = self.inflight, None
            if finishing:
                self.finish_step(*finishing)
        if plan is None:
            return 0
        assert len(plan.tokens) <= self.scheduler.limits.max_num_batched_tokens
        return len(plan.tokens)

    def plan(self) -> Plan | None:
        """The next step, of whose requests a device has the right pages."""
        plan = self.scheduler.plan()
        if plan is not None:
            rows, places, pages = plan.table_writes
            self.mirror[rows, places] = pages
            for row in set(plan.rows.tolist()):
                pages = self.cache.requests.of(row)
                assert np.array_equal(self.mirror[row, : len(pages)], pages), "what changes is told"
        return plan

    def finish_step(self, plan, wait) -> None:
        for output in self.scheduler.apply(plan, wait()):
            self.tokens[output.id] += output.tokens
            self.scores.setdefault(output.id, []).extend(output.scores or [])
            if output.finish:
                self.finish[output.id] = output.finish
                self.cached[output.id] = output.cached_tokens
        self.cache.check()
        for request in self.scheduler._waiting:
            if request.hit_version == self.cache.prefixes.version and not request.finished:
                assert request.hit == self.cache.requests.hit(request), "a hit that is not looked up again is right"

    def drain(self, steps: int = 10_000) -> None:
        while self.scheduler.has_work:
            assert steps > 0, "no progress"
            finishing = self.inflight
            assert self.step() > 0 or finishing, "a step that computes nothing"
            steps -= 1


@pytest.fixture(autouse=True, params=[False, True], ids=["one-by-one", "overlapped"])
def overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test, with steps one after the other and with a step planned while the one before runs."""
    monkeypatch.setattr(Bench, "overlaps", request.param)


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    out = list(prompt)
    for _ in range(max_tokens):
        out.append(fake_token(out[-1], len(out) - 1, VOCAB))
    return out[len(prompt) :]


def random_prompt(rng: random.Random, trunks: list[list[int]]) -> list[int]:
    trunk = rng.choice(trunks)
    return trunk[: rng.randint(0, len(trunk))] + [rng.randint(3, 9) for _ in range(rng.randint(1, 12))]


@pytest.mark.parametrize("host", [0, 7, 100])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("pages", [24, 48, 400])
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 6))])
def test_random_load(seed: int, pages: int, page_size: int, host: int) -> None:
    rng = random.Random(seed)
    pages = max(pages // page_size, 16)
    chunk, rows = rng.choice([5, 16, 64]), rng.choice([1, 3, 8])
    bench = Bench(pages, page_size, chunk, rows, max_len=60, host=host, policy=list(POLICIES)[seed % 3])
    trunks = [[rng.randint(3, 9) for _ in range(30)] for _ in range(3)]
    expected: dict[int, list[int]] = {}
    aborted = set()
    room = bench.cache.total_pages * page_size
    for id in range(60):
        prompt = random_prompt(rng, trunks)
        want = rng.randint(0, min(10, room - len(prompt)) if room > len(prompt) else 0)
        if len(prompt) + want > min(room, 60):
            continue
        bench.add(id, prompt, want, namespace=rng.choice(["", "b"]), priority=id % 3 - 1)
        expected[id] = alone(prompt, want)
        for _ in range(rng.randint(0, 3)):
            bench.step()
        if rng.random() < 0.1:
            victim = rng.choice(list(expected))
            if bench.scheduler.abort(victim):
                aborted.add(victim)
            bench.cache.check()
        elif rng.random() < 0.05:
            bench.cache.clear()
            bench.cache.check()
            assert bench.cache.evictable_pages == 0
    bench.drain()
    assert bench.cache.leased_pages == 0
    for id, tokens in expected.items():
        if id in aborted:
            assert bench.tokens[id] == tokens[: len(bench.tokens[id])]
        else:
            assert (bench.tokens[id], bench.finish[id]) == (tokens, "length")


def test_a_new_prefix_is_computed_once_in_one_step() -> None:
    bench = Bench(pages=5000, chunk=8192, rows=8, max_len=4096)
    prefix = list(range(10, 910)) * 2 + list(range(10, 210))
    for id in range(5):
        bench.add(id, [*prefix, 300 + id, 400 + id], 4)
    assert bench.step() == len(prefix) + 5 * 2
    bench.drain()
    assert [bench.cached[id] for id in range(5)] == [0, 2000, 2000, 2000, 2000]
    assert all(bench.tokens[id] == alone([*prefix, 300 + id, 400 + id], 4) for id in range(5))


def test_requests_behind_catch_up_with_each_other() -> None:
    bench = Bench(pages=5000, chunk=64, rows=8, max_len=4096)
    prefix = list(range(10, 610))
    for id in range(4):
        bench.add(id, [*prefix, 700 + id], 1)
    computed = 0
    while bench.scheduler.has_work:
        computed += bench.step()
    assert computed == len(prefix) + 4


def test_generated_tokens_are_cached() -> None:
    bench = Bench()
    bench.add(0, [5, 6, 7], 8)
    bench.drain()
    history = [5, 6, 7, *bench.tokens[0]]
    bench.add(1, [*history, 9], 2)
    bench.drain()
    assert bench.cached[1] == len(history) - 1  # the last token was drawn, never computed


def test_a_cleared_cache_keeps_only_what_runs() -> None:
    bench = Bench()
    bench.add(0, [5, 6, 7], 8)
    bench.drain()
    bench.add(1, [8, 9, 10], 8)
    bench.step()
    bench.cache.clear()
    bench.cache.check()
    for id, prompt in ((2, [5, 6, 7, 4]), (3, [8, 9, 10, 4])):
        bench.add(id, prompt, 1)
    bench.drain()
    assert [bench.cached[id] for id in (2, 3)] == [0, 3]
    assert bench.tokens[1] == alone([8, 9, 10], 8)


def test_a_whole_hit_computes_one_token() -> None:
    bench = Bench()
    prompt = list(range(10, 40))
    bench.add(0, prompt, 1)
    bench.drain()
    bench.add(1, prompt, 1)
    assert bench.step() == 1
    bench.drain()
    assert bench.cached[1] == len(prompt) - 1
    assert bench.tokens[1] == bench.tokens[0]


def test_namespaces_do_not_share() -> None:
    bench = Bench()
    bench.add(0, [5] * 20, 1, namespace="a")
    bench.drain()
    bench.add(1, [5] * 20, 1, namespace="b")
    bench.drain()
    assert bench.cached[1] == 0


def test_more_work_than_pages_preempts_the_youngest_and_loses_nothing() -> None:
    bench = Bench(pages=60, chunk=32, rows=4)
    prompts = [[10 * (id + 1)] * 10 for id in range(4)]
    for id, prompt in enumerate(prompts):
        bench.add(id, prompt, 30)
    bench.drain()
    assert bench.scheduler.preemptions > 0
    assert all(bench.tokens[id] == alone(prompt, 30) for id, prompt in enumerate(prompts))
    assert bench.cached == dict.fromkeys(range(4), 0)  # what a resumed request finds of its own is no hit


def test_what_never_fits_is_refused() -> None:
    bench = Bench(pages=20)
    with pytest.raises(ValueError, match="prompt: 31 tokens .* 20 of the pool"):
        bench.add(0, [5] * 30, 1)
    assert not bench.scheduler.has_work


def test_a_cold_request_is_not_starved_by_hits() -> None:
    bench = Bench(pages=4000, chunk=40, rows=1, max_len=256)
    trunk = [7] * 100
    bench.add(0, trunk, 1)
    bench.drain()
    bench.add(1, [8] * 50, 1)
    finished_before = 0
    for id in range(2, 400):
        bench.add(id, [*trunk, id], 1)
        while not bench.step():  # as many requests come as are served
            pass
        if 1 in bench.finish:
            break
        finished_before = len(bench.finish)
    assert 1 in bench.finish
    assert 4 < finished_before <= 8, "three tokens of those that overtake it for one of its own, with answers"


def test_those_go_first_that_the_fewest_tokens_are_missing_of() -> None:
    """About: of likes the older one."""
    bench = Bench(rows=1)
    bench.add(0, [7] * 30, 1)
    bench.drain()
    for id, prompt in ((1, [8] * 40), (2, [7] * 10 + [9] * 22), (3, [6] * 19), (4, [7] * 30 + [9])):
        bench.add(id, prompt, 1)
    bench.drain()
    assert list(bench.finish) == [0, 4, 2, 3, 1]


def test_what_is_computed_while_a_request_waits_is_its_hit() -> None:
    bench = Bench(rows=1)
    for id, prompt in ((0, [7] * 30), (1, [8] * 20), (2, [7] * 30 + [9])):
        bench.add(id, prompt, 1)
    bench.drain()
    assert list(bench.finish) == [0, 2, 1]


def test_a_step_scores_no_more_than_its_rows_of_logits(monkeypatch) -> None:
    """Several long texts at once, beside one that generates: all are scored, some tokens a step."""
    monkeypatch.setattr("radixrt.worker.scheduler.plan_builder.MAX_SCORED_TOKENS", 10)
    bench = Bench(pages=300, chunk=64, rows=8)
    prompts = [[100 + i, *range(3, 43)] for i in range(3)]
    for i, prompt in enumerate(prompts):
        bench.add(i, prompt, 0, score_from=1 + 5 * i)
    bench.add(9, [7, 8, 9], 4)
    seen = []
    plan_of = bench.scheduler.plan

    def plan():
        found = plan_of()
        if found is not None:
            seen.append(sum(found.wants[index] for index in found.following))
        return found

    bench.scheduler.plan = plan
    bench.drain()
    assert max(seen) == 10
    for i, prompt in enumerate(prompts):
        assert bench.scores[i] == [fake_logprob(t) for t in prompt[1 + 5 * i :]]
    assert len(bench.tokens[9]) == 4


def test_scores_come_for_each_token_from_score_from() -> None:
    from radixrt.worker.execution.fake_runner import fake_logprob

    for chunk in (3, 100):
        bench = Bench(chunk=chunk)
        prompt = list(range(20, 40))
        bench.add(0, prompt, 0, score_from=12)
        bench.drain()
        bench.add(1, prompt, 0, score_from=12)
        bench.drain()
        expected = [fake_logprob(token) for token in prompt[12:]]
        assert bench.scores[0] == bench.scores[1] == expected
        assert bench.cached == {0: 0, 1: 11}


def test_what_is_generated_is_not_scored_after_a_preemption() -> None:
    """Its prompt was, and that is reported once."""
    from radixrt.worker.execution.fake_runner import fake_logprob

    bench = Bench(pages=60, chunk=64)
    prompts = {id: [10 * id + 3, *range(20, 36)] for id in range(4)}
    for id, prompt in prompts.items():
        bench.add(id, prompt, 30, score_from=5)
    bench.drain()
    assert bench.scheduler.preemptions
    for id, prompt in prompts.items():
        assert len(bench.tokens[id]) == 30
        assert bench.scores[id] == [fake_logprob(token) for token in prompt[5:]]


def test_a_failed_request_fails_alone_and_leaves_nothing() -> None:
    bench = Bench(chunk=100)
    bench.add(0, [5] * 10, 4)
    bench.add(1, [6] * 10, 4)
    plan = bench.plan()
    result = bench.runner.launch(plan)()
    result.failed[plan.requests.index(next(r for r in plan.requests if r.id == 0))] = "logits are not finite"
    outputs = bench.scheduler.apply(plan, result)
    assert {o.id: o.finish for o in outputs} == {0: "error", 1: None}
    bench.cache.check()
    assert bench.cache.prefixes.tree.match("", np.array([5] * 10, np.int32)).length == 0
    bench.drain()
    assert bench.finish == {1: "length"}


def test_a_step_that_cannot_run_fails_its_requests_only() -> None:
    bench = Bench(chunk=100)
    bench.add(0, [5] * 10, 4)
    plan = bench.plan()
    assert [o.error for o in bench.scheduler.fail(plan, "out of memory")] == ["out of memory"]
    bench.cache.check()
    assert bench.cache.prefixes.tree.tokens == 0
    assert not bench.scheduler.has_work


def test_two_that_generate_the_same_share_it_in_the_end() -> None:
    """Their generated pages were private; the second one's go back when it leaves."""
    bench = Bench()
    prompt = [5, 6, 7, 8]
    for id in (1, 2):
        bench.add(id, prompt, max_tokens=6)
    bench.drain()
    assert bench.tokens[1] == bench.tokens[2] == alone(prompt, 6)
    assert bench.cache.prefixes.tree.tokens == len(prompt) + 5, "the last token was never computed"
    assert bench.cache.free_pages == bench.cache.total_pages - bench.cache.prefixes.tree.tokens
    bench.cache.check()


def test_what_is_cached_is_not_written_again() -> None:
    """A whole prompt that is cached: its last token is computed for its logits, and its KV goes to the null page."""
    bench = Bench()
    bench.add(1, [5, 6, 7, 8], max_tokens=1)
    bench.drain()
    bench.add(2, [5, 6, 7, 8], max_tokens=1)
    plan = bench.plan()
    assert plan.tokens.tolist() == [8] and plan.starts.tolist() == [3] and plan.slots.tolist() == [0]


@pytest.mark.parametrize(("generated", "finish"), [(3, "stop"), (20, "length")])
def test_stop_ids_end_a_request(generated: int, finish: str) -> None:
    prompt = [5, 6, 7, 8]
    stop = alone(prompt, 20)[generated - 1] if finish == "stop" else 1
    bench = Bench()
    ids = np.array(prompt, dtype=np.int32).tobytes()
    for id, sampling in enumerate(
        (
            Sampling(max_tokens=20, stop_token_ids=(stop,), ignore_eos=True),
            Sampling(max_tokens=20),
            Sampling(max_tokens=20, ignore_eos=True),
        )
    ):
        run = Run(id=id, namespace="", ids=ids, prompt_len=4, sampling=sampling)
        bench.scheduler.add(Request(run, 24, frozenset({stop})))
        bench.tokens[id] = []
    bench.drain()
    whole = alone(prompt, 20)
    assert bench.tokens == {0: whole[:generated], 1: whole[:generated], 2: whole}
    assert bench.finish == {0: finish, 1: finish, 2: "length"}


def test_a_stop_id_is_known_a_step_late_and_nothing_of_that_step_shows() -> None:
    """Overlapped, the step after the stop id has been launched: its token is dropped, its page comes back."""
    bench = Bench()
    prompt = [5, 6, 7, 8]
    stop = alone(prompt, 6)[5]
    run = Run(
        id=0, namespace="", ids=np.array(prompt, np.int32).tobytes(), prompt_len=4, sampling=Sampling(max_tokens=50)
    )
    bench.scheduler.add(Request(run, 54, frozenset({stop})))
    bench.tokens[0] = []
    bench.add(1, [9] * 5, 30)
    bench.drain()
    assert bench.tokens == {0: alone(prompt, 6), 1: alone([9] * 5, 30)}
    assert bench.cache.prefixes.tree.match("", np.array([*prompt, *bench.tokens[0]], np.int32)).length == 9
    assert bench.cache.leased_pages == 0


def test_a_request_aborted_in_flight_is_not_heard_of_again() -> None:
    bench = Bench()
    bench.add(0, [5, 6, 7], 20)
    bench.add(1, [8, 9], 20)
    for _ in range(3):
        bench.step()
    seen = list(bench.tokens[0])
    assert bench.scheduler.abort(0) and not bench.scheduler.abort(0)
    bench.drain()
    assert bench.tokens == {0: seen, 1: alone([8, 9], 20)}


def test_pages_that_take_the_place_of_others_are_told_beside_these() -> None:
    bench = Bench(chunk=100)
    one, other = bench.add(0, [5] * 8), bench.add(1, [5] * 8 + [6] * 4)
    for request in (one, other):
        bench.cache.requests.admit(request)
        bench.cache.requests.reserve(request, len(request.tokens))
    for request in (one, other):
        bench.cache.requests.publish(request, len(request.tokens))
    rows, places, pages = bench.cache.requests.drain_writes()
    bench.mirror[rows, places] = pages
    assert (bench.mirror == bench.cache.requests.table).all()
    bench.cache.check()


def test_a_plan_has_the_paths_of_its_requests() -> None:
    """All as they are at one moment: looked up again when the requests are others, as nodes may have been split."""
    bench = Bench(chunk=64)
    bench.scheduler = scheduler = Scheduler(bench.cache, bench.scheduler.limits, paths=True)
    bench.runner.histories = scheduler.histories
    prompt, seen = list(range(20, 40)), []
    for id in (0, 1, None, None, 2, None):
        if id is not None:
            bench.add(id, prompt[: 20 - 5 * id] + [50 + id])
        plan = bench.plan()
        assert plan is not None
        assert plan.paths == tuple(request.lease.path() for request in scheduler.requests_of(plan))
        seen.append(plan.paths)
        bench.finish_step(plan, bench.runner.launch(plan))
    assert [len(paths) for paths in seen] == [1, 2, 2, 2, 3, 3] and seen[3] is seen[2]
    assert seen[2][0][0] == seen[2][1][0] and len(seen[4][0]) > len(seen[2][0])
