"""Mixture of experts in six launches, router included, without synchronizing with the host; for a single token in five,
on Hopper in four (`router`).

    logits --route--> weights, experts [T, k] --sort--> place of each row among its expert's rows, tiles of rows
    x --product, by tiles: gate, up, activation--> inner [T k, I] --product--> [T k, hidden] --combine--> residual

With few rows per expert the time is that of reading the experts; the kernel here reads them at nearly the full
bandwidth. With many, rows are first copied in the order of experts, and multiplied by a kernel for Hopper, which
applies the gate as well (`hopper_experts`), or by torch's grouped matrix product.

Biases, if any, are added where gate and up are combined, and where the rows of a token are. Experts without a gate
(squared ReLU) take rows that are copied in the order of experts, however few there are.

Experts in FP8 (`fp8_experts`) take x quantized by the launch that routes, and inner rows quantized by one more
launch, which applies the gate. All their products are kernels here. So are those of experts in MXFP4
and INT4 (`packed_experts`), whose weights are expanded to bfloat16 in registers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from radixrt.worker.cuda.attention.variants import room
from radixrt.worker.cuda.elementwise import kernels
from radixrt.worker.cuda.elementwise.kernels import ACTIVATIONS, gated
from radixrt.worker.cuda.elementwise.launching import launch, wait
from radixrt.worker.cuda.linear.gemm import Tile, small_linear, stages
from radixrt.worker.cuda.moe import fp8_experts, packed_experts, router, routing
from radixrt.worker.cuda.moe.routing import ALIGNED, TILE_FIELDS, Order
from radixrt.worker.model.layers.fp8 import Fp8Activations, Fp8Scaling, plain
from radixrt.worker.model.layers.int4 import Int4
from radixrt.worker.model.layers.moe import Experts, ScaledStack
from radixrt.worker.model.layers.mxfp4 import PackedStack
from radixrt.worker.model.spec.expert_spec import ExpertsSpec
from radixrt.worker.model.spec.spec import SQUARED_RELU

# ---------------------------------------------------------------- products


TILE_16, TILE_32, TILE_64 = Tile(16, 128, 128, 4, 4), Tile(32, 128, 128, 4, 3), Tile(64, 128, 64, 4, 3)
"""Tiles for few to many rows of an expert; see `tile_for` (bench/experts.py --sweep)."""


def tile_for(rows: float) -> Tile | None:
    """The tile for `rows` rows per expert on average; None where torch's grouped product is faster."""
    return TILE_16 if rows <= 6 else TILE_32 if rows <= 24 else TILE_64 if rows <= 128 else None


SPREAD, TILES = 48, 160
"""Average rows per expert beyond which the kernel of `hopper_experts` is faster than the kernel here, and up to which
it is faster than torch's grouped product for experts of any size."""
DEEP = 4096
"""With more than TILES rows per expert, torch's grouped product is faster for rows of at least this many elements: its
programs share what they read."""
MAX_FLIPPED_ROWS = 0.5
"""The most rows per expert, on average, for which weights are the left operand of products (see `gemm`)."""


@triton.jit
def _multiplied(x, w, acc, FLIPPED: tl.constexpr):
    if FLIPPED:
        return tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision="ieee")


