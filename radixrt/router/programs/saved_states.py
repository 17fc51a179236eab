"""Program states on disk: each as its own fields and the numbers of its last pieces, which states share there as they
do in memory.

    scope, number --> entry: fields, last part, last message, tools
                             pieces, each with the number of the one before it
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from radixrt.messages import GeneratedSegment, Namespace
from radixrt.router.persistence.database import NewPiece, Record
from radixrt.router.persistence.store import PersistentStore
from radixrt.router.programs.prompt_builder import Answer, Generated, Message, Part, Piece, State, Tools

log = logging.getLogger("radixrt.router")

KIND = b"s"
"""The first byte of the keys of states, among other values of a tenant."""
SCOPE_BYTES, NUMBER_BYTES = 16, 8
_NOT_ENCODED = (TypeError, ValueError, OverflowError, RecursionError)
_NOT_DECODED = (*_NOT_ENCODED, msgspec.MsgspecError, IndexError, AttributeError)
_encode = msgspec.msgpack.Encoder().encode
_decode_piece = msgspec.msgpack.Decoder().decode


class Key(NamedTuple):
    """The key of a state."""

    tenant: str
    scope: str
    number: int


class Fields(msgspec.Struct, array_like=True, frozen=True):
    """What a state is beside its pieces. `vocabulary`: of its token ids (`TextService.fingerprint`)."""

    vocabulary: bytes
    encoded: int
    open: str | None
    is_prompt: bool
    namespace: str | None
    answer: GeneratedSegment | None


_fields = msgspec.msgpack.Decoder(Fields)


class SavedStates:
    """The states in a store. `vocabulary` names what their token ids mean: states of others are not read."""

    def __init__(self, store: PersistentStore, vocabulary: bytes) -> None:
        self._store = store
        self._vocabulary = vocabulary
        self._pieces: WeakValueDictionary[int, Piece] = WeakValueDictionary()
        """Those in memory by number, so that states that are read share them."""

    def save(self, key: Key, state: State, replaces: Key | None = None) -> None:
        """Keep a state, if its pieces can be written as bytes. `replaces`: a state of the same tenant that goes."""
        namespace = state.namespace.key if state.namespace else None
        fields = Fields(self._vocabulary, state.encoded, state.open, state.is_prompt, namespace, state.answer)
        pieces: list[NewPiece] = []
        try:
            ends = tuple([self._number(one, pieces) for one in _ends(state)])
            value = _encode(fields)
        except _NOT_ENCODED as problem:
            log.debug("a state is not kept on disk: %s", problem)
            self.remove(key)
            if replaces is not None:
                self.remove(replaces)
            return
        replaced = _bytes_of(replaces) if replaces is not None else None
        self._store.put(key.tenant, _bytes_of(key), value, ends, pieces, replaced)

    def _number(self, end: Piece | None, new: list[NewPiece]) -> int:
        """The number of the last piece of a chain, 0 for None. Appends those of it that the store may not have."""
        epoch, chain = self._store.epoch, []
        piece = end
        while piece is not None and piece.epoch != epoch:
            chain.append(piece)
            piece = piece.before
        encoded = [_encode(_written(one)) for one in chain]  # before anything is marked
        for one, data in zip(reversed(chain), reversed(encoded), strict=True):
            if not one.number:
                one.number = self._store.next_number()
                self._pieces[one.number] = one
            one.epoch = epoch
            new.append(NewPiece(one.number, one.before.number if one.before else 0, data))
        return end.number if end is not None else 0

    async def load(self, key: Key) -> State | None:
        """A state; None if it is not kept, or not whole."""
        record = await self._store.record(key.tenant, _bytes_of(key))
        if record is None:
            return None
        try:
            return self._state(record)
        except _NOT_DECODED:
            return None

    def _state(self, record: Record) -> State | None:
        fields = _fields.decode(record.value)
        if fields.vocabulary != self._vocabulary:
            return None
        epoch = self._store.epoch
        parts, messages, *tools = [[self._piece(*one, epoch) for one in chain] for chain in record.chains]
        if fields.encoded > len(parts):
            return None
        namespace = Namespace.of(fields.namespace) if fields.namespace is not None else None
        one_each: list[Any] = [chain[0] for chain in tools]
        known: tuple[Any, Any] = parts, messages
        return State(*known, fields.encoded, fields.open, fields.is_prompt, namespace, fields.answer, one_each)

    def _piece(self, number: int, data: bytes, epoch: int) -> Piece:
        if (piece := self._pieces.get(number)) is None:
            piece = _read(_decode_piece(data))
            piece.number, piece.epoch = number, epoch
            self._pieces[number] = piece
        return piece

    def touch(self, key: Key) -> None:
        """A state was used."""
        self._store.touch(key.tenant, (_bytes_of(key),))

    def remove(self, key: Key) -> None:
        self._store.remove(key.tenant, _bytes_of(key))

    def forget(self, tenant: str, scope: str | None) -> None:
        """Remove all states of a scope, or of a tenant."""
        self._store.remove_all(tenant, KIND + _digest(scope) if scope is not None else KIND)


def _ends(state: State) -> Sequence[Piece | None]:
    last = state.parts[-1] if state.parts else None, state.messages[-1] if state.messages else None
    return (*last, *state.tools)


def _bytes_of(key: Key) -> bytes:
    return KIND + _digest(key.scope) + key.number.to_bytes(NUMBER_BYTES)


def _digest(scope: str) -> bytes:
    """Instead of the scope, which is a secret."""
    return blake2b(scope.encode("utf-8", "surrogatepass"), digest_size=SCOPE_BYTES).digest()


def _written(piece: Piece) -> tuple[Any, ...]:
    match piece:
        case Generated(text=text, ids=ids):
            return "generated", text, ids
        case Part(text=text, ids=ids, special=special):
            return "part", text, ids, special
        case Answer(fields=fields, parsed=parsed, part=part, end=end):
            return "answer", fields["content"], parsed, part, end
        case Message(fields=fields):
            return "message", fields
        case Tools(tools=tools):
            return "tools", tools
    raise TypeError(f"a piece of an unknown kind: {type(piece).__name__}")


_KINDS: dict[str, type[Piece]] = {
    "generated": Generated,
    "part": Part,
    "answer": Answer,
    "message": Message,
    "tools": Tools,
}


def _read(written: list[Any]) -> Piece:
    kind, *values = written
    return _KINDS[kind](*values)
