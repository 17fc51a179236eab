"""Sessions: an answer that comes back as text is spelled by the ids that were generated, and never wrongly."""

from __future__ import annotations

import copy
import json
import random
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from radixrt.messages import ChatPrompt, Namespace
from radixrt.tokens import Encoded, Sessions, TextService, Tokenizer, load_tokenizer
from radixrt.tokens.chain import bare, keys_of
from radixrt.tokens.chat import ChatTemplates
from radixrt.tokens.errors import FieldError
from tests.checkpoints import make_tokenizer
from tests.frontend.scripted import make_chat
from tests.recorded import chats, client_echo

HERE = Namespace("n")
CALLS = (
    '{% for c in m.tool_calls or [] %}{{ \'\\n<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
)
LAST_USER = (
    "{% set ns = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.user = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
THOUGHT = (
    "{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.user %}"
    "{{ '<think>\\n' + m.reasoning_content.strip() + '\\n</think>\\n\\n' }}{% endif %}"
)
CONTENT = "{{ m.content or '' }}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


def chat(content: str, first: str = TOOLS, opening: str = "", end: str = "<|im_end|>") -> str:
    """A template in the manner of ChatML."""
    turn = "{{ '<|im_start|>' + m.role + '\\n' }}" + content + "{{ '" + end + "\\n' }}"
    answer = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n" + opening + "' }}{% endif %}"
    return first + "{% for m in messages %}" + turn + "{% endfor %}" + answer


EMPTY_THOUGHT = (
    "{% if m.role == 'assistant' %}"
    "{{ '<think>' + (m.reasoning_content or '' if loop.index0 > ns.user else '') + '</think>\\n' }}{% endif %}"
)
COUNT = (
    "{% for c in m.tool_calls or [] %}{% set _ = counted.ids.append(c.function.name) %}{% endfor %}"
    "{% if m.role == 'tool' %}{{ counted.ids.pop(0) if counted.ids else 'unknown' }}: {% endif %}"
)
XML_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\\n\\n<function=' + c.function.name + '>' }}"
    "{% for k, v in c.function.arguments.items() %}{{ '<parameter=' + k + '>' + v + '</parameter>' }}{% endfor %}"
    "{{ '</function>' }}{% endfor %}"
)
NO_ORPHANS = (
    "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
)
REFUSE = "{% if m.content[:4] == 'turn' %}{{ raise_exception('no') }}{% endif %}"
TEMPLATES = {
    "plain": chat(CONTENT + CALLS),
    "trim": chat("{{ m.content | trim }}" + CALLS),
    "thinking": chat(THOUGHT + CONTENT + CALLS, LAST_USER),
    "thinks first": chat(THOUGHT + CONTENT + CALLS, LAST_USER, "<think>\\n"),
    "empty thoughts": chat(EMPTY_THOUGHT + CONTENT + CALLS, LAST_USER),
    "xml calls": chat(NO_ORPHANS + THOUGHT + CONTENT + XML_CALLS, LAST_USER, "<think>\\n"),
    "counts calls": chat(COUNT + CONTENT + CALLS, "{% set counted = namespace(ids=[]) %}"),
    "no thinking": chat(CONTENT, opening="<think>\\n\\n</think>\\n\\n"),
    "reasons": chat(CONTENT, opening="These are my reasons:\\n"),
    "switch": chat(CONTENT, opening="' + ('<think>\\n\\n</think>\\n\\n' if 'now' in messages[-1].content else '') + '"),
    "moving": chat("{% if loop.index0 == ns.user %}" + TOOLS + "{% endif %}" + CONTENT, LAST_USER),
    "spaced": chat(CONTENT, end=" <|im_end|>"),
    "spaces last": chat(CONTENT + CALLS + "{{ '' if loop.last else ' \\n' }}"),
    "twice": chat(CONTENT + " " + CONTENT),
    "changes": chat("{{ m.content | upper }}"),
    "refuses": chat(REFUSE + "{{ m.content | trim }}"),
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def to_bytes(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(arguments: Any, call_id: str = "abcdefghi", name: str = "find") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class Talk:
    """A conversation as server and client have it: each answer is given as text, and generated in odd pieces."""

    def __init__(self, tokenizer: Tokenizer, sessions: Sessions, tools: list[Any] | None = None, seed: int = 0) -> None:
        self.tokenizer, self.sessions, self.tools = tokenizer, sessions, tools
        self.messages: list[dict[str, Any]] = []
        self.rng = random.Random(seed)
        self.encoded: Encoded | None = None
        self.whole = b""

    def ask(self, *messages: dict[str, Any], namespace: Namespace = HERE, **args: Any) -> Encoded:
        self.messages += messages
        prompt = ChatPrompt(copy.deepcopy(self.messages), self.tools, template_args=args)
        self.encoded = self.sessions.encode_chat(namespace, prompt)
        return self.encoded

    def answer(self, text: str, message: dict[str, Any] | None = None, end: str | None = "<|im_end|>") -> bytes:
        """The model generates `text` and `end`; the client sees `message`."""
        ids = odd_ids(self.tokenizer, text, self.rng)
        ids += [self.tokenizer.token_id(end)] if end else []
        message = message or said("assistant", text)
        self.sessions.remember(self.encoded, message, to_bytes(ids))
        self.messages.append(message)
        self.whole = self.encoded.ids + to_bytes(ids)
        return self.whole


def odd_ids(tokenizer: Tokenizer, text: str, rng: random.Random) -> list[int]:
    """Ids of a text that an encoding of it would not give."""
    for _ in range(8):
        at = rng.randrange(len(text) + 1) if text else 0
        ids = tokenizer.encode_continuation(text[:at]) + tokenizer.encode_continuation(text[at:])
        if ids != tokenizer.encode_continuation(text):
            break
    return ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("made"))


@pytest.fixture
def talk(folder: Path, request: pytest.FixtureRequest) -> Talk:
    return make_talk(folder, getattr(request, "param", "plain"))


def make_talk(folder: Path, template: str, tools: list[Any] | None = None, **options: Any) -> Talk:
    made = load_tokenizer(folder)
    tokenizer = Tokenizer(
        made._backend, ChatTemplates({"default": TEMPLATES[template]}, SPECIAL), made.bos_id, made.eos_ids
    )
    return Talk(tokenizer, Sessions(tokenizer, **{"least_tokens": 1} | options), tools)


def shown(talk: Talk) -> str:
    return talk.tokenizer.decode(memoryview(talk.encoded.ids).cast("i").tolist(), False)


def test_a_chat_that_is_nested_too_deeply_is_the_fault_of_a_field(talk: Talk) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    prompt = ChatPrompt([said("user", "What is it?"), said("assistant", "No.")], [{"parameters": deep}])
    with pytest.raises(FieldError, match="recursion"):
        talk.sessions.encode_chat(HERE, prompt)
    assert talk.sessions.answers_in(HERE, prompt).missing == []


# ---------------------------------------------------------------- one answer, however it comes back


def test_an_answer_is_spelled_as_it_was_generated(talk: Talk) -> None:
    talk.ask(said("user", "What is it?"))
    whole = talk.answer("The question again, and the answer.")
    encoded = talk.ask(said("user", "More."))
    assert encoded.ids == whole + to_bytes(
        talk.tokenizer.encode("\n<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\n")
    )
    assert (encoded.kept_turns, encoded.respelled, encoded.dropped) == (1, (), ())
    assert encoded.ids != talk.tokenizer.encode_bytes(encoded.text, False)
    assert shown(talk) == encoded.text == talk.tokenizer.apply_chat(ChatPrompt(talk.messages))


@pytest.mark.parametrize(
    "content",
    [" the dog\n", [{"type": "text", "text": "the "}, {"type": "text", "text": "dog"}], "the dog"],
    ids=["white space", "parts", "same"],
)
@pytest.mark.parametrize("talk", ["plain", "trim"], indirect=True)
def test_content_comes_back_in_many_forms(talk: Talk, content: Any) -> None:
    talk.ask(said("user", "Who?"))
    whole = talk.answer("the dog", said("assistant", "the dog"))
    talk.messages[-1] = said("assistant", content, refusal=None, annotations=[], name=None, audio=None)
    encoded = talk.ask(said("user", "And?"))
    assert encoded.ids.startswith(whole)
    assert not encoded.dropped


ARGUMENTS = '{"b": [1, 2.0, {"y": "Zürich", "x": null}], "a": "two  words"}'


@pytest.mark.parametrize("content", [None, "", "absent", "Let me see."])
@pytest.mark.parametrize(
    "echoed",
    [
        ARGUMENTS,
        '{"a":"two  words","b":[1,2,{"x":null,"y":"Z\\u00fcrich"}]}',
        json.loads(ARGUMENTS),
        json.dumps(json.loads(ARGUMENTS), indent=2),
    ],
    ids=["same", "reordered", "object", "indented"],
)
def test_tool_calls_come_back_as_json(talk: Talk, echoed: Any, content: str | None) -> None:
    talk.tools = [{"type": "function", "function": {"name": "find"}}]
    talk.ask(said("user", "Find it."))
    text = content if content == "Let me see." else ""
    generated = text + '\n<tool_call>\n{"name": "find", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
    whole = talk.answer(generated, said("assistant", text, tool_calls=[call(ARGUMENTS)]))
    message = said("assistant", content, tool_calls=[call(echoed) | {"index": 0}], function_call=None)
    if content == "absent":
        del message["content"]
    talk.messages[-1] = message
    encoded = talk.ask(said("tool", "found", tool_call_id="abcdefghi"))
    assert encoded.ids.startswith(whole)
    assert encoded.kept_turns == 1 and not encoded.dropped
    assert bool(encoded.respelled) == (isinstance(echoed, str) and echoed.startswith('{"a"'))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m | {"content": "the cat"},
        lambda m: m | {"tool_calls": [call('{"a": 2}')]},
        lambda m: m | {"tool_calls": [call('{"a": 1}', "another00")]},
        lambda m: m | {"tool_calls": []},
        lambda m: m | {"tool_calls": [call('{"a": 1')]},
    ],
)
def test_another_answer_is_another(talk: Talk, change: Any) -> None:
    talk.ask(said("user", "Find it."))
    generated = 'the dog\n<tool_call>\n{"name": "find", "arguments": {"a": 1}}\n</tool_call>'
    talk.answer(generated, said("assistant", "the dog", tool_calls=[call('{"a": 1}')]))
    assert talk.sessions.encode_chat(HERE, ChatPrompt([*talk.messages, said("tool", "x")])).kept_turns == 1
    talk.messages[-1] = change(talk.messages[-1])
    encoded = talk.ask(said("tool", "found"))
    assert encoded.kept_turns == 0
    assert encoded.ids == talk.tokenizer.encode_bytes(encoded.text, False)


