"""CUDA kernel, in Triton: the Gumbel noise of sampled tokens.

A block has 4 WORDS columns of one draw: Philox4x32-10 gives the noise of four tokens from one
counter, so a number depends on its key, its draw and its token alone. PyTorch takes some 150
launches for the same (reference.py), most of a sampled token's time beside a small model.
Trade-off: `log` is the device's own, so noise may differ from a CPU's in its last bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference import DOMAIN_SHIFT

WORDS = 256  # counters of a block


@triton.jit
def gumbel_kernel(
    seed_ptr,
    prompt_ptr,
    sample_ptr,
    greedy_ptr,
    first_ptr,
    noise_ptr,
    ROWS,
    V,
    DOMAIN: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Compute a block of a row.

    seed: [B, 2] int64, low and high 32 bits; prompt, sample, first: [B] int64
    greedy: [B] bool, sequences whose noise is 0; None: there are none
    DOMAIN: the domain's bits of the draw's word
    Writes: noise, [B, ROWS, V] fp32.
    """
    row = tl.program_id(1)
    b = row // ROWS
    counter = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    draw = tl.load(first_ptr + b) + row % ROWS + DOMAIN
    sample = tl.load(sample_ptr + b)
    prompt = tl.load(prompt_ptr + b)
    low = tl.load(seed_ptr + 2 * b).to(tl.uint32)
    high = tl.load(seed_ptr + 2 * b + 1).to(tl.uint32)
    zero = tl.zeros_like(counter)
    w0, w1, w2, w3 = tl.philox_impl(
        counter.to(tl.uint32),
        (zero + draw).to(tl.uint32),
        (zero + sample).to(tl.uint32),
        (zero + prompt).to(tl.uint32),
        low,
        high,
        10,
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [WORDS, 2, 2], in order
    bits = tl.reshape(words, (4 * WORDS,))
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    noise = -tl.log(minus_log1p(uniform))
    if greedy_ptr is not None:
        noise = tl.where(tl.load(greedy_ptr + b), 0.0, noise)
    token = tl.program_id(0) * 4 * WORDS + tl.arange(0, 4 * WORDS)
    tl.store(noise_ptr + row.to(tl.int64) * V + token, noise, mask=token < V)


@triton.jit
def minus_log1p(u):
    """Compute -log(1 - u), u in (0, 1), exactly for small u too.

    The rounding of 1 - u is undone by a factor. Source: Kahan; Higham, Accuracy and Stability of
    Numerical Algorithms, problem 1.5.
    """
    rest = 1 - u
    rounded = 1 - rest
    return tl.where(rounded == 0, u, -tl.log(rest) * (u / tl.where(rounded == 0, 1.0, rounded)))


def gumbel(
    seed: Tensor,
    prompt: Tensor,
    sample: Tensor,
    greedy: Tensor | None,
    first: Tensor,
    rows: int,
    vocab: int,
    domain: int,
) -> Tensor:
    """Compute `gumbel` of reference.py. Allocates its result; never waits."""
    B = len(first)
    seed = seed.expand(B, 2).contiguous()
    noise = torch.empty(B, rows, vocab, dtype=torch.float32, device=first.device)
    gumbel_kernel[triton.cdiv(vocab, 4 * WORDS), B * rows](
        seed,
        prompt.contiguous(),
        sample.contiguous(),
        None if greedy is None else greedy.contiguous(),
        first.contiguous(),
        noise,
        rows,
        vocab,
        DOMAIN=domain << DOMAIN_SHIFT,
        WORDS=WORDS,
        num_warps=4,
    )
    return noise
