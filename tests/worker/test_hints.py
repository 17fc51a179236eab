"""What clients ask of a worker's cache: each verb does what it names, within its bounds, and nothing else."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from radixrt.messages import CacheAction, Output, Run, Sampling
from radixrt.worker.cache import disk_policy, host_tier, prefix_cache
from radixrt.worker.cache.hints import Outcome
from tests.worker.memory_store import Folder
from tests.worker.test_disk_tier import DiskBench
from tests.worker.test_simulation import Bench, alone, overlaps, random_prompt  # noqa: F401

A, A2, B = "a\nm\n\n", "a\nm\n\nsalt", "b\nm\n\n"
PROMPT = list(range(3, 43))


class Hinted(Bench):
    """A bench whose clients give hints, as the worker's loop takes them; `now` is its clock."""

    now = 0.0

    def hint(self, verb: str, prompt: list[int], namespace: str = A, **fields) -> Outcome:
        ids = np.array(prompt, dtype=np.int32).tobytes()
        return self.cache.hints.act(namespace, ids, CacheAction(verb, **fields), self.now)

    def ask(
        self, id: int, prompt: list[int], namespace: str = A, cache: list[CacheAction] = (), tokens: int = 1
    ) -> int:
        """Run one request alone; its hit."""
        self.add(id, prompt, tokens, namespace=namespace)
        ids = np.array(prompt, dtype=np.int32).tobytes()
        run = Run(id=id, namespace=namespace, ids=ids, prompt_len=len(prompt), sampling=Sampling(), cache=list(cache))
        self.cache.hints.want(run)
        while self.step() or self.scheduler.has_work or self.inflight:
            pass
        assert self.tokens[id] == alone(prompt, tokens)
        self.cache.hints.take([Output(id, self.tokens[id], self.finish[id])], self.now)
        self.cache.check()
        return self.cached[id]

    def flood(self, first: int, count: int = 8) -> None:
        """Requests of another tenant that together need the whole pool several times over."""
        for n in range(first, first + count):
            self.ask(n, [n] * 100, B)

    def on_device(self, prompt: list[int], namespace: str = A) -> int:
        return self.cache.prefixes.on_device(namespace, np.array(prompt, dtype=np.int32))

    def settle(self) -> None:
        """Let copies be made that no request waits for."""
        for _ in range(3):
            self.step()


@pytest.fixture
def bench(monkeypatch) -> Hinted:
    return clocked(Hinted(max_len=256), monkeypatch)


@pytest.fixture
def tiered(monkeypatch) -> Hinted:
    """With host memory for many times the device's pages."""
    return clocked(Hinted(host=2000), monkeypatch)


def clocked(bench: Hinted, monkeypatch: pytest.MonkeyPatch) -> Hinted:
    for module in (prefix_cache, host_tier):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: bench.now))
    return bench


# ---------------------------------------------------------------- pin, retain


def test_a_pin_survives_what_evicts_the_rest(bench):
    bench.ask(1, PROMPT)
    other = [7, *PROMPT]
    bench.ask(2, other)
    assert bench.hint("pin", PROMPT, seconds=60.0) == Outcome("done", 40)
    bench.flood(100)
    assert (bench.on_device(PROMPT), bench.on_device(other)) == (40, 0)
    bench.now = 60.0
    bench.cache.pins.expire(bench.now)
    bench.flood(200)
    assert bench.on_device(PROMPT) == 0


def test_what_is_retained_goes_after_what_is_not_and_by_priority(bench):
    paths = {priority: [priority + 3] * 10 for priority in (0, 90, 10, 50)}
    for priority, path in paths.items():
        bench.ask(priority, path)
        assert bench.hint("retain", path, priority=priority, seconds=60.0) == Outcome("done", 10)
    plain = [200] * 10
    bench.ask(5, plain)
    held = []
    for id, length in enumerate((160, 168, 175, 183, 190), 10):
        bench.ask(id, [id + 300] * length, B)
        held.append([bench.on_device(path) for path in (plain, *(paths[n] for n in sorted(paths)))])
    assert held[0] == [0, 10, 10, 10, 10], "what nobody asked for is gone first, although it is the newest"
    gone = [sum(row) for row in held]
    assert gone == sorted(gone, reverse=True) and gone[-1] < 40
    for row in held:
        assert row[1:] == sorted(row[1:]), "the lowest priority is evicted first"


