"""tokenizer.json and tokenizer_config.json of a GGUF file, which encode as llama.cpp does.

`tokenizer.ggml.model` is `gpt2`, byte-level BPE, whose words are split by the regular expressions that
`tokenizer.ggml.pre` names; or `llama`, a BPE of SentencePiece, which has no merges but a score for each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from radixrt.checkpoint.gguf.file import GgufFile
from radixrt.checkpoint.vocabularies import CASED_WORDS, GPT2_WORDS, SHORT_FORMS, SPACE, WORDS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens."""
HIDDEN = (UNKNOWN, CONTROL)
RESERVED = (UNKNOWN, CONTROL, BYTE)
"""Tokens that are not made of text."""

DIGIT, DIGITS = r"\p{N}", r"\p{N}{1,3}"
LLAMA3 = (WORDS % "{1,3}",)
SPLITS: dict[str, tuple[str, ...]] = {
    "": (r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGIT),
    "deepseek-v3": (
        DIGITS,
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
"""`tokenizer.ggml.pre` -> regular expressions, each of which splits what those before it left whole."""
SPLITS["default"] = SPLITS[""]
SPLITS |= dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), LLAMA3)
SPLITS |= dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), LLAMA3)
SPLITS |= dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), (WORDS % "",))
SPLITS |= dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "trillion"), (GPT2_WORDS,))
SPLITS |= dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (DIGIT, GPT2_WORDS))
SPLITS |= {"tekken": (CASED_WORDS % ("", "", ""),)}
SPLITS |= dict.fromkeys(("gpt-4o", "llama4"), (CASED_WORDS % (SHORT_FORMS + "?", SHORT_FORMS + "?", "{1,3}"),))

WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "tekken", "glm4")
"""Those with which a word that is a token is that token, whatever merges would make of it."""
WITH_BOS = WHOLE_WORDS[:-1]
"""Those that begin texts with BOS if the file does not say whether."""
ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
"""Tokens that end an answer, whether or not the file names them as EOS."""
DEFAULT_IDS = {"bos": 1, "eos": 2, "unk": 0}
"""Ids of SentencePiece models that the file does not name."""
ID_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
PHI3_BARE = ("<unk>", "<s>", "<|endoftext|>")
"""Tokens of Phi 3 that, unlike its others, leave the white space after them."""


def named_ids(file: GgufFile) -> dict[str, int]:
    """Ids of `bos`, `eos`, `unk` and `pad`, those that there are."""
    count = len(_tokens(file))
    defaults = DEFAULT_IDS if _kind(file) == "llama" else {}
    ids = {name: _value(file, f"{key}_token_id", defaults.get(name)) for name, key in ID_NAMES.items()}
    return {name: id for name, id in ids.items() if isinstance(id, int) and 0 <= id < count}


def end_ids(file: GgufFile) -> list[int]:
    """Ids that end an answer."""
    tokens, types = _tokens(file), _types(file)
    named = [_value(file, f"{name}_token_id") for name in ("eot", "eom")]
    found = [id for id in (named_ids(file).get("eos"), *named) if isinstance(id, int) and 0 <= id < len(tokens)]
    found += [id for id, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED) and tokens[id] in ENDS]
    return sorted(set(found))


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """The names of special tokens, whether BOS and EOS are added, and the chat templates."""
    tokens, pre = _tokens(file), _value(file, "pre", "")
    names = {f"{name}_token": tokens[id] for name, id in named_ids(file).items()}
    adds = {"bos": _kind(file) == "llama" or pre in WITH_BOS, "eos": False}
    flags = {f"add_{name}_token": bool(_value(file, f"add_{name}_token", default)) for name, default in adds.items()}
    return names | flags | _templates(file)


def _templates(file: GgufFile) -> dict[str, Any]:
    key = "tokenizer.chat_template"
    found = {"default": file.metadata.get(key)}
    found |= {name: file.metadata.get(f"{key}.{name}") for name in file.metadata.get(f"{key}s") or ()}
    templates = {name: text for name, text in found.items() if isinstance(text, str) and text}
    if set(templates) <= {"default"}:
        return {"chat_template": templates["default"]} if templates else {}
    return {"chat_template": [{"name": name, "template": text} for name, text in templates.items()]}


