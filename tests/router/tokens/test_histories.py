"""Chats of all forms with published templates: everything that is said reaches the prompt, and stays where it was."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from radixrt.messages import NO_TENANT, ChatPrompt
from radixrt.tokens import Encoded, Sessions, Tokenizer, load_tokenizer
from radixrt.tokens.chat import ChatTemplates
from radixrt.tokens.errors import FieldError
from radixrt.tokens.histories import short_id
from tests.histories import BASH, MOVES, SPECIAL_TOKENS, call, result, said, words


@pytest.fixture(scope="module")
def published(shared_data: Path) -> dict[str, ChatTemplates]:
    folder = shared_data / "chat_templates"
    if not folder.is_dir():
        pytest.skip("no published chat templates here")
    files = sorted(folder.glob("*.jinja"))
    return {file.stem: ChatTemplates({"default": file.read_text("utf-8")}, SPECIAL_TOKENS) for file in files}


@pytest.fixture(scope="module")
def cases(shared_data: Path) -> list[dict[str, Any]]:
    file = shared_data.parent / "cases" / "api" / "histories.json"
    if not file.is_file():
        pytest.skip("no recorded histories here")
    return json.loads(file.read_text("utf-8"))


def test_every_text_reaches_the_prompt(published, cases) -> None:
    assert len(published) >= 50
    for case in cases:
        for name, templates in published.items():
            text = templates.render(ChatPrompt(case["messages"], case.get("tools")))
            assert [need for need in case["needs"] if need not in text] == [], (name, case["name"])


TOOLS: dict[str, dict[str, Any]] = {
    "name alone": {},
    "null": {"description": None, "parameters": None},
    "no parameters": {"description": "run", "parameters": {}},
    "an object": {"description": "run", "parameters": {"type": "object"}},
    **{
        f"parameter {schema}": {"description": "run", "parameters": {"type": "object", "properties": {"arg1": schema}}}
        for schema in (
            {}, True, {"type": "string"}, {"type": ["string", "null"]}, {"type": "array"}, {"type": "object"},
            {"anyOf": [{"type": "string"}, {"type": "null"}]}, {"enum": ["a", 1]}, {"$ref": "#/$defs/x"},
            {"type": "array", "items": {"type": "object", "properties": {"x": {"type": ["integer", "null"]}}}},
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_every_field_of_a_tool_is_optional(published, tool: str) -> None:
    tools = [{"type": "function", "function": {"name": "bash", **TOOLS[tool]}}, BASH]
    for name, templates in published.items():
        text = templates.render(ChatPrompt([said("user", "hi")], tools))
        assert "bash" in text, name
        assert "arg1" in text or not tool.startswith("parameter "), name


def history(rng: random.Random) -> list[dict[str, Any]]:
    """A chat as agents send them, with unique words."""
    found: list[dict[str, Any]] = []

    def word() -> str:
        word.count = getattr(word, "count", 0) + 1  # type: ignore[attr-defined]
        return f"text{word.count}word"  # type: ignore[attr-defined]

    def say(*roles: str) -> None:
        parts = [{"type": "text", "text": word()}, {"type": "text", "text": word()}]
        found.append(said(rng.choice(roles), parts if rng.random() < 0.2 else word()))

    for _ in range(rng.randrange(3)):
        say("system", "developer")
    say("user", "user", "user", "assistant")
    for _ in range(rng.randrange(1, 6)):
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            say("user", "user", "system", "developer")
        if rng.random() < 0.5:
            say("assistant")
            continue
        ids = [f"call_{rng.randrange(1 << 30):x}" for _ in range(rng.choice([1, 1, 2]))]
        arguments = rng.choice(['{"command": "ls"}', '{"command": "l', "null", "[1]"])
        calls = [one for call_id in ids for one in call(call_id, arguments)["tool_calls"]]
        found.append(said("assistant", word() if rng.random() < 0.4 else None, tool_calls=calls))
        found += [result(word(), call_id) for call_id in ids]
    return found


@pytest.mark.parametrize("seed", range(24))
def test_a_chat_stays_the_beginning_of_its_next_turn(published, seed: int) -> None:
    """Wherever an answer was generated, the next turn's prompt begins with the texts of that prompt, as they were."""
    messages = history(random.Random(seed))
    tools = [BASH] if seed % 2 else None
    ends = [at for at, message in enumerate(messages) if at and message["role"] == "assistant"] + [len(messages)]
    for name, templates in published.items():
        before = ""
        for end in ends:
            text = templates.render(ChatPrompt(messages[:end], tools))
            missing = [word for word in words(messages[:end]) if word not in text]
            assert not missing or name == "openai-gpt-oss-120b", name
            if name not in MOVES:
                assert text.startswith(before), (name, end)
            last = words(messages[:end])[-1]
            before = text[: text.rindex(last) + len(last)]


