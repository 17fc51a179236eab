"""Experts in FP8: the reference, and what is read of a checkpoint."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from radixrt.worker.model import read_spec
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.layers.fp8 import BLOCK, FP8, LIMIT, Fp8Scaling, Fp8Weight, quantize_activations
from radixrt.worker.model.layers.linear import Linear
from radixrt.worker.model.layers.moe import Experts, ScaledStack
from radixrt.worker.model.layers.ops import TorchOps
from radixrt.worker.model.weights.checkpoint import SafetensorsWeights, read_json
from radixrt.worker.model.weights.quantized import Products
from radixrt.worker.model.weights.random_weights import RandomWeights
from tests.checkpoints import make_model
from tests.worker.test_scaled import CPU, KINDS, decoder, error, logits, of_blocks, of_rows, of_tensor, store

COUNT, CHOSEN, HIDDEN, INNER = 5, 2, 192, 128


def weight_of(fp8_scaling: Fp8Scaling, rows: int, columns: int) -> Fp8Weight:
    """Of rows that are very different, and blocks that are."""
    wide = 0.1 * torch.randn(rows, columns) * torch.logspace(-1, 1, rows)[:, None]
    if fp8_scaling is Fp8Scaling.ROWS:
        return Fp8Weight.of(wide)
    scales = 0.001 + torch.rand(-(-rows // BLOCK), -(-columns // BLOCK))
    return Fp8Weight.by_blocks((100 * wide).clamp(-LIMIT, LIMIT).to(FP8), scales)


def stack_of(fp8_scaling: Fp8Scaling, rows: int, columns: int) -> ScaledStack:
    weights = [weight_of(fp8_scaling, rows, columns) for _ in range(COUNT)]
    stack = ScaledStack.like(weights[0], COUNT)
    assert all([stack.put(number, weight) for number, weight in enumerate(weights)])
    return stack


def experts_of(fp8_scaling: Fp8Scaling) -> Experts:
    gate_up, down = stack_of(fp8_scaling, 2 * INNER, HIDDEN), stack_of(fp8_scaling, HIDDEN, INNER)
    return Experts(Linear(torch.randn(COUNT, HIDDEN)), gate_up, down, CHOSEN, True, "silu", False)


# ---------------------------------------------------------------- the reference


@pytest.mark.parametrize("fp8_scaling", Fp8Scaling)
def test_a_stack_holds_what_is_put_into_it(fp8_scaling):
    weights = [weight_of(fp8_scaling, 256, HIDDEN) for _ in range(2)]
    stack = ScaledStack.like(weights[0], 2)
    assert stack.put(1, weights[1]) and stack.put(0, weights[0])
    assert len(stack) == 2 and stack.numel() == 2 * 256 * HIDDEN
    assert stack.nbytes == sum(weight.values.nbytes + weight.scales.nbytes for weight in weights)
    for number, weight in enumerate(weights):
        assert torch.equal(stack[number].dequantized(), weight.dequantized())
    other = Fp8Scaling.BLOCKS if fp8_scaling is Fp8Scaling.ROWS else Fp8Scaling.ROWS
    assert not stack.put(0, weight_of(other, 256, HIDDEN))
    assert torch.equal(stack[0].dequantized(), weights[0].dequantized())


@pytest.mark.parametrize("fp8_scaling", Fp8Scaling)
def test_the_reference_rounds_what_goes_into_each_product(fp8_scaling):
    """Before the first and before the second, and not what goes to the router."""
    torch.manual_seed(0)
    experts = experts_of(fp8_scaling)
    x, residual = torch.randn(7, HIDDEN) * torch.logspace(-1, 1, 7)[:, None], torch.randn(7, HIDDEN)
    found = residual.clone()
    experts.one_by_one(x, found, TorchOps())
    shares, numbers = experts.router(x).softmax(-1).topk(CHOSEN)
    shares = shares / shares.sum(-1, keepdim=True)
    exact, expected = residual.clone(), residual.clone()
    for token in range(len(x)):
        for share, number in zip(shares[token], numbers[token].tolist(), strict=True):
            gate_up, down = experts.gate_up[number].dequantized(), experts.down[number].dequantized()
            gate, up = (gate_up @ x[token]).chunk(2)
            exact[token] += share * (down @ (F.silu(gate) * up))
            gate, up = (gate_up @ quantize_activations(x[token : token + 1], fp8_scaling).dequantized()[0]).chunk(2)
            expected[token] += share * (
                down @ quantize_activations((F.silu(gate) * up)[None], fp8_scaling).dequantized()[0]
            )
    assert error(found - residual, expected - residual) < 1e-4
    assert 1e-2 < error(found - residual, exact - residual) < 0.06


# ---------------------------------------------------------------- of a checkpoint

SIZES = {"hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48}
SIZES |= {"num_hidden_layers": 2, "vocab_size": 512}
FAMILIES = {
    "qwen3_moe": {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="module", params=FAMILIES)
def plain(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_model(folder, request.param, **SIZES, **FAMILIES[request.param])
    return folder


def mixtures(model: Decoder) -> list[Experts]:
    found = [layer.mlp.experts for layer in model._layers]
    assert len(found) == 2
    return found


def are_narrow(model: Decoder) -> bool:
    kinds = {isinstance(weights, ScaledStack) for mlp in mixtures(model) for weights in (mlp.gate_up, mlp.down)}
    assert len(kinds) == 1, "all of them or none"
    assert kinds == {mlp.is_fp8 for mlp in mixtures(model)}
    return kinds.pop()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_in_fp8_stays_so(plain, tmp_path, kind):
    scales, config = KINDS[kind]
    folder = store(plain, tmp_path / "fp8", scales, ("experts",), **config)
    stored, wide = decoder(folder, Products.STORED), decoder(folder, Products.NONE)
    assert are_narrow(stored) and not are_narrow(wide)
    for kept, dequantized in zip(mixtures(stored), mixtures(wide), strict=True):
        assert isinstance(kept.router, Linear) and torch.equal(kept.router.weight, dequantized.router.weight)
        for name in ("gate_up", "down"):
            weights, exact = getattr(kept, name), getattr(dequantized, name)
            assert weights.fp8_scaling is (Fp8Scaling.BLOCKS if kind == "blocks" else Fp8Scaling.ROWS)
            assert len(weights) == len(exact) and weights.numel() == exact.numel()
            for number, weight in enumerate(exact):
                assert torch.equal(weights[number].dequantized(), weight)
    assert 1e-4 < error(logits(stored), logits(wide)) < 0.1


def test_all_of_them_are_rounded_where_that_is_asked_for(plain):
    narrow, stored = decoder(plain, Products.ALL), decoder(plain, Products.STORED)
    assert are_narrow(narrow) and not are_narrow(stored)
    for rounded_, exact in zip(mixtures(narrow), mixtures(stored), strict=True):
        assert isinstance(rounded_.router, Linear)
        for name in ("gate_up", "down"):
            weights = getattr(rounded_, name)
            for number, weight in enumerate(getattr(exact, name)):
                assert torch.equal(weights[number].dequantized(), Fp8Weight.of(weight).dequantized())
    assert 1e-4 < error(logits(narrow), logits(stored)) < 0.2


def test_random_weights(plain):
    spec = read_spec(read_json(plain / "config.json"))
    wide, narrow = (Decoder(spec, RandomWeights(0, torch.float32, CPU, p)) for p in (Products.STORED, Products.ALL))
    assert are_narrow(narrow) and not are_narrow(wide)
    for a, b in zip(mixtures(narrow), mixtures(wide), strict=True):
        assert error(torch.stack([weight.dequantized() for weight in a.gate_up]), b.gate_up) < 0.05


def some_by_rows(weight):
    """Those of down projections, and of no other."""
    return (of_rows if weight.shape[0] == SIZES["hidden_size"] else of_blocks)(weight)


def test_gate_and_up_may_have_other_scales_than_down(plain, tmp_path):
    folder = store(plain, tmp_path / "fp8", some_by_rows, ("experts",), weight_block_size=[BLOCK, BLOCK])
    stored, wide = decoder(folder, Products.STORED), decoder(folder, Products.NONE)
    assert are_narrow(stored)
    kinds = {(mlp.gate_up.fp8_scaling, mlp.down.fp8_scaling) for mlp in mixtures(stored)}
    assert kinds == {(Fp8Scaling.BLOCKS, Fp8Scaling.ROWS)}
    assert 1e-4 < error(logits(stored), logits(wide)) < 0.1


@pytest.mark.parametrize(
    "names",
    [
        ("experts.0.", "experts.1.", "experts.2."),
        ("up_proj", "w3", "down_proj", "w2"),
        ("gate_proj", "w1", "up_proj", "w3"),
    ],
)
def test_what_is_stored_in_fp8_in_part_is_dequantized(plain, tmp_path, names):
    folder = store(plain, tmp_path / "fp8", of_rows, names)
    assert not are_narrow(decoder(folder, Products.STORED))
    assert torch.equal(logits(decoder(folder, Products.STORED)), logits(decoder(folder, Products.NONE)))
    assert are_narrow(decoder(folder, Products.ALL))


def test_experts_whose_scales_are_not_alike_are_dequantized(plain, tmp_path):
    stored = load_file(plain / "model.safetensors")
    last = [weight.float() for name, weight in stored.items() if "experts.3." in name]

    def scales(weight):
        return (of_rows if any(torch.equal(weight, one) for one in last) else of_blocks)(weight)

    folder = store(plain, tmp_path / "fp8", scales, ("experts",))
    assert not are_narrow(decoder(folder, Products.STORED))
    assert torch.equal(logits(decoder(folder, Products.STORED)), logits(decoder(folder, Products.NONE)))


def test_a_block_of_rows_of_gate_and_up_is_dequantized(tmp_path):
    """144 rows of the gate: the second block of scales would have 16 of them and 112 of up. By rows they stay."""
    sizes = FAMILIES["qwen3_moe"] | {"moe_intermediate_size": 144}
    make_model(tmp_path / "plain", "qwen3_moe", **SIZES, **sizes)
    for scales, narrow in ((of_blocks, False), (of_rows, True), (of_tensor, True)):
        folder = store(tmp_path / "plain", tmp_path / scales.__name__, scales, ("experts",))
        assert are_narrow(decoder(folder, Products.STORED)) == narrow


def test_sizes_that_products_do_not_take_are_dequantized(tmp_path):
    make_model(tmp_path, "qwen3_moe", **SIZES, **(FAMILIES["qwen3_moe"] | {"moe_intermediate_size": 40}))
    assert not are_narrow(decoder(tmp_path, Products.ALL))


def test_what_is_not_kept_in_fp8_is_counted_once(plain, tmp_path):
    folder = store(plain, tmp_path / "fp8", of_rows, ("experts.0.",))
    weights = SafetensorsWeights(folder, torch.float32, CPU, products=Products.STORED)
    Decoder(read_spec(read_json(folder / "config.json")), weights)
    assert 0 < weights._bar.n <= weights._bar.total and not weights.unused()
