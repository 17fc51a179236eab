"""Histories as agents send them, in OpenAI's form, and the same in each API."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

Message = dict[str, Any]
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "run",
        "parameters": {"type": "object", "properties": {"command": {"type": "string", "description": "what"}}},
    },
}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
MOVES = {
    "Qwen-Qwen3-0.6B": "it closes an empty thought before the last answer",
    "Qwen3.5-4B": "it drops thoughts before the last question",
    "mistralai-Mistral-Nemo-Instruct-2407": "it shows tools before the last question",
    "openai-gpt-oss-120b": "it drops what was said beside calls before an answer",
}
"""Published templates with which the text of a chat changes when it goes on, whatever its messages."""


def said(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def call(call_id: str = "call_0123456789", arguments: Any = '{"command": "ls"}', content: Any = None) -> Message:
    function = {"name": "bash", "arguments": arguments}
    return said("assistant", content, tool_calls=[{"id": call_id, "type": "function", "function": function}])


def result(text: Any, call_id: str = "call_0123456789") -> Message:
    return said("tool", text, tool_call_id=call_id)


def words(messages: list[Message]) -> list[str]:
    """The texts of messages, in order."""
    contents = [message.get("content") or [] for message in messages]
    parts = [[content] if isinstance(content, str) else content for content in contents]
    return [text for some in parts for part in some if (text := part if isinstance(part, str) else part.get("text"))]


class History(NamedTuple):
    messages: list[Message]
    tools: list[Any] | None = None

    def later(self) -> History:
        """One turn later."""
        answered = self.messages[-1]["role"] == "assistant"
        turn = [] if answered else [said("assistant", "later1")]
        return History([*self.messages, *turn, said("user", "later2")], self.tools)


def tool(**changes: Any) -> dict[str, Any]:
    function = {"name": "bash", **changes}
    return {"type": "function", "function": {key: value for key, value in function.items() if value != "left out"}}


def called(*between: Message, **fields: Any) -> History:
    """A call, and its result."""
    return History([said("user", "one1"), *between, call(**fields), result("two2")], [BASH])


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}}
SEEN = "[image: this model reads text only]"
BESIDE = "beside3"
"""What an answer says beside its call, or before it in a message that some APIs merge: gpt-oss' template drops it."""
HISTORIES: dict[str, History] = {
    "two system messages": History([said("system", "one1"), said("system", "two2"), said("user", "three3")]),
    "a system and a developer's message": History(
        [said("system", "one1"), said("developer", "two2"), said("user", "three3")]
    ),
    "a developer's message": History([said("developer", "one1"), said("user", "two2")]),
    "a system message in the middle": History(
        [said("user", "one1"), said("assistant", "two2"), said("system", "three3"), said("user", "four4")]
    ),
    "a system message last": History([said("system", "one1"), said("user", "two2"), said("system", "three3")]),
    "a system message before an answer": History(
        [said("system", "one1"), said("assistant", "two2"), said("user", "three3")]
    ),
    "a system message after a tool's result": History([*called().messages, said("system", "three3")], [BASH]),
    "a user's message after a tool's result": History([*called().messages, said("user", "three3")], [BASH]),
    "two user's messages": History([said("user", "one1"), said("user", "two2")]),
    "two answers": History(
        [said("user", "one1"), said("assistant", "two2"), said("assistant", "three3"), said("user", "four4")]
    ),
    "an answer first": History([said("assistant", "one1"), said("user", "two2")]),
    "an answer last": History([said("user", "one1"), said("assistant", "two2")]),
    "an answer without content": History([said("user", "one1"), {"role": "assistant"}, said("user", "two2")]),
    "an empty answer": History([said("user", "one1"), said("assistant", ""), said("user", "two2")]),
    "an empty user's message": History([said("user", "one1"), said("assistant", "two2"), said("user", "")]),
    "texts in parts": History(
        [
            said(role, [{"type": "text", "text": f"{role}1"}, {"type": "text", "text": f"{role}2"}])
            for role in ("system", "user", "assistant", "user")
        ]
    ),
    "messages of no parts": History([said("user", []), said("assistant", []), said("user", "one1")]),
    "text beside a call": called(content=BESIDE),
    "a call after an answer": called(said("assistant", BESIDE)),
    "a call without its result": History([said("user", "one1"), call(), said("user", "two2")], [BASH]),
    "a result without its call": History([said("user", "one1"), result("two2")], [BASH]),
    "calls without the request's tools": History(called().messages),
    "another server's ids of calls": History(
        [said("user", "one1"), call("toolu_01ABCDEFGHIJKLMNOPQR"), result("two2", "toolu_01ABCDEFGHIJKLMNOPQR")], [BASH]
    ),
    "arguments that were cut": called(arguments='{"command": "ls'),
    "arguments null, as text": called(arguments="null"),
    "arguments null": called(arguments=None),
    "arguments that are a list": called(arguments="[1, 2]"),
    "arguments that are a text": called(arguments='"ls"'),
    "arguments that are an object already": called(arguments={"command": "ls"}),
    "arguments that are empty": called(arguments=""),
    "an image in a tool's result": History([*called().messages[:-1], result([IMAGE])], [BASH]),
    "an image that a user asks about": History([said("user", [{"type": "text", "text": "one1"}, IMAGE])]),
    "a tool without a description": History([said("user", "one1")], [tool(parameters=COMMAND)]),
    "a tool without parameters": History([said("user", "one1")], [tool(description="run")]),
    "a tool whose parameters are null": History([said("user", "one1")], [tool(description=None, parameters=None)]),
}
"""By their kinds. Each text is unique."""
REFUSED: dict[str, tuple[str, ...]] = {
    "an image that a user asks about": ("Chat", "Responses", "Messages", "Ollama", "native"),
    "an image in a tool's result": ("native",),
    "an empty user's message": ("Messages",),
    "messages of no parts": ("Messages",),
    "a call without its result": ("Messages",),
    "a result without its call": ("Chat", "Responses", "Messages", "Ollama"),
}
"""The APIs that refuse a kind, with an error (400) that names the message, whatever the template."""
TEMPLATES_REFUSE = {"a result without its call": ("MiniMax-M2", "google-gemma-4-31B-it", "openai-gpt-oss-120b")}
"""The templates that refuse a kind where the API does not; so does the error."""


