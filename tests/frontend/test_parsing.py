"""The parsers of models' outputs: what they find, and that cuts do not matter."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import time
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.config import RouterConfig
from radixrt.formats.output import UNSHOWN, Formats, probe_text
from radixrt.formats.parsing import (
    PROBE,
    CallArguments,
    CallStart,
    Content,
    Function,
    OutputParser,
    Reasoning,
    reasoning_format,
    tool_format,
)
from radixrt.formats.parsing.arrays import GRANITE, HUNYUAN, NEMOTRON, PHI, Apertus, Array, Cohere
from radixrt.formats.parsing.detect import REASONING_FORMATS, THINK
from radixrt.formats.parsing.dsml import Dsml
from radixrt.formats.parsing.gemma import Gemma
from radixrt.formats.parsing.glm import Glm
from radixrt.formats.parsing.hermes import Hermes
from radixrt.formats.parsing.hunyuan import Hunyuan
from radixrt.formats.parsing.llama import Llama
from radixrt.formats.parsing.minimax import MiniMax
from radixrt.formats.parsing.mistral import Mistral
from radixrt.formats.parsing.olmo import Olmo
from radixrt.formats.parsing.pythonic import END, LFM2, START, Pythonic
from radixrt.formats.parsing.qwen_coder import SEED, QwenCoder
from radixrt.formats.parsing.sections import DeepSeek, Kimi
from radixrt.formats.parsing.solar import Solar
from radixrt.formats.tools import Tool, ToolUse
from radixrt.frontend.generate.choice import Choice
from radixrt.messages import Delta, Grammar, Sampling, TokenLogprob, Usage
from radixrt.requests.schemas.ebnf import compilable
from radixrt.router.server.parsed import ChatFormats
from radixrt.tokens import TextService, load_tokenizer
from tests.checkpoints import make_tokenizer
from tests.frontend.scripted import joined, make_family

FORMATS = {"hermes": Hermes(), "llama": Llama(), "mistral": Mistral()}
FORMATS |= {"deepseek": DeepSeek(), "deepseek_v3": DeepSeek(fenced=True), "kimi": Kimi(), "qwen_coder": QwenCoder()}
FORMATS |= {"glm": Glm(), "glm47": Glm(lines=False), "minimax": MiniMax(), "olmo": Olmo(), "dsml": Dsml()}
FORMATS |= {"pythonic": Pythonic()}
FORMATS |= {"seed": QwenCoder(SEED, lines=False), "mistral_v11": Mistral(opening=None, names_calls=True)}
FORMATS |= {"granite": Array(GRANITE), "phi": Array(PHI), "nemotron": Array(NEMOTRON)}
FORMATS |= {"gemma": Gemma(), "solar": Solar(), "apertus": Apertus(), "cohere": Cohere(), "lfm2": Pythonic(LFM2)}
FORMATS |= {"hunyuan": Hunyuan(), "hy3": Hunyuan(":x"), "a13b": Array(HUNYUAN)}
KNOWN = {
    "text": {"type": "string"},
    "maybe": {"type": ["string", "null"]},
    "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "a": {"type": "integer"},
    "on": {"type": "boolean"},
    "list": {"$ref": "#/$defs/many"},
}
FUNCTIONS = {"f": {"type": "object", "properties": KNOWN, "$defs": {"many": {"type": "array"}}}, "g": {}}


def parse(kind: str | None, *cuts: str, **more) -> list:
    parser = OutputParser(FORMATS[kind] if kind else None, FUNCTIONS, new_id=lambda: "", **more)
    pieces = [piece for cut in cuts for piece in parser.push(cut)] + parser.finish()
    return joined(pieces)


def call(index: int, name: str, arguments: str) -> list:
    return [CallStart(index, "", name), CallArguments(index, arguments)]


F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g", "arguments": {"b": "}]\\"</tool_call>"}}'
F_CALL, G_CALL = call(0, "f", '{"a": 1}'), call(1, "g", '{"b": "}]\\"</tool_call>"}')

FOUND = [
    ("hermes", "just text, a < b\n", [Content("just text, a < b\n")]),
    ("hermes", f"<tool_call>\n{F}\n</tool_call>", F_CALL),
    ("hermes", f"Let me see.\n\n<tool_call>{F}</tool_call>\n", [Content("Let me see."), *F_CALL]),
    ("hermes", f"<tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call>", F_CALL + G_CALL),
    ("hermes", f"<tool_call>{F}<tool_call>{G}", F_CALL + G_CALL),
    ("hermes", f"<tool_call>{F}</tool_call> done \n", [*F_CALL, Content(" done \n")]),
    ("hermes", '<tool_call>{"arguments": {"a": [{}]}, "name": "f"}</tool_call>', call(0, "f", '{"a": [{}]}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', F_CALL),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', call(0, "f", "{}")),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "long', call(0, "f", '{"a": "long')),
    ("llama", '{"name": "f", "parameters": {"a": 1}}', F_CALL),
    ("llama", ' {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', F_CALL + call(1, "g", "{}")),
    ("llama", '<|python_tag|>{"name": "h", "parameters": {}}', call(0, "h", "{}")),
    (
        "llama",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}; or',
        [*F_CALL, Content("; or")],
    ),
    ("llama", f"text {F}", [Content(f"text {F}")]),
    ("mistral", f"[TOOL_CALLS] [{F}, {G}]", F_CALL + G_CALL),
    ("mistral", f'[TOOL_CALLS][{F[:-1]}, "id": "abcdefghi"}}]', F_CALL),
    ("mistral", 'Now:[TOOL_CALLS]f[ARGS]{"a": 1}', [Content("Now:"), *F_CALL]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]x1[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', F_CALL + call(1, "g", "{}")),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]aB3defghi[ARGS]{"a": 1}', [CallStart(0, "aB3defghi", "f"), F_CALL[1]]),
    ("granite", f"<|tool_call|>[{F}, {G}]", F_CALL + G_CALL),
    ("granite", f"Well.\n<|tool_call|> [\n{F}\n]\n", [Content("Well."), *F_CALL]),
    ("granite", f"<|tool_call|>[{F}] so", [*F_CALL, Content(" so")]),
    ("granite", f"<|tool_call|>[{F}, oh", [*F_CALL, Content(", oh")]),
    ("granite", f'<|tool_call|>[{F}, {{"name": "g", "argu', F_CALL),
    ("phi", f"<|tool_call|>[{F}, {G}]<|/tool_call|>", F_CALL + G_CALL),
    ("phi", f"<|tool_call|>{F}<|/tool_call|><|tool_call|>{G}\n<|/tool_call|>", F_CALL + G_CALL),
    ("phi", f"<|tool_call|>[{F}]<|/tool_", F_CALL),
    ("nemotron", f"<TOOLCALL>[{F}]</TOOLCALL> so", [*F_CALL, Content(" so")]),
]
CALLS, CALLS_END, CALL, SEP, CALL_END = (
    f"<｜tool▁{mark}｜>" for mark in ("calls▁begin", "calls▁end", "call▁begin", "sep", "call▁end")
)
K_CALLS, K_CALLS_END, K_CALL, K_ARGS, K_CALL_END = (
    f"<|tool_{mark}|>"
    for mark in ("calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin", "call_end")
)
FENCED = f'{CALL}function{SEP}f\n```json\n{{"a": 1}}\n```{CALL_END}'
FENCED_G = FENCED.replace("f\n", "g\n")
F_KIMI = [CallStart(0, "functions.f:0", "f"), CallArguments(0, '{"a": 1}')]
FOUND += [
    ("deepseek", f'{CALLS}{CALL}f{SEP}{{"a": 1}}{CALL_END}{CALLS_END}', F_CALL),
    ("deepseek", f'Well.\n\n{CALLS}{CALL}f{SEP}{{"a": 1}}{CALL_END}{CALLS_END}\n', [Content("Well."), *F_CALL]),
    ("deepseek", f'{CALLS}{CALL}f{SEP}{{"a": 1}}{CALL_END}{CALL}g{SEP}{{}}{CALL_END}', F_CALL + call(1, "g", "{}")),
    ("deepseek", f'{CALL}f{SEP}{{"a": 1}}{CALL_END}{CALLS_END}so', [*F_CALL, Content("so")]),
    ("deepseek", f'{CALLS}{CALL}f{SEP}{{"a": 1', call(0, "f", '{"a": 1')),
    ("deepseek", f"{CALLS}{FENCED}{CALLS_END}", F_CALL),
    ("deepseek_v3", f"{CALLS}{FENCED}\n{FENCED_G}{CALLS_END}", F_CALL + call(1, "g", '{"a": 1}')),
    ("kimi", f'{K_CALLS}{K_CALL}functions.f:0{K_ARGS}{{"a": 1}}{K_CALL_END}{K_CALLS_END}', F_KIMI),
    (
        "kimi",
        f'{K_CALLS} {K_CALL} functions.f:0 {K_ARGS} {{"a": 1}} {K_CALL_END} {K_CALL}functions.a.b:12{K_ARGS}{{}}',
        [*F_KIMI, CallStart(1, "functions.a.b:12", "a.b"), CallArguments(1, "{}")],
    ),
    (
        "kimi",
        f'{K_CALL}functions.f:0{K_ARGS}{{"a": 1}}{K_CALL_END}{K_CALL}functions.f:0{K_ARGS}{{"a": 1}}',
        [*F_KIMI, *call(1, "f", '{"a": 1}')],
    ),
]


def tagged(name: str, **arguments: str) -> str:
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


def typed(**arguments: str) -> list:
    return ("qwen_coder", tagged("f", **arguments))


FOUND += [
    (*typed(a="1"), F_CALL),
    (*typed(), call(0, "f", "{}")),
    ("qwen_coder", f"Well.\n{tagged('f', a='1')}\n{tagged('g')}", [Content("Well."), *F_CALL, *call(1, "g", "{}")]),
    (*typed(text="\n  two\n\tlines\n", a="2"), call(0, "f", '{"text": "\\n  two\\n\\tlines\\n", "a": 2}')),
    (*typed(text='1 < 2 "é" </tool_call>'), call(0, "f", '{"text": "1 < 2 \\"é\\" </tool_call>"}')),
    (*typed(text="17", maybe="null", either="17"), call(0, "f", '{"text": "17", "maybe": null, "either": "17"}')),
    (*typed(on="True", list='[1, {"k": 2}]'), call(0, "f", '{"on": true, "list": [1, {"k": 2}]}')),
    (*typed(a="seven", other="x", more='{"k": []}'), call(0, "f", '{"a": "seven", "other": "x", "more": {"k": []}}')),
    (*typed(list="['a', True, None]", x="{'k': 'é'}"), call(0, "f", '{"list": ["a", true, null], "x": {"k": "é"}}')),
    (
        *typed(list="['a', b]", x="{'k'}", on="['a']"),
        call(0, "f", '{"list": "[\'a\', b]", "x": "{\'k\'}", "on": "[\'a\']"}'),
    ),
    (*typed(text="['a']", a="{'k': 1}"), call(0, "f", '{"text": "[\'a\']", "a": "{\'k\': 1}"}')),
    (*typed(text='{"no": "object"}'), call(0, "f", '{"text": "{\\"no\\": \\"object\\"}"}')),
    ("qwen_coder", "<function=f>\n<parameter=a>1</parameter></function>\n</tool_call> so", [*F_CALL, Content(" so")]),
    ("qwen_coder", "<tool_call>\n<function=f>\n<parameter=text>\nlong\n", call(0, "f", '{"text": "long')),
    ("qwen_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>", call(0, "f", '{"a": 1')),
    ("qwen_coder", "<tool_call><function=f><parameter=a>1</parameter></tool_call>", F_CALL),
    ("qwen_coder", "<tool_call>\n<function=f>\n<parameter=a>1</parameter><param", call(0, "f", '{"a": 1')),
    ("qwen_coder", "<tool_call>\n<function=f>\n<parameter=a>1</parameter></function></tool_", F_CALL),
]


def glm(name: str, **arguments: str) -> str:
    parts = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>{name}\n{parts}</tool_call>"


FOUND += [
    ("glm", glm("f", a="1"), F_CALL),
    ("glm47", glm("f", a="1"), F_CALL),
    ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", F_CALL),
    ("glm", "<tool_call>g</tool_call>", call(0, "g", "{}")),
    (
        "glm",
        f"Well.\n{glm('f', a='1')}\n{glm('g')} so",
        [Content("Well."), *F_CALL, *call(1, "g", "{}"), Content(" so")],
    ),
    ("glm", glm("f", text="\n 2 < 3\n", a="2"), call(0, "f", '{"text": "\\n 2 < 3\\n", "a": 2}')),
    ("glm", glm("f", text="</tool_call>", on="true"), call(0, "f", '{"text": "</tool_call>", "on": true}')),
    ("glm", glm("f", list='["a", 1]', other="x"), call(0, "f", '{"list": ["a", 1], "other": "x"}')),
    ("glm", "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>lo", call(0, "f", '{"text": "lo')),
    ("glm", glm("f", a="1")[:-3], call(0, "f", '{"a": 1')),
    ("glm", glm("f", a="1")[:-12] + "<arg_ke", call(0, "f", '{"a": 1')),
    ("glm", glm("f", a="1")[:-12] + "<arg_key>text</arg_key>\n<arg_va", call(0, "f", '{"a": 1')),
    ("glm", glm("f", a="1")[:-12] + "oh", [*F_CALL, Content("oh")]),
]


def minimax(name: str, **arguments: str) -> str:
    parts = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items())
    return f'<invoke name="{name}">\n{parts}</invoke>'


FOUND += [
    (
        "seed",
        "<seed:tool_call>\n<function=f>\n<parameter=text>\ntwo\n</parameter>\n<parameter=a>1</parameter>\n</function>\n"
        "</seed:tool_call> so",
        [*call(0, "f", '{"text": "\\ntwo\\n", "a": 1}'), Content(" so")],
    ),
]
SECTION, SECTION_END = "<minimax:tool_call>\n", "\n</minimax:tool_call>"
FOUND += [
    ("minimax", SECTION + minimax("f", a="1") + SECTION_END, F_CALL),
    (
        "minimax",
        f"Well.\n{SECTION}{minimax('f', a='1')}\n{minimax('g')}{SECTION_END} so",
        [Content("Well."), *F_CALL, *call(1, "g", "{}"), Content(" so")],
    ),
    (
        "minimax",
        SECTION + minimax("f", text="\n<b>\n", maybe="null") + SECTION_END,
        call(0, "f", '{"text": "\\n<b>\\n", "maybe": null}'),
    ),
    ("minimax", SECTION + minimax("a b", x='{"k": 1}') + SECTION_END, call(0, "a b", '{"x": {"k": 1}}')),
    ("minimax", SECTION + minimax("f", a="1") + " oh" + SECTION_END, [*F_CALL, Content("oh" + SECTION_END)]),
    ("minimax", SECTION + minimax("f", a="1") + "\n</minimax:to", F_CALL),
    ("minimax", SECTION + minimax("f", a="1") + '\n<invoke name="">x', [*F_CALL, Content('<invoke name="">x')]),
    ("minimax", SECTION + minimax("f", a="1") + "\n<invoke na", F_CALL),
    ("minimax", SECTION + minimax("f", a="1")[:-4], call(0, "f", '{"a": 1')),
    ("minimax", SECTION + '<invoke name="f"><parameter name="te', call(0, "f", "")[:1]),
    ("minimax", SECTION + '<invoke name="f"><parameter name="text">lo', call(0, "f", '{"text": "lo')),
]


def dsml(name: str, *arguments: tuple[str, str, bool]) -> str:
    parts = "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(quoted).lower()}">{value}</｜DSML｜parameter>\n'
        for key, value, quoted in arguments
    )
    return f'<｜DSML｜invoke name="{name}">\n{parts}</｜DSML｜invoke>'


D_SECTION, D_SECTION_END = "<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"
D_F = dsml("f", ("a", "1", False))
FOUND += [
    ("dsml", D_SECTION + D_F + D_SECTION_END, F_CALL),
    (
        "dsml",
        f"Well.\n\n{D_SECTION}{D_F}\n{dsml('g')}{D_SECTION_END} so",
        [Content("Well."), *F_CALL, *call(1, "g", "{}"), Content(" so")],
    ),
    # The type is as it is written, not as the schema has it.
    (
        "dsml",
        D_SECTION + dsml("f", ("text", '\n"<b>\n', True), ("a", "1", True), ("maybe", "null", False)) + D_SECTION_END,
        call(0, "f", '{"text": "\\n\\"<b>\\n", "a": "1", "maybe": null}'),
    ),
    ("dsml", D_SECTION + dsml("f", ("text", "[1]", False)) + D_SECTION_END, call(0, "f", '{"text": [1]}')),
    ("dsml", D_SECTION + dsml("f", ("text", "[1", False)) + D_SECTION_END, call(0, "f", '{"text": "[1"}')),
    ("dsml", D_SECTION + dsml("f", ("list", "[1]", False)) + D_SECTION_END, call(0, "f", '{"list": [1]}')),
    ("dsml", D_SECTION + dsml("x", ("k", '{"b": 1}', False)) + D_SECTION_END, call(0, "x", '{"k": {"b": 1}}')),
    ("dsml", D_SECTION + D_F + " oh" + D_SECTION_END, [*F_CALL, Content("oh" + D_SECTION_END)]),
    ("dsml", D_SECTION + D_F + "\n</｜DSML｜func", F_CALL),
    ("dsml", D_SECTION + D_F + "\n<｜DSML｜inv", F_CALL),
    ("dsml", D_SECTION + D_F[:-4], call(0, "f", '{"a": 1')),
    ("dsml", D_SECTION + '<｜DSML｜invoke name="f"><｜DSML｜parameter name="te', call(0, "f", "")[:1]),
    ("dsml", D_SECTION + '<｜DSML｜invoke name="f"><｜DSML｜parameter name="text" str', call(0, "f", "")[:1]),
    (
        "dsml",
        D_SECTION + '<｜DSML｜invoke name="f"><｜DSML｜parameter name="text" string="true">lo',
        call(0, "f", '{"text": "lo'),
    ),
]
OLMO, OLMO_END = "<function_calls>", "</function_calls>"
FOUND += [
    ("olmo", f"{OLMO}f(a=1){OLMO_END}", F_CALL),
    (
        "olmo",
        f"Well.\n{OLMO}f(a=1)\ng(){OLMO_END} so",
        [Content("Well."), *F_CALL, *call(1, "g", "{}"), Content(" so")],
    ),
    ("olmo", f"{OLMO}\n f( a = 1 , ) {OLMO_END}", F_CALL),
    ("olmo", f'{OLMO}x.y(s="a, (b) \\" c")', call(0, "x.y", '{"s": "a, (b) \\" c"}')),
    ("olmo", f"{OLMO}f(s='it\\'s, \"so\"')", call(0, "f", '{"s": "it\'s, \\"so\\""}')),
    (
        "olmo",
        f'{OLMO}f(l=[1, {{"k": null}}], d={{\'k\': True, "n": false}})',
        call(0, "f", '{"l": [1, {"k": null}], "d": {"k": true, "n": false}}'),
    ),
    (
        "olmo",
        f"{OLMO}f(a=true, b=None, c=-1.5, d=NaN, e=some words, f=007)",
        call(0, "f", '{"a": true, "b": null, "c": -1.5, "d": "NaN", "e": "some words", "f": "007"}'),
    ),
    ("olmo", f'{OLMO}f(s="two\nlines", t="\\d")', call(0, "f", '{"s": "two\\nlines", "t": "\\\\d"}')),
    ("olmo", f"{OLMO}f(x, None, a=2)", call(0, "f", '{"text": "x", "maybe": null, "a": 2}')),
    ("olmo", f"{OLMO}f(list=[1,\nNone])", call(0, "f", '{"list": [1, null]}')),
    ("olmo", f'{OLMO}f(s="a\\/b\nc")', call(0, "f", '{"s": "a/b\\nc"}')),
    ("olmo", f"{OLMO}f(s='\\ud83d\\ude00', t='\\ud83d')", call(0, "f", '{"s": "\\ud83d\\ude00", "t": "\\ud83d"}')),
    ("olmo", f"{OLMO}f(s=it's, a=1)", call(0, "f", '{"s": "it\'s", "a": 1}')),
    ("olmo", f"{OLMO}f(a b=1)", call(0, "f", '{"a b": 1}')),
    ("olmo", f"{OLMO}nobody(7)", call(0, "nobody", "{}")),
    ("olmo", f"{OLMO}f(a=1", call(0, "f", "")[:1]),
    ("olmo", f"{OLMO}f(a=1, te", call(0, "f", '{"a": 1')),
    ("olmo", f'{OLMO}f(a=1, text="lo', call(0, "f", '{"a": 1')),
    ("olmo", f"{OLMO}f(a=1)</function_ca", F_CALL),
    ("olmo", f"{OLMO}f(a=1) oh{OLMO_END}", [*F_CALL, Content("oh" + OLMO_END)]),
    ("olmo", f"{OLMO}f(a=1] oh", [*F_CALL, Content("] oh")]),
]
FOUND += [
    ("pythonic", "[f(a=1)]", F_CALL),
    ("pythonic", " [f(a=1), g()]", [*F_CALL, *call(1, "g", "{}")]),
    ("pythonic", f"{START}[f(a=1)]{END}", F_CALL),
    ("pythonic", f"Well.{START}[f(a=1)]{END} so", [Content("Well."), *F_CALL, Content(" so")]),
    ("pythonic", f"{START}[unknown(b=[1, 'x'])]", call(0, "unknown", '{"b": [1, "x"]}')),
    ("pythonic", f"[f(a=1)]{END[:5]}", F_CALL),
    ("pythonic", "[f(a=1),", F_CALL),
    ("pythonic", "[f(a=1", call(0, "f", "")[:1]),
    ("pythonic", "[f(a=1), 2]", [*F_CALL, Content("2]")]),
]
Q = '<|"|>'
G_F, L, L_END = f"<|tool_call>call:f{{a:1,text:{Q}x, {{y}}{Q}}}<tool_call|>", *LFM2
S_CALL, S_F = "<|tool_call:begin|>", '<|tool_call:name|>f<|tool_call:args|>{"a": 1}<|tool_call:end|>'
F_SOLAR = [CallStart(0, "a1b2c3d4e5", "f"), F_CALL[1]]


def hunyuan(*calls: str, suffix: str = "") -> str:
    text = "<tool_calls>\n" + "\n".join(calls) + "\n</tool_calls>"
    return re.sub(r"<(/?\w+)>", rf"<\1{suffix}>", text)


H_F = "<tool_call>f<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
H_G = "<tool_call>g<tool_sep>\n</tool_call>"
FOUND += [
    ("gemma", f"Well.{G_F}", [Content("Well."), *call(0, "f", '{"a": 1, "text": "x, {y}"}')]),
    ("gemma", "<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:g{}<tool_call|> so",
     [*F_CALL, *call(1, "g", "{}"), Content(" so")]),
    ("gemma", f"<|tool_call>call:x.y-z{{l:[1,{Q}a{Q},{{k:null}},[]],{Q}b c{Q}:true,e:{{}}}}<tool_call|>",
     call(0, "x.y-z", '{"l": [1, "a", {"k": null}, []], "b c": true, "e": {}}')),
    ("gemma", f"<|tool_call>call:f{{text:{Q}x}}<tool_call|>", call(0, "f", '{"text": "x"}')),
    ("gemma", f"<|tool_call>call:f{{text:{Q}x}}}}{Q}}}<tool_call|>", call(0, "f", '{"text": "x}}"}')),
    ("gemma", "<|tool_call>call:f{a:1<tool_call|>", F_CALL),
    ("gemma", '<|tool_call>call:f{"a": 1, b: some text}', call(0, "f", '{"a": 1, "b": "some text"}')),
    ("gemma", f"<|tool_call>call:f{{text:{Q}lo", call(0, "f", '{"text": "lo')),
    ("gemma", "<|tool_call>call:f{a:1", call(0, "f", '{"a": ')),
    ("solar", f"<|tool_calls|>{S_CALL}a1b2c3d4e5{S_F}<|calls|>", F_SOLAR),
    ("solar", f"<|content|>Well.<|end|><|begin|>assistant<|tool_calls|>{S_CALL}a1b2c3d4e5{S_F}{S_CALL}{S_F}<|calls|>",
     [Content("Well."), *F_SOLAR, *call(1, "f", '{"a": 1}')]),
    ("solar", "<|content|>Just text.<|end|>", [Content("Just text.")]),
    ("apertus", 'Well.<|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|> so',
     [Content("Well."), *F_CALL, *call(1, "g", "{}"), Content(" so")]),
    ("apertus", '<|tools_prefix|>[{"f": {"a": [', call(0, "f", '{"a": [')),
    ("cohere", '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n]<|END_ACTION|>',
     F_CALL),
    ("cohere", "<|START_RESPONSE|>Just text.<|END_RESPONSE|>", [Content("Just text.")]),
    ("cohere", '<|START_TEXT|>Well.<|END_TEXT|><|START_ACTION|>[{"tool_name": "f", "parameters": {"a": 1}}]',
     [Content("Well."), *F_CALL]),
    ("lfm2", f"Well.{L}[f(a=1), g()]{L_END} so", [Content("Well."), *F_CALL, *call(1, "g", "{}"), Content(" so")]),
    ("lfm2", f"{L}[{F}]{L_END}", F_CALL),
    ("lfm2", "[f(a=1)]", F_CALL),
    ("hunyuan", "Well.\n" + hunyuan(H_F, H_G) + " so",
     [Content("Well."), *F_CALL, *call(1, "g", "{}"), Content(" so")]),
    ("hunyuan", hunyuan(H_F)[:-14], F_CALL),
    ("hunyuan", H_F, F_CALL),
    ("hunyuan", hunyuan('<tool_call>function<tool_sep>f\n```json\n{"a": 1}\n```</tool_call>'), F_CALL),
    ("hunyuan", f"<tool_calls>[{F}, {G}]</tool_calls>", F_CALL + G_CALL),
    ("hy3", hunyuan(H_F, suffix=":x"), F_CALL),
    ("a13b", f"<tool_calls>[{F}]</tool_calls>", F_CALL),
]  # fmt: skip
MALFORMED = [
    ("gemma", "<|tool_call>call:f"),
    ("gemma", "<|tool_call>{}"),
    ("solar", f"<|tool_calls|>{S_CALL}x"),
    ("apertus", "<|tools_prefix|>[1]<|tools_suffix|>"),
    ("cohere", "<|START_ACTION|>[]<|END_ACTION|>"),
    ("lfm2", f"{L}f(a=1){L_END}"),
    ("hunyuan", "<tool_calls>none</tool_calls>"),
    ("hunyuan", "<tool_call>f"),
    ("qwen_coder", "Write `<function=f>` and then."),
    ("qwen_coder", "<function=name>\n</function>"),
    ("minimax", f'{SECTION}<invoke name="f"> and'),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[unknown(a=1)]"),
    ("pythonic", "See [f(a=1)]"),
    ("pythonic", f"{START}f(a=1)"),
    ("pythonic", f"{START}[1]"),
    ("olmo", f"{OLMO}nothing{OLMO_END}"),
    ("olmo", f"{OLMO}{OLMO_END}"),
    ("olmo", f"{OLMO}(a=1)"),
    ("olmo", "f(a=1)"),
    ("olmo", "<function_calls"),
    ("glm", "<tool_call>nothing of this kind</tool_call>"),
    ("glm", '<tool_call>{"name": "f"}</tool_call>'),
    ("glm", "<tool_call>f"),
    ("glm", "<tool_call></tool_call>"),
    ("dsml", '<｜DSML｜invoke name="f"></｜DSML｜invoke>'),
    ("dsml", f"{D_SECTION}none{D_SECTION_END}"),
    ("dsml", f'{D_SECTION}<｜DSML｜invoke name="">'),
    ("dsml", "<｜DSML｜ or ｜DSML｜"),
    ("minimax", '<invoke name="f"></invoke>'),
    ("minimax", f"{SECTION}none{SECTION_END}"),
    ("minimax", f'{SECTION}<invoke name="">'),
    ("minimax", f'{SECTION}<invoke name="f'),
    ("qwen_coder", "<tool_call>\nnothing</tool_call>"),
    ("qwen_coder", "<tool_call>\n<function= >"),
    ("qwen_coder", "<function=f"),
    ("deepseek", f"{CALLS} none"),
    ("deepseek", f"{CALLS}{CALL}f{SEP}what{CALL_END}"),
    ("deepseek", f"{CALL}f {{}}{CALL_END}"),
    ("deepseek_v3", f"{CALLS}{CALL}function{SEP}f\n```json\nnothing"),
    ("kimi", f"{K_CALLS}{K_CALL}{K_ARGS}{{}}"),
    ("kimi", f"{K_CALL}functions.f:0{K_ARGS}[1]"),
    ("kimi", "<|tool_call"),
    ("hermes", "<tool_call>not JSON</tool_call>"),
    ("hermes", '<tool_call>{"nam": "f"}</tool_call>'),
    ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{oops"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "f\\'),
    ("hermes", "<tool_call>"),
    ("hermes", "</tool_call> <tool"),
    ("llama", '{"answer": 42}'),
    ("llama", '{"name": "nobody", "parameters": {}}'),
    ("llama", '{"name": "f", '),
    ("llama", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS] [] "),
    ("mistral", "[TOOL_CALLS] what is [ARGS]{}"),
    ("mistral", "[TOOL_CALLS]f[ARGS]{a}"),
    ("mistral", "[TOOL_CALL"),
    ("granite", "<|tool_call|>[]"),
    ("granite", "<|tool_call|> none"),
    ("phi", "<|tool_call|>[1]<|/tool_call|>"),
]


@pytest.mark.parametrize(("kind", "text", "expected"), FOUND)
def test_what_is_found(kind, text, expected):
    assert parse(kind, text) == expected


@pytest.mark.parametrize(("kind", "text"), MALFORMED)
def test_what_is_malformed_is_content(kind, text):
    assert parse(kind, text) == [Content(text)]


def test_a_broken_call_among_others_loses_nothing():
    pieces = parse("hermes", f"<tool_call>{F}</tool_call><tool_call>oops</tool_call><tool_call>{G}</tool_call>")
    assert pieces == [*F_CALL, Content("<tool_call>oops</tool_call>"), *G_CALL]
    pieces = parse("mistral", f"[TOOL_CALLS] [{F}, oops] and")
    assert pieces == [*F_CALL, Content(", oops] and")]
    pieces = parse("hermes", f"<tool_call>{F[:-1]} oops}}</tool_call>more")
    assert pieces == [*F_CALL, Content("oops}more")]


def test_marks_that_are_special_tokens_never_show():
    hidden = frozenset({"<|python_tag|>"})
    assert parse("llama", "<|python_tag|>print(1)<|python_tag|>", hidden=hidden) == [Content("print(1)")]
    hidden = frozenset(Mistral.marks)
    assert parse("mistral", "[TOOL_CALLS] no way [ARGS]{}", hidden=hidden) == [Content(" no way {}")]
    assert parse("olmo", f"{OLMO}none{OLMO_END}", hidden=frozenset(Olmo.marks)) == [Content("none")]
    assert parse("mistral", f"[ARGS] [{F}]", hidden=hidden) == [Content(f" [{F}]")]


def test_a_call_too_many_ends_the_answer():
    parser = OutputParser(FORMATS["hermes"], FUNCTIONS, most_calls=1, new_id=str)
    pieces = parser.push(f"<tool_call>{F}</tool_call>\n<tool_call>")
    assert pieces == F_CALL and not parser.full
    assert parser.push(G) == [] and parser.full
    assert parser.push("</tool_call> text") + parser.finish() == []


@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        ("may", "<think>\nwell\n</think>\n\nyes", [Reasoning("well"), Content("yes")]),
        ("may", "yes <think>\nwell</think>", [Content("yes <think>\nwell</think>")]),
        ("may", " <think", [Content(" <think")]),
        ("may", "<think>\n\n</think>\n\nyes", [Content("yes")]),
        ("may", "<think>cut \n", [Reasoning("cut \n")]),
        ("open", "well</think>yes", [Reasoning("well"), Content("yes")]),
        ("open", "well</thin", [Reasoning("well</thin")]),
        ("no", "<think>well</think>", [Content("<think>well</think>")]),
    ],
)
def test_thoughts(thinking, text, expected):
    assert parse(None, text, reasoning=THINK, thinking=thinking) == expected
    assert parse(None, *text, reasoning=THINK, thinking=thinking) == expected


def test_a_line_may_end_before_thoughts():
    """As GLM-4.5's answers begin: a grammar that has them begin otherwise has the model say what it never does."""
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string as accepts

    form = THINK.before("may", FORMATS["glm"].forced([Function("f", {"type": "object"})], True))
    grammar = xgrammar.Grammar.from_structural_tag({"type": "structural_tag", "format": form})
    answer = "\n<think>well</think>\n<tool_call>f\n</tool_call>"
    assert accepts(grammar, answer) and accepts(grammar, answer.lstrip())
    assert accepts(grammar, "<tool_call>f\n</tool_call>")
    assert parse("glm", answer, reasoning=THINK, thinking="may") == [Reasoning("well"), *call(0, "f", "{}")]


