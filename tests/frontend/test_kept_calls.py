"""Calls that a client rewrites before it sends them back, as Claude Code does: in all APIs, with real templates."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import pytest

from radixrt.tokens.chain import ISSUED_ID
from tests.frontend.scripted import Model, make_chat, scripted_chat

Given = dict[str, Any]
EDIT = {"file_path": "/w/a.py", "old_string": "dog", "new_string": "fox"}
BASH = {"command": "cd /w && ls", "description": "List"}
SCHEMAS = {
    "Edit": {"type": "object", "properties": {name: {"type": "string"} for name in EDIT}},
    "Bash": {"type": "object", "properties": {name: {"type": "string"} for name in BASH}},
}
TURNS = [("Edit", EDIT, EDIT | {"replace_all": False}), ("Bash", BASH, BASH | {"command": "ls"})]
"""(name, arguments as generated, arguments as they come back)."""


def as_coder(name: str, arguments: Given) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"I call it.\n<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def as_glm(name: str, arguments: Given) -> str:
    pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    return f"\n<think>I call it.</think>\n<tool_call>{name}\n{pairs}</tool_call><|observation|>"


def as_mistral(name: str, arguments: Given) -> str:
    return f'[TOOL_CALLS][{{"name": "{name}", "arguments": {json.dumps(arguments)}}}]'


GLM_MARKS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
MISTRAL_MARKS = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]")
SERVERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[str, Given], str]]] = {
    "Qwen3-Coder": ((), (), as_coder),
    "GLM-4.6": (GLM_MARKS, ("<|observation|>",), as_glm),
    "mistralai-Mistral-Nemo-Instruct-2407": (MISTRAL_MARKS, (), as_mistral),
}
"""By the name of a published template: (special tokens, those that end an answer, how a call is written)."""


class Server:
    def __init__(self, model: Model, name: str, keeps: bool) -> None:
        self.model, self.keeps, self.write = model, keeps, SERVERS[name][2]

    def says(self, name: str, arguments: Given) -> None:
        """The model will call a tool, in tokens that no encoding of the text gives."""
        text, encode = self.write(name, arguments), self.model.tokenizer.encode
        cut = text.index("{") if "{" in text else text.index("<t")  # behind any special token but the last
        odd = [i for at in range(cut, cut + 60, 3) for i in encode(text[at : at + 3], False)]
        self.model.script.texts = deque([encode(text[:cut], False) + odd + encode(text[cut + 60 :], False)])

    def check(self, cached: int, turn: int, session: Given) -> None:
        """After `turn` answers: what is cached, and what the prompt shows."""
        request, _, _, ids = self.model.answers[-2]
        before = np.frombuffer(request.prompt.ids, "<i4").size + len(ids) - 1
        shown = self.model.tokenizer.decode(np.frombuffer(self.model.answers[-1][0].prompt.ids, "<i4").tolist(), False)
        assert (cached == before) == self.keeps
        assert session["kept_turns"] == turn if self.keeps else not session
        assert ("replace_all" in shown) != self.keeps
        assert turn < 2 or ("cd /w && ls" in shown) == self.keeps


@pytest.fixture(
    scope="module",
    params=[(name, True) for name in SERVERS] + [("Qwen3-Coder", False)],
    ids=lambda param: f"{param[0]}-{'kept' if param[1] else 'as the client says'}",
)
def server(request, shared_data: Path, tmp_path_factory) -> Iterator[Server]:
    name, keeps = request.param
    source = (shared_data / "chat_templates" / f"{name}.jinja").read_text()
    folder = make_chat(tmp_path_factory.mktemp("model"), source, SERVERS[name][0])
    with scripted_chat(folder, SERVERS[name][1], keep_generated_calls=keeps) as model:
        yield Server(model, name, keeps)


def test_chat(server: Server) -> None:
    create = server.model.client.chat.completions.create
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]
    messages: list[Any] = [{"role": "user", "content": "Do it in a chat."}]
    for turn, (name, generated, client) in enumerate([*TURNS, TURNS[0]]):
        server.says(name, generated)
        answer = create(model="m", messages=messages, tools=tools)
        if turn:
            cached = answer.usage.prompt_tokens_details.cached_tokens
            server.check(cached, turn, answer.model_extra["radixrt"].get("session"))
        message = answer.choices[0].message.model_dump(exclude_none=True)
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == generated and ISSUED_ID.fullmatch(call["id"])
        call["function"]["arguments"] = json.dumps(client)
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "done"}]


def test_messages(server: Server) -> None:
    tools = [{"name": name, "input_schema": SCHEMAS[name]} for name in SCHEMAS]
    messages: list[Any] = [{"role": "user", "content": "Do it in messages."}]
    with anthropic.Anthropic(base_url=server.model.url, api_key="any", max_retries=0) as client:
        for turn, (name, generated, rewritten) in enumerate([*TURNS, TURNS[0]]):
            server.says(name, generated)
            answer = client.messages.create(
                model="m", max_tokens=2048, messages=messages, tools=tools,
                thinking={"type": "enabled", "budget_tokens": 1024},
            )  # fmt: skip
            if turn:
                session = answer.model_extra["radixrt"].get("session")
                server.check(answer.usage.cache_read_input_tokens, turn, session)
            content = [block.model_dump(exclude_none=True) for block in answer.content]
            assert content[-1]["input"] == generated
            content[-1]["input"] = rewritten
            result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "done"}
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]


def test_responses(server: Server) -> None:
    create = server.model.client.responses.create
    tools: list[Any] = [{"type": "function", "name": name, "parameters": SCHEMAS[name]} for name in SCHEMAS]
    items: list[Any] = [{"role": "user", "content": "Do it in responses."}]
    for turn, (name, generated, client) in enumerate([*TURNS, TURNS[0]]):
        server.says(name, generated)
        answer = create(model="m", input=items, tools=tools, store=False)
        if turn:
            session = answer.model_extra["radixrt"].get("session")
            server.check(answer.usage.input_tokens_details.cached_tokens, turn, session)
        output = [item.model_dump(exclude_none=True) for item in answer.output]
        assert json.loads(output[-1]["arguments"]) == generated
        output[-1]["arguments"] = json.dumps(client)
        items += [*output, {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "done"}]
