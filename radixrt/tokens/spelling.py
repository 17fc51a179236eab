"""Finds generated answers in the text that a chat template renders, and replaces them by their generated ids.

text    ....<|im_start|>assistant| answer <|im_end|> |<|im_start|>user ....|<|im_start|>assistant
        the template's           | a span            | the template's
ids     of the text              | as generated      | of the text
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from radixrt.messages import NO_TENANT, TOKEN_BYTES, ChatPrompt, DropReason, Namespace
from radixrt.tokens.chain import Message, arguments_of, bare
from radixrt.tokens.errors import FieldError
from radixrt.tokens.histories import text_of
from radixrt.tokens.rewriting import REASONING_KEYS
from radixrt.tokens.special_text import ESCAPE, unescaped
from radixrt.tokens.tokenizer import Tokenizer

BEFORE_CHARS = 64
"""An answer is assumed to be at its former place if this many characters before it are unchanged as well."""

MAX_OPENINGS = 64
NOT_FOUND = "it cannot be told from the rest of what the template writes"
RESPELLED = "the template writes its white space, JSON or headers in another way"
KEPT_THINKING = "its thinking is kept, which the template drops"
NO_THINKING = "it has no thoughts, which the template writes in another way"
TEXT_AS_THOUGHTS = "the template writes its text as thoughts, and its thoughts nowhere"
NEXT_MESSAGE = "<|end|><|start|>assistant"
"""What stands between two messages of one answer in Harmony's format."""
THINKING_ENDS = ("</think>", "[/THINK]", "</thinking>", "</reasoning>", "<channel|>", NEXT_MESSAGE)
NO_THOUGHTS = (
    "<think></think>", "<seed:think></seed:think>", "[THINK][/THINK]", "<thinking></thinking>",
    "<reasoning></reasoning>", "<|channel>thought<channel|>", "<|START_THINKING|><|END_THINKING|>",
    "<|inner_prefix|><|inner_suffix|>", f"<|channel|>analysis<|message|>{NEXT_MESSAGE}",
)  # fmt: skip
"""What templates write, or leave out, before an answer that has no thoughts, or whose thoughts they drop; without white
space."""
ENDED = "</think>"
"""The same of prompts that do not begin thoughts and end them."""
_THINKING_BEGIN = re.compile(r"(<\w*:?think\w*>|\[THINK\]|<\|channel>thought)\s*((</think>|<channel\|>)\s*)?$")
_WHITE_SPACE = re.compile(r"\s*")
_HEADER = re.compile(r"( to=[^\s<]+)?<\|channel\|>(\w+)( to=[^\s<]+)?(?: ?(?:<\|constrain\|>)?(\w+))?<\|message\|>")
"""The header of a Harmony message (see `formats.parsing.harmony`): templates write the recipient before the channel,
models after it."""
_UNADDRESSED = re.compile(r"<\|channel\|>(\w+)<\|message\|>(.*)", re.DOTALL)
"""A Harmony message that is no call, without white space: its channel and its text."""


@dataclass(slots=True)
class Answer:
    """An answer as it was generated.

    `body` + `end` is the text of `ids`, special tokens included: `end` is the text of the last token if that is
    special, and `end_id` its id. `offset` is the length of the text of its prompt, after which it began, and `before`
    the end of that text. `respelled` is what the template last wrote in place of `body`. `specials` are the texts of
    the special tokens in `body`, which clients do not see. `arguments` are those of its calls, if they are kept, and
    `issued` says whether all ids of these calls are the server's, not the model's.
    """

    ids: bytes
    body: str
    end: str
    end_id: int | None
    reasoning: str | None
    offset: int
    before: str
    respelled: str | None = None
    specials: tuple[str, ...] = ()
    arguments: tuple[Any, ...] = ()
    issued: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """text[start:end] is replaced by `head`, which is encoded, and `ids`, which end with the special token `end_id`, if
    any."""

    start: int
    end: int
    ids: bytes
    end_id: int | None
    head: str = ""


