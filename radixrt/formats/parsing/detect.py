"""Chooses a model's formats: by name, or by what its chat template renders for a call and a thought."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from radixrt.formats.parsing.arrays import GRANITE, HUNYUAN, NEMOTRON, PHI, Apertus, Array, Cohere
from radixrt.formats.parsing.dsml import Dsml
from radixrt.formats.parsing.formats import ToolFormat
from radixrt.formats.parsing.gemma import Gemma
from radixrt.formats.parsing.glm import Glm
from radixrt.formats.parsing.harmony import Harmony
from radixrt.formats.parsing.hermes import Hermes
from radixrt.formats.parsing.hunyuan import Hunyuan
from radixrt.formats.parsing.llama import Llama
from radixrt.formats.parsing.minimax import MiniMax
from radixrt.formats.parsing.mistral import Mistral
from radixrt.formats.parsing.olmo import Olmo
from radixrt.formats.parsing.pythonic import LFM2, Pythonic
from radixrt.formats.parsing.qwen_coder import SEED, QwenCoder
from radixrt.formats.parsing.sections import DeepSeek, Kimi
from radixrt.formats.parsing.solar import Solar
from radixrt.formats.parsing.thoughts import ReasoningFormat
from radixrt.messages import ChatPrompt

TOOL_FORMATS: dict[str, Callable[[], ToolFormat]] = {
    "hermes": Hermes,
    "qwen25": Hermes,
    "qwen3_coder": QwenCoder,
    "qwen3_xml": QwenCoder,
    "llama3_json": Llama,
    "llama3": Llama,
    "llama4_json": Llama,
    "mistral": Mistral,
    "openai": Harmony,
    "gpt-oss": Harmony,
    "deepseek_v3": partial(DeepSeek, fenced=True),
    "deepseekv3": partial(DeepSeek, fenced=True),
    "deepseek_v31": DeepSeek,
    "deepseekv31": DeepSeek,
    "deepseek_v32": Dsml,
    "deepseekv32": Dsml,
    "kimi_k2": Kimi,
    "glm": Glm,
    "glm45": Glm,
    "glm47": partial(Glm, lines=False),
    "minimax_m2": MiniMax,
    "minimax-m2": MiniMax,
    "seed_oss": partial(QwenCoder, SEED, lines=False),
    "granite": partial(Array, GRANITE),
    "phi4_mini_json": partial(Array, PHI),
    "nemotron_json": partial(Array, NEMOTRON),
    "olmo3": Olmo,
    "pythonic": Pythonic,
    "llama4_pythonic": Pythonic,
    "lfm2": partial(Pythonic, LFM2),
    "gemma4": Gemma,
    "cohere_command": Cohere,
    "cohere_command4": Cohere,
    "apertus": Apertus,
    "hy_v3": Hunyuan,
    "hunyuan": Hunyuan,
    "hunyuan_a13b": partial(Array, HUNYUAN),
    "solar_open": Solar,
}
THINK = ReasoningFormat("<think>", "</think>")
REASONING_FORMATS = {
    "deepseek_r1": THINK,
    "deepseek-r1": THINK,
    "qwen3": THINK,
    "glm45": THINK,
    "minimax_m2": THINK,
    "minimax": THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "olmo3": THINK,
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", "<seed:cot_budget_reflect>"),
    "gemma4": ReasoningFormat("<|channel>", "<channel|>", title="thought"),
    "cohere_command": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    "apertus": ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>"),
    "solar_open": ReasoningFormat("<|think|>", "<|end|>"),
    "hy_v3": THINK,
}
"""By the names that vLLM and SGLang have for them."""
_UNSHOWN: dict[type, ReasoningFormat] = {
    Solar: REASONING_FORMATS["solar_open"],
    Apertus: REASONING_FORMATS["apertus"],
    Gemma: REASONING_FORMATS["gemma4"],
    Cohere: REASONING_FORMATS["cohere_command"],
}
"""Those of families whose templates need not show thoughts, by their tool format."""
HARMONY = ("openai_gptoss", "gpt-oss")
"""Names of the reasoning format that is parsed by the tool format Harmony."""

PROBE_NAME, _ID = "probe_tool", "abcdefghi"
_FUNCTION = {"name": PROBE_NAME, "description": "-", "parameters": {"type": "object", "properties": {}}}
_CALL = {"id": _ID, "type": "function", "function": {"name": PROBE_NAME, "arguments": '{"probe": 1}'}}
PROBE = ChatPrompt(
    [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": "", "reasoning_content": "-", "tool_calls": [_CALL]},
        {"role": "tool", "content": "-", "tool_call_id": _ID, "name": PROBE_NAME},
    ],
    [{"type": "function", "function": _FUNCTION}],
)
"""A chat with everything that a template may have a form for. Ids have nine letters and digits, as Mistral's templates
require."""
OFFER = ChatPrompt([{"role": "user", "content": "-"}], [{"type": "function", "function": _FUNCTION}])
"""A chat in which the tool is only offered."""
QUESTION = ChatPrompt([{"role": "user", "content": "-"}])
"""A second chat, since some templates begin a thought only after a user message, and some refuse tools."""

_MISTRAL = re.compile(r'(\[TOOL_CALLS\]\s*\[)\s*\{\s*"name":\s*"probe_tool"')
_MISTRAL_EACH = re.compile(r"\[TOOL_CALLS\]\s*probe_tool(\[CALL_ID\])?")
_HERMES = re.compile(r'<tool_call>\s*\{\s*"(name":\s*"probe_tool"|arguments":\s*\{)')
_HARMONY = re.compile(r"<\|start\|>(system|developer|user)<\|message\|>")
_QWEN_CODER = re.compile(r"<(seed:)?tool_call>\s*<function=probe_tool>")
_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(function<｜tool▁sep｜>)?probe_tool")
_DSML = re.compile(r'<｜DSML｜function_calls>\s*<｜DSML｜invoke name="probe_tool"')
_KIMI = re.compile(r"<\|tool_call_begin\|>[^<]*<\|tool_call_argument_begin\|>")
_GLM = re.compile(r"<tool_call>probe_tool(\n?)\s*<arg_key>")
_MINIMAX = re.compile(r'<minimax:tool_call>\s*<invoke name="probe_tool"')
_HUNYUAN = re.compile(r"<tool_calls((?::[^<>\s]+)?)>\s*<tool_call\1>")
_SUFFIXED = re.compile(r"<think(:[^<>\s]+)>")
_OLMO = re.compile(r"<function_calls>probe_tool\(")
_LFM2 = re.compile(r"<\|tool_call_start\|>|<\|tool_list_start\|>|List of tools: \[")
_TOLD: dict[Callable[[], ToolFormat], re.Pattern[str]] = {
    Hermes: re.compile(r'<tool_call>\s*\{"name":\s*<'),
    partial(Pythonic, LFM2): _LFM2,
    Gemma: re.compile(r"<\|tool_call>call:probe_tool\{"),
    Cohere: re.compile(r"<\|START_ACTION\|>"),
    Apertus: re.compile(r"<\|tools_prefix\|>|Tool Capabilities:"),
    Solar: re.compile(r"<\|tool_call:begin\|>"),
    Kimi: re.compile(r"<\|im_system\|>tool_declare<\|im_middle\|>"),
    partial(Array, HUNYUAN): re.compile(r"<tool_calls>\s*\["),
    Pythonic: re.compile(r"\[probe_tool\(probe=|\[func_name1\("),
    partial(Array, NEMOTRON): re.compile(r"<TOOLCALL>\["),
    partial(Array, PHI): re.compile(r"<\|/tool(_call)?\|>"),
    partial(Array, GRANITE): re.compile(r"<\|tool_call\|>"),
}
"""Strings in the instructions by which templates tell the model how to write calls; some of these templates do not
write calls themselves (SmolLM3, Granite 3, Phi-4-mini)."""
_LLAMA = re.compile(r'\{\s*"name":\s*"probe_tool",\s*"parameters":\s*"?\{\\?"probe')


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise ValueError for an unknown name of a format."""
    tool_format(tool_call_parser, "")
    reasoning_format(reasoning_parser, "")


