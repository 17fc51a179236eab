"""Sampling parameters that are refused at the door, with the field, and those that are not."""

from __future__ import annotations

import math

import pytest

from radixrt.messages import Grammar, Sampling
from radixrt.requests.validate import Refused, check_sampling

VOCAB = 100
REFUSED = [
    ({"temperature": 3.5e38}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": -1e-45}, "temperature"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty"),
    ({"repetition_penalty": 5e-324}, "repetition_penalty"),
    ({"repetition_penalty": 3.4e38}, "repetition_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"repetition_penalty": math.nan}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -math.inf}, "frequency_penalty"),
    ({"top_p": math.nan}, "top_p"),
    ({"min_p": -5e-324}, "min_p"),
    ({"min_p": math.nan}, "min_p"),
    ({"top_k": 1 << 31}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"logit_bias": {5: 1e30}}, "logit_bias"),
    ({"logit_bias": {5: -1e30}}, "logit_bias"),
    ({"logit_bias": {5: math.nan}}, "logit_bias"),
    ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    ({"logit_bias": {1 << 70: 1.0}}, "logit_bias"),
    ({"allowed_token_ids": (5, VOCAB)}, "allowed_token_ids"),
    ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
    ({"allowed_token_ids": (5, 6), "bad_token_ids": ((6,), (5,), (7, 8))}, "allowed_token_ids"),
    ({"allowed_token_ids": (5,), "stop_token_ids": (5,), "min_tokens": 1}, "allowed_token_ids"),
    ({"allowed_token_ids": (5, 6), "stop_token_ids": (5,), "bad_token_ids": ((6,),), "min_tokens": 1},
     "allowed_token_ids"),
    ({"bad_token_ids": tuple((id,) for id in range(VOCAB))}, "bad_token_ids"),
    ({"bad_token_ids": tuple((id,) for id in range(40, VOCAB)), "stop_token_ids": tuple(range(40)), "min_tokens": 1},
     "bad_token_ids"),
    ({"min_tokens": 1 << 31}, "min_tokens"),
]  # fmt: skip
SERVED = [
    {"temperature": 3.4028234663852886e38},
    {"temperature": 5e-324},
    {"top_p": 0.0},
    {"top_p": 5e-324},
    {"min_p": 5e-324},
    {"min_p": 1.0, "top_p": 1e-45, "top_k": 1},
    {"repetition_penalty": 1e-4, "presence_penalty": -2.0},
    {"repetition_penalty": 1e4, "frequency_penalty": 2.0},
    {"logit_bias": {5: 100.0, 6: -100.0}},
    {"seed": -(1 << 63)},
    {"seed": (1 << 64) - 1},
    {"allowed_token_ids": (5, 6), "bad_token_ids": ((6,), (5, 5))},
    {"allowed_token_ids": (5,), "stop_token_ids": (5,)},
    {"allowed_token_ids": (5,), "stop_token_ids": (5,), "min_tokens": 1, "grammar": Grammar("regex", "a")},
    {"bad_token_ids": tuple((id,) for id in range(VOCAB - 1))},
]


@pytest.mark.parametrize(("fields", "field"), REFUSED)
def test_what_leaves_float32_or_no_token_is_refused(fields, field):
    with pytest.raises(Refused) as caught:
        check_sampling(Sampling(**fields), VOCAB)
    assert (caught.value.code, caught.value.field) == (400, field) and field in str(caught.value)


@pytest.mark.parametrize("fields", SERVED)
def test_extreme_values_are_served(fields):
    check_sampling(Sampling(**fields), VOCAB)
