"""All settings, frozen, each with the name that users know from vLLM and SGLang where it means
the same. `resolve` is the only place where a default that depends on something is decided, but for
those that only the loaded checkpoint and its device tell (dtype, KV dtype, pool, context), which the
worker's loader decides; the command line is generated from these fields (see `radixrt/cli.py`), and
the environment is read nowhere else."""

from __future__ import annotations

import dataclasses
import os
import re
import reprlib
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar


class Form(NamedTuple):
    """What a text may be, and how that is said."""

    holds: Callable[[str], object]
    words: str


DEVICE = Form(re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?").fullmatch, "auto, cpu, cuda or cuda:N")
NAME = Form(
    lambda text: text.isprintable() and len(text.encode(errors="replace")) <= 200,  # ZMQ takes 255, with what follows
    "at most 200 bytes, all of which can be printed",
)
MOST = 1 << 40
"""Of any number: what no machine has so many of."""
MOST_TOKENS = (1 << 31) - 1
MOST_SECONDS = 604_800.0
MOST_PORT = 65_535


def setting(
    default: Any, help: str, *, least: float | None = None, most: float = MOST, form: Form | None = None
) -> Any:
    """A field with its one line of help, which is also its docstring on the command line, and what it may be: a number
    from `least` to `most`, a text of a `form` (see `check`)."""
    metadata = {"help": help, "least": least, "most": most, "form": form}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


SESSION_TOKENS = (
    "generated tokens that a process remembers, so that answers sent back as text keep their ids (0: none); an answer "
    "counts for 32 at least; the router remembers what it served over ZMQ, a front end what it served itself, and what "
    "others did of the chats that come to it, where several share (--shared-bytes)"
)
RESPONSE_BYTES = (
    "memory of a front end for responses that previous_response_id may name (0: none); when it is full, the tenant "
    "that holds most gives; where several front ends share, the router keeps them for all, in --shared-bytes instead"
)
KEEP_THINKING = "thinking that the chat template drops from earlier answers stays in the prompt"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker: one model on one device, or on several that share it."""

    model: str = setting("", "checkpoint folder, hub name, or nano")
    served_model_name: str = setting("", "name clients use (default: the folder's name)")
    router: str = setting("", "ZMQ address of the router's worker socket")
    name: str = setting("", "unique worker name (default: host, pid, four hex digits)", form=NAME)
    device: str = setting("auto", "auto, cpu or cuda[:n]", form=DEVICE)
    tensor_parallel_size: int = setting(
        1, "ranks of a worker: GPUs side by side, each with a part of every matrix", least=1, most=64
    )
    dtype: str = setting("auto", "weights and activations: auto, float32, bfloat16, float16")
    quantization: str = setting(
        "auto", "matrix products in FP8 on a GPU: auto (of weights that are stored so), fp8 (of others too), none"
    )
    kv_cache_dtype: str = setting("auto", "KV pages: auto, float32, bfloat16, fp8_e4m3, fp8_e5m2")
    kv_scales: str = setting("auto", "of FP8 pages: auto (the checkpoint's, else calibrated), none (1)")
    page_size: int = setting(1, "tokens in a KV page", least=1, most=1 << 16)
    max_total_tokens: int = setting(0, "token slots in the KV pool (0: from memory)", least=0, most=MOST_TOKENS)
    max_model_len: int = setting(0, "longest prompt plus output, tokens (0: the model's)", least=0, most=MOST_TOKENS)
    max_num_seqs: int = setting(256, "most requests running at once", least=1, most=1 << 16)
    max_pinned_share: float = setting(
        0.25, "share of the pool for a tenant's pinned prefixes (cache_control)", least=0.0, most=1.0
    )
    max_num_batched_tokens: int = setting(
        0, "token budget of a step, the prefill chunk (0: 8192 on a GPU, 512 on a CPU)", least=0, most=1 << 24
    )
    gpu_memory_utilization: float = setting(0.9, "share of the GPU's memory to use", least=0.01, most=1.0)
    deterministic: bool = setting(
        False, "results do not depend on the batch, to the last bit (always so with FP8 pages on a CPU; slower)"
    )
    attention_backend: str = setting("auto", "auto, flashinfer or triton (GPUs), torch")
    tree_attention: str = setting("auto", "requests read what they share once: auto or on (where it pays), off")
    jump_forward: bool = setting(
        True, "text that a grammar forces is appended, not drawn, and JSON of a schema is on one line"
    )
    speculative_algorithm: str = setting(
        "auto", "drafts, verified several tokens at a time: ngram (by what stood before), none, auto (ngram on a GPU)"
    )
    speculative_num_draft_tokens: int = setting(
        8, "most tokens that are drafted for a request in a step", least=1, most=1 << 10
    )
    enforce_eager: bool = setting(False, "no CUDA graphs")
    cpu_threads: int = setting(
        0, "threads that compute on a CPU, of each rank (0: torch's default)", least=0, most=1 << 12
    )
    load_format: str = setting("auto", "auto: safetensors; dummy: random weights from config.json")
    seed: int = setting(0, "seed of dummy weights", least=0, most=(1 << 63) - 1)
    check: bool = setting(False, "assert the page accounting after every step (slow)")
    fake: str = setting("", "no model: PREFILL_TOKENS_PER_S,DECODE_STEP_S time model, e.g. 50000,0.01")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The router: clients on one ZMQ socket, workers on another."""

    model: str = setting("", "checkpoint folder, or nano, whose tokenizer and template serve text")
    served_model_name: str = setting("", "name clients use (default: the folder's name)")
    tokenizer: str = setting("", "tokenizer folder (default: the model's; 'none' serves ids only)")
    chat_template: str = setting("", "file with a Jinja chat template in place of the checkpoint's")
    client_address: str = setting("tcp://127.0.0.1:5555", "ZMQ address for clients")
    worker_address: str = setting("tcp://127.0.0.1:5556", "ZMQ address for workers")
    api_key: tuple[str, ...] = setting(
        (), "TENANT:KEY, or @FILE with one a line, repeatable; without any, all are tenant 'default'"
    )
    worker_timeout: float = setting(
        5.0, "seconds of silence after which a worker is lost (each speaks once a second)", least=2.0, most=MOST_SECONDS
    )
    max_queued_requests: int = setting(
        4096,
        "requests in flight, all workers; more get 429; the last eighth is for tenants that have less than that",
        least=1,
    )
    tokenizer_threads: int = setting(2, "threads that tokenize", least=1, most=1 << 10)
    report_tokens: int = setting(16_000_000, "tokens remembered for the infinite-cache bound, 5 bytes each", least=0)
    session_tokens: int = setting(4_000_000, SESSION_TOKENS, least=0)
    keep_thinking: bool = setting(False, KEEP_THINKING)
    state_bytes: int = setting(
        256 << 20, "memory of the router for what programs have said (0: they send it every time)", least=0
    )
    shared_bytes: int = setting(
        256 << 20, "memory of the router for what several front ends share: ids of answers, stored responses", least=0
    )
    pause_seconds: float = setting(
        60.0, "longest time that the cache keeps a program for a tool that runs", least=0.0, most=MOST_SECONDS
    )
    curve_secret_key: str = setting("", "file with a CURVE secret key; needed beyond loopback")
    http: FrontendConfig | None = None
    """A front end on the router's own event loop."""
    tells: int | None = None
    """Of a pipe to the process that started this one: it is told once the router listens (`children.tell_parent`)."""
    near_address: str = ""
    """Where workers that the same parent starts reach it, beside `worker_address`."""


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """One HTTP front-end process."""

    model: str = setting("", "checkpoint folder, or nano, whose tokenizer and template serve text")
    served_model_name: str = setting("", "name clients use (default: the folder's name)")
    tokenizer: str = setting("", "tokenizer folder (default: the model's; 'none' serves ids only)")
    chat_template: str = setting("", "file with a Jinja chat template in place of the checkpoint's")
    router: str = setting("tcp://127.0.0.1:5555", "ZMQ address of the router's client socket")
    host: str = setting("127.0.0.1", "address to listen on; beyond loopback API keys are needed")
    port: int = setting(8000, "port to listen on (0: a free one)", least=0, most=MOST_PORT)
    api_key: tuple[str, ...] = setting((), "TENANT:KEY, or @FILE with one a line, repeatable")
    allowed_origins: tuple[str, ...] = setting((), "origin whose web pages may call (CORS), repeatable; * for all")
    max_body_bytes: int = setting(32 << 20, "largest request body", least=1)
    max_model_len: int = setting(
        0, "longest prompt plus output, tokens (0: what the router says)", least=0, most=MOST_TOKENS
    )
    tokenizer_threads: int = setting(2, "threads that tokenize", least=1, most=1 << 10)
    tool_call_parser: str = setting(
        "auto",
        "how the model writes tool calls: auto, none, hermes, qwen3_coder, llama3_json, mistral, deepseek_v3, "
        "deepseek_v31, kimi_k2, glm45, glm47, minimax_m2, seed_oss, granite, phi4_mini_json, nemotron_json, "
        "openai (gpt-oss' channels)",
    )
    reasoning_parser: str = setting(
        "auto",
        "how it marks its thoughts: auto, none, deepseek_r1, qwen3, glm45, minimax_m2, mistral, seed_oss, "
        "openai_gptoss",
    )
    generation_config: str = setting("auto", "sampling defaults: auto (the model's generation_config.json), none")
    session_tokens: int = setting(4_000_000, SESSION_TOKENS, least=0)
    keep_thinking: bool = setting(False, KEEP_THINKING)
    response_bytes: int = setting(256 << 20, RESPONSE_BYTES, least=0)
    share_sessions: bool = setting(
        False, "sessions and stored responses are shared with the router's other front ends (serve sees to it)"
    )
    shares_port: bool = setting(False, "other front ends listen on the port, too (serve sees to it)")


@dataclass(frozen=True, slots=True)
class StackConfig:
    """Everything that `radixrt serve` starts. `worker` is the pattern of all workers."""

    router: RouterConfig
    worker: WorkerConfig
    frontend: FrontendConfig
    workers: int = setting(1, "workers, each with a copy of the model (data parallel)", least=1, most=1 << 12)
    api_server_count: int = setting(
        1, "HTTP front ends: 1 lives in the router's process, more in their own; 0: ZMQ only", least=0, most=1 << 10
    )
    data_parallel_backend: str = setting(
        "mp", "where workers run: mp (processes of this machine), ray (wherever the Ray cluster has room)"
    )
    ray_address: str = setting("auto", "of the Ray cluster: HOST:PORT, auto (the one that this machine is part of)")
    ready_timeout: float = setting(600.0, "seconds until every worker must serve", least=0.0, most=MOST_SECONDS)
    log_level: str = "info"
    """Of the processes that are started."""


AnyConfig = TypeVar("AnyConfig", WorkerConfig, RouterConfig, FrontendConfig)


def check(config: Any) -> None:
    """ValueError, in one line, names the flag of a setting that is not what it may be."""
    for one in dataclasses.fields(config):
        value, form = getattr(config, one.name), one.metadata.get("form")
        least, most = one.metadata.get("least"), one.metadata.get("most")
        if form is not None and not form.holds(value):
            raise ValueError(f"{flag(one.name)} {reprlib.repr(value)}: expected {form.words}")
        if least is not None and not least <= value <= most:  # what is no number (nan) is not either
            raise ValueError(f"{flag(one.name)} {value}: expected a number from {least:g} to {most:.15g}")


def flag(name: str) -> str:
    """Of a field, on the command line."""
    return "--" + name.replace("_", "-")


def http_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


NANO = Path(__file__).parent / "assets" / "nano"
"""The small model that comes along; its README.md says what it can do."""


def model_folder(name: str) -> str:
    """`nano` is the model of this package, unless the current directory has a folder of that name; else `name`."""
    return str(NANO) if name == NANO.name and not os.path.isdir(name) else name


def resolve(config: AnyConfig) -> AnyConfig:
    """`config` with every default decided that the machine alone tells. Resolving twice changes nothing."""
    changes: dict[str, Any] = {"model": model_folder(config.model)}
    if not config.served_model_name:
        changes["served_model_name"] = os.path.basename(os.path.normpath(config.model)) if config.model else ""
    if isinstance(config, WorkerConfig):
        on_gpu = config.device.startswith("cuda") or (config.device == "auto" and gpu_count() > 0 and not config.fake)
        if config.device == "auto":
            changes["device"] = "cuda" if on_gpu else "cpu"
        if config.speculative_algorithm == "auto":
            changes["speculative_algorithm"] = "ngram" if on_gpu else "none"
        if not config.name:
            changes["name"] = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        if not config.max_num_batched_tokens:
            changes["max_num_batched_tokens"] = 8192 if on_gpu else 512
    else:
        changes["tokenizer"] = model_folder(config.tokenizer) or changes["model"] or "none"
    return dataclasses.replace(config, **changes)


def gpu_count() -> int:
    """NVIDIA GPUs that this process may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0
