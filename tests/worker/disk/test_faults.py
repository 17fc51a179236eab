"""Storage that fails: the store says so once, serves what it can, and goes on by itself when it is over."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from radixrt.worker.disk import NewBlock, StoreState
from tests.waiting import eventually
from tests.worker.disk.faults import Failing, Hanging
from tests.worker.disk.stores import QUICK, SPACE, WIDTH, check_truth, drained, got, ids_of, opened, put, segments

SLOW = QUICK._replace(slow_seconds=0.15)


def block(i: int, parent: int | None = None) -> NewBlock:
    return NewBlock("kv", SPACE, parent, 0, ids_of(i), float(i))


def is_served(store) -> bool:
    job, _ = put(store, block(1000))
    store.flush(10)
    return bool(job.ok)


@pytest.mark.parametrize(
    "error, state",
    [(errno.ENOSPC, StoreState.FULL), (errno.EROFS, StoreState.READONLY), (errno.EIO, StoreState.READONLY)],
)
def test_writes_that_fail_are_refused_until_they_work_again(tmp_path, caplog, error, state):
    files = Failing()
    store = opened(tmp_path, files=files, limits=QUICK._replace(retry_seconds=0.3))
    before, _ = put(store, block(1))
    drained(store)
    files.write_error = error
    failed, _ = put(store, block(2))
    eventually(lambda: store.state is state)
    refused, _ = put(store, block(3))
    drained(store)
    assert failed.ok is False and refused.ok is False
    assert got(store, before.number) is not None
    time.sleep(0.7)  # it tries again, and fails again
    put(store, block(4))
    drained(store)
    assert len([x for x in caplog.messages if "serving goes on without" in x]) == 1
    files.write_error = 0
    eventually(lambda: is_served(store))
    eventually(lambda: len([x for x in caplog.messages if "serves again" in x]) == 1)
    assert got(store, before.number) is not None
    assert store.state is StoreState.OK
    store.close()
    check_truth(tmp_path)


def test_a_file_system_that_takes_no_more_gets_less(tmp_path):
    files = Failing()
    store = opened(tmp_path, files=files)
    jobs = [put(store, block(i), rows=500)[0] for i in range(10)]
    drained(store)
    files.write_error = errno.EDQUOT
    put(store, block(20), rows=500)
    eventually(lambda: store.state is StoreState.FULL)
    files.write_error = 0
    eventually(lambda: is_served(store))
    assert jobs[0].number in store.poll().removed
    store.close()


@pytest.mark.parametrize("error, is_dropped", [(errno.EIO, True), (errno.EMFILE, False)])
def test_a_block_that_cannot_be_read_is_a_miss(tmp_path, error, is_dropped):
    files = Failing()
    store = opened(tmp_path, files=files)
    job, _ = put(store, block(1))
    drained(store)
    files.read_error = error
    assert got(store, job.number) is None
    files.read_error = 0
    if is_dropped:
        eventually(lambda: job.number in store.poll().removed)
    assert (got(store, job.number) is None) == is_dropped
    assert store.state is StoreState.OK
    store.close()


@pytest.mark.parametrize("what", ["reads", "writes"])
def test_calls_that_hang_hold_up_nobody_and_their_rows_are_free(tmp_path, caplog, what):
    files = Hanging(reads=what == "reads", writes=what == "writes")
    store = opened(tmp_path, files=files, limits=SLOW)
    held, _ = put(store, block(1))
    drained(store)
    files.hangs = True
    rows = np.zeros((4, WIDTH), np.uint8)
    hung = store.read(held.number, rows, range(4)) if what == "reads" else put(store, block(2))[0]
    queued = [store.read(held.number, rows, range(4)) if what == "reads" else put(store, block(3))[0] for _ in range(9)]
    assert files.hanging.acquire(timeout=10)
    eventually(lambda: store.poll().finished)
    assert store.state is StoreState.SLOW
    began = time.monotonic()
    late = [store.read(held.number, rows, range(4)), put(store, block(4))[0]]
    assert [x.ok for x in (hung, *queued, *late)] == [False] * 12
    assert time.monotonic() - began < 0.1
    assert len([x for x in caplog.messages if "does not answer" in x]) == 1
    rows[:] = 7
    files.go()
    eventually(lambda: store.state is StoreState.OK)
    eventually(lambda: is_served(store))
    assert got(store, held.number) is not None
    assert (rows == 7).all(), "rows of a job that was given up were written"
    store.close()
    check_truth(tmp_path)


def test_closing_does_not_wait_for_a_call_that_hangs(tmp_path):
    files = Hanging()
    store = opened(tmp_path, files=files)
    files.hangs = True
    job, _ = put(store, block(1))
    assert files.hanging.acquire(timeout=10)
    began = time.monotonic()
    store.close(0.2)
    assert time.monotonic() - began < 2
    assert job.ok is False
    store = opened(tmp_path)  # what the other left is not taken while it may still be written
    assert store.blocks() == [] and store.used > 0
    files.go()
    store.close()


def test_a_process_ends_while_calls_hang(tmp_path):
    script = f"""
        import sys, time
        sys.path.insert(0, {os.getcwd()!r})
        from tests.worker.disk.faults import Hanging
        from tests.worker.disk.stores import SPACE, opened, put, ids_of
        from radixrt.worker.disk import NewBlock
        from pathlib import Path
        files = Hanging()
        store = opened(Path({str(tmp_path)!r}), files=files)
        files.hangs = True
        put(store, NewBlock("kv", SPACE, None, 0, ids_of(1), 0.0))
        assert files.hanging.acquire(timeout=10)
        if "close" in sys.argv:
            store.close(0.1)
        print("ends", flush=True)
    """
    for close in ("", "close"):
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), close], capture_output=True, timeout=30)
        assert done.stdout == b"ends\n" and done.returncode == 0, done.stderr
        assert time.monotonic() - began < 10
    check_truth(tmp_path)


def test_a_folder_that_vanishes_is_made_anew(tmp_path, caplog):
    store = opened(tmp_path / "kv")
    jobs = [put(store, block(i))[0] for i in range(3)]
    drained(store)
    shutil.rmtree(tmp_path / "kv", ignore_errors=True)
    gone: set[int] = set()
    eventually(lambda: gone.update(store.poll().removed) or gone == {x.number for x in jobs})
    assert all(got(store, x.number) is None for x in jobs)
    eventually(lambda: is_served(store))
    assert len([x for x in caplog.messages if "serving goes on without" in x]) == 1
    store.close()
    assert len(check_truth(tmp_path / "kv")) >= 1


def test_a_folder_that_is_replaced_by_a_file_is_done_without_until_it_is_back(tmp_path):
    store = opened(tmp_path / "kv")
    put(store, block(1))
    drained(store)
    shutil.rmtree(tmp_path / "kv", ignore_errors=True)
    (tmp_path / "kv").write_text("")
    eventually(lambda: store.state is StoreState.GONE)
    assert not is_served(store)
    (tmp_path / "kv").unlink()
    eventually(lambda: is_served(store))
    store.close()


@pytest.mark.parametrize("how", ["garbage", "empty", "cut", "pages", "version", "directory of another"])
def test_a_damaged_index_begins_anew_and_its_bytes_are_reclaimed(tmp_path, caplog, how):
    store = opened(tmp_path)
    jobs = [put(store, block(i), rows=50)[0] for i in range(40)]
    drained(store)
    store.close()
    (path,) = tmp_path.glob("index-*.sqlite")
    data = path.read_bytes()
    if how == "version":
        data = data[:60] + b"\0\0\0\x63" + data[64:]
    changed = {
        "garbage": os.urandom(len(data)),
        "empty": b"",
        "cut": data[: len(data) // 2],
        "pages": data[:4096] + os.urandom(len(data) - 4096),
        "version": data,
        "directory of another": b"SQLite format 3\0" + data[16:4000] + os.urandom(len(data) - 4000),
    }[how]
    path.write_bytes(changed)
    store = opened(tmp_path)
    store.blocks()
    eventually(lambda: is_served(store))
    assert all(got(store, x.number, 50) is None for x in jobs)
    eventually(lambda: len(segments(tmp_path)) == 1)
    store.close()
    assert len(check_truth(tmp_path)) >= 1
    assert how == "empty" or len([x for x in caplog.messages if "damaged" in x]) == 1


def test_an_index_that_is_damaged_under_two_stores_is_begun_anew_by_both(tmp_path):
    stores = [opened(tmp_path), opened(tmp_path)]
    for i, store in enumerate(stores):
        put(store, block(i), rows=50)
        drained(store)
    (path,) = tmp_path.glob("index-*.sqlite")
    with open(path, "r+b") as file:
        file.write(os.urandom(8192))
    for store in stores:
        eventually(lambda store=store: is_served(store))
    assert len(list(tmp_path.glob("index-*.sqlite"))) == 1
    number = put(stores[0], block(5))[0].number
    drained(stores[0])
    assert got(stores[1], number) is not None
    for store in stores:
        store.close()
    check_truth(tmp_path)


def test_a_lost_or_changed_segment_is_a_miss_and_is_dropped_with_what_comes_after(tmp_path):
    store = opened(tmp_path)
    first, path = put(store, block(1))
    second, _ = put(store, NewBlock("kv", SPACE, first.number, 1, ids_of(2), 0.0), path)
    drained(store)
    (segment,) = segments(tmp_path)
    data = bytearray(segment.read_bytes())
    data[5] ^= 1
    segment.write_bytes(data)
    assert got(store, first.number) is None
    removed: set[int] = set()
    eventually(lambda: removed.update(store.poll().removed) or removed == {first.number, second.number})
    third, _ = put(store, block(3))
    drained(store)
    segment.unlink()
    assert got(store, third.number) is None
    store.close()


def test_bytes_of_one_block_are_never_those_of_another(tmp_path):
    store = opened(tmp_path)
    jobs = [put(store, block(i))[0] for i in range(2)]
    drained(store)
    (segment,) = segments(tmp_path)
    data = segment.read_bytes()
    assert len(data) == 8192
    segment.write_bytes(data[4096:] + data[:4096])
    assert [got(store, x.number) for x in jobs] == [None, None]
    store.close()


def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path):
    script = f"""
        import sys, resource
        sys.path.insert(0, {os.getcwd()!r})
        from tests.worker.disk.test_faults import *
        from pathlib import Path
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, resource.RLIM_INFINITY))
        store = opened(Path({str(tmp_path)!r}), size=1 << 30)
        jobs = []
        while store.state is StoreState.OK:
            jobs.append(put(store, block(len(jobs)), rows=100)[0])
            store.flush(10)
        assert len(jobs) > 1
        assert got(store, jobs[0].number, 100) is not None
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        eventually(lambda: is_served(store))
        store.close()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 600_000
    check_truth(tmp_path, 1 << 30)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MiB."""
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("cannot mount")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_others_fill_is_served_without(small_disk):
    store = opened(small_disk / "kv", size=1 << 30)
    jobs = [put(store, block(i), rows=500)[0] for i in range(30)]
    drained(store)
    assert all(x.ok for x in jobs)
    with open(small_disk / "other", "wb", buffering=0) as file:
        with pytest.raises(OSError):
            while True:
                file.write(bytes(65536))
    job, _ = put(store, block(50), rows=500)
    drained(store)
    assert job.ok is False or store.used < 30 * 503808
    (small_disk / "other").unlink()
    eventually(lambda: is_served(store))
    store.close()
    check_truth(small_disk / "kv", 1 << 30)


def test_another_process_that_stops_amid_a_transaction_is_waited_for_by_nobody(tmp_path):
    store = opened(tmp_path, limits=SLOW)
    put(store, block(1))
    drained(store)
    script = """
        import sqlite3, sys, time
        db = sqlite3.connect(sys.argv[1], isolation_level=None)
        db.execute("BEGIN EXCLUSIVE")
        print("has it", flush=True)
        time.sleep(60)
    """
    (path,) = tmp_path.glob("index-*.sqlite")
    args = [sys.executable, "-c", textwrap.dedent(script), str(path)]
    with subprocess.Popen(args, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"has it\n"
        job, _ = put(store, block(2))
        eventually(lambda: store.state is StoreState.SLOW)
        assert store.poll().finished == [job]
        other.send_signal(signal.SIGKILL)
    eventually(lambda: is_served(store))
    store.close()
    check_truth(tmp_path)


def test_a_store_that_is_only_idle_is_not_slow(tmp_path):
    store = opened(tmp_path, limits=SLOW)
    job, _ = put(store, block(1))
    drained(store)
    other = opened(tmp_path, limits=SLOW)
    assert len(other.blocks()) == 1
    time.sleep(0.4)
    assert store.state is other.state is StoreState.OK
    assert got(other, job.number) is not None
    for x in (store, other):
        x.close()


def test_blocks_of_a_full_disk_can_be_deleted(tmp_path):
    files = Failing()
    store = opened(tmp_path, files=files, limits=QUICK._replace(retry_seconds=60.0))
    jobs = [put(store, block(i))[0] for i in range(3)]
    drained(store)
    files.write_error = errno.ENOSPC
    put(store, block(5))
    eventually(lambda: store.state is StoreState.FULL)
    deleted = store.delete([jobs[0].number])
    everything = store.delete_namespaces("")
    assert set(drained(store).removed) == {x.number for x in jobs}
    assert deleted.ok and everything.ok and everything.nbytes == 2 * 4096
    store.close()
    assert check_truth(tmp_path) == []
