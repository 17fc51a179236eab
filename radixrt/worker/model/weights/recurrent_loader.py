"""Reads what layers with a recurrent state have in place of attention, or beside it."""

from __future__ import annotations

import torch

from radixrt.worker.model.layers.recurrent.delta_net import DeltaNet, ba_order, qkvz_order
from radixrt.worker.model.layers.recurrent.mamba_mixer import Mamba
from radixrt.worker.model.layers.recurrent.short_conv import ShortConv
from radixrt.worker.model.lora.lora_slots import Piece
from radixrt.worker.model.parallel.sharding import Part
from radixrt.worker.model.spec.delta_spec import DeltaSpec, ShortConvSpec
from radixrt.worker.model.spec.mamba_spec import MambaSpec
from radixrt.worker.model.weights.head_loader import HeadsWeightLoader
from radixrt.worker.model.weights.weights import load_float32


class RecurrentWeightLoader(HeadsWeightLoader):
    """Reads linear attention, Mamba-2 mixers and short convolutions."""

    def _gated_conv(self, at: str, spec: ShortConvSpec) -> ShortConv:
        own = self._shard.part(0, spec.channels)
        each = Piece("", (spec.channels, self._spec.hidden_size), own)
        conv = self._weights.load(f"model.{at}conv.weight", (spec.channels, 1, spec.kernel), own)
        bias = self._weights.load(f"model.{at}conv.bias", (spec.channels,), own) if spec.bias else None
        return ShortConv(self._linear(self._fused(at + "in_proj", [each] * 3), spec.bias), conv.squeeze(1), bias)

    def _mamba(self, at: str, mamba: MambaSpec) -> Mamba:
        """Its heads are divided, and B and C of their groups as K and V are."""
        shard, hidden, share = self._shard, self._spec.hidden_size, self._shard.spec(self._spec).recurrent
        assert isinstance(share, MambaSpec)
        values, group = shard.part(0, mamba.values), shard.kv_rows(mamba.groups, mamba.state)
        channels = list(zip(mamba.conv_sizes, (values, group, group), strict=True))
        rows = [(mamba.values, values), *channels, (mamba.heads, shard.part(0, mamba.heads))]
        pieces = self._fused(at + "in_proj", [Piece("", (count, hidden), part) for count, part in rows])
        norm = None if mamba.norm == "none" else self._vector(at + "norm", mamba.values, values)

        def convolution(name: str, *shape: int) -> torch.Tensor:
            whole = self._weights.load(f"model.{at}conv1d.{name}", (mamba.channels, *shape))
            parts = zip(whole.split(mamba.conv_sizes), channels, strict=True)
            return torch.cat([_rows_of(x, part) for x, (_, part) in parts])

        return Mamba(
            spec=share,
            projection=self._linear(pieces, mamba.bias),
            conv=convolution("weight", 1, mamba.kernel).squeeze(1),
            conv_bias=convolution("bias") if mamba.conv_bias else None,
            rates=-self._float32(at + "A_log", mamba.heads).exp(),
            skip=self._float32(at + "D", mamba.heads),
            step_bias=self._float32(at + "dt_bias", mamba.heads),
            norm=norm,
            eps=self._spec.norm_eps,
            exact=self._batch_invariant,
            group=self._group,
        )

    def _delta_net(self, at: str, delta: DeltaSpec) -> DeltaNet:
        heads, share, ups = delta.value_heads, self._shard.spec(self._spec).recurrent, None
        assert isinstance(share, DeltaSpec)
        qkv = [self._rows(at + name, size) for name, size in zip(delta.qkv, delta.qkv_sizes, strict=False)]
        ba = [self._rows(at + name, heads) for name in (delta.b, delta.a)]
        if delta.fused:  # grouped by heads of k, of which ranks have consecutive ones
            qkv = [self._rows(at + "in_proj_qkvz", delta.channels + delta.values, order=qkvz_order(share))]
            ba = [self._rows(at + "in_proj_ba", 2 * heads, order=ba_order(share))]
        elif len(delta.qkv) == 1:
            qkv = self._fused(at + delta.qkv[0], [self._rows("", size) for size in delta.qkv_sizes])
        if delta.rank:
            low = [Piece(at + name, (delta.rank, self._spec.hidden_size)) for name in ("f_a_proj", "g_a_proj")]
            f, g = (
                self._rows(at + n, k, delta.rank) for n, k in (("f_b_proj", delta.keys), ("g_b_proj", delta.values))
            )
            qkv, ba, ups = qkv + low, ba[:1], (self._linear([f], False), self._linear([g], False))
        elif not delta.fused:
            qkv.append(self._rows(at + delta.z, delta.values))
        return DeltaNet(
            spec=share,
            qkvz=self._linear(qkv, False),
            ba=self._linear(ba, False),
            conv=self._short_conv(at, delta),
            rates=-self._float32(at + "A_log", heads).exp(),
            dt_bias=self._float32(at + "dt_bias", delta.keys if delta.rank else heads),
            norm=self._vector(at + delta.norm, delta.value_dim),
            eps=delta.norm_eps or self._spec.norm_eps,
            exact=self._batch_invariant,
            ups=ups,
        )

    def _rows(self, name: str, rows: int, columns: int = 0, order: torch.Tensor | None = None) -> Piece:
        """A projection whose rows are divided among ranks; of hidden states, unless `columns` are given."""
        return Piece(name, (rows, columns or self._spec.hidden_size), self._shard.part(0, rows), order=order)

    def _short_conv(self, at: str, delta: DeltaSpec) -> torch.Tensor:
        """The convolutions of this rank's channels [channels, kernel]. Those of all may be stored as three tensors (by
        transformers in equal parts, whatever the sizes of q, k and v are)."""
        shape = delta.channels, 1, delta.kernel
        names = [f"model.{at}{part}_conv1d.weight" for part in "qkv"]
        if names[0] in self._weights:
            conv = torch.cat([self._weights.load(name, self._weights.shape(name)) for name in names])
            if conv.shape != shape:
                raise ValueError(f"{', '.join(names)} have shape {list(conv.shape)}, config.json says {list(shape)}")
        else:
            conv = self._weights.load(f"model.{at}conv1d.weight", shape)
        parts = conv.squeeze(1).split(delta.qkv_sizes)
        return torch.cat([self._own(part) for part in parts])

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows."""
        return _rows_of(whole, self._shard.part(0, len(whole)))

    def _float32(self, name: str, size: int) -> torch.Tensor:
        """This rank's part of a small parameter that keeps its precision if it is stored in float32."""
        return self._own(load_float32(self._weights, f"model.{name}", size))


def _rows_of(whole: torch.Tensor, part: Part | None) -> torch.Tensor:
    return whole if part is None else whole[part.start : part.stop]
