"""What `--keep-thinking` costs and gains: sessions of agents behind published chat templates that drop thoughts.

    python -m bench.thinking [--quick] [--data FOLDER]

Each session is played twice by `Sessions`, with and without `keep_thinking`. A model writes each answer as the template
writes it in a loop of tools; the client sends it back without its thoughts. Ids are compared with those of earlier
prompts and answers of the session, as a cache does that forgets nothing. Tokens are Falcon's.

    service   conversations of customers with an airline's agent, recorded as text (`tau_bench`); thoughts are made up,
              log-normal with a mean of so many tokens
    coding    sessions of coding agents, recorded as lengths (`kv_cache_tester`); of answers with thoughts, these are
              THOUGHT_SHARE, as in the recorded sessions that count them (`tracelab_examples`)

prompt    tokens of all prompts: what attention reads, and what a client is billed for
computed  tokens of them, first prompts aside, that no earlier request of the session left in the cache
kept      tokens that the session leaves in the cache, all branches
longest   tokens of the longest prompt
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import tempfile
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import save, table
from radixrt.messages import NO_TENANT, ChatPrompt
from radixrt.tokens import Sessions, Tokenizer, load_tokenizer
from tests.recorded import chats

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TEMPLATES = (
    "Qwen-Qwen3-0.6B", "Qwen3.5-4B", "GLM-4.6", "openai-gpt-oss-120b", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "deepseek-ai-DeepSeek-V3.2", "MiniMax-M2", "Kimi-K2-Thinking", "deepseek-ai-DeepSeek-V3.1", "Qwen-QwQ-32B",
)  # fmt: skip
SERVICE, CODING, LENGTHS = 12, 4, (100, 600)
REQUESTS, LONGEST = 40, 60_000
"""The most requests of a coding session, and tokens of its prompts."""
THOUGHT_SHARE = 0.31
ARGS = {"enable_thinking": True, "thinking": True}
BASH = {
    "name": "bash",
    "description": "Runs it.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
}
SPECIALS = re.compile(r"<[|｜][^|｜<>\s{}'\"]{1,40}[|｜]>|\[e~\[|\]~b\]")
Message = dict[str, Any]


# ---------------------------------------------------------------- sessions


class Words:
    """Makes up text of so many tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        candidates = (tokenizer.token_bytes(id) for id in range(20_000))
        self._words = [word.decode() for word in candidates if re.fullmatch(rb" [a-z]{3,9}", word)]

    def text(self, rng: random.Random, tokens: float) -> str:
        return "".join(rng.choices(self._words, k=max(1, round(tokens))))


def service(data: Path, words: Words, mean: int, rng: random.Random) -> Iterator[list[Message]]:
    """Recorded conversations, each answer with thoughts."""
    for chat in islice(chats(data, "tau_bench"), SERVICE):
        for message in chat:
            if message["role"] == "assistant":
                tokens = mean * rng.lognormvariate(-0.32, 0.8)  # its mean is 1
                message["reasoning_content"] = words.text(rng, tokens)
        yield chat


def coding(data: Path, words: Words, rng: random.Random) -> Iterator[list[Message]]:
    """Recorded lengths, made up as text."""
    with gzip.open(data / "kv_cache_tester" / "sessions.jsonl.gz", "rt") as file:
        sessions = map(json.loads, file)
        yield from islice(filter(bool, (_coding(session, words, rng) for session in sessions)), CODING)


