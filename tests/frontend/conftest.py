"""A front end with a router and fake workers, all in threads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.frontend.server import FrontendThread
from tests.alike import workers_alike
from tests.checkpoints import make_tokenizer


@pytest.fixture(scope="package", autouse=True)
def _workers_alike() -> Iterator[None]:
    with workers_alike():
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    path = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    (path / "config.json").write_text(json.dumps({"vocab_size": 512}))
    return path


@contextmanager
def serving(
    folder: Path | None,
    fake: str = "0,0",
    workers: int = 2,
    context: int = 8192,
    jump_forward: bool = True,
    model_aliases: tuple[str, ...] = (),
    **settings,
) -> Iterator[FrontendThread]:
    """Run a front end. `settings` are fields of its configuration; API keys are also for the router, as are
    `model_aliases`. `context` (their max_model_len) and `jump_forward` are for the workers."""
    names = {"model": str(folder or ""), "served_model_name": "m", "tokenizer": "" if folder else "none"}
    keys = {name: settings[name] for name in ("api_key", "admin_api_key") if name in settings}
    router = resolve(RouterConfig(**names, model_aliases=model_aliases, **keys))
    own = {"model": str(folder or ""), "served_model_name": "m", "fake": fake}
    worker = WorkerConfig(**own, max_model_len=context, jump_forward=jump_forward)
    with LocalStack(StackConfig(router, worker, FrontendConfig(), workers)) as stack:
        frontend = FrontendThread(resolve(FrontendConfig(**names, router=stack.address, port=0, **settings)))
        frontend.router_thread = stack._router_thread
        try:
            yield frontend
        finally:
            frontend.stop()


@pytest.fixture(scope="module")
def url(folder) -> Iterator[str]:
    """The URL of a front end with two fast workers."""
    with serving(folder) as frontend:
        yield frontend.url


@pytest.fixture(scope="module")
def slow_url(folder) -> Iterator[str]:
    """The URL of a front end whose worker takes 5 ms per step."""
    with serving(folder, fake="0,0.005", workers=1) as frontend:
        yield frontend.url
