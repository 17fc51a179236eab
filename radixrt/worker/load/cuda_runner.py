"""Creates the runner of a GPU: finds out which kernels can be used, measures the memory of the largest
step, and uses the rest for pages."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from radixrt.config import WorkerConfig
from radixrt.messages import Run, Sampling
from radixrt.worker.cache.page_cache import PageCache
from radixrt.worker.cuda.attention.chunks import HELD_BYTES
from radixrt.worker.cuda.attention.ragged import FlashInfer
from radixrt.worker.cuda.attention.segments import MAX_COPIES
from radixrt.worker.cuda.attention.variants import Shape
from radixrt.worker.cuda.flashinfer_builds import KernelBuilds, Kernels, find_specs
from radixrt.worker.cuda.graphs.piecewise_graphs import kept_bytes, most_tokens
from radixrt.worker.cuda.host.host_pool import STAGING_BYTES
from radixrt.worker.cuda.latent import full_chunks
from radixrt.worker.cuda.latent.full_chunks import FullHeads
from radixrt.worker.cuda.latent.sparse import MAX_SCORES
from radixrt.worker.cuda.recurrent.delta_step import chunk_bytes
from radixrt.worker.cuda.runner import CudaRunner
from radixrt.worker.cuda.sampling.sampler import LateThresholds, Thresholds, find_thresholds
from radixrt.worker.execution.kv_pool import KVPool, StatePool
from radixrt.worker.execution.pool_sizes import GRAPH_BYTES, row_bytes
from radixrt.worker.load.flashinfer_kernels import (
    SAMPLING,
    attention_kernels,
    backend_on,
    no_flashinfer,
    sampling_kernels,
)
from radixrt.worker.load.kv_scales import Scales
from radixrt.worker.load.options import Loaded
from radixrt.worker.load.pools import make_pool, make_states, pool_tokens
from radixrt.worker.model.model import Model
from radixrt.worker.parallel.group import TorchGroup
from radixrt.worker.request import Request
from radixrt.worker.scheduler.plan_builder import MAX_SCORED_TOKENS
from radixrt.worker.scheduler.scheduler import Limits, Scheduler

log = logging.getLogger("radixrt.cuda")

GROUP_TOKENS = 1024
"""The most tokens of a step that has graphs, with several ranks: longer steps are summed by NCCL, which has not been
tried in so many graphs."""
GATHERED_TOKENS = 1 << 17
"""Tokens that the workspace of long chunks holds; fewer if the model's context and a step have fewer together."""
SILENT_SECONDS = 5.0
"""After how many seconds of building kernels a message is logged."""


def begin_builds(config: WorkerConfig, loaded: Loaded) -> KernelBuilds:
    """Begin to compile those of FlashInfer's kernels that are needed and not there, those of attention first: weights
    can be loaded meanwhile. If FlashInfer cannot say what it compiles, it will do so when they are called."""
    capability = torch.cuda.get_device_capability(loaded.device)
    wanted: list[Kernels] = [*attention_kernels(config, loaded, capability), *sampling_kernels(config)]
    try:
        return KernelBuilds(find_specs(wanted))
    except Exception as error:  # no package, or another version of it
        log.debug("kernels are not compiled ahead: %s: %s", type(error).__name__, error)
        return KernelBuilds({})


