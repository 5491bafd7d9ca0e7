"""Heads as directories of other runtimes: what is written is read back as the same head.

What the package speculators computes from such a directory was compared once, outside of these tests
(files/HEADS.md); that its layout is read rightly is in test_heads.py and test_block_layouts.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
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


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_eagle_3_is_read_back_as_the_same_head(layout, tmp_path):
    config, tensors = official()
    rounded = {k: x.bfloat16() if x.is_floating_point() else x for k, x in tensors.items()}
    source = write(tmp_path / "source", config | {"draft_sharpness": 1.5}, rounded)
    verifier = "owner/name" if layout == "speculators" else ""
    keys, written = export(source, tmp_path / "out", layout, verifier=verifier)
    before, after = (load_head(path, target()) for path in (source, tmp_path / "out"))
    own, other = dict(before.named_parameters()), dict(after.named_parameters())
    if layout == "speculators":  # the target's, rounded
        assert other.pop("embedding.weight").equal(target().embedding.weight.bfloat16().float())
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert after.vocab.ids.equal(before.vocab.ids)
    eagle3 = replace(after.config.eagle3, embedding="")
    of_target = ("dtype", "eos_ids")  # a head has its target's
    theirs = {name: getattr(before.config.model, name) for name in of_target}
    model = replace(after.config.model, **theirs)
    assert replace(after.config, model=model, eagle3=eagle3) == before.config
    if layout == "sglang":
        assert keys["architectures"] == ["LlamaForCausalLMEagle3"]
        assert keys["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
        assert written.keys() == tensors.keys()
    else:
        assert keys["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
        assert keys["speculators_config"]["verifier"] == {
            "name_or_path": "owner/name", "architectures": ["LlamaForCausalLM"],
        }  # fmt: skip
        names = {name.replace("midlayer", "layers.0") for name in tensors} | {"embed_tokens.weight"}
        assert written.keys() == names
    assert {x.dtype for x in written.values()} == {torch.bfloat16, torch.int64, torch.bool}


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


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("kind, rank", [("dflash", 0), ("dflash2", 8)])
def test_block_drafters_are_read_back_as_the_same_head(layout, kind, rank, tmp_path):
    source = block_head(tmp_path / "source", selector_rank=rank)
    keys, written = export(source, tmp_path / "out", layout)
    before, after = (load_block_head(path, target()) for path in (source, tmp_path / "out"))
    own, other = dict(before.named_parameters()), dict(after.named_parameters())
    assert own.keys() == other.keys() and len(own) > 8
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert replace(after.config, window_from_root=False) == before.config
    assert keys.get("speculators_model_type", kind) == kind
    assert ("speculators_model_type" in keys) == (layout == "speculators")
    assert rank == 0 or written["layers.0.mlp_conv.base_kernel"].dim() == 3


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
