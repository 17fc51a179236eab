"""What the commands for a running stack are told."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from radixrt import cli
from radixrt.client import ServerError
from radixrt.config import WorkerConfig

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(params=["report", "top", "run"])
def told(request, monkeypatch, tmp_path):
    """Runs a command with an `--api-key`: (its exit code, the key that its client is given)."""
    program = tmp_path / "program.py"
    program.write_text("")
    keys: list[str] = []

    def client(url: str, *, api_key: str, model: str = "") -> None:
        keys.append(api_key)
        raise ServerError(503, "nobody is there")

    monkeypatch.setattr("radixrt.client.Client", client)
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", [])

    def run(key: str) -> tuple[int, str | None]:
        keys.clear()
        code = cli.main([request.param, "--api-key", key, *([str(program)] if request.param == "run" else [])])
        return code, keys[0] if keys else None

    run.command = request.param
    return run


@pytest.mark.parametrize(
    ("text", "key"),
    [("key-a\n", "key-a"), ("# mine\n\n  tenant:key-a \n", "key-a"), ("t:a:b", "a:b"), ("\ufeffkey", "key")],
)
def test_a_key_in_a_file(told, tmp_path, caplog, text, key):
    """Of the same form as that of a server with one tenant."""
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    file.chmod(0o600)
    assert told(f"@{file}")[1] == key and not caplog.text
    file.chmod(0o644)
    assert told(f"@{file}")[1] == key
    assert "can be read by others" in caplog.text


def test_a_key_on_the_command_line_is_warned_of(told, caplog):
    """Every user of the machine can read it there."""
    assert told("key-a")[1] == "key-a"
    assert caplog.text.count("--api-key @FILE") == 1 and "ps" in caplog.text and "key-a" not in caplog.text


@pytest.mark.parametrize("flag", ["--api-key", "--admin-api-key"])
@pytest.mark.parametrize("command", ["serve", "frontend"])
def test_keys_of_a_server_are_in_files(monkeypatch, tmp_path, caplog, command, flag):
    configs: list = []
    monkeypatch.setattr(cli.launcher, "run_stack", lambda config: configs.append(config.router) or 0)
    monkeypatch.setattr(cli, "run_role", lambda role, config, pulse: configs.append(config) or 0)
    file = tmp_path / "keys"
    file.write_text("acme:s3cret\n")
    file.chmod(0o600)
    start = [command, *(["nano", "--fake", "0,0"] if command == "serve" else ["--tokenizer", "none"]), flag]
    assert cli.main([*start, f"@{file}"]) == 0 and not caplog.text
    assert cli.main([*start, "acme:s3cret"]) == 0
    assert caplog.text.count(f"{flag} @FILE") == 1 and "s3cret" not in caplog.text
    file.chmod(0o644)
    assert cli.main([*start, f"@{file}"]) == 0 and "can be read by others" in caplog.text
    keys = [config.api_key or config.admin_api_key for config in configs]
    assert keys == ([("acme:s3cret",)] * 3 if flag == "--api-key" else ["s3cret", "acme:s3cret", "s3cret"])


def test_requests_of_a_client_are_not_logged(told, monkeypatch):
    """Over HTTP there would be a line for each request among what a program prints."""
    monkeypatch.setattr(logging.getLogger("httpx"), "level", logging.NOTSET)
    told("")
    assert logging.getLogger("httpx").level == logging.WARNING


def test_a_key_as_it_is(told):
    assert [told(key)[1] for key in ("key-a", "t:key-a", "")] == ["key-a", "t:key-a", ""]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a:1\nb:2\n", "there are 2 keys in the file, and one is needed"),
        (b"# none\n", "there is no TENANT:KEY in the file"),
        (b"\xff\n", "the file is not UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_file_without_one_key(told, tmp_path, capsys, content, words):
    """Nothing is asked of the server, and no key is shown."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o600)
    assert told(f"@{file}") == (2, None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"radixrt {told.command}: ") and words in line and str(file) in line and "b:2" not in line


# ---------------------------------------------------------------- flags


def test_all_flags_in_the_readme_exist(capsys):
    known: set[str] = set()
    for command in ("serve", "router", "worker", "frontend", "report", "top", "run", "drain", "keygen"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        known.update(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
    assert set(re.findall(r"--[a-z][a-z-]*", README.read_text())) <= known | {"--help"}


@pytest.mark.parametrize(("flags", "jumps"), [([], True), (["--no-jump-forward"], False), (["--jump-forward"], True)])
def test_what_is_on_by_default_can_be_turned_off(flags, jumps):
    args = cli.build_parser().parse_args(["serve", "nano", *flags])
    assert cli.from_args(WorkerConfig, args).jump_forward is jumps
