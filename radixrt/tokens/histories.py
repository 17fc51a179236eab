"""Brings chats into the nearest form that a template takes, and finds what it does not show.

system  system  user  assistant  system  user  user      as a client sends them
system          user  assistant  user                    for a template that takes one system message, and turns
                                                         in turn: merged, moved, joined

Every message is rewritten by itself and what is before it, and nothing is moved up over an answer: a chat's text stays
the beginning of the text one turn later.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from radixrt.tokens.rewriting import Message, functions_of, is_parsed, with_calls
from radixrt.tokens.template_traits import TAKES_ALL, TemplateTraits
from radixrt.tokens.turns import Steps

BREAK = "\n\n"
"""Between the texts of messages that are joined."""
RAW = "arguments"
"""The only key of arguments that are no JSON object, for templates that take nothing else."""
MAX_MISSING = 0.1
"""How many of them, at most, a template may leave out: marks like "/think"."""
STEP_MESSAGES = 512
NEAR_CHARS = 4096
"""How far a text is looked for first: templates write little between messages."""
MAX_WORDS = 64
"""The most words of a text that are looked for if the text is not found as it is."""
_MISTRALS_ID = re.compile("[0-9A-Za-z]{9}")
_WORD = re.compile(r"\w+")
_THOUGHTS_END = re.compile(r"</(?:\w+:)?(?:think|thinking|thought|reasoning)>|\[/THINK\]|<channel\|>")
"""Templates drop what an answer has before its thoughts' end."""


def shaped(
    messages: list[Message], traits: TemplateTraits, tools: list[Any] | None = None, answer_next: bool = False
) -> list[Message]:
    """The messages in a form that a template with these traits takes; `answer_next`: an answer is to follow."""
    if traits is TAKES_ALL:
        return messages
    if not traits.any_ids:
        messages = [_with_short_ids(message) for message in messages]
    if not (traits.any_arguments and traits.objects):
        messages = [_with_taken_arguments(message, traits) for message in messages]
    if traits.names_results:
        messages = _with_names(messages)
    if traits.no_answer:
        messages = [_with_answer(message, traits.no_answer) for message in messages]
    if traits.calls:
        messages = [_with_written_calls(message, traits) for message in messages]
    if not traits.results:
        messages = _as_answers_to_calls(messages)
    if not traits.text_with_calls:
        messages = [part for message in messages for part in _parted(message, traits.no_text)]
    if traits.tools and tools:
        messages = _instructed(messages, _instructions(tools, traits.tools))
    messages = _in_turns(_placed(_behind_results(messages), traits), traits, answer_next)
    return [_settled(message) for message in messages]


def text_of(message: Message) -> str:
    """The text of a message; parts are joined by line feeds."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    if isinstance(content, _Texts):
        return BREAK.join(content)
    texts = (part.get("text") for part in content if isinstance(part, dict))
    return "\n".join(text for text in texts if isinstance(text, str))


# ---------------------------------------------------------------- systems


def _behind_results(messages: list[Message]) -> list[Message]:
    """Instructions and user's messages between calls and their results, behind these."""
    found: list[Message] = []
    between: list[Message] = []
    for message, result_comes in zip(messages, _results_come(messages), strict=True):
        role = message["role"]
        if between and role == "tool":
            found.append(message)
        elif result_comes and role in ("system", "user") and found and _kind(found[-1]) in ("call", "tool"):
            between.append(message)
        else:
            found += [*between, message]
            between = []
    return [*found, *between]


def _results_come(messages: list[Message]) -> list[bool]:
    """Of each message, whether the next one that is no instruction and no user's is a tool's."""
    found: list[bool] = []
    comes = False
    for message in reversed(messages):
        found.append(comes)
        if message["role"] not in ("system", "user"):
            comes = message["role"] == "tool"
    return found[::-1]


