"""The Runner that computes a model with torch: plan in, tokens out."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from radixrt.worker.attention import BatchInvariantAttention, TorchAttention
from radixrt.worker.grammar import fill_masks
from radixrt.worker.kv import DTYPES, KVPool
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.plan import Plan, Result
from radixrt.worker.sample import Masks, sample, token_logprobs

NOT_FINITE = "the model gave logits that are not finite"


class ModelRunner:
    """What a Runner of a model says of it (see `plan.Runner`)."""

    def __init__(self, model: Decoder, pool: KVPool, page_size: int, eos_ids: frozenset[int]) -> None:
        spec = model.spec
        self.num_pages = pool.slots // page_size
        self.page_size = page_size
        self.vocab_size = spec.vocab_size
        self.eos_ids = eos_ids
        self.max_model_len = spec.max_model_len
        self.kv_dtype = next(name for name, dtype in DTYPES.items() if dtype == pool.dtype)
        self.busy_seconds = 0.0
        self.pool = pool
        self._model = model
        self._device = pool.device


class TorchRunner(ModelRunner):
    """The model, its KV pool and its attention by torch on one device, one step after the other."""

    overlaps = False
    plain_keys = read_keys = 0

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        page_size: int,
        eos_ids: frozenset[int] = frozenset(),
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(model, pool, page_size, eos_ids)
        kind = BatchInvariantAttention if batch_invariant else TorchAttention
        self._attention = kind(pool, page_size, model.spec.windows)

    def bind(self, table: np.ndarray) -> None:
        self._attention.bind(table)

    def launch(self, plan: Plan) -> Callable[[], Result]:
        began = time.monotonic()
        with torch.inference_mode():
            result = read_logits(plan, self.logits(plan))
        self.busy_seconds += time.monotonic() - began
        return lambda: result

    @torch.inference_mode()
    def logits(self, plan: Plan) -> torch.Tensor:
        """Compute a step: float32[plan.wants.sum(), vocab] at the wanted positions, in order."""
        return self._model.forward(
            torch.from_numpy(plan.tokens).to(self._device, torch.int64),
            torch.from_numpy(ranges(plan.starts, plan.counts)).to(self._device),
            self._attention.begin(plan, self._device),
            torch.from_numpy(wanted(plan)).to(self._device),
        )


def wanted(plan: Plan) -> np.ndarray:
    """int64[plan.wants.sum()]: which of a step's tokens logits are wanted of."""
    return ranges(np.cumsum(plan.counts) - plan.wants, plan.wants)


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64: start, start + 1, ... for each start, `count` of them, one after the other."""
    starts, counts = starts.astype(np.int64), counts.astype(np.int64)
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


# ---------------------------------------------------------------- logits to results


def read_logits(plan: Plan, logits: torch.Tensor) -> Result:
    """The Result of a plan from its wanted logits, float32[plan.wants.sum(), vocab]."""
    ends = np.cumsum(plan.wants)
    failed = _not_finite(plan, logits, ends)
    scores = {
        b: score(logits[ends[b] - plan.wants[b] : ends[b]], plan, b)
        for b, request in enumerate(plan.requests)
        if request.score_from is not None
    }
    chosen = np.flatnonzero(plan.samples)
    requests = [plan.requests[b] for b in chosen]
    raw = logits[torch.from_numpy(ends[chosen] - 1).to(logits.device)]
    masks = read_masks(plan, chosen, raw, failed)
    wants_logprobs = any(r.sampling.logprobs is not None for r in requests)
    positions = (plan.starts + plan.counts)[chosen].tolist()
    drawn = sample(raw.clone() if wants_logprobs else raw, requests, positions, masks)
    tokens = np.zeros(len(plan.requests), dtype=np.int64)
    tokens[chosen] = drawn
    logprobs: list = []
    if wants_logprobs:
        logprobs = [None] * len(plan.requests)
        for b, found in zip(chosen, token_logprobs(raw, requests, drawn), strict=True):
            logprobs[b] = found
    return Result(tokens.tolist(), logprobs, scores, failed)


def read_masks(plan: Plan, chosen: np.ndarray, logits: torch.Tensor, failed: dict[int, str]) -> Masks | None:
    """Of the `chosen` requests, those that have a grammar, as rows of `logits`; None without any. Those that cannot
    go on are added to `failed`."""
    rows = [row for row, b in enumerate(chosen) if plan.requests[b].matcher is not None]
    if not rows:
        return None
    bits = np.zeros((len(rows), -(-logits.shape[-1] // 32)), dtype=np.int32)
    problems = fill_masks([plan.requests[chosen[row]] for row in rows], range(len(rows)), bits)
    failed.update({int(chosen[rows[n]]): problem for n, problem in problems.items()})
    return Masks(torch.from_numpy(bits).to(logits.device), torch.tensor(rows, device=logits.device))


def _not_finite(plan: Plan, logits: torch.Tensor, ends: np.ndarray) -> dict[int, str]:
    """Requests of whose logits the largest is NaN or infinite."""
    bad = (~logits.amax(-1).isfinite()).nonzero().flatten().tolist() if len(logits) else []
    return {int(np.searchsorted(ends, row, side="right")): NOT_FINITE for row in bad}


def score(logits: torch.Tensor, plan: Plan, b: int) -> list[float]:
    """Log-probabilities of the known tokens that follow the wanted positions of request b, logits[wants, vocab]."""
    stop = int(plan.starts[b] + plan.counts[b])
    following = list(plan.requests[b].tokens[stop - len(logits) + 1 : stop + 1])
    logprobs = torch.log_softmax(logits[: len(following)], -1)
    at = torch.tensor(following, dtype=torch.int64, device=logits.device)[:, None]
    return logprobs.gather(-1, at).flatten().tolist()
