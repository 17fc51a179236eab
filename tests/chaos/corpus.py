"""Valid messages of each type, from which mutations start: written by hand, as clients and workers send them, and made
from the types, so that a new type of message is among them by itself."""

from __future__ import annotations

import random
import typing
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec import inspect

from radixrt import messages as m
from radixrt.wire import encode

Json = dict[str, Any]
MODEL = "nano"
CONSTRAINTS = b"grammar", b"response_format", b"regex", b'"tools"'
PINS = b"\xa3pin", b"cache_control", b"\xa5pause"
SCOPE = "scope-of-mutations"


def ids(*tokens: int) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()


def of_type(kind: inspect.Type, rng: random.Random, depth: int = 0) -> Any:
    """A value of a type, as `msgspec.inspect` describes it, in builtin types."""
    match kind:
        case inspect.StructType():
            values = {f.encode_name: of_type(f.type, rng, depth + 1) for f in kind.fields}
            if kind.array_like:
                return [*([kind.tag] if kind.tag is not None else []), *values.values()]
            return ({kind.tag_field: kind.tag} if kind.tag_field else {}) | values
        case inspect.UnionType():
            return of_type(rng.choice(kind.types), rng, depth)
        case inspect.ListType() | inspect.VarTupleType() | inspect.CollectionType():
            return [of_type(kind.item_type, rng, depth + 1) for _ in range(rng.randrange(3) if depth < 6 else 0)]
        case inspect.TupleType():
            return [of_type(item, rng, depth + 1) for item in kind.item_types]
        case inspect.EnumType():
            return rng.choice(list(kind.cls)).value
        case inspect.DictType():
            return {of_type(kind.key_type, rng, depth + 1): of_type(kind.value_type, rng, depth + 1)}
        case inspect.LiteralType():
            return rng.choice(kind.values)
        case inspect.IntType():
            return rng.choice([kind.ge or 0, 1, 2, 40, rng.randrange(2000)])
        case inspect.FloatType():
            return rng.choice([0.0, 0.5, 1.0, 3.25])
        case inspect.StrType():
            return rng.choice(["", "a", MODEL, "text of some words", SCOPE]) if not kind.min_length else SCOPE
        case inspect.BytesType():
            return ids(*(rng.randrange(3, 2000) for _ in range(rng.randrange(20))))
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.NoneType():
            return None
    return rng.choice([None, 5, "any", [1], {"a": 1}])


def of_union(union: Any, rng: random.Random, each: int, api_key: str = "") -> list[bytes]:
    """`each` messages of each type of a union."""
    found = []
    for kind in typing.get_args(union):
        for _ in range(each):
            value = of_type(inspect.type_info(kind), rng)
            if isinstance(value, dict) and "api_key" in value:
                value["api_key"] = api_key
            found.append(encode(value))
    return found


@dataclass(frozen=True, slots=True)
class Kinds:
    """What messages may be among those of clients."""

    grammars: bool = True
    """Some have a grammar. The first one takes a worker without a model seconds: it imports torch."""
    pins: bool = False
    """Some pin a prefix, for a time that mutations make as long as they like. Its pages are then not free."""

    def keep(self, message: bytes) -> bool:
        barred = (() if self.grammars else CONSTRAINTS) + (() if self.pins else PINS)
        return not any(word in message for word in barred)


