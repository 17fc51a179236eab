"""Trains a small Llama in seconds, without a network, to know one page of text by heart. Used by tests and
benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PAGE = """A prefix is a path of tokens from the root of a tree. An agent sends the same prefix again at every turn.
The radix tree keeps the pages of each prefix, so that the worker computes only what is new.
When a program forks, its branches share one trunk. Five branches cost little more than one.
When memory runs out, the leaf that was used longest ago loses its tail first.
The router knows what each worker holds, and sends a request where its first token comes soonest.
If a worker dies, another one goes on with the tokens that were streamed already.
Every reply says how many tokens were cached. A miss has a cause: never seen, evicted, or held elsewhere.
Plan first, then look, then act. Write down what you saw, and decide by measuring it.
Cheap steps come before dear ones. A small test today saves a long search tomorrow."""
STEPS = 120
BATCH, LENGTH = 8, 64


def make_checkpoint(folder: Path) -> None:
    """Write config, weights and tokenizer to `folder`, unless it has weights already."""
    if (folder / "model.safetensors").exists():
        return
    tokenizer = _make_tokenizer(folder)
    model = _train(tokenizer)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)


def _make_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=768, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(PAGE.splitlines(), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return tokenizer


def _train(tokenizer: Tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    # Lines in random order, some of them as turns of the assistant: the model will be asked to continue such text.
    lines = [torch.tensor(tokenizer.encode(line + " ").ids) for line in PAGE.splitlines()]
    opening = torch.tensor(tokenizer.encode("<|im_start|>assistant\n").ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(STEPS):
        batch = torch.stack([_sample(lines, opening) for _ in range(BATCH)])
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * (1 - step / STEPS)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def _sample(lines: list[torch.Tensor], opening: torch.Tensor) -> torch.Tensor:
    """Concatenated random lines, some of them as turns of the assistant. Returns int64[LENGTH]."""
    pieces, size = [], 0
    while size < LENGTH:
        piece = lines[int(torch.randint(len(lines), ()))]
        piece = torch.cat([opening, piece]) if torch.rand(()) < 0.3 else piece
        pieces.append(piece)
        size += len(piece)
    return torch.cat(pieces)[:LENGTH]
