"""Broken inputs, made by a seeded generator: each ends in one line with exit status 2, soon, and takes no memory.

A case is a folder with a small model of which something is broken, and a command line. An input that turns out to be
harmless may run instead; then it must end well. `-m slow` runs thousands of cases.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import stat
import sys
import threading
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import generate
import hf.tokenizer
from cli import io
from helpers import GOLDEN
from hf import checkpoint
from hf.config import config_from, read_config
from hf.fields import FLAG, integer, key, positive, read_fields
from hf.tokenizer import Tokenizer
from hf.untrusted import limited_memory, load_pickle, read_untrusted, silence_stderr
from options import DEMO, GenerateConfig

LIMIT_S = 5  # of the processor, for one case; most take 20 ms
HANG_S = 60  # of the clock, on a busy machine
LIMIT_BYTES = 300 * 10**6  # by which the memory of the process may grow
MODELS = GOLDEN / "models"
DENSE, MOE, HEAD = (
    MODELS / name for name in ("target_llama_mha", "target_mixtral", "head_eagle12_mha")
)
TARGET3, HEAD3 = MODELS / "target_llama31_gqa8", MODELS / "head_eagle3"
RARE = {f.name for f in fields(GenerateConfig) if f.metadata["rare"]}
CHAIN = ("--tree", "chain:2")
IDS = ["--set", "prompt_ids=5,17,3", "--max_new_tokens", "3", "--device", "cpu"]
TEXT = [
    "--prompt",
    "def read_lines(path):",
    "--max_new_tokens",
    "3",
    "--device",
    "cpu",
    "--draft",
    "none",
]
JUNK = [
    None, True, False, 0, 1, -1, 3, 7, 64.0, 0.5, -0.5, 2**31, 2**62, 2**63, 10**30, 1e-320, 1e300, float("nan"),
    float("inf"), -float("inf"), "", "x", "64", "\ud800", "a\nb", [], {}, [[]], [1, "x"], [None], {"a": 1}, [2**70],
    "y" * 5000,
]  # fmt: skip
MODEL_KEYS = (
    "architectures", "attention_bias", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
    "intermediate_size", "max_position_embeddings", "mlp_bias", "model_type", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_scaling", "rope_theta", "tie_word_embeddings",
    "torch_dtype", "dtype", "vocab_size", "sliding_window", "use_sliding_window", "quantization_config",
    "rope_parameters", "stand_in",
)  # fmt: skip
HEAD_KEYS = (*MODEL_KEYS, "bias", "qkv_bias", "draft_inputs", "draft_sharpness")
HEAD3_KEYS = (
    "draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
    "eagle_config", "transformer_layer_config", "eagle_aux_hidden_state_layer_ids", "target_layer_ids",
)  # fmt: skip
ROPE_KEYS = (
    "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate",
)  # fmt: skip
TOKENIZER_KEYS = (
    "bos_token", "eos_token", "unk_token", "pad_token", "add_bos_token", "legacy", "added_tokens_decoder",
    "chat_template",
)  # fmt: skip


class Case(NamedTuple):
    """A command line in a folder that was made for it."""

    name: str
    argv: list[str]


# ---------------------------------------------------------------------------------------- the parts


def linked(source: Path, folder: Path) -> Path:
    """A copy of a model directory made of links."""
    folder.mkdir(parents=True)
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def put(file: Path, content: Any) -> Path:
    """Write bytes, text, or anything else as JSON, in place of a link."""
    file.unlink(missing_ok=True)
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        text = content if isinstance(content, str) else json.dumps(content)
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
    return file


def model(folder: Path, source: Path = DENSE) -> tuple[Path, dict]:
    """A target in `folder`, and its config."""
    return linked(source, folder / "m"), json.loads((source / "config.json").read_text())


def ids(path: Path, *more: str) -> list[str]:
    draft = () if "--draft" in more or "--eagle" in more else ("--draft", "none")
    return ["--checkpoint", str(path), *IDS, *draft, *more]


def said(value: Any) -> str:
    return re.sub(r"\s+", " ", repr(value))[:40]


def mangled(r: random.Random, content: bytes) -> bytes:
    """Bytes that were cut, flipped, doubled or replaced."""
    at = r.choice([r.randrange(len(content)), r.randrange(min(64, len(content)))])
    match r.randrange(6):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + bytes([content[at] ^ 1 << r.randrange(8)]) + content[at + 1 :]
        case 2:
            return content[:at] + r.randbytes(8) + content[at + 8 :]
        case 3:
            return content[:at] + content[at + r.randrange(1, 9) :]
        case 4:
            return content[:at] + b"\xff" * 8 + content[at + 8 :]
        case _:
            return r.choice(
                [
                    b"",
                    b"\0",
                    b"\n",
                    r.randbytes(100),
                    b"[" * 100_000,
                    b'{"a":' * 100_000,
                    b"\xff\xfe{}",
                ]
            )


@cache
def tokenizer_json() -> str:
    from test_tokenizer import build_json

    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"hostile-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    text = (build_json(folder) / "tokenizer.json").read_text()
    shutil.rmtree(folder)
    return text


@cache
def gguf_bytes() -> bytes:
    """The dense model's tensors under llama.cpp's names."""
    import gguf

    file = Path(os.environ.get("TMPDIR", "/tmp")) / f"hostile-{os.getpid()}.gguf"
    raw, writer = json.loads((DENSE / "config.json").read_text()), gguf.GGUFWriter(file, "llama")
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, raw["num_hidden_layers"])
    for name, tensor in load_file(DENSE / "model.safetensors").items():
        writer.add_tensor(names.get_name(name, (".weight",)), tensor.numpy())
    (
        writer.write_header_to_file(),
        writer.write_kv_data_to_file(),
        writer.write_tensors_to_file(),
        writer.close(),
    )
    content = file.read_bytes()
    file.unlink()
    return content


# ------------------------------------------------------------------------------------- the families


def config_value(r: random.Random, folder: Path) -> Case:
    """One key of a target's config.json is junk."""
    path, raw = model(folder, r.choice([DENSE, DENSE, MOE]))
    keys = (
        MODEL_KEYS
        if "num_local_experts" not in raw
        else (*MODEL_KEYS, "num_local_experts", "num_experts_per_tok")
    )
    key, value = r.choice(keys), r.choice(JUNK)
    put(path / "config.json", raw | {key: value})
    return Case(f"config {key} = {said(value)}", ids(path))


