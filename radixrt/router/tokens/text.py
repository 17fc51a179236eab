"""The text service: encodes prompts, off the event loop if that takes long, and decodes token ids."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from struct import Struct
from typing import Any, Self

import numpy as np

from radixrt.config import FrontendConfig, RouterConfig
from radixrt.messages import TOKEN_BYTES, ChatPrompt, Delta, PartsPrompt, Prompt, Sampling, TextPrompt, TokenPrompt
from radixrt.router.errors import FieldError
from radixrt.router.tokens._ids import ids_below
from radixrt.router.tokens.detok import Detokenizer
from radixrt.router.tokens.incremental import PendingText
from radixrt.router.tokens.sessions import Encoded, Sessions
from radixrt.router.tokens.stops import StopFinder
from radixrt.router.tokens.tokenizer import Tokenizer, load_tokenizer

INLINE_CHARS = 256
"""Up to this many characters, encoding (0.2 µs a character) takes less time than passing it to a thread (60-90 µs)."""

INLINE_UNSEEN_CHARS = 2048
"""Up to this many new characters after a text that was seen before are encoded on the event loop: less than half a
ms."""

INLINE_SEEN_CHARS = 1_000_000
"""Up to this many characters are looked up on the event loop (1-2 µs per 1,000 characters)."""

INLINE_MESSAGES = 64
"""Chats of up to this many messages are rendered on the event loop (5-10 µs per message; a thread would hold the
GIL)."""

_pack_token = Struct("<i").pack
NO_TOKENIZER = "there is no tokenizer here: send token ids"


class TextService:
    """Encodes prompts and decodes answers with one tokenizer, or without any (token ids only).

    Token ids are `bytes` of little-endian int32. Bad input raises FieldError. Close it (or use it as a
    context manager) to end its threads.
    """

    def __init__(self, tokenizer: Tokenizer | None, threads: int = 2) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.model_vocab_size if tokenizer else 0
        """The exclusive upper bound of token ids: the rows of the model's embedding, or the tokenizer's size; 0 without
        a tokenizer."""
        self.generation: dict[str, Any] = tokenizer.generation if tokenizer else {}
        """The content of the model's generation_config.json."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize") if tokenizer else None

    @classmethod
    def load(cls, config: RouterConfig | FrontendConfig) -> TextService:
        """Load the tokenizer of `config.tokenizer` ("none": as `none()`), or else of `config.model`. Raises ValueError
        if there is none."""
        if config.tokenizer == "none":
            return cls.none()
        return cls(load_tokenizer(config.tokenizer or config.model, config.chat_template), config.tokenizer_threads)

    @classmethod
    def none(cls) -> TextService:
        """A service without a tokenizer: token ids are passed through, text raises FieldError."""
        return cls(None)

    @property
    def has_tokenizer(self) -> bool:
        return self.tokenizer is not None

    def close(self) -> None:
        """End the threads; prompts that wait for a thread are cancelled."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def encode(self, prompt: Prompt) -> bytes:
        """Ids of a prompt, at least one. If there is much unseen text, it is encoded in a thread."""
        if self._pool is None or _is_short(prompt):
            return self.encode_now(prompt)
        in_pool = asyncio.get_running_loop().run_in_executor
        match prompt:
            case TextPrompt(text=text, add_special_tokens=special) if len(text) <= INLINE_SEEN_CHARS:
                field = "prompt"
            case ChatPrompt(messages=messages) if len(messages) <= INLINE_MESSAGES:
                text, special, field = self.tokenizer.apply_chat(prompt), False, "messages"
            case _:
                return await in_pool(self._pool, self.encode_now, prompt)
        pending = self.tokenizer.start(text, special)
        if pending.unseen_chars <= INLINE_UNSEEN_CHARS:
            return _finished(pending, field)
        return await in_pool(self._pool, _finished, pending, field)

    async def encode_chat(self, sessions: Sessions, namespace: str, prompt: ChatPrompt) -> Encoded:
        """`sessions.encode_chat`; in a thread if there is much unseen text."""
        in_pool = asyncio.get_running_loop().run_in_executor
        if len(prompt.messages) > INLINE_MESSAGES:
            return await in_pool(self._pool, sessions.encode_chat, namespace, prompt)
        pending = sessions.start(namespace, prompt)
        if pending.unseen_chars <= INLINE_UNSEEN_CHARS:
            return pending.finish()
        return await in_pool(self._pool, pending.finish)

    async def encode_shown(self, prompt: Prompt, *, render_only: bool = False) -> tuple[bytes, str]:
        """Returns (ids of a prompt, the rendered text of a chat; "" for other prompts).

        With `render_only` a chat is not encoded, which is most of the work, and has no ids."""
        if not isinstance(prompt, ChatPrompt):
            return await self.encode(prompt), ""
        if render_only:
            return b"", await asyncio.to_thread(self.render, prompt)
        return await asyncio.to_thread(self._encode_chat, prompt)

    def _encode_chat(self, prompt: ChatPrompt) -> tuple[bytes, str]:
        text = self.render(prompt)
        return self._encode_text(text, False, "messages"), text

    def encode_now(self, prompt: Prompt) -> bytes:
        """`encode` in the calling thread."""
        match prompt:
            case TokenPrompt(ids=ids):
                return self._checked(ids, "prompt")
            case TextPrompt(text=text, add_special_tokens=special):
                return self._encode_text(text, special, "prompt") if text else _refuse_empty("prompt")
            case ChatPrompt():
                return self._encode_chat(prompt)[0]
            case PartsPrompt(parts=parts):
                return self._encode_parts(parts)
        raise FieldError("prompt", f"prompt of an unknown kind: {type(prompt).__name__}")

    def encode_part(self, part: TextPrompt | TokenPrompt, field: str = "choices") -> bytes:
        """Ids of text that continues a prompt: without special tokens or an added leading space. At least one."""
        ids = self._encode_part(part, field)
        return ids or _refuse_empty(field)

    def encode_after(self, part: TextPrompt | TokenPrompt, field: str = "prompt") -> bytes:
        """As `encode_part`, for a part that may have no ids."""
        return self._encode_part(part, field)

    def render(self, prompt: ChatPrompt) -> str:
        """The text that the chat template renders for messages."""
        return self._with_tokenizer("messages").apply_chat(prompt)

    async def decode(self, ids: bytes, skip_special_tokens: bool = True) -> str:
        """Text of all `ids` at once."""
        if self._pool is None or len(ids) <= INLINE_CHARS * TOKEN_BYTES:
            return self.decode_now(ids, skip_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.decode_now, ids, skip_special_tokens)

    def decode_now(self, ids: bytes, skip_special_tokens: bool = True) -> str:
        """`decode` in the calling thread."""
        tokenizer = self._with_tokenizer("ids")
        return tokenizer.decode(np.frombuffer(self._checked(ids, "ids"), "<i4").tolist(), skip_special_tokens)

    def _with_tokenizer(self, field: str = "prompt") -> Tokenizer:
        if self.tokenizer is None:
            raise FieldError(field, NO_TOKENIZER)
        return self.tokenizer

    def _encode_text(self, text: str, special: bool, field: str) -> bytes:
        return _finished(self._with_tokenizer(field).start(text, special), field)

    def _encode_parts(self, parts: Sequence[TextPrompt | TokenPrompt]) -> bytes:
        encoded = []
        for i, part in enumerate(parts):
            if i == 0 and isinstance(part, TextPrompt) and part.text:
                encoded.append(self._encode_text(part.text, part.add_special_tokens, "prompt"))
            else:
                encoded.append(self._encode_part(part, "prompt"))
        return b"".join(encoded) or _refuse_empty("prompt")

    def _encode_part(self, part: TextPrompt | TokenPrompt, field: str) -> bytes:
        if isinstance(part, TokenPrompt):
            return self._checked(part.ids, field) if part.ids else b""
        try:
            return array("i", self._with_tokenizer(field).encode_continuation(part.text)).tobytes()
        except FieldError:
            raise
        except ValueError as error:
            raise FieldError(field, str(error)) from error

    def _checked(self, ids: bytes, field: str) -> bytes:
        if not ids:
            _refuse_empty(field)
        if len(ids) % TOKEN_BYTES:
            raise FieldError(field, f"{field} must be int32 token ids, {TOKEN_BYTES} bytes each, not {len(ids)} bytes")
        limit = self.vocab_size or 1 << 31
        if not ids_below(ids, limit):
            shown = next(i for i in memoryview(ids).cast("i") if not 0 <= i < limit)
            raise FieldError(field, f"{field} holds token id {shown}, outside of 0..{limit - 1}")
        return ids


def _finished(pending: PendingText, field: str) -> bytes:
    try:
        ids = pending.finish()
    except ValueError as error:
        raise FieldError(field, str(error)) from error
    return ids or _refuse_empty(field)


def _refuse_empty(field: str) -> bytes:
    raise FieldError(field, f"{field} is empty: at least one token is needed")


def _is_short(prompt: Prompt) -> bool:
    match prompt:
        case TokenPrompt():
            return True
        case TextPrompt(text=text):
            return len(text) <= INLINE_CHARS
        case PartsPrompt(parts=parts):
            return sum(len(part.text) for part in parts if isinstance(part, TextPrompt)) <= INLINE_CHARS
    return False


class TextStream:
    """The text of one answer while it is generated; ends at a stop string. Empty if `service` has no tokenizer
    (then stop strings raise FieldError).

    `stop` is the stop string that ended it, or None. With `include_stop` the text ends with it, otherwise
    before it. Without stop strings text is passed on as soon as its characters are complete.
    """

    __slots__ = ("_detokenizer", "_finder", "_include_stop", "past", "plain_push")

    def __init__(self, service: TextService, sampling: Sampling) -> None:
        tokenizer = service.tokenizer
        if tokenizer is None and sampling.stop:
            raise FieldError("stop", f"stop strings need text, but {NO_TOKENIZER}")
        self._detokenizer = Detokenizer(tokenizer, sampling.skip_special_tokens) if tokenizer else None
        self._finder = StopFinder(sampling.stop, sampling.include_stop) if sampling.stop else None
        self._include_stop = sampling.include_stop
        self.past = 0
        """Tokens of the last delta that came after a stop string, and are to be dropped."""
        self.plain_push = self._detokenizer.push if self._detokenizer and not self._finder else None
        """`push` for answers without stop strings, which returns only the text; None if there are stop strings."""

    def take(self, delta: Delta) -> str:
        """The text that a delta of the choice adds; with the last delta, the rest of the text. Afterwards `stop` may be
        set. A token that ended the choice is part of the text only with `include_stop`."""
        ids = delta.ids
        if self.plain_push is not None and delta.finish is None:
            return self.plain_push(ids)
        if isinstance(delta.stop, int) and not self._include_stop and ids.endswith(_pack_token(delta.stop)):
            ids = ids[:-TOKEN_BYTES]
        text = self._take_until_stop(ids, len(delta.ids)) if self._finder else self.push(ids)[0]
        return text + self.flush() if delta.finish is not None and self.stop is None else text

    def _take_until_stop(self, ids: bytes, size: int) -> str:
        """The text of ids up to a stop string; one token at a time, so as to know how many of the `size` bytes of the
        delta come after it."""
        text, taken = "", 0
        while taken < len(ids) and self.stop is None:
            text += self.push(ids[taken : taken + TOKEN_BYTES])[0]
            taken += TOKEN_BYTES
        self.past = (size - taken) // TOKEN_BYTES if self.stop is not None else 0
        return text

    @property
    def stop(self) -> str | None:
        return self._finder.found if self._finder else None

    def push(self, ids: Sequence[int] | bytes) -> tuple[str, str | None]:
        """Returns (the text that these ids add, the stop string if one is complete). ids: ints, or int32 bytes."""
        if self._detokenizer is None:
            return "", None
        text = self._detokenizer.push(ids)
        if self._finder is None:
            return text, None
        return self._finder.push(text), self._finder.found

    def flush(self) -> str:
        """The rest of the text, at the end of the answer; may set `stop`."""
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.flush()
        if self._finder is None:
            return text
        return self._finder.push(text) + self._finder.flush()
