"""A worker alone on a GPU: scheduler and runner in one process, without router and HTTP.

    python -m bench.worker [--shape qwen3-30b | --model FOLDER] [--kv-cache-dtype fp8_e4m3] [--quick]

Random weights in the shape of Llama 3.1 8B, unless another shape or a folder with a config.json is given. The limit of
a decode row is the sum of: the KV bytes that a step reads (within windows), and the bytes of recurrent states that it
reads and writes, over the copy bandwidth; the time of all matrix products of that batch in a CUDA graph; the bytes of
the experts that the batch chooses, with random routing, over the bandwidth; and for products in FP8 (--quantization
fp8) their weights' bytes over the bandwidth, or their FLOPs over twice the rate of bfloat16. The limit of a prefill row
is that of its products plus that of attention, each by FLOPs or by bytes (of weights and chosen experts; of cached
pages), whichever takes longer; with an indexer, also that of its scores. Bandwidth and rate are measured in the same
run. GPU idle is the share of time in which no kernel ran, by a trace of all kernels.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from bench.common import save, table
from bench.grammar import EOS, GRAMMARS, made_vocabulary
from bench.shapes import SHAPES
from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Grammar, Run, Sampling
from radixrt.worker.cuda.attention.variants import Shape
from radixrt.worker.execution.sampler import TorchSampler
from radixrt.worker.load.runner import load_runner
from radixrt.worker.loop import Identity, Worker
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.layers.fp8 import Fp8Linear
from radixrt.worker.model.layers.int4 import Int4
from radixrt.worker.model.layers.latent import Latent
from radixrt.worker.model.layers.layers import DecoderLayer, NoMlp, NoOutput
from radixrt.worker.model.layers.linear import HeadLinear, Linear, Product
from radixrt.worker.model.layers.mlp import Mixture, UngatedMlp, UngatedShared
from radixrt.worker.model.layers.parallel_experts import MlpWithExperts
from radixrt.worker.plan import Runner
from radixrt.worker.request import Request
from radixrt.worker.scheduler.scheduler import Limits
from radixrt.worker.speculative.ngram import Drafter
from radixrt.worker.structured.compile import Grammars
from radixrt.worker.structured.compile_queue import Compiling

STEPS = 48
SPARSE = Mixture, MlpWithExperts


class NullLink:
    """A link that discards what the worker sends, and receives nothing."""

    def send(self, payload: bytes) -> None: ...

    def recv(self, timeout: float | None) -> bytes | None:
        return None

    def broke(self) -> bool:
        return False

    def close(self) -> None: ...


def median_ms(run: Callable[[], object], repeat: int = 20) -> float:
    """Median milliseconds per call, by CUDA events, after a warm-up."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times))


def ceilings() -> dict[str, float]:
    """Measure the copy bandwidth (reads plus writes) in GB/s, and the rate of a bf16 matrix product in TFLOP/s."""
    a = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    copy = 2 * a.numel() / median_ms(lambda: b.copy_(a)) / 1e6
    x, y = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return {"copy_gbs": copy, "tflops": 2 * 8192**3 / median_ms(lambda: x @ y) / 1e9}


def dense(layer: DecoderLayer) -> list[Product]:
    """The products of a layer that are computed for every token."""
    mlp, products = layer.mlp, [*layer.mixer.products]
    if not isinstance(layer.output, NoOutput):
        products.append(layer.output.product)
    if layer.end is not None and layer.end.gate is not None:
        products += [layer.end.gate, layer.end.back]
    if isinstance(mlp, MlpWithExperts):
        products += [mlp.experts.router, mlp.mlp.gate_up, mlp.mlp.down]
    elif isinstance(mlp, Mixture):
        products.append(mlp.experts.router)
        shared = mlp.shared
        if shared is not None:
            products += [shared.up if isinstance(shared, UngatedShared) else shared.gate_up, shared.down]
    elif not isinstance(mlp, NoMlp):
        products += [mlp.up if isinstance(mlp, UngatedMlp) else mlp.gate_up, mlp.down.product]
    return products


def of_heads(layer: DecoderLayer) -> list[HeadLinear]:
    """The products per head before and after latent attention."""
    return [layer.mixer.ups.k, layer.mixer.ups.v] if isinstance(layer.mixer, Latent) else []


