"""training.nano.eval and quality: their sums by hand, their loop against scripted endpoints, their files."""

from __future__ import annotations

import asyncio
import json
import math

import httpx
import pytest

from bench.common import RESULTS
from radixrt.config import NANO
from training.nano import card, eval, quality
from training.nano.quality import REFERENCE, SETTINGS, Result, Setting
from training.nano.score import Share, sign_test
from training.nano.solve import MAX_TURNS, Endpoint, Refused, serve
from training.nano.tasks import TAGS, Example, make
from training.nano.tasks.example import calls, says

ENDPOINT = Endpoint("http://test/v1", "m", "key")


# ---------------------------------------------------------------- sums


def test_intervals():
    assert [round(x, 4) for x in Share(8, 10).interval()] == [0.4902, 0.9433]
    assert [round(x, 4) for x in Share(0, 10).interval()] == [0.0, 0.2775]
    assert Share(91, 100).shown == "91.0 (83.8 to 95.2)"


@pytest.mark.parametrize("right, items", [(3, 10), (45, 50), (190, 200), (1, 7)])
def test_at_the_ends_of_an_interval_the_share_is_z_deviations_off(right, items):
    for end in Share(right, items).interval():
        assert abs(right / items - end) / math.sqrt(end * (1 - end) / items) == pytest.approx(1.959964)


def test_sign_test():
    assert sign_test(0, 0) == sign_test(3, 3) == 1
    assert sign_test(1, 9) == sign_test(9, 1) == pytest.approx(22 / 1024)
    assert sign_test(0, 5) == pytest.approx(2 / 32)


# ---------------------------------------------------------------- the loop


def solve(example: Example, answer, endpoint: Endpoint = ENDPOINT):
    """`answer(body, turn)` is the assistant's message."""
    seen = []

    def handle(request: httpx.Request) -> httpx.Response:
        assert (str(request.url), request.headers["authorization"]) == ("http://test/v1/chat/completions", "Bearer key")
        body = json.loads(request.content)
        seen.append(body)
        message = answer(body, len(seen) - 1)
        if isinstance(message, httpx.Response):
            return message
        usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": len(seen)}}
        return httpx.Response(200, json={"choices": [{"message": message}], "usage": usage})

    async def run():
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as http:
            return await endpoint.solve(http, example)

    return asyncio.run(run()), seen


def test_who_answers_by_the_book_is_right():
    """For every kind and tag: what is sent is the example's, with the tools' replies; what is counted is all calls."""
    for kind, tags in TAGS.items():
        for tag in tags:
            example = make(kind, tag, 0)
            gold = [message for message in example.gold if message["role"] == "assistant"]
            outcome, seen = solve(example, lambda body, turn, gold=gold: gold[turn])
            assert outcome.right and (outcome.text, outcome.calls) == example.gold_result(), (kind, tag)
            assert len(seen) == len(gold) and seen[-1]["messages"] == [*example.messages, *example.gold[:-1]]
            assert seen[0].get("tools") == example.tools and seen[0]["temperature"] == 0
            assert outcome.prompt_tokens == 10 * len(gold)
            assert outcome.cached_tokens == sum(range(1, len(gold) + 1))


def test_surprise_is_of_all_turns():
    """By hand: two turns, one of two tokens and one without log-probabilities."""
    example = make("lookup", "1", 0)
    gold = [message for message in example.gold if message["role"] == "assistant"]
    told = {"content": [{"token": "a", "logprob": -0.25}, {"token": "b", "logprob": -0.5}]}

    def answer(body, turn):
        assert body["logprobs"] is True
        usage = {"prompt_tokens": 1}
        choice = {"message": gold[turn], "logprobs": told if turn == 0 else None}
        return httpx.Response(200, json={"choices": [choice], "usage": usage})

    outcome, _ = solve(example, answer, Endpoint("http://test/v1", "m", "key", logprobs=True))
    assert outcome.right and (outcome.said_tokens, outcome.surprise) == (2, 0.75)


def test_thoughts_do_not_count():
    example = make("recall", "256", 0)
    thought = {"role": "assistant", "content": None, "reasoning_content": example.gold[0]["content"]}
    assert not solve(example, lambda body, turn: thought)[0].right


