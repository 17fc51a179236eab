"""The report as a self-contained HTML page, without scripts and external resources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from radixrt.report.text import CAUSES, duration, program_name, read_share
from radixrt.report.tiers import TIERS, tiers

SHOWN = 200
"""The most rows of a table: those with the most prompt tokens. The JSON has all."""
HIT, HIT_TEXT = "hit", "reused"
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>radixrt: cache-hit-rate report</title>
<meta name="viewport" content="width=device-width">{refresh}
<style>
:root {{ color-scheme: light dark; --line: #8885; --soft: #777; --hit: #2b6cb0; --bound: #111;
  --never_seen: #b8b8b8; --elsewhere: #d08700; --evicted: #b5382a; --page_rounding: #7a5cc0; --logits: #3f8f6b; }}
@media (prefers-color-scheme: dark) {{ :root {{ --soft: #999; --hit: #5c9ee0; --bound: #eee; --never_seen: #666;
  --elsewhere: #e0a030; --evicted: #e06a5a; --page_rounding: #a58ae0; --logits: #65b892; }} }}
body {{ font: 14px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1.5em; }}
h1 {{ font-size: 1.25em; margin: 0; }} h2 {{ font-size: 1em; margin: 2.2em 0 .4em; }}
p {{ margin: .4em 0; }} .soft {{ color: var(--soft); }}
dl {{ display: flex; flex-wrap: wrap; gap: 1em 3em; margin: 1.4em 0; }}
dt {{ color: var(--soft); }} dd {{ margin: 0; font-size: 1.9em; line-height: 1.2; font-variant-numeric: tabular-nums; }}
table {{ border-collapse: collapse; table-layout: fixed; width: 100%; margin-top: 2em;
  font-variant-numeric: tabular-nums; }}
th:first-child, th:last-child {{ width: 24%; }}
table.pages {{ table-layout: auto; }} .pages th:first-child, .pages th:last-child {{ width: 16%; }}
th {{ text-align: left; font-weight: 600; border-bottom: 1px solid var(--line); }}
td, th {{ padding: .2em .8em .2em 0; vertical-align: baseline; }}
td:first-child {{ overflow-wrap: anywhere; }}
td.n, th.n {{ text-align: right; white-space: nowrap; }}
.bar div {{ position: relative; height: .8em; background: var(--line); }}
.bar b {{ position: absolute; inset: 0 auto 0 0; background: var(--hit); }}
.bar u {{ position: absolute; top: -.15em; bottom: -.15em; width: 2px; background: var(--bound); }}
.whole {{ display: flex; height: 1.6em; gap: 1px; }} .whole i {{ min-width: 2px; }}
.key i {{ display: inline-block; width: .8em; height: .8em; margin: 0 .4em 0 0; }}
.key span {{ display: inline-block; margin-right: 1.6em; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: .3em 0 1em; padding: .5em .8em; background: #8881; }}
mark {{ background: #d087004d; color: inherit; }}
</style></head><body>
<h1>Cache-hit-rate report{whose}</h1>
<p class="soft">{when}</p>
{body}
</body></html>
"""


def to_html(report: dict[str, Any], refresh: int = 0) -> str:
    """A report (`Report.to_json`) as an HTML page. Names and texts are escaped. Browsers reload the page every
    `refresh` seconds (0: never)."""
    whose = "" if report["tenant"] is None else f" of {escape(report['tenant'])}"
    parts = [
        _tiles(report["total"]),
        _prompt_tokens(report["total"]),
        _rates("Tenants", report["tenants"], lambda row: row["tenant"]),
        _rates("Programs", report["programs"], program_name),
        _rates("Models", report["models"], lambda row: row["model"]) if len(report["models"]) > 1 else "",
        _rates("Workers", report["workers"], lambda row: row["worker"] or "(none)"),
        _pages(report["workers"]),
        _tiers(report["workers"]),
        _prefix_breaking(report["volatile"]),
        _notes(report),
    ]
    return PAGE.format(
        refresh=f'\n<meta http-equiv="refresh" content="{refresh:d}">' if refresh else "",
        whose=whose,
        when=f"since {duration(report['seconds'])}",
        body="\n".join(part for part in parts if part),
    )


def _tiles(total: dict[str, Any]) -> str:
    tiles = [
        ("hit rate", f"{total['hit_rate']:.1%}"),
        ("an infinite cache", f"{total['bound_rate']:.1%}"),
        ("requests", f"{total['requests']:,}"),
        ("prompt tokens", f"{total['prompt_tokens']:,}"),
        ("generated tokens", f"{total['generated_tokens']:,}"),
    ]
    return "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles) + "</dl>"


def _prompt_tokens(total: dict[str, Any]) -> str:
    """All prompt tokens as a stacked bar, of hits and of misses by cause, with a legend."""
    if not total["prompt_tokens"]:
        return "<p>No prompt has come in yet.</p>"
    parts = [(HIT, HIT_TEXT, total["hit_tokens"])]
    parts += [(cause, text, total["misses"][cause]) for cause, text in CAUSES.items()]
    parts = [part for part in parts if part[2]]
    bar = "".join(
        f'<i style="flex:{count};background:var(--{name})" title="{text}: {count:,}"></i>'
        for name, text, count in parts
    )
    key = "".join(
        f'<span><i style="background:var(--{name})"></i>{text} {count:,} ({count / total["prompt_tokens"]:.1%})</span>'
        for name, text, count in parts
    )
    below = "Below, a bar is what was hit, its mark what an infinite cache would have hit; of pages, what is used."
    return (
        f'<h2>Prompt tokens</h2>\n<div class="whole">{bar}</div>\n<p class="key">{key}</p>\n<p class="soft">{below}</p>'
    )


