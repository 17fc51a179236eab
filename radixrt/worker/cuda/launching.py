"""How kernels are launched, each while the one ahead still runs (programmatic dependent launch, Hopper and newer):

    kernel n      |---- work ----|
    kernel n + 1      |launch, set up, wait|---- work ----|

A kernel that `launch` launches has EARLY as its last parameter and calls `wait` before it reads what a kernel writes,
or writes at all. By then all of the kernel ahead is done and seen, and with it, since that one waited as well, all
before. Kernels of others, in between, wait as ever (bench/early.py).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

Again = dict[str, Any]
"""Kernels that a step has launched already, by name, when it launches them for every layer with tensors and numbers of
the same kinds: without asking what kinds they are (10 to 20 µs each time), they cost a third."""


@functools.cache
def launches_early() -> bool:
    """Whether the device can; one process has one."""
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


def launch(kernel: Any, grid: tuple[int, ...], again: Again | None, *args: Any, **options: Any) -> Any:
    """A kernel, whose last parameter EARLY is not among `args`, over `grid`; see Again, with which a grid has three
    sizes. Gives the compiled kernel; None where it is interpreted."""
    early = launches_early()
    known = again.get(kernel.__name__) if again is not None else None
    if known is not None:
        known[grid](*args, early)
        return known
    if early:
        options["launch_pdl"] = True
    compiled = kernel[grid](*args, early, **options)
    if again is not None and compiled is not None:  # the interpreter compiles nothing
        again[kernel.__name__] = compiled
    return compiled


@triton.jit
def wait(EARLY: tl.constexpr, NEXT: tl.constexpr = True):
    """Until the kernel ahead has ended. Then the next one may be launched, unless without NEXT it waits for this one to
    end: where each program fills a multiprocessor, those of the next one would gather where the first of them end."""
    if EARLY:
        gdc_wait()
        if NEXT:
            gdc_launch_dependents()
