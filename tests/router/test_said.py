"""What a program says, put together by the router: id by id what the slow reference makes of it, however it is cut."""

from __future__ import annotations

import asyncio
import functools
import time
from array import array
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.messages import (
    NO_TENANT,
    AssistantTurnEnd,
    AssistantTurnStart,
    ChatPrompt,
    ChoiceSegment,
    GeneratedSegment,
    MessageSegment,
    Sampling,
    TextSegment,
)
from radixrt.router.programs import batch_render
from radixrt.router.programs.prompt_builder import NOTHING, PromptBuilder, ids_of_text
from radixrt.tokens import TextService, load_tokenizer
from radixrt.tokens.errors import FieldError, Room
from radixrt.tokens.turns import Steps, finished
from tests.checkpoints import make_tokenizer
from tests.lang.oracle import Oracle

END = 2


class Rewriting(TextService):
    """With a template that trims what was said, and drops all but the last word of complete answers."""

    def render(self, prompt: ChatPrompt) -> str:
        *before, last = prompt.messages
        said = "".join(self._turn(message) for message in before)
        if prompt.partial:
            return f"{said}<{last['role']}>{last['content']}"
        return f"{said}{self._turn(last)}<assistant>"

    def _turn(self, message: dict) -> str:
        words = message["content"].split(" ")
        return f"<{message['role']}>{words[-1] if message['role'] == 'assistant' else message['content'].strip()}"


class Changing(TextService):
    """With a template that writes a message in another way for those that follow. Messages end with a token of their
    own, as those of models do."""

    def render(self, prompt: ChatPrompt) -> str:
        users = [at for at, message in enumerate(prompt.messages) if message["role"] == "user"]
        said = "".join(
            f"<{message['role']}>{self.written(prompt.messages, at, max(users, default=-1))}<|im_end|>"
            for at, message in enumerate(prompt.messages)
        )
        return said.removesuffix("<|im_end|>") if prompt.partial else f"{said}<assistant>"

    def written(self, messages: list[dict], at: int, user: int) -> str:
        """The content of a message; the user has spoken last in the one at `user`."""
        raise NotImplementedError


class Trimming(Changing):
    """It trims all of them."""

    def written(self, messages: list[dict], at: int, user: int) -> str:
        return messages[at]["content"].strip()


class Moving(Changing):
    """It writes the first one before the user's last one."""

    def written(self, messages: list[dict], at: int, user: int) -> str:
        return (messages[0]["content"] if at == user else "") + messages[at]["content"]


class Dropping(Changing):
    """It drops what was said up to a mark, once the user has spoken again."""

    def written(self, messages: list[dict], at: int, user: int) -> str:
        said = messages[at]["content"]
        return said.split("Thought:")[-1] if at < user else said


class Marking(TextService):
    """With a tokenizer that begins a text with a token, and with another one if it is told to."""

    def _text_steps(self, text: str, special: bool, *others: Any) -> Steps[bytes]:
        ids = yield from super()._text_steps(text, special, *others)
        return array("i", [int(special)]).tobytes() + ids


class Direct:
    """What the reference asks a client."""

    def __init__(self, text: TextService) -> None:
        self._text = text

    async def render(self, prompt: ChatPrompt) -> str:
        return self._text.render(prompt)

    async def detokenize(self, ids: bytes) -> str:
        return self._text.decode_now(ids)


@functools.cache
def services(folder: str) -> list[TextService]:
    tokenizer = load_tokenizer(folder, "")
    kinds = (TextService, Rewriting, Marking, Trimming, Moving, Dropping)
    return [kind(tokenizer) for kind in kinds]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


TEXT = st.sampled_from(
    ["The dog is help", "ful", " and", " ", "é", "🙂 Thought:", "<|im_end|>\n", "a", " the answer again", "\n"]
)
CUT = st.tuples(st.integers(0, 30), st.integers(1, 3), st.booleans())
ANSWER = st.tuples(
    st.lists(st.integers(3, 511), min_size=1, max_size=8), st.sampled_from(["length", "token", "named", "string"]), CUT
)
STEP = st.one_of(st.tuples(st.just("say"), TEXT), st.tuples(st.just("gen"), ANSWER), st.tuples(st.just("choose"), TEXT))
TURN = st.tuples(st.sampled_from(["user", "system", "tool"]), TEXT, st.lists(STEP, max_size=4))