def _rates(title: str, rows: list[dict[str, Any]], name: Any) -> str:
    heads = (title, "requests", "prompt", "hit", "generated", "hit rate", "infinite")
    shown = sorted(rows, key=lambda row: -row["prompt_tokens"])[:SHOWN]
    cells = [
        (
            name(row),
            *(f"{row[figure]:,}" for figure in ("requests", "prompt_tokens", "hit_tokens", "generated_tokens")),
            f"{row['hit_rate']:.1%}",
            f"{row['bound_rate']:.1%}",
        )
        for row in shown
    ]
    bars = [_bar(row["hit_rate"], row["bound_rate"]) for row in shown]
    return _table(heads, cells, bars) + _left_out(len(rows) - len(shown)) if rows else ""


def _bar(hit: float, bound: float) -> str:
    """A bar of the hit rate `hit`, with a mark at `bound`, that of an infinite cache; both from 0 to 1."""
    return f'<div><b style="width:{hit:.2%}"></b><u style="left:calc({bound:.2%} - 1px)"></u></div>'


def _pages(workers: list[dict[str, Any]]) -> str:
    known = [row for row in workers if row.get("total_pages")][:SHOWN]
    names = ("total_pages", "used_pages", "evictable_pages", "evicted_tokens", "fetched_tokens", "preemptions", "steps")
    heads = ("Pages", "all", "used", "evictable", "evicted tokens", "fetched tokens", "preempted", "steps", "KV read")
    cells = [(row["worker"], *(f"{row[name]:,}" for name in names), read_share(row)) for row in known]
    used = [f'<div><b style="width:{row["used_pages"] / row["total_pages"]:.2%}"></b></div>' for row in known]
    return _table(heads, cells, used, "pages") if known else ""


def _tiers(workers: list[dict[str, Any]]) -> str:
    rows = [(row["worker"], *cells) for row in workers[:SHOWN] for cells in tiers(row)]
    return _table(("Worker", *TIERS), rows, [""] * len(rows), "pages") if rows else ""


def _prefix_breaking(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    parts = ["<h2>Text that changes with every request: nothing behind it is hit</h2>"]
    for row in rows:
        parts.append(
            f"<p>Tenant {escape(row['tenant'])}: {row['requests']:,} requests changed {row['length']:,} tokens after "
            f"{row['at']:,}; {row['lost_tokens']:,} prompt tokens were computed again</p>"
        )
        if row["before"] is not None:
            values = "</mark> | <mark>".join(map(escape, row["values"]))
            parts.append(f"<pre>…{escape(row['before'])}<mark>{values}</mark>{escape(row['after'])}…</pre>")
        elif row["masked"]:
            parts.append('<p class="soft">(not shown: these requests have a cache_salt)</p>')
    return "\n".join(parts)


def _notes(report: dict[str, Any]) -> str:
    sessions, pauses, notes = report["sessions"], report["pauses"], []
    if sessions["kept_turns"] or sessions["dropped_turns"]:
        lost = "".join(
            f"; {count:,} lost tokens ({escape(cause.replace('_', ' '))})"
            for cause, count in sessions["dropped_turns"].items()
        )
        notes.append(f"{sessions['kept_turns']:,} answers in prompts kept the ids that were generated{lost}")
    if pauses["now"] or pauses["ended"] or pauses["dropped"]:
        waited = f"{pauses['ended']:,} waited {pauses['seconds']:,.1f} s"
        dropped = f"; {pauses['dropped']:,} did not go on" if pauses["dropped"] else ""
        notes.append(f"{pauses['now']:,} sessions wait for a tool; {waited}{dropped}")
    if not report["bound"]["exact"]:
        notes.append("infinite is a lower bound: the oldest prompts were forgotten (--report-tokens)")
    return "".join(f'<p class="soft">{note}</p>' for note in notes)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], bars: Iterable[str], kind: str = "rates") -> str:
    """An HTML table. A row is a name and its figures; each has a bar (HTML) in the last column."""
    first, *others = heads
    head = f"<th>{first}</th>" + "".join(f'<th class="n">{name}</th>' for name in others) + "<th></th>"
    lines = [
        f"<tr><td>{escape(name)}</td>"
        + "".join(f'<td class="n">{figure}</td>' for figure in figures)
        + f'<td class="bar">{bar}</td></tr>'
        for (name, *figures), bar in zip(rows, bars, strict=True)
    ]
    return f'<table class="{kind}"><tr>{head}</tr>\n' + "\n".join(lines) + "\n</table>"


def _left_out(count: int) -> str:
    return f'\n<p class="soft">and {count:,} more, which the JSON has</p>' if count > 0 else ""
