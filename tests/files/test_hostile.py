"""Broken files: each ends in one line that names it, soon, and takes no memory.

A case is a small valid file of one kind, the command line that reads it, and a damage: cut, of an absurd size, not finite.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load, load_file, save
from test_tokenizer import build_json

from files.untrusted import load_pickle, read_untrusted
from helpers import GOLDEN
from quantized_layouts import WHOLE, write_model
from run import generate
from run.options import DEMO, GenerateConfig
from scripts import export_head
from scripts.bench.llama_peer import write_gguf

LIMIT_S = 5  # of the processor, for one case; most take 20 ms. Then it is ended
LIMIT_BYTES = 300 * 10**6  # by which the memory of the process may grow
MODELS = GOLDEN / "models"
DENSE, MOE, HEAD = (
    MODELS / name for name in ("target_llama_mha", "target_mixtral", "head_eagle12_mha")
)
TARGET3, HEAD3 = MODELS / "target_llama31_gqa8", MODELS / "head_eagle3"
SHORT = ["--max_new_tokens", "3", "--device", "cpu"]
IDS = ["--prompt_ids", "5,17,3", *SHORT]
OF_MODEL = ["--checkpoint", "{}", *IDS, "--draft", "none"]  # {}: the folder of the broken file
OF_TEXT = ["--checkpoint", "{}", "--prompt", "def read_lines(path):", *SHORT, "--draft", "none"]
PROMPTS = ["--checkpoint", DEMO, "--prompt_file", "{}/p.jsonl", *SHORT, "--draft", "none"]

# -------------------------------------------------------------------------------------- the damages

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
NESTED = b"[" * 100_000
Damage = Callable[
    [bytes], bytes | None
]  # the content of the valid file -> the broken one's; None: not of this kind
BYTES: dict[str, Damage] = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "a few bytes": lambda content: content[:20],
    "a huge count": lambda content: content[:4] + b"\xff" * 8 + content[12:],
    "a pointer": lambda content: LFS,
    "other bytes": lambda content: b"\xff\xfe{}",
}
# no key takes one of the first; a key may take one of the others, then the file runs
NONSENSE = [float("nan"), "\ud800", "a\nb", "../../../etc/passwd", "x" * 5000, {"a": 1}]
JUNK = [-1, 2**62, 10**30, 1e300, [None], [2**70], [2**40, 2**40], True, None]


def changed(content: bytes, number: int) -> bytes:
    """Put a wrong value in the place of one of a JSON object: the number says which, and where."""
    document = node = json.loads(content)
    r = random.Random(number)
    while True:
        place = r.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if not isinstance(node[place], (dict, list)) or not node[place] or r.random() < 0.2:
            break
        node = node[place]
    node[place] = r.choice(NONSENSE + JUNK)
    return json.dumps(document).encode()


JSON: dict[str, Damage] = {
    **{name: BYTES[name] for name in ("empty", "half", "a pointer", "other bytes")},
    "a list": lambda content: b"[]",
    "nested": lambda content: NESTED,
    "a long number": lambda content: b'{"hidden_size": ' + b"9" * 5000 + b"}",
    **{f"value {n}": partial(changed, number=n) for n in range(8)},
}


def of_tensors(edit: Callable[[torch.Tensor], torch.Tensor | None]) -> Damage:
    """Change the largest of a file's tensors."""

    def damage(content: bytes) -> bytes:
        tensors = load(content)
        name = max(tensors, key=lambda name: tensors[name].numel())
        edited = edit(tensors.pop(name))
        return save(tensors if edited is None else tensors | {name: edited.contiguous()})

    return damage


def of_header(content: bytes) -> bytes:
    """Let the first tensor of a safetensors file end beyond the file."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    next(iter(header.values() if "__metadata__" not in header else [*header.values()][1:]))[
        "data_offsets"
    ] = [0, 2**60]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


TENSORS: dict[str, Damage] = {
    **BYTES,
    "offsets": of_header,
    "missing": of_tensors(lambda t: None),
    "short": of_tensors(lambda t: t[:-1]),
    "flat": of_tensors(lambda t: t.flatten()),
    "complex": of_tensors(lambda t: t.to(torch.complex64)),
    "not finite": of_tensors(
        lambda t: torch.full_like(t, torch.nan) if t.is_floating_point() else t[:0]
    ),
}


class Evil:
    """A pickle of it calls something."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def pickled(value: Any) -> bytes:
    file = BytesIO()
    torch.save(value, file)
    return file.getvalue()


