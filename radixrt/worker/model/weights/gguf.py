"""Reads the tensors of a GGUF file (see `checkpoint.gguf`): dequantized, or on a CPU in integers."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from radixrt.checkpoint.gguf.file import StoredTensor, read_gguf
from radixrt.worker.model.layers.int_linear import IntWeight, concatenate_ints
from radixrt.worker.model.parallel.sharding import Part
from radixrt.worker.model.weights.gguf_integers import KINDS, read_integers
from radixrt.worker.model.weights.weights import copied_part

CHUNK = 1 << 22
"""About how many elements are dequantized at once, in float32."""
SHIFTED_NORMS = ("gemma", "gemma2", "gemma3")
"""Architectures whose norms are stored with the 1 that transformers adds to them."""
COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that config.json has."""


class GgufWeights:
    """The tensors of a GGUF file, by their names in transformers. Each is read when it is requested; a progress bar on
    stderr counts bytes. With `keep`, matrices in a format of `gguf_integers.KINDS` stay in integers.

    ValueError if the file is broken, or a tensor is missing, has another shape, or is in a format that is not read.
    """

    packed = False
    num_dequantized = 0

    def __init__(
        self, path: Path, dtype: torch.dtype, device: torch.device, progress: bool = True, keep: bool = False
    ) -> None:
        import gguf

        self.dtype = dtype
        self._device = device
        self._keep = keep
        self._file = file = read_gguf(path.readlink() if path.is_symlink() else path)
        self._gguf: Any = gguf
        architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture)
        self._names = gguf.get_tensor_name_map(architecture, file.field("block_count"))
        self._open: dict[Path, mmap.mmap] = {}
        self._unread = set(file.tensors)
        size = sum(self._num_bytes(name) for name in file.tensors)
        self._bar = tqdm(
            total=size, desc="loading weights", unit="B", unit_scale=True, file=sys.stderr, mininterval=0.5,
            disable=not progress,
        )  # fmt: skip

    def _name(self, name: str) -> str:
        return str(self._names.get_name(name, try_suffixes=(".weight", ".bias")) or name)

    def __contains__(self, name: str) -> bool:
        return self._name(name) in self._file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._name(name)].shape

    def load(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor:
        whole = self._dequantized(self._checked(name, shape), self.dtype)
        return (whole if part is None else copied_part(whole, part)).to(self._device)

    def _checked(self, name: str, shape: Sequence[int]) -> str:
        """The stored name of a tensor of the given shape."""
        stored = self._name(name)
        if stored not in self._file.tensors:
            raise ValueError(f"the checkpoint has no tensor {name} ({stored})")
        if (found := self._file.tensors[stored].shape) != tuple(shape):
            raise ValueError(f"{name} has shape {list(found)}, config.json says {list(shape)}")
        return stored

    def get(self, name: str) -> torch.Tensor | None:
        stored = self._name(name)
        if stored not in self._file.tensors:
            return None
        return self._dequantized(stored, torch.float32).to(self._device)

    def scaled(self, name: str, shape: Sequence[int], part: Part | None = None) -> None:
        """Nothing is stored in FP8."""

    def int4(self, name: str, shape: Sequence[int], part: Part | None = None) -> None:
        """Nothing is kept in 4 bits."""

    def integers(self, name: str, shape: Sequence[int], part: Part | None = None) -> IntWeight | None:
        if not self._keep or name not in self or self._kind(self._name(name)).name not in KINDS:
            return None
        stored = self._checked(name, shape)
        rows, columns = shape
        step = max(1, CHUNK // columns)
        whole = concatenate_ints([self._integers(stored, at, min(at + step, rows)) for at in range(0, rows, step)])
        self._count(stored)
        order = self._unpermuted(stored, torch.arange(rows))
        whole = whole.take(order) if self._is_permuted(stored) else whole
        return whole if part is None else whole.part(part)

    def _integers(self, name: str, start: int, stop: int) -> IntWeight:
        return read_integers(self._kind(name).name, self._stored_rows(name, start, stop), self._rows(name, start, stop))

    def bytes(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        raise ValueError(f"{name} is not stored in bytes")

    def _dequantized(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor as transformers has it, on the CPU; a few rows at a time, since float32 takes several times the
        memory of what is stored."""
        tensor = self._file.tensors[name]
        *rows, columns = tensor.shape
        count = math.prod(rows)
        whole = torch.empty(count, columns, dtype=dtype)
        step = max(1, CHUNK // columns)
        for at in range(0, count, step):
            values = torch.from_numpy(self._rows(name, at, min(at + step, count)))
            whole[at : at + step] = values - 1 if self._is_shifted(name) else values
        self._count(name)
        return self._unpermuted(name, whole.reshape(tensor.shape))

    def _count(self, name: str) -> None:
        """Count a tensor as read."""
        self._bar.update(self._num_bytes(name) if name in self._unread else 0)
        self._unread.discard(name)

    def _rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """float32[N, columns]: rows of a tensor."""
        kind = self._kind(name)
        try:
            return self._gguf.dequantize(self._stored_rows(name, start, stop), kind).astype(np.float32)
        except NotImplementedError as error:
            path = self._file.tensors[name].path
            raise ValueError(f"{path}: {name} is in the format {kind.name}, which is not read") from error

    def _stored_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """uint8[N, bytes]: rows of a tensor."""
        tensor, size = self._file.tensors[name], self._row_bytes(name)
        content = self._content(tensor)
        at, count = tensor.offset + start * size, (stop - start) * size
        if at + count > len(content):
            raise ValueError(f"{tensor.path} is cut off: {name} does not end")
        return np.frombuffer(content, np.uint8, count, at).reshape(stop - start, size)

    def _content(self, tensor: StoredTensor) -> mmap.mmap:
        if tensor.path not in self._open:
            with tensor.path.open("rb") as file:
                self._open[tensor.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._open[tensor.path]

    def _kind(self, name: str) -> Any:
        number = self._file.tensors[name].kind
        try:
            return self._gguf.GGMLQuantizationType(number)
        except ValueError as error:
            raise ValueError(f"{self._file.path}: {name} is in the format {number}, which is not known") from error

    def _row_bytes(self, name: str) -> int:
        values, size = self._gguf.GGML_QUANT_SIZES[self._kind(name)]
        columns = self._file.tensors[name].shape[-1]
        if columns % values:
            raise ValueError(f"{self._file.path}: rows of {name} are not whole blocks of {values} elements")
        return columns // values * size

    def _num_bytes(self, name: str) -> int:
        return math.prod(self._file.tensors[name].shape[:-1]) * self._row_bytes(name)

    def _is_shifted(self, name: str) -> bool:
        return self._file.architecture in SHIFTED_NORMS and name.endswith("norm.weight")

    def _unpermuted(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Llama's RoPE rotates neighbours in llama.cpp, and the two halves of a head in transformers: rows of q and k
        are stored in another order."""
        if not self._is_permuted(name):
            return tensor
        heads = self._file.field("attention.head_count")
        if ".attn_k." in name:
            heads = self._file.field("attention.head_count_kv", heads)
        pairs = tensor.unflatten(0, (heads, -1, 2))
        return pairs.transpose(1, 2).reshape(tensor.shape)

    def _is_permuted(self, name: str) -> bool:
        return self._file.architecture == "llama" and (".attn_q." in name or ".attn_k." in name)

    def unused(self) -> list[str]:
        """Names in the file of tensors that were not requested."""
        return sorted(self._unread - set(COMPUTED))

    def close(self) -> None:
        """Close the files, and complete the progress bar, which has not counted unused tensors."""
        self._bar.update(self._bar.total - self._bar.n)
        self._bar.close()
        self._open.clear()
