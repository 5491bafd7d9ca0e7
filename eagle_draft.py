"""The EAGLE draft head (versions 1 and 2 share their weights) and the trees it proposes.

How it works:
1. Row j of the head pairs the target's feature f_j with the token x_{j+1} and sits at position j. Its output
   predicts f_{j+1}; the target's LM head turns that into the distribution of x_{j+2}.
2. `extend` feeds the rows that the target has confirmed, padded to a static number; only these stay below the
   cache's length. The last output is kept: it is the root's prediction.
3. `draft` runs the tree's levels on predicted features, in scratch slots above the length, and throws them away.
4. A node's children are the top-k of its scores. When sampling, the scores carry the noise by which the target
   itself will choose at that draw, so the likeliest child is the one that the noise favours.
   A child adds log softmax(c * scores) to its path's value; c, the sharpness, is fitted per head.

Sources: EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858); weights in the SafeAILab layout.
Trade-off: extending and drafting are separate passes, because features may come from a prefill as well.
Not here: version 3 heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import draft_tree
import sampling
from config import GenerateConfig
from draft_tree import DraftTree, StaticTree
from drafters import DRAFTERS, Root, Rows
from model import (
    Block,
    KVCache,
    ModelConfig,
    Storage,
    Transformer,
    WeightFiles,
    Window,
    causal_window,
    layer_names,
    load_weights,
    read_json,
    rope_angles,
    rope_frequencies,
)
from quantize import FORMATS, Quantization, QuantLinear, check_group
from stand_in import InflatedFiles, Shape, inflate_head

DRAFT_INPUTS = "feature&shifted"  # what a row sees, in the words of EAGLE-1 figure 8; key `draft_inputs` (ours)


@dataclass(frozen=True)
class EagleConfig:
    """What the head's own `config.json` says; nothing is taken from the target."""

    model: ModelConfig  # dims, KV heads, eps, RoPE base of the head's layer
    fc_bias: bool = True  # key `bias`; absent means True
    sharpness: float = 1.0  # key `draft_sharpness` (ours): c above

    @staticmethod
    def from_dir(path: Path, raw: dict | None = None) -> EagleConfig:
        """Read `path/config.json`, or take `raw` for its content.

        Raises: ValueError for a missing or broken file or key.
        """
        raw = raw or read_json(path / "config.json")
        try:
            # heads name the target's architecture; whatever it is, the head's layer is a LLaMA layer
            model = ModelConfig.from_dict(raw, "LlamaForCausalLM")
        except KeyError as missing:
            raise ValueError(f"{path / 'config.json'}: the key {missing} is missing") from None
        if raw.get("draft_inputs", DRAFT_INPUTS) != DRAFT_INPUTS:
            raise ValueError(
                f"{path}: the head was trained on {raw['draft_inputs']}; only {DRAFT_INPUTS} can draft here"
            )
        qkv_bias = bool(raw.get("qkv_bias", False))
        return EagleConfig(
            replace(model, qkv_bias=qkv_bias, o_bias=False, mlp_bias=False),
            fc_bias=bool(raw.get("bias", True)),
            sharpness=float(raw.get("draft_sharpness", 1.0)),
        )


class EagleLayer(Block):
    """A transformer layer; the first of a head has no norm before its attention."""

    def __init__(self, config: ModelConfig, first: bool):
        super().__init__(config)
        if first:
            self.attention_norm = nn.Identity()