def test_calls_without_end_and_calls_that_cannot_be_read():
    example = make("arithmetic", "2", 0)
    outcome, seen = solve(example, lambda body, turn: calls(("other", {"a": 1}), first=turn))
    assert len(seen) == MAX_TURNS == len(outcome.calls) and not outcome.right
    bad = calls(("other", {}))
    for text in ("{", "[1]", "3"):
        bad["tool_calls"][0]["function"]["arguments"] = text
        outcome, seen = solve(example, lambda body, turn: bad if turn == 0 else says("No."))
        assert outcome.calls == [("other", {"": text})] and seen[1]["messages"][-1]["content"].startswith("error")


def test_a_schema_goes_along_where_it_should():
    example = make("json", "2", 0)
    gold = example.gold[0]
    _, seen = solve(example, lambda body, turn: gold)
    assert "response_format" not in seen[0]
    _, seen = solve(example, lambda body, turn: gold, Endpoint("http://test/v1", "m", "key", constrained=True))
    assert seen[0]["response_format"]["json_schema"]["schema"] == example.schema


def test_an_endpoint_that_refuses_ends_the_run():
    with pytest.raises(Refused, match="429 slow down"):
        solve(make("recall", "256", 0), lambda body, turn: httpx.Response(429, text="slow down"))
    with pytest.raises(Refused, match="ConnectError"):
        asyncio.run(Endpoint("http://127.0.0.1:9/v1", "m").solve_all([make("recall", "256", 0)] * 3, 2))


# ---------------------------------------------------------------- against a model


@pytest.fixture(scope="module")
def endpoint():
    with serve("nano", device="cpu", max_total_tokens=8192) as endpoint:
        yield endpoint


def test_the_table_and_the_file(endpoint, tmp_path, capsys):
    """Two items of each; what is right is what `solve` says of each alone."""
    file = tmp_path / "out" / "nano.json"
    given = ["--url", endpoint.url, "--model", endpoint.model, "--items", "2", "--json", str(file), "--show", "9"]
    assert eval.main([*given, "--kinds", "tools", "lookup", "--tags", "1"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["kind"], row["tag"], row["items"]) for row in rows] == [("tools", "1", 2), ("lookup", "1", 2)]
    alone = [
        asyncio.run(endpoint.solve_all([make(row["kind"], row["tag"], seed)], 1))[0] for row in rows for seed in (0, 1)
    ]
    assert [row["right"] for row in rows] == [alone[i].right + alone[i + 1].right for i in (0, 2)]
    said = capsys.readouterr().out
    assert said.count("\n  wanted ") == 4 - sum(row["right"] for row in rows)
    assert ">= 95: " in said and "lookup 1" in said


