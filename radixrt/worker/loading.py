"""Builds a Runner from a configuration: settings left on `auto` are decided by the checkpoint and the device."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from radixrt.checkpoint_files import check_model
from radixrt.config import WorkerConfig
from radixrt.lora_modules import lora_modules, most_loaded, num_slots
from radixrt.worker.group import TorchGroup, join, leave
from radixrt.worker.kv import DTYPES
from radixrt.worker.model import checkpoint, int4, read_spec
from radixrt.worker.model.adapter import Adapter, read_adapters
from radixrt.worker.model.blocks import named
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.lora_slots import Room
from radixrt.worker.model.predictor import has_predictor, is_stored, with_predictor
from radixrt.worker.model.quantized import (
    Products,
    block_size,
    has_int4,
    is_expanded,
    quantization_of,
    rounds_activations,
    stored_as,
)
from radixrt.worker.model.random_weights import RandomWeights
from radixrt.worker.model.sharding import Shard
from radixrt.worker.model.spec import ModelSpec
from radixrt.worker.plan import Runner
from radixrt.worker.pools import begin_host, make_pool, make_states, pool_tokens
from radixrt.worker.ranks import Followers, Leader
from radixrt.worker.runner import ModelRunner, TorchRunner
from radixrt.worker.scales import SOURCES, Scales, choose_scales

log = logging.getLogger("radixrt.loading")

BACKENDS = ("auto", "flashinfer", "triton", "torch")
QUANTIZATIONS = ("auto", "fp8", "none")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint to run: its configuration and what was chosen for it, without the weights."""

    folder: Path
    hf_config: dict[str, Any]
    whole: ModelSpec
    """The whole model."""
    spec: ModelSpec
    """The part of it that this rank runs; equals `whole` if there is only one rank."""
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    eos_ids: frozenset[int]

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in pages, all layers."""
        return self.spec.kv_elements * self.kv_dtype.itemsize + self.spec.index_elements * self.dtype.itemsize


def load_runner(config: WorkerConfig) -> Runner:
    """Loads the model of a resolved `config` onto its device, or onto one device per rank.

    Raises ValueError, which names the wrong setting or file.
    """
    _check(config)
    if config.tensor_parallel_size > 1:
        return _lead(config)
    return _load(config, look_up(config), None)


def load_rank(config: WorkerConfig, rank: int, folder: str) -> ModelRunner:
    """The runner of `rank`, 1 or more, which follows rank 0 (see `ranks`). `folder`: where the ranks meet."""
    shard = Shard(rank, config.tensor_parallel_size)
    config = dataclasses.replace(config, device=rank_device(config.device, rank))
    loaded = look_up(config, shard)
    return _load(config, loaded, _join(config, loaded, Path(folder), shard))


def _lead(config: WorkerConfig) -> Runner:
    """The runner of rank 0, after the processes of the other ranks were started."""
    shard = Shard(0, config.tensor_parallel_size)
    config = dataclasses.replace(config, device=rank_device(config.device, 0))
    loaded = look_up(config, shard)
    if loaded.device.type == "cuda" and (have := torch.cuda.device_count()) < loaded.device.index + shard.size:
        raise ValueError(
            f"tensor_parallel_size: {shard.size} ranks from {loaded.device} on need more than the {have} GPUs that are "
            "to be seen"
        )
    if distributed.is_initialized():
        raise ValueError(
            "tensor_parallel_size: this process has a group of ranks already; further workers must be processes of "
            "their own, as those of radixrt serve are"
        )
    followers = Followers(config)
    try:
        group = _join(config, loaded, followers.folder, shard)
        return Leader(_load(config, loaded, group), followers)
    except BaseException:
        followers.dismiss()
        leave()
        followers.close()
        raise


def _join(config: WorkerConfig, loaded: Loaded, folder: Path, shard: Shard) -> TorchGroup:
    """Joins the group of ranks. On GPUs that run the kernels, ranks can access each other's memory."""
    on_gpu, exact = loaded.device.type == "cuda", is_exact(config, loaded)
    if on_gpu:
        torch.cuda.set_device(loaded.device)
    join(folder, shard, loaded.device)
    if not on_gpu or config.attention_backend == "torch" or _no_kernels(loaded):
        return TorchGroup(shard, loaded.device, exact)
    from radixrt.worker.cuda.group import PeerGroup

    group = PeerGroup(shard, loaded.device, exact)
    group.meet(loaded.spec.hidden_size, config.max_num_batched_tokens, loaded.dtype)
    return group


