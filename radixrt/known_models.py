"""Small models with permissive licences that have a short name, which stands for them wherever a model is named."""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """A model at the hub. `gigabytes`: of its weights, which is what it takes to download it and to hold it in 16
    bits."""

    name: str
    gigabytes: float
    licence: str
    words: str


KNOWN = {
    "smollm2": Known("HuggingFaceTB/SmolLM2-135M-Instruct", 0.27, "Apache-2.0", "the smallest, to try things out"),
    "qwen2.5": Known("Qwen/Qwen2.5-0.5B-Instruct", 0.99, "Apache-2.0", "calls tools"),
    "qwen3": Known("Qwen/Qwen3-0.6B", 1.5, "Apache-2.0", "thinks, calls tools"),
    "olmo2": Known("allenai/OLMo-2-0425-1B-Instruct", 2.97, "Apache-2.0", "of open data"),
    "granite": Known("ibm-granite/granite-3.3-2b-instruct", 5.07, "Apache-2.0", "calls tools"),
    "smollm3": Known("HuggingFaceTB/SmolLM3-3B", 6.15, "Apache-2.0", "thinks, calls tools"),
    "phi4-mini": Known("microsoft/Phi-4-mini-instruct", 7.67, "MIT", "calls tools"),
    "qwen3-4b": Known("Qwen/Qwen3-4B-Instruct-2507", 8.04, "Apache-2.0", "calls tools"),
}
"""By short name, in the order of their sizes."""