def test_what_is_left_of_a_retained_path_is_retained_still(bench):
    bench.ask(1, PROMPT)
    bench.hint("retain", PROMPT, priority=50, seconds=60.0)
    bench.ask(2, [300] * (bench.cache.total_pages - 30), B)
    left = bench.on_device(PROMPT)
    assert 0 < left < 40
    bench.ask(3, [301] * 100, B)
    assert bench.on_device(PROMPT) == left, "others go before it, although it is older"


def test_what_is_retained_counts_as_any_other_when_its_time_is_over(bench):
    bench.ask(1, PROMPT)
    bench.hint("retain", PROMPT, priority=100, seconds=10.0)
    bench.ask(2, [9] * 40)
    bench.now = 10.0
    bench.ask(3, [8] * 130, B)
    assert bench.on_device(PROMPT) < 40 and bench.on_device([9] * 40) == 40, "it is the least recently used"


def test_retention_stands_in_no_requests_way(bench):
    for n in range(1, 6):
        bench.ask(n, [n + 3] * 50)
        bench.hint("retain", [n + 3] * 50, priority=100)
    assert len(bench.cache.prefixes.priorities) == 1, "within the tenant's share"
    for id in (10, 11):
        bench.add(id, [id + 200] * 80, 10, namespace=B)
    for _ in range(9):
        bench.step()
    assert bench.scheduler.num_running == 2, "its pages count as evictable"
    bench.drain()
    assert bench.tokens[10] == alone([210] * 80, 10) and bench.scheduler.preemptions == 0


def test_a_lower_priority_does_not_take_the_place_of_a_higher_one(bench):
    bench.ask(1, [5] * 50)
    bench.ask(2, [6] * 50)
    assert bench.hint("retain", [5] * 50, priority=60).result == "done"
    assert bench.hint("retain", [6] * 50, priority=40).result == "refused"
    assert bench.hint("retain", [6] * 50, priority=80).result == "done"
    assert bench.cache.prefixes.priorities.tokens("a") == 50


def test_a_later_hint_takes_the_place_of_the_former(bench):
    bench.ask(1, PROMPT)
    for priority in (90, 10):
        bench.hint("retain", PROMPT, priority=priority)
        bench.hint("pin", PROMPT)
    assert len(bench.cache.prefixes.priorities) == len(bench.cache.pins) == 1


@pytest.mark.parametrize("verb", ["pin", "retain"])
def test_what_is_protected_is_bounded_by_the_share(bench, verb):
    bench.ask(1, list(range(3, 83)))
    clipped = bench.hint(verb, list(range(3, 83)))
    assert (clipped.result, clipped.tokens) == ("clipped", 50) and "50 tokens at most" in clipped.reason
    for n in range(2, 9):
        bench.ask(n, [n] * 50, f"{n}\nm\n\n")
        bench.hint(verb, [n] * 50, f"{n}\nm\n\n")
    assert bench.cache.leased_pages <= 100


def test_what_is_retained_stays_in_host_memory_too(monkeypatch):
    bench = clocked(Hinted(host=120), monkeypatch)
    bench.ask(1, PROMPT[:30])
    assert bench.hint("retain", PROMPT[:30], priority=80, seconds=60.0).result == "done"
    bench.ask(2, [9] * 30)
    for id in range(3, 9):
        bench.ask(id, [id + 300] * 120, B)
    assert bench.ask(20, [9] * 30) == 0
    assert bench.ask(21, PROMPT[:30]) == 29
    bench.now = 60.0
    for id in range(30, 36):
        bench.ask(id, [id + 300] * 120, B)
    assert bench.ask(50, PROMPT[:30]) == 0


# ---------------------------------------------------------------- demote, prefetch


def test_what_is_demoted_is_a_hit_from_host_memory(tiered):
    tiered.ask(1, PROMPT, tokens=4)
    assert tiered.hint("demote", PROMPT, token_start=10).result == "refused", "the answer goes on from it"
    whole = PROMPT + alone(PROMPT, 4)
    assert tiered.hint("demote", whole, token_start=10) == Outcome("done", 33)
    assert tiered.on_device(whole) == 10 and tiered.cache.evictable_pages == 10
    tiered.settle()
    fetched = tiered.cache.tier.onloaded_pages
    assert tiered.ask(2, [*whole, 5]) == 43
    assert tiered.cache.tier.onloaded_pages - fetched == 33