# ---------------------------------------------------------------- APIs


class Api(NamedTuple):
    path: str
    body: Callable[[History], dict[str, Any] | None]
    """Of a request with a history; None if the API cannot express it."""
    names: str
    """A pattern of the fields by which errors name a message."""


def chat_body(history: History) -> dict[str, Any]:
    return {"messages": history.messages, "tools": history.tools, "max_tokens": 1}


def native_body(history: History) -> dict[str, Any]:
    prompt = {"type": "chat", "messages": history.messages, "tools": history.tools}
    return {"type": "generate", "id": 1, "prompt": prompt, "sampling": {"max_tokens": 1}}


def messages_body(history: History) -> dict[str, Any]:
    """Anthropic's: instructions at the start are `system`, results are blocks of a user's message."""
    messages = history.messages
    first = list(itertools.takewhile(lambda message: message["role"] in ("system", "developer"), messages))
    body = {"model": "m", "max_tokens": 1, "messages": [_anthropic(message) for message in messages[len(first) :]]}
    if first:
        body["system"] = [{"type": "text", "text": text} for text in words(first)]
    if history.tools:
        functions = [one["function"] for one in history.tools]
        body["tools"] = [
            {{"parameters": "input_schema"}.get(key, key): value for key, value in function.items()}
            for function in functions
        ]
    return body


def _anthropic(message: Message) -> Message:
    content = message.get("content") or ""
    blocks = [_block(part) for part in content] if isinstance(content, list) else content
    if message["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": blocks}
        return said("user", [block])
    if message["role"] != "assistant":
        return said("system" if message["role"] == "developer" else message["role"], blocks)
    if not message.get("tool_calls"):
        return said("assistant", blocks)
    text = [{"type": "text", "text": content}] if content else []
    return said("assistant", text + [_tool_use(call) for call in message["tool_calls"]])


def _block(part: dict[str, Any]) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    return {"type": "image", "source": source} if part["type"] == "image_url" else part


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _parsed(function["arguments"])}


def _parsed(arguments: Any) -> Any:
    """Arguments as an object, if they are one."""
    try:
        found = json.loads(arguments)
    except (TypeError, ValueError):
        return arguments
    return found if isinstance(found, dict) else arguments


def responses_body(history: History) -> dict[str, Any]:
    """OpenAI's Responses: a system message at the start is `instructions`."""
    messages = history.messages
    body: dict[str, Any] = {"max_output_tokens": 1, "store": False}
    if messages[0]["role"] == "system" and isinstance(messages[0]["content"], str):
        body["instructions"], messages = messages[0]["content"], messages[1:]
    body["input"] = [item for message in messages for item in _items(message)]
    if history.tools:
        body["tools"] = [{"type": "function"} | one["function"] for one in history.tools]
    return body


def _items(message: Message) -> list[Message]:
    content = message.get("content") or ""
    if isinstance(content, list):
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        content = [
            {"type": "input_image", "image_url": part["image_url"]["url"]}
            if part["type"] == "image_url"
            else part | {"type": kind}
            for part in content
        ]
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": content}]
    calls = [
        {"type": "function_call", "call_id": call["id"], **call["function"]} for call in message.get("tool_calls") or ()
    ]
    return [{"type": "message", "role": message["role"], "content": content}] * (bool(content) or not calls) + calls


def ollama_body(history: History) -> dict[str, Any] | None:
    """Ollama's: no developers and no parts; arguments are objects, images stand beside the text."""
    messages = [_ollama(message) for message in history.messages]
    if None in messages:
        return None
    return {"model": "m", "messages": messages, "tools": history.tools, "stream": False}


def _ollama(message: Message) -> Message | None:
    content = message.get("content") or ""
    found = {"role": message["role"], "content": content}
    if isinstance(content, list):
        found |= {"content": "".join(words([message])), "images": ["aGk="]}
        if IMAGE not in content:
            return None
    if message["role"] == "tool":
        found["tool_name"] = "bash"
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [
            {"function": call["function"] | {"arguments": _parsed(call["function"]["arguments"])}} for call in calls
        ]
    return found if message["role"] != "developer" else None


APIS = {
    "Chat": Api("/v1/chat/completions", chat_body, r"messages\[\d+\]"),
    "Responses": Api("/v1/responses", responses_body, r"input\[\d+\]"),
    "Messages": Api("/v1/messages", messages_body, r"messages\.\d+"),
    "Ollama": Api("/api/chat", ollama_body, r"messages\[\d+\]"),
    "native": Api("/v1/native", native_body, r"messages\[\d+\]"),
}


def names_message(api: Api, error: str) -> bool:
    return bool(re.search(api.names, error))
