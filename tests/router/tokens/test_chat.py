"""Chat templates, against transformers' apply_chat_template."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixrt.messages import ChatPrompt
from radixrt.tokens.chat import ChatTemplates, read_templates
from radixrt.tokens.errors import FieldError

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TEMPLATES = (
    *(f"chat_templates/{name}.jinja" for name in ("chatml", "gemma-it", "llama-2-chat", "llama-3-instruct")),
    *(f"chat_templates/{name}.jinja" for name in ("mistral-instruct", "phi-3", "qwen2.5-instruct", "vicuna", "zephyr")),
    "gpt-oss/chat_template.jinja",
    *(f"mistral/chat_templates/{v}{kind}.jinja" for v in ("v1", "v2", "v3", "v7") for kind in ("", "_spm")),
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather of a place, <b>now</b> & "later" — ça va?',
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "A place"}},
            "required": ["place"],
        },
    },
}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(arguments: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return said("assistant", None, tool_calls=[{"id": "abcdefghi", "type": "function", "function": function}])


CALLED = [
    said("user", "How is it in Zürich?"),
    called({"place": "Zürich"}),
    said("tool", '{"weather": "fine"}', tool_call_id="abcdefghi", name="get_weather"),
]
CHATS: dict[str, dict[str, Any]] = {
    "one": {"messages": [said("user", "Hi")]},
    "odd text": {"messages": [said("user", " <s> {{ x }} 'quotes' \"\n\n🙂 é </s> ")]},
    "system": {
        "messages": [said("system", "Be kind."), said("user", "Hi"), said("assistant", " Ho "), said("user", "?")]
    },
    "long": {"messages": [said("user", "a"), said("assistant", "b")] * 4 + [said("user", "c")]},
    "thinking": {"messages": [said("user", "a"), said("assistant", "b", reasoning_content="hm"), said("user", "c")]},
    "tools": {"messages": [said("system", "Be kind."), said("user", "Weather?")], "tools": [WEATHER]},
    "called": {"messages": CALLED, "tools": [WEATHER]},
    "answered": {
        "messages": [*CALLED, said("assistant", "Fine."), said("user", "Thanks")],
        "tools": [WEATHER, WEATHER],
    },
    "none values": {
        "messages": [said("user", "a", name=None), said("assistant", "b", tool_calls=None), said("user", "c")]
    },
    "two users": {"messages": [said("user", "a"), said("user", "b")]},
    "no content": {"messages": [{"role": "user"}]},
    "unknown role": {"messages": [said("wizard", "abracadabra")]},
    "continued": {"messages": [said("user", "Count."), said("assistant", "One, two, ")], "partial": True},
    "continued bare": {
        "messages": [said("system", "s"), said("user", "Count."), said("assistant", "One")],
        "partial": True,
    },
    "with arguments": {
        "messages": [said("user", "a")],
        "template_args": {"enable_thinking": False, "bos_token": "<B>"},
    },
}


class Theirs:
    """transformers' rendering of the same prompt."""

    def __init__(self, template: str) -> None:
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL_TOKENS)
        self._tokenizer.chat_template = template

    def render(self, prompt: ChatPrompt) -> str:
        return self._tokenizer.apply_chat_template(
            copy.deepcopy(prompt.messages),
            tools=prompt.tools,
            tokenize=False,
            add_generation_prompt=not prompt.partial,
            continue_final_message=prompt.partial,
            **prompt.template_args,
        )


