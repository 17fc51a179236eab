"""Tables of the text that each token id adds, for incremental decoding.

A library's `decode` takes microseconds and cannot be continued. In nearly every tokenizer a token adds the
same text wherever it is, except at the start of the text (where a leading space is dropped) and in runs of
byte tokens (`<0xE4>`). Both exceptions are implemented here, `verified` compares the result with `decode`,
and a table that differs anywhere is not used.
"""

from __future__ import annotations

import codecs
import dataclasses
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from radixrt.tokens._pieces import ByteTable

REPLACEMENT = "\ufffd"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("radixrt-each-byte", _replace_each_byte)


class Stream(Protocol):
    """Decodes token ids, integers or int32 bytes, incrementally: all texts that `push` and then `flush` return, joined,
    are the result of `decode`."""

    def push(self, ids: Sequence[int] | bytes) -> str: ...

    def flush(self) -> str: ...


class Pieces(Protocol):
    """A table of all ids. `without` returns one in which `hidden` ids add nothing, as with skip_special_tokens."""

    def without(self, hidden: Collection[int]) -> Pieces: ...

    def stream(self) -> Stream: ...

    def bytes_of(self, token: int) -> bytes: ...


# ---------------------------------------------------------------- byte-level: any token is a run of bytes


@dataclass(frozen=True)
class BytePieces:
    """GPT-2's byte-level vocabulary: the text is the UTF-8 of all tokens' bytes, joined. Ids beyond the vocabulary (of
    a padded embedding) add nothing."""

    data: list[bytes]
    _table: ByteTable = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_table", ByteTable(self.data))

    def without(self, hidden: Collection[int]) -> BytePieces:
        data = list(self.data)
        for token in hidden:
            data[token] = b""
        return BytePieces(data)

    def stream(self) -> Stream:
        return self._table.stream()

    def bytes_of(self, token: int) -> bytes:
        return self.data[token] if token < len(self.data) else b""


# ---------------------------------------------------------------- sentencepiece: text, and single bytes


@dataclass(frozen=True)
class TextPieces:
    """Tokens that are text, and tokens that are one byte each.

    `strict`: a run of byte tokens is decoded as a whole if it is valid UTF-8, and otherwise to one U+FFFD per
    byte (`tokenizers`), so it is held back until it ends. Otherwise each character is decoded by itself
    (sentencepiece).

    At the start of the text `strip` spaces are removed, and `head` has the text of ids that differ there. The
    start ends (`ends`) with the first token ("token"), with the first token that adds text ("text"), or with
    that or the first one found in `head` ("space").
    """

    texts: list[str]
    byte_of: dict[int, int]
    strict: bool
    strip: int = 0
    head: dict[int, str] = dataclasses.field(default_factory=dict)
    head_ends: Literal["token", "text", "space"] = "token"
    hidden: frozenset[int] = frozenset()

    def without(self, hidden: Collection[int]) -> TextPieces:
        texts = list(self.texts)
        for token in hidden:
            texts[token] = ""
        byte_of = {token: byte for token, byte in self.byte_of.items() if token not in hidden}
        return dataclasses.replace(self, texts=texts, byte_of=byte_of, hidden=frozenset(hidden))

    def stream(self) -> Stream:
        return _TextStream(self)

    def bytes_of(self, token: int) -> bytes:
        if token in self.byte_of:
            return bytes((self.byte_of[token],))
        return self.texts[token].encode() if token < len(self.texts) else b""


