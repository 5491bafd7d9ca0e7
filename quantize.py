"""Weight quantization: int8 or int4, with a scale per group of inputs.

    python generate.py --checkpoint DIR --quant int4                  # quantize while loading
    python quantize.py --checkpoint DIR --quant int4 --out DIR-int4   # or once, into files

1. A format (`FORMATS`) turns one float weight at a time into codes and scales, so that no model
   exists in full precision.
2. A layer packs its codes for the product of its device (ops/qmatmul.py).
3. With second moments of a layer's inputs (hf/calibrate.py), int4 rounds one input after the other,
   and the inputs that follow make up for its error: GPTQ (arXiv 2210.17323).
4. On disk, codes have the weight's own name, and scales that name and `_scale`. config.json has
   the format in `quantization_config`. Quantizing while loading gives the same bits.

Trade-off: draft heads, experts and int8 are rounded without moments, which is enough for them.
Not here: products; embeddings, which are looked up and never multiplied.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while torch is imported

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from cli.io import bundled_head, is_gguf, log_note, read_json, show_progress
from cli.parsing import one_line_errors, option, parse
from hf.checkpoint import (
    METHOD,
    Quantization,
    TensorSource,
    WeightFiles,
    check_out,
    fit_group,
    in_groups,
    saved_quantization,
    scale_name,
    write_checkpoint,
)
from ops.epilogues import LazyMatmul, UnnormalizedRows, add, lazy_matmul
from ops.library import cpu_operators_are_loaded, single_torch_thread
from ops.qmatmul import PRODUCTS, join_zeros, split_zeros
from options import FORMAT_NAMES, GROUP_SIZES, pick_device

# weights rounded at a time: that many fit a CPU's cache, and a GPU needs few launches
AT_ONCE = {"cpu": 2**17, "cuda": 2**24}
# magnitudes tried for code -8, in units of the largest magnitude
SEARCH = tuple(8 / 7 - 0.04 * i for i in range(12))
WIDTH = 2048  # inputs whose moments with each other are known
DAMPING = 0.01  # of the mean second moment, added to each; of GPTQ
TIED = "model.embed_tokens.weight"


class Moments(NamedTuple):
    """The second moments of the inputs that some weights share."""

    names: tuple[str, ...]  # of the weights
    parts: list[Tensor]  # [WIDTH, WIDTH] fp32 each, the last may be smaller


# ---------------------------------------------------------------------- formats


class QuantLinear(nn.Module):
    """A linear layer with codes and scales in place of its weight. Subclasses are the formats."""

    format: ClassVar[str]
    file_dtype: ClassVar[torch.dtype]  # of stored codes
    half: ClassVar[int]  # of the number of codes

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        fp32_out: bool = False,
        zero: Tensor | None = None,
    ):
        """Pack the weight (codes - zero) * scale for its device: nothing is rounded.

        codes: [N, K] int8
        scale: of int8 [N] float32; of both formats, on CUDA of int4 only, [N, K/G] bfloat16 or
        float16, or int32 from `join_zeros`; G: any multiple of 32, as K for a scale per output
        fp32_out: outputs in fp32 (LM heads), never rounded
        zero: [N, K/G] int8 in -half .. half, or None
        Raises: ValueError for other groups.
        """
        if scale.dim() > 1:
            scale = self.grouped(codes, scale, zero)
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.fp32_out = fp32_out
        self.group_size = 0  # one scale per output
        if scale.dim() > 1:
            self.group_size = self.in_features // scale.shape[1]
        self.product = PRODUCTS[self.format, codes.device.type]
        packed, scale = self.product.pack(codes, scale)
        self.register_buffer("packed", packed)
        self.register_buffer("scale", scale)
        self.bias = nn.Parameter(bias, requires_grad=False) if bias is not None else None

    @classmethod
    def grouped(cls, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Return the scales of the products' groups, of which a file's group may make several."""
        group, rest = divmod(codes.shape[1], scale.shape[1])
        sizes = [size for size in GROUP_SIZES if group % size == 0 and not rest]
        if not sizes:
            raise ValueError(
                f"{cls.format} groups must be of a multiple of {GROUP_SIZES[0]} inputs; "
                f"{scale.shape[1]} scales of {codes.shape[1]} inputs make none; use --quant int8"
            )
        is_plain = zero is None and scale.dtype == torch.bfloat16
        if not is_plain and scale.dtype != torch.int32:
            scale = join_zeros(scale, zero, cls.half)
        return scale.repeat_interleave(group // sizes[-1], 1)

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
        """Return the weight of codes and scale, [N, K] fp32."""
        if scale.dim() == 1:
            return codes.float() * scale[:, None]
        groups, steps = split_zeros(codes, scale, cls.half)
        return (groups * steps).flatten(1)

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

    @classmethod
    def from_float(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        group_size: int = 128,
        fp32_out: bool = False,
    ):
        """Make a layer of a weight, [N, K] float, on the weight's device."""
        codes, scale = cls.encode(weight, group_size)
        return cls(codes, scale, bias, fp32_out)

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        deferred = lazy_matmul(x, self.packed, self.scale, None)
        if deferred and self.bias is not None and not self.fp32_out:
            return add(self.bias, deferred)
        y = self.product.multiply(x, self.packed, self.scale, self.out_features, self.fp32_out)
        return y if self.bias is None else y + self.bias

    def forward_lazy(self, x: Tensor | UnnormalizedRows) -> Tensor | LazyMatmul:  # see model.Linear
        return lazy_matmul(x, *self.operands()) or self(x)

    def codes_and_scale(self) -> tuple[Tensor, Tensor]:
        """Unpack the codes and scales of the layer."""
        return self.product.unpack(self.packed, self.scale, self.out_features, self.in_features)

    def dequantize(self) -> Tensor:
        """Return the weight of the codes and scales, [N, K] fp32."""
        codes, scale = self.codes_and_scale()
        return self.decode(codes, scale)

    def rows(self, ids: Tensor) -> QuantLinear:
        """Return a layer with some of the outputs, in their codes and scales. ids: [R] int64."""
        codes, scale = self.codes_and_scale()
        bias = None if self.bias is None else self.bias[ids]
        return type(self)(codes[ids], scale[ids], bias, self.fp32_out)

    def operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return packed codes, scale and bias, as ops/cpu/layers.py takes them."""
        return self.packed, self.scale, self.bias


class Int8Linear(QuantLinear):
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


class Int4Linear(QuantLinear):
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


class QuantExperts(nn.Module):
    """A linear layer per expert, with stacked codes and scales in place of their weights."""

    def __init__(
        self, kind: type[QuantLinear], codes_and_scales: Iterator[tuple[Tensor, ...]], experts: int
    ):
        """Pack and stack the experts' codes and scales.

        codes_and_scales: one expert after the other, each computed in its turn, so that only one
        exists twice; with int4, zero points may follow
        """
        super().__init__()
        for e, (codes, scale, *zero) in enumerate(codes_and_scales):
            expert = kind(codes, scale, None, False, *zero)
            if e == 0:
                self.kind = kind
                self.product = expert.product
                self.out_features = expert.out_features
                self.in_features = expert.in_features
                packed_shape = (experts, *expert.packed.shape)
                scale_shape = (experts, *expert.scale.shape)
                self.register_buffer("packed", expert.packed.new_empty(packed_shape))
                self.register_buffer("scale", expert.scale.new_empty(scale_shape))
            self.packed[e] = expert.packed
            self.scale[e] = expert.scale

    def forward(self, x: Tensor, routing: Tensor) -> Tensor:
        """Multiply every row with its expert: [P, K], from `ops.experts.route` -> [P, N]."""
        return self.product.multiply(x, self.packed, self.scale, self.out_features, False, routing)

    def operands(self) -> tuple[Tensor, Tensor, None]:
        """Return packed codes, scales and no bias, as ops/cpu/layers.py takes them."""
        return self.packed, self.scale, None

    def dequantize(self) -> Tensor:
        """Return the weights of the codes and scales, [E, N, K] fp32."""
        weights = []
        for packed, scale in zip(self.packed, self.scale):
            parts = self.product.unpack(packed, scale, self.out_features, self.in_features)
            weights.append(self.kind.decode(*parts))
        return torch.stack(weights)


FORMATS: dict[str, type[QuantLinear]] = {kind.format: kind for kind in (Int8Linear, Int4Linear)}


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


# ---------------------------------------------------------------------- main


@dataclass(frozen=True)
class QuantizeConfig:
    """Options of quantize.py. Units and effects are in the help texts."""

    checkpoint: str = option("", "Hugging Face directory of a target model or a head", bare=True)
    quant: str = option("int4", "format", FORMAT_NAMES)
    group_size: int = option(
        0, "inputs that share a scale (int4): 32, 64 or 128; 0: 64, or 32 where 64 does not fit"
    )
    out: str = option("", "directory to write")
    device: str = option("cpu", "where to compute: cpu or cuda")
    overwrite: bool = option(False, "replace the directory if it is there")


def is_quantized(name: str, tensor: Tensor) -> bool:
    """Check that a stored tensor is a linear layer's weight; routers and confidences are not."""
    others = ("embed_tokens.weight", "block_sparse_moe.gate.weight", "mlp.gate.weight")
    others += ("markov_w1.weight", "confidence_head.proj.weight")
    return tensor.dim() == 2 and name.endswith(".weight") and not name.endswith(others)


def encoded(
    files: TensorSource, quant: Quantization, device: str, moments: Iterable[Moments] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a directory, with codes and scales for the weights of linear layers.

    moments: of the weights that are rounded with them; a tied LM head is written apart then
    Prints its progress. Raises: ValueError for a weight that is NaN or infinite.
    """
    kind = FORMATS[quant.format]
    names = dict.fromkeys(files.readers)
    for names_with, parts in moments:
        usable = _usable(parts, names_with)
        for name in names_with:
            weight = files.read(name if name in files.readers else TIED).to(device)
            check_finite(weight, name, files.path)
            names.pop(name, None)
            if usable:
                pair = kind.encode_calibrated(weight, quant.group_size, parts)
            else:
                pair = kind.encode(weight, quant.group_size)
            yield from _stored(kind, name, *pair)
        count = len(files.readers)
        show_progress(f"{quant.format}: {count - len(names)} of {count} tensors", False)
    count = len(files.readers)
    for number, name in enumerate(names, 1 + count - len(names)):
        tensor = files.read(name)
        if is_quantized(name, tensor):
            check_finite(tensor, name, files.path)
            yield from _stored(kind, name, *kind.encode(tensor.to(device), quant.group_size))
        elif not name.endswith("rotary_emb.inv_freq"):
            yield name, tensor.clone()
        show_progress(f"{quant.format}: {number} of {count} tensors", number == count)


def _stored(
    kind: type[QuantLinear], name: str, codes: Tensor, scale: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight's tensors as files hold them."""
    yield name, kind.to_file(codes).cpu()
    yield scale_name(name), scale.cpu()


def check_finite(weight: Tensor, name: str, path: Path) -> None:
    """Check a weight that is to be rounded. Raises: ValueError for NaN or infinite numbers."""
    # the sum of finite numbers of 16 bits is finite in fp32, and takes no copy
    if not weight.sum(dtype=torch.float32).isfinite() and not weight.isfinite().all():
        raise ValueError(f"{path}: {name} has weights that are NaN or infinite; download it again")


def _usable(parts: list[Tensor], names: tuple[str, ...]) -> bool:
    """Return whether moments say anything. Prints a line where they do not."""
    fault = ""
    if not all(part.isfinite().all() for part in parts):
        fault = "NaN or infinite"
    elif not any(part.any() for part in parts):
        fault = "all zero"
    if fault:
        log_note(
            f"the inputs of {names[0]} are {fault} on the calibration text; it is rounded "
            "without calibration"
        )
    return not fault


def quantize_directory(
    path: Path,
    out: Path,
    quant: Quantization,
    device: str = "cpu",
    overwrite: bool = False,
    moments: Iterable[Moments] = (),
) -> None:
    """Write a quantized copy of a model directory, which generate.py loads without options.

    moments: as for `encoded`
    Raises: ValueError for a directory that is quantized already, a group size that does not
    divide, or files that cannot be read or written.
    Writes: `out`.
    """
    quant.check("--quant")
    raw = read_json(path / "config.json")
    if saved_quantization(raw, path) is not None:
        format = raw["quantization_config"]["format"]
        raise ValueError(f"{path} is quantized already ({format}); give the original")
    if out.resolve() in (path.resolve(), *path.resolve().parents):
        raise ValueError(f"--out holds the checkpoint itself ({out}); name another directory")
    check_out(out, overwrite)
    files = WeightFiles(path)
    tensors = {name: files.read(name) for name in files.readers}  # memory-mapped
    shapes = {name: tensor.shape for name, tensor in tensors.items() if is_quantized(name, tensor)}
    inputs = {name: shape[1] for name, shape in shapes.items()}
    is_target = any(name.startswith("model.") for name in inputs)  # not a draft head
    quant = fit_group(in_groups(quant, inputs.values()), inputs)
    kind = FORMATS[quant.format]
    need_bytes = sum(tensor.nbytes for name, tensor in tensors.items() if name not in shapes)
    need_bytes += sum(kind.stored_bytes(shape, quant.group_size) for shape in shapes.values())
    check_out(out, overwrite, need_bytes)
    settings = {"quant_method": METHOD, "format": quant.format}
    if quant.group_size:
        settings["group_size"] = quant.group_size
    raw["quantization_config"] = settings
    moments = iter(moments)
    first = next(moments, None) if is_target else None  # without a tokenizer there are none
    if first is not None:
        moments = chain((first,), moments)
        raw["tie_word_embeddings"] = False  # the head is written apart, in codes
    # loops over short rows: threads would wait for each other longer than they work
    with single_torch_thread(device == "cpu" and cpu_operators_are_loaded()):
        write_checkpoint(out, encoded(files, quant, device, moments), raw, path, overwrite)


def main(
    argv: list[str] | None = None,
    moments_of: Callable[[Path], Iterator[Moments]] | None = None,
) -> None:
    """Run the command line.

    moments_of: that of hf/calibrate.py, for int4; None: every input counts the same
    """
    config = parse(QuantizeConfig, "quantize.py", "Round a model's weights once and for all.", argv)

    with one_line_errors("quantize.py"):
        if is_gguf(Path(config.checkpoint)):
            raise ValueError(
                f"{config.checkpoint} is a GGUF file, which runs in its own bits as it is: "
                f"python generate.py --checkpoint {config.checkpoint}"
            )
        if not config.checkpoint or not config.out:
            raise ValueError("--checkpoint and --out are needed: directories to read and to write")
        if config.group_size and config.quant != "int4":
            raise ValueError("--group_size belongs to int4; leave it out")
        quant = Quantization(config.quant, config.group_size)
        out = Path(config.out)
        device = pick_device(config.device)
        path = Path(config.checkpoint)
        moments = ()
        if config.quant == "int4" and moments_of:
            moments = moments_of(path)
        quantize_directory(path, out, quant, device, config.overwrite, moments)
        size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        head = bundled_head(Path(config.checkpoint))
        given = f"--checkpoint {config.out}" + (f" --head {head}" if head.is_dir() else "")
        if not any(name.startswith("model.") for name in WeightFiles(out).readers):
            given = f"--checkpoint MODEL --head {config.out}"
        print(
            f"wrote {config.out}, {size / 1e9:.3f} GB of weights; run: "
            f'python generate.py {given} --prompt "Once upon a time"'
        )


if __name__ == "__main__":
    # the program alone needs it: it stands above this module, and runs models of these formats
    from hf.calibrate import moments_of

    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(moments_of=moments_of)