def answer_of(text: TextService, ids: list[int], kind: str, cut: tuple[int, int, bool]) -> GeneratedSegment:
    """An answer as a router sends it: it ended by length, by a token, or by a string in the middle of it."""
    raw, said = array("i", ids).tobytes(), text.decode_now(array("i", ids).tobytes())
    if kind == "length" or (kind == "string" and not said):
        return GeneratedSegment(raw, said, None, Sampling())
    if kind != "string":
        named = kind == "named"
        end = array("i", [END]).tobytes()
        sampling = Sampling(stop_token_ids=(END,), include_stop=named)
        return GeneratedSegment(raw + end, text.decode_now(raw + end) if named else said, END, sampling)
    at, length, include = cut
    at %= len(said)
    stop = said[at : at + length]
    at = said.index(stop)
    # As tokens come: those that hold the stop string, and none after them.
    kept = (
        next(n for n in range(1, len(ids) + 1) if stop in text.decode_now(raw[: 4 * n]))
        if "�" not in stop
        else len(ids)
    )
    shown = said[: at + len(stop) * include]
    return GeneratedSegment(raw[: 4 * kept], shown, stop, Sampling(stop=(stop,), include_stop=include))


class Teller:
    """Says the same to drafts that follow a state each, to one that is told everything, and to the reference."""

    def __init__(self, text: TextService, cuts: list[bool]) -> None:
        self.text, self.cuts = text, cuts
        self.state, self.new, self.all = NOTHING, [], []

    def say(self, *said: object) -> None:
        self.new += said
        self.all += said

    def cut(self) -> None:
        """Keep what was said so far as a state, sometimes, as a fork does."""
        if self.cuts and self.cuts.pop():
            builder = PromptBuilder(self.state, self.text)
            builder.add(self.new)
            self.state, self.new = builder.state(), []

    def ask(self) -> None:
        """All three make the same prompt."""
        builder, whole = PromptBuilder(self.state, self.text), PromptBuilder(NOTHING, self.text)
        builder.add(self.new)
        whole.add(self.all)
        oracle = asyncio.run(self.prompt_of_oracle())
        if not oracle.parts:
            with pytest.raises(FieldError, match="prompt is empty"):
                builder.prompt()
            return
        ids = builder.prompt()
        assert ids == self.text.encode_now(oracle) == whole.prompt()
        assert PromptBuilder(builder.state(), self.text).prompt() == ids
        self.state, self.new, self.is_prompt = builder.state(NO_TENANT), [], ids

    async def prompt_of_oracle(self):
        client = Direct(self.text)
        return await (await Oracle.of(client, self.all)).prompt(client)

    def step(self, kind: str, what) -> None:
        self.cut()
        if kind == "say":
            self.say(TextSegment(what))
            return
        self.ask()
        if not self.state.parts:
            return
        if kind == "choose":
            self.say(ChoiceSegment(what))
            return
        answer = answer_of(self.text, *what)
        self.state = PromptBuilder(self.state, self.text).state(NO_TENANT, answer)
        self.all.append(answer)
        assert self.state.ids == self.is_prompt + answer.ids


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_program_makes_the_prompts_of_the_reference(folder, data):
    text = services(folder)[2]
    teller = Teller(text, data.draw(st.lists(st.booleans(), max_size=12)))
    for kind, what in data.draw(st.lists(STEP, max_size=9)):
        teller.step(kind, what)
    teller.ask()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_chat_makes_the_prompts_of_the_reference(folder, data):
    """Also where the template rewrites what was said, and with bulk renders of any list."""
    text = data.draw(st.sampled_from(services(folder)))
    with mock.patch.object(batch_render, "MIN_ANSWERS", data.draw(st.sampled_from([1, 8]))):
        teller = Teller(text, data.draw(st.lists(st.booleans(), max_size=12)))
        for role, content, steps in data.draw(st.lists(TURN, min_size=1, max_size=4)):
            teller.say(MessageSegment(role, content))
            teller.cut()
            teller.say(AssistantTurnStart())
            for kind, what in steps:
                teller.step(kind, what)
            teller.ask()
            teller.say(AssistantTurnEnd())


