"""The GPU runner: fused kernels, paged attention by work lists, CUDA graphs."""

import os

# Fuse multiply and add into one instruction, as when the kernels were measured; Triton 3.10 and newer do not by
# default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
