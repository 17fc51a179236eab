"""The router of a single token in one launch: its product, the choice of experts and the order of rows (`routing`).

router [E, hidden], loaded ahead --x--> logits [E] --by the program that ends last--> weights, experts, order
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.elementwise.launching import launch, wait
from radixrt.worker.cuda.linear.gemm import all_ended, of_hopper, split_counts
from radixrt.worker.cuda.moe.routing import TILE_FIELDS, Order, compile_time, place_single, route_token, tensors
from radixrt.worker.model.layers.moe import Experts

ELEMENTS = 4096
"""Weights of a program, a warp, which has them in registers."""
WIDEST = 8192
"""The largest hidden size."""


@triton.jit
def _router_kernel(
    x_ptr, router_ptr, router_bias_ptr, bias_ptr, logits_ptr, weights_ptr, experts_ptr, places_ptr, tokens_ptr,
    tiles_ptr, counts_ptr, depth, count, CHOSEN: tl.constexpr, NORMALIZED: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, FACTOR: tl.constexpr, MIN_SUM: tl.constexpr, JITTER: tl.constexpr, FIELDS: tl.constexpr,
    BIAS: tl.constexpr, PROGRAMS: tl.constexpr, EXPERTS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    k = tl.arange(0, DEPTH)
    own, inside = e < count, k < depth
    at = router_ptr + e[:, None] * depth + k[None, :]
    weight = tl.load(at, mask=own[:, None] & inside[None, :], other=0.0)
    wait(EARLY)
    x = tl.load(x_ptr + k, mask=inside, other=0.0).to(tl.float32)
    logits = tl.sum(weight.to(tl.float32) * x[None, :], 1)
    if BIAS:
        logits += tl.load(router_bias_ptr + e, mask=own, other=0.0).to(tl.float32)
    tl.store(logits_ptr + e, logits.to(logits_ptr.dtype.element_ty), mask=own)
    if all_ended(counts_ptr, PROGRAMS):
        experts = route_token(
            logits_ptr, bias_ptr, weights_ptr, experts_ptr, 0, count, CHOSEN, NORMALIZED, BLOCK, SLOTS, SIGMOID,
            BIASED, SIZE, GROUPS, KEPT, FACTOR, MIN_SUM, JITTER,
        )  # fmt: skip
        place_single(experts, places_ptr, tokens_ptr, tiles_ptr, CHOSEN, SLOTS, FIELDS)


def begin(experts: Experts, x: torch.Tensor) -> tuple[torch.Tensor, Order] | None:
    """The weights [1, chosen] of the experts of x[1, hidden], and the order of their rows, as by `routing.begin`; None
    if this kernel is not for them. (It was measured on Hopper.)"""
    router, chosen, hidden = experts.router, experts.top_k, x.shape[1]
    if len(x) != 1 or hidden > WIDEST or experts.batch_invariant or not of_hopper(x.device):
        return None
    if x.itemsize != 2 or router.weight.dtype != x.dtype or not (x.is_contiguous() and router.weight.is_contiguous()):
        return None
    count, depth = len(router.weight), triton.next_power_of_2(hidden)
    each = max(1, ELEMENTS // depth)
    programs = triton.cdiv(count, each)
    dtype = torch.float32 if experts.routing.float32_logits else x.dtype
    logits, weights = (torch.empty((1, n), dtype=dtype, device=x.device) for n in (count, chosen))
    places, of_tokens, tiles, numbers = tensors((chosen, chosen, chosen * TILE_FIELDS, chosen), x.device)
    launch(
        _router_kernel, (programs,), None,
        x, router.weight, x if router.bias is None else router.bias, logits if experts.bias is None else experts.bias,
        logits, weights, numbers, places, of_tokens, tiles, split_counts(x.device), hidden, count, chosen,
        experts.normalized, triton.next_power_of_2(count), triton.next_power_of_2(chosen),
        *compile_time(experts.routing, count), TILE_FIELDS, router.bias is not None, programs, each, depth,
        num_warps=1,
    )  # fmt: skip
    return weights, Order(
        places.view(1, chosen), of_tokens, None, tiles.view(chosen, TILE_FIELDS), numbers.view(1, chosen)
    )
