"""Serves language models to agents.

radixrt serve MODEL            start router, workers and HTTP front ends
radixrt pull [NAME]            download a model; without a name: list small ones
radixrt router|worker|frontend start only one of these, for setups of several machines
radixrt plan MODEL             print which GPUs hold a model, and how many agents
radixrt build-kernels MODEL    compile FlashInfer's kernels for a model before its first start
radixrt report                 print the hit-rate report of a running stack
radixrt top                    show what a running stack does now, each second
radixrt run PROGRAM.py         run an agent program against a running stack
radixrt drain WORKER           let a worker of a running stack finish its requests and leave
radixrt keygen FILE            make a CURVE key, for ZMQ beyond loopback
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixrt.checkpoint.files import check_files, check_model
from radixrt.checkpoint.hub import find_files, has_quant, is_complete, is_hub_name
from radixrt.checkpoint.lora_modules import check_lora_modules
from radixrt.config import (
    NANO,
    FrontendConfig,
    RouterConfig,
    StackConfig,
    WorkerConfig,
    check,
    client_address,
    model_folder,
    resolve,
)
from radixrt.flags import Parser, add_fields, add_model, add_notes, from_args, number, parse
from radixrt.launch import launcher
from radixrt.launch.process_main import ROLES, check_role, follow_parent, read_config, run_role
from radixrt.launch.pull import folders, known_models, pull
from radixrt.process.shutdown import Pulse
from radixrt.version import __version__
from radixrt.wire.keys import is_private, make_secret_key, public_suffix

if TYPE_CHECKING:
    from radixrt.client import Client

INTERNAL = {"router", "name", "shares_port"}
"""Fields that `serve` sets itself."""
PLANNED = {
    "tensor_parallel_size",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "kv_offloading_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "enforce_eager",
    "model_impl",
}
"""Settings of a worker that decide what it holds."""
COMPILED = {"dtype", "model_impl"}
"""Those that decide which kernels are compiled."""
log = logging.getLogger("radixrt.cli")

USAGE = "%(prog)s [MODEL] [FLAG ...]"
LOG_LEVEL: dict[str, Any] = {"type": str.lower, "choices": ("debug", "info", "warning", "error")}
RESTART_SECONDS = 600.0
"""How long `radixrt drain --restart` waits until the worker serves again."""
DEFAULT_URL = client_address()


# ---------------------------------------------------------------- keys


def read_keys(args: argparse.Namespace) -> None:
    """Replace each `--api-key @FILE` by the keys in the file. Warns of keys that are not in a file."""
    if "api_key" in args:
        if any(given[:1] != "@" for given in args.api_key):
            _warn_of_key("--api-key", "keys, one per line,")
        args.api_key = [key for given in args.api_key for key in (_keys_in(given[1:]) if given[:1] == "@" else [given])]


def read_admin_key(args: argparse.Namespace) -> None:
    """Replace `--admin-api-key @FILE` by the key in the file. Warns as `read_keys` does."""
    if "admin_api_key" in args:
        args.admin_api_key = read_key(args.admin_api_key, "--admin-api-key")


def read_key(given: str, flag: str = "--api-key") -> str:
    """The key of a client, from `KEY` or `@FILE`. The file may be one for `serve`, with TENANT:KEY, if it has only one
    key. Warns as `read_keys` does."""
    if given[:1] != "@":
        if given:
            _warn_of_key(flag, "the key")
        return given
    keys = _keys_in(given[1:])
    if len(keys) > 1:
        raise ValueError(f"--api-key {given}: there are {len(keys)} keys in the file, and one is needed")
    return keys[0].partition(":")[2] or keys[0]


def _warn_of_key(flag: str, content: str) -> None:
    log.warning("%s: every user of this machine can see it (ps); %s @FILE reads %s from a file", flag, flag, content)


def _keys_in(path: str) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--api-key @{path}: the file is not UTF-8") from error
    lines = (line.strip() for line in text.splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"--api-key @{path}: there is no key in the file")
    if not is_private(path):
        log.warning("%s, with API keys, can be read by others than its owner (chmod 600)", path)
    return keys


# ---------------------------------------------------------------- flags


def build_parser() -> Parser:
    parser = Parser(prog="radixrt", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--version", action="version", version=f"radixrt {__version__}")
    parser.add_argument("--log-level", default="info", **LOG_LEVEL)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="start router, workers and HTTP front ends", usage=USAGE)
    add_model(serve, "checkpoint folder, GGUF file, hub name, or nano, a small model that is included")
    for config in (StackConfig, WorkerConfig, RouterConfig, FrontendConfig):
        add_fields(serve, config, leave_out=INTERNAL)
    add_notes(serve)
    serve.set_defaults(run=_serve)

    download = commands.add_parser("pull", help="download a model of the hub")
    download.add_argument("model", metavar="NAME", nargs="?", help="hub name, or a short one; without: list these")
    download.add_argument("--model-impl", default="auto", help="as of serve: who is to compute it")
    download.set_defaults(run=_pull)

    for role, kind in ROLES.items():
        command = commands.add_parser(role, help=(kind.__doc__ or "").splitlines()[0], usage=USAGE)
        command.add_argument("--config-from-stdin", action="store_true", help=argparse.SUPPRESS)
        command.add_argument("--pulse", type=int, metavar="FD", help=argparse.SUPPRESS)
        add_model(command, "checkpoint folder, GGUF file, hub name, or nano")
        add_fields(command, kind)
        add_notes(command)
        command.set_defaults(run=_role, role=role)

    plan = commands.add_parser("plan", help="what a model takes, and how many agents fit on which GPUs; loads nothing")
    add_model(plan, "checkpoint folder, GGUF file, hub name (of which no weights are fetched), or nano")
    plan.add_argument("--context", type=number, default=0, metavar="TOKENS", help="of an agent (default: 32K)")
    plan.add_argument("--gpu", action="append", metavar="NAME", help="only this GPU; repeatable: H100, A100-40GB, ...")
    plan.add_argument("--json", action="store_true", help="JSON instead of a table")
    add_fields(plan, WorkerConfig, leave_out={field.name for field in dataclasses.fields(WorkerConfig)} - PLANNED)
    plan.set_defaults(run=_plan)

    kernels = commands.add_parser(
        "build-kernels", help="compile a model's FlashInfer kernels, of which no GPU is needed"
    )
    add_model(kernels, "checkpoint folder, GGUF file, hub name (of which no weights are fetched), or nano")
    kernels.add_argument(
        "--head-dim", type=number, action="append", metavar="N", help="instead of a model: for heads of this size"
    )
    kernels.add_argument(
        "--cuda-arch-list", default="", metavar="ARCHS", help="8.0,9.0a, say (default: the GPUs that are here)"
    )
    kernels.add_argument(
        "--aot", action="store_true", help="also copy them into FlashInfer's package, which then needs no compiler"
    )
    add_fields(kernels, WorkerConfig, leave_out={field.name for field in dataclasses.fields(WorkerConfig)} - COMPILED)
    kernels.set_defaults(run=_build_kernels)

    report = commands.add_parser("report", help="print the hit-rate report of a running stack")
    report.add_argument("--json", action="store_true", help="JSON instead of a table")
    report.add_argument("--html", metavar="FILE.html", help="write a page instead")
    top = commands.add_parser("top", help="show what a running stack does now, each second")
    top.add_argument("--once", action="store_true", help="print it once, and end")
    program = commands.add_parser("run", help="run an agent program against a running stack")
    program.add_argument("--trace", metavar="FILE.html", help="write what the program did, and when, as a page")
    program.add_argument("--model", default="", help="model or LoRA adapter that it asks (default: the server's model)")
    program.add_argument("program", metavar="PROGRAM.py")
    program.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="passed to the program")
    drain = commands.add_parser("drain", help="let a worker finish its requests, without new ones, and leave")
    drain.add_argument("--restart", action="store_true", help="start it again, and wait until it serves")
    drain.add_argument("worker", metavar="WORKER", help="its name, as in /health and the report: worker-0")
    for command, run in ((report, _report), (top, _top), (program, _run), (drain, _drain)):
        command.add_argument("--url", default=DEFAULT_URL, help=f"tcp://, ipc:// or http:// (default: {DEFAULT_URL})")
        command.add_argument("--api-key", default="", help="key of the tenant, or @FILE with KEY or TENANT:KEY")
        command.set_defaults(run=run)

    keygen = commands.add_parser("keygen", help="make a CURVE key for ZMQ beyond loopback")
    keygen.add_argument("file", metavar="FILE", help="secret key file to write; give it to --curve-secret-key")
    keygen.set_defaults(run=_keygen)
    for command in commands.choices.values():
        command.add_argument("--log-level", default=argparse.SUPPRESS, **LOG_LEVEL)
    return parser


# ---------------------------------------------------------------- commands


def _serve(args: argparse.Namespace) -> int:
    if "model" not in args:
        raise ValueError("which model? radixrt serve MODEL, or --model MODEL; nano is a small one that is included")
    read_keys(args)
    read_admin_key(args)
    _check_model_here(args.model, vars(args).get("fake", ""), vars(args).get("model_impl", "auto"))
    _check_here(check_files, vars(args).get("tokenizer", ""))
    configs = {role: from_args(config, args) for role, config in ROLES.items()}
    _check_adapters(configs["worker"])
    own = {field.name: vars(args)[field.name] for field in dataclasses.fields(StackConfig) if field.name in vars(args)}
    return launcher.run_stack(StackConfig(**configs, **own))


def _check_model_here(name: str, fake: str, impl: str) -> None:
    _check_here(check_files if fake else partial(check_model, impl=impl), name)


def _check_here(check: Callable[[str], None], name: str) -> None:
    """Call `check` for a checkpoint folder, or that of a GGUF file, before any process is started. Does nothing for a
    hub name."""
    if name and not is_hub_name(folder := model_folder(name)):
        check(str(find_files(folder)))


def _check_adapters(config: WorkerConfig) -> None:
    """Check the LoRA adapters of a worker before any process is started."""
    if config.lora_modules or config.allow_runtime_lora_updating:
        check_lora_modules(resolve(config))


def _role(args: argparse.Namespace) -> int:
    if args.config_from_stdin:
        config = read_config(args.role)
        follow_parent()
    else:
        read_keys(args)
        read_admin_key(args)
        config = from_args(ROLES[args.role], args)
        if args.role == "worker":
            _check_model_here(config.model, config.fake, config.model_impl)
            _check_adapters(config)
        check_role(config)
        config = folders(config)
    check_role(config)
    return run_role(args.role, resolve(config), Pulse(args.pulse))


def _plan(args: argparse.Namespace) -> int:
    if "model" not in args:
        raise ValueError("which model? radixrt plan MODEL")
    if args.context < 0:
        raise ValueError(f"--context {args.context}: expected a number of tokens")
    config = _config_on_gpu(args)
    from radixrt.worker.load.capacity import find_capacity, named_gpus
    from radixrt.worker.load.capacity_text import to_text

    sizes = (config.tensor_parallel_size,) if "tensor_parallel_size" in args else ()
    capacity = find_capacity(config, args.context, named_gpus(args.gpu or ()), sizes)
    print(json.dumps(capacity.as_json(), indent=2) if args.json else to_text(capacity))
    return 0


def _config_on_gpu(args: argparse.Namespace) -> WorkerConfig:
    """That of a worker on a GPU, which need not be here."""
    if is_hub_name(name := model_folder(args.model)) and has_quant(name) and not is_complete(name):
        raise ValueError(f"a GGUF file is read from the cache: radixrt pull {args.model} first")
    config = resolve(dataclasses.replace(from_args(WorkerConfig, args), device="cuda:0"))
    check(config)
    return config


def _build_kernels(args: argparse.Namespace) -> int:
    if ("model" in args) == bool(args.head_dim):
        raise ValueError("for which model? radixrt build-kernels MODEL, or --head-dim N")
    from radixrt.worker.load import flashinfer_kernels

    archs = flashinfer_kernels.choose_archs(args.cuda_arch_list)
    if args.head_dim:
        wanted = flashinfer_kernels.kernels_of_heads(args.head_dim, vars(args).get("dtype", "auto"), archs)
    else:
        wanted = flashinfer_kernels.kernels_of_model(_config_on_gpu(args), archs)
    return 1 if flashinfer_kernels.build(wanted, print, args.aot) else 0


def _pull(args: argparse.Namespace) -> int:
    if args.model:
        return pull(args.model, args.model_impl)
    print(known_models())
    return 0


def _report(args: argparse.Namespace) -> int:
    from radixrt.client import Client, ServerError
    from radixrt.report import to_html, to_text

    key = read_key(args.api_key)
    try:
        with Client(args.url, api_key=key) as client:
            data = client.report()
    except ServerError as error:
        print(f"radixrt report: {error}", file=sys.stderr)
        return 1
    if args.html:
        Path(args.html).write_text(to_html(data), encoding="utf-8")
    else:
        print(json.dumps(data, indent=2) if args.json else to_text(data), end="\n" if args.json else "")
    return 0


def _top(args: argparse.Namespace) -> int:
    from radixrt.client import Client, ServerError, top

    try:
        with Client(args.url, api_key=read_key(args.api_key)) as client, contextlib.suppress(KeyboardInterrupt):
            if args.once or not top.is_terminal():
                top.print_once(client, sys.stdout)
            else:
                top.run(client, sys.stdin, sys.stdout)
    except ServerError as error:
        print(f"radixrt top: {error}", file=sys.stderr)
        return 1
    return 0


def _drain(args: argparse.Namespace) -> int:
    from radixrt.client import Client, ServerError

    key = read_key(args.api_key)
    try:
        with Client(args.url, api_key=key) as client:
            before = _pid(client, args.worker)
            client.drain_worker(args.worker, restart=args.restart)
            print(f"worker {args.worker} has left")
            deadline = time.monotonic() + RESTART_SECONDS
            while args.restart and _pid(client, args.worker) in (None, before):
                if time.monotonic() > deadline:
                    print(f"radixrt drain: worker {args.worker} has not come back", file=sys.stderr)
                    return 1
                time.sleep(0.2)
            if args.restart:
                print(f"worker {args.worker} serves again")
    except ServerError as error:
        print(f"radixrt drain: {error}", file=sys.stderr)
        return 1
    return 0


def _pid(client: Client, worker: str) -> int | None:
    """The process id of a worker; None if it does not serve."""
    return next((w["pid"] for w in client.health()["workers"] if w["name"] == worker), None)


def _run(args: argparse.Namespace) -> int:
    from radixrt.client import Client, ServerError
    from radixrt.lang import ProgramError, trace, use_client

    if not Path(args.program).is_file():
        raise FileNotFoundError(f"there is no file {args.program}")
    key = read_key(args.api_key)
    sys.argv = [args.program, *args.arguments]
    sys.path.insert(0, str(Path(args.program).resolve().parent))
    try:
        client = Client(args.url, api_key=key, model=args.model)
    except ServerError as error:
        print(f"radixrt run: {error}", file=sys.stderr)
        return 2
    with client, trace() if args.trace else contextlib.nullcontext() as traced:
        use_client(client)
        if not args.model:
            _warn_of_nano(client)
        try:
            runpy.run_path(args.program, run_name="__main__")
        except ProgramError as error:
            print(f"{args.program}: {error}", file=sys.stderr)
            _print_causes(error)
            return 1
        except Exception as error:
            _print_from(args.program, error)
            return 1
        finally:
            use_client(None)
            if traced:
                Path(args.trace).write_text(traced.html(), encoding="utf-8")
    return 0


def _warn_of_nano(client: Client) -> None:
    """Say what nano is for, if the server has no other model: of most programs it makes nonsense."""
    from radixrt.client import ServerError

    with contextlib.suppress(ServerError):
        if {worker["model"] for worker in client.health()["workers"]} == {NANO.name}:
            log.info(
                "nano reads notes, calls tools and fills in JSON; other programs need a larger model to make sense"
            )


def _print_from(program: str, error: Exception) -> None:
    """Print a traceback as Python would if it had run the program: without our own frames at its start."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != program:
        frames = frames.tb_next
    traceback.print_exception(error.with_traceback(frames))