@triton.jit
def _product_kernel(
    x_ptr, rows_ptr, tiles_ptr, weight_ptr, bias_ptr, out_ptr, columns, depth, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, FIELDS: tl.constexpr, FLIPPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    tile = tiles_ptr + tl.program_id(0) * FIELDS
    count = tl.load(tile + 2)
    if count == 0:
        return
    expert = tl.load(tile).to(tl.int64)
    m = tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    real = m < count
    # Lanes past the last column compute a column again, which is not stored. Lanes past the last row are masked
    # instead: to read a row again would cost as much as to read another one.
    row = tl.load(tile + 1) + tl.where(real, m, 0)
    source = tl.load(rows_ptr + row) if GATED else row
    x_at = x_ptr + source.to(tl.int64)[:, None] * depth + k[None, :]
    if GATED:
        weight_ptr += expert * 2 * columns * depth
    else:
        weight_ptr += expert * columns * depth
    w_at = weight_ptr + (n % columns)[:, None] * depth + k[None, :]
    u_at = w_at + columns * depth
    acc = tl.zeros([COLUMNS, ROWS] if FLIPPED else [ROWS, COLUMNS], tl.float32)
    up = tl.zeros([COLUMNS, ROWS] if FLIPPED else [ROWS, COLUMNS], tl.float32)
    for begin in range(0, depth, DEPTH):
        if WHOLE:
            x = tl.load(x_at + begin, mask=real[:, None], other=0.0)
            w = tl.load(w_at + begin)
        else:
            inside = begin + k < depth
            x = tl.load(x_at + begin, mask=real[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_at + begin, mask=inside[None, :], other=0.0)
        acc = _multiplied(x, w, acc, FLIPPED)
        if GATED:
            if WHOLE:
                u = tl.load(u_at + begin)
            else:
                u = tl.load(u_at + begin, mask=(begin + k < depth)[None, :], other=0.0)
            up = _multiplied(x, u, up, FLIPPED)
    if FLIPPED:
        acc, up = tl.trans(acc), tl.trans(up)
    dtype = out_ptr.dtype.element_ty
    if GATED:  # rounded where the model rounds
        if BIAS:
            of_gate = bias_ptr + expert * 2 * columns + n % columns
            acc += tl.load(of_gate).to(tl.float32)[None, :]
            up += tl.load(of_gate + columns).to(tl.float32)[None, :]
        acc = gated(acc.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION)
    at = out_ptr + row.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(at, acc.to(dtype), mask=real[:, None] & (n < columns)[None, :])


def _product(
    x: torch.Tensor, order: Order, weight: torch.Tensor, tile: Tile, activation: str | None,
    bias: torch.Tensor | None = None, flipped: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Multiply rows, sorted by expert as `order` says, by each expert's weight[E, N, K] transposed: [T * chosen, N] for
    x [T * chosen, K]. With an activation, x is [T, K] (rows are looked up), bias[E, N] is added if given, and the
    result [T * chosen, N / 2] is `kernels.gated` of both halves. `flipped`: the weight is the left operand."""
    halves = 1 if activation is None else 2
    columns, depth, across = weight.shape[1] // halves, weight.shape[2], tile.columns // halves
    out = torch.empty((len(order.tokens), columns), dtype=x.dtype, device=x.device)
    launch(
        _product_kernel, (len(order.tiles), triton.cdiv(columns, across)), None,
        x, order.tokens, order.tiles, weight, weight if bias is None else bias, out, columns, depth,
        ACTIVATIONS.get(activation or "", 0), activation is not None, bias is not None, depth % tile.depth == 0,
        tile.rows, across, tile.depth, TILE_FIELDS, flipped,
        num_warps=tile.warps, num_stages=stages(tile, weight.itemsize, room()),
    )  # fmt: skip
    return out


# ---------------------------------------------------------------- from tokens to rows and back


@triton.jit
def _spread_kernel(
    x_ptr, places_ptr, out_ptr, size, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * size + i, mask=i < size, other=0.0)
    for slot in tl.static_range(CHOSEN):
        place = tl.load(places_ptr + token * CHOSEN + slot).to(tl.int64)
        tl.store(out_ptr + place * size + i, x, mask=i < size)


def spread(x: torch.Tensor, order: Order) -> torch.Tensor:
    """Copy the rows of x[T, hidden] in the order of experts: [T * chosen, hidden]."""
    size, (tokens, chosen) = x.shape[1], order.places.shape
    out = torch.empty((tokens * chosen, size), dtype=x.dtype, device=x.device)
    block = min(2048, triton.next_power_of_2(size))
    grid = tokens, triton.cdiv(size, block)
    launch(_spread_kernel, grid, None, x, order.places, out, size, chosen, block, num_warps=4)
    return out


@triton.jit
def _biased_gate_kernel(
    x_ptr, bias_ptr, ends_ptr, out_ptr, size, count, ACTIVATION: tl.constexpr, BINS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    e = tl.arange(0, BINS)
    ends = tl.load(ends_ptr + e, mask=e < count, other=2147483647)
    bias = bias_ptr + tl.sum((ends <= row).to(tl.int32), 0).to(tl.int64) * 2 * size + i
    at = x_ptr + row.to(tl.int64) * 2 * size + i
    dtype = x_ptr.dtype.element_ty
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32) + tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + size, mask=inside, other=0.0).to(tl.float32)
    up += tl.load(bias + size, mask=inside, other=0.0).to(tl.float32)
    out = gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION)
    tl.store(out_ptr + row.to(tl.int64) * size + i, out.to(dtype), mask=inside)


def biased_gate(x: torch.Tensor, bias: torch.Tensor, order: Order, activation: str) -> torch.Tensor:
    """`kernels.gate` of x[T * chosen, 2 I], sorted by expert, plus bias[E, 2 I]: [T * chosen, I]."""
    rows, size = x.shape[0], x.shape[1] // 2
    out, block = torch.empty((rows, size), dtype=x.dtype, device=x.device), min(1024, triton.next_power_of_2(size))
    launch(
        _biased_gate_kernel, (rows, triton.cdiv(size, block)), None,
        x, bias, order.ends, out, size, len(bias), ACTIVATIONS[activation], triton.next_power_of_2(len(bias)), block,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _combine_kernel(
    rows_ptr, weights_ptr, places_ptr, experts_ptr, bias_ptr, residual_ptr, size, CHOSEN: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(CHOSEN):
        place = tl.load(places_ptr + token * CHOSEN + slot).to(tl.int64)
        weight = tl.load(weights_ptr + token * CHOSEN + slot).to(tl.float32)
        made = tl.load(rows_ptr + place * size + i, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            expert = tl.load(experts_ptr + token * CHOSEN + slot).to(tl.int64)
            made += tl.load(bias_ptr + expert * size + i, mask=inside, other=0.0).to(tl.float32)
        total += weight * made
    at = residual_ptr + token * size + i
    total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(residual_ptr.dtype.element_ty), mask=inside)


def combine(
    rows: torch.Tensor, weights: torch.Tensor, order: Order, residual: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """For each token, add its `rows` [T * chosen, hidden], plus the bias[E, hidden] of their experts if given, times
    its weights[T, chosen] to residual[T, hidden]."""
    tokens, size = residual.shape
    block = min(1024, triton.next_power_of_2(size))
    launch(
        _combine_kernel, (tokens, triton.cdiv(size, block)), None,
        rows, weights, order.places, order.experts, rows if bias is None else bias, residual, size, weights.shape[1],
        bias is not None, block, num_warps=4,
    )  # fmt: skip


# ---------------------------------------------------------------- all of it


Logits = torch.Tensor | tuple[torch.Tensor, Order]
"""Router logits [T, E]; or of a single token already what follows from them (`router.begin`)."""


def add(
    experts: Experts, x: torch.Tensor, residual: torch.Tensor, for_router: torch.Tensor | None = None
) -> None:  # fmt: skip
    """See `Ops.experts`. With `batch_invariant` the same tile computes all products, so that the rounding of a row does
    not depend on the others."""
    logits = _begun(experts, x if for_router is None else for_router)
    if experts.latent is None:
        return _add(experts, logits, x, residual)
    into, back = experts.latent
    inner = into(x)
    total = torch.zeros_like(inner)
    _add(experts, logits, inner, total)
    residual.add_(back(total))


def _logits(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """As `Experts.logits`, of few rows by `small_linear`: a router has few columns, whose K programs divide."""
    linear, wide = experts.router, experts.routing.float32_logits
    few = None
    if not experts.batch_invariant:
        out = x.new_empty((len(x), len(linear.weight)), dtype=torch.float32) if wide else None
        few = small_linear(x, linear.weight, linear.bias, out)
    return experts.logits(x) if few is None else few


def _begun(experts: Experts, x: torch.Tensor) -> Logits:
    """For the router's input x[T, hidden]."""
    begun = None if experts.is_fp8 or experts.routing.scales_inputs else router.begin(experts, x)
    return _logits(experts, x) if begun is None else begun


def _add(experts: Experts, logits: Logits, x: torch.Tensor, residual: torch.Tensor) -> None:
    """As `add`, for x in the space that experts are computed in."""
    if experts.routing.scales_inputs:  # a token has one expert (see `no_kernels`), whose output has the weight 1
        assert isinstance(logits, torch.Tensor)
        x = x * logits.float().amax(-1, keepdim=True).sigmoid().to(x.dtype)
    rows = _rows(experts, x)
    gate_up, down = experts.gate_up, experts.down
    if isinstance(gate_up, ScaledStack) and isinstance(down, ScaledStack):
        return _add_scaled(experts, gate_up, down, logits, x, residual)
    if isinstance(down, PackedStack | Int4):
        return _add_packed(experts, down, logits, x, residual)
    assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
    tile = TILE_64 if experts.batch_invariant else tile_for(rows)
    aligned = x.shape[1] % ALIGNED == 0 and down.shape[2] % ALIGNED == 0
    by_expert = aligned and x.is_cuda and x.dtype == torch.bfloat16 and not experts.batch_invariant
    shallow = rows <= TILES or max(x.shape[1], down.shape[2]) < DEEP
    if by_expert and rows > SPREAD and shallow and (hopper := _hopper(x.device)):
        weights, order, _ = _begin(experts, logits, hopper.ROWS, x, None)
        inner = _inner(experts, hopper.product, spread(x, order), order, is_sorted=True)
        made = hopper.product(inner, order, down, None)
    elif by_expert and tile is None:
        assert isinstance(logits, torch.Tensor)
        kind = experts.routing
        weights, chosen = routing.route(logits, experts.top_k, _normalized(experts), kind, experts.bias)
        order = routing.sort(chosen, len(down), 0)
        made = _by_torch(experts, gate_up, down, x, order)
    else:
        tile = tile or TILE_64
        weights, order, _ = _begin(experts, logits, tile.rows, x, None)
        flipped = rows <= MAX_FLIPPED_ROWS and tile is TILE_16
        inner = _inner(experts, partial(_product, tile=tile, flipped=flipped), x, order)
        made = _product(inner, order, down, tile, None, flipped=flipped)
    _combine(experts, made, weights, order, residual)


def _rows(experts: Experts, x: torch.Tensor) -> float:
    """Rows of x[T, hidden] per expert, on average."""
    return len(x) * experts.top_k / len(experts.down)


def _inner(
    experts: Experts, product: Callable[..., torch.Tensor], x: torch.Tensor, order: Order, is_sorted: bool = False
) -> torch.Tensor:
    """The input of the experts' second product, [T * chosen, I], by `product`, for x[T, hidden]; or, if it is sorted,
    [T * chosen, hidden]."""
    if experts.activation == SQUARED_RELU:
        made = product(x if is_sorted else spread(x, order), order, experts.gate_up, activation=None)
        return plain(kernels.squared_relu(made))
    return product(x, order, experts.gate_up, activation=experts.activation, bias=experts.gate_up_bias)


@functools.cache
def _hopper(device: torch.device) -> ModuleType | None:
    """`hopper_experts`; None if it cannot be used."""
    try:
        from radixrt.worker.cuda.moe import hopper_experts
    except (ImportError, AttributeError):  # a Triton without Gluon, or with another version of it
        return None
    return hopper_experts if hopper_experts.there(device) else None


def _begin(
    experts: Experts, logits: Logits, rows: int, x: torch.Tensor, fp8_scaling: Fp8Scaling | None
) -> tuple[torch.Tensor, Order, Fp8Activations | None]:
    if isinstance(logits, tuple):
        return *logits, None
    kind = experts.routing
    return routing.begin(logits, experts.top_k, _normalized(experts), rows, x, fp8_scaling, kind, experts.bias)


def _combine(
    experts: Experts, rows: torch.Tensor, weights: torch.Tensor, order: Order, residual: torch.Tensor
) -> None:  # fmt: skip
    if experts.scales is not None:
        weights = weights * experts.scales[order.experts]
    combine(rows, weights, order, residual, experts.down_bias)


def _normalized(experts: Experts) -> bool:
    return experts.normalized or experts.routing.scales_inputs


def no_kernels(moe: ExpertsSpec) -> str:
    """The reason why there are no kernels for a mixture of experts; "" if there are."""
    if moe.routing.scales_inputs and moe.top_k > 1:
        return "several experts of a token with scaled inputs have no kernels"
    return ""


def _by_torch(
    experts: Experts, gate_up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, order: Order
) -> torch.Tensor:
    """The experts' results, [T * chosen, hidden] sorted by expert, for x[T, hidden], by torch's grouped product."""
    inner = F.grouped_mm(spread(x, order), gate_up.transpose(1, 2), offs=order.ends)
    if experts.activation == SQUARED_RELU:
        inner = plain(kernels.squared_relu(inner))
    elif experts.gate_up_bias is None:
        inner = plain(kernels.gate(inner, experts.activation))
    else:
        inner = biased_gate(inner, experts.gate_up_bias, order, experts.activation)
    return F.grouped_mm(inner, down.transpose(1, 2), offs=order.ends)


def _add_scaled(
    experts: Experts, gate_up: ScaledStack, down: ScaledStack, logits: Logits, x: torch.Tensor, residual: torch.Tensor
) -> None:
    """As `add`, for experts in FP8, which have no biases."""
    tile = fp8_experts.tile_for(_rows(experts, x), gate_up, down)
    weights, order, known = _begin(experts, logits, tile.rows, x, gate_up.fp8_scaling)
    assert known is not None
    made = fp8_experts.product(known, order, gate_up, tile, x.dtype, of_tokens=True)
    if experts.activation == SQUARED_RELU:
        inner = kernels.squared_relu(made, down.fp8_scaling)
    else:
        inner = kernels.gate(made, experts.activation, down.fp8_scaling)
    assert isinstance(inner, Fp8Activations)
    _combine(experts, fp8_experts.product(inner, order, down, tile, x.dtype), weights, order, residual)


def _add_packed(
    experts: Experts, down: PackedStack | Int4, logits: Logits, x: torch.Tensor, residual: torch.Tensor
) -> None:
    """As `add`, for experts in MXFP4 or INT4."""
    rows, exact = _rows(experts, x), experts.batch_invariant
    hopper = None if exact else packed_experts.hopper_kernel(x, down, down.columns, rows)
    if hopper is not None:
        kind = hopper.kind_for(rows)
        weights, order, _ = _begin(experts, logits, kind.rows, x, None)
        inner = _inner(experts, partial(hopper.product, kind=kind), spread(x, order), order, is_sorted=True)
        made = hopper.product(inner, order, down, None, kind=kind)
    else:
        mxfp4 = isinstance(down, PackedStack)
        first, second = packed_experts.TILES_64 if exact else packed_experts.tiles_for(rows, mxfp4)
        weights, order, _ = _begin(experts, logits, first.rows, x, None)
        inner = _inner(experts, partial(packed_experts.product, tile=first), x, order)
        made = packed_experts.product(inner, order, down, second, None)
    _combine(experts, made, weights, order, residual)
