"""EAGLE heads with additions: inflate and --draft eagle+ngram."""

from __future__ import annotations

from typing import Any

from drafts.kept_texts import texts_for
from drafts.ngram_draft import Ngram
from drafts.presets import PresetPolicy
from model import Transformer
from options import load_part
from run.draft_method import DraftMethod
from run.heads import load_drafter
from run.methods import spec_of
from run.observer import Observer, PresetMethod
from run.options import GenerateConfig
from run.resolved import tree_options


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Load an EAGLE head. Raises: ValueError for options or files that do not fit."""
    added: dict[str, Any] = {}
    policy = Observer()
    if config.inflate:
        added["source"] = load_part("extension", "stand_in").head_source(config, target)
    if spec_of(config).searches_text:
        kept = texts_for(config, target)
        added["graft"] = Ngram.from_config(config, kept)
        policy = PresetPolicy(kept)
    form = (config.quant_draft, config.group_size)
    added["children"] = config.child_rule
    drafter = load_drafter(target, config.head, config.draft_tree, *form, **added)
    return PresetMethod((drafter,), tree_options(drafter), policy=policy)
