"""Several processes with one folder, and processes that are killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from radixrt.worker.disk import NewBlock
from tests.waiting import eventually
from tests.worker.disk.stores import (
    SPACE,
    WIDTH,
    bytes_of,
    check_truth,
    content,
    drained,
    got,
    ids_of,
    opened,
    path_of,
    put,
    segments,
)

SIZE = 6 << 20


def started(folder: Path, seed: int, wait: bool = True) -> subprocess.Popen:
    args = [sys.executable, "-m", "tests.worker.disk.writer", str(folder), str(SIZE), str(seed)]
    process = subprocess.Popen(args, stdout=subprocess.PIPE)
    if wait:
        assert process.stdout.readline() == b"open\n"
    return process


def killed(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def kill_often(folder: Path, times: int, seed: int) -> int:
    """Kill a writer at random points, and look at what it left each time. Returns how many blocks there were."""
    rng = random.Random(seed)
    blocks = []
    for i in range(times):
        process = started(folder, seed * 1000 + i, wait=rng.random() < 0.9)
        time.sleep(0.6 * rng.random())
        killed(process)
        assert bytes_of(folder) <= SIZE
        blocks += check_truth(folder, SIZE)
        assert len(list(folder.glob("*.lock"))) == 0 and len(list(folder.glob("*.new"))) <= 1
    return len(blocks)


def test_the_index_is_the_truth_after_a_writer_was_killed(tmp_path):
    assert kill_often(tmp_path, 4, seed=1) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_index_is_the_truth_after_200_kills(tmp_path):
    assert kill_often(tmp_path, 200, seed=2) > 0


def test_what_other_processes_write_arrives_and_can_be_read(tmp_path):
    store = opened(tmp_path, SIZE)
    assert store.blocks() == []
    writers = [started(tmp_path, seed) for seed in (1, 2)]
    paths: dict[int, bytes] = {}
    rows: dict[int, int] = {}
    read = 0
    until = time.monotonic() + 1.0
    while time.monotonic() < until or read < 20:
        changes = store.poll()
        for block in changes.added:
            paths[block.number] = path_of(block, b"" if block.parent is None else paths[block.parent])
            rows[block.number] = block.nbytes // WIDTH
        for block in changes.added[-3:]:
            found = got(store, block.number, rows[block.number])
            if found is not None:  # the others evict what they will
                np.testing.assert_array_equal(found, content(paths[block.number], rows[block.number]))
                read += 1
        assert bytes_of(tmp_path) <= SIZE
        time.sleep(0.002)
    killed(writers[0])
    own, path = put(store, NewBlock("kv", SPACE, None, 0, ids_of(7), 1e9), rows=300)
    assert store.flush(30) and own.ok
    killed(writers[1])
    eventually(lambda: not [x for x in tmp_path.glob("*.lock") if x.stat().st_size == 0][1:])  # the dead are found
    np.testing.assert_array_equal(got(store, own.number, 300), content(path, 300))
    store.close()
    assert own.number in {x.number for x in check_truth(tmp_path, SIZE)}


def test_files_that_the_index_does_not_know_are_removed_unless_their_writer_lives(tmp_path):
    store = opened(tmp_path)
    put(store, NewBlock("kv", SPACE, None, 0, ids_of(1), 0.0))
    drained(store)
    (own,) = segments(tmp_path)
    stray = own.with_name("0123456789-1.kv")
    stray.write_bytes(bytes(100))
    living = own.with_name(own.name.replace("-1.kv", "-9.kv"))
    living.write_bytes(bytes(100))
    eventually(lambda: not stray.exists())
    assert living.exists() and own.exists()
    store.close()
    check_truth(tmp_path)
    assert not living.exists()


def test_a_store_that_was_behind_for_long_learns_everything(tmp_path, monkeypatch):
    monkeypatch.setattr("radixrt.worker.disk.index._KEPT_REMOVALS", 3)
    slow = opened(tmp_path)
    slow.blocks()
    with_lock = slow._manager.session  # its thread is kept from looking
    quick = opened(tmp_path)
    jobs = [put(quick, NewBlock("kv", SPACE, None, 0, ids_of(i), 0.0))[0] for i in range(20)]
    drained(quick)
    known: set[int] = set()
    eventually(lambda: known.update(x.number for x in slow.poll().added) or len(known) == 20)
    look, with_lock._read_others = with_lock._read_others, lambda: None
    for job in jobs[:15]:
        quick.delete([job.number])
        drained(quick)
    last, _ = put(quick, NewBlock("kv", SPACE, None, 0, ids_of(99), 0.0))
    drained(quick)
    eventually(lambda: quick._manager.session._index._one("SELECT count(*) FROM removed") <= 6)
    with_lock._read_others = look
    removed: set[int] = set()
    eventually(lambda: removed.update(slow.poll().removed) or len(removed) == 15)
    assert removed == {x.number for x in jobs[:15]}
    assert got(slow, last.number) is not None
    for store in (slow, quick):
        store.close()
