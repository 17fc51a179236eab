"""Models of the hub: their names, the order of their files, what is refused before weights, and what the cache is good
for. The hub is a small HTTP server here."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from radixrt.checkpoint.gguf.quants import chosen, quants
from radixrt.checkpoint.hub import Lines, find_files
from radixrt.config import NANO, FrontendConfig, RouterConfig, WorkerConfig, resolve
from radixrt.worker.model.weights.gguf import GgufWeights
from tests.checkpoints import make_model, make_tokenizer
from tests.gguf_files import write

COMMIT = "c" * 40
NAME = "acme/nano-1"
HERE = (
    f"(s := here(StackConfig(RouterConfig({NAME!r}), WorkerConfig({NAME!r}, device='cpu'), FrontendConfig({NAME!r}))))"
    " and (*dict.fromkeys(p.model for p in (s.router, s.worker, s.frontend)), s.worker.served_model_name)"
)


@dataclass
class Hub:
    """A hub with one model."""

    files: dict[str, bytes]
    asked: list[str] = field(default_factory=list)
    """The files whose content was asked for, in order, with the first byte that was wanted."""
    breaks: dict[str, int] = field(default_factory=dict)
    """After how many bytes the connection breaks, for each file, once."""
    url: str = ""
    architecture: str = "llama"
    """Of its GGUF files, as the hub states it."""

    def answer(self, http: BaseHTTPRequestHandler) -> None:
        if f"/api/models/{NAME}/tree/" in http.path:
            return self._json(http, [self._entry(path) for path in self.files])
        if http.path.startswith(f"/api/models/{NAME}"):
            about = {"siblings": [{"rfilename": f} for f in self.files], "gguf": {"architecture": self.architecture}}
            return self._json(http, {"id": NAME, "sha": COMMIT} | about)
        path = http.path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")
        if path not in self.files:
            http.send_response(404)
            http.send_header("X-Error-Code", "RepoNotFound")
            http.send_header("Content-Length", "0")
            http.end_headers()
            return
        self._file(http, path)

    def _entry(self, path: str) -> dict[str, object]:
        content = self.files[path]
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _json(self, http: BaseHTTPRequestHandler, answer: object) -> None:
        body = json.dumps(answer).encode()
        http.send_response(200)
        http.send_header("Content-Type", "application/json")
        http.send_header("Content-Length", str(len(body)))
        http.end_headers()
        http.wfile.write(body)

    def _file(self, http: BaseHTTPRequestHandler, path: str) -> None:
        content = self.files[path]
        first = int((re.search(r"bytes=(\d+)", http.headers.get("Range", "")) or [0, 0])[1])
        http.send_response(206 if first else 200)
        http.send_header("Content-Length", str(len(content) - first))
        http.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        http.send_header("X-Repo-Commit", COMMIT)
        if first:
            http.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        http.end_headers()
        if http.command == "GET":
            self.asked.append(f"{path}@{first}" if first else path)
            end = self.breaks.pop(path, len(content))
            http.wfile.write(content[first:end])
            http.close_connection = True


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub({path.name: path.read_bytes() for path in NANO.iterdir() if path.suffix in (".json", ".safetensors")})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.answer(self)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    yield found
    server.shutdown()
    server.server_close()


def look_up(hub: Hub, home: Path, call: str, **more: str) -> subprocess.CompletedProcess[str]:
    """What `call` gives, or its error, in a process of its own: the hub's address is read at import."""
    code = (
        "from radixrt.checkpoint.hub import find, find_files; from radixrt.config import *\n"
        "from radixrt.launch.pull import here\n"
        f"try: print({call})\n"
        "except ValueError as error: print(error)"
    )
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"} | more
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)