def client_messages(api_key: str, rng: random.Random, kinds: Kinds) -> list[bytes]:
    """Messages on the client socket."""
    prompt = m.TokenPrompt(ids(*range(5, 40)))
    chat = m.ChatPrompt([{"role": "user", "content": "Hello, who are you?"}], [{"type": "function", "function": {}}])
    state = m.StatePrompt(
        SCOPE, 0, [m.MessageSegment("user", "Hi"), m.AssistantTurnStart(), m.TextSegment("So")], save=1
    )
    short = m.Sampling(max_tokens=6, temperature=0.7, top_p=0.9, seed=5, stop=("x",), logprobs=1, logit_bias={5: 1.0})
    json = m.Sampling(max_tokens=8, grammar=m.Grammar("json_schema", '{"type": "object"}'))
    parts = m.PartsPrompt([m.TextPrompt("a b"), prompt])
    key = {"api_key": api_key}
    hand = [
        m.Generate(id=1, prompt=prompt, sampling=short, model=MODEL, n=2, cache_salt="s", **key),
        m.Generate(id=1, prompt=prompt, sampling=m.Sampling(max_tokens=3), pin=[(10, 5.0)], **key),
        m.Generate(id=2, prompt=chat, sampling=m.Sampling(max_tokens=5), origin=m.Origin("p", "0.1", 1), **key),
        m.Generate(id=3, prompt=state, sampling=json, stream=False, **key),
        m.Generate(id=4, prompt=parts, sampling=m.Sampling(max_tokens=3, stop_token_ids=(5, 6)), text=False, **key),
        m.Generate(id=5, prompt=prompt, sampling=m.Sampling(max_tokens=2), prompt_logprobs=True, **key),
        m.Score(id=6, prompt=m.TextPrompt("The answer is"), choices=[m.TextPrompt("yes"), prompt], **key),
        m.Cancel(id=1, index=0, tokens=1),
        m.Tokenize(id=7, prompt=chat, **key),
        m.Detokenize(id=8, ids=ids(5, 6, 7), **key),
        m.Ask(id=9, what="report", **key),
        m.Ask(id=10, what="model", model=MODEL, **key),
        m.Fork(id=11, prompt=state, count=3, **key),
        m.Pause(id=12, scope=SCOPE, state=1, seconds=0.5, **key),
        m.Forget(id=13, scope=SCOPE, **key),
        m.Share(id=14, entries=[(b"key", b"value"), (b"other", None)], **key),
        m.Recall(id=15, keys=[b"key"], **key),
        m.ClearCache(id=16, **key),
        m.ChangeAdapter(id=17, name="adapter", path="/nowhere", **key),
    ]
    found = [encode(message) for message in hand] * 2 + of_union(m.ClientRequest, rng, 3, api_key)
    return [one for one in found if kinds.keep(one)]


def worker_messages(name: str, model: str, rng: random.Random, runs: list[int] | None = None) -> list[bytes]:
    """Messages on the worker socket, of a worker `name`. `runs`: ids of runs that it has."""
    load = m.Load(running=1, free_pages=900, evictable_pages=50, total_pages=1000, prefill_rate=1e4, step_seconds=0.01)
    runs = runs or [1, 2, 3]
    outputs = [m.Output(run, [5, 6], cached_tokens=2) for run in runs]
    ends = [m.Output(runs[0], [7], "length", 1, [m.TokenLogprob(7, -0.5, [(7, -0.5)])], scores=[-1.0])]
    events = [
        m.Stored("default\n\nnano", 1, 0, 0, 0, ids(*range(5, 25))),
        m.Stored("default\n\nnano", 2, 0, 1, 8, ids(*range(30, 45))),
        m.Removed(2, 3),
        m.Saved(1, 12, 12345),
        m.Dropped(1),
        m.Cleared(),
    ]
    hand = [
        m.Register(  # fmt: skip
            name=name,
            model=model,
            max_model_len=4096,
            page_size=1,
            total_pages=1000,
            max_running=8,
            pid=77,
            incarnation=99,
            vocab_size=2048,
            num_states=4,
            adapters=[m.Adapter("sql", 1, "/x")],
            max_loras=2,
        ),
        m.StepDone(outputs, load, seq=0, events=events[:2], number=1),
        m.StepDone(ends, load, seq=2, events=events[2:], number=2),
        m.StepDone([], load, seq=0, events=[m.Cleared(), events[0]], resync=True, number=3),
        m.StepDone([m.Output(runs[-1], error="it failed", finish="error")], load, seq=8, number=4),
        m.AdapterLoaded(m.Adapter("sql", 1, "/x"), "no such file"),
        m.Heartbeat(name, 77, 99),
        m.Leave(name, "it ends", 77, 99, planned=True),
    ]
    return [encode(message) for message in hand] * 2 + of_union(m.ToRouter, rng, 3)


