"""How a checkpoint is served: what settings, its config.json and the device decide before any weight is read."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from radixrt.checkpoint.files import FAMILIES, check_model
from radixrt.checkpoint.hub import find, find_files
from radixrt.config import WorkerConfig
from radixrt.worker.execution.kv_pool import DTYPES
from radixrt.worker.model import read_spec, transformers_model
from radixrt.worker.model.layers import int4
from radixrt.worker.model.parallel.sharding import Shard
from radixrt.worker.model.predictor import has_predictor, is_stored, with_predictor
from radixrt.worker.model.spec.spec import ModelSpec
from radixrt.worker.model.weights import checkpoint
from radixrt.worker.model.weights.quantized import Products, has_int4, rounds_activations, stored_as

log = logging.getLogger("radixrt.loading")

CAPABILITY = 8, 0
"""The compute capability that kernels need."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint to run: its configuration and what was chosen for it, without the weights."""

    folder: Path
    hf_config: dict[str, Any]
    whole: ModelSpec
    """The whole model."""
    spec: ModelSpec
    """The part of it that this rank runs; equals `whole` if there is only one rank."""
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    eos_ids: frozenset[int]
    by_transformers: bool = False
    """Whether transformers computes the model (see `model.transformers_model`)."""

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in pages, all layers."""
        return self.spec.token_bytes(self.kv_dtype.itemsize, self.dtype.itemsize)


def look_up(config: WorkerConfig, shard: Shard = Shard()) -> Loaded:  # noqa: B008
    """Reads the configuration of the checkpoint, not its weights, which of a hub name are downloaded last. Raises
    ValueError if it cannot be served."""
    folder = find_files(config.model)
    hf_config = checkpoint.read_json(folder / "config.json")
    check_model(folder, config.model_impl)
    try:
        loaded = _look_up(config, shard, folder, hf_config)
    except (TypeError, AttributeError, IndexError, ArithmeticError) as error:
        raise ValueError(f"{folder}/config.json: a value is not of the kind that is expected ({error})") from error
    if config.load_format != "dummy":
        find(config.model)
    return loaded


def _look_up(config: WorkerConfig, shard: Shard, folder: Path, hf_config: dict[str, Any]) -> Loaded:
    # Only the text part is served, so settings that stand only there apply to the model. tie_word_embeddings is not
    # taken from there: if it is missing, the default of the model's family holds.
    text = hf_config.get("text_config") or {}
    text_only = {name for name in text if hf_config.get(name) is None} - {"tie_word_embeddings"}
    hf_config |= {name: text[name] for name in text_only}
    device = torch.device(config.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    dtype = choose_dtype(config.dtype, hf_config, device)
    kv_dtype = choose_kv_dtype(config.kv_cache_dtype, dtype, device)
    by_transformers = uses_transformers(config, hf_config.get("model_type"))
    if by_transformers:
        check_plain(config, device, kv_dtype)
        spec = transformers_model.read_spec(folder, config.max_model_len)
    else:
        spec = read_spec(hf_config, config.max_model_len)
    if predicts(config, hf_config, folder, device):
        spec = with_predictor(spec, hf_config)
    for note in () if by_transformers else notes(hf_config, spec):
        log.warning("%s: %s", shown(config, folder), note)
    # A tokenizer may have ids for which the model has no logits.
    eos_ids = frozenset(id for id in checkpoint.eos_ids(folder) if id < spec.vocab_size)
    return Loaded(folder, hf_config, spec, shard.spec(spec), device, dtype, kv_dtype, eos_ids, by_transformers)


def shown(config: WorkerConfig, folder: Path) -> str:
    """What the log calls a model: the folder of one of the hub has no name that says anything."""
    return config.served_model_name or folder.name


def uses_transformers(config: WorkerConfig, family: object) -> bool:
    """Whether transformers computes a model of this family."""
    return config.model_impl == "transformers" or (config.model_impl == "auto" and family not in FAMILIES)


def check_plain(config: WorkerConfig, device: torch.device, kv_dtype: torch.dtype) -> None:
    """ValueError names a setting that is not served where transformers computes the model."""
    served = {
        "tensor_parallel_size": config.tensor_parallel_size == 1,
        "lora_modules": not config.lora_modules,
        "enable_lora": not config.enable_lora,
        "quantization": config.quantization != "fp8",
        "speculative_algorithm": config.speculative_algorithm != "mtp",
        "deterministic": not config.deterministic,
        "kv_cache_dtype": device.type != "cpu" or kv_dtype.itemsize > 1,  # see `is_exact`
    }
    if missing := next((name for name, holds in served.items() if not holds), ""):
        raise ValueError(
            f"{missing} {getattr(config, missing)!r} is not served where transformers computes the model "
            "(see --model-impl)"
        )


def predicts(config: WorkerConfig, hf_config: Mapping[str, Any], folder: Path, device: torch.device) -> bool:
    """Whether the model's layer for multi-token prediction is used. Where it could be, but was not asked for, the log
    says so. Raises ValueError if it is asked for where it is not served."""
    alone = config.tensor_parallel_size == 1
    if config.speculative_algorithm == "mtp":
        if not alone:
            raise ValueError("speculative_algorithm: mtp is served with tensor_parallel_size 1 only; use ngram")
        return True
    stored = config.load_format != "dummy" and has_predictor(hf_config)
    if config.speculative_algorithm == "auto" and device.type == "cuda" and alone and stored and is_stored(folder):
        log.info(
            "%s has a layer for multi-token prediction: --speculative-algorithm mtp drafts with it",
            shown(config, folder),
        )
    return False


def notes(hf_config: Mapping[str, Any], spec: ModelSpec) -> Iterator[str]:
    """Warnings about what in this checkpoint is served differently than its user may expect."""
    if hf_config.get("auto_map"):
        yield "it brings code of its own (auto_map), which is not run; it is served as its model_type"
    if hf_config.get("vision_config"):
        yield "images are not served, only what it makes of text is"
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    if "dynamic" in (rope.get("rope_type"), rope.get("type")):
        yield "positions of the kind 'dynamic' are served up to max_position_embeddings only"
    original = spec.rope["original_max_position_embeddings"]
    if spec.rope["rope_type"] == "longrope" and spec.max_model_len > original:
        yield f"positions are those of long contexts; --max-model-len {original} serves those of short ones"


def is_exact(config: WorkerConfig, loaded: Loaded) -> bool:
    """Whether results must not depend on the batch.

    On a CPU with FP8 pages this is always so: otherwise results with and without a cached prefix would differ.
    """
    return config.deterministic or (loaded.device.type == "cpu" and loaded.kv_dtype.itemsize == 1)


def uses_kernels(config: WorkerConfig, loaded: Loaded) -> bool:
    """Whether the kernels of `cuda` compute: on a GPU that can run them, unless `attention_backend` is torch."""
    return loaded.device.type == "cuda" and config.attention_backend != "torch" and not no_kernels(loaded)


def no_kernels(loaded: Loaded) -> str:
    """The reason why this GPU cannot run the kernels; "" if it can."""
    capability, needed = torch.cuda.get_device_capability(loaded.device), capability_for(loaded.kv_dtype)
    if capability < needed:
        kernels = "kernels with e4m3 pages" if needed > CAPABILITY else "the kernels"
        return "the GPU has compute capability {}.{}, {} need {}.{}".format(*capability, kernels, *needed)
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    if loaded.spec.recurrent is not None:
        from radixrt.worker.cuda.recurrent import delta_step

        if reason := delta_step.no_kernels(loaded.spec.recurrent):
            return reason
    if loaded.spec.experts is not None:
        from radixrt.worker.cuda.moe import experts

        return experts.no_kernels(loaded.spec.experts)
    return ""


def capability_for(kv_dtype: torch.dtype) -> tuple[int, int]:
    """The compute capability that kernels with pages of this dtype need."""
    return (8, 9) if kv_dtype == torch.float8_e4m3fn else CAPABILITY


def choose_dtype(name: str, hf_config: dict[str, Any], device: torch.device) -> torch.dtype:
    """The dtype of `name`. `auto`: float32 on a CPU; on a GPU float16 if the checkpoint states it, else bfloat16."""
    if name == "auto":
        stated = str(hf_config.get("dtype") or hf_config.get("torch_dtype")).removeprefix("torch.")
        name = "float32" if device.type == "cpu" else stated if stated == "float16" else "bfloat16"
    return DTYPES[{"float": "float32", "half": "float16"}.get(name, name)]


def choose_kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of KV pages. `auto`: e4m3 on Hopper and newer if activations (`dtype`) have 16 bits, else `dtype`."""
    if name == "auto":
        new = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        return torch.float8_e4m3fn if new and dtype.itemsize == 2 else dtype
    return DTYPES[{"fp8": "fp8_e4m3"}.get(name, name)]


