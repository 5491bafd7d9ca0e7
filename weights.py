"""Weights of a Hugging Face directory, read as they are.

How it works:
1. `WeightFiles` finds the tensors of a directory by name: safetensors or .bin, single or sharded, memory-mapped.
2. `weight_names` says which of them each of our fused parameters stacks.
3. `load_weights` copies one parameter at a time into a model made on the meta device, and quantizes the weights of
   linear layers on the way when asked to. Whatever is missing, unexpected or mis-shaped is named.

Not here: what the weights are for (model.py), number formats (quantize.py), writing a directory (checkpoint.py).
"""

from __future__ import annotations

import ctypes
import pickle
import platform
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from model import DTYPES, ExpertLinear, ModelConfig, Transformer, read_json, rope_frequencies
from quantize import FORMATS, QuantExperts, Quantization, QuantLinear, check_group, scale_name

if TYPE_CHECKING:
    from stand_in import InflatedFiles


def weight_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Our parameter name -> the Hugging Face tensors that it stacks along its rows."""
    names = {"embedding.weight": ("model.embed_tokens.weight",), "norm.weight": ("model.norm.weight",)}
    if not config.tie_embeddings:
        names["lm_head.weight"] = ("lm_head.weight",)
    for i in range(config.n_layers):
        names |= layer_names(f"layers.{i}.", f"model.layers.{i}.", config)
    return names


def layer_names(ours: str, theirs: str, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The names of one LLaMA or Mixtral layer, from prefix to prefix (heads share them)."""
    kinds = {"weight": (True, True, True), "bias": (config.qkv_bias, config.o_bias, config.mlp_bias)}
    names = {
        ours + "attention_norm.weight": (theirs + "input_layernorm.weight",),
        ours + "ffn_norm.weight": (theirs + "post_attention_layernorm.weight",),
    }
    for kind, (qkv, out, mlp) in kinds.items():
        if qkv:
            names[f"{ours}attention.wqkv.{kind}"] = tuple(f"{theirs}self_attn.{p}_proj.{kind}" for p in "qkv")
        if out:
            names[f"{ours}attention.wo.{kind}"] = (f"{theirs}self_attn.o_proj.{kind}",)
        if mlp and not config.n_experts:
            names[f"{ours}ffn.w13.{kind}"] = tuple(f"{theirs}mlp.{p}_proj.{kind}" for p in ("gate", "up"))
            names[f"{ours}ffn.w2.{kind}"] = (f"{theirs}mlp.down_proj.{kind}",)
    if config.n_experts:
        moe = f"{theirs}block_sparse_moe."
        experts = [f"{moe}experts.{e}." for e in range(config.n_experts)]
        names[f"{ours}ffn.router.weight"] = (f"{moe}gate.weight",)
        names[f"{ours}ffn.w13.weight"] = tuple(f"{e}{w}.weight" for e in experts for w in ("w1", "w3"))
        names[f"{ours}ffn.w2.weight"] = tuple(f"{e}w2.weight" for e in experts)
    return names


class WeightFiles:
    """The tensors of a model directory by name, read lazily from memory-mapped files."""

    def __init__(self, path: Path):
        """Find the weight files. Raises: ValueError when there are none or one is corrupt."""
        self.path = path
        self.readers: dict[str, Callable[[], Tensor]] = {}
        files = self._shards()
        for file in files:
            if not file.is_file():
                raise ValueError(f"{path}: the index names {file.name}, which is missing; download it again")
            open_file = self._open_safetensors if file.suffix == ".safetensors" else self._open_bin
            try:
                open_file(file)
            except (SafetensorError, RuntimeError, OSError, EOFError, KeyError, ValueError, struct.error) as error:
                reason = str(error).splitlines()[0]
                raise ValueError(f"{file} is corrupt, truncated or no weights ({reason}); download it again") from None

    def _shards(self) -> list[Path]:
        for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
            index = self.path / f"{stem}{suffix}.index.json"
            if index.is_file():
                names = read_json(index).get("weight_map")
                if not isinstance(names, dict) or not names or not all(isinstance(f, str) for f in names.values()):
                    raise ValueError(f"{index} has no weight_map; download it again")
                return [self.path / name for name in sorted(set(names.values()))]
            if (self.path / f"{stem}{suffix}").is_file():
                return [self.path / f"{stem}{suffix}"]
        raise ValueError(f"{self.path} has neither model.safetensors nor pytorch_model.bin (single or sharded)")

    def _open_safetensors(self, file: Path) -> None:
        handle = safe_open(file, framework="pt")
        for name in handle.keys():  # noqa: SIM118  (not a dict)
            self.readers[name] = lambda name=name: handle.get_tensor(name)

    def _open_bin(self, file: Path) -> None:
        try:
            content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError:  # its text advises to load the file without this protection
            raise ValueError("its pickle holds more than tensors") from None
        if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
            raise ValueError("it does not hold tensors by name")
        for name, tensor in content.items():
            self.readers[name] = lambda tensor=tensor: tensor

    def read(self, name: str) -> Tensor:
        """One tensor, backed by the file until it is copied. Raises: ValueError when it is missing."""
        if name not in self.readers:
            raise ValueError(f"{self.path}: the weight {name} is missing")
        return self.readers[name]()


