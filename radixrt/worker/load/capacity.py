"""What a checkpoint takes before any of it is loaded, and how many tokens fit on which GPUs, by the arithmetic of the
worker:

    GPU * gpu_memory_utilization = weights + CUDA and a step + recurrent states + pages

Of these, CUDA and a step are estimated here (`reserved_bytes`); a worker measures them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from radixrt.checkpoint.files import read_file
from radixrt.checkpoint.gguf.file import shards
from radixrt.checkpoint.gguf.folder import WEIGHTS as GGUF
from radixrt.config import WorkerConfig
from radixrt.worker.execution.kv_pool import DTYPES
from radixrt.worker.execution.pool_sizes import GRAPH_BYTES, STATES, cache_bytes, divide, row_bytes
from radixrt.worker.load.options import Loaded, capability_for, look_up, may_stay_packed, products_on
from radixrt.worker.model import transformers_model
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.parallel.group import Group
from radixrt.worker.model.parallel.sharding import Shard
from radixrt.worker.model.spec.spec import ModelSpec
from radixrt.worker.model.weights.checkpoint import INDEX, weight_files
from radixrt.worker.model.weights.outlines import Outlines, Stored, read_headers
from radixrt.worker.model.weights.quantized import Products, quantization_of, stored_as

CUDA_BYTES = 1 << 30
"""About what CUDA, its libraries and their kernels take of a GPU."""
STAGING_BYTES = 512 << 20
"""Of copies to and from host memory (see `cuda.host.host_pool`)."""
SCORED_TOKENS = 256
"""Tokens of a step whose logits are kept at once (see `scheduler.plan_builder`)."""
GATHERED_BYTES = 1 << 30
"""About what attention of long chunks gathers of the pages."""
FEW_EXPERTS, MORE_EXPERTS = 1, 2
"""Experts of a layer take the same memory: their weights are those of two layers with so few, extended in a line. To
make hundreds of them takes seconds."""
SIZES = 1, 2, 4, 8
"""Tensor-parallel sizes that are tried."""


class Gpu(NamedTuple):
    """A GPU: its memory in MiB, as its driver says, and its compute capability."""

    name: str
    mebibytes: int
    capability: tuple[int, int]

    @property
    def memory(self) -> int:
        """Bytes."""
        return self.mebibytes << 20


GPUS = (
    Gpu("A10", 23_028, (8, 6)),
    Gpu("L4", 23_034, (8, 9)),
    Gpu("A100-40GB", 40_960, (8, 0)),
    Gpu("L40S", 46_068, (8, 9)),
    Gpu("A100-80GB", 81_920, (8, 0)),
    Gpu("H100", 81_559, (9, 0)),
    Gpu("H200", 143_771, (9, 0)),
    Gpu("B200", 182_642, (10, 0)),
)


def named_gpus(names: Sequence[str]) -> Sequence[Gpu]:
    """Those of GPUS; of all sizes if a name has none (A100). All if none are named. ValueError for others."""
    found: list[Gpu] = []
    for name in names:
        these = [gpu for gpu in GPUS if name.upper() in (gpu.name.upper(), gpu.name.partition("-")[0])]
        if not these:
            raise ValueError(f"--gpu {name}: expected one of {', '.join(gpu.name for gpu in GPUS)}")
        found += these
    return found or GPUS


@dataclass(frozen=True, slots=True)
class Fit:
    """A model on `ranks` GPUs of a kind, with pages of a dtype. Bytes are those of each GPU."""

    gpu: str
    ranks: int
    kv_cache_dtype: str
    is_default: bool
    """Whether `--kv-cache-dtype auto` is this dtype there."""
    weight_bytes: int
    reserved_bytes: int
    token_bytes: int
    state_bytes: int
    cache_bytes: int
    """What is left for states and pages; negative if the weights do not fit."""
    states: int
    tokens: int
    agents: int
    """How many contexts of the length that was asked for fit at once, if they share nothing."""
    host_tokens: int
    """Tokens that 1 GiB of host memory holds, of all ranks together."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What `radixrt plan` says. Sizes without a GPU are those of the whole model on one."""

    model: str
    model_type: str
    dtype: str
    layers: int
    attention: str
    max_model_len: int
    context: int
    disk_bytes: int
    weight_bytes: int
    token_bytes: dict[str, int]
    """By dtype of the pages."""
    state_bytes: int
    """Of the recurrent states of a sequence, and of each cached context."""
    gpu_memory_utilization: float
    fits: tuple[Fit, ...]
    too_small: dict[str, str]
    """GPUs on which no size that was asked for fits, and why."""

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def find_capacity(
    config: WorkerConfig, context: int = 0, gpus: Sequence[Gpu] = GPUS, sizes: Sequence[int] = ()
) -> Capacity:
    """What a resolved and checked `config` takes, for agents of `context` tokens each (0: 32,768, or the model's limit)
    on each of `gpus`, of which `sizes` are used together; (): the two smallest of SIZES that hold an agent. ValueError,
    in one line, for what is not served."""
    loaded = look_up_shape(config)
    context = context or min(1 << 15, loaded.whole.max_model_len)
    if context > loaded.whole.max_model_len:
        raise ValueError(f"--context {context}: the model serves up to {loaded.whole.max_model_len} tokens")
    scale = Scale(config, loaded, context)
    kept = tuple(fit for gpu in gpus for fit in scale.holding(gpu, sizes))
    names = {fit.gpu for fit in kept}
    products = scale.products(max(gpus, key=lambda gpu: gpu.capability))
    whole = scale.weight_bytes(products, scale.packed, 1)
    token_bytes = {name: scale.token_bytes(loaded.spec, name) for name in scale.page_dtypes()}
    return Capacity(
        config.served_model_name,
        str(loaded.hf_config.get("model_type")),
        _name(loaded.dtype),
        loaded.spec.num_layers,
        attention_of(loaded.spec),
        loaded.spec.max_model_len,
        context,
        disk_bytes(loaded.folder) or whole,
        whole,
        token_bytes,
        _state_bytes(loaded.spec, loaded.dtype),
        config.gpu_memory_utilization,
        kept,
        {gpu.name: scale.too_small(gpu, sizes or SIZES) for gpu in gpus if gpu.name not in names},
    )