def test_what_is_prefetched_is_on_the_device_when_the_request_comes(tiered):
    tiered.ask(1, PROMPT)
    tiered.hint("demote", PROMPT)
    tiered.settle()
    assert tiered.on_device(PROMPT) == 0
    assert tiered.hint("prefetch", PROMPT) == Outcome("done", 40)
    tiered.settle()
    fetched = tiered.cache.tier.onloaded_pages
    tiered.add(2, [*PROMPT, 5], 4, namespace=A)
    plan = tiered.plan()
    assert plan.moves is None and plan.counts.tolist() == [1], "nothing is copied, and one token computed"
    tiered.finish_step(plan, tiered.runner.launch(plan))
    tiered.drain()
    assert tiered.cached[2] == 40 and tiered.tokens[2] == alone([*PROMPT, 5], 4)
    assert tiered.cache.tier.onloaded_pages == fetched


def test_pages_that_are_prefetched_in_the_step_that_reads_them_are_waited_for(tiered):
    tiered.ask(1, PROMPT)
    tiered.hint("demote", PROMPT)
    tiered.add(9, [8] * 30, 20, namespace=B)
    tiered.step()
    tiered.hint("prefetch", PROMPT)
    tiered.add(2, [*PROMPT, 5], 4, namespace=A)
    tiered.drain()
    assert tiered.tokens[2] == alone([*PROMPT, 5], 4) and tiered.cached[2] == 40


def test_prefetch_takes_no_pages_from_what_runs_or_is_pinned(tiered):
    tiered.ask(1, PROMPT)
    tiered.hint("demote", PROMPT)
    tiered.ask(2, [9] * 50)
    tiered.hint("pin", [9] * 50)
    tiered.add(3, [8] * 120, 8, namespace=B)
    while tiered.scheduler.running.prefilling or not tiered.scheduler.num_running:
        tiered.step()
    found = tiered.hint("prefetch", PROMPT)
    assert (found.result, found.reason) == ("clipped", "there was no room") and 0 < found.tokens <= 30
    tiered.drain()
    assert tiered.on_device([9] * 50) == 50 and tiered.scheduler.preemptions == 0


def test_a_pin_brings_back_what_is_below(tiered):
    tiered.ask(1, PROMPT)
    tiered.hint("demote", PROMPT)
    assert tiered.hint("pin", PROMPT) == Outcome("done", 40) and tiered.on_device(PROMPT) == 40


def test_what_is_demoted_stays_retained_below_and_a_pin_holds_it_here(tiered):
    tiered.ask(1, PROMPT)
    tiered.hint("retain", PROMPT[:20], priority=9, seconds=60.0)
    tiered.hint("pin", PROMPT[:10])
    assert tiered.hint("demote", PROMPT) == Outcome("clipped", 30, "others use it, or go on from it")
    assert tiered.on_device(PROMPT) == 10 and tiered.cache.tier._priorities.tokens("a") == 20


def test_running_requests_keep_what_is_demoted(tiered):
    tiered.add(1, PROMPT, 20, namespace=A)
    while tiered.scheduler.running.prefilling or not tiered.scheduler.num_running:
        tiered.step()
    found = tiered.hint("demote", PROMPT)
    assert (found.result, found.tokens) == ("refused", 0) and "others" in found.reason
    tiered.drain()
    assert tiered.tokens[1] == alone(PROMPT, 20)


def test_without_a_tier_below_nothing_is_demoted(bench):
    bench.ask(1, PROMPT)
    assert bench.hint("demote", PROMPT) == Outcome("refused", reason="there is no tier below the device")
    assert bench.hint("share", PROMPT, destination="w2") == Outcome("refused", reason="workers share no store on disk")
    assert bench.hint("prefetch", PROMPT) == Outcome("done", 40), "it is there"


# ---------------------------------------------------------------- all


@pytest.mark.parametrize("verb", ["pin", "retain", "demote", "prefetch", "share"])
def test_of_another_namespace_nothing_is_cached(tiered, verb):
    tiered.ask(1, PROMPT)
    for namespace in (B, A2):
        assert tiered.hint(verb, PROMPT, namespace) == Outcome("missing")
    assert tiered.hint(verb, [77] * 20) == Outcome("missing")
    assert tiered.hint(verb, PROMPT, token_start=40).result == "refused"


@pytest.mark.parametrize("verb", ["pin", "retain", "prefetch"])
def test_a_range_counts_the_tokens_in_it(tiered, verb):
    tiered.ask(1, PROMPT)
    assert tiered.hint(verb, PROMPT, token_start=10, token_end=30) == Outcome("done", 20)
    assert tiered.hint(verb, [*PROMPT, 7, 8, 9], token_start=10) == Outcome("clipped", 30, "no more of it is cached")
    assert tiered.hint(verb, [*PROMPT, 7], token_start=10) == Outcome("done", 30), "a last token is never cached"


