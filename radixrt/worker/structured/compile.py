"""Compiles grammars (JSON schemas, regular expressions, EBNF, structural tags) against the tokens of a model.

    Grammar  --Grammars.get-->  Compiled   shared by a tenant's requests with this grammar, compiled in a thread, cached
    Compiled + Request    -->   Matcher    one per request: the state of its text (`matcher`)
    fill_masks(requests)  -->   int32[requests, words], one bit per token: which tokens may be sampled

xgrammar is imported when the first grammar arrives.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixrt.checkpoint.hub import find_files
from radixrt.messages import Grammar, GrammarKind
from radixrt.requests.grammar_errors import explained, plain
from radixrt.requests.schemas.ebnf import compilable
from radixrt.requests.schemas.inexact import Inexact
from radixrt.worker.structured.fair import FairThreads, Job
from radixrt.worker.structured.grammar_cache import GrammarCache, Key
from radixrt.worker.structured.jump_forward import Spelling, is_bounded
from radixrt.worker.structured.ordinary import is_ordinary
from radixrt.worker.structured.vocabulary import Vocabulary, read_vocabulary

CACHE_BYTES = 256 << 20
"""The most memory of cached grammars."""
RULES_BYTES = 16 << 20
"""The most memory of the rules that a compiler caches: JSON strings of bounded length take seconds to compile."""
MAX_COMPILERS = 16
"""The most compilers that are kept, one for each tenant and spelling: their caches take as much as the grammars."""
AT_ONCE = 8
"""The most grammars that are compiled at the same time: some take seconds, and others need not wait for them."""
AT_ONCE_OF_TENANT = 3
"""How many of them may be of one tenant: a compilation cannot be stopped, and some would not end within a minute."""
MAX_QUEUED = 256
"""The most grammars of one tenant that wait to be compiled."""
MAX_THREADS = 8
"""The most threads that compile one grammar."""
SPELLINGS: dict[GrammarKind, str] = {"json": "json", "json_schema": "json", "structural_tag": "tag"}
"""How tokens are spelled for a kind of grammar ("text" if not listed). Special tokens have no text, except that a
structural tag may name one; for "json" and "tag" tokens with CONTROL characters have none either."""
CONTROL = {"json": re.compile(rb"[\0-\t\x0b\x0c\x0e-\x1f]"), "tag": re.compile(rb"[\0-\x08\x0b\x0c\x0e-\x1f]")}
"""Control characters, which JSON requires to be escaped, but xgrammar's strings of bounded length allow. The free text
of a tag may hold tabs."""


@dataclass(slots=True, eq=False)
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
    ordinary: bool = False
    """See `structured.ordinary`. Set to False if a step shows that it is not."""

    @property
    def nbytes(self) -> int:
        return self.grammar.memory_size_bytes


@dataclass(frozen=True, slots=True)
class Spelled:
    """The tokens by a spelling (see SPELLINGS)."""

    name: str
    info: Any
    """xgrammar's TokenizerInfo."""
    ends: frozenset[int]
    silent: frozenset[int]
    spelling: Spelling | None
    """See Compiled."""


class BadGrammar(ValueError):
    """The grammar of a request is invalid or not supported."""


