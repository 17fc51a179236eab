"""Builds a Runner from a configuration: joins its ranks, loads the weights, and makes the pools of pages and states."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from radixrt.checkpoint.gguf.folder import WEIGHTS as GGUF
from radixrt.checkpoint.lora_modules import lora_modules, most_loaded, num_slots
from radixrt.config import WorkerConfig, check
from radixrt.worker.execution.torch_runner import ModelRunner, TorchRunner
from radixrt.worker.load.disk import open_disk
from radixrt.worker.load.kv_scales import Scales, choose_scales
from radixrt.worker.load.memory import check_memory
from radixrt.worker.load.options import (
    Loaded,
    choose_products,
    is_exact,
    keeps_packed,
    look_up,
    no_kernels,
    shown,
    uses_kernels,
)
from radixrt.worker.load.pools import begin_host, make_pool, make_states, pool_tokens
from radixrt.worker.model import transformers_model
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.layers.hybrid_layers import named
from radixrt.worker.model.lora.adapter import Adapter, read_adapters
from radixrt.worker.model.lora.lora_slots import Room
from radixrt.worker.model.model import Model
from radixrt.worker.model.parallel.sharding import Shard
from radixrt.worker.model.spec.spec import ModelSpec
from radixrt.worker.model.weights.checkpoint import SafetensorsWeights
from radixrt.worker.model.weights.gguf import GgufWeights
from radixrt.worker.model.weights.quantized import Products, block_size, is_expanded, quantization_of, stored_as
from radixrt.worker.model.weights.random_weights import RandomWeights
from radixrt.worker.model.weights.weight_loader import loader_of
from radixrt.worker.parallel.group import TorchGroup, join, leave
from radixrt.worker.parallel.tensor_parallel import Followers, Leader
from radixrt.worker.plan import Runner

log = logging.getLogger("radixrt.loading")

Weights = SafetensorsWeights | GgufWeights | RandomWeights


def load_runner(config: WorkerConfig) -> Runner:
    """Loads the model of a resolved `config` onto its device, or onto one device per rank.

    Raises ValueError, which names the wrong setting or file.
    """
    check(config)
    if config.tensor_parallel_size > 1:
        return _lead(config)
    return _load(config, look_up(config), None)


def load_rank(config: WorkerConfig, rank: int, folder: str) -> ModelRunner:
    """The runner of `rank`, 1 or more, which follows rank 0 (see `tensor_parallel`). `folder`: where the ranks meet."""
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
    exact = is_exact(config, loaded)
    if loaded.device.type == "cuda":
        torch.cuda.set_device(loaded.device)
    join(folder, shard, loaded.device)
    if not uses_kernels(config, loaded):
        return TorchGroup(shard, loaded.device, exact)
    from radixrt.worker.cuda.comm.group import CustomAllReduceGroup

    group = CustomAllReduceGroup(shard, loaded.device, exact)
    group.meet(loaded.spec.hidden_size, config.max_num_batched_tokens, loaded.dtype)
    return group


def rank_device(device: str, rank: int) -> str:
    """The device of `rank`: consecutive GPUs, beginning with the worker's own `device`; on a CPU the same for all."""
    kind, _, index = device.partition(":")
    return f"{kind}:{int(index or 0) + rank}" if kind == "cuda" else device


