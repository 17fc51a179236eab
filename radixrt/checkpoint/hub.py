"""The folder of a checkpoint, here or from the hub. Of the hub's files the small ones come first, so that a model that
is not served is refused before its weights are downloaded.

    find(name) = find_files(name), then its weights

Of ORG/NAME:QUANT, a GGUF file, the hub is asked for its list of files, and then for that file only.
"""

from __future__ import annotations

import glob
import logging
import re
from pathlib import Path

from radixrt.checkpoint.gguf.config import ARCHITECTURES, not_served
from radixrt.checkpoint.gguf.folder import is_gguf, unpacked
from radixrt.checkpoint.gguf.quants import chosen, quants

ORIGINAL_FILES = "consolidated*"
"""Files of the same weights in the publisher's original format, with other tensor names than in transformers."""
SMALL_FILES = ["*.json", "*.model", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt"]
WEIGHTS = ["*.safetensors"]
HUB_OTHERS = ["original/*", ORIGINAL_FILES]
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*(:[\w.-]+)?)?")
"""ORG/NAME, or one of the old names without ORG; ORG/NAME:QUANT for a GGUF file."""
LIBRARIES = ("httpx", "httpx2", "huggingface_hub")
"""Loggers that write lines about each request, and advice for those who write programs."""


def is_hub_name(model: str) -> bool:
    """Whether `model` can be asked for at the hub: it has the form of a name there, and is no path that exists."""
    return HUB_NAME.fullmatch(model) is not None and not model.endswith(".gguf") and not Path(model).exists()


def find(model: str) -> Path:
    """The folder of a checkpoint, with its weights: made of a GGUF file if `model` is one, downloaded if it is a hub
    name. ValueError, in one line, if there is none."""
    folder = find_files(model)
    if is_hub_name(model) and ":" not in model:
        folder = _fetch(model, SMALL_FILES + WEIGHTS)
        if not any(folder.glob("*.safetensors")):
            _refuse_gguf(model)
            raise ValueError(f"{model} has no safetensors at the hub: convert its weights, and give the folder")
    return folder


def find_files(model: str | Path) -> Path:
    """The same without weights, unless they are in the same file: a folder with the configuration and the tokenizer."""
    if Path(model).is_dir():
        return _with_config(Path(model))
    if is_gguf(str(model)):
        return unpacked(Path(model))
    if not is_hub_name(str(model)):
        raise ValueError(_no_folder(Path(model)))
    name, _, quant = str(model).partition(":")
    if quant:
        return unpacked(_gguf_file(name, quant))
    return _with_config(_fetch(name, SMALL_FILES), name)


def _with_config(folder: Path, name: str = "") -> Path:
    """The folder, here or of a hub name. ValueError says so if it has GGUF files instead of a checkpoint."""
    if not (folder / "config.json").is_file():
        if name:
            _refuse_gguf(name)
        elif files := sorted(path.name for path in folder.glob("*.gguf")):
            raise ValueError(f"{folder} has GGUF files: give one of them; {', '.join(files)}")
    return folder


def _gguf_file(name: str, quant: str) -> Path:
    """The file that this quant means, the first one if it is split; downloaded, with the others."""
    paths, architecture = _listed(name)
    if architecture and architecture not in ARCHITECTURES:
        raise ValueError(f"{name}: {not_served(architecture)}")
    files = chosen(paths, quant)
    if not files:
        there = ", ".join(quants(paths)) or "no GGUF files"
        raise ValueError(f"{name} has no quant {quant}; it has {there}")
    return _fetch(name, [glob.escape(path) for path in files]) / files[0]


def _refuse_gguf(name: str) -> None:
    """ValueError lists the quants if there are GGUF files."""
    if there := quants(_listed(name)[0]):
        raise ValueError(f"{name} has GGUF files: give one of its quants, as {name}:{there[0]}; {', '.join(there)}")


def _listed(name: str) -> tuple[list[str], str]:
    """Paths of a hub name's files, those in the cache if the hub cannot be reached, and the architecture of its GGUF
    files, "" if it is not known."""
    folder = _fetch(name, [])
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(name)
    except Exception:  # of what matters, the line above would have told
        return [str(path.relative_to(folder)) for path in folder.rglob("*")], ""
    return [file.rfilename for file in info.siblings or ()], str((info.gguf or {}).get("architecture", ""))


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