def experts_bytes(model: Decoder, batch: int) -> float:
    """Expected bytes of the experts that `batch` tokens choose in all layers, with random routing."""
    total = 0.0
    for layer in model._layers:
        if isinstance(layer.mlp, SPARSE):
            experts = layer.mlp.experts
            share = 1 - (1 - experts.top_k / len(experts.down)) ** batch
            total += share * (experts.gate_up.nbytes + experts.down.nbytes)
    return total


def weight_bytes(model: Decoder, batch: int) -> float:
    """Bytes of all weights that a step of `batch` tokens reads, in all layers."""
    return experts_bytes(model, batch) + sum(
        sum(values(x).nbytes for x in dense(layer)) + sum(x.weight.nbytes for x in of_heads(layer))
        for layer in model._layers
    )


def values(linear: Product) -> torch.Tensor | Int4:
    """The values of a product's weight, in their stored dtype."""
    return linear.weight.values if isinstance(linear, Fp8Linear) else linear.weight


def gemm_ms(runner: Runner, batch: int) -> float:
    """Milliseconds of all matrix products of a step of `batch` tokens, except experts and quantized ones, by torch in
    a graph."""
    model = runner._model
    inputs: dict[object, torch.Tensor] = {}

    def run() -> None:
        for layer in model._layers:
            for linear in dense(layer):
                if not isinstance(linear, Linear):
                    continue
                size = linear.weight.shape[1]
                if size not in inputs:
                    inputs[size] = torch.randn(batch, size, device="cuda", dtype=linear.weight.dtype)
                F.linear(inputs[size], linear.weight, linear.bias)
            for product in of_heads(layer):
                heads, _, size = product.weight.shape
                if (heads, size) not in inputs:
                    inputs[heads, size] = torch.randn(batch, heads, size, device="cuda", dtype=model.dtype)
                product(inputs[heads, size])
        if model.spec.hidden_size not in inputs:
            inputs[model.spec.hidden_size] = torch.randn(
                batch, model.spec.hidden_size, device="cuda", dtype=model.dtype
            )
        F.linear(inputs[model.spec.hidden_size], model._head.weight)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_ms(graph.replay)


def scaled_ms(model: Decoder, batch: int, limits: dict[str, float]) -> float:
    """The limit of a step's products with quantized weights, in milliseconds: the weights' bytes over the bandwidth, or
    FLOPs over the rate of bfloat16, in FP8 over twice that."""
    found = 0.0
    for linear in (x for layer in model._layers for x in dense(layer) if not isinstance(x, Linear)):
        flops = (1 if isinstance(linear, Fp8Linear) else 2) * batch * values(linear).numel()
        found += max(values(linear).nbytes / limits["copy_gbs"] / 1e6, flops / limits["tflops"] / 1e9)
    return found


class Bench:
    """A worker whose steps are run one by one."""

    def __init__(
        self, runner: Runner, rows: int, budget: int, max_model_len: int, adapters: tuple[str, ...] = ()
    ) -> None:
        identity = Identity("bench", "model", adapters=adapters)
        self.worker = Worker(runner, identity, NullLink, limits=Limits(budget, rows), max_model_len=max_model_len)
        self.worker._link = NullLink()
        self._next = 0
        self._rng = np.random.default_rng(0)

    def ids(self, count: int) -> np.ndarray:
        return self._rng.integers(1000, self.worker.runner.vocab_size - 300, count, dtype=np.int32)

    def add(
        self, ids: np.ndarray, tokens: int, grammar: Grammar | None = None, adapter: str = "", **sampling: float
    ) -> int:
        """Add a request that generates `tokens` tokens, greedily by default, maybe with a LoRA adapter. Returns its
        id."""
        self._next += 1
        fields = {"temperature": 0.0, "stop_token_ids": (EOS,) if grammar else ()} | sampling
        sampling = Sampling(max_tokens=tokens, ignore_eos=True, grammar=grammar, **fields)
        prompt = array("i", ids.tobytes()).tobytes()
        run = Run(id=self._next, namespace=adapter, ids=prompt, prompt_len=len(ids), sampling=sampling, adapter=adapter)
        self.worker._add(run)
        return self._next

    def step(self) -> int:
        """Run one step. Returns the number of generated tokens."""
        outputs = self.worker._step()
        self.worker._reply(outputs)
        return sum(len(output.tokens) for output in outputs)

    def settle(self) -> None:
        """Run steps until all requests decode."""
        scheduler = self.worker.scheduler
        while scheduler.num_waiting or scheduler.running.prefilling:
            self.step()

    def finish(self) -> int:
        """Run steps until all requests have ended. Returns the number of generated tokens."""
        tokens = 0
        while self.worker.scheduler.has_work or self.worker._inflight:
            tokens += self.step()
        return tokens


