"""The layers of a block drafter: Qwen3's, with what the drafters of 2026 add along the block.

1. A layer with a window sees the last tokens before the block, and the block (BlockHead.embed).
2. A layer of DFlash2 mixes each position of the block with those before it, on the way into and
   out of attention and feed-forward (`Convolve`). One projection of the sublayer's input gives the
   dynamic weights of both.
3. Behind a layer of DSpine each position is told the token that the one before it predicts, by a
   code; the root's own code is exact (`Inject`).

Sources: z-lab/dflash, dflash/model.py @10129599; vllm-project/speculators 0.9.0, models/dflash2;
sgl-project/SpecForge @64ab5ca, `DSpineDraftModel`.
Not here: the block itself (drafts/block_draft.py), names and keys of files (drafts/block_heads.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from files.fields import integer, key, positive
from options import load_part
from quantize import Linear
from steps import Add, Attend, Norm, Project, Rows, Step

Qwen = load_part("config", "qwen")
WindowAttend = load_part("step", "WindowAttend")
SIZE = integer(1, 2**20)
INJECTED = ("readouts", "writes", "message", "receiver_gate", "predecessor_gate")


@dataclass(frozen=True)
class BlockModel(Qwen):
    """The settings of a block drafter's layers beside Qwen3's."""

    window: int = 0  # sliding_window (tokens)
    sliding_layers: tuple[int, ...] = ()  # layer_types: those with the window
    # positions that a convolution mixes; 0: none
    conv_taps: int = key(integer(1, 256), 0, "conv_kernel_size")
    # numbers of a row that share a dynamic weight
    conv_group: int = key(SIZE, 1, "conv_group_size")
    input_scale: float = key(positive(1e6), 1.0, "input_embedding_scale")
    transfer_rank: int = key(SIZE, 0)  # numbers of a token's code; 0: none is handed on
    message_size: int = key(SIZE, 512)  # numbers that a position makes of its predecessor's code

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
        injections = {f"injection.{name}": (f"injection.{name}",) for name in INJECTED}
        return super().names | convolutions | injections | {"injection": ("injection",)}

    def layer(self, i: int) -> tuple[Step, ...]:
        steps = (
            Norm("attention_norm", self.dim, self.norm_eps),
            *self.convolved("attention", self.windowed(i)),
            Add(),
            Norm("ffn_norm", self.dim, self.norm_eps),
            *self.convolved("mlp", self.feed_forward()),
            Add(),
        )
        return steps if i == self.n_layers - 1 else steps + self.injected()

    def last(self) -> tuple[Step, ...]:
        return self.injected() + super().last()

    def injected(self) -> tuple[Step, ...]:
        """Return the step behind a layer that hands codes on, if there is one."""
        if not self.transfer_rank:
            return ()
        return (Inject(self.dim, self.transfer_rank, self.message_size),)

    def windowed(self, i: int) -> tuple[Step, ...]:
        """Return the steps of attention in layer i."""
        steps = self.attention()
        if i not in self.sliding_layers:
            return steps
        return tuple(
            WindowAttend(window=self.window) if isinstance(step, Attend) else step for step in steps
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
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, dim))


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
        base = getattr(layer, self.name).base_kernel[self.side]  # [taps, F]
        dynamic = rows.get("kernel").chunk(2, -1)[self.side].unflatten(-1, (self.taps, -1))
        T = rows.h.shape[1]
        y = torch.zeros_like(rows.h)
        for tap in range(self.taps):
            weight = base[tap] + dynamic[:, :, tap].repeat_interleave(self.group, -1)  # [B, T, F]
            before = F.pad(rows.h, (0, 0, tap, 0))[:, :T]
            y = y + weight * before
        return rows.put("h", y.to(rows.h.dtype))


class Injection(nn.Module):
    """The weights that tell a position what its predecessor is, or predicts."""

    def __init__(self, dim: int, rank: int, size: int):
        super().__init__()
        self.readouts = Linear(dim, rank, bias=False)
        self.writes = Linear(size, dim, bias=False)
        self.message = Linear(rank, size, bias=False)
        self.receiver_gate = Linear(rank, size, bias=False)
        self.predecessor_gate = Linear(rank, size, bias=False)
        self.bias = nn.Parameter(torch.zeros(size))

    def code(self, hidden: Tensor) -> Tensor:
        """Return the code of the token that a position predicts: [..., F] -> [..., rank]."""
        code = F.normalize(self.readouts(hidden).float(), dim=-1)
        return (math.sqrt(code.shape[-1]) * code).to(hidden.dtype)

    def forward(self, hidden: Tensor, own: Tensor, before: Tensor) -> Tensor:
        """Add the predecessor to a state: [..., F] -> [..., F].

        own, before: [..., rank], the codes of the position and of its predecessor
        """
        before = before.to(hidden.dtype)
        gate = self.receiver_gate(own) + self.predecessor_gate(before) + self.bias
        delta = self.writes(torch.sigmoid(gate).to(hidden.dtype) * self.message(before))
        size = hidden.float().norm(dim=-1, keepdim=True) / math.sqrt(hidden.shape[-1])
        return (hidden + size.to(hidden.dtype) * delta).to(hidden.dtype)


@dataclass(frozen=True)
class Inject(Step):
    """Tell each position of a block its predecessor's token: the root's, or the predicted one.

    `embedded` is the root's code, [B, 1, rank]. The residual stream of the root stays.
    """

    dim: int
    rank: int
    size: int

    def modules(self) -> dict[str, nn.Module]:
        return {"injection": Injection(self.dim, self.rank, self.size)}

    def parameters(self) -> tuple[str, ...]:
        return (*(f"injection.{name}.weight" for name in INJECTED), "injection.bias")

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        root, behind = rows.stream[:, :1], rows.stream[:, 1:]
        codes = layer.injection.code(behind)  # [B, T-1, rank]
        before = torch.cat((rows.get("embedded").to(codes.dtype), codes[:, :-1]), 1)
        behind = layer.injection(behind, codes, before)
        return rows.put("stream", torch.cat((root, behind), 1))
