"""Which of a repository's GGUF files `ORG/NAME:QUANT` means, by their names. Pure.

SmolLM2-135M-Instruct-Q4_K_M.gguf             Q4_K_M
Q8_0/Big-70B-Q8_0-00001-of-00002.gguf, ...    Q8_0, of two files
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath

from radixrt.checkpoint.gguf.file import SHARD

TAG = re.compile(r"(?:UD-)?[^-.]+$")
"""The last part of a name. Those of Unsloth's own mixtures have two."""
NO_MODELS = ("mmproj", "imatrix")
"""Beginnings of the names of files that hold no language model: encoders of images, and statistics."""


def quants(paths: Iterable[str]) -> list[str]:
    """What may be given as QUANT of a repository with these files: the last part of their names; the whole name of
    those of which several have the same."""
    tags = {stem: _tag(stem) for stem in sorted({_stem(path) for path in _models(paths)})}
    count = Counter(tag.lower() for tag in tags.values())
    return [tag if count[tag.lower()] == 1 else stem for stem, tag in tags.items()]


def chosen(paths: Iterable[str], quant: str) -> list[str]:
    """The files of the model that `quant` means, in whatever case, in the order of their names; [] if it means none, or
    more than one."""
    models: dict[str, list[str]] = {}
    for path in sorted(_models(paths)):
        stem = _stem(path)
        if quant.lower() in (stem.lower(), _tag(stem).lower()):
            models.setdefault(stem, []).append(path)
    return next(iter(models.values())) if len(models) == 1 else []


def _models(paths: Iterable[str]) -> list[str]:
    names = {path: PurePosixPath(path).name for path in paths if path.endswith(".gguf")}
    return [path for path, name in names.items() if not name.startswith(NO_MODELS)]


def _stem(path: str) -> str:
    """The name of the model: without folder, number of the part, and suffix."""
    name = PurePosixPath(path).name
    split = SHARD.fullmatch(name)
    return split[1] if split else name.removesuffix(".gguf")


def _tag(stem: str) -> str:
    found = TAG.search(stem)
    return found[0] if found else stem
