"""The lists of a step's sequences for kernels with recurrent states: they are cut into chunks, anew after each token
whose state is stored (`StateWork.within`).

    sequence   [ chunk | chunk | ch | chunk | chunk | chunk | chu ]
                                    ^ stored
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from radixrt.worker.plan import Parts

TOKENS = 64
"""The most tokens of a chunk, unless another number is given."""
CHUNK_FIELDS = 6
"""Of a chunk: its first token, tokens, slot of the state; first token and end of the sequence's tokens in this step; a
slot that the state after the chunk is stored in as well, or 0."""
SEQUENCE_FIELDS = 3
"""Of a sequence: its first chunk, chunks, slot of the state."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The lists of `cut` on the device."""

    chunks: torch.Tensor
    sequences: torch.Tensor
    tokens: int = TOKENS
    """The most tokens of a chunk."""

    @classmethod
    def of(cls, parts: Parts, device: torch.device, tokens: int = TOKENS) -> Cut:
        chunks, sequences = (torch.from_numpy(x).to(device) for x in cut(parts, tokens))
        return cls(chunks, sequences, tokens)

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What kernels take."""
        return self.chunks, self.sequences


@dataclass(frozen=True, slots=True)
class Runs:
    """The first tokens of a step on the device, of which each decode is a sequence of one, and each draft a sequence of
    several (`StateWork.runs`), int32[B] each."""

    slots: torch.Tensor
    """Slots of the states after each token."""
    lengths: torch.Tensor
    """Of the sequence that begins with each token, in tokens; 0 where none does."""

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What kernels take."""
        return self.slots, self.lengths

    @classmethod
    def of_ones(cls, slots: torch.Tensor) -> Runs:
        """Sequences of one token each, with states at int32 slots[B]."""
        return cls(slots, torch.ones_like(slots))


def cut(parts: Parts, tokens: int = TOKENS) -> tuple[np.ndarray, np.ndarray]:
    """(chunks int32[N, CHUNK_FIELDS], sequences int32[B, SEQUENCE_FIELDS], longest first) of the parts of sequences.
    Chunks have up to `tokens` tokens."""
    first, end = parts.bounds[:-1], parts.bounds[1:]
    counts = -(-(end - first) // tokens)
    stop = np.cumsum(counts)
    part = np.repeat(np.arange(len(counts)), counts)
    begin = first[part] + (np.arange(stop[-1]) - (stop - counts)[part]) * tokens
    begins = np.flatnonzero(np.diff(parts.owners, prepend=-1))  # the first part of each sequence, and its last one
    ends = np.append(begins[1:], len(counts)) - 1
    of_sequence = np.stack((parts.targets[ends], first[begins], end[ends]), axis=1)
    stored = np.zeros(stop[-1], dtype=np.int64)
    stored[stop - 1] = parts.targets
    stored[stop[ends] - 1] = 0  # the last state of a sequence is stored in its slot anyway
    lengths = np.add.reduceat(counts, begins)
    mine = of_sequence.repeat(lengths, axis=0)
    chunks = np.column_stack((begin, np.minimum(end[part] - begin, tokens), mine, stored))
    order = np.argsort(-lengths, kind="stable")
    sequences = np.column_stack(((stop - counts)[begins], lengths, parts.targets[ends]))[order]
    return chunks.astype(np.int32), sequences.astype(np.int32)


# ---------------------------------------------------------------- read by kernels that compute token by token


@triton.jit
def first_chunk(
    chunks_ptr, sequences_ptr, number, FIELDS: tl.constexpr, CHUNK_FIELDS: tl.constexpr, RUNS: tl.constexpr
):  # fmt: skip
    """Where a sequence begins, of `Cut.pair` or, with RUNS, of `Runs.pair`: (its first token, the end of its tokens,
    the slot of its state, a pointer to its first chunk, the end of that chunk). A token of a run is a chunk. `number`
    is that of the sequence, or of the token; if no run begins with that token, the end is the token itself."""
    if RUNS:
        end = number + tl.load(sequences_ptr + number)
        chunk = chunks_ptr + number
        return number, end, tl.load(chunk).to(tl.int64), chunk, number + 1
    else:
        sequence = sequences_ptr + number * FIELDS
        chunk = chunks_ptr + tl.load(sequence) * CHUNK_FIELDS
        slot = tl.load(sequence + 2).to(tl.int64)
        begin = tl.load(chunk + 3)
        return begin, tl.load(chunk + 4), slot, chunk, begin + tl.load(chunk + 1)


@triton.jit
def next_chunk(chunk, stop, more, CHUNK_FIELDS: tl.constexpr, RUNS: tl.constexpr):
    """After the last token of the chunk that ends at `stop`: (the slot that the state is to be stored in now, or 0; a
    pointer to the next chunk; its end). `more`: whether the sequence has more tokens."""
    if RUNS:
        return tl.load(chunk).to(tl.int64), chunk + 1, stop + 1
    else:
        passed = tl.load(chunk + 5).to(tl.int64)
        if more:
            chunk += CHUNK_FIELDS
            stop = tl.load(chunk) + tl.load(chunk + 1)
        return passed, chunk, stop
