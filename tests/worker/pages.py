"""Sequences on random pages, for tests of attention."""

from __future__ import annotations

import numpy as np

from radixrt.worker.plan import Plan


def make_plan(rng: np.random.Generator, page_size: int, tokens: list[tuple[int, int]]) -> tuple[Plan, np.ndarray]:
    """Make sequences of (cached, new) tokens on random pages. Returns (plan, page table)."""
    held = [-(-(start + count) // page_size) for start, count in tokens]
    pages = rng.permutation(np.arange(1, sum(held) + 1)).astype(np.int32)
    table = np.zeros((len(tokens), max(held)), dtype=np.int32)
    slots = []
    for row, ((start, count), n) in enumerate(zip(tokens, held, strict=True)):
        table[row, :n], pages = pages[:n], pages[n:]
        page, offset = np.divmod(np.arange(start, start + count), page_size)
        slots.append(table[row, page] * page_size + offset)
    starts, counts = (np.array(x, dtype=np.int32) for x in zip(*tokens, strict=True))
    rows, ones = np.arange(len(tokens), dtype=np.int32), np.ones(len(tokens), dtype=np.int32)
    ids = np.zeros(counts.sum(), dtype=np.int32)
    slots, none = np.concatenate(slots).astype(np.int32), np.zeros((3, 0), dtype=np.int32)
    plan = Plan(1, (), rows, starts, counts, ids, slots, ones, ones.astype(bool), none)
    return plan, table
