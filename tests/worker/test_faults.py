"""Faults that need several things to happen at once: a step in flight, preemption, failure, a full pool."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from radixrt.messages import Sampling
from radixrt.worker.execution.fake_runner import fake_logprob
from radixrt.worker.execution.prefix_sharing import Cost
from radixrt.worker.plan import Plan
from radixrt.worker.stuck import bad_grammar
from tests.worker.engine import Engine, prompts
from tests.worker.test_simulation import Bench, alone

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # in the interpreter


class Overlapped(Bench):
    overlaps = True


def test_a_request_that_comes_back_on_another_row_is_read_from_there(tmp_path):
    """The planner keeps the rows of its last decodes through steps of chunks alone."""
    pytest.importorskip("triton")
    from tests.checkpoints import make_model
    from tests.worker.cuda.test_runner import SIZES, runners

    make_model(tmp_path, "llama", **SIZES)
    plain, fast = runners(tmp_path, tokens=52)
    warm, other = prompts(2, 20, 20, vocab_size=128)[0], prompts(1, 30, 30, vocab_size=128, seed=5)[0]
    found = []
    for runner in (plain, fast):
        engine = Engine(runner, chunk=4, rows=8, max_model_len=64)
        once = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        engine.generate([warm], once)
        older = engine.add(other, once)
        younger = engine.add(warm, Sampling(max_tokens=25, temperature=0.0, ignore_eos=True))
        engine.finish()
        assert engine.scheduler.preemptions or runner is plain
        found.append((engine.tokens(older), engine.tokens(younger)))
    assert found[0] == found[1]


def test_a_step_that_was_never_run_is_not_read():
    """Two of one prompt in a step that fails: what nobody computed stays in the tree, and the third one hits it."""
    bench = Overlapped(chunk=100)
    bench.add(0, [5] * 20, 4)
    bench.add(1, [5] * 20 + [6] * 3, 4)
    bench.scheduler.fail(bench.scheduler.plan(), "out of memory")
    bench.add(2, [5] * 20 + [7], 4)
    bench.drain()  # the fake asserts that it reads what it wrote
    assert bench.cached[2] == 0


def test_nan_of_one_does_not_outlive_those_that_lease_it():
    """Overlapped: the second leases the first's pages before the first is known to have failed, and fails after it."""
    bench = Overlapped(chunk=100)
    bench.add(0, [5] * 20, 4)
    first = bench.scheduler.plan()
    finishing = bench.runner.launch(first)
    bench.add(1, [5] * 20 + [6] * 3, 4)
    second = bench.scheduler.plan()
    after = bench.runner.launch(second)
    for plan, wait in ((first, finishing), (second, after)):
        result = wait()
        result.failed.update(dict.fromkeys(range(len(plan.requests)), "not finite"))
        bench.scheduler.apply(plan, result)
    bench.cache.check()
    assert bench.cache.prefixes.tree.tokens == 0


def test_nan_of_one_that_was_preempted_or_aborted_is_forgotten():
    for end in ("abort", "preempt"):
        bench = Overlapped(chunk=100)
        bench.add(0, [5] * 20, 4)
        plan = bench.scheduler.plan()
        result = bench.runner.launch(plan)()
        if end == "abort":
            bench.scheduler.abort(0)
        else:
            bench.scheduler._preempt()
        result.failed[0] = "not finite"
        bench.scheduler.apply(plan, result)
        bench.cache.check()
        assert bench.cache.prefixes.tree.tokens == 0, end


@pytest.mark.parametrize("kind", ["launch", "nan"])
def test_nothing_stays_of_a_failed_step_that_two_share(kind):
    """The second leases what the first was to fill; the first cannot forget it, the second keeps it."""
    bench = Overlapped(chunk=100)
    bench.add(0, [5] * 20, 4)
    bench.add(1, [5] * 20 + [6] * 3, 4)
    plan = bench.scheduler.plan()
    assert len(plan.requests) == 2
    if kind == "launch":
        bench.scheduler.fail(plan, "out of memory")
    else:
        result = bench.runner.launch(plan)()
        result.failed.update({0: "not finite", 1: "not finite"})
        bench.scheduler.apply(plan, result)
    bench.cache.check()
    assert bench.cache.prefixes.tree.tokens == 0


