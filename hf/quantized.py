"""Checkpoints that others quantized, as codes for our own int8 and int4 layers: nothing is quantized anew but FP8.

1. `read_recipe` reads `quantization_config` of every method into one record; what is not served is refused by name.
2. `QuantizedFiles` finds the tensors that make a weight. It has one reader per quantized weight, and the other tensors
   as they are, which stay in 16 bits.
3. A reader unpacks one weight to `Codes`. FP8 is decoded to fp32 and rounded to int8 with a scale per output.

Sources: compressed-tensors 0.20 (compressors/pack_quantized, compressors/naive_quantized), GPTQModel 7.7
(nn_modules/qlinear: pack_original, dequantize_weight; utils/model: convert_gptq_v1_to_v2_format_module), AutoAWQ 0.2.9
(modules/linear/gemm, utils/packing_utils), transformers 5.23 (integrations/finegrained_fp8).
Not here: products (quantize.py), which layer a weight belongs to (hf/weights.py). Activations are rounded as the
formats here do it, whatever the files say; the scales of activations and of KV caches are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import METHOD, Codes, TensorSource, foreign_quantization
from hf.fields import (
    FLAG,
    OBJECT,
    TEXT,
    NotSupported,
    Rule,
    integer,
    key,
    naming,
    read_fields,
)
from options import GROUP_SIZES
from quantize import Int8Linear

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the outputs 0 to 7 lie among the 8 codes of a number
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
NUMBERS = (torch.int32,)
IGNORED = (  # of activations and caches, behind the name of a layer
    "input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale", "q_scale", "k_scale",
    "v_scale", "kv_scale", "k_zero_point", "v_zero_point",
)  # fmt: skip
GROUP = integer(-1, 2**20)
BLOCK = Rule(
    "two whole numbers from 1 on",
    lambda v: type(v) is list and len(v) == 2 and all(integer(1, 2**20).holds(size) for size in v),
)


# ------------------------------------------------------------------------------------------- config.json


@dataclass(frozen=True)
class Recipe:
    """How the files hold the quantized weights."""

    method: str  # as config.json has it
    layout: str  # a key of LAYOUTS
    format: str  # int4, int8 or fp8
    group_size: int = 0  # inputs that share a scale; 0: one scale per output, or as `block` says
    symmetric: bool = True  # codes mean themselves; else a zero point is subtracted
    block: tuple[int, int] | None = None  # of FP8: outputs and inputs that share a scale
    less_one: bool = False  # stored zero points are one too small

    def as_ours(self) -> dict:
        """`quantization_config` of the layers made of these weights, with the file's groups or parts of them."""
        said = {"quant_method": METHOD, "format": "int4" if self.format == "int4" else "int8"}
        ours = [size for size in GROUP_SIZES if self.group_size and self.group_size % size == 0]
        return said | ({"group_size": ours[-1]} if ours else {})


@dataclass(frozen=True)
class Method:
    """The key that all have."""

    quant_method: str = key(TEXT)


@dataclass(frozen=True)
class Gptq:
    """The keys of GPTQ that are read."""

    bits: int = key(integer(1, 64))
    group_size: int = key(GROUP)
    sym: bool = key(FLAG, False)  # where it is missing, the stored zero points say it
    checkpoint_format: str = key(TEXT, "")
    format: str = key(TEXT, "")  # another name of it
    is_marlin_format: bool = key(FLAG, False)
    pack_dtype: str = key(TEXT, "int32")
    rotation: str = key(TEXT, "")
    dynamic: dict | None = key(
        OBJECT, None
    )  # pattern -> what differs in the layers that it names; "-:" none


@dataclass(frozen=True)
class Awq:
    """The keys of AWQ that are read; the second names are those of older files."""

    bits: int | None = key(integer(1, 64), None)
    w_bit: int = key(integer(1, 64), 4)
    group_size: int | None = key(GROUP, None)
    q_group_size: int = key(GROUP, 128)
    zero_point: bool = key(FLAG, True)
    version: str = key(TEXT, "")
    format: str = key(TEXT, "")


@dataclass(frozen=True)
class Fp8:
    """The keys of `quant_method` fp8 that are read."""

    fmt: str = key(TEXT, "e4m3")
    scale_fmt: str = key(TEXT, "float")
    weight_block_size: list | None = key(BLOCK, None)


@dataclass(frozen=True)
class Compressed:
    """The keys of compressed-tensors that are read."""

    format: str = key(TEXT)
    config_groups: dict = key(OBJECT)
    sparsity_config: dict | None = key(OBJECT, None)
    transform_config: dict | None = key(OBJECT, None)