def tokenizer_json(file: GgufFile) -> dict[str, Any]:
    """The tokenizer, without BOS and EOS around texts. ValueError names a kind that is not known."""
    match _kind(file):
        case "gpt2":
            stages = _byte_level(file)
        case "llama":
            stages = _sentencepiece(file)
        case kind:
            raise ValueError(f"{file.path}: a tokenizer of the kind {kind!r} is not served; gpt2 and llama are")
    return {"version": "1.0", "truncation": None, "padding": None, "post_processor": None} | stages


def _byte_level(file: GgufFile) -> dict[str, Any]:
    tokens, pre = _tokens(file), _value(file, "pre", "")
    if pre not in SPLITS:
        raise ValueError(f"{file.path}: the pre-tokenizer {pre!r} is not known; {', '.join(filter(None, SPLITS))} are")
    merges = _value(file, "merges")
    if not isinstance(merges, list):
        raise ValueError(f"{file.path} has no tokenizer.ggml.merges")
    known = [(token, id) for id, (token, kind) in enumerate(zip(tokens, _types(file), strict=True)) if kind != UNUSED]
    steps = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in SPLITS[pre]
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pairs = [_pair(merge) for merge in merges]
    return {
        "added_tokens": _added_tokens(file),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, level]},
        "decoder": level,
        "model": _bpe(dict(known), pairs, ignore_merges=pre in WHOLE_WORDS),
    }


def _pair(merge: str) -> list[str]:
    """The two parts, the first of which may begin with a space."""
    at = merge.index(" ", 1)
    return [merge[:at], merge[at + 1 :]]


def _sentencepiece(file: GgufFile) -> dict[str, Any]:
    tokens, types, scores = _tokens(file), _types(file), _value(file, "scores")
    if not isinstance(scores, list) or len(scores) < len(tokens):
        raise ValueError(f"{file.path} has no tokenizer.ggml.scores for its tokens")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    prefix = bool(_value(file, "add_space_prefix", True))
    steps = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    decoder: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    decoder += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    decoder += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = named_ids(file).get("unk")
    return {
        "added_tokens": _added_tokens(file),
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*steps, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}],
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoder},
        "model": _bpe(
            vocabulary,
            [list(pair) for pair in _merges(tokens, types, scores)],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in types,
        ),
    }


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """All pairs of tokens whose concatenation is a token, those with the highest score first: SentencePiece joins the
    neighbours that give the token with the highest score."""
    made = {token: id for id, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind not in RESERVED}
    for token in sorted(made, key=lambda token: -scores[made[token]]):
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in made and second in made:
                yield first, second


def _bpe(vocabulary: dict[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
    }
    plain |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE"} | plain | options | {"vocab": vocabulary, "merges": merges}


def _added_tokens(file: GgufFile) -> list[dict[str, Any]]:
    """Tokens that are found in a text before anything else."""
    strips = file.architecture == "phi3" and _kind(file) == "llama"
    return [
        {
            "id": id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and token not in PHI3_BARE,
            "normalized": False,
            "special": kind in HIDDEN or token in ENDS,
        }
        for id, (token, kind) in enumerate(zip(_tokens(file), _types(file), strict=True))
        if kind in (*HIDDEN, USER_DEFINED)
    ]


def _kind(file: GgufFile) -> str:
    return str(_value(file, "model", ""))


def _tokens(file: GgufFile) -> list[str]:
    tokens = _value(file, "tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError(f"{file.path} has no tokenizer.ggml.tokens")
    return tokens


def _types(file: GgufFile) -> list[int]:
    """The type of each token; all are normal if the file has no types."""
    count = len(_tokens(file))
    types = _value(file, "token_type")
    return types[:count] if isinstance(types, list) and len(types) >= count else [NORMAL] * count


def _value(file: GgufFile, name: str, default: Any = None) -> Any:
    return file.metadata.get(f"tokenizer.ggml.{name}", default)
