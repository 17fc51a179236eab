"""Incremental encoding: ids are those of a full encoding, always, and only new text is encoded."""

from __future__ import annotations

import gzip
import json
import random
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from radixrt.tokens import Tokenizer, cuts
from radixrt.tokens.backends import JsonBackend, SentencePieceBackend
from radixrt.tokens.chat import ChatTemplates
from radixrt.tokens.cuts import REGEXES, AddedToken, Cuts, proven_cuts, steps_of
from radixrt.tokens.incremental import Incremental
from tests.checkpoints import TRAINING_TEXT

REAL = ("mistral-v1", "mistral-v3", "mistral-v7", "phi-3-mini", "phi-2", "gpt2", "falcon-tokenizer", "t5-small")
NO_SPACES = ("sentencepiece-test",)
TRANSCRIPTS = ("tau_bench", "tau2_bench", "lmcache_agent_trace", "mint_bench", "swe_agent")

# ---------------------------------------------------------------- tokenizers of every kind, made here

BYTES = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
TRICKY = [
    tokenizers.AddedToken("<|end|>", rstrip=True, special=True, normalized=False),
    tokenizers.AddedToken("<|start|>", special=True, normalized=False),
    tokenizers.AddedToken("<mask>", lstrip=True, special=True, normalized=False),
    tokenizers.AddedToken("[[", normalized=False),
    tokenizers.AddedToken("[[[x", normalized=False),
    tokenizers.AddedToken("    ", normalized=False),
]


def split(regex: str, behavior: str = "isolated") -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(regex), behavior), *BYTES])


SPACE_NORMALIZERS = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
NORMALIZERS: dict[str, Any] = {"llama": SPACE_NORMALIZERS, "joining": SPACE_NORMALIZERS, "nfc": normalizers.NFC()}
PRE_TOKENIZERS: dict[str, Any] = {
    **{f"regex {i}": split(regex) for i, regex in enumerate(sorted(REGEXES))},
    "nfc": split(sorted(REGEXES)[0]),
    "prefix space": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "unknown regex": split(r"\w+ \w+|."),
    "metaspace words": pre_tokenizers.Metaspace(prepend_scheme="first", split=True),
    "metaspace whole": pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
    "unigram": pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
    "unigram words": pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    "llama": None,
    "joining": None,
}
MADE = tuple(PRE_TOKENIZERS)


@cache
def made_backend(name: str) -> JsonBackend:
    unigram = name.startswith("unigram")
    tokenizer = tokenizers.Tokenizer(models.Unigram() if unigram else models.BPE(unk_token="<unk>"))
    if name in NORMALIZERS:
        tokenizer.normalizer = NORMALIZERS[name]
    trainer = trainers.UnigramTrainer if unigram else trainers.BpeTrainer
    more: dict[str, Any] = {"unk_token": "<unk>"} if unigram else {"min_frequency": 1}
    if PRE_TOKENIZERS[name] is not None:
        tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]
    texts = TRAINING_TEXT
    if name in ("llama", "metaspace whole"):  # pieces that hold a space further in are what these do not have
        texts = [word for text in TRAINING_TEXT for word in text.split()] + list(cuts.VISIBLE)
    tokenizer.train_from_iterator(
        texts, trainer(vocab_size=600, special_tokens=["<unk>", "</s>"], show_progress=False, **more)
    )
    tokenizer.add_tokens(TRICKY)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return JsonBackend(tokenizer)


def made_tokenizer(name: str, memory_tokens: int = 100_000) -> Tokenizer:
    return Tokenizer(made_backend(name), ChatTemplates({}, {}), memory_tokens=memory_tokens)


# ---------------------------------------------------------------- wherever a text can be cut

FRAGMENTS = (
    *("word", "the question", "Zebra's", "keys: values", "don't", "I'll", "x", "42", "1234567", "3.14", "_id"),
    *(" ", "  ", "   ", "    ", "\n", "\n\n", "\r\n", "\t", " \n", "\u00a0", "\u2009", "\u2028", "\u3000", "\x1f"),
    *(".", ",", "!", '"', "'", "'s", "(", ")", "{", "}", "[", "]", "<", ">", "/", "\\", "~", "-", "|", "a", "K"),
    *(
        "é",
        "e\u0301",
        "\u0301",
        "\u200d",
        "日本語",
        "中",
        "🙂",
        "👍🏽",
        "ﬁ",
        "Å",
        "\u212b",
        "ſ",
        "\u2581",
        "\u2581x",
        "Ġ",
    ),
    *("<|end|>", "<|start|>", "<mask>", "[[", "[[[x", "<s>", "</s>", "<unk>", "[INST]", "[/INST]", "<|user|>"),
    *("<|endoftext|>", "<extra_id_1>", ">>TITLE<<", ">>", "<|im_start|>", "<|im_end|>", "<0x0A>", "\x00", "\ufeff"),
)
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(FRAGMENTS),
        st.builds(" {} ".format, st.sampled_from(FRAGMENTS)),
        st.builds("{} word {}".format, st.sampled_from(FRAGMENTS), st.sampled_from(FRAGMENTS)),
        st.text(max_size=3),
        st.text("ab Kx.\n", max_size=12),
    ),
    max_size=24,
).map("".join)


