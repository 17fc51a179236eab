"""LoRA adapters that are loaded, replaced and unloaded over HTTP, at two workers and two front ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest

from radixrt.client import Client, ServerError
from radixrt.client.local import LocalStack
from radixrt.client.transports import NATIVE_PATH
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.frontend.server import FrontendThread
from radixrt.messages import Sampling
from tests.adapters import make_adapter, merged
from tests.checkpoints import make_model, make_tokenizer
from tests.worker.engine import prompts
from tests.worker.test_models import greedy

PROMPT = prompts(1, 60, 60)[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SimpleNamespace:
    """A checkpoint, three adapters' folders, and what the model says with each (None: without)."""
    root = tmp_path_factory.mktemp("lora")
    folder = make_tokenizer(root / "m")
    model = make_model(folder, "llama")
    adapters = [make_adapter(root / str(seed), model, seed=seed) for seed in range(3)]
    models = [merged(model, adapter) for adapter in adapters]
    said = {str(path): greedy(one, PROMPT, 12) for path, one in zip(adapters, models, strict=True)}
    return SimpleNamespace(folder=folder, adapters=[str(a) for a in adapters], said=said, models=models, model=model)


@contextmanager
def serving(made, *, keys=(), admin="", router_keys=None, **worker) -> Iterator[SimpleNamespace]:
    given = {"enable_lora": True, "allow_runtime_lora_updating": True, "max_loras": 2, "max_total_tokens": 8192}
    settings = WorkerConfig(model=str(made.folder), device="cpu", max_model_len=2048, cpu_threads=1, **(given | worker))
    known = keys if router_keys is None else router_keys
    router = RouterConfig(model=str(made.folder), allow_runtime_lora_updating=True, api_key=known, admin_api_key=admin)
    with LocalStack(StackConfig(resolve(router), settings, FrontendConfig(), workers=2)) as stack:
        http = resolve(FrontendConfig(model=str(made.folder), router=stack.address, port=0, api_key=keys))
        frontends = [FrontendThread(http) for _ in range(2)]
        try:
            yield SimpleNamespace(address=stack.address, urls=[frontend.url for frontend in frontends])
        finally:
            for frontend in frontends:
                frontend.stop()


@pytest.fixture(scope="module")
def shared(made) -> Iterator[SimpleNamespace]:
    with serving(made) as found:
        yield found


@pytest.fixture
def served(shared):
    """No adapter is loaded, before and after."""
    yield shared
    for name in names(shared.urls[0]) - {"m"}:
        unload(shared.urls[0], name)


def post(url: str, path: str, body: dict, key: str = "-") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{url}/v1/{path}", json=body, headers=headers, timeout=30)


def load(url: str, name: str, path: str, key: str = "-", **fields) -> httpx.Response:
    return post(url, "load_lora_adapter", {"lora_name": name, "lora_path": path} | fields, key)


def unload(url: str, name: str, key: str = "-") -> httpx.Response:
    return post(url, "unload_lora_adapter", {"lora_name": name}, key)


def names(url: str) -> set[str]:
    return {model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]}


def complete(url: str, model: str, **fields) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return post(url, "completions", body | {"return_token_ids": True} | fields)


