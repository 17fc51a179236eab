"""Words, names, numbers and phrasings, those for evaluation apart from those for training."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import TypeVar

from training.nano.tasks.phrases import Phrases, fill

__all__ = ["SPLITS", "Phrases", "Words", "fill", "split_of"]
T = TypeVar("T")
SPLITS = ("train", "eval")
EVAL_SHARE = 6
"""One in so many names and numbers is for evaluation."""

ADJECTIVES = (
    "blue red green old new small large quiet loud cold warm dark bright narrow wide round square golden silver "
    "wooden "
    "stone northern southern eastern western upper lower hidden empty busy lonely broken painted ancient modern "
    "foggy "
    "sunny windy dusty frozen"
).split()
NOUNS = (
    "harbor tower bridge garden market station library mill castle cabin museum school bakery office studio "
    "warehouse "
    "lighthouse workshop theater hotel farm gate tunnel island lake forest valley mountain clinic archive "
    "observatory "
    "kitchen cellar vault stable chapel fountain camp dock depot"
).split()
THINGS = (
    "apples pears books coins stamps shells cards pencils stones flowers tickets plates cups boxes bottles candles "
    "eggs lamps chairs keys letters maps nuts oranges ribbons spoons tiles toys bricks buttons"
).split()
OBJECTS = (
    "lamp door window heater fan radio clock camera printer kettle oven screen pump bell gate engine sprinkler "
    "curtain "
    "speaker alarm"
).split()
COLORS = "red blue green yellow black white brown orange purple pink gray".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
LANGUAGES = "French German Spanish Italian Polish Dutch Greek Turkish Latin Danish".split()
GIVEN = (
    "Mia Tom Anna Ben Clara David Eva Felix Greta Hugo Ida Jonas Karl Lena Max Nora Otto Paula Rosa Simon Tina "
    "Viktor "
    "Wanda Zoe Adam Bella Cora Emil Finn Gina"
).split()

ONSETS = "b br d dr f fl g gr h j k l m n p r s sh st t tr v w z".split()
VOWELS = "a e i o u a e i o u ai ou".split()
CODAS = ("", "", "", "", "", "l", "n", "r", "s", "m", "k", "t", "x")


def split_of(text: str) -> str:
    """The split that a name or number belongs to."""
    return "train" if zlib.crc32(text.encode()) % EVAL_SHARE else "eval"


class Words:
    """What a generator draws from: random words of one split."""

    def __init__(self, rng: random.Random, split: str) -> None:
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is none of {', '.join(SPLITS)}")
        self.rng, self.split = rng, split
        self.random = rng.random

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.random() * len(items))]

    def some(self, items: Sequence[T], count: int) -> list[T]:
        return self.rng.sample(items, count)

    def chance(self, share: float) -> bool:
        return self.random() < share

    def between(self, low: int, high: int) -> int:
        """Both included."""
        return low + int(self.random() * (high - low + 1))

    @property
    def training(self) -> bool:
        return self.split == "train"

    def say(self, phrases: Phrases, **values: object) -> str:
        """One of the phrases, filled; `Values` come with a capital too."""
        text = phrases.template(self.random, self.split)
        return fill(text, values) if values else text

    def one_of(self, *makers: str) -> str:
        """A word by one of these methods."""
        return getattr(self, self.pick(makers))()

    # ------------------------------------------------------------ of this split only

    def _mine(self, text: str) -> bool:
        return split_of(text) == self.split

    def word(self) -> str:
        """An invented word, in lower case."""
        pick = self.pick
        while True:
            text = pick(ONSETS) + pick(VOWELS) + pick(CODAS) + pick(ONSETS) + pick(VOWELS) + pick(CODAS)
            if self.chance(0.25):
                text += pick(ONSETS) + pick(VOWELS)
            if self._mine(text):
                return text

    def name(self) -> str:
        return self.word().capitalize()

    def place(self) -> str:
        """An adjective and a noun."""
        while True:
            text = f"{self.pick(ADJECTIVES)} {self.pick(NOUNS)}"
            if self._mine(text):
                return text

    def person(self) -> str:
        """A full name, or an invented one."""
        return self.name() if self.chance(0.5) else f"{self.pick(GIVEN)} {self.name()}"

    def code(self, digits: int = 4) -> str:
        low = 10 ** (digits - 1)
        while True:
            text = str(self.between(low, 10 * low - 1))
            if self._mine(text):
                return text

    def text(self) -> str:
        """A few words that say little."""
        return self.pick((self.place, lambda: f"{self.word()} {self.word()}", self.word))()

    def distinct(self, maker: str, count: int) -> list[str]:
        """So many different ones."""
        found: dict[str, None] = {}
        make = getattr(self, maker)
        while len(found) < count:
            found[make()] = None
        return list(found)
