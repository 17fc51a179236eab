"""Chains of requests in which each prompt extends the one before, as those of a chat or an agent do.

turn 1  [ system, user ]                                        a prompt extends another if it has the tokens at its
turn 2  [ system, user | answer, tool ]                         middle and at its end, at the same places, and all
turn 3  [ system, user | answer, tool | answer, user ]          of that length were seen before
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from radixrt.messages import TOKEN_BYTES

KEPT_CONVERSATIONS = 50
"""Conversations of a tenant that are kept."""
KEPT_TURNS = 20
MARK_TOKENS = 24
"""Tokens that are compared at the middle of a prompt and at its end, and that are kept as its first words."""


@dataclass(slots=True, eq=False)
class Conversation:
    id: str
    namespace: str
    tenant: str
    program: str
    first: bytes
    """The first tokens of its first prompt that were new."""
    words: str | None = None
    """The text of `first`; set by who shows it."""
    length: int = 0
    """Tokens of its last prompt."""
    middle: bytes = b""
    end: bytes = b""
    last: float = 0.0
    count: int = 0
    turns: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=KEPT_TURNS))
    """(prompt, hit, hit of an infinite cache), in tokens, of the last ones."""

    def is_extended_by(self, prompt: bytes, known: int) -> bool:
        """Whether a prompt extends its last one; the first `known` tokens of it were seen before."""
        length = self.length
        return (
            length <= known
            and prompt.startswith(self.end, length * TOKEN_BYTES - len(self.end))
            and prompt.startswith(self.middle, length // 2 * TOKEN_BYTES)
        )

    def add(self, prompt: bytes, turn: tuple[int, int, int], at: float) -> None:
        size = len(prompt)
        self.length = size // TOKEN_BYTES
        middle = self.length // 2 * TOKEN_BYTES
        self.middle, self.end = (
            prompt[middle : middle + MARK_TOKENS * TOKEN_BYTES],
            prompt[-MARK_TOKENS * TOKEN_BYTES :],
        )
        self.turns.append(turn)
        self.count += 1
        self.last = at


class Conversations:
    """Those of all tenants."""

    def __init__(self) -> None:
        self._kept: dict[str, OrderedDict[str, Conversation]] = {}
        """By tenant and id, least recent first."""

    def ended(
        self, id: str, namespace: str, tenant: str, program: str, prompt: bytes, turn: tuple[int, int, int], at: float
    ) -> None:
        """A request has ended; `turn` as in a Conversation. `id` is that of the conversation if it begins one."""
        kept = self._kept.setdefault(tenant, OrderedDict())
        known = turn[2]
        longest: Conversation | None = None
        for one in kept.values():
            if one.namespace == namespace and (longest is None or one.length > longest.length):
                if one.is_extended_by(prompt, known):
                    longest = one
        if longest is None:
            begin = known * TOKEN_BYTES
            first = prompt[begin : begin + MARK_TOKENS * TOKEN_BYTES]
            longest = kept[id] = Conversation(id, namespace, tenant, program, first)
            if len(kept) > KEPT_CONVERSATIONS:
                kept.popitem(last=False)
        longest.add(prompt, turn, at)
        kept.move_to_end(longest.id)

    def latest(self, tenant: str | None) -> list[Conversation]:
        """Of one tenant or (None) all, the latest first, KEPT_CONVERSATIONS at most."""
        found = sorted(self._all(tenant), key=lambda one: one.last, reverse=True)
        return found[:KEPT_CONVERSATIONS]

    def _all(self, tenant: str | None) -> Iterator[Conversation]:
        for whose, kept in self._kept.items():
            if tenant in (None, whose):
                yield from kept.values()


def turn_json(turn: tuple[int, int, int]) -> dict[str, Any]:
    prompt, hit, bound = turn
    return {"prompt": prompt, "hit": hit, "bound": bound}