def one_left_out(monkeypatch) -> tuple[Bench, Plan]:
    """A step without request 2, which is admitted on what request 1 computes in it."""
    monkeypatch.setattr("radixrt.worker.scheduler.plan_builder.MAX_SCORED_TOKENS", 10)
    bench = Bench(chunk=100)
    bench.add(0, [4] * 20, 0, score_from=1)
    bench.add(1, [5] * 30, 2)
    bench.add(2, [5] * 30 + [6] * 3, 0, score_from=31)
    return bench, bench.scheduler.plan()


def test_one_that_was_not_planned_leases_nothing_of_a_step_that_failed(monkeypatch):
    """There were no rows of logits left for it: it was admitted, on what another request was to compute."""
    bench, plan = one_left_out(monkeypatch)
    left_out = bench.scheduler._requests[2]
    assert left_out.row >= 0 and left_out.computed == 30 and left_out.info not in plan.requests
    bench.scheduler.fail(plan, "out of memory")
    assert bench.cache.prefixes.tree.tokens == 0 and bench.scheduler.num_waiting == 1
    bench.cache.check()
    bench.drain()  # the fake asserts that it reads what it wrote
    assert bench.scores[2] == [fake_logprob(6)] * 2
    assert bench.cached[2] == 0, "it reused nothing"


def test_what_one_leased_and_never_went_on_from_is_not_cached(monkeypatch):
    """It was sent back to wait before anything of it was planned, and what it had leased has failed since."""
    bench, plan = one_left_out(monkeypatch)
    assert bench.scheduler._preempt(bench.scheduler.requests_of(plan)).id == 2
    bench.scheduler.fail(plan, "out of memory")
    bench.drain()
    assert bench.cached[2] == 0


def test_what_others_computed_while_one_was_sent_back_is_cached():
    """It comes back to its own tokens, which are no hit, and behind them to those of another."""
    bench = Bench(pages=400, chunk=20, rows=4)
    prompt = [*range(10, 70)]
    bench.add(0, prompt, 2)
    assert bench.step() == 20 and bench.scheduler._preempt().id == 0
    bench.add(1, prompt[:50], 1)
    bench.drain()
    assert bench.cached == {0: 30, 1: 20}


def test_what_a_request_computed_stays_when_its_grammar_lets_nothing_come():
    bench = Bench(chunk=100)
    bench.add(0, [5] * 20, 4)
    plan = bench.scheduler.plan()
    result = bench.runner.launch(plan)()
    result.stuck[0] = bad_grammar("a dead end")
    [output] = bench.scheduler.apply(plan, result)
    assert (output.finish, output.error, output.field) == ("error", "grammar: a dead end", "grammar")
    assert bench.cache.prefixes.tree.tokens == 20 and bench.cache.leased_pages == 0 and not bench.scheduler.has_work
    bench.add(1, [5] * 20 + [6], 2)
    bench.drain()
    assert bench.cached[1] == 20


def test_logits_that_are_not_finite_decide_before_a_grammar_does():
    bench = Bench(chunk=100)
    bench.add(0, [5] * 20, 4)
    plan = bench.scheduler.plan()
    result = bench.runner.launch(plan)()
    result.stuck[0], result.failed[0] = bad_grammar("a dead end"), "not finite"
    [output] = bench.scheduler.apply(plan, result)
    assert (output.error, output.field) == ("not finite", "") and bench.cache.prefixes.tree.tokens == 0


