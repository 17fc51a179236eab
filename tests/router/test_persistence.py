"""What is put on disk is there after a restart, whatever ends the process, fills the disk or damages the file."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from radixrt.router.persistence import store as module
from radixrt.router.persistence.database import Database, NewPiece, Put, Reader, Record
from radixrt.router.persistence.store import FILE, PersistentStore

MB = 1 << 20


@pytest.fixture(autouse=True)
def _at_once(monkeypatch) -> None:
    monkeypatch.setattr(module, "BATCH_SECONDS", 0.0)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(module, "READ_SECONDS", 20.0)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def store(folder) -> Iterator[PersistentStore]:
    one = PersistentStore(folder, 64 * MB)
    yield one
    one.close()


def get(store: PersistentStore, tenant: str, *keys: bytes) -> list[bytes | None]:
    return asyncio.run(store.get(tenant, keys))


def record(store: PersistentStore, tenant: str, key: bytes) -> Record | None:
    return asyncio.run(store.record(tenant, key))


# ---------------------------------------------------------------- against a dictionary


class Kept(RuleBasedStateMachine):
    """Values, and chains of pieces that grow out of others' pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.folders = [self.folder]
        self.store = PersistentStore(self.folder, 64 * MB)
        self.runner = asyncio.Runner()
        self.model: dict[tuple[str, bytes], tuple[bytes, list[tuple[int, bytes]]]] = {}
        self.epochs: dict[int, int] = {}

    tenants, keys = st.sampled_from("ab"), st.sampled_from([b"s1", b"s2", b"t1", b"\xff\xff"])

    @rule(tenant=tenants, key=keys, value=st.binary(max_size=30))
    def put(self, tenant, key, value):
        self.store.put(tenant, key, value)
        self.model[tenant, key] = value, []

    @rule(
        tenant=tenants, key=keys, parent=keys, pieces=st.lists(st.binary(max_size=20), max_size=4), goes=st.booleans()
    )
    def put_chain(self, tenant, key, parent, pieces, goes):
        chain = list(self.model.get((tenant, parent), (b"", []))[1])
        chain += [(self.store.next_number(), data) for data in pieces]
        links = [0, *(number for number, _ in chain)]
        new = [NewPiece(number, before, data) for (number, data), before in zip(chain, links, strict=False)]
        new = [one for one in new if self.epochs.get(one.number) != self.store.epoch]
        self.epochs |= {one.number: self.store.epoch for one in new}
        replaces = parent if goes and (tenant, parent) in self.model else None
        self.store.put(tenant, key, b"chain", (links[-1],), new, replaces)
        if replaces is not None:
            self.model.pop((tenant, replaces))
        self.model[tenant, key] = b"chain", chain

    @rule(tenant=tenants, key=keys)
    def remove(self, tenant, key):
        self.store.remove(tenant, key)
        self.model.pop((tenant, key), None)

    @rule(tenant=tenants, prefix=st.sampled_from([b"s", b"t", b"\xff", b""]))
    def remove_all(self, tenant, prefix):
        self.store.remove_all(tenant, prefix)
        for one in [one for one in self.model if one[0] == tenant and one[1].startswith(prefix)]:
            del self.model[one]

    @rule(tenant=tenants, keys=st.lists(keys, unique=True, min_size=1))
    def read(self, tenant, keys):
        self.store.touch(tenant, keys)
        expected = [self.model.get((tenant, key), (None,))[0] for key in keys]
        assert self.runner.run(self.store.get(tenant, keys)) == expected

    @rule(tenant=tenants, key=keys)
    def read_chain(self, tenant, key):
        found = self.runner.run(self.store.record(tenant, key))
        if (tenant, key) not in self.model:
            assert found is None
        else:
            value, chain = self.model[tenant, key]
            assert found is not None and found.value == value and found.chains in ([chain], [])
            assert found.chains or not chain

    @rule(ends=st.sampled_from(["closed", "killed"]))
    def restart(self, ends):
        if ends == "closed":
            self.store.close()
        else:  # what a process that is killed leaves
            assert self.store.flush()
            self.folder = Path(tempfile.mkdtemp())
            self.folders.append(self.folder)
            shutil.copytree(self.folders[-2], self.folder, dirs_exist_ok=True)
            self.store.close()
        self.store = PersistentStore(self.folder, 64 * MB)
        self.epochs = {number: self.store.epoch for _, chain in self.model.values() for number, _ in chain}
        for tenant, key in itertools.product("ab", [b"s1", b"s2", b"t1", b"\xff\xff"]):
            self.read_chain(tenant, key)

    def teardown(self):
        self.runner.close()
        self.store.close()
        with sqlite3.connect(self.folder / FILE) as connection:
            (pieces,) = connection.execute("SELECT count(*) FROM piece").fetchone()
        connection.close()
        assert pieces == len({number for _, chain in self.model.values() for number, _ in chain})
        for one in self.folders:
            shutil.rmtree(one)


