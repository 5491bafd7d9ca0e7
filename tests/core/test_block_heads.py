"""Block drafters and P-EAGLE: the official code's scores in every layout, training, and vanilla's tokens.

tests/cases/heads.py has the heads, and golden/block_heads their scores. test_lossless.py has more loops, tests/files/test_heads.py
damaged files.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.nn.functional as F

import heads
from backends.fusions import NEXT_READER, AddNorm, MergedModel
from draft_tree import DecodedTokens, DynamicTree, StaticTree
from drafters import DrafterUpdate, DraftInputs, RootOnly
from drafts.block_draft import UNSELECTED, BlockHead, load_head
from drafts.by_value import beside
from drafts.parallel_eagle import ParallelEagleDrafter
from eagle_draft import load_head as load_eagle
from heads import (
    BLOCKS,
    DRAFTED,
    LEVELS,
    TARGET,
    assert_vanillas_tokens,
    drafter_of,
    drafts,
    recorded,
    recorded_levels,
)
from helpers import (
    GOLDEN,
    PROMPTS,
    decode,
    engine_for,
    golden_target,
)
from scripts.train.losses import block_losses, pick_anchors
from scripts.train.train_block import BlockTrainConfig, draft_blocks, make_head
from scripts.train.train_block import write_files as write_trained

STEPS = 32  # of training
CHECKPOINT = str(GOLDEN / TARGET)
SETTINGS = {"max_new_tokens": 50, "ignore_eos": True, "seed": 7}
ORDER = DRAFTED.argsort()
# ------------------------------------------------------------------------------------------ scores


def made(path: Path, kind: str, changes: dict | None = None, tree=None, **tensors):
    """The drafter of a head that is written. Arguments: as for heads.write"""
    return drafter_of(heads.write(path / "head", BLOCKS[kind], changes, **tensors), tree)


@pytest.mark.parametrize("kind, changes, file, name", [
    ("DeepSpec dflash", {"num_hidden_layers": 8}, "trace", "dflash.logits"),  # where config.json counts the target's layers
    ("jetspec", {}, "trace", "jetspec.logits"),
    ("dflash", {}, "speculators", "dflash.logits"),  # a window, and some tokens, which are not in order in the file
    ("z-lab", {}, "speculators", "zlab.mixed"),  # windows count from each position
    ("z-lab", {"is_causal": False}, "speculators", "zlab.free"),  # and to both sides
])  # fmt: skip
def test_scores_are_the_official_ones(kind, changes, file, name, tmp_path):
    drafter = made(tmp_path, kind, changes)
    for number, (state, inputs) in enumerate(drafts(drafter)):
        want = recorded(file)[name][number]
        chain = want.argmax(-1)
        if drafter.vocab.ids is not None:
            assert drafter.vocab.ids.tolist() == DRAFTED[ORDER].tolist()
            want, chain = want[:, ORDER], DRAFTED[chain]
        assert (drafter.level_scores(state, inputs)[0] - want).abs().max() < 1e-4
        found = drafter.propose(state, inputs).tokens[0, 1:]
        assert kind == "z-lab" or found.tolist() == chain.tolist()


def of_pairs(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a head that change where its RoPE turns pairs of neighbours; heads have 16 elements."""
    return {
        name: x.unflatten(0, (-1, 2, 8)).transpose(1, 2).flatten(0, 2)
        for name, x in held.items()
        if ".q_" in name or ".k_" in name
    }


def test_a_head_whose_rope_turns_pairs_is_the_same_head(tmp_path):
    """LFM2.5's: SGLang's key."""
    want = made(tmp_path, "DeepSpec")
    pairs = of_pairs(BLOCKS["DeepSpec"].tensors)
    got = made(tmp_path, "DeepSpec", {"rope_is_neox_style": False}, **pairs)
    for name, weight in want.head.named_parameters():
        assert torch.equal(got.head.get_parameter(name), weight), name


def gate_of_dspark() -> dict[str, torch.Tensor]:
    draw = numpy.random.RandomState(6).standard_normal
    weight, bias = (torch.from_numpy(draw(shape)).float() for shape in ((32, 96), (32,)))
    return {"markov_head.gate_proj.weight": weight * 0.3, "markov_head.gate_proj.bias": bias}


