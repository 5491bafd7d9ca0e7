"""Read `quantization_config` of checkpoints that others quantized, as one record for every method.

`read_stored_format` reads it. It refuses unsupported methods, formats and options by name.

Sources: compressed-tensors 0.20, GPTQModel 7.7, AutoAWQ 0.2.9, transformers 5.23.
Not here: the weights (files/gptq_awq.py). Activations are rounded as our own formats do it,
whatever the files say; the scales of activations and of KV caches are not read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from files.checkpoint import quantization_in
from files.fields import FLAG, OBJECT, TEXT, NotSupported, Rule, integer, key, naming, read_fields
from options import require
from quantize import GROUPS, Quantization


def one_of(*values: Any) -> Rule:
    """Return the rule for one of some values; texts in any case."""
    holds = {str(value).lower() for value in values}
    named = " or ".join(map(str, values)) or "left out"
    return Rule(named, lambda v: str(v).lower() in holds)


GROUP = Rule(
    "a multiple of 32, or -1, a scale per output",
    lambda v: type(v) is int and (v == -1 or v > 0 and v % GROUPS[0] == 0),
)
BLOCK = Rule(
    "two whole numbers from 1 on",
    lambda v: type(v) is list and len(v) == 2 and all(integer(1, 2**20).holds(size) for size in v),
)
DYNAMIC = Rule(
    "left out, as layers in several formats are not supported",
    lambda v: type(v) is dict and all(pattern.startswith("-:") for pattern in v),
)
DENSE = Rule(
    "left out, or of the format dense",
    lambda v: type(v) is dict and v.get("format") in (None, "dense"),
)
NO_GROUPS = Rule("left out", lambda v: type(v) is dict and not v.get("config_groups"))


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
    is_ours: bool = False  # files/rounding.py wrote it

    @property
    def keeps_groups(self) -> bool:
        """Return whether int8 needs groups of inputs; ours may have a scale per output as well."""
        return (
            self.format == "int8"
            and not self.is_ours
            and (self.group_size > 0 or not self.symmetric)
        )

    @property
    def quantization(self) -> Quantization:
        """The format of the layers made of these weights: the file's groups, or parts of them."""
        fits = [size for size in GROUPS if self.group_size and self.group_size % size == 0]
        format = "int4" if self.format == "int4" else "int8"
        return Quantization(format, fits[-1] if fits else 0, saved=True)


@dataclass(frozen=True)
class MethodKey:
    """The key that all methods have."""

    quant_method: str = key(TEXT)


@dataclass(frozen=True)
class Gptq:
    """The keys of GPTQ that are read, with the values that are supported."""

    bits: int = key(one_of(4, 8))
    group_size: int = key(GROUP)
    sym: bool = key(FLAG, False)  # missing: by the stored zero points
    checkpoint_format: str = key(one_of("gptq", "gptq_v2"), "")
    format: str = key(one_of("gptq", "gptq_v2"), "")  # another name of it
    is_marlin_format: bool = key(one_of(False), False)
    pack_dtype: str = key(one_of("int32"), "int32")
    rotation: str = key(one_of(""), "")
    # pattern -> the differences in the layers that it names; "-:" none
    dynamic: dict | None = key(DYNAMIC, None)

    def stored(self) -> StoredFormat:
        """Return the format."""
        form = self.checkpoint_format or self.format or "gptq"
        if (self.format or form).lower() != form.lower():
            both = f"they are {self.checkpoint_format} and {self.format}"
            raise NotSupported(f"checkpoint_format and format must be equal; {both}")
        return StoredFormat(
            method="gptq",
            layout="gptq",
            format=f"int{self.bits}",
            group_size=max(self.group_size, 0),
            symmetric=self.sym,
            less_one=form.lower() == "gptq",
        )


@dataclass(frozen=True)
class Awq:
    """The keys of AWQ that are read; the second names are those of older files."""

    bits: int = key(one_of(4), 4)
    w_bit: int = key(one_of(4), 4)
    group_size: int | None = key(GROUP, None)
    q_group_size: int = key(GROUP, 128)
    zero_point: bool = key(FLAG, True)
    version: str = key(one_of("gemm"), "gemm")
    format: str = key(one_of("gemm"), "gemm")

    def stored(self) -> StoredFormat:
        """Return the format."""
        size = self.q_group_size if self.group_size is None else self.group_size
        return StoredFormat(
            method="awq",
            layout="awq",
            format="int4",
            group_size=max(size, 0),
            symmetric=not self.zero_point,
        )


@dataclass(frozen=True)
class Fp8:
    """The keys of `quant_method` fp8 that are read."""

    fmt: str = key(one_of("e4m3"), "e4m3")
    scale_fmt: str = key(one_of("float"), "float")
    weight_block_size: list | None = key(BLOCK, None)

    def stored(self) -> StoredFormat:
        """Return the format."""
        block = tuple(self.weight_block_size) if self.weight_block_size else None
        return StoredFormat(method="fp8", layout="fp8", format="fp8", block=block)


