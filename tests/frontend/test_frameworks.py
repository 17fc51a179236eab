"""Agent frameworks by the APIs that they speak: langchain-openai and pydantic-ai against a scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.frontend.scripted import Model, scripted

pydantic = pytest.importorskip("pydantic")
langchain = pytest.importorskip("langchain_openai")
messages = pytest.importorskip("langchain_core.messages")
ai = pytest.importorskip("pydantic_ai")
ai_openai = pytest.importorskip("pydantic_ai.models.openai")
ai_anthropic = pytest.importorskip("pydantic_ai.models.anthropic")
ai_providers = pytest.importorskip("pydantic_ai.providers.openai")
ai_anthropic_provider = pytest.importorskip("pydantic_ai.providers.anthropic")

FRAMEWORKS = {
    "langchain-openai": ("/v1/chat/completions", "/v1/responses"),
    "pydantic-ai-slim": ("/v1/chat/completions", "/v1/responses", "/v1/messages"),
}
"""By the names of packages: the routes by which they are tested."""
CHAT, RESPONSES, MESSAGES = FRAMEWORKS["pydantic-ai-slim"]
CITY = '{"city": "Paris", "degrees": 3}'
THOUGHT = "<think>\nHm, hm.\n</think>\n\n"


class Answer(pydantic.BaseModel):
    city: str
    degrees: int


def weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"sunny in {city}"


def clock(zone: str) -> str:
    """Tells the time."""
    return f"noon in {zone}"


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PARIS, ROME = called("weather", '{"city": "Paris"}'), called("weather", '{"city": "Rome"}')


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Iterator[Model]:
    with scripted("thinking", tmp_path_factory.mktemp("thinking")) as model:
        yield model


def prompts(model: Model) -> list[int]:
    """Tokens of the prompts since the model was last told what to say."""
    return [len(request.prompt.ids) // 4 for request, *_ in model.answers]


def computed(model: Model) -> list[int]:
    """Tokens of each prompt and its answer, less the last one, which was not computed."""
    return [len(request.prompt.ids) // 4 + len(ids) - 1 for request, _, _, ids in model.answers]


# ---------------------------------------------------------------- langchain-openai


@pytest.fixture(params=FRAMEWORKS["langchain-openai"])
def chain(request, model, monkeypatch) -> Iterator[Callable[..., Any]]:
    """Makes a client of langchain's."""
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    with httpx.Client() as http:

        def make(**fields: Any) -> Any:
            return langchain.ChatOpenAI(
                model="m", base_url=model.url + "/v1", api_key="any", http_client=http, max_retries=0,
                use_responses_api=make.responses, **fields,
            )  # fmt: skip

        make.route, make.responses = request.param, request.param == RESPONSES
        yield make


def test_langchain_chats_and_streams(model, chain):
    asked = [messages.SystemMessage("Be brief."), messages.HumanMessage([{"type": "text", "text": "Who?"}])]
    model.says(THOUGHT + "It is me.", THOUGHT + "It is me.")
    whole = chain().invoke(asked)
    parts = list(chain(stream_usage=True).stream(asked))
    assert whole.text == "It is me." and "".join(part.text for part in parts) == "It is me." and len(parts) > 4
    gathered = parts[0]
    for part in parts[1:]:
        gathered += part
    for answer in (whole, gathered):
        usage = answer.usage_metadata
        assert (usage["input_tokens"], usage["output_tokens"]) == (prompts(model)[0], len(model.answers[0][3]))
    assert gathered.usage_metadata["input_token_details"]["cache_read"] == prompts(model)[0] - 1
    assert model.routes == {chain.route}
    if chain.responses:
        assert [block["type"] for block in whole.content] == ["reasoning", "text"]


