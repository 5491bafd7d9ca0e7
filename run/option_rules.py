"""Conditions for an option of generate.py to have the effect that it is asked for.

An option names its conditions (`needs`), and `GenerateConfig.check_needs` reports the first that a
given option does not meet. This module needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from run.methods import spec_of


class Need(NamedTuple):
    """A condition for an option to have an effect."""

    text: str  # follows the option's name in the message; {0} is the options
    met: Callable[[Any], bool]  # of the options, a GenerateConfig


def only_with(draft: str) -> Need:
    """Return the condition that a method is asked for by name."""
    return Need(f"belongs to --draft {draft}; add that", lambda o: o.draft == draft)


# the draft
HEAD = Need("does nothing with --draft {0.draft}; drop it", lambda o: spec_of(o).head)
EXACT = Need("takes no --accept residual; drop one of them", lambda o: o.accept == "exact")
INT4 = Need("belongs to int4; add --quant int4", lambda o: "int4" in (o.quant, o.quant_draft))

# the tree
SIZED = Need(
    "does nothing with --draft {0.draft}, which has no choice of trees; drop it",
    lambda o: spec_of(o).trees != (),
)
GROWS = Need(SIZED.text, lambda o: spec_of(o).scores_children)
LEVELS = Need(
    "belongs to dynamic trees and chains, not to a static one; drop it",
    lambda o: spec_of(o).scores_children and o.tree_shape != "static",
)
GROWN = Need(
    "belongs to --tree dynamic and auto; drop it",
    lambda o: (
        o.tree_shape in ("dynamic", "auto") or (spec_of(o).static_size_option and not o.tree_file)
    ),
)

# the tokens
SAMPLED = Need("has no effect at temperature 0; set --temperature", lambda o: o.temperature > 0)
XTC = Need("belongs to XTC; set xtc_probability", lambda o: o.xtc_probability > 0)
DRY = Need("belongs to DRY; set dry_multiplier", lambda o: o.dry_multiplier > 0)
REPEATS = Need(
    "belongs to penalties; set repetition_penalty, presence_penalty or frequency_penalty",
    lambda o: o.repetition_penalty != 1 or o.presence_penalty or o.frequency_penalty,
)
RULE = Need(
    "belongs to heads, draft models and --draft ngram; drop it", lambda o: spec_of(o).residual
)
FIXED = Need(  # the residual rule's tokens follow the tree, and --tree auto goes by a clock
    "needs a tree of one size; --tree auto changes it: use --tree dynamic",
    lambda o: o.tree != "auto",
)

# the run
NOT_COMPILED = Need("is the opposite of --compile; drop one of them", lambda o: not o.compile)
TEXT = Need(
    "renders text; it cannot go with prompt_ids",
    lambda o: o.prompt_ids is None or o.chat == "none",
)
CHAT = Need(
    "belongs to a chat template; drop --chat none or prompt_ids",
    lambda o: o.chat != "none" and o.prompt_ids is None,
)
NOT_CHAT = Need(
    "cannot go with --interactive, which is one conversation", lambda o: not o.interactive
)
