"""The ways to draft that this folder adds, by their names. No torch is imported.

run/methods.py explains the fields.
"""

from __future__ import annotations

from run.methods import MTP, DraftMethodSpec

DRAFTERS = {
    "medusa": DraftMethodSpec("drafts.token_draft", head=True),
    "hydra": DraftMethodSpec("drafts.token_draft", head=True),
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
        source="lookup",
    ),
    "recycling": DraftMethodSpec(
        "drafts.recycling_draft",
        trees=("auto", "static"),
        scores_children=False,
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
        "drafts.ngram_draft",
        head=True,
        trees=("dynamic",),
        searches_text=True,
        source="head with lookup",
    ),
}
