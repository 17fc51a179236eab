"""The folder of a checkpoint, here or from the hub."""

from __future__ import annotations

from pathlib import Path

from radixrt.checkpoint.gguf.folder import is_gguf, unpacked

ORIGINAL_FILES = "consolidated*"
"""Files of the same weights in the publisher's original format, with other tensor names than in transformers."""
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja"]
HUB_OTHERS = ["original/*", ORIGINAL_FILES]


def find_here(model: str) -> Path | None:
    """The folder of a checkpoint on this machine; None for a hub name. ValueError if `model` is a GGUF file that does
    not exist or is not served."""
    if Path(model).is_dir():
        return Path(model)
    return unpacked(Path(model)) if is_gguf(model) else None


def find(model: str) -> Path:
    """The folder of a checkpoint, made of a GGUF file if `model` is one, downloaded if it is a hub name. ValueError if
    there is none."""
    if (folder := find_here(model)) is not None:
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES, ignore_patterns=HUB_OTHERS))
    except Exception as error:  # no network, no such name, an invalid name: the caller need not tell these apart
        raise ValueError(f"{model} is neither a folder nor a model that the hub gave: {error}") from error
