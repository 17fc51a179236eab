"""A model's folder without weights, for fake workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoints import make_tokenizer

CONFIG = {
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    path = make_tokenizer(tmp_path_factory.mktemp("model"))
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path
