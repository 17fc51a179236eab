"""Which LoRA adapters a worker loads, and how many: `--lora-modules`, `--max-loras`, read and checked without torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixrt.config import WorkerConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter in PEFT's format."""
FLAG = "--lora-modules"


class LoraModule(NamedTuple):
    """An adapter: its name, which is a model name for clients, and its folder."""

    name: str
    path: str


class _Json(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON form of vLLM."""

    name: str
    path: str
    base_model_name: str | None = None


def lora_modules(config: WorkerConfig) -> tuple[LoraModule, ...]:
    """The adapters of a worker, in the order in which they are numbered. Raises ValueError, which names the flag, for
    values that cannot be read and names that are used twice."""
    if config.lora_modules and not config.enable_lora:
        raise ValueError(f"{FLAG} needs --enable-lora")
    if config.allow_runtime_lora_updating and not config.enable_lora:
        raise ValueError("--allow-runtime-lora-updating needs --enable-lora")
    modules = tuple(_parse(text) for text in config.lora_modules)
    if 0 < config.max_loras < len(modules):
        raise ValueError(f"--max-loras {config.max_loras}: {FLAG} names {len(modules)} adapters")
    known = {config.served_model_name}
    for name, _ in modules:
        if name in known:
            raise ValueError(f"{FLAG}: there are two models of the name {name!r}")
        known.add(name)
    return modules


def most_loaded(config: WorkerConfig) -> int:
    """How many adapters clients may have loaded at once, those of `--lora-modules` included; 0: they may load none."""
    if not config.allow_runtime_lora_updating:
        return 0
    return config.max_loras or max(1, len(config.lora_modules))


def num_slots(most: int) -> int:
    """How many adapters there is memory for if clients may have `most` loaded (`most_loaded`): one more, so that
    requests can finish with an adapter that is being replaced; 0 if clients may load none."""
    return most + 1 if most else 0


def check_lora_modules(config: WorkerConfig) -> None:
    """Raise ValueError if a folder on this machine lacks one of an adapter's files, or as `lora_modules`."""
    for name, path in lora_modules(config):
        check_files(name, Path(path))


def check_files(name: str, folder: Path) -> None:
    """Raise ValueError if an adapter's folder lacks one of its files."""
    if not folder.is_dir():
        raise ValueError(f"{FLAG} {name}: there is no folder {folder}")
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            hint = "; convert adapter_model.bin to safetensors" if (folder / "adapter_model.bin").is_file() else ""
            raise ValueError(f"{FLAG} {name}: {folder} has no {file}{hint}")


def _parse(text: str) -> LoraModule:
    if text.lstrip().startswith("{"):
        try:
            entry = msgspec.json.decode(text, type=_Json)
        except msgspec.DecodeError as error:
            raise ValueError(f"{FLAG} {text!r}: {error}") from error
        name, path = entry.name, entry.path
    else:
        name, _, path = text.partition("=")
    if not name or not path:
        raise ValueError(f'{FLAG} {text!r}: expected NAME=PATH, or {{"name": ..., "path": ...}}')
    if not name.isprintable():
        raise ValueError(f"{FLAG} {text!r}: the name has characters that cannot be printed")
    return LoraModule(name, os.path.expanduser(path))  # shells do not, after NAME=


def names(modules: Sequence[LoraModule]) -> tuple[str, ...]:
    """The names of adapters, in order."""
    return tuple(module.name for module in modules)
