"""How memory is divided into KV pages and recurrent states, in bytes. It computes with integers only."""

from __future__ import annotations

STATE_SHARE = 0.5
"""Share of the memory for a cache, on the device or the host, that recurrent states take. One state takes as much as
the KV of thousands of tokens, and a prefix can be continued only where there is one."""
STATES = 8
"""The most recurrent states that are allocated by default, and the most in host memory, as a multiple of the most
running requests: beyond that, pages are worth more."""
GRAPH_BYTES = 1 << 30
"""Bytes that are reserved for CUDA graphs, beside their logits and `piecewise_graphs.kept_bytes`."""


def cache_bytes(free: int, total: int, share: float, reserved: int) -> int:
    """The memory of a GPU for KV pages and recurrent states, if `share` of its `total` bytes are used, of which `free`
    are free beside the weights, less `reserved` bytes. Negative if there is none."""
    return int(free - reserved - (1 - share) * total)


def num_states(memory: int, state_bytes: int, most: int) -> int:
    """The recurrent states, of `state_bytes` each and at most so many, that share `memory` bytes with pages."""
    return min(int(STATE_SHARE * memory) // state_bytes, most)


def divide(memory: int, token_bytes: int, state_bytes: int, most: int) -> tuple[int, int]:
    """(recurrent states, tokens) that fit in `memory` bytes, without the null slots: `num_states` of `state_bytes`
    each (0: the model has none), and as many tokens of `token_bytes` as fit beside them; not one of either: (0, 0)."""
    states = max(1, num_states(memory, state_bytes, most)) if state_bytes else 0
    tokens = (memory - (states + 1) * state_bytes if states else memory) // token_bytes
    return (states, tokens) if tokens > 0 else (0, 0)


def row_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """Bytes of the counts of tokens that penalties need, and as many of logits of CUDA graphs."""
    return 4 * max_num_seqs * vocab_size
