"""How many of the tasks a model solves:  python -m training.nano.eval

    python -m training.nano.eval --url http://localhost:8000/v1 --model nano     any OpenAI endpoint
    python -m training.nano.eval --model nano --device cpu                       a worker of its own

Greedy, on items of the evaluation split. Only the last answer's text and the calls are looked at, never the model's
thoughts. JSON goes to bench/results/nano.json; `--card` writes the model's README.md from it, without a run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.common import RESULTS, machine, table
from radixrt.config import WorkerConfig, resolve
from training.nano import card
from training.nano.score import Share
from training.nano.solve import Endpoint, Outcome, Refused, serve
from training.nano.tasks import TAGS, Example, evaluation

MAX_ITEMS = 200
"""Of a kind and tag: what training has never seen."""
TARGETS = {
    ("tools", "1"): 95, ("tools", "3"): 95, ("tools", "6"): 95, ("tools", "two"): 95, ("tools", "none"): 95,
    ("arithmetic", "2"): 90, ("recall", "2048"): 90,
}  # fmt: skip
"""Percent."""
FILE = RESULTS / "nano.json"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="training.nano.eval", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", help="of an OpenAI endpoint, with /v1 (default: a worker in this process)")
    parser.add_argument("--model", default="nano", help="name at the endpoint, or what to serve here (default: nano)")
    parser.add_argument("--api-key", default="-")
    parser.add_argument("--kinds", nargs="+", default=list(TAGS), choices=list(TAGS), metavar="KIND")
    parser.add_argument("--tags", nargs="+", metavar="TAG", help="only these of each kind")
    parser.add_argument("--items", type=int, default=50, help=f"of each kind and tag, at most {MAX_ITEMS}")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--constrained", action="store_true", help="JSON tasks send their schema as response_format")
    parser.add_argument("--device", default="auto", help="of a worker here")
    parser.add_argument("--kv-cache-dtype", default="bfloat16", help="of a worker here")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print so many wrong answers of each")
    parser.add_argument("--json", type=Path, default=FILE, metavar="FILE")
    parser.add_argument("--card", action="store_true", help="write the model card from --json, and run nothing")
    args = parser.parse_args(given)
    if not 1 <= args.items <= MAX_ITEMS:
        parser.error(f"--items: from 1 to {MAX_ITEMS}")
    return args


def rows_of(examples: Sequence[Example], outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row for each kind and tag."""
    found: dict[tuple[str, str], list[bool]] = {}
    for example, outcome in zip(examples, outcomes, strict=True):
        found.setdefault((example.kind, example.tag), []).append(outcome.right)
    rows = []
    for (kind, tag), right in found.items():
        share = Share(sum(right), len(right))
        low, high = share.interval()
        rows.append({
            "kind": kind, "tag": tag, "items": share.items, "right": share.right, "accuracy": round(share.value, 4),
            "low": round(low, 4), "high": round(high, 4), "target": TARGETS.get((kind, tag)),
        })  # fmt: skip
    return rows


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row as a line of the table."""
    share, target = Share(row["right"], row["items"]), row["target"]
    met = "" if target is None else f">= {target}: {'met' if 100 * share.value >= target else 'missed'}"
    return {"task": f"{row['kind']} {row['tag']}", "items": row["items"], "right, % (95%)": share.shown, "target": met}


def show_wrong(examples: Sequence[Example], outcomes: Sequence[Outcome], most: int) -> None:
    """What was asked, wanted and answered."""
    seen: dict[tuple[str, str], int] = {}
    for example, outcome in zip(examples, outcomes, strict=True):
        number = seen.get((example.kind, example.tag), 0)
        if outcome.right or number == most:
            continue
        seen[example.kind, example.tag] = number + 1
        text, calls = example.gold_result()
        print(f"\n{example.kind} {example.tag}: ...{example.messages[-1]['content'][-300:]}")
        print(f"  wanted {calls or ''} {text!r}\n  got    {outcome.calls or ''} {outcome.text!r}")


async def run(endpoint: Endpoint, examples: Sequence[Example], concurrency: int) -> list[Outcome]:
    with tqdm(total=len(examples), unit="item", disable=not sys.stderr.isatty()) as bar:
        return await endpoint.solve_all(examples, concurrency, bar.update)


def evaluate(args: argparse.Namespace) -> list[dict[str, Any]]:
    examples = [e for e in evaluation(args.items, tuple(args.kinds)) if not args.tags or e.tag in args.tags]
    began = time.perf_counter()
    if args.url:
        where = {"endpoint": "given"}
        outcomes = asyncio.run(
            run(Endpoint(args.url, args.model, args.api_key, args.constrained), examples, args.concurrency)
        )
    else:
        where = {"device": resolve(WorkerConfig(device=args.device)).device, "kv_cache_dtype": args.kv_cache_dtype}
        with serve(args.model, **where) as endpoint:
            own = Endpoint(endpoint.url, endpoint.model, constrained=args.constrained)
            outcomes = asyncio.run(run(own, examples, args.concurrency))
    rows = rows_of(examples, outcomes)
    content = {
        "benchmark": "nano", "machine": machine(), "model": args.model, "constrained": args.constrained, **where,
        "seconds": round(time.perf_counter() - began, 1), "rows": rows,
    }  # fmt: skip
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(content, indent=1) + "\n")
    show_wrong(examples, outcomes, args.show)
    return rows


def main(given: Sequence[str] | None = None) -> int:
    args = arguments(given)
    if args.card:
        card.write(args.json)
        return 0
    try:
        rows = evaluate(args)
    except Refused as problem:
        print(f"training.nano.eval: {problem}", file=sys.stderr)
        return 1
    print(table([shown(row) for row in rows]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
