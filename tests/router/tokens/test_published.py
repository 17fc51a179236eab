"""Tokenizer files as they are published, with every odd setting: the ids and texts of transformers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from radixrt.config import FrontendConfig
from radixrt.messages import ChatPrompt
from radixrt.tokens import Detokenizer, TextService, Tokenizer, load_tokenizer
from radixrt.tokens.errors import FieldError
from radixrt.worker.model.weights.checkpoint import eos_ids
from tests.checkpoints import make_tokenizer

TEXTS = (
    "hello <tool> world",
    "x<tool> y  <tool>z <Tool>",
    "<tool>x",
    " <|sp|> a<|sp|>",
    "atool <tool>tool",
    "<|im_start|>user\n hi <|im_end|>  there",
    "é 🙂 <|im_end|>\n\n<tool>\n<|sp|>",
)
FLAGS = [
    dict(zip(("lstrip", "rstrip", "normalized", "single_word"), flags, strict=True))
    for flags in itertools.product((False, True), repeat=4)
]


def write(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def edit(folder: Path, name: str = "tokenizer_config.json", **changes: Any) -> None:
    write(folder, name, (read(folder, name) if (folder / name).exists() else {}) | changes)


def check(folder: Path) -> Tokenizer:
    """The same ids and texts as transformers, whole, long and streamed."""
    from transformers import PreTrainedTokenizerFast

    theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), load_tokenizer(folder)
    for text in (*TEXTS, " ".join(TEXTS * 20)):
        for special in (False, True):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, special) == ids, text
        for skip in (False, True):
            whole = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            stream = Detokenizer(ours, skip)
            assert "".join(stream.push([i]) for i in ids) + stream.flush() == ours.decode(ids, skip) == whole
    assert theirs.eos_token_id in ours.eos_ids | {None}
    assert theirs.bos_token_id == ours.bos_id
    assert set(theirs.all_special_ids) <= ours.special_ids
    return ours


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(name for name, on in flags.items() if on) or "none")
def test_tokens_that_are_added(folder: Path, flags: dict[str, bool]) -> None:
    """In tokenizer_config.json, then in tokenizer.json, and with flags that the two say differently."""
    tokens = [{"content": "<tool>", "special": False} | flags, {"content": "<|sp|>", "special": True} | flags]
    edit(folder, added_tokens_decoder={str(512 + i): token for i, token in enumerate(tokens)})
    check(folder)
    whole = read(folder, "tokenizer.json")
    whole["added_tokens"] += [{"id": 512 + i} | token for i, token in enumerate(tokens)]
    whole["normalizer"] = {"type": "Lowercase"}
    write(folder, "tokenizer.json", whole)
    check(folder)
    edit(folder, added_tokens_decoder={"512": tokens[0] | {name: not on for name, on in flags.items()}})
    check(folder)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("tokenizer_config.json", {"extra_special_tokens": ["<tool>"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image_token": "<tool>"}}),
        ("tokenizer_config.json", {"additional_special_tokens": ["<tool>"]}),
        ("tokenizer_config.json", {"eos_token": {"__type": "AddedToken", "content": "<|unused_9|>"}}),
        ("tokenizer_config.json", {"eos_token": None, "bos_token": None}),
        ("special_tokens_map.json", {"additional_special_tokens": ["<tool>"], "eos_token": {"content": "<|sp|>"}}),
    ],
)
def test_special_tokens(folder: Path, file: str, changes: dict[str, Any]) -> None:
    edit(folder, file, **changes)
    tokenizer = check(folder)
    if any("special_tokens" in key for key in changes):
        assert tokenizer.decode(tokenizer.encode("a<tool>b")) == "ab"


def test_special_tokens_may_be_objects(folder: Path) -> None:
    edit(folder, additional_special_tokens=[{"content": "<tool>", "lstrip": True}])
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("a <tool>b")) == "ab"


def test_a_token_that_is_special_already_keeps_its_flags(folder: Path) -> None:
    edit(
        folder,
        added_tokens_decoder={"512": {"content": "<tool>", "special": True, "lstrip": True}},
        additional_special_tokens=["<tool>"],
    )
    assert load_tokenizer(folder).encode("h  <tool>") == [74, 512]


POST_PROCESSORS = {
    "none": None,
    "ByteLevel": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
    "template": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    },
}


@pytest.mark.parametrize(
    ("post_processor", "kind", "config", "bos"),
    [
        ("template", "PreTrainedTokenizerFast", {}, 1),
        ("template", "PreTrainedTokenizerFast", {"add_bos_token": False}, 1),
        ("template", "LlamaTokenizerFast", {"add_bos_token": True}, 1),
        ("ByteLevel", "PreTrainedTokenizerFast", {"add_bos_token": True}, 0),
        ("ByteLevel", "LlamaTokenizerFast", {"add_bos_token": True}, 1),
        ("ByteLevel", "LlamaTokenizerFast", {"add_bos_token": True, "bos_token": None}, 0),
        ("ByteLevel", "LlamaTokenizerFast", {}, 0),
        ("none", "LlamaTokenizerFast", {"add_bos_token": True}, 1),
        ("none", "LlamaTokenizerFast", {"add_bos_token": None}, 0),
    ],
)
def test_a_text_begins_once(folder: Path, post_processor: str, kind: str, config: dict, bos: int) -> None:
    """The beginning of a text is added by the tokenizer, that of a chat by its template, never by both."""
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    edit(folder, tokenizer_class=kind, chat_template=template, **config)
    edit(folder, "tokenizer.json", post_processor=POST_PROCESSORS[post_processor])
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("h") == [0] * bos + [74]
    with TextService(tokenizer) as service:
        ids = service.encode_now(ChatPrompt([{"role": "user", "content": "h"}]))
    assert memoryview(ids).cast("i").tolist() == ([74] if "bos_token" in config else [0, 74])


# ---------------------------------------------------------------- files that are missing, or hold more


def test_a_tokenizer_alone_completes_and_does_not_chat(folder: Path) -> None:
    for name in ("tokenizer_config.json", "generation_config.json"):
        (folder / name).unlink()
    with TextService.load(FrontendConfig(model=str(folder), tokenizer=str(folder))) as service:
        assert service.tokenizer.decode(service.tokenizer.encode("Größe 🙂")) == "Größe 🙂"
        with pytest.raises(FieldError, match="no chat template; give one with --chat-template") as refused:
            service.encode_now(ChatPrompt([{"role": "user", "content": "a"}]))
        assert refused.value.field == "messages"


def test_code_of_a_checkpoint_is_not_run_nor_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "n")
    (folder / "tokenizer.json").unlink()
    edit(folder, auto_map={"AutoTokenizer": ["tok.X", None]}, tokenizer_class="X")
    (folder / "tok.py").write_text("raise SystemExit")
    with pytest.raises(ValueError, match="holds no tokenizer that can be read: .*custom code"):
        load_tokenizer(folder)
    assert not asked


def test_files_that_transformers_stumbles_over_are_named(tmp_path: Path) -> None:
    write(tmp_path, "tekken.json", {"config": {}, "vocab": []})
    write(tmp_path, "config.json", {"model_type": "mistral"})
    with pytest.raises(ValueError, match="holds no tokenizer that can be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}}}, 2),
        ({"special_tokens_map.json": {"eos_token": "<|endoftext|>"}, "tokenizer_config.json": {}}, 0),
        ({"tokenizer_config.json": {"eos_token": "h", "added_tokens_decoder": None}}, 74),
        ({"tokenizer_config.json": {"eos_token": "x!", "added_tokens_decoder": {"9": {"content": "x!"}}}}, 9),
    ],
)
def test_a_worker_finds_the_end_of_sequence_in_any_file(folder: Path, files: dict, expected: int) -> None:
    (folder / "generation_config.json").unlink()
    for name, content in files.items():
        write(folder, name, content)
    assert eos_ids(folder) == {expected}
    write(folder, "config.json", {"eos_token_id": [5, 6]})
    assert eos_ids(folder) == {expected, 5, 6}
