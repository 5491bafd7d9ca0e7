"""Products on CUDA with the work behind them in the same launch (cuda/epilogues.py).

1. A layer returns a product that is not computed yet (`run_lazily`); the function that takes it
   computes it: `rotary_cache` and `swiglu` of the backend, `add` and `add_norm` here.
2. An RMSNorm costs no launch: `add_norm` writes its sum times the norm's weight, and sums of
   squares (`UnnormalizedRows`). A product commutes with the division of a row by its root mean
   square, so the next product divides its own result.
3. That rounds x w once, where `rms_norm` rounds x / rms and its product with w. So whether a norm
   is left unscaled depends on the layers and on the dtype, and is the same for a token as for a
   tree. Not in fp16, where x w may overflow.

The references define the results; the kernels differ from them in the order of sums only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import reference
from backends.library import is_plain, lib
from backends.linear import fits_kernel
from backends.triton.launch import PART
from backends.weight import operands_of
from quantize import Linear
from reference import rms_norm

lib.define(
    "add_unscaled(Tensor x, Tensor? delta, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)"
)
lib.define(
    "add_product(Tensor x, Tensor packed, Tensor? scale, Tensor stream, Tensor? weight, float eps) "
    "-> (Tensor, Tensor, Tensor)"
)
lib.define("gated_product(Tensor x, Tensor? squares, Tensor packed, Tensor? scale) -> Tensor")
lib.define(
    "rotary_product(Tensor x, Tensor? squares, Tensor packed, Tensor? scale, Tensor cos, "
    "Tensor sin, Tensor(a!) k, Tensor(b!) v, Tensor slots, Tensor? q_norm, Tensor? k_norm, "
    "float eps) -> Tensor"
)


# the norms of every query head and every key head: weights, [E] each, and epsilon
HeadNorms = tuple[Tensor, Tensor, float]


class UnnormalizedRows(NamedTuple):
    """An RMSNorm's result before the division of each row by its root mean square."""

    values: Tensor  # [..., F], x w
    squares: Tensor  # [ceil(F / PART), M] fp32, sums of x^2 by row; eps F is in the first

    def rms(self) -> Tensor:
        """Return the root mean square of every row: [..., 1] fp32."""
        mean = self.squares.sum(0) / self.values.shape[-1]  # [M]
        return mean.sqrt().view(*self.values.shape[:-1], 1)


class LazyMatmul(NamedTuple):
    """A product x W^T that is not computed yet."""

    x: Tensor  # [..., K]
    squares: Tensor | None  # of `UnnormalizedRows`, by which the result is to be divided
    packed: Tensor  # the weight, or its codes, and their scales as in backends/planes.py
    scale: Tensor | None

    def operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return x, the weight and its scales, of a product that is not divided."""
        assert self.squares is None
        return self.x, self.packed, self.scale


def lazy_matmul(
    x: Tensor | UnnormalizedRows, packed: Tensor, scale: Tensor | None
) -> LazyMatmul | None:
    """Return a matmul for the operator behind it; None where none computes it.

    x: [..., K]; packed, scale: of a layer without a bias, as `LazyMatmul` has them
    """
    values, squares = x if isinstance(x, UnnormalizedRows) else (x, None)
    if packed.dim() == 1:  # parts of several types, a launch each
        return None
    if scale is None and not fits_kernel(values, packed):
        return None
    return LazyMatmul(values, squares, packed, scale)


def lazy_of(layer: Linear, x: Tensor | UnnormalizedRows) -> LazyMatmul | None:
    """Return the matmul of a layer for the next operator, where that computes it."""
    weight, scale, bias = operands_of(layer)
    return lazy_matmul(x, weight, scale) if bias is None else None


def run_lazily(layer: Linear, x: Tensor | UnnormalizedRows) -> Tensor | LazyMatmul:
    """Return a layer's outputs, [..., N], or a matmul, which the next operator computes."""
    return lazy_of(layer, x) or layer(x)


def adds_biases() -> bool:
    """Return whether a matmul adds a layer's bias in its launch. A traced step may call this."""
    return not is_plain()


def add(x: Tensor, delta: Tensor | LazyMatmul | None) -> Tensor:
    """Add a layer's output to the residual stream: a tensor, a product, or nothing.

    x: [..., N], or a bias, [N]
    """
    if isinstance(delta, LazyMatmul):
        total, *_ = torch.ops.gpt_eagle.add_product(*delta.operands(), x, None, 0.0)
        return total
    return x if delta is None else (x + delta).to(x.dtype)


