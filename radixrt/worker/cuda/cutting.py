"""The lists of a step's sequences for kernels with recurrent states: they are cut into chunks, anew after each token
whose state is stored (`StateWork.within`).

    sequence   [ chunk | chunk | ch | chunk | chunk | chunk | chu ]
                                    ^ stored
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from radixrt.worker.plan import Parts

TOKENS = 64
"""The most tokens of a chunk."""
CHUNK_FIELDS = 6
"""Of a chunk: its first token, tokens, slot of the state before the sequence's tokens in this step; the first of these
tokens, and their end; a slot that the state after the chunk is stored in as well, or 0."""
SEQUENCE_FIELDS = 3
"""Of a sequence: its first chunk, chunks, slot of the state after it. It is the one before it, but for `Runs`."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The lists of `cut` on the device."""

    chunks: torch.Tensor
    sequences: torch.Tensor


@dataclass(frozen=True, slots=True)
class Runs:
    """The first tokens of a step on the device, of which each decode is a sequence of one, and each draft a sequence of
    several (`StateWork.runs`), int32[B] each."""

    slots: torch.Tensor
    """Slots of the states after each token."""
    lengths: torch.Tensor
    """Of the sequence that begins with each token, in tokens; 0 where none does."""

    @classmethod
    def of_ones(cls, slots: torch.Tensor) -> Runs:
        """Sequences of one token each, with states at int32 slots[B]."""
        return cls(slots, torch.ones_like(slots))

    def cut(self) -> Cut:
        """The tokens as chunks of one, whose states are all stored. What is no sequence is one of no tokens."""
        slots, lengths = self.slots, self.lengths
        begins = lengths > 0
        at, one = torch.arange(len(slots), dtype=torch.int32, device=slots.device), torch.ones_like(slots)
        goes_on = torch.cat((~begins[1:], torch.zeros_like(begins[:1])))
        chunks = torch.stack((at, one, slots * begins, at, at + lengths, slots * goes_on), dim=1)
        last = slots[(at + lengths - 1).clamp(min=0).long()]
        return Cut(chunks, torch.stack((at, lengths, last * begins), dim=1))


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