def cut_everywhere(patch: pytest.MonkeyPatch) -> None:
    for name, value in (("MIN_CHARS", 1), ("MAX_CHARS", 1), ("SPAN_CHARS", 12)):
        patch.setattr(cuts, name, value)


def check_everywhere(tokenizer: Tokenizer, examples: int, counts: bool) -> None:
    """Ids of texts that are cut at each place where they can be; with `counts`, there must be many such places."""
    encode, num_cuts = tokenizer._backend.encode, 0

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(TEXTS)
    def check(text: str) -> None:
        nonlocal num_cuts
        try:
            expected = encode(text, False)
        except (UnicodeEncodeError, TypeError):
            with pytest.raises(ValueError, match="UTF-8"):
                tokenizer.encode(text)
            return
        with pytest.MonkeyPatch.context() as patch:
            cut_everywhere(patch)
            num_cuts += len(tokenizer._incremental._cuts.parts(text)) - 1
            assert tokenizer.encode(text, False) == expected
            assert tokenizer.encode(text) == encode(text, True)

    check()
    assert num_cuts > examples // 2 or not counts


@pytest.mark.parametrize("name", MADE)
def test_made_tokenizers_may_be_cut(name: str) -> None:
    check_everywhere(made_tokenizer(name), 150, counts=name not in ("unknown regex", "unigram", "joining"))


@pytest.mark.parametrize("name", [*REAL, *NO_SPACES])
def test_real_tokenizers_may_be_cut(checkpoints, name: str) -> None:
    check_everywhere(checkpoints.tokenizer(name), 150, counts=name in REAL)


@pytest.mark.parametrize("legacy", [False, True])
def test_sentencepiece_with_tricky_tokens_may_be_cut(checkpoints, legacy: bool) -> None:
    model = (checkpoints.folder("mistral-v1") / "tokenizer.model").read_bytes()
    added = {40000: AddedToken("<|end|>", rstrip=True), 40001: AddedToken("<mask>", lstrip=True)}
    added |= {40002: AddedToken("<|start|>"), 40003: AddedToken("[[")}
    backend = SentencePieceBackend(model, added, legacy=legacy)
    check_everywhere(Tokenizer(backend, ChatTemplates({}, {})), 150, counts=True)


@pytest.mark.parametrize("more", [b"\x1a\x02\x20\x01", b"\x1a\x05\x12\x03map", b"\x12\x02\x18\x01"])
def test_sentencepiece_that_changes_white_space_is_not_cut_there(checkpoints, more: bytes) -> None:
    """Merged into the model: remove_extra_whitespaces, a map of characters, Unigram."""
    model = (checkpoints.folder("mistral-v1") / "tokenizer.model").read_bytes()
    assert len(SentencePieceBackend(model, {}).cuts().parts("kind of you " * 200)) > 1
    sp = object.__new__(SentencePieceBackend)
    sp.__dict__ = SentencePieceBackend(model, {}).__dict__ | {"_proto": model + more}
    assert len(sp.cuts().parts("kind of you " * 200)) == 1


def test_a_space_after_a_token_of_its_own_kind_is_no_cut(checkpoints) -> None:
    """ "x<|end|> word": phi-3 takes the space behind the token, and llama puts one there; a cut would lose that."""
    for backend in (made_backend("llama"), checkpoints.tokenizer("phi-3-mini")._backend):
        assert ">" not in backend.cuts()._any.pattern.split("]")[0]


def test_pieces_that_hold_a_space_forbid_a_cut() -> None:
    before = cuts.before_spaces_by_pieces(["a", "b", "c", "\u2581", "b\u2581", "xc \u2581"], None, None)
    assert before == "a"
    assert cuts.before_spaces_by_pieces(["a", "b"], None, None) == ""
    assert cuts.before_spaces_by_pieces(["a", "\u2581"], None, {"type": "Lowercase"}) == ""
    assert cuts.before_spaces_by_pieces(["a", "\u2581"], {"type": "Digits"}, None) == ""
    assert made_backend("joining").cuts().parts("the lazy dog, " * 100) == ["the lazy dog, " * 100]


