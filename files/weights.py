"""Load the weights of a checkpoint into a model.

`load_weights` of quantize.py fills a model made on the meta device, one parameter at a time, by
`model.weight_names`. Here is its loader for all that files hold. An error names every weight that
is missing, unexpected or of the wrong shape.

The tensors come from a `TensorSource` (checkpoint.py): the files of a directory, a GGUF file, or
random ones. Not here: the use of a weight (model.py), number formats (quantize.py), reading and
writing files (checkpoint.py).
"""

from __future__ import annotations

import ctypes
import logging
import math
import platform
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from files.checkpoint import (
    Codes,
    TensorSource,
    code_bytes,
    is_mxfp4,
)
from files.config import EMBEDDING, open_source, read_config
from files.io import StatusLine, is_gguf, read_json
from files.machine import (
    blocks,
    cpu_operators_are_loaded,
    has_cpu_operators,
    huge_pages,
    pack_codes,
    single_torch_thread,
)
from files.memory import check_memory
from files.rank import this_rank
from model import DTYPES, ModelConfig, RotaryEmbeddings, Transformer, weight_names
from options import log_note, one_line
from quantize import (
    BLOCKS,
    FORMATS,
    Int8,
    Linear,
    Loader,
    Quantization,
    Storage,
    by_expert,
    decode,
    linear_weights,
    load_weights,
    pack,
    some,
)
from reference import choose, use_backend

# bytes; PyTorch's threads wait for each other behind every loop, 10 ms where a core is busy with
# another program, and one of them loads this much in less than 1 s
SMALL = 2**29
LARGE = 64 << 20  # bytes, from which on weights lie in huge pages (backends/cpp/pages.py)
# the beginnings of the names of a model's tensors; others are parts that it may have beside
PARTS = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
# biases that some models have in part; a mixture has all of its own, or its file is damaged
OPTIONAL = re.compile(r"\.(self_attn|mlp)\.\w+_proj\.bias$")


