"""Number of steps that recorded calls of agents take with drafted tokens: the scheduler and its drafter, with a runner
that returns the recorded answers, one call after the other, in their original order.

    python -m bench.drafts [--data FOLDER] [--calls 200] [--shape qwen3.5-9b]

A step without a draft adds one token, one with a draft up to several. The costs of steps on a GPU are measured by
`python -m bench.worker --drafts [--shape ...]`; if its file exists, `faster` is the speedup of decoding the calls one
at a time.
Every answer must be the recorded one. The tokenizer is a published one, not that of the models that were recorded.

Then tool calls of tau-bench with the schema of their tools as grammar, each after its conversation: tokens that the
grammar forces are not sampled, with and without drafts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bench.common import RESULTS, save, table
from bench.grammar import EOS, tokenizer_folder
from radixrt.messages import Grammar, Run, Sampling
from radixrt.worker.cache.page_cache import PageCache
from radixrt.worker.plan import FROM_DEVICE, Plan, Result
from radixrt.worker.request import Request
from radixrt.worker.scheduler.scheduler import Limits, Scheduler
from radixrt.worker.speculative.ngram import Drafter
from radixrt.worker.structured.compile import Grammars
from radixrt.worker.structured.jump_forward import Spelling
from radixrt.worker.structured.matcher import Matcher
from radixrt.worker.structured.vocabulary import Vocabulary, read_vocabulary

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TRACES = {"mini-swe-agent": "miniswe", "Magentic-One": "magagent", "tau-bench": "taubench"}
TOKENIZER = "tokenizers/phi-2/tokenizer.json.gz"
LONGEST = 1 << 16
"""Calls with more tokens are left out."""
MOST = 8
"""The most draft tokens in a step."""


class Said:
    """A runner that returns recorded answers. Steps overlap, as on a GPU."""

    def __init__(self) -> None:
        self.texts: dict[int, np.ndarray] = {}
        self.steps: list[tuple[int, int]] = []
        """(decodes, drafted tokens) of each step that has decodes."""

    def launch(self, plan: Plan) -> Callable[[], Result]:
        drafted = sum(len(draft.ids) for draft in plan.drafts)
        if decodes := int((plan.counts == 1).sum()) - drafted:
            self.steps.append((decodes, drafted))
        texts = (self.texts[request.id] for request in plan.requests)
        ends = (plan.starts + plan.counts).tolist()
        tokens = [int(text[end]) if end < len(text) else FROM_DEVICE for text, end in zip(texts, ends, strict=True)]
        return lambda: Result(tokens)


def calls(data: Path, name: str, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """The first `count` calls of a trace, by time, as (prompt, answer) in token ids."""
    with gzip.open(data / TOKENIZER, "rt") as file:
        tokenizer = Tokenizer.from_str(file.read())
    with gzip.open(data / "lmcache_agent_trace" / f"{name}.jsonl.gz", "rt") as file:
        rows = sorted((json.loads(line) for line in file.read().split("\n") if line), key=lambda r: r["timestamp"])
    for row in rows[:count]:
        prompt, answer = (tokenizer.encode(row[key], add_special_tokens=False).ids for key in ("input", "output"))
        if prompt and answer and len(prompt) + len(answer) < LONGEST:
            yield prompt, answer


def replay(found: list[tuple[list[int], list[int]]], drafter: Drafter | None) -> Said:
    """Run all calls, one after the other. Raises AssertionError if an answer is not the recorded one."""
    scheduler, runner = Scheduler(PageCache(4 * LONGEST, 1, 4, LONGEST), Limits(8192, 4), drafter), Said()
    for id, (prompt, answer) in enumerate(found):
        runner.texts[id] = np.array(prompt + answer)
        sampling = Sampling(max_tokens=len(answer), temperature=0.0, ignore_eos=True)
        run = Run(id=id, namespace="", ids=array("i", prompt).tobytes(), prompt_len=len(prompt), sampling=sampling)
        scheduler.add(Request(run, len(prompt) + len(answer), frozenset()))
        said, inflight = [], None
        while scheduler.has_work:
            plan = scheduler.plan()
            after = (plan, runner.launch(plan)) if plan else None
            if inflight:
                said += [t for output in scheduler.apply(inflight[0], inflight[1]()) for t in output.tokens]
            inflight = after
        assert said == answer, "what is drafted changes nothing"
    return runner


def costs(kind: str = "") -> dict[int, float]:
    """The cost of a step of one request by its number of draft tokens, relative to a step without; empty if it was not
    measured. `kind`: the end of the name of its file."""
    path = RESULTS / f"worker_drafts{kind}.json"
    if not path.exists():
        return {}
    rows = json.loads(path.read_text())["rows"]
    return {row["drafted"]: row["ratio"] for row in rows if row["batch"] == 1 and row["what"] == "wrong"}


def cost(known: dict[int, float], drafted: int) -> float:
    """The cost of a step, interpolated linearly between measured ones."""
    sizes = sorted(known)
    return float(np.interp(drafted, sizes, [known[size] for size in sizes])) if drafted else 1.0


def row(name: str, found: list[tuple[list[int], list[int]]], known: dict[int, float]) -> dict[str, Any]:
    plain, drafter = replay(found, None), Drafter(MOST, overlaps=True)
    steps = replay(found, drafter).steps
    spent = sum(cost(known, drafted) for _, drafted in steps) if known else 0.0
    return {
        "calls of": name,
        "calls": len(found),
        "generated": sum(len(answer) for _, answer in found),
        "drafted": drafter.drafted,
        "right": drafter.accepted / max(drafter.drafted, 1),
        "steps": len(steps),
        "without": len(plain.steps),
        "tokens a step": len(plain.steps) / len(steps),
        **({"faster": len(plain.steps) / spent} if known else {}),
    }


# ---------------------------------------------------------------- by a schema


class Calls:
    """A runner that returns recorded calls: the next token of what is left of the text, as the tokenizer encodes it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.text = b""
        self.steps: list[tuple[int, int]] = []
        self._tokens = vocabulary.tokens
        self._spelling = Spelling(vocabulary.tokens, vocabulary.encode)

    def said(self, request: Request, ahead: list[int]) -> bytes:
        return b"".join(self._tokens[i] for i in [*request.tokens[request.prompt_len :], *ahead])

    def run(self, plan: Plan, requests: Sequence[Request]) -> Result:
        ahead = plan.ahead
        tokens = [self._next(request, ahead.get(n, [])) for n, request in enumerate(requests)]
        self.steps.append((1, sum(len(draft.ids) for draft in plan.drafts)))
        return Result(tokens)

    def _next(self, request: Request, ahead: list[int]) -> int:
        said = self.said(request, ahead)
        rest = self.text[len(said) :]
        if not self.text.startswith(said):
            return EOS  # after a wrong draft; the token is discarded
        return self._spelling._spell(rest.decode())[0] if rest else EOS