def test_langchain_calls_tools(model, chain):
    """Two calls, their results, a question more: each turn hits all that was computed in the one before."""
    talk: list[Any] = [messages.SystemMessage("Help."), messages.HumanMessage(f"How is it? {chain.responses}")]
    model.says(f"{THOUGHT}Let me see. {PARIS}\n{ROME}", "It is sunny.", "It still is.")
    client = chain().bind_tools([weather, clock])
    first = client.invoke(talk)
    assert [(call["name"], call["args"]) for call in first.tool_calls] == [
        ("weather", {"city": "Paris"}), ("weather", {"city": "Rome"})
    ]  # fmt: skip
    assert first.text == "Let me see."
    talk += [first, *[messages.ToolMessage(weather(**c["args"]), tool_call_id=c["id"]) for c in first.tool_calls]]
    second = client.invoke(talk)
    third = client.invoke([*talk, second, messages.HumanMessage("And now?")])
    cached = [answer.usage_metadata["input_token_details"]["cache_read"] for answer in (second, third)]
    assert cached == computed(model)[:2] and third.text == "It still is."
    (_, prompt, _, _) = model.answers[1]
    assert [m["role"] for m in prompt.messages] == ["system", "user", "assistant", "tool", "tool"]


def test_langchain_streams_calls(model, chain):
    model.says(f"Let me see. {PARIS}\n{ROME}")
    gathered = None
    for part in chain().bind_tools([weather]).stream("How is it?"):
        gathered = part if gathered is None else gathered + part
    assert [call["args"] for call in gathered.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}]
    assert gathered.text == "Let me see."


@pytest.mark.parametrize(
    ("choice", "kind"), [("weather", "stop_after_first"), ("any", "at_least_one"), ({"strict": True}, "triggered")]
)
def test_langchain_chooses_tools(model, chain, choice, kind):
    pytest.importorskip("xgrammar")
    fields = choice if isinstance(choice, dict) else {"tool_choice": choice}
    model.says(PARIS)
    answer = chain().bind_tools([weather, clock], parallel_tool_calls=False, **fields).invoke("How?")
    assert [call["name"] for call in answer.tool_calls] == ["weather"]
    assert kind in str(model.grammar[1])


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_structures_answers(model, chain, method):
    pytest.importorskip("xgrammar")
    model.says(called("Answer", CITY) if method == "function_calling" else CITY)
    found = chain().with_structured_output(Answer, method=method, include_raw=True).invoke("Where, as JSON?")
    assert found["parsed"] == Answer(city="Paris", degrees=3) and found["parsing_error"] is None
    assert model.grammar is not None
    assert (method == "json_mode") != ("degrees" in str(model.grammar[1]))


def test_langchain_goes_on_from_a_response(model, chain):
    if not chain.responses:
        pytest.skip("only the Responses API stores answers")
    client = chain(use_previous_response_id=True)
    talk = [messages.HumanMessage("Keep this.")]
    model.says("Kept.", "Yes.")
    first = client.invoke(talk)
    second = client.invoke([*talk, first, messages.HumanMessage("Sure?")])
    assert second.usage_metadata["input_token_details"]["cache_read"] == computed(model)[0]
    assert [m["content"] for m in model.answers[1][1].messages] == ["Keep this.", "Kept.", "Sure?"]


def test_langchain_sends_what_it_may(model, chain):
    fields: dict[str, Any] = {"seed": 3, "stop": ["zz"], "logprobs": True, "n": 1, "reasoning_effort": "low"}
    if chain.responses:
        fields = {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
                  "truncation": "auto"}  # fmt: skip
    model.says(THOUGHT + "Well.")
    client = chain(service_tier="auto", metadata={"a": "b"}, store=True, max_tokens=60, temperature=0.5, top_p=0.9,
                   extra_body={"user": "u", "prompt_cache_key": "k"}, **fields)  # fmt: skip
    assert client.invoke("Well?").text == "Well."
    (sampling,) = model.script.samplings
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (60, 0.5, 0.9)
    assert model.answers[-1][1].template_args == {
        "enable_thinking": True,
        "thinking": True,
        "reasoning_effort": "low",
    }


