"""Weight quantization: int8 per output, int4 in groups, at load or saved to disk.

    python generate.py --quant int4                                           # quantize while loading
    python quantize.py --checkpoint DIR --quant int4 --out DIR-int4           # or once; generate.py loads the result

How it works:
1. A format (`FORMATS`) turns a float weight into integer codes and scales, one weight at a time, so that a model
   never exists in full precision; `store` puts the linear layer that holds them in the place of the float one.
2. int8: codes -127 .. 127, one fp32 scale per output, the largest magnitude exactly.
   int4: codes -8 .. 7, one bf16 scale per output and group of 32, 64 or 128 inputs. Scales are searched for the least
   squared error of the group and then refitted (`_search_scale`), which clips a little and may be negative, to
   reach -8 on the side of the larger extreme.
3. A layer packs its codes for the operator that multiplies them on its device (`PRODUCTS`):
   CPU: int8 activations (kernels_cpu.cpp), or PyTorch's packed operators where that cannot be built;
   CUDA: 16-bit activations (Triton kernels). One semantics per format and device, whatever the number of tokens.
4. On disk: codes under the weight's own name (int4 two to a byte, the even column low), scales under `_scale`, and
   `quantization_config` in config.json. Saved and on-load quantization give the same bits.

Sources: clipping by search as in AWQ's and HQQ's weight-only step; the signed scale is llama.cpp's Q4_0.
Trade-off: no calibration data, so that any checkpoint quantizes alone in one pass.
Not here: which modules a model has (any nn.Linear or stack of experts will do), embeddings (looked up, never
multiplied).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

import kernels_cpu
import products
from checkpoint import check_out, write_checkpoint
from config import GROUP_SIZES, GenerateConfig, option, parse, pick_device, run_or_fail

METHOD = "gpt-eagle"  # `quant_method` in config.json
SEARCH = tuple(8 / 7 - 0.04 * i for i in range(12))  # tried: the largest magnitude's share at code 8; 8/7 clips nothing


@dataclass(frozen=True)
class Quantization:
    """What `--quant` asks for, or what a checkpoint's config.json says."""

    format: str  # a key of FORMATS
    group_size: int = 128  # int4: inputs that share a scale
    saved: bool = False  # the files hold codes already

    def check(self, where: str) -> Quantization:
        """Raises: ValueError for an unknown format or group size. where: who asks, for the message."""
        if self.format not in FORMATS:
            raise ValueError(f"{where}: the format must be one of {', '.join(FORMATS)}; it is {self.format}")
        if self.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise ValueError(f"{where}: the group size must be one of {sizes}; it is {self.group_size}")
        return self


def draft_quantization(config: GenerateConfig) -> Quantization | None:
    """What `--quant_draft` came to."""
    return None if config.quant_draft == "none" else Quantization(config.quant_draft, config.group_size)


def saved_quantization(raw: dict) -> Quantization | None:
    """Read `quantization_config` of a config.json. Raises: ValueError for one that is not ours."""
    said = raw.get("quantization_config")
    if said is None:
        return None
    if not isinstance(said, dict) or said.get("quant_method") != METHOD:
        method = said.get("quant_method") if isinstance(said, dict) else said
        raise ValueError(f"checkpoints quantized with {method} are not supported; use the original with --quant")
    return Quantization(str(said.get("format")), said.get("group_size", 128), saved=True).check("quantization_config")


def scale_name(weight: str) -> str:
    """Where the scales of a stored weight are found."""
    return weight + "_scale"


def check_group(quant: Quantization, weight: str, inputs: int) -> None:
    """Raises: ValueError when a weight of so many inputs does not fit the format."""
    if quant.format == "int4" and inputs % quant.group_size:
        fits = [size for size in GROUP_SIZES if inputs % size == 0]
        remedy = f"--group_size {fits[-1]}" if fits else "int8"
        raise ValueError(
            f"int4 group size {quant.group_size} does not divide in_features {inputs} of {weight}; use {remedy}"
        )
    if inputs % 4:
        raise ValueError(f"{quant.format} needs in_features in multiples of 4; {weight} has {inputs}")


# ---------------------------------------------------------------------------------------------- products


class Product(NamedTuple):
    """How one device multiplies with one format."""

    pack: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # codes, scale -> two tensors in the operator's layout
    unpack: Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]  # the same, N, K -> codes, scale
    # x, the same, N, wide -> x . w, fp32 if wide; last, where the two are stacks of experts, what products.route says
    apply: Callable[..., Tensor]


def _cpu(operator: Callable[..., Tensor], x: Tensor, *operands: object) -> Tensor:
    wide = operands[-2]
    y = operator(x.float() if x.dtype == torch.float16 else x, *operands)  # they read bf16 and fp32
    return y if wide else y.to(x.dtype)


