"""The kernels of LoRA adapters against the reference, and a batch of several adapters on the GPU's runner."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Sampling
from radixrt.worker.cuda import ops
from radixrt.worker.cuda.linear import lora
from radixrt.worker.cuda.runner import CudaRunner
from radixrt.worker.load import options
from radixrt.worker.load import runner as loading
from radixrt.worker.model.lora.lora import Rows, Stack, add_by_adapter
from tests.adapters import make_adapter
from tests.worker.cuda.test_runner import INDEXED, LAST_LINEAR, LINEAR, SIZES
from tests.worker.engine import Engine, prompts
from tests.worker.families import make_model
from tests.worker.test_drafting import Told

OTHERS = {
    "gemma4_text": {"num_hidden_layers": 3, "num_kv_shared_layers": 1, "vocab_size_per_layer_input": 128},
    "qwen3_5_text": LINEAR | {"num_hidden_layers": 3, "layer_types": LAST_LINEAR},
    "deepseek_v32": INDEXED,
}
OTHERS["gemma4_text"] |= {"layer_types": ["sliding_attention", *["full_attention"] * 2], "sliding_window": 16}


def drawn(device, sizes, rank, depth, count, adapters, dtype=torch.float32, seed=0):
    """(x, stack, rows, out) with rows of all adapters, and of none, in any order."""
    torch.manual_seed(seed)
    a = torch.randn(adapters, len(sizes) * rank, depth, device=device) / depth**0.5
    b = torch.randn(adapters, sum(sizes), rank, device=device) / rank**0.5
    rows = Rows()
    rows.use(torch.randint(-1, adapters, (count,), dtype=torch.int32, device=device))
    x, out = (torch.randn(count, size, device=device).to(dtype) for size in (depth, sum(sizes)))
    return x, Stack(a.to(dtype), b.to(dtype), sizes), rows, out


SHAPES = [
    ((40, 24, 24), 16, 72, 21, 3),
    ((300,), 48, 130, 5, 2),
    ((16, 16), 32, 40, 1, 1),
    ((128, 256), 16, 768, 6, 2),  # whole tiles
]
LONG = [((64, 16, 16), 16, 80, 700, 5), ((96, 96), 64, 200, 530, 2), ((256, 128), 80, 512, 600, 3)]


@pytest.mark.parametrize(
    ("sizes", "rank", "depth", "count", "adapters"),
    [*SHAPES, *(pytest.param(*shape, marks=pytest.mark.slow) for shape in LONG)],
)
@pytest.mark.parametrize("exact", [False, True])
def test_kernels_equal_the_reference(device, sizes, rank, depth, count, adapters, exact):
    half = torch.bfloat16 if device.type == "cuda" else torch.float16  # bfloat16 are integers to the interpreter
    for dtype, tolerance in (torch.float32, 1e-5), (half, 3e-2):
        x, stack, rows, out = drawn(device, sizes, rank, depth, count, adapters, dtype)
        expected, before = out.float(), out.clone()
        wide = Stack(stack.a.float(), stack.b.float(), sizes)
        add_by_adapter(x.float(), wide, rows, expected, 0.7, batch_invariant=False)
        lora.lora(x, stack, rows, out, 0.7, exact)
        torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
        without = rows.adapters < 0
        assert torch.equal(out[without], before[without]), "rows without an adapter are not touched"


def test_rows_of_a_wider_tensor(device):
    """As those of a projection of which only a part is used."""
    x, stack, rows, out = drawn(device, (24,), 16, 32, 9, 2)
    wide, target = torch.cat((x, x), 1), torch.cat((out, out), 1)
    lora.lora(x, stack, rows, out, 1.0, False)
    lora.lora(wide[:, :32], stack, rows, target[:, 24:], 1.0, False)
    assert torch.equal(target[:, 24:], out)


def test_an_adapter_does_not_reach_other_rows(device):
    """Not even one that is broken."""
    x, stack, rows, out = drawn(device, (24,), 16, 32, 16, 3)
    rows.use(torch.arange(16, dtype=torch.int32, device=device) % 4 - 1)
    stack.a[1] = torch.nan
    lora.lora(x, stack, rows, out, 1.0, False)
    broken = out.isnan().any(1)
    assert torch.equal(broken, rows.adapters == 1)


def test_exact_results_do_not_depend_on_the_batch(device, steady_products):
    sizes = (40, 24)
    x, stack, rows, out = drawn(device, sizes, 16, 72, 40, 3)
    alone = out.clone()
    for row in range(0, 40, 7):
        one = Rows()
        one.use(rows.adapters[row : row + 1])
        lora.lora(x[row : row + 1], stack, one, alone[row : row + 1], 1.0, True)
    lora.lora(x, stack, rows, out, 1.0, True)
    assert torch.equal(out[::7], alone[::7])


@pytest.mark.parametrize(
    ("tiles", "depth", "splits"), [(1, 4096, lora.MAX_SPLITS), (1, 800, 3), (1, 50, 1), (512, 4096, 1)]
)
def test_nothing_is_split_beyond_its_blocks(tiles, depth, splits):
    stack = Stack(torch.empty(1, 48, depth), torch.empty(1, 40, 16), (20, 10, 10))
    assert lora.best_splits(tiles, stack, lora.SMALL_TILES[0]) == splits


@pytest.mark.parametrize(("count", "adapters"), [(1, 1), (3, 8), (40, 1), (70, 5), (300, 3), (64, 40)])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0], ids="{} with adapters".format)
def test_tiles_have_each_row_with_an_adapter_once(device, count, adapters, share):
    torch.manual_seed(count)
    numbers = torch.randint(0, adapters, (count,), dtype=torch.int32)
    numbers[torch.rand(count) >= share] = -1
    rows = Rows()
    rows.use(numbers.to(device))
    found = lora.work(rows, adapters, 16)
    order, seen = found.order.tolist(), []
    tiles = [tile for tile in found.tiles.tolist() if tile[0] >= 0]
    assert all(tile[0] < 0 for tile in found.tiles.tolist()[len(tiles) :])
    for adapter, first, end in tiles:
        assert 0 < end - first <= 16
        assert {int(numbers[row]) for row in order[first:end]} == {adapter}
        seen += order[first:end]
    assert sorted(seen) == [row for row in range(count) if numbers[row] >= 0]
    assert lora.work(rows, adapters, 16) is found, "made once"


def runners(folder, family: str, device, exact: bool = False, **sizes):
    """The plain runner and the GPU's, of a small model with two adapters."""
    if device.type == "cuda":
        pytest.skip("for the interpreter")
    model = make_model(folder, family, **SIZES | sizes)
    adapters = [make_adapter(folder / str(seed), model, rank=4 * seed, seed=seed) for seed in (1, 2)]
    config = resolve(
        WorkerConfig(
            model=str(folder), device="cpu", max_total_tokens=1200, page_size=1, enable_lora=True, deterministic=exact,
            lora_modules=tuple(f"a{number}={path}" for number, path in enumerate(adapters)), max_mamba_cache_size=60,
        )
    )  # fmt: skip
    loaded = options.look_up(config)
    pool, states = loading.make_pool(loaded, 1201, 1), loading.make_states(config, loaded)
    model = loading.load_model(config, loaded, exact, ops=ops)
    return loading.make_runner(config, loaded), CudaRunner(
        model, pool, 1, rows=8, num_sms=4, states=states, exact=exact
    )


