"""The index: which blocks there are, and where. One SQLite file for a folder, shared by all its processes.

    index-<n>.sqlite     the highest n holds; a damaged one is followed by n + 1, and removed: it has tenants' ids
    <writer>.lock        locked while the writer (a store that is open) lives
    fp-<digest>/<writer>-<n>.kv   segments of a fingerprint

A block (`blocks`) has a part for each rank (`parts`), an extent of a segment. A part is reserved, with its block,
before its bytes are written, and sealed afterwards; a block that has no part `missing` any more, nor any before it,
gets a sequence number, by which others find it. A part that is given up becomes a hole (`holes`) in the transaction
that removes its block, and counts until its bytes are freed. So `used` is exact whenever a process is killed, and all
that is left to be done then can be read here. A part that is not sealed belongs to its writer, even if its block is
gone: only the writer, or who finds it dead, makes a hole of it.

The journal is a file (TRUNCATE), not a WAL: a WAL's index is mapped memory, and a disk that fails, or a file that is
cut, would end the process by SIGBUS. Power may be lost: the index keeps its order (`synchronous` NORMAL), and blocks
whose bytes did not reach the disk do not verify.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

VERSION = 1
_SCHEMA = """
CREATE TABLE fingerprints (id INTEGER PRIMARY KEY AUTOINCREMENT, name BLOB UNIQUE NOT NULL, used_at REAL NOT NULL);
CREATE TABLE namespaces (id INTEGER PRIMARY KEY AUTOINCREMENT, fingerprint INTEGER NOT NULL, digest BLOB NOT NULL,
    name BLOB NOT NULL, key_name BLOB NOT NULL, UNIQUE (fingerprint, digest));
CREATE TABLE segments (id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT UNIQUE NOT NULL, writer TEXT NOT NULL,
    salt BLOB NOT NULL, closed INTEGER NOT NULL);
CREATE TABLE blocks (number INTEGER PRIMARY KEY, fingerprint INTEGER NOT NULL, kind TEXT NOT NULL,
    namespace INTEGER NOT NULL, parent INTEGER, start INTEGER NOT NULL, path BLOB NOT NULL, value REAL NOT NULL,
    children INTEGER NOT NULL, missing INTEGER NOT NULL, sequence INTEGER, ids BLOB NOT NULL);
CREATE INDEX blocks_by_parent ON blocks (parent);
CREATE INDEX blocks_by_namespace ON blocks (namespace);
CREATE INDEX blocks_by_sequence ON blocks (sequence);
CREATE INDEX leaves ON blocks (value, fingerprint) WHERE children = 0 AND missing = 0;
CREATE INDEX unfinished ON blocks (number) WHERE missing > 0;
CREATE TABLE parts (number INTEGER NOT NULL, rank INTEGER NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    extent INTEGER NOT NULL, nbytes INTEGER NOT NULL, seal BLOB, PRIMARY KEY (number, rank)) WITHOUT ROWID;
CREATE INDEX parts_by_segment ON parts (segment);
CREATE TABLE holes (segment INTEGER NOT NULL, offset INTEGER NOT NULL, extent INTEGER NOT NULL,
    PRIMARY KEY (segment, offset)) WITHOUT ROWID;
