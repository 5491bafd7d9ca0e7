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
import os
import shutil
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from files.io import read_json, write_text
from model import DTYPES, Transformer
from scripts.train.data import Batch
from scripts.train.train_options import TrainOptions


def default_aux_layers(layers: int) -> tuple[int, ...]:
    """Return the aux layers of a new head: the official ones, as far as the target has them.

    The head takes the inputs of these layers of the target.
    """
    official = (2, layers // 2, layers - 3)
    return tuple(sorted({layer for layer in official if 0 <= layer <= layers}))


class Features:
    """The target's features of every batch, with the head's aux layers, from the file if any."""

    def __init__(
        self, config: TrainOptions, target: Transformer, aux_layers: tuple[int, ...], tokens: Tensor
    ):
        """aux_layers: the head's; tokens: [M] int64, those of an epoch

        Raises: ValueError for features that cannot be kept, or a file with those of other data.
        """
        dim = target.config.dim
        self.width = (1 + len(aux_layers)) * dim
        positions = torch.arange(config.seq_len, device=config.device)
        self.steps = positions.expand(config.batch_size, -1)
        self.batches = len(tokens) // self.steps.numel()  # of an epoch
        self.target = target
        self.ranks = config.version == 3  # the target's best tokens are asked for
        # [batches, B, T, (1 + aux_layers) F]; a batch that was not computed yet is 0
        self.kept: Tensor | None = None
        # [batches, B, T], the best token + 1; a batch that was not computed yet is 0
        self.kept_best: Tensor | None = None
        if config.features:
            aux_layers = aux_layers or default_aux_layers(target.config.n_layers)
            made_of = {
                "shape": [self.batches, *self.steps.shape, (1 + len(aux_layers)) * dim],
                "dtype": config.dtype,
                "aux_layers": list(aux_layers),
                "weights": weights_hash(Path(config.checkpoint)),
                "tokens": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
            }
            self._open(Path(config.features), made_of)
        # compiling takes minutes, and on a processor a batch as long as before (3.8 and 4.1 s)
        self.compute = partial(target, aux_layers=aux_layers)

    def _open(self, file: Path, made_of: dict) -> None:
        """Map the files as tensors; new ones are full of zeros."""
        shape = torch.Size(made_of["shape"])
        dtype = DTYPES[made_of["dtype"]]
        note = Path(f"{file}.json")
        best = Path(f"{file}.best")
        size = shape.numel() * dtype.itemsize
        if not file.exists():
            best.unlink(missing_ok=True)
            reserve(file, size)
            write_text(str(note), json.dumps(made_of))
        elif not note.is_file() or read_json(note) != made_of or file.stat().st_size != size:
            raise ValueError(
                f"--features: {file} has features of other data or weights, or is cut short; "
                "name another file"
            )
        print(f"features: {[*shape]} in {made_of['dtype']}, {size / 1e9:.2f} GB, in {file}")
        self.kept = mapped(file, shape, dtype)
        if self.ranks:
            best_size = shape[:-1].numel() * torch.int32.itemsize
            if not best.exists() or best.stat().st_size != best_size:
                reserve(best, best_size)
            self.kept_best = mapped(best, shape[:-1], torch.int32)

    @torch.no_grad()
    def of(self, batch: Batch) -> Tensor:
        """Return the features of a batch, [B, T, (1 + aux_layers) F]. Writes: the file."""
        tokens = batch.tokens.to(self.steps.device)
        number = batch.number
        if self.kept is None:
            return self.compute(tokens, self.steps)
        if not self.has(number):
            features = self.compute(tokens, self.steps)
            if self.ranks:
                self.kept_best[number] = best_tokens(self.target, features) + 1
            self.kept[number] = features.to(self.kept)
        return self.kept[number, ..., : self.width].to(tokens.device)

    def best(self, features: Tensor, batch: Batch) -> Tensor | None:
        """Return the target's best tokens of a batch, [B, T] int64; None where no loss asks.

        features: [B, T, (1 + aux_layers) F], the batch's, as from `of`
        """
        if not self.ranks:
            return None
        if self.kept_best is None:
            return best_tokens(self.target, features)
        return self.kept_best[batch.number].to(features.device, torch.int64) - 1

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


def mapped(file: Path, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor whose numbers are the file's."""
    return torch.from_file(str(file), shared=True, size=shape.numel(), dtype=dtype).view(shape)


def check_room(file: Path, size: int) -> None:
    """Check that the disk has room for a file of `size` bytes. Raises: ValueError."""
    free = shutil.disk_usage(file.parent).free
    if size > free - 1e9:
        raise ValueError(
            f"--features: {size / 1e9:.2f} GB do not fit beside {file.parent}, "
            f"{free / 1e9:.2f} GB are free (1 GB stays free); name a directory on another disk"
        )


def reserve(file: Path, size: int) -> None:
    """Make a file of `size` zero bytes with blocks on the disk. Raises: ValueError."""
    check_room(file, size)
    with open(file, "wb") as out:
        # a disk that fills up later must not break the mapping
        os.posix_fallocate(out.fileno(), 0, size)
