"""Makes small random checkpoints and tokenizers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}"
    "{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog, and then the dog thinks about the question again.",
    "Thought: I should search for the answer. Action: search[the answer] Observation: nothing was found.",
    "You are a helpful assistant. Use the tools below; each call is one JSON object with a name and arguments.",
    "def answer(question: str) -> str:\n    return 'forty-two' if question else ''\n",
    "Les élèves étaient là; größer als früher; 東京は日本の首都です。 Привет, мир! 🙂👍🏽",
    "system user assistant tool",
)


def make_tokenizer(folder: Path | str, vocab_size: int = 512) -> Path:
    """Write `tokenizer.json`, `tokenizer_config.json` and `generation_config.json` into `folder`.

    Byte-level BPE with exactly `vocab_size` tokens (ids 0..2 are `SPECIAL_TOKENS`): any text round-trips, no BOS is
    added, BOS is 0, EOS is 2 (`<|im_end|>`), and the chat template is like ChatML, with tools. Deterministic.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer_json(vocab_size), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": [2]}', encoding="utf-8")
    return folder


@cache
def _tokenizer_json(vocab_size: int) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    padding = [f"<|unused_{i}|>" for i in range(vocab_size - tokenizer.get_vocab_size())]
    tokenizer.add_special_tokens(padding)
    assert tokenizer.get_vocab_size() == vocab_size
    return tokenizer.to_str()


FAMILIES = ("gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")
FAMILIES += ("glm4_moe", "minimax_m2", "phi3", "gemma3_text", "seed_oss", "smollm3", "olmo2", "olmo3", "granite")


def require(family: str) -> None:
    """Skip the test if the installed transformers does not have the family."""
    import pytest
    import transformers

    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")


def make_model(folder: Path | str, family: str = "llama", *, shard_bytes: int | None = None, seed: int = 0, **changes):
    """Write a small random checkpoint of `family` into `folder` and return the transformers model, float32.

    `changes` are fields of its config; with `shard_bytes` the weights are split into files of at most that size.
    """
    from transformers import AutoConfig

    require(family)
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    sizes |= {"head_dim": 32} if family.startswith("qwen3") else {}
    sizes |= {"sliding_window": None} if family in ("mistral", "mixtral") else {}
    if family == "qwen3_moe":
        sizes |= {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True}
    if family == "gpt_oss":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16}
    if family == "mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if family.startswith("deepseek"):
        sizes |= {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16}
        sizes |= {"qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3}
        sizes |= {"moe_intermediate_size": 40, "n_shared_experts": 2, "first_k_dense_replace": 1}
    if family == "deepseek_v3":
        sizes |= {"q_lora_rank": 24, "n_group": 4, "topk_group": 2}
    if family == "glm4_moe":
        sizes |= {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        sizes |= {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5}
    if family == "minimax_m2":
        sizes |= {"head_dim": 16, "rotary_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 3}
    if family == "gemma3_text":
        sizes |= {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 24}
        sizes |= {"layer_types": ["sliding_attention", "full_attention"]}
    if family == "seed_oss":
        sizes |= {"head_dim": 32}
    if family == "smollm3":
        sizes |= {"no_rope_layers": [1, 0]}
    if family == "olmo3":
        sizes |= {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    if family == "granite":
        sizes |= {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22}
        sizes |= {"logits_scaling": 1.5}
    sizes |= changes
    if family == "minimax_m2":  # transformers before 5.17 does not read `rotary_dim`
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e6}
        sizes["rope_parameters"] |= {"partial_rotary_factor": sizes["rotary_dim"] / sizes["head_dim"]}
    model = _random(AutoConfig.for_model(family, **sizes), seed)
    limit = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.save_pretrained(folder, **limit)
    return model


def randomize(model) -> None:
    """Set a model's norms, biases and other vectors to random values."""
    centered = "qwen3_next" in model.config.model_type or "qwen3_5" in model.config.model_type  # weights of norms
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            around_1 = "norm" in name and (not centered or "linear_attn" in name)
            parameter.normal_(1.0 if around_1 else 0.0, 0.2)
        elif name.endswith("A_log"):  # states are remembered for long; transformers is inexact if they are not
            parameter.uniform_(-4.0, -1.0)
        elif name.endswith(".D"):
            parameter.normal_(1.0, 0.5)
        elif name.endswith("sinks"):
            parameter.normal_(0.0, 2.0)
        elif name.endswith("scale"):
            parameter.normal_(1.0, 0.2)
        elif name.endswith(("alpha_p", "alpha_n")):
            parameter.normal_()


def _random(config, seed: int = 0):
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    settings = {"dtype": torch.float32, "attn_implementation": "eager"}
    if config.model_type == "mistral4":  # in some versions, AutoModelForCausalLM does not know it
        from transformers import Mistral4ForCausalLM

        model = Mistral4ForCausalLM._from_config(config, **settings).eval()
    else:
        model = AutoModelForCausalLM.from_config(config, **settings).eval()
    with torch.no_grad():
        randomize(model)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
            elif name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2)
    return model


def make_published(folder: Path, family: str, **changes):
    """As `make_model`, but config.json has only the given fields and a few others, as published files do, and the model
    is made from that file. Fields with the value "REMOVED" are left out."""
    from transformers import AutoConfig

    require(family)
    config = {
        "model_type": family,
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.2,
        "torch_dtype": "bfloat16",
    } | changes
    text = json.dumps({name: value for name, value in config.items() if value != "REMOVED"})
    (folder / "config.json").write_text(text, encoding="utf-8")
    model = _random(AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return model
