"""A draft model: any smaller model of the same vocabulary proposes the tree.

How it works:
1. The draft model reads the same tokens at the same positions as the target, in a cache of its own.
2. A draft begins with one pass over the last two decided tokens, the root and the one before it, and grows from the
   root's scores (`TreeDrafter`), level by level above it.
3. What it ran and the target accepted is kept: the rows of the accepted path move next to the prefix. Of that path
   only the last token can be without a row (nothing was drafted below it), hence the pass over two tokens.
4. Past the draft model's own context nothing is drafted, and the preset without a tree goes on.

Under `--accept residual` a chain of it is speculative sampling as published: draw from q, accept with min(1, p/q).
Sources: Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318).
Trade-off: the cache has the target's capacity, rows past the draft model's context included, so that every slot of
a step exists; they are written and never used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from checkpoint import Quantization, saved_quantization
from draft_tree import DraftTree, DynamicTree, Level, StaticTree, Text, replace_fields
from drafters import LARGEST, Confirmed, Root, RootOnly, TreeDrafter
from hf.config import read_config, read_raw
from hf.tokenizer import Tokenizer, has_tokenizer
from hf.weights import load_model
from kv_cache import KVCache, Window, causal_window
from model import Transformer
from options import GenerateConfig
from sampling import Sampling


@torch.compiler.nested_compile_region  # the levels of a chain are one graph, compiled once
def _pass(
    model: Transformer, tokens: Tensor, positions: Tensor, cache: KVCache, window: Window
) -> Tensor:
    return model(tokens, positions, cache, window)  # [B, R, F]


class ModelState(NamedTuple):
    """What the draft model has read. Rows below `length` - 1 are those of the text; the one at it may be missing."""

    cache: KVCache
    length: Tensor  # [B] int64, position of the root


class ModelDrafter(TreeDrafter):
    """Drafts chains, static or dynamic trees with a `Transformer`."""

    keeps_rows = True

    def __init__(
        self,
        model: Transformer,
        target: Transformer,
        tree: DynamicTree | StaticTree,
        rule: Sampling,
        **options: Any,
    ):
        """model: of the target's own vocabulary; options: children and sharpness, as for `TreeDrafter`"""
        assert model.config.vocab_size == target.config.vocab_size, (model.config, target.config)
        super().__init__(target, tree, rule, **options)
        self.model, self.layers = model, model.layers
        self.shorter = model.config.max_context < target.config.max_context
        self.smaller = (RootOnly(),) if self.shorter else ()

    def fuse(self, whether: bool) -> None:
        """Run the model's passes in one C++ call each, where that is served."""
        self.model.fuse(whether)

    def prefer(self, text: Text) -> Tensor | None:
        """Any tree, as long as the root is inside the draft model's context."""
        if not self.shorter:
            return None
        return torch.where(text.pos < self.model.config.max_context, LARGEST, 0)

    def init(self, batch: int, slots: int) -> ModelState:
        """An empty state; the cache has room for the root and a draft behind `slots`."""
        weight = self.model.embedding.weight
        slots += 1 + self.scratch
        cache = KVCache.empty(self.model.config, batch, slots, weight.dtype, str(weight.device))
        return ModelState(cache, torch.zeros(batch, dtype=torch.long, device=weight.device))

    def extend(self, state: ModelState, rows: Confirmed) -> ModelState:
        """Read the rows of a prompt; keep those of an accepted path. Writes: cache slots from length on."""
        if rows.slots is None:
            window = causal_window(state.length, rows.features.shape[1])
            self.model(rows.tokens[:, :-1], window.slots, state.cache, window)
        elif self.width > 1:  # a chain's rows lie where they belong
            state.cache.compact(state.length, rows.slots)
        return replace_fields(state, length=state.length + rows.count)

    def rewind(self, state: ModelState, length: Tensor) -> ModelState:
        """Forget all but the first `length` rows."""
        return replace_fields(state, length=length)

    def propose(self, state: ModelState, root: Root) -> DraftTree:
        """Propose a tree, no deeper than the draft model's context. Writes: slots from length - 1 on."""
        tree = super().propose(state, root)
        if not self.shorter:
            return tree
        inside = (
            root.text.pos[:, None] + tree.depths <= self.model.config.max_context
        )  # a node's parent was read
        return replace_fields(tree, valid=tree.valid & (inside | (tree.depths == 0)))

    def root_output(self, state: ModelState, root: Root) -> tuple[Tensor, Tensor]:
        window = causal_window(state.length, 2, back=1)  # only an idle row has length 0
        tokens = root.text.tokens.gather(1, window.slots)  # [B, 2]
        out = self.model(tokens, window.slots, state.cache, window)  # [B, 2, F]
        return out[:, 1:], state.length + 1

    def forward_nodes(
        self, state: ModelState, level: Level, out: Tensor, positions: Tensor, window: Window
    ) -> Tensor:
        return _pass(self.model, level.tokens, positions, state.cache, window)

    def logits(self, out: Tensor) -> Tensor:
        return self.model.logits(out)


def check_same_tokens(target: Path, draft: Path, size: int) -> None:
    """Compare the vocabularies of two models, `size` being the target's, which a stand-in may have changed.

    Raises: ValueError where they differ, in size or, if both have one, by tokenizer.
    """
    remedy = "use a draft model of the target's own vocabulary"
    theirs = read_config(draft).vocab_size
    if size != theirs:
        raise ValueError(f"vocab_size is {size} in {target} and {theirs} in {draft}; {remedy}")
    if not has_tokenizer(target) or not has_tokenizer(draft):
        return
    ours, theirs = (Tokenizer.load(path).token_bytes() for path in (target, draft))
    if ours != theirs:
        at = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs))
        )
        a, b = (repr(tokens[at]) if at < len(tokens) else "nothing" for tokens in (ours, theirs))
        raise ValueError(
            f"token {at} is {a} in the tokenizer of {target} and {b} in that of {draft}; {remedy}"
        )


def load_drafter(target: Transformer, config: GenerateConfig) -> ModelDrafter:
    """`--draft model`. Raises: ValueError for a draft model or a tree that does not fit."""
    path, weight = Path(config.draft_checkpoint), target.embedding.weight
    check_same_tokens(Path(config.checkpoint), path, target.config.vocab_size)
    saved = saved_quantization(read_raw(path))
    quant = None if saved else Quantization.of(config.quant_draft, config.group_size)
    model = load_model(path, weight.dtype, str(weight.device), quant)
    options = {"children": config.child_rule, "sharpness": config.sharpness or 1.0}
    return ModelDrafter(model, target, config.draft_tree, config.sampling, **options)
