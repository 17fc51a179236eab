"""The disk tier over a store in memory: the checking fake runner compares every KV slot and state that is read."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixrt.worker.cache import disk_policy
from radixrt.worker.cache.disk_tier import DiskTier
from radixrt.worker.cache.page_cache import PageCache
from radixrt.worker.execution.fake_runner import FakeRunner
from radixrt.worker.plan import Moves
from radixrt.worker.scheduler.scheduler import Limits, Scheduler
from tests.worker.memory_store import Folder, MemoryStore
from tests.worker.test_simulation import VOCAB, Bench, alone, overlaps, random_prompt  # noqa: F401


class DiskBench(Bench):
    """A Bench with a disk tier: a process whose folder outlives it."""

    def __init__(
        self, folder: Folder, *, pages: int = 60, page_size: int = 1, chunk: int = 64, rows: int = 4, host: int = 200,
        states: int = 0, host_states: int = 0, max_len: int = 128, rng: random.Random | None = None,
    ) -> None:  # fmt: skip
        self.store = MemoryStore(folder, rng)
        self.runner = FakeRunner(
            pages + 1, page_size, VOCAB, max_len, check=True, overlaps=self.overlaps, num_states=states and states + 1,
            num_host_pages=host + 1, num_host_states=host_states and host_states + 1, store=lambda: self.store,
        )  # fmt: skip
        self.cache = PageCache(
            pages + 1, page_size, rows, max_len, num_states=self.runner.num_states,
            num_host_pages=self.runner.num_host_pages, num_host_states=self.runner.num_host_states,
            disk=self.runner.disk,
        )  # fmt: skip
        self.scheduler = Scheduler(self.cache, Limits(chunk, rows))
        self.runner.bind(self.cache.requests.table)
        self.runner.histories = self.scheduler.histories
        self.mirror = np.zeros_like(self.cache.requests.table)
        self.tokens, self.finish, self.cached, self.scores = {}, {}, {}, {}
        self.inflight = None
        self.tier: DiskTier = self.cache.tier
        self.tier._writer._block_pages = 8

    def step(self) -> int:
        """As the worker's loop: with copies of their own if nothing is computed."""
        self.scheduler.settle()
        done = super().step()
        if not done and self.inflight is None and (moves := self.tier.drain_idle()) is not None:
            assert isinstance(moves, Moves)
            self.runner.move(moves)
            self.tier.applied()
        self.cache.check()
        return done

    def drain(self, steps: int = 10_000) -> None:
        while self.scheduler.has_work:
            assert steps > 0, "no progress"
            self.step()
            steps -= 1

    def rest(self) -> None:
        """Until all is on disk."""
        self.drain()
        while self.tier.is_busy:
            self.step()
        host = self.tier.host
        assert not host._loose.any() and not host.tree.leased_tokens, "nothing is held when nothing is on its way"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_policy, "READ_SECONDS", 0.0)
    monkeypatch.setattr(disk_policy, "MIN_WAIT", 30.0)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("host", [52, 200])
