"""Messages from rank 0 of a tensor-parallel worker to its other ranks, over pipes between processes of one machine."""

from __future__ import annotations

import msgspec

from radixrt.messages.shared import Sampling

TreePath = tuple[tuple[int, int], ...]
"""Nodes of a radix tree from the root down: (name of the node, tokens from the root to its end)."""


class RequestInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a runner knows of a request: who it is and how its tokens are sampled. It never changes."""

    id: int
    number: int
    """Unique in the process of rank 0, unlike `id`."""
    prompt_len: int
    """Tokens of its prompt; generated ones follow."""
    limit: int
    """The most tokens that it may have."""
    sampling: Sampling
    greedy: bool = False
    """Whether the most likely token is taken each time, without sampling."""
    needs_host_tokens: bool = False
    """Whether the next token, or what is reported with it, depends on more than logits, position and seed, so that it
    can be sampled only when the host knows the tokens before it."""
    adjusted: bool = False
    """Whether its sampling adds to or bans logits of certain ids."""
    allowed: bytes = b""
    """int64, ascending: the ids of `allowed_token_ids`; empty: all."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end it."""

    @property
    def penalized(self) -> bool:
        """Whether its sampling penalizes tokens that have occurred."""
        s = self.sampling
        return s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0


class Bind(msgspec.Struct, tag="bind", array_like=True):
    """The page table's rows and columns (`Runner.bind`)."""

    rows: int
    columns: int


class PutAdapter(msgspec.Struct, tag="adapter", array_like=True):
    """Read a LoRA adapter and make it the one of number `slot` (`Runner.put_adapter`)."""

    slot: int
    name: str
    path: str


class RunStep(msgspec.Struct, tag="step", array_like=True):
    """Run a step. Its requests and paths mostly are those of the step before, and are then not sent again."""

    plan: msgspec.Raw
    """A `worker.plan.Plan` without `requests` and `paths`."""
    requests: list[RequestInfo | int] | None = None
    """`Plan.requests`, as a number where the step before had the request. None: the same as there."""
    paths: list[TreePath] | None = None
    """`Plan.paths`. None: the same as in the step before."""


class MakeMoves(msgspec.Struct, tag="moves", array_like=True):
    """Make copies without a step (`Runner.move`)."""

    moves: msgspec.Raw
    """A `worker.plan.Moves`."""


class WritePart(msgspec.Struct, tag="write", array_like=True):
    """Write a rank's part of a block of KV on disk, from `slots` of its host memory, int32, once what the steps before
    copy to these has arrived."""

    number: int
    """Of the block."""
    kind: str
    slots: bytes


class ReadPart(msgspec.Struct, tag="read", array_like=True):
    """Read a rank's part of a block to `slots`, its rows from `first` on. The reply is a PartRead."""

    ticket: int
    number: int
    kind: str
    slots: bytes
    first: int


ToRank = Bind | PutAdapter | RunStep | MakeMoves | WritePart | ReadPart


class PartRead(msgspec.Struct, array_like=True):
    """From another rank to rank 0: whether a part was read, and verified."""

    ticket: int
    ok: bool
