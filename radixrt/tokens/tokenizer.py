"""A checkpoint's tokenizer: text to ids and back, special tokens, chat template."""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import tokenizers

from radixrt.checkpoint.files import SENTENCEPIECE_FILES, SPECIAL_NAMES, read_file
from radixrt.checkpoint.hub import find_files
from radixrt.messages import NO_TENANT, ChatPrompt, Namespace
from radixrt.tokens.backends import Backend, JsonBackend, load_sentencepiece
from radixrt.tokens.chat import ChatTemplates, read_templates
from radixrt.tokens.cuts import NO_CUTS, AddedToken
from radixrt.tokens.errors import Room
from radixrt.tokens.incremental import MEMORY_TOKENS, Incremental, PendingText
from radixrt.tokens.pieces import Pieces, verified
from radixrt.tokens.special_text import ESCAPE, Escaper, unescaped
from radixrt.tokens.turns import Steps

LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
LINE = "\n"
VOCABULARIES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json", "merges.txt")
"""Patterns of the files that transformers may make a tokenizer of."""
INSTEAD = "; --tokenizer FOLDER takes that of another model, --tokenizer none serves token ids only"


class Tokenizer:
    """Thread safe. Token ids are ints in [0, vocab_size).

    bos_id: id that starts a sequence, or None. eos_ids: ids that end one, from tokenizer_config.json,
    generation_config.json and config.json together. vocab_size: the largest id plus one.
    model_vocab_size: rows of the model's embedding (padded, often larger), as far as config.json says.
    memory_tokens: how many ids of encoded texts are cached, so that only new text is encoded.
    generation: the content of generation_config.json. least: a lower bound of the number of tokens of a text.
    """

    def __init__(
        self,
        backend: Backend,
        templates: ChatTemplates,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        model_vocab_size: int = 0,
        memory_tokens: int = MEMORY_TOKENS,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        self._backend = backend
        self._encode_escaped = backend.escaped_encoder(templates.escaper.tokens) if templates.escaper else None
        self._templates = templates
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.generation = dict(generation or {})
        self.vocab_size = backend.size
        self.model_vocab_size = max(model_vocab_size, backend.size)
        self.special_ids = backend.specials
        self.token_id = backend.token_id
        self.is_byte = backend.is_byte
        self._shown = self._verified(backend.pieces(), skip=False)
        self._hidden = self._verified(self._shown and self._shown.without(backend.specials), skip=True)
        self._incremental = Incremental(self._encode_many, backend.cuts(), memory_tokens)
        self.least = backend.least_tokens()
        self._around = self._find_around()
        self._whole = Incremental(self._encode_whole, NO_CUTS, memory_tokens // 4) if self._around is None else None
        self._line_ids = self._find_line_ids()

    def encode(self, text: str, add_special_tokens: bool = True, namespace: Namespace = NO_TENANT) -> list[int]:
        """Ids of `text`; special tokens in it are recognized. `add_special_tokens` adds BOS or EOS if the model expects
        them. Raises ValueError if the text is not valid Unicode (a lone surrogate)."""
        ids = self.start(text, add_special_tokens, namespace=namespace).finish()
        return memoryview(ids).cast("i").tolist()

    def encode_bytes(self, text: str, add_special_tokens: bool = True) -> bytes:
        """`encode` as int32 bytes."""
        return self.start(text, add_special_tokens).finish()

    def forget(self, is_meant: Callable[[str], bool]) -> None:
        """Forget the ids of all texts of the tenants that are meant."""
        self._incremental.forget(is_meant)
        if self._whole is not None:
            self._whole.forget(is_meant)

    def start(
        self, text: str, add_special_tokens: bool = True, *, grows: bool = True, namespace: Namespace = NO_TENANT
    ) -> PendingText:
        """Begin `encode_bytes`: look up what was encoded before in the namespace. The rest may be done in a thread.
        `grows`: see `Incremental.start`."""
        if not add_special_tokens:
            return self._incremental.start(text, grows=grows, namespace=namespace)
        if self._whole:
            return self._whole.start(text, namespace=namespace)
        before, behind = self._around or (b"", b"")
        return self._incremental.start(text, before, behind, namespace=namespace)

    def check_room(self, text: str, room: Room | None) -> None:
        """Raise FieldError if a text cannot have so few tokens that it fits: found without encoding it."""
        if room is not None and (least := self.least.of(unescaped(text))):
            room.check(least, whole=False)

    def _encode_many(self, texts: list[str]) -> list[list[int]]:
        try:
            encode, escaped = self._backend.encode_many, self._encode_escaped
            if escaped is None or not any(ESCAPE in text for text in texts):
                return encode(texts)
            return [escaped(text) if ESCAPE in text else encode([text])[0] for text in texts]
        except (UnicodeEncodeError, TypeError) as error:
            raise ValueError(f"text cannot be encoded as UTF-8: {error}") from error

    def _encode_whole(self, texts: list[str]) -> list[list[int]]:
        try:
            return [self._backend.encode(text, True) for text in texts]
        except (UnicodeEncodeError, TypeError) as error:
            raise ValueError(f"text cannot be encoded as UTF-8: {error}") from error

    def _find_around(self) -> tuple[bytes, bytes] | None:
        """The ids that `add_special_tokens` adds before and after a text; None if they are not always the same."""
        encode = self._backend.encode
        bare, whole = encode("a", False), encode("a", True)
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        before, behind = whole[:at], whole[at + len(bare) :]
        if any(encode(text, True) != [*before, *encode(text, False), *behind] for text in ("", "a", "b c")):
            return None
        return array("i", before).tobytes(), array("i", behind).tobytes()

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of text that continues other text: without special tokens, and without the space that some tokenizers add
        at the start of a text."""
        return memoryview(self.start_after(text).finish()).cast("i").tolist()

    def start_after(
        self, text: str, token: int | None = None, *, grows: bool = True, namespace: Namespace = NO_TENANT
    ) -> PendingText:
        """Begin to encode text that continues other text. `token`: the last token of that, if it is an added one."""
        lead, ids = (LINE if self._line_ids else "", self._line_ids)
        if token is not None:
            lead, ids = self.token_text(token), [token]
        return self._incremental.start_after(lead, ids, text, grows=grows, namespace=namespace)

    def puts_space_after(self, token: int) -> bool:
        """Whether text right after an added token is encoded with a space in front."""
        return b"".join(map(self.token_bytes, memoryview(self.start_after("a", token).finish()).cast("i"))) == b" a"

    def _find_line_ids(self) -> list[int]:
        """The ids of LINE if "a" would be encoded as " a". A line feed is a token that never merges with others."""
        adds_space = b"".join(map(self.token_bytes, self.encode("a", False))) == b" a"
        return self.encode(LINE, False) if adds_space else []

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids without a token add nothing, invalid UTF-8 becomes U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for inside a text (a leading space is kept)."""
        if self._shown is not None:
            return self._shown.bytes_of(token)
        return self.decode([token], skip_special_tokens=False).encode()

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that differ between vocabularies: token ids that were kept are not used with another one."""
        known = blake2b(digest_size=16)
        for token in range(self.vocab_size):
            text = self.token_bytes(token)
            known.update(b"%d %d " % (len(text), token in self.special_ids) + text)
        return known.digest()

    def token_text(self, token: int) -> str:
        """`token_bytes` as text, with U+FFFD for incomplete characters."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def apply_chat(self, prompt: ChatPrompt, answer_next: bool = True) -> str:
        """Render a prompt with the chat template; encode the text with add_special_tokens=False. Raises FieldError on
        bad input. Without `answer_next` it ends with the last message, not where an answer begins."""
        return self._templates.render(prompt, answer_next)

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template itself shows tools; otherwise they are told in the system message."""
        return self._templates.shows_tools()

    def escaped_answer(self, text: str) -> str:
        """What the assistant said, as `apply_chat` writes it: special tokens in it are escaped (`special_text.py`)."""
        return self._templates.escaper.own_text(text) if self._templates.escaper else text

    def chat_steps(self, prompt: ChatPrompt) -> Steps[str]:
        """`apply_chat` in steps."""
        return self._templates.steps(prompt)

    def pieces(self, skip_special_tokens: bool) -> Pieces | None:
        """The table for incremental decoding; None if it does not agree with `decode`."""
        return self._hidden if skip_special_tokens else self._shown

    def _verified(self, pieces: Pieces | None, skip: bool) -> Pieces | None:
        if pieces is None:
            return None
        right = verified(pieces, lambda ids: self.decode(ids, skip), self.vocab_size, self.special_ids)
        return pieces if right else None


# ---------------------------------------------------------------- loading


def load_tokenizer(folder: str | Path, chat_template_file: str = "", *, split_special_tokens: bool = True) -> Tokenizer:
    """Load from a checkpoint folder, GGUF file or hub name: `tokenizer.json`, else a SentencePiece model, else whatever
    transformers can load (imported only then). `chat_template_file` replaces the checkpoint's chat template. With
    `split_special_tokens` the text of special tokens in messages is encoded as text (`special_text.py`). Raises
    ValueError if there is no tokenizer or a file is invalid."""
    folder = find_files(folder)
    config = read_file(folder / "tokenizer_config.json")
    special = read_file(folder / "special_tokens_map.json")
    # A configuration that declares its tokens is newer than special_tokens_map.json.
    named = _named_tokens(*((config, special) if "added_tokens_decoder" in config else (special, config)))
    backend = _load_backend(folder, config, named, _extra_tokens(config, special))
    model = read_file(folder / "config.json")
    generation = read_file(folder / "generation_config.json")
    text_model = model.get("text_config") or {}
    eos = [config.get("eos_token_id") for config in (generation, model, text_model)]
    eos.append(backend.token_id(named.get("eos_token", "")))
    sources = read_templates(folder, config, chat_template_file)
    escaper = Escaper(backend.added(), sources.values()) if split_special_tokens and sources else None
    templates = ChatTemplates(sources, named, escaper)
    templates.check()
    return Tokenizer(
        backend,
        templates,
        bos_id=backend.token_id(named.get("bos_token", "")),
        eos_ids=[i for value in eos for i in _ids(value)],
        model_vocab_size=model.get("vocab_size") or text_model.get("vocab_size") or 0,
        generation=generation,
    )


def _load_backend(folder: Path, config: Mapping[str, Any], named: dict[str, str], extra: list[AddedToken]) -> Backend:
    path = folder / "tokenizer.json"
    if path.is_file():
        return _load_json(path, config, named, extra)
    for pattern in SENTENCEPIECE_FILES:
        for path in sorted(folder.glob(pattern)):
            backend = load_sentencepiece(path, config, _added_tokens(folder, config))
            _name_sentencepiece_tokens(backend, named)
            return backend
    return _load_by_transformers(folder, named)


def _load_json(path: Path, config: Mapping[str, Any], named: Mapping[str, str], extra: list[AddedToken]) -> JsonBackend:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any broken file
        raise ValueError(f"{path} cannot be read: {error}") from error
    tokenizer.add_tokens([_added(token) for _, token in sorted(_declared_tokens(config).items())])
    shown = {t.content for t in tokenizer.get_added_tokens_decoder().values() if not t.special}
    hidden = [token for token in named.values() if token in shown or tokenizer.token_to_id(token) is None]
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in dict.fromkeys(hidden)])
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    tokenizer.add_special_tokens([_added(token) for token in extra if token.content not in known])
    # Llama's class follows add_bos_token whatever tokenizer.json says; DeepSeek's distilled models rely on that.
    is_llama = str(config.get("tokenizer_class")) in LLAMA_CLASSES and config.get("add_bos_token")
    if tokenizer.post_processor is None or (is_llama and not tokenizer.num_special_tokens_to_add(False)):
        _add_bos_and_eos(tokenizer, config, named)
    return JsonBackend(tokenizer)


def _added(token: AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _add_bos_and_eos(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Follow `add_bos_token` and `add_eos_token`."""
    bos = named.get("bos_token") if config.get("add_bos_token") else None
    eos = named.get("eos_token") if config.get("add_eos_token") else None
    if bos or eos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=[token for token in (bos, "$A", eos) if token],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in {bos, eos} if token],
        )


