"""What a worker tells the router of its speed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from radixrt.worker.plan import Plan
from radixrt.worker.status import KNOWN_STEPS, KNOWN_TOKENS, Mean, Rates


def chunk(tokens: int) -> Plan:
    """A step with one chunk of a prompt."""
    return SimpleNamespace(
        tokens=np.zeros(tokens), prompt_tokens=tokens, starts=np.zeros(1, np.int32), counts=np.array([tokens], np.int32)
    )


def decode() -> Plan:
    return SimpleNamespace(tokens=np.zeros(1), prompt_tokens=0)


def test_nothing_is_known_from_a_few_tokens():
    """Of two workers that are alike, one would get no requests after a first step that was slow by chance."""
    rates = Rates()
    for _ in range(KNOWN_TOKENS // 32 - 1):
        rates.add(chunk(32), 0.001)
    for _ in range(KNOWN_STEPS - 1):
        rates.add(decode(), 0.002)
    assert (rates.prefill, rates.step) == (0.0, 0.0)
    rates.add(chunk(32), 0.001)
    rates.add(decode(), 0.002)
    assert (rates.prefill, rates.step) == pytest.approx((32_000, 0.002))


def test_a_queue_is_computed_at_the_rate_of_large_steps():
    """20 tokens take nearly as long as 1,000, for the weights that are read."""
    rates = Rates()
    for _ in range(200):
        for _ in range(9):
            rates.add(chunk(20), 0.010)
        rates.add(chunk(8192), 0.200)
    assert rates.prefill == pytest.approx(8192 / 0.2, rel=0.05)


def test_one_slow_step_counts_by_its_tokens():
    rates = Rates()
    for _ in range(20):
        rates.add(chunk(2000), 0.05)
    rates.add(chunk(100), 5.0)  # a kernel was compiled
    assert rates.prefill == pytest.approx(40_000, rel=0.01)


@pytest.mark.parametrize("slow", [1, 2])
def test_slow_first_prompts_do_not_count_once_others_have_come(slow):
    """They compiled kernels."""
    rates = Rates()
    for n in range(4):
        rates.add(chunk(4000), 6.0 if n < slow else 0.2)
    assert rates.prefill == pytest.approx(20_000)


def test_a_worker_that_is_always_slow_is_known_to_be():
    rates = Rates()
    for _ in range(4):
        rates.add(chunk(4000), 2.0)
    assert rates.prefill == pytest.approx(2000)


def test_slow_first_steps_do_not_count_once_others_have_come():
    rates = Rates()
    for n in range(KNOWN_STEPS + 1):
        rates.add(decode(), 5.0 if n < 3 else 0.002)
    assert rates.step == pytest.approx(0.002)


def test_small_prompts_beside_one_long_one_are_few_measurements():
    """The long one alone does not decide what is slow."""
    rates = Rates()
    rates.add(chunk(8000), 8.0)
    for _ in range(10):
        rates.add(chunk(50), 0.01)
    assert rates.prefill == pytest.approx((8000 * 1000 + 500 * 5000) / 8500)
    for _ in range(11):
        rates.add(chunk(50), 0.01)
    assert rates.prefill == pytest.approx(5000)


def test_what_changes_is_followed():
    rates = Rates()
    for rate in (40_000, 10_000):
        for _ in range(40):
            rates.add(chunk(4000), 4000 / rate)
    assert rates.prefill == pytest.approx(10_000, rel=0.01)


def test_a_mean_is_exact_until_it_moves():
    values = [3.0, 5.0, 10.0, 2.0]
    weights = [1.0, 2.0, 1.0, 4.0]
    mean = Mean(known=0, most=8)
    for value, weight in zip(values, weights, strict=True):
        mean.add(value, weight)
    assert mean.value == pytest.approx(np.average(values, weights=weights))
    mean.add(4.5, 2.0)
    assert mean.value == pytest.approx(0.75 * np.average(values, weights=weights) + 0.25 * 4.5)
