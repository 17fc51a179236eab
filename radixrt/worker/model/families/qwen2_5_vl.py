"""Qwen2.5-VL: only its language model, which is that of Qwen2-VL."""

from radixrt.worker.model.families.qwen2_vl import spec

__all__ = ["spec"]
