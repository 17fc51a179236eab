"""Triton's kernels on a CPU, in its interpreter. Import it before any kernel is defined."""

from __future__ import annotations

import importlib.util
import os

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None


def prepare() -> None:
    """Without a GPU, let kernels be interpreted."""
    if not HAS_TRITON or torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    from triton.runtime import interpreter

    inner = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        """The interpreter makes an int of an array of one element, which numpy 2.4 refuses."""
        inner(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
