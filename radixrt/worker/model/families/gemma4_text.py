"""Gemma 4: layers with full attention have larger heads than those with sliding windows, and in larger models no
projection to V; smaller models have inputs of each layer, and their last layers read K and V of earlier ones."""

import dataclasses
from typing import Any

from radixrt.worker.model.families import gemma3_text
from radixrt.worker.model.layers.layer_inputs import LayerEnd, LayerInputs
from radixrt.worker.model.layers.layers import DecoderLayer, FeedForward
from radixrt.worker.model.layers.linear import Linear
from radixrt.worker.model.layers.mlp import SharedMlp
from radixrt.worker.model.layers.norms import Norm
from radixrt.worker.model.layers.parallel_experts import MlpWithExperts
from radixrt.worker.model.spec.expert_spec import ExpertsSpec
from radixrt.worker.model.spec.fields import common, layer_kinds, layer_windows, rope_parameters, with_experts
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import LayerSpec, ModelSpec
from radixrt.worker.model.weights.weight_loader import WeightLoader

NORMS = dataclasses.replace(gemma3_text.NORMS, offset=0.0)
DEFAULTS: dict[str, Any] = {"vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216}
DEFAULTS |= {"num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
DEFAULTS |= {"max_position_embeddings": 131_072, "sliding_window": 512, "hidden_activation": "gelu_pytorch_tanh"}
DEFAULTS |= {"tie_word_embeddings": True, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0}
DEFAULTS |= {"global_head_dim": 512}
DEFAULTS["rope_parameters"] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
FUSED_NAMES = (("router.proj.weight", "experts.gate_up_proj", "experts.down_proj"),)


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `layer_types`, every 6th layer has full attention; the last one always has. The softmax scale is 1; norms
    of q, k and v keep scores small. Tokens of text attend to those before them also if `use_bidirectional_attention` is
    `vision`."""
    config = DEFAULTS | {name: value for name, value in config.items() if value is not None}
    if config.get("use_bidirectional_attention") == "all":
        raise ValueError("use_bidirectional_attention 'all' is not served")
    vocab = config.get("vocab_size_per_layer_input", config["vocab_size"])
    if config["hidden_size_per_layer_input"] and vocab != config["vocab_size"]:
        raise ValueError(f"vocab_size_per_layer_input {vocab} is not served; vocab_size is")
    kinds = [*layer_kinds(config, 6)[:-1], "full_attention"]
    config |= {"layer_types": kinds, "hidden_act": config["hidden_activation"]}
    layers = layer_sizes(config)
    ropes = {
        kind: rope_parameters(config | {"rope_parameters": config["rope_parameters"][kind]}) for kind in set(kinds)
    }
    plain = common(
        config | {"rope_parameters": ropes["full_attention"]},
        windows=layer_windows(config),
        layers=layers,
        layer_ropes=tuple(ropes[kind] | {"rotated": sizes.head_dim} for kind, sizes in zip(kinds, layers, strict=True)),
        qk_norm=True,
        attention_bias=True,
        norms=NORMS,
        scale_override=1.0,
        embedding_factor=config["hidden_size"] ** 0.5,
        logits_cap=config.get("final_logit_softcapping"),
        layer_inputs=config["hidden_size_per_layer_input"],
        loader=Gemma4Loader,
    )
    return with_experts(plain, experts(config)) if config.get("enable_moe_block") else plain


def layer_sizes(config: dict[str, Any]) -> tuple[LayerSpec, ...]:
    """The last `num_kv_shared_layers` layers read K and V of the last one before them of the same type. With
    `use_double_wide_mlp`, their MLPs are twice as wide. transformers writes what differs as `per_layer_config`."""
    kinds, heads = config["layer_types"], config["num_attention_heads"]
    tied, first_shared = bool(config.get("attention_k_eq_v")), len(kinds) - config["num_kv_shared_layers"]
    of_full = {"head_dim": config["global_head_dim"]}
    if tied and config.get("num_global_key_value_heads"):
        of_full["num_key_value_heads"] = config["num_global_key_value_heads"]
    given, of_layers = config.get("per_layer_config"), []
    given = given and {int(number): other for number, other in given.items()}
    for number, kind in enumerate(kinds):
        full, source = kind == "full_attention", None
        other = (of_full if full else {}) if given is None else given.get(number, {})
        if number >= first_shared:
            source = next((i for i in range(first_shared - 1, -1, -1) if kinds[i] == kind), None)
            if source is None:
                raise ValueError(f"num_kv_shared_layers {len(kinds) - first_shared}: no layer before them has {kind}")
        sizes = {name: other.get(name, config[name]) for name in ("num_key_value_heads", "head_dim")}
        kv_heads, dim = sizes.values()
        if heads % kv_heads:
            raise ValueError(f"num_key_value_heads {kv_heads} does not divide {heads} heads")
        wide = bool(config.get("use_double_wide_mlp")) and source is not None
        inner = config["intermediate_size"] * (2 if wide else 1)
        of_layers.append(LayerSpec(kv_heads, dim, dim, inner, source, tied_values=tied and full, value_norm=True))
    return tuple(of_layers)


def experts(config: dict[str, Any]) -> ExpertsSpec:
    """Beside the MLP of every layer."""
    return ExpertsSpec(
        count=config["num_experts"],
        top_k=config["top_k_experts"],
        intermediate_size=config["moe_intermediate_size"],
        normalized=True,
        layers=frozenset(range(config["num_hidden_layers"])),
        prefix="experts",
        fused_names=FUSED_NAMES,
        parallel=True,
    )


class Gemma4Loader(WeightLoader):
    """Reads what layers have at their end, and experts beside their MLPs."""

    def layer(self, number: int) -> DecoderLayer:
        return dataclasses.replace(super().layer(number), end=self._end(f"layers.{number}."))

    def layer_inputs(self) -> LayerInputs | None:
        spec, name = self._spec, "per_layer_model_projection"
        if not spec.layer_inputs:
            return None
        width = spec.num_layers * spec.layer_inputs
        projection = Linear(self.matrix(name, width, spec.hidden_size), None, self._batch_invariant)
        norm = Norm(self._norm_weight("per_layer_projection_norm", spec.layer_inputs), spec.norm_eps, None)
        embedding = self.matrix("embed_tokens_per_layer", spec.vocab_size, width)
        return LayerInputs(embedding, projection, norm, spec.layer_inputs)

    def _end(self, at: str) -> LayerEnd:
        spec, size = self._spec, self._spec.layer_inputs
        scalar = self._weights.load(f"model.{at}layer_scalar", (1,))
        if not size:
            return LayerEnd(scalar)
        shapes = {"per_layer_input_gate": (size, spec.hidden_size), "per_layer_projection": (spec.hidden_size, size)}
        gate, back = (
            Linear(self.matrix(at + name, *shape), None, self._batch_invariant, self._ops)
            for name, shape in shapes.items()
        )
        return LayerEnd(scalar, gate, back, self.norm(at + "post_per_layer_input_norm"), spec.activation)

    def _mlp(self, number: int, norms: NormsSpec) -> FeedForward:
        spec, at = self._spec, f"layers.{number}."
        if spec.experts is None:
            return super()._mlp(number, norms)
        mlp = self._gated_mlp(at + "mlp.", spec.layer(number).intermediate_size)
        experts = self._experts(number, spec.experts)
        scale = self._weights.load(f"model.{at}router.scale", (spec.hidden_size,)).float()
        scales = self._weights.load(f"model.{at}router.per_expert_scale", (experts.router.weight.shape[0],)).float()
        return MlpWithExperts(
            mlp=SharedMlp(mlp.gate_up, mlp.down.product, mlp.activation),
            after_mlp=self.norm(at + "post_feedforward_layernorm_1"),
            experts=dataclasses.replace(experts, scales=scales),
            before_experts=self.norm(at + "pre_feedforward_layernorm_2"),
            after_experts=self.norm(at + "post_feedforward_layernorm_2"),
            before_router=Norm(scale * spec.hidden_size**-0.5, spec.norm_eps, None),
            after=self.norm(at + "post_feedforward_layernorm"),
            group=self._group,
        )
