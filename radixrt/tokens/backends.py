"""The two libraries behind a tokenizer, `tokenizers` and `sentencepiece`, with a common interface."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import sentencepiece
import tokenizers

from radixrt.checkpoint.files import MAX_TOKEN_ID
from radixrt.checkpoint.vocabularies import BYTE_TOKEN, SPACE, byte_level_bytes
from radixrt.tokens import bounds
from radixrt.tokens.cuts import NO_CUTS, AddedToken, Cuts, before_spaces_by_pieces, before_spaces_by_words, proven_cuts
from radixrt.tokens.pieces import BytePieces, Pieces, TextPieces
from radixrt.tokens.special_text import EscapedJson, unescaped

WHITE_SPACE = re.compile(r"\s*")


class Backend(Protocol):
    """Thread safe. `size` is the largest token id plus one; `specials` are the ids that skip_special_tokens leaves
    out."""

    size: int
    specials: frozenset[int]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, no special tokens added."""

    def cuts(self) -> Cuts:
        """Where texts can be cut for encoding."""

    def least_tokens(self) -> bounds.LeastTokens:
        """A lower bound of the number of tokens of a text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def token_id(self, token: str) -> int | None: ...

    def is_byte(self, token: int) -> bool: ...

    def pieces(self) -> Pieces | None:
        """The text that each id adds, special tokens included; None for a decoder that no table can describe."""

    def added(self) -> list[AddedToken]:
        """The tokens that are found in a text before anything else."""

    def escaped_encoder(self, tokens: Collection[str]) -> Callable[[str], list[int]]:
        """Encodes texts in which some of these tokens are escaped (`special_text.py`), no special tokens added."""


# ---------------------------------------------------------------- tokenizer.json


class JsonBackend:
    """A `tokenizer.json`, which defines everything: added tokens, BOS and EOS, normalization, decoding."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.token_id = tokenizer.token_to_id
        self.size = _checked_size(max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
        self.specials = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The "fast" variant computes no character offsets, which saves a fifth of the time.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def cuts(self) -> Cuts:
        tokenizer, model = self._tokenizer, self._tokenizer.model
        if getattr(model, "dropout", None):
            return NO_CUTS
        added, normalizer, pre_tokenizer = self.added(), _state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)
        before = before_spaces_by_words(pre_tokenizer, normalizer)
        if not before and _merges_alone(model):
            before = before_spaces_by_pieces(tokenizer.get_vocab(with_added_tokens=False), pre_tokenizer, normalizer)
        return proven_cuts(added, before, normalizer is not None)

    def least_tokens(self) -> bounds.LeastTokens:
        tokenizer = self._tokenizer
        return bounds.of_json(tokenizer, _state(tokenizer.pre_tokenizer), _state(tokenizer.normalizer), self.added())

    def added(self) -> list[AddedToken]:
        return [
            AddedToken(t.content, t.special, t.lstrip, t.rstrip, t.single_word, t.normalized)
            for t in self._tokenizer.get_added_tokens_decoder().values()
        ]

    def escaped_encoder(self, tokens: Collection[str]) -> Callable[[str], list[int]]:
        return EscapedJson(self._tokenizer, tokens).encode

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def is_byte(self, token: int) -> bool:
        return BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token) or "") is not None

    def pieces(self) -> Pieces | None:
        decoder = self._tokenizer.decoder
        if decoder is None:
            return None
        tokens = [self._tokenizer.id_to_token(i) or "" for i in range(self.size)]
        match _steps(json.loads(decoder.__getstate__())):
            case [{"type": "ByteLevel"}]:
                return BytePieces(list(map(byte_level_bytes, tokens)))
            case [{"type": "Metaspace", "replacement": space, "prepend_scheme": scheme}]:
                return _metaspace(tokens, space, keep_first=scheme == "never")
            case [{"type": "Replace", "pattern": {"String": old}, "content": new}, {"type": "ByteFallback"}]:
                return _byte_fallback(tokens, old, new, strip=0)
            case [
                {"type": "Replace", "pattern": {"String": old}, "content": new},
                {"type": "ByteFallback"},
                {"type": "Strip", "content": " ", "start": start, "stop": 0},
            ]:
                return _byte_fallback(tokens, old, new, strip=start)
        return None


def _checked_size(size: int) -> int:
    if size > MAX_TOKEN_ID + 1:
        raise ValueError(f"the tokenizer has a token of id {size - 1}; {MAX_TOKEN_ID} is the largest that is served")
    return size


def _state(stage: Any) -> Any:
    """A stage of a tokenizer as JSON, as in tokenizer.json."""
    return None if stage is None else json.loads(stage.__getstate__())


