"""The state machine, event by event: what a client and the workers are sent."""

from __future__ import annotations

import gc
from unittest.mock import patch

import pytest
from sim_workers import continuation, ids, register

from radixrt.config import RouterConfig
from radixrt.messages import (
    Abort,
    Adapter,
    Delta,
    Deltas,
    Error,
    Generate,
    Load,
    Namespace,
    Output,
    Resync,
    Run,
    Sampling,
    Saved,
    Score,
    Scored,
    StepDone,
    Stored,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
    WaitsFor,
)
from radixrt.messages.digests import prefix_digest
from radixrt.report import Report
from radixrt.router.core.core import RouterCore
from radixrt.router.core.effects import Order, Reply
from radixrt.router.core.request import Request
from radixrt.router.placement import cost
from radixrt.router.server import status

PROMPT = ids(5, 6, 7, 8)


def core_with(*workers, **config) -> RouterCore:
    core = RouterCore(RouterConfig(**config))
    for info in workers:
        core.register(info, 0.0)
    return core


def generate(id=1, prompt=PROMPT, **fields) -> Generate:
    sampling = fields.pop("sampling", Sampling(max_tokens=4, seed=3))
    return Generate(id=id, prompt=TokenPrompt(prompt), sampling=sampling, text=False, **fields)


def only_run(effects) -> tuple[str, Run]:
    (order,) = effects
    assert isinstance(order, Order) and isinstance(order.message, Run), order
    return order.name, order.message


def error(effects) -> Error:
    (reply,) = effects
    assert isinstance(reply, Reply) and isinstance(reply.message, Error), reply
    return reply.message


def failed(run: Run, **fields) -> StepDone:
    return step(Output(run.id, finish="error", error="it failed", **fields))


def step(*outputs, **fields) -> StepDone:
    return StepDone(list(outputs), fields.pop("load", Load()), **fields)


@pytest.mark.parametrize(("field", "code"), [("grammar", 400), ("", 500)])
def test_what_a_worker_cannot_do_is_the_fault_of_a_field_or_its_own(field, code):
    core = core_with(register("w0"))
    _, run = only_run(core.submit(b"c", generate(), 1.0))
    refusal = error(core.step("w0", step(Output(run.id, finish="error", error="grammar: no", field=field)), 2.0))
    assert (refusal.code, refusal.field, refusal.message) == (code, field, "grammar: no")


def test_a_stream_from_submit_to_usage():
    core = core_with(register("w0"))
    name, run = only_run(core.submit(b"c", generate(), 1.0))
    assert name == "w0" and run.ids == PROMPT and run.prompt_len == 4 and run.sampling.max_tokens == 4
    (reply,) = core.step("w0", step(Output(run.id, [9], None, 2)), 1.1)
    assert reply.client == b"c"
    (delta,) = reply.message.items
    assert (delta.id, delta.index, delta.ids, delta.finish, delta.usage) == (1, 0, ids(9), None, None)
    (reply,) = core.step("w0", step(Output(run.id, [10, 11, 12], "length", 2)), 1.2)
    (delta,) = reply.message.items
    assert delta.ids == ids(10, 11, 12) and delta.finish == "length"
    assert (delta.usage.prompt_tokens, delta.usage.completion_tokens, delta.usage.cached_tokens) == (4, 4, 2)
    assert delta.usage.worker == "w0"
    assert core.runs_in_flight == 0 and core.in_flight(b"c") == []
    assert core.step("w0", step(Output(run.id, [13])), 1.3) == []


def test_a_stream_token_by_token():
    """From the second on nothing but tokens comes; all of them are counted, and go on elsewhere."""
    core = core_with(register("a"))
    _, run = only_run(core.submit(b"c", generate(stream=True), 0.0))
    for token in (9, 10, 11):
        logprob = TokenLogprob(token, -1.0)
        (reply,) = core.step("a", step(Output(run.id, [token], logprobs=[logprob])), 1.0)
        assert reply.message == Deltas([Delta(1, 0, ids(token), logprobs=[logprob])])
    core.register(register("b"), 1.0)
    _, again = only_run(core.leave("a", 2.0))
    assert again.ids == PROMPT + ids(9, 10, 11)
    (reply,) = core.step("b", step(Output(again.id, [12], finish="length")), 2.0)
    assert reply.message.items[0].usage.completion_tokens == 4


def test_without_stream_one_delta_at_the_end():
    core = core_with(register("w0"))
    _, run = only_run(core.submit(b"c", generate(stream=False), 1.0))
    assert core.step("w0", step(Output(run.id, [9])), 1.1) == []
    (reply,) = core.step("w0", step(Output(run.id, [10], "stop", 0, stop=10)), 1.2)
    (delta,) = reply.message.items
    assert delta.ids == ids(9, 10) and delta.finish == "stop" and delta.stop == 10


def test_outputs_of_a_step_are_one_message_a_client():
    core = core_with(register("w0"))
    runs = [only_run(core.submit(client, generate(id), 1.0))[1] for client in (b"a", b"b") for id in (1, 2)]
    effects = core.step("w0", step(*(Output(run.id, [9]) for run in runs)), 1.1)
    assert [(e.client, [d.id for d in e.message.items]) for e in effects] == [(b"a", [1, 2]), (b"b", [1, 2])]


def test_choices_have_their_own_seeds_and_indices():
    core = core_with(register("w0"))
    effects = core.submit(b"c", generate(n=3), 1.0)
    runs = [effect.message for effect in effects]
    assert [run.sampling.seed for run in runs] == [3, 4, 5]
    (reply,) = core.step("w0", step(*(Output(run.id, [9], "length") for run in reversed(runs))), 1.1)
    assert [delta.index for delta in reply.message.items] == [2, 1, 0]
    assert core.runs_in_flight == 0


def test_the_router_draws_a_missing_seed_and_the_room_left():
    core = core_with(register("w0", max_model_len=100))
    _, run = only_run(core.submit(b"c", generate(sampling=Sampling()), 1.0))
    assert run.sampling.seed is not None and run.sampling.max_tokens == 96
    _, run = only_run(core.submit(b"c", generate(2, sampling=Sampling(max_tokens=10**6)), 1.0))
    assert run.sampling.max_tokens == 96


@pytest.mark.parametrize(("said", "counted"), [(None, 3), (2, 2), (3, 3), (4, 3), (2**60, 3), (0, 0), (-4, 3)])
def test_tokens_behind_what_ends_a_choice_are_not_counted(said, counted):
    core = core_with(register("w0"))
    _, run = only_run(core.submit(b"c", generate(), 1.0))
    core.step("w0", step(Output(run.id, [9, 9, 9])), 1.1)
    for index in (-1, 1, 2**60):
        assert core.end_choice(b"c", 1, index, said) == [], "there is no such choice"
    abort, reply = core.end_choice(b"c", 1, 0, said)
    assert abort.message == Abort([run.id])
    (delta,) = reply.message.items
    assert delta.finish == "stop" and delta.usage.completion_tokens == counted
    assert core.counters.generated_tokens == counted and core.runs_in_flight == 0
    assert core.end_choice(b"c", 1, 0, said) == []


