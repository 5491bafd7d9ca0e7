"""Keys and values of a cache in 8 bits: what a row of such a cache holds.

A row is the key, or the value, of one head in one slot: E codes -127 .. 127 of a byte each, and
behind them a bf16 scale for each group of 32 elements.

      | code 0 | code 1 | ... | code E-1 | scale 0, bf16 | ... | scale of the last group, bf16 |

1. A row is rounded when it is written, and depends on its own numbers alone. So a node of a draft
   tree has the row that its token has in vanilla decoding, and drafting changes no token.
2. A row is one piece of memory: moves, copies and files of slots need not know what it holds.
3. Attention widens codes to fp32 in registers (cpu/kv_codes.h). Its result on a CPU is that over
   the same cache in fp32, bit for bit.

Trade-off: a scale per group takes 3 to 6 % more bytes than one per row, and has half the KL or
less, since keys have a few large elements (benchmarks/RESULTS.md). Scales per element of all keys
have less still, but need tokens that are yet to come.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # elements that share a scale; the last group of a row may have fewer


def row_width(elements: int, dtype: torch.dtype) -> int:
    """Return the numbers of a cache's row for a head of so many elements."""
    if dtype != torch.int8:
        return elements
    return elements + torch.bfloat16.itemsize * -(-elements // GROUP)


def encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values as rows of a cache. x: [..., E] -> [..., row_width] of the dtype"""
    if dtype != torch.int8:
        return x.to(dtype)
    elements = x.shape[-1]
    padded = F.pad(x.float(), (0, -elements % GROUP))
    groups = padded.unflatten(-1, (-1, GROUP))  # [..., G, GROUP]
    scale = (groups.abs().amax(-1).clamp(min=1e-30) / 127).bfloat16()  # [..., G]
    codes = (groups / scale.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((codes.flatten(-2)[..., :elements], scale.view(torch.int8)), -1)


def decode(rows: Tensor, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the keys or values of a cache's rows, [..., elements] of the dtype."""
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    codes, scale = rows.tensor_split((elements,), -1)
    steps = scale.contiguous().view(torch.bfloat16).float()  # [..., G]
    steps = steps.repeat_interleave(GROUP, -1)[..., :elements]  # [..., elements]
    return (codes * steps).to(dtype)
