"""Round a model's weights to int8 or int4, once and for all, into files.

1. `quantize_directory` writes a copy of a directory (quantize.py). Rounding while loading gives the
   same bits.
2. On disk, codes, scales and config.json are those of compressed-tensors, which other runtimes
   read.
3. `calibrated` keeps the weights that int4 rounds with second moments (calibrate.py) in the user's
   cache, for `--quant int4`.

Trade-off: draft heads, experts and int8 are rounded without moments, which is enough for them.
Not here: the formats (quantize.py); loading (weights.py); the command (run/quantize.py).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from files.calibrate import Moments, encode_calibrated, moments_of
from files.checkpoint import (
    SMALL,
    TensorSource,
    WeightFiles,
    code_bytes,
    quantization_in,
)
from files.config import EMBEDDING, LM_HEAD, open_files, read_raw
from files.gptq_awq import QuantizedFiles, packed
from files.io import bundled_head, check_apart, check_out, read_json, show_progress
from files.lock import folder_lock
from files.machine import cpu_operators_are_loaded, single_torch_thread
from files.quant_config import BITS, config_of
from files.rank import this_rank
from files.tokenizer import has_tokenizer
from files.writing import write_checkpoint
from options import cache_folder, log_note, private_folder, require
from quantize import FORMATS, GROUPS, Quantization, check_finite, fit_group, in_groups
from runtime import pick_device

VERSION = 3  # of the rounding and of its text, for the cache


# ---------------------------------------------------------------------- into files


def is_quantized(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor is a linear layer's weight; routers and confidences are not.

    LiLiCorr's correlator stays as it is.
    """
    others = (*SMALL, "embed_tokens.weight", "markov_w1.weight", "_codebook.weight")
    is_matrix = tensor.dim() == 2 and name.endswith(".weight")
    return is_matrix and not name.endswith(others) and not name.startswith("lilicorr.")


