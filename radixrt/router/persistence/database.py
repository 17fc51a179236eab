"""The SQLite file of `--state-path`: values of tenants, and pieces that several of their values share.

    tenant   name, bytes
    entry    tenant, key --> value, the last pieces of its chains
    piece    number --> data, the piece before it, how many entries and pieces refer to it

Each row has a checksum over what it belongs to and what it holds: a damaged one counts as missing. All methods raise
sqlite3.Error; `Damaged` is one whose file cannot be used any more.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from radixrt.tokens.quota import Shares

FORMAT = 1
"""Of the file; files of other formats are not read."""
APPLICATION = 0x72785354
ENTRY_BYTES, PIECE_BYTES = 160, 96
"""About what an entry and a piece take beside their key and data, with indexes."""
CHECKSUM_BYTES = 8
MAX_KEY_BYTES = 64
EVICTED_AT_ONCE = 32
CACHE_KIB = 8192
BUSY_MS = 2000
_SCHEMA = """
CREATE TABLE tenant (id INTEGER PRIMARY KEY AUTOINCREMENT, name BLOB NOT NULL UNIQUE, bytes INTEGER NOT NULL);
CREATE TABLE entry (
    id INTEGER PRIMARY KEY, tenant INTEGER NOT NULL, key BLOB NOT NULL, used INTEGER NOT NULL, ends BLOB NOT NULL,
    checksum BLOB NOT NULL, value BLOB NOT NULL, UNIQUE (tenant, key)
);
CREATE INDEX entry_used ON entry (tenant, used, id);
CREATE TABLE piece (
    number INTEGER PRIMARY KEY, tenant INTEGER NOT NULL, before INTEGER NOT NULL, users INTEGER NOT NULL,
    checksum BLOB NOT NULL, data BLOB NOT NULL
);
CREATE INDEX piece_tenant ON piece (tenant);
"""


class Damaged(sqlite3.DatabaseError):
    """The file is no database, or not a sound one, or of another format."""


class NewPiece(NamedTuple):
    """`before` is the number of the piece before it, 0 for the first of a chain."""

    number: int
    before: int
    data: bytes


class Put(NamedTuple):
    """Set the value of a key. `ends`: numbers of the last pieces of its chains, 0 for an empty one; `pieces`: those of
    them that may not be stored yet, each after the one before it. `replaces`: a key that is removed with that."""

    tenant: str
    key: bytes
    value: bytes
    ends: tuple[int, ...] = ()
    pieces: tuple[NewPiece, ...] = ()
    replaces: bytes | None = None

    @property
    def size(self) -> int:
        return len(self.key) + len(self.value) + ENTRY_BYTES + sum(len(one.data) + PIECE_BYTES for one in self.pieces)


class Remove(NamedTuple):
    """Remove all keys of a tenant that begin with `prefix`."""

    tenant: str
    prefix: bytes
    exact: bool = False
    """Only the key `prefix` itself."""


class Touch(NamedTuple):
    """Keys were used."""

    tenant: str
    keys: tuple[bytes, ...]


Change = Put | Remove | Touch


class Record(NamedTuple):
    """A value and its chains: (number, data) of their pieces, the first one first."""

    value: bytes
    chains: list[list[tuple[int, bytes]]]


class Database:
    """The connection that writes; one for each file. `max_bytes` bound the pages in use; beyond that the least recently
    used entries of the tenant with most bytes are removed. Raises Damaged."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # its log gets the same mode
        self._max_bytes = max_bytes
        self._shares = Shares()
        self._ids: dict[str, int] = {}
        self._changed: set[str] = set()
        """Tenants whose bytes are not written yet."""
        self._connection = _connect(path)
        try:
            self._open()
        except BaseException:
            self._connection.close()
            raise

    def _open(self) -> None:
        query = self._connection.execute
        (version,), (tables,) = (
            query("PRAGMA user_version").fetchone(),
            query("SELECT count(*) FROM sqlite_master").fetchone(),
        )
        if not tables:
            query("PRAGMA auto_vacuum = INCREMENTAL")
        query("PRAGMA journal_mode = WAL")
        query("PRAGMA synchronous = NORMAL")
        query("PRAGMA secure_delete = ON")
        query(f"PRAGMA journal_size_limit = {16 << 20}")
        (self._page_size,) = query("PRAGMA page_size").fetchone()
        if not tables:
            query("BEGIN IMMEDIATE")
            for statement in _SCHEMA.split(";"):
                query(statement)
            query(f"PRAGMA user_version = {FORMAT}")
            query(f"PRAGMA application_id = {APPLICATION}")
            query("COMMIT")
        elif version != FORMAT:
            raise Damaged(f"it has format {version}, not {FORMAT}")
        for id, name, size in query("SELECT id, name, bytes FROM tenant"):
            tenant = _name(name)
            self._ids[tenant] = id
            if size > 0:
                self._shares.add(tenant, size)

    def close(self) -> None:
        self._connection.close()

    def next_number(self) -> int:
        """A number above those of all pieces."""
        (most,) = self._connection.execute("SELECT max(number) FROM piece").fetchone()
        return (most or 0) + 1

    def bytes_of(self, tenant: str) -> int:
        """About the bytes of a tenant's entries and pieces."""
        return self._shares[tenant]

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use."""
        query = self._connection.execute
        (pages,), (free,) = query("PRAGMA page_count").fetchone(), query("PRAGMA freelist_count").fetchone()
        return int(pages - free) * int(self._page_size)

    # ------------------------------------------------------------ changes

    def apply(self, changes: Sequence[Change], now: int) -> int:
        """Make changes, all or none; `now` in seconds. Returns how many values could not be stored, as a piece before
        theirs is missing."""
        before = dict(self._ids), {tenant: self._shares[tenant] for tenant in self._ids}
        broken, vacuums = 0, False
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for change in changes:
                if isinstance(change, Put):
                    broken += not self._put(change, now)
                elif isinstance(change, Touch):
                    self._touch(change, now)
                else:
                    vacuums = self._remove(change) or vacuums
            self._trim()
            self._write_sizes()
            self._connection.execute("COMMIT")
        except BaseException:
            self._restore(*before)
            raise
        if vacuums:
            self._give_back()
        return broken

    def _restore(self, ids: dict[str, int], sizes: dict[str, int]) -> None:
        if self._connection.in_transaction:
            self._connection.rollback()
        self._ids, self._shares = ids, Shares()
        for tenant, size in sizes.items():
            if size:
                self._shares.add(tenant, size)
        self._changed.clear()

    def _put(self, put: Put, now: int) -> bool:
        query, tenant = self._connection.execute, self._id(put.tenant)
        complete = all([self._add_piece(tenant, put.tenant, piece) for piece in put.pieces])
        complete = all([self._use(number) for number in put.ends]) and complete
        if put.replaces is not None:
            self._remove_one(put.tenant, put.replaces)
        self._remove_one(put.tenant, put.key)
        if not complete:
            self._leave_all(put.tenant, put.ends)
            return False
        ends = struct.pack(f"<{len(put.ends)}q", *put.ends)
        checksum = _checksum(put.tenant, put.key, ends, put.value)
        query(
            "INSERT INTO entry (tenant, key, used, ends, checksum, value) VALUES (?, ?, ?, ?, ?, ?)",
            (tenant, put.key, now, ends, checksum, put.value),
        )
        self._count(put.tenant, _entry_size(put.key, put.value))
        return True

    def _add_piece(self, tenant: int, name: str, piece: NewPiece) -> bool:
        """Returns False if the piece before it is missing."""
        query = self._connection.execute
        checksum = _checksum(name, struct.pack("<qq", piece.number, piece.before), b"", piece.data)
        added = query(
            "INSERT OR IGNORE INTO piece VALUES (?, ?, ?, 0, ?, ?)",
            (piece.number, tenant, piece.before, checksum, piece.data),
        )
        if not added.rowcount:
            return True
        self._count(name, PIECE_BYTES + len(piece.data))
        return self._use(piece.before)

    def _use(self, number: int) -> bool:
        """Count one more user of a piece; returns whether it is there."""
        query = self._connection.execute
        return not number or query("UPDATE piece SET users = users + 1 WHERE number = ?", (number,)).rowcount > 0

    def _leave_all(self, tenant: str, ends: Iterable[int]) -> None:
        for number in ends:
            self._leave(tenant, number)

    def _leave(self, tenant: str, number: int) -> None:
        """Count one user of a piece less, and remove it, and those before it, that have none."""
        query = self._connection.execute
        while number:
            found = query("SELECT users, before, length(data) FROM piece WHERE number = ?", (number,)).fetchone()
            if found is None:
                return
            users, before, size = found
            if users > 1:
                query("UPDATE piece SET users = ? WHERE number = ?", (users - 1, number))
                return
            query("DELETE FROM piece WHERE number = ?", (number,))
            self._count(tenant, -PIECE_BYTES - size)
            number = before

    def _touch(self, touch: Touch, now: int) -> None:
        if (tenant := self._ids.get(touch.tenant)) is not None:
            rows = [(now, tenant, key) for key in touch.keys]
            self._connection.executemany("UPDATE entry SET used = ? WHERE tenant = ? AND key = ?", rows)

    def _remove(self, change: Remove) -> bool:
        """Returns whether it was all that a tenant has."""
        if change.exact:
            self._remove_one(change.tenant, change.prefix)
            return False
        if (tenant := self._ids.get(change.tenant)) is None:
            return False
        query = self._connection.execute
        if not change.prefix:
            for table in ("entry", "piece"):
                query(f"DELETE FROM {table} WHERE tenant = ?", (tenant,))
            query("DELETE FROM tenant WHERE id = ?", (tenant,))
            self._shares.add(change.tenant, -self._shares[change.tenant])
            del self._ids[change.tenant]
            self._changed.discard(change.tenant)
            return True
        # SQLite compares blobs as bytes: those above all that begin with the prefix.
        above = change.prefix + b"\xff" * (MAX_KEY_BYTES - len(change.prefix))
        keys = query("SELECT key FROM entry WHERE tenant = ? AND key BETWEEN ? AND ?", (tenant, change.prefix, above))
        for (key,) in keys.fetchall():
            self._remove_one(change.tenant, key)
        return False

    def _remove_one(self, tenant: str, key: bytes) -> None:
        if (id := self._ids.get(tenant)) is None:
            return
        query = self._connection.execute
        found = query("SELECT id, ends, length(value) FROM entry WHERE tenant = ? AND key = ?", (id, key)).fetchone()
        if found is not None:
            self._drop(tenant, found[0], len(key), found[1], found[2])

    def _drop(self, tenant: str, id: int, key_size: int, ends: bytes, size: int) -> None:
        self._connection.execute("DELETE FROM entry WHERE id = ?", (id,))
        self._count(tenant, -ENTRY_BYTES - key_size - size)
        self._leave_all(tenant, _numbers(ends))

    # ------------------------------------------------------------ sizes

    def _id(self, tenant: str) -> int:
        if (id := self._ids.get(tenant)) is None:
            added = self._connection.execute("INSERT INTO tenant (name, bytes) VALUES (?, 0)", (_encoded(tenant),))
            id = self._ids[tenant] = int(added.lastrowid or 0)
        return id

    def _count(self, tenant: str, size: int) -> None:
        # Counts of a damaged file may be wrong; they are never below 0.
        self._shares.add(tenant, max(size, -self._shares[tenant]))
        self._changed.add(tenant)

    def _write_sizes(self) -> None:
        rows = [(self._shares[tenant], self._ids[tenant]) for tenant in self._changed if tenant in self._ids]
        self._connection.executemany("UPDATE tenant SET bytes = ? WHERE id = ?", rows)
        self._changed.clear()

    def _trim(self) -> None:
        while self._shares.total and self.used_bytes > self._max_bytes:
            tenant = self._shares.largest()
            found = self._connection.execute(
                "SELECT id, length(key), ends, length(value) FROM entry WHERE tenant = ? ORDER BY used, id LIMIT ?",
                (self._ids[tenant], EVICTED_AT_ONCE),
            ).fetchall()
            if not found:  # the counts are wrong: it has only pieces that nothing refers to
                self._remove(Remove(tenant, b""))
            for row in found:
                self._drop(tenant, *row)

    def _give_back(self) -> None:
        """Return free pages to the file system, and leave nothing of what was removed in the log."""
        self._connection.executescript("PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE);")


class Reader:
    """A connection that reads, in another thread than the one that writes."""

    def __init__(self, path: Path) -> None:
        self._connection = _connect(path)
        self._connection.execute("PRAGMA query_only = ON")

    def close(self) -> None:
        self._connection.close()

    def get(self, tenant: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of keys; None for those that are missing or damaged."""
        found = (self._entry(tenant, key) for key in keys)
        return [one and one[1] for one in found]

    def values(self, tenant: str) -> list[bytes]:
        """All values of a tenant."""
        query = "SELECT key FROM entry WHERE tenant = (SELECT id FROM tenant WHERE name = ?)"
        keys = [key for (key,) in self._connection.execute(query, (_encoded(tenant),)).fetchall()]
        return [value for value in self.get(tenant, keys) if value is not None]

    def record(self, tenant: str, key: bytes) -> Record | None:
        """A value with its chains, None if anything of it is missing or damaged."""
        query = self._connection.execute
        query("BEGIN")  # so that all of it is of the same time
        try:
            if (found := self._entry(tenant, key)) is None:
                return None
            chains = [self._chain(tenant, number) for number in _numbers(found[0])]
            known = [chain for chain in chains if chain is not None]
            return Record(found[1], known) if len(known) == len(chains) else None
        finally:
            query("COMMIT")

    def _entry(self, tenant: str, key: bytes) -> tuple[bytes, bytes] | None:
        found = self._connection.execute(
            "SELECT ends, checksum, value FROM entry WHERE key = ? AND tenant = (SELECT id FROM tenant WHERE name = ?)",
            (key, _encoded(tenant)),
        ).fetchone()
        if found is None or _checksum(tenant, key, found[0], found[2]) != found[1]:
            return None
        return found[0], found[2]

    def _chain(self, tenant: str, number: int) -> list[tuple[int, bytes]] | None:
        chain = []
        while number:
            found = self._connection.execute(
                "SELECT before, checksum, data FROM piece WHERE number = ?", (number,)
            ).fetchone()
            if found is None or _checksum(tenant, struct.pack("<qq", number, found[0]), b"", found[2]) != found[1]:
                return None
            chain.append((number, found[2]))
            number = found[0]
        return chain[::-1]


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False)
    connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    return connection


def _checksum(tenant: str, key: bytes, ends: bytes, value: bytes) -> bytes:
    name = _encoded(tenant)
    known = blake2b(struct.pack("<III", len(name), len(key), len(ends)), digest_size=CHECKSUM_BYTES)
    for part in (name, key, ends, value):
        known.update(part)
    return known.digest()


def _entry_size(key: bytes, value: bytes) -> int:
    return ENTRY_BYTES + len(key) + len(value)


def _numbers(ends: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(ends) // 8}q", ends[: len(ends) // 8 * 8])


def _encoded(tenant: str) -> bytes:
    return tenant.encode("utf-8", "surrogatepass")


def _name(encoded: bytes) -> str:
    return encoded.decode("utf-8", "surrogatepass")
