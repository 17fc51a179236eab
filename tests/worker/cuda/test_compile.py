"""Every kernel compiles for GPUs that are not here: in a process that does not interpret them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import sys
from dataclasses import replace

import torch
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixrt.worker.cuda.attention import attend
from radixrt.worker.cuda.sampling import sampling_kernels
from radixrt.worker.cuda.moe import experts
from radixrt.worker.cuda.latent import full_heads, latent
from radixrt.worker.cuda.linear import invariant, gemm, quantize_activations
from radixrt.worker.cuda.elementwise import kernels
from radixrt.worker.cuda.recurrent import convolutions, cutting, delta, delta_chunks, delta_step, mamba, mamba_chunks
from radixrt.worker.cuda.linear import dequant, int4, lora
from radixrt.worker.cuda.latent import index_scores
from radixrt.worker.cuda.attention import mixed_append
from radixrt.worker.cuda.moe import packed_experts, routing
from radixrt.worker.cuda.elementwise import residuals
from radixrt.worker.cuda.host import host_pool
from radixrt.worker.cuda.sampling import mtp, sampler
from radixrt.worker.cuda.moe import router
from radixrt.worker.cuda.linear import fp8 as fp8_products
from radixrt.worker.cuda.latent import selection
from radixrt.worker.cuda.attention import sinks, variants
from radixrt.worker.cuda.linear import trials

target, every = GPUTarget("cuda", int(sys.argv[1]), 32), sys.argv[2] == "every"
fp8 = "*fp8e4nv" if int(sys.argv[1]) >= 89 else "*fp8e5"


def build(kernel, pointers, numbers, constants, warps=4, stages=3, room=100_000):
    if "EARLY" in kernel.arg_names:
        constants = {"EARLY": target.arch >= 90} | constants
    types = dict(zip((n for n in kernel.arg_names if n.endswith("_ptr")), pointers, strict=True)) | numbers
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": warps, "num_stages": stages}
    # What is not aligned is not loaded ahead, and takes no shared memory for it.
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(kernel.arg_names) if name.endswith("_ptr")}
    built = compile(ASTSource(kernel, signature, fixed, aligned), target=target, options=options)
    assert built.metadata.shared <= room, (kernel, constants, built.metadata.shared)
    if constants.get("EARLY"):
        waits_first(built, reads=kernel in READS_FIRST)


READS_FIRST = kernels._norm_kernel, residuals._add_normed_kernel, mamba._state_decode_kernel, lora._expand_kernel
READS_FIRST += (router._router_kernel,)


def waits_first(built, reads=False):  # before what is ahead has ended nothing is written, nor read, but a weight
    before, wait, _ = built.asm["ptx"].partition(".entry")[2].partition("griddepcontrol.wait")
    assert wait and "st.global" not in before, built.name
    assert reads == ("ld.global" in before), built.name


f, i = "fp32", "i32"
"""

