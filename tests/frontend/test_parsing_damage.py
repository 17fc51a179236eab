"""What models really write: calls in open thoughts, damaged tags, the cases of public reports; in parts of any size."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from radixrt.formats.parsing import CallArguments, CallStart, Content, OutputParser
from radixrt.formats.parsing.detect import REASONING_FORMATS, THINK, TOOL_FORMATS

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases" / "api"
FILES = sorted(file for file in CASES.glob("*.json") if "tool_format" in file.read_text())
SIZES = (1, 2, 3, 5, 8)
TEXT = {"type": "string"}
FUNCTIONS = {"f": {"type": "object", "properties": {"s": TEXT, "n": {"type": "integer"}, "path": TEXT}}, "g": {}}
Q = '<|"|>'
D = "｜DSML｜"


def read(kind: str | None, text: str, size: int = 0, functions: dict = FUNCTIONS, **options: Any) -> dict[str, Any]:
    """What is found in a text that arrives in parts of `size` characters (0: at once)."""
    parser = OutputParser(TOOL_FORMATS[kind]() if kind else None, functions, **options)
    parts = [text[at : at + size] for at in range(0, len(text), size)] if size else [text]
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for piece in [piece for part in parts for piece in parser.push(part)] + parser.finish():
        if isinstance(piece, CallStart):
            found["calls"].append([piece.name, ""])
        elif isinstance(piece, CallArguments):
            found["calls"][piece.index][1] += piece.text
        else:
            found["content" if isinstance(piece, Content) else "reasoning"] += piece.text
    return found


def in_parts(kind: str | None, text: str, **options: Any) -> dict[str, Any]:
    """The same, which must not depend on the parts."""
    whole = read(kind, text, **options)
    for size in SIZES:
        assert read(kind, text, size, **options) == whole, f"in parts of {size}"
    return whole


@pytest.mark.skipif(not FILES, reason="no shared/cases beside the checkout")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_cases_of_public_reports(file):
    case = json.loads(file.read_text())
    options = dict(case["options"])
    if "reasoning" in options:
        options["reasoning"] = REASONING_FORMATS[options["reasoning"]]
    if "hidden" in options:
        options["hidden"] = frozenset(options["hidden"])
    assert in_parts(case["tool_format"], case["text"], functions=case["functions"], **options) == case["right"]


# ---------------------------------------------------------------- thoughts

OBJECT = '{"s": "x"}'
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "f", "arguments": {OBJECT}}}\n</tool_call>',
    "llama3_json": f'{{"name": "f", "parameters": {OBJECT}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "f", "arguments": {OBJECT}}}]',
    "deepseek_v3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{OBJECT}\n```"
    "<｜tool▁call▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{OBJECT}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_v32": f'<{D}function_calls>\n<{D}invoke name="f">\n<{D}parameter name="s" string="true">x'
    f"</{D}parameter>\n</{D}invoke>\n</{D}function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    f"{OBJECT}<|tool_call_end|><|tool_calls_section_end|>",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=s>x</parameter>\n</function>\n</seed:tool_call>",
    "glm45": "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">x</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "granite": f'<|tool_call|>[{{"name": "f", "arguments": {OBJECT}}}]',
    "nemotron_json": f'<TOOLCALL>[{{"name": "f", "arguments": {OBJECT}}}]</TOOLCALL>',
    "olmo3": '<function_calls>f(s="x")</function_calls>',
    "pythonic": '[f(s="x")]',
    "lfm2": '<|tool_call_start|>[f(s="x")]<|tool_call_end|>',
    "gemma4": f"<|tool_call>call:f{{s:{Q}x{Q}}}<tool_call|>",
    "cohere_command": f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "f", "parameters": {OBJECT}}}]'
    "<|END_ACTION|>",
    "apertus": f'<|tools_prefix|>[{{"f": {OBJECT}}}]<|tools_suffix|>',
    "hy_v3": "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n</tool_call>\n"
    "</tool_calls>",
    "solar_open": "<|begin|>assistant<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>f<|tool_call:args|>"
    f"{OBJECT}<|tool_call:end|><|calls|>",
}  # fmt: skip
"""A call by format."""
THOUGHTS = {"solar_open": "solar_open", "gemma4": "gemma4", "cohere_command": "cohere_command", "apertus": "apertus"}


@pytest.fixture(params=CALLS)
def kind(request) -> str:
    return request.param


def thoughts_of(kind: str) -> dict[str, Any]:
    return {"reasoning": REASONING_FORMATS[THOUGHTS.get(kind, "qwen3")], "thinking": "open"}


def test_a_call_in_thoughts_that_nothing_closes_is_a_call(kind):
    found = in_parts(kind, f"I need it.\n{CALLS[kind]}", **thoughts_of(kind))
    assert found == {"content": "", "reasoning": "I need it.", "calls": [["f", OBJECT]]}


def test_a_call_in_thoughts_that_are_closed_is_a_thought(kind):
    options = thoughts_of(kind)
    mention = f"I could {CALLS[kind]}, or not."
    text = f"{mention}{options['reasoning'].close}{CALLS[kind]}"
    if kind in ("llama3_json", "pythonic"):  # at the answer's beginning
        text = text.replace(options["reasoning"].close, options["reasoning"].close + "\n\n")
    found = in_parts(kind, text, **options)
    assert found == {"content": "", "reasoning": mention, "calls": [["f", OBJECT]]}


def test_a_call_of_an_unknown_function_in_thoughts_is_a_thought(kind):
    text = CALLS[kind].replace('f"', 'h"').replace("f(", "h(").replace("=f>", "=h>").replace("call>f", "call>h")
    text = text.replace(":f", ":h").replace("f\n", "h\n").replace("f<", "h<").replace(">f", ">h")
    found = in_parts(kind, f"So {text}", **thoughts_of(kind))
    assert found["calls"] == [] and found["reasoning"].startswith("So")


def test_thoughts_come_at_once_up_to_a_call():
    parser = OutputParser(TOOL_FORMATS["hermes"](), FUNCTIONS, THINK, "open")
    for part in ("I could write <tool_", "call> tags, or ", "say no more"):
        assert parser.push(part), "held back although no call begins"
    assert parser.push('<tool_call>{"name": "f"') == [] and parser.push(', "arguments": {}}</tool_call>.') == []
    assert (
        "".join(piece.text for piece in parser.push("</think>Yes"))
        == '<tool_call>{"name": "f", "arguments": {}}</tool_call>.Yes'
    )


def test_text_before_and_after_calls(kind):
    if kind in ("llama3_json", "pythonic"):
        pytest.skip("its calls are at the beginning")
    found = in_parts(kind, f"One moment.\n{CALLS[kind]}\n{CALLS[kind]}\nDone.")
    assert found["calls"] == [["f", OBJECT]] * 2
    assert found["content"].startswith("One moment.") and found["content"].strip().endswith("Done.")


# ---------------------------------------------------------------- arguments between tags

TAGGED = {
    "qwen3_coder": (
        "<parameter=%s>\n%s\n", "</parameter>", "\n", "<tool_call>\n<function=f>\n%s</function>\n</tool_call>",
    ),
    "seed_oss": (
        "<parameter=%s>%s", "</parameter>", "\n", "<seed:tool_call>\n<function=f>\n%s</function>\n</seed:tool_call>",
    ),
    "glm45": ("<arg_key>%s</arg_key>\n<arg_value>%s", "</arg_value>", "\n", "<tool_call>f\n%s</tool_call>"),
    "glm47": ("<arg_key>%s</arg_key><arg_value>%s", "</arg_value>", "", "<tool_call>f%s</tool_call>"),
    "minimax_m2": (
        '<parameter name="%s">%s', "</parameter>", "\n",
        '<minimax:tool_call>\n<invoke name="f">\n%s</invoke>\n</minimax:tool_call>',
    ),
    "hy_v3": (
        "<arg_key>%s</arg_key>\n<arg_value>%s", "</arg_value>", "\n",
        "<tool_calls>\n<tool_call>f<tool_sep>\n%s</tool_call>\n</tool_calls>",
    ),
    "deepseek_v32": (
        f'<{D}parameter name="%s" string="true">%s', f"</{D}parameter>", "\n",
        f'<{D}function_calls>\n<{D}invoke name="f">\n%s</{D}invoke>\n</{D}function_calls>',
    ),
}  # fmt: skip
"""The beginning of an argument and its value, the tag after it, what follows that, and what is around arguments."""
DAMAGES = {
    "missing": lambda end: "",
    "twice": lambda end: f"{end}\n{end}",
    "a digit more": lambda end: f"{end[:-1]}1>",
    "a slash more": lambda end: f"{end[:-1]}/>",
    "a space more": lambda end: f"{end[:-1]} >",
    "no bracket": lambda end: end[:-1],
    "cut": lambda end: f"{end[:-3]}>",
}


def written(kind: str, end: str = "", **arguments: str) -> str:
    begin, right, after, around = TAGGED[kind]
    return around % "".join(begin % pair + (end or right) + after for pair in arguments.items())


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", TAGGED)
def test_damaged_end_tags_lose_no_argument(kind, damage):
    begin, right, after, around = TAGGED[kind]
    end = DAMAGES[damage](right)
    first = begin % ("s", "x") + end + after
    for rest, more in (("", {}), (begin % ("path", "/a") + right + after, {"path": "/a"})):
        found = in_parts(kind, around % (first + rest))
        ((name, arguments),) = found["calls"]
        arguments = {key: value.rstrip("\n") for key, value in json.loads(arguments).items()}
        assert (name, arguments, found["content"]) == ("f", {"s": "x"} | more, "")


@pytest.mark.parametrize("kind", TAGGED)
@pytest.mark.parametrize(
    "text", ["a END b", "END b", "a\nEND\nb END c", "a CLOSE b", "a CLOSE\nOUTER b", "END", "a <b>c</b>"]
)
def test_values_that_contain_end_tags_are_whole(kind, text):
    _, right, _, around = TAGGED[kind]
    closing = around.partition("%s")[2].split("\n")
    value = text.replace("END", right).replace("CLOSE", closing[0]).replace("OUTER", closing[-1])
    if text == "END":  # the same as a tag that is written twice
        value, expected = right, ""
    else:
        expected = value
    found = in_parts(kind, written(kind, s=value, path="/a") + " Done.")
    assert found["calls"] == [["f", json.dumps({"s": expected, "path": "/a"}, ensure_ascii=False)]]
    assert found["content"].strip() == "Done."


@pytest.mark.parametrize("kind", TAGGED)
def test_values_that_contain_an_example_of_a_call_are_whole(kind):
    value = f"As in\n{written(kind, path='/b')}\nor so"
    found = in_parts(kind, written(kind, s=value, path="/a"))
    assert found["calls"] == [["f", json.dumps({"s": value, "path": "/a"}, ensure_ascii=False)]]


@pytest.mark.parametrize(
    "text",
    [
        f"{CALLS['hermes']}\n</tool_call> Done.",
        f"{CALLS['minimax_m2']}</minimax:tool_call> Done.",
        f"{CALLS['olmo3']}</function_calls> Done.",
    ],
)
def test_marks_behind_calls_may_be_there_twice(text):
    kind = "hermes" if "{" in text else "olmo3" if "(" in text else "minimax_m2"
    assert in_parts(kind, text) == {"content": " Done.", "reasoning": "", "calls": [["f", OBJECT]]}


@pytest.mark.parametrize("kind", TAGGED)
def test_a_value_that_is_not_closed_ends_with_its_call(kind):
    begin, around = TAGGED[kind][0], TAGGED[kind][3]
    before, _, after = around.partition("%s")
    text = before + begin % ("s", "x") + after + "\n" + written(kind, s="y")
    calls = in_parts(kind, text)["calls"]
    assert [json.loads(arguments)["s"].strip() for _, arguments in calls] == ["x", "y"]


@pytest.mark.parametrize("part", ["<function=f>", "</parameter> ", "</function> ", "<parameter=x> ", "<tool_call>"])
def test_values_full_of_tags_cost_what_they_are(part):
    began = time.process_time()
    value = part * 5000 + "end"
    ((_, arguments),) = read("qwen3_coder", written("qwen3_coder", s=value), 50)["calls"]
    assert json.loads(arguments) == {"s": value}
    assert time.process_time() - began < 3


@pytest.mark.parametrize("kind", TAGGED)
def test_prose_about_arguments_is_no_argument(kind):
    begin = TAGGED[kind][0] % ("other", "")
    value = f"Use {begin.strip()} here"
    found = in_parts(kind, written(kind, s=value, path="/a"))
    assert found["calls"] == [["f", json.dumps({"s": value, "path": "/a"}, ensure_ascii=False)]]


@pytest.mark.parametrize(
    ("schema", "written_as", "expected"),
    [
        ({"anyOf": [{"$ref": "#/$defs/E"}, {"type": "null"}]}, "1.0", '"1.0"'),
        ({"anyOf": [{"$ref": "#/$defs/E"}, {"type": "null"}]}, "null", "null"),
        ({"allOf": [{"$ref": "#/$defs/E"}]}, "1.0", '"1.0"'),
        ({"$ref": "#/$defs/L"}, "1.0", '"1.0"'),
        ({"oneOf": [{"$ref": "#/$defs/N"}, {"const": "x"}]}, "x", '"x"'),
        ({"$ref": "#/$defs/N"}, "1.0", "1.0"),
        ({"$ref": "#/$defs/loop"}, "1.0", "1.0"),
    ],
)
def test_the_type_of_a_value_may_stand_behind_references(schema, written_as, expected):
    definitions = {"E": {"enum": ["1.0"]}, "L": {"$ref": "#/$defs/E"}, "N": {"type": "number"}}
    definitions["loop"] = {"anyOf": [{"$ref": "#/$defs/loop"}]}
    functions = {"f": {"type": "object", "properties": {"s": schema}, "$defs": definitions}}
    assert in_parts("glm45", written("glm45", s=written_as), functions=functions)["calls"] == [
        ["f", f'{{"s": {expected}}}']
    ]


# ---------------------------------------------------------------- other damages


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>analysis<|message|>T<|channel|>commentary to=functions.f<|message|>{}", ("", "T", [["f", "{}"]])),
        ("<|channel|>final<|message|>4<|channel|> is a mark", ("4<|channel|> is a mark", "", [])),
        ("<|channel|>analysis<|channel|>final<|message|>4<|return|>", ("4", "", [])),
        (
            "<|channel|>commentary to=functions.f <|constrain|>json<|channel|>commentary<|message|>{}<|call|>",
            ("", "", [["f", "{}"]]),
        ),
        ('<|channel|>commentary to=functions.f <|constrain|>json {"s": "x"}<|call|>', ("", "", [["f", OBJECT]])),
        ("<|channel|>commentary functions.f <|constrain|>json<|message|>{}<|call|>", ("", "", [["f", "{}"]])),
    ],
)
def test_headers_of_harmony(text, expected):
    found = in_parts("openai", text)
    assert (found["content"], found["reasoning"], found["calls"]) == expected


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<|tool_call>call:f{{s:x{Q}y{Q}}}<tool_call|> so", f"{Q}y{Q}}}<tool_call|> so", [["f", OBJECT]]),
        (f"<|tool_call>call:f{{{Q}s{Q}:{Q}x{Q}}}<tool_call|>", "", [["f", OBJECT]]),
        (f"<|tool_call>call:f{{s:{Q}x{Q},{Q}pa", "", [["f", OBJECT[:-1]]]),
    ],
)
def test_keys_in_quotes_of_gemma(text, content, calls):
    assert in_parts("gemma4", text) == {"content": content, "reasoning": "", "calls": calls}


SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI = '<|tool_call_begin|>functions.f:%d<|tool_call_argument_begin|>{"s": "x"}<|tool_call_end|>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"R {SECTION} a {KIMI % 0} b {KIMI % 1} c {SECTION_END} so", "R so", 2),
        (f"R {SECTION} a {SECTION_END}", f"R {SECTION} a {SECTION_END}", 0),
        (f"R {SECTION} a", f"R {SECTION} a", 0),
        (f"{SECTION}{KIMI % 0} b", " b", 1),
    ],
)
def test_text_in_sections(text, content, calls):
    found = in_parts("kimi_k2", text)
    assert (found["content"], len(found["calls"])) == (content, calls)


def test_marks_that_are_special_tokens_are_no_content_behind_thoughts():
    hidden = frozenset(THINK.marks)
    found = in_parts(None, "a</think>x<think></think>y \n", reasoning=THINK, thinking="open", hidden=hidden)
    assert found == {"content": "xy \n", "reasoning": "a", "calls": []}
