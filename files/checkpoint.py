"""Read and write the tensors of a model directory by name.

1. `WeightFiles` reads safetensors or .bin files, single or sharded. They are memory-mapped: only
   tensors that are used are read. Any other object with named tensors is a `TensorSource` too, and
   can be loaded like files.
2. `write_checkpoint` writes shards, with at most one shard in memory. It writes to a temporary
   directory and renames that at the end, so that a directory under the final name is always
   complete. The next run removes the files that a killed run left behind.
3. `Quantization` is the format of quantized weights, from config.json or an option.

Not here: text and JSON (files/io.py); the keys of config.json (files/fields.py); the meaning of the
names (files/weights.py); rounding (backends/formats.py).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from files.fields import text_part
from files.io import check_out, gguf_files, read_json, set_usual_mode
from files.untrusted import load_pickle, read_untrusted
from options import one_line
from run.options import FORMAT_NAMES, GROUP_SIZES

METHOD = "gpt-eagle"  # `quant_method` in config.json
BLOCKS = "blocks"  # the format of weights in the blocks of a GGUF file (files/gguf_blocks.py)
SHARD_BYTES = 2 * 10**9
OPEN_GROUP = 64  # the largest group of int4 where none is given: 128 lose much for 3 % less memory
# single files of weights, or the beginning of an index's name; the last ones are draft heads'
FILES = (
    "model.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.safetensors",
    "hydra_lm_head.pt",
)
# beginnings of tensors' names in a model that also takes pictures or sound -> in one of text alone
TEXT_PART = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# files with the quantization of AutoGPTQ and AutoAWQ, where config.json has none -> their method
OLDER = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
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


# ---------------------------------------------------------------------- quantization


@dataclass(frozen=True)
class Quantization:
    """The format of quantized weights, from `--quant` or a checkpoint's config.json."""

    format: str  # one of FORMAT_NAMES, or BLOCKS
    # inputs that share a scale; 0: `fit_group` chooses it for int4, all inputs for int8
    group_size: int = 0
    saved: bool = False  # the files hold codes already
    every_type: bool = False  # BLOCKS on CUDA: not only `files.gguf_blocks.KEPT_BY_DEFAULT`

    @staticmethod
    def of(format: str, group_size: int) -> Quantization | None:
        """Return the value of `--quant` or `quant_draft`; None for `none`."""
        if format == "none":
            return None
        return Quantization(format, group_size if format == "int4" else 0)

    @property
    def is_blocks(self) -> bool:
        """Return whether weights stay in the blocks of a GGUF file."""
        return self.format == BLOCKS

    def check(self, where: str) -> Quantization:
        """Check the format and the group size.

        where: the flag or key that holds them, for the message
        Raises: ValueError for an unknown one.
        """
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


def read_model_config(path: Path) -> dict:
    """Read config.json of a directory, with the quantization that older files have beside it.

    Of a model that also takes pictures or sound it is the text part's.

    Raises: ValueError when it is missing or broken.
    """
    raw = read_json(path / "config.json")
    for name, method in OLDER.items():
        beside = path / name
        if "quantization_config" not in raw and beside.is_file():
            raw["quantization_config"] = {"quant_method": method} | read_json(beside)
    if any(map(_is_mlx, (raw.get("quantization"), raw.get("quantization_config")))):
        raise ValueError(
            f"{path}: weights quantized by MLX are not supported here; use the original model, or "
            "a GGUF file of it"
        )
    return text_part(raw)


def _is_mlx(quantization: Any) -> bool:
    """Return whether a value of config.json is a quantization as mlx-lm writes it."""
    if not isinstance(quantization, dict) or not {"group_size", "bits"} <= quantization.keys():
        return False
    others = {"quant_method", "desc_act", "sym", "zero_point", "version"}
    return not others & quantization.keys()


def foreign_quantization(raw: dict) -> Any:
    """Return another library's quantization in a config.json, of any type, or None."""
    older = raw.get("compression_config")  # of compressed-tensors
    quantization = raw.get("quantization_config", older)
    if isinstance(quantization, dict) and quantization.get("quant_method") == METHOD:
        return None
    return quantization


