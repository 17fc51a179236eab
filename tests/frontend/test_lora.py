"""LoRA adapters as models for clients, of every API, with a real worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest
import torch

from radixrt.client import AsyncClient, Client, ServerError
from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.frontend.server import FrontendThread
from radixrt.lang import Branch, ProgramError, assistant, gen, program, select, user
from radixrt.messages import Sampling
from tests.adapters import make_adapter, merged
from tests.checkpoints import make_model, make_tokenizer
from tests.worker.engine import prompts

NAMES = "sql", "support"
ALIAS = "gpt-9"
HELLO = [{"role": "user", "content": "What is in the table?"}]
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """A stack of two workers with two adapters, and the models that these amount to."""
    root = tmp_path_factory.mktemp("lora")
    folder = make_tokenizer(root / "m")
    models = {"m": make_model(folder, "llama")}
    adapters = {name: make_adapter(root / name, models["m"], seed=number) for number, name in enumerate(NAMES)}
    models |= {name: merged(models["m"], adapter) for name, adapter in adapters.items()}
    modules = (f"sql={adapters['sql']}", f'{{"name": "support", "path": "{adapters["support"]}"}}')
    worker = WorkerConfig(
        model=str(folder), device="cpu", max_total_tokens=8192, max_model_len=2048, cpu_threads=1, enable_lora=True,
        lora_modules=modules, speculative_algorithm="ngram",
    )  # fmt: skip
    router = resolve(RouterConfig(model=str(folder), model_aliases=(ALIAS, "claude-*")))
    with LocalStack(StackConfig(router, worker, FrontendConfig(), workers=2)) as stack:
        frontend = FrontendThread(resolve(FrontendConfig(model=str(folder), router=stack.address, port=0)))
        try:
            yield SimpleNamespace(address=stack.address, url=frontend.url, models=models)
        finally:
            frontend.stop()


@pytest.fixture
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="-", max_retries=0) as client:
        yield client


def expected(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def test_adapters_are_listed_with_their_model(client):
    listed = {model.id: model.parent for model in client.models.list().data}
    assert listed == {"m": None, ALIAS: None, "sql": "m", "support": "m"}
    assert client.models.retrieve("sql").parent == "m"


def test_each_model_gives_its_own_text_and_has_its_own_prefixes(served, client):
    """A prompt twice under each: a hit only under the same name. The whole is reported by model."""
    prompt, texts = prompts(1, 60, 60)[0], {}
    for cached in (0, 59):
        for name, model in served.models.items():
            found = client.completions.create(
                model=name, prompt=prompt, max_tokens=12, temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )  # fmt: skip
            assert found.model == name and found.choices[0].token_ids == expected(model, prompt)
            assert found.usage.prompt_tokens_details.cached_tokens == cached
            texts[name] = found.choices[0].text
    assert len(set(texts.values())) == 3
    rows = {row["model"]: row for row in httpx.get(served.url + "/v1/report").json()["models"]}
    assert all(rows[name]["requests"] >= 2 and rows[name]["hit_tokens"] >= 59 for name in served.models)
    metrics = httpx.get(served.url + "/metrics").text
    for name, row in rows.items():
        line = f'radixrt_cached_prompt_tokens_total{{model="{name}",tenant="default"}} {row["hit_tokens"]}.0'
        assert line in metrics


def test_every_api_knows_the_name(served, client):
    options = {"max_tokens": 12, "temperature": 0}
    told = {name: client.chat.completions.create(model=name, messages=HELLO, **options) for name in served.models}
    for name, chat in told.items():
        text = chat.choices[0].message.content
        response = client.responses.create(model=name, input=HELLO, max_output_tokens=12, temperature=0)
        assert (response.model, response.output_text) == (name, text)
        with anthropic.Anthropic(base_url=served.url, api_key="-", max_retries=0) as other:
            message = other.messages.create(model=name, messages=HELLO, max_tokens=12, extra_body={"temperature": 0})
        assert (message.model, "".join(block.text for block in message.content)) == (name, text)
        with Client(served.address) as native:
            assert native.generate(HELLO, Sampling(**options), model=name).text == text
    assert len({chat.choices[0].message.content for chat in told.values()}) == 3


def test_a_conversation_goes_on_under_another_adapter(client):
    """The ids of its answers are known; their pages are another model's."""
    first = client.responses.create(model="sql", input="Who are you?", max_output_tokens=8, temperature=0)
    options = {"previous_response_id": first.id, "input": "Why?", "max_output_tokens": 4, "temperature": 0}
    other = client.responses.create(model="support", **options)
    same = client.responses.create(model="sql", **options)
    assert same.usage.input_tokens == other.usage.input_tokens
    cached = [answer.usage.input_tokens_details.cached_tokens for answer in (same, other)]
    assert cached[0] > first.usage.input_tokens > cached[1]


