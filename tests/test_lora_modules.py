"""The values of --lora-modules."""

from __future__ import annotations

import dataclasses
import json

import pytest

from radixrt import cli
from radixrt.checkpoint.lora_modules import CONFIG, WEIGHTS, lora_modules, most_loaded, num_slots
from radixrt.config import RouterConfig, WorkerConfig


def modules(*texts: str, **changes):
    return lora_modules(
        WorkerConfig(**{"enable_lora": True, "lora_modules": texts, "served_model_name": "m"} | changes)
    )


def test_both_forms():
    assert modules("sql=/a=b", json.dumps({"name": "x y", "path": "p", "base_model_name": "m"})) == (
        ("sql", "/a=b"), ("x y", "p"),
    )  # fmt: skip
    assert modules() == modules(enable_lora=False) == ()


def test_a_folder_may_be_in_the_users(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert modules("a=~/lora", '{"name": "b", "path": "~/b=c"}') == (("a", "/home/me/lora"), ("b", "/home/me/b=c"))


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (("sql",), "'sql': expected NAME=PATH"),
        (("=path",), "expected NAME=PATH"),
        (("name=",), "expected NAME=PATH"),
        (('{"name": "a"}',), "missing required field `path`"),
        (('{"name": "a", "path": "p", "rank": 3}',), "unknown field `rank`"),
        (("{",), "--lora-modules '{'"),
        (("a\nb=p",), "cannot be printed"),
        (("a=p", "a=q"), "two models of the name 'a'"),
        (("m=p",), "two models of the name 'm'"),
    ],
)
def test_what_cannot_be_read_is_named(texts, words):
    with pytest.raises(ValueError, match="--lora-modules") as caught:
        modules(*texts)
    assert words in str(caught.value)


def test_adapters_must_be_enabled():
    with pytest.raises(ValueError, match="--lora-modules needs --enable-lora"):
        modules("a=p", enable_lora=False)


def test_the_flag_takes_several_values_and_is_repeatable():
    flags = ["nano", "--enable-lora", "--lora-modules", "a=1", "b=2", "--lora-modules", "c=3", "--max-lora-rank", "64"]
    found = cli.from_args(WorkerConfig, cli.build_parser().parse_args(["serve", *flags]))
    assert (found.enable_lora, found.lora_modules, found.max_lora_rank) == (True, ("a=1", "b=2", "c=3"), 64)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (None, "there is no folder"),
        ([], f"has no {CONFIG}"),
        ([CONFIG], f"has no {WEIGHTS}"),
        ([CONFIG, "adapter_model.bin"], "convert adapter_model.bin to safetensors"),
    ],
)
def test_commands_look_for_the_files_first(tmp_path, capsys, files, words):
    folder = tmp_path / "sql"
    if files is not None:
        folder.mkdir()
        for file in files:
            (folder / file).touch()
    flags = ["--enable-lora", "--lora-modules", f"sql={folder}"]
    for command in (["serve", "nano"], ["worker", "--model", "nano", "--router", "tcp://127.0.0.1:1"]):
        assert cli.main([*command, *flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"radixrt {command[0]}: --lora-modules sql: ") and words in line and str(folder) in line


@pytest.mark.parametrize(
    ("named", "most", "expected"), [((), 0, (1, 2)), (("a=1", "b=2"), 0, (2, 3)), (("a=1",), 4, (4, 5))]
)
def test_one_slot_more_than_may_be_loaded(named, most, expected):
    config = WorkerConfig(enable_lora=True, lora_modules=named, max_loras=most)
    assert (most_loaded(config), num_slots(most_loaded(config))) == (0, 0)
    config = dataclasses.replace(config, allow_runtime_lora_updating=True)
    assert (most_loaded(config), num_slots(most_loaded(config))) == expected


def test_limits_that_contradict_others():
    with pytest.raises(ValueError, match="--max-loras 1: --lora-modules names 2 adapters"):
        modules("a=1", "b=2", max_loras=1)
    with pytest.raises(ValueError, match="--allow-runtime-lora-updating needs --enable-lora"):
        modules(enable_lora=False, allow_runtime_lora_updating=True)


def test_the_admins_key_may_be_in_a_file(tmp_path):
    path = tmp_path / "key"
    path.write_text("root\n")
    path.chmod(0o600)
    flags = ["serve", "nano", "--enable-lora", "--allow-runtime-lora-updating", "--admin-api-key", f"@{path}"]
    args = cli.build_parser().parse_args(flags)
    cli.read_admin_key(args)
    router, worker = cli.from_args(RouterConfig, args), cli.from_args(WorkerConfig, args)
    assert (router.admin_api_key, router.allow_runtime_lora_updating) == ("root", True)
    assert worker.allow_runtime_lora_updating