def add_norm(
    x: Tensor, delta: Tensor | LazyMatmul | None, weight: Tensor, eps: float
) -> tuple[Tensor, UnnormalizedRows]:
    """Compute `add` and the RMSNorm of its result but for the division. weight: [F]"""
    if isinstance(delta, LazyMatmul):
        total, *norm = torch.ops.gpt_eagle.add_product(*delta.operands(), x, weight, eps)
    else:
        total, *norm = torch.ops.gpt_eagle.add_unscaled(x, delta, weight, eps)
    return x if delta is None else total, UnnormalizedRows(*norm)


# -------------------------------------------------------------------------------------- references


def add_norm_plainly(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add to the residual stream, and norm the sum by `rms_norm`: [..., F] each. weight: [F]"""
    x = (x + delta).to(x.dtype)
    return x, rms_norm(x, weight, eps)


def rotary_cache_plainly(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Compute `reference.rotary_cache` behind the norms of queries and keys, if there are any.

    Source: Qwen3 (arXiv 2505.09388).
    """
    if norms is not None:
        of_q, of_k, eps = norms
        kv_heads = k.shape[1]
        queries, keys, values = qkv.tensor_split((-2 * kv_heads, -kv_heads), dim=2)
        normed = (rms_norm(queries, of_q, eps), rms_norm(keys, of_k, eps))
        qkv = torch.cat((*normed, values), dim=2)
    return reference.rotary_cache(qkv, rope, k, v, slots)


def unnormalized_reference(x: Tensor, weight: Tensor, eps: float) -> UnnormalizedRows:
    """Compute an RMSNorm but for the division, plainly."""
    parts = F.pad(x.float(), (0, -x.shape[-1] % PART)).unflatten(-1, (-1, PART))
    squares = parts.pow(2).sum(-1).flatten(0, -2).T.contiguous()  # [ceil(F / PART), M]
    squares[0] += eps * x.shape[-1]
    return UnnormalizedRows(x * weight, squares)


def add_norm_reference(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, UnnormalizedRows]:
    """Compute `add_norm` plainly. delta: [..., F] fp32, the product"""
    total = (x.float() + delta).to(x.dtype)
    return total, unnormalized_reference(total, weight, eps)


def swiglu_reference(y: Tensor, x: UnnormalizedRows) -> Tensor:
    """Compute the backend's `swiglu` plainly from the product of x.values in fp32, y: [..., N]."""
    return reference.swiglu(y / x.rms()).to(x.values.dtype)


def rotary_cache_reference(
    y: Tensor,
    x: UnnormalizedRows,
    rope: tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Compute the backend's `rotary_cache` plainly from the product of x.values, y: [B, T, N]."""
    qkv = (y / x.rms()).to(k.dtype).unflatten(-1, (-1, k.shape[3]))
    return rotary_cache_plainly(qkv, rope, k, v, slots, norms)


# -------------------------------------------------------------------------------------------- CUDA


def _outputs(packed: Tensor) -> int:
    return packed.shape[-2]  # of a weight, [N, K], and of codes, [blocks, N, columns]


def _sizes(x: Tensor, width: int) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the shapes of `UnnormalizedRows` of the rows of x, with `width` features."""
    return (*x.shape[:-1], width), (-(-width // PART), x.numel() // x.shape[-1])


@torch.library.register_fake("gpt_eagle::add_unscaled", lib=lib)
def _(x, delta, weight, eps):
    values, squares = _sizes(x, x.shape[-1])
    fp32 = x.new_empty(squares, dtype=torch.float32)
    return x.new_empty(0 if delta is None else values), x.new_empty(values), fp32


@torch.library.register_fake("gpt_eagle::add_product", lib=lib)
def _(x, packed, scale, stream, weight, eps):
    values, squares = _sizes(x, _outputs(packed))
    if weight is None:
        return x.new_empty(values), x.new_empty(0), x.new_empty(0, dtype=torch.float32)
    fp32 = x.new_empty(squares, dtype=torch.float32)
    return x.new_empty(values), x.new_empty(values), fp32


@torch.library.register_fake("gpt_eagle::gated_product", lib=lib)
def _(x, squares, packed, scale):
    return x.new_empty(*x.shape[:-1], _outputs(packed) // 2)


@torch.library.register_fake("gpt_eagle::rotary_product", lib=lib)
def _(x, squares, packed, scale, cos, sin, k, v, slots, *norms):
    heads = _outputs(packed) // k.shape[3] - 2 * k.shape[1]
    return k.new_empty(*slots.shape, heads, k.shape[3])