def of_pickle(edit: Callable[[torch.Tensor], Any]) -> Damage:
    """Change a matrix of a pickle."""

    def damage(content: bytes) -> bytes:
        tensors = torch.load(BytesIO(content))
        name = next(name for name in tensors if "down_proj" in name)
        return pickled(tensors | {name: edit(tensors[name].float())})

    return damage


PICKLES: dict[str, Damage] = {
    **BYTES,
    "sparse": of_pickle(lambda t: t.to_sparse()),
    "meta": of_pickle(lambda t: t.to("meta")),
    "huge": of_pickle(lambda t: t[:1].expand(2**40, *t.shape[1:])),
    "a list": of_pickle(lambda t: [t]),
    "code": of_pickle(lambda t: Evil(print, "gotcha")),
    "quantized": of_pickle(lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)),
}


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


def config_of(source: Path, **more: Any) -> dict:
    return json.loads((source / "config.json").read_text()) | more


def gguf_bytes(folder: Path) -> bytes:
    write_gguf(DENSE, folder / "g.gguf", "f16")
    return (folder / "g.gguf").read_bytes()


def head_bytes(folder: Path) -> bytes:
    export_head.write_gguf(export_head.read(HEAD3, TARGET3), folder / "h.gguf", "q8_0")
    return (folder / "h.gguf").read_bytes()


def tokenizer_json(folder: Path) -> str:
    return (build_json(folder) / "tokenizer.json").read_text()


class Kind(NamedTuple):
    """A kind of files: a folder with a valid one, and the command line that reads it."""

    source: Path | str  # a model directory, or a layout that others quantize to
    name: str  # of the file
    damages: dict[str, Damage]
    argv: list[str] = OF_MODEL
    content: Callable[[Path], Any] | None = None  # gets an empty folder. None: as in the source
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


def saved_by_torch(_: Path) -> bytes:
    return pickled(load_file(DENSE / "model.safetensors"))


def index_of_a_part(empty: Path) -> dict:
    """Rename the one file of the folder: a whole file would go before its index."""
    part = "model-00001-of-00001.safetensors"
    (empty.parent / "model.safetensors").rename(empty.parent / part)
    return {"weight_map": dict.fromkeys(load_file(empty.parent / part), part)}


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
        "attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": True}  # fmt: skip
NESTED_CONFIG = {"transformer_layer_config": config_of(HEAD3), "eagle_config": {"fc_norm": False}}
CHAT = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
demo, others = Path(DEMO), ("gptq", "fp8")
KINDS = {
    "config": Kind(DENSE, "config.json", JSON),
    "config of experts": Kind(MOE, "config.json", JSON),
    "config with yarn": Kind(DENSE, "config.json", JSON, content=lambda _: config_of(DENSE, rope_scaling=YARN)),
    "config with llama3's rope": Kind(TARGET3, "config.json", JSON),
    "generation_config": Kind(DENSE, "generation_config.json", JSON, content=lambda _: {"eos_token_id": [2], "bos_token_id": 1}),
    "safetensors": Kind(DENSE, "model.safetensors", TENSORS, without="*.index.json"),
    "index": Kind(DENSE, "model.safetensors.index.json", JSON, content=index_of_a_part),
    "bin": Kind(DENSE, "pytorch_model.bin", PICKLES, content=saved_by_torch, without="model.*"),
    "head's config": Kind(HEAD, "config.json", JSON, of_head(DENSE)),
    "head 3's config": Kind(HEAD3, "config.json", JSON, of_head(TARGET3)),
    "head 3's nested config": Kind(HEAD3, "config.json", JSON, of_head(TARGET3), lambda _: config_of(HEAD3, **NESTED_CONFIG)),
    "head's weights": Kind(HEAD, "model.safetensors", TENSORS, of_head(DENSE)),
    "head 3's weights": Kind(HEAD3, "model.safetensors", TENSORS, of_head(TARGET3)),
    "head's GGUF": Kind(HEAD3, "h.gguf", BYTES, ["--checkpoint", str(TARGET3), "--head", "{}/h.gguf", *IDS], head_bytes),
    "GGUF": Kind(DENSE, "m.gguf", BYTES, ["--checkpoint", "{}/m.gguf", *IDS, "--draft", "none"], gguf_bytes),
    "tokenizer.model": Kind(demo, "tokenizer.model", BYTES, OF_TEXT),
    "tokenizer.json": Kind(demo, "tokenizer.json", JSON, OF_TEXT, tokenizer_json, "tokenizer.model"),
    "tokenizer_config": Kind(demo, "tokenizer_config.json", JSON, OF_TEXT, lambda _: {"eos_token": "</s>", "add_bos_token": True}),
    "added tokens": Kind(demo, "added_tokens.json", JSON, OF_TEXT, lambda _: {"<x>": 5}),
    "chat template": Kind(demo, "chat_template.jinja", BYTES, [*OF_TEXT, "--chat"], lambda _: CHAT),
    "prompts": Kind(demo, "p.jsonl", JSON, PROMPTS, lambda _: {"turns": ["a", "b"]}),
    **{f"config of {name}": Kind(name, "config.json", JSON) for name in others},
    **{f"weights of {name}": Kind(name, "model.safetensors", TENSORS) for name in others},
}  # fmt: skip
# what a file without a fault may still lead to, in a line that does not name it
LATER = "the prompt is empty|numbers are not finite|the prompt has .* tokens|GB of memory are needed|half a character"

