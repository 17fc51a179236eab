"""What it costs to compute a prompt, learned from the steps of this worker.

A token costs the same wherever it stands, but for attention, which reads the keys of all tokens before it:

    seconds = token * tokens + pair * pairs        pairs = tokens * (tokens before them + tokens / 2)

Both coefficients are those of least squares over the steps with prompt tokens, in which older ones count less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

DEFAULT_RATE = 4000.0
"""Tokens a second that a model is taken to compute until it is known."""
MIN_TOKENS = 256
"""Steps of fewer tokens say little of the cost of a long prompt: others take as long for half as many."""
DECAY = 1 - 1 / 64
"""Of what older steps count, with each new one."""
SLOWEST = 8.0
"""A step that took so many times as long as expected is left out: it waited for something else."""


def pairs(tokens: float, before: float) -> float:
    """Pairs of a query and a key of `tokens` tokens that follow `before` others."""
    return tokens * (before + tokens / 2)


class PrefillCost(NamedTuple):
    """Seconds of a token and of a pair; both 0: not known yet."""

    token: float = 0.0
    pair: float = 0.0

    def seconds(self, tokens: float, before: float = 0.0) -> float:
        """How long it takes to compute `tokens` tokens that follow `before` others."""
        if not (self.token or self.pair):
            return tokens / DEFAULT_RATE
        return self.token * tokens + self.pair * pairs(tokens, before)


@dataclass(slots=True)
class PrefillCosts:
    """Learns a PrefillCost. Sums over steps, of x = tokens, z = pairs, y = seconds; each weighted by 1 / x, so that the
    error of a step counts by what it is for each of its tokens."""

    xx: float = 0.0
    xz: float = 0.0
    zz: float = 0.0
    xy: float = 0.0
    zy: float = 0.0
    value: PrefillCost = PrefillCost()

    def add(self, starts: np.ndarray, counts: np.ndarray, seconds: float) -> None:
        """A step took `seconds`; int32[B] each: tokens before those that it computed of each request, and these."""
        tokens = float(counts.sum())
        if tokens < MIN_TOKENS:
            return
        z = sum(map(pairs, counts.tolist(), starts.tolist()))
        known = self.value.token * tokens + self.value.pair * z
        if known and seconds > SLOWEST * known:
            return
        weight = 1 / tokens
        self.xx = DECAY * self.xx + weight * tokens * tokens
        self.xz = DECAY * self.xz + weight * tokens * z
        self.zz = DECAY * self.zz + weight * z * z
        self.xy = DECAY * self.xy + weight * tokens * seconds
        self.zy = DECAY * self.zy + weight * z * seconds
        self.value = self._solved()

    def _solved(self) -> PrefillCost:
        """The coefficients with the least squares; none is negative."""
        determinant = self.xx * self.zz - self.xz * self.xz
        if determinant <= 1e-6 * self.xx * self.zz:  # all steps were alike: they do not tell the two apart
            return PrefillCost(self.xy / self.xx)
        token = (self.xy * self.zz - self.zy * self.xz) / determinant
        pair = (self.zy * self.xx - self.xy * self.xz) / determinant
        if pair < 0:
            return PrefillCost(self.xy / self.xx)
        if token < 0:
            return PrefillCost(0.0, self.zy / self.zz)
        return PrefillCost(token, pair)
