"""Block drafters: one pass over the root and mask tokens predicts all levels of a tree.

1. `extend` turns the hidden states of several of the target's layers into keys and values of every
   layer of the drafter. It runs no attention and no feed-forward.
2. A draft is one pass over a block, the root and mask tokens, behind those keys and values. Each
   position predicts a token of its own, from the prefix and the block's positions, not from the
   tokens of a path. In a causal block a position attends to those before it only.
3. The tree grows from these scores without further passes (`LevelDrafter`). DSpark adds a bias of
   low rank for the token before, and a confidence that a level's token is accepted at all.

Sources: DFlash (arXiv 2602.06036), JetSpec (arXiv 2606.18394), DSpark (arXiv 2607.05147).
Trade-off: a block whose positions see each other always has the size that it was trained with;
a causal one has as many positions as the tree has levels. Not here: the files (hf/block_heads.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from base.io import is_gguf
from draft_tree import DynamicTree, StaticTree
from drafters import DrafterUpdate, DraftInputs, DraftMethod
from eagle_draft import is_same_embedding
from extras.level_draft import LevelDrafter, head_options, tree_of
from hf.block_heads import BlockConfig, block_names, read_block_head
from hf.checkpoint import Quantization, WeightFiles, saved_quantization
from hf.heads import draft_lm_head, head_files
from hf.weights import Storage, load_weights
from kv_cache import KVCache, Window, causal_window
from linear import Linear
from model import RotaryEmbeddings, Transformer, windows_of
from ops.backends import TORCH, use_backend
from ops.tree import Children, Frontier, Scores
from options import GenerateConfig
from runtime import replace_fields
from steps import RMSNorm, Rotate, Rows, run_steps


class BlockHead(Transformer):
    """The layers over a block, and the inputs of their keys and values.

    The embedding and the LM head are the target's, unless the files have others.
    """

    def __init__(self, config: BlockConfig):
        model = config.model
        super().__init__(model)
        self.config = config
        self.aux_layers = config.aux_layers
        self.fc = Linear(len(config.aux_layers) * model.dim, model.dim, bias=False)
        self.hidden_norm = RMSNorm(model.dim, model.norm_eps)
        if not config.own_embedding:
            self.embedding = None
        if not config.own_lm_head:
            self.lm_head = None
        if config.markov_rank:
            rows = torch.zeros(model.vocab_size, config.markov_rank)
            self.markov_w1 = nn.Embedding.from_pretrained(rows, freeze=False)
            self.markov_w2 = Linear(config.markov_rank, model.vocab_size, bias=False)
        if config.confidence:
            self.confidence_weight = nn.Parameter(torch.zeros(1, config.confidence))
            bias = nn.Parameter(torch.zeros(1)) if config.confidence_bias else None
            self.confidence_bias = bias

    def read(self, taps: Tensor, cache: KVCache, window: Window) -> None:
        """Turn the target's hidden states into keys and values.

        taps: [B, R, aux F], of the tokens at the positions `window.slots`
        Writes: the cache at `window.slots`.
        """
        h = self.hidden_norm(self.fc(taps))  # [B, R, F]
        windows = windows_of((), window, TORCH)  # no attention follows
        rows = Rows(h=h, ropes=self.ropes(window.slots), windows=windows)
        for layer, *kv in zip(self.layers, cache.k, cache.v):
            _, *steps = layer.steps  # h is normed already
            last = next(i for i, step in enumerate(steps) if isinstance(step, Rotate))
            begun = replace_fields(rows, kv=kv)
            run_steps(steps[: last + 1], layer, begun)  # the queries are not used

    def token_rows(self, tokens: Tensor) -> Tensor:
        """Return the rows of the bias for the tokens before: [B, R] int64 -> [B, R, rank or 0]."""
        if not self.config.markov_rank:
            return self.norm.weight.new_zeros(*tokens.shape, 0)
        return self.markov_w1(tokens)

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Compute the logarithm of the probability that a level's token is accepted.

        hidden: [B, 1, F], the input of its LM head; before: [B, R, rank], from `token_rows`
        Returns: [B, R] fp32.
        """
        inputs = torch.cat((hidden.expand(-1, before.shape[1], -1), before), -1)
        inputs = inputs[..., : self.config.confidence].float()
        odds = F.linear(inputs, self.confidence_weight.float()).squeeze(-1)
        if self.confidence_bias is not None:
            odds = odds + self.confidence_bias.float()
        return F.logsigmoid(odds)


class BlockState(NamedTuple):
    """The drafter's cache. Slots below `length` come from the target's hidden states."""

    cache: KVCache
    length: Tensor  # [B] int64, confirmed tokens


