"""The forward pass of a step that is not one CUDA graph: launched by the host, or as piecewise graphs. It is begun as
soon as the step's arrays are sent, so that the device may start while the host prepares the attention."""

from __future__ import annotations

from typing import Protocol

import torch

from radixrt.worker.cuda.attention.attention_groups import MixedAttention
from radixrt.worker.cuda.attention.step import StepAttention
from radixrt.worker.cuda.graphs.piecewise_graphs import PiecewiseGraphs
from radixrt.worker.cuda.recurrent.delta_step import DeltaStep
from radixrt.worker.cuda.sampling.answers import LastTokens
from radixrt.worker.model.layers.fp8 import Activations
from radixrt.worker.model.layers.mixers import Attend
from radixrt.worker.model.model import Model

Attended = tuple[torch.Tensor, Activations, torch.Tensor, torch.Tensor | None]
"""The tokens, int32[T], with those of the step before in place of FROM_DEVICE; what `Decoder.attend_all` returns; and
int64[S]: the tokens whose logits are wanted, None if these are all that are left."""


class ForwardPass(Protocol):
    """The forward pass of one step."""

    size: int
    """Tokens of the step, with padding."""

    def begin(self, inputs: torch.Tensor) -> None:
        """Take int32[5, size]: tokens, positions, slots, rows of the page table, adapters."""

    def attend(self, attention: Attend, mix: DeltaStep | None, wanted: torch.Tensor) -> Attended:
        """All layers up to the last attention. Logits are wanted of the tokens int64 wanted[S]."""


class Eager:
    """Kernels that the host launches one by one. The first `decodes` tokens may be FROM_DEVICE. `narrow`: layers after
    `ModelSpec.writers` are computed only for tokens whose logits are wanted."""

    def __init__(self, model: Model, last_tokens: LastTokens, size: int, decodes: int, narrow: bool) -> None:
        self.size = size
        self._model = model
        self._last_tokens = last_tokens
        self._decodes = decodes
        self._narrow = narrow

    def begin(self, inputs: torch.Tensor) -> None:
        self._tokens, self._positions, _, self._rows, _ = inputs

    def attend(self, attention: Attend, mix: DeltaStep | None, wanted: torch.Tensor) -> Attended:
        tokens = self._last_tokens.resolve(self._tokens, self._rows[: self._decodes])
        last = wanted if self._narrow else None
        x, residual = self._model.attend_all(tokens, self._positions, attention, mix, last)
        if self._narrow and len(wanted):
            return tokens[wanted], x, residual, None
        return tokens, x, residual, wanted


class Piecewise:
    """The graphs of one size."""

    def __init__(self, pieces: PiecewiseGraphs, size: int) -> None:
        self.size = size
        self._pieces = pieces

    def begin(self, inputs: torch.Tensor) -> None:
        self._pieces.begin(inputs)

    def attend(self, attention: Attend, mix: DeltaStep | None, wanted: torch.Tensor) -> Attended:
        assert isinstance(attention, StepAttention | MixedAttention)
        return *self._pieces.go_on(self.size, attention, mix), wanted