@pytest.mark.parametrize(
    ("end", "kept"),
    [("<|im_end|>", True), (None, True), ("<|endoftext|>", False)],
    ids=["ended", "cut off", "other end"],
)
def test_the_end_of_a_turn_is_there_once(talk: Talk, end: str | None, kept: bool) -> None:
    talk.ask(said("user", "Who?"))
    whole = talk.answer("the lazy dog", end=end)
    encoded = talk.ask(said("user", "And?"))
    assert encoded.ids.startswith(whole if kept else whole[:-4])
    assert shown(talk) == encoded.text
    assert encoded.text.count("<|im_end|>") == 3
    assert encoded.kept_turns == 1


@pytest.mark.parametrize("template", ["plain", "trim", "thinking"])
def test_a_special_token_within_an_answer_is_not_lost(folder: Path, template: str) -> None:
    """The client does not see it, and sends the answer back without."""
    talk = make_talk(folder, template)
    encoded = talk.ask(said("user", "What is it?"))
    encode, id_of = talk.tokenizer.encode_continuation, talk.tokenizer.token_id
    ids = [*encode("The question "), id_of("<|endoftext|>"), *encode("again."), id_of("<|im_end|>")]
    seen = said("assistant", talk.tokenizer.decode(ids))
    assert seen["content"] == "The question again."
    talk.sessions.remember(encoded, seen, to_bytes(ids))
    talk.messages.append(seen)
    for question in ("More.", "And?"):
        following = talk.ask(said("user", question))
        assert following.ids.startswith(encoded.ids + to_bytes(ids))
        assert following.respelled == ("message 1: the template leaves out <|endoftext|>",) and not following.dropped
        talk.answer("No.")


def test_a_special_token_that_begins_a_message_is_not_part_of_another(talk: Talk) -> None:
    """The template writes it elsewhere: the answer would seem to be two messages."""
    encoded = talk.ask(said("user", "What is it?"))
    encode, id_of = talk.tokenizer.encode_continuation, talk.tokenizer.token_id
    ids = [*encode("It is. "), id_of("<|im_start|>"), *encode("user\nGo on."), id_of("<|im_end|>")]
    seen = said("assistant", talk.tokenizer.decode(ids))
    talk.sessions.remember(encoded, seen, to_bytes(ids))
    talk.messages.append(seen)
    following = talk.ask(said("user", "More."))
    assert following.kept_turns == 0 and [one[:2] for one in following.dropped] == [(1, "rewritten")]
    assert shown(talk) == following.text


def test_what_another_process_remembers(folder: Path) -> None:
    """Learned, an answer is as if it had been generated here; what cannot be read is not learned."""
    one, other = (make_talk(folder, "thinking") for _ in range(2))
    one.ask(said("user", "Who?"))
    whole = one.answer("<think>\nHm.\n</think>\n\nthe dog", said("assistant", "the dog", reasoning_content="Hm."))
    key = one.sessions.remember(one.encoded, one.messages[-1], whole[len(one.encoded.ids) :])
    other.messages = [*one.messages, said("tool", "x", tool_call_id="i")]
    prompt = ChatPrompt(other.messages)
    assert (
        other.sessions.answers_in(HERE, prompt).missing == [key]
        and other.sessions.answers_in(HERE, ChatPrompt([1])).missing == []
    )
    for broken in (b"", b"x", one.sessions.export(key)[:-1]):
        other.sessions.learn(HERE, key, broken)
    assert other.sessions.export(key) is None and not other.ask().ids.startswith(whole)
    other.sessions.learn(HERE, key, one.sessions.export(key))
    assert other.ask().ids.startswith(whole) and other.sessions.answers_in(HERE, prompt).missing == []
    assert other.sessions.num_tokens == one.sessions.num_tokens > 0
    small = make_talk(folder, "thinking", max_tokens=6)
    small.ask(said("user", "Who?"))
    small.answer("I")
    small.sessions.learn(HERE, key, one.sessions.export(key))
    assert 0 < small.sessions.num_tokens <= 6