class Grammars:
    """Compiles the grammars of one model in threads, and caches those used last; tenants take turns, and share nothing
    but `json`, which has no content. `get`, `job` and `cancel` are for one thread only.

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
        self._jumps = jump_forward
        self._threads = FairThreads("grammar", AT_ONCE, AT_ONCE_OF_TENANT)
        self._known = GrammarCache(limit, lambda job: _size(job.future))
        self._making = threading.Lock()
        """Guards all below."""
        self._vocabulary: Vocabulary | None = None
        self._ends: frozenset[int] | None = None
        """`Compiled.ends`, shared by all grammars: it may have thousands of ids."""
        self._spelled: dict[str, Spelled] = {}
        self._compilers: OrderedDict[tuple[str, str], tuple[Any, Spelling | None]] = OrderedDict()
        """By tenant and spelling, the one used last at the end."""

    def get(self, grammar: Grammar, tenant: str = "") -> Future[Compiled]:
        """The compiled grammar; the future is done at once if it is cached. The future raises ValueError if there is no
        xgrammar or no tokenizer, and BadGrammar if the grammar cannot be compiled. Raises BadGrammar if too many of the
        tenant's grammars wait."""
        return self.job(grammar, tenant).future

    def job(self, grammar: Grammar, tenant: str = "") -> Job:
        """As `get`: the job that compiles the grammar."""
        key = _key(grammar, tenant)
        job = self._known.get(key)
        if job is None:
            if self._threads.queued(tenant) >= MAX_QUEUED:
                raise BadGrammar(f"grammar: {MAX_QUEUED} others of this tenant wait to be compiled, try again later")
            # The function is looked up when the job runs.
            job = self._threads.submit(tenant, lambda: self._compile(grammar, key[0]))
            self._known.add(key, job)
        return job

    def cancel(self, grammar: Grammar, tenant: str = "") -> None:
        """Nobody waits for a grammar any more: unless it is being compiled already, it is not going to be."""
        key = _key(grammar, tenant)
        job = self._known.get(key)
        if job is not None and self._threads.cancel(job):
            self._known.drop(key)

    @property
    def nbytes(self) -> int:
        """Memory of the cached grammars that are compiled, with their texts."""
        return self._known.nbytes

    def _compile(self, grammar: Grammar, tenant: str = "") -> Compiled:
        try:
            import xgrammar  # noqa: F401
        except ImportError as error:
            message = f"grammar: structured output needs xgrammar: pip install 'radixrt[grammar]' ({error})"
            raise ValueError(message) from error
        try:
            with self._making:
                spelled = self._spell(SPELLINGS.get(grammar.kind, "text"))
                compiler, spelling = self._compiler(spelled, tenant)
        except Exception as error:
            raise ValueError(f"grammar: {error}") from error
        try:
            text = compilable(grammar, any_space=not self._jumps)
            compiled = self._compile_text(grammar.kind, text, compiler, spelled)
            if spelling and not _forced_text_is_bounded(grammar.kind, text):
                spelling = None
            words, ordinary = -(-self._vocab_size // 32), is_ordinary(grammar)
            return Compiled(compiled, words, spelled.ends, self._eos_ids, spelled.silent, spelling, ordinary)
        except Inexact as problem:
            raise BadGrammar(f"grammar: the schema cannot be enforced: {problem}") from None
        except Exception as error:  # of many types, none of them promised
            raise BadGrammar(f"grammar: {explained(error)}") from error

    def _compile_text(self, kind: GrammarKind, text: str, compiler: Any, spelled: Spelled) -> Any:
        """Compile a grammar's text, without the compiler's cache if it fails and does not say why: with it, xgrammar
        0.2 fails for some repetitions of more than 128 times."""
        try:
            return _compile_by(compiler)[kind](text)
        except Exception as error:
            if plain(str(error)):
                raise
            return _compile_by(_new_compiler(spelled.info, 0))[kind](text)

    def _spell(self, name: str) -> Spelled:
        """The tokens by a spelling (see SPELLINGS), for all tenants."""
        import xgrammar

        if self._vocabulary is None:
            self._vocabulary = read_vocabulary(_folder(self._model), self._vocab_size)
        tokens = self._vocabulary.tokens
        if self._ends is None:
            self._ends = self._eos_ids.union(i for i, token in enumerate(tokens) if not token)
        if name not in self._spelled:
            special = self._vocabulary.special if name == "tag" else {}
            encoded = [b"" if i in self._eos_ids else special.get(i, token) for i, token in enumerate(tokens)]
            if name != "text":
                encoded = [b"" if CONTROL[name].search(token) else token for token in encoded]
            encoded += [b""] * (-len(encoded) % 32)  # otherwise mask bits beyond the vocabulary would be set
            info = xgrammar.TokenizerInfo(encoded, xgrammar.VocabType.RAW, stop_token_ids=sorted(self._eos_ids))
            forced = Spelling(encoded, self._vocabulary.encode) if self._jumps else None
            silent = frozenset(i for i, token in enumerate(encoded) if not token)
            self._spelled[name] = Spelled(name, info, self._ends, silent, forced)
        return self._spelled[name]

    def _compiler(self, spelled: Spelled, tenant: str) -> tuple[Any, Spelling | None]:
        """The compiler of a tenant, with its cache of rules that several grammars share, and the tokenizer of forced
        text, with its cache."""
        key = tenant, spelled.name
        if key not in self._compilers:
            if len(self._compilers) >= MAX_COMPILERS:
                self._compilers.popitem(last=False)
            spelling = spelled.spelling and spelled.spelling.with_own_cache()
            self._compilers[key] = _new_compiler(spelled.info, RULES_BYTES), spelling
        self._compilers.move_to_end(key)
        return self._compilers[key]


def _key(grammar: Grammar, tenant: str) -> Key:
    return ("" if grammar.kind == "json" else tenant), grammar


def _new_compiler(info: Any, cache_bytes: int) -> Any:
    """A compiler; without a cache if `cache_bytes` is 0."""
    import xgrammar

    threads = min(MAX_THREADS, max(1, (os.cpu_count() or 1) // 2))
    return xgrammar.GrammarCompiler(
        info, max_threads=threads, cache_enabled=cache_bytes > 0, cache_limit_bytes=cache_bytes or -1
    )


def _size(future: Future[Compiled]) -> int:
    """Bytes of a compiled grammar; 0 if it could not be compiled."""
    return future.result().nbytes if future.exception() is None else 0


def _folder(model: str) -> Path:
    if not model:
        raise ValueError("structured output needs the tokenizer's files, and this worker has no checkpoint")
    return find_files(model)


def _compile_by(compiler: Any) -> dict[GrammarKind, Callable[[str], Any]]:
    """How the text of `compilable` is compiled."""
    return {
        "json": lambda _: compiler.compile_json_schema("{}"),
        "json_schema": compiler.compile_grammar,
        "regex": compiler.compile_regex,
        "ebnf": compiler.compile_grammar,
        "structural_tag": compiler.compile_structural_tag,
    }


def _forced_text_is_bounded(kind: GrammarKind, text: str) -> bool:
    """Whether xgrammar can be asked which text the grammar forces: that text is bounded (see `is_bounded`)."""
    try:
        return is_bounded(_parsed(kind, text).serialize_json())
    except Exception:  # a tag that names a token is not parsed without the tokenizer
        return False


def _parsed(kind: GrammarKind, text: str) -> Any:
    """The text of `compilable` as an xgrammar Grammar, not compiled, with JSON on one line."""
    import xgrammar

    make = xgrammar.Grammar
    return {
        "json": lambda _: make.builtin_json_grammar(),
        "json_schema": make.from_ebnf,
        "regex": make.from_regex,
        "ebnf": make.from_ebnf,
        "structural_tag": make.from_structural_tag,
    }[kind](text)
