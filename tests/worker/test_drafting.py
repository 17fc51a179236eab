"""Drafted tokens: whatever is drafted, what is generated is what would have been drawn one by one."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.messages import Run, Sampling, TokenLogprob
from radixrt.worker.execution.fake_runner import EOS, FakeRunner
from radixrt.worker.request import Request
from radixrt.worker.scheduler.running import Running
from radixrt.worker.speculative.draft_state import ACCEPTANCE
from radixrt.worker.speculative.ngram import (
    MAX_ROWS,
    MIN_ACCEPTANCE,
    RECENT_NAMESPACES,
    SHORTEST,
    SHORTEST_IF_ALTERNATING,
    SURE,
    Costs,
    Drafter,
    RecentOutputs,
    Repeats,
)
from radixrt.worker.stuck import bad_grammar
from tests.worker.engine import Engine, prompts
from tests.worker.foretold import VOCAB, Prophet, random_load, said
from tests.worker.test_models import load

LONG = Sampling(max_tokens=900, temperature=0.0, ignore_eos=True)


def ways(page_size: int = 1, pages: int = 4096, states: int = 0) -> list[FakeRunner]:
    """Steps one after the other, and overlapped. `states`: recurrent states of the model."""
    sizes = {"num_pages": pages, "page_size": page_size, "vocab_size": VOCAB, "check": True}
    sizes["num_states"] = states and states + 1
    return [FakeRunner(**sizes, overlaps=overlaps) for overlaps in (False, True)]


# ---------------------------------------------------------------- what stood before


def matched_by_hand(tokens: list[int], place: int) -> int:
    """Tokens that end at `place` and at the end alike."""
    count = 0
    while count <= place and count < 64 and tokens[place - count] == tokens[-1 - count]:
        count += 1
    return count


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 9), st.integers(1, 12))
def test_what_followed_the_longest_match(tokens, cut, most):
    """In pieces, and against a search of all places; of matches as long, the latest."""
    repeats = Repeats()
    for at in range(0, len(tokens), cut):
        repeats.extend(np.array(tokens[at : at + cut], dtype=np.int32))
    assert len(repeats) == len(tokens)
    found = max(((matched_by_hand(tokens, p), p) for p in range(len(tokens) - 1)), default=(0, 0))
    if found[0] < 3:
        assert repeats.matched() == 0 and repeats.propose(most) == []
        return
    text = list(tokens)
    for i in range(most):
        text.append(text[found[1] + 1 + i])  # beyond the end stands what was proposed
    assert repeats.matched() == found[0]
    assert repeats.propose(most) == text[len(tokens) :]


def test_a_long_text_is_found_in_its_table():
    """The table grows, and places that were noted in a smaller one are found."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, 50_000, 20_000).astype(np.int32)
    repeats = Repeats()
    for piece in np.array_split(text, 50):
        repeats.extend(piece)
    for at in (5, 700, 11_000, 19_900):
        repeats.extend(text[at : at + 20])
        assert repeats.matched() == 20 and repeats.propose(30) == text[at + 20 : at + 50].tolist()
    assert repeats.propose(0) == []


def test_what_followed_in_another_text():
    text = Repeats()
    assert text.matched(np.array([1, 2, 3], dtype=np.int32)) == 0 and text.propose(3, b"") == []
    text.extend(np.array([1, 2, 3, 4, 5, 6, -1, 8, 2, 3, 4, 9, 9, -1, 7, 7], dtype=np.int32))
    tail = np.array([0, 1, 2, 3, 4], dtype=np.int32)
    assert text.matched(tail) == 4 and text.propose(9, tail) == [5, 6], "not beyond the end of an answer"
    assert text.propose(1, tail) == [5] and text.matched(tail[-3:]) == 3
    assert text.propose(9, tail[-3:]) == [9, 9], "the latest"
    assert text.matched(tail[-2:]) == 0 and text.propose(9, tail[-2:]) == []
    assert text.matched(np.array([9, -1, 7, 7], dtype=np.int32)) == 4 and text.propose(5, tail[:0]) == []
    text.extend(np.array([5, 5], dtype=np.int32))
    assert text.propose(9, np.array([9, -1, 7, 7], dtype=np.int32)) == [5, 5], "nothing is repeated at its end"