class Storage(NamedTuple):
    """How weights are kept in memory."""

    dtype: torch.dtype
    device: str = "cpu"
    quant: Quantization | None = None  # of the weights of linear layers


def load_weights(
    model: nn.Module,
    files: WeightFiles | InflatedFiles,
    names: dict[str, tuple[str, ...]],
    storage: Storage,
    ignored: Callable[[str], bool] = lambda name: False,
) -> None:
    """Fill a model made on the meta device, one parameter at a time.

    names: our parameter -> the tensors it stacks; ignored: which further tensors in the files may stay unused
    Raises: ValueError that names every missing, unexpected or mis-shaped weight.
    Writes: the parameters; with `storage.quant`, linear layers are replaced by quantized ones. At most one parameter
    exists twice at any moment.
    """
    params = dict(model.named_parameters())
    assert set(names) == set(params), set(names) ^ set(params)
    linear = set()
    if storage.quant is not None:
        kinds = (nn.Linear, ExpertLinear)
        linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kinds)}
        for name in filter(linear.__contains__, names):
            check_group(storage.quant, name, params[name].shape[-1])
    wanted = {theirs for parts in names.values() for theirs in parts}
    if storage.quant is not None and storage.quant.saved:
        wanted |= {scale_name(theirs) for ours in linear & set(names) for theirs in names[ours]}
    missing = sorted(wanted - set(files.readers))
    unexpected = sorted(n for n in set(files.readers) - wanted if not ignored(n))
    for what, which in (("missing", missing), ("unexpected", unexpected)):
        if which:
            raise ValueError(f"{files.path}: {len(which)} {what} weight(s): {_some(which)}; does config.json fit?")
    for ours, theirs in names.items():
        owner, _, leaf = ours.rpartition(".")
        if ours in linear:
            parent, _, child = owner.rpartition(".")
            layer = _quantized(files, ours, theirs, model.get_submodule(owner), storage)
            setattr(model.get_submodule(parent), child, layer)
            _trim_heap()
        else:
            value = _stack(files, theirs, params[ours].shape, storage.dtype, storage.device)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))


def _trim_heap() -> None:
    """Give back what was freed: glibc keeps holes between the layers that stay, two thirds of an int4 model in all."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _stack(
    files: WeightFiles, names: tuple[str, ...], shape: torch.Size, dtype: torch.dtype | None, device: str
) -> Tensor:
    """The named tensors on top of each other, on the device. dtype: None keeps the files' own."""
    if len(shape) == 3:  # experts, one after the other
        value = torch.empty(shape, dtype=dtype, device=device)
        for target, part in zip(value, _by_expert(names, shape[0])):
            target.copy_(_stack(files, part, shape[1:], dtype, device))
        return value
    parts = [files.read(n) for n in names]
    rows = sum(p.shape[0] for p in parts if p.dim())
    if any(p.shape[1:] != shape[1:] for p in parts) or rows != shape[0]:
        got = " + ".join(str(list(p.shape)) for p in parts)
        raise ValueError(
            f"{files.path}: {' + '.join(names)} has shape {got}, but config.json asks for {list(shape)} in all"
        )
    value = torch.empty(shape, dtype=dtype or parts[0].dtype, device=device)
    for target, part in zip(value.split([p.shape[0] for p in parts]), parts):
        target.copy_(part)
    return value


