"""A server under seven loads: tokens per second, latencies, the cached share of prompts, and the floor.

    python -m bench.serve --url http://127.0.0.1:8000 [--shape FOLDER] [--loads plain,hit] [--out FILE.json]
    python -m bench.serve --serve FOLDER [-- flags of radixrt serve]

Any server with OpenAI's /v1/completions can be measured; vLLM and SGLang report cached tokens with
--enable-prompt-tokens-details and --enable-cache-report. The loads are described in bench/serve/loads.py. Before
anything is timed, the same prompt is sent twice, and must give the same text, the second time with cached tokens; then
there is a warm-up. In all loads, each answer must have exactly the requested number of tokens. The floor, the least
time that the GPU needs, is computed from the model's shape and the GPU's measured ceilings: --copy-gbs and --tflops, or
--ceilings FILE.json with "copy_gbs" and "tflops".
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import RESULTS, machine, table
from bench.serve.client import Client, Run, Work
from bench.serve.floor import Ceilings, Shape, floor
from bench.serve.loads import ASKED_FOR, END_OF_IDS, MEASURED, Load, make_load
from bench.serve.rows import WrongAnswer, beside, check_counts, check_twice, rival_rows, rows
from bench.serve.server import model_name, radixrt_serve, read_config


@dataclass(frozen=True, slots=True)
class Bench:
    """A client, a server, and the settings that all loads of a run share."""

    client: Client
    url: str
    model: str
    vocab_size: int
    args: argparse.Namespace

    def run(self, name: str, repetition: int = 0) -> tuple[Load, Run]:
        """Run a load and check its answers. Raises RunFailed, WrongAnswer."""
        args = self.args
        work = Work(
            url=self.url,
            model=self.model,
            load=name,
            scale=args.scale,
            seed=args.seed,
            repetition=repetition,
            vocab_size=self.vocab_size,
            api_key=args.api_key,
            timeout=args.timeout,
        )
        load, run = make_load(name, args.scale), self.client.run(work)
        check_counts(load, run.answers)
        return load, run

    def check(self) -> None:
        """Send the same prompt twice. Raises WrongAnswer."""
        answers = self.run("twice")[1].answers
        check_twice(answers, same_text=not self.args.lenient)
        if answers[1].cached_tokens is None:
            print("the server does not say how many tokens were cached", file=sys.stderr)
        if answers[0].digest != answers[1].digest:
            print("the same prompt again: another text at temperature 0", file=sys.stderr)

    def measure(self, name: str, repetition: int) -> list[dict[str, Any]]:
        """Run a load. Returns its row of the table, with the floor if it is known, then a row for each tenant."""
        load, run = self.run(name, repetition)
        first, *others = rows(load, run)
        first |= floor_columns(load, run, self.args)
        return [{"server": self.args.name} | one for one in (first, *others)]


def floor_columns(load: Load, run: Run, args: argparse.Namespace) -> dict[str, float]:
    """The floor in seconds, and the load's duration as a multiple of it; empty without ceilings."""
    ceilings = read_ceilings(args)
    if ceilings is None:
        return {}
    least = floor(load, Shape.of(read_config(args.shape)), ceilings, args.kv_bytes, args.weight_bytes).seconds
    return {"floor_s": least, "times_floor": run.seconds / least}


def read_ceilings(args: argparse.Namespace) -> Ceilings | None:
    """Ceilings from flags, or else from the file; None unless both are known."""
    found = json.loads(Path(args.ceilings).read_text()) if args.ceilings else {}
    copy, tflops = args.copy_gbs or found.get("copy_gbs"), args.tflops or found.get("tflops")
    return Ceilings(copy, tflops) if copy and tflops else None