def tool_format(name: str, rendered: str) -> ToolFormat | None:
    """The tool format `name`; with "auto" the one detected in `rendered`, the template's text for PROBE; None if there
    is none. Raises ValueError for an unknown name."""
    found = _seen(rendered)
    if name == "auto":
        return found
    if name in ("none", ""):
        return None
    if name not in TOOL_FORMATS:
        raise ValueError(f"--tool-call-parser {name!r}: expected auto, none or one of {', '.join(TOOL_FORMATS)}")
    told = TOOL_FORMATS[name]()
    return found if type(found) is type(told) else told


def _seen(rendered: str) -> ToolFormat | None:
    if array := _MISTRAL.search(rendered):
        return Mistral(opening=array[1])
    if each := _MISTRAL_EACH.search(rendered):
        return Mistral(opening=None, names_calls=bool(each[1]))
    if _is_harmony(rendered):
        return Harmony()
    if _HERMES.search(rendered):
        return Hermes()
    if found := _QWEN_CODER.search(rendered):
        return QwenCoder(SEED, lines=False) if found[1] else QwenCoder()
    if found := _HUNYUAN.search(rendered):
        return Hunyuan(found[1])
    if found := _DEEPSEEK.search(rendered):
        return DeepSeek(fenced=bool(found[1]))
    if _DSML.search(rendered):
        return Dsml()
    if _KIMI.search(rendered):
        return Kimi()
    if found := _GLM.search(rendered):
        return Glm(lines=bool(found[1]))
    if _MINIMAX.search(rendered):
        return MiniMax()
    if _OLMO.search(rendered):
        return Olmo()
    if _LLAMA.search(rendered):
        return Llama()
    return next((form() for form, told in _TOLD.items() if told.search(rendered)), None)


def _is_harmony(rendered: str) -> bool:
    """Whether messages begin as Harmony's do, and channels occur, as in the published template."""
    return bool(_HARMONY.search(rendered)) and ("<|channel|>" in rendered or "Valid channels:" in rendered)


def reasoning_format(name: str, rendered: str) -> ReasoningFormat | Harmony | None:
    """As `tool_format`, for reasoning."""
    if name in HARMONY or (name == "auto" and _is_harmony(rendered)):
        return Harmony()
    suffixed = _SUFFIXED.search(rendered)
    if suffixed and name in ("auto", "hy_v3"):
        return ReasoningFormat(f"<think{suffixed[1]}>", f"</think{suffixed[1]}>")
    if name == "auto":
        shown = (form for form in REASONING_FORMATS.values() if form.open + form.title in rendered)
        return next(shown, None) or (THINK if _LFM2.search(rendered) else _UNSHOWN.get(type(_seen(rendered))))
    if name in ("none", ""):
        return None
    if name not in REASONING_FORMATS:
        known = ", ".join([*REASONING_FORMATS, *HARMONY])
        raise ValueError(f"--reasoning-parser {name!r}: expected auto, none or one of {known}")
    return REASONING_FORMATS[name]
