"""The ways to draft: values of --draft, the modules that load them, and what they take.

Options (run/options.py, option_rules.py), loading (run/load.py) and benchmarks ask this table. A
module has `load_method`, of (target, config, tokenizer), which returns a `drafters.DraftMethod`.
Not here: the methods themselves. No torch is imported.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

from options import below_root


class DraftMethodSpec(NamedTuple):
    """A way to draft: its module, and the options that it takes."""

    module: str
    extended: str = ""  # the module that loads it with inflate, if another
    head: bool = False  # it reads a trained head
    # values of --tree, its default first; (): it has trees of its own
    trees: tuple[str, ...] = ("auto", "dynamic", "static", "chain")
    scores_children: bool = True  # by itself, so that it takes the options of trees
    searches_text: bool = False  # for its drafts
    keeps_texts: bool = False  # it drafts from past requests, too
    static_size_option: bool = False  # its static trees have tree_size nodes
    residual: bool = True  # it takes accept=residual
    many_ranks: bool = True  # it runs under torchrun
    source: str = "head"  # of drafts, for a person


MTP = "mtp"  # its head is a layer of the checkpoint
DRAFTERS = {
    "none": DraftMethodSpec("drafters", trees=(), scores_children=False, residual=False),
    "eagle": DraftMethodSpec("eagle_draft", extended="drafts.heads", head=True),
    "medusa": DraftMethodSpec("drafts.medusa_draft", head=True),
    "hydra": DraftMethodSpec("drafts.hydra_draft", head=True),
    "block": DraftMethodSpec("drafts.block_draft", head=True),
    MTP: DraftMethodSpec("drafts.mtp_draft", head=True, source="MTP layer"),
    "assistant": DraftMethodSpec(
        "drafts.assistant_draft", head=True, many_ranks=False, source="assistant"
    ),
    "ngram": DraftMethodSpec(
        "drafts.ngram_draft",
        trees=(),
        scores_children=False,
        searches_text=True,
        keeps_texts=True,
        source="lookup",
    ),
    "recycling": DraftMethodSpec(
        "drafts.recycling_draft",
        trees=("auto", "static"),
        scores_children=False,
        keeps_texts=True,
        static_size_option=True,
        residual=False,
        many_ranks=False,
        source="recycling",
    ),
    "lookahead": DraftMethodSpec(
        "drafts.lookahead_draft",
        trees=(),
        scores_children=False,
        residual=False,
        many_ranks=False,
        source="lookahead",
    ),
    "rest": DraftMethodSpec(
        "drafts.rest_draft",
        trees=("auto", "dynamic"),
        scores_children=False,
        residual=False,
        many_ranks=False,
        source="datastore",
    ),
    "model": DraftMethodSpec(
        "drafts.model_draft", trees=("chain", "auto", "dynamic", "static"), source="draft model"
    ),
    "eagle+ngram": DraftMethodSpec(
        "drafts.heads",
        head=True,
        trees=("dynamic",),
        searches_text=True,
        keeps_texts=True,
        source="head with lookup",
    ),
}
# of trained heads (files/head_kinds.py)
HEAD_KINDS = tuple(name for name, spec in DRAFTERS.items() if spec.head and not spec.searches_text)


def spec_of(config: Any) -> DraftMethodSpec:
    """Return the spec of a `GenerateConfig`; while its draft is undecided, that of a head."""
    return DRAFTERS[config.draft or "eagle"]


def has_extras() -> bool:
    """Return whether the optional folder is there, so that defaults may use it."""
    return all(find_spec(below_root(name)) for name in ("drafts", "drafts.auto_trees"))
