"""Incremental encoding: text most of which was encoded before."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

from radixrt.messages import NO_TENANT, TOKEN_BYTES, Namespace
from radixrt.tokens.cuts import ANCHOR, Cuts
from radixrt.tokens.errors import Room
from radixrt.tokens.quota import Shares
from radixrt.tokens.turns import LONG, Steps

MEMORY_TOKENS = 4_000_000
MIN_BYTES = 32 * TOKEN_BYTES
"""The least size that a part counts for: it takes about 250 bytes beside its ids."""

STEP_CHARS = 16_384
"""Parts are encoded in steps of about so many characters (3-10 ms)."""
LONG_CHARS = 131_072
"""A part of more characters, a text that cannot be cut, is a LONG step (40 ms and more)."""

EncodeMany = Callable[[list[str]], list[list[int]]]


class Incremental:
    """A cache of the ids of parts of texts, at most `max_tokens` ids. Each part counts for at least MIN_BYTES, and
    for a byte per character. Beyond that the least recently used parts of the tenant with most are dropped.

    Texts are cut where the ids of the parts are the ids of the whole (`cuts.py`), so that the result is always what
    `encode_many` would return for the whole text. A long text is cut into spans, and these into parts; usually all
    spans but the last are known. `encode_many` returns the ids of each text; it must be thread safe, and this class is.

    What was encoded in one namespace is not known in another: from the time that a text takes, nobody can tell what
    others have sent.
    """

    def __init__(self, encode_many: EncodeMany, cuts: Cuts, max_tokens: int = MEMORY_TOKENS) -> None:
        self._encode_many = encode_many
        self._cuts = cuts
        self._max_bytes = max_tokens * TOKEN_BYTES
        self._memory: dict[str, OrderedDict[str, OrderedDict[str, bytes]]] = {}
        """Ids by tenant, namespace and part; the last used ones last."""
        self._shares = Shares()
        self._lock = threading.Lock()
        self._skip = TOKEN_BYTES * len(encode_many([ANCHOR])[0])

    @property
    def num_tokens(self) -> int:
        """The size of the cache in ids, as parts count."""
        return self._shares.total // TOKEN_BYTES

    def start(
        self,
        text: str,
        before: bytes = b"",
        behind: bytes = b"",
        *,
        grows: bool = True,
        namespace: Namespace = NO_TENANT,
    ) -> PendingText:
        """Look up what is known of a text: 1-2 µs per 1,000 characters. The ids `before` and `behind` are added around
        its own. `grows`: the text will come again with more behind it, so its last span is looked up in parts only."""
        spans = self._cuts.spans(text)
        last = [spans.pop()] if grows else []
        known = self._known(spans, namespace)
        pieces = [[span] if ids else self._cuts.parts(span) for span, ids in zip(spans, known, strict=True)]
        pieces += [self._cuts.parts(span) for span in last]
        parts = [part for piece in pieces for part in piece]
        found = dict(zip(parts, self._known(parts, namespace), strict=True))
        return PendingText(self, pieces, len(spans), found, before, behind, namespace)

    def start_after(
        self, lead: str, lead_ids: list[int], text: str, *, grows: bool = True, namespace: Namespace = NO_TENANT
    ) -> PendingText:
        """`start` a text that follows `lead`: both are encoded together, and the ids of `lead` are left out. If the
        result does not begin with these, the text is encoded alone."""
        pending = self.start(lead + text, grows=grows, namespace=namespace)
        pending.lead, pending.alone = array("i", lead_ids).tobytes(), text
        return pending

    def encode(self, text: str) -> bytes:
        """Ids of a text as int32 bytes, without special tokens. Raises what `encode_many` raises."""
        return self.start(text).finish()

    def encode_parts(self, parts: list[str], namespace: Namespace = NO_TENANT) -> dict[str, bytes]:
        """Encode parts, and cache them."""
        encoded = dict(zip(parts, [array("i", ids).tobytes() for ids in self._encode_many(parts)], strict=True))
        self.remember(encoded, namespace)
        return encoded

    def joined(self, ids: Sequence[bytes]) -> bytes:
        """The ids of a text from those of its parts. All but the first part have the id of ANCHOR in front."""
        return ids[0] if len(ids) == 1 else b"".join([ids[0], *[part[self._skip :] for part in ids[1:]]])

    def behind_anchor(self, ids: bytes) -> bytes:
        """The ids of a part or span without that of ANCHOR in front."""
        return ids[self._skip :]

    def least(self, ids: Iterable[bytes]) -> int:
        """The number of ids of parts without that of ANCHOR, which the first part of a text does not have."""
        return sum(len(one) - self._skip for one in ids) // TOKEN_BYTES

    def remember(self, encoded: Mapping[str, bytes], namespace: Namespace = NO_TENANT) -> None:
        tenant = namespace.tenant
        with self._lock:
            memory = self._memory.setdefault(tenant, OrderedDict()).setdefault(namespace.key, OrderedDict())
            more = 0
            for part, ids in encoded.items():
                before = memory.pop(part, None)
                more += _size(part, ids) - (0 if before is None else _size(part, before))
                memory[part] = ids
            self._shares.add(tenant, more)
            while self._shares.total > self._max_bytes:
                self._drop_oldest(self._shares.largest())

    def forget(self, is_meant: Callable[[str], bool]) -> None:
        """Forget all texts of the tenants that are meant."""
        with self._lock:
            for tenant in filter(is_meant, tuple(self._memory)):
                del self._memory[tenant]
                self._shares.add(tenant, -self._shares[tenant])

    def _drop_oldest(self, tenant: str) -> None:
        own = self._memory[tenant]
        key, memory = next(iter(own.items()))
        part, ids = memory.popitem(last=False)
        if not memory:
            del own[key]
        if not own:
            del self._memory[tenant]
        self._shares.add(tenant, -_size(part, ids))

    def _known(self, parts: list[str], namespace: Namespace) -> list[bytes | None]:
        with self._lock:
            own = self._memory.get(namespace.tenant)
            if own is None or (memory := own.get(namespace.key)) is None:
                return [None] * len(parts)
            own.move_to_end(namespace.key)
            get, touch = memory.get, memory.move_to_end
            known = [get(part) for part in parts]
            for part, ids in zip(parts, known, strict=True):
                if ids is not None:
                    touch(part)
        return known


def _size(part: str, ids: bytes) -> int:
    """Bytes that a part counts for. Its text counts as well, since some texts have very few ids."""
    return max(len(ids), len(part), MIN_BYTES)


class PendingText:
    """A text that is being encoded: `finish` encodes the unknown parts and returns int32 bytes.

    The first `spans` of the `pieces` are spans that will be cached as a whole. `lead` and `alone` are set by
    `start_after`: ids to leave out at the beginning, and the text to encode alone if the result does not begin with
    them.
    """

    __slots__ = ("_before", "_behind", "_incremental", "_known", "_namespace", "_pieces", "_spans", "alone", "lead")

    def __init__(
        self,
        incremental: Incremental,
        pieces: list[list[str]],
        spans: int,
        known: dict[str, bytes | None],
        before: bytes,
        behind: bytes,
        namespace: Namespace,
    ) -> None:
        self._incremental, self._pieces, self._spans, self._known = incremental, pieces, spans, known
        self._before, self._behind, self._namespace = before, behind, namespace
        self.lead, self.alone = b"", ""

    @property
    def unseen_chars(self) -> int:
        """Characters that remain to be encoded."""
        return sum(len(part) for part, ids in self._known.items() if ids is None)

    def finish(self) -> bytes:
        unseen = self._unseen()
        if unseen:
            self._known |= self._incremental.encode_parts(unseen, self._namespace)
        ids = self._whole()
        return ids[len(self.lead) :] if ids.startswith(self.lead) else self._alone().finish()

    def steps(self, room: Room | None = None, beside: int = 0) -> Steps[bytes]:
        """`finish` in steps of about STEP_CHARS characters. Raises FieldError as soon as the ids, with `beside` others,
        are more than `room` allows."""
        least = beside + self._least(self._known)
        for batch in _batches(self._unseen()):
            yield LONG if len(batch[0]) > LONG_CHARS else None
            encoded = self._incremental.encode_parts(batch, self._namespace)
            self._known |= encoded
            least += self._least(encoded)
            if room:
                room.check(least, whole=False)
        yield None
        ids = self._whole()
        if ids.startswith(self.lead):
            return ids[len(self.lead) :]
        return (yield from self._alone().steps(room, beside))

    def last_steps(self, tokens: int) -> Steps[bytes]:
        """The last ids, at least `tokens` if there are so many: the text before these is not encoded."""
        found, count = [self._behind], len(self._behind)
        known = cast("Mapping[str, bytes]", self._known)  # once their batches are encoded
        for number in range(len(self._pieces) - 1, -1, -1):
            parts = self._pieces[number]
            for batch in _batches([part for part in parts if self._known[part] is None]):
                yield LONG if len(batch[0]) > LONG_CHARS else None
                self._known |= self._incremental.encode_parts(batch, self._namespace)
            ids = self._incremental.joined([known[part] for part in parts])
            found.append(self._incremental.behind_anchor(ids) if number else ids)
            count += len(found[-1])
            if count >= tokens * TOKEN_BYTES:
                break
        else:
            found.append(self._before)
        return b"".join(reversed(found))

    def _least(self, known: Mapping[str, bytes | None]) -> int:
        """The fewest ids that known parts add. Without `lead`, the first part may have others."""
        first = self._pieces[0][0] if self.lead else None
        return self._incremental.least(ids for part, ids in known.items() if ids is not None and part != first)

    def _alone(self) -> PendingText:
        return self._incremental.start(self.alone, namespace=self._namespace)

    def _unseen(self) -> list[str]:
        return [part for part, ids in self._known.items() if ids is None]

    def _whole(self) -> bytes:
        known, joined = cast("Mapping[str, bytes]", self._known), self._incremental.joined
        spans = [joined([known[part] for part in parts]) for parts in self._pieces]
        whole = zip(self._pieces[: self._spans], spans[: self._spans], strict=True)
        grown = {_whole(parts): ids for parts, ids in whole if len(parts) > 1}
        if grown:
            self._incremental.remember(grown, self._namespace)
        return b"".join([self._before, joined(spans), self._behind])


def _batches(parts: list[str]) -> Iterator[list[str]]:
    """Divide parts into batches of about STEP_CHARS characters; a part longer than that is alone."""
    batch: list[str] = []
    size = 0
    for part in parts:
        if batch and size + len(part) > STEP_CHARS:
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += len(part)
    if batch:
        yield batch


def _whole(parts: list[str]) -> str:
    """The text that was cut into these parts."""
    return parts[0] + "".join([part[len(ANCHOR) :] for part in parts[1:]])
