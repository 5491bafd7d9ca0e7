"""Check each family of our kernels on small shapes: the relative error against its plain reference.

probe.py runs these one by one, so that a family that fails, or loses the device, hides no other.
The names are those of GPT_EAGLE_PLAIN, by which PyTorch replaces a family at fault.
Not here: exact bits, large shapes, captures (tests/cuda/test_gpu.py), times (kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import backends.epilogues
import backends.experts
import backends.triton.functions  # registers the operators of trees
import draft_tree
import reference
from reference import TORCH, choose
from scripts.gpu import kernels as kernel_bench
from scripts.gpu.kernels import TOLERANCE, relative_error

SMALL = (256, 512)  # outputs and inputs of the products
GROUP = 128  # of int4 scales


def attention(device: str) -> float:
    """Attention of 7 rows over 40 slots and themselves."""
    return kernel_bench.attention_contest("8b", 40, 7).error()


def compact(device: str) -> float:
    """Moves within a cache of 32 layers."""
    return kernel_bench.compact_contest(1).error()


def experts(device: str) -> float:
    """Products of 34 rows, each with one of eight experts, in all formats."""
    expert = (torch.arange(34, device=device) * 5) % kernel_bench.EXPERTS  # [P]
    x = torch.randn(len(expert), SMALL[1], dtype=torch.bfloat16, device=device)
    routing = choose(x.device).route(expert, kernel_bench.EXPERTS)
    errors = []
    for form in kernel_bench.FORMATS:
        stack = kernel_bench.make_stack(form, *SMALL, GROUP)
        want = x.new_empty(len(x), SMALL[0], dtype=torch.float32)
        for e, rows in backends.experts.rows_by_expert(expert):
            want[rows] = stack.reference(x[rows].float(), e)
        errors.append(relative_error(stack.product(x, routing), want))
    return max(errors)


def fused(device: str) -> float:
    """Products with the work behind them (backends/epilogues.py)."""
    options = {"device": device, "dtype": torch.bfloat16}
    weight = torch.randn(384, 384, **options) / 20
    x = torch.randn(1, 7, 384, **options)
    stream = torch.randn(1, 7, 384, **options)
    scale = torch.rand(384, **options)
    slots = torch.arange(7, device=device)[None]
    rope = reference.rope_angles(torch.rand(64, device=device), slots)
    ours, theirs = (tuple(torch.zeros(2, 1, 1, 9, 128, **options)) for _ in range(2))
    total, *unscaled = torch.ops.gpt_eagle.add_product(x, weight, None, stream, scale, 1e-5)
    norm = backends.epilogues.UnnormalizedRows(*unscaled)
    backend = choose(x.device)
    got = [total, backend.swiglu(backends.epilogues.LazyMatmul(*norm, weight, None))]
    product = backends.epilogues.LazyMatmul(*norm, weight, None)
    got.append(backend.rotary_cache(product, rope, *ours, slots))
    wide = weight.float()
    want = [backends.epilogues.add_norm_reference(stream, x.float() @ wide.T, scale, 1e-5)[0]]
    y = norm.values.float() @ wide.T
    want.append(backends.epilogues.swiglu_reference(y, norm))
    want.append(backends.epilogues.rotary_cache_reference(y, norm, rope, *theirs, slots))
    return largest((*got, *ours), (*want, *theirs))


def norm(device: str) -> float:
    """The norm behind a residual sum, and alone."""
    x = torch.randn(7, 96, device=device)
    delta = torch.randn(7, 96, device=device)
    weight = torch.randn(96, device=device)
    backend = choose(x.device)
    add_norm = getattr(backend, "add_norm", backends.epilogues.add_norm_plainly)  # CUDA has one
    got = (*add_norm(x, delta, weight, 1e-5), backend.rms_norm(x, weight, 1e-5))
    want = backends.epilogues.add_norm_plainly(x, delta, weight, 1e-5)
    return largest(got, (*want, TORCH.rms_norm(x, weight, 1e-5)))


def products(device: str) -> float:
    """Products in int8, int4 and 16 bits; a row comes out the same among others."""
    errors = []
    for form in kernel_bench.FORMATS:
        layer = kernel_bench.make_layer(form, *SMALL, GROUP)
        errors.append(kernel_bench.product_error(layer, SMALL[1], [1, 17, 33]))
    return max(errors)


def rotary(device: str) -> float:
    """Rotation of queries and keys, and their way into the cache."""
    heads = 4
    kv_heads = 2
    qkv = torch.randn(1, 7, heads + 2 * kv_heads, 128, device=device).bfloat16()
    slots = torch.arange(7, device=device)[None]
    rope = reference.rope_angles(torch.rand(64, device=device), slots)
    ours, theirs = (
        tuple(torch.zeros(2, 1, kv_heads, 9, 128, device=device).bfloat16()) for _ in range(2)
    )
    got = choose(qkv.device).rotary_cache(qkv, rope, *ours, slots)
    want = reference.rotary_cache(qkv, rope, *theirs, slots)
    return largest((got, *ours), (want, *theirs))


def topk(device: str) -> float:
    """Noise, the best scores of a vocabulary, and a level of a draft tree made of them."""
    error = kernel_bench.topk_contest(3000, 3, 0).error()
    ones = torch.ones(2, dtype=torch.int64, device=device)
    noise = (ones[:, None].expand(2, 2), ones, ones, None, ones, 3, 3000, 0)
    gumbel = choose(torch.device(device)).gumbel
    error = max(error, relative_error(gumbel(*noise), reference.gumbel(*noise)))
    logits = torch.randn(1, 4, 3000, device=device)
    values = -torch.rand(1, 4, device=device)
    seen = torch.ones(1, 4, 9, device=device) > 0
    level = draft_tree.Level(k=5, count=6, first_slot=3)
    operands = (logits, 1.0, None, values, seen, None, level.k, level.count, level.first_slot)
    got = torch.ops.gpt_eagle.grow_level(*operands)
    best = logits.topk(level.k)
    scores = best.values - logits.logsumexp(-1, keepdim=True)
    children = draft_tree.Children(best.indices, scores.clamp(max=0))
    want = reference.grow_level(children, values, seen, level)
    return max(error, largest(got, want))


def tree(device: str) -> float:
    """The nodes of a draft tree and their relations, which are exact."""
    values = -torch.randint(0, 99, (2, 510), device=device).float()
    chosen = torch.ops.gpt_eagle.best_nodes(values, 59)
    want = reference.best_nodes(values, 59)
    assert torch.equal(chosen, want), "best_nodes differs from its reference"
    parents = torch.full((2, 510), -1, device=device)
    parents.scatter_(1, chosen[:, 1:], chosen[:, :-1])  # a chain
    got = torch.ops.gpt_eagle.link_nodes(chosen, parents, 59)
    want = reference.link_nodes(chosen, parents, 59)
    assert all(map(torch.equal, got, want)), "link_nodes differs from its reference"
    return 0.0


def largest(got: tuple[Tensor, ...] | list[Tensor], want: tuple[Tensor, ...] | list) -> float:
    """Return the largest relative error of pairs of tensors."""
    errors = [relative_error(a.float(), b.float()) for a, b in zip(got, want, strict=True)]
    return max(errors)


CHECKS: dict[str, Callable[[str], float]] = {
    check.__name__: check
    for check in (attention, compact, experts, fused, norm, products, rotary, topk, tree)
}


def check_family(name: str, device: str) -> dict[str, object]:
    """Check a family. Raises: AssertionError for a result that is not its reference's."""
    torch.manual_seed(0)
    error = CHECKS[name](device)
    assert error < TOLERANCE, f"the relative error is {error:.2g}, and {TOLERANCE:g} is rounding"
    return {"relative_error": error, "text": f"right, relative error {error:.1g}"}
