"""Text that follows a grammar: which tokens may come next.

    Grammar  --Grammars.get-->  Compiled   one for all who ask for it, made in a thread, kept while there is room
    Compiled + Request    -->   Matcher    one a request: where its text stands
    fill_masks(requests)  -->   int32[rows, words], a bit a token: what the sampler chooses from

A matcher takes in tokens when a mask is asked for, from the request itself: so it comes along through preemption, and
a request that another worker began is caught up with. xgrammar is imported when the first grammar comes.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from radixrt.messages import Grammar
from radixrt.worker.request import Request
from radixrt.worker.schema import with_safe_patterns
from radixrt.worker.vocabulary import Vocabulary, read_vocabulary

CACHE_BYTES = 256 << 20
"""Of compiled grammars that are kept."""
AT_ONCE = 4
"""Grammars that are compiled at once: some take seconds, and others need not wait for them."""
MOST_THREADS = 8
SPELLINGS = {"json": "json", "json_schema": "json", "structural_tag": "tag"}
"""Special tokens are hidden in text, so no grammar may count on them; but a structural tag may name one."""
CONTROL = {"json": re.compile(rb"[\0-\t\x0b\x0c\x0e-\x1f]"), "tag": re.compile(rb"[\0-\x08\x0b\x0c\x0e-\x1f]")}
"""JSON has them escaped, but xgrammar's strings of bounded length let them in. Free text of a tag may hold tabs."""
STRAYED = "grammar: the tokens generated so far do not follow it"
DEAD_END = "grammar: no token of the vocabulary can come next"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar against the tokens of a model. `ends`: those that can end a text, for they stand for none."""

    grammar: Any
    words: int
    """int32 of a mask's row."""
    ends: frozenset[int]
    eos_ids: frozenset[int]

    @property
    def nbytes(self) -> int:
        return self.grammar.memory_size_bytes


# ---------------------------------------------------------------- compiling


