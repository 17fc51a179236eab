"""How the messages of a rendered chat begin, so that a place in its ids can be said to be in the third of them.

    <|im_start|>user\\n  ...  <|im_end|>\\n<|im_start|>assistant\\n  ...
    ^^^^^^^^^^^^^^^^ the mark of a user's message: its special tokens, and the text after them up to a line feed

Found once, by rendering a small chat. What a template writes of its own accord, such as a system message, counts as a
message.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from radixrt.messages import ChatPrompt
from radixrt.tokens.errors import FieldError
from radixrt.tokens.tokenizer import Tokenizer

_TEXTS = {"system": "mark0x", "user": "mark1x", "assistant": "mark2x"}
_LAST = "mark3x"


class MessageMarks:
    """Those of a tokenizer's chat template; none if it has none, or writes no special tokens."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._marks: dict[str, np.ndarray] = {}
        if tokenizer is None:
            return
        for role, found in _found(tokenizer):
            mark = np.array(found, dtype=np.int32)
            if len(mark) and not any(np.array_equal(mark, other) for other in self._marks.values()):
                self._marks[role] = mark

    def at(self, prompt: bytes, token: int) -> tuple[int, str] | None:
        """Of the message in which a token of a prompt is: its number, from 0, and its role. None if that is not
        known."""
        ids = np.frombuffer(prompt, dtype="<i4")
        begins: list[tuple[int, int, str]] = []
        for role, mark in self._marks.items():
            begins += [(int(at), int(at) + len(mark), role) for at in _places(ids[: token + len(mark)], mark)]
        begins.sort()
        if len(begins) > 1 and begins[0][2] == "system" and begins[1][0] <= begins[0][1]:
            del begins[0]  # it is empty: only what any chat begins with
        return (len(begins) - 1, begins[-1][2]) if begins else None


def _places(ids: np.ndarray, mark: np.ndarray) -> np.ndarray:
    """Where `mark` begins in `ids`."""
    places = np.flatnonzero(ids[: max(0, len(ids) - len(mark) + 1)] == mark[0])
    for offset in range(1, len(mark)):
        places = places[ids[places + offset] == mark[offset]]
    return places


def _found(tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """(role, mark) for each role that the template takes."""
    for roles in (("system", "user", "assistant"), ("user", "assistant")):
        messages = [{"role": role, "content": _TEXTS[role]} for role in roles]
        try:
            asked = _rendered(tokenizer, messages[:-1])
            answered = _rendered(tokenizer, messages)
            again = _rendered(tokenizer, [*messages, {"role": "user", "content": _LAST}])
        except FieldError:
            continue
        if not all(text in again for text in (*(_TEXTS[role] for role in roles), _LAST)) or _TEXTS["user"] not in asked:
            continue
        if "system" in roles:
            yield "system", _mark(tokenizer, again.partition(_TEXTS["system"])[0], "")
        user, assistant = _TEXTS["user"], _TEXTS["assistant"]
        yield "user", _mark(tokenizer, _between(again, assistant, _LAST), answered.rpartition(assistant)[2])
        yield "assistant", _mark(tokenizer, _between(again, user, assistant), asked.rpartition(user)[2])
        return


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat(ChatPrompt(messages), answer_next=False)


def _between(text: str, first: str, second: str) -> str:
    return text.rpartition(second)[0].rpartition(first)[2]


def _mark(tokenizer: Tokenizer, between: str, end: str) -> list[int]:
    """The mark in the text `between` two contents, of which the `end` belongs to the message before; that as well, if
    there is no special token after it."""
    ids, ended = (tokenizer.encode(text, add_special_tokens=False) for text in (between, end))
    begin = len(os.path.commonprefix((ids, ended)))
    special = [i for i, token in enumerate(ids) if token in tokenizer.special_ids]
    if not special:
        return []
    if special[-1] < begin:
        begin = 0
    lines = (i for i in range(special[-1] + 1, len(ids)) if b"\n" in tokenizer.token_bytes(ids[i]))
    return ids[begin : next(lines, special[-1] + 1)]
