"""A router with --state-path that is started anew: what it knows again, and what it has been told to forget."""

from __future__ import annotations

from pathlib import Path

import pytest
from stack import Client, Router

from radixrt.config import RouterConfig
from radixrt.messages import (
    Adapter,
    Done,
    Error,
    Forget,
    Forgotten,
    Fork,
    Info,
    MessageSegment,
    Pause,
    Recall,
    Share,
    StatePrompt,
)
from radixrt.messages.namespace import tenant_digest
from radixrt.router.server.loop import RouterServer
from radixrt.tokens import TextService, load_tokenizer
from tests.checkpoints import make_tokenizer

SCOPE = "0123456789abcdef"
KEYS = ("a:key-a", "b:key-b")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    tokenizer = load_tokenizer(str(make_tokenizer(tmp_path_factory.mktemp("tokenizer"))), "")
    with TextService(tokenizer) as service:
        yield service


def begun(text: TextService, folder: Path, **config) -> tuple[Router, Client]:
    router = Router(text, state_path=str(folder), api_key=KEYS, **config)
    return router, Client(router.server.client_address)


def ended(router: Router, client: Client) -> None:
    client.link.close()
    router.stop()


def fork(id: int, content: str, key: str, **fields) -> Fork:
    prompt = StatePrompt(SCOPE, transcript=[MessageSegment("user", content)], **fields)
    return Fork(id=id, prompt=prompt, count=1, api_key=key)


def test_a_router_that_starts_anew_knows_values_and_states(text, tmp_path):
    router, client = begun(text, tmp_path)
    assert client.ask(Share(id=1, entries=[(b"k", b"v"), (b"l", b"w")], api_key="key-a")) == Done(1)
    assert client.ask(fork(2, "hello", "key-a", save=7)) == Done(2)
    ended(router, client)
    router, client = begun(text, tmp_path)
    assert client.ask(Pause(id=1, scope=SCOPE, state=7, api_key="key-a")) == Done(1), "before anything was read"
    for id, key, value in ((2, "key-a", b"v"), (3, "key-b", None)):
        assert client.ask(Recall(id=id, keys=[b"k"], api_key=key)) == Info(id, [value])
    assert client.ask(fork(4, "more", "key-a", state=7, save=8)) == Done(4)
    refused = client.ask(fork(5, "more", "key-b", state=7, save=8))
    assert isinstance(refused, Error) and refused.code == 410
    assert client.ask(Forget(id=6, scope=SCOPE, api_key="key-a")) == Done(6)
    ended(router, client)
    router, client = begun(text, tmp_path)
    for number in (7, 8):
        assert client.ask(fork(number, "more", "key-a", state=number, save=9)).code == 410
    ended(router, client)


def test_a_tenant_is_forgotten_in_memory_and_on_disk_and_the_others_are_not(text, tmp_path):
    router, client = begun(text, tmp_path)
    for id, key in ((1, "key-a"), (2, "key-b")):
        client.ask(Share(id=id, entries=[(b"k", b"a value of " + key.encode())], api_key=key))
        client.ask(fork(id + 10, f"a message of {key}", key, save=1))
    router._loop.call_soon_threadsafe(router.server._handlers.forget_tenant, "a")
    assert client.receive() == Forgotten(tenant_digest("a"))
    assert client.ask(Recall(id=21, keys=[b"k"], api_key="key-a")) == Info(21, [None])
    assert client.ask(fork(22, "more", "key-a", state=1, save=2)).code == 410
    ended(router, client)
    left = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b" of key-a" not in left and b"a value of key-b" in left and b"a message of key-b" in left
    router, client = begun(text, tmp_path)
    assert client.ask(Recall(id=1, keys=[b"k"], api_key="key-a")) == Info(1, [None])
    assert client.ask(fork(2, "more", "key-a", state=1, save=2)).code == 410
    assert client.ask(Recall(id=3, keys=[b"k"], api_key="key-b")) == Info(3, [b"a value of key-b"])
    assert client.ask(fork(4, "more", "key-b", state=1, save=2)) == Done(4)
    ended(router, client)


def test_adapters_that_clients_have_loaded_are_wanted_again(text, tmp_path):
    """As the same versions, so that what is cached of them is found; if clients may still load some."""

    def wanted(*changes: Adapter, allowed: bool = True) -> dict[str, Adapter]:
        names = {"client_address": "inproc://adapters", "worker_address": "inproc://adapters-workers"}
        config = RouterConfig(**names, state_path=str(tmp_path), allow_runtime_lora_updating=allowed)
        server = RouterServer(config, text)
        found = dict(server.core.workers.wanted)
        for adapter in changes:
            server.core.workers.want(adapter)
        server._store.close()
        return found

    sql, poems = Adapter("sql", 3, "/sql"), Adapter("poems", 4, "/poems")
    assert wanted(sql, poems, Adapter("sql", 5, "/sql")) == {}
    assert wanted(Adapter("poems", 6)) == {"sql": Adapter("sql", 5, "/sql"), "poems": poems}
    assert wanted(allowed=False) == {}
    assert wanted() == {"sql": Adapter("sql", 5, "/sql")}
