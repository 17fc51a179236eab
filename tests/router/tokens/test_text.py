"""Prompts to ids and ids to text, as the router and the front ends use them."""

from __future__ import annotations

import asyncio
import random
import threading
from array import array

import pytest

from radixrt.config import RouterConfig
from radixrt.messages import ChatPrompt, Delta, PartsPrompt, Sampling, TextPrompt, TokenPrompt
from radixrt.tokens import OutputProcessor, TextService, Tokenizer
from radixrt.tokens.errors import FieldError
from radixrt.tokens.text import INLINE_CHARS


def ids_of(data: bytes) -> list[int]:
    return array("i", data).tolist()


def to_bytes(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


@pytest.fixture
def service(made: Tokenizer):
    with TextService(made) as service:
        yield service


def test_text_is_encoded_short_or_long(service: TextService, made: Tokenizer) -> None:
    async def encode() -> None:
        for text in ("a", "x" * INLINE_CHARS, "the question " * 500):
            assert ids_of(await service.encode(TextPrompt(text))) == made.encode(text)

    asyncio.run(encode())


def test_long_text_leaves_the_event_loop_alone(service: TextService, made: Tokenizer, monkeypatch) -> None:
    """Text that was not seen before does; a long one that was, and a little more, is not worth a thread."""
    threads = []
    encode_many = made._backend.encode_many

    def spy(texts: list[str]) -> list[list[int]]:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode_many(texts)

    monkeypatch.setattr(made._backend, "encode_many", spy)
    history, more = "what is quite new " * 5000, [{"role": "user", "content": "was new " * 40}] * 100

    async def encode() -> None:
        for prompt in (
            TextPrompt("not seen before"),
            TextPrompt(history),
            TextPrompt(history + "and more"),
            ChatPrompt([{"role": "user", "content": "chat"}]),
            ChatPrompt(more),
        ):
            await service.encode(prompt)

    asyncio.run(encode())
    assert threads == [True, False, True, True, False]


def test_close_ends_the_threads(made: Tokenizer) -> None:
    before = threading.active_count()
    with TextService(made, threads=3) as service:
        asyncio.run(service.encode(TextPrompt("a" * 10_000)))
        assert threading.active_count() > before
    assert threading.active_count() == before


def test_chat_is_its_template_without_added_specials(service: TextService, made: Tokenizer) -> None:
    ids = ids_of(service.encode_now(ChatPrompt([{"role": "user", "content": "hi"}])))
    assert made.decode(ids, False) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert [i for i in ids if i in made.special_ids] == [1, 2, 1]


def test_parts_keep_their_ids(checkpoints) -> None:
    """Only the first part gets BOS, generated ids stay, and text goes on without a space put before it."""
    for name in ("mistral-v3", "phi-3-mini", "made"):
        tokenizer = checkpoints.tokenizer(name)
        with TextService(tokenizer) as service:
            generated = tokenizer.encode_continuation("fox")[::-1]
            parts = [TextPrompt("The quick"), TokenPrompt(to_bytes(generated)), TextPrompt("ly "), TextPrompt("")]
            ids = ids_of(service.encode_now(PartsPrompt(parts)))
            first = tokenizer.encode("The quick")
            assert ids == first + generated + tokenizer.encode_continuation("ly ")
            assert tokenizer.decode(ids).endswith(tokenizer.decode(generated) + "ly ")
            assert tokenizer.bos_id is None or ids.count(tokenizer.bos_id) == first.count(tokenizer.bos_id)


def test_continuations_are_their_text(tokenizer: Tokenizer, texts: list[str]) -> None:
    if tokenizer.decode(tokenizer.encode("a\nb")) != "a\nb":
        pytest.skip("has no line feed: it normalizes white space, and a part of a text is a word to it")
    first = tokenizer.encode("start")
    for text in texts:
        both = tokenizer.decode(first + tokenizer.encode_continuation(text), False)
        alone = tokenizer.decode(first, False)
        assert both[: len(alone)] == alone
        assert both[len(alone) :].strip() == tokenizer.decode(tokenizer.encode(text, False), False).strip()
        if text[0] not in " \t\u2581" and tokenizer.encode("a", False) != tokenizer.encode(" a", False):
            assert both[len(alone)] == text[0]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (TextPrompt(""), "prompt"),
        (TextPrompt("lone \ud800 surrogate"), "prompt"),
        (TokenPrompt(b""), "prompt"),
        (TokenPrompt(b"\0\0\0"), "prompt"),
        (TokenPrompt(to_bytes([1, -1])), "prompt"),
        (TokenPrompt(to_bytes([1, 512])), "prompt"),
        (PartsPrompt([]), "prompt"),
        (PartsPrompt([TextPrompt("")]), "prompt"),
        (PartsPrompt([TextPrompt("a"), TokenPrompt(to_bytes([512]))]), "prompt"),
        (PartsPrompt([TextPrompt("a"), TextPrompt("\udfff")]), "prompt"),
        (ChatPrompt([]), "messages"),
        (ChatPrompt([{"role": "user", "content": "\ud800"}]), "messages"),
    ],
)
def test_bad_prompts_name_the_field(service: TextService, prompt, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        service.encode_now(prompt)
    assert caught.value.field == field


def test_a_choice_is_encoded_as_a_continuation(service: TextService, made: Tokenizer) -> None:
    assert ids_of(service.encode_part(TextPrompt(" yes"))) == made.encode(" yes", False)
    with pytest.raises(FieldError, match=r"choices\[1\] is empty"):
        service.encode_part(TextPrompt(""), "choices[1]")


def test_without_a_tokenizer_ids_pass_and_text_does_not() -> None:
    with TextService.load(RouterConfig(tokenizer="none")) as service:
        assert not service.has_tokenizer
        assert service.vocab_size == 0
        assert asyncio.run(service.encode(TokenPrompt(to_bytes([7, 1 << 30])))) == to_bytes([7, 1 << 30])
        for prompt in (TextPrompt("a"), ChatPrompt([{"role": "user", "content": "a"}]), PartsPrompt([TextPrompt("a")])):
            with pytest.raises(FieldError, match="no tokenizer"):
                service.encode_now(prompt)
        with pytest.raises(FieldError, match="no tokenizer"):
            asyncio.run(service.decode(to_bytes([1])))
        assert OutputProcessor(None, Sampling()).push([1, 2]) == ""
        with pytest.raises(FieldError) as caught:
            OutputProcessor(None, Sampling(stop=("x",)))
        assert caught.value.field == "stop"


def test_decode_is_the_text(service: TextService, made: Tokenizer) -> None:
    for text in ("héllo 🙂", "the question " * 300):
        assert asyncio.run(service.decode(to_bytes(made.encode(text)))) == text
    with pytest.raises(FieldError, match="outside"):
        service.decode_now(to_bytes([-5]))


def test_a_stream_takes_ids_or_bytes(service: TextService, made: Tokenizer) -> None:
    ids = made.encode("Größe 🙂<|im_end|>")
    for skip, text in ((True, "Größe 🙂"), (False, "Größe 🙂<|im_end|>")):
        one, other = (OutputProcessor(made, Sampling(skip_special_tokens=skip)) for _ in range(2))
        assert "".join(one.push([i]) for i in ids) + one.flush() == text
        assert other.push(to_bytes(ids)) == text


def test_a_stop_string_spans_tokens(tokenizer: Tokenizer, texts: list[str]) -> None:
    """Cut out of the text itself, a stop ends it just there, whatever the tokens are."""
    rng = random.Random(4)
    for text in texts[9:]:
        ids = tokenizer.encode(text, False)
        whole = tokenizer.decode(ids)
        at = rng.randrange(len(whole) // 2, len(whole) - 10)
        stop = whole[at : at + rng.randint(1, 9)]
        stream = OutputProcessor(tokenizer, Sampling(stop=(stop, "never to be seen")))
        parts = []
        for token in ids:
            parts.append(stream.push([token]))
            if stream.stop:
                break
        assert "".join(parts) == whole[: whole.index(stop)]
        assert stream.stop == stop


@pytest.mark.parametrize("ends", [False, True])
def test_tokens_past_a_stop_string_are_counted(made: Tokenizer, ends: bool) -> None:
    """However many tokens come at once, with the token that ends the answer or without."""
    text = "the quick dog thinks about the question again and then it jumps"
    ids, eos = made.encode(text, False), 2
    one, taken = OutputProcessor(made, Sampling(stop=("about th",))), 0
    while one.stop is None:
        one.take(Delta(1, 0, to_bytes(ids[taken : taken + 1])))
        taken += 1
        assert one.past == 0
    assert 2 < taken < len(ids) - 3
    for cut in (2, 3, 5, 7, len(ids) + 1):
        stream, past, said = OutputProcessor(made, Sampling(stop=("about th",))), 0, ""
        whole = [*ids, eos] if ends else ids
        for at in range(0, len(whole), cut):
            last = at + cut >= len(whole)
            part = to_bytes(whole[at : at + cut])
            said += stream.take(Delta(1, 0, part, finish="stop" if last else None, stop=eos if last and ends else None))
            past += stream.past
        assert said == "the quick dog thinks " and stream.stop and past == len(whole) - taken


def test_a_stop_may_come_with_the_flush(checkpoints) -> None:
    tokenizer = checkpoints.tokenizer("phi-3-mini")
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in b"ab\nc"]
    stream = OutputProcessor(tokenizer, Sampling(stop=("\n",)))
    assert stream.push(ids) == "" and not stream.stop
    assert stream.flush() == "ab"
    assert stream.stop == "\n"