def choose_products(name: str, loaded: Loaded, exact: bool, kernels: bool) -> Products:
    """Which matrix products are computed in FP8.

    `auto`: those of weights that the checkpoint stores in FP8 for this purpose, if there are `kernels` and the GPU can
    multiply FP8. Raises ValueError if `fp8` is not possible.
    """
    capability = torch.cuda.get_device_capability(loaded.device) if kernels and loaded.device.type == "cuda" else None
    return products_on(capability, name, loaded, exact)


def products_on(capability: tuple[int, int] | None, name: str, loaded: Loaded, exact: bool) -> Products:
    """As `choose_products`, on a GPU of this compute capability, with its kernels; None: without."""
    missing = ""
    if capability is None:
        missing = "a GPU and its kernels"
    elif capability < (8, 9):
        missing = "compute capability 8.9"
    elif loaded.dtype != torch.bfloat16:
        missing = "dtype bfloat16"
    elif exact:
        missing = "results that may depend on the batch, so not --deterministic"
    if name == "fp8" and missing:
        raise ValueError(f"quantization fp8 needs {missing}")
    if name == "none" or missing:
        return Products.NONE
    if name == "fp8":
        return Products.ALL
    return Products.STORED if rounds_activations(loaded.hf_config) else Products.NONE


def keeps_packed(name: str, loaded: Loaded, kernels: bool) -> bool:
    """Whether weights that are stored in MXFP4 (of experts) or INT4 are kept so: if the GPU's `kernels` are used, in
    bfloat16 (INT4: or float16), and the option quantization is not none (INT4: nor fp8)."""
    if not kernels or loaded.device.type != "cuda" or not may_stay_packed(name, loaded):
        return False
    from radixrt.worker.cuda.linear import int4 as int4_kernels
    from radixrt.worker.cuda.moe import packed_experts

    if stored_as(loaded.hf_config) == "MXFP4":
        return packed_experts.there(loaded.device)
    if loaded.spec.experts is not None and not packed_experts.there(loaded.device, loaded.dtype):
        return False
    return int4_kernels.there(loaded.device, loaded.dtype)


def may_stay_packed(name: str, loaded: Loaded) -> bool:
    """As `keeps_packed`, on a GPU whose kernels work."""
    if stored_as(loaded.hf_config) == "MXFP4":
        return name != "none" and loaded.dtype == torch.bfloat16
    return has_int4(loaded.hf_config) and name not in ("none", "fp8") and loaded.dtype in int4.DTYPES
