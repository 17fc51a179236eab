"""Keeps the generated token ids of conversations: an answer that a client sends back as text gets its ids back."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from radixrt.messages import NO_TENANT, TOKEN_BYTES, ChatPrompt, Namespace
from radixrt.tokens.chain import Key, Message, arguments_of, keys_in_steps, keys_of, next_key, reasoning_of
from radixrt.tokens.errors import FieldError, Room
from radixrt.tokens.incremental import PendingText
from radixrt.tokens.quota import Shares
from radixrt.tokens.spelling import BEFORE_CHARS, Answer, Dropped, Span, Speller, Spelling
from radixrt.tokens.tokenizer import Tokenizer
from radixrt.tokens.turns import Steps, finished

MEMORY_TOKENS = 4_000_000
MIN_TOKENS = 32
"""The fewest tokens that an answer counts for: it takes about 600 bytes beside its tokens."""
MAX_VARIANTS = 8
"""The most answers that are kept with the same text but different thinking."""
AS_GENERATED = "its calls are as generated: the client has changed their arguments"

NO_MESSAGES = (TypeError, ValueError, KeyError, AttributeError, RecursionError)
"""What `keys_of` raises for invalid messages, or too deeply nested ones."""

_export = msgspec.msgpack.Encoder().encode
_exported = msgspec.msgpack.Decoder(list[Answer])


class Encoded(NamedTuple):
    """A chat as token ids, and what became of the answers in it.

    ids         int32 bytes
    text        the text that the template rendered
    kept_turns  how many answers have the ids with which they were generated
    respelled   notes on those of them that the template would write differently, with the same content
    dropped     answers that lost stored ids, wholly or in part ("message 3: the template drops its thinking")
    key         for `remember`, as is `tenant`
    """

    ids: bytes
    text: str
    kept_turns: int = 0
    respelled: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    key: Key | None = None
    tenant: str = ""


class AnswerKeys(NamedTuple):
    """`all`: the keys of a chat's prefixes; of its answers, `kept` are those that a process has, and `missing` the
    others."""

    all: list[Key] | None = None
    kept: list[Key] = []
    missing: list[Key] = []


class Sessions:
    """Keeps at most `max_tokens` generated tokens. Beyond that the least recently used ones of the tenant with most are
    dropped. An answer counts for at least `least_tokens`. Thread safe; no I/O.

        encode_chat(messages) -> Encoded -> ... generate ... -> remember(encoded, answer, ids)
        encode_chat([*messages, answer, more]).ids  =  encoded.ids + ids + ids of what is new

    Answers are found by namespace, tools, template arguments and all messages up to them. Then they are compared with
    what the template renders for the client's message. With `keep_thinking` an answer keeps thinking that the template
    would drop. With `keep_calls` an answer whose calls have the server's ids is shown with the arguments that were
    generated, whatever the client has made of them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_tokens: int = MEMORY_TOKENS,
        keep_thinking: bool = False,
        *,
        keep_calls: bool = False,
        least_tokens: int = MIN_TOKENS,
    ) -> None:
        self._tokenizer = tokenizer
        self._speller = Speller(tokenizer, keep_thinking)
        self._keep_calls = keep_calls
        self._max_bytes, self._least_bytes = max_tokens * TOKEN_BYTES, least_tokens * TOKEN_BYTES
        self._shares = Shares()
        self._answers: dict[Key, list[Answer]] = {}
        self._used: dict[str, OrderedDict[Key, None]] = {}
        """By tenant, the last used one last."""
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        """The number of kept tokens, as answers count."""
        return self._shares.total // TOKEN_BYTES

    def encode_chat(self, namespace: Namespace, prompt: ChatPrompt) -> Encoded:
        """Encode a chat; answers that are kept in `namespace` get their generated ids. Raises FieldError on bad
        input."""
        return self.start(namespace, prompt).finish()

    def start(self, namespace: Namespace, prompt: ChatPrompt, keys: list[Key] | None = None) -> PendingChat:
        """Begin `encode_chat`: everything except the encoding of unseen text, which may be done in a thread. `keys`:
        those of `answers_in`."""
        return finished(self._start(namespace, prompt, None, keys))

    def steps(
        self, namespace: Namespace, prompt: ChatPrompt, room: Room | None = None, keys: list[Key] | None = None
    ) -> Steps[Encoded]:
        """`encode_chat` in steps. Raises FieldError as soon as it is certain that there is not the `room`."""
        pending = yield from self._start(namespace, prompt, room, keys)
        yield None
        return (yield from pending.steps(room))

    def _start(
        self, namespace: Namespace, prompt: ChatPrompt, room: Room | None, keys: list[Key] | None
    ) -> Steps[PendingChat]:
        tokenizer = self._tokenizer
        try:
            keys = keys or (yield from keys_in_steps(namespace, prompt, self._keep_calls))
        except NO_MESSAGES:  # rendering the template will raise a better error
            keys = None
        answers = self._find(namespace.tenant, prompt, keys) if keys else {}
        prompt = _with_thinking(prompt, answers)
        prompt, changed = _with_calls(prompt, answers)
        text = yield from tokenizer.chat_steps(prompt)
        if not answers:
            tokenizer.check_room(text, room)
        spelling = self._speller.find(prompt, text, answers, namespace) if answers else Spelling()
        spelling.respelled |= dict.fromkeys(changed & spelling.spans.keys(), AS_GENERATED)
        key = None if prompt.partial or keys is None else keys[-1]
        return PendingChat(tokenizer, text, spelling, key, namespace)

    def remember(self, encoded: Encoded, message: Message, generated: bytes) -> Key | None:
        """Keep the ids of the answer to a chat, including the token that ended it, if any. `message` is the answer as
        the client sees it: content, and tool_calls and reasoning_content if there are any. Returns the key for
        `export`."""
        if encoded.key is None or not generated or len(generated) > self._max_bytes:
            return None
        key = next_key(encoded.key, message | {"role": "assistant"}, self._keep_calls)
        answer = self._answer(encoded, message, generated)
        with self._lock:
            kept = self._answers.get(key, [])
            own = answer.reasoning, answer.arguments
            others = [other for other in kept if (other.reasoning, other.arguments) != own][1 - MAX_VARIANTS :]
            self._put(encoded.tenant, key, [*others, answer])
        return key

    def answers_in(self, namespace: Namespace, prompt: ChatPrompt) -> AnswerKeys:
        """The keys of a chat, and which of its answers are kept here. None if the chat is invalid."""
        try:
            keys = keys_of(namespace, prompt, self._keep_calls)
            answers = [key for key, m in zip(keys[1:], prompt.messages, strict=True) if m["role"] == "assistant"]
        except NO_MESSAGES:
            return AnswerKeys()
        with self._lock:
            kept = [key for key in answers if key in self._answers]
            return AnswerKeys(keys, kept, [key for key in answers if key not in self._answers])

    def export(self, key: Key) -> bytes | None:
        """What is kept under a key, for `learn` in another process."""
        with self._lock:
            answers = self._answers.get(key)
            return self._tokenizer.fingerprint + _export(answers) if answers is not None else None

    def learn(self, namespace: Namespace, key: Key, exported: bytes) -> None:
        """Keep what another process has exported; ignored if it cannot be decoded, or is of another vocabulary."""
        vocabulary = self._tokenizer.fingerprint
        if not exported.startswith(vocabulary):
            return
        try:
            answers = _exported.decode(memoryview(exported)[len(vocabulary) :])
        except msgspec.MsgspecError:
            return
        if 0 < self._size(answers) <= self._max_bytes:
            with self._lock:
                self._put(namespace.tenant, key, answers)

    def forget(self, is_meant: Callable[[str], bool]) -> None:
        """Drop all answers of the tenants that are meant."""
        with self._lock:
            for tenant in filter(is_meant, tuple(self._used)):
                for key in self._used.pop(tenant):
                    del self._answers[key]
                self._shares.add(tenant, -self._shares[tenant])

    def _put(self, tenant: str, key: Key, answers: list[Answer]) -> None:
        used = self._used.setdefault(tenant, OrderedDict())
        self._shares.add(tenant, self._size(answers) - self._size(self._answers.get(key, [])))
        self._answers[key], used[key] = answers, None
        used.move_to_end(key)
        while self._shares.total > self._max_bytes:
            most = self._shares.largest()
            oldest, _ = self._used[most].popitem(last=False)
            self._shares.add(most, -self._size(self._answers.pop(oldest)))
            if not self._used[most]:
                del self._used[most]

    def _size(self, answers: list[Answer]) -> int:
        """Bytes that answers count for."""
        return sum(max(len(answer.ids), self._least_bytes) for answer in answers)

    def _answer(self, encoded: Encoded, message: Message, generated: bytes) -> Answer:
        tokenizer = self._tokenizer
        ids, last = memoryview(generated).cast("i").tolist(), memoryview(encoded.ids).cast("i")[-1]
        ended = ids[-1] in tokenizer.special_ids or ids[-1] in tokenizer.eos_ids
        inner = ids[:-1] if ended else ids
        body = b"".join(map(tokenizer.token_bytes, inner)).decode("utf-8", "replace")
        if body.startswith(" ") and last in tokenizer.special_ids and tokenizer.puts_space_after(last):
            body = body[1:]
        calls = (message.get("tool_calls") or ()) if self._keep_calls else ()
        return Answer(
            ids=generated,
            body=body,
            end=tokenizer.token_text(ids[-1]) if ended else "",
            end_id=ids[-1] if ended else None,
            reasoning=reasoning_of(message),
            offset=len(encoded.text),
            before=encoded.text[-BEFORE_CHARS:],
            specials=tuple(map(tokenizer.token_text, sorted(tokenizer.special_ids.intersection(inner)))),
            arguments=tuple(call["function"]["arguments"] for call in calls),
            issued=not any((call.get("id") or "") in body for call in calls),
        )

    def _find(self, tenant: str, prompt: ChatPrompt, keys: list[Key]) -> dict[int, Answer]:
        """The kept answers of a chat, by the index of their message."""
        count = len(prompt.messages) - prompt.partial
        found = {}
        with self._lock:
            for index, message in enumerate(prompt.messages[:count]):
                if message["role"] == "assistant" and (variants := self._answers.get(keys[index + 1])):
                    self._used[tenant].move_to_end(keys[index + 1])
                    wanted = reasoning_of(message)
                    fitting = (t for t in reversed(variants) if wanted is None or t.reasoning in (wanted, None))
                    if answer := next((t for t in fitting if _has_calls(t, message)), None):
                        found[index] = answer
        return found


