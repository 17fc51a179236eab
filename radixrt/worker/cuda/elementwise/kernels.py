"""Fused elementwise kernels, in Triton. They are compiled at first use, in about a second each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.elementwise.launching import KernelCache, launch, wait
from radixrt.worker.cuda.linear.quantize_activations import launch_sizes, result, store_fp8
from radixrt.worker.model.layers.fp8 import LIMIT, Activations, Fp8Scaling
from radixrt.worker.model.spec.spec import CLAMPED_SWIGLU

GATED_TILE = 128, 128
"""Rows and inner features of the tiles of `hopper_gated`."""
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "clamped_swiglu": 3}
CLAMP, ALPHA = (tl.constexpr(x) for x in CLAMPED_SWIGLU)


# ---------------------------------------------------------------- norm


@triton.jit(do_not_specialize=["stride"])
def _norm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, scales_ptr, eps, size, stride, GROUP: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK: tl.constexpr, CENTERED: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < size
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    wait(EARLY)
    x = tl.load(x_ptr + row * size + i, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        x = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    dtype = x_ptr.dtype.element_ty
    x = x.to(weight_ptr.dtype.element_ty).to(tl.float32) * weight
    if BIAS:
        x += tl.load(bias_ptr + i, mask=inside, other=0.0).to(tl.float32)
    x = x.to(dtype)
    if GROUP > 0:
        store_fp8(x.to(tl.float32), out_ptr, scales_ptr, row, size, stride, LIMIT, GROUP, BLOCK)
    else:
        tl.store(out_ptr + row * size + i, x, mask=inside)


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    fp8_scaling: Fp8Scaling | None = None,
    centered: bool = False,
    bias: torch.Tensor | None = None,
) -> Activations:
    """RMSNorm of x[T, H], after subtracting the mean if `centered`, times a weight in the dtype of x or float32, maybe
    plus a bias; with an `fp8_scaling`, quantized to FP8."""
    rows, size = x.shape
    group, block, warps = launch_sizes(size, fp8_scaling)
    normed, values, scales, stride = result(x, rows, size, fp8_scaling)
    launch(_norm_kernel, (rows,), None, x, weight, weight if bias is None else bias, values, scales, eps, size, stride,
           group, LIMIT, block, centered, bias is not None, num_warps=warps)  # fmt: skip
    return normed


# ---------------------------------------------------------------- gate


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Apply one of the first three of ACTIVATIONS to float32 x."""
    if ACTIVATION == 0:
        return x / (1 + tl.exp(-x))
    elif ACTIVATION == 1:
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:  # tanh(y) = 2 / (1 + exp(-2 y)) - 1
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1 + tl.exp(-2 * inner))