def _coding(session: dict[str, Any], words: Words, rng: random.Random) -> list[Message]:
    """The messages of a session until it is too long, or shortens its history. [] if it has fewer than three
    questions."""
    chat = [{"role": "system", "content": words.text(rng, min(session["system_tokens"], LONGEST // 4))}]
    before = first = 0
    for number, request in enumerate(r for r in session["requests"] if r["type"] != "subagent"):
        new = request["in"] - before
        if number == REQUESTS or new < 0 or request["in"] - (first or request["in"]) > LONGEST:
            break
        first = first or request["in"]
        new = new if number else 500
        asked = "tool_result" not in request["input_types"]
        result = {"role": "tool", "tool_call_id": f"call{number - 1:05}", "content": words.text(rng, new)}
        called = number > 0 and bool(chat[-1].get("tool_calls"))
        if called:
            chat.append(result if not asked else result | {"content": words.text(rng, 20)})
        if asked or not called:
            chat.append({"role": "user", "content": words.text(rng, new)})
        thinks = "thinking" in request["output_types"]
        said = request["out"] * (1 - THOUGHT_SHARE * thinks)
        answer: Message = {"role": "assistant", "content": words.text(rng, min(said, 60)).strip()}
        if thinks:
            answer["reasoning_content"] = words.text(rng, request["out"] * THOUGHT_SHARE).strip()
        if request["stop"] == "tool_use":
            arguments = json.dumps({"command": words.text(rng, said - 60).strip()})
            function = {"name": "bash", "arguments": arguments}
            answer["tool_calls"] = [{"id": f"call{number:05}", "type": "function", "function": function}]
        else:
            answer["content"] = words.text(rng, said).strip()
        chat.append(answer)
        before = request["in"] + request["out"]
    return chat if sum(message["role"] == "user" for message in chat) >= 3 else []


# ---------------------------------------------------------------- a model


def load(folder: Path, data: Path, template: str) -> Tokenizer:
    """Falcon's tokenizer with a template and its special tokens."""
    folder.mkdir()
    raw = (data / "tokenizers" / "falcon-tokenizer" / "tokenizer.json.gz").read_bytes()
    (folder / "tokenizer.json").write_bytes(gzip.decompress(raw))
    marks = dict.fromkeys(SPECIALS.findall(template))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "eos_token": "<|endoftext|>",
        "added_tokens_decoder": {str(65_024 + i): {"content": mark, "special": True} for i, mark in enumerate(marks)},
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


def generated(tokenizer: Tokenizer, prompt: ChatPrompt, message: Message) -> str:
    """What the model writes: what the template would write in a loop of tools, with the thoughts that it drops. The
    history has none, so that the template writes it always alike."""
    thought = message.get("reasoning_content", "")
    asked = tokenizer.apply_chat(prompt)
    if asked.endswith("<|start|>assistant"):
        return _in_harmony(message, thought)
    whole = ChatPrompt([*prompt.messages, message], prompt.tools, template_args=ARGS)
    shown = tokenizer.apply_chat(whole, answer_next=False)
    common = os.path.commonprefix([asked, shown])
    common = re.sub(r"<[^<>\n]*$", "", common)
    rest = shown[len(common) :].rstrip().removeprefix("</think>")
    if thought.strip() not in rest or not thought:
        opened = asked.rstrip().endswith("<think>")
        rest = f"{'' if opened else '<think>'}\n{thought}\n</think>\n\n{rest.lstrip()}"
    return rest


def _in_harmony(message: Message, thought: str) -> str:
    text = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    if not message.get("tool_calls"):
        return f"{text}<|channel|>final<|message|>{message['content']}<|return|>"
    if message.get("content"):
        text += f"<|channel|>commentary<|message|>{message['content']}<|end|><|start|>assistant"
    function = message["tool_calls"][0]["function"]
    header = f"<|channel|>commentary to=functions.{function['name']} <|constrain|>json<|message|>"
    return f"{text}{header}{function['arguments']}<|call|>"


# ---------------------------------------------------------------- measurement


class Played:
    """Sums over sessions."""

    def __init__(self) -> None:
        self.prompt = self.computed = self.kept = self.longest = self.turns = 0

    def play(self, tokenizer: Tokenizer, chat: list[Message], tools: list[Any], keep_thinking: bool) -> None:
        sessions = Sessions(tokenizer, keep_thinking=keep_thinking)
        seen: list[np.ndarray] = []
        sent: list[Message] = []
        for message in chat:
            if message["role"] == "assistant":
                asked = ChatPrompt(list(sent), tools, template_args=ARGS)
                encoded = sessions.encode_chat(NO_TENANT, asked)
                text = generated(tokenizer, asked, message)
                ids = array("i", tokenizer.encode(text, False)).tobytes()
                sessions.remember(encoded, message, ids)
                prompt = np.frombuffer(encoded.ids, "<i4")
                whole = not seen or encoded.ids.startswith(seen[-1].tobytes())
                assert whole or not keep_thinking, "nothing is computed again where thoughts are kept"
                hit = max((common(prompt, other) for other in seen[-4:]), default=0)
                self.turns += 1
                self.prompt += len(prompt)
                self.computed += (len(prompt) - hit) * bool(seen)
                self.longest = max(self.longest, len(prompt))
                seen.append(np.frombuffer(encoded.ids + ids[:-4], "<i4"))  # the last token is not computed
                self.kept += len(seen[-1]) - hit
            sent.append({name: value for name, value in message.items() if name != "reasoning_content"})

    def figures(self, mode: str) -> dict[str, Any]:
        sums = {"prompt k": self.prompt, "computed k": self.computed, "kept k": self.kept, "longest k": self.longest}
        return {f"{name}, {mode}": round(value / 1000, 1) for name, value in sums.items()}


def common(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if differ.size else size


def row(tokenizer: Tokenizer, name: str, load: str, sessions: list[list[Message]], tools: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"template": name, "load": load}
    for mode, keep in (("off", False), ("on", True)):
        played = Played()
        for chat in sessions:
            played.play(tokenizer, chat, tools, keep)
        found |= {"turns": played.turns} | played.figures(mode)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one template and load, to see that it runs")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with tokenizers, templates and sessions")
    args = parser.parse_args()
    airline = json.loads((args.data / "tau_bench" / "airline_tools.json").read_text())
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for name in TEMPLATES[: 1 if args.quick else None]:
            source = (args.data / "chat_templates" / f"{name}.jinja").read_text()
            tokenizer = load(Path(root) / name, args.data, source)
            words = Words(tokenizer)
            for mean in LENGTHS[: 1 if args.quick else None]:
                talks = list(service(args.data, words, mean, random.Random(0)))
                rows.append(row(tokenizer, name, f"service, {mean}", talks, airline))
            if not args.quick:
                talks = list(coding(args.data, words, random.Random(0)))
                rows.append(row(tokenizer, name, "coding", talks, [{"type": "function", "function": BASH}]))
            print(table(rows[-len(LENGTHS) - 1 :]), flush=True)
    if not args.quick:
        save("thinking", rows, service=SERVICE, coding=CODING, requests=REQUESTS, thought_share=THOUGHT_SHARE)


if __name__ == "__main__":
    main()
