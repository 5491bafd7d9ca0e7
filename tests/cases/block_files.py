"""Directories of block heads with random weights, and their drafts at the roots that golden/block_heads recorded."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_tree import DecodedTokens, StaticTree
from drafters import DrafterUpdate, DraftInputs, TreeDrafter
from drafts.block_draft import BlockDrafter, SparkDrafter, kind_of, load_head
from helpers import GOLDEN, golden_target

TARGET = "models/target_llama31_gqa8"  # 8 layers, width 64, vocabulary 128
TAPS = [0, 1, 3, 4, 6]  # layers of the target
MASK = 127
SHAPE = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "rms_norm_eps": 1e-6,
}  # fmt: skip
STARTS = (7, 9, 13)  # roots of the recorded drafts
LEVELS = 5


def shapes_of_layers() -> dict[str, tuple[int, ...]]:
    """The shapes of the weights that every head has."""
    found = {"norm.weight": (64,), "hidden_norm.weight": (64,), "fc.weight": (64, 320)}
    for i in range(2):
        names = {
            "input_layernorm": (64,), "post_attention_layernorm": (64,),
            "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
            "self_attn.o_proj": (64, 64), "self_attn.q_norm": (16,), "self_attn.k_norm": (16,),
            "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96),
        }  # fmt: skip
        found |= {f"layers.{i}.{name}.weight": shape for name, shape in names.items()}
    return found


def random_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Random weights, the same everywhere."""
    draw = numpy.random.RandomState(5).standard_normal
    found = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.from_numpy(draw(shape)).float()
        if name.endswith("norm.weight"):
            found[name] = 1 + 0.2 * noise
        elif any(table in name for table in ("embed_tokens", "markov_w1", "codebook", "mask_hid")):
            found[name] = noise
        else:
            found[name] = noise * shape[-1] ** -0.5 * 1.5
    return found


def small(*shape: int) -> Tensor:
    """Weights that change little, the same everywhere."""
    return torch.from_numpy(numpy.random.RandomState(8).standard_normal(shape)).float() * 0.02


def write_files(path: Path, config: dict, tensors: dict[str, Tensor | None]) -> Path:
    """Write the files of a head; a tensor that is None is left out."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    held = {name: value for name, value in tensors.items() if value is not None}
    save_file(held, path / "model.safetensors")
    return path


# ------------------------------------------------------------------------------------------- drafts


@functools.cache
def recorded(file: str = "trace") -> dict[str, Tensor]:
    """The official code's scores, and the text, `ids`."""
    folder = GOLDEN / "block_heads"
    ids = load_file(folder / "trace.safetensors")["ids"]
    return load_file(folder / f"{file}.safetensors") | {"ids": ids}


def drafter_of(path: Path, tree=None) -> BlockDrafter:
    target = golden_target(TARGET)
    head = load_head(path, target)
    return kind_of(head.config)(head, target, tree or StaticTree.chain(LEVELS))


def drafts(drafter: TreeDrafter) -> Iterator[tuple[Any, DraftInputs]]:
    """The states and roots of the recorded drafts, one after the other, on one cache."""
    ids = recorded()["ids"]
    taps = numpy.random.RandomState(7).standard_normal((1, 18, len(TAPS) * 64))
    taps = torch.from_numpy(taps).float()[..., : 64 * len(drafter.aux_layers)]
    state = drafter.init(1, 64)
    read = 0
    for start in STARTS:
        features = torch.cat((torch.zeros(1, start - read, 64), taps[:, read:start]), -1)
        count = torch.tensor([start - read])
        state = drafter.extend(state, DrafterUpdate(ids[None, read : start + 1], features, count))
        read = start
        yield state, DraftInputs(None, DecodedTokens(ids[None], torch.tensor([start])))


def level_scores(
    drafter: SparkDrafter, state: Any, inputs: DraftInputs, chain: Tensor
) -> Iterator[tuple[Tensor, Tensor | int]]:
    """The scores and the confidence of each level behind the tokens of a chain."""
    before = torch.cat((inputs.text.root, chain[:-1]))
    out, _ = drafter.root_output(state, inputs)
    for level in range(LEVELS):
        frontier = SimpleNamespace(tokens=before[None, level : level + 1])
        out = drafter.forward_nodes(state, frontier, out, None, None)
        hidden = out.hidden[:, level, None]
        sure = drafter.head.confidence(hidden, out.before) if drafter.head.config.confidence else 0
        yield drafter.logits(out, level)[0, 0], sure


def recorded_levels(
    drafter: SparkDrafter, kind: str, trace: dict[str, Tensor]
) -> Iterator[tuple[tuple[int, int], Tensor, Tensor | int]]:
    """The draft and level, scores and confidence of every level of the recorded chains, which the drafter must propose."""
    for number, (state, inputs) in enumerate(drafts(drafter)):
        chain = trace[f"{kind}.tokens"][number]
        assert drafter.propose(state, inputs).tokens[0, 1:].tolist() == chain.tolist()
        for level, (z, sure) in enumerate(level_scores(drafter, state, inputs, chain)):
            yield (number, level), z, sure
