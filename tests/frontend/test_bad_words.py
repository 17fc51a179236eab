"""bad_words and allowed_token_ids over HTTP, with a real model; and how words are spelled."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.frontend.generate.bad_words import spellings
from radixrt.frontend.server import FrontendThread
from radixrt.tokens import load_tokenizer
from tests.checkpoints import make_model, make_tokenizer

HELLO = [{"role": "user", "content": "What is in the table?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_tokenizer(tmp_path_factory.mktemp("words") / "m")
    make_model(folder, "llama", num_hidden_layers=2)
    return folder


@pytest.fixture(scope="module")
def client(folder) -> Iterator[openai.OpenAI]:
    worker = WorkerConfig(model=str(folder), device="cpu", max_total_tokens=4096, max_model_len=1024, cpu_threads=1)
    with LocalStack(StackConfig(resolve(RouterConfig(model=str(folder))), worker, FrontendConfig())) as stack:
        frontend = FrontendThread(resolve(FrontendConfig(model=str(folder), router=stack.address, port=0)))
        try:
            with openai.OpenAI(base_url=frontend.url + "/v1", api_key="-", max_retries=0) as client:
                yield client
        finally:
            frontend.stop()


def chat(client, **extra):
    asked = {"model": "m", "messages": HELLO, "max_tokens": 40, "temperature": 0}
    return client.chat.completions.create(**asked, extra_body={"ignore_eos": True, "return_token_ids": True} | extra)


def test_words_are_spelled_alone_and_after_a_space(folder):
    tokenizer = load_tokenizer(folder)
    found = spellings(tokenizer, ["quick", " quick", "fox"])
    assert tuple(tokenizer.encode("quick", False)) in found and tuple(tokenizer.encode(" fox", False)) in found
    assert len(set(found)) == len(found)
    for one in found:
        assert tokenizer.decode(list(one)).strip() in ("quick", "fox")


def test_a_bad_word_is_not_generated(client, folder):
    tokenizer = load_tokenizer(folder)
    plain = chat(client).choices[0].token_ids
    words = [tokenizer.decode(plain[at : at + 1]) for at in range(0, 12, 3)]
    words = [word for word in words if word.strip() and "\ufffd" not in word]
    banned = spellings(tokenizer, words)
    assert any(_holds(plain, one) for one in banned), "otherwise there is nothing to ban"
    found = chat(client, bad_words=words).choices[0].token_ids
    assert len(found) == 40 and not any(_holds(found, one) for one in banned)


def _holds(ids: list[int], part: tuple[int, ...]) -> bool:
    return any(tuple(ids[at : at + len(part)]) == part for at in range(len(ids)))


def test_only_allowed_tokens_are_generated(client):
    allowed = list(range(20, 40))
    assert set(chat(client, allowed_token_ids=allowed).choices[0].token_ids) <= set(allowed)
    answer = client.completions.create(
        model="m", prompt=[5, 6, 7], max_tokens=40, temperature=1.5, seed=1,
        extra_body={"allowed_token_ids": allowed, "return_token_ids": True},
    )  # fmt: skip
    assert 2 < len(set(answer.choices[0].token_ids)) and set(answer.choices[0].token_ids) <= set(allowed)


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [1 << 70]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5] * 70000}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x" * 200]}, "bad_words"),
        ({"bad_words": ["x"] * 600}, "bad_words"),
        ({"bad_words": [3]}, "bad_words[0]"),
    ],
)
def test_what_is_refused(client, extra, field):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **extra)
    assert caught.value.param == field


def test_null_and_no_words_ask_for_nothing(client):
    assert chat(client, allowed_token_ids=None, bad_words=[]).choices[0].token_ids == chat(client).choices[0].token_ids
