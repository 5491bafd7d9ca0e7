"""Read a GGUF file as a checkpoint: its config, and its tensors by their Hugging Face names.

1. `GgufFile` is a `TensorSource`. It writes the metadata (files/gguf_header.py) as a config.json
   and translates llama.cpp's names.
2. `keep_blocks` leaves matrices in their blocks, for the layouts of backends/blocks.py. Else they
   become numbers when a tensor is read, one tensor at a time. A C++ operator
   (backends/cpp/blocks.cpp) rounds them to bfloat16 on the way. Where it is not loaded, the package
   `gguf` reads them as fp32, which gives the same bits.

Sources: the GGUF specification (ggml/docs/gguf.md), llama.cpp's convert_hf_to_gguf.
Not here: the tokenizer (files/gguf_tokenizer.py); big-endian files, importance-matrix types (IQ).
"""

from __future__ import annotations

import math
import mmap
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from files.checkpoint import InBlocks, TensorSource
from files.gguf_header import MAX_COUNT, MAX_SIZE, Header, Info, Metadata, read_header
from files.gguf_tokenizer import end_ids, special_id
from files.io import ADAPTER
from files.machine import blocks, cpu_operators_are_loaded
from files.registry import gguf_names, gguf_refusal, row_named, row_of_gguf
from model import Rope, rope_frequencies
from options import require

STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.int16, "I64": np.int64}
# torch warns of a mapping that cannot be written to; nothing writes to this one
warnings.filterwarnings("ignore", "The given NumPy array is not writable")
MOST_EXPERTS = 1024
RELEASED = 64 << 20  # bytes that are read between two releases of the file's pages
PIECE = 2**18  # values that are made of blocks at a time: they fit in the second-level cache
# LLaMA-3.1's and 3.2's; the file holds one number per frequency instead, which yields `factor`
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
GATE_UP = "ffn_gate_up"  # a gate's rows, then those of up, of each expert in a stack
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class Type(NamedTuple):
    """A storage format in blocks."""

    name: str
    elements: int  # of a block
    size: int  # of a block (bytes)


TYPES = {  # by the number in the file. Source: the package gguf, GGML_QUANT_SIZES
    0: Type("F32", 1, 4),
    1: Type("F16", 1, 2),
    30: Type("BF16", 1, 2),
    27: Type("I64", 1, 8),
    8: Type("Q8_0", 32, 34),
    2: Type("Q4_0", 32, 18),
    3: Type("Q4_1", 32, 20),
    6: Type("Q5_0", 32, 22),
    7: Type("Q5_1", 32, 24),
    10: Type("Q2_K", 256, 84),
    11: Type("Q3_K", 256, 110),
    12: Type("Q4_K", 256, 144),
    13: Type("Q5_K", 256, 176),
    14: Type("Q6_K", 256, 210),
    39: Type("MXFP4", 32, 17),
}


# -------------------------------------------------------------------------------------- tensors