def test_answers_are_remembered_by_namespace():
    said, answers = RecentOutputs(most=100, in_all=450), prompts(60, 10, 10, vocab_size=VOCAB)
    for number, answer in enumerate(answers):
        said.add("ab"[number % 2], array("i", answer))
        assert said.tokens == sum(len(text) for name in "ab" for text in said.texts(name)) <= 450
    for number, answer in enumerate(answers[-18:]):
        mine, other = ("ab"[number % 2], "ba"[number % 2])
        found = [text.propose(9, array("i", answer[:4])) for text in said.texts(mine)]
        assert answer[4:] in found
        assert not any(text.matched(array("i", answer[:4])) for text in said.texts(other))
    assert len(said.texts("a")) == 2 and not any(text.matched(array("i", answers[0][:4])) for text in said.texts("a"))
    for answer in answers:
        said.add("c", array("i", answer))
        said.add("d", array("i", answer))
    assert said.texts("a") == () and said.texts("c"), "those that generate nothing go first"
    said = RecentOutputs(most=10_000, in_all=50)
    for answer in answers:
        said.add("", array("i", answer))
    assert said.tokens == 60 * 11, "of a single namespace its own bound is the only one"
    said = RecentOutputs()
    for number in range(RECENT_NAMESPACES + 5):
        said.add(str(number), array("i", [1]))
    assert not said.texts("4") and said.texts("5") and said.tokens == 2 * RECENT_NAMESPACES


# ---------------------------------------------------------------- what is generated


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("truth", [1, 2, 5, 1000])
def test_drafts_change_nothing_that_is_said(truth, page_size):
    asked = prompts(9, 5, 60, vocab_size=VOCAB)
    for runner in ways(page_size):
        expected = Engine(runner).generate(asked)
        drafter = Prophet(7, runner.overlaps, truth)
        engine = Engine(ways(page_size)[runner.overlaps], drafter=drafter)
        assert engine.generate(asked) == expected
        assert drafter.drafted == sum(drafter.sizes) > 100 and max(drafter.sizes) == 7
        right = drafter.accepted / drafter.drafted
        assert (right < 0.05) if truth == 1 else (right > 0.9) if truth == 1000 else (0.1 < right < 0.9)
        steps = len(engine.runner.steps)
        assert steps < 40 if truth == 1000 else steps < 250
        assert engine.cache.free_pages + engine.cache.evictable_pages == engine.cache.total_pages


@pytest.mark.parametrize("most", [1, 2, 3, 64])
def test_limits_and_stop_tokens_are_kept(most):
    asked = prompts(6, 5, 30, vocab_size=VOCAB)
    for number, runner in enumerate(ways()):
        plain = Engine(runner).generate(asked)
        stops = [tokens[20] for tokens in plain]
        for tokens_wanted in (1, 2, 3, 17):
            engine = Engine(ways()[number], drafter=Prophet(most, runner.overlaps, 1000))
            found = engine.generate(asked, Sampling(max_tokens=tokens_wanted, temperature=0.0))
            assert found == [tokens[:tokens_wanted] for tokens in plain]
        engine = Engine(ways()[number], drafter=Prophet(most, runner.overlaps, 1000))
        ids = [
            engine.add(prompt, Sampling(max_tokens=64, temperature=0.0, stop_token_ids=[stop]))
            for prompt, stop in zip(asked, stops, strict=True)
        ]
        engine.finish()
        for id, tokens, stop in zip(ids, plain, stops, strict=True):
            cut = tokens.index(stop)
            assert engine.tokens(id) == tokens[: cut + 1] and engine.last(id).stop == stop


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_load_on_few_pages(data):
    """Requests come, go and are sent back to wait while drafts are verified; pages and recurrent states add up after
    every step."""
    page_size, states = data.draw(st.sampled_from([1, 4])), data.draw(st.sampled_from([0, 5, 9, 16, 60]))
    pages = data.draw(st.integers(60, 160)) // page_size + 2
    runner = ways(page_size, pages, states)[data.draw(st.integers(0, 1))]
    drafter = Prophet(data.draw(st.integers(1, 9)), runner.overlaps, data.draw(st.sampled_from([1, 3, 1000])))
    chunk = data.draw(st.integers(8, 64))
    engine = Engine(runner, chunk=chunk, rows=data.draw(st.integers(1, 6)), drafter=drafter)
    for id, tokens in random_load(data, engine).items():
        assert engine.tokens(id) == tokens
    assert engine.scheduler.queued_tokens == 0
    assert all(tokens <= chunk for _, tokens in runner.steps)
    assert engine.cache.free_pages + engine.cache.evictable_pages == engine.cache.total_pages
    assert not states or not engine.cache.states.live