def test_weights_come_last_and_serve_offline(hub, tmp_path):
    hub.breaks["model.safetensors"] = 1_000_000
    done = look_up(hub, tmp_path, HERE)
    assert hub.asked.count("config.json") == 1 and hub.asked[-2:] == ["model.safetensors"] * 2, (
        "after a lost connection"
    )
    folder, name = ast.literal_eval(done.stdout)
    assert (Path(folder) / "model.safetensors").read_bytes() == hub.files["model.safetensors"] and name == NAME
    assert "HTTP" not in done.stderr and f"downloading {NAME}" in done.stderr
    hub.asked.clear()
    again = look_up(hub, tmp_path, HERE, HF_ENDPOINT="http://127.0.0.1:1")
    assert again.stdout == done.stdout and not hub.asked and not again.stderr


def test_what_is_not_served_is_refused_before_its_weights(hub, tmp_path):
    config = json.loads(hub.files["config.json"]) | {"hidden_size": "wide"}
    hub.files["config.json"] = json.dumps(config).encode()
    assert "hidden_size is 'wide'" in look_up(hub, tmp_path, HERE).stdout
    assert "config.json" in hub.asked and "model.safetensors" not in hub.asked


def test_a_plan_fetches_no_weights(hub, tmp_path):
    plan = f"__import__('radixrt.cli').cli.main(['plan', {NAME!r}, '--gpu', 'L4'])"
    said = look_up(hub, tmp_path, plan).stdout
    assert said.startswith("acme/nano-1: llama") and "\nL4 " in said
    assert "config.json" in hub.asked and "model.safetensors" not in hub.asked


def test_a_model_of_which_a_part_is_here_is_named_offline(hub, tmp_path):
    look_up(hub, tmp_path, f"find_files({NAME!r})")
    (said,) = look_up(hub, tmp_path, f"find({NAME!r})", HF_HUB_OFFLINE="1").stdout.splitlines()
    assert said.startswith(f"{NAME}: ") and "nor has its cache all files" in said and not hub.asked[4:]


@pytest.mark.parametrize("path", ["./nosuch", "x.gguf", "/nowhere/at"])
def test_a_path_is_not_asked_for_at_the_hub(path):
    with pytest.raises(ValueError, match=f"^there is no (file|folder) {Path(path)}; give one"):
        find_files(path)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (NAME, [NAME, "nano-1"]),
        ("smollm2", ["HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct", "smollm2"]),
        ("nano", ["nano"]),
        (str(NANO), ["nano"]),
        ("./models/tiny-Q4.gguf", ["tiny-Q4"]),
    ],
)
def test_clients_may_use_the_name_that_the_server_was_given(model, names):
    router = resolve(RouterConfig(model, model_aliases=("gpt-9",)))
    assert [router.served_model_name, *router.model_aliases] == [names[0], "gpt-9", *names[1:]]
    assert (
        resolve(FrontendConfig(model)).served_model_name == resolve(WorkerConfig(model)).served_model_name == names[0]
    )
    assert resolve(router) == router and not resolve(RouterConfig(model, served_model_name="m")).model_aliases


