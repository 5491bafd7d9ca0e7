"""Read `quantization_config` of checkpoints that others quantized, as one record for every method.

`read_stored_format` reads it. It refuses unsupported methods, formats and options by name.

Sources: compressed-tensors 0.20, GPTQModel 7.7, AutoAWQ 0.2.9, transformers 5.23.
Not here: the weights (files/gptq_awq.py). Activations are rounded as our own formats do it,
whatever the files say; the scales of activations and of KV caches are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from files.checkpoint import METHOD, foreign_quantization
from files.fields import FLAG, OBJECT, TEXT, NotSupported, Rule, integer, key, naming, read_fields
from quantize import GROUPS

GROUP = integer(-1, 2**20)
BLOCK = Rule(
    "two whole numbers from 1 on",
    lambda v: type(v) is list and len(v) == 2 and all(integer(1, 2**20).holds(size) for size in v),
)


@dataclass(frozen=True)
class StoredFormat:
    """The format of the quantized weights in the files."""

    method: str  # as config.json has it
    layout: str  # a key of LAYOUTS (gptq_awq.py)
    format: str  # int4, int8 or fp8
    group_size: int = 0  # inputs that share a scale; 0: one scale per output, or as `block` says
    symmetric: bool = True  # codes mean themselves; else a zero point is subtracted
    block: tuple[int, int] | None = None  # of FP8: outputs and inputs that share a scale
    less_one: bool = False  # stored zero points are one too small

    def as_ours(self) -> dict:
        """Return `quantization_config` of the layers made of these weights.

        They have the file's groups or parts of them.
        """
        config = {"quant_method": METHOD, "format": "int4" if self.format == "int4" else "int8"}
        fits = [size for size in GROUPS if self.group_size and self.group_size % size == 0]
        if fits:
            config["group_size"] = fits[-1]
        return config


@dataclass(frozen=True)
class MethodKey:
    """The key that all methods have."""

    quant_method: str = key(TEXT)


@dataclass(frozen=True)
class Gptq:
    """The keys of GPTQ that are read."""

    bits: int = key(integer(1, 64))
    group_size: int = key(GROUP)
    sym: bool = key(FLAG, False)  # missing: by the stored zero points
    checkpoint_format: str = key(TEXT, "")
    format: str = key(TEXT, "")  # another name of it
    is_marlin_format: bool = key(FLAG, False)
    pack_dtype: str = key(TEXT, "int32")
    rotation: str = key(TEXT, "")
    # pattern -> the differences in the layers that it names; "-:" none
    dynamic: dict | None = key(OBJECT, None)


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
    """Raises: NotSupported where the rule does not hold."""
    if not holds:
        raise NotSupported(rule)


def _group(size: int) -> int:
    """Return a stored group size as `StoredFormat` has it.

    Raises: NotSupported for one that no group of ours divides.
    """
    rule = "a group size must be a multiple of 32, or -1, a scale per output"
    _refuse(size == -1 or size > 0 and size % GROUPS[0] == 0, f"{rule}; it is {size}")
    return max(size, 0)


def _agreed(first: tuple[str, str], second: tuple[str, str], default: str) -> str:
    """Return the value of two keys of one meaning, in lower case.

    first, second: name and value; "": not given
    """
    first_name, first_value = first
    second_name, second_value = second
    if first_value and second_value:
        _refuse(
            first_value.lower() == second_value.lower(),
            f"{first_name} and {second_name} must be equal; "
            f"they are {first_value} and {second_value}",
        )
    return (first_value or second_value or default).lower()


def _gptq(raw: dict) -> StoredFormat:
    hf = read_fields(raw, Gptq)
    form = _agreed(("checkpoint_format", hf.checkpoint_format), ("format", hf.format), "gptq")
    _refuse(hf.bits in (4, 8), f"GPTQ is supported with 4 and 8 bits; it has {hf.bits}")
    forms = ("gptq", "gptq_v2")
    _refuse(form in forms, f"checkpoint_format, or format, must be one of {forms}; it is {form}")
    _refuse(
        not hf.is_marlin_format,
        "GPTQ in Marlin's layout (is_marlin_format: true) is not supported",
    )
    _refuse(hf.pack_dtype == "int32", f"pack_dtype must be int32; it is {hf.pack_dtype}")
    _refuse(not hf.rotation, f"GPTQ with a rotation ({hf.rotation}) is not supported")
    other = next((pattern for pattern in hf.dynamic or {} if not pattern.startswith("-:")), None)
    _refuse(other is None, f"layers in several formats are not supported; `dynamic` has {other}")
    return StoredFormat(
        method="gptq",
        layout="gptq",
        format=f"int{hf.bits}",
        group_size=_group(hf.group_size),
        symmetric=hf.sym,
        less_one=form == "gptq",
    )


def _awq(raw: dict) -> StoredFormat:
    hf = read_fields(raw, Awq)
    bits = hf.bits or hf.w_bit
    group_size = hf.group_size
    if group_size is None:
        group_size = hf.q_group_size
    _refuse(bits == 4, f"AWQ is supported with 4 bits; it has {bits}")
    version = _agreed(("version", hf.version), ("format", hf.format), "gemm")
    _refuse(version == "gemm", f"AWQ must be of the version gemm; it is {version}")
    return StoredFormat(
        method="awq",
        layout="awq",
        format="int4",
        group_size=_group(group_size),
        symmetric=not hf.zero_point,
    )


def _fp8(raw: dict) -> StoredFormat:
    hf = read_fields(raw, Fp8)
    _refuse(hf.fmt == "e4m3", f"FP8 must be of the form e4m3; it is {hf.fmt}")
    _refuse(hf.scale_fmt == "float", f"scale_fmt must be float; it is {hf.scale_fmt}")
    block = None
    if hf.weight_block_size:
        block = tuple(hf.weight_block_size)
    return StoredFormat(method="fp8", layout="fp8", format="fp8", block=block)


def _compressed(raw: dict) -> StoredFormat:
    hf = read_fields(raw, Compressed)
    for name, inner_name in (("sparsity_config", "format"), ("transform_config", "config_groups")):
        value = (getattr(hf, name) or {}).get(inner_name)
        _refuse(
            value in (None, {}, "dense"),
            f"{name} with {inner_name} {str(value)[:40]} is not supported",
        )
    schemes = []
    for group in hf.config_groups.values():
        schemes.append(read_fields(group if isinstance(group, dict) else {}, Scheme))
    stored = []
    for scheme in schemes:
        stored.append((scheme.format or hf.format, read_fields(scheme.weights, Weights)))
    is_one = bool(stored) and all(each == stored[0] for each in stored)
    _refuse(is_one, f"config_groups must be one scheme; it holds {len(stored)}")
    packing, weights = stored[0]
    bits = f"{weights.type} with {weights.num_bits} bits"
    formats = COMPRESSED.get(packing)
    _refuse(formats is not None, f"format must be one of {', '.join(COMPRESSED)}; it is {packing}")
    _refuse(bits in formats, f"{packing} is supported as {' or '.join(formats)}; it is {bits}")
    format = formats[bits]
    strategy = weights.strategy or _default_strategy(weights.group_size)
    allowed = STRATEGIES[format]
    _refuse(
        strategy in allowed, f"the strategy of {bits} must be one of {allowed}; it is {strategy}"
    )
    has_zeros = format == "int4" or packing == "pack-quantized"
    _refuse(weights.symmetric or has_zeros, f"{bits} must be symmetric")
    block = None
    if strategy == "block":
        if weights.block_structure is None:
            raise ValueError("the key 'block_structure' is missing")
        block = tuple(weights.block_structure)
    group_size = 0
    if strategy == "group":
        if weights.group_size is None:
            raise ValueError("the key 'group_size' is missing")
        group_size = _group(weights.group_size)
    layout = "plain"
    if packing == "pack-quantized":
        layout = "packed"
    return StoredFormat(
        method="compressed-tensors",
        layout=layout,
        format=format,
        group_size=group_size,
        symmetric=weights.symmetric,
        block=block,
    )


def _default_strategy(group_size: int | None) -> str:
    """Return the strategy where config.json has none."""
    if group_size is None:
        return "tensor"
    if group_size == -1:
        return "channel"
    return "group"


COMPRESSED = {  # format of compressed-tensors -> its content -> our name for that
    "pack-quantized": {"int with 4 bits": "int4", "int with 8 bits": "int8"},
    "int-quantized": {"int with 8 bits": "int8"},
    "float-quantized": {"float with 8 bits": "fp8"},
    "naive-quantized": {"float with 8 bits": "fp8", "int with 8 bits": "int8"},
}
STRATEGIES = {  # of compressed-tensors, by our name of the format
    "int4": ("group", "channel"),
    "int8": ("group", "channel", "tensor"),
    "fp8": ("channel", "tensor", "block"),
}
METHODS: dict[str, Callable[[dict], StoredFormat]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
}


def read_stored_format(raw: dict, path: Path) -> StoredFormat:
    """Read the format of the quantized weights from the config.json of a checkpoint in `path`.

    Raises: ValueError that names the key that is missing, wrong or not supported.
    """
    with naming(path / "config.json"):
        quantization = foreign_quantization(raw)
        if not isinstance(quantization, dict):
            raise ValueError(
                f"quantization_config must be an object; it is {str(quantization)[:40]}"
            )
        is_bitsandbytes = quantization.get("load_in_4bit") or quantization.get("load_in_8bit")
        if quantization.get("quant_method") is None and is_bitsandbytes:
            # its older files leave the name out
            quantization = quantization | {"quant_method": "bitsandbytes"}
        method = read_fields(quantization, MethodKey).quant_method
        rule = f"checkpoints quantized with {method} are not supported, only {', '.join(METHODS)}"
        _refuse(method in METHODS, rule)
        return METHODS[method](quantization)


def as_ours(raw: dict, path: Path) -> dict:
    """Return a config.json with the `quantization_config` that the weights have here.

    Raises: as `read_stored_format`.
    """
    return raw | {"quantization_config": read_stored_format(raw, path).as_ours()}
