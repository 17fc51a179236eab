"""Who sees a GPU where there is one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import _asks_for_gpu

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "marks", "folder", "asked"),
    [
        (["tests"], "", ".", False),
        (["tests/worker/cuda/test_kernels.py"], "not slow", ".", False),
        (["tests"], "not gpu and not slow", ".", False),
        (["tests"], "gpu and not slow", ".", True),
        (["tests/gpu/test_models.py::test_logits"], "", ".", True),
        (["tests/worker/cuda/test_kernels.py", "tests/gpu"], "not slow", ".", True),
        (["test_models.py"], "", "tests/gpu", True),
    ],
)
def test_a_gpu_is_seen_by_those_who_ask_for_it(arguments, marks, folder, asked):
    config = SimpleNamespace(
        rootpath=ROOT,
        args=arguments,
        invocation_params=SimpleNamespace(dir=ROOT / folder),
        getoption={"markexpr": marks}.get,
    )
    assert _asks_for_gpu(config) == asked
