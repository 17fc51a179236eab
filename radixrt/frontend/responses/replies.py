"""Formats an answer as output items of the Responses API, whole or as the events of a stream. Pure."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from radixrt.formats.parsing import CallArguments, CallStart, Content, Piece
from radixrt.frontend.generate.logprobs import Tokens, token_json
from radixrt.frontend.generate.reasoning import reasoning_tokens
from radixrt.frontend.generate.reply import BaseReply
from radixrt.frontend.http.codec import encode
from radixrt.frontend.responses.references import RESPONSE, item_id
from radixrt.frontend.responses.schema import Create
from radixrt.frontend.responses.tools import without_hosted
from radixrt.messages import TokenLogprob, Usage
from radixrt.tokens import Tokenizer

Event = dict[str, Any]
Seal = Callable[[str], str]
"""Returns the `encrypted_content` of a reasoning text."""
_IDS = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
    "tool_search_call": "tsc_",
}


class Item:
    """An output item that is being generated: a message, reasoning, or a call of the tool that the client calls
    `called`."""

    def __init__(
        self,
        response_id: str,
        kind: str,
        index: int,
        call: CallStart | None = None,
        called: dict[str, str] | None = None,
        seal: Seal | None = None,
    ) -> None:
        self.id = item_id(_IDS[kind], response_id, index)
        self.kind = kind
        self.index = index
        self.text = ""
        self._call = call
        self._seal = seal
        self._called = called or ({"name": call.name} if call else {})
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Add text, and a message's log-probabilities if these are reported; returns the events. The input of a custom
        tool and a search are sent only when they are complete."""
        self._texts.append(text)
        self._logprobs += logprobs
        if self.kind in ("custom_tool_call", "tool_search_call"):
            return []
        names = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
        more = {"logprobs": logprobs} if self.kind == "message" else {}
        return [self._event(f"response.{names[self.kind]}.delta", {"delta": text} | more)]

    def opening(self) -> list[Event]:
        """The events before any text."""
        added = {"type": "response.output_item.added", "output_index": self.index, "item": self.json("in_progress")}
        if self._call is not None:
            return [added]
        return [added, self._event("response.content_part.added", {"part": self._part()})]

    def closing(self, status: str) -> list[Event]:
        """The events after its text."""
        self.text = "".join(self._texts)
        done = {"type": "response.output_item.done", "output_index": self.index, "item": self.json(status)}
        if self.kind == "custom_tool_call":
            given = custom_input(self.text)
            return [
                self._event("response.custom_tool_call_input.delta", {"delta": given}),
                self._event("response.custom_tool_call_input.done", {"input": given}),
                done,
            ]
        if self.kind == "tool_search_call":
            return [done]
        if self._call is not None:
            whole = {"name": self._called["name"], "arguments": self.text}
            return [self._event("response.function_call_arguments.done", whole), done]
        part = self._event("response.content_part.done", {"part": self._part()})
        if self.kind == "reasoning":
            return [self._event("response.reasoning_text.done", {"text": self.text}), part, done]
        said = {"text": self.text, "logprobs": self._logprobs}
        return [self._event("response.output_text.done", said), part, done]

    def json(self, status: str) -> dict[str, Any]:
        """The item as JSON; it has its text once it is closed."""
        about = {"id": self.id, "type": self.kind, "status": status}
        if self._call is not None:
            return about | {"call_id": self._call.id} | self._called | given_to(self.kind, self.text)
        content = [self._part()] if status != "in_progress" else []
        if self.kind == "reasoning":
            sealed = {"encrypted_content": self._seal(self.text)} if self._seal and content else {}
            return about | {"summary": [], "content": content} | sealed
        return about | {"role": "assistant", "content": content}

    def _part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": [*self._logprobs]}

    def _event(self, kind: str, more: dict[str, Any]) -> Event:
        place = {} if self._call is not None else {"content_index": 0}
        return {"type": kind, "item_id": self.id, "output_index": self.index} | place | more


def given_to(kind: str, arguments: str) -> dict[str, Any]:
    """What a call of this kind gives to its tool, from the arguments that the model wrote."""
    match kind:
        case "custom_tool_call":
            return {"input": custom_input(arguments)}
        case "tool_search_call":
            return {"arguments": _object(arguments)}
    return {"arguments": arguments}


