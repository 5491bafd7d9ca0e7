"""A draft model: any smaller model of the same vocabulary proposes the tree.

How it works:
1. The draft model reads the same tokens at the same positions as the target, in a cache of its own.
2. A draft begins with one pass over the last two decided tokens, the root and the one before it, and grows from the
   root's scores (grow.py), level by level above it.
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
from typing import NamedTuple

import torch
from torch import Tensor

import layers_cpu
from config import GenerateConfig
from draft_tree import DraftTree, StaticTree
from drafters import CATCH_UP, DRAFTERS, LARGEST, Drafter, Root, RootOnly, Rows, Text
from grow import DynamicTree, Grower, children_from, tree_from
from model import KVCache, ModelConfig, Transformer, Window, causal_window
from quantize import draft_quantization
from sampling import Sampling
from tokenizer import Tokenizer, has_tokenizer
from weights import load_model


@torch.compiler.nested_compile_region  # the levels of a chain are one graph, compiled once
def _pass(model: Transformer, tokens: Tensor, positions: Tensor, cache: KVCache, window: Window) -> Tensor:
    return model(tokens, positions, cache, window)[0]  # [B, R, F]


class ModelState(NamedTuple):
    """What the draft model has read. Rows below `length` - 1 are those of the text; the one at it may be missing."""

    cache: KVCache
    length: Tensor  # [B] int64, position of the root


class ModelDrafter(Grower):
    """Drafts chains, static or dynamic trees with a `Transformer`."""

    keeps_rows = True

    def __init__(
        self,
        model: Transformer,
        target: Transformer,
        tree: DynamicTree | StaticTree,
        rule: Sampling,
        children: str = "noise",
        sharpness: float = 1.0,
    ):
        """model: of the target's own vocabulary; the options are those of `Grower`"""
        assert model.config.vocab_size == target.config.vocab_size, (model.config, target.config)
        super().__init__(target, tree, rule, children, sharpness)
        self.model = model
        layers_cpu.keep(model.layers)
        self.shorter = model.config.max_context < target.config.max_context

    @property
    def presets(self) -> tuple[Drafter, ...]:
        return (RootOnly(), self) if self.shorter and not self.sized else super().presets

    def prefer(self, text: Text) -> Tensor:
        """Any tree, as long as the root is inside the draft model's context."""
        if not self.shorter:
            return super().prefer(text)
        return torch.where(text.pos < self.model.config.max_context, LARGEST, 0)

    def init(self, batch: int, slots: int) -> ModelState:
        """An empty state; the cache has room for the root and a draft behind `slots`."""
        weight = self.model.embedding.weight
        slots += 1 + self.scratch
        cache = KVCache.empty(self.model.config, batch, slots, weight.dtype, str(weight.device))
        return ModelState(cache, torch.zeros(batch, dtype=torch.long, device=weight.device))

    def extend(self, state: ModelState, rows: Rows) -> ModelState:
        """Read the rows of a prompt; keep those of an accepted path. Writes: cache slots from length on."""
        if rows.slots is None:
            window = causal_window(state.length, rows.features.shape[1])
            self.model(rows.tokens[:, :-1], window.slots, state.cache, window)
        elif self.width > 1:  # a chain's rows lie where they belong
            state.cache.compact(state.length, rows.slots)
        return state._replace(length=state.length + rows.count)

    def catch_up(self, state: ModelState, text: Text) -> ModelState:
        """Read tokens that were decided without a tree. Writes: cache slots length .. length + CATCH_UP - 1."""
        span = state.length[:, None] + torch.arange(CATCH_UP + 1, device=state.length.device)  # [B, CATCH_UP + 1]
        tokens = text.tokens.gather(1, span.clamp(max=text.tokens.shape[1] - 1))
        none = tokens[:, 1:, None]  # [B, CATCH_UP, 1]: a model needs no features
        return self.extend(state, Rows(tokens, none, (text.pos - state.length).clamp(max=CATCH_UP)))

    def rewind(self, state: ModelState, length: Tensor) -> ModelState:
        """Forget all but the first `length` rows."""
        return state._replace(length=length)

    def draft(self, state: ModelState, root: Root) -> DraftTree:
        """Propose a tree, no deeper than the draft model's context. Writes: slots from length - 1 on."""
        tree = super().draft(state, root)
        inside = root.text.pos[:, None] + tree.depths <= self.model.config.max_context  # a node's parent was read
        return tree._replace(valid=tree.valid & (inside | (tree.depths == 0)))

    def begin(self, state: ModelState, root: Root) -> tuple[Tensor, Tensor]:
        window = causal_window((state.length - 1).clamp(min=0), 2)  # only an idle row has length 0
        tokens = root.text.tokens.gather(1, window.slots)  # [B, 2]
        out, _ = self.model(tokens, window.slots, state.cache, window)  # [B, 2, F]
        return out[:, 1:], window.slots[:, 1] + 1

    def step(self, state: ModelState, tokens: Tensor, out: Tensor, positions: Tensor, window: Window) -> Tensor:
        return _pass(self.model, tokens, positions, state.cache, window)

    def logits(self, out: Tensor) -> Tensor:
        return self.model.logits(out)


def check_same_tokens(target: Path, draft: Path) -> None:
    """Raises: ValueError where the vocabularies of two models differ, in size or, if both have one, by tokenizer."""
    remedy = "use a draft model of the target's own vocabulary"
    sizes = [ModelConfig.from_dir(path).vocab_size for path in (target, draft)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"vocab_size is {sizes[0]} in {target} and {sizes[1]} in {draft}; {remedy}")
    if not has_tokenizer(target) or not has_tokenizer(draft):
        return
    ours, theirs = (Tokenizer.load(path).token_bytes() for path in (target, draft))
    if ours != theirs:
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        a, b = (repr(tokens[at]) if at < len(tokens) else "nothing" for tokens in (ours, theirs))
        raise ValueError(f"token {at} is {a} in the tokenizer of {target} and {b} in that of {draft}; {remedy}")


def make_drafter(target: Transformer, config: GenerateConfig) -> ModelDrafter:
    """`--draft model`. Raises: ValueError for a draft model or a tree that does not fit."""
    path, weight = Path(config.draft_checkpoint), target.embedding.weight
    check_same_tokens(Path(config.checkpoint), path)
    saved = ModelConfig.from_dir(path).quant
    model = load_model(path, weight.dtype, str(weight.device), None if saved else draft_quantization(config))
    tree = tree_from(config)
    children = children_from(config, tree)
    drafter = ModelDrafter(model, target, tree, config.sampling, children, config.sharpness or 1.0)
    return drafter.sized_by_host() if config.tree_shape == "auto" else drafter


DRAFTERS["model"] = make_drafter
