"""Validates requests of Ollama's API, and converts them to messages. Pure; every error names the field.

Unknown fields and options are ignored; a known one that is not supported, and would change an answer, is refused. What
Ollama needs to load and keep a model (keep_alive, num_ctx, num_gpu, ...) is ignored.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from radixrt.formats.structured import OBJECT, Constraint
from radixrt.formats.tools import NO_TOOLS, ToolUse, tool_use
from radixrt.frontend.generate.request import GenerationRequest, Int, Seed, effort_args, thinking_args
from radixrt.frontend.http.errors import refuse
from radixrt.frontend.ollama.history import History, num_calls
from radixrt.messages import ChatPrompt, Grammar, Prompt, TextPrompt

UNSERVED_OPTIONS = {"mirostat": 0, "tfs_z": 1, "typical_p": 1}
"""Options that would change an answer, with the values that switch them off."""


class Options(msgspec.Struct, kw_only=True):
    """The options of a request, and the fields of GenerationRequest that they are."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = msgspec.field(default=None, name="repeat_penalty")
    max_tokens: Int | None = msgspec.field(default=None, name="num_predict")
    seed: Seed | None = None
    stop: str | list[str] | None = None
    mirostat: float | None = None
    tfs_z: float | None = None
    typical_p: float | None = None


_SHARED = [
    (field, name)
    for field, name in zip(Options.__struct_fields__, Options.__struct_encode_fields__, strict=True)
    if field not in UNSERVED_OPTIONS
]
_OWN_NAMES = {field: f"options.{name}" for field, name in _SHARED}


class Body(GenerationRequest, kw_only=True):
    """The fields of both kinds of request; None counts as absent. A stream is the default."""

    options: Options | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: Any = None
    logprobs: Any = None
    top_logprobs: Any = None

    def __post_init__(self) -> None:
        self.stream = self.stream is not False
        for field, _ in _SHARED if self.options else ():
            if (value := getattr(self.options, field)) is not None:
                setattr(self, field, value)
        # As with Ollama: -1 (and -2) for no limit, and for any seed.
        if self.max_tokens is not None and self.max_tokens < 1:
            self.max_tokens = None
        if self.seed == -1:
            self.seed = None

    def check_served(self) -> None:
        super().check_served()
        for name, off in UNSERVED_OPTIONS.items() if self.options else ():
            if getattr(self.options, name) not in (None, off):
                refuse(f"options.{name}", "is not served")

    def constraint(self) -> Constraint | None:
        if not self.format:
            return None
        if self.format == "json":
            return Constraint(OBJECT, "format")
        if isinstance(self.format, str):
            refuse("format", f"must be 'json' or a JSON schema, not {self.format!r}")
        text = json.dumps(self.format, ensure_ascii=False, separators=(",", ":"))
        return Constraint(Grammar("json_schema", text), "format")

    def template_arguments(self) -> dict[str, Any]:
        """The chat template's arguments: those for `think`, which is true, false, or an effort, and the request's."""
        if isinstance(self.think, bool):
            asked = thinking_args(self.think)
        else:
            asked = effort_args(self.think, "think")
        return asked | (self.template_args or {})

    @property
    def loads(self) -> bool:
        """Whether this asks for nothing but to load the model."""
        raise NotImplementedError

    @property
    def num_calls(self) -> int:
        """The number of calls in its history."""
        return 0


class Chat(Body, kw_only=True):
    """POST /api/chat."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None

    unserved = ("logprobs", "top_logprobs")
    own_names = _OWN_NAMES | {"prompt": "messages"}

    def prompts(self, use: ToolUse) -> list[Prompt]:
        history = History(self.messages or [])
        return [ChatPrompt(history.messages, use.shown, history.partial, self.template_arguments())]

    def tool_use(self) -> ToolUse:
        return tool_use([{"type": "function"} | tool for tool in self.tools or ()], None, None)

    @property
    def loads(self) -> bool:
        return not self.messages

    @property
    def num_calls(self) -> int:
        return num_calls(self.messages or [])


class Generate(Body, kw_only=True):
    """POST /api/generate: a question, or with `raw` a text to be continued."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None
    context: list[Any] | None = None
    suffix: str | None = None
    template: str | None = None

    unserved = ("logprobs", "top_logprobs", "context", "suffix", "template")
    own_names = _OWN_NAMES

    def prompts(self, use: ToolUse = NO_TOOLS) -> list[Prompt]:
        prompt = self.prompt or ""
        if self.images:
            refuse("images", "are not served: this model reads text only")
        if self.raw:
            return [TextPrompt(prompt)]
        said = {"system": self.system, "user": prompt}
        messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in said.items() if text]
        return [ChatPrompt(messages, None, False, self.template_arguments())]

    @property
    def loads(self) -> bool:
        return not self.prompt


class Show(msgspec.Struct, kw_only=True):
    """POST /api/show; `name` is what `model` was called before."""

    model: str | None = None
    name: str | None = None