def read_bytes(model: Decoder, context: float, itemsize: int) -> float:
    """Bytes of K and V that a decode reads in all layers with attention: some may have sliding windows, some read those
    of another layer."""
    spec, windows = model.spec, attended(model)
    places = range(len(spec.attention_layers))
    keys = [context if window is None else min(context, window) for window in windows]
    return itemsize * sum(keys[place] * Shape.of(spec, 1, place).key_elements for place in places)


def attended(model: Decoder) -> list[int | None]:
    """The most tokens that a query attends to in each layer with attention, None if to all."""
    index = model.spec.index
    return [index.top_k if index and window is None else window for window in model.spec.attention_windows]


def decode_rows(bench: Bench, limits: dict[str, float], itemsize: int, few: bool) -> list[dict[str, Any]]:
    rows, steps = [], 8 if few else STEPS
    cases = (1, 1024), (16, 1024), (64, 1024), (256, 1024), (64, 4096)
    for batch, context in cases[:3] if few else cases:
        for _ in range(batch):
            bench.add(bench.ids(context), 2 * steps + 16)
        bench.settle()
        for _ in range(8):
            bench.step()
        torch.cuda.synchronize()
        began = time.perf_counter()
        tokens = sum(bench.step() for _ in range(steps))
        seconds = time.perf_counter() - began
        idle = idle_share(bench.step, 20) if batch in (1, 64, 256) and not few else None
        bench.finish()
        step_ms = seconds / steps * 1e3
        model = bench.worker.runner._model
        gemm = gemm_ms(bench.worker.runner, batch) + scaled_ms(model, batch, limits)
        gemm += experts_bytes(model, batch) / limits["copy_gbs"] / 1e6
        kv_ms = batch * read_bytes(model, context + steps, itemsize) / limits["copy_gbs"] / 1e6
        if delta := model.spec.recurrent:
            kv_ms += batch * 2 * delta.state_bytes(model.dtype.itemsize) / limits["copy_gbs"] / 1e6
        kv_ms += batch * context * index_bytes(model) / limits["copy_gbs"] / 1e6
        rows.append(
            {
                "what": f"decode {batch} x {context}",
                "ms": step_ms,
                "tokens_s": tokens / seconds,
                "gemm_ms": gemm,
                "kv_ms": kv_ms,
                "limit_ms": gemm + kv_ms,
                "ratio": step_ms / (gemm + kv_ms),
                "gpu_idle": idle,
            }
        )
        print(rows[-1], flush=True)
    return rows