def test_scores_come_once_though_preempted():
    bench = Bench(pages=40, chunk=2, rows=4)
    prompt = [*range(20, 50)]
    bench.add(0, [7] * 3, 30)
    bench.step()
    bench.step()
    bench.add(1, prompt, 0, score_from=1)
    bench.drain()
    assert bench.scheduler.preemptions
    assert bench.scores[1] == [fake_logprob(t) for t in prompt[1:]]


def test_one_that_waits_for_pages_costs_no_table_writes():
    """More writes than a graph's size, and the step is no graph: each step of a full pool that has a hit waiting."""
    bench = Bench(pages=200, chunk=500, rows=4, max_len=200)
    trunk = [7] * 60
    bench.add(0, trunk, 1)
    bench.drain()
    bench.add(1, [8] * 60, 60)
    bench.step()
    bench.add(2, [*trunk, *[9] * 110], 1)
    bench.step()
    for _ in range(5):
        plan = bench.scheduler.plan()
        assert len(plan.requests) == 1 and bench.scheduler.num_waiting == 1
        writes = plan.table_writes.shape[1]
        bench.scheduler.apply(plan, bench.runner.launch(plan)())
        assert writes <= 1


def test_a_whole_hit_does_not_end_sharing_for_all():
    """Of requests whose whole prompt is cached the last token is computed again."""
    pytest.importorskip("triton")
    from radixrt.worker.cuda.attention.decodes import Cuts, DecodePlanner
    from radixrt.worker.cuda.attention.work import Tiling

    planner = DecodePlanner({None}, Cuts(Tiling(4, 16, 32, 20), Tiling(16, 16, 32, 12), Cost(256, 4096, 16)))
    rows = np.arange(8, dtype=np.int32)
    for step in range(40):
        positions = np.full(8, 3999 + step, dtype=np.int32)
        work = planner.plan((), [((1, 4000),)] * 8, rows, positions, None)[None]
        if step:
            assert work.shared, f"step {step}"


def test_chunks_write_where_their_pages_are():
    """A victim's pages, published while a chunk is planned, take the place of the chunk's own, but not in its slots:
    it writes to pages that are free, or somebody else's in the same step."""
    bench = Bench(pages=178, chunk=8, rows=8, max_len=100)
    for id in range(4):
        bench.add(id, [50 + id] * 4, 90)
        bench.step()
    prompt = [5, 6, 7, 8]
    bench.add(8, prompt, 60)
    for _ in range(20):
        bench.step()
    older = bench.add(9, prompt + alone(prompt, 40), 1)
    older.age = -1, 9, 9  # as one that has waited for long
    for _ in range(40):
        plan = bench.scheduler.plan()
        at = 0
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            slots = plan.slots[at : at + count]
            at += count
            expected = bench.cache.requests.row_slots(int(row), int(start), int(start + count))
            assert ((slots == 0) | (slots == expected)).all()
        bench.scheduler.apply(plan, bench.runner.launch(plan)())


def test_graphs_keep_what_they_write_to(tmp_path, monkeypatch):
    """The memory of partial results must live as long as the graphs that were captured with it."""
    pytest.importorskip("triton")
    import contextlib

    import torch

    from radixrt.worker.cuda.attention.attend import Scratch
    from tests.checkpoints import make_model
    from tests.worker.cuda.test_runner import SIZES, runners

    make_model(tmp_path, "llama", **SIZES)
    _, fast = runners(tmp_path)
    for name, value in {
        "graph_pool_handle": lambda: None,
        "mem_get_info": lambda device: (0, 0),
        "synchronize": lambda device=None: None,
        "CUDAGraph": object,
        "graph": lambda graph, pool, capture_error_mode: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    made = []
    make = Scratch.make

    def noted(*args):
        scratch = make(*args)
        made.append(weakref.ref(scratch.values))
        return scratch

    monkeypatch.setattr(Scratch, "make", noted)
    fast._graph_sizes, fast._graphs_wanted = [1, 2], True
    fast.bind(np.zeros((8, 64), dtype=np.int32))
    gc.collect()
    assert made and all(ref() is not None for ref in made)
