"""Cuts, biases and penalties: requests change the distribution by more than the flat files do.

`Shaping` is an `Engine.shaping`, which sampling.py asks where a sequence has such parameters. The
order of everything is: biases and penalties (penalties.py), temperature, top-n-sigma, top-k,
typical-p, top-p, min-p, XTC. `cut_shaped` does all cuts in one pass (cuts.py).
- top-n-sigma keeps the scores within some standard deviations of the best (arXiv 2411.07641).
- typical-p keeps the tokens of the most usual information (arXiv 2202.00666).
- XTC drops, at some of the draws, all but the least likely of the likely tokens (p-e-w,
  text-generation-webui 6335). Its draws have noise of their own.
Drafters know the cuts but XTC. They do not know the penalties, which costs some accepted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draft_tree import DecodedTokens, DraftTree
from drafts.noise import XTC, uniforms
from drafts.penalties import Penalties
from reference import Backend
from run.options import Sampling
from runtime import replace_fields
from sampling import SamplingTensors, may_be


class ShapedRows(NamedTuple):
    """The further parameters of B sequences."""

    sigmas: Tensor  # [B] fp32, top-n-sigma; infinity keeps all
    typical: Tensor  # [B] fp32, 1 keeps all
    xtc_probability: Tensor  # [B] fp32
    xtc_threshold: Tensor  # [B] fp32
    answer: Tensor  # [B] int64, index of the answer's first token in the text
    penalties: Any = ()  # `penalties.Rows`


class Shaping:
    """The cuts, biases and penalties of an engine (`Engine.shaping`)."""

    def __init__(self, device: torch.device | str = "cpu", penalties: Penalties | None = None):
        """penalties: None: scores stay as they are"""
        self.device = device
        self.penalties = penalties

    def check(self, own: Sampling) -> None:
        """Check that the tokens that parameters name exist. Raises: ValueError."""
        if self.penalties is not None:
            self.penalties.check(own)

    def rows(self, each: Sequence[Sampling]) -> ShapedRows:
        """Make the parameters of B sequences."""
        own = [s if s.temperature else Sampling(1.0) for s in each]
        sigmas = [s.top_n_sigma if s.top_n_sigma > 0 else math.inf for s in own]

        def numbers(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=self.device)

        return ShapedRows(
            numbers(sigmas),
            numbers([s.typical_p for s in own]),
            numbers([s.xtc_probability for s in own]),
            numbers([s.xtc_threshold for s in own]),
            torch.zeros(len(own), dtype=torch.long, device=self.device),
            self.penalties.rows(each) if self.penalties is not None else (),
        )

    def at_nodes(
        self, rule: SamplingTensors, draws: Tensor, text: DecodedTokens, tree: DraftTree
    ) -> NodeShaping:
        """Return the changes for the token after every node of a tree.

        rule: with `rows` as its `shaped`; draws: [B] int64, of the token after the root
        text: all tokens up to the root
        """
        draws = draws[:, None] + tree.depths
        return NodeShaping(xtc_at(rule, draws), self.penalties, rule.shaped, text, tree)

    def rescore(self, scores: Tensor) -> Tensor:
        """Return the scores, [B, N, V] fp32, which no text changes here."""
        return scores

    def cut(self, scores: Tensor, rule: SamplingTensors, backend: Backend) -> Tensor:
        """Do as `sampling.process`, with further cuts."""
        return cut(scores, rule, backend)


class NodeShaping(NamedTuple):
    """The same for the token after every node of a tree."""

    xtc: Tensor  # [B, N] fp32, the threshold of XTC at the draws that it acts on, else infinity
    penalties: Penalties | None = None
    rows: ShapedRows | None = None  # of the penalties
    text: DecodedTokens | None = None
    tree: DraftTree | None = None

    def rescore(self, scores: Tensor) -> Tensor:
        """Return changed scores, [B, N, V] fp32. Writes: scores."""
        if self.penalties is None:
            return scores
        own = (self.rows.penalties, self.rows.answer)
        return self.penalties.rescore(scores, *own, self.text, self.tree)

    def cut(self, scores: Tensor, rule: SamplingTensors, backend: Backend) -> Tensor:
        """Do as `sampling.process`, with further cuts."""
        return cut(scores, rule, backend, self.xtc)


def cut(
    scores: Tensor, rule: SamplingTensors, backend: Backend, xtc: Tensor | None = None
) -> Tensor:
    """Apply the temperature and all cuts, as `sampling.process`. xtc: of `NodeShaping`"""
    rows: ShapedRows = rule.shaped
    own = (rule.temperature, rule.top_k, rule.top_p, rule.margin)
    return backend.cut_shaped(scores, *own, rows.sigmas, rows.typical, xtc)


def for_model(
    vocab: int, device: torch.device, tokenizer: Any, eos_ids: tuple[int, ...]
) -> Shaping:
    """Return the shaping of a model's distribution. The inputs: of `Penalties`"""
    return Shaping(device, Penalties(vocab, device, tokenizer, eos_ids))


def xtc_at(rule: SamplingTensors, draws: Tensor) -> Tensor:
    """Return the threshold of XTC at every draw, [B, N] fp32; infinity where it does not act.

    draws: [B, N] int64
    """
    rows: ShapedRows = rule.shaped
    threshold = torch.full(draws.shape, float("inf"), device=draws.device)  # [B, N]
    if may_be(rows.xtc_probability > 0):
        acts = uniforms(rule, draws, 1, XTC)[:, :, 0]
        acts = acts < rows.xtc_probability[:, None]
        threshold = torch.where(acts, rows.xtc_threshold[:, None], threshold)
    return threshold


def shaped_rule(
    each: Sequence[Sampling], draws: Tensor, device: torch.device | str = "cpu", seed: int = 0
) -> SamplingTensors:
    """Make the rule of the tokens of some draws, with all cuts and without penalties.

    draws: [B, N] int64
    """
    rule = SamplingTensors.from_params(each, device, seed, Shaping(device))
    return replace_fields(rule, shaping=NodeShaping(xtc_at(rule, draws)))
