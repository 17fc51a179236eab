"""A store of KV blocks: what is written is read again, by whom, and what makes room."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from contextlib import closing

import numpy as np
import pytest

from radixrt.messages.namespace import Namespace
from radixrt.worker.disk import NewBlock, StoreState
from tests.waiting import eventually
from tests.worker.disk.faults import Hanging, NoHoles
from tests.worker.disk.stores import (
    QUICK,
    SPACE,
    WIDTH,
    bytes_of,
    check_truth,
    content,
    drained,
    extents,
    got,
    ids_of,
    opened,
    put,
    segments,
)

MIB = 1 << 20


def test_blocks_come_back_after_a_restart_with_their_ids_and_parents_first(tmp_path):
    store = opened(tmp_path)
    assert store.blocks() == []
    first, path = put(store, NewBlock("kv", SPACE, None, 0, ids_of(1, 2, 3, 4), 5.0))
    second, longer = put(store, NewBlock("kv", SPACE, first.number, 4, ids_of(5), 6.0), path, rows=1)
    state, _ = put(store, NewBlock("state", SPACE, second.number, 5, b"", 7.0), longer, rows=2)
    changes = drained(store)
    assert [x.ok for x in changes.finished] == [True] * 3 and changes.added == [] and changes.removed == []
    store.close()

    blocks = check_truth(tmp_path)
    assert [(x.number, x.kind, x.parent, x.start, x.stop, x.value) for x in blocks] == [
        (first.number, "kv", None, 0, 4, 5.0),
        (second.number, "kv", first.number, 4, 5, 6.0),
        (state.number, "state", second.number, 5, 5, 7.0),
    ]
    assert [x.ids for x in blocks] == [ids_of(1, 2, 3, 4), ids_of(5), b""]
    assert {x.namespace for x in blocks} == {SPACE}


@pytest.mark.parametrize("slots", [range(3, 9), [9, 2, 30, 5, 4, 31]])
def test_rows_are_taken_from_and_put_into_any_slots(tmp_path, slots):
    store = opened(tmp_path)
    pool = content(b"pool", 32)
    job = store.write(NewBlock("kv", SPACE, None, 0, ids_of(*range(6)), 0.0), pool, slots)
    drained(store)
    out = np.zeros_like(pool)
    store.read(job.number, out, [7, 1, 20], first=2)
    (read,) = drained(store).finished
    assert read.ok and read.nbytes == 3 * WIDTH
    np.testing.assert_array_equal(out[[7, 1, 20]], pool[list(slots)[2:5]])
    assert not out[[x for x in range(32) if x not in (7, 1, 20)]].any()
    store.close()


def test_a_read_beyond_a_block_or_of_another_width_is_a_miss_that_drops_nothing(tmp_path):
    store = opened(tmp_path)
    job, path = put(store, NewBlock("kv", SPACE, None, 0, ids_of(1), 0.0))
    drained(store)
    out = np.zeros((8, WIDTH), np.uint8)
    assert not store.read(job.number, out, range(4), first=1).ok and store.flush()
    assert not store.read(job.number, np.zeros((4, WIDTH - 1), np.uint8), range(4)).ok and store.flush()
    assert store.read(job.number + 1, out, range(4)) and store.flush()
    assert [x.ok for x in store.poll().finished] == [False] * 3
    np.testing.assert_array_equal(got(store, job.number), content(path, 4))
    store.close()


def test_what_a_caller_gets_wrong_raises(tmp_path):
    store = opened(tmp_path)
    block = NewBlock("kv", SPACE, None, 0, ids_of(1), 0.0)
    with pytest.raises(ValueError, match="slots"):
        store.write(block, np.zeros((4, 8), np.uint8), [4])
    with pytest.raises(ValueError, match="uint8"):
        store.write(block, np.zeros((4, 8), np.int8), [0])
    with pytest.raises(ValueError, match="without rows"):
        store.write(block, np.zeros((4, 8), np.uint8), [])
    store.close()


def test_a_child_of_a_block_that_failed_or_is_unknown_fails(tmp_path):
    store = opened(tmp_path)
    job, _ = put(store, NewBlock("kv", SPACE, 12345, 4, ids_of(1), 0.0))
    child, _ = put(store, NewBlock("kv", SPACE, job.number, 5, ids_of(1), 0.0))
    drained(store)
    assert job.ok is False and child.ok is False
    store.close()
    assert check_truth(tmp_path) == []


def test_the_least_valuable_leaf_goes_first_and_the_bound_holds(tmp_path):
    size = 8 * MIB
    store = opened(tmp_path, size)
    store.blocks()
    values, parents, paths, number = {}, {}, {None: b""}, None
    rng = np.random.default_rng(1)
    for i in range(40):
        parent = number if i % 3 else None
        value = float(rng.integers(1000)) if i < 12 else 2000.0 + i
        job, path = put(store, NewBlock("kv", SPACE, parent, i % 3, ids_of(i), value), paths[parent], rows=500)
        changes = drained(store)
        assert job.ok
        number = job.number
        values[number], parents[number], paths[number] = value, parent, path
        for gone in changes.removed:  # in this order
            leaves = values.keys() - {parents[x] for x in values}
            assert gone in leaves
            assert values[gone] == min(values[x] for x in leaves)
            del values[gone]
        assert bytes_of(tmp_path) <= size
    assert 10 < len(values) < 20
    store.close()
    assert {x.number for x in check_truth(tmp_path, size)} == values.keys()


def test_what_is_worth_less_than_all_that_is_there_is_not_written(tmp_path):
    store = opened(tmp_path, 8 * MIB)
    for i in range(14):
        put(store, NewBlock("kv", SPACE, None, 0, ids_of(i), 10.0), rows=500)
    drained(store)
    worse, _ = put(store, NewBlock("kv", SPACE, None, 0, ids_of(100), 9.0), rows=2000)
    assert drained(store).removed == [] and worse.why == "no room"
    better, _ = put(store, NewBlock("kv", SPACE, None, 0, ids_of(101), 11.0), rows=2000)
    assert drained(store).removed and better.ok
    huge, _ = put(store, NewBlock("kv", SPACE, None, 0, ids_of(102), 12.0), rows=9000)
    assert drained(store).removed == [] and huge.ok is False
    store.close()


def test_touched_blocks_outlive_others_even_after_a_restart(tmp_path):
    store = opened(tmp_path, 8 * MIB)
    jobs = [put(store, NewBlock("kv", SPACE, None, 0, ids_of(i), 1.0), rows=500)[0] for i in range(12)]
    drained(store)
    store.touch([jobs[3].number], 50.0)
    store.close()
    store = opened(tmp_path, 8 * MIB)
    assert {x.number: x.value for x in store.blocks()}[jobs[3].number] == 50.0
    for i in range(20):
        put(store, NewBlock("kv", SPACE, None, 0, ids_of(100 + i), 10.0), rows=500)
        drained(store)
    assert got(store, jobs[3].number, 500) is not None
    assert got(store, jobs[2].number, 500) is None
    store.close()


def test_deleting_takes_what_comes_after_and_frees_its_bytes(tmp_path):
    store = opened(tmp_path)
    first, path = put(store, NewBlock("kv", SPACE, None, 0, ids_of(1), 0.0), rows=500)
    second, longer = put(store, NewBlock("kv", SPACE, first.number, 1, ids_of(2), 0.0), path, rows=500)
    third, _ = put(store, NewBlock("state", SPACE, second.number, 2, b"", 0.0), longer, rows=500)
    drained(store)
    (segment,) = segments(tmp_path)
    before = segment.stat().st_blocks
    job = store.delete([second.number, 99])
    changes = drained(store)
    assert job.ok and job.nbytes == 2 * 503808
    assert before - segment.stat().st_blocks == job.nbytes // 512
    assert sorted(changes.removed) == sorted([second.number, third.number])
    store.close()
    assert [x.number for x in check_truth(tmp_path)] == [first.number]


def test_a_tenants_blocks_are_deleted_of_all_fingerprints_and_nobody_elses(tmp_path):
    spaces = [Namespace("ann", "m", salt="s\n1"), Namespace("ann"), Namespace("anna", "m"), Namespace("", "ann")]
    stores = [opened(tmp_path, fingerprint=x) for x in ("one", "two")]
    for store in stores:
        for space in spaces:
            first, path = put(store, NewBlock("kv", space.key, None, 0, ids_of(1), 0.0), rows=50)
            put(store, NewBlock("kv", space.key, first.number, 1, ids_of(2), 0.0), path, rows=50)
        drained(store)
    held = sum(x.any() for x in _bytes_of_segments(tmp_path))
    job = stores[0].delete_namespaces("ann\n")
    drained(stores[0])
    assert job.ok and job.nbytes == 8 * 53248
    eventually(lambda: len(stores[1].poll().removed) == 4)
    for store in stores:
        store.close()
        left = opened(tmp_path, fingerprint="one" if store is stores[0] else "two")
        assert {x.namespace for x in left.blocks()} == {Namespace("anna", "m").key, Namespace("", "ann").key}
        left.close()
    assert held == 2 * sum(x.any() for x in _bytes_of_segments(tmp_path)) == 16
    assert b"ann\nm" not in (tmp_path / "index-1.sqlite").read_bytes()


def test_what_is_being_written_is_deleted_with_its_namespace(tmp_path):
    store = opened(tmp_path)
    jobs = [put(store, NewBlock("kv", SPACE, None, 0, ids_of(i), 0.0), rows=2000)[0] for i in range(20)]
    job = store.delete_namespaces("tenant\n")
    drained(store)
    assert job.ok and store.used == 0
    assert all(got(store, x.number, 2000) is None for x in jobs)
    store.close()
    assert check_truth(tmp_path) == []


def test_files_are_the_owners_alone(tmp_path):
    folder = tmp_path / "a" / "kv"
    old = os.umask(0)
    try:
        store = opened(folder)
        put(store, NewBlock("kv", SPACE, None, 0, ids_of(1), 0.0))
        drained(store)
    finally:
        os.umask(old)
    for home, folders, names in os.walk(folder):
        assert all(stat.S_IMODE(os.stat(f"{home}/{x}").st_mode) == 0o700 for x in folders)
        assert all(stat.S_IMODE(os.stat(f"{home}/{x}").st_mode) == 0o600 for x in names)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    store.close()
    assert not list(folder.glob("*.lock"))


def test_blocks_of_a_fingerprint_that_nobody_uses_go_first_and_are_never_seen(tmp_path):
    other = opened(tmp_path, 8 * MIB, fingerprint="old")
    for i in range(6):
        put(other, NewBlock("kv", SPACE, None, 0, ids_of(i), 1e9), rows=500)
    drained(other)
    other.close()
    store = opened(tmp_path, 8 * MIB, limits=QUICK._replace(unused_seconds=0.0))
    assert store.blocks() == [] and store.used == 6 * 503808
    for i in range(11):
        put(store, NewBlock("kv", SPACE, None, 0, ids_of(i), 1.0), rows=500)
    assert drained(store).removed == []
    store.close()
    left = opened(tmp_path, 8 * MIB, fingerprint="old")
    assert len(left.blocks()) < 6
    left.close()


def test_a_fingerprint_that_nobody_used_for_long_is_dropped(tmp_path):
    other = opened(tmp_path, fingerprint="old")
    put(other, NewBlock("kv", SPACE, None, 0, ids_of(1), 1e9))
    drained(other)
    other.close()
    store = opened(tmp_path, limits=QUICK._replace(forget_seconds=0.1))
    eventually(lambda: store.used == 0 and not segments(tmp_path))
    store.close()


def test_a_floor_of_free_space_is_kept(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    store = opened(tmp_path, 1 << 50, min_free=free - 6 * MIB)
    for i in range(40):
        put(store, NewBlock("kv", SPACE, None, 0, ids_of(i), float(i)), rows=500)
        drained(store)
    assert 0 < store.used < 8 * MIB
    store.close()


def test_a_smaller_size_after_a_restart_is_kept_to(tmp_path):
    store = opened(tmp_path, 32 * MIB)
    for i in range(30):
        put(store, NewBlock("kv", SPACE, None, 0, ids_of(i), float(i)), rows=500)
    drained(store)
    store.close()
    store = opened(tmp_path, 8 * MIB)
    store.blocks()
    eventually(lambda: bytes_of(tmp_path) <= 8 * MIB)
    store.close()
    assert max(x.value for x in check_truth(tmp_path, 8 * MIB)) == 29.0


def test_without_holes_segments_are_given_back_as_a_whole(tmp_path):
    size = 16 * MIB
    store = opened(tmp_path, size, files=NoHoles())
    alive = set()
    for i in range(60):
        job, _ = put(store, NewBlock("kv", SPACE, None, 0, ids_of(i), float(i)), rows=500)
        changes = drained(store)
        assert job.ok
        alive = (alive | {job.number}) - set(changes.removed)
        assert bytes_of(tmp_path) <= size
    assert len(alive) > 12
    assert all(got(store, x, 500) is not None for x in alive)
    store.delete_namespaces("")
    drained(store)
    assert not any(any(x.read_bytes()) for x in segments(tmp_path))
    store.close()


def test_rates_and_the_backlog_are_measured(tmp_path):
    store = opened(tmp_path, limits=QUICK._replace(backlog_bytes=10 * MIB))
    assert store.rates() == (0.0, 0.0)
    rows = content(b"", 2000)
    jobs = [store.write(NewBlock("kv", SPACE, None, 0, ids_of(i), 0.0), rows, range(2000)) for i in range(40)]
    assert store.backlog <= 10 * MIB
    drained(store)
    assert store.backlog == 0 and {x.why for x in jobs} == {"", "backlog"}
    assert got(store, jobs[0].number, 2000) is not None
    assert all(x > 0 for x in store.rates())
    assert store.state is StoreState.OK and extents(store.blocks()) == 0
    store.close()


@pytest.mark.parametrize("size, path, says", [(1000, "kv", "kv_disk_size"), (64 * MIB, "file/kv", "kv_disk_path")])
def test_a_store_that_cannot_be_says_which_setting(tmp_path, size, path, says):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=says):
        opened(tmp_path / path, size)


def test_files_of_others_in_the_folder_are_left_alone(tmp_path):
    names = ["notes.txt", "fp-00/x.kv", "other.sqlite", "x.lock", "fp-" + "0" * 32 + "/mine"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    store = opened(tmp_path)
    put(store, NewBlock("kv", SPACE, None, 0, ids_of(1), 0.0))
    drained(store)
    store.close()
    assert [(tmp_path / x).read_text() for x in names] == ["mine"] * 5


def _bytes_of_segments(folder) -> list[np.ndarray]:
    """The bytes of each block, of blocks of 50 rows; zeros for what was freed."""
    return [x for path in segments(folder) for x in np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 53248)]


def test_a_block_that_is_written_before_its_parent_waits_for_it(tmp_path):
    """Writers are threads: the second may be quicker."""
    files = Hanging(reads=False)
    store = opened(tmp_path, files=files, limits=QUICK._replace(slow_seconds=60.0))
    store.blocks()
    other = opened(tmp_path)
    files.hangs = True
    first, path = put(store, NewBlock("kv", SPACE, None, 0, ids_of(1), 0.0))
    assert files.hanging.acquire(timeout=10)
    files.hangs = False
    second, _ = put(store, NewBlock("kv", SPACE, first.number, 1, ids_of(2), 0.0), path)
    time.sleep(0.2)
    assert second.ok is None and other.blocks() == []
    files.go()
    drained(store)
    assert first.ok and second.ok
    added = []
    eventually(lambda: added.extend(x.number for x in other.poll().added) or len(added) == 2)
    assert added == [first.number, second.number]
    store.close()
    other.close()
    assert len(check_truth(tmp_path)) == 2


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_bytes_that_are_right_but_of_another_block_do_not_verify(tmp_path, key):
    """As if an index that was damaged named them: their seal stands beside them, and is that of their own path."""
    store = opened(tmp_path, key=key)
    first, _ = put(store, NewBlock("kv", SPACE, None, 0, ids_of(1), 0.0))
    other, path = put(store, NewBlock("kv", "another\nmodel\n\n", None, 0, ids_of(1), 0.0))
    drained(store)
    store.close()
    with closing(sqlite3.connect(tmp_path / "index-1.sqlite", isolation_level=None)) as db:
        db.execute(
            "UPDATE parts SET (segment, offset, extent, nbytes, seal) = "
            "(SELECT segment, offset, extent, nbytes, seal FROM parts WHERE number = ?) WHERE number = ?",
            (other.number, first.number),
        )
    store = opened(tmp_path, key=key)
    store.blocks()
    assert got(store, first.number) is None
    np.testing.assert_array_equal(got(store, other.number), content(path, 4))
    store.close()
