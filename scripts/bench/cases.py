"""The options of every case of measure.py, and their checks.

This module imports no torch, so that help and mistakes are answered at once.
Not here: the measurements (the files of this folder).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from files.io import check_outputs, is_gguf
from options import require
from run.options import DEFAULT, ROOT
from run.parsing import option

# contestants of other runtimes; `7b` and gpt-fast have random weights in the shape of LLaMA-2 7B
FORMATS = ("bf16", "f16", "q8_0", "q4_0")  # of GGUF files that are written of the checkpoint
LOOKUP = "lookup2"  # of two tokens, the advice of llama-cpp-python for CPUs
LLAMA_CPP = tuple(
    f"llama.cpp:{form}{draft}" for form in ("file", *FORMATS) for draft in ("", f":{LOOKUP}")
)
PEERS = ("transformers", "transformers:7b", *LLAMA_CPP, "gpt-fast:int4")
GPT_FAST_FOLDER = ROOT / "brought/gpt-fast"
GPT_FAST_FILES = ("model.py", "quantize.py", "generate.py")
PACKAGES = {"transformers": ("transformers",), "llama.cpp": ("llama_cpp", "gguf"), "gpt-fast": ()}

DTYPES = ("float32", "bfloat16", "float16")
QUANTS = ("none", "int8", "int4")
UNITS = ("none", "hardware", "emulation")  # of AMX tiles
# formats of a linear layer: 16 bits, rounded (with the inputs that share a scale), types of a file
FLOAT = ("torch-bf16", "bf16")
ROUNDED = {"int8": 0, "int4-32": 32, "int4-64": 64, "int4-128": 128}
FILE_TYPES = {  # with the inputs of a block
    "Q4_0": 32, "Q4_1": 32, "Q5_0": 32, "Q5_1": 32, "Q8_0": 32,
    "Q2_K": 256, "Q3_K": 256, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256,
}  # fmt: skip
KINDS = (*FLOAT, *ROUNDED, *FILE_TYPES)
USUAL = (*FLOAT, *ROUNDED, "Q4_1", "Q8_0", "Q4_K", "Q6_K")


def is_peer(method: str) -> bool:
    """Return whether a method is another runtime."""
    return method.partition(":")[0] in PACKAGES


def check_peer(peer: str) -> None:
    """Check that another runtime is known and installed. Raises: ValueError."""
    runtime = peer.partition(":")[0]
    require(peer in PEERS, f"there is no {peer}; use one of {', '.join(PEERS)}")
    for package in PACKAGES[runtime]:
        try:
            __import__(package)
        except ImportError:
            file = "scripts/bench/requirements-peers.txt"
            raise ValueError(f"{peer} needs the package {package}; pip install -r {file}") from None
    if runtime == "gpt-fast":
        missing = [name for name in GPT_FAST_FILES if not (GPT_FAST_FOLDER / name).is_file()]
        source = "copy it, unchanged, from gpt-fast's repository"
        require(not missing, f"{GPT_FAST_FOLDER} has no {', '.join(missing)}; {source}")


def check_numbers(flag: str, text: str) -> None:
    """Check a list of different whole numbers from 1 on. Raises: ValueError."""
    parts = text.split(",")
    numbers = all(part.isdecimal() and int(part) for part in parts)
    rule = f"{flag} must be different whole numbers from 1 on, as 1,4"
    require(numbers and len(set(parts)) == len(parts), f"{rule}; it is {text!r}")


def check_among(flag: str, text: str, known: tuple[str, ...]) -> None:
    """Check a list of names. Raises: ValueError."""
    for name in text.split(","):
        require(name in known, f"{flag} must be among {', '.join(known)}; {name!r} is not")


@dataclass(frozen=True)
class Options:
    """Options of a case."""

    def check(self) -> None:
        """Check files to write, numbers, and lists of names. Raises: ValueError."""
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("json", "out"):
                check_outputs({f"--{f.name}": value})
            if "numbers" in f.metadata:
                check_numbers(f"--{f.name}", value)
            if value and "among" in f.metadata:
                check_among(f"--{f.name}", value, f.metadata["among"])


@dataclass(frozen=True)
class Timed(Options):
    """Options of a case whose contestants run in turn on a CPU."""

    rounds: int = option(9, "measurements of each contestant", least=1)
    threads: int = option(0, "CPU threads of everybody; 0 leaves torch's default", least=0)
    json: str = option("", "append the rows to this file")


@dataclass(frozen=True)
class SpeedOptions(Timed):
    """Tokens per second, speedup and tau of ways to draft, and of other runtimes, by task.

    A method is a drafter, then after colons a tree, a way to pick children, `residual`, or any
    option of generate.py: `eagle:dynamic:topk:tree_size=30`. `all` are those whose files are at
    hand; the fastest of them is recommended, with its command. `auto` drafts as a command does
    without --draft. Other runtimes: transformers, llama.cpp:FORMAT on GGUF files of the same
    weights (`file` is the checkpoint itself), with :lookup2 behind it; and with random weights in
    the shape of LLaMA-2 7B transformers:7b and gpt-fast:int4, with the files of brought/gpt-fast.
    """

    checkpoint: str = option(DEFAULT, "the target: a Hugging Face directory or a GGUF file")
    head: str = option("", "the head of methods of its kind; default: the one next to the target")
    tasks: str = option(
        "gsm8k,humaneval,mt_bench",
        "names in data/eval, or files: a text, or JSONL of turns (and id, task), or published ones",
    )
    limit: int = option(20, "prompts per task; 0: all", least=0)
    methods: str = option("none,eagle:auto", "who decodes, and how; see above")
    heads: str = option("", "heads, draft models and datastores, or folders, for --methods all")
    temperatures: str = option("0", "0 is greedy")
    batch_sizes: str = option("1", "sequences decoded together", numbers=True)
    quant: str = option("none", "weight formats of our target, each loaded in turn", among=QUANTS)
    options: str = option(
        "", "further options of generate.py for our methods, as top_p=0.9,ignore_eos"
    )
    chat: str | None = option(
        None, "apply a chat template: the model's, or the one named", optional=True
    )
    max_new_tokens: int = option(128, "tokens per turn", least=2)
    rounds: int = option(1, "times that every prompt is decoded", least=1)
    compile: bool | None = option(None, "on CUDA, compile the steps of a cycle")
    device: str = option("", "cpu or cuda; default: cuda if there is one")
    dtype: str = option("", "default: the checkpoint's", DTYPES)
    json: str = option(
        "", "write one line per task and method; what this file holds already is not measured again"
    )
    report: str = option("", "measure nothing; make the tables of such a file")

    def check(self) -> None:
        """Check the options. Raises: ValueError for a value that cannot work."""
        for name in ("tasks", "methods", "temperatures", "quant"):
            value = getattr(self, name)
            parts = value.split(",")
            rule = f"--{name} must be a list of different values; it is {value!r}"
            require(len(set(parts)) == len(parts) and "" not in parts, rule)
        super().check()
        both = not self.heads or self.methods == "all"
        require(both, f"--heads goes with --methods all; --methods is {self.methods}")
        both = self.report and self.json
        require(not both, "--report measures nothing; it cannot go with --json")
        for peer in self.peers:
            self.check_peer(peer)

    def check_peer(self, peer: str) -> None:
        """Check that a peer can do what is asked. Raises: ValueError."""
        check_peer(peer)
        greedy = {float(t) for t in self.temperatures.split(",")} == {0.0}
        require(greedy, f"--temperatures: {peer} decodes greedily; use 0, or leave it out")
        alone = self.batch_sizes == "1" or peer == "transformers"
        remedy = "use 1, or leave it out"
        require(alone, f"--batch_sizes: {peer} decodes one prompt at a time; {remedy}")
        needs_file = peer.startswith("llama.cpp:file") and not is_gguf(Path(self.checkpoint))
        fault = f"{peer} needs a GGUF file as checkpoint; {self.checkpoint} is none"
        require(not needs_file, fault)

    @property
    def peers(self) -> list[str]:
        """The methods that are other runtimes."""
        return [method for method in self.methods.split(",") if is_peer(method)]

    @property
    def fixed(self) -> dict[str, Any]:
        """The options that all lines of a log share; the rest is the matrix."""
        matrix = {"tasks", "methods", "heads", "temperatures", "batch_sizes", "quant"}
        matrix |= {"json", "report"}
        options = {name: value for name, value in asdict(self).items() if name not in matrix}
        return options | {name: shown_path(options[name]) for name in ("checkpoint", "head")}


def shown_path(path: str) -> str:
    """Return a path for a record: relative to the project where it lies inside."""
    if path and Path(path).resolve().is_relative_to(ROOT):
        return str(Path(path).resolve().relative_to(ROOT))
    return path


@dataclass(frozen=True)
class BenchOptions(Options):
    """One table of a model's tokens per second: without a draft, by default, and in llama.cpp.

    They are means over a prompt each of gsm8k, humaneval and mt_bench, greedily, all in turn.
    llama.cpp decodes the same file, or one of the same weights in as many bits, if its package
    is here.
    """

    checkpoint: str = option(DEFAULT, "a Hugging Face directory, a GGUF file or a name", bare=True)
    quant: str = option("none", "round the weights while loading", QUANTS)
    dtype: str = option("", "default: the checkpoint's", DTYPES)
    limit: int = option(1, "prompts of each task", least=1)
    max_new_tokens: int = option(128, "tokens of an answer", least=2)
    threads: int = option(0, "CPU threads of everybody; 0 leaves torch's default", least=0)
    json: str = option("", "add the rows to this JSON list, which `bars` reads")

    @property
    def peer(self) -> str:
        """The contestant of llama.cpp with the nearest weights."""
        stays = is_gguf(Path(self.checkpoint)) and not self.dtype
        forms = {"none": "file" if stays else "f16", "int8": "q8_0", "int4": "q4_0"}
        return f"llama.cpp:{forms[self.quant]}"


@dataclass(frozen=True)
class FidelityOptions(Options):
    """The loss of each weight format against the file's own weights in fp32."""

    checkpoint: str = option(
        DEFAULT, "the model: a Hugging Face directory in 16 bits, or a GGUF file"
    )
    also: str = option("", "quantized directories of the same model, separated by commas")
    text: str = option("", "text files, separated by commas; default: bundled prompts")
    prompts: int = option(2, "prompts of each bundled text, or pieces of each file", least=1)
    questions: bool = option(
        False, "count the right answers to simple questions by format, and nothing else"
    )
    threads: int = option(0, "CPU threads; 0 leaves torch's default", least=0)
    json: str = option("", "append the rows to this file")


