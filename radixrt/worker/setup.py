"""Makes the worker that a configuration describes: its runner, with a model or a fake, its drafter, and its links to
the router."""

from __future__ import annotations

import logging
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from radixrt import wire
from radixrt.checkpoint.lora_modules import lora_modules, most_loaded, names
from radixrt.config import WorkerConfig, gpu_count

if TYPE_CHECKING:
    from radixrt.worker.loop import Worker
    from radixrt.worker.plan import Runner
    from radixrt.worker.speculative.ngram import Drafter

log = logging.getLogger("radixrt.roles")

FAKE_VOCAB = 32_000
"""Vocabulary size of a fake worker without a checkpoint."""
FAKE_TOKENS = 1 << 20
"""Default number of token slots of a fake worker."""


def make_worker(config: WorkerConfig) -> Worker:
    """Make the worker of a resolved `config`, and load its model (none with `fake`). Raises ValueError for invalid
    settings."""
    runner = make_runner(config)
    try:
        return _worker_of(config, runner)
    except BaseException:
        runner.close()
        raise


def _worker_of(config: WorkerConfig, runner: Runner) -> Worker:
    from radixrt.worker.loop import Worker
    from radixrt.worker.scheduler.scheduler import Limits
    from radixrt.worker.status import Identity
    from radixrt.worker.structured.compile import Grammars

    stopped = threading.Event()

    def connect() -> wire.Link:
        return wire.Link(config.router, stopped=stopped, monitored=True)

    more = 0 if config.fake else config.tensor_parallel_size - 1
    device = f"{config.device} and {more} more" if more else config.device
    kv_dtype, adapters = getattr(runner, "kv_dtype", ""), names(lora_modules(config))
    identity = Identity(config.name, config.served_model_name, kv_dtype, device, adapters, most_loaded(config))
    limits = Limits(max_num_batched_tokens=config.max_num_batched_tokens, max_num_seqs=most_running(config, runner))
    return Worker(
        runner,
        identity,
        connect,
        limits=limits,
        drafter=make_drafter(config, runner),
        max_model_len=config.max_model_len,
        check=config.check,
        grammars=Grammars(config.model, runner.vocab_size, runner.eos_ids, jump_forward=config.jump_forward),
        max_pinned_share=config.max_pinned_share,
        eviction_policy=config.radix_eviction_policy,
        stopped=stopped,
        watchdog_timeout=config.watchdog_timeout,
        shutdown_timeout=config.shutdown_timeout,
    )


def most_running(config: WorkerConfig, runner: Runner) -> int:
    """The most requests that run at once: `max_num_seqs`, and with recurrent states at most two thirds of these. A
    context without a checkpoint has to be computed again, which costs more than a longer wait."""
    if not runner.num_states:
        return config.max_num_seqs
    states = runner.num_states - 1
    most = max(1, states - states // 3)
    if most < config.max_num_seqs:
        log.warning("at most %d requests run at once: there are %d recurrent states", most, states)
    return min(most, config.max_num_seqs)


def make_drafter(config: WorkerConfig, runner: Runner) -> Drafter | None:
    """The drafter of a worker, or None if tokens are not drafted."""
    from radixrt.worker.speculative.ngram import MAX_SPARSE_REQUESTS, Drafter

    if config.speculative_algorithm == "none":
        return None
    among = MAX_SPARSE_REQUESTS if runner.sparse else sys.maxsize
    return Drafter(config.speculative_num_draft_tokens, runner.overlaps, among, runner.predicts)


def make_runner(config: WorkerConfig) -> Runner:
    """Load the model on its device, or make a fake runner with the speed of `config.fake`. Raises ValueError for
    invalid settings."""
    if not config.fake:
        # By default OpenMP's threads spin while they wait: if other processes use the cores, steps take 10 times as
        # long.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from radixrt.worker.load.runner import load_runner

        try:
            return load_runner(config)
        except (RuntimeError, AssertionError) as error:  # torch raises these if the device does not exist
            if has_device(config.device):
                raise
            why = str(error).partition("\n")[0] or type(error).__name__
            raise ValueError(f"--device {config.device}: there is none ({why})") from error
    from radixrt.worker.execution.fake_runner import FakeRunner

    prefill_rate, decode_step = (float(part) for part in config.fake.split(","))
    num_pages = (config.max_total_tokens or FAKE_TOKENS) // config.page_size + 1
    vocab_size = fake_vocab_size(config.model)
    store = None
    if config.kv_disk_path:
        from radixrt.worker.load.store import open_store

        if not config.check:
            raise ValueError("--kv-disk-path: a fake worker has pages only with --check")
        store = partial(open_store, config, f"fake {vocab_size} {config.page_size}")
    return FakeRunner(
        num_pages, config.page_size, vocab_size, check=config.check, prefill_rate=prefill_rate, decode_step=decode_step,
        num_host_pages=num_pages if store else 0, store=store,
    )  # fmt: skip


def has_device(name: str) -> bool:
    """Whether a device exists, as far as that is known without torch."""
    kind, _, number = name.partition(":")
    return kind != "cuda" or int(number or 0) < gpu_count()


def fake_vocab_size(folder: str) -> int:
    """The vocabulary size of a fake worker: that of the checkpoint in `folder`, so that its tokens can be decoded;
    FAKE_VOCAB if there is none."""
    path = Path(folder, "config.json")
    return msgspec.json.decode(path.read_bytes()).get("vocab_size", FAKE_VOCAB) if path.is_file() else FAKE_VOCAB