@pytest.mark.parametrize(
    ("token", "spaces", "tokens"),
    [
        (AddedToken("<x>"), "a", 2),
        (AddedToken("<x>", rstrip=True), "a", 2),
        (AddedToken("<x>", lstrip=True), "a", 0),
        (AddedToken("<x>", single_word=True), "", 0),
        (AddedToken("<x>", normalized=True), "", 0),
        (AddedToken("x y"), "", 2),
        (AddedToken("word", lstrip=True), "", 1),
        (AddedToken("data"), "", 2),
        (AddedToken("a<"), "a", 1),
        (AddedToken("\n\n"), "a", 1),
    ],
)
def test_added_tokens_say_where_not_to_cut(token: AddedToken, spaces: str, tokens: int) -> None:
    added = [AddedToken("<s>"), token]
    found = proven_cuts(added, "ab", has_normalizer=True)
    with pytest.MonkeyPatch.context() as patch:
        cut_everywhere(patch)
        assert len(found.parts("aaa kkk")) - 1 == bool(spaces)
        assert sum(len(found.parts(f"\u00e9{t.content}")) > 1 for t in added) == tokens


def test_dropout_and_whole_words_forbid_cuts() -> None:
    text = "the lazy dog and the quick fox " * 100
    for change in ({"dropout": 0.1}, {"ignore_merges": True}):
        tokenizer = tokenizers.Tokenizer.from_str(made_backend("llama")._tokenizer.to_str())
        assert len(JsonBackend(tokenizer).cuts().parts(text)) > 1
        for name, value in change.items():
            setattr(tokenizer.model, name, value)
        assert JsonBackend(tokenizer).cuts().parts(text) == [text]


def test_steps_are_flattened() -> None:
    inner = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]}
    outer = {"type": "Sequence", "normalizers": [inner, {"type": "NFD"}]}
    assert [step["type"] for step in steps_of(outer, "normalizers")] == ["NFC", "Strip", "NFD"]
    assert steps_of(None, "normalizers") == []


def test_a_trie_finds_the_words() -> None:
    words = ["<a>", "<ab>", "<abc", "[x]", "<a", "(+)"]
    found = Cuts("", words)._any
    assert [m[0] for m in found.finditer("<abcd <ab> <ac [x](+)")] == ["<abc", "<ab>", "<a", "[x]", "(+)"]


# ---------------------------------------------------------------- transcripts


def _conversations(folder: Path) -> Iterator[str]:
    """Texts of the first conversations of each file, as lines of chat."""
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
            for _, line in zip(range(2), lines, strict=False):
                row = json.loads(line)
                messages = row.get("messages") or [{"role": "user", "content": row.get("input")}]
                yield "".join(f"<s><|user|>{m['role']}\n{m.get('content') or m}</s>\n" for m in messages)[:24_000]


@pytest.mark.parametrize("name", REAL)
def test_transcripts_grow_branch_and_are_edited(checkpoints, shared_data: Path, name: str) -> None:
    tokenizer, rng = checkpoints.tokenizer(name), random.Random(name)
    encode = tokenizer._backend.encode
    texts = [text for folder in TRANSCRIPTS for text in _conversations(shared_data / folder)]
    assert len(texts) >= 10
    for text in rng.sample(texts, 5):
        ends = sorted(rng.sample(range(len(text)), 2))
        middle = rng.randrange(ends[1])
        edited = text[:middle] + rng.choice([" ", "x", "\n\n", "🙂", "</s>"]) + text[middle + rng.randrange(30) :]
        for version in (text[: ends[0]], text[: ends[1]], text[: ends[0]] + " Kind of new, then.", text, edited):
            assert tokenizer.encode(version) == encode(version, True)


def test_only_new_text_is_encoded(made: Tokenizer, shared_data: Path) -> None:
    text = next(_conversations(shared_data / "swe_agent"))
    encoded: list[str] = []
    spy = recorder(made._backend, encoded)
    incremental = Incremental(spy, made._backend.cuts())
    incremental.encode(text)
    chars = sum(map(len, encoded))
    assert len(text) <= chars <= len(text) + 2 * len(encoded)
    del encoded[:]
    for version in (text, text[:9000], text + " One more message.", text[:5000] + " An edit. " + text[5000:]):
        assert incremental.encode(version) == whole(made, version)
    assert sum(map(len, encoded)) < 6 * cuts.MAX_CHARS
    work = incremental.start(text + " One more message.")
    assert work.unseen_chars == 0
    del encoded[:]
    assert work.finish() and not encoded