def test_thoughts_that_a_prompt_opens_with_a_budget():
    """Seed-OSS' prompts without a budget for thoughts end within of them."""
    form = REASONING_FORMATS["seed_oss"]
    assert form.after("<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>\n") == "open"
    assert form.after("<seed:bos>assistant\n<seed:think>") == "open" and form.after("</seed:think>") == "no"
    assert form.after("<seed:bos>assistant\n") == form.after("<seed:cot_budget_reflect>") == "may"


def test_a_call_in_thoughts_is_a_thought():
    text = f"<think>I could <tool_call>{F}</tool_call></think>\n<tool_call>{F}</tool_call>"
    pieces = parse("hermes", text, reasoning=THINK, thinking="may")
    assert pieces == [Reasoning(f"I could <tool_call>{F}</tool_call>"), *F_CALL]


def test_arguments_come_as_they_are_written():
    parser = OutputParser(FORMATS["hermes"], FUNCTIONS, new_id=str)
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.push('{"a') == [CallStart(0, "", "f"), CallArguments(0, '{"a')]
    assert parser.push("b") == [CallArguments(0, "b")]
    assert parser.push('": 1}}') == [CallArguments(0, '": 1}')]


def test_without_tools_the_parser_is_idle_after_the_thoughts():
    parser = OutputParser(None, reasoning=THINK, thinking="may")
    assert not parser.idle
    assert parser.push("Yes") == [Content("Yes")] and parser.idle


