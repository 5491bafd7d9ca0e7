"""Block drafters: the official code's scores, trees of the best prefixes, files, training. That they change no token is
tested in test_lossless.py.

golden/block_heads/trace.safetensors has the scores of the official code (golden/README.md) on the weights that `weights`
draws.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import sampling
from block_files import (
    LEVELS,
    MASK,
    SHAPE,
    TAPS,
    TARGET,
    drafter_of,
    drafts,
    random_weights,
    recorded,
    recorded_levels,
    shapes_of_layers,
    write_files,
)
from draft_tree import DecodedTokens, DynamicTree, StaticTree
from drafters import DrafterUpdate, DraftInputs, RootOnly
from drafts.block_draft import UNSELECTED, BlockDrafter, BlockHead, load_head
from drafts.block_heads import BlockConfig
from drafts.by_value import beside
from drafts.level_draft import tree_of
from drafts.residual import sample_children
from helpers import (
    GOLDEN,
    PROMPTS,
    decode,
    engine_for,
    golden_target,
    token_paths,
)
from run.generate import generate, load
from run.options import GenerateConfig
from scripts.train.losses import block_losses, pick_anchors
from scripts.train.train_block import (
    BlockTrainConfig,
    draft_blocks,
    make_head,
    tapped_layers,
)
from scripts.train.train_block import write_files as write_trained

LAYERS = SHAPE | {"rope_theta": 10000.0, "layer_types": ["full_attention"] * 2}
FLAGS = {"mask_token_id": MASK, "target_layer_ids": TAPS}
SPARK = FLAGS | {"block_size": 5, "markov_rank": 8, "markov_head_type": "vanilla"}
KEYS = {  # kind -> further keys of config.json
    "dflash": {"block_size": 6, "dflash_config": FLAGS},
    "jetspec": {"block_size": 6, "dflash_config": FLAGS | {"causal_head": True}},
    "dspark": SPARK | {"enable_confidence_head": True, "confidence_head_with_markov": True},
}
STEPS = 32  # of training
SETTINGS = {"max_new_tokens": 50, "ignore_eos": True, "seed": 7}


def weights(kind: str) -> dict[str, torch.Tensor]:
    """Random weights, the same everywhere."""
    found = shapes_of_layers()
    if kind == "dspark":
        found |= {
            "embed_tokens.weight": (128, 64), "lm_head.weight": (128, 64),
            "markov_head.markov_w1.weight": (128, 8), "markov_head.markov_w2.weight": (128, 8),
            "confidence_head.proj.weight": (1, 72), "confidence_head.proj.bias": (1,),
        }  # fmt: skip
    return random_weights(found)


def write_head(path: Path, kind: str, changes: dict | None = None, **tensors) -> Path:
    """Write a head. changes: to config.json; tensors: to the weights, by name, None: left out"""
    return write_files(path, LAYERS | KEYS[kind] | (changes or {}), weights(kind) | tensors)


# ------------------------------------------------------------------------------------------ scores


@pytest.mark.parametrize("kind", ["dflash", "jetspec"])
def test_scores_are_the_official_ones(kind, tmp_path):
    """Also where config.json counts the target's layers."""
    drafter = drafter_of(write_head(tmp_path / "head", kind, {"num_hidden_layers": 8}))
    trace = recorded()
    for number, (state, inputs) in enumerate(drafts(drafter)):
        ours = drafter.level_scores(state, inputs)[0]
        assert (ours - trace[f"{kind}.logits"][number]).abs().max() < 1e-4


def test_dsparks_chain_bias_and_confidence_are_the_official_ones(tmp_path):
    """Its position predicts the token after its own; the embedding and the LM head are its own."""
    drafter = drafter_of(write_head(tmp_path / "head", "dspark"))
    trace = recorded()
    for at, z, sure in recorded_levels(drafter, "dspark", trace):
        assert (z - trace["dspark.logits"][at]).abs().max() < 1e-4
        assert (sure - F.logsigmoid(trace["dspark.confidence"][at])).abs().max() < 1e-5


