"""Checkpoints of gpt-oss with experts in MXFP4, as published ones have them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from radixrt.worker.model.weights.checkpoint import read_json


def pack_experts(folder: Path, model: PreTrainedModel) -> None:
    """Replace the experts of `model` and of its checkpoint in `folder` by random ones in MXFP4."""
    config = read_json(folder / "config.json")
    hidden, inner, experts = (config[name] for name in ("hidden_size", "intermediate_size", "num_local_experts"))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for number, layer in enumerate(model.model.layers):
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            at = f"model.layers.{number}.mlp.experts.{name}"
            shape = experts, rows, columns // 32
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
            tensors[f"{at}_blocks"], tensors[f"{at}_scales"] = blocks, scales
            del tensors[at]
            getattr(layer.mlp.experts, name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors")
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