def recorder(backend: Any, seen: list[str]) -> Callable[[list[str]], list[list[int]]]:
    def encode_many(texts: list[str]) -> list[list[int]]:
        seen.extend(texts)
        return backend.encode_many(texts)

    return encode_many


def whole(tokenizer: Tokenizer, text: str) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in tokenizer._backend.encode(text, False))


# ---------------------------------------------------------------- memory


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(("the", "quick", "fox", "jumps", "zero", "over", "lazy", "dogs.")) for _ in range(count))


def counted(incremental: Incremental) -> int:
    return sum(max(128, len(ids), len(part)) for part, ids in kept(incremental)) // 4


def kept(incremental: Incremental) -> list[tuple[str, bytes]]:
    return [item for own in incremental._memory.values() for memory in own.values() for item in memory.items()]


def test_short_texts_are_few(made: Tokenizer) -> None:
    """However short they are, each costs memory of its own."""
    incremental = Incremental(made._backend.encode_many, made._backend.cuts(), max_tokens=320)
    for number in range(100):
        incremental.encode(f"{number}")
        incremental.encode(f"{number}")
        assert 0 < len(kept(incremental)) <= 10 and incremental.num_tokens == counted(incremental)
    assert incremental.start("99").unseen_chars == 0


def test_texts_of_few_ids_are_few() -> None:
    """What a tokenizer makes little or nothing of costs memory all the same."""
    incremental = Incremental(lambda texts: [[] for _ in texts], cuts.NO_CUTS, max_tokens=1000)
    for number in range(100):
        incremental.encode(f"{number}".zfill(1000))
    assert sum(len(part) for part, _ in kept(incremental)) <= 4000


def test_memory_is_bounded_and_the_latest_stay(made: Tokenizer) -> None:
    rng, encoded = random.Random(1), []
    incremental = Incremental(recorder(made._backend, encoded), made._backend.cuts(), max_tokens=8000)
    used, unused = words(rng, 1000), words(rng, 1000)
    incremental.encode(unused)
    incremental.encode(used)
    for _ in range(20):
        assert incremental.start(used).unseen_chars == 0
        text = words(rng, 500)
        assert incremental.encode(text) == whole(made, text)
        assert 0 < incremental.num_tokens <= 8000
        assert incremental.num_tokens == counted(incremental)
    assert incremental.start(unused).unseen_chars > 0


def test_a_text_longer_than_the_memory_is_right(made: Tokenizer) -> None:
    incremental = Incremental(made._backend.encode_many, made._backend.cuts(), max_tokens=100)
    text = words(random.Random(2), 20_000)
    for _ in range(2):
        assert incremental.encode(text) == whole(made, text)
        assert incremental.num_tokens <= 100


def test_threads_may_share_it(made: Tokenizer) -> None:
    incremental = Incremental(made._backend.encode_many, made._backend.cuts(), max_tokens=20_000)
    rng = random.Random(3)
    trunk = words(rng, 3000)
    texts = [trunk[: rng.randrange(len(trunk))] + words(rng, 300) for _ in range(12)] * 4
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(incremental.encode, texts))
    assert found == [whole(made, text) for text in texts]
    assert incremental.num_tokens == counted(incremental)


@pytest.mark.parametrize("name", ["nfc", "metaspace words", "unigram"])
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), grows=st.lists(st.booleans(), min_size=8, max_size=8))
@settings(max_examples=30, deadline=None)
def test_a_text_that_does_not_grow_is_known_whole(name: str, texts: list[str], grows: list[bool]) -> None:
    tokenizer = made_tokenizer(name)
    with pytest.MonkeyPatch.context() as patch:
        cut_everywhere(patch)
        for text, grow in zip(texts * 2, grows, strict=False):
            try:
                expected = array("i", tokenizer._backend.encode(text, False)).tobytes()
            except (UnicodeEncodeError, TypeError):
                continue
            assert tokenizer.start(text, add_special_tokens=False, grows=grow).finish() == expected
            if not grow:
                again = tokenizer.start(text, add_special_tokens=False, grows=False)
                assert again.unseen_chars == 0 and all(len(parts) == 1 for parts in again._pieces)
                assert again.finish() == expected
