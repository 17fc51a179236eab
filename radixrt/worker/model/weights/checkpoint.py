"""Reads a checkpoint folder: config.json, safetensors in one or several shards, end-of-sequence ids."""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from radixrt.checkpoint.hub import ORIGINAL_FILES
from radixrt.worker.model.layers.fp8 import BLOCK, Fp8Weight
from radixrt.worker.model.layers.int4 import Int4
from radixrt.worker.model.parallel.sharding import Part
from radixrt.worker.model.weights import integers
from radixrt.worker.model.weights.quantized import SCALES, Products, dequantize, part_of_scale, read_scaled
from radixrt.worker.model.weights.weights import copied_part

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SIDE_TENSORS = ("rotary_emb.inv_freq", "_scale", "_scale_inv")
"""Endings of the names of tensors that may be left unused: RoPE frequencies are computed, and scales are only read with
their weights."""
VISION_PREFIXES: tuple[str, ...] = ("vision_tower.", "multi_modal_projector.", "mm_projector.", "visual.")
VISION_PREFIXES += ("embed_vision.", "vision_model.", "audio_tower.", "embed_audio.")
"""Beginnings of the names of tensors of encoders of images and sounds, which are ignored."""
TOKENIZER_FILES = ("tokenizer_config", "special_tokens_map", "tokenizer")
LFS_POINTER = b"version https://git-lfs"
tqdm.monitor_interval = 0  # no monitor thread


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is no such file. ValueError if the file is broken."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content


def eos_ids(folder: Path) -> frozenset[int]:
    """Token ids that end a sequence: the union of what generation_config.json, config.json and the tokenizer's files
    name."""
    ids: set[int] = set()
    model = read_json(folder / "config.json")
    for named in (read_json(folder / "generation_config.json"), model, model.get("text_config") or {}):
        value = named.get("eos_token_id")
        ids.update([value] if isinstance(value, int) else value or [])
    config, special, tokenizer = (read_json(folder / f"{name}.json") for name in TOKENIZER_FILES)
    token = config.get("eos_token") or special.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    known = [(int(i), t.get("content")) for i, t in (config.get("added_tokens_decoder") or {}).items()]
    known += [(t["id"], t.get("content")) for t in tokenizer.get("added_tokens") or []]
    vocabulary = tokenizer.get("model", {}).get("vocab")
    known += [(vocabulary[token], token)] if isinstance(vocabulary, dict) and token in vocabulary else []
    return frozenset(ids | {i for i, content in known if token and content == token})


