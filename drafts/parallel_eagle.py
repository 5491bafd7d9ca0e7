"""P-EAGLE: an EAGLE-3 head that drafts all levels in one pass, by mask tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from draft_tree import Frontier
from drafters import DraftInputs, DraftState
from eagle_draft import EagleDrafter
from kv_cache import Window, causal_window


class ParallelEagleDrafter(EagleDrafter):
    """Drafts all levels in one pass: mask tokens stand for the nodes behind the root.

    They have a feature of their own, and see the confirmed tokens and the masks before them. The
    nodes of a level share its scores.
    Source: P-EAGLE, as in the package speculators 0.9.0, models/peagle.
    """

    def __init__(self, *inputs: Any, **options: Any):
        """Attach a head, as `EagleDrafter`."""
        super().__init__(*inputs, **options)
        eagle3 = self.head.config.eagle3
        before = eagle3.target_dim if eagle3.aux_layers else 0  # see Eagle3Head.make_steps
        features = nn.functional.pad(self.head.mask_hidden.detach(), (before, 0))
        self.masked = self.head.project(features[None, None]).to(self.head.dtype)  # [1, 1, F]

    def root_output(self, state: DraftState, inputs: DraftInputs) -> tuple[Tensor, Tensor]:
        """Return the outputs of all levels, [B, D, F], and the first scratch slot.

        Writes: slots length .. length + D - 2.
        """
        if self.tree.depth == 1:
            return super().root_output(state, inputs)
        window = causal_window(state.length, self.tree.depth - 1, backend=self.backend)
        tokens = torch.full_like(window.slots, self.head.config.eagle3.mask_token)
        first = torch.zeros_like(tokens)  # the same feature for all
        masks = Frontier(first, tokens, first, first.float(), window.mask)
        masked = self.masked.expand(len(tokens), -1, -1)
        out = super().forward_nodes(state, masks, masked, window.slots, window)
        return torch.cat((state.hidden, out), 1), state.length

    def forward_nodes(
        self, state: DraftState, frontier: Frontier, out: Tensor, positions: Tensor, window: Window
    ) -> Tensor:
        return out

    def logits(self, out: Tensor, level: int) -> Tensor:
        return super().logits(out[:, level, None], level)