def _placed(messages: list[Message], traits: TemplateTraits) -> list[Message]:
    """System messages where the template takes them. Others are told in a user's turn: the first ones as they are,
    later ones marked as reminders."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    leading, rest = messages[:first], messages[first:]
    pending: list[str] = []
    if leading and not traits.system:
        pending, leading = [*map(text_of, leading)], []
    elif len(leading) > 1 and not traits.systems:
        leading = [leading[0] | {"content": BREAK.join(map(text_of, leading))}]
    found = list(leading)
    for message in rest:
        if message["role"] == "system" and not traits.later_systems:
            last = found[-1]["role"] if found and not pending else ""
            if last == "user" or (last == "tool" and not traits.reminders_follow_tools):
                found[-1] = _joined(found[-1], reminder(text_of(message)))
            else:
                pending.append(reminder(text_of(message)))
            continue
        if pending:
            found.append({"role": "user", "content": _Texts(pending)})
            pending = []
            if message["role"] == "user":
                found[-1] = _joined(found[-1], text_of(message))
                continue
        found.append(message)
    return [*found, {"role": "user", "content": _Texts(pending)}] if pending else found


def reminder(text: str) -> str:
    """A system message's text in a user's turn, in the form in which coding agents send theirs."""
    return text if text.lstrip().startswith("<system-reminder>") else f"<system-reminder>\n{text}\n</system-reminder>"


class _Texts(list[str]):
    """A content of several texts, which are joined at last: at once, since there may be thousands."""


def _joined(message: Message, text: str) -> Message:
    if isinstance(message.get("content"), _Texts):
        message["content"].append(text)
        return message
    before = text_of(message)
    return message | {"content": _Texts([before, text] if before else [text])}


def _settled(message: Message) -> Message:
    return message | {"content": text_of(message)} if isinstance(message.get("content"), _Texts) else message


# ---------------------------------------------------------------- turns


def _in_turns(messages: list[Message], traits: TemplateTraits, answer_next: bool) -> list[Message]:
    """The chat without the refused pairs of messages. A user's text is joined to the user's or the tool's before it; a
    user's turn without text stands between other messages."""
    if not (traits.refused or traits.needs_user):
        return messages
    found: list[Message] = []
    last = "start"
    for message in messages:
        kind = _kind(message)
        if traits.needs_user and last in ("start", "system") and kind not in ("system", "user"):
            found += [{"role": "user", "content": traits.filler}, message]
        elif (last, kind) not in traits.refused:
            found.append(message)
        elif kind == "user":
            if last == "call":
                found += [_unanswered(call) for call in found[-1]["tool_calls"]]
            if last == "call" and ("tool", "user") not in traits.refused:
                found.append(message)
            else:
                found[-1] = _joined(found[-1], text_of(message))
                kind = _kind(found[-1])
        else:
            found += [{"role": "user", "content": traits.filler}, message]
        last = kind
    ends = last == "assistant" and ("assistant", "assistant") in traits.refused
    if answer_next and (ends or (last == "system" and traits.needs_user)):
        found.append({"role": "user", "content": traits.filler})
    return found


def _kind(message: Message) -> str:
    return "call" if message["role"] == "assistant" and message.get("tool_calls") else message["role"]


def _with_answer(message: Message, text: str) -> Message:
    empty = _kind(message) == "assistant" and not message.get("content")
    return message | {"content": text} if empty else message


def _unanswered(call: Any) -> Message:
    found: Message = {"role": "tool", "content": ""}
    if isinstance(call, dict) and "id" in call:
        found["tool_call_id"] = call["id"]
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        found["name"] = call["function"].get("name")
    return found


# ---------------------------------------------------------------- calls and results


def _with_written_calls(message: Message, traits: TemplateTraits) -> Message:
    """An answer with its calls as text."""
    if not message.get("tool_calls") or traits.calls is None:
        return message
    text = text_of(message)
    written = with_calls(message | {"content": f"{text}\n" if text else ""}, traits.calls)
    return {key: value for key, value in written.items() if key != "tool_calls"}


def _as_answers_to_calls(messages: list[Message]) -> list[Message]:
    """Results as user's turns, those in a row in one."""
    found: list[Message] = []
    last = ""
    for message in messages:
        role = message["role"]
        if role == "tool":
            text = f"<tool_response>\n{text_of(message)}\n</tool_response>"
            if last == "tool":
                found[-1] = _joined(found[-1], text)
            else:
                found.append({"role": "user", "content": _Texts([text])})
        else:
            found.append(message)
        last = role
    return found


def _parted(message: Message, no_text: str | None) -> list[Message]:
    """An answer's text and its calls in messages of their own."""
    if not message.get("tool_calls") or not text_of(message).strip():
        return [message]
    said = {key: value for key, value in message.items() if key != "tool_calls"}
    return [said, {"role": "assistant", "content": no_text, "tool_calls": message["tool_calls"]}]


def _with_names(messages: list[Message]) -> list[Message]:
    """Results with the names of their functions."""
    names: dict[Any, Any] = {}
    found = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            if isinstance(call, dict) and isinstance(call.get("function"), dict):
                names[call.get("id")] = call["function"].get("name")
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message = message | {"name": names[message["tool_call_id"]]}
        found.append(message)
    return found