def ours(template: str | list[dict[str, str]]) -> ChatTemplates:
    return ChatTemplates(read_templates(Path("/nowhere"), {"chat_template": template}), SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def pairs(shared_data: Path) -> Iterator[dict[str, tuple[ChatTemplates, Theirs]]]:
    sources = {name: (shared_data / "tokenizers" / name).read_text(encoding="utf-8") for name in TEMPLATES}
    yield {name: (ours(source), Theirs(source)) for name, source in sources.items()}


@pytest.mark.parametrize("chat", CHATS)
def test_text_equals_transformers(pairs, chat: str) -> None:
    """Where transformers raises, or leaves something out, ours shows everything or is a FieldError; no template may
    fail on all chats, nor all on a plain chat."""
    prompt = ChatPrompt(**CHATS[chat])
    rendered = 0
    for name, (templates, theirs) in pairs.items():
        try:
            expected = theirs.render(prompt)
        except Exception:  # noqa: BLE001 (theirs are of many kinds)
            expected = ""
        if expected and not left_out(prompt, expected) and in_order(prompt, expected):
            assert templates.render(prompt) == expected, name
            rendered += 1
            continue
        try:
            found = templates.render(prompt)
            forgets = name in FORGETFUL and prompt.tools
            assert found == expected if forgets else not left_out(prompt, found), name
        except FieldError as error:
            assert error.field.startswith("messages"), name
    assert rendered >= {"two users": 5, "called": 5, "answered": 4, "tools": 4, "unknown role": 1}.get(chat, 9)


FORGETFUL = ("mistral/chat_templates/v2.jinja", "mistral/chat_templates/v2_spm.jinja")
"""Templates that leave out results after the next user's message."""


def in_order(prompt: ChatPrompt, text: str) -> bool:
    """Whether the system's text comes before the user's."""
    said = [message.get("content") for message in prompt.messages if message["role"] in ("system", "user")]
    return len(said) < 2 or text.find(said[0]) <= text.find(said[1])


def left_out(prompt: ChatPrompt, text: str) -> list[str]:
    """What is to be read in a chat's text and is not; quotes and white space aside."""
    plain = re.sub(r"\W", "", text)
    calls = [call["function"] for message in prompt.messages for call in message.get("tool_calls") or ()]
    wanted = [message["content"] for message in prompt.messages if message.get("content")]
    wanted += [call["arguments"]["place"] for call in calls] + [tool["function"]["name"] for tool in prompt.tools or ()]
    return [one for one in wanted if re.sub(r"\W", "", one) not in plain]


def test_every_template_renders_most_chats(pairs) -> None:
    for name, (templates, _) in pairs.items():
        done = 0
        for chat in CHATS.values():
            try:
                done += bool(templates.render(ChatPrompt(**chat)))
            except FieldError:
                continue
        assert done >= len(CHATS) // 2, name


def test_messages_are_left_as_they_were(pairs) -> None:
    for chat in CHATS.values():
        before = copy.deepcopy(chat)
        for templates, _ in pairs.values():
            try:
                templates.render(ChatPrompt(**chat))
            except FieldError:
                continue
        assert chat == before


def test_environment_has_what_templates_use() -> None:
    source = (
        "{% for m in messages + messages %}\n"
        "    {% if loop.index > messages | length %}{% break %}{% endif %}\n"
        "    {% generation %}{{ m.content }}{% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ strftime_now('%Y') | length }} {{ {'é': '<&'} | tojson }} {{ [1] | tojson(indent=2) }} {{ documents }}"
    )
    prompt = ChatPrompt([said("user", "a"), said("user", "b"), said("user", "c")])
    assert ours(source).render(prompt) == Theirs(source).render(prompt)
    assert ours("{{ ('[1, ' ~ 2 ~ ']' | string) | from_json | length }}").render(prompt) == "2"


def test_json_in_a_text_is_no_format() -> None:
    """Braces within braces would be a width that is an argument, if the text were formatted."""
    text = ' {"a": {"b": [{"c": 1}]}} '
    source = "{% for m in messages %}{{ m.content.strip() }}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    assert ours(source).render(ChatPrompt([said("user", text)])) == text.strip() + text
    with pytest.raises(FieldError, match="too large"):
        ours("{% for m in messages %}{{ '{:{}}'.format('a', 99999999) }}{% endfor %}").render(
            ChatPrompt([said("user", "a")])
        )


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    "loop",
    [
        "{% for p in m['content'] %}[{{ p.text }}]{% endfor %}",
        "{% for p in m.content | list %}[{{ p.text }}]{% endfor %}",
        "{% set content = m.content %}{% for p in content %}[{{ p.text }}]{% endfor %}",
    ],
)
def test_parts_go_to_templates_that_loop_over_them(loop: str) -> None:
    source = "{% for m in messages %}" + loop + "{% endfor %}"
    assert ours(source).render(ChatPrompt([said("user", PARTS)])) == "[one][two]"