def generated(runner, asked, sampling, drafter=None) -> list[list[int]]:
    """What is said to each prompt: to the n-th with adapter n % 3 - 1."""
    engine = Engine(runner, chunk=32, rows=8, max_model_len=128, drafter=drafter)
    ids = [
        engine.add(prompt, sampling, namespace=str(number % 3), adapter=number % 3 - 1)
        for number, prompt in enumerate(asked)
    ]
    engine.finish()
    return [engine.tokens(id) for id in ids]


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_gpus_runner_equals_the_plain_one(family, device, tmp_path):
    """Chunks and decodes of three models in one batch, with steps that overlap."""
    plain, fast = runners(tmp_path, family, device)
    asked, sampling = prompts(3, 5, 30, vocab_size=128), Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)
    expected = generated(plain, asked, sampling)
    assert generated(fast, asked, sampling) == expected
    assert len(np.unique(expected)) > 3


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_drafts_of_adapters(family, exact, device, tmp_path):
    """Where layers differ: in their heads, the last ones for few tokens alone; in having recurrent states; in the
    tokens that they select."""
    plain, fast = runners(tmp_path, family, device, exact, **OTHERS[family])
    sampling = Sampling(max_tokens=9, temperature=0.0, ignore_eos=True)
    asked = prompts(4, 20, 60, vocab_size=128)
    expected = generated(plain, asked, sampling)
    drafter = Told(True, [prompt + tokens for prompt, tokens in zip(asked, expected, strict=True)])
    assert generated(fast, asked, sampling, drafter) == expected
    assert drafter.drafted > drafter.accepted > 6
