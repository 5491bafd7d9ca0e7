"""The operators with which draft trees grow on CUDA: `grow_level`, `best_nodes` and `relate`.

The kernels are in topk.py and tree.py beside this file; the references in ops/tree.py define the
results, and serve without Triton, and beyond what the kernels take. Importing this file registers
the operators: `build_cycles` (decode.py) does so for an engine on CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.library import has_triton, lib
from ops.tree import Level, Scores, best_nodes_reference, expand, relate_reference

lib.define(
    "grow_level(Tensor logits, float sharpness, Tensor? ids, Tensor values, Tensor seen, "
    "Tensor? places, int k, int count, int slot, bool by_value) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
lib.define("best_nodes(Tensor values, int count) -> Tensor")
lib.define("relate(Tensor chosen, Tensor parents, int depth) -> (Tensor, Tensor, Tensor, Tensor)")


def grow_level_plain(logits, sharpness, ids, values, seen, places, k, count, slot, by_value):
    level = Level(k, count, slot=slot, places=places, by_value=by_value)
    return expand(Scores(logits, sharpness, ids).best(k), values, seen, level)


def grow_level_cuda(logits, sharpness, ids, values, seen, places, k, count, slot, by_value):
    if has_triton("topk", "tree"):
        import ops.cuda.topk

        if k <= ops.cuda.topk.MOST:
            scores = Scores(logits, sharpness, ids)
            level = Level(k, count, slot=slot, places=places, by_value=by_value)
            with torch.cuda.device(logits.device):
                return ops.cuda.topk.grow_level(scores, values, seen, level)
    return grow_level_plain(logits, sharpness, ids, values, seen, places, k, count, slot, by_value)


lib.impl("grow_level", grow_level_plain, "CPU")
lib.impl("grow_level", grow_level_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::grow_level", lib=lib)
def _(logits, sharpness, ids, values, seen, places, k, count, slot, by_value):
    B, R, _ = logits.shape
    tokens = values.new_empty(B, R * k, dtype=torch.long)
    candidates = values.new_empty(B, R * k)
    order = values.new_empty(B, count, dtype=torch.long)
    front = values.new_empty(B, count)
    return tokens, candidates, order, front, seen.new_empty(B, count, seen.shape[2])


def best_nodes_cuda(values: Tensor, count: int) -> Tensor:
    if has_triton("tree"):
        import ops.cuda.tree

        if values.shape[1] <= ops.cuda.tree.MOST:
            with torch.cuda.device(values.device):
                return ops.cuda.tree.best_nodes(values, count)
    return best_nodes_reference(values, count)


def relate_cuda(chosen: Tensor, parents: Tensor, depth: int) -> tuple[Tensor, ...]:
    if not has_triton("tree"):
        return relate_reference(chosen, parents, depth)
    import ops.cuda.tree

    with torch.cuda.device(chosen.device):
        return ops.cuda.tree.relate(chosen, parents, depth)


lib.impl("best_nodes", best_nodes_reference, "CPU")
lib.impl("best_nodes", best_nodes_cuda, "CUDA")
lib.impl("relate", relate_reference, "CPU")
lib.impl("relate", relate_cuda, "CUDA")


@torch.library.register_fake("gpt_eagle::best_nodes", lib=lib)
def _(values, count):
    return values.new_empty(len(values), count, dtype=torch.long)


@torch.library.register_fake("gpt_eagle::relate", lib=lib)
def _(chosen, parents, depth):
    B, drafted = chosen.shape
    N = drafted + 1
    number = chosen.new_empty(B, parents.shape[1] + 1)
    above = chosen.new_empty(B, N)
    depths = chosen.new_empty(B, N)
    mask = chosen.new_empty(B, N, N, dtype=torch.bool)
    return number, above, depths, mask
