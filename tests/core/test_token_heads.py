"""Medusa's and Hydra's heads: the official modules written out, trees by a plain search, files. That they change no token
is tested in test_lossless.py.

The references follow the papers and the official code (FasterDecoding/Medusa, zankner/Hydra).
"""

from __future__ import annotations

import heapq
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from draft_tree import DecodedTokens, DynamicTree, StaticTree
from drafters import DrafterUpdate, DraftInputs
from drafts import token_draft
from heads import LLAMA, Head, write
from helpers import (
    GOLDEN,
    PROMPTS,
    golden_target,
    order_of,
    token_paths,
)
from run.options import Sampling
from run.tree_paths import MEDUSA_PATHS
from sampling import SamplingTensors

TARGET = GOLDEN / LLAMA
D = 4
KINDS = ("medusa", "medusa 2", "hydra", "hydra++")
# ------------------------------------------------------------------------------- the official code


class MedusaBlock(nn.Module):
    """`ResBlock` of medusa_model.py."""

    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x):
        return x + F.silu(self.linear(x))


def official_medusa(target, layers: int, own: bool) -> nn.ModuleList:
    """`medusa_head`, and without its LM heads that of medusa_model_legacy.py."""
    dim, size = target.config.dim, target.config.vocab_size
    lm_head = [nn.Linear(dim, size, bias=False)] if own else []
    return nn.ModuleList(
        nn.Sequential(*(MedusaBlock(dim) for _ in range(layers)), *lm_head) for _ in range(D)
    )


class HydraBlock(nn.Module):
    """`ResBlock` of mlp_head.py."""

    def __init__(self, size, conditions=0):
        super().__init__()
        self.linear = nn.Linear(size * (conditions + 1), size)
        self.res_connection = nn.Identity()
        if conditions:
            self.res_connection = nn.Linear(size * (conditions + 1), size)

    def forward(self, x):
        return self.res_connection(x) + F.silu(self.linear(x))


def prefix_layer(c) -> transformers.LlamaModel:
    """The official prefix is a `LlamaModel` of one layer over given inputs."""
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.dim, intermediate_size=c.ffn_dim, num_hidden_layers=1,
        num_attention_heads=c.n_heads, rms_norm_eps=c.norm_eps, max_position_embeddings=c.max_context,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    )  # fmt: skip
    return transformers.LlamaModel(config)


class OfficialHydra(nn.Module):
    """`HydraMLP`, or with a prefix `HydraPrefixMLP`, whose layers have a dropout before them."""

    def __init__(self, target, layers: int, prefix: bool):
        super().__init__()
        c = target.config
        self.input_embed_fn = nn.Embedding.from_pretrained(target.embedding.weight)
        drop = [nn.Dropout(0.2)] if prefix else []
        self.hydra_mlp = nn.ModuleList()
        self.hydra_lm_head = nn.ModuleList()
        for i in range(D):
            blocks = [*drop, HydraBlock(c.dim, i + 1)]
            for _ in range(layers - 1):
                blocks += [*drop, HydraBlock(c.dim)]
            self.hydra_mlp.append(nn.Sequential(*blocks))
            lm_head = nn.Linear(c.dim, c.vocab_size)
            self.hydra_lm_head.append(nn.Sequential(*drop, lm_head) if prefix else lm_head)
        if prefix:
            self.prefix_embeding_layer = prefix_layer(c)
        self.prefix = prefix

    def scores(self, feature, path: tuple[int, ...]):
        """The logits of the child of a path: (root, drafted tokens). feature: [F]"""
        x = torch.cat((feature, *self.input_embed_fn(torch.tensor(path))))
        return self.hydra_lm_head[len(path) - 1](self.hydra_mlp[len(path) - 1](x))


def made(kind: str, layers: int = 2) -> tuple[nn.Module, Head]:
    """The official module with random weights, and its files in its layout."""
    target = golden_target()
    torch.manual_seed(len(kind))
    table = target.lm_head.weight.detach()
    if kind.startswith("medusa"):
        own = kind == "medusa"
        module = official_medusa(target, layers, own)
        config = {"medusa_num_heads": D, "medusa_num_layers": layers}
        config |= {} if own else {"version": "2"}
        lm_heads = [head[-1] for head in module] if own else []
    else:
        module = OfficialHydra(target, layers, kind == "hydra++")
        arch = "prefix-mlp" if kind == "hydra++" else "mlp"
        config = {"hydra_num_heads": D, "hydra_num_layers": layers}
        config |= {"hydra_head_arch": arch, "grounded_heads": True}
        lm_heads = [head[-1] if kind == "hydra++" else head for head in module.hydra_lm_head]
    with torch.no_grad():
        for head in lm_heads:
            head.weight.copy_(table + table.std() * 0.3 * torch.randn(table.shape))
    stem = f"{kind.split()[0].rstrip('+')}_lm_head"
    file = f"{stem}.safetensors" if kind == "medusa 2" else f"{stem}.pt"
    module = module.eval().requires_grad_(False)
    return module, Head(config, module.state_dict(), LLAMA, file)


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    """Of each kind the official module and its folder. Shared between tests: do not change them."""
    root = tmp_path_factory.mktemp("heads")
    both = {kind: made(kind) for kind in KINDS}
    return {kind: (module, write(root / kind, head)) for kind, (module, head) in both.items()}


