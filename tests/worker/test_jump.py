"""How the text that a grammar forces is cut into tokens."""

from __future__ import annotations

import gzip
import json

import pytest

from radixrt.messages import Grammar
from radixrt.requests.schemas.ebnf import compilable
from radixrt.worker.structured.compile import _parsed
from radixrt.worker.structured.jump_forward import LONGEST, MAX_FORCED_BYTES, Spelling, forced_text, is_bounded
from radixrt.worker.structured.vocabulary import Vocabulary, read_vocabulary
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


def test_tokens_that_the_configuration_alone_declares_are_written(tmp_path):
    """A mark that opens a call is one token, as in a prompt, and not its letters."""
    path = make_tokenizer(tmp_path) / "tokenizer_config.json"
    marks = {512: "[CALL]", 513: "[CALLS]"}
    declared = {str(i): {"content": text, "special": True} for i, text in marks.items()}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": declared}))
    vocabulary = read_vocabulary(tmp_path, 514)
    tokens = [vocabulary.special.get(i, token) for i, token in enumerate(vocabulary.tokens)]
    letters = vocabulary.encode('{"name": "f"}')
    assert Spelling(tokens, vocabulary.encode).before('[CALLS]{"name": "f"}')[: len(letters)] == (513, *letters[:-1])
    assert vocabulary.encode("a[CALL]") == [*vocabulary.encode("a"), 512]


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
    monkeypatch.setattr("radixrt.worker.structured.jump_forward.REMEMBERED", 3)
    spelling = Spelling([b"a", b"b"])
    for n in range(1, 9):
        assert spelling.before("ab" * n) == (0, 1) * n and len(spelling._known) <= 3


def _schema(**properties) -> tuple[str, str]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return "json_schema", json.dumps(schema)


def _tag(content: dict) -> tuple[str, str]:
    part = {"begin": "<f=a>", "content": content, "end": "</f>"}
    form = {"type": "triggered_tags", "triggers": ["<f="], "tags": [part]}
    return "structural_tag", json.dumps({"type": "structural_tag", "format": form})


DOUBLED = "".join(f"r{i} ::= r{i - 1} r{i - 1}\n" for i in range(1, 40))


@pytest.mark.parametrize(
    "grammar, bounded",
    [
        (_schema(a={"anyOf": [{"$ref": "#"}, {"type": "null"}]}), True),
        (_schema(a={"$ref": "#"}), False),
        (_schema(**{f"property {i}": {"enum": ["one", "two"]} for i in range(200)}), True),
        (("json_schema", json.dumps({"type": "array", "items": {"const": "x"}, "minItems": 10**6})), False),
        (("json", ""), True),
        (("regex", "(ab){3000}"), True),
        (("regex", "(ab){300000}"), False),
        (("ebnf", 'root ::= "ab" root'), False),
        (("ebnf", 'root ::= "ab" root | "b"'), True),
        (("ebnf", 'root ::= "a" | x\nx ::= "b" x'), False),
        (("ebnf", f'r0 ::= "xxxxxxxx"\n{DOUBLED}root ::= r39'), False),
        (("ebnf", f'r0 ::= "xxxxxxxx"\n{DOUBLED}root ::= "a" | r5'), False),
        (_tag({"type": "json_schema", "json_schema": {"type": "object"}}), True),
        (_tag({"type": "any_text"}), True),
        (_tag({"type": "json_schema", "json_schema": json.loads(_schema(a={"$ref": "#"})[1])}), False),
    ],
)
def test_what_forces_text_without_end_is_known_beforehand(grammar, bounded):
    text = compilable(Grammar(*grammar), any_space=False)
    assert is_bounded(_parsed(grammar[0], text).serialize_json()) is bounded


def test_the_shortest_text_counts():
    def bounded(size: int) -> bool:
        return is_bounded(_parsed("ebnf", f'root ::= "{"x" * size}" | y\ny ::= "{"x" * 200}" [a-z]').serialize_json())

    assert bounded(MAX_FORCED_BYTES) and not bounded(MAX_FORCED_BYTES + 1)


def test_long_text_comes_in_parts():
    class Matcher:
        def find_jump_forward_string(self) -> str:
            return "ab" * LONGEST

    assert forced_text(Matcher()) == "ab" * (LONGEST // 2)
