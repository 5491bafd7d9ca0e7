"""Conditions for an option of generate.py to have an effect.

An option names its conditions (`needs`), and `GenerateConfig.check_needs` reports the first that a
given option does not meet. This module needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

SOURCES = ("recycling", "lookahead", "rest")  # values of --draft that need no model, beside ngram


class Need(NamedTuple):
    """A condition for an option to have an effect."""

    text: str  # follows the flag's name in the message; {0} is the options
    met: Callable[[Any], bool]  # of the options, a GenerateConfig


DRAFT = Need("needs a draft; there is none, or --draft none", lambda o: o.draft != "none")
HEAD = Need(
    "does nothing with --draft {0.draft}; drop it",
    lambda o: o.draft not in ("model", "ngram", *SOURCES),
)
MODEL = Need("belongs to --draft model; add that", lambda o: o.draft == "model")
REST = Need("belongs to --draft rest; add that", lambda o: o.draft == "rest")
WINDOW = Need("belongs to --draft lookahead; add that", lambda o: o.draft == "lookahead")
STORE = Need(  # under the residual rule the drafts of past requests would change the tokens
    "belongs to lookups and recycling with --accept exact; use --draft ngram",
    lambda o: (
        o.accept == "exact"
        and (
            o.draft.endswith(("ngram", "recycling"))
            or (o.tree_shape == "auto" and o.draft not in SOURCES)
        )
    ),
)
SIZED = Need(
    "does nothing with --draft {0.draft}, which has trees of its own; drop it",
    lambda o: o.draft not in ("ngram", "lookahead"),
)
TREE = Need(SIZED.text, lambda o: o.draft not in ("ngram", *SOURCES))
GROWN = Need(
    "belongs to --tree dynamic and auto; drop it",
    lambda o: o.tree_shape in ("dynamic", "auto") or (o.draft == "recycling" and not o.tree_file),
)
RULE = Need(
    "belongs to heads, draft models and --draft ngram; drop it", lambda o: o.draft not in SOURCES
)
LEVELS = Need(
    "belongs to dynamic trees and chains, not to a static one; drop it",
    lambda o: o.tree_shape != "static",
)
ONE_SIZE = Need(
    "needs a tree of one size; --tree auto changes it: use --tree dynamic",
    lambda o: o.tree != "auto",
)
SAMPLED = Need("has no effect at temperature 0; set --temperature", lambda o: o.temperature > 0)
INT4 = Need("belongs to int4; add --quant int4", lambda o: "int4" in (o.quant, o.quant_draft))
INFLATABLE = Need(
    "takes a Hugging Face directory, as --checkpoint checkpoints/demo; name one",
    lambda o: o.checkpoint != type(o).checkpoint,
)
SHAPE = Need("needs a shape; name one with --inflate", lambda o: bool(o.inflate))
TRIMMED = Need("has no effect alone; add --draft_vocab N", lambda o: o.draft_vocab > 0)
TEXT = Need("renders text; it cannot go with --prompt_ids", lambda o: o.prompt_ids is None)
CHAT = Need("belongs to a chat template; add --chat", lambda o: o.chat is not None)
ONCE = Need("cannot go with --compare, which decodes everything twice", lambda o: not o.compare)
NOT_CHAT = Need(
    "cannot go with --interactive, which is one conversation", lambda o: not o.interactive
)
