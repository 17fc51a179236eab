"""Fixtures that every area uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests import interpreter  # noqa: E402  (torch reads the environment when imported)

interpreter.prepare()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with recorded traces, transcripts and tokenizers; tests that read it skip where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no shared/data beside the checkout")
    return folder
