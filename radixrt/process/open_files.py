"""The limit of open files of this process: raised at start, kept from being used up by connections, and watched."""

from __future__ import annotations

import errno
import logging
import os
import resource

log = logging.getLogger("radixrt.files")

MIN_RESERVED = 64
"""Files that HTTP connections leave for everything else, such as ZMQ connections; at least..."""
RESERVED_SHARE = 8
"""...an eighth of the limit."""


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, as each connection is one. Returns the limit that holds
    now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):  # macOS has a lower limit that it does not tell
            return soft
    return hard


def max_connections() -> int:
    """The most HTTP connections that a process may have."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return 1 << 30
    return max(1, limit - max(MIN_RESERVED, limit // RESERVED_SHARE))


class ConnectionLimit:
    """A limit of connections; says once when it is reached."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._reached = False

    def admits(self, count: int) -> bool:
        """Whether there may be `count` connections."""
        if count > self._most and not self._reached:
            log.error("%d HTTP connections: more get status 503, as files would run out (ulimit -n)", self._most)
        self._reached = count > self._most or (self._reached and count > self._most // 2)
        return count <= self._most


class FileWatch:
    """Says once when this process can open no more files, and once when it can again. `what` then does not work."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._out = False

    def look(self) -> None:
        """To be called about once a second."""
        try:
            os.close(os.dup(2))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self._out:
                self._out = True
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                log.error("no more files can be opened (limit %d, ulimit -n): %s", limit, self._what)
            return
        if self._out:
            self._out = False
            log.warning("files can be opened again")
