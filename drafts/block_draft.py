"""Block drafters: one pass over the root and mask tokens predicts all levels of a tree.

1. `extend` turns the hidden states of several of the target's layers into keys and values of every
   layer of the drafter. It runs no attention and no feed-forward.
2. A draft is one pass over a block, the root and mask tokens, behind those keys and values. Each
   position predicts a token of its own, from the prefix and the block's positions, not from the
   tokens of a path. In a causal block a position attends to those before it only.
3. The tree grows from these scores without further passes (`LevelDrafter`). DSpark adds a bias of
   low rank for the token before, and a confidence that a level's token is accepted at all. DFlash2
   and DSpine score pairs of that token and the best tokens of a level, LiLiCorr those of the best
   tokens of all levels at once.

Sources: DFlash (arXiv 2602.06036), JetSpec (arXiv 2606.18394), DSpark (arXiv 2607.05147), DFlash2
(z-lab/dflash, dflash/model.py @10129599), DSpine (sgl-project/SpecForge @64ab5ca), LiLiCorr
(arXiv 2608.20530; drafts/correlator.py).
Trade-off: a block whose positions see each other always has the size that it was trained with;
a causal one has as many positions as the tree has levels. Not here: the files
(drafts/block_heads.py).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_tree import Children, DynamicTree, Frontier, Scores, StaticTree
from drafters import DrafterUpdate, DraftInputs, DraftState, DraftVocab
from drafts.block_heads import BlockConfig, read_block_head, read_vocab
from drafts.correlator import Correlator
from drafts.level_draft import LevelDrafter, last_of, tree_of
from eagle_draft import fill
from files.heads import HeadFiles, head_files, is_same_embedding, is_unused
from kv_cache import KVCache, Window, causal_window
from model import Transformer, layer_names, windows_of
from quantize import BLOCKS, Linear, Quantization
from reference import TORCH
from run.heads import draft_lm_head
from run.observer import DraftMethod, method_of
from run.options import GenerateConfig
from runtime import replace_fields
from steps import Project, RMSNorm, Rotate, Rows, run_steps

# the score of tokens that a selector leaves out: finite, for a guide may forbid all others
UNSELECTED = -1e30


def _token_rows(tokens: int, width: int) -> nn.Embedding:
    return nn.Embedding.from_pretrained(torch.zeros(tokens, width), freeze=False)


class MarkovHead(nn.Module):
    """DSpark's bias of low rank for the token before."""

    def __init__(self, config: BlockConfig, drafted: int):
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = _token_rows(config.model.vocab_size, rank)
        self.markov_w2 = Linear(rank, drafted, bias=False)
        if config.markov_gated:
            self.gate_proj = Linear(config.model.dim + rank, rank)


