"""Which integers, scales and mins the blocks of a GGUF file consist of (ggml, `ggml-quants.c`).

Q4_0 Q4_1 Q5_0 Q5_1 Q8_0    blocks of 32 columns: a float16 scale, in Q4_1 and Q5_1 a float16 min, the integers
Q4_K Q5_K                   of 256: float16 scales of the scales and of the mins, 6 bits of each for 32 columns
Q6_K                        of 256: the integers, 8 bits of scale for each 16 columns, a float16 scale of these
"""

from __future__ import annotations

import numpy as np
import torch

from radixrt.worker.model.layers.int_linear import IntWeight

KINDS = {
    "Q4_0": (4, 32), "Q4_1": (4, 32), "Q4_K": (4, 32), "Q5_0": (8, 32), "Q5_1": (8, 32), "Q5_K": (8, 32),
    "Q8_0": (8, 32), "Q6_K": (8, 16),
}  # fmt: skip
"""By format: bits that its integers are kept in, and columns of a group."""


def read_integers(name: str, stored: np.ndarray, dequantized: np.ndarray) -> IntWeight:
    """The rows of a tensor in a format of KINDS, from its uint8[N, bytes] and its values, float32[N, K]."""
    bits, group = KINDS[name]
    rows, columns = dequantized.shape
    scales, mins = (None if x is None else x.reshape(rows, columns // group) for x in _facts(name, stored))
    assert scales is not None
    grouped = dequantized.reshape(rows, -1, group)
    values = (grouped if mins is None else grouped - mins[..., None]) / np.where(scales == 0, 1, scales)[..., None]
    whole = torch.from_numpy(np.rint(values).astype(np.int16).reshape(rows, columns))
    return IntWeight.of(whole, torch.from_numpy(scales), None if mins is None else torch.from_numpy(mins), bits, group)


def _facts(name: str, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """float32 scales and mins of all groups, in their order."""
    from gguf import quants

    each = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[name]
    blocks = stored.reshape(-1, each)
    if name == "Q6_K":
        return _halves(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32), None
    scales = _halves(blocks, 0)
    if name in ("Q4_K", "Q5_K"):
        own = [x.astype(np.float32) for x in quants.Q4_K.get_scale_min(blocks[:, 4:16].copy())]
        return scales * own[0], -(_halves(blocks, 2) * own[1])
    if name == "Q4_0":
        return scales, -8 * scales
    return scales, _halves(blocks, 2) if name in ("Q4_1", "Q5_1") else None


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """float32[blocks, 1] of the float16 at this byte of each block."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)
