"""Deltas as OpenAI's JSON: whole answers, and the chunks of a stream. Pure.

A chunk is glued from bytes made once a request and the text of the moment: a stream's price is a token's price.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from radixrt.messages import Delta, FinishReason, TokenLogprob, Usage
from radixrt.router.tokens import Tokenizer

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def usage_json(usages: Sequence[Usage], prompts: int) -> dict[str, Any]:
    """OpenAI's usage of all choices; a prompt counts once however many choices it has (`prompts` of them).

    Cached are the prompt tokens reused by the first choice of each prompt: the others reuse the first one's."""
    each = len(usages) // prompts
    firsts = usages[::each]
    prompt = sum(u.prompt_tokens for u in firsts)
    completion = sum(u.completion_tokens for u in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in firsts)},
    }


class Reply:
    """What the answers of one HTTP request share: its id, its time, its model."""

    prefix = "cmpl-"
    whole = "text_completion"
    part = "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer | None) -> None:
        self.id = self.prefix + uuid.uuid4().hex
        self.created = int(time.time())
        self.model = model
        self._tokenizer = tokenizer

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def body(self, choices: list[dict[str, Any]], usages: Sequence[Usage], prompts: int) -> bytes:
        """A whole answer."""
        about = {"worker": usages[0].worker}
        return encode(
            self.head(self.whole) | {"choices": choices, "usage": usage_json(usages, prompts), "radixrt": about}
        )

    # ------------------------------------------------------------ chunks

    def chunk_ends(self, include_usage: bool) -> tuple[bytes, bytes]:
        """What stands before and after `choices` in each chunk."""
        head = encode(self.head(self.part))
        return b"data: " + head[:-1] + b',"choices":[', b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    @staticmethod
    def last_end(tail: bytes, usage: Usage) -> bytes:
        """`tail` for the last chunk of a choice: it says who served it and what was reused, usage asked for or not."""
        about = {"worker": usage.worker, "cached_tokens": usage.cached_tokens}
        return tail.removesuffix(b"}\n\n") + b',"radixrt":%b}\n\n' % encode(about)

    def usage_chunk(self, usages: Sequence[Usage], prompts: int) -> bytes:
        """The chunk that `stream_options.include_usage` asks for."""
        about = {"worker": usages[0].worker}
        data = self.head(self.part) | {"choices": [], "usage": usage_json(usages, prompts), "radixrt": about}
        return b"data: " + encode(data) + b"\n\n"

    def first_chunk(self, index: int) -> bytes | None:
        """A choice of a chunk that comes before any text; None if there is none."""
        return None

    def choice_chunk(self, index: int, text: str, logprobs: Any, finish: FinishReason | None) -> bytes:
        """A choice of a chunk."""
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (
            index, encode(text), encode(logprobs), encode(finish)
        )  # fmt: skip

    def choice(self, index: int, text: str, logprobs: Any, finish: FinishReason, stop: str | int | None) -> dict:
        """A choice of a whole answer."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}

    # ------------------------------------------------------------ log-probabilities

    def logprobs(self, found: list[TokenLogprob] | None, offset: int) -> Any:
        """OpenAI's legacy shape; `offset` is where the text of the first token begins, in characters."""
        if found is None:
            return None
        texts = [self._text(t.token) for t in found]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        # Of two tokens with the same text the likelier counts: it is written last.
        tops = [{self._text(token): _finite(logprob) for token, logprob in t.top[::-1]} or None for t in found]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(t.logprob) for t in found],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return self._tokenizer.token_text(token) if self._tokenizer else f"token_id:{token}"


class ChatReply(Reply):
    """The same for /v1/chat/completions."""

    prefix = "chatcmpl-"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def first_chunk(self, index: int) -> bytes | None:
        return b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index

    def choice_chunk(self, index: int, text: str, logprobs: Any, finish: FinishReason | None) -> bytes:
        delta = b'{"content":%b}' % encode(text) if text or logprobs else b"{}"
        return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (
            index, delta, encode(logprobs), encode(finish)
        )  # fmt: skip

    def choice(self, index: int, text: str, logprobs: Any, finish: FinishReason, stop: str | int | None) -> dict:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}

    def logprobs(self, found: list[TokenLogprob] | None, offset: int) -> Any:
        if found is None:
            return None
        content = []
        for one in found:
            tops = [self._token(token, logprob) for token, logprob in one.top]
            content.append(self._token(one.token, one.logprob) | {"top_logprobs": tops})
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token) if self._tokenizer else b""
        return {"token": self._text(token), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what is next to impossible."""
    return max(logprob, -9999.0)


def native_line(answer: Any) -> bytes:
    """An answer of the native protocol as a line of JSON."""
    if isinstance(answer, Delta):
        return b'{"type":"deltas","items":[%b]}\n' % encode(answer)
    return encode(answer) + b"\n"