def config_shape(r: random.Random, folder: Path) -> Case:
    """Sizes that are plausible one by one and do not fit each other or the files."""
    path, raw = model(folder, r.choice([DENSE, MOE]))
    keys = [
        k for k, v in raw.items() if type(v) is int and k not in ("pretraining_tp", "bos_token_id")
    ]
    changed = {
        k: r.choice([1, 2, 3, 8, 15, 96, 97, 128, 160, 4096, 2**20, 2**24])
        for k in r.sample(keys, r.randint(1, 3))
    }
    put(path / "config.json", raw | changed)
    return Case(f"config {changed}", ids(path))


def config_rope(r: random.Random, folder: Path) -> Case:
    path, raw = model(folder)
    kind = r.choice(["linear", "llama3", "yarn", "default"])
    whole = {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    block = {"rope_type": kind} | whole | {"rope_theta": 1e4}
    key, value = r.choice([*ROPE_KEYS, "rope_theta"]), r.choice([*JUNK, 1.0, 4.0])
    put(
        path / "config.json",
        raw | {r.choice(["rope_scaling", "rope_parameters"]): block | {key: value}},
    )
    return Case(f"rope {kind} {key} = {said(value)}", ids(path))


@cache
def others_model(layout: str) -> tuple[dict, bytes]:
    """config.json and weights of the dense model as others quantize it."""
    from test_quantized_files import WHOLE, write_model

    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"hostile-{os.getpid()}-{layout}"
    write_model(folder, WHOLE[layout], DENSE)
    found = (
        json.loads((folder / "config.json").read_text()),
        (folder / "model.safetensors").read_bytes(),
    )
    shutil.rmtree(folder)
    return found


def others_value(r: random.Random, folder: Path) -> Case:
    """A checkpoint that others quantized, of which one key is junk."""
    layout = r.choice(["gptq", "awq", "packed", "fp8"])
    (path, _), (raw, weights) = model(folder), others_model(layout)
    put(path / "model.safetensors", weights)
    block = json.loads(json.dumps(raw["quantization_config"]))
    scheme = block.get("config_groups", {}).get("group_0", {})
    place = r.choice([block, scheme, scheme["weights"]] if scheme else [block])
    key, value = (
        r.choice([*place, "weight_block_size"] if layout == "fp8" else list(place)),
        r.choice(JUNK),
    )
    place[key] = value
    put(path / "config.json", raw | {"quantization_config": block})
    return Case(f"{layout} {key} = {said(value)}", ids(path))


def others_file(r: random.Random, folder: Path) -> Case:
    """The same with broken weights: the file, or a tensor."""
    layout = r.choice(["gptq", "awq", "packed", "fp8"])
    (path, _), (raw, weights) = model(folder), others_model(layout)
    put(path / "config.json", raw), put(path / "model.safetensors", weights)
    if r.random() < 0.5:
        return Case(f"{layout} {broken_safetensors(r, path)}", ids(path))
    tensors = load_file(path / "model.safetensors")
    name = r.choice([name for name in tensors if "_proj" in name])
    return Case(f"{layout} {edited(r, path, tensors, name)}", ids(path))


def generation_config(r: random.Random, folder: Path) -> Case:
    path, _ = model(folder)
    key, value = r.choice(["eos_token_id", "eos_token_id", "bos_token_id"]), r.choice(JUNK)
    put(path / "generation_config.json", {key: value} if r.random() < 0.9 else value)
    return Case(f"generation_config {key} = {said(value)}", ids(path))


def head_value(r: random.Random, folder: Path) -> Case:
    head, target, keys = r.choice(
        [(HEAD, DENSE, HEAD_KEYS), (HEAD3, TARGET3, (*HEAD_KEYS, *HEAD3_KEYS))]
    )
    path = linked(head, folder / "head")
    raw = json.loads((head / "config.json").read_text())
    key, value = r.choice(keys), r.choice(JUNK)
    put(path / "config.json", raw | {key: value})
    return Case(f"head {key} = {said(value)}", ids(target, "--eagle", str(path), *CHAIN))


def head_nested(r: random.Random, folder: Path) -> Case:
    """A version-3 head's config with a config inside, of which one key is junk."""
    path = linked(HEAD3, folder / "head")
    raw = json.loads((HEAD3 / "config.json").read_text())
    outer = r.choice(["transformer_layer_config", "eagle_config"])
    inner, keys = (raw, MODEL_KEYS) if outer[0] == "t" else ({}, HEAD3_KEYS[2:])
    key, value = r.choice(keys), r.choice(JUNK)
    put(path / "config.json", raw | {outer: inner | {key: value}})
    return Case(f"head {outer} {key} = {said(value)}", ids(TARGET3, "--eagle", str(path), *CHAIN))


def head_file(r: random.Random, folder: Path) -> Case:
    """A head's weights: the file, a tensor, or the list of drafted tokens."""
    source, target = r.choice([(HEAD, DENSE), (HEAD3, TARGET3)])
    path, tensors = linked(source, folder / "head"), load_file(source / "model.safetensors")
    argv = ids(target, "--eagle", str(path), *CHAIN)
    if r.random() < 0.5:
        return Case(f"head {broken_safetensors(r, path)}", argv)
    name = r.choice([*tensors, *(["d2t"] * 5 if "d2t" in tensors else [])])
    return Case(f"head {edited(r, path, tensors, name)}", argv)


def edited(r: random.Random, path: Path, tensors: dict[str, torch.Tensor], name: str) -> str:
    """Leave a tensor out of a model, or change its shape or type. Returns: the name of the edit."""
    whole = tensors.pop(name)
    edits = [
        None, whole[:-1], whole.flatten()[:0], whole.flatten()[0], torch.cat([whole, whole]), whole.flatten()[:, None],
        whole.to(torch.complex64), whole.bool(), whole.float(), whole.long() + 2**40, whole.long() - 2**40,
    ]  # fmt: skip
    number = r.randrange(len(edits))
    save_file(
        tensors | ({} if edits[number] is None else {name: edits[number].contiguous()}),
        path / "new",
    )
    put(path / "model.safetensors", (path / "new").read_bytes())
    return f"{name} edit {number}"


def tokenizer_value(r: random.Random, folder: Path) -> Case:
    path = linked(Path(DEMO), folder / "m")
    if json_file := r.random() < 0.5:
        (path / "tokenizer.model").unlink()
        put(path / "tokenizer.json", tokenizer_json())
    key, value = (
        r.choice(TOKENIZER_KEYS),
        r.choice([*JUNK, {"content": 5}, {"1": {"content": "x", "special": "y"}}]),
    )
    put(path / "tokenizer_config.json", {key: value})
    more = ["--chat"] if key == "chat_template" else []
    return Case(
        f"tokenizer_config {key} = {said(value)}, json {json_file}",
        ["--checkpoint", str(path), *TEXT, *more],
    )


def small_json(r: random.Random, folder: Path) -> Case:
    """A small JSON file that is mangled, or of another shape altogether."""
    path = linked(Path(DEMO), folder / "m")
    name = r.choice(["config.json", "generation_config.json", "tokenizer_config.json", "added_tokens.json",
                     "model.safetensors.index.json"])  # fmt: skip
    whole = {"weight_map": {"a": "model.safetensors"}} if "index" in name else {"a": 1}
    if name == "config.json":
        whole = json.loads((Path(DEMO) / name).read_text())
    content = r.choice(
        [*JUNK, "[" * 100_000, '{"a":' * 1000, mangled(r, json.dumps(whole).encode())]
    )
    if "index" in name and r.random() < 0.5:
        names = [
            "../../../etc/passwd",
            "\0",
            "x" * 300,
            "",
            ".",
            "/dev/zero",
            "model.safetensors/x",
            "\ud800",
        ]
        content = {
            "weight_map": r.choice([JUNK[r.randrange(len(JUNK))], {"a": r.choice([*JUNK, *names])}])
        }
    put(path / name, content if isinstance(content, (bytes, str)) else json.dumps(content))
    return Case(f"{name} = {said(content)}", ["--checkpoint", str(path), *TEXT])


def words(name: str, value: str) -> list[str]:
    """An option on the command line."""
    return ["--set", f"{name}={value}"] if name in RARE else [f"--{name}={value}"]


def number_flag(r: random.Random, folder: Path) -> Case:
    flags = ["max_new_tokens", "temperature", "top_k", "top_p", "seed", "num_samples", "batch_size", "context",
             "tree_depth", "tree_topk", "tree_size", "group_size"]  # fmt: skip
    flag = r.choice(flags)
    value = r.choice(["-1", "0", "1e3", "nan", "inf", "-inf", "1e400", "", "x", "0x10", "٣", "2147483648", str(2**62),
                      str(2**63), str(2**64), "9" * 30, "9" * 5000, "1" + "0" * 9, "100000", "1000000"])  # fmt: skip
    if flag == "num_samples" and len(value) in (6, 7):
        value = "-5"  # that many would be decoded
    more = ["--temperature", "1"] if flag in ("top_k", "top_p") else []
    more += ["--quant", "int4"] if flag == "group_size" else []
    head = ["--eagle", str(HEAD), *(["--tree", "dynamic"] if "tree" in flag else [])]
    argv = ids(
        DENSE, *(head if flag.startswith(("tree", "draft")) else ()), *more, *words(flag, value)
    )
    return Case(f"--{flag} {said(value)}", argv)


def text_flag(r: random.Random, folder: Path) -> Case:
    flag = r.choice(["checkpoint", "eagle", "draft_checkpoint", "tree", "prompt", "prompt_file", "prompt_ids", "system",
                     "chat", "device", "json", "trace", "profile", "inflate", "quant", "dtype"])  # fmt: skip
    value = r.choice(["", "\0", "a\0b", "x" * 300, "x" * 100_000, "\ud800", "caf\udce9", "a\nb\nc", "/", ".", "~", "/dev/full",
                      "/proc/self/mem", str(folder), "/dev/null/x", "\x1b[31m", "-", "5" * 5000, "1," * 1000, "3,-3", ","])  # fmt: skip
    if flag in ("json", "trace", "profile") and value.startswith(("/dev/f", "/proc")):
        value = str(folder)  # a version that renames over devices would destroy them
    base = ["--checkpoint", DEMO, *TEXT]
    if flag in ("prompt_file", "prompt_ids"):
        base = ["--checkpoint", DEMO, *TEXT[2:]]
    if flag in ("eagle", "tree"):
        base = base[:-2]
    if flag == "draft_checkpoint":
        base = [*base[:-2], "--draft", "model"]
    base += ["--chat", "llama2"] if flag == "system" else []
    return Case(f"--{flag} {said(value)}", [*base, *words(flag, value)])


def safetensors_file(r: random.Random, folder: Path) -> Case:
    path, _ = model(folder)
    (path / "model.safetensors.index.json").unlink()
    return Case(broken_safetensors(r, path), ids(path))


def broken_safetensors(r: random.Random, path: Path) -> str:
    """Break the weights of a model. Returns: the name of the edit."""
    content = (path / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    kind = r.randrange(4)
    if kind == 0:
        content = mangled(r, content)
    elif kind == 1:
        content = (
            r.choice([0, 1, 2**40, 2**63, size - 1, size + 1]).to_bytes(8, "little") + content[8:]
        )
    else:  # the header says something else
        header = json.loads(content[8 : 8 + size])
        name = r.choice(list(header))
        edit = r.choice([{"shape": [2**40, 2**40]}, {"shape": [-1]}, {"shape": []}, {"dtype": "X9"}, {"dtype": "F64"},
                         {"data_offsets": [0, 2**62]}, {"data_offsets": [5]}, {"shape": "x"}, {"dtype": "I64"}, {"shape": [0]}])  # fmt: skip
        header[name] = header[name] | edit if kind == 2 else r.choice(JUNK)
        text = json.dumps(header).encode("utf-8", "surrogatepass")
        content = len(text).to_bytes(8, "little") + text + content[8 + size :]
    put(path / "model.safetensors", content)
    return f"model.safetensors {kind} {len(content)} bytes"


class Evil:
    """A pickle of it calls something."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def bin_file(r: random.Random, folder: Path) -> Case:
    path, _ = model(folder)
    for file in path.glob("model.safetensors*"):
        file.unlink()
    file, tensors = path / "pytorch_model.bin", load_file(DENSE / "model.safetensors")
    first = "model.norm.weight"
    meant = {
        "whole": lambda: None,
        "empty": lambda: file.write_bytes(b""),
        "mangled": lambda: file.write_bytes(mangled(r, file.read_bytes())),
        "list": lambda: torch.save(list(tensors.values()), file),
        "nested": lambda: torch.save({"model": tensors}, file),
        "keys": lambda: torch.save({**tensors, r.choice([5, (1, 2), None, 1.5, True]): torch.ones(2)}, file),
        "strange name": lambda: torch.save({**tensors, "a\nb\n\x1b": torch.ones(2)}, file),
        "sparse": lambda: torch.save(tensors | {first: torch.ones(64).to_sparse()}, file),
        "csr": lambda: torch.save(tensors | {first: torch.ones(8, 8).to_sparse_csr()}, file),
        "meta": lambda: torch.save(tensors | {first: torch.ones(64, device="meta")}, file),
        "complex": lambda: torch.save(tensors | {first: torch.ones(64, dtype=torch.complex64)}, file),
        "quantized": lambda: torch.save(tensors | {first: torch.quantize_per_tensor(torch.ones(64), 0.1, 0, torch.qint8)}, file),
        "ragged": lambda: torch.save(tensors | {first: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, file),
        "parameters": lambda: torch.save({k: torch.nn.Parameter(v) for k, v in tensors.items()}, file),
        "views": lambda: torch.save({k: v.repeat(2, *[1] * (v.dim() - 1))[: len(v)] for k, v in tensors.items()}, file),
        "stretched": lambda: torch.save(tensors | {"lm_head.weight": torch.ones(1, 1).expand(2**30, 2**20)}, file),
        "legacy": lambda: torch.save(tensors, file, _use_new_zipfile_serialization=False),
        "call": lambda: file.write_bytes(pickle.dumps(Evil(os.getpid))),
        "call in zip": lambda: torch.save({**tensors, "x": Evil(print, "gotcha")}, file),
        "bytes": lambda: torch.save({**tensors, "x": Evil(bytearray, r.choice([10**9, 10**13]))}, file),
        "storage": lambda: torch.save({**tensors, "x": Evil(torch.FloatTensor, r.choice([10**9, 10**13]))}, file),
        "deep": lambda: file.write_bytes(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."),
        "other zip": lambda: zipfile.ZipFile(file, "w").writestr("a.txt", "text"),
        "text": lambda: file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5\n"),
        "directory": lambda: (file.unlink(), file.mkdir()),
    }  # fmt: skip
    kind = r.choice(list(meant))
    torch.save(tensors, file)
    meant[kind]()
    return Case(f"pytorch_model.bin {kind}", ids(path))


def sentencepiece_file(r: random.Random, folder: Path) -> Case:
    path = linked(Path(DEMO), folder / "m")
    content = mangled(r, (Path(DEMO) / "tokenizer.model").read_bytes())
    put(path / "tokenizer.model", content)
    return Case(f"tokenizer.model of {len(content)} bytes", ["--checkpoint", str(path), *TEXT])


def tokenizer_json_file(r: random.Random, folder: Path) -> Case:
    path = linked(Path(DEMO), folder / "m")
    (path / "tokenizer.model").unlink()
    kind, found = r.randrange(3), json.loads(tokenizer_json())
    if kind == 0:
        content = mangled(r, tokenizer_json().encode())
    elif kind == 1:  # one value anywhere
        node, trail = found, []
        while isinstance(node, (dict, list)) and node and (r.random() < 0.8 or not trail):
            key = r.choice(list(node) if isinstance(node, dict) else range(len(node)))
            trail.append((node, key))
            node = node[key]
        trail[-1][0][trail[-1][1]] = r.choice(JUNK)
        content = json.dumps(found, allow_nan=True)
    else:
        pattern = r.choice(
            [
                "(a+)+$",
                "(x+x+)+y",
                "((",
                "(?=(\\w+))\\1:",
                "(.*)*$",
                "\\p{Q}",
                "(?<=a+)b",
                "a{1000000}",
                "",
            ]
        )
        found["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        if r.random() < 0.5:
            found["model"] |= {"unk_token": "<none>", "vocab": {"a": 0}, "merges": []}
        content = found
    put(path / "tokenizer.json", content)
    argv = ["--checkpoint", str(path), *TEXT]
    argv[3] = r.choice(["a" * 40 + "!", "x" * 3000, "def f():", "\u0301" * 100])
    return Case(f"tokenizer.json {kind} {argv[3][:8]}", argv)


def prompt_file(r: random.Random, folder: Path) -> Case:
    row = r.choice(
        [
            *JUNK,
            {"turns": r.choice(JUNK)},
            {"turns": [r.choice(JUNK)]},
            {"turns": ["a", r.choice(JUNK)]},
        ]
    )
    text = json.dumps(row)
    name, content = r.choice([
        ("p.jsonl", text), ("p.jsonl", text + "\n" + '{"turns": ["a"]}'), ("p.jsonl", "[" * 1000), ("p.jsonl", "[" * 100_000),
        ("p.jsonl", '{"turns":' * 100_000), ("p.jsonl", "9" * 5000), ("p.jsonl", '{"turns": [' + "9" * 5000 + "]}"),
        ("p.jsonl", mangled(r, b'{"turns": ["a", "b"]}\n')), ("p.txt", r.choice(["", "\0", "\ufeff", "\n", " "])),
        ("p.txt", mangled(r, b"some text that goes on for longer than this")), ("p.txt", "word " * 100_000),
    ])  # fmt: skip
    file = put(folder / name, content)
    return Case(
        f"{name} = {said(content)}", ["--checkpoint", DEMO, *TEXT[2:], "--prompt_file", str(file)]
    )


def gguf_file(r: random.Random, folder: Path) -> Case:
    content = mangled(r, gguf_bytes()[: r.choice([3000, 10**9])])
    put(folder / "m.gguf", content)
    return Case(f"m.gguf of {len(content)} bytes", ids(folder / "m.gguf"))


def chat_template(r: random.Random, folder: Path) -> Case:
    path = linked(Path(DEMO), folder / "m")
    whole = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    texts = ["{% broken", "{{ 1/0 }}", "{{ 'x' * 10**12 }}", "{{ messages.__class__ }}", "", "{{ raise_exception('a\nb') }}",
             "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 10**10**10 }}", "\0", "{" * 10_000, "{% if x %}" * 1000,
             "{{" + "(" * 1000 + "1" + ")" * 1000 + "}}", mangled(r, whole.encode()), whole]  # fmt: skip
    content = r.choice(texts)
    put(path / "chat_template.jinja", content)
    return Case(f"chat template {said(content)}", ["--checkpoint", str(path), *TEXT, "--chat"])


FAMILIES: dict[Callable[[random.Random, Path], Case], int] = {
    config_value: 8, config_shape: 3, config_rope: 3, others_value: 3, others_file: 3, generation_config: 2, head_value: 4, head_nested: 2, head_file: 3,
    tokenizer_value: 4, small_json: 3, number_flag: 4, text_flag: 5, safetensors_file: 3, bin_file: 4,
    sentencepiece_file: 2, tokenizer_json_file: 4, prompt_file: 3, gguf_file: 2,
    chat_template: 2,
}  # fmt: skip
LEAST = {  # share of a family's cases that must be refused, else 3/4: some inputs turn out to be harmless
    generation_config: 0.3, chat_template: 0.4, head_file: 0.6, head_value: 0.5, head_nested: 0.5, config_rope: 0.6,
    others_value: 0.4,  # much that they say is about how they were made
    bin_file: 0.5,  # further tensors are noted
}  # fmt: skip
DECK = [family for family, share in FAMILIES.items() for _ in range(share)]


def case(number: int, folder: Path, seed: int = 0) -> Case:
    """The case of that number, made in an empty folder."""
    r = random.Random(f"{seed} {number}")
    return DECK[number % len(DECK)](r, folder)


# ------------------------------------------------------------------------------------------ running


class Outcome(NamedTuple):
    """The result of a case."""

    status: Any  # None: it ran
    out: str
    err: str
    seconds: float  # of the processor
    grown_bytes: int  # by which the peak memory lies above what there was before

    @property
    def fault(self) -> str:
        """The fault of this result, or an empty string."""
        lines = self.err.count("\n")
        if self.status == "late" or self.seconds > LIMIT_S:
            return "too long"
        if self.grown_bytes > LIMIT_BYTES:
            return "too much memory"
        if "Traceback" in self.err or self.status not in (None, 0, 2):
            return "traceback"
        if self.status == 2 and (
            lines != 1 or not self.err.startswith("generate.py: ") or len(self.err) > 3000
        ):
            return "not one line"
        if (
            self.status == 2 and "; " not in self.err
        ):  # the requirement and the value found stand before it
            return "no remedy"
        return ""


class Late(KeyboardInterrupt):
    """The time limit."""


def peak_bytes(reset: bool = False) -> int:
    """The peak of the memory of this process; from now on, with `reset`, where the system can do that."""
    with suppress(OSError):
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def attempt(case: Case) -> tuple[Any, float, int]:
    """Run a command line here. Returns: its exit status, seconds, growth of the memory."""

    def late(*_):
        raise Late

    before, status = peak_bytes(reset=True), None
    old, began = signal.signal(signal.SIGALRM, late), time.process_time()
    signal.alarm(HANG_S)
    try:
        generate.main(case.argv)
    except SystemExit as end:
        status = end.code
    except Late:
        status = "late"
    except BaseException:
        traceback.print_exc()
        status = "raised"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    return status, time.process_time() - began, peak_bytes() - before


def check(number: int, folder: Path, capfd) -> bool:
    """Make a case and run it here. Returns: whether it was refused."""
    folder.mkdir()
    made = case(number, folder)
    os.chdir(folder)  # some name files to write
    capfd.readouterr()
    status, seconds, grown = attempt(made)
    outcome = Outcome(status, *capfd.readouterr(), seconds, grown)
    assert not outcome.fault, f"case {number}, {made.name}: {outcome.fault}\n{outcome}\n{made.argv}"
    return outcome.status == 2


def check_family(family: Callable, numbers: range, folder: Path, capfd) -> None:
    """Run the cases of a family, of which enough must be refused."""
    mine = [number for number in numbers if DECK[number % len(DECK)] is family]
    refused = sum([check(number, folder / str(number), capfd) for number in mine])
    assert mine and refused >= LEAST.get(family, 0.75) * len(mine), (
        f"{refused} of {len(mine)} are refused"
    )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_broken_inputs_end_in_one_line(family, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)  # and back at the end
    check_family(family, range(300), tmp_path, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_thousands_of_broken_inputs_end_in_one_line(family, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_family(family, range(300, 3300), tmp_path, capfd)


# --------------------------------------------------------------------------------------- one by one


def refused(capfd, *argv: str) -> str:
    """The line that refuses a command line."""
    outcome = Outcome(attempt(Case("", list(argv)))[0], *capfd.readouterr(), 0, 0)
    assert outcome.status == 2 and not outcome.fault, outcome
    return outcome.err


def test_what_a_library_does_is_one_line(tmp_path, capfd):
    """A panic in Rust is a BaseException; Ctrl-C is not the file's fault, and a refusal of ours has its words already."""

    class Panic(BaseException):
        pass

    file = tmp_path / "file.bin"
    errors = (
        Panic("a\nb"),
        KeyError("x"),
        RecursionError("deep"),
        ValueError("\x1b[31m" + "x" * 5000),
    )
    for error in errors:
        with pytest.raises(ValueError) as caught, read_untrusted(file, "make it again"):
            os.write(2, b"thread panicked at lib.rs\n")
            warnings.warn("this will change", stacklevel=1)
            raise error
        assert re.fullmatch(
            rf"{file} is corrupt, .* \([^\n\x1b]{{1,350}}\); make it again", str(caught.value)
        )
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        with (
            pytest.raises(ValueError, match="file.bin needs more memory than there is; free some"),
            read_untrusted(file),
        ):
            raise error
    for error in (KeyboardInterrupt(), ValueError(f"{file} is too small; use another")):
        with pytest.raises(type(error)) as caught, read_untrusted(file):
            raise error
        assert caught.value is error
    os.write(2, b"heard again")
    assert capfd.readouterr() == ("", "heard again")


def test_without_a_standard_error(tmp_path, monkeypatch):
    """`2>&-`: Python has none, and 2 may be any file of ours."""
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(ValueError, match="x is corrupt, .*deep"), read_untrusted(tmp_path / "x"):
        raise RecursionError("deep")
    assert read_config(DENSE).n_layers and Tokenizer.load(Path(DEMO)).encode("a")


def test_our_own_bugs_are_no_corrupt_files(tmp_path, monkeypatch):
    """They keep their traceback."""

    def broken(*_):
        raise AttributeError("a bug of ours")

    put(tmp_path / "tokenizer.json", tokenizer_json())
    monkeypatch.setattr(Tokenizer, "__init__", broken)
    for path in (Path(DEMO), tmp_path):
        with pytest.raises(AttributeError, match="a bug of ours"):
            Tokenizer.load(path)
    monkeypatch.setattr(checkpoint.WeightFiles, "_open_safetensors", broken)
    with pytest.raises(AttributeError, match="a bug of ours"):
        checkpoint.WeightFiles(DENSE)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_a_broken_file_is_named_once(tmp_path, capfd, name):
    path = linked(Path(DEMO), tmp_path / "m")
    put(path / name, "{")
    said = refused(capfd, "--checkpoint", str(path), *TEXT)
    assert said.count(name) == 1 and "is not valid JSON" in said and said.count("; ") == 1


def test_what_a_config_may_leave_out(tmp_path, capfd):
    path, raw = model(tmp_path)
    for bos in (-1, None):
        assert config_from(raw | {"bos_token_id": bos}, "LlamaForCausalLM").bos_id is None
    for name, wanted in (
        ("Qwen2ForCausalLM", 512),
        ("Qwen3ForCausalLM", 512),
        ("MistralForCausalLM", 16),
    ):
        said = raw | {"max_position_embeddings": 512, "sliding_window": 16}
        assert config_from(said, name).max_context == wanted
        assert config_from(said | {"use_sliding_window": True}, name).max_context == 16
    put(path / "config.json", raw | {"rope_scaling": {"rope_type": "longrope"}})
    assert "it is longrope; use another checkpoint\n" in refused(capfd, *ids(path))


def test_threads_leave_standard_error_and_the_limits_as_they_were(capfd):
    limits = resource.getrlimit(resource.RLIMIT_DATA)

    def work() -> None:
        for _ in range(50):
            with silence_stderr(), limited_memory(10**9):
                os.write(2, b"noise")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(2, b"heard again")
    assert (
        capfd.readouterr().err == "heard again"
        and resource.getrlimit(resource.RLIMIT_DATA) == limits
    )


@dataclass(frozen=True)
class Declared:
    """Keys for the next test."""

    size: int = key(integer(1, 8))
    share: float = key(positive(2), 1.0)
    flag: bool = key(FLAG, False)


def test_declared_keys():
    assert read_fields({"size": 8, "share": None, "other": "x"}, Declared) == Declared(
        8, 1.0, False
    )
    assert read_fields({"size": 1, "share": 2, "flag": True}, Declared) == Declared(1, 2, True)
    for raw, words in (
        ({}, "the key 'size' is missing"),
        ({"size": None}, "the key 'size' is missing"),
        *(
            ({"size": v}, "size must be a whole number from 1 to 8; it is")
            for v in (0, 9, -1, True, 1.0, "1", [], {})
        ),
        *(
            ({"size": 1, "share": v}, "share must be a number above 0")
            for v in (0, -1.0, 3, float("nan"), True, "1")
        ),
        *(
            ({"size": 1, "flag": v}, "flag must be true or false; it is")
            for v in (0, 1, "true", [])
        ),
    ):
        with pytest.raises(ValueError, match=words):
            read_fields(raw, Declared)


def test_a_plan_that_does_not_fit_gets_its_sum(capfd, tmp_path):
    said = refused(capfd, *ids(DENSE, "--batch_size", "2000000000"))
    assert re.search(
        r"the caches \d+\.\d GB \+ .* = \d+\.\d GB of memory are needed, \d+\.\d GB are free, \d+\.\d GB are missing, enough for \d+ of the 2000000000 sequences; lower",
        said,
    )
    path, raw = model(tmp_path)
    put(
        path / "config.json",
        raw | {"vocab_size": 2**24, "hidden_size": 2**20, "num_attention_heads": 2**10},
    )
    for more, remedy in (((), "model or --quant"), (("--quant", "int8"), "model")):
        said = refused(capfd, *ids(path, *more))
        assert (
            f"the weights of {path}, by its config, " in said and "GB of memory are needed" in said
        )
        assert said.endswith(f"; use a smaller {remedy}\n")


@pytest.mark.parametrize("call", [bytearray, torch.FloatTensor, torch.UntypedStorage])
def test_a_pickle_takes_no_memory(tmp_path, call):
    """weights_only lets it make any of these."""
    torch.save({"x": Evil(call, 10**9)}, tmp_path / "x.pt")
    before = peak_bytes(reset=True)
    with pytest.raises(ValueError, match="x.pt is corrupt"), read_untrusted(tmp_path / "x.pt"):
        load_pickle(tmp_path / "x.pt", mmap=True)
    assert peak_bytes() - before < LIMIT_BYTES
    torch.save({"x": torch.arange(3)}, tmp_path / "x.pt")
    assert load_pickle(tmp_path / "x.pt", mmap=True)["x"].tolist() == [0, 1, 2]


def test_an_endless_regular_expression_ends(tmp_path, monkeypatch):
    found = json.loads(tokenizer_json())
    found["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "a*a*a*b|a"}, "behavior": "Isolated", "invert": False
    }  # fmt: skip
    put(tmp_path / "tokenizer.json", found)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a" * 20)
    monkeypatch.setattr(hf.tokenizer, "SPLIT_S", 0.05)
    with pytest.raises(
        ValueError,
        match="tokenizer.json .*it takes more than .* to split the text.*; use --set prompt_ids",
    ):
        tokenizer.encode("a" * 250)


def test_a_disk_is_no_text(tmp_path, monkeypatch):
    file = put(tmp_path / "disk", "text")
    assert io.read_text(file) == "text"
    monkeypatch.setattr(Path, "stat", lambda *_: os.stat_result([stat.S_IFBLK | 0o600, *[0] * 9]))
    with pytest.raises(ValueError, match="disk is a device; name a file"):
        io.read_text(file)


def test_texts_that_are_none(capfd):
    assert "half a character" in refused(
        capfd, "--checkpoint", DEMO, "--prompt", "a\ud800", *TEXT[2:]
    )
    assert "/dev/zero is a device" in refused(
        capfd, "--checkpoint", DEMO, "--prompt_file", "/dev/zero", *TEXT[2:]
    )
    assert "--json has a character" in refused(capfd, "--checkpoint", DEMO, *TEXT, "--json", "a\0b")
    assert "File name too long" in refused(
        capfd, "--checkpoint", DEMO, *TEXT, "--set", "trace=" + "x" * 254
    )
    engine = generate.load(checkpoint=str(DENSE), device="cpu", draft="none")
    with pytest.raises(ValueError, match="takes a list of prompts"):
        generate.generate(engine, "a text")
