"""CPU time of grammars: compilation, and the masks of a step.

    python -m bench.grammar [--quick] [--folder CHECKPOINT]

64 requests generate different JSON documents of one schema, each at another position in its document. In every step,
each request accepts a token, looks for forced text, and fills its mask. The vocabulary has 128,256 made-up byte
strings, or is that of a checkpoint. Before anything is timed, masks are compared with what the matcher accepts, token
by token. The reference is xgrammar alone: all masks in one call.

Then the savings of jump-forward: tool calls that a model made in tau-bench (../shared/data), by the schemas of its
tools, for several tokenizers.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import tempfile
import time
from array import array
from pathlib import Path

import numpy as np
import torch

from bench.common import save, table
from radixrt.messages import Grammar, Run, Sampling
from radixrt.worker.execution.sampler import Masks, TorchSampler
from radixrt.worker.request import Request
from radixrt.worker.structured.compile import Grammars
from radixrt.worker.structured.jump_forward import SHORTEST, Spelling
from radixrt.worker.structured.masks import fill_masks
from radixrt.worker.structured.matcher import Matcher
from radixrt.worker.structured.vocabulary import Vocabulary, read_vocabulary

EOS = 2
BATCH = 64
DATA = Path(__file__).parents[2] / "shared" / "data"
TOKENIZERS = ("falcon-tokenizer", "phi-3-mini", "mistral")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "role": {"enum": ["engineer", "editor", "physician", "teacher"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}, "code": {"type": "integer"}},
            "required": ["street", "city", "code"],
        },
    },
    "required": ["name", "age", "role", "tags", "address"],
}
CALL = {"anyOf": [{"type": "object", "properties": {"tool": {"const": f"tool_{i}"}, "arguments": PERSON}}
                  for i in range(16)]}  # fmt: skip
BOUNDED = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 40}}, "required": ["name"]}
GRAMMARS = {
    "a person": Grammar("json_schema", json.dumps(PERSON)),
    "16 tools": Grammar("json_schema", json.dumps(CALL)),
    "any JSON": Grammar("json"),
    "maxLength 40": Grammar("json_schema", json.dumps(BOUNDED)),
}


def made_vocabulary(size: int = 128_256) -> Vocabulary:
    """A made-up vocabulary: three special tokens, all bytes, JSON's punctuation, words with and without a leading
    space."""
    rng = np.random.default_rng(0)
    signs = [a + b for a in '{}[]":, ' for b in '{}[]":, '] + ['": "', '", "', '"},', '": {"', '": [', "\n  ", "    "]
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "ion")]
    words: dict[str, None] = dict.fromkeys(str(n) for n in range(1000))
    while len(words) < size:
        word = "".join(rng.choice(syllables, rng.integers(1, 4)))
        words |= dict.fromkeys((word, " " + word, word.capitalize(), " " + word.capitalize()))
    tokens = [b""] * 3 + [bytes([b]) for b in range(256)]
    tokens += list(dict.fromkeys(text.encode() for text in [*signs, *words] if len(text) > 1))
    return Vocabulary(tokens[:size], {})


def encode(vocabulary: dict[bytes, int], text: bytes) -> list[int]:
    """Encode greedily, by the longest token."""
    ids, at = [], 0
    while at < len(text):
        size = next(n for n in range(24, 0, -1) if text[at : at + n] in vocabulary)
        ids.append(vocabulary[text[at : at + size]])
        at += size
    return ids


def document(name: str, rng: np.random.Generator) -> str:
    """A random text that matches the grammar."""
    word = lambda n: " ".join("".join(rng.choice(list("abcdefghiklmnoprstu"), 6)) for _ in range(n))  # noqa: E731
    person = {
        "name": word(2), "age": int(rng.integers(99)), "role": "teacher", "tags": [word(1) for _ in range(3)],
        "address": {"street": word(2), "city": word(1), "code": int(rng.integers(9999))},
    }  # fmt: skip
    if name == "maxLength 40":
        return json.dumps({"name": word(5)})
    return json.dumps({"tool": f"tool_{rng.integers(16)}", "arguments": person} if name == "16 tools" else person)


def requests_of(name: str, grammars: Grammars, by_bytes: dict[bytes, int], count: int) -> list[tuple[Request, list]]:
    """Requests with matchers, each with the tokens that it will generate."""
    rng, made = np.random.default_rng(1), []
    # With an empty vocabulary for the spelling, forced text is searched for but never appended.
    compiled = dataclasses.replace(grammars.get(GRAMMARS[name]).result(), spelling=Spelling([]))
    for number in range(count):
        run = Run(id=number, namespace="", ids=array("i", [5]).tobytes(), prompt_len=1,
                  sampling=Sampling(grammar=GRAMMARS[name]))  # fmt: skip
        request = Request(run, 1 << 20, frozenset({EOS}))
        request.matcher = Matcher(compiled, request)
        tokens = encode(by_bytes, document(name, rng).encode())
        begun = number % (len(tokens) // 2)
        request.extend(tokens[:begun])
        made.append((request, tokens[begun:]))
    return made


def check(vocabulary: Vocabulary, requests: list[tuple[Request, list]]) -> None:
    """Assert that a bit is set if and only if the matcher accepts the token. Special tokens and control characters are
    not checked."""
    size = len(vocabulary.tokens)
    out = np.zeros((len(requests), -(-size // 32)), dtype=np.int32)
    assert not fill_masks([request for request, _ in requests], out)
    for row in (0, len(requests) // 2):
        matcher = requests[row][0].matcher.matcher
        allowed = np.unpackbits(out[row].view(np.uint8), bitorder="little")[:size]
        for i in range(3 + ord(" "), size, 7):
            accepted = bool(vocabulary.tokens[i]) and matcher.accept_token(i)
            assert accepted == bool(allowed[i]), (row, i)
            if accepted:
                matcher.rollback(1)


def step_us(requests: list[tuple[Request, list]], size: int, threads: int) -> tuple[float, float, float]:
    """Medians over steps, in microseconds per request, of: accepting a token and looking for forced text (when a step
    is applied), filling the mask (before sampling), filling the mask by xgrammar alone."""
    import xgrammar

    alone = xgrammar.BatchGrammarMatcher(1)
    out = np.zeros((len(requests), -(-size // 32)), dtype=np.int32)
    applied, filled, theirs, rows = [], [], [], list(range(len(requests)))
    for step in range(min(len(tokens) for _, tokens in requests)):
        for request, tokens in requests:
            request.extend(tokens[step : step + 1])
        began = time.perf_counter()
        for request, _ in requests:
            request.matcher.jump(request)
        between = time.perf_counter()
        fill_masks([request for request, _ in requests], out, threads)
        filled.append(time.perf_counter() - between)
        applied.append(between - began)
        matchers = [request.matcher.matcher for request, _ in requests]
        began = time.perf_counter()
        alone.batch_fill_next_token_bitmask(matchers, out, rows)
        theirs.append(time.perf_counter() - began)
    return tuple(float(np.median(times)) * 1e6 / len(requests) for times in (applied, filled, theirs))


def apply_us(size: int) -> float:
    """Microseconds per request to apply masks to logits, by torch on this CPU."""
    logits, bits = torch.zeros(BATCH, size), torch.zeros(BATCH, -(-size // 32), dtype=torch.int32)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        TorchSampler().mask(logits, Masks(bits, torch.arange(BATCH)))
        times.append(time.perf_counter() - began)
    return min(times) * 1e6 / BATCH


# ---------------------------------------------------------------- jump-forward


def tokenizer_folder(name: str, folder: Path) -> Path:
    """Unpack a tokenizer of the data into `folder`, which is returned."""
    for path in (DATA / "tokenizers" / name).iterdir():
        if path.is_file():
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            (folder / path.name.removesuffix(".gz")).write_bytes(content)
    return folder


def recorded_calls(count: int) -> tuple[dict[str, dict], list[tuple[str, dict]]]:
    """From tau-bench's airline domain: (parameters of the tools by name, an agent's calls as (name, arguments))."""
    tools = {
        t["function"]["name"]: t["function"] for t in json.loads((DATA / "tau_bench/airline_tools.json").read_text())
    }
    calls: dict[str, tuple[str, dict]] = {}
    with gzip.open(DATA / "tau_bench/gpt4o_airline_trajectories.jsonl.gz", "rt") as lines:
        for line in lines:
            for message in json.loads(line)["messages"]:
                for call in message.get("tool_calls") or ():
                    function = call["function"]
                    if function["name"] in tools:
                        arguments = json.loads(function["arguments"])
                        properties = tools[function["name"]]["parameters"]["properties"]
                        ordered = {key: arguments[key] for key in properties if key in arguments}
                        calls[function["name"] + json.dumps(ordered)] = function["name"], ordered
    chosen = np.random.default_rng(0).permutation(len(calls))[:count]
    return {name: tool["parameters"] for name, tool in tools.items()}, [list(calls.values())[i] for i in chosen]


def forced_row(name: str, folder: Path) -> dict:
    """Tokens of calls that need not be sampled with the schema of all tools as grammar. Sampled tokens are those of the
    tokenizer's own encoding."""
    vocabulary = read_vocabulary(folder, 131_072)
    grammars = Grammars("", len(vocabulary.tokens), frozenset({EOS}))
    grammars._vocabulary = vocabulary
    tools, calls = recorded_calls(100)
    shapes = [
        {"properties": {"name": {"const": tool}, "arguments": schema}, "required": ["name", "arguments"]}
        for tool, schema in tools.items()
    ]
    grammar = Grammar("json_schema", json.dumps({"anyOf": [{"type": "object"} | shape for shape in shapes]}))
    compiled = grammars.get(grammar).result()
    whole = Spelling(vocabulary.tokens, vocabulary.encode)
    tokens, runs, own = 0, [], 0
    for tool, arguments in calls:
        text = json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)
        prompt = array("i", [5]).tobytes()
        run = Run(id=0, namespace="", ids=prompt, prompt_len=1, sampling=Sampling(grammar=grammar))
        request = Request(run, 1 << 20, frozenset({EOS}))
        request.matcher = Matcher(compiled, request)
        expected, rest = whole._spell(text), text.encode()
        ends = set(np.cumsum([len(vocabulary.tokens[i]) for i in expected]).tolist())
        tokens += len(expected)
        while rest:
            ids = request.matcher.jump(request)
            if ids:
                runs.append(len(ids))
            else:
                ids = whole._spell(rest.decode())[:1]
            request.extend(ids)
            for i in ids:
                assert rest.startswith(vocabulary.tokens[i])
                rest = rest[len(vocabulary.tokens[i]) :]
                own += len(text.encode()) - len(rest) in ends and len(ids) > 1
    return {
        "tokenizer": name,
        "tokens": tokens,
        "forced": sum(runs),
        "runs": len(runs),
        "steps": (len(calls) + tokens - sum(runs)) / (len(calls) + tokens),
        "as_the_tokenizer": own / sum(runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small vocabulary, to see that it runs")
    parser.add_argument("--folder", help="a checkpoint whose tokenizer is taken")
    args = parser.parse_args()
    size = 4096 if args.quick else 128_256
    vocabulary = read_vocabulary(Path(args.folder), size) if args.folder else made_vocabulary(size)
    by_bytes = {token: i for i, token in enumerate(vocabulary.tokens) if token}
    rows = []
    for name, grammar in GRAMMARS.items():
        grammars = Grammars("", size, frozenset({EOS}))
        grammars._vocabulary = vocabulary
        grammars.get(Grammar("json_schema", '{"const": 0}')).result()  # imports xgrammar, prepares the vocabulary
        began = time.perf_counter()
        compiled = grammars.get(grammar).result()
        seconds = time.perf_counter() - began
        check(vocabulary, requests_of(name, grammars, by_bytes, BATCH))
        applied, filled, alone = step_us(requests_of(name, grammars, by_bytes, BATCH), size, threads=1)
        _, spread, _ = step_us(requests_of(name, grammars, by_bytes, BATCH), size, threads=2)
        rows.append(
            {
                "grammar": name,
                "compile_ms": seconds * 1e3,
                "megabytes": compiled.nbytes / 1e6,
                "apply_us": applied,
                "mask_us": filled,
                "xgrammar_alone_us": alone,
                "by_2_threads_us": spread,
            }
        )
    print(table(rows))
    applied = apply_us(size)
    print(f"applied by torch on the CPU: {applied:.0f} us a request")
    forced = []
    for name in TOKENIZERS if DATA.is_dir() else ():
        with tempfile.TemporaryDirectory() as folder:
            forced.append(forced_row(name, tokenizer_folder(name, Path(folder))))
    print(f"jump-forward: runs of {SHORTEST} tokens and more")
    print(table(forced) if forced else f"no data at {DATA}")
    if not args.quick:
        save("grammar", rows, batch=BATCH, vocabulary=size, apply_us_a_request=applied, forced=forced)


if __name__ == "__main__":
    main()
