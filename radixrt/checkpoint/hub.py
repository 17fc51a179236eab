"""The folder of a checkpoint, here or from the hub."""

from __future__ import annotations

from pathlib import Path

ORIGINAL_FILES = "consolidated*"
"""Files of the same weights in the publisher's original format, with other tensor names than in transformers."""
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja"]
HUB_OTHERS = ["original/*", ORIGINAL_FILES]


def find(model: str) -> Path:
    """The folder of a checkpoint, downloaded if `model` is a hub name. ValueError if there is none."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES, ignore_patterns=HUB_OTHERS))
    except Exception as error:  # no network, no such name, an invalid name: the caller need not tell these apart
        raise ValueError(f"{model} is neither a folder nor a model that the hub gave: {error}") from error
