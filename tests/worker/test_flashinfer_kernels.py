"""Which kernels of FlashInfer a model asks for, and that they are compiled once, side by side. The compiler is a
fake."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from radixrt import cli
from radixrt.config import WorkerConfig, resolve
from radixrt.worker.cuda import flashinfer_builds
from radixrt.worker.cuda.flashinfer_builds import (
    BuildError,
    KernelBuilds,
    PrefillKernels,
    SamplingKernels,
    explain,
    missing_tools,
)
from radixrt.worker.load import flashinfer_kernels
from radixrt.worker.load.capacity import look_up_shape
from radixrt.worker.load.flashinfer_kernels import ARCHS, SAMPLING, attention_kernels, kernels_of_model
from tests.worker.families import make_model

HOPPER, AMPERE = (9, 0), (8, 0)
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}


def asked(folder, capability=HOPPER, **settings) -> list[tuple[str, int, bool, bool]]:
    """(backend, head size, windows, cap) of what attention needs."""
    config = resolve(WorkerConfig(**{"model": str(folder), "device": "cuda:0"} | settings))
    found = attention_kernels(config, look_up_shape(config), capability)
    assert {kernels.dtype for kernels in found} <= {torch.bfloat16}
    return [(kernels.backend, kernels.head_dim, kernels.window, kernels.cap) for kernels in found]


# ---------------------------------------------------------------- which


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_dense_heads_ask_for_their_size_whatever_the_pages_are(tmp_path, head_dim):
    make_model(tmp_path, "llama", head_dim=head_dim, **HEADS)
    for pages in ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"):
        assert asked(tmp_path, kv_cache_dtype=pages) == [("fa3", head_dim, False, False)]
    assert asked(tmp_path, AMPERE) == [("fa2", head_dim, False, False)]
    assert asked(tmp_path, dtype="float32") == []


def test_heads_that_fa3_does_not_know_ask_for_nothing_on_hopper(tmp_path):
    make_model(tmp_path, "llama", head_dim=80, **HEADS)
    assert asked(tmp_path) == [] and asked(tmp_path, AMPERE) == [("fa2", 80, False, False)]


@pytest.mark.parametrize(
    ("family", "sizes", "expected"),
    [
        ("gpt_oss", {"head_dim": 64}, [("fa3", 64, False, False), ("fa3", 64, True, False)]),
        ("gemma2", {"head_dim": 256} | WINDOWS, [("fa3", 256, False, True), ("fa3", 256, True, True)]),
        ("qwen3_moe", {"head_dim": 128}, [("fa3", 128, False, False)]),
        ("deepseek_v3", {}, []),
        ("deepseek_v32", {}, []),
        ("gemma4_text", {}, []),
        ("llama4_text", {}, []),
        ("mimo_v2_flash", {}, []),
    ],
    ids=["sinks and windows", "caps and windows", "experts", "MLA", "DSA", "mixed", "chunks", "K wider than V"],
)
def test_a_family_asks_for_what_its_attention_calls(tmp_path, family, sizes, expected):
    make_model(tmp_path, family, **sizes)
    assert asked(tmp_path) == expected


def test_what_is_not_computed_by_flashinfer_asks_for_nothing(tmp_path):
    make_model(tmp_path, "llama", head_dim=128, **HEADS)
    for settings in ({"attention_backend": "triton"}, {"attention_backend": "torch"}, {"deterministic": True}):
        config = resolve(WorkerConfig(model=str(tmp_path), device="cuda:0", **settings))
        assert kernels_of_model(config, [HOPPER]) == []
    config = resolve(WorkerConfig(model=str(tmp_path), device="cuda:0"))
    fa2, fa3 = (PrefillKernels(name, torch.bfloat16, 128) for name in ("fa2", "fa3"))
    assert kernels_of_model(config, [AMPERE, HOPPER]) == [fa2, fa3, SAMPLING]


def test_a_spec_is_asked_for_as_flashinfer_asks_itself(monkeypatch):
    """By the arguments of `get_batch_prefill_module` in the plan of a ragged wrapper; positions are encoded before."""
    given: list[tuple] = []
    attention, sampling = ModuleType("flashinfer.jit.attention"), ModuleType("flashinfer.jit.sampling")
    attention.gen_batch_prefill_module = lambda *args: given.append(args)
    sampling.gen_sampling_module = lambda: "sampling"
    modules = {"flashinfer": ModuleType("flashinfer"), "flashinfer.jit": ModuleType("flashinfer.jit")}
    for name, module in (modules | {module.__name__: module for module in (attention, sampling)}).items():
        monkeypatch.setitem(sys.modules, name, module)
    flashinfer_builds.find_spec(PrefillKernels("fa3", torch.float16, 64, window=True))
    half = torch.float16
    assert given == [("fa3", half, half, half, torch.int32, 64, 64, 0, True, False, False)]
    assert flashinfer_builds.find_spec(SAMPLING) == "sampling"


# ---------------------------------------------------------------- builds


class Module:
    """As FlashInfer's JitSpec: `build` waits until `others` modules are being built besides."""

    def __init__(self, kernels, folder: Path, together: threading.Barrier | None = None, error: str = "") -> None:
        self.name = str(kernels).partition(" ")[0]
        self.path = folder / f"{self.name}.so"
        self.together, self.error, self.builds = together, error, 0

    @property
    def is_compiled(self) -> bool:
        return self.path.exists()

    def build(self, verbose: bool) -> None:
        assert not verbose
        self.builds += 1
        if self.together is not None:
            self.together.wait(timeout=20)
        if self.error:
            raise RuntimeError(self.error)
        self.path.write_text(self.name)

    def get_library_path(self) -> Path:
        return self.path


