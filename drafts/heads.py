"""--draft eagle+ngram: an EAGLE head whose trees take looked-up tokens, too."""

from __future__ import annotations

from typing import Any

from drafts.kept_texts import texts_for
from drafts.ngram_draft import Ngram
from drafts.presets import PresetPolicy
from model import Transformer
from run.draft_method import DraftMethod
from run.heads import load_drafter
from run.observer import PresetMethod
from run.options import GenerateConfig
from run.resolved import tree_options


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Load a head with its lookups. Raises: ValueError for options or files that do not fit."""
    kept = texts_for(config, target)
    form = (config.quant_draft, config.group_size)
    options = {"children": config.child_rule}
    drafter = load_drafter(target, config.head, config.draft_tree, *form, **options)
    Ngram.from_config(config, kept).graft_on(drafter)
    return PresetMethod((drafter,), tree_options(drafter), policy=PresetPolicy(kept))
