"""The needs of options, to work and to have an effect: one table. No torch is imported.

The kind, the choices and the range of a value are those of its field (run/options.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from options import require
from run.methods import has_drafts, spec_of
from run.parsing import flag_of

GROUP_SIZES = (32, 64, 128)  # of int4: inputs that share a scale


class Need(NamedTuple):
    """A condition for options to work, or to have an effect."""

    names: tuple[str, ...]
    # follows the option's name in the message; {0} is the options, {1} the trees of their draft
    text: str
    met: Callable[[Any], bool]  # of the options, a GenerateConfig


ABSENT = "is in the folder drafts/, which is not here; restore it, or drop that"
NO_TREES = "does nothing with --draft {0.draft}, which has no choice of trees; drop it"
GROWN = Need(
    ("tree_topk", "tree_size"), "belongs to --tree dynamic and auto; drop it",
    lambda o: o.tree_shape in ("dynamic", "auto")
    or (spec_of(o).static_size_option and not o.tree_file),
)  # fmt: skip
NOT_CHAT = Need(
    ("num_samples", "batch_size", "compare", "json", "trace", "profile"),
    "cannot go with --interactive, which is one conversation", lambda o: not o.interactive,
)  # fmt: skip
SAMPLED = Need(
    ("children", "accept", "num_samples", "top_k", "top_p", "min_p", "top_n_sigma", "typical_p",
     "xtc_probability"),
    "has no effect at temperature 0; set --temperature", lambda o: o.temperature > 0,
)  # fmt: skip
# of several needs of an option the first that it misses is reported
NEEDS = (
    Need(("device",), "must be cpu or cuda; it is {0.device}",
         lambda o: re.fullmatch(r"(cpu|cuda)(:\d+)?", o.device)),
    Need(("group_size",), f"must be one of {(0, *GROUP_SIZES)}; it is {{0.group_size}}",
         lambda o: o.group_size in GROUP_SIZES),
    Need(("group_size",), "belongs to int4; add --quant int4",
         lambda o: "int4" in (o.quant, o.quant_draft)),
    Need(("random",), "takes no --accept residual; drop one of them",
         lambda o: o.accept == "exact"),
    Need(("plain",), "is the opposite of --compile; drop one of them", lambda o: not o.compile),
    Need(("draft",), "model needs --draft_checkpoint; name its directory",
         lambda o: o.draft != "model" or o.draft_checkpoint),
    Need(("head",), "does nothing with --draft {0.draft}; drop it", lambda o: spec_of(o).head),
    Need(("draft_checkpoint",), "belongs to --draft model; add that", lambda o: o.draft == "model"),
    Need(("datastore",), "belongs to --draft rest; add that", lambda o: o.draft == "rest"),
    Need(("tree", "tree_file", "tree_size"), NO_TREES, lambda o: spec_of(o).trees != ()),
    Need(("quant_draft", "children", "tree_topk"), NO_TREES, lambda o: spec_of(o).scores_children),
    Need(("tree_depth",), "belongs to dynamic trees and chains, not to a static one; drop it",
         lambda o: spec_of(o).scores_children and o.tree_shape != "static"),
    GROWN,
    Need(("tree", "tree_file"), "cannot be {0.tree_shape} with --draft {0.draft}; use {1}",
         lambda o: o.tree_shape in spec_of(o).trees),
    Need(("tree",), f"auto {ABSENT}", lambda o: o.tree != "auto" or has_drafts()),
    Need(("tree_file",), "{0.tree_file} is a static tree, not {0.tree}",
         lambda o: o.tree in ("", "static")),
    Need(("children",), "sampled would make a dynamic tree lossy; use --tree static",
         lambda o: o.children != "sampled" or not GROWN.met(o)),
    Need(("accept",), "belongs to heads, draft models and --draft ngram; drop it",
         lambda o: spec_of(o).residual),
    Need(("prompt",), "is empty; give it some text", lambda o: o.prompt.strip()),
    Need(("grammar",), ABSENT, lambda o: has_drafts()),
    Need(("chat",), "renders text; it cannot go with prompt_ids",
         lambda o: o.prompt_ids is None or o.chat == "none"),
    Need(("system",), "belongs to a chat template; drop --chat none or prompt_ids",
         lambda o: o.chat != "none" and o.prompt_ids is None),
    NOT_CHAT,
    SAMPLED,
    # the residual rule's tokens follow the tree, and --tree auto goes by a clock
    Need(("accept",), "needs a tree of one size; --tree auto changes it: use --tree dynamic",
         lambda o: o.tree != "auto"),
    Need(("accept",), "residual needs a draft that does not read the target's noise; "
         "drop --children noise", lambda o: o.children != "noise"),
    Need(("accept",), "residual samples the children of static trees; drop --children topk",
         lambda o: o.children != "topk" or GROWN.met(o)),
    Need(("xtc_threshold",), "belongs to XTC; set xtc_probability",
         lambda o: o.xtc_probability > 0),
    Need(("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
         "belongs to DRY; set dry_multiplier", lambda o: o.dry_multiplier > 0),
    Need(("repeat_last_n",),
         "belongs to penalties; set repetition_penalty, presence_penalty or frequency_penalty",
         lambda o: o.repetition_penalty != 1 or o.presence_penalty or o.frequency_penalty),
)  # fmt: skip


def check_needs(options: Any) -> None:
    """Check that every given option has what it needs. Raises: ValueError for one that has not."""
    for f in fields(options):
        if getattr(options, f.name) != f.default:
            for need in needs_of(f.name):
                trees = " or ".join(spec_of(options).trees)
                fault = f"{flag_of(f)} {need.text.format(options, trees)}"
                require(bool(need.met(options)), fault)


def needs_of(name: str) -> list[Need]:
    """Return the needs of an option."""
    return [need for need in NEEDS if name in need.names]
