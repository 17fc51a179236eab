"""The text service: encodes prompts, off the event loop if that takes long, and decodes token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import msgspec
import numpy as np

from radixrt.config import FrontendConfig, RouterConfig
from radixrt.messages import (
    NO_TENANT,
    TOKEN_BYTES,
    ChatPrompt,
    Namespace,
    PartsPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from radixrt.tokens._ids import ids_below
from radixrt.tokens.chain import Key
from radixrt.tokens.errors import FieldError, Room
from radixrt.tokens.incremental import PendingText
from radixrt.tokens.sessions import Encoded, Sessions
from radixrt.tokens.special_text import unescaped
from radixrt.tokens.tokenizer import Tokenizer, load_tokenizer
from radixrt.tokens.turns import Result, Steps, Turns, finished

INLINE_CHARS = 256
"""Up to this many characters, encoding (0.2 µs a character) takes less time than passing it to a thread (60-90 µs)."""

INLINE_UNSEEN_CHARS = 2048
"""Up to this many new characters after a text that was seen before are encoded on the event loop: less than half a
ms."""

INLINE_SEEN_CHARS = 1_000_000
"""Up to this many characters are looked up on the event loop (1-2 µs per 1,000 characters)."""

INLINE_IDS = 4096
"""Up to this many ids are decoded on the event loop (0.1 µs each; 0.5 µs where there is no table of their texts)."""

STEP_IDS = 16_384
"""Ids that are decoded in one step."""

MAX_WHOLE_IDS = 1 << 18
"""The most ids that are decoded at once where no table describes the decoder: the library holds the GIL meanwhile (0.5
µs each)."""

INLINE_MESSAGES = 64
"""Chats of up to this many messages are rendered on the event loop (5-10 µs per message; a thread would hold the
GIL)."""

ENTRY_CHARS, CALL_CHARS = 512, 8
"""A part of a content, or a call, takes as long as so many characters, and so does each byte of a call, which is parsed
and written again, and of a tool, which is written as JSON (11 ns a byte; 150 where a template writes it itself)."""

_to_msgpack = msgspec.msgpack.Encoder().encode
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
        self._turns = Turns(threads) if tokenizer else None

    @classmethod
    def load(cls, config: RouterConfig | FrontendConfig) -> TextService:
        """Load the tokenizer of `config.tokenizer` ("none": as `none()`), or else of `config.model`. Raises ValueError
        if there is none."""
        if config.tokenizer == "none":
            return cls.none()
        split = config.split_special_tokens
        tokenizer = load_tokenizer(config.tokenizer or config.model, config.chat_template, split_special_tokens=split)
        return cls(tokenizer, config.tokenizer_threads)

    @classmethod
    def none(cls) -> TextService:
        """A service without a tokenizer: token ids are passed through, text raises FieldError."""
        return cls(None)

    @property
    def fingerprint(self) -> bytes:
        """See Tokenizer; b"" without one."""
        return self.tokenizer.fingerprint if self.tokenizer is not None else b""

    @property
    def has_tokenizer(self) -> bool:
        return self.tokenizer is not None

    def close(self) -> None:
        """End the threads; prompts that wait for a thread are cancelled."""
        if self._turns is not None:
            self._turns.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def encode(
        self, prompt: Prompt, namespace: Namespace = NO_TENANT, room: Room | None = None, last: int | None = None
    ) -> bytes:
        """Ids of a prompt, at least one. What takes long is done in threads, in turn with the other tenants'; the first
        line of a namespace is its tenant. What was encoded in the same namespace is looked up.

        Raises FieldError if it is not valid, and if it does not fit into the `room`, as soon as that is certain. With
        `last`, only so many of the last ids are wanted, and only text that these need is encoded, where possible.
        """
        tokenizer = self.tokenizer
        if tokenizer is None or _is_short(prompt):
            return self.encode_now(prompt, namespace)
        match prompt:
            case TextPrompt(text=text, add_special_tokens=special):
                field = "prompt"
            case ChatPrompt() if is_short_chat(prompt):
                text, special, field = tokenizer.apply_chat(prompt), False, "messages"
            case _:
                return await self.run(namespace, self._steps(prompt, namespace, room))
        if last is None and not tokenizer.least.spaces_vanish:
            tokenizer.check_room(text, room)
        if len(text) > INLINE_SEEN_CHARS:
            return await self.run(namespace, self._text_steps(text, special, field, namespace, room, last), field)
        pending = tokenizer.start(text, special, namespace=namespace)
        if pending.unseen_chars <= INLINE_UNSEEN_CHARS:
            return _finished(pending, field)
        return await self.run(namespace, _steps(pending, field, room, last), field)

    async def encode_chat(
        self,
        sessions: Sessions,
        namespace: Namespace,
        prompt: ChatPrompt,
        room: Room | None = None,
        keys: list[Key] | None = None,
    ) -> Encoded:
        """`sessions.encode_chat`; in threads, as `encode`, if there is much unseen text. `keys`: all of the chat, if
        known."""
        if not is_short_chat(prompt):
            return await self.run(namespace, sessions.steps(namespace, prompt, room, keys), "messages")
        pending = sessions.start(namespace, prompt, keys)
        if pending.unseen_chars <= INLINE_UNSEEN_CHARS:
            return pending.finish()
        return await self.run(namespace, pending.steps(room), "messages")

    async def encode_shown(
        self, prompt: Prompt, namespace: Namespace = NO_TENANT, *, render_only: bool = False
    ) -> tuple[bytes, str]:
        """Returns (ids of a prompt, the rendered text of a chat; "" for other prompts).

        With `render_only` a chat is not encoded, which is most of the work, and has no ids."""
        if not isinstance(prompt, ChatPrompt):
            return await self.encode(prompt, namespace), ""
        self._with_tokenizer("messages")
        return await self.run(namespace, self._shown_steps(prompt, namespace, render_only), "messages")

    async def encode_choices(
        self, choices: Sequence[TextPrompt | TokenPrompt], namespace: Namespace = NO_TENANT
    ) -> list[TextPrompt | TokenPrompt]:
        """`encode_part` of each choice, in threads, as `encode`."""
        if self._turns is None:
            return finished(self._choice_steps(choices, namespace))
        return await self.run(namespace, self._choice_steps(choices, namespace), "choices")

    async def run(
        self, namespace: Namespace, steps: Steps[Result], field: str = "prompt", *, long: bool = False
    ) -> Result:
        """See `Turns.run`."""
        assert self._turns is not None, "there is a tokenizer"
        return await self._turns.run(namespace.tenant, steps, field, long=long)

    def _shown_steps(self, prompt: ChatPrompt, namespace: Namespace, render_only: bool) -> Steps[tuple[bytes, str]]:
        text = yield from self._with_tokenizer("messages").chat_steps(prompt)
        if render_only:
            return b"", unescaped(text)
        return (yield from self._text_steps(text, False, "messages", namespace, None)), unescaped(text)

    def _choice_steps(
        self, choices: Sequence[TextPrompt | TokenPrompt], namespace: Namespace
    ) -> Steps[list[TextPrompt | TokenPrompt]]:
        encoded: list[TextPrompt | TokenPrompt] = []
        for i, choice in enumerate(choices):
            ids = yield from self._part_steps(choice, f"choices[{i}]", namespace)
            encoded.append(TokenPrompt(ids or _refuse_empty(f"choices[{i}]")))
        return encoded

    def _steps(self, prompt: Prompt, namespace: Namespace, room: Room | None) -> Steps[bytes]:
        """The ids of a prompt that is not text alone."""
        match prompt:
            case ChatPrompt():
                text = yield from self._with_tokenizer("messages").chat_steps(prompt)
                return (yield from self._text_steps(text, False, "messages", namespace, room))
            case PartsPrompt(parts=parts):
                return (yield from self._parts_steps(parts, namespace, room))
        return self.encode_now(prompt, namespace)

    def _text_steps(
        self, text: str, special: bool, field: str, namespace: Namespace, room: Room | None, last: int | None = None
    ) -> Steps[bytes]:
        tokenizer = self._with_tokenizer(field)
        if last is None:
            tokenizer.check_room(text, room)
        pending = tokenizer.start(text, special, namespace=namespace)
        yield None
        return (yield from _steps(pending, field, room, last))

    def _parts_steps(
        self, parts: Sequence[TextPrompt | TokenPrompt], namespace: Namespace, room: Room | None
    ) -> Steps[bytes]:
        encoded: list[bytes] = []
        tokens = 0
        for i, part in enumerate(parts):
            if i == 0 and isinstance(part, TextPrompt) and part.text:
                ids = yield from self._text_steps(part.text, part.add_special_tokens, "prompt", namespace, room)
            else:
                ids = yield from self._part_steps(part, "prompt", namespace, room, tokens)
            encoded.append(ids)
            tokens += len(ids) // TOKEN_BYTES
        return b"".join(encoded) or _refuse_empty("prompt")

    def _part_steps(
        self,
        part: TextPrompt | TokenPrompt,
        field: str,
        namespace: Namespace = NO_TENANT,
        room: Room | None = None,
        beside: int = 0,
    ) -> Steps[bytes]:
        """The ids of text that continues other text, of which there may be none, after `beside` others."""
        if isinstance(part, TokenPrompt):
            return self._checked(part.ids, field) if part.ids else b""
        try:
            pending = self._with_tokenizer(field).start_after(part.text, namespace=namespace)
            yield None
            return (yield from pending.steps(room, beside))
        except FieldError:
            raise
        except ValueError as error:
            raise FieldError(field, str(error)) from error

    def said_steps(
        self, part: TextPrompt, first: bool, namespace: Namespace, room: Room | None, before: int
    ) -> Steps[bytes]:
        """`encode_now` of a part that is the `first` of a prompt, and `encode_after` of others, which come after
        `before` ids, in steps. Raises FieldError as soon as it is certain that there is not the `room`."""
        if first and not part.text:
            _refuse_empty("prompt")
        if first:
            return (yield from self._text_steps(part.text, part.add_special_tokens, "prompt", namespace, room))
        return (yield from self._part_steps(part, "prompt", namespace, room, before))

    def encode_now(self, prompt: Prompt, namespace: Namespace = NO_TENANT) -> bytes:
        """`encode` in the calling thread."""
        match prompt:
            case TokenPrompt(ids=ids):
                return self._checked(ids, "prompt")
            case TextPrompt(text=text, add_special_tokens=special):
                return self._encode_text(text, special, "prompt", namespace) if text else _refuse_empty("prompt")
            case ChatPrompt():
                return self._encode_text(self.render(prompt), False, "messages", namespace)
            case PartsPrompt(parts=parts):
                return finished(self._parts_steps(parts, namespace, None))
        raise FieldError("prompt", f"prompt of an unknown kind: {type(prompt).__name__}")

    def encode_part(self, part: TextPrompt | TokenPrompt, field: str = "choices") -> bytes:
        """Ids of text that continues a prompt: without special tokens or an added leading space. At least one."""
        return finished(self._part_steps(part, field)) or _refuse_empty(field)

    def encode_after(
        self, part: TextPrompt | TokenPrompt, field: str = "prompt", namespace: Namespace = NO_TENANT
    ) -> bytes:
        """As `encode_part`, for a part that may have no ids."""
        return finished(self._part_steps(part, field, namespace))

    def render(self, prompt: ChatPrompt, answer_next: bool = True) -> str:
        """The text that the chat template renders for messages; without `answer_next`, up to the end of the last
        one."""
        return self._with_tokenizer("messages").apply_chat(prompt, answer_next)

    def token_text(self, token: str | int | None) -> str:
        """The text of a token id; "" for anything else."""
        return self.tokenizer.token_text(token) if self.tokenizer is not None and isinstance(token, int) else ""

    def escaped_answer(self, text: str) -> str:
        """What the assistant said as `render` writes it."""
        return self._with_tokenizer("messages").escaped_answer(text)

    async def decode(self, ids: bytes, skip_special_tokens: bool = True, namespace: Namespace = NO_TENANT) -> str:
        """Text of all `ids` at once; of many, in threads, as `encode`."""
        if self._turns is None or len(ids) <= INLINE_IDS * TOKEN_BYTES:
            return self.decode_now(ids, skip_special_tokens)
        return await self.run(namespace, self._decode_steps(ids, skip_special_tokens), "ids")

    def decode_now(self, ids: bytes, skip_special_tokens: bool = True) -> str:
        """`decode` in the calling thread."""
        return finished(self._decode_steps(ids, skip_special_tokens))

    def _decode_steps(self, ids: bytes, skip_special_tokens: bool) -> Steps[str]:
        tokenizer = self._with_tokenizer("ids")
        self._checked(ids, "ids")
        count, pieces = len(ids) // TOKEN_BYTES, tokenizer.pieces(skip_special_tokens)
        if pieces is None or count <= INLINE_CHARS:
            if count > MAX_WHOLE_IDS:
                raise FieldError("ids", f"ids: this tokenizer decodes at most {MAX_WHOLE_IDS} at once, not {count}")
            return tokenizer.decode(np.frombuffer(ids, "<i4").tolist(), skip_special_tokens)
        stream, texts, size = pieces.stream(), [], STEP_IDS * TOKEN_BYTES
        for at in range(0, len(ids), size):
            texts.append(stream.push(ids[at : at + size]))
            yield None
        return "".join(texts) + stream.flush()

    def _with_tokenizer(self, field: str = "prompt") -> Tokenizer:
        if self.tokenizer is None:
            raise FieldError(field, NO_TOKENIZER)
        return self.tokenizer

    def _encode_text(self, text: str, special: bool, field: str, namespace: Namespace) -> bytes:
        return finished(self._text_steps(text, special, field, namespace, None))

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


def _steps(pending: PendingText, field: str, room: Room | None, last: int | None) -> Steps[bytes]:
    """The ids of a text, or at least its `last` ones."""
    try:
        ids = yield from pending.steps(room) if last is None else pending.last_steps(last)
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError(field, str(error)) from error
    return ids or _refuse_empty(field)


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


def is_short_chat(prompt: ChatPrompt) -> bool:
    """Whether a chat is rendered on the event loop."""
    if len(prompt.messages) > INLINE_MESSAGES:
        return False
    values: list[Any] = [*(prompt.tools or ()), *prompt.template_args.values()]
    chars = CALL_CHARS * _num_bytes(values) if values else 0
    return chars + sum(map(_chars, prompt.messages)) <= INLINE_SEEN_CHARS


def _chars(message: dict[str, Any]) -> int:
    """The characters of a message; of its parts and calls as many as take the time of these."""
    if not isinstance(message, dict):
        return 0
    content, calls = message.get("content"), message.get("tool_calls")
    chars = len(content) if isinstance(content, str) else 0
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        chars = ENTRY_CHARS * len(content) + sum(len(text) for text in texts if isinstance(text, str))
    if isinstance(calls, list):
        chars += ENTRY_CHARS * len(calls) + CALL_CHARS * _num_bytes(calls)
    return chars


def _num_bytes(values: list[Any]) -> int:
    """About the bytes of calls or tools; many for what will be refused."""
    try:
        return len(_to_msgpack(values))
    except (TypeError, ValueError, RecursionError):
        return INLINE_SEEN_CHARS
