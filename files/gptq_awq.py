"""Read the weights of checkpoints that others quantized, as codes for our int8 and int4 layers.

Nothing is quantized anew but FP8.

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

from functools import partial

import torch
from torch import Tensor

from files.checkpoint import Codes, TensorSource
from files.quant_config import as_ours, read_stored_format
from quantize import Int8

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # places of the outputs 0 to 7 among the 8 codes of a number
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
NUMBERS = (torch.int32,)
IGNORED = (  # of activations and caches, behind the name of a layer
    "input_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
    "activation_scale",
    "q_scale",
    "k_scale",
    "v_scale",
    "kv_scale",
    "k_zero_point",
    "v_zero_point",
)


# ------------------------------------------------------------------------------------ unpacking


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack the codes of 4 or 8 bits in each number, the lowest first.

    packed: [R, C] int32. Returns: [R, 32 / bits C] int8, less half the number of codes.
    """
    parts = packed.contiguous().view(torch.uint8)  # [R, 4 C]
    if bits == 4:
        parts = torch.stack((parts & 15, parts >> 4), -1).flatten(1)
    return parts.sub(2 ** (bits - 1)).view(torch.int8)


def unpack_awq(packed: Tensor) -> Tensor:
    """Unpack codes of 4 bits in AWQ's order.

    packed: [R, N/8] int32. Returns: [R, N] int8 in -8 .. 7.
    """
    return unpack(packed, 4).unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1)


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


# ---------------------------------------------------------------------------------------- files


