"""The GPU implementation of `layers.ops.Ops`."""

from radixrt.worker.cuda.elementwise.kernels import gate, mean_squares, norm, squared_relu
from radixrt.worker.cuda.elementwise.residuals import add_normed
from radixrt.worker.cuda.linear.fp8 import scaled
from radixrt.worker.cuda.linear.gemm import gated_linear, small_linear
from radixrt.worker.cuda.linear.int4 import int4_linear
from radixrt.worker.cuda.linear.lora import lora
from radixrt.worker.cuda.moe.experts import add as experts

__all__ = [
    "add_normed", "experts", "gate", "gated_linear", "int4_linear", "lora", "mean_squares", "norm", "scaled",
    "small_linear", "squared_relu",
]  # fmt: skip
