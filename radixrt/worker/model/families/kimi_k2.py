"""Kimi K2: DeepSeek V3 with other sizes."""

from __future__ import annotations

from radixrt.worker.model.families.deepseek_v3 import spec

__all__ = ["spec"]