def test_the_worker_of_an_answer_is_told_once_which_tool_it_calls():
    core = core_with(register("w0"))
    _, run = only_run(core.submit(b"c", generate(), 1.0))
    assert core.ended.called(b"c", 1, 0, "ls") == [], "it has not ended"
    core.step("w0", step(Output(run.id, [9], "stop", 0)), 1.1)
    assert core.ended.called(b"other", 1, 0, "ls") == core.ended.called(b"c", 1, 1, "ls") == []
    assert core.ended.called(b"c", 1, 0, "l" * 1000) == [Order("w0", WaitsFor(run.id, "l" * 64))]
    assert core.ended.called(b"c", 1, 0, "ls") == []


def test_score_collects_choices_and_sums_usage():
    core = core_with(register("w0"))
    choices = [TokenPrompt(ids(1, 2)), TokenPrompt(ids(3))]
    orders = core.submit(b"c", Score(id=4, prompt=TokenPrompt(PROMPT), choices=choices), 1.0)
    first, second = (order.message for order in orders)
    assert first.score_from == 4 and first.sampling.max_tokens == 0 and first.ids == PROMPT + ids(1, 2)
    assert core.end_choice(b"c", 4, 0) == [], "choices of a Generate alone are ended"
    assert (
        core.step("w0", step(Output(first.id, scores=[-1.0]), Output(second.id, [], "length", 3, None, [-3.0])), 1.1)
        == []
    )
    (reply,) = core.step("w0", step(Output(first.id, [], "length", 2, None, [-2.0])), 1.2)
    assert isinstance(reply.message, Scored)
    assert reply.message.logprobs == [[-1.0, -2.0], [-3.0]]
    assert (reply.message.usage.prompt_tokens, reply.message.usage.cached_tokens) == (11, 5)


def test_cancel_aborts_every_choice_and_frees_the_id():
    core = core_with(register("w0"))
    runs = [e.message.id for e in core.submit(b"c", generate(n=2), 1.0)]
    assert core.cancel(b"other", 1) == []
    assert core.cancel(b"c", 1) == [Order("w0", Abort(runs))]
    assert core.cancel(b"c", 1) == [] and core.runs_in_flight == 0
    assert core.step("w0", step(*(Output(run, [9]) for run in runs)), 1.1) == []
    only_run(core.submit(b"c", generate(), 2.0))


def test_a_vanished_client_frees_its_work_only():
    core = core_with(register("w0"))
    mine = [only_run(core.submit(b"c", generate(id), 1.0))[1].id for id in (1, 2)]
    _, other = only_run(core.submit(b"d", generate(), 1.0))
    assert core.drop_client(b"c") == [Order("w0", Abort(mine))]
    assert core.step("w0", step(Output(other.id, [9])), 1.1)[0].client == b"d"


def test_a_choice_stopped_by_its_text_has_usage_and_is_aborted():
    core = core_with(register("w0"))
    runs = [e.message.id for e in core.submit(b"c", generate(n=2), 1.0)]
    core.step("w0", step(Output(runs[0], [9, 10], None, 1)), 1.1)
    usage, effects = core.stop_choice(b"c", 1, 0)
    assert usage.completion_tokens == 2 and usage.cached_tokens == 1 and effects == [Order("w0", Abort([runs[0]]))]
    assert core.stop_choice(b"c", 1, 0) == (None, []) and core.in_flight(b"c") == [1]
    core.stop_choice(b"c", 1, 1)
    assert core.in_flight(b"c") == []


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (generate(model="gpt"), 404, "model"),
        (generate(prompt=b""), 400, "prompt"),
        (generate(prompt=b"abcde"), 400, "prompt"),
        (generate(prompt=ids(1, -2)), 400, "prompt"),
        (generate(prompt=ids(1, 100)), 400, "prompt"),
        (generate(prompt=ids(*range(65))), 400, "prompt"),
        (generate(n=0), 400, "n"),
        (generate(n=129), 400, "n"),
        (generate(sampling=Sampling(max_tokens=-1)), 400, "max_tokens"),
        (generate(sampling=Sampling(temperature=float("nan"))), 400, "temperature"),
        (generate(sampling=Sampling(stop_token_ids=(100,))), 400, "stop_token_ids"),
        (generate(prompt_logprobs=True), 400, "prompt_logprobs"),
        (Generate(id=1, prompt=TextPrompt("hi")), 400, "prompt"),
        (Score(id=1, prompt=TokenPrompt(PROMPT), choices=[]), 400, "choices"),
        (Score(id=1, prompt=TokenPrompt(PROMPT), choices=[TokenPrompt(b"")]), 400, "choices[0]"),
        (Score(id=1, prompt=TokenPrompt(PROMPT), choices=[TokenPrompt(ids(*range(61)))]), 400, "prompt"),
    ],
)
def test_refused_with_the_field(request_, code, field):
    core = core_with(register("w0", max_model_len=64, vocab_size=100))
    refusal = error(core.submit(b"c", request_, 1.0))
    assert (refusal.id, refusal.code, refusal.field) == (1, code, field)
    assert refusal.message and core.runs_in_flight == 0 and core.in_flight(b"c") == []


def test_a_prompt_may_fill_the_context_only_where_nothing_follows():
    core = core_with(register("w0", max_model_len=4))
    assert error(core.submit(b"c", generate(), 1.0)).field == "prompt"
    only_run(core.submit(b"c", generate(sampling=Sampling(max_tokens=0)), 1.0))


@pytest.mark.parametrize(("prompt", "hit"), [(PROMPT, 3), (PROMPT + ids(9), 4), (PROMPT[:-4], 2)])
def test_whole_pages_are_expected_to_be_hit(prompt, hit):
    """And of a prompt that ends with a page all but its last token, which is what a worker computes."""
    core = core_with(register("w0", page_size=2))
    core.step("w0", step(events=[Stored(Namespace("default", "m").key, 1, 0, 0, 0, PROMPT)]), 1.0)
    _, run = only_run(core.submit(b"c", generate(prompt=prompt), 1.0))
    core.step("w0", step(Output(run.id, [9], "length", hit)), 1.1)
    assert (core.counters.predicted_tokens, core.counters.drift_tokens) == (hit, 0)


