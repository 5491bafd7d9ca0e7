"""The target's features of training batches: computed as they come, or kept in a file after the first time.

The file holds one epoch in the dtype of training, batch by batch: [batches, B, T, (1 + aux_layers) F], with the aux_layers of a new
head of version 3, so that both versions can read it. The first epoch writes it, later ones read it; so do later runs on
the same data. FILE.json says what it was made of.
Trade-off: later epochs have the batches of the first, in another order; without a file, each has batches of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from files import read_json, write_text
from model import DTYPES, Transformer
from scripts.train.losses import default_aux_layers


class Features:
    """The target's features of every batch, with the head's aux_layers, from the file if there is one."""

    def __init__(
        self, config: Any, target: Transformer, aux_layers: tuple[int, ...], tokens: Tensor
    ):
        """config: train_eagle.TrainConfig; aux_layers: the head's; tokens: [M] int64, an epoch

        Raises: ValueError for features that cannot be kept, or a file with those of other data.
        """
        self.width, kept_aux_layers = (1 + len(aux_layers)) * target.config.dim, aux_layers
        self.steps = torch.arange(config.seq_len, device=config.device).expand(
            config.batch_size, -1
        )
        self.kept = (
            None  # [count, B, T, (1 + aux_layers) F]; batches that were not computed yet are 0
        )
        if config.features:
            kept_aux_layers = default_aux_layers(target.config.n_layers)
            if aux_layers not in ((), kept_aux_layers):
                rule = f"--features keeps the inputs of layers {kept_aux_layers}; --init takes those of {aux_layers}"
                raise ValueError(f"{rule}; leave it out")
            shape = (
                len(tokens) // self.steps.numel(),
                *self.steps.shape,
                (1 + len(kept_aux_layers)) * target.config.dim,
            )
            made_of = {
                "shape": shape,
                "dtype": config.dtype,
                "aux_layers": kept_aux_layers,
                "checkpoint": config.checkpoint,
            }
            made_of["tokens"] = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
            self.kept = self._open(Path(config.features), json.loads(json.dumps(made_of)))
        self.look = torch.compile(
            lambda tokens, steps: target(tokens, steps, aux_layers=kept_aux_layers)
        )

    @staticmethod
    def _open(file: Path, made_of: dict) -> Tensor:
        """The tensor that lies in the file; a new one is full of zeros."""
        shape, dtype, note = made_of["shape"], DTYPES[made_of["dtype"]], Path(f"{file}.json")
        size = math.prod(shape) * dtype.itemsize
        if not file.exists():
            reserve(file, size)
            write_text(str(note), json.dumps(made_of))
        elif not note.is_file() or read_json(note) != made_of or file.stat().st_size != size:
            raise ValueError(
                f"--features: {file} has features of other data, or is cut short; name another file"
            )
        print(
            f"features: {' x '.join(map(str, shape))} in {made_of['dtype']}, {size / 1e9:.2f} GB, in {file}"
        )
        return torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=dtype).view(
            shape
        )

    @torch.no_grad()
    def of(self, tokens: Tensor, number: int) -> Tensor:
        """tokens: [B, T], batch `number` of its epoch. Writes: the file. Returns: [B, T, (1 + aux_layers) F]."""
        if self.kept is None:
            return self.look(tokens, self.steps)
        if not self.has(number):
            self.kept[number] = self.look(tokens, self.steps).to(self.kept)
        return self.kept[number, ..., : self.width].to(tokens.device)

    def has(self, number: int) -> bool:
        """Whether the file holds a batch: the last row to be written is not 0 then."""
        return bool(self.kept[number, -1, -1].any())


def reserve(file: Path, size: int) -> None:
    """Make a file of `size` zero bytes whose blocks exist. Raises: ValueError when the disk has no room for it."""
    free = shutil.disk_usage(file.parent).free
    if size > free - 1e9:
        room = f"--features: {size / 1e9:.2f} GB do not fit beside {file.parent}, {free / 1e9:.2f} GB are free"
        raise ValueError(
            f"{room} (1 GB stays free); leave it out, and they are computed as they are needed"
        )
    with open(file, "wb") as out:
        os.posix_fallocate(
            out.fileno(), 0, size
        )  # a disk that fills up later must not break the mapping
