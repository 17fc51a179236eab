"""Weights in integers on a CPU, and the kernels for CPUs, against plain torch in float64."""

from __future__ import annotations

from dataclasses import replace

import gguf
import msgspec
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from radixrt.checkpoint.hub import find
from radixrt.config import WorkerConfig, resolve
from radixrt.worker.execution.attention import attend
from radixrt.worker.load.runner import load_runner
from radixrt.worker.model.layers import _cpu_kernels
from radixrt.worker.model.layers.int_linear import FEW, IntLinear, IntWeight, concatenate_ints
from radixrt.worker.model.layers.norms import rms_norm
from radixrt.worker.model.layers.ops import TorchOps
from radixrt.worker.model.layers.rope import rotate
from radixrt.worker.model.parallel.sharding import Part
from radixrt.worker.model.weights.gguf_integers import KINDS, read_integers
from radixrt.worker.speculative.ngram import Drafter
from tests.checkpoints import make_model, make_tokenizer
from tests.worker.engine import GREEDY, Engine, prompts
from tests.worker.test_gguf import write


def stored_blocks(name: str, rows: int, columns: int) -> np.ndarray:
    """uint8[rows, bytes]: blocks with random integers and scales of about 0.01."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    rng = np.random.default_rng(sum(map(ord, name)))
    blocks = rng.integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(name, (0,))
    for at in halves:
        scales = rng.normal(0, 0.01, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    blocks[0, halves[0] : halves[0] + 2] = 0  # a block of zeros
    return blocks.reshape(rows, -1)


def weight(name: str, rows: int = 48, columns: int = 512) -> tuple[IntWeight, torch.Tensor]:
    stored = stored_blocks(name, rows, columns)
    dequantized = gguf.dequantize(stored, gguf.GGMLQuantizationType[name]).astype(np.float32)
    return read_integers(name, stored, dequantized), torch.from_numpy(dequantized)


@pytest.mark.parametrize("name", KINDS)
class TestFormats:
    def test_weights_are_those_of_the_file_to_the_bit(self, name):
        found, dequantized = weight(name)
        assert torch.equal(found.dequantized(), dequantized)
        assert found.nbytes < 0.33 * dequantized.nbytes

    def test_products_are_those_of_the_dequantized_weight(self, name):
        found, dequantized = weight(name)
        bias = torch.randn(48)
        product = IntLinear.of(found, bias)
        for count in (1, 2, 7, 13, FEW + 1):
            x = torch.randn(count, 512)
            expected = (x.double() @ dequantized.double().t() + bias).float()
            near = {"rtol": 1e-6, "atol": 2e-6 * float(expected.abs().max())}
            torch.testing.assert_close(product(x), expected, **near)
            residual = torch.randn(count, 48)
            for factor in (1.0, 0.5):
                sums = residual.clone()
                product.add(x, sums, factor)
                torch.testing.assert_close(sums, residual + factor * expected, **near)
            assert product(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("exact", [False, True])
def test_a_row_is_the_same_in_any_company_and_by_any_number_of_threads(exact):
    found, _ = weight("Q4_1", 1000)
    x = torch.randn(FEW + 20 if exact else FEW, 512)
    alone, many = (replace(IntLinear.of(found, None, exact), threads=threads) for threads in (1, 3))
    together = many(x)
    assert torch.equal(together, alone(x))
    for row in (0, 5, len(x) - 1):
        assert torch.equal(many(x[row : row + 1])[0], together[row])


def test_parts_and_rows_of_a_weight():
    found, dequantized = weight("Q4_K")
    order = torch.randperm(48)[:20]
    assert torch.equal(found.take(order).dequantized(), dequantized[order])
    assert torch.equal(found.part(Part(0, 8, 24)).dequantized(), dequantized[8:24])
    assert torch.equal(found.part(Part(1, 64, 256)).dequantized(), dequantized[:, 64:256])
    assert found.part(Part(1, 48, 256)) is None, "48 is within a group"


def test_rows_of_different_formats_are_one_weight():
    parts = [weight(name) for name in ("Q4_0", "Q8_0", "Q6_K", "Q4_0")]
    whole = concatenate_ints([found for found, _ in parts])
    assert torch.equal(whole.dequantized(), torch.cat([dequantized for _, dequantized in parts]))
    alike = concatenate_ints([parts[0][0], parts[3][0]])
    assert alike.bits == 4


def test_rows_that_do_not_exist_are_an_error():
    found, _ = weight("Q8_0")
    ids, out = torch.tensor([48]), torch.empty(1, 512)
    with pytest.raises(IndexError):
        found.matrix().take(out.data_ptr(), ids.data_ptr(), 1)
    with pytest.raises(ValueError, match="another size"):
        replace(found, scales=found.scales[:-1]).matrix()


class TestKernels:
    def test_norms(self):
        for width in (64, 577):
            x, factors = 3 * torch.randn(5, width), torch.randn(width)
            expected = F.rms_norm(x.double(), (width,), factors.double(), 1e-5).float()
            torch.testing.assert_close(rms_norm(x, factors, 1e-5), expected, rtol=1e-6, atol=1e-6)

    def test_rotations(self):
        x, angles = torch.randn(7, 15, 64)[:, 3:12], torch.randn(7, 1, 32)
        expected = rotate(x.double(), angles.double().cos(), angles.double().sin()).float()
        torch.testing.assert_close(rotate(x, angles.cos(), angles.sin()), expected, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
    def test_gates(self, activation):
        x = 10 * torch.randn(6, 128)
        x[0, :4] = torch.tensor([300.0, -300.0, 0.0, torch.nan])
        expected = TorchOps.gate(x.double(), activation).float()
        torch.testing.assert_close(TorchOps.gate(x, activation), expected, rtol=2e-6, atol=1e-6, equal_nan=True)

    @pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 256), (14, 2, 32), (3, 3, 16)])
    def test_attention_of_single_queries(self, heads, kv_heads, dim):
        k, v = torch.randn(500, kv_heads, dim), torch.randn(500, kv_heads, dim)
        seen = [torch.randperm(500)[:count] for count in (1, 40, 300)]
        slots, bounds = torch.cat(seen), torch.tensor([0, 1, 41, 341])
        q = 3 * torch.randn(3, heads, dim)
        out = torch.empty_like(q)
        at = [x.data_ptr() for x in (q, k, v, out, slots, bounds)]
        _cpu_kernels.attend(*at, 3, heads, kv_heads, dim, 0.2, 2)
        for i, mine in enumerate(seen):
            expected = attend(q[i : i + 1].double(), k[mine].double(), v[mine].double(), None, 0.2)[0].float()
            torch.testing.assert_close(out[i], expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama as a GGUF file in Q4_1, with embeddings in Q8_0."""
    path = tmp_path_factory.mktemp("quantized")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(path / "cache"))
        patched.setattr(gguf.GGUFWriter, "add_tensor", quantizing(gguf.GGUFWriter.add_tensor))
        tied = {"tie_word_embeddings": True, "hidden_size": 128, "num_attention_heads": 4}
        original = make_tokenizer(path / "original")
        model = make_model(original, "llama", **tied)
        model.state_dict().pop("lm_head.weight", None)
        write(path / "model.gguf", original, model)
        yield str(find(str(path / "model.gguf")))


