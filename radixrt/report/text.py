"""The report as plain text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixrt.report.tiers import TIERS, tiers

WIDTH = 100
MAX_PREFIX_BREAKING_ROWS = 8
"""The most changing texts that are shown."""
MAX_ROWS = 24
"""The most rows of a group that are shown: those with the most prompt tokens. The JSON has all."""
CAUSES = {
    "never_seen": "never seen before",
    "elsewhere": "held by another worker",
    "evicted": "evicted, or not computed yet",
    "page_rounding": "page rounding",
    "logits": "computed for their logits",
}
FIGURES = ("requests", "prompt", "hit", "hit rate", "infinite", "generated")
PAGES = ("pages", "used", "evictable", "evicted tokens", "preempted", "steps", "KV read")


def to_text(report: dict[str, Any]) -> str:
    """A report (`Report.to_json`) as lines of at most 100 columns, ending with a line feed."""
    total = report["total"]
    whose = "" if report["tenant"] is None else f" of {printable(report['tenant'])}"
    rows = [("", *FIGURES), ("total", *_figures(total)), ()]
    for key, name in (
        ("tenants", lambda row: f"tenant {row['tenant']}"),
        ("programs", program_name),
        ("models", lambda row: f"model {row['model']}"),
        ("workers", lambda row: f"worker {row['worker'] or '(none)'}"),
    ):
        if key == "models" and len(report[key]) < 2:
            continue
        shown = _largest(report[key])
        rows += [(name(row), *_figures(row)) for row in shown]
        if left := len(report[key]) - len(shown):
            rows.append((f"and {left} more, see --json",))
        rows.append(())
    lines = [f"Cache-hit-rate report{whose}, {duration(report['seconds'])}", "", *_aligned(rows)]
    lines += _misses(total)
    lines += _pages(report["workers"])
    lines += _tiers(report["workers"])
    lines += _sessions(report["sessions"])
    lines += _prefix_breaking(report["volatile"])
    lines += _pauses(report["pauses"])
    lines += _drift(total)
    if not report["bound"]["exact"]:
        lines.append("infinite: a lower bound, for the oldest prompts were forgotten (--report-tokens)")
    return "\n".join(lines).rstrip() + "\n"


def _largest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The MAX_ROWS rows with the most prompt tokens, in their order in `rows`."""
    ranked = sorted(range(len(rows)), key=lambda i: rows[i]["prompt_tokens"], reverse=True)
    return [rows[i] for i in sorted(ranked[:MAX_ROWS])]


def program_name(row: dict[str, Any]) -> str:
    """The label of a row of the report's `programs`."""
    name = f"program {row['program']}" if row["program"] else "no program"
    return f"{name}, fork depth {row['depth']}" if row["depth"] else name


def _figures(row: dict[str, Any]) -> tuple[str, ...]:
    counts = [f"{row[name]:,}" for name in ("requests", "prompt_tokens", "hit_tokens")]
    return (*counts, f"{row['hit_rate']:.1%}", f"{row['bound_rate']:.1%}", f"{row['generated_tokens']:,}")


def _misses(total: dict[str, Any]) -> list[str]:
    missed = sum(total["misses"].values())
    if not missed:
        return []
    rows = [("computed prompt tokens", f"{missed:,}", "100.0%")]
    rows += [
        (f"  {text}", f"{count:,}", f"{count / missed:.1%}")
        for cause, text in CAUSES.items()
        if (count := total["misses"][cause])
    ]
    return [*_aligned(rows), ""]


def _pages(workers: list[dict[str, Any]]) -> list[str]:
    names = ("total_pages", "used_pages", "evictable_pages", "evicted_tokens", "preemptions", "steps")
    known = [row for row in workers if row.get("total_pages")]
    rows = [
        (f"worker {row['worker']}", *(f"{row[name]:,}" for name in names), read_share(row)) for row in _largest(known)
    ]
    return [*_aligned([("", *PAGES), *rows]), ""] if rows else []


def _tiers(workers: list[dict[str, Any]]) -> list[str]:
    rows = [(f"worker {row['worker']}", *cells) for row in _largest(workers) for cells in tiers(row)]
    return [*_aligned([("", *TIERS), *rows]), ""] if rows else []