def test_a_prompt_that_no_pool_can_hold_is_refused():
    core = core_with(register("w0", total_pages=2, page_size=2))
    assert error(core.submit(b"c", generate(prompt=PROMPT + PROMPT), 1.0)).field == "prompt"


def test_duplicate_id_leaves_the_first_alone():
    core = core_with(register("w0"))
    _, run = only_run(core.submit(b"c", generate(), 1.0))
    assert error(core.submit(b"c", generate(), 1.0)).field == "id"
    assert core.step("w0", step(Output(run.id, [9])), 1.1)[0].message.items[0].ids == ids(9)


def test_a_tenant_that_fills_all_places_leaves_others_some():
    """With 16 places, two are for tenants that have fewer than two in flight."""
    core = core_with(register("w0"), max_queued_requests=16, api_key=("a:ka", "b:kb", "c:kc"))

    def asks(key: str, id: int, n: int = 1) -> bool:
        effects = core.submit(key, generate(id, api_key=key, n=n), 1.0)
        return isinstance(effects[0], Order) or error(effects).code != 429

    assert [asks("ka", id) for id in range(20)] == [True] * 14 + [False] * 6
    assert [asks("kb", id) for id in range(3)] == [True, True, False], "the spare places are full"
    assert not asks("kc", 1)
    core.cancel("kb", 0)
    assert not asks("kb", 3, n=2) and not asks("ka", 30), "it is no place of theirs"
    assert asks("kc", 2)
    core.drop_client("ka")
    assert core._tenants["a"] == 0 and asks("kb", 4, n=12) and not asks("kb", 5)
    assert asks("kc", 3) and not asks("kc", 4)
    for key in ("kb", "kc"):
        core.drop_client(key)
    assert not any(core._tenants.values()) and core.runs_in_flight == 0


def test_too_many_in_flight_is_429_with_retry_after():
    core = core_with(register("w0"), max_queued_requests=2)
    core.submit(b"c", generate(1), 1.0)
    core.submit(b"c", generate(2), 1.0)
    refusal = error(core.submit(b"c", generate(3), 1.0))
    assert refusal.code == 429 and refusal.retry_after >= 1


def test_no_worker_is_503_that_says_so():
    refusal = error(RouterCore(RouterConfig()).submit(b"c", generate(), 1.0))
    assert refusal.code == 503 and "no worker" in refusal.message and refusal.retry_after > 0
    core = RouterCore(RouterConfig(served_model_name="m"))
    assert error(core.submit(b"c", generate(model="m"), 1.0)).code == 503
    assert error(core.submit(b"c", generate(model="x"), 1.0)).code == 404


def test_the_namespace_comes_from_the_key_not_from_the_caller():
    core = core_with(register("w0"), api_key=["acme:k1", "bolt:k2"])
    assert error(core.submit(b"c", generate(), 1.0)).code == 401
    assert error(core.submit(b"c", generate(api_key="acme"), 1.0)).code == 401
    namespaces = [
        only_run(core.submit(b"c", generate(i, api_key=key, cache_salt=salt), 1.0))[1].namespace
        for i, (key, salt) in enumerate([("k1", ""), ("k2", ""), ("k1", "x"), ("k1", "bolt\nm\n")])
    ]
    assert len(set(namespaces)) == 4
    assert [Namespace.of(n).tenant for n in namespaces] == ["acme", "bolt", "acme", "acme"]


def test_keys_without_a_tenant_are_all_of_the_default_tenant():
    core = core_with(register("w0"), api_key=["sk-1", "acme:k2", "sk-3"])
    found = [
        only_run(core.submit(b"c", generate(i, api_key=key), 1.0))[1].namespace
        for i, key in enumerate(("sk-1", "k2", "sk-3"))
    ]
    assert [Namespace.of(n).tenant for n in found] == ["default", "acme", "default"]
    assert error(core.submit(b"c", generate(9, api_key="default"), 1.0)).code == 401


@pytest.mark.parametrize("entries", [["a:"], [":k"], ["k", "a:k"], ["a b:k"], ["a:k", "b:k"]])
def test_bad_api_keys_are_named_without_the_key(entries):
    with pytest.raises(ValueError, match=f"number {len(entries)}"):
        RouterCore(RouterConfig(api_key=entries))


# ------------------------------------------------------------ workers come and go


def test_a_lost_workers_run_goes_on_where_it_was():
    core = core_with(register("w0"))
    _, run = only_run(core.submit(b"c", generate(), 1.0))
    tokens = continuation(PROMPT, 4)
    core.step("w0", step(Output(run.id, tokens[:2], None, 3)), 1.1)
    core.register(register("w1"), 1.2)
    name, again = only_run(core.leave("w0", 1.3))
    assert name == "w1" and again.id != run.id and again.prompt_len == 4
    assert again.ids == PROMPT + ids(*tokens[:2]) and again.sampling == run.sampling
    assert core.step("w0", step(Output(run.id, [tokens[2]])), 1.4) == []
    (reply,) = core.step("w1", step(Output(again.id, tokens[2:], "length", 0)), 1.5)
    usage = reply.message.items[0].usage
    assert (usage.completion_tokens, usage.cached_tokens, usage.worker) == (4, 3, "w1")


@pytest.mark.parametrize("scored", [False, True])
def test_a_runs_priority_goes_to_each_of_its_workers(scored):
    core = core_with(register("w0"), register("w1"))
    score = Score(id=1, prompt=TokenPrompt(PROMPT), choices=[TokenPrompt(ids(9))], priority=-3)
    asked = score if scored else generate(priority=-3)
    name, run = only_run(core.submit(b"c", asked, 1.0))
    other, again = only_run(core.leave(name, 2.0))
    assert other != name and run.priority == again.priority == -3


def test_what_a_client_got_is_counted_though_its_worker_was_lost():
    core = core_with(register("w0"))
    _, run = only_run(core.submit(b"c", generate(), 1.0))
    core.step("w0", step(Output(run.id, [9, 9], None, 3)), 1.1)
    core.register(register("w1"), 1.2)
    core.leave("w0", 1.3)
    core.cancel(b"c", 1)
    counters = core.counters
    assert (counters.prompt_tokens, counters.cached_tokens, counters.generated_tokens) == (4, 3, 2)


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_is_scored_once(stream):
    """With the first token, and not again where another worker goes on; before it, anew."""
    core = core_with(register("w0"), register("w1"), register("w2"))
    sampling = Sampling(max_tokens=4, seed=3, logprobs=1)
    name, run = only_run(core.submit(b"c", generate(sampling=sampling, stream=stream, prompt_logprobs=True), 1.0))
    assert run.score_from == 1
    name, run = only_run(core.leave(name, 1.1))
    assert run.score_from == 1
    scored, drawn = [TokenLogprob(6, -1.5), TokenLogprob(7, -2.5)], [TokenLogprob(9, -0.5)]
    effects = core.step(name, step(Output(run.id, [9], logprobs=drawn, prompt_logprobs=scored)), 1.2)
    (order,) = core.leave(name, 1.3)
    assert order.message.score_from is None and order.message.ids == PROMPT + ids(9)
    effects += core.step(order.name, step(Output(order.message.id, [10], "length", logprobs=drawn)), 1.4)
    found = [delta for reply in effects for delta in reply.message.items]
    assert [delta.prompt_logprobs for delta in found] == [scored, None][: len(found)] and len(found) == 1 + stream


