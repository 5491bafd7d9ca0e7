"""The ways to draft: values of --draft, the modules that load them, and what they take.

Options (options.py, option_rules.py), loading (load.py) and benchmarks ask this table. A module has
`load_method`, of (target, config, tokenizer), which returns a `drafters.Method`.
Not here: the methods themselves. No torch is imported.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """A way to draft: its module, and the options that it takes."""

    module: str
    extended: str = ""  # the module that loads it with inflate, if another
    head: bool = False  # it reads a trained head
    # values of --tree, its default first; (): it has trees of its own
    trees: tuple[str, ...] = ("auto", "dynamic", "static", "chain")
    grows: bool = True  # it grows trees from scores of its own, so that it takes their options
    looks_up: bool = False  # it searches texts
    keeps_texts: bool = False  # it drafts from past requests, too
    resizes: bool = False  # its static trees have tree_size nodes
    residual: bool = True  # it takes accept=residual
    many_ranks: bool = True  # it runs under torchrun
    source: str = "head"  # of drafts, for a person


DRAFTERS = {
    "none": Entry("drafters", trees=(), grows=False, residual=False),
    "eagle": Entry("eagle_draft", extended="extras.heads", head=True),
    "medusa": Entry("extras.medusa_draft", head=True),
    "hydra": Entry("extras.hydra_draft", head=True),
    "block": Entry("extras.block_draft", head=True),
    "ngram": Entry(
        "extras.ngram_draft",
        trees=(),
        grows=False,
        looks_up=True,
        keeps_texts=True,
        source="lookup",
    ),
    "recycling": Entry(
        "extras.recycling_draft",
        trees=("auto", "static"),
        grows=False,
        keeps_texts=True,
        resizes=True,
        residual=False,
        many_ranks=False,
        source="recycling",
    ),
    "lookahead": Entry(
        "extras.lookahead_draft",
        trees=(),
        grows=False,
        residual=False,
        many_ranks=False,
        source="lookahead",
    ),
    "rest": Entry(
        "extras.rest_draft",
        trees=("auto", "dynamic"),
        grows=False,
        residual=False,
        many_ranks=False,
        source="datastore",
    ),
    "model": Entry(
        "extras.model_draft", trees=("chain", "auto", "dynamic", "static"), source="draft model"
    ),
    "eagle+ngram": Entry(
        "extras.heads",
        head=True,
        trees=("dynamic",),
        looks_up=True,
        keeps_texts=True,
        source="head with lookup",
    ),
}
# of trained heads (base/head_kinds.py)
HEAD_KINDS = tuple(name for name, entry in DRAFTERS.items() if entry.head and not entry.looks_up)


def entry_of(config: Any) -> Entry:
    """Return the entry of a `GenerateConfig`; while its draft is undecided, that of a head."""
    return DRAFTERS[config.draft or "eagle"]


def has_extras() -> bool:
    """Return whether the optional folder is there, so that defaults may use it."""
    return find_spec("extras") is not None and find_spec("extras.auto_trees") is not None
