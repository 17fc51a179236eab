"""Incremental detokenization: never half a character, and joined it is the whole decode."""

from __future__ import annotations

import codecs
import dataclasses
import random
from array import array
from collections.abc import Sequence
from functools import cache

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from radixrt.tokens import Detokenizer, Tokenizer
from radixrt.tokens.backends import JsonBackend
from radixrt.tokens.chat import ChatTemplates
from radixrt.tokens.detok import WindowStream
from radixrt.tokens.pieces import BytePieces, TextPieces, verified
from tests.checkpoints import TRAINING_TEXT

COMMON = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def streamed(detokenizer: Detokenizer | WindowStream, ids: Sequence[int], rng: random.Random) -> list[str]:
    """The texts of pushes of one to four ids, as integers or int32 bytes, and of the flush."""
    out, at = [], 0
    while at < len(ids):
        step = rng.choice((1, 1, 1, 2, 4))
        some = ids[at : at + step]
        out.append(detokenizer.push(array("i", some).tobytes() if rng.random() < 0.5 else some))
        at += step
    return [*out, detokenizer.flush()]


@cache
def pools(tokenizer: Tokenizer) -> list[Sequence[int]]:
    everything = range(tokenizer.vocab_size)
    single = [i for i in everything if (data := tokenizer.token_bytes(i)) and len(data) == 1 and data[0] > 127]
    found = [everything, sorted(tokenizer.special_ids), single, [tokenizer.vocab_size + 3]]
    return [pool for pool in found if pool]


def odd_ids(tokenizer: Tokenizer, rng: random.Random, length: int) -> list[int]:
    """Random ids, with specials, single bytes and ids beyond the vocabulary far more frequent than in text."""
    return [rng.choice(pool) for pool in rng.choices(pools(tokenizer), k=length)]


def test_all_real_tokenizers_are_decoded_by_table(tokenizer: Tokenizer) -> None:
    assert tokenizer.pieces(True) is not None
    assert tokenizer.pieces(False) is not None


@pytest.mark.parametrize("skip", [True, False])
def test_text_streams_as_it_is_decoded(tokenizer: Tokenizer, texts: list[str], skip: bool) -> None:
    rng = random.Random(1)
    for text in texts:
        ids = tokenizer.encode(text)
        parts = streamed(Detokenizer(tokenizer, skip), ids, rng)
        whole = tokenizer.decode(ids, skip)
        assert "".join(parts) == whole
        if "\ufffd" not in whole:
            assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("skip", [True, False])
