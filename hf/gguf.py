"""Read a GGUF file as a checkpoint: its config, and its tensors by their Hugging Face names.

1. `read_header` maps the file into memory and reads its metadata and the list of its tensors. Every count and length is
   checked against the size of the file first, so a broken file ends in a line, and soon.
2. `GgufFile` is a `TensorSource`. It writes the metadata as a config.json and translates llama.cpp's names.
3. Blocks become numbers when a tensor is read, one at a time: those of usual types by a C++ operator
   (ops/cpu/blocks.cpp), which rounds them to bfloat16 on the way; others, and where that is not loaded, as fp32 by the
   package `gguf`, which gives the same bits.

Sources: the GGUF specification (ggml/docs/gguf.md), llama.cpp's convert_hf_to_gguf.
Trade-off: the package has a reader too. It takes 2 s for 49,152 tokens, and does not end where a count is absurd.
Not here: the tokenizer (hf/gguf_tokenizer.py); files in several parts, big-endian files, importance-matrix types (IQ).
"""

from __future__ import annotations

import math
import mmap
import re
import reprlib
import struct
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from checkpoint import TensorSource
from model import rope_frequencies
from ops.library import cpu_operators_are_loaded

MAX_COUNT = 2**24  # entries of a list, tensors, keys, positions; a broken count is above it
MAX_SIZE = 2**20  # of a width or a number of layers
FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}  # of a scalar, by its type
STRING, ARRAY = 8, 9
IN_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list: "a list",
}
STORED = ("F32", "F16", "BF16")
IN_CPP = ("Q4_0", "Q4_1", "Q8_0")  # types that ops/cpu/blocks.cpp knows
# torch warns of a mapping that cannot be written to; nothing writes to this one
warnings.filterwarnings("ignore", "The given NumPy array is not writable")
PIECE = 2**18  # values that are made of blocks at a time: they fit in the second-level cache
# LLaMA-3.1's and 3.2's; the file holds one number per frequency instead, from which `factor` is read
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
# of a mixture: where its router and experts are, and the matrices of an expert
MIXTRAL = ("block_sparse_moe.", {"ffn_gate": "w1", "ffn_down": "w2", "ffn_up": "w3"})
QWEN_MOE = ("mlp.", {"ffn_gate": "gate_proj", "ffn_down": "down_proj", "ffn_up": "up_proj"})
QWEN = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}
ENDS_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
)  # they end an answer whatever their type and the metadata; so in llama.cpp


# ------------------------------------------------------------------------------------------------ header


class Type(NamedTuple):
    """How a tensor is stored, in blocks."""

    name: str
    elements: int  # of a block
    size: int  # of a block (bytes)


TYPES = {  # by the number in the file. Source: the package gguf, GGML_QUANT_SIZES
    0: Type("F32", 1, 4), 1: Type("F16", 1, 2), 30: Type("BF16", 1, 2), 8: Type("Q8_0", 32, 34),
    2: Type("Q4_0", 32, 18), 3: Type("Q4_1", 32, 20), 6: Type("Q5_0", 32, 22), 7: Type("Q5_1", 32, 24),
    10: Type("Q2_K", 256, 84), 11: Type("Q3_K", 256, 110), 12: Type("Q4_K", 256, 144), 13: Type("Q5_K", 256, 176),
    14: Type("Q6_K", 256, 210),
}  # fmt: skip


class Info(NamedTuple):
    """Where a tensor is."""

    type_id: int
    shape: tuple[int, ...]  # rows first
    offset: int  # from the start of the data (bytes)


class Metadata(dict):
    """Keys and values of a header."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def read(self, key: str, wanted: type, default: Any = ...) -> Any:
        """A value of the wanted type; `default` where the key is missing. Raises: ValueError for another type."""
        value = self.get(key, default)
        if value is ...:
            raise ValueError(f"{self.path}: the metadata {key} is missing; convert the model again")
        if (
            value is not default
            and type(value) is not wanted
            and (wanted, type(value)) != (float, int)
        ):
            raise ValueError(
                f"{self.path}: the metadata {key} must be {IN_WORDS[wanted]}, not {reprlib.repr(value)}"
            )
        return value

    def size(self, key: str, default: Any = ..., most: int = MAX_SIZE) -> Any:
        """A width or a number of things. Raises: ValueError for one that no model has."""
        value = self.read(key, int, default)
        if value is not default and not 1 <= value <= most:
            raise ValueError(f"{self.path}: the metadata {key} must be 1 to {most}; it is {value}")
        return value

    def positive(self, key: str, default: float) -> float:
        """A finite number above 0. Raises: ValueError for another one."""
        value = self.read(key, float, default)
        if not 0 < value < math.inf:
            raise ValueError(
                f"{self.path}: the metadata {key} must be a finite number above 0; it is {value}"
            )
        return value


class Header(NamedTuple):
    """What a file says before its data."""

    metadata: Metadata
    tensors: dict[str, Info]
    file: mmap.mmap  # all of it
    start: int  # of the tensors' data (bytes)


def read_header(path: Path) -> Header:
    """Read a file's metadata and the list of its tensors. Raises: ValueError for a file that is not whole."""
    try:
        facts = path.stat()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; check the path") from None
    return _read_once(path, facts.st_mtime_ns, facts.st_size)


