"""What clients and agent frameworks send by themselves, as the bytes that they send, and the words they look for."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

import radixrt
from tests.frontend.conftest import serving
from tests.frontend.scripted import Model, scripted

LIMIT = 64
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FORM = {"name": "Order", "schema": SCHEMA, "strict": True}
HELLO = [{"role": "user", "content": "hello"}]
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ORDER = '<tool_call>\n{"name": "Order", "arguments": {"name": "Mia"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Iterator[Model]:
    with scripted("hermes", tmp_path_factory.mktemp("hermes")) as model:
        yield model


@pytest.fixture(scope="module", params=["the router's", "the front end's"])
def short(request, folder) -> Iterator[str]:
    """Of a server with room for few tokens, by the limit of one or the other."""
    limits = {"context": LIMIT} if request.param == "the router's" else {"max_model_len": LIMIT}
    with serving(folder, workers=1, **limits) as frontend:
        yield frontend.url


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(url + path, json={"model": "m"} | body)


def error(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


# ---------------------------------------------------------------- a prompt that is too long

LONG = "word " * 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (COMPLETIONS, {"prompt": LONG}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * LIMIT}, "prompt"),
        (RESPONSES, {"input": LONG}, "input"),
    ],
)
def test_a_prompt_that_is_too_long_by_openai(short, path, body, param, stream):
    """Agents shorten their history when they see this code (langchain, dspy) or these words (litellm)."""
    found = error(post(short, path, stream=stream, **body))
    assert (found["code"], found["param"]) == ("context_length_exceeded", param)
    assert f"this model's maximum context length is {LIMIT} tokens" in found["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_by_anthropic(short, stream):
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5, "stream": stream}
    found = error(post(short, MESSAGES, **body))
    assert found["type"] == "invalid_request_error"
    assert "prompt is too long: " in found["message"] and f" tokens > {LIMIT - 1} maximum" in found["message"]


def test_another_fault_of_a_prompt_has_another_code(short):
    assert error(post(short, COMPLETIONS, prompt=[5, 1 << 20]))["code"] is None


# ---------------------------------------------------------------- Anthropic's client


@pytest.mark.parametrize("path", [MESSAGES, MESSAGES + "/count_tokens"])
@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_threads_are_refused_so_that_clients_go_on_without(model, path, thread):
    """A server that ignored the field would answer the newest message alone."""
    model.says("No.")
    found = error(post(model.url, path, messages=HELLO, max_tokens=50, thread=thread))
    assert found["message"].startswith("thread: ")
    assert found["details"] == {"error_code": "thread_unsupported_request"}


def test_other_errors_have_no_details_of_threads(model):
    found = error(post(model.url, MESSAGES, messages=HELLO, max_tokens=50, container="c"))
    assert found["message"].startswith("container: ") and "details" not in found
    model.says("Yes.")
    assert post(model.url, MESSAGES, messages=HELLO, max_tokens=50, thread=None).status_code == 200


def test_anthropics_tool_runner(model):
    runner = pytest.importorskip("anthropic.lib.tools")

    @runner.beta_tool
    def Order(name: str) -> str:  # noqa: N802
        """Orders."""
        return f"ordered for {name}"

    model.says(ORDER, "Done.")
    with anthropic.Anthropic(base_url=model.url, api_key="any", max_retries=0) as client:
        answers = list(client.beta.messages.tool_runner(model="m", max_tokens=200, messages=HELLO, tools=[Order]))
    assert [answer.content[-1].type for answer in answers] == ["tool_use", "text"]
    assert [m["role"] for m in model.answers[1][1].messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("fields", [{}, {"stop": "never"}, {"extra_body": {"stop_token_ids": [5]}}])
def test_the_end_of_a_turn_is_no_stop_that_was_asked_for(model, fields):
    choice = model.chat("Yes.", **fields).choices[0]
    assert (choice.finish_reason, choice.stop_reason, choice.message.content) == ("stop", None, "Yes.")
    *_, last = model.chat("Yes.", stream=True, **fields)
    assert (last.choices[0].finish_reason, last.choices[0].stop_reason) == ("stop", None)


def test_structured_output_by_its_older_name(model):
    """`output_format` was the field of the beta of 2025-11-13."""
    pytest.importorskip("xgrammar")
    form = {"type": "json_schema", "schema": SCHEMA}
    model.says('{"name": "Mia"}')
    assert post(model.url, MESSAGES, messages=HELLO, max_tokens=50, output_format=form).status_code == 200
    assert model.grammar == ("json_schema", SCHEMA)
    for fields, field in (
        ({"output_format": form, "output_config": {"format": form}}, "output_format: "),
        ({"output_format": {"type": "xml"}}, "output_format.type: "),
    ):
        found = error(post(model.url, MESSAGES, messages=HELLO, max_tokens=50, **fields))
        assert found["message"].startswith(field)


def test_compaction_is_refused(model):
    fields = {"compaction": {"type": "summary"}}
    assert error(post(model.url, MESSAGES, messages=HELLO, max_tokens=50, **fields))["message"].startswith("compaction")


def test_models_for_both_clients(model):
    with anthropic.Anthropic(base_url=model.url, api_key="any", max_retries=0) as client:
        page = client.models.list()
        assert (page.has_more, page.first_id, page.last_id) == (False, "m", "m")
        assert [(m.id, m.type, m.display_name) for m in page.data] == [("m", "model", "m")]
        assert page.data[0].created_at is not None
        assert (page.data[0].max_input_tokens, page.data[0].max_tokens) == (8192, 8192)
        assert client.models.retrieve("m") == page.data[0]
    (found,) = [*model.client.models.list()]
    assert (found.id, found.object, found.owned_by) == ("m", "model", "radixrt")


# ---------------------------------------------------------------- structured output


def test_a_format_beside_a_call_that_is_forced(model):
    """As instructor asks: the answer is the call, and has no text that could break the format."""
    pytest.importorskip("xgrammar")
    tool = {"type": "function", "name": "Order", "parameters": SCHEMA}
    form = {"format": {"type": "json_schema"} | FORM}
    model.says(ORDER)
    chosen = {"type": "function", "name": "Order"}
    answer = post(model.url, RESPONSES, input="hello", tools=[tool], tool_choice=chosen, text=form)
    assert answer.status_code == 200, answer.text
    (call,) = answer.json()["output"]
    assert (call["type"], call["arguments"]) == ("function_call", '{"name": "Mia"}')
    assert "Order" in str(model.grammar[1])
    model.says(ORDER)
    nested = {"type": "function", "function": {"name": "Order", "parameters": SCHEMA}}
    fields = {"tools": [nested], "tool_choice": "required"}
    response_format = {"type": "json_schema", "json_schema": FORM}
    answer = post(model.url, CHAT, messages=HELLO, response_format=response_format, **fields)
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls", answer.text


def test_a_schema_beside_json_object(model):
    """As llama.cpp, Together and Fireworks take it."""
    pytest.importorskip("xgrammar")
    model.says('{"name": "Mia"}')
    form = {"type": "json_object", "schema": SCHEMA}
    assert post(model.url, CHAT, messages=HELLO, response_format=form).status_code == 200
    assert model.grammar == ("json_schema", SCHEMA)
    wrong = error(post(model.url, CHAT, messages=HELLO, response_format=form | {"schema": {"type": "x"}}))
    assert wrong["param"] == "response_format.schema"


def test_one_grammar_by_its_old_and_its_new_name(model):
    """As guidance asks, which does not know how old a vLLM it speaks to."""
    pytest.importorskip("xgrammar")
    both = {"structured_outputs": {"regex": "[0-9]+"}, "guided_regex": "[0-9]+"}
    model.says("42")
    answer = post(model.url, CHAT, messages=HELLO, **both)
    assert answer.status_code == 200, answer.text
    assert (model.grammar.kind, model.grammar.text) == ("regex", "[0-9]+")
    other = both | {"guided_regex": "[0-9]"}
    assert error(post(model.url, CHAT, messages=HELLO, **other))["param"] == "guided_regex"


# ---------------------------------------------------------------- fields of other servers


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_regex": "a+"},
        {"no_stop_trim": True},
        {"return_hidden_states": True},
        {"custom_logit_processor": "x"},
        {"web_search_options": {}},
        {"input_ids": [1, 2]},
        {"session_params": {"id": "a"}},
        {"thinking_token_budget": 0},
        {"repetition_detection": {"max_pattern_size": 3}},
        {"logprob_token_ids": [5]},
        {"return_prompt_text": True},
        {"return_routed_experts": True},
        {"guided_whitespace_pattern": "[ ]?"},
        {"separate_reasoning": False},
        {"stream_reasoning": False},
        {"add_special_tokens": True},
    ],
)
def test_fields_that_would_change_the_answer(model, fields):
    assert error(post(model.url, CHAT, messages=HELLO, **fields))["param"] == next(iter(fields))


@pytest.mark.parametrize("field", ["disable_additional_properties", "disable_any_whitespace", "whitespace_pattern"])
def test_fields_that_would_change_structured_outputs(model, field):
    told = {"json": SCHEMA, field: "[ ]?"}
    found = error(post(model.url, CHAT, messages=HELLO, structured_outputs=told))
    assert found["param"] == f"structured_outputs.{field}"
    model.says('{"name":"Mia"}')
    assert post(model.url, CHAT, messages=HELLO, structured_outputs=told | {field: None}).status_code == 200


def test_fields_that_ask_for_nothing(model):
    """What SDKs fill in by themselves."""
    fields = {"stop_regex": None, "no_stop_trim": False, "bad_words": [], "prompt_logprobs": None, "lora_path": "",
              "documents": [], "logits_processors": [], "include_reasoning": True, "separate_reasoning": True,
              "return_prompt_text": False, "add_special_tokens": False}  # fmt: skip
    model.says("Yes.")
    assert post(model.url, CHAT, messages=HELLO, **fields).status_code == 200


def test_sampling_of_a_response(model):
    """vLLM takes these in both APIs; openai-agents sends them as its `extra_body`."""
    fields = {"top_k": 3, "min_p": 0.1, "seed": 4, "presence_penalty": 0.5, "frequency_penalty": 0.25,
              "repetition_penalty": 1.5}  # fmt: skip
    model.says("Yes and no.")
    answer = post(model.url, RESPONSES, input="hello", stop="and", **fields)
    assert answer.json()["output"][0]["content"][0]["text"] == "Yes "
    (sampling,) = model.script.samplings
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert error(post(model.url, RESPONSES, input="hello", min_p=2))["param"] == "min_p"


# ---------------------------------------------------------------- HTTP


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_bodies_that_are_compressed(model, path):
    body = gzip.compress(json.dumps({"model": "m", "messages": HELLO, "max_tokens": 5}).encode())
    found = error(httpx.post(model.url + path, content=body, headers={"content-encoding": "gzip"}), 415)
    assert found["type"] == "invalid_request_error" and "gzip" in found["message"]
    model.says("Yes.")
    plain = {"content-encoding": "identity"}
    assert httpx.post(model.url + path, content=gzip.decompress(body), headers=plain).status_code == 200


def test_what_probes_ask(model):
    assert httpx.get(model.url + "/version").json() == {"version": radixrt.__version__}
    assert [httpx.request(method, model.url + "/ping").status_code for method in ("GET", "POST")] == [200, 200]


PAGE = "http://localhost:3000"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def test_web_pages_may_not_call_unless_told(model):
    answer = httpx.options(model.url + CHAT, headers=PREFLIGHT)
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers
    answer = httpx.get(model.url + "/v1/models", headers={"origin": PAGE})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(("origins", "others"), [((PAGE, "http://page.test"), False), (("*",), True)])
def test_web_pages_that_may_call(folder, origins, others):
    with serving(folder, workers=1, allowed_origins=origins) as frontend:
        asked = httpx.options(frontend.url + CHAT, headers=PREFLIGHT)
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] in (PAGE, "*")
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert asked.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        stranger = httpx.options(frontend.url + CHAT, headers=PREFLIGHT | {"origin": "http://other.test"})
        assert ("access-control-allow-origin" in stranger.headers) == others
        body = {"model": "m", "messages": HELLO, "max_tokens": 3}
        for fields, status in (({"stream": True}, 200), ({}, 200), ({"n": -1}, 400)):
            answer = httpx.post(frontend.url + CHAT, json=body | fields, headers={"origin": PAGE})
            assert (answer.status_code, answer.headers["access-control-allow-origin"] in (PAGE, "*")) == (status, True)
