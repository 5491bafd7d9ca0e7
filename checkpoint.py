"""Read and write the tensors of a model directory by name, and what others' files hold, whatever they hold.

1. `read_fields` takes the keys that a dataclass declares with `key`, each with its rule, of a JSON object.
   `reading` is the boundary to libraries: whatever one raises inside becomes one line that names the file.
2. `WeightFiles` reads safetensors or .bin files, single or sharded. They are memory-mapped: only the tensors that are
   used are read. Any other object with named tensors is a `TensorSource` too, and can be loaded like files.
3. `write_checkpoint` takes one tensor at a time and writes shards, so that at most one shard is in memory. It writes to
   a temporary directory and renames that at the end, so that a directory under the final name is always complete. The
   next run removes what a killed run left behind.
4. `Quantization` is what config.json, or an option, says about quantized weights.

Not here: text and JSON (files.py); what the names mean (hf/weights.py); rounding (quantize.py).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from files import load_pickle, one_line, read_json, read_untrusted
from options import FORMAT_NAMES, GROUP_SIZES

METHOD = "gpt-eagle"  # `quant_method` in config.json
SHARD_BYTES = 2 * 10**9
COPIED = (  # files of the source that are copied if they exist: tokenizer, end-of-sequence ids, a draft vocabulary
    "tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json", "token_ranks.json",
)  # fmt: skip


# --------------------------------------------------------------------------------- what others' files hold


# ------------------------------------------------------------------------------------------------ quantized


@dataclass(frozen=True)
class Quantization:
    """What `--quant` asks for, or what a checkpoint's config.json says."""

    format: str  # one of FORMAT_NAMES
    group_size: int = 0  # int4: inputs that share a scale; 0: what `fit_group` chooses
    saved: bool = False  # the files hold codes already

    @staticmethod
    def of(format: str, group_size: int) -> Quantization | None:
        """The value of `--quant` or `--quant_draft`; `none` gives None."""
        return None if format == "none" else Quantization(format, group_size)

    def check(self, where: str) -> Quantization:
        """Raises: ValueError for an unknown format or group size. where: who asks, for the message."""
        if self.format not in FORMAT_NAMES:
            raise ValueError(
                f"{where}: the format must be one of {', '.join(FORMAT_NAMES)}; it is {self.format}"
            )
        if type(self.group_size) is not int or self.group_size not in (0, *GROUP_SIZES):
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise ValueError(
                f"{where}: the group size must be one of {sizes}; it is {self.group_size}"
            )
        return self


def foreign_quantization(raw: dict) -> Any:
    """What a config.json says about quantized weights that are not ours, whatever that is; None: nothing."""
    said = raw.get(
        "quantization_config", raw.get("compression_config")
    )  # the older key of compressed-tensors
    return None if isinstance(said, dict) and said.get("quant_method") == METHOD else said


def saved_quantization(raw: dict, path: Path | None = None) -> Quantization | None:
    """Read `quantization_config` of a config.json. Raises: ValueError for one that is not ours.

    path: the directory, for the message
    """
    others = foreign_quantization(raw)
    if others is not None:
        method = others.get("quant_method") if isinstance(others, dict) else others
        where = f"{path}: " if path else ""
        raise ValueError(
            f"{where}checkpoints quantized with {method} are not supported here; use the original"
        )
    said = raw.get("quantization_config")
    if said is None:
        return None
    return Quantization(str(said.get("format")), said.get("group_size", 0), saved=True).check(
        "quantization_config"
    )


def scale_name(weight: str) -> str:
    """The name of a stored weight's scales."""
    return weight + "_scale"


def fit_group(quant: Quantization, inputs: dict[str, int]) -> Quantization:
    """Choose the largest group size that divides the inputs of every weight, if none was asked for.

    inputs: weight -> its number of inputs. Raises: ValueError when one does not fit the format.
    """
    fits = [size for size in GROUP_SIZES if not any(n % size for n in inputs.values())]
    group = quant.group_size or [GROUP_SIZES[0], *fits][-1]
    for weight, n in inputs.items():
        if quant.format == "int4" and n % group:
            remedy = f"--group_size {fits[-1]}" if fits else "--quant int8"
            remedy = "another checkpoint" if quant.saved else remedy
            raise ValueError(
                f"int4 group size {group} does not divide in_features {n} of {weight}; use {remedy}"
            )
        if n % 4:
            raise ValueError(
                f"{quant.format} needs in_features in multiples of 4; {weight} has {n}"
            )
    return replace(quant, group_size=group)


# ------------------------------------------------------------------------------------------------ tensors


class Codes(NamedTuple):
    """A quantized weight, as the layers of quantize.py take it."""

    codes: Tensor  # [N, K] int8
    scale: Tensor  # int8: [N] fp32; int4: [N, K / G], 16 bits; G: a multiple of 32
    zero: Tensor | None = None  # int4: [N, K / G] int8, what is subtracted from the codes


