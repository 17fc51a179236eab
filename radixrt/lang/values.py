"""The values of gen and select, and promises of them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass
from typing import Any, NoReturn

from radixrt.client import Parsed
from radixrt.lang.errors import ProgramError
from radixrt.lang.schema import parse
from radixrt.messages import ChatMessage, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Value(Parsed):
    """The result of a gen or select. `scores` are a select's natural log-probabilities by choice; `schema` is a gen's,
    as the program gave it. In a chat, `content`, `reasoning` and `tool_calls` are what a gen's text says by the model's
    own format."""

    text: str
    token_ids: list[int]
    finish: str
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    scores: dict[str, float] | None = None
    schema: Any = None
    message: ChatMessage | None = None

    def parse(self) -> Any:
        """Convert the JSON of a `gen(schema=...)` to an object of the type that was its schema, or else to plain Python
        values. Raises ValueError for text that was cut off."""
        return parse(self.text, self.schema)


class Promise:
    """The promise of one gen's or select's value. (Not one per name: a name may be reused before its value is
    there.)"""

    __slots__ = ("_future", "_grown", "pieces", "streams")

    def __init__(self, streams: bool) -> None:
        self._future: asyncio.Future[Value] = asyncio.get_running_loop().create_future()
        self._future.add_done_callback(_look)
        self.streams = streams
        self.pieces: list[str] = []
        """The text of a gen that streams; kept, so that every reader gets all of it."""
        self._grown = asyncio.Event() if streams else None

    def add_piece(self, text: str) -> None:
        self.pieces.append(text)
        self._wake()

    def keep(self, value: Value) -> None:
        self._future.set_result(value)
        self._wake()

    def fail(self, problem: ProgramError) -> None:
        if not self._future.done():
            self._future.set_exception(problem)
            self._wake()

    def _wake(self) -> None:
        if self._grown is not None:
            self._grown.set()
            self._grown = asyncio.Event()

    def __await__(self) -> Generator[Any, None, Value]:
        """The value; may be awaited any number of times. An error that it raises counts as seen by the program."""
        try:
            return (yield from asyncio.shield(self._future).__await__())
        except ProgramError as error:
            error.seen = True
            raise

    async def stream(self) -> AsyncIterator[str]:
        """All pieces of text, as they arrive."""
        at = 0
        while at < len(self.pieces) or not self._future.done():
            if at == len(self.pieces) and self._grown is not None:
                await self._grown.wait()
            for piece in self.pieces[at:]:
                at += 1
                yield piece
        await self


def _look(done: asyncio.Future[Value]) -> None:
    """Mark an exception as retrieved, so that asyncio does not log it."""
    if not done.cancelled():
        done.exception()


class Text:
    """An awaitable of a value's text. Using it like text raises TypeError with advice."""

    __slots__ = ("_name", "_promise")

    def __init__(self, name: str, promise: Promise) -> None:
        self._name = name
        self._promise = promise

    def __await__(self) -> Generator[Any, None, str]:
        value = yield from self._promise.__await__()
        return value.text

    def __repr__(self) -> str:
        return f"<text of {self._name!r}, to be awaited>"

    @property
    def advice(self) -> str:
        """What to write instead."""
        return f"s[{self._name!r}] is not text before it is awaited: write await s[{self._name!r}]"

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(self.advice)

    __str__ = __format__ = __int__ = __float__ = __bool__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __len__ = __iter__ = __contains__ = __getitem__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __hash__ = object.__hash__

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        raise AttributeError(f"there is no {attribute} here: {self.advice}")


def kind_of(part: Any) -> str:
    """How errors describe an object that is not a valid node or text."""
    if isinstance(part, Text):
        return part.advice
    return type(part).__name__ + (", which is to be awaited" if inspect.isawaitable(part) else "")
