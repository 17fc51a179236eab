"""Values that survive the router: written behind by a thread, in batches, and read by another one.

    put, remove, touch --> changes not written yet --> [writer: one transaction for each batch] --> state.sqlite
    get, record        <-- changes not written yet
                       <-- [reader] <-- state.sqlite

Nothing here waits for the disk, and no failure of it is raised: what cannot be written is kept for a while and then
lost, what cannot be read counts as missing, and the log says so once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import queue
import sqlite3
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from radixrt.router.persistence.database import Change, Damaged, Database, NewPiece, Put, Reader, Record, Remove, Touch

log = logging.getLogger("radixrt.router")

FILE, LOCK = "state.sqlite", "lock"
BATCH_SECONDS = 0.05
"""How long changes are collected before they are written."""
RETRY_SECONDS = 2.0
READ_SECONDS = 1.0
"""How long a reader is waited for; then the value counts as missing."""
LOCK_SECONDS = 3.0
"""A process that is being ended may hold the folder for so long."""
CLOSE_SECONDS = 5.0
READ_KEYS = 128
"""The most keys that are read before it is another tenant's turn."""
MAX_WAITING_BYTES = 64 << 20
"""The most bytes of changes that wait for the disk; more are lost. The last eighth is for tenants with at most an
eighth."""
TOUCH_SECONDS = 300
"""How exact it is known when a key was last used."""
CHANGE_BYTES = 200

Result = TypeVar("Result")


