"""Stores under random loads, damage and restarts, beside an oracle that holds everything in memory."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from radixrt.worker.disk import DiskStore, NewBlock
from radixrt.worker.disk.files import aligned
from tests.waiting import eventually
from tests.worker.disk.faults import NoHoles
from tests.worker.disk.stores import WIDTH, bytes_of, content, drained, ids_of, opened, path_of, segments

SIZE = 6 << 20
SPACES = ["ann\nm\n\n", "ann\nm\n\nsalt", "bob\nm\n\n"]
MAX_ROWS = 200
_MAY_BE = ["no room", "the block before it is gone", "deleted"]


class Held(NamedTuple):
    """A block of the oracle. `path` decides its bytes."""

    block: NewBlock
    path: bytes
    rows: int


class Oracle:
    """Two stores of one folder, and what each of them must know."""

    def __init__(self, rng: random.Random, folder: Path, key: bytes | None, holes: bool) -> None:
        self.rng = rng
        self.folder = folder
        self.key = key
        self.holes = holes
        self.written: dict[int, Held] = {}
        """All that ever was: what is read of a number is this, or nothing."""
        self.known: list[set[int]] = [set(), set()]
        """To each store."""
        self.is_damaged = False
        self.stores = [self.open(), self.open()]
        for store in self.stores:
            assert store.blocks() == []

    def open(self) -> DiskStore:
        return opened(self.folder, SIZE, key=self.key, files=None if self.holes else NoHoles())

    def learn(self, i: int) -> None:
        """Take in what a store tells."""
        changes = drained(self.stores[i])
        for job in changes.finished:
            if job.kind == "write" and job.ok:
                self.known[i].add(job.number)
            assert job.kind != "write" or job.ok or self.is_damaged or job.why in _MAY_BE
        for block in changes.added:
            self.check_block(block)
            self.known[i].add(block.number)
        self.known[i] -= set(changes.removed)

    def check_block(self, block) -> None:
        held = self.written[block.number]
        assert block[1:7] == held.block[:5] + (block.value,) and block.nbytes == held.rows * WIDTH

    def write(self) -> None:
        i = self.rng.randrange(2)
        known = [x for x in self.known[i] if self.written[x].block.kind == "kv"]
        parent = self.rng.choice(known) if known and self.rng.random() < 0.7 else None
        kind = "state" if parent is not None and self.rng.random() < 0.2 else "kv"
        ids = ids_of(*(self.rng.randrange(9) for _ in range(self.rng.randint(1, 5)))) if kind == "kv" else b""
        before = self.written[parent] if parent is not None else None
        space = before.block.namespace if before else self.rng.choice(SPACES)
        start = before.block.start + len(before.block.ids) // 4 if before else 0
        block = NewBlock(kind, space, parent, start, ids, float(self.rng.randrange(100)))
        path = path_of(block, before.path if before else b"")
        rows = self.rng.randint(1, MAX_ROWS)
        pool = np.zeros((MAX_ROWS + 9, WIDTH), np.uint8)
        slots = self.rng.sample(range(len(pool)), rows) if self.rng.random() < 0.5 else range(3, 3 + rows)
        pool[slots] = content(path, rows)
        job = self.stores[i].write(block, pool, slots)
        self.written[job.number] = Held(block, path, rows)

    def read(self) -> None:
        i = self.rng.randrange(2)
        self.learn(i)
        number = self.rng.choice([*self.known[i], *self.written, 1])
        rows = self.written[number].rows if number in self.written else 1
        first = self.rng.randrange(rows)
        count = self.rng.randint(1, rows - first)
        pool = np.zeros((MAX_ROWS + 9, WIDTH), np.uint8)
        slots = self.rng.sample(range(len(pool)), count)
        job = self.stores[i].read(number, pool, slots, first=first)
        assert self.stores[i].flush(30)
        if job.ok:
            np.testing.assert_array_equal(pool[slots], content(self.written[number].path, rows)[first : first + count])
        elif not self.is_damaged and number in self.known[i]:  # only what the store says is gone may be missed
            self.sync()
            assert number not in self.known[i], job.why

    def sync(self) -> None:
        """Both stores have seen what the other did."""
        for i in (0, 1, 0):
            self.stores[i].read(1, np.zeros((1, 1), np.uint8), [0])  # an unknown number makes it look
            self.learn(i)

    def delete(self) -> None:
        i = self.rng.randrange(2)
        self.learn(i)
        if self.rng.random() < 0.1:
            prefix = self.rng.choice(["ann\n", "bob\n", "ann\nm\n\ns"])
            job = self.stores[i].delete_namespaces(prefix)
            self.learn(i)
            assert job.ok or self.is_damaged
            assert not job.ok or not [x for x in self.known[i] if self.written[x].block.namespace.startswith(prefix)]
        elif self.known[i]:
            number = self.rng.choice(sorted(self.known[i]))
            job = self.stores[i].delete([number])
            self.learn(i)
            assert job.ok or self.is_damaged
            gone = {number}
            while not self.is_damaged:  # a damaged index may have lost them, and who reads them learns it
                more = {x for x in self.known[i] if self.written[x].block.parent in gone} - gone
                if not more:
                    break
                gone |= more
            assert not job.ok or not gone & self.known[i]

    def touch(self) -> None:
        i = self.rng.randrange(2)
        self.stores[i].touch(list(self.known[i])[:3], float(self.rng.randrange(100)))

    def reopen(self) -> None:
        i = self.rng.randrange(2)
        self.learn(i)
        self.stores[i].close(10)
        self.stores[i] = self.open()
        blocks = self.stores[i].blocks()
        for block in blocks:
            self.check_block(block)
        self.known[i] = {x.number for x in blocks}
        if not self.is_damaged:
            self.sync()
            assert self.known[0] == self.known[1]
            if self.holes:
                sealed = 16 if self.key else 0
                held = sum(aligned(self.written[x].rows * WIDTH + sealed) for x in self.known[i])
                eventually(lambda: self.stores[i].used == held)

    def damage(self) -> None:
        """Of segments, or of the index."""
        self.is_damaged = True
        files = segments(self.folder) * 3 + sorted(self.folder.glob("index-*.sqlite"))
        if not files:
            return
        path = self.rng.choice(files)
        with open(path, "r+b") as file:
            size = path.stat().st_size
            how = self.rng.random()
            if how < 0.7 and size:
                for _ in range(self.rng.choice([1, 1, 50])):
                    file.seek(self.rng.randrange(size))
                    byte = file.read(1)
                    file.seek(-1, 1)
                    file.write(bytes([byte[0] ^ 1 << self.rng.randrange(8)]))
            elif how < 0.85:
                file.truncate(self.rng.randrange(size + 1))
            elif path.suffix == ".kv":
                path.unlink()

    def step(self, damages: bool) -> None:
        actions = [self.write] * 8 + [self.read] * 6 + [self.delete, self.touch, self.reopen]
        self.rng.choice(actions + [self.damage] * damages)()
        if self.rng.random() < 0.3:
            self.learn(self.rng.randrange(2))
        assert bytes_of(self.folder) <= SIZE or self.is_damaged

    def close(self) -> None:
        for store in self.stores:
            store.close(10)


@pytest.fixture
def folder():
    """In memory, if there is a file system there: what is tested is the order of things."""
    shared = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else None))
    yield path
    shutil.rmtree(path)


def run(seed: int, folder: Path, steps: int, damages: bool, key: bytes | None = None, holes: bool = True) -> None:
    oracle = Oracle(random.Random(seed), folder, key, holes)
    for _ in range(steps):
        oracle.step(damages)
    oracle.close()


@pytest.mark.parametrize("seed", range(3))
def test_stores_know_what_the_oracle_knows(folder, seed):
    run(seed, folder, 120, damages=False)


@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_byte_never_verifies(folder, seed):
    run(seed, folder, 120, damages=True)


@pytest.mark.parametrize("damages", [False, True])
def test_encrypted_stores_do_the_same(folder, damages):
    pytest.importorskip("cryptography")
    run(7, folder, 100, damages, key=b"0123456789abcdef")


@pytest.mark.parametrize("damages", [False, True])
def test_stores_without_holes_do_the_same(folder, damages):
    run(8, folder, 100, damages, holes=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_long_runs(folder):
    for seed in range(100, 140):
        home = folder / str(seed)
        home.mkdir()
        run(seed, home, 300, seed % 2 == 1, b"0123456789abcdef" if seed % 8 > 5 else None, holes=seed % 5 > 0)
        shutil.rmtree(home)