def test_a_burst_of_one_tenant_costs_another_nothing(folder: Path) -> None:
    """However many salts it spreads over. Against a list, of which the tenant that has most loses the first."""
    sessions = make_talk(folder, "plain", max_tokens=60).sessions
    rng, kept, asked = random.Random(0), [], []

    def used(tenant: str) -> int:
        return sum(size for name, _, size in kept if name == tenant)

    def remember(tenant: str, salt: int, size: int) -> None:
        prompt = ChatPrompt([said("user", f"{len(asked)}?")])
        namespace, answer = Namespace(tenant, salt=f"{salt}"), said("assistant", f"It is {len(asked)}.")
        sessions.remember(sessions.encode_chat(namespace, prompt), answer, to_bytes([5] * size))
        asked.append((namespace, ChatPrompt([*prompt.messages, answer, said("user", "And?")])))
        kept.append((tenant, len(asked) - 1, size))
        while sum(size for *_, size in kept) > 60:
            most = min("abc", key=lambda name: (-used(name), name))
            kept.remove(next(one for one in kept if one[0] == most))
        lately = range(max(0, len(asked) - 30), len(asked))
        found = [at for at in lately if not sessions.answers_in(*asked[at]).missing]
        assert found == [at for at in lately if at in [number for _, number, _ in kept]]
        assert sessions.num_tokens == sum(size for *_, size in kept) <= 60

    for _ in range(5):
        remember("b", 0, 2)
    for number in range(60):
        remember("a", number, 7)
    assert used("b") == 10, "the reference is fair"
    for _ in range(120):
        remember(rng.choice("abc"), rng.randrange(3), rng.randrange(1, 12))


def test_an_empty_answer_is_one(talk: Talk) -> None:
    talk.ask(said("user", "Say nothing."))
    whole = talk.answer("", said("assistant", None))
    encoded = talk.ask(said("user", "And?"))
    assert encoded.ids.startswith(whole) and shown(talk) == encoded.text


def test_half_a_character_stays_what_it_was(talk: Talk) -> None:
    talk.ask(said("user", "Smile."))
    ids = talk.tokenizer.encode("ok 🤖", False)[:-2]
    text = talk.tokenizer.decode(ids)
    assert text.endswith("\ufffd")
    message = said("assistant", text)
    talk.sessions.remember(talk.encoded, message, to_bytes(ids))
    before = talk.encoded.ids
    talk.messages.append(message)
    assert talk.ask(said("user", "?")).ids.startswith(before + to_bytes(ids))


# ---------------------------------------------------------------- what templates do to answers


@pytest.mark.parametrize("talk", ["trim"], indirect=True)
def test_trimmed_white_space_is_said_and_kept(talk: Talk) -> None:
    talk.ask(said("user", "Who?"))
    whole = talk.answer("\n the dog  \n")
    encoded = talk.ask(said("user", "And?"))
    assert encoded.ids.startswith(whole)
    assert encoded.respelled == ("message 1: the template writes its white space, JSON or headers in another way",)
    whole = talk.answer("nothing to trim")
    assert talk.ask(said("user", "And?")).ids.startswith(whole)


@pytest.mark.parametrize("talk", ["spaced"], indirect=True)
def test_white_space_before_the_end_is_left_out(talk: Talk) -> None:
    for turn in range(3):
        assert talk.ask(said("user", "Who?")).ids.startswith(talk.whole)
        assert len(talk.encoded.respelled) == turn
        talk.answer("the dog")


REASONING = "Thought: I should search.\n\nThen {answer}."


@pytest.mark.parametrize("template", ["thinking", "thinks first"])
@pytest.mark.parametrize("echoes", [True, False], ids=["thinking comes back", "thinking stays away"])
@pytest.mark.parametrize("keep", [False, True])
def test_thinking(folder: Path, template: str, echoes: bool, keep: bool) -> None:
    """It stays in a loop of tools, and goes with the next user message, but where it is to be kept."""
    talk = make_talk(folder, template, keep_thinking=keep)
    head = "" if template == "thinks first" else "<think>\n"
    talk.ask(said("user", "Find it."))
    generated = '\n<tool_call>\n{"name": "find", "arguments": {"a": 1}}\n</tool_call>'
    message = said("assistant", "", tool_calls=[call('{"a": 1}')], reasoning_content=REASONING)
    whole = talk.answer(f"{head}{REASONING}\n</think>\n\n{generated}", message)
    if not echoes:
        talk.messages[-1] = {k: v for k, v in message.items() if k != "reasoning_content"}
    assert talk.ask(said("tool", "found")).ids.startswith(whole)
    assert not talk.encoded.dropped and talk.encoded.kept_turns == 1
    final = said("assistant", "It is here.", reasoning_content=REASONING)
    whole = talk.answer(f"{head}{REASONING}\n</think>\n\nIt is here.", final)
    if not echoes:
        talk.messages[-1] = said("assistant", "It is here.")
    encoded = talk.ask(said("user", "Thanks."))
    if keep:
        assert encoded.ids.startswith(whole)
        assert encoded.respelled == tuple(
            f"message {i}: its thinking is kept, which the template drops" for i in (1, 3)
        )
        assert shown(talk).count(REASONING) == 2
    else:
        assert [one[:2] for one in encoded.dropped] == [(1, "thinking"), (3, "thinking")]
        assert shown(talk) == encoded.text == talk.tokenizer.apply_chat(ChatPrompt(talk.messages))
        assert REASONING not in shown(talk)
    talk.answer(f"{head}{REASONING}\n</think>\n\nGoodbye.", said("assistant", "Goodbye.", reasoning_content=REASONING))
    again = talk.ask(said("user", "Wait."))
    assert again.ids.startswith(talk.whole) == keep
    assert keep or shown(talk) == again.text


@pytest.mark.parametrize("keep", [False, True])
def test_thinking_that_a_template_empties_is_dropped_or_kept_in_its_place(folder: Path, keep: bool) -> None:
    talk = make_talk(folder, "empty thoughts", keep_thinking=keep)
    talk.ask(said("user", "Who?"))
    whole = talk.answer("<think>Hm.</think>\nthe dog", said("assistant", "the dog", reasoning_content="Hm."))
    encoded = talk.ask(said("user", "And?"))
    assert encoded.ids.startswith(whole) == keep
    assert shown(talk).count("<think>") == 1 and ("Hm." in shown(talk)) == keep
    assert [one.reason for one in encoded.dropped] == [] if keep else ["thinking"]