TestKept = Kept.TestCase
TestKept.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)


# ---------------------------------------------------------------- bounds


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_the_loudest_tenant_loses_what_it_used_least_recently(folder, monkeypatch):
    store = PersistentStore(folder, 2 * MB)
    quiet = [b"q%d" % i for i in range(50)]
    for key in quiet:
        store.put("quiet", key, bytes(2000))
    clock = itertools.count(1_000_000, 1000)
    monkeypatch.setattr(module.time, "time", lambda: next(clock))
    for i in range(2000):
        store.put("loud", b"l%d" % i, os.urandom(4000))
        store.touch("loud", [b"l0"])
        if i % 100 == 0:
            assert store.flush()
    assert store.flush()
    kept = [i for i in range(2000) if get(store, "loud", b"l%d" % i)[0]]
    assert get(store, "quiet", *quiet) == [bytes(2000)] * 50, "a quiet one loses nothing"
    assert kept[0] == 0 and kept[1:] == list(range(kept[1], 2000)), "what was used last is kept, without gaps"
    assert 300 < len(kept) < 500
    assert (folder / FILE).stat().st_size < 2.5 * MB
    store.close()


def test_what_is_deleted_leaves_no_bytes(folder):
    store = PersistentStore(folder, 64 * MB)
    secret = b"the secret of tenant a"
    for i in range(300):
        store.put("a", b"%d" % i, secret * 50, (i + 1,), [NewPiece(store.next_number(), 0, secret * 20)])
        store.put("b", b"%d" % i, b"of tenant b" * 50)
    assert store.flush()
    before = size_of(folder)
    store.remove_all("a")
    assert get(store, "a", b"7") == [None] and get(store, "b", b"7") == [b"of tenant b" * 50]
    assert store.flush()
    store.close()
    assert not any(secret in path.read_bytes() for path in folder.iterdir())
    assert size_of(folder) < before / 2
    store = PersistentStore(folder, 64 * MB)
    assert get(store, "a", b"7") == [None] and get(store, "b", b"7") == [b"of tenant b" * 50]
    store.close()


def test_files_are_the_owners_alone(folder, store):
    store.put("a", b"k", b"v")
    assert store.flush()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_folder_serves_one_process_at_a_time(folder, store, monkeypatch):
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.1)
    with pytest.raises(ValueError, match="--state-path .*another process"):
        PersistentStore(folder, MB)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match="--state-path .*file"):
        PersistentStore(tmp_path / "file" / "state", MB)


# ---------------------------------------------------------------- damage


def filled(folder: Path) -> dict[bytes, tuple[bytes, list[tuple[int, bytes]]]]:
    """A store with chains; what is in it."""
    store, model = PersistentStore(folder, 64 * MB), {}
    chain: list[tuple[int, bytes]] = []
    for i in range(60):
        number, before = store.next_number(), chain[-1][0] if chain else 0
        chain = [*chain, (number, b"piece %d " % i * 30)]
        store.put("a", b"%d" % i, b"value %d" % i * 30, (number,), [NewPiece(number, before, chain[-1][1])])
        model[b"%d" % i] = b"value %d" % i * 30, chain
    assert store.flush()
    store.close()
    return model