MOST = """
row = {"size": i, "stride": i}
for group, out in ((0, "*bf16"), (4096, fp8), (128, fp8)):
    rounded = {"GROUP": group, "LIMIT": 448.0, "BLOCK": 4096}
    if every or group != 4096:
        normed = rounded | {"CENTERED": group == 128, "BIAS": False}
        build(kernels._norm_kernel, ["*bf16", "*bf16", "*bf16", out, "*fp32"], row | {"eps": f}, normed, 8)
    if every or group == 4096:
        build(kernels._squared_relu_kernel, ["*bf16", out, "*fp32"], row, rounded, 8)
        strides = row | {"x_stride": i, "up_stride": i}
        gated = rounded | {"ACTIVATION": 1 if group else 3}
        build(kernels._gate_kernel, ["*bf16", "*bf16", out, "*fp32"], strides, gated, 8)
        both, eps = rounded | {"SCALED": True, "NORM": True}, {"after_eps": f, "eps": f}
        pointers = ["*bf16", "*fp32", "*bf16", "*bf16", "*fp32", out, "*fp32"]
        build(residuals._add_normed_kernel, pointers, row | eps, both, 8)
for group in (4096, 128):
    constants = {"GROUP": group, "LIMIT": 448.0, "ALL": 4096}
    build(quantize_activations._quantize_kernel, ["*bf16", fp8, "*fp32"], row, constants, 8)
cpu, wide = torch.device("cpu"), replace(fp8_products.BLOCKS_WIDE, rows=64)
by_rows = fp8_products.ALONE, fp8_products.TILE_32, fp8_products.TILE_64, *fp8_products.LARGE_TILES
rows = [gemm.streaming(16, 6144, 1, cpu), *by_rows]
blocks = fp8_products.BLOCKS_ALONE, fp8_products.BLOCKS, fp8_products.BLOCKS_WIDE, wide
kinds = [(t, 1) for t in rows] + [(t, 2) for t in blocks]
kinds = [*((gemm.streaming(rows, 6144, 2, cpu), 0) for rows in gemm.STREAMED), *kinds]
for t, scales in (kinds if every else kinds[1::6]):
    if scales and fp8 != "*fp8e4nv":
        continue
    at_once = gemm.AT_ONCE if scales == 2 and t.columns < 128 else 1
    which = {"SPLITS": 1 if scales else 4, "SCALES": scales, "AT_ONCE": at_once}
    which |= {"BIAS": True, "ADD": True, "WHOLE": True, "AHEAD": gemm.AHEAD}
    tile = {"ROWS": t.rows, "COLUMNS": t.columns, "DEPTH": t.depth, "BLOCK": 128}
    numbers = dict.fromkeys(("rows", "columns", "depth", "x_stride", "stride"), i)
    kind, room = fp8 if scales else "*bf16", 232_448 if target.arch >= 90 else 166_912
    pointers = [kind, "*fp32", kind, "*fp32", "*bf16", "*bf16", "*fp32", "*i32"]
    stages = gemm.stages(t, at_once * (1 if scales else 2), room)
    build(gemm._product_kernel, pointers, numbers, tile | which, t.warps, stages, room)
scales = {"eps": f, "k_scale": f, "v_scale": f}
heads = {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "BLOCK": 64, "GROUP": 16, "NORM": True, "LIMIT": 448.0}
whole = {"HEADS": 48, "KV_HEADS": 8, "DIM": 128, "BLOCK": 8192}
build(kernels._means_kernel, ["*bf16", "*fp32"], {}, whole, 8)
gather = {"WIDTH": 1024, "BLOCK": 1024, "TOKENS": 16, "PAGE": 1}
pointers = ["*bf16"] * 5 + ["*fp32", "*i32", "*bf16", fp8, fp8]
for turned, ranks in ((64, 0), (32, 2), (32, 0))[: 3 if every else 2]:
    build(kernels._append_kernel, pointers, scales, heads | {"TURNED": turned, "RANKS": ranks})
wide = {"HEADS": 8, "KV_HEADS": 4, "HALF": 128, "TURNED": 128, "BLOCK": 128, "GROUP": 8, "RANKS": 0}
pointers = [*["*bf16"] * 3, *["*fp32"] * 3, "*i32", "*bf16", fp8, fp8]
build(kernels._append_kernel, pointers, scales, heads | wide)
mixed = {"HEADS": 8, "KV_HEADS": 1, "HALF": 256, "TURNED": 256, "V_DIM": 512, "ALL": 9 * 512, "BLOCK": 256}
mixed |= {"V_BLOCK": 512, "GROUP": mixed_append.HEADS_AT_ONCE, "Q_NORM": True, "K_NORM": True, "V_NORM": True}
pointers = [*["*bf16"] * 3, "*fp32", "*fp32", "*i32", "*bf16", fp8, fp8]
numbers = dict.fromkeys(("q_eps", "k_eps", "v_eps", "k_scale", "v_scale", "v_factor"), f)
build(mixed_append._append_mixed_kernel, pointers, numbers, mixed | {"TIED": True, "LIMIT": 448.0})
rounded = {"GROUP": 4096, "LIMIT": 448.0, "BLOCK": 4096, "CENTERED": True, "BIAS": True}
build(kernels._norm_kernel, ["*bf16", "*fp32", "*fp32", fp8, "*fp32"], row | {"eps": f}, rounded, 8)
pointers = [fp8, fp8, "*i32", "*i32", "*bf16", "*bf16"]
build(kernels._gather_kernel, pointers, {"stride": i, "k_scale": f, "v_scale": f}, gather, 8)
build(kernels._scatter_kernel, ["*i32"] * 2, {"count": i, "stride": i}, {"BLOCK": 256})
numbers = dict.fromkeys(("offset", "num_planes", "row_stride", "words"), i) | {"plane_stride": "i64"}
for out, word in ((True, "*i64"), (False, "*u8")):
    build(host_pool._copy_kernel, [word, word, "*i32"], numbers, {"OUT": out, "PLANES": 8, "WORDS": 128})
build(kernels._resolve_kernel, ["*i32"] * 4, {"count": i}, {"BLOCK": 256})
build(sampling_kernels._mask_kernel, ["*fp32", "*i64", "*i32"], {"words": i, "vocab": i, "stride": i}, {"BLOCK": 64})
numbers = {"vocab": i, "stride": i, "blocks": i}
build(sampling_kernels._largest_kernel, ["*fp32", "*fp32", "*i32"], {"first": i} | numbers, {"BLOCK": 4096}, 8)
build(mtp._accept_kernel, ["*i32"] * 9, {}, {}, 1)
places = {"PAGE": 16, "PARTS": 12, "WIDTH": 16, "KEYS": 32, "ITEM": 8}
build(mtp._place_kernel, ["*i32"] * 6, {"stride": i}, places)
build(sampling_kernels._largest_block_kernel, ["*fp32", "*i32", "*i32"], {"rows": i, "blocks": i}, {"BLOCKS": 32}, 1)
pointers = ["*fp32", "*i32", "*fp32", "*i64", "*fp32", "*fp32", "*i64"]
numbers = {"vocab": i, "stride": i, "blocks": i}
for kept in (True, False)[: 2 if every else 1]:
    build(sampling_kernels._perturbed_kernel, pointers, numbers, {"KEPT": kept, "BLOCK": 4096}, 8)
counts = {"IN_PROMPT": sampler.IN_PROMPT, "BLOCK": 256}
build(sampler._note_kernel, ["*i32"] * 2, {"entries": i, "vocab": i}, counts)
numbers = {"requests": i, "vocab": i, "stride": i}
build(sampler._penalize_kernel, ["*fp32", "*i32", "*i32"], numbers, counts | {"BLOCK": 4096}, 8)
numbers = {"rows": i, "columns": i, "depth": i}
for t in invariant.TILES if every else invariant.TILES[:1]:
    tile = {"ROWS": t.rows, "COLUMNS": t.columns, "DEPTH": t.depth, "BIAS": True, "WHOLE": True, "GROUP": 8}
    room = 164_000 if t.rows > 64 else 100_000
    build(invariant._product_kernel, ["*bf16"] * 3 + ["*fp32"], numbers, tile, t.warps, t.stages, room)
listed = {"ROWS": 16, "ADAPTERS": 8, "BLOCK": 256, "FIELDS": lora.FIELDS}
build(lora._list_kernel, ["*i32", "*i32"], dict.fromkeys(("rows", "adapters", "most"), i), listed)
for down, up in (lora.SMALL_TILES, lora.LARGE_TILES) if every else (lora.SMALL_TILES,):
    numbers = dict.fromkeys(("rows", "depth", "columns", "x_stride", "blocks"), i)
    fixed = {"FIELDS": lora.FIELDS, "WHOLE": down is lora.SMALL_TILES[0]}
    tile = {"ROWS": down.rows, "COLUMNS": down.columns, "DEPTH": down.depth} | fixed
    pointers = ["*bf16", "*bf16", "*i32", "*i64", "*fp32"]
    build(lora._shrink_kernel, pointers, numbers, tile, down.warps, down.stages)
    numbers = dict.fromkeys(("rows", "rank", "ranks", "columns", "out_stride", "splits"), i) | {"factor": f}
    tile = {"ROWS": up.rows, "COLUMNS": up.columns, "DEPTH": up.depth} | fixed
    pointers = ["*fp32", "*bf16", "*i32", "*i64", "*i32", "*bf16"]
    build(lora._expand_kernel, pointers, numbers, tile, up.warps, up.stages)
routed = {"CHOSEN": 8, "NORMALIZED": True, "BLOCK": 128, "SLOTS": 8}
names = "SIGMOID", "BIASED", "SIZE", "GROUPS", "KEPT", "FACTOR", "MIN_SUM", "JITTER"
kinds = (True, True, 32, 8, 4, 2.5, 0.0, -1.0), (False, False, 128, 1, 1, 1.0, 0.0, 0.01)
kinds += ((False, True, 128, 1, 1, 1.0, 0.1, -1.0),)
for ways in kinds if every else kinds[1:2]:
    constants = routed | dict(zip(names, ways, strict=True))
    build(routing._route_kernel, ["*fp32", "*fp32", "*bf16", "*i32"], {"count": i}, constants, 1)
    single = {"FIELDS": 3, "BIAS": True, "PROGRAMS": 64, "EXPERTS": 2, "DEPTH": 2048}
    pointers = ["*bf16"] * 3 + ["*fp32"] * 3 + ["*i32"] * 5
    build(router._router_kernel, pointers, {"depth": i, "count": i}, constants | single, 1)
numbers = {"entries": i, "count": i}
build(routing._count_kernel, ["*i32"] * 2, numbers, {"BINS": 256, "BLOCK": routing.BLOCK}, 2)
build(routing._before_kernel, ["*i32"] * 2, {"blocks": i, "count": i}, {"BLOCKS": routing.BLOCKS})
numbers |= {"blocks": i, "most": i}
constants = {"CHOSEN": 8, "ROWS": 128, "BINS": 512, "BLOCK": routing.BLOCK, "FIELDS": 3, "TILES": 128}
build(routing._put_kernel, ["*i32"] * 7, numbers, constants)
for rows, block in ((16, 512), (0, 4096)):
    sorted_ = {"CHOSEN": 8, "ROWS": rows, "BINS": 256, "BLOCK": block, "FIELDS": 3, "TILES": 128}
    build(routing._sort_kernel, ["*i32"] * 5, {"entries": i, "most": i}, sorted_, 8)
build(experts._spread_kernel, ["*bf16", "*i32", "*bf16"], {"size": i}, {"CHOSEN": 8, "BLOCK": 2048})
pointers = ["*bf16", "*bf16", "*i32", "*i32", "*bf16", "*bf16"]
build(experts._combine_kernel, pointers, {"size": i}, {"CHOSEN": 8, "BIAS": True, "BLOCK": 1024})
constants = {"ACTIVATION": 3, "BINS": 32, "BLOCK": 1024}
build(experts._biased_gate_kernel, ["*bf16", "*bf16", "*i32", "*bf16"], {"size": i, "count": i}, constants)
tiles = (experts.TILE_16, experts.TILE_32, experts.TILE_64) if every else ()
kinds = [(t, False) for t in tiles] + [(experts.TILE_16, True)]
for t, flipped, gated in [(*kind, gated) for kind in kinds for gated in (False, True)]:
    tile = {"ROWS": t.rows, "COLUMNS": t.columns // (1 + gated), "DEPTH": t.depth, "FIELDS": 3}
    which = {"ACTIVATION": 3, "GATED": gated, "BIAS": gated, "WHOLE": True, "FLIPPED": flipped}
    numbers, pointers = {"columns": i, "depth": i}, ["*bf16", "*i32", "*i32", "*bf16", "*bf16", "*bf16"]
    build(experts._product_kernel, pointers, numbers, tile | which, t.warps, t.stages, 164_000)
for half, page in (("*bf16", 1), ("*fp32", 16))[: 2 if every else 1]:
    at, numbers = index_scores, {"first": i, "stride": i, "columns": i}
    constants = {"HEADS": 64, "DIM": 128, "PAGE": page, "ROWS": 64, "WIDTH": 128, "KEYS": at.KEYS, "FINITE": 3e38}
    at.room = lambda: 101_376
    together = at.together(64, 128, 2 if half == "*bf16" else 4)
    constants |= {"TOGETHER": together, "QUERY_FIELDS": 3, "TILE_FIELDS": 2, "STAGES": at.STAGES}
    pointers = [half, "*fp32", half, *["*i32"] * 3, "*fp32"]
    build(at._index_scores_kernel, pointers, numbers, constants, at.WARPS, room=101_376)
    constants = {"COUNT": 2048, "PAGE": page, "WIDTH": 4096, "FIELDS": 3}
    build(selection._select_kernel, ["*i32"] * 5, numbers, constants, selection.WARPS, room=120_000)
heads = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "KEY_DIM": 128, "VALUE_DIM": 128}
numbers = dict.fromkeys(("channels", "x_stride", "z_stride", "a_stride", "b_stride", "state_stride"), i)
numbers |= {"eps": f, "scale": f, "rows": i}
for block in (1024, 128):
    pointers = ["*bf16", "*bf16", "*bf16", "*i32", "*i32", "*bf16", "*bf16"]
    build(convolutions._conv_kernel, pointers, numbers, {"K": 4, "BLOCK": block, "BIAS": block < 1024, "SILU": True})
pointers = ["*bf16", "*bf16", "*bf16", "*fp32", "*fp32", "*i32", "*i32", "*fp32", "*bf16"]
fields = {"FIELDS": cutting.SEQUENCE_FIELDS, "CHUNK_FIELDS": cutting.CHUNK_FIELDS}
for each, odd in ((False, {}), (True, {"KEY_DIM": 96, "VALUE_DIM": 192, "VALUE_HEADS": 16})):
    constants = heads | fields | {"FACTOR": 1.0, "EACH": each, "KEYS": 128} | odd
    build(delta._tokens_kernel, pointers, numbers, constants | {"COLUMNS": delta.SLIM.columns, "RUNS": each}, 1)
for _, t in delta.DECODES if every else delta.DECODES[2:]:
    constants = heads | fields | {"FACTOR": 1.0, "EACH": False, "KEYS": 128, "COLUMNS": t.columns, "RUNS": True}
    build(delta._tokens_kernel, pointers, numbers, constants, t.warps)
constants = {"VALUE_HEADS": 32, "VALUE_DIM": 192, "BLOCK": 256, "SIGMOID": True, "ROWS": 16}
build(delta._gated_norm_kernel, ["*bf16"] * 3, numbers, constants)
build(delta_step._copy_kernel, ["*i32", "*fp32"], dict.fromkeys(("count", "size", "stride"), i), {"BLOCK": 4096})
room = {80: 166_912, 89: 101_376, 90: 232_448}[target.arch]
delta_chunks.room = lambda: room
t = delta_chunks.best_tiles()
constants = {"K": 4, "BLOCK": convolutions.CHANNELS, "FIELDS": cutting.CHUNK_FIELDS, "BIAS": True, "SILU": False}
constants |= {"WHOLE": True}
pointers = ["*bf16", "*bf16", "*bf16", "*i32", "*bf16", "*bf16"]
build(convolutions._conv_chunk_kernel, pointers, numbers, constants | {"TOKENS": cutting.TOKENS}, 2)
build(convolutions._conv_part_kernel, pointers, numbers, constants | {"ROWS": convolutions.ROWS})
pointers = [*["*bf16"] * 3, "*fp32", "*fp32", "*i32", "*bf16", "*bf16", "*fp32"]
chunks = heads | {"TOKENS": cutting.TOKENS, "HALF": tl.bfloat16, "FACTORS": delta_chunks.FACTORS}
constants = chunks | {"FIELDS": cutting.CHUNK_FIELDS, "UNIT": tl.float16, "BLOCK": t.block, "FACTOR": 2.0}
odd = {"KEY_DIM": 96, "VALUE_DIM": 192, "VALUE_HEADS": 16}
for more in ({}, odd) if every else ({},):
    build(delta_chunks._within_kernel, pointers, numbers, constants | {"WIDE": 128} | more, t.within_warps, 1)
pointers = [*["*bf16"] * 3, "*fp32", "*fp32", "*i32", "*bf16", "*bf16", "*bf16", "*fp32"]
constants = {"ROWS": delta_chunks.ROWS} | {name: x for name, x in constants.items() if name != "FACTORS"}
if every:
    build(delta_chunks._within_each_kernel, pointers, numbers, constants, t.each_warps, 1, room=room)
constants = chunks | fields | {"COLUMNS": t.columns, "STAGES": t.stages, "WIDE": 128}
for more in ({"EACH": False}, {"EACH": True}, {"EACH": False} | odd)[: 3 if every else 1]:
    pointers = [*["*bf16"] * 3, "*fp32", "*bf16" if more["EACH"] else "*fp32", "*i32", "*i32", "*fp32", "*bf16"]
    build(delta_chunks._across_kernel, pointers, numbers, constants | more, t.warps, room=room)
"""

