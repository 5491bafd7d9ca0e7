"""The linear layer, and the embedding over a packed weight.

1. `Linear` is made with a float weight, so that it can be trained, loaded and split by its name.
   `pack` puts a `Weight` of any format in its place (backends/weight.py).
2. With experts, the weight is a stack, and every row is multiplied by its own expert's.
3. `operands` are what the C++ pass over all layers (backends/cpp/layers.py) and CUDA's fused
   kernels (backends/epilogues.py) take.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backends import weight as weights
from backends.weight import Weight
from reference import TORCH, Backend


class Linear(nn.Module):
    """Rows times a weight, x W^T, plus a bias."""

    backend: Backend = TORCH  # as the model's

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        experts: int = 0,
        fp32_out: bool = False,
        device: str | torch.device | None = None,
    ):
        """Make a layer with a random float weight.

        experts: of a stack of weights; 0: one weight
        fp32_out: outputs in fp32, never rounded (LM heads)
        """
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.experts = experts
        self.fp32_out = fp32_out
        shape = (experts, out_features, in_features) if experts else (out_features, in_features)
        self.weight = nn.Parameter(torch.empty(*shape, device=device))
        self.bias = nn.Parameter(torch.empty(shape[:-1], device=device)) if bias else None
        self.packed: tuple[weights.Part, ...] = ()  # the parts of the weight in place of `weight`
        for name in ("data", "table", "scale"):  # of `Weight`
            self.register_buffer(name, None)
        if not experts:  # which are loaded, or set
            nn.Linear.reset_parameters(self)

    @classmethod
    def of(
        cls,
        weight: Weight | Tensor,
        bias: Tensor | None = None,
        fp32_out: bool = False,
        backend: Backend = TORCH,
    ) -> Linear:
        """Make a layer of a weight that is not trained: packed, or [N, K] or [E, N, K] numbers."""
        if isinstance(weight, Weight):
            sizes = (weight.inputs, weight.outputs)
            experts = weight.experts
        else:
            sizes = (weight.shape[-1], weight.shape[-2])
            experts = len(weight) if weight.dim() == 3 else 0
        layer = cls(*sizes, False, experts, fp32_out, "meta")
        layer.backend = backend
        if isinstance(weight, Weight):
            layer.pack(weight)
        else:
            layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        return layer

    def pack(self, weight: Weight) -> Linear:
        """Put a packed weight in the place of the float one. Writes: the layer. Returns: it."""
        assert (weight.inputs, weight.outputs) == (self.in_features, self.out_features), weight
        assert weight.experts == self.experts, (weight.experts, self.experts)
        weight = weights.for_decoding(weight)
        self.weight = None
        self.packed = weight.parts
        self.data = weight.data
        self.table = weight.table
        self.scale = weight.scale
        return self

    @property
    def record(self) -> Weight:
        """The packed weight."""
        assert self.packed, "the weight is float"
        operands = (self.data, self.packed, self.in_features, self.table, self.scale)
        return Weight(*operands, self.experts)

    @property
    def format(self) -> str:
        """The format of the weight: "none", a key of `backends.formats.FORMATS`, or "blocks"."""
        return self.record.format if self.packed else "none"

    @property
    def in_cpp(self) -> bool:
        """Return whether the C++ operators of a CPU multiply by the weight."""
        return not self.packed or self.table is not None

    @property
    def group_size(self) -> int:
        """The inputs that share a scale; 0: all, or a GGUF file's own."""
        return self.record.group_size if self.packed else 0

    def forward(self, x: Tensor, routing: Tensor | None = None) -> Tensor:
        """Multiply rows.

        x: [..., K]; with experts [P, K]
        routing: with experts, from `Backend.route`
        Returns: [..., N].
        """
        if routing is not None:
            if self.packed:
                y = self.backend.experts_matmul(x, self.record, routing)
            else:
                y = self.backend.experts_linear(x, self.weight, routing)
            return y if self.bias is None else self.backend.experts_bias(y, self.bias, routing)
        if self.packed:
            return self.backend.matmul(x, self.record, self.bias, self.fp32_out)
        return self.backend.linear(x, self.weight, self.bias, self.fp32_out)

    def operands(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the weight, its table on a CPU or its scales on CUDA, and the bias."""
        if not self.packed:
            return self.weight, None, self.bias
        return self.data, self.scale if self.table is None else self.table, self.bias

    def dequantize(self) -> Tensor:
        """Return the numbers of the weight, [N, K] or [E, N, K]; of a packed one in fp32."""
        return weights.numbers(self.record) if self.packed else self.weight

    def rows(self, ids: Tensor) -> Linear:
        """Return a layer with some of the outputs, in their codes and scales where they can be.

        Rows of GGUF blocks on a CPU become bfloat16, as their layout cannot be written.
        ids: [R] int64
        """
        bias = None if self.bias is None else self.bias.detach()[ids]
        weight = weights.take(self.record, ids) if self.packed else self.weight.detach()[ids]
        return type(self).of(weight, bias, self.fp32_out, self.backend)


class Embedding(nn.Module):
    """An embedding that reads its rows from a packed weight, which a tied LM head shares."""

    def __init__(self, weight: Weight, dtype: torch.dtype = torch.float32):
        """Make an embedding whose rows are of `dtype`."""
        super().__init__()
        self.packed = weight.parts
        self.inputs = weight.inputs
        self.dtype = dtype
        for name in ("data", "table", "scale"):  # of `Weight`
            self.register_buffer(name, getattr(weight, name))

    @property
    def record(self) -> Weight:
        """The packed weight."""
        return Weight(self.data, self.packed, self.inputs, self.table, self.scale)

    def forward(self, tokens: Tensor) -> Tensor:  # [...] int64 -> [..., F]
        rows = weights.rows_of(self.record, tokens.flatten(), self.dtype)
        return rows.view(*tokens.shape, rows.shape[-1])