def test_a_causal_block_needs_no_positions_behind_the_tree(tmp_path):
    """Of a shallow tree it runs fewer, and the scores stay the same."""
    path = write_head(tmp_path / "head", "jetspec")
    deep, shallow = (drafter_of(path, StaticTree.chain(n)) for n in (5, 2))
    for state, root in drafts(deep):
        scores = deep.level_scores(state, root)
        assert (shallow.level_scores(state, root) - scores[:, :2]).abs().max() < 1e-5


# ------------------------------------------------------------------------------------------- trees


def best_prefixes(log_q: torch.Tensor, count: int) -> dict[tuple[int, ...], float]:
    """DDTree's nodes: the `count` likeliest prefixes of a product of distributions [D, V], by a heap."""
    ranked = [sorted(enumerate(row.tolist()), key=lambda p: -p[1]) for row in log_q]
    heap = [(-ranked[0][0][1], (0,))]
    found = {}
    while len(found) < count:
        value, ranks = heapq.heappop(heap)
        level = len(ranks) - 1
        found[tuple(ranked[i][r][0] for i, r in enumerate(ranks))] = -value
        step = ranked[level][ranks[-1] + 1][1] - ranked[level][ranks[-1]][1]
        heapq.heappush(heap, (value - step, (*ranks[:-1], ranks[-1] + 1)))
        if level + 1 < len(log_q):
            heapq.heappush(heap, (value - ranked[level + 1][0][1], (*ranks, 0)))
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_trees_are_the_best_prefixes(temperature, tmp_path):
    """As DDTree's heap finds them; when sampling, of the scores with the noise of the target's own draws."""
    tree = DynamicTree(depth=LEVELS, topk=24, size=25)
    drafter = drafter_of(write_head(tmp_path / "head", "dflash"), tree)
    trace = recorded()
    rule = None
    noise = None
    if temperature:
        rule = sampling.SamplingTensors.from_params([sampling.Sampling(temperature)], seed=3)
        noise = sampling.gumbel(rule, torch.zeros(1).long(), LEVELS + 1, 128)
    for number, (state, inputs) in enumerate(drafts(drafter)):
        z = trace["dflash.logits"][number]
        if temperature:
            z = temperature * (z / temperature + noise[0, :LEVELS])
        want = best_prefixes(z.log_softmax(-1), tree.size - 1)
        found = drafter.propose(state, DraftInputs(noise, inputs.text, rule))
        paths = token_paths(found.tokens[0].tolist(), found.parents[0].tolist())
        got = dict(zip(paths, found.values[0, 1:].tolist()))
        assert got.keys() == want.keys()
        assert max(abs(got[path] - value) for path, value in want.items()) < 1e-3


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


TRAINED = (*KEYS, "dflash2")


@pytest.mark.parametrize("kind", TRAINED)
def test_training_learns_every_level(kind):
    _, (first, last) = trained(kind)
    assert (last < first - 0.2).all(), (first, last)


@pytest.mark.parametrize("kind", TRAINED)
def test_blocks_of_training_are_those_of_decoding(kind, tmp_path):
    """The scores of `draft_blocks` and the loss are what the drafter, read from its files, computes at each root."""
    head, _ = trained(kind)
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


def test_only_marked_tokens_count():
    """A level counts while all tokens up to it are marked, inside the text."""
    head, _ = trained("dflash")
    target = golden_target(TARGET)
    text = torch.tensor([vanilla(1.0)[0][:16]])
    features = target(text, torch.arange(16)[None], aux_layers=head.aux_layers)
    mask = torch.ones_like(text, dtype=torch.bool)
    mask[0, 6] = False
    cut = block_losses(head, target, (text, mask, features), torch.tensor([[3, 12]]))
    parts = [
        block_losses(head, target, (text, mask | True, features), torch.tensor([[a]]))
        for a in (3, 12)
    ]
    want = [(parts[0][i] + parts[1][i]) / 2 for i in range(2)]  # then 6 is unmarked
    want += [parts[1][2], torch.tensor(0.0), torch.tensor(0.0)]  # then the text ends
    assert torch.allclose(torch.stack(cut), torch.stack(want), atol=1e-5)
    generator = torch.Generator().manual_seed(1)
    anchors = pick_anchors(mask, 14, generator)
    assert anchors.tolist() == [[a for a in range(15) if a != 5]]  # 5 is before the unmarked token


