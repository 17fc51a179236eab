"""Encoding of text of which most was encoded before."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from radixrt.messages import TOKEN_BYTES
from radixrt.router.tokens.cuts import ANCHOR, Cuts

MEMORY_TOKENS = 4_000_000
LEAST_BYTES = 32 * TOKEN_BYTES
"""That a part counts for, however short it is: it costs some 250 bytes beside its ids."""

EncodeMany = Callable[[list[str]], list[list[int]]]


class Incremental:
    """Remembers the ids of the parts that texts are cut into, at most `max_tokens` of them, the latest used. A part
    counts for LEAST_BYTES at least, and for a byte a character.

    Parts are cut where ids of parts are ids of the whole (`cuts.py`), so that what this returns is what `encode_many`
    would return for the whole text, whatever is remembered. A long text is cut into spans, and those into parts: all
    but the last span are mostly known as they are. `encode_many`: ids of each text, thread safe. Thread safe.
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
        """Ids that are remembered, as they count."""
        return self._bytes // TOKEN_BYTES

    def start(self, text: str, before: bytes = b"", behind: bytes = b"", *, grows: bool = True) -> PendingText:
        """Look up what is known of a text: 1-2 µs per 1,000 characters. Ids to put `before` and `behind` its own.
        `grows`: it will come again with more behind it, so that its last span is only looked up in parts."""
        spans = self._cuts.spans(text)
        last = [spans.pop()] if grows else []
        known = self._known(spans)
        pieces = [[span] if ids else self._cuts.parts(span) for span, ids in zip(spans, known, strict=True)]
        pieces += [self._cuts.parts(span) for span in last]
        parts = [part for piece in pieces for part in piece]
        return PendingText(self, pieces, len(spans), dict(zip(parts, self._known(parts), strict=True)), before, behind)

    def start_after(self, lead: str, lead_ids: list[int], text: str, *, grows: bool = True) -> PendingText:
        """`start` a text that stands behind `lead`, whose ids come first and are left out. If they do not come first,
        the text is encoded alone."""
        pending = self.start(lead + text, grows=grows)
        pending.lead, pending.alone = array("i", lead_ids).tobytes(), text
        return pending

    def encode(self, text: str) -> bytes:
        """Ids of a text as int32 bytes, no special tokens added. Raises what `encode_many` does."""
        return self.start(text).finish()

    def encode_parts(self, parts: list[str]) -> dict[str, bytes]:
        """Encode parts and remember them."""
        encoded = dict(zip(parts, [array("i", ids).tobytes() for ids in self._encode_many(parts)], strict=True))
        self.remember(encoded)
        return encoded

    def joined(self, ids: Sequence[bytes]) -> bytes:
        """Ids of a text from those of its parts, all but the first of which have ANCHOR in front."""
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
    """Bytes that a part counts for: its text is kept, too, which may have far fewer ids than most."""
    return max(len(ids), len(part), LEAST_BYTES)


class PendingText:
    """One text on its way to ids: `finish` encodes what is not known and returns int32 bytes.

    The first `spans` of the `pieces` are to be known as they are when they come again.
    `lead` and `alone` are set by `start_after`: ids to leave out in front, and the text to encode where they are not.
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
        """How long the text is that remains to be encoded."""
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
    """The text that these are the parts of."""
    return parts[0] + "".join([part[len(ANCHOR) :] for part in parts[1:]])
