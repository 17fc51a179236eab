"""The clients of OpenAI and of Anthropic, by each route that they have a method for; and what a route refuses."""

from __future__ import annotations

import operator
import re
from typing import Any

import anthropic
import httpx
import openai
import pytest

from radixrt.frontend.anthropic.schema import Messages
from radixrt.frontend.generate.request import GenerationRequest
from radixrt.frontend.ollama import schema as ollama
from radixrt.frontend.openai.schema import Chat, Completion
from radixrt.frontend.responses.schema import Create

HELLO: Any = [{"role": "user", "content": "hello"}]
SDKS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "openai": {
        "/v1/chat/completions": ("chat.completions.create", {"model": "m", "messages": HELLO, "max_tokens": 2}),
        "/v1/completions": ("completions.create", {"model": "m", "prompt": "hello", "max_tokens": 2}),
        "/v1/responses": ("responses.create", {"model": "m", "input": "hello", "max_output_tokens": 2}),
        "/v1/responses/input_tokens": ("responses.input_tokens.count", {"model": "m", "input": "hello"}),
        "/v1/models": ("models.list", {}),
    },
    "anthropic": {
        "/v1/messages": ("messages.create", {"model": "m", "messages": HELLO, "max_tokens": 2}),
        "/v1/messages/count_tokens": ("messages.count_tokens", {"model": "m", "messages": HELLO}),
        "/v1/models": ("models.list", {}),
    },
}
"""By the names of packages: the routes, each with a method that uses it."""


@pytest.mark.parametrize(("sdk", "route"), [(sdk, route) for sdk, routes in SDKS.items() for route in routes])
def test_a_client_s_method_uses_its_route_and_reads_the_reply(url, sdk: str, route: str) -> None:
    client: Any = {"openai": openai.OpenAI, "anthropic": anthropic.Anthropic}[sdk]
    path, fields = SDKS[sdk][route]
    resource, _, method = path.rpartition(".")
    with client(base_url=url + "/v1" * (sdk == "openai"), api_key="any", max_retries=0) as client:
        resource = operator.attrgetter(resource)(client)
        raw = getattr(resource.with_raw_response, method)(**fields)
        reply = raw.parse()
    assert raw.http_request.url.path == route
    if route == "/v1/models":
        assert [model.id for model in reply.data] == ["m"]
    else:
        assert getattr(reply, "input_tokens", None) or reply.usage


SCHEMAS: dict[str, tuple[type[GenerationRequest], dict[str, Any]]] = {
    "/v1/chat/completions": (Chat, {"messages": HELLO}),
    "/v1/completions": (Completion, {"prompt": "hello"}),
    "/v1/responses": (Create, {"input": "hello"}),
    "/v1/messages": (Messages, {"model": "m", "messages": HELLO, "max_tokens": 2}),
    "/api/chat": (ollama.Chat, {"messages": HELLO}),
    "/api/generate": (ollama.Generate, {"prompt": "hello"}),
}
"""By route: the schema, whose `unserved` are refused, and the fields that a request needs."""
OF_A_TYPE: dict[str, Any] = {"background": True, "context": [1], "suffix": "x", "template": "x"}


@pytest.mark.parametrize("route", SCHEMAS)
def test_a_field_that_is_not_served_is_refused_by_its_name(url, route: str) -> None:
    schema, needed = SCHEMAS[route]
    assert schema.unserved
    for field in schema.unserved:
        reply = httpx.post(url + route, json=needed | {field: OF_A_TYPE.get(field, {"a": 1})})
        assert reply.status_code == 400 and re.search(rf"\b{field}: is not served", reply.text), reply.text


def test_a_schema_may_refuse_one_field_or_none() -> None:
    class One(GenerationRequest, kw_only=True):
        unserved = ("extra",)
        extra: Any = None

    class Nothing(GenerationRequest, kw_only=True):
        pass

    One().check_served()
    Nothing().check_served()
    with pytest.raises(Exception, match="extra: is not served"):
        One(extra=1).check_served()
