"""Sampling kernels: grammar masks, argmax, and samples with Gumbel noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from radixrt.worker.model.parallel.group import Group


@triton.jit
def _bits(key, token):
    """SplitMix64 of a key and a token's counter, as in `sampler.gumbel`; shifts of int64 are masked to be logical."""
    x = key + (token + 1) * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["words"])
def _mask_kernel(logits_ptr, rows_ptr, bits_ptr, words, vocab, stride, BLOCK: tl.constexpr):
    row = tl.load(rows_ptr + tl.program_id(0))
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + tl.program_id(0) * words + word, mask=word < words, other=-1)
    token = word[:, None] * 32 + tl.arange(0, 32)[None, :]
    banned = ((bits[:, None] >> tl.arange(0, 32)[None, :]) & 1) == 0
    at = logits_ptr + row * stride + token
    tl.store(at, tl.full([BLOCK, 32], float("-inf"), tl.float32), mask=banned & (token < vocab))


def mask(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Set the logits of every id whose bit is 0 to -inf, in place, in the int64 rows[N] of float32 logits[B, vocab].
    Bits are int32[N, words]: bit i % 32 of word i // 32 for id i."""
    count, words = bits.shape
    block = 64
    _mask_kernel[(count, triton.cdiv(words, block))](
        logits, rows, bits, words, logits.shape[1], logits.stride(0), block, num_warps=4
    )


@triton.jit(do_not_specialize=["first"])
def _largest_kernel(logits_ptr, best_ptr, at_ptr, first, vocab, stride, blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=float("-inf"))
    known = tl.where(logits == logits, logits, float("-inf"))
    nans = tl.max((logits != logits).to(tl.int32), 0)
    tl.store(best_ptr + row * blocks + tl.program_id(1), tl.where(nans > 0, float("nan"), tl.max(known, 0)))
    tl.store(at_ptr + row * blocks + tl.program_id(1), first + tl.program_id(1) * BLOCK + tl.argmax(known, 0))


@triton.jit
def _largest_block_kernel(best_ptr, at_ptr, out_ptr, rows, blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCKS)
    best = tl.load(best_ptr + row * blocks + i, mask=i < blocks, other=float("-inf"))
    known = tl.where(best == best, best, float("-inf"))
    peak = tl.max(known, 0)
    finite = (peak > float("-inf")) & (peak < float("inf")) & (tl.max((best != best).to(tl.int32), 0) == 0)
    tl.store(out_ptr + row, finite.to(tl.int32))
    tl.store(out_ptr + rows + row, tl.load(at_ptr + row * blocks + tl.argmax(known, 0)))


def largest(logits: torch.Tensor, ids: range | None = None, group: Group | None = None) -> torch.Tensor:
    """Argmax of float32 logits[S, vocab]. Returns int32[2 S]: whether each row's maximum is finite and the row has no
    NaN; then the ids, the smallest where several are equal. In a `group`, each rank has the logits of its `ids`, at the
    beginning of each row."""
    rows, width = logits.shape
    ids = range(width) if ids is None else ids
    largest_ids = torch.empty(2 * rows, dtype=torch.int32, device=logits.device)
    if rows:
        block = 4096
        blocks = 4 * triton.cdiv(width, 4 * block)  # rows of `both` are aligned to 16 bytes: only one compilation
        both = torch.empty((2 * rows, blocks), dtype=torch.int32, device=logits.device)
        best, at = both[:rows].view(torch.float32), both[rows:]
        _largest_kernel[(rows, blocks)](
            logits, best, at, ids.start, len(ids), logits.stride(0), blocks, block, num_warps=8
        )
        if group is not None:
            both = group.gather(both)
            best, at, blocks = both[:rows].view(torch.float32), both[rows:], both.shape[1]
        _largest_block_kernel[(rows,)](best, at, largest_ids, rows, blocks, triton.next_power_of_2(blocks), num_warps=1)
    return largest_ids


@triton.jit
def _perturbed_kernel(
    logits_ptr, rows_ptr, temperature_ptr, keys_ptr, kept_ptr, best_ptr, at_ptr, vocab, stride, blocks,
    KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + b).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    if KEPT:
        inside = tl.load(kept_ptr + b * vocab + token, mask=inside, other=0.0) > 0
        if tl.max(inside.to(tl.int32), 0) == 0:  # true for nearly all blocks; saves computing their noise
            tl.store(best_ptr + b * blocks + tl.program_id(1), float("-inf"))
            tl.store(at_ptr + b * blocks + tl.program_id(1), 0)
            return
    logits = tl.load(logits_ptr + row * stride + token, mask=inside, other=float("-inf"))
    bits = _bits(tl.load(keys_ptr + b), token.to(tl.int64))
    uniform = (((bits >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    noise = -tl.log(-tl.log(uniform))
    found = logits / tl.load(temperature_ptr + b) + noise.to(tl.float32)
    found = tl.where(inside & (found == found), found, float("-inf"))  # with NaN, too, the result is a valid id
    tl.store(best_ptr + b * blocks + tl.program_id(1), tl.max(found, 0))
    tl.store(at_ptr + b * blocks + tl.program_id(1), tl.program_id(1) * BLOCK + tl.argmax(found, 0))


def sample_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample as `sampler.sample_tokens`: the argmax of logits / temperature + Gumbel noise, int64[B], of the float32
    logits in rows[B]. temperature is float32[B, 1], keys int64[B, 1]. If float32 kept[B, vocab] is given, only tokens
    above 0 there count."""
    count, vocab = len(rows), logits.shape[1]
    block = 4096
    blocks = triton.cdiv(vocab, block)
    best = torch.empty((count, blocks), dtype=torch.float32, device=logits.device)
    at = torch.empty((count, blocks), dtype=torch.int64, device=logits.device)
    _perturbed_kernel[(count, blocks)](
        logits, rows, temperature, keys, logits if kept is None else kept, best, at, vocab, logits.stride(0), blocks,
        kept is not None, block, num_warps=8,
    )  # fmt: skip
    return at.gather(1, best.argmax(1, keepdim=True))[:, 0]