def test_langchain_is_told_what_is_wrong(model, chain):
    lonely = [messages.ToolMessage("x", tool_call_id="nobody")]
    for fields, talk, name in (({}, lonely, "call_id"), ({"temperature": -1}, "x", "temperature")):
        with pytest.raises(openai.BadRequestError, match=name):
            chain(**fields).invoke(talk)
    bad = {
        "title": "f",
        "description": "F.",
        "type": "object",
        "properties": {"a": {"type": "wrong"}},
        "required": ["a"],
    }
    with pytest.raises(openai.BadRequestError, match="properties.a.type"):
        chain().bind_tools([bad], strict=True).invoke("x")


# ---------------------------------------------------------------- pydantic-ai


@asynccontextmanager
async def served(model: Model, api: str) -> AsyncIterator[Any]:
    """The model as pydantic-ai knows it."""
    if api == MESSAGES:
        async with anthropic.AsyncAnthropic(base_url=model.url, api_key="any", max_retries=0) as client:
            provider = ai_anthropic_provider.AnthropicProvider(anthropic_client=client)
            yield ai_anthropic.AnthropicModel("m", provider=provider)
        return
    kind = {CHAT: ai_openai.OpenAIChatModel, RESPONSES: ai_openai.OpenAIResponsesModel}[api]
    async with openai.AsyncOpenAI(base_url=model.url + "/v1", api_key="any", max_retries=0) as client:
        yield kind("m", provider=ai_providers.OpenAIProvider(openai_client=client))


@pytest.fixture(params=FRAMEWORKS["pydantic-ai-slim"])
def agent(request, model) -> Callable[..., Any]:
    """Runs `work` with an agent that is made with `fields`."""

    def run(work: Callable[[Any], Awaitable[Any]], *texts: str, **fields: Any) -> Any:
        async def inside() -> Any:
            async with served(model, request.param) as found:
                return await work(ai.Agent(found, **fields))

        model.says(*texts)
        return asyncio.run(inside())

    run.api = request.param
    return run


def spent(answer: Any) -> tuple[int, int, int]:
    usage = answer.usage
    return usage.input_tokens, usage.cache_read_tokens, usage.output_tokens


def test_pydantic_ai_chats(model, agent):
    result = agent(lambda a: a.run(f"Who? {agent.api}"), THOUGHT + "It is me.", instructions="Be brief.")
    answer = result.all_messages()[-1]
    thought, text = answer.parts
    raw = (thought.provider_details or {}).get("raw_content", [thought.content])  # thoughts that are no summary
    assert result.output == text.content == "It is me." and raw == ["Hm, hm."]
    assert spent(answer)[::2] == (prompts(model)[0], len(model.answers[0][3]))
    assert model.routes == {agent.api}


def test_pydantic_ai_streams(model, agent):
    async def work(a: Any) -> tuple[list[str], Any]:
        async with a.run_stream("Who?") as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)], result.usage

    parts, usage = agent(work, THOUGHT + "It is me.")
    assert "".join(parts) == "It is me." and len(parts) > 4
    assert (usage.input_tokens, usage.output_tokens) == (prompts(model)[0], len(model.answers[0][3]))


def test_pydantic_ai_runs_tools(model, agent):
    """An agent's loop, and a run more on its history: each request hits all that was computed in the one before."""

    async def work(a: Any) -> Any:
        first = await a.run(f"How is it? {agent.api}")
        return await a.run("And now?", message_history=first.all_messages())

    texts = f"{THOUGHT}Let me see. {PARIS}\n{ROME}", "It is sunny.", "It still is."
    result = agent(work, *texts, tools=[weather], system_prompt="Help.")
    assert result.output == "It still is."
    answers = [m for m in result.all_messages() if m.kind == "response"]
    assert [spent(answer)[1] for answer in answers[1:]] == computed(model)[:2]
    assert [spent(answer)[0] for answer in answers] == prompts(model)
    told = [m["content"] for m in model.answers[1][1].messages if m["role"] == "tool"]
    assert [t if isinstance(t, str) else t[0]["text"] for t in told] == ["sunny in Paris", "sunny in Rome"]