def is_mxfp4(raw: dict) -> bool:
    """Return whether a config.json says that the experts' weights are in MXFP4
    (files/stacks.py).
    """
    quantization = foreign_quantization(raw)
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


def saved_quantization(raw: dict, path: Path | None = None) -> Quantization | None:
    """Read `quantization_config` of a config.json.

    path: the directory, for the message
    Raises: ValueError for another library's quantization.
    """
    foreign = foreign_quantization(raw)
    if foreign is not None:
        method = foreign.get("quant_method") if isinstance(foreign, dict) else foreign
        where = f"{path}: " if path else ""
        raise ValueError(
            f"{where}checkpoints quantized with {method} are not supported here; use the original"
        )
    own = raw.get("quantization_config")
    if own is None:
        return None
    quant = Quantization(str(own.get("format")), own.get("group_size", 0), saved=True)
    return quant.check("quantization_config")


def scale_name(weight: str) -> str:
    """Return the name of a stored weight's scales."""
    return weight + "_scale"


def in_groups(quant: Quantization, inputs: Collection[int]) -> Quantization:
    """Return int8 in the largest groups that divide the inputs of all weights, if any do.

    Other formats, formats of files, and groups that are given, are returned as they are.
    """
    if quant.format != "int8" or quant.saved or quant.group_size:
        return quant
    fits = [size for size in GROUP_SIZES if not any(n % size for n in inputs)]
    return replace(quant, group_size=max(fits, default=0))


def fit_group(quant: Quantization, inputs: dict[str, int]) -> Quantization:
    """Choose 64, or 32 where 64 does not divide the inputs of every weight, if none is given.

    inputs: weight -> its number of inputs
    Raises: ValueError for a weight that does not fit the format.
    """
    fits = [size for size in GROUP_SIZES if not any(n % size for n in inputs.values())]
    largest = fits[-1] if fits else GROUP_SIZES[0]
    group = quant.group_size
    if quant.format == "int4":
        group = group or min(largest, OPEN_GROUP)
    for weight, n in inputs.items():
        if group and n % group:
            remedy = f"group_size={largest}" if fits else "--quant int8"
            if quant.saved:
                remedy = "another checkpoint"
            raise ValueError(
                f"{quant.format} group size {group} does not divide in_features {n} of {weight}; "
                f"use {remedy}"
            )
        if n % 4:
            raise ValueError(
                f"{quant.format} needs in_features in multiples of 4; {weight} has {n}"
            )
    return replace(quant, group_size=group)


# ---------------------------------------------------------------------- reading


class Codes(NamedTuple):
    """A quantized weight, as the layers of quantize.py take it."""

    codes: Tensor  # [N, K] int8
    scale: Tensor  # int8: [N] fp32; both: [N, K / G], 16 bits; G: a multiple of 32
    zero: Tensor | None = None  # of groups: zero points, [N, K / G] int8, subtracted from codes

    def numbers(self) -> Tensor:
        """Return the weight, [N, K] fp32."""
        scale = self.scale.float().view(len(self.codes), -1, 1)  # [N, groups, 1]
        groups = self.codes.float().unflatten(1, (scale.shape[1], -1))
        if self.zero is not None:
            groups -= self.zero[..., None]
        return (groups * scale).flatten(1)


class TensorSource(Protocol):
    """Tensors by name, and their config.json."""

    path: Path  # the origin of the tensors, for error messages
    config: dict  # the content of config.json
    readers: dict[str, Callable[[], Tensor]]  # every tensor's name, and a function that reads it
    # weights quantized by another library, which have no reader, and functions that unpack them;
    # of a GGUF file those that return `files.gguf_blocks.Blocks`
    quantized: Mapping[str, Callable[[], Any]] = MappingProxyType({})
    note: str = ""  # printed when all is read
    block_types: str = ""  # of a GGUF file's matrices, for a note
    makes_tensors: bool = False  # every tensor that is read is a new one, not a view of a file

    def type_of(self, name: str) -> str:
        """Return the type of the blocks of a tensor that has a reader; "": it has none."""
        return ""

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read one tensor.

        dtype: the caller will round the tensor to it; a source may do that already
        Raises: ValueError when it is missing, or a weight is a single number.
        """
        if name not in self.readers:
            raise ValueError(f"{self.path}: the weight {name} is missing; download it again")
        tensor = self.readers[name]()
        if name.endswith(".weight") and not tensor.dim():
            raise ValueError(f"{self.path}: {name} is a single number; use a model's own weights")
        return tensor


def _text_name(name: str) -> str:
    """Return a tensor's name in a model of text alone."""
    for begin, own in TEXT_PART.items():
        if name.startswith(begin):
            return own + name.removeprefix(begin)
    return name


