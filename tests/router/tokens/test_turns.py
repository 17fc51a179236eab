"""Long texts take turns with those of other tenants; what cannot fit is refused early; what does not end is ended."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
import unicodedata

import pytest
import tokenizers
from tokenizers import normalizers

from radixrt.messages import ChatPrompt, ErrorReason, Namespace, PartsPrompt, TextPrompt, TokenPrompt
from radixrt.tokens import Sessions, TextService, Tokenizer
from radixrt.tokens.backends import JsonBackend
from radixrt.tokens.bounds import COMPOSED, NO_BOUND
from radixrt.tokens.chat import ChatTemplates, Unbounded
from radixrt.tokens.errors import FieldError, Room
from radixrt.tokens.incremental import LONG_CHARS, STEP_CHARS
from radixrt.tokens.turns import LONG, Interrupted, Turns, finished

NS = Namespace("n")
COMPOSING = (
    range(0x3400),
    range(0xAC00, 0xAD00),
    range(0xF900, 0xFB50),
    range(0x11000, 0x11A00),
    range(0x1D150, 0x1D1C0),
)
COMPOSING += (range(0x2F800, 0x2FA20),)
"""All blocks of Unicode with characters that NFC or NFD changes, of Hangul only some."""
WORDS = "the quick brown fox jumps over a lazy dog and thinks about the question again".split()


def words(seed: int, chars: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choices(WORDS, k=chars // 4))[:chars]


@pytest.fixture
def service(made: Tokenizer):
    with TextService(made) as service:
        yield service


# ---------------------------------------------------------------- turns


def test_tenants_take_turns_and_jobs_of_a_tenant_too() -> None:
    ran: list[str] = []
    gate = threading.Event()

    def steps(name: str, count: int):
        for _ in range(count):
            ran.append(name)
            yield
        return name

    def closed():
        gate.wait(10)
        return "first"
        yield

    async def run() -> list[str]:
        turns = Turns(1)
        jobs = [asyncio.create_task(turns.run("x", closed()))]
        for tenant, name, count in (("a", "a1", 6), ("a", "a2", 2), ("a", "a3", 2), ("b", "b1", 2)):
            jobs.append(asyncio.create_task(turns.run(tenant, steps(name, count))))
        await asyncio.sleep(0)
        gate.set()
        try:
            return await asyncio.gather(*jobs)
        finally:
            turns.close()

    assert asyncio.run(run()) == ["first", "a1", "a2", "a3", "b1"]
    assert ran[:4] == ["a1", "b1", "a2", "b1"]
    assert ran.index("a3") < 6 and ran[-1] == "a1"


def test_a_long_step_leaves_the_threads_to_others() -> None:
    gate = threading.Event()

    def long():
        yield LONG
        gate.wait(10)
        return "long"

    def short():
        yield
        return "short"

    async def run() -> None:
        turns = Turns(1)
        jobs = [asyncio.create_task(turns.run("a", long())) for _ in range(3)]
        for tenant in "ab":
            assert await turns.run(tenant, short()) == "short"
        gate.set()
        assert await asyncio.gather(*jobs) == ["long"] * 3
        turns.close()

    asyncio.run(run())


def test_what_is_cancelled_leaves_the_queue_at_once() -> None:
    gate, ran = threading.Event(), []

    def steps(name: str):
        gate.wait(10)
        ran.append(name)
        return name
        yield

    async def run() -> None:
        turns = Turns(1)
        first = asyncio.create_task(turns.run("a", steps("first")))
        gone = [asyncio.create_task(turns.run("a", steps("gone"))) for _ in range(50)]
        last = asyncio.create_task(turns.run("a", steps("last")))
        while len(turns) < 51:
            await asyncio.sleep(0.001)
        for job in gone:
            job.cancel()
        await asyncio.wait(gone)
        assert len(turns) == 1
        gate.set()
        assert await asyncio.gather(first, last) == ["first", "last"]
        turns.close()

    asyncio.run(run())
    assert ran == ["first", "last"]


def test_a_step_that_does_not_end_is_interrupted() -> None:
    def endless():
        while True:
            try:
                sum(range(1000))
            except Exception:
                pass
        yield

    def fails():
        yield
        raise KeyError("x")

    async def run() -> None:
        turns = Turns(1, max_seconds=(0.05, 0.05))
        with pytest.raises(Interrupted, match="too much time") as caught:
            await turns.run("a", endless(), "messages")
        assert caught.value.field == "messages"
        with pytest.raises(KeyError):
            await turns.run("a", fails())
        turns.close()

    asyncio.run(run())


def test_closing_ends_threads_and_what_waits() -> None:
    before = threading.active_count()

    def steps():
        while True:
            time.sleep(0.001)
            yield

    async def run() -> None:
        turns = Turns(2)
        jobs = [asyncio.create_task(turns.run("a", steps())) for _ in range(5)]
        await asyncio.sleep(0.01)
        turns.close()
        await asyncio.wait(jobs, timeout=10)
        assert all(job.cancelled() for job in jobs)

    asyncio.run(run())
    assert threading.active_count() == before


# ---------------------------------------------------------------- encoding in steps


def test_steps_give_the_ids_of_the_whole(tokenizer: Tokenizer, texts: list[str]) -> None:
    rng = random.Random(5)
    for number in range(2):
        text = " ".join(rng.choices(texts, k=20)) + words(number, 2 * STEP_CHARS)
        whole = tokenizer._backend.encode(text, True)
        ids = finished(tokenizer.start(text, namespace=Namespace(f"{number}")).steps())
        assert memoryview(ids).cast("i").tolist() == whole
        for last in (1, 100, len(whole) - 1, len(whole), len(whole) + 5):
            found = finished(tokenizer.start(text, namespace=Namespace(f"{number} {last}")).last_steps(last))
            assert memoryview(found).cast("i").tolist()[-last:] == whole[-last:]


def test_steps_are_short(made: Tokenizer, monkeypatch) -> None:
    sizes, encode_many = [], made._backend.encode_many
    monkeypatch.setattr(
        made._backend, "encode_many", lambda texts: sizes.append(sum(map(len, texts))) or encode_many(texts)
    )
    pending = made.start(words(7, 10 * STEP_CHARS), namespace=Namespace("steps"))
    assert len([*iter(pending.steps())]) >= 10
    assert max(sizes) <= STEP_CHARS and sum(sizes) >= 10 * STEP_CHARS
    kinds = [*made.start("x" * (LONG_CHARS + 1), namespace=Namespace("steps")).steps()]
    assert LONG in kinds
    assert LONG in [*made.start("y" * (LONG_CHARS + 1), namespace=Namespace("steps")).last_steps(5)]


def test_a_short_prompt_does_not_wait_for_long_ones(service: TextService) -> None:
    """Of another tenant, nor of the same."""
    texts = [words(seed, 400_000) for seed in range(4)]

    async def run() -> None:
        long = [asyncio.create_task(service.encode(TextPrompt(text), Namespace("hostile"))) for text in texts]
        await asyncio.sleep(0)
        for tenant in ("victim", "hostile"):
            await service.encode(TextPrompt(words(99, 4_000)), Namespace(tenant))
        assert not any(job.done() for job in long)
        for job in long:
            job.cancel()
        await asyncio.wait(long)
        assert len(service._turns) == 0

    asyncio.run(run())


# ---------------------------------------------------------------- room


def too_long(error: FieldError) -> bool:
    return error.field == "prompt" and error.reason is ErrorReason.CONTEXT_LENGTH


@pytest.mark.parametrize("text", ["a" * 8_000_000, " " * 8_000_000, "the dog " * 1_000_000, "\u6771" * 3_000_000])
def test_what_cannot_fit_is_refused_before_it_is_encoded(service: TextService, monkeypatch, text: str) -> None:
    monkeypatch.setattr(service.tokenizer._backend, "encode_many", lambda _: pytest.fail("it is encoded"))
    room = Room(8192)
    for prompt in (TextPrompt(text), PartsPrompt([TextPrompt(text), TokenPrompt(b"\0" * 4)])):
        with pytest.raises(FieldError) as caught:
            asyncio.run(service.encode(prompt, NS, room))
        assert too_long(caught.value)
    for sessions in (None, Sessions(service.tokenizer)):
        chat = ChatPrompt([{"role": "user", "content": text}])
        with pytest.raises(FieldError) as caught:
            asyncio.run(service.encode_chat(sessions, NS, chat, room) if sessions else service.encode(chat, NS, room))
        assert too_long(caught.value)


def test_encoding_ends_when_there_is_no_more_room(service: TextService, monkeypatch) -> None:
    """Where the bound by the longest token is not enough."""
    encoded, encode_many = [], service.tokenizer._backend.encode_many
    monkeypatch.setattr(
        service.tokenizer._backend,
        "encode_many",
        lambda texts: encoded.append(sum(map(len, texts))) or encode_many(texts),
    )
    text, tokens = words(3, 400_000), service.tokenizer.encode(words(3, 400_000), namespace=Namespace("other"))
    limit = len(tokens) * 3 // 5
    assert service.tokenizer.least.of(text) < limit
    encoded.clear()
    with pytest.raises(FieldError) as caught:
        asyncio.run(service.encode(TextPrompt(text), NS, Room(limit)))
    assert too_long(caught.value) and sum(encoded) < 0.75 * len(text)
    for least, fits in ((0, True), (1, False)):
        room = Room(len(tokens), least)
        pending = service.tokenizer.start(text, namespace=Namespace(f"exact {least}"))
        ids = finished(pending.steps(room))  # a lower bound refuses nothing that fits; what remains is checked later
        assert len(ids) == 4 * len(tokens)
        assert fits or pytest.raises(FieldError, room.check, len(tokens))


def test_the_bound_is_below_the_number_of_tokens(tokenizer: Tokenizer, texts: list[str]) -> None:
    rng = random.Random(2)
    everything = list(range(tokenizer.vocab_size))
    longest = sorted(everything, key=lambda i: -len(tokenizer.token_bytes(i)))[:40]
    for text in (
        " " * 40_000, "\n" * 40_000, "=" * 40_000, "<|end|>" + " " * 40_000, "e\u0301" * 20_000,
        "\u1fbe\u0308\u0301" * 9_000,
        "".join(tokenizer.token_text(rng.choice(longest)) for _ in range(2_000)),
        " ".join(rng.choices(texts, k=60)),
    ):  # fmt: skip
        assert tokenizer.least.of(text) <= len(tokenizer._backend.encode(text, False))


def test_normalizers_and_greedy_tokens_lower_the_bound(made: Tokenizer) -> None:
    plain = tokenizers.Tokenizer.from_str(made._backend._tokenizer.to_str())
    least = JsonBackend(plain).least_tokens()
    assert least == made.least and least.of("a" * 40_000) == 40_000 // least.longest > 0
    plain.normalizer = normalizers.NFC()
    assert JsonBackend(plain).least_tokens().longest == COMPOSED * least.longest
    plain.normalizer = normalizers.NFKC()
    assert JsonBackend(plain).least_tokens() == NO_BOUND
    plain.normalizer = normalizers.NFC()
    plain.add_special_tokens([tokenizers.AddedToken("<|greedy|>", rstrip=True, normalized=False)])
    least = JsonBackend(plain).least_tokens()
    assert least.of("<|greedy|>" + " " * 400_000) == 0 < least.of("<|greedy|>" + "a" * 400_000)


def test_real_tokenizers_have_a_bound(checkpoints) -> None:
    assert not checkpoints.tokenizer("falcon-tokenizer").least.longest  # drops some control characters
    for name in ("gpt2", "phi-2", "phi-3-mini", "mistral-v1", "mistral-v3", "mistral-v7", "made"):
        assert checkpoints.tokenizer(name).least.longest > 0, name


def test_nfc_shortens_no_text_more_than_the_bound_says() -> None:
    sizes: dict[str, int] = {}
    for char in map(chr, itertools.chain(*COMPOSING)):
        plain = unicodedata.normalize("NFC", char)
        sizes[plain] = max(sizes.get(plain, 0), len(char.encode()))
    for char in sizes:
        parts = unicodedata.normalize("NFD", char)
        longest = sum(sizes.get(unicodedata.normalize("NFC", part), len(part.encode())) for part in parts)
        assert longest <= COMPOSED * len(char.encode())


# ---------------------------------------------------------------- who can tell what others sent


def test_what_one_tenant_sent_is_not_known_to_another(service: TextService) -> None:
    text, tokenizer = words(11, 20_000), service.tokenizer
    mine = Namespace("a", salt="salt")
    asyncio.run(service.encode(TextPrompt(text), mine))
    assert tokenizer.start(text, namespace=mine).unseen_chars == 0
    for other in (Namespace("b", "salt"), Namespace("a", salt="other"), Namespace("a"), Namespace()):
        assert tokenizer.start(text, namespace=other).unseen_chars >= len(text)


def test_texts_of_many_tenants_share_one_bounded_memory(made: Tokenizer) -> None:
    from radixrt.tokens.incremental import Incremental

    incremental = Incremental(made._backend.encode_many, made._backend.cuts(), max_tokens=20_000)
    small = words(1, 600)
    finished(incremental.start(small, namespace=Namespace("small")).steps())
    for number in range(8):
        text = words(number, 20_000)
        incremental.start(text, namespace=Namespace("large", salt=f"{number % 3}")).finish()
        assert incremental.num_tokens <= 20_000
    assert incremental.start(small, namespace=Namespace("small")).unseen_chars == 0
    for number in range(1000):
        incremental.start(f"{number}", namespace=Namespace(f"tenant {number}")).finish()
    assert incremental.num_tokens <= 20_000 and len(incremental._memory) <= 20_000 // 32
    incremental._shares.check()


# ---------------------------------------------------------------- decoding


def test_many_ids_are_decoded_in_steps(tokenizer: Tokenizer) -> None:
    rng = random.Random(4)
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(60_000)]
    data = b"".join(i.to_bytes(4, "little") for i in ids)
    with TextService(tokenizer) as service:
        for skip in (True, False):
            assert (
                asyncio.run(service.decode(data, skip)) == service.decode_now(data, skip) == tokenizer.decode(ids, skip)
            )
            if tokenizer.pieces(skip):
                assert len([*service._decode_steps(data, skip)]) >= 3


def test_without_a_table_only_so_many_ids_are_decoded_at_once(service: TextService, monkeypatch) -> None:
    monkeypatch.setattr(service.tokenizer, "pieces", lambda skip: None)
    monkeypatch.setattr("radixrt.tokens.text.MAX_WHOLE_IDS", 1000)
    assert service.decode_now(b"\x20\0\0\0" * 1000)
    with pytest.raises(FieldError, match="at most 1000 at once"):
        service.decode_now(b"\x20\0\0\0" * 1001)


# ---------------------------------------------------------------- templates

CHAT = ChatPrompt([{"role": "user", "content": "hi"}])
LOOP = "{%% for i in range(100000) %%}{%% for j in range(100000) %%}%s{%% endfor %%}{%% endfor %%}"


@pytest.mark.parametrize("source", [LOOP % "{{ i }} xxxxxxxxxxxx", LOOP % ""])
def test_a_template_without_end_is_not_loaded(source: str, monkeypatch) -> None:
    monkeypatch.setattr("radixrt.tokens.chat.PROBE_SECONDS", 0.1)
    with pytest.raises(ValueError, match="chat template 'default' does not come to an end for a short chat"):
        ChatTemplates({"default": source}, {}).check()


PADDED = ["'%9999999999d' % 1", "'%*d' % (9999999999, 1)", "'{:9999999999}'.format(1)", "'{:{}}'.format(1, 9999999999)"]
PADDED += ["'a'.ljust(9999999999)", "'a' | center(9999999999)", "[1] | tojson(indent=9999999999)"]
LARGE = ["'x' * 10000000000", "9 ** (9 ** 9)", "10000000000 * [1]", *PADDED]


@pytest.mark.parametrize("source", [f"{{{{ {one} }}}}" for one in LARGE])
def test_a_template_computes_nothing_large(source: str) -> None:
    with pytest.raises(FieldError, match="too large"):
        ChatTemplates({"default": source}, {}).render(CHAT)
    assert ChatTemplates({"default": "{{ 'ab' * 3 ~ 2 ** 10 }}"}, {}).render(CHAT) == "ababab1024"
    plain = """{{ '%% (2 * 3) %5d' % 7 ~ '{{"a": {:3}}}'.format(1) ~ 'b'.ljust(3) ~ ([1] | tojson(indent=1)) }}"""
    assert ChatTemplates({"default": plain}, {}).render(CHAT) == '% (2 * 3)     7{"a":   1}b  [\n 1\n]'


def test_a_template_that_is_nested_too_deeply_is_not_loaded() -> None:
    with pytest.raises(ValueError, match="chat template: it is nested too deeply"):
        ChatTemplates({"default": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"}, {})


def test_a_template_may_write_only_so_much_for_a_chat(monkeypatch) -> None:
    monkeypatch.setattr("radixrt.tokens.chat.MAX_CHARS", 10_000)
    source = "{% for m in messages %}{% for n in messages %}{{ n.content }}{% endfor %}{% endfor %}"
    templates = ChatTemplates({"default": source}, {})
    assert templates.render(ChatPrompt([{"role": "user", "content": "hi"}] * 20)) == "hi" * 400
    with pytest.raises(Unbounded, match="writes more than") as caught:
        templates.render(ChatPrompt([{"role": "user", "content": "hi"}] * 200))
    assert caught.value.field == "messages"


def test_a_template_may_take_only_so_much_time_for_a_chat(monkeypatch) -> None:
    monkeypatch.setattr("radixrt.tokens.chat.MAX_SECONDS", 0.02)
    source = "{% for m in messages %}{% for n in messages %}{{ '' }}{% endfor %}{% endfor %}"
    with pytest.raises(Unbounded, match=r"takes more than 0.02 s"):
        ChatTemplates({"default": source}, {}).render(ChatPrompt([{"role": "user", "content": "hi"}] * 1000))


def test_a_long_chat_is_rendered_in_steps(service: TextService) -> None:
    chat = ChatPrompt([{"role": "user", "content": f"number {n}"} for n in range(5000)])
    assert len([*service.tokenizer.chat_steps(chat)]) >= 20
    for sessions in (Sessions(service.tokenizer), None):
        if sessions:
            ids = asyncio.run(service.encode_chat(sessions, NS, chat)).ids
        else:
            ids = asyncio.run(service.encode(chat, NS))
        assert ids == service.tokenizer.encode_bytes(service.tokenizer.apply_chat(chat), False)
