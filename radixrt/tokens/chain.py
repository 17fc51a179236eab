"""Keys of conversations: hashes of chains of messages, in a normal form that survives what clients change when they
send messages back."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from radixrt.messages import ChatPrompt, Namespace
from radixrt.tokens.rewriting import REASONING_KEYS, is_parsed
from radixrt.tokens.turns import Steps, finished

Message = dict[str, Any]
Key = bytes

MAX_BRACES = 200
"""The most braces of a text that are tried as the beginning of JSON: otherwise a text of braces would take quadratic
time."""

STEP_MESSAGES = 512
"""Messages that are hashed in a step."""

_to_json = msgspec.json.Encoder(order="sorted").encode
_WHITE_SPACE = re.compile(r"\s+")


def keys_of(namespace: Namespace, prompt: ChatPrompt) -> list[Key]:
    """The keys of a chat's prefixes of 0, 1, 2, ... all messages. Chats with the same key are the same conversation."""
    return finished(keys_in_steps(namespace, prompt))


def keys_in_steps(namespace: Namespace, prompt: ChatPrompt) -> Steps[list[Key]]:
    """`keys_of` in steps."""
    key = _hashed(b"", _to_json([namespace.key, prompt.tools, prompt.template_args]))
    keys = [key]
    for at in range(0, len(prompt.messages), STEP_MESSAGES):
        if at:
            yield None
        for message in prompt.messages[at : at + STEP_MESSAGES]:
            keys.append(key := next_key(key, message))
    return keys


def next_key(key: Key, message: Message) -> Key:
    """The key of a chain with one more message. White space around an assistant's text and thinking are ignored."""
    if message["role"] != "assistant":
        more = {name: value for name, value in message.items() if value is not None and name != "content"}
        return _hashed(key, _to_json([_text(message), more]))
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    return _hashed(key, _to_json([_text(message).strip(), calls]))


def reasoning_of(message: Message) -> str | None:
    """The thinking in a message; None if it has none."""
    found = next((message[name] for name in REASONING_KEYS if isinstance(message.get(name), str)), None)
    return found.strip() if found else None


def _hashed(key: Key, data: bytes) -> Key:
    return blake2b(key + data, digest_size=16).digest()


def _text(message: Message) -> str:
    """The content as text: parts joined, "" if there is none. Parts that are not text become JSON."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part.get("type") == "text" else _to_json(part).decode() for part in content)


def _call(call: Any) -> Any:
    """A tool call without fields that clients add, its arguments parsed."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return [call.get("id"), function.get("name"), arguments_of(function.get("arguments"))]


def arguments_of(arguments: Any) -> Any:
    """The arguments of a call in a normal form: what they say as JSON or, if they are none, their text."""
    if not isinstance(arguments, str):
        return _plain_numbers(arguments) if arguments is not None else {}
    if not is_parsed(arguments):
        return arguments.strip()
    try:
        value = json.loads(arguments, parse_float=_number) if arguments.strip() else {}
        if "\\u" in arguments:
            _to_json(value)  # raises UnicodeEncodeError for lone surrogates
    except (ValueError, RecursionError):
        return arguments.strip()
    return value


def _number(text: str) -> float | int:
    """Parse a number; 1.0 becomes 1, since JavaScript writes it so."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _plain_numbers(value: Any) -> Any:
    return json.loads(json.dumps(value), parse_float=_number)


# ---------------------------------------------------------------- texts


_decoder = json.JSONDecoder(parse_float=_number)


def bare(text: str, call_ids: Sequence[str] = ()) -> str:
    """A text without white space, with JSON objects in a normal form. `id`s in these that are in `call_ids` are left
    out."""
    out, at = [], 0
    for _ in range(MAX_BRACES):
        brace = text.find("{", at)
        if brace < 0:
            break
        out.append(_WHITE_SPACE.sub("", text[at:brace]))
        try:
            value, end = _decoder.raw_decode(text, brace)
            if value.get("id") in call_ids:
                del value["id"]
            out.append(json.dumps(value, sort_keys=True))
            at = end
        except (ValueError, RecursionError):
            out.append("{")
            at = brace + 1
    out.append(_WHITE_SPACE.sub("", text[at:]))
    return "".join(out)