def test_hits_count_where_the_prompt_was_computed():
    core = core_with(register("w0"))
    _, run = only_run(core.submit(b"c", generate(), 1.0))
    core.register(register("w1"), 1.2)
    _, again = only_run(core.leave("w0", 1.3))
    (reply,) = core.step("w1", step(Output(again.id, [1], "length", 2)), 1.5)
    assert reply.message.items[0].usage.cached_tokens == 2


def test_silence_and_its_end_are_logged(caplog):
    caplog.set_level("INFO")
    core = core_with(register("w0"), worker_timeout=5.0)
    for now in (1.0, 3.0, 5.0, 7.0, 9.0):
        core.tick(now)
    assert [r.getMessage() for r in caplog.records] == ["worker w0 is lost: not heard for 5 s"]
    core.heartbeat("w0", 10.0)
    assert caplog.records[-1].getMessage() == "worker w0 is heard again, and serves" and len(caplog.records) == 2


def test_silence_loses_a_worker_and_a_late_answer_of_it_is_nobodys():
    core = core_with(register("w0"), worker_timeout=5.0)
    _, run = only_run(core.submit(b"c", generate(), 1.0))
    core.register(register("w1"), 1.0)
    for now in range(1, 6):
        core.heartbeat("w1", now)
        assert not [e for e in core.tick(now) if isinstance(e, Order)]
    orders = [e for e in core.tick(6.0) if isinstance(e, Order)]
    name, again = only_run(orders)
    assert name == "w1"
    revived = core.step("w0", step(Output(run.id, [9])), 7.0)
    assert revived == [Order("w0", Abort([run.id])), Order("w0", Resync())]
    assert core.step("w0", step(Output(run.id, [9])), 7.1) == []
    assert core.step("w1", step(Output(again.id, [9])), 7.2)[0].message.items[0].ids == ids(9)


def test_workers_lost_together_do_not_take_over_from_each_other():
    core = core_with(*(register(f"w{i}") for i in range(4)), worker_timeout=5.0)
    runs = [only_run(core.submit(b"c", generate(i, ids(i, 7, 8)), 1.0)) for i in range(1, 9)]
    assert {name for name, _ in runs} == {"w0", "w1", "w2", "w3"}
    for now in range(1, 6):
        core.heartbeat("w3", now)
        assert not [e for e in core.tick(now) if isinstance(e, Order)]
    orders = [e for e in core.tick(6.0) if isinstance(e, Order)]
    lost = sum(name != "w3" for name, _ in runs)
    assert [order.name for order in orders] == ["w3"] * lost and core.counters.redispatched == lost


def test_what_waited_goes_to_a_worker_that_was_lost_by_silence_and_speaks_again():
    core = core_with(register("w0"))
    _, run = only_run(core.submit(b"c", generate(), 1.0))
    assert core.lose(["w0"], 1.5) == []
    assert core.heartbeat("nobody", 1.6) == []
    aborted, asked, dispatched = core.heartbeat("w0", 2.0)
    assert (aborted, asked) == (Order("w0", Abort([run.id])), Order("w0", Resync()))
    assert dispatched.message.ids == run.ids and dispatched.message.id != run.id


def test_the_routers_own_pause_loses_nobody():
    core = core_with(register("w0"), worker_timeout=5.0)
    core.tick(1.0)
    core.submit(b"c", generate(), 1.0)
    assert not [e for e in core.tick(100.0) if isinstance(e, Order)]
    assert len(core.workers) == 1


def test_a_new_incarnation_of_a_name_takes_its_runs_over():
    core = core_with(register("w0", pid=1))
    _, run = only_run(core.submit(b"c", generate(), 1.0))
    name, again = only_run(core.register(register("w0", pid=2), 2.0))
    assert name == "w0" and again.id != run.id
    assert core.step("w0", step(Output(run.id, [9])), 2.1) == []
    assert core.step("w0", step(Output(again.id, [9])), 3.1)[0].message.items[0].ids == ids(9)


def test_a_worker_that_registers_again_has_dropped_its_runs_and_kept_its_cache():
    core = core_with(register("w0", pid=1))
    _, run = only_run(core.submit(b"c", generate(), 1.0))
    core.step("w0", step(Output(run.id, [9])), 1.5)
    aborted, asked, dispatched = core.register(register("w0", pid=1), 2.0)
    assert aborted == Order("w0", Abort([run.id])), "it may have taken the run after it had let go of all"
    assert asked == Order("w0", Resync())
    assert dispatched.name == "w0" and dispatched.message.id != run.id
    assert dispatched.message.ids == run.ids + ids(9)


def test_what_a_worker_said_and_was_lost_is_computed_again():
    core = core_with(register("w0"))
    _, run = only_run(core.submit(b"c", generate(), 1.0))
    core.step("w0", step(Output(run.id, [9]), number=1), 1.5)
    aborted, asked, dispatched = core.step("w0", step(Output(run.id, [11]), number=3), 2.0)
    assert (aborted, asked) == (Order("w0", Abort([run.id])), Order("w0", Resync()))
    assert dispatched.message.ids == run.ids + ids(9)
    again = dispatched.message.id
    assert core.step("w0", step(Output(run.id, [12]), number=4), 2.1) == []
    (reply,) = core.step("w0", step(Output(again, [10]), number=5), 2.2)
    assert reply.message.items[0].ids == ids(10)
    core.register(register("w0"), 3.0)
    (order,) = (e for e in core.step("w0", step(number=2), 3.1) if isinstance(e.message, Run))
    assert order.message.ids == run.ids + ids(9, 10), "it counts from its Register"
    core.tick(3.5)
    core.lose(["w0"], 4.0)
    core.heartbeat("w0", 5.0)
    assert not any(isinstance(e.message, Run) for e in core.step("w0", step(number=9), 5.1)), "who was lost goes on"


def uneven(**load) -> RouterCore:
    """A worker that takes 10 tokens, and one that takes 100 and has more to do."""
    core = core_with(register("small", max_model_len=10), register("big", max_model_len=100))
    core.step("big", step(load=Load(running=1, queued_tokens=5000, free_pages=100, total_pages=100)), 0.5)
    return core


