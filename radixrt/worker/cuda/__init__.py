"""What runs on a GPU: fused kernels, attention over pages by work lists, CUDA graphs, and the runner of all that."""

import os

# Fuse a product and a sum into one instruction, as when kernels were measured; from Triton 3.10 on only on request.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
