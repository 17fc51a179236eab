"""The pools of KV pages, on the device and in host memory, and of recurrent states: how large they are by default, and
their creation."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from radixrt.config import WorkerConfig
from radixrt.worker.execution.host_pool import HostPool, host_bytes, plain_memory
from radixrt.worker.execution.kv_pool import IndexPool, KVPool, StatePool
from radixrt.worker.execution.memory import available_bytes
from radixrt.worker.execution.mixed_pool import MixedKVPool
from radixrt.worker.execution.pool_sizes import STATES, cache_bytes, num_states
from radixrt.worker.load.options import Loaded
from radixrt.worker.model.parallel.sharding import Shard
from radixrt.worker.parallel.group import TorchGroup

log = logging.getLogger("radixrt.loading")

CPU_MEMORY_SHARE = 0.25
"""Share of the available memory that KV pages take on a CPU, unless `max_total_tokens` sets their number."""
CPU_MAX_TOKENS = 1 << 18
"""Upper limit of the token slots chosen that way."""


STAGING_SHARE = 0.125
"""See `staging_bytes`."""


def make_pool(loaded: Loaded, pages: int, page_size: int) -> KVPool:
    spec, slots, index = loaded.spec, pages * page_size, None
    if spec.layers:
        layers = [spec.layers[number] for number in spec.attention_layers]
        return MixedKVPool(layers, spec.kv_sources, slots, loaded.kv_dtype, loaded.device)
    if spec.index is not None:
        index = IndexPool(len(spec.index.layers), slots, spec.index.dim, loaded.dtype, loaded.device)
    return KVPool(
        len(spec.attention_layers), slots, spec.num_kv_heads, spec.head_dim, loaded.kv_dtype, loaded.device,
        None if spec.latent is None else spec.latent.rank, index,
    )  # fmt: skip


def make_states(
    config: WorkerConfig, loaded: Loaded, reserved: int = 0, group: TorchGroup | None = None
) -> StatePool | None:
    """The pool of recurrent states; None if the model has none. It has as many slots on all ranks.

    Its size is `max_mamba_cache_size` states, and by default `num_states` of the memory for the cache (see
    `pool_tokens`, also for `reserved`).
    """
    if loaded.spec.recurrent is None:
        return None
    count = config.max_mamba_cache_size
    if not count:
        each = loaded.spec.recurrent.state_bytes(loaded.dtype.itemsize)
        memory = _cache_bytes(loaded, config.gpu_memory_utilization, reserved, group)
        count = max(1, num_states(memory, each, STATES * config.max_num_seqs))
        count = count if group is None else group.smallest(count)
    return StatePool(loaded.spec.recurrent, count + 1, loaded.dtype, loaded.device)


def pool_tokens(loaded: Loaded, gpu_share: float, reserved: int = 0, group: TorchGroup | None = None) -> int:
    """The number of token slots that fit into the memory left beside the weights; the same on all ranks.

    On a GPU as many as fit when `gpu_share` of its memory is used in total, less `reserved` bytes; on a CPU as many as
    fit in CPU_MEMORY_SHARE of the available memory, at most CPU_MAX_TOKENS. Warns if contexts of the model could be
    longer. Raises ValueError if not even one fits.
    """
    tokens = _cache_bytes(loaded, gpu_share, reserved, group) // loaded.token_bytes
    if loaded.device.type == "cpu":
        tokens = min(tokens, CPU_MAX_TOKENS)
    if group is not None:
        tokens = group.smallest(tokens)
    if tokens < 1:
        free = _free_bytes(loaded.device)
        raise ValueError(
            f"no memory is left for KV pages: {free / 1e9:.1f} GB free, {reserved / 1e9:.1f} GB needed by a step; see "
            "--gpu-memory-utilization and --max-num-batched-tokens"
        )
    if tokens < loaded.spec.max_model_len:
        free = _free_bytes(loaded.device)
        log.warning(
            "contexts are limited to %d tokens, not the model's %d: of %.1f GB available, %.1f GB are for pages; see "
            "--max-total-tokens", tokens, loaded.spec.max_model_len, free / 1e9, tokens * loaded.token_bytes / 1e9,
        )  # fmt: skip
    return tokens


def begin_host(
    config: WorkerConfig, loaded: Loaded, group: TorchGroup | None, by_torch: bool
) -> Callable[[KVPool, StatePool | None], HostPool | None]:
    """Begin to allocate host memory for evicted pages and for recurrent states, as `kv_offloading_size` asks. The
    returned function waits for it and makes its pool, which is None if there is none, and if everything is computed by
    torch on a GPU. Both raise ValueError if memory that was asked for cannot be had. With "auto" a rank that cannot
    have it is a warning: then no rank has any."""
    shard = Shard() if group is None else group.shard
    size = host_bytes(config, loaded.device, shard)
    if not size and config.kv_disk_path:
        size = staging_bytes(config, loaded, shard)
    if not size or by_torch:
        return lambda pool, states: None
    automatic, most = config.kv_offloading_size == "auto", STATES * config.max_num_seqs

    def usable(host: HostPool) -> HostPool | None:
        if host.is_usable:
            return host
        if not automatic:
            held = "two pages" if not host.num_states else "two pages and a recurrent state"
            raise ValueError(f"kv_offloading_size: {size} bytes do not hold {held}")
        return None

    if loaded.device.type == "cpu":
        return lambda pool, states: usable(HostPool(pool, config.page_size, plain_memory(size), group, states, most))
    from radixrt.worker.cuda.host.host_pool import CudaHostPool
    from radixrt.worker.cuda.host.pinned import PinnedMemory

    memory = PinnedMemory(size, loaded.device)

    def finish(pool: KVPool, states: StatePool | None) -> HostPool | None:
        try:
            memory.wait()
        except ValueError as error:
            if not automatic:
                raise ValueError(f"kv_offloading_size: {error}") from error
            log.warning("evicted pages are lost: %s", error)
            memory.do_without()
        return usable(CudaHostPool(pool, config.page_size, memory, group, states, most))

    return finish


def staging_bytes(config: WorkerConfig, loaded: Loaded, shard: Shard) -> int:
    """Bytes of host memory through which pages go to disk and come back, where there is none for evicted ones: those
    of the longest context, at most STAGING_SHARE of the available memory of all ranks together."""
    longest = min(config.max_model_len or loaded.spec.max_model_len, config.max_total_tokens or CPU_MAX_TOKENS)
    size = (longest + 2 * config.page_size) * loaded.token_bytes
    if loaded.spec.recurrent is not None:
        size += max(size, 4 * loaded.spec.recurrent.state_bytes(loaded.dtype.itemsize))
    available = available_bytes()
    return size if available is None else min(size, int(STAGING_SHARE * available) // shard.size)


def _cache_bytes(loaded: Loaded, gpu_share: float, reserved: int, group: TorchGroup | None = None) -> int:
    """The memory for KV pages and recurrent states in bytes (see `pool_tokens`); negative if there is none."""
    free = _free_bytes(loaded.device)
    if loaded.device.type == "cuda":
        return cache_bytes(free, torch.cuda.mem_get_info(loaded.device)[1], gpu_share, reserved)
    return int(CPU_MEMORY_SHARE * free / (group.shard.size if group else 1)) - reserved


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()
