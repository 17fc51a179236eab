"""Gets models from the hub before a process serves them: a download is no part of --ready-timeout then, and what serves
has a folder, and asks the hub nothing.

    serve, worker --> python -m radixrt pull NAME    where weights are missing: it needs torch to know what is served
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
from types import FrameType

from radixrt.checkpoint.files import check_files, check_model
from radixrt.checkpoint.hub import find, find_files, has_quant, is_complete, is_hub_name
from radixrt.config import AnyConfig, StackConfig, WorkerConfig, client_names, model_folder, named, resolve
from radixrt.known_models import KNOWN

log = logging.getLogger("radixrt.hub")


def pull(name: str, impl: str = "auto") -> int:
    """`radixrt pull NAME`: download what is not here, and say how to serve it. ValueError, before its weights are
    downloaded, if the model is not served."""
    from radixrt.worker.load.options import look_up

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    model = model_folder(name)
    if is_hub_name(model) and (has_quant(model) or find_files(model)) and not is_complete(model):
        log.info("downloading %s", model)
    folder = look_up(resolve(WorkerConfig(model=name, device="cpu", model_impl=impl))).folder
    print(f"{client_names(name)[0]} is in {folder}; serve it by\n    radixrt serve {name}")
    return 0


def _leave(number: int, _frame: FrameType | None) -> None:
    """End without the files in flight, for which the library would wait, and which it would not use again."""
    with contextlib.suppress(OSError):
        for file in os.scandir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if (path := os.readlink(file.path)).endswith(".incomplete"):
                    os.unlink(path)
    os._exit(128 + number)


def known_models() -> str:
    """What `radixrt pull` says without a name."""
    lines = [
        f"{short:<10} {model.gigabytes:5.2f} GB  {model.name:<36} {model.licence:<11} {model.words}"
        + (" (here)" if is_complete(model.name) else "")
        for short, model in KNOWN.items()
    ]
    return "\n".join((*lines, "", "radixrt pull NAME    gets one of these, or ORG/NAME as at https://huggingface.co"))


def here(config: StackConfig) -> StackConfig:
    """The same with folders in place of the hub's names, whose files are downloaded first. Workers of a Ray cluster
    look on their own machines. Raises ValueError for a model that is not served or cannot be had, SystemExit if its
    download has failed and said why."""
    worker = named(config.worker) if config.data_parallel_backend == "ray" else folders(config.worker)
    router, frontend = folders(config.router), folders(config.frontend)
    return dataclasses.replace(config, router=router, worker=worker, frontend=frontend)


def folders(part: AnyConfig) -> AnyConfig:
    """As `here`, for one process."""
    part = named(part)
    if isinstance(part, WorkerConfig):
        dummy = part.fake or part.load_format == "dummy"
        return dataclasses.replace(part, model=_files(part.model) if dummy else _model(part.model, part.model_impl))
    return dataclasses.replace(part, model=_files(part.model), tokenizer=_files(part.tokenizer))


def _files(name: str) -> str:
    folder = model_folder(name)
    if name in ("", "none") or not is_hub_name(folder):
        return name
    path = find_files(folder)
    check_files(path)
    return str(path)


def _model(name: str, impl: str) -> str:
    model = model_folder(name)
    if not name or not is_hub_name(model):
        return name
    if not has_quant(model):
        check_model(find_files(model), impl)
    if not is_complete(model):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or else the child would go on
        command = [sys.executable, "-m", "radixrt", "pull", model, "--model-impl", impl]
        if code := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(code)
    return str(find(model, cached=True))