PARTS = [
    F, G, "<tool_call>", "</tool_call>", "<tool_call", "[TOOL_CALLS]", " [", "]", "f[ARGS]", "[CALL_ID]", "[ARGS", ", ",
    "; ", "<|python_tag|>", '{"name": "g", "parameters": {"x": {}}}', '{"name": "f"', "{", "}", '"', "\\", "\n", "  ",
    "<arg_key>text</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", '<invoke name="f">', "</invoke>",
    '<parameter name="text">', "</minimax:tool_call>", "<function_calls>", "f(", "a=", ")", "</function_calls>", "'",
    "<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>", "</｜DSML｜function_calls>",
    "｜DSML｜", '<｜DSML｜parameter name="text"', ' string="true">', ' string="false">', "</｜DSML｜parameter>",
    "<function=f>", "<parameter=text>\n", "<parameter=a>", "</parameter>", "</function>", "1",
    CALLS, CALLS_END, CALL, SEP, CALL_END, "f", "```json", "```", K_CALLS, K_CALL, K_ARGS, K_CALL_END, "functions.g:1",
    "<|tool_call>", "call:f{", "text:", '<|"|>', "<tool_call|>", "<|tool_calls|>", "<|tool_call:begin|>", "<|content|>",
    "<|tool_call:name|>f<|tool_call:args|>", "<|begin|>assistant", "<|end|>", "<|tools_prefix|>", '{"f": {"k": 1}}',
    "<|START_ACTION|>", "<|START_RESPONSE|>", "<|tool_call_start|>", "<tool_calls>", "<tool_call>f<tool_sep>",
    "text", "<think>", "</think>", "é", '{"arguments": {"k": "v"}, "name": "f"}',
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(PARTS), max_size=12),
    st.sampled_from([*FORMATS, None]),
    st.sampled_from(["no", "may", "open"]),
    st.sampled_from([frozenset(), frozenset({"[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "｜DSML｜"})]),
    st.sampled_from([None, 1]),
    st.randoms(use_true_random=False),
)
def test_cuts_do_not_matter(parts, kind, thinking, hidden, most_calls, rng):
    text = "".join(parts)
    more = {"reasoning": THINK, "thinking": thinking, "hidden": hidden, "most_calls": most_calls}
    whole = parse(kind, text, **more)
    assert parse(kind, *text, **more) == whole
    for _ in range(3):
        assert parse(kind, *cut(text, rng), **more) == whole
    if not any(isinstance(piece, CallStart) for piece in whole) and not hidden and thinking == "no":
        framed = kind in ("solar", "cohere")  # their marks around text are dropped
        assert framed or "".join(piece.text for piece in whole) == text, "text was lost"


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(FOUND), st.randoms(use_true_random=False))
def test_cuts_of_calls_do_not_matter(found, rng):
    kind, text, expected = found
    assert parse(kind, *cut(text, rng)) == expected


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 6)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


# ---------------------------------------------------------------- which format


@pytest.mark.parametrize(
    ("family", "kind", "thinks"),
    [
        ("plain", Hermes, False),  # what calls are written as where a template writes none
        ("hermes", Hermes, False),
        ("thinking", Hermes, True),
        ("llama", Llama, False),
        ("mistral", Mistral, False),
        ("deepseek", DeepSeek, False),
        ("deepseek_v3", DeepSeek, False),
        ("kimi", Kimi, False),
        ("qwen_coder", QwenCoder, False),
        ("glm", Glm, False),
        ("glm47", Glm, False),
        ("minimax", MiniMax, False),
        ("dsml", Dsml, False),
        ("olmo", Olmo, False),
        ("seed", QwenCoder, False),
    ],
)
def test_a_template_shows_its_format(tmp_path, family, kind, thinks):
    rendered = load_tokenizer(make_family(tmp_path, family)).apply_chat(PROBE)
    assert type(tool_format("auto", rendered)) is kind
    assert reasoning_format("auto", rendered) == (THINK if thinks else None)
    assert tool_format("none", rendered) is None and isinstance(tool_format("hermes", rendered), Hermes)
    assert reasoning_format("mistral", rendered) is REASONING_FORMATS["mistral"]


@pytest.mark.parametrize(("family", "begin"), [("glm", "<tool_call>f\n"), ("glm47", "<tool_call>f")])
def test_glm_s_template_shows_whether_names_end_lines(tmp_path, family, begin):
    rendered = load_tokenizer(make_family(tmp_path, family)).apply_chat(PROBE)
    for name in ("auto", "glm45", "glm47"):
        (one,) = tool_format(name, rendered).forced([Function("f", True)], True)["tags"]
        assert one["begin"] == begin
    (one,) = tool_format("glm47", "").forced([Function("f", True)], True)["tags"]
    assert one["begin"] == "<tool_call>f"


@pytest.mark.parametrize("text", ["[probe_tool(probe=1)]", "the format of [func_name1(params_name1=params_value1...)]"])
def test_templates_that_tell_of_lists_in_python_syntax(text):
    assert type(tool_format("auto", text)) is Pythonic
    assert type(tool_format("llama4_pythonic", "")) is Pythonic


def test_unknown_parsers_are_refused():
    with pytest.raises(ValueError, match="--tool-call-parser 'lisp': expected auto, none or one of hermes"):
        tool_format("lisp", "")
    with pytest.raises(ValueError, match="--reasoning-parser .granite.: expected"):
        reasoning_format("granite", "")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_what_is_forced_is_what_is_parsed(kind, parallel):
    """xgrammar accepts what the parser reads as calls, and nothing else."""
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string as accepts

    functions = [
        Function("f", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        Function("g", {"type": "object"}),
    ]
    form = FORMATS[kind]
    key = "parameters" if kind == "llama" else "arguments"
    pattern = {
        "deepseek": f"{CALL}%s{SEP}%s{CALL_END}",
        "deepseek_v3": f"{CALL}function{SEP}%s\n```json\n%s\n```{CALL_END}",
        "kimi": f"{K_CALL}functions.%s:0{K_ARGS}%s{K_CALL_END}",
        "mistral_v11": "[TOOL_CALLS]%s[CALL_ID]aB3defghi[ARGS]%s",
        "qwen_coder": "<tool_call>\n<function=%s>\n%s</function>\n</tool_call>",
        "seed": "<seed:tool_call>\n<function=%s>\n%s</function>\n</seed:tool_call>",
        "glm": "<tool_call>%s\n%s</tool_call>",
        "glm47": "<tool_call>%s%s</tool_call>",
        "minimax": '<invoke name="%s">\n%s</invoke>',
        "dsml": '<｜DSML｜invoke name="%s">\n%s</｜DSML｜invoke>',
        "olmo": "%s(%s)",
        "pythonic": "%s(%s)",
        "lfm2": "%s(%s)",
        "gemma": "<|tool_call>call:%s{%s}<tool_call|>",
        "solar": f"{S_CALL}a1b2c3d4e5<|tool_call:name|>%s<|tool_call:args|>%s<|tool_call:end|>",
        "apertus": '{"%s": %s}',
        "cohere": '{"tool_call_id": "0", "tool_name": "%s", "parameters": %s}',
        "hunyuan": "<tool_call>%s<tool_sep>\n%s</tool_call>",
        "hy3": "<tool_call:x>%s<tool_sep:x>\n%s</tool_call:x>",
    }.get(kind, f'{{"name": "%s", "{key}": %s}}')
    arguments = '{"a": 1}', "{}"
    arguments = {
        "qwen_coder": ("<parameter=a>\n1\n</parameter>\n", ""),
        "seed": ("<parameter=a>1</parameter>\n", ""),
        "glm": ("<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n", ""),
        "glm47": ("<arg_key>a</arg_key><arg_value>1</arg_value>", ""),
        "minimax": ('<parameter name="a">1</parameter>\n', ""),
        "dsml": ('<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n', ""),
        "olmo": ("a=1", ""),
        "pythonic": ("a=1", ""),
        "lfm2": ("a=1", ""),
        "gemma": ("a:1", ""),
        "hunyuan": ("<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n", ""),
        "hy3": ("<arg_key:x>a</arg_key:x>\n<arg_value:x>1</arg_value:x>\n", ""),
    }.get(kind, arguments)
    one, other = (pattern % both for both in zip("fg", arguments, strict=True))
    wrap = {
        "deepseek": lambda *calls: CALLS + "".join(calls) + CALLS_END,
        "deepseek_v3": lambda *calls: CALLS + "\n".join(calls) + CALLS_END,
        "qwen_coder": lambda *calls: "\n".join(calls),
        "seed": lambda *calls: "\n".join(calls),
        "glm": lambda *calls: "\n".join(calls),
        "glm47": lambda *calls: "".join(calls),
        "minimax": lambda *calls: SECTION + "\n".join(calls) + SECTION_END,
        "dsml": lambda *calls: "\n\n" + D_SECTION + "\n".join(calls) + D_SECTION_END,
        "olmo": lambda *calls: OLMO + "\n".join(calls) + OLMO_END,
        "pythonic": lambda *calls: f"[{', '.join(calls)}]",
        "lfm2": lambda *calls: f"{L}[{', '.join(calls)}]{L_END}",
        "gemma": lambda *calls: "".join(calls),
        "solar": lambda *calls: f"<|tool_calls|>{''.join(calls)}<|calls|>",
        "apertus": lambda *calls: f"<|tools_prefix|>[{', '.join(calls)}]<|tools_suffix|>",
        "cohere": lambda *calls: f"<|START_ACTION|>[{', '.join(calls)}]<|END_ACTION|>",
        "hunyuan": lambda *calls: "<tool_calls>\n" + "\n".join(calls) + "\n</tool_calls>",
        "hy3": lambda *calls: "<tool_calls:x>\n" + "\n".join(calls) + "\n</tool_calls:x>",
        "a13b": lambda *calls: f"<tool_calls>[{', '.join(calls)}]</tool_calls>",
        "kimi": lambda *calls: K_CALLS + "".join(calls) + K_CALLS_END,
        "hermes": lambda *calls: "\n".join(f"<tool_call>\n{c}\n</tool_call>" for c in calls),
        "llama": lambda *calls: "; ".join(calls),
        "mistral": lambda *calls: f"[TOOL_CALLS] [{', '.join(calls)}]",
        "mistral_v11": lambda *calls: "".join(calls),
        "granite": lambda *calls: f"<|tool_call|>[{', '.join(calls)}]",
        "phi": lambda *calls: f"<|tool_call|>[{', '.join(calls)}]<|/tool_call|>",
        "nemotron": lambda *calls: f"<TOOLCALL>[{', '.join(calls)}]</TOOLCALL>",
    }[kind]
    forced, free = (
        xgrammar.Grammar.from_structural_tag({"type": "structural_tag", "format": make(functions, parallel)})
        for make in (form.forced, form.free)
    )
    for grammar in (forced, free):
        assert accepts(grammar, wrap(one)) and accepts(grammar, wrap(other))
        other_type = (
            one.replace("1}", '"x"}')
            .replace("\n1", '\n"x"')
            .replace(">1<", ">x<")
            .replace("=1)", '="x")')
            .replace(":1}", ":x}")
        )
        assert other_type != one and not accepts(grammar, wrap(other_type))
        if kind != "llama" or grammar is forced:  # bare JSON: what follows a call may be text as well
            assert accepts(grammar, wrap(one, other)) == parallel
    assert accepts(free, "no call") and not accepts(forced, "no call")
    pieces = parse(kind, wrap(one, other))
    found = [(p.name, q.text) for p, q in zip(pieces[::2], pieces[1::2], strict=True)]
    assert found == [("f", '{"a": 1}'), ("g", "{}")]


MANY = {f"p{i}": {"type": "integer"} for i in range(20)}


def test_olmo_s_tags_are_no_larger_than_what_they_are_for():
    for many in (
        {"properties": {f"p{i}": {} for i in range(1000)}},
        {"properties": {f"p{i}": {} for i in range(16)}, "$defs": {f"d{i}": {} for i in range(1000)}},
        {
            "properties": {f"p{i}": {"$ref": "#/$defs/d1"} for i in range(500)},
            "$defs": {f"d{i}": {} for i in range(500)},
        },
    ):
        assert len(json.dumps(Olmo().forced([Function("f", many)], True))) < 4 << 20


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"required": ["c", "a"]}, ['a=1, c="x"', 'a=1, c="x", b=2'], ['c="x", a=1', "a=1"]),
        ({"required": ["b"]}, ["b=2", "b=2, a=1", 'b=2, c="x"', 'b=2, a=1, c="x"'], ["", "a=1", "a=1, b=2", "b=x"]),
        (
            {},
            ["", "a=1", "b=2", 'c="x"', "a=1, b=2", 'b=2, c="x"'],
            ["b=2, a=1", "a=1, a=1", "d=1", ", a=1", "a=1,b=2"],
        ),
        ({"properties": MANY}, ["", "p0=1", "p19=1, p3=2", "p3=2, p19=1"], ["q=1", "p1=x", "p1=1,p2=2"]),
        ({"properties": {"a b": {"type": "integer"}}}, ["a b=1", ""], ["a=1"]),
        ({"properties": {}}, [""], ["x=1"]),
        (
            {"properties": {}, "additionalProperties": True},
            ["", "x=1", "x=[1, {}], _y2=null"],
            ["1", "x=", "x=y", "2x=1"],
        ),
        ({"properties": {}, "additionalProperties": False}, [""], ["x=1"]),
    ],
)
def test_olmo_s_arguments_follow_their_schema(schema, right, wrong):
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string as accepts

    number, properties = {"type": "integer"}, {"a": {"$ref": "#/$defs/n"}, "b": {"type": "integer"}}
    whole = {"type": "object", "properties": properties | {"c": {"type": "string"}}, "$defs": {"n": number}} | schema
    form = Olmo().forced([Function("f", whole)], False)
    grammar = xgrammar.Grammar.from_structural_tag({"type": "structural_tag", "format": form})
    assert all(accepts(grammar, f"{OLMO}f({arguments}){OLMO_END}") for arguments in right)
    assert not any(accepts(grammar, f"{OLMO}f({arguments}){OLMO_END}") for arguments in wrong)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), JSON, max_size=4), st.sampled_from([json.dumps, repr])
)
def test_olmo_s_values_are_json_s_or_python_s(arguments, write):
    written = ", ".join(f"{name}={write(value)}" for name, value in arguments.items())
    start, found = parse("olmo", f"{OLMO}f({written}){OLMO_END}")
    assert start.name == "f" and json.loads(found.text) == arguments


