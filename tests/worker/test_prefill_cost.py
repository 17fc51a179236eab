"""What it costs to compute a prompt, learned from steps."""

import numpy as np
import pytest

from radixrt.worker.cache.disk_policy import longest_wait, reading_pays
from radixrt.worker.prefill_cost import PrefillCost, PrefillCosts

TOKEN, PAIR = 2e-5, 1e-9


def taught(prompts, noise=0.0, chunk=8192, seed=0):
    """Costs after prompts of these lengths, in chunks, on a machine with TOKEN and PAIR."""
    draw, costs = np.random.default_rng(seed), PrefillCosts()
    for length in prompts:
        for start in range(0, length, chunk):
            count = min(chunk, length - start)
            seconds = TOKEN * count + PAIR * count * (start + count / 2)
            costs.add(np.array([start]), np.array([count]), seconds * np.exp(noise * draw.standard_normal()))
    return costs


def test_both_coefficients_are_learned_from_chunks_of_long_prompts():
    assert taught([65_536]).value == pytest.approx((TOKEN, PAIR), rel=1e-6)


def test_noise_changes_little_of_what_a_long_prompt_is_said_to_take():
    for seed in range(5):
        cost = taught([40_000, 3_000, 90_000, 500] * 3, noise=0.1, seed=seed).value
        assert cost.seconds(65_536) == pytest.approx(TOKEN * 65_536 + PAIR * 65_536**2 / 2, rel=0.15)


def test_steps_that_are_all_alike_give_a_cost_by_token():
    cost = taught([8192] * 5).value
    assert cost.pair == 0 and cost.seconds(8192) == pytest.approx(TOKEN * 8192 + PAIR * 8192**2 / 2)


def test_no_coefficient_is_negative_however_steps_differ():
    for seed in range(20):
        cost = taught([9_000, 600, 20_000], noise=0.9, seed=seed).value
        assert min(cost) >= 0


def test_a_step_that_waited_is_left_out():
    costs = taught([65_536])
    costs.add(np.array([0]), np.array([8192]), 100.0)
    assert costs.value == pytest.approx((TOKEN, PAIR), rel=1e-6)


def test_short_steps_say_nothing():
    costs = PrefillCosts()
    costs.add(np.array([0]), np.array([100]), 1.0)
    assert costs.value == PrefillCost()


def test_a_machine_that_got_slower_is_known_after_some_steps():
    costs = taught([16_384] * 4)
    for _ in range(200):
        costs.add(np.array([0]), np.array([8192]), 4 * (TOKEN * 8192 + PAIR * 8192**2 / 2))
    assert costs.value.seconds(8192) == pytest.approx(4 * (TOKEN * 8192 + PAIR * 8192**2 / 2), rel=0.1)


def test_a_long_context_is_read_from_a_disk_that_is_too_slow_for_a_short_one():
    cost, rate, token_bytes = PrefillCost(TOKEN, PAIR), 2e9, 65_536
    assert not reading_pays(4_096, 0, 4_096 * token_bytes, cost, rate)
    assert reading_pays(65_536, 0, 65_536 * token_bytes, cost, rate)
    assert reading_pays(4_096, 61_440, 4_096 * token_bytes, cost, rate), "the end of a long one costs more"


def test_a_request_waits_as_long_as_its_context_takes_to_compute():
    cost = PrefillCost(TOKEN, PAIR)
    assert longest_wait(65_536, 0, cost) == pytest.approx(cost.seconds(65_536))
    assert longest_wait(100, 0, cost) == 0.25
