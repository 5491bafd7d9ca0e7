"""The layer that Qwen2, Qwen3 and the families behind them have: LLaMA's, with norms and mixtures.

Norms of queries and keys, biases, experts of a width of their own in some of the layers, and an
expert that all tokens share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from model import NAMES, ModelConfig
from models.steps import AddShared, GateOutput, HeadNorm, ScoredRoute
from steps import Copy, Gate, Merge, Project, Rotate, Route, Step

QWEN_NAMES = NAMES | {
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "router": ("mlp.gate",),
    "shared_w13": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared_w2": ("mlp.shared_expert.down_proj",),
    "shared_gate": ("mlp.shared_expert_gate",),
    "experts.w13": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "experts.w2": ("mlp.experts.{}.down_proj",),
}


@dataclass(frozen=True)
class Qwen(ModelConfig):
    """The settings of Qwen2 and Qwen3 beside LLaMA's."""

    qk_norm: bool = False  # (no key: Qwen3, and heads whose weights show it)
    expert_dim: int = 0  # moe_intermediate_size
    # shared_expert_intermediate_size, of an expert that all tokens share; 0: there is none
    shared_dim: int = 0
    norm_topk: bool = True  # norm_topk_prob: the chosen experts' routing weights add up to 1
    # mlp_only_layers, decoder_sparse_step: layers without experts
    dense_layers: tuple[int, ...] = ()

    gates_shared = True  # of an architecture: the shared expert's result has a gate

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        return QWEN_NAMES

    def ignores(self, name: str) -> bool:
        return self.mtp is not None and name.startswith(self.mtp.prefix)

    def has_experts(self, i: int) -> bool:
        return self.n_experts > 0 and i not in self.dense_layers

    def attention(self) -> tuple[Step, ...]:
        steps = super().attention()
        if not self.qk_norm:
            return steps
        norm = HeadNorm(self.n_heads, self.n_kv_heads, self.head_dim, self.norm_eps)
        rotate = next(i for i, step in enumerate(steps) if isinstance(step, Rotate))
        return (*steps[:rotate], norm, *steps[rotate:])

    def mixture(self) -> tuple[Step, ...]:
        """Return the steps of SwiGLU by the best experts of each token, and by the shared one."""
        steps = (
            self.route(),
            Project("w13", self.dim, 2 * self.expert_dim, experts=self.n_experts),
            Gate(),
            Project("w2", self.expert_dim, self.dim, experts=self.n_experts, row_parallel=True),
            Merge(),
        )
        return (*self.shared_expert(), *steps, AddShared()) if self.shared_dim else steps

    def route(self) -> Route:
        """Return the step that chooses each token's experts."""
        sizes = (self.dim, self.n_experts, self.experts_per_token)
        return ScoredRoute(*sizes, norm_topk=self.norm_topk)

    def shared_expert(self) -> tuple[Step, ...]:
        """Return the steps of the expert that all tokens share; its result waits for the others."""
        gate: tuple[Step, ...] = ()
        if self.gates_shared:
            gate = (Project("shared_gate", self.dim, 1, source="normed", to="gate"), GateOutput())
        return (
            Copy("h", "normed"),
            Project("shared_w13", self.dim, 2 * self.shared_dim),
            Gate(),
            Project("shared_w2", self.shared_dim, self.dim, row_parallel=True),
            *gate,
            Copy("h", "shared"),
            Copy("normed", "h"),
        )


def with_head_norms(config: ModelConfig) -> Qwen:
    """Return a config whose layers norm queries and keys. config: of LLaMA's layers"""
    return replace(Qwen(**vars(config)), qk_norm=True)


def has_head_norms(config: ModelConfig) -> bool:
    """Return whether layers norm queries and keys."""
    return any(isinstance(step, HeadNorm) for step in config.layer(0))