# ------------------------------------------------------------------------------------------ running


class Outcome(NamedTuple):
    """The result of a command line."""

    status: Any  # 0: it ran
    out: str  # the text
    err: str
    seconds: float  # of the processor
    grown_bytes: int  # by which the peak of the memory lies above what there was before

    def fault(self) -> str:
        """The fault of this result, or an empty string."""
        if self.seconds > LIMIT_S:
            return "too long"
        if self.grown_bytes > LIMIT_BYTES:
            return "too much memory"
        if self.status not in (0, 2) or "Traceback" in self.err:
            return "traceback"
        if self.status == 0:
            return ""
        line = re.sub(r"(?m)^(note: .*|\d+ tokens?\b.*)\n", "", self.err)
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


def attempt(capfd, argv: list[str], folder: Path | str) -> Outcome:
    """Run a command line here, on a folder."""

    def late(*_):
        raise KeyboardInterrupt

    capfd.readouterr()
    before, status = peak_bytes(reset=True), 0
    old, began = signal.signal(signal.SIGPROF, late), time.process_time()
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        generate.main([part.replace("{}", str(folder)) for part in argv])
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
    return Outcome(status, out, err, seconds, grown_bytes)


def refused(capfd, argv: list[str], folder: Path) -> str:
    """The line that refuses a folder."""
    found = attempt(capfd, argv, folder)
    assert found.status == 2 and not found.fault(), found
    return found.err


@pytest.mark.parametrize("name", KINDS)
def test_broken_files_end_in_one_line(name, tmp_path, capfd):
    """Where the damage is none for this kind of file, it runs instead."""
    kind = KINDS[name]
    kind.make(tmp_path / "valid")
    valid = attempt(capfd, kind.argv, tmp_path / "valid")
    assert valid.status == 0, valid
    content = (tmp_path / "valid" / kind.name).read_bytes()
    refusals = 0
    for how, damage in kind.damages.items():
        folder = linked(tmp_path / "valid", tmp_path / how)
        put(folder / kind.name, damage(content))
        found = attempt(capfd, kind.argv, folder)
        fault = found.fault()
        if found.status == 2 and not re.search(f"{folder}|{kind.name}|{LATER}", found.err):
            fault = fault or "not named"
        assert not fault, f"{name}, {how}: {fault}\n{found}"
        refusals += found.status == 2
        # a template may be of any length, and a draft of any numbers
        certain = how in ("empty", "half", "a few bytes") and name != "chat template"
        certain = certain or (how == "not finite" and "head" not in name)
        runs = found.status == 0 and kind.damages is not JSON
        assert not (certain and runs), f"{name}, {how}: it runs"
    assert refusals >= len(kind.damages) / 2, f"{refusals} of {len(kind.damages)} are refused"