MAMBA = """
numbers = dict.fromkeys(("z_stride", "steps_stride", "raw_stride", "state_stride", "means_stride"), i)
numbers |= dict.fromkeys(("low", "high", "eps"), f)
room = {80: 166_912, 89: 101_376, 90: 232_448}[target.arch]
mamba_chunks.room = lambda: room
t, fields = mamba_chunks.best_tiles(), {"TOKENS": cutting.TOKENS, "FIELDS": cutting.CHUNK_FIELDS}
sequences = {"FIELDS": cutting.SEQUENCE_FIELDS, "CHUNK_FIELDS": cutting.CHUNK_FIELDS}
shapes = [(128, 8, 64, 128), (24, 1, 128, 256), (6, 1, 64, 128)] if every else [(24, 1, 128, 256)]
for heads in [dict(zip(("HEADS", "GROUPS", "DIM", "STATE"), shape)) for shape in shapes]:
    state, gated = heads["STATE"], {"GATED": heads["GROUPS"] == 1}
    pointers = [*["*bf16"] * 3, *["*fp32"] * 3, "*i32", "*i32", "*fp32", "*bf16"]
    rows = {"ROWS": mamba.DECODE_ELEMENTS // state}
    build(mamba._state_decode_kernel, pointers, numbers, heads | gated | rows, mamba.DECODE_WARPS)
    constants = heads | gated | sequences | {"ROWS": mamba.ROWS, "RUNS": bool(gated["GATED"])}
    build(mamba._state_tokens_kernel, pointers, numbers, constants, 1)
    pointers = ["*bf16", "*fp32", "*fp32", "*i32", "*fp32", "*fp32"]
    constants = {"HEADS": heads["HEADS"], "BLOCK": mamba_chunks.HEADS_AT_ONCE}
    build(mamba_chunks._steps_kernel, pointers, numbers, constants | fields)
    pointers = ["*bf16", "*fp32", "*fp32", "*i32", "*bf16", "*i32", "*fp32"]
    constants = {"ROWS": 64, "COLUMNS": t.columns, "HALF": tl.bfloat16, "STAGES": t.stages}
    constants |= heads | fields | sequences
    build(mamba_chunks._states_kernel, pointers, numbers, constants, t.warps, room=room)
    pointers = ["*bf16", "*bf16", "*fp32", "*bf16", "*fp32", "*fp32", "*i32", "*bf16"]
    constants = {"ROWS": mamba_chunks.ELEMENTS // state, "HALF": tl.bfloat16, "STAGES": t.mixed_stages}
    constants |= {"ROWS": min(heads["DIM"], constants["ROWS"])} | heads | fields | gated
    for together in (1, t.together):
        which = constants | {"TOGETHER": together}
        build(mamba_chunks._mixed_kernel, pointers, numbers, which, t.mixed_warps, room=room)
for first in (False, True):
    constants = {"GROUPS": 1, "SIZE": 3072, "BLOCK": 4096, "NORM_FIRST": first}
    which = constants | {"RANKS": 1 + first}
    build(mamba._group_norm_kernel, ["*bf16", "*bf16", "*bf16", "*fp32"], numbers, which, 8)
    which = {name: value for name, value in constants.items() if name != "GROUPS"}
    build(mamba._mean_squares_kernel, ["*bf16", "*bf16", "*fp32"], numbers, which, 8)
"""