class PersistentStore:
    """The values of tenants in a folder, which is made if need be, within about `max_bytes`. To be used on one event
    loop. Raises ValueError for a folder that cannot be made, or that another process uses.

    A file that is damaged, or of another format, is set aside as FILE.aside, and a new one begun."""

    def __init__(self, folder: str | Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = Path(folder), max_bytes
        self._lock_file = _locked(self._folder)
        self._mutex = threading.Lock()
        self._changes: list[Change] = []
        """Those that wait to be written, in order."""
        self._waiting: dict[tuple[str, bytes], Change] = {}
        """By key, the last of its changes that wait, except removals of many keys."""
        self._removed: list[Remove] = []
        """Removals of many keys that wait."""
        self._bytes = 0
        self._tenant_bytes: Counter[str] = Counter()
        """Of changes that wait."""
        self._epoch = 1
        self._removals: Counter[str] = Counter()
        """By tenant, so that a read sees that something was removed meanwhile."""
        self._touched: set[tuple[str, bytes]] = set()
        self._touched_at = 0
        self._work = threading.Event()
        self._written = threading.Condition(self._mutex)
        self._closing = False
        self._said = ""
        self._database: Database | None = None
        self._generation = 0
        """Of the file: a reader opens another one."""
        self._inode = 0
        self._numbers = 1
        self._reads: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()
        """What is to be read, by tenant; they take turns."""
        self._to_read = threading.Condition()
        self._reading_since: float | None = None
        self._reader: tuple[int, Reader] | None = None
        """(generation of the file, its reader), of the reader's thread."""
        self._damaged = False
        """Set by the reader's thread: the file is to be set aside."""
        self._open()
        threads = (self._write_all, "state-writer"), (self._read_all, "state-reader")
        self._threads = [threading.Thread(target=target, name=name, daemon=True) for target, name in threads]
        for thread in self._threads:
            thread.start()

    @property
    def epoch(self) -> int:
        """Pieces that were put in an earlier epoch may be missing: they have to be put again. From 1 on."""
        return self._epoch

    def next_number(self) -> int:
        """A number for a new piece."""
        self._numbers += 1
        return self._numbers - 1

    # ------------------------------------------------------------ changes

    def put(
        self,
        tenant: str,
        key: bytes,
        value: bytes,
        ends: tuple[int, ...] = (),
        pieces: Sequence[NewPiece] = (),
        replaces: bytes | None = None,
    ) -> None:
        """Set a value; see Put."""
        put = Put(tenant, key, value, ends, tuple(pieces), replaces)
        with self._mutex:
            most = MAX_WAITING_BYTES
            if self._tenant_bytes[tenant] + put.size > most // 8:
                most -= most // 8
            if self._bytes + put.size <= most:
                self._add(put, put.size, *([] if replaces is None else [replaces]), key)
                return
            self._epoch += 1
        self._say("the disk does not keep up: some of the state is not written")
        for one in (key, replaces):  # an older value must not come back
            if one is not None:
                self.remove(tenant, one)

    def remove(self, tenant: str, key: bytes) -> None:
        with self._mutex:
            self._add(Remove(tenant, key, exact=True), CHANGE_BYTES, key)
            self._removals[tenant] += 1

    def remove_all(self, tenant: str, prefix: bytes = b"") -> None:
        """Remove all keys of a tenant that begin with `prefix`."""
        removal = Remove(tenant, prefix)
        with self._mutex:
            self._add(removal, CHANGE_BYTES)
            self._removed.append(removal)
            self._removals[tenant] += 1
            for one in [one for one in self._waiting if one[0] == tenant and one[1].startswith(prefix)]:
                del self._waiting[one]

    def touch(self, tenant: str, keys: Sequence[bytes]) -> None:
        """Keys were used, so that others are dropped before them."""
        now = int(time.time()) // TOUCH_SECONDS
        if now != self._touched_at:
            self._touched_at = now
            self._touched.clear()
        if fresh := tuple(key for key in keys if (tenant, key) not in self._touched):
            self._touched.update((tenant, key) for key in fresh)
            with self._mutex:
                if self._bytes < MAX_WAITING_BYTES:
                    self._add(Touch(tenant, fresh), CHANGE_BYTES * len(fresh))

    def _add(self, change: Change, size: int, *keys: bytes) -> None:
        """To be called with the mutex. `keys` are those whose values it changes."""
        self._changes.append(change)
        self._waiting.update(((change.tenant, key), change) for key in keys)
        self._bytes += size
        self._tenant_bytes[change.tenant] += size
        self._work.set()

    # ------------------------------------------------------------ reads

    async def get(self, tenant: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of keys; None for unknown ones."""
        found = {key: self._peek(tenant, key) for key in keys}
        wanted = [key for key, value in found.items() if value is _UNKNOWN]
        for at in range(0, len(wanted), READ_KEYS):
            some = wanted[at : at + READ_KEYS]
            values = await self._read_values(tenant, some)
            for key, value in zip(some, values or [None] * len(some), strict=True):
                later = self._peek(tenant, key)
                found[key] = value if later is _UNKNOWN else later
        return [found[key] for key in keys]  # type: ignore[misc]

    async def _read_values(self, tenant: str, keys: Sequence[bytes]) -> list[bytes | None] | None:
        return await self._read(tenant, lambda reader: reader.get(tenant, keys))

    async def record(self, tenant: str, key: bytes) -> Record | None:
        """A value with its chains; None if it is unknown."""
        if self._peek(tenant, key) is None:
            return None
        found = await self._read(tenant, lambda reader: self._settled(tenant, key) and reader.record(tenant, key))
        return None if self._peek(tenant, key) is None else found or None

    def values(self, tenant: str) -> list[bytes]:
        """All values of a tenant that are written. Waits for the disk: to be called before the event loop runs."""
        answer: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self._to_be_read(tenant, lambda: answer.put(self._read_now(lambda reader: reader.values(tenant))))
        try:
            return answer.get(timeout=READ_SECONDS) or []
        except queue.Empty:
            return []

    def _peek(self, tenant: str, key: bytes) -> object:
        """A value that waits to be written, None if it is to be removed; _UNKNOWN if neither."""
        with self._mutex:
            if (change := self._waiting.get((tenant, key))) is not None:
                return change.value if isinstance(change, Put) and change.key == key else None
            removed = any(one.tenant == tenant and key.startswith(one.prefix) for one in self._removed)
            return None if removed else _UNKNOWN

    def _settled(self, tenant: str, key: bytes) -> bool:
        """Wait, in the reader's thread, until the value of a key is written; returns whether it was in time."""
        with self._written:
            return self._written.wait_for(lambda: (tenant, key) not in self._waiting, READ_SECONDS)

    async def _read(self, tenant: str, read: Callable[[Reader], Result]) -> Result | None:
        """Run `read` in the reader's thread; None if it fails or takes too long."""
        since = self._reading_since
        if self._closing or (since is not None and time.monotonic() - since > READ_SECONDS):
            return None
        loop = asyncio.get_running_loop()
        for _ in range(2):
            before = self._removals[tenant]
            answer: asyncio.Future[Result | None] = loop.create_future()

            def work(answer: asyncio.Future[Result | None] = answer) -> None:
                result = self._read_now(read)
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(_settle, answer, result)

            self._to_be_read(tenant, work)
            try:
                found = await asyncio.wait_for(answer, READ_SECONDS)
            except TimeoutError:
                self._say("the disk does not answer: state is not read")
                return None
            if self._removals[tenant] == before:
                return found
        return None

    def _read_all(self) -> None:
        """The reader's thread."""
        while (work := self._next_read()) is not None:
            self._reading_since = time.monotonic()
            work()
            self._reading_since = None
        if self._reader is not None:
            self._reader[1].close()

    def _to_be_read(self, tenant: str, work: Callable[[], None]) -> None:
        with self._to_read:
            self._reads.setdefault(tenant, deque()).append(work)
            self._to_read.notify()

    def _next_read(self) -> Callable[[], None] | None:
        """Waits for one; None at the end."""
        with self._to_read:
            self._to_read.wait_for(lambda: self._reads or self._closing)
            if not self._reads:
                return None
            tenant, works = self._reads.popitem(last=False)
            work = works.popleft()
            if works:
                self._reads[tenant] = works
            return work

    def _read_now(self, read: Callable[[Reader], Result]) -> Result | None:
        try:
            if self._reader is None or self._reader[0] != self._generation:
                if self._reader is not None:
                    self._reader[1].close()
                self._reader = None
                generation = self._generation
                if self._database is None:
                    return None
                self._reader = generation, Reader(self._folder / FILE)
            return read(self._reader[1])
        except Exception as error:
            if isinstance(error, sqlite3.Error) and _is_damage(error):
                self._damaged = True
                self._work.set()
            else:
                self._say(f"state cannot be read: {error}")
            return None

    # ------------------------------------------------------------ the writer's thread

    def _write_all(self) -> None:
        while True:
            self._work.wait()
            if not self._closing:
                time.sleep(BATCH_SECONDS)
            self._work.clear()
            with self._mutex:
                changes, size, sizes = self._changes, self._bytes, self._tenant_bytes
                self._changes, self._bytes, self._tenant_bytes = [], 0, Counter()
            if not (changes or self._damaged) or self._write(changes):
                self._done(changes)
            else:
                self._keep(changes, size, sizes)
                if self._closing:
                    break
                time.sleep(RETRY_SECONDS)
            if self._closing and not self._changes:
                break
        if self._database is not None:
            self._database.close()

    def _write(self, changes: list[Change]) -> bool:
        """Returns whether the changes are done with; otherwise they are to be tried again."""
        for _ in range(2):
            try:
                if self._damaged:
                    raise Damaged("it is malformed")
                if self._database is None or self._is_gone():
                    self._reopen()
                assert self._database is not None
                if self._database.apply(changes, int(time.time())):
                    self._next_epoch()
            except Exception as error:
                if not _is_damage(error):
                    self._say(f"state is not written: {error}")
                    return False
                self._damaged = False
                self._set_aside(error)
            else:
                if self._said:
                    log.info("--state-path %s: state is written again", self._folder)
                    self._said = ""
                return True
        self._next_epoch()  # not even a new file takes these changes
        return self._database is not None

    def _done(self, changes: list[Change]) -> None:
        with self._written:
            for change in changes:
                match change:
                    case Put():
                        written = (change.replaces, change.key)
                    case Remove(exact=True):
                        written = (None, change.prefix)
                    case Remove():
                        self._removed.remove(change)
                        continue
                    case _:
                        continue
                for key in written:
                    if key is not None and self._waiting.get((change.tenant, key)) is change:
                        del self._waiting[change.tenant, key]
            self._written.notify_all()

    def _keep(self, changes: list[Change], size: int, sizes: Counter[str]) -> None:
        """Changes were not written: they are to be written with the next ones."""
        with self._mutex:
            self._changes[:0] = changes
            self._bytes += size
            self._tenant_bytes.update(sizes)
            self._work.set()

    def _is_gone(self) -> bool:
        try:
            return os.stat(self._folder / FILE).st_ino != self._inode
        except FileNotFoundError:
            return True

    def _open(self) -> None:
        """At the start: begin with what is there, or with a new file. A folder that cannot be written to is no
        error."""
        try:
            self._reopen()
        except Exception as error:
            if _is_damage(error):
                self._set_aside(error)
            else:
                self._say(f"state is not written: {error}")

    def _reopen(self) -> None:
        if self._database is not None:
            self._say("the file has vanished, and is begun anew")
            self._database.close()
            self._database = None
            self._next_epoch()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._database = Database(self._folder / FILE, self._max_bytes)
        self._inode = os.stat(self._folder / FILE).st_ino
        self._numbers = max(self._numbers, self._database.next_number())
        self._generation += 1

    def _set_aside(self, error: Exception) -> None:
        """Begin a new file in place of a damaged one."""
        log.warning("--state-path %s: %s cannot be used and is set aside: %s", self._folder, FILE, error)
        if self._database is not None:
            self._database.close()
            self._database = None
        try:
            path = self._folder / FILE
            for suffix in ("-wal", "-shm"):
                path.with_name(FILE + suffix).unlink(missing_ok=True)
            path.replace(path.with_name(FILE + ".aside"))
            self._next_epoch()
            self._reopen()
        except (sqlite3.Error, OSError) as problem:
            self._say(f"state is not written: {problem}")

    def _next_epoch(self) -> None:
        with self._mutex:
            self._epoch += 1

    def _say(self, problem: str) -> None:
        """Once, until it is over."""
        if not self._said:
            log.warning("--state-path %s: %s", self._folder, problem)
        self._said = problem

    # ------------------------------------------------------------ the end

    def flush(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Wait until all that was put is written; returns whether it was, in time."""
        with self._written:
            return self._written.wait_for(lambda: not (self._waiting or self._changes or self._removed), seconds)

    def close(self) -> None:
        """Write what waits, if the disk answers in time."""
        self._closing = True
        self._work.set()
        with self._to_read:
            self._to_read.notify()
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
        os.close(self._lock_file)


_UNKNOWN = object()


def _settle(answer: asyncio.Future[Result | None], result: Result | None) -> None:
    if not answer.done():
        answer.set_result(result)


def _is_damage(error: Exception) -> bool:
    """Whether a file has to be given up, as it holds what it should not. Other errors are those of the disk, and may
    pass."""
    if isinstance(error, sqlite3.OperationalError):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR  # a table is missing, say
    return not isinstance(error, OSError)


def _locked(folder: Path) -> int:
    """A file of the folder that is locked while this process lives."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.ENOSPC) and folder.is_dir():
            return os.open(folder, os.O_RDONLY)
        raise ValueError(f"--state-path {folder}: {error.strerror}") from None
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(file)
                raise ValueError(f"--state-path {folder}: another process uses it") from None
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return file