@dataclass(frozen=True)
class Scheme:
    """The keys of one of its groups of layers."""

    weights: dict = key(OBJECT)
    format: str = key(TEXT, "")


@dataclass(frozen=True)
class Weights:
    """The keys of `weights` in a scheme."""

    num_bits: int = key(integer(1, 64), 8)
    type: str = key(TEXT, "int")
    symmetric: bool = key(FLAG, True)
    strategy: str = key(TEXT, "")
    group_size: int | None = key(GROUP, None)
    block_structure: list | None = key(BLOCK, None)


def _refuse(holds: bool, rule: str) -> None:
    if not holds:
        raise NotSupported(rule)


def _group(size: int) -> int:
    """A stored group size as `Recipe` has it. Raises: NotSupported for one that no group of ours divides."""
    rule = "a group size must be a multiple of 32, or -1, a scale per output"
    _refuse(size == -1 or size > 0 and size % GROUP_SIZES[0] == 0, f"{rule}; it is {size}")
    return max(size, 0)


def _agreed(first: tuple[str, str], second: tuple[str, str], default: str) -> str:
    """What two keys of one meaning say, in lower case. first, second: name and value; "": not given"""
    (name, value), (other, another) = first, second
    same = not value or not another or value.lower() == another.lower()
    _refuse(same, f"{name} and {other} must be equal; they are {value} and {another}")
    return (value or another or default).lower()


def _gptq(said: dict) -> Recipe:
    own = read_fields(said, Gptq)
    form = _agreed(("checkpoint_format", own.checkpoint_format), ("format", own.format), "gptq")
    _refuse(own.bits == 4, f"GPTQ is supported with 4 bits; it has {own.bits}")
    kinds = ("gptq", "gptq_v2")
    _refuse(form in kinds, f"checkpoint_format, or format, must be one of {kinds}; it is {form}")
    _refuse(
        not own.is_marlin_format,
        "GPTQ in Marlin's layout (is_marlin_format: true) is not supported",
    )
    _refuse(own.pack_dtype == "int32", f"pack_dtype must be int32; it is {own.pack_dtype}")
    _refuse(not own.rotation, f"GPTQ with a rotation ({own.rotation}) is not supported")
    other = next((pattern for pattern in own.dynamic or {} if not pattern.startswith("-:")), None)
    _refuse(other is None, f"layers in several formats are not supported; `dynamic` has {other}")
    return Recipe("gptq", "gptq", "int4", _group(own.group_size), own.sym, less_one=form == "gptq")


def _awq(said: dict) -> Recipe:
    own = read_fields(said, Awq)
    bits, group = (
        own.bits or own.w_bit,
        own.q_group_size if own.group_size is None else own.group_size,
    )
    _refuse(bits == 4, f"AWQ is supported with 4 bits; it has {bits}")
    version = _agreed(("version", own.version), ("format", own.format), "gemm")
    _refuse(version == "gemm", f"AWQ must be of the version gemm; it is {version}")
    return Recipe("awq", "awq", "int4", _group(group), not own.zero_point)


def _fp8(said: dict) -> Recipe:
    own = read_fields(said, Fp8)
    _refuse(own.fmt == "e4m3", f"FP8 must be of the form e4m3; it is {own.fmt}")
    _refuse(own.scale_fmt == "float", f"scale_fmt must be float; it is {own.scale_fmt}")
    return Recipe(
        "fp8", "fp8", "fp8", block=tuple(own.weight_block_size) if own.weight_block_size else None
    )


def _compressed(said: dict) -> Recipe:
    own = read_fields(said, Compressed)
    for name, says in (("sparsity_config", "format"), ("transform_config", "config_groups")):
        value = (getattr(own, name) or {}).get(says)
        _refuse(
            value in (None, {}, "dense"), f"{name} with {says} {str(value)[:40]} is not supported"
        )
    schemes = [
        read_fields(s if isinstance(s, dict) else {}, Scheme) for s in own.config_groups.values()
    ]
    found = [
        (scheme.format or own.format, read_fields(scheme.weights, Weights)) for scheme in schemes
    ]
    one = bool(found) and all(each == found[0] for each in found)
    _refuse(one, f"config_groups must be one scheme; it holds {len(found)}")
    format, weights = found[0]
    bits, group = f"{weights.type} with {weights.num_bits} bits", weights.group_size
    kinds = COMPRESSED.get(format)
    _refuse(kinds is not None, f"format must be one of {', '.join(COMPRESSED)}; it is {format}")
    _refuse(bits in kinds, f"{format} is supported as {' or '.join(kinds)}; it is {bits}")
    strategy = weights.strategy or (
        "tensor" if group is None else "channel" if group == -1 else "group"
    )
    kind = kinds[bits]
    allowed = {
        "int4": ("group", "channel"),
        "int8": ("channel", "tensor"),
        "fp8": ("channel", "tensor", "block"),
    }[kind]
    _refuse(
        strategy in allowed, f"the strategy of {bits} must be one of {allowed}; it is {strategy}"
    )
    _refuse(weights.symmetric or kind == "int4", f"{bits} must be symmetric")
    if strategy == "block" and weights.block_structure is None:
        raise ValueError("the key 'block_structure' is missing")
    if strategy == "group" and group is None:
        raise ValueError("the key 'group_size' is missing")
    return Recipe(
        "compressed-tensors", "packed" if format == "pack-quantized" else "plain", kind,
        _group(group) if strategy == "group" else 0, weights.symmetric,
        tuple(weights.block_structure) if strategy == "block" else None,
    )  # fmt: skip


