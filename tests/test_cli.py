"""What the commands for a running stack are told."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from radixrt import cli
from radixrt.client import ServerError
from radixrt.config import FrontendConfig, WorkerConfig


@pytest.fixture(params=["report", "run"])
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
        (b"# none\n", "there is no key in the file"),
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


def worker_of(*flags: str) -> WorkerConfig:
    return cli.from_args(WorkerConfig, cli.parse(cli.build_parser(), ["serve", "nano", *flags]))


@pytest.mark.parametrize("command", ["serve", "router", "worker", "frontend"])
@pytest.mark.parametrize("named", [["m"], ["--model", "m"], ["--model-path", "m"], ["m", "--model=m"]])
def test_a_model_is_named_with_or_without_a_flag(command, named, capsys):
    for flags in ([*named, "--served-model-name", "x"], ["--served-model-name", "x", *named]):
        assert cli.parse(cli.build_parser(), [command, *flags]).model == "m"
    assert refused(capsys, command, *named, "--model", "n") == f"radixrt {command}: two models are named, m and n"


def refused(capsys, *arguments: str) -> str:
    """The only line that is said."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    return line


def test_a_stack_needs_a_model(capsys):
    assert cli.main(["serve", "--port", "8100"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("radixrt serve: which model?")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "nano", "--max-num-seq", "3"], "serve: there is no flag --max-num-seq; is --max-num-seqs meant?"),
        (["serve", "--max_model_len=3"], "serve: there is no flag --max_model_len; is --max-model-len meant?"),
        (["worker", "--devise", "cpu", "nano"], "worker: there is no flag --devise; is --device meant?"),
        (["report", "--jsn"], "report: there is no flag --jsn; is --json meant?"),
        (["drain", "w", "--zzz"], "drain: there is no flag --zzz (radixrt drain --help)"),
        (["serve", "nano", "small"], "serve: 'small' is one argument too many"),
        (["serve", "nano", "--port", "x"], "serve: argument --port: invalid number value: 'x'"),
    ],
)
def test_a_flag_that_there_is_not_is_named_with_the_nearest(capsys, arguments, words):
    assert refused(capsys, *arguments) == f"radixrt {words}"


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--tp-size", "--tp", "-tp"])
def test_the_flags_of_other_engines(flag):
    assert worker_of(flag, "2").tensor_parallel_size == 2


def test_flags_that_change_nothing_are_said_to(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(cli.launcher, "run_stack", lambda config: 0)
    assert cli.main(["serve", "nano", "--trust-remote-code", "--fake", "0,0", "--enable-prefix-caching"]) == 0
    said = [record.message for record in caplog.records if record.name == "radixrt.cli"]
    assert len(said) == 2 and said[1] == "--enable-prefix-caching: prefixes are always cached"
    assert said[0].startswith("--trust-remote-code: code that comes with a checkpoint is never run")


@pytest.mark.parametrize(
    ("text", "tokens"), [("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("1M", 1 << 20), ("25.6k", 25_600)]
)
def test_numbers_may_have_units(text, tokens):
    assert worker_of("--max-model-len", text).max_model_len == tokens


def test_lists_may_be_json(capsys):
    args = cli.build_parser().parse_args(["serve", "nano", "--allowed-origins", '["a", "b"]', "--allowed-origins", "*"])
    assert cli.from_args(FrontendConfig, args).allowed_origins == ("a", "b", "*")
    modules = worker_of("--lora-modules", '[{"name": "a", "path": "p"}]', "b=q").lora_modules
    assert modules == ('{"name": "a", "path": "p"}', "b=q")
    assert cli.main(["serve", "nano", "--allowed-origins", '["*"']) == 2
    assert "radixrt serve: --allowed-origins '[\"*\"': it is no JSON list" in capsys.readouterr().err


def test_the_log_level_may_follow_the_command(monkeypatch):
    levels = []
    monkeypatch.setattr(cli.launcher, "run_stack", lambda config: levels.append(config.log_level) or 0)
    cli.main(["serve", "nano", "--log-level", "debug"])
    cli.main(["--log-level", "error", "serve", "nano"])
    assert levels == ["debug", "error"]


@pytest.mark.parametrize(("flags", "jumps"), [([], True), (["--no-jump-forward"], False), (["--jump-forward"], True)])
def test_what_is_on_by_default_can_be_turned_off(flags, jumps):
    assert worker_of(*flags).jump_forward is jumps


@pytest.mark.parametrize("when", ["is imported", "runs"])
def test_an_interrupt_ends_a_command_without_a_traceback(tmp_path, when):
    """What it has begun in a thread is not waited for."""
    lines = ["import threading, time", "threading.Thread(target=time.sleep, args=(60,)).start()", "def main():"]
    lines += [" print('begun', flush=True)", " time.sleep(60)"] + ["main()"] * (when == "is imported")
    (tmp_path / "slow.py").write_text("\n".join(lines))
    command = [sys.executable, "-c", "from radixrt.__main__ import main; main('slow')"]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(cli.__file__).parents[1]}"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=10)[1] == "" and process.returncode == 130