def bodies(rng: random.Random, kinds: Kinds) -> list[tuple[str, bytes]]:
    """(Path, body) of POST requests."""
    says = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    says += [{"role": "user", "content": [{"type": "text", "text": "Go on"}]}]
    tool = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "weather", "description": "d", "parameters": tool}
    calls = [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]
    with_tool = [*says, {"role": "assistant", "content": None, "tool_calls": calls}]
    with_tool += [{"role": "tool", "tool_call_id": "call_1", "content": "sunny"}]
    short = {"model": MODEL, "max_tokens": 4}
    chat = "/v1/chat/completions"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": tool, "strict": True}}
    anthropic = {"name": "weather", "description": "d", "input_schema": tool}
    cache = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    found: list[tuple[str, Json]] = [
        (chat, short | {"messages": says, "temperature": 0.5, "top_p": 0.9, "seed": 3, "n": 2}),
        (chat, short | {"messages": with_tool, "tools": [{"type": "function", "function": function}]}),
        (chat, short | {"messages": says, "stream": True, "stream_options": {"include_usage": True}}),
        (chat, short | {"messages": says, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1}, "stop": ["q"]}),
        (chat, short | {"messages": says, "response_format": schema}),
        ("/v1/completions", short | {"prompt": "Once", "echo": True, "logprobs": 1}),
        ("/v1/completions", short | {"prompt": [[5, 6, 7], [8, 9]], "stream": True, "return_token_ids": True}),
        ("/v1/completions", short | {"prompt": [5, 6, 7], "bad_words": ["a"], "allowed_token_ids": [5, 6]}),
        ("/v1/completions", short | {"prompt": "x", "regex": "[a-c]{2,5}", "prompt_logprobs": 1}),
        ("/v1/responses", {"model": MODEL, "input": "Hello", "max_output_tokens": 16, "instructions": "Be brief"}),
        ("/v1/responses", {"model": MODEL, "input": says, "max_output_tokens": 16, "stream": True, "store": True}),
        ("/v1/responses/input_tokens", {"model": MODEL, "input": "Hello"}),
        ("/v1/messages", short | {"messages": says, "system": "Be brief", "stop_sequences": ["q"], "top_k": 5}),
        ("/v1/messages", short | {"messages": says, "tools": [anthropic], "tool_choice": {"type": "auto"}}),
        (
            "/v1/messages",
            short | {"messages": says, "system": [{"type": "text", "text": "Be", "cache_control": cache}]},
        ),
        ("/v1/messages", short | {"messages": says, "stream": True, "thinking": {"type": "disabled"}}),
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": says}),
        ("/api/chat", {"model": MODEL, "messages": says, "options": {"num_predict": 16, "stop": ["q"]}, "think": True}),
        ("/api/generate", {"model": MODEL, "prompt": "Once", "format": "json", "options": {"num_predict": 16}}),
        ("/api/show", {"model": MODEL}),
        ("/tokenize", {"model": MODEL, "prompt": "Hello"}),
        ("/tokenize", {"model": MODEL, "messages": says}),
        ("/detokenize", {"model": MODEL, "tokens": [5, 6, 7]}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"}),
        ("/v1/unload_lora_adapter", {"lora_name": "x"}),
        ("/reset_prefix_cache", {}),
    ]
    plain = [(path, msgspec.json.encode(body)) for path, body in found]
    plain = [(path, body) for path, body in plain if kinds.keep(body)]
    unpacked = [msgspec.msgpack.decode(one, strict=False) for one in client_messages("", rng, kinds)]
    return plain * 3 + [("/v1/native", msgspec.json.encode(one)) for one in unpacked]


PATHS = (
    "/v1/models", f"/v1/models/{MODEL}", "/v1/report", "/metrics", "/health", "/ping", "/version", "/api/tags", "/",
    "/v1/responses/resp_1", "/v1/responses/resp_1/input_items?limit=2&after=x", "/openapi.json", "/v1/%ff%00/..//a",
)  # fmt: skip
"""Paths of GET requests."""
