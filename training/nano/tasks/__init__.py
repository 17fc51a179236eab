"""Tasks with generators and exact checkers.

    example = make("arithmetic", "2", seed=7, split="eval")
    example.messages, example.tools --a model--> calls --example.run_tool--> ... --> text
    example.check(text, calls)

Each kind is one file with `make(words, tag)`. TAGS lists the kinds and how hard each can be.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from training.nano.tasks import arithmetic, chat, choose, fill, lookup, recall, tools
from training.nano.tasks.example import Call, Example, Message, calls_of
from training.nano.tasks.words import SPLITS, Words

TAGS: dict[str, tuple[str, ...]] = {
    "recall": ("256", "512", "1024", "2048", "4096"),
    "recall_several": ("256", "512", "1024", "2048", "4096"),
    "tools": ("1", "3", "6", "two", "none"),
    "arithmetic": ("1", "2", "3", "4"),
    "lookup": ("1", "2"),
    "choose": ("copy", "recall", "compare", "sum", "yesno"),
    "json": ("2", "4", "6"),
    "chat": ("talk", "obey"),
}
SEVERAL = (2, 3, 4)
_MAKERS = {"arithmetic": arithmetic, "lookup": lookup, "json": fill, "chat": chat}


def draw(words: Words, kind: str, tag: str, turns: int = 1) -> Example:
    """One example; `turns` questions about one context in recall, requests to the same tools in tools, or one after
    the other in choose, which only training uses."""
    if kind == "recall":
        return recall.make(words, tag, turns=turns)
    if kind == "recall_several":
        return recall.make(words, tag, words.pick(SEVERAL), turns)
    if kind == "choose":
        return choose.make(words, tag, turns)
    if kind == "tools":
        return tools.make(words, tag, turns)
    return _MAKERS[kind].make(words, tag)


def make(kind: str, tag: str, seed: int, split: str = "eval") -> Example:
    """The same for the same arguments, everywhere."""
    return draw(Words(random.Random(f"{split}/{kind}/{tag}/{seed}"), split), kind, tag)


def evaluation(count: int, kinds: tuple[str, ...] = tuple(TAGS)) -> Iterator[Example]:
    """`count` examples of the evaluation split for every kind and tag: seeds 0 to count - 1."""
    for kind in kinds:
        for tag in TAGS[kind]:
            for seed in range(count):
                yield make(kind, tag, seed)


__all__ = ["SPLITS", "TAGS", "Call", "Example", "Message", "Words", "calls_of", "draw", "evaluation", "make"]