class GgufFile(TensorSource):
    """The tensors of a GGUF file: as numbers, or after `keep_blocks` in their blocks."""

    makes_tensors = True
    architectures: tuple[str, ...] = ()  # that the file may be of; (): the models'
    names = NAMES
    further_names: dict[str, str] = {}  # of a layer, beside the architecture's

    def __init__(self, path: Path):
        """Read the header.

        Raises: ValueError for a file that is broken or not supported.
        """
        self.path = path
        self._mapped = 0  # bytes read since the last release
        self._header = header = self._read_header()
        require(header.metadata.get("general.type") != "adapter", f"{path} {ADAPTER}")
        architecture = header.metadata.read("general.architecture", str)
        if architecture not in (self.architectures or gguf_names()):
            raise ValueError(f"{path}: {gguf_refusal(architecture)}")
        self._sizes = {name: self._bytes(name, info) for name, info in header.tensors.items()}
        type_names = {name: TYPES[info.type_id].name for name, info in header.tensors.items()}
        types = {type_names[name] for name in header.tensors if self._in_blocks(name)}
        self.block_types = ", ".join(sorted(types))
        self.config = self._read_config(type_names)
        self.layout = row_named(self.config["architectures"][0]).load().GGUF
        self._add_rope_scaling()
        self.quantized = {}
        self.readers = {}
        for name in header.tensors:
            self.readers.update(self._readers(name))
        if self.layout.split:
            self.readers = self.layout.split(self.readers, self.config)

    def _read_header(self) -> Header:
        return read_header(self.path)

    def _read_config(self, type_names: dict[str, str]) -> dict:
        """Return the content of a config.json. type_names: of every tensor"""
        return config_of(self._header, type_names, embedding_shape(self._header))

    def mostly_has(self, bits: int) -> bool:
        """Return whether more than half of the weights of matrices have at most so many bits."""
        few = 0
        every = 0
        for name, info in self._header.tensors.items():
            if len(info.shape) < 2:
                continue
            weights = math.prod(info.shape)
            every += weights
            if self._in_blocks(name) and bits_of(TYPES[info.type_id].name) <= bits:
                few += weights
        return 2 * few > every

    def _in_blocks(self, name: str) -> bool:
        """Return whether a tensor is a matrix, or a stack of them, in blocks."""
        info = self._header.tensors[name]
        return len(info.shape) > 1 and TYPES[info.type_id].name not in STORED

    def _blocks(self, name: str, part: int | None = None, heads: int = 0) -> Any:
        """Return a weight in its blocks. Arguments: as for `_tensor`."""
        info = self._header.tensors[name]
        shape, content = self._content(name, part)
        if len(shape) != 2:
            raise ValueError(
                f"{self.path}: {name} has shape {list(info.shape)}, which is no matrix here; "
                "use another file"
            )
        rows, inputs = shape
        content = torch.from_numpy(content).view(rows, -1)
        return blocks().Blocks(name, content, info.type_id, inputs, row_order(rows, heads))

    def _bytes(self, name: str, info: Info) -> int:
        """Return the size of a tensor.

        Raises: ValueError for an unknown type, or when the file does not hold the whole tensor.
        """
        elements = math.prod(info.shape)
        if info.type_id not in TYPES:
            known = ", ".join(kind.name for kind in TYPES.values())
            fault = f"the type {_name_of(info.type_id)}, which is not one of {known}"
            raise ValueError(f"{self.path}: {name} has {fault}; use another")
        _, block, block_size = TYPES[info.type_id]
        if not elements or info.shape[-1] % block:
            shape = list(info.shape)
            raise ValueError(
                f"{self.path}: {name} has the shape {shape}, "
                f"whose last size is no multiple of {block}"
            )
        size = elements // block * block_size
        end = info.offset + size
        file_size = len(info.file)
        if end > file_size:
            raise ValueError(
                f"{self.path} is truncated: {name} ends at byte {end} of {file_size}; "
                "download it again"
            )
        return size

    def _readers(self, name: str) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Yield the Hugging Face tensors in one of the file's, each with its reader.

        Unknown names stay.
        """
        read = self._reader(name)
        changed = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if changed and changed[2] in self.layout.changed:
            official, change = self.layout.changed[changed[2]]
            yield f"{self._layer(changed[1])}.{official}", lambda: change(read())
            return
        nextn = re.fullmatch(r"blk\.(\d+)\.nextn\.(\w+)\.weight", name)
        if nextn and nextn[2] in self.layout.nextn:
            owner = self._layer(nextn[1]).removesuffix(".layers.0")  # the first one's are for all
            yield f"{owner}.{self.layout.nextn[nextn[2]]}.weight", read
            return
        stem, _, leaf = name.rpartition(".")
        part = re.fullmatch(r"blk\.(\d+)\.((?:shortconv\.)?\w+?)(_exps|\.\d+)?", stem)
        if part is None:
            if name != "rope_freqs.weight":
                yield f"{(self.names | self.layout.beside).get(stem, stem)}.{leaf}", read
            return
        layer = f"{self._layer(part[1])}."
        kind = part[2]
        suffix = part[3]
        matrices = self.layout.mixture
        if suffix == "_exps" and kind in (*matrices, GATE_UP):  # all experts of a layer
            shape = self._header.tensors[name].shape
            of_bias = leaf == "bias"
            if len(shape) != 3 - of_bias or shape[0] > MOST_EXPERTS:
                parts = "biases" if of_bias else "matrices"
                stack = f"a stack of at most {MOST_EXPERTS} {parts}: use another file"
                raise ValueError(
                    f"{self.path}: {name} has the shape {list(shape)}; experts are {stack}"
                )
            kinds = ("ffn_gate", "ffn_up") if kind == GATE_UP else (kind,)
            for part_number in range(shape[0] * len(kinds)):
                expert, matrix = divmod(part_number, len(kinds))
                official = f"{layer}{matrices[kinds[matrix]].format(expert)}.{leaf}"
                yield official, self._reader(name, part_number)
        elif suffix and kind in matrices:  # one expert, in older files
            yield f"{layer}{matrices[kind].format(suffix[1:])}.{leaf}", read
        elif not suffix and kind == "ffn_gate_inp":
            yield f"{layer}{matrices[kind]}.{leaf}", read
        elif self._is_gate_above_up(name):
            for half, matrix in enumerate(("mlp.gate_proj", "mlp.up_proj")):
                yield f"{layer}{matrix}.{leaf}", self._reader(name, half)
        elif not suffix and kind in self.layout.layer | self.further_names:
            official = (self.layout.layer | self.further_names)[kind]
            yield f"{layer}{official}.{leaf}", self._reader(name, heads=self._heads(kind))
        else:
            yield f"{stem}.{leaf}", read

    def _is_gate_above_up(self, name: str) -> bool:
        of_experts = name.endswith(f".{GATE_UP}_exps.weight")
        return of_experts or (self.layout.gate_above_up and name.endswith(".ffn_up.weight"))

    def _layer(self, number: str) -> str:
        """Return the beginning of the names of a layer's tensors."""
        own = self.config["num_hidden_layers"]
        if int(number) < own or self.layout.numbers_mtp:
            return f"model.layers.{number}"
        return f"mtp.layers.{int(number) - own}"

    def _heads(self, kind: str) -> int:
        """Return the heads whose rows are in the order of llama.cpp's rotation; 0: none are."""
        keys = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        return self.config[keys[kind]] if self.layout.interleaved and kind in keys else 0

    def _reader(self, name: str, part: int | None = None, heads: int = 0) -> Callable[..., Tensor]:
        """Return the reader of a tensor. Arguments: as for `_tensor`"""
        read = partial(self._tensor, name, part, heads)
        if not self._in_blocks(name):
            return read
        type_name = TYPES[self._header.tensors[name].type_id].name
        return InBlocks(type_name, read, partial(self._blocks, name, part, heads))

    def _tensor(
        self, name: str, part: int | None = None, heads: int = 0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Read a tensor, or one part along its first dimension.

        heads: undo the order of rows that llama.cpp's rotation needs; dtype: as in `read`
        """
        shape, blocks = self._content(name, part)
        info = self._header.tensors[name]
        value = self._values(blocks, info.type_id, dtype).view(shape)
        is_changed = name.split(".", 2)[-1] in self.layout.changed
        if self.layout.norms_plus_one and name.endswith("norm.weight") and not is_changed:
            value = value.float() - 1
        order = row_order(shape[0], heads)
        return value if order is None else value[order]

    def _content(self, name: str, part: int | None) -> tuple[tuple[int, ...], np.ndarray]:
        """Return a tensor's shape and its bytes, or those of one part along its first dimension."""
        info = self._header.tensors[name]
        shape = info.shape
        if self._is_gate_above_up(name):
            shape = (2 * math.prod(shape[:-2]), shape[-2] // 2, shape[-1])
        size = self._sizes[name]
        start = info.offset
        if part is not None:
            size //= shape[0]
            start += part * size
            shape = shape[1:]
        file = info.file
        held = file.size()
        if start + size > held:  # a page of the mapping that the file has lost ends the process
            raise ValueError(
                f"{self.path} shrank while it was read: {name} ends at byte {start + size} of "
                f"{held}; download it again"
            )
        self._mapped += size
        if self._mapped > RELEASED and hasattr(mmap, "MADV_DONTNEED"):
            # or the process would hold the whole file beside the weights; pages come back if read
            file.madvise(mmap.MADV_DONTNEED)
            self._mapped = 0
        return shape, np.frombuffer(file, np.uint8, size, start)

    def _values(self, blocks: np.ndarray, type_id: int, dtype: torch.dtype | None) -> Tensor:
        """Read the numbers in blocks. blocks: uint8, of a type in TYPES; dtype: as in `read`.

        Returns: [elements], in the file's own dtype, or fp32 for blocks.
        """
        type_name, block, block_size = TYPES[type_id]
        if type_name in STORED:
            stored = torch.from_numpy(blocks.view(STORED[type_name]).copy())
            return stored.view(torch.bfloat16) if type_name == "BF16" else stored
        elements = len(blocks) // block_size * block
        if cpu_operators_are_loaded():
            rounded = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
            value = torch.empty(elements, dtype=rounded)
            torch.ops.gpt_eagle.widen_blocks(torch.from_numpy(blocks), type_id, value)
            return value
        from gguf import GGMLQuantizationType, quants  # takes 0.1 s

        kind = GGMLQuantizationType[type_name]
        bytes_each = PIECE // block * block_size
        starts = range(0, len(blocks), bytes_each)
        with np.errstate(all="ignore"):  # scales that are no numbers stay so
            pieces = [quants.dequantize(blocks[i : i + bytes_each], kind) for i in starts]
        return torch.from_numpy(np.concatenate(pieces))

    def _add_rope_scaling(self) -> None:
        """Read LLaMA-3's scaling from `rope_freqs.weight`.

        Raises: ValueError where the scaling is of another kind.
        """
        if "rope_freqs.weight" not in self._header.tensors:
            return
        divisors = self._tensor("rope_freqs.weight").float()  # [E/2]
        if self.layout.rope_keys:
            try:
                self.config |= self.layout.rope_keys(divisors)
            except ValueError as error:
                raise ValueError(f"{self.path}: {error}; use the original model") from None
            return
        if bool((divisors == 1).all()):
            return
        scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **LLAMA3}
        head = (self.config["head_dim"], self.config["rope_theta"])
        plain = rope_frequencies(Rope(*head))
        scaled = rope_frequencies(Rope(*head, scaling))
        same = plain.shape == divisors.shape and torch.allclose(
            plain / divisors, scaled, rtol=1e-4, atol=0
        )
        if not same:
            raise ValueError(
                f"{self.path}: rope_freqs.weight is not LLaMA-3.1's scaling; use the original model"
            )
        self.config["rope_scaling"] = scaling


def bits_of(type_name: str) -> int:
    """Return the bits of a weight's code, by ggml's name of a type in blocks, as Q4_K or MXFP4."""
    return int(re.search(r"\d", type_name)[0])


def _name_of(type_id: int) -> str:
    """Return ggml's name of a type that is not in `TYPES`, where it has one."""
    from gguf import GGMLQuantizationType

    names = {kind.value: kind.name for kind in GGMLQuantizationType}
    return names.get(type_id, str(type_id))


def row_order(rows: int, heads: int) -> Tensor | None:
    """Return the rows of a query or key weight in Hugging Face's order, [rows] int64.

    llama.cpp's rotation needs another one. None: they stay; those that heads do not divide, too,
    since the loader's error names them.
    """
    if not heads or rows % (2 * heads):
        return None
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


# --------------------------------------------------------------------------------------- config


def embedding_shape(header: Header) -> tuple[int, ...]:
    """Return the shape of a file's embedding; () where it has none."""
    info = header.tensors.get("token_embd.weight")
    return info.shape if info else ()


def config_of(header: Header, type_names: dict[str, str], embedding: tuple[int, ...]) -> dict:
    """Return the metadata as a Hugging Face config.json.

    type_names: of every tensor; embedding: the shape of the embedding
    Raises: ValueError for missing or impossible values.
    """
    metadata = header.metadata
    tensors = header.tensors
    architecture = metadata["general.architecture"]

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    row = row_of_gguf(architecture, bool(metadata.get(key("expert_count"))))
    further = row.load().GGUF.keys(metadata, key)
    sizes = _sizes(header, key, embedding)
    max_positions = metadata.size(key("context_length"), most=MAX_COUNT)
    has_window = metadata.get(key("attention.sliding_window")) != 0  # 0: none
    window = None
    if has_window:
        window = metadata.size(key("attention.sliding_window"), None, MAX_COUNT)
    return sizes | {
        "architectures": [row.name],
        "max_position_embeddings": max_positions,
        "sliding_window": window,
        "use_sliding_window": has_window,
        "rms_norm_eps": metadata.positive(key("attention.layer_norm_rms_epsilon"), 1e-6),
        "rope_theta": metadata.positive(key("rope.freq_base"), 10000.0),
        "rope_scaling": _rope_scaling(metadata, key),
        "attention_bias": _has(tensors, r"blk\.\d+\.attn_(q|k|v|output)\.bias"),
        "mlp_bias": _has(tensors, r"blk\.\d+\.ffn_(gate|up|down)\.bias"),
        "use_qk_norm": _has(tensors, r"blk\.\d+\.attn_q_norm\.weight"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": special_id(metadata, "bos"),
        "eos_token_id": end_ids(metadata),
        "torch_dtype": _dtype_name(header, type_names),
        **({"attention_k_eq_v": True} if _lacks_values(tensors) else {}),
        **further,
    }


def _has(names: Iterable[str], pattern: str) -> bool:
    """Return whether any name is of a pattern."""
    return any(re.fullmatch(pattern, name) for name in names)


def _lacks_values(names: Iterable[str]) -> bool:
    """Return whether a layer has keys and no values, as keys are both there."""
    return any(
        name.endswith(".attn_k.weight") and name.replace("attn_k", "attn_v") not in names
        for name in names
    )


def _dtype_name(header: Header, type_names: dict[str, str]) -> str:
    """Return the dtype that holds the file's matrices; blocks are read as bfloat16."""
    matrices = {type_names[name] for name, info in header.tensors.items() if len(info.shape) > 1}
    if matrices == {"F32"}:
        return "float32"
    if matrices <= {"F16", "F32"}:
        return "float16"
    return "bfloat16"


def _sizes(header: Header, key: Callable[[str], str], embedding: tuple[int, ...]) -> dict:
    """Return the widths and counts in config.json.

    key: puts the architecture before a name; embedding: the shape of the embedding
    Raises: ValueError for impossible ones.
    """
    tensors = header.tensors
    layout = row_of_gguf(header.metadata["general.architecture"], False).load().GGUF
    by_layer = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    metadata = header.metadata.with_one(map(key, by_layer), layout.by_layer)

    def size(name: str, *default: Any) -> Any:
        return metadata.size(key(name), *default)

    width = size("embedding_length")
    heads = size("attention.head_count")
    blocks = size("block_count")
    of_mtp = metadata.read(key("nextn_predict_layers"), int, 0)
    layers = blocks - of_mtp
    head_dim = size("attention.key_length", width // heads)
    kv_heads = size("attention.head_count_kv", heads)
    experts = size("expert_count") if metadata.get(key("expert_count")) else 0
    # the width of a dense layer, where a file has none
    width_of_expert = (metadata.get(key("expert_feed_forward_length")),) if experts else ()
    rotated = size("rope.dimension_count", head_dim)
    value_dim = size("attention.value_length", head_dim)
    fits_embedding = len(embedding) == 2 and embedding[-1] == width
    rules = {
        "token_embd.weight must be [tokens, embedding_length]": fits_embedding,
        # an MTP layer may have a file of its own
        "the file has fewer layers than block_count": of_mtp > 0 or blocks <= len(tensors),
        "nextn_predict_layers must be from 0 to below block_count": 0 < layers <= blocks,
        f"expert_count must be at most {MOST_EXPERTS}": experts <= MOST_EXPERTS,
        "head_count_kv must divide head_count": heads % kv_heads == 0,
        "key_length must be even": head_dim > 0 and head_dim % 2 == 0,
        f"head_count times key_length must be at most {MAX_SIZE}": heads * head_dim <= MAX_SIZE,
        "the rotation of a part of a head is not supported": rotated == head_dim
        or layout.partial_rope,
        "values must be as wide as keys": value_dim == head_dim,
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(
                f"{metadata.path}: {rule}; convert the model again, or use the original"
            )
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": size("feed_forward_length", *width_of_expert),
        "vocab_size": embedding[0],
    }
    return sizes | _experts(size, experts) if experts else sizes


def _experts(size: Callable[..., Any], experts: int) -> dict:
    """Return the keys of a mixture.

    A file of a Qwen3-MoE has no dense layers, and its shares add up to 1, as in llama.cpp.
    """
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": size("expert_used_count"),
        "moe_intermediate_size": size("expert_feed_forward_length", None),
        "norm_topk_prob": True,
    }


def _rope_scaling(metadata: Metadata, key: Callable[[str], str]) -> dict | None:
    """Raises: ValueError for a kind that is not supported, or an impossible factor."""
    kind = metadata.read(key("rope.scaling.type"), str, "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(
            f"{metadata.path}: RoPE scaling must be none, linear, yarn or LLaMA-3's; "
            f"the file says {kind}"
        )
    factors = []
    for name in ("rope.scaling.factor", "rope.scale_linear"):  # the second in older files
        if metadata.get(key(name), 0) != 0:  # 0: none
            factors.append(metadata.positive(key(name), 1.0))
    factor = factors[0] if factors else 1
    if kind == "none" or factor == 1:
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = metadata.size(key("rope.scaling.original_context_length"), None, MAX_COUNT)
        scaling["original_max_position_embeddings"] = original
        for name in ("attn_factor", "yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor"):
            # of DeepSeek's and others' models; the rest has transformers' defaults
            if metadata.get(key(f"rope.scaling.{name}"), 1.0) not in (0.0, 1.0, -1.0):
                raise ValueError(
                    f"{metadata.path}: {key('rope.scaling.' + name)} is not supported; "
                    "use the original model"
                )
        for name in ("beta_fast", "beta_slow"):
            if metadata.get(key(f"rope.scaling.yarn_{name}")) is not None:
                scaling[name] = metadata.positive(key(f"rope.scaling.yarn_{name}"), 1.0)
    return scaling
