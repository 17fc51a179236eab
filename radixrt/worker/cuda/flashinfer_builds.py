"""Compiles FlashInfer's kernels before they are called: side by side, once on a machine.

FlashInfer itself compiles a module of kernels when it is first called, and its callers wait for one after the other. A
module is one shared library: ninja compiles its files, under a lock that other processes wait for.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch

log = logging.getLogger("radixrt.cuda")

FA3_HEAD_DIMS = (64, 128, 256)
"""Head sizes that FA3 supports. For others the build would fail only after most of a minute."""
ERRORS = re.compile(r"\berror\b|\bfatal\b|not found|no such file|cannot find|killed|terminated|no space", re.IGNORECASE)
CORES_PER_MODULE = 8
"""A module has up to ten files, which ninja compiles at the same time."""
MAX_ERROR_LINE = 300
"""Characters; longer lines of ninja's output are the commands that it runs."""


@dataclass(frozen=True, slots=True)
class PrefillKernels:
    """Prefill over contiguous K and V, all in `dtype`, for heads of `head_dim` elements. Windows (`window`) and soft
    caps of the scores (`cap`) are compiled apart. `backend`: fa3 (Hopper) or fa2."""

    backend: str
    dtype: torch.dtype
    head_dim: int
    window: bool = False
    cap: bool = False

    def __str__(self) -> str:
        more = ", windows" * self.window + ", soft cap" * self.cap
        return f"attention ({self.backend}, {str(self.dtype).removeprefix('torch.')}, heads of {self.head_dim}{more})"


@dataclass(frozen=True, slots=True)
class SamplingKernels:
    """Softmax, and thresholds of top_k and top_p."""

    def __str__(self) -> str:
        return "sampling"


Kernels = PrefillKernels | SamplingKernels


class Spec(Protocol):
    """What is used of FlashInfer's JitSpec, a module to be compiled."""

    name: str

    @property
    def is_compiled(self) -> bool: ...

    def build(self, verbose: bool) -> None: ...

    def get_library_path(self) -> Path: ...


class BuildError(RuntimeError):
    """Kernels could not be compiled; says in a line or two why."""


def load_flashinfer() -> ModuleType:
    """Import FlashInfer. Raises RuntimeError if it is not installed or does not work."""
    try:
        import flashinfer
    except Exception as error:  # it looks for compilers and libraries when imported
        raise RuntimeError(f"FlashInfer cannot be imported: {error}") from error
    return flashinfer


def find_spec(kernels: Kernels) -> Spec:
    """The module with these kernels, by the same arguments with which FlashInfer asks for it when they are called.
    Raises any exception if FlashInfer is not there, or is another one."""
    load_flashinfer()
    from flashinfer.jit.attention import gen_batch_prefill_module
    from flashinfer.jit.sampling import gen_sampling_module

    if isinstance(kernels, SamplingKernels):
        return gen_sampling_module()
    dtypes, head_dims = (kernels.dtype,) * 3, (kernels.head_dim,) * 2
    no_positions, half_products = 0, False
    return gen_batch_prefill_module(
        kernels.backend, *dtypes, torch.int32, *head_dims, no_positions, kernels.window, kernels.cap, half_products
    )


def find_specs(wanted: Iterable[Kernels]) -> dict[Kernels, Spec]:
    """Each once, in order. Raises as `find_spec` does."""
    return {kernels: find_spec(kernels) for kernels in dict.fromkeys(wanted)}