def _object(arguments: str) -> dict[str, Any] | str:
    """The arguments of a search as an object; unchanged if they are incomplete."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return arguments


def custom_input(arguments: str) -> str:
    """The input of a custom tool from the arguments that the model wrote; these unchanged if they are incomplete."""
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any]).get("input")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return arguments
    return given if isinstance(given, str) else arguments


class ResponseReply(BaseReply):
    """Formats one response, with its items in order."""

    def __init__(self, model: str, tokenizer: Tokenizer | None, asked: Create, seal: Seal | None = None) -> None:
        super().__init__(model, tokenizer)
        self.id = RESPONSE + uuid.uuid4().hex
        self.asked = asked
        self._seal = seal
        self._created = int(time.time())
        self._items: list[Item] = []
        self._done: list[dict[str, Any]] = []
        self._sequence = 0
        self._tokens = Tokens(tokenizer, tokenizer.special_ids if tokenizer else frozenset())

    # ------------------------------------------------------------ pieces

    def add(self, pieces: Sequence[Piece], logprobs: Sequence[TokenLogprob] = ()) -> list[Event]:
        """Add pieces, with their tokens' log-probabilities if these are reported (not those of reasoning, calls and
        marks). Returns the events."""
        self._tokens.add(logprobs)
        return [event for piece in pieces for event in self._add(piece)]

    def _add(self, piece: Piece) -> list[Event]:
        if isinstance(piece, CallStart):
            return self._open(self.asked.kinds.get(piece.name, "function_call"), piece)
        told = [token_json(self._tokenizer, one) for one in self._tokens.take(piece.text)]
        if isinstance(piece, CallArguments):
            return self._items[-1].add(piece.text)
        kind = "message" if isinstance(piece, Content) else "reasoning"
        opening = [] if self._items and self._items[-1].kind == kind else self._open(kind)
        return opening + self._items[-1].add(piece.text, told)

    def _open(self, kind: str, call: CallStart | None = None) -> list[Event]:
        closing = self._close("completed")
        called = self.asked.called.get(call.name) if call else None
        self._items.append(Item(self.id, kind, len(self._items), call, called, self._seal))
        return closing + self._items[-1].opening()

    def _close(self, status: str) -> list[Event]:
        if len(self._done) == len(self._items):
            return []
        events = self._items[-1].closing(status)
        self._done.append(self._items[-1].json(status))
        return events

    # ------------------------------------------------------------ the whole

    def opening(self, index: int, prompt_ids: bytes | None) -> bytes:
        """The first events."""
        response = self.body("in_progress", None)
        return self.events(
            {"type": "response.created", "response": response}, {"type": "response.in_progress", "response": response}
        )

    def finish(self, full: bool, usage: Usage, ids: bytes) -> tuple[list[Event], dict[str, Any]]:
        """Returns (the last events, the response). `full`: whether it ended by length; `ids`: all generated ids."""
        status = "incomplete" if full else "completed"
        closing = self._close(status)
        response = self.body(status, self.usage(usage, ids)) | {"radixrt": self.about(usage)}
        return [*closing, {"type": f"response.{status}", "response": response}], response

    def error(self, code: str | None, message: str, param: str | None) -> bytes:
        """The event of an error after the stream has begun."""
        return self.events({"type": "error", "code": code, "message": message, "param": param})

    def events(self, *events: Event) -> bytes:
        """Number and serialize events."""
        out = []
        for event in events:
            data = encode(event | {"sequence_number": self._sequence})
            self._sequence += 1
            out.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data))
        return b"".join(out)

    def body(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        """The response in its present state."""
        body = self.asked
        reasoning = body.reasoning or {}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": list(self._done),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
            "store": body.stores,
            "temperature": body.sampled.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": without_hosted(body.tools or []),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.sampled.top_p,
            "truncation": body.truncation or "disabled",
            "usage": usage,
            "user": body.user,
        }

    def usage(self, usage: Usage, ids: bytes) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._thought(ids)},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _thought(self, ids: bytes) -> int:
        """The number of reasoning tokens."""
        thoughts = [item.text for item in self._items if item.kind == "reasoning"]
        return reasoning_tokens(self._tokenizer, thoughts, ids)
