"""IQuest-Coder: Llama by another name."""

from typing import Any

from radixrt.worker.model.families import llama
from radixrt.worker.model.spec.fields import check_served
from radixrt.worker.model.spec.spec import ModelSpec


def spec(config: dict[str, Any]) -> ModelSpec:
    """Options of its own code that no checkpoint uses are not served."""
    check_served(config, {"clip_qkv": None, "use_sliding_window": False})
    return llama.spec({"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5} | config)
