"""The GPU implementation of `model.layers.Ops`."""

from radixrt.worker.cuda.experts import add as experts
from radixrt.worker.cuda.kernels import gate, means, norm
from radixrt.worker.cuda.products import few, gated
from radixrt.worker.cuda.scaled import scaled

__all__ = ["experts", "few", "gate", "gated", "means", "norm", "scaled"]
