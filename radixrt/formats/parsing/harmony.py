"""Answers as gpt-oss writes them: messages in channels (OpenAI's Harmony format); a call is a message as well.

    <|channel|>analysis<|message|>Reasoning.<|end|><|start|>assistant
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    <|channel|>final<|message|>Content.<|return|>

A prompt ends with the first <|start|>assistant. The recipient may also be before the channel, as chat templates write
it. An answer has at most one call: <|call|> ends it.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from radixrt.formats.parsing.calls import begins_object
from radixrt.formats.parsing.formats import Framed, Function, Functions, either, in_text, json_schema, sequence, tag
from radixrt.formats.parsing.pieces import Sink
from radixrt.formats.parsing.reader import Reader, Steps, marks
from radixrt.formats.parsing.writing import Json

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN, START, CHANNEL)
"""What ends a message: also a next one's header, before which some answers lack the end."""
MAX_HEADER_PARTS = 8
MAX_HEADER_WORDS = 2
"""The most words of a header beside channel and recipient: the kind of the content."""
TO, FUNCTIONS = "to=", "functions."
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
FINAL_OPENED = f"{CHANNEL}{FINAL}{MESSAGE}"
_WORD = re.compile(r"[^\s<]")


class Header(NamedTuple):
    """The header of a message; "" for missing fields."""

    channel: str
    recipient: str


