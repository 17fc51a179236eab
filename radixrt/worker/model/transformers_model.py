"""A fallback for dense families that have no file here: transformers computes the model, and its attention is that of
all other families, over pages (`--model-impl transformers`).

    transformers   embedding -> [norms, q, k, v, RoPE -> attention interface -> output, MLP] ... -> norm -> head
    here                                                 K, V -> pages -> attention

A step's tokens, of any number of sequences, are one row [1, T] of a batch without a mask. So nothing but attention may
mix tokens, and only their positions may tell where they stand. A trial on the meta device finds out what attention each
layer asks for (`read_spec`), a second one whether tokens are computed alike alone and beside others (`load`)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from radixrt.checkpoint.files import not_served
from radixrt.worker.model.layers.layers import Heads
from radixrt.worker.model.model import Model
from radixrt.worker.model.spec.spec import AttentionSpec, ModelSpec
from radixrt.worker.model.weights.checkpoint import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from radixrt.worker.model.layers.fp8 import Activations
    from radixrt.worker.model.layers.mixers import Attend, Projected

NAME = "radixrt"
"""Of the attention among those of transformers."""
NOT_SERVED = "model_type {!r} cannot be computed by transformers (--model-impl)"
HARMLESS = {"dropout", "position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states"}
HARMLESS |= {"output_router_logits", "return_dict", "sliding_window", "softcap", "is_causal"}
"""Arguments of attention that are served, or change nothing."""
CHANGING_ROPES = {"dynamic", "longrope"}
"""Kinds of RoPE whose angles depend on the longest sequence of a batch: cached keys would not fit later ones."""
TOLERANCE = {torch.float32: 1e-3}
"""How much a token's hidden state may depend on what is beside it, as a share of the largest value; in 16 bits
SIXTEEN_BITS."""
SIXTEEN_BITS = 0.1


@dataclass(frozen=True, slots=True)
class _Call:
    """What a layer asks of attention."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    cap: float | None


