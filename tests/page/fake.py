"""A server of the page and of made-up data: python -m tests.page.fake [SCENE] [PORT]."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from radixrt.frontend.http.page import page_response, read_page
from tests.page.world import Tree, World

KEY = "admins-own"
EVIL = '<img src=x onerror="window.hurt=1"><script>window.hurt=1</script>'
SCENES = ("busy", "empty", "starting", "keyed", "hostile", "failing", "old", "silent")


def hostile(data: Any) -> Any:
    """All texts that a client may choose, replaced by markup; also in keys that are texts of clients."""
    if isinstance(data, dict):
        return {name: hostile(value) for name, value in data.items()}
    if isinstance(data, list):
        return [hostile(value) for value in data]
    fixed = {"waiting", "prefill", "decode", "serving", "device", "host", "disk"}
    return f"{data}{EVIL}" if isinstance(data, str) and data not in fixed and not data.strip("rc").isdigit() else data


def failing(state: dict[str, Any]) -> dict[str, Any]:
    first, second = state["workers"]
    lost = {**first, "name": "worker-2", "state": "set aside", "restarts": 5, "pages_used": 0, "host_total": 0}
    state["workers"] = [first, {**second, "stalled_seconds": 41.0}, lost]
    reasons = ["CUDA error: an illegal memory access was encountered", "exited with code -9 (out of memory?)"]
    state["failures"] = [
        {"time": state["time"] - 100 * at, "worker": "worker-2", "text": reasons[at % 2]} for at in range(1, 5)
    ]
    return state


class Fake:
    """The application. `scene`: one of SCENES; `seconds`: between two states."""

    def __init__(self, scene: str = "busy", seconds: float = 1.0) -> None:
        self.scene, self.seconds = scene, seconds
        quiet = scene in ("empty", "starting")
        self.world = World(now=time.time(), busy=0 if quiet else 2.0)
        self.tree = Tree(8 if quiet else 1_048_576) if not quiet else None
        self.page = read_page()
        self.asked: list[str] = []
        self.app = Starlette(
            routes=[
                Route("/", self.root),
                Route("/v1/live", self.live),
                Route("/v1/live/requests/{id}", self.why),
                Route("/v1/live/tree", self.nodes),
                Route("/v1/live/tree/{id}", self.text),
                Route("/v1/models", self.models),
            ]
        )

    async def root(self, request: Request) -> Response:
        return page_response(self.page, request)

    def _refused(self, request: Request) -> Response | None:
        self.asked.append(request.url.path)
        if self.scene == "keyed" and request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": "unknown API key"}}, 401)
        if self.scene == "old":
            return JSONResponse({"error": {"message": "no such route"}}, 404)
        return None

    async def live(self, request: Request) -> Response:
        return self._refused(request) or StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        if self.scene == "silent":
            await asyncio.sleep(3600)
        yield f"event: history\ndata: {json.dumps(self.world.history())}\n\n"
        while True:
            yield f"event: state\ndata: {json.dumps(self.state())}\n\n"
            await asyncio.sleep(self.seconds)
            self.world.step()

    def state(self) -> dict[str, Any]:
        state = self.world.state()
        if self.scene == "starting":
            state["workers"] = []
        return {"hostile": hostile, "failing": failing}.get(self.scene, lambda same: same)(state)

    async def why(self, request: Request) -> Response:
        number = request.path_params["id"].removesuffix(EVIL)
        found = self.world.explain(number)
        missing = JSONResponse({"error": {"message": "no such request"}}, 404)
        return self._refused(request) or (JSONResponse(self._said(found)) if found else missing)

    async def nodes(self, request: Request) -> Response:
        refused = self._refused(request)
        if refused or self.tree is None:
            return refused or JSONResponse({"total": 0, "nodes": [], "tenants": []})
        asked = request.query_params
        return JSONResponse(self._said(self.tree.answer(int(asked.get("root", 0)), int(asked.get("most", 2000)))))

    async def text(self, request: Request) -> Response:
        assert self.tree is not None
        return self._refused(request) or JSONResponse(self._said(self.tree.text(int(request.path_params["id"]))))

    async def models(self, request: Request) -> Response:
        return self._refused(request) or JSONResponse({"data": [{"id": "coder-32b"}]})

    def _said(self, data: Any) -> Any:
        return hostile(data) if self.scene == "hostile" else data


@contextlib.contextmanager
def serving(fake: Fake, port: int = 0) -> Iterator[str]:
    """Serve in a thread; gives the address."""
    config = uvicorn.Config(
        fake.app, port=port, log_level="critical", log_config=None, timeout_graceful_shutdown=0, ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    scene, port = [*sys.argv[1:], "busy", "8700"][:2] if len(sys.argv) < 3 else sys.argv[1:3]
    uvicorn.run(Fake(scene).app, port=int(port), log_level="warning")
