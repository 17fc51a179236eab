"""Shapes of known models, to be served with random weights.   python -m bench.shapes FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "eos_token_id": 128001,
    "bos_token_id": 128000,
}
"""Llama 3.1 8B."""

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B, indent=1))
