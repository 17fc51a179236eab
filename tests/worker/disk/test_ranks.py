"""The stores of a tensor-parallel group: each rank has its part of a block, and a block is there when all have."""

from __future__ import annotations

import numpy as np
import pytest

from radixrt.worker.disk import NewBlock
from tests.waiting import eventually
from tests.worker.disk.stores import QUICK, SPACE, content, drained, got, ids_of, opened, segments


@pytest.fixture
def group(tmp_path):
    stores = [opened(tmp_path, rank=rank, ranks=3) for rank in range(3)]
    yield stores
    for store in stores:
        store.close()


def block(i: int, parent: int | None = None) -> NewBlock:
    return NewBlock("kv", SPACE, parent, 0, ids_of(i), float(i))


def written(group, i: int, parent: int | None = None, but: int = -1) -> int:
    """The number of a block that all ranks but one write."""
    job = group[0].write(block(i, parent), content(b"%d" % i, 4, 0), range(4))
    for rank in (1, 2):
        if rank != but:
            group[rank].write_part(job.number, content(b"%d" % i, 4, rank), range(4))
    return job.number


def test_each_rank_reads_its_own_part_after_all_have_written(group, tmp_path):
    first = written(group, 1)
    second = written(group, 2, first)
    for store in group:
        assert all(x.ok for x in drained(store).finished)
    for rank, store in enumerate(group):
        np.testing.assert_array_equal(got(store, first), content(b"1", 4, rank))
        np.testing.assert_array_equal(got(store, second), content(b"2", 4, rank))
    assert len(segments(tmp_path)) == 3
    late = opened(tmp_path, rank=1, ranks=3)
    np.testing.assert_array_equal(got(late, second), content(b"2", 4, 1))
    late.close()
    other = opened(tmp_path, rank=0, ranks=2)
    assert other.blocks() == []
    other.close()


def test_parts_that_come_before_their_block_wait_for_it(group):
    number = next(group[0]._numbers) + 1
    for rank in (1, 2):
        group[rank].write_part(number, content(b"1", 4, rank), range(4))
    assert not group[1].flush(0.1)
    assert group[0].write(block(1), content(b"1", 4, 0), range(4)).number == number
    assert all(x.ok for store in group for x in drained(store).finished)
    np.testing.assert_array_equal(got(group[2], number), content(b"1", 4, 2))


def test_a_block_that_a_rank_does_not_write_is_never_there(group, tmp_path):
    for store in group:
        store.close()
    limits = QUICK._replace(ranks_seconds=0.5)
    group[:] = [opened(tmp_path, rank=rank, ranks=3, limits=limits) for rank in range(3)]
    number = written(group, 1, but=2)
    other = opened(tmp_path, rank=0, ranks=3)
    assert other.blocks() == []
    (job,) = drained(group[0]).finished
    assert job.ok is False and "ranks" in job.why
    eventually(lambda: group[0].used == 0)
    assert [got(x, number) for x in group] == [None] * 3
    assert other.poll().added == []
    late = group[2].write_part(number, content(b"1", 4, 2), range(4))
    drained(group[2])
    assert late.ok is False
    other.close()


def test_a_block_whose_part_is_lost_on_one_rank_is_gone_on_all(group, tmp_path):
    number = written(group, 1)
    for store in group:
        drained(store)
    for path in segments(tmp_path):
        data = bytearray(path.read_bytes())
        if bytes(data[:1000]) == content(b"1", 4, 1)[0].tobytes():
            data[3999] ^= 128
            path.write_bytes(data)
    assert got(group[1], number) is None
    eventually(lambda: number in group[0].poll().removed)
    assert got(group[0], number) is None


def test_a_group_that_died_amid_writing_leaves_nothing(tmp_path):
    limits = QUICK._replace(ranks_seconds=100.0)
    group = [opened(tmp_path, rank=rank, ranks=3, limits=limits) for rank in range(3)]
    whole = written(group, 1)
    for store in group:
        drained(store)
    written(group, 2, whole, but=2)
    assert drained(group[1]).finished[0].ok
    for store in group:  # without a word, as if they had been killed
        store._manager._end = store._manager._lose
        store.close()
    store = opened(tmp_path, rank=0, ranks=3)
    assert [x.number for x in store.blocks()] == [whole]
    eventually(lambda: store.used == 3 * 4096)
    store.close()
