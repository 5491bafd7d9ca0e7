"""Train Medusa's or Hydra's heads for any target, on the data and features of train_eagle.py.

    python scripts/train/train_heads.py --method medusa --checkpoint DIR --data A.jsonl --out HEADS
    python scripts/train/train_heads.py --method hydra --prefix_attention --out HEADS ...

Data, features, optimizers, evaluation and `--resume` are those of train_eagle.py; the losses are in
head_losses.py. The files are in the official layout, with the levels' alpha in training.json.
Differences from the official code: LM heads are the target's unless `--lm_heads own` (four of them
are most of a head's bytes and time), Medusa's loss decays by level as in the paper, and there is
no dropout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from cli.io import replace_file, write_text
from cli.parsing import option, require
from extras.hydra_draft import HydraHeads
from extras.medusa_draft import MedusaHeads
from hf.token_heads import TokenHeads, hydra_names, medusa_names
from hf.weights import export_weights
from model import DTYPES, Linear, ModelConfig, Transformer
from quantize import QuantLinear
from scripts.train.acceptance import Drafted
from scripts.train.feature_cache import Features
from scripts.train.head_losses import draft_levels, level_losses
from scripts.train.losses import ScaledLinear, plain_copy
from scripts.train.train_eagle import (
    Example,
    Method,
    TrainOptions,
    batches,
    run,
)

DECAY = {"medusa": 0.8, "hydra": 1.0}  # of a level's weight, for each level before it


@dataclass
class HeadConfig(TrainOptions):
    """Options of training Medusa's or Hydra's heads."""

    method: str = option("medusa", "of the heads", tuple(DECAY))
    heads: int = option(4, "drafted levels", least=1, most=63)
    layers: int = option(1, "residual blocks of a head", least=1)
    prefix_attention: bool = option(False, "a layer of attention before the heads (Hydra++)")
    lm_heads: str = option(
        "target", "own, as in the papers, or the target's, which are small files", ("own", "target")
    )

    def check(self) -> None:
        """Check the options. Raises: ValueError for one without effect, too."""
        super().check()
        fault = "--prefix_attention belongs to --method hydra; drop it"
        require(self.method == "hydra" or not self.prefix_attention, fault)

    @property
    def losses(self) -> dict[str, float]:
        """The names of the losses in the curve, and their weights."""
        return {f"entropy {i}": DECAY[self.method] ** i for i in range(self.heads)}


class TokenTraining:
    """The parts of training that depend on the kind of head, as `train_eagle.Method` has them."""

    def __init__(self, config: HeadConfig):
        self.config = config
        self.layer: ModelConfig | None = None  # of the target

    def make_head(
        self, config: HeadConfig, target: Transformer, examples: list[Example]
    ) -> MedusaHeads | HydraHeads:
        """Make heads whose first outputs are the feature itself, normed behind a prefix layer.

        Raises: ValueError for a prefix layer beside a mixture of experts.
        """
        c = target.config
        fault = "--prefix_attention makes a layer of the target's shape, which has no experts"
        require(not config.prefix_attention or not c.n_experts, f"{fault}; drop it")
        prefix = replace(c, n_layers=1) if config.prefix_attention else None
        own = config.lm_heads == "own"
        shape = TokenHeads(config.heads, config.layers, c.dim, c.vocab_size, own, prefix=prefix)
        kind = MedusaHeads if config.method == "medusa" else HydraHeads
        heads = kind(shape)
        start_as_identity(heads, target)
        self.layer = c
        return heads.to(target.norm.weight.device)

    @torch.no_grad()
    def prepare(
        self,
        config: HeadConfig,
        target: Transformer,
        heads: nn.Module,
        examples: list[Example],
        features: Features,
    ) -> None:
        """Scale the inputs of the first layers, as `losses.scale_inputs`. Writes: heads."""
        tokens, _, number = next(batches(examples, config, 0))
        tokens = tokens.to(config.device)
        feature = features.of(tokens, number).float()
        if config.prefix_attention:
            steps = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            feature = heads.attend(feature, steps, None, None)
        of_feature = scale_of(feature)
        if config.method == "medusa":
            heads.first = ScaledLinear(heads.first, of_feature)
            return
        of_token = scale_of(target.embedding(tokens).float())
        for i, mlp in enumerate(heads.mlps):
            mlp[0] = ScaledLinear(mlp[0], torch.cat((of_feature, *[of_token] * (i + 1))))

    def losses_of(
        self, config: HeadConfig, heads: nn.Module, target: Transformer
    ) -> Callable[..., tuple[Tensor, ...]]:
        """Return a function of a batch and the step's number -> `config.losses`."""

        def losses(batch: tuple[Tensor, ...], step: int) -> tuple[Tensor, ...]:
            return level_losses(config.method, heads, target, batch[:3])

        return losses

    def draft(self, heads: nn.Module, target: Transformer, tokens: Tensor) -> Drafted:
        """Draft chains from every position of a sequence. tokens: [1, T]"""
        return draft_levels(self.config.method, heads, target, tokens)

    def save_head(self, heads: nn.Module, config: HeadConfig, info: dict) -> None:
        """Write the official layout."""
        out = Path(config.out)
        write_heads(out, plain_copy(heads), self.layer, config.dtype)
        write_text(str(out / "training.json"), json.dumps(info, indent=1))