def idle_share(run: Callable[[], object], times: int = 1) -> float:
    """The share of time, between the first and the last kernel of `times` runs, in which no kernel ran. Prints the
    kernels that take most time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    kernels = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    busy, last = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, last))
        last = max(last, end)
    by_name: dict[str, float] = {}
    for event in kernels:
        by_name[event.name] = by_name.get(event.name, 0.0) + event.time_range.elapsed_us()
    for name, us in sorted(by_name.items(), key=lambda item: -item[1])[:14]:
        print(f"    {us / times:9.1f} us a run  {name[:90]}")
    return 1 - busy / (last - spans[0][0])


def attention_flops(model: Decoder, pairs: list[float], cached: int) -> float:
    """FLOPs of attention for `pairs` of a query and a key, by layer. For latent attention, those of the cheaper form:
    absorbed, or with full heads, whose keys and values must be computed also for `cached` tokens."""
    spec = model.spec
    shapes = [Shape.of(spec, 1, place) for place in range(len(pairs))]
    absorbed = sum(2 * n * one.heads * (one.head_dim + one.value_dim) for n, one in zip(pairs, shapes, strict=True))
    if spec.latent is None:
        return absorbed
    width = spec.latent.nope_dim + spec.latent.rope_dim + spec.latent.value_dim
    out = sum(2 * x.weight.numel() for layer in model._layers for x in of_heads(layer))
    return min(absorbed, 2 * sum(pairs) * spec.num_heads * width + out * cached)


def index_bytes(model: Decoder) -> int:
    """Bytes that the index keys of a token take, in all layers."""
    return model.spec.index_elements * model.dtype.itemsize


def index_flops(model: Decoder, positions: np.ndarray) -> float:
    """FLOPs of the index scores of queries with so many tokens each, in all layers."""
    index = model.spec.index
    if index is None:
        return 0.0
    return 2.0 * len(index.layers) * index.heads * index.dim * float(positions[positions > index.top_k].sum())


def product_flops(model: Decoder, tokens: int) -> float:
    """FLOPs of the products of a prompt of so many tokens, those of FP8 at half their number. Layers that only read
    K and V of others are needed for one token."""
    total = 0.0
    for number, layer in enumerate(model._layers):
        each = sum((1 if isinstance(x, Fp8Linear) else 2) * values(x).numel() for x in dense(layer))
        each += sum(2 * x.weight.numel() for x in of_heads(layer))
        if isinstance(layer.mlp, SPARSE):
            experts = layer.mlp.experts
            size = (1 if experts.is_fp8 else 2) * (experts.gate_up.numel() + experts.down.numel())
            each += size * experts.top_k / len(experts.down)
        total += each * (tokens if number < model.spec.writers else 1)
    return total


def prefill_rows(bench: Bench, limits: dict[str, float], itemsize: int, few: bool) -> list[dict[str, Any]]:
    model = bench.worker.runner._model
    spec, rows = model.spec, []
    cases = (0, 1024), (0, 8192), (0, 16384), (16384, 128), (8192, 600)
    for cached, new in cases[:2] if few else cases:
        times = []
        for _ in range(4):
            prefix = bench.ids(cached)
            if cached:
                bench.add(prefix, 1)
                bench.finish()
            prompt = np.concatenate([prefix, bench.ids(new)])
            torch.cuda.synchronize()
            began = time.perf_counter()
            bench.add(prompt, 1)
            bench.finish()
            times.append(time.perf_counter() - began)
        at = np.arange(cached, cached + new) + 1.0
        seen = [at if window is None else at.clip(max=window) for window in attended(model)]
        numbers = zip(spec.attention_layers, seen, strict=True)
        pairs = [float(keys.sum() if number < spec.writers else keys[-1]) for number, keys in numbers]
        parts = (
            (product_flops(model, new), weight_bytes(model, new)),
            (attention_flops(model, pairs, cached), read_bytes(model, cached, itemsize)),
            (index_flops(model, at), cached * index_bytes(model)),
        )
        bench.add(np.concatenate([prefix, bench.ids(new)]), 1)
        idle = None if few else idle_share(bench.finish)
        ms = float(np.median(times[1:])) * 1e3
        limit = sum(max(flops / limits["tflops"] / 1e9, size / limits["copy_gbs"] / 1e6) for flops, size in parts)
        row = {"what": f"prefill {new} on {cached}", "ms": ms, "limit_ms": limit, "ratio": ms / limit, "gpu_idle": idle}
        rows.append(row)
        print(rows[-1], flush=True)
    return rows


def grammar_rows(bench: Bench) -> list[dict[str, Any]]:
    """64 decodes without and with grammars, over a made-up vocabulary; all tokens are sampled. No rows without
    xgrammar."""
    if importlib.util.find_spec("xgrammar") is None:
        print("no xgrammar: decodes by a grammar are left out")
        return []
    worker, rows = bench.worker, []
    grammars = Grammars("", worker.runner.vocab_size, worker.runner.eos_ids, jump_forward=False)
    grammars._vocabulary = made_vocabulary(worker.runner.vocab_size)
    worker._compiling = Compiling(grammars)
    for what, name in (("free", ""), ("by a JSON schema", "a person"), ("by any JSON", "any JSON")):
        for _ in range(64):
            bench.add(bench.ids(1024), 2 * STEPS + 16, GRAMMARS.get(name))
        while worker._compiling:
            worker._add_compiled()
            time.sleep(0.01)
        bench.settle()
        for _ in range(8):
            bench.step()
        torch.cuda.synchronize()
        began = time.perf_counter()
        tokens = sum(bench.step() for _ in range(STEPS))
        seconds = time.perf_counter() - began
        bench.finish()
        row = {"what": f"decode 64 x 1024, {what}", "ms": seconds / STEPS * 1e3, "tokens_s": tokens / seconds}
        rows.append(row | {"ratio": row["ms"] / rows[0]["ms"]} if rows else row)
        print(rows[-1], flush=True)
    return rows


KINDS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "top_k 20, top_p 0.95": {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    "top_p 0.95": {"temperature": 0.7, "top_p": 0.95},
    "min_p 0.05": {"temperature": 0.7, "min_p": 0.05},
    "repetition 1.05, greedy": {"repetition_penalty": 1.05},
    "repetition 1.05, top_k 20, top_p 0.8": {"repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
}


def sampling_rows(bench: Bench) -> list[dict[str, Any]]:
    """Decodes by sampling parameters: with the sampler for GPUs, and with torch's, which sorts the vocabulary and
    applies penalties to one request after the other."""
    rows: list[dict[str, Any]] = []
    runner: Any = bench.worker.runner
    ways = {"ms": runner._sampler, "torch_ms": TorchSampler()}
    for batch in (1, 64, 256):
        greedy = 0.0
        for what, sampling in KINDS.items():
            row: dict[str, Any] = {"what": f"decode {batch} x 256, {what}"}
            for way, sampler in ways.items():
                runner._sampler = sampler
                for number in range(batch):
                    seed = {"seed": number} if sampling else {}
                    bench.add(bench.ids(256), STEPS, **sampling, **seed)
                bench.settle()
                for _ in range(4):
                    bench.step()
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(STEPS // 2):
                    bench.step()
                row[way] = (time.perf_counter() - began) / (STEPS // 2) * 1e3
                bench.finish()
            greedy = greedy or row["ms"]
            rows.append(row | {"ratio": row["ms"] / greedy})
            print(rows[-1], flush=True)
    runner._sampler = ways["ms"]
    return rows


class Guesses(Drafter):
    """A drafter whose drafts, of `size` tokens, are almost always wrong."""

    def __init__(self, size: int) -> None:
        super().__init__(size, overlaps=True)

    def begins(self, request: Request, requests: int) -> bool:
        return request.total + 2 <= request.limit

    def draft(self, request: Request, most: int, requests: int) -> list[int]:
        return [request.tokens[-1] ^ 1] * min(most, self.most, request.limit - len(request.tokens) - 1)


def draft_rows(bench: Bench) -> list[dict[str, Any]]:
    """Steps of decodes without drafts, and with drafts that are all wrong, which is the most that drafts cost. Then
    with the real drafter: for random prompts ("new"), where only the model's own output repeats, and for the same
    prompts again."""
    rows: list[dict[str, Any]] = []
    scheduler = bench.worker.scheduler
    for batch in (1, 4, 16, 32):
        plain, asked = 0.0, [bench.ids(1024) for _ in range(batch)]
        served = Drafter(8, overlaps=True)
        ways = [("none", None), *(("wrong", Guesses(size)) for size in (1, 3, 7)), ("new", served), ("again", served)]
        for what, drafter in ways:
            scheduler.drafter = drafter
            before = (drafter.drafted, drafter.accepted) if drafter else (0, 0)
            for ids in asked if what in ("new", "again") else [bench.ids(1024) for _ in range(batch)]:
                bench.add(ids, 4 * STEPS)
            bench.settle()
            torch.cuda.synchronize()
            steps, began = scheduler.steps, time.perf_counter()
            tokens = bench.finish()
            seconds, steps = time.perf_counter() - began, scheduler.steps - steps
            ms = seconds / steps * 1e3
            plain = plain or ms
            row = {"what": what, "batch": batch, "drafted": drafter.most if drafter else 0, "ms": ms}
            row |= {"ratio": ms / plain, "tokens_s": tokens / seconds}
            if drafter:
                drafted, accepted = drafter.drafted - before[0], drafter.accepted - before[1]
                row |= {"right": accepted / drafted if drafted else 0.0, "tokens_a_step": tokens / steps / batch}
            rows.append(row)
            print(rows[-1], flush=True)
    scheduler.drafter = None
    return rows


def plain_row(bench: Bench) -> dict[str, Any]:
    """The load `plain` of `bench.serve` without router and HTTP: 256 requests at once, 1,024 tokens in, 256 out."""
    for _ in range(256):
        bench.add(bench.ids(1024), 256)
    began = time.perf_counter()
    tokens = bench.finish()
    seconds = time.perf_counter() - began
    row = {"what": "the load plain, alone", "ms": seconds * 1e3, "tokens_s": tokens / seconds}
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument(
        "--shape", default="llama-8b", choices=SHAPES, help="each but the default has a result file of its own"
    )
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--attention-backend", default="auto", help="torch has a result file of its own")
    parser.add_argument(
        "--max-mamba-cache-size", type=int, default=0, help="recurrent states: those of 256 decodes are two thirds"
    )
    parser.add_argument(
        "--quantization",
        default="auto",
        choices=("auto", "fp8", "none"),
        help="fp8 and none have result files of their own",
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="more than 1 has a result file of its own")
    parser.add_argument("--deterministic", action="store_true", help="its cost; has a result file of its own")
    parser.add_argument("--grammars", action="store_true", help="the cost of grammars; has a result file of its own")
    parser.add_argument("--sampling", action="store_true", help="the cost of sampling and penalties; likewise")
    parser.add_argument("--drafts", action="store_true", help="cost and gain of drafted tokens; likewise")
    parser.add_argument("--few", action="store_true", help="few rows and steps, for what is slow")
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    args = parser.parse_args()
    limits = ceilings()
    print(limits, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        config = SHAPES[args.shape] | ({"num_hidden_layers": 2} if args.quick else {})
        Path(folder, "config.json").write_text(json.dumps(config))
        model = args.model or folder
        settings = {
            "kv_cache_dtype": args.kv_cache_dtype,
            "attention_backend": args.attention_backend,
            "deterministic": args.deterministic,
            "quantization": args.quantization,
            "tensor_parallel_size": args.tensor_parallel_size,
            "max_mamba_cache_size": args.max_mamba_cache_size,
        }
        worker = resolve(WorkerConfig(model=model, device="cuda", load_format="dummy", **settings))
        began = time.perf_counter()
        runner = load_runner(worker)
        itemsize = runner.pool.dtype.itemsize
        bench = Bench(runner, worker.max_num_seqs, worker.max_num_batched_tokens, 32768)
        start = time.perf_counter() - began
        print(f"ready in {start:.1f} s", flush=True)
        if args.grammars:
            rows = grammar_rows(bench)
        elif args.sampling:
            rows = sampling_rows(bench)
        elif args.drafts:
            rows = draft_rows(bench)
        else:
            rows = decode_rows(bench, limits, itemsize, args.few)
            rows += prefill_rows(bench, limits, itemsize, args.few)
            if not (args.quick or args.few):
                rows.append(plain_row(bench))
        runner.close()
    print(table(rows))
    if not args.quick and not args.model:
        kinds = {"deterministic": args.deterministic, "grammars": args.grammars, "sampling": args.sampling}
        kinds["drafts"] = args.drafts
        kinds["torch"] = args.attention_backend == "torch"
        kinds[args.quantization] = args.quantization != "auto"
        kinds[f"tp{args.tensor_parallel_size}"] = args.tensor_parallel_size > 1
        kinds[args.shape.replace("-", "_")] = args.shape != "llama-8b"
        save(
            "_".join(["worker", *(kind for kind, meant in kinds.items() if meant)]),
            rows,
            ready_s=start,
            kv_dtype=runner.kv_dtype,
            device=torch.cuda.get_device_name(),
            **limits,
        )


if __name__ == "__main__":
    main()
