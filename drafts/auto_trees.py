"""The presets of `--tree auto`: no tree, trees of a lookup, and grown trees up to the largest.

Not here: the choice among them (autosize.py), and a drafter at rest (deferred.py).
"""

from __future__ import annotations

from draft_tree import DynamicTree, StaticTree, candidates
from drafters import Drafter, TreeDrafter
from drafts.autosize import AutoTrees, TreeShape
from drafts.deferred import LazyDrafter, RestingDrafter
from drafts.kept_texts import texts_for
from drafts.ngram_draft import Ngram, NgramDrafter
from model import Transformer
from run.observer import DraftMethod
from run.options import GenerateConfig

# presets between no tree and the largest; CUDA pads to 16, 32 or 64 nodes and takes all but the
# first, a CPU does not pad
SHAPES = (
    TreeShape(1, 1, 2),
    TreeShape(3, 1, 4),
    TreeShape(5, 3, 8),
    TreeShape(5, 4, 16),
    TreeShape(6, 8, 32),
)


class AutoDrafter(LazyDrafter):
    """The largest tree, with the presets that a policy picks from by the clock."""

    def method(self) -> DraftMethod:
        lookup = self.lookup if isinstance(self.lookup, NgramDrafter) else None
        policy = AutoTrees(lookup, lookup and lookup.kept, self.drafter.reach)
        return DraftMethod(self.presets, self.resolved_options(), policy=policy)


def with_smaller_trees(
    drafter: TreeDrafter, target: Transformer, lookup: NgramDrafter | None = None
) -> AutoDrafter:
    """Return the drafter with presets: its tree is the largest, no tree the smallest.

    lookup: an `NgramDrafter` whose trees are presets, too; for drafters that may skip tokens
    """
    largest = drafter.tree
    shapes: list[TreeShape] = []
    presets: list[Drafter] = [RestingDrafter(drafter, target, lookup)]
    if lookup:
        presets += [
            RestingDrafter(drafter, target, lookup, 1 + size) for size in range(len(lookup.sizes))
        ]
    for shape in SHAPES if target.norm.weight.device.type == "cpu" else SHAPES[1:]:
        if drafter.one_pass and shape.topk > 1:
            shape = TreeShape(min(largest.depth, shape.size - 1), shape.topk, shape.size)
        shape = cut(shape, drafter.levels)
        fits = shape.depth <= largest.depth and shape.topk <= largest.width
        if not fits or shape.size >= largest.size or shape in shapes:
            continue
        shapes.append(shape)
        tree = StaticTree.chain(shape.depth) if shape.topk == 1 else DynamicTree(*shape)
        presets.append(LazyDrafter(drafter.with_tree(tree), target, lookup=lookup))
    return AutoDrafter(drafter, target, presets, lookup=lookup)


def cut(shape: TreeShape, levels: int) -> TreeShape:
    """Return a shape of so many levels at most, with no more nodes than it then has candidates."""
    depth = min(shape.depth, levels)
    return TreeShape(depth, shape.topk, min(shape.size, 1 + candidates(depth, shape.topk)))


def with_trees(method: DraftMethod, target: Transformer, config: GenerateConfig) -> DraftMethod:
    """Return a method that grows a tree as one that chooses among trees, and none, by speed.

    On one CPU a head's method also has trees of a lookup.
    """
    kept = texts_for(config, target)
    lookup = None
    if kept is not None:
        lookup = NgramDrafter(Ngram(kept=kept))
    return with_smaller_trees(method.presets[-1], target, lookup).method()