def conversations(data: Path, count: int) -> tuple[str, list[tuple[str, str]]]:
    """Returns (the JSON schema of a call of any tool, (conversation, the call that follows) for each call, as JSON)."""
    tools = [tool["function"] for tool in json.loads((data / "tau_bench/airline_tools.json").read_text())]
    properties = {tool["name"]: tool["parameters"]["properties"] for tool in tools}
    shapes = [
        {"type": "object", "required": ["name", "arguments"],
         "properties": {"name": {"const": tool["name"]}, "arguments": tool["parameters"]}}
        for tool in tools
    ]  # fmt: skip
    found: list[tuple[str, str]] = []
    with gzip.open(data / "tau_bench/gpt4o_airline_trajectories.jsonl.gz", "rt") as lines:
        for line in lines:
            messages = json.loads(line)["messages"]
            for at, message in enumerate(messages):
                for call in message.get("tool_calls") or ():
                    name, given = call["function"]["name"], json.loads(call["function"]["arguments"])
                    if name not in properties:
                        continue
                    ordered = {key: given[key] for key in properties[name] if key in given}
                    call_text = json.dumps({"name": name, "arguments": ordered}, ensure_ascii=False)
                    found.append((json.dumps(messages[:at], ensure_ascii=False), call_text))
            if len(found) >= count:
                break
    return json.dumps({"anyOf": shapes}), found[:count]


def by_schema(data: Path, count: int, folder: Path, drafter: Drafter | None) -> list[tuple[int, int]]:
    """Run all calls. Returns their steps. Raises AssertionError if a call is not the recorded one."""
    vocabulary = read_vocabulary(folder, 131_072)
    grammars = Grammars("", len(vocabulary.tokens), frozenset({EOS}))
    grammars._vocabulary = vocabulary
    schema, found = conversations(data, count)
    grammar = Grammar("json_schema", schema)
    compiled = grammars.get(grammar).result()
    scheduler, runner = Scheduler(PageCache(4 * LONGEST, 1, 4, LONGEST), Limits(LONGEST, 4), drafter), Calls(vocabulary)
    for id, (conversation, call) in enumerate(found):
        runner.text = call.encode()
        prompt = array("i", vocabulary.encode(conversation))
        sampling = Sampling(max_tokens=2048, temperature=0.0, grammar=grammar)
        run = Run(id=id, namespace="", ids=prompt.tobytes(), prompt_len=len(prompt), sampling=sampling)
        request = Request(run, LONGEST - 1, frozenset({EOS}))
        request.matcher = Matcher(compiled, request)
        scheduler.add(request)
        while scheduler.has_work:
            assert not scheduler.settle()
            plan = scheduler.plan()
            scheduler.apply(plan, runner.run(plan, scheduler.requests_of(plan)))
        assert runner.said(request, []) == runner.text, "what is drafted changes nothing"
    return runner.steps


def schema_row(data: Path, count: int, known: dict[int, float]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path, drafter = tokenizer_folder("falcon-tokenizer", Path(folder)), Drafter(MOST, overlaps=True)
        plain, steps = (len(by_schema(data, count, path, None)), by_schema(data, count, path, drafter))
    spent = sum(cost(known, drafted) for _, drafted in steps) if known else 0.0
    return {
        "calls of": "tau-bench, by the schema of its tools",
        "calls": count,
        "drafted": drafter.drafted,
        "right": drafter.accepted / max(drafter.drafted, 1),
        "steps": len(steps),
        "without": plain,
        "tokens a step": plain / len(steps),
        **({"faster": plain / spent} if known else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the traces and a tokenizer")
    parser.add_argument("--calls", type=int, default=200, help="of each trace")
    parser.add_argument("--shape", default="", help="of the model whose steps were measured; Llama 8B by default")
    args = parser.parse_args()
    if not args.data.is_dir():
        print(f"no data at {args.data}")
        return
    kind = args.shape and "_" + args.shape.replace("-", "_")
    known = costs(kind)
    rows = [row(name, list(calls(args.data, trace, args.calls)), known) for name, trace in TRACES.items()]
    rows.append(schema_row(args.data, args.calls, known))
    print(table(rows))
    save(f"drafts{kind}", rows)


if __name__ == "__main__":
    main()