@pytest.mark.parametrize("shape", ["turns", "one turn"])
def test_what_is_said_takes_as_long_as_it_is(folder, shape):
    """Characters that the template writes for a list, and parts that are looked at, double with it. It is rendered ten
    times at most, whatever its length."""
    rendered, looked = {}, {}

    class Counting(TextService):
        def render(self, prompt: ChatPrompt) -> str:
            text = super().render(prompt)
            rendered.setdefault(count, []).append(len(text))
            return Watched(text)

    class Watched(str):
        def startswith(self, prefix: str, *at: int) -> bool:
            looked[count] = looked.get(count, 0) + 1
            return super().startswith(prefix, *at)

    text = Counting(services(folder)[0].tokenizer)
    for count in (100, 200):
        said = [MessageSegment("system", "Be brief."), *([AssistantTurnStart()] if shape == "one turn" else [])]
        for number in range(count):
            asked, answered = f"What is {number}?", f"It is {number}."
            ids = array("i", text.tokenizer.encode_continuation(answered)).tobytes()
            answer = GeneratedSegment(ids, answered, None, Sampling())
            said += (
                [TextSegment(asked), answer]
                if shape == "one turn"
                else [MessageSegment("user", asked), AssistantTurnStart(), answer, AssistantTurnEnd()]
            )
        said += [] if shape == "one turn" else [MessageSegment("user", "Well?"), AssistantTurnStart()]
        builder = PromptBuilder(NOTHING, text)
        builder.add(said)
        prompt = builder.prompt()
        assert all(one.ids in prompt for one in said if isinstance(one, GeneratedSegment))
        assert len(rendered[count]) <= 10 and looked[count] < 8 * count
    assert sum(rendered[200]) < 2.2 * sum(rendered[100]) and looked[200] < 2.2 * looked[100]
    state, turns = NOTHING, 0
    for at, one in enumerate(said):  # the same, answer by answer
        if isinstance(one, GeneratedSegment):
            single = PromptBuilder(state, services(folder)[0])
            single.add(said[turns:at])
            single.prompt()
            state, turns = single.state(NO_TENANT, one), at + 1
    single = PromptBuilder(state, services(folder)[0])
    single.add(said[turns:])
    assert single.prompt() == prompt


def test_what_was_generated_keeps_its_ids_where_the_template_leaves_it(folder):
    plain, rewriting, *_ = services(folder)
    ids = array("i", [70, 71, 300]).tobytes()
    for text, kept in ((plain, True), (rewriting, " " not in plain.decode_now(ids))):
        builder = PromptBuilder(NOTHING, text)
        builder.add([MessageSegment("user", "hi"), AssistantTurnStart()])
        builder.prompt()
        builder = PromptBuilder(
            builder.state(NO_TENANT, GeneratedSegment(ids, text.decode_now(ids), None, Sampling())), text
        )
        builder.add([AssistantTurnEnd(), MessageSegment("user", "more"), AssistantTurnStart()])
        assert (ids in builder.prompt()) == kept


@pytest.mark.parametrize(
    "said, field",
    [
        ([TextSegment("x"), MessageSegment("user", "x")], "[1]"),
        ([TextSegment("x"), AssistantTurnStart()], "[1]"),
        ([MessageSegment("user", "x"), TextSegment("x")], "[1]"),
        ([MessageSegment("user", "x"), AssistantTurnEnd()], "[1]"),
        ([AssistantTurnEnd()], "[0]"),
        ([AssistantTurnStart(), AssistantTurnStart()], "[1]"),
        ([AssistantTurnStart(), MessageSegment("user", "x")], "[1]"),
        ([MessageSegment("user", "x"), GeneratedSegment(b"\5\0\0\0", "x", None, Sampling())], "[1]"),
        ([TextSegment("x"), GeneratedSegment(b"\5\0\0", "x", None, Sampling())], "[1]"),
        ([MessageSegment("user", "x")], ""),
    ],
)
def test_what_cannot_be_said(folder, said, field):
    with pytest.raises(FieldError) as caught:
        builder = PromptBuilder(NOTHING, services(folder)[0])
        builder.add(said)
        builder.prompt()
    assert caught.value.field == f"prompt.said{field}" and str(caught.value).startswith(caught.value.field)


def test_the_stop_token_is_said_only_if_the_caller_asked_for_it(folder):
    text, ids = services(folder)[0], array("i", [70, 71, END]).tobytes()
    for sampling, kept in (
        (Sampling(), 2),
        (Sampling(stop_token_ids=(END,)), 2),
        (Sampling(include_stop=True), 2),
        (Sampling(stop_token_ids=(END,), include_stop=True), 3),
    ):
        assert ids_of_text(text, ids, "xy", END, sampling) == (ids[: 4 * kept], 2)
    assert ids_of_text(text, ids, "xy", None, Sampling()) == (ids, 2)


def test_much_that_is_said_takes_short_steps(folder):
    """Also many texts, each of which is short."""
    text = services(folder)[0]
    said = [TextSegment("the quick brown fox jumps over " * 400)] * 800
    builder = PromptBuilder(NOTHING, text)
    began = time.thread_time()
    finished(builder.add_steps(said))
    assert time.thread_time() - began < 0.5, "not quadratic"
    with pytest.raises(FieldError, match="too long"):
        finished(builder.prompt_steps(Room(1000)))
    assert time.thread_time() - began < 1

    said = [TextSegment("the quick brown fox jumps over " * 4000), GeneratedSegment(b"", "", None, Sampling())] * 2
    builder = PromptBuilder(NOTHING, text)
    steps = [*builder.add_steps(said), *builder.prompt_steps()]
    assert len(steps) > 4
    whole = PromptBuilder(NOTHING, text)
    whole.add(said)
    assert builder.prompt() == whole.prompt()