COMPRESSED = {  # format of compressed-tensors -> what it holds -> our name for that
    "pack-quantized": {"int with 4 bits": "int4", "int with 8 bits": "int8"},
    "int-quantized": {"int with 8 bits": "int8"},
    "float-quantized": {"float with 8 bits": "fp8"},
    "naive-quantized": {"float with 8 bits": "fp8", "int with 8 bits": "int8"},
}
METHODS: dict[str, Callable[[dict], Recipe]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
}


def read_recipe(raw: dict, path: Path) -> Recipe:
    """What the config.json of a checkpoint in `path` says about quantized weights.

    Raises: ValueError that names what is missing, wrong or not supported.
    """
    with naming(path / "config.json"):
        said = foreign_quantization(raw)
        if not isinstance(said, dict):
            raise ValueError(f"quantization_config must be an object; it is {str(said)[:40]}")
        if said.get("quant_method") is None and (
            said.get("load_in_4bit") or said.get("load_in_8bit")
        ):
            said = said | {"quant_method": "bitsandbytes"}  # its older files leave the name out
        method = read_fields(said, Method).quant_method
        rule = f"checkpoints quantized with {method} are not supported, only {', '.join(METHODS)}"
        _refuse(method in METHODS, rule)
        return METHODS[method](said)


def as_ours(raw: dict, path: Path) -> dict:
    """A config.json that says about quantized weights what they become here. Raises: as `read_recipe`."""
    return raw | {"quantization_config": read_recipe(raw, path).as_ours()}


# ----------------------------------------------------------------------------------------------- unpacking


def unpack_int4(packed: Tensor) -> Tensor:
    """The codes of 4 bits in each number, the lowest first. packed: [R, C] int32. Returns: [R, 8 C] int8 in 0..15."""
    parts = packed.contiguous().view(torch.uint8)  # [R, 4 C]
    return torch.stack((parts & 15, parts >> 4), -1).flatten(1).view(torch.int8)


def unpack_awq(packed: Tensor) -> Tensor:
    """The same in AWQ's order. packed: [R, N/8] int32. Returns: [R, N] int8 in 0..15."""
    return unpack_int4(packed).unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1)


def decode_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """FP8 weights times their scales. weight: [N, K] e4m3; scale: [N / rows, K / columns], rounded up, for `block`.

    Returns: [N, K] fp32.
    """
    value, (rows, columns) = weight.float(), block
    if columns >= value.shape[1]:  # no block beside another
        return value.mul_(scale.float().repeat_interleave(rows, 0)[: len(value)])
    for strip, scales in zip(value.split(rows), scale.float()):
        strip *= scales.repeat_interleave(columns)[: value.shape[1]]
    return value


# --------------------------------------------------------------------------------------------------- files


LAYOUTS = {  # what a weight's tensors are called behind the name of its layer: those that must, and those that may be
    "gptq": (("qweight", "qzeros", "scales"), ("g_idx",)),
    "awq": (("qweight", "qzeros", "scales"), ()),
    "packed": (
        ("weight_packed", "weight_scale"),
        ("weight_shape", "weight_zero_point", "weight_g_idx"),
    ),
    "plain": (("weight", "weight_scale"), ("weight_zero_point",)),
    "fp8": (("weight", "weight_scale_inv"), ()),  # the scale is multiplied with, like any other
}


