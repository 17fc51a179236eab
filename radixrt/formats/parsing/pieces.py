"""The pieces of a parsed answer: content, reasoning, tool calls."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a call; its arguments follow. Calls never overlap."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments, as the model wrote them."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class Sink:
    """Collects the pieces of one answer.

    White space next to a call or a thought belongs to the format, not to the content: it is held back until it is known
    what follows.

        text ␣␣ <tool_call>...</tool_call> ␣ <tool_call>...</tool_call> ␣ text ␣
        said drop                         drop                         said said
    """

    def __init__(self, new_id: Callable[[], str], most_calls: int | None = None) -> None:
        self.full = False
        """Whether one call more than `most_calls` has begun, or the answer has ended: everything else is ignored."""
        self._new_id = new_id
        self._most_calls = most_calls
        self._pieces: list[Piece] = []
        self._calls = 0
        self._ids: set[str] = set()
        self._space: list[str] = []
        self._kind: type[Content] | type[Reasoning] = Content
        self._bounded = False

    def take(self) -> list[Piece]:
        """The pieces since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def content(self, text: str) -> None:
        self._say(Content, text)

    def reasoning(self, text: str) -> None:
        self._say(Reasoning, text)

    def _say(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        said = text.rstrip()
        self._kind = kind
        if said:
            if not self.full:
                self._pieces.append(kind("".join([*self._space, said])))
                self._bounded = False
            self._space.clear()
        self._space.append(text[len(said) :])

    def bound(self) -> None:
        """A call or a thought begins or ends here."""
        self._space.clear()
        self._bounded = True

    def call(self, name: str, id: str = "") -> None:
        """A call begins. `id`: the model's own id for it, if any, which is unique in the answer."""
        self.bound()
        self.full = self.full or self._calls == self._most_calls
        if not self.full:
            id = self._new_id() if not id or id in self._ids else id
            self._ids.add(id)
            self._pieces.append(CallStart(self._calls, id, name))
            self._calls += 1

    def arguments(self, text: str) -> None:
        """More of the arguments of the last call."""
        if text and not self.full:
            self._pieces.append(CallArguments(self._calls - 1, text))

    def end(self) -> None:
        """The answer has ended; further text is ignored."""
        self.bound()
        self.full = True

    def finish(self) -> None:
        """No more text will come."""
        space = "".join(self._space)
        if space and not self._bounded and not self.full:
            self._pieces.append(self._kind(space))
        self._space.clear()