def test_parts_are_joined_for_other_templates() -> None:
    source = "{% for m in messages %}{{ m.content }}{% for w in m.content.split() %}.{% endfor %}{% endfor %}"
    assert ours(source).render(ChatPrompt([said("user", PARTS)])) == "one\ntwo.."


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("{{ a.arguments | tojson }}", '{"x": 1}'),
        ("{% set args = a['arguments'] %}{{ args | tojson }}", '{"x": 1}'),
        ("{% for k, v in a.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "x=1"),
        ("{% set args = a.arguments or {} %}{% for k, v in args.items() %}{{ k }}={{ v }}{% endfor %}", "x=1"),
        ("{% if a.arguments is mapping %}{{ a.arguments.x }}{% endif %}", "1"),
        ("{% set _ = a.arguments | string %}{{ a.arguments | tojson }}", '{"x": 1}'),
        ("{{ '(' + a.arguments + ')' }}", '({"x":1})'),
        ("{{ a.arguments if a.arguments is string else a.arguments | tojson }}", '{"x":1}'),
    ],
)
def test_argument_strings_become_objects_where_templates_want_them(use: str, expected: str) -> None:
    source = "{% for m in messages %}{% set a = m.tool_calls[0].function %}" + use + "{% endfor %}"
    assert ours(source).render(ChatPrompt([called('{"x":1}')])) == expected


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("{{ call.function | tojson }}", '{"name": "get_weather", "arguments": {"x": 1}}'),
        ("{{ call.function | tojson if call.function.arguments is string }}", ""),
        ("{{ call['function'] | tojson }}{{ '(' + call['function']['arguments'] + ')' }}", None),
    ],
)
def test_arguments_in_calls_that_are_written_whole(use: str, expected: str | None) -> None:
    """Mistral's templates write `function` as JSON, in which a string of JSON would be quoted once more."""
    source = "{% for m in messages %}{% for call in m.tool_calls %}" + use + "{% endfor %}{% endfor %}"
    found = ours(source).render(ChatPrompt([called('{"x":1}')]))
    if expected is None:
        assert found.endswith('({"x":1})')
    elif expected:
        assert found == expected
    else:
        assert json.loads(found)["arguments"] == '{"x":1}'


ARGUMENTS = "{% for call in m.tool_calls or [] %}{{ call.function.arguments }}{% endfor %}"


@pytest.mark.parametrize("content", [None, "", "absent"])
@pytest.mark.parametrize("test", ["m['content'] is none", "m.content is not none"])
def test_calls_alone_have_content_none_where_templates_ask(content: str | None, test: str) -> None:
    """DeepSeek's distillates tell calls from text by it."""
    source = "{% for m in messages %}{{ 1 if " + test + " else 0 }}{% endfor %}"
    call = called("{}") | {"content": content}
    call = {key: value for key, value in call.items() if value != "absent"}
    chat = [said("user", "a"), call, said("assistant", "b"), called("{}") | {"content": "c"}, said("user", "")]
    assert ours(source).render(ChatPrompt(chat)) == ("01000" if " is none" in test else "10111")
    source = "{% for m in messages %}{{ m.content }}." + ARGUMENTS + "{% endfor %}"
    assert ours(source).render(ChatPrompt(chat)) == "a..{}b.c.{}."