def test_a_later_instruction_stays_in_the_user_s_turn(published) -> None:
    chat = [said("system", "first1"), said("user", "ask1"), said("assistant", "yes1"), said("system", "later1")]
    for name, templates in published.items():
        for messages in (
            chat,
            [*chat, said("user", "ask2")],
            [*chat[:3], said("user", "ask2"), said("developer", "later1")],
        ):
            text = templates.render(ChatPrompt(messages))
            assert text.index("yes1") < text.index("later1"), name


def test_what_cannot_be_shown_names_the_message() -> None:
    chat = [said("user", "one"), said("assistant", "two"), said("user", "unshown"), said("user", "four")]
    shows = "{% for m in messages %}{{ m.role }}: {{ m.content if m.content != 'unshown' }}\n{% endfor %}"
    with pytest.raises(FieldError, match=r"messages\[2\]: .*does not show it") as caught:
        ChatTemplates({"default": shows}, {}).render(ChatPrompt(chat))
    assert caught.value.field == "messages[2]"
    raises = "{% for m in messages %}{{ m.content if m.content != 'unshown' else raise_exception('no') }}\n{% endfor %}"
    with pytest.raises(FieldError, match=r"messages\[2\]: the chat template refuses these messages: no") as caught:
        ChatTemplates({"default": raises}, {}).render(ChatPrompt(chat))
    assert caught.value.field == "messages[2]"


def test_texts_that_a_template_writes_in_another_form_are_found() -> None:
    chat = [
        said("user", ' "quoted" \\ é\n'),
        said("assistant", "<think>long</think>\n\nshort"),
        said("user", "Loud: ä"),
    ]
    for write in ("m.content | tojson", "m.content | trim", "m.content.split('</think>')[-1]", "m.content | upper"):
        source = "{% for m in messages %}{{ m.role }}: {{ " + write + " }}\n{% endfor %}"
        assert ChatTemplates({"default": source}, {}).render(ChatPrompt(chat))


def test_foreign_ids_of_calls_become_mistral_s() -> None:
    assert short_id("abcdEF012") == "abcdEF012"
    assert short_id("toolu_01ABC") == short_id("toolu_01ABC") != short_id("toolu_01ABD")
    assert len(short_id("call_1\ud83d")) == 9 and short_id("call_1").isalnum()


def test_long_chats_are_shaped_and_checked_in_time(published) -> None:
    """Text that a template writes as JSON, so that each is looked for in two forms."""
    text = 'line "quoted" \\ é\n' * 20
    turn = [said("user", text), call(content="text"), result(text), said("system", "note"), said("assistant", text)]
    chat = [said("system", "first"), *(turn * 600)]
    for name in ("meta-llama-Llama-3.1-8B-Instruct", "mistralai-Mistral-Nemo-Instruct-2407"):
        began = os.times().user
        assert len(published[name].render(ChatPrompt(chat, [BASH]))) > len(text) * 1800
        assert os.times().user - began < 3


# ---------------------------------------------------------------- sessions


ENDS = ("<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>", "<|eot|>", "<｜end▁of▁sentence｜>", "<|end|>", "<|calls|>")