class PendingChat:
    """A chat whose answers have been found; `finish` encodes the text between them."""

    __slots__ = ("_key", "_namespace", "_parts", "_spelling", "text")

    def __init__(
        self, tokenizer: Tokenizer, text: str, spelling: Spelling, key: Key | None, namespace: Namespace = NO_TENANT
    ) -> None:
        self.text, self._spelling, self._key, self._namespace = text, spelling, key, namespace
        self._parts: list[PendingText | bytes] = []
        at, before = 0, None
        for span in spelling.ordered():
            self._add(tokenizer, text[at : span.start] + span.head, before, grows=False)
            self._parts.append(span.ids)
            at, before = span.end, span
        self._add(tokenizer, text[at:], before, grows=True)

    def _add(self, tokenizer: Tokenizer, text: str, before: Span | None, *, grows: bool) -> None:
        if before is None:
            self._parts.append(tokenizer.start(text, False, grows=grows, namespace=self._namespace))
        elif text:
            self._parts.append(tokenizer.start_after(text, before.end_id, grows=grows, namespace=self._namespace))

    @property
    def unseen_chars(self) -> int:
        """Characters that remain to be encoded."""
        return sum(part.unseen_chars for part in self._parts if isinstance(part, PendingText))

    def finish(self) -> Encoded:
        try:
            return self._encoded([part if isinstance(part, bytes) else part.finish() for part in self._parts])
        except ValueError as error:
            raise _named(error) from error

    def steps(self, room: Room | None = None) -> Steps[Encoded]:
        """`finish` in steps. Raises FieldError as soon as it is certain that there is not the `room`."""
        parts: list[bytes] = []
        tokens = 0
        try:
            for part in self._parts:
                parts.append(part if isinstance(part, bytes) else (yield from part.steps(room, tokens)))
                tokens += len(parts[-1]) // TOKEN_BYTES
            return self._encoded(parts)
        except ValueError as error:
            raise _named(error) from error

    def _encoded(self, parts: list[bytes]) -> Encoded:
        ids, spelling = b"".join(parts), self._spelling
        if not ids:
            raise FieldError("messages", "messages are empty: at least one token is needed")
        respelled = tuple(f"message {index}: {how}" for index, how in sorted(spelling.respelled.items()))
        dropped, tenant = tuple(sorted(spelling.dropped.values())), self._namespace.tenant
        return Encoded(ids, self.text, len(spelling.spans), respelled, dropped, self._key, tenant)