ATTENTION = PrefillKernels("fa3", torch.bfloat16, 128)
WINDOWED = PrefillKernels("fa3", torch.bfloat16, 128, window=True)


@pytest.fixture
def tools(tmp_path, monkeypatch) -> Path:
    """A folder with all that is needed to compile, the only one in PATH."""
    folder = tmp_path / "cuda/bin"
    folder.mkdir(parents=True)
    for name in ("ninja", "nvcc", "c++"):
        (folder / name).write_text("")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CUDA_PATH", "FLASHINFER_NVCC", "CXX", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(folder.parent))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    return folder


def test_modules_are_compiled_side_by_side_and_once(tools, tmp_path):
    """Two of them at a time on 16 cores: each waits for the other."""
    together = threading.Barrier(2)
    specs = {kernels: Module(kernels, tmp_path, together) for kernels in (ATTENTION, SAMPLING)}
    builds = KernelBuilds(specs)
    assert builds.compiling == (ATTENTION, SAMPLING)
    assert builds.wait(ATTENTION) >= 0 and builds.wait(SAMPLING) >= 0 and builds.is_done(SAMPLING)
    again = KernelBuilds(specs)
    assert again.compiling == () and again.is_done(ATTENTION) and again.wait(SAMPLING) == 0.0
    assert [spec.builds for spec in specs.values()] == [1, 1]
    assert again.is_done(WINDOWED) and again.wait(WINDOWED) == 0.0, "of what nobody asked for nothing is known"


@pytest.mark.parametrize("limit", ["cores", "MAX_JOBS"])
def test_attention_comes_first_where_cores_are_few(tools, tmp_path, monkeypatch, limit):
    """Or where the environment bounds what ninja does at a time."""
    if limit == "cores":
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    else:
        monkeypatch.setenv("MAX_JOBS", "4")
    attention_is_built = threading.Barrier(2)
    specs = {ATTENTION: Module(ATTENTION, tmp_path, attention_is_built), SAMPLING: Module(SAMPLING, tmp_path)}
    builds = KernelBuilds(specs)
    assert specs[SAMPLING].builds == 0 and not builds.is_done(SAMPLING)
    attention_is_built.wait(timeout=20)
    builds.wait(SAMPLING)
    assert builds.is_done(ATTENTION)


def test_a_module_that_fails_says_why_and_others_are_compiled(tools, tmp_path):
    output = "\n".join(
        [
            "Ninja build failed. Ninja output:",
            "[1/3] nvcc " + "-DFLASHINFER_ENABLE_F16 " * 40 + "-c renorm.cu --diag-error 20",
            "FAILED: [code=1] sampling_renorm.cuda.o",
            "renorm.cu(3): fatal error: curand.h: No such file or directory",
            "ninja: build stopped: subcommand failed.",
        ]
    )
    specs = {SAMPLING: Module(SAMPLING, tmp_path, error=output), ATTENTION: Module(ATTENTION, tmp_path)}
    builds = KernelBuilds(specs)
    builds.wait(ATTENTION)
    with pytest.raises(BuildError) as raised:
        builds.wait(SAMPLING)
    reason = "renorm.cu(3): fatal error: curand.h: No such file or directory"
    assert str(raised.value) == f"sampling cannot be compiled: {reason}"


def test_errors_are_told_in_a_line():
    assert explain(RuntimeError("")) == "RuntimeError"
    assert explain(RuntimeError("what ninja said\nlast line\n")) == "last line"
    assert "MAX_JOBS=2" in explain(RuntimeError("nvcc error : 'cicc' died due to signal 9\nKilled"))


@pytest.mark.parametrize(("name", "words"), [("ninja", "ninja is"), ("nvcc", "CUDA's compiler"), ("c++", "a C++ comp")])
def test_a_missing_tool_is_named_before_anything_is_compiled(tools, tmp_path, name, words):
    assert list(missing_tools()) == []
    (tools / name).unlink()
    spec = Module(ATTENTION, tmp_path)
    builds = KernelBuilds({ATTENTION: spec})
    with pytest.raises(BuildError, match=words.replace("+", r"\+")):
        builds.wait(ATTENTION)
    assert spec.builds == 0
    spec.path.write_text("")
    KernelBuilds({ATTENTION: spec}).wait(ATTENTION)  # what is there needs no tools


