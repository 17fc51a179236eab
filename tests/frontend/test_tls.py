"""HTTPS, with a certificate that is made here."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from radixrt.cli import main
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, http_url
from radixrt.launch.launcher import Stack
from radixrt.process.ports import free_tcp_address
from radixrt.process.tls import tls_context
from tests.frontend.conftest import serving

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SimpleNamespace:
    """A certificate, its key, the key encrypted, and another key."""
    root = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=root, check=True, capture_output=True)

    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")
    openssl(*new, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-out", "cert", "-keyout", "key")
    openssl("ec", "-in", "key", "-aes128", "-passout", "pass:secret", "-out", "locked")
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-out", "other")
    (root / "both").write_text((root / "cert").read_text() + (root / "key").read_text())
    for name in ("key", "both"):
        (root / name).chmod(0o600)
    return SimpleNamespace(root=root, **{name: str(root / name) for name in ("cert", "key", "locked", "other", "both")})


@pytest.mark.parametrize("files", [("cert", "key"), pytest.param(("both", ""), marks=pytest.mark.slow)])
def test_answers_and_streams_over_https(made, folder, files):
    cert, key = (getattr(made, name) if name else "" for name in files)
    with serving(folder, workers=1, ssl_certfile=cert, ssl_keyfile=key) as frontend:
        assert frontend.url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=made.cert)
        with httpx.Client(base_url=frontend.url, verify=trusted) as client:
            body = {"prompt": "a b", "max_tokens": 200, "logprobs": 5}
            assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 200
            with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
                assert [*stream.iter_lines()][-2] == "data: [DONE]"
            page = {"origin": frontend.url, "content-type": "text/plain"}
            assert client.post("/reset_prefix_cache", headers=page).status_code == 200
            assert client.post("/reset_prefix_cache", headers=page | {"origin": "https://x.example"}).status_code == 403
        with pytest.raises(httpx.HTTPError):
            httpx.get(frontend.url.replace("https", "http") + "/health")


def test_a_key_that_others_can_read_is_warned_of(made, folder, caplog):
    Path(made.key).chmod(0o644)
    try:
        with serving(folder, workers=1, ssl_certfile=made.cert, ssl_keyfile=made.key):
            assert "key, the TLS private key, can be read by others" in caplog.text
    finally:
        Path(made.key).chmod(0o600)


@pytest.mark.parametrize(
    ("cert", "key", "said"),
    [
        ("cert", "missing", "--ssl-keyfile {root}/missing: No such file or directory"),
        ("missing", "key", "--ssl-certfile {root}/missing: No such file or directory"),
        ("cert", "", "--ssl-certfile {root}/cert, --ssl-keyfile {root}/cert: "),
        ("cert", "other", "--ssl-certfile {root}/cert, --ssl-keyfile {root}/other: KEY_VALUES_MISMATCH"),
        ("cert", "locked", "--ssl-keyfile: the key is encrypted"),
        ("", "key", "--ssl-keyfile needs --ssl-certfile"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(made, capfd, cert, key, said):
    """Before any process is started."""
    paths = {flag: str(made.root / name) for flag, name in (("--ssl-certfile", cert), ("--ssl-keyfile", key)) if name}
    flags = [word for pair in paths.items() for word in pair]
    assert main(["serve", "nano", "--fake", "0,0", *flags]) == 2
    out = capfd.readouterr().err
    assert out.startswith("radixrt serve: " + said.format(root=made.root)) and out.count("\n") == 1


def test_urls_name_the_scheme():
    config = FrontendConfig(host="::1", ssl_certfile="x")
    assert http_url(config, 8000) == "https://[::1]:8000" and http_url(FrontendConfig(), 1) == "http://127.0.0.1:1"
    assert tls_context(FrontendConfig()) is None


@pytest.mark.slow
def test_several_front_ends_serve_https(made, folder):
    model = {"model": str(folder)}
    frontend = FrontendConfig(**model, port=0, ssl_certfile=made.cert, ssl_keyfile=made.key)
    router = RouterConfig(**model, client_address=free_tcp_address())
    config = StackConfig(router, WorkerConfig(**model, fake="0,0"), frontend, api_server_count=2)
    with Stack(config) as stack:
        stack.start()
        trusted = ssl.create_default_context(cafile=made.cert)
        for _ in range(4):
            assert httpx.get(f"https://127.0.0.1:{stack._port}/health", verify=trusted).status_code == 200
