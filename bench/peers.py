"""All-reduce over the GPUs of a tensor-parallel group, added to the residual stream: `CustomAllReduce`, NCCL and
torch's own.

    python -m bench.peers [--sweep] [--hidden 4096,8192] [--rows 1,8,64,256,1024,8192]

Starts one process per GPU, for 2, 4 and 8 GPUs as far as this host has them, checks sums before timing them, and prints
microseconds per sum in a CUDA graph of 20 sums: of the slowest rank, the best of some replays. `nccl` is an all-reduce
and the addition to the residual stream; `one shot` and `two shot` are torch's all-reduces over symmetric memory, with
that addition; `at once` and `by shares` are the two ways of `CustomAllReduce.add`. With the norm that follows: `nccl,
norm`, `add, norm` and `add_norm`. `limit` is the bytes that a rank must read from others over the bandwidth of NVLink,
450 GB/s.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from bench.common import save, table
from radixrt.worker.cuda.comm.custom_all_reduce import (
    LARGE_TILE,
    MAX_BYTES,
    PROGRAMS,
    SMALL_TILE,
    TILE,
    CustomAllReduce,
)
from radixrt.worker.cuda.elementwise import kernels
from radixrt.worker.model.layers.fp8 import Fp8Scaling

ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Turns off multicast over NVLink, which can make GPUs unusable, also for others on the same host."""

CALLS, REPLAYS = 20, 5
LINK_GBS = 450.0
EPS = 1e-5


# ---------------------------------------------------------------- one process per GPU


