"""What runners need of a model: `decoder.Decoder`, and `transformers_model.TransformersModel` for families without a
file here. It knows nothing of pages: attention is a function that is passed to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from radixrt.worker.model.spec.spec import ModelSpec

if TYPE_CHECKING:
    from radixrt.worker.model.layers.fp8 import Activations
    from radixrt.worker.model.layers.mixers import Attend, Mix
    from radixrt.worker.model.lora.adapter import Adapter
    from radixrt.worker.model.predictor import Predictor


class Model(ABC):
    """The weights of a model on one device, and the forward pass over tokens of any number of sequences. Without LoRA
    adapters and quantized weights, unless a subclass says otherwise."""

    spec: ModelSpec
    own_ids: range
    """Token ids whose logits this rank computes."""
    predictor: Predictor | None = None
    """See `ModelSpec.predicts`."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @property
    def sinks(self) -> tuple[torch.Tensor | None, ...]:
        """By layer with attention: the sinks of this rank's query heads, float32[heads], or None."""
        return (None,) * len(self.spec.attention_layers)

    @property
    def has_unquantized_experts(self) -> bool:
        """Whether a layer has experts that are in 16 bits or more."""
        return False

    @property
    def is_fp8(self) -> bool:
        """Whether most weights are in FP8."""
        return False

    @property
    def is_int(self) -> bool:
        """Whether most weights are in integers for a CPU."""
        return False

    @property
    def is_int4(self) -> bool:
        """Whether most weights are in INT4; not for experts."""
        return False

    @property
    def has_adapters(self) -> bool:
        """Whether LoRA adapters are loaded, or can be."""
        return False

    @property
    def max_lora_rank(self) -> int:
        """The largest rank of an adapter for which there is room; 0 if there is none."""
        return 0

    def put_adapter(self, slot: int, adapter: Adapter) -> None:
        """Make an adapter the one of number `slot`, which no step in flight may use. Raises ValueError, and changes
        nothing, if it does not fit this model."""
        raise ValueError("LoRA adapters are not served for this model")

    def use_adapters(self, adapters: torch.Tensor | None) -> None:
        """Set the LoRA adapter of each token of the next forward pass, int32[T], -1: none. None: no token has one."""
        return

    @property
    def own_width(self) -> int:
        """Columns of this rank's logits: those of `own_ids`, and on the last ranks maybe padding."""
        return len(self.own_ids)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
        mix: Mix | None = None,
    ) -> torch.Tensor:
        """float32 logits [S, vocab] for int tokens[T] at int positions[T]: for the tokens at the indices `wanted`,
        int64[S], or for all. `mix` is needed if there are recurrent layers.

        After attention, the last layer is computed only for these tokens."""
        x, residual = self.attend_all(tokens, positions, attend, mix)
        return self.gather(self.finish(x, residual, wanted, tokens=tokens))

    @abstractmethod
    def attend_all(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        mix: Mix | None = None,
        wanted: torch.Tensor | None = None,
    ) -> tuple[Activations, torch.Tensor]:
        """The forward pass up to and including the last layer's attention: its output and the residual stream, for
        `finish`. With int64 wanted[S], the layers after `ModelSpec.writers`, of which there must be some, are computed
        only for these tokens, and so is what is returned."""

    def finish(
        self,
        x: Activations,
        residual: torch.Tensor,
        wanted: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The rest of the forward pass, from the results of `attend_all`: this rank's logits, float32[S, own_width],
        written to `out` if given. `tokens` are needed if layers have inputs."""
        if wanted is not None and not len(wanted):
            return torch.empty((0, self.own_width), device=residual.device)
        return self.logits(self.hidden(x, residual, wanted, tokens), out)

    @abstractmethod
    def hidden(
        self,
        x: Activations,
        residual: torch.Tensor,
        wanted: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `finish`, without the output projection: the hidden states after the final norm, [S, hidden]."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's logits, float32[S, own_width], of hidden states after the final norm; written to `out` if
        given."""

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """All ranks' logits, float32[S, vocab], from those of each rank (`finish`)."""
        return logits
