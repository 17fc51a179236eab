"""The thread that has the index: it opens it, gives it up when it fails, and tries again."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable

from radixrt.worker.disk.block import StoreState
from radixrt.worker.disk.health import Health, trouble
from radixrt.worker.disk.index import Damaged, Index
from radixrt.worker.disk.session import Session, Setting
from radixrt.worker.disk.tasks import Write

log = logging.getLogger("radixrt.disk")

_WAIT_SECONDS = 0.02


class Manager:
    """A daemon: it never raises, and holds up nothing if it hangs."""

    def __init__(self, setting: Setting, health: Health) -> None:
        self._at = setting
        self._health = health
        self.session: Session | None = None
        self.loaded = threading.Event()
        """The index was read, or cannot be."""
        self._left: dict[int, Write] = {}
        """Of sessions that were lost, under way: until they have settled there is no other one."""
        self._lost: list[Session] = []
        self._begun_at = float("-inf")
        self._closing = False
        self._close_at = 0.0
        self._thread = threading.Thread(target=self._run, name="disk-index", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """What waits is dropped, what is under way has `seconds`."""
        self._close_at = time.monotonic() + seconds
        self._closing = True
        self._at.inbox.wake.set()
        self._thread.join(seconds + 0.1)

    def _run(self) -> None:
        wake, tick = self._at.inbox.wake, self._at.limits.tick_seconds
        while not self._closing:
            self._guarded(self._turn)
            hurried = self.session is not None and self.session.is_hurried
            wake.wait(min(_WAIT_SECONDS, tick) if hurried else tick)
            wake.clear()
        self._at.inbox.refuse_waiting(self._at.ledger, "closed")
        while self.session is not None and self.session.is_writing and time.monotonic() < self._close_at:
            self._guarded(self._turn)
            wake.wait(_WAIT_SECONDS)
            wake.clear()
        self._guarded(self._end)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do it; what goes wrong is told, not raised."""
        self._at.clocks.begin()
        try:
            work()
        except Exception as e:
            self._went_wrong(e)
        self._at.clocks.end()

    def _went_wrong(self, e: Exception) -> None:
        code = getattr(e, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if isinstance(e, Damaged):
            self._begin_anew(str(e))
        elif isinstance(e, sqlite3.Error) and code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            pass  # the next turn does it
        elif isinstance(e, sqlite3.Error) and (code == sqlite3.SQLITE_ERROR or not _is_operational(e)):
            self._begin_anew(str(e))
        elif isinstance(e, sqlite3.Error | OSError):
            self._fail(e)
        else:  # of values that no index of ours has; or a fault of ours
            log.debug("the index of KV on disk", exc_info=True)
            self._begin_anew(repr(e))

    def _turn(self) -> None:
        if self._health.state is not StoreState.OK:
            if self._health.state is StoreState.GONE:
                self._lose()
            if not self._health.may_retry():
                self._do_without()
                return
            self._health.try_again()
        if self.session is not None and self.session.is_lost():
            self._health.failed(StoreState.GONE, "the folder or its index vanished")
            self._health.try_again()
            self._lose()
        if self.session is None:
            self._let_go()
            if self._left:
                return
            self.session = Session(self._at)
        wrote = self.session.turn()
        self.loaded.set()
        self._health.worked(wrote)

    def _do_without(self) -> None:
        """Until it is time to try again. Blocks of a full disk can be deleted, and what was written before is there."""
        state, inbox = self._health.state, self._at.inbox
        if state is StoreState.FULL and self.session is not None:
            while inbox.writes:
                self._at.ledger.end(inbox.writes.popleft().job, state.value)
            with contextlib.suppress(OSError, sqlite3.OperationalError):
                self.session.turn()
                return
        inbox.refuse(self._at.ledger, state.value)
        self.loaded.set()

    def _end(self) -> None:
        if self.session is None:
            return
        if self.session.is_writing:
            self._lose()
        else:
            session, self.session = self.session, None
            session.end()

    def _lose(self) -> None:
        """Nothing that the index named is there."""
        session, self.session = self.session, None
        if session is None:
            return
        self._left.update(session.lose())
        self._lost.append(session)
        places = list(self._at.places)
        self._at.places.clear()
        self._at.ledger.change(removed=places)
        self._let_go()

    def _let_go(self) -> None:
        settled = self._at.inbox.settled
        while settled:
            task = settled.popleft()
            self._left.pop(task.job.number, None)
            self._at.ledger.end(task.job, "gone")
        while self._lost and not self._left:
            self._lost.pop().release()

    def _begin_anew(self, why: str) -> None:
        """The index is damaged. If the last one was just begun, something else is wrong."""
        if time.monotonic() < self._begun_at + self._at.limits.retry_seconds:
            self._fail(OSError(f"its index is damaged again: {why}"))
            return
        self._begun_at = time.monotonic()
        try:
            generations = Index.generations(self._at.folder)
            damaged = self.session.generation if self.session is not None else max(generations, default=0)
            self._lose()
            Index.replace(self._at.folder, damaged)
        except OSError as e:
            self._fail(e)
            return
        log.warning("%s: the index of KV on disk is damaged (%s); it begins anew", self._at.folder, why)
        self._at.inbox.wake.set()

    def _fail(self, e: Exception) -> None:
        state, why = trouble(e)
        if state is not StoreState.GONE and not self._at.folder.is_dir():
            state = StoreState.GONE
        self._health.failed(state, why)
        if state is StoreState.GONE:
            with contextlib.suppress(OSError):
                self._lose()
        self._at.inbox.refuse(self._at.ledger, state.value)
        self.loaded.set()


def _is_operational(e: sqlite3.Error) -> bool:
    return isinstance(e, sqlite3.OperationalError)
