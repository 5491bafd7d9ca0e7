"""LiLiCorr's correlator: it scores pairs of neighbouring tokens of a block drafter's best.

1. The lattice is the K best tokens of each of the S levels of a block. A token's row is the sum of
   its embedding, its level's hidden state, its logarithm and rank among the K, and learned rows of
   level and rank.
2. A few layers of attention over the whole lattice, biased by the distance of two levels.
3. A row and the anchor, the target's last confirmed state as the drafter reads it, give two unit
   vectors: one for the token before, one for the token behind. An edge's score is their scaled
   cosine. In the first level the anchor is the token before.

Modules have the names of the official files, behind `lilicorr.` there. They stay in the model's
dtype, also beside quantized layers: engines expect that of most of them, and they are small.
Sources: LiLiCorr (arXiv 2608.20530); NVIDIA/Model-Optimizer @33d8c76, modeling_lilicorr;
vllm-project/vllm @3a285cb, qwen3_lilicorr. Not here: the choice of tokens (block_draft.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steps import RMSNorm

FEATURES = 5  # of a token of the lattice, beside its embedding


@dataclass(frozen=True)
class CorrelatorConfig:
    """The sizes and constants of a correlator."""

    dim: int  # of the drafter
    width: int  # of the correlator
    layers: int
    heads: int
    hidden: int  # of the feed-forward of a layer
    factors: int  # numbers of a unit vector
    levels: int  # S
    top: int  # K
    scale: float  # of a cosine
    vector_eps: float  # the least length that a vector is divided by
    norm_eps: float


class LatticeAttention(nn.Module):
    """Attention of every row of the lattice to all."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Attend: [B, S K, F] -> [B, S K, F]. bias: [H, S K, S K]"""
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, S K, E]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        return self.out_proj(y.transpose(1, 2).flatten(2))


class LatticeLayer(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, config: CorrelatorConfig):
        super().__init__()
        width = config.width
        self.attn_norm = RMSNorm(width, config.norm_eps)
        self.attn = LatticeAttention(width, config.heads)
        self.mlp_norm = RMSNorm(width, config.norm_eps)
        self.mlp = nn.Sequential(
            nn.Linear(width, config.hidden), nn.SiLU(), nn.Linear(config.hidden, width)
        )

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


class Correlator(nn.Module):
    """The layers over the lattice, and the vectors of its edges."""

    def __init__(self, config: CorrelatorConfig):
        super().__init__()
        self.config = config
        dim = config.dim
        width = config.width
        self.token_proj = nn.Identity() if width == dim else nn.Linear(dim, width)
        self.pass_hidden_proj = nn.Linear(dim, width)
        self.context_proj = nn.Linear(dim, width)
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(FEATURES), nn.Linear(FEATURES, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, config.levels, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, config.top, width))
        # by the distance of two levels, from -block_size + 1 on
        self.relative_slot_bias = nn.Parameter(torch.zeros(config.heads, 2 * config.levels + 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(config.heads))
        self.layers = nn.ModuleList(LatticeLayer(config) for _ in range(config.layers))
        self.output_norm = RMSNorm(width, config.norm_eps)
        self.anchor_norm = RMSNorm(width, config.norm_eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head = nn.Linear(width, config.factors)
        self.in_head = nn.Linear(width, config.factors)
        self.anchor_out_head = nn.Linear(width, config.factors)

    def forward(
        self, embedded: Tensor, log_probs: Tensor, hidden: Tensor, anchor: Tensor
    ) -> Tensor:
        """Score the edges of a lattice.

        embedded: [B, S, K, F], the target's embeddings of its tokens, best first
        log_probs: [B, S, K] fp32, of the tokens among all
        hidden: [B, S, F], the inputs of the LM head
        anchor: [B, F]; zeros before the first confirmed token
        Returns: [B, S, K, K] fp32, rows by the token before; those of the first level are equal.
        """
        features = self.feature_mlp(self.features(log_probs).to(hidden.dtype))
        x = self.token_proj(embedded.to(hidden.dtype)) + self.pass_hidden_proj(hidden)[:, :, None]
        x = x + features + self.slot_embedding[0] + self.rank_embedding[0]  # [B, S, K, W]
        bias = self.attention_bias()
        lattice = x.flatten(1, 2)
        for layer in self.layers:
            lattice = layer(lattice, bias)
        x = self.output_norm(lattice).view_as(x)
        is_valid = (anchor != 0).any(-1, keepdim=True)  # the bias of zeros would be an anchor, too
        anchor = self.anchor_norm(self.context_proj(anchor) * is_valid)  # [B, W]
        rows = anchor[:, None, None].expand_as(x)
        x = F.silu(self.factor_input_proj(torch.cat((x, rows, x * rows), -1)))
        first = self.unit(self.anchor_out_head(anchor))[:, None, None]  # [B, 1, 1, factors]
        first = first.expand(-1, 1, self.config.top, -1)
        before = torch.cat((first, self.unit(self.out_head(x))[:, :-1]), 1)
        cosines = before @ self.unit(self.in_head(x)).transpose(-1, -2)
        return self.config.scale * cosines.float()

    def features(self, log_probs: Tensor) -> Tensor:
        """Describe the tokens by their place among the best: [B, S, K] -> [B, S, K, FEATURES]."""
        rank = torch.arange(self.config.top, device=log_probs.device)
        place = rank / max(self.config.top - 1, 1)
        parts = (log_probs, log_probs.exp(), log_probs - log_probs[..., :1], place, rank == 0)
        return torch.stack([part.expand_as(log_probs).float() for part in parts], -1)

    def attention_bias(self) -> Tensor:
        """Return what is added to the scores of attention, by the rows' levels: [H, S K, S K]."""
        config = self.config
        level = torch.arange(config.levels, device=self.same_slot_bias.device)
        distance = level[:, None] - level  # [S, S]
        bias = self.relative_slot_bias[:, distance + config.levels]
        bias = bias + (distance == 0) * self.same_slot_bias[:, None, None]
        bias = bias.repeat_interleave(config.top, 1).repeat_interleave(config.top, 2)
        return bias.to(self.same_slot_bias.dtype)

    def unit(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=self.config.vector_eps)
