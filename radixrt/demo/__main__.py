"""python -m radixrt.demo [FOLDER]: everything once, on this machine's processor."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from radixrt.client import Client
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.demo.checkpoint import make_checkpoint
from radixrt.demo.program import advise
from radixrt.launch import Stack, StartError, free_tcp_address
from radixrt.report import to_text

QUESTIONS = ("How does an agent save work?", "What happens when memory runs out?")


def say(text: str) -> None:
    print(text, flush=True)


def configure(folder: Path) -> StackConfig:
    """A router, two CPU workers and an HTTP front end on free ports."""
    model = str(folder)
    router = RouterConfig(model=model, client_address=free_tcp_address(), worker_address=free_tcp_address())
    worker = WorkerConfig(model=model, device="cpu", max_total_tokens=16_384, max_model_len=4096)
    frontend = FrontendConfig(model=model, port=int(free_tcp_address().rpartition(":")[2]))
    return StackConfig(resolve(router), worker, resolve(frontend), workers=2, ready_timeout=120.0)


def run_program(client: Client) -> None:
    """Branches that share a trunk, twice: the second run finds the rules in the cache."""
    for question in QUESTIONS:
        say(f"\n> {question}")
        began = time.perf_counter()
        for what, text, prompt, cached in advise.run(client, question):
            say(f"  {what:9} {prompt:4} prompt tokens, {cached:4} cached   {' '.join(text.split())[:64]}")
        say(f"  {time.perf_counter() - began:.2f} s")


def stream_chat(url: str, messages: list[dict[str, str]]) -> Iterator[str]:
    """Pieces of an answer; the usage goes to `messages` no more than the answer does."""
    body = {"messages": messages, "max_tokens": 32, "temperature": 0.7, "seed": 5, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    headers = {"x-radixrt-program": "chat"}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if chunk["choices"]:
                    yield chunk["choices"][0]["delta"].get("content", "")
                else:
                    usage = chunk["usage"]
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
                    yield f"   [{usage['prompt_tokens']} prompt tokens, {cached} cached]"


def run_chat(url: str) -> None:
    """Two turns; the second resends the first."""
    messages: list[dict[str, str]] = []
    for question in ("Tell me about the tree.", "And what does the router do?"):
        messages.append({"role": "user", "content": question})
        print(f"\n> {question}\n  ", end="")
        pieces = []
        for piece in stream_chat(url, messages):
            print(" ".join(piece.splitlines()) if "\n" in piece else piece, end="", flush=True)
            pieces.append(piece)
        messages.append({"role": "assistant", "content": "".join(pieces[:-1])})
    print()


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".demo/model")
    say(f"1. A small checkpoint, trained for some seconds on one page: {folder}")
    began = time.perf_counter()
    make_checkpoint(folder)
    say(f"   {time.perf_counter() - began:.1f} s")
    say("2. A router, two CPU workers, an HTTP front end")
    config = configure(folder)
    try:
        with Stack(config) as stack:
            began = time.perf_counter()
            stack.start()
            url = f"http://{config.frontend.host}:{config.frontend.port}"
            say(f"   ready after {time.perf_counter() - began:.1f} s: ZMQ {config.router.client_address}, HTTP {url}")
            with Client(config.router.client_address) as client:
                say("3. A branching program over ZMQ: a plan, three views that fork off it, a choice, a summary")
                run_program(client)
                say("\n4. A chat over HTTP, streamed")
                run_chat(url)
                say("\n5. What was reused:  radixrt report\n")
                print(to_text(client.report()))
    except StartError as error:
        say(f"   {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