def test_a_download_is_told_in_lines_where_there_is_no_terminal(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr("radixrt.checkpoint.hub.SAY_SECONDS", 0.0)
    with Lines(total=5_000_000, unit="B") as whole, Lines(total=3, unit="it") as files:
        whole.update(2_000_000)
        files.update(1)
    assert caplog.messages[-1] == "downloaded 2 of 5 MB" and not [m for m in caplog.messages if "3" in m]


def test_a_download_that_is_stopped_leaves_no_part(tmp_path):
    part, done = tmp_path / "x.incomplete", tmp_path / "y"
    code = (
        "import os, signal, sys; from radixrt.launch import pull\n"
        "files = [open(name, 'w') for name in sys.argv[1:]]\n"
        "pull._leave(signal.SIGINT, None)"
    )
    assert subprocess.run([sys.executable, "-c", code, part, done]).returncode == 130
    assert not part.exists() and done.exists()


# ---------------------------------------------------------------- GGUF files


FILES = ["nano-1-F32-00001-of-00002.gguf", "nano-1-F32-00002-of-00002.gguf"]
OTHERS = ["README.md", "mmproj-F32.gguf", "nano-1-Q4_K_M.gguf", "nano-1-UD-Q4_K_M.gguf", "nano-1.Q8_0.gguf"]


@pytest.fixture
def model(tmp_path) -> torch.nn.Module:
    return make_model(make_tokenizer(tmp_path / "original"))


@pytest.fixture
def gguf_hub(hub, model, tmp_path) -> Hub:
    """The hub's model in F32, in two files, among files that are broken."""
    write(tmp_path / "nano-1-F32.gguf", tmp_path / "original", model, tensors_per_file=16)
    hub.files = {name: (tmp_path / name).read_bytes() for name in FILES} | dict.fromkeys(OTHERS, b"broken")
    return hub


def test_a_quant_is_downloaded_alone_and_serves_offline(gguf_hub, model, tmp_path):
    name = f"{NAME}:f32"
    call = HERE.replace(NAME, name)
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    done = look_up(gguf_hub, tmp_path, call, **cache)
    assert sorted(gguf_hub.asked) == FILES
    weights = GgufWeights(
        Path(ast.literal_eval(done.stdout)[0]) / "model.gguf", torch.float32, torch.device("cpu"), progress=False
    )
    for tensor_name, tensor in model.state_dict().items():
        assert torch.equal(weights.load(tensor_name, tensor.shape), tensor)
    gguf_hub.asked.clear()
    again = look_up(gguf_hub, tmp_path, call, HF_ENDPOINT="http://127.0.0.1:1", **cache)
    assert again.stdout == done.stdout and not gguf_hub.asked


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (NAME, f"{NAME} has GGUF files: give one of its quants, as {NAME}:F32; F32, Q4_K_M, UD-Q4_K_M, Q8_0"),
        (f"{NAME}:Q4_K", f"{NAME} has no quant Q4_K; it has F32, Q4_K_M, UD-Q4_K_M, Q8_0"),
    ],
)
def test_the_quants_are_listed(gguf_hub, tmp_path, name, said):
    assert look_up(gguf_hub, tmp_path, f"find_files({name!r})").stdout.strip() == said
    assert not gguf_hub.asked


def test_a_plan_downloads_no_quant(gguf_hub, tmp_path):
    said = look_up(gguf_hub, tmp_path, f"__import__('radixrt.cli').cli.main(['plan', '{NAME}:f32'])")
    assert f"radixrt pull {NAME}:f32 first" in said.stderr and not gguf_hub.asked


def test_an_architecture_that_is_not_served_is_refused_before_its_weights(gguf_hub, tmp_path):
    gguf_hub.architecture = "mamba"
    assert "architecture 'mamba' is not served" in look_up(gguf_hub, tmp_path, f"find_files('{NAME}:f32')").stdout
    assert not gguf_hub.asked


@pytest.mark.parametrize(
    ("quant", "files"),
    [
        ("q8_0", ["a/nano-Q8_0-00001-of-00002.gguf", "a/nano-Q8_0-00002-of-00002.gguf"]),
        ("q4", []),
        ("Q4_0", []),
        ("other-q4_0", ["other-q4_0.gguf"]),
        ("model", ["model.gguf"]),
    ],
)
def test_which_files_a_quant_means(quant, files):
    """Several models may have the same one: then they are told apart by their whole names."""
    paths = ["a/nano-Q8_0-00002-of-00002.gguf", "a/nano-Q8_0-00001-of-00002.gguf", "nano.Q4_0.gguf", "other-q4_0.gguf"]
    paths += ["mmproj-model-q8_0.gguf", "nano-Q8_0.safetensors", "model.gguf"]
    assert chosen(paths, quant) == files
    assert quants(paths) == ["model", "Q8_0", "nano.Q4_0", "other-q4_0"]
