"""Reads the header of a GGUF file, or of all files of a model that was split.

The package `gguf` has a reader as well, which makes several arrays for each string: 33 s for the 262144 tokens of
Gemma 3, where this one takes 1 s.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its format in `struct`."""
FLOAT32, STRING, ARRAY = 6, 8, 9
MAX_DIMS = 4
ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is. `shape` is as in PyTorch, the rows first; `kind` is ggml's number of its data type; `offset`
    counts bytes from the start of the file."""

    path: Path
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """`metadata`: values by key, arrays as lists; that of the first file if the model was split. `tensors`: those of
    all files, by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def field(self, name: str, default: Any = None) -> Any:
        """A value of the architecture: `context_length` for the key `llama.context_length`."""
        return self.metadata.get(f"{self.architecture}.{name}", default)


def read_gguf(path: Path) -> GgufFile:
    """The header of a file; if it is one of several of a model (`-00001-of-00003.gguf`), those of all. ValueError names
    the file and what is wrong with it."""
    metadata: dict[str, Any] | None = None
    tensors: dict[str, StoredTensor] = {}
    for shard in shards(path):
        one = _read(shard)
        metadata = one.metadata if metadata is None else metadata
        tensors |= one.tensors
    return GgufFile(path, metadata or {}, tensors)


def shards(path: Path) -> list[Path]:
    """All files of the model, of which `path` is one. ValueError names those that are missing."""
    match = SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    paths = [path.with_name(f"{stem}-{i + 1:05}-of-{count}.gguf") for i in range(int(count))]
    if missing := [other.name for other in paths if not other.is_file()]:
        raise ValueError(f"{path.parent} lacks {len(missing)} of {count} files: {', '.join(missing[:5])}")
    return paths


def _read(path: Path) -> GgufFile:
    try:
        if not path.stat().st_size:
            raise ValueError("it is empty")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Header(path, content).read()
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{path} is cut off, or is no GGUF file: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: a text is not UTF-8: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


class _Header:
    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path, self._content, self._at = path, content, 0

    def read(self) -> GgufFile:
        if self._content[:4] != MAGIC:
            raise ValueError("it is not a GGUF file")
        self._at = 4
        version, num_tensors, num_values = self._unpack("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"version {version} of the format is not read; {', '.join(map(str, VERSIONS))} are")
        metadata = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(*self._unpack("I"))
        found = [self._tensor() for _ in range(num_tensors)]
        step = metadata.get("general.alignment") or ALIGNMENT
        start = -(-self._at // step) * step
        tensors = {name: StoredTensor(self._path, shape, kind, start + at) for name, shape, kind, at in found}
        for name, tensor in tensors.items():
            if tensor.offset > len(self._content):
                raise ValueError(f"it is cut off: tensor {name} is missing; download it again")
        return GgufFile(self._path, metadata, tensors)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._unpack("I")
        if num_dims > MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        shape = self._unpack(f"{num_dims}Q")[::-1]
        kind, offset = self._unpack("IQ")
        return name, shape, kind, offset

    def _unpack(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from("<" + form, self._content, self._at)
        self._at += struct.calcsize("<" + form)
        return found

    def _string(self) -> str:
        (size,) = self._unpack("Q")
        text = self._content[self._at : self._at + size]
        if len(text) != size:
            raise ValueError(f"it is cut off: a text of {size} bytes does not end")
        self._at += size
        return text.decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array()
        if kind not in SCALARS:
            raise ValueError(f"a value is of type {kind}, which is not known")
        (value,) = self._unpack(SCALARS[kind])
        return shortest(value) if kind == FLOAT32 else value

    def _array(self) -> list[Any]:
        kind, count = self._unpack("IQ")
        if count > len(self._content):
            raise ValueError(f"it is cut off: an array of {count} values does not end")
        if kind in SCALARS:
            return list(self._unpack(f"{count}{SCALARS[kind]}"))
        return [self._value(kind) for _ in range(count)]


def shortest(value: float) -> float:
    """A float32 as the number that it was made of: the one with the fewest digits that gives it, 1e-05 for
    9.999999747378752e-06."""
    for digits in range(6, 10):
        near = float(f"{value:.{digits}g}")
        if struct.pack("<f", near) == struct.pack("<f", value):
            return near
    return value