@dataclass(frozen=True)
class PassesOptions(Timed):
    """Passes of a whole model over some rows, as a tree of so many nodes is verified."""

    checkpoint: str = option(DEFAULT, "a Hugging Face directory or a GGUF file")
    dtype: str = option("", "default: the checkpoint's", DTYPES)
    quant: str = option("none", "round the weights while loading", QUANTS)
    rows: str = option("1,2,4,8,16,32,64", "numbers of tokens, separated by commas", numbers=True)
    kv: str = option("", "the format of the cache; default: the weights' dtype", ("int8",))
    cached: int = option(128, "tokens in the cache", least=1)
    llama_cpp: str = option("", f"time llama.cpp, too: file, or of {', '.join(FORMATS)}")

    def check(self) -> None:
        """Check the options. Raises: ValueError."""
        super().check()
        if self.llama_cpp:
            check_peer(f"llama.cpp:{self.llama_cpp}")
            is_file = is_gguf(Path(self.checkpoint)) or self.llama_cpp != "file"
            require(is_file, f"--llama_cpp file needs a GGUF file; {self.checkpoint} is none")


@dataclass(frozen=True)
class LinearOptions(Timed):
    """One linear layer for 1 to 64 rows in every weight format, on weights that no cache holds."""

    shapes: str = option(
        "5632x2048,2048x5632,11008x4096,4096x11008", "outputs x inputs, separated by commas"
    )
    rows: str = option("1,2,4,8,16,26,32,48,64", "rows of the input", numbers=True)
    kinds: str = option(",".join(USUAL), f"contestants, among {', '.join(KINDS)}", among=KINDS)
    units: str = option(
        "", "units of AMX tiles to compare, as none,hardware; default: the one in use", among=UNITS
    )
    device: str = option("cpu", "cpu or cuda", ("cpu", "cuda"))

    def check(self) -> None:
        """Check the options. Raises: ValueError for a value that cannot work."""
        super().check()
        for shape in self.shapes.split(","):
            parts = shape.split("x")
            numbers = len(parts) == 2 and all(p.isdecimal() and int(p) for p in parts)
            require(numbers, f"--shapes are OUTPUTSxINPUTS; one is {shape!r}")
            for kind in self.kinds.split(","):
                group = max(32, (ROUNDED | FILE_TYPES).get(kind, 0))
                fault = f"--kinds {kind} needs inputs in multiples of {group}; --shapes has {shape}"
                require(int(parts[1]) % group == 0, fault)