@dataclass(slots=True)
class _Door:
    """Where the attention of a model's layers goes, one call each."""

    attend: Attend | None = None
    layer: int = 0
    calls: list[_Call] | None = field(default_factory=list)
    """What layers have asked for; None when it is known."""

    def __call__(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object, scale: float | None,
        others: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        """[T, heads, D] for q[T, heads, D], k and v[T, kv_heads, D], rotated."""
        if self.calls is not None:
            self.calls.append(_call(module, q, k, v, mask, scale, others))
        assert self.attend is not None
        cos, sin = q.new_ones((len(q), 1, 1)), q.new_zeros((len(q), 1, 1))  # a rotation by 0
        self.layer += 1
        return self.attend(self.layer - 1, Heads(torch.cat((q, k, v), 1), q.shape[1], None, 0.0, cos, sin))


def _call(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object, scale: float | None,
    others: dict[str, Any],
) -> _Call:  # fmt: skip
    """ValueError says what of it is not served."""
    unknown = sorted(name for name, value in others.items() if value is not None and name not in HARMLESS)
    missing = f"attention with {', '.join(unknown)}" if unknown else ""
    if mask is not None:
        missing = "attention with masks of its own"
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        missing = "attention to later tokens"
    if k.shape != v.shape or q.shape[2] != k.shape[2]:
        missing = "heads whose keys and values differ in size"
    if missing:
        raise ValueError(missing)
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    return _Call(q.shape[1], k.shape[1], q.shape[2], scale, others.get("sliding_window"), others.get("softcap"))


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: object,
    scaling: float | None = None, **others: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention as transformers calls it: [1, T, heads, D] for tensors [1, heads, T, D]."""
    door: _Door = module.__dict__["door"]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return door(module, q, k, v, attention_mask, scaling, others)[None], None


def _of_own_values(layer: int, heads: Projected) -> torch.Tensor:
    """Attention of each token to itself alone, for trials."""
    q, _, v = heads.split()
    assert v is not None
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


class _Given(nn.Module):
    """In place of all that a model has before its head: gives what was computed already."""

    hidden: torch.Tensor

    @property
    def decoder(self) -> _Given:
        """What OPT's head asks, rather than the whole."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.hidden)


class TransformersModel(Model):
    """A model that transformers computes, all but its attention."""

    def __init__(self, model: PreTrainedModel, spec: ModelSpec | None = None) -> None:
        """`spec`: None for a trial."""
        if spec is not None:
            self.spec, self.own_ids = spec, range(spec.vocab_size)
        self.door = _Door()
        for module in model.modules():
            module.__dict__["door"] = self.door
        self._body: nn.Module = model.base_model
        self._given = _Given()
        self._head = copy.copy(model)
        self._head.__dict__["_modules"] = dict(model._modules) | {model.base_model_prefix: self._given}
        weight = next(model.parameters())
        self._device, self._dtype = weight.device, weight.dtype

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def attend_all(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, *_: object, **__: object
    ) -> tuple[Activations, torch.Tensor]:
        """As all of the forward pass is by transformers, both results are the hidden states after the final norm."""
        self.door.attend, self.door.layer = attend, 0
        made = self._body(input_ids=tokens.long()[None], position_ids=positions.long()[None], use_cache=False)
        self.door.attend = None
        hidden = made.last_hidden_state[0]
        return hidden, hidden

    def hidden(
        self, x: Activations, residual: torch.Tensor, wanted: torch.Tensor | None = None, *_: object, **__: object
    ) -> torch.Tensor:
        return residual if wanted is None else residual[wanted]

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self._given.hidden = hidden[None]
        logits: torch.Tensor = self._head().logits[0].float()
        return logits if out is None else out.copy_(logits)


def read_spec(folder: Path, longest: int = 0) -> ModelSpec:
    """What runners have to know of a checkpoint's model, for contexts of up to `longest` tokens (0: the model's own
    limit). ValueError says what of it is not served, or names that limit if it is shorter."""
    config = _read_config(folder)
    name = NOT_SERVED.format(config.model_type)
    try:
        _check_dense(config)
        with torch.device("meta"), torch.inference_mode():
            model = _auto().from_config(config, attn_implementation=NAME, trust_remote_code=False).eval()
            if any(name.endswith("experts") for name, _ in model.named_modules()):
                raise ValueError("it has experts")
            trial = TransformersModel(model)
            ids = torch.zeros(2, dtype=torch.int64)
            hidden = trial.attend_all(ids, ids, _of_own_values)[1]
            calls = trial.door.calls or []
            _check_attention(config, calls)
            vocab_size = trial.logits(hidden).shape[-1]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    except Exception as error:  # many models, each with its own ways not to take part
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
        raise ValueError(f"{name}: it cannot do without attention of its own ({reason})") from error
    first, most, hidden_size = calls[0], config.max_position_embeddings, hidden.shape[-1]
    elements = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and _is_of_layer(name))
    inner = elements // len(calls) // hidden_size - 2 * first.head_dim * (first.heads + first.kv_heads)
    return ModelSpec(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=max(1, inner // 3),
        num_layers=len(calls),
        num_heads=first.heads,
        num_kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        max_model_len=most,
        norm_eps=0.0,
        rope={},
        activation="silu",
        tied=False,
        windows=tuple(None if call.window is None or call.window >= most else call.window for call in calls),
        attention=AttentionSpec(scale_override=first.scale, score_cap=first.cap),
    ).shortened(longest or most)


def load(folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int | None) -> Model:
    """The model of a checkpoint, whose safetensors are read without running code of its own; with a `seed`, random
    weights. ValueError if tensors are missing, or if tokens are not computed alike beside others."""
    options: dict[str, Any] = {"attn_implementation": NAME, "trust_remote_code": False, "dtype": dtype}
    if seed is not None:
        torch.manual_seed(seed)
        model = _auto().from_config(_read_config(folder), **options)
    else:
        try:
            model, loading_info = _auto().from_pretrained(
                folder, use_safetensors=True, local_files_only=True, output_loading_info=True, **options
            )
        except OSError as error:
            raise ValueError(f"{folder}: {error}") from error
        if missing := sorted(loading_info["missing_keys"]):
            raise ValueError(f"the checkpoint has no tensor {', '.join(missing[:5])}")
    made = TransformersModel(model.eval().to(device), spec)
    if not _is_alike_alone(made):
        name = NOT_SERVED.format(model.config.model_type)
        raise ValueError(f"{name}: more than attention mixes its tokens, or tells where they are")
    made.door.calls = None
    return made


def weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Bytes of the model's weights in `dtype`, without loading any."""
    with torch.device("meta"):
        model = _auto().from_config(_read_config(folder), trust_remote_code=False, dtype=dtype)
    return sum(p.nbytes for p in model.parameters())


def _is_alike_alone(model: TransformersModel) -> bool:
    """Whether a token's hidden state is the same alone as beside others when it attends to itself. It is not where
    there are convolutions, say, or if positions come from elsewhere than from those that are passed."""
    tokens = torch.arange(1, 4, device=model.device) % model.spec.vocab_size
    positions = torch.tensor([5, 0, 3], device=model.device) % model.spec.max_model_len
    with torch.inference_mode():
        together = model.attend_all(tokens, positions, _of_own_values)[1].float()
        alone = [
            model.attend_all(t, p, _of_own_values)[1].float()
            for t, p in zip(tokens.split(1), positions.split(1), strict=True)
        ]
    bound = TOLERANCE.get(model.dtype, SIXTEEN_BITS) * together.abs().max()
    return bool((torch.cat(alone) - together).abs().max() <= bound)


def _auto() -> Any:
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(NAME, _attention)
    return AutoModelForCausalLM


def _read_config(folder: Path) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING, AutoConfig

    if (family := read_json(folder / "config.json").get("model_type", "")) not in CONFIG_MAPPING:
        raise ValueError(f"{not_served(str(family))}, and those that transformers has")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # an unknown model_type, code of its own, values that its checks refuse
        raise ValueError(f"{folder}/config.json: {str(error).splitlines()[0][:300]}") from error
    return config


def _check_dense(config: PreTrainedConfig) -> None:
    """ValueError says why a model is none of plain text with layers of one kind."""
    if config.is_encoder_decoder:
        raise ValueError("it has an encoder")
    if config.get_text_config() is not config:
        raise ValueError("it is not for text alone")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("its weights are quantized")
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        raise ValueError("its config.json does not say how many positions it has")
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {str(one.get("rope_type")) for one in (ropes, *ropes.values()) if isinstance(one, dict)}
    if others := sorted(kinds & CHANGING_ROPES):
        raise ValueError(f"its positions are of the kind {others[0]}")


def _check_attention(config: PreTrainedConfig, calls: list[_Call]) -> None:
    """ValueError says what of the layers' attention is not served."""
    if len(calls) != config.num_hidden_layers:
        raise ValueError(
            f"its {config.num_hidden_layers} layers use transformers' attention interface {len(calls)} times, and not "
            "once each; layers that are recurrent, or have ALiBi, do not"
        )
    if len({(call.heads, call.kv_heads, call.head_dim, call.scale, call.cap) for call in calls}) > 1:
        raise ValueError("its layers have different heads")
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or [f"{'sliding' if window else 'full'}_attention"] * len(calls)
    if others := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise ValueError(f"it has layers of the kind {others[0]}")
    if any(kind == "sliding_attention" and not call.window for kind, call in zip(kinds, calls, strict=True)):
        raise ValueError("it has sliding windows that its attention is not told of")


def _is_of_layer(name: str) -> bool:
    """Whether a parameter is one of a layer: its name has a number."""
    return any(part.isdecimal() for part in name.split("."))