class CandidateSelector(nn.Module):
    """DFlash2's vectors of a token as the one before and behind, and what a level makes of them."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        rank = config.selector_rank
        self.predecessor_codebook = _token_rows(config.model.vocab_size, rank)
        self.successor_codebook = _token_rows(config.model.vocab_size, rank)
        self.hidden_projection = Linear(config.model.dim, rank, bias=False)


class BlockHead(Transformer):
    """The layers over a block, and the inputs of their keys and values.

    The embedding and the LM head are the target's, unless the files have others. Modules beside the
    layers have the official names.
    """

    def __init__(self, config: BlockConfig):
        model = config.model
        super().__init__(model)
        self.config = config
        self.vocab: DraftVocab | None = None  # the tokens that it drafts; None: all
        self.aux_layers = config.aux_layers
        self.fc = Linear(len(config.aux_layers) * model.dim, model.dim, bias=False)
        self.hidden_norm = RMSNorm(model.dim, model.norm_eps)
        if not config.own_embedding:
            self.embedding = None
        drafted = config.draft_vocab or model.vocab_size
        self.lm_head = None
        if config.own_lm_head:
            self.lm_head = Linear(model.dim, drafted, bias=False, fp32_out=True)
        if config.markov_rank:
            self.markov_head = MarkovHead(config, drafted)
        if config.selector_rank:
            self.candidate_selector = CandidateSelector(config)
        if config.transfer_rank:
            self.transfer_codes = _token_rows(model.vocab_size, config.transfer_rank)
        if config.correlator:
            self.lilicorr = Correlator(config.correlator, model, config.levels)
        if config.confidence:
            proj = nn.Linear(config.confidence, 1, config.confidence_bias)
            self.confidence_head = nn.ModuleDict({"proj": proj})

    def weight_names(self) -> dict[str, tuple[str, ...]]:
        """Return our parameter's name -> the official tensors."""
        model = self.config.model
        names = {name: (name,) for name, _ in self.named_parameters()}
        if self.config.own_embedding:
            names["embedding.weight"] = ("embed_tokens.weight",)
        for i in range(model.n_layers):
            layer = f"layers.{i}."
            names |= layer_names(layer, layer, model.layer(i), model.names)
        if self.config.transfer_rank:  # behind the last layer, too
            names |= layer_names("", layer, model.injected(), model.names)
        return names

    def read(self, taps: Tensor, cache: KVCache, window: Window) -> Tensor:
        """Turn the target's hidden states into keys and values.

        taps: [B, R, aux F], of the tokens at the positions `window.slots`
        Returns: the rows that they are made of, [B, R, F].
        Writes: the cache at `window.slots`.
        """
        h = self.hidden_norm(self.fc(taps))  # [B, R, F]
        windows = windows_of((), window, TORCH)  # no attention follows
        rows = Rows(h=h, ropes=self.ropes(window.slots), windows=windows)
        for layer, *kv in zip(self.layers, cache.k, cache.v):
            kinds = [type(step) for step in layer.steps]
            rotate = kinds.index(Rotate)
            first = max(i for i in range(rotate) if kinds[i] is Project)  # h is normed already
            begun = replace_fields(rows, kv=kv)
            run_steps(layer.steps[first : rotate + 1], layer, begun)  # the queries are not used
        return h

    def fuse(self, enable: bool) -> None:
        """Run the pass in one C++ call or in fewer launches; C++ knows other windows than these."""
        super().fuse(enable)
        if self.program is not None and self.program.in_cpp and self.config.model.windows:
            self.program = None

    def embed(self, tokens: Tensor, positions: Tensor, window: Window | None) -> Rows:
        """Return the first layer's inputs. window: of the layers that see all, over a block"""
        rows = super().embed(tokens, positions, None)
        if window is not None:
            windows = windows_of((), window, self.backend)
            windows |= {size: slide(window, size, self.config) for size in self.windows}
            rows = rows.put("windows", windows)
        if self.config.transfer_rank:
            rows = rows.put("embedded", self.token_rows(tokens[:, :1]))
        return rows

    def score(self, hidden: Tensor, lm_head: nn.Module) -> Tensor:
        """Score tokens: [..., F] -> [..., Vd] fp32."""
        z = lm_head(hidden)
        if self.config.score_factor != 1:
            z = z * self.config.score_factor
        cap = self.config.score_cap
        return cap * torch.tanh(z / cap) if cap else z

    def token_rows(self, tokens: Tensor) -> Tensor:
        """Return the rows of the tokens before for `score_pairs`: [B, R] int64 -> [B, R, rank]."""
        if self.config.selector_rank:
            return self.candidate_selector.predecessor_codebook(tokens)
        if self.config.markov_rank:
            return self.markov_head.markov_w1(tokens)
        if self.config.transfer_rank:
            return math.sqrt(self.config.transfer_rank) * self.transfer_codes(tokens)
        if self.config.correlator:  # which has scored them all
            return tokens
        return self.norm.weight.new_zeros(*tokens.shape, 0)

    def score_pairs(
        self, scores: Tensor, hidden: Tensor, before: Tensor, lm_head: nn.Module
    ) -> Tensor:
        """Score the tokens of a level behind each of the tokens before: [B, R or 1, Vd] fp32.

        scores: [B, 1, Vd] fp32; hidden: [B, 1, F], of the level; before: [B, R, rank]
        """
        if self.config.markov_gated:
            both = (hidden.expand(-1, before.shape[1], -1), before.to(hidden.dtype))
            before = before * torch.sigmoid(self.markov_head.gate_proj(torch.cat(both, -1)))
        if self.config.markov_rank:
            return scores + self.markov_head.markov_w2(before.to(hidden.dtype))
        if not self.config.selector_top:
            return scores
        best, ids = scores.topk(self.config.selector_top)  # [B, 1, K]
        if self.config.transfer_rank:
            pairs = self.refined(hidden, before, ids, lm_head)  # [B, R, K]
        else:
            tokens = self.vocab.tokens(ids[:, 0]) if self.vocab else ids[:, 0]
            selector = self.candidate_selector
            after = selector.successor_codebook(tokens).float()  # [B, K, rank]
            context = before.float() * selector.hidden_projection(hidden).float()  # [B, R, rank]
            pairs = best + context @ after.transpose(1, 2)
        return spread(pairs, ids, scores.shape[-1])

    def refined(self, hidden: Tensor, before: Tensor, ids: Tensor, lm_head: nn.Module) -> Tensor:
        """Score some tokens from a level's state, told the token before: [B, R, K] fp32.

        ids: [B, 1, K]; other operands as for `score_pairs`
        """
        hidden = hidden.expand(-1, before.shape[1], -1)
        told = self.norm(self.injection(hidden, self.injection.code(hidden), before))  # [B, R, F]
        if isinstance(lm_head, Linear) and not lm_head.packed:
            rows = lm_head.weight[ids[:, 0]].float()  # [B, K, F]
            return told.float() @ rows.transpose(1, 2)
        return self.score(told, lm_head).gather(2, ids.expand(-1, told.shape[1], -1))

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Compute the logarithm of the probability that a level's token is accepted.

        hidden: [B, 1, F], the input of its LM head; before: [B, R, rank], from `token_rows`
        Returns: [B, R] fp32.
        """
        inputs = torch.cat((hidden.expand(-1, before.shape[1], -1), before), -1)
        inputs = inputs[..., : self.config.confidence].float()
        proj = self.confidence_head["proj"]
        bias = None if proj.bias is None else proj.bias.float()
        return F.logsigmoid(F.linear(inputs, proj.weight.float(), bias).squeeze(-1))


def spread(pairs: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """Return the scores of all tokens, from those of some: [B, R, K] -> [B, R, Vd] fp32.

    ids: [B, 1, K] int64, their columns
    """
    others = pairs.new_full((*pairs.shape[:2], vocab), UNSELECTED)
    return others.scatter(2, ids.expand_as(pairs), pairs)


def slide(window: Window, size: int, config: BlockConfig) -> Window:
    """Return what the positions of a block see in a layer with a window of `size` tokens.

    Those of speculators see as many tokens before the root, and of the block what it allows.
    """
    T = window.slots.shape[1]
    place = torch.arange(T, device=window.slots.device)
    distance = place[:, None] - place  # [T, T]
    seen = distance >= 0 if config.sliding_causal else distance > -T
    begin = place + 1 - size
    if config.window_from_root:
        begin = torch.full_like(place, -size)
    else:
        seen = seen & (distance.abs() < size)
    first = (window.start[:, None] + begin).clamp(min=0)  # [B, T]
    return Window(window.slots, window.start, seen.expand_as(window.mask), first)


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
        options: children, sharpness and vocab, as for `TreeDrafter`
        """
        defaults = {"sharpness": head.config.sharpness, "vocab": head.vocab}
        super().__init__(target, tree, **defaults | options)
        assert self.tree.depth <= head.config.levels, (self.tree.depth, head.config)
        self.head = head
        self.levels = head.config.levels
        self.layers = head.layers
        self.aux_layers = head.aux_layers
        self.lm_head = lm_head or head.lm_head or target.lm_head

    def fuse(self, enable: bool) -> None:
        """Run the pass over a block in one C++ call, where that is supported."""
        self.head.fuse(enable)

    def init(self, batch: int, slots: int) -> DraftState:
        """Make an empty state; the cache has room for a block behind `slots`."""
        config = self.head.config
        slots += config.block_size
        return DraftState.empty(batch, self.head.norm.weight, config.model, slots)

    def extend(self, state: DraftState, update: DrafterUpdate) -> DraftState:
        """Read the confirmed tokens' hidden states. Writes: slots from length on.

        The row of the last one is the anchor of a correlator.
        """
        window = causal_window(state.length, update.features.shape[1], backend=self.backend)
        taps = update.features[..., self.head.config.model.dim :]
        rows = self.head.read(taps, state.cache, window)
        if self.head.config.correlator:
            state = replace_fields(state, hidden=last_of(rows, update.count, state.hidden))
        return replace_fields(state, length=state.length + update.count)

    def run_block(self, state: DraftState, inputs: DraftInputs) -> Tensor:
        """Run the block: [B, D, F], the input of the LM head for each level; LiLiCorr's: for all.

        Of DSpine, the last layer's outputs before `Inject` are behind it: [B, D, 2 F].
        Writes: slots length .. length + block_size - 1.
        """
        block = self.head.config
        first = 0 if block.predicts_next else 1
        levels = block.levels if block.correlator else self.tree.depth
        size = levels + first if block.looks_back else block.block_size
        window = causal_window(state.length, size, backend=self.backend)
        if not block.causal:
            window = Window(window.slots, window.start, torch.ones_like(window.mask))
        tokens = torch.full_like(window.slots, block.mask_token)  # [B, T]
        tokens = torch.cat((inputs.text.root[:, None], tokens[:, 1:]), 1)
        aux_layers = (len(self.layers),) if block.transfer_rank else ()
        hidden = self.head(tokens, window.slots, state.cache, window, aux_layers=aux_layers)
        return hidden[:, first : first + levels]

    def level_scores(self, state: DraftState, inputs: DraftInputs) -> Tensor:
        return self.head.score(self.run_block(state, inputs), self.lm_head)


