"""GGUF files, written by the package `gguf`, against the checkpoints that they were made of."""

from __future__ import annotations

import json

import gguf
import pytest
import torch

from radixrt.checkpoint.hub import find
from radixrt.tokens.tokenizer import load_tokenizer
from radixrt.worker.model.weights.gguf import GgufWeights
from tests.checkpoints import make_model, make_tokenizer

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3", "phi3": "phi3"}


def write(path, folder, model):
    """As llama.cpp's converter does, in F32."""
    config, name = model.config, ARCHITECTURES[model.config.model_type]
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(
        tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]},
        key=(tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}).get,
    )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(2)
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(key.split(".")[-2])
        if name == "llama" and heads:
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        if name == "gemma3" and key.endswith("norm.weight"):
            tensor = tensor + 1
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight", ".bias")), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_file_has_the_tensors_and_the_tokenizer_of_its_checkpoint(family, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    original = make_tokenizer(tmp_path / "original")
    model = make_model(original, family)
    write(tmp_path / "model.gguf", original, model)
    folder = find(str(tmp_path / "model.gguf"))
    assert json.loads((folder / "config.json").read_text())["model_type"] == family
    weights = GgufWeights(folder / "model.gguf", torch.float32, torch.device("cpu"), progress=False)
    for name, tensor in model.state_dict().items():
        loaded = weights.load(name, tensor.shape)
        torch.testing.assert_close(loaded, tensor, rtol=0, atol=1e-6 if family == "gemma3_text" else 0)
    assert weights.unused() == []
    text = "The quick brown fox, l'élève 123<|im_end|>\n"
    assert load_tokenizer(folder).encode(text) == load_tokenizer(original).encode(text)


def test_a_file_that_is_cut_off_is_named(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ValueError, match="x.gguf is cut off"):
        find(str(tmp_path / "x.gguf"))