@pytest.mark.parametrize("seed", range(15))
def test_a_damaged_file_gives_what_was_put_or_nothing(folder, seed, caplog):
    model, rng = filled(folder), random.Random(seed)
    with open(folder / FILE, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if seed % 5 == 0:
            file.truncate(rng.randrange(size))
        for _ in range(rng.choice([1, 10, 100])):
            file.seek(rng.randrange(size))
            file.write(rng.randbytes(rng.choice([1, 50])))
    store = PersistentStore(folder, 64 * MB)
    for key, (value, chain) in model.items():
        assert get(store, "a", key)[0] in (value, None)
        found = record(store, "a", key)
        assert found is None or (found.value == value and found.chains == [chain])
    for _ in range(2):  # the first may find the damage
        store.put("a", b"new", b"is kept")
        assert store.flush()
    store.close()
    again = PersistentStore(folder, 64 * MB)
    assert get(again, "a", b"new") == [b"is kept"]
    again.close()


@pytest.mark.parametrize("content", [b"", b"no database" * 1000, None])
def test_a_file_that_is_none_is_set_aside(folder, content, caplog):
    folder.mkdir()
    if content is None:  # of a later format
        with sqlite3.connect(folder / FILE) as connection:
            connection.execute("CREATE TABLE later (x)")
            connection.execute("PRAGMA user_version = 2")
        connection.close()
    else:
        (folder / FILE).write_bytes(content)
    store = PersistentStore(folder, 64 * MB)
    store.put("a", b"k", b"v")
    assert store.flush() and get(store, "a", b"k") == [b"v"]
    store.close()
    aside = [one.message for one in caplog.records if "set aside" in one.message]
    assert len(aside) == (folder / (FILE + ".aside")).exists() == (content != b"")


# ---------------------------------------------------------------- disks


def test_a_full_disk_is_said_once_and_written_to_when_it_has_room(folder, store, caplog):
    store.put("a", b"before", b"v")
    assert store.flush()
    connection = store._database._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    for i in range(20):
        store.put("a", b"%d" % i, bytes(100_000))
        time.sleep(0.005)
    assert not store.flush(0.2)
    assert get(store, "a", b"7", b"before") == [bytes(100_000), b"v"], "what waits is known"
    assert sum("full" in one.message for one in caplog.records) == 1
    connection.execute("PRAGMA max_page_count = 1000000")
    assert store.flush()
    assert get(store, "a", b"7") == [bytes(100_000)]


def test_what_waits_for_a_disk_is_bounded_and_no_older_value_comes_back(folder, store, monkeypatch, caplog):
    store.put("a", b"k", b"old")
    assert store.flush()
    apply, ready = Database.apply, False

    def readonly(*args):
        if not ready:
            raise sqlite3.OperationalError("attempt to write a readonly database")
        return apply(*args)

    monkeypatch.setattr(Database, "apply", readonly)
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 100_000)
    epoch = store.epoch
    for i in range(30):
        store.put("a", b"%d" % i, bytes(10_000))
    store.put("a", b"k", bytes(10_000))
    assert get(store, "a", b"k", b"29") == [None, None] and get(store, "a", b"1") == [bytes(10_000)]
    assert store.epoch > epoch, "pieces are put again"
    assert sum("--state-path" in one.message for one in caplog.records) == 1
    ready = True
    assert store.flush()
    assert get(store, "a", b"k", b"29", b"1") == [None, None, bytes(10_000)]


def test_a_tenant_that_asks_for_much_keeps_others_waiting_for_a_few_keys(store, monkeypatch):
    store.put("quiet", b"k", b"v")
    assert store.flush()
    get_at_once, read = Reader.get, []

    def slow(self, tenant, keys):
        read.append((tenant, len(keys)))
        time.sleep(0.005)
        return get_at_once(self, tenant, keys)

    monkeypatch.setattr(Reader, "get", slow)

    async def both() -> None:
        floods = [asyncio.create_task(store.get("loud", [b"%d" % i for i in range(2000)])) for _ in range(5)]
        await asyncio.sleep(0.01)
        before = len(read)
        assert await store.get("quiet", [b"k"]) == [b"v"]
        assert read.index(("quiet", 1)) - before <= 3
        await asyncio.gather(*floods)

    asyncio.run(both())
    assert max(count for _, count in read) <= module.READ_KEYS


def test_a_tenant_that_writes_more_than_the_disk_takes_loses_its_own(store, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 400_000)
    apply, ready = Database.apply, False

    def full(*args):
        if not ready:
            raise sqlite3.OperationalError("database or disk is full")
        return apply(*args)

    monkeypatch.setattr(Database, "apply", full)
    for i in range(60):
        store.put("loud", b"%d" % i, bytes(10_000))
    store.put("quiet", b"k", bytes(10_000))
    ready = True
    assert store.flush()
    kept = [get(store, "loud", b"%d" % i)[0] is not None for i in range(60)]
    assert get(store, "quiet", b"k") == [bytes(10_000)] and 30 < sum(kept) < 40


