"""Formats answers as OpenAI's JSON: whole answers, and the chunks of a stream. Pure.

A chunk is assembled from bytes that are made once per request and the text: its cost is paid for every token.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import Any, Literal

from radixrt.formats.message import AssistantMessage
from radixrt.formats.parsing import CallArguments, CallStart, Content, Piece, Reasoning
from radixrt.frontend.generate.choice import Choice
from radixrt.frontend.generate.logprobs import Offsets, finite, token_json, token_text
from radixrt.frontend.generate.reply import BaseReply
from radixrt.frontend.http.codec import encode
from radixrt.messages import TokenLogprob, Usage
from radixrt.tokens import Tokenizer

_random = random.Random()  # not the global one, which a program in this process may seed

DONE = b"data: [DONE]\n\n"
Finish = Literal["stop", "length", "abort", "error", "tool_calls"]


def usage_json(usages: Sequence[Usage], prompts: int, reasoning: int = 0) -> dict[str, Any]:
    """OpenAI's usage of all choices, of `prompts` prompts; a prompt counts once, however many choices it has.
    `reasoning` is the number of reasoning tokens.

    `cached_tokens` are those of the first choice of each prompt: the other choices reuse what that has computed."""
    each = len(usages) // prompts
    prompt = cached = completion = 0
    for number, usage in enumerate(usages):
        completion += usage.completion_tokens
        if number % each == 0:
            prompt += usage.prompt_tokens
            cached += usage.cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


class Reply(BaseReply):
    """Formats the answers of one HTTP request, which share its id, time and model."""

    prefix = "cmpl-"
    whole = "text_completion"
    part = "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer | None) -> None:
        super().__init__(model, tokenizer)
        self.id = f"{self.prefix}{_random.getrandbits(128):032x}"
        self.created = int(time.time())

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def body(
        self,
        choices: list[dict[str, Any]],
        usages: Sequence[Usage],
        prompts: int,
        reasoning: int,
        more: dict[str, Any],
    ) -> bytes:
        """The body of a whole answer, with the fields `more`."""
        about, usage = self.about(usages[0]), usage_json(usages, prompts, reasoning)
        return encode(self.head(self.whole) | {"choices": choices, "usage": usage, "radixrt": about} | more)

    def add_ids(self, choices: list[dict[str, Any]], found: Sequence[Choice]) -> dict[str, Any]:
        """Add the token ids of `found` to the choices of a whole answer. Returns those of the prompt, if the format has
        them beside the choices."""
        for choice, one in zip(choices, found, strict=True):
            choice |= {"token_ids": id_list(one.ids), "prompt_token_ids": id_list(one.prompt_ids or b"")}
        return {}

    def add_prompt_logprobs(self, choices: list[dict[str, Any]], found: Sequence[Choice]) -> dict[str, Any]:
        """As `add_ids`, for the log-probabilities of the prompt."""
        for choice, one in zip(choices, found, strict=True):
            choice["prompt_logprobs"] = prompt_logprobs_json(self._tokenizer, one.prompt_logprobs)
        return {}

    # ------------------------------------------------------------ chunks

    def begin(self) -> None:
        head = encode(self.head(self.part))
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self.reported.usage else b"]}\n\n"

    def count(self, prompt_tokens: int, tokens: int) -> None:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
        self._tail = b'],"usage":%b}\n\n' % encode(usage)

    def opening(self, index: int, prompt_ids: bytes | None) -> bytes:
        if prompt_ids is None:
            return b""
        opening = self.choice_chunk(index, None, None, None, b"")
        return self._head + opening[:-1] + b',"prompt_token_ids":%b}' % encode(id_list(prompt_ids)) + self._tail

    def chunk(self, index: int, piece: Piece | None, logprobs: Any, ids: bytes | None) -> bytes:
        """The chunk of a new piece of a choice; None: a token without text yet. With the token `ids` if they are
        reported."""
        return self._head + self.choice_chunk(index, piece, logprobs, None, ids) + self._tail

    def last_chunk(self, ended: Choice, piece: Piece | None, logprobs: Any, ids: bytes | None) -> bytes:
        """The last chunk of a choice that has ended. It always has the worker and the cached tokens, even if usage is
        not requested."""
        about = self.about(ended.usage) | {"cached_tokens": ended.usage.cached_tokens}
        if self.reported.usage:  # the end of the stream has it
            about.pop("explain", None)
        tail = self._tail.removesuffix(b"}\n\n") + b',"radixrt":%b}\n\n' % encode(about)
        choice = self.choice_chunk(ended.index, piece, logprobs, ended.finish, ids)
        return self._head + choice[:-1] + b',"stop_reason":%b}' % encode(ended.stop_reason) + tail

    def end(self, usages: Sequence[Usage], prompts: int, reasoning: int) -> bytes:
        """The end of a stream."""
        if not self.reported.usage:
            return DONE
        about, usage = self.about(usages[0]), usage_json(usages, prompts, reasoning)
        data = self.head(self.part) | {"choices": [], "usage": usage, "radixrt": about}
        return b"data: " + encode(data) + b"\n\n" + DONE

    def choice_chunk(
        self, index: int, piece: Piece | None, logprobs: Any, finish: Finish | None, ids: bytes | None
    ) -> bytes:
        """A choice of a chunk."""
        text = encode(piece.text) if isinstance(piece, Content) else b'""'
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % (
            index, text, encode(logprobs), encode(finish), _ids_field(ids)
        )  # fmt: skip

    def choice(
        self, index: int, message: AssistantMessage, logprobs: Any, finish: Finish, stop: str | int | None
    ) -> dict[str, Any]:
        """A choice of a whole answer."""
        about = {"logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}
        return {"index": index, "text": message.content} | about

    # ------------------------------------------------------------ log-probabilities

    def logprobs(self, found: list[TokenLogprob] | None, offsets: Offsets | None) -> Any:
        """Log-probabilities in OpenAI's legacy format; `offsets` finds where tokens begin in the text."""
        if found is None or offsets is None:
            return None
        texts = [self._text(t.token) for t in found]
        tops = [self._alternatives(one) for one in found]
        return {
            "tokens": texts,
            "token_logprobs": [finite(t.logprob) for t in found],
            "top_logprobs": tops,
            "text_offset": [offsets.take(t.token, text) for t, text in zip(found, texts, strict=True)],
        }

    def _alternatives(self, found: TokenLogprob) -> dict[str, float] | None:
        """The most likely tokens, and the token itself, by text, the likeliest first; None for a prompt's first token.
        Of two tokens with the same text the more likely one is kept."""
        if math.isnan(found.logprob):
            return None
        tops: dict[str, float] = {}
        for token, logprob in (*found.top, (found.token, found.logprob)):
            tops.setdefault(self._text(token), finite(logprob))
        return tops

    def _text(self, token: int) -> str:
        return token_text(None if self.reported.names_ids else self._tokenizer, token)


