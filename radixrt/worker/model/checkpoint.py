"""Reading a checkpoint folder: config.json, safetensors in one or many shards, end-of-sequence ids."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from radixrt.worker.model import integers
from radixrt.worker.model.quantized import SCALES, Products, dequantized, part_of_scale, read_scaled
from radixrt.worker.model.scaled import BLOCK, Scaled
from radixrt.worker.model.sharding import Part

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OTHER_FORMS = "consolidated*"
"""Files of the same weights under other names, beside those of transformers."""
SIDE_TENSORS = ("rotary_emb.inv_freq", "_scale", "_scale_inv")
SEEING = ("vision_tower.", "multi_modal_projector.", "mm_projector.", "visual.")
"""How names of tensors begin that make something of images."""
TOKENIZER_FILES = ("tokenizer_config", "special_tokens_map", "tokenizer")
LFS_POINTER = b"version https://git-lfs"
tqdm.monitor_interval = 0  # no thread of its own
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja"]
HUB_OTHERS = ["original/*", OTHER_FORMS]


class Weights(Protocol):
    """Where tensors come from: their names as transformers has them, their dtype and device as the worker wants."""

    def __contains__(self, name: str) -> bool:
        """Whether a tensor is there that need not be."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def packed(self) -> bool:
        """Experts in MXFP4 are kept so (`mxfp4.PackedStack`)."""

    def load(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor:
        """A tensor of that `shape`, or only a part of it."""

    def scaled(self, name: str, shape: Sequence[int], part: Part | None = None) -> Scaled | None:
        """A matrix for products in FP8, or a part of it; None if it is to be loaded for others."""

    def shape(self, name: str) -> tuple[int, ...]:
        """As it is stored; of a tensor that is there."""

    def get(self, name: str) -> torch.Tensor | None:
        """As it is stored, whatever its shape and dtype; None if there is no such tensor."""

    def bytes(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """A tensor of uint8 of that `shape`."""


def find(model: str) -> Path:
    """The folder of a checkpoint, downloaded if `model` is a hub name. ValueError if there is none."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES, ignore_patterns=HUB_OTHERS))
    except Exception as error:  # no network, no such name, not a valid name: all the same to the caller
        raise ValueError(f"{model} is neither a folder nor a model that the hub gave: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} where there is no such file. ValueError if the file is broken."""
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
    """Ids that end a sequence, of all files that name one: generation_config, config and the tokenizer's."""
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
    """The weights of a folder. Each tensor is read when it is asked for; a progress bar counts bytes on stderr.

    What is loaded of FP8 is multiplied with its scales, by row, or one for each `block` of rows and columns; `products`
    are in FP8, experts in MXFP4 stay so if `packed`. Weights of other forms (`integers`) are dequantized by the file's
    `quantization`. ValueError for a folder without safetensors, a shard that is
    missing or broken, a tensor that is missing, of another shape, or quantized in another way.
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
        self._products = products
        self._quantization = quantization or {}
        self._block = block
        self._device = device
        self._files: dict[Path, Any] = {}
        self._places = self._find_tensors(folder)
        self._unread = set(self._places)
        size = sum(path.stat().st_size for path in set(self._places.values()))
        self._bar = tqdm(
            total=size, desc="loading weights", unit="B", unit_scale=True, file=sys.stderr, mininterval=0.5,
            disable=not progress,
        )  # fmt: skip

    def _find_tensors(self, folder: Path) -> dict[str, Path]:
        """Tensor name -> shard, as transformers looks for them: in one file, or in those that an index names, whichever
        it says, or in whatever there is."""
        single = folder / SINGLE
        if not single.is_file() and (index := read_json(folder / INDEX).get("weight_map")):
            shards = {file: folder / file for file in sorted(set(index.values()))}
            missing = [file for file, path in shards.items() if not path.is_file()]
            if missing:
                raise ValueError(f"{folder} lacks {len(missing)} of {len(shards)} shards: {', '.join(missing[:5])}")
            return {name: path for path in shards.values() for name in self._open(path).keys()}
        paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
        foreign = [path.name for path in paths if path.match(OTHER_FORMS)]
        paths = [path for path in paths if path.name not in foreign]
        if foreign and not paths:
            raise ValueError(f"{folder} holds no safetensors of transformers, only {', '.join(foreign)}: convert them")
        if not paths:
            others = sorted({path.suffix for path in folder.iterdir()} & {".bin", ".gguf", ".pt", ".pth"})
            hint = f"; convert its {' and '.join(others)} files to safetensors" if others else ""
            raise ValueError(f"{folder} holds no safetensors{hint}")
        return {name: path for path in paths for name in self._open(path).keys()}

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(path, "pt", device=str(self._device))
            except (SafetensorError, OSError) as error:
                if _begins_with(path, LFS_POINTER):
                    raise ValueError(f"{path} is a pointer of git-lfs, not the file: run git lfs pull") from error
                raise ValueError(f"{path} cannot be read: {error}") from error
        return self._files[path]

    def _name(self, name: str) -> str:
        """The name in this checkpoint: one saved without its head lacks `model.`, one that sees has more before it."""
        bare = name.removeprefix("model.")
        others = (bare, f"language_model.{name}", f"model.language_model.{bare}")
        return name if name in self._places else next((other for other in others if other in self._places), name)

    def __contains__(self, name: str) -> bool:
        return self._name(name) in self._places or self._integer_layer(name) is not None

    def _integer_layer(self, name: str) -> str | None:
        """The beginning of the names of a layer's tensors, if its weight is stored in a form of `integers`."""
        if not self._quantization or not name.endswith(".weight"):
            return None
        layer = name.removesuffix("weight")
        for suffix in integers.SUFFIXES:
            if (found := self._name(layer + suffix)) in self._places:
                return found.removesuffix(suffix)
        found = self._name(name)
        return found.removesuffix("weight") if self._stored_dtype(found) in ("I8", "U8") else None

    def _stored_dtype(self, name: str) -> str:
        """As safetensors calls it; "" if there is no such tensor."""
        return self._open(self._places[name]).get_slice(name).get_dtype() if name in self._places else ""

    def shape(self, name: str) -> tuple[int, ...]:
        name = self._name(name)
        return tuple(self._open(self._places[name]).get_slice(name).get_shape())

    def load(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor:
        if part is not None and self._cuts_a_block(name, shape, part):
            return _taken(self.load(name, shape), part)
        tensor, scale = self._read(name, shape, part)
        return dequantized(name, tensor, scale, self._block, self.dtype)

    def scaled(self, name: str, shape: Sequence[int], part: Part | None = None) -> Scaled | None:
        if self._products is Products.NONE or (self._products is Products.STORED and not self._is_fp8(name)):
            return None
        if part is not None and self._cuts_a_block(name, shape, part):
            return None
        tensor, scale = self._read(name, shape, part)
        if tensor.dtype.itemsize > 1:
            return Scaled.of(tensor)
        return read_scaled(name, tensor, scale, self._block)

    def _cuts_a_block(self, name: str, shape: Sequence[int], part: Part) -> bool:
        """Whether what has one scale lies on both sides of a part's end."""
        scale = self._scale(name) if self._is_fp8(name) else None
        return scale is not None and part_of_scale(scale, shape, self._block, part) is None

    def _is_fp8(self, name: str) -> bool:
        return self._stored_dtype(self._name(name)) == "F8_E4M3"

    def _read(self, name: str, shape: Sequence[int], part: Part | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(a tensor, its scale if it is of FP8 and there is one), or those of a part."""
        if (layer := self._integer_layer(name)) is not None:
            whole = self._dequantized(name, layer, shape)
            return (whole if part is None else _taken(whole, part)), None
        name = self._name(name)
        if name not in self._places:
            raise ValueError(f"the checkpoint has no tensor {name}")
        first = name in self._unread  # what is not kept in FP8 after all is read again
        self._unread.discard(name)
        stored = self._open(self._places[name]).get_slice(name)
        if tuple(stored.get_shape()) != tuple(shape):
            raise ValueError(f"{name} has shape {list(stored.get_shape())}, config.json says {list(shape)}")
        if part is None:
            tensor = self._open(self._places[name]).get_tensor(name)
        else:
            tensor = stored[(slice(None),) * part.dim + (slice(part.start, part.stop),)].contiguous()
        self._bar.update(tensor.nbytes if first else 0)
        if tensor.dtype.itemsize > 1:
            return tensor, None
        scale = self._scale(name)
        return tensor, scale if part is None or scale is None else part_of_scale(scale, shape, self._block, part)

    def _dequantized(self, name: str, layer: str, shape: Sequence[int]) -> torch.Tensor:
        try:
            found = integers.read(lambda suffix: self.get(layer + suffix), self._quantization)
        except (ValueError, RuntimeError, IndexError) as error:  # of tensors whose shapes do not fit together
            raise ValueError(f"{name}: {error}") from error
        if found is None:
            raise ValueError(f"{name} is stored in integers, and the checkpoint has no {name}_scale")
        if tuple(found.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {list(found.shape)}, config.json says {list(shape)}")
        return found.to(self.dtype)

    def _scale(self, name: str) -> torch.Tensor | None:
        return next((self.get(name + suffix) for suffix in SCALES if name + suffix in self), None)

    def get(self, name: str) -> torch.Tensor | None:
        name = self._name(name)
        if name not in self._places:
            return None
        tensor = self._open(self._places[name]).get_tensor(name)
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
        """Tensors that nobody asked for, but for those that say nothing of their own, or of text: the model may be
        another one."""
        unread = (name for name in self._unread if not name.removeprefix("model.").startswith(SEEING))
        return sorted(name for name in unread if not name.endswith(SIDE_TENSORS))

    def close(self) -> None:
        """Let go of the files, all of them read but for headers and tensors that nobody wants."""
        self._bar.update(self._bar.total - self._bar.n)
        self._bar.close()
        self._files.clear()


class Renamed:
    """Weights that may be stored under other names. `pairs`: a part of a name, and its replacement if there is no
    tensor of the requested name."""

    def __init__(self, weights: Weights, pairs: Sequence[tuple[str, str]]) -> None:
        self._weights = weights
        self._pairs = pairs

    def _name(self, name: str) -> str:
        if name in self._weights:
            return name
        other = name
        for part, stored in self._pairs:
            other = other.replace(part, stored)
        return other if other in self._weights else name

    def __contains__(self, name: str) -> bool:
        return self._name(name) in self._weights

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    @property
    def packed(self) -> bool:
        return self._weights.packed

    def load(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor:
        return self._weights.load(self._name(name), shape, part)

    def scaled(self, name: str, shape: Sequence[int], part: Part | None = None) -> Scaled | None:
        return self._weights.scaled(self._name(name), shape, part)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(self._name(name))

    def get(self, name: str) -> torch.Tensor | None:
        return self._weights.get(self._name(name))

    def bytes(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        return self._weights.bytes(self._name(name), shape)


def _taken(whole: torch.Tensor, part: Part) -> torch.Tensor:
    """A part, which does not keep the whole alive."""
    return whole.narrow(part.dim, part.start, part.count).clone(memory_format=torch.contiguous_format)


def _begins_with(path: Path, start: bytes) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(start)) == start


class RandomWeights:
    """Weights for measuring speed without a checkpoint: normal with deviation 0.02, norms 1, biases 0; the same for
    the same seed, whatever the order of loading. Experts that are `packed` have the same deviation."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        products: Products = Products.NONE,
        packed: bool = False,
    ) -> None:
        self._seed = seed
        self.dtype = dtype
        self.packed = packed
        self._device = device
        self._products = products

    def load(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor:
        if part is not None:
            return _taken(self.load(name, shape), part)
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=self.dtype, device=self._device)
        if "norm" in name:
            return torch.ones(shape, dtype=self.dtype, device=self._device)
        values = torch.empty(shape, dtype=self.dtype, device=self._device)
        return values.normal_(0, 0.02, generator=self._generator(name))

    def scaled(self, name: str, shape: Sequence[int], part: Part | None = None) -> Scaled | None:
        return Scaled.of(self.load(name, shape, part)) if self._products is Products.ALL else None

    def __contains__(self, name: str) -> bool:
        return self.packed and name.endswith("_blocks")

    def bytes(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Uniform 4-bit values, whose standard deviation is 2.8, with a scale of 2**-7."""
        values = torch.empty(shape, dtype=torch.uint8, device=self._device)
        return values.fill_(120) if name.endswith("_scales") else values.random_(generator=self._generator(name))

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(self._seed + zlib.crc32(name.encode()))

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def get(self, name: str) -> None:
        return None

    def unused(self) -> list[str]:
        return []

    def close(self) -> None:
        """Nothing is held."""
