"""The demonstration's questions, with their correct answers."""

from __future__ import annotations

import random
from typing import NamedTuple

from radixrt.demo.program import Order

PLACES = (
    "harbor tower bridge garden market station library mill castle cabin museum school bakery office studio farm gate"
).split()
LOOKS = "blue red green old new small large quiet cold warm dark bright".split()
PEOPLE = "Mia Tom Anna Ben Clara David Eva Felix Greta Hugo Lena Max Nora Otto Paula Rosa Simon Tina".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday".split()
FACTS = 36


class Question(NamedTuple):
    """An answer is right if it contains `truth`."""

    text: str
    truth: str


def make_notes(seed: int, facts: int = FACTS) -> tuple[str, list[Question]]:
    """Make notes, of about 27 tokens per fact, and a question about each fact."""
    rng = random.Random(seed)
    spots = rng.sample([f"the {look} {place}" for look in LOOKS for place in PLACES], facts)
    codes = rng.sample(range(1000, 10_000), facts)
    lines, questions = [], []
    for spot, code in zip(spots, codes, strict=True):
        what = rng.choice(("access code", "key number", "room number"))
        lines.append(f"The {what} of {spot} is {code}.")
        questions.append(Question(f"What is the {what} of {spot}?", str(code)))
        if rng.random() < 0.3:
            lines.append(f"{rng.choice(PEOPLE)} walked to {spot} on {rng.choice(DAYS)}.")
    return " ".join(lines), rng.sample(questions, facts)


SUMS = (
    Question("What is (48 + 17) * 6?", str((48 + 17) * 6)),
    Question("Take 85, add 46, then subtract 19. What is the result?", str(85 + 46 - 19)),
    Question("Anna has 34 books. Tom gives Anna 18 more. Anna loses 9 books. How many books does Anna have?", "43"),
)

CREW = {
    ("Mia", "team"): "Kestrel",
    ("Tom", "team"): "Heron",
    ("Kestrel", "leader"): "Paula",
    ("Heron", "leader"): "Viktor",
}
HOPS = (
    Question("Who leads the team of Mia?", "Paula"),
    Question("Who leads the team of Tom?", "Viktor"),
)


def lookup(key: str, field: str) -> str:
    """Looks up a field in a table. Fields: team, leader."""
    return CREW.get((key, field), "not found")


MAILS = (
    (
        "My name is Greta Malin. I live in Bolotra. I want lamps. I need 12 of them.",
        Order("Greta Malin", "Bolotra", "lamps", 12),
    ),
    (
        "The item is candles. The name is Hugo Bren. The count is 40. The city is Sorel.",
        Order("Hugo Bren", "Sorel", "candles", 40),
    ),
)


CHAT = (
    Question("What is the weather in Bolotra?", "12 degrees"),
    Question("What is the weather in Sorel?", "21 degrees"),
)


def weather(city: str) -> str:
    """Tells the weather in a city."""
    return {"Bolotra": "rain, 12 degrees"}.get(city, "sun, 21 degrees")
