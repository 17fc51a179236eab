"""Finds the prompts of all answers in a list of messages with only a few renderings of the chat template.

    marked    <user>hi</user><assistant>(0)Hello!</assistant><user>more</user><assistant>(1)Well.</assistant>
    text      <user>hi</user><assistant>Hello!</assistant><user>more</user><assistant>Well.</assistant>
    ends                                ^                                             ^

Rendering the chat for each answer would take time quadratic in the length of the list.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

from radixrt.messages import (
    AssistantTurnEnd,
    AssistantTurnStart,
    ChatMessage,
    ChatPrompt,
    ChoiceSegment,
    GeneratedSegment,
    MessageSegment,
    Segment,
    TextSegment,
)
from radixrt.tokens import TextService
from radixrt.tokens.errors import FieldError

MIN_ANSWERS = 8
"""The fewest answers in a list for which a bulk render costs less than rendering the chat for each."""
_WORD = re.compile(r"\S")


Tools = list[dict[str, Any]] | None


def fields_of(message: MessageSegment) -> dict[str, Any]:
    """A message as templates get it."""
    fields = {"role": message.role, "content": message.content}
    if message.tool_call_id:
        fields |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return fields


class BulkRender(NamedTuple):
    """`text` is the chat as rendered for the last answer of a list. The prompt of the n-th answer is text[:ends[n]]."""

    text: str
    ends: list[int]


class _Answer(NamedTuple):
    """The place of an answer: in the chat's message of index `message`, after `offset` characters of that."""

    message: int
    offset: int


def as_chat(messages: Sequence[dict[str, Any]], open: str, tools: Tools = None) -> ChatPrompt:
    """A prompt of these messages, and of a partial one of the assistant if `open` is not empty."""
    partial = [{"role": "assistant", "content": open}] if open else []
    return ChatPrompt([*messages, *partial], tools, partial=bool(open))


def bulk_render(
    service: TextService,
    messages: Sequence[dict[str, Any]],
    open: str | None,
    transcript: Sequence[Segment],
    tools: Tools = None,
) -> BulkRender | None:
    """The bulk render of a list `transcript` that continues these messages, and the `open` text of the next one. None
    if there are few answers, if the list is not valid, if it has calls or other tools, or if the template does not
    write the same text for a prefix of the list as it does in the whole: because it looks at what follows, drops
    thinking, or trims a partial message.

    The latter is detected by marks that do not come back where they were put, and by rendering some of the prompts
    alone for comparison: the first, one in the middle, the last but one, the last of an earlier message and the one
    after it, the last before the last user message, the first that begins a message, and the first that continues after
    white space alone, after white space behind words, and after a word. A template that makes other distinctions
    between messages is not detected. Then the prompts are still correct, but divided into tokens at other places.
    """
    if sum(isinstance(one, GeneratedSegment | ChoiceSegment) for one in transcript) < MIN_ANSWERS:
        return None
    chat = _Chat.of(messages, open, transcript, tools)
    if chat is None:
        return None
    try:
        text = service.render(chat.until(chat.answers[-1]))
        ends = chat.ends(service, text)
        if not ends:
            return None
        same = (service.render(chat.until(chat.answers[at])) == text[: ends[at]] for at in chat.samples())
        return BulkRender(text, ends) if all(same) else None
    except FieldError:
        return None


class _Chat(NamedTuple):
    """A list as messages, the last of which may be partial, and the places of answers in it."""

    messages: list[dict[str, Any]]
    answers: list[_Answer]
    tools: Tools

    @classmethod
    def of(
        cls, messages: Sequence[dict[str, Any]], open: str | None, transcript: Sequence[Segment], tools: Tools
    ) -> Self | None:
        """None if the list is not valid, or has calls or other tools."""
        messages, answers = list(messages), []
        spoken = None if open is None else [open]
        chars = len(open or "")
        for one in transcript:
            match one:
                case GeneratedSegment(message=ChatMessage(tool_calls=[_, *_])):
                    return None
                case MessageSegment() if spoken is None:
                    messages.append(fields_of(one))
                case AssistantTurnStart() if spoken is None:
                    spoken, chars = [], 0
                case AssistantTurnEnd() if spoken is not None:
                    messages.append({"role": "assistant", "content": "".join(spoken)})
                    spoken = None
                case TextSegment(text=text) | ChoiceSegment(text=text) | GeneratedSegment(text=text) if (
                    spoken is not None
                ):
                    if not isinstance(one, TextSegment):
                        answers.append(_Answer(len(messages), chars))
                    spoken.append(text)
                    chars += len(text)
                case _:
                    return None
        if spoken is not None:
            messages.append({"role": "assistant", "content": "".join(spoken)})
        return cls(messages, answers, tools)

    def until(self, answer: _Answer) -> ChatPrompt:
        """The prompt of an answer."""
        return as_chat(self.messages[: answer.message], self._before(answer), self.tools)

    def _before(self, answer: _Answer) -> str:
        """The text before an answer in its message."""
        return self.messages[answer.message]["content"][: answer.offset] if answer.offset else ""

    def ends(self, service: TextService, text: str) -> list[int] | None:
        """Where the answers' prompts end in `text`, the prompt of the last one; found by rendering marks in their
        places. None if the template changes anything else because of the marks."""
        nonce, last = secrets.token_hex(8), self.answers[-1]
        marked = self.messages[: last.message]
        goes_on = self._before(last)
        numbered = enumerate(self.answers[:-1])
        for message, answers in itertools.groupby(numbered, lambda one: one[1].message):
            marks = [(answer.offset, f"turn{nonce}x{number}x") for number, answer in answers]
            if message == last.message:
                goes_on = _with_marks(goes_on, marks)
            else:
                marked[message] = marked[message] | {"content": _with_marks(marked[message]["content"], marks)}
        first, *rest = re.split(f"turn{nonce}x([0-9]+)x", service.render(as_chat(marked, goes_on, self.tools)))
        numbers, pieces = list(map(int, rest[::2])), [first, *rest[1::2]]
        if numbers != list(range(len(self.answers) - 1)) or "".join(pieces) != text:
            return None
        return list(itertools.accumulate(map(len, pieces)))

    def samples(self) -> set[int]:
        """Indices of the answers whose prompts are rendered alone."""
        *others, last = self.answers
        roles = [message["role"] for message in self.messages[: last.message]]
        user = len(roles) - 1 - roles[::-1].index("user") if "user" in roles else 0
        begins, spoken = (sum(one.message < message for one in others) for message in (last.message, user))
        kinds = {self._kind(one): at for at, one in reversed(list(enumerate(others)))}
        most = len(others) - 1
        return {0, len(others) // 2, most, *kinds.values(), min(begins, most), max(0, begins - 1), max(0, spoken - 1)}

    def _kind(self, answer: _Answer) -> tuple[bool, ...]:
        """(whether its message has anything but white space before it, whether white space is right before it); () if
        it begins its message."""
        if not answer.offset:
            return ()
        content = self.messages[answer.message]["content"]
        return _WORD.search(content, 0, answer.offset) is not None, content[answer.offset - 1].isspace()


def _with_marks(content: str, marks: Iterable[tuple[int, str]]) -> str:
    """Insert marks into a text, each at its offset."""
    parts, at = [], 0
    for offset, mark in marks:
        parts += [content[at:offset], mark]
        at = offset
    return "".join([*parts, content[at:]])