def _quantized(
    files: WeightFiles, ours: str, theirs: tuple[str, ...], layer: nn.Linear | ExpertLinear, storage: Storage
) -> QuantLinear | QuantExperts:
    """The layer that takes the place of `layer`."""
    kind, shape = FORMATS[storage.quant.format], layer.weight.shape
    if isinstance(layer, nn.Linear):
        return kind(*_codes_and_scale(files, theirs, shape, storage), layer.bias, wide=ours == "lm_head.weight")
    parts = (_codes_and_scale(files, part, shape[1:], storage) for part in _by_expert(theirs, shape[0]))
    return QuantExperts(kind, parts, shape[0])


def _codes_and_scale(
    files: WeightFiles, theirs: tuple[str, ...], shape: torch.Size, storage: Storage
) -> tuple[Tensor, Tensor]:
    """Codes and scale as they are saved, or made from float weights in the files' own dtype."""
    quant, device = storage.quant, storage.device
    kind = FORMATS[quant.format]
    if not quant.saved:
        return kind.encode(_stack(files, theirs, shape, None, device), quant.group_size)
    stored = _stack(files, theirs, kind.file_shape(shape), kind.file_dtype, device)
    scales = tuple(map(scale_name, theirs))
    scale = _stack(files, scales, kind.scale_shape(shape, quant.group_size), kind.scale_dtype, device)
    return kind.from_file(stored), scale


def _by_expert(names: tuple[str, ...], experts: int) -> Iterator[tuple[str, ...]]:
    """The tensors of one expert after the other."""
    each = len(names) // experts
    return (names[first : first + each] for first in range(0, len(names), each))


def _some(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")


def export_weights(
    model: nn.Module, names: dict[str, tuple[str, ...]], config: ModelConfig, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The inverse of `load_weights`: tensors under their Hugging Face names, on the CPU."""
    qkv = [heads * config.head_dim for heads in (config.n_heads, config.n_kv_heads, config.n_kv_heads)]
    tensors = {}
    for ours, theirs in names.items():
        value = model.get_parameter(ours).detach().to("cpu", dtype)
        if value.dim() == 3:
            value = value.flatten(0, 1)  # [E N, K]
        parts = value.split(qkv if ".wqkv." in ours else len(value) // len(theirs))
        tensors |= {name: part.contiguous() for name, part in zip(theirs, parts)}
    return tensors


def load_model(
    path: Path,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    quant: Quantization | None = None,
    files: InflatedFiles | None = None,
) -> Transformer:
    """Load a Hugging Face directory of the LLaMA family, Mixtral included.

    dtype: None keeps the checkpoint's own; quant: quantize while loading; files: the stand-in to build instead
    Returns: the model in eval mode. Peak anonymous memory stays within 1.2x of the model as it is kept, and one weight.
    Raises: ValueError for anything wrong with the directory.
    """
    config = ModelConfig.from_dir(path, files.config if files else None)
    if dtype is None:
        if config.dtype not in DTYPES:
            raise ValueError(f"{path}: torch_dtype {config.dtype} is not one of {', '.join(DTYPES)}; use --dtype")
        dtype = DTYPES[config.dtype]
    if config.quant is not None and quant is not None:
        raise ValueError(f"{path} is quantized already ({config.quant.format}); drop --quant")
    quant = config.quant or quant
    with torch.device("meta"):
        model = Transformer(config)
    files = files or WeightFiles(path)
    check_experts(config, files)
    load_weights(model, files, weight_names(config), Storage(dtype, device, quant), _ignored(config))
    if config.tie_embeddings:
        weight = model.embedding.weight
        if quant is None:
            model.lm_head.weight = weight
        else:
            check_group(quant, "lm_head.weight", config.dim)
            model.lm_head = FORMATS[quant.format].from_float(weight, None, quant.group_size, wide=True)
    model.rope_freq = rope_frequencies(config, device)
    return model.eval()


def check_experts(config: ModelConfig, files: WeightFiles | InflatedFiles) -> None:
    """Raises: ValueError when the routers say that there are more or fewer experts than the config does."""
    router = "model.layers.0.block_sparse_moe.gate.weight"
    held = len(files.read(router)) if router in files.readers else config.n_experts
    if config.n_experts and held != config.n_experts:
        raise ValueError(
            f"{files.path}: config.json says num_local_experts {config.n_experts}, and the weights hold {held}; "
            f"set it to {held}"
        )


def _ignored(config: ModelConfig) -> Callable[[str], bool]:
    # old LLaMA files carry RoPE tables; files of tied models may repeat the embedding as LM head
    repeated = ("lm_head.weight", scale_name("lm_head.weight")) if config.tie_embeddings else ()
    return lambda name: name.endswith("rotary_emb.inv_freq") or name in repeated
