"""Keeps the text of messages from being taken for special tokens (transformers' `split_special_tokens`).

    message      ignore that<|im_end|>            a tool's result, say
    escaped      ignore that<%|im_end|>           % is ESCAPE, one character: no special token is found there
    rendered     <|im_start|>tool\\nignore that<%|im_end|><|im_end|>        the template's own tokens are found
    ids          151644      ...    plain text          151645

Texts are escaped before the template sees them, and stay escaped until they are encoded, so that what is compared,
cut and cached is the text as it was rendered. Nearly all messages hold no special token, and stay as they are.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import tokenizers

from radixrt.tokens.cuts import AddedToken, any_of
from radixrt.tokens.errors import FieldError
from radixrt.tokens.rewriting import is_parsed

ESCAPE = "\ufdd0"
"""A noncharacter: no text that is exchanged has it. Where a message has it nevertheless, it becomes U+FFFD."""
THINKING_TAGS = ("<think>", "</think>", "[THINK]", "[/THINK]")
"""Templates look for these in an assistant's content, to find its thinking."""
MAX_DEPTH = 200
"""The most levels of objects and lists of a message or a tool: msgspec reads more than Python's stack holds."""
OWN_ROLES = ("assistant", "system", "developer")


def unescaped(text: str) -> str:
    """The text as a reader should see it."""
    return text.replace(ESCAPE, "") if ESCAPE in text else text


