"""Whether a store serves: what its errors mean, and whether its calls return."""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
import time

from radixrt.worker.disk.block import StoreState

log = logging.getLogger("radixrt.disk")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


class Clocks:
    """Since when each of the store's threads has been in a call that may hang."""

    def __init__(self) -> None:
        self._began: dict[int, float] = {}

    def begin(self) -> None:
        """A call of this thread begins, or got on."""
        self._began[threading.get_ident()] = time.monotonic()

    def end(self) -> None:
        self._began.pop(threading.get_ident(), None)

    def oldest(self) -> float:
        """Seconds."""
        began = min(list(self._began.values()), default=None)
        return 0.0 if began is None else time.monotonic() - began


class Health:
    """Whether the store serves, and when it tries again. Each trouble is said once, and once that it is over."""

    def __init__(self, folder: object, retry_seconds: float) -> None:
        self._folder = folder
        self._retry_seconds = retry_seconds
        self._said: set[StoreState] = set()
        self._retry_at = 0.0
        self.state = StoreState.OK
        self.why = ""

    def failed(self, state: StoreState, why: str) -> None:
        if state not in self._said:
            self._said.add(state)
            log.warning("%s: %s (%s); serving goes on without", self._folder, _WORDS[state], why)
        self.state, self.why = state, why
        self._retry_at = time.monotonic() + self._retry_seconds

    def may_retry(self) -> bool:
        return time.monotonic() >= self._retry_at

    def try_again(self) -> None:
        """The next work shows whether it is over."""
        self.state, self.why = StoreState.OK, ""

    def say_slow(self) -> None:
        """The state is as it was, once the calls return."""
        if StoreState.SLOW not in self._said:
            self._said.add(StoreState.SLOW)
            log.warning("%s: %s; serving goes on without", self._folder, _WORDS[StoreState.SLOW])

    def worked(self, wrote: bool) -> None:
        """Something went well; that there is room again only something that `wrote` shows."""
        over = self._said if wrote else self._said & {StoreState.GONE, StoreState.SLOW}
        if over and self.state is StoreState.OK:
            self._said = self._said - over
            if not self._said:
                log.warning("%s: the KV store on disk serves again", self._folder)


_WORDS = {
    StoreState.FULL: "no room for KV on disk",
    StoreState.READONLY: "KV on disk cannot be written",
    StoreState.SLOW: "the KV store on disk does not answer",
    StoreState.GONE: "the KV store on disk cannot be used",
}


_VANISHED = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


def write_trouble(e: OSError) -> tuple[StoreState, str]:
    """What it means that a segment cannot be written."""
    state, why = trouble(e)
    return StoreState.READONLY if state is StoreState.GONE and e.errno not in _VANISHED else state, why


def trouble(e: Exception) -> tuple[StoreState, str]:
    """What an error of the file system, or of SQLite, means."""
    if isinstance(e, OSError):
        state = (
            StoreState.FULL if e.errno in _FULL else StoreState.READONLY if e.errno in _READONLY else StoreState.GONE
        )
        return state, e.strerror or str(e)
    code = getattr(e, "sqlite_errorcode", 0)
    if code == sqlite3.SQLITE_READONLY_DBMOVED:
        return StoreState.GONE, "the index vanished"
    code &= 0xFF
    if code == sqlite3.SQLITE_FULL:
        return StoreState.FULL, str(e)
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return StoreState.READONLY, str(e)
    return StoreState.GONE, str(e)