@dataclass(frozen=True)
class StartOptions(Timed):
    """From the command to the first text and to the end, each start in a process of its own."""

    checkpoint: str = option(DEFAULT, "the model; of llama.cpp a GGUF file")
    lengths: str = option("50,500", "tokens at which the answer is cut", numbers=True)
    llama_cpp: bool = option(False, "start llama.cpp, too")
    threads: int = option(2, "threads of llama.cpp; generate.py takes all cores", least=1)
    rounds: int = option(3, "second starts of every contestant", least=1)
    cold: bool = option(False, "also print a first start with empty caches")

    def check(self) -> None:
        """Check the options. Raises: ValueError."""
        super().check()
        if self.llama_cpp:
            check_peer("llama.cpp:file")


@dataclass(frozen=True)
class RaceOptions(Options):
    """One prompt's two answers, with drafts and without, as a moving picture."""

    checkpoint: str = option(DEFAULT, "the target, as generate.py's")
    prompt: str = option("Write a Python function that sorts a list.", "a user's words")
    max_new_tokens: int = option(256, "longest answer in tokens", least=1)
    rounds: int = option(5, "runs of each side, in turn", least=1)
    json: str = option("", "where to write the recorded times")
    recorded: str = option("", "recorded times to draw, instead of new ones")
    out: str = option("race.svg", "picture to write, an SVG")