@pytest.mark.parametrize("keep", [False, True])
def test_an_answer_without_thoughts_gains_none_of_the_template_s_empty_ones(folder: Path, keep: bool) -> None:
    talk = make_talk(folder, "empty thoughts", keep_thinking=keep)
    for turn in range(3):
        encoded = talk.ask(said("user", "Who?"))
        assert encoded.ids.startswith(talk.whole) and encoded.kept_turns == turn and not encoded.dropped
        assert shown(talk).count("<think></think>") == 0 and encoded.text.count("<think></think>") == turn
        talk.answer(f"the dog {turn}")


@pytest.mark.parametrize("talk", ["thinking", "thinks first"], indirect=True)
def test_empty_thoughts_that_were_generated_stay(talk: Talk) -> None:
    """The template drops them, and there was nothing in them."""
    talk.ask(said("user", "Who?"))
    head = "\n" if talk.encoded.text.endswith("<think>\n") else "<think>\n\n"
    whole = talk.answer(f"{head}</think>\n\nthe dog", said("assistant", "the dog"))
    encoded = talk.ask(said("user", "And?"))
    assert encoded.ids.startswith(whole) and encoded.kept_turns == 1 and not encoded.dropped
    assert encoded.respelled == ("message 1: it has no thoughts, which the template writes in another way",)
    assert meant(shown(talk)) == meant(encoded.text)
    talk.answer("unfinished", said("assistant", "unfinished"))
    assert talk.ask(said("user", "And?")).ids.startswith(encoded.ids) == (head != "\n"), "it is in open thoughts"


@pytest.mark.parametrize("keep", [False, True])
def test_white_space_before_a_call_loses_nothing_where_calls_are_no_json(folder: Path, keep: bool) -> None:
    """And results need their calls: only the value of an argument can be marked. Thoughts go with a new question."""
    talk = make_talk(folder, "xml calls", keep_thinking=keep)
    for turn in range(2):
        talk.ask(said("user", "Find it."))
        assert talk.encoded.ids.startswith(talk.whole) == (keep or turn == 0)
        for arguments in ({"city": "Rome", "unit": "C"}, {}):
            written = "".join(f"<parameter={key}>{value}</parameter>" for key, value in arguments.items())
            message = said("assistant", "I look.", tool_calls=[call(arguments)], reasoning_content=REASONING)
            talk.answer(f"{REASONING}\n</think>\nI look.\n<function=find>{written}</function>", message)
            encoded = talk.ask(said("tool", "found", tool_call_id="abcdefghi"))
            assert encoded.ids.startswith(talk.whole)
            assert [one.reason for one in encoded.dropped] == ([] if keep or turn == 0 else ["thinking"] * 3)
        talk.answer(
            f"{REASONING}\n</think>\n\nIt is there.", said("assistant", "It is there.", reasoning_content=REASONING)
        )


@pytest.mark.parametrize("count", [1, 2])
def test_calls_are_found_where_a_template_counts_them(folder: Path, count: int) -> None:
    """Without a call the results would be written otherwise, so that only its arguments can be marked."""
    talk = make_talk(folder, "counts calls")
    for turn in range(2):
        calls = [call({"a": turn, "b": i}, f"id{turn}{i}") for i in range(count)]
        texts = [
            f'\n<tool_call>\n{{"name":"find","arguments":{{"a":{turn},"b":{i}}}}}\n</tool_call>' for i in range(count)
        ]
        talk.ask(said("user", "Find it."))
        talk.answer("I look." + "".join(texts), said("assistant", "I look.", tool_calls=calls))
        encoded = talk.ask(*[said("tool", "x", tool_call_id=c["id"]) for c in calls])
        assert encoded.ids.startswith(talk.whole) and not encoded.dropped
        assert shown(talk).count("find: x") == count * (turn + 1)
        talk.answer("the dog")


@pytest.mark.parametrize("keep", [False, True])
def test_an_empty_thought_of_the_prompt_that_the_template_drops_stays(folder: Path, keep: bool) -> None:
    """The prompt ended with one, which the history leaves out."""
    talk = make_talk(folder, "no thinking", keep_thinking=keep)
    for turn in range(3):
        encoded = talk.ask(said("user", "Who?"))
        assert encoded.ids.startswith(talk.whole) and encoded.kept_turns == turn and not encoded.dropped
        assert shown(talk).count("<think>") == turn + 1 and encoded.text.count("<think>") == 1
        talk.answer("the lazy dog")


@pytest.mark.parametrize("keep", [False, True])
def test_an_opening_that_the_template_drops(folder: Path, keep: bool) -> None:
    """It says something: it goes, and the answer keeps its ids."""
    talk = make_talk(folder, "reasons", keep_thinking=keep)
    talk.ask(said("user", "Who?"))
    whole = talk.answer("the lazy dog")
    encoded = talk.ask(said("user", "And?"))
    assert encoded.ids.startswith(whole) == keep and encoded.kept_turns == 1
    if not keep:
        assert tuple(map(str, encoded.dropped)) == ("message 1: the template drops 'These are my reasons:' before it",)
        assert shown(talk) == encoded.text


def test_openings_that_differ(folder: Path) -> None:
    """The template begins some answers with an empty thought, and none of them in the history."""
    talk = make_talk(folder, "switch", keep_thinking=True)
    for question in ("Who?", "Who now?", "And?", "And now?", "Last."):
        encoded = talk.ask(said("user", question))
        assert encoded.ids.startswith(talk.whole)
        assert shown(talk).count("<think>") == sum("now" in m["content"] for m in talk.messages)
        talk.answer(" the dog ")
        talk.messages[-1] = said("assistant", "the dog")


def test_tools_that_move_to_the_last_user_message(folder: Path) -> None:
    """Earlier history changes at each turn; the answers in it are still the generated ones."""
    talk = make_talk(folder, "moving", tools=[{"type": "function", "function": {"name": "find"}}])
    for turn, text in enumerate(("the quick fox", "the lazy dog", "again", "again")):
        encoded = talk.ask(said("user", f"Who {turn}?"))
        assert encoded.kept_turns == turn and not encoded.dropped and not encoded.respelled
        assert shown(talk) == encoded.text == talk.tokenizer.apply_chat(ChatPrompt(talk.messages, talk.tools))
        talk.answer(text)
    assert encoded.ids != talk.tokenizer.encode_bytes(encoded.text, False)


@pytest.mark.parametrize("template", ["changes", "refuses"])
def test_what_does_not_fit_is_encoded_as_text(folder: Path, template: str) -> None:
    talk = make_talk(folder, template)
    talk.ask(said("user", "Who?"))
    talk.answer(" the dog ")
    encoded = talk.ask(said("user", "And?"))
    assert encoded.kept_turns == 0 and len(encoded.dropped) == 1
    assert encoded.ids == talk.tokenizer.encode_bytes(encoded.text, False)


@pytest.mark.parametrize("talk", ["twice"], indirect=True)
def test_an_answer_that_is_written_twice(talk: Talk) -> None:
    """The first is the one that was generated, and it does not end there."""
    talk.ask(said("user", "Who?"))
    whole = talk.answer("the dog")
    encoded = talk.ask(said("user", "And?"))
    assert encoded.ids.startswith(whole[:-4]) and encoded.kept_turns == 1
    assert shown(talk) == encoded.text


