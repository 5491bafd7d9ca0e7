"""Checkpoints as others quantize them: GPTQ, AWQ, compressed-tensors and FP8.

compressed-tensors writes its own files here, and its converters decode those of AWQ and of FP8 in blocks. GPTQ and AWQ
files are written here as GPTQModel 7.7 and AutoAWQ 0.2.9 lay them out: their packers, cut out of the sources, were
compared with these once by hand; as packages they are no requirement of the tests.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from run.options import DEMO

Parts = dict[str, Tensor]  # tensors by what they are called behind a layer's name


class Layout(NamedTuple):
    """A kind of file."""

    config: dict  # `quantization_config`
    # [N, K] fp32 -> the parts; the weight that they encode, [N, K] fp32
    write: Callable[[Tensor], tuple[Parts, Tensor]]


# ------------------------------------------------------------------------------------------ writers


def rounded(
    weight: Tensor, group: int, symmetric: bool, bits: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K] and zero points [N, K / G] in 0..15 or 255, and fp16 scales, by the extremes of a group."""
    groups = weight.unflatten(1, (-1, group))
    most = 2**bits - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = (groups.abs().amax(-1) / (most / 2) if symmetric else (high - low) / most).half()
    middle = torch.full_like(low, 2 ** (bits - 1))
    zero = middle if symmetric else (-low / scale.float()).round().clamp(0, most)
    codes = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, most)
    return codes.flatten(1).int(), scale, zero.int()


