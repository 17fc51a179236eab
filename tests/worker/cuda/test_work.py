"""Work lists: every query sees every key it should exactly once, shared or not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.worker.cuda.attention.decodes import Cuts, DecodePlanner, Room
from radixrt.worker.cuda.attention.work import Merges, Tiling, make_items, make_merges, sequence_tiles
from radixrt.worker.execution.attention import first_key
from radixrt.worker.execution.prefix_sharing import Cost
from tests.worker.test_sharing import Leased, leased_batches, pages_of

sequences = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 70)), min_size=1, max_size=12)


def reads(
    lists: list[np.ndarray], merges: Merges, order: np.ndarray | None
) -> dict[int, list[tuple[int, int, int, int]]]:
    """By query: (row, first key, key after the last, place in its tile) of what it reads. Checks the bookkeeping."""
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    writers: dict[int, int] = {}
    direct = set()
    for query, size, row, begin, end, _, partial, is_direct in np.concatenate(lists).tolist():
        assert begin < end and size >= 1
        for i in range(size):
            who = query + i if order is None else int(order[query + i])
            found.setdefault(who, []).append((row, begin, end, i))
            if is_direct:
                assert who not in direct, "two write one result"
                direct.add(who)
            else:
                assert partial + i not in writers, "two write one partial result"
                writers[partial + i] = who
    listed = {}
    for query, first, count in merges.queries.tolist():
        if count:
            assert query not in listed and count > 1
            listed[query] = merges.entries[first : first + count].tolist()
    for query, pieces in found.items():
        if query in direct:
            assert len(pieces) == 1 and query not in listed
        else:
            assert sorted(listed.pop(query)) == sorted(p for p, who in writers.items() if who == query)
    assert not listed
    assert max(writers, default=-1) < merges.partials
    return found


@settings(deadline=None, max_examples=150)
@given(
    sequences, st.one_of(st.none(), st.integers(1, 300)), st.sampled_from([1, 16, 32]), st.sampled_from([1, 7, 200]),
    st.sampled_from([{}, {"single": True}, {"fixed": 64, "single": True}]), st.booleans(),
)  # fmt: skip
def test_every_key_once(tokens, window, queries, items, how, chunked):
    starts, counts = (np.array(x, dtype=np.int32) for x in zip(*tokens, strict=True))
    rows = np.arange(100, 100 + len(tokens), dtype=np.int32)
    tiling = Tiling(queries, 16, 32, items, **how)
    first = 5 + np.cumsum(counts) - counts
    tiles = sequence_tiles(rows, starts, counts, first, window, queries, chunked)
    work, ends = make_items(tiles, tiling)
    found = reads([work.items], make_merges([work.items]), None)
    assert (how or len(work) <= tiling.most_items(len(tiles))) and ends[-1] == len(work) - 1
    assert (work.starts is None) == bool(how)
    assert (work.items[:, 4] <= work.items[:, 5] + work.items[:, 1]).all(), "no key lies after its tile"
    query = 5
    for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
        for position in range(start, start + count):
            low = first_key(position, window, chunked)
            keys = []
            for of, begin, end, _ in found.pop(query):
                assert of == row
                keys += range(max(begin, low), min(end, position + 1))
            assert sorted(keys) == list(range(low, position + 1))
            query += 1
    assert not found


@pytest.mark.parametrize("lengths", [[1], [100_000], [1024] * 256, [5000] * 3, list(range(40, 3000, 17))])
def test_work_is_even(lengths):
    tiling = Tiling(1, 64, 128, 132)
    ends = np.array(lengths)
    rows = np.arange(len(ends), dtype=np.int32)
    tiles = sequence_tiles(rows, ends - 1, np.ones_like(rows), rows, None, 1)
    work, _ = make_items(tiles, tiling)
    assert len(work.starts) == 133 and work.starts[0] == 0 and work.starts[-1] == len(work)
    blocks = -(-(work.items[:, 4] - work.items[:, 3]) // 64)
    done = np.diff(np.concatenate([[0], np.cumsum(blocks)])[work.starts])
    everything = int((-(-ends // 64) + 1).sum())
    busy = max(1, min(132, everything // 2))
    assert 7 / 8 * busy <= (done > 0).sum() <= busy
    assert done.max() <= 9 / 8 * everything / busy + 1


def test_single_parts_are_about_as_long_as_each_other():
    """Two for each program that runs at once."""
    ends = np.array([5000, 5000, 700])
    rows = np.arange(3, dtype=np.int32)
    tiles = sequence_tiles(rows, ends - 1, np.ones_like(rows), rows, None, 1)
    work, _ = make_items(tiles, Tiling(1, 64, 128, 10, single=True))
    assert work.starts is None and 18 <= len(work) <= 22
    assert (work.items[:, 4] - work.items[:, 3]).max() <= 10700 / 20 + 64


@pytest.mark.parametrize("more", [0, 200])
def test_what_divides_evenly_is_not_cut(more):
    """Two of 256 about equal sequences to each of 128 programs, though there are 132: nothing is merged."""
    rows = np.arange(256, dtype=np.int32)
    starts = 1023 + np.random.default_rng(0).integers(0, more + 1, 256)
    tiles = sequence_tiles(rows, starts, np.ones_like(rows), rows, None, 1)
    work, _ = make_items(tiles, Tiling(1, 64, 128, 132))
    assert len(work) == 256 and not len(make_merges([work.items]).queries)


@settings(deadline=None, max_examples=150)
@given(leased_batches(), st.data())
def test_decodes_read_their_pages_once(batch: list[Leased], data: st.DataObject):
    """Through many steps, with requests that come and go: by pages, whoever's row they are read from."""
    cost = Cost(key_bytes=10, partial_bytes=data.draw(st.sampled_from([1, 200])), tile=8)
    cuts = Cuts(Tiling(2, 16, 32, 20), Tiling(8, 16, 32, 12), cost)
    planner = DecodePlanner({None, 40}, cuts)
    room = Room.of(len(batch), cuts)
    running = list(batch)
    for _ in range(data.draw(st.integers(1, 5))):
        rows = np.array([r.row for r in running], dtype=np.int32)
        positions = np.array([r.position for r in running], dtype=np.int32)
        work = planner.plan(tuple(running), [r.lease.path() for r in running], rows, positions, room)[None]
        assert room.holds(work)
        merges = Merges(work.merges, work.entries, 1 << 30)
        found = reads([work.few.items, work.many.items], merges, work.order)
        by_row = {r.row: r for r in batch}
        for place, request in enumerate(running):
            seen = [page for row, b, e, _ in found.pop(place) for page in pages_of(by_row[row])[b:e]]
            assert sorted(seen) == sorted(pages_of(request)[: request.position + 1])
        assert not found
        for request in running:
            request.position += 1
        if data.draw(st.booleans()) and len(running) > 1:
            running.pop(data.draw(st.integers(0, len(running) - 1)))
        elif data.draw(st.booleans()):
            for request in running:
                request.position += 70
    assert planner.read_keys <= planner.plain_keys


