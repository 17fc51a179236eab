"""What comes before the attention of layers whose heads differ from other layers' (`layers.mixed_heads`): norms of
heads, rotary positions, K and V written to their pages, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.elementwise.kernels import pairs, saturated
from radixrt.worker.cuda.elementwise.launching import launch, wait
from radixrt.worker.model.layers.mixed_heads import MixedHeads

HEADS_AT_ONCE = 4
"""Heads of a program, all of q, of k or of v."""


@triton.jit
def _normed(x, weight, mean, eps):
    """float32 x, times a weight, divided by the root of the mean of squares; rounded where `norms.rms_norm` rounds."""
    return (x * tl.rsqrt(mean + eps)[:, None]).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def _rotated(
    x_ptr, norm_ptr, cos_ptr, sin_ptr, real, eps, HALF: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate the heads at x_ptr[GROUP, 1]. Returns both elements of each pair, float32[GROUP, BLOCK]."""
    i = tl.arange(0, BLOCK)[None, :]
    one, other = pairs(i, HALF, TURNED)
    inside = real & (i < HALF)
    first = tl.load(x_ptr + one, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + other, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        dtype = x_ptr.dtype.element_ty
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
        w1 = tl.load(norm_ptr + one, mask=i < HALF, other=0.0)
        w2 = tl.load(norm_ptr + other, mask=i < HALF, other=0.0)
        first = _normed(first, w1, mean, eps).to(dtype).to(tl.float32)
        second = _normed(second, w2, mean, eps).to(dtype).to(tl.float32)
    cos = tl.load(cos_ptr + i, mask=i < TURNED, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + i, mask=i < TURNED, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _stored(x, scale, LIMIT: tl.constexpr):
    """float32 x as pages hold it, before it is rounded to their dtype."""
    x = x / scale
    if LIMIT > 0:
        x = saturated(x, LIMIT)
    return x


@triton.jit
def _append_mixed_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, slots_ptr, q_ptr, k_ptr, v_ptr, q_eps, k_eps, v_eps, k_scale,
    v_scale, v_factor, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr,
    V_DIM: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, V_NORM: tl.constexpr, TIED: tl.constexpr, LIMIT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    OF_Q: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    OF_K: tl.constexpr = (KV_HEADS + GROUP - 1) // GROUP
    DIM: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    g = tl.arange(0, GROUP)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    one, other = pairs(i, HALF, TURNED)
    x_ptr = qkv_ptr + token * ALL
    cos_ptr += token * TURNED
    sin_ptr += token * TURNED
    dtype = qkv_ptr.dtype.element_ty
    kept = k_ptr.dtype.element_ty
    if part < OF_Q:
        head = part * GROUP + g
        real = head < HEADS
        at = x_ptr + head * DIM
        first, second = _rotated(at, q_norm_ptr, cos_ptr, sin_ptr, real, q_eps, HALF, TURNED, BLOCK, Q_NORM)
        q_at = q_ptr + (token * HEADS + head) * DIM
        tl.store(q_at + one, first.to(dtype), mask=real & (i < HALF))
        tl.store(q_at + other, second.to(dtype), mask=real & (i < HALF))
    elif part < OF_Q + OF_K:
        head = (part - OF_Q) * GROUP + g
        real = head < KV_HEADS
        at = x_ptr + (HEADS + head) * DIM
        first, second = _rotated(at, k_norm_ptr, cos_ptr, sin_ptr, real, k_eps, HALF, TURNED, BLOCK, K_NORM)
        # What a page holds is rounded from the activations' dtype, as it is where they are written in two steps.
        first = _stored(first.to(dtype).to(tl.float32), k_scale, LIMIT)
        second = _stored(second.to(dtype).to(tl.float32), k_scale, LIMIT)
        k_at = k_ptr + (tl.load(slots_ptr + token).to(tl.int64) * KV_HEADS + head) * DIM
        tl.store(k_at + one, first.to(kept), mask=real & (i < HALF))
        tl.store(k_at + other, second.to(kept), mask=real & (i < HALF))
    else:
        d = tl.arange(0, V_BLOCK)[None, :]
        head = (part - OF_Q - OF_K) * GROUP + g
        inside = (head < KV_HEADS) & (d < V_DIM)
        before = HEADS * DIM if TIED else (HEADS + KV_HEADS) * DIM
        x = tl.load(x_ptr + before + head * V_DIM + d, mask=inside, other=0.0).to(tl.float32)
        if V_NORM:
            x *= tl.rsqrt(tl.sum(x * x, 1) / V_DIM + v_eps)[:, None]
        x = (x.to(dtype).to(tl.float32) * v_factor).to(dtype).to(tl.float32)
        v_at = v_ptr + (tl.load(slots_ptr + token).to(tl.int64) * KV_HEADS + head) * V_DIM
        tl.store(v_at + d, _stored(x, v_scale, LIMIT).to(kept), mask=inside)


def append(
    heads: MixedHeads, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    scales: tuple[float, float] = (1.0, 1.0), out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Normalize and rotate `heads` as `MixedHeads.split` does, and write K and V to int32 slots[T] of their pages, keys
    [slots, kv_heads, D] and values [slots, kv_heads, width of V], divided by `scales` and rounded to their dtype, FP8
    saturating; nothing is written if attention reads the pages of another layer. Returns the queries [T, heads, D], in
    `out` if given."""
    sizes, norms, qkv = heads.sizes, heads.norms, heads.qkv
    tokens, dim = len(qkv), sizes.head_dim
    q = qkv.new_empty((tokens, heads.num_heads, dim)) if out is None else out
    limit = torch.finfo(keys.dtype).max if keys.dtype.itemsize == 1 else 0.0
    weights = (heads.cos if norm is None else norm.weight for norm in (norms.q, norms.k))
    there = tuple(norm is not None for norm in (norms.q, norms.k, norms.v))
    eps = (0.0 if norm is None else norm.eps for norm in (norms.q, norms.k, norms.v))
    parts = triton.cdiv(heads.num_heads, HEADS_AT_ONCE)
    if sizes.source is None:
        parts += 2 * triton.cdiv(sizes.kv_heads, HEADS_AT_ONCE)
    launch(
        _append_mixed_kernel, (tokens, parts), None,
        qkv, heads.cos, heads.sin, *weights, slots, q, keys, values, *eps, *scales, heads.sizes.value_factor,
        heads.num_heads, sizes.kv_heads, dim // 2, heads.cos.shape[-1], sizes.value_dim, qkv.shape[1],
        triton.next_power_of_2(dim // 2), triton.next_power_of_2(sizes.value_dim), HEADS_AT_ONCE, *there,
        sizes.tied_values, limit, num_warps=4,
    )  # fmt: skip
    return q
