"""All settings, as frozen dataclasses. Settings that mean the same as in vLLM or SGLang have the same names.

The command line is generated from the fields (see `radixrt/cli.py`). `resolve` decides all defaults that depend on the
machine or on other settings; only those that depend on the loaded checkpoint and its device (dtypes, pool size, context
length) are decided by the worker's loader. No other module reads environment variables.
"""

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

from radixrt.known_models import KNOWN


class Form(NamedTuple):
    """A condition on the value of a setting, and its description for error messages."""

    holds: Callable[[Any], object]
    words: str


def one_of(*names: str) -> Form:
    return Form(names.__contains__, f"{', '.join(names[:-1])} or {names[-1]}")


DEVICE = Form(re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?").fullmatch, "auto, cpu, cuda or cuda:N")
MODEL_IMPL = one_of("auto", "radixrt", "transformers")
DTYPE = one_of("auto", "float32", "bfloat16", "float16", "float", "half")
QUANTIZATION = Form(one_of("auto", "fp8", "none").holds, "auto (as they are stored: AWQ, GPTQ, FP8), fp8 or none")
KV_CACHE_DTYPE = one_of("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
KV_SCALES = one_of("auto", "none")
ATTENTION_BACKEND = one_of("auto", "flashinfer", "triton", "torch")
TREE_ATTENTION = one_of("auto", "on", "off")
DRAFTING = ("auto", "ngram", "mtp", "nextn", "none")
SPECULATIVE_ALGORITHM = Form(lambda text: text.lower() in DRAFTING, one_of(*DRAFTING).words)
LOAD_FORMAT = one_of("auto", "safetensors", "gguf", "dummy")
NUMBER = r"[0-9]*\.?[0-9]+(e[+-]?[0-9]+)?"
FAKE = Form(re.compile(f"({NUMBER},{NUMBER})?").fullmatch, "PREFILL_TOKENS_PER_S,DECODE_STEP_S")
GENERATION_CONFIG = one_of("auto", "none", "vllm")
BACKEND = one_of("mp", "ray")
NAME = Form(
    lambda text: text.isprintable() and len(text.encode(errors="replace")) <= 200,
    "at most 200 bytes, all of which can be printed",
)
GIBIBYTES = Form(re.compile(r"auto|none|[0-9]{1,6}(\.[0-9]{1,12})?").fullmatch, "auto, none or a number of GiB")
EVICTION = one_of("lru", "lfu", "priority", "returns")
MAX_NUMBER = 1 << 40
"""The largest value of a number setting for which no smaller limit is given."""
MAX_TOKENS = (1 << 31) - 1
MAX_SECONDS = 604_800.0
MAX_PORT = 65_535


def setting(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    most: float = MAX_NUMBER,
    form: Form | None = None,
    several: bool = False,
    json: bool = False,
) -> Any:
    """A dataclass field with its help text for the command line, and the values that `check` allows: numbers from
    `least` to `most`, or texts of a `form`. `several`: the flag takes one or more values at once; `json`: also a JSON
    list of them."""
    metadata = {"help": help, "least": least, "most": most, "form": form, "several": several, "json": json}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


PORT, CLIENT_PORT = 8000, 5555
"""Of HTTP and of ZMQ for clients, by default."""


def client_address(port: int = PORT) -> str:
    """The ZMQ address for clients of a stack that serves HTTP at `port`: its port is as far from CLIENT_PORT as that is
    from PORT, so that stacks with different ports live side by side. For ports below that have none, it is
    CLIENT_PORT."""
    moved = CLIENT_PORT + port - PORT
    return f"tcp://127.0.0.1:{moved if moved >= 1024 else CLIENT_PORT}"


SESSION_TOKENS = (
    "most generated tokens whose ids a process keeps, so that answers that clients send back as text are encoded by "
    "the same ids (0: none); each answer counts as at least 32; the router keeps answers served over ZMQ, a front end "
    "those that it has served, and those of other front ends that it has needed (--shared-bytes)"
)
RESPONSE_BYTES = (
    "memory of a front end for responses that previous_response_id can refer to (0: none); when it is full, responses "
    "of the tenant that has most are dropped; several front ends keep them in the router (--shared-bytes) instead, as "
    "does one with --state-path"
)
RUNTIME_LORA = (
    "let clients load, replace and unload LoRA adapters while it serves (/v1/load_lora_adapter, "
    "/v1/unload_lora_adapter): all clients if there are no API keys, else those with the --admin-api-key; needs "
    "--enable-lora"
)
SHUTDOWN = (
    "a process that is told to stop finishes the requests in flight, and refuses new ones (503), for at most so many "
    "seconds (0: it ends at once); so long has a drained worker, before its requests continue elsewhere"
)
API_KEY = (
    "KEY that clients send, or TENANT:KEY for tenants that share no prefixes, or @FILE with one per line; repeatable; "
    "keys without a tenant are all of tenant 'default'"
)
TOOL_CALL_PARSER = (
    "format of the model's tool calls: auto, none, hermes, qwen3_coder, llama3_json, mistral, deepseek_v3, "
    "deepseek_v31, deepseek_v32, kimi_k2, glm45, glm47, minimax_m2, seed_oss, granite, phi4_mini_json, "
    "nemotron_json, olmo3, pythonic, lfm2, gemma4, cohere_command, apertus, hy_v3, hunyuan_a13b, solar_open, "
    "openai (gpt-oss' channels)"
)
REASONING_PARSER = (
    "format of the model's thinking: auto, none, deepseek_r1, qwen3, glm45, minimax_m2, mistral, seed_oss, "
    "olmo3, gemma4, cohere_command, apertus, hy_v3, solar_open, openai_gptoss"
)
KEEP_THINKING = "keep the thinking of earlier answers in the prompt even if the chat template drops it"
KEEP_CALLS = (
    "show tool calls of earlier answers as they were generated, also where the client sends them back with other "
    "arguments, as Claude Code does; calls are known by their ids"
)
SPLIT_SPECIAL = (
    "encode the text of special tokens in messages as text, so that no tool's result ends its turn or begins another"
)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker: a model on one device, or with its weights split over several GPUs."""

    model: str = setting("", "checkpoint folder, hub name, or nano")
    served_model_name: str = setting("", "model name for clients (default: the folder's name)")
    router: str = setting("", "ZMQ address of the router's worker socket")
    name: str = setting("", "unique worker name (default: host, pid, four hex digits)", form=NAME)
    device: str = setting("auto", "auto (a GPU if there is one), cpu, cuda or cuda:N", form=DEVICE)
    model_impl: str = setting(
        "auto",
        "who computes the model: radixrt, transformers (all but attention; dense models, without --lora-modules, "
        "--tensor-parallel-size, --deterministic, --speculative-algorithm mtp and quantized weights), auto (radixrt if "
        "it has the model's family)",
        form=MODEL_IMPL,
    )
    tensor_parallel_size: int = setting(
        1, "ranks (GPUs) of each worker, each with a part of every weight matrix", least=1, most=64
    )
    dtype: str = setting(
        "auto",
        "dtype of weights and activations: auto (float32 on a CPU, 16 bits on a GPU), float32, bfloat16, float16",
        form=DTYPE,
    )
    quantization: str = setting(
        "auto",
        "what to do with quantized weights on a GPU: auto (keep FP8, INT4, and MXFP4 experts, as stored), fp8 (round "
        "weights other than those experts to FP8, too), none (dequantize all)",
        form=QUANTIZATION,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "dtype of KV pages: auto, float32, bfloat16, float16, fp8_e4m3 (or fp8), fp8_e5m2",
        form=KV_CACHE_DTYPE,
    )
    kv_scales: str = setting(
        "auto", "scales of FP8 pages: auto (the checkpoint's, else calibrated), none (1)", form=KV_SCALES
    )
    page_size: int = setting(1, "tokens per KV page", least=1, most=1 << 16)
    max_total_tokens: int = setting(0, "token slots in the KV pool (0: what fits in memory)", least=0, most=MAX_TOKENS)
    max_mamba_cache_size: int = setting(
        0, "recurrent states (of linear attention, Mamba-2) of running requests, drafted tokens and cached prefixes "
        "(0: what fits in half of the memory for the cache)", least=0, most=1 << 20
    )  # fmt: skip
    kv_offloading_size: str = setting(
        "auto", "GiB of host memory for evicted pages and recurrent states, of all GPUs of a worker together (auto: a "
        "quarter of what is available, divided by the number of GPUs; none on a CPU)",
        form=GIBIBYTES,
    )  # fmt: skip
    kv_disk_path: str = setting(
        "", "folder in which KV pages and recurrent states outlive memory and restarts, for workers of one machine "
        "together (\"\": none)"
    )  # fmt: skip
    kv_disk_size: float = setting(64.0, "GiB that all files in --kv-disk-path may take", least=0.01, most=1e6)
    kv_disk_key_file: str = setting(
        "", "file with a secret, at least 32 bytes, with which what is in --kv-disk-path is encrypted (\"\": it is not)"
    )  # fmt: skip
    max_model_len: int = setting(
        0,
        "most tokens of prompt and output together, up to the model's limit (0: that limit)",
        least=0,
        most=MAX_TOKENS,
    )
    max_num_seqs: int = setting(256, "most requests running at once", least=1, most=1 << 16)
    max_pinned_share: float = setting(
        0.25, "share of the KV pool that pinned prefixes (cache_control) of a tenant may use", least=0.0, most=1.0
    )
    radix_eviction_policy: str = setting(
        "lru",
        "which cached prefixes go first when pages run out, on the device and in host memory: lru (least recently "
        "used), lfu (used by the fewest requests), priority (of the requests with the highest value of `priority`, "
        "which are the least urgent), returns (that first of which it is learned, by tenant, tool and pace, that it "
        "returns late or never), and of equal ones the least recently used; recurrent states always go least "
        "recently used first",
        form=EVICTION,
    )
    max_num_batched_tokens: int = setting(
        0,
        "most tokens in a step, and so in a prefill chunk (0: 8192 on a GPU, 512 on a CPU)",
        least=0,
        most=1 << 24,
    )
    gpu_memory_utilization: float = setting(0.9, "share of the GPU's memory to use", least=0.01, most=1.0)
    deterministic: bool = setting(
        False, "results are bitwise independent of the batch (slower; always so with FP8 pages on a CPU)"
    )
    enable_lora: bool = setting(False, "serve LoRA adapters: those of --lora-modules, and those that clients load")
    lora_modules: tuple[str, ...] = setting(
        (),
        'LoRA adapters in PEFT\'s format, NAME=FOLDER or {"name": NAME, "path": FOLDER}, one or more; repeatable; each '
        "name is a model for clients; requests of all adapters and of the model run in one batch",
        several=True,
        json=True,
    )
    max_lora_rank: int = setting(16, "largest rank of a LoRA adapter", least=1, most=1 << 10)
    max_loras: int = setting(
        0,
        "most LoRA adapters that are loaded at once; with --allow-runtime-lora-updating there is memory for one more, "
        "so that one can be replaced (0: as many as --lora-modules has, at least one)",
        least=0,
        most=1 << 10,
    )
    allow_runtime_lora_updating: bool = setting(False, RUNTIME_LORA)
    attention_backend: str = setting(
        "auto", "attention kernels: auto, flashinfer or triton (on a GPU), torch", form=ATTENTION_BACKEND
    )
    tree_attention: str = setting(
        "auto",
        "prefixes that requests of a batch share are read from memory once: auto or on (where it pays off), off",
        form=TREE_ATTENTION,
    )
    jump_forward: bool = setting(
        True, "append text that a grammar forces instead of sampling it; JSON of a schema is then on one line"
    )
    speculative_algorithm: str = setting(
        "auto",
        "drafting of tokens: ngram (prompt lookup), mtp or nextn (ngram, and the model's layer for multi-token "
        "prediction), none, auto (ngram on a GPU, and on a CPU for GGUF files; else none)",
        form=SPECULATIVE_ALGORITHM,
    )
    speculative_num_draft_tokens: int = setting(8, "most draft tokens per request and step", least=1, most=1 << 10)
    enforce_eager: bool = setting(False, "do not use CUDA graphs")
    cpu_threads: int = setting(0, "compute threads of each rank on a CPU (0: torch's default)", least=0, most=1 << 12)
    load_format: str = setting(
        "auto",
        "weights: auto (safetensors, or of a GGUF file), dummy (random, from config.json alone)",
        form=LOAD_FORMAT,
    )
    seed: int = setting(0, "seed of dummy weights", least=0, most=(1 << 63) - 1)
    watchdog_timeout: float = setting(
        300.0,
        "a worker whose step takes longer than so many seconds ends, and is started again; a shorter limit may be "
        "learned from earlier steps (0: never)",
        least=0.0,
        most=MAX_SECONDS,
    )
    shutdown_timeout: float = setting(30.0, SHUTDOWN, least=0.0, most=MAX_SECONDS)
    check: bool = setting(False, "assert the page accounting after every step (slow)")
    fake: str = setting(
        "",
        "simulate a model with so many prefill tokens per second, and seconds per decode step, e.g. 50000,0.01",
        form=FAKE,
    )


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The router: serves clients on one ZMQ socket, and workers on another."""

    model: str = setting("", "checkpoint folder with tokenizer and chat template, or nano")
    served_model_name: str = setting("", "model name for clients (default: the folder's name)")
    model_aliases: tuple[str, ...] = setting(
        (),
        "further names of the model, one or more, for clients that ask for a model by a name of their own; with "
        "wildcards, as in 'claude-*', for names that change, and '*' for any; an adapter of such a name comes first",
        several=True,
    )
    tokenizer: str = setting("", "tokenizer folder (default: the model's); none: prompts are token ids only")
    chat_template: str = setting("", "file with a Jinja chat template to use instead of the checkpoint's")
    client_address: str = setting(
        "",
        f"ZMQ address for clients (default: {client_address()}; with serve the port moves with --port: 5655 for 8100)",
    )
    worker_address: str = setting(
        "",
        "ZMQ address for workers that join from elsewhere, e.g. tcp://127.0.0.1:5556 (default: none; those that serve "
        "starts on this machine need none)",
    )
    api_key: tuple[str, ...] = setting((), API_KEY + "; without keys, all requests are of tenant 'default'")
    admin_api_key: str = setting(
        "",
        "KEY, or @FILE with it, of the one who runs this: where there are API keys, it alone loads LoRA adapters, "
        "drains workers and empties caches, and sees the figures of all tenants (/metrics, /v1/report); it is no "
        "tenant's",
    )
    allow_runtime_lora_updating: bool = setting(False, RUNTIME_LORA)
    worker_timeout: float = setting(
        5.0,
        "a worker is lost after so many seconds without a message (it sends one per second)",
        least=2.0,
        most=MAX_SECONDS,
    )
    max_queued_requests: int = setting(
        4096,
        "most requests in flight, over all workers; more get status 429; with several tenants, the last eighth is for "
        "those with at most an eighth in flight",
        least=1,
    )
    tokenizer_threads: int = setting(2, "threads for tokenization", least=1, most=1 << 10)
    report_tokens: int = setting(
        16_000_000, "most tokens in the report's infinite cache, of about 5 bytes each", least=0
    )
    session_tokens: int = setting(4_000_000, SESSION_TOKENS, least=0)
    keep_thinking: bool = setting(False, KEEP_THINKING)
    keep_generated_calls: bool = setting(False, KEEP_CALLS)
    split_special_tokens: bool = setting(True, SPLIT_SPECIAL)
    tool_call_parser: str = setting("auto", TOOL_CALL_PARSER)
    reasoning_parser: str = setting("auto", REASONING_PARSER)
    state_bytes: int = setting(
        256 << 20,
        "memory of the router for states of programs (0: programs send their whole history each time)",
        least=0,
    )
    shared_bytes: int = setting(
        256 << 20,
        "memory of the router for what several front ends share: token ids of answers, stored responses",
        least=0,
    )
    state_path: str = setting(
        "",
        "folder in which the router keeps what conversations and programs need to go on after a restart: token ids of "
        "answers, stored responses, states of programs (default: none, they are lost)",
    )
    state_size: float = setting(
        4.0,
        "most GiB of --state-path; when it is full, what was used least recently is dropped, of the tenant that has "
        "most",
        least=0.001,
        most=1 << 20,
    )
    pause_seconds: float = setting(
        60.0, "longest time that a program's prefix stays cached while a tool runs", least=0.0, most=MAX_SECONDS
    )
    peer_metrics: bool = setting(
        True, "/metrics also has names that dashboards and aiperf know: those of vLLM and SGLang, as vllm: and sglang:"
    )
    otlp_traces_endpoint: str = setting(
        "",
        "URL of an OpenTelemetry collector (OTLP over HTTP, e.g. http://127.0.0.1:4318/v1/traces) that gets a span of "
        "each request; needs the extra otel (default: no traces)",
    )
    shutdown_timeout: float = setting(30.0, SHUTDOWN, least=0.0, most=MAX_SECONDS)
    curve_secret_key: str = setting("", "file with a CURVE secret key; required to listen beyond loopback")
    http: FrontendConfig | None = None
    """An HTTP front end that runs on the router's event loop, if any."""
    tells: int | None = None
    """File descriptor of a pipe to the parent process, to which the router writes once it listens
    (`subprocesses.tell_parent`)."""
    near_address: str = ""
    """An address of the worker socket for workers that the same parent has started, set by `serve`."""
    near_password: str = ""
    """What they need to connect to `near_address`; `serve` makes another one at each start."""


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """One HTTP front-end process."""

    model: str = setting("", "checkpoint folder with tokenizer and chat template, or nano")
    served_model_name: str = setting("", "model name for clients (default: the folder's name)")
    tokenizer: str = setting("", "tokenizer folder (default: the model's); none: prompts are token ids only")
    chat_template: str = setting("", "file with a Jinja chat template to use instead of the checkpoint's")
    router: str = setting(client_address(), "ZMQ address of the router's client socket")
    host: str = setting("127.0.0.1", "address to listen on; API keys are required to listen beyond loopback")
    port: int = setting(PORT, "port to listen on (0: a free one)", least=0, most=MAX_PORT)
    api_key: tuple[str, ...] = setting((), API_KEY)
    admin_api_key: str = setting(
        "", "KEY, or @FILE with it, of the one who sees all tenants' figures and empties caches"
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "origin whose web pages may send requests (CORS), or a JSON list of some; repeatable; * for all", json=True
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "name by which clients call this server, such as that of a proxy on this machine, or .NAME for all names below "
        "it; repeatable; * for any; without it, a server on a loopback address serves only requests for such addresses",
    )
    ssl_certfile: str = setting("", "file with a TLS certificate, and those that it depends on (PEM): serve HTTPS")
    ssl_keyfile: str = setting("", "file with the certificate's private key (default: --ssl-certfile)")
    max_body_bytes: int = setting(32 << 20, "most bytes in a request body", least=1)
    max_model_len: int = setting(
        0, "most tokens of prompt and output together (0: the router's limit)", least=0, most=MAX_TOKENS
    )
    tokenizer_threads: int = setting(2, "threads for tokenization", least=1, most=1 << 10)
    tool_call_parser: str = setting("auto", TOOL_CALL_PARSER)
    reasoning_parser: str = setting("auto", REASONING_PARSER)
    generation_config: str = setting(
        "auto",
        "sampling defaults: auto (the model's generation_config.json), none or vllm (OpenAI's defaults)",
        form=GENERATION_CONFIG,
    )
    session_tokens: int = setting(4_000_000, SESSION_TOKENS, least=0)
    keep_thinking: bool = setting(False, KEEP_THINKING)
    keep_generated_calls: bool = setting(False, KEEP_CALLS)
    split_special_tokens: bool = setting(True, SPLIT_SPECIAL)
    response_bytes: int = setting(256 << 20, RESPONSE_BYTES, least=0)
    share_sessions: bool = setting(
        False, "share sessions and stored responses with the router's other front ends (set by serve if there are any)"
    )
    shutdown_timeout: float = setting(30.0, SHUTDOWN, least=0.0, most=MAX_SECONDS)
    shares_port: bool = setting(False, "other front ends listen on the same port (set by serve)")


@dataclass(frozen=True, slots=True)
class StackConfig:
    """Everything that `radixrt serve` starts. All workers are configured as `worker`."""

    router: RouterConfig
    worker: WorkerConfig
    frontend: FrontendConfig
    workers: int = setting(
        1, "number of workers, each with a copy of the model (data parallelism)", least=1, most=1 << 12
    )
    api_server_count: int = setting(
        1,
        "number of HTTP front ends: a single one runs in the router's process, several in processes of their own; "
        "0: ZMQ only",
        least=0,
        most=1 << 10,
    )
    data_parallel_backend: str = setting(
        "mp", "where workers run: mp (on this machine), ray (on the machines of a Ray cluster)", form=BACKEND
    )
    ray_address: str = setting("auto", "Ray cluster: HOST:PORT, auto (the one that this machine belongs to)")
    ready_timeout: float = setting(
        600.0, "give up if not all workers serve after so many seconds", least=0.0, most=MAX_SECONDS
    )
    log_level: str = "info"
    """Log level of the child processes."""


AnyConfig = TypeVar("AnyConfig", WorkerConfig, RouterConfig, FrontendConfig)


def check(config: Any) -> None:
    """Raise ValueError, with a one-line message that names the flag, if a setting has a value that is not allowed."""
    for one in dataclasses.fields(config):
        value, form = getattr(config, one.name), one.metadata.get("form")
        least, most = one.metadata.get("least"), one.metadata.get("most")
        if form is not None and not form.holds(value):
            raise ValueError(f"{flag(one.name)} {reprlib.repr(value)}: expected {form.words}")
        if least is not None and not least <= value <= most:  # also true for NaN
            raise ValueError(f"{flag(one.name)} {value}: expected a number from {least:g} to {most:.15g}")


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def http_url(config: FrontendConfig, port: int) -> str:
    """The URL of a front end that listens on `port`."""
    scheme = "https" if config.ssl_certfile else "http"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{port}"


NANO = Path(__file__).parent / "assets" / "nano"
"""The small model that is included; its README.md says what it can do."""


def model_folder(name: str) -> str:
    """What a short name stands for: `nano` for the folder of the included model, one of `known_models` for its name at
    the hub, unless the current directory has a folder of that name. Any other `name` as it is."""
    if os.path.isdir(name):
        return name
    return str(NANO) if name == NANO.name else KNOWN[name].name if name in KNOWN else name


def client_names(model: str) -> list[str]:
    """The names of a model for clients, its own first: ORG/NAME as at the hub, and NAME; of a path its last part."""
    full, last = model_folder(model), os.path.basename(os.path.normpath(model_folder(model))).removesuffix(".gguf")
    at_hub = full.count("/") == 1 and full[0] not in "./~" and not full.endswith(".gguf") and not os.path.exists(full)
    names = [full, last] if at_hub else [last]
    return list(dict.fromkeys([*names, model] if model in KNOWN else names))


def named(config: AnyConfig) -> AnyConfig:
    """With the model's name for clients, if none is set. A router gets the others as aliases."""
    if config.served_model_name or not config.model:
        return config
    name, *others = client_names(config.model)
    changes: dict[str, Any] = {"served_model_name": name}
    if isinstance(config, RouterConfig):
        changes["model_aliases"] = (*config.model_aliases, *others)
    return dataclasses.replace(config, **changes)


def resolve(config: AnyConfig) -> AnyConfig:
    """Fill in all defaults that depend on the machine or on other settings. Idempotent."""
    config = named(config)
    changes: dict[str, Any] = {"model": model_folder(config.model)}
    if isinstance(config, WorkerConfig):
        on_gpu = config.device.startswith("cuda") or (config.device == "auto" and gpu_count() > 0 and not config.fake)
        if config.device == "auto":
            changes["device"] = "cuda" if on_gpu else "cpu"
        algorithm = config.speculative_algorithm.lower()
        if algorithm == "auto" and not on_gpu:
            # On a GPU it depends on the checkpoint; on a CPU rows are cheap if weights stay in 4 or 8 bits.
            is_int = config.model.endswith(".gguf") and config.quantization != "none" and not config.fake
            algorithm = "ngram" if is_int else "none"
        changes["speculative_algorithm"] = "mtp" if algorithm == "nextn" else algorithm
        if not config.name:
            changes["name"] = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        if not config.max_num_batched_tokens:
            changes["max_num_batched_tokens"] = 8192 if on_gpu else 512
    else:
        changes["tokenizer"] = model_folder(config.tokenizer) or changes["model"] or "none"
    if isinstance(config, RouterConfig):
        changes["client_address"] = config.client_address or client_address()
    return dataclasses.replace(config, **changes)


def gpu_count() -> int:
    """The number of NVIDIA GPUs that this process may use, found without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0
