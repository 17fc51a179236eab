"""What a gen or select gave, and the promise of it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass
from typing import Any, NoReturn

from radixrt.lang.errors import ProgramError
from radixrt.lang.schema import parse
from radixrt.messages import TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Value:
    """What a gen or select gave. `scores` are a select's, by choice, as natural log-probabilities; `schema` is a gen's,
    as the program gave it."""

    text: str
    token_ids: list[int]
    finish: str
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    scores: dict[str, float] | None = None
    schema: Any = None

    def parse(self) -> Any:
        """The JSON of a `gen(schema=...)`, as an object of the type that was its schema, else as plain Python.
        ValueError for text that was cut off."""
        return parse(self.text, self.schema)


class Promise:
    """Of one gen or select: a name may be used again before the one before it is done."""

    __slots__ = ("_future", "_grown", "pieces", "streams")

    def __init__(self, streams: bool) -> None:
        self._future: asyncio.Future[Value] = asyncio.get_running_loop().create_future()
        self._future.add_done_callback(_look)
        self.streams = streams
        self.pieces: list[str] = []
        """Text of a gen that streams, kept so that every reader gets all of it."""
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
        """The value, any number of times. The error that it gives instead counts as seen."""
        try:
            return (yield from asyncio.shield(self._future).__await__())
        except ProgramError as error:
            error.seen = True
            raise

    async def stream(self) -> AsyncIterator[str]:
        """All pieces, as they come."""
        at = 0
        while at < len(self.pieces) or not self._future.done():
            if at == len(self.pieces):
                await self._grown.wait()
            for piece in self.pieces[at:]:
                at += 1
                yield piece
        await self


def _look(done: asyncio.Future[Value]) -> None:
    """Nobody has to ask for an error."""
    if not done.cancelled():
        done.exception()


class Text:
    """Awaits a value's text, any number of times. What is done with text, and not with this, raises TypeError."""

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
        """What to write in its place."""
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
    """What an error calls something that is not the text, or the node, that it should be."""
    if isinstance(part, Text):
        return part.advice
    return type(part).__name__ + (", which is to be awaited" if inspect.isawaitable(part) else "")
