"""KV blocks on disk: writing and reading beside the same bytes written and read sequentially, and opening an index.

    python -m bench.disk [--folder .] [--gib 1] [--rounds 5] [--tokens 1,10]

Raw: blocks of 4 MiB to and from one file at growing offsets, around the page cache like the store, without fsync like
the store; by one thread and by as many as the store has, of which the faster counts. In each round each of them runs
once, one after the other; `share` is the median of the rounds' ratios, since a disk that others share changes from one
minute to the next. The store's blocks come from rows of 64 KiB, or 2 KiB, in random slots of a pool, and go to others,
which are compared. CPU is of all threads of the process, in milliseconds per GB.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import shutil
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bench.common import save, table
from radixrt.worker.disk import DiskStore, NewBlock
from radixrt.worker.disk.index import Index
from radixrt.worker.disk.limits import Limits
from radixrt.worker.disk.seals import Seals

BLOCK = 4 << 20
SPACE = "\nmodel\n\n"
KEY = b"a key of 32 bytes for benchmarks"
LIMITS = Limits()


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """(seconds, CPU seconds of the process)."""
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu


# ---------------------------------------------------------------- raw


def raw(path: Path, count: int, threads: int, writes: bool) -> None:
    """`count` blocks of one file, in order."""
    order, lock = iter(range(count)), threading.Lock()

    def run() -> None:
        memory = mmap.mmap(-1, BLOCK)
        memory.write(os.urandom(BLOCK))
        fd = os.open(path, (os.O_WRONLY | os.O_CREAT if writes else os.O_RDONLY) | os.O_DIRECT, 0o600)
        while True:
            with lock:
                i = next(order, None)
            if i is None:
                break
            done = os.pwrite(fd, memory, i * BLOCK) if writes else os.preadv(fd, [memory], i * BLOCK)
            assert done == BLOCK
        os.close(fd)

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def raw_seconds(folder: Path, count: int) -> tuple[float, float]:
    """Of writing and of reading: the faster of one thread and several."""
    path, writes, reads = folder / "raw", [], []
    for threads in (1, LIMITS.writers):
        path.unlink(missing_ok=True)
        writes.append(timed(lambda threads=threads: raw(path, count, threads, True))[0])
    for threads in (1, LIMITS.readers):
        reads.append(timed(lambda threads=threads: raw(path, count, threads, False))[0])
    path.unlink()
    return min(writes), min(reads)


# ---------------------------------------------------------------- the store


def store_seconds(folder: Path, count: int, width: int, key: bytes | None) -> tuple[tuple, tuple, float]:
    """(seconds, CPU seconds) of writing and of reading, and of writing where old blocks must go for each."""
    rng = np.random.default_rng(0)
    rows = BLOCK // width
    pool = rng.integers(0, 256, (16 * rows, width), dtype=np.uint8)
    target = np.zeros_like(pool)
    slots = [rng.permutation(len(pool))[:rows] for _ in range(16)]
    ids = rng.integers(0, 100_000, 1024, dtype=np.int32).tobytes()
    numbers: list[int] = []
    values = itertools.count(1.0)

    def write(store: DiskStore) -> None:
        parent = None
        for i in range(count):
            while store.backlog > 256 << 20:
                time.sleep(0.0005)
            block = NewBlock("kv", SPACE, parent if i % 20 else None, i % 20 * 1024, ids, next(values))
            parent = store.write(block, pool, slots[i % 16]).number
            numbers.append(parent)
        assert store.flush(600)

    def read(store: DiskStore) -> None:
        for i, number in enumerate(numbers):
            store.read(number, target, slots[i % 16])
        assert store.flush(600)

    home = folder / "store"
    store = DiskStore(home, int(1.25 * count * BLOCK) + (64 << 20), "bench", key=key, min_free=0)
    store.blocks()
    written = timed(lambda: write(store))
    assert all(x.ok for x in store.poll().finished)
    got = timed(lambda: read(store))
    assert all(x.ok for x in store.poll().finished)
    covered = np.unique(np.concatenate(slots[: min(16, count)]))
    assert (pool[covered] == target[covered]).all()
    replaced = timed(lambda: write(store))[0]
    assert all(x.ok for x in store.poll().finished)
    store.close()
    shutil.rmtree(home)
    return written, got, replaced


def disk_rows(folder: Path, count: int, rounds: int) -> list[dict[str, Any]]:
    total = count * BLOCK / 1e9
    kinds = {
        "rows of 64 KiB": (1 << 16, None),
        "rows of 2 KiB": (1 << 11, None),
        "rows of 64 KiB, encrypted": (1 << 16, KEY),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, (width, key) in kinds.items():
            wrote, read = raw_seconds(folder, count)
            written, got, replaced = store_seconds(folder, count, width, key)
            found[name].append(
                {
                    "raw write GB/s": total / wrote,
                    "write GB/s": total / written[0],
                    "share": wrote / written[0],
                    "CPU ms/GB": 1e3 * written[1] / total,
                    "replacing GB/s": total / replaced,
                    "raw read GB/s": total / read,
                    "read GB/s": total / got[0],
                    "share of reading": read / got[0],
                    "CPU ms/GB of reading": 1e3 * got[1] / total,
                }
            )
    return [
        {"store": name} | {key: statistics.median(x[key] for x in runs) for key in runs[0]}
        for name, runs in found.items()
    ]


# ---------------------------------------------------------------- checksums


def checksum_rows() -> list[dict[str, Any]]:
    """GB/s of one thread over blocks of 4 MiB."""
    data = memoryview(os.urandom(BLOCK * 8))
    blocks = [data[i * BLOCK : (i + 1) * BLOCK] for i in range(8)] * 4
    out = memoryview(bytearray(BLOCK + 16))
    kinds: dict[str, Callable[[memoryview], Any]] = {"xxh3_128": lambda x: xxhash.xxh3_128(x).digest()}
    import hashlib
    import zlib

    kinds["sha1"] = lambda x: hashlib.sha1(x, usedforsecurity=False).digest()
    kinds["sha256"] = lambda x: hashlib.sha256(x).digest()
    kinds["blake2b"] = lambda x: hashlib.blake2b(x).digest()
    kinds["crc32"] = zlib.crc32
    seals = Seals("bench", 0, 1, KEY)
    kinds["aes-256-gcm"] = lambda x: seals.encrypt(1, b"path", b"file", 0, x, out)
    rows = []
    for name, kind in kinds.items():
        best = min(timed(lambda kind=kind: [kind(x) for x in blocks])[0] for _ in range(3))
        rows.append({"checksum": name, "GB/s": len(blocks) * BLOCK / best / 1e9})
    return rows


# ---------------------------------------------------------------- opening


def fill(folder: Path, tokens: int) -> int:
    """An index of blocks of 128 to 1,024 tokens, in paths of 20 blocks. Returns their number."""
    rng, seals = np.random.default_rng(0), Seals("bench", 0, 1, None)
    index = Index(folder, 10.0)
    number = total = 0
    with index.transaction():
        fingerprint = index.fingerprint(seals.fingerprint)
        segment = index.add_segment(f"fp-{seals.fingerprint.hex()}/0000000000-1.kv", "0" * 10, b"")
        index.close_segment(segment.id)
        root = seals.root(SPACE)
        namespace = index.namespace(fingerprint, root, SPACE.encode(), b"")
        while total < tokens:
            parent, path, start = None, root, 0
            for _ in range(20):
                number += 1
                ids = rng.integers(0, 100_000, rng.integers(128, 1025), dtype=np.int32).tobytes()
                path = seals.path(path, "kv", start, ids)
                index.reserve(number, fingerprint, "kv", namespace, parent, start, path, float(number), ids, 1)
                index.reserve_part(number, 0, segment.id, number * 4096, 4096, 4000)
                index.seal(number, 0, bytes(16))
                parent, start, total = number, start + len(ids) // 4, total + len(ids) // 4
    index.close()
    return number


def opening_rows(folder: Path, millions: list[float]) -> list[dict[str, Any]]:
    rows = []
    for million in millions:
        home = folder / "index"
        home.mkdir()
        blocks = fill(home, int(million * 1e6))
        seconds, bare = [], []
        for _ in range(5):
            began = time.perf_counter()
            store = DiskStore(home, 1 << 50, "bench", min_free=0)
            assert len(store.blocks(60)) == blocks
            seconds.append(time.perf_counter() - began)
            store.close()
            began = time.perf_counter()
            db = sqlite3.connect(home / "index-1.sqlite")
            assert len(db.execute("SELECT * FROM blocks JOIN parts USING (number)").fetchall()) == blocks
            bare.append(time.perf_counter() - began)
            db.close()
        rows.append(
            {
                "million tokens": million,
                "blocks": blocks,
                "index MB": (home / "index-1.sqlite").stat().st_size / 1e6,
                "seconds": statistics.median(seconds),
                "slowest": max(seconds),
                "rows read, nothing else": statistics.median(bare),
            }
        )
        shutil.rmtree(home)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--gib", type=float, default=1.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", default="1,10", help="millions of tokens in an index that is opened")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-disk-", dir=args.folder))
    try:
        opening = opening_rows(folder, [float(x) for x in args.tokens.split(",")])
        print(table(opening), end="\n\n")
        checksums = checksum_rows()
        print(table(checksums), end="\n\n")
        disk = disk_rows(folder, int(args.gib * (1 << 30)) // BLOCK, args.rounds)
        print(table(disk))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    save("disk", disk, opening=opening, checksums=checksums, gib=args.gib, rounds=args.rounds, block=BLOCK)


if __name__ == "__main__":
    main()