PACKED = """
pairs = [packed_experts.TILES_16, packed_experts.TILES_32, packed_experts.TILES_64, packed_experts.TILES_128]
some = [(t, gated) for pair in (pairs if every else pairs[:1]) for t, gated in zip(pair, (True, False))]
groups = {0: (False, 1), 2: (True, 2), 4: (True, 3), 8: (False, 4)}
for t, gated, kind in [(*one, kind) for one in some for kind in (8, 0)][: None if every else 3]:
    words, room = 32 if kind else 16, 232_448 if kind and target.arch >= 90 else 164_000
    tile = {"ROWS": t.rows, "COLUMNS": t.columns, "WORDS": words, "FIELDS": 3, "GROUP": 8, "MIDDLE": 8}
    which = {"ACTIVATION": 3, "GATED": gated, "BIAS": gated, "BITS": True, "GROUPS": kind}
    which["SPLITS"] = 4 if t.rows == 16 else 1
    which |= dict(zip(("ZEROS", "FACTS"), groups[kind]))
    numbers = dict.fromkeys(("tiles", "columns", "depth", "blocks", "before"), i)
    pointers = ["*bf16", "*i32", "*i32", "*i32", "*i32", "*bf16", "*bf16", "*fp32", "*i32"]
    stages = int4.fitting_stages(t, words, groups[kind][1], 1 + gated, room, target.arch >= 90)
    build(packed_experts._product_kernel, pointers, numbers, tile | which, t.warps, stages, room)
fixed = {"WORDS": 32, "MIDDLE": 8, "BITS": True, "AHEAD": int4.AHEAD, "GROUP": 8}
few = [(int4.TILE_16, *kind) for kind in ((2, "*bf16"), (4, "*bf16"), (8, "*fp16"))]
more = [(t, 2, "*bf16") for t in (int4.TILE_32, int4.TILE_64, int4.WIDE, int4.LARGE)]
for t, kind, half in [*few, *more] if every else few[-1:]:
    which = {"GROUPS": kind} | dict(zip(("ZEROS", "FACTS"), groups[kind]))
    tile = {"ROWS": t.rows, "COLUMNS": t.columns, "SPLITS": 2}
    tile |= {"BIAS": True, "ADD": True, "WHOLE": True}
    numbers = dict.fromkeys(("rows", "columns", "depth", "blocks"), i)
    pointers = [half, "*i32", "*i32", half, half, "*fp32", "*i32"]
    for room in (164_000, 101_376) if t.rows * t.columns in (64 * 64, 128 * 128) else (164_000,):
        stages = int4.fitting_stages(t, 32, groups[kind][1], 1, room, target.arch >= 90)
        build(int4._product_kernel, pointers, numbers, fixed | tile | which, t.warps, stages, room)
    if t is int4.TILE_16:
        which |= {"COLUMNS": 64, "WORDS": 32, "MIDDLE": 8, "BITS": True}
        numbers = dict.fromkeys(("first_row", "count", "columns", "depth"), i)
        build(dequant._dequantize_kernel, ["*i32", "*i32", half], numbers, which)
"""

