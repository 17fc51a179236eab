"""The product with gate and up, and the gate: one fused kernel, compared with torch's product and a kernel for the
gate.

    python -m bench.gated

In the shapes of several models, with random weights in bfloat16. Each way runs for 400 ms at a time: after some
milliseconds of products the power limit lowers the GPU's clock, depending on the energy that they need, and the clock
rises again as slowly. For few rows of small models, times are those of launches, which real steps avoid by CUDA graphs.
Results are compared before anything is timed: with float32, and with each other, bit by bit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from bench.common import save, table
from radixrt.worker.cuda.elementwise.kernels import gate
from radixrt.worker.cuda.linear import gemm

SHAPES = {
    "Llama 3.1 8B": (14336, 4096),
    "Llama 70B, one of four ranks": (7168, 8192),
    "Llama 3.2 3B": (8192, 3072),
    "Llama 3.2 1B": (8192, 2048),
    "Qwen2.5 0.5B": (4864, 896),
    "Qwen2.5 7B": (18944, 3584),
    "Qwen2.5 14B": (13824, 5120),
    "Qwen3 32B": (25600, 5120),
}
"""(intermediate size, hidden size)."""
TOKENS = (512, 1024, 2048, 8192)
ROUNDS, TURN_MS = 3, 400.0


def milliseconds(run: Callable[[], object], times: int) -> float:
    """Milliseconds per call over `times` calls, by CUDA events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times


def in_turns(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds per call of each way. The ways take turns; only the second half of each turn is timed, and the
    median over turns is returned."""
    times = {name: max(1, round(TURN_MS / milliseconds(run, 3))) for name, run in ways.items()}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, run in ways.items():
            milliseconds(run, times[name] // 2)  # until the GPU's clock has settled
            found[name].append(1e3 * milliseconds(run, times[name] // 2 + 1))
    return {f"{name}_us": statistics.median(us) for name, us in found.items()}


def measure(model: str, tokens: int) -> dict[str, Any]:
    inner, hidden = SHAPES[model]
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    weight = (0.02 * torch.randn(2 * inner, hidden, device="cuda")).bfloat16()
    room = torch.empty(tokens, 2 * inner, device="cuda", dtype=torch.bfloat16)
    kernel = gemm._hopper_gated(x.device)
    assert kernel is not None, "there is no such kernel here"

    def apart() -> torch.Tensor:
        torch.mm(x, weight.t(), out=room)
        return gate(room, "silu")

    def together() -> torch.Tensor:
        return kernel.product(x, weight, "silu")

    one, other = together(), apart()
    exact = gate((x[:256].float() @ weight.float().t()).bfloat16(), "silu").float()
    error = float((one[:256].float() - exact).norm() / exact.norm())
    assert error < 1e-2, error
    row = {"model": model, "tokens": tokens, "same_bits": torch.equal(one, other)}
    row |= in_turns({"product_and_gate": apart, "gated": together})
    taken = gemm.gated_linear(x, weight, "silu") is not None
    return row | {"ratio": row["gated_us"] / row["product_and_gate_us"], "taken": taken}


def main() -> None:
    torch.manual_seed(0)
    rows = [measure(model, tokens) for model in SHAPES for tokens in TOKENS]
    print(table(rows), flush=True)
    save("gated", rows, device=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
