"""A `Capacity` as text, for people."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from radixrt.worker.load.capacity import Capacity, Fit

GIB = 1 << 30
UNITS = (GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")
SHORT = {"fp8_e4m3": "FP8", "fp8_e5m2": "FP8 e5m2", "bfloat16": "BF16", "float16": "FP16", "float32": "FP32"}


def to_text(capacity: Capacity) -> str:
    """Lines about the model, a table of the GPUs on which it fits, and what the numbers mean."""
    table = _table(capacity) if capacity.fits else ["It fits on none of these GPUs."]
    return "\n".join([*_model(capacity), "", *table, "", *_notes(capacity)])


def _model(capacity: Capacity) -> Iterator[str]:
    sizes, names = capacity.token_bytes.values(), " or ".join(SHORT[name] for name in capacity.token_bytes)
    yield f"{capacity.model}: {capacity.model_type}, {capacity.layers} layers, contexts of {capacity.max_model_len:,}"
    yield f"  weights   {_size(capacity.weight_bytes)} in memory, {_size(capacity.disk_bytes)} on disk"
    yield f"  a token   {' or '.join(map(_size, sizes))} in {names} pages"
    yield f"            {capacity.attention}"
    yield f"  an agent  {' or '.join(_size(size * capacity.context) for size in sizes)} for {capacity.context:,} tokens"
    if capacity.state_bytes:
        yield f"            {_size(capacity.state_bytes)} for its recurrent states"
    held = " or ".join(f"{GIB // size:,}" for size in sizes)
    yield f"  1 GiB of host memory (--kv-offloading-size) keeps {held} evicted tokens"


def _table(capacity: Capacity) -> Iterator[str]:
    """A line for each GPU and size, with columns for each dtype of pages."""
    dtypes = list(capacity.token_bytes)
    columns = [f"{what} {SHORT[dtype]}" for what in ("tokens", "agents") for dtype in dtypes]
    rows = [("GPU", "tp", "weights", "for KV", *columns)]
    for (gpu, ranks), fits in groupby(capacity.fits, key=lambda fit: (fit.gpu, fit.ranks)):
        by_dtype = {fit.kv_cache_dtype: fit for fit in fits}
        one, each = next(iter(by_dtype.values())), [by_dtype.get(dtype) for dtype in dtypes]
        cells = [f"{fit.tokens:,}{_mark(fit)}" if fit else "- " for fit in each]
        cells += [f"{fit.agents:,}{_mark(fit)}" if fit else "- " for fit in each]
        rows.append((gpu, str(ranks), _size(one.weight_bytes), _size(one.cache_bytes), *cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(
            f"{cell:{'>' if i else '<'}{width}}" for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )


def _mark(fit: Fit) -> str:
    return "*" if fit.is_default else " "


def _notes(capacity: Capacity) -> Iterator[str]:
    if capacity.fits:
        low, high = (of(fit.reserved_bytes for fit in capacity.fits) for of in (min, max))
        yield "tp: GPUs together (--tensor-parallel-size); bytes are of each GPU. *: where --kv-cache-dtype is auto."
        yield f"agents: contexts of {capacity.context:,} tokens at once that share nothing; what is shared counts once."
        between = _size(low) if _size(low) == _size(high) else f"{_size(low)} to {_size(high)}"
        yield f"Of each GPU {capacity.gpu_memory_utilization:.0%} is used, with {between}"
        yield "for CUDA and a step: estimates of what a worker measures. All else is computed as a worker does."
    for name, why in capacity.too_small.items():
        yield f"Not on {name}: {why}."


def _size(size: int) -> str:
    """Bytes in the largest unit of which there is a tenth."""
    unit, name = next(((unit, name) for unit, name in UNITS if size >= unit / 10), UNITS[-1])
    return f"{size / unit:,.1f} {name}"