class QuantizedFiles(TensorSource):
    """The tensors of a directory that others quantized; `config` and `quantized` are as for our own layers."""

    def __init__(self, files: TensorSource):
        """Raises: ValueError for a format that is not supported, or a weight without its scales."""
        self.path, self.files = files.path, files
        self.recipe = read_recipe(files.config, files.path)
        self.config = as_ours(files.config, files.path)
        needed, further = LAYOUTS[self.recipe.layout]
        if self.recipe.layout == "fp8" and not any(
            name.endswith(needed[1]) for name in files.readers
        ):
            needed = LAYOUTS["plain"][0]  # as AutoFP8 calls it
        self.needed, layers = needed, _layers(files, (*needed, *further))
        if needed[0] == "weight":  # a layer that is not quantized has one too
            layers = {layer: parts for layer, parts in layers.items() if parts != {"weight"}}
        if not layers:
            says = (
                f"config.json says {self.recipe.method}, and no weight has {' and '.join(needed)}"
            )
            raise ValueError(f"{self.path}: {says}; use the config made for these weights")
        for layer, parts in layers.items():
            missing = next((part for part in needed if part not in parts), None)
            if missing:
                raise ValueError(
                    f"{self.path}: the weight {layer}.{missing} is missing; download it again"
                )
        used = {f"{layer}.{part}" for layer, parts in layers.items() for part in parts}
        rest = [name for name in files.readers if name not in used]
        kept = [name for name in rest if name.rpartition(".")[2] not in IGNORED]
        self.readers = {name: partial(self._float, name) for name in kept}
        self.quantized = {
            f"{layer}.weight": partial(self._codes, layer, parts) for layer, parts in layers.items()
        }
        fp8 = ["holds weights in FP8; they become int8 with a scale per output"] * (
            self.recipe.format == "fp8"
        )
        unused = ["scales of activations and of the cache are not used"] * (len(kept) < len(rest))
        self.note = f"{self.path}: {'; '.join(fp8 + unused)}" if fp8 + unused else ""

    def _float(self, name: str) -> Tensor:
        """A tensor that is not quantized. Raises: ValueError for codes, which lack their scale then."""
        tensor = self.files.read(name)
        if tensor.dtype not in FLOATS:
            found = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{self.path}: {name} is {found} and has no scale; download it again")
        return tensor

    def _codes(self, layer: str, parts: set[str]) -> Codes:
        """A quantized weight, with the file's own groups in int4."""
        if self.recipe.symmetric and "weight_zero_point" in parts:  # of older files
            self._check_zeros(layer, self.files.read(f"{layer}.weight_zero_point").float())
        if self.recipe.format == "fp8":
            return Codes(*Int8Linear.encode(self.decoded(layer), 0))
        if self.recipe.format == "int8":
            return self._int8(layer, parts)
        unpack = {"gptq": self._gptq, "awq": self._awq, "packed": self._packed}[self.recipe.layout]
        codes, scale, zero = unpack(layer, parts)
        if not self.recipe.symmetric:
            return Codes(codes.sub_(8), scale, zero.sub_(8))
        if zero is not None:
            self._check_zeros(layer, zero - 8)
        return Codes(codes.sub_(8), scale)

    def _check_zeros(self, layer: str, zeros: Tensor) -> None:
        if zeros.any():
            rule = "config.json says that codes are symmetric, and this weight has zero points"
            raise ValueError(f"{self.path}: {layer}.weight: {rule}; correct config.json")

    def _gptq(self, layer: str, parts: set[str]) -> tuple[Tensor, Tensor, Tensor]:
        packed = self._read(f"{layer}.qweight", NUMBERS, (-1, -1))  # [K / 8, N]
        inputs, outputs = 8 * packed.shape[0], packed.shape[1]
        groups = self._groups(layer, inputs)
        scale = self._read(f"{layer}.scales", HALVES, (groups, outputs))
        zero = self._read(f"{layer}.qzeros", NUMBERS, (groups, -(-outputs // 8)))
        if "g_idx" in parts:
            self._check_order(f"{layer}.g_idx", inputs, groups)
        zero = unpack_int4(
            zero + 0x11111111 if self.recipe.less_one else zero
        )  # all at once, as they were made less
        return unpack_int4(packed.T), scale.T, zero[:, :outputs].T

    def _awq(self, layer: str, parts: set[str]) -> tuple[Tensor, Tensor, Tensor]:
        packed = self._read(f"{layer}.qweight", NUMBERS, (-1, -1))  # [K, N / 8]
        inputs, columns = packed.shape
        groups = self._groups(layer, inputs)
        scale = self._read(f"{layer}.scales", HALVES, (groups, 8 * columns))
        zero = self._read(f"{layer}.qzeros", NUMBERS, (groups, columns))
        return unpack_awq(packed).T.contiguous(), scale.T, unpack_awq(zero).T

    def _packed(self, layer: str, parts: set[str]) -> tuple[Tensor, Tensor, Tensor | None]:
        packed = self._read(f"{layer}.weight_packed", NUMBERS, (-1, -1))  # [N, K / 8]
        outputs, inputs = len(packed), 8 * packed.shape[1]
        groups = self._groups(layer, inputs)
        scale = self._read(f"{layer}.weight_scale", HALVES, (outputs, groups))
        self._check_shape(layer, parts, (outputs, inputs))
        if "weight_g_idx" in parts:
            self._check_order(f"{layer}.weight_g_idx", inputs, groups)
        if self.recipe.symmetric:
            return unpack_int4(packed), scale, None
        zero = self._read(f"{layer}.weight_zero_point", NUMBERS, (-(-outputs // 8), groups))
        return unpack_int4(packed), scale, unpack_int4(zero.T)[:, :outputs].T

    def _int8(self, layer: str, parts: set[str]) -> Codes:
        if self.recipe.layout == "packed":
            packed = self._read(f"{layer}.weight_packed", NUMBERS, (-1, -1))  # [N, K / 4]
            codes = (packed.view(torch.uint8) ^ 128).view(torch.int8)
            self._check_shape(layer, parts, codes.shape)
        else:
            codes = self._read(f"{layer}.weight", (torch.int8,), (-1, -1))
        scale = self._read(
            f"{layer}.weight_scale", FLOATS, (len(codes), 1), (len(codes),), (1,), ()
        )
        return Codes(codes, scale.float().flatten().expand(len(codes)))

    def decoded(self, layer: str) -> Tensor:
        """A layer's weight in FP8, [N, K] fp32. Raises: ValueError for another type or shape."""
        weight = self._read(f"{layer}.weight", (torch.float8_e4m3fn,), (-1, -1))
        (outputs, inputs), block = weight.shape, self.recipe.block
        shapes = [(outputs, 1), (outputs,), (1,), ()]
        if block:
            shapes = [(-(-outputs // block[0]), -(-inputs // block[1]))]
        scale = self._read(f"{layer}.{self.needed[1]}", FLOATS, *shapes)
        if not block:
            block, scale = (outputs // scale.numel(), inputs), scale.view(-1, 1)
        return decode_fp8(weight, scale, block)

    def _read(self, name: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        """A tensor, checked. shapes: those it may have; -1: any size but 0.

        Raises: ValueError for another, and for scales that are not finite.
        """
        tensor = self.files.read(name)
        for shape in shapes:
            fits = len(shape) == tensor.dim() and all(
                want == n or want < 0 < n for want, n in zip(shape, tensor.shape)
            )
            if fits and tensor.dtype in dtypes:
                if tensor.dtype in FLOATS and not tensor.isfinite().all():
                    raise ValueError(
                        f"{self.path}: {name} holds NaN or infinite values; download it again"
                    )
                return tensor
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        sizes = " or ".join(str(list(shape)).replace("-1", "any") for shape in shapes)
        found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        rule = f"{name} must be {kinds} of shape {sizes}; it is {found}"
        raise ValueError(f"{self.path}: {rule}: download it again, or use the config made for it")

    def _groups(self, layer: str, inputs: int) -> int:
        size = self.recipe.group_size or inputs
        if inputs % size:
            rule = f"the group size {size} does not divide the {inputs} inputs of {layer}.weight"
            raise ValueError(f"{self.path}: {rule}; use the config made for these weights")
        return inputs // size

    def _check_order(self, name: str, inputs: int, groups: int) -> None:
        """Refuse inputs that are not in their groups' order; all zeros is what some write for no order."""
        order = self._read(name, (torch.int32, torch.int64), (inputs,))
        if order.any() and not torch.equal(
            order.long(), torch.arange(inputs) // (inputs // groups)
        ):
            rule = "permutes the inputs (act-order), which is not supported"
            raise ValueError(
                f"{self.path}: {name} {rule}; use a checkpoint without, or the original with --quant int4"
            )

    def _check_shape(self, layer: str, parts: set[str], shape: tuple[int, int]) -> None:
        if "weight_shape" in parts:
            said = self._read(f"{layer}.weight_shape", (torch.int64, torch.int32), (2,)).tolist()
            if said != list(shape):
                rule = f"{layer}.weight_shape says {said}, and weight_packed holds {list(shape)}"
                raise ValueError(f"{self.path}: {rule}; download it again")


def _layers(files: TensorSource, parts: tuple[str, ...]) -> dict[str, set[str]]:
    """Which of the parts each layer has."""
    layers: dict[str, set[str]] = {}
    for name in files.readers:
        layer, _, part = name.rpartition(".")
        if part in parts:
            layers.setdefault(layer, set()).add(part)
    return layers
