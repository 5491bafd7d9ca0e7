"""Writes a Hugging Face model directory tensor by tensor, whole or not at all.

How it works:
1. Tensors arrive one after the other and leave in shards, so that no more than one shard is in memory.
2. Everything goes to a temporary directory beside the final one, which gets its name when it is whole. What a killed
   run left behind is removed by the next.

Reading is weights.py's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 2 * 10**9
COPIED = (  # what a tokenizer, the end of a text and a trimmed draft need, where the source has it
    "tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json", "token_ranks.json",
)  # fmt: skip


def check_out(out: Path, overwrite: bool, need_bytes: int = 0) -> None:
    """Raises: ValueError when `out` may not be written, or the disk is too small for it."""
    if out.exists() and not overwrite:
        raise ValueError(f"{out} exists; give --overwrite to replace it, or choose another directory")
    if out.exists() and not (out / "config.json").is_file():
        raise ValueError(f"--overwrite replaces model directories, and {out} is none; choose another directory")
    parent = next(p for p in out.resolve().parents if p.is_dir())
    free = shutil.disk_usage(parent).free
    if need_bytes > free:
        raise ValueError(f"{out} needs {need_bytes / 1e9:.1f} GB, and {parent} has {free / 1e9:.1f} GB free; make room")


def write_checkpoint(
    out: Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: dict,
    source: Path,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model directory: shards with their index, `config.json`, and the tokenizer of `source`.

    tensors: by name, each made when it is asked for; shard_bytes: a shard is closed before it would grow beyond this
    Raises: ValueError when `out` is there or cannot be written. Writes: `out`.
    """
    check_out(out, overwrite)
    temporary, old = (out.with_name(f"{out.name}{end}") for end in (".tmp", ".old.tmp"))
    try:
        for leftover in (temporary, old):  # of a run that was killed
            if leftover.exists():
                shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
        _write_shards(temporary, tensors, shard_bytes)
        for name in COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, temporary / name)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if out.exists():
            out.rename(old)
        temporary.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write {out} ({error}); free some space or choose another directory") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    shard: dict[str, Tensor] = {}
    index: dict[str, str] = {}
    total = 0

    def close() -> None:
        name = f"model-{len(set(index.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > shard_bytes:
            close()
        shard[name] = tensor.contiguous()
        total += tensor.nbytes
    close()
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    (folder / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")