class ChatReply(Reply):
    """A Reply for /v1/chat/completions."""

    prefix = "chatcmpl-"
    whole = "chat.completion"
    part = "chat.completion.chunk"
    of_content = True

    def opening(self, index: int, prompt_ids: bytes | None) -> bytes:
        delta = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        if prompt_ids is None:
            return self._head + delta + self._tail
        tail = self._tail.removesuffix(b"}\n\n") + b',"prompt_token_ids":%b}\n\n' % encode(id_list(prompt_ids))
        return self._head + delta + tail

    def add_ids(self, choices: list[dict[str, Any]], found: Sequence[Choice]) -> dict[str, Any]:
        for choice, one in zip(choices, found, strict=True):
            choice["token_ids"] = id_list(one.ids)
        return {"prompt_token_ids": id_list(found[0].prompt_ids or b"")}

    def add_prompt_logprobs(self, choices: list[dict[str, Any]], found: Sequence[Choice]) -> dict[str, Any]:
        return {"prompt_logprobs": prompt_logprobs_json(self._tokenizer, found[0].prompt_logprobs)}

    def choice_chunk(
        self, index: int, piece: Piece | None, logprobs: Any, finish: Finish | None, ids: bytes | None
    ) -> bytes:
        if piece is None:
            delta = b'{"content":""}' if logprobs else b"{}"
        else:
            delta = _delta(piece)
        return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}' % (
            index, delta, encode(logprobs), encode(finish), _ids_field(ids)
        )  # fmt: skip

    def choice(
        self, index: int, message: AssistantMessage, logprobs: Any, finish: Finish, stop: str | int | None
    ) -> dict[str, Any]:
        about = {"logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}
        told = message.to_openai() | {"refusal": None}
        if not self.reported.reasoning:
            told.pop("reasoning_content", None)
        return {"index": index, "message": told} | about

    def logprobs(self, found: list[TokenLogprob] | None, offsets: Offsets | None) -> Any:
        if found is None:
            return None
        told = [token_json(self._tokenizer, one, self.reported.names_ids) for one in found]
        return {"content": told, "refusal": None}


def id_list(ids: bytes) -> list[int]:
    """int32 bytes as a list."""
    return memoryview(ids).cast("i").tolist()


def _ids_field(ids: bytes | None) -> bytes:
    """The last field of a choice of a chunk."""
    return b"" if ids is None else b',"token_ids":%b' % encode(id_list(ids))


def prompt_logprobs_json(tokenizer: Tokenizer | None, found: list[TokenLogprob] | None) -> list[Any]:
    """The log-probabilities of a prompt in vLLM's format: null for the first token, and for each other one an object
    of that token and the most likely ones, by id. The rank of a token that is not among the latter is unknown: null."""
    rows: list[Any] = [None]
    for one in found or ():
        ranked: dict[int, tuple[float, int | None]] = {
            token: (logprob, rank) for rank, (token, logprob) in enumerate(one.top, 1)
        }
        ranked = {one.token: ranked.get(one.token, (one.logprob, None))} | ranked
        rows.append({
            token: {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token)}
            for token, (logprob, rank) in ranked.items()
        })  # fmt: skip
    return rows


def _delta(piece: Piece) -> bytes:
    """The JSON of the `delta` that a piece adds to a message."""
    match piece:
        case Content(text=text):
            return b'{"content":%b}' % encode(text)
        case Reasoning(text=text):
            return b'{"reasoning_content":%b}' % encode(text)
        case CallStart(index=index, id=call_id, name=name):
            function = {"name": name, "arguments": ""}
            return encode({"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]})
        case CallArguments(index=index, text=text):
            return encode({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