@pytest.mark.parametrize("talk", ["trim"], indirect=True)
def test_thinking_between_marks_of_any_kind(talk: Talk) -> None:
    talk.ask(said("user", "Who?"))
    talk.answer(f"|analysis| {REASONING} |final| the dog", said("assistant", "the dog", reasoning_content=REASONING))
    assert [one[:2] for one in talk.ask(said("user", "And?")).dropped] == [(1, "thinking")]
    talk.answer("the fox, that is the dog", said("assistant", "the dog", reasoning_content=REASONING))
    assert [one[:2] for one in talk.ask(said("user", "And?")).dropped[1:]] == [(3, "rewritten")]


def test_an_answer_stands_where_the_text_before_it_does(talk: Talk) -> None:
    """A short answer may be found anywhere; to cut a word of another message for it would be no good."""
    talk.ask(said("user", "Say one letter."))
    talk.answer("o", end=None)
    answer = next(iter(talk.sessions._answers.values()))[0]
    text = talk.tokenizer.apply_chat(ChatPrompt(talk.messages))
    speller, prompt = talk.sessions._speller, ChatPrompt(talk.messages)
    assert speller.find(prompt, text, {1: answer}).spans[1].start == answer.offset
    answer.offset = text.index("one")
    assert speller.find(prompt, text, {1: answer}).spans[1].start == text.rindex("o<|im_end|>")


@pytest.mark.parametrize(
    ("name", "template", "end"),
    [
        ("phi-3-mini", "chat_templates/phi-3.jinja", "<|end|>"),
        ("mistral-v1", "chat_templates/mistral-instruct.jinja", "</s>"),
        ("mistral-v7", "mistral/chat_templates/v7_spm.jinja", "</s>"),
    ],
)
def test_answers_generated_as_they_are_encoded_change_nothing(
    checkpoints, shared_data: Path, name: str, template: str, end: str
) -> None:
    """What comes before and behind special tokens is encoded as in one text: spaces that are put there, or lost."""
    talk = real_talk(checkpoints, shared_data, name, template, end)
    for text in ("It is the dog.", "  No, the fox", "日本"):
        encoded = talk.ask(said("user", "Who?"))
        assert encoded.ids == talk.tokenizer.encode_bytes(encoded.text, False)
        assert not encoded.respelled and not encoded.dropped
        message = said("assistant", text)
        whole = talk.tokenizer.apply_chat(ChatPrompt([*talk.messages, message]), answer_next=False)
        ids = talk.tokenizer.encode_bytes(whole[: whole.rindex(end) + len(end)], False)
        assert ids.startswith(encoded.ids)
        talk.sessions.remember(encoded, message, ids[len(encoded.ids) :])
        talk.messages.append(message)
    assert talk.ask(said("user", "Who?")).kept_turns == 3


def test_an_only_call_may_gain_an_id_and_one_of_two_may_not(checkpoints, shared_data: Path) -> None:
    """Mistral's template writes call ids, which the model did not."""
    for count in (1, 2):
        talk = real_talk(checkpoints, shared_data, "mistral-v3", "mistral/chat_templates/v3_spm.jinja", "</s>")
        talk.ask(said("user", "Find it."))
        calls = [call('{"a": 1}', f"abcdefgh{i}") for i in range(count)]
        objects = ", ".join('{"name": "find", "arguments": {"a": 1}}' for _ in calls)
        text = f"[TOOL_CALLS] [{objects}]"
        talk.answer(text, said("assistant", None, tool_calls=calls), end="</s>")
        encoded = talk.ask(*[said("tool", "x", tool_call_id=c["id"]) for c in calls])
        assert encoded.kept_turns == (count == 1) == encoded.ids.startswith(talk.whole)
        assert len(encoded.dropped) == count - 1


def test_white_space_before_an_answer_is_that_of_its_prompt(folder: Path) -> None:
    """The template writes the last message otherwise than when more follow."""
    talk = make_talk(folder, "spaces last")
    for turn in range(4):
        encoded = talk.ask(said("user", "Who is it, and where? " * (turn % 2) + "No?"))
        assert encoded.ids.startswith(talk.whole) and encoded.kept_turns == turn and not encoded.dropped
        assert (encoded.text.count(" \n<|im_end|>"), shown(talk).count(" \n<|im_end|>")) == (2 * turn, 0)
        talk.answer(f"the dog, {turn}")
    assert encoded.respelled[0] == "message 1: the template writes white space behind it"


# ---------------------------------------------------------------- calls that a client has rewritten


CODER, GLM = "Qwen3-Coder", "GLM-4.6"
PUBLISHED = {CODER: ("<|im_end|>", ()), GLM: ("<|observation|>", ("<|user|>", "<|assistant|>", "<|system|>"))}
EDIT = {"file_path": "/w/a.py", "old_string": "dog", "new_string": "fox"}
BASH = {"command": "cd /w && ls", "description": "List"}
REWRITTEN = {
    "edit": ("Edit", EDIT, EDIT | {"replace_all": False}),
    "bash": ("Bash", BASH, BASH | {"command": "ls"}),
}
"""What Claude Code makes of its calls: (name, arguments as generated, arguments as it sends them back)."""
ISSUED = "call_" + "0123456789ab" * 2


@pytest.fixture(params=["plain", CODER, GLM])
def kept_calls(request, folder: Path, shared_data: Path, tmp_path: Path) -> tuple[str, Callable[[bool], Talk]]:
    """(template, function that makes a talk, with the option or without)."""

    def make(keep: bool) -> Talk:
        if request.param == "plain":
            return make_talk(folder, "plain", keep_calls=keep)
        end, specials = PUBLISHED[request.param]
        source = (shared_data / "chat_templates" / f"{request.param}.jinja").read_text()
        tokenizer = load_tokenizer(make_chat(tmp_path, source, (end, *specials)))
        return Talk(tokenizer, Sessions(tokenizer, keep_calls=keep))

    return request.param, make


def as_hermes(name: str, arguments: dict[str, str]) -> str:
    return f'\n<tool_call>\n{{"name": "{name}",  "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def as_coder(name: str, arguments: dict[str, str]) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def as_glm(name: str, arguments: dict[str, str]) -> str:
    pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    return f"\n<think></think>\n<tool_call>{name}\n{pairs}</tool_call>"


def called(talk: Talk, name: str, arguments: Any, call_id: str = ISSUED, template: str = "plain") -> bytes:
    """The model calls a tool in the template's format."""
    message = said("assistant", "", tool_calls=[call(json.dumps(arguments), call_id, name)])
    writes = {"plain": as_hermes, CODER: as_coder, GLM: as_glm}[template]
    return talk.answer(writes(name, arguments), message, PUBLISHED.get(template, ["<|im_end|>"])[0])


