"""Killed and started again: prompts whose KV is on disk, against computing them.

    python -m bench.restart MODEL [--contexts 4096,16384,65536] [--prompts 4] [--disk DIR] [-- flags of radixrt serve]

A server without a disk is started for reference, then one with an empty `--kv-disk-path`. It gets a few prompts of each
length, one at a time: they are computed. When all is written, all its processes are killed (SIGKILL), the server is
started once more with the same folder, and gets the same prompts, again one at a time. Columns: tokens of the context,
first tokens (median) when computed and when read from disk, the share of cached tokens, the rates of both in tokens per
second, and how many of the answers had the same text. Above them: seconds until each of the three servers was healthy.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from bench.common import save, table
from bench.serve.endpoint import Answer, Endpoint
from bench.serve.loads import segment_ids
from bench.serve.server import model_name, radixrt_serve, read_config

ANSWER = 16
SETTLED_SECONDS = 3.0
"""All counts as written when the folder has not grown for so long."""


async def ask(url: str, model: str, prompts: list[list[int]]) -> list[Answer]:
    """Send prompts of token ids, one after the other."""
    endpoint = Endpoint(url)
    try:
        fields = {"model": model, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "stream": True}
        fields["stream_options"] = {"include_usage": True}
        return [await endpoint.post(endpoint.request(msgspec.json.encode(fields | {"prompt": p}), "")) for p in prompts]
    finally:
        endpoint.close()


def settle(folder: Path, timeout: float = 120.0) -> int:
    """Wait until a folder does not grow any more. Returns its bytes."""
    size, since, end = -1, time.monotonic(), time.monotonic() + timeout
    while time.monotonic() < min(end, since + SETTLED_SECONDS):
        time.sleep(0.2)
        now = 0
        for path in folder.rglob("*"):
            with suppress(OSError):
                now += path.stat().st_blocks * 512
        if now != size:
            size, since = now, time.monotonic()
    return size


def row(context: int, before: list[Answer], after: list[Answer]) -> dict[str, Any]:
    computed, read = (statistics.median(a.first - a.sent for a in answers) for answers in (before, after))
    return {
        "context": context,
        "computed_ms": 1e3 * computed,
        "disk_ms": 1e3 * read,
        "faster": computed / read,
        "cached_of_prompt": sum(a.cached_tokens or 0 for a in after) / sum(a.prompt_tokens for a in after),
        "computed_tok_s": context / computed,
        "disk_tok_s": context / read,
        "same_text": f"{sum(a.digest == b.digest for a, b in zip(before, after, strict=True))} of {len(after)}",
    }


def main() -> None:
    arguments, flags = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, flags = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(prog="python -m bench.restart")
    parser.add_argument("model")
    parser.add_argument("--contexts", default="4096,16384,65536")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--disk", default=None, help="an empty folder; default: a temporary one")
    parser.add_argument("--size", default="40", help="GiB")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--out", default="restart")
    args = parser.parse_args(arguments)
    contexts = [int(number) for number in args.contexts.split(",")]
    vocab = read_config(args.model)["vocab_size"] if Path(args.model).exists() else 1000
    prompts = {
        n: [segment_ids("restart", i, n, seed=n, repetition=0, vocab_size=vocab).tolist() for i in range(args.prompts)]
        for n in contexts
    }
    folder = Path(args.disk or tempfile.mkdtemp(prefix="radixrt-bench-"))
    disk = [*flags, "--kv-disk-path", str(folder), "--kv-disk-size", args.size]
    warm = [segment_ids("warm", 0, max(contexts), seed=1, repetition=0, vocab_size=vocab).tolist()]

    def answers(flags: list[str]) -> tuple[float, dict[int, list[Answer]], int]:
        with radixrt_serve(args.model, flags, args.timeout, kill=True) as (url, seconds):
            model = model_name(url, "")
            asyncio.run(ask(url, model, warm))
            found = {n: asyncio.run(ask(url, model, prompts[n])) for n in contexts}
            return seconds, found, settle(folder)

    try:
        with radixrt_serve(args.model, flags, args.timeout, kill=True) as (_, without):
            pass
        first, before, nbytes = answers(disk)
        again, after, _ = answers(disk)
    finally:
        if args.disk is None:
            shutil.rmtree(folder, ignore_errors=True)
    rows = [row(n, before[n], after[n]) for n in contexts]
    healthy = {"no disk": without, "empty disk": first, "after the kill": again}
    print(f"on disk: {nbytes / 1e9:.2f} GB; healthy after (s):", {k: round(v, 2) for k, v in healthy.items()})
    print(table(rows))
    save(args.out, rows, model=args.model, flags=flags, healthy_seconds=healthy, disk_bytes=nbytes)


if __name__ == "__main__":
    main()
