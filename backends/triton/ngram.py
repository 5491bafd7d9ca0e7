"""CUDA kernel, in Triton: the continuations of a text that a lookup finds (drafts/ngram_draft.py).

One block of threads handles a sequence.
1. It writes a key for every place before the root: the tokens up to it that match the end of the
   text, then the place, so that the largest key is the longest match, and the latest of equal ones.
2. It copies the tokens behind the best place, as one chain.
3. It removes the places whose tokens would be the same chain, and goes on with 2.

Kept texts and the text are one row of places. Trade-off: one block reads all of them, once and
once more for each further chain.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # places that the threads read together
WARPS = 16


@triton.jit
def _tokens(kept_ptr, text_ptr, C, place, there):
    """Load tokens of the kept texts and the text behind them; -1 is none."""
    token = tl.load(text_ptr + place - C, mask=there & (place >= C), other=-1)
    if kept_ptr is not None:
        kept = tl.load(kept_ptr + place, mask=there & (place < C), other=-1)
        token = tl.where(place < C, kept, token)
    return token


@triton.jit
def _source(place, step, root, places):
    """Return the place that a copy takes its token from; at the end it continues into itself."""
    return tl.minimum(place + 1 + step % tl.maximum(root - place, 1), places - 1)


@triton.jit(do_not_specialize=["C", "S"])
def match_kernel(
    text_ptr,
    pos_ptr,
    kept_ptr,
    keys_ptr,
    chains_ptr,
    lengths_ptr,
    C,
    S,
    K: tl.constexpr,
    L: tl.constexpr,
    LEAST: tl.constexpr,
    LONGEST: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the K best continuations of a text, pairwise different.

    text: [B, S] int64; pos: [B] int64, the roots; kept: [C] int64, or None
    Writes: keys, [B, C + S] int32; chains, [B, K, L] int64; lengths, [B, K] int64.
    """
    row = tl.program_id(0)
    places = C + S
    text_ptr += row.to(tl.int64) * S
    keys_ptr += row.to(tl.int64) * places
    root = tl.load(pos_ptr + row).to(tl.int32) + C
    best = tl.full([BLOCK], -1, tl.int32)
    for first in range(0, root, BLOCK):
        place = first + tl.arange(0, BLOCK)
        equal = place < root
        following = _tokens(kept_ptr, text_ptr, C, place + 1, equal)
        length = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(LONGEST):
            last = _tokens(kept_ptr, text_ptr, C, root - back, root >= back)
            equal &= (place >= back) & (last >= 0)
            equal &= _tokens(kept_ptr, text_ptr, C, place - back, equal) == last
            length += equal.to(tl.int32)
        key = tl.where((length >= LEAST) & (following >= 0), length * places + place, -1)
        tl.store(keys_ptr + place, key, mask=place < root)
        best = tl.maximum(best, key)
    step = tl.arange(0, STEPS)
    for k in range(K):
        top = tl.maximum(tl.max(best, 0), 0)  # without a match a chain follows place 0
        at = top % places
        length = top // places + tl.where((top >= places) & (at < C), LONGEST, 0)
        tl.store(lengths_ptr + row * K + k, length.to(tl.int64))
        chain_ptr = chains_ptr + (row * K + k) * L
        chain = _tokens(kept_ptr, text_ptr, C, _source(at, step, root, places), step < L)
        tl.store(chain_ptr + step, tl.maximum(chain, 0), mask=step < L)
        tl.debug_barrier()  # other threads read the chain
        best = tl.full([BLOCK], -1, tl.int32)
        for first in range(0, tl.where(k < K - 1, root, 0), BLOCK):
            place = first + tl.arange(0, BLOCK)
            key = tl.load(keys_ptr + place, mask=place < root, other=-1)
            same = key >= 0
            for s in range(L):
                token = _tokens(kept_ptr, text_ptr, C, _source(place, s, root, places), same)
                same &= tl.maximum(token, 0) == tl.load(chain_ptr + s)
            tl.store(keys_ptr + place, tl.full([BLOCK], -1, tl.int32), mask=same)
            best = tl.maximum(best, tl.where(same, -1, key))


def ngram_match(
    text: Tensor, pos: Tensor, kept: Tensor | None, *sizes: int
) -> tuple[Tensor, Tensor]:
    """Compute `lookup` of drafts/ngram_draft.py. Never waits.

    text: [B, S] int64; pos: [B] int64; kept: [C] int64; None: there are none
    sizes: tokens and branches; the shortest match that is used, the longest that is counted
    Returns: tokens [B, K, L] int64; lengths [B, K] int64.
    """
    B, S = text.shape
    C = 0 if kept is None else len(kept)
    tokens, branches, _, longest = sizes
    assert (longest + 1) * (C + S) < 2**31, (longest, C, S)
    keys = torch.empty(B, C + S, dtype=torch.int32, device=text.device)
    chains = text.new_empty(B, branches, tokens)
    lengths = text.new_empty(B, branches)
    pointers = (text.contiguous(), pos.contiguous(), kept, keys, chains, lengths)
    match_kernel[(B,)](*pointers, C, S, **constants_of(*sizes), num_warps=WARPS)
    return chains, lengths


def constants_of(tokens: int, branches: int, least: int, longest: int) -> dict[str, int]:
    """Return the constants of `match_kernel`."""
    return {
        "K": branches,
        "L": tokens,
        "LEAST": least,
        "LONGEST": longest,
        "STEPS": triton.next_power_of_2(tokens),
        "BLOCK": BLOCK,
    }
