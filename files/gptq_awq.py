"""Read the weights of quantized directories as codes for our int8 and int4 layers.

quantize.py's are read as others' are. Nothing is quantized anew but FP8.

1. `QuantizedFiles` finds the tensors that make a weight. It has one reader per quantized weight,
   and the other tensors as they are, which stay in 16 bits.
2. A reader unpacks one weight to `Codes`. FP8 is decoded to fp32 and rounded to int8 with a scale
   per output.

Not here: config.json (files/quant_config.py), products (quantize.py), the layer that a weight
belongs to (files/weights.py).
"""

# Sources: compressed-tensors 0.20 (compressors/pack_quantized, compressors/naive_quantized),
# GPTQModel 7.7 (nn_modules/qlinear: pack_original, dequantize_weight; utils/model:
# convert_gptq_v1_to_v2_format_module), AutoAWQ 0.2.9 (modules/linear/gemm, utils/packing_utils),
# transformers 5.23 (integrations/finegrained_fp8)

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from files.checkpoint import Codes, TensorSource
from files.quant_config import read_stored_format
from quantize import Int8

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
NUMBERS = (torch.int32,)
# of activations and caches, behind the name of a layer
IGNORED = re.compile(r"(input|output|activation|q|k|v|kv)_(scale|zero_point)")


class Layout(NamedTuple):
    """The tensors of a weight, by what they are called behind the name of its layer.

    Codes of 4 or 8 bits lie in words of 32 bits, the first in the lowest bits.
    """

    codes: str
    scale: str
    zero: str = ""
    index: str = ""  # the group of each input
    shape: str = ""
    axis: int | None = None  # of `codes`, along which words hold codes; None: they are numbers
    # scales are [K / G, N], and codes along outputs are [K, N]; there always are zero points
    groups_first: bool = False
    order: tuple[int, ...] = ()  # places of the codes 0 to 7 in a word; (): ascending

    @property
    def needed(self) -> tuple[str, ...]:
        """The tensors without which there is no weight."""
        return (self.codes, self.scale, self.zero)[: 2 + self.groups_first]


LAYOUTS = {
    "gptq": Layout("qweight", "scales", "qzeros", "g_idx", axis=0, groups_first=True),
    "awq": Layout(
        "qweight", "scales", "qzeros", axis=1, groups_first=True, order=(0, 4, 1, 5, 2, 6, 3, 7)
    ),
    "packed": Layout(
        "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", axis=1
    ),
    "plain": Layout("weight", "weight_scale", "weight_zero_point"),
    "fp8": Layout("weight", "weight_scale_inv"),  # it is multiplied with, like any other scale
}


def unpack(packed: Tensor, bits: int, axis: int, order: tuple[int, ...] = ()) -> Tensor:
    """Unpack the codes in words along an axis, which becomes the last one.

    packed: [R, C] int32. Returns: [C or R, codes] int8, less half the number of codes.
    """
    parts = packed.movedim(axis, -1).contiguous().view(torch.uint8)
    if bits == 4:
        parts = torch.stack((parts & 15, parts >> 4), -1).flatten(1)
    codes = parts.sub(2 ** (bits - 1)).view(torch.int8)
    if order:
        codes = codes.unflatten(1, (-1, len(order)))[..., list(order)].flatten(1)
    return codes