def test_a_disk_that_does_not_answer_costs_one_wait(store, monkeypatch, caplog):
    store.put("a", b"k", b"v")
    assert store.flush()
    monkeypatch.setattr(module, "READ_SECONDS", 0.1)
    get_at_once = Reader.get
    monkeypatch.setattr(Reader, "get", lambda *args: time.sleep(0.6) or get_at_once(*args))
    began = time.monotonic()
    assert get(store, "a", b"k") == [None]
    waited = time.monotonic() - began
    assert 0.1 <= waited < 0.4
    assert [get(store, "a", b"k") for _ in range(20)] == [[None]] * 20
    assert time.monotonic() - began < waited + 0.2
    assert sum("does not answer" in one.message for one in caplog.records) == 1
    monkeypatch.setattr(Reader, "get", get_at_once)
    time.sleep(0.6)
    assert get(store, "a", b"k") == [b"v"]


def test_a_folder_that_vanishes_is_made_anew(folder, store, caplog):
    store.put("a", b"k", b"v")
    assert store.flush()
    shutil.rmtree(folder)
    epoch = store.epoch
    store.put("a", b"l", b"w")
    assert store.flush() and get(store, "a", b"l") == [b"w"]
    assert store.epoch > epoch and (folder / FILE).exists()
    assert get(store, "a", b"k") == [None]


def test_a_value_whose_pieces_are_gone_is_not_stored(folder, store):
    """And the store says that pieces have to be put again."""
    epoch = store.epoch
    store.put("a", b"k", b"v", (9,), [NewPiece(9, 8, b"after one that is missing")])
    assert store.flush()
    assert get(store, "a", b"k") == [None] and store.epoch == epoch + 1
    store.put("a", b"k", b"v", (9,), [NewPiece(8, 0, b"first"), NewPiece(9, 8, b"second")])
    assert store.flush()
    assert record(store, "a", b"k") == Record(b"v", [[(8, b"first"), (9, b"second")]])


# ---------------------------------------------------------------- kill -9


WRITER = """
import sys
from radixrt.router.persistence.database import NewPiece
from radixrt.router.persistence.store import PersistentStore

store = PersistentStore(sys.argv[1], 64 << 20)
first = int(sys.argv[2])
before = 0
for i in range(first, first + 100_000):
    number = store.next_number()
    store.put("a", b"%d" % i, b"%d" % i * 20, (number,), [NewPiece(number, before, b"%d." % i)],
              b"%d" % (i - 2) if i % 3 == 0 else None)
    before = number
    if i % 50 == 0:
        assert store.flush()
        print(i, flush=True)
"""


def killed_once(folder: Path, rng: random.Random, first: int) -> int:
    """Write from the number `first` on, until a random moment; returns the last number that is known to be written."""
    command = [sys.executable, "-c", WRITER, str(folder), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.random() * 0.2)
        process.kill()
        lines = process.stdout.read().split("\n")
    return int(lines[-2]) if len(lines) > 1 else first


def check_killed(folder: Path, first: int, last: int) -> None:
    store = PersistentStore(folder, 64 * MB)
    for i in range(first, last + 300):
        found = record(store, "a", b"%d" % i)
        replaced = (i + 2) % 3 == 0
        if found is None:
            assert i > last - 2 or replaced, "what was written is there"
            continue
        assert not replaced or i > last - 2
        assert found.value == b"%d" % i * 20
        assert [data for _, data in found.chains[0]] == [b"%d." % j for j in range(first, i + 1)]
    store.remove_all("a")
    assert store.flush()
    store.close()


@pytest.mark.parametrize("kills", [1, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_what_was_written_before_kill_9_is_whole_after_it(folder, kills):
    rng = random.Random(0)
    for _ in range(kills):
        last = killed_once(folder, rng, 1)
        check_killed(folder, 1, last)


def test_a_big_file_opens_at_once(folder):
    """The start reads no entries."""
    folder.mkdir()
    database = Database(folder / FILE, 1 << 30)
    puts = [Put("a", b"%d" % i, bytes(2000)) for i in range(5_000)]
    database.apply(puts, 0)
    database.close()
    began = time.monotonic()
    store = PersistentStore(folder, 1 << 30)
    assert time.monotonic() - began < 0.5
    store.close()
