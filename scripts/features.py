"""The target's features of training batches: computed as they come, or kept on disk after the first time.

The file holds one epoch in the dtype of training, batch by batch: [batches, B, T, (1 + taps) F]. The first epoch writes
it, later ones read it, a resumed run finds it, and the end of training removes it.
Trade-off: later epochs have the batches of the first, in another order; without a file, each has batches of its own.
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import _path  # noqa: F401  (finds the project)
from model import DTYPES, Transformer


class Features:
    """The target's features of every batch, with the head's taps, from the disk if it keeps them."""

    def __init__(self, config: Any, target: Transformer, taps: tuple[int, ...], count: int):
        """config: train_eagle.TrainConfig; taps: the head's; count: batches of an epoch

        Raises: ValueError for features that cannot be kept.
        """
        self.look = torch.compile(lambda tokens, steps: target(tokens, steps, taps=taps))
        self.steps = torch.arange(config.seq_len, device=config.device).expand(config.batch_size, -1)
        self.kept = None  # [count, B, T, (1 + taps) F]; batches that were not computed yet are 0
        if not config.cache_features:
            return
        if config.steps <= count:
            short = f"--cache_features: {config.steps} steps are not an epoch ({count}), so no batch comes twice"
            raise ValueError(f"{short}; leave it out")
        width, dtype, file = (1 + len(taps)) * target.config.dim, DTYPES[config.dtype], self.file(config)
        shape = (count, config.batch_size, config.seq_len, width)
        size = math.prod(shape) * dtype.itemsize
        print(f"features: {' x '.join(map(str, shape))} in {config.dtype}, {size / 1e9:.2f} GB, in {file}")
        if not (config.resume and file.is_file() and file.stat().st_size == size):
            reserve(file, size)
        self.kept = torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=dtype).view(shape)

    @staticmethod
    def file(config: Any) -> Path:
        """Where they are kept; the file goes at the end of training."""
        return Path(config.out) / "features.bin"

    @torch.no_grad()
    def of(self, tokens: Tensor, number: int) -> Tensor:
        """tokens: [B, T], batch `number` of its epoch. Writes: the file. Returns: [B, T, (1 + taps) F]."""
        if self.kept is None:
            return self.look(tokens, self.steps)
        if not self.has(number):
            self.kept[number] = self.look(tokens, self.steps).to(self.kept)
        return self.kept[number].to(tokens.device)

    def has(self, number: int) -> bool:
        """Whether the file holds a batch: the last row to be written is not 0 then."""
        return bool(self.kept[number, -1, -1].any())


def reserve(file: Path, size: int) -> None:
    """Make a file of `size` zero bytes whose blocks exist. Raises: ValueError when the disk has no room for it."""
    file.unlink(missing_ok=True)
    free = shutil.disk_usage(file.parent).free
    if size > free - 1e9:
        room = f"--cache_features: {size / 1e9:.2f} GB do not fit beside {file.parent}, {free / 1e9:.2f} GB are free"
        raise ValueError(f"{room} (1 GB stays free); leave it out, and they are computed as they are needed")
    with open(file, "wb") as out:
        os.posix_fallocate(out.fileno(), 0, size)  # a disk that fills up later must not break the mapping