def test_an_alias_is_the_model(served, client):
    """In every API, with its prefixes, its stored responses and its figures; replies have the name that was asked
    for."""
    options = {"max_tokens": 12, "messages": [{"role": "user", "content": "What is an alias?"}]}
    first, again = (client.chat.completions.create(model=name, temperature=0, **options) for name in ("m", ALIAS))
    assert (first.model, again.model) == ("m", ALIAS)
    assert again.choices[0].message == first.choices[0].message
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    with anthropic.Anthropic(base_url=served.url, api_key="-", max_retries=0) as other:
        message = other.messages.create(model=ALIAS, **options)
    assert message.model == ALIAS and message.usage.cache_read_input_tokens == again.usage.prompt_tokens - 1
    with Client(served.address, model=ALIAS) as native:
        usage = native.generate(options["messages"], Sampling(max_tokens=4, temperature=0)).usage
    assert usage.cached_tokens == usage.prompt_tokens - 1
    response = client.responses.create(model=ALIAS, input="Who are you?", max_output_tokens=8, temperature=0)
    options = {"previous_response_id": response.id, "input": "Why?", "max_output_tokens": 4}
    following = client.responses.create(model="m", **options)
    assert following.usage.input_tokens_details.cached_tokens > response.usage.input_tokens
    assert ALIAS not in {row["model"] for row in httpx.get(served.url + "/v1/report").json()["models"]}
    assert ALIAS not in httpx.get(served.url + "/metrics").text


def test_a_name_that_only_a_wildcard_knows_is_the_model(client):
    """It is not listed, but can be asked for, and is the name in the reply."""
    name = "claude-opus-9-20300101"
    assert client.chat.completions.create(model=name, messages=HELLO, max_tokens=1).model == name
    found = client.models.retrieve(name)
    assert (found.id, found.max_model_len, found.parent) == (name, 2048, None)
    assert name not in {model.id for model in client.models.list().data}


def test_log_probabilities_of_a_prompt_that_is_cached(served, client):
    """They are computed nevertheless, by the model that is asked for."""
    prompt = prompts(1, 40, 40, seed=5)[0]
    for name, model in served.models.items():
        client.completions.create(model=name, prompt=prompt, max_tokens=1)
        with torch.inference_mode():
            likely = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        found = client.completions.create(model=name, prompt=prompt, max_tokens=1, extra_body={"prompt_logprobs": 1})
        assert found.usage.prompt_tokens_details.cached_tokens == 0
        none, *rows = found.choices[0].prompt_logprobs
        assert none is None and len(rows) == len(prompt) - 1
        for at, row in enumerate(rows):
            token = prompt[at + 1]
            assert row[str(token)]["logprob"] == pytest.approx(likely[at, token].item(), abs=1e-3)
            (best,) = (int(one) for one, about in row.items() if about["rank"] == 1)
            assert likely[at, best].item() == pytest.approx(likely[at].max().item(), abs=1e-3)


def test_many_at_once(served):
    """Requests of all models in the same steps."""
    asked = prompts(9, 20, 40, seed=3)
    names = [list(served.models)[number % 3] for number in range(9)]

    async def all_at_once():
        async with await AsyncClient.connect(served.address) as client:
            asks = zip(asked, names, strict=True)
            return await asyncio.gather(*(client.generate(prompt, GREEDY, model=name) for prompt, name in asks))

    found = asyncio.run(all_at_once())
    for prompt, name, answer in zip(asked, names, found, strict=True):
        assert list(answer.token_ids) == expected(served.models[name], prompt), name


@program
async def ask_twice(s: Branch) -> tuple[Any, Any, Any]:
    s += user("What is in the table?")
    first, second = s.fork(2)
    first += assistant(gen("text", GREEDY))
    second += assistant(select("best", ["yes", "no"]))
    again = first.fork(1)[0]
    again += user("Why?")
    again += assistant(gen("why", GREEDY))
    values = await first.value("text"), await again.value("why"), await second.value("best")
    return values[0].token_ids, values[1].token_ids, values[2].scores


@pytest.mark.parametrize("transport", ["address", "url"])
def test_a_client_of_a_model_is_for_programs(served, transport):
    """All that they ask is asked of it: by forks, of states, and in scores."""
    found = {}
    for name in served.models:
        with Client(getattr(served, transport), model=name) as native:
            found[name] = ask_twice.run(native)
            chat = native.generate(HELLO, GREEDY)
            assert found[name][0] == chat.token_ids == native.generate(HELLO, GREEDY, model=name).token_ids
            other = "sql" if name != "sql" else "support"
            assert native.generate(HELLO, GREEDY, model=other).token_ids != chat.token_ids
            (scores,), (same,) = (native.score(HELLO, ["yes"], **how).logprobs for how in ({}, {"model": name}))
            assert scores == pytest.approx(same, abs=1e-4)
    assert all(len({str(answer[part]) for answer in found.values()}) == 3 for part in range(3))
    with (
        Client(getattr(served, transport), model="sq") as native,
        pytest.raises(ProgramError, match="'sq' is not served"),
    ):
        ask_twice.run(native)


def test_unknown_names_are_refused(served, client):
    with pytest.raises(openai.NotFoundError, match=r"'sq' is not served here; m, sql, support is"):
        client.chat.completions.create(model="sq", messages=HELLO)
    with Client(served.address) as native, pytest.raises(ServerError, match="'sq' is not served"):
        native.generate(HELLO, model="sq")