def _named(error: ValueError) -> FieldError:
    return error if isinstance(error, FieldError) else FieldError("messages", str(error))


def _has_calls(answer: Answer, message: Message) -> bool:
    """Whether the calls of a message with the key of an answer are the answer's. Ids that the model has written may be
    those of another answer."""
    return answer.issued or not answer.arguments or _has_arguments(answer, message)


def _has_arguments(answer: Answer, message: Message) -> bool:
    """Whether the arguments of a message's calls are those that were generated for these calls."""
    given = (call["function"].get("arguments") for call in message["tool_calls"])
    return all(
        own == other or arguments_of(own) == arguments_of(other)
        for own, other in zip(answer.arguments, given, strict=True)
    )


def _with_calls(prompt: ChatPrompt, answers: dict[int, Answer]) -> tuple[ChatPrompt, set[int]]:
    """The chat with the arguments that were generated, in answers that keep them. Returns also the indices of those
    messages where that is something else."""
    messages, changed = list(prompt.messages), set()
    for index, answer in answers.items():
        if not (answer.issued and answer.arguments):
            continue
        calls = messages[index]["tool_calls"]
        if not _has_arguments(answer, messages[index]):
            changed.add(index)
        messages[index] = messages[index] | {
            "tool_calls": [
                call | {"function": call["function"] | {"arguments": given}}
                for call, given in zip(calls, answer.arguments, strict=True)
            ]
        }
    return msgspec.structs.replace(prompt, messages=messages), changed


def _with_thinking(prompt: ChatPrompt, answers: dict[int, Answer]) -> ChatPrompt:
    """Add the thinking that a client has left out of answers, so that the template decides whether to keep it."""
    messages = list(prompt.messages)
    for index, answer in answers.items():
        if answer.reasoning and reasoning_of(messages[index]) is None:
            messages[index] = messages[index] | {"reasoning_content": answer.reasoning}
    return msgspec.structs.replace(prompt, messages=messages)
