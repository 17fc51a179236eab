"""How a process shows its parent that it makes progress, and how it ends.

    SIGTERM, SIGINT       it drains: it takes nothing new, and ends when nothing is in flight, or after a time
    again                 it ends at once
    SIGUSR1 (its parent)  it drains, and does not end

A process of an event loop writes one byte to its parent's pipe every POLL_SECONDS. Its parent takes it for one that
hangs if none comes for long, and knows when it has drained.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable
from types import FrameType

POLL_SECONDS = 0.1
MAX_LOOK_SECONDS = 2.0
"""A parent that has not looked for longer was not running itself."""
BUSY, IDLE, DRAINING, DRAINED = b".", b"i", b"d", b"D"
"""What a pulse says: whether anything is in flight, and whether the process drains."""


class Pulse:
    """The child's end of the pipe `fd`; None: there is no parent who wants to know."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            os.set_blocking(fd, False)

    def beat(self, state: bytes = BUSY) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):  # the parent does not read, or is gone
                os.write(self._fd, state)


class Pulses:
    """The parent's end of the pipe `fd`, which is closed when this is dropped, at the latest. Times are seconds of any
    monotonic clock."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        self.state = b""
        """The last one."""
        self.count = 0
        self._heard: float | None = None
        self._last_look = 0.0

    def look(self, now: float) -> float | None:
        """Read all pulses. Returns for how long none has come; None before the first. Time in which this process did
        not look does not count: it may have been suspended, and the child with it."""
        data = self._read()
        gap, self._last_look = now - self._last_look, now
        if data:
            self.state, self.count, self._heard = data[-1:], self.count + len(data), now
        elif self._heard is not None and gap > MAX_LOOK_SECONDS:
            self._heard += gap
        return None if self._heard is None else now - self._heard

    def _read(self) -> bytes:
        try:
            return os.read(self._fd, 4096) if self._close.alive else b""
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self._close()


class Ending:
    """When a process of an event loop ends. `drain` makes it take nothing new, `idle` says whether nothing is in
    flight, `seconds` is how long that may take (0: it ends as soon as it is told to). `told` and `asked` are signal
    handlers; all else happens in `look`."""

    def __init__(
        self, seconds: float, drain: Callable[[], None], idle: Callable[[], bool], pulse: Pulse | None = None
    ) -> None:
        self._seconds = seconds
        self._drain = drain
        self._idle = idle
        self._pulse = pulse or Pulse(None)
        self._told = 0
        self._asked = False
        self._since: float | None = None
        """When it began to drain."""

    @property
    def at_once(self) -> bool:
        """Whether it was told to end without waiting for anything."""
        return self._told > 1 or (self._told == 1 and self._seconds <= 0)

    def told(self, *_signal: int | FrameType | None) -> None:
        """A signal tells the process to end."""
        self._told += 1

    def asked(self, *_signal: int | FrameType | None) -> None:
        """A signal of the parent: drain."""
        self._asked = True

    def look(self) -> bool:
        """Returns whether the process is to end now. To be called on the event loop every POLL_SECONDS."""
        idle, now = self._idle(), time.monotonic()
        if self._since is None and (self._asked or self._told):
            self._drain()
            self._since = now
        if self._since is None:
            self._pulse.beat(IDLE if idle else BUSY)
            return False
        self._pulse.beat(DRAINED if idle else DRAINING)
        if not self._told:
            return False
        return self.at_once or idle or now - self._since >= self._seconds
