"""Files of new drafters for a golden model, written as the training programs do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from extras.block_draft import BlockHead
from extras.hydra_draft import HydraHeads
from extras.medusa_draft import MedusaHeads
from helpers import GOLDEN, golden_target
from hf.block_heads import BlockConfig
from hf.token_heads import TokenHeads
from model import ModelConfig, Transformer
from scripts.train import losses, train_eagle
from scripts.train.distill import DistillConfig, DraftModel, save
from scripts.train.train_block import tapped_layers, write_files
from scripts.train.train_heads import start_as_identity, write_heads

MODEL = "models/target_llama_mha"  # 3 layers, width 64, vocabulary 97
INFO = {"config": {}, "curve": []}


def write_token_heads(out: Path, kind: str, target: Transformer) -> None:
    """Write heads of Medusa or Hydra, with LM heads of their own unless the kind says otherwise."""
    c = target.config
    prefix = dense_layer(target) if kind == "hydra++" else None
    made = MedusaHeads if kind.startswith("medusa") else HydraHeads
    own = kind in ("medusa", "hydra", "hydra++")
    heads = made(TokenHeads(3, 2, c.dim, c.vocab_size, own, prefix=prefix))
    start_as_identity(heads, target)
    write_heads(out, heads, c, "bfloat16")


def write_block_head(out: Path, kind: str, target: Transformer) -> None:
    model = replace(dense_layer(target), qk_norm=True)
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
    """Write the files of a drafter for a golden model, as the training programs do."""
    target = golden_target(model)
    out.mkdir()
    torch.manual_seed(1)
    if kind == "model":
        config = DistillConfig(checkpoint=str(GOLDEN / model), out=str(out), layers=1)
        save(DraftModel(target, 1), target, config, INFO)
    elif kind == "eagle3":
        head = losses.new_head(dense_layer(target), target, None, from_target=True)
        config = train_eagle.TrainConfig(out=str(out), version=3)
        train_eagle.save_head(head, config, INFO)
    elif kind in ("dflash", "jetspec", "dspark"):
        write_block_head(out, kind, target)
    else:
        write_token_heads(out, kind, target)
