"""Select a CUDA device, and the way its matmuls round."""

from __future__ import annotations

import torch

OLDEST = (8, 0)  # compute capability: bf16 on tensor cores, asynchronous copies


def set_cuda_device(device: str) -> None:
    """Select a CUDA device, and let its 16-bit products add partial sums in fp32.

    So a row of a tree rounds as a single token does.

    Raises: ValueError for a GPU that the kernels do not serve.
    """
    if device.startswith("cuda"):
        index = torch.device(device).index or 0
        level = torch.cuda.get_device_capability(index)
        if level < OLDEST:
            raise ValueError(
                f"--device {device} has compute capability {level[0]}.{level[1]}, and the kernels "
                f"need {OLDEST[0]}.{OLDEST[1]} or later; use another GPU, or --device cpu"
            )
        torch.cuda.set_device(index)
        products = torch.backends.cuda.matmul
        products.allow_bf16_reduced_precision_reduction = False
        products.allow_fp16_reduced_precision_reduction = False
