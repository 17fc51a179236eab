"""Whether a model fits into the memory of a machine without a GPU, before gigabytes of it are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from radixrt.checkpoint.gguf.folder import WEIGHTS as GGUF
from radixrt.config import WorkerConfig
from radixrt.worker.load.options import Loaded, shown
from radixrt.worker.model.weights.quantized import stored_as

MEMORY = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
"""Of a container, which may have less memory than its machine."""


def check_memory(config: WorkerConfig, loaded: Loaded) -> None:
    """ValueError says which setting takes more memory than there is. On a GPU nothing is checked, as CUDA says it."""
    available = available_bytes()
    if loaded.device.type != "cpu" or available is None:
        return
    weights = weight_bytes(config, loaded)
    if weights > available:
        half = ", or --dtype bfloat16, which takes half" if loaded.dtype == torch.float32 else ""
        raise ValueError(
            f"the weights of {shown(config, loaded.folder)} take {weights / 1e9:.1f} GB in {_name(loaded.dtype)}, and "
            f"{available / 1e9:.1f} GB of memory are free: take a smaller model{half}"
        )
    pages = config.max_total_tokens * loaded.token_bytes
    if weights + pages > available:
        raise ValueError(
            f"--max-total-tokens {config.max_total_tokens}: they take {pages / 1e9:.1f} GB, {loaded.token_bytes} bytes "
            f"each; {(available - weights) / 1e9:.1f} GB of memory are free beside the weights, for "
            f"{(available - weights) // loaded.token_bytes} tokens at most"
        )


def weight_bytes(config: WorkerConfig, loaded: Loaded) -> int:
    """Bytes that the weights take at least: those of their files, in the dtype that they get. 0 if there are none."""
    if config.load_format == "dummy":
        return 0
    size = sum(file.stat().st_size for file in loaded.folder.glob("*.safetensors"))
    if (gguf := loaded.folder / GGUF).is_file():
        return gguf.stat().st_size
    stated = str(loaded.hf_config.get("dtype") or loaded.hf_config.get("torch_dtype")).removeprefix("torch.")
    stored = {"float32": 4, "bfloat16": 2, "float16": 2}.get(stated, 0)
    if stored and not stored_as(loaded.hf_config):
        return size * loaded.dtype.itemsize // stored
    return size


def available_bytes() -> int | None:
    """Memory that this process can still take; None where that is not known."""
    return min(_available(), default=None)


def _available() -> Iterator[int]:
    if MEMORY.is_file():
        lines = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines())
        yield sum(int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree") if name in lines)
    limit, stat = CGROUP / "memory.max", CGROUP / "memory.stat"
    if limit.is_file() and stat.is_file() and (most := limit.read_text().strip()).isdecimal():
        used = dict(line.split() for line in stat.read_text().splitlines())
        yield int(most) - int(used.get("anon", 0))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
