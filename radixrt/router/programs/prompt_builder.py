"""Program states, and the prompts that are built from them, in which generated text keeps its token ids.

    State --> PromptBuilder: `add` what was said since, `prompt` --> ids ... answer ... --> State

The transcript is all that is in a program's prompt so far: text, messages, and generated answers (see
`messages.Segment`).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from radixrt.messages import (
    NO_TENANT,
    TOKEN_BYTES,
    AssistantTurnEnd,
    AssistantTurnStart,
    ChatMessage,
    ChatPrompt,
    ChoiceSegment,
    GeneratedSegment,
    MessageSegment,
    Namespace,
    PartsPrompt,
    Sampling,
    Segment,
    TextPrompt,
    TextSegment,
    ToolsSegment,
)
from radixrt.router.programs.batch_render import as_chat, bulk_render, fields_of
from radixrt.tokens import TextService
from radixrt.tokens.errors import FieldError, Room
from radixrt.tokens.turns import Steps, finished

FIELD = "prompt.said"
MAX_DECODED_TOKENS = 1 << 20
"""The most tokens that are decoded to find those before a stop string: a caller may name one that is not there."""
STEP_SEGMENTS = 16
"""What is added in a step."""
OVERHEAD = 160
"""About the bytes of an object and of the references to it."""


class Piece:
    """An immutable element of a list that states share. In all states that have it, the same piece is `before` it; this
    is set when the first of them is made. `users` counts the kept states that end with it, and the pieces of kept
    states that come right after it."""

    __slots__ = ("__weakref__", "before", "chars", "epoch", "number", "size", "users")

    def __init__(self, chars: int, size: int) -> None:
        self.before: Piece | None = None
        self.chars = chars
        """Characters of its text; once it is in a state, also those of all pieces before it."""
        self.size = OVERHEAD + size
        self.users = 0
        self.number = self.epoch = 0
        """Of the piece on disk, and when it was put there (`saved_states`)."""

    @staticmethod
    def link(pieces: Sequence[Piece]) -> None:
        """Set `before` of the new pieces at the end of a list."""
        new = len(pieces) - 1
        while new > 0 and pieces[new].before is not pieces[new - 1]:
            new -= 1
        for before, piece in itertools.pairwise(pieces[new:]):
            piece.before = before
            piece.chars += before.chars


class Part(Piece):
    """A part of the prompt: its text, and its token ids once it has been in a prompt. `special`: whether BOS and the
    like are added to it."""

    __slots__ = ("ids", "special", "text")

    def __init__(self, text: str, ids: bytes | None = None, special: bool = False) -> None:
        super().__init__(len(text), sys.getsizeof(text) + len(ids or b""))
        self.text = text
        self.ids = ids
        self.special = special


class Message(Piece):
    """A complete message of a chat, as the template gets it."""

    __slots__ = ("fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(0, sum(map(sys.getsizeof, fields.values())))
        self.fields = fields


class Answer(Message):
    """A message that ends with a generated answer that is more than its content: calls, thoughts, channels. The
    template has not written it yet, and may write it as it was generated (`fields`) or `parsed`."""

    __slots__ = ("end", "parsed", "part")

    def __init__(self, text: str, parsed: dict[str, Any], part: int, end: str) -> None:
        super().__init__({"role": "assistant", "content": text})
        self.size += sys.getsizeof(text)
        self.parsed = parsed
        self.part = part
        """The index of the part with its ids."""
        self.end = end
        """The text of the token that ended it; "" if none did."""


class Tools(Piece):
    """The tools of a chat."""

    __slots__ = ("tools",)

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        super().__init__(0, len(msgspec.msgpack.encode(tools)))
        self.tools = tools


class State:
    """All that was said up to some point. Immutable; states share their parts and messages."""

    __slots__ = ("answer", "is_prompt", "encoded", "messages", "namespace", "open", "parts", "size", "tools")

    def __init__(
        self,
        parts: list[Part],
        messages: list[Message],
        encoded: int,
        open: str | None,
        is_prompt: bool,
        namespace: Namespace | None,
        answer: GeneratedSegment | None = None,
        tools: Sequence[Tools] = (),
    ) -> None:
        Piece.link(parts)
        Piece.link(messages)
        self.parts = parts
        self.messages = messages
        self.tools = tools
        """The last ones that were given, if any."""
        self.encoded = encoded
        """The number of parts that have been in a prompt."""
        self.open = open
        """The text so far of the assistant's message, if one has begun and not ended."""
        self.is_prompt = is_prompt
        """Whether the parts are a complete prompt: nothing was said since."""
        self.namespace = namespace
        """The namespace in which the ids were last computed; None if none were."""
        self.answer = answer
        """An answer that was generated since, and is not among the parts yet: the next builder adds it."""
        # Computed once, because Python's strings grow when they are first encoded.
        answered = OVERHEAD + len(answer.ids) + sys.getsizeof(answer.text) if answer is not None else 0
        answered += sys.getsizeof(answer.text) if answer is not None and answer.message is not None else 0
        self.size = OVERHEAD + 8 * (len(parts) + len(messages)) + sys.getsizeof(open) + answered
        """Bytes of the state itself, without its pieces."""

    @property
    def ends(self) -> Iterable[Piece]:
        """The last part and the last message, from which all others can be reached by `before`, and the tools."""
        return (*self.parts[-1:], *self.messages[-1:], *self.tools)

    @property
    def chars(self) -> int:
        """Characters of all parts."""
        return self.parts[-1].chars if self.parts else 0

    @property
    def ids(self) -> bytes:
        """Token ids, int32 bytes, of what was computed: the prompt, and the generated answer."""
        transcript = b"".join(itertools.takewhile(bool, (part.ids or b"" for part in self.parts)))
        return transcript + self.answer.ids if self.answer else transcript


