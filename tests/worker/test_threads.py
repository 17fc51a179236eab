"""How many threads compute a step of a small model."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from radixrt.config import WorkerConfig, resolve
from radixrt.worker.execution import torch_runner as runner_module
from radixrt.worker.load.runner import load_runner
from tests.checkpoints import make_model
from tests.worker.engine import GREEDY, Engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    make_model(folder, "llama")
    return folder


@pytest.mark.parametrize("changes", [{}, {"deterministic": True}, {"kv_cache_dtype": "fp8_e4m3"}])
def test_steps_of_few_tokens_are_computed_by_one_thread(folder, monkeypatch, changes):
    """Not where results must not depend on how a product is cut."""
    config = replace(WorkerConfig(str(folder), device="cpu", max_total_tokens=2048), **changes)
    runner = load_runner(resolve(config))
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(runner, "_threads", 7)
    alone = runner._alone
    assert bool(alone) == (not changes)
    monkeypatch.setattr(runner, "_alone", alone and 20)
    engine = Engine(runner, chunk=64)
    engine.add(list(range(1, 41)), msgspec.structs.replace(GREEDY, max_tokens=3))
    while engine.step():
        pass
    assert set_to == ([] if changes else [7, 1, 1])


def test_large_matrices_are_for_all_threads(folder, monkeypatch):
    monkeypatch.setattr(runner_module, "SMALL_WEIGHTS", 1024)
    assert load_runner(resolve(WorkerConfig(str(folder), device="cpu", max_total_tokens=256)))._alone == 0
