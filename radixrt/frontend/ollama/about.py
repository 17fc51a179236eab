"""Models as Ollama's JSON. What the front end does not know of them is empty. Pure."""

from __future__ import annotations

from typing import Any

from radixrt.formats.output import Formats

VERSION = "0.14.0"
"""The version of Ollama whose API this is: clients want at least one with the routes that they use (Codex 0.13.4, for
/v1/responses)."""
EPOCH = "1970-01-01T00:00:00Z"
ARCHITECTURE = "radixrt"
"""The prefix of the model's sizes, which clients read as `general.architecture`."""


def tag_json(name: str, parent: str | None) -> dict[str, Any]:
    """A model of the list, or a LoRA adapter of the model `parent`."""
    return {"name": name, "model": name, "modified_at": EPOCH, "size": 0, "digest": "", "details": _details(parent)}


def show_json(name: str, parent: str | None, max_model_len: int, formats: Formats) -> dict[str, Any]:
    """A model in full. A prompt and its answer may have `max_model_len` tokens together."""
    abilities = {"completion": True, "tools": formats.reads_calls, "thinking": formats.reads_thoughts}
    info = {
        "general.architecture": ARCHITECTURE,
        "general.basename": name,
        f"{ARCHITECTURE}.context_length": max_model_len,
    }
    texts = {"modelfile": "", "parameters": "", "template": "", "modified_at": EPOCH}
    return texts | {
        "details": _details(parent),
        "model_info": info,
        "capabilities": [name for name, has in abilities.items() if has],
    }


def _details(parent: str | None) -> dict[str, Any]:
    about = {"parent_model": parent or "", "format": "safetensors", "family": ARCHITECTURE, "families": [ARCHITECTURE]}
    return about | {"parameter_size": "", "quantization_level": ""}