class KernelBuilds:
    """Modules that threads compile; those that are compiled already are done at once.

    The first ones are compiled first, as many at a time as there are CORES_PER_MODULE for; one at a time if the
    environment has MAX_JOBS, the most files that ninja compiles at a time."""

    def __init__(self, specs: Mapping[Kernels, Spec]) -> None:
        self._results: dict[Kernels, Future[float]] = {kernels: Future() for kernels in specs}
        left = deque((kernels, spec) for kernels, spec in specs.items() if not spec.is_compiled)
        for kernels in specs.keys() - {kernels for kernels, _ in left}:
            self._results[kernels].set_result(0.0)
        self.compiling = tuple(kernels for kernels, _ in left)
        """Those that were not there."""
        if not left:
            return
        if missing := "; ".join(missing_tools()):
            for kernels in self.compiling:
                self._results[kernels].set_exception(BuildError(f"{kernels} cannot be compiled: {missing}"))
            return
        names = ", ".join(map(str, self.compiling))
        log.info("FlashInfer's kernels are compiled, once on this machine, in a minute or more: %s", names)
        threads = 1 if "MAX_JOBS" in os.environ else -(-len(os.sched_getaffinity(0)) // CORES_PER_MODULE)
        for _ in range(min(threads, len(left))):
            threading.Thread(target=self._build, args=(left,), name="kernel-build", daemon=True).start()

    def is_done(self, kernels: Kernels) -> bool:
        """Whether `wait` would not wait."""
        return kernels not in self._results or self._results[kernels].done()

    def wait(self, kernels: Kernels) -> float:
        """Wait until these are compiled: the seconds that took, 0.0 if they were there or nobody asked for them.
        Raises BuildError."""
        return self._results[kernels].result() if kernels in self._results else 0.0

    def _build(self, left: deque[tuple[Kernels, Spec]]) -> None:
        while True:
            try:
                kernels, spec = left.popleft()
            except IndexError:
                return
            began = time.monotonic()
            try:
                spec.build(verbose=False)
            except Exception as error:
                told = BuildError(f"{kernels} cannot be compiled: {explain(error)}")
                told.__cause__ = error
                self._results[kernels].set_exception(told)
            else:
                seconds = time.monotonic() - began
                log.info("FlashInfer's kernels were compiled in %.0f s: %s", seconds, kernels)
                self._results[kernels].set_result(seconds)


def missing_tools() -> Iterator[str]:
    """What is needed to compile, and is not where FlashInfer looks for it."""
    if not shutil.which("ninja"):
        beside = Path(sys.executable).parent / "ninja"
        yield (
            f"ninja is in {beside.parent}, which is not in PATH"
            if beside.is_file()
            else ("ninja is missing (pip install ninja)")
        )
    nvcc = _program("FLASHINFER_NVCC", f"{_cuda_home()}/bin/nvcc")
    if not shutil.which(nvcc):
        yield f"CUDA's compiler is missing: there is no {nvcc} (CUDA_HOME says where its folder is)"
    compiler = _program("CXX", "c++")
    if not shutil.which(compiler):
        yield f"a C++ compiler is missing: there is no {compiler} (install g++, or name one in CXX)"


def _program(variable: str, default: str) -> str:
    """The program that the environment names, without its arguments."""
    return (shlex.split(os.environ.get(variable, "")) or [default])[0]


def _cuda_home() -> str:
    """As FlashInfer finds it."""
    home, nvcc = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"), shutil.which("nvcc")
    return home or (str(Path(nvcc).parents[1]) if nvcc else "/usr/local/cuda")


def explain(error: Exception) -> str:
    """The lines of ninja's output that say what is wrong, at most three, of thousands of characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if len(line) <= MAX_ERROR_LINE and ERRORS.search(line)]
    text = "; ".join(telling[:3]) or (lines[-1][:MAX_ERROR_LINE] if lines else type(error).__name__)
    if re.search(r"\bkilled\b|terminated", text, re.IGNORECASE):
        text += " (if memory is short, MAX_JOBS=2 in the environment compiles two files at a time)"
    return text


def install_ahead(spec: Spec) -> Path:
    """Copy a compiled module to where FlashInfer looks first: no compiler, ninja or cache is needed there. Returns the
    copy. Raises OSError if FlashInfer's own folder cannot be written."""
    from flashinfer.jit import env

    library = Path(spec.get_library_path())
    target = Path(env.FLASHINFER_AOT_DIR) / spec.name / f"{spec.name}.so"
    if library != target:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        shutil.copyfile(library, partial)
        partial.replace(target)
    return target