def test_with_recurrent_states_as_many_draft_as_have_room_for_theirs():
    """A quarter of the states is for drafts, at least two for each request and as many for each; the others generate
    without."""
    for states, drafting in ((64, 8), (40, 5), (9, 1), (8, 1), (7, 0)):
        for runner in ways(states=states):
            drafter = Fixed(7)
            engine = Engine(runner, drafter=drafter, rows=12)
            count, most = min(8, states // 2), 0
            for prompt in prompts(count, 5, 9, vocab_size=VOCAB):
                engine.add(prompt, Sampling(max_tokens=60, temperature=0.0, ignore_eos=True))
            while engine.step():
                most = max(most, len(engine.scheduler.running.drafting))
            assert most == drafting
            taken = max(entries for entries, tokens in runner.steps if entries == tokens) - count
            assert taken == min(states // 4 // max(drafting, 1), 7) * drafting
            assert not drafting or states // 4 // drafting in drafter.asked


@pytest.mark.parametrize("wrong", [False, True])
def test_the_next_turn_goes_on_from_the_state_after_what_was_accepted(wrong):
    for runner in ways(states=60):
        engine = Engine(runner, drafter=Prophet(7, runner.overlaps, 3) if wrong else Fixed(7))
        prompt = prompts(1, 80, 80, vocab_size=VOCAB)[0]
        history = prompt + engine.generate([prompt])[0]
        id = engine.add([*history, 9, 9])
        engine.finish()
        assert engine.last(id).cached_tokens == len(history) - 1, "the last token was never computed"


def test_only_what_was_accepted_is_cached():
    """Nothing of a draft is in the tree before it has turned out right."""
    for runner in ways():
        engine = Engine(runner, drafter=Prophet(7, runner.overlaps, 3))
        prompt = prompts(1, 20, 20, vocab_size=VOCAB)[0]
        tokens = engine.generate([prompt])[0]
        tree, path = engine.cache.prefixes.tree, np.array(prompt + tokens, dtype=np.int32)
        assert tree.match("", path).length == len(path) - 1
        assert engine.cache.total_pages - engine.cache.free_pages == len(path) - 1


def test_a_step_has_no_more_rows_than_are_free_of_cost():
    runner = ways()[0]
    engine = Engine(runner, drafter=Prophet(64, False, 1000), rows=64)
    engine.generate(prompts(20, 5, 5, vocab_size=VOCAB))
    sizes = [tokens for _, tokens in runner.steps[1:]]
    assert MAX_ROWS // 2 < max(sizes) <= MAX_ROWS


@pytest.mark.parametrize("overlaps", [0, 1])
@pytest.mark.parametrize("budget", [8, 32, MAX_ROWS])
def test_drafts_leave_most_of_a_small_step_to_prompts(budget, overlaps):
    runner = ways()[overlaps]
    engine = Engine(runner, chunk=budget, drafter=Prophet(budget, False, 1000))
    speakers = [engine.add(prompt, LONG) for prompt in prompts(2, 5, 5, vocab_size=VOCAB)]
    while engine.scheduler.running.prefilling or engine.scheduler.num_waiting:
        engine.step()
    for _ in range(3):
        engine.step()
    said_before = sum(len(engine.tokens(id)) for id in speakers)
    late = engine.add(prompts(1, 6 * budget, 6 * budget, vocab_size=VOCAB)[0], Sampling(max_tokens=1))
    for _ in range(6 * 3):
        engine.step()
        assert runner.steps[-1][1] <= budget
    assert engine.tokens(late), "a prompt of six steps gets more than a third of each"
    assert sum(len(engine.tokens(id)) for id in speakers) > said_before + 18


def test_long_prompts_are_noted_one_after_the_other(monkeypatch):
    """That of one which does not draft takes nobody's turn."""
    monkeypatch.setattr("radixrt.worker.speculative.speculation.MAX_NOTED_TOKENS", 100)
    engine = Engine(ways()[0], drafter=Drafter(4, False))
    engine.add([7] * 150, LONG, score_from=1)
    for prompt in prompts(4, 70, 70, vocab_size=VOCAB):
        engine.add(prompt, LONG)
    found = []
    for _ in range(4):
        engine.step()
        found.append(sum(r.draft_state is not None for r in engine.scheduler._requests.values()))
    assert found == [2, 4, 4, 4]


def test_drafts_take_a_whole_small_step_that_no_prompt_waits_for():
    runner = ways()[0]
    engine = Engine(runner, chunk=32, drafter=Prophet(32, False, 1000))
    engine.generate(prompts(1, 5, 5, vocab_size=VOCAB), LONG)
    assert max(tokens for _, tokens in runner.steps) == 32


def test_what_drafts_gain_counts_between_tenants():
    """As decoded one by one."""
    for drafter in (None, Fixed(4)):
        engine = Engine(ways()[0], drafter=drafter)
        for tenant in ("a", "b"):
            prompt = prompts(1, 9, 9, vocab_size=VOCAB)[0]
            engine.add(prompt, Sampling(max_tokens=60, temperature=0.0, ignore_eos=True), namespace=tenant)
        both = list(engine.scheduler._requests.values())
        while min(len(one.tokens) for one in both) < 40:
            engine.step()
        for one in both:  # the token that was drawn last is not computed
            assert engine.scheduler._counter.of(one.tenant) == len(one.tokens) - 1


def test_large_batches_do_without():
    runner, drafter = ways()[0], Prophet(5, False, 1000)
    engine = Engine(runner, rows=100, drafter=drafter)
    engine.generate(prompts(MAX_ROWS // 2 + 1, 5, 5, vocab_size=VOCAB), Sampling(max_tokens=9, temperature=0.0))
    assert not drafter.drafted


@pytest.mark.parametrize("states", [0, 60])
def test_one_sent_back_while_its_draft_is_verified_keeps_what_was_right(states):
    """It waits with more tokens than it had."""
    runner = ways(states=states)[1]
    engine, asked = Engine(runner, drafter=Fixed(4)), prompts(1, 9, 9, vocab_size=VOCAB)
    id = engine.add(asked[0])
    while not engine.scheduler.running.drafting or engine.scheduler.running.drafting[0].in_flight_tokens:
        engine.step()
    engine.step()
    request = engine.scheduler._preempt()
    known = len(request.tokens)
    assert request.in_flight_tokens and request.row < 0
    engine.finish_step()
    assert len(request.tokens) == known + 5
    assert engine.scheduler.queued_tokens == len(request.tokens) - request.hit
    engine.finish()
    assert engine.tokens(id) == Engine(ways()[1]).generate(asked)[0] and engine.scheduler.queued_tokens == 0


@pytest.mark.parametrize("states", [0, 60])
def test_one_sent_back_before_its_draft_is_planned(states):
    """The pages for its draft were the last; an older one needs a page in the same step."""
    asked = prompts(2, 9, 9, vocab_size=VOCAB)
    expected = Engine(ways()[0]).generate(asked)
    sent_back = 0
    for pages in range(75, 130):
        drafter = Fixed(7)
        drafter.begins = lambda request, _: request.id == 2
        engine = Engine(ways(pages=pages, states=states)[0], drafter=drafter)
        assert engine.generate(asked) == expected
        sent_back += engine.scheduler.preemptions
    assert sent_back > 10


@pytest.mark.parametrize("plain", [0, 5])
def test_requests_that_came_apart_draft_in_the_same_steps(plain):
    """Else each half would take every other step, and all weights be read for it. Some others decode one by one."""
    runner = ways()[1]
    drafter = Fixed(7)
    drafter.most, drafter.begins = 7, lambda request, _: request.sampling.top_k == 5
    engine = Engine(runner, drafter=drafter)
    for number, prompt in enumerate(prompts(6, 5, 9, vocab_size=VOCAB)):
        engine.add(prompt, Sampling(max_tokens=400, temperature=0.0, ignore_eos=True, top_k=5))
        for _ in range(number):
            engine.step()
    for prompt in prompts(plain, 5, 9, vocab_size=VOCAB, seed=1):
        engine.add(prompt, Sampling(max_tokens=400, temperature=0.0, ignore_eos=True))
    for _ in range(6):
        engine.step()
    sizes = []
    for _ in range(4):
        before = len(runner.steps)
        engine.step()
        sizes += runner.steps[before:]
    assert sizes and all(requests >= 4 * 8 + plain for requests, _ in sizes)
    engine.finish()


def test_one_that_drafts_keeps_many_others_from_nothing():
    """It takes part in every other step."""
    runner = ways()[1]
    drafter = Fixed(7)
    drafter.begins = lambda request, _: request.sampling.top_k == 5
    engine = Engine(runner, drafter=drafter)
    for prompt in prompts(20, 5, 9, vocab_size=VOCAB, seed=1):
        engine.add(prompt)
    engine.add([5, 6, 7], Sampling(max_tokens=200, temperature=0.0, ignore_eos=True, top_k=5))
    for _ in range(5):
        engine.step()
    before = len(runner.steps)
    for _ in range(8):
        engine.step()
    assert [requests for requests, _ in runner.steps[before:]] in ([20, 28] * 4, [28, 20] * 4)


@pytest.mark.parametrize("kind", ["failed", "stuck"])
def test_bad_logits_at_a_draft_that_is_wrong_are_nobodys(kind):
    """They fail a request only where they stand after tokens that it has."""
    for bad, fails in ((0, True), (2, True), (6, False)):
        runner = ways(states=60)[0]
        engine = Engine(runner, drafter=Fixed(2))
        id = engine.add(prompts(1, 5, 5, vocab_size=VOCAB)[0])
        while not (plan := engine.scheduler.plan()).drafts:
            engine.scheduler.apply(plan, runner.launch(plan)())
        assert plan.wants.tolist() == plan.counts.tolist() == [1] * 8 and plan.samples.all()
        result = runner.launch(plan)()
        getattr(result, kind)[plan.drafts[0].first + bad] = "why" if kind == "failed" else bad_grammar("why")
        found = engine.scheduler.apply(plan, result)
        engine.cache.check()
        if bad == 2:  # what comes before is right, and said; the next step finds out
            assert found[-1].finish is None and len(found[-1].tokens) == 2
            continue
        assert (found[-1].finish == "error") == fails and found[-1].id == id
        assert found[-1].field == ("grammar" if fails and kind == "stuck" else "")


class Fixed(Drafter):
    """The first `right` tokens are, 7 in all."""

    def __init__(self, right: int) -> None:
        super().__init__(7, False)
        self._right = right
        self.asked: set[int] = set()
        """The most tokens that drafts were to have."""

    def begins(self, request: Request, requests: int) -> bool:
        return True

    def draft(self, request: Request, most: int, requests: int) -> list[int]:
        self.asked.add(most)
        ids = said(request.tokens, min(7, most, request.limit - len(request.tokens) - 1))
        return ids[: self._right] + [3] * len(ids[self._right :])


def test_a_failed_step_fails_each_once():
    runner = ways()[0]
    engine = Engine(runner, drafter=Prophet(5, False, 1000))
    ids = [engine.add(prompt) for prompt in prompts(3, 5, 9, vocab_size=VOCAB)]
    while not (plan := engine.scheduler.plan()).drafts:
        engine.scheduler.apply(plan, runner.launch(plan)())
    outputs = engine.scheduler.fail(plan, "broken")
    assert sorted(o.id for o in outputs) == ids and all(o.finish == "error" for o in outputs)
    engine.cache.check()
    assert engine.cache.free_pages + engine.cache.evictable_pages == engine.cache.total_pages


@pytest.mark.parametrize("how", ["drop", "keep"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_nothing_of_a_failed_step_stays_cached(page_size, how):
    """Nor of a page that it was to fill up, or of a request that was dropped while it ran."""
    runner = ways(page_size)[0]
    engine, prompt = Engine(runner, chunk=6), prompts(1, 24, 24, vocab_size=VOCAB)[0]
    id = engine.add(prompt)
    engine.step()
    plan = engine.scheduler.plan()
    assert plan.starts.tolist() == [6] and plan.counts.tolist() == [6]
    if how == "drop":
        engine.scheduler.abort(id)
    engine.scheduler.fail(plan, "broken")
    assert engine.cache.prefixes.tree.match("", np.array(prompt, dtype=np.int32)).length == 6 - 6 % page_size
    engine.cache.check()


def test_an_answer_given_again_is_drafted():
    for runner in ways():
        drafter = Drafter(8, runner.overlaps)
        engine, asked = Engine(runner, drafter=drafter), prompts(1, 9, 9, vocab_size=VOCAB)
        said = engine.generate(asked)
        assert not drafter.drafted
        steps = engine.scheduler.steps
        assert engine.generate(asked) == said
        assert drafter.accepted == drafter.drafted > 50 and engine.scheduler.steps - steps < 20


@pytest.mark.parametrize("kind", ["prefilling", "decoding", "drafting"])
def test_the_youngest_is_sent_back(kind):
    """Whatever it does; those whose last step is planned stay."""
    running, requests = Running(), [request([1, 2, 3]) for _ in range(5)]
    for number, one in enumerate(requests):
        one.id, one.age = number, (number // 2, number, number)
    running.ending.append(requests[4])
    for one, place in zip(requests[:3], (running.prefilling, running.decoding, running.drafting), strict=True):
        place.append(one)
    getattr(running, kind).append(requests[3])
    assert running.youngest([]) is requests[3] and running.youngest([requests[3]]) is requests[2]
    assert len(running) == 5 and running.generating == 2 + (kind != "prefilling")
    for one in requests:
        running.remove(one)
    assert len(running) == 0


class Told(Drafter):
    """Is told what will be said, and lies in a third of the tokens."""

    def __init__(self, rests: bool, texts: list[list[int]]) -> None:
        super().__init__(5, rests)
        self._random = random.Random(1)
        self._texts = texts

    def begins(self, request: Request, requests: int) -> bool:
        return request.total + 2 <= request.limit

    def draft(self, request: Request, most: int, requests: int) -> list[int]:
        known = list(request.tokens)
        text = next((text for text in self._texts if text[: len(known)] == known), [])
        most = min(most, self.most, request.limit - len(known) - 1)
        return [id if self._random.random() < 0.66 else 3 for id in text[len(known) : len(known) + most]]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        pytest.param("llama", {"kv_cache_dtype": "fp8_e4m3", "page_size": 4}, marks=pytest.mark.slow),
        ("gpt_oss", {}),
        pytest.param("gpt_oss", {"kv_cache_dtype": "fp8_e4m3", "page_size": 4}, marks=pytest.mark.slow),
    ],
)
def test_a_model_says_what_it_would_have_said(checkpoint, family, settings):
    """Greedy and drawn, warm and cold, by what was said before or not; some go by without drafts."""
    folder, _ = checkpoint(family)
    runner = load(folder, **settings)
    asked = prompts(6, 5, 40)
    samplings = [
        Sampling(max_tokens=24, ignore_eos=True, **how)
        for how in (
            {"temperature": 0.0},
            {"temperature": 1.0, "seed": 5},
            {"temperature": 0.8, "seed": 6, "top_p": 0.9, "top_k": 40},
            {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.3},
            {"temperature": 1.0, "seed": 7, "repetition_penalty": 0.9, "frequency_penalty": -0.5},
            {"temperature": 0.7, "seed": 8, "min_tokens": 20, "stop_token_ids": (5,), "logit_bias": {5: 9.0, 7: 2.0}},
        )
    ]
    for sampling in samplings:
        expected = Engine(runner).generate(asked, sampling)
        texts = [prompt + tokens for prompt, tokens in zip(asked, expected, strict=True)]
        drafter = Told(runner.overlaps, texts)
        engine = Engine(runner, drafter=drafter)
        for _ in range(2):
            assert engine.generate(asked, sampling) == expected
        assert drafter.accepted > 60 and engine.scheduler.steps < 40


# ---------------------------------------------------------------- when there are drafts


def request(tokens: list[int], limit: int = 1000, **sampling) -> Request:
    ids = np.array(tokens, dtype=np.int32).tobytes()
    run = Run(id=1, namespace="", ids=ids, prompt_len=len(tokens), sampling=Sampling(**sampling))
    return Request(run, limit, frozenset({EOS}))


def repeating(match: int) -> list[int]:
    text = list(range(100, 150))
    return [*text, *text[10 : 10 + match]]


def test_drafts_begin_with_a_match():
    for rests, requests, least in (
        (False, 5, SHORTEST),
        (False, 1, SHORTEST),
        (True, 1, SHORTEST),
        (True, 9, SHORTEST),
        (True, 10, SHORTEST_IF_ALTERNATING),
    ):
        drafter = Drafter(8, rests)
        assert not drafter.begins(request(repeating(least - 1)), requests)
        assert drafter.begins(request(repeating(least)), requests)


@pytest.mark.parametrize("family", ["llama"])
def test_log_probabilities_are_those_of_tokens_one_by_one(checkpoint, family):
    """One for each token, beside requests that ask for none."""
    folder, _ = checkpoint(family)
    runner, asked = load(folder), prompts(4, 5, 40)
    kinds = [{"logprobs": 2}, {}, {"logprobs": 0, "repetition_penalty": 1.2}, {"temperature": 1.0, "seed": 3}]
    samplings = [Sampling(**{"max_tokens": 24, "temperature": 0.0, "ignore_eos": True} | kind) for kind in kinds]

    def generate(engine: Engine) -> list[tuple[list[int], list[TokenLogprob]]]:
        ids = [engine.add(prompt, sampling) for prompt, sampling in zip(asked, samplings, strict=True)]
        engine.finish()
        for id in ids:
            assert all(o.logprobs is None or len(o.logprobs) == len(o.tokens) for o in engine.outputs[id])
        return [
            (
                [t for o in engine.outputs[id] for t in o.tokens],
                [one for o in engine.outputs[id] for one in o.logprobs or ()],
            )
            for id in ids
        ]

    expected = generate(Engine(runner))
    assert [len(logprobs) for _, logprobs in expected] == [24, 0, 24, 0]
    drafter = Told(False, [prompt + tokens for prompt, (tokens, _) in zip(asked, expected, strict=True)])
    found = generate(Engine(runner, drafter=drafter))
    assert drafter.accepted > 30
    for (tokens, logprobs), (expected_tokens, others) in zip(found, expected, strict=True):
        assert tokens == expected_tokens and [a.token for a in logprobs] == [b.token for b in others]
        assert all(a.logprob == pytest.approx(b.logprob, abs=1e-4) for a, b in zip(logprobs, others, strict=True))
        assert all([t for t, _ in a.top] == [t for t, _ in b.top] for a, b in zip(logprobs, others, strict=True))


def test_what_is_scored_is_not_drafted():
    ids = np.array(repeating(9), dtype=np.int32).tobytes()
    run = Run(id=1, namespace="", ids=ids, prompt_len=40, sampling=Sampling(), score_from=5)
    assert not Drafter(8, False).begins(Request(run, 1000, frozenset({EOS})), 1)
    assert Drafter(8, False).begins(request(repeating(9), temperature=1.0, seed=3, repetition_penalty=1.1), 1)


def test_as_many_as_match_and_as_may_come():
    drafter = Drafter(8, False)
    assert drafter.draft(request(repeating(3)), 64, 1) == [113, 114, 115]
    assert len(drafter.draft(request(repeating(30)), 64, 1)) == 8
    assert len(drafter.draft(request(repeating(30)), 2, 1)) == 2
    assert drafter.draft(request(repeating(2)), 64, 1) == [] and drafter.draft(request(repeating(30)), 0, 1) == []
    long = repeating(30)
    assert len(drafter.draft(request(long, limit=len(long) + 3), 64, 1)) == 2, "the last is drawn after all drafts"
    assert drafter.draft(request(long, limit=len(long) + 1), 64, 1) == []
    assert not drafter.begins(request(long, limit=len(long) + 1), 1)


def test_among_too_many_nobody_drafts():
    drafter, text = Drafter(8, False, among=5), request(repeating(9))
    assert drafter.begins(text, 5) and drafter.draft(text, 8, 5)
    assert not drafter.begins(text, 6) and not drafter.draft(text, 8, 6)


def test_what_another_request_said_is_drafted():
    """In its namespace alone; what it said, not what it was asked."""
    drafter = Drafter(8, False)
    first = request([*range(200, 210), *range(100, 120)])
    first.prompt_len = 10
    drafter.ends(first)
    drafter.ends(request([*range(300, 330)]))
    second = request([1, 2, 104, 105, 106, 107])
    assert drafter.begins(second, 1) and drafter.draft(second, 8, 1) == [108, 109, 110, 111]
    assert (
        drafter.draft(request([203, 204, 205, 206]), 8, 1) == drafter.draft(request([304, 305, 306, 307]), 8, 1) == []
    )
    own = request([104, 105, 106, 107, 50, 3, 104, 105, 106, 107])
    assert drafter.draft(own, 2, 1) == [50, 3], "of matches as long, its own"
    stranger = request([1, 2, 104, 105, 106, 107])
    stranger.namespace = "other"
    assert drafter.draft(stranger, 8, 1) == [] and not drafter.begins(stranger, 1)


def test_who_is_always_wrong_stops_until_it_is_sure():
    drafter, short, steps = Drafter(8, False), request(repeating(SURE - 1)), 0
    while ids := drafter.draft(short, 8, 1):
        drafter.learn(short, len(ids), 0)
        steps += 1
        assert steps < 20
    assert short.draft_state.acceptance < MIN_ACCEPTANCE and not drafter.begins(short, 1)
    assert drafter.drafted == 8 * steps and not drafter.accepted
    short.extend([110 + SURE - 1])
    assert len(drafter.draft(short, 8, 1)) == 8 and drafter.begins(short, 1)
    drafter.learn(short, 8, 8)
    assert short.draft_state.acceptance > 0.2 and drafter.accepted == 8


def test_what_a_row_costs():
    """Steps of base + slope x rows seconds: a row delays all requests of its step."""
    costs = Costs()
    assert costs.row(1) == pytest.approx(0.005 / 1.005), "before any step"
    for _ in range(20):
        costs.add(4, 0.010)
    assert costs.row(1) == pytest.approx(0.005 / 1.005), "of a single size nothing is learned"
    for slope in (0.0001, 0.002):
        for rows in [*range(1, 30)] * 20:
            costs.add(rows, 0.004 + slope * rows)
        for requests in (1, 8, 60):
            assert costs.row(requests) == pytest.approx(requests * slope / (0.004 + requests * slope), rel=0.01)
    for rows in [*range(1, 30)] * 20:
        costs.add(rows, 0.004 - 0.0001 * rows)
    assert costs.row(9) == 0, "larger steps are not slower"


def test_rows_that_cost_more_than_they_gain_are_not_drafted():
    drafter, text = Drafter(8, False), request(repeating(9))
    for rows in [*range(1, 30)] * 20:
        drafter.costs.add(rows, 0.001 + 0.0004 * rows)
    assert 0.2 < drafter.costs.row(1) < ACCEPTANCE < drafter.costs.row(4)
    assert drafter.begins(text, 1) and drafter.draft(text, 8, 1)
    assert not drafter.begins(text, 4) and not drafter.draft(text, 8, 4)
    drafter.learn(text, 8, 8)
    text.draft_state.acceptance = 0.9
    assert drafter.begins(text, 4)
    assert not drafter.draft(request(repeating(30)), 8, 40), "long matches, too"