def test_what_is_asked_for_must_fit_where_it_can():
    core = uneven()
    for max_tokens, name in ((6, "small"), (7, "big"), (96, "big"), (97, "small"), (None, "small"), (0, "small")):
        request = generate(max_tokens or 1, sampling=Sampling(max_tokens=max_tokens, seed=3))
        found, run = only_run(core.submit(str(max_tokens).encode(), request, 1.0))
        assert (found, run.sampling.max_tokens) == (name, 96 if max_tokens in (None, 97) else max_tokens)
    core.leave("big", 1.0)
    found, run = only_run(core.submit(b"all that there is", generate(9), 1.0))
    assert (found, run.sampling.max_tokens) == ("small", 4)


@pytest.mark.parametrize("stream", [True, False])
def test_a_run_that_fills_its_worker_goes_on_where_there_is_more_room(stream):
    core = uneven()
    request = generate(stream=stream, sampling=Sampling(max_tokens=None, seed=3, logprobs=0))
    name, run = only_run(core.submit(b"c", request, 1.0))
    core.step("small", step(Output(run.id, [20], None, 2, logprobs=[TokenLogprob(20, -1.0)])), 1.1)
    last = Output(run.id, [21, 22, 23, 24, 25], "length", 2, logprobs=[TokenLogprob(i, -1.0) for i in range(21, 26)])
    effects = core.step("small", step(last), 1.2)
    replies, orders = effects[:-1], effects[-1:]
    name, again = only_run(orders)
    assert (name, again.ids, again.prompt_len) == ("big", PROMPT + ids(20, 21, 22, 23, 24, 25), 4)
    assert again.sampling == run.sampling and again.id != run.id
    if stream:
        (delta,) = replies[0].message.items
        assert (delta.ids, delta.finish, delta.usage) == (ids(21, 22, 23, 24, 25), None, None)
    assert len(replies) == stream
    assert core.step("small", step(Output(run.id, [99])), 1.3) == []
    (reply,) = core.step("big", step(Output(again.id, [26], "stop", 9, logprobs=[TokenLogprob(26, -1.0)])), 1.4)
    (delta,) = reply.message.items
    assert (delta.usage.completion_tokens, delta.usage.cached_tokens, delta.usage.worker) == (7, 2, "big")
    assert len(delta.logprobs) == (1 if stream else 7) and delta.finish == "stop"
    assert core.runs_in_flight == 0 and core.counters.redispatched == 0


def test_an_answer_that_nobody_has_more_room_for_ends():
    core = core_with(register("small", max_model_len=10), register("other", max_model_len=10))
    _, run = only_run(core.submit(b"c", generate(sampling=Sampling(max_tokens=None, seed=3)), 1.0))
    name = "small"
    (reply,) = core.step(name, step(Output(run.id, [20] * 6, "length")), 1.1)
    assert reply.message.items[0].finish == "length"


def test_an_answer_that_has_all_its_tokens_ends_where_it_is():
    core = uneven()
    _, run = only_run(core.submit(b"c", generate(sampling=Sampling(max_tokens=6, seed=3)), 1.0))
    (reply,) = core.step("small", step(Output(run.id, [20] * 6, "length")), 1.1)
    assert reply.message.items[0].finish == "length"


def test_an_answer_ends_where_the_roomier_worker_has_left():
    core = uneven()
    _, run = only_run(core.submit(b"c", generate(sampling=Sampling(max_tokens=None, seed=3)), 1.0))
    core.leave("big", 1.0)
    (reply,) = core.step("small", step(Output(run.id, [20] * 6, "length")), 1.1)
    assert reply.message.items[0].finish == "length" and core.runs_in_flight == 0


def test_hits_that_were_expected_stay_those_of_the_first_worker():
    core = uneven()
    _, run = only_run(core.submit(b"c", generate(sampling=Sampling(max_tokens=None, seed=3)), 1.0))
    (state,) = core._requests[b"c"][1].runs
    core.step("big", step(events=[Stored(Namespace("default", "m").key, 1, 0, 0, 0, PROMPT)]), 1.0)
    core.step("small", step(Output(run.id, [20] * 6, "length")), 1.1)
    assert state.worker_name == "big" and (state.hit, state.best_hit) == (0, 0)


def test_a_worker_that_ends_an_answer_before_it_is_full_is_believed():
    core = uneven()
    _, run = only_run(core.submit(b"c", generate(sampling=Sampling(max_tokens=None, seed=3)), 1.0))
    (reply,) = core.step("small", step(Output(run.id, [20] * 5, "length")), 1.1)
    assert reply.message.items[0].finish == "length" and core.runs_in_flight == 0


def test_the_last_worker_lost_requests_wait_for_another():
    core = core_with(register("w0"), worker_timeout=5.0)
    _, run = only_run(core.submit(b"c", generate(), 1.0))
    assert core.leave("w0", 2.0) == []
    for now in range(2, 12):
        assert all(e.message == Deltas([]) for e in core.tick(float(now)))
    name, again = only_run(core.register(register("w9"), 11.5))
    assert name == "w9" and again.ids == run.ids
    assert core.leave("w9", 12.0) == []
    gone = [e for now in range(12, 24) for e in core.tick(float(now)) if e.message != Deltas([])]
    refusal = error(gone)
    assert refusal.code == 503 and refusal.id == 1 and refusal.retry_after == 5.0
    assert core.runs_in_flight == 0


def test_waiting_requests_can_be_cancelled():
    core = core_with(register("w0"))
    core.submit(b"c", generate(), 1.0)
    core.leave("w0", 2.0)
    assert core.cancel(b"c", 1) == [] and core.runs_in_flight == 0
    assert core.register(register("w1"), 3.0) == []


def test_what_kills_its_workers_is_given_up():
    core = core_with(*(register(f"w{i}") for i in range(5)))
    (order,) = core.submit(b"c", generate(n=1), 1.0)
    for _ in range(2):
        (order,) = core.leave(order.name, 2.0)
    assert "3 workers were lost" in error(core.leave(order.name, 3.0)).message
    assert len(core.workers) == 2 and core.runs_in_flight == 0