def read_share(row: dict[str, Any]) -> str:
    """Share of the keys that decodes attended to that were read from memory; "-" if there were none."""
    return f"{row['read_keys'] / row['plain_keys']:.1%}" if row["plain_keys"] else "-"


def _sessions(sessions: dict[str, Any]) -> list[str]:
    kept, dropped = sessions["kept_turns"], sessions["dropped_turns"]
    if not kept and not dropped:
        return []
    why = "".join(f", {count:,} lost tokens ({cause.replace('_', ' ')})" for cause, count in dropped.items())
    return [f"sessions: {kept:,} answers in prompts kept the ids that were generated{why}", ""]


def _pauses(pauses: dict[str, Any]) -> list[str]:
    if not pauses["now"] and not pauses["ended"] and not pauses["dropped"]:
        return []
    kept, tokens = pauses["kept_tokens"], pauses["tokens"]
    share = f"; {kept:,} of {tokens:,} tokens were cached when they went on ({kept / tokens:.1%})" if tokens else ""
    dropped = f", {pauses['dropped']:,} did not go on" if pauses["dropped"] else ""
    waited = f"{pauses['ended']:,} waited {pauses['seconds']:,.1f} s{dropped}"
    return [f"tools: {pauses['now']:,} sessions wait, {waited}{share}", ""]


def _prefix_breaking(rows: list[dict[str, Any]]) -> list[str]:
    """Two lines for each changing text, with its values in brackets."""
    if not rows:
        return []
    lines = []
    for row in rows[:MAX_PREFIX_BREAKING_ROWS]:
        lines.append(
            f"  tenant {_cut(printable(row['tenant']), 40)}: {row['requests']:,} requests changed it, "
            f"{row['lost_tokens']:,} prompt tokens computed again"
        )
        if row["before"] is None:
            why = ", not shown: they have a cache_salt" if row["masked"] else ""
            lines.append(f"    {row['length']:,} tokens after {row['at']:,} tokens{why}")
            continue
        values = " | ".join(_cut(one_line(value), 20) for value in row["values"])
        room = (WIDTH - len(values) - 10) // 2
        before, after = one_line(row["before"]), one_line(row["after"])
        lines.append(f"    \u2026{before[max(0, len(before) - room) :]}[{values}]{after[:room]}\u2026")
    if len(rows) > MAX_PREFIX_BREAKING_ROWS:
        lines.append(f"  and {len(rows) - MAX_PREFIX_BREAKING_ROWS} more, see --json")
    return ["prompts differ near their start with every request, and nothing behind that is hit:", *lines, ""]


def one_line(text: str) -> str:
    """Printable text, with its line feeds and tabs written as \\n and \\t."""
    return printable(text.replace("\n", "\\n").replace("\t", "\\t"))


def _drift(total: dict[str, Any]) -> list[str]:
    predicted, drift = total["predicted_tokens"], total["drift_tokens"]
    if not predicted and not drift:
        return []
    share = drift / max(total["prompt_tokens"], 1)
    return [f"index: {predicted:,} hit tokens predicted, off by {drift:,} ({share:.1%} of the prompt tokens)", ""]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines: the first column is left-aligned and cut so that lines fit `WIDTH`, the others right-aligned."""
    columns = max(map(len, rows))
    widths = [max(len(row[i]) for row in rows if len(row) > i) for i in range(1, columns)]
    room = max(7, WIDTH - sum(widths) - 2 * len(widths))
    rows = [(_cut(printable(row[0]), room), *row[1:]) if row else row for row in rows]
    first = max(len(row[0]) for row in rows if row)
    return [
        "  ".join([row[0].ljust(first), *(cell.rjust(w) for cell, w in zip(row[1:], widths, strict=False))]).rstrip()
        if row
        else ""
        for row in rows
    ]


def _cut(name: str, most: int) -> str:
    """Shorten `name` to at most `most` characters by leaving out its middle, as its end may be the fork depth."""
    if len(name) <= most:
        return name
    tail = (most - 1) // 2
    return f"{name[: most - 1 - tail]}\u2026{name[len(name) - tail :]}"


def printable(name: str) -> str:
    """Replace control characters, which a terminal might interpret: names come from clients."""
    return "".join(c if c.isprintable() else "\ufffd" for c in name)


def duration(seconds: float) -> str:
    """A duration in words, in its two largest units."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
