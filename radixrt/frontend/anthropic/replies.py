"""Formats an answer as Anthropic's JSON: content blocks, whole or as the events of a stream. Pure."""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import Sequence
from typing import Any

from radixrt.formats.parsing import CallArguments, CallStart, Content, Piece
from radixrt.frontend.anthropic.tools import shown_id
from radixrt.frontend.generate.arguments import arguments_object
from radixrt.frontend.generate.reply import BaseReply
from radixrt.frontend.http.anthropic_errors import REQUEST_ID, new_request_id
from radixrt.frontend.http.codec import encode
from radixrt.messages import Usage
from radixrt.tokens import Tokenizer

HOUR = 3600.0
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
_ARGUMENTS = ("input_json_delta", "partial_json")


def event(data: dict[str, Any]) -> bytes:
    """An event of a stream; its name is its type."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), encode(data))


class Block:
    """A content block that is being generated."""

    __slots__ = ("_texts", "call", "kind")

    def __init__(self, kind: str, call: CallStart | None = None) -> None:
        self.kind = kind
        self.call = call
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        self._texts.append(text)

    @property
    def signature(self) -> str:
        """The signature of a thinking block, which clients send back with it. It is not checked here."""
        return base64.b64encode(hashlib.sha256("".join(self._texts).encode()).digest()).decode()

    def opening(self) -> dict[str, Any]:
        """The empty block, for the event that begins it."""
        if self.call is not None:
            return {"type": "tool_use", "id": shown_id(self.call.id), "name": self.call.name, "input": {}}
        return {"type": self.kind, self.kind: ""} | ({"signature": ""} if self.kind == "thinking" else {})

    def whole(self) -> dict[str, Any]:
        text = "".join(self._texts)
        if self.call is not None:
            return self.opening() | {"input": arguments_object(text)}
        return self.opening() | {self.kind: text} | ({"signature": self.signature} if self.kind == "thinking" else {})


class MessageReply(BaseReply):
    """Formats one message, with its blocks in order. `breakpoints`: (tokens, seconds), shortest first."""

    def __init__(self, model: str, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(model, tokenizer)
        self.id = f"msg_{uuid.uuid4().hex[:24]}"
        self.blocks: list[Block] = []
        self.breakpoints: Sequence[tuple[int, float]] = ()
        self.prompt_tokens = 0

    @property
    def headers(self) -> dict[str, str]:
        return super().headers | {REQUEST_ID: new_request_id()}

    def body(self, stop_reason: str, stop_sequence: str | None, usage: Usage, thinking: int) -> bytes:
        """The whole answer; `thinking` is its number of reasoning tokens."""
        content = [block.whole() for block in self.blocks]
        end = {"stop_reason": stop_reason, "stop_sequence": stop_sequence, "usage": self.usage(usage, thinking)}
        return encode(self._message(content, end) | {"radixrt": self.about(usage)})

    def _message(self, content: list[dict[str, Any]], end: dict[str, Any]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content} | end

    # ------------------------------------------------------------ pieces

    def add(self, piece: Piece) -> list[dict[str, Any]]:
        """Add a piece; returns its events for a stream."""
        match piece:
            case CallStart():
                return self._open("tool_use", piece)
            case CallArguments(text=text):
                return self._grow(text, _ARGUMENTS)
        kind = "text" if isinstance(piece, Content) else "thinking"
        opening = [] if self.blocks and self.blocks[-1].kind == kind else self._open(kind)
        return opening + self._grow(piece.text, _DELTAS[kind])

    def _open(self, kind: str, call: CallStart | None = None) -> list[dict[str, Any]]:
        closing = self._close()
        self.blocks.append(Block(kind, call))
        start = {"type": "content_block_start", "index": self._index, "content_block": self.blocks[-1].opening()}
        return [*closing, start]

    def _grow(self, text: str, names: tuple[str, str]) -> list[dict[str, Any]]:
        self.blocks[-1].add(text)
        return [self._delta({"type": names[0], names[1]: text})]

    def _close(self) -> list[dict[str, Any]]:
        if not self.blocks:
            return []
        last = self.blocks[-1]
        signed = [self._delta({"type": "signature_delta", "signature": last.signature})]
        return (signed if last.kind == "thinking" else []) + [{"type": "content_block_stop", "index": self._index}]

    @property
    def _index(self) -> int:
        return len(self.blocks) - 1

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    # ------------------------------------------------------------ a stream

    def opening(self, index: int, prompt_ids: bytes | None) -> bytes:
        """The first events. The cached tokens are not known yet: the last event but one has them."""
        usage = self.usage(Usage(self.prompt_tokens), 0, known=False)
        message = self._message([], {"stop_reason": None, "stop_sequence": None, "usage": usage})
        return event({"type": "message_start", "message": message}) + event({"type": "ping"})

    def end(self, stop_reason: str, stop_sequence: str | None, usage: Usage, thinking: int) -> bytes:
        """The last events."""
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        last = {"type": "message_delta", "delta": delta, "usage": self.usage(usage, thinking)}
        last["radixrt"] = self.about(usage)
        return b"".join(map(event, [*self._close(), last, {"type": "message_stop"}]))

    # ------------------------------------------------------------ usage

    def usage(self, usage: Usage, thinking: int, known: bool = True) -> dict[str, Any]:
        """The usage. Prompt tokens = tokens read from the cache + tokens newly cached up to the last breakpoint +
        others."""
        read, new = usage.cached_tokens, {"5m": 0, "1h": 0}
        end = read
        for tokens, seconds in self.breakpoints if known else ():
            if tokens > end:
                new["1h" if seconds >= HOUR else "5m"] += tokens - end
                end = tokens
        return {
            "input_tokens": usage.prompt_tokens - end,
            "cache_creation_input_tokens": end - read,
            "cache_read_input_tokens": read,
            "cache_creation": {f"ephemeral_{ttl}_input_tokens": tokens for ttl, tokens in new.items()},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": thinking},
            "service_tier": "standard",
        }
