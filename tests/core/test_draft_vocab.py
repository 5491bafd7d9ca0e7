"""Drafting some tokens only (d2t): against whole scores with the others masked, and LM heads of fewer rows.

That the output stays vanilla's is tested in test_lossless.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from backends.weight import unpack
from draft_tree import EAGLE1_PATHS, DynamicTree, StaticTree
from drafters import DraftVocab
from eagle_draft import EagleDrafter
from files.weights import load_model
from heads import assert_vanillas_tokens
from helpers import (
    GOLDEN,
    PROMPTS,
    decode,
    engine_for,
    golden_head,
    golden_target,
    slow,
    trimmed_head,
    with_children,
)
from quantize import Quantization
from run.heads import draft_lm_head
from run.options import DEMO, Sampling

TREES = {
    "chain": StaticTree.chain(5),
    "static": StaticTree(EAGLE1_PATHS),
    "dynamic": DynamicTree(depth=4, topk=6, size=30),
}
KEPT = torch.tensor(
    sorted(torch.randperm(97, generator=torch.Generator().manual_seed(0))[:40].tolist())
)
SMALL = [Quantization("int8"), Quantization("int4", 32)]  # formats that fit the golden target


# ----------------------------------------------------------------------------------------- drafting


class Masked(nn.Module):
    """The plain way to trim: score every token, then forbid those that are not kept."""

    def __init__(self, lm_head: nn.Module):
        super().__init__()
        self.lm_head = lm_head

    def forward(self, x: Tensor) -> Tensor:
        z = self.lm_head(x).float()
        return torch.full_like(z, float("-inf")).index_copy(-1, KEPT, z[..., KEPT])


def run(tree: str, rule: Sampling, children: str, lm_head: nn.Module, vocab: DraftVocab | None):
    target, accept = golden_target(), "residual" if children == "sampled" else "exact"
    drafter = EagleDrafter(golden_head(), target, TREES[tree], lm_head, vocab=vocab)
    drafter = with_children(drafter, children)
    options = {
        "accept": accept,
        "max_new_tokens": 20,
        "ignore_eos": True,
        "batch_size": 2,
        "seed": 3,
    }
    options |= rule._asdict()
    return decode(engine_for(target, drafter, **options), *PROMPTS)


def drafted(session) -> tuple[list[dict], list[float]]:
    """The trace with the tokens of real nodes only, and the values of these apart: padding is any token."""
    values = [line["values"] for line in session.trace]
    for line, known in zip(session.trace, values):
        line["draft_tokens"] = [t for t, v in zip(line["draft_tokens"], known) if v is not None]
    lines = [{k: v for k, v in line.items() if k != "values"} for line in session.trace]
    return lines, [v for known in values for v in known if v is not None]


RULES = [Sampling(), Sampling(1.0), Sampling(0.6, top_k=12, top_p=0.9)]


CASES = [(tree, "noise", RULES[0]) for tree in TREES]  # every pair of two arguments
CASES += [("dynamic", "noise", rule) for rule in RULES[1:]]
CASES += [(tree, "sampled", rule) for tree in ("static", "chain") for rule in RULES[1:]]
CASES += slow((tree, "noise", rule) for tree in ("static", "chain") for rule in RULES[1:])


@pytest.mark.parametrize(("tree", "children", "rule"), CASES, ids=str)
def test_trimmed_drafts_are_the_masked_ones(tree, children, rule):
    """Tokens, parents and values of every node of every cycle: the noise that each token gets is its own."""
    plain = run(tree, rule, children, Masked(golden_target().lm_head), None)
    vocab = DraftVocab(97, KEPT)
    trimmed = run(tree, rule, children, draft_lm_head(golden_target(), None, KEPT), vocab)
    assert trimmed.history == plain.history and sum(trimmed.stats.accept_lengths) > 0
    (ours, our_values), (theirs, their_values) = drafted(trimmed), drafted(plain)
    assert ours == theirs and our_values == pytest.approx(their_values, abs=1e-4)


# ----------------------------------------------------------------------------------------- LM heads


@pytest.mark.parametrize("quant", [None, *SMALL], ids=lambda q: q.format if q else "float")
@pytest.mark.parametrize("held", [None, *SMALL], ids=lambda q: q.format if q else "float")
def test_trimming_and_rounding_combine(held, quant):
    """Trimmed and rounded, in whatever order: the codes are rows of the whole copy's."""
    target = load_model(GOLDEN / "models/target_llama_mha", quant=held)
    trimmed, whole = (draft_lm_head(target, quant, ids) for ids in (KEPT, None))
    whole = whole or target.lm_head
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        trimmed(x), whole(x)[:, KEPT], atol=1e-6 * (not whole.packed), rtol=0
    )
    assert (trimmed.in_features, trimmed.out_features) == (64, 40) and trimmed.fp32_out
    if whole.packed:
        for some, all in zip(unpack(trimmed.record), unpack(whole.record)):
            assert torch.equal(some, all[KEPT])
    else:
        assert torch.equal(trimmed.weight, whole.weight[KEPT]) and not trimmed.weight.requires_grad


def test_the_demo_with_a_quarter_of_its_vocabulary(tmp_path):
    kept = torch.arange(1024) + 2
    head = trimmed_head(DEMO + "-eagle", tmp_path / "head", kept)
    files = {"checkpoint": DEMO, "head": head, "tree": "dynamic"}
    engine = assert_vanillas_tokens(files, ["def read_lines(path):"], "fp32", 0.0, 1.5)
    assert engine.drafter.lm_head.out_features == 1024
    assert torch.equal(engine.drafter.vocab.ids, kept)
