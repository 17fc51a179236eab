"""Chains of requests in which each prompt extends the one before, with its answer, as those of a chat or an agent do.

turn 1  [ system, user ] answer
turn 2  [ system, user | answer, tool ] answer           was seen before up to the end of `answer`, or into it, if
turn 3  [ system, user | answer, tool | answer, user ]   that comes in other tokens: there both have the same
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from radixrt.messages import TOKEN_BYTES

KEPT_CONVERSATIONS = 50
"""Conversations of a tenant that are kept."""
KEPT_TURNS = 20
MAX_COMPARED = 16
"""A request is compared with so many conversations: the longest of those that it may extend."""
MARK_TOKENS = 24
"""Tokens that are compared, and that are kept as first words."""
MAX_ANSWER_TOKENS = 2048
"""Tokens of an answer that are kept: one that is longer is found by its beginning only."""
MARK_BYTES, MAX_ANSWER_BYTES = MARK_TOKENS * TOKEN_BYTES, MAX_ANSWER_TOKENS * TOKEN_BYTES


class Link(msgspec.Struct, gc=False):
    """What is kept of a request that has ended. Ids are bytes, lengths are in tokens."""

    at: float
    namespace: str
    tenant: str
    program: str
    prompt: int
    hit: int
    known: int
    """Tokens of the prompt that were seen before."""
    here: bytes
    """The ids before the `known`th."""
    first: bytes
    """Those after."""
    tail: bytes
    """The last ids of the prompt, as many as in `here`, and the answer's."""

    @classmethod
    def of(
        cls, at: float, namespace: str, tenant: str, program: str, prompt: bytes, hit: int, known: int, answer: bytes
    ) -> Link:
        place = known * TOKEN_BYTES
        begin = place - MARK_BYTES if place > MARK_BYTES else 0
        here, first = prompt[begin:place], prompt[place : place + MARK_BYTES]
        tail = prompt[-MARK_BYTES:] + answer[:MAX_ANSWER_BYTES]
        return cls(at, namespace, tenant, program, len(prompt) // TOKEN_BYTES, hit, known, here, first, tail)


@dataclass(slots=True, eq=False)
class Conversation:
    number: int
    last: Link
    words: str | None = None
    """The text of what was new in its first prompt; set by who shows it."""
    first: bytes = b""
    """Its ids."""
    count: int = 0
    turns: deque[Link] = field(default_factory=lambda: deque(maxlen=KEPT_TURNS))

    def is_extended_by(self, one: Link) -> bool:
        """Whether the prompt of a request extends the last one, and goes on with its answer, or the beginning of it."""
        last = self.last
        begin = (one.known - last.prompt) * TOKEN_BYTES
        return (
            begin >= 0
            and last.namespace == one.namespace
            and last.tail[begin : begin + len(one.here)] == one.here
            and len(one.here) == min(MARK_BYTES, one.known * TOKEN_BYTES)
        )


class Conversations:
    """Those of all tenants."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = defaultdict(Kept)
        self._numbers = itertools.count()

    def ended(self, one: Link) -> None:
        """A request has ended."""
        kept = self._kept[one.tenant]
        conversation = kept.extended_by(one)
        if conversation is None:
            conversation = Conversation(next(self._numbers), one, first=one.first)
        else:
            kept.take(conversation)
        conversation.last, conversation.count = one, conversation.count + 1
        conversation.turns.append(one)
        kept.put(conversation)

    def delete(self, tenant: str) -> None:
        """Forget those of a tenant."""
        self._kept.pop(tenant, None)

    def latest(self, tenant: str | None) -> list[Conversation]:
        """Of one tenant or (None) all, the latest first, KEPT_CONVERSATIONS at most."""
        whose = self._kept.values() if tenant is None else [self._kept[tenant]] if tenant in self._kept else []
        found = [one for kept in whose for one in kept.by_number.values()]
        return sorted(found, key=lambda one: one.last.at, reverse=True)[:KEPT_CONVERSATIONS]


class Kept:
    """Those of one tenant."""

    def __init__(self) -> None:
        self.by_number: OrderedDict[int, Conversation] = OrderedDict()
        """Least recent first."""
        self._lengths: list[tuple[int, int]] = []
        """(tokens of the last prompt, number), in order."""

    def extended_by(self, one: Link) -> Conversation | None:
        at = bisect_left(self._lengths, (one.known + 1,))
        found = (self.by_number[number] for _, number in reversed(self._lengths[max(0, at - MAX_COMPARED) : at]))
        return next((conversation for conversation in found if conversation.is_extended_by(one)), None)

    def take(self, one: Conversation) -> None:
        """Take one out, as its length will change."""
        del self._lengths[bisect_left(self._lengths, (one.last.prompt, one.number))]
        del self.by_number[one.number]

    def put(self, one: Conversation) -> None:
        """Put one in as the latest; the oldest is dropped if there are too many."""
        self.by_number[one.number] = one
        insort(self._lengths, (one.last.prompt, one.number))
        if len(self.by_number) > KEPT_CONVERSATIONS:
            self.take(next(iter(self.by_number.values())))


def turn_json(one: Link) -> dict[str, Any]:
    return {"prompt": one.prompt, "hit": one.hit, "bound": max(one.known, one.hit)}