class CheckpointLoader(Loader):
    """The loader of quantize.py, for all that files hold: codes, blocks of GGUF, missing biases.

    It checks that the weights fit in memory, tells its progress, and takes huge pages.
    """

    def __init__(self, files: TensorSource, storage: Storage):
        super().__init__(files, storage)
        self.pages: Any = None  # huge pages, where there are such
        self.status = StatusLine()
        self.placed = 0
        if is_gguf(files.path):
            self.remedy = "use another file"

    def load(
        self, model: nn.Module, names: dict[str, tuple[str, ...]], ignored: Callable[[str], bool]
    ) -> Quantization | None:
        _add_zero_biases(self.files, names)
        return super().load(model, names, ignored)

    def choose_packed(self, model: nn.Module, names: dict[str, tuple[str, ...]]) -> set[str]:
        linear = super().choose_packed(model, names)
        if self.files.quantized:
            return _quantized_by_others(self.files, names, linear, self.storage.device)
        return linear

    def choose_group(self, inputs: dict[str, int]) -> None:
        if not self.storage.quant.saved:
            super().choose_group(inputs)

    def check_names(self, wanted: set[str], ignored: Callable[[str], bool]) -> None:
        """Check the names of the tensors.

        A model may have other parts, as a vision tower: they are noted, and not used.
        Raises: ValueError for missing tensors and unexpected ones.
        """
        held = self.files.held
        if "fc.weight" in held - wanted:
            raise ValueError(
                f"{self.files.path} holds a draft head and no model; name its model with "
                "--checkpoint, and the head with --head"
            )
        others: list[str] = []
        if EMBEDDING in wanted:  # a model, not a head
            unused = sorted(name for name in held - wanted if not ignored(name))
            others = [name for name in unused if not name.startswith(PARTS)]
        super().check_names(wanted, lambda name: name in others or ignored(name))
        if others:
            unused = f"{len(others)} weight(s) of other parts are not used: {some(others)}"
            log_note(f"{self.files.path}: {one_line(unused)}")

    def fill(self, model: nn.Module, names: dict[str, tuple[str, ...]], packed: set[str]) -> None:
        params = dict(model.named_parameters())
        stored_bytes = _check_memory(self.files, params, names, packed, self.storage)
        self.pages = huge_pages() if stored_bytes >= LARGE else None
        on_one_thread = stored_bytes < SMALL and cpu_operators_are_loaded()
        self.total = len(names)
        with self.status, single_torch_thread(on_one_thread):
            super().fill(model, names, packed)

    def place(self, model: nn.Module, ours: str, theirs: tuple[str, ...], packed: bool) -> None:
        self.status.show(f"[loading: {self.placed} of {self.total} weights]")
        self.placed += 1
        owner, _, leaf = ours.rpartition(".")
        module = model.get_submodule(owner)
        shape = getattr(module, leaf).shape
        if not packed and theirs[0] in self.files.quantized:  # an embedding in blocks
            parent, _, last = owner.rpartition(".")
            setattr(model.get_submodule(parent), last, self.embedding(theirs, shape))
        else:
            super().place(model, ours, theirs, packed)
            if packed and not self.storage.quant.is_blocks:  # which are packed where they stay
                if self.pages and not module.experts:  # which are too much to be there twice
                    self.pages.move(module)
                _trim_heap()

    def dtype_of(self, module: nn.Module, leaf: str) -> torch.dtype:
        wide = leaf in getattr(module, "in_fp32", ())
        return torch.float32 if wide else super().dtype_of(module, leaf)

    def parameter(self, names: tuple[str, ...], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Do as `Loader.parameter`, in huge pages; a stack's parts are there once at a time."""
        is_stack = len(shape) == 3 or (len(shape) == 2 and names[0].endswith(".bias"))
        if is_stack and len(names) >= shape[0]:
            value = torch.empty(shape, dtype=dtype, device=self.storage.device)
            for part, out in zip(by_expert(names, shape[0]), value):
                self.join(part, shape[1:], dtype, out)
            return value
        value = None
        if self.pages and self.storage.device == "cpu":
            value = self.pages.empty(shape, dtype)
        return self.join(names, shape, dtype, value)

    def join(
        self,
        names: tuple[str, ...],
        shape: torch.Size,
        dtype: torch.dtype | None,
        value: Tensor | None = None,
    ) -> Tensor:
        """Do as `Loader.join`. value: write and return this one"""
        parts = [self.files.read(name, dtype) for name in names]
        self.check_shape([tuple(part.shape) for part in parts], names, shape)
        is_new = len(parts) == 1 and self.files.makes_tensors
        stays = is_new and dtype in (None, parts[0].dtype) and self.storage.device == "cpu"
        if value is None and stays:
            return parts[0]
        if value is None:
            return self.below(parts, names, shape, dtype)
        for target, part in zip(value.split([part.shape[0] for part in parts]), parts):
            target.copy_(part)
        return value

    def embedding(self, names: tuple[str, ...], shape: torch.Size) -> nn.Module:
        """Return an embedding that stays in blocks; its rows are of the residual stream's dtype."""
        on_cuda = blocks().in_planes(self.storage.device)
        dtype = self.storage.dtype if on_cuda else torch.float32
        return blocks().Embedding(self.packed(names, shape), dtype)

    def packed(self, names: tuple[str, ...], shape: torch.Size) -> Any:
        if self.storage.quant.is_blocks:
            return self._blocks(names, shape)
        return super().packed(names, shape)

    def pack(self, names: tuple[str, ...], shape: torch.Size) -> Any:
        format = self.storage.quant.format
        if not self.files.quantized:
            return super().pack(names, shape)
        codes, scale, *zero = self._saved_codes(names, shape)
        if format == "int8" and scale.dim() > 1 and self.storage.device != "cpu":
            codes, scale = Int8.encode(decode(codes, scale), 0)  # CUDA's product has no groups
        return (pack_codes or pack)(format, codes, scale, *zero)

    def _blocks(self, names: tuple[str, ...], shape: torch.Size) -> Any:
        """Pack a weight, or a stack of them, that stays in the file's blocks.

        Numbers that the file has beside blocks of the same layer become bfloat16.
        """
        experts = list(by_expert(names, shape[0])) if len(shape) == 3 else [names]
        sources = [[self._block_source(name) for name in part_names] for part_names in experts]
        for of_expert, part_names in zip(sources, experts):
            self.check_shape([source.shape for source in of_expert], part_names, shape[-2:])
        kinds = {tuple(source.part for source in of_expert) for of_expert in sources}
        if len(kinds) > 1:
            raise ValueError(
                f"{self.files.path}: the experts of {names[0]} and others are of several types; "
                "use --dtype bfloat16"
            )
        return blocks().packed(
            sources, len(shape) == 3, self.storage.device, self.pages, self.files.path
        )

    def _block_source(self, name: str) -> Any:
        """Return a part as a `backends.blocks.Blocks`, or `Numbers`."""
        if name in self.files.quantized:
            return self.files.quantized[name]()
        return blocks().Numbers(self.files.read(name, torch.bfloat16))

    def _saved_codes(self, names: tuple[str, ...], shape: torch.Size) -> tuple[Tensor, ...]:
        """Return codes, scales and zero points, if there are any, of a weight."""
        parts = [self.files.quantized[name]() for name in names]
        codes = self.below([part.codes for part in parts], names, shape, None)
        scales = [part.scale for part in parts]
        scale = self.below(scales, names, shape[:1] + scales[0].shape[1:], None)
        zeros = [part.zero for part in parts]
        if zeros[0] is None:
            return codes, scale
        zero = self.below(zeros, names, shape[:1] + zeros[0].shape[1:], None)
        return codes, scale, zero


def _add_zero_biases(files: TensorSource, names: dict[str, tuple[str, ...]]) -> None:
    """Add zeros for the biases that a model's file lacks beside others.

    A LLaMA made of a Qwen has biases of q, k and v alone; transformers starts the missing ones at
    zero, and llama.cpp takes each where it is there.
    Writes: the readers of `files`.
    """
    held = files.held
    biases = [name for parts in names.values() for name in parts if OPTIONAL.search(name)]
    missing = [name for name in biases if name not in held]
    if EMBEDDING not in held or not missing or len(missing) == len(biases):
        return
    for name in missing:
        weight = name.removesuffix("bias") + "weight"
        if weight in held:
            files.readers[name] = partial(_zeros, files, weight)
    log_note(f"{files.path}: {len(missing)} missing bias(es) are zero: {some(missing)}")


def _zeros(files: TensorSource, weight: str, dtype: torch.dtype | None = None) -> Tensor:
    """Return a bias of zeros. weight: of the same layer"""
    if weight not in files.quantized:
        return torch.zeros(len(files.read(weight)), dtype=dtype)
    packed = files.quantized[weight]()
    return torch.zeros(
        len(packed.codes if isinstance(packed, Codes) else packed.content), dtype=dtype
    )


def _quantized_by_others(
    files: TensorSource, names: dict[str, tuple[str, ...]], linear: set[str], device: str
) -> set[str]:
    """Return the linear weights that others quantized, in part if a GGUF file holds them.

    In other files a weight becomes numbers where the device has no matmul for its codes, where it
    is no linear layer's, and where another one that is of the same layer here is not quantized.
    Writes: the readers of `files`.
    """
    held = {ours for ours, theirs in names.items() if not files.quantized.keys().isdisjoint(theirs)}
    if is_gguf(files.path):
        return held & linear
    whole = {ours for ours in held & linear if files.quantized.keys() >= {*names[ours]}}
    reason = _why_widened(files, device)
    packed = whole if not reason else set()
    widened = [name for ours in names for name in names[ours] if ours in held - packed]
    widened = [name for name in widened if name in files.quantized]
    files.widen(widened)
    if widened:
        reason = reason or "layers that are quantized in part become numbers"
        log_note(f"{files.path}: {reason}; {len(widened)} weight(s): {some(widened)}")
    return packed


def _why_widened(files: TensorSource, device: str) -> str:
    """Return the reason why no codes of others can stay codes; "": they can."""
    if pack_codes is None and not files.stored.symmetric:
        return "codes with zero points need the folder backends/"
    if device != "cpu" and files.stored.keeps_groups:
        return "int8 on CUDA has no groups of inputs"
    return ""


def _check_memory(
    files: TensorSource,
    params: dict[str, Tensor],
    names: dict[str, tuple[str, ...]],
    linear: set[str],
    storage: Storage,
) -> int:
    """Check that the weights, in the shapes that config.json says, fit in memory.

    Returns: their bytes. Raises: ValueError if they do not fit.
    """
    quant = storage.quant
    scale_bytes = 2 if not files.stored or files.stored.is_ours else 4  # and a zero point
    need = 0
    for name, parameter in params.items():
        in_blocks = [theirs for theirs in names[name] if theirs in files.quantized]
        if quant is not None and quant.is_blocks and in_blocks:
            weights = [files.quantized[theirs]() for theirs in in_blocks]
            need += sum(weight.bytes(storage.device) for weight in weights)
            rest = parameter.numel() - sum(math.prod(weight.shape) for weight in weights)
            need += max(rest, 0) * torch.bfloat16.itemsize  # of another shape it is refused later
            continue
        if name not in linear or quant is None:
            need += parameter.numel() * storage.dtype.itemsize
            continue
        width = parameter.shape[-1]
        need += code_bytes(quant, torch.Size((parameter.numel() // width, width)), scale_bytes)
    remedy = "use a smaller model" + (" or --quant" if quant is None else "")
    check_memory({f"the weights of {files.path}, by its config,": need}, storage.device, remedy)
    return need


def _trim_heap() -> None:
    """Return freed memory to the system.

    glibc keeps the gaps between quantized layers, 2/3 of an int4 model in all.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def export_weights(
    model: nn.Module, names: dict[str, tuple[str, ...]], config: ModelConfig, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the tensors by their Hugging Face names, on the CPU: the inverse of `load_weights`."""
    qkv_heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
    qkv = [heads * config.head_dim for heads in qkv_heads]
    tensors = {}
    for ours, theirs in names.items():
        value = model.get_parameter(ours).detach().to("cpu", dtype)
        is_stack = value.dim() == 3 or (value.dim() == 2 and ours.endswith(".bias"))
        if is_stack and len(theirs) >= len(value):
            value = value.flatten(0, 1)  # [E N, K], or biases, [E N]
        parts = value.split(qkv if "wqkv." in ours else len(value) // len(theirs))
        tensors |= {name: part.contiguous() for name, part in zip(theirs, parts)}
    return tensors


def load_model(
    path: Path,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    quant: Quantization | None = None,
    source: TensorSource | None = None,
    config: ModelConfig | None = None,
) -> Transformer:
    """Load a checkpoint of the LLaMA family: a Hugging Face directory, or a GGUF file.

    dtype: None keeps the checkpoint's own
    quant: quantize while loading
    source: read from here instead of the files
    config: of these tensors; None: config.json's

    Returns: the model in eval mode, mixtures included. Anonymous memory peaks at 1.2 times the
    loaded model plus one weight, at most.
    Raises: ValueError for anything wrong with the checkpoint.
    """
    if device.startswith("cpu"):
        has_cpu_operators()  # loads them: they widen the blocks of a GGUF file
    files = source or open_source(path)
    config = config or read_config(path, files.config)
    saved = files.quant
    if dtype is None:
        if config.dtype not in DTYPES:
            raise ValueError(
                f"{path}: torch_dtype {config.dtype} is not one of {', '.join(DTYPES)}; "
                "name one by --dtype NAME"
            )
        dtype = DTYPES[config.dtype]
    if saved is not None and quant is not None:
        raise ValueError(f"{path} is quantized already ({saved.format}); drop --quant")
    quant = saved or quant
    if config.tie_embeddings and "lm_head.weight" in files.quantized and not is_gguf(path):
        raise ValueError(
            f"{path}: tie_word_embeddings is true, and lm_head.weight is quantized, "
            "so that they differ; set tie_word_embeddings to false in config.json"
        )
    check_layers(config, files)
    with torch.device("meta"):
        model = Transformer(config)
    check_experts(config, files)
    if quant is not None and quant.is_blocks:
        quant = keep_blocks(files, model, device, quant.every_type)
    storage = Storage(dtype, device, quant)
    quant = load_weights(model, files, weight_names(config), storage, _ignored(config, files))
    if config.tie_embeddings:
        _tie_lm_head(model, None if files.quantized else quant)  # others leave it in 16 bits
    model.ropes = RotaryEmbeddings(config.ropes, device)
    for note in (files.note, block_note(files, storage)):
        if note:
            log_note(note, logging.INFO)
    use_backend(model, choose(model.norm.weight.device, dtype))
    return model.eval()


def _tie_lm_head(model: Transformer, quant: Quantization | None) -> None:
    """Make the LM head of the embedding. quant: its format; None: the embedding's own

    Writes: the LM head.
    """
    embedding = model.embedding
    if not isinstance(embedding, nn.Embedding):  # it is packed
        model.lm_head.pack(embedding.record)
    elif quant is None:
        model.lm_head.weight = embedding.weight
    else:
        has_groups = quant.format == "int4" or embedding.weight.device.type == "cpu"
        group = quant.group_size if has_groups else 0
        model.lm_head.pack(FORMATS[quant.format].round(embedding.weight, group))
        pages = huge_pages()
        if pages:
            pages.move(model.lm_head)


def keeps_blocks(config: Any, path: Path) -> bool:
    """Return whether a checkpoint's weights stay in the bits of the file's blocks.

    config: a `run.options.GenerateConfig`, with `dtype` as the user gave it
    Returns: True for a GGUF file or a directory in MXFP4 on one device, unless dtype is given.
    """
    if config.dtype or config.random or this_rank().world_size > 1:
        return False
    file = path / "config.json"
    has_blocks = is_gguf(path) or (file.is_file() and is_mxfp4(read_json(file)))
    return has_blocks and blocks() is not None and blocks().can_stay(config.device)


def keep_blocks(
    files: TensorSource, model: Transformer, device: str, every_type: bool
) -> Quantization | None:
    """Leave the weights of a GGUF file in its blocks.

    model: on the meta device; every_type: on CUDA not only `KEPT_BY_DEFAULT`
    Returns: their format, or None where there are none.
    """
    if not blocks().in_planes(device):
        files.keep_blocks()
        return Quantization(BLOCKS, saved=True) if files.quantized else None
    names = weight_names(model.config)
    kept = {*blocks().kept_types(device, every_type)}
    for ours in names.keys() & {*linear_weights(model), "embedding.weight"}:
        types = {files.type_of(name) for name in names[ours]}
        is_stack = model.get_parameter(ours).dim() == 3  # whose weights are all of one type
        if types <= kept and not (is_stack and len(types) > 1):
            files.keep_blocks(names[ours])
    return Quantization(BLOCKS, saved=True, every_type=every_type) if files.quantized else None


def block_note(files: TensorSource, storage: Storage) -> str:
    """Return a line about the blocks of a GGUF file; empty where there are none."""
    quant = storage.quant
    kinds = files.block_types
    dtype = str(storage.dtype).removeprefix("torch.")
    if not kinds:
        return ""
    widened = sorted({files.type_of(name) for name in files.readers} - {""})
    on_cuda = blocks() is not None and blocks().in_planes(storage.device)
    if quant is None or (quant.is_blocks and on_cuda and widened):
        note = f"the file's {', '.join(widened)} weights are converted to {dtype}"
        asks = quant is not None and quant.every_type
        if on_cuda and not asks and {*blocks().kept_types(storage.device, True)} & {*widened}:
            note += "; --keep_blocks, without dtype, keeps their bits"
        return note
    if quant.is_blocks:
        return f"weights run as they are in the file ({kinds}); --dtype {dtype} converts them"
    return (
        f"the file's {kinds} weights are rounded a second time, to {quant.format}; "
        "without --quant they run as they are"
    )


def check_layers(config: ModelConfig, files: TensorSource) -> None:
    """Check the number of layers, before they are made.

    Raises: ValueError for more layers than tensors.
    """
    held = len(files.held)
    if config.n_layers > held:
        raise ValueError(
            f"{files.path}: the config says num_hidden_layers {config.n_layers}, "
            f"and the weights are {held} tensors; does config.json fit?"
        )


def check_experts(config: ModelConfig, files: TensorSource) -> None:
    """Check the number of experts.

    Raises: ValueError when the routers have more or fewer than the config says.
    """
    if not config.n_experts:
        return
    first = next(i for i in range(config.n_layers) if config.has_experts(i))
    router = f"model.layers.{first}.{config.names['router'][0]}.weight"
    held = len(files.read(router)) if router in files.readers else config.n_experts
    if held != config.n_experts:
        key = "num_experts" if files.config.get("num_experts") else "num_local_experts"
        remedy = "use another file" if is_gguf(files.path) else f"set it to {held} in config.json"
        raise ValueError(
            f"{files.path}: the config says {key} {config.n_experts}, "
            f"and the weights hold {held}; {remedy}"
        )


def int4_group(model: nn.Module) -> int:
    """Return the fewest inputs that share a scale in a model's int4 layers; 0: it has none."""
    layers = [layer for layer in model.modules() if isinstance(layer, Linear) and layer.packed]
    return min((layer.group_size for layer in layers if not layer.experts), default=0)


def _ignored(config: ModelConfig, files: TensorSource) -> Callable[[str], bool]:
    """Return the test for tensors that may stay unused.

    Old LLaMA files hold RoPE tables. Files of a tied model may hold the embedding a second time, as
    the LM head. An MTP layer is read as a draft head.
    """
    repeated: tuple[str, ...] = ()
    if config.tie_embeddings:
        repeated = ("lm_head.weight",)

    def no_bias(name: str) -> bool:  # AutoGPTQ and others write zeros where a layer has none
        return name.endswith(".bias") and name in files.readers and not files.read(name).any()

    def is_ignored(name: str) -> bool:
        is_table = name.endswith("rotary_emb.inv_freq")
        return config.ignores(name) or is_table or name in repeated or no_bias(name)

    return is_ignored
