"""Forced text takes its turn with prompts: nobody waits for all of it."""

from __future__ import annotations

import pytest

from radixrt.messages import Grammar, Sampling
from tests.worker.engine import Engine
from tests.worker.structured.test_sitting import PLAIN, Follower, grammars  # noqa: F401  (a fixture)

FORCED = Sampling(max_tokens=4000, temperature=0.0, grammar=Grammar("regex", "([ab]z{1900}){4}"))
SHORT = Sampling(max_tokens=400, temperature=0.0, grammar=Grammar("regex", "([ab]zyzyz){30}"))


def steps_to_first_token(engine: Engine, prompt: list[int], namespace: str) -> int:
    id, steps = engine.add(prompt, PLAIN, namespace=namespace), 0
    while not engine.outputs[id]:
        assert engine.step()
        steps += 1
    return steps


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_prompts_take_turns_with_forced_text(grammars, tenant):  # noqa: F811
    """7,600 forced tokens of each of 8 requests, 256 a step, are 240 steps."""
    engine = Follower(grammars, num_pages=100_000, chunk=256, max_model_len=9000)
    ids = [engine.add([5, 6, 7 + n], FORCED, namespace="a") for n in range(8)]
    while not all(engine.outputs[id] for id in ids):
        engine.step()
    for n in range(2):
        assert steps_to_first_token(engine, [*range(10, 210), n], tenant) <= 4
        assert steps_to_first_token(engine, [*range(300), n], tenant) <= 8


def test_forced_text_is_not_held_up_by_prompts(grammars):  # noqa: F811
    """Neither a few tokens by any prompt, nor long text by one that fills many steps."""
    engine = Follower(grammars, num_pages=100_000, chunk=64, max_model_len=9000)
    short, long = (engine.add([5, 6, 7], sampling, namespace="a") for sampling in (SHORT, FORCED))
    while not (engine.outputs[short] and engine.outputs[long]):
        engine.step()
    engine.add([9] * 900, PLAIN, namespace="a")
    before, forced = len(engine.tokens(short)), engine.scheduler.steps
    request = engine.scheduler._requests[long]
    computed = request.computed
    while engine.scheduler.steps < forced + 12:
        engine.step()
    assert len(engine.tokens(short)) - before >= 6 * 4
    assert request.computed - computed >= 100