def test_workers_that_are_told_to_leave_or_come_back_are_no_losses():
    """However often a fleet is renewed, a long answer goes on."""
    core = core_with(*(register(f"w{i}") for i in range(2)))
    (order,) = core.submit(b"c", generate(n=1), 1.0)
    for n in range(6):
        (order,) = core.leave(order.name, 2.0, planned=True)
        core.register(register(f"w{n % 2}"), 2.0)
    for _ in range(6):
        order = core.register(register(order.name), 3.0)[-1]
        assert isinstance(order.message, Run)
    for back in (core.heartbeat, lambda name, now: core.register(register(name), now)) * 3:
        name = order.name
        (order,) = core.lose([name], 3.0)
        back(name, 3.0)
        assert isinstance(order.message, Run) and order.name != name
    assert core.runs_in_flight == 1
    for _ in range(2):
        core.register(register("w9"), 3.0)
        (order,) = core.leave(order.name, 4.0)
    assert "3 workers were lost" in error(core.leave(order.name, 5.0)).message


def test_what_gets_on_does_not_kill_its_workers():
    """A long answer outlives any number of them, but not three from which it gains next to nothing."""
    core = core_with(*(register(f"w{i}") for i in range(9)))
    _, run = only_run(core.submit(b"c", generate(sampling=Sampling(max_tokens=500)), 1.0))
    for gained in (0, 0, 16, 0, 20, 15):
        name = core._dispatcher.in_flight[run.id].worker_name
        core.step(name, step(*(Output(run.id, [9]) for _ in range(gained))), 2.0)
        _, run = only_run(core.leave(name, 2.0))
    assert len(run.ids) == len(PROMPT) + 4 * 51
    name = core._dispatcher.in_flight[run.id].worker_name
    assert "3 workers were lost" in error(core.leave(name, 3.0)).message


def test_a_whole_answer_that_its_client_ends_is_what_there_is_of_it():
    core = core_with(register("w0"))
    sampling = Sampling(max_tokens=9, seed=3, logprobs=0)
    runs = [e.message for e in core.submit(b"c", generate(sampling=sampling, stream=False, n=2), 1.0)]
    found = [TokenLogprob(token, -1.0) for token in (9, 10, 11)]
    core.step("w0", step(Output(runs[0].id, [9, 10, 11], logprobs=found)), 1.1)
    order, reply = core.end_choice(b"c", 1, 0, tokens=2)
    (delta,) = reply.message.items
    assert order.message == Abort([runs[0].id])
    assert (delta.ids, delta.logprobs, delta.finish) == (ids(9, 10), found[:2], "stop")
    assert delta.usage.completion_tokens == 2
    _, reply = core.end_choice(b"c", 1, 1)
    assert reply.message.items[0].ids == b"" and core.runs_in_flight == 0


def test_what_a_run_had_computed_itself_is_no_hit_where_it_goes_on():
    """Its worker is lost in the middle of its prompt, and comes back with what it had computed of it."""
    core = core_with(register("w0"))
    namespace = only_run(core.submit(b"c", generate(0), 0.0))[1].namespace
    core.cancel(b"c", 0)
    core.step("w0", step(events=[Stored(namespace, 1, 0, 0, 0, ids(5))]), 0.5)
    core.submit(b"c", generate(1, stream=False), 1.0)
    for now in (2.0, 3.0):
        core.lose(["w0"], now)
        again = core.heartbeat("w0", now)[-1].message
        assert isinstance(again, Run)
    (reply,) = core.step("w0", step(Output(again.id, [1], "length", 3)), 4.0)
    assert reply.message.items[0].usage.cached_tokens == 1, "one token was there before"


def test_hits_of_scores_count_where_the_first_of_them_came_from():
    core = core_with(register("w0"))
    orders = core.submit(b"c", Score(id=1, prompt=TokenPrompt(PROMPT), choices=[TokenPrompt(ids(1, 2))]), 1.0)
    core.step("w0", step(Output(orders[0].message.id, cached_tokens=2, scores=[-1.0])), 1.1)
    core.lose(["w0"], 2.0)
    again = core.heartbeat("w0", 3.0)[-1].message
    (reply,) = core.step("w0", step(Output(again.id, [], "length", 4, None, [-1.0, -2.0])), 4.0)
    assert reply.message.usage.cached_tokens == 2 and reply.message.logprobs == [[-1.0, -2.0]]


def test_a_worker_error_fails_its_request_alone():
    core = core_with(register("w0"))
    bad = [e.message for e in core.submit(b"c", generate(1, n=2), 1.0)]
    _, good = only_run(core.submit(b"c", generate(2), 1.0))
    effects = core.step("w0", step(Output(bad[0].id, [], "error", error="NaN"), Output(good.id, [9])), 1.1)
    kinds = [type(e.message) for e in effects]
    assert kinds == [Deltas, Error, Abort]
    assert effects[1].message.message == "NaN" and effects[2].message.ids == [bad[1].id]
    assert core.in_flight(b"c") == [2]


@pytest.mark.parametrize("stream", [True, False])
def test_what_a_worker_fails_goes_on_at_another(stream):
    """What was wrong may have been the worker, or another request of the step."""
    core = core_with(*(register(f"w{i}") for i in range(3)))
    first, run = only_run(core.submit(b"c", generate(stream=stream), 1.0))
    core.step(first, step(Output(run.id, [9], cached_tokens=1)), 1.1)
    second, again = only_run(core.step(first, failed(run, cached_tokens=1), 1.2))
    assert second != first and again.ids == PROMPT + ids(9)
    core.step(second, step(Output(again.id, [10])), 1.3)
    third, moved = only_run(core.leave(second, 1.4))
    assert third not in (first, second) and moved.ids == PROMPT + ids(9, 10)
    (reply,) = core.step(third, step(Output(moved.id, [11, 12], finish="length")), 1.5)
    (delta,) = reply.message.items
    assert (delta.usage.completion_tokens, delta.usage.cached_tokens) == (4, 1)
    assert delta.ids == (ids(11, 12) if stream else ids(9, 10, 11, 12))

    _, run = only_run(core.submit(b"c", generate(2), 2.0))
    second, again = only_run(core.step(core._dispatcher.in_flight[run.id].worker_name, failed(run), 2.1))
    assert error(core.step(second, failed(again), 2.2)).code == 500
    name, run = only_run(core.submit(b"c", generate(3), 3.0))
    assert error(core.step(name, failed(run, field="grammar"), 3.1)).code == 400
    assert core.runs_in_flight == 0 and core.index._computing.tokens == 0
    assert all(not member.runs and not member.waiting_tokens for member in core.workers)


def test_scores_that_a_worker_fails_are_computed_anew():
    core = core_with(register("a"), register("b"))
    choices = [TokenPrompt(ids(1, 2)), TokenPrompt(ids(3))]
    effects = core.submit(b"c", Score(id=1, prompt=TokenPrompt(PROMPT), choices=choices), 1.0)
    name, runs = effects[0].name, [e.message for e in effects]
    core.step(name, step(Output(runs[0].id, scores=[-9.0]), Output(runs[1].id, finish="length", scores=[-3.0])), 1.1)
    other, again = only_run(core.step(name, failed(runs[0]), 1.2))
    (reply,) = core.step(other, step(Output(again.id, finish="length", scores=[-1.0, -2.0])), 1.3)
    assert reply.message.logprobs == [[-1.0, -2.0], [-3.0]]


