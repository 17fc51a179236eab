"""From recorded prompts to bodies of requests, and what a cache of unlimited size would have of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from bench.agents.sessions import BlockPrompt, Prompt, Session, TextPrompt, block_ids
from bench.serve.loads import END_OF_IDS, LOWEST_ID

Piece = bytes | str
"""Part of a prompt: token ids in decimal with commas between them, or characters."""
CHARS = 64
"""Of a piece of text."""
BLOCKS_AT_A_TIME = 50
"""Blocks that are made before others may run: about a millisecond."""


class Writer:
    """Writes the prompts of one play of a session. Each play has ids of its own after the system prompt, and each run
    (`salt`) has its own altogether: nothing of an earlier one is in a server's cache."""

    def __init__(self, session: str, play: int, salt: int, vocab_size: int) -> None:
        self._session, self._play, self._salt = session, play, salt
        self._low, self._end = min(LOWEST_ID, vocab_size // 2), min(END_OF_IDS, vocab_size)
        self._blocks: dict[tuple[str, int], bytes] = {}

    async def prepare(self, session: Session) -> None:
        """Make all blocks beforehand, in steps so short that answers that arrive meanwhile are timed well."""
        prompts = [turn.prompt for turn in session.all_turns()]
        keys = dict.fromkeys(key for prompt in prompts if isinstance(prompt, BlockPrompt) for key in self._keys(prompt))
        for number, key in enumerate(keys):
            self._block(key)
            if number % BLOCKS_AT_A_TIME == 0:
                await asyncio.sleep(0)

    def pieces(self, prompt: Prompt) -> list[Piece]:
        if isinstance(prompt, TextPrompt):
            text = f"[{self._salt} {self._play}]\n{prompt.text}"
            return [text[begin : begin + CHARS] for begin in range(0, len(text), CHARS)]
        found: list[Piece] = [self._block(key) for key in self._keys(prompt)]
        if prompt.tail:
            key = [self._salt, self._play, *prompt.session.encode(), prompt.place]
            found.append(_digits(np.random.default_rng(key).integers(self._low, self._end, prompt.tail)))
        return found

    @staticmethod
    def _keys(prompt: BlockPrompt) -> Iterable[tuple[str, int]]:
        for place, number in enumerate(prompt.numbers()):
            yield ("", number) if place >= prompt.shared else (prompt.system, number)

    def _block(self, key: tuple[str, int]) -> bytes:
        if (found := self._blocks.get(key)) is None:
            system, number = key
            name, salt = (system, (self._salt,)) if system else (self._session, (self._salt, self._play))
            found = self._blocks[key] = _digits(block_ids(name, number, self._low, self._end, salt))
        return found


def _digits(ids: np.ndarray) -> bytes:
    return msgspec.json.encode(ids.tolist())[1:-1]


def encoded(pieces: Sequence[Piece]) -> bytes:
    """The JSON of a prompt."""
    if isinstance(pieces[0], bytes):
        return b"[%b]" % b",".join(pieces)  # type: ignore[arg-type]
    return msgspec.json.encode("".join(pieces))  # type: ignore[arg-type]


def size(piece: Piece) -> int:
    """In tokens, or in characters."""
    return len(piece) if isinstance(piece, str) else piece.count(b",") + 1


class InfiniteCache:
    """All prompts that were sent, as a tree of pieces."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}
        self._texts: dict[int, list[str]] = {}

    def add(self, pieces: Sequence[Piece]) -> int:
        """Add a prompt. Returns how much of its beginning was there, in tokens or characters."""
        node = known = 0
        for piece in pieces:
            # Hashes of 64 bits: the pieces themselves would be hundreds of megabytes.
            key = node, hash(piece)
            child = self._nodes.get(key)
            if child is not None:
                known += size(piece)
            else:  # and nothing below is known either
                if isinstance(piece, str):
                    others = self._texts.setdefault(node, [])
                    known += max((_common(piece, other) for other in others), default=0)
                    others.append(piece)
                child = self._nodes[key] = len(self._nodes) + 1
            node = child
        return known


def _common(one: str, other: str) -> int:
    """The length of the common beginning."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)