VALUES = [
    "-1", "0", "1e3", "nan", "inf", "1e400", "", "x", "0x10", "٣", "2147483648", str(2**63), "9" * 5000, "\0", "a\0b", "x" * 300,
    "x" * 100_000, "\ud800", "caf\udce9", "a\nb\nc", "/", ".", "~", "/proc/self/mem", "/dev/null/x", "/dev/zero",
    "\x1b[31m", "1," * 1000, "3,-3", ",",
]  # fmt: skip


def test_broken_values_of_options_end_in_one_line(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some name files to write
    put(tmp_path / "p.jsonl", {"turns": ["a"]})
    for field in fields(GenerateConfig):
        if field.name == "interactive" or not field.metadata["flag"]:
            continue  # it would read this terminal
        of_prompts = field.name in ("prompt_file", "prompt_ids")
        argv, folder = (PROMPTS, tmp_path) if of_prompts else (OF_TEXT, DEMO)
        for value in random.Random(field.name).sample(VALUES, 2):
            found = attempt(capfd, [*argv, f"--{field.name}={value}"], folder)
            assert not found.fault(), f"{field.name} {value[:40]!r}: {found}"


# -------------------------------------------------------------------- vulnerabilities and promises


def test_errors_of_libraries_become_one_line(tmp_path, capfd):
    """A panic in Rust is a BaseException; Ctrl-C is not the file's fault, and a refusal of ours has its words already."""

    class Panic(BaseException):
        pass

    file = tmp_path / "file.bin"
    corrupt = rf"{file} is corrupt, .* \([^\n\x1b]{{1,350}}\); make it again"
    memory = f"{file} needs more memory than there is; free some, .*"
    cases = {
        corrupt: [Panic("a\nb"), KeyError("x"), RecursionError("deep"), ValueError("\x1b" + "x" * 5000)],
        memory: [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
    }  # fmt: skip
    for message, errors in cases.items():
        for error in errors:
            with pytest.raises(ValueError) as caught, read_untrusted(file, "make it again"):
                os.write(2, b"thread panicked at lib.rs\n")
                warnings.warn("this will change", stacklevel=1)
                raise error
            assert re.fullmatch(message, str(caught.value))
    for error in (KeyboardInterrupt(), ValueError(f"{file} is too small; use another")):
        with pytest.raises(type(error)) as caught, read_untrusted(file):
            raise error
        assert caught.value is error
    os.write(2, b"heard again")
    assert capfd.readouterr() == ("", "heard again")


@pytest.mark.parametrize("more, remedy", [((), "model or --quant"), (("--quant", "int8"), "model")])
def test_a_config_of_a_huge_model_takes_no_memory(capfd, tmp_path, more, remedy):
    path = linked(DENSE, tmp_path / "m")
    huge = {"vocab_size": 2**24, "hidden_size": 2**20, "num_attention_heads": 2**10}
    put(path / "config.json", config_of(DENSE, **huge))
    said = refused(capfd, [*OF_MODEL, *more], path)
    assert f"the weights of {path}, by its config, " in said
    assert "GB of memory are needed" in said and said.endswith(f"; use a smaller {remedy}\n")


def test_an_index_stays_in_its_folder(tmp_path, capfd):
    """The weights that it names are whole, so that nothing but their place is wrong."""
    path = linked(DENSE, tmp_path / "m")
    linked(DENSE, tmp_path / "other")
    (path / "model.safetensors").unlink()
    names = json.loads((DENSE / "model.safetensors.index.json").read_text())["weight_map"]
    for outside in ("../other/model.safetensors", str(DENSE / "model.safetensors")):
        index = {"weight_map": dict.fromkeys(names, outside)}
        put(path / "model.safetensors.index.json", index)
        assert "model.safetensors.index.json" in refused(capfd, OF_MODEL, path)


def test_a_pickle_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = put(tmp_path / "x.pt", pickled({"x": Evil(os.mkdir, "made")}))
    with pytest.raises(ValueError, match="x.pt is corrupt"), read_untrusted(file):
        load_pickle(file, mmap=True)
    assert not Path("made").exists()
    put(file, pickled({"x": torch.arange(3)}))
    assert load_pickle(file, mmap=True)["x"].tolist() == [0, 1, 2]
