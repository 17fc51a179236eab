"""Qwen2.5-VL: Qwen2-VL as far as text goes."""

from __future__ import annotations

from radixrt.worker.model.qwen2_vl import spec

__all__ = ["spec"]