def sent_back(talk: Talk, arguments: Any, **changes: Any) -> None:
    """The client sends its last message back with other arguments, and a result."""
    function = talk.messages[-1]["tool_calls"][0]["function"]
    one = talk.messages[-1]["tool_calls"][0] | {"function": function | {"arguments": json.dumps(arguments)}}
    talk.messages[-1] = talk.messages[-1] | {"tool_calls": [one]} | changes


@pytest.mark.parametrize("rewriting", REWRITTEN)
def test_calls_with_issued_ids_are_as_generated_if_that_is_wanted(kept_calls, rewriting: str) -> None:
    name, generated, client = REWRITTEN[rewriting]
    template, make = kept_calls
    for keep in (True, False):
        talk = make(keep)
        talk.ask(said("user", "Change it."))
        for turn in range(3):
            call_id = f"call_{turn:024}"
            whole = called(talk, name, generated, call_id, template)
            sent_back(talk, client)
            encoded = talk.ask(said("tool", "done", tool_call_id=call_id))
            theirs = talk.tokenizer.apply_chat(ChatPrompt(talk.messages))
            assert encoded.ids.startswith(whole) == keep
            assert encoded.kept_turns == (turn + 1) * keep
            assert (encoded.text == theirs) == (not keep)
            assert bare(shown(talk)) == bare(encoded.text)
        marks = {"edit": "replace_all", "bash": "cd /w"}
        assert (marks[rewriting] in shown(talk)) == ((rewriting == "edit") != keep)
        notes = [
            f"message {at}: its calls are as generated: the client has changed their arguments" for at in (1, 3, 5)
        ]
        assert list(encoded.respelled) == notes * keep


@pytest.mark.parametrize(
    ("change", "namespace"),
    [
        (lambda m: m | {"content": "Other."}, HERE),
        (lambda m: m | {"tool_calls": [call("{}", ISSUED, "Write")]}, HERE),
        (lambda m: m | {"tool_calls": [call("{}", ISSUED[:-1] + "c", "Edit")]}, HERE),
        (lambda m: m | {"tool_calls": [call("{}", ISSUED, "Edit"), call("{}", ISSUED[:-1] + "c", "Edit")]}, HERE),
        (lambda m: m | {"tool_calls": [call("{}", "functions.Edit:0", "Edit")]}, HERE),
        (lambda m: m, Namespace("other")),
        (lambda m: m, Namespace("n", salt="s")),
    ],
    ids=["content", "name", "id", "number", "numbered id", "tenant", "salt"],
)
def test_only_the_same_calls_of_the_same_caller_are_as_generated(
    folder: Path, change: Any, namespace: Namespace
) -> None:
    talk = make_talk(folder, "plain", keep_calls=True)
    talk.ask(said("user", "Change it."))
    called(talk, "Edit", EDIT)
    sent_back(talk, EDIT | {"replace_all": False})
    assert copy.copy(talk).ask(said("tool", "x", tool_call_id=ISSUED)).kept_turns == 1
    talk.messages[1:] = [change(talk.messages[1]), said("tool", "x", tool_call_id=ISSUED)]
    encoded = talk.ask(namespace=namespace)
    assert encoded.kept_turns == 0
    assert encoded.text == talk.tokenizer.apply_chat(ChatPrompt(talk.messages))


def test_calls_that_another_process_has_generated_are_as_generated(folder: Path) -> None:
    """Two in one answer, of which the client changes the second."""
    one, other = (make_talk(folder, "plain", keep_calls=True) for _ in range(2))
    encoded = one.ask(said("user", "Change it."))
    calls = [call(json.dumps(EDIT), f"call_{i:024}", "Edit") for i in range(2)]
    whole = one.answer(as_hermes("Edit", EDIT) * 2, said("assistant", "", tool_calls=calls))
    key = one.sessions.remember(encoded, one.messages[-1], whole[len(encoded.ids) :])
    changed = call(json.dumps(EDIT | {"replace_all": False}), calls[1]["id"], "Edit")
    results = [said("tool", "done", tool_call_id=one["id"]) for one in calls]
    other.messages = [one.messages[0], said("assistant", "", tool_calls=[calls[0], changed])]
    assert other.sessions.answers_in(HERE, ChatPrompt(other.messages)).missing == [key]
    other.sessions.learn(HERE, key, one.sessions.export(key))
    encoded = other.ask(*results)
    assert encoded.ids.startswith(whole) and encoded.kept_turns == 1 and "replace_all" not in shown(other)


@pytest.mark.parametrize("call_id", ["functions.Edit:0", "abcdefghi"])
def test_calls_with_ids_of_the_model_are_told_apart_by_their_arguments(folder: Path, call_id: str) -> None:
    """Two answers to one question may have the same ones."""
    talk = make_talk(folder, "plain", keep_calls=True)
    first, wholes = talk.ask(said("user", "Change it.")), []
    answers = [EDIT, EDIT | {"old_string": "cat"}]
    for arguments in answers:
        talk.messages, talk.encoded = talk.messages[:1], first
        message = said("assistant", "", tool_calls=[call(json.dumps(arguments), call_id, "Edit")])
        written = {"name": "Edit", "arguments": arguments, "id": call_id}
        wholes.append(talk.answer(f"<tool_call>\n{json.dumps(written)}\n</tool_call>", message))
    for arguments, whole in zip((*answers, EDIT | {"replace_all": False}), (*wholes, None), strict=True):
        talk.messages = talk.messages[:2]
        sent_back(talk, arguments)
        encoded = talk.ask(said("tool", "x", tool_call_id=call_id))
        assert encoded.kept_turns == (whole is not None)
        assert whole is None or encoded.ids.startswith(whole)
        assert encoded.text == talk.tokenizer.apply_chat(ChatPrompt(talk.messages))


# ---------------------------------------------------------------- chains


def test_branches_do_not_mix(talk: Talk) -> None:
    """Answers to one question, of the same text or not, and answers below them."""
    talk.ask(said("user", "Who?"))
    first, trunk = talk.encoded, list(talk.messages)
    wholes = []
    for text in ("the dog", "the fox", "the lazy dog"):
        talk.messages, talk.encoded = list(trunk), first
        talk.answer(text)
        talk.ask(said("user", "And?"))
        assert talk.encoded.ids.startswith(talk.whole)
        wholes.append((list(talk.messages), talk.answer("the question")))
    for messages, whole in reversed(wholes):
        talk.messages = [*messages, said("assistant", "the question")]
        assert talk.ask(said("user", "Last.")).ids.startswith(whole)
        assert talk.encoded.kept_turns == 2
    talk.messages, talk.encoded = list(trunk), first
    latest = talk.answer("the dog")
    assert talk.ask(said("user", "And?")).ids.startswith(latest)


def test_thinking_tells_answers_of_one_text_apart(folder: Path) -> None:
    talk = make_talk(folder, "thinking", keep_thinking=True)
    talk.ask(said("user", "Who?"))
    first, wholes = talk.encoded, {}
    for thought in ("the quick fox", "the lazy dog"):
        talk.messages, talk.encoded = talk.messages[:1], first
        message = said("assistant", "ok", reasoning_content=thought)
        wholes[thought] = talk.answer(f"<think>\n{thought}\n</think>\n\nok", message)
    for thought, whole in wholes.items():
        talk.messages = [talk.messages[0], said("assistant", "ok", reasoning_content=thought)]
        assert talk.ask(said("user", "And?")).ids.startswith(whole)
    talk.messages = [talk.messages[0], said("assistant", "ok", reasoning_content="another")]
    assert talk.ask(said("user", "And?")).kept_turns == 0