def _load(config: WorkerConfig, loaded: Loaded, group: TorchGroup | None) -> ModelRunner:
    if config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)
    elif group is not None and loaded.device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // group.shard.size))
    check_memory(config, loaded)
    began = time.monotonic()
    by_torch = loaded.device.type == "cuda" and not uses_kernels(config, loaded)
    host = begin_host(config, loaded, group, by_torch)
    try:
        runner = make_runner(config, loaded, group)
        runner.host = host(runner.pool, runner.states)
        runner.disk = open_disk(config, loaded, runner, Shard() if group is None else group.shard)
    except torch.OutOfMemoryError as error:
        raise ValueError(_out_of_memory(config, loaded, error)) from error
    except (MemoryError, RuntimeError, subprocess.CalledProcessError) as error:
        if reason := _missing(error):
            raise ValueError(reason) from error
        raise
    if runner.host is not None:
        tokens = (runner.host.slots - 1) * config.page_size
        states = f" and {runner.num_host_states - 1} recurrent states" if runner.num_host_states else ""
        log.info("%d token slots%s in host memory, %.2f GB", tokens, states, runner.host.nbytes / 1e9)
    if runner.states is not None:
        log.info("%d recurrent states, %.2f GB", runner.num_states - 1, runner.states.nbytes / 1e9)
    log.info(
        "%s: %d layers in %s; %d token slots of %s, %.2f GB; ready in %.1f s",
        shown(config, loaded.folder), loaded.spec.num_layers, loaded.dtype, runner.num_pages * runner.page_size,
        runner.kv_dtype, runner.pool.nbytes / 1e9, time.monotonic() - began,
    )  # fmt: skip
    return runner


