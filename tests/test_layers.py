"""Who may import whom. The contracts are in pyproject.toml; imports within functions count."""

from __future__ import annotations

import graphlib
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

import radixrt

ROOT = Path(radixrt.__file__).parents[1]


def test_imports_keep_their_directions():
    """In a process of its own, as import-linter disables loggers, which other tests read."""
    code = "import sys, importlinter.cli; sys.exit(importlinter.cli.lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_no_modules_import_each_other_in_a_circle():
    graph = grimp.build_graph("radixrt", cache_dir=None)
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("radixrt.worker.loop, radixrt.worker.execution.fake_runner", ["torch"]),
        ("radixrt, radixrt.tree", ["radixrt.lang", "zmq"]),
        ("radixrt.client", ["torch", "transformers", "radixrt.router"]),
    ],
    ids=["worker", "package", "client"],
)
def test_importing_loads_no_more_than_is_needed(imported, absent):
    code = f"import sys, {imported}; sys.exit(any(name in sys.modules for name in {absent}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