def test_after_a_restart_a_conversation_hits_to_its_last_token(page_size: int, host: int) -> None:
    folder, prompt = Folder(), list(range(3, 43))
    host = host // page_size
    bench = DiskBench(folder, page_size=page_size, pages=120 // page_size, host=host)
    bench.add(1, prompt, 9)
    bench.rest()
    again = DiskBench(folder, page_size=page_size, pages=120 // page_size, host=host)
    history = [*prompt, *bench.tokens[1]]
    again.add(2, [*history, 7], 4)
    again.drain()
    assert again.tokens[2] == alone([*history, 7], 4)
    kept = len(history) - 1
    assert again.cached[2] == kept - kept % page_size
    assert again.tier.figures.hits == 1 and again.tier.figures.read_tokens == kept - kept % page_size


def test_a_recurrent_state_survives_a_restart() -> None:
    folder, prompt = Folder(), list(range(3, 90))
    shape = {"pages": 300, "states": 4, "host": 300, "host_states": 4, "max_len": 256}
    bench = DiskBench(folder, **shape)
    bench.add(1, prompt, 9)
    bench.rest()
    again = DiskBench(folder, **shape)
    history = [*prompt, *bench.tokens[1]]
    again.add(2, [*history, 7, 8], 4)
    again.drain()
    assert again.tokens[2] == alone([*history, 7, 8], 4)
    assert again.cached[2] >= len(history) - 1, "the last token may not have been computed"


def test_a_damaged_block_is_computed_again() -> None:
    folder, prompt = Folder(), list(range(3, 43))
    bench = DiskBench(folder)
    bench.add(1, prompt, 1)
    bench.rest()
    order = sorted(folder.blocks.values(), key=lambda block: block.start)
    folder.damaged.add(order[2].number)
    again = DiskBench(folder)
    again.add(2, [*prompt, 7], 4)
    again.drain()
    assert again.tokens[2] == alone([*prompt, 7], 4)
    assert again.cached[2] == order[2].start
    again.rest()
    assert again.tier.index.handles("", np.array(prompt, np.int32)).size == len(prompt), "and written again"


def test_what_computing_gives_sooner_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, prompt = Folder(), list(range(3, 43))
    bench = DiskBench(folder)
    bench.add(1, prompt, 1)
    bench.rest()
    again = DiskBench(folder)
    monkeypatch.setattr(disk_policy, "READ_SECONDS", 1.0)
    again.add(2, [*prompt, 7], 4)
    again.drain()
    assert again.cached[2] == 0 and again.tier.figures.declined == 1 and again.store.reads == 0


def test_others_pass_a_request_that_waits_which_computes_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, prompt = Folder(), list(range(3, 33))
    bench = DiskBench(folder)
    bench.add(1, prompt, 1)
    bench.rest()

    class Never(random.Random):
        def random(self) -> float:
            return 0.0

    again = DiskBench(folder, rng=Never())
    again.add(2, [*prompt, 7], 2)
    again.add(3, [300, 301, 302], 2)
    for _ in range(20):
        again.step()
    assert again.finish == {3: "length"}, "the other one waits for a disk that does not answer"
    monkeypatch.setattr("radixrt.worker.scheduler.fetching.time.monotonic", lambda: 1e12)
    again.drain()
    assert again.tokens[2] == alone([*prompt, 7], 2) and again.cached[2] == 0


def test_those_who_need_the_same_read_it_once() -> None:
    folder, prompt = Folder(), list(range(3, 43))
    bench = DiskBench(folder)
    bench.add(1, prompt, 1)
    bench.rest()
    again = DiskBench(folder, rng=random.Random(0))
    for id in range(2, 6):
        again.add(id, [*prompt, id], 2)
    again.drain()
    assert again.store.reads == len(folder.blocks) == 5
    assert [again.cached[id] for id in range(2, 6)] == [40] * 4


def test_workers_of_one_folder_share_what_they_write() -> None:
    folder, prompt = Folder(), list(range(3, 43))
    one, other = DiskBench(folder), DiskBench(folder)
    one.add(1, prompt, 1)
    one.rest()
    other.step()
    other.add(2, [*prompt, 7], 2)
    other.rest()
    assert other.cached[2] == 40
    assert len(folder.blocks) == 6, "the second one wrote only what follows"


def test_a_cleared_cache_is_cleared_on_disk() -> None:
    folder = Folder()
    bench = DiskBench(folder)
    bench.add(1, list(range(3, 43)), 1)
    bench.rest()
    bench.cache.clear()
    bench.rest()
    bench.step()
    assert not folder.blocks and not len(bench.tier.index)


@pytest.mark.parametrize("states", [0, 6])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", [0, 7, *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 30))])
def test_any_order_of_what_happens(seed: int, page_size: int, states: int) -> None:
    """Two workers of one folder under random load, of which each is killed and started again at random, while blocks
    are damaged, deleted and evicted: every request gets what it gives alone, and each tier adds up after every step."""
    rng = random.Random(1000 * seed + 10 * page_size + states)
    folder = Folder(most=rng.choice([1, 3, 1000]) * 800)
    trunks = [[rng.randint(3, 9) for _ in range(40)] for _ in range(4)]
    shape = {
        "pages": rng.choice([64, 200]) // page_size, "page_size": page_size, "chunk": 16,
        "host": rng.choice([5, 40, 300]), "states": states, "host_states": states and rng.choice([1, 3]), "max_len": 64,
    }  # fmt: skip
    benches = [DiskBench(folder, **shape, rng=random.Random(seed + n)) for n in range(2)]
    asked: list[dict[int, tuple[list[int], int]]] = [{}, {}]
    hits = 0
    for turn in range(250):
        for n, bench in enumerate(benches):
            match rng.randrange(40):
                case 0:  # kill -9 and a restart
                    hits += bench.tier.figures.hits
                    bench.store.close()
                    benches[n], asked[n] = DiskBench(folder, **shape, rng=random.Random(turn)), {}
                    continue
                case 1 if folder.blocks:
                    folder.damaged.add(rng.choice(list(folder.blocks)))
                case 2 if folder.blocks:
                    folder.drop([rng.choice(list(folder.blocks))])
                case 3:
                    bench.cache.clear()
                case 5:
                    bench.cache.prefixes.forget("", np.array(rng.choice(trunks), np.int32), rng.randrange(30))
                case 6 | 7 | 8 | 9 | 10 | 11:
                    prompt, count = random_prompt(rng, trunks), rng.randint(1, 6)
                    id = turn * 2 + n + 1
                    asked[n][id] = prompt, count
                    bench.add(id, prompt, count)
                case 12 if asked[n]:
                    bench.scheduler.abort(id := rng.choice(list(asked[n])))
                    del asked[n][id]
            bench.step()
    for n, bench in enumerate(benches):
        bench.rest()
        for id, (prompt, count) in asked[n].items():
            assert bench.tokens[id] == alone(prompt, count)
        hits += bench.tier.figures.hits
        named = {entry.number for entry in bench.tier.index}
        for other in benches:
            other.rest()
        assert named <= folder.blocks.keys() | set(bench.store.removed), "the index has nothing that is not there"


def test_what_was_removed_too_early_is_counted_once() -> None:
    folder, prompt = Folder(), list(range(3, 43))
    bench = DiskBench(folder)
    bench.add(1, prompt, 1)
    bench.rest()
    bench.cache.clear_all()
    folder.drop([block.number for block in folder.blocks.values() if block.start >= 16])
    bench.step()
    for id in (2, 3):
        bench.add(id, [*prompt[:30], id], 1)
        bench.rest()
    assert bench.tier.figures.evicted_tokens == 24 and bench.tier.figures.early_tokens == 8, "of whole blocks"
