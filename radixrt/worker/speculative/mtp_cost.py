"""How many tokens a model's multi-token prediction layer proposes (see `model.predictor`), and which of them are
drafted. Its proposals come with the result of a step, for each request the tokens after its last one.

If each token is right with probability a, given that those before it are, then a step with k of them gives each request
1 + a + a^2 + ... + a^k tokens. Each costs a row of the step for each request, and a pass of the layer, which all share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ACCEPTANCE = 0.7
"""Expected acceptance of a request's proposals until some were drafted."""
MEMORY = 0.9
"""Weight of the old value in the moving averages of acceptance and of the time of a pass."""
PASS = 0.1
"""Cost of a pass as a share of a step's time, until one was timed."""


@dataclass(slots=True)
class Proposals:
    """A request's proposals, and how good they have been."""

    ids: list[int] = field(default_factory=list)
    length: int = -1
    """The request has this many tokens before them."""
    acceptance: float = ACCEPTANCE
    """Moving average of the share of its drafted tokens that were accepted, among those whose predecessors were."""

    def learn(self, drafted: int, accepted: int) -> None:
        """Count a draft of this kind."""
        for number in range(min(accepted + 1, drafted)):
            self.acceptance = MEMORY * self.acceptance + (1 - MEMORY) * (number < accepted)


class Passes:
    """The time that a pass of the layer takes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Moving average; 0 until one was timed."""

    def add(self, seconds: float) -> None:
        self.seconds = MEMORY * self.seconds + (1 - MEMORY) * seconds if self.seconds else seconds

    def share(self, step: float | None) -> float:
        """Of the time of a step in seconds, if that is known."""
        return self.seconds / step if self.seconds and step else PASS


def best_count(acceptance: float, cost: float, wait: float, most: int) -> int:
    """How many tokens to draft, at most `most`: the k with the largest (1 + a + ... + a^k) / (1 + wait + k cost), the
    tokens in the time of a step without drafts; 0 if that is not above 1. `cost` of a token and `wait` are shares of
    this time."""
    best, highest, tokens, likely = 0, 1.0, 1.0, 1.0
    for count in range(1, most + 1):
        likely *= acceptance
        tokens += likely
        if (rate := tokens / (1 + wait + count * cost)) > highest:
            best, highest = count, rate
    return best


def expected(acceptance: float, count: int) -> float:
    """How many of `count` drafted tokens are accepted: the sum of acceptance^i from 1 to `count`."""
    return sum(acceptance**n for n in range(1, count + 1))


def mean(values: Sequence[float]) -> float:
    """ACCEPTANCE if there are none."""
    return sum(values) / len(values) if values else ACCEPTANCE