def scale_of(x: Tensor) -> Tensor:
    """Return the root mean square of each channel: [B, T, F] -> [F]."""
    return x.flatten(0, 1).square().mean(0).sqrt().clamp(min=1e-6)


@torch.no_grad()
def start_as_identity(heads: MedusaHeads | HydraHeads, target: Transformer) -> None:
    """Set the weights of new heads: blocks begin as the identity, LM heads as the target's.

    The linear residual of Hydra's first block passes the feature on. Writes: heads.
    """
    own = target.lm_head
    table = own.dequantize() if isinstance(own, QuantLinear) else own.weight
    for lm_head in heads.lm_heads:
        lm_head.weight.copy_(table)
        if lm_head.bias is not None:
            lm_head.bias.zero_()
    blocks = heads.first if isinstance(heads, MedusaHeads) else heads.mlps
    for part in (blocks, getattr(heads, "deeper", None)):
        for module in part.modules() if part else ():
            if isinstance(module, Linear):
                module.weight.zero_()
                module.bias.zero_()
    if isinstance(heads, HydraHeads) and heads.prefix:
        for layer in (heads.prefix[0].attention.wo, heads.prefix[0].ffn.w2):
            layer.weight.zero_()
    dim = target.config.dim
    for mlp in getattr(heads, "mlps", ()):
        mlp[0].weight[dim:].normal_(std=0.02)
        mlp[0].weight[dim:, :dim] += torch.eye(dim)


def write_heads(out: Path, heads: MedusaHeads | HydraHeads, layer: ModelConfig, dtype: str) -> None:
    """Write the weights and config.json of heads, in their official layout.

    layer: the target's config, of the prefix layer; dtype: of the weights
    """
    shape = heads.config
    method = "medusa" if isinstance(heads, MedusaHeads) else "hydra"
    names = medusa_names(shape) if method == "medusa" else hydra_names(shape)
    tensors = export_weights(heads, names, layer, DTYPES[dtype])
    keys: dict[str, Any] = {
        f"{method}_num_heads": shape.heads,
        f"{method}_num_layers": shape.layers,
        "draft_sharpness": shape.sharpness,
        "torch_dtype": dtype,
    }
    if method == "medusa":
        if not shape.own_lm_heads:
            keys["version"] = "2"
        file = out / "medusa_lm_head.safetensors"
        replace_file(file, lambda p: save_file(tensors, p, metadata={"format": "pt"}))
    else:
        keys["hydra_head_arch"] = "prefix-mlp" if shape.prefix else "mlp"
        keys["grounded_heads"] = True
        if not shape.own_lm_heads:
            keys["hydra_lm_head"] = "target"
        replace_file(out / "hydra_lm_head.pt", lambda p: torch.save(tensors, p))
    write_text(str(out / "config.json"), json.dumps(keys, indent=2))


def method_of(config: HeadConfig) -> Method:
    """Return the parts of training that the options name."""
    training = TokenTraining(config)
    return Method(
        training.make_head,
        training.prepare,
        training.losses_of,
        training.draft,
        training.save_head,
    )


def main() -> None:
    run(HeadConfig, "train_heads.py", __doc__, method_of)


if __name__ == "__main__":
    main()