@triton.jit
def saturated(x, LIMIT: tl.constexpr):
    """Clamp to [-LIMIT, LIMIT]; NaN stays NaN."""
    x = tl.where(x > LIMIT, LIMIT, x)
    return tl.where(x < -LIMIT, -LIMIT, x)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Combine float32 gate and up by one of ACTIVATIONS, as `ops.TorchOps.gate`."""
    if ACTIVATION == 3:
        gate = tl.where(gate > CLAMP, CLAMP, gate)
        return (saturated(up, CLAMP) + 1) * (gate / (1 + tl.exp(gate * -ALPHA)))
    else:
        return activated(gate, ACTIVATION) * up


@triton.jit(do_not_specialize=["stride"])
def _gate_kernel(
    x_ptr, up_ptr, out_ptr, scales_ptr, size, x_stride, up_stride, stride, ACTIVATION: tl.constexpr,
    GROUP: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    gate = tl.load(x_ptr + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + i, mask=inside, other=0.0).to(tl.float32)
    out = gated(gate, up, ACTIVATION).to(x_ptr.dtype.element_ty)
    if GROUP > 0:
        store_fp8(out.to(tl.float32), out_ptr, scales_ptr, row, size, stride, LIMIT, GROUP, BLOCK)
    else:
        tl.store(out_ptr + row * size + i, out, mask=inside)


def gate(
    x: torch.Tensor, activation: str, fp8_scaling: Fp8Scaling | None = None, up: torch.Tensor | None = None
) -> Activations:  # fmt: skip
    """act(first half) * second half of x[T, 2 I], or act(x) * up of x[T, I] and up[T, I]: [T, I]; with an
    `fp8_scaling`, quantized to FP8."""
    x, up = x.chunk(2, dim=1) if up is None else (x, up)
    rows, size = x.shape
    if fp8_scaling is None:
        group, block, warps = 0, min(2048, triton.next_power_of_2(size)), 4
    else:
        group, block, warps = launch_sizes(size, fp8_scaling)
    gated, values, scales, stride = result(x, rows, size, fp8_scaling)
    launch(
        _gate_kernel, (rows, triton.cdiv(size, block)), None,
        x, up, values, scales, size, x.stride(0), up.stride(0), stride, ACTIVATIONS[activation], group, LIMIT, block,
        num_warps=warps,
    )  # fmt: skip
    return gated


@triton.jit(do_not_specialize=["stride"])
def _squared_relu_kernel(
    x_ptr, out_ptr, scales_ptr, size, stride, GROUP: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    x = tl.load(x_ptr + row * size + i, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(x < 0, 0.0, x)  # NaN stays NaN
    out = (x * x).to(x_ptr.dtype.element_ty)
    if GROUP > 0:
        store_fp8(out.to(tl.float32), out_ptr, scales_ptr, row, size, stride, LIMIT, GROUP, BLOCK)
    else:
        tl.store(out_ptr + row * size + i, out, mask=inside)


def squared_relu(x: torch.Tensor, fp8_scaling: Fp8Scaling | None = None) -> Activations:
    """relu(x[T, I])^2: in place; with an `fp8_scaling`, quantized to FP8."""
    rows, size = x.shape
    squared: Activations = x
    if fp8_scaling is None:
        group, block, warps = 0, min(2048, triton.next_power_of_2(size)), 4
        values, scales, stride = x, x, 0
    else:
        group, block, warps = launch_sizes(size, fp8_scaling)
        squared, values, scales, stride = result(x, rows, size, fp8_scaling)
    launch(
        _squared_relu_kernel, (rows, triton.cdiv(size, block)), None, x, values, scales, size, stride, group, LIMIT,
        block, num_warps=warps,
    )  # fmt: skip
    return squared


# ---------------------------------------------------------------- norm of heads, rotation, pages


@triton.jit
def _means_kernel(
    qkv_ptr, out_ptr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1)  # 0: of q
    begin = (token * (HEADS + 2 * KV_HEADS) + k * HEADS) * DIM
    size = tl.where(k == 0, HEADS * DIM, KV_HEADS * DIM)
    i = tl.arange(0, BLOCK)
    x = tl.load(qkv_ptr + begin + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * 2 + k, tl.sum(x * x, 0) / size)


def mean_squares(qkv: torch.Tensor, num_heads: int, kv_heads: int) -> torch.Tensor:
    """float32[T, 2] for qkv[T, heads + 2 kv_heads, D]: the mean square of all elements of q, and of k."""
    tokens, _, dim = qkv.shape
    out = torch.empty((tokens, 2), dtype=torch.float32, device=qkv.device)
    block = triton.next_power_of_2(max(num_heads, kv_heads) * dim)
    warps = 8 if block > 2048 else 4
    launch(_means_kernel, (tokens, 2), None, qkv, out, num_heads, kv_heads, dim, block, num_warps=warps)
    return out


@triton.jit
def pairs(i, HALF: tl.constexpr, TURNED: tl.constexpr):
    """The elements of pair `i` of a head of 2 HALF: elements that are rotated together, followed by pairs of the halves
    of the rest."""
    if TURNED < HALF:
        one = tl.where(i < TURNED, i, i + TURNED)
        other = one + tl.where(i < TURNED, TURNED, HALF - TURNED)
    else:
        one = i
        other = i + HALF
    return one, other


@triton.jit
def _append_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, means_ptr, slots_ptr, q_ptr, k_ptr, v_ptr, eps, k_scale, v_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, NORM: tl.constexpr, RANKS: tl.constexpr, LIMIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    one, other = pairs(i, HALF, TURNED)
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    inside = (head < ALL) & (i < HALF)
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = head >= HEADS + KV_HEADS
    at = qkv_ptr + (token * ALL + head) * (2 * HALF)
    first = tl.load(at + one, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + other, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        if RANKS > 0:  # of all heads together
            q_mean = tl.load(means_ptr + token * RANKS * 2)
            k_mean = tl.load(means_ptr + token * RANKS * 2 + 1)
            for rank in tl.static_range(1, RANKS):
                q_mean += tl.load(means_ptr + (token * RANKS + rank) * 2)
                k_mean += tl.load(means_ptr + (token * RANKS + rank) * 2 + 1)
            factor = tl.where(is_v, 1.0, tl.rsqrt(tl.where(is_q, q_mean, k_mean) / RANKS + eps))
            q_one = head * (2 * HALF) + one
            q_other = head * (2 * HALF) + other
            k_one = (head - HEADS) * (2 * HALF) + one
            k_other = (head - HEADS) * (2 * HALF) + other
            q_inside = inside & is_q
            k_inside = inside & is_k
        else:
            mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
            factor = tl.where(is_v, 1.0, tl.rsqrt(mean + eps)[:, None])
            q_one = one
            q_other = other
            k_one = one
            k_other = other
            q_inside = i < HALF
            k_inside = i < HALF
        w1 = tl.where(is_q, tl.load(q_norm_ptr + q_one, mask=q_inside, other=0.0),
                      tl.load(k_norm_ptr + k_one, mask=k_inside, other=0.0))  # fmt: skip
        w2 = tl.where(is_q, tl.load(q_norm_ptr + q_other, mask=q_inside, other=0.0),
                      tl.load(k_norm_ptr + k_other, mask=k_inside, other=0.0))  # fmt: skip
        dtype = qkv_ptr.dtype.element_ty
        narrow = q_norm_ptr.dtype.element_ty
        normed1 = (first * factor).to(narrow).to(tl.float32) * w1.to(tl.float32)
        normed2 = (second * factor).to(narrow).to(tl.float32) * w2.to(tl.float32)
        first = tl.where(is_v, first, normed1.to(dtype).to(tl.float32))  # rounded where the model rounds
        second = tl.where(is_v, second, normed2.to(dtype).to(tl.float32))
    cos = tl.load(cos_ptr + token * TURNED + i, mask=i < TURNED, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * TURNED + i, mask=i < TURNED, other=0.0).to(tl.float32)
    stays = is_v
    if TURNED < HALF:
        stays = is_v | (i >= TURNED)
    turned1 = tl.where(stays, first, first * cos - second * sin)
    turned2 = tl.where(stays, second, second * cos + first * sin)
    q_at = q_ptr + (token * HEADS + head) * (2 * HALF)
    tl.store(q_at + one, turned1.to(q_ptr.dtype.element_ty), mask=inside & is_q)
    tl.store(q_at + other, turned2.to(q_ptr.dtype.element_ty), mask=inside & is_q)
    # What a page holds is rounded from the activations' dtype, as it is where they are written in two steps.
    dtype = qkv_ptr.dtype.element_ty
    scale = tl.where(is_v, 1.0 / v_scale, 1.0 / k_scale)
    turned1 = turned1.to(dtype).to(tl.float32) * scale
    turned2 = turned2.to(dtype).to(tl.float32) * scale
    if LIMIT > 0:
        turned1 = saturated(turned1, LIMIT)
        turned2 = saturated(turned2, LIMIT)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    k_at = (slot * KV_HEADS + head - HEADS) * (2 * HALF)
    stored = k_ptr.dtype.element_ty
    tl.store(k_ptr + k_at + one, turned1.to(stored), mask=inside & is_k)
    tl.store(k_ptr + k_at + other, turned2.to(stored), mask=inside & is_k)
    v_at = k_at - KV_HEADS * (2 * HALF)
    tl.store(v_ptr + v_at + one, turned1.to(stored), mask=inside & is_v)
    tl.store(v_ptr + v_at + other, turned2.to(stored), mask=inside & is_v)


def append(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    scales: tuple[float, float] = (1.0, 1.0),
    out: torch.Tensor | None = None,
    means: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply rotary positions to qkv[T, heads + 2 kv_heads, D], and append K and V to their pages: they are written to
    int32 slots[T] of keys, values [slots, kv_heads, D], divided by `scales` and rounded to their dtype, FP8 saturating.
    Returns the rotated queries [T, heads, D], in `out` if given.

    cos, sin are [T, R / 2], for the first R elements of a head, which are rotated. `norms` are weights [D] of the
    RMSNorm of each head of q and k before the rotation or, with `means`, float32[T, ranks, 2], of all heads together
    (see `layers.Heads`)."""
    tokens, _, dim = qkv.shape
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device) if out is None else out
    limit = torch.finfo(keys.dtype).max if keys.dtype.itemsize == 1 else 0.0
    q_norm, k_norm = norms or (cos, cos)
    group = 16 if dim <= 128 else 8
    all_heads = qkv.shape[1]
    launch(
        _append_kernel, (tokens, triton.cdiv(all_heads, group)), None,
        qkv, cos, sin, q_norm, k_norm, cos if means is None else means, slots, q, keys, values, eps, *scales,
        heads, keys.shape[1], dim // 2, cos.shape[-1], triton.next_power_of_2(dim // 2), group, norms is not None,
        0 if means is None else means.shape[1], limit, num_warps=4,
    )  # fmt: skip
    return q


