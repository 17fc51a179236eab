"""Recorded conversations of agents, in OpenAI's format, and how clients change answers before they send them back."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any

Message = dict[str, Any]
CORPORA = ("tau_bench", "tau2_bench", "lmcache_agent_trace", "mint_bench")
_FILES = {
    "tau_bench": "gpt4o_airline_trajectories.jsonl.gz",
    "tau2_bench": "gpt-4.1_retail_default_gpt-4.1_1trials.jsonl.gz",
    "mint_bench": "conversations.jsonl.gz",
}


def chats(shared_data: Path, name: str, rows: int | None = None) -> Iterator[list[Message]]:
    """Conversations of one of CORPORA, all or those in the first `rows` lines of each file. Each message of the
    assistant is one call of a model."""
    folder = shared_data / name
    if name == "lmcache_agent_trace":
        for path in sorted(folder.glob("*.jsonl.gz")):
            yield from _flattened(islice(_rows(path), rows))
        return
    for row in islice(_rows(folder / _FILES[name]), rows):
        yield _openai_form(row["messages"])


def _rows(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        yield from map(json.loads, lines)


def _openai_form(chat: list[Message]) -> list[Message]:
    """Messages in OpenAI's format, with call ids of nine characters, which Mistral's templates require. A greeting at
    the start, which is not from a model, is left out."""
    found, pending = [], []
    if chat[1]["role"] == "assistant" and chat[0]["role"] == "system":
        chat = chat[:1] + chat[2:]
    for message in chat:
        message = {key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)}
        if message["role"] == "tool":
            message["tool_call_id"] = pending.pop(0)
        if message.get("tool_calls"):
            calls = [call.get("function", call) | {"id": call["id"][-9:]} for call in message["tool_calls"]]
            message["tool_calls"] = [_call(call["id"], call["name"], call["arguments"]) for call in calls]
            pending = [call["id"] for call in calls]
        found.append({"content": None if message["role"] == "assistant" else ""} | message)
    return found


def _call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _flattened(calls: Iterator[dict[str, Any]]) -> Iterator[list[Message]]:
    """Convert sessions of growing prompts to conversations: what a prompt adds to the one before is a user's
    message."""
    for _, session in groupby(calls, key=lambda row: row["session_id"]):
        chat: list[Message] = []
        seen = ""
        for row in session:
            grows = row["input"].startswith(seen) and len(row["input"]) > len(seen)
            if not grows and chat:
                yield chat
                chat = []
            chat.append({"role": "user", "content": row["input"][len(seen) if grows else 0 :]})
            chat.append({"role": "assistant", "content": row["output"] or "-"})
            seen = row["input"]
        yield chat


def client_echo(message: Message, rng: random.Random) -> Message:
    """A message as a client may send it back: JSON formatted differently, content as text or as a list of parts."""
    message = copy.deepcopy(message)
    for call in message.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        pairs = list(arguments.items())
        rng.shuffle(pairs)
        call["function"]["arguments"] = json.dumps(dict(pairs), indent=rng.choice((None, 1)))
    if isinstance(message.get("content"), str) and message["content"]:
        message["content"] = rng.choice((message["content"], [{"type": "text", "text": message["content"]}]))
    return message
