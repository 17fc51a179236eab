"""Ollama's API over HTTP: a scripted model says what a real one might."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.ollama.exchange import OllamaExchange
from tests.frontend.conftest import serving
from tests.frontend.scripted import Model, scripted

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": CITY}}]
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
HELLO = [{"role": "user", "content": "hello"}]
PIXEL = "iVBORw0KGgo="


class Speaker:
    """A client of a scripted model."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def post(self, path: str, body: dict, *texts: str) -> httpx.Response:
        self.model.says(*texts)
        return httpx.post(f"{self.model.url}/api/{path}", json=body)

    def chat(self, *texts: str, **fields: Any) -> dict:
        """The whole answer, after a look at whether the lines of a stream add up to the same."""
        return self._both("chat", {"model": "m", "messages": HELLO} | fields, texts)

    def generate(self, prompt: str, *texts: str, **fields: Any) -> dict:
        return self._both("generate", {"model": "m", "prompt": prompt} | fields, texts)

    def lines(self, path: str, body: dict, *texts: str) -> list[dict]:
        answer = self.post(path, {"model": "m"} | body, *texts)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson")
        return [json.loads(line) for line in answer.text.splitlines()]

    def _both(self, path: str, body: dict, texts: tuple[str, ...]) -> dict:
        lines = self.lines(path, body, *texts)
        answer = self.post(path, body | {"stream": False}, *texts)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        whole = answer.json()
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        for name in ("model", "done_reason", "prompt_eval_count", "eval_count"):
            assert lines[-1][name] == whole[name]
        assert _added(lines) == _told(whole)
        return whole

    @property
    def prompt(self) -> Any:
        """The chat that was rendered for the last answer."""
        return self.model.answers[-1][1]


def _told(line: dict) -> tuple[str, str, list]:
    found = line["message"] if "message" in line else {"content": line["response"]} | line
    calls = [call["function"] for call in found.get("tool_calls", [])]  # their ids are random
    return found["content"], found.get("thinking", ""), calls


def _added(lines: list[dict]) -> tuple[str, str, list]:
    contents, thoughts, calls = zip(*map(_told, lines), strict=True)
    return "".join(contents), "".join(thoughts), [call for some in calls for call in some]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> Iterator[Speaker]:
    with scripted("thinking", tmp_path_factory.mktemp("thinking")) as model:
        yield Speaker(model)


# ---------------------------------------------------------------- answers


def test_a_text_has_its_tokens_and_times(thinking):
    found = thinking.chat("It is sunny.")
    assert found["message"] == {"role": "assistant", "content": "It is sunny."}
    assert (found["model"], found["done"], found["done_reason"]) == ("m", True, "stop")
    tokenizer = thinking.model.tokenizer
    assert found["prompt_eval_count"] == len(tokenizer.encode(tokenizer.apply_chat(thinking.prompt), False))
    assert found["eval_count"] == len(tokenizer.encode("It is sunny.", False)) + 1
    assert found["total_duration"] > 0 and found["created_at"].endswith("Z")
    last = thinking.lines("chat", {"messages": HELLO}, "Yes.")[-1]
    assert 0 < last["prompt_eval_duration"] < last["total_duration"] and last["eval_duration"] > 0


def test_thoughts_and_calls_are_told_apart_and_calls_are_whole(thinking):
    says = "<think>\nHm.\n</think>\n\nI look. " + PARIS + "\n" + ROME
    message = thinking.chat(says, tools=TOOLS, think=True)["message"]
    assert (message["content"], message["thinking"]) == ("I look.", "Hm.")
    functions = [call["function"] for call in message["tool_calls"]]
    assert [function["arguments"] for function in functions] == [{"city": "Paris"}, {"city": "Rome"}]
    assert [(function["name"], function["index"]) for function in functions] == [("weather", 0), ("weather", 1)]
    assert thinking.prompt.template_args == {"enable_thinking": True, "thinking": True}
    lines = thinking.lines("chat", {"messages": HELLO, "tools": TOOLS}, says)
    assert sum("tool_calls" in line["message"] for line in lines) == 2