def _print_causes(error: BaseException) -> None:
    """Print where the causes of an error were raised, for example in a tool, without frames of this package."""
    seen = {id(error)}
    cause = error.__cause__
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        frames = traceback.extract_tb(cause.__traceback__)
        users = [frame for frame in frames if not Path(frame.filename).is_relative_to(Path(__file__).parent)]
        print(*traceback.format_list(users), sep="", end="", file=sys.stderr)
        cause = cause.__cause__


def _keygen(args: argparse.Namespace) -> int:
    make_secret_key(args.file)
    print(f"wrote {args.file}: give it to the router as --curve-secret-key; connect with these appended to addresses")
    for role in ("clients", "workers"):
        print(f"  {role}: {public_suffix(args.file, role)}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `radixrt`. Returns its exit code: 0 success, 1 it failed while running, 2 it could not start."""
    args = parse(build_parser(), arguments)
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname).1s %(name)s: %(message)s", stream=sys.stderr
    )
    if args.log_level == "info":  # httpx writes a line for each request of a client at this level
        logging.getLogger("httpx").setLevel(logging.WARNING)
    for note in vars(args).get("notes", ()):
        log.info("%s", note)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        # Of our own OSErrors, without a file name, the text says all; Python would put "[Errno 98]" before it.
        said = error.strerror if isinstance(error, OSError) and not error.filename and error.strerror else error
        print(f"radixrt {args.command}: {said}", file=sys.stderr)
        return 2