def make_cuda_runner(
    config: WorkerConfig, loaded: Loaded, model: Model, scales: Scales, builds: KernelBuilds,
    group: TorchGroup | None = None,
) -> CudaRunner:  # fmt: skip
    """See `load.runner.make_runner`. Raises torch.OutOfMemoryError if a step does not fit."""
    thresholds = find_sampling(config, loaded, builds)
    _pass_time(config, loaded, model, builds, thresholds, group)
    flashinfer = None if config.deterministic else find_flashinfer(config, loaded, builds)
    if group is not None and not group.smallest(int(flashinfer is not None)):
        flashinfer = None  # ranks with it would plan differently from those without
    full = None if config.deterministic else find_full_heads(config, loaded)
    if group is not None and not group.smallest(int(full is not None)):
        full = None
    eager = config.enforce_eager or loaded.spec.index
    graphs = 0 if eager else config.max_num_seqs
    tokens = config.max_total_tokens
    reserved = tokens * loaded.token_bytes
    if not tokens:
        step = step_bytes(config, loaded, model, thresholds, flashinfer, full, group)
        rows = row_bytes(config.max_num_seqs, loaded.spec.vocab_size)  # counts of penalized tokens; logits of graphs
        kept = kept_bytes(loaded.spec, graph_tokens(config, loaded, model), loaded.dtype.itemsize)
        kinds = 2 if model.has_adapters else 1  # of decode graphs
        staging = 0 if config.kv_offloading_size == "none" and not config.kv_disk_path else STAGING_BYTES
        reserved = step + rows + staging + (kinds * GRAPH_BYTES + rows + kept if graphs else 0)
        log.info("a step of %d tokens takes up to %.2f GB", config.max_num_batched_tokens, step / 1e9)
    states = make_states(config, loaded, reserved, group)
    tokens = tokens or pool_tokens(loaded, config.gpu_memory_utilization, reserved, group)
    pool = make_pool(loaded, tokens // config.page_size + 1, config.page_size)
    pool.scales = scales
    return _make(config, loaded, model, pool, thresholds, flashinfer, full, graphs, group, states)


def _pass_time(
    config: WorkerConfig, loaded: Loaded, model: Model, builds: KernelBuilds, thresholds: LateThresholds | None,
    group: TorchGroup | None,
) -> None:  # fmt: skip
    """While FlashInfer's kernels of attention are compiled, run a step without them, if a step is to be measured: by
    that Triton compiles its own."""
    if config.max_total_tokens:
        return
    kernels = attention_kernels(config, loaded, torch.cuda.get_device_capability(loaded.device))
    waits = not all(builds.is_done(each) for each in kernels)
    if group is not None:
        waits = bool(group.smallest(int(waits)))  # a step is one of all ranks
    if waits:
        _largest_step(config, loaded, model, thresholds, None, None, group)


def _make(
    config: WorkerConfig, loaded: Loaded, model: Model, pool: KVPool, thresholds: LateThresholds | None,
    flashinfer: FlashInfer | None, full: FullHeads | None, graphs: int, group: TorchGroup | None,
    states: StatePool | None,
) -> CudaRunner:  # fmt: skip
    return CudaRunner(
        model,
        pool,
        config.page_size,
        rows=config.max_num_seqs,
        eos_ids=loaded.eos_ids,
        flashinfer=flashinfer,
        full=full,
        graph_batch=graphs,
        graph_tokens=graph_tokens(config, loaded, model),
        num_sms=torch.cuda.get_device_properties(loaded.device).multi_processor_count,
        tree_attention=config.tree_attention != "off",
        exact=config.deterministic,
        thresholds=thresholds,
        group=group,
        states=states,
    )


def graph_tokens(config: WorkerConfig, loaded: Loaded, model: Model) -> int:
    """The most tokens of a step that runs as piecewise CUDA graphs; none where transformers computes the model, whose
    layers cannot be cut at their attention."""
    if loaded.by_transformers:
        return 0
    most = GROUP_TOKENS if config.tensor_parallel_size > 1 else config.max_num_batched_tokens
    return min(most, config.max_num_batched_tokens, most_tokens(loaded.spec, model.is_fp8 or model.is_int4))


def find_flashinfer(config: WorkerConfig, loaded: Loaded, builds: KernelBuilds | None = None) -> FlashInfer | None:
    """FlashInfer with its kernels built; None where it does not apply. If it does not work: None with a warning, or
    ValueError if the configuration demands it."""
    spec, reason = loaded.spec, no_flashinfer(loaded.spec)
    if reason and config.attention_backend == "flashinfer":
        raise ValueError(f"attention_backend: FlashInfer is not used for {reason}")
    if config.attention_backend == "triton" or loaded.dtype.itemsize != 2 or reason:
        return None
    shape = Shape.of(spec, config.page_size)
    capability = torch.cuda.get_device_capability(loaded.device)
    tokens = min(GATHERED_TOKENS, spec.max_model_len + config.max_num_batched_tokens)
    try:
        if builds is not None:
            for kernels in attention_kernels(config, loaded, capability):
                builds.wait(kernels)
        with _built("attention"):
            flashinfer = FlashInfer(shape, loaded.dtype, loaded.device, tokens, backend_on(capability))
            flashinfer.try_out(set(spec.attention_windows))
    except Exception as error:  # no package, no compiler, a build that fails, a head size it does not know
        message = f"FlashInfer is not used: {type(error).__name__}: {str(error)[:500]}"
        if config.attention_backend == "flashinfer":
            raise ValueError(f"attention_backend: {message}") from error
        log.warning("%s. Long prompts are computed by Triton kernels, slower", message)
        return None
    return flashinfer


def find_full_heads(config: WorkerConfig, loaded: Loaded) -> FullHeads | None:
    """FullHeads for long chunks of latent attention, with its kernels compiled. None where it does not apply; None with
    a warning if it does not work."""
    if loaded.spec.latent is None or loaded.spec.index is not None:
        return None
    tokens = min(GATHERED_TOKENS, loaded.spec.max_model_len + config.max_num_batched_tokens)
    kinds = loaded.kv_dtype, loaded.dtype, loaded.device
    try:
        return full_chunks.find(loaded.spec, config.page_size, *kinds, tokens)
    except Exception as error:  # a chip with too little shared memory, say
        message = f"{type(error).__name__}: {str(error)[:500]}"
        log.warning("long prompts are computed in the absorbed form, slower: %s", message)
        return None


def find_sampling(config: WorkerConfig, loaded: Loaded, builds: KernelBuilds) -> LateThresholds | None:
    """FlashInfer's functions for top_k, top_p and min_p: at once if their kernels are there, else as soon as they are
    built. None if the configuration excludes them."""
    if not sampling_kernels(config):
        return None
    late = LateThresholds(lambda: builds.is_done(SAMPLING), lambda: _find_thresholds(loaded, builds))
    late()
    return late


def _find_thresholds(loaded: Loaded, builds: KernelBuilds) -> Thresholds | None:
    """None with a warning if they do not work."""
    try:
        builds.wait(SAMPLING)
        with _built("draws"):
            return find_thresholds(loaded.spec.vocab_size, loaded.device)
    except Exception as error:  # no package, no compiler, a build that fails
        message = f"FlashInfer is not used for draws: {type(error).__name__}: {str(error)[:500]}"
        log.warning("%s. With top_k, top_p or min_p the vocabulary is sorted in every step, slower", message)
        return None


@contextmanager
def _built(what: str) -> Iterator[None]:
    """Log if building FlashInfer's kernels takes long."""
    began = time.monotonic()
    text = "FlashInfer's kernels for %s are built: a minute or more, once on this machine"
    timer = threading.Timer(SILENT_SECONDS, log.info, (text, what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if (seconds := time.monotonic() - began) > SILENT_SECONDS:
        log.info("FlashInfer's kernels for %s were built in %.0f s", what, seconds)


def step_bytes(
    config: WorkerConfig, loaded: Loaded, model: Model, thresholds: LateThresholds | None,
    flashinfer: FlashInfer | None, full: FullHeads | None, group: TorchGroup | None,
) -> int:  # fmt: skip
    """Bytes that the largest step needs beside weights and pages: those of a measured step, plus what that step does
    not have: MLPs of layers that it computes for few tokens, copies of chunks under shared prefixes, partial results of
    a chunk after a long context, the logits of scored prompts with their softmax, and the short chunks of recurrent
    layers at the ends and marks of prompts."""
    spec = loaded.spec
    copies = (1 + MAX_COPIES) * config.max_num_batched_tokens * spec.num_heads * spec.head_dim * loaded.dtype.itemsize
    other = (2 * copies if flashinfer else 0) + (HELD_BYTES if config.deterministic else 0)
    other += 3 * MAX_SCORED_TOKENS * spec.vocab_size * 4
    if spec.writers < spec.num_layers:
        inner = max(sizes.intermediate_size for sizes in spec.layers[spec.writers :])
        other += 3 * inner * config.max_num_batched_tokens * loaded.dtype.itemsize
    if spec.recurrent is not None and not config.deterministic:
        other += 2 * config.max_num_seqs * chunk_bytes(spec.recurrent, loaded.dtype.itemsize)
    if spec.index is not None:
        # Scores, and the places of the highest. Slots that are selected, of two layers for a moment, and twice as much
        # for what else such queries take: a short measured step has none.
        other += 2 * 4 * max(MAX_SCORES, spec.max_model_len) + 24 * spec.index.top_k * config.max_num_batched_tokens
    # Even with full heads, short chunks take the absorbed form, and may take more memory.
    ways = [None] if full is None else [None, full]
    return other + max(_largest_step(config, loaded, model, thresholds, flashinfer, way, group) for way in ways)


def _largest_step(
    config: WorkerConfig, loaded: Loaded, model: Model, thresholds: LateThresholds | None,
    flashinfer: FlashInfer | None, full: FullHeads | None, group: TorchGroup | None,
) -> int:  # fmt: skip
    """Measure the peak bytes of a step with a long chunk and as many decodes as may run, with sampling."""
    budget = config.max_num_batched_tokens
    prompt = max(1, min(budget - config.max_num_seqs, loaded.spec.max_model_len - 2))
    length = prompt + 2
    pool = make_pool(loaded, -(-(length + 4 * config.max_num_seqs) // config.page_size) + 1, config.page_size)
    states = _same_states(loaded, config.max_num_seqs + 1)
    runner = _make(config, loaded, model, pool, thresholds, flashinfer, full, 0, group, states)
    cache = PageCache(
        runner.num_pages, config.page_size, config.max_num_seqs, length, events=False, num_states=runner.num_states
    )
    scheduler = Scheduler(cache, Limits(budget, config.max_num_seqs), paths=runner.shares)
    runner.bind(cache.requests.table)
    torch.cuda.synchronize(loaded.device)
    torch.cuda.reset_peak_memory_stats(loaded.device)
    before = torch.cuda.memory_allocated(loaded.device)
    adapter = 0 if model.has_adapters else -1
    sampling = Sampling(max_tokens=2, temperature=1.0, top_p=0.9, min_p=0.01, ignore_eos=True)
    for number in range(config.max_num_seqs - 1):
        _ask(scheduler, number, [1 + number % (loaded.spec.vocab_size - 1)], sampling, adapter)
    _step(scheduler, runner)
    _ask(scheduler, -1, np.arange(prompt) % loaded.spec.vocab_size, sampling, adapter)
    while scheduler.has_work:
        _step(scheduler, runner)
    # Run the other ways to compute chunks as well: their kernels are compiled at first use.
    for number, new in ((-2, 300), (-3, 20)):
        half = np.arange(prompt // 2) % loaded.spec.vocab_size
        _ask(scheduler, number, np.concatenate([half, np.full(min(new, prompt // 2), 7)]), sampling, adapter)
        while scheduler.has_work:
            _step(scheduler, runner)
    peak = torch.cuda.max_memory_allocated(loaded.device) - before
    del runner, pool, states, cache, scheduler
    torch.cuda.empty_cache()
    return peak


def _same_states(loaded: Loaded, slots: int) -> StatePool | None:
    """A pool whose slots are all the same memory, for steps whose results do not matter."""
    if loaded.spec.recurrent is None:
        return None
    pool = StatePool(loaded.spec.recurrent, 1, loaded.dtype, loaded.device)
    pool.convs, pool.rules = (states.expand(slots, *states.shape[1:]) for states in (pool.convs, pool.rules))
    return pool


def _ask(scheduler: Scheduler, number: int, ids: object, sampling: Sampling, adapter: int) -> None:
    tokens = array("i", np.asarray(ids, dtype=np.int32).tobytes())
    run = Run(id=number, namespace="", ids=tokens.tobytes(), prompt_len=len(tokens), sampling=sampling)
    scheduler.add(Request(run, len(tokens) + 2, frozenset(), adapter))


def _step(scheduler: Scheduler, runner: CudaRunner) -> None:
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(plan, runner.launch(plan)())
