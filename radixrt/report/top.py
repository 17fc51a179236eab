"""The live page's state as lines for a terminal, for `radixrt top`. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from radixrt.report.text import CAUSES, duration, one_line, printable

MIN_WIDTH, MIN_HEIGHT = 60, 16
"""In a smaller terminal the beginnings of lines, and the first ones, are shown."""
SORTS: dict[str, Callable[[dict[str, Any]], float]] = {
    "seconds": lambda row: -row["seconds"],
    "prompt": lambda row: -row["prompt"],
    "misses": lambda row: row["hit"] - row["prompt"],
    "generated": lambda row: -row["generated"],
}
"""Orders of the requests in flight, by name."""
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
Column = tuple[str, Callable[[dict[str, Any]], str]]
"""A column's title, and its cells."""


def to_lines(state: dict[str, Any], width: int, height: int, sort: str = "seconds", colors: bool = False) -> list[str]:
    """A state (`radixrt.router.server.live`) as at most `height` lines of at most `width` characters; with `colors`
    titles are bold. What does not fit is left out, first of the requests that have ended."""
    most_chars, most_lines = width, height
    width, height = max(width, MIN_WIDTH), max(height, MIN_HEIGHT)
    running = sorted(state["requests"], key=SORTS[sort])
    top = [_title(state), "", *_totals(state, width), ""]
    top += _table("WORKER", _WORKERS, state["workers"], width)
    top += _table("LATENCY", _LATENCY, state["latency"][:4], width)
    top += [_changing(row) for row in state["volatile"][:2]]
    top += [_failed(row) for row in state["failures"][:2]]
    rest = max(height - len(top) - 2, 4)
    shown = running[: max(rest // 2, rest - len(state["recent"]) - 2)]
    lines = top + ["", *(_table("IN FLIGHT", _RUNNING, shown, width) or ["IN FLIGHT  none"])]
    recent = state["recent"][: max(0, height - len(lines) - 2)]
    lines += ["", *_table("ENDED", _ENDED, recent, width)] if recent else []
    cut = [line[:most_chars] for line in lines[:most_lines]]
    return [_bold(line) if colors and _is_title(line) else line for line in cut]


def _title(state: dict[str, Any]) -> str:
    whose = f", tenant {printable(state['tenant'])}" if state["tenant"] else ""
    now = time.strftime("%H:%M:%S", time.localtime(state["time"]))
    return f"radixrt {state['version']}{whose}  up {duration(state['uptime'])}  {now}"


def _totals(state: dict[str, Any], width: int) -> list[str]:
    total, (_, prompt, hit, bound) = state["totals"], state["point"]
    lines = [
        f"total   {_share(total['hit_tokens'], total['bound_tokens'], total['prompt_tokens'], width)}",
        f"now     {_share(hit, bound, prompt, width)}",
    ]
    missed = sum(total["misses"].values())
    causes = [f"{text} {total['misses'][name] / missed:.0%}" for name, text in CAUSES.items() if missed]
    in_flight = f"{total['requests']:,} requests, {len(state['requests'])} in flight"
    return [*lines, f"missed  {', '.join(causes) or 'nothing yet'}", f"        {in_flight}"]


def _share(hit: int, bound: int, prompt: int, width: int) -> str:
    """A bar of the hits, up to those of an infinite cache, of all prompt tokens."""
    room = width - 52
    if not prompt:
        return "no prompt tokens"
    full, most = room * hit // prompt, room * max(hit, bound) // prompt
    bar = "#" * full + "-" * (most - full) + " " * (room - most)
    return f"[{bar}] {hit / prompt:6.1%} hit, {bound / prompt:6.1%} possible of {_short(prompt)}"


def _changing(row: dict[str, Any]) -> str:
    where = "" if row["before"] is None else f" after \u2026{one_line(row['before'][-30:])}"
    return f"CHANGES  {row['requests']:,} requests, {row['tokens']:,} tokens computed again{where}"


def _failed(row: dict[str, Any]) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(row["time"]))
    return f"FAILED   {at} {printable(row['worker'])} {one_line(row['text'])}"


# ---------------------------------------------------------------- tables


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.0f}ms" if value < 1 else f"{value:.1f}s"


def _short(tokens: int) -> str:
    """1234 -> 1,234; 123456 -> 123k; 12345678 -> 12M"""
    return f"{tokens:,}" if tokens < 100_000 else f"{tokens // 1000}k" if tokens < 10_000_000 else f"{tokens // 10**6}M"


def _number(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: _short(row[name]) if row.get(name) is not None else "-"


def _words(name: str, most: int) -> Callable[[dict[str, Any]], str]:
    return lambda row: one_line(row[name] or "-")[:most]


def _time(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: _seconds(row[name])


def _pages(row: dict[str, Any]) -> str:
    return f"{row['pages_used'] / row['pages_total']:.0%}" if row.get("pages_total") else "-"


def _hit(row: dict[str, Any]) -> str:
    return f"{row['hit'] / row['prompt']:.0%}" if row["prompt"] else "-"


_WORKERS: Sequence[Column] = (
    ("", _words("name", 24)), ("state", _words("state", 10)), ("running", _number("running")),
    ("waiting", _number("waiting")), ("queued", _number("tokens")), ("pages", _pages), ("host", _number("host_used")),
    ("stalled", _time("stalled_seconds")),
)  # fmt: skip
_LATENCY: Sequence[Column] = (
    ("", _words("tenant", 16)), ("model", _words("model", 24)),
    *((f"first {p}", _time(f"first_{p}")) for p in ("p50", "p90", "p99")),
    *((f"token {p}", _time(f"token_{p}")) for p in ("p50", "p99")),
)  # fmt: skip
_NAMES: Sequence[Column] = (
    ("", _words("id", 10)),
    ("tenant", _words("tenant", 12)),
    ("program", _words("program", 20)),
)
_RUNNING: Sequence[Column] = (
    *_NAMES, ("worker", _words("worker", 12)), ("state", _words("state", 8)), ("prompt", _number("prompt")),
    ("hit", _hit), ("generated", _number("generated")), ("time", _time("seconds")),
)  # fmt: skip
_ENDED: Sequence[Column] = (
    *_NAMES, ("end", _words("end", 9)), ("prompt", _number("prompt")), ("hit", _hit), ("first", _time("first")),
    ("why", _words("why", 80)),
)  # fmt: skip
_LEFT = {"", "tenant", "program", "model", "worker", "state", "end", "why"}
"""Titles of columns of words."""


def _table(title: str, columns: Sequence[Column], rows: list[dict[str, Any]], width: int) -> list[str]:
    """The title and the rows as lines; none without rows."""
    if not rows:
        return []
    cells = [[name or title for name, _ in columns], *([cell(row) for _, cell in columns] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    left = [name in _LEFT for name, _ in columns]
    lines = [
        "  ".join(
            cell.ljust(most) if words else cell.rjust(most) for cell, most, words in zip(row, widths, left, strict=True)
        )
        for row in cells
    ]
    return [line.rstrip() for line in lines]


def _is_title(line: str) -> bool:
    return line.startswith(("radixrt ", "WORKER", "LATENCY", "IN FLIGHT", "ENDED", "CHANGES", "FAILED"))


def _bold(line: str) -> str:
    return f"{BOLD}{line}{PLAIN}"
