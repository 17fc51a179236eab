"""What decides whether the KV of one process is that of another: it must be certain, as KV of other weights gives wrong
answers without an error.

What is hashed is all that K and V depend on: the weights, config.json, dtypes, scales, the layout of pages, the kind of
device. The weights themselves are not read for it. A file of a hub's cache has a name that is the hash of its content;
of others, size and time of modification count, and samples of their content: so a checkpoint that was trained on at the
same path is another one, and one that was copied elsewhere, which is rare, is computed again.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

KV_FORMAT = 1
"""Raised when pages of the same model get other content or another order."""
SAMPLES, SAMPLE_BYTES = 64, 1 << 14
"""Pieces of a file that are hashed, beside its first and last ones."""
WEIGHTS = ("*.safetensors", "*.gguf")
BLOB = re.compile(r"[0-9a-f]{64}").fullmatch
"""The name of a file in a hub's cache that is named by its SHA-256."""


def fingerprint(parts: Iterable[object]) -> str:
    """A name, of hexadecimal digits, for these parts, by what they are printed as."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (KV_FORMAT, *parts):
        text = repr(part).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def checkpoint_identity(folder: Path) -> list[tuple[object, ...]]:
    """What tells the checkpoint in a folder from all others: its configuration and its weights."""
    config = folder / "config.json"
    found: list[tuple[object, ...]] = [("config.json", config.read_bytes())] if config.is_file() else []
    return found + [file_identity(path) for path in sorted(_weights(folder))]


def adapter_identity(folder: Path) -> str:
    """The same of a LoRA adapter, as hexadecimal digits. All of it is read: it is small."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        if path.suffix in (".json", ".safetensors"):
            with path.open("rb") as file:
                digest.update(repr((path.name, os.fstat(file.fileno()).st_size)).encode())
                while piece := file.read(1 << 20):
                    digest.update(piece)
    return digest.hexdigest()


def _weights(folder: Path) -> Iterator[Path]:
    for pattern in WEIGHTS:
        yield from folder.glob(pattern)


def file_identity(path: Path) -> tuple[object, ...]:
    """What tells the content of a file from any that was there before, or is elsewhere."""
    real = path.resolve()
    if real.parent.name == "blobs" and BLOB(real.name):
        return path.name, real.name
    with real.open("rb") as file:
        stat, digest = os.fstat(file.fileno()), hashlib.blake2b(digest_size=16)
        last = max(0, stat.st_size - SAMPLE_BYTES)
        for n in range(SAMPLES + 1):
            file.seek(last * n // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
    return path.name, stat.st_size, stat.st_mtime_ns, digest.hexdigest()
