"""How the text that a grammar forces is cut into tokens."""

from __future__ import annotations

import gzip

import pytest

from radixrt.worker.jump import Spelling
from radixrt.worker.vocabulary import Vocabulary, read_vocabulary
from tests.checkpoints import make_tokenizer


@pytest.fixture(scope="module", params=["made", "falcon-tokenizer", "phi-3-mini", "mistral"])
def vocabulary(request, tmp_path_factory) -> Vocabulary:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "made":
        make_tokenizer(folder)
    else:
        shared_data = request.getfixturevalue("shared_data")
        for path in (shared_data / "tokenizers" / request.param).iterdir():
            if path.is_file():
                content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
                (folder / path.name.removesuffix(".gz")).write_bytes(content)
    return read_vocabulary(folder, 66_000)


def test_it_is_spelled_as_the_tokenizer_does_and_what_could_go_on_is_left(vocabulary):
    spelling = Spelling(vocabulary.tokens, vocabulary.encode)
    known = [token for token in vocabulary.tokens if token]
    some = 0
    for text in (
        '{"name": "',
        ' "reservation_id": "',
        '", "age": ',
        '"}}\n</tool_call>',
        "née 東",
        "x",
        'me": [{"',
        "",
    ):
        ids, data = spelling.before(text), text.encode()
        pieces = [vocabulary.tokens[i] for i in ids]
        written = b"".join(pieces)
        assert data.startswith(written)
        at, whole = 0, spelling._spell(text)
        assert b"".join(vocabulary.tokens[i] for i in whole) == data
        assert list(ids) == whole[: len(ids)]
        for piece in [*pieces, None]:
            rest = data[at:]
            longer = rest and any(token.startswith(rest) and token != rest for token in known)
            assert bool(longer) == (piece is None and bool(rest)), (text, rest)
            at += len(piece or b"")
        assert spelling.before(data[len(written) :].decode(errors="ignore")) == (), "what is left is left again"
        some += len(ids)
    assert some > 12


def test_words_are_not_cut_where_the_tokenizer_does_not(vocabulary):
    """As a model has seen them: also where the tokenizer would put a space before the first word."""
    spelling = Spelling(vocabulary.tokens, vocabulary.encode)
    for text in ("arguments", "question", "name"):
        within = [vocabulary.tokens[i] for i in vocabulary.encode("\n" + text)]
        assert b"".join(within).endswith(text.encode())
        found = [vocabulary.tokens[i] for i in spelling._spell(text)]
        assert found == within[-len(found) :]


def test_a_tokenizer_that_cannot_write_it_writes_nothing():
    vocabulary = [b"", b"a", b"b", b"ab", b"\n"]
    assert Spelling(vocabulary, lambda text: [1] * len(text)).before("bbb") == ()
    assert Spelling(vocabulary, lambda text: [7, 1, 2]).before("bbb") == ()
    assert Spelling(vocabulary, lambda text: [4, 2, 2] if text[0] == "\n" else [3, 2]).before("bb") == (2, 2)
    assert Spelling(vocabulary, lambda text: [2, 0, 2]).before("bb") == (), "one of them is no text"
    assert Spelling(vocabulary).before("abab") == (3, 3)
    assert Spelling(vocabulary).before("aba") == (3,), "an a may become ab"
    assert Spelling(vocabulary).before("abc") == ()


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr("radixrt.worker.jump.REMEMBERED", 3)
    spelling = Spelling([b"a", b"b"])
    for n in range(1, 9):
        assert spelling.before("ab" * n) == (0, 1) * n and len(spelling._known) <= 3
