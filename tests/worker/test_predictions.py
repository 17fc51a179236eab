"""Which proposals of a model's own layer are drafted: a table, and loads of a fake runner that proposes tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.messages import Run, Sampling
from radixrt.worker.execution.fake_runner import EOS, FakeRunner
from radixrt.worker.request import Request
from radixrt.worker.speculative.mtp_cost import ACCEPTANCE, Passes, Proposals, best_count, expected
from radixrt.worker.speculative.ngram import MAX_MATCHED_REQUESTS, MAX_ROWS, WAIT, Drafter
from tests.worker.engine import Engine, prompts
from tests.worker.foretold import VOCAB, random_load, said


def request(tokens: list[int], limit: int = 1000, **sampling) -> Request:
    ids = np.array(tokens, np.int32).tobytes()
    run = Run(id=1, namespace="", ids=ids, prompt_len=len(tokens), sampling=Sampling(max_tokens=99, **sampling))
    return Request(run, limit, frozenset({EOS}))


def fake(
    truth: int, page_size: int = 1, pages: int = 4096, overlaps: bool = False, states: int = 0, host: int = 0
) -> FakeRunner:
    return FakeRunner(
        num_pages=pages, page_size=page_size, vocab_size=VOCAB, check=True, overlaps=overlaps, truth=truth,
        num_states=states and states + 1, num_host_pages=host,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("acceptance", "cost", "wait", "most", "count"),
    [
        (0.9, 0.1, 0.0, 8, 8), (0.9, 0.3, 0.0, 8, 5), (0.7, 0.1, 0.0, 8, 4), (0.7, 0.1, 0.2, 8, 4),
        (0.5, 0.1, 0.0, 8, 2), (0.5, 0.5, 0.0, 8, 0), (0.5, 0.45, 0.1, 8, 0), (0.09, 0.1, 0.0, 8, 0),
        (1.0, 0.9, 0.1, 3, 3), (0.9, 0.1, 0.0, 0, 0),
    ],
)  # fmt: skip
def test_as_many_as_give_most_tokens_in_the_same_time(acceptance, cost, wait, most, count):
    assert best_count(acceptance, cost, wait, most) == count
    tokens = [sum(acceptance**n for n in range(k + 1)) for k in range(most + 1)]
    rates = [1.0] + [tokens[k] / (1 + wait + k * cost) for k in range(1, most + 1)]
    assert rates[count] == max(rates)
    assert expected(acceptance, most) == pytest.approx(tokens[most] - 1)


def test_acceptance_is_that_of_tokens_whose_predecessors_were_right():
    for drafted, accepted, tried, right in ((4, 4, 4, 4), (4, 0, 1, 0), (4, 2, 3, 2), (1, 1, 1, 1)):
        one = Proposals()
        one.learn(drafted, accepted)
        plain = ACCEPTANCE
        for n in range(tried):
            plain = 0.9 * plain + 0.1 * (n < right)
        assert one.acceptance == pytest.approx(plain)


def test_what_passes_and_rows_cost_decides_how_many_are_proposed():
    for overlaps in (False, True):
        drafter = Drafter(8, overlaps, predicts=True)
        assert Drafter(8, overlaps).proposes([]) == 0
        wait = WAIT if overlaps else 0.0
        assert drafter.proposes([]) == best_count(ACCEPTANCE, 0.1 + 0.005, wait, 8) == 4
        for rows in (1, 2, 8, 16):
            drafter.costs.add(rows, 0.010 + 0.0001 * rows)
        drafter.passes.add(0.0005)
        assert drafter.proposes([]) == best_count(ACCEPTANCE, 0.06, wait, 8) == 5
        drafter.passes = Passes()
        drafter.passes.add(0.004)
        assert drafter.proposes([]) == best_count(ACCEPTANCE, 0.0041 / 0.0101, wait, 8) == (2 if overlaps else 1)
        drafter.passes.add(0.2)
        assert drafter.proposes([]) == 0, "a pass takes longer than a step"
        drafter.passes = Passes()
        drafter.passes.add(0.0065)
        assert drafter.proposes([]) == (0 if overlaps else 1)
    assert Drafter(8, False, predicts=True).proposes([request([5])] * (MAX_ROWS // 2 + 1)) == 0


def test_the_better_of_what_is_looked_up_and_what_is_proposed_is_drafted():
    drafter = Drafter(8, False, predicts=True)
    one = request([*range(5, 25)] * 2)
    assert drafter.begins(one, 1)
    assert drafter.draft(one, 8, 1) == [*range(5, 13)], "nothing is proposed yet"
    drafter.proposed(one, 40, [90, 91, 92])
    assert drafter.draft(one, 8, 1) == [*range(5, 13)], "half of eight are more than two of three"
    one.draft_state.proposals.acceptance = 0.99
    one.draft_state.proposals.ids = [90, 91, 92, 93, 94]
    assert drafter.draft(one, 8, 1) == [90, 91, 92, 93, 94]
    assert drafter.draft(one, 2, 1) == [90, 91]
    drafter.refuse(one)
    assert one.draft_state.proposals.acceptance < 0.9
    one.draft_state.proposals.acceptance = 0.99
    drafter.proposed(one, 39, [90, 91])
    assert drafter.draft(one, 8, 1) == [*range(5, 13)], "these followed other tokens"
    other = request([*range(5, 25)])
    assert drafter.draft(other, 8, 1) == [] and not drafter.begins(other, 1)
    drafter.proposed(other, 20, [7, 8, 9])
    assert drafter.begins(other, 1)
    assert drafter.draft(other, 8, 1) == [7, 8, 9]
    other.matcher = object()
    assert (
        drafter.draft(other, 8, MAX_MATCHED_REQUESTS) == [7, 8, 9]
        and drafter.draft(other, 8, MAX_MATCHED_REQUESTS + 1) == []
    )
    other.matcher = None
    other.draft_state.proposals.acceptance = 0.3
    assert drafter.draft(other, 8, 1) == [7, 8], "what is proposed already costs rows alone"
    other.draft_state.proposals.acceptance = 0.05
    assert drafter.draft(other, 8, 1) == [] and not drafter.begins(other, 1)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("truth", [1, 3, 1000])
def test_proposals_change_nothing_that_is_said(truth, page_size, overlaps):
    asked = prompts(9, 5, 60, vocab_size=VOCAB)
    drafter = Drafter(8, overlaps, predicts=True)
    engine = Engine(fake(truth, page_size, overlaps=overlaps), drafter=drafter)
    assert engine.generate(asked) == [said(prompt, 64) for prompt in asked]
    right, steps = drafter.accepted / max(drafter.drafted, 1), len(engine.runner.steps)
    assert right == 0 if truth == 1 else right > 0.9 if truth == 1000 else 0.3 < right < 0.9
    assert steps < (70 if truth == 1 else 42 if truth == 3 else 13)
    assert engine.cache.free_pages + engine.cache.evictable_pages == engine.cache.total_pages


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_load_on_few_pages(data):
    """Requests come, go and are sent back to wait while tokens are proposed; pages and recurrent states add up after
    every step, and no proposal is written where another request reads (FakeRunner checks that)."""
    page_size, states = data.draw(st.sampled_from([1, 4])), data.draw(st.sampled_from([0, 5, 16, 60]))
    pages, overlaps = data.draw(st.integers(60, 160)) // page_size + 2, data.draw(st.booleans())
    truth, chunk = data.draw(st.sampled_from([1, 2, 4, 1000])), data.draw(st.integers(8, 64))
    host = 0 if states else data.draw(st.sampled_from([0, 30]))
    runner = fake(truth, page_size, pages, overlaps, states, host)
    drafter = Drafter(data.draw(st.integers(1, 9)), overlaps, predicts=True)
    engine = Engine(runner, chunk=chunk, rows=data.draw(st.integers(1, 6)), drafter=drafter)
    for id, tokens in random_load(data, engine).items():
        assert engine.tokens(id) == tokens
    assert all(tokens <= chunk for _, tokens in runner.steps)
    assert engine.cache.free_pages + engine.cache.evictable_pages == engine.cache.total_pages


def test_nothing_is_proposed_beyond_a_limit():
    for limit in (1, 2, 3, 4, 5, 20):
        engine = Engine(fake(1000), drafter=Drafter(8, False, predicts=True), max_model_len=30 + limit)
        (prompt,) = prompts(1, 30, 30, vocab_size=VOCAB)
        id = engine.add(prompt, Sampling(max_tokens=None, temperature=0.0, ignore_eos=True))
        engine.finish()
        assert engine.tokens(id) == said(prompt, limit)


def test_what_is_kept_is_worth_more_than_proposals():
    """Where pages are scarce, nothing is proposed rather than a kept context released."""
    engine = Engine(fake(1000, pages=41), drafter=Drafter(8, False, predicts=True))
    assert engine.scheduler._speculation.proposes(engine.scheduler.drafter) > 0
    engine.cache.prefixes.allocate(38)
    assert engine.scheduler._speculation.proposes(engine.scheduler.drafter) == 0