def test_a_request_says_what_is_to_become_of_it(tiered):
    tiered.ask(1, PROMPT, cache=[CacheAction("retain", priority=70, seconds=9.0)], tokens=4)
    assert tiered.cache.prefixes.priorities.tokens("a") == 43, "its answer as well"
    tiered.ask(2, [9] * 20, cache=[CacheAction("demote", token_start=5)])
    assert tiered.on_device([9] * 20) == 5
    tiered.ask(3, [8] * 20, cache=[CacheAction("pin", token_end=10)])
    assert tiered.cache.pins.tokens("a") == 10


def test_a_request_that_fails_keeps_nothing(bench):
    run = Run(id=1, namespace=A, ids=b"abcd", prompt_len=1, sampling=Sampling(), cache=[CacheAction("pin")])
    bench.cache.hints.want(run)
    bench.cache.hints.take([Output(1, finish="error", error="x")], 0.0)
    bench.cache.hints.settle(1, 0.0)
    assert not len(bench.cache.pins)


# ---------------------------------------------------------------- delete


@pytest.mark.parametrize("host", [0, 2000])
def test_all_that_a_tenant_has_is_deleted_and_nothing_else(monkeypatch, host):
    bench = clocked(Hinted(host=host), monkeypatch)
    for n, namespace in enumerate((A, A2, B, "ab\nm\n\n"), 1):
        bench.ask(n, PROMPT, namespace)
        bench.ask(n + 10, PROMPT[:20] + [n], namespace)
    bench.hint("pin", PROMPT)
    bench.hint("retain", PROMPT, A2)
    bench.hint("demote", [*PROMPT[:20], 1])
    found = bench.cache.hints.delete("a", runs=False)
    assert found.result == "done" and found.tokens >= 82
    for namespace in (A, A2):
        assert bench.cache.prefixes.find(namespace, np.array(PROMPT, np.int32), 99)[0] == 0
    assert bench.ask(50, PROMPT, B) == bench.ask(51, PROMPT, "ab\nm\n\n") == 39
    bench.cache.check()


def test_what_running_requests_lease_goes_as_they_end(bench):
    bench.ask(1, PROMPT)
    bench.add(2, PROMPT, 10, namespace=A)
    bench.add(3, [*PROMPT, 9], 20, namespace=A)
    while bench.scheduler.running.prefilling or bench.scheduler.num_running < 2:
        bench.step()
    hints, of = bench.cache.hints, bench.scheduler.has_requests
    assert hints.delete("a", of("a")).result == "deferred" and bench.on_device(PROMPT) == 40
    while bench.scheduler.num_running == 2:
        bench.step()
    hints.go_on_deleting(of)
    assert hints.leaving == {"a"}
    bench.drain()
    hints.go_on_deleting(of)
    assert bench.on_device(PROMPT) == 0 and not hints.leaving
    assert bench.tokens[3] == alone([*PROMPT, 9], 20)


def test_checkpoints_of_recurrent_states_are_deleted_too(monkeypatch):
    bench = clocked(Hinted(states=8, host=500, host_states=8), monkeypatch)
    for n, namespace in enumerate((A, B, A, B), 1):
        bench.ask(n, [n, *PROMPT], namespace, tokens=4)
    bench.cache.hints.delete("a", runs=False)
    bench.cache.check()
    assert bench.ask(11, [1, *PROMPT, 5], A) == bench.ask(13, [3, *PROMPT, 5], A) == 0
    assert bench.ask(12, [2, *PROMPT, *alone([2, *PROMPT], 4), 5], B) > 40


# ---------------------------------------------------------------- with a disk