def test_mistral_s_newer_form_is_forced_as_well():
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string as accepts

    form = Mistral(opening=None)
    tag = {"type": "structural_tag", "format": form.forced([Function("f", {"type": "object"})], True)}
    grammar = xgrammar.Grammar.from_structural_tag(tag)
    assert accepts(grammar, "[TOOL_CALLS]f[ARGS]{}") and accepts(grammar, "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}")
    assert not accepts(grammar, "[TOOL_CALLS]g[ARGS]{}")


@pytest.mark.parametrize("kind", [{"type": "array"}, {"type": ["array", "null"]}, {"anyOf": [{"type": "array"}]}])
@pytest.mark.parametrize("family", ["qwen_coder", "glm", "minimax"])
def test_arrays_of_anything_are_forced_as_json(kind, family):
    """xgrammar's styles would have their items between tags, which nothing reads."""
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string as accepts

    schema = {"type": "object", "properties": {"x": kind}, "required": ["x"]}
    form = FORMATS[family].forced([Function("f", schema)], True)
    tag = Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    grammar = xgrammar.Grammar.from_structural_tag(compilable(tag, any_space=True))
    value = '["a", 1, {"b": [2]}]'
    written = {"qwen_coder": tagged, "glm": glm, "minimax": lambda *a, **b: SECTION + minimax(*a, **b) + SECTION_END}
    assert accepts(grammar, written[family]("f", x=value))
    assert parse(family, written[family]("f", x=value)) == call(0, "f", f'{{"x": {value}}}')
    assert schema["properties"]["x"] is kind and "items" not in kind


