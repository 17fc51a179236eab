"""Opens the folder of `--kv-disk-path`. No torch."""

from __future__ import annotations

from pathlib import Path

from radixrt.config import WorkerConfig
from radixrt.worker.disk import DiskStore


def open_store(config: WorkerConfig, name: str, rank: int = 0, ranks: int = 1) -> DiskStore:
    """The store that `config` asks for, of a fingerprint. Raises ValueError."""
    size = int(config.kv_disk_size * (1 << 30))
    return DiskStore(Path(config.kv_disk_path), size, name, rank=rank, ranks=ranks, key=_key(config.kv_disk_key_file))


def _key(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"--kv-disk-key-file {path}: {error.strerror}") from error
