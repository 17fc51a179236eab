"""Bad values in the JSON files of a checkpoint: one line names the file and the field, and nothing is started."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from radixrt import cli
from radixrt.checkpoint.files import check_files, check_model
from radixrt.config import WorkerConfig, resolve
from radixrt.launch import launcher
from radixrt.tokens import load_tokenizer
from radixrt.worker.load.runner import load_runner
from radixrt.worker.model.layers.rope import frequencies
from radixrt.worker.model.weights.checkpoint import read_json
from tests.checkpoints import make_tokenizer

MODEL = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}  # fmt: skip
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
EXPERTS = {"n_routed_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
HUGE = 10**30
NO_OBJECT = {"empty": b"", "a list": b"[1]", "no JSON": b"{", "not UTF-8": b'{"a": "\xff"}', "null": b"null",
             "deep": b'{"a":' + b"[" * 100_000}  # fmt: skip
FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")

READ_BY_ALL = [  # file, field, values
    *((file, None, [*NO_OBJECT.values()]) for file in (*FILES, "added_tokens.json")),
    ("config.json", "vocab_size", ["x", [1], {}, -1, True, 1.5, HUGE]),
    ("config.json", "text_config", ["x", [1], 5]),
    ("config.json", "text_config.vocab_size", ["x", -1]),
    ("config.json", "text_config.eos_token_id", ["a", [None]]),
    *((file, "eos_token_id", ["a", -1, [1, "a"], {}, 0.5, [True]]) for file in FILES[::2]),
    *((file, name, [5, ["a"], {"content": 5}]) for file in ("tokenizer_config.json", "special_tokens_map.json")
      for name in ("bos_token", "eos_token")),
    ("special_tokens_map.json", "additional_special_tokens", ["a", [1], [{"content": None}], {"a": 1}]),
    ("tokenizer_config.json", "extra_special_tokens", ["a", [None], {"a": ["b"]}]),
    ("tokenizer_config.json", "added_tokens_decoder",
     [[], {"x": {"content": "a"}}, {"1": "a"}, {"1": {}}, {"1": {"content": 5}}, {"\u0661": {"content": "a"}},
      {"9" * 30: {"content": "a"}}, {"999999999": {"content": "a"}}]),
    ("tokenizer_config.json", "chat_template", [5, ["a"], [{"name": "a"}], {"default": 5}]),
    ("tokenizer_config.json", "add_bos_token", ["yes", 1]),
    ("tokenizer_config.json", "add_eos_token", ["yes", []]),
    ("added_tokens.json", "'<a>'", ["x", -1, 1.5, 10**9]),
    ("added_tokens.json", "'a\\nb'", [[]]),
]  # fmt: skip
READ_BY_WORKERS = [
    ("config.json", "vocab_size", [0, None]),
    *(("config.json", name, ["x", [1], {}, 0, -1, None, True, HUGE]) for name in
      ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")),
    *(("config.json", name, ["x", -1, 1.5]) for name in
      ("num_key_value_heads", "head_dim", "intermediate_size", "sliding_window", "num_experts", "num_experts_per_tok")),
    *(("config.json", name, [None, "x"]) for name in (*LATENT, "moe_intermediate_size")),
    ("config.json", "num_hidden_layers", [5000, 10**9]),
    *(("config.json", name, [10**7, 10**9, float("nan")]) for name in
      ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size",
       "num_experts", "v_head_dim")),
    ("config.json", "rms_norm_eps", ["x", [], False]),
    ("config.json", "rope_theta", ["x", 0, -1.0, HUGE]),
    ("config.json", "logits_scaling", [0, "x"]),
    ("config.json", "model_type", [5, []]),
    ("config.json", "hidden_act", [5, {}]),
    ("config.json", "layer_types", ["full_attention", [1]]),
    ("config.json", "quantization_config", ["fp8", [1]]),
    ("config.json", "rope_scaling", ["yarn", [1]]),
    ("config.json", "rope_scaling.factor", ["x", []]),
    ("config.json", "rope_parameters.full_attention", [1]),
    ("config.json", "rope_parameters.full_attention.rope_theta", ["x", 0]),
    ("config.json", "text_config.hidden_size", ["x", 0]),
]  # fmt: skip


def cases(table: list[tuple[str, str | None, list[Any]]]) -> list[Any]:
    return [pytest.param(file, field, value, id=f"{file}-{field}-{str(value)[:24]}")
            for file, field, values in table for value in values]  # fmt: skip


@pytest.fixture
def folder(tmp_path) -> Path:
    make_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def spoil(path: Path, field: str | None, value: Any) -> str:
    """Put a value into a file, or bytes in its place; how a line about it begins."""
    if field is None:
        path.write_bytes(value)
        return f"{path} is not a JSON object: "
    content = json.loads(path.read_text()) if path.is_file() else {}
    content |= next((group for group in (LATENT, EXPERTS) if field in group), {})
    place, names = content, [field.strip("'").replace("\\n", "\n")] if field[0] == "'" else field.split(".")
    for name in names[:-1]:
        place = place.setdefault(name, {})
    place[names[-1]] = value
    path.write_text(json.dumps(content))
    return f"{path}: {field} is {'null, expected ' if value is None else ''}"


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command ends with."""
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    start, found, rest = line.partition(": ")
    assert start == f"radixrt {arguments[0]}" and found and len(line) < 2000  # all families have names
    return rest