@pytest.mark.parametrize("kind, file, name", [
    ("DeepSpec", "trace", "dspark"),  # a position predicts the token after its own; the tables are its own
    ("dspark", "speculators", "dspark"),  # its root is the bonus token: a position predicts its own token
    ("dspark", "speculators", "gated"),  # a level's state gates the row of the token before; the confidence reads it as it is
    ("dflash2", "speculators", "dflash2"),  # the best six tokens behind the token before; others are not drafted
    ("dspine", "speculators", "dspine"),  # the same, once the last layer knows the token before
])  # fmt: skip
def test_levels_behind_a_token_are_the_official_ones(kind, file, name, tmp_path):
    """The greedy chain, the scores of every level behind it, and the confidence, over some tokens or all."""
    gated = {"changes": {"markov_head_type": "gated"}} | gate_of_dspark() if name == "gated" else {}
    drafter = made(tmp_path, kind, **gated)
    official = recorded(file)
    for at, z, sure in recorded_levels(drafter, name, official):
        drafted = slice(None) if drafter.vocab.ids is None else ORDER
        if f"{name}.candidates" in official:
            best = official[f"{name}.candidates"][at]
            others = torch.ones(128, dtype=torch.bool).index_fill(0, best, False)
            assert z[others].max() < -1e29
            z, drafted = z[best], slice(None)
        assert (z - official[f"{name}.logits"][at][drafted]).abs().max() < 1e-4
        if f"{name}.confidence" in official:
            assert (sure - F.logsigmoid(official[f"{name}.confidence"][at])).abs().max() < 1e-5
    for number, (state, inputs) in enumerate(drafts(drafter) if kind == "dspine" else ()):
        unary = drafter.root_output(state, inputs)[0].scores[0]
        assert (unary - official["dspine.unary"][number]).abs().max() < 1e-4


def test_lilicorr_scores_the_lattice(tmp_path):
    """The pairs of the official module on the same candidates, and its greedy path."""
    drafter = made(tmp_path, "lilicorr")
    official = recorded("lilicorr")
    for number, (state, inputs) in enumerate(drafts(drafter)):
        out, _ = drafter.root_output(state, inputs)
        assert torch.equal(out.ids[0], official["candidates"][number])
        assert (out.pairs[0, 0] - official["start"][number]).abs().max() < 1e-4
        assert (out.pairs[0, 1:] - official["pairs"][number]).abs().max() < 1e-4
        path = drafter.propose(state, inputs).tokens[0, 1:]
        assert path.tolist() == official["tokens"][number].tolist()
    alone, _ = drafter.root_output(state._replace(hidden=torch.zeros(1, 1, 64)), inputs)
    assert (alone.pairs[0, 1:] - official["pairs.alone"]).abs().max() < 1e-4
    assert (alone.pairs - out.pairs).abs().max() > 0.1


@pytest.mark.parametrize("depth", [1, LEVELS])
def test_peagle_drafts_all_levels_in_one_pass(depth, tmp_path):
    """Its masks see the confirmed tokens and the masks before them."""
    target = golden_target(TARGET)
    head = load_eagle(heads.write(tmp_path / "head", BLOCKS["peagle"]), target)
    drafter = ParallelEagleDrafter(head, target, StaticTree.chain(depth))
    official = recorded("speculators")
    for number, (state, inputs) in enumerate(drafts(drafter)):
        out, _ = drafter.root_output(state, inputs)
        for level in range(depth):
            ours = drafter.logits(out, level)[0, 0]
            assert (ours - official["peagle.logits"][number, level, ORDER]).abs().max() < 1e-4
        chain = drafter.propose(state, inputs).tokens[0, 1:]
        best = official["peagle.logits"][number, :depth].argmax(-1)
        assert chain.tolist() == DRAFTED[best].tolist()


def test_factor_cap_and_scale(tmp_path):
    """Scores are multiplied, then capped; embeddings of the block are scaled."""
    plain, scale = (made(tmp_path, "z-lab", keys) for keys in ({}, {"input_embedding_scale": 8.0}))
    factor = made(tmp_path, "z-lab", {"output_multiplier": 0.5, "final_logit_softcapping": 3.0})
    for (state, inputs), (other, _) in zip(drafts(plain), drafts(factor)):
        want = 3 * torch.tanh(plain.level_scores(state, inputs) * 0.5 / 3)
        assert (factor.level_scores(other, inputs) - want).abs().max() < 1e-5
    tokens = torch.tensor([[5, 127]])
    ours, theirs = (drafter.head.embed(tokens, tokens, None).stream for drafter in (scale, plain))
    assert torch.equal(ours, theirs * 8)


