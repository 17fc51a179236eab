"""Compiles grammars (JSON schemas, regular expressions, EBNF, structural tags) against the tokens of a model.

    Grammar  --Grammars.get-->  Compiled   shared by all requests with this grammar, compiled in a thread, LRU-cached
    Compiled + Request    -->   Matcher    one per request: the state of its text (`matching`)
    fill_masks(requests)  -->   int32[requests, words], one bit per token: which tokens may be sampled

xgrammar is imported when the first grammar arrives.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixrt.grammar_errors import plain
from radixrt.messages import Grammar, GrammarKind
from radixrt.worker.jump import Spelling, is_bounded, on_one_line
from radixrt.worker.schema import adapt_schema
from radixrt.worker.vocabulary import Vocabulary, read_vocabulary

CACHE_BYTES = 256 << 20
"""The most memory of cached grammars."""
ENTRY_BYTES = 2048
"""About what a cached grammar takes beside its text and its compiled form."""
AT_ONCE = 4
"""The most grammars that are compiled at the same time: some take seconds, and others need not wait for them."""
MOST_THREADS = 8
"""The most threads that compile one grammar."""
SPELLINGS: dict[GrammarKind, str] = {"json": "json", "json_schema": "json", "structural_tag": "tag"}
"""How tokens are spelled for a kind of grammar ("text" if not listed). Special tokens have no text, except that a
structural tag may name one; for "json" and "tag" tokens with CONTROL characters have none either."""
CONTROL = {"json": re.compile(rb"[\0-\t\x0b\x0c\x0e-\x1f]"), "tag": re.compile(rb"[\0-\x08\x0b\x0c\x0e-\x1f]")}
"""Control characters, which JSON requires to be escaped, but xgrammar's strings of bounded length allow. The free text
of a tag may hold tabs."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar compiled against the tokens of a model."""

    grammar: Any
    words: int
    """Length of a mask's row, in int32."""
    ends: frozenset[int]
    """Ids that may end a text: eos, and all ids that have no text."""
    eos_ids: frozenset[int]
    silent: frozenset[int]
    """Ids that have no text for this kind of grammar. xgrammar prints a warning if it is given one."""
    spelling: Spelling | None = None
    """Tokenizes text that the grammar forces; None if all tokens are to be sampled."""

    @property
    def nbytes(self) -> int:
        return self.grammar.memory_size_bytes


class BadGrammar(ValueError):
    """The grammar of a request is invalid or not supported."""


