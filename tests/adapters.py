"""Makes small random LoRA adapters in PEFT's format, and the models that they amount to."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    model: torch.nn.Module,
    targets: Sequence[str] = DENSE,
    *,
    rank: int = 8,
    seed: int = 0,
    prefix: str = "base_model.model.",
    **config,
) -> Path:
    """Write an adapter for the linear layers of a transformers model whose names end with one of `targets`. `config`
    are fields of adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)} | config
    tensors = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or not name.endswith(tuple(targets)):
            continue
        r = config.get("rank_pattern", {}).get(name.rpartition(".")[2], rank)
        a = torch.randn(r, module.in_features, generator=generator) / math.sqrt(module.in_features)
        b = torch.randn(module.out_features, r, generator=generator) * 0.3 / math.sqrt(r)
        tensors |= {f"{prefix}{name}.lora_A.weight": a, f"{prefix}{name}.lora_B.weight": b}
    assert tensors, f"the model has no {targets}"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@torch.inference_mode()
def merged(model: torch.nn.Module, folder: Path, prefix: str = "base_model.model.") -> torch.nn.Module:
    """A copy of the model with W + scale * B A in place of each weight W that the adapter has matrices for."""
    from safetensors.torch import load_file

    config, tensors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    found = copy.deepcopy(model)
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix(prefix).removesuffix(".lora_A.weight")
        patterns = config.get("alpha_pattern", {})
        alpha = patterns.get(module, patterns.get(module.rpartition(".")[2], config["lora_alpha"]))
        scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        b = tensors[name.replace("lora_A", "lora_B")]
        found.get_submodule(module).weight += scale * (b.double() @ a.double()).float()
    return found
