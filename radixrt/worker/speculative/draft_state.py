"""What a request's drafts are made from (see `ngram` and `mtp_cost`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from radixrt.worker.speculative._repeats import Repeats
from radixrt.worker.speculative.mtp_cost import Proposals

ACCEPTANCE = 0.4
"""Expected share of the tokens looked up for a request that are accepted, until some were drafted."""


@dataclass(slots=True)
class DraftState:
    """What a request's drafts are made from."""

    repeats: Repeats
    """Its own tokens."""
    acceptance: float = ACCEPTANCE
    """Moving average of the share of its drafted tokens that were accepted; of those that were looked up."""
    proposals: Proposals = field(default_factory=Proposals)
    proposed: bool = False
    """Whether its last draft was of these."""