def is_exact(config: WorkerConfig, loaded: Loaded) -> bool:
    """Whether results must not depend on the batch.

    On a CPU with FP8 pages this is always so: otherwise results with and without a cached prefix would differ.
    """
    return config.deterministic or (loaded.device.type == "cpu" and loaded.kv_dtype.itemsize == 1)


def rank_device(device: str, rank: int) -> str:
    """The device of `rank`: consecutive GPUs, beginning with the worker's own `device`; on a CPU the same for all."""
    kind, _, index = device.partition(":")
    return f"{kind}:{int(index or 0) + rank}" if kind == "cuda" else device


def _check(config: WorkerConfig) -> None:
    if config.attention_backend not in BACKENDS:
        raise ValueError(f"attention_backend {config.attention_backend!r}: expected one of {', '.join(BACKENDS)}")
    if config.kv_scales not in SOURCES:
        raise ValueError(f"kv_scales {config.kv_scales!r}: expected one of {', '.join(SOURCES)}")
    if config.tree_attention not in ("auto", "on", "off"):
        raise ValueError(f"tree_attention {config.tree_attention!r}: expected auto, on or off")
    if config.tensor_parallel_size < 1:
        raise ValueError(f"tensor_parallel_size {config.tensor_parallel_size}: expected 1 or more")


def _load(config: WorkerConfig, loaded: Loaded, group: TorchGroup | None) -> ModelRunner:
    if config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)
    elif group is not None and loaded.device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // group.shard.size))
    began = time.monotonic()
    by_torch = loaded.device.type == "cuda" and (config.attention_backend == "torch" or bool(_no_kernels(loaded)))
    host = begin_host(config, loaded, group, by_torch)
    try:
        runner = make_runner(config, loaded, group)
        runner.host = host(runner.pool, runner.states)
    except torch.OutOfMemoryError as error:
        raise ValueError(_out_of_memory(config, loaded, error)) from error
    if runner.host is not None:
        tokens = (runner.host.slots - 1) * config.page_size
        states = f" and {runner.num_host_states - 1} recurrent states" if runner.num_host_states else ""
        log.info("%d token slots%s in host memory, %.2f GB", tokens, states, runner.host.nbytes / 1e9)
    if runner.states is not None:
        log.info("%d recurrent states, %.2f GB", runner.num_states - 1, runner.states.nbytes / 1e9)
    log.info(
        "%s: %d layers in %s; %d token slots of %s, %.2f GB; ready in %.1f s",
        loaded.folder.name, loaded.spec.num_layers, loaded.dtype, runner.num_pages * runner.page_size,
        runner.kv_dtype, runner.pool.nbytes / 1e9, time.monotonic() - began,
    )  # fmt: skip
    return runner


def look_up(config: WorkerConfig, shard: Shard = Shard()) -> Loaded:  # noqa: B008
    """Reads the configuration of the checkpoint, not its weights. Raises ValueError if it cannot be served."""
    folder = checkpoint.find(config.model)
    hf_config = checkpoint.read_json(folder / "config.json")
    if not hf_config:
        raise ValueError(f"{folder} holds no config.json: it is no checkpoint")
    check_model(folder)
    try:
        return _look_up(config, shard, folder, hf_config)
    except (TypeError, AttributeError, IndexError, ArithmeticError) as error:
        raise ValueError(f"{folder}/config.json: a value is not of the kind that is expected ({error})") from error


