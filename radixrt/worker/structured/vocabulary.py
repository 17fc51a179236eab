"""The bytes of each token id, against which grammars are compiled.

Read from the checkpoint's tokenizer files: `tokenizer.json`, else a SentencePiece model, else whatever transformers can
load. The libraries are imported when the first grammar is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixrt.checkpoint.files import SENTENCEPIECE_FILES, SPECIAL_NAMES
from radixrt.checkpoint.vocabularies import BYTE_TOKEN, SPACE, byte_level_bytes


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens`: bytes by id, b"" for an id without text. `special`: for the ids of special tokens, which have no text,
    the bytes of their names. `encode`: the tokenizer, without the special tokens that it adds around a text."""

    tokens: list[bytes]
    special: dict[int, bytes]
    encode: Callable[[str], list[int]] | None = None


def read_vocabulary(folder: Path, size: int) -> Vocabulary:
    """The vocabulary of the model whose embedding has `size` rows. Ids of the tokenizer beyond it are left out; rows
    without a token are b"". Raises ValueError if there are no tokenizer files, or none of a known kind."""
    path = folder / "tokenizer.json"
    config = _read_json(folder / "tokenizer_config.json")
    if path.is_file():
        import tokenizers

        return _of_tokenizer(tokenizers.Tokenizer.from_file(str(path)), config, size)
    for pattern in SENTENCEPIECE_FILES:
        for path in sorted(folder.glob(pattern)):
            return _of_sentencepiece(path, _read_json(folder / "added_tokens.json"), config, size)
    if not any((folder / name).is_file() for name in ("vocab.json", "vocab.txt", "tokenizer_config.json")):
        raise ValueError(f"structured output needs the tokenizer's files, and {folder} holds none")
    from transformers import AutoTokenizer

    backend = getattr(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{folder}: this kind of tokenizer is not known here")
    return _of_tokenizer(backend, config, size)


def _collect(
    pieces: Iterable[tuple[int, bytes]],
    added: dict[int, tuple[str, bool]],
    named: set[str],
    size: int,
    encode: Callable[[str], list[int]],
) -> Vocabulary:
    """Make a Vocabulary from ordinary tokens, (id, bytes), and `added` ones, id -> (text, whether it is special). Added
    tokens that the configuration has `named` are special as well."""
    tokens, special = [b""] * size, {}
    for i, piece in pieces:
        if i < size:
            tokens[i] = piece
    for i, (text, hidden) in added.items():
        if i >= size:
            continue
        if hidden or text in named:
            tokens[i], special[i] = b"", text.encode()
        elif not tokens[i]:
            tokens[i] = text.encode()
    return Vocabulary(tokens, special, encode)


def _of_tokenizer(tokenizer: Any, config: dict[str, Any], size: int) -> Vocabulary:
    to_bytes = _decoder(tokenizer.decoder)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    declared = _declared(config)
    own = {i: (token.content, token.special) for i, token in tokenizer.get_added_tokens_decoder().items()}
    added = declared | own
    beside = {text: i for i, (text, _) in declared.items() if i not in own}
    encode = _with_added(beside, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    return _collect(((i, to_bytes(token)) for token, i in vocabulary.items()), added, _named(config), size, encode)


def _with_added(beside: dict[str, int], encode: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
    """Extend `encode` by tokens that it does not know, text -> id: these are found in a text first, the longest where
    several match."""
    texts = sorted(filter(None, beside), key=len, reverse=True)
    if not texts:
        return encode
    token = re.compile("(" + "|".join(map(re.escape, texts)) + ")")

    def find(text: str) -> list[int]:
        parts = [part for part in token.split(text) if part]
        return [i for part in parts for i in ([beside[part]] if part in beside else encode(part))]

    return find


def _decoder(decoder: Any) -> Callable[[str], bytes]:
    """The function from a token's spelling in the vocabulary to its bytes. Raises ValueError for an unknown decoder."""
    spec: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps if step["type"] not in ("Fuse", "Strip")]
    match kinds:
        case ["ByteLevel"]:
            return byte_level_bytes
        case ["Metaspace"]:
            return _spelled(steps[0].get("replacement", SPACE))
        case ["Replace", "ByteFallback"] | ["ByteFallback", "Metaspace"]:
            return _spelled(SPACE)
    raise ValueError(f"a tokenizer that decodes by {' and '.join(kinds)} is not known here")


def _spelled(space: str) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        byte = BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(space, " ").encode()

    return to_bytes


def _of_sentencepiece(path: Path, listed: dict[str, int], config: dict[str, Any], size: int) -> Vocabulary:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = range(model.vocab_size())
    own = {i: (model.id_to_piece(i), True) for i in ids if model.is_control(i) or model.is_unknown(i)}
    beside = {i: (token, False) for token, i in listed.items()} | _declared(config)
    encode = _with_added({text: i for i, (text, _) in beside.items()}, model.encode)
    to_bytes = _spelled(SPACE)
    return _collect(((i, to_bytes(model.id_to_piece(i))) for i in ids), own | beside, _named(config), size, encode)


# ---------------------------------------------------------------- JSON files of the tokenizer


def _declared(config: dict[str, Any]) -> dict[int, tuple[str, bool]]:
    """`added_tokens_decoder` of tokenizer_config.json: id -> (text, whether it is special)."""
    found = config.get("added_tokens_decoder") or {}
    return {int(i): (token["content"], token.get("special", False)) for i, token in found.items()}


def _named(config: dict[str, Any]) -> set[str]:
    """The texts of bos_token and other special tokens; each is a string or an object with `content`."""
    values = [config.get(name) for name in SPECIAL_NAMES]
    return {value["content"] if isinstance(value, dict) else value for value in values if value}


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes()) if path.is_file() else {}
