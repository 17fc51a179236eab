"""Serves language models to agents.

radixrt serve MODEL            start router, workers and HTTP front ends
radixrt router|worker|frontend start only one of these, for setups of several machines
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
import typing
from collections.abc import Callable, Sequence, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixrt.checkpoint.files import check_files, check_model
from radixrt.checkpoint.hub import find_files, is_hub_name
from radixrt.checkpoint.lora_modules import check_lora_modules
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, model_folder, resolve
from radixrt.launch import launcher
from radixrt.launch.process_main import ROLES, check_role, follow_parent, read_config, run_role
from radixrt.process.shutdown import Pulse
from radixrt.version import __version__
from radixrt.wire.keys import is_private, make_secret_key, public_suffix

if TYPE_CHECKING:
    from radixrt.client import Client

INTERNAL = {"router", "name", "shares_port"}
"""Fields that `serve` sets itself."""
ALIASES = {
    "workers": ["--data-parallel-size", "--dp-size"],
    "tensor_parallel_size": ["--tp-size"],
    "max_model_len": ["--context-length"],
    "max_num_seqs": ["--max-running-requests"],
    "gpu_memory_utilization": ["--mem-fraction-static"],
}
"""Names that users of vLLM and SGLang know."""
log = logging.getLogger("radixrt.cli")

RESTART_SECONDS = 600.0
"""How long `radixrt drain --restart` waits until the worker serves again."""
DEFAULT_URL = "tcp://127.0.0.1:5555"


# ---------------------------------------------------------------- flags from fields


def add_fields(parser: argparse.ArgumentParser, config: type, *, leave_out: Set[str] = frozenset()) -> None:
    """Add a flag for each field of `config` that has a help text, unless the parser has that flag already: for a field
    `max_num_seqs` the flag `--max-num-seqs`."""
    types = typing.get_type_hints(config)
    known = {action.dest for action in parser._actions}
    for field in dataclasses.fields(config):
        if field.name in known | leave_out or "help" not in field.metadata:
            continue
        kind = types[field.name]
        flags = ["--" + field.name.replace("_", "-"), *ALIASES.get(field.name, ())]
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": field.metadata["help"]}
        if kind is bool and field.default:  # with a flag --no-... as well
            options["help"] += " (default: on)"
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
        elif kind is bool:
            parser.add_argument(*flags, action="store_true", **options)
        elif typing.get_origin(kind) is tuple:
            options |= {"action": "extend", "nargs": "+"} if field.metadata["several"] else {"action": "append"}
            parser.add_argument(*flags, metavar=field.name.upper(), **options)
        else:
            options["help"] += "" if field.default in ("", 0) else f" (default: {field.default})"
            parser.add_argument(*flags, type=kind, metavar=kind.__name__.upper(), **options)


def from_args(config: type, args: argparse.Namespace) -> Any:
    """Make a `config` from the flags that were given; other fields keep their defaults."""
    given = vars(args)
    changes = {f.name: given[f.name] for f in dataclasses.fields(config) if f.name in given}
    return config(**{name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()})


def read_keys(args: argparse.Namespace) -> None:
    """Replace each `--api-key @FILE` by the keys in the file. Warns of keys that are not in a file."""
    if "api_key" in args:
        if any(given[:1] != "@" for given in args.api_key):
            _warn_of_key("--api-key", "keys, TENANT:KEY one per line")
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
        raise ValueError(f"--api-key @{path}: there is no TENANT:KEY in the file")
    if not is_private(path):
        log.warning("%s, with API keys, can be read by others than its owner (chmod 600)", path)
    return keys


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="radixrt", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--version", action="version", version=f"radixrt {__version__}")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="start router, workers and HTTP front ends")
    serve.add_argument(
        "model", metavar="MODEL", help="checkpoint folder, GGUF file, hub name, or nano, a small model that is included"
    )
    for config in (StackConfig, WorkerConfig, RouterConfig, FrontendConfig):
        add_fields(serve, config, leave_out=INTERNAL)
    serve.set_defaults(run=_serve)

    for role, kind in ROLES.items():
        command = commands.add_parser(role, help=(kind.__doc__ or "").splitlines()[0])
        command.add_argument("--config-from-stdin", action="store_true", help=argparse.SUPPRESS)
        command.add_argument("--pulse", type=int, metavar="FD", help=argparse.SUPPRESS)
        add_fields(command, kind)
        command.set_defaults(run=_role, role=role)

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
    return parser


# ---------------------------------------------------------------- commands


def _serve(args: argparse.Namespace) -> int:
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
    return run_role(args.role, resolve(config), Pulse(args.pulse))


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
    args = build_parser().parse_args(arguments)
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname).1s %(name)s: %(message)s", stream=sys.stderr
    )
    if args.log_level == "info":  # httpx writes a line for each request of a client at this level
        logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"radixrt {args.command}: {error}", file=sys.stderr)
        return 2