class SafetensorsWeights:
    """The safetensors of a folder. Each tensor is read when it is requested; a progress bar on stderr counts bytes.

    `block`: rows and columns of a weight that share a scale, if it has scales for blocks. `products`: which matrices
    `scaled` returns in FP8. `packed`: see `Weights.packed`. `quantization`: the file's `quantization_config`, by which
    weights in the formats of `integers` are read. ValueError if the folder has no safetensors, a shard is
    missing or broken, or a tensor is missing, has another shape, or is quantized in a way that is not served.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        progress: bool = True,
        block: tuple[int, int] = (BLOCK, BLOCK),
        products: Products = Products.NONE,
        packed: bool = False,
        quantization: Mapping[str, Any] | None = None,
    ) -> None:
        self.dtype = dtype
        self.packed = packed
        self.num_dequantized = 0
        """Matrices in formats of `integers` that were dequantized."""
        self._products = products
        self._quantization = quantization or {}
        self._block = block
        self._device = device
        self._files: dict[Path, Any] = {}
        self._files_by_name = self._find_tensors(folder)
        self._unread = set(self._files_by_name)
        size = sum(path.stat().st_size for path in set(self._files_by_name.values()))
        self._bar = tqdm(
            total=size, desc="loading weights", unit="B", unit_scale=True, file=sys.stderr, mininterval=0.5,
            disable=not progress,
        )  # fmt: skip

    def _find_tensors(self, folder: Path) -> dict[str, Path]:
        """Tensor name -> file. Which shard has a tensor is read from the shards: indices may be outdated."""
        return {name: path for path in weight_files(folder) for name in self._open(path).keys()}

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(path, "pt", device=str(self._device))
            except (SafetensorError, OSError) as error:
                if _begins_with(path, LFS_POINTER):
                    raise ValueError(f"{path} is a pointer of git-lfs, not the file: run git lfs pull") from error
                raise ValueError(f"{path} cannot be read: {error}; if it was downloaded, do it again") from error
        return self._files[path]

    def _name(self, name: str) -> str:
        return stored_name(name, self._files_by_name)

    def __contains__(self, name: str) -> bool:
        return self._name(name) in self._files_by_name or self._integer_layer(name) is not None

    def _integer_layer(self, name: str) -> str | None:
        """The common prefix of a layer's tensors, if the weight `name` is stored in a format of `integers`."""
        if not self._quantization or not name.endswith(".weight"):
            return None
        layer = name.removesuffix("weight")
        for suffix in integers.SUFFIXES:
            if (found := self._name(layer + suffix)) in self._files_by_name:
                return found.removesuffix(suffix)
        found = self._name(name)
        return found.removesuffix("weight") if self._stored_dtype(found) in ("I8", "U8") else None

    def _stored_dtype(self, name: str) -> str:
        """The name that safetensors has for the dtype; "" if there is no such tensor."""
        if name not in self._files_by_name:
            return ""
        return self._open(self._files_by_name[name]).get_slice(name).get_dtype()

    def shape(self, name: str) -> tuple[int, ...]:
        name = self._name(name)
        return tuple(self._open(self._files_by_name[name]).get_slice(name).get_shape())

    def load(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor:
        if part is not None and self._splits_block(name, shape, part):
            return copied_part(self.load(name, shape), part)
        tensor, scale = self._read(name, shape, part)
        return dequantize(name, tensor, scale, self._block, self.dtype)

    def scaled(self, name: str, shape: Sequence[int], part: Part | None = None) -> Fp8Weight | None:
        if self._products is Products.NONE or (self._products is Products.STORED and not self._is_fp8(name)):
            return None
        if part is not None and self._splits_block(name, shape, part):
            return None
        tensor, scale = self._read(name, shape, part)
        if tensor.dtype.itemsize > 1:
            return Fp8Weight.of(tensor)
        return read_scaled(name, tensor, scale, self._block)

    def _splits_block(self, name: str, shape: Sequence[int], part: Part) -> bool:
        """Whether an end of the part lies within a block of values that share a scale."""
        scale = self._scale(name) if self._is_fp8(name) else None
        return scale is not None and part_of_scale(scale, shape, self._block, part) is None

    def _is_fp8(self, name: str) -> bool:
        return self._stored_dtype(self._name(name)) == "F8_E4M3"

    def _read(self, name: str, shape: Sequence[int], part: Part | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(a tensor as stored, its scale if it is in FP8 and has one), or the same of a part. Formats of `integers` are
        dequantized."""
        if (layer := self._integer_layer(name)) is not None:
            whole = self._dequantized(name, layer, shape)
            return (whole if part is None else copied_part(whole, part)), None
        name = self._name(name)
        if name not in self._files_by_name:
            raise ValueError(f"the checkpoint has no tensor {name}")
        first = name in self._unread  # a matrix is read twice if `scaled` turns out not to be usable
        self._unread.discard(name)
        stored = self._open(self._files_by_name[name]).get_slice(name)
        if tuple(stored.get_shape()) != tuple(shape):
            raise ValueError(f"{name} has shape {list(stored.get_shape())}, config.json says {list(shape)}")
        if part is None:
            tensor = self._open(self._files_by_name[name]).get_tensor(name)
        else:
            tensor = stored[(slice(None),) * part.dim + (slice(part.start, part.stop),)].contiguous()
        self._bar.update(tensor.nbytes if first else 0)
        if tensor.dtype.itemsize > 1:
            return tensor, None
        scale = self._scale(name)
        return tensor, scale if part is None or scale is None else part_of_scale(scale, shape, self._block, part)

    def _dequantized(self, name: str, layer: str, shape: Sequence[int]) -> torch.Tensor:
        with _named(name):
            found = integers.read(lambda suffix: self.get(layer + suffix), self._quantization)
        if found is None:
            raise ValueError(f"{name} is stored in integers, and the checkpoint has no {name}_scale")
        _check_shape(name, found, shape)
        self.num_dequantized += 1
        return found.to(self.dtype)

    def integers(self, name: str, shape: Sequence[int], part: Part | None = None) -> None:
        """Only GGUF files have such."""

    def int4(self, name: str, shape: Sequence[int], part: Part | None = None) -> Int4 | None:
        layer = self._integer_layer(name) if self.packed else None
        if layer is None:
            return None
        with _named(name):
            stored = integers.read_integers(lambda suffix: self.get(layer + suffix), self._quantization)
        if stored is None or stored.bits != 4 or stored.groups is not None:
            return None
        _check_shape(name, stored.values, shape)
        with _named(name):
            return Int4.of(stored.values, stored.scales, stored.zeros, self.dtype, part)

    def _scale(self, name: str) -> torch.Tensor | None:
        return next((self.get(name + suffix) for suffix in SCALES if name + suffix in self), None)

    def get(self, name: str) -> torch.Tensor | None:
        name = self._name(name)
        if name not in self._files_by_name:
            return None
        tensor = self._open(self._files_by_name[name]).get_tensor(name)
        self._bar.update(tensor.nbytes if name in self._unread else 0)
        self._unread.discard(name)
        return tensor

    def bytes(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        tensor = self.get(name)
        if tensor is None:
            raise ValueError(f"the checkpoint has no tensor {name}")
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != torch.uint8:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{name} is {kind} {list(tensor.shape)}, by config.json it is uint8 {list(shape)}")
        return tensor

    def unused(self) -> list[str]:
        """Names of tensors that were not requested, except SIDE_TENSORS and those of vision encoders. If there are any,
        the checkpoint may be that of another model."""
        unread = (name for name in self._unread if not name.removeprefix("model.").startswith(VISION_PREFIXES))
        return sorted(name for name in unread if not name.endswith(SIDE_TENSORS))

    def close(self) -> None:
        """Close the files, and complete the progress bar, which has not counted headers and unused tensors."""
        self._bar.update(self._bar.total - self._bar.n)
        self._bar.close()
        self._files.clear()


def stored_name(name: str, stored: Container[str]) -> str:
    """The tensor's name among those `stored` in a checkpoint: one that was saved without its head lacks the prefix
    `model.`, and multimodal ones have another prefix."""
    bare = name.removeprefix("model.")
    others = (name, bare, f"language_model.{name}", f"model.language_model.{bare}")
    return next((other for other in others if other in stored), name)


def weight_files(folder: Path) -> list[Path]:
    """As in transformers: model.safetensors, or the shards that an index names, or all safetensors of the folder.
    ValueError says what is missing."""
    single = folder / SINGLE
    if not single.is_file() and (index := read_json(folder / INDEX).get("weight_map")):
        shards = {file: folder / file for file in sorted(set(_shard_names(folder / INDEX, index)))}
        missing = [file for file, path in shards.items() if not path.is_file()]
        if missing:
            raise ValueError(f"{folder} lacks {len(missing)} of {len(shards)} shards: {', '.join(missing[:5])}")
        return list(shards.values())
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    foreign = [path.name for path in paths if path.match(ORIGINAL_FILES)]
    paths = [path for path in paths if path.name not in foreign]
    if foreign and not paths:
        raise ValueError(f"{folder} holds no safetensors of transformers, only {', '.join(foreign)}: convert them")
    if not paths:
        found = {path.suffix for path in folder.iterdir()}
        others = sorted(found & {".bin", ".pt", ".pth"})
        hint = f"; convert its {' and '.join(others)} files to safetensors" if others else ""
        hint = "; give one of its .gguf files, not the folder" if ".gguf" in found else hint
        raise ValueError(f"{folder} holds no safetensors{hint}")
    return paths


def _shard_names(path: Path, index: Any) -> Iterable[str]:
    """The files that an index names. ValueError if one is not in its folder."""
    names = list(index.values()) if isinstance(index, dict) else [index]
    for name in names:
        if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{path}: weight_map names {reprlib.repr(name)}, expected the names of files beside it")
    return names


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Name the weight in errors about tensors that do not fit together."""
    try:
        yield
    except (ValueError, RuntimeError, IndexError) as error:
        raise ValueError(f"{name}: {error}") from error


def _check_shape(name: str, found: torch.Tensor, shape: Sequence[int]) -> None:
    if tuple(found.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(found.shape)}, config.json says {list(shape)}")


def _begins_with(path: Path, start: bytes) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(start)) == start
