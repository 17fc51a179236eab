"""How answers are constrained and parsed: tools, grammars and reasoning in the formats of one model.

ToolUse, Constraint ──Formats.output──> Output: the Grammar that the worker follows, the parser of each choice
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from radixrt.formats.parsing import (
    OFFER,
    PROBE,
    QUESTION,
    Framed,
    Harmony,
    OutputParser,
    ReasoningFormat,
    Thinking,
    ToolFormat,
    either,
    reasoning_format,
    tool_format,
)
from radixrt.formats.parsing.llama import Llama
from radixrt.formats.structured import Constraint
from radixrt.formats.tools import NO_TOOLS, ToolUse
from radixrt.messages import TOKEN_BYTES, Grammar, Sampling
from radixrt.requests.grammar import check_aside
from radixrt.tokens import Tokenizer
from radixrt.tokens.errors import FieldError
from radixrt.tokens.stops import Quiet

UNSHOWN = "the chat template does not show tools to the model: its instructions tell of them"
UNREAD = "the format of the model's tool calls is not known (--tool-call-parser), so calls are content"
TAIL_TOKENS = 16
"""The last tokens of a prompt in which marks that open or close thoughts are looked for."""


@dataclass(frozen=True, slots=True)
class Output:
    """How the choices of one request are parsed; by default as text only."""

    tools: ToolFormat | None = None
    use: ToolUse = NO_TOOLS
    reasoning: ReasoningFormat | None = None
    thinking: Thinking = "no"
    grammar: Grammar | None = None
    field: str = ""
    """The field of the request that the grammar comes from."""
    warnings: tuple[str, ...] = ()
    """What the client should know about its tools and schemas."""
    hidden_ids: frozenset[int] = frozenset()
    """Special tokens that never become text. All others do, since a parser needs them."""
    hidden_marks: frozenset[str] = frozenset()
    """Marks that are special tokens: passed to the parser, never to the client."""

    @property
    def parses(self) -> bool:
        return self.tools is not None or self.thinking != "no"

    @property
    def quiet(self) -> Quiet | None:
        """The thoughts, in which no stop string ends an answer: they often hold what the answer will."""
        if self.reasoning is not None and self.thinking != "no":
            return Quiet(self.reasoning.open + self.reasoning.title, self.reasoning.close, self.thinking == "open")
        thoughts = self.tools.thoughts if isinstance(self.tools, Harmony) else None
        return Quiet(*thoughts, anywhere=True) if thoughts else None

    @property
    def ends_early(self) -> bool:
        """Whether the parser may end an answer before the worker does: Harmony's ends with a call."""
        if self.tools is None or not self.use.tools:
            return False
        return not self.use.parallel or isinstance(self.tools, Harmony)

    def parser(self) -> OutputParser | None:
        """A new parser for one choice; None if everything is content."""
        if not self.parses:
            return None
        most_calls = None if self.use.parallel else 1
        functions, hidden = self.use.functions, self.hidden_marks
        return OutputParser(self.tools, functions, self.reasoning, self.thinking, hidden, most_calls)

    def shown(self, sampling: Sampling) -> Sampling:
        """`sampling` for decoding the text that the parser gets."""
        return msgspec.structs.replace(sampling, skip_special_tokens=False) if self.hidden_marks else sampling

    async def checked_grammar(self, key: str = "") -> Grammar | None:
        """The grammar, of the client with this API key. Raises FieldError if it cannot be compiled, which names the
        cause, a tool's schema for example."""
        if self.grammar is None:
            return None
        try:
            await check_aside(self.grammar, self.field, key)
        except FieldError:
            for tool in self.use.tools:
                if not tool.strict:
                    continue
                part = Grammar("json_schema", json.dumps(tool.schema, ensure_ascii=False))
                await check_aside(part, tool.schema_field, key)
            raise
        return self.grammar


TEXT = Output()


