"""Read the tensors of a model directory by name.

1. `WeightFiles` reads safetensors or .bin files, single or sharded. They are memory-mapped: only
   tensors that are used are read. Any other object with named tensors is a `TensorSource` too, and
   can be loaded like files.
2. `with_codes` finds the weights that a directory has as codes (files/gptq_awq.py).

Not here: text and JSON (files/io.py); the keys of config.json (files/fields.py); the meaning of the
names (files/weights.py); rounding (quantize.py); writing a directory
(files/writing.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import quantize
from files.fields import text_part
from files.io import gguf_files, read_json
from files.untrusted import load_pickle, read_untrusted
from options import load_part, one_line
from quantize import Quantization

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
# routers, and the confidence of a draft: they are small, and decide
SMALL = (".gate.weight", ".router.weight", ".router.proj.weight", "confidence_head.proj.weight")
# files with the quantization of AutoGPTQ and AutoAWQ, where config.json has none -> their method
OLDER = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


# ---------------------------------------------------------------------- quantization


def read_model_config(path: Path) -> dict:
    """Read config.json of a directory, with the quantization that older files have beside it.

    MXFP4, which is no format of all weights, is left out. Of a model that also takes pictures or
    sound it is the text part's.

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
    raw = text_part(raw)
    if is_mxfp4(raw):
        raw.pop("quantization_config", None)
    return raw


def _is_mlx(quantization: Any) -> bool:
    """Return whether a value of config.json is a quantization as mlx-lm writes it."""
    if not isinstance(quantization, dict) or not {"group_size", "bits"} <= quantization.keys():
        return False
    others = {"quant_method", "desc_act", "sym", "zero_point", "version"}
    return not others & quantization.keys()


def quantization_in(raw: dict) -> Any:
    """Return the quantization in a config.json, of any type, or None."""
    older = raw.get("compression_config")  # of compressed-tensors
    return raw.get("quantization_config", older)


def is_mxfp4(raw: dict) -> bool:
    """Return whether a config.json says that experts are in MXFP4 (files/stacks.py)."""
    quantization = quantization_in(raw)
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


def saved_quantization(raw: dict, path: Path) -> Quantization | None:
    """Return the format that layers have of the codes in a directory; None: it has none.

    raw: the content of config.json
    Raises: ValueError for a quantization that is not supported.
    """
    if quantization_in(raw) is None:
        return None
    return load_part("reader", "format of codes")(raw, path).quantization


def with_codes(files: WeightFiles) -> TensorSource:
    """Return the tensors of a directory, with its quantized weights as codes."""
    if quantization_in(files.config) is None:
        return files
    return load_part("reader", "codes")(files)


def code_bytes(quant: Quantization, shape: torch.Size, scale_bytes: int = 2) -> int:
    """Return the bytes of a weight's codes and scales. scale_bytes: of one of a group"""
    groups = shape[1] // (quant.group_size or shape[1])
    scale = scale_bytes if quant.group_size else 4
    return shape.numel() // (2 if quant.format == "int4" else 1) + scale * shape[0] * groups


# ---------------------------------------------------------------------- reading


class Codes(NamedTuple):
    """A quantized weight, as the layers of quantize.py take it."""

    codes: Tensor  # [N, K] int8
    scale: Tensor  # int8: [N] fp32; both: [N, K / G], 16 bits; G: a multiple of 32
    zero: Tensor | None = None  # of groups: zero points, [N, K / G] int8, subtracted from codes

    @property
    def shape(self) -> torch.Size:
        """N and K."""
        return self.codes.shape

    def numbers(self) -> Tensor:
        """Return the weight, [N, K] fp32."""
        scale = self.scale.float().view(len(self.codes), -1, 1)  # [N, groups, 1]
        groups = self.codes.float().unflatten(1, (scale.shape[1], -1))
        if self.zero is not None:
            groups -= self.zero[..., None]
        return (groups * scale).flatten(1)


@dataclass(frozen=True)
class InBlocks:
    """The reader of a weight that a file has in blocks: it becomes numbers, or stays in them."""

    type: str  # ggml's name
    numbers: Callable[..., Tensor]  # takes a dtype, to which it may round
    blocks: Callable[[], Any]  # returns a `backends.blocks.Blocks`, or the like

    def __call__(self) -> Tensor:
        return self.numbers()


class TensorSource(quantize.TensorSource):
    """Tensors by name, and their config.json, with what loading tells about them.

    A reader may be `InBlocks`; `keep_blocks` moves it to `quantized`.
    """

    note: str = ""  # printed when all is read
    stored: Any = None  # the `StoredFormat` of a directory whose weights are codes
    block_types: str = ""  # of a GGUF file's matrices, for a note
    makes_tensors: bool = False  # every tensor that is read is a new one, not a view of a file

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read one tensor, as the base class does. dtype: blocks may be rounded to it"""
        reader = self.readers.get(name)
        return reader.numbers(dtype) if isinstance(reader, InBlocks) else super().read(name)

    @property
    def quant(self) -> Quantization | None:
        """The format of layers that are made of codes in a directory; None: it has none."""
        return self.stored.quantization if self.stored else None

    @property
    def held(self) -> set[str]:
        """The names of all tensors."""
        return {*self.readers, *self.quantized}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; () where there is none."""
        if name in self.quantized:
            return tuple(self.quantized[name]().shape)
        return tuple(self.read(name).shape) if name in self.readers else ()

    def type_of(self, name: str) -> str:
        """Return the type of the blocks of a tensor that has a reader; "": it has none."""
        return getattr(self.readers.get(name), "type", "")

    def keep_blocks(self, names: Iterable[str] | None = None) -> None:
        """Leave the weights that are stored in blocks to `quantized`.

        names: of tensors in blocks; None: all but routers, which are small, and decide
        Writes: readers, quantized.
        """
        if names is None:
            names = [n for n in self.readers if self.type_of(n) and not n.endswith(SMALL)]
        self.quantized = dict(self.quantized)
        for name in names:
            self.quantized[name] = self.readers.pop(name).blocks

    def widen(self, names: Iterable[str] | None = None) -> None:
        """Let codes become numbers. names: None: all. Writes: readers, quantized."""
        for name in [*self.quantized] if names is None else names:
            self.readers[name] = partial(_numbers, self.quantized.pop(name))

    def mostly_has(self, bits: int) -> bool:
        """Return whether more than half of the weights of matrices have at most so many bits."""
        return self.block_types == "MXFP4" and bits >= 4  # the experts of a directory


def _numbers(read: Callable[[], Codes]) -> Tensor:
    return read().numbers()


def _text_name(name: str) -> str:
    """Return a tensor's name in a model of text alone."""
    for begin, own in TEXT_PART.items():
        if name.startswith(begin):
            return own + name.removeprefix(begin)
    return name


class WeightFiles(TensorSource, quantize.WeightFiles):
    """The tensors of a model directory in safetensors or .bin files, single or sharded."""

    errors = staticmethod(read_untrusted)

    def __init__(self, path: Path):
        """Open the files of a directory.

        Raises: ValueError when the config or the weights are missing, or a file is corrupt.
        """
        super().__init__(path)
        self.readers = {_text_name(name): read for name, read in self.readers.items()}

    def read_config(self) -> dict:
        return read_model_config(self.path)

    def shards(self) -> list[Path]:
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

    def open_file(self, file: Path) -> None:
        if not os.path.isfile(file):  # False too for a name that no file can have
            raise ValueError(
                f"{self.path}: the index names {file.name}, which is missing; download it again"
            )
        if file.suffix == ".safetensors":
            super().open_file(file)
        else:
            self._open_bin(file)

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
