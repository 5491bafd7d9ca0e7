"""Weights of 16, 8 and 4 bits: rounding, the linear layer over them, and reading them from files.

    python generate.py --checkpoint DIR --quant int4                  # round while loading
    python quantize.py --checkpoint DIR --quant int4 --out DIR-int4   # or once, into files (run/)

A weight's way has five stations, each a method of `Loader` that the folder files/ may extend:
1. Open: a `TensorSource` reads tensors by their names in files.
2. Rename: a parameter is made of tensors of other names, one below the other.
3. Encode: `Int8` and `Int4` round numbers to codes and scales, one weight at a time.
4. Pack: codes and scales become one record as a device's matmul reads it. Those of backends/ are
   registered by device; `Codes` has them as they are.
5. Place: the layer holds the record, and a backend multiplies rows by it.
"""

from __future__ import annotations

from options import fail, require, run_program

if __name__ == "__main__":
    run_program("quantize")  # before torch, whose import takes seconds, so that mistakes are told
    fail("quantize.py", "writing weights is in the folder run/, which is not here; restore it")

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from options import one_line, part_or
from reference import TORCH, Backend

BLOCKS = "blocks"  # the format of weights in the blocks of a GGUF file, which files/ reads
GROUPS = (32, 64, 128)  # inputs that share a scale, where they are not all
OPEN_GROUP = 64  # the largest group of int4 where none is given: 128 lose much for 3 % less memory
OUTLIER = 4  # root mean squares of a row above which a magnitude does not set its block's scale
FARTHEST = 128  # an outlier's code is at most this many times 127
# weights rounded at a time: that many fit a CPU's cache, and a GPU needs few launches
AT_ONCE = {"cpu": 2**17, "cuda": 2**24}
# magnitudes tried for code -8, in units of the largest magnitude
SEARCH = tuple(8 / 7 - 0.04 * i for i in range(12))


# ---------------------------------------------------------------------- the plain matmuls


