"""Compute the target's features of training batches, or keep them in a file after the first time.

The file holds one epoch in the dtype of training, batch by batch: [batches, B, T,
(1 + aux_layers) F]. Its aux layers are the head's; of a head without any, those of a new head of
version 3, so that both can read it. The first epoch writes it; later epochs, and later runs on the
same data, read it.
FILE.json records the data and the hash of the weights that it was made of. FILE.best holds the
target's best token after each position, which version 3 needs: the product with the whole LM head
is as long as the rest of a step for 0.5 billion parameters and 150,000 tokens.
Trade-off: later epochs have the batches of the first, in another order. Without a file, each epoch
has batches of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from files.io import read_json, write_text
from model import DTYPES, Transformer
from scripts.train.losses import default_aux_layers


class Features:
    """The target's features of every batch, with the head's aux layers, from the file if any."""

    def __init__(
        self, config: Any, target: Transformer, aux_layers: tuple[int, ...], tokens: Tensor
    ):
        """config: train_eagle.TrainConfig; aux_layers: the head's; tokens: [M] int64, an epoch

        Raises: ValueError for features that cannot be kept, or a file with those of other data.
        """
        dim = target.config.dim
        self.width = (1 + len(aux_layers)) * dim
        positions = torch.arange(config.seq_len, device=config.device)
        self.steps = positions.expand(config.batch_size, -1)
        # [batches, B, T, (1 + aux_layers) F]; a batch that was not computed yet is 0
        self.kept = None
        # [batches, B, T] int32, the best token + 1; a batch that was not computed yet is 0
        self.kept_best = None
        self.target = target
        self.version = config.version
        kept_aux_layers = aux_layers
        if config.features:
            kept_aux_layers = aux_layers or default_aux_layers(target.config.n_layers)
            count = len(tokens) // self.steps.numel()
            made_of = {
                "shape": (count, *self.steps.shape, (1 + len(kept_aux_layers)) * dim),
                "dtype": config.dtype,
                "aux_layers": kept_aux_layers,
                "checkpoint": config.checkpoint,
                "weights": weights_hash(Path(config.checkpoint)),
                "tokens": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
            }
            self.kept = self._open(Path(config.features), json.loads(json.dumps(made_of)))
            if config.version == 3:
                self.kept_best = self._open_best(Path(f"{config.features}.best"))

        # compiling takes minutes, and on a processor a batch as long as before (3.8 and 4.1 s)
        self.compute = partial(target, aux_layers=kept_aux_layers)

    @staticmethod
    def _open(file: Path, made_of: dict) -> Tensor:
        """Map the file as a tensor; a new one is full of zeros."""
        shape = made_of["shape"]
        dtype = DTYPES[made_of["dtype"]]
        note = Path(f"{file}.json")
        size = math.prod(shape) * dtype.itemsize
        if not file.exists():
            Path(f"{file}.best").unlink(missing_ok=True)
            reserve(file, size)
            write_text(str(note), json.dumps(made_of))
        elif not note.is_file() or read_json(note) != made_of or file.stat().st_size != size:
            raise ValueError(
                f"--features: {file} has features of other data or weights, or is cut short; "
                "name another file"
            )
        sizes = " x ".join(map(str, shape))
        print(f"features: {sizes} in {made_of['dtype']}, {size / 1e9:.2f} GB, in {file}")
        flat = torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=dtype)
        return flat.view(shape)

    def _open_best(self, file: Path) -> Tensor:
        """Map the best tokens beside the features; a new file, or one cut short, is zeros."""
        shape = self.kept.shape[:-1]
        size = shape.numel() * torch.int32.itemsize
        if not file.exists() or file.stat().st_size != size:
            reserve(file, size)
        flat = torch.from_file(str(file), shared=True, size=shape.numel(), dtype=torch.int32)
        return flat.view(shape)

    @torch.no_grad()
    def of(self, tokens: Tensor, number: int) -> Tensor:
        """Return the features of a batch. Writes: the file.

        tokens: [B, T], batch `number` of its epoch
        Returns: [B, T, (1 + aux_layers) F].
        """
        if self.kept is None:
            return self.compute(tokens, self.steps)
        if not self.has(number):
            features = self.compute(tokens, self.steps)
            if self.kept_best is not None:
                self.kept_best[number] = best_tokens(self.target, features) + 1
            self.kept[number] = features.to(self.kept)
        return self.kept[number, ..., : self.width].to(tokens.device)

    def best(self, features: Tensor, number: int) -> Tensor | None:
        """Return the target's best tokens of a batch, [B, T] int64; None in version 1.

        features: [B, T, (1 + aux_layers) F], the batch's, as from `of`
        """
        if self.version == 1:
            return None
        if self.kept_best is None:
            return best_tokens(self.target, features)
        return self.kept_best[number].to(features.device, torch.int64) - 1

    def has(self, number: int) -> bool:
        """Return whether the files hold a batch: its last row is written last, and is not 0."""
        ranked = self.kept_best is None or bool(self.kept_best[number, -1, -1])
        return ranked and bool(self.kept[number, -1, -1].any())


@torch.no_grad()
def best_tokens(target: Transformer, features: Tensor) -> Tensor:
    """Return the token with the target's largest logit, [B, T] int64.

    Sequence by sequence: the logits of a batch may take gigabytes.
    features: [B, T, F], or with aux hidden states behind them
    """
    return torch.stack([target.logits(row).argmax(-1) for row in features])


def weights_hash(checkpoint: Path) -> str:
    """Return the SHA-256 of a checkpoint's config and weights."""
    files = [checkpoint]
    if checkpoint.is_dir():
        kinds = ("config.json", "*.safetensors", "*.bin")
        files = sorted(file for kind in kinds for file in checkpoint.glob(kind))
    total = hashlib.sha256()
    for file in files:
        with open(file, "rb") as content:
            total.update(hashlib.file_digest(content, "sha256").digest())
    return total.hexdigest()


def reserve(file: Path, size: int) -> None:
    """Make a file of `size` zero bytes with blocks on the disk.

    Raises: ValueError when the disk has too little space for it.
    """
    free = shutil.disk_usage(file.parent).free
    if size > free - 1e9:
        raise ValueError(
            f"--features: {size / 1e9:.2f} GB do not fit beside {file.parent}, "
            f"{free / 1e9:.2f} GB are free (1 GB stays free); free some, or leave it out, and "
            "they are computed as they are needed"
        )
    with open(file, "wb") as out:
        # a disk that fills up later must not break the mapping
        os.posix_fallocate(out.fileno(), 0, size)