class Dropped(NamedTuple):
    """An answer that lost its ids, wholly or in part; `note` says why in words."""

    message: int
    reason: DropReason
    note: str

    def __str__(self) -> str:
        return f"message {self.message}: {self.note}"


@dataclass(slots=True)
class Spelling:
    """The spans by the index of their message, notes on what was respelled, and what was dropped."""

    spans: dict[int, Span] = field(default_factory=dict)
    respelled: dict[int, str] = field(default_factory=dict)
    dropped: dict[int, Dropped] = field(default_factory=dict)

    def drop(self, index: int, reason: DropReason, note: str) -> None:
        self.dropped[index] = Dropped(index, reason, note)

    def ordered(self) -> list[Span]:
        return sorted(self.spans.values(), key=lambda span: (span.start, span.end))


class Speller:
    """Finds answers in the texts of one tokenizer's chat template.

    Text outside of spans stays as the template wrote it, and a span replaces only text of the same content: apart from
    white space, the formatting of JSON, empty thoughts and special tokens that the text has nowhere (see `_unseen`),
    and with `keep_thinking` from thinking that the template drops or leaves empty. So the meaning of a prompt is always
    that of the template, wherever spans are found.

    gpt-oss' template cannot write text and thoughts beside a call: it writes the text as thoughts. There, too, an
    answer stands as it was generated.
    """

    def __init__(self, tokenizer: Tokenizer, keep_thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._keep_thinking = keep_thinking
        self._openings: dict[str, str] = {}
        """By namespace and kind of message."""
        self._writes_text_as_thoughts: bool | None = None

    def find(
        self, prompt: ChatPrompt, text: str, answers: Mapping[int, Answer], namespace: Namespace = NO_TENANT
    ) -> Spelling:
        """Find the spans of `answers` (by index of the message) in `text`, which the template rendered for `prompt`,
        a chat in `namespace`."""
        spelling = Spelling()
        answers = {index: _as_seen(answer, text) for index, answer in answers.items()}
        for index, answer in answers.items():
            if not text.endswith(answer.before, 0, answer.offset):
                continue
            if (end := _end_of(answer.body, text, answer.offset)) >= 0:
                self._keep(spelling, index, answer, text, answer.offset, end)
            elif answer.respelled is not None and text.startswith(answer.respelled, answer.offset):
                spelling.respelled[index] = RESPELLED
                self._keep(spelling, index, answer, text, answer.offset, answer.offset + len(answer.respelled))
        others = {index: answer for index, answer in answers.items() if index not in spelling.spans}
        places = self._places(prompt, text, others) if others else {}
        for index, answer in others.items():
            if index in places:
                opening = self._opening(prompt, index, answer, namespace)
                self._judge(spelling, index, answer, prompt, text, opening, *places[index])
            else:
                spelling.drop(index, DropReason.NOT_FOUND, NOT_FOUND)
        self._part(spelling)
        _respace(spelling, answers, text)
        for index in spelling.spans:
            if unseen := _unseen(answers[index], text):
                spelling.respelled.setdefault(index, f"the template leaves out {', '.join(unseen)}")
        return spelling

    def _places(self, prompt: ChatPrompt, text: str, answers: Mapping[int, Answer]) -> dict[int, tuple[int, int]]:
        """Where the template writes these messages: found by rendering marks in place of everything in them or, if the
        template refuses that or then writes what is before otherwise, in place of all but their thinking, or in place
        of their content, or of the arguments of their first call, or of the first one of these."""
        places: dict[int, tuple[int, int]] = {}
        refused = False
        for marked in (_marked, _marked_behind_thoughts, _marked_within, _marked_value):
            others = {index: answer for index, answer in answers.items() if index not in places}
            if others and not (refused and marked is _marked_behind_thoughts):  # thoughts would not change its mind
                found = self._marks(prompt, text, others, marked)
                refused = found is None
                places |= found or {}
        return places

    def _marks(
        self, prompt: ChatPrompt, text: str, answers: Mapping[int, Answer], marked_as: Callable[[Message, str], Message]
    ) -> dict[int, tuple[int, int]] | None:
        """Where the messages are in the text, found by rendering each as `marked_as` returns it with a mark. None if
        the template refuses that.

        marked  ......<|im_start|>assistant\\n MARK <|im_end|>\\n.....      white space before a mark may be its own
        text    ......<|im_start|>assistant (\\n answer) <|im_end|>\\n.....
        """
        nonce = secrets.token_hex(8)
        messages = list(prompt.messages)
        for index in answers:
            messages[index] = marked_as(messages[index], f"turn{nonce}x{index}x")
        try:
            marked = self._tokenizer.apply_chat(msgspec.structs.replace(prompt, messages=messages))
        except FieldError:
            return None
        first, *rest = re.split(rf'(?:\{{"mark":\s*)?"?turn{nonce}x([0-9]+)x"?(?:(?<=")\}})?', marked)
        indices, between = list(map(int, rest[::2])), rest[1::2]
        if indices != sorted(set(indices)) or not text.startswith(first.rstrip()):
            return {}
        places, at = {}, len(first.rstrip())
        for number, (index, behind) in enumerate(zip(indices, between, strict=True), 1):
            core = behind if number == len(indices) else behind.rstrip()
            if number == len(indices):
                end = len(text) - len(core) if text.endswith(core) else -1
            else:
                end = text.find(core, at) if core else -1
            if end < at:
                break
            places[index] = at, end
            at = end + len(core)
        return places

    def _judge(
        self,
        spelling: Spelling,
        index: int,
        answer: Answer,
        prompt: ChatPrompt,
        text: str,
        opening: str,
        at: int,
        end: int,
    ) -> None:
        """Decide whether the ids of an answer replace text[at:end], as which the template writes it, including white
        space of its opening."""
        start, lost = _behind_opening(text, at, end, opening)
        call_ids = _call_ids(prompt.messages[index])
        written, body, whole = (_said(part, call_ids) for part in (text[start:end], answer.body, lost + answer.body))
        if written != whole or _gains_thoughts(text, start, answer):
            for early, late, rest in _around(text, at, end, opening, answer):
                said = _said(rest, ()) + body
                found = _without_no_thoughts(_said(text[early:late], call_ids), said)
                found = found.removeprefix(ENDED) if said.startswith(NO_THOUGHTS) else found
                if found == said or _lacks_thinking(found, said, answer.reasoning) or self._recasts(found, said):
                    start, end, lost, written, whole = early, late, rest, found, said
                    break
        if written == whole:
            if text[start:end] != lost + answer.body:
                self._respell(spelling, index, answer, text, start, end, RESPELLED)
            self._keep(spelling, index, answer, text, start, end, lost)
        elif whole.endswith(written) and whole[: len(whole) - len(written)] in (*NO_THOUGHTS, ENDED):
            spelling.respelled[index] = NO_THINKING
            self._keep(spelling, index, answer, text, start, end, lost)
        elif written == body and not self._keep_thinking:
            spelling.drop(index, DropReason.OPENING, f"the template drops {lost.strip()!r} before it")
            self._keep(spelling, index, answer, text, start, end)
        elif written == body or _lacks_thinking(written, whole, answer.reasoning):
            if self._keep_thinking:
                spelling.respelled[index] = KEPT_THINKING
                self._keep(spelling, index, answer, text, start, end, lost)
            else:
                spelling.drop(index, DropReason.THINKING, "the template drops its thinking")
        elif self._recasts(written, whole):
            self._respell(spelling, index, answer, text, start, end, TEXT_AS_THOUGHTS)
            self._keep(spelling, index, answer, text, start, end, lost)
        elif _is_parted(prompt.messages[index], written, whole):
            self._respell(spelling, index, answer, text, start, end, "the template writes its text and its calls apart")
            self._keep(spelling, index, answer, text, start, end, lost)
        else:
            spelling.drop(index, DropReason.REWRITTEN, "the template writes it differently")

    def _respell(
        self, spelling: Spelling, index: int, answer: Answer, text: str, start: int, end: int, note: str
    ) -> None:
        spelling.respelled[index] = note
        answer.respelled = text[start:end] if start == answer.offset else None

    def _recasts(self, written: str, whole: str) -> bool:
        """Whether `written` is `whole` without its thoughts, and with its text in their place.

        whole    <|channel|>analysis<|message|> thoughts ... <|channel|>commentary<|message|> text ... call
        written  <|channel|>analysis<|message|> text ... call
        """
        (*thoughts, call), (*parts, same) = written.split(NEXT_MESSAGE), whole.split(NEXT_MESSAGE)
        found = [_UNADDRESSED.fullmatch(part) for part in parts]
        said = "".join(match[2] for match in found if match and match[1] != "analysis")
        recast = thoughts == [f"<|channel|>analysis<|message|>{said}"] and bool(said)
        return recast and call == same and all(found) and self._text_goes_with_thoughts()

    def _text_goes_with_thoughts(self) -> bool:
        """Whether the template writes text beside a call as it writes thoughts there, and drops it where it drops
        these. So where it writes such a text, it would write the thoughts. Found once."""
        if self._writes_text_as_thoughts is None:
            try:
                self._writes_text_as_thoughts = all(
                    self._tokenizer.apply_chat(ChatPrompt([*_called(content="mark"), *more]))
                    == self._tokenizer.apply_chat(ChatPrompt([*_called(reasoning_content="mark"), *more]))
                    for more in ((), _DONE)
                )
            except FieldError:
                self._writes_text_as_thoughts = False
        return self._writes_text_as_thoughts

    def _keep(
        self, spelling: Spelling, index: int, answer: Answer, text: str, start: int, end: int, head: str = ""
    ) -> None:
        """Use the ids of an answer for text[start:end], including its end token if the template writes that as well."""
        close = _after_space(text, end)
        if not answer.end:
            spelling.spans[index] = Span(start, end, answer.ids, None, head)
        elif text.startswith(answer.end, close):
            if close > end:
                spelling.respelled[index] = "the template writes white space behind it"
            spelling.spans[index] = Span(start, close + len(answer.end), answer.ids, answer.end_id, head)
        else:  # it ended differently from what the template writes next
            spelling.spans[index] = Span(start, end, answer.ids[:-TOKEN_BYTES], None, head)

    def _opening(self, prompt: ChatPrompt, index: int, answer: Answer, namespace: Namespace) -> str:
        """What the template added where the answer at `index` began; "" if that cannot be determined. Cached by kind of
        message, since most answers begin alike."""
        last = prompt.messages[index - 1]["role"] if index else ""
        kind = repr((namespace.key, last, prompt.tools is None, sorted(prompt.template_args.items())))
        if (opening := self._openings.get(kind)) is None:
            if len(self._openings) >= MAX_OPENINGS:
                self._openings.clear()
            opening = self._openings[kind] = self._found_opening(prompt, index)
        if not answer.before.endswith(opening[-BEFORE_CHARS:]):
            opening = self._found_opening(prompt, index)
        return opening if answer.before.endswith(opening[-BEFORE_CHARS:]) else ""

    def _found_opening(self, prompt: ChatPrompt, index: int) -> str:
        before = msgspec.structs.replace(prompt, messages=prompt.messages[:index], partial=False)
        try:
            without, whole = (self._tokenizer.apply_chat(before, answer_next) for answer_next in (False, True))
        except FieldError:
            return ""
        return whole[len(without) :] if whole.startswith(without) else ""

    def _part(self, spelling: Spelling) -> None:
        """Remove spans that overlap the one before. That happens only with unusual repetitions in a text."""
        at = 0
        for index, span in sorted(spelling.spans.items(), key=lambda item: item[1].start):
            if span.start < at:
                del spelling.spans[index]
                spelling.drop(index, DropReason.NOT_FOUND, NOT_FOUND)
            else:
                at = span.end


def _respace(spelling: Spelling, answers: Mapping[int, Answer], text: str) -> None:
    """Write what is before an answer with the white space of the prompt that it answered: some templates write the last
    message otherwise than when more follow."""
    at = 0
    for index, span in sorted(spelling.spans.items(), key=lambda item: item[1].start):
        before = answers[index].before.removesuffix(span.head)
        if not text.endswith(before, 0, span.start):
            start, head = _spaced(text, span.start, before)
            if start >= at and (start, head) != (span.start, ""):
                spelling.spans[index] = replace(span, start=start, head=head + span.head)
                spelling.respelled.setdefault(index, "the template writes other white space before it")
        at = span.end


def _spaced(text: str, end: int, before: str) -> tuple[int, str]:
    """Where text[:end] begins to be `before` with other white space, and what that says from there; (end, "") if more
    is different."""
    at, to = end, len(before)
    start, kept = end, to
    while to:
        if at and text[at - 1] == before[to - 1]:
            at, to = at - 1, to - 1
            continue
        if at and text[at - 1].isspace():
            at -= 1
        elif before[to - 1].isspace():
            to -= 1
        else:
            return end, ""
        start, kept = at, to
    return start, before[kept:]


def _unseen(answer: Answer, text: str) -> list[str]:
    """Special tokens of an answer that `text` has nowhere: the client did not see them, and the template does not write
    them. Others may mark messages and calls: with them, an answer says something else."""
    return [special for special in answer.specials if special not in text]


def _as_seen(answer: Answer, text: str) -> Answer:
    """The answer without its `_unseen` tokens."""
    body = answer.body
    for special in _unseen(answer, text):
        body = body.replace(special, "")
    return answer if body == answer.body else replace(answer, body=body)


def _end_of(body: str, text: str, at: int) -> int:
    """Where `body` ends in a text that is escaped, if it begins at `at`; -1 if it is not there."""
    end = at + len(body)
    while end < (longer := at + len(body) + text.count(ESCAPE, at, end)):
        end = longer
    end += text.startswith(ESCAPE, end)
    return end if unescaped(text[at:end]) == body else -1


def _after_space(text: str, at: int) -> int:
    found = _WHITE_SPACE.match(text, at)
    return found.end() if found else at


def _behind_opening(text: str, at: int, end: int, opening: str) -> tuple[int, str]:
    """Returns (where an answer begins in text[at:end], the rest of its opening if the template wrote only a part of
    it).

    Before `at` is the template's text, without trailing white space; the opening may end there or in white space after.
    """
    latest = min(_after_space(text, at), end)
    for size in range(len(opening), 0, -1):
        if not opening[:size].strip():
            break
        for start in range(at, latest + 1):
            if text.endswith(opening[:size], 0, start):
                return start, opening[size:]
    return at, ""


def _around(text: str, at: int, end: int, opening: str, answer: Answer) -> Iterator[tuple[int, int, str]]:
    """Where an answer may be if the template writes a part of it outside of text[at:end]: before it the header of a
    message or thoughts, behind it the end of calls of which only the first one's arguments were marked.

    It may begin at its former place, or after the last opening, or after all of that but the beginning of thoughts.
    Yields (where it begins, where it ends, the rest of the opening).
    """
    ends = [end]
    if answer.end and (found := text.find(answer.end, end)) > end:
        ends.append(found)
    if answer.offset < at and text.endswith(answer.before, 0, answer.offset):
        yield from ((answer.offset, late, "") for late in ends)
    header = _THINKING_BEGIN.sub("", opening)
    rest = opening[len(header) :]
    header = header if header.strip() else answer.before.removesuffix(rest)
    for begin, behind in {opening: "", header: rest}.items():
        if begin.strip() and (found := text.rfind(begin, 0, at)) >= 0:
            yield from ((found + len(begin), late, behind) for late in ends)


def _gains_thoughts(text: str, start: int, answer: Answer) -> bool:
    """Whether the template ends thoughts before text[start:] that were not there when the answer began."""
    before = text[max(0, start - BEFORE_CHARS) : start]
    return before.rstrip().endswith("</think>") and not answer.before.rstrip().endswith("</think>")


_DONE: list[Message] = [{"role": "assistant", "content": "done"}, {"role": "user", "content": "more"}]


def _called(**said: str) -> list[Message]:
    """A chat in which a call is answered; the message with the call says something else as well."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": None, "tool_calls": [call]} | said,
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "told"},
    ]


def _without_no_thoughts(written: str, body: str) -> str:
    """`written` without the empty thoughts with which a template begins it, unless `body` begins so as well."""
    if written == body:
        return written
    return next((written[len(none) :] for none in NO_THOUGHTS if written.startswith(none)), written)


def _said(text: str, call_ids: Sequence[str]) -> str:
    """A text in the normal form in which texts are compared: of white space, JSON and headers."""
    text = unescaped(text)
    return bare(_HEADER.sub(_one_header, text) if "<|channel|>" in text else text, call_ids)


def _one_header(match: re.Match[str]) -> str:
    before, channel, behind, kind = match.groups("")
    return f"<|channel|>{channel}{before or behind} {kind}<|message|>"


def _marked(message: Message, mark: str) -> Message:
    return {"role": "assistant", "content": mark}


def _marked_behind_thoughts(message: Message, mark: str) -> Message:
    return _marked(message, mark) | {name: message[name] for name in REASONING_KEYS if name in message}


def _marked_within(message: Message, mark: str) -> Message:
    """A message with the mark as its content, or as the only argument of its first call."""
    return _in_call(message, mark, lambda _: {"arguments": json.dumps({"mark": mark})})


def _marked_value(message: Message, mark: str) -> Message:
    """The same with the mark as the call's first argument, or as its name if it has none: some templates do not write
    arguments as JSON."""

    def marked(function: Message) -> Message:
        given = arguments_of(function.get("arguments"))
        first = list(given)[:1] if isinstance(given, dict) else []
        return {"arguments": json.dumps(given | dict.fromkeys(first, mark))} if first else {"name": mark}

    return _in_call(message, mark, marked)


def _in_call(message: Message, mark: str, marked: Callable[[Message], Message]) -> Message:
    first, *more = message.get("tool_calls") or (None,)
    if not isinstance(first, dict) or not isinstance(first.get("function"), dict):
        return message | {"content": mark}
    return message | {"tool_calls": [first | {"function": first["function"] | marked(first["function"])}, *more]}


def _call_ids(message: Message) -> tuple[str, ...]:
    """Ids of calls that a template may write although the model did not: that of a single call, which is
    unambiguous."""
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
    return (calls[0]["id"],) if len(calls) == 1 and isinstance(calls[0].get("id"), str) else ()


def _is_parted(message: Message, written: str, whole: str) -> bool:
    """Whether `written` is `whole` with something of the template's own between the message's text and its calls."""
    said = bare(text_of(message))
    if not said or not message.get("tool_calls"):
        return False
    before, found, calls = whole.partition(said)
    rest = written.removeprefix(before + said)
    return bool(found and calls) and len(rest) < len(written) and rest.endswith(calls)


def _lacks_thinking(written: str, whole: str, reasoning: str | None) -> bool:
    """Whether `written` is `whole` without its beginning, and that beginning is thinking."""
    if not whole.endswith(written) or len(whole) == len(written):
        return False
    thinking = whole[: len(whole) - len(written)]
    return bool(reasoning and bare(reasoning) in thinking) or thinking.endswith(THINKING_ENDS)
