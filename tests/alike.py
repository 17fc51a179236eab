"""Placement that a test can foretell."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from radixrt.router.placement import cost


@contextmanager
def workers_alike() -> Iterator[None]:
    """All workers count as equally fast, whatever was measured: on a busy machine, noise would decide now and then
    where a request goes, and so whether it hits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "SAME", math.inf)
        yield