def drafter_of(folder: Path, tree: DynamicTree | StaticTree, target=None, **options):
    """The drafter of a folder in fp32."""
    target = target or golden_target()
    return token_draft.drafter_of(token_draft.load_heads(folder, target), target, tree, **options)


def features_of(tokens: list[int]):
    """The target's features of some tokens, [T, F]."""
    ids = torch.tensor([tokens])
    return golden_target()(ids, torch.arange(len(tokens))[None])[0].detach()


def scorer(kind: str, module, features):
    """A function of a path, (root, drafted tokens), that returns the logits of its children."""
    if kind.startswith("hydra"):
        feature = features[-1]
        if kind == "hydra++":
            prefix = module.prefix_embeding_layer(inputs_embeds=features[None])
            feature = prefix.last_hidden_state[0, -1]
        return lambda path: module.scores(feature, path)
    lm_head = golden_target().lm_head if kind == "medusa 2" else nn.Identity()
    return lambda path: lm_head(module[len(path) - 1](features[-1]))


# ---------------------------------------------------------------------------------------- trees


def plain_tree(scores, noise, temperature: float, root: int, tree, sharpness: float) -> set[tuple]:
    """The token paths of a tree, by rank or by value; T G is added to the logits of each child."""

    def children(path):
        z = scores((root, *path)).detach().float()
        if temperature:
            z = z + temperature * noise[len(path)]
        best = (sharpness * z).log_softmax(-1).topk(4)
        return list(zip(best.values.tolist(), best.indices.tolist()))

    if isinstance(tree, StaticTree):
        tokens = {(): ()}
        for ranks in order_of(tree)[1:]:
            tokens[ranks] = (*tokens[ranks[:-1]], children(tokens[ranks[:-1]])[ranks[-1]][1])
        return set(tokens.values()) - {()}
    pool, front = [], [(0.0, ())]
    for _ in range(tree.depth):
        level = [
            (value + v, (*path, t)) for value, path in front for v, t in children(path)[: tree.topk]
        ]
        front = heapq.nlargest(tree.topk, level)
        pool += level
    return {path for _, path in heapq.nlargest(tree.size - 1, pool)}


@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_those_of_the_official_heads(official, kind):
    """Features, chunk by chunk, then a tree, as a plain search with the official forward finds it."""
    module, folder = official[kind]
    tokens = PROMPTS[1]
    features = features_of(tokens)
    scores = scorer(kind, module, features)
    noise = -torch.rand(1, D + 1, 97, generator=torch.Generator().manual_seed(3)).log().neg().log()
    rule = SamplingTensors.from_params([Sampling(0.7)])
    cut = StaticTree(tuple(path for path in MEDUSA_PATHS if max(path) < 4))
    for tree in (cut, StaticTree.chain(3), DynamicTree(4, 4, 16), DynamicTree(2, 3, 8)):
        drafter = drafter_of(folder, tree, sharpness=1.5)
        state = drafter.init(1, 40)
        padded = F.pad(features, (0, 0, 0, 3), value=9.0)[None]  # the padding would be noticed
        for begin, stop in ((0, 5), (5, 12), (12, 12)):
            rows = torch.arange(begin, begin + 8).clamp(max=14)
            given = torch.tensor([[*tokens, 0, 0, 0, 0]])[:, : 9 + begin][:, begin:]
            given = F.pad(given, (0, 9 - given.shape[1]))
            count = torch.tensor([stop - begin])
            state = drafter.extend(state, DrafterUpdate(given, padded[:, rows], count))
        text = DecodedTokens(torch.tensor([[*tokens, 44, 0, 0]]), torch.tensor([12]))
        for temperature in (0.0, 0.7):
            root = DraftInputs(noise, text, rule if temperature else None)
            found = drafter.propose(state, root)
            want = plain_tree(scores, noise[0], temperature, 44, tree, 1.5)
            paths = token_paths(found.tokens[0].tolist(), found.parents[0].tolist())
            assert set(paths) == want and bool(found.valid.all())


# ------------------------------------------------------------------------------------------- files


def test_more_heads_than_the_config_says_all_draft(official, tmp_path, capsys):
    """The official config of Medusa's Vicuna heads says 2, and the weights are 5."""
    shutil.copytree(official["medusa"][1], tmp_path / "heads")
    config = {"medusa_num_heads": 2, "medusa_num_layers": 2, "tree_decoding": 1}
    (tmp_path / "heads/config.json").write_text(json.dumps(config))
    assert token_draft.load_heads(tmp_path / "heads", golden_target()).config.heads == D
    notes = capsys.readouterr().err
    assert "the weights hold 4 heads" in notes and "without effect here: tree_decoding" in notes