def make_runner(config: WorkerConfig, loaded: Loaded, group: TorchGroup | None = None) -> ModelRunner:
    """The runner for the device: with kernels on a GPU, unless it cannot run them or `attention_backend` is torch."""
    if uses_kernels(config, loaded):
        from radixrt.worker.cuda import ops
        from radixrt.worker.load.cuda_runner import begin_builds, make_cuda_runner

        torch.cuda.set_device(loaded.device)
        builds = begin_builds(config, loaded)
        model = load_model(config, loaded, config.deterministic, ops=ops, group=group)
        return make_cuda_runner(config, loaded, model, load_scales(config, loaded, model), builds, group)
    on_gpu = loaded.device.type == "cuda"
    if on_gpu and config.attention_backend != "torch":
        log.warning("%s: everything by torch, much slower", no_kernels(loaded))
    exact = is_exact(config, loaded)
    model = load_model(config, loaded, exact, group=group)
    scales = load_scales(config, loaded, model)
    states = make_states(config, loaded, group=group)
    # On a CPU its memory is allocated when it is first written; on a GPU it is not free any more.
    reserved = states.nbytes if states is not None and not on_gpu else 0
    tokens = config.max_total_tokens or pool_tokens(loaded, config.gpu_memory_utilization, reserved, group)
    pool = make_pool(loaded, tokens // config.page_size + 1, config.page_size)
    pool.scales = scales
    leads = group is None or group.shard.rank == 0
    return TorchRunner(model, pool, config.page_size, loaded.eos_ids, exact, states, leads)


def load_model(
    config: WorkerConfig, loaded: Loaded, exact: bool = False, ops: Any = None, group: TorchGroup | None = None
) -> Model:
    """Loads the weights, with progress on stderr, and warns of tensors that the model does not use.

    `ops`: the kernels of a GPU, None without them.
    """
    if loaded.by_transformers:
        seed = config.seed if config.load_format == "dummy" else None
        return transformers_model.load(loaded.folder, loaded.spec, loaded.dtype, loaded.device, seed)
    products = choose_products(config.quantization, loaded, exact, ops is not None)
    is_follower = group is not None and group.shard.rank > 0
    packed = keeps_packed(config.quantization, loaded, ops is not None)
    weights = open_weights(config, loaded, progress=not is_follower, products=products, packed=packed)
    try:
        model = Decoder(loaded.whole, weights, exact, ops, group, read_lora(config, loaded), lora_room(config))
        if wide := _kept_wide(loaded, model, weights, products, packed):
            log.warning("%s: %s", shown(config, loaded.folder), wide)
        without = _without_kv(loaded.whole)
        unused = [name for name in weights.unused() if not name.startswith(_drafting(loaded))]
        if unused := [name for name in unused if not any(part in name for part in without)]:
            log.warning("%d tensors are not used, is it the right model? %s", len(unused), ", ".join(unused[:5]))
        return model
    finally:
        weights.close()


def _kept_wide(loaded: Loaded, model: Model, weights: Weights, products: Products, packed: bool) -> str:
    """What takes more memory than its user may expect, as it is kept in 16 bits; "" if nothing does."""
    form = stored_as(loaded.hf_config)
    memory = "are dequantized at load: they take the memory of 16 bits"
    if packed and form != "MXFP4":
        return f"{weights.num_dequantized} of its matrices in {form} {memory}" if weights.num_dequantized else ""
    if products is Products.NONE or (is_expanded(loaded.hf_config) and products is not Products.ALL):
        wide = "weights"
    elif model.has_unquantized_experts:
        wide = "experts"
    else:
        return ""
    if form:
        return f"{'experts' if form == 'MXFP4' else wide} that are stored in {form} {memory}"
    return "its experts stay in 16 bits" if products is Products.ALL else ""


def read_lora(config: WorkerConfig, loaded: Loaded) -> list[Adapter]:
    """The LoRA adapters of a worker. Raises ValueError if one of them, or any for this model, is not served."""
    modules = lora_modules(config)
    if (modules or most_loaded(config)) and not loader_of(loaded.whole).takes_adapters:
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


def load_scales(config: WorkerConfig, loaded: Loaded, model: Model) -> Scales:
    """The scales of each layer for `KVPool.scales`; all 1 if the pages are not FP8."""
    if loaded.kv_dtype.itemsize > 1:
        return [(1.0, 1.0)] * len(loaded.spec.attention_layers)
    weights = open_weights(config, loaded, progress=False)
    try:
        bos_id = loaded.hf_config.get("bos_token_id")
        return choose_scales(config.kv_scales, named(weights, loaded.spec), model, loaded.kv_dtype, bos_id)
    finally:
        weights.close()


def _missing(error: Exception) -> str:
    """What the machine lacks, by an error that has many causes; "" if it is another."""
    text = " ".join(str(error).split())[:500]
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        return f"there is not enough memory: lower --max-total-tokens, or take a smaller model ({text})"
    if isinstance(error, subprocess.CalledProcessError) or "Failed to find C compiler" in text:
        return (
            "Triton needs a C compiler and Python's headers: install gcc and python3-dev, or name a compiler in CC; "
            f"--attention-backend torch does without, much slower ({text})"
        )
    return ""


def _out_of_memory(config: WorkerConfig, loaded: Loaded, error: Exception) -> str:
    free, total = torch.cuda.mem_get_info(loaded.device)
    return (
        f"the GPU's memory does not hold this: {total / 1e9:.1f} GB in all, {free / 1e9:.1f} GB free now, a token of "
        f"KV takes {loaded.token_bytes} bytes, a step has up to {config.max_num_batched_tokens} tokens. Lower "
        f"--gpu-memory-utilization ({config.gpu_memory_utilization}), --max-total-tokens, "
        f"{'--max-mamba-cache-size ' if loaded.spec.recurrent else ''}or --max-num-batched-tokens. ({error})"
    )


def open_weights(
    config: WorkerConfig,
    loaded: Loaded,
    progress: bool = True,
    products: Products = Products.NONE,
    packed: bool = False,
) -> Weights:
    """The weights in the configured `load_format`. Raises ValueError if the checkpoint is not of it."""
    quantization = quantization_of(loaded.hf_config)
    match config.load_format:
        case "auto" | "gguf" if (loaded.folder / GGUF).is_file():
            keep = loaded.device.type == "cpu" and config.quantization != "none"
            return GgufWeights(loaded.folder / GGUF, loaded.dtype, loaded.device, progress, keep)
        case "auto" | "safetensors":
            block = block_size(loaded.hf_config)
            return SafetensorsWeights(
                loaded.folder, loaded.dtype, loaded.device, progress, block, products, packed, quantization
            )
        case "dummy":
            return RandomWeights(config.seed, loaded.dtype, loaded.device, products, packed, quantization)
    raise ValueError(f"--load-format {config.load_format}: {loaded.folder} is not of a GGUF file")