class Harmony(Framed, Json):
    """See `formats.ToolFormat`. With `thoughts` it parses reasoning as well, which is content otherwise. `opened`: the
    part of the first message's header that is in the prompt."""

    marks = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

    def __init__(self, thoughts: bool = True, opened: str = "") -> None:
        self._thoughts = thoughts
        self._opened = opened

    def after(self, prompt: str, partial: bool) -> Harmony:
        """The format for an answer to a prompt with this end. `partial`: the answer continues its last message."""
        _, started, header = prompt.rpartition(START)
        header = header.strip().removeprefix("assistant")
        if partial:
            header = FINAL_OPENED
        elif MESSAGE in header:
            header = header[: header.index(MESSAGE) + len(MESSAGE)]
        return Harmony(self._thoughts, header if started or partial else "")

    @property
    def thoughts(self) -> tuple[str, str, bool] | None:
        """How thoughts begin and end in an answer, and whether the prompt has begun them; None without `thoughts`."""
        begin = CHANNEL + ANALYSIS
        return (begin, END, self._opened.startswith(begin)) if self._thoughts else None

    def new_id(self) -> str:
        return "call_" + uuid.uuid4().hex[:24]

    # ------------------------------------------------------------ reading

    def begins(self, functions: Functions) -> tuple[str, ...]:
        """None: what is a thought is said by channels."""
        return ()

    def read(self, reader: Reader, sink: Sink, functions: Functions, hidden: frozenset[str]) -> Steps[None]:
        """See `formats.ToolFormat`. Without `functions` there are no calls."""
        reader.feed(self._opened)
        spoken = False
        while True:
            header = (yield from _header(reader)) or Header(FINAL, "")
            name = _function(header.recipient, functions)
            if name:
                sink.call(name)
                mark = yield from _arguments(reader, sink, hidden)
                if mark == CALL:  # some checkpoints do not list it among their eos ids
                    sink.end()
                    yield from reader.until(marks(()), lambda _: None)
                    return
            elif header.channel == ANALYSIS and self._thoughts:
                mark = yield from _message(reader, sink.reasoning, hidden)
            else:
                if spoken:
                    sink.content("\n\n")
                spoken = True
                mark = yield from _message(reader, sink.content, hidden)
            if not mark:
                return
            sink.bound()
            if mark == CHANNEL:
                continue
            if mark != START:
                yield from reader.space()
                mark = START if (yield from reader.take(START)) else ""
            if mark == START:
                if not (yield from reader.take("assistant")):
                    yield from reader.word(_WORD)  # the name of another role
            elif not (yield from reader.peek()):
                return

    # ------------------------------------------------------------ writing

    def forced(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        """See `formats.ToolFormat`; reasoning may come before."""
        begin = f"{CHANNEL}{COMMENTARY} {TO}{FUNCTIONS}"
        calls = [tag(f"{begin}{f.name} {CONSTRAIN}json{MESSAGE}", json_schema(f.schema), "") for f in functions]
        return self._after_thoughts(either(*calls) if len(calls) > 1 else calls[0])

    def free(self, functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
        """See `formats.ToolFormat`."""
        headers = f" {CONSTRAIN}json", f"{CHANNEL}{COMMENTARY} json", f"{CHANNEL}{COMMENTARY} {CONSTRAIN}json"
        calls = [
            tag(f"{TO}{FUNCTIONS}{f.name}{header}{MESSAGE}", json_schema(f.schema), "")
            for f in functions
            for header in headers
        ]
        return in_text([TO + FUNCTIONS], calls, several=False)

    def with_text(self, text: dict[str, Any]) -> dict[str, Any]:
        """A structural tag's format for an answer whose content is `text`, itself a format; reasoning may come
        before."""
        return text if self._opened == FINAL_OPENED else self._after_thoughts(tag(FINAL_OPENED, text, ""))

    def _after_thoughts(self, message: dict[str, Any]) -> dict[str, Any]:
        thoughts = f"{CHANNEL}{ANALYSIS}{MESSAGE}"
        opened = bool(self._opened) and thoughts.startswith(self._opened)
        found = tag(thoughts.removeprefix(self._opened), {"type": "any_text"}, f"{END}{START}assistant")
        return sequence(found if opened else {"type": "optional", "content": found}, message)


def _header(reader: Reader) -> Steps[Header | None]:
    """Read the header of the next message; None, and nothing read, if there is none."""
    start, channel, recipient, words = reader.at, "", "", 0
    for _ in range(MAX_HEADER_PARTS):
        yield from reader.space()
        if (yield from reader.take(MESSAGE)):
            return Header(channel, recipient)
        if (yield from reader.take(CHANNEL)):  # some headers name it twice
            channel = (yield from reader.word(_WORD)) or channel
        elif not recipient and (yield from reader.take(TO)):
            recipient = yield from reader.word(_WORD)
        elif recipient and (yield from begins_object(reader)):  # some headers lack their end
            return Header(channel, recipient)
        elif (channel or recipient) and words < MAX_HEADER_WORDS:
            words += 1
            yield from reader.take(CONSTRAIN)
            if not (word := (yield from reader.word(_WORD))):
                break
            if word.startswith(FUNCTIONS):
                recipient = recipient or word
        else:
            break
    reader.at = start
    return None


def _message(reader: Reader, pass_on: Callable[[str], None], hidden: frozenset[str]) -> Steps[str]:
    """Read a message up to and including the mark that ends it, which is returned. A channel's mark is not read, and
    ends it only as a part of a header."""
    while (mark := (yield from reader.until(marks(ENDS, hidden), pass_on))) == CHANNEL:
        after = reader.at
        reader.at -= len(CHANNEL)
        if (yield from _is_header(reader)):
            return CHANNEL
        reader.at = after
        pass_on("" if CHANNEL in hidden else CHANNEL)
    return mark


def _is_header(reader: Reader) -> Steps[bool]:
    """Whether the header of a message comes next; nothing is read."""
    start = reader.at
    found = yield from _header(reader)
    reader.at = start
    return found is not None


def _function(recipient: str, functions: Functions) -> str:
    """The function that a message calls; "" if it calls none."""
    if not functions or not recipient:
        return ""
    if recipient.startswith(FUNCTIONS):
        return recipient.removeprefix(FUNCTIONS)
    return recipient if recipient in functions else ""


def _arguments(reader: Reader, sink: Sink, hidden: frozenset[str]) -> Steps[str]:
    """Read a call's arguments and the mark after them; returns the mark. An empty message is a call without
    arguments."""
    found: list[str] = []

    def pass_on(text: str) -> None:
        if text and not found:
            text = text.lstrip()
            found.extend([text] if text else [])
        sink.arguments(text)

    mark = yield from _message(reader, pass_on, hidden)
    if not found:
        sink.arguments("{}")
    return mark
