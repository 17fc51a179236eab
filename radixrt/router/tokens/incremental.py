"""Incremental encoding: text most of which was encoded before."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from radixrt.messages import TOKEN_BYTES
from radixrt.router.tokens.cuts import ANCHOR, Cuts

MEMORY_TOKENS = 4_000_000
LEAST_BYTES = 32 * TOKEN_BYTES
"""The least size that a part counts for: it takes about 250 bytes beside its ids."""

EncodeMany = Callable[[list[str]], list[list[int]]]


class Incremental:
    """An LRU cache of the ids of parts of texts, at most `max_tokens` ids. Each part counts for at least LEAST_BYTES,
    and for a byte per character.

    Texts are cut where the ids of the parts are the ids of the whole (`cuts.py`), so that the result is always what
    `encode_many` would return for the whole text. A long text is cut into spans, and these into parts; usually all
    spans but the last are known. `encode_many` returns the ids of each text; it must be thread safe, and this class is.
    """

    def __init__(self, encode_many: EncodeMany, cuts: Cuts, max_tokens: int = MEMORY_TOKENS) -> None:
        self._encode_many = encode_many
        self._cuts = cuts
        self._max_bytes = max_tokens * TOKEN_BYTES
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._skip = TOKEN_BYTES * len(encode_many([ANCHOR])[0])

    @property
    def num_tokens(self) -> int:
        """The size of the cache in ids, as parts count."""
        return self._bytes // TOKEN_BYTES

    def start(self, text: str, before: bytes = b"", behind: bytes = b"", *, grows: bool = True) -> PendingText:
        """Look up what is known of a text: 1-2 µs per 1,000 characters. The ids `before` and `behind` are added around
        its own. `grows`: the text will come again with more behind it, so its last span is looked up in parts only."""
        spans = self._cuts.spans(text)
        last = [spans.pop()] if grows else []
        known = self._known(spans)
        pieces = [[span] if ids else self._cuts.parts(span) for span, ids in zip(spans, known, strict=True)]
        pieces += [self._cuts.parts(span) for span in last]
        parts = [part for piece in pieces for part in piece]
        return PendingText(self, pieces, len(spans), dict(zip(parts, self._known(parts), strict=True)), before, behind)

    def start_after(self, lead: str, lead_ids: list[int], text: str, *, grows: bool = True) -> PendingText:
        """`start` a text that follows `lead`: both are encoded together, and the ids of `lead` are left out. If the
        result does not begin with these, the text is encoded alone."""
        pending = self.start(lead + text, grows=grows)
        pending.lead, pending.alone = array("i", lead_ids).tobytes(), text
        return pending

    def encode(self, text: str) -> bytes:
        """Ids of a text as int32 bytes, without special tokens. Raises what `encode_many` raises."""
        return self.start(text).finish()

    def encode_parts(self, parts: list[str]) -> dict[str, bytes]:
        """Encode parts, and cache them."""
        encoded = dict(zip(parts, [array("i", ids).tobytes() for ids in self._encode_many(parts)], strict=True))
        self.remember(encoded)
        return encoded

    def joined(self, ids: Sequence[bytes]) -> bytes:
        """The ids of a text from those of its parts. All but the first part have the id of ANCHOR in front."""
        return ids[0] if len(ids) == 1 else b"".join([ids[0], *[part[self._skip :] for part in ids[1:]]])

    def remember(self, encoded: Mapping[str, bytes]) -> None:
        memory = self._memory
        with self._lock:
            for part, ids in encoded.items():
                before = memory.pop(part, None)
                self._bytes += _size(part, ids) - (0 if before is None else _size(part, before))
                memory[part] = ids
            while self._bytes > self._max_bytes:
                self._bytes -= _size(*memory.popitem(last=False))

    def _known(self, parts: list[str]) -> list[bytes | None]:
        get, touch = self._memory.get, self._memory.move_to_end
        with self._lock:
            known = [get(part) for part in parts]
            for part, ids in zip(parts, known, strict=True):
                if ids is not None:
                    touch(part)
        return known


def _size(part: str, ids: bytes) -> int:
    """Bytes that a part counts for. Its text counts as well, since some texts have very few ids."""
    return max(len(ids), len(part), LEAST_BYTES)


class PendingText:
    """A text that is being encoded: `finish` encodes the unknown parts and returns int32 bytes.

    The first `spans` of the `pieces` are spans that will be cached as a whole. `lead` and `alone` are set by
    `start_after`: ids to leave out at the beginning, and the text to encode alone if the result does not begin with
    them.
    """

    __slots__ = ("_before", "_behind", "_incremental", "_known", "_pieces", "_spans", "alone", "lead")

    def __init__(
        self,
        incremental: Incremental,
        pieces: list[list[str]],
        spans: int,
        known: dict[str, bytes | None],
        before: bytes,
        behind: bytes,
    ) -> None:
        self._incremental, self._pieces, self._spans, self._known = incremental, pieces, spans, known
        self._before, self._behind = before, behind
        self.lead, self.alone = b"", ""

    @property
    def unseen_chars(self) -> int:
        """Characters that remain to be encoded."""
        return sum(len(part) for part, ids in self._known.items() if ids is None)

    def finish(self) -> bytes:
        ids = self._finish()
        return ids[len(self.lead) :] if ids.startswith(self.lead) else self._incremental.encode(self.alone)

    def _finish(self) -> bytes:
        unseen = [part for part, ids in self._known.items() if ids is None]
        known = self._known | self._incremental.encode_parts(unseen) if unseen else self._known
        joined = self._incremental.joined
        spans = [joined([known[part] for part in parts]) for parts in self._pieces]
        whole = zip(self._pieces[: self._spans], spans[: self._spans], strict=True)
        grown = {_whole(parts): ids for parts, ids in whole if len(parts) > 1}
        if grown:
            self._incremental.remember(grown)
        return b"".join([self._before, joined(spans), self._behind])


def _whole(parts: list[str]) -> str:
    """The text that was cut into these parts."""
    return parts[0] + "".join([part[len(ANCHOR) :] for part in parts[1:]])