class HintedDisk(DiskBench, Hinted):
    """The same with a tier on disk, and room for the prompt in a tenant's share."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder, pages=160)

    def settle(self) -> None:
        for _ in range(4):
            self.step()
            self.cache.hints.go_on_prefetching()


@pytest.fixture
def folder(monkeypatch) -> Folder:
    monkeypatch.setattr(disk_policy, "READ_SECONDS", 0.0)
    return Folder()


def written(folder: Folder, *prompts: tuple[list[int], str]) -> HintedDisk:
    """A worker, started again after one that has written these."""
    before = HintedDisk(folder)
    for id, (prompt, namespace) in enumerate(prompts, 1):
        before.add(id, prompt, 1, namespace=namespace)
        before.rest()
    return HintedDisk(folder)


def test_what_is_prefetched_comes_from_disk_to_the_device(folder):
    bench = written(folder, (PROMPT, A))
    assert bench.hint("prefetch", PROMPT, B) == Outcome("missing")
    assert bench.hint("prefetch", PROMPT) == Outcome("deferred", 0, "it is being read")
    bench.settle()
    assert bench.on_device(PROMPT) == 40
    bench.settle()
    fetched, read = bench.cache.tier.onloaded_pages, bench.store.reads
    bench.add(2, [*PROMPT, 5], 4, namespace=A)
    bench.drain()
    assert bench.cached[2] == 40 and bench.tokens[2] == alone([*PROMPT, 5], 4)
    assert (bench.cache.tier.onloaded_pages, bench.store.reads) == (fetched, read), "nothing is copied or read for it"


def test_sharing_writes_what_others_then_prefetch(folder):
    one, other = HintedDisk(folder), HintedDisk(folder)
    one.add(1, PROMPT, 1, namespace=A)
    one.drain()
    assert one.hint("share", PROMPT, destination="w2") == Outcome("deferred", 0, "it is being written")
    one.rest()
    assert one.hint("share", PROMPT, destination="w2") == Outcome("done", 40)
    other.step()
    assert other.hint("prefetch", PROMPT).result == "deferred"
    other.settle()
    assert other.hint("prefetch", PROMPT) == Outcome("done", 40)


def test_a_tenants_blocks_are_deleted_from_disk(folder):
    bench = written(folder, (PROMPT, A), (PROMPT[:20], A2), (PROMPT, B))
    bench.add(5, [*PROMPT, 8], 1, namespace=A)
    bench.rest()
    bench.cache.hints.delete("a", runs=False)
    bench.rest()
    bench.step()
    assert {block.namespace for block in folder.blocks.values()} == {B}
    assert bench.hint("prefetch", PROMPT) == Outcome("missing")
    assert bench.hint("prefetch", PROMPT, B).result == "deferred"
    bench.add(6, [*PROMPT, 8], 1, namespace=A)
    bench.drain()
    assert bench.cached[6] == 0


# ---------------------------------------------------------------- any order


@pytest.mark.parametrize("states", [0, 6])
@pytest.mark.parametrize("host", [0, 40, 400])
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 12))])
def test_any_order_of_hints_requests_and_evictions(seed, host, states, monkeypatch):
    """Tokens are those of each request alone; every page is in one place; what is protected is within its bounds."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 4])
    host_states = states if host else 0
    bench = clocked(
        Hinted(pages=160 // page_size, page_size=page_size, host=host, states=states, host_states=host_states),
        monkeypatch,
    )
    trunks = [[rng.randint(3, 900) for _ in range(60)] for _ in range(4)]
    wanted: dict[int, list[int]] = {}
    for id in range(1, 40):
        for _ in range(rng.randint(0, 3)):
            verb = rng.choice(["pin", "retain", "demote", "prefetch", "share"])
            path, namespace = rng.choice([*trunks, *wanted.values()] or trunks), rng.choice([A, A2, B])
            start = rng.choice([0, 0, rng.randint(0, 30)])
            stop = rng.choice([None, rng.randint(1, 60)])
            fields = {"priority": rng.randint(0, 100), "seconds": rng.uniform(0, 5)}
            found = bench.hint(verb, path, namespace, token_start=start, token_end=stop, **fields)
            assert 0 <= found.tokens <= max(0, len(path[:stop]) - start)
            assert (found.tokens > 0) <= (found.result in ("done", "clipped"))
            bench.cache.check()
        if rng.random() < 0.05:
            bench.cache.hints.delete(tenant := rng.choice("ab"), bench.scheduler.has_requests(tenant))
            bench.cache.check()
        prompt = random_prompt(rng, trunks)
        wanted[id] = prompt
        bench.add(id, prompt, rng.randint(1, 8), namespace=rng.choice([A, A2, B]))
        for _ in range(rng.randint(0, 6)):
            bench.step()
        if rng.random() < 0.1 and bench.scheduler.ids:
            bench.scheduler.abort(gone := rng.choice(bench.scheduler.ids))
            wanted.pop(gone, None)
            bench.tokens.pop(gone)
            bench.tokens = {**bench.tokens, gone: []}
        bench.cache.hints.go_on_deleting(bench.scheduler.has_requests)
        bench.now += rng.random()
    bench.drain()
    for id, prompt in wanted.items():
        tokens = bench.tokens[id]
        assert tokens == alone(prompt, len(tokens)) and tokens
    bench.cache.hints.delete("a", runs=False)
    bench.cache.hints.delete("b", runs=False)
    bench.settle()
    bench.cache.hints.delete("a", runs=False)
    bench.cache.hints.delete("b", runs=False)
    assert bench.cache.free_pages == bench.cache.total_pages and bench.cache.tier.used_pages == 0
