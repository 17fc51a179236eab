"""FlashInfer's ragged kernels in plain torch, for tests without it."""

from __future__ import annotations

import numpy as np
import torch

from radixrt.worker.cuda.attention.variants import Shape


class Wrapper:
    """A wrapper that computes one sequence after the other, in float32."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def plan(self, counts: np.ndarray, keys: np.ndarray, window: int | None, causal: bool) -> None:
        self._counts, self._keys, self._window, self._causal = counts.tolist(), keys.tolist(), window, causal

    def run(self, q, k, v, out, lse=None, return_lse=False):
        assert len(q) == sum(self._counts) and len(k) == sum(self._keys)
        group = q.shape[1] // k.shape[1]
        for at, begin, count, keys in zip(
            np.cumsum(self._counts) - self._counts, np.cumsum(self._keys) - self._keys, self._counts, self._keys,
            strict=True,
        ):  # fmt: skip
            mine, theirs = (x[begin : begin + keys].float().repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[at : at + count].float(), mine) * self._scale
            if self._causal:
                position = torch.arange(keys - count, keys)[:, None]
                late = torch.arange(keys) > position
                if self._window is not None:
                    late |= torch.arange(keys) <= position - self._window
                scores = scores.masked_fill(late, -torch.inf)
            out[at : at + count] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), theirs).to(out.dtype)
            if return_lse:
                lse[at : at + count] = scores.logsumexp(-1).t() / np.log(2)


class PlainFlashInfer:
    """Like `ragged.FlashInfer`. `used`: the numbers of the wrappers that were requested."""

    def __init__(self, shape: Shape, dtype: torch.dtype, tokens: int) -> None:
        self.tokens = tokens
        size = (tokens, shape.kv_heads, shape.head_dim)
        self.workspace = torch.full(size, torch.nan, dtype=dtype), torch.full(size, torch.nan, dtype=dtype)
        self.used: list[int] = []
        self._scale = shape.scale

    def wrapper(self, parity: int, number: int) -> Wrapper:
        self.used.append(number)
        return Wrapper(self._scale)

    def plan(self, wrapper, counts, keys, window, causal=True) -> None:
        wrapper.plan(counts, keys, window, causal)
