"""What is said of a GPU, or of settings, that cannot be."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from radixrt.config import WorkerConfig, resolve
from radixrt.worker.load import options, pools, runner
from tests.checkpoints import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model(path, "llama")
    return path


def config(folder, **settings) -> WorkerConfig:
    return resolve(WorkerConfig(**{"model": str(folder), "device": "cpu", "max_total_tokens": 256} | settings))


@pytest.mark.parametrize(
    "wrong", [{"num_attention_heads": "6"}, {"quantization_config": [1]}, {"text_config": [1]}, {"head_dim": "x"}]
)
def test_a_config_with_values_of_another_kind(folder, monkeypatch, wrong):
    read = options.checkpoint.read_json
    monkeypatch.setattr(options.checkpoint, "read_json", lambda path: read(path) | wrong)
    with pytest.raises(ValueError, match="config.json: a value is not of the kind that is expected"):
        options.look_up(config(folder))


def on_gpu(folder, monkeypatch, capability) -> options.Loaded:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    return replace(options.look_up(config(folder)), device=torch.device("cuda", 0))


def test_an_old_gpu_computes_by_torch_and_says_why(folder, monkeypatch):
    assert "7.5, the kernels need 8.0" in options.no_kernels(on_gpu(folder, monkeypatch, (7, 5)))
    ampere = replace(on_gpu(folder, monkeypatch, (8, 0)), kv_dtype=torch.float8_e4m3fn)
    assert "8.0, kernels with e4m3 pages need 8.9" in options.no_kernels(ampere)


def test_layers_without_kernels_are_computed_by_torch(checkpoint, monkeypatch):
    pytest.importorskip("triton")
    for family, changes, reason in (
        ("qwen3_next", {}, ""),
        ("qwen3_next", {"linear_conv_kernel_dim": 5}, "convolutions of 5 inputs"),
        ("qwen3_next", {"linear_value_head_dim": 12}, "heads of width 12"),
        ("lfm2", {}, ""),
        ("deepseek_v32", {}, ""),
        ("gemma4_text", {}, ""),
        ("llama4_text", {}, ""),
        ("llama4_text", {"num_experts_per_tok": 2}, "several experts of a token with scaled inputs have no kernels"),
        ("phimoe", {}, ""),
        ("mimo_v2_flash", {}, ""),
    ):
        found = options.no_kernels(on_gpu(checkpoint(family, **changes)[0], monkeypatch, (9, 0)))
        assert reason in found and bool(reason) == bool(found)


def test_fp8_pages_are_the_default_from_hopper_on(monkeypatch):
    gpu = torch.device("cuda", 0)
    for capability, expected in (
        ((9, 0), torch.float8_e4m3fn),
        ((10, 0), torch.float8_e4m3fn),
        ((8, 9), torch.bfloat16),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, found=capability: found)
        assert options.choose_kv_dtype("auto", torch.bfloat16, gpu) == expected
    assert options.choose_kv_dtype("auto", torch.float32, torch.device("cpu")) == torch.float32
    assert options.choose_kv_dtype("fp8", torch.float32, gpu) == torch.float8_e4m3fn


def test_out_of_memory_names_numbers_and_flags(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (3 * 10**9, 80 * 10**9))

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner, "make_runner", fail)
    with pytest.raises(ValueError) as problem:
        runner.load_runner(config(folder))
    text = str(problem.value)
    assert "80.0 GB in all, 3.0 GB free" in text
    assert "--gpu-memory-utilization (0.9)" in text and "--max-num-batched-tokens" in text


def test_no_room_for_pages(folder, monkeypatch):
    loaded = on_gpu(folder, monkeypatch, (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (9 * 10**9, 80 * 10**9))
    assert runner.pool_tokens(loaded, 0.9) == 10**9 // (loaded.spec.kv_elements * loaded.kv_dtype.itemsize)
    with pytest.raises(ValueError, match=r"9.0 GB free, 2.0 GB needed by a step; see --gpu-memory-utilization"):
        runner.pool_tokens(loaded, 0.9, reserved=2 * 10**9)


def test_on_a_cpu_pages_take_a_share_of_what_is_available_and_short_contexts_are_a_warning(folder, monkeypatch, caplog):
    loaded = options.look_up(config(folder))
    monkeypatch.setattr(pools, "available_bytes", lambda: 4 * loaded.token_bytes * (loaded.spec.max_model_len + 5))
    assert runner.pool_tokens(loaded, 0.9) == loaded.spec.max_model_len + 5
    assert not caplog.records
    monkeypatch.setattr(pools, "available_bytes", lambda: 4 * loaded.token_bytes * 100)
    assert runner.pool_tokens(loaded, 0.9) == 100
    assert f"contexts are limited to 100 tokens, not the model's {loaded.spec.max_model_len}" in caplog.text


@pytest.mark.parametrize(("backend", "fails"), [("auto", False), ("flashinfer", True), ("triton", False)])
def test_flashinfer_that_cannot_be_built_is_replaced_with_a_warning(folder, monkeypatch, caplog, backend, fails):
    cuda = pytest.importorskip("radixrt.worker.load.cuda_runner")
    loaded = replace(on_gpu(folder, monkeypatch, (9, 0)), dtype=torch.bfloat16)

    def fail(*_):
        raise RuntimeError("ninja: build stopped")

    monkeypatch.setattr(cuda, "FlashInfer", fail)
    settings = SimpleNamespace(attention_backend=backend, page_size=1, max_num_batched_tokens=64)
    with caplog.at_level(logging.WARNING):
        if fails:
            with pytest.raises(ValueError, match="attention_backend: FlashInfer is not used: RuntimeError: ninja"):
                cuda.find_flashinfer(settings, loaded)
        else:
            assert cuda.find_flashinfer(settings, loaded) is None
    assert ("ninja: build stopped" in caplog.text) == (backend == "auto")


@pytest.mark.parametrize("backend", ["auto", "flashinfer"])
def test_kernels_that_could_not_be_compiled_ahead_are_not_tried_again(folder, monkeypatch, caplog, backend):
    """Neither those of attention nor, where they are first called, those of draws."""
    cuda = pytest.importorskip("radixrt.worker.load.cuda_runner")
    loaded = replace(on_gpu(folder, monkeypatch, (9, 0)), dtype=torch.bfloat16)
    monkeypatch.setattr(cuda, "FlashInfer", lambda *_: pytest.fail("it would be compiled again"))
    monkeypatch.setattr(cuda, "find_thresholds", lambda *_: pytest.fail("it would be compiled again"))
    monkeypatch.setattr(cuda, "attention_kernels", lambda *_: ["attention"])

    class Failed:
        def is_done(self, kernels) -> bool:
            return True

        def wait(self, kernels) -> float:
            raise RuntimeError(f"{kernels} cannot be compiled: ninja is missing")

    settings = SimpleNamespace(attention_backend=backend, page_size=1, max_num_batched_tokens=64, deterministic=False)
    assert cuda.find_sampling(settings, loaded, Failed())() is None
    assert "not used for draws: RuntimeError: sampling cannot be compiled: ninja is missing" in caplog.text
    if backend == "flashinfer":
        with pytest.raises(ValueError, match="attention cannot be compiled: ninja is missing"):
            cuda.find_flashinfer(settings, loaded, Failed())
    else:
        assert cuda.find_flashinfer(settings, loaded, Failed()) is None
        assert "attention cannot be compiled: ninja is missing" in caplog.text


def test_builds_begin_for_what_the_model_needs_and_without_flashinfer_there_are_none(folder, monkeypatch):
    cuda = pytest.importorskip("radixrt.worker.load.cuda_runner")
    loaded = replace(on_gpu(folder, monkeypatch, (8, 0)), dtype=torch.bfloat16)
    settings, asked = SimpleNamespace(attention_backend="auto", deterministic=False), []

    def find(wanted):
        asked.extend(map(str, wanted))
        raise RuntimeError("FlashInfer cannot be imported")

    monkeypatch.setattr(cuda, "find_specs", find)
    builds = cuda.begin_builds(settings, loaded)
    assert asked == [f"attention (fa2, bfloat16, heads of {loaded.spec.head_dim})", "sampling"]
    assert builds.compiling == () and builds.is_done(cuda.SAMPLING)


@pytest.mark.parametrize(
    ("compiled", "tokens", "ranks", "steps"),
    [(False, 0, None, 1), (True, 0, None, 0), (False, 512, None, 0), (False, 0, 0, 0), (False, 0, 1, 1)],
    ids=["compiling", "compiled", "no step to measure", "another rank has them", "all ranks compile"],
)
def test_a_step_without_flashinfer_passes_the_time_of_its_builds(folder, monkeypatch, compiled, tokens, ranks, steps):
    cuda = pytest.importorskip("radixrt.worker.load.cuda_runner")
    loaded = replace(on_gpu(folder, monkeypatch, (9, 0)), dtype=torch.bfloat16)
    ran = []
    monkeypatch.setattr(cuda, "attention_kernels", lambda *_: ["attention"])
    monkeypatch.setattr(cuda, "_largest_step", lambda *arguments: ran.append(arguments))
    builds = SimpleNamespace(is_done=lambda kernels: compiled)
    group = None if ranks is None else SimpleNamespace(smallest=lambda number: min(number, ranks))
    settings = SimpleNamespace(max_total_tokens=tokens)
    cuda._pass_time(settings, loaded, "model", builds, "thresholds", group)
    assert ran == steps * [(settings, loaded, "model", "thresholds", None, None, group)]


@pytest.mark.parametrize("long", [False, True])
def test_a_build_that_takes_long_is_spoken_of_before_it_ends(folder, monkeypatch, caplog, long):
    cuda = pytest.importorskip("radixrt.worker.load.cuda_runner")
    loaded = replace(on_gpu(folder, monkeypatch, (9, 0)), dtype=torch.bfloat16)
    said = []

    def build(windows):
        until = time.monotonic() + 10
        while long and "are built" not in caplog.text and time.monotonic() < until:
            time.sleep(0.01)
        said.append(caplog.text)

    monkeypatch.setattr(cuda, "FlashInfer", lambda *_: SimpleNamespace(try_out=build))
    monkeypatch.setattr(cuda, "SILENT_SECONDS", 0.05 if long else 60.0)
    settings = SimpleNamespace(attention_backend="auto", page_size=1, max_num_batched_tokens=64)
    with caplog.at_level(logging.INFO):
        cuda.find_flashinfer(settings, loaded)
    assert ("attention are built" in said[0]) == long
    assert ("attention were built in" in caplog.text) == long