def _apply_cpu_int4(
    x: Tensor, packed: Tensor, scale: Tensor, n: int, wide: bool, expert: Tensor | None = None
) -> Tensor:
    group = (packed.shape[-1] - 2 * kernels_cpu.STRIP) // 16
    return _cpu(torch.ops.gpt_eagle.w4a8, x, packed, n, group, wide, expert)


def _apply_cpu_int8(
    x: Tensor, packed: Tensor, scale: Tensor, n: int, wide: bool, expert: Tensor | None = None
) -> Tensor:
    return _cpu(torch.ops.gpt_eagle.w8a8, x, packed, scale, wide, expert)


def _one_by_one(apply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Serve stacks of experts one after the other. Eager only, as everything is where PyTorch's operators are used."""

    def stacked(x: Tensor, packed: Tensor, scale: Tensor, n: int, wide: bool, expert: Tensor | None = None) -> Tensor:
        if expert is None:
            return apply(x, packed, scale, n, wide)
        y = x.new_empty(x.shape[0], n, dtype=torch.float32 if wide else x.dtype)
        for e, rows in products.rows_by_expert(expert):
            y[rows] = apply(x[rows], packed[e], scale[e], n, wide)
        return y

    return stacked


def _torch(operator: Callable[..., Tensor], x: Tensor, n: int, wide: bool, *operands: object) -> Tensor:
    y = operator(x.reshape(-1, x.shape[-1]).bfloat16(), *operands)[:, :n]  # fast in bf16 only
    return y.reshape(*x.shape[:-1], n).to(torch.float32 if wide else x.dtype)


def _pack_torch_int4(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    rows = -codes.shape[0] % 16  # what the operator asks for
    codes, scale = (nn.functional.pad(t, (0, 0, 0, rows)) for t in (codes, scale))
    zeros = torch.stack((scale, torch.zeros_like(scale)), -1).transpose(0, 1).contiguous()  # [K/G, N, 2]
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int() + 8, 1), zeros.bfloat16()


def _unpack_torch_int4(packed: Tensor, scale: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    group = k // scale.shape[0]
    unit = torch.stack((torch.ones_like(scale[..., 0]), torch.zeros_like(scale[..., 1])), -1)
    codes = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.eye(k).bfloat16(), packed, group, unit)  # [K, N]
    return codes.T[:n].round().to(torch.int8).contiguous(), scale[:, :n, 0].T.contiguous()


@_one_by_one
def _apply_torch_int4(x: Tensor, packed: Tensor, scale: Tensor, n: int, wide: bool) -> Tensor:
    group = x.shape[-1] // scale.shape[0]
    return _torch(torch.ops.aten._weight_int4pack_mm_for_cpu, x, n, wide, packed, group, scale)


@_one_by_one
def _apply_torch_int8(x: Tensor, packed: Tensor, scale: Tensor, n: int, wide: bool) -> Tensor:
    return _torch(torch.ops.aten._weight_int8pack_mm, x, n, wide, packed, scale)


def _apply_cuda_int4(
    x: Tensor, packed: Tensor, scale: Tensor, n: int, wide: bool, lists: Tensor | None = None
) -> Tensor:
    y = products.w4a16(x, packed, scale, lists)
    return y.float() if wide else y


def _apply_cuda_int8(
    x: Tensor, packed: Tensor, scale: Tensor, n: int, wide: bool, lists: Tensor | None = None
) -> Tensor:
    y = products.w8a16(x, packed, scale, lists)
    return y.float() if wide else y


PRODUCTS = {
    ("int4", "cpu"): Product(
        lambda codes, scale: (kernels_cpu.pack_int4(codes, scale), scale.new_empty(0)),
        lambda packed, scale, n, k: kernels_cpu.unpack_int4(packed, n),
        _apply_cpu_int4,
    ),
    ("int8", "cpu"): Product(
        lambda codes, scale: (kernels_cpu.pack_int8(codes), scale),
        lambda packed, scale, n, k: (kernels_cpu.unpack_int8(packed, n), scale),
        _apply_cpu_int8,
    ),
    ("int4", "torch"): Product(_pack_torch_int4, _unpack_torch_int4, _apply_torch_int4),
    ("int8", "torch"): Product(
        lambda codes, scale: (codes, scale.bfloat16()),  # what the operator asks for
        lambda packed, scale, n, k: (packed, scale.float()),
        _apply_torch_int8,
    ),
    ("int4", "cuda"): Product(
        lambda codes, scale: (
            products.pack_int4(codes),
            products.pack_scale(scale, codes.shape[1] // scale.shape[1]),
        ),
        lambda packed, scale, n, k: (products.unpack_int4(packed, n, k), products.unpack_scale(scale, k)),
        _apply_cuda_int4,
    ),
    ("int8", "cuda"): Product(
        lambda codes, scale: (products.pack_int8(codes), scale),
        lambda packed, scale, n, k: (products.unpack_int8(packed, n, k), scale),
        _apply_cuda_int8,
    ),
}


def product_of(format: str, device: torch.device) -> Product:
    """The product that serves a format on a device. On a CPU without a compiler these are PyTorch's."""
    if device.type == "cuda":
        return PRODUCTS[format, "cuda"]
    return PRODUCTS[format, "torch" if kernels_cpu.load_operators() else "cpu"]


# ------------------------------------------------------------------------------------------------ formats


class QuantLinear(nn.Module):
    """A linear layer that holds codes and scales. Subclasses are the formats."""

    format: ClassVar[str]
    file_dtype: ClassVar[torch.dtype]
    scale_dtype: ClassVar[torch.dtype]

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None = None, wide: bool = False):
        """codes: [N, K] int8; scale: of the format, on the same device

        wide: outputs in fp32 (LM heads); the CPU operators never round them, the others round to x's dtype before
        """
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.wide = wide
        self.group_size = self.in_features // scale.shape[1] if scale.dim() > 1 else 0  # 0: one scale per output
        self.product = product_of(self.format, codes.device)
        packed, scale = self.product.pack(codes, scale)
        self.register_buffer("packed", packed)
        self.register_buffer("scale", scale)
        self.bias = nn.Parameter(bias, requires_grad=False) if bias is not None else None

    @classmethod
    def encode(cls, weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
        """Round a weight, some rows at a time, so that no second one in fp32 exists.

        weight: [N, K] float. Returns: codes [N, K] int8; scale, `scale_shape` of `scale_dtype`.
        """
        codes = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
        scale = weight.new_empty(cls.scale_shape(weight.shape, group_size), dtype=cls.scale_dtype)
        rows = max(1, 2**17 // weight.shape[1])  # in the second-level cache
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
    def from_float(cls, weight: Tensor, bias: Tensor | None = None, group_size: int = 128, wide: bool = False):
        """Quantize a weight, [N, K] float, where it lies."""
        return cls(*cls.encode(weight, group_size), bias, wide)

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        y = self.product.apply(x, self.packed, self.scale, self.out_features, self.wide)
        return y if self.bias is None else y + self.bias

    def codes_and_scale(self) -> tuple[Tensor, Tensor]:
        """What was packed."""
        return self.product.unpack(self.packed, self.scale, self.out_features, self.in_features)

    def dequantize(self) -> Tensor:
        """The weight that it multiplies with, [N, K] fp32."""
        return self.decode(*self.codes_and_scale())

    def rows(self, ids: Tensor) -> QuantLinear:
        """A layer of some of the outputs, with the codes and scales of this one. ids: [R] int64."""
        codes, scale = self.codes_and_scale()
        return type(self)(codes[ids], scale[ids], None if self.bias is None else self.bias[ids], self.wide)

    def size_bytes(self) -> int:
        """Memory of codes and scales."""
        return sum(t.numel() * t.element_size() for t in (self.packed, self.scale))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.format}"


class Int8Linear(QuantLinear):
    """One byte per weight, one fp32 scale per output."""

    format, file_dtype, scale_dtype = "int8", torch.int8, torch.float32

    @staticmethod
    def encode_rows(weight: Tensor, codes: Tensor, scale: Tensor) -> None:
        torch.div(weight.abs().amax(1).clamp(min=1e-30), 127, out=scale)  # [N]
        codes.copy_((weight / scale[:, None]).round_().clamp_(-127, 127))

    @staticmethod
    def decode(codes: Tensor, scale: Tensor) -> Tensor:
        return codes.float() * scale[:, None]


class Int4Linear(QuantLinear):
    """Half a byte per weight, one bf16 scale per output and group of inputs."""

    format, file_dtype, scale_dtype = "int4", torch.uint8, torch.bfloat16

    @staticmethod
    def encode_rows(weight: Tensor, codes: Tensor, scale: Tensor) -> None:
        groups = weight.unflatten(1, (scale.shape[1], -1))  # [N, K/G, G]
        scale.copy_(_search_scale(groups).squeeze(-1))  # to bf16, and the codes are those of what it holds
        codes.copy_(_round_int4(groups, scale.float()[..., None], torch.empty_like(groups)).flatten(1))

    @staticmethod
    def decode(codes: Tensor, scale: Tensor) -> Tensor:
        return (codes.float().unflatten(1, (scale.shape[1], -1)) * scale.float()[..., None]).flatten(1)

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
    """A linear layer of each expert, stacked, as codes and scales."""

    def __init__(self, kind: type[QuantLinear], codes_and_scales: Iterator[tuple[Tensor, Tensor]], experts: int):
        """codes_and_scales: of one expert after the other, each made when it is asked for, so that one exists twice."""
        super().__init__()
        for e, codes_and_scale in enumerate(codes_and_scales):
            one = kind(*codes_and_scale)
            if e == 0:
                self.kind, self.product = kind, one.product
                self.out_features, self.in_features = one.out_features, one.in_features
                self.register_buffer("packed", one.packed.new_empty(experts, *one.packed.shape))
                self.register_buffer("scale", one.scale.new_empty(experts, *one.scale.shape))
            self.packed[e], self.scale[e] = one.packed, one.scale

    def forward(self, x: Tensor, routing: Tensor) -> Tensor:  # [P, K], from products.route -> [P, N]
        return self.product.apply(x, self.packed, self.scale, self.out_features, False, routing)

    def dequantize(self) -> Tensor:
        """The weights that it multiplies with, [E, N, K] fp32."""
        shape = (self.out_features, self.in_features)
        parts = (self.product.unpack(packed, scale, *shape) for packed, scale in zip(self.packed, self.scale))
        return torch.stack([self.kind.decode(codes, scale) for codes, scale in parts])

    def extra_repr(self) -> str:
        return f"{len(self.packed)} x ({self.in_features}, {self.out_features}), {self.kind.format}"


FORMATS: dict[str, type[QuantLinear]] = {kind.format: kind for kind in (Int8Linear, Int4Linear)}


def _round_int4(groups: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    return torch.div(groups, scale, out=out).round_().clamp_(-8, 7)


def _search_scale(groups: Tensor) -> Tensor:
    """The best scale of each group for the codes of one of several ranges.

    With codes q of a group w, the best scale is w.q / q.q, and leaves the squared error w.w - (w.q)^2 / q.q. The first
    share is plain symmetric rounding, so no group is worse off than with that.
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
    quant: str = option("int4", "format", ("int8", "int4"))
    group_size: int = option(128, "inputs that share a scale (int4): 32, 64 or 128")
    out: str = option("", "directory to write")
    device: str = option("cpu", "where to compute: cpu or cuda")
    overwrite: bool = option(False, "replace the directory if it is there")


def is_quantized(name: str, tensor: Tensor) -> bool:
    """Whether a stored tensor is the weight of a linear layer; routers stay as they are."""
    others = ("embed_tokens.weight", "block_sparse_moe.gate.weight")
    return tensor.dim() == 2 and name.endswith(".weight") and not name.endswith(others)


def encoded(files, quant: Quantization, device: str) -> Iterator[tuple[str, Tensor]]:  # files: weights.WeightFiles
    """Every tensor of a directory, the weights of linear layers as codes and scales. Prints its progress."""
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
        print(f"\r{quant.format}: {number} of {len(files.readers)} tensors", end=end, file=sys.stderr, flush=True)


def quantize_directory(
    path: Path, out: Path, quant: Quantization, device: str = "cpu", overwrite: bool = False
) -> None:
    """Write a quantized copy of a model directory that generate.py loads as it is.

    Raises: ValueError for a directory that is quantized already, a group size that does not divide, or files that
    cannot be read or written. Writes: `out`.
    """
    from model import read_json  # both import this file
    from weights import WeightFiles

    quant.check("--quant")
    raw = read_json(path / "config.json")
    if saved_quantization(raw) is not None:
        raise ValueError(f"{path} is quantized already ({raw['quantization_config']['format']}); give the original")
    if out.resolve() in (path.resolve(), *path.resolve().parents):
        raise ValueError(f"--out holds the checkpoint itself ({out}); name another directory")
    check_out(out, overwrite)
    files, kind = WeightFiles(path), FORMATS[quant.format]
    need_bytes = 0
    for name in files.readers:
        weight = files.read(name)
        need_bytes += weight.nbytes
        if is_quantized(name, weight):
            check_group(quant, name, weight.shape[1])
            need_bytes += kind.stored_bytes(weight.shape, quant.group_size) - weight.nbytes
    check_out(out, overwrite, need_bytes)
    group = {"group_size": quant.group_size} if quant.format == "int4" else {}
    raw["quantization_config"] = {"quant_method": METHOD, "format": quant.format, **group}
    write_checkpoint(out, encoded(files, quant, device), raw, path, overwrite)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config = parse(QuantizeConfig, "quantize.py", "Round a model's weights once and for all.", argv)

    def body() -> None:
        if not config.checkpoint or not config.out:
            raise ValueError("--checkpoint and --out are needed: the directory to read and the one to write")
        quant = Quantization(config.quant, config.group_size)
        out, device = Path(config.out), pick_device(config.device)
        quantize_directory(Path(config.checkpoint), out, quant, device, config.overwrite)
        size = sum(f.stat().st_size for f in out.glob("*.safetensors"))
        print(f"wrote {config.out}, {size / 1e9:.3f} GB of weights; run: python generate.py --checkpoint {config.out}")

    run_or_fail("quantize.py", body)


if __name__ == "__main__":
    main()