@pytest.fixture(scope="module")
def agents_tokenizer(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A published tokenizer with the special tokens that end answers."""
    folder = tmp_path_factory.mktemp("phi-2")
    packed = (shared_data / "tokenizers" / "phi-2" / "tokenizer.json.gz").read_bytes()
    (folder / "tokenizer.json").write_bytes(gzip.decompress(packed))
    (folder / "tokenizer_config.json").write_text(json.dumps({"additional_special_tokens": ENDS}))
    return load_tokenizer(folder)


class Agent:
    """An agent's session with one template: each prompt must begin with the last one's ids and those generated."""

    def __init__(self, tokenizer: Tokenizer, templates: ChatTemplates) -> None:
        self.tokenizer = Tokenizer(tokenizer._backend, templates, tokenizer.bos_id, tokenizer.eos_ids)
        self.sessions = Sessions(self.tokenizer)
        self.messages: list[dict[str, Any]] = []
        self.seen = b""
        self.encoded: Encoded | None = None

    def hears(self, *messages: dict[str, Any]) -> Encoded:
        self.messages += messages
        self.encoded = self.sessions.encode_chat(NO_TENANT, ChatPrompt(copy.deepcopy(self.messages), [BASH]))
        assert self.encoded.ids.startswith(self.seen), self.encoded.dropped
        return self.encoded

    def says(self, message: dict[str, Any], text: str | None = None) -> None:
        """The model answers in the template's form, or with `text`, in tokens that no encoder would choose."""
        prompt = ChatPrompt([*self.messages, message], [BASH])
        written = self.tokenizer.apply_chat(prompt, answer_next=False).removeprefix(self.encoded.text)
        ends = [(written.rindex(end), end) for end in ENDS if end in written]
        at, end = max(ends, default=(len(written), ""))
        text = written[:at] if text is None else text
        halves = text[: len(text) // 2], text[len(text) // 2 :]
        ids = [token for half in halves for token in self.tokenizer.encode_continuation(half)]
        ids += [self.tokenizer.token_id(end)] if end else []
        generated = array("i", ids).tobytes()
        self.sessions.remember(self.encoded, message, generated)
        self.messages.append(message)
        self.seen = self.encoded.ids + generated


@pytest.mark.parametrize(
    "name",
    [
        "Qwen-Qwen2.5-7B-Instruct",
        "meta-llama-Llama-3.1-8B-Instruct",
        "mistralai-Ministral-3-14B-Reasoning-2512",
        "google-gemma-2-2b-it",
        "deepseek-ai-DeepSeek-V3.1",
        "upstage-Solar-Open-100B",
        "moonshotai-Kimi-K2",
        "HuggingFaceTB-SmolLM3-3B",
    ],
)
def test_answers_keep_their_ids_where_messages_are_merged_and_moved(published, agents_tokenizer, name: str) -> None:
    agent = Agent(agents_tokenizer, published[name])
    agent.hears(
        said("system", "Be an agent."),
        said("developer", "Use tools."),
        said("user", "List files."),
        said("system", "No skills."),
    )
    agent.says(call("call_1"))
    agent.hears(result("One file.", "call_1"))
    agent.says(call("call_2", '{"command": "pwd"}'))
    agent.hears(result("Here.", "call_2"), said("system", "Do not forget."))
    agent.says(said("assistant", "There is one file."))
    agent.hears(said("user", "And now"), said("user", "go on."))
    agent.says(call("call_3", content="Let me see."))
    agent.hears(result("Nothing.", "call_3"), said("user", "Stop that."))
    agent.says(said("assistant", "Stopped."))
    agent.hears(said("developer", "The mode has changed."), said("user", "Go on."))
    agent.says(said("assistant", "Done."))
    assert agent.hears(said("user", "Bye.")).kept_turns == 6


def test_an_answer_with_text_and_a_call_keeps_its_ids_where_a_template_writes_them_apart(
    published, agents_tokenizer
) -> None:
    agent = Agent(agents_tokenizer, published["meta-llama-Llama-3.1-8B-Instruct"])
    agent.hears(said("user", "List files."))
    agent.says(call(content="Let me see."), 'Let me see. {"name": "bash", "parameters": {"command": "ls"}}')
    encoded = agent.hears(result("One file."))
    assert encoded.kept_turns == 1 and "apart" in encoded.respelled[0]
    other = Agent(agents_tokenizer, published["meta-llama-Llama-3.1-8B-Instruct"])
    other.hears(said("user", "List files."))
    other.says(call(content="Let me see."), 'Let me see. {"name": "bash", "parameters": {"command": "rm"}}')
    other.seen = b""
    assert other.hears(result("One file.")).dropped


def test_thoughts_are_parts_of_an_answer_where_a_template_looks_for_them_there(published, agents_tokenizer) -> None:
    """As Mistral's do; in answers, beside calls, and before an answer that is continued."""
    agent = Agent(agents_tokenizer, published["mistralai-Ministral-3-14B-Reasoning-2512"])
    agent.hears(said("user", "List files."))
    agent.says(call(content="Let me see.") | {"reasoning_content": "I call it."})
    agent.hears(result("One file."))
    agent.says(call() | {"reasoning_content": "Again."})
    agent.hears(result("One file."))
    agent.says(said("assistant", "There is one.", reasoning_content="It is there."))
    encoded = agent.hears(said("user", "Thanks."))
    assert encoded.kept_turns == 3 and not encoded.dropped
    thoughts = ("[THINK]I call it.[/THINK]Let me see.[TOOL_CALLS]", "[THINK]Again.[/THINK][TOOL_CALLS]")
    assert all(one in encoded.text for one in (*thoughts, "[THINK]It is there.[/THINK]There is one."))
    templates = published["mistralai-Ministral-3-14B-Reasoning-2512"]
    begun = [said("user", "Who?"), said("assistant", "It is", reasoning_content="Me.")]
    assert templates.render(ChatPrompt(begun, partial=True)).endswith("[THINK]Me.[/THINK]It is")
    with pytest.raises(FieldError, match="only an assistant message with content can be continued"):
        templates.render(ChatPrompt([begun[0], begun[1] | {"content": ""}], partial=True))


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system is first') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_later_instruction_is_a_reminder_where_it_stands() -> None:
    templates = ChatTemplates({"default": STRICT}, SPECIAL_TOKENS)
    chat = [said("system", "SYS1"), said("user", "hi"), said("assistant", "yo"), said("system", "SYS2")]
    before = templates.render(ChatPrompt(chat[:3]), answer_next=False)
    text = templates.render(ChatPrompt([*chat, said("user", "go")]))
    reminder = "<system-reminder>\nSYS2\n</system-reminder>"
    assert text == f"{before}[user]{reminder}\n\ngo[assistant]" and before == "[system]SYS1[user]hi[assistant]yo"
