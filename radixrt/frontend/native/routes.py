"""The native API over HTTP: a ClientRequest as JSON in, its ClientReplies out, one per line."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixrt.client.transports import Answer, RouterTransport, ServerError
from radixrt.frontend.generate.answers import StreamAnswer
from radixrt.frontend.generate.link import RouterLink
from radixrt.frontend.http.auth import key_of, wants_explanation
from radixrt.frontend.http.body import release
from radixrt.frontend.http.codec import encode, parse
from radixrt.frontend.http.errors import ApiError, api_error
from radixrt.frontend.http.outbox import Outbox
from radixrt.messages import CalledTool, Cancel, ChangeAdapter, ClientRequest, Delta, DrainWorker, Error, Generate
from radixrt.tokens.errors import FieldError

CONTENT_TYPE = b"application/x-ndjson"
_request = msgspec.json.Decoder(ClientRequest)


class Native:
    """The route. `admit` raises ApiError (401) for an unknown key. `read` reads a body; its second argument is whether
    there was no key in the header. `restrict` says who may change a LoRA adapter, or
    drain a worker."""

    def __init__(
        self,
        link: RouterLink,
        admit: Callable[[Request, str], None],
        read: Callable[[Request, bool], Awaitable[bytes]],
        restrict: Callable[[ChangeAdapter | DrainWorker], None],
    ) -> None:
        self._link = link
        self._admit = admit
        self._read = read
        self._restrict = restrict

    async def handle(self, request: Request) -> Any:
        """Handle a request. Errors are sent as lines of the protocol; a small message may have its key in itself."""
        try:
            return await self._answer(request)
        except (ApiError, FieldError, ServerError) as problem:
            return _response(api_error(problem))
        finally:
            release(request)

    async def _answer(self, request: Request) -> StreamAnswer:
        """Answer a request. A key in the header takes precedence over the message's own."""
        key = key_of(request)
        if key:
            self._admit(request, key)
        message = parse(_request, await self._read(request, not key))
        if isinstance(message, Cancel | CalledTool):
            raise ApiError(
                400,
                f"type: {type(message).__name__} is not for HTTP; a request is cancelled by closing its connection",
                "type",
            )
        message.api_key = key or message.api_key
        self._admit(request, message.api_key)
        if isinstance(message, Generate):
            message.explain = message.explain or wants_explanation(request)
        if isinstance(message, ChangeAdapter | DrainWorker):
            self._restrict(message)
        transport = self._link.reachable()
        try:
            return StreamAnswer(NativeExchange(transport, message), CONTENT_TYPE)
        except OverflowError:
            raise ApiError(400, "a number in the message has more than 64 bits") from None


class NativeExchange(Outbox):
    """One message and its answers as lines of JSON. An error is sent as a line as well as by the status."""

    def __init__(self, transport: RouterTransport, request: ClientRequest) -> None:
        super().__init__()
        self._asked_id = request.id
        self._open = request.n if isinstance(request, Generate) else 1
        self._transport = transport
        self._id = transport.submit(request, self._take)

    def cancel(self) -> None:
        self._transport.cancel(self._id)

    def _take(self, answer: Answer) -> None:
        answer.id = self._asked_id
        if isinstance(answer, Error):
            self.refusal = ApiError.of(answer)
        self.put(_line(answer))
        self._open -= not isinstance(answer, Delta) or answer.finish is not None
        self.finished = self._open <= 0 or isinstance(answer, Error)
        self.wake()


def _response(error: ApiError) -> Response:
    line = _line(Error(None, error.status, error.message, error.param, error.retry_after))
    return Response(line, error.status, error.headers(), CONTENT_TYPE.decode())


def _line(answer: Any) -> bytes:
    if isinstance(answer, Delta):
        return b'{"type":"deltas","items":[%b]}\n' % encode(answer)
    return encode(answer) + b"\n"