class SparkLevels(NamedTuple):
    """The levels of a block, and the tokens before a level."""

    hidden: Tensor  # [B, D, F]
    scores: Tensor  # [B, D, Vd] fp32
    before: Tensor  # [B, R, rank], of the frontier's tokens


class SparkDrafter(BlockDrafter):
    """Scores pairs of tokens, and adds DSpark's confidence to the values of paths.

    A child's value is the logarithm of confidence times q: confidence is trained to be the share of
    drafts that are accepted, the sum of min(p, q) over the vocabulary.
    """

    def root_output(self, state: DraftState, inputs: DraftInputs) -> tuple[SparkLevels, Tensor]:
        hidden = self.run_block(state, inputs)
        before = self.head.token_rows(inputs.text.root[:, None])
        dim = self.head.config.model.dim
        scores = self.head.score(hidden[..., :dim], self.lm_head)
        return SparkLevels(hidden[..., -dim:], scores, before), inputs.text.pos

    def forward_nodes(
        self,
        state: DraftState,
        frontier: Frontier,
        out: SparkLevels,
        positions: Tensor,
        window: Window,
    ) -> SparkLevels:
        return replace_fields(out, before=self.head.token_rows(frontier.tokens))

    def logits(self, out: SparkLevels, level: int) -> Tensor:
        """Score the children of each node: [B, R, Vd]; [B, 1, Vd] where all have the same."""
        scores, hidden = out.scores[:, level, None], out.hidden[:, level, None]
        return self.head.score_pairs(scores, hidden, out.before, self.lm_head)

    def score_children(
        self, out: SparkLevels, level: int, inputs: DraftInputs
    ) -> Scores | Children:
        scores = super().score_children(out, level, inputs)
        if not self.head.config.confidence:
            return scores
        best = scores.best(self.tree.plan[level].k, self.backend.topk)
        sure = self.head.confidence(out.hidden[:, level, None], out.before)  # [B, R]
        return Children(best.tokens, best.scores + sure[:, :, None])