@pytest.mark.parametrize(("file", "field", "value"), cases(READ_BY_ALL + READ_BY_WORKERS))
def test_nothing_is_started_with_a_bad_file(folder, monkeypatch, capsys, file, field, value):
    begin = spoil(folder / file, field, value)
    monkeypatch.setattr(launcher, "start_subprocess", lambda *_, **__: pytest.fail("a child is started"))
    monkeypatch.setattr(cli, "run_role", lambda *_: pytest.fail("it begins"))
    for command in (["serve", str(folder)], ["worker", "--router", "tcp://127.0.0.1:1", "--model", str(folder)]):
        line = said(command, capsys)
        assert line.startswith(begin) and (field is None or ", expected " in line)


@pytest.mark.parametrize(("file", "field", "value"), cases(READ_BY_ALL))
def test_a_tokenizer_says_the_same(folder, monkeypatch, capsys, file, field, value):
    begin = spoil(folder / file, field, value)
    if file == "added_tokens.json":  # it is read beside a sentencepiece model alone
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ValueError) as caught:
        load_tokenizer(folder)
    assert str(caught.value).startswith(begin)
    monkeypatch.setattr(launcher, "start_subprocess", lambda *_, **__: pytest.fail("a child is started"))
    for command in (["serve", "nano"], ["router", "--worker-address", "tcp://127.0.0.1:1"], ["frontend"]):
        assert said([*command, "--tokenizer", str(folder)], capsys).startswith(begin)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", b"\xff"),
        ("additional_chat_templates/tool_use.jinja", b"\xff"),
        ("chat_template.json", b'{"chat_template": 5}'),
        ("chat_template.json", b'{"chat_template": [{"name": "a"}]}'),
        ("chat_template.json", b"[]"),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b'{"version": "\xff"}'),
    ],
)
def test_other_files_of_a_tokenizer(folder, file, content):
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        load_tokenizer(folder)
    assert str(folder / file) in str(caught.value) and "\n" not in str(caught.value)