class BlockDrafter(LevelDrafter):
    """Drafts static or dynamic trees with a `BlockHead`."""

    def __init__(
        self,
        head: BlockHead,
        target: Transformer,
        tree: DynamicTree | StaticTree,
        lm_head: nn.Module | None = None,
        **options: Any,
    ):
        """Attach a head to a target.

        lm_head: default: the head's own, else the target's
        options: children and sharpness, as for `TreeDrafter`
        """
        super().__init__(target, tree, **{"sharpness": head.config.sharpness} | options)
        assert self.tree.depth <= head.config.levels, (self.tree.depth, head.config)
        self.head = head
        self.layers = head.layers
        self.aux_layers = head.aux_layers
        self.lm_head = lm_head or head.lm_head or target.lm_head

    def fuse(self, enable: bool) -> None:
        """Run the pass over a block in one C++ call, where that is supported."""
        self.head.fuse(enable)

    def init(self, batch: int, slots: int) -> BlockState:
        """Make an empty state; the cache has room for a block behind `slots`."""
        weight = self.head.norm.weight
        config = self.head.config
        slots += config.block_size
        cache = KVCache.empty(config.model, batch, slots, weight.dtype, str(weight.device))
        return BlockState(cache, torch.zeros(batch, dtype=torch.long, device=weight.device))

    def extend(self, state: BlockState, update: DrafterUpdate) -> BlockState:
        """Read the confirmed tokens' hidden states. Writes: slots from length on."""
        window = causal_window(state.length, update.features.shape[1], backend=self.backend)
        taps = update.features[..., self.head.config.model.dim :]
        self.head.read(taps, state.cache, window)
        return replace_fields(state, length=state.length + update.count)

    def rewind(self, state: BlockState, length: Tensor) -> BlockState:
        """Forget all but the first `length` tokens."""
        return replace_fields(state, length=length)

    def run_block(self, state: BlockState, inputs: DraftInputs) -> Tensor:
        """Run the block: [B, D, F], the input of the LM head for each level.

        Writes: slots length .. length + block_size - 1.
        """
        block = self.head.config
        first = 0 if block.predicts_next else 1
        size = self.tree.depth + first if block.causal else block.block_size
        window = causal_window(state.length, size, backend=self.backend)
        if not block.causal:
            window = Window(window.slots, window.start, torch.ones_like(window.mask))
        tokens = torch.full_like(window.slots, block.mask_token)  # [B, T]
        tokens = torch.cat((inputs.text.root[:, None], tokens[:, 1:]), 1)
        hidden = self.head(tokens, window.slots, state.cache, window)  # [B, T, F]
        return hidden[:, first : first + self.tree.depth]

    def level_scores(self, state: BlockState, inputs: DraftInputs) -> Tensor:
        return self.lm_head(self.run_block(state, inputs))


class SparkLevels(NamedTuple):
    """The levels of a block before their bias, and the tokens that it depends on."""

    hidden: Tensor  # [B, D, F]
    scores: Tensor  # [B, D, Vd] fp32
    before: Tensor  # [B, R, rank], of the frontier's tokens


class SparkDrafter(BlockDrafter):
    """Adds DSpark's bias to the scores, and its confidence to the values of paths.

    A child's value is the logarithm of confidence times q: confidence is trained to be the share of
    drafts that are accepted, the sum of min(p, q) over the vocabulary.
    """

    def __init__(self, *inputs: Any, **options: Any):
        super().__init__(*inputs, **options)
        self.bias_of = self.head.markov_w2 if self.head.config.markov_rank else None

    def root_output(self, state: BlockState, inputs: DraftInputs) -> tuple[SparkLevels, Tensor]:
        hidden = self.run_block(state, inputs)
        before = self.head.token_rows(inputs.text.root[:, None])
        return SparkLevels(hidden, self.lm_head(hidden), before), inputs.text.pos

    def forward_nodes(
        self,
        state: BlockState,
        frontier: Frontier,
        out: SparkLevels,
        positions: Tensor,
        window: Window,
    ) -> SparkLevels:
        return replace_fields(out, before=self.head.token_rows(frontier.tokens))

    def logits_of(self, out: SparkLevels, level: int) -> Tensor:
        """Score the children of each node: [B, R, Vd], without a bias [B, 1, Vd]."""
        scores = out.scores[:, level, None]
        return scores if self.bias_of is None else scores + self.bias_of(out.before)

    def score_children(
        self, out: SparkLevels, level: int, inputs: DraftInputs
    ) -> Scores | Children:
        scores = super().score_children(out, level, inputs)
        if not self.head.config.confidence:
            return scores
        best = scores.best(self.tree.plan[level].k, self.backend.topk)
        sure = self.head.confidence(out.hidden[:, level, None], out.before)  # [B, R]
        return Children(best.tokens, best.scores + sure[:, :, None])


def load_head(path: Path, target: Transformer, quant: Quantization | None = None) -> BlockHead:
    """Load a block drafter for `target`, in the target's dtype and on its device.

    quant: quantize while loading, unless the files are quantized already
    Raises: ValueError for a head of another target, or broken files.
    """
    weight = target.norm.weight
    form = quant.format if quant else "none"
    files = head_files(path, form) if is_gguf(path) else WeightFiles(path)
    config = read_block_head(files, target.config)
    with torch.device("meta"):
        head = BlockHead(config)
    storage = Storage(weight.dtype, str(weight.device), saved_quantization(files.config) or quant)
    load_weights(
        head, files, block_names(config), storage, lambda name: name.endswith("rotary_emb.inv_freq")
    )
    head.ropes = RotaryEmbeddings(config.model.ropes, weight.device)
    if head.embedding is None or is_same_embedding(head.embedding, target):
        head.embedding = target.embedding  # one copy is enough
    use_backend(head, target.backend)
    return head.eval()


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Load `--draft block`. Raises: ValueError for a head or a tree that does not fit."""
    path = Path(config.head)
    quant, options = head_options(target, config)
    head = load_head(path, target, quant)
    tree = tree_of(config, head.config.levels, path)
    model = head if head.lm_head else target
    lm_head = draft_lm_head(model, quant)
    kind = SparkDrafter if head.config.markov_rank or head.config.confidence else BlockDrafter
    return kind(head, target, tree, lm_head, **options).method()
