"""Reads LoRA adapters (arXiv 2106.09685) in the format of PEFT: adapter_config.json, adapter_model.safetensors.

An adapter adds scale * B(A x) to projections of a model, where A is [r, in] and B is [out, r]. The scale is
lora_alpha / r, or with rsLoRA lora_alpha / sqrt(r) (arXiv 2312.03732).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from radixrt.checkpoint.lora_modules import CONFIG, FLAG, WEIGHTS, LoraModule, check_files
from radixrt.worker.model.weights.checkpoint import read_json

NOT_SERVED = {
    "use_dora": "DoRA", "modules_to_save": "modules_to_save", "lora_bias": "lora_bias",
    "fan_in_fan_out": "fan_in_fan_out", "layer_replication": "layer_replication", "use_qalora": "QA-LoRA",
    "trainable_token_indices": "trainable_token_indices", "target_parameters": "target_parameters",
    "alora_invocation_tokens": "activated LoRA", "arrow_config": "Arrow", "use_bdlora": "BD-LoRA",
    "megatron_config": "megatron_config", "corda_config": "CorDA",
}  # fmt: skip
"""Settings that change what an adapter computes, and their names for users. They must be false or empty."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` with which an adapter belongs to base weights that were changed."""
PREFIX = "base_model.model."
TEXT_PREFIXES = "model.language_model.", "language_model.model.", "model.", "backbone.", "transformer.", ""
"""What stands before `layers.` in names of modules of the text model."""
MATRICES = {".lora_A.weight": 0, ".lora_B.weight": 1}
"""Ends of tensors' names: A is [r, in], B is [out, r], so these are also the dimensions of the rank."""
DTYPES = ("BF16", "F16", "F32", "F64")
"""As safetensors names them."""
MAX_REPEATS = 2
"""In a pattern: `re` tries all ways in which repeats can share a name, and nothing else runs meanwhile."""
Rank = Annotated[int, msgspec.Meta(ge=1)]


class Config(msgspec.Struct):
    """What adapter_config.json says about ranks and scales. Patterns are regular expressions of modules' names."""

    r: Rank
    lora_alpha: float
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool | None = None

    def rank(self, module: str) -> int:
        """The rank of the matrices of a module, by its whole name ("model.layers.0.self_attn.q_proj")."""
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """The factor of their product."""
        rank = self.rank(module)
        return _by_pattern(self.alpha_pattern, module, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)


class Pair(NamedTuple):
    """The matrices of one projection: A [r, in] and B [out, r] as stored, and the factor of their product."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter, on the CPU, by projections: "layers.0.self_attn.q_proj"."""

    name: str
    pairs: Mapping[str, Pair]

    @property
    def rank(self) -> int:
        """The largest rank of a projection."""
        return max(pair.rank for pair in self.pairs.values())


def read_adapters(modules: Sequence[LoraModule], max_rank: int) -> list[Adapter]:
    """Read adapters with ranks of at most `max_rank`. Raises ValueError, which names the adapter and what is wrong."""
    return [read_adapter(module, max_rank) for module in modules]


def read_adapter(module: LoraModule, max_rank: int) -> Adapter:
    """See `read_adapters`."""
    name, folder = module.name, Path(module.path)
    check_files(name, folder)
    try:
        pairs = _pairs(_config(folder / CONFIG), _tensors(folder / WEIGHTS, max_rank))
    except SafetensorError as error:
        raise ValueError(f"{FLAG} {name}: {folder / WEIGHTS} cannot be read: {error}") from error
    except ValueError as error:
        raise ValueError(f"{FLAG} {name}: {error}") from error
    return Adapter(name, pairs)


def _config(path: Path) -> Config:
    """Read a configuration. Raises ValueError that names what in it is not served, or is not what is expected."""
    content = read_json(path)
    _check(content)
    try:
        return msgspec.convert(content, Config)
    except msgspec.ValidationError as error:
        raise ValueError(f"{CONFIG}: {error}") from error