def test_what_a_worker_refused_was_not_computed():
    """Nothing of it is counted, nor is it known to the report."""
    core = core_with(register("w0"))
    _, run = only_run(core.submit(b"c", generate(), 1.0))
    core.step("w0", step(Output(run.id, [], "error", error="grammar: no", field="grammar")), 1.1)
    assert core.counters.failed == 1 and core.counters.prompt_tokens == 0
    assert core.index.match(run.namespace, PROMPT) == {}


def test_a_resync_that_does_not_come_is_asked_for_again():
    core = core_with(register("w0"), worker_timeout=60.0)
    core.tick(30.0)
    assert core.step("w0", step(seq=5), 40.0) == [Order("w0", Resync())]
    asked = [(now, [e for e in core.tick(now) if isinstance(e, Order)]) for now in (41.0, 49.0, 51.0, 60.0, 62.0)]
    assert [now for now, orders in asked if orders == [Order("w0", Resync())]] == [51.0, 62.0]
    core.step("w0", step(seq=9, resync=True), 63.0)
    assert not [e for now in (70.0, 80.0, 90.0) for e in core.tick(now) if isinstance(e, Order)]


def test_a_gap_in_the_events_asks_for_a_resync():
    core = core_with(register("w0"))
    event = Stored(Namespace("default", "m").key, 1, 0, 0, 0, PROMPT)
    assert core.step("w0", step(seq=3, events=[event]), 1.0) == [Order("w0", Resync())]
    assert core.step("w0", step(seq=4, events=[event]), 1.1) == []
    assert core.step("w0", step(seq=9, events=[event], resync=True), 1.2) == []
    assert core.index.tokens == 4


def test_prefixes_pull_requests_to_the_worker_that_holds_or_computes_them():
    core = core_with(register("w0"), register("w1"))
    long = ids(*range(1000))
    first, _ = only_run(core.submit(b"c", generate(1, prompt=long), 1.0))
    second, _ = only_run(core.submit(b"c", generate(2, prompt=long + ids(1)), 1.0))
    assert first == second
    other = "w1" if first == "w0" else "w0"
    stored = Stored(Namespace("default", "m").key, 1, 0, 0, 0, ids(*range(5000, 8000)))
    core.step(other, step(events=[stored]), 1.1)
    name, _ = only_run(core.submit(b"c", generate(3, prompt=ids(*range(5000, 8001))), 1.2))
    assert name == other


def test_who_decodes_behind_the_same_beginning_is_counted():
    """Of the caller's namespace, part by part of what the worker that has most holds."""
    core = core_with(register("a"), register("b"), api_key=("x:x", "y:y"))
    trunk = list(range(800))
    held = Stored(Namespace("x", "m").key, 1, 0, 0, 0, ids(*trunk))
    core.step("a", step(events=[held]), 0.0)
    began = {
        1: ("x", trunk),
        2: ("x", trunk[:500] + [7] * 300),
        3: ("y", trunk),
        4: ("x", [7, *trunk]),
        5: ("x", trunk),
        6: ("x", [7] * 100 + trunk[100:]),
    }
    for number, (key, prompt) in began.items():
        name, run = only_run(core.submit(b"c", generate(number, ids(*prompt, 9), api_key=key), 0.0))
        if number != 5:  # which waits for its first token
            core.step(name, step(Output(run.id, [9])), 0.1)
    with patch.object(cost, "place", wraps=cost.place) as place:
        core.submit(b"c", generate(9, ids(*trunk, 8), api_key="x"), 0.2)
        assert place.call_args.args[2] == [2, 2, 2, 2, 2, 1, 1, 1]
        core.submit(b"c", generate(10, ids(*trunk[:200], 8), api_key="x"), 0.2)
        assert place.call_args.args[2] == [], "too little to be asked about"


def test_only_workers_of_the_model_are_asked():
    core = core_with(register("w0", model="a"), register("w1", model="b"))
    assert only_run(core.submit(b"c", generate(1, model="b"), 1.0))[0] == "w1"
    assert only_run(core.submit(b"c", generate(2), 1.0))[0] == "w0"


def test_only_workers_with_the_adapter_are_asked():
    """Under its own namespace, by its name; a request without a name gets the model."""
    core = core_with(register("w0"), register("w1", adapters=[Adapter("sql")]))
    for number in range(4):
        name, run = only_run(core.submit(b"c", generate(number, model="sql"), 1.0))
        assert (name, run.adapter, run.namespace) == ("w1", "sql", Namespace("default", "sql").key)
    name, run = only_run(core.submit(b"c", generate(5), 1.0))
    assert (name, run.adapter, run.namespace) == ("w0", "", Namespace("default", "m").key)
    core.lose(["w1"], 1.0)
    assert error(core.submit(b"c", generate(6, model="sql"), 1.0)).code == 503, "it may come back"
    core.leave("w1", 1.0)
    assert error(core.submit(b"c", generate(7, model="sql"), 1.0)).code == 404


@pytest.mark.parametrize("default", ["m", ""])
def test_aliases_are_the_model(default):
    """They share its prefixes; a model or an adapter of such a name comes first."""
    core = core_with(served_model_name=default, model_aliases=("gpt-9", "sql"))
    assert status.models(core) == []
    core.register(register("w0", adapters=[Adapter("sql")]), 0.0)
    _, run = only_run(core.submit(b"c", generate(1, model="m"), 1.0))
    _, other = only_run(core.submit(b"c", generate(2, model="gpt-9"), 1.0))
    assert other.namespace == run.namespace and (run.adapter, other.adapter) == ("", "")
    _, of_adapter = only_run(core.submit(b"c", generate(3, model="sql"), 1.0))
    assert of_adapter.adapter == "sql" and of_adapter.namespace != run.namespace
    assert error(core.submit(b"c", generate(4, model="gpt-8"), 1.0)).code == 404
    elsewhere = core_with(register("w1"), served_model_name="not yet", model_aliases=("gpt-9",))
    assert [model["id"] for model in status.models(elsewhere)] == ["m"]
    assert status.models(core) == [
        {"id": "m", "max_model_len": 4096}, {"id": "gpt-9", "max_model_len": 4096},
        {"id": "sql", "max_model_len": 4096, "parent": "m"},
    ]  # fmt: skip


