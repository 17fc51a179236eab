"""Kimi K2: DeepSeek V3 with other sizes."""

from radixrt.worker.model.families.deepseek_v3 import spec

__all__ = ["spec"]