def _check(config: Mapping[str, Any]) -> None:
    """Raise ValueError that names what of an adapter's configuration is not served."""
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"{CONFIG} has peft_type {kind!r}; LORA is served")
    for field, words in NOT_SERVED.items():
        if config.get(field):
            raise ValueError(f"{words} is not served")
    if (bias := config.get("bias", "none")) != "none":
        raise ValueError(f"bias {bias!r} is not served; none is")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise ValueError(f"init_lora_weights {start!r} changes the base weights: convert the adapter to plain LoRA")


def _tensors(path: Path, max_rank: int) -> dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """(A, B) by module, as PEFT names it without its own prefix. ValueError for a tensor that is none of these, and,
    before any is read, for one with a higher rank or of another dtype than is served."""
    matrices: dict[str, list[torch.Tensor | None]] = {}
    with safe_open(path, "pt", device="cpu") as file:
        stored = file.keys()
        if not stored:
            raise ValueError(f"{path} holds no tensors")
        ends = {name: _end(name) for name in stored}
        if (rank := max(_rank(file.get_slice(name), end) for name, end in ends.items())) > max_rank:
            raise ValueError(f"its rank is {rank}; --max-lora-rank {rank} serves it")
        for name, end in ends.items():
            short = name.removeprefix(PREFIX).removesuffix(".weight")
            if (dtype := file.get_slice(name).get_dtype()) not in DTYPES:
                raise ValueError(f"{short} is of dtype {dtype}, which is not served")
            matrix = file.get_tensor(name)
            if not matrix.isfinite().all():
                raise ValueError(f"{short} has values that are not finite")
            matrices.setdefault(_module(name, end), [None, None])[MATRICES[end]] = matrix
    return {module: (a, b) for module, (a, b) in matrices.items()}


def _end(name: str) -> str:
    """Which of MATRICES a tensor is. Raises ValueError if it is none of a projection."""
    end = next((end for end in MATRICES if name.endswith(end)), "")
    if not end or _projection(_module(name, end)) is None:
        raise ValueError(f"{name} is not served: only A and B of projections in layers are")
    return end


def _module(name: str, end: str) -> str:
    return name.removesuffix(end).removeprefix(PREFIX)


def _rank(stored: Any, end: str) -> int:
    """By the shape of a matrix in a file; 0 if it is none."""
    shape = stored.get_shape()
    return shape[MATRICES[end]] if len(shape) == 2 else 0


def _projection(module: str) -> str | None:
    """ "layers.0.self_attn.q_proj" for a module of the text model; None for others."""
    before, layers, rest = module.partition("layers.")
    return layers + rest if layers and before in TEXT_PREFIXES else None


def _pairs(
    config: Config, tensors: Mapping[str, tuple[torch.Tensor | None, torch.Tensor | None]]
) -> dict[str, Pair]:  # fmt: skip
    """By projection."""
    pairs: dict[str, Pair] = {}
    for module, (a, b) in tensors.items():
        if a is None or b is None:
            raise ValueError(f"{module} has only one of lora_A and lora_B")
        rank = config.rank(module)
        if a.dim() != 2 or b.dim() != 2 or len(a) != rank or b.shape[1] != rank:
            raise ValueError(
                f"{module}: lora_A is {list(a.shape)} and lora_B {list(b.shape)}, by {CONFIG} the rank is {rank}"
            )
        projection = _projection(module)
        assert projection is not None, "see `_end`"
        if projection in pairs:
            raise ValueError(f"{projection} has two names")
        if not math.isfinite(scale := config.scale(module)):
            raise ValueError(f"{module} has the scale {scale}")
        pairs[projection] = Pair(a, b, scale)
    return pairs


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern that fits a module's name, as in PEFT (`get_pattern_key`). Raises ValueError for
    one that is no pattern, or could take very long: with repeated groups, or more than MAX_REPEATS repeats."""
    for pattern, value in (patterns or {}).items():
        if len(re.findall(r"[*+{]", pattern)) > MAX_REPEATS or re.search(r"\)[*+{]", pattern):
            raise ValueError(f"{CONFIG} has the pattern {pattern!r}, which repeats too much")
        try:
            fits = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise ValueError(f"{CONFIG} has the pattern {pattern!r}: {error}") from error
        if fits:
            return value
    return default