class Lattice(NamedTuple):
    """The best tokens of all levels, and the tokens before a level."""

    ids: Tensor  # [B, S, K] int64
    pairs: Tensor  # [B, S, K, K] fp32, of the correlator
    before: Tensor  # [B, R] int64, the frontier's tokens


class LatticeDrafter(SparkDrafter):
    """Scores pairs of the best tokens of neighbouring levels by a correlator (LiLiCorr)."""

    def root_output(self, state: DraftState, inputs: DraftInputs) -> tuple[Lattice, Tensor]:
        hidden = self.run_block(state, inputs)  # [B, S, F]
        z = self.head.score(hidden, self.lm_head)
        best, ids = z.topk(self.head.config.correlator.lilicorr_candidate_topk)  # [B, S, K]
        log_probs = best - z.logsumexp(-1, keepdim=True)
        embedded = self.head.embedding(ids)  # [B, S, K, F]
        anchor = state.hidden[:, 0] * (state.length > 0)[:, None]
        pairs = self.head.lilicorr(embedded, log_probs, hidden, anchor)
        return Lattice(ids, pairs, inputs.text.root[:, None]), inputs.text.pos

    def logits(self, out: Lattice, level: int) -> Tensor:
        """Score the children of each node: [B, R, V].

        Behind a token outside of the lattice, all tokens in it have the same score.
        """
        pairs = out.pairs[:, level]  # [B, K, K]
        if level:
            is_before = out.before[:, :, None] == out.ids[:, level - 1, None]  # [B, R, K]
            pairs = is_before.float() @ pairs
        else:
            pairs = pairs[:, :1]
        return spread(pairs, out.ids[:, level, None], self.vocab.size)


def kind_of(config: BlockConfig) -> type[BlockDrafter]:
    """Return the class of a head's drafter."""
    if config.correlator:
        return LatticeDrafter
    return SparkDrafter if config.scores_pairs else BlockDrafter


def load_head(path: Path, target: Transformer, quant: Quantization | None = None) -> BlockHead:
    """Load a block drafter for `target`, in the target's dtype and on its device.

    quant: quantize while loading, unless the files are quantized already
    Raises: ValueError for a head of another target, or broken files.
    """
    files = HeadFiles(path, head_files(path, BLOCKS if quant and quant.is_blocks else ""), "block")
    config = read_block_head(files, target.config)
    with torch.device("meta"):
        head = BlockHead(config)
    head.vocab = read_vocab(files, config)
    quant = files.quant or quant
    fill(head, target, files, head.weight_names(), quant, is_unused)
    if head.embedding is None or is_same_embedding(head.embedding, target):
        head.embedding = target.embedding  # one copy is enough
    return head


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Load `--draft block`. Raises: ValueError for a head or a tree that does not fit."""
    path = Path(config.head)
    quant = Quantization.of(config.quant_draft, config.group_size)
    head = load_head(path, target, quant)
    tree = tree_of(config, head.config.levels, path)
    model = head if head.lm_head else target
    lm_head = draft_lm_head(model, quant)
    drafter = kind_of(head.config)
    return method_of(drafter(head, target, tree, lm_head, children=config.child_rule))