def packed(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, [N, K] int8, as the layout `packed` has them: the inverse of `unpack`."""
    parts = codes.view(torch.uint8) + 2 ** (bits - 1)
    if bits == 4:
        parts = parts[:, ::2] | parts[:, 1::2] << 4
    return parts.view(torch.int32)


def decode_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply FP8 weights by their scales.

    weight: [N, K] e4m3; scale: [N / rows, K / columns], rounded up, for `block`.
    Returns: [N, K] fp32.
    """
    value = weight.float()
    rows, columns = block
    if columns >= value.shape[1]:  # no block beside another
        return value.mul_(scale.float().repeat_interleave(rows, 0)[: len(value)])
    for strip, scales in zip(value.split(rows), scale.float()):
        strip *= scales.repeat_interleave(columns)[: value.shape[1]]
    return value


class QuantizedFiles(TensorSource):
    """The tensors of a directory that others quantized.

    `stored` is the format of its codes.
    """

    def __init__(self, files: TensorSource):
        """Find the quantized weights and the other tensors.

        Raises: ValueError for a format that is not supported, or a weight without its scales.
        """
        self.path = files.path
        self.files = files
        self.recipe = read_stored_format(files.config, files.path)
        self.stored = self.recipe
        self.config = files.config
        self.layout = LAYOUTS[self.recipe.layout]
        scale = self.layout.scale
        if self.recipe.layout == "fp8" and not any(n.endswith(scale) for n in files.readers):
            self.layout = LAYOUTS["plain"]  # AutoFP8's names
        layers = self._quantized_layers()
        used = {f"{layer}.{part}" for layer, parts in layers.items() for part in parts}
        rest = [name for name in files.readers if name not in used]
        kept = [name for name in rest if not IGNORED.fullmatch(name.rpartition(".")[2])]
        self.readers = {name: partial(self._float, name) for name in kept}
        self.quantized = {
            f"{layer}.weight": partial(self._codes, layer, parts) for layer, parts in layers.items()
        }
        notes = []
        if self.recipe.format == "fp8":
            notes.append("holds weights in FP8; they become int8 with a scale per output")
        if len(kept) < len(rest):
            notes.append("scales of activations and of the cache are not used")
        self.note = ""
        if notes:
            self.note = f"{self.path}: {'; '.join(notes)}"

    def _quantized_layers(self) -> dict[str, set[str]]:
        """Return the tensors of each quantized layer.

        Raises: ValueError where there is no such layer, or one lacks a tensor.
        """
        form = self.layout
        needed = form.needed
        of_weight = {*needed, form.zero, form.index, form.shape}
        layers: dict[str, set[str]] = {}
        for name in self.files.readers:
            layer, _, part = name.rpartition(".")
            if part in of_weight:
                layers.setdefault(layer, set()).add(part)
        # a layer that is not quantized has a weight too
        layers = {layer: parts for layer, parts in layers.items() if parts != {"weight"}}
        if not layers:
            raise ValueError(
                f"{self.path}: config.json says {self.recipe.method}, and no weight has "
                f"{' and '.join(needed)}; use the config made for these weights"
            )
        for layer, parts in layers.items():
            missing = next((part for part in needed if part not in parts), None)
            if missing:
                raise ValueError(
                    f"{self.path}: the weight {layer}.{missing} is missing; download it again"
                )
        return layers

    def _float(self, name: str) -> Tensor:
        """Read a tensor that is not quantized.

        Raises: ValueError for codes, which lack their scale then.
        """
        tensor = self.files.read(name)
        if tensor.dtype not in FLOATS and name.endswith(".weight"):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{self.path}: {name} is {dtype} and has no scale; download it again")
        return tensor

    @property
    def bits(self) -> int:
        """The bits of a code, without FP8."""
        return 4 if self.recipe.format == "int4" else 8

    def _codes(self, layer: str, parts: set[str]) -> Codes:
        """Read a quantized weight, with the file's own groups."""
        recipe = self.recipe
        form = self.layout
        if recipe.symmetric and "weight_zero_point" in parts:  # of older files
            self._check_zeros(layer, self.files.read(f"{layer}.weight_zero_point").float())
        if recipe.format == "fp8":
            return Codes(*Int8.encode(self.decoded(layer), 0))
        codes = self._numbers(layer)
        outputs, inputs = codes.shape
        groups = self._groups(layer, inputs)
        if form.shape in parts:
            self._check_shape(f"{layer}.{form.shape}", outputs, inputs)
        scale = self._scale(layer, outputs, groups)
        if form.index in parts:
            self._check_order(f"{layer}.{form.index}", inputs, groups)
        zero = None
        if form.groups_first or not recipe.symmetric:
            zero = self._zero(layer, outputs, groups)
        if recipe.symmetric and zero is not None:
            self._check_zeros(layer, zero)
            zero = None
        if recipe.format == "int8" and zero is None and not recipe.group_size:
            scale = scale.float().flatten()  # of each output, as our own
        return Codes(codes, scale, zero)

    def _numbers(self, layer: str) -> Tensor:
        """Read the codes of a weight, [N, K] int8."""
        form = self.layout
        name = f"{layer}.{form.codes}"
        if form.axis is None:
            return self._read(name, (torch.int8,), (-1, -1))
        codes = unpack(self._read(name, NUMBERS, (-1, -1)), self.bits, form.axis, form.order)
        along_outputs = form.groups_first and form.axis == 1
        return codes.T.contiguous() if along_outputs else codes

    def _zero(self, layer: str, outputs: int, groups: int) -> Tensor:
        """Read the zero points of a weight, [N, K / G] int8."""
        form = self.layout
        words = -(-outputs * self.bits // 32)
        shape = (groups, words) if form.groups_first else (words, groups)
        packed = self._read(f"{layer}.{form.zero}", NUMBERS, shape)
        if self.recipe.less_one:  # all codes of a word at once, as one was subtracted from them
            packed = packed + (0x11111111 if self.bits == 4 else 0x01010101)
        return unpack(packed, self.bits, int(form.groups_first), form.order)[:, :outputs].T

    def _check_zeros(self, layer: str, zeros: Tensor) -> None:
        if zeros.any():
            raise ValueError(
                f"{self.path}: {layer}.weight: config.json says that codes are symmetric, "
                "and this weight has zero points; correct config.json"
            )

    def _scale(self, layer: str, outputs: int, groups: int) -> Tensor:
        """Read the scales of a weight, [N, K / G]; those of int8 outputs may be fp32."""
        name = f"{layer}.{self.layout.scale}"
        if self.layout.groups_first:
            return self._read(name, HALVES, (groups, outputs)).T
        if self.recipe.group_size or self.bits == 4 or not self.stored.symmetric:
            return self._read(name, HALVES, (outputs, groups))
        scale = self._read(name, FLOATS, (outputs, 1), (outputs,), (1,), ())
        return scale.view(-1, 1).expand(outputs, 1)

    def decoded(self, layer: str) -> Tensor:
        """Return a layer's weight in FP8, [N, K] fp32.

        Raises: ValueError for another type or shape.
        """
        weight = self._read(f"{layer}.weight", (torch.float8_e4m3fn,), (-1, -1))
        outputs, inputs = weight.shape
        block = self.recipe.block
        if block:
            shapes = [(-(-outputs // block[0]), -(-inputs // block[1]))]
        else:
            shapes = [(outputs, 1), (outputs,), (1,), ()]
        scale = self._read(f"{layer}.{self.layout.scale}", FLOATS, *shapes)
        if not block:
            block = (outputs // scale.numel(), inputs)
            scale = scale.view(-1, 1)
        return decode_fp8(weight, scale, block)

    def _read(self, name: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        """Read and check a tensor. shapes: the allowed ones; -1: any size but 0

        Raises: ValueError for another type or shape, and for scales that are not finite.
        """
        tensor = self.files.read(name)
        if tensor.dtype in dtypes and any(_has_shape(tensor, shape) for shape in shapes):
            if tensor.dtype in FLOATS and not tensor.isfinite().all():
                raise ValueError(
                    f"{self.path}: {name} holds NaN or infinite values; download it again"
                )
            return tensor
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        sizes = " or ".join(str(list(shape)).replace("-1", "any") for shape in shapes)
        actual = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        raise ValueError(
            f"{self.path}: {name} must be {kinds} of shape {sizes}; it is {actual}: "
            "download it again, or use the config made for it"
        )

    def _groups(self, layer: str, inputs: int) -> int:
        size = self.recipe.group_size or inputs
        if inputs % size:
            raise ValueError(
                f"{self.path}: the group size {size} does not divide the {inputs} inputs of "
                f"{layer}.weight; use the config made for these weights"
            )
        return inputs // size

    def _check_order(self, name: str, inputs: int, groups: int) -> None:
        """Refuse inputs that are not in the order of their groups.

        Some programs write all zeros for no order.
        """
        order = self._read(name, (torch.int32, torch.int64), (inputs,))
        in_order = torch.arange(inputs) // (inputs // groups)
        if order.any() and not torch.equal(order.long(), in_order):
            raise ValueError(
                f"{self.path}: {name} permutes the inputs (act-order), which is not supported; "
                "use a checkpoint without, or the original with --quant int4"
            )

    def _check_shape(self, name: str, outputs: int, inputs: int) -> None:
        stored = self._read(name, (torch.int64, torch.int32), (2,)).tolist()
        if stored != [outputs, inputs]:
            raise ValueError(
                f"{self.path}: {name} says {stored}, and {self.layout.codes} holds "
                f"{[outputs, inputs]}; download it again"
            )


def _has_shape(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor has a shape; -1 in it stands for any size but 0."""
    if len(shape) != tensor.dim():
        return False
    return all(want == n or want < 0 < n for want, n in zip(shape, tensor.shape))
