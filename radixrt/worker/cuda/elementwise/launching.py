"""Launches each kernel while the one before still runs (programmatic dependent launch, Hopper and newer):

    kernel n      |---- work ----|
    kernel n + 1      |launch, set up, wait|---- work ----|

A kernel for `launch` has EARLY as its last parameter, and calls `wait` before it reads what another kernel writes and
before it writes anything. When `wait` returns, the kernel before has ended and its writes are visible, and so are those
of all earlier kernels, since that one waited as well. Kernels in between that are launched otherwise wait as usual
(bench/early.py).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)
KernelCache = dict[str, Any]
"""Compiled kernels by name, for steps that launch the same kernels for every layer, with arguments of the same types
and alignments. It avoids Triton's inspection of the arguments, 10 to 20 µs a launch, two thirds of its cost."""


@functools.cache
def launches_early() -> bool:
    """Whether the device supports programmatic dependent launch. (A process uses one device.)"""
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


def launch(kernel: Any, grid: tuple[int, ...], cache: KernelCache | None, *args: Any, **options: Any) -> Any:
    """Launch a kernel over `grid`; its last parameter, EARLY, is not in `args`. With a `cache`, `grid` must have three
    sizes. Returns the compiled kernel; None in the interpreter."""
    early = launches_early()
    known = cache.get(kernel.__name__) if cache is not None else None
    if known is not None:
        known[grid](*args, early)
        return known
    if early:
        options["launch_pdl"] = True
    compiled = kernel[grid](*args, early, **options)
    if cache is not None and compiled is not None:  # the interpreter compiles nothing
        cache[kernel.__name__] = compiled
    return compiled


@functools.cache
def num_sms(device: torch.device) -> int:
    """The number of multiprocessors; that of an H200 where there is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@triton.jit
def wait(EARLY: tl.constexpr, NEXT: tl.constexpr = True):
    """Wait until the kernel before has ended, and then let the next kernel be launched. Without NEXT, that is launched
    only when this one ends: where each program fills a multiprocessor, the next kernel's programs would gather on those
    multiprocessors that become free first."""
    if EARLY:
        gdc_wait()
        if NEXT:
            gdc_launch_dependents()