def look_up_shape(config: WorkerConfig) -> Loaded:
    """As `look_up` of a worker with a GPU, without one, and without weights."""
    pages = "bfloat16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    return look_up(
        dataclasses.replace(config, device="cuda:0", kv_cache_dtype=pages, load_format="dummy", tensor_parallel_size=1)
    )


class Scale:
    """Weighs a checkpoint: a place in memory for each of its parts, on each kind of GPU."""

    def __init__(self, config: WorkerConfig, loaded: Loaded, context: int) -> None:
        self._config = config
        self._loaded = loaded
        self._context = context
        self._stored = stored_tensors(loaded.folder)
        self.packed = may_stay_packed(config.quantization, loaded)
        self.weight_bytes: Callable[[Products, bool, int], int] = cache(self._weight_bytes)

    def products(self, gpu: Gpu) -> Products:
        chosen = products_on(gpu.capability, self._config.quantization, self._loaded, self._config.deterministic)
        none = chosen is Products.STORED and "FP8" not in stored_as(self._loaded.hf_config)
        return Products.NONE if none else chosen  # which makes the same weights

    def page_dtypes(self) -> list[str]:
        """That which was asked for, or the model's dtype and FP8."""
        asked = {"fp8": "fp8_e4m3"}.get(self._config.kv_cache_dtype, self._config.kv_cache_dtype)
        return [_name(self._loaded.dtype), "fp8_e4m3"] if asked == "auto" else [asked]

    def token_bytes(self, spec: ModelSpec, pages: str) -> int:
        return spec.token_bytes(DTYPES[pages].itemsize, self._loaded.dtype.itemsize)

    def holding(self, gpu: Gpu, sizes: Sequence[int]) -> Iterator[Fit]:
        """Those of `fits` that hold an agent."""
        found = 0
        for size in sizes or SIZES:
            fits = [fit for fit in self.fits(gpu, size) if fit.agents]
            yield from fits
            found += bool(fits)
            if not sizes and found == 2:
                return

    def fits(self, gpu: Gpu, ranks: int) -> Iterator[Fit]:
        """One for each dtype of pages that the GPU has kernels for; none if weights are not divided so."""
        if self._refusal(gpu, ranks):
            return
        spec, products = Shard(0, ranks).spec(self._loaded.whole), self.products(gpu)
        least = self.weight_bytes(products, self.packed, 1) // ranks
        weights = least if least > gpu.memory else self.weight_bytes(products, self.packed, ranks)
        auto = "fp8_e4m3" if gpu.capability >= (9, 0) and self._loaded.dtype.itemsize == 2 else self.page_dtypes()[0]
        for pages in self.page_dtypes():
            if gpu.capability >= capability_for(DTYPES[pages]):
                yield self._fit(gpu, ranks, spec, weights, pages, pages == auto)

    def _fit(self, gpu: Gpu, ranks: int, spec: ModelSpec, weights: int, pages: str, is_default: bool) -> Fit:
        config, itemsize = self._config, self._loaded.dtype.itemsize
        token, state = self.token_bytes(spec, pages), _state_bytes(spec, self._loaded.dtype)
        reserved = reserved_bytes(config, spec, itemsize)
        memory = cache_bytes(gpu.memory - weights, gpu.memory, config.gpu_memory_utilization, reserved)
        states, tokens = divide(max(0, memory), token, state, STATES * config.max_num_seqs)
        agents = tokens // self._context
        if state:
            agents = min(agents, states - states // 3)  # as many as run at once
        host = (1 << 30) // ranks // token
        return Fit(
            gpu.name, ranks, pages, is_default, weights, reserved, token, state, memory, states, tokens, agents, host
        )

    def too_small(self, gpu: Gpu, sizes: Sequence[int]) -> str:
        """Why nothing fits there, in a few words."""
        found = [fit for size in sizes for fit in self.fits(gpu, size)]
        if not found:
            return self._refusal(gpu, sizes[0]) or f"there are no kernels for {' and '.join(self.page_dtypes())} pages"
        most = max(found, key=lambda fit: fit.cache_bytes)
        if most.cache_bytes <= 0:
            return f"weights of {most.weight_bytes / (1 << 30):.1f} GiB on each of {most.ranks} leave no memory"
        return f"{most.ranks} of them hold {most.tokens} tokens"

    def _refusal(self, gpu: Gpu, ranks: int) -> str:
        """Why the model is not served by so many of these GPUs; "" if it is."""
        if self._loaded.by_transformers and ranks > 1:
            return "transformers computes the model, on one GPU (see --model-impl)"
        try:
            Shard(0, ranks).spec(self._loaded.whole)
            self.products(gpu)
        except ValueError as error:
            return str(error)
        return ""

    def _weight_bytes(self, products: Products, packed: bool, ranks: int) -> int:
        return weight_bytes(self._loaded, products, packed, Shard(0, ranks), self._stored)


# ---------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank's place in a group that does nothing: all that loading asks of one."""

    shard: Shard


def weight_bytes(
    loaded: Loaded, products: Products, packed: bool, shard: Shard, stored: Mapping[str, Stored] | None = None
) -> int:
    """Bytes of a rank's weights once they are loaded, of a model that is made without memory. `stored`: the tensors of
    the checkpoint, if it is there."""
    if loaded.by_transformers:
        return transformers_model.weight_bytes(loaded.folder, loaded.dtype)
    weights = Outlines(loaded.dtype, products, packed, quantization_of(loaded.hf_config), stored or {})
    group = cast(Group, _Place(shard)) if shard.size > 1 else None

    def of(spec: ModelSpec) -> int:
        with torch.inference_mode():
            return tensor_bytes(Decoder(spec, weights, group=group))

    experts = loaded.whole.experts
    if experts is None or experts.count <= MORE_EXPERTS:
        return of(loaded.whole)
    few, more = (
        of(dataclasses.replace(loaded.whole, experts=dataclasses.replace(experts, count=count)))
        for count in (FEW_EXPERTS, MORE_EXPERTS)
    )
    return few + (more - few) * (experts.count - FEW_EXPERTS) // (MORE_EXPERTS - FEW_EXPERTS)


def tensor_bytes(model: object) -> int:
    """Bytes of all tensors that an object of this package holds; what several share counts once."""
    storages = (tensor.untyped_storage() for tensor in _tensors(model, set()))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        for part in _parts(value):
            yield from _tensors(part, seen)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if not type(value).__module__.startswith("radixrt."):
        return []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [getattr(value, name, None) for name in (*getattr(value, "__dict__", ()), *slots)]


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """What the checkpoint's files hold; {} if weights are not here, or in a GGUF file, which is dequantized."""
    return read_headers(folder) if any(folder.glob("*.safetensors")) else {}


def disk_bytes(folder: Path) -> int:
    """Bytes of the weights' files, by their index where only that is here; 0: unknown."""
    if (folder / GGUF).is_file():
        return sum(path.stat().st_size for path in shards((folder / GGUF).resolve()))
    if any(folder.glob("*.safetensors")):
        return sum(path.stat().st_size for path in weight_files(folder))
    total = (read_file(folder / INDEX).get("metadata") or {}).get("total_size")
    return int(total) if isinstance(total, (int, float)) else 0


# ---------------------------------------------------------------- a step


def reserved_bytes(config: WorkerConfig, spec: ModelSpec, itemsize: int) -> int:
    """About what CUDA and the largest step of a rank take, beside weights, states and pages (see
    `cuda_runner.step_bytes`, which measures it)."""
    tokens, rows = config.max_num_batched_tokens, row_bytes(config.max_num_seqs, spec.vocab_size)
    queries = spec.num_heads * spec.head_dim
    inner = spec.intermediate_size
    if spec.experts is not None:
        inner = max(inner, spec.experts.top_k * (spec.experts.intermediate_size + spec.hidden_size // 3))
    step = tokens * itemsize * (6 * spec.hidden_size + 8 * queries + 3 * inner)
    logits = 3 * SCORED_TOKENS * spec.vocab_size * 4 + 6 * rows
    has_host = config.kv_offloading_size != "none" or bool(config.kv_disk_path)
    staging = STAGING_BYTES if has_host else 0
    return CUDA_BYTES + GATHERED_BYTES + step + logits + staging + (0 if config.enforce_eager else GRAPH_BYTES)


# ---------------------------------------------------------------- words


def attention_of(spec: ModelSpec) -> str:
    """What a token's KV consists of, in a few words."""
    count, kinds = len(spec.attention_layers), []
    if spec.latent is not None:
        kinds.append(f"latent attention (MLA) of {spec.latent.rank} + {spec.latent.rope_dim} elements")
    elif spec.layers:
        kinds.append(f"attention of {count} layers with different heads")
    else:
        kinds.append(f"{spec.num_kv_heads} KV heads of {spec.head_dim} elements (GQA)")
    if spec.index is not None:
        kinds.append(f"index keys of {spec.index.dim} elements (sparse attention)")
    if windows := [window for window in spec.attention_windows if window]:
        kinds.append(f"windows of {min(windows)} tokens in {len(windows)} of {count} layers, which keep all tokens")
    if spec.recurrent is not None:
        kinds.append(f"recurrent states in {len(spec.recurrent.layers)} layers")
    return ", ".join(kinds)


def _state_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    return 0 if spec.recurrent is None else spec.recurrent.state_bytes(dtype.itemsize)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
