"""Calls of the formats that are not JSON alone, over HTTP, by OpenAI's client, of a scripted model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from radixrt.tokens.chain import ISSUED_ID
from tests.frontend.scripted import DEEPSEEK_MARKS, KIMI_MARKS, Model, gathered, scripted

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time"}},
]
PARIS, ROME = '{"city": "Paris"}', '{"city": "Rome }"}'
CALLS, CALLS_END, CALL, CALL_END, SEP = DEEPSEEK_MARKS
K_CALLS, K_CALLS_END, K_CALL, K_ARGS, K_CALL_END = KIMI_MARKS
SAID = {
    "deepseek": (f"{CALL}weather{SEP}%s{CALL_END}", "", CALLS + "%s" + CALLS_END),
    "deepseek_v3": (f"{CALL}function{SEP}weather\n```json\n%s\n```{CALL_END}", "\n", CALLS + "%s" + CALLS_END),
    "qwen_coder": ("<tool_call>\n<function=weather>\n%s</function>\n</tool_call>", "\n", "%s"),
    "glm": ("<tool_call>weather\n%s</tool_call>", "\n", "%s"),
    "glm47": ("<tool_call>weather%s</tool_call>", "", "%s"),
    "minimax": ('<invoke name="weather">\n%s</invoke>', "\n", "<minimax:tool_call>\n%s\n</minimax:tool_call>"),
    "dsml": (
        '<｜DSML｜invoke name="weather">\n%s</｜DSML｜invoke>',
        "\n",
        "\n\n<｜DSML｜function_calls>\n%s\n</｜DSML｜function_calls>",
    ),
    "seed": ("<seed:tool_call>\n<function=weather>\n%s</function>\n</seed:tool_call>", "\n", "%s"),
    "olmo": ("weather(%s)", "\n", "<function_calls>%s</function_calls>"),
    "granite": ('{"name": "weather", "arguments": %s}', ", ", "<|tool_call|>[%s]"),
    "phi": ('{"name": "weather", "arguments": %s}', ", ", "<|tool_call|>[%s]<|/tool_call|>"),
    "mistral_v11": ("[TOOL_CALLS]weather[CALL_ID]idOfCallNUMBER[ARGS]%s", "", "%s"),
    "kimi": (f"{K_CALL}functions.weather:NUMBER{K_ARGS}%s{K_CALL_END}", "", K_CALLS + "%s" + K_CALLS_END),
    "gemma": ("<|tool_call>call:weather{%s}<tool_call|>", "", "%s"),
    "solar": (
        "<|tool_call:begin|>idofcallsNUMBER<|tool_call:name|>weather<|tool_call:args|>%s<|tool_call:end|>",
        "",
        "<|tool_calls|>%s<|calls|>",
    ),
    "cohere": (
        '{"tool_call_id": "NUMBER", "tool_name": "weather", "parameters": %s}', ", ",
        "<|START_ACTION|>[%s]<|END_ACTION|>",
    ),
    "apertus": ('{"weather": %s}', ", ", "<|tools_prefix|>[%s]<|tools_suffix|>"),
    "lfm2": ("weather(%s)", ", ", "<|tool_call_start|>[%s]<|tool_call_end|>"),
    "hunyuan": ("<tool_call>weather<tool_sep>\n%s</tool_call>", "\n", "<tool_calls>\n%s\n</tool_calls>"),
}  # fmt: skip
"""A call, what is between two, and what is around all."""
TAGGED = {
    "qwen_coder": "<parameter=city>\n%s\n</parameter>\n",
    "seed": "<parameter=city>%s</parameter>\n",
    "glm": "<arg_key>city</arg_key>\n<arg_value>%s</arg_value>\n",
    "glm47": "<arg_key>city</arg_key><arg_value>%s</arg_value>",
    "minimax": '<parameter name="city">%s</parameter>\n',
    "dsml": '<｜DSML｜parameter name="city" string="true">%s</｜DSML｜parameter>\n',
    "olmo": 'city="%s"',
    "lfm2": 'city="%s"',
    "gemma": 'city:<|"|>%s<|"|>',
    "hunyuan": "<arg_key>city</arg_key>\n<arg_value>%s</arg_value>\n",
}
"""An argument, of those that write no JSON."""


def said(family: str, count: int = 2) -> str:
    one, between, around = SAID[family]
    calls = []
    for number, city in enumerate(("Paris", "Rome }")[:count]):
        arguments = TAGGED[family] % city if family in TAGGED else f'{{"city": "{city}"}}'
        calls.append(one.replace("NUMBER", str(number)) % arguments)
    return around % between.join(calls)


@pytest.fixture(scope="module", params=SAID)
def family(request, tmp_path_factory) -> Iterator[tuple[str, Model]]:
    with scripted(request.param, tmp_path_factory.mktemp(request.param), reasoning_parser="none") as model:
        yield request.param, model


def calls_of(message) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


@pytest.mark.parametrize("before", ["", "One moment."])
def test_calls(family, before):
    name, model = family
    choice = model.chat(before + said(name), tools=TOOLS).choices[0]
    assert calls_of(choice.message) == [("weather", PARIS), ("weather", ROME)]
    assert (choice.message.content, choice.finish_reason) == (before or None, "tool_calls")
    messages, ends = gathered(model.chat(before + said(name), tools=TOOLS, stream=True))
    assert [tuple(call[1:]) for call in messages[0]["tool_calls"]] == [("weather", PARIS), ("weather", ROME)]
    assert messages[0]["content"] == before and ends == {0: "tool_calls"}


def test_ids(family):
    """Kimi's, Solar Open's and those of Mistral's version 11 are the model's own, which their templates write again."""
    name, model = family
    ids = [call.id for call in model.chat(said(name), tools=TOOLS).choices[0].message.tool_calls]
    if name == "mistral_v11":
        assert ids == ["idOfCall0", "idOfCall1"]
    elif name == "solar":
        assert ids == ["idofcalls0", "idofcalls1"]
    elif name == "kimi":
        assert ids == ["functions.weather:0", "functions.weather:1"]
    else:
        assert len(set(ids)) == 2 and all(ISSUED_ID.fullmatch(id) for id in ids)


def test_marks_do_not_show(family):
    name, model = family
    mark = {"kimi": K_CALL, "qwen_coder": "", "glm": "<tool_call>", "glm47": "", "minimax": "<minimax:tool_call>"}
    mark |= {"dsml": "", "olmo": "", "granite": "<|tool_call|>", "phi": "<|tool_call|>", "mistral_v11": "[TOOL_CALLS]"}
    mark |= {"gemma": "<|tool_call>", "solar": "<|tool_call:begin|>", "cohere": "<|START_ACTION|>", "hunyuan": ""}
    mark |= {"apertus": "<|tools_prefix|>", "lfm2": "<|tool_call_start|>"}
    mark = mark.get(name, "<seed:tool_call>" if name == "seed" else CALL)
    for stream in (False, True):
        answer = model.chat(f"Well, {mark}{{no}} call", tools=TOOLS, stream=stream)
        text = gathered(answer)[0][0]["content"] if stream else answer.choices[0].message.content
        assert text == "Well, {no} call"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_calls(family, choice):
    """The worker follows the grammar: what is scripted passes it, and what the fake draws is a call."""
    name, model = family
    text = said(name, 2 if choice == "required" else 1)
    found = model.chat(text, tools=TOOLS, tool_choice=choice).choices[0]
    assert calls_of(found.message) == [("weather", PARIS), ("weather", ROME)][: 2 if choice == "required" else 1]
    assert (found.finish_reason, found.message.content) == ("tool_calls", None)
    most = 300 if name == "cohere" else 100  # some of them white space within JSON
    drawn = model.chat(tools=TOOLS, tool_choice=choice, max_tokens=most).choices[0].message
    assert drawn.content is None and drawn.tool_calls[0].function.name in ("weather", "time")


def test_a_strict_tool_has_its_schema(family):
    _, model = family
    strict = {"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}
    model.chat("Nothing to call.", tools=[strict])
    kind, tag = model.grammar
    assert (kind, tag["format"]["type"]) == ("structural_tag", "triggered_tags")
    assert "city" in str(tag)


def test_an_answer_is_a_next_turn_s_history(family):
    """Its ids are those that were generated, to the last one."""
    name, model = family
    first = model.chat(said(name), tools=TOOLS).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in first.tool_calls]
    history = [{"role": "user", "content": "hello"}, first.model_dump(exclude_none=True), *results]
    answer = model.chat("It is sunny.", messages=history, tools=TOOLS)
    (_, prompt, message, _) = model.answers[0]
    shown = model.tokenizer.apply_chat(prompt)
    assert (TAGGED[name] % "Paris" if name in TAGGED else PARIS) in shown
    assert message == {"role": "assistant", "content": "It is sunny."}
    assert answer.model_extra["radixrt"]["session"]["kept_turns"] == 1