class WeightFiles(TensorSource):
    """The tensors of a model directory, in memory-mapped files.

    A tensor's memory is the file's until it is copied.
    """

    def __init__(self, path: Path):
        """Open the files of a directory.

        Raises: ValueError when the config or the weights are missing, or a file is corrupt.
        """
        self.path = path
        self.config = read_model_config(path)
        self.readers: dict[str, Callable[[], Tensor]] = {}
        for file in self._shards():
            if not os.path.isfile(file):  # False too for a name that no file can have
                raise ValueError(
                    f"{path}: the index names {file.name}, which is missing; download it again"
                )
            if file.suffix == ".safetensors":
                self._open_safetensors(file)
            else:
                self._open_bin(file)
        self.readers = {_text_name(name): read for name, read in self.readers.items()}

    def _shards(self) -> list[Path]:
        for name in FILES:
            # a whole file goes before an index, which may be that of the files it was made of
            if (self.path / name).is_file():
                return [self.path / name]
            index = self.path / f"{name}.index.json"
            if index.is_file():
                return self._indexed(index)
        only = list(self.path.glob("*.safetensors"))
        if len(only) == 1:  # AutoGPTQ names it by the format
            return only
        names = "model.safetensors nor pytorch_model.bin (single or sharded)"
        for kind in ("medusa", "hydra"):
            if f"{kind}_num_heads" in self.config:
                names = f"{kind}_lm_head.safetensors nor {kind}_lm_head.pt"
        files = gguf_files(self.path)
        remedy = (
            f"name one of {', '.join(file.name for file in files)}" if files else "add the weights"
        )
        raise ValueError(f"{self.path} has neither {names}; {remedy}")

    def _indexed(self, index: Path) -> list[Path]:
        """Return the files that an index names. Raises: ValueError for an index without any."""
        names = read_json(index).get("weight_map")
        fault = f"{index} has no weight_map; download it again"
        if not isinstance(names, dict) or not names:
            raise ValueError(fault)
        if not all(isinstance(name, str) for name in names.values()):
            raise ValueError(fault)
        files = sorted(set(names.values()))
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
            raise ValueError(f"{index} names files outside of its folder; download it again")
        return [self.path / name for name in files]

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
            isinstance(value, Tensor) for value in content.values()
        ):
            raise ValueError(f"{file} does not hold tensors by name; use a model's own weights")
        for name, tensor in content.items():
            if type(name) is not str or not _is_dense(tensor):
                shown = one_line(repr(name), 100)
                raise ValueError(
                    f"{file}: {shown} is not the name of a dense tensor; use other weights"
                )
            self.readers[name] = tensor.detach  # of a parameter, the tensor


def _is_dense(tensor: Tensor) -> bool:
    special = tensor.is_nested or tensor.is_quantized or tensor.is_complex() or tensor.is_meta
    return tensor.layout == torch.strided and not special


# ---------------------------------------------------------------------- writing


def write_checkpoint(
    out: Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: dict,
    source: Path,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model directory: shards, their index, config.json, and `COPIED` from `source`.

    tensors: names and tensors, each computed when its turn comes
    shard_bytes: no shard grows beyond this, unless one tensor is larger
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
        for name in COPIED:
            if (source / name).is_file():
                (temporary / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, temporary / name)
        _write_json(temporary / "config.json", config)
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
    document = {"metadata": {"total_size": total}, "weight_map": index}
    _write_json(folder / "model.safetensors.index.json", document)


def _write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
