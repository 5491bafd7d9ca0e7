"""LiLiCorr's correlator: it scores pairs of neighbouring tokens of a block drafter's best.

1. The lattice is the K best tokens of each of a block's S levels. A token's row is the sum of its
   embedding, its level's hidden state, its probability and rank, and learned rows of both places.
2. A few layers of attention over the whole lattice know the distance of two levels.
3. A row and the anchor, the target's last confirmed state, give two unit vectors: as the token
   before, and as the token behind. The score of a pair is a scaled cosine. In the first level the
   anchor is the token before.

Modules have the names of the files. Sources: LiLiCorr (arXiv 2608.20530); NVIDIA/Model-Optimizer
@33d8c76, modeling_lilicorr, and @0371364, `LiLiCorrExporter`; vllm-project/vllm @3a285cb,
qwen3_lilicorr. Not here: the choice of tokens (block_draft.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from files.fields import Rule, integer, key, positive
from model import ModelConfig
from steps import RMSNorm

SIZE = integer(1, 2**20)
FEATURES = 5  # of a token of the lattice, beside its embedding


@dataclass(frozen=True)
class HFCorrelator:
    """The keys of config.json. None has a default: the weights do not tell all of them."""

    lilicorr_candidate_topk: int = key(SIZE)  # K
    lilicorr_hidden_size: int = key(integer(0, 2**20))  # 0: the drafter's
    lilicorr_num_layers: int = key(integer(1, 256))
    lilicorr_num_heads: int = key(SIZE)
    lilicorr_mlp_ratio: float = key(positive(1e3))
    lilicorr_factor_dim: int = key(SIZE)  # numbers of a unit vector
    lilicorr_vector_eps: float = key(positive(0.5))  # the least length that a vector is divided by
    lilicorr_logit_scale: float = key(positive(1e6))  # of a cosine
    lilicorr_enabled: bool = key(Rule("true", lambda v: v is True), True)


class LatticeLayer(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, width: int, eps: float, keys: HFCorrelator):
        super().__init__()
        inner = int(width * keys.lilicorr_mlp_ratio)
        self.attn_norm = RMSNorm(width, eps)
        self.attn = nn.MultiheadAttention(width, keys.lilicorr_num_heads, batch_first=True)
        self.mlp_norm = RMSNorm(width, eps)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Run over the lattice: [B, S K, W] -> [B, S K, W]. bias: [B H, S K, S K]"""
        h = self.attn_norm(x)
        x = x + self.attn(h, h, h, attn_mask=bias, need_weights=False)[0]
        return x + self.mlp(self.mlp_norm(x))


class Correlator(nn.Module):
    """The layers over the lattice, and the vectors of its pairs.

    It stays in the model's dtype beside quantized layers, as engines expect of most of it.
    """

    def __init__(self, keys: HFCorrelator, model: ModelConfig, levels: int):
        """model: of the drafter's layers; levels: S"""
        super().__init__()
        self.keys = keys
        self.levels = levels
        dim = model.dim
        width = keys.lilicorr_hidden_size or dim
        heads = keys.lilicorr_num_heads
        factors = keys.lilicorr_factor_dim
        self.token_proj = nn.Identity() if width == dim else nn.Linear(dim, width)
        self.pass_hidden_proj = nn.Linear(dim, width)
        self.context_proj = nn.Linear(dim, width)
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(FEATURES), nn.Linear(FEATURES, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, levels, 1, width))
        self.rank_embedding = nn.Parameter(
            torch.zeros(1, 1, 1, keys.lilicorr_candidate_topk, width)
        )
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * levels + 1))  # from -S on
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        layers = [
            LatticeLayer(width, model.norm_eps, keys) for _ in range(keys.lilicorr_num_layers)
        ]
        self.layers = nn.ModuleList(layers)
        self.output_norm = RMSNorm(width, model.norm_eps)
        self.anchor_norm = RMSNorm(width, model.norm_eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head = nn.Linear(width, factors)
        self.in_head = nn.Linear(width, factors)
        self.anchor_out_head = nn.Linear(width, factors)

    def forward(
        self, embedded: Tensor, log_probs: Tensor, hidden: Tensor, anchor: Tensor
    ) -> Tensor:
        """Score the pairs of a lattice.

        embedded: [B, S, K, F], the target's embeddings of its tokens, best first
        log_probs: [B, S, K] fp32, of the tokens among all
        hidden: [B, S, F], the inputs of the LM head
        anchor: [B, F]; zeros before the first confirmed token
        Returns: [B, S, K, K] fp32, rows by the token before; those of the first level are equal.
        """
        features = self.feature_mlp(describe(log_probs).to(hidden.dtype))
        x = self.token_proj(embedded.to(hidden.dtype)) + self.pass_hidden_proj(hidden)[:, :, None]
        x = x + features + self.slot_embedding[0] + self.rank_embedding[0]  # [B, S, K, W]
        B, S, K, _ = x.shape
        bias = self.attention_bias().repeat(B, 1, 1)
        lattice = x.flatten(1, 2)
        for layer in self.layers:
            lattice = layer(lattice, bias)
        x = self.output_norm(lattice).unflatten(1, (S, K))
        is_valid = (anchor != 0).any(-1, keepdim=True)  # else the bias were an anchor
        anchor = self.anchor_norm(self.context_proj(anchor) * is_valid)  # [B, W]
        rows = anchor[:, None, None].expand_as(x)
        x = F.silu(self.factor_input_proj(torch.cat((x, rows, x * rows), -1)))
        first = self.unit(self.anchor_out_head(anchor))[:, None, None].expand(-1, 1, K, -1)
        before = torch.cat((first, self.unit(self.out_head(x))[:, :-1]), 1)
        cosines = before @ self.unit(self.in_head(x)).transpose(-1, -2)
        return self.keys.lilicorr_logit_scale * cosines.float()

    def attention_bias(self) -> Tensor:
        """Return what is added to the scores of attention, by the rows' levels: [H, S K, S K]."""
        K = self.keys.lilicorr_candidate_topk
        level = torch.arange(self.levels, device=self.same_slot_bias.device).repeat_interleave(K)
        distance = level[:, None] - level  # [S K, S K]
        same = (distance == 0) * self.same_slot_bias[:, None, None]
        return self.relative_slot_bias[:, distance + self.levels] + same

    def unit(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=self.keys.lilicorr_vector_eps)


def describe(log_probs: Tensor) -> Tensor:
    """Describe tokens by their place among the best: [B, S, K] fp32 -> [B, S, K, FEATURES]."""
    rank = torch.arange(log_probs.shape[-1], device=log_probs.device)
    place = rank / max(log_probs.shape[-1] - 1, 1)
    parts = (log_probs, log_probs.exp(), log_probs - log_probs[..., :1], place, rank == 0)
    return torch.stack([part.expand_as(log_probs).float() for part in parts], -1)
