"""Agents on a server, by the rules of InferenceX' AgentX: what each of them waits for, and how many the server holds.

    python -m bench.agents http://127.0.0.1:8000 [--agents 40] [--traces lmcache_agent_trace] [--out FILE.json]
    python -m bench.agents http://127.0.0.1:8000 --slo 30

Any server with OpenAI's /v1/completions can be measured; vLLM and SGLang report cached tokens with
--enable-prompt-tokens-details and --enable-cache-report.

Recorded sessions are replayed, closed loop: a turn is sent when the one before it has been answered, its subagents have
ended, and its recorded pause is over, of which at most 60 seconds are kept. Each answer has as many tokens as the
recorded one. An agent that has ended its session begins the next. The first one of each agent begins at 25% to 75% of
its time, after a warm-up: all agents send the turn before, with one token to generate. The order of sessions and these
places are determined by --seed. A session that is played again has other tokens after its system prompt, and each run
has its own, so that no earlier one is cached.

Claude Code's sessions (kv_cache_tester) are recorded as hashes of blocks, which are made token ids of, and have
recorded pauses. The calls of lmcache_agent_trace are sent as their texts, not before the recorded interval since the
one before; lengths of its answers are estimated, by four characters a token.

`infinite` is the cached share with a cache of unlimited size, computed from all prompts that were sent: generated
tokens are never part of a later prompt. `cont` are requests that continue a session with at most 2,000 new tokens.
`--slo 30` searches the most agents for which nine requests in ten are generated at 30 tokens per second or more, and
nine in ten get their first token within --slo-ttft seconds; each number of agents is a run of its own.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.agents.client import AgentClient, Work
from bench.agents.rows import details, holds, most_agents, row
from bench.agents.sessions import DATA, TRACES
from bench.common import machine, table
from bench.serve.client import Client
from bench.serve.client import Work as LoadWork
from bench.serve.endpoint import RunFailed
from bench.serve.loads import END_OF_IDS
from bench.serve.rows import WrongAnswer, check_twice
from bench.serve.server import max_model_len, model_name

LONGEST = 200_000
"""The most tokens of a prompt and its answer, where the server does not say."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.agents", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="URL of a running server")
    parser.add_argument("--agents", type=int, default=8, help="agents at once, or the first to try with --slo")
    parser.add_argument("--slo", type=float, metavar="TOK_S", help="search the most agents of that speed each")
    parser.add_argument("--slo-ttft", type=float, default=2.0, help="p90 of seconds to the first token (default: 2)")
    parser.add_argument("--most", type=int, default=512, help="the most agents to try with --slo")
    parser.add_argument("--duration", type=float, default=900.0, help="window in seconds (default: 900)")
    parser.add_argument("--grace", type=float, default=120.0, help="seconds for what is in flight when it ends")
    parser.add_argument("--seed", type=int, default=42, help="of the order of sessions, and where they begin")
    parser.add_argument("--salt", type=int, help="of the prompts (default: the time, so no earlier run is cached)")
    parser.add_argument("--start", type=share, nargs=2, default=(0.25, 0.75), metavar=("LEAST", "MOST"))
    parser.add_argument("--traces", choices=TRACES, default="kv_cache_tester", help="default: kv_cache_tester")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the traces")
    parser.add_argument(
        "--max-context-length", type=int, help="leave out longer sessions (default: as the server says)"
    )
    parser.add_argument("--cut", action="store_true", help="end longer sessions before, instead of leaving them out")
    parser.add_argument("--model", help="model name in requests (default: the first that the server lists)")
    parser.add_argument("--name", default="radixrt", help="name of the server in the table (default: radixrt)")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--vocab-size", type=int, default=END_OF_IDS, help=f"default: {END_OF_IDS}")
    parser.add_argument("--lenient", action="store_true", help="continue even if the same prompt gives another text")
    parser.add_argument("--timeout", type=float, default=600.0, help="limit in seconds for each request")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON to write")
    return parser


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError("expected a share from 0 to 1")
    return value


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(arguments)
    args.salt = int(time.time()) if args.salt is None else args.salt
    if args.start[0] > args.start[1]:
        parser.error("--start: the least share comes first")
    if min(args.agents, args.most) < 1 or args.duration <= 0:
        parser.error("--agents, --most and --duration must be positive")
    return args