# ---------------------------------------------------------------- real templates and tokenizers


@pytest.mark.parametrize(
    ("told", "kind", "begin"),
    [
        (
            'in <tool_call></tool_call>:\n<tool_call>\n{"name": <function-name>, "arguments": <args>}',
            Hermes,
            "<tool_call>\n",
        ),
        ("respond only with <|tool_call|> followed by a JSON list of tools used.", Array, "<|tool_call|>["),
        ("<|system|>Be kind.<|tool|>[]<|/tool|><|end|>", Array, "<|tool_call|>["),
        ('use: <TOOLCALL>[{"name": "tool_name1", "arguments": "tool_args1"}]</TOOLCALL>', Array, "<TOOLCALL>["),
    ],
)
def test_templates_that_only_tell_of_calls_show_their_format_too(told, kind, begin):
    found = tool_format("auto", told)
    assert type(found) is kind
    form = found.forced([Function("f", True)], True)
    assert form.get("begin", begin) == begin and ("/tool|>" not in told or form["end"] == "]<|/tool_call|>")


def test_channels_are_what_tells_harmony():
    """Others begin their messages with <|start|> as well."""
    assert tool_format("auto", "<|start|>system<|message|>Hi") is None
    assert reasoning_format("auto", "<|start|>system<|message|>Hi") is None


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("chat_templates/qwen2.5-instruct", Hermes),
        ("chat_templates/llama-3-instruct", Hermes),
        ("mistral/chat_templates/v3", Mistral),
        ("mistral/chat_templates/v7_spm", Mistral),
    ],
)
def test_real_templates_show_their_format(tmp_path, shared_data, template, kind):
    file = shared_data / "tokenizers" / f"{template}.jinja"
    rendered = probe_text(load_tokenizer(make_family(tmp_path, "plain"), str(file)))
    found = tool_format("auto", rendered)
    assert type(found) is kind and reasoning_format("auto", rendered) is None
    if kind is Mistral:
        opening = "[TOOL_CALLS] [" if "spm" in template else "[TOOL_CALLS]["
        assert found.forced([Function("f", True)], True)["begin"] == opening


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if messages[-1].role == 'user' %}<think>\n{% endif %}",
        "{% for m in messages %}{{ raise_exception('!') if m.role == 'tool' }}{% endfor %}<think>\n",
    ],
)
def test_thoughts_that_only_a_question_shows(tmp_path, template):
    file = tmp_path / "template.jinja"
    file.write_text(template)
    rendered = probe_text(load_tokenizer(make_family(tmp_path, "plain"), str(file)))
    assert reasoning_format("auto", rendered) is THINK