def encoded(
    files: TensorSource, quant: Quantization, device: str, moments: Iterable[Moments] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a directory, with codes and scales for the weights of linear layers.

    moments: of the weights that are rounded with them; a tied LM head is written apart then
    Prints its progress. Raises: ValueError for a weight that is NaN or infinite.
    """
    encode = FORMATS[quant.format].encode
    names = dict.fromkeys(files.readers)
    for names_with, parts in moments:
        usable = _usable(parts, names_with)
        for name in names_with:
            weight = files.read(name).to(device)
            check_finite(weight, name, files.path)
            names.pop(name, None)
            if usable:
                pair = encode_calibrated(weight, quant.group_size, parts)
            else:
                pair = encode(weight, quant.group_size)
            yield from _stored(quant, name, *pair)
        count = len(files.readers)
        show_progress(f"{quant.format}: {count - len(names)} of {count} tensors", False)
    count = len(files.readers)
    for number, name in enumerate(names, 1 + count - len(names)):
        tensor = files.read(name)
        if is_quantized(name, tensor):
            check_finite(tensor, name, files.path)
            yield from _stored(quant, name, *encode(tensor.to(device), quant.group_size))
        elif not name.endswith("rotary_emb.inv_freq"):
            yield name, tensor.clone()
        show_progress(f"{quant.format}: {number} of {count} tensors", number == count)


def _stored(
    quant: Quantization, name: str, codes: Tensor, scale: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight's tensors as files hold them."""
    yield f"{name}_scale", scale.cpu().view(len(scale), -1)
    yield f"{name}_packed", packed(codes.cpu(), BITS[quant.format])
    yield f"{name}_shape", torch.tensor(codes.shape)


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


def write_quantized(config: Any) -> None:
    """Write the directory that a `run.quantize.QuantizeConfig` asks for, and say how to run it.

    Raises: as `quantize_directory`.
    """
    quant = Quantization.of(config.quant, config.group_size)
    path = Path(config.checkpoint)
    out = Path(config.out)
    device = pick_device(config.device)
    moments = moments_of(path) if config.quant == "int4" else ()
    quantize_directory(path, out, quant, device, config.overwrite, moments)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    head = bundled_head(path)
    given = f"--checkpoint {config.out}" + (f" --head {head}" if head.is_dir() else "")
    if not any(name.startswith("model.") for name in WeightFiles(out).readers):
        given = f"--checkpoint MODEL --head {config.out}"
    print(
        f"wrote {config.out}, {size / 1e9:.3f} GB of weights; run: "
        f'python generate.py {given} --prompt "Once upon a time"'
    )


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
    fault = f"--quant: directories hold {' or '.join(BITS)}, and not {quant.format}"
    require(quant.format in BITS, f"{fault}; name one of them")
    sizes = ", ".join(map(str, GROUPS))
    fault = f"--group_size must be one of {sizes}; it is {quant.group_size}"
    require(quant.group_size in (0, *GROUPS), fault)
    raw = read_json(path / "config.json")
    fault = f"{path} is quantized already; give the original"
    require(quantization_in(raw) is None, fault)
    check_apart(path, out)
    check_out(out, overwrite)
    files = open_files(path)
    is_target = any(name.startswith("model.") for name in files.readers)  # not a draft head
    if is_target:  # a tied LM head is written apart, in codes
        files.readers.setdefault(LM_HEAD, files.readers[EMBEDDING])
        raw["tie_word_embeddings"] = False
    tensors = {name: files.read(name) for name in files.readers}  # memory-mapped
    shapes = {name: tensor.shape for name, tensor in tensors.items() if is_quantized(name, tensor)}
    others = {name: tensor for name, tensor in tensors.items() if name not in shapes}
    inputs = {name: shape[1] for name, shape in shapes.items()}
    quant = fit_group(in_groups(quant, inputs.values()), inputs)
    need_bytes = sum(tensor.nbytes for tensor in others.values())
    need_bytes += sum(code_bytes(quant, shape) for shape in shapes.values())
    check_out(out, overwrite, need_bytes)
    raw["quantization_config"] = config_of(quant)
    routers = [name for name, tensor in others.items() if tensor.dim() == 2 and name != EMBEDDING]
    raw["quantization_config"]["ignore"] = [name.removesuffix(".weight") for name in routers]
    moments = moments if is_target else ()
    # loops over short rows: threads would wait for each other longer than they work
    with single_torch_thread(device == "cpu" and cpu_operators_are_loaded()):
        write_checkpoint(out, encoded(files, quant, device, moments), raw, path, overwrite)


# ---------------------------------------------------------------------- the cache of --quant int4


def is_calibrated(quant: Quantization, path: Path) -> bool:
    """Return whether `--quant` takes a checkpoint's weights from `calibrated`.

    Not so for ranks of several, which quantize their own parts, nor for GGUF files.
    """
    return (
        quant.format == "int4"
        and not quant.saved
        and path.is_dir()
        and this_rank().world_size == 1
        and quantization_in(read_raw(path)) is None
        and has_tokenizer(path)
    )


def calibrated(path: Path, quant: Quantization) -> TensorSource:
    """Return a directory's weights in int4, from the user's cache; made on the first call.

    Raises: ValueError for weights that cannot be quantized, or a cache that cannot be written.
    """
    weights = [file for file in path.iterdir() if file.suffix in (".safetensors", ".bin")]
    identity = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in weights]
    config = (path / "config.json").read_text(encoding="utf-8")
    key = json.dumps([VERSION, str(path.resolve()), sorted(identity), config, quant.group_size])
    parent = cache_folder() / "quantized"
    out = parent / f"{path.resolve().name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    try:
        private_folder("quantized")
    except OSError as error:
        raise ValueError(
            f"cannot write {parent} ({error.strerror}); XDG_CACHE_HOME names another place; "
            "or use quantize.py"
        ) from None
    with folder_lock(parent, f"another process writes {parent}; waiting"):
        if not out.is_dir():
            log_note(f"weights in int4 are stored in {out}", logging.INFO)
            quantize_directory(path, out, quant, moments=moments_of(path))
    return QuantizedFiles(WeightFiles(out))
