"""Information about the server: models, report, metrics, health and version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from radixrt.client import AsyncClient, ServerError
from radixrt.frontend.http.auth import Handler, KeyedHandler, json_response, wants_page, with_login
from radixrt.frontend.http.errors import ApiError
from radixrt.report import to_html
from radixrt.version import __version__

REFRESH_SECONDS = 10
CLEAR_PATHS = "/reset_prefix_cache", "/flush_cache"
"""As vLLM and SGLang call it."""
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The content security policy of the report's page, which shows callers' names and texts."""


def model_json(name: str, max_model_len: int, parent: str | None = None) -> dict[str, Any]:
    """A model with the fields of OpenAI, vLLM and Anthropic. Prompt and output share its length, so the maximum of each
    is all of it. Its creation time is unknown, for which both APIs use the epoch. `parent`: the model of a LoRA
    adapter."""
    about = {"id": name, "object": "model", "created": 0, "owned_by": "radixrt", "max_model_len": max_model_len}
    about |= {"root": name, "parent": parent}
    sizes = {"max_input_tokens": max_model_len, "max_tokens": max_model_len}
    return about | sizes | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def models_json(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A list of models, which is also a page for Anthropic's client."""
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {"first_id": None, "last_id": None}
    return {"object": "list", "data": models, "has_more": False} | ends


class InfoRoutes:
    """`ask` returns a client with an API key; it raises ApiError (503) if the router cannot be reached."""

    def __init__(self, ask: Callable[[str], AsyncClient]) -> None:
        self._ask = ask

    def routes(
        self, guarded: Callable[[KeyedHandler], Handler], for_admin: Callable[[KeyedHandler], Handler]
    ) -> list[Route]:
        """The routes: those that need a key, through `guarded`, or through `for_admin` if the admin's will do, and the
        public ones."""
        return [
            Route("/", self.version),  # some agents ask by HEAD whether there is a server
            Route("/v1/models", guarded(self.models)),
            Route("/v1/models/{model:path}", guarded(self.model)),
            Route("/v1/report", with_login(for_admin(self.report))),
            Route("/metrics", for_admin(self.metrics)),
            Route("/health", self.health),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version),
            *(Route(path, for_admin(self.clear_cache), methods=["POST"]) for path in CLEAR_PATHS),
        ]

    async def models(self, request: Request, key: str) -> Response:
        return json_response(models_json(await self._models(key)))

    async def model(self, request: Request, key: str) -> Response:
        wanted = request.path_params["model"]
        name = await self._ask(key).check_model(wanted)
        for model in await self._models(key):
            if wanted and model["id"] == name:
                return json_response(model_json(wanted, model["max_model_len"], model["parent"]))
        raise ApiError(404, f"model {wanted!r} is not served here", "model", "model_not_found")

    async def _models(self, key: str) -> list[dict[str, Any]]:
        models = await self._ask(key).models()
        return [model_json(model["id"], model["max_model_len"], model.get("parent")) for model in models]

    async def report(self, request: Request, key: str) -> Response:
        """The report as JSON; for browsers as a page that reloads every REFRESH_SECONDS."""
        report = await self._ask(key).report()
        if not wants_page(request):
            return json_response(report)
        return HTMLResponse(to_html(report, REFRESH_SECONDS), headers={"content-security-policy": PAGE_POLICY})

    async def metrics(self, request: Request, key: str) -> Response:
        return PlainTextResponse(await self._ask(key).metrics(), media_type="text/plain; version=0.0.4")

    async def clear_cache(self, request: Request, key: str) -> Response:
        """See AsyncClient.clear_cache."""
        await self._ask(key).clear_cache()
        return json_response({"success": True})

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def health(self, request: Request) -> Response:
        """200 while a worker serves and makes progress, else 503 with the reason; so while the server drains.
        `set_aside` counts the workers that keep failing, if there are any."""
        try:
            health = await self._ask("").health()
        except (ApiError, ServerError) as problem:
            return json_response({"status": "unavailable", "reason": problem.message}, 503, {"retry-after": "1"})
        if health["draining"]:
            reason = "the server finishes the requests in flight, and ends"
            return json_response({"status": "draining", "reason": reason}, 503, {"retry-after": "5"})
        if not health["serving"]:
            reason = "no worker makes progress" if health["workers"] else "no worker serves yet"
            return json_response({"status": "unavailable", "reason": reason}, 503, {"retry-after": "1"})
        stalled = max(worker["stalled_seconds"] for worker in health["workers"])
        set_aside = sum(worker["set_aside"] for worker in health["workers"])
        failing = {"set_aside": set_aside} if set_aside else {}
        return json_response({"status": "ok", "workers": len(health["workers"]), "stalled_seconds": stalled} | failing)
