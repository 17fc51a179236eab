"""The folder of a checkpoint, here or from the hub. Of the hub's files the small ones come first, so that a model that
is not served is refused before its weights are downloaded.

    find(name) = find_files(name), then its weights
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from radixrt.checkpoint.gguf.folder import is_gguf, unpacked

ORIGINAL_FILES = "consolidated*"
"""Files of the same weights in the publisher's original format, with other tensor names than in transformers."""
SMALL_FILES = ["*.json", "*.model", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt"]
WEIGHTS = ["*.safetensors"]
HUB_OTHERS = ["original/*", ORIGINAL_FILES]
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""ORG/NAME, or one of the old names without ORG."""
LIBRARIES = ("httpx", "httpx2", "huggingface_hub")
"""Loggers that write lines about each request, and advice for those who write programs."""


def is_hub_name(model: str) -> bool:
    """Whether `model` can be asked for at the hub: it has the form of a name there, and is no path that exists."""
    return HUB_NAME.fullmatch(model) is not None and not model.endswith(".gguf") and not Path(model).exists()


def find(model: str) -> Path:
    """The folder of a checkpoint, with its weights: made of a GGUF file if `model` is one, downloaded if it is a hub
    name. ValueError, in one line, if there is none."""
    folder = find_files(model)
    if is_hub_name(model):
        folder = _fetch(model, SMALL_FILES + WEIGHTS)
        if not any(folder.glob("*.safetensors")):
            raise ValueError(f"{model} has no safetensors at the hub: convert its weights, and give the folder")
    return folder


def find_files(model: str | Path) -> Path:
    """The same without weights: a folder with the configuration and the tokenizer."""
    if Path(model).is_dir():
        return Path(model)
    if is_gguf(str(model)):
        return unpacked(Path(model))
    if not is_hub_name(str(model)):
        raise ValueError(_no_folder(Path(model)))
    return _fetch(str(model), SMALL_FILES)


def _no_folder(path: Path) -> str:
    if path.is_file():
        return f"{path} is a file; give the folder of a checkpoint, or ORG/NAME as at the hub"
    return f"there is no folder {path}; give one, or ORG/NAME as at the hub"


def _fetch(model: str, patterns: list[str]) -> Path:
    """Files of a hub name, from the cache if they are there. Files that are complete stay there if this is
    interrupted."""
    try:
        return _snapshot(model, patterns)
    except Exception as error:  # no network, no such name, no access, a full disk: all of one line
        raise ValueError(f"{model}: {_reason(model, error)}") from error


def _snapshot(model: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    for name in LIBRARIES:
        if not logging.getLogger(name).isEnabledFor(logging.DEBUG):
            logging.getLogger(name).setLevel(logging.ERROR)
    return Path(snapshot_download(model, allow_patterns=patterns, ignore_patterns=HUB_OTHERS))


def _reason(model: str, error: Exception) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return f"its publisher asks for consent: agree at the hub's page of {model}, then `hf auth login`, or HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such folder, and no such model at the hub (of a private one: `hf auth login`, or HF_TOKEN)"
    if isinstance(error, LocalEntryNotFoundError):
        return "there is no such folder, and the hub cannot be reached, nor has its cache all files of that model"
    return f"the hub did not give it: {' '.join(str(error).split()) or type(error).__name__}"
