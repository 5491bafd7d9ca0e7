"""A draft model: any smaller model of the same tokenizer proposes the tree.

1. The draft model reads the same tokens at the same positions as the target, in its own cache.
2. A draft begins with one pass over the last two decided tokens, the root and the one before it. It
   grows level by level from the root's scores (`TreeDrafter`).
3. Cache entries of drafted nodes that the target accepts are kept: they move next to the prefix. Of
   that path only the last token can lack an entry, because nothing was drafted below it. The pass
   over two tokens fills that gap.
4. Past the draft model's own context nothing is drafted, and the preset without a tree goes on.

With `accept=residual`, a chain is speculative sampling as published: draw from q, accept with
min(1, p/q). Sources: Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318).
Trade-off: the cache has the target's capacity, so that every slot of a step exists. Slots past the
draft model's context are written and never used. LM heads may be padded to different sizes, as
Qwen2.5's are: tokens that both have are drafted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_tree import DraftTree, DynamicTree, Frontier, StaticTree
from drafters import DrafterUpdate, DraftInputs, DraftState, DraftVocab, RootOnly, TreeDrafter
from drafts.by_value import ByValue
from files.checkpoint import WeightFiles, saved_quantization
from files.config import read_config, read_raw
from files.head_kinds import head_kind
from files.io import is_gguf
from files.tokenizer import Tokenizer, has_tokenizer
from files.weights import load_model
from kv_cache import KVCache, Window, causal_window
from model import Transformer
from options import log_note, require
from quantize import BLOCKS, Quantization
from reference import Backend, choose, use_backend
from run.observer import DraftMethod, method_of
from run.options import GenerateConfig
from run.resolved import tree_options
from runtime import replace_fields


@torch.compiler.nested_compile_region  # the levels of a chain are one graph, compiled once
def _pass(
    model: Transformer, tokens: Tensor, positions: Tensor, cache: KVCache, window: Window
) -> Tensor:
    return model(tokens, positions, cache, window)  # [B, R, F]


class ModelDrafter(TreeDrafter):
    """Drafts chains, static or dynamic trees with a `Transformer`.

    Its state has no output, and the slot `length` - 1 of the cache may be unwritten.
    """

    keeps_nodes = True

    def __init__(
        self,
        model: Transformer,
        target: Transformer,
        tree: DynamicTree | StaticTree,
        **options: Any,
    ):
        """model: of the target's own tokens, its LM head may be padded to another size

        options: children and sharpness, as for `TreeDrafter`
        """
        size = target.config.vocab_size
        self.known = model.config.vocab_size  # tokens
        if self.known < size:
            ids = torch.arange(self.known, device=target.norm.weight.device)
            options["vocab"] = DraftVocab(size, ids)
        super().__init__(target, tree, **options)
        self.model = model
        self.layers = model.layers
        if model.config.max_context < target.config.max_context:
            self.reach = model.config.max_context

    def method(self) -> DraftMethod:
        """Return the way to draft: past the draft model's own context, no tree is drafted."""
        if self.reach is None:
            return DraftMethod((self,))
        policy = ByValue(reach=self.reach, chooses=False)
        return DraftMethod((RootOnly(), self), tree_options(self), policy=policy)

    def use(self, backend: Backend) -> None:
        """Run the functions of a backend; the model's dtype may be another than the target's."""
        super().use(backend)
        weight = self.model.norm.weight
        use_backend(self.model, choose(weight.device, weight.dtype))

    def fuse(self, enable: bool) -> None:
        """Run each pass of the model in one C++ call, where that is supported."""
        self.model.fuse(enable)

    def init(self, batch: int, slots: int) -> DraftState:
        """Return an empty state; the cache has room for the root and a draft behind `slots`."""
        slots += 1 + self.scratch
        return DraftState.empty(batch, self.model.norm.weight, self.model.config, slots)

    def extend(self, state: DraftState, update: DrafterUpdate) -> DraftState:
        """Read the tokens of a prompt, or keep those of an accepted path.

        Writes: cache slots from length on.
        """
        if update.tree is None:
            window = causal_window(state.length, update.features.shape[1], backend=self.backend)
            self.model(self._read(update.tokens[:, :-1]), window.slots, state.cache, window)
        elif self.width > 1:  # a chain's nodes are in their final slots already
            ran = update.tree.ran_index.gather(1, update.path)  # of the accepted nodes, [B, R]
            state.cache.compact(state.length, ran, self.backend)
        return replace_fields(state, length=state.length + update.count)

    def propose(self, state: DraftState, inputs: DraftInputs) -> DraftTree:
        """Propose a tree, no deeper than the draft model's context.

        Writes: cache slots from length - 1 on.
        """
        tree = super().propose(state, inputs)
        if self.reach is None:
            return tree
        # a node is valid if the model could read its parent
        inside = inputs.text.pos[:, None] + tree.depths <= self.reach  # [B, N]
        return replace_fields(tree, valid=tree.valid & (inside | (tree.depths == 0)))

    def root_output(self, state: DraftState, inputs: DraftInputs) -> tuple[Tensor, Tensor]:
        # only an idle sequence has length 0
        window = causal_window(state.length, 2, back=1, backend=self.backend)
        tokens = self._read(inputs.text.tokens.gather(1, window.slots))  # [B, 2]
        out = self.model(tokens, window.slots, state.cache, window)  # [B, 2, F]
        first = state.length + 1 if self.scratch else state.length  # unread without scratch slots
        return out[:, 1:], first

    def forward_nodes(
        self, state: DraftState, frontier: Frontier, out: Tensor, positions: Tensor, window: Window
    ) -> Tensor:
        return _pass(self.model, self._read(frontier.tokens), positions, state.cache, window)

    def logits(self, out: Tensor, level: int) -> Tensor:
        z = self.model.logits(out)
        if self.known > self.vocab.size:
            z = z[..., : self.vocab.size].contiguous()
        return z

    def _read(self, tokens: Tensor) -> Tensor:
        """Return tokens that the model has: another one for padding that only the target has."""
        if self.known >= self.vocab.size:
            return tokens
        return tokens.clamp(max=self.known - 1)


