"""What a chat template writes before each answer of a list, from a few renderings of it.

    marked    <user>hi</user><assistant>(0)Hello!</assistant><user>more</user><assistant>(1)Well.</assistant>
    text      <user>hi</user><assistant>Hello!</assistant><user>more</user><assistant>Well.</assistant>
    ends                                ^                                             ^

To render the chat anew for each answer takes the square of the list's length.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

from radixrt.messages import ChatPrompt, Said, SaidAnswer, SaidChoice, SaidMessage, SaidText, TurnBegins, TurnEnds
from radixrt.router.errors import FieldError
from radixrt.router.tokens import TextService

LEAST_ANSWERS = 8
"""Of a list, for which an outline costs less than rendering the chat for each."""
_WORD = re.compile(r"\S")


class Outline(NamedTuple):
    """`text` is the chat as it is rendered for the last answer of a list; for all of them it is the beginnings of that
    which end at `ends`."""

    text: str
    ends: list[int]


class _Answer(NamedTuple):
    """It begins in the chat's `message`th message, after so many characters of that."""

    message: int
    offset: int


def as_chat(messages: Sequence[dict[str, Any]], open: str) -> ChatPrompt:
    """These messages, and one of the assistant that goes on if anything was said of it."""
    goes_on = [{"role": "assistant", "content": open}] if open else []
    return ChatPrompt([*messages, *goes_on], partial=bool(open))


def outline(
    service: TextService, messages: Sequence[dict[str, Any]], open: str | None, said: Sequence[Said]
) -> Outline | None:
    """Of a list that goes on from these messages and from what is open of the next one. None where there is little to
    win, where the list is not right, and where the template does not leave what it wrote: it looks at what follows,
    drops thinking, or trims what goes on.

    That it does is seen by marks that do not come back where they were put, and by comparing with some of the prompts
    as they are rendered alone: the first, one in the middle, the last but one, the last of an earlier message and the
    one behind it, the last before the user has spoken last, the first that begins a message, and the first that goes on
    after white space alone, after white space behind words, and after a word. A template that tells other messages
    apart by what they say is not found out: then what it writes is right, but cut into tokens in other places.
    """
    if sum(isinstance(one, SaidAnswer | SaidChoice) for one in said) < LEAST_ANSWERS:
        return None
    chat = _Chat.of(messages, open, said)
    if chat is None:
        return None
    try:
        text = service.render(chat.until(chat.answers[-1]))
        ends = chat.ends(service, text)
        samples = chat.samples() if ends else ()
        same = (service.render(chat.until(chat.answers[at])) == text[: ends[at]] for at in samples)
        return Outline(text, ends) if ends and all(same) else None
    except FieldError:
        return None


class _Chat(NamedTuple):
    """A list as messages, the last of which may go on, and where answers begin in it."""

    messages: list[dict[str, Any]]
    answers: list[_Answer]

    @classmethod
    def of(cls, messages: Sequence[dict[str, Any]], open: str | None, said: Sequence[Said]) -> Self | None:
        """None for a list that is not right."""
        messages, answers = list(messages), []
        spoken = None if open is None else [open]
        chars = len(open or "")
        for one in said:
            match one:
                case SaidMessage(role=role, content=content) if spoken is None:
                    messages.append({"role": role, "content": content})
                case TurnBegins() if spoken is None:
                    spoken, chars = [], 0
                case TurnEnds() if spoken is not None:
                    messages.append({"role": "assistant", "content": "".join(spoken)})
                    spoken = None
                case SaidText(text=text) | SaidChoice(text=text) | SaidAnswer(text=text) if spoken is not None:
                    if not isinstance(one, SaidText):
                        answers.append(_Answer(len(messages), chars))
                    spoken.append(text)
                    chars += len(text)
                case _:
                    return None
        if spoken is not None:
            messages.append({"role": "assistant", "content": "".join(spoken)})
        return cls(messages, answers)

    def until(self, answer: _Answer) -> ChatPrompt:
        """The prompt of an answer."""
        return as_chat(self.messages[: answer.message], self._before(answer))

    def _before(self, answer: _Answer) -> str:
        """What its message said before it."""
        return self.messages[answer.message]["content"][: answer.offset] if answer.offset else ""

    def ends(self, service: TextService, text: str) -> list[int] | None:
        """Where the prompts end in that of the last answer, if the template leaves marks there."""
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
        first, *rest = re.split(f"turn{nonce}x([0-9]+)x", service.render(as_chat(marked, goes_on)))
        numbers, pieces = list(map(int, rest[::2])), [first, *rest[1::2]]
        if numbers != list(range(len(self.answers) - 1)) or "".join(pieces) != text:
            return None
        return list(itertools.accumulate(map(len, pieces)))

    def samples(self) -> set[int]:
        """Answers whose prompts are rendered alone."""
        *others, last = self.answers
        roles = [message["role"] for message in self.messages[: last.message]]
        user = len(roles) - 1 - roles[::-1].index("user") if "user" in roles else 0
        begins, spoken = (sum(one.message < message for one in others) for message in (last.message, user))
        kinds = {self._kind(one): at for at, one in reversed(list(enumerate(others)))}
        most = len(others) - 1
        return {0, len(others) // 2, most, *kinds.values(), min(begins, most), max(0, begins - 1), max(0, spoken - 1)}

    def _kind(self, answer: _Answer) -> tuple[bool, ...]:
        """Whether its message says anything before it but white space, and white space last; () if nothing at all."""
        if not answer.offset:
            return ()
        content = self.messages[answer.message]["content"]
        return _WORD.search(content, 0, answer.offset) is not None, content[answer.offset - 1].isspace()


def _with_marks(content: str, marks: Iterable[tuple[int, str]]) -> str:
    """A text with marks put into it, each before the character of its offset."""
    parts, at = [], 0
    for offset, mark in marks:
        parts += [content[at:offset], mark]
        at = offset
    return "".join([*parts, content[at:]])