SPECIALISED = """
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource


def build_specialised(kernel, types, constants):
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    built = compile(GluonASTSource(kernel, signature, fixed), target=target, options={"num_warps": 4})
    assert built.metadata.shared < 230_000
    waits_first(built)
    return built


def box(rows, columns, kind="bf16"):
    return f"tensordesc<{kind}[{rows}, {columns}],{gl.NVMMASharedLayout(128, 32 if kind == 'i32' else 16)!r}>"
"""

ATTENTION = """
kinds = (fp8, tl.float16, 1, [2]), ("*bf16", tl.bfloat16, 2, [1])
for (pages, dot, size, some), dim in [(kind, dim) for kind in kinds for dim in ((128, 256) if every else (128,))]:
    shape = variants.Shape(32, 8, dim, 1)
    tiles = (
        (variants.decode_variant(shape, size), False, 0, True),
        (variants.shared_variant(shape, size), False, 0, True),
        (variants.chunk_variant(shape, size), True, 100, False),
    )
    for variant, causal, window, ordered in tiles if every else [tiles[i] for i in some]:
        constants = dict(
            HEADS=32, KV_HEADS=8, DIM=dim, V_DIM=dim, PAGE=1, WINDOW=window, CHUNKED=size == 1, CAUSAL=causal,
            ORDERED=ordered, SINKS=causal, QUERIES=variant.queries(4), ROWS=variant.rows, KEYS=variant.keys, WIDTH=dim,
            V_WIDTH=dim, ITEM=8, HALF_TYPE=dot, STAGES=variant.stages, SINGLE=causal,
            CAP=72.0 if dim > 128 or not causal else 0.0,
        )
        pointers = ["*bf16", pages, pages, "*i32", "*i32", "*i32", "*i32", "*bf16", "*fp32", "*fp32", "*fp32"]
        room = 164_000 if dim > 128 or (size == 2 and int(sys.argv[1]) == 90) else 100_000
        numbers = {"stride": i, "scale": f, "v_scale": f}
        build(attend._attend_kernel, pointers, numbers, constants, variant.warps, room=room)
variants.room = lambda: 166_912 if int(sys.argv[1]) == 80 else 232_448
kinds += (("*fp32", tl.float32, 4, []),) if every else ()
cases = [(kind, *dims, variants.room()) for kind in kinds for dims in ((512, 512), (192, 128))]
for (pages, dot, size, _), dim, v_dim, room in [*cases, (kinds[1], 256, 256, 101_376)]:
    variants.room = lambda: room
    shape = variants.Shape(32, 4, dim, 1, v_dim=v_dim)
    tiles = (variants.decode_variant(shape, size), False), (variants.chunk_variant(shape, size), True)
    tiles += ((variants.shared_variant(shape, size), False),)
    for variant, causal in tiles if every else tiles[: 1 if size == 1 and dim == 512 else 0]:
        constants = dict(
            HEADS=32, KV_HEADS=4, DIM=dim, V_DIM=v_dim, PAGE=1, WINDOW=0, CHUNKED=False, CAUSAL=causal,
            ORDERED=not causal, SINKS=False, QUERIES=variant.queries(8), ROWS=variant.rows, KEYS=variant.keys,
            WIDTH=256 if dim == 192 else dim, V_WIDTH=v_dim, ITEM=8, HALF_TYPE=dot, STAGES=variant.stages,
            SINGLE=causal, CAP=0.0,
        )
        pointers = ["*bf16", pages, pages, "*i32", "*i32", "*i32", "*i32", "*bf16", "*fp32", "*fp32", "*fp32"]
        numbers = {"stride": i, "scale": f, "v_scale": f}
        build(attend._attend_kernel, pointers, numbers, constants, variant.warps, room=room)
variants.room = lambda: 166_912 if int(sys.argv[1]) == 80 else 232_448
heads = {"HEADS": 16, "DIM": 576, "RANK": 512, "PAGE": 1, "PART": 256, "REST": 64, "ITEM": 8}
for pages, dot, half, size in ((fp8, tl.float16, "*fp16", 1), ("*bf16", tl.bfloat16, "*bf16", 2)):
    shape = variants.Shape(16, 1, 576, 1, 512)
    tiles = (variants.decode_variant(shape, size), False), (variants.chunk_variant(shape, size), True)
    for variant, causal in tiles if every else tiles[: 2 - size]:
        constants = heads | dict(
            GROUP=16, CAUSAL=causal, ORDERED=not causal, QUERIES=variant.queries(16), ROWS=variant.rows,
            KEYS=variant.keys, HALF_TYPE=dot, STAGES=variant.stages, SINGLE=causal,
        )
        pointers = [half, pages, "*i32", "*i32", "*i32", "*i32", "*bf16", "*fp32", "*fp32"]
        numbers = {"stride": i, "scale": f, "v_scale": f}
        room = variants.room()
        build(latent._attend_latent_kernel, pointers, numbers, constants, variant.warps, variant.stages, room)
constants = {"HEADS": 16, "NOPE": 128, "RANK": 512, "HALF": 32, "WIDTH": 512, "TURNED": 32, "GROUP": 16, "PLAIN": 128}
pointers = ["*bf16"] * 6 + ["*i32", "*fp16", "*bf16", fp8]
numbers = {"eps": f, "scale": f, "q_stride": i, "latent_stride": i, "count": i}
which = {"INTERLEAVED": True, "LIMIT": 448.0, "ANOTHER": True, "FULL": True}
build(latent._append_latent_kernel, pointers, numbers, constants | which)
constants = {"DIM": 576, "BLOCK": 1024, "TOKENS": 8, "PAGE": 1, "ALIGN": full_heads.ALIGN}
build(full_heads._gather_latents_kernel, [fp8, "*i32", "*i32", "*bf16"], {"stride": i}, constants, 8)
variant = full_heads.chunk_variant(variants.room())
heads = {"HEADS": 16, "DIM": 576, "NOPE": 128, "ROPE": 64, "VALUE": 128, "WIDTH": 128, "REST": 64, "VALUES": 128}
constants = {"ROWS": variant.rows, "KEYS": variant.keys, "ITEM": 8, "HALF_TYPE": tl.bfloat16, "STAGES": variant.stages}
numbers = dict.fromkeys(("first", "k_stride", "v_stride"), i) | {"scale": f, "v_scale": f}
pointers = ["*bf16"] * 4 + ["*i32", "*bf16", "*fp32", "*fp32"]
room = variants.room() if int(sys.argv[1]) == 90 else 100_000
if every:
    build(full_heads._attend_full_kernel, pointers, numbers, heads | constants, variant.warps, variant.stages, room)
constants = {"HEADS": 32, "DIM": 128, "PARTS": 8, "WIDTH": 128, "MERGE": 3, "MORE": attend.MORE, "SINKS": True}
pointers = ["*i32", "*i32", "*fp32", "*fp32", "*bf16", "*fp32", "*fp32", "*bf16"]
build(attend._merge_kernel, pointers, {}, constants, 1)
constants = {"HEADS": 32, "DIM": 64, "BLOCK": 16, "WIDTH": 64}
build(sinks._sink_kernel, ["*bf16", "*fp32", "*fp32"], {}, constants)
if int(sys.argv[1]) == 90:
    from radixrt.worker.cuda.attention import hopper
    from radixrt.worker.cuda.moe import hopper_experts
    from radixrt.worker.cuda.linear import hopper_gated
    from radixrt.worker.cuda.latent import hopper_full as full

    kernel = hopper._attend_specialised
    for causal in (False, True) if every else (True,):
        constants = dict(
            HEADS=32, KV_HEADS=8, DIM=128, PAGE=1, CAUSAL=causal, ORDERED=not causal, SINKS=causal, QUERIES=32,
            KEYS=hopper.KEYS,
            ITEM=8, STAGES=hopper.STAGES, FEEDERS=hopper.FEEDERS, MULTIPLY_REGISTERS=hopper.MULTIPLY_REGISTERS,
            FEED_REGISTERS=hopper.FEED_REGISTERS, EARLY=True,
        )
        pointers = ["*bf16", fp8, fp8, "*i32", "*i32", "*i32", "*i32", "*bf16", "*fp32", "*fp32", "*fp32"]
        types = dict(zip((n for n in kernel.arg_names if n.endswith("_ptr")), pointers, strict=True))
        build_specialised(kernel, types | {"stride": i, "scale": f, "v_scale": f}, constants)

    def described(width):
        return f"tensordesc<bf16[{full.KEYS}, {width}],{gl.NVMMASharedLayout(128, 16)!r}>"

    pointers = ["*bf16", "*i32", "*i32", "*bf16", "*fp32", "*fp32"]
    types = dict(zip(("q_ptr", "items_ptr", "starts_ptr", "out_ptr", "partial_ptr", "lse_ptr"), pointers, strict=True))
    types |= {"k_there": described(128), "r_there": described(64), "v_there": described(128)}
    constants = dict(
        HEADS=16, RANK=512, NOPE=128, ROPE=64, VALUE=128, KEYS=full.KEYS, ITEM=8, STAGES=full.STAGES,
        MULTIPLY_REGISTERS=full.MULTIPLY_REGISTERS, FEED_REGISTERS=full.FEED_REGISTERS, EARLY=True,
    )
    types |= {"first_head": i, "scale": f, "v_scale": f}
    if every:
        build_specialised(full._attend_full_specialised, types, constants)

    rows = f"tensordesc<bf16[64, {hopper_experts.DEPTH}],{gl.NVMMASharedLayout(128, 16)!r}>"
    types = {"x_there": rows, "w_there": rows.replace("64,", f"{hopper_experts.PART},", 1), "tiles_ptr": "*i32"}
    types |= {"bias_ptr": "*bf16", "out_ptr": "*bf16"} | dict.fromkeys(("tiles", "blocks", "columns", "depth"), i)
    names = "PART", "DEPTH", "STAGES", "GROUP", "MULTIPLY_REGISTERS", "FEED_REGISTERS"
    constants = {name: getattr(hopper_experts, name) for name in names} | {"ACTIVATION": 3, "FIELDS": 3, "EARLY": True}
    for gated in (False, True) if every else ():
        build_specialised(hopper_experts._product_specialised, types, constants | {"GATED": gated, "BIAS": gated})

    names = "ROWS", "PART", "DEPTH", "STAGES", "GROUP", "MULTIPLY_REGISTERS", "FEED_REGISTERS"
    constants = {name: getattr(hopper_gated, name) for name in names} | {"ACTIVATION": 0, "EARLY": True}
    types = dict.fromkeys(("tiles", "blocks", "columns", "depth"), i)
    types |= {"x_there": box(128, 64), "w_there": box(128, 64), "out_there": box(64, 128)}
    build_specialised(hopper_gated._gated_specialised, types, constants)
"""

