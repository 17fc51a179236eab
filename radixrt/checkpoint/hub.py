"""The folder of a checkpoint, here or from the hub. Of the hub's files the small ones come first, so that a model that
is not served is refused before its weights are downloaded.

    find(name) = find_files(name), then its weights

Of ORG/NAME:QUANT, a GGUF file, the hub is asked for its list of files, and then for that file only.
"""

from __future__ import annotations

import gc
import glob
import io
import logging
import re
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from radixrt.checkpoint.gguf.config import ARCHITECTURES, not_served
from radixrt.checkpoint.gguf.folder import is_gguf, unpacked
from radixrt.checkpoint.gguf.quants import chosen, quants

log = logging.getLogger("radixrt.hub")

ORIGINAL_FILES = "consolidated*"
"""Files of the same weights in the publisher's original format, with other tensor names than in transformers."""
SMALL_FILES = ["*.json", "*.model", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt"]
WEIGHTS = ["*.safetensors"]
HUB_OTHERS = ["original/*", ORIGINAL_FILES]
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*(:[\w.-]+)?)?")
"""ORG/NAME, or one of the old names without ORG; ORG/NAME:QUANT for a GGUF file."""
LIBRARIES = ("httpx", "httpx2", "huggingface_hub")
"""Loggers that write lines about each request, and advice for those who write programs."""
SAY_SECONDS = 3.0
"""Between two lines that say how far a download is."""


def is_hub_name(model: str) -> bool:
    """Whether `model` can be asked for at the hub: it has the form of a name there, and is no path that exists."""
    return HUB_NAME.fullmatch(model) is not None and not model.endswith(".gguf") and not Path(model).exists()


def has_quant(model: str) -> bool:
    """Whether a hub name is ORG/NAME:QUANT, whose configuration and tokenizer are in the file of its weights."""
    return ":" in model


def find(model: str, *, cached: bool = False) -> Path:
    """The folder of a checkpoint, with its weights: made of a GGUF file if `model` is one, downloaded if it is a hub
    name, unless only what is `cached` is wanted. ValueError, in one line, if there is none."""
    if not is_hub_name(model) or has_quant(model):
        return find_files(model, cached=cached)
    folder = _fetch(model, SMALL_FILES + WEIGHTS, cached)
    if not any(folder.glob("*.safetensors")):
        if not cached:
            _refuse_gguf(model)
        raise ValueError(f"{model} has no safetensors at the hub: convert its weights, and give the folder")
    return folder


def is_complete(model: str) -> bool:
    """Whether the cache has all of a hub name, with its weights."""
    try:
        find(model, cached=True)
    except ValueError:
        return False
    return True


def find_files(model: str | Path, *, cached: bool = False) -> Path:
    """The same without weights, unless they are in the same file: a folder with the configuration and the tokenizer."""
    if Path(model).is_dir():
        return _with_config(Path(model))
    if is_gguf(str(model)):
        return unpacked(Path(model))
    if not is_hub_name(str(model)):
        raise ValueError(_no_folder(Path(model)))
    name, _, quant = str(model).partition(":")
    if quant:
        return unpacked(_gguf_file(name, quant, cached))
    return _with_config(_fetch(name, SMALL_FILES, cached), name)


def _with_config(folder: Path, name: str = "") -> Path:
    """The folder, here or of a hub name. ValueError says so if it has GGUF files instead of a checkpoint."""
    if not (folder / "config.json").is_file():
        if name:
            _refuse_gguf(name)
        elif files := sorted(path.name for path in folder.glob("*.gguf")):
            raise ValueError(f"{folder} has GGUF files: give one of them; {', '.join(files)}")
    return folder


def _gguf_file(name: str, quant: str, cached: bool) -> Path:
    """The file that this quant means, the first one if it is split; downloaded, with the others."""
    paths, architecture = _listed(name, cached)
    if architecture and architecture not in ARCHITECTURES:
        raise ValueError(f"{name}: {not_served(architecture)}")
    files = chosen(paths, quant)
    if not files:
        there = ", ".join(quants(paths)) or "no GGUF files"
        raise ValueError(f"{name} has no quant {quant}; it has {there}")
    return _fetch(name, [glob.escape(path) for path in files], cached) / files[0]


def _refuse_gguf(name: str) -> None:
    """ValueError lists the quants if there are GGUF files."""
    if there := quants(_listed(name)[0]):
        raise ValueError(f"{name} has GGUF files: give one of its quants, as {name}:{there[0]}; {', '.join(there)}")


def _listed(name: str, cached: bool = False) -> tuple[list[str], str]:
    """Paths of a hub name's files, those in the cache if the hub cannot be reached or only they are wanted, and the
    architecture of its GGUF files, "" if it is not known."""
    folder = _fetch(name, [], cached)
    from huggingface_hub import HfApi

    try:
        info = None if cached else HfApi().model_info(name)
    except Exception:  # of what matters, the line above would have told
        info = None
    if info is None:
        return [str(path.relative_to(folder)) for path in folder.rglob("*")], ""
    return [file.rfilename for file in info.siblings or ()], str((info.gguf or {}).get("architecture", ""))


def _no_folder(path: Path) -> str:
    if path.is_file():
        return f"{path} is a file; give the folder of a checkpoint, or ORG/NAME as at the hub"
    return f"there is no folder {path}; give one, or ORG/NAME as at the hub"


def _fetch(model: str, patterns: list[str], cached: bool = False) -> Path:
    """Files of a hub name, from the cache if they are there. Files that are complete stay there if this is
    interrupted."""
    try:
        return _snapshot(model, patterns, cached)
    except Exception as error:  # no network, no such name, no access, a full disk: all of one line
        raise ValueError(f"{model}: {_reason(model, error)}") from error


def _snapshot(model: str, patterns: list[str], cached: bool) -> Path:
    from huggingface_hub import snapshot_download

    for name in LIBRARIES:
        if not logging.getLogger(name).isEnabledFor(logging.DEBUG):
            logging.getLogger(name).setLevel(logging.ERROR)
    shows_bar = patterns not in (SMALL_FILES, []) and sys.stderr.isatty()
    found = snapshot_download(
        model,
        allow_patterns=patterns,
        ignore_patterns=HUB_OTHERS,
        local_files_only=cached,
        tqdm_class=None if shows_bar else Lines,  # None: the library's own
    )
    if shows_bar:
        gc.collect()  # or else its bars write their last lines among those that come later
    return Path(found)


class Lines(tqdm):
    """A progress bar as lines of the log, one each SAY_SECONDS: of the bytes, by whichever of the library's bars."""

    next_time = 0.0
    """Of all bars."""

    def __init__(self, *args: Any, **options: Any) -> None:
        Lines.next_time = time.monotonic() + SAY_SECONDS
        super().__init__(*args, **options | {"file": io.StringIO(), "mininterval": SAY_SECONDS})

    def display(self, *_args: Any, **_more: Any) -> None:
        now = time.monotonic()
        if self.unit == "B" and (self.total or 0) > 1e6 and now >= Lines.next_time:
            Lines.next_time = now + SAY_SECONDS
            log.info("downloaded %.0f of %.0f MB", self.n / 1e6, self.total / 1e6)


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