class Bench:
    """Runs with different numbers of agents, and their rows."""

    def __init__(self, client: AgentClient, args: argparse.Namespace) -> None:
        self._client, self._args = client, args
        self._model = args.model or model_name(args.url, args.api_key)
        self._longest = args.max_context_length or max_model_len(args.url, args.api_key) or LONGEST
        self.rows: list[dict[str, Any]] = []

    def check(self) -> None:
        """Send the same prompt twice. Raises WrongAnswer."""
        args = self._args
        work = LoadWork(args.url, self._model, "twice", 1.0, args.salt, 0, args.vocab_size, args.api_key, args.timeout)
        with Client() as client:
            check_twice(client.run(work).answers, same_text=not args.lenient)

    def run(self, agents: int) -> dict[str, Any]:
        """Run that many agents, and add the row. Raises RunFailed."""
        args = self._args
        work = Work(
            url=args.url,
            model=self._model,
            traces=args.traces,
            data=str(args.data),
            agents=agents,
            seconds=args.duration,
            grace=args.grace,
            seed=args.seed,
            salt=args.salt + len(self.rows),
            vocab_size=args.vocab_size,
            longest=self._longest,
            cut=args.cut,
            start=tuple(args.start),
            api_key=args.api_key,
            timeout=args.timeout,
        )
        found = self._client.run(work)
        self.rows.append({"server": args.name} | row(agents, found) | details(found))
        return self.rows[-1]

    def search(self) -> int:
        """The most agents for which --slo holds."""
        args = self._args

        def tried(agents: int) -> bool:
            one = self.run(agents)
            one["holds"] = holds(one, args.slo, args.slo_ttft)
            print(f"{agents} agents: {'holds' if one['holds'] else 'does not hold'}", file=sys.stderr)
            return one["holds"]

        return most_agents(tried, args.agents, args.most)


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """The table: without columns that no row has, nor those that only the JSON has."""
    hidden = {"requests", "continuations", "sessions", "errors_by_kind", "first_errors", "warm_s", "window_s", "valid"}
    columns = [key for key in rows[0] if key not in hidden and any(one[key] is not None for one in rows)]
    return table([{key: "-" if one[key] is None else one[key] for key in columns} for one in rows])


def report(args: argparse.Namespace, rows: Sequence[dict[str, Any]], most: int | None) -> None:
    """Print the table and what failed, and write the JSON."""
    print(shown(sorted(rows, key=lambda one: one["agents"])))
    for one in rows:
        for kind, count in one["errors_by_kind"].items():
            print(f"{one['agents']} agents: {count} requests failed: {one['first_errors'][kind]}")
    if most is not None:
        print(f"most agents with {args.slo:g} tokens/s each and {args.slo_ttft:g} s to the first: {most}")
    if args.out:
        names = "agents slo slo_ttft duration seed salt start traces max_context_length cut".split()
        facts = {name: getattr(args, name) for name in names} | {"most_agents": most}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"benchmark": "agents", "machine": machine(), **facts, "rows": rows}
        args.out.write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 success, 1 the server failed, gave a wrong answer, or refused too many requests."""
    args, most = parse(arguments), None
    try:
        with AgentClient() as client:
            bench = Bench(client, args)
            bench.check()
            if args.slo is None:
                bench.run(args.agents)
            else:
                most = bench.search()
    except (WrongAnswer, RunFailed, RuntimeError, OSError, http.client.HTTPException) as error:
        print(f"bench.agents: {error}", file=sys.stderr)
        return 1
    report(args, bench.rows, most)
    return 0 if args.slo is not None or bench.rows[0]["valid"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
