"""The layers of a block drafter: Qwen3's, some with a window or with convolutions along the block.

1. A layer with a window sees the last tokens before the block, and the block (BlockHead.embed).
2. A layer of DFlash2 mixes each position of the block with those before it, on the way into and
   out of attention and feed-forward (`Convolve`). One projection of the sublayer's input gives the
   dynamic weights of both.

Sources: z-lab/dflash, dflash/model.py @10129599; vllm-project/speculators 0.9.0, models/dflash2.
Not here: the block itself (extras/block_draft.py), names and keys of files (hf/block_heads.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from model import ModelConfig
from steps import Add, Attend, Norm, Project, Rows, Step


@dataclass(frozen=True)
class BlockModel(ModelConfig):
    """The settings of a block drafter's layers beside Qwen3's."""

    window: int = 0  # sliding_window (tokens)
    sliding_layers: tuple[int, ...] = ()  # layer_types: those with the window
    conv_taps: int = 0  # conv_kernel_size: positions that a convolution mixes; 0: none
    conv_group: int = 1  # conv_group_size: numbers of a row that share a dynamic weight
    input_scale: float = 1.0  # input_embedding_scale

    @property
    def windows(self) -> tuple[int, ...]:
        return (self.window,) if self.sliding_layers else ()

    @property
    def embedding_scale(self) -> float:
        return self.input_scale

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        convolutions = {}
        for name in ("attention", "mlp"):
            convolutions[f"{name}_conv"] = (f"{name}_conv",)
            convolutions[f"{name}_kernel"] = (f"{name}_conv.kernel_projection",)
        return super().names | convolutions

    def layer(self, i: int) -> tuple[Step, ...]:
        return (
            Norm("attention_norm", self.dim, self.norm_eps),
            *self.convolved("attention", self.windowed(i)),
            Add(),
            Norm("ffn_norm", self.dim, self.norm_eps),
            *self.convolved("mlp", self.feed_forward()),
            Add(),
        )

    def windowed(self, i: int) -> tuple[Step, ...]:
        """Return the steps of attention in layer i."""
        steps = self.attention()
        if i not in self.sliding_layers:
            return steps
        return tuple(
            replace(step, window=self.window) if isinstance(step, Attend) else step
            for step in steps
        )

    def convolved(self, name: str, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        """Return the steps of a sublayer between its convolutions, if there are any."""
        if not self.conv_taps:
            return steps
        sizes = (f"{name}_conv", self.dim, self.conv_taps, self.conv_group)
        weights = 2 * self.conv_taps * (self.dim // self.conv_group)
        project = Project(f"{name}_kernel", self.dim, weights, to="kernel")
        return (project, Convolve(*sizes, side=0), *steps, Convolve(*sizes, side=1))


class BaseKernel(nn.Module):
    """The fixed weights of the convolutions before and behind a sublayer."""

    def __init__(self, taps: int, dim: int):
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2 * taps, dim))


@dataclass(frozen=True)
class Convolve(Step):
    """Replace each row of `h` by a weighted sum of itself and of the rows before it in the block.

    Row i becomes the sum over the taps t of (base[t] + kernel[i, t]) * row i - t. The numbers of a
    group share one dynamic weight; rows before the block are zero.
    """

    name: str
    dim: int
    taps: int
    group: int
    side: int  # 0: before the sublayer; 1: behind it

    def modules(self) -> dict[str, nn.Module]:
        return {self.name: BaseKernel(self.taps, self.dim)} if self.side == 0 else {}

    def parameters(self) -> tuple[str, ...]:
        return (f"{self.name}.base_kernel",) if self.side == 0 else ()

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        base = getattr(layer, self.name).base_kernel.chunk(2)[self.side]  # [taps, F]
        dynamic = rows.kernel.chunk(2, -1)[self.side].unflatten(-1, (self.taps, -1))
        T = rows.h.shape[1]
        y = torch.zeros_like(rows.h)
        for tap in range(self.taps):
            weight = base[tap] + dynamic[:, :, tap].repeat_interleave(self.group, -1)  # [B, T, F]
            before = F.pad(rows.h, (0, 0, tap, 0))[:, :T]
            y = y + weight * before
        return rows.put("h", y.to(rows.h.dtype))