def test_any_ids_stream_as_they_are_decoded(tokenizer: Tokenizer, skip: bool) -> None:
    rng = random.Random(2)
    for length in [1, 2, 3] * 40 + [10] * 60 + [100] * 10:
        ids = odd_ids(tokenizer, rng, length)
        assert "".join(streamed(Detokenizer(tokenizer, skip), ids, rng)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("skip", [True, False])
def test_window_streams_as_whole_decode(tokenizer: Tokenizer, texts: list[str], skip: bool) -> None:
    rng = random.Random(3)
    for text in texts[:12]:
        ids = tokenizer.encode(text)
        assert "".join(streamed(WindowStream(tokenizer, skip), ids, rng)) == tokenizer.decode(ids, skip)
    for length in [1, 2, 3] * 10 + [10] * 30 + [200] * 4:
        ids = odd_ids(tokenizer, rng, length)
        assert "".join(streamed(WindowStream(tokenizer, skip), ids, rng)) == tokenizer.decode(ids, skip)


def test_bytes_of_tokens_piece_by_piece() -> None:
    """Against Python's incremental decoder, with ids that no token has."""
    rng = random.Random(0)
    data = [b"", *(bytes((byte,)) for byte in range(256)), *("é €😀".encode()[i : i + 3] for i in range(10))]
    pieces = BytePieces(data)
    for _ in range(200):
        stream, decoder = pieces.stream(), codecs.getincrementaldecoder("utf-8")("replace")
        for _ in range(2):  # one that was flushed begins anew
            for _ in range(rng.randrange(12)):
                ids = [rng.choice([*range(len(data)), -1, -(1 << 31), len(data), (1 << 31) - 1]) for _ in range(3)]
                known = b"".join(data[i] for i in ids if 0 <= i < len(data))
                assert stream.push(array("i", ids).tobytes()) == decoder.decode(known)
                assert stream.push(ids[:1]) == decoder.decode(data[ids[0]] if 0 <= ids[0] < len(data) else b"")
            assert stream.flush() == decoder.decode(b"", True)
            decoder.reset()


def test_what_is_no_table_and_no_ids() -> None:
    for data in ((b"a",), [b"a", "b"]):
        with pytest.raises(TypeError):
            BytePieces(data)
    stream = BytePieces([b"a"]).stream()
    for ids in (None, 0, ["0"], [1 << 70]):
        with pytest.raises((TypeError, OverflowError)):
            stream.push(ids)
    with pytest.raises(TypeError):
        type(stream)()
    assert stream.push([0, 0]) == "aa", "it goes on"


def test_window_moves_on_and_keeps_up(made: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decoded at each push stays short, and text leaves at once."""
    lengths = []
    decode = made.decode
    monkeypatch.setattr(made, "decode", lambda ids, skip: (lengths.append(len(ids)), decode(ids, skip))[1])
    stream = WindowStream(made)
    ids = made.encode("the quick brown fox jumps over the lazy dog " * 40)
    text = ""
    for i, token in enumerate(ids):
        text += stream.push([token])
        assert text == decode(ids[: i + 1])
    assert max(lengths) < 80


@COMMON
@given(text=st.text(max_size=60), data=st.data())
@pytest.mark.parametrize("name", ["mistral-v3", "phi-3-mini", "phi-2", "made"])
def test_any_text_streams_as_it_is_decoded(checkpoints, name: str, text: str, data: st.DataObject) -> None:
    tokenizer = checkpoints.tokenizer(name)
    ids = tokenizer.encode(text)
    parts = streamed(Detokenizer(tokenizer), ids, data.draw(st.randoms(use_true_random=False)))
    assert "".join(parts) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("name", ["mistral-v3", "phi-2", "made"])
def test_a_character_leaves_with_its_last_byte(checkpoints, name: str) -> None:
    tokenizer = checkpoints.tokenizer(name)
    byte_ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    for character in "é€🦜":
        ids = [byte_ids[bytes((byte,))] for byte in character.encode()]
        detokenizer = Detokenizer(tokenizer)
        assert [detokenizer.push([i]) for i in ids] == [""] * (len(ids) - 1) + [character]
        detokenizer.push(ids[:1])
        assert detokenizer.flush() == "\ufffd"


def test_bytes_wait_where_the_decoder_judges_them_together(checkpoints) -> None:
    """`tokenizers` turns all byte tokens in a row into U+FFFD if one of them is wrong, so none may leave early."""
    tokenizer = checkpoints.tokenizer("phi-3-mini")
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "é".encode() + b"\xff"]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in ids] == ["", "", ""]
    assert detokenizer.flush() == tokenizer.decode(ids) == "\ufffd" * 3
    assert detokenizer.push(ids[:2]) == ""
    assert detokenizer.push([tokenizer.token_id("a")]) == "éa"


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder(suffix="g"), None])
def test_decoders_without_a_table_stream_too(decoder: decoders.Decoder | None) -> None:
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    library.train_from_iterator(TRAINING_TEXT, trainer)
    library.decoder = decoder
    tokenizer = Tokenizer(JsonBackend(library), ChatTemplates({}, {}))
    assert tokenizer.pieces(True) is None
    ids = tokenizer.encode("the quick dog isn't lazy, is it? [SEP] élèves (and foxes) jump; don't say: nothing!" * 9)
    rng = random.Random(5)
    for skip in (True, False):
        parts = streamed(Detokenizer(tokenizer, skip), ids, rng)
        assert "".join(parts) == tokenizer.decode(ids, skip)
        assert len(parts[-1]) < 10


def test_wrong_tables_are_found_out(made: Tokenizer) -> None:
    pieces = made.pieces(False)
    assert isinstance(pieces, BytePieces)

    def decode(ids: list[int]) -> str:
        return made.decode(ids, False)

    assert verified(pieces, decode, made.vocab_size, made.special_ids)
    for token in (0, 100, made.vocab_size - 1):
        wrong = BytePieces([b"?" if i == token else data for i, data in enumerate(pieces.data)])
        assert not verified(wrong, decode, made.vocab_size, made.special_ids)


@pytest.mark.parametrize("changes", [{"strict": False}, {"strip": 0}, {"strip": 2}, {"byte_of": {}}])
def test_wrong_rules_are_found_out(checkpoints, changes: dict) -> None:
    tokenizer = checkpoints.tokenizer("phi-3-mini")
    pieces = tokenizer.pieces(False)
    assert isinstance(pieces, TextPieces)
    wrong = dataclasses.replace(pieces, **changes)
    assert not verified(wrong, lambda ids: tokenizer.decode(ids, False), tokenizer.vocab_size, tokenizer.special_ids)
