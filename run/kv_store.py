"""Keep the caches of texts in a folder: a prefix cache that survives a restart.

1. A text has one file of safetensors: the slots of the caches for all tokens but the last one, the
   drafter's own state, and in its header the tokens and a digest of the model.
2. `put` writes the text of a place before another one takes it, and of all places at the end. Texts
   that it begins with make way for it, and the least recently used ones, so that all files fit
   CAPACITY.
3. `take` copies the text that has most in common with a prompt into a place, from where the
   scheduler goes on as with a text that was read there.

A file is complete or not there. All files of a folder are of one model: its weights, its formats,
its drafter and its context (`digest_of`); a folder of another one is refused.
Trade-off: the decoding thread writes and reads, 46 MB for 2,000 tokens of SmolLM2.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from files.io import replace_file
from options import log_note, require
from run.engine import Engine
from run.session import Session, common_prefix

CAPACITY = 4 * 2**30  # bytes
LEAST = 64  # tokens that are worth a file, and that a file must know beyond a place
SAMPLED = 64  # numbers of each weight that tell models apart
OPTIONS = ("quant", "quant_draft", "dtype", "kv", "device", "draft", "compile", "plain")


class Entry(NamedTuple):
    """A file of a folder."""

    file: Path
    tokens: list[int]  # the last of them is not cached
    size: int  # bytes


class KVStore:
    """The texts of a folder, from the least to the most recently used one."""

    def __init__(self, engine: Engine, folder: Path):
        """Read the headers of all files.

        Raises: ValueError for a folder that cannot be used, or that is another model's.
        """
        self.folder = folder
        self.digest = digest_of(engine)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            files = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
        except OSError as error:
            raise ValueError(f"--kv_store {folder}: {error.strerror}; name a folder") from None
        self.entries = [self._entry(file) for file in files]

    def put(self, session: Session, place: int) -> None:
        """Keep the text of a place, if it is long and new. Writes: a file, and notes a failure."""
        tokens = session.history[place]
        count = len(tokens) - 1
        known = max((common_prefix(entry.tokens, tokens) for entry in self.entries), default=0)
        if count < LEAST or known >= count:
            return
        views = session.prefix(place, count)
        tensors = {str(i): view.cpu().contiguous() for i, view in enumerate(views)}
        size = sum(tensor.nbytes for tensor in tensors.values())
        name = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:32]
        file = self.folder / f"{name}.safetensors"
        header = {"digest": self.digest, "tokens": json.dumps(tokens)}
        try:
            require(size <= CAPACITY, f"a text of {count} tokens is larger than the store")
            self._make_room(tokens, size)
            replace_file(file, lambda path: save_file(tensors, path, header), private=True)
        except (OSError, SafetensorError, ValueError) as error:
            log_note(f"--kv_store: cannot write {file} ({error})")
            return
        self.entries.append(Entry(file, tokens, size))

    def take(self, session: Session, place: int, prompt: list[int], known: int) -> bool:
        """Give a place the kept text that a prompt begins with, if it has over `known` tokens.

        Returns: whether there was one. Writes: the caches and the history of the place.
        """
        shared = [common_prefix(entry.tokens[:-1], prompt) for entry in self.entries]
        if max(shared, default=0) < known + LEAST:
            return False
        entry = self.entries.pop(shared.index(max(shared)))
        count = len(entry.tokens) - 1
        try:
            with safe_open(entry.file, "pt") as file:
                for i, view in enumerate(session.prefix(place, count)):
                    tensor = file.get_tensor(str(i))
                    require(tensor.shape == view.shape, "other sizes")
                    view.copy_(tensor)
            os.utime(entry.file)
        except (OSError, SafetensorError, ValueError) as error:
            session.history[place] = []
            log_note(f"--kv_store: cannot read {entry.file} ({error})")
            return False
        session.history[place] = list(entry.tokens)
        self.entries.append(entry)
        return True

    def _entry(self, file: Path) -> Entry:
        """Read the header of a file. Raises: ValueError for one that is not of this model."""
        try:
            with safe_open(file, "pt") as opened:
                header = opened.metadata() or {}
            tokens = json.loads(header["tokens"])
            require(isinstance(tokens, list) and tokens, "no tokens")
        except (OSError, SafetensorError, KeyError, ValueError):
            raise ValueError(f"--kv_store: {file} is no file of a store; delete it") from None
        other = "another model, or other options (--context, --kv, --quant, --draft, --device)"
        same = header.get("digest") == self.digest
        require(same, f"--kv_store {self.folder} is a store of {other}; name another folder")
        return Entry(file, tokens, file.stat().st_size)

    def _make_room(self, tokens: list[int], size: int) -> None:
        """Delete the files of texts that others begin with, and of the least recently used ones."""
        left = []
        total = size
        for entry in reversed(self.entries):
            total += entry.size
            if total > CAPACITY or tokens[: len(entry.tokens) - 1] == entry.tokens[:-1]:
                total -= entry.size
                entry.file.unlink(missing_ok=True)
            else:
                left.append(entry)
        self.entries = left[::-1]


def digest_of(engine: Engine) -> str:
    """Return a digest of everything that cached numbers depend on: weights, options, sizes."""
    options = [engine.option(name) for name in OPTIONS]
    presets = [preset.name for preset in engine.presets if hasattr(preset, "name")]
    sizes = (engine.context, engine.slots, engine.target.config)
    digest = hashlib.sha256(repr((options, presets, *sizes)).encode())
    for part in (engine.target, engine.drafter.layers):
        for name, weight in part.state_dict().items() if isinstance(part, nn.Module) else ():
            sample = _sample(weight)
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} {sample}".encode())
    return digest.hexdigest()


def _sample(weight: torch.Tensor) -> Any:
    """Return some numbers of a weight, spread over all of it."""
    flat = weight.flatten()
    return flat[:: max(1, len(flat) // SAMPLED)].tolist()