@pytest.mark.parametrize(
    "source",
    [
        "{{ m.content.split('</think>')[-1] }}",  # Qwen3
        "{{ 'assistant: ' + m['content'] + '.' }}",  # Granite 3
        "{{ m.content is not none }}{{ m.content | length }}",  # Ministral 3
        "{{ m.content is none }}{{ '</think>' in m.content }}",  # DeepSeek-R1, for tools
        "{{ m.content | tojson }}",  # LFM2
    ],
)
def test_calls_alone_are_taken_by_templates_that_want_text(source: str) -> None:
    source = "{% for m in messages %}" + source + ARGUMENTS + "{% endfor %}"
    empty = ours(source).render(ChatPrompt([called("{}") | {"content": ""}]))
    assert ours(source).render(ChatPrompt([called("{}")])) == empty
    thoughts = said("assistant", None, reasoning_content="Hm.")
    assert ours(source).render(ChatPrompt([thoughts])) + "{}" == empty


ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}"
    "{% endif %}({{ m.content or '' }}){{ m.tool_calls[0].function.arguments }}"
    "{{ m.tool_calls[0].id }}{% else %} {{ m.role }}:{{ m.content }}{% endif %}|"
    "{% endfor %}"
)


def test_several_calls_become_one_each_where_a_template_takes_no_more() -> None:
    """Llama's: an agent that called twice at once could not go on."""
    ids = ["a", "b", "c"]
    calls = called("{}") | {
        "content": "Both.",
        "tool_calls": [called("{}")["tool_calls"][0] | {"id": id} for id in ids],
    }
    results = [said("tool", f"of {id}", tool_call_id=id) for id in "bca"]
    chat = [said("user", "x"), calls, *results, said("tool", "of none", tool_call_id="d"), said("user", "y")]
    rest = [" tool:of a", "(){}b", " tool:of b", "(){}c", " tool:of c", " tool:of none", " user:y", ""]
    assert ours(ONE_CALL).render(ChatPrompt(chat)).split("|") == [" user:x", "(Both.){}a", *rest]
    unnamed = [calls, *(said("tool", text) for text in ("first", "second"))]
    found = ours(ONE_CALL).render(ChatPrompt(unnamed)).split("|")
    assert found == ["(Both.){}a", " tool:first", "(){}b", " tool:second", "(){}c", ""]
    with pytest.raises(FieldError, match="refuses these messages: one"):
        ours("{{ raise_exception('one') }}").render(ChatPrompt(chat))


def test_results_are_text_also_where_a_user_s_parts_are_looped_over() -> None:
    """GLM's and Kimi K2's templates would write a part of a result as Python does."""
    source = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}{% for p in m.content %}"
    source += "{% endfor %}{% endfor %}"
    assert ours(source).render(ChatPrompt([said("tool", PARTS)])) == "one\ntwo"


