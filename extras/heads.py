"""Additions of --inflate, --draft_vocab and --draft eagle+ngram to a draft head."""

from __future__ import annotations

from typing import Any

from model import Transformer
from options import GenerateConfig


def head_extras(target: Transformer, config: GenerateConfig, kept: Any = None) -> dict[str, Any]:
    """Return further arguments of `eagle_draft.load_drafter`.

    kept: texts that lookups search, too
    Raises: ValueError for options or files that do not fit.
    """
    extras: dict[str, Any] = {}
    if config.inflate:
        from extras.stand_in import head_source

        extras["source"] = head_source(config, target)
    if config.draft_vocab:
        from extras.draft_vocab import vocab_from

        extras["vocab"] = vocab_from(config, target)
    if config.draft == "eagle+ngram":
        from extras.ngram_draft import Ngram

        extras["graft"] = Ngram.from_config(config, kept)
    return extras