def names(text: str) -> list[str]:
    """Parse a comma-separated list of loads, for argparse."""
    found = text.split(",")
    if unknown := [name for name in found if name not in MEASURED | ASKED_FOR]:
        raise argparse.ArgumentTypeError(f"no load {unknown[0]!r}: there are {', '.join(MEASURED | ASKED_FOR)}")
    return found


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="URL of a running server")
    where.add_argument("--serve", metavar="MODEL", help="start `radixrt serve MODEL`, with the flags after --")
    parser.add_argument("--model", help="model name in requests (default: the first that the server lists)")
    parser.add_argument("--name", default="radixrt", help="name of the server in the table (default: radixrt)")
    parser.add_argument("--api-key", default="", help="API key, except for tenants, whose names are their keys")
    which = f"comma-separated, of {','.join(MEASURED)} (default: these), {', '.join(ASKED_FOR)}"
    parser.add_argument("--loads", type=names, default=list(MEASURED), help=which)
    parser.add_argument("--scale", type=float, default=1.0, help="factor for requests and tokens; less than 1 to try")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each load, each with other token ids")
    parser.add_argument("--seed", type=int, help="seed of token ids (default: the time, so no earlier run is cached)")
    parser.add_argument("--lenient", action="store_true", help="continue even if the same prompt gives another text")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="limit in seconds for each load, and for the start"
    )
    parser.add_argument("--shape", metavar="FOLDER", help="folder with config.json, for vocabulary and floor")
    parser.add_argument("--copy-gbs", type=float, help="measured ceiling of memory traffic, in GB/s (1e9 bytes)")
    parser.add_argument("--tflops", type=float, help="measured ceiling of bf16 products, in TFLOP/s")
    parser.add_argument("--ceilings", metavar="FILE", help="JSON file with both")
    parser.add_argument("--kv-bytes", type=float, default=1.0, help="bytes per KV element (default: 1, FP8)")
    parser.add_argument("--weight-bytes", type=float, default=2.0, help="bytes per weight (default: 2, bf16)")
    parser.add_argument("--rivals", action="append", default=[], metavar="FILE", help="rows of other servers to print")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON to write (default, if complete: bench/results/serve.json)"
    )
    return parser


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line, and fill in defaults. Returns (arguments, flags for `radixrt serve`)."""
    own, flags = list(arguments), []
    if "--" in own:
        cut = own.index("--")
        own, flags = own[:cut], own[cut + 1 :]
    parser = make_parser()
    args = parser.parse_args(own)
    args.shape = args.shape or args.serve
    args.seed = int(time.time()) if args.seed is None else args.seed
    if flags and not args.serve:
        parser.error("flags after -- are for --serve")
    if read_ceilings(args) and not args.shape:
        parser.error("the floor needs --shape")
    if args.out is None and args.scale == 1.0 and args.name == "radixrt" and set(args.loads) == set(MEASURED):
        args.out = RESULTS / "serve.json"
    return args, flags


@contextmanager
def server(args: argparse.Namespace, flags: Sequence[str]) -> Iterator[tuple[str, float | None]]:
    """Start a server if requested. Yields (URL, seconds until it was healthy; None if it was running already)."""
    if args.url:
        yield args.url, None
    else:
        # A server that outlives a killed benchmark would disturb the next one.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        with radixrt_serve(args.serve, flags, args.timeout) as started:
            yield started


def save(out: Path, rows: Sequence[dict[str, Any]], **facts: Any) -> None:
    """Like bench.common.save, but to any path."""
    out.parent.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": "serve", "machine": machine(), **facts, "rows": rows}
    out.write_text(json.dumps(content, indent=1) + "\n")


def run_all(args: argparse.Namespace, url: str) -> list[dict[str, Any]]:
    """Check the server, warm it up, and run all loads. Returns the rows of the table."""
    model = args.model or model_name(url, args.api_key)
    vocab_size = read_config(args.shape)["vocab_size"] if args.shape else END_OF_IDS
    measured = []
    with Client() as client:
        bench = Bench(client, url, model, vocab_size, args)
        bench.check()
        bench.run("warm-up")
        for name in args.loads:
            for repetition in range(args.repeat):
                measured += (found := bench.measure(name, repetition))
                print(f"{name}: {found[0]['wall_s']:.2f} s", file=sys.stderr)
    return measured


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 success, 1 the server failed or gave a wrong answer."""
    args, flags = parse(arguments)
    rivals = [one for path in args.rivals for one in rival_rows(json.loads(Path(path).read_text()))]
    try:
        with server(args, flags) as (url, start_seconds):
            measured = run_all(args, url)
    except (WrongAnswer, RuntimeError, OSError, http.client.HTTPException) as error:
        print(f"bench.serve: {error}", file=sys.stderr)
        return 1
    print(table(beside(measured, rivals)))
    if start_seconds is not None:
        print(f"healthy after {start_seconds:.1f} s")
    if args.out:
        facts = {"server": args.name, "scale": args.scale, "seed": args.seed, "start_s": start_seconds}
        save(args.out, measured, **facts)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