class EagleHead(nn.Module):
    """fc(embedding, feature), then the layers. The embedding and the LM head are the target's."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = config
        dim = config.model.dim
        self.fc = nn.Linear(2 * dim, dim, bias=config.fc_bias)
        self.layers = nn.ModuleList(EagleLayer(config.model, i == 0) for i in range(config.model.n_layers))
        self.register_buffer("rope_freq", rope_frequencies(config.model), persistent=False)  # [E/2] fp32

    def forward(
        self,
        embedded: Tensor,  # [B, T, F], embedding of x_{j+1}
        features: Tensor,  # [B, T, F], f_j, the target's or predicted
        positions: Tensor,  # [B, T] int64, j
        cache: KVCache | None = None,
        window: Window | None = None,
    ) -> Tensor:
        """Predict the next features. Writes: the cache at `window.slots`. Returns: [B, T, F]."""
        x = self.fc(torch.cat((embedded, features), dim=-1))  # embedding first
        rope = rope_angles(self.rope_freq, positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, (cache.k[i], cache.v[i]) if cache is not None else None, window)
        return x


def head_names(config: EagleConfig) -> dict[str, tuple[str, ...]]:
    """Our parameter name -> the official head's tensors."""
    names = {"fc.weight": ("fc.weight",)} | ({"fc.bias": ("fc.bias",)} if config.fc_bias else {})
    for i in range(config.model.n_layers):
        names |= layer_names(f"layers.{i}.", f"layers.{i}.", config.model)
    del names["layers.0.attention_norm.weight"]  # the first layer has no norm before its attention
    return names


def load_head(
    path: Path, target: Transformer, quant: Quantization | None = None, files: InflatedFiles | None = None
) -> EagleHead:
    """Load an official EAGLE-1 or EAGLE-2 head for `target`, in the target's dtype and on its device.

    quant: quantize while loading, unless the head's files are quantized already; files: the stand-in to build instead
    Raises: ValueError for a head of another version or another target, or broken files.
    """
    config = EagleConfig.from_dir(path, files.config if files else None)
    files = files or WeightFiles(path)
    if "midlayer.hidden_norm.weight" in files.readers or "d2t" in files.readers:
        raise ValueError(f"{path} holds an EAGLE-3 head, which is not supported yet; use an EAGLE-1 or EAGLE-2 head")
    for what, ours, theirs in (
        ("hidden_size", config.model.dim, target.config.dim),
        ("vocab_size", config.model.vocab_size, target.config.vocab_size),
    ):
        if ours != theirs:
            raise ValueError(f"{path}: {what} is {ours}, the target's is {theirs}; use the head made for this target")
    weight = target.embedding.weight
    with torch.device("meta"):
        head = EagleHead(config)
    # official files repeat the target's embedding
    names, ignored = head_names(config), lambda name: name.endswith(("embed_tokens.weight", "rotary_emb.inv_freq"))
    storage = Storage(weight.dtype, str(weight.device), config.model.quant or quant)
    load_weights(head, files, names, storage, ignored)
    head.rope_freq = rope_frequencies(config.model, weight.device)
    return head.eval()


# --------------------------------------------------------------------------------------------- drafting


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree: grown where the head is confident, then re-ranked. The papers' size is the default."""

    depth: int = 6  # D, drafted levels
    topk: int = 10  # K, children kept per node, and nodes expanded per level
    size: int = 60  # N, verified nodes, root included
    expand_by: str = "value"  # or "confidence" (ablation)
    rerank: bool = True  # False keeps the first levels whole (ablation)

    def __post_init__(self):
        pool = draft_tree.pool_size(self.depth, self.topk)
        if self.size - 1 > pool:
            raise ValueError(
                f"a tree of {self.size} nodes needs {self.size - 1} candidates; depth {self.depth} and top-k "
                f"{self.topk} give {pool} (K + (D-1) K^2); lower --tree_size or raise --tree_topk"
            )


class EagleState(NamedTuple):
    """What the head knows. Rows below `length` come from true features only."""

    cache: KVCache
    length: Tensor  # [B] int64, confirmed rows
    hidden: Tensor  # [B, F], output of the last confirmed row: the root's prediction