class Formats:
    """The formats of the served model, as detected from its chat template or as configured."""

    def __init__(self, tokenizer: Tokenizer | None, tool_call_parser: str = "auto", reasoning_parser: str = "auto"):
        rendered = probe_text(tokenizer)
        self.tools = tool_format(tool_call_parser, rendered)
        reasoning = reasoning_format(reasoning_parser, rendered)
        # Harmony parses thoughts and calls together, even if only one of them is wanted.
        thoughts = isinstance(reasoning, Harmony)
        self.reasoning = None if isinstance(reasoning, Harmony) else reasoning
        self._no_calls = thoughts and self.tools is None
        if self._no_calls or isinstance(self.tools, Harmony):
            self.tools = Harmony(thoughts)
        self._tokenizer = tokenizer
        self._unshown = tokenizer is not None and not tokenizer.shows_tools
        self.warnings = self._warnings(forced=False) if rendered else ()
        """What is to be known of chats with tools."""
        self._special_ids = tokenizer.special_ids if tokenizer else frozenset()

    @property
    def reads_calls(self) -> bool:
        """Whether tools are shown to the model, and its calls are parsed."""
        return not self._no_calls and not self._warnings(forced=False)

    @property
    def reads_thoughts(self) -> bool:
        """Whether the model's thoughts are told apart from its answers."""
        return self.reasoning is not None or (isinstance(self.tools, Harmony) and self.tools.thoughts is not None)

    def output(
        self, prompt: bytes, partial: bool, skips_special: bool, use: ToolUse, wanted: Constraint | None
    ) -> Output:
        """How answers to a chat are constrained and parsed. `prompt` are its ids; `partial`: the answer continues its
        last message."""
        thinking = self._thinking(prompt, partial)
        use = NO_TOOLS if self._no_calls and not use.forced else use
        tools = self._tools(use, prompt, partial)
        grammar, field = self._grammar(tools, use, wanted, thinking)
        warnings = self._warnings(bool(use.forced)) if use.tools else ()
        if tools is not None and use.forced:
            unenforced = tuple(at for tool in use.forced for at in tool.unenforced(tools.arguments))
        else:
            unenforced = wanted.unenforced if wanted else ()
        if unenforced:
            warnings = (*warnings, f"not enforced: {', '.join(unenforced)}")
        if malformed := [f"{tool.schema_field}{at}" for tool in use.tools for at in tool.malformed]:
            warnings = (*warnings, f"malformed, and left out: {', '.join(malformed)}")
        output = Output(tools, use, self.reasoning, thinking, grammar, field, warnings)
        if not output.parses or not skips_special:
            return output
        marks = [
            *(tools.marks if tools else ()),
            *(self.reasoning.marks if thinking != "no" and self.reasoning else ()),
        ]
        special = self._special(marks)
        if not special:
            return output
        hidden_ids, hidden_marks = self._special_ids - special.keys(), frozenset(special.values())
        return replace(output, hidden_ids=hidden_ids, hidden_marks=hidden_marks)

    def _warnings(self, forced: bool) -> tuple[str, ...]:
        unread = self.tools is None and not forced
        return (UNSHOWN,) * self._unshown + (UNREAD,) * unread

    def _tools(self, use: ToolUse, prompt: bytes, partial: bool) -> ToolFormat | None:
        if isinstance(self.tools, Harmony):  # answers have channels even if there are no tools
            return self.tools.after(self._tail(prompt), partial)
        if not use.tools:
            return self.tools if isinstance(self.tools, Framed) else None
        # A model without a format of its own is made to write the simplest one.
        return self.tools or (Llama() if use.forced else None)

    def _tail(self, prompt: bytes) -> str:
        if self._tokenizer is None:
            return ""
        tail = np.frombuffer(prompt[-TAIL_TOKENS * TOKEN_BYTES :], "<i4").tolist()
        return self._tokenizer.decode(tail, skip_special_tokens=False)

    def _special(self, marks: Sequence[str]) -> dict[int, str]:
        if self._tokenizer is None:
            return {}
        ids = {self._tokenizer.token_id(mark): mark for mark in marks}
        return {i: mark for i, mark in ids.items() if i in self._special_ids}

    def _thinking(self, prompt: bytes, partial: bool) -> Thinking:
        if self.reasoning is None or self._tokenizer is None:
            return "no"
        thinking = self.reasoning.after(self._tail(prompt))
        return "no" if partial and thinking == "may" else thinking

    def _grammar(
        self, tools: ToolFormat | None, use: ToolUse, wanted: Constraint | None, thinking: Thinking
    ) -> tuple[Grammar | None, str]:
        """The grammar of an answer, and the field that it comes from."""
        if tools is not None and use.forced:
            # `wanted` constrains the text, and with forced calls there is none.
            form = tools.forced([tool.function(tools.arguments) for tool in use.forced], use.parallel)
            return self._tagged(form, thinking), "tool_choice"
        if wanted is not None:
            if thinking == "no" and tools is None:
                return wanted.grammar, wanted.field
            form = wanted.as_format()
            if isinstance(tools, Framed):
                form = tools.with_text(form)
            if tools is not None and use.tools:
                calls = tools.forced([tool.function(tools.arguments, loose=True) for tool in use.tools], use.parallel)
                form = either(calls, form)
            return self._tagged(form, thinking), wanted.field
        strict = [tool for tool in use.tools if tool.strict]
        if tools is not None and (strict or use.limited):
            form = tools.free([tool.function(tools.arguments, loose=True) for tool in use.tools], use.parallel)
            return self._tagged(form, thinking), f"{strict[0].field}.strict" if strict else "tool_choice"
        return None, ""

    def _tagged(self, form: dict[str, Any], thinking: Thinking) -> Grammar:
        if self.reasoning is not None:
            form = self.reasoning.before(thinking, form)
        tag = {"type": "structural_tag", "format": form}
        return Grammar("structural_tag", json.dumps(tag, ensure_ascii=False, separators=(",", ":")))


def probe_text(tokenizer: Tokenizer | None) -> str:
    """The chat template's text for a chat with a call and a thought, for one with a tool, and for a question; "" for
    what it refuses."""
    if tokenizer is None:
        return ""
    texts = []
    for probe in (PROBE, OFFER, QUESTION):
        with contextlib.suppress(FieldError):
            texts.append(tokenizer.apply_chat(probe))
    return "\n".join(texts)