def on_every_gpu(ranks: int, work: Callable[..., Any], *args: Any, seconds: float = 60) -> Any:
    """Run work(group, *args) on `ranks` GPUs, for at most `seconds`. Returns the result of rank 0. If one rank fails,
    all are killed."""
    if not 2 <= ranks <= torch.cuda.device_count():
        raise RuntimeError(f"{ranks} ranks on {torch.cuda.device_count()} GPUs")
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        started = [
            context.Process(target=_rank, args=(rank, ranks, folder, found, work, args), daemon=True)
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        end = time.monotonic() + seconds
        try:
            while any(process.exitcode is None for process in started):
                if time.monotonic() > end or any(process.exitcode for process in started):
                    raise RuntimeError(f"exit codes of the ranks: {[process.exitcode for process in started]}")
                time.sleep(0.05)
        finally:
            for process in started:
                process.kill()
        return found.get()


def _rank(rank: int, ranks: int, folder: str, found: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, device_id=device)
    result = work(dist.group.WORLD, *args)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 0:
        found.put(result)
    dist.destroy_process_group()


def gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """`x` of all ranks: [ranks, *x.shape]."""
    everything = x.new_empty((group.size(), *x.shape))
    dist.all_gather_into_tensor(everything, x.contiguous(), group=group)
    return everything


# ---------------------------------------------------------------- is it right?


def added(residual: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """The expected sum of residual[rows, hidden] and parts[ranks, rows, hidden]."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return (residual.float() + total).to(residual.dtype)


def check(group: Any, hidden: int = 4096, most_rows: int = 1030) -> str:
    """Assert that sums equal those in float32, rounded once, with the same bits on all ranks, even if a rank is
    late."""
    rank, device = group.rank(), torch.device("cuda", torch.cuda.current_device())
    peers = CustomAllReduce.meet(group, hidden, most_rows, torch.bfloat16, device)
    torch.manual_seed(rank)
    same = random.Random(0)
    weight = gathered(torch.rand(hidden, device=device).bfloat16(), group)[0]

    def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        part = torch.randn(rows, hidden, device=device).bfloat16()
        residual = gathered(torch.randn(rows, hidden, device=device).bfloat16(), group)[0]
        return part, residual, added(residual, gathered(part, group))

    for rows in (1, 2, 3, 7, 8, 33, 64, 100, 257, 1024, most_rows):
        for way in ("add", "at once", "by shares", "few programs", None, *Fp8Scaling):
            part, residual, expected = inputs(rows)
            late, cycles = same.randrange(2 * group.size()), same.randrange(1, 2_000_000)
            if late == rank:
                torch.cuda._sleep(cycles)
            turn, normed = 1 - peers._last, None
            peers.buffer(turn, rows).copy_(part)
            if way == "add":
                peers.add(turn, rows, residual)
            elif isinstance(way, str):
                peers._add(turn, rows, residual, way != "at once", programs=3 if way == "few programs" else PROGRAMS)
            else:
                normed = peers.add_norm(turn, rows, residual, weight, EPS, way)
            assert torch.equal(residual, expected), (way, rows)
            assert (gathered(residual, group) == residual).all(), (way, rows)
            if normed is not None:
                then = kernels.norm(expected, weight, EPS, way)
                for one, other in (
                    ((normed, then),) if way is None else zip(vars_of(normed), vars_of(then), strict=True)
                ):
                    assert torch.equal(one.float(), other.float()), ("norm", way, rows)

    for rows in (1, 5, 64):
        for ways in ("at once", "by shares", "both"):
            check_graph(group, peers, rows, ways, 200 // 3)

    rows = 16
    for k in range(300):  # a random rank is delayed, at a random place
        rows = same.choice((1, 16, 200)) if k % 10 == 0 else rows
        part, residual, expected = inputs(rows)
        who, where = same.randrange(group.size()), same.randrange(3)
        cycles, turn = same.randrange(1, 400_000), 1 - peers._last
        for place in range(3):
            if place == 1:
                peers.buffer(turn, rows).copy_(part)
            if (who, where) == (rank, place):
                torch.cuda._sleep(cycles)
        peers._add(turn, rows, residual, bool(k % 3))
        assert torch.equal(residual, expected), ("late", k, rows)
    return f"{group.size()} ranks: sums as float32's, the same bits everywhere"


def vars_of(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.values, x.scales


def check_graph(group: Any, peers: CustomAllReduce, rows: int, ways: str, replays: int) -> None:
    """Assert the same for a CUDA graph of CALLS sums in a row, with new inputs for each replay."""
    device, hidden = torch.device("cuda", torch.cuda.current_device()), peers.hidden
    parts = torch.zeros(CALLS, rows, hidden, device=device).bfloat16()
    residual = torch.zeros(rows, hidden, device=device).bfloat16()

    def run() -> None:
        for i in range(CALLS):  # even, so that each replay begins with the same one of the two buffers
            turn = 1 - peers._last
            peers.buffer(turn, rows).copy_(parts[i])
            peers._add(turn, rows, residual, ways == "by shares" or (ways == "both" and i % 3 == 1))

    run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    expected = residual.clone()
    bad = torch.zeros((), dtype=torch.int64, device=device)
    for k in range(replays):
        parts.normal_()
        everything = gathered(parts, group)
        for i in range(CALLS):
            expected = added(expected, everything[:, i])
        if k % 7 == group.rank():
            torch.cuda._sleep(300_000)
        graph.replay()
        bad += (residual != expected).sum()
    assert int(bad) == 0, (rows, ways, int(bad))
    assert (gathered(residual, group) == residual).all()


# ---------------------------------------------------------------- how long does it take?


def graph_us(run: Callable[[int], object], group: Any) -> float:
    """Microseconds per run(i) of the slowest rank."""
    for i in range(CALLS):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(CALLS):
            run(i)
    graph.replay()
    found = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        torch.cuda.synchronize()
        graph.replay()  # so that all ranks are running when timing starts
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / CALLS)
    slowest = torch.tensor(found, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.min())


def measure(group: Any, hiddens: list[int], rows: list[int], sweep: bool) -> list[dict[str, Any]]:
    import torch.distributed._symmetric_memory as symmetric

    found, device = [], torch.device("cuda", torch.cuda.current_device())
    for hidden in hiddens:
        peers = CustomAllReduce.meet(group, hidden, max(rows), torch.bfloat16, device)
        torchs = symmetric.empty(max(rows), hidden, dtype=torch.bfloat16, device=device).zero_()
        symmetric.rendezvous(torchs, group)
        for turn in range(2):
            peers.buffer(turn, max(rows)).zero_()
        for count in rows:
            found.append(
                {"ranks": group.size(), "hidden": hidden, "rows": count} | times(group, peers, torchs, count, sweep)
            )
            if group.rank() == 0:
                print({k: v if not isinstance(v, float) else round(v, 2) for k, v in found[-1].items()}, flush=True)
    return found


def times(group: Any, peers: CustomAllReduce, torchs: torch.Tensor, rows: int, sweep: bool) -> dict[str, Any]:
    ranks, hidden, device = group.size(), peers.hidden, torchs.device
    residual = torch.zeros(rows, hidden, device=device, dtype=torch.bfloat16)
    weight = torch.ones(hidden, device=device, dtype=torch.bfloat16)
    partial, symmetric, name = torch.zeros_like(residual), torchs[:rows], group.group_name

    def nccl(i: int) -> None:
        dist.all_reduce(partial, group=group)
        residual.add_(partial)

    def one_shot(i: int) -> None:
        residual.add_(torch.ops.symm_mem.one_shot_all_reduce(symmetric, "sum", name))

    def two_shot(i: int) -> None:
        torch.ops.symm_mem.two_shot_all_reduce_(symmetric, "sum", name)
        residual.add_(symmetric)

    def then_norm(run: Callable[[int], object]) -> Callable[[int], object]:
        return lambda i: (run(i), kernels.norm(residual, weight, EPS))

    row: dict[str, Any] = {"nccl": graph_us(nccl, group)}
    for label, run in (("one shot", one_shot), ("two shot", two_shot)):
        try:
            row[label] = graph_us(run, group)
        except RuntimeError as error:
            row[label] = str(error).splitlines()[0][:40]
    row["at once"] = graph_us(lambda i: peers._add(i % 2, rows, residual, False), group)
    if ranks > 2:
        row["by shares"] = graph_us(lambda i: peers._add(i % 2, rows, residual, True), group)
    row["nccl, norm"] = graph_us(then_norm(nccl), group)
    row["add, norm"] = graph_us(then_norm(lambda i: peers.add(i % 2, rows, residual)), group)
    row["add_norm"] = graph_us(lambda i: peers.add_norm(i % 2, rows, residual, weight, EPS), group)
    size = rows * hidden * 2
    row["limit"] = size * min(ranks - 1, 2 * (ranks - 1) / ranks) / LINK_GBS / 1e3
    if sweep:
        for shares in (False, True) if ranks > 2 else (False,):
            for tile in (SMALL_TILE, TILE, LARGE_TILE):
                for programs in (PROGRAMS // 4, PROGRAMS // 2, PROGRAMS):
                    if tile * programs <= 2 * rows * hidden or (tile, programs) == (TILE, PROGRAMS):
                        row[f"{'shares' if shares else 'once'} {tile} x {programs}"] = graph_us(
                            lambda i, s=shares, t=tile, p=programs: peers._add(i % 2, rows, residual, s, t, p), group
                        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="other tiles and numbers of programs, too")
    parser.add_argument("--hidden", default="4096,8192")
    parser.add_argument("--rows", default="1,8,64,256,1024,8192")
    asked = parser.parse_args()
    hiddens, rows = ([int(x) for x in text.split(",")] for text in (asked.hidden, asked.rows))
    if torch.cuda.device_count() < 2:
        parser.error("needs 2 GPUs")
    found = []
    for ranks in [n for n in MAX_BYTES if n <= torch.cuda.device_count()]:
        print(on_every_gpu(ranks, check), flush=True)
        found += on_every_gpu(ranks, measure, hiddens, rows, asked.sweep, seconds=120)
    shown = [{k: v for k, v in row.items() if " x " not in k} for row in found]
    print(table(shown))
    save("peers", found, gpu=torch.cuda.get_device_name(), unit="microseconds of a sum")


if __name__ == "__main__":
    main()
