"""Load the weights of a checkpoint into a model.

1. `weight_names` says which Hugging Face tensors each of our parameters is made of. Some of ours are several of theirs,
   one below the other: `wqkv` is q, k and v; the experts of a layer are one stack.
2. `load_weights` fills a model made on the meta device, one parameter at a time. It can quantize the weights of linear
   layers on the way. An error names every weight that is missing, unexpected or of the wrong shape.

The tensors come from a `TensorSource` (checkpoint.py): the files of a directory, a GGUF file, or a stand-in.
Not here: what a weight does (model.py), number formats (quantize.py), reading and writing files (checkpoint.py).
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from checkpoint import Quantization, TensorSource, fit_group, saved_quantization, scale_name
from files import is_gguf
from hf.config import open_source, read_config
from model import DTYPES, ExpertLinear, ModelConfig, Transformer, rope_frequencies
from ops.cpu.pages import REGION, HugePages
from ops.library import cpu_operators_are_loaded, has_cpu_operators, single_torch_thread
from quantize import FORMATS, QuantExperts, QuantLinear
from stats import check_memory

# bytes; PyTorch's threads wait for each other behind every loop, 10 ms where a core is busy with another program, and
# one of them loads this much in less than 1 s
SMALL = 2**29
EXPERTS = {  # `ModelConfig.expert_names` -> how files call a layer's feed-forward, and gate, up and down of an expert
    "mixtral": ("block_sparse_moe.", ("w1", "w3", "w2")),
    "qwen": ("mlp.", ("gate_proj", "up_proj", "down_proj")),
}


def weight_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Our parameter's name -> the Hugging Face tensors that it is made of, in the order of its rows."""
    names = {
        "embedding.weight": ("model.embed_tokens.weight",),
        "norm.weight": ("model.norm.weight",),
    }
    if not config.tie_embeddings:
        names["lm_head.weight"] = ("lm_head.weight",)
    for i in range(config.n_layers):
        names |= layer_names(f"layers.{i}.", f"model.layers.{i}.", config.at(i))
    return names


