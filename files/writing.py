"""Write a model directory: shards, with at most one in memory.

`write_checkpoint` writes to a temporary directory and renames that at the end, so that a directory
under the final name is always complete. The next run removes the files that a killed run left
behind.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from files.io import check_out, set_usual_mode

SHARD_BYTES = 2 * 10**9
# files of the source that are copied if they exist: the tokenizer, end-of-sequence ids, a draft
# vocabulary
COPIED = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
)


def write_checkpoint(
    out: Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: dict,
    source: Path | None = None,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    check: Callable[[Path], None] = lambda made: None,
) -> None:
    """Write a directory: one file of weights, or shards and their index; config.json.

    tensors: names and tensors, each computed when its turn comes
    source: a model whose `COPIED` go with it, if there is one
    shard_bytes: no shard grows beyond this, unless one tensor is larger
    check: raises ValueError for a directory that must not get the name
    Raises: ValueError when `out` exists and `overwrite` is False, or cannot be written.
    Writes: `out`.
    """
    check_out(out, overwrite)
    temporary = out.with_name(f"{out.name}.tmp")
    old = out.with_name(f"{out.name}.old.tmp")
    try:
        if old.exists() and not out.exists():  # a run was killed between the two renames below
            old.rename(out)
        for leftover in (temporary, old):
            if leftover.exists():
                shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
        _write_shards(temporary, tensors, shard_bytes)
        for name in COPIED if source else ():
            if (source / name).is_file():
                (temporary / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, temporary / name)
        _write_json(temporary / "config.json", config)
        check(temporary)
        if out.exists():
            out.rename(old)
        temporary.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"cannot write {out} ({error}); free some space or choose another directory"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    shard: dict[str, Tensor] = {}
    index: dict[str, str] = {}
    total = 0

    def close() -> None:
        name = f"model-{len(set(index.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        set_usual_mode(folder / name)
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > shard_bytes:
            close()
        shard[name] = tensor.contiguous()
        total += tensor.nbytes
    close()
    if len(set(index.values())) == 1:
        (folder / index[name]).rename(folder / "model.safetensors")
        return
    document = {"metadata": {"total_size": total}, "weight_map": index}
    _write_json(folder / "model.safetensors.index.json", document)


def _write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
