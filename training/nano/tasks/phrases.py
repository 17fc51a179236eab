"""Ways to say one thing. Those of training are small grammars, so that it sees many; those of evaluation plain "
"sentences.

    Phrases(["<tell|give> me {x}@end", "{x}<, please|>?"], ["Name {x}."])

`<a|b|>` is a choice, which may hold further ones; `@name` one of MACROS; `{x}` a value, with a capital if it begins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Random = Callable[[], float]
Tree = list  # of strings and, for choices, tuples of trees

MACROS = {
    "@end": "<.|.|.|.|.|!|?|>",
    "@do": (
        "<||please |please |can you |could you |would you |will you |can you please |I want you to |I need you to |"
        "I would like you to |you should |you must |you can |go and |try to |kindly |it is time to |help me to |"
        "let us |I ask you to |be so good as to |somebody should |we have to |we need to |I have to |make sure to >"
    ),
    "@tell": (
        "<tell me|say|show me|let me know|let me have|I want to know|I need to know|I would like to know|"
        "I want|I need|I would like|I must know|find|find out|look for|do you remember|can you tell me|"
        "could you tell me|can you give me|can you find|please tell me|please say|please give me|please show me|"
        "please find|remind me of|what is|what is|what was|what would be|what about|I ask for|get me|name|state|"
        "report|"
        "repeat|who can tell me|I am looking for|I forgot|we need|are you able to say>"
    ),
    "@know": (
        "<tell me|say|show me|let me know|I want to know|I need to know|I would like to know|I must know|find out|"
        "do you know|can you tell me|could you tell me|can you say|please tell me|please say|do you remember|"
        "I wonder|I ask|remind me>"
    ),
    "@is": (
        "<is|is|is|is|was|equals|reads|remains|stays|will be|should be|must be|seems to be|is called|is known as|"
        "goes by|is given as|turns out to be|has become|is still|is now|is just|is set to|would be>"
    ),
    "@that": (
        "<||||||I think |I believe |we know that |you know that |everybody knows that |note that |remember: |"
        "keep in mind that |they say that |I heard that |I was told that |it is true that |it says that |please "
        "note: |"
        "I see that |it seems that |one should know that |do not forget that |the list says that |remember, >"
    ),
}
OPENERS = (
    "By the way,", "As you know,", "Well,", "Now,", "OK,", "So", "Listen:", "Look,", "In short,", "Again:", "Hey,",
    "As I said,", "Today", "Here", "In fact,", "If you can,", "Just", "One thing:", "Please note:", "As it happens,",
)  # fmt: skip
CLOSERS = (
    ", as you know", ", you see", ", I think", " now", " today", ", as I said", " for me", ", please", " here",
    " there", ", so they say", " right away", ", by the way", " at once", " in this case", ", if you can", ", thanks",
)  # fmt: skip
FILLERS = (
    *"here there now today just still really indeed simply then well actually maybe".split(),
    ", as you know,", ", by the way,", ", in fact,", "of course", "as it happens", "I think", "right now",
    "you see", "this time", "so to say", "in this case",
)  # fmt: skip
INVENTED = "zop frel dusk vint marl quib trop welf snad bork yull prin glim stob hest".split()
"""Fillers that mean nothing; none stands beside a value, which it would seem a part of."""
QUOTED = ("0", "1", "2", "v")
"""Values that may stand in quotes."""
COPIED = "vxeon0123"
"""Values that answers copy, letter by letter."""


def parse(text: str) -> Tree:
    for name, meaning in MACROS.items():
        text = text.replace(name, meaning)
    tree, rest = _sequence(text, 0, "")
    if rest != len(text) or any(part.count(">") for part in tree if type(part) is str):
        raise ValueError(f"brackets of {text!r} do not match")
    return tree


def _sequence(text: str, at: int, ends: str) -> tuple[Tree, int]:
    tree: Tree = []
    start = at
    while at < len(text) and text[at] not in ends:
        if text[at] != "<":
            at += 1
            continue
        if at > start:
            tree.append(text[start:at])
        options = []
        while at < len(text) and text[at] != ">":
            option, at = _sequence(text, at + 1, "|>")
            options.append(option)
        if at == len(text):
            raise ValueError(f"brackets of {text!r} do not match")
        tree.append(tuple(options))
        at = start = at + 1
    if at > start:
        tree.append(text[start:at])
    return tree, at


def expand(tree: Tree, random: Random) -> str:
    """One of the texts of the grammar."""
    out: list[str] = []
    for part in tree:
        if type(part) is str:
            out.append(part)
        elif option := part[int(random() * len(part))]:
            out.append(option[0] if len(option) == 1 and type(option[0]) is str else expand(option, random))
    return "".join(out)


def vary(text: str, random: Random) -> str:
    """A template with words that add nothing, a quoted value, or a small first letter. Values are still places `{x}`,
    so that nothing gets into them."""
    r = random()
    if r < 0.07:
        text = _lower(f"{OPENERS[int(random() * len(OPENERS))]} ", text)
    elif r < 0.12:
        body = text.rstrip(".!?")
        text = body + CLOSERS[int(random() * len(CLOSERS))] + text[len(body) :]
    elif r < 0.27:
        text = _with_filler(text, random)
        if r > 0.24:
            text = _with_filler(text, random)
    elif r < 0.32:
        for key in QUOTED:
            if "{" + key + "}" in text and '"' not in text:
                mark = '"' if random() < 0.6 else "'"
                text = text.replace("{" + key + "}", f"{mark}{{{key}}}{mark}")
                break
    return text


def _lower(before: str, text: str) -> str:
    return before + (text if text[:2] in ("I ", "I'") else text[:1].lower() + text[1:])


def _with_filler(text: str, random: Random) -> str:
    words = text.split(" ")
    if len(words) < 3:
        return text
    at = 1 + int(random() * (len(words) - 1))
    beside_value = "}" in words[at - 1] or "{" in words[at]
    if random() < 0.2 and not beside_value:
        filler = INVENTED[int(random() * len(INVENTED))]
    else:
        filler = FILLERS[int(random() * len(FILLERS))]
    if filler[0] == ",":
        words[at - 1] += filler if words[at - 1][-1:].isalpha() or words[at - 1][-1:] == "}" else ""
    else:
        words.insert(at, filler)
    return " ".join(words)


def capital(text: str) -> str:
    """The first letter is a capital, and that of a value that begins if no answer copies it."""
    if text[:1] == "{":
        if text[1:2] in COPIED:
            return text
        return "{" + text[1:2].upper() + text[2:]
    return text[:1].upper() + text[1:]


def bare(text: str) -> str:
    """What two ways to say a thing are compared by: without capitals and the signs around it."""
    return text.lower().strip(" .!?:,")


class Phrases:
    """Ways to say one thing; no way of evaluation is, or stands within, one of training. `varied`: with `vary`;
    without, the first letters stay as they are too."""

    def __init__(self, train: Sequence[str], evaluation: Sequence[str], varied: bool = True) -> None:
        self.of = {"train": tuple(train), "eval": tuple(evaluation)}
        both = set(train) & set(evaluation)
        if both:
            raise ValueError(f"in both splits: {sorted(both)}")
        self._trees = [parse(text) for text in train]
        self._varied = varied
        self._whole = frozenset(bare(text) for text in evaluation)
        self._within = [text for text in self._whole if len(text.split()) > 2]

    def template(self, random: Random, split: str) -> str:
        if split == "eval":
            known = self.of["eval"]
            return known[int(random() * len(known))]
        trees = self._trees
        for _ in range(1000):
            text = expand(trees[int(random() * len(trees))], random)
            if self._varied and text:
                if random() < 0.94:
                    text = capital(text)
                text = vary(text, random)
            known = bare(text)
            if not text or known not in self._whole and not any(other in known for other in self._within):
                return text
        raise ValueError(f"no way of training is apart from evaluation: {self.of['train'][:3]}")


SLOT = re.compile(r"\{(\w+)\}")


def fill(template: str, values: dict[str, object]) -> str:
    """`{x}` becomes values["x"], `{X}` the same with a capital."""

    def value(match: re.Match[str]) -> str:
        key = match[1]
        if key in values:
            return str(values[key])
        lower = key[:1].lower() + key[1:]
        if lower not in values:
            return match[0]
        text = str(values[lower])
        return text[:1].upper() + text[1:]

    return SLOT.sub(value, template)
