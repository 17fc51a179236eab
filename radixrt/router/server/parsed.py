"""Parses answers to chats for clients that take text, as front ends do for theirs: content, reasoning, tool calls."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec

from radixrt.config import RouterConfig
from radixrt.formats.message import AssistantMessage
from radixrt.formats.output import Formats, Output
from radixrt.formats.structured import Constraint
from radixrt.formats.tools import tool_use
from radixrt.messages import ChatMessage, Delta, Generate, Sampling, TokenPrompt
from radixrt.requests.validate import Refused
from radixrt.tokens import OutputProcessor, TextService, Tokenizer
from radixrt.tokens.errors import FieldError

log = logging.getLogger("radixrt.router")


class ChatFormats:
    """The formats of the served model."""

    def __init__(self, text: TextService, config: RouterConfig) -> None:
        """Raises ValueError for the name of a format that there is not."""
        self._formats = Formats(text.tokenizer, config.tool_call_parser, config.reasoning_parser)
        for warning in self._formats.warnings:  # not by front ends as well, of which there may be many
            log.warning("requests with tools: %s", warning)

    async def prepare(
        self, request: Generate, tools: list[dict[str, Any]] | None, partial: bool
    ) -> tuple[Generate, Parsing | None]:
        """Returns (an encoded request of a chat with these tools, with the grammar of tools that are strict; how its
        answers are parsed, if they are). `partial`: an answer continues the last message. Raises FieldError that names
        an invalid tool."""
        assert isinstance(request.prompt, TokenPrompt)
        if not request.text:
            return request, None
        sampling = request.sampling
        try:
            use = tool_use(tools, None, None)
            wanted = Constraint(sampling.grammar, "grammar") if sampling.grammar and use.tools else None
            output = self._formats.output(request.prompt.ids, partial, sampling.skip_special_tokens, use, wanted)
            if use.tools and (grammar := await output.checked_grammar(request.api_key)) is not None:
                request = msgspec.structs.replace(request, sampling=msgspec.structs.replace(sampling, grammar=grammar))
        except FieldError as problem:
            raise Refused(problem.field, str(problem)) from None
        return request, Parsing(output) if output.parses else None


@dataclass(frozen=True, slots=True)
class Parsing:
    """How the answers to one request are parsed."""

    output: Output

    def choice(self, tokenizer: Tokenizer | None, sampling: Sampling) -> ParsedChoice:
        """For one choice."""
        return ParsedChoice(self.output, tokenizer, sampling)


class ParsedChoice:
    """The message of one choice, while it is generated."""

    __slots__ = ("_message", "_output", "_parser")

    def __init__(self, output: Output, tokenizer: Tokenizer | None, sampling: Sampling) -> None:
        self._parser = output.parser()
        self._message = AssistantMessage()
        shown = output.shown(sampling)
        self._output = OutputProcessor(tokenizer, shown, output.hidden_ids) if output.hidden_marks else None
        """Decodes for the parser, if it needs marks that are no text for the client."""

    def take(self, delta: Delta) -> None:
        """Add a delta, which has its text."""
        assert self._parser is not None
        text = delta.text if self._output is None else self._output.take(msgspec.structs.replace(delta))
        for piece in self._parser.push(text):
            self._message.add(piece)

    @property
    def full(self) -> bool:
        """Whether the answer ends here, as Harmony's do with a call."""
        return self._parser is not None and self._parser.full

    def end(self) -> ChatMessage:
        """The message, which is complete."""
        assert self._parser is not None
        for piece in self._parser.finish():
            self._message.add(piece)
        return self._message.whole()