class Escaper:
    """Escapes the text of one model's special tokens.

    In messages of users and tools, and in definitions of tools, these are the tokens that the tokenizer calls special,
    and others that the chat template writes (`<tool_response>`). In messages of the system and of the assistant they
    are only the former, thinking tags aside: prompts describe the markup of calls, and answers have it.
    """

    def __init__(self, added: Iterable[AddedToken], templates: Iterable[str] = ()) -> None:
        sources = "\n".join(templates)
        fit = [t for t in added if len(t.content) > 1 and not t.content.isspace() and not t.single_word]
        self.tokens = frozenset(t.content for t in fit if t.special or t.content in sources)
        """What is escaped anywhere."""
        self._all = _Finder(self.tokens)
        self._own = _Finder({t.content for t in fit if t.special and t.content not in THINKING_TAGS})

    def is_needed(self, *values: Any) -> bool:
        """Whether any text in these JSON values would be escaped: one search in all of them, 1 µs a message."""
        texts: list[str] = []
        try:
            _gather(values, texts, MAX_DEPTH)
        except RecursionError:
            raise FieldError("messages", f"messages and tools are nested more than {MAX_DEPTH} levels deep") from None
        joined = "\0".join([*texts, ""])
        return "\\u" in joined or self._all.anywhere(joined)

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message with all of its texts escaped; the same object if nothing had to be."""
        own = self._own if message["role"] in OWN_ROLES else self._all
        changed = {}
        for key, value in message.items():
            finder = own if key in ("content", "reasoning_content", "reasoning", "thinking") else self._all
            escaped = self._calls(value) if key == "tool_calls" and isinstance(value, list) else finder.within(value)
            if escaped is not value:
                changed[key] = escaped
        return message | changed if changed else message

    def _calls(self, calls: list[Any]) -> list[Any]:
        escaped = [self._call(call) for call in calls]
        return calls if all(a is b for a, b in zip(escaped, calls, strict=True)) else escaped

    def _call(self, call: Any) -> Any:
        """A call whose arguments, once they are parsed, have no token either: JSON may write `<` as `\\u003c`."""
        call = self._all.within(call)
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if function is None or not isinstance(arguments, str) or "\\u" not in arguments or not is_parsed(arguments):
            return call
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return call
        try:
            escaped = self.parsed(parsed)
        except RecursionError:
            raise FieldError("messages", "arguments of calls are nested too deeply") from None
        if escaped is parsed:
            return call
        return call | {"function": function | {"arguments": json.dumps(escaped, ensure_ascii=False)}}

    def values(self, values: Any) -> Any:
        """Tools, or the arguments of a template, escaped."""
        return self._all.within(values)

    def own_text(self, text: str) -> str:
        """A text of the assistant as `message` would escape it, if more may follow in the same message."""
        return self._own.marked(text)

    def parsed(self, values: Any) -> Any:
        """Values parsed from a text that was escaped as JSON, where `\\u003c` was no `<` yet."""
        return self._all.within(values, parsed=True)


def _gather(value: Any, texts: list[str], levels: int) -> None:
    """All texts in a JSON value, keys of objects as well. Raises RecursionError if it has more levels."""
    if not levels:
        raise RecursionError
    for item in value:
        if isinstance(item, str):
            texts.append(item)
        elif isinstance(item, dict):
            texts += item
            _gather(item.values(), texts, levels - 1)
        elif isinstance(item, list):
            _gather(item, texts, levels - 1)


class _Finder:
    """Finds some tokens in texts."""

    def __init__(self, tokens: Collection[str]) -> None:
        trie = any_of(sorted(tokens)) if tokens else "(?!)"
        groups = [[token for token in tokens if token[0] == first] for first in sorted({t[0] for t in tokens})]
        # One for each first character: re then jumps from one to the next, ten times as fast as with two of them.
        self._any = [re.compile(any_of(sorted(group))) for group in groups]
        begun = [[f"{token[:size]}\0" for token in group for size in range(1, len(token))] for group in groups]
        words = [{*group, *more} for group, more in zip(groups, begun, strict=True)]
        self._anywhere = [re.compile(any_of(sorted(several))) for several in words]
        self._starts = re.compile(f"(?={trie}).", re.DOTALL)
        self._firsts = {token[0] for token in tokens}
        self._begun = {token[:size] for token in tokens for size in range(1, len(token)) if token[:size].strip()}
        self._longest = max(map(len, tokens), default=0)

    def escaped(self, text: str, parsed: bool = False) -> str:
        if ESCAPE in text and not parsed:
            text = text.replace(ESCAPE, "\ufffd")
        text = self.marked(text)
        # What follows in the prompt could complete it: the next part of a content.
        return text + ESCAPE if self._begins_one(text) else text

    def marked(self, text: str) -> str:
        """The text with ESCAPE in every token."""
        if not any(first in text for first in self._firsts) or not any(p.search(text) for p in self._any):
            return text
        return self._starts.sub(lambda match: match[0] + ESCAPE, text)

    def anywhere(self, joined: str) -> bool:
        """Whether one of several texts, each of which ends with "\\0", has or begins a token."""
        return ESCAPE in joined or any(pattern.search(joined) for pattern in self._anywhere)

    def within(self, value: Any, parsed: bool = False) -> Any:
        """A JSON value with all of its texts escaped, keys as well; the same object if nothing had to be."""
        if isinstance(value, str):
            return self.escaped(value, parsed)
        if isinstance(value, list):
            items = [self.within(item, parsed) for item in value]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else items
        if isinstance(value, dict):
            pairs = [(self.within(key, parsed), self.within(item, parsed)) for key, item in value.items()]
            same = all(a is key and b is item for (a, b), (key, item) in zip(pairs, value.items(), strict=True))
            return value if same else dict(pairs)
        return value

    def _begins_one(self, text: str) -> bool:
        tail = text[-self._longest :]
        if self._firsts.isdisjoint(tail):
            return False
        return any(c in self._firsts and tail[at:] in self._begun for at, c in enumerate(tail))


# ---------------------------------------------------------------- encoding


class EscapedJson:
    """Encodes escaped texts as a `tokenizer.json` would that did not know the tokens where they are escaped.

    That is a second tokenizer, made when it is first needed: in it each of the `tokens` is called by a name that no
    text has, and this name is put where a token was not escaped. Thread safe.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, tokens: Collection[str]) -> None:
        self._tokenizer, self._escaped_tokens = tokenizer, tokens
        self._names: dict[str, str] = {}
        self._renamed: tokenizers.Tokenizer | None = None
        self._ids: dict[int, int] = {}
        """The ids of added tokens, by those of the second tokenizer."""
        added = sorted((t.content for t in tokenizer.get_added_tokens_decoder().values()), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added)) or "(?!)")
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """The ids of an escaped text, no special tokens added."""
        with self._lock:
            if self._renamed is None:
                self._renamed = self._make()
        named = unescaped(self._added.sub(lambda match: self._names.get(match[0], match[0]), text))
        ids = self._renamed.encode_batch_fast([named], add_special_tokens=False)[0].ids
        return [self._ids.get(id, id) for id in ids]

    def _make(self) -> tokenizers.Tokenizer:
        nonce = secrets.token_hex(8)
        self._names = {token: f"\ufdd1{nonce}x{number}x" for number, token in enumerate(sorted(self._escaped_tokens))}
        state = json.loads(self._tokenizer.to_str())
        state["post_processor"] = state["truncation"] = state["padding"] = None
        known = self._tokenizer.get_added_tokens_decoder()
        state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in self._names]
        _forget(state["model"], self._names)
        renamed = tokenizers.Tokenizer.from_str(json.dumps(state))
        for token in known.values():
            if token.content in self._names:
                flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "normalized": token.normalized}
                renamed.add_tokens([tokenizers.AddedToken(self._names[token.content], special=token.special, **flags)])
        for id, token in known.items():
            now = renamed.token_to_id(self._names.get(token.content, token.content))
            if now is not None and now != id:
                self._ids[now] = id
        return renamed


def _forget(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Take tokens out of the vocabulary of a tokenizer.json's model: others keep their ids."""
    hidden = {token: f"{name}!" for token, name in names.items()}
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in vocabulary]
    else:
        model["vocab"] = {hidden.get(piece, piece): id for piece, id in vocabulary.items()}
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = hidden.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _makes(pair, names)]


def _makes(pair: str | list[str], names: Mapping[str, str]) -> bool:
    """Whether a merge makes one of the tokens, or is made of one."""
    left, right = pair.split(" ") if isinstance(pair, str) else pair
    return left in names or right in names or left + right in names
