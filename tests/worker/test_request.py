"""Each field of a request has one writer, and what runs plans does not see requests."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import radixrt.worker
from radixrt.worker.request import Request

ROOT = Path(radixrt.worker.__file__).parent
NAMES = {"request", "victim", "other", "one", "r"}
"""What requests are called, beside parameters that are annotated so."""
CHANGES = {"append", "extend", "frombytes", "insert", "pop", "clear", "remove"}


def changed(node: ast.AST) -> Iterator[ast.expr]:
    """What a node assigns to, or changes in place."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        yield node.func.value


def writers(source: str, own: bool) -> Iterator[str]:
    """The fields of requests that a module writes, `own`: within the class, after its start."""
    tree = ast.parse(source)
    parameters = {
        argument.arg
        for argument in ast.walk(tree)
        if isinstance(argument, ast.arg) and isinstance(argument.annotation, ast.Name)
        and argument.annotation.id == "Request"
    }  # fmt: skip
    skipped = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
        for node in ast.walk(function)
    }
    names = NAMES | parameters | ({"self"} if own else set())
    for node in ast.walk(tree):
        for target in () if id(node) in skipped else changed(node):
            if isinstance(target, ast.Attribute) and target.attr in Request.__slots__:
                base = target.value.attr if isinstance(target.value, ast.Attribute) else getattr(target.value, "id", "")
                if base in names:
                    yield target.attr


def test_what_runs_plans_sees_no_request_and_no_lease():
    """Not even in annotations."""
    rooms = "execution", "cuda", "model", "parallel"
    files = [ROOT / "plan.py", *(path for room in rooms for path in (ROOT / room).rglob("*.py"))]
    assert len(files) > 100
    for path in files:
        source = path.read_text()
        assert "radixrt.worker.request" not in source and "radixrt.tree" not in source, path


def test_writers_are_found():
    source = "def f(x: Request):\n  x.row, other.hit = 1, 2\n  seat.request.tokens.append(3)\n  self.lease = 4"
    assert list(writers(source, own=False)) == ["row", "hit", "tokens"]
    assert "lease" in writers(source, own=True)


def test_each_field_of_a_request_has_one_writer():
    found: dict[str, set[str]] = defaultdict(set)
    for path in ROOT.rglob("*.py"):
        if "model" not in path.parts and "cuda" not in path.parts:
            for field in writers(path.read_text(), own=path.name == "request.py"):
                found[field].add(str(path.relative_to(ROOT)))
    assert {"tokens", "total", "computed", "row", "finished", "matcher"} <= set(found)
    assert {field: names for field, names in found.items() if len(names) > 1} == {}