@dataclass(frozen=True)
class BarsOptions(Options):
    """A table of tokens per second, and the same figures as bars."""

    file: str = option("", "JSON list of rows, or what `speed --json` wrote", positional=True)
    out: str = option("", "picture to write, an SVG")


@dataclass(frozen=True)
class AttentionOptions(Timed):
    """On CUDA, attention of a 7B and an 8B beside torch's, in microseconds of a layer."""

    rows: str = option("1,8,16,32,64", "rows of chains and, from 16 on, of trees", numbers=True)
    lengths: str = option(
        "128,200,512,2048", "slots that attention reads in front of its rows", numbers=True
    )


@dataclass(frozen=True)
class PlansOptions(Options):
    """On CUDA, the fastest tiles of each matmul of a 7B: a table that decoding loads."""

    out: str = option("", "file of the table; default: where decoding finds it")

    def check(self) -> None:
        """Check the options. Raises: ValueError."""
        super().check()
        require(find_spec("triton") is not None, "Triton is not installed; pip install triton")


# the options of every case, and its function
CASES: dict[str, tuple[type, str]] = {
    "speed": (SpeedOptions, "speed:run"),
    "bench": (BenchOptions, "speed:bench"),
    "fidelity": (FidelityOptions, "fidelity:run"),
    "passes": (PassesOptions, "passes:run"),
    "linear": (LinearOptions, "operators:linear"),
    "attention": (AttentionOptions, "operators:attention"),
    "start": (StartOptions, "start:run"),
    "race": (RaceOptions, "pictures:race"),
    "bars": (BarsOptions, "pictures:bars"),
    "plans": (PlansOptions, "plans:run"),
}
