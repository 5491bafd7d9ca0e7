"""The parts that all trainings share: optimizers, their schedule, a run's state and its files.

Muon (Keller Jordan et al. 2024, as `torch.optim.Muon`) takes the layers' matrices, AdamW the rest.
Not here: data, losses and loops (train_eagle.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from files.io import replace_file, write_text
from model import ModelConfig


def multiplies_bf16(device: str) -> bool:
    """Return whether a device multiplies in bf16: a GPU, or a processor with such products."""
    own = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return own or not device.startswith("cpu")


class Fp32Muon(torch.optim.Muon):
    """Muon with products in fp32: those of bf16 take 14 times as long where there are none."""

    @torch.no_grad()
    def step(self) -> None:
        """Step down the gradients, with Nesterov momentum. Writes: the parameters."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(momentum, group["momentum"])
                wide = x if len(x) <= x.shape[1] else x.T
                wide = wide / wide.norm().clamp(min=group["eps"])
                a, b, c = group["ns_coefficients"]
                for _ in range(group["ns_steps"]):
                    gram = wide @ wide.T
                    wide = torch.addmm(
                        wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a
                    )
                x = wide if len(x) <= x.shape[1] else wide.T
                rate = 0.2 * math.sqrt(max(x.shape)) * group["lr"]  # match_rms_adamw
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(x, alpha=-rate)


def make_optimizers(
    model: torch.nn.Module, config: Any, is_matrix: Callable[[str], bool]
) -> list[torch.optim.Optimizer]:
    """Make AdamW for everything, or with `--optimizer muon` Muon for matrices, AdamW for the rest.

    is_matrix: true for the name of a hidden matrix, not a table; stacks of matrices are AdamW's
    Source of Muon: Keller Jordan et al. 2024, with the update size of AdamW.
    """
    large = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    matrices = [p for n, p in large if is_matrix(n) and p.dim() == 2]
    tables = [p for n, p in large if not is_matrix(n) or p.dim() > 2]
    small = [p for p in model.parameters() if p.dim() < 2]
    muon = config.optimizer == "muon"
    decayed = tables if muon else tables + matrices
    groups = [{"params": small, "weight_decay": 0.0}]
    if decayed:
        groups.append({"params": decayed})
    decay = config.weight_decay
    adamw = torch.optim.AdamW(
        groups, lr=config.lr, betas=(0.9, 0.95), weight_decay=decay, fused=True
    )
    if not muon:
        return [adamw]
    kind = torch.optim.Muon if multiplies_bf16(config.device) else Fp32Muon
    rule = "match_rms_adamw"
    return [adamw, kind(matrices, lr=config.muon_lr, weight_decay=decay, adjust_lr_fn=rule)]


class Schedule:
    """Linear warm-up, then cosine down to 4 %, of every learning rate in some optimizers."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], steps: int, warmup: int):
        self.optimizers = optimizers
        self.steps = steps
        self.warmup = warmup
        self.peaks = [[group["lr"] for group in o.param_groups] for o in optimizers]

    def set(self, step: float) -> None:
        """Set the learning rates of a position, in steps."""
        share = lr_share(step, self.steps, self.warmup)
        for optimizer, peaks in zip(self.optimizers, self.peaks):
            # loading a state replaces the groups
            for group, peak in zip(optimizer.param_groups, peaks):
                group["lr"] = peak * share


def update(module: torch.nn.Module, optimizers: list, loss: Tensor, clip: float) -> None:
    """Step the optimizers down the gradient of `loss`, clipped by norm. Writes: the module."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def lr_share(step: float, steps: int, warmup: int) -> float:
    """Return the share of a peak rate: linear warm-up, then cosine down to 4 %."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.04 + 0.96 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class TrainingProgress(NamedTuple):
    """The place of a run in its training."""

    step: int  # steps done
    position: float  # in the schedule of the learning rates
    curve: list[dict]


def save_state(
    file: Path, module: torch.nn.Module, optimizers: list, place: TrainingProgress
) -> None:
    """Save the state that a stopped run resumes from. Writes: `file`."""
    state = {
        "weights": module.state_dict(),
        "optimizers": [o.state_dict() for o in optimizers],
        "step": place.step,
        "position": place.position,
        "curve": json.dumps(place.curve),
    }
    replace_file(file, lambda path: torch.save(state, path))


def load_state(
    file: Path, module: torch.nn.Module, optimizers: list, device: str
) -> TrainingProgress:
    """Load a state of `save_state`. Writes: the module, the optimizers."""
    state = torch.load(file, map_location=device, weights_only=True)
    module.load_state_dict(state["weights"])
    for optimizer, saved in zip(optimizers, state["optimizers"]):
        optimizer.load_state_dict(saved)
    return TrainingProgress(state["step"], state["position"], json.loads(state["curve"]))


def shape_keys(c: ModelConfig) -> dict:
    """Return the keys of config.json that name the shape of a model."""
    return {
        "hidden_act": "silu",
        "hidden_size": c.dim,
        "intermediate_size": c.ffn_dim,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": c.max_context,
        "tie_word_embeddings": False,
    }


def write_checkpoint(out: Path, tensors: dict[str, Tensor], config: dict, info: dict) -> None:
    """Write model.safetensors, config.json and training.json."""
    replace_file(
        out / "model.safetensors", lambda p: save_file(tensors, p, metadata={"format": "pt"})
    )
    write_text(str(out / "config.json"), json.dumps(config, indent=2))
    write_text(str(out / "training.json"), json.dumps(info, indent=1))