def said(answer: httpx.Response) -> tuple[list[int], int]:
    """Its token ids, and how many tokens of its prompt were cached."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body["choices"][0]["token_ids"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_an_adapter_comes_and_goes(made, served):
    """Every front end knows it at once, and every worker."""
    one, other = served.urls
    assert complete(other, "sql").status_code == 404
    answer = load(one, "sql", made.adapters[0])
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert names(other) == {"m", "sql"}
    for _ in range(2):
        assert said(complete(other, "sql"))[0] == made.said[made.adapters[0]]
    with Client(served.address) as client:
        loads = {w["name"] for w in client.health()["workers"]}
        sampling = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
        with ThreadPoolExecutor(16) as pool:  # at once, so that no worker can serve them alone
            asked = [pool.submit(client.generate, p, sampling, model="sql") for p in prompts(16, 20, 30, seed=9)]
        assert {one.result().usage.worker for one in asked} == loads, "both serve it"
    answer = unload(other, "sql")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert names(one) == {"m"} and complete(one, "sql").status_code == 404
    assert unload(one, "sql").status_code == 404


def test_nothing_computed_with_former_weights_is_reused(made, served):
    url = served.urls[0]
    for turn, path in enumerate((*made.adapters, made.adapters[0])):
        assert load(url, "sql", path, load_inplace=True).status_code == 200
        assert said(complete(url, "sql")) == (made.said[path], 0), turn
        assert said(complete(url, "sql")) == (made.said[path], 59), turn


def test_weights_that_were_written_over_in_their_folder(made, served, tmp_path):
    """As trainers do it between steps."""
    url = served.urls[0]
    for seed in (5, 6):
        folder = make_adapter(tmp_path / "latest", made.model, seed=seed)
        assert load(url, "policy", str(folder), load_inplace=True).status_code == 200
        assert said(complete(url, "policy")) == (greedy(merged(made.model, folder), PROMPT, 12), 0)


def test_requests_in_flight_finish_with_former_weights(made, served):
    """Twice in a row: the second has to wait for a slot until the first request is done."""
    url, count = served.urls[0], 400
    load(url, "sql", made.adapters[0])
    found, begun = {}, threading.Event()

    def stream() -> None:
        with Client(served.address) as client:
            tokens = found[0] = []
            for delta in client.stream(PROMPT, Sampling(max_tokens=count, temperature=0.0, ignore_eos=True),
                                       model="sql"):  # fmt: skip
                tokens.extend(memoryview(delta.ids).cast("i"))
                begun.set()

    thread = threading.Thread(target=stream)
    thread.start()
    assert begun.wait(30)
    assert load(url, "sql", made.adapters[1], load_inplace=True).status_code == 200
    before = len(found[0])
    assert said(complete(url, "sql"))[0] == made.said[made.adapters[1]]
    assert load(url, "sql", made.adapters[2], load_inplace=True).status_code == 200
    assert said(complete(url, "sql"))[0] == made.said[made.adapters[2]]
    thread.join(60)
    assert before < count, "it was replaced while the request ran"
    assert found[0] == greedy(made.models[0], PROMPT, count)


def test_what_is_refused(made, served, tmp_path):
    url = served.urls[0]
    load(url, "a", made.adapters[0])
    cases = [
        (load(url, "a", made.adapters[1]), "lora_name", "has already been loaded; load_inplace replaces it"),
        (load(url, "b", str(tmp_path / "none")), "lora_path", f"b: there is no folder {tmp_path / 'none'}"),
        (load(url, "m", made.adapters[0]), "lora_name", "'m' is a model"),
        (load(url, "b", ""), "lora_path", "must not be empty"),
        (load(url, "", made.adapters[0]), "lora_name", "the name is empty"),
    ]
    for answer, field, words in cases:
        problem = answer.json()["error"]
        assert (answer.status_code, problem["param"]) == (400, field) and words in problem["message"], problem
    load(url, "b", made.adapters[1])
    full = load(url, "c", made.adapters[2])
    assert full.status_code == 400 and "2 LoRA adapters are loaded (a, b)" in full.json()["error"]["message"]
    assert said(complete(url, "a"))[0] == made.said[made.adapters[0]]
    assert names(url) == {"m", "a", "b"}


def test_the_native_client_does_the_same(made, served):
    for address in (served.address, served.urls[1]):
        with Client(address) as client:
            assert client.load_adapter("sql", made.adapters[0]) == {}
            with pytest.raises(ServerError, match="already been loaded"):
                client.load_adapter("sql", made.adapters[1])
            assert client.load_adapter("sql", made.adapters[1], in_place=True) == {}
            answer = client.generate(PROMPT, Sampling(max_tokens=12, temperature=0.0, ignore_eos=True), model="sql")
            assert list(answer.token_ids) == made.said[made.adapters[1]]
            client.unload_adapter("sql")
            with pytest.raises(ServerError, match="cannot be found"):
                client.unload_adapter("sql")


def test_where_there_are_keys_only_the_admin_may(made):
    with serving(made, keys=("a:k1", "b:k2"), admin="root") as found:
        url = found.urls[0]
        assert [load(url, "sql", made.adapters[0], key).status_code for key in ("k1", "", "other")] == [403, 401, 401]
        assert load(url, "sql", made.adapters[0], "root").status_code == 200
        with Client(found.address, api_key="root") as client, Client(url, api_key="k1") as tenant:
            assert client.load_adapter("sql", made.adapters[1], in_place=True) == {}
            with pytest.raises(ServerError, match="only with the key of --admin-api-key"):
                tenant.unload_adapter("sql")
            with pytest.raises(ServerError, match="unknown API key"):
                client.generate(PROMPT, model="sql")
            assert tenant.generate(PROMPT, Sampling(max_tokens=1), model="sql").usage.completion_tokens == 1
        assert [unload(url, "sql", key).status_code for key in ("k2", "other", "root")] == [403, 401, 200]


def test_front_ends_with_keys_let_nobody_through_to_a_router_without(made):
    with serving(made, keys=("a:k1",), router_keys=()) as found:
        url = found.urls[0]
        assert {load(url, "sql", made.adapters[0], key).status_code for key in ("k1", "", "other")} <= {401, 403}
        assert unload(url, "sql", "k1").status_code in (401, 403)
        with Client(url, api_key="k1") as tenant, pytest.raises(ServerError, match="only with the key of"):
            tenant.load_adapter("sql", made.adapters[0])
        with Client(found.address) as direct:
            assert direct.load_adapter("sql", made.adapters[0]) == {}, "the router has no keys"


def test_a_web_page_that_somebody_visits_cannot_change_them(made, served):
    """Browsers let every page send a POST of plain text; it only cannot read the answer."""
    url, page = served.urls[0], {"origin": "https://somewhere.example", "content-type": "text/plain"}
    body = {"lora_name": "sql", "lora_path": made.adapters[0]}
    message = {"type": "change_adapter", "id": 1, "name": "sql", "path": made.adapters[0]}
    for path, content in (("/v1/load_lora_adapter", body), ("/v1/unload_lora_adapter", body), (NATIVE_PATH, message)):
        answer = httpx.post(url + path, content=json.dumps(content), headers=page, timeout=30)
        assert answer.status_code == 403 and "--allowed-origins" in answer.text, path
    assert names(url) == {"m"}