def test_tools_are_where_the_environment_says(tools, monkeypatch):
    monkeypatch.setenv("PATH", "")
    ninja, compiler = missing_tools()
    assert ninja.startswith("ninja is") and compiler.startswith("a C++ compiler is missing: there is no c++ ")
    monkeypatch.setenv("CXX", f"{tools}/c++ -pipe")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    _, cuda = missing_tools()
    assert cuda.startswith("CUDA's compiler is missing: there is no /nowhere/bin/nvcc ")


# ---------------------------------------------------------------- radixrt build-kernels


@pytest.fixture
def command(tools, tmp_path, monkeypatch, capsys):
    """Runs `radixrt build-kernels` on modules that are fakes: (exit code, lines of stdout, last line of stderr)."""
    specs: dict = {}
    env = SimpleNamespace(FLASHINFER_AOT_DIR=tmp_path / "package")
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    jit = ModuleType("flashinfer.jit")
    jit.env = env
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    loaded = SimpleNamespace(__version__="0.6.13")
    monkeypatch.setattr(flashinfer_kernels, "load_flashinfer", lambda: loaded)
    monkeypatch.setattr(
        flashinfer_builds, "find_spec", lambda kernels: specs.setdefault(kernels, Module(kernels, tmp_path))
    )
    monkeypatch.setenv(ARCHS, "")

    def run(*arguments: str):
        code = cli.main(["build-kernels", *arguments])
        told = capsys.readouterr()
        return code, told.out.splitlines(), (told.err.splitlines() or [""])[-1]

    run.specs = specs
    return run


def test_all_of_a_model_is_compiled_without_weights_or_a_gpu(command, tmp_path):
    make_model(tmp_path / "model", "llama", head_dim=128, **HEADS)
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.unlink()
    code, said, _ = command(str(tmp_path / "model"), "--cuda-arch-list", "9.0a", "--aot")
    assert code == 0 and os.environ[ARCHS] == "9.0a"
    assert [line.partition(": ")[0] for line in said[:2]] == ["attention (fa3, bfloat16, heads of 128)", "sampling"]
    assert "compiled in" in said[0] and said[-1] == "FlashInfer 0.6.13: 2 of 2 are there"
    assert (tmp_path / "package/sampling/sampling.so").read_text() == "sampling"
    code, said, _ = command(str(tmp_path / "model"), "--cuda-arch-list", "9.0a")
    assert code == 0 and all("there already" in line for line in said[:2])
    assert [spec.builds for spec in command.specs.values()] == [1, 1]


def test_heads_are_named_instead_of_a_model(command):
    code, said, _ = command(
        "--head-dim", "64", "--head-dim", "128", "--dtype", "float16", "--cuda-arch-list", "8.0,9.0"
    )
    assert code == 0
    half = torch.float16
    assert list(command.specs) == [
        *(PrefillKernels(name, half, dim) for name in ("fa2", "fa3") for dim in (64, 128)), SAMPLING,
    ]  # fmt: skip


def test_what_fails_is_said_and_the_exit_code_is_1(command, tmp_path):
    command.specs[SamplingKernels()] = Module(SAMPLING, tmp_path, error="x.cu(1): error: no\n")
    code, said, _ = command("--head-dim", "128", "--cuda-arch-list", "9.0a")
    assert code == 1 and "sampling cannot be compiled: x.cu(1): error: no" in said
    assert said[-1] == "FlashInfer 0.6.13: 1 of 2 are there"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "for which model?"),
        (["nano", "--head-dim", "128"], "for which model?"),
        (["--head-dim", "128"], "no GPU is to be seen: name what it is to be compiled for, --cuda-arch-list 9.0a"),
        (["--head-dim", "128", "--cuda-arch-list", "hopper"], "'hopper' is no architecture"),
        (["--head-dim", "128", "--cuda-arch-list", "9.0a", "--dtype", "float32"], "kernels for bfloat16 and float16"),
        (["--head-dim", "96", "--cuda-arch-list", "9.0a"], "for Hopper there are heads of (64, 128, 256)"),
    ],
)
def test_what_cannot_be_compiled_is_said_in_a_line(command, monkeypatch, arguments, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    code, said, error = command(*arguments)
    assert (code, said) == (2, []) and words in error and not command.specs


def test_tools_and_packages_that_are_missing_are_said_in_a_line(command, tools, monkeypatch):
    (tools / "nvcc").unlink()
    code, _, error = command("--head-dim", "128", "--cuda-arch-list", "9.0a")
    assert code == 2 and f"CUDA's compiler is missing: there is no {tools}/nvcc" in error

    def absent():
        raise RuntimeError("FlashInfer cannot be imported") from ModuleNotFoundError(name="flashinfer")

    monkeypatch.setattr(flashinfer_kernels, "load_flashinfer", absent)
    code, _, error = command("--head-dim", "128", "--cuda-arch-list", "9.0a")
    assert code == 2 and "FlashInfer is not installed (pip install 'radixrt[cuda]')" in error