CREATE TABLE removed (sequence INTEGER PRIMARY KEY, number INTEGER NOT NULL);
CREATE TABLE totals (one INTEGER PRIMARY KEY CHECK (one = 1), used INTEGER NOT NULL, sequence INTEGER NOT NULL);
INSERT INTO totals VALUES (1, 0, 0);
"""
_KEPT_REMOVALS = 100_000
_BATCH = 512


class Damaged(Exception):
    """The index cannot be trusted, or is of another version."""


class Segment(NamedTuple):
    id: int
    path: str
    salt: bytes


class Hole(NamedTuple):
    segment: int
    path: str
    offset: int
    extent: int


class Freed(NamedTuple):
    numbers: list[int]
    nbytes: int


class Index:
    """Of one thread. What changes it is called within `transaction`. Raises sqlite3.Error and `Damaged`."""

    def __init__(self, folder: Path, wait_seconds: float) -> None:
        """The folder's index, made if there is none."""
        generations = self.generations(folder)
        self.generation = max(generations, default=0)
        if not generations:
            self.generation = self._made(folder, 1)
        file = folder / _name(self.generation)
        self._db = sqlite3.connect(file, timeout=wait_seconds, isolation_level=None, check_same_thread=False)
        try:
            self._open()
        except BaseException:
            self._db.close()
            raise

    @staticmethod
    def generations(folder: Path) -> list[int]:
        names = (x.removeprefix("index-").removesuffix(".sqlite") for x in os.listdir(folder) if x.endswith(".sqlite"))
        return sorted(int(x) for x in names if x.isdigit())

    @classmethod
    def replace(cls, folder: Path, damaged: int) -> None:
        """Begin anew after generation `damaged`; whoever comes first does."""
        cls._made(folder, damaged + 1)
        for old in cls.generations(folder):
            if old <= damaged:
                for name in (_name(old), _name(old) + "-journal"):
                    (folder / name).unlink(missing_ok=True)

    @staticmethod
    def _made(folder: Path, generation: int) -> int:
        # Opened only while nobody has it open: closing any descriptor of a file drops the process's locks on it.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(folder / _name(generation), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        return generation

    def _open(self) -> None:
        run = self._db.execute
        for pragma in ("synchronous = NORMAL", "secure_delete = ON", "cache_size = -16384", "temp_store = MEMORY"):
            run(f"PRAGMA {pragma}")
        run("PRAGMA journal_mode = TRUNCATE").fetchone()
        version = run("PRAGMA user_version").fetchone()[0]
        if version == 0:
            with self.transaction():
                if run("PRAGMA user_version").fetchone()[0] == 0:
                    if run("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                        raise Damaged("not an index")
                    for statement in _SCHEMA.split(";\n"):
                        run(statement)
                    run(f"PRAGMA user_version = {VERSION}")
        elif version != VERSION:
            raise Damaged(f"version {version}")

    def on_progress(self, call: Callable[[], None]) -> None:
        """Call it now and then while a statement runs, but not while it waits."""
        self._db.set_progress_handler(call, 100_000)

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    def changed(self) -> int:
        """A number that differs after another process, or another store, has changed something."""
        return self._one("PRAGMA data_version")

    def nbytes(self) -> int:
        return self._one("PRAGMA page_count") * self._one("PRAGMA page_size")

    # What a store is

    def fingerprint(self, name: bytes) -> int:
        self._db.execute("INSERT OR IGNORE INTO fingerprints (name, used_at) VALUES (?, ?)", (name, time.time()))
        return self._one("SELECT id FROM fingerprints WHERE name = ?", name)

    def use(self, fingerprint: int) -> None:
        """Somebody has it now."""
        self._db.execute("UPDATE fingerprints SET used_at = ? WHERE id = ?", (time.time(), fingerprint))

    def unused(self, before: float) -> list[int]:
        """Fingerprints that nobody has used since then."""
        return [x for (x,) in self._db.execute("SELECT id FROM fingerprints WHERE used_at < ?", (before,))]

    def forget_fingerprints(self, before: float) -> list[str]:
        """Drop those without blocks and segments. Returns the names of their folders."""
        rows = self._db.execute(
            "SELECT id, name FROM fingerprints f WHERE used_at < ? "
            "AND NOT EXISTS (SELECT 1 FROM blocks WHERE fingerprint = f.id) "
            "AND NOT EXISTS (SELECT 1 FROM segments WHERE path LIKE 'fp-' || lower(hex(f.name)) || '/%')",
            (before,),
        ).fetchall()
        self._db.executemany("DELETE FROM namespaces WHERE fingerprint = ?", [(x,) for x, _ in rows])
        self._db.executemany("DELETE FROM fingerprints WHERE id = ?", [(x,) for x, _ in rows])
        return [f"fp-{name.hex()}" for _, name in rows]

    def namespace(self, fingerprint: int, digest: bytes, name: bytes, key_name: bytes) -> int:
        """Its id, made if there is none."""
        row = (fingerprint, digest, name, key_name)
        self._db.execute("INSERT OR IGNORE INTO namespaces (fingerprint, digest, name, key_name) VALUES (?,?,?,?)", row)
        return self._one("SELECT id FROM namespaces WHERE fingerprint = ? AND digest = ?", fingerprint, digest)

    def namespaces(self, after: int = 0) -> list[tuple[int, bytes, bytes, bytes]]:
        """(id, digest, name, name of the key it is hidden with) of all fingerprints, of ids greater than `after`."""
        return self._db.execute("SELECT id, digest, name, key_name FROM namespaces WHERE id > ?", (after,)).fetchall()

    def forget_namespaces(self, ids: Iterable[int]) -> None:
        self._db.executemany("DELETE FROM namespaces WHERE id = ?", [(x,) for x in ids])

    # Space

    def used(self) -> int:
        """Bytes of all parts and holes."""
        return self._one("SELECT used FROM totals")

    def repair(self) -> None:
        """Count anew what is counted along."""
        self._db.execute(
            "UPDATE totals SET used = (SELECT coalesce(sum(extent), 0) FROM parts) + "
            "(SELECT coalesce(sum(extent), 0) FROM holes)"
        )
        self._db.execute(
            "WITH c AS (SELECT b.number AS number, b.children AS was, count(k.number) AS n FROM blocks b "
            "LEFT JOIN blocks k ON k.parent = b.number GROUP BY b.number) "
            "UPDATE blocks SET children = (SELECT n FROM c WHERE c.number = blocks.number) "
            "WHERE number IN (SELECT number FROM c WHERE was != n)"
        )

    def add_segment(self, path: str, writer: str, salt: bytes) -> Segment:
        row = (path, writer, salt)
        self._db.execute("INSERT INTO segments (path, writer, salt, closed) VALUES (?, ?, ?, 0)", row)
        return Segment(self._one("SELECT last_insert_rowid()"), path, salt)

    def segments(self) -> dict[int, Segment]:
        return {x[0]: Segment(*x) for x in self._db.execute("SELECT id, path, salt FROM segments")}

    def segment(self, id: int) -> Segment | None:
        row = self._db.execute("SELECT id, path, salt FROM segments WHERE id = ?", (id,)).fetchone()
        return None if row is None else Segment(*row)

    def open_writers(self) -> list[str]:
        return [x for (x,) in self._db.execute("SELECT DISTINCT writer FROM segments WHERE closed = 0")]

    def close_segment(self, id: int) -> None:
        """Nothing is appended any more."""
        self._db.execute("UPDATE segments SET closed = 1 WHERE id = ?", (id,))

    def bury(self, writer: str) -> None:
        """A writer is gone: what it had not finished becomes holes."""
        of_writer = "FROM parts p JOIN segments s ON s.id = p.segment"
        blocks = self._db.execute(
            f"SELECT b.number {of_writer} JOIN blocks b ON b.number = p.number WHERE s.writer = ? AND missing > 0",
            (writer,),
        ).fetchall()
        parts = self._db.execute(f"SELECT number, rank {of_writer} WHERE s.writer = ? AND seal IS NULL", (writer,))
        for number, rank in parts.fetchall():
            self.abandon(number, rank)
        self.delete(self.subtree(x for (x,) in blocks))
        self._db.execute("UPDATE segments SET closed = 1 WHERE writer = ?", (writer,))

    def empty_segments(self) -> list[Segment]:
        """Closed, and without a part."""
        return [
            Segment(*x)
            for x in self._db.execute(
                "SELECT id, path, salt FROM segments s WHERE closed = 1 AND NOT EXISTS "
                "(SELECT 1 FROM parts WHERE segment = s.id)"
            )
        ]

    def drop_segment(self, id: int) -> None:
        """Its file is gone."""
        self.filled(self._holes("WHERE segment = ?", id))
        self._db.execute("DELETE FROM segments WHERE id = ?", (id,))

    def holes(self, limit: int) -> list[Hole]:
        return self._holes("LIMIT ?", limit)

    def _holes(self, clause: str, *args: int) -> list[Hole]:
        query = (
            "SELECT h.segment, coalesce(s.path, ''), offset, extent FROM holes h "
            f"LEFT JOIN segments s ON s.id = h.segment {clause}"
        )
        return [Hole(*x) for x in self._db.execute(query, args)]

    def filled(self, holes: Iterable[Hole]) -> None:
        """Their bytes are free. Others may have said so before."""
        for hole in holes:
            gone = self._db.execute("DELETE FROM holes WHERE segment = ? AND offset = ?", (hole.segment, hole.offset))
            if gone.rowcount:
                self._db.execute("UPDATE totals SET used = used - ?", (hole.extent,))

    # Blocks

    def path(self, number: int, fingerprint: int) -> bytes | None:
        """The digest of a block's path; None if there is no such block."""
        row = self._db.execute("SELECT path FROM blocks WHERE number = ? AND fingerprint = ?", (number, fingerprint))
        return next((x for (x,) in row), None)

    def reserve(
        self, number: int, fingerprint: int, kind: str, namespace: int, parent: int | None, start: int, path: bytes,
        value: float, ids: bytes, ranks: int,
    ) -> None:  # fmt: skip
        """A block, of which all parts are missing."""
        row = (number, fingerprint, kind, namespace, parent, start, path, value, ranks, ids)
        self._db.execute("INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, ?, NULL, ?)", row)
        if parent is not None:
            self._db.execute("UPDATE blocks SET children = children + 1 WHERE number = ?", (parent,))

    def reserve_part(self, number: int, rank: int, segment: int, offset: int, extent: int, nbytes: int) -> None:
        row = (number, rank, segment, offset, extent, nbytes)
        self._db.execute("INSERT INTO parts VALUES (?, ?, ?, ?, ?, ?, NULL)", row)
        self._db.execute("UPDATE totals SET used = used + ?", (extent,))

    def seal(self, number: int, rank: int, seal: bytes) -> list[int] | None:
        """A part's bytes are there. Returns the blocks that can be seen from now on: this one, if it has all its parts
        and the block before it can be seen, and those after it that waited for it. None if the block is gone, and the
        part with it."""
        if not self._db.execute("UPDATE blocks SET missing = missing - 1 WHERE number = ?", (number,)).rowcount:
            self.abandon(number, rank)
            return None
        self._db.execute("UPDATE parts SET seal = ? WHERE number = ? AND rank = ?", (seal, number, rank))
        shown, todo = [], [number]
        while todo:
            number = todo.pop()
            ready = self._db.execute(
                "UPDATE blocks SET sequence = (SELECT sequence + 1 FROM totals) WHERE number = ? AND missing = 0 AND "
                "sequence IS NULL AND (parent IS NULL OR EXISTS "
                "(SELECT 1 FROM blocks p WHERE p.number = blocks.parent AND p.sequence IS NOT NULL))",
                (number,),
            )
            if ready.rowcount:
                self._next()
                shown.append(number)
                todo.extend(x for (x,) in self._db.execute("SELECT number FROM blocks WHERE parent = ?", (number,)))
        return shown

    def abandon(self, number: int, rank: int) -> None:
        """The bytes of a part that is not sealed will not come any more. Of its writer, or if that is dead."""
        where = "WHERE number = ? AND rank = ? AND seal IS NULL"
        self._db.execute(f"INSERT INTO holes SELECT segment, offset, extent FROM parts {where}", (number, rank))
        self._db.execute(f"DELETE FROM parts {where}", (number, rank))

    def touch(self, values: dict[int, float]) -> None:
        self._db.executemany("UPDATE blocks SET value = ? WHERE number = ?", [(v, n) for n, v in values.items()])

    def subtree(self, numbers: Iterable[int]) -> list[int]:
        """Blocks of `numbers` that there are and all that come after them; children before their parents."""
        found: dict[int, int] = {}
        todo = [(x, 0) for x in numbers]
        while todo:
            number, depth = todo.pop()
            if found.get(number, -1) >= depth or depth > 1 << 24:
                continue
            if number not in found and not self._one("SELECT count(*) FROM blocks WHERE number = ?", number):
                continue
            found[number] = depth
            children = self._db.execute("SELECT number FROM blocks WHERE parent = ?", (number,))
            todo.extend((x, depth + 1) for (x,) in children)
        return sorted(found, key=lambda x: -found[x])

    def of_namespace(self, id: int, limit: int) -> list[int]:
        """The last blocks of its paths, children before their parents."""
        query = "SELECT number FROM blocks WHERE namespace = ? ORDER BY start DESC, kind DESC LIMIT ?"
        return [x for (x,) in self._db.execute(query, (id, limit))]

    def of_fingerprint(self, id: int, limit: int) -> list[int]:
        query = "SELECT number FROM blocks WHERE fingerprint = ? ORDER BY start DESC, kind DESC LIMIT ?"
        return [x for (x,) in self._db.execute(query, (id, limit))]

    def delete(self, numbers: list[int]) -> Freed:
        """Delete blocks; their sealed parts become holes. Those after them must come before them."""
        freed = Freed([], 0)
        for number in numbers:
            freed = Freed(freed.numbers, freed.nbytes + self._delete(number))
            freed.numbers.append(number)
        return freed

    def _delete(self, number: int) -> int:
        run = self._db.execute
        row = run("SELECT parent FROM blocks WHERE number = ?", (number,)).fetchone()
        if row is None:
            return 0
        where = "WHERE number = ? AND seal IS NOT NULL"
        nbytes = self._one(f"SELECT coalesce(sum(extent), 0) FROM parts {where}", number)
        run(f"INSERT OR REPLACE INTO holes SELECT segment, offset, extent FROM parts {where}", (number,))
        run(f"DELETE FROM parts {where}", (number,))
        run("DELETE FROM blocks WHERE number = ?", (number,))
        if row[0] is not None:
            run("UPDATE blocks SET children = children - 1 WHERE number = ?", (row[0],))
        run("INSERT INTO removed VALUES (?, ?)", (self._next(), number))
        return nbytes

    def evict(self, nbytes: int, below: float, unused: list[int]) -> Freed:
        """Delete blocks of at least `nbytes`, if there are: leaves first, the least valuable first; those of `unused`
        fingerprints before others, of which only blocks of a lower value than `below` go."""
        freed = self._evict(nbytes, float("inf"), unused) if unused else Freed([], 0)
        if freed.nbytes < nbytes:
            more = self._evict(nbytes - freed.nbytes, below, None)
            freed = Freed(freed.numbers + more.numbers, freed.nbytes + more.nbytes)
        return freed

    def _evict(self, nbytes: int, below: float, fingerprints: list[int] | None) -> Freed:
        only = "" if fingerprints is None else f"AND fingerprint IN ({','.join(map(str, fingerprints))})"
        query = f"SELECT value, number FROM blocks WHERE children = 0 AND missing = 0 {only}"
        numbers, total = [], 0
        while total < nbytes:
            leaves = self._db.execute(f"{query} ORDER BY value LIMIT {_BATCH}").fetchall()
            edge = leaves[-1][0] if len(leaves) == _BATCH else float("inf")  # beyond it there may be others
            heap, found = leaves, False
            heapq.heapify(heap)
            while heap and total < nbytes and heap[0][0] <= edge and heap[0][0] < below:
                _, number = heapq.heappop(heap)
                parent = self._one("SELECT parent FROM blocks WHERE number = ?", number)
                total += self._delete(number)
                numbers.append(number)
                found = True
                for row in self._db.execute(f"{query} AND number = ?", (parent,)).fetchall():
                    heapq.heappush(heap, row)
            if not found:
                break
        return Freed(numbers, total)

    def extents(self, numbers: Iterable[int]) -> list[Hole]:
        """Of blocks' sealed parts."""
        query = (
            "SELECT p.segment, s.path, offset, extent FROM parts p JOIN segments s ON s.id = p.segment "
            "WHERE number = ? AND seal IS NOT NULL"
        )
        return [Hole(*x) for number in numbers for x in self._db.execute(query, (number,))]

    def least_segment(self, but: int) -> list[int]:
        """The blocks of the closed segment that is worth least, and those after them: children before parents."""
        row = self._db.execute(
            "SELECT p.segment FROM parts p JOIN segments s ON s.id = p.segment JOIN blocks b ON b.number = p.number "
            "WHERE s.closed = 1 AND s.id != ? AND b.missing = 0 GROUP BY p.segment ORDER BY avg(b.value) LIMIT 1",
            (but,),
        ).fetchone()
        if row is None:
            return []
        return self.subtree([x for (x,) in self._db.execute("SELECT number FROM parts WHERE segment = ?", row)])

    # What others did

    def sequence(self) -> int:
        return self._one("SELECT sequence FROM totals")

    def rows(self, fingerprint: int, rank: int, since: int) -> list[tuple]:
        """Finished blocks since a sequence number, or all (-1), by `start`: (number, kind, namespace, parent, start,
        ids, value, path, segment, offset, nbytes, seal)."""
        query = (
            "SELECT b.number, kind, namespace, parent, start, ids, value, path, segment, offset, nbytes, seal "
            "FROM blocks b LEFT JOIN parts p ON p.number = b.number AND p.rank = ? "
            "WHERE fingerprint = ? AND sequence IS NOT NULL"
        )
        if since >= 0:
            rows = self._db.execute(query + " AND sequence > ?", (rank, fingerprint, since)).fetchall()
        else:
            rows = self._db.execute(query, (rank, fingerprint)).fetchall()
        rows.sort(key=lambda x: x[4])
        return rows

    def removals(self, since: int) -> list[int] | None:
        """Blocks that were removed since a sequence number; None if nobody remembers."""
        oldest = self._one("SELECT min(sequence) FROM removed")
        if oldest is not None and since < oldest - 1 and self._one("SELECT count(*) FROM removed") >= _KEPT_REMOVALS:
            return None
        return [x for (x,) in self._db.execute("SELECT number FROM removed WHERE sequence > ?", (since,))]

    def trim_removals(self) -> None:
        if self._one("SELECT count(*) FROM removed") > 2 * _KEPT_REMOVALS:
            self._db.execute(
                "DELETE FROM removed WHERE sequence <= "
                "(SELECT sequence FROM removed ORDER BY sequence DESC LIMIT 1 OFFSET ?)",
                (_KEPT_REMOVALS,),
            )

    def _next(self) -> int:
        self._db.execute("UPDATE totals SET sequence = sequence + 1")
        return self.sequence()

    def _one(self, query: str, *args: object):  # type: ignore[no-untyped-def]
        row = self._db.execute(query, args).fetchone()
        if row is None:
            raise Damaged(query)
        return row[0]


def _name(generation: int) -> str:
    return f"index-{generation}.sqlite"
