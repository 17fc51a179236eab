"""Runs Triton's kernels on a CPU, in its interpreter. `prepare` must be called before any kernel is defined."""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType

import numpy as np
import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
slow_without_gpu = pytest.mark.skipif(False, reason="") if torch.cuda.is_available() else pytest.mark.slow
"""Of tests that take the interpreter many seconds."""


def prepare() -> None:
    """Turn on the interpreter if there is no GPU."""
    if not HAS_TRITON or torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    from triton.runtime import interpreter

    inner = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        """Fix: the interpreter converts an array with one element to an int, which numpy 2.4 does not allow."""
        inner(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    _save_time(interpreter)


def _save_time(interpreter: ModuleType) -> None:
    """Make the interpreter faster: it builds a table of types at each operation, and patches the module
    `triton.language` at each call of a function. Do both only once."""
    find, patch = interpreter._get_np_dtype, interpreter._patch_lang
    found: dict[str, np.dtype] = {}
    modules: set[str] = set()

    def np_dtype(dtype) -> np.dtype:
        if dtype.name not in found:
            found[dtype.name] = find(dtype)
        return found[dtype.name]

    def patch_once(fn):
        if fn.__module__ not in modules:
            modules.add(fn.__module__)
            patch(fn)
        return interpreter._LangPatchScope()  # empty, so that the patches are not undone

    interpreter._get_np_dtype, interpreter._patch_lang = np_dtype, patch_once
