"""Text that follows a grammar: which tokens may come next.

    Grammar  --Grammars.get-->  Compiled   one for all who ask for it, made in a thread, kept while there is room
    Compiled + Request    -->   Matcher    one a request: where its text stands (`matching`)
    fill_masks(requests)  -->   int32[requests, words], a bit a token: what the sampler chooses from

xgrammar is imported when the first grammar comes.
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
from radixrt.worker.schema import made_fit
from radixrt.worker.vocabulary import Vocabulary, read_vocabulary

CACHE_BYTES = 256 << 20
"""Of compiled grammars that are kept."""
ENTRY_BYTES = 2048
"""That a grammar costs beside its text and what is compiled of it, about."""
AT_ONCE = 4
"""Grammars that are compiled at once: some take seconds, and others need not wait for them."""
MOST_THREADS = 8
SPELLINGS: dict[GrammarKind, str] = {"json": "json", "json_schema": "json", "structural_tag": "tag"}
"""Special tokens are hidden in text, so no grammar may count on them; but a structural tag may name one."""
CONTROL = {"json": re.compile(rb"[\0-\t\x0b\x0c\x0e-\x1f]"), "tag": re.compile(rb"[\0-\x08\x0b\x0c\x0e-\x1f]")}
"""JSON has them escaped, but xgrammar's strings of bounded length let them in. Free text of a tag may hold tabs."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar against the tokens of a model. `ends`: those that can end a text, for they stand for none; `silent`:
    those that stand for none in such a grammar, which xgrammar warns of when it is shown one."""

    grammar: Any
    words: int
    """int32 of a mask's row."""
    ends: frozenset[int]
    eos_ids: frozenset[int]
    silent: frozenset[int]
    spelling: Spelling | None = None
    """Of text that it forces; None: all tokens are drawn."""

    @property
    def nbytes(self) -> int:
        return self.grammar.memory_size_bytes


class BadGrammar(ValueError):
    """It cannot be compiled: the request is at fault."""


class Grammars:
    """Compiles the grammars of one model, in threads, and keeps those used last. For one thread to ask.

    With `jump_forward` text that a grammar forces is not drawn, and JSON of a schema is on one line, its separators
    ", " and ": ": with white space wherever JSON allows it next to nothing is forced."""

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
        """Over `_jobs` and `_threads`."""
        self._making = threading.Lock()
        """Over `_vocabulary`, `_ends` and `_compilers`."""
        self._known: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        self._sizes: dict[Grammar, int] = {}
        """Bytes of those that are known and done."""
        self._bytes = 0
        self._undone: list[Grammar] = []
        self._vocabulary: Vocabulary | None = None
        self._ends: frozenset[int] | None = None
        """See Compiled. One for all: a vocabulary may have thousands."""
        self._compilers: dict[str, tuple[Any, Spelling | None, frozenset[int]]] = {}

    def get(self, grammar: Grammar) -> Future[Compiled]:
        """Done at once if it is known. ValueError, in the future, says why there is none."""
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
        """Of what is kept and done: the grammars, and the texts they are known by."""
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
            text = made_fit(grammar.kind, grammar.text) if grammar.holds_schemas else grammar.text
            text = _of_four_digits(text) if grammar.kind == "regex" else text
            compiled = compile(text)
            if spelling and not _forces_little(grammar.kind, text):
                spelling = None
            return Compiled(compiled, -(-self._vocab_size // 32), ends, self._eos_ids, silent, spelling)
        except Exception as error:  # of many types, none of them promised
            raise BadGrammar(f"grammar: {plain(str(error))}") from error

    def _compiler(self, spelling: str) -> tuple[Any, Spelling | None, frozenset[int], frozenset[int]]:
        """What compiles texts spelled so, how what is forced is spelled, `silent` and `ends` (see Compiled)."""
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
            encoded += [b""] * (-len(encoded) % 32)  # or the bits beyond the vocabulary would be set
            info = xgrammar.TokenizerInfo(encoded, xgrammar.VocabType.RAW, stop_token_ids=sorted(self._eos_ids))
            threads = min(MOST_THREADS, max(1, (os.cpu_count() or 1) // 2))
            # Its cache is for the rules that grammars have in common.
            compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_limit_bytes=self._limit)
            forced = Spelling(encoded, self._vocabulary.encode) if self._jumps else None
            silent = frozenset(i for i, token in enumerate(encoded) if not token)
            self._compilers[spelling] = compiler, forced, silent
        return *self._compilers[spelling], self._ends


def _size(future: Future[Compiled]) -> int:
    """Bytes of what is compiled, if it could be."""
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


def _forces_little(kind: GrammarKind, text: str) -> bool:
    """Whether xgrammar may be asked for what a grammar that compiles forces."""
    try:
        return is_bounded(_parsed(kind, text).serialize_json())
    except Exception:  # a tag that names a token is not parsed without the tokenizer
        return False


def _parsed(kind: GrammarKind, text: str) -> Any:
    """The same grammar before it is compiled, on one line."""
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
    """A regular expression, or EBNF that xgrammar wrote, without \\xNN: where xgrammar reads that, it takes all
    hexadecimal digits that follow for its own."""
    return re.sub(r"\\(?:x([0-9a-fA-F]{2})|.)", lambda found: f"\\u00{found[1]}" if found[1] else found[0], text)
