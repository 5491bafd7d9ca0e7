"""Distil a small draft model from a target, on the data and features of train_eagle.py.

    python scripts/train/distill.py --checkpoint DIR --data A.jsonl --out DRAFT
    python generate.py --checkpoint DIR --draft model --draft_checkpoint DRAFT

The draft model is the target's first layers under its embedding, last norm and LM head, of which
the tables stay as they are. Its loss is a divergence between the target's distribution and its own
at the marked tokens; the texts are the target's own answers. Data, features, optimizers, evaluation
and `--resume` are those of train_eagle.py; the files are a Hugging Face directory.
Source: DistillSpec (arXiv 2310.08461), section 4. Difference: the texts are the target's only.
Trade-off: a table as wide as the target's makes a pass dear, and needs no training.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from cli.parsing import option, require
from drafters import DraftVocab
from hf.config import read_raw
from hf.weights import export_weights, weight_names
from model import DTYPES, ModelConfig, Transformer
from quantize import QuantLinear
from scripts.train import training
from scripts.train.acceptance import ALPHAS, Drafted
from scripts.train.train_eagle import Method, TrainOptions, run

DIVERGENCES = ("forward", "reverse", "tv")


@dataclass
class DistillConfig(TrainOptions):
    """Options of distilling a draft model."""

    layers: int = option(2, "of the draft model, the target's first", least=1)
    divergence: str = option(
        "forward",
        "between the target's p and the draft's q: forward is KL(p, q), reverse KL(q, p), tv the "
        "total variation, which is the share of drafts that accept=residual rejects",
        DIVERGENCES,
    )

    losses = {"entropy 0": 1.0}  # the divergence


@dataclass(frozen=True)
class DraftConfig:
    """The shape of a draft model, and the sharpness that its scores are fitted with."""

    model: ModelConfig
    sharpness: float = 1.0


class DraftModel(nn.Module):
    """Layers and a norm of its own; the tables are the target's."""

    aux_layers = ()

    def __init__(self, target: Transformer, layers: int):
        """Copy the target's first layers. Raises: ValueError for layers that cannot be trained."""
        super().__init__()
        c = target.config
        fault = f"--layers must be fewer than the target's {c.n_layers}; it is {layers}"
        require(layers < c.n_layers, fault)
        packed = any(isinstance(module, QuantLinear) for module in target.modules())
        require(not packed, "--checkpoint is quantized; distil from the floats that it was made of")
        self.config = DraftConfig(replace(c, n_layers=layers))
        self.layers = copy.deepcopy(target.layers[:layers])
        self.norm = copy.deepcopy(target.norm)
        self.requires_grad_(True)

    def logits(self, target: Transformer, tokens: Tensor, rows: Tensor | None = None) -> Tensor:
        """Score the token after each one of a text.

        tokens: [B, T]; rows: [B, T] bool, those to score; None: all
        Returns: [M, V], or [B, T, V].
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        with torch.no_grad():
            x, rope = target.embed(tokens, positions)
        hidden = self.layers(x, rope, self.norm)
        return target.logits(hidden if rows is None else hidden[rows])


def divergence(kind: str, p: Tensor, q: Tensor) -> Tensor:
    """Return a divergence of distributions, given as logits: [M, V] each -> [M]."""
    log_p = p.log_softmax(-1)
    log_q = q.log_softmax(-1)
    if kind == "forward":
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if kind == "reverse":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def losses_of(config: DistillConfig, model: DraftModel, target: Transformer) -> Callable:
    """Return a function of a batch and the step's number -> the mean divergence."""

    def losses(batch: tuple[Tensor, ...], step: int) -> tuple[Tensor, ...]:
        tokens, mask, features, _ = batch
        rows = mask.roll(-1, 1)  # a row scores the token after it
        rows[:, -1] = False
        with torch.no_grad():
            p = target.logits(features[rows])
        found = divergence(config.divergence, p, model.logits(target, tokens, rows))
        return (found.sum() / rows.sum().clamp(min=1),)

    return losses


def draft(model: DraftModel, target: Transformer, tokens: Tensor) -> Drafted:
    """Draft a chain from every position of a sequence, as `acceptance.chains`.

    The model reads the true tokens: a step counts only behind steps that drafted them.
    tokens: [1, T], written by the target
    """
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    features = target(tokens, steps[None])
    z = model.logits(target, tokens)[0, 1:-1]  # [T - 2, V], of tokens 2, 3, ..
    ok = (z.argmax(-1) == tokens[0, 2:]).unfold(0, ALPHAS, 1)  # [R, ALPHAS]
    vocab = DraftVocab(target.config.vocab_size)
    return Drafted(ok, [z[s : s + len(ok)] for s in range(ALPHAS)], features, vocab)


def save(model: DraftModel, target: Transformer, config: DistillConfig, info: dict) -> None:
    """Write a Hugging Face directory without a tokenizer: it is the target's."""
    out = Path(config.out)
    whole = nn.Module()
    whole.embedding = target.embedding
    whole.lm_head = target.lm_head
    whole.layers = model.layers
    whole.norm = model.norm
    c = model.config.model
    tensors = export_weights(whole, weight_names(c), c, DTYPES[config.dtype])
    keys = dict(read_raw(Path(config.checkpoint)))
    keys |= {
        "num_hidden_layers": c.n_layers,
        "torch_dtype": config.dtype,
        "draft_sharpness": model.config.sharpness,
    }
    if "layer_types" in keys:
        keys["layer_types"] = keys["layer_types"][: c.n_layers]
    training.write_checkpoint(out, tensors, keys, info)


def method_of(config: DistillConfig) -> Method:
    """Return the parts of training."""
    targets = []  # the target, known when the model is made; the files need its tables

    def make(config: DistillConfig, target: Transformer, examples: list) -> DraftModel:
        targets.append(target)
        fault = "--checkpoint is a mixture of experts; distil from a dense model"
        require(not target.config.n_experts, fault)
        return DraftModel(target, config.layers)

    def write(model: DraftModel, config: DistillConfig, info: dict) -> None:
        save(model, targets[0], config, info)

    return Method(make, lambda *_: None, losses_of, draft, write)


def main() -> None:
    run(DistillConfig, "distill.py", __doc__, method_of)


if __name__ == "__main__":
    main()