def test_aliases_with_wildcards_are_many_names():
    """Which are not listed; an adapter comes first, and case counts."""
    core = core_with(register("w0", adapters=[Adapter("claude-sql")]), model_aliases=("claude-*", "gpt-?"))
    for number, name in enumerate(("claude-opus-9", "claude-", "gpt-9")):
        _, run = only_run(core.submit(b"c", generate(number, model=name), 1.0))
        assert (run.adapter, run.namespace) == ("", Namespace("default", "m").key)
    _, of_adapter = only_run(core.submit(b"c", generate(4, model="claude-sql"), 1.0))
    assert of_adapter.adapter == "claude-sql"
    for number, name in enumerate(("Claude-opus-9", "gpt-99", "my-claude-9"), 5):
        assert error(core.submit(b"c", generate(number, model=name), 1.0)).code == 404
    assert [model["id"] for model in status.models(core)] == ["m", "claude-sql"]
    anything = core_with(register("w1"), model_aliases=("*",))
    assert only_run(anything.submit(b"c", generate(2, model="qwen/any [1m]"), 1.0))[0] == "w1"


def test_an_adapter_whose_worker_is_lost_is_not_taken_for_an_alias():
    """It may come back: the model would give other answers meanwhile."""
    core = core_with(register("w0", adapters=[Adapter("sql")]), register("w1"), model_aliases=("sql",))
    core.lose(["w0"], 1.0)
    assert error(core.submit(b"c", generate(1, model="sql"), 2.0)).code == 503
    core.leave("w0", 3.0)
    _, run = only_run(core.submit(b"c", generate(2, model="sql"), 4.0))
    assert run.adapter == ""


def test_a_name_may_be_an_adapter_at_one_worker_and_a_model_at_another():
    """Each worker is asked for what it has, also when a run goes on elsewhere; the name is listed once."""
    core = core_with(register("w0", adapters=[Adapter("sql"), Adapter("bot")]))
    name, run = only_run(core.submit(b"c", generate(1, model="sql"), 1.0))
    assert (name, run.adapter) == ("w0", "sql")
    core.register(register("w1", model="sql", max_model_len=99), 1.0)
    name, again = only_run(core.leave("w0", 1.0))
    assert (name, again.adapter, again.namespace) == ("w1", "", run.namespace)
    core.register(register("w0", pid=2, adapters=[Adapter("sql"), Adapter("bot")]), 1.0)
    listed = status.models(core)
    name, again = only_run(core.leave("w1", 1.0))
    assert (name, again.adapter, again.namespace) == ("w0", "sql", run.namespace)
    core.register(register("w1", pid=2, model="sql", max_model_len=99), 1.0)
    assert status.models(core) == listed == [
        {"id": "m", "max_model_len": 4096}, {"id": "sql", "max_model_len": 4096},
        {"id": "bot", "max_model_len": 4096, "parent": "m"},
    ]  # fmt: skip


def test_a_run_waits_for_a_worker_with_its_adapter():
    """It is not computed by another worker of the same model."""
    core = core_with(register("w0"), register("w1", adapters=[Adapter("sql")]))
    only_run(core.submit(b"c", generate(1, model="sql"), 1.0))
    assert core.lose(["w1"], 2.0) == []
    assert core.register(register("w2", adapters=[Adapter("bot")]), 2.0) == []
    name, run = only_run(core.register(register("w3", adapters=[Adapter("bot"), Adapter("sql")]), 3.0))
    assert (name, run.adapter) == ("w3", "sql")


class Sink(Report):
    def __init__(self):
        super().__init__(1000)
        self.runs, self.loads = [], []

    def arrived(self, namespace, ids, tenant=""):
        return len(ids) // 4 - 1

    def finished(self, **fields):
        self.runs.append(fields)
        return super().finished(**fields)

    def load(self, worker, load):
        self.loads.append(worker)


def test_the_report_hears_of_every_run():
    sink = Sink()
    core = RouterCore(RouterConfig(), sink)
    core.register(register("w0"), 0.0)
    _, run = only_run(core.submit(b"c", generate(), 1.0))
    core.step("w0", step(Output(run.id, [9], "length", 2)), 1.1)
    (fields,) = sink.runs
    assert [fields[k] for k in ("prompt", "generated", "tenant", "worker")] == [PROMPT, ids(9), "default", "w0"]
    assert [fields[k] for k in ("cached_tokens", "bound_tokens", "page_size")] == [2, 3, 1]
    assert sink.loads == ["w0"] and core.counters.drift_tokens == 2 and core.counters.finished == 1


@pytest.mark.parametrize("end", ["finish", "score", "error", "cancel", "stop"])
def test_a_request_that_has_ended_waits_for_no_garbage_collector(end):
    """It holds its prompt, and its choices hold it."""
    core = core_with(register("w0"))
    gc.collect(0)  # what is made from here on is the youngest generation
    gc.disable()
    try:
        if end == "score":
            message = Score(id=1, prompt=TokenPrompt(PROMPT), choices=[TokenPrompt(ids(9)), TokenPrompt(ids(8))])
        else:
            message = generate(n=2)
        runs = [order.message.id for order in core.submit(b"c", message, 1.0)]
        assert len([found for found in gc.get_objects(0) if type(found) is Request]) == 1
        if end == "cancel":
            core.cancel(b"c", 1)
        elif end == "stop":
            assert [core.stop_choice(b"c", 1, index)[0].prompt_tokens for index in range(2)] == [4, 4]
        elif end == "error":
            core.step("w0", step(Output(runs[0], finish="error", error="no")), 2.0)
        else:
            core.step("w0", step(*(Output(run, [7], "length", scores=[-1.0]) for run in runs)), 2.0)
        assert core.runs_in_flight == 0
        assert not [found for found in gc.get_objects(0) if type(found) is Request]
    finally:
        gc.enable()


def test_a_request_goes_where_its_prefix_can_be_continued():
    """With recurrent states: two workers have cached all of it, and one has checkpoints. Its last token is computed."""
    core = core_with(register("a", num_states=9), register("b", num_states=9))
    prompt = ids(*range(5, 2005))
    for name, ends in (("a", ()), ("b", (1400, 2000))):
        events = [Stored(Namespace("default", "m").key, 1, 0, 0, 0, prompt)]
        for slot, end in enumerate(ends, 1):
            events.append(Saved(slot, end, prefix_digest(Namespace("default", "m").key, prompt[: 4 * end])))
        core.step(name, step(events=events, load=Load(prefill_rate=1000.0, free_pages=9000, total_pages=9000)), 1.0)
    name, run = only_run(core.submit(b"c", generate(prompt=prompt), 2.0))
    assert name == "b"
    core.step("b", step(Output(run.id, [9], "length", 1400), seq=3), 2.1)
    assert core.counters.predicted_tokens == core.counters.cached_tokens == 1400