# ---------------------------------------------------------------- the page table and the tokens


@triton.jit(do_not_specialize=["count"])  # otherwise it is compiled again for 1 and for multiples of 16
def _scatter_kernel(writes_ptr, table_ptr, count, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    row = tl.load(writes_ptr + i, mask=inside, other=0).to(tl.int64)
    index = tl.load(writes_ptr + count + i, mask=inside, other=0)
    page = tl.load(writes_ptr + 2 * count + i, mask=inside, other=0)
    tl.store(table_ptr + row * stride + index, page, mask=inside)


def scatter(writes: torch.Tensor, table: torch.Tensor) -> None:
    """table[row, index] = page for N writes, int32[3, N] of (row, index, page). Equal places must have equal pages."""
    count = writes.shape[1]
    if count:
        _scatter_kernel[(triton.cdiv(count, 256),)](writes, table, count, table.stride(0), 256, num_warps=2)


@triton.jit(do_not_specialize=["count"])
def _resolve_kernel(tokens_ptr, rows_ptr, sampled_ptr, out_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    token = tl.load(tokens_ptr + i, mask=inside, other=0)
    row = tl.load(rows_ptr + i, mask=inside & (token < 0), other=0)
    sampled = tl.load(sampled_ptr + row, mask=inside & (token < 0), other=0)
    tl.store(out_ptr + i, tl.where(token < 0, sampled, token), mask=inside)


def resolve(tokens: torch.Tensor, rows: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """int32 tokens[T], in which each negative id (FROM_DEVICE) is replaced by drawn[rows[i]]. Negative ids must be
    among the first len(rows)."""
    out = tokens.clone() if len(rows) < len(tokens) else torch.empty_like(tokens)
    if len(rows):
        _resolve_kernel[(triton.cdiv(len(rows), 256),)](tokens, rows, sampled, out, len(rows), 256, num_warps=2)
    return out


# ---------------------------------------------------------------- cached K and V, side by side


@triton.jit(do_not_specialize=["stride"])
def _gather_kernel(
    k_ptr, v_ptr, table_ptr, sequences_ptr, k_out_ptr, v_out_ptr, stride, k_scale, v_scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.load(sequences_ptr + tl.program_id(1) * 4).to(tl.int64)
    first = tl.load(sequences_ptr + tl.program_id(1) * 4 + 1)
    count = tl.load(sequences_ptr + tl.program_id(1) * 4 + 2)
    begin = tl.load(sequences_ptr + tl.program_id(1) * 4 + 3).to(tl.int64)
    j = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if tl.program_id(0) * TOKENS < count:
        known = j < count
        page = tl.load(table_ptr + row * stride + (first + j) // PAGE, mask=known, other=0).to(tl.int64)
        slot = page * PAGE + (first + j) % PAGE
        i = tl.arange(0, BLOCK)
        inside = known[:, None] & (i < WIDTH)[None, :]
        source = slot[:, None] * WIDTH + i[None, :]
        target = (begin + j)[:, None] * WIDTH + i[None, :]
        k = tl.load(k_ptr + source, mask=inside, other=0.0).to(tl.float32) * k_scale
        v = tl.load(v_ptr + source, mask=inside, other=0.0).to(tl.float32) * v_scale
        tl.store(k_out_ptr + target, k.to(k_out_ptr.dtype.element_ty), mask=inside)
        tl.store(v_out_ptr + target, v.to(v_out_ptr.dtype.element_ty), mask=inside)


def gather(
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    page_size: int,
    sequences: torch.Tensor,
    longest: int,
    out: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[float, float] = (1.0, 1.0),
    cache: KernelCache | None = None,
) -> None:
    """Copy K and V of some sequences from their pages, keys, values [slots, kv_heads, D], times `scales`, into `out`,
    two tensors [tokens, kv_heads, D] of any float dtype.

    `sequences` is int32[S, 4]: row of the page table, first position, number of positions (at most `longest`), first
    token in `out`."""
    width = keys.shape[1] * keys.shape[2]
    block = triton.next_power_of_2(width)
    tokens = max(1, min(16, 16384 // block))
    launch(
        _gather_kernel, (triton.cdiv(longest, tokens), len(sequences), 1), cache,
        keys, values, table, sequences, *out, table.stride(0), scales[0], scales[1],
        width, block, tokens, page_size, num_warps=8,
    )  # fmt: skip
