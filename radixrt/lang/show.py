"""Renders a trace as text and as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from radixrt.lang.steps import Run, Step

WIDTH = 48
"""The most characters of a step's text that are shown."""
SHOWN = 2000
"""The same for the tooltips of a page."""
TIMED = ("gen", "select", "tool", "program")
"""Steps that take time."""


def to_text(runs: Sequence[Run]) -> str:
    """The tree of each run, with one line per step."""
    return "".join(_heading(run) + "\n" + "".join(_text_rows(run)) for run in runs)


def _heading(run: Run) -> str:
    usage = run.usage()
    requests = sum(step.asks for step in run.steps)
    rate = f" ({usage.cached_tokens / usage.prompt_tokens:.1%})" if usage.prompt_tokens else ""
    return (
        f"{run.program}: {run.seconds:.3f} s, {requests:,} requests, {usage.prompt_tokens:,} tokens in, "
        f"{usage.cached_tokens:,} cached{rate}, {usage.completion_tokens:,} out"
    )


def _text_rows(run: Run) -> list[str]:
    rows: list[str] = []
    for depth, item in _walk(run):
        indent = "  " * (depth + 1)
        if isinstance(item, str):
            rows.append(f"{indent}[{item}]\n")
        else:
            rows.append(f"{(indent + _label(item)).ljust(34)} {_figures(item)}  {_short(item.said)}".rstrip() + "\n")
    return rows


def _walk(run: Run) -> list[tuple[int, Step | str]]:
    """(depth, step, or path of a branch that begins), each branch below the fork that created it."""
    steps = run.by_branch()
    rows: list[tuple[int, Step | str]] = []
    todo: list[tuple[int, Step | str]] = [(0, step) for step in reversed(steps[""])]
    while todo:  # iterative, as programs may fork to any depth
        depth, item = todo.pop()
        rows.append((depth, item))
        if isinstance(item, str):
            todo += [(depth + 1, step) for step in reversed(steps[item])]
        else:
            todo += [(depth + 1, path) for path in reversed(item.forks)]
    return rows


def _label(step: Step) -> str:
    return f"{step.kind} {step.name}".rstrip()


def _figures(step: Step) -> str:
    parts = []
    if step.asks and step.usage.prompt_tokens:
        usage = step.usage
        parts.append(f"in {usage.prompt_tokens:,} cached {usage.cached_tokens:,} out {usage.completion_tokens:,}")
    if step.first is not None:
        parts.append(f"first {_ms(step.first - step.began)}")
    if step.kind in TIMED:
        parts.append(_ms(step.seconds) if step.ended is not None else "running")
    if step.finish:
        parts.append(step.finish.splitlines()[0])
    return "  ".join(parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def _short(said: str) -> str:
    line = " ".join(said.split())
    return repr(line if len(line) <= WIDTH else line[: WIDTH - 1] + "…") if line else ""


# ---------------------------------------------------------------- the page

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>radixrt trace</title>
<meta name="viewport" content="width=device-width">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 14px/1.45 system-ui, sans-serif; margin: 2em; }}
h1 {{ font-size: 1.3em; }} h2 {{ font-size: 1.05em; margin: 2em 0 .5em; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th {{ text-align: left; font-weight: 600; border-bottom: 1px solid #8888; }}
td, th {{ padding: .15em .6em; white-space: nowrap; }}
td.n, th.n {{ text-align: right; }}
td.said {{ max-width: 26em; overflow: hidden; text-overflow: ellipsis; color: #777; }}
td.time {{ width: 30%; min-width: 12em; }}
tr.branch td {{ color: #777; padding-top: .5em; }}
tr.bad td {{ color: #c33; }}
.bar {{ position: relative; height: .8em; background: #8881; }}
.bar i {{ position: absolute; height: 100%; min-width: 1px; }}
.wait {{ background: #9bb8d8; }} .gen {{ background: #3b7dc4; }} .select {{ background: #7a5cc0; }}
.program {{ background: #8884; }}
.tool {{ background: repeating-linear-gradient(45deg, #c9922f 0 4px, #e6c07a 4px 8px); }}
.key i {{ display: inline-block; width: 1em; height: .8em; margin: 0 .3em 0 1em; }}
</style></head><body>
<h1>radixrt trace</h1>
<p class="key"><i class="wait"></i>until the first token<i class="gen"></i>gen<i class="select"></i>select
<i class="tool"></i>tool: the branch waits<i class="program"></i>another program, called on the branch</p>
{runs}
</body></html>
"""
HEAD = (
    '<tr><th>step</th><th>line</th><th class="n">in</th><th class="n">cached</th><th class="n">out</th>'
    '<th class="n">first</th><th class="n">time</th><th>finish</th><th>said</th><th>when</th></tr>'
)


def to_html(runs: Sequence[Run]) -> str:
    """A page with a table and a time line for each run. All text is escaped."""
    return PAGE.format(runs="\n".join(_html_run(run) for run in runs))


def _html_run(run: Run) -> str:
    rows = [_branch_row(d, i) if isinstance(i, str) else _step_row(d, i, run) for d, i in _walk(run)]
    return f"<h2>{escape(_heading(run))}</h2>\n<table>{HEAD}\n" + "\n".join(rows) + "\n</table>"


def _branch_row(depth: int, path: str) -> str:
    return f'<tr class="branch"><td colspan="10" style="padding-left:{_indent(depth)}">branch {escape(path)}</td></tr>'


def _step_row(depth: int, step: Step, run: Run) -> str:
    usage = step.usage
    counts = [usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens] if usage.prompt_tokens else [""] * 3
    first = "" if step.first is None else _ms(step.first - step.began)
    timed = _ms(step.seconds) if step.kind in TIMED and step.ended is not None else ""
    numbers = "".join(
        f'<td class="n">{cell:,}</td>' if isinstance(cell, int) else f'<td class="n">{cell}</td>'
        for cell in (*counts, first, timed)
    )
    bad = ' class="bad"' if step.failed else ""
    said = escape(step.said[:SHOWN])
    return (
        f'<tr{bad}><td style="padding-left:{_indent(depth)}">{escape(_label(step))}</td>'
        f'<td title="{escape(step.site.source)}">{escape(str(step.site))}</td>{numbers}<td>{escape(step.finish)}</td>'
        f'<td class="said" title="{said}">{escape(" ".join(step.said[:200].split()))}</td>'
        f'<td class="time">{_bar(step, run)}</td></tr>'
    )


def _indent(depth: int) -> str:
    return f"{0.6 + 1.2 * depth:.1f}em"


def _bar(step: Step, run: Run) -> str:
    if step.kind not in TIMED:
        return ""
    ended = run.now() if step.ended is None else step.ended
    spans = [(step.began, ended, step.kind)]
    if step.first is not None:
        spans = [(step.began, step.first, "wait"), (step.first, ended, step.kind)]
    whole = max(run.seconds, 1e-9)
    bars = "".join(
        f'<i class="{kind}" style="left:{(a - run.began) / whole:.2%};width:{(b - a) / whole:.2%}"></i>'
        for a, b, kind in spans
    )
    return f'<div class="bar">{bars}</div>'
