"""Finds where a text can be cut so that the ids of its parts, concatenated, are the ids of the whole.

    text    L ........... X|_Y ........... R      _ a single space       X|_ a cut
    ids     ids of L       |  ids of "a" + R, less those of "a"

Two kinds of cuts are proven here, for every L and R; text is cut nowhere else.

**Before an added token.** Added tokens are found in a text first, leftmost and longest, and the text between two of
them is encoded separately. If no other token contains a token's first character except at its beginning, that token is
found whatever comes before it, provided that it does not strip white space before it and does not require a word
boundary.

**Before a space between two printable ASCII characters**, if one of these holds:

- A pre-tokenizer always ends a word there: white space splitters do, and so do regular expressions of which no match
  can contain a visible character followed by a space (`REGEXES`, checked by hand: no repetition continues from a
  visible character to `\\s` or a space, and `(?!\\S)` comes after white space only). Words are encoded separately, so
  neither side affects the other.
- The model is BPE without a pre-tokenizer, and no piece of its vocabulary contains X followed by a space. Every merge
  forms a piece, so no merge crosses the cut, and merges on one side do not affect the other. (This does not hold for
  Unigram: no piece crosses the cut either, but the sums that it compares are rounded differently in a longer text.)

In both cases the normalizer must not change the two characters or depend on their boundary, and no added token may
cross the cut, or begin or end there in a way that depends on the other side: X is no token's last character (text after
a token may gain or lose a leading space). The "a" before R avoids what a tokenizer does at the start of a text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from radixrt.checkpoint.vocabularies import CASED_WORDS, GPT2_WORDS, SHORT_FORMS, SPACE, WORDS

ANCHOR = "a"
VISIBLE = "".join(map(chr, range(0x21, 0x7F)))
WORD_STARTS = "0-9A-Za-z"
RARE_STARTS = "JKQUVXYZjkqxyz0"
"""A part ends before a word that begins with one of these characters, about every 600 characters in English. Cuts then
depend on the content (as in content-defined chunking), and soon after an edit the parts are the same again."""

MIN_CHARS = 256
MAX_CHARS = 2048
"""From this length on a part ends at any possible cut."""

SPAN_CHARS = 16_384
"""Length of a span, the unit in which text that was seen before is looked up first."""

REGEXES = frozenset(
    {
        GPT2_WORDS,
        WORDS % "{1,3}",  # llama 3
        WORDS % "",  # qwen 2 and 3
        CASED_WORDS % ("", "", ""),  # mistral's tekken
        CASED_WORDS % (SHORT_FORMS + "?", SHORT_FORMS + "?", "{1,3}"),  # gpt-oss
        SHORT_FORMS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",  # qwen 3.5
    }
)
DIGITS = frozenset({"[0-9][0-9][0-9]", r"\p{N}{1,3}", r"\p{N}"})
LOCAL_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Precompiled"})


@dataclass(frozen=True, slots=True)
class AddedToken:
    """An added token: a string that is found in a text before anything else, with neighbouring white space if it strips
    that."""

    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


class Cuts:
    """Cuts texts. `before`: the characters X of the module's second case, "" for none; `tokens`: the added tokens of
    its first case.

    Cuts depend on the text alone. Parts after a cut have ANCHOR in front.
    """

    def __init__(self, before: str, tokens: Sequence[str]) -> None:
        escaped = "".join(map(re.escape, before))
        found = [any_of(tokens)] if tokens else []
        spaces = [f" (?<=[{escaped}] )(?=[{starts}])" for starts in (RARE_STARTS, WORD_STARTS) if before]
        self._rare = re.compile("|".join(spaces[:1] + found) or "(?!)")
        self._any = re.compile("|".join(spaces[1:] + found) or "(?!)")

    def spans(self, text: str) -> list[str]:
        """Cut a text into spans of SPAN_CHARS characters or slightly more; the last one may be shorter."""
        spans, at, head = [], 0, ""
        while len(text) - at > SPAN_CHARS and (found := self._any.search(text, at + SPAN_CHARS)):
            spans.append(head + text[at : found.start()])
            at, head = found.start(), ANCHOR
        return [*spans, head + text[at:]]

    def parts(self, span: str) -> list[str]:
        """Cut a span into parts of MIN_CHARS to MAX_CHARS characters or slightly more; the last one may be shorter."""
        parts, at, head = [], 0, ""
        while len(span) - at > MIN_CHARS:
            found = self._rare.search(span, at + MIN_CHARS, at + MAX_CHARS) or self._any.search(span, at + MAX_CHARS)
            if found is None:
                break
            parts.append(head + span[at : found.start()])
            at, head = found.start(), ANCHOR
        return [*parts, head + span[at:]]


def any_of(words: Iterable[str]) -> str:
    """A regular expression for any of these words, as a trie, so that it looks at each character only once."""
    tails: dict[str, list[str]] = {}
    for word in words:
        tails.setdefault(word[:1], []).append(word[1:])
    ends = tails.pop("", None) is not None
    options = [re.escape(first) + any_of(rest) for first, rest in tails.items()]
    body = options[0] if len(options) == 1 and not ends else f"(?:{'|'.join(options)})"
    return f"{body}?" if ends and options else body if options else ""


NO_CUTS = Cuts("", ())


def proven_cuts(added: Collection[AddedToken], before: str, has_normalizer: bool) -> Cuts:
    """The Cuts that added tokens allow; `before` are the characters X that the rest of the tokenizer allows."""
    if any(token.single_word for token in added):
        return NO_CUTS
    return Cuts(_before_spaces(added, before, has_normalizer), _cut_tokens(added, has_normalizer))


def _before_spaces(added: Collection[AddedToken], before: str, has_normalizer: bool) -> str:
    for token in added:
        reaches_across = re.search(r"\S ", token.content) is not None
        takes_space = token.lstrip and re.match(r"\w", token.content) is not None
        if reaches_across or takes_space or (token.normalized and has_normalizer):
            return ""
    lasts = {token.content[-1:] for token in added}
    return "".join(c for c in before if c not in lasts) if ANCHOR in before and ANCHOR not in lasts else ""


def _cut_tokens(added: Collection[AddedToken], has_normalizer: bool) -> list[str]:
    inner = {c for token in added for c in token.content[1:]}
    depends = {token.content[:1] for token in added if token.lstrip or (token.normalized and has_normalizer)}
    firsts = {token.content[:1] for token in added} - inner - depends
    return [token.content for token in added if token.content[:1] in firsts and not token.content[:1].isspace()]


# ---------------------------------------------------------------- what comes after added tokens


def before_spaces_by_words(pre_tokenizer: Any, normalizer: Any) -> str:
    """The characters X by a pre-tokenizer, from the JSON of a tokenizer.json; "" if nothing is proven."""
    kinds = [_word_edge(step) for step in steps_of(pre_tokenizer, "pretokenizers")]
    local = all(step["type"] in LOCAL_NORMALIZERS for step in steps_of(normalizer, "normalizers"))
    return VISIBLE if local and True in kinds and None not in kinds else ""


def _word_edge(step: dict[str, Any]) -> bool | None:
    """True if a pre-tokenizer ends a word before each such space; False if it does not, and a cut there does not change
    what it does; None if that is not known."""
    match step:
        case {"type": "ByteLevel", "use_regex": bool(splits)}:
            return splits
        case {"type": "Metaspace", "split": bool(splits)}:
            return splits
        case {"type": "WhitespaceSplit" | "Whitespace"}:
            return True
        case {"type": "Punctuation" | "Digits"}:
            return False
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}:
            return True if regex in REGEXES else False if regex in DIGITS else None
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Removed", "invert": True}:
            return True if regex in REGEXES else None
    return None


def before_spaces_by_pieces(pieces: Iterable[str], pre_tokenizer: Any, normalizer: Any) -> str:
    """The characters X by the vocabulary of a BPE model that takes a text as one word; "" if nothing is proven."""
    for step in steps_of(pre_tokenizer, "pretokenizers"):
        if (step["type"], step.get("split")) != ("Metaspace", False):
            return ""
    for step in steps_of(normalizer, "normalizers"):
        match step:
            case {"type": "Prepend"} | {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                continue
        if step["type"] not in LOCAL_NORMALIZERS:
            return ""
    pieces = set(pieces)
    joined = {c for piece in pieces for c in re.findall(f"([!-~])[ {SPACE}]", piece)}
    return "".join(c for c in VISIBLE if c in pieces and c not in joined) if SPACE in pieces else ""


def steps_of(stage: Any, key: str) -> list[dict[str, Any]]:
    """The steps of a stage of a tokenizer.json, nested sequences flattened."""
    if stage is None:
        return []
    if stage["type"] != "Sequence":
        return [stage]
    return [step for inner in stage[key] for step in steps_of(inner, key)]