LAUNCHED = """
from types import SimpleNamespace

from triton.runtime import driver

from radixrt.worker.cuda.elementwise import launching

built = []


def launch(kernel, grid, cache, *arguments, **options):  # as `launching.launch`, but compiles only
    built.append(kernel.run(*arguments, True, grid=grid, warmup=True, launch_pdl=True, **options))


def not_serialized():
    for one in built:
        assert one.metadata.shared < 232_448
        waits_first(one)
        # The assembler serializes products if it sees no other way, and waits for each. Here four follow each other.
        waits = one.asm["sass"].count("WARPGROUP.DEPBAR")
        assert one.asm["sass"].count("HGMMA") >= 4 * waits > 0, "serialized"
        assert "STL" not in one.asm["sass"], "too many registers"


launching.launch = launch
methods = ("get_current_target", target), ("get_current_device", 0), ("get_current_stream", 0)
driver.set_active(SimpleNamespace(**{name: lambda *_, value=value: value for name, value in methods}))
"""

HOPPER_INT4 = """
from radixrt.worker.cuda.linear import hopper_int4

kind = next(kind for kind in hopper_int4.KINDS if str(kind.tokens) == sys.argv[2])
dtype, size = (torch.float16, 32) if kind.tokens == 32 else (torch.bfloat16, 128)
weight, x = trials.draw_int4(torch.device("cpu"), dtype, 200, 1152, size, True, 40)
for splits, bias in ((1, None), (2, torch.zeros(200, dtype=dtype))):
    out = torch.empty((40, 200), dtype=dtype)
    hopper_int4.multiply(x, weight, out, kind, splits, bias=bias, add=bias is not None)
not_serialized()
"""

