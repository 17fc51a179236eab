"""What a worker reports to its router about itself: Register when it joins, Load after each step."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any

from radixrt.messages import Adapter, Load, Register
from radixrt.worker.cache.disk_tier import DiskTier
from radixrt.worker.cache.page_cache import PageCache
from radixrt.worker.cache.tier import Tier
from radixrt.worker.plan import Plan, Runner
from radixrt.worker.prefill_cost import PrefillCost, PrefillCosts
from radixrt.worker.scheduler.scheduler import Limits, Scheduler

INCARNATION = secrets.randbits(63)
"""Random id of this process; see `Register`."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A worker's name, its model with LoRA adapters, and its device."""

    name: str
    model: str
    kv_dtype: str = ""
    device: str = "cpu"
    adapters: tuple[str, ...] = ()
    """By number: the names of the adapters that are loaded at the start."""
    max_loras: int = 0
    """See `Register`."""


def registration(identity: Identity, runner: Runner, cache: PageCache, limits: Limits, max_model_len: int) -> Register:
    """The Register of a worker whose sequences may have up to `max_model_len` tokens."""
    return Register(
        name=identity.name,
        model=identity.model,
        max_model_len=max_model_len,
        page_size=runner.page_size,
        total_pages=cache.total_pages,
        max_running=limits.max_num_seqs,
        kv_dtype=identity.kv_dtype,
        device=identity.device,
        pid=os.getpid(),
        incarnation=INCARNATION,
        vocab_size=runner.vocab_size,
        num_states=runner.num_states + max(0, runner.num_host_states - 1),
        adapters=[Adapter(name) for name in identity.adapters],
        max_loras=identity.max_loras,
        host_tokens=max(0, runner.num_host_pages - 1) * runner.page_size,
    )


KNOWN_TOKENS, KNOWN_STEPS = 1024, 16
"""A rate counts as known after so many tokens, or steps: before, it is noise."""
FIRST_STEPS = 4
"""The first steps with prompt tokens, of which slow ones do not count."""
SLOW = 3.0
"""Steps that took so many times as long for each token as half of the first ones are slow."""
MAX_TOKENS, MAX_STEPS = 16_384, 64
"""What came so many tokens, or steps, before counts a third (1/e) of what is new."""


@dataclass(slots=True)
class Mean:
    """A moving average, of equal weights until `most` of them are known.

    share = weight / min(most, weight + weights of all before)
    value = (1 - share) * value + share * new
    """

    known: float
    """The value is 0 until the weights of what was added make this much."""
    most: float
    total: float = 0.0
    _value: float = 0.0

    @property
    def value(self) -> float:
        return self._value if self.total >= self.known else 0.0

    def add(self, new: float, weight: float) -> None:
        self.total = min(self.most, self.total + weight)
        self._value += min(1.0, weight / self.total) * (new - self._value)


class Speed:
    """A Mean from which slow steps are removed once the first steps of the process are over: they loaded code or
    compiled kernels, and the router would leave this worker idle for it. `fewest` steps are the first ones, or more
    until all but the largest have `known` weight in all."""

    def __init__(self, known: float, fewest: int, most: float) -> None:
        self._known, self._fewest, self._most = known, fewest, most
        self._mean = Mean(known, most)
        self._first: list[tuple[float, float, float]] | None = []
        """(seconds for each unit of weight, value, weight) of the first steps; None once they are over."""

    @property
    def value(self) -> float:
        return self._mean.value

    def add(self, seconds: float, value: float, weight: float) -> None:
        """Add a step that took `seconds`."""
        self._mean.add(value, weight)
        if self._first is not None:
            self._first.append((seconds / weight, value, weight))
            if len(self._first) >= self._fewest:
                self._look_back(self._first)

    def _look_back(self, first: list[tuple[float, float, float]]) -> None:
        weights = [weight for *_, weight in first]
        if sum(weights) - max(weights) < self._known:
            return
        fast = sorted(first)[(len(weights) - 1) // 2][0]
        self._mean = Mean(0, self._most)
        for seconds, value, weight in first:
            if seconds <= SLOW * fast:
                self._mean.add(value, weight)
        self._first = None


class Rates:
    """Moving averages of speed, for placement."""

    def __init__(self) -> None:
        self._prefill = Speed(KNOWN_TOKENS, FIRST_STEPS, MAX_TOKENS)
        self._step = Speed(KNOWN_STEPS, KNOWN_STEPS, MAX_STEPS)
        self._costs = PrefillCosts()

    @property
    def prefill(self) -> float:
        """Tokens per second in steps with prompt tokens. Each step counts by its tokens, as it is to say how long a
        queue takes: steps of few tokens are slow by token, but a long queue is not computed by them."""
        return self._prefill.value

    @property
    def prefill_cost(self) -> PrefillCost:
        """The same, with what attention costs in long contexts."""
        return self._costs.value

    @property
    def step(self) -> float:
        """Seconds of a step without prompt tokens."""
        return self._step.value

    def add(self, plan: Plan, seconds: float) -> None:
        """Add a step that took `seconds`."""
        if plan.prompt_tokens:
            self._costs.add(plan.starts, plan.counts, seconds)
            self._prefill.add(seconds, len(plan.tokens) / max(seconds, 1e-9), len(plan.tokens))
        else:
            self._step.add(seconds, seconds, 1)


def load(
    scheduler: Scheduler,
    cache: PageCache,
    runner: Runner,
    rates: Rates,
    *,
    compiling: int,
    inflight: Plan | None,
    newest_run: int,
) -> Load:
    """A worker's state now. `inflight` is the step that has just been launched, if any; `compiling` counts the tokens
    of requests that wait for their grammar."""
    return Load(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        queued_tokens=scheduler.queued_tokens + compiling,
        free_pages=cache.free_pages,
        evictable_pages=cache.evictable_pages + cache.prefixes.retained_pages,
        total_pages=cache.total_pages,
        prefill_rate=rates.prefill,
        step_seconds=rates.step,
        evicted_tokens=cache.evicted_tokens,
        preemptions=scheduler.preemptions,
        steps=scheduler.steps,
        plain_keys=runner.plain_keys,
        read_keys=runner.read_keys,
        busy_seconds=runner.busy_seconds,
        forced_tokens=scheduler.forced_tokens,
        drafted_tokens=scheduler.drafter.drafted if scheduler.drafter else 0,
        accepted_tokens=scheduler.drafter.accepted if scheduler.drafter else 0,
        launched_tokens=0 if inflight is None else inflight.prompt_tokens,
        newest_run=newest_run,
        kept_tokens=cache.retained.tokens(),
        fetched_tokens=cache.tier.onloaded_pages * cache.page_size,
        host_tokens=cache.tier.used_pages * cache.page_size,
        **disk_figures(cache.tier),
    )


def disk_figures(tier: Tier) -> dict[str, Any]:
    """The fields of a Load that are of the disk."""
    if not isinstance(tier, DiskTier):
        return {}
    names = (
        "hits", "read_tokens", "read_bytes", "read_seconds", "saved_seconds", "written_tokens", "written_bytes",
        "lost_tokens", "evicted_tokens", "early_tokens",
    )  # fmt: skip
    found = {f"disk_{name}": getattr(tier.figures, name) for name in names}
    return found | {"disk_tokens": tier.index.tree.tokens, "disk_bytes": tier.used_bytes}