@pytest.mark.parametrize("in_a_graph", [True, False])
def test_branches_that_leave_a_path_one_by_one_share_what_fits(in_a_graph):
    """A segment for each of them would be more work than there is room for."""
    cost = Cost(key_bytes=2048, partial_bytes=1 << 15, tile=16)
    cuts = Cuts(Tiling(4, 64, 128, 132), Tiling(16, 128, 256, 33), cost)
    size, turn = 64, 500
    paths = [tuple((n, turn * n) for n in range(1, end + 2)) for end in range(size)]
    rows = np.arange(size, dtype=np.int32)
    positions = np.array([path[-1][1] for path in paths], dtype=np.int32)
    planner, room = DecodePlanner({None}, cuts), Room.of(size, cuts)
    work = planner.plan((), paths, rows, positions, room if in_a_graph else None)[None]
    assert room.holds(work) and work.shared
    found = reads([work.few.items, work.many.items], Merges(work.merges, work.entries, 1 << 30), work.order)
    for place, position in enumerate(positions.tolist()):
        assert all(row == place or end <= positions[row] for row, _, end, _ in found[place]), "its pages are others"
        keys = sorted((begin, end) for _, begin, end, _ in found[place])
        assert [0, *(end for _, end in keys)] == [*(begin for begin, _ in keys), position + 1]
    assert planner.read_keys < planner.plain_keys / 8
