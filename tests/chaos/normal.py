"""A client that behaves, while others do not: its answers must be right, and come within a bound."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Self

import httpx

from radixrt.client import AsyncClient
from radixrt.messages import Sampling
from tests.chaos.traffic import VOCAB, foretold

PERIOD_SECONDS = 0.05
SAMPLING = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


class Normal:
    """Requests over ZMQ and, with `url`, over HTTP, one after the other, in a thread. Workers have no model."""

    def __init__(self, address: str, key: str, url: str = "", *, model: str = "", seed: int = 0) -> None:
        self.seconds: list[float] = []
        """Time of each request."""
        self._address, self._key, self._url, self._model = address, key, url, model
        self._rng = random.Random(seed)
        self._stopped = threading.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="normal client")

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as problem:
            self._problem = problem

    async def _run(self) -> None:
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        client = await AsyncClient.connect(self._address, api_key=self._key, timeout=20.0)
        async with client, httpx.AsyncClient(base_url=self._url, headers=headers, timeout=60) as web:
            while not self._stopped.is_set():
                prompt = [self._rng.randrange(3, VOCAB) for _ in range(self._rng.randrange(5, 60))]
                begun = time.monotonic()
                async with asyncio.timeout(60):
                    if self._url and self._rng.random() < 0.5:
                        found = await self._over_http(web, prompt)
                    else:
                        found = (await client.generate(prompt, SAMPLING, model=self._model)).token_ids
                self.seconds.append(time.monotonic() - begun)
                assert found == foretold(prompt, SAMPLING.max_tokens), f"{prompt}: {found}"
                await asyncio.sleep(PERIOD_SECONDS)

    async def _over_http(self, web: httpx.AsyncClient, prompt: list[int]) -> list[int]:
        body = {"prompt": prompt, "max_tokens": SAMPLING.max_tokens, "temperature": 0, "ignore_eos": True}
        answer = await web.post("/v1/completions", json=body | {"return_token_ids": True})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    def wait_for_more(self, count: int = 3) -> None:
        """Wait until some more requests are answered, so that what was sent by others before has been read."""
        wanted = len(self.seconds) + count
        while len(self.seconds) < wanted and self._thread.is_alive():
            time.sleep(0.01)

    @property
    def summary(self) -> str:
        times = sorted(self.seconds) or [0.0]
        middle, last = times[len(times) // 2], times[-1]
        late = times[int(0.99 * (len(times) - 1))]
        return f"{len(times)} requests, p50 {1e3 * middle:.0f} ms, p99 {1e3 * late:.0f}, longest {1e3 * last:.0f}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        self._stopped.set()
        self._thread.join()
        if kind is None and self._problem is not None:
            raise AssertionError(f"the normal client was not served: {self._problem!r}") from self._problem
