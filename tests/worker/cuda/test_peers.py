"""The sum over ranks, in Triton's interpreter: on a GPU it runs in tests/gpu."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

pytest.importorskip("triton")

from radixrt.worker.cuda.comm.custom_all_reduce import PROGRAMS, CustomAllReduce, room_bytes  # noqa: E402
from radixrt.worker.cuda.comm.group import CustomAllReduceGroup  # noqa: E402
from radixrt.worker.cuda.elementwise import kernels  # noqa: E402
from radixrt.worker.model.layers.fp8 import Fp8Scaling  # noqa: E402
from radixrt.worker.model.layers.norms import NoNorm, Norm  # noqa: E402
from radixrt.worker.model.parallel.sharding import Shard  # noqa: E402
from tests.worker.cuda.peers_rank import DTYPE, HIDDEN, MAX_ROWS, TILE, added  # noqa: E402
from tests.worker.cuda.test_compile import run  # noqa: E402

COMPILED = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixrt.worker.cuda.comm import custom_all_reduce as peers


def build(capability, kernel, types, constants, ranks=4, warps=8):
    constants = constants | {"EARLY": capability >= 90}
    tuples = {"buffers": ("*bf16",) * ranks, "flags": ("*i32",) * ranks}
    signature = {name: "constexpr" if name in constants else (tuples | types)[name] for name in kernel.arg_names}
    number = {name: n for n, name in enumerate(kernel.arg_names)}
    fixed = {(number[name],): value for name, value in constants.items()}
    pointers = [(number[name], rank) for name in tuples for rank in range(ranks)]
    pointers += [(number[name],) for name in types if name.endswith("_ptr")]
    aligned = {path: [["tt.divisibility", 16]] for path in pointers}
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": warps, "num_stages": 1}
    text = compile(ASTSource(kernel, signature, fixed, aligned), target=target, options=options).asm["ptx"]
    before, waits, _ = text.partition("griddepcontrol.wait")
    assert bool(waits) == (capability >= 90)
    assert not waits or not ("st." in before or ".cg" in before), "a buffer, or a flag, before what is ahead has ended"
    assert "st.release.sys.global" in text and "ld.acquire.sys.global" in text
    assert text.count("ld.global.cg.v4.b32") >= ranks, "16 bytes of each peer at a time"


rank = {"RANK": 1, "RANKS": 4, "PTX": True}
types = {"residual_ptr": "*bf16", "weight_ptr": "*bf16", "scales_ptr": "*fp32"}
types |= {"eps": "fp32", "rows": "i32", "stride": "i32"}
for capability, fp8 in ((80, "*fp8e5"), (90, "*fp8e4nv")):
    for shares in (False, True):
        constants = rank | {"SIZE": 4096, "SHARES": shares, "TILE": peers.TILE}
        build(capability, peers._add_kernel, {"residual_ptr": "*bf16", "rows": "i32"}, constants)
    for group, out in ((0, "*bf16"), (4096, fp8), (128, fp8)):
        constants = rank | {"size": 4096, "GROUP": group, "LIMIT": 448.0, "BLOCK": 4096}
        build(capability, peers._add_norm_kernel, types | {"out_ptr": out}, constants)
"""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted: without a GPU")
ROOT = Path(__file__).parents[3]


def group(ranks: int, dtype: torch.dtype = DTYPE) -> list[CustomAllReduce]:
    """All ranks in one process."""
    rooms = [torch.zeros(room_bytes(ranks, HIDDEN, MAX_ROWS, dtype), dtype=torch.uint8) for _ in range(ranks)]
    return [CustomAllReduce(rank, rooms, HIDDEN, MAX_ROWS, dtype) for rank in range(ranks)]


def told(peers: CustomAllReduce) -> torch.Tensor:
    """int32[programs, ranks]: what each rank has told this one."""
    return peers._flags[peers.rank].view(PROGRAMS, peers.ranks)


def come(peers: CustomAllReduce, met: int) -> None:
    """This rank has met the others so many times, and all others have come once more: here none runs beside another."""
    words = told(peers)
    words[:] = torch.tensor(met + 1).to(torch.int32)
    words[:, peers.rank] = met


@pytest.mark.parametrize("dtype", [DTYPE, torch.float32])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_sums_in_the_order_of_ranks(ranks, dtype):
    """Of any number of rows; in float32 another order shows."""
    peers = group(ranks, dtype)
    for turn, rows, programs in ((0, 1, 4), (1, MAX_ROWS, 1), (0, 5, 3), (1, 2, PROGRAMS)):
        parts, residual = torch.randn(ranks, rows, HIDDEN).to(dtype), torch.randn(rows, HIDDEN).to(dtype)
        expected = added(residual, parts)
        for each, part in zip(peers, parts, strict=True):
            each.buffer(turn, rows).copy_(part)
        for each in peers:
            come(each, 3)
            found = residual.clone()
            each._add(turn, rows, found, False, TILE, programs)
            assert torch.equal(found, expected)
        if ranks > 2 and dtype == torch.float32:
            assert not torch.equal(added(residual, parts.flip(0)), expected)