def _look_up(config: WorkerConfig, shard: Shard, folder: Path, hf_config: dict[str, Any]) -> Loaded:
    # Only the text part is served, so settings that stand only there apply to the model. tie_word_embeddings is not
    # taken from there: if it is missing, the default of the model's family holds.
    text = hf_config.get("text_config") or {}
    text_only = {name for name in text if hf_config.get(name) is None} - {"tie_word_embeddings"}
    hf_config |= {name: text[name] for name in text_only}
    device = torch.device(config.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    dtype = choose_dtype(config.dtype, hf_config, device)
    kv_dtype = choose_kv_dtype(config.kv_cache_dtype, dtype, device)
    spec = read_spec(hf_config, config.max_model_len)
    if predicts(config, hf_config, folder, device):
        spec = with_predictor(spec, hf_config)
    for note in notes(hf_config, spec):
        log.warning("%s: %s", folder.name, note)
    # A tokenizer may have ids for which the model has no logits.
    eos_ids = frozenset(id for id in checkpoint.eos_ids(folder) if id < spec.vocab_size)
    return Loaded(folder, hf_config, spec, shard.spec(spec), device, dtype, kv_dtype, eos_ids)


def predicts(config: WorkerConfig, hf_config: Mapping[str, Any], folder: Path, device: torch.device) -> bool:
    """Whether the model's layer for multi-token prediction is used. Where it could be, but was not asked for, the log
    says so. Raises ValueError if it is asked for where it is not served."""
    alone = config.tensor_parallel_size == 1
    if config.speculative_algorithm == "mtp":
        if not alone:
            raise ValueError("speculative_algorithm: mtp is served with tensor_parallel_size 1 only; use ngram")
        return True
    stored = config.load_format != "dummy" and has_predictor(hf_config)
    if config.speculative_algorithm == "auto" and device.type == "cuda" and alone and stored and is_stored(folder):
        log.info("%s has a layer for multi-token prediction: --speculative-algorithm mtp drafts with it", folder.name)
    return False


def notes(hf_config: Mapping[str, Any], spec: ModelSpec) -> Iterator[str]:
    """Warnings about what in this checkpoint is served differently than its user may expect."""
    if hf_config.get("auto_map"):
        yield "it brings code of its own (auto_map), which is not run; it is served as its model_type"
    if hf_config.get("vision_config"):
        yield "images are not served, only what it makes of text is"
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    if "dynamic" in (rope.get("rope_type"), rope.get("type")):
        yield "positions of the kind 'dynamic' are served up to max_position_embeddings only"
    original = spec.rope["original_max_position_embeddings"]
    if spec.rope["rope_type"] == "longrope" and spec.max_model_len > original:
        yield f"positions are those of long contexts; --max-model-len {original} serves those of short ones"


def make_runner(config: WorkerConfig, loaded: Loaded, group: TorchGroup | None = None) -> ModelRunner:
    """The runner for the device: with kernels on a GPU, unless it cannot run them or `attention_backend` is torch."""
    on_gpu = loaded.device.type == "cuda"
    exact = is_exact(config, loaded)
    if on_gpu and config.attention_backend != "torch":
        if reason := _no_kernels(loaded):
            log.warning("%s: everything by torch, much slower", reason)
        else:
            from radixrt.worker.cuda.loading import load_cuda_runner

            return load_cuda_runner(config, loaded, group)
    model = load_model(config, loaded, exact, group=group)
    scales = load_scales(config, loaded, model)
    states = make_states(config, loaded, group=group)
    # On a CPU its memory is allocated when it is first written; on a GPU it is not free any more.
    reserved = states.nbytes if states is not None and not on_gpu else 0
    tokens = config.max_total_tokens or pool_tokens(loaded, config.gpu_memory_utilization, reserved, group)
    pool = make_pool(loaded, tokens // config.page_size + 1, config.page_size)
    pool.scales = scales
    return TorchRunner(model, pool, config.page_size, loaded.eos_ids, exact, states)


def _no_kernels(loaded: Loaded) -> str:
    """The reason why this GPU cannot run the kernels; "" if it can."""
    major, minor = torch.cuda.get_device_capability(loaded.device)
    if major < 8:
        return f"the GPU has compute capability {major}.{minor}, the kernels need 8.0"
    if loaded.kv_dtype == torch.float8_e4m3fn and (major, minor) < (8, 9):
        return f"the GPU has compute capability {major}.{minor}, kernels with e4m3 pages need 8.9"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    if loaded.spec.recurrent is not None:
        from radixrt.worker.cuda import delta_step

        if reason := delta_step.no_kernels(loaded.spec.recurrent):
            return reason
    if loaded.spec.experts is not None:
        from radixrt.worker.cuda import experts

        return experts.no_kernels(loaded.spec.experts)
    return ""


def load_model(
    config: WorkerConfig, loaded: Loaded, exact: bool = False, ops: Any = None, group: TorchGroup | None = None
) -> Decoder:
    """Loads the weights, with progress on stderr, and warns of tensors that the model does not use.

    `ops`: the kernels of a GPU, None without them.
    """
    products = choose_products(config.quantization, loaded, exact, ops is not None)
    is_follower = group is not None and group.shard.rank > 0
    packed = keeps_packed(config.quantization, loaded, ops is not None)
    weights = open_weights(config, loaded, progress=not is_follower, products=products, packed=packed)
    try:
        model = Decoder(loaded.whole, weights, exact, ops, group, read_lora(config, loaded), lora_room(config))
        expanded = is_expanded(loaded.hf_config) and products is not Products.ALL
        wide = (
            "weights" if expanded or products is Products.NONE else "experts" if model.has_unquantized_experts else ""
        )
        form = stored_as(loaded.hf_config)
        if packed and form != "MXFP4":
            if weights.multiplied_out:
                log.warning(
                    "%s: %d of its matrices in %s are multiplied out at load: they take the memory of 16 bits",
                    loaded.folder.name, weights.multiplied_out, form,
                )  # fmt: skip
        elif wide and form:
            log.warning(
                "%s: %s that are stored in %s are multiplied out at load: they take the memory of 16 bits",
                loaded.folder.name, "experts" if form == "MXFP4" else wide, form,
            )  # fmt: skip
        elif wide and products is Products.ALL:
            log.warning("%s: its experts stay in 16 bits", loaded.folder.name)
        without = _without_kv(loaded.whole)
        unused = [name for name in weights.unused() if not name.startswith(_drafting(loaded))]
        if unused := [name for name in unused if not any(part in name for part in without)]:
            log.warning("%d tensors are not used, is it the right model? %s", len(unused), ", ".join(unused[:5]))
        return model
    finally:
        weights.close()


def read_lora(config: WorkerConfig, loaded: Loaded) -> list[Adapter]:
    """The LoRA adapters of a worker. Raises ValueError if one of them, or any for this model, is not served."""
    modules = lora_modules(config)
    if (modules or most_loaded(config)) and (loaded.whole.multipliers or loaded.whole.layer_heads):
        raise ValueError(f"LoRA adapters are not served for models of type {loaded.hf_config.get('model_type')}")
    return read_adapters(modules, config.max_lora_rank)


def lora_room(config: WorkerConfig) -> Room | None:
    """Space for adapters that clients load; None if they may load none."""
    slots = num_slots(most_loaded(config))
    return Room(slots, config.max_lora_rank) if slots else None


def _drafting(loaded: Loaded) -> tuple[str, ...]:
    """Name prefixes of the layers that predict further tokens (see `model.predictor`): what is not used of them."""
    first, more = loaded.whole.num_layers, loaded.hf_config.get("num_nextn_predict_layers") or 0
    return "mtp.", "model.mtp.", *(f"model.layers.{layer}." for layer in range(first, first + more))


def _without_kv(spec: ModelSpec) -> list[str]:
    """Parts of the names of tensors of K and V in layers that read those of others: checkpoints may have some."""
    layers = [i for i, own in enumerate(spec.layers) if own.source is not None]
    return [f".layers.{i}.self_attn.{name}" for i in layers for name in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")]


def load_scales(config: WorkerConfig, loaded: Loaded, model: Decoder) -> Scales:
    """The scales of each layer for `KVPool.scales`; all 1 if the pages are not FP8."""
    if loaded.kv_dtype.itemsize > 1:
        return [(1.0, 1.0)] * len(loaded.spec.attention_layers)
    weights = open_weights(config, loaded, progress=False)
    try:
        bos_id = loaded.hf_config.get("bos_token_id")
        return choose_scales(config.kv_scales, named(weights, loaded.spec), model, loaded.kv_dtype, bos_id)
    finally:
        weights.close()


def _out_of_memory(config: WorkerConfig, loaded: Loaded, error: Exception) -> str:
    free, total = torch.cuda.mem_get_info(loaded.device)
    return (
        f"the GPU's memory does not hold this: {total / 1e9:.1f} GB in all, {free / 1e9:.1f} GB free now, a token of "
        f"KV takes {loaded.token_bytes} bytes, a step has up to {config.max_num_batched_tokens} tokens. Lower "
        f"--gpu-memory-utilization ({config.gpu_memory_utilization}), --max-total-tokens, "
        f"{'--max-mamba-cache-size ' if loaded.spec.recurrent else ''}or --max-num-batched-tokens. ({error})"
    )


# ---------------------------------------------------------------- choices


def choose_dtype(name: str, hf_config: dict[str, Any], device: torch.device) -> torch.dtype:
    """The dtype of `name`. `auto`: float32 on a CPU; on a GPU float16 if the checkpoint states it, else bfloat16.

    Raises ValueError for an unknown name.
    """
    if name == "auto":
        stated = str(hf_config.get("dtype") or hf_config.get("torch_dtype")).removeprefix("torch.")
        name = "float32" if device.type == "cpu" else stated if stated == "float16" else "bfloat16"
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype {name!r}: expected auto, float32, bfloat16 or float16")
    return DTYPES[name]


def choose_kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of KV pages. `auto`: e4m3 on Hopper and newer if activations (`dtype`) have 16 bits, else `dtype`.

    Raises ValueError for an unknown name.
    """
    name = {"fp8": "fp8_e4m3"}.get(name, name)
    if name == "auto":
        new = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        return torch.float8_e4m3fn if new and dtype.itemsize == 2 else dtype
    if name not in DTYPES:
        raise ValueError(f"kv_cache_dtype {name!r}: expected auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]


def choose_products(name: str, loaded: Loaded, exact: bool, kernels: bool) -> Products:
    """Which matrix products are computed in FP8.

    `auto`: those of weights that the checkpoint stores in FP8 for this purpose, if there are `kernels` and the GPU can
    multiply FP8. Raises ValueError for an unknown name, or if `fp8` is not possible.
    """
    if name not in QUANTIZATIONS:
        raise ValueError(f"quantization {name!r}: expected one of {', '.join(QUANTIZATIONS)}")
    missing = ""
    if not kernels or loaded.device.type != "cuda":
        missing = "a GPU and its kernels"
    elif torch.cuda.get_device_capability(loaded.device) < (8, 9):
        missing = "compute capability 8.9"
    elif loaded.dtype != torch.bfloat16:
        missing = "dtype bfloat16"
    elif exact:
        missing = "results that may depend on the batch, so not --deterministic"
    if name == "fp8" and missing:
        raise ValueError(f"quantization fp8 needs {missing}")
    if name == "none" or missing:
        return Products.NONE
    if name == "fp8":
        return Products.ALL
    return Products.STORED if rounds_activations(loaded.hf_config) else Products.NONE


def keeps_packed(name: str, loaded: Loaded, kernels: bool) -> bool:
    """Whether weights that are stored in MXFP4 (of experts) or INT4 are kept so: if the GPU's `kernels` are used, in
    bfloat16 (INT4: or float16), and the option quantization is not none (INT4: nor fp8)."""
    form = stored_as(loaded.hf_config)
    if name == "none" or not kernels or loaded.device.type != "cuda":
        return False
    from radixrt.worker.cuda import int4 as products
    from radixrt.worker.cuda import packed_experts

    if form == "MXFP4" and loaded.dtype == torch.bfloat16:
        return packed_experts.there(loaded.device)
    if has_int4(loaded.hf_config) and name != "fp8" and loaded.dtype in int4.DTYPES:
        if loaded.spec.experts is not None and not packed_experts.there(loaded.device, loaded.dtype):
            return False
        return products.there(loaded.device, loaded.dtype)
    return False


def open_weights(
    config: WorkerConfig,
    loaded: Loaded,
    progress: bool = True,
    products: Products = Products.NONE,
    packed: bool = False,
) -> checkpoint.SafetensorsWeights | RandomWeights:
    """The weights in the configured `load_format`. Raises ValueError for an unknown one."""
    quantization = quantization_of(loaded.hf_config)
    match config.load_format:
        case "auto" | "safetensors":
            block = block_size(loaded.hf_config)
            return checkpoint.SafetensorsWeights(
                loaded.folder, loaded.dtype, loaded.device, progress, block, products, packed, quantization
            )
        case "dummy":
            return RandomWeights(config.seed, loaded.dtype, loaded.device, products, packed, quantization)
    raise ValueError(f"load_format {config.load_format!r}: expected auto, safetensors or dummy")