@pytest.mark.parametrize("kind", ["jetspec", "dflash", "z-lab"])
def test_a_shallow_tree_has_the_scores_of_a_deep_one(kind, tmp_path):
    """A causal block runs fewer positions for it; any other needs those behind the tree, too."""
    deep, shallow = (made(tmp_path, kind, tree=StaticTree.chain(n)) for n in (5, 2))
    for state, root in drafts(deep):
        scores = shallow.level_scores(state, root)
        assert (scores[:, :2] - deep.level_scores(state, root)[:, :2]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark", "z-lab", "dspine"])
def test_merged_steps_compute_the_same(kind, tmp_path):
    """As CUDA merges them; a convolution takes rows that a norm has finished."""
    drafter = made(tmp_path, kind)
    head = drafter.head
    for state, inputs in drafts(drafter):
        want = drafter.run_block(state, inputs)
        head.program = MergedModel(head)
        steps = head.program.segments[0].steps
        readers = {step.reader for step in steps if isinstance(step, AddNorm)}
        assert readers <= ({""} if head.config.model.conv_taps else {"w13", NEXT_READER})
        assert (drafter.run_block(state, inputs) - want).abs().max() < 1e-5
        head.program = None


# ------------------------------------------------------------------------------------------- trees


def test_trees_that_auto_chooses_from_are_as_deep_as_their_nodes_reach(tmp_path):
    """Fewer nodes draft a shorter block; EAGLE's, whose levels each cost a pass, stay flat (test_by_value.py)."""
    drafter = made(tmp_path, "jetspec", {"block_size": 16}, DynamicTree(15, 4, 16))
    presets = beside(drafter, grows=False).presets
    shapes = [(preset.depth, preset.width, preset.size) for preset in presets]
    assert shapes == [(0, 0, 1), (3, 1, 4), (7, 3, 8), (15, 4, 16)]


# ---------------------------------------------------------------------------------------- training


@functools.cache
def trained(kind: str) -> tuple[BlockHead, list[float]]:
    """A drafter that has learnt the texts of `vanilla`, and its first and last losses."""
    torch.manual_seed(0)
    target = golden_target(TARGET)
    texts = vanilla(0.0) + vanilla(1.0)
    tokens = torch.tensor([text[: len(texts[0])] for text in texts])
    config = BlockTrainConfig(
        block_size=6,
        causal=kind == "jetspec",
        markov_rank=32 * (kind == "dspark"),
        ffn_dim=96,
        selector_rank=16 * (kind == "dflash2"),
    )
    examples = [SimpleNamespace(ids=text, mask=[True] * len(text)) for text in texts]
    head = make_head(config, target, examples)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    steps = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    with torch.no_grad():
        features = target(tokens, steps, aux_layers=head.aux_layers)
    optimizer = torch.optim.AdamW(head.parameters(), lr=8e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    shares = torch.tensor(list(config.losses.values()))
    curve = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 8e-3 * (1 - step / STEPS)
        anchors = pick_anchors(mask, 16, generator)
        losses = torch.stack(block_losses(head, target, (tokens, mask, features), anchors))
        optimizer.zero_grad()
        (losses * shares).sum().backward()
        optimizer.step()
        curve.append(losses.detach())
    return head.requires_grad_(False), [curve[0], curve[-1]]


@functools.cache
def vanilla(temperature: float) -> list[list[int]]:
    """Vanilla's texts of both prompts."""
    options = {"temperature": temperature, "batch_size": 2, **SETTINGS}
    session = decode(engine_for(golden_target(TARGET), RootOnly(), **options), *PROMPTS)
    return [session.history[row] for row in range(2)]


def trained_dir(path: Path, kind: str) -> Path:
    """Write a trained drafter as train_block.py does."""
    path.mkdir(exist_ok=True)
    write_trained(trained(kind)[0], path, "float32", {})
    return path


TRAINED = ("dflash", "jetspec", "dspark", "dflash2")


@pytest.mark.parametrize("kind", TRAINED)
def test_blocks_of_training_are_those_of_decoding(kind, tmp_path):
    """The scores of `draft_blocks` and the loss are what the drafter, read from its files, computes at each root."""
    head, (first, last) = trained(kind)
    assert (last < first - 0.2).all(), "every level has learnt"
    target = golden_target(TARGET)
    text = torch.tensor([vanilla(1.0)[1][:20]])
    drafted = draft_blocks(head, target, text)
    levels = head.config.levels
    path = trained_dir(tmp_path / "head", kind)
    drafter = drafter_of(path, StaticTree.chain(levels))
    assert drafter.head.config == replace(head.config, model=drafter.head.config.model)
    steps = torch.arange(text.shape[1])[None]
    features = target(text, steps, aux_layers=head.aux_layers)
    anchors = torch.tensor([[2, 9]])
    sums = torch.zeros(levels)
    for root in anchors[0].tolist():
        state = drafter.init(1, 64)
        count = torch.tensor([root])
        state = drafter.extend(state, DrafterUpdate(text[:, : root + 1], features[:, :root], count))
        out, _ = drafter.root_output(state, DraftInputs(None, DecodedTokens(text, count)))
        for level in range(levels):
            if head.config.scores_pairs:
                frontier = SimpleNamespace(tokens=text[:, root + level, None])
                out = drafter.forward_nodes(state, frontier, out, None, None)
            z = drafter.logits(out, level)[0, 0]
            assert (z - drafted.logits[level][root - 1]).abs().max() < 1e-3
            truth = text[0, root + level + 1]
            assert drafted.ok[root - 1, level] == (z.argmax() == truth)
            if kind == "dflash2":
                plain = out.scores[0, level]
                sums[level] += F.cross_entropy(plain, truth)
            if z[truth] > UNSELECTED:
                sums[level] += F.cross_entropy(z, truth)
    batch = (text, torch.ones_like(text, dtype=torch.bool), features)
    losses = torch.stack(block_losses(head, target, batch, anchors))
    assert (losses - sums / 2).abs().max() < 1e-3


# ------------------------------------------------------------------------------------------- loops


@pytest.mark.parametrize("kind", TRAINED)
def test_a_trained_drafter_predicts(kind, tmp_path):
    """As written, loaded in 4 bits, and in C++ but for convolutions: more than a token in a pass, and vanilla's."""
    head = str(trained_dir(tmp_path / "head", kind))
    files = {"checkpoint": CHECKPOINT, "head": head, "tree": "dynamic", "quant_draft": "int4"}
    engine = assert_vanillas_tokens(files, PROMPTS, "compiled", 0.0, 1.2, max_new_tokens=50)
    assert engine.option("draft") == "block" and engine.option("quant_draft") == "int4"
    assert (engine.drafter.head.program is None) == (kind == "dflash2")


@pytest.mark.parametrize("kind, form", [
    ("dflash", "fp32"), ("dflash2", "compiled"), ("dspine", "fp32"), ("lilicorr", "compiled"), ("peagle", "compiled"),
])  # fmt: skip
def test_heads_that_are_not_trained_give_vanillas_tokens(kind, form, tmp_path):
    """Now and then a token is accepted."""
    head = str(heads.write(tmp_path / "head", BLOCKS[kind]))
    files = {"checkpoint": CHECKPOINT, "head": head, "tree": "dynamic"}
    engine = assert_vanillas_tokens(files, PROMPTS, form, 1.0, 1.0, max_new_tokens=50)
    assert engine.option("draft") == ("eagle" if kind == "peagle" else "block")


# ------------------------------------------------------------------------------------------- files


# not in speculators' layout, without the key of the root
NONE = dict.fromkeys(("speculators_model_type", "transformer_layer_config", "sample_from_anchor"))
ALONE = heads.LAYER | heads.FULL | NONE


@pytest.mark.parametrize("kind, changes, levels", [
    ("dspark", {}, 5),
    ("dspark", {"sample_from_anchor": None}, 5),  # older files, which drafted one token less than there are positions
    ("dspark", {"sample_from_anchor": True}, 6),
    ("dspark", ALONE, 6),  # DeepSpec's
    ("dspark", ALONE | {"dflash_config": {"projector_type": "dspark"}}, 5),  # SpecForge's
    ("gguf dspark", {"sample_from_anchor": None}, 6),  # as those of DeepSpec's heads
])  # fmt: skip
def test_what_dsparks_root_predicts(kind, changes, levels, tmp_path):
    path = heads.write(tmp_path / "head", BLOCKS[kind], changes)
    config = load_head(path, golden_target(TARGET)).config
    assert config.levels == levels and config.predicts_next == (levels == 6)