def test_new_drafters_tap_layers_that_the_target_has():
    assert tapped_layers(36) == (2, 10, 18, 26, 34) and tapped_layers(8) == (2, 3, 4, 5, 6)
    assert tapped_layers(2) == (1,) and tapped_layers(1) == (0,)


# ------------------------------------------------------------------------------------------- loops

DYNAMIC = DynamicTree(depth=5, topk=6, size=24)


@pytest.mark.parametrize("kind", TRAINED)
def test_a_trained_drafter_predicts(kind, tmp_path):
    """As written, loaded in 4 bits, and in C++ but for convolutions: more than a token in a pass, and vanilla's."""
    path = trained_dir(tmp_path / "head", kind)
    options = {"dtype": "bfloat16", "compile": True, "device": "cpu", "quant_draft": "int4"}
    options |= {"checkpoint": str(GOLDEN / TARGET), **SETTINGS}
    engine = load(head=str(path), tree="dynamic", **options)
    assert engine.option("draft") == "block" and engine.option("quant_draft") == "int4"
    assert (engine.drafter.head.program is None) == (kind == "dflash2")
    found = generate(engine, PROMPTS)
    assert found.stats["tau"] > 1.2
    plain = load(draft="none", **options | {"quant_draft": ""})
    assert found.tokens == generate(plain, PROMPTS).tokens


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_children_drawn_from_q_are_exact(kind, tmp_path):
    """Also where the confidence moves the values of paths; the residual rule runs."""
    target = golden_target(TARGET)
    options = {"temperature": 1.0, "batch_size": 2, **SETTINGS, "max_new_tokens": 8}
    static = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)))
    path = write_head(tmp_path / kind, kind)
    drafter = sample_children(drafter_of(path, static))
    found = decode(engine_for(target, drafter, **options), *PROMPTS)
    want = [text[: len(prompt) + 8] for text, prompt in zip(vanilla(1.0), PROMPTS)]
    assert found.history == want
    found = decode(engine_for(target, drafter, accept="residual", **options), *PROMPTS)
    assert [*map(len, found.history)] == [*map(len, want)]


# ------------------------------------------------------------------------------------------- files


def test_copies_of_the_targets_tables_are_dropped(tmp_path):
    target = golden_target(TARGET)
    same = {"embed_tokens.weight": target.embedding.weight.detach().clone()}
    assert load_head(write_head(tmp_path / "a", "dspark", **same), target).embedding is (
        target.embedding
    )
    assert load_head(write_head(tmp_path / "b", "dspark"), target).embedding is not target.embedding


def test_trees_deeper_than_the_block_and_draft_kinds(tmp_path):
    config = GenerateConfig(draft="block", tree="chain", tree_depth=6)
    with pytest.raises(ValueError, match="drafts 5 levels, and the tree has 6"):
        tree_of(config, 5, tmp_path)
    assert tree_of(replace(config, tree_depth=0), 5, tmp_path).depth == 5
    auto = GenerateConfig(draft="block", tree="auto", device="cpu", tree_size=12)
    assert tree_of(auto, 15, tmp_path) == DynamicTree(11, 4, 12), "all levels that 11 nodes reach"
    assert tree_of(replace(auto, tree_depth=8), 15, tmp_path).depth == 8
    path = write_head(tmp_path / "head", "dflash")
    with pytest.raises(ValueError, match="--draft eagle needs a head of its own kind"):
        load(checkpoint=str(GOLDEN / TARGET), head=str(path), draft="eagle")


def test_trees_that_auto_chooses_from_are_as_deep_as_their_nodes_reach():
    """Fewer nodes draft a shorter block; EAGLE's, whose levels each cost a pass, stay flat (test_by_value.py)."""
    target = golden_target(TARGET)
    config = BlockConfig(target.config, (2,), 16, 0, causal=True, predicts_next=False)
    drafter = BlockDrafter(BlockHead(config), target, DynamicTree(15, 4, 16))
    presets = beside(drafter, grows=False).presets
    shapes = [(preset.depth, preset.width, preset.size) for preset in presets]
    assert shapes == [(0, 0, 1), (3, 1, 4), (7, 3, 8), (15, 4, 16)]
