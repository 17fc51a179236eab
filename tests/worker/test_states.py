"""Checkpoints of recurrent states: the accounting under random loads, and who goes on from where. The fake runner
checks that each request goes on from the state of its own prefix."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from radixrt.messages import Load, StepDone
from radixrt.router.placement.index import Index
from radixrt.worker.loop import _EVENTS
from radixrt.worker.scheduler import state_checkpoints
from tests.worker.test_simulation import Bench, alone, overlaps  # noqa: F401


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints at nearly every branching point."""
    monkeypatch.setattr(state_checkpoints, "MIN_CHECKPOINT_TOKENS", 2)
    monkeypatch.setattr(state_checkpoints, "TAIL", 2)


class Mirror:
    """The router's index of a bench's cache."""

    def __init__(self, bench: Bench, num_states: int | None = None) -> None:
        self._bench = bench
        self.index = Index()
        states = bench.runner.num_states if num_states is None else num_states
        self.index.add_worker(0, fresh=True, num_states=states)
        self._seq = 0

    def tell(self, lost: bool = False, resync: bool = False) -> None:
        """Tell the index what has changed; if that is `lost`, or a `resync` is wanted, all there is."""
        cache = self._bench.cache
        events = [_EVENTS[kind](*rest) for kind, *rest in cache.prefixes.drain_events()]
        step, self._seq = StepDone([], Load(), self._seq, events), self._seq + len(events)
        assert lost or self.index.apply(0, step)
        if lost or resync:
            events = [_EVENTS[kind](*rest) for kind, *rest in cache.prefixes.resync_events()]
            assert self.index.apply(0, StepDone([], Load(), self._seq, events, resync=True))

    def check(self, prompt: list[int], namespace: str, most: int) -> int:
        """Assert that the index predicts the hit of a prompt, at most `most` tokens, and return it."""
        ids = np.array(prompt, np.int32)
        _, hit = self._bench.cache.prefixes.find(namespace, ids, most)
        assert self.index.match(namespace, ids.tobytes(), most).get(0, 0) == hit
        return hit


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(8))
def test_the_index_knows_where_a_prefix_can_be_continued(seed: int, page_size: int, often: None) -> None:
    rng = random.Random(seed)
    bench = Bench(rng.choice([60, 400]), page_size, chunk=16, rows=4, max_len=60, states=rng.choice([3, 20]))
    mirror = Mirror(bench)
    trunks = [[rng.randint(3, 9) for _ in range(30)] for _ in range(3)]
    found = 0
    for id in range(60):
        prompt = rng.choice(trunks)[: rng.randint(0, 30)] + [rng.randint(3, 9) for _ in range(rng.randint(1, 12))]
        bench.add(id, prompt, rng.randint(0, 10), namespace=rng.choice("ab"))
        for _ in range(rng.randint(0, 3)):
            bench.step()
        if rng.random() < 0.05:
            bench.cache.clear()
        mirror.tell(lost=rng.random() < 0.1, resync=rng.random() < 0.1)
        for probe, namespace in itertools.product((prompt, *trunks), "ab"):
            found += mirror.check(probe, namespace, len(probe) - rng.randint(0, 2))
    assert found or page_size > 1


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("pages", [24, 48, 400])
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 8))])
def test_random_load(seed: int, pages: int, page_size: int, often: None) -> None:
    rng = random.Random(seed)
    pages, states = max(pages // page_size, 16), rng.choice([1, 2, 5, 40])
    chunk, rows = rng.choice([5, 16, 64]), rng.choice([1, 3, 8])
    bench = Bench(pages, page_size, chunk, rows, max_len=60, states=states)
    trunks = [[rng.randint(3, 9) for _ in range(30)] for _ in range(3)]
    expected: dict[int, list[int]] = {}
    aborted = set()
    room = min(bench.cache.total_pages * page_size, 60)
    for id in range(60):
        prompt = rng.choice(trunks)[: rng.randint(0, 30)] + [rng.randint(3, 9) for _ in range(rng.randint(1, 12))]
        want = rng.randint(0, 10)
        if len(prompt) + want > room:
            continue
        more = {"score_from": rng.randint(1, len(prompt))} if rng.random() < 0.1 else {}
        more |= {"pin": [(rng.randint(1, len(prompt)), 1.0)]} if rng.random() < 0.1 else {}
        bench.add(id, prompt, want, namespace=rng.choice(["", "b"]), **more)
        expected[id] = alone(prompt, want)
        for _ in range(rng.randint(0, 3)):
            bench.step()
        if rng.random() < 0.1 and bench.scheduler.abort(victim := rng.choice(list(expected))):
            aborted.add(victim)
            bench.cache.check()
    bench.drain()
    assert bench.cache.leased_pages == 0 and bench.cache.states.live == 0
    for id, tokens in expected.items():
        if id in aborted:
            assert bench.tokens[id] == tokens[: len(bench.tokens[id])]
        else:
            assert (bench.tokens[id], bench.finish[id]) == (tokens, "length")


def run(bench: Bench, *prompts: list[int], want: int = 1, **more: object) -> list[int]:
    """Answer prompts that come at once. Returns the tokens that were not computed of each."""
    first = 1 + max(bench.tokens, default=-1)
    for id, prompt in enumerate(prompts, first):
        bench.add(id, prompt, want, **more)
    bench.drain()
    for id, prompt in enumerate(prompts, first):
        assert bench.tokens[id] == alone(prompt, want)
    return [bench.cached[id] for id in range(first, first + len(prompts))]


def bench_of(states: int = 50, **sizes: int) -> Bench:
    return Bench(**{"pages": 4000, "chunk": 512, "rows": 8, "max_len": 2000} | sizes, states=states)


TRUNK = list(range(10, 510))


def test_a_conversation_goes_on_from_its_last_answer() -> None:
    bench = bench_of()
    run(bench, TRUNK, want=20)
    history = [*TRUNK, *bench.tokens[0]]
    before = bench.runner.computed_tokens
    assert run(bench, [*history, 7, 8, 9]) == [len(history) - 1], "the last token was drawn, never computed"
    assert bench.runner.computed_tokens - before == 4


def test_a_stop_id_is_in_the_state_if_its_step_was_launched() -> None:
    from radixrt.messages import Run, Sampling
    from radixrt.worker.request import Request

    bench = bench_of()
    stop = alone(TRUNK, 6)[5]
    ids = np.array(TRUNK, np.int32).tobytes()
    request = Run(id=0, namespace="", ids=ids, prompt_len=len(TRUNK), sampling=Sampling(max_tokens=50))
    bench.scheduler.add(Request(request, len(TRUNK) + 50, frozenset({stop})))
    bench.tokens[0] = []
    bench.drain()
    history = [*TRUNK, *bench.tokens[0]]
    assert run(bench, [*history, 7]) == [len(history) - (not Bench.overlaps)]


def test_equal_prompts_are_computed_once_but_for_their_tails() -> None:
    bench = bench_of()
    assert run(bench, *[TRUNK] * 4) == [0] + [len(TRUNK) - state_checkpoints.TAIL] * 3
    assert bench.runner.computed_tokens == len(TRUNK) + 3 * state_checkpoints.TAIL


def test_what_prompts_in_the_queue_share_is_computed_once() -> None:
    for chunk in (512, 100):
        bench = bench_of(chunk=chunk)
        ends = [[n] * 100 for n in (1, 2, 3)]
        assert run(bench, *(TRUNK[:300] + end for end in ends)) == [0, 300, 300]
        assert bench.runner.computed_tokens == 600


def test_what_a_prompt_shares_with_one_that_is_being_computed_is_computed_once() -> None:
    bench = bench_of(chunk=100)
    bench.add(0, TRUNK, 1)
    bench.step()
    assert run(bench, TRUNK[:350] + [1] * 50) == [350]


def test_a_prompt_takes_one_step_whatever_checkpoints_are_taken_of_it() -> None:
    bench = bench_of()
    bench.add(0, TRUNK, 1, pin=[(100, 60.0), (200, 60.0)])
    plan = bench.plan()
    assert plan.counts.tolist() == [len(TRUNK)] and plan.samples.all()
    assert plan.states.within[1].tolist() == [100, 200, len(TRUNK) - state_checkpoints.TAIL]
    assert plan.states.saves.shape == (2, 0)


def test_a_step_ends_at_a_mark_that_is_too_near_to_be_passed() -> None:
    for before, after in ((state_checkpoints.NEAR, state_checkpoints.TAIL), (state_checkpoints.NEAR - 1, 0)):
        bench = bench_of(chunk=200 - before)
        bench.add(0, TRUNK[: 200 + state_checkpoints.TAIL], 1)
        bench.plan()
        plan = bench.plan()
        assert plan.counts.tolist() == [before + after]
        within, saves = plan.states.within[1].tolist(), plan.states.saves.shape[1]
        assert (within, saves) == (([before], 0) if after else ([], 1))


def test_the_third_prompt_begins_where_the_second_left_the_first() -> None:
    bench = bench_of()
    ends = [[n] * 100 for n in (1, 2, 3)]
    assert [run(bench, TRUNK[:300] + end) for end in ends] == [[0], [0], [300]]


def test_no_checkpoint_is_taken_for_few_tokens() -> None:
    bench = bench_of()
    run(bench, TRUNK)
    saved = len(bench.cache.states)
    run(bench, TRUNK + [1] * (state_checkpoints.MIN_CHECKPOINT_TOKENS - 1))
    assert len(bench.cache.states) == saved + 1, "that of the whole"


def test_a_scored_text_leaves_no_checkpoint_at_its_end() -> None:
    bench = bench_of()
    options = [TRUNK + [n] * 5 for n in (1, 2, 3)]
    assert run(bench, *options, want=0, score_from=len(TRUNK)) == [0] + [len(TRUNK) - 1] * 2
    assert len(bench.cache.states) == 1


def test_pinned_prefixes_have_checkpoints() -> None:
    bench = bench_of()
    run(bench, TRUNK, pin=[(200, 60.0)])
    assert run(bench, TRUNK[:200] + [1] * 10) == [200]


def test_checkpoints_that_are_pinned_go_last() -> None:
    bench = bench_of(states=6)
    run(bench, TRUNK)
    bench.cache.pins.add("", np.array(TRUNK, np.int32).tobytes(), 60.0, 0.0)
    for n in range(3, 9):
        run(bench, [n] * 200)
    assert run(bench, TRUNK + [1]) == [len(TRUNK)]
    bench.cache.pins.release_oldest()
    for n in range(3, 9):
        run(bench, [n] * 200 + [9])
    assert run(bench, TRUNK + [2]) == [0]


def test_requests_run_if_all_checkpoints_are_pinned() -> None:
    bench = bench_of(states=2)
    run(bench, TRUNK)
    bench.cache.pins.add("", np.array(TRUNK, np.int32).tobytes(), 60.0, 0.0)
    run(bench, *[[n] * 200 for n in range(3, 9)])
    bench.cache.check()


def test_the_least_recently_used_checkpoint_goes_first() -> None:
    bench = bench_of(states=6)
    texts = [[n] * 200 for n in range(3, 6)]
    assert [run(bench, text) for text in texts] == [[0]] * 3, "each leaves two checkpoints"
    assert run(bench, texts[0] + [9]) == [200] and bench.cache.states.evicted == 1, "its own, within its prompt"
    assert run(bench, texts[0] + [9, 9]) == [201] and bench.cache.states.evicted == 2
    assert run(bench, texts[2]) == [184] and run(bench, texts[1]) == [184], "of the first, another one went"
    run(bench, *([n] * 200 for n in range(6, 9)))
    assert run(bench, texts[2]) == [0] and run(bench, texts[1]) == [0]


def test_a_conversation_needs_only_its_last_checkpoint() -> None:
    bench = bench_of(states=6)
    run(bench, TRUNK[:300])
    history = [7] * 200
    run(bench, history)
    for _ in range(9):
        history.append(8)
        assert run(bench, history) == [len(history) - 1]
    assert run(bench, TRUNK[:300] + [8]) == [300], "not one of theirs has gone"


def test_a_checkpoint_from_which_two_have_gone_on_is_a_branching_point() -> None:
    bench = bench_of(states=6)
    run(bench, TRUNK[:300])
    for end in (1, 2):
        assert run(bench, TRUNK[:300] + [end]) == [300]
    run(bench, [7] * 200)
    assert run(bench, TRUNK[:300] + [3]) == [300]


def test_a_request_that_found_no_room_has_not_gone_on_from_a_checkpoint() -> None:
    bench = bench_of(states=6)
    run(bench, TRUNK[:300])
    run(bench, [7] * 200)
    request = bench.add(9, TRUNK[:300] + [1], 1)
    bench.cache.requests.admit(request)
    bench.cache.requests.withdraw(request)
    bench.drain()
    run(bench, [8] * 200)
    assert bench.cache.states.deepest(_pages_of(bench, TRUNK[:300])) == 284, "only then it went"


def _pages_of(bench: Bench, prompt: list[int]) -> np.ndarray:
    return np.frombuffer(bench.cache.prefixes.tree.match("", np.array(prompt, np.int32)).values(), np.int32)


def test_one_state_is_enough() -> None:
    bench = bench_of(states=1)
    run(bench, *[TRUNK] * 3, want=4)
    assert run(bench, [*TRUNK, *bench.tokens[0], 7]) == [len(TRUNK) + 3], "its only state is the one it goes on from"


def test_evicted_pages_take_their_checkpoints_along() -> None:
    bench = bench_of(pages=600)
    run(bench, TRUNK)
    run(bench, [3] * 300)
    bench.cache.check()
    assert run(bench, TRUNK) == [0]


def test_a_failed_step_leaves_no_checkpoints() -> None:
    bench = bench_of()
    bench.add(0, TRUNK, 4)
    plan = bench.plan()
    assert plan.states.within[1].tolist() == [len(TRUNK) - state_checkpoints.TAIL]
    bench.scheduler.fail(plan, "out of memory")
    bench.cache.check()
    assert not len(bench.cache.states) and not bench.cache.states.live


def test_a_failed_step_leaves_no_checkpoints_where_others_have_pages_either() -> None:
    bench = bench_of()
    run(bench, TRUNK)
    bench.cache.states.drop(np.arange(4001))
    bench.add(1, TRUNK + [7] * 100, 50)
    for _ in range(6):
        bench.step()
    bench.cache.states.drop(np.arange(4001))
    bench.add(2, TRUNK + [8] * 100, 4)
    plan = bench.plan()
    if bench.inflight:
        bench.finish_step(*bench.inflight)
        bench.inflight = None
    assert plan.starts.tolist()[1:] == [0] and plan.states.within.size, "its KV is there, its state is not"
    bench.scheduler.fail(plan, "out of memory")
    bench.cache.check()
    assert bench.cache.prefixes.tree.tokens >= 500 and not len(bench.cache.states)


def test_logits_that_are_not_finite_leave_no_checkpoints() -> None:
    bench = bench_of()
    run(bench, TRUNK)
    bench.add(1, TRUNK + [7], 9)
    bench.step()
    bench.add(2, TRUNK + [8], 9)
    plan = bench.plan()
    if bench.inflight:
        bench.finish_step(*bench.inflight)
        bench.inflight = None
    result = bench.runner.launch(plan)()
    result.failed[plan.requests.index(next(r for r in plan.requests if r.id == 2))] = "logits are not finite"
    bench.scheduler.apply(plan, result)
    bench.cache.check()
    assert bench.cache.prefixes.tree.tokens >= 500 and not len(bench.cache.states), "another request has the pages"


def test_a_request_that_is_behind_goes_on_from_what_another_leaves() -> None:
    bench = bench_of(chunk=100)
    slow, fast = bench.add(0, TRUNK, 1), bench.add(1, TRUNK[:400], 1)
    for request in (slow, fast):
        bench.cache.requests.admit(request)
    bench.cache.requests.reserve(fast, 400)
    bench.cache.requests.publish(fast, 400)
    fast.computed = 400
    bench.cache.requests.retire(fast)
    bench.cache.states.work([])
    bench.cache.requests.catch_up(slow)
    assert slow.computed == 400 and bench.cache.states.work([]).restores[1].tolist() == [slow.state]
    assert slow.lease.length == 400
    bench.cache.states.drop(np.arange(4001))
    again = bench.add(2, TRUNK, 1)
    bench.cache.requests.admit(again)
    assert again.computed == 0 and again.lease.length == 400
    bench.cache.requests.save(slow, 400)
    bench.cache.states.work([])
    bench.cache.requests.catch_up(again)
    assert again.computed == 400, "a checkpoint of pages that it has"


def test_a_preempted_request_goes_on_from_the_checkpoint_of_its_prompt() -> None:
    """Its last state has left the cache with the first of its pages that others needed."""
    bench = bench_of(pages=700, rows=2)
    a, b = TRUNK[:300], [5] * 250
    bench.add(0, a, 150)
    bench.add(1, b, 150)
    bench.drain()
    assert bench.scheduler.preemptions > 0
    assert bench.tokens == {0: alone(a, 150), 1: alone(b, 150)}
    assert bench.runner.computed_tokens < 550 + 300 + 150


def test_a_request_is_compared_with_so_many_tokens_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 that wait, with as long a prompt, three are compared."""
    compared: list[int] = []
    common_length = state_checkpoints.common_length

    def counted(one: bytes, other: bytes) -> int:
        compared.append(min(len(one), len(other)))
        return common_length(one, other)

    monkeypatch.setattr(state_checkpoints, "common_length", counted)
    monkeypatch.setattr(state_checkpoints, "COMPARED", 1000)
    bench = Bench(20_000, chunk=64, rows=12, max_len=1000, states=30)
    asked = {id: [*range(3, 403), id, *range(20)] for id in range(40)}
    for id, prompt in asked.items():
        bench.add(id, prompt, 1)
    bench.step()
    assert compared == [421] * 3
    bench.drain()
    assert all(bench.tokens[id] == alone(prompt, 1) for id, prompt in asked.items())