class TensorSource(Protocol):
    """Tensors by name, and their config.json."""

    path: Path  # where they come from, for error messages
    config: dict  # the content of config.json
    readers: dict[str, Callable[[], Tensor]]  # every tensor's name, and a function that reads it
    # weights that others quantized, which are not among the readers, and a function that unpacks one
    quantized: Mapping[str, Callable[[], Codes]] = MappingProxyType({})
    note: str = ""  # to be said when all is read
    makes_tensors: bool = (
        False  # whether every tensor that is read is a new one, and not a view of a file
    )

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read one tensor. Raises: ValueError when it is missing.

        dtype: what the caller will round it to; a source may do that already, and needs not
        """
        if name not in self.readers:
            raise ValueError(f"{self.path}: the weight {name} is missing; download it again")
        return self.readers[name]()


class WeightFiles(TensorSource):
    """The tensors of a model directory, in memory-mapped files; their memory is the files' until it is copied."""

    def __init__(self, path: Path):
        """Find the files. Raises: ValueError when the config or the weights are missing, or one is corrupt."""
        self.path, self.config = path, read_json(path / "config.json")
        self.readers: dict[str, Callable[[], Tensor]] = {}
        files = self._shards()
        for file in files:
            if not os.path.isfile(file):  # False too for a name that no file can have
                raise ValueError(
                    f"{path}: the index names {file.name}, which is missing; download it again"
                )
            open_file = self._open_safetensors if file.suffix == ".safetensors" else self._open_bin
            open_file(file)

    def _shards(self) -> list[Path]:
        for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
            index = self.path / f"{stem}{suffix}.index.json"
            if index.is_file():
                names = read_json(index).get("weight_map")
                if (
                    not isinstance(names, dict)
                    or not names
                    or not all(isinstance(f, str) for f in names.values())
                ):
                    raise ValueError(f"{index} has no weight_map; download it again")
                return [self.path / name for name in sorted(set(names.values()))]
            if (self.path / f"{stem}{suffix}").is_file():
                return [self.path / f"{stem}{suffix}"]
        names = "model.safetensors nor pytorch_model.bin (single or sharded)"
        raise ValueError(f"{self.path} has neither {names}; add the weights")

    def _open_safetensors(self, file: Path) -> None:
        with read_untrusted(file):
            handle = safe_open(file, framework="pt")
            names = list(handle.keys())

        def read(name: str) -> Tensor:
            with read_untrusted(file):
                return handle.get_tensor(name)

        for name in names:
            self.readers[name] = partial(read, name)

    def _open_bin(self, file: Path) -> None:
        with read_untrusted(file):
            content = load_pickle(file, mmap=True)
        if not isinstance(content, dict) or not all(
            isinstance(t, Tensor) for t in content.values()
        ):
            raise ValueError(f"{file} does not hold tensors by name; use a model's own weights")
        for name, tensor in content.items():
            special = (
                tensor.layout != torch.strided
                or tensor.is_nested
                or tensor.is_quantized
                or tensor.is_complex()
            )
            if type(name) is not str or special or tensor.is_meta:
                called = one_line(repr(name), 100)
                raise ValueError(
                    f"{file}: {called} is not the name of a dense tensor; use other weights"
                )
            self.readers[name] = tensor.detach  # of a parameter, the tensor


def check_out(out: Path, overwrite: bool, need_bytes: int = 0) -> None:
    """Check where to write. Raises: ValueError when `out` may not be replaced, or the disk has too little space."""
    if out.exists() and not overwrite:
        raise ValueError(
            f"{out} exists; give --overwrite to replace it, or choose another directory"
        )
    if out.exists() and not (out / "config.json").is_file():
        raise ValueError(
            f"--overwrite replaces model directories, and {out} is none; choose another directory"
        )
    parent = next(p for p in out.resolve().parents if p.is_dir())
    free = shutil.disk_usage(parent).free
    if need_bytes > free:
        raise ValueError(
            f"{out} needs {need_bytes / 1e9:.1f} GB, and {parent} has {free / 1e9:.1f} GB free; make room"
        )


def write_checkpoint(
    out: Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: dict,
    source: Path,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model directory: shards with their index, `config.json`, and the files `COPIED` from `source`.

    tensors: names and tensors, each computed when its turn comes; shard_bytes: no shard grows beyond this, unless one
    tensor is larger
    Raises: ValueError when `out` exists and `overwrite` is False, or cannot be written. Writes: `out`.
    """
    check_out(out, overwrite)
    temporary, old = (out.with_name(f"{out.name}{end}") for end in (".tmp", ".old.tmp"))
    try:
        if old.exists() and not out.exists():  # a run was killed between the two renames below
            old.rename(out)
        for leftover in (temporary, old):
            if leftover.exists():
                shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
        _write_shards(temporary, tensors, shard_bytes)
        for name in COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, temporary / name)
        (temporary / "config.json").write_text(
            json.dumps(config, indent=2) + "\n", encoding="utf-8"
        )
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
