"""Opens the store of KV blocks that a configuration asks for (`--kv-disk-path`)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from radixrt.checkpoint.identity import adapter_identity, checkpoint_identity, fingerprint
from radixrt.checkpoint.lora_modules import lora_modules
from radixrt.config import WorkerConfig
from radixrt.worker.cache.host_disk import HostDisk
from radixrt.worker.execution.torch_runner import ModelRunner
from radixrt.worker.load.options import Loaded
from radixrt.worker.load.store import open_store
from radixrt.worker.model.parallel.sharding import Shard

log = logging.getLogger("radixrt.loading")


def open_disk(config: WorkerConfig, loaded: Loaded, runner: ModelRunner, shard: Shard) -> HostDisk | None:
    """The store of a rank's blocks, whose rows are the slots of the runner's host memory; None if there is none. Raises
    ValueError, which names the setting, if it cannot be had."""
    if not config.kv_disk_path:
        if config.kv_disk_key_file:
            raise ValueError("--kv-disk-key-file needs --kv-disk-path")
        return None
    if runner.host is None:
        log.warning("--kv-disk-path: nothing is kept there, as there is no host memory for pages to pass through")
        return None
    name = fingerprint([*identity(config, loaded), layout(runner), config.tensor_parallel_size])
    store = open_store(config, name, shard.rank, shard.size)
    adapters = {(module.name, 0): adapter_identity(Path(module.path)) for module in lora_modules(config)}
    return HostDisk(store, *runner.host.rows(), runner.host.settled, adapters)


def identity(config: WorkerConfig, loaded: Loaded) -> list[Any]:
    """Of the model as it is served: all that decides what K and V of a token are."""
    return [
        config.load_format, config.seed if config.load_format == "dummy" else 0, checkpoint_identity(loaded.folder),
        loaded.whole, str(loaded.dtype), str(loaded.kv_dtype), loaded.device.type, loaded.by_transformers,
        config.quantization,
    ]  # fmt: skip


def layout(runner: ModelRunner) -> list[Any]:
    """What the bytes of a page and of a state are, and in which order."""
    planes = [(str(x.dtype), len(x), x.shape[2]) for x in runner.pool.planes(runner.page_size)]
    states = [] if runner.states is None else [(str(x.dtype), x.shape[1]) for x in runner.states.planes()]
    return [runner.page_size, planes, states, runner.kv_dtype, list(runner.pool.scales)]
