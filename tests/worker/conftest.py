"""Small checkpoints of each family, made once per test session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.worker.families import make_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A function `checkpoint(family, **changes)` -> (folder, transformers model), cached by its arguments."""
    made: dict[str, tuple[Path, torch.nn.Module]] = {}

    def make(family: str, **changes) -> tuple[Path, torch.nn.Module]:
        key = repr((family, sorted(changes.items(), key=str)))
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = folder, make_model(folder, family, **changes)
        return made[key]

    return make
