"""Checkpoints with a layer for multi-token prediction, and a slow reference of it. transformers has none, but its
decoder layer is of the same kind as the others; the rest is by DeepSeek-V3's report (arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from radixrt.worker.model.predictor import APART
from tests.checkpoints import randomize

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


class Reference:
    """The layer of a transformers model. `norms` are weights of the norms of embeddings, of hidden states and of the
    result."""

    def __init__(self, model, layer, norms: list[torch.Tensor], projection: torch.Tensor) -> None:
        self._model = model
        self._layer = layer
        self._norms = norms
        self.projection = projection

    def _norm(self, x: torch.Tensor, number: int) -> torch.Tensor:
        config, weight = self._model.config, self._norms[number]
        weight = weight + 1 if config.model_type in APART else weight
        return weight * x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()

    @torch.no_grad()
    def states(self, tokens: list[int]) -> torch.Tensor:
        """The decoder's hidden states [L, hidden]."""
        return self._model.model(torch.tensor([tokens])).last_hidden_state[0]

    @torch.no_grad()
    def logits(self, tokens: list[int], before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [L, vocab] of what follows each token, what takes the place of the hidden states after it), for the
        states [L, hidden] before each token."""
        embedded, count = self._model.model.embed_tokens(torch.tensor(tokens)), len(tokens)
        both = torch.cat((self._norm(embedded, 0), self._norm(before, 1)), dim=-1)
        x, positions = (both @ self.projection.T)[None], torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        by_grid = self._model.config.model_type.startswith("qwen3_5")  # [3, 1, L], for any version of transformers
        angles = self._model.model.rotary_emb(x, positions.expand(3, 1, -1) if by_grid else positions)
        out = self._layer(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        out = self._norm((out[0] if isinstance(out, tuple) else out)[0], 2)
        return self._model.lm_head(out), out

    def propose(self, tokens: list[int], count: int, unknown: tuple[int, ...] = (0,)) -> list[int]:
        """`count` tokens that are likely to follow tokens[1:], the last of which was sampled. The states before the
        positions `unknown` are zeros."""
        hidden = self.states(tokens[:-1])
        before, said = torch.cat((torch.zeros_like(hidden[:1]), hidden)), list(tokens)
        before[list(unknown)] = 0
        for _ in range(count):
            logits, out = self.logits(said, before)
            said.append(int(logits[-1].argmax()))
            before = torch.cat((before, out[-1:]))
        return said[len(tokens) :]


def add_layer(source: Path, model, target: Path, seed: int = 0) -> Reference:
    """Copy the checkpoint `source` of a transformers model to `target`, with a random layer."""
    config, hidden = model.config, model.config.hidden_size
    number = max(
        i for i, layer in enumerate(model.model.layers) if hasattr(layer, "self_attn") and _is_sparse(layer, model)
    )
    made = copy.deepcopy(model)
    layer = made.model.layers[number]
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.15)
        randomize(_Named(layer, config))
        for name, buffer in layer.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
        projection = torch.randn(hidden, 2 * hidden) * 0.15
        norms = [torch.randn(hidden) * 0.2 + (config.model_type not in APART) for _ in range(3)]
    shutil.copytree(source, target)
    made.save_pretrained(target / "layer")
    own, at = load_file(target / "layer/model.safetensors"), f"model.layers.{number}."
    shutil.rmtree(target / "layer")
    weights = load_file(target / "model.safetensors")
    last = f"model.layers.{config.num_hidden_layers}."
    apart = config.model_type in APART
    names = [f"{last}{name}.weight" for name in ("enorm", "hnorm", "shared_head.norm", "eh_proj")]
    if apart:
        names = [f"mtp.{name}.weight" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")]
    weights |= dict(zip(names, (*norms, projection), strict=True))
    where = "mtp.layers.0." if apart else last
    weights |= {name.replace(at, where): tensor for name, tensor in own.items() if name.startswith(at)}
    if not apart:  # copies of what is the decoder's own
        weights[last + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[last + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
    (target / "model.safetensors").unlink()
    save_file({name: x.contiguous() for name, x in weights.items()}, target / "model.safetensors", {"format": "pt"})
    path = target / "config.json"
    fields = {"mtp_num_hidden_layers": 1} if "qwen3_5" in config.model_type else {"num_nextn_predict_layers": 1}
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return Reference(model, layer, norms, projection)


def make_markov(folder: Path) -> None:
    """Let a GLM checkpoint say, after token t, the token that permutation(t) gives, in decoder and layer: all outputs
    of attention and experts are 0, so that the head sees only the last token's embedding."""
    weights, rng = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    embedding = weights["model.embed_tokens.weight"]
    hidden = embedding.shape[1]
    for name, tensor in weights.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
        elif "norm" in name:
            tensor.fill_(1.0)
    order = torch.from_numpy(rng.permutation(len(embedding)))
    weights["lm_head.weight"] = torch.empty_like(embedding)
    weights["lm_head.weight"][order] = embedding / embedding.norm(dim=1, keepdim=True)
    weights["model.layers.2.eh_proj.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _is_sparse(layer, model) -> bool:
    """Whether it has experts, or no layer of the model does."""
    return any(hasattr(one.mlp, "experts") for one in model.model.layers) == hasattr(layer.mlp, "experts")


class _Named:
    """Parameters of a layer, for `randomize`."""

    def __init__(self, layer, config) -> None:
        self.named_parameters, self.config = layer.named_parameters, config