def layer_names(ours: str, theirs: str, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """`weight_names` of one layer; an EAGLE head's layers have the same names.

    ours, theirs: what the names begin with; config: the layer's, from `ModelConfig.at`
    """
    kinds = {
        "weight": (True, True, True),
        "bias": (config.qkv_bias, config.o_bias, config.mlp_bias),
    }
    names = {
        ours + "attention_norm.weight": (theirs + "input_layernorm.weight",),
        ours + "ffn_norm.weight": (theirs + "post_attention_layernorm.weight",),
    }
    if config.qk_norm:
        names |= {
            f"{ours}attention.{p}_norm.weight": (f"{theirs}self_attn.{p}_norm.weight",)
            for p in "qk"
        }
    for kind, (qkv, out, mlp) in kinds.items():
        if qkv:
            names[f"{ours}attention.wqkv.{kind}"] = tuple(
                f"{theirs}self_attn.{p}_proj.{kind}" for p in "qkv"
            )
        if out:
            names[f"{ours}attention.wo.{kind}"] = (f"{theirs}self_attn.o_proj.{kind}",)
        if mlp and not config.n_experts:
            names[f"{ours}ffn.w13.{kind}"] = tuple(
                f"{theirs}mlp.{p}_proj.{kind}" for p in ("gate", "up")
            )
            names[f"{ours}ffn.w2.{kind}"] = (f"{theirs}mlp.down_proj.{kind}",)
    if config.n_experts:
        moe, (*gate_up, down) = EXPERTS[config.expert_names]
        experts = [f"{theirs}{moe}experts.{e}." for e in range(config.n_experts)]
        names[f"{ours}ffn.router.weight"] = (f"{theirs}{moe}gate.weight",)
        names[f"{ours}ffn.w13.weight"] = tuple(f"{e}{w}.weight" for e in experts for w in gate_up)
        names[f"{ours}ffn.w2.weight"] = tuple(f"{e}{down}.weight" for e in experts)
    return names


class Storage(NamedTuple):
    """How weights are stored in memory."""

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

    names: our parameter -> the tensors it is made of; ignored: which further tensors in the files may stay unused
    Returns: `storage.quant` with the group size that was used.
    Raises: ValueError that names every missing, unexpected or mis-shaped weight.
    Writes: the parameters; with `storage.quant`, linear layers are replaced by quantized ones. At most one parameter
    exists twice at any moment.
    """
    params = dict(model.named_parameters())
    assert set(names) == set(params), set(names) ^ set(params)
    linear = set()
    if storage.quant is not None:
        kinds = (nn.Linear, ExpertLinear)
        linear = {
            f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kinds)
        }
        linear = _layers_of_others(files, names, linear) if files.quantized else linear
        where = f" of {files.path}" if storage.quant.saved else ""
        inputs = {name + where: params[name].shape[-1] for name in names if name in linear}
        storage = storage._replace(quant=fit_group(storage.quant, inputs))
    stored_bytes = _check_memory(files, params, linear, storage)
    wanted = {theirs for parts in names.values() for theirs in parts}
    if storage.quant is not None and storage.quant.saved and not files.quantized:
        wanted |= {scale_name(theirs) for ours in linear & set(names) for theirs in names[ours]}
    held = {*files.readers, *files.quantized}
    missing = sorted(wanted - held)
    unexpected = sorted(n for n in held - wanted if not ignored(n))
    for what, which in (("missing", missing), ("unexpected", unexpected)):
        if which:
            remedy = "use another file" if is_gguf(files.path) else "does config.json fit?"
            raise ValueError(
                f"{files.path}: {len(which)} {what} weight(s): {_some(which)}; {remedy}"
            )
    loading, pages = _Loading(files, storage), HugePages() if stored_bytes >= REGION else None
    with single_torch_thread(stored_bytes < SMALL and cpu_operators_are_loaded()):
        for ours, theirs in names.items():
            if ours in linear:
                _set_quantized(model, ours, loading, theirs, pages)
                continue
            owner, _, leaf = ours.rpartition(".")
            value = loading.parameter(theirs, params[ours].shape)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    return storage.quant


def _set_quantized(
    model: nn.Module, ours: str, loading: _Loading, theirs: tuple[str, ...], pages: HugePages | None
) -> None:
    """Put a quantized layer in the place of a linear one. Writes: `model`."""
    owner = ours.rpartition(".")[0]
    parent, _, child = owner.rpartition(".")
    layer = loading.quantized(theirs, model.get_submodule(owner), fp32_out=ours == "lm_head.weight")
    if pages and isinstance(layer, QuantLinear):  # experts are too much to be there twice
        pages.move(layer)
    setattr(model.get_submodule(parent), child, layer)
    _trim_heap()


def _layers_of_others(
    files: TensorSource, names: dict[str, tuple[str, ...]], linear: set[str]
) -> set[str]:
    """Which layers others quantized. Raises: ValueError for a weight that cannot be, or a layer that is in part."""
    found = set()
    for ours, theirs in names.items():
        codes = [name for name in theirs if name in files.quantized]
        rest = [name for name in theirs if name in files.readers]
        if codes and ours not in linear:
            rule = f"{codes[0]} is quantized, and only linear layers may be"
            raise ValueError(f"{files.path}: {rule}; use another checkpoint")
        if codes and rest:
            files.read(rest[0])  # one in codes that lacks its scale is refused for that
            rule = f"{codes[0]} is quantized and {rest[0]} is not, and they are one layer here"
            raise ValueError(f"{files.path}: {rule}; use another checkpoint")
        if codes:
            found.add(ours)
    return found


def _check_memory(
    files: TensorSource, params: dict[str, Tensor], linear: set[str], storage: Storage
) -> int:
    """Returns: the bytes of the weights, in the shapes that config.json says. Raises: ValueError if they do not fit."""
    need, quant = 0, storage.quant
    for name, parameter in params.items():
        width = parameter.shape[-1]
        if name in linear and quant is not None:
            rows = torch.Size((parameter.numel() // width, width))
            need += FORMATS[quant.format].stored_bytes(rows, quant.group_size)
            if (
                files.quantized and quant.format == "int4"
            ):  # fp16 scales and zero points take words of 4 bytes
                need += 2 * rows.numel() // quant.group_size
        else:
            need += parameter.numel() * storage.dtype.itemsize
    remedy = "use a smaller model" + (" or --quant" if quant is None else "")
    check_memory({f"the weights of {files.path}, by its config,": need}, storage.device, remedy)
    return need


@dataclass(frozen=True)
class _Loading:
    """Reads tensors, and makes parameters and quantized layers of them."""

    files: TensorSource
    storage: Storage

    def parameter(self, names: tuple[str, ...], shape: torch.Size) -> Tensor:
        """A parameter that stays float. shape: [N], [N, K], or [experts, N, K]."""
        if len(shape) < 3:
            return self._join(names, shape, self.storage.dtype)
        parts = (
            self._join(part, shape[1:], self.storage.dtype) for part in _by_expert(names, shape[0])
        )
        first = next(parts)
        value = first.new_empty(shape)
        for expert, part in zip(value, chain((first,), parts)):
            expert.copy_(part)
        return value

    def quantized(
        self, names: tuple[str, ...], layer: nn.Linear | ExpertLinear, fp32_out: bool
    ) -> QuantLinear | QuantExperts:
        """The layer that takes the place of `layer`. fp32_out: its outputs are fp32."""
        kind, shape = FORMATS[self.storage.quant.format], layer.weight.shape
        if isinstance(layer, nn.Linear):
            codes, scale, *zero = self._codes(kind, names, shape)
            return kind(codes, scale, layer.bias, fp32_out, *zero)
        parts = (self._codes(kind, part, shape[1:]) for part in _by_expert(names, shape[0]))
        return QuantExperts(kind, parts, shape[0])

    def _codes(
        self, kind: type[QuantLinear], names: tuple[str, ...], shape: torch.Size
    ) -> tuple[Tensor, ...]:
        """Codes, scale and, if there is one, zero point of a weight, as the files hold them or made of a float one."""
        quant = self.storage.quant
        if not quant.saved:
            return kind.encode(
                self._join(names, shape, None), quant.group_size
            )  # in the files' own dtype
        if self.files.quantized:
            codes, *rest = zip(*(self.files.quantized[name]() for name in names))
            rest = [
                (parts, shape[:1] + parts[0].shape[1:]) for parts in rest if parts[0] is not None
            ]
            return self._stack(codes, names, shape, None), *(
                self._stack(p, names, size, None) for p, size in rest
            )
        stored = self._join(names, kind.file_shape(shape), kind.file_dtype)
        scale_shape = kind.scale_shape(shape, quant.group_size)
        return kind.from_file(stored), self._join(
            tuple(map(scale_name, names)), scale_shape, kind.scale_dtype
        )

    def _join(self, names: tuple[str, ...], shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
        """The named tensors, one below the other, on the device. dtype: None keeps the files' own."""
        return self._stack([self.files.read(name, dtype) for name in names], names, shape, dtype)

    def _stack(
        self,
        parts: Sequence[Tensor],
        names: tuple[str, ...],
        shape: torch.Size,
        dtype: torch.dtype | None,
    ) -> Tensor:
        rows = sum(p.shape[0] for p in parts if p.dim())
        if any(p.shape[1:] != shape[1:] for p in parts) or rows != shape[0]:
            got = " + ".join(str(list(p.shape)) for p in parts)
            raise ValueError(
                f"{self.files.path}: {' + '.join(names)} has shape {got}, "
                f"but its config asks for {list(shape)} in all; use the config made for these weights"
            )
        dtype, device = dtype or parts[0].dtype, self.storage.device
        if (
            len(parts) == 1
            and self.files.makes_tensors
            and parts[0].dtype == dtype
            and device == "cpu"
        ):
            return parts[0]
        value = torch.empty(shape, dtype=dtype, device=device)
        for target, part in zip(value.split([p.shape[0] for p in parts]), parts):
            target.copy_(part)
        return value


def _trim_heap() -> None:
    """Return freed memory to the system: glibc keeps the gaps between quantized layers, 2/3 of an int4 model in all."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _by_expert(names: tuple[str, ...], experts: int) -> Iterator[tuple[str, ...]]:
    """The names of each expert's tensors, expert by expert."""
    each = len(names) // experts
    return (names[first : first + each] for first in range(0, len(names), each))


def _some(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (
        f", and {len(names) - most} more" if len(names) > most else ""
    )


def export_weights(
    model: nn.Module, names: dict[str, tuple[str, ...]], config: ModelConfig, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The inverse of `load_weights`: the tensors by their Hugging Face names, on the CPU."""
    qkv = [
        heads * config.head_dim for heads in (config.n_heads, config.n_kv_heads, config.n_kv_heads)
    ]
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
    source: TensorSource | None = None,
) -> Transformer:
    """Load a checkpoint of the LLaMA family, mixtures included: a Hugging Face directory, or a GGUF file.

    dtype: None keeps the checkpoint's own; quant: quantize while loading; source: where to read instead of the files
    Returns: the model in eval mode. Anonymous memory peaks at 1.2 times the loaded model plus one weight, at most.
    Raises: ValueError for anything wrong with the checkpoint.
    """
    if device.startswith("cpu"):
        has_cpu_operators()  # loads them: they widen the blocks of a GGUF file
    files = source or open_source(path)
    config, saved = read_config(path, files.config), saved_quantization(files.config)
    if dtype is None:
        if config.dtype not in DTYPES:
            raise ValueError(
                f"{path}: torch_dtype {config.dtype} is not one of {', '.join(DTYPES)}; use --dtype"
            )
        dtype = DTYPES[config.dtype]
    if saved is not None and quant is not None:
        raise ValueError(f"{path} is quantized already ({saved.format}); drop --quant")
    quant = saved or quant
    if config.tie_embeddings and "lm_head.weight" in files.quantized:
        rule = "tie_word_embeddings is true, and lm_head.weight is quantized, so that they differ"
        raise ValueError(f"{path}: {rule}; set tie_word_embeddings to false in config.json")
    check_layers(config, files)
    with torch.device("meta"):
        model = Transformer(config)
    check_experts(config, files)
    quant = load_weights(
        model, files, weight_names(config), Storage(dtype, device, quant), _ignored(config, files)
    )
    if config.tie_embeddings:
        weight = model.embedding.weight
        if quant is None or files.quantized:  # others leave the LM head in 16 bits
            model.lm_head.weight = weight
        else:
            head = FORMATS[quant.format].from_float(weight, None, quant.group_size, fp32_out=True)
            model.lm_head = HugePages().move(head)
    model.rope_freq = rope_frequencies(config, device)
    if files.note:
        print(f"note: {files.note}", file=sys.stderr)
    return model.eval()


def check_layers(config: ModelConfig, files: TensorSource) -> None:
    """Check the number of layers, before they are made. Raises: ValueError for more layers than tensors."""
    if config.n_layers > len(files.readers):
        held = f"and the weights are {len(files.readers)} tensors; does config.json fit?"
        raise ValueError(
            f"{files.path}: the config says num_hidden_layers {config.n_layers}, {held}"
        )


def check_experts(config: ModelConfig, files: TensorSource) -> None:
    """Check the number of experts. Raises: ValueError when the routers have more or fewer than the config says."""
    first = next(i for i in range(config.n_layers) if i not in config.dense_layers)
    router = f"model.layers.{first}.{EXPERTS[config.expert_names][0]}gate.weight"
    held = len(files.read(router)) if router in files.readers else config.n_experts
    if config.n_experts and held != config.n_experts:
        key = "num_experts" if files.config.get("num_experts") else "num_local_experts"
        remedy = "use another file" if is_gguf(files.path) else f"set it to {held} in config.json"
        said = f"the config says {key} {config.n_experts}, and the weights hold {held}"
        raise ValueError(f"{files.path}: {said}; {remedy}")


def int4_group(model: nn.Module) -> int:
    """The inputs that share a scale in a model's int4 layers, the fewest of any; 0: it has none."""
    return min(
        (layer.group_size for layer in model.modules() if isinstance(layer, QuantLinear)), default=0
    )


def _ignored(config: ModelConfig, files: TensorSource) -> Callable[[str], bool]:
    # old LLaMA files hold RoPE tables; files of a tied model may hold the embedding a second time, as the LM head
    repeated = ("lm_head.weight", scale_name("lm_head.weight")) if config.tie_embeddings else ()

    def no_bias(name: str) -> bool:  # AutoGPTQ wrote zeros where a layer has none
        layer, _, kind = name.rpartition(".")
        return (
            kind == "bias" and f"{layer}.weight" in files.quantized and not files.read(name).any()
        )

    return lambda name: name.endswith("rotary_emb.inv_freq") or name in repeated or no_bias(name)
