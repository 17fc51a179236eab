"""The kernels on a CPU, in Triton's interpreter; on a GPU they run in tests/gpu."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined


def _index_as_numpy_wants_it() -> None:
    """Triton's interpreter makes an int of an array of one element, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    inner = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        inner(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    _index_as_numpy_wants_it()

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
