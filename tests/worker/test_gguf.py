"""GGUF files, written by the package `gguf`, against the checkpoints that they were made of."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from radixrt.checkpoint.hub import find
from radixrt.tokens.tokenizer import load_tokenizer
from radixrt.worker.model.parallel.sharding import Part
from radixrt.worker.model.weights import gguf as reader
from radixrt.worker.model.weights.gguf import GgufWeights
from tests.checkpoints import make_tokenizer
from tests.gguf_files import finish, write
from tests.worker.engine import Engine, prompts
from tests.worker.test_models import FACTORS, LINEAR, LLAMA3, YARN, all_logits, load

LONGROPE = FACTORS | {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
TIED = {"tie_word_embeddings": True}
VARIANTS = [
    ("llama", {}),
    ("llama", TIED | {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": YARN}),
    ("mistral", {"sliding_window": 16}),
    ("qwen2", {}),
    ("qwen3", {"rope_parameters": YARN}),
    ("gemma", TIED),
    ("gemma2", TIED | {"head_dim": 16, "query_pre_attn_scalar": 16}),
    ("gemma3_text", TIED | {"query_pre_attn_scalar": 16, "rope_parameters": {"full_attention": LINEAR}}),
    ("phi3", {}),
    ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
]
TEXTS = ["The quick brown fox, l'élève 123<|im_end|>\n", "  two  spaces\n\n\n\tx = 1", "東京🙂", "a</s>b"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_a_file_is_served_as_its_checkpoint(checkpoint, tmp_path, family, changes):
    original, model = checkpoint(family, **changes)
    make_tokenizer(original)
    write(tmp_path / "model.gguf", original, model)
    folder = find(str(tmp_path / "model.gguf"))
    assert json.loads((folder / "config.json").read_text())["model_type"] == family
    (prompt,) = prompts(1, 150, 150)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    runner = load(folder)
    assert (all_logits(Engine(runner), prompt) - expected).abs().max() < 1e-3
    assert runner.eos_ids == {0, 2}, "<|endoftext|> as well"


def test_all_files_of_a_split_model_are_read_in_parts(checkpoint, tmp_path):
    original, model = checkpoint("llama")
    make_tokenizer(original)
    write(tmp_path / "model.gguf", original, model, tensors_per_file=8)
    first, *others = sorted(tmp_path.glob("*.gguf"))
    assert others
    weights = GgufWeights(find(str(others[-1])) / "model.gguf", torch.float32, CPU, progress=False)
    for name, tensor in model.state_dict().items():
        part = Part(tensor.dim() - 1, 16, 48)
        assert torch.equal(weights.load(name, tensor.shape, part), tensor.narrow(-1, 16, 32))
    assert weights.unused() == []
    others[0].unlink()
    with pytest.raises(ValueError, match=f"lacks 1 of 0000{1 + len(others)} files: {others[0].name}"):
        find(str(first))


KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]


def test_tensors_of_all_types_are_dequantized_in_pieces(checkpoint, tmp_path, monkeypatch):
    """As the package does it in one piece, with random bits."""
    make_tokenizer(folder := checkpoint("llama")[0])
    write(tmp_path / "model.gguf", folder, checkpoint("llama")[1])
    config = find(str(tmp_path / "model.gguf"))
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "llama")
    writer.add_block_count(2)
    stored = {}
    for kind in (gguf.GGMLQuantizationType[name] for name in KINDS):
        values, size = gguf.GGML_QUANT_SIZES[kind]
        stored[kind] = rng.integers(0, 60, (10, 512 // values * size), np.uint8)  # no NaN
        writer.add_tensor(kind.name, stored[kind], raw_dtype=kind)
    finish(writer)
    (config / "model.gguf").unlink()
    (config / "model.gguf").symlink_to(tmp_path / "types.gguf")
    monkeypatch.setattr(reader, "CHUNK", 3 * 512)
    weights = GgufWeights(config / "model.gguf", torch.float32, CPU, progress=False)
    for kind, content in stored.items():
        expected = torch.from_numpy(gguf.dequantize(content, kind).astype(np.float32))
        assert expected.isfinite().all() and torch.equal(weights.load(kind.name, (10, 512)), expected), kind.name


# ---------------------------------------------------------------- tokenizers


def header(path: Path, architecture: str = "llama") -> gguf.GGUFWriter:
    """All that config.json needs."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(4)
    writer.add_block_count(1)
    writer.add_feed_forward_length(4)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    return writer


def test_byte_level_ids_are_those_of_the_checkpoint(checkpoint, tmp_path):
    original, model = checkpoint("llama")
    make_tokenizer(original)
    write(tmp_path / "model.gguf", original, model)
    ours, theirs = load_tokenizer(str(tmp_path / "model.gguf")), load_tokenizer(original)
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]


def test_sentencepiece_ids_are_those_of_the_library(shared_data, tmp_path):
    import sentencepiece

    path = shared_data / "tokenizers" / "mistral" / "tokenizer.model.v1"
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    count = model.vocab_size()
    kinds = [
        (2, model.is_unknown), (3, model.is_control), (5, model.is_unused), (6, model.is_byte), (1, lambda _: True)
    ]  # fmt: skip
    writer = header(tmp_path / "model.gguf")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([model.id_to_piece(id) for id in range(count)])
    writer.add_token_scores([model.get_score(id) for id in range(count)])
    writer.add_token_types([next(kind for kind, holds in kinds if holds(id)) for id in range(count)])
    finish(writer)
    tokenizer = load_tokenizer(str(tmp_path / "model.gguf"))
    for text in ["Hello world", "  a  b\n\n\tc ", "Les élèves 123,45", "東京は🙂👍🏽", "x" * 30, "don't stop; C++ {}"]:
        assert list(tokenizer.encode(text)) == [1, *model.encode(text)], text
        assert tokenizer.decode(model.encode(text)) == text


# ---------------------------------------------------------------- what is not served


@pytest.mark.parametrize(
    ("architecture", "add", "words"),
    [
        ("bert", None, "architecture 'bert' is not served from GGUF; llama, "),
        ("llama", lambda w: w.add_expert_count(8), "models with experts are not served"),
        ("llama", lambda w: w.add_tokenizer_model("bert"), "a tokenizer of the kind 'bert' is not served"),
        ("llama", lambda w: (w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre("x")), "the pre-tokenizer 'x' is not"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(tmp_path, architecture, add, words):
    writer = header(tmp_path / "x.gguf", architecture)
    writer.add_token_list(["a", "b", "c", "d"])
    if add is not None:
        add(writer)
    finish(writer)
    with pytest.raises(ValueError, match=f"x.gguf: {words}") as caught:
        find(str(tmp_path / "x.gguf"))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_off_is_named(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ValueError, match="x.gguf is cut off"):
        find(str(tmp_path / "x.gguf"))


def test_a_folder_with_nothing_but_files_names_them(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="has GGUF files: give one of them; x.gguf"):
        find(str(tmp_path))
