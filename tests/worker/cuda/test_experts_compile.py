"""Kernels of experts in FP8 compile for GPUs that are not here, as they should: see test_compile.py."""

from __future__ import annotations

import pytest

from tests.worker.cuda.test_compile import run

SCRIPT = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixrt.worker.cuda.moe import experts, routing, fp8_experts

capability, room = int(sys.argv[1]), int(sys.argv[2])
INTEGERS = dict.fromkeys(("rows_ptr", "tiles_ptr", "experts_ptr", "places_ptr", "tokens_ptr"), "*i32")
FP8 = dict.fromkeys(("weight_ptr", "values_ptr"), "*fp8e4nv")
SCALES = dict.fromkeys(("x_scales_ptr", "scales_ptr"), "*fp32")
HALVES = dict.fromkeys(("logits_ptr", "bias_ptr", "weights_ptr", "out_ptr"), "*bf16")


def build(kernel, x, constants, whole, warps, stages=3):
    constants = constants | {"EARLY": capability >= 90}
    pointers = INTEGERS | FP8 | SCALES | HALVES | {"x_ptr": x}
    types = dict.fromkeys(constants, "constexpr") | pointers
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    names = [name for name in (*pointers, *whole) if name in kernel.arg_names]
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in names}
    options = {"num_warps": warps, "num_stages": stages}
    built = compile(ASTSource(kernel, signature, fixed, aligned), GPUTarget("cuda", capability, 32), options)
    assert built.metadata.shared <= room, (constants, built.metadata.shared)
    assert ("griddepcontrol.wait" in built.asm["ptx"]) == (capability >= 90)
    return built.asm["ptx"]


routed = {"CHOSEN": 8, "NORMALIZED": True, "BLOCK": 128, "SLOTS": 8, "FIELDS": 3, "LIMIT": 448.0}
routed |= {"SIGMOID": False, "BIASED": False, "SIZE": 128, "GROUPS": 1, "KEPT": 1, "FACTOR": 1.0, "MIN_SUM": 0.0}
routed["JITTER"] = -1.0
kinds = (True, 128, 2048), (False, 4096, 4096), (True, 0, 2048), (False, 0, 2048)
for single, group, all_ in kinds:
    constants = routed | {"SINGLE": single, "GROUP": group, "ALL": all_}
    build(routing._begin_kernel, "*bf16", constants, ("count", "size"), max(1, all_ // 2048))
both = fp8_experts.TILE_16, fp8_experts.TILE_32, fp8_experts.TILE_64
for tiles, blocks in (((*both, fp8_experts.TILE_16_DEEP, fp8_experts.TILE_128), False), (both, True)):
    for t in tiles:
        constants = {"ROWS": t.rows, "COLUMNS": t.columns, "DEPTH": t.depth, "WHOLE": True, "OF_TOKENS": t.rows < 64}
        constants |= {"BLOCKS": blocks, "BLOCK": 128, "FIELDS": 3, "GROUP": 8}
        ptx = build(fp8_experts._product_kernel, "*fp8e4nv", constants, ("columns", "depth"), t.warps, t.stages)
        assert "cp.async.cg" in ptx, "what is multiplied next is not loaded ahead"
        matrices = "wgmma.mma_async" if capability == 90 else "mma.sync.aligned.m16n8k32"
        assert matrices in ptx and "mma.sync.aligned.m16n8k16" not in ptx, "products are not of FP8"
"""


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "room"), [(90, 232_448), (89, 101_376)])
def test_kernels_of_experts_in_fp8(capability, room, tmp_path):
    """In the shared memory of every GPU that has products in FP8, by its own instructions, loading ahead."""
    run(SCRIPT, tmp_path, str(capability), str(room))
