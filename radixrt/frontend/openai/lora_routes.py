"""LoRA adapters that are loaded and unloaded while the server runs, as in vLLM's API."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from radixrt.client import ServerError
from radixrt.frontend.http.auth import Handler, KeyedHandler
from radixrt.frontend.http.codec import parse
from radixrt.frontend.http.errors import api_error, refuse
from radixrt.frontend.http.worker_routes import AdminRoutes
from radixrt.messages import ChangeAdapter

ADAPTER_PATHS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NAMES = {"name": "lora_name", "path": "lora_path", "in_place": "load_inplace"}
"""The names of a message's fields here."""


class LoadBody(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadBody(msgspec.Struct, kw_only=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


_load, _unload = msgspec.json.Decoder(LoadBody), msgspec.json.Decoder(UnloadBody)


class AdapterRoutes(AdminRoutes):
    """The routes that load and unload adapters."""

    def routes(self, unchecked: Callable[[KeyedHandler], Handler]) -> list[Route]:
        """The routes; `unchecked` makes handlers of them that pass on any key."""
        return [
            Route(path, unchecked(handler), methods=["POST"])
            for path, handler in zip(ADAPTER_PATHS, (self.load, self.unload), strict=True)
        ]

    async def load(self, request: Request, key: str) -> Response:
        body = parse(_load, await self.read(request))
        if not body.lora_path:
            refuse("lora_path", "must not be empty")
        message = ChangeAdapter(id=0, name=body.lora_name, path=body.lora_path, in_place=body.load_inplace, api_key=key)
        failed = await self._change(message)
        text = f"Success: LoRA adapter '{body.lora_name}' added successfully."
        but = "".join(f" Not by worker {name}: {why}" for name, why in failed.items())
        return PlainTextResponse(text + but)

    async def unload(self, request: Request, key: str) -> Response:
        body = parse(_unload, await self.read(request))
        await self._change(ChangeAdapter(id=0, name=body.lora_name, api_key=key))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _change(self, message: ChangeAdapter) -> dict[str, str]:
        self.restrict(message)
        try:
            return await self.ask(message.api_key).change_adapter(message)
        except ServerError as problem:
            raise api_error(problem, NAMES) from None