def test_nobody_there(capsys):
    assert eval.main(["--url", "http://127.0.0.1:9/v1", "--items", "1", "--kinds", "choose"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_items_of_training_are_refused():
    with pytest.raises(SystemExit):
        eval.arguments(["--items", "201"])


# ---------------------------------------------------------------- quality


@pytest.mark.slow
def test_both_passes_of_a_setting():
    """The second finds all prompts in the cache; of the copies one counts."""
    setting = Setting("float32", {"kv_cache_dtype": "float32"}, copies=2)
    cold, warm = quality.run(setting, "nano", "cpu", ["lookup/1", "recall/256"], 2, 4)
    assert (cold.pass_name, warm.pass_name) == ("cold", "warm") and not cold.error + warm.error
    assert len(cold.right) == len(warm.right) == 4 and cold.right == warm.right and sum(cold.right) >= 2
    assert cold.cached < 0.9 < warm.cached


def test_what_cannot_be_served_is_a_row():
    setting = Setting(REFERENCE, {"kv_cache_dtype": "fp3"})
    results = quality.run(setting, "nano", "cpu", ["lookup/1"], 1, 1)
    rows = quality.rows_of(results, ["lookup/1"], 1)
    assert [row["pass"] for row in rows] == ["cold", "warm"] and "fp3" in rows[0]["error"]
    assert "fp3" in quality.shown(rows[0])["right, % (95%)"]


def test_rows_are_beside_the_reference():
    """In the order of SETTINGS, whatever comes first; by hand."""
    other = Result(SETTINGS[2].name, "cold", [True, True, False, False], 0.25, 0.002)
    reference = Result(REFERENCE, "cold", [True, False, True, True], 0.25, 0.0012345)
    (alone,) = quality.rows_of([other], ["a/1", "b/2"], 2)
    assert "better" not in alone
    rows = quality.rows_of([other, reference], ["a/1", "b/2"], 2)
    assert [row["setting"] for row in rows] == [REFERENCE, SETTINGS[2].name]
    assert (rows[0]["better"], rows[0]["worse"], rows[0]["accuracy"]) == (0, 0, 0.75)
    assert (rows[1]["better"], rows[1]["worse"], rows[1]["p"]) == (1, 2, 1.0)
    assert rows[1]["by_task"] == {"a/1": 2, "b/2": 0}
    assert [quality.shown(row)["nats / 1,000 tokens"] for row in rows] == ["1.23", "2"]


def test_tasks_longer_than_trained():
    assert quality.arguments(["--device", "cpu", "--tasks", "recall/6000"]).tasks == ["recall/6000"]
    assert len(make("recall", "6000", 0).messages[-1]["content"]) > 10_000
    for unknown in ("tools/6000", "recall/many", "recalls/6000"):
        with pytest.raises(SystemExit):
            quality.arguments(["--tasks", unknown])


@pytest.mark.slow
def test_settings_in_processes(tmp_path, capsys):
    file = tmp_path / "quality.json"
    given = ["--device", "cpu", "--settings", "chunks of 64", REFERENCE, "--tasks", "lookup/1", "--items", "2"]
    assert quality.main([*given, "--jobs", "2", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["setting"], row["pass"]) for row in rows] == [
        (name, part) for name in (REFERENCE, "chunks of 64") for part in quality.PASSES
    ]
    assert all(row["items"] == 2 and "p" in row for row in rows) and "chunks of 64, warm" in capsys.readouterr().out


# ---------------------------------------------------------------- the card


def test_the_card_says_what_was_measured():
    results = json.loads((RESULTS / "nano.json").read_text())
    assert (NANO / "README.md").read_text() == card.fill(results, card.read_log(NANO / "training.jsonl"))
    assert {(row["kind"], row["tag"]) for row in results["rows"]} == {(k, t) for k, tags in TAGS.items() for t in tags}
    assert "{" not in (NANO / "README.md").read_text().replace('{"name": ..., "arguments": {...}}', "")


def test_the_curve_is_that_of_the_log():
    """By hand: a line for each check, with the mean of the losses since the one before."""
    right = {kind: dict.fromkeys(tags, 0.5) for kind, tags in TAGS.items()}
    log = [
        {"event": "check", "seconds": 30.0, "exact": right},
        {"event": "step", "loss": {"a": 1.0, "b": 3.0}},
        {"event": "step", "loss": {"a": 0.0, "b": 2.0}},
        {"event": "check", "seconds": 90.0, "exact": right | {"choose": {"sum": 1.0}}},
        {"event": "step", "loss": {"a": 0.5, "b": 0.25}},
        {"event": "check", "seconds": 150.0, "exact": right},
    ]
    _, _, first, second, third = card.curve(log).splitlines()
    assert first == "| 0.5 |  | 50 | 50 | 50 | 50 | 50 | 50 |"
    assert second == "| 1.5 | 1.500 | 50 | 50 | 50 | 50 | 100 | 50 |"
    assert third == "| 2.5 | 0.375 | 50 | 50 | 50 | 50 | 50 | 50 |"


def test_the_card_counts_the_runs_of_the_log():
    log = [
        {"event": "start", "step": 0, "tokens_a_step": 1_000_000, "init": None},
        {"event": "exported", "step": 500, "seconds": 300.0},
        {"event": "start", "step": 0, "tokens_a_step": 2_000_000, "init": "x"},
        {"event": "exported", "step": 100, "seconds": 240.0},
    ]
    found = card.training(log)
    assert (found["minutes"], found["tokens"]) == ("9", "700 million")
    assert found["runs"].splitlines() == [
        "- 5.0 minutes, 500 steps of 1,000,000 tokens, with random weights",
        "- 4.0 minutes, 100 steps of 2,000,000 tokens, with the weights of the one before",
    ]
    assert card.accuracy_table([{"kind": "a", "tag": "1", "items": 10, "right": 8, "target": 95}]).endswith(
        "| a 1 | 10 | 80.0 (49.0 to 94.3) | 95 |"
    )