HOPPER_PACKED = """
from radixrt.worker.cuda.moe import hopper_packed_experts

kind = next(kind for kind in hopper_packed_experts.KINDS if str(kind.rows) == sys.argv[2])
stack, _ = trials.draw_experts(torch.Generator().manual_seed(0), torch.device("cpu"))
x, bias = torch.zeros((200, stack.columns), dtype=torch.bfloat16), torch.zeros((4, 200), dtype=torch.bfloat16)
order = SimpleNamespace(tiles=torch.zeros((9, 3), dtype=torch.int32), tokens=torch.zeros(200, dtype=torch.int32))
for activation in (None, "clamped_swiglu"):
    hopper_packed_experts.product(x, order, stack, activation, bias if activation else None, kind=kind)
not_serialized()
"""

MEMORY = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixrt.worker.cuda.attention import attend, hopper
from radixrt.worker.cuda.elementwise import kernels
from radixrt.worker.cuda.linear import gemm, fp8 as fp8_products

for kernel in (attend._attend_kernel, hopper._attend_specialised, kernels._gather_kernel):
    stride = next(parameter for parameter in kernel.params if parameter.name == "stride")
    assert stride.do_not_specialize, "compiled anew for a page table of another width"

kernel, depth = gemm._product_kernel, 4096
pointers = dict(x_ptr="*fp8e4nv", weight_ptr="*fp8e4nv", x_scales_ptr="*fp32", scales_ptr="*fp32", bias_ptr="*bf16")
pointers |= {"out_ptr": "*bf16", "sums_ptr": "*bf16", "counts_ptr": "*bf16"}
deep = gemm.Tile(16, 64, 256, 4, 8)
by_rows = fp8_products.ALONE, fp8_products.TILE_32, fp8_products.TILE_64, *fp8_products.LARGE_TILES
tiles = [(tile, 1) for tile in (deep, *by_rows)]
tiles += [(tile, 2) for tile in (fp8_products.BLOCKS, fp8_products.BLOCKS_ALONE, fp8_products.BLOCKS_WIDE)]
chips = (89, 101_376), (90, 232_448), (120, 101_376)
for tile, scales, capability, room in [(*tile, *chip) for tile in tiles for chip in chips]:
    at_once = gemm.blocks_at_once(tile, depth, room) if scales == 2 else 1
    constants = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "BLOCK": 128, "SCALES": scales}
    constants |= {"SPLITS": 1, "BIAS": False, "ADD": False, "WHOLE": True, "AT_ONCE": at_once, "AHEAD": gemm.AHEAD}
    constants["EARLY"] = capability >= 90
    types = dict.fromkeys(constants, "constexpr") | pointers
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, "columns", "depth")}
    options = {"num_warps": tile.warps, "num_stages": gemm.stages(tile, at_once, room)}
    built = compile(ASTSource(kernel, signature, fixed, aligned), GPUTarget("cuda", capability, 32), options)
    assert built.metadata.shared <= room, (tile, capability, built.metadata.shared)