class EagleDrafter:
    """Drafts static or dynamic trees with an `EagleHead`."""

    def __init__(
        self,
        head: EagleHead,
        target: Transformer,
        tree: DynamicTree | StaticTree,
        rule: sampling.Sampling,
        children: str = "noise",
        sharpness: float | None = None,
        lm_head: nn.Module | None = None,
    ):
        """children: how they are picked when sampling. "topk": top-k of the head's logits; "noise": top-k of
        logits + T * the shared noise; "sampled": drawn without replacement from q with noise of their own.
        lm_head: what turns features into drafted tokens, where it is not the target's own
        """
        if children == "sampled" and isinstance(tree, DynamicTree):
            raise ValueError("children of a dynamic tree cannot be sampled: pruning them by their own q is lossy")
        vocab = target.config.vocab_size
        self.width = tree.topk if isinstance(tree, DynamicTree) else max(map(tree.ranks, range(tree.depth)))
        if self.width > vocab:
            raise ValueError(f"a node cannot have {self.width} ranked children of {vocab} tokens; lower the rank")
        self.head, self.embedding, self.lm_head = head, target.embedding, lm_head or target.lm_head
        self.tree, self.rule = tree, rule
        self.children = children if rule.temperature > 0 else "topk"
        self.sharpness = head.config.sharpness if sharpness is None else sharpness
        self.depth, self.size = tree.depth, tree.size
        if isinstance(tree, StaticTree):
            self.plan = StaticPlan.of(tree, target.embedding.weight.device)
        self.fresh_rows = len(self.plan.inner) if self.children == "sampled" else 0

    def facts(self) -> dict[str, Any]:
        """What the options came to."""
        tree, dynamic = self.tree, isinstance(self.tree, DynamicTree)
        shape = {"tree_topk": tree.topk, "tree_size": tree.size} if dynamic else {"tree_paths": tree.paths}
        name = "dynamic" if dynamic else "chain" if self.width == 1 else "static"
        drafted = {"children": self.children, "sharpness": self.sharpness}
        return {"tree": name, "tree_depth": self.depth} | shape | drafted

    def init(self, batch: int, slots: int) -> EagleState:
        """An empty state; the cache has room for the largest level behind `slots`."""
        weight, config = self.embedding.weight, self.head.config.model
        scratch = (self.depth - 1) * self.tree.topk if isinstance(self.tree, DynamicTree) else self.size
        cache = KVCache.empty(config, batch, slots + scratch, weight.dtype, str(weight.device))
        length = torch.zeros(batch, dtype=torch.long, device=weight.device)
        hidden = torch.zeros(batch, config.dim, dtype=weight.dtype, device=weight.device)
        return EagleState(cache, length, hidden)

    def extend(self, state: EagleState, rows: Rows) -> EagleState:
        """Confirm `rows.count` rows. Writes: cache slots length .. length + R - 1 (padding included)."""
        window = causal_window(state.length, rows.tokens.shape[1])
        out = self.head(self.embedding(rows.tokens), rows.features, window.slots, state.cache, window)
        last = (rows.count - 1).clamp(min=0)[:, None, None].expand(-1, 1, out.shape[2])
        hidden = torch.where(rows.count[:, None] > 0, out.gather(1, last).squeeze(1), state.hidden)
        return EagleState(state.cache, state.length + rows.count, hidden)

    def rewind(self, state: EagleState, length: Tensor) -> EagleState:
        """Forget all but the first `length` rows."""
        return state._replace(length=length)

    def draft(self, state: EagleState, root: Root) -> DraftTree:
        """Propose a tree. Writes: scratch slots above the cache's length."""
        return self._dynamic(state, root) if isinstance(self.tree, DynamicTree) else self._static(state, root)

    def _scores(self, hidden: Tensor, noise: Tensor | None) -> Tensor:
        """Scores of every token after each node, in logit units. hidden: [B, R, F]; noise: [B, V] or None."""
        z = self.lm_head(hidden).float()  # [B, R, V]
        if self.children != "noise" or noise is None:
            return z
        return self.rule.temperature * (sampling.process(z, self.rule) + noise[:, None])

    def _children(self, hidden: Tensor, noise: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
        """The k best children of each node: tokens and log softmax(c * score), both [B, R, k], best first."""
        scores = self.sharpness * self._scores(hidden, noise)
        best, tokens = scores.topk(k, dim=-1)
        # no value may exceed its parent's, not even by the rounding of the logarithm
        return tokens, (best - scores.logsumexp(-1, keepdim=True)).clamp(max=0)

    def _level(self, state: EagleState, tokens: Tensor, hidden: Tensor, level: int, mask: Tensor, slot: int) -> Tensor:
        """Run the head over the drafted nodes of one level.

        tokens: [B, R]; hidden: [B, R, F], outputs of their parents; level: 1 for the root's children
        mask: [B, R, W] bool, scratch slots seen; slot: first scratch slot of the level
        """
        slots = state.length[:, None] + slot + torch.arange(tokens.shape[1], device=tokens.device)  # [B, R]
        positions = (state.length + level - 1)[:, None].expand_as(tokens)
        window = Window(slots, state.length, mask)
        return self.head(self.embedding(tokens), hidden, positions, state.cache, window)

    def _dynamic(self, state: EagleState, root: Root) -> DraftTree:
        tree, K = self.tree, self.tree.topk
        B, device = root.token.shape[0], root.token.device
        noise = root.noise.unbind(1) if root.noise is not None else [None] * tree.depth
        tokens, scores = self._children(state.hidden[:, None], noise[0], K)  # [B, 1, K]
        pool, frontier = draft_tree.first_level(tokens[:, 0], scores[:, 0])
        out = state.hidden[:, None].expand(-1, K, -1)  # [B, K, F], what the frontier's parents gave
        lineage = torch.zeros(B, K, (tree.depth - 1) * K, dtype=torch.bool, device=device)  # [B, K, W]
        for level in range(1, tree.depth):
            slot = (level - 1) * K
            self_mask = F.pad(torch.eye(K, dtype=torch.bool, device=device), (slot, lineage.shape[2] - slot - K))
            lineage = lineage | self_mask  # a node sees its ancestors and itself
            out = self._level(state, frontier.tokens, out, level, lineage, slot)
            tokens, scores = self._children(out, noise[level], K)  # [B, K, K]
            pool, frontier = draft_tree.expand(pool, frontier, tokens, scores, tree.expand_by)
            rank = frontier.parent_rank[:, :, None]
            out = out.gather(1, rank.expand(-1, -1, out.shape[2]))
            lineage = lineage.gather(1, rank.expand(-1, -1, lineage.shape[2]))
        return draft_tree.rerank(root.token, pool, tree.size, tree.depth, tree.rerank)

    def _static(self, state: EagleState, root: Root) -> DraftTree:
        B, plan = root.token.shape[0], self.plan
        noise = root.noise.unbind(1) if root.noise is not None else [None] * self.depth
        tokens, valid, q = [root.token[:, None]], [torch.ones_like(root.token[:, None]).bool()], []
        out, slot, row = state.hidden[:, None], 0, 0
        for depth, level in enumerate(plan.levels):
            if depth > 0:
                mask, rows = level.mask.expand(B, -1, -1), torch.cat(tokens, 1)[:, level.nodes]
                out = self._level(state, rows, out[:, level.parent_rows], depth, mask, slot)  # [B, R, F]
                slot += len(level.nodes)
            if self.children == "sampled":
                log_q = sampling.process(self.lm_head(out).float(), self.rule).log_softmax(-1)  # [B, R, V]
                q.append(log_q.exp())
                best, picked = (log_q + root.fresh[:, row : row + len(level.nodes)]).topk(level.k, dim=-1)
                row += len(level.nodes)
            else:
                picked, best = self._children(out, noise[depth], level.k)  # [B, R, k]
            tokens.append(picked.flatten(1)[:, level.picks])  # [B, children of this level]
            valid.append(best.flatten(1)[:, level.picks] > float("-inf"))
        every_q = None
        if q:  # leaves have no children, hence no q
            every_q = q[0].new_zeros(B, self.size, q[0].shape[2]).index_copy(1, plan.inner, torch.cat(q, 1))
        parents = plan.parents.expand(B, -1)
        return draft_tree.build_tree(torch.cat(tokens, 1), parents, torch.cat(valid, 1), self.depth, every_q)


class StaticLevel(NamedTuple):
    """One pass of a static draft, over the R nodes of a depth that have children."""

    nodes: Tensor  # [R] int64, node numbers
    parent_rows: Tensor  # [R] int64, row of each node's parent in the pass before
    mask: Tensor  # [1, R, W] bool, which inner nodes (scratch slots) each one sees
    picks: Tensor  # [C] int64, the children that the tree keeps, in node order, as row * k + rank
    k: int  # ranked children needed of each row


class StaticPlan(NamedTuple):
    """Index tensors of a static tree, made once."""

    levels: list[StaticLevel]
    inner: Tensor  # [sum R] int64, nodes with children
    parents: Tensor  # [1, N] int64

    @staticmethod
    def of(tree: StaticTree, device: torch.device) -> StaticPlan:
        inner = [node for level in tree.inner for node in level]
        lineage = {0: {0}}
        for node in range(1, tree.size):
            lineage[node] = lineage[tree.parents[node]] | {node}
        levels = []
        for depth, nodes in enumerate(tree.inner):
            above = tree.inner[depth - 1] if depth else []
            k = tree.ranks(depth)
            levels.append(
                StaticLevel(
                    nodes=torch.tensor(nodes, device=device),
                    parent_rows=torch.tensor([above.index(tree.parents[n]) for n in nodes if depth], device=device),
                    mask=torch.tensor([[[a in lineage[n] for a in inner[1:]] for n in nodes]], device=device),
                    picks=torch.tensor([row * k + rank for _, row, rank in tree.children(depth)], device=device),
                    k=k,
                )
            )
        return StaticPlan(levels, torch.tensor(inner, device=device), torch.tensor([tree.parents], device=device))


def draft_lm_head(target: Transformer, quant: Quantization | None) -> nn.Module:
    """The target's LM head, or a copy of it in the draft's own format."""
    own = target.lm_head
    if quant is None or (isinstance(own, QuantLinear) and own.format == quant.format):
        return own
    check_group(quant, "the draft's copy of lm_head", own.in_features)
    weight = own.dequantize() if isinstance(own, QuantLinear) else own.weight
    return FORMATS[quant.format].from_float(weight, None, quant.group_size, wide=True)


def _inflated(target: Transformer, config: GenerateConfig) -> InflatedFiles:
    path, weight = Path(config.eagle), target.embedding.weight
    small, shape = EagleConfig.from_dir(path).model, Shape.parse(config.inflate)
    return inflate_head(path, small, shape, weight.dtype, str(weight.device), config.random_twin)


def make_drafter(target: Transformer, config: GenerateConfig) -> EagleDrafter:
    """`--draft eagle`. Raises: ValueError for a head or a tree that does not fit."""
    quant = Quantization(config.quant_draft, config.group_size) if config.quant_draft != "none" else None
    head = load_head(Path(config.eagle), target, quant, _inflated(target, config) if config.inflate else None)
    if config.tree_file:
        tree = StaticTree.from_file(Path(config.tree_file))
    elif config.tree == "static":
        tree = StaticTree(draft_tree.EAGLE1_PATHS)
    elif config.tree == "chain":
        tree = StaticTree.chain(config.tree_depth)
    else:
        tree = DynamicTree(
            config.tree_depth, config.tree_topk, config.tree_size, config.expand_by, not config.no_rerank
        )
    children = config.children
    if not children:
        residual = "topk" if isinstance(tree, DynamicTree) else "sampled"
        children = residual if config.accept == "residual" else "noise"
    lm_head = draft_lm_head(target, head.config.model.quant or quant)
    return EagleDrafter(head, target, tree, config.sampling, children, config.sharpness or None, lm_head)


DRAFTERS["eagle"] = make_drafter
