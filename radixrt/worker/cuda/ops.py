"""The GPU implementation of `model.ops.Ops`."""

from radixrt.worker.cuda.experts import add as experts
from radixrt.worker.cuda.int4 import int4_linear
from radixrt.worker.cuda.kernels import gate, mean_squares, norm, squared_relu
from radixrt.worker.cuda.lora import lora
from radixrt.worker.cuda.products import gated_linear, small_linear
from radixrt.worker.cuda.residuals import add_normed
from radixrt.worker.cuda.scaled import scaled

__all__ = [
    "add_normed", "experts", "gate", "gated_linear", "int4_linear", "lora", "mean_squares", "norm", "scaled",
    "small_linear", "squared_relu",
]  # fmt: skip
