"""Heads of EAGLE-3 in layouts beside the official one: further norms, own embeddings, P-EAGLE.

`VariantHead` also has the official layout, where all of `Eagle3Variant` is as by default.
Not here: names and keys of files (heads.py), the drafter of P-EAGLE (drafts/parallel_eagle.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from eagle_draft import Eagle3, Eagle3Head, EagleConfig
from files.heads import MASK, make_head
from steps import Columns, Copy, Norm, Project, Rows, Step


@dataclass(frozen=True)
class Eagle3Variant(Eagle3):
    """The parts of a head in any layout of version 3. Its `aux_layers` may be none.

    Then it takes the target's features, and there is no fc.
    """

    norm_before_fc: bool = False  # a norm over all that fc fuses
    fc_norm: bool = False  # a norm over each of them
    norm_before_residual: bool = False  # the residual stream begins with the normed hidden state
    # "logits": the last norm is for the logits only; "fed": also for the hidden state that is fed
    # back; "none": there is no last norm
    last_norm: str = "logits"
    embedding: str = ""  # the tensor of its own embedding; "": the target's
    lm_head: str = "lm_head.weight"  # of its own LM head; "": the target's
    mask_token: int | None = None  # P-EAGLE: the token of the levels below the first


@dataclass(frozen=True)
class PartNorm(Norm):
    """Norm one of several equal parts of every row of `h`, side by side. dim: of a part"""

    source: str = "h"
    part: int = 0
    parts: int = 1

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        parts = list(rows.h.chunk(self.parts, -1))
        parts[self.part] = getattr(layer, self.name)(parts[self.part])
        return rows.put("h", torch.cat(parts, -1))


class VariantHead(Eagle3Head):
    """A head in any layout of version 3."""

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        model = config.model
        eagle3 = config.eagle3
        if eagle3.last_norm != "logits":
            self.output_norm = nn.Identity()
        if eagle3.embedding:
            zeros = torch.zeros(model.vocab_size, model.dim)
            self.embedding = nn.Embedding.from_pretrained(zeros)
        if not eagle3.lm_head:
            self.lm_head = None
        if eagle3.mask_token is not None:
            width = len(eagle3.aux_layers) or 1
            self.mask_hidden = nn.Parameter(torch.zeros(width * eagle3.target_dim))

    def make_steps(self) -> None:
        """Make the lists of steps. Writes: inputs, first, last."""
        super().make_steps()
        eagle3 = self.config.eagle3
        dim = self.config.model.dim
        eps = self.config.model.norm_eps
        parts = len(eagle3.aux_layers)
        width = parts * eagle3.target_dim
        inputs: list[Step] = [Columns(eagle3.target_dim if parts else 0)]
        if eagle3.norm_before_fc:
            inputs.append(Norm("input_norm", width, eps, source="h"))
        if eagle3.fc_norm:
            each = [PartNorm(f"fc_norm_{i}", eagle3.target_dim, eps, part=i) for i in range(parts)]
            inputs += [replace(norm, parts=parts) for norm in each]
        if parts:
            inputs.append(Project("fc", width, dim, self.config.fc_bias))
        self.inputs = tuple(inputs)
        if eagle3.norm_before_residual:
            norm, _, *rest = self.first
            self.first = (norm, Copy("normed", "stream"), *rest)
        if eagle3.last_norm == "fed":
            self.last = (Norm("norm", dim, eps),)

    @property
    def official(self) -> dict[str, str]:
        """The official names of the modules beside the layers."""
        eagle3 = self.config.eagle3
        norms = {f"fc_norm_{i}": f"fc_norm.{i}" for i in range(len(eagle3.aux_layers))}
        tied = {"lm_head": eagle3.lm_head, "embedding": eagle3.embedding}
        further = {name: tensor.removesuffix(".weight") for name, tensor in tied.items()}
        return super().official | norms | further | {"input_norm": "input_norm", "norm": "norm"}

    def weight_names(self) -> dict[str, tuple[str, ...]]:
        masks = {MASK: (MASK,)} if self.config.eagle3.mask_token is not None else {}
        return super().weight_names() | masks


def head_names(config: EagleConfig) -> dict[str, tuple[str, ...]]:
    """Return `EagleHead.weight_names` of a head."""
    with torch.device("meta"):
        return make_head(config).weight_names()