def test_a_template_without_tools_is_told_of(tmp_path, caplog):
    """In replies, and in the log of the router alone: a stack has one, and any number of front ends."""
    file = tmp_path / "template.jinja"
    use = ToolUse((Tool("f", "", {}),), shown=[])
    for source, unshown in (("{% for m in messages %}{{ m.content }}{% endfor %}", True), ("{{ tools }}", False)):
        file.write_text(source)
        tokenizer = load_tokenizer(make_family(tmp_path, "plain"), str(file))
        formats = Formats(tokenizer, "hermes")
        assert formats.output(b"", False, True, use, None).warnings == (UNSHOWN,) * unshown
        assert formats.output(b"", False, True, ToolUse(()), None).warnings == ()
        assert UNSHOWN not in caplog.text
        with TextService(tokenizer) as text:
            ChatFormats(text, RouterConfig(tool_call_parser="hermes"))
        assert caplog.text.count(UNSHOWN) == unshown
        caplog.clear()


@pytest.mark.parametrize(
    ("template", "kind", "thoughts"),
    [
        ("google-gemma-4-31B-it", Gemma, "<|channel>"),
        ("upstage-Solar-Open-100B", Solar, "<|think|>"),
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", Cohere, "<|START_THINKING|>"),
        ("LFM2-8B-A1B", Pythonic, "<think>"),
        ("LFM2.5-Instruct", Pythonic, "<think>"),
        ("Kimi-K2-Thinking", Kimi, "<think>"),
    ],
)
def test_published_templates_show_their_format(tmp_path, shared_data, template, kind, thoughts):
    file = shared_data / "chat_templates" / f"{template}.jinja"
    formats = Formats(load_tokenizer(make_family(tmp_path, "plain"), str(file)))
    assert type(formats.tools) is kind and (formats.reasoning and formats.reasoning.open) == thoughts


