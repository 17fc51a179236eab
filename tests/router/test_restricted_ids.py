"""Ids that leave no token are refused at the door."""

from __future__ import annotations

import pytest

from radixrt.messages import Sampling
from radixrt.requests.validate import Refused, check_sampling


@pytest.mark.parametrize(
    "fields, fine",
    [
        ({"bad_token_ids": ((5,), (6,))}, False),
        ({"bad_token_ids": ((5,), (6, 6))}, True),
        ({"stop_token_ids": (5, 6)}, True),
        ({"stop_token_ids": (5, 6), "min_tokens": 1}, False),
        ({"stop_token_ids": (5,), "min_tokens": 1}, True),
        ({"stop_token_ids": (5,), "min_tokens": 1, "bad_token_ids": ((6,),)}, False),
    ],
)
def test_ids_of_which_none_may_come_first(fields, fine):
    sampling = Sampling(max_tokens=9, allowed_token_ids=(5, 6), **fields)
    if fine:
        return check_sampling(sampling, 100)
    with pytest.raises(Refused, match="must hold a token that") as refused:
        check_sampling(sampling, 100)
    assert (refused.value.code, refused.value.field) == (400, "allowed_token_ids")
