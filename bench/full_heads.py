"""Chunks of latent attention by full heads, for one layer in the shape of DeepSeek's; used by `bench.latent`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from radixrt.worker.cuda.attention.chunks import Sequences
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.variants import Variant
from radixrt.worker.cuda.elementwise.staging import Packer
from radixrt.worker.cuda.latent import full_heads
from radixrt.worker.cuda.latent.full_chunks import FullHeads, FullStep, find
from radixrt.worker.execution.kv_pool import DTYPES
from radixrt.worker.model.families.deepseek_v2 import DEFAULTS, latent_decoder
from radixrt.worker.model.layers.latent import UpProjections
from radixrt.worker.model.layers.linear import HeadLinear

RANK, ROPE, NOPE, WIDTH = 512, 64, 128, 128
DEVICE = torch.device("cuda")


def spec_of(heads: int):
    sizes = DEFAULTS | {"q_lora_rank": None, "num_attention_heads": heads, "num_hidden_layers": 1}
    sizes |= {"max_position_embeddings": 65536, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    return latent_decoder(sizes, interleaved=True)


class FullCase:
    """`batch` sequences of `cached` tokens followed by `new` ones, on random pages."""

    def __init__(self, heads: int, batch: int, new: int, cached: int, kv_dtype: str) -> None:
        self.heads, self.batch, self.new, self.cached = heads, batch, new, cached
        self.spec = spec_of(heads)
        length = cached + new
        slots = batch * length
        generator = torch.Generator(DEVICE).manual_seed(0)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=DEVICE, dtype=torch.bfloat16)

        self.keys = draw(slots, 1, RANK + ROPE).to(DTYPES[kv_dtype])
        table = torch.randperm(slots, generator=generator, device=DEVICE).view(batch, -1).int()
        self.pages = Pages(self.keys, self.keys, table, (1.0, 1.0), None)
        self.q = draw(batch * new, heads, NOPE + ROPE)
        k_up, v_up = (HeadLinear(draw(heads, n, RANK) * RANK**-0.5) for n in (NOPE, WIDTH))
        self.ups = UpProjections(HeadLinear(k_up.weight.transpose(1, 2)), v_up)
        self.out = torch.zeros(batch * new, heads, WIDTH, device=DEVICE, dtype=torch.bfloat16)

    @property
    def flops(self) -> tuple[float, float]:
        """(FLOPs of attention, FLOPs of the products that compute K and V from latents)."""
        pairs = self.batch * (self.new * self.cached + self.new * (self.new + 1) / 2)
        keys = self.batch * (self.cached + self.new)
        return 2 * pairs * self.heads * (NOPE + ROPE + WIDTH), 2 * keys * self.heads * RANK * (NOPE + WIDTH)

    def limit_ms(self, tflops: float) -> float:
        return sum(self.flops) / tflops / 1e9

    def error(self) -> float:
        """The largest error of a few queries, relative to float32 over the same pages."""
        worst = 0.0
        for at in sorted({0, self.new // 2, self.batch * self.new // 3, self.batch * self.new - 1}):
            row, position = at // self.new, self.cached + at % self.new
            found = self.keys[self.pages.table[row, : position + 1].long(), 0].float()
            k = torch.einsum("hkn,sk->hsn", self.ups.k.weight.float(), found[:, :RANK])
            v = torch.einsum("hnk,sk->hsn", self.ups.v.weight.float(), found[:, :RANK])
            scores = torch.einsum("hn,hsn->hs", self.q[at, :, :NOPE].float(), k)
            scores += self.q[at, :, NOPE:].float() @ found[:, RANK:].t()
            expected = torch.einsum("hs,hsn->hn", (scores * self.spec.scale).softmax(-1), v)
            worst = max(worst, float((self.out[at].float() - expected).norm() / expected.norm()))
        return worst

    def workspace(self, variant: Variant | None = None) -> FullHeads:
        """The workspace, with `variant` or (None) the one that radixrt chooses."""
        tokens = self.batch * (self.cached + self.new + full_heads.ALIGN)
        found = find(self.spec, 1, self.keys.dtype, torch.bfloat16, DEVICE, tokens)
        assert found is not None
        if variant is not None:
            found.variant = variant
        return found

    def runner(self, full: FullHeads) -> dict[str, Callable[[], None]]:
        """What is timed: "ms", the whole computation, and its parts for the first group of heads."""
        rows = np.arange(self.batch, dtype=np.int32)
        sequences = Sequences(rows, 0 * rows + self.cached, 0 * rows + self.new, rows * self.new)
        packer = Packer(DEVICE)
        step = FullStep(sequences, packer, full)
        step.sent(packer.send())
        (group,) = step._groups
        ((where, _),) = step._lists
        keys = group.keys[0]
        return {
            "ms": lambda: step.run(self.q, self.ups, self.pages, self.out),
            "gather": lambda: full_heads.gather(self.pages, 1, where, group.longest, keys.latents),
            "products": lambda: full.multiply_out(self.ups, keys, 0),
        }
