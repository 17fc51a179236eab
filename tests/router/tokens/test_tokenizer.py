"""Encoding, decoding and what a checkpoint's files say, against the libraries and recorded references."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from radixrt.messages import ChatPrompt
from radixrt.tokens import Tokenizer, load_tokenizer
from radixrt.tokens.backends import SentencePieceBackend
from radixrt.tokens.cuts import AddedToken
from tests.checkpoints import make_tokenizer

MISTRAL_SAMPLES = ("get_weather_full", "get_weather_no_system_prompt", "parallel_calls")
MISTRAL = ("mistral-v1", "mistral-v2", "mistral-v3", "mistral-v7")


def write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "file"),
    [("falcon-tokenizer", "falcon_encoded"), ("gpt2", "gpt2_encoded_tokens"), ("t5-small", "t5_base_encoded")],
)
def test_ids_are_those_of_the_reference(checkpoints, shared_data: Path, name: str, file: str) -> None:
    expected = json.loads((shared_data / "tokenizers/expected" / f"{file}.json").read_text(encoding="utf-8"))
    tokenizer = checkpoints.tokenizer(name)
    assert tokenizer.encode(expected["text"]) == expected["token_ids"]
    assert tokenizer.decode(expected["token_ids"], skip_special_tokens=False) == expected["decoded_text"]


@pytest.mark.parametrize("sample", MISTRAL_SAMPLES)
@pytest.mark.parametrize("version", ["v2", "v3"])
def test_mistral_texts_are_their_ids(checkpoints, shared_data: Path, sample: str, version: str) -> None:
    folder = shared_data / "tokenizers/mistral/samples" / sample
    text = (folder / f"text_{version}.txt").read_text(encoding="utf-8").replace("\u2581", " ").replace("<0x0A>", "\n")
    ids = json.loads((folder / f"tokens_{version}.json").read_text())["tokens"]
    tokenizer = checkpoints.tokenizer(f"mistral-{version}")
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_mistral_messages_are_their_ids(checkpoints, shared_data: Path) -> None:
    """The one sample whose JSON is written as the template writes it."""
    folder = shared_data / "tokenizers/mistral"
    request = json.loads((folder / "samples/parallel_calls/sample.json").read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(checkpoints.folder("mistral-v3"), str(folder / "chat_templates/v3_spm.jinja"))
    text = tokenizer.apply_chat(ChatPrompt(request["messages"], request["tools"]))
    ids = json.loads((folder / "samples/parallel_calls/tokens_v3.json").read_text())["tokens"]
    assert tokenizer.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("name", ["phi-3-mini", "phi-2", "falcon-tokenizer", "t5-small", "made"])
def test_json_is_read_as_transformers_reads_it(checkpoints, texts: list[str], name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = checkpoints.folder(name)
    config = json.loads(path.read_text()) if (path := folder / "tokenizer_config.json").exists() else {}
    named = {key: value for key, value in config.items() if key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **named)
    ours = checkpoints.tokenizer(name)
    specials = "".join(f" {token} x" for token in theirs.all_special_tokens[:8])
    for text in [*texts, specials]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip) == expected
    assert set(theirs.all_special_ids) <= ours.special_ids


@pytest.mark.parametrize("name", [*MISTRAL, "sentencepiece-test"])
def test_sentencepiece_is_read_as_the_library_reads_it(checkpoints, texts: list[str], name: str) -> None:
    library = sentencepiece.SentencePieceProcessor(model_file=str(checkpoints.folder(name) / "tokenizer.model"))
    ours = checkpoints.tokenizer(name)
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (library.vocab_size(), 1, {2})
    for text in texts:
        ids = library.encode(text)
        assert ours.encode(text) == [1, *ids]
        assert ours.encode(text, add_special_tokens=False) == ids
        if library.unk_id() not in ids:
            assert ours.decode([1, *ids, 2]) == library.decode(ids)
            assert ours.decode([*ids, 1], skip_special_tokens=False) == library.decode(ids) + "<s>"


def test_special_tokens_in_text_are_cut_out_first(checkpoints) -> None:
    tokenizer = checkpoints.tokenizer("mistral-v3")
    inst, end = tokenizer.token_id("[INST]"), tokenizer.token_id("[/INST]")
    assert (inst, end) == (3, 4)
    assert tokenizer.encode("[INST] a[/INST]", False) == [inst, tokenizer.token_id("▁a"), end]
    assert tokenizer.encode("[INST]a[/INST]", False) == [inst, tokenizer.token_id("a"), end]
    assert tokenizer.encode("a[INST]") == [1, tokenizer.token_id("▁a"), inst]
    assert tokenizer.decode([1, inst, tokenizer.token_id("▁a")], False) == "<s>[INST] a"
    assert tokenizer.decode([1, inst, tokenizer.token_id("▁a")]) == "a"


def test_sentencepiece_follows_its_settings(checkpoints) -> None:
    model = (checkpoints.folder("mistral-v1") / "tokenizer.model").read_bytes()
    added = {32000: AddedToken("<|user|>", special=True, lstrip=True, rstrip=True), 32005: AddedToken("<x>", False)}

    def ids(text: str, **settings: bool) -> list[str]:
        backend = SentencePieceBackend(model, added, **settings)
        assert backend.size == 32006
        names = {**{i: token.content for i, token in added.items()}, 1: "<s>", 2: "</s>"}
        return [names.get(i) or sentencepiece_model.id_to_piece(i) for i in backend.encode(text, True)]

    sentencepiece_model = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert ids("a <|user|>  b<x>c") == ["<s>", "▁a", "<|user|>", "b", "<x>", "c"]
    assert ids("a<x> b", legacy=True) == ["<s>", "▁a", "<x>", "▁", "▁b"]
    assert ids("a", add_bos=False, add_eos=True) == ["▁a", "</s>"]
    assert ids("a", add_prefix_space=False) == ["<s>", "a"]
    backend = SentencePieceBackend(model, added)
    assert backend.decode([1, 32000, 32005, 32003, 99999], True) == "<x>"


def test_facts_come_from_all_files(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [5, 6]})
    write_json(tmp_path / "config.json", {"text_config": {"eos_token_id": 7, "vocab_size": 640}})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.bos_id == 0
    assert tokenizer.eos_ids == {2, 5, 6, 7}
    assert (tokenizer.vocab_size, tokenizer.model_vocab_size) == (512, 640)
    assert tokenizer.special_ids >= {0, 1, 2}
    assert tokenizer.decode([600, 639, 640]) == ""


def test_tokens_of_the_configuration_are_added(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {
        "512": {"content": "<tool>", "special": False},
        "513": {"content": "<|eom|>", "special": True},
    }
    config["eos_token"] = {"content": "<|eot|>"}
    write_json(tmp_path / "tokenizer_config.json", config)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<tool><|eom|><|eot|>") == [512, 513, 514]
    assert tokenizer.decode([512, 513, 514]) == "<tool>"
    assert tokenizer.eos_ids == {2, 514}


@pytest.mark.parametrize(
    ("flags", "expected"), [({}, [74]), ({"add_bos_token": True, "add_eos_token": True}, [0, 74, 2])]
)
def test_bos_and_eos_are_added_where_the_files_say_so(tmp_path: Path, flags: dict, expected: list[int]) -> None:
    make_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | flags
    write_json(tmp_path / "tokenizer_config.json", config)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("h") == expected
    assert tokenizer.encode("h", add_special_tokens=False) == [74]


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=8)
    library.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("h" * 9) == [74] * 9


def test_a_token_is_its_bytes(checkpoints, made: Tokenizer) -> None:
    assert b"".join(map(made.token_bytes, made.encode("Größe 🙂"))) == "Größe 🙂".encode()
    assert made.token_text(made.encode("🙂")[0]).startswith("\ufffd")
    assert made.token_text(1) == "<|im_start|>"
    llama = checkpoints.tokenizer("phi-3-mini")
    assert [llama.token_bytes(llama.token_id(token)) for token in ("▁the", "<0xE4>")] == [b" the", b"\xe4"]
    assert made.token_bytes(10**6) == llama.token_bytes(10**6) == b""


def test_threads_share_a_tokenizer(tokenizer: Tokenizer, texts: list[str]) -> None:
    expected = [tokenizer.encode(text) for text in texts[:30]]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.encode, texts[:30] * 4)) == expected * 4
        decoded = list(pool.map(tokenizer.decode, expected * 4))
    assert decoded == [tokenizer.decode(ids) for ids in expected] * 4


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not the folder of a checkpoint: it has no config.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"holds no tokenizer that can be read: there is no tokenizer\.json; --tokenizer"
    ):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(ValueError, match=r"^\S+ holds no tokenizer that can be read: [^\n]+; --tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match="not a sentencepiece model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not a JSON object"):
        load_tokenizer(tmp_path)


def test_transformers_is_not_imported_for_it() -> None:
    code = "import sys, radixrt.tokens; print([m for m in ('transformers', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