def _load_by_transformers(folder: Path, named: dict[str, str]) -> JsonBackend:
    """vocab.json and merges.txt, vocab.txt, ...: converted by transformers, seconds of import."""
    if not any((folder / name).is_file() for name in ("config.json", "tokenizer_config.json")):
        # What transformers says of the wrong folder would mislead.
        raise ValueError(f"{folder} is not the folder of a checkpoint: it has no config.json")
    if not any(next(folder.glob(pattern), None) for pattern in VOCABULARIES):
        raise ValueError(f"{folder} holds no tokenizer that can be read: there is no tokenizer.json{INSTEAD}")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # incomplete files, missing packages, code that is not run, and so on
        why = " ".join(str(error).split())[:300]
        raise ValueError(f"{folder} holds no tokenizer that can be read: {why}{INSTEAD}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{folder}: {type(tokenizer).__name__} cannot be expressed as a tokenizer.json")
    named.update({name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)})
    return JsonBackend(backend)


# ---------------------------------------------------------------- the JSON files beside it


def _named_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and the like, by name; each is a string or an object with `content`. The first config that has one
    counts."""
    named = {}
    for config in reversed(configs):
        for name in SPECIAL_NAMES:
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if token:
                named[name] = token
    return named


def _name_sentencepiece_tokens(backend: Backend, named: dict[str, str]) -> None:
    for name, token in (("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>")):
        if name not in named and backend.token_id(token) is not None:
            named[name] = token


def _declared_tokens(config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """`added_tokens_decoder` of tokenizer_config.json."""
    return {int(i): _added_token(token) for i, token in (config.get("added_tokens_decoder") or {}).items()}


def _extra_tokens(*configs: Mapping[str, Any]) -> list[AddedToken]:
    """Special tokens without one of the SPECIAL_NAMES; configs have lists of strings or objects, or objects by name."""
    found: list[Any] = []
    for config in configs:
        for key in ("additional_special_tokens", "extra_special_tokens"):
            tokens = config.get(key) or []
            found += tokens.values() if isinstance(tokens, dict) else tokens
    return [_added_token({"content": token} if isinstance(token, str) else token, special=True) for token in found]


def _added_token(token: Mapping[str, Any], special: bool = False) -> AddedToken:
    flags = (bool(token.get(name)) for name in ("lstrip", "rstrip", "single_word", "normalized"))
    return AddedToken(token["content"], special or token.get("special", False), *flags)


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Added tokens of a SentencePiece model: from added_tokens.json, and from tokenizer_config.json, which has more
    details."""
    listed = {i: AddedToken(token, special=False) for token, i in read_file(folder / "added_tokens.json").items()}
    declared = _declared_tokens(config).items()  # always found in the unnormalized text
    return listed | {i: dataclasses.replace(token, normalized=False) for i, token in declared}


def _ids(value: int | list[int] | None) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]