def decoded(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    groups = codes.float().unflatten(1, (scale.shape[1], -1))
    if zero is not None:
        groups = groups - zero.float()[..., None]
    return (groups * scale.float()[..., None]).flatten(1)


def pack(values: Tensor, order: tuple[int, ...] = tuple(range(8)), bits: int = 4) -> Tensor:
    """[R, C] in 0..15 -> [R, C / 8] int32; `order`: which of 8 columns is stored first. Of 8 bits: 4 a number."""
    each = 32 // bits
    packed = torch.zeros(len(values), values.shape[1] // each, dtype=torch.int64)
    for column in range(packed.shape[1]):
        for place, which in enumerate(order[:each]):
            packed[:, column] |= values[:, each * column + which].long() << bits * place
    return packed.to(torch.int32)  # wraps around


def gptq(
    weight: Tensor, group: int, symmetric: bool, version: int, bits: int
) -> tuple[Parts, Tensor]:
    """As GPTQModel 7.7 packs (pack_original), and for version 1 lessens (convert_gptq_v2_to_v1_format_module)."""
    inputs = weight.shape[1]
    codes, scale, zero = rounded(weight, group if group > 0 else inputs, symmetric, bits)
    ones = 0x11111111 if bits == 4 else 0x01010101
    qzeros = pack(zero.T, bits=bits) - (ones if version == 1 else 0)
    groups = torch.arange(inputs, dtype=torch.int32) // (inputs // scale.shape[1])
    parts = {
        "qweight": pack(codes, bits=bits).T, "qzeros": qzeros, "scales": scale.T, "g_idx": groups,
    }  # fmt: skip
    return parts, decoded(codes, scale, zero)


def awq(weight: Tensor, group: int) -> tuple[Parts, Tensor]:
    """As AutoAWQ 0.2.9 packs (WQLinear_GEMM.from_linear), decoded by compressed-tensors."""
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    codes, scale, zero = rounded(weight, group, False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    qweight, qzeros, scales = pack(codes.T, order), pack(zero.T, order), scale.T.contiguous()
    library = AutoAWQConverter(group_size=group)
    decoded_by_it = decoded(*library._convert_gemm_module(qweight, scales, qzeros))
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales}, decoded_by_it


def compressed(weight: Tensor, format: str, args: dict) -> tuple[Parts, Tensor]:
    """Written and decoded by compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    library = BaseCompressor.get_value_from_registry(format)
    if args["strategy"] == "tensor":
        low, high = weight.amin()[None], weight.amax()[None]
    elif args["strategy"] == "block":
        blocks = [rows.split(128, 1) for rows in weight.split(128)]
        low, high = (
            torch.tensor([[float(f(t)) for t in row] for row in blocks])
            for f in (torch.min, torch.max)
        )
    else:
        groups = weight.unflatten(1, (-1, args.get("group_size") or weight.shape[1]))
        low, high = groups.amin(-1), groups.amax(-1)
    scale, zero = calculate_qparams(low, high, scheme.weights)
    scale = scale.bfloat16()
    given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    parts = library.compress(given, scheme)
    wide = library.decompress(parts | {"weight_scale": scale.float()}, scheme)  # in fp32
    return parts, wide["weight"]


def fp8(weight: Tensor, block: int | None, dtype: torch.dtype) -> tuple[Parts, Tensor]:
    """As Qwen3's FP8 files are; None: AutoFP8's, with a scale per tensor. Blocks are decoded by compressed-tensors."""
    from compressed_tensors.entrypoints.convert.converters import fp8block_dequantizer

    if block is None:
        scale = weight.abs().amax() / 448
        parts = {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
        return parts | {"input_scale": torch.tensor(2.0)}, parts["weight"].float() * scale
    strips = [[t.abs().amax() / 448 for t in rows.split(block, 1)] for rows in weight.split(block)]
    scale = torch.tensor(strips).to(dtype)
    wide = scale.float().repeat_interleave(block, 0).repeat_interleave(block, 1)
    wide = wide[: len(weight), : weight.shape[1]]
    parts = {"weight": (weight / wide).to(torch.float8_e4m3fn), "weight_scale_inv": scale}
    library = fp8block_dequantizer.FP8BlockDequantizer([], [], (block, block), torch.float32)
    return parts, library._create_dequantized_weight(parts["weight"], scale)


def of_gptq(group: int, symmetric: bool = True, version: int = 1, bits: int = 4, **more) -> Layout:
    said = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric,
        "desc_act": False,
    }  # fmt: skip
    said["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
    write = partial(gptq, group=group, symmetric=symmetric, version=version, bits=bits)
    return Layout(said | more, write)


def of_awq(group: int, **more) -> Layout:
    said = {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True,
        "version": "gemm",
    }  # fmt: skip
    return Layout(said | {"modules_to_not_convert": None} | more, partial(awq, group=group))


def of_compressed(
    format: str, strategy: str, bits: int = 4, type: str = "int", symmetric: bool = True, **more
) -> Layout:
    args = {"num_bits": bits, "type": type, "symmetric": symmetric, "strategy": strategy, **more}
    group = {"targets": ["Linear"], "weights": args | {"actorder": None}, "input_activations": None}
    said = {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"]}
    said |= {"config_groups": {"group_0": group}, "kv_cache_scheme": None}
    return Layout(said, partial(compressed, format=format, args=args))


def of_fp8(block: int | None, dtype: torch.dtype = torch.bfloat16) -> Layout:
    said = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if block:
        said["weight_block_size"] = [block, block]
    return Layout(said, partial(fp8, block=block, dtype=dtype))


PACKED, FLOAT = "pack-quantized", "float-quantized"
LAYOUTS = {
    "gptq": of_gptq(128), "gptq-32": of_gptq(32), "gptq-256": of_gptq(256),
    "gptq-channel": of_gptq(-1), "gptq-v2": of_gptq(64, version=2),
    "gptq-zeros": of_gptq(64, symmetric=False),
    "gptq-v2-zeros": of_gptq(128, symmetric=False, version=2), "gptq-8": of_gptq(128, bits=8),
    "gptq-8-channel": of_gptq(-1, bits=8), "gptq-8-zeros": of_gptq(64, symmetric=False, bits=8),
    "gptq-8-v2-zeros": of_gptq(-1, symmetric=False, version=2, bits=8), "awq": of_awq(128),
    "awq-64": of_awq(64), "packed-32": of_compressed(PACKED, "group", group_size=32),
    "packed-64": of_compressed(PACKED, "group", group_size=64),
    "packed-128": of_compressed(PACKED, "group", group_size=128),
    "packed-channel": of_compressed(PACKED, "channel"),
    "packed-zeros": of_compressed(PACKED, "group", group_size=64, symmetric=False),
    "packed-channel-zeros": of_compressed(PACKED, "channel", symmetric=False),
    "packed-8": of_compressed(PACKED, "channel", 8),
    "packed-8-groups": of_compressed(PACKED, "group", 8, group_size=32),
    "packed-8-zeros": of_compressed(PACKED, "group", 8, group_size=64, symmetric=False),
    "int8": of_compressed("int-quantized", "channel", 8),
    "int8-groups": of_compressed("int-quantized", "group", 8, group_size=128),
    "float-tensor": of_compressed(FLOAT, "tensor", 8, "float"),
    "float-channel": of_compressed(FLOAT, "channel", 8, "float"),
    "float-block": of_compressed(FLOAT, "block", 8, "float", block_structure=[128, 128]),
    "fp8": of_fp8(128), "fp8-fp32": of_fp8(128, torch.float32), "fp8-tensor": of_fp8(None),
}  # fmt: skip
WHOLE = {  # one of each layout, of those that fit the golden models
    "gptq": of_gptq(32),
    "gptq-v2-zeros": of_gptq(-1, symmetric=False, version=2),
    "awq": of_awq(32),
    "packed": of_compressed(PACKED, "channel"),
    "packed-zeros": of_compressed(PACKED, "group", group_size=32, symmetric=False),
    "packed-8": of_compressed(PACKED, "channel", 8),
    "gptq-8": of_gptq(32, bits=8),
    "packed-8-zeros": of_compressed(PACKED, "group", 8, group_size=32, symmetric=False),
    "int8": of_compressed("int-quantized", "channel", 8),
    "float": of_compressed(FLOAT, "channel", 8, "float"),
    "fp8": of_fp8(128),
}


def write_model(
    folder: Path, layout: Layout, source: Path = Path(DEMO), keep: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Write a quantized copy of a float model. keep: parts of names of layers that stay as they are.

    Returns: the weights that the library decodes, by name.
    """
    folder.mkdir(exist_ok=True)
    tensors, weights = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        stays = any(part in layer for part in keep)
        if layer.endswith(("_proj", ".w1", ".w2", ".w3")) and not stays:
            parts, weights[name] = layout.write(tensor.float())
            tensors |= {f"{layer}.{part}": value.contiguous() for part, value in parts.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    shutil.copyfile(source / "config.json", folder / "config.json")
    change_config(folder, quantization_config=layout.config)
    return weights


def change_config(folder: Path, **changes) -> dict:
    """Change keys of config.json; None leaves one out. Returns: what the file says then."""
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | changes
    raw = {name: value for name, value in raw.items() if value is not None}
    file.write_text(json.dumps(raw))
    return raw


def add_tensors(folder: Path, **tensors: Tensor) -> None:
    """Write further tensors into a directory, or others of the same names."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file)