class Grammars:
    """Compiles the grammars of one model, in threads, and keeps those used last. For one thread to ask."""

    def __init__(self, model: str, vocab_size: int, eos_ids: frozenset[int], limit: int = CACHE_BYTES) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._limit = limit
        self._jobs: deque[tuple[Grammar, Future[Compiled]]] = deque()
        self._threads = 0
        self._lock = threading.Lock()
        """Over `_jobs` and `_threads`."""
        self._making = threading.Lock()
        """Over `_vocabulary` and `_compilers`."""
        self._known: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        self._vocabulary: Vocabulary | None = None
        self._compilers: dict[str, Any] = {}

    def get(self, grammar: Grammar) -> Future[Compiled]:
        """Done at once if it is known. ValueError, in the future, says why there is none."""
        if grammar not in self._known:
            self._drop_oldest()
            self._known[grammar] = self._submit(grammar)
        self._known.move_to_end(grammar)
        return self._known[grammar]

    def _submit(self, grammar: Grammar) -> Future[Compiled]:
        future: Future[Compiled] = Future()
        with self._lock:
            self._jobs.append((grammar, future))
            more = self._threads < AT_ONCE
            self._threads += more
        if more:  # a daemon: a process that is to end does not wait for a grammar
            threading.Thread(target=self._work, name="grammar", daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._threads -= 1
                    return
                grammar, future = self._jobs.popleft()
            try:
                future.set_result(self._compile(grammar))
            except Exception as error:
                future.set_exception(error)

    @property
    def nbytes(self) -> int:
        """Of what is kept: the grammars, and the texts they are known by."""
        return sum(len(grammar.text) + _size(future) for grammar, future in self._known.items())

    def _drop_oldest(self) -> None:
        excess = self.nbytes - self._limit
        for grammar, future in list(self._known.items()):
            if excess <= 0:
                return
            if future.done():
                excess -= len(grammar.text) + _size(future)
                del self._known[grammar]

    def _compile(self, grammar: Grammar) -> Compiled:
        try:
            import xgrammar  # noqa: F401
        except ImportError as error:
            message = f"grammar: structured output needs xgrammar: pip install 'radixrt[grammar]' ({error})"
            raise ValueError(message) from error
        try:
            with self._making:
                compiler, ends = self._compiler(SPELLINGS.get(grammar.kind, "text"))
            compile = _compile_by(compiler)[grammar.kind]
            schemas = grammar.kind in ("json_schema", "structural_tag")
            text = with_safe_patterns(grammar.kind, grammar.text) if schemas else grammar.text
            return Compiled(compile(text), -(-self._vocab_size // 32), ends, self._eos_ids)
        except Exception as error:  # of many types, none of them promised
            text = re.sub(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ", "", str(error)).strip()
            raise ValueError(f"grammar: {text[:500]}") from error

    def _compiler(self, spelling: str) -> tuple[Any, frozenset[int]]:
        import xgrammar

        if self._vocabulary is None:
            self._vocabulary = read_vocabulary(_folder(self._model), self._vocab_size)
        tokens = self._vocabulary.tokens
        ends = self._eos_ids | {i for i, token in enumerate(tokens) if not token}
        if spelling not in self._compilers:
            spelled = self._vocabulary.special if spelling == "tag" else {}
            encoded = [b"" if i in self._eos_ids else spelled.get(i, token) for i, token in enumerate(tokens)]
            if spelling != "text":
                encoded = [b"" if CONTROL[spelling].search(token) else token for token in encoded]
            encoded += [b""] * (-len(encoded) % 32)  # or the bits beyond the vocabulary would be set
            info = xgrammar.TokenizerInfo(encoded, xgrammar.VocabType.RAW, stop_token_ids=sorted(self._eos_ids))
            threads = min(MOST_THREADS, max(1, (os.cpu_count() or 1) // 2))
            # Its cache is for the rules that grammars have in common.
            compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_limit_bytes=self._limit)
            self._compilers[spelling] = compiler
        return self._compilers[spelling], frozenset(ends)


def _size(future: Future[Compiled]) -> int:
    return future.result().nbytes if future.done() and future.exception() is None else 0


def _folder(model: str) -> Path:
    if not model:
        raise ValueError("structured output needs the tokenizer's files, and this worker has no checkpoint")
    if Path(model).is_dir():
        return Path(model)
    from radixrt.worker.model import checkpoint

    return checkpoint.find(model)


def _compile_by(compiler: Any) -> dict[str, Callable[[str], Any]]:
    return {
        "json": lambda _: compiler.compile_json_schema("{}"),
        "json_schema": compiler.compile_json_schema,
        "regex": compiler.compile_regex,
        "ebnf": compiler.compile_grammar,
        "structural_tag": compiler.compile_structural_tag,
    }


# ---------------------------------------------------------------- matching


class Matcher:
    """Where the text of one request stands in its grammar. The end may be drawn where the grammar may end: `ends`, the
    ids of `stop_token_ids` that stand for no text, and eos. With `ignore_eos` eos comes where nothing else can."""

    __slots__ = ("_taken", "compiled", "ends", "matcher")

    def __init__(self, compiled: Compiled, request: Request) -> None:
        """ValueError where no token could end the text."""
        import xgrammar

        self.ends = request.stop_ids & compiled.ends
        if not self.ends:
            raise ValueError("grammar: no token ends a text: the model names none, and stop_token_ids no special one")
        self.compiled = compiled
        self.matcher = xgrammar.GrammarMatcher(compiled.grammar, override_stop_tokens=sorted(self.ends))
        self._taken = 0

    def follow(self, request: Request) -> bool:
        """Take in what was generated since; False if it does not follow the grammar."""
        tokens, accept = request.tokens, self.matcher.accept_token
        for at in range(request.prompt_len + self._taken, len(tokens)):
            if not accept(tokens[at]):
                return False
            self._taken += 1
        return True

    def banned(self, request: Request, generated: int) -> Iterable[int]:
        """Ids that may come after `generated` tokens only where nothing else can."""
        if generated < request.sampling.min_tokens:
            return request.stop_ids
        return self.compiled.eos_ids if request.sampling.ignore_eos else ()


def fill_masks(requests: Sequence[Request], rows: Sequence[int], out: np.ndarray, threads: int = 1) -> dict[int, str]:
    """Write into out[row], int32[*, ceil(vocabulary / 32)] in C order, which tokens may come next in each of
    `requests`, all of which have a matcher: bit i % 32 of word i // 32 for id i. Other rows are left as they are.

    Answers, by index, why a request cannot go on; in its row everything is allowed."""
    problems = {i: STRAYED for i, request in enumerate(requests) if not request.matcher.follow(request)}
    going = [i for i in range(len(requests)) if i not in problems]
    at = [int(rows[i]) for i in going]
    if going:
        matchers = [requests[i].matcher.matcher for i in going]
        _batch(threads).batch_fill_next_token_bitmask(matchers, out, at)
    for i, row in zip(going, at, strict=True):
        request = requests[i]
        if banned := request.matcher.banned(request, len(request.tokens) - request.prompt_len):
            _ban(out[row], banned)
        if not np.count_nonzero(out[row]):  # faster than any()
            problems[i] = DEAD_END
    for i in problems:
        out[rows[i]] = -1
    return problems


@functools.cache
def _batch(threads: int) -> Any:
    import xgrammar

    return xgrammar.BatchGrammarMatcher(threads)


def _ban(row: np.ndarray, ids: Iterable[int]) -> None:
    """Clear their bits, unless no other is set."""
    left = row.view(np.uint32).copy()
    for i in ids:
        if i >> 5 < len(left):
            left[i >> 5] &= ~np.uint32(1 << (i & 31))
    if left.any():
        row.view(np.uint32)[:] = left


def forced_tokens(request: Request, limit: int) -> list[int]:
    """The tokens that must come next in a request with a matcher, at most `limit`: at each, the only one that its mask
    allows, whatever the logits. An end is not among them. The matcher stays where it was."""
    matcher = request.matcher
    if not matcher.follow(request):
        return []
    generated = len(request.tokens) - request.prompt_len
    row = np.zeros((1, matcher.compiled.words), dtype=np.int32)
    forced: list[int] = []
    while len(forced) < limit:
        matcher.matcher.fill_next_token_bitmask(row)
        if banned := matcher.banned(request, generated + len(forced)):
            _ban(row[0], banned)
        token = _only(row[0])
        if token is None or token in request.stop_ids or not matcher.matcher.accept_token(token):
            break
        forced.append(token)
    if forced:
        matcher.matcher.rollback(len(forced))
    return forced


def _only(row: np.ndarray) -> int | None:
    """The id whose bit is the only one set."""
    words = np.flatnonzero(row)
    if len(words) != 1:
        return None
    bits = int(row.view(np.uint32)[words[0]])
    return int(words[0]) * 32 + bits.bit_length() - 1 if bits & (bits - 1) == 0 else None
