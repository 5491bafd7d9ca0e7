"""Weight quantization: int8 with a scale per output, or int4 with a scale per group of inputs.

    python generate.py --checkpoint DIR --quant int4                          # quantize while loading
    python quantize.py --checkpoint DIR --quant int4 --out DIR-int4           # or once; generate.py loads the result

1. A format (`FORMATS`) turns a float weight into codes and scales, one at a time: no model exists in full precision.
2. A layer packs its codes for the product of its device (ops/quantized.py).
3. On disk, codes have the weight's own name, and scales that name and `_scale`; config.json says the format in
   `quantization_config`. Quantizing while loading gives the same bits.

Trade-off: no calibration data is used. Any checkpoint can be quantized, alone and in one pass.
Not here: products; embeddings, which are looked up and never multiplied.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from checkpoint import (
    METHOD,
    Quantization,
    TensorSource,
    WeightFiles,
    check_out,
    fit_group,
    saved_quantization,
    scale_name,
    write_checkpoint,
)
from command_line import one_line_errors, option, parse
from files import read_json
from ops.norm import add, swiglu
from ops.quantized import PRODUCTS, join_zeros, split_zeros
from options import FORMAT_NAMES, GROUP_SIZES, pick_device

AT_ONCE = {
    "cpu": 2**17,
    "cuda": 2**24,
}  # weights to round; a CPU's cache holds so many, a GPU wants few launches
SEARCH = tuple(
    8 / 7 - 0.04 * i for i in range(12)
)  # tried for code -8, in units of the largest magnitude


# ------------------------------------------------------------------------------------------------ formats


class QuantLinear(nn.Module):
    """A linear layer with codes and scales in place of its weight. Subclasses are the formats."""

    format: ClassVar[str]
    file_dtype: ClassVar[torch.dtype]
    scale_dtype: ClassVar[torch.dtype]

    def __init__(
        self, codes: Tensor, scale: Tensor, bias: Tensor | None = None, fp32_out: bool = False
    ):
        """codes: [N, K] int8; scale: as the format has it, on the same device

        fp32_out: outputs in fp32 (LM heads), never rounded
        """
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.fp32_out = fp32_out
        self.group_size = (
            self.in_features // scale.shape[1] if scale.dim() > 1 else 0
        )  # 0: one scale per output
        self.product = PRODUCTS[self.format, codes.device.type]
        packed, scale = self.product.pack(codes, scale)
        self.register_buffer("packed", packed)
        self.register_buffer("scale", scale)
        self.bias = nn.Parameter(bias, requires_grad=False) if bias is not None else None

    @classmethod
    def encode(cls, weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
        """Round a weight, a few rows at a time, so that no copy of it exists in fp32.

        weight: [N, K] float. Returns: codes [N, K] int8; scale, `scale_shape` of `scale_dtype`.
        """
        codes = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
        scale = weight.new_empty(cls.scale_shape(weight.shape, group_size), dtype=cls.scale_dtype)
        rows = max(1, AT_ONCE[weight.device.type] // weight.shape[1])
        for part, part_codes, part_scale in zip(*(t.split(rows) for t in (weight, codes, scale))):
            cls.encode_rows(part.float(), part_codes, part_scale)
        return codes, scale

    @staticmethod
    def encode_rows(weight: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Round a few rows. weight: [N, K] fp32. Writes: codes, scale."""
        raise NotImplementedError

    @staticmethod
    def decode(codes: Tensor, scale: Tensor) -> Tensor:
        """The weight that codes and scale stand for, [N, K] fp32."""
        raise NotImplementedError

    @staticmethod
    def to_file(codes: Tensor) -> Tensor:
        """Codes as they are stored, `file_shape` of `file_dtype`."""
        return codes

    @staticmethod
    def from_file(stored: Tensor) -> Tensor:
        """The inverse of `to_file`."""
        return stored

    @staticmethod
    def file_shape(shape: torch.Size) -> torch.Size:
        """Shape of the stored codes of a weight."""
        return shape

    @staticmethod
    def scale_shape(shape: torch.Size, group_size: int) -> torch.Size:
        """Shape of the scales of a weight."""
        return shape[:1]

    @classmethod
    def stored_bytes(cls, shape: torch.Size, group_size: int) -> int:
        """Size of a weight's codes and scales in a file."""
        scales = cls.scale_shape(shape, group_size).numel() * cls.scale_dtype.itemsize
        return cls.file_shape(shape).numel() * cls.file_dtype.itemsize + scales

    @classmethod
    def from_float(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        group_size: int = 128,
        fp32_out: bool = False,
    ):
        """Make a layer of a weight, [N, K] float, on the weight's device."""
        return cls(*cls.encode(weight, group_size), bias, fp32_out)

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        if (
            self.product.split_k and self.bias is not None and not self.fp32_out
        ):  # what adds the sums adds the bias
            return add(self.bias, self.product.split_k(x, self.packed, self.scale))
        y = self.product.multiply(x, self.packed, self.scale, self.out_features, self.fp32_out)
        return y if self.bias is None else y + self.bias

    def forward_split_k(self, x: Tensor) -> Tensor:  # [..., K] -> what `RMSNorm.add` takes
        whole = self.product.split_k is None or self.bias is not None
        return self(x) if whole else self.product.split_k(x, self.packed, self.scale)

    def forward_swiglu(
        self, x: Tensor
    ) -> Tensor:  # [..., K] -> [..., N / 2]: SwiGLU of outputs with gate above up
        apart = self.product.swiglu is None or self.bias is not None
        return swiglu(self(x)) if apart else self.product.swiglu(x, self.packed, self.scale)

    def codes_and_scale(self) -> tuple[Tensor, Tensor]:
        """The codes and scales that were packed."""
        return self.product.unpack(self.packed, self.scale, self.out_features, self.in_features)

    def dequantize(self) -> Tensor:
        """The weight that the codes and scales stand for, [N, K] fp32."""
        return self.decode(*self.codes_and_scale())

    def rows(self, ids: Tensor) -> QuantLinear:
        """A layer with some of the outputs, and the codes and scales of this one. ids: [R] int64."""
        codes, scale = self.codes_and_scale()
        return type(self)(
            codes[ids], scale[ids], None if self.bias is None else self.bias[ids], self.fp32_out
        )

    def operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Packed codes, scale and bias, as ops/cpu/layers.py takes them."""
        return self.packed, self.scale, self.bias


class Int8Linear(QuantLinear):
    """Codes -127 .. 127 of a byte each, and an fp32 scale per output, so that the largest magnitude is exact."""

    format, file_dtype, scale_dtype = "int8", torch.int8, torch.float32

    @staticmethod
    def encode_rows(weight: Tensor, codes: Tensor, scale: Tensor) -> None:
        torch.div(weight.abs().amax(1).clamp(min=1e-30), 127, out=scale)  # [N]
        codes.copy_((weight / scale[:, None]).round_().clamp_(-127, 127))

    @staticmethod
    def decode(codes: Tensor, scale: Tensor) -> Tensor:
        return codes.float() * scale[:, None]


class Int4Linear(QuantLinear):
    """Codes -8 .. 7, and a bf16 scale per output and group of inputs. In a file, a byte's low half is the even column.

    A scale may be negative, so that the larger extreme can be code -8, as in llama.cpp's Q4_0. We make no zero points;
    others' files have them, and fp16 scales.
    """

    format, file_dtype, scale_dtype = "int4", torch.uint8, torch.bfloat16

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        fp32_out: bool = False,
        zero: Tensor | None = None,
    ):
        """Make a layer of the weight (codes - zero) * scale, in fp32: nothing is rounded.

        codes: [N, K] int8 in -8 .. 7; scale: [N, K/G] bfloat16 or float16, or int32 from `join_zeros`
        zero: [N, K/G] int8 in -8 .. 8, or None; G: any multiple of 32, as K where there is a scale per output
        Raises: ValueError for other groups.
        """
        group, rest = divmod(codes.shape[1], scale.shape[1])
        sizes = [size for size in GROUP_SIZES if group % size == 0 and not rest]
        if not sizes:
            rule = f"int4 groups must be of a multiple of {GROUP_SIZES[0]} inputs"
            raise ValueError(
                f"{rule}; {scale.shape[1]} scales of {codes.shape[1]} inputs make none; use --quant int8"
            )
        if zero is not None or scale.dtype == torch.float16:
            scale = join_zeros(scale, zero)
        super().__init__(codes, scale.repeat_interleave(group // sizes[-1], 1), bias, fp32_out)

    @staticmethod
    def encode_rows(weight: Tensor, codes: Tensor, scale: Tensor) -> None:
        groups = weight.unflatten(1, (scale.shape[1], -1))  # [N, K/G, G]
        scale.copy_(
            _search_scale(groups).squeeze(-1)
        )  # rounds to bf16; the codes are made for the rounded scale
        codes.copy_(
            _round_int4(groups, scale.float()[..., None], torch.empty_like(groups)).flatten(1)
        )

    @staticmethod
    def decode(codes: Tensor, scale: Tensor) -> Tensor:
        groups, steps = split_zeros(codes, scale)
        return (groups * steps).flatten(1)

    @staticmethod
    def to_file(codes: Tensor) -> Tensor:
        nibbles = codes.view(torch.uint8) & 15
        return nibbles[:, ::2] | nibbles[:, 1::2] << 4

    @staticmethod
    def from_file(stored: Tensor) -> Tensor:
        nibbles = torch.stack((stored & 15, stored >> 4), -1).flatten(1)
        return ((nibbles ^ 8).to(torch.int8) - 8).contiguous()  # the sign of four bits

    @staticmethod
    def file_shape(shape: torch.Size) -> torch.Size:
        return torch.Size((shape[0], shape[1] // 2))

    @staticmethod
    def scale_shape(shape: torch.Size, group_size: int) -> torch.Size:
        return torch.Size((shape[0], shape[1] // group_size))


class QuantExperts(nn.Module):
    """A linear layer per expert, with stacked codes and scales in place of their weights."""

    def __init__(
        self, kind: type[QuantLinear], codes_and_scales: Iterator[tuple[Tensor, ...]], experts: int
    ):
        """codes_and_scales: of one expert after the other, each computed in its turn, so that only one exists twice;
        with int4, zero points may follow"""
        super().__init__()
        for e, (codes, scale, *zero) in enumerate(codes_and_scales):
            one = kind(codes, scale, None, False, *zero)
            if e == 0:
                self.kind, self.product = kind, one.product
                self.out_features, self.in_features = one.out_features, one.in_features
                self.register_buffer("packed", one.packed.new_empty(experts, *one.packed.shape))
                self.register_buffer("scale", one.scale.new_empty(experts, *one.scale.shape))
            self.packed[e], self.scale[e] = one.packed, one.scale

    def forward(
        self, x: Tensor, routing: Tensor
    ) -> Tensor:  # [P, K], from ops.experts.route -> [P, N]
        return self.product.multiply(x, self.packed, self.scale, self.out_features, False, routing)

    def operands(self) -> tuple[Tensor, Tensor, None]:
        """Packed codes, scales and no bias, as ops/cpu/layers.py takes them."""
        return self.packed, self.scale, None

    def dequantize(self) -> Tensor:
        """The weights that the codes and scales stand for, [E, N, K] fp32."""
        shape = (self.out_features, self.in_features)
        parts = (
            self.product.unpack(packed, scale, *shape)
            for packed, scale in zip(self.packed, self.scale)
        )
        return torch.stack([self.kind.decode(codes, scale) for codes, scale in parts])


FORMATS: dict[str, type[QuantLinear]] = {kind.format: kind for kind in (Int8Linear, Int4Linear)}


def _round_int4(groups: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    return torch.div(groups, scale, out=out).round_().clamp_(-8, 7)


def _search_scale(groups: Tensor) -> Tensor:
    """Search a scale for each group with a small squared error, as in the weight-only step of AWQ and HQQ.

    Each share in SEARCH gives a scale, and that gives codes q of the group w. The best scale for these codes is
    w.q / q.q, with the squared error w.w - (w.q)^2 / q.q. The first share is plain symmetric rounding.
    groups: [N, K/G, G] fp32. Returns: [N, K/G, 1] fp32, never 0.
    """
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    extreme = torch.where(-low > high, low, high)  # goes to code -8
    extreme = torch.where(extreme.abs() < 1e-30, 1e-30, extreme)
    best, most, codes = extreme / -8, torch.zeros_like(low), torch.empty_like(groups)
    for share in SEARCH:
        _round_int4(groups, extreme * (share / -8), codes)
        along = torch.linalg.vecdot(groups, codes)[..., None]  # w.q
        refit = along / torch.linalg.vecdot(codes, codes)[..., None]
        explained = along * refit
        better = explained > most  # an all-zero group keeps its first scale
        best, most = torch.where(better, refit, best), torch.where(better, explained, most)
    return best


# -------------------------------------------------------------------------------------------------- main


@dataclass(frozen=True)
class QuantizeConfig:
    """Options. Units and effects are in the help texts."""

    checkpoint: str = option("", "Hugging Face directory of a target model or an EAGLE head")
    quant: str = option("int4", "format", FORMAT_NAMES)
    group_size: int = option(
        0, "inputs that share a scale (int4): 32, 64 or 128; 0: the largest that divides all"
    )
    out: str = option("", "directory to write")
    device: str = option("cpu", "where to compute: cpu or cuda")
    overwrite: bool = option(False, "replace the directory if it is there")


def is_quantized(name: str, tensor: Tensor) -> bool:
    """Whether a stored tensor is the weight of a linear layer. Routers are not quantized."""
    others = ("embed_tokens.weight", "block_sparse_moe.gate.weight", "mlp.gate.weight")
    return tensor.dim() == 2 and name.endswith(".weight") and not name.endswith(others)


def encoded(files: TensorSource, quant: Quantization, device: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a directory, with codes and scales for the weights of linear layers. Prints its progress."""
    kind = FORMATS[quant.format]
    for number, name in enumerate(files.readers, 1):
        tensor = files.read(name)
        if is_quantized(name, tensor):
            codes, scale = kind.encode(tensor.to(device), quant.group_size)
            yield name, kind.to_file(codes).cpu()
            yield scale_name(name), scale.cpu()
        elif not name.endswith("rotary_emb.inv_freq"):
            yield name, tensor.clone()
        end = "\n" if number == len(files.readers) else ""
        print(
            f"\r{quant.format}: {number} of {len(files.readers)} tensors",
            end=end,
            file=sys.stderr,
            flush=True,
        )


