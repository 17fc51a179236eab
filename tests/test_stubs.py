"""What type checkers read: the stubs of compiled modules agree with them, and only kernels are excepted."""

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import radixrt

ROOT = Path(radixrt.__file__).parent
STUBS = sorted(ROOT.rglob("*.pyi"))
IMPLIED = {"__new__", "__len__", "__enter__", "__exit__"}  # they have no documentation of their own


def _members(found: object) -> set[str]:
    return {name for name in dir(found) if not name.startswith("__")}


def _documented(text: str) -> list[str]:
    """The arguments that documentation such as `f(a, b or c, d=1) -> int: ...` begins with, as `a`, `b`, `d=1`."""
    inside = re.match(r"\w+\((.*?)\)", text)
    assert inside, text
    return [part.split(" or ")[0] for part in inside[1].split(", ") if part not in ("", "*")]


def _declared(function: ast.FunctionDef) -> list[str]:
    args = function.args
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + args.defaults
    pairs = [*zip(plain, defaults, strict=True), *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    named = [(arg.arg, default) for arg, default in pairs if arg.arg not in ("self", "cls")]
    return [name if default is None else f"{name}={ast.unparse(default)}" for name, default in named]


def _functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    return (node for node in body if isinstance(node, ast.FunctionDef))


def test_each_compiled_module_has_a_stub():
    compiled = re.findall(r'"radixrt\.([\w.]+)"', (ROOT.parent / "setup.py").read_text())
    assert sorted(compiled) == sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in STUBS)


@pytest.mark.parametrize("path", STUBS, ids=lambda path: path.stem)
def test_a_stub_has_the_names_and_arguments_of_its_module(path: Path):
    module = importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts))
    stub = ast.parse(path.read_text()).body
    functions = {function.name: function for function in _functions(stub)}
    classes = {node.name: node for node in stub if isinstance(node, ast.ClassDef)}
    # A class that only another one makes is not in the module.
    assert functions.keys() | (classes.keys() & vars(module).keys()) == _members(module)
    for name, function in functions.items():
        assert _declared(function) == _documented(getattr(module, name).__doc__), name
    for name in classes.keys() & vars(module).keys():
        _check_class(classes[name], getattr(module, name))


def _check_class(declared: ast.ClassDef, cls: type) -> None:
    methods = {function.name: function for function in _functions(declared.body)}
    assert methods.keys() - IMPLIED == _members(cls), cls
    assert all(hasattr(cls, name) for name in methods), cls
    for name, function in methods.items():
        property_ = bool(function.decorator_list)
        assert property_ != callable(getattr(cls, name)), name
        if not (property_ or name in IMPLIED):
            assert _declared(function) == _documented(getattr(cls, name).__doc__), name
    if "__new__" in methods:
        assert _declared(methods["__new__"]) == _documented(cls.__doc__ or ""), cls


def test_only_files_with_kernels_have_functions_without_types():
    checks = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["mypy"]
    excepted = {name for part in checks["overrides"] if "disallow_untyped_defs" in part for name in part["module"]}
    kernel = re.compile(r"^\s*@(triton|gluon)\.jit", re.MULTILINE)
    found = {
        ".".join(p.relative_to(ROOT.parent).with_suffix("").parts)
        for p in ROOT.rglob("*.py")
        if kernel.search(p.read_text())
    }
    assert excepted == found
