"""What a chat template takes: found once, by rendering small chats whose texts are unique marks.

roles, orders, calls, results, arguments, ids, fields of tools  --probe-->  TemplateTraits
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from radixrt.tokens.errors import FieldError, Unbounded
from radixrt.tokens.rewriting import STYLES, Message, Style
from radixrt.tokens.tool_fields import OPTIONAL, TOOL

Render = Callable[[list[Message], list[Any] | None, bool], str]
"""(messages, tools, answer_next) -> text; raises FieldError if the template refuses them."""
Pair = tuple[str, str]
"""The kinds of two messages in a row: "start", "system", "user", "assistant", "call" (an assistant's message with
calls) or "tool"."""

HERMES = STYLES["<tool_call>"]
_NAME, _CALL_ID, _FOREIGN_ID = "bash", "abcdefghi", "call_0123456789"
_HEADER_CHARS = 8
"""So many characters before an answer tell under which role it stands."""
_SAID = {"user": "U", "assistant": "A", "system": "S", "tool": "R"}


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template takes. By default everything, so that nothing is rewritten."""

    system: bool = True
    """A system message at the start."""
    systems: bool = True
    """Several of them there."""
    later_systems: bool = True
    """System messages anywhere, each shown at its place."""
    refused: frozenset[Pair] = frozenset()
    """Kinds of messages that must not follow each other."""
    needs_user: bool = False
    """A chat without a user's message is refused."""
    reminders_follow_tools: bool = True
    """A user's turn may follow a tool's result, and nothing before it changes."""
    filler: str = ""
    """The text of a user's turn that stands for none."""
    no_answer: str = ""
    """The content of an answer that is empty."""
    calls: Style | None = None
    """How calls are written as text, where the template does not write them; None: it does."""
    results: bool = True
    """Messages of tools."""
    forgets_results: bool = False
    """It leaves them out after the next user's message, as Mistral's 7B v0.3 was trained."""
    text_with_calls: bool = True
    """An answer with text and calls in one message."""
    any_arguments: bool = True
    """Arguments that are a string, and no JSON."""
    objects: bool = False
    """Arguments may be an object rather than its JSON."""
    any_ids: bool = True
    """Ids of calls other than nine letters and digits."""
    names_results: bool = False
    """A tool's message needs the `name` of its function."""
    no_text: str | None = ""
    """The content of an answer that has only calls."""
    parts: frozenset[str] = frozenset(("system", "user", "assistant"))
    """The roles whose content may be a list of parts."""
    tools: str = ""
    """If tools are not shown: how a call is written, for the instructions that show them; "": they are shown."""
    tool_fields: frozenset[str] = frozenset()
    """Optional fields of tools that are needed, by their names in `tool_fields.OPTIONAL`."""


TAKES_ALL = TemplateTraits()


def probe(render: Render, tools: bool) -> TemplateTraits:
    """The traits of a template, for chats with or without tools. One that does not even show a user's message takes
    everything: whatever it refuses is refused. Raises Unbounded."""
    prober = _Prober(render, [TOOL] if tools else None)
    if not prober.shows("U") and tools:  # it does not show any chat with these tools, or none without a system message
        prober = _Prober(render, None)
    return prober.traits(tools) if prober.shows("U") else TAKES_ALL


