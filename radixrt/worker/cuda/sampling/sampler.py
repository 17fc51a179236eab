"""The Sampler of a GPU (see `execution.sampler`), which neither sorts the vocabulary nor loops over requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import triton
import triton.language as tl

from radixrt.messages.ranks import RequestInfo
from radixrt.worker.cuda.flashinfer_builds import load_flashinfer
from radixrt.worker.cuda.sampling import sampling_kernels
from radixrt.worker.execution import sampler as sample
from radixrt.worker.execution.sampler import Ahead, Masks, SamplingMetadata, to_device
from radixrt.worker.plan import Gained


class Thresholds(Protocol):
    """The functions of `flashinfer.sampling` that are used: probabilities are float32[B, vocab], thresholds [B]."""

    def softmax(self, logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor: ...

    def top_k_renorm_probs(self, probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor: ...

    def top_p_renorm_probs(
        self, probs: torch.Tensor, top_p: torch.Tensor, is_deterministic: bool = False
    ) -> torch.Tensor: ...


def find_thresholds(vocab: int, device: torch.device) -> Thresholds:
    """FlashInfer's functions, after building their kernels and running them once. Any exception means that they cannot
    be used."""
    found = load_flashinfer().sampling
    logits = torch.zeros((2, vocab), dtype=torch.float32, device=device)
    ones = torch.ones((2, 1), dtype=torch.float32, device=device)
    metadata = SamplingMetadata(ones, ones.long(), 0.1 * ones, 5 * ones.int(), 0.5 * ones)
    _kept(found, logits, metadata)
    torch.cuda.synchronize(device)
    return found


class LateThresholds:
    """Thresholds whose kernels may still be being compiled: called, they are there or None. They are looked for once
    they are `ready`, by the thread that calls."""

    def __init__(self, ready: Callable[[], bool], find: Callable[[], Thresholds | None]) -> None:
        self._ready = ready
        self._find: Callable[[], Thresholds | None] | None = find
        self._found: Thresholds | None = None

    def __call__(self) -> Thresholds | None:
        if self._find is not None and self._ready():
            self._found, self._find = self._find(), None
        return self._found


def _kept(thresholds: Thresholds, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """float32[B, vocab], above 0 for the tokens that min_p, top_k and top_p keep. Tokens of equal probability are
    either all kept or all excluded."""
    shares = thresholds.softmax(logits, metadata.temperature[:, 0])
    if metadata.min_p is not None:
        shares = shares.masked_fill_(shares < metadata.min_p * shares.amax(-1, keepdim=True), 0.0)
    if metadata.top_k is not None:
        shares = thresholds.top_k_renorm_probs(shares, metadata.top_k[:, 0])
    elif metadata.min_p is not None and metadata.top_p is not None:
        shares /= shares.sum(-1, keepdim=True)
    if metadata.top_p is not None:
        some = thresholds.top_p_renorm_probs(shares, metadata.top_p[:, 0], is_deterministic=True)
        shares = torch.where(metadata.top_p < 1, some, shares)  # rounded sums may reach 1 before the last token
    return shares


class CudaSampler:
    """A Sampler for a page table of `rows` rows. Without `thresholds`, and until they are there, torch sorts the
    vocabulary for min_p, top_k and top_p."""

    def __init__(
        self, rows: int, vocab: int, device: torch.device, thresholds: Thresholds | LateThresholds | None = None
    ) -> None:
        self._penalties = Penalties(rows, vocab, device)
        self._thresholds = thresholds

    def penalize(
        self, logits: torch.Tensor, requests: Sequence[RequestInfo], rows: np.ndarray, gained: Mapping[int, Gained],
        ahead: Ahead,
    ) -> None:  # fmt: skip
        self._penalties.apply(logits, requests, rows, gained, ahead)

    def mask(self, logits: torch.Tensor, masks: Masks) -> None:
        sampling_kernels.mask(logits, masks.rows, masks.bits)

    def largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        finite, tokens = sampling_kernels.largest(logits).view(2, -1)
        return tokens.long(), finite != 0

    def sample(self, logits: torch.Tensor, rows: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        kept = None
        if metadata.cuts:
            mine = logits[rows.long()]
            late = self._thresholds
            thresholds = late() if isinstance(late, LateThresholds) else late
            if thresholds is None:
                return sample.sample_tokens(mine, metadata)
            kept = _kept(thresholds, mine, metadata)
        return sampling_kernels.sample_tokens(logits, rows, metadata.temperature, metadata.keys, kept)


# ---------------------------------------------------------------- penalties

IN_PROMPT = 1 << 30
"""Bit of a count: the token is in the prompt. The bits below count how often it was generated."""
FIELDS = 5
"""Integers of a penalized request: its row of the logits, its row of the counts, and the bits of its three penalties,
float32."""


@triton.jit(do_not_specialize=["entries"])
def _note_kernel(entries_ptr, counts_ptr, entries, vocab, IN_PROMPT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < entries
    row = tl.load(entries_ptr + i, mask=inside, other=0).to(tl.int64)
    token = tl.load(entries_ptr + entries + i, mask=inside, other=0)
    what = tl.load(entries_ptr + 2 * entries + i, mask=inside, other=0)
    at = counts_ptr + row * vocab + token
    tl.atomic_or(at, what, mask=inside & (what == IN_PROMPT))
    tl.atomic_add(at, what, mask=inside & (what != IN_PROMPT))


@triton.jit(do_not_specialize=["requests"])  # otherwise it is compiled again for 1 and multiples of 16
def _penalize_kernel(
    logits_ptr, who_ptr, counts_ptr, requests, vocab, stride, IN_PROMPT: tl.constexpr, BLOCK: tl.constexpr
):
    who = who_ptr + tl.program_id(0)
    row = tl.load(who).to(tl.int64)
    held = tl.load(who + requests).to(tl.int64)
    repetition = tl.load(who + 2 * requests).to(tl.float32, bitcast=True)
    presence = tl.load(who + 3 * requests).to(tl.float32, bitcast=True)
    frequency = tl.load(who + 4 * requests).to(tl.float32, bitcast=True)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    count = tl.load(counts_ptr + held * vocab + token, mask=inside, other=0)
    at = logits_ptr + row * stride + token
    logits = tl.load(at, mask=inside, other=0.0)
    seen = count != 0
    times = (count & (IN_PROMPT - 1)).to(tl.float32)
    logits = tl.where(seen, tl.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits -= tl.where(times > 0, presence + frequency * times, 0.0)
    tl.store(at, logits, mask=inside & seen)


@dataclass(frozen=True, slots=True)
class _More:
    """Drafted tokens of penalized requests, which are not in the counts: their penalties are computed separately."""

    fields: torch.Tensor
    """int32[7, N]: row of the logits, row of the counts, token, how often it is in the draft, and the last three of
    FIELDS."""
    raw: torch.Tensor
    """float32[N]: their logits without penalties."""

    @classmethod
    def of(cls, logits: torch.Tensor, fields: torch.Tensor) -> _More:
        return cls(fields, logits[fields[0].long(), fields[2].long()])

    def apply(self, logits: torch.Tensor, counts: torch.Tensor) -> None:
        """Penalize these tokens in float32 logits[B, vocab], as `_penalize_kernel` does."""
        row, held, token = self.fields[:3].long()
        repetition, presence, frequency = self.fields[4:].view(torch.float32)
        times = ((counts[held, token] & (IN_PROMPT - 1)) + self.fields[3]).float()
        repeated = torch.where(self.raw > 0, self.raw / repetition, self.raw * repetition)
        logits[row, token] = repeated - (presence + frequency * times)


class Penalties:
    """Counts of each request's tokens, which are kept on the device: each token is sent and counted once."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self._rows, self._vocab, self._device = rows, vocab, device
        self._counts: torch.Tensor | None = None
        """int32[rows, vocab], by row of the page table: how often a token was generated, and IN_PROMPT. Allocated for
        the first request with penalties."""

    def apply(
        self, logits: torch.Tensor, requests: Sequence[RequestInfo], rows: np.ndarray, gained: Mapping[int, Gained],
        ahead: Ahead,
    ) -> None:  # fmt: skip
        """As `Sampler.penalize`. Tokens in `ahead` do not enter the counts, since they may be rejected."""
        penalized = [n for n, request in enumerate(requests) if request.penalized]
        if not penalized:
            return
        if self._counts is None:
            self._counts = torch.zeros((self._rows, self._vocab), dtype=torch.int32, device=self._device)
        self._count([(requests[n], int(rows[n]), gained[n]) for n in penalized if n in gained])
        samplings = [requests[n].sampling for n in penalized]
        strengths = [(s.repetition_penalty, s.presence_penalty, s.frequency_penalty) for s in samplings]
        who = np.empty((FIELDS, len(penalized)), dtype=np.int32)
        who[0], who[1] = penalized, rows[penalized]
        who[2:] = np.array(strengths, dtype=np.float32).view(np.int32).T
        more = self._more(logits, who, ahead)
        block = 4096
        _penalize_kernel[(len(penalized), triton.cdiv(self._vocab, block))](
            logits, to_device(who, self._device), self._counts, len(penalized), self._vocab, logits.stride(0),
            IN_PROMPT, block, num_warps=8,
        )  # fmt: skip
        if more is not None:
            more.apply(logits, self._counts)

    def _more(self, logits: torch.Tensor, who: np.ndarray, ahead: Ahead) -> _More | None:
        """The drafted tokens of penalized requests; None if there are none. To be called before `logits` are
        penalized."""
        found = [
            (row, held, token, times, *strengths)
            for row, held, *strengths in who.T.tolist()
            for token, times in Counter(ahead.get(row, ())).items()
        ]
        return _More.of(logits, to_device(np.array(found, dtype=np.int32).T.copy(), self._device)) if found else None

    def _count(self, requests: list[tuple[RequestInfo, int, Gained]]) -> None:
        """Count the tokens that requests have gained since the last call."""
        assert self._counts is not None
        if not requests:
            return
        fresh, parts = [], []
        for request, row, (first, ids) in requests:
            if first == 0:
                fresh.append(row)
            what = np.ones_like(ids)
            what[: max(0, request.prompt_len - first)] = IN_PROMPT
            parts.append(np.stack([np.full_like(ids, row), ids, what]))
        if fresh:
            self._counts.index_fill_(0, to_device(np.array(fresh), self._device), 0)
        entries = np.concatenate(parts, axis=1)
        count, block = entries.shape[1], 256
        if count:
            _note_kernel[(triton.cdiv(count, block),)](
                to_device(entries, self._device), self._counts, count, self._vocab, IN_PROMPT, block, num_warps=4
            )
