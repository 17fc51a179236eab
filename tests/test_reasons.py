"""No code decides by the words of an error or a reason: these are for people."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import radixrt

ROOT = Path(radixrt.__file__).parent
SENTENCES = {"message", "reason", "problem", "error", "why", "note", "detail", "finish"}


def sentence(node: ast.expr) -> bool:
    """Whether an expression is an error's text by its name, as in `error.message`, or `str(error)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        return sentence(node.args[0]) if node.args else False
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in SENTENCES


def decisions(tree: ast.AST) -> Iterator[int]:
    """Lines that look for words in a sentence, or use one as a key."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=text, attr="startswith" | "endswith" | "find" | "count" | "index")):
                if sentence(text):
                    yield node.lineno
            case ast.Compare(
                left=ast.Constant(value=str()) | ast.Name(), ops=[ast.In() | ast.NotIn()], comparators=[text]
            ):
                if isinstance(node.left, ast.Constant) or node.left.id.isupper():
                    if isinstance(text, ast.Attribute | ast.Call) and sentence(text):
                        yield node.lineno
            case ast.Compare(comparators=[ast.Constant(value=str(words))], left=text) if " " in words:
                if sentence(text):
                    yield node.lineno


def test_nothing_is_decided_by_the_words_of_an_error():
    assert not [(path, at) for path in ROOT.rglob("*.py") for at in decisions(ast.parse(path.read_text()))]


def test_a_decision_by_words_is_found():
    lines = ["error.message.startswith('too')", "str(error) == 'too long'", "MAX in why.text", "MAX in error.message"]
    assert sorted(decisions(ast.parse("\n".join(lines)))) == [1, 2, 4]