class Grammars:
    """Compiles the grammars of one model in threads, and caches those used last. `get` is for one thread only.

    With `jump_forward`, text that a grammar forces is appended without sampling, and JSON of a schema is restricted to
    one line with the separators ", " and ": ": if white space were allowed everywhere, hardly any text would be forced.
    """

    def __init__(
        self,
        model: str,
        vocab_size: int,
        eos_ids: frozenset[int],
        limit: int = CACHE_BYTES,
        jump_forward: bool = True,
    ) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._limit = limit
        self._jumps = jump_forward
        self._jobs: deque[tuple[Grammar, Future[Compiled]]] = deque()
        self._threads = 0
        self._lock = threading.Lock()
        """Guards `_jobs` and `_threads`."""
        self._making = threading.Lock()
        """Guards `_vocabulary`, `_ends` and `_compilers`."""
        self._known: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        self._sizes: dict[Grammar, int] = {}
        """Bytes of each cached grammar that is compiled."""
        self._bytes = 0
        self._undone: list[Grammar] = []
        """Cached grammars whose size is not counted yet, as they may still be compiling."""
        self._vocabulary: Vocabulary | None = None
        self._ends: frozenset[int] | None = None
        """`Compiled.ends`, shared by all grammars: it may have thousands of ids."""
        self._compilers: dict[str, tuple[Any, Spelling | None, frozenset[int]]] = {}

    def get(self, grammar: Grammar) -> Future[Compiled]:
        """The compiled grammar; the future is done at once if it is cached. The future raises ValueError if there is no
        xgrammar or no tokenizer, and BadGrammar if the grammar cannot be compiled."""
        if grammar not in self._known:
            self._drop_oldest()
            self._known[grammar] = self._submit(grammar)
            self._undone.append(grammar)
        self._known.move_to_end(grammar)
        return self._known[grammar]

    def _submit(self, grammar: Grammar) -> Future[Compiled]:
        future: Future[Compiled] = Future()
        with self._lock:
            self._jobs.append((grammar, future))
            more = self._threads < AT_ONCE
            self._threads += more
        if more:  # a daemon thread, so that a compilation does not keep the process from ending
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
        """Memory of the cached grammars that are compiled, with their texts."""
        undone, self._undone = self._undone, []
        for grammar in undone:
            future = self._known[grammar]
            if future.done():
                self._sizes[grammar] = ENTRY_BYTES + len(grammar.text) + _size(future)
                self._bytes += self._sizes[grammar]
            else:
                self._undone.append(grammar)
        return self._bytes

    def _drop_oldest(self) -> None:
        while self.nbytes > self._limit:
            oldest = next(grammar for grammar in self._known if grammar in self._sizes)
            self._bytes -= self._sizes.pop(oldest)
            del self._known[oldest]

    def _compile(self, grammar: Grammar) -> Compiled:
        try:
            import xgrammar  # noqa: F401
        except ImportError as error:
            message = f"grammar: structured output needs xgrammar: pip install 'radixrt[grammar]' ({error})"
            raise ValueError(message) from error
        try:
            with self._making:
                compiler, spelling, silent, ends = self._compiler(SPELLINGS.get(grammar.kind, "text"))
        except Exception as error:
            raise ValueError(f"grammar: {error}") from error
        try:
            compile = _compile_by(compiler, one_line=self._jumps)[grammar.kind]
            text = adapt_schema(grammar.kind, grammar.text) if grammar.holds_schemas else grammar.text
            text = _of_four_digits(text) if grammar.kind == "regex" else text
            compiled = compile(text)
            if spelling and not _forced_text_is_bounded(grammar.kind, text):
                spelling = None
            return Compiled(compiled, -(-self._vocab_size // 32), ends, self._eos_ids, silent, spelling)
        except Exception as error:  # of many types, none of them promised
            raise BadGrammar(f"grammar: {plain(str(error))}") from error

    def _compiler(self, spelling: str) -> tuple[Any, Spelling | None, frozenset[int], frozenset[int]]:
        """For a spelling (see SPELLINGS): the compiler, and `spelling`, `silent` and `ends` of what it compiles."""
        import xgrammar

        if self._vocabulary is None:
            self._vocabulary = read_vocabulary(_folder(self._model), self._vocab_size)
        tokens = self._vocabulary.tokens
        if self._ends is None:
            self._ends = self._eos_ids.union(i for i, token in enumerate(tokens) if not token)
        if spelling not in self._compilers:
            spelled = self._vocabulary.special if spelling == "tag" else {}
            encoded = [b"" if i in self._eos_ids else spelled.get(i, token) for i, token in enumerate(tokens)]
            if spelling != "text":
                encoded = [b"" if CONTROL[spelling].search(token) else token for token in encoded]
            encoded += [b""] * (-len(encoded) % 32)  # otherwise mask bits beyond the vocabulary would be set
            info = xgrammar.TokenizerInfo(encoded, xgrammar.VocabType.RAW, stop_token_ids=sorted(self._eos_ids))
            threads = min(MOST_THREADS, max(1, (os.cpu_count() or 1) // 2))
            # The compiler's own cache is for rules that several grammars share.
            compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_limit_bytes=self._limit)
            forced = Spelling(encoded, self._vocabulary.encode) if self._jumps else None
            silent = frozenset(i for i, token in enumerate(encoded) if not token)
            self._compilers[spelling] = compiler, forced, silent
        return *self._compilers[spelling], self._ends


def _size(future: Future[Compiled]) -> int:
    """Bytes of a compiled grammar; 0 if it could not be compiled."""
    return future.result().nbytes if future.exception() is None else 0


def _folder(model: str) -> Path:
    if not model:
        raise ValueError("structured output needs the tokenizer's files, and this worker has no checkpoint")
    if Path(model).is_dir():
        return Path(model)
    from radixrt.worker.model import checkpoint

    return checkpoint.find(model)


def _compile_by(compiler: Any, one_line: bool) -> dict[GrammarKind, Callable[[str], Any]]:
    def tag(text: str) -> Any:
        return compiler.compile_structural_tag(on_one_line(text, _ebnf_on_one_line) if one_line else text)

    return {
        "json": lambda _: compiler.compile_json_schema("{}"),
        "json_schema": lambda text: compiler.compile_json_schema(text, any_whitespace=not one_line),
        "regex": compiler.compile_regex,
        "ebnf": compiler.compile_grammar,
        "structural_tag": tag,
    }


def _forced_text_is_bounded(kind: GrammarKind, text: str) -> bool:
    """Whether xgrammar can be asked which text the grammar forces: that text is bounded (see `is_bounded`)."""
    try:
        return is_bounded(_parsed(kind, text).serialize_json())
    except Exception:  # a tag that names a token is not parsed without the tokenizer
        return False


def _parsed(kind: GrammarKind, text: str) -> Any:
    """The grammar as an xgrammar Grammar, not compiled, with JSON on one line."""
    import xgrammar

    make = xgrammar.Grammar
    return {
        "json": lambda _: make.builtin_json_grammar(),
        "json_schema": lambda text: make.from_json_schema(text, any_whitespace=False),
        "regex": make.from_regex,
        "ebnf": make.from_ebnf,
        "structural_tag": lambda text: make.from_structural_tag(on_one_line(text, _ebnf_on_one_line)),
    }[kind](text)


def _ebnf_on_one_line(schema: str) -> str:
    import xgrammar

    return _of_four_digits(str(xgrammar.Grammar.from_json_schema(schema, any_whitespace=False)))


def _of_four_digits(text: str) -> str:
    """Replace \\xNN by \\u00NN in a regular expression, or in EBNF that xgrammar wrote: xgrammar reads \\x with any
    number of hexadecimal digits."""
    return re.sub(r"\\(?:x([0-9a-fA-F]{2})|.)", lambda found: f"\\u00{found[1]}" if found[1] else found[0], text)
