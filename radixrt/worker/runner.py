"""The Runner that computes a model with torch: plan in, tokens out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from radixrt.config import WorkerConfig
from radixrt.worker import attention
from radixrt.worker.kv import DTYPES, KVPool
from radixrt.worker.model import checkpoint, read_spec
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.spec import ModelSpec
from radixrt.worker.plan import Plan, Result
from radixrt.worker.sample import sample, token_logprobs

log = logging.getLogger("radixrt.runner")

CPU_MEMORY_SHARE = 0.25
"""Of the free memory of the machine, for pages, unless `max_total_tokens` says how many."""
CPU_MOST_TOKENS = 1 << 18


class TorchRunner:
    """See `plan.Runner`. The model, its KV pool and its attention on one device, one step after the other."""

    overlaps = False

    def __init__(
        self,
        model: Decoder,
        num_pages: int,
        page_size: int,
        kv_dtype: torch.dtype,
        eos_ids: frozenset[int] = frozenset(),
        batch_invariant: bool = False,
        attention_backend: str = "auto",
    ) -> None:
        spec = model.spec
        self.num_pages = num_pages
        self.page_size = page_size
        self.vocab_size = spec.vocab_size
        self.eos_ids = eos_ids
        self.max_model_len = spec.max_model_len
        self.kv_dtype = next(name for name, dtype in DTYPES.items() if dtype == kv_dtype)
        self._model = model
        self._device = model.device
        slots = num_pages * page_size
        self.pool = KVPool(spec.num_layers, slots, spec.num_kv_heads, spec.head_dim, kv_dtype, self._device)
        self._attention = attention.choose(attention_backend, self.pool, page_size, spec, model.dtype, batch_invariant)

    @classmethod
    def load(cls, config: WorkerConfig) -> TorchRunner:
        """The model of a resolved `config`. ValueError names the setting or the file that is wrong."""
        if config.cpu_threads:
            torch.set_num_threads(config.cpu_threads)
        folder = checkpoint.find(config.model)
        hf_config = checkpoint.read_json(folder / "config.json")
        if not hf_config:
            raise ValueError(f"{folder} holds no config.json: it is no checkpoint")
        spec = read_spec(hf_config)
        device = torch.device(config.device)
        dtype = choose_dtype(config.dtype, hf_config, device)
        kv_dtype = choose_kv_dtype(config.kv_cache_dtype, dtype)
        exact = config.deterministic or (device.type == "cpu" and kv_dtype.itemsize == 1)
        model = Decoder(spec, weights := open_weights(config, folder, dtype, device), exact)
        weights.close()
        tokens = config.max_total_tokens or pool_tokens(spec, kv_dtype, device, config.gpu_memory_utilization)
        num_pages = tokens // config.page_size + 1
        eos_ids = checkpoint.eos_ids(folder)
        runner = cls(model, num_pages, config.page_size, kv_dtype, eos_ids, exact, config.attention_backend)
        log.info(
            "%s: %d layers in %s; %d token slots of %s, %.2f GB",
            folder.name, spec.num_layers, dtype, tokens, runner.kv_dtype, runner.pool.nbytes / 1e9,
        )  # fmt: skip
        return runner

    def bind(self, table: np.ndarray) -> None:
        self._attention.bind(table)

    def launch(self, plan: Plan) -> Callable[[], Result]:
        with torch.inference_mode():
            result = read_logits(plan, self.logits(plan))
        return lambda: result

    @torch.inference_mode()
    def logits(self, plan: Plan) -> torch.Tensor:
        """Compute a step: float32[plan.wants.sum(), vocab] at the wanted positions, in order."""
        positions = _ranges(plan.starts, plan.counts)
        hidden = self._model.forward(
            torch.from_numpy(plan.tokens).to(self._device, torch.int64),
            torch.from_numpy(positions).to(self._device),
            self._attention.begin(plan, self._device),
        )
        wanted = _ranges(np.cumsum(plan.counts) - plan.wants, plan.wants)
        return self._model.logits(hidden[torch.from_numpy(wanted).to(self._device)])


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64: start, start + 1, ... for each start, `count` of them, one after the other."""
    starts, counts = starts.astype(np.int64), counts.astype(np.int64)
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


# ---------------------------------------------------------------- logits to results


