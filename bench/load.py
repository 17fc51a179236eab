"""A load generator in a process of its own, so that its CPU time is not counted; raw sockets on one event loop.

    python -m bench.load http|zmq ADDRESS  < a line of JSON: {"streams": n, "tokens": n} or {"requests": n, ...}

Prints a line of JSON: seconds, tokens received, its own CPU seconds, and a digest of the text.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from typing import Any

import msgspec
import numpy as np
import uvloop

from radixrt import wire
from radixrt.messages import ClientReply, Deltas, Generate, Sampling, TokenPrompt

_reply = wire.Decoder(ClientReply)


def prompt_ids(number: int, tokens: int, vocab_size: int) -> np.ndarray:
    """The token ids of a prompt, the first half of which is the same for all prompts."""
    shared = np.random.default_rng(0).integers(3, vocab_size, tokens // 2, dtype=np.int32)
    own = np.random.default_rng(number + 1).integers(3, vocab_size, tokens - len(shared), dtype=np.int32)
    return np.concatenate([shared, own])


# ---------------------------------------------------------------- HTTP


START = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


async def http_request(host: str, port: int, body: bytes) -> bytes:
    """Send one request on a new connection. Returns the bytes of the response, with headers."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    head = f"{START}connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read(-1)
    writer.close()
    return answer


async def http_requests(host: str, port: int, bodies: list[bytes]) -> int:
    """Send requests one after the other on a persistent connection. Returns how many had status 200."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    fine = 0
    for body in bodies:
        writer.write(f"{START}content-length: {len(body)}\r\n\r\n".encode() + body)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        fine += head.startswith(b"HTTP/1.1 200")
    writer.close()
    return fine


def http_body(work: dict[str, Any], number: int, stream: bool) -> bytes:
    ids = prompt_ids(number, work["prompt"], work["vocab"]).tolist()
    fields = {"prompt": ids, "max_tokens": work["tokens"], "temperature": 0, "ignore_eos": True, "stream": stream}
    return json.dumps(fields).encode()


async def run_http(address: str, work: dict[str, Any]) -> dict[str, Any]:
    host, _, port = address.removeprefix("http://").partition(":")
    if "requests" in work:
        each = work["requests"] // work["concurrency"]
        batches = [[http_body(work, c * each + i, False) for i in range(each)] for c in range(work["concurrency"])]
        fine = await asyncio.gather(*(http_requests(host, int(port), batch) for batch in batches))
        return {"requests": sum(fine)}
    bodies = [http_body(work, number, True) for number in range(work["streams"])]
    answers = await asyncio.gather(*(http_request(host, int(port), body) for body in bodies))
    chunks = [line[6:] for answer in answers for line in answer.split(b"\n") if line.startswith(b"data: {")]
    text = b"".join(json.loads(chunk)["choices"][0]["text"].encode() for chunk in chunks)
    return {"chunks": len(chunks), "digest": hashlib.sha256(text).hexdigest()}


# ---------------------------------------------------------------- ZMQ


async def run_zmq(address: str, work: dict[str, Any]) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    done, seen = loop.create_future(), {"tokens": 0, "open": work.get("streams") or work["requests"]}
    texts: dict[int, list[str]] = {}
    waiting = []

    def receive(payload: bytes) -> None:
        reply = _reply.decode(payload)
        assert isinstance(reply, Deltas), reply
        for delta in reply.items:
            seen["tokens"] += len(delta.ids) // 4
            texts.setdefault(delta.id, []).append(delta.text)
            if delta.finish is not None:
                seen["open"] -= 1
                if waiting:
                    socket.send(waiting.pop())
        if not seen["open"] and not done.done():
            done.set_result(None)

    socket = wire.DealerSocket(address, receive)
    sampling = Sampling(max_tokens=work["tokens"], temperature=0.0, ignore_eos=True)
    messages = [
        wire.encode(
            Generate(
                id=number,
                prompt=TokenPrompt(prompt_ids(work.get("first", 0) + number, work["prompt"], work["vocab"]).tobytes()),
                sampling=sampling,
                stream="streams" in work,
                text=work["text"],
            )
        )
        for number in range(seen["open"])
    ]
    first = work.get("concurrency", len(messages))
    waiting.extend(messages[first:])
    for message in messages[:first]:
        socket.send(message)
    await done
    socket.close()
    text = "".join("".join(texts[number]) for number in sorted(texts))
    return {"tokens": seen["tokens"], "digest": hashlib.sha256(text.encode()).hexdigest()}


def main() -> None:
    kind, address = sys.argv[1:3]
    for line in sys.stdin:
        work = msgspec.json.decode(line)
        began, cpu = time.perf_counter(), time.process_time()
        found = uvloop.run((run_http if kind == "http" else run_zmq)(address, work))
        print(
            json.dumps(found | {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}), flush=True
        )


if __name__ == "__main__":
    main()
