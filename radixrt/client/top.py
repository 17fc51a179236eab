"""`radixrt top`: the live state of a server in a terminal, drawn anew each second."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import TextIO

from radixrt.client.client import Client
from radixrt.client.transports import ServerError
from radixrt.report.top import SORTS, to_lines

PERIOD_SECONDS = 1.0
ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""The other screen, without a cursor, and lines that do not wrap."""
LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
HOME, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def print_once(client: Client, out: TextIO) -> None:
    """Print one state, of which all requests are shown. Raises ServerError."""
    width, _ = shutil.get_terminal_size((160, 24))
    print("\n".join(to_lines(client.live("state"), width, 10_000)), file=out)


def run(client: Client, keys: TextIO, out: TextIO) -> None:
    """Draw states until `q`; `s` changes the order of the requests. `keys` and `out` are a terminal. Raises ServerError
    for a first state that is refused."""
    state, sorts = client.live("state"), itertools.cycle(SORTS)
    sort, note = next(sorts), ""
    with _raw(keys), _screen(out):
        while True:
            width, height = shutil.get_terminal_size()
            lines = to_lines(state, width, height - 1, sort, colors=True)
            help_line = note or f"q: quit   s: sort (by {sort})"
            out.write(HOME + "".join(f"{line}{END_OF_LINE}\r\n" for line in lines) + help_line + END_OF_SCREEN)
            out.flush()
            key = _key(keys, PERIOD_SECONDS)
            if key == "q":
                return
            if key == "s":
                sort = next(sorts)
                continue
            try:
                state, note = client.live("state"), ""
            except ServerError as error:
                note = f"no answer: {error.message}"


def _key(keys: TextIO, seconds: float) -> str:
    """The next key that has a meaning; "" if none comes in time."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([keys], [], [], left)[0]:
            pressed = os.read(keys.fileno(), 64).decode(errors="ignore")
            if not pressed or "q" in pressed:  # the terminal is gone
                return "q"
            if "s" in pressed:
                return "s"
    return ""


@contextlib.contextmanager
def _raw(keys: TextIO) -> Iterator[None]:
    """Keys are read one by one, and not shown."""
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _screen(out: TextIO) -> Iterator[None]:
    out.write(ENTER)
    try:
        yield
    finally:
        out.write(LEAVE)
        out.flush()


def is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
