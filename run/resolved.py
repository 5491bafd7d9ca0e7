"""The options of a drafter's tree as they were used, for the record of a run."""

from __future__ import annotations

from typing import Any

from draft_tree import DynamicTree
from drafters import Drafter, TreeDrafter


def tree_options(drafter: Drafter) -> dict[str, Any]:
    """Return the options of a drafter that grows trees, by name; {} for another."""
    if not isinstance(drafter, TreeDrafter):
        return {}
    tree = drafter.tree
    if isinstance(tree, DynamicTree):
        options = {"tree": "dynamic", "tree_topk": tree.topk, "tree_size": tree.size}
    elif tree.width == 1:
        options = {"tree": "chain", "tree_paths": tree.paths}
    else:
        options = {"tree": "static", "tree_paths": tree.paths}
    if drafter.vocab.ids is not None:
        options["draft_vocab"] = drafter.vocab.drafted
    if drafter.graft:
        options.update(drafter.graft.resolved_options())
    options["tree_depth"] = tree.depth
    options["children"] = drafter.children
    options["sharpness"] = drafter.sharpness
    return options
