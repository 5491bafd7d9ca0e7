"""Files of new drafters for a golden model, in their official layouts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from drafts.block_draft import BlockHead
from drafts.block_heads import BlockConfig
from drafts.token_draft import (
    Block,
    Heads,
    HydraConfig,
    HydraHeads,
    MedusaConfig,
    MedusaHeads,
)
from files.checkpoint import WeightFiles
from files.weights import export_weights
from helpers import GOLDEN, golden_target
from model import ModelConfig, Transformer
from models.mixtures import with_head_norms
from quantize import Linear
from scripts.train import train_eagle
from scripts.train.train_block import tapped_layers, write_files

MODEL = "models/target_llama_mha"  # 3 layers, width 64, vocabulary 97
INFO = {"config": {}, "curve": []}


def write_token_heads(out: Path, kind: str, target: Transformer) -> None:
    """Write heads of Medusa or Hydra, with LM heads of their own unless the kind says otherwise.

    Blocks begin as the identity, and LM heads as the target's.
    """
    c = target.config
    own = kind in ("medusa", "hydra", "hydra++")
    layer = dense_layer(target)
    if kind.startswith("medusa"):
        heads = MedusaHeads(MedusaConfig(layer, 3, 2, own_lm_heads=own))
        keys = {"medusa_num_heads": 3, "medusa_num_layers": 2} | ({} if own else {"version": "2"})
    else:
        arch = "prefix-mlp" if kind == "hydra++" else "mlp"
        heads = HydraHeads(HydraConfig(layer, 3, True, 2, arch, own_lm_heads=own))
        keys = {"hydra_num_heads": 3, "hydra_num_layers": 2, "grounded_heads": True}
        keys |= {"hydra_head_arch": arch, "hydra_lm_head": "own" if own else "target"}
    with torch.no_grad():
        start_as_identity(heads, target)
    tensors = export_weights(heads, heads.weight_names(), c, torch.bfloat16)
    if kind.startswith("medusa"):
        save_file(tensors, out / "medusa_lm_head.safetensors")
    else:
        torch.save(tensors, out / "hydra_lm_head.pt")
    (out / "config.json").write_text(json.dumps(keys))


def start_as_identity(heads: Heads, target: Transformer) -> None:
    """Set the weights of new heads: the linear residual of Hydra's first block passes the feature on."""
    dim = target.config.dim
    for module in heads.modules():
        if isinstance(module, Linear) and module.fp32_out:
            module.weight.copy_(target.lm_head.weight)
            if module.bias is not None:
                module.bias.zero_()
        if isinstance(module, Block):
            for parameter in module.parameters():
                parameter.zero_()
            if isinstance(module.res_connection, Linear):
                module.res_connection.weight.normal_(std=0.02)
                module.res_connection.weight[:, :dim] += torch.eye(dim)
    if heads.config.prefix:
        prefix = heads.prefix_embeding_layer.layers[0]
        for layer in (prefix.wo, prefix.w2):
            layer.weight.zero_()


def write_draft_model(out: Path, model: str) -> None:
    """Write the first layer of a golden model, under its tables."""
    config = json.loads((GOLDEN / model / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    files = WeightFiles(GOLDEN / model)
    kept = [name for name in files.readers if ".layers." not in name or ".layers.0." in name]
    save_file({name: files.read(name) for name in kept}, out / "model.safetensors")


def write_block_head(out: Path, kind: str, target: Transformer) -> None:
    model = with_head_norms(dense_layer(target))
    spark = kind == "dspark"
    layers = tapped_layers(target.config.n_layers)
    config = BlockConfig(
        model, layers, 4, 96, causal=kind == "jetspec", predicts_next=spark, markov_rank=32 * spark
    )
    write_files(BlockHead(config), out, "bfloat16", INFO)


def dense_layer(target: Transformer) -> ModelConfig:
    """The config of a head's one layer: heads have no experts."""
    return replace(target.config, n_layers=1, n_experts=0)


def write_drafter(out: Path, kind: str, model: str = MODEL) -> None:
    """Write the files of a drafter for a golden model."""
    target = golden_target(model)
    out.mkdir()
    torch.manual_seed(1)
    if kind == "model":
        write_draft_model(out, model)
    elif kind == "eagle3":
        head = train_eagle.new_head(dense_layer(target), target, None, from_target=True)
        config = train_eagle.TrainConfig(out=str(out), version=3)
        train_eagle.save_head(head, config, INFO)
    elif kind in ("dflash", "jetspec", "dspark"):
        write_block_head(out, kind, target)
    else:
        write_token_heads(out, kind, target)