"""


SCRIPTS = {"most": MOST, "attention": ATTENTION, "mamba": MAMBA, "packed": PACKED}
EVERY = [pytest.param(name, at, "every", marks=pytest.mark.slow) for name in SCRIPTS for at in (90, 80)]


@pytest.mark.parametrize(("name", "capability", "which"), [("attention", 90, "some"), *EVERY])
def test_all_kernels_compile(name, capability, which, tmp_path):
    """Each kernel; of products, attention and what rounds either all variants or some, among them those that need most
    memory. Products by blocks are compiled below."""
    run(BEGIN + SPECIALISED + SCRIPTS[name], tmp_path, str(capability), which)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [32, 64, 128, 256])
def test_products_in_int4_on_hopper(tokens, tmp_path):
    """Launched as they are on a GPU, they compile, to products that are not serialized."""
    run(BEGIN + LAUNCHED + HOPPER_INT4, tmp_path, "90", str(tokens))


@pytest.mark.parametrize("rows", [pytest.param(n, marks=pytest.mark.slow) for n in (128, 256)])
def test_experts_in_mxfp4_on_hopper(rows, tmp_path):
    run(BEGIN + LAUNCHED + HOPPER_PACKED, tmp_path, "90", str(rows))


@pytest.mark.slow
def test_products_by_blocks_fit_in_the_shared_memory_of_every_gpu_that_has_them(tmp_path):
    """With pointers aligned as they are; and no width of a page table is compiled in."""
    run(MEMORY, tmp_path)


def run(script: str, tmp_path: Path, *arguments: str) -> None:
    pytest.importorskip("triton")
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    command = [sys.executable, "-W", "error::UserWarning", "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
