"""The reference servers of bench.front, with the same streams.   python -m bench.plain_front http|zmq ADDRESS"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import msgspec
import uvicorn
import zmq
import zmq.asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from radixrt.messages import ClientRequest, Delta, Deltas, Usage

STEP = 0.005


async def tokens(count: int) -> AsyncIterator[int]:
    loop = asyncio.get_running_loop()
    began = loop.time()
    for number in range(count):
        await asyncio.sleep(max(0.0, began + (number + 1) * STEP - loop.time()))
        yield number


async def completions(request: Request) -> Response:
    body = await request.json()
    if not body["stream"]:
        choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": "length"}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1, "total_tokens": len(body["prompt"]) + 1}
        return JSONResponse({"id": "cmpl-0", "object": "text_completion", "choices": [choice], "usage": usage})

    async def chunks() -> AsyncIterator[str]:
        async for number in tokens(body["max_tokens"]):
            finish = "length" if number == body["max_tokens"] - 1 else None
            choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": finish}
            head = {
                "id": "cmpl-0123456789abcdef0123456789abcdef",
                "object": "text_completion",
                "created": 1_700_000_000,
            }
            yield f"data: {json.dumps(head | {'model': 'model', 'choices': [choice]})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(chunks(), media_type="text/event-stream")


def serve_http(address: str) -> None:
    host, _, port = address.removeprefix("tcp://").partition(":")
    app = Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])
    config = uvicorn.Config(app, host=host, port=int(port), log_level="warning", loop="uvloop", http="httptools")
    server = uvicorn.Server(config)

    async def run() -> None:
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        print("ready", flush=True)
        await task

    asyncio.run(run())


async def serve_zmq(address: str) -> None:
    socket = zmq.asyncio.Context().socket(zmq.ROUTER)
    socket.bind(address)
    decoder, encoder = msgspec.msgpack.Decoder(ClientRequest), msgspec.msgpack.Encoder()
    print("ready", flush=True)
    tasks = set()

    async def answer(client: bytes, payload: bytes) -> None:
        request = decoder.decode(payload)
        async for number in tokens(request.sampling.max_tokens):
            last = number == request.sampling.max_tokens - 1
            delta = Delta(request.id, 0, b"\1\0\0\0", " word", "length" if last else None, Usage() if last else None)
            await socket.send_multipart([client, encoder.encode(Deltas([delta]))])

    while True:
        client, payload = await socket.recv_multipart()
        task = asyncio.create_task(answer(client, payload))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    if sys.argv[1] == "http":
        serve_http(sys.argv[2])
    else:
        asyncio.run(serve_zmq(sys.argv[2]))