def quantize_directory(
    path: Path, out: Path, quant: Quantization, device: str = "cpu", overwrite: bool = False
) -> None:
    """Write a quantized copy of a model directory that generate.py loads as it is.

    Raises: ValueError for a directory that is quantized already, a group size that does not divide, or files that
    cannot be read or written. Writes: `out`.
    """
    quant.check("--quant")
    raw = read_json(path / "config.json")
    if saved_quantization(raw, path) is not None:
        raise ValueError(
            f"{path} is quantized already ({raw['quantization_config']['format']}); give the original"
        )
    if out.resolve() in (path.resolve(), *path.resolve().parents):
        raise ValueError(f"--out holds the checkpoint itself ({out}); name another directory")
    check_out(out, overwrite)
    files, kind = WeightFiles(path), FORMATS[quant.format]
    tensors = {name: files.read(name) for name in files.readers}  # memory-mapped
    shapes = {name: tensor.shape for name, tensor in tensors.items() if is_quantized(name, tensor)}
    quant = fit_group(quant, {name: shape[1] for name, shape in shapes.items()})
    need_bytes = sum(tensor.nbytes for name, tensor in tensors.items() if name not in shapes)
    need_bytes += sum(kind.stored_bytes(shape, quant.group_size) for shape in shapes.values())
    check_out(out, overwrite, need_bytes)
    group = {"group_size": quant.group_size} if quant.format == "int4" else {}
    raw["quantization_config"] = {"quant_method": METHOD, "format": quant.format, **group}
    write_checkpoint(out, encoded(files, quant, device), raw, path, overwrite)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config = parse(QuantizeConfig, "quantize.py", "Round a model's weights once and for all.", argv)

    with one_line_errors("quantize.py"):
        if not config.checkpoint or not config.out:
            raise ValueError(
                "--checkpoint and --out are needed: the directory to read and the one to write"
            )
        quant = Quantization(config.quant, config.group_size)
        out, device = Path(config.out), pick_device(config.device)
        quantize_directory(Path(config.checkpoint), out, quant, device, config.overwrite)
        size = sum(f.stat().st_size for f in out.glob("*.safetensors"))
        print(
            f"wrote {config.out}, {size / 1e9:.3f} GB of weights; run: python generate.py --checkpoint {config.out}"
        )


if __name__ == "__main__":
    main()