NOTHING = State([], [], 0, None, False, None)


class PromptBuilder:
    """Builds a prompt from parts.

    With roles, the text between generated parts is what the model's chat template writes: the conversation so far is
    rendered, and the rendered text beyond the known parts becomes one more part.

        rendered  <user>hi</user><assistant>   Hello!        </assistant><user>more</user><assistant>
        parts     text                         token ids     text

    The template gets an answer with calls, thoughts or channels parsed, as it does from other APIs. What it writes for
    that is then the text of the part, which keeps its ids.

    Where a template rewrites what was said before (drops thinking, trims), the parts from there on are replaced by one
    text: correct, but what was generated there is encoded again.

    Neighbouring parts of the same kind are joined, except text that has been in a prompt: it was encoded by itself, and
    its ids must stay the same for its KV to be found. Every method raises FieldError for what cannot be said.
    """

    def __init__(self, state: State, text: TextService, scope: Namespace = NO_TENANT) -> None:
        self._text = text
        self._scope = scope
        """The namespace in which texts are encoded."""
        self._parts, self._messages = state.parts.copy(), state.messages.copy()
        self._encoded, self._is_prompt = state.encoded, state.is_prompt
        self._open = None if state.open is None else [state.open]
        """See State.open; as a list of strings."""
        self._namespace = state.namespace
        self._tools = state.tools
        self._answer: tuple[dict[str, Any], int, str] | None = None
        """If the open message ends with an answer that is more than its content: its `parsed`, `part` and `end`."""
        self._matched = ("", 0, 0)
        """(a rendered chat, characters at its beginning that equal the text of the first parts, number of these
        parts)."""
        if state.answer is not None:
            finished(self._add_answer(state.answer))

    def state(self, namespace: Namespace | None = None, answer: GeneratedSegment | None = None) -> State:
        """The state of all that was said. The builder must not be used afterwards."""
        namespace = namespace or self._namespace
        open = None if self._open is None else "".join(self._open)
        return State(self._parts, self._messages, self._encoded, open, self._is_prompt, namespace, answer, self._tools)

    @property
    def is_chat(self) -> bool:
        return self._open is not None

    @property
    def is_partial(self) -> bool:
        """Whether an answer continues a message that has begun."""
        return any(self._open or ())

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The tools that the chat template gets."""
        return (self._tools[0].tools or None) if self._tools else None

    # ------------------------------------------------------------ adding

    def add(self, transcript: Sequence[Segment]) -> None:
        """Add what was said. The time is linear in that, unless the template rewrites earlier text (see
        `bulk_render`)."""
        finished(self.add_steps(transcript))

    def add_steps(self, transcript: Sequence[Segment]) -> Steps[None]:
        """`add` in steps."""
        open = None if self._open is None else "".join(self._open)
        fields = [message.fields for message in self._messages]
        rendered = bulk_render(self._text, fields, open, transcript, self.tools)
        prompts = iter([(rendered.text, end) for end in rendered.ends] if rendered else ())
        for count, (i, one) in enumerate(_joined(transcript), 1):
            if count % STEP_SEGMENTS == 0:
                yield None
            try:
                yield from self._add(
                    one, next(prompts, None) if isinstance(one, ChoiceSegment | GeneratedSegment) else None
                )
            except _OutOfPlace as problem:
                raise FieldError(f"{FIELD}[{i}]", f"{FIELD}[{i}]: {problem}") from None

    def _add(self, transcript: Segment, rendered: tuple[str, int] | None) -> Steps[None]:
        match transcript:
            case TextSegment(text=text):
                self._say(text)
            case ToolsSegment(tools=tools):
                self._check_chat()
                self._tools = [Tools(tools)]
            case MessageSegment():
                self._check_chat()
                self._messages.append(Message(fields_of(transcript)))
            case AssistantTurnStart():
                self._check_chat()
                self._open = []
            case AssistantTurnEnd():
                if self._open is None:
                    raise _OutOfPlace("no turn has begun")
                said = "".join(self._open)
                plain = {"role": "assistant", "content": said}
                self._messages.append(Answer(said, *self._answer) if self._answer else Message(plain))
                self._open = self._answer = None
            case ChoiceSegment(text=text):
                yield from self._end_prompt(rendered)
                part = yield from self._encode(len(self._parts), Part(self._as_rendered(text)))
                self._parts.append(part)
                self._encoded = len(self._parts)
                self._continue(text)
            case GeneratedSegment():
                yield from self._add_answer(transcript, rendered)
        self._is_prompt = False

    def _say(self, text: str) -> None:
        if self._open is not None:
            self._continue(text)
        elif self._messages:
            raise _OutOfPlace("text outside of a role, after messages")
        else:
            self._append_text(text, special=not self._parts)

    def _check_chat(self) -> None:
        if self._open is not None:
            raise _OutOfPlace("the assistant's turn has not ended")
        if self._parts and not self._messages:
            raise _OutOfPlace("a role, after text outside of roles")

    def _continue(self, text: str) -> None:
        self._answer = None
        if self._open is not None:
            self._open.append(text)

    def _add_answer(self, answer: GeneratedSegment, rendered: tuple[str, int] | None = None) -> Steps[None]:
        """Add an answer: its token ids as far as they stand for its text, and the rest as text."""
        if self._messages and self._open is None:
            raise _OutOfPlace("an answer outside of the assistant's turn")
        if len(answer.ids) % TOKEN_BYTES:
            raise _OutOfPlace(f"ids of {len(answer.ids)} bytes: they are int32, {TOKEN_BYTES} bytes each")
        yield from self._end_prompt(rendered)
        ids, kept = ids_of_text(self._text, answer.ids, answer.text, answer.stop, answer.sampling)
        if ids:
            self._append_ids(ids, self._as_rendered(answer.text[:kept]))
        self._append_text(answer.text[kept:])
        before = "".join(self._open or ())
        self._continue(answer.text)
        if self._open is not None and answer.message is not None:
            if (parsed := _parsed(before, answer.message, answer.text)) is not None:
                self._answer = parsed, len(self._parts) - 1, self._text.token_text(answer.stop)
        self._is_prompt = False

    def _as_rendered(self, text: str) -> str:
        """An answer's text as the template writes it, if it is in a turn of a chat."""
        return text if self._open is None else self._text.escaped_answer(text)

    def _append_ids(self, ids: bytes, text: str) -> None:
        if self._parts and isinstance(last := self._parts[-1], Generated):
            self._parts[-1] = Generated(last.text + text, (last.ids or b"") + ids)
        else:
            self._parts.append(Generated(text, ids))

    def _append_text(self, text: str, special: bool = False) -> None:
        if not text:
            return
        last = self._parts[-1] if len(self._parts) > self._encoded else None
        if last is not None and last.ids is None:
            self._parts[-1] = Part(last.text + text, None, last.special)
        else:
            self._parts.append(Part(text, None, special))

    # ------------------------------------------------------------ the prompt

    def prompt(self) -> bytes:
        """Token ids of all that was said, at least one."""
        return finished(self.prompt_steps())

    def prompt_steps(self, room: Room | None = None) -> Steps[bytes]:
        """`prompt` in steps. Raises FieldError as soon as it is certain that there is not the `room`."""
        if self._messages and self._open is None:
            raise FieldError(FIELD, f"{FIELD}: in a chat only the assistant generates, in a turn of its own")
        yield from self._end_prompt(None, room)
        return b"".join(part.ids or b"" for part in self._parts) or self._text.encode_now(PartsPrompt([]))

    def _end_prompt(self, rendered: tuple[str, int] | None = None, room: Room | None = None) -> Steps[None]:
        """End a prompt here: encode what is not encoded yet. `rendered`, if known, is (a rendered chat that begins with
        the prompt, the length of the prompt)."""
        if self._is_prompt:
            return
        if self._open is not None:
            if rendered is None:
                text = self._rendered("".join(self._open))
                rendered = text, len(text)
            self._match_rendered(*rendered)
        before = sum(len(part.ids or b"") for part in self._parts[: self._encoded]) if room else 0
        for i in range(self._encoded, len(self._parts)):
            self._parts[i] = yield from self._encode(i, self._parts[i], room, before // TOKEN_BYTES)
            before += len(self._parts[i].ids or b"")
        self._encoded, self._is_prompt = len(self._parts), True

    def _rendered(self, open: str) -> str:
        """The chat as the template writes it. It gets answers parsed, as it expects them, unless it refuses that; their
        parts then have the text that it writes for them, so that they keep their ids."""
        plain = [message.fields for message in self._messages]
        first = next((i for i, message in enumerate(self._messages) if isinstance(message, Answer)), None)
        if first is None:
            return self._text.render(as_chat(plain, open, self.tools))
        parsed = [message.parsed if isinstance(message, Answer) else message.fields for message in self._messages]
        try:
            chat = self._text.render(as_chat(parsed, open, self.tools))
        except FieldError:
            parsed, chat = plain, self._text.render(as_chat(plain, open, self.tools))
        else:
            self._respell(chat, plain, parsed, open)
        self._messages[first:] = map(Message, parsed[first:])  # new ones, since states share those
        return chat

    def _respell(self, chat: str, plain: list[dict[str, Any]], parsed: list[dict[str, Any]], open: str) -> None:
        """Give the part of the last Answer the text that the template writes for it in `chat`, if that is found.

        parts   before | generated |
        plain   before   generated   after       the chat, with the answer as it was generated
        chat    before   written     after
        """
        index, answer = next((i, one) for i, one in enumerate(self._messages[::-1]) if isinstance(one, Answer))
        part = self._parts[-1]
        before = "".join(one.text for one in self._parts[:-1])
        if answer.part != len(self._parts) - 1 or not isinstance(part, Generated) or not chat.startswith(before):
            return
        end = self._after_plain(chat, as_chat(plain, open, self.tools), before + part.text)
        if end is None:
            until = as_chat(parsed[: len(parsed) - index], "", self.tools)
            end = self._after_parsed(chat, until, answer, len(before))
        if end is not None and end >= len(before):
            self._parts[-1] = Generated(chat[len(before) : end], part.ids)

    def _after_plain(self, chat: str, plain: ChatPrompt, known: str) -> int | None:
        """Where what comes after an answer begins in `chat`: it is the same in a `plain` one."""
        try:
            text = self._text.render(plain)
        except FieldError:
            return None
        after = text.removeprefix(known)
        return len(chat) - len(after) if text.startswith(known) and chat.endswith(after) else None

    def _after_parsed(self, chat: str, until: ChatPrompt, answer: Answer, begin: int) -> int | None:
        """The same by the token that ended the answer, with which the chat `until` there ends. None if the template has
        dropped its thoughts."""
        try:
            text = self._text.render(until, answer_next=False)
        except FieldError:
            return None
        end = text.rfind(answer.end, begin) if answer.end else -1
        keeps = end >= 0 and answer.parsed.get("reasoning_content", "").strip() in text[begin:end]
        return end if keeps and chat.startswith(text) else None

    def _match_rendered(self, rendered: str, end: int) -> None:
        """Keep the parts whose texts rendered[:end] begins with; the rest of it becomes one new part."""
        text, at, kept = self._matched
        if text is not rendered:
            at = kept = 0
        for part in self._parts[kept:]:
            if not rendered.startswith(part.text, at, end):
                break
            at += len(part.text)
            kept += 1
        del self._parts[kept:]
        self._encoded = min(self._encoded, kept)
        self._append_text(rendered[at:end])
        # Without the last part, which may still grow.
        self._matched = rendered, end - len(self._parts[-1].text if self._parts else ""), max(0, len(self._parts) - 1)

    def _encode(self, index: int, part: Part, room: Room | None = None, before: int = 0) -> Steps[Part]:
        if part.ids is not None:
            return part
        alone = TextPrompt(part.text, part.special)
        ids = yield from self._text.said_steps(alone, index == 0, self._scope, room, before)
        return Part(part.text, ids, part.special)


class Generated(Part):
    """A part whose ids were generated."""

    __slots__ = ()


def _joined(transcript: Sequence[Segment]) -> Iterator[tuple[int, Segment]]:
    """What was said, and its first index, with neighbouring texts as one: to append one to the other each time would
    take quadratic time."""
    for is_text, group in itertools.groupby(enumerate(transcript), lambda one: isinstance(one[1], TextSegment)):
        if is_text:
            texts = [(i, one.text) for i, one in group if isinstance(one, TextSegment)]
            yield texts[0][0], TextSegment("".join(text for _, text in texts))
        else:
            yield from group


def _parsed(before: str, answer: ChatMessage, text: str) -> dict[str, Any] | None:
    """The message of an answer with text `before` it; None for one that is its `text` alone."""
    if not answer.tool_calls and answer.content.strip() == text.strip():
        return None
    message = answer.to_openai()
    return message | {"content": before + answer.content} if before else message


class _OutOfPlace(ValueError):
    """Something does not fit what was said before."""


def ids_of_text(
    service: TextService, ids: bytes, text: str, stop: str | int | None, sampling: Sampling
) -> tuple[bytes, int]:
    """Returns those generated `ids` that stand for a beginning of `text`, and the length of that in characters.

    Usually these are all ids and the whole text. A token that ended the turn is not part of the text: with roles, the
    template writes it. A stop string that ended the answer was cut off, and may begin or end within a token:

        ids    |The|_cat|_sat|.\\n|      stop = "\\n"
        text   |The _cat _sat .|         kept: three ids, and "." as text
    """
    if isinstance(stop, int):
        named = sampling.include_stop and stop in sampling.stop_token_ids
        return ids if named else ids.removesuffix(stop.to_bytes(TOKEN_BYTES, "little", signed=True)), len(text)
    if stop is None:
        return ids, len(text)
    if sampling.skip_special_tokens:  # `decode_now` skips them as well
        fewest = 0 if sampling.include_stop else 1
        tries = min(len(stop.encode()) + 2 - fewest, MAX_DECODED_TOKENS * TOKEN_BYTES // max(1, len(ids)))
        for cut in range(fewest, fewest + tries):
            kept = ids[: max(0, len(ids) - TOKEN_BYTES * cut)]
            transcript = service.decode_now(kept) if kept else ""
            if text.startswith(transcript):
                return kept, len(transcript)
    return b"", 0
