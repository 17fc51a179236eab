"""Which formats a model uses: told by name, or seen in what its chat template makes of a call and a thought."""

from __future__ import annotations

import re

from radixrt.frontend.parsing.formats import ToolFormat
from radixrt.frontend.parsing.harmony import Harmony
from radixrt.frontend.parsing.hermes import Hermes
from radixrt.frontend.parsing.llama import Llama
from radixrt.frontend.parsing.mistral import Mistral
from radixrt.frontend.parsing.thoughts import ReasoningFormat
from radixrt.messages import ChatPrompt

TOOL_FORMATS: dict[str, type[Harmony] | type[Hermes] | type[Llama] | type[Mistral]] = {
    "hermes": Hermes,
    "qwen25": Hermes,
    "llama3_json": Llama,
    "llama3": Llama,
    "mistral": Mistral,
    "openai": Harmony,
    "gpt-oss": Harmony,
}
THINK = ReasoningFormat("<think>", "</think>")
REASONING_FORMATS = {
    "deepseek_r1": THINK,
    "deepseek-r1": THINK,
    "qwen3": THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}
HARMONY = ("openai_gptoss", "gpt-oss")
"""Thoughts that calls' format reads."""
"""By the names of vLLM and SGLang."""

_NAME, _ID = "probe_tool", "abcdefghi"
_FUNCTION = {"name": _NAME, "description": "-", "parameters": {"type": "object", "properties": {}}}
_CALL = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": '{"probe": 1}'}}
PROBE = ChatPrompt(
    [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": "", "reasoning_content": "-", "tool_calls": [_CALL]},
        {"role": "tool", "content": "-", "tool_call_id": _ID, "name": _NAME},
    ],
    [{"type": "function", "function": _FUNCTION}],
)
"""A chat with all that a template may have a form for; ids of nine letters and digits, as Mistral's want them."""
QUESTION = ChatPrompt([{"role": "user", "content": "-"}])
"""Some templates begin a thought only where the user has spoken last, and some refuse tools."""

_MISTRAL = re.compile(r'(\[TOOL_CALLS\]\s*\[)\s*\{\s*"name":\s*"probe_tool"')
_MISTRAL_EACH = re.compile(r"\[TOOL_CALLS\]\s*probe_tool")
_HERMES = re.compile(r'<tool_call>\s*\{\s*"(name":\s*"probe_tool"|arguments":\s*\{)')
_HARMONY = re.compile(r"<\|start\|>(system|developer|user)<\|message\|>")
_LLAMA = re.compile(r'\{\s*"name":\s*"probe_tool",\s*"parameters":\s*"?\{\\?"probe')


def tool_format(name: str, rendered: str) -> ToolFormat | None:
    """The format `name`; with "auto" the one that `rendered`, the template's text of PROBE, shows; None without one.
    ValueError names an unknown one."""
    found = _seen(rendered)
    if name == "auto":
        return found
    if name in ("none", ""):
        return None
    if name not in TOOL_FORMATS:
        raise ValueError(f"tool_call_parser: {name!r} is none of auto, none, {', '.join(TOOL_FORMATS)}")
    kind = TOOL_FORMATS[name]
    return found if isinstance(found, kind) else kind()


def _seen(rendered: str) -> ToolFormat | None:
    if array := _MISTRAL.search(rendered):
        return Mistral(opening=array[1])
    if _MISTRAL_EACH.search(rendered):
        return Mistral(opening=None)
    if _HARMONY.search(rendered):
        return Harmony()
    if _HERMES.search(rendered):
        return Hermes()
    return Llama() if _LLAMA.search(rendered) else None


def reasoning_format(name: str, rendered: str) -> ReasoningFormat | Harmony | None:
    """The same for thoughts."""
    if name in HARMONY or (name == "auto" and _HARMONY.search(rendered)):
        return Harmony()
    if name == "auto":
        return next((form for form in REASONING_FORMATS.values() if form.open in rendered), None)
    if name in ("none", ""):
        return None
    if name not in REASONING_FORMATS:
        known = ", ".join([*REASONING_FORMATS, *HARMONY])
        raise ValueError(f"reasoning_parser: {name!r} is none of auto, none, {known}")
    return REASONING_FORMATS[name]
