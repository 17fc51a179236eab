"""What goes into a store and comes out of it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class NewBlock(NamedTuple):
    """A block to be written.

    kind       "kv": the tokens [start, start + len(ids)) of a path; "state": what is kept of the path [0, start) as
               one, such as a checkpoint of a recurrent state, with no ids.
    namespace  of the path: see `radixrt.messages.namespace`
    parent     the number of the block that ends where this one starts (of a state: in which position `start - 1` lies),
               of this store's fingerprint, committed or being written; None if start is 0
    start      tokens before it
    ids        int32[n].tobytes() of its tokens
    value      the less, the sooner it is evicted, among blocks without children: seconds of the epoch at its last use,
               or anything else that all stores of a folder measure alike
    """

    kind: str
    namespace: str
    parent: int | None
    start: int
    ids: bytes
    value: float


class Block(NamedTuple):
    """A block that can be read. `number` is its own in the folder, for ever; `nbytes` of this rank's part."""

    number: int
    kind: str
    namespace: str
    parent: int | None
    start: int
    ids: bytes
    value: float
    nbytes: int

    @property
    def stop(self) -> int:
        return self.start + len(self.ids) // 4


class Job:
    """A write, a read or a deletion. What it came to is known once `poll` has returned it.

    kind     "write", "read" or "delete"
    number   of its block (0: a deletion). It may be the parent of further writes at once: they fail if this one does.
    ok       None until it has ended. A read that is not ok is a miss: what its rows hold then is undefined.
    why      it is not ok, in a few words, for counters and logs
    nbytes   read or written, or freed by a deletion
    seconds  from the call to the end
    """

    __slots__ = ("kind", "nbytes", "number", "ok", "seconds", "why")

    def __init__(self, kind: str, number: int = 0, nbytes: int = 0) -> None:
        self.kind = kind
        self.number = number
        self.nbytes = nbytes
        self.ok: bool | None = None
        self.why = ""
        self.seconds = 0.0

    def __repr__(self) -> str:
        return f"Job({self.kind} {self.number}, ok={self.ok}, {self.why!r})"


class Changes(NamedTuple):
    """Since the last poll; to be applied in this order.

    finished  jobs that ended, those that were refused included: each comes once
    added     blocks that others wrote, parents first
    removed   numbers of blocks that are gone, whoever evicted, deleted or failed to verify them; some may be unknown
    """

    finished: list[Job]
    added: list[Block]
    removed: list[int]


class StoreState(Enum):
    """Whether a store serves. In all states but OK writes are refused; reads are refused in GONE and SLOW."""

    OK = "ok"
    FULL = "full"
    """The file system is, or has no more than its floor of free space without any block of ours."""
    READONLY = "readonly"
    SLOW = "slow"
    """A call of the file system has not returned for long: it may hang."""
    GONE = "gone"
    """The folder vanished, or cannot be used for another reason, which the log says."""