# format of compressed-tensors, kind of number and bits -> our layout and format
COMPRESSED = {
    ("pack-quantized", "int", 4): ("packed", "int4"),
    ("pack-quantized", "int", 8): ("packed", "int8"),
    ("int-quantized", "int", 8): ("plain", "int8"),
    ("naive-quantized", "int", 8): ("plain", "int8"),
    ("naive-quantized", "float", 8): ("plain", "fp8"),
    ("float-quantized", "float", 8): ("plain", "fp8"),
}
STRATEGIES = {  # of compressed-tensors, by our name of the format
    "int4": ("group", "channel"),
    "int8": ("group", "channel", "tensor"),
    "fp8": ("channel", "tensor", "block"),
}


@dataclass(frozen=True)
class Weights:
    """The keys of `weights` in a scheme of compressed-tensors."""

    num_bits: int = key(integer(1, 64), 8)
    type: str = key(TEXT, "int")
    symmetric: bool = key(FLAG, True)
    strategy: str = key(TEXT, "")
    group_size: int | None = key(GROUP, None)
    block_structure: list | None = key(BLOCK, None)

    @property
    def kind(self) -> str:
        """The strategy, also where config.json has none."""
        by_size = {None: "tensor", -1: "channel"}.get(self.group_size, "group")
        return self.strategy or by_size

    def stored(self, packing: str) -> StoredFormat:
        """Return the format. packing: the format of compressed-tensors"""
        found = f"{packing} of {self.type} with {self.num_bits} bits"
        if (packing, self.type, self.num_bits) not in COMPRESSED:
            known = ", ".join(f"{p} of {t} with {b} bits" for p, t, b in COMPRESSED)
            raise NotSupported(f"format must be one of {known}; it is {found}")
        layout, format = COMPRESSED[packing, self.type, self.num_bits]
        if self.kind not in STRATEGIES[format]:
            allowed = " or ".join(STRATEGIES[format])
            raise NotSupported(f"the strategy of {found} must be {allowed}; it is {self.kind}")
        if not self.symmetric and layout != "packed":
            raise NotSupported(f"{found} must be symmetric")
        needed = {"group": "group_size", "block": "block_structure"}.get(self.kind)
        if needed and getattr(self, needed) is None:
            raise ValueError(f"the key {needed!r} is missing")
        return StoredFormat(
            method="compressed-tensors",
            layout=layout,
            format=format,
            group_size=max(self.group_size, 0) if self.kind == "group" else 0,
            symmetric=self.symmetric,
            block=tuple(self.block_structure) if self.kind == "block" else None,
        )


@dataclass(frozen=True)
class Scheme:
    """The keys of one of its groups of layers."""

    weights: dict = key(OBJECT)
    format: str = key(TEXT, "")


@dataclass(frozen=True)
class Compressed:
    """The keys of compressed-tensors that are read."""

    format: str = key(TEXT)
    config_groups: dict = key(OBJECT)
    sparsity_config: dict | None = key(DENSE, None)
    transform_config: dict | None = key(NO_GROUPS, None)
    producer: str = key(TEXT, "")  # ours

    def stored(self) -> StoredFormat:
        """Return the format, the one of all groups of layers."""
        schemes = []
        for group in self.config_groups.values():
            scheme = read_fields(group if isinstance(group, dict) else {}, Scheme)
            schemes.append((scheme.format or self.format, read_fields(scheme.weights, Weights)))
        if not schemes or any(scheme != schemes[0] for scheme in schemes):
            raise NotSupported(f"config_groups must be one scheme; it holds {len(schemes)}")
        packing, weights = schemes[0]
        return replace(weights.stored(packing), is_ours=self.producer == PRODUCER)


PRODUCER = "gpt-eagle"  # a key of ours in what we write; in earlier releases the method
METHODS = {"gptq": Gptq, "awq": Awq, "compressed-tensors": Compressed, "fp8": Fp8}
BITS = {"int4": 4, "int8": 8}  # of the formats in directories that we write


def config_of(quant: Quantization) -> dict[str, Any]:
    """Return the `quantization_config` of the directories that we write."""
    weights = {
        "num_bits": BITS[quant.format],
        "type": "int",
        "symmetric": True,
        "strategy": "group" if quant.group_size else "channel",
        "group_size": quant.group_size or None,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "producer": PRODUCER,
    }


def read_stored_format(raw: dict, path: Path) -> StoredFormat:
    """Read the format of the quantized weights from the config.json of a checkpoint in `path`.

    Raises: ValueError that names the key that is missing, wrong or not supported.
    """
    quantization = quantization_in(raw)
    is_older = isinstance(quantization, dict) and quantization.get("quant_method") == PRODUCER
    fault = f"{path}: an earlier quantize.py wrote it, in a layout of its own"
    require(not is_older, f"{fault}; run quantize.py once more on the original")
    with naming(path / "config.json"):
        if not isinstance(quantization, dict):
            raise ValueError(
                f"quantization_config must be an object; it is {str(quantization)[:40]}"
            )
        is_bitsandbytes = quantization.get("load_in_4bit") or quantization.get("load_in_8bit")
        if quantization.get("quant_method") is None and is_bitsandbytes:
            # its older files leave the name out
            quantization = quantization | {"quant_method": "bitsandbytes"}
        method = read_fields(quantization, MethodKey).quant_method
        if method not in METHODS:
            known = ", ".join(METHODS)
            raise NotSupported(
                f"checkpoints quantized with {method} are not supported, only {known}"
            )
        try:
            return read_fields(quantization, METHODS[method]).stored()
        except ValueError as error:  # no correction of the file would help
            raise NotSupported(str(error)) from None