def _merges_alone(model: Any) -> bool:
    """Whether a model is BPE that forms pieces by merges only, even if the whole text is in the vocabulary."""
    bare = isinstance(model, tokenizers.models.BPE) and not model.ignore_merges
    return bare and not model.continuing_subword_prefix and not model.end_of_word_suffix


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a decoder, without Fuse, which only joins tokens (needed before Strip, which is last)."""
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [step for step in steps if step["type"] != "Fuse"]


def _metaspace(tokens: list[str], space: str, keep_first: bool) -> TextPieces:
    head = {} if keep_first else {i: t.replace(space, "") for i, t in enumerate(tokens) if space in t}
    return TextPieces([t.replace(space, " ") for t in tokens], {}, strict=True, head=head, head_ends="token")


def _byte_fallback(tokens: list[str], old: str, new: str, strip: int) -> TextPieces:
    byte_of = {i: int(m[1], 16) for i, t in enumerate(tokens) if (m := BYTE_TOKEN.fullmatch(t))}
    texts = ["" if i in byte_of else t.replace(old, new) for i, t in enumerate(tokens)]
    return TextPieces(texts, byte_of, strict=True, strip=strip)


# ---------------------------------------------------------------- tokenizer.model


class _Processors(NamedTuple):
    """`first` encodes the beginning of a text, `later` what comes after a special token; `plain` adds no space."""

    plain: Any
    first: Any
    later: Any


class SentencePieceBackend:
    """A bare `tokenizer.model`, used as LlamaTokenizer does.

    Control and unknown pieces and `added` tokens (id -> AddedToken) are found in text before anything
    else. BOS is added unless told otherwise. Only text at the very start gets the dummy prefix; with
    `legacy` any text after a special token gets one too.
    """

    def __init__(
        self,
        model: bytes,
        added: Mapping[int, AddedToken],
        add_bos: bool = True,
        add_eos: bool = False,
        legacy: bool = False,
        add_prefix_space: bool = True,
    ) -> None:
        self._proto, self._legacy, self._add_prefix_space = model, legacy, add_prefix_space
        self._model = sp = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._plain, self._first, self._later = self._processors(model)
        own = [i for i in range(sp.vocab_size()) if sp.is_control(i) or sp.is_unknown(i)]
        self._added = {i: AddedToken(sp.id_to_piece(i)) for i in own} | dict(added)
        self._ids = {token.content: i for i, token in self._added.items()}
        self.size = _checked_size(max(sp.vocab_size(), max(self._added, default=-1) + 1))
        self.specials = frozenset(i for i, token in self._added.items() if token.special)
        self._bos = [sp.bos_id()] if add_bos and sp.bos_id() >= 0 else []
        self._eos = [sp.eos_id()] if add_eos and sp.eos_id() >= 0 else []
        # Bare alternatives, no groups: re then jumps from one possible first character to the next.
        self._pattern = re.compile("|".join(re.escape(t) for t in sorted(self._ids, key=len, reverse=True)) or "(?!)")

    def _processors(self, model: bytes) -> _Processors:
        # A message appended to a serialized one is merged into it: normalizer_spec (field 3) of
        # add_dummy_prefix (3) and remove_extra_whitespaces (4), both false.
        plain = sentencepiece.SentencePieceProcessor(model_proto=model + b"\x1a\x04\x18\x00\x20\x00")
        first = sentencepiece.SentencePieceProcessor(model_proto=model) if self._add_prefix_space else plain
        return _Processors(plain, first, first if self._legacy else plain)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = self._encode(text, self._first, self._later)
        return [*self._bos, *ids, *self._eos] if add_special_tokens else ids

    def _encode(self, text: str, first: Any, later: Any) -> list[int]:
        """Ids of a text with added tokens. `first` encodes what it begins with, `later` what comes after them."""

        def plain(part: str, start: int) -> list[int]:
            return (later if start else first).encode(unescaped(part)) if part else []

        ids: list[int] = []
        at = 0
        for match in self._pattern.finditer(text):
            token = self._ids[match[0]]
            before = text[at : match.start()]
            ids += plain(before.rstrip() if self._added[token].lstrip else before, at)
            ids.append(token)
            at = match.end()
            if self._added[token].rstrip:
                at = space.end() if (space := WHITE_SPACE.match(text, at)) else at
        return ids + plain(text[at:], at)

    def added(self) -> list[AddedToken]:
        return list(self._added.values())

    def escaped_encoder(self, tokens: Collection[str]) -> Callable[[str], list[int]]:
        lock = threading.Lock()
        made: list[_Processors] = []

        def encode(text: str) -> list[int]:
            with lock:
                if not made:
                    made.append(self._processors(_without_pieces(self._proto, tokens)))
            return self._encode(text, made[0].first, made[0].later)

        return encode

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text, False) for text in texts]

    def cuts(self) -> Cuts:
        sp = self._model
        merges = _is_plain_bpe(self._proto)
        before = before_spaces_by_pieces(map(sp.id_to_piece, range(sp.vocab_size())), None, None) if merges else ""
        return proven_cuts(self.added(), before, has_normalizer=True)

    def least_tokens(self) -> bounds.LeastTokens:
        sp = self._model
        if not _is_plain_bpe(self._proto):
            return bounds.NO_BOUND
        pieces, num_bytes = map(sp.id_to_piece, range(sp.vocab_size())), sum(map(sp.is_byte, range(sp.vocab_size())))
        return bounds.of_pieces(pieces, num_bytes, self.added())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        model, size = self._model, self._model.vocab_size()
        text, run = "", []
        for i in ids:
            if i not in self._added:
                if i < size:
                    run.append(i)
            elif not (skip_special_tokens and i in self.specials):
                text += model.decode(run) + self._added[i].content
                model, run = self._plain, []
        return text + model.decode(run)

    def token_id(self, token: str) -> int | None:
        if token in self._ids:
            return self._ids[token]
        i = self._model.piece_to_id(token)
        return None if i == self._model.unk_id() else i

    def is_byte(self, token: int) -> bool:
        return token < self._model.vocab_size() and self._model.is_byte(token)

    def pieces(self) -> Pieces | None:
        sp = self._model
        byte_of = {i: int(sp.id_to_piece(i)[3:5], 16) for i in range(sp.vocab_size()) if sp.is_byte(i)}
        texts = ["" if i in byte_of else sp.id_to_piece(i).replace(SPACE, " ") for i in range(sp.vocab_size())]
        texts += [""] * (self.size - len(texts))
        for i, token in self._added.items():
            texts[i] = token.content
        spaced = {i: t[1:] for i, t in enumerate(texts) if t[:1] == " " and i not in self._added}
        drops_space = any(sp.decode([i]) != texts[i] for i in list(spaced)[:1])
        # A model trained with remove_extra_whitespaces drops all leading spaces; others drop only one.
        ends: Literal["space", "text"] = "space" if sp.decode([sp.piece_to_id(SPACE)] * 2) else "text"
        return TextPieces(texts, byte_of, strict=False, head=spaced if drops_space else {}, head_ends=ends)


def _without_pieces(model: bytes, texts: Collection[str]) -> bytes:
    """A serialized ModelProto some of whose pieces are not used; the ids of others stay."""
    hidden = {text.replace(" ", SPACE).encode() for text in texts}
    at, parts = 0, []
    while at < len(model):
        start = at
        tag, at = _varint(model, at)
        size, at = _varint(model, at) if tag & 7 in (0, 2) else (0, at + {1: 8, 5: 4}.get(tag & 7, 0))
        if tag & 7 == 2:
            body, at = model[at : at + size], at + size
            # Control and unknown pieces (types 3 and 2) are never made of text.
            if tag >> 3 == 1 and _merged(body, 1) in hidden and _merged(body, 3, last=True) not in (2, 3):
                body += b"\x18\x05"  # its type (field 3): UNUSED
                parts.append(b"\x0a" + _as_varint(len(body)) + body)
                continue
        parts.append(model[start:at])
    return b"".join(parts)


def _as_varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _as_varint(value >> 7)


def _is_plain_bpe(model: bytes) -> bool:
    """Whether a serialized ModelProto is BPE and does not normalize text or white space."""
    trainer, normalizer = (_merged(model, field) for field in (2, 3))
    is_bpe = _merged(trainer, 3, last=True) == 2
    return is_bpe and not _merged(normalizer, 2) and _merged(normalizer, 4, last=True) == 0


def _merged(message: bytes, field: int, last: bool = False) -> Any:
    """A field of a protobuf message: its bytes, concatenated over all occurrences; with `last`, its last number, or
    None."""
    at, found, number = 0, b"", None
    while at < len(message):
        tag, at = _varint(message, at)
        value, size = None, {1: 8, 5: 4}.get(tag & 7, 0)
        if tag & 7 in (0, 2):
            value, at = _varint(message, at)
            size = value if tag & 7 == 2 else 0
        if tag >> 3 == field:
            found, number = found + message[at : at + size], value
        at += size
    return number if last else found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Returns (the varint at `at` of a protobuf message, its end)."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def load_sentencepiece(path: Path, config: Mapping[str, Any], added: Mapping[int, AddedToken]) -> SentencePieceBackend:
    """Read a `tokenizer.model`. Raises ValueError if it is not in SentencePiece's format."""
    try:
        return SentencePieceBackend(
            path.read_bytes(),
            added,
            add_bos=config.get("add_bos_token", True),
            add_eos=config.get("add_eos_token", False),
            legacy=bool(config.get("legacy")),
            add_prefix_space=config.get("add_prefix_space") is not False,
        )
    except RuntimeError as error:
        raise ValueError(f"{path} is not a sentencepiece model: {error}") from error