def test_tools_where_smollm3_and_phi_4_mini_read_them() -> None:
    function = WEATHER["function"]
    xml = ours("{% if xml_tools %}{{ xml_tools[:] | tojson }}{% elif python_tools %}P{% endif %}")
    assert json.loads(xml.render(ChatPrompt([said("user", "a")], [WEATHER]))) == [function]
    assert xml.render(ChatPrompt([said("user", "a")], [WEATHER], template_args={"python_tools": ["x"]})) == "P"
    assert xml.render(ChatPrompt([said("user", "a")])) == ""
    phi = ours(
        "{% for m in messages %}{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}"
        "{{ m.content + '<|tool|>' + m['tools'] + '<|/tool|>' }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    found = phi.render(ChatPrompt([said("system", "Be kind."), said("user", "a")], [WEATHER]))
    assert found.startswith("Be kind.<|tool|>[") and found.endswith("]<|/tool|>a")
    assert json.loads(found[len("Be kind.<|tool|>") : -len("<|/tool|>a")]) == [function]
    assert "<|tool|>[" in phi.render(ChatPrompt([said("user", "a")], [WEATHER]))
    assert phi.render(ChatPrompt([said("user", "a")])) == "a"


def test_no_calls_are_no_tool_calls() -> None:
    source = "{% for m in messages %}{{ 'tool_calls' in m }}{% endfor %}"
    assert ours(source).render(ChatPrompt([said("assistant", "a", tool_calls=[])])) == "False"


def test_broken_arguments_reach_the_template_as_they_are() -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert ours(source).render(ChatPrompt([called('{"x":')])) == json.dumps('{"x":')


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (ChatPrompt([]), "messages"),
        (ChatPrompt([said("user", "a"), "b"]), "messages[1]"),
        (ChatPrompt([{"content": "a"}]), "messages[0].role"),
        (ChatPrompt([said("user", 5)]), "messages[0].content"),
        (ChatPrompt([said("user", ["a"])]), "messages[0].content[0].type"),
        (ChatPrompt([said("user", [*PARTS, {"type": "image_url"}])]), "messages[0].content[2].type"),
        (ChatPrompt([said("user", [{"type": "text", "text": 1}])]), "messages[0].content[0].text"),
        (ChatPrompt([said("assistant", "a", tool_calls="x")]), "messages[0].tool_calls"),
        (ChatPrompt([said("user", "a")], partial=True), "messages"),
        (ChatPrompt([said("assistant", "")], partial=True), "messages"),
        (ChatPrompt([said("user", "a")], template_args={"messages": []}), "template_args"),
    ],
)
def test_bad_messages_name_the_field(prompt: ChatPrompt, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        ours("{{ messages[0].content }}").render(prompt)
    assert caught.value.field == field
    assert field in str(caught.value) or field == "messages"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[0].nothing.more }}", "refuses these messages: .*has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "fails on these messages"),
        ("{{ ().__class__.__bases__ }}", "refuses these messages: access to attribute '__class__'"),
    ],
)
def test_refusals_of_the_template_are_told(source: str, message: str) -> None:
    with pytest.raises(FieldError, match=message) as caught:
        ours(source).render(ChatPrompt([said("user", "a")]))
    assert caught.value.field == "messages[0]"


def test_no_template_says_how_to_give_one() -> None:
    with pytest.raises(FieldError, match="--chat-template"):
        ChatTemplates({}, {}).render(ChatPrompt([said("user", "a")]))


def test_template_comes_from_where_transformers_looks(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}
    templates = ChatTemplates(read_templates(tmp_path, config), {})
    assert templates.render(ChatPrompt([said("user", "a")])) == "d"
    assert templates.render(ChatPrompt([said("user", "a")], tools=[WEATHER])) == "t"
    assert read_templates(tmp_path, {"chat_template": {"default": "d"}}) == {"default": "d"}
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert read_templates(tmp_path, config) == {"default": "json"}
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert read_templates(tmp_path, config) == {"default": "jinja"}
    (tmp_path / "given.txt").write_text("given")
    assert read_templates(tmp_path, config, str(tmp_path / "given.txt")) == {"default": "given"}
    with pytest.raises(ValueError, match="no chat template in"):
        read_templates(tmp_path, config, str(tmp_path / "absent"))


def test_a_template_that_is_no_jinja_is_refused_at_load() -> None:
    with pytest.raises(ValueError, match="chat template, line 2"):
        ours("a\n{% if %}")


@pytest.mark.parametrize(("city", "whole"), [(r"K\u00f6ln", True), (r"\ud83d\ude00", True), (r"\ud83d", False)])
def test_arguments_with_half_a_character_stay_text(city: str, whole: bool) -> None:
    """They are no text that could be encoded; characters of two halves are."""
    each = "{% for name, value in c.function.arguments|items %}{{ value }}{% endfor %}"
    template = ours("{% for c in messages[0].tool_calls %}" + each + "{% endfor %}")
    arguments = f'{{"city": "{city}"}}'
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    prompt = ChatPrompt([{"role": "assistant", "content": None, "tool_calls": [call]}])
    if whole:
        assert template.render(prompt) == json.loads(arguments)["city"]
    else:
        with pytest.raises(FieldError, match="messages"):
            template.render(prompt)