def test_arguments_that_were_cut_come_as_text_and_come_back_as_they_were(thinking):
    tokens = len(thinking.model.tokenizer.encode(PARIS.partition("Paris")[0], False))
    message = thinking.chat(PARIS, tools=TOOLS, options={"num_predict": tokens})["message"]
    (call,) = message["tool_calls"]
    assert '{"city": "Paris"}'.startswith(call["function"]["arguments"]["INVALID_JSON"])
    thinking.chat("Yes.", tools=TOOLS, messages=[*HELLO, message, {"role": "tool", "content": "?"}])
    (call,) = thinking.prompt.messages[1]["tool_calls"]
    assert '{"city": "Paris"}'.startswith(call["function"]["arguments"])


def hits_all(speaker: Speaker, says: str, keeps_id: bool) -> bool:
    """Whether the turn after a call hits all of it; the client sends its arguments in its own form."""
    asked = {"role": "user", "content": f"Oslo {keeps_id}?"}
    first = speaker.chat(says, messages=[asked], tools=TOOLS)
    (call,) = first["message"]["tool_calls"]
    sent = {"function": {"arguments": {"city": "Oslo"}, "name": "weather"}} | ({"id": call["id"]} if keeps_id else {})
    answer = {"role": "assistant", "content": "", "tool_calls": [sent]}
    messages = [asked, answer, {"role": "tool", "tool_name": "weather", "content": "12 °C"}]
    second = speaker.post("chat", {"messages": messages, "tools": TOOLS, "stream": False}, "Cool.").json()
    (called,), told = speaker.prompt.messages[1]["tool_calls"], speaker.prompt.messages[2]
    assert (told["tool_call_id"], told["name"]) == (called["id"], "weather")
    return second["prompt_eval_cached_count"] >= first["prompt_eval_count"] + first["eval_count"] - 1


@pytest.mark.parametrize("keeps_id", [True, False], ids=["kept", "lost"])
def test_the_next_turn_hits_all_of_a_call_whether_its_id_is_kept_or_lost(thinking, keeps_id):
    assert hits_all(thinking, PARIS.replace("Paris", "Oslo"), keeps_id)


def test_the_next_turn_hits_a_call_with_an_id_of_the_models_own(tmp_path):
    with scripted("mistral_v11", tmp_path) as model:
        assert hits_all(Speaker(model), '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Oslo"}', True)


def test_results_find_their_calls_by_id_by_name_and_by_order(thinking):
    def call(name: str, **more: str) -> dict:
        return {"function": {"name": name, "arguments": {}}} | more

    calls = [call("a"), call("b"), call("c", id="x"), call("d")]
    results = [{"tool_call_id": "x"}, {"tool_name": "b"}, {"tool_name": "unknown"}, {}]
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": calls}]
    messages += [{"role": "tool", "content": str(i)} | result for i, result in enumerate(results)]
    thinking.chat("Yes.", messages=messages)
    assert [m["name"] for m in thinking.prompt.messages if m["role"] == "tool"] == ["c", "b", "a", "d"]


def test_an_answer_that_has_begun_is_continued(thinking):
    thinking.post("chat", {"messages": [*HELLO, {"role": "assistant", "content": "It is"}]}, " sunny.")
    assert thinking.prompt.partial


# ---------------------------------------------------------------- generate


def test_generate_asks_in_a_chat(thinking):
    found = thinking.generate("hello", "<think>\nHm.\n</think>\n\nYes.", system="Be brief.")
    assert (found["response"], found["thinking"]) == ("Yes.", "Hm.") and "message" not in found
    assert [message["role"] for message in thinking.prompt.messages] == ["system", "user"]


def test_raw_generate_continues_the_text_itself(thinking):
    found = thinking.generate("Once", " upon", raw=True)
    assert found["response"] == " upon" and found["prompt_eval_count"] == len(thinking.model.tokenizer.encode("Once"))


# ---------------------------------------------------------------- fields


def test_options_are_sampling_parameters(thinking):
    options = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "repeat_penalty": 1.5, "seed": 9}
    thinking.chat("Yes.", options=options | {"num_predict": 40, "num_ctx": 4096, "stop": ["q"], "typical_p": 1.0})
    sampling = thinking.model.script.samplings[-1]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 7, 0.125)
    assert (sampling.repetition_penalty, sampling.seed, sampling.max_tokens) == (1.5, 9, 40)


def test_an_answer_ends_at_a_stop_string_and_at_its_length(thinking):
    found = thinking.chat("one two three", options={"stop": [" three"], "num_predict": -1})
    assert (found["message"]["content"], found["done_reason"]) == ("one two", "stop")
    found = thinking.chat("one two three", options={"num_predict": 3})
    assert (found["eval_count"], found["done_reason"]) == (3, "length")