# a weight's tensors behind the name of its layer: the required ones, and the optional ones
LAYOUTS = {
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
    """The tensors of a directory that others quantized.

    `config` and `quantized` are as for our own layers.
    """

    def __init__(self, files: TensorSource):
        """Find the quantized weights and the other tensors.

        Raises: ValueError for a format that is not supported, or a weight without its scales.
        """
        self.path = files.path
        self.files = files
        self.recipe = read_stored_format(files.config, files.path)
        self.config = as_ours(files.config, files.path)
        self.needed, optional = LAYOUTS[self.recipe.layout]
        if self.recipe.layout == "fp8":
            scale = self.needed[1]
            if not any(name.endswith(scale) for name in files.readers):
                self.needed = LAYOUTS["plain"][0]  # AutoFP8's name
        layers = self._quantized_layers((*self.needed, *optional))
        used = {f"{layer}.{part}" for layer, parts in layers.items() for part in parts}
        rest = [name for name in files.readers if name not in used]
        kept = [name for name in rest if name.rpartition(".")[2] not in IGNORED]
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

    def _quantized_layers(self, names: tuple[str, ...]) -> dict[str, set[str]]:
        """Return the tensors of each quantized layer. names: of the parts that it may have

        Raises: ValueError where there is no such layer, or one lacks a tensor.
        """
        needed = self.needed
        layers = _layers(self.files, names)
        if needed[0] == "weight":  # a layer that is not quantized has one too
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
        if tensor.dtype not in FLOATS:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{self.path}: {name} is {dtype} and has no scale; download it again")
        return tensor

    @property
    def bits(self) -> int:
        """The bits of a code, without FP8."""
        return 4 if self.recipe.format == "int4" else 8

    def _codes(self, layer: str, parts: set[str]) -> Codes:
        """Read a quantized weight, with the file's own groups."""
        if self.recipe.symmetric and "weight_zero_point" in parts:  # of older files
            self._check_zeros(layer, self.files.read(f"{layer}.weight_zero_point").float())
        if self.recipe.format == "fp8":
            return Codes(*Int8.encode(self.decoded(layer), 0))
        readers = {"gptq": self._gptq, "awq": self._awq, "packed": self._packed}
        reader = readers.get(self.recipe.layout, self._plain)
        codes, scale, zero = reader(layer, parts)
        if self.recipe.symmetric and zero is not None:
            self._check_zeros(layer, zero)
            zero = None
        if self.recipe.format == "int8" and zero is None and scale.shape[1] == 1:
            scale = scale.float().flatten()  # of each output, as our own
        return Codes(codes, scale, zero)

    def _check_zeros(self, layer: str, zeros: Tensor) -> None:
        if zeros.any():
            raise ValueError(
                f"{self.path}: {layer}.weight: config.json says that codes are symmetric, "
                "and this weight has zero points; correct config.json"
            )

    def _gptq(self, layer: str, parts: set[str]) -> tuple[Tensor, Tensor, Tensor]:
        bits = self.bits
        packed = self._read(f"{layer}.qweight", NUMBERS, (-1, -1))  # [K bits / 32, N]
        inputs = 32 // bits * packed.shape[0]
        outputs = packed.shape[1]
        groups = self._groups(layer, inputs)
        scale = self._read(f"{layer}.scales", HALVES, (groups, outputs))
        zero = self._read(f"{layer}.qzeros", NUMBERS, (groups, -(-outputs * bits // 32)))
        if "g_idx" in parts:
            self._check_order(f"{layer}.g_idx", inputs, groups)
        if self.recipe.less_one:  # all codes of a number at once, as one was subtracted from them
            zero = zero + (0x11111111 if bits == 4 else 0x01010101)
        zero = unpack(zero, bits)
        return unpack(packed.T, bits), scale.T, zero[:, :outputs].T

    def _awq(self, layer: str, parts: set[str]) -> tuple[Tensor, Tensor, Tensor]:
        packed = self._read(f"{layer}.qweight", NUMBERS, (-1, -1))  # [K, N / 8]
        inputs, columns = packed.shape
        groups = self._groups(layer, inputs)
        scale = self._read(f"{layer}.scales", HALVES, (groups, 8 * columns))
        zero = self._read(f"{layer}.qzeros", NUMBERS, (groups, columns))
        return unpack_awq(packed).T.contiguous(), scale.T, unpack_awq(zero).T

    def _packed(self, layer: str, parts: set[str]) -> tuple[Tensor, Tensor, Tensor | None]:
        bits = self.bits
        packed = self._read(f"{layer}.weight_packed", NUMBERS, (-1, -1))  # [N, K bits / 32]
        outputs = len(packed)
        inputs = 32 // bits * packed.shape[1]
        groups = self._groups(layer, inputs)
        scale = self._scale(layer, outputs, groups)
        self._check_shape(layer, parts, (outputs, inputs))
        if "weight_g_idx" in parts:
            self._check_order(f"{layer}.weight_g_idx", inputs, groups)
        if self.recipe.symmetric:
            return unpack(packed, bits), scale, None
        shape = (-(-outputs * bits // 32), groups)
        zero = self._read(f"{layer}.weight_zero_point", NUMBERS, shape)
        return unpack(packed, bits), scale, unpack(zero.T, bits)[:, :outputs].T

    def _plain(self, layer: str, parts: set[str]) -> tuple[Tensor, Tensor, None]:
        codes = self._read(f"{layer}.weight", (torch.int8,), (-1, -1))
        outputs, inputs = codes.shape
        return codes, self._scale(layer, outputs, self._groups(layer, inputs)), None

    def _scale(self, layer: str, outputs: int, groups: int) -> Tensor:
        """Read scales of compressed-tensors, [N, K / G]; those of int8 outputs may be fp32."""
        name = f"{layer}.weight_scale"
        if groups > 1 or self.bits == 4 or not self.recipe.symmetric:
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
        scale = self._read(f"{layer}.{self.needed[1]}", FLOATS, *shapes)
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

    def _check_shape(self, layer: str, parts: set[str], shape: tuple[int, int]) -> None:
        if "weight_shape" not in parts:
            return
        stored = self._read(f"{layer}.weight_shape", (torch.int64, torch.int32), (2,)).tolist()
        if stored != list(shape):
            raise ValueError(
                f"{self.path}: {layer}.weight_shape says {stored}, "
                f"and weight_packed holds {list(shape)}; download it again"
            )


def _has_shape(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor has a shape; -1 in it stands for any size but 0."""
    if len(shape) != tensor.dim():
        return False
    return all(want == n or want < 0 < n for want, n in zip(shape, tensor.shape))


def _layers(files: TensorSource, parts: tuple[str, ...]) -> dict[str, set[str]]:
    """Return the parts that each layer has."""
    layers: dict[str, set[str]] = {}
    for name in files.readers:
        layer, _, part = name.rpartition(".")
        if part in parts:
            layers.setdefault(layer, set()).add(part)
    return layers