def round_activations(x: Tensor, block: int, farthest: int = FARTHEST) -> tuple[Tensor, Tensor]:
    """Round rows to 8 bits block by block; outliers keep up to 15.

    x: [..., K]; farthest: an outlier's code is at most this many times 127, a power of 2
    Returns: codes [..., blocks, block] and scales [..., blocks, 1], both fp32; the last block is
    padded with zeros. Codes are -127 to 127, those of outliers up to 127 * `farthest`.
    """
    rms = x.float().pow(2).mean(-1, keepdim=True).sqrt()[..., None]  # [..., 1, 1]
    blocks = F.pad(x.float(), (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
    magnitudes = blocks.abs()
    inlier = magnitudes.masked_fill(magnitudes > OUTLIER * rms, 0).amax(-1, keepdim=True)
    unit = torch.maximum(inlier, magnitudes.amax(-1, keepdim=True) / farthest)  # has the code 127
    # divided by a tensor: with a plain number, 127 / unit is 127 * (1 / unit), which rounds twice
    to_code = torch.where(unit > 1e-30, torch.full_like(unit, 127) / unit, 0)
    return (blocks * to_code).round(), unit / 127


def multiply_groups(x: Tensor, codes: Tensor, steps: Tensor) -> Tensor:
    """Multiply by codes in groups: rows are rounded to 8 bits, and sums are of integers.

    A row's result does not depend on the other rows.
    x: [M, K]; codes: [N, groups, G] integers; steps: their scales, [N, groups]
    Returns: [M, N] fp32.
    """
    activations, scales = round_activations(x, codes.shape[2])
    high = (activations / 256).round()
    halves = torch.stack((high, activations - 256 * high))  # [2, M, groups, G], at most 7 bits
    # integers of up to 24 bits are exact in fp32, of up to 53 bits in fp64
    exact = torch.float32 if codes.shape[2] <= 512 else torch.float64
    rows = halves.permute(2, 0, 1, 3).flatten(1, 2)  # [groups, 2 M, G]
    sums = rows.to(exact) @ codes.to(exact).permute(1, 2, 0)  # [groups, 2 M, N]
    high, low = sums.unflatten(1, (2, -1)).unbind(1)  # [groups, M, N] each
    sums = high.double().mul_(256).add_(low).float().transpose(0, 1)  # [M, groups, N]
    return (sums * scales * steps.float().T).sum(1)


# ---------------------------------------------------------------------- the record


class Codes(NamedTuple):
    """The weight of a linear layer, [N, K], or a stack of experts: codes and scales as they are.

    A backend may have its own record in its place (`pack`), with the same methods.
    """

    codes: Tensor  # [N, K] int8, E in front
    scale: Tensor  # as for `pack`, E in front
    format: str  # a key of `FORMATS`
    experts: int = 0  # E; 0: one weight

    stacked = ("codes", "scale")  # the fields with E in front
    in_cpp = False  # whether the C++ operators of a CPU multiply by it

    @property
    def inputs(self) -> int:
        """K."""
        return self.codes.shape[-1]

    @property
    def outputs(self) -> int:
        """N."""
        return self.codes.shape[-2]

    @property
    def group_size(self) -> int:
        """The inputs that share a scale; 0: one scale per output."""
        one = self.expert(0) if self.experts else self
        return one.inputs // one.scale.shape[1] if one.scale.dim() > 1 else 0

    def expert(self, number: int) -> Codes:
        """Return the weight of one expert of a stack."""
        return Codes(self.codes[number], self.scale[number], self.format)

    def numbers(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the numbers of the weight, [N, K] or [E, N, K]."""
        if self.experts:
            return torch.stack([self.expert(e).numbers(dtype) for e in range(self.experts)])
        return decode(self.codes, self.scale).to(dtype)

    def multiply(self, rows: Tensor) -> Tensor:
        """Multiply rows, [M, K] -> [M, N] fp32."""
        steps = self.scale.view(len(self.scale), -1)  # [N, K/G], or [N, 1]
        return multiply_groups(rows, self.codes.unflatten(1, (steps.shape[1], -1)), steps)

    def take(self, ids: Tensor) -> Codes:
        """Return some of the outputs. ids: [R] int64"""
        return Codes(self.codes[ids], self.scale[ids], self.format)


def pack(format: str, codes: Tensor, scale: Tensor) -> Any:
    """Lay out codes and scales for their device: nothing is rounded.

    codes: [N, K] int8; scale: [N] float32, or in groups of `GROUPS` [N, K/G] bfloat16
    Returns: `Codes`, or the record of the device's backend.
    """
    record = part_or("layouts", codes.device.type, Codes)
    return record(codes, scale, format)


def stack(weights: Iterable[Any], experts: int) -> Any:
    """Stack the experts' weights, each computed in its turn, so that only one exists twice."""
    whole = None
    for number, weight in enumerate(weights):
        parts = {name: getattr(weight, name) for name in weight.stacked}
        parts = {name: part for name, part in parts.items() if part is not None}
        if whole is None:
            empty = {name: part.new_empty(experts, *part.shape) for name, part in parts.items()}
            whole = type(weight)(**weight._asdict() | empty | {"experts": experts})
        for name, part in parts.items():
            getattr(whole, name)[number] = part
    return whole


# ---------------------------------------------------------------------- the formats


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the weight of codes and scales, as for `pack`, [N, K] fp32."""
    steps = scale.float().view(len(scale), -1, 1)
    return (codes.float().unflatten(1, (steps.shape[1], -1)) * steps).flatten(1)


class Encoder:
    """Rounds weights to codes and scales. Subclasses are the formats."""

    format: ClassVar[str]

    @classmethod
    def encode(cls, weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
        """Round a weight, a few rows at a time, so that no copy of it exists in fp32.

        weight: [N, K] float; group_size: inputs that share a scale; 0: all of them, in int8
        Returns: codes [N, K] int8; scale, [N, K/G] bfloat16, or of all inputs [N] float32.
        """
        N, K = weight.shape
        codes = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
        scale = weight.new_empty(N, dtype=torch.float32)
        if group_size:
            scale = weight.new_empty(N, K // group_size, dtype=torch.bfloat16)
        rows = max(1, AT_ONCE[weight.device.type] // K)
        parts = zip(weight.split(rows), codes.split(rows), scale.split(rows))
        for weight_part, codes_part, scale_part in parts:
            steps = scale_part.view(len(scale_part), -1)  # [rows, K/G], or [rows, 1]
            groups = weight_part.float().unflatten(1, (steps.shape[1], -1))  # [rows, K/G, G]
            codes_part.copy_(cls.encode_groups(groups, steps).flatten(1))
        return codes, scale

    encode_groups: ClassVar[Callable[[Tensor, Tensor], Tensor]]  # writes the second, their scales

    @classmethod
    def round(cls, weight: Tensor, group_size: int = 128) -> Any:
        """Round a weight, [N, K] float, and lay it out on its device."""
        return pack(cls.format, *cls.encode(weight, group_size))


class Int8(Encoder):
    """Codes -127 .. 127 of a byte each, and a bf16 scale per output and group of inputs.

    Groups of 64 have a third of the error of whole outputs in a model with outlying weights
    (SmolLM2-135M: KL 0.0017 and 0.0040), and the fc of a head trained here has weights 30 times as
    large for the embedding as for the feature. CUDA's matmul takes one fp32 scale per output.
    """

    format = "int8"

    @staticmethod
    def encode_groups(groups: Tensor, steps: Tensor) -> Tensor:
        steps.copy_(groups.abs().amax(-1).clamp(min=1e-30) / 127)
        return (groups / steps.float()[..., None]).round_().clamp_(-127, 127)


class Int4(Encoder):
    """Codes -8 .. 7, and a bf16 scale per output and group of inputs.

    A scale may be negative, so that the larger extreme can be code -8, as in llama.cpp's Q4_0.
    """

    format = "int4"

    @staticmethod
    def encode_groups(groups: Tensor, steps: Tensor) -> Tensor:
        # rounds to bf16; the codes are made for the rounded scale
        steps.copy_(search_scale(groups).squeeze(-1))
        return round_int4(groups, steps.float()[..., None], torch.empty_like(groups))


FORMATS: dict[str, type[Encoder]] = {kind.format: kind for kind in (Int8, Int4)}


def round_int4(groups: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Round numbers to codes of 4 bits. Writes, returns: out."""
    return torch.div(groups, scale, out=out).round_().clamp_(-8, 7)


def search_scale(groups: Tensor, importance: Tensor | None = None) -> Tensor:
    """Search a scale for each group with a small squared error, as AWQ and HQQ do.

    Each share in SEARCH gives a scale, and that gives codes q of the group w. The best scale for
    these codes is w.q / q.q, with the squared error w.w - (w.q)^2 / q.q.

    groups: [N, K/G, G] fp32; importance: [G] fp32, of the squared errors; None: all the same
    Returns: [N, K/G, 1] fp32, never 0.
    """
    low, high = groups.aminmax(dim=-1, keepdim=True)
    extreme = torch.where(-low > high, low, high)  # goes to code -8
    extreme = torch.where(extreme.abs() < 1e-30, 1e-30, extreme)
    best = extreme / -8
    most_explained = torch.zeros_like(low)
    codes = torch.empty_like(groups)
    for share in SEARCH:
        round_int4(groups, extreme * (share / -8), codes)
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


@dataclass(frozen=True)
class Quantization:
    """The format of quantized weights, from `--quant` or a checkpoint's config.json."""

    format: str  # of `FORMATS`, or one that only files have
    # inputs that share a scale; 0: `fit_group` chooses it for int4, all inputs for int8
    group_size: int = 0
    saved: bool = False  # the files hold codes already, which files/ reads
    every_type: bool = False  # of BLOCKS on CUDA: not only those types that are fast there

    @property
    def is_blocks(self) -> bool:
        """Return whether weights stay in the blocks of a GGUF file."""
        return self.format == BLOCKS

    @staticmethod
    def of(format: str, group_size: int) -> Quantization | None:
        """Return the value of `--quant` or `quant_draft`; None for `none`."""
        if format == "none":
            return None
        return Quantization(format, group_size if format == "int4" else 0)


def in_groups(quant: Quantization, inputs: Collection[int]) -> Quantization:
    """Return int8 in the largest groups that divide the inputs of all weights, if any do.

    Other formats, and groups that are given, are returned as they are.
    """
    if quant.format != "int8" or quant.group_size:
        return quant
    return replace(quant, group_size=max(_fitting(inputs), default=0))


def _fitting(inputs: Collection[int]) -> list[int]:
    return [size for size in GROUPS if not any(n % size for n in inputs)]


def fit_group(quant: Quantization, inputs: dict[str, int]) -> Quantization:
    """Choose 64, or 32 where 64 does not divide the inputs of every weight, if none is given.

    inputs: weight -> its number of inputs
    Raises: ValueError for a weight that does not fit the format.
    """
    fits = _fitting(inputs.values())
    group = quant.group_size
    if quant.format == "int4":
        group = group or min(fits[-1] if fits else GROUPS[0], OPEN_GROUP)
    remedy = f"group_size={fits[-1]}" if fits else "--quant int8"
    for weight, n in inputs.items():
        fault = f"{quant.format} group size {group} does not divide in_features {n} of {weight}"
        require(not group or n % group == 0, f"{fault}; use {remedy}")
        fault = f"{quant.format} needs in_features in multiples of 4; {weight} has {n}"
        require(n % 4 == 0, fault)
    return replace(quant, group_size=group)


# ---------------------------------------------------------------------- the layer


class Linear(nn.Module):
    """Rows times a weight, x W^T, plus a bias; with experts each row times its own expert's.

    It is made with a float weight, so that it can be trained, loaded and split by its name; `pack`
    puts a packed one of any format in its place.
    """

    backend: Backend = TORCH  # as the model's

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        experts: int = 0,
        fp32_out: bool = False,
        device: str | torch.device | None = None,
    ):
        """Make a layer with a random float weight.

        experts: of a stack of weights; 0: one; fp32_out: outputs are never rounded (LM heads)
        """
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.experts = experts
        self.fp32_out = fp32_out
        shape = (experts, out_features, in_features) if experts else (out_features, in_features)
        self.weight = nn.Parameter(torch.empty(*shape, device=device))
        self.bias = nn.Parameter(torch.empty(shape[:-1], device=device)) if bias else None
        self.packed: Any = None  # the record in place of `weight`, without its tensors
        if not experts:  # which are loaded, or set
            nn.Linear.reset_parameters(self)

    def pack(self, weight: Any) -> Linear:
        """Put a packed weight in the place of the float one. Writes: the layer. Returns: it."""
        assert (weight.inputs, weight.outputs) == (self.in_features, self.out_features), weight
        assert weight.experts == self.experts, (weight.experts, self.experts)
        self.weight = None
        self.packed = hold(self, weight)
        return self

    @property
    def record(self) -> Any:
        """The packed weight."""
        assert self.packed is not None, "the weight is float"
        return held(self, self.packed)

    @property
    def format(self) -> str:
        """The format of the weight: "none", a key of `FORMATS`, or "blocks"."""
        return self.packed.format if self.packed else "none"

    @property
    def group_size(self) -> int:
        """The inputs that share a scale; 0: all, or a GGUF file's own."""
        return self.record.group_size if self.packed else 0

    def forward(self, x: Tensor, routing: Tensor | None = None) -> Tensor:
        """Multiply rows, [..., K] -> [..., N]; with experts [P, K]. routing: `Backend.route`'s"""
        if routing is not None:
            if self.packed:
                y = self.backend.experts_matmul(x, self.record, routing)
            else:
                y = self.backend.experts_linear(x, self.weight, routing)
            return y if self.bias is None else self.backend.experts_bias(y, self.bias, routing)
        if self.packed:
            return self.backend.matmul(x, self.record, self.bias, self.fp32_out)
        return self.backend.linear(x, self.weight, self.bias, self.fp32_out)

    def dequantize(self) -> Tensor:
        """Return the numbers of the weight, [N, K] or [E, N, K]; of a packed one in fp32."""
        return self.record.numbers() if self.packed else self.weight


def hold(module: nn.Module, weight: Any) -> Any:
    """Make the tensors of a packed weight buffers of a module. Returns: the weight without them."""
    tensors = [name for name in weight._fields if isinstance(getattr(weight, name), Tensor)]
    for name in tensors:
        module.register_buffer(name, getattr(weight, name))
    return type(weight)(*[None if isinstance(value, Tensor) else value for value in weight])


def held(module: nn.Module, weight: Any) -> Any:
    """Return a packed weight with the tensors that `hold` took from it."""
    fields = zip(weight._fields, weight)
    return type(weight)(*[module._buffers.get(name, value) for name, value in fields])


# ---------------------------------------------------------------------- open


def read_json(path: Path) -> dict:
    """Read one JSON object. Raises: ValueError with the path when it is missing or broken."""
    fault = f"{path.parent} has no {path.name}; a Hugging Face model directory is expected"
    require(path.is_file(), fault)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {one_line(error, 200)}; correct it") from None
    require(isinstance(value, dict), f"{path} must hold a JSON object; correct it")
    return value


@contextmanager
def errors_of(file: Path) -> Iterator[None]:
    """Turn an error of safetensors into one ValueError with the file's name."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {one_line(error, 300)}; replace it") from None


class TensorSource:
    """Tensors by name, and their config.json."""

    path: Path  # the origin of the tensors, for error messages
    config: dict  # the content of config.json
    readers: dict[str, Callable[[], Tensor]]  # every tensor's name, and a function that reads it
    # weights quantized by another library, which have no reader, and functions that unpack them
    quantized: Mapping[str, Callable[[], Any]] = MappingProxyType({})
    loader: type[Loader] | None = None  # in place of the usual one

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read one tensor. dtype: what the caller rounds it to; a source may do that already

        Raises: ValueError when it is missing, or a weight is a single number.
        """
        fault = f"{self.path}: the weight {name} is missing; download it again"
        require(name in self.readers, fault)
        tensor = self.readers[name]()
        fault = f"{self.path}: {name} is a single number; use a model's own weights"
        require(tensor.dim() > 0 or not name.endswith(".weight"), fault)
        return tensor


class WeightFiles(TensorSource):
    """The tensors of a directory in safetensors, single or sharded, in memory-mapped files."""

    errors = staticmethod(errors_of)

    def __init__(self, path: Path):
        """Open the files. Raises: ValueError when some are missing, or a file is corrupt."""
        self.path = path
        self.config = self.read_config()
        self.readers = {}
        for file in self.shards():
            self.open_file(file)

    def read_config(self) -> dict:
        """Return the content of config.json."""
        return read_json(self.path / "config.json")

    def shards(self) -> list[Path]:
        """Return the files with tensors: one, or those that an index names."""
        names = ["model.safetensors"]
        index = self.path / "model.safetensors.index.json"
        if index.is_file() and not (self.path / names[0]).is_file():
            names = sorted(set(read_json(index)["weight_map"].values()))
        return [self.path / name for name in names]

    def open_file(self, file: Path) -> None:
        """Open a file. Raises: ValueError where it cannot be read. Writes: readers."""
        require(file.is_file(), f"{self.path} has no {file.name}; add the weights")
        with self.errors(file):
            handle = safe_open(file, framework="pt")
            names = list(handle.keys())
        self.readers |= {name: partial(self._read, handle, file, name) for name in names}

    def _read(self, handle: Any, file: Path, name: str) -> Tensor:
        with self.errors(file):
            return handle.get_tensor(name)  # whose memory is the file's until it is copied


# ---------------------------------------------------------------------- into a model


class Storage(NamedTuple):
    """The dtype, device and format of weights in memory."""

    dtype: torch.dtype
    device: str = "cpu"
    quant: Quantization | None = None  # of the weights of linear layers


def load_weights(
    model: nn.Module,
    files: TensorSource,
    names: dict[str, tuple[str, ...]],
    storage: Storage,
    ignored: Callable[[str], bool] = lambda name: False,
) -> Quantization | None:
    """Fill a model made on the meta device, one parameter at a time.

    names: our parameter -> the tensors that it is made of
    ignored: returns whether a further tensor in the files may stay unused
    Returns: `storage.quant` with the group size that was used.
    Raises: ValueError that names every missing, unexpected or mis-shaped weight.
    Writes: the parameters; with `storage.quant`, linear layers hold packed weights. At most one
    parameter exists twice at any moment.
    """
    kind = files.loader or part_or("reader", "loader", Loader)
    return kind(files, storage).load(model, names, ignored)


class Loader:
    """The way of weights from files into a model."""

    remedy = "does config.json fit?"  # where tensors are missing or unexpected

    def __init__(self, files: TensorSource, storage: Storage):
        self.files = files
        self.storage = storage

    def load(
        self, model: nn.Module, names: dict[str, tuple[str, ...]], ignored: Callable[[str], bool]
    ) -> Quantization | None:
        """Do as `load_weights`."""
        params = dict(model.named_parameters())
        assert set(names) == set(params), set(names) ^ set(params)
        packed: set[str] = set()
        if self.storage.quant is not None:
            packed = self.choose_packed(model, names) & set(names)
            self.choose_group({name: params[name].shape[-1] for name in names if name in packed})
        self.check_names(self.wanted(names, packed), ignored)
        self.fill(model, names, packed)
        return self.storage.quant

    def choose_packed(self, model: nn.Module, names: dict[str, tuple[str, ...]]) -> set[str]:
        """Return the names of the weights that are to be in codes."""
        return linear_weights(model)

    def choose_group(self, inputs: dict[str, int]) -> None:
        """Choose the inputs that share a scale. inputs: by the weight. Writes: storage."""
        quant = self.storage.quant
        if self.storage.device == "cpu":
            quant = in_groups(quant, inputs.values())
        self.storage = Storage(*self.storage[:2], fit_group(quant, inputs))

    def wanted(self, names: dict[str, tuple[str, ...]], packed: set[str]) -> set[str]:
        """Return the names of all tensors that are needed."""
        return {theirs for parts in names.values() for theirs in parts}

    def check_names(self, wanted: set[str], ignored: Callable[[str], bool]) -> None:
        """Check the names of the tensors. Raises: ValueError for missing and unexpected ones."""
        held = {*self.files.readers, *self.files.quantized}
        unexpected = [name for name in held - wanted if not ignored(name)]
        for fault, names in (("missing", wanted - held), ("unexpected", unexpected)):
            listed = f"{len(names)} {fault} weight(s): {some(sorted(names))}"
            require(not names, f"{self.files.path}: {listed}; {self.remedy}")

    def fill(self, model: nn.Module, names: dict[str, tuple[str, ...]], packed: set[str]) -> None:
        """Place all parameters. packed: the weights in codes. Writes: the model."""
        for ours, theirs in names.items():
            self.place(model, ours, theirs, ours in packed)

    def place(self, model: nn.Module, ours: str, theirs: tuple[str, ...], packed: bool) -> None:
        """Place a parameter. Writes: the model."""
        owner, _, leaf = ours.rpartition(".")
        module = model.get_submodule(owner)
        shape = getattr(module, leaf).shape
        if packed:
            module.pack(self.packed(theirs, shape))
            return
        value = self.parameter(theirs, shape, self.dtype_of(module, leaf))
        setattr(module, leaf, nn.Parameter(value, requires_grad=False))

    def dtype_of(self, module: nn.Module, leaf: str) -> torch.dtype:
        """Return the dtype of a parameter that stays float."""
        return self.storage.dtype

    def parameter(self, names: tuple[str, ...], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a parameter that stays float: [N], [N, K], or of experts, [E, N] or [E, N, K]."""
        is_stack = len(shape) == 3 or (len(shape) == 2 and names[0].endswith(".bias"))
        if not is_stack or len(names) < shape[0]:  # any other shape, where one tensor holds it
            return self.join(names, shape, dtype)
        parts = [self.join(part, shape[1:], dtype) for part in by_expert(names, shape[0])]
        return torch.stack(parts)

    def packed(self, names: tuple[str, ...], shape: torch.Size) -> Any:
        """Return a weight, or a stack of them, in the layout of its format and device."""
        if len(shape) == 2:
            return self.pack(names, shape)
        parts = by_expert(names, shape[0])
        return stack((self.pack(part, shape[1:]) for part in parts), shape[0])

    def pack(self, names: tuple[str, ...], shape: torch.Size) -> Any:
        """Return one weight, packed."""
        return pack(self.storage.quant.format, *self.codes(names, shape))

    def codes(self, names: tuple[str, ...], shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Return codes and scales of a weight, which is rounded."""
        weight = self.join(names, shape, None)  # in the files' own dtype
        check_finite(weight, " + ".join(names), self.files.path)
        return FORMATS[self.storage.quant.format].encode(weight, self.storage.quant.group_size)

    def join(self, names: tuple[str, ...], shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
        """Read tensors, one below the other, to the device. dtype: None keeps the files' own"""
        return self.below([self.files.read(name, dtype) for name in names], names, shape, dtype)

    def below(
        self,
        parts: Sequence[Tensor],
        names: tuple[str, ...],
        shape: torch.Size,
        dtype: torch.dtype | None,
    ) -> Tensor:
        """Put parts one below the other, on the device. Raises: ValueError for another shape."""
        self.check_shape([tuple(part.shape) for part in parts], names, shape)
        value = torch.empty(shape, dtype=dtype or parts[0].dtype, device=self.storage.device)
        for target, part in zip(value.split([part.shape[0] for part in parts]), parts):
            target.copy_(part)
        return value

    def check_shape(
        self, parts: Sequence[tuple[int, ...]], names: tuple[str, ...], shape: torch.Size
    ) -> None:
        """Check that parts, one below the other, have a shape. Raises: ValueError otherwise."""
        rows = sum(part[0] for part in parts if part)
        fits = rows == shape[0] and all(part[1:] == tuple(shape[1:]) for part in parts)
        got = " + ".join(str(list(part)) for part in parts)
        require(
            fits,
            f"{self.files.path}: {' + '.join(names)} has shape {got}, but its config asks for "
            f"{list(shape)} in all; use the config made for these weights",
        )


def linear_weights(model: nn.Module) -> set[str]:
    """Return the names of the weights of linear layers."""
    layers = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    return {f"{name}.weight" for name in layers}


def by_expert(names: tuple[str, ...], experts: int) -> Iterator[tuple[str, ...]]:
    """Yield the names of each expert's tensors, expert by expert."""
    each = len(names) // experts
    for first in range(0, len(names), each):
        yield names[first : first + each]


def some(names: list[str], most: int = 4) -> str:
    """Return the first of some names, and the number of the others."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
