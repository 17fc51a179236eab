"""Samples tokens from logits. A request's logits go through these steps, where its Sampling has the parameter:

    raw logits -> log-probabilities that are reported
      repetition, presence, frequency penalty -> allowed_token_ids, logit_bias, bad_token_ids
      -> stop ids banned below min_tokens
      -> mask of the grammar (with a grammar, the mask includes the ban of stop ids)
      greedy: argmax
      else: / temperature -> min_p -> top_k -> top_p -> + Gumbel noise -> argmax

The noise depends on (seed, position, token id) alone: not on the batch, the worker, or what was cached.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from radixrt.messages import Sampling
from radixrt.messages.ranks import RequestInfo
from radixrt.worker.plan import Gained


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device; to a GPU asynchronously, from pinned memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


Ahead = Mapping[int, Sequence[int]]
"""By row of the logits: the drafted tokens between the known tokens of its request and the token sampled there."""


class Sampler(Protocol):
    """The operations that differ between devices. Logits are float32[B, vocab]."""

    def penalize(
        self, logits: torch.Tensor, requests: Sequence[RequestInfo], rows: np.ndarray, gained: Mapping[int, Gained],
        ahead: Ahead,
    ) -> None:  # fmt: skip
        """Apply the penalties of requests in place. `rows`, int[B], are theirs in the page table. `gained`, by row of
        the logits, are the tokens that they have gained since the last call."""

    def mask(self, logits: torch.Tensor, masks: Masks) -> None:
        """Set the logits of tokens that grammars do not allow to -inf, in place."""

    def largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(argmax int64[B], the smallest id where several are equal; bool[B]: the maximum is finite and none is
        NaN)."""

    def sample(self, logits: torch.Tensor, rows: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """Sample from logits[rows], by temperature, min_p, top_k, top_p and noise: int64[N]."""


class TorchSampler:
    """The reference implementation, in plain torch."""

    def __init__(self) -> None:
        self._tokens: dict[int, array[int]] = {}
        """By row of the page table: the tokens of its request, if it has penalties."""

    def penalize(
        self, logits: torch.Tensor, requests: Sequence[RequestInfo], rows: np.ndarray, gained: Mapping[int, Gained],
        ahead: Ahead,
    ) -> None:  # fmt: skip
        for row, request in enumerate(requests):
            if request.penalized:
                tokens = self._tokens.setdefault(int(rows[row]), array("i"))
                if row in gained:
                    del tokens[gained[row].first :]
                    tokens.frombytes(gained[row].ids.tobytes())
                penalize(logits[row], request, [*tokens, *ahead.get(row, ())])

    def mask(self, logits: torch.Tensor, masks: Masks) -> None:
        bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
        banned = (masks.bits.view(torch.uint8)[:, :, None] >> bits) & 1 == 0
        banned = banned.flatten(1)[:, : logits.shape[-1]]
        logits[masks.rows] = logits[masks.rows].masked_fill_(banned, -torch.inf)

    def largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        peaks, tokens = logits.max(-1)
        return tokens, peaks.isfinite()  # max returns NaN if there is any

    def sample(self, logits: torch.Tensor, rows: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        return sample_tokens(logits[rows.long()], metadata)


def choose(
    logits: torch.Tensor, requests: Sequence[RequestInfo], rows: np.ndarray, positions: Sequence[int],
    sampler: Sampler, masks: Masks | None = None, ahead: Mapping[int, Sequence[int]] = {},
    gained: Mapping[int, Gained] = {}, banned: Mapping[int, Sequence[int]] = {},
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Choose one token per request from float32 logits[B, vocab], which are overwritten. Returns (int64[B], bool[B]
    whether the largest allowed logit is finite). `positions` are those of the new tokens; `rows`, int[B], are the
    requests' in the page table. For `gained` and `banned`, here by row of the logits, see `plan.SampleInputs`."""
    sampler.penalize(logits, requests, rows, gained, ahead)
    for row, request in enumerate(requests):
        if request.adjusted:
            adjust(logits[row], request, banned.get(row, ()))
    if masks is not None:
        sampler.mask(logits, masks)
    random_rows = [row for row, request in enumerate(requests) if not request.greedy]
    tokens, finite = sampler.largest(logits)
    if random_rows:
        at = to_device(np.array(random_rows), logits.device)
        arrays = SamplingMetadata.arrays(
            [requests[row].sampling for row in random_rows], [positions[row] for row in random_rows]
        )
        metadata = SamplingMetadata.of({name: to_device(array, at.device) for name, array in arrays.items()})
        tokens[at] = sampler.sample(logits, at, metadata)
    return tokens, finite


# ---------------------------------------------------------------- what changes the logits


def penalize(logits: torch.Tensor, request: RequestInfo, known: Sequence[int]) -> None:
    """Apply penalties to the logits[vocab] after a request's `known` tokens, in place."""
    s, tokens = request.sampling, np.array(known)
    if s.repetition_penalty != 1.0:  # CTRL (arXiv 1909.05858): on tokens of prompt and output, by the sign of the logit
        at = _index(np.unique(tokens), logits)
        seen = logits[at]
        logits[at] = torch.where(seen > 0, seen / s.repetition_penalty, seen * s.repetition_penalty)
    if (s.presence_penalty or s.frequency_penalty) and len(tokens) > request.prompt_len:
        ids, counts = np.unique(tokens[request.prompt_len :], return_counts=True)
        times = to_device(counts.astype(np.float32), logits.device)
        logits[_index(ids, logits)] -= s.presence_penalty + s.frequency_penalty * times


def adjust(logits: torch.Tensor, request: RequestInfo, banned: Sequence[int] = ()) -> None:
    """Apply allowed_token_ids, logit_bias, and the ban of some ids to one request's logits[vocab], in place."""
    s = request.sampling
    if request.allowed:
        at = _index(np.frombuffer(request.allowed, dtype=np.int64).copy(), logits)
        kept = logits[at]
        logits.fill_(-torch.inf)
        logits[at] = kept
    if s.logit_bias:
        bias = to_device(np.array(list(s.logit_bias.values()), dtype=np.float32), logits.device)
        logits[_index(list(s.logit_bias), logits)] += bias
    if banned:
        logits[_index(list(banned), logits)] = -torch.inf


def _index(ids: np.ndarray | list[int], logits: torch.Tensor) -> torch.Tensor:
    return to_device(np.asarray(ids, dtype=np.int64), logits.device)


@dataclass(frozen=True, slots=True)
class Masks:
    """The tokens that the grammars of N requests allow."""

    bits: torch.Tensor
    """int32[N, ceil(vocab / 32)], on the device of the logits: bit i % 32 of word i // 32 for id i."""
    rows: torch.Tensor
    """int64[N]: the requests' rows of the logits."""


# ---------------------------------------------------------------- sampling


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The sampling parameters of B requests, each [B, 1]; None where no request sets it."""

    temperature: torch.Tensor
    keys: torch.Tensor
    """int64: seeds of the noise, one for each request and position."""
    min_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None

    @property
    def cuts(self) -> bool:
        """Whether min_p, top_k or top_p exclude tokens."""
        return any(x is not None for x in (self.min_p, self.top_k, self.top_p))

    @staticmethod
    def arrays(samplings: Sequence[Sampling], positions: Sequence[int]) -> dict[str, np.ndarray]:
        """The fields as host arrays, each [B], by name: `keys` int64, `top_k` int32, the others float32. Temperatures
        above HOTTEST are as that."""
        keys = [_signed(_mix(_mix((s.seed or 0) & _MASK) ^ p)) for s, p in zip(samplings, positions, strict=True)]
        arrays: dict[str, np.ndarray] = {
            "temperature": np.array([min(s.temperature, HOTTEST) for s in samplings], dtype=np.float32),
            "keys": np.array(keys, dtype=np.int64),
        }
        if any(s.min_p > 0 for s in samplings):
            arrays["min_p"] = np.array([s.min_p for s in samplings], dtype=np.float32)
        if any(s.top_k > 0 for s in samplings):
            arrays["top_k"] = np.array([s.top_k if s.top_k > 0 else _ALL for s in samplings], dtype=np.int32)
        if any(s.top_p < 1 for s in samplings):
            arrays["top_p"] = np.array([s.top_p for s in samplings], dtype=np.float32)
        return arrays

    @classmethod
    def of(cls, arrays: dict[str, torch.Tensor]) -> SamplingMetadata:
        """Make SamplingMetadata from `arrays` that were copied to the device, also if viewed as int32."""
        types = {"keys": torch.int64, "top_k": torch.int32}
        return cls(**{name: x.view(types.get(name, torch.float32)).view(-1, 1) for name, x in arrays.items()})


_ALL = (1 << 31) - 1
HOTTEST = 1e30
"""All tokens that are not excluded are equally likely then. The inverse of higher temperatures is not a normal float32;
GPUs may compute 0, and NaN for logits of -inf."""


def sample_tokens(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """Sample from logits[B, vocab] by temperature, min_p, top_k, top_p and each request's noise: int64[B]."""
    logits = logits / metadata.temperature
    if metadata.min_p is not None:
        logits = keep_min_p(logits, metadata.min_p)
    if metadata.top_k is not None or metadata.top_p is not None:
        logits = keep_top(logits, metadata.top_k, metadata.top_p)
    return (logits + gumbel(metadata.keys, logits.shape[-1])).argmax(-1)


def keep_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Exclude tokens less probable than `min_p`[B, 1] times the most likely one; with 0 none."""
    threshold = logits.amax(-1, keepdim=True) + min_p.log()
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_top(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """Keep the `top_k` most likely tokens, and of these the fewest whose probabilities sum to at least `top_p`; both
    are [B, 1], or None to keep all. Of equally likely tokens the smaller ids come first, so that exactly k are kept."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    if top_k is not None:
        ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
    if top_p is not None:
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        # Rounded sums may reach 1 before the last token: top_p 1 keeps all.
        ordered = ordered.masked_fill((before >= top_p) & (top_p < 1) & (rank > 0), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def gumbel(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """float32[B, vocab] of standard Gumbel noise for int64 keys[B, 1]: argmax(logits + noise) is a draw from
    softmax(logits).

    The random bits are SplitMix64 (Steele, Lea, Flood 2014) of a counter made of the key and the token id.
    """
    start = keys
    bits = start + torch.arange(1, vocab_size + 1, device=keys.device) * _signed(_GAMMA)
    bits = (bits ^ _shifted(bits, 30)) * _signed(_FIRST)
    bits = (bits ^ _shifted(bits, 27)) * _signed(_SECOND)
    bits = bits ^ _shifted(bits, 31)
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53
    return (-(-uniform.log()).log()).float()


_MASK = (1 << 64) - 1
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix(value: int) -> int:
    """One SplitMix64 output of a state."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """The int64 with the bits of a uint64: torch multiplies and adds these modulo 2^64."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift to the right (torch's is arithmetic)."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
