"""Linear layers with float weights: one weight, or one for each expert of a mixture."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ops.epilogues import LazyMatmul, UnnormalizedRows, lazy_matmul
from ops.experts import experts_linear
from ops.linear import linear


class Linear(nn.Linear):
    """A linear layer, by the matmul that serves its dtype and device."""

    fp32_out = False  # outputs in fp32

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        return linear(x, self.weight, self.bias, self.fp32_out)

    def operands(self) -> tuple[Tensor, None, Tensor | None]:
        """Return weight, scale and bias, as ops/cpu/layers.py and ops/epilogues.py take them."""
        return self.weight, None, self.bias

    def forward_lazy(self, x: Tensor | UnnormalizedRows) -> Tensor | LazyMatmul:
        """Return the outputs, [..., N], or a matmul, which the next operator computes."""
        return lazy_matmul(x, *self.operands()) or self(x)


class LMHead(Linear):
    """The scores of tokens, in fp32: in bf16, the best two would often tie."""

    fp32_out = True


class ExpertLinear(nn.Module):
    """The linear layers of all experts, stacked."""

    def __init__(self, experts: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.in_features = inputs

    def forward(self, x: Tensor, routing: Tensor) -> Tensor:
        """Multiply rows with their experts: [P, K] -> [P, N]. routing: from `ops.experts.route`"""
        return experts_linear(x, self.weight, routing)

    def operands(self) -> tuple[Tensor, None, None]:
        """Return weights, scale and bias, as ops/cpu/layers.py takes them."""
        return self.weight, None, None
