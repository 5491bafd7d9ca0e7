"""Formats of quantized weights: int8 and int4, with a scale per group of inputs.

1. An encoder (`FORMATS`) turns one float weight at a time into codes and scales, so that no model
   exists in full precision; `pack` lays them out for the matmul of their device (weight.py).
2. With second moments of a layer's inputs (files/calibrate.py), int4 rounds one input after the
   other, and the inputs that follow make up for its error: GPTQ (arXiv 2210.17323).
3. Files hold codes and scales; `to_file` and `from_file` convert the codes.

A new format is an encoder here and a row of `LAYOUTS` (weight.py) for each device. The types of a
GGUF file have no encoder: only files hold them (files/gguf_blocks.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from backends.weight import GROUPS, LAYOUTS, Weight, join_zeros, pack

# weights rounded at a time: that many fit a CPU's cache, and a GPU needs few launches
AT_ONCE = {"cpu": 2**17, "cuda": 2**24}
# magnitudes tried for code -8, in units of the largest magnitude
SEARCH = tuple(8 / 7 - 0.04 * i for i in range(12))
WIDTH = 2048  # inputs whose moments with each other are known
DAMPING = 0.01  # of the mean second moment, added to each; of GPTQ


class Encoder:
    """Rounds weights to codes and scales, and writes these to files. Subclasses are the formats."""

    format: ClassVar[str]
    file_dtype: ClassVar[torch.dtype]  # of stored codes
    half: ClassVar[int]  # of the number of codes

    @classmethod
    def encode(cls, weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
        """Round a weight, a few rows at a time, so that no copy of it exists in fp32.

        weight: [N, K] float; group_size: inputs that share a scale; 0: all of them, in int8
        Returns: codes [N, K] int8; scale, `scale_shape` of `scale_dtype`.
        """
        codes = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
        scale = weight.new_empty(
            cls.scale_shape(weight.shape, group_size), dtype=cls.scale_dtype(group_size)
        )
        rows = max(1, AT_ONCE[weight.device.type] // weight.shape[1])
        parts = zip(weight.split(rows), codes.split(rows), scale.split(rows))
        for weight_part, codes_part, scale_part in parts:
            cls.encode_rows(weight_part.float(), codes_part, scale_part)
        return codes, scale

    @staticmethod
    def encode_rows(weight: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Round a few rows. weight: [N, K] fp32. Writes: codes, scale."""
        raise NotImplementedError

    @classmethod
    def decode(cls, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the weight of codes and scales, [N, K] fp32."""
        layouts = [layout for layout in LAYOUTS.values() if layout.format == cls.format]
        return layouts[0].decode(codes, scale)

    @classmethod
    def pack(cls, codes: Tensor, scale: Tensor, zero: Tensor | None = None) -> Weight:
        """Lay out the weight (codes - zero) * scale for its device: nothing is rounded.

        codes: [N, K] int8
        scale: of int8 [N] float32; of int4, and on a CPU of int8, [N, K/G] bfloat16 or float16, or
        int32 from `join_zeros`; G: any multiple of 32, also K, which is a scale per output
        zero: [N, K/G] int8 in -half .. half, or None
        Raises: ValueError for other groups.
        """
        if scale.dim() > 1:
            scale = cls._in_groups(codes, scale, zero)
        return pack(cls.format, codes, scale)

    @classmethod
    def _in_groups(cls, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Return the scales of the layouts' groups, of which a file's group may make several."""
        group, rest = divmod(codes.shape[1], scale.shape[1])
        sizes = [size for size in GROUPS if group % size == 0 and not rest]
        if not sizes:
            raise ValueError(
                f"{cls.format} groups must be of a multiple of {GROUPS[0]} inputs; "
                f"{scale.shape[1]} scales of {codes.shape[1]} inputs make none; use --quant int8"
            )
        is_plain = zero is None and scale.dtype == torch.bfloat16
        if not is_plain and scale.dtype != torch.int32:
            scale = join_zeros(scale, zero, cls.half)
        return scale.repeat_interleave(group // sizes[-1], 1)

    @classmethod
    def round(cls, weight: Tensor, group_size: int = 128) -> Weight:
        """Round a weight, [N, K] float, and lay it out on its device."""
        return cls.pack(*cls.encode(weight, group_size))

    @staticmethod
    def to_file(codes: Tensor) -> Tensor:
        """Return the codes in the layout of files, `file_shape` of `file_dtype`."""
        return codes

    @staticmethod
    def from_file(stored: Tensor) -> Tensor:
        """Return the codes of the layout of files, the inverse of `to_file`."""
        return stored

    @staticmethod
    def file_shape(shape: torch.Size) -> torch.Size:
        """Return the shape of the stored codes of a weight."""
        return shape

    @staticmethod
    def scale_shape(shape: torch.Size, group_size: int) -> torch.Size:
        """Return the shape of the scales of a weight."""
        return torch.Size((shape[0], shape[1] // group_size)) if group_size else shape[:1]

    @staticmethod
    def scale_dtype(group_size: int) -> torch.dtype:
        """Return the type of stored scales."""
        return torch.bfloat16 if group_size else torch.float32

    @classmethod
    def stored_bytes(cls, shape: torch.Size, group_size: int) -> int:
        """Return the bytes of a weight's codes and scales in a file."""
        codes = cls.file_shape(shape).numel() * cls.file_dtype.itemsize
        scales = cls.scale_shape(shape, group_size).numel()
        return codes + scales * cls.scale_dtype(group_size).itemsize


class Int8(Encoder):
    """Codes -127 .. 127 of a byte each, and a bf16 scale per output and group of inputs.

    Groups of 64 have a third of the error of whole outputs in a model with outlying weights
    (SmolLM2-135M: KL 0.0017 and 0.0040), and the fc of a head trained here has weights 30 times as
    large for the embedding as for the feature. CUDA's product takes one fp32 scale per output.
    Files of others have code -128 too.
    """

    format = "int8"
    file_dtype = torch.int8
    half = 128

    @staticmethod
    def encode_rows(weight: Tensor, codes: Tensor, scale: Tensor) -> None:
        steps = scale.view(len(scale), -1)  # [N, K/G], or [N, 1]
        groups = weight.unflatten(1, (steps.shape[1], -1))  # [N, K/G, G]
        steps.copy_(groups.abs().amax(-1).clamp(min=1e-30) / 127)
        rounded = (groups / steps.float()[..., None]).round_().clamp_(-127, 127)
        codes.copy_(rounded.flatten(1))


class Int4(Encoder):
    """Codes -8 .. 7, and a bf16 scale per output and group of inputs.

    A scale may be negative, so that the larger extreme can be code -8, as in llama.cpp's Q4_0. We
    make no zero points; other libraries' files have them, and fp16 scales.
    In a file, a byte's low half is the even column.
    """

    format = "int4"
    file_dtype = torch.uint8
    half = 8

    @staticmethod
    def encode_rows(weight: Tensor, codes: Tensor, scale: Tensor) -> None:
        groups = weight.unflatten(1, (scale.shape[1], -1))  # [N, K/G, G]
        # rounds to bf16; the codes are made for the rounded scale
        scale.copy_(_search_scale(groups).squeeze(-1))
        rounded = _round_int4(groups, scale.float()[..., None], torch.empty_like(groups))
        codes.copy_(rounded.flatten(1))

    @classmethod
    def encode_calibrated(
        cls, weight: Tensor, group_size: int, moments: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Round one input after the other, as `encode` returns it.

        weight: [N, K] float; moments: of its inputs, as `Moments.parts`
        """
        codes = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
        scale = weight.new_empty(cls.scale_shape(weight.shape, group_size), dtype=torch.bfloat16)
        columns = zip(weight.split(WIDTH, 1), codes.split(WIDTH, 1), moments)
        for number, (weight_part, codes_part, moment) in enumerate(columns):
            first = number * WIDTH // group_size
            scale_part = scale[:, first : first + weight_part.shape[1] // group_size]
            rows = AT_ONCE[weight.device.type] // 128
            moment = moment.to(weight.device)
            factor = _inverse_factor(moment)
            importance = moment.diagonal().clamp(min=1e-12)
            for part in zip(
                weight_part.split(rows), codes_part.split(rows), scale_part.split(rows)
            ):
                _round_with_feedback(*part, factor, importance)
        return codes, scale

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


FORMATS: dict[str, type[Encoder]] = {kind.format: kind for kind in (Int8, Int4)}


def _round_int4(groups: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    return torch.div(groups, scale, out=out).round_().clamp_(-8, 7)


def _inverse_factor(moment: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of damped moments, [K, K] fp32."""
    damped = moment.double()
    mean = damped.diagonal().mean()
    # inputs that are always zero have no moments: any code serves them
    damped.diagonal().add_(DAMPING * mean + 1e-9)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()


def _round_with_feedback(
    weight: Tensor, codes: Tensor, scale: Tensor, factor: Tensor, importance: Tensor
) -> None:
    """Round inputs in turn. An input's error, times its row of `factor`, goes to later inputs.

    weight: [N, K] float; factor: [K, K], from `_inverse_factor`; importance: [K] fp32
    Writes: codes, [N, K]; scale, [N, K/G].
    """
    left = weight.T.float().contiguous()  # [K, N]; an input's weights lie side by side
    rounded = torch.empty_like(left)
    group = weight.shape[1] // scale.shape[1]
    diagonal = factor.diagonal().tolist()
    for number, first in enumerate(range(0, len(left), group)):
        last = first + group
        groups = left[first:last].T.unsqueeze(1)  # [N, 1, G]
        step = _search_scale(groups, importance[first:last]).flatten()
        scale[:, number] = step
        step = scale[:, number].float()
        errors = torch.empty_like(left[first:last])  # [G, N]
        for k in range(first, last):
            before = errors[: k - first]  # of the inputs of this group
            value = left[k].addmv_(before.T, factor[first:k, k], alpha=-1)
            _round_int4(value, step, rounded[k])
            error = errors[k - first]
            torch.addcmul(value, rounded[k], step, value=-1, out=error).div_(diagonal[k])
        left[last:].addmm_(factor[first:last, last:].T, errors, alpha=-1)
    codes.copy_(rounded.T)


def _search_scale(groups: Tensor, importance: Tensor | None = None) -> Tensor:
    """Search a scale for each group with a small squared error.

    The weight-only steps of AWQ and HQQ do the same. Each share in SEARCH gives a scale, and that
    gives codes q of the group w. The best scale for these codes is w.q / q.q, with the squared
    error w.w - (w.q)^2 / q.q. The first share is plain symmetric rounding.

    groups: [N, K/G, G] fp32
    importance: [G] fp32, of the squared errors; None: all the same
    Returns: [N, K/G, 1] fp32, never 0.
    """
    low = groups.amin(-1, keepdim=True)
    high = groups.amax(-1, keepdim=True)
    extreme = torch.where(-low > high, low, high)  # goes to code -8
    extreme = torch.where(extreme.abs() < 1e-30, 1e-30, extreme)
    best = extreme / -8
    most_explained = torch.zeros_like(low)
    codes = torch.empty_like(groups)
    for share in SEARCH:
        _round_int4(groups, extreme * (share / -8), codes)
        weighted = codes if importance is None else codes * importance
        along = torch.linalg.vecdot(groups, weighted)[..., None]  # w.q
        refit = along / torch.linalg.vecdot(codes, weighted)[..., None]
        explained = along * refit
        better = explained > most_explained  # an all-zero group keeps its first scale
        best = torch.where(better, refit, best)
        most_explained = torch.where(better, explained, most_explained)
    return best


def check_finite(weight: Tensor, name: str, path: Path) -> None:
    """Check a weight that is to be rounded. Raises: ValueError for NaN or infinite numbers."""
    # the sum of finite numbers of 16 bits is finite in fp32, and takes no copy
    if not weight.sum(dtype=torch.float32).isfinite() and not weight.isfinite().all():
        raise ValueError(f"{path}: {name} has weights that are NaN or infinite; download it again")
