"""Work lists: every query sees every key it should exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.worker.cuda.work import Tiling, plan_work

sequences = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 70)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=150)
@given(sequences, st.one_of(st.none(), st.integers(1, 300)), st.sampled_from([1, 16, 32]), st.sampled_from([1, 7, 200]))
def test_every_key_once(tokens, window, queries, items):
    starts, counts = (np.array(x, dtype=np.int32) for x in zip(*tokens, strict=True))
    rows = np.arange(100, 100 + len(tokens), dtype=np.int32)
    tiling = Tiling(queries, 16, 32, items)
    work = plan_work(rows, starts, counts, 5 + np.cumsum(counts) - counts, window, tiling)
    seen = {}
    partials = {}
    for item in work.items.tolist():
        query, size, row, begin, end, position, partial, direct = item
        assert 1 <= size <= queries and begin < end
        for i in range(size):
            visible = range(max(begin, 0 if window is None else position + i - window + 1), min(end, position + i + 1))
            keys = seen.setdefault(query + i, (row, position + i, []))
            assert keys[:2] == (row, position + i)
            keys[2].extend(visible)
            if not direct:
                assert partial + i not in partials, "two write one partial result"
                partials[partial + i] = query + i
    assert sorted(partials) == list(range(work.partials))
    merged = {query: (base, parts, distance) for query, base, parts, distance, _ in work.merges.tolist()}
    assert all(last == base + (parts - 1) * distance for _, base, parts, distance, last in work.merges.tolist())
    assert len(merged) == len(work.merges)
    query = 5
    for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
        for position in range(start, start + count):
            first = 0 if window is None else max(0, position - window + 1)
            assert seen[query] == (row, position, list(range(first, position + 1)))
            base, parts, distance = merged.pop(query, (0, 0, 0))
            assert parts != 1
            assert [partials[base + p * distance] for p in range(parts)] == [query] * parts
            query += 1
    assert not merged
    tiles = int((-(-counts // queries)).sum())
    assert len(work.items) <= tiling.most_items(tiles)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 100_000), (256, 1024), (3, 5000)])
def test_work_is_even(batch, length):
    tiling = Tiling(1, 64, 128, 132)
    rows = np.arange(batch, dtype=np.int32)
    work = plan_work(rows, np.full(batch, length - 1), np.ones(batch, dtype=np.int32), rows, None, tiling)
    sizes = work.items[:, 4] - work.items[:, 3]
    assert sizes.max() <= max(128, 2 * batch * length / 132 + 64)