def test_programs_that_a_call_does_without_meet_nobody():
    first, other = peers = group(2)
    for each in peers:
        come(each, 7)
    first._add(0, 3, torch.zeros(3, HIDDEN, dtype=DTYPE), False, TILE, 4)
    assert told(first)[:6, 0].tolist() == [8, 8, 8, 8, 7, 7]
    assert told(other)[:6, 0].tolist() == [8, 8, 8, 8, 8, 8]
    come(other, 7)
    other._add(0, 1, torch.zeros(1, HIDDEN, dtype=DTYPE), False, TILE, 4)
    assert told(other)[:6, 1].tolist() == [8, 8, 7, 7, 7, 7]


@pytest.mark.parametrize("met", [2**31 - 2, 2**31 - 1, -(2**31), -1])
def test_numbers_go_round(met):
    first, other = group(2)
    come(first, met)
    first.buffer(0, 1).fill_(1)
    other.buffer(0, 1).fill_(2)
    residual = torch.ones(1, HIDDEN, dtype=DTYPE)
    first._add(0, 1, residual, False, TILE, 1)
    assert (residual == 4).all() and told(first)[0, 0] == told(first)[0, 1]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("fp8_scaling", [None, *Fp8Scaling])
def test_add_norm_is_add_then_norm(fp8_scaling, wide):
    peers, weight = group(2), torch.rand(HIDDEN).to(torch.float32 if wide else DTYPE)
    first = peers[0]
    for rows in (1, MAX_ROWS):
        residual = torch.randn(rows, HIDDEN).to(DTYPE)
        apart, together = residual.clone(), residual.clone()
        for each in peers:
            each.buffer(0, rows).normal_()
        come(first, 0)
        first._last = 1
        first.add(0, rows, apart)
        expected = kernels.norm(apart, weight, 1e-5, fp8_scaling)
        come(first, 0)
        first._last = 1
        found = first.add_norm(0, rows, together, weight, 1e-5, fp8_scaling)
        assert torch.equal(together, apart)
        if fp8_scaling is None:
            assert torch.equal(found, expected)
        else:
            assert torch.equal(found.values.float(), expected.values.float())
            assert torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("norm", [NoNorm(), Norm(torch.rand(HIDDEN), 1e-5, None, True, torch.rand(HIDDEN))])
def test_a_sum_may_be_followed_by_no_norm_or_another_one(norm):
    """Models with attention and MLP in parallel, and those with LayerNorm."""
    peers = group(2)
    peers[0].buffer(0, 3).fill_(1)
    peers[1].buffer(0, 3).fill_(2)
    come(peers[0], 0)
    peers[0]._last = 1
    of_ranks = object.__new__(CustomAllReduceGroup)
    of_ranks._all_reduce = peers[0]
    residual = torch.randn(3, HIDDEN).to(DTYPE)
    expected = residual + 3
    found = of_ranks.add(0, peers[0].buffer(0, 3), residual, norm, kernels)
    assert torch.equal(residual, expected) and torch.equal(found, norm(expected, kernels))


def test_a_group_without_peer_access_sums_by_collectives(monkeypatch):
    """Three ranks have no kernel. The other two have the same parts."""
    monkeypatch.setattr(CustomAllReduceGroup, "_has_met", False)
    monkeypatch.setattr(distributed, "all_reduce", lambda x, op=None: x if op else x.mul_(3))
    of_ranks = CustomAllReduceGroup(Shard(0, 3), torch.device("cpu"), exact=False)
    of_ranks.meet(HIDDEN, MAX_ROWS, DTYPE)
    residual = torch.zeros(2, HIDDEN, dtype=DTYPE)
    part = of_ranks.buffer(0, residual).fill_(1)
    of_ranks.add(0, part, residual, NoNorm(), kernels)
    assert torch.equal(residual, torch.full_like(residual, 3))


def test_turns_alternate_and_rows_fit():
    peers = group(1)[0]
    with pytest.raises(ValueError, match="turn 1 twice"):
        peers.add(1, 1, torch.zeros(1, HIDDEN, dtype=DTYPE))
    with pytest.raises(ValueError, match="rows onto"):
        peers.add(0, MAX_ROWS + 1, torch.zeros(MAX_ROWS + 1, HIDDEN, dtype=DTYPE))
    with pytest.raises(ValueError, match="ranks"):
        group(3)
    assert not group(2)[0].fits(MAX_ROWS + 1)


@pytest.mark.parametrize(("ranks", "calls"), [(2, 20), pytest.param(4, 10, marks=pytest.mark.slow)])
def test_processes_meet(ranks, calls, tmp_path):
    """Each rank in a process, at its own pace: all at once and by shares, with more and fewer programs in turn."""
    for rank in range(ranks):
        (tmp_path / str(rank)).write_bytes(bytes(room_bytes(ranks, HIDDEN, MAX_ROWS, DTYPE)))
    command = [sys.executable, "-m", "tests.worker.cuda.peers_rank", str(tmp_path)]
    started = [
        subprocess.Popen([*command, str(rank), str(ranks), str(calls)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=200)[1] for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert all(process.returncode == 0 for process in started), "\n".join(errors)


@pytest.mark.slow
def test_kernels_compile(tmp_path):
    run(COMPILED, tmp_path)
