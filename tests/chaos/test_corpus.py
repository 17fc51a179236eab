"""What mutations start from, and that a seed makes them again."""

from __future__ import annotations

import json
import math
import random

import msgspec
import pytest

from radixrt import wire
from radixrt.messages import ClientRequest, Load, StepDone, ToRouter
from tests.chaos.corpus import Kinds, bodies, client_messages, worker_messages
from tests.chaos.mutations import Mutator, as_json

ALL = Kinds(pins=True)


@pytest.mark.parametrize(
    "union, valid",
    [
        (ClientRequest, client_messages("key", random.Random(1), ALL)),
        (ToRouter, worker_messages("w", "m", random.Random(1))),
    ],
    ids=["clients", "workers"],
)
def test_each_type_of_message_is_there_and_valid(union, valid):
    found = {type(wire.Decoder(union).decode(one)) for one in valid}
    assert found == set(union.__args__)


def test_a_seed_makes_the_same_mutations():
    def mutated(seed: int) -> list[bytes]:
        rng = random.Random(seed)
        posts = [body for _, body in bodies(rng, ALL)]
        packed = Mutator(rng, client_messages("key", rng, ALL))
        text = Mutator(rng, posts, json.loads, as_json)
        return [make() for make in (packed.mutated, text.mutated) for _ in range(200)]

    assert mutated(5) == mutated(5) != mutated(6)


@pytest.mark.parametrize("rate", [math.inf, math.nan, -1.0])
def test_rates_of_a_worker_are_numbers(rate):
    """Placement computes with them."""
    payload = wire.encode(StepDone([], Load(prefill_rate=rate)))
    with pytest.raises(msgspec.ValidationError, match="load"):
        wire.Decoder(ToRouter).decode(payload)