@pytest.mark.parametrize(("form", "schema"), [("json", {"type": "object"}), (CITY, CITY)])
def test_the_format_is_enforced(thinking, form, schema):
    pytest.importorskip("xgrammar")
    assert thinking.generate("where?", '{"city":"Paris"}', raw=True, format=form)["response"] == '{"city":"Paris"}'
    assert thinking.model.grammar == ("json_schema", schema)


def test_an_image_in_a_question_is_refused_and_named_elsewhere(thinking):
    asked = [{"role": "user", "content": "What is it?", "images": [PIXEL]}]
    answer = thinking.post("chat", {"messages": asked})
    assert answer.status_code == 400
    assert answer.json() == {"error": "messages[0].images: are not served: this model reads text only"}
    thinking.chat("Yes.", messages=[*asked, {"role": "assistant", "content": "A cat."}, *HELLO])
    assert thinking.prompt.messages[0]["content"] == "[image: this model reads text only]\nWhat is it?"


@pytest.mark.parametrize(
    ("path", "fields", "status", "says"),
    [
        ("chat", {"options": {"top_p": 2}}, 400, "options.top_p must be"),
        ("chat", {"options": {"mirostat": 1}}, 400, "options.mirostat: is not served"),
        ("chat", {"think": "very"}, 400, "think: must be one of"),
        ("chat", {"format": "yaml"}, 400, "format: must be 'json' or a JSON schema"),
        ("chat", {"logprobs": True}, 400, "logprobs: is not served"),
        ("chat", {"model": "other"}, 404, "model 'other'"),
        ("chat", {"messages": [{"role": "tool", "content": "12"}]}, 400, "messages[0]: no message before"),
        ("chat", {"messages": [{"role": "user", "content": ["?"]}]}, 400, "messages[0].content: must be a string"),
        ("generate", {"prompt": "a", "suffix": "b"}, 400, "suffix: is not served"),
        ("show", {"model": "other"}, 404, "model 'other'"),
        ("show", {}, 400, "model: is missing"),
        ("pull", {"model": "m"}, 501, "/api/pull: models are not managed here"),
        ("embed", {"model": "m"}, 501, "/api/embed: embeddings are not served"),
        ("nothing", {}, 404, "no such route: /api/nothing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_is_a_message_that_names_the_field(thinking, path, fields, status, says):
    answer = thinking.post(path, ({"messages": HELLO} if path == "chat" else {}) | fields)
    assert answer.status_code == status and list(answer.json()) == ["error"]
    assert answer.json()["error"].startswith(says)


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_a_request_without_a_prompt_only_loads_the_model(thinking, path):
    found = thinking.post(path, {"model": "m"}).json()
    assert (found["done"], found["done_reason"]) == (True, "load") and _told(found) == ("", "", [])


def test_models_are_listed_and_shown_with_what_they_can(thinking):
    (listed,) = httpx.get(thinking.model.url + "/api/tags").json()["models"]
    assert listed["name"] == listed["model"] == "m"
    for shown in (thinking.post("show", {"model": "m"}).json(), thinking.post("show", {"name": "m"}).json()):
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["model_info"][shown["model_info"]["general.architecture"] + ".context_length"] == 8192


def test_the_version_is_one_of_ollamas(thinking):
    version = httpx.get(thinking.model.url + "/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 13, 4)  # what Codex asks for


def test_a_model_without_thoughts_says_so_and_keys_are_checked(folder):
    with serving(folder, workers=1, api_key=["a:secret"]) as frontend:
        refused = httpx.get(frontend.url + "/api/tags")
        assert refused.status_code == 401 and refused.json() == {"error": "unknown API key"}
        headers = {"authorization": "Bearer secret"}
        shown = httpx.post(frontend.url + "/api/show", json={"model": "m"}, headers=headers).json()
        assert shown["capabilities"] == ["completion", "tools"]


def test_an_error_in_a_stream_is_its_last_line(thinking, monkeypatch):
    def broken(exchange: OllamaExchange, *args: Any) -> None:
        add(exchange, *args)
        exchange.fail(ApiError(503, "the worker is gone"))

    add = OllamaExchange._add
    monkeypatch.setattr(OllamaExchange, "_add", broken)
    lines = thinking.lines("chat", {"messages": HELLO}, "one two three")
    assert lines[-1] == {"error": "the worker is gone"} and lines[0]["message"]["content"]