def test_pydantic_ai_streams_tools(model, agent):
    async def work(a: Any) -> list[str]:
        seen = []
        async with a.run_stream_events("How is it?") as events:
            async for event in events:
                if event.event_kind == "function_tool_result":
                    seen.append(event.part.content)
        return sorted(seen)  # the tools run at once

    assert agent(work, PARIS + "\n" + ROME, "Sunny.", tools=[weather]) == ["sunny in Paris", "sunny in Rome"]


@pytest.mark.parametrize("way", ["tool", "native", "prompted"])
def test_pydantic_ai_structures_answers(model, agent, way):
    pytest.importorskip("xgrammar")
    if (agent.api, way) == (MESSAGES, "native"):
        pytest.skip("pydantic-ai asks for it of Anthropic's own models only")
    kind = {"tool": ai.ToolOutput, "native": ai.NativeOutput, "prompted": ai.PromptedOutput}[way](Answer)
    text = called("final_result", CITY) if way == "tool" else CITY
    assert agent(lambda a: a.run("Where?"), text, output_type=kind).output == Answer(city="Paris", degrees=3)
    if way != "prompted":
        assert "degrees" in str(model.grammar[1])


def test_pydantic_ai_asks_again_for_what_it_cannot_read(model, agent):
    """A call that does not fit is told back to the model, and the history still hits."""
    wrong = '{"city": "Paris", "degrees": -9999}'

    class Warm(Answer):
        @pydantic.field_validator("degrees")
        @classmethod
        def warm(cls, degrees: int) -> int:
            if degrees < 0:
                raise ValueError("too cold")
            return degrees

    texts = called("final_result", wrong), called("final_result", CITY)
    result = agent(lambda a: a.run(f"Where? {agent.api}"), *texts, output_type=Warm, retries=1)
    answers = [m for m in result.all_messages() if m.kind == "response"]
    assert result.output.degrees == 3 and spent(answers[1])[1] == computed(model)[0]


OPTIONS = {
    CHAT: {"openai_reasoning_effort": "low", "openai_service_tier": "auto", "openai_logprobs": True,
                         "openai_top_logprobs": 2, "openai_store": True, "openai_prompt_cache_key": "k"},
    RESPONSES: {"openai_reasoning_effort": "low", "openai_reasoning_summary": "auto", "openai_truncation": "auto",
                  "openai_send_reasoning_ids": True, "openai_previous_response_id": "auto",
                  "openai_include_encrypted_content": True, "openai_store": True},
    MESSAGES: {"anthropic_thinking": {"type": "enabled", "budget_tokens": 1024},
                 "anthropic_metadata": {"user_id": "u"}, "anthropic_cache_instructions": True,
                 "anthropic_cache_tool_definitions": True, "anthropic_cache_messages": True},
}  # fmt: skip


def test_pydantic_ai_sends_what_it_may(model, agent):
    async def work(a: Any) -> Any:
        first = await a.run(f"Well? {agent.api}")
        return await a.run("And?", message_history=first.all_messages())

    settings = {"max_tokens": 60, "top_p": 0.9, "parallel_tool_calls": False} | OPTIONS[agent.api]
    result = agent(work, THOUGHT + "Well.", "So.", model_settings=settings, tools=[weather], instructions="Help.")
    assert result.output == "So." and model.script.samplings[0].max_tokens == 60
    assert model.answers[0][1].template_args["enable_thinking"] is True
    assert spent(result.all_messages()[-1])[1] == computed(model)[0]


def test_pydantic_ai_is_told_what_is_wrong(agent):
    with pytest.raises(ai.exceptions.ModelHTTPError, match="temperature") as caught:
        agent(lambda a: a.run("x"), model_settings={"temperature": -2.0})
    assert caught.value.status_code == 400