def read_logits(plan: Plan, logits: torch.Tensor) -> Result:
    """The Result of a plan from its wanted logits, float32[plan.wants.sum(), vocab]."""
    ends = np.cumsum(plan.wants)
    failed = _not_finite(plan, logits, ends)
    scores = {
        b: score(logits[ends[b] - plan.wants[b] : ends[b]], plan, b)
        for b, request in enumerate(plan.requests)
        if request.score_from is not None
    }
    chosen = np.flatnonzero(plan.samples)
    requests = [plan.requests[b] for b in chosen]
    raw = logits[torch.from_numpy(ends[chosen] - 1).to(logits.device)]
    wants_logprobs = any(r.sampling.logprobs is not None for r in requests)
    positions = (plan.starts + plan.counts)[chosen].tolist()
    drawn = sample(raw.clone() if wants_logprobs else raw, requests, positions)
    tokens = np.zeros(len(plan.requests), dtype=np.int64)
    tokens[chosen] = drawn
    logprobs: list = []
    if wants_logprobs:
        logprobs = [None] * len(plan.requests)
        for b, found in zip(chosen, token_logprobs(raw, requests, drawn), strict=True):
            logprobs[b] = found
    return Result(tokens.tolist(), logprobs, scores, failed)


def _not_finite(plan: Plan, logits: torch.Tensor, ends: np.ndarray) -> dict[int, str]:
    """Requests of whose logits the largest is NaN or infinite."""
    bad = (~logits.amax(-1).isfinite()).nonzero().flatten().tolist() if len(logits) else []
    return {int(np.searchsorted(ends, row, side="right")): "the model gave logits that are not finite" for row in bad}


def score(logits: torch.Tensor, plan: Plan, b: int) -> list[float]:
    """Log-probabilities of the known tokens that follow the wanted positions of request b, logits[wants, vocab]."""
    stop = int(plan.starts[b] + plan.counts[b])
    following = list(plan.requests[b].tokens[stop - len(logits) + 1 : stop + 1])
    logprobs = torch.log_softmax(logits[: len(following)], -1)
    at = torch.tensor(following, dtype=torch.int64, device=logits.device)[:, None]
    return logprobs.gather(-1, at).flatten().tolist()


# ---------------------------------------------------------------- what depends on checkpoint and device


def choose_dtype(name: str, hf_config: dict, device: torch.device) -> torch.dtype:
    """`auto`: the checkpoint's on a GPU (float32 becomes bfloat16), float32 on a CPU. ValueError for no known name."""
    if name == "auto":
        stated = hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16"
        name = "float32" if device.type == "cpu" else {"float32": "bfloat16"}.get(stated, stated)
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype {name!r}: expected auto, float32, bfloat16 or float16")
    return DTYPES[name]


def choose_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """`auto`: that of the activations. ValueError for no known name."""
    name = {"fp8": "fp8_e4m3"}.get(name, name)
    if name == "auto":
        return dtype
    if name not in DTYPES:
        raise ValueError(f"kv_cache_dtype {name!r}: expected auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]


def open_weights(
    config: WorkerConfig, folder: Path, dtype: torch.dtype, device: torch.device
) -> checkpoint.SafetensorsWeights | checkpoint.RandomWeights:
    """By `load_format`. ValueError for no known one."""
    match config.load_format:
        case "auto" | "safetensors":
            return checkpoint.SafetensorsWeights(folder, dtype, device)
        case "dummy":
            return checkpoint.RandomWeights(config.seed, dtype, device)
    raise ValueError(f"load_format {config.load_format!r}: expected auto, safetensors or dummy")


def pool_tokens(spec: ModelSpec, kv_dtype: torch.dtype, device: torch.device, gpu_share: float) -> int:
    """Token slots for the memory that is left beside the weights: on a GPU up to `gpu_share` of it, on a CPU
    CPU_MEMORY_SHARE of what is free, at most CPU_MOST_TOKENS. ValueError if nothing is left."""
    each = spec.kv_elements * kv_dtype.itemsize
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        tokens = int(free - (1 - gpu_share) * total) // each
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        tokens = min(int(CPU_MEMORY_SHARE * free) // each, CPU_MOST_TOKENS)
    if tokens < 1:
        raise ValueError(f"no memory is left for KV pages: {free / 1e9:.1f} GB free; see --gpu-memory-utilization")
    return tokens
