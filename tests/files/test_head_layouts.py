"""Heads as directories of other runtimes: what is written is read back as the same head.

What the package speculators computes from such a directory was compared once, outside of these tests
(files/HEADS.md); that its layout is read rightly is in test_heads.py and test_block_layouts.py.
"""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_heads import HEAD, TARGET, official, target

from block_files import write_files as write
from drafts.block_draft import load_head as load_block_head
from eagle_draft import load_head
from scripts.export_head import LAYOUTS, ExportConfig, run
from scripts.train.train_block import BlockTrainConfig, make_head, write_files


def export(head, out, layout, model=TARGET, **options):
    """Write a head. Returns: config.json and the tensors."""
    paths = {"head": str(head), "checkpoint": str(model), "out": str(out)}
    config = ExportConfig(**paths, layout=layout, **options)
    config.check()
    run(config)
    return json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")


def test_a_target_of_a_hub_is_named_as_there(tmp_path, monkeypatch):
    """The cache's path would mean nothing on another machine."""
    cached = tmp_path / "models--owner--name" / "snapshots" / "abc"
    cached.parent.mkdir(parents=True)
    cached.symlink_to(TARGET.resolve())
    monkeypatch.setattr("scripts.export_head.fetched", lambda name: cached)
    source = write(tmp_path / "source", *official())
    keys, _ = export(source, tmp_path / "out", "speculators", model="owner/name")
    assert keys["speculators_config"]["verifier"]["name_or_path"] == "owner/name"


def block_head(path, **options):
    """Write a random DFlash head of the target. Returns: its directory."""
    torch.manual_seed(0)
    config = BlockTrainConfig(layers=1, block_size=4, **options)
    head = make_head(config, target(), [SimpleNamespace(ids=[1, 2, 3])])
    for parameter in head.parameters():
        parameter.data.normal_()
    path.mkdir()
    write_files(head, path, "bfloat16", {})
    return path


def eagle_head(path):
    config, tensors = official()
    rounded = {k: x.bfloat16() if x.is_floating_point() else x for k, x in tensors.items()}
    return write(path, config | {"draft_sharpness": 1.5}, rounded)


EXPORTED = {  # a function that writes a head, one that loads it, its kind in speculators' layout
    "eagle3": (eagle_head, load_head),
    "dflash": (block_head, load_block_head),
    "dflash2": (functools.partial(block_head, selector_rank=8), load_block_head),
}


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("kind", EXPORTED)
def test_what_is_written_is_read_back_as_the_same_head(layout, kind, tmp_path):
    """Its config, too: the export itself compares it."""
    make, load = EXPORTED[kind]
    source = make(tmp_path / "source")
    keys, written = export(source, tmp_path / "out", layout)
    before, after = (load(path, target()) for path in (source, tmp_path / "out"))
    own, other = dict(before.named_parameters()), dict(after.named_parameters())
    if kind == "eagle3" and layout == "speculators":  # the target's, rounded
        assert other.pop("embedding.weight").equal(target().embedding.weight.bfloat16().float())
    assert own.keys() == other.keys() and len(own) > 8
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert (before.vocab is None) or after.vocab.ids.equal(before.vocab.ids)
    assert after.config.sharpness == before.config.sharpness
    assert keys.get("speculators_model_type", kind) == kind
    assert ("speculators_model_type" in keys) == (layout == "speculators")
    assert {x.dtype for x in written.values()} <= {torch.bfloat16, torch.int64, torch.bool}
    if kind != "eagle3":
        assert kind == "dflash" or written["layers.0.mlp_conv.base_kernel"].dim() == 3
    elif layout == "sglang":
        assert keys["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
        assert written.keys() == official()[1].keys()
    else:
        assert keys["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
        names = {name.replace("midlayer", "layers.0") for name in official()[1]}
        assert written.keys() == names | {"embed_tokens.weight"}


@pytest.mark.parametrize(
    ("source", "layout", "fault"),
    [
        ("causal", "speculators", "whose causal is True; it would be read as False"),
        ("normed", "sglang", "whose norm_before_residual is True"),
        ("version 1", "sglang", "of version 1 or 2"),
        ("there", "sglang", "exists; give --overwrite"),
        ("there", "gguf", "must end in .gguf"),
        ("block", "gguf", "no place for a head that is a block drafter"),
    ],
)
def test_what_a_layout_has_no_place_for_is_refused_and_nothing_written(
    source, layout, fault, tmp_path
):
    head, out = HEAD, tmp_path / ("out.gguf" if source == "block" else "out")
    if source in ("causal", "block"):
        head = block_head(tmp_path / "head", causal=source == "causal")
    if source == "normed":
        config, tensors = official()
        head = write(tmp_path / "head", config | {"norm_before_residual": True}, tensors)
    model = TARGET
    if source == "version 1":
        head, model = HEAD.with_name("head_eagle12_mha"), TARGET.with_name("target_llama_mha")
    if source == "there":
        out.mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=fault):
        export(head, out, layout, model)
    assert sorted(tmp_path.iterdir()) == before