@pytest.mark.parametrize(
    ("rendered", "kind", "begin", "thoughts"),
    [
        ("<think>-</think><tool_calls>\n<tool_call>f<tool_sep>", Hunyuan, "<tool_calls>\n", "<think>"),
        ("<think:x>-</think:x><tool_calls:x>\n<tool_call:x>f<tool_sep:x>", Hunyuan, "<tool_calls:x>\n", "<think:x>"),
        ('<tool_calls>[{"name": "f"}]', Array, "<tool_calls>[", None),
        ("Tool Capabilities:", Apertus, "<|tools_prefix|>[", "<|inner_prefix|>"),
    ],
)
def test_texts_that_show_the_format_of_hunyuan_and_apertus(rendered, kind, begin, thoughts):
    found, form = tool_format("auto", rendered), reasoning_format("auto", rendered)
    assert type(found) is kind and found.forced([Function("f", True)], True)["begin"] == begin
    assert (form and form.open) == thoughts


@pytest.mark.parametrize("version", ["240323.model.v3", "241114.model.v7"])
@pytest.mark.parametrize("cuts", [1, 10_000])
def test_calls_by_mistral_s_own_tokenizer(tmp_path, shared_data, version, cuts):
    """Its marks are special tokens, and its text has white space that depends on where it stands."""
    folder = shared_data / "tokenizers" / "mistral"
    version_name = version.rpartition(".")[2]
    (tmp_path / "tokenizer.model").write_bytes((folder / f"mistral_instruct_tokenizer_{version}").read_bytes())
    tokenizer = load_tokenizer(tmp_path, str(folder / f"chat_templates/{version_name}_spm.jinja"))
    formats = Formats(tokenizer)
    output = formats.output(b"", False, True, ToolUse((Tool("f", "", {}),)), None)
    text = f"Wait.[TOOL_CALLS] [{F}, {G}]"
    ids = array("i", [*tokenizer.encode(text, False), tokenizer.token_id("</s>")])
    assert tokenizer.token_id("[TOOL_CALLS]") in ids
    service = TextService(tokenizer)
    choice = Choice(0, service, Sampling(), output)
    for at in range(0, len(ids), cuts):
        part = ids[at : at + cuts]
        last = at + cuts >= len(ids)
        choice.take(Delta(0, ids=part.tobytes(), finish="stop" if last else None, stop=ids[-1] if last else None))
    service.close()
    assert choice.message.content == "Wait." and choice.finish == "tool_calls"
    assert [(c.name, c.arguments) for c in choice.message.calls] == [("f", F_CALL[1].text), ("g", G_CALL[1].text)]


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("hidden", [False, True])
def test_what_comes_with_a_stop_string_and_behind_it_is_not_counted(tmp_path, cut, hidden):
    """Tokens may come several at once, some of them marks that are not shown."""
    tokenizer = load_tokenizer(make_tokenizer(tmp_path))
    service, sampling = TextService(tokenizer), Sampling(stop=("about th",))
    mark, output = 2, Formats(tokenizer).output(b"", False, False, ToolUse(()), None)
    ids = tokenizer.encode("the quick dog thinks about the question again and then it jumps", False)
    if hidden:
        output = dataclasses.replace(output, hidden_ids=frozenset({mark}))
        ids = [i for id in ids for i in (id, mark)]
    alone = Choice(0, service, sampling, output)
    for id in ids:
        alone.take(Delta(0, ids=array("i", [id]).tobytes()))
    choice, logprobs = Choice(0, service, sampling, output), 0
    for at in range(0, len(ids), cut):
        part = ids[at : at + cut]
        delta = Delta(0, ids=array("i", part).tobytes(), logprobs=[TokenLogprob(id, -1.0, []) for id in part])
        was = choice.stopping
        choice.take(delta)
        logprobs += 0 if was else len(delta.logprobs)
    choice.take(Delta(0, finish="length", usage=Usage(5, 50, 0, "")))
    assert choice.message.content == alone.message.content == "the quick dog thinks "
    assert choice.ids == alone.ids and choice.tokens == choice.usage.completion_tokens == alone.tokens == logprobs
    assert choice.finish == "stop" and choice.stop == "about th"
    service.close()