@pytest.mark.parametrize(
    "other",
    [
        {"namespace": Namespace("m")},
        {"enable_thinking": False},
        {"tools": [{"type": "function", "function": {"name": "find"}}]},
        {"first": "What?"},
    ],
    ids=["namespace", "template args", "tools", "history"],
)
def test_what_answers_are_found_by(talk: Talk, other: dict[str, Any]) -> None:
    talk.ask(said("user", "Who?"))
    talk.answer("the lazy dog")
    assert talk.ask(said("user", "And?")).kept_turns == 1
    talk.tools = other.pop("tools", None)
    talk.messages[0] = said("user", other.pop("first", "Who?"))
    encoded = talk.ask(**other)
    assert encoded.kept_turns == 0
    assert encoded.ids == talk.tokenizer.encode_bytes(encoded.text, False)


def test_memory_is_bounded_and_the_latest_stay(folder: Path) -> None:
    talk = make_talk(folder, "plain", max_tokens=60)
    talk.ask(said("user", "Keep this."))
    talk.answer("the lazy dog")
    kept, size = list(talk.messages), talk.sessions.num_tokens
    for number in range(30):
        talk.messages = []
        talk.ask(said("user", f"Question {number}"))
        talk.answer("the quick fox")
        talk.messages = list(kept)
        assert talk.ask(said("user", "And?")).kept_turns == 1
        assert size < talk.sessions.num_tokens <= 60
    answers = [answer for variants in talk.sessions._answers.values() for answer in variants]
    assert talk.sessions.num_tokens == sum(len(answer.ids) for answer in answers) // 4
    talk.messages = [said("user", "Question 0"), said("assistant", "the quick fox")]
    assert talk.ask(said("user", "And?")).kept_turns == 0
    before = talk.sessions.num_tokens
    talk.answer("too long " * 60)
    assert talk.sessions.num_tokens == before


def test_short_answers_are_few(folder: Path) -> None:
    """However short they are, each costs memory of its own."""
    talk = make_talk(folder, "plain", max_tokens=100, least_tokens=20)
    for number in range(10):
        talk.messages = []
        talk.ask(said("user", f"Question {number}"))
        talk.answer("I")
        assert len(talk.sessions._answers) == min(number + 1, 5)
        assert talk.sessions.num_tokens == 20 * len(talk.sessions._answers)
    talk.messages = []
    talk.ask(said("user", "More?"))
    talk.answer("the quick fox " * 20)
    assert len(talk.sessions._answers) < 4 and talk.sessions.num_tokens <= 100
    assert Sessions(talk.tokenizer)._least_bytes == 128


def test_the_same_answer_again_takes_no_more_room(talk: Talk) -> None:
    talk.ask(said("user", "Who?"))
    first, sizes = talk.encoded, []
    for _ in range(3):
        talk.messages, talk.encoded, talk.rng = talk.messages[:1], first, random.Random(1)
        talk.answer("the lazy dog")
        sizes.append(talk.sessions.num_tokens)
    assert sizes[0] == sizes[1] == sizes[2] > 0


def test_a_partial_answer_keeps_those_before_it(talk: Talk) -> None:
    talk.ask(said("user", "Who?"))
    whole = talk.answer("the lazy dog")
    talk.ask(said("user", "And?"))
    talk.answer("The quick \n")
    messages, size = [*talk.messages[:-1], said("assistant", "The quick")], talk.sessions.num_tokens
    encoded = talk.sessions.encode_chat(HERE, ChatPrompt(messages, partial=True))
    assert encoded.ids.startswith(whole) and encoded.kept_turns == 1
    assert encoded.text.endswith("assistant\nThe quick")
    talk.sessions.remember(encoded, said("assistant", "The quick fox"), whole)
    assert talk.sessions.num_tokens == size


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        (["x"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([said("assistant", "x", tool_calls=7)], "messages[0].tool_calls"),
        ([said("assistant", 7)], "messages[0].content"),
        ([said("user", [{"type": "image_url"}])], "messages[0].content[0].type"),
        ([said("user", "\ud800")], "messages"),
        ([said("assistant", [7])], "messages[0].content[0].type"),
    ],
)
def test_bad_messages_name_the_field(talk: Talk, messages: Any, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        talk.sessions.encode_chat(HERE, ChatPrompt(messages))
    assert caught.value.field == field


def test_messages_are_left_as_they_were(folder: Path) -> None:
    talk = make_talk(folder, "thinking")
    talk.ask(said("user", "Who?"))
    talk.answer("<think>\nhm\n</think>\n\nok", said("assistant", "ok", reasoning_content="hm"))
    messages = [talk.messages[0], said("assistant", "ok", tool_calls=None), said("user", "And?")]
    before = copy.deepcopy(messages)
    talk.sessions.encode_chat(HERE, ChatPrompt(messages))
    assert messages == before


def test_threads_may_share_it(folder: Path) -> None:
    talk = make_talk(folder, "plain", max_tokens=2000)

    def run(seed: int) -> int:
        own, kept = Talk(talk.tokenizer, talk.sessions, seed=seed), 0
        for turn in range(12):
            own.ask(said("user", f"Question {seed % 3} {turn}"))
            kept += own.encoded.kept_turns
            assert shown(own) == own.encoded.text
            own.answer(f"the answer {turn}")
        return kept

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(run, range(12))) > 100
    assert talk.sessions.num_tokens == sum(
        len(answer.ids) // 4 for variants in talk.sessions._answers.values() for answer in variants
    )


async def _served(talk: Talk, prompts: list[ChatPrompt]) -> list[Encoded]:
    with TextService(talk.tokenizer) as service:
        return [await service.encode_chat(talk.sessions, HERE, prompt) for prompt in prompts]


def test_the_service_gives_the_same(talk: Talk) -> None:
    import asyncio

    talk.ask(said("user", "Who?"))
    talk.answer("the lazy dog")
    messages = [*talk.messages, said("user", "More.")]
    prompts = [ChatPrompt(messages), ChatPrompt([*messages[:2], said("user", "long " * 2000)])]
    prompts.append(ChatPrompt([*messages, said("assistant", "x"), said("user", "y")] * 30))
    for prompt, encoded in zip(prompts, asyncio.run(_served(talk, prompts)), strict=True):
        assert encoded == talk.sessions.encode_chat(HERE, prompt)
        assert encoded.kept_turns == 1


NASTY = (
    "o",
    " ",
    "\n",
    "ok",
    "the dog",
    "<|im_start|>assistant\n",
    "<|im_end|>",
    "</think>",
    "<think>\n",
    "{",
    '{"a": 1}',
    "é",
)