def test_what_may_be(folder, shared_data):
    """Null, where it is as good as nothing; tokens by the names that newer files give them; published files."""
    optional = ("head_dim", "num_key_value_heads", "sliding_window", "rope_scaling", "q_lora_rank")
    nulls = dict.fromkeys((*optional, *LATENT, *EXPERTS))
    (folder / "config.json").write_text(json.dumps(MODEL | nulls | {"eos_token_id": [1, 2], "pad_token_id": -1}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": None}, "unk_token": None}))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"extra_special_tokens": {"image_token": "<i>"}, "additional_special_tokens": ["<a>", {"content": "<b>"}]}
    config["chat_template"] = [{"name": "default", "template": "a"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    check_model(folder)
    load_tokenizer(folder)
    text = {name: value for name, value in MODEL.items() if name != "model_type"}
    for above, within in ((dict.fromkeys(text), text), (text, dict.fromkeys(text))):
        sees = above | {"model_type": "mistral3", "text_config": within}
        (folder / "config.json").write_text(json.dumps(sees))
        check_model(folder)
    published = sorted((shared_data / "model_configs").glob("*.json"))
    assert published
    for path in published:
        (folder / "config.json").write_bytes(path.read_bytes())
        check_model(folder)


def test_numbers_that_python_writes(folder):
    """NaN and infinities, which are no JSON, in fields that nobody reads; as some limits of lengths, huge."""
    (folder / "config.json").write_text(json.dumps(MODEL | {"limits": [0.0, float("inf"), float("nan")]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": HUGE}))
    check_model(folder)


def test_a_byte_order_mark(folder):
    """As some editors of Windows write it."""
    path = folder / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    check_model(folder)
    assert read_json(path) == json.loads(path.read_bytes())
    load_tokenizer(folder)


def test_of_other_families_values_may_be_of_other_kinds(folder):
    """They are no fault of the file; a worker without a model reads none."""
    (folder / "config.json").write_text(json.dumps(MODEL | {"model_type": "gemma3n", "intermediate_size": [1, 2]}))
    with pytest.raises(ValueError, match="model_type 'gemma3n' is not served"):
        check_model(folder, "radixrt")
    check_model(folder)
    check_files(folder)


@pytest.mark.parametrize("role", ["serve", "worker"])
def test_without_a_model_its_family_does_not_matter(folder, role, monkeypatch, capsys):
    (folder / "config.json").write_text(json.dumps({"model_type": "none", "vocab_size": 512}))
    began = []
    monkeypatch.setattr(launcher, "run_stack", lambda config: began.append(config) or 0)
    monkeypatch.setattr(cli, "run_role", lambda role, config, pulse: began.append(config))
    named = [str(folder)] if role == "serve" else ["--model", str(folder), "--router", "tcp://127.0.0.1:1"]
    assert not cli.main([role, *named, "--fake", "0,0.01"]) and began


@pytest.mark.parametrize("change", [{"head_dim": -1}, {"vocab_size": "x"}, {"rope_theta": True}])
def test_a_worker_in_this_process(folder, change):
    """That no command has looked at the files for."""
    (folder / "config.json").write_text(json.dumps(MODEL | change))
    with pytest.raises(ValueError, match=f"config.json: {[*change][0]} is .*, expected a number"):
        load_runner(resolve(WorkerConfig(model=str(folder), device="cpu", load_format="dummy")))


@pytest.mark.parametrize("field", sorted(MODEL.keys() - {"num_key_value_heads", "rms_norm_eps", "eos_token_id"}))
def test_a_field_that_is_missing(folder, capsys, field):
    (folder / "config.json").write_text(json.dumps({name: value for name, value in MODEL.items() if name != field}))
    line = said(["worker", "--router", "tcp://127.0.0.1:1", "--device", "cpu", "--model", str(folder)], capsys)
    assert line.startswith("model_type '' is not served" if field == "model_type" else f"config.json has no {field}")


def test_a_gguf_file_without_its_last_tensors(tmp_path, capsys):
    """As a download that broke leaves it."""
    tensors = b"".join(struct.pack("<Q1sIQIQ", 1, name, 1, 8, 0, offset) for name, offset in ((b"a", 0), (b"b", 4096)))
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + tensors + bytes(200))
    line = said(["serve", str(tmp_path / "x.gguf")], capsys)
    assert line == f"{tmp_path}/x.gguf: it is cut off: tensor b is missing; download it again"


def test_a_folder_without_config(folder, capsys):
    (folder / "config.json").unlink()
    assert said(["serve", str(folder)], capsys).startswith(f"{folder} holds no config.json: give")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": "x"}, "radixrt serve: {folder}/config.json: vocab_size is 'x', expected a number from"),
        ({"hidden_act": "sine"}, "radixrt worker: hidden_act 'sine' is not served"),
    ],
)
def test_the_command_ends(folder, change, words):
    """Whoever reads the file."""
    (folder / "config.json").write_text(json.dumps(MODEL | change))
    places = [f"--{name}-address=ipc://{folder}/{name}" for name in ("client", "worker")]
    command = [sys.executable, "-m", "radixrt", "serve", str(folder), "--device", "cpu", "--port", "0", *places]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "while starting" not in done.stderr
    assert words.format(folder=folder) in done.stderr


def test_a_token_id_that_is_absurd_is_refused_before_tables_are_made(folder) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["zzz"] = 10**9
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="token of id 1000000000; 4194303 is the largest"):
        load_tokenizer(folder)


@pytest.mark.parametrize("index", [{"a": 5}, {"a": "/dev/zero"}, {"a": "../x.safetensors"}, ["a"]])
def test_an_index_names_files_of_its_folder(folder, index) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ValueError, match="expected the names of files beside it"):
        load_runner(resolve(WorkerConfig(model=str(folder), device="cpu", max_total_tokens=64)))


@pytest.mark.parametrize("size", [2**60, 2**63, 10**8])
def test_a_header_that_lies_about_its_length_is_refused(folder, size) -> None:
    (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read"):
        load_runner(resolve(WorkerConfig(model=str(folder), device="cpu", max_total_tokens=64)))


@pytest.mark.parametrize(
    "rope", [{"rope_type": "linear", "factor": 0}, {"rope_type": "linear", "factor": -4.0},
             {"rope_type": "llama3", "factor": 0.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}],
)  # fmt: skip
def test_rope_numbers_without_angles_are_refused(rope) -> None:
    with pytest.raises(ValueError, match="rope_scaling of rope_type"):
        frequencies({"rope_theta": 1e4} | rope, 16, 4096)
