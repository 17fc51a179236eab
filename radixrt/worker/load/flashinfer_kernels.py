"""Which of FlashInfer's kernels a model needs; and `radixrt build-kernels`, which compiles them without weights, and
without a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable

import torch

from radixrt.config import WorkerConfig
from radixrt.worker.cuda.flashinfer_builds import (
    FA3_HEAD_DIMS,
    BuildError,
    KernelBuilds,
    Kernels,
    PrefillKernels,
    SamplingKernels,
    find_specs,
    install_ahead,
    load_flashinfer,
    missing_tools,
)
from radixrt.worker.load.capacity import look_up_shape
from radixrt.worker.load.options import Loaded, choose_dtype
from radixrt.worker.model.spec.spec import ModelSpec

ARCHS = "FLASHINFER_CUDA_ARCH_LIST"
"""The variable of the environment that FlashInfer reads when it is imported: architectures, as in `8.0 9.0a`."""
SAMPLING = SamplingKernels()

Capability = tuple[int, int]


def no_flashinfer(spec: ModelSpec) -> str:
    """The kind of attention that FlashInfer is not used for; "" if the model has none of these."""
    if spec.latent is not None:
        return "latent attention"
    if spec.attention.chunked and any(spec.windows):
        return "attention in chunks"
    return "layers with different heads" if spec.layers else ""


def backend_on(capability: Capability) -> str:
    return "fa3" if capability[0] == 9 else "fa2"


def attention_kernels(config: WorkerConfig, loaded: Loaded, capability: Capability) -> list[PrefillKernels]:
    """Those that attention needs before the first step, on a GPU of this compute capability. They read K and V in the
    activations' dtype, which pages of any dtype are converted to, and know no sinks, which are added afterwards."""
    spec, backend = loaded.spec, backend_on(capability)
    if config.deterministic or config.attention_backend in ("triton", "torch") or loaded.dtype.itemsize != 2:
        return []
    if no_flashinfer(spec) or not spec.attention_layers:
        return []
    head_dim = spec.layer(spec.attention_layers[0]).head_dim
    if backend == "fa3" and head_dim not in FA3_HEAD_DIMS:
        return []
    windows = sorted({window is not None for window in spec.attention_windows})
    cap = bool(spec.attention.score_cap)
    return [PrefillKernels(backend, loaded.dtype, head_dim, window, cap) for window in windows]


def sampling_kernels(config: WorkerConfig) -> list[SamplingKernels]:
    """Those that requests with top_k, top_p or min_p need; until they are there, the vocabulary is sorted."""
    return [] if config.attention_backend in ("triton", "torch") or config.deterministic else [SAMPLING]


# ---------------------------------------------------------------- radixrt build-kernels


def choose_archs(text: str) -> list[Capability]:
    """The compute capabilities of the GPUs to compile for: `text`, as in `8.0 9.0a`, else the environment's
    FLASHINFER_CUDA_ARCH_LIST, else those of the GPUs that are here. To be called before FlashInfer is imported.
    ValueError if there are none, or a name is not one."""
    text = text or os.environ.get(ARCHS, "")
    if not text:
        found = sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
        if not found:
            raise ValueError("no GPU is to be seen: name what it is to be compiled for, --cuda-arch-list 9.0a for H100")
        return found
    names = text.replace(",", " ").split()
    if wrong := next((name for name in names if not re.fullmatch(r"\d+\.\d[af]?", name)), ""):
        raise ValueError(f"--cuda-arch-list {text}: {wrong!r} is no architecture, such as 8.0, 8.9 or 9.0a")
    os.environ[ARCHS] = " ".join(names)
    return [(int(name.partition(".")[0]), int(re.sub(r"\D", "", name.partition(".")[2]))) for name in names]


def kernels_of_model(config: WorkerConfig, capabilities: Iterable[Capability]) -> list[Kernels]:
    """All that a worker of a model needs on any of these GPUs."""
    loaded = look_up_shape(config)
    found = [each for capability in capabilities for each in attention_kernels(config, loaded, capability)]
    return [*found, *sampling_kernels(config)]


def kernels_of_heads(head_dims: Iterable[int], dtype: str, capabilities: Iterable[Capability]) -> list[Kernels]:
    """The same for any model with such heads, without windows. `dtype` is as that of WorkerConfig; auto: bfloat16."""
    chosen = choose_dtype("bfloat16" if dtype == "auto" else dtype, {}, torch.device("cuda"))
    if chosen.itemsize != 2:
        raise ValueError(f"--dtype {dtype}: FlashInfer has kernels for bfloat16 and float16")
    found = [PrefillKernels(backend_on(each), chosen, head_dim) for each in capabilities for head_dim in head_dims]
    for kernels in found:
        if kernels.backend == "fa3" and kernels.head_dim not in FA3_HEAD_DIMS:
            raise ValueError(f"--head-dim {kernels.head_dim}: for Hopper there are heads of {FA3_HEAD_DIMS}")
    return [*found, SAMPLING]


def build(wanted: Iterable[Kernels], say: Callable[[str], None], ahead: bool = False) -> int:
    """Compile kernels, each once, and say of each what became of it; with `ahead`, also copy them into FlashInfer's own
    folder (`install_ahead`). Returns how many failed. ValueError says what is missing to compile any."""
    try:
        version = load_flashinfer().__version__
        specs = find_specs(wanted)
    except Exception as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == "flashinfer":
            raise ValueError("FlashInfer is not installed (pip install 'radixrt[cuda]')") from error
        raise ValueError(f"FlashInfer does not say what it compiles: {error}") from error
    if not all(spec.is_compiled for spec in specs.values()) and (missing := "; ".join(missing_tools())):
        raise ValueError(missing)
    builds, failed = KernelBuilds(specs), 0
    for kernels, spec in specs.items():
        try:
            seconds = builds.wait(kernels)
            path = install_ahead(spec) if ahead else spec.get_library_path()
        except (BuildError, OSError) as error:
            failed += 1
            say(str(error) if isinstance(error, BuildError) else f"{kernels}: {error}")
            continue
        took = f"compiled in {seconds:.0f} s" if kernels in builds.compiling else "there already"
        say(f"{kernels}: {took}, {path}")
    say(f"FlashInfer {version}: {len(specs) - failed} of {len(specs)} are there")
    return failed