def quantizing(add):
    def add_quantized(writer, name, values):
        if "norm" in name:
            return add(writer, name, values)
        kind = (
            gguf.GGMLQuantizationType.Q8_0 if "token" in name or "output." in name else gguf.GGMLQuantizationType.Q4_1
        )
        return add(writer, name, gguf.quantize(values, kind), raw_dtype=kind)

    return add_quantized


def load(folder: str, **settings):
    return load_runner(resolve(WorkerConfig(folder, device="cpu", **{"max_total_tokens": 4096} | settings)))


class TestModel:
    def test_answers_are_those_of_the_dequantized_model(self, folder):
        runners = load(folder), load(folder, quantization="none")
        assert [runner._model.is_int for runner in runners] == [True, False]
        asked = prompts(6, 30, 60, seed=3)
        answers = [Engine(runner).generate(asked) for runner in runners]
        assert answers[0] == answers[1]

    def test_cold_and_warm_alone_and_in_one_batch_with_drafts_and_without(self, folder):
        asked = prompts(5, 30, 60, seed=1)
        engine = Engine(load(folder))
        alone = [engine.generate([prompt])[0] for prompt in asked]
        assert engine.generate(asked) == alone, "warm"
        assert Engine(load(folder)).generate(asked) == alone, "cold, in one batch"
        drafter = Drafter(8, False)
        again = [prompt + answer[:40] for prompt, answer in zip(asked, alone, strict=True)]
        drafting = Engine(load(folder), drafter=drafter)
        assert drafting.generate(asked) == alone
        assert [drafting.generate([x], msgspec.structs.replace(GREEDY, max_tokens=24))[0] for x in again] == [
            answer[40:] for answer in alone
        ]
        assert drafter.accepted > 0

    def test_deterministic_answers_do_not_depend_on_chunks(self, folder):
        asked = prompts(3, 100, 150, seed=2)
        chunks = [Engine(load(folder, deterministic=True), chunk=chunk).generate(asked) for chunk in (512, 40)]
        assert chunks[0] == chunks[1]
