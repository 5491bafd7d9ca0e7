"""Broken files, made by one seeded generator: each ends in one line that names it, soon, and takes no memory.

A case is a small valid file of one kind, broken at one place, and the command line that reads it. A case that turns
out to be harmless may run instead: then with the text of the valid file, unless another value was written that a valid
file could hold, too. `-m slow` runs thousands of cases.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import re
import resource
import signal
import stat
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load, load_file, save
from test_quantized_files import WHOLE, write_model
from test_tokenizer import build_json

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

LIMIT_S = 5  # of the processor, for one case; most take 20 ms. Then it is ended
LIMIT_BYTES = 300 * 10**6  # by which the memory of the process may grow
MODELS = GOLDEN / "models"
DENSE, MOE, HEAD = (
    MODELS / name for name in ("target_llama_mha", "target_mixtral", "head_eagle12_mha")
)
TARGET3, HEAD3 = MODELS / "target_llama31_gqa8", MODELS / "head_eagle3"
SHORT = ["--max_new_tokens", "3", "--device", "cpu"]
IDS = ["--set", "prompt_ids=5,17,3", *SHORT]
TEXT = ["--prompt", "def read_lines(path):", *SHORT, "--draft", "none"]

# ------------------------------------------------------------------------------------ the generator

JUNK = [
    None, True, False, 0, 1, -1, 3, 64.0, 0.5, -0.5, 2**31, 2**62, 2**63, 10**30, 1e-320, 1e300, float("nan"), float("inf"),
    -float("inf"), "", "x", "64", "\ud800", "a\nb", "\0", "../../../etc/passwd", "/dev/zero", "x" * 300, [], {}, [[]],
    [1, "x"], [None], {"a": 1}, [2**70], [0, 2**62], [-1], [2**40, 2**40], "y" * 5000,
]  # fmt: skip
BYTES = [
    b"", b"\0", b"\n", b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"version https://git-lfs\n",
]  # fmt: skip
# keys that no small file here has, and that are read
MORE_KEYS = {
    "config.json": [
        "attention_bias", "head_dim", "mlp_bias", "quantization_config", "rope_parameters", "rope_theta", "sliding_window",
        "use_sliding_window", "dtype", "bias", "qkv_bias", "draft_inputs", "draft_sharpness", "fc_norm",
        "draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "norm_output", "eagle_config",
        "transformer_layer_config", "target_layer_ids", "eagle_aux_hidden_state_layer_ids",
    ],
    "tokenizer_config.json": [
        "bos_token", "unk_token", "pad_token", "legacy", "chat_template", "added_tokens_decoder",
    ],
}  # fmt: skip
PATTERNS = [
    "(a+)+$", "(x+x+)+y", "((", "(?=(\\w+))\\1:", "(.*)*$", "\\p{Q}", "(?<=a+)b", "a{1000000}", "",
]  # fmt: skip


class Broken(NamedTuple):
    """The content of a broken file."""

    how: str
    content: bytes
    exact: bool = False  # where it runs, it must give the text of the valid one


def broken_bytes(r: random.Random, content: bytes) -> Broken:
    """Cut, flip, overwrite or leave out bytes, most often at the beginning, or replace them all."""
    at = r.randrange(r.choice([64, 3000, 10**9, len(content)]) % len(content) or len(content))
    match r.randrange(6):
        case 0:
            return Broken(f"cut at {at}", content[:at], exact=True)
        case 1:
            flipped = bytes([content[at] ^ 1 << r.randrange(8)])
            return Broken(f"a bit at {at}", content[:at] + flipped + content[at + 1 :])
        case 2:
            return Broken(f"noise at {at}", content[:at] + r.randbytes(8) + content[at + 8 :])
        case 3:
            return Broken(f"a gap at {at}", content[:at] + content[at + r.randrange(1, 9) :])
        case 4:
            return Broken(f"a huge count at {at}", content[:at] + b"\xff" * 8 + content[at + 8 :])
    new = r.choice(BYTES)
    return Broken(f"only {new[:20]}", new)


def broken_json(r: random.Random, content: bytes, more: list[str] = ()) -> Broken:
    """Put junk in the place of one value anywhere, of a missing key, or of everything; or break the bytes.

    more: keys that may be added
    """
    kind = r.randrange(14)
    if kind == 0:
        return broken_bytes(r, content)._replace(exact=False)  # what is left may be valid
    value = r.choice(JUNK)
    # any other may stand for the default, or be another valid value
    exact = isinstance(value, (str, dict)) or value != value or value in (math.inf, -math.inf)
    if kind == 1:
        return Broken("too deep", r.choice([b"[", b'{"a":']) * 100_000)
    if kind == 2:
        return Broken(f"only {str(value)[:20]!r}", json.dumps(value).encode(), exact)
    found = json.loads(content)
    node, place = found, r.choice(more) if more and kind < 7 else None
    while place is None:
        inner = r.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if isinstance(node[inner], (dict, list)) and node[inner] and r.random() < 0.8:
            node = node[inner]
        else:
            place = inner
    node[place] = value
    how = f"{place} = {str(value)[:20]!r}"
    if kind == 7 and isinstance(found, dict) and node is found:
        # a second value of the same name
        twice = json.dumps(found)[:-1] + f", {json.dumps(place)}: {json.dumps(r.choice(JUNK))}}}"
        return Broken(f"{how}, twice", twice.encode())
    return Broken(how, json.dumps(found).encode(), exact)


def broken_safetensors(r: random.Random, content: bytes) -> Broken:
    """Break the bytes, the length of the header, the header, or a tensor."""
    size = int.from_bytes(content[:8], "little")
    kind = r.randrange(4)
    if kind == 0:
        return broken_bytes(r, content)
    if kind == 1:
        length = r.choice([0, 1, 2**40, 2**63, size - 1, size + 1])
        new = length.to_bytes(8, "little") + content[8:]
        return Broken(f"a header of {length}", new, exact=True)
    if kind == 2:
        how, header, exact = broken_json(r, content[8 : 8 + size])
        return Broken(how, len(header).to_bytes(8, "little") + header + content[8 + size :], exact)
    tensors = load(content)
    name = r.choice([name for name in tensors if re.search("_proj|norm|d2t", name)])
    whole = tensors.pop(name)
    edits = [
        None, whole[:-1], whole.flatten()[:0], whole.flatten()[0], torch.cat([whole, whole]), whole.flatten()[:, None],
        whole.to(torch.complex64), whole.bool(), whole.long() + 2**40, whole.long() - 2**40,
    ]  # fmt: skip
    number = r.randrange(len(edits))
    if edits[number] is not None:
        tensors[name] = edits[number].contiguous()
    return Broken(f"{name} edit {number}", save(tensors))


class Evil:
    """A pickle of it calls something."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def pickled(value: Any, **options: Any) -> bytes:
    file = BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def broken_pickle(r: random.Random, content: bytes) -> Broken:
    """Break the bytes, or save tensors of other kinds, other values, or calls."""
    tensors = load_file(DENSE / "model.safetensors")
    one, norm = torch.ones(64), "model.norm.weight"
    values = {
        "a list": list(tensors.values()),
        "a dict in it": {"model": tensors},
        "a key": {**tensors, r.choice([5, (1, 2), None, 1.5, True]): one},
        "a strange name": {**tensors, "a\nb\n\x1b": one},
        "sparse": tensors | {norm: one.to_sparse()},
        "csr": tensors | {norm: torch.ones(8, 8).to_sparse_csr()},
        "meta": tensors | {norm: torch.ones(64, device="meta")},
        "complex": tensors | {norm: one.to(torch.complex64)},
        "quantized": tensors | {norm: torch.quantize_per_tensor(one, 0.1, 0, torch.qint8)},
        "ragged": tensors | {norm: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
        "stretched": tensors | {"lm_head.weight": torch.ones(1, 1).expand(2**30, 2**20)},
        "a call": {**tensors, "x": Evil(print, "gotcha")},
        "bytes": {**tensors, "x": Evil(bytearray, r.choice([10**9, 10**13]))},
        "storage": {**tensors, "x": Evil(torch.FloatTensor, r.choice([10**9, 10**13]))},
    }
    how = r.choice([*values, "flat", "deep", "of old versions", *["bytes of the file"] * 6])
    if how == "bytes of the file":
        return broken_bytes(r, content)
    if how == "flat":
        return Broken(how, pickle.dumps(Evil(os.getpid)))
    if how == "deep":
        return Broken(how, b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".")
    if how == "of old versions":
        return Broken(how, pickled(tensors, _use_new_zipfile_serialization=False))
    return Broken(how, pickled(values[how]))


def broken_pattern(r: random.Random, content: bytes) -> Broken:
    """Break the tokenizer.json, or give it a pattern that takes long or is none."""
    if r.random() < 0.7:
        return broken_json(r, content)
    found, pattern = json.loads(content), r.choice(PATTERNS)
    split = {"type": "Split", "pattern": {"Regex": pattern}}
    split |= {"behavior": "Isolated", "invert": False}
    return Broken(f"the pattern {pattern}", json.dumps(found | {"pre_tokenizer": split}).encode())


@cache
def gguf_bytes(folder: Path) -> bytes:
    """The dense model's tensors under llama.cpp's names."""
    import gguf

    raw, writer = config_of(DENSE), gguf.GGUFWriter(folder / "g", "llama")
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, raw["num_hidden_layers"])
    for name, tensor in load_file(DENSE / "model.safetensors").items():
        writer.add_tensor(names.get_name(name, (".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return (folder / "g").read_bytes()


# ------------------------------------------------------------------------------- the kinds of files


def linked(source: Path, folder: Path) -> Path:
    """A copy of a model directory made of links."""
    folder.mkdir(parents=True)
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def put(file: Path, content: Any) -> Path:
    """Write bytes, text, or anything else as JSON, in place of a link."""
    file.unlink(missing_ok=True)
    if not isinstance(content, bytes):
        text = content if isinstance(content, str) else json.dumps(content)
        content = text.encode("utf-8", "surrogatepass")
    file.write_bytes(content)
    return file


def tokenizer_json(folder: Path) -> str:
    return (build_json(folder) / "tokenizer.json").read_text()


def config_of(source: Path, **more: Any) -> dict:
    return json.loads((source / "config.json").read_text()) | more


class Kind(NamedTuple):
    """A kind of files: a folder with a valid one, and the command line that reads it."""

    source: Path | str  # a model directory, or a layout that others quantize to
    name: str  # of the file
    breaks: Callable[[random.Random, bytes], Broken]
    argv: list[str] = ["--checkpoint", "{}", *IDS, "--draft", "none"]  # {}: the folder
    content: Callable[[Path], Any] | None = None  # None: as in the source; gets an empty folder
    without: str = ""  # files of the source that are left out

    def make(self, folder: Path) -> None:
        """Make a folder with the valid file."""
        if isinstance(self.source, str):
            write_model(folder, WHOLE[self.source], DENSE)
            return
        linked(self.source, folder)
        for file in folder.glob(self.without) if self.without else ():
            file.unlink()
        if self.content is not None:
            (folder / "empty").mkdir()
            put(folder / self.name, self.content(folder / "empty"))


def of_head(target: Path) -> list[str]:
    return ["--checkpoint", str(target), "--head", "{}", *IDS, "--tree", "static"]


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
        "attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": True}  # fmt: skip
NESTED = {"transformer_layer_config": config_of(HEAD3), "eagle_config": {"fc_norm": False}}
PROMPTS = ["--checkpoint", DEMO, "--prompt_file", "{}/p.jsonl", *SHORT, "--draft", "none"]
DEMO_TEXT = ["--checkpoint", "{}", *TEXT]
demo, others = Path(DEMO), ("gptq", "awq", "packed", "fp8")
KINDS = {
    "config": Kind(DENSE, "config.json", broken_json),
    "config of experts": Kind(MOE, "config.json", broken_json),
    "config with yarn": Kind(DENSE, "config.json", broken_json, content=lambda _: config_of(DENSE, rope_scaling=YARN)),
    "config with llama3's rope": Kind(TARGET3, "config.json", broken_json),
    "generation_config": Kind(DENSE, "generation_config.json", broken_json, content=lambda _: {"eos_token_id": [2], "bos_token_id": 1}),
    "safetensors": Kind(DENSE, "model.safetensors", broken_safetensors, without="*.index.json"),
    "index": Kind(DENSE, "model.safetensors.index.json", broken_json),
    "bin": Kind(DENSE, "pytorch_model.bin", broken_pickle, without="model.*",
                content=lambda _: pickled(load_file(DENSE / "model.safetensors"))),
    "head's config": Kind(HEAD, "config.json", broken_json, of_head(DENSE)),
    "head 3's config": Kind(HEAD3, "config.json", broken_json, of_head(TARGET3)),
    "head 3's nested config": Kind(HEAD3, "config.json", broken_json, of_head(TARGET3), lambda _: config_of(HEAD3, **NESTED)),
    "head's weights": Kind(HEAD, "model.safetensors", broken_safetensors, of_head(DENSE)),
    "head 3's weights": Kind(HEAD3, "model.safetensors", broken_safetensors, of_head(TARGET3)),
    "GGUF": Kind(DENSE, "m.gguf", broken_bytes, ["--checkpoint", "{}/m.gguf", *IDS, "--draft", "none"], gguf_bytes),
    "tokenizer.model": Kind(demo, "tokenizer.model", broken_bytes, DEMO_TEXT),
    "tokenizer.json": Kind(demo, "tokenizer.json", broken_pattern, DEMO_TEXT, tokenizer_json, "tokenizer.model"),
    "tokenizer_config": Kind(demo, "tokenizer_config.json", broken_json, DEMO_TEXT, lambda _: {"eos_token": "</s>", "add_bos_token": True}),
    "added tokens": Kind(demo, "added_tokens.json", broken_json, DEMO_TEXT, lambda _: {"<x>": 5}),
    "chat template": Kind(demo, "chat_template.jinja", broken_bytes, [*DEMO_TEXT, "--chat"],
                          lambda _: "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"),
    "prompts": Kind(demo, "p.jsonl", broken_json, PROMPTS, lambda _: {"turns": ["a", "b"]}),
    **{f"config of {name}": Kind(name, "config.json", broken_json) for name in others},
    **{f"weights of {name}": Kind(name, "model.safetensors", broken_safetensors) for name in others},
}  # fmt: skip

# ------------------------------------------------------------------------------------------ running


class Outcome(NamedTuple):
    """The result of a command line."""

    status: Any  # 0: it ran
    out: str  # the text
    err: str
    seconds: float  # of the processor
    grown_bytes: int  # by which the peak of the memory lies above what there was before

    def fault(self, valid: str | None) -> str:
        """The fault of this result, or an empty string. valid: the text that it must give, if it runs"""
        if self.seconds > LIMIT_S:
            return "too long"
        if self.grown_bytes > LIMIT_BYTES:
            return "too much memory"
        if self.status not in (0, 2) or "Traceback" in self.err:
            return "traceback"
        if self.status == 0:
            return "another text" if valid not in (None, self.out) else ""
        line = re.sub("^note: .*\n", "", self.err)
        if not re.fullmatch("generate.py: .{,3000}\n", line):
            return "not one line"
        return "" if "; " in line else "no remedy"


def peak_bytes(reset: bool = False) -> int:
    """The peak of the memory of this process; from now on, with `reset`, where the system can do that."""
    with suppress(OSError):
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def attempt(argv: list[str], capfd) -> Outcome:
    """Run a command line here."""

    def late(*_):
        raise KeyboardInterrupt

    capfd.readouterr()
    before, status = peak_bytes(reset=True), 0
    old, began = signal.signal(signal.SIGPROF, late), time.process_time()
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        generate.main(argv)
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = "raised"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
    seconds = time.process_time() - began
    grown_bytes = peak_bytes() - before
    out, err = capfd.readouterr()
    return Outcome(status, re.sub(".*tokens/s.*", "", out), err, seconds, grown_bytes)


# any text may be a valid one in these
HOLD_TEXTS = {
    "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "p.jsonl", "chat_template.jinja",
}  # fmt: skip
# what a file without a fault may still lead to, in a line that does not name it
LATER = "the prompt is empty|numbers are not finite|the prompt has .* tokens|GB of memory are needed|half a character"

some = pytest.mark.parametrize(
    "numbers", [range(16), pytest.param(range(16, 200), marks=pytest.mark.slow)], ids=str
)


@some
@pytest.mark.parametrize("name", KINDS)
def test_broken_files_end_in_one_line(name, numbers, tmp_path, capfd):
    kind = KINDS[name]
    kind.make(tmp_path / "valid")

    def run(folder: Path) -> Outcome:
        return attempt([part.replace("{}", str(folder)) for part in kind.argv], capfd)

    valid, refused = run(tmp_path / "valid"), 0
    assert valid.status == 0, valid
    content = (tmp_path / "valid" / kind.name).read_bytes()
    breaks = kind.breaks
    if breaks is broken_json:
        breaks = partial(broken_json, more=MORE_KEYS.get(kind.name, []))
    for number in numbers:
        r = random.Random(f"{name} {number}")
        broken = breaks(r, content)
        folder = linked(tmp_path / "valid", tmp_path / str(number))
        put(folder / kind.name, broken.content)
        found = run(folder)
        fault = found.fault(valid.out if broken.exact and kind.name not in HOLD_TEXTS else None)
        if found.status == 2 and not re.search(f"{folder}|{kind.name}|{LATER}", found.err):
            fault = fault or "not named"
        assert not fault, f"{name} {number}, {broken.how}: {fault}\n{found}"
        refused += found.status == 2
    assert refused >= len(numbers) / 4, f"{refused} of {len(numbers)} are refused"


VALUES = [
    "-1", "0", "1e3", "nan", "inf", "1e400", "", "x", "0x10", "٣", "2147483648", str(2**63), "9" * 5000, "\0", "a\0b", "x" * 300,
    "x" * 100_000, "\ud800", "caf\udce9", "a\nb\nc", "/", ".", "~", "/proc/self/mem", "/dev/null/x", "\x1b[31m",
    "1," * 1000, "3,-3", ",",
]  # fmt: skip


@some
def test_broken_values_of_options_end_in_one_line(numbers, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some name files to write
    for field in fields(GenerateConfig):
        r = random.Random(f"{field.name} {numbers}")
        for value in r.sample(VALUES, min(len(VALUES), len(numbers) // 4)):
            base = DEMO_TEXT if field.name not in ("prompt_file", "prompt_ids") else PROMPTS
            if field.name == "interactive":
                continue  # it would read this terminal
            given = [f"--{field.name}={value}"]
            if field.metadata["rare"]:
                given = ["--set", f"{field.name}={value}"]
            found = attempt([*base, *given], capfd)
            assert not found.fault(None), f"{field.name} {value[:40]!r}: {found}"


# --------------------------------------------------------------------------------------- one by one


def refused(capfd, *argv: Any) -> str:
    """The line that refuses a command line."""
    found = attempt([*map(str, argv)], capfd)
    assert found.status == 2 and not found.fault(None), found
    return found.err


def of(path: Path) -> list[str]:
    return ["--checkpoint", str(path), *IDS, "--draft", "none"]


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

    put(tmp_path / "tokenizer.json", tokenizer_json(tmp_path))
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


def test_an_added_token_has_a_whole_number(tmp_path, capfd):
    path = linked(Path(DEMO), tmp_path / "m")
    put(path / "added_tokens.json", {"<x>": float("inf")})
    assert "the added tokens are malformed" in refused(capfd, "--checkpoint", path, *TEXT)


def test_what_a_config_may_leave_out(tmp_path, capfd):
    path, raw = linked(DENSE, tmp_path / "m"), config_of(DENSE)
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
    assert "it is longrope; use another checkpoint\n" in refused(capfd, *of(path))


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
    refusals = {
        "the key 'size' is missing": [{}, {"size": None}],
        "size must be a whole number from 1 to 8; it is": [
            {"size": value} for value in (0, 9, -1, True, 1.0, "1", [], {})
        ],
        "share must be a number above 0": [
            {"size": 1, "share": value} for value in (0, -1.0, 3, float("nan"), True, "1")
        ],
        "flag must be true or false; it is": [
            {"size": 1, "flag": value} for value in (0, 1, "true", [])
        ],
    }
    for words, raws in refusals.items():
        for raw in raws:
            with pytest.raises(ValueError, match=words):
                read_fields(raw, Declared)


def test_a_plan_that_does_not_fit_gets_its_sum(capfd, tmp_path):
    said = refused(capfd, *of(DENSE), "--batch_size", "2000000000")
    assert re.search(
        r"the caches \d+\.\d GB \+ .* = \d+\.\d GB of memory are needed, \d+\.\d GB are free, \d+\.\d GB are missing, enough for \d+ of the 2000000000 sequences; lower",
        said,
    )
    path, raw = linked(DENSE, tmp_path / "m"), config_of(DENSE)
    put(
        path / "config.json",
        raw | {"vocab_size": 2**24, "hidden_size": 2**20, "num_attention_heads": 2**10},
    )
    for more, remedy in (((), "model or --quant"), (("--quant", "int8"), "model")):
        said = refused(capfd, *of(path), *more)
        assert (
            f"the weights of {path}, by its config, " in said and "GB of memory are needed" in said
        )
        assert said.endswith(f"; use a smaller {remedy}\n")


def test_a_pickle_runs_no_code(tmp_path):
    torch.save({"x": Evil(os.mkdir, str(tmp_path / "made"))}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="x.pt is corrupt"), read_untrusted(tmp_path / "x.pt"):
        load_pickle(tmp_path / "x.pt", mmap=True)
    assert not (tmp_path / "made").exists()


def test_an_index_stays_in_its_folder(tmp_path, capfd):
    """The weights that it names are whole, so that nothing but their place is wrong."""
    path = linked(DENSE, tmp_path / "m")
    linked(DENSE, tmp_path / "other")
    names = json.loads((DENSE / "model.safetensors.index.json").read_text())["weight_map"]
    for outside in ("../other/model.safetensors", str(DENSE / "model.safetensors")):
        index = {"weight_map": dict.fromkeys(names, outside)}
        put(path / "model.safetensors.index.json", index)
        assert "model.safetensors.index.json" in refused(capfd, *of(path))


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
    found = json.loads(tokenizer_json(tmp_path))
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