@lru_cache(maxsize=2)  # loading asks for the weights, the tokenizer and the chat template
def _read_once(path: Path, changed: int, size: int) -> Header:
    try:
        with path.open("rb") as file:
            if not file.seek(0, 2):
                raise ValueError("it is empty")
            return _read_header(path, _Cursor(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; check its permissions") from None
    except (ValueError, struct.error) as error:
        reason = "it ends within its header" if isinstance(error, struct.error) else error
        raise ValueError(
            f"{path} is no GGUF file, or corrupt ({reason}); download it again"
        ) from None


def _read_header(path: Path, cursor: _Cursor) -> Header:
    magic, version = cursor.take("4sI")
    if magic != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    if version not in (2, 3):
        raise ValueError(
            f"version {version if version < 2**16 else 'of a big-endian file'} is not 2 or 3"
        )
    tensor_count, count = cursor.take("QQ")
    metadata, tensors = Metadata(path), {}
    for _ in range(cursor.fits(count, 13)):  # a key, a type and a byte are the least
        key, value = cursor.string(), cursor.value(*cursor.take("I"))
        metadata[_new(key, metadata)] = value
    for _ in range(cursor.fits(tensor_count, 32)):
        name, (dims,) = _new(cursor.string(), tensors), cursor.take("I")
        if not 1 <= dims <= 4:
            raise ValueError(f"{name} has {dims} dimensions")
        shape = cursor.take(f"{dims}Q")
        tensors[name] = Info(*cursor.take("I"), shape[::-1], *cursor.take("Q"))
    align = metadata.get("general.alignment", 32)
    if type(align) is not int or align < 1 or align & align - 1:
        raise ValueError(f"general.alignment must be a power of two; it is {reprlib.repr(align)}")
    return Header(metadata, tensors, cursor.file, -(-cursor.at // align) * align)


def _new(name: str, seen: dict) -> str:
    if name in seen:
        raise ValueError(f"it has {name} twice")
    return name


class _Cursor:
    """Reads a header from front to back."""

    def __init__(self, file: mmap.mmap):
        self.file, self.at = file, 0

    def take(self, form: str) -> tuple:
        """Values, as `struct` formats them. Raises: struct.error at the end of the file."""
        values = struct.unpack_from("<" + form, self.file, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def fits(self, count: int, size: int) -> int:
        """A count of things of at least `size` bytes. Raises: ValueError when the file cannot hold them."""
        if count > MAX_COUNT or count * size > len(self.file) - self.at:
            raise ValueError(f"a count of {count} at byte {self.at} is more than the file holds")
        return count

    def string(self) -> str:
        length = self.fits_bytes(*self.take("Q"))
        self.at += length
        return str(self.file[self.at - length : self.at], "utf-8")

    def strings(self, count: int) -> list[str]:
        """`string`, many times: vocabularies and merges have 100,000."""
        texts, file, at, size = [], self.file, self.at, len(self.file)
        read_length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            (length,) = read_length(file, at)
            begin = at + 8
            at = begin + length
            if at > size:
                self.at = begin
                self.fits_bytes(length)
            texts.append(str(file[begin:at], "utf-8"))
        self.at = at
        return texts

    def fits_bytes(self, length: int) -> int:
        """A length. Raises: ValueError when the file is shorter."""
        if length > len(self.file) - self.at:
            raise ValueError(
                f"a text of {length} bytes at byte {self.at} is more than the file holds"
            )
        return length

    def value(self, type_id: int) -> Any:
        """A scalar, a string, or a list of one of them. Raises: ValueError for another type."""
        if type_id == STRING:
            return self.string()
        if type_id in FORMATS:
            return self.take(FORMATS[type_id])[0]
        if type_id != ARRAY:
            raise ValueError(f"a value has the type {type_id} at byte {self.at}")
        type_id, count = self.take("IQ")
        if type_id == STRING:
            return self.strings(self.fits(count, 8))
        if type_id not in FORMATS:
            raise ValueError(f"a list has the type {type_id} at byte {self.at}")
        return list(
            self.take(f"{self.fits(count, struct.calcsize(FORMATS[type_id]))}{FORMATS[type_id]}")
        )


def chat_template_text(path: Path) -> str | None:
    """The chat template of a file, in Jinja; None where it has none."""
    return read_header(path).metadata.read("tokenizer.chat_template", str, None)


# ------------------------------------------------------------------------------------------------ tensors


class GgufFile(TensorSource):
    """The tensors of a GGUF file. Blocks are read as fp32."""

    makes_tensors = True

    def __init__(self, path: Path):
        """Read the header. Raises: ValueError for a file that is broken or not supported, or a missing package."""
        self.path = path
        self._header = header = read_header(path)
        architecture = header.metadata.read("general.architecture", str)
        if architecture not in ("llama", *QWEN):
            known = ", ".join(("llama", *QWEN))
            raise ValueError(
                f"{path}: the architecture {architecture} is not supported; supported are {known}"
            )
        if header.metadata.read("split.count", int, 0) > 1:
            raise ValueError(
                f"{path} is one of several parts; join them first: llama-gguf-split --merge"
            )
        self._sizes = {name: self._bytes(name, info) for name, info in header.tensors.items()}
        names = {name: TYPES[info.type_id].name for name, info in header.tensors.items()}
        if any(not _read_without_package(kind) for kind in names.values()):
            self._package()
        self.config = _config(header, names)
        self._add_rope_scaling()
        self.readers: dict[str, Callable[[], Tensor]] = {}
        for name in header.tensors:
            self.readers.update(self._readers(name))

    def _package(self) -> Any:
        """The package `gguf`, whose import takes 0.1 s. Raises: ValueError when it is missing."""
        try:
            import gguf
        except ImportError:
            raise ValueError(f"{self.path} needs the package gguf; run: pip install gguf") from None
        return gguf

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """As the base class. The C++ operator rounds to bfloat16."""
        read = self.readers.get(name)
        return partial(read, dtype=dtype)() if isinstance(read, partial) else super().read(name)

    def _bytes(self, name: str, info: Info) -> int:
        """The size of a tensor. Raises: ValueError for an unknown type, or when the file does not hold it whole."""
        elements = math.prod(info.shape)
        if info.type_id not in TYPES:
            known = ", ".join(kind.name for kind in TYPES.values())
            rule = f"has the type {_name_of(info.type_id)}, which is not one of {known}"
            raise ValueError(f"{self.path}: {name} {rule}; use another")
        _, block, size = TYPES[info.type_id]
        if not elements or info.shape[-1] % block:
            shape = list(info.shape)
            raise ValueError(
                f"{self.path}: {name} has the shape {shape}, which blocks of {block} do not fill"
            )
        end, whole = (
            self._header.start + info.offset + elements // block * size,
            len(self._header.file),
        )
        if end > whole:
            raise ValueError(
                f"{self.path} is truncated: {name} ends at byte {end} of {whole}; download it again"
            )
        return elements // block * size

    def _readers(self, name: str) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """The Hugging Face tensors in one of the file's, and how to read them. Names without a meaning stay."""
        shape, (stem, _, leaf) = self._header.tensors[name].shape, name.rpartition(".")
        part = re.fullmatch(r"blk\.(\d+)\.(\w+?)(_exps|\.\d+)?", stem)
        layer = f"model.layers.{part[1]}." if part else ""
        llama = self.config["architectures"][0] not in QWEN.values()
        moe, matrices = MIXTRAL if llama else QWEN_MOE
        if (
            part and part[3] and part[2] in matrices
        ):  # all experts of a layer, or in older files one
            experts = f"{layer}{moe}experts."
            if part[3] == "_exps":
                for expert in range(shape[0]):
                    yield (
                        f"{experts}{expert}.{matrices[part[2]]}.{leaf}",
                        partial(self._tensor, name, expert),
                    )
            else:
                yield (
                    f"{experts}{part[3][1:]}.{matrices[part[2]]}.{leaf}",
                    partial(self._tensor, name),
                )
        elif part and not part[3] and part[2] == "ffn_gate_inp":
            yield f"{layer}{moe}gate.{leaf}", partial(self._tensor, name)
        elif part and not part[3] and part[2] in LAYER:
            heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(part[2])
            read = partial(self._tensor, name, heads=self.config[heads] if heads and llama else 0)
            yield f"{layer}{LAYER[part[2]]}.{leaf}", read
        elif name != "rope_freqs.weight":
            yield f"{NAMES.get(stem, stem)}.{leaf}", partial(self._tensor, name)

    def _tensor(
        self, name: str, part: int | None = None, heads: int = 0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A tensor, or one part along its first dimension.

        heads: undo the order of rows that llama.cpp's rotation needs; dtype: as in `read`
        """
        info, size = self._header.tensors[name], self._sizes[name]
        shape, start = info.shape, self._header.start + info.offset
        if part is not None:
            shape, size = shape[1:], size // shape[0]
            start += part * size
        blocks = np.frombuffer(self._header.file, np.uint8, size, start)
        value = self._values(blocks, TYPES[info.type_id], dtype).view(shape)
        rows = shape[0]
        if heads and rows % (2 * heads) == 0:  # else the loader says what is wrong with the shape
            value = value.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(shape)
        return value

    def _values(self, blocks: np.ndarray, kind: Type, dtype: torch.dtype | None) -> Tensor:
        """blocks: uint8; dtype: as in `read`. Returns: [elements], in the file's own dtype, or fp32 for blocks."""
        type_name, block, size = kind
        if type_name in ("F32", "F16"):
            return torch.from_numpy(
                blocks.view({"F32": np.float32, "F16": np.float16}[type_name]).copy()
            )
        if type_name == "BF16":
            return torch.from_numpy(blocks.view(np.int16).copy()).view(torch.bfloat16)
        elements = len(blocks) // size * block
        if _read_without_package(type_name):
            rounded = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
            value = torch.empty(elements, dtype=rounded)
            torch.ops.gpt_eagle.widen_blocks(torch.from_numpy(blocks), type_name, value)
            return value
        value = np.empty(elements, np.float32)
        bytes_each = PIECE // block * size
        with np.errstate(all="ignore"):  # scales that are no numbers stay so
            for n, first in enumerate(range(0, len(blocks), bytes_each)):
                piece = blocks[None, first : first + bytes_each]
                value[n * PIECE : (n + 1) * PIECE] = self._widened(piece, type_name)
        return torch.from_numpy(value)

    def _widened(self, blocks: np.ndarray, type_name: str) -> np.ndarray:
        """blocks: [1, bytes] uint8, of the named type. Returns: [elements] fp32."""
        package = self._package()
        try:
            return package.quants.dequantize(blocks, package.GGMLQuantizationType[type_name])[0]
        except Exception as error:  # another version of the package may not know the type
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ValueError(
                f"{self.path}: the package gguf cannot read {type_name} ({reason}); update it"
            ) from None

    def _add_rope_scaling(self) -> None:
        """Read LLaMA-3's scaling from `rope_freqs.weight`. Raises: ValueError where it is of another kind."""
        if "rope_freqs.weight" not in self._header.tensors:
            return
        divisors = self._tensor("rope_freqs.weight").float()  # [E/2]
        if bool((divisors == 1).all()):
            return
        scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **LLAMA3}
        head = {"head_dim": self.config["head_dim"], "rope_theta": self.config["rope_theta"]}
        plain, scaled = (
            rope_frequencies(SimpleNamespace(**head, rope_scaling=how)) for how in (None, scaling)
        )
        if plain.shape != divisors.shape or not torch.allclose(
            plain / divisors, scaled, rtol=1e-4, atol=0
        ):
            raise ValueError(
                f"{self.path}: rope_freqs.weight is not LLaMA-3.1's scaling; use the original model"
            )
        self.config["rope_scaling"] = scaling


def _name_of(type_id: int) -> str:
    """What ggml calls a type that is refused, where the package `gguf` knows it."""
    try:
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(type_id).name
    except (ImportError, ValueError):
        return str(type_id)


def _read_without_package(type_name: str) -> bool:
    return type_name in STORED or type_name in IN_CPP and cpu_operators_are_loaded()


# ------------------------------------------------------------------------------------------------- config


def _config(header: Header, type_names: dict[str, str]) -> dict:
    """The metadata as a Hugging Face config.json. Raises: ValueError for what is missing, or cannot be.

    type_names: of every tensor
    """
    metadata, tensors = header.metadata, header.tensors
    architecture = metadata["general.architecture"]
    key = f"{architecture}.".__add__
    matrices = {type_names[name] for name, info in tensors.items() if len(info.shape) > 1}
    dtype = (
        "float32"
        if matrices == {"F32"}
        else "float16"
        if matrices <= {"F16", "F32"}
        else "bfloat16"
    )
    sizes = _sizes(header, key)
    windowed = metadata.get(key("attention.sliding_window")) != 0  # 0: none
    return sizes | {
        "architectures": [_architecture(architecture, "num_local_experts" in sizes)],
        "max_position_embeddings": metadata.size(key("context_length"), most=MAX_COUNT),
        "sliding_window": metadata.size(key("attention.sliding_window"), None, MAX_COUNT)
        if windowed
        else None,
        "use_sliding_window": windowed,
        "rms_norm_eps": metadata.positive(key("attention.layer_norm_rms_epsilon"), 1e-6),
        "rope_theta": metadata.positive(key("rope.freq_base"), 10000.0),
        "rope_scaling": _rope_scaling(metadata, key),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.read("tokenizer.ggml.bos_token_id", int, None),
        "eos_token_id": _eos_ids(metadata),
        "torch_dtype": dtype,
    }


def _sizes(header: Header, key: Callable[[str], str]) -> dict:
    """The widths and counts in config.json. key: adds the architecture. Raises: ValueError for impossible ones."""
    metadata, tensors = header.metadata, header.tensors
    size = lambda name, *default: metadata.size(key(name), *default)  # noqa: E731
    width, heads, layers = (
        size("embedding_length"),
        size("attention.head_count"),
        size("block_count"),
    )
    head_dim = size("attention.key_length", width // heads)
    kv_heads = size("attention.head_count_kv", heads)
    experts = size("expert_count") if metadata.get(key("expert_count")) else 0
    shape = tensors["token_embd.weight"].shape if "token_embd.weight" in tensors else ()
    rules = {
        "token_embd.weight must be [tokens, embedding_length]": len(shape) == 2
        and shape[-1] == width,
        "the file has fewer blocks than block_count": layers <= len(tensors),
        "expert_count must be at most 1024": experts <= 1024,
        "head_count_kv must divide head_count": heads % kv_heads == 0,
        "key_length must be even": head_dim > 0 and head_dim % 2 == 0,
        f"head_count times key_length must be at most {MAX_SIZE}": heads * head_dim <= MAX_SIZE,
        "the rotation of a part of a head is not supported": size("rope.dimension_count", head_dim)
        == head_dim,
        "values must be as wide as keys": size("attention.value_length", head_dim) == head_dim,
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(
                f"{metadata.path}: {rule}; convert the model again, or use the original"
            )
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": size("feed_forward_length"),
        "vocab_size": shape[0],
    } | (_experts(size, experts) if experts else {})


def _experts(size: Callable[..., Any], experts: int) -> dict:
    """The keys of a mixture. A file of a Qwen3-MoE has no dense layers, and its shares add up to 1, as in llama.cpp."""
    counts = {"num_local_experts": experts, "num_experts_per_tok": size("expert_used_count")}
    return counts | {
        "moe_intermediate_size": size("expert_feed_forward_length", None),
        "norm_topk_prob": True,
    }


def _architecture(name: str, has_experts: bool) -> str:
    return QWEN.get(name, "MixtralForCausalLM" if has_experts else "LlamaForCausalLM")


def _rope_scaling(metadata: Metadata, key: Callable[[str], str]) -> dict | None:
    """Raises: ValueError for a kind that is not supported, or a factor that cannot be."""
    kind = metadata.read(key("rope.scaling.type"), str, "linear")
    if kind not in ("none", "linear"):
        raise ValueError(
            f"{metadata.path}: RoPE scaling must be none, linear or LLaMA-3's; the file says {kind}"
        )
    names = [key("rope.scaling.factor"), key("rope.scale_linear")]  # the second in older files
    factors = [
        metadata.positive(name, 1.0) for name in names if metadata.get(name, 0) != 0
    ]  # 0: none
    factor = next(iter(factors), 1)
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1 else None


def _eos_ids(metadata: Metadata) -> list[int]:
    """The ids that end a sequence: of a text, and of a turn. Source: llama.cpp's list of vocabularies."""
    ids = [
        metadata.read(f"tokenizer.ggml.{role}_token_id", int, None)
        for role in ("eos", "eot", "eom")
    ]
    tokens = metadata.read("tokenizer.ggml.tokens", list, [])
    ids += [tokens.index(token) for token in ENDS_TURN if token in tokens]
    return list(dict.fromkeys(i for i in ids if i is not None))