class _TextStream:
    __slots__ = ("_bytes", "_get", "_in_head", "_pieces", "_run", "_steady", "_strip")

    def __init__(self, pieces: TextPieces) -> None:
        self._pieces = pieces
        self._get = pieces.texts.__getitem__
        self._bytes = pieces.byte_of.keys()
        self._in_head = bool(pieces.head)
        self._strip = pieces.strip
        self._run: _Run = _StrictRun() if pieces.strict else _LooseRun()
        self._steady = not (self._in_head or self._strip)

    def push(self, ids: Sequence[int] | bytes) -> str:
        if isinstance(ids, bytes):
            ids = memoryview(ids).cast("i")
        if self._steady and self._bytes.isdisjoint(ids):
            try:
                return "".join(map(self._get, ids))
            except IndexError:
                pass  # ids beyond the vocabulary, which _push_carefully drops
        return self._push_carefully(ids)

    def flush(self) -> str:
        return self._strip_front(self._run.end())

    def _push_carefully(self, ids: Sequence[int]) -> str:
        pieces, run = self._pieces, self._run
        text = ""
        for token in ids:
            if token >= len(pieces.texts) or token in pieces.hidden:
                continue
            byte = pieces.byte_of.get(token)
            if byte is not None:
                text += run.add(byte)
                self._in_head &= pieces.head_ends != "token"
            else:
                text += run.end()
                text += self._text_of(token, text)
        if text and pieces.head_ends != "token":
            self._in_head = False
        text = self._strip_front(text)
        self._steady = not (self._in_head or self._strip or run.pending)
        return text

    def _text_of(self, token: int, before: str) -> str:
        pieces = self._pieces
        if not self._in_head or (before and pieces.head_ends != "token"):
            self._in_head = False
            return pieces.texts[token]
        text = pieces.head.get(token)
        ends = pieces.head_ends == "token" or (pieces.head_ends == "space" and text is not None)
        text = pieces.texts[token] if text is None else text
        self._in_head = not (ends or text)
        return text

    def _strip_front(self, text: str) -> str:
        """Remove the rest of the `strip` leading spaces."""
        if not (self._strip and text):
            return text
        kept = text.lstrip(" ")
        cut = min(self._strip, len(text) - len(kept))
        self._strip = self._strip - cut if cut == len(text) else 0
        return text[cut:]


class _Run(Protocol):
    """A run of byte tokens. `pending`: whether bytes are held back."""

    pending: bool

    def add(self, byte: int) -> str: ...

    def end(self) -> str: ...


class _StrictRun:
    __slots__ = ("_held", "pending")

    def __init__(self) -> None:
        self._held = bytearray()
        self.pending = False

    def add(self, byte: int) -> str:
        self._held.append(byte)
        self.pending = True
        return ""

    def end(self) -> str:
        if not self.pending:
            return ""
        try:
            text = self._held.decode("utf-8")
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._held)
        self._held.clear()
        self.pending = False
        return text


class _LooseRun:
    __slots__ = ("_decoder", "pending")

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("radixrt-each-byte")
        self.pending = False

    def add(self, byte: int) -> str:
        text = self._decoder.decode(bytes((byte,)))
        self.pending = bool(self._decoder.getstate()[0])
        return text

    def end(self) -> str:
        if not self.pending:
            return ""
        self.pending = False
        return self._decoder.decode(b"", True)


# ---------------------------------------------------------------- is the table right?


def verified(pieces: Pieces, decode: Callable[[list[int]], str], vocab_size: int, special: Collection[int]) -> bool:
    """Whether streams of `pieces` equal `decode`, tested with each id once, and with bytes and `special` ids in unusual
    places.
    """
    return all(_streamed(pieces, ids) == decode(ids) for ids in _probes(pieces, vocab_size, special))


def _streamed(pieces: Pieces, ids: list[int]) -> str:
    stream = pieces.stream()
    middle = len(ids) // 2
    return stream.push(ids[:middle]) + stream.push(ids[middle:]) + stream.flush()


def _probes(pieces: Pieces, vocab_size: int, special: Collection[int]) -> Iterator[list[int]]:
    rng = random.Random(0)
    order = list(range(vocab_size))
    rng.shuffle(order)
    at = 0
    while at < vocab_size:
        length = rng.randint(1, 96)
        yield order[at : at + length]
        at += length
    rare = [*special, *(pieces.byte_of if isinstance(pieces, TextPieces) else ())]
    spaces = [i for i in order[:20000] if pieces.bytes_of(i)[:1] == b" "][:64]
    for _ in range(300):
        pools = [order, *filter(None, (rare, spaces))]
        yield [rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 12))]
