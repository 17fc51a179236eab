"""The checkpoint folder of a GGUF file, made once in the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from radixrt.checkpoint.gguf.config import generation_config, model_config
from radixrt.checkpoint.gguf.file import GgufFile, read_gguf, shards
from radixrt.checkpoint.gguf.vocabulary import tokenizer_config, tokenizer_json

SUFFIX = ".gguf"
WEIGHTS = "model.gguf"
"""The link to the file; that of the first one if the model was split, from whose folder the others are read."""
FORM = 1
"""Raise it when other files are made of the same GGUF file."""


def is_gguf(model: str | Path) -> bool:
    """Whether this names a GGUF file, by its suffix."""
    return str(model).endswith(SUFFIX)


def unpacked(path: Path) -> Path:
    """The folder: config.json, the tokenizer's files, and WEIGHTS. It is made if there is none for this state of the
    file. ValueError if there is no such file, or it is not served."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}; give one, or ORG/NAME as at the hub")
    path = path.absolute()  # not resolved: in the hub's cache it is a link to a file whose name says nothing
    folder = cache_folder() / f"{path.name.removesuffix(SUFFIX)}-{_digest(path)}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        _make(folder, read_gguf(path))
    return folder


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixrt" / "gguf"


def _digest(path: Path) -> str:
    states = [(str(shard), shard.stat().st_size, shard.stat().st_mtime_ns) for shard in shards(path)]
    return hashlib.sha256(repr((FORM, states)).encode()).hexdigest()[:16]


def _make(folder: Path, file: GgufFile) -> None:
    """Write the files beside `folder`, and rename: another process may make the same folder at the same time."""
    files = {
        "config.json": model_config(file),
        "generation_config.json": generation_config(file),
        "tokenizer.json": tokenizer_json(file),
        "tokenizer_config.json": tokenizer_config(file),
    }
    new = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        for name, content in files.items():
            _write(new / name, content)
        (new / WEIGHTS).symlink_to(file.path)
        new.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
