"""Fixtures with real tokenizers, and with texts of agents."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from radixrt.tokens import Tokenizer, load_tokenizer
from tests.checkpoints import make_tokenizer

SENTENCEPIECE = {
    "mistral-v1": "mistral/tokenizer.model.v1",
    "mistral-v2": "mistral/mistral_instruct_tokenizer_240216.model.v2",
    "mistral-v3": "mistral/mistral_instruct_tokenizer_240323.model.v3",
    "mistral-v7": "mistral/mistral_instruct_tokenizer_241114.model.v7",
    "sentencepiece-test": "sentencepiece_test/test_model.model",
}
JSON = ("phi-3-mini", "phi-2", "falcon-tokenizer", "t5-small")
NAMES = (*SENTENCEPIECE, *JSON, "gpt2", "made")

ODD_TEXT = (
    "Hello, world!",
    "  two spaces, a tab\t, a line\r\n\n\nfeed, and a trailing space ",
    "日本語と中文，한국어도 있습니다。",
    "🙂👍🏽👩‍👩‍👧‍👦🏴󠁧󠁢󠁥󠁮󠁧󠁿 flags 🇫🇷🇺🇦",
    "e\u0301 a\u0308 Z\u0351\u036b\u0343 क्षि กำ ན་ བོད་ཡིག",
    "\ufffd \u200b\u2028\ufeff \x00\x7f",
    "\u2581literal metaspace <0x41> <0xE4>",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ﷽ ٱلسَّلَامُ עברית",
    "def f(x):\n    return {'a': [1, 22, 333333]}  # don't, we'll",
)


class Checkpoints:
    """Folders and tokenizers by name, unpacked and loaded on first use."""

    def __init__(self, shared_data: Path, root: Path) -> None:
        self._data, self._root = shared_data / "tokenizers", root
        self.tokenizer = cache(self._load)
        self.folder = cache(self._make)

    def _make(self, name: str) -> Path:
        folder = self._root / name
        folder.mkdir()
        if name == "made":
            make_tokenizer(folder)
        elif name in SENTENCEPIECE:
            shutil.copyfile(self._data / SENTENCEPIECE[name], folder / "tokenizer.model")
        else:
            for path in (self._data / name).iterdir():
                if path.suffix == ".gz":
                    (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
                else:
                    shutil.copyfile(path, folder / path.name)
        if name == "gpt2":
            (folder / "config.json").write_text('{"model_type": "gpt2"}')
        return folder

    def _load(self, name: str) -> Tokenizer:
        return load_tokenizer(self.folder(name))


@pytest.fixture(scope="session")
def checkpoints(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(shared_data, tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The 512-token byte-level tokenizer of the tests; needs no data."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("made")))


@pytest.fixture(params=NAMES)
def tokenizer(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Tokenizer:
    """Each of the real tokenizers, and `made`."""
    return checkpoints.tokenizer(request.param)


@pytest.fixture(scope="session")
def texts(shared_data: Path) -> list[str]:
    """ODD_TEXT, and the first 2,000 characters of the longest strings in the first rows of each file of transcripts."""
    return [*ODD_TEXT, *_sampled(shared_data)]


def _sampled(shared_data: Path) -> Iterator[str]:
    for path in sorted(shared_data.glob("*/*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
            for _, line in zip(range(3), lines, strict=False):
                strings = sorted(set(_strings(json.loads(line))), key=len, reverse=True)
                yield from (text[:2000] for text in strings[:3] if len(text) > 40)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for item in value.values() for text in _strings(item))
    elif isinstance(value, list):
        yield from (text for item in value for text in _strings(item))