def check_is_model(path: Path) -> None:
    """Check that a directory holds a model. Raises: ValueError for a head."""
    if is_gguf(path):
        return
    kind = head_kind(path)
    is_head = kind != "eagle" or "fc.weight" in WeightFiles(path).readers
    fault = f"{path} holds a head of the kind {kind}, and no draft model; use --head {path}"
    require(not is_head, fault)


def check_same_tokens(target: Path, draft: Path, size: int) -> None:
    """Compare the vocabularies of two models.

    size: vocabulary of the target, which --random may have changed
    Raises: ValueError where their tokenizers differ or, if one has none, their sizes.
    """
    remedy = "use a draft model of the target's own vocabulary"
    draft_size = read_config(draft).vocab_size
    if not has_tokenizer(target) or not has_tokenizer(draft):
        sizes = f"vocab_size is {size} in {target} and {draft_size} in {draft}"
        require(size == draft_size, f"{sizes}, and one has no tokenizer; {remedy}")
        return
    target_tokens = Tokenizer.load(target).token_bytes()
    draft_tokens = Tokenizer.load(draft).token_bytes()
    if target_tokens == draft_tokens:
        return
    first = min(len(target_tokens), len(draft_tokens))
    for number, (ours, theirs) in enumerate(zip(target_tokens, draft_tokens)):
        if ours != theirs:
            first = number
            break
    raise ValueError(
        f"token {first} is {_described(target_tokens, first)} in the tokenizer of {target} "
        f"and {_described(draft_tokens, first)} in that of {draft}; {remedy}"
    )


def _described(tokens: list[bytes], number: int) -> str:
    if number < len(tokens):
        return repr(tokens[number])
    return "nothing"


def load_drafter(target: Transformer, config: GenerateConfig) -> ModelDrafter:
    """Load `--draft model`.

    Raises: ValueError for a draft model or a tree that does not fit.
    """
    path = Path(config.draft_checkpoint)
    check_is_model(path)
    weight = target.norm.weight
    check_same_tokens(Path(config.checkpoint), path, target.config.vocab_size)
    dtype = weight.dtype
    quant = None  # a quantized checkpoint keeps its own format
    if config.quant_draft == BLOCKS:
        if weight.device.type == "cpu":
            dtype = None  # of the file: products of blocks give bfloat16
        quant = Quantization(BLOCKS, saved=True, every_type=config.keep_blocks)
    elif not saved_quantization(read_raw(path), path):
        quant = Quantization.of(config.quant_draft, config.group_size)
        if quant and config.quant_draft != config.quant:
            rounded = f"the draft model {path} is rounded to {quant.format}"
            log_note(f"{rounded}; --quant_draft none leaves it as it is")
    model = load_model(path, dtype, str(weight.device), quant)
    require(
        model.config.state_shapes is None,
        f"the draft model {path} has recurrent layers, and levels of a tree that are drafted one "
        "after the other have no states; use another draft model, or --draft ngram",
    )
    return ModelDrafter(
        model,
        target,
        config.draft_tree,
        children=config.child_rule,
    )


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Load `--draft model`, as `load_drafter`. Raises: ValueError."""
    return method_of(load_drafter(target, config))