def test_arguments_nested_too_deeply_are_no_object():
    deep = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    text = f'<tool_call>{{"name": "f", "arguments": {json.dumps(deep)}}}</tool_call>'
    assert parse("hermes", text) == [Content(text)]


@pytest.mark.parametrize(("kind", "write"), [("qwen_coder", tagged), ("glm", glm)])
@pytest.mark.parametrize("value", ["NaN", "[1, -Infinity]", "[" * 100_000, "[" * 100_000 + "]" * 100_000])
def test_arguments_that_are_no_json_for_others_are_strings(kind, write, value):
    _, found = parse(kind, write("f", list=value))
    assert json.loads(found.text) == {"list": value}


def test_white_space_without_end_costs_what_it_is():
    parser, began = OutputParser(FORMATS["hermes"], FUNCTIONS), time.process_time()
    for _ in range(200_000):
        assert not parser.push("\n")
    assert parser.finish() == [Content("\n" * 200_000)]
    assert time.process_time() - began < 3


@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        (f"n:1.5,s:{Q}a {{b}}, c{Q}", {"n": 1.5, "s": "a {b}, c"}),
        (f"e:{Q}x{Q},l:[{{k:true}},{{}}],s:{Q}{Q}", {"e": "x", "l": [{"k": True}, {}], "s": ""}),
        (f"any:{{k:[1,null,{Q}z{Q}]}},s:{Q}y{Q}", {"any": {"k": [1, None, "z"]}, "s": "y"}),
    ],
)
def test_gemma_s_arguments_follow_their_schema(values, arguments):
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string as accepts

    parts = {"s": {"type": "string"}, "n": {"type": ["number", "null"]}, "e": {"$ref": "#/$defs/e"}, "any": {}}
    parts["l"] = {"type": "array", "items": {"type": "object", "properties": {"k": {"type": "boolean"}}}}
    schema = {"type": "object", "properties": parts, "required": ["s"], "$defs": {"e": {"enum": ["x", 2]}}}
    form = Gemma().forced([Function("f", schema)], True)
    grammar = xgrammar.Grammar.from_structural_tag({"type": "structural_tag", "format": form})
    *others, last = values.split(",s:") if ",s:" in values else (values, "")
    required_first = f"s:{last},{others[0]}"
    text = f"<|tool_call>call:f{{{required_first}}}<tool_call|>"
    assert accepts(grammar, text) and not accepts(grammar, text.replace("s:", "t:", 1))
    ((_, found),) = [(p.name, q.text) for p, q in zip(*[iter(parse("gemma", text))] * 2, strict=True)]
    assert json.loads(found) == arguments


def test_answers_between_marks_may_follow_a_grammar():
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string as accepts

    text = {"type": "json_schema", "json_schema": {"type": "integer"}}
    for form, answer in (
        (Solar(), "<|content|>7"),
        (Solar(), "<|begin|>assistant<|content|>7"),
        (Cohere(), "<|START_RESPONSE|>7<|END_RESPONSE|>"),
        (Cohere(), "7"),
    ):
        tag = {"type": "structural_tag", "format": form.with_text(text)}
        grammar = xgrammar.Grammar.from_structural_tag(tag)
        assert accepts(grammar, answer) and not accepts(grammar, answer.replace("7", "x"))
