"""The floor: the least time in which a GPU with known ceilings could serve a load. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.serve.loads import Ask, Load, prefixes


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a decoder with gated MLPs (Llama, Mistral, Qwen) or with experts in every layer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Intermediate size of the MLP, or of one expert."""
    vocab: int
    experts: int = 1
    chosen: int = 1
    """Experts per token."""

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """Read a config.json. Raises KeyError with the name of a missing field, ValueError for other kinds of
        models."""
        if config.get("kv_lora_rank") or set(config.get("layer_types") or ()) - {"full_attention"}:
            raise ValueError("no floor is known of models with latent or linear attention or windows: no --ceilings")
        heads = config["num_attention_heads"]
        experts = config.get("num_experts") or config.get("num_local_experts") or 1
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config.get("moe_intermediate_size") or config["intermediate_size"],
            vocab=config["vocab_size"],
            experts=experts,
            chosen=config["num_experts_per_tok"] if experts > 1 else 1,
        )

    @property
    def layer_parameters(self) -> int:
        """Parameters that a token is multiplied by in all layers: layers x hidden x (2 heads x d + 2 kv_heads x d) for
        Q, O, K and V, plus those of its experts. Norms, biases and the experts' router are left out."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * self.hidden * attention + self.chosen * self.expert_parameters

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert, or of the MLP, in all layers: layers x hidden x 3 intermediate (gate, up, down)."""
        return self.layers * self.hidden * 3 * self.intermediate

    def parameters_read(self, tokens: int) -> float:
        """Expected number of parameters that a step of `tokens` tokens reads, with random routing."""
        share = 1 - (1 - self.chosen / self.experts) ** tokens
        others = self.layer_parameters - self.chosen * self.expert_parameters + self.head_parameters
        return others + share * self.experts * self.expert_parameters

    @property
    def head_parameters(self) -> int:
        """Parameters of the output matrix: hidden x vocab."""
        return self.hidden * self.vocab


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits of a GPU."""

    copy_gbs: float
    """Memory traffic of a large copy, reads plus writes, in GB/s (1e9 bytes)."""
    tflops: float
    """Rate of a large bf16 matrix product, in TFLOP/s; a multiplication and an addition count as two."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time for the prefill and for the decodes of a load."""

    prefill_seconds: float
    decode_seconds: float

    @property
    def seconds(self) -> float:
        """The sum. (A step with both could overlap computation and reads, and hide the smaller of the two.)"""
        return self.prefill_seconds + self.decode_seconds


def floor(load: Load, shape: Shape, ceilings: Ceilings, kv_bytes: float, weight_bytes: float) -> Floor:
    """prefill FLOPs / FLOP/s, and (bytes of the weights that each decode step reads + bytes of KV) / (bytes/s).

    `kv_bytes` and `weight_bytes` are bytes per element. Sampling, launches, HTTP and norms are taken to cost
    nothing."""
    weights = sum(steps * shape.parameters_read(len(running)) for steps, running in batches(load)) * weight_bytes
    read = weights + decode_reads(load)[1] * kv_token_bytes(shape, kv_bytes)
    return Floor(prefill_flops(load, shape) / (ceilings.tflops * 1e12), read / (ceilings.copy_gbs * 1e9))


def kv_token_bytes(shape: Shape, kv_bytes: float) -> float:
    """Bytes of a token's K and V in all layers: 2 x layers x kv_heads x d x bytes per element."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * kv_bytes


def prefill_flops(load: Load, shape: Shape) -> float:
    """FLOPs to compute each distinct prompt token once, and the logits of each prompt's last token.

    A token at position p costs 2 x layer parameters + 4 x layers x heads x d x (p + 1): its scores and its weighted
    sum over p + 1 keys. Logits cost 2 x head parameters per request."""
    tokens = keys = 0
    for path in load.new_prefixes():
        before, own = sum(load.segments[part] for part in path[:-1]), load.segments[path[-1]]
        tokens += own
        keys += own * before + own * (own + 1) // 2
    attention = 4 * shape.layers * shape.heads * shape.head_dim * keys
    return 2 * shape.layer_parameters * tokens + attention + 2 * shape.head_parameters * len(load.asks)


def decode_reads(load: Load) -> tuple[int, int]:
    """(decode steps, tokens whose KV is read, summed over steps) if each request decodes as early as possible.

    The first token comes from the prefill, so a request decodes in max_tokens - 1 steps, which begin when the request
    that it waits for has ended. A step reads each distinct prompt token of its requests once, and for each request its
    generated tokens, which are j in its j-th step. No schedule has fewer steps, or reads fewer tokens: all requests
    that can share a read do."""
    total = read = 0
    for steps, running in batches(load):
        distinct = sum(load.segments[path[-1]] for path in prefixes(ask for ask, _ in running))
        generated = sum(arithmetic_sum(before + 1, steps) for _, before in running)
        read += steps * distinct + generated
        total += steps
    return total, read


def batches(load: Load) -> Iterator[tuple[int, list[tuple[Ask, int]]]]:
    """Groups of consecutive steps with the same requests, in order: (number of steps, (request, its decode steps
    before) for each), if each request decodes as early as possible."""
    spans = decode_spans(load.asks)
    edges = sorted({edge for span in spans for edge in span})
    for begin, end in pairwise(edges):
        running = zip(load.asks, spans, strict=True)
        yield end - begin, [(ask, begin - span[0]) for ask, span in running if span[0] <= begin < span[1]]


def decode_spans(asks: Iterable[Ask]) -> list[tuple[int, int]]:
    """The decode steps [first, end) of each request, counted from the start of the load."""
    spans: list[tuple[int, int]] = []
    for ask in asks:
        begin = 0 if ask.after is None else spans[ask.after][1]
        spans.append((begin, begin + ask.max_tokens - 1))
    return spans


def arithmetic_sum(first: int, count: int) -> int:
    """first + (first + 1) + ... of `count` numbers."""
    return count * (2 * first + count - 1) // 2
