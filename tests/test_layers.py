"""Who may import whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import radixrt

ROOT = Path(radixrt.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TORCH = (
    "worker/choices.py",
    "worker/loading.py",
    "worker/cuda/",
    "worker/group.py",
    "worker/runner.py",
    "worker/kv.py",
    "worker/mixed_pool.py",
    "worker/host_pool.py",
    "worker/attention.py",
    "worker/sample.py",
    "worker/picking.py",
    "worker/predicting.py",
    "worker/pools.py",
    "worker/scales.py",
    "worker/model/",
)
ALONE = {"tree", "messages", "config"}
ONLY_IN = {
    "zmq": ("wire/",),
    "torch": (*TORCH, "demo/checkpoint.py"),
    "safetensors": TORCH,
    "flashinfer": ("worker/cuda/",),
    "triton": ("worker/cuda/", "worker/choices.py"),
    "transformers": ("router/tokens/", "worker/vocabulary.py", "worker/model/transformers_model.py", "demo/"),
    "tokenizers": ("router/tokens/", "worker/vocabulary.py", "demo/checkpoint.py"),
    "sentencepiece": ("router/tokens/", "worker/vocabulary.py"),
    "ray": ("fleet.py",),
    "xgrammar": ("router/grammar.py", "worker/grammar.py", "worker/matching.py"),
    "jinja2": ("router/tokens/",),
    "starlette": ("frontend/",),
    "uvicorn": ("frontend/",),
    "prometheus_client": ("report/",),
}
FORBIDDEN = {
    "router": {"worker", "frontend", "lang", "async_client", "client", "launch", "cli"},
    "worker": {"router", "frontend", "lang", "async_client", "client", "launch", "cli", "report", "wire"},
    "report": {"router", "worker", "frontend", "lang", "async_client", "client", "launch", "cli"},
    "lang": {"worker", "frontend", "launch", "cli", "wire"},
    "frontend": {"worker", "lang", "launch", "cli"},
    "transports": {
        "worker",
        "router",
        "frontend",
        "lang",
        "async_client",
        "client",
        "portal",
        "launch",
        "cli",
        "report",
    },
    "wire": {"worker", "router", "frontend", "lang", "async_client", "client", "launch", "cli", "report", "messages"},
}


def imports(path: Path) -> set[str]:
    """Modules imported anywhere in a file, but for type checking alone."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downward(path):
    place = path.relative_to(ROOT).as_posix()
    part = place.split("/")[0].removesuffix(".py")
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top in ONLY_IN:
            assert place.startswith(ONLY_IN[top]), f"{place} imports {top}"
        if top == "radixrt" and rest:
            other = rest.split(".")[0]
            assert other not in FORBIDDEN.get(part, ()), f"{place} imports {name}"
            assert part not in ALONE or other == part, f"{place} imports {name}"


def test_the_scheduler_runs_without_torch():
    import subprocess
    import sys

    code = "import sys, radixrt.worker.loop, radixrt.worker.execution.fake_runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    code = "import sys; from radixrt import roles; from types import SimpleNamespace as Fake"
    code += "; roles._serve(Fake(run=lambda: None)); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0, "a worker without a model"
    code = "import sys, radixrt, radixrt.tree; sys.exit('radixrt.lang' in sys.modules or 'zmq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
