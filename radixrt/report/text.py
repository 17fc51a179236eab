"""The report as a table for a terminal."""

from __future__ import annotations

from typing import Any

CAUSES = {
    "never_seen": "never seen before",
    "elsewhere": "held by another worker",
    "evicted": "evicted, or not computed yet",
    "page_rounding": "page rounding",
    "logits": "computed for their logits",
}
FIGURES = ("requests", "prompt", "hit", "hit rate", "infinite", "generated")


def to_text(report: dict[str, Any]) -> str:
    """A report (`Report.to_json`) as lines of at most 100 columns, ending with a line feed."""
    total = report["total"]
    whose = "" if report["tenant"] is None else f" of {report['tenant']}"
    lines = [f"Cache-hit-rate report{whose}, {_duration(report['seconds'])}", ""]
    groups = [[("total", total)]]
    groups.append([(f"tenant {row['tenant']}", row) for row in report["tenants"]])
    groups.append([(_program(row), row) for row in report["programs"]])
    groups.append([(f"worker {row['worker'] or '(none)'}", row) for row in report["workers"]])
    rows = [("", *FIGURES)]
    for group in groups:
        rows += [(_cut(name), *_figures(row)) for name, row in group]
        rows.append(())
    lines += _aligned(rows)
    lines += _misses(total)
    lines += _pages(report["workers"])
    if report["bound"]["forgotten"]:
        lines.append("infinite: a lower bound, for the oldest prompts were forgotten (--report-tokens)")
    return "\n".join(lines).rstrip() + "\n"


def _program(row: dict[str, Any]) -> str:
    name = _cut(row["program"], 20) or "(no program)"
    return f"program {name}" + (f", fork depth {row['depth']}" if row["depth"] else "")


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
    rows = [
        (
            f"worker {row['worker']}",
            *(f"{row[name]:,}" for name in ("used_pages", "total_pages", "evicted_tokens", "preemptions", "steps")),
        )
        for row in workers
        if row.get("total_pages")
    ]
    if not rows:
        return []
    return [*_aligned([("", "pages used", "of", "tokens evicted", "preemptions", "steps"), *rows]), ""]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """The first column to the left, the others to the right."""
    columns = max(map(len, rows))
    widths = [max(len(row[i]) for row in rows if len(row) > i) for i in range(columns)]
    return [
        "  ".join(_padded(cell, w, left=i == 0) for i, (cell, w) in enumerate(zip(row, widths, strict=False)))
        for row in rows
    ]


def _padded(cell: str, width: int, left: bool) -> str:
    return cell.ljust(width) if left else cell.rjust(width)


def _cut(name: str, most: int = 44) -> str:
    return name if len(name) <= most else name[: most - 1] + "\u2026"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