def short_id(call_id: str) -> str:
    """The id of a call in nine letters and digits, as Mistral's templates require; such ones stay as they are."""
    return (
        call_id
        if _MISTRALS_ID.fullmatch(call_id)
        else hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]
    )


def _with_short_ids(message: Message) -> Message:
    if isinstance(told := message.get("tool_call_id"), str):
        return message | {"tool_call_id": short_id(told)}
    if not message.get("tool_calls"):
        return message
    calls = [
        call | {"id": short_id(call["id"])} if isinstance(call, dict) and isinstance(call.get("id"), str) else call
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _with_taken_arguments(message: Message, traits: TemplateTraits) -> Message:
    if not message.get("tool_calls"):
        return message
    return message | {"tool_calls": [_with_taken(call, traits) for call in message["tool_calls"]]}


def _with_taken(call: Any, traits: TemplateTraits) -> Any:
    """A call whose arguments are JSON or an object, as the template takes them; others become an object's only value
    where it takes nothing else."""
    function = call.get("function") if isinstance(call, dict) else None
    given = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or (isinstance(given, str) and (traits.any_arguments or _is_object(given))):
        return call
    if not isinstance(given, dict) and not traits.any_arguments:
        given = {} if isinstance(given, str) and given.strip() in ("", "null") else {RAW: given}
    as_object = isinstance(given, dict) and traits.objects
    arguments = given if as_object else json.dumps(given, ensure_ascii=False)
    return call | {"function": function | {"arguments": arguments}}


def _is_object(arguments: Any) -> bool:
    if not isinstance(arguments, str) or not is_parsed(arguments):
        return False
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _instructed(messages: list[Message], text: str) -> list[Message]:
    if messages[0]["role"] == "system":
        return [messages[0] | {"content": f"{text_of(messages[0])}{BREAK}{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _instructions(tools: list[Any], form: str) -> str:
    """Tools as text, for templates that do not show them."""
    shown = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in functions_of(tools))
    return f"You may call these functions:\n<tools>\n{shown}\n</tools>\nA call of a function is written so:\n{form}"


# ---------------------------------------------------------------- the check


def first_lost(messages: Sequence[Message], text: str, traits: TemplateTraits = TAKES_ALL) -> Steps[int | None]:
    """The index of the first message whose text is not in the text that a template rendered; None if all are. In steps.

    Templates trim texts, write them as JSON, and drop thoughts. Calls, and texts beside them, are not looked for: a
    template may show them as thoughts.
    """
    at = 0
    forgotten = "tool" if traits.forgets_results else None
    for index, message in enumerate(messages):
        if index % STEP_MESSAGES == STEP_MESSAGES - 1:
            yield None
        if (message["role"] == "assistant" and message.get("tool_calls")) or message["role"] == forgotten:
            continue
        said = text_of(message)
        if message["role"] == "assistant" and (ends := list(_THOUGHTS_END.finditer(said))):
            said = said[ends[-1].end() :]
        for part in _parts(message, said):
            if (found := _found(part, text, at)) < 0:
                return index
            at = max(at, found)
    return None


def _parts(message: Message, said: str) -> list[str]:
    """The texts of a message that templates may write apart."""
    content = message.get("content")
    if not isinstance(content, list) or message["role"] == "assistant":
        return [said]
    return [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _found(said: str, text: str, at: int) -> int:
    """Where a message's text ends in `text`, searched from `at` and then from the start; -1: it is not there."""
    said = said.strip()
    forms: tuple[Callable[[str], str], ...] = (str, _as_json, _as_ascii)
    near = at + 2 * len(said) + NEAR_CHARS
    for start, end in ((at, near), (at, len(text)), (0, len(text))):
        for write in forms:
            form = write(said)
            if (found := text.find(form, start, end)) >= 0:
                return found + len(form)
    return at if _has_words(said, text[at:near]) or _has_words(said, text) else -1


def _has_words(said: str, text: str) -> bool:
    """Whether the words of `said`, or almost all, are in `text`, in their order."""
    words = _WORD.findall(said.casefold())
    some, text = words[:: len(words) // MAX_WORDS + 1], text.casefold()
    at = missing = 0
    for word in some:
        if (found := text.find(word, at)) >= 0:
            at = found + len(word)
        else:
            missing += 1
    return MAX_MISSING * len(some) >= missing


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_ascii(text: str) -> str:
    return json.dumps(text)[1:-1]