def meant(text: str) -> str:
    """A text without white space and empty thoughts."""
    return bare(text).replace("<think></think>", "")


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_means_what_the_template_makes_of_it(folder: Path, template: str) -> None:
    """Whatever was generated, by whom, and however it comes back: but for white space, and empty thoughts, the text is
    the template's."""
    talk, kept = make_talk(folder, template), 0
    for seed in range(40):
        rng = random.Random(seed)
        talk.messages = []
        for _ in range(4):
            talk.ask(*[said("user", "".join(rng.choices(NASTY, k=3))) for _ in range(rng.randint(0, 2) or 1)])
            assert meant(shown(talk)) == meant(talk.encoded.text)
            kept += talk.encoded.kept_turns
            content = "".join(rng.choices(NASTY, k=rng.randrange(4)))
            thought = rng.choice((None, "the dog", "o"))
            head = f"<think>\n{thought}\n</think>\n\n" if thought else ""
            message = said("assistant", content) | ({"reasoning_content": thought} if thought else {})
            talk.answer(head + content, message, rng.choice(("<|im_end|>", "<|im_end|>", "<|endoftext|>", None)))
            talk.messages[-1] = rng.choice((message, said("assistant", content.strip())))
    assert kept > 20 or template in ("changes", "refuses")


# ---------------------------------------------------------------- texts compared


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a  b\n", "a b", True),
        ('x {"a": 1, "b": [2.0]} y', 'x{"b":[2],"a":1}y', True),
        ('{"a": "x  y"}', '{"a": "x y"}', False),
        ('{"a": "\\u00e9"}', '{"a": "é"}', True),
        ('{"id": "i", "a": 1}', '{"a": 1}', True),
        ('{"id": "j", "a": 1}', '{"a": 1}', False),
        ("{not json} {", "{not json}{", True),
        ('{"a": 1.5}', '{"a": 1.4}', False),
        ("{" * 5000, "{" * 5000 + " ", True),
        ('{"a":' * 5000, '{"a":' * 5000, True),
    ],
)
def test_texts_are_compared_by_what_they_say(one: str, other: str, same: bool) -> None:
    assert (bare(one, ("i",)) == bare(other, ("i",))) == same


def test_keys_are_of_all_messages() -> None:
    chat = [said("user", "a"), said("assistant", "b"), said("user", "c")]
    keys = keys_of(HERE, ChatPrompt(chat))
    assert len(set(keys)) == 4
    assert keys_of(HERE, ChatPrompt(chat[:2])) == keys[:3]
    assert keys_of(HERE, ChatPrompt([said("user", "ab"), said("assistant", "")]))[2] != keys[2]
    assert keys_of(HERE, ChatPrompt([said("assistant", "a"), *chat[1:]]))[3] != keys[3]


# ---------------------------------------------------------------- recorded conversations


def real_talk(checkpoints, shared_data: Path, name: str, template: str, end: str, **more: Any) -> Talk:
    tokenizer = chat_tokenizer(checkpoints, shared_data, name, template, end)
    return Talk(tokenizer, Sessions(tokenizer), **more)


@cache
def chat_tokenizer(checkpoints, shared_data: Path, name: str, template: str, end: str) -> Tokenizer:
    made = checkpoints.tokenizer(name)
    source = (shared_data / "tokenizers" / template.removeprefix("raw ")).read_text(encoding="utf-8")
    if template.startswith("chat_templates/") and "qwen" not in template:
        source = source.replace("    ", "").replace("\n", "")  # as their authors say
    templates = ChatTemplates({"default": source}, SPECIAL | {"eos_token": end})
    return Tokenizer(made._backend, templates, made.bos_id, {made.token_id(end)})


ROWS = {"tau_bench": 3, "tau2_bench": 3, "lmcache_agent_trace": 12, "mint_bench": 60}
CHATML, QWEN = "chat_templates/chatml.jinja", "chat_templates/qwen2.5-instruct.jinja"
MISTRAL = "mistral/chat_templates/v3_spm.jinja"
REPLAYS = [
    ("tau_bench", "made", QWEN, "<|im_end|>", False),
    ("tau_bench", "mistral-v3", MISTRAL, "</s>", True),
    ("tau2_bench", "made", QWEN, "<|im_end|>", False),
    ("tau2_bench", "mistral-v3", MISTRAL, "</s>", True),
    ("lmcache_agent_trace", "made", CHATML, "<|im_end|>", False),
    ("lmcache_agent_trace", "made", "raw " + CHATML, "<|im_end|>", False),
    ("lmcache_agent_trace", "phi-3-mini", "chat_templates/phi-3.jinja", "<|end|>", False),
    ("mint_bench", "made", CHATML, "<|im_end|>", False),
    ("mint_bench", "mistral-v1", "chat_templates/llama-2-chat.jinja", "</s>", False),
    ("mint_bench", "mistral-v1", "chat_templates/vicuna.jinja", "</s>", False),
    ("mint_bench", "mistral-v7", "mistral/chat_templates/v7_spm.jinja", "</s>", False),
]


@pytest.mark.parametrize(("name", "model", "template", "end", "moves"), REPLAYS)
def test_recorded_conversations_hit_all_but_what_is_new(
    checkpoints, shared_data: Path, name: str, model: str, template: str, end: str, moves: bool
) -> None:
    """Recorded answers, generated in odd pieces and sent back by careless clients: each prompt begins with all of the
    prompt before it and its answer, so that a cache that forgets nothing misses what is new and nothing else.
    `moves`: the template moves tools to the latest user message, which what is cached cannot follow."""
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    turns = 0
    for chat in islice(chats(shared_data, name, ROWS[name]), 0, None, 6 if name == "mint_bench" else 1):
        talk = real_talk(
            checkpoints, shared_data, model, template, end, seed=turns, tools=tools if name.startswith("tau") else None
        )
        for message in chat:
            if message["role"] != "assistant":
                talk.messages.append(message)
                continue
            encoded = talk.ask()
            assert encoded.text == talk.tokenizer.apply_chat(ChatPrompt(talk.messages, talk.tools))
            assert encoded.kept_turns == sum(m["role"] == "assistant" for m in talk.messages)
            assert not encoded.dropped
            check_meaning(talk)
            if talk.whole and not (moves and talk.messages[-1]["role"] == "user"):
                turns += 1
                assert encoded.ids.startswith(talk.whole)
            talk.answer(as_generated(talk, message, end), message, end)
            talk.messages[-1] = client_echo(message, talk.rng)
    assert turns >= 10


def check_meaning(talk: Talk) -> None:
    """The ids say what the template does."""
    assert bare(shown(talk)) == bare(talk.tokenizer.decode(talk.tokenizer.encode(talk.encoded.text, False), False))


def as_generated(talk: Talk, message: dict[str, Any], end: str) -> str:
    """What a model would have written for this answer: as the template writes it, and JSON a little otherwise."""
    prompt = ChatPrompt([*talk.messages, message], talk.tools)
    text = talk.tokenizer.apply_chat(prompt, answer_next=False)
    if not text.startswith(talk.encoded.text):  # a template that begins answers with more than it writes later
        return message["content"]
    text = text[len(talk.encoded.text) :]
    text = text[: text.rindex(end)]
    return text.replace('", "arguments"', '",  "arguments"') if message.get("tool_calls") else text
