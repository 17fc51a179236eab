"""Ministral 8B of 2024: Mistral with sliding windows in some layers."""

from radixrt.worker.model.families.mistral import spec

__all__ = ["spec"]