class _Prober:
    """Chats are written by a letter for each message: System, User, Assistant, a Call (without content; with Empty
    content; with Text), a Result.

    "UCR" -> [user "mark0x", assistant with a call of an argument "mark1x", tool "mark2x"]
    """

    def __init__(self, render: Render, tools: list[Any] | None) -> None:
        self._render, self._tools = render, tools
        self._seen: dict[str, bool] = {}

    def traits(self, tools: bool) -> TemplateTraits:
        system = all(map(self.shows, ("SU", "SUA", "SUAU")))
        calls = self.shows("UCR") and self._shows_call("UCR")
        results = calls or (self.shows("UARAU") and not self._shows_call("UCR"))
        refused = self._refused(system, calls, results)
        return TemplateTraits(
            system=system,
            systems=system and self.shows("SSU"),
            later_systems=system and self._takes_later_systems(calls),
            refused=refused,
            needs_user=not all(map(self.shows, ("A", "S", "SA") if system else ("A",))),
            reminders_follow_tools=not results or (("tool", "user") not in refused and self._keeps_thoughts()),
            filler="" if self._shown(_said("UAU", empty=0)) else ".",
            no_answer=next((text for text in ("", " ") if self._takes_answer(text)), "."),
            calls=None if calls else HERMES,
            results=results,
            forgets_results=calls and not self.shows("UCRAU"),
            text_with_calls=not calls or (self.shows("UTR") and self._shows_call("UTR")) or not self.shows("UACR"),
            any_arguments=not calls or self._shown(_said("UCR", arguments='{"command": "{}'), "1"),
            objects=calls and self._shows_objects(),
            any_ids=not calls or self._shown(_said("UCR", call_id=_FOREIGN_ID)),
            no_text="" if self._shown(_said("UE"), "1") else None,
            parts=frozenset(role for role, chat in _PARTED.items() if self._shows_parts(chat)),
            names_results=results and calls and not self._shown(_said("UCR", name=None)),
            tools=self._call_form(calls) if tools and not self._shows_tool(TOOL) else "",
            tool_fields=frozenset(name for name, (tool, _) in OPTIONAL.items() if tools and self._needs(tool)),
        )

    def shows(self, chat: str) -> bool:
        """Whether the texts of a chat come out in their order."""
        if chat not in self._seen:
            self._seen[chat] = self._shown(_said(chat))
        return self._seen[chat]

    def _refused(self, system: bool, calls: bool, results: bool) -> frozenset[Pair]:
        chats: dict[Pair, bool] = {
            ("user", "user"): self.shows("UUA"),
            ("start", "assistant"): self.shows("AU") and self._is_answer("AU", 0),
            ("assistant", "assistant"): self.shows("UAAU"),
        }
        if system:
            chats["system", "assistant"] = self.shows("SAU") and self._is_answer("SAU", 1)
        if results:
            chats["tool", "user"] = self.shows("UCRUA" if calls else "UARUA")
        if calls:
            chats |= {("call", "user"): self.shows("UCUA"), ("start", "call"): self.shows("CRU")}
            chats |= {
                ("assistant", "call"): self.shows("UACR") and self.shows("UACRA"),
                ("call", "assistant"): self.shows("UCAU"),
            }
            chats["system", "call"] = not system or self.shows("SCRU")
            chats["call", "call"] = self.shows("UCCR")
        return frozenset(pair for pair, taken in chats.items() if not taken)

    def _takes_later_systems(self, calls: bool) -> bool:
        """Whether they come out at their places, and leave what is before as it was."""
        pairs = [("USU", "UA", 0), ("UASU", "UAU", 1), ("UAUS", "UAUA", 2), ("UAUSSAU", "UAUAU", 2)]
        pairs += [("UCRSA", "UCRA", 2)] * calls
        return all(self.shows(chat) and self._alike(_said(chat), _said(without), at) for chat, without, at in pairs)

    def _alike(self, one: list[Message], other: list[Message], number: int) -> bool:
        """Whether the texts of two chats are the same up to a mark."""
        begun, mark, _ = self._text(one).partition(f"mark{number}x")
        return bool(mark) and self._text(other).startswith(begun + mark)

    def _is_answer(self, chat: str, at: int) -> bool:
        """Whether the message `at` stands under the same header as an answer to a user."""
        usual = self._text(_said("UAU")).partition("mark0x")[2].partition("mark1x")[0]
        before = self._text(_said(chat)).partition(f"mark{at}x")[0].rpartition("mark0x")[2]
        header = os.path.commonprefix([usual[::-1], before[::-1]])
        return len(header) >= min(_HEADER_CHARS, len(usual), len(before))

    def _shows_call(self, chat: str) -> bool:
        return self._shown(_said(chat), "1")

    def _keeps_thoughts(self) -> bool:
        """Whether a user's message after a tool's result leaves what is before as it was."""
        before, more = (_said(chat) for chat in ("UCR", "UCRU"))
        before[1]["reasoning_content"] = more[1]["reasoning_content"] = before[1]["thinking"] = "thought"
        more[1]["thinking"] = "thought"
        return self._alike(before, more, 2)

    def _call_form(self, calls: bool) -> str:
        """A call as the template writes it, or else as text."""
        if calls:
            called = _said("UC", arguments='{"argument": "value"}')
            called[1]["tool_calls"][0]["function"]["name"] = "function_name"
            chats = [called, _said("UA"), _said("U")]
            written, said, asked = (self._text(chat, answer_next=chat is chats[2]) for chat in chats)
            begin = len(os.path.commonprefix([written, asked]).rstrip("<[{"))
            end = len(written) - len(os.path.commonprefix([written[::-1], said[::-1]]).rstrip(">]}"))
            if "function_name" in (form := written[begin:end].strip()):
                return form
        before, behind = HERMES.before, HERMES.behind
        return f'{before}{{"name": "function_name", "arguments": {{"argument": "value"}}}}{behind}'

    def _takes_answer(self, text: str) -> bool:
        messages = _said("UAU")
        messages[1]["content"] = text
        return bool(self._text(messages))

    def _shows_objects(self) -> bool:
        messages = _said("UCR")
        messages[1]["tool_calls"][0]["function"]["arguments"] = {"command": "mark1x"}
        return self._shown(messages, "1")

    def _shows_parts(self, chat: str) -> bool:
        messages = _said(chat)
        for message in messages:
            mark = message["content"]
            message["content"] = [{"type": "text", "text": mark}, {"type": "text", "text": f"more{mark}"}]
        text, kinds = self._text(messages), self._text(_said(chat)).count("type")
        shown = (text.count(f"mark{number}x") == 2 for number in range(len(chat)))
        return bool(text) and all(shown) and text.count("type") <= kinds

    def _needs(self, tool: Any) -> bool:
        return self._shows_tool(TOOL) and not self._shows_tool(tool)

    def _shows_tool(self, tool: Any) -> bool:
        try:
            text = self._render(_said("U"), [tool], True)
        except Unbounded:
            raise
        except FieldError:
            return False
        properties = (tool["function"].get("parameters") or {}).get("properties") or {}
        return all(name in text for name in (_NAME, *(properties if isinstance(properties, dict) else ())))

    def _shown(self, messages: list[Message], *more: str) -> bool:
        """Whether the texts come out in order, and `more` marks, by their numbers, somewhere."""
        text = self._text(messages)
        at = [text.find(message["content"]) for message in messages if message["content"]]
        return bool(text) and -1 not in at and at == sorted(at) and all(f"mark{mark}x" in text for mark in more)

    def _text(self, messages: list[Message], answer_next: bool = True) -> str:
        try:
            return self._render(messages, self._tools, answer_next)
        except Unbounded:
            raise
        except FieldError:
            return ""


def _said(
    chat: str,
    *,
    empty: int | None = None,
    arguments: str = "",
    call_id: str = _CALL_ID,
    name: str | None = _NAME,
) -> list[Message]:
    """The messages of a chat; see _Prober. `empty` has no text."""
    found: list[Message] = []
    for number, letter in enumerate(chat):
        mark = "" if number == empty else f"mark{number}x"
        match letter:
            case "C" | "E" | "T":
                given = arguments or '{"command": "{}"}'
                function = {"name": _NAME, "arguments": given.replace("{}", mark)}
                calls = [{"id": call_id, "type": "function", "function": function}]
                found.append(
                    {
                        "role": "assistant",
                        "content": {"C": None, "E": "", "T": f"text{number}x"}[letter],
                        "tool_calls": calls,
                    }
                )
            case "R":
                found.append(
                    {"role": "tool", "content": mark, "tool_call_id": call_id} | ({"name": name} if name else {})
                )
            case _:
                found.append({"role": _ROLES[letter], "content": mark})
    return found


_PARTED = {"user": "U", "system": "SU", "assistant": "UAU"}
_ROLES = {letter: role for role, letter in _SAID.items()}
