"""Every option, once: a field is a default, a help text and a command-line flag.

`parse` turns a command line into a dataclass of options, here and in scripts/; `GenerateConfig.check` refuses what
cannot work, so that Python callers and the command line get the same messages.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import torch

from draft_tree import MAX_NODES
from sampling import Sampling

GROUP_SIZES = (32, 64, 128)  # of int4: inputs that share a scale
DEMO = str(Path(__file__).parent / "checkpoints" / "demo")

# the options of a head, of a looked-up draft, and of a tree that is grown
HEAD = ("eagle", "draft_vocab", "token_ranks")
NGRAM = ("ngram_tokens", "ngram_branches", "ngram_max", "ngram_min")
TREE = (
    "tree", "tree_file", "tree_depth", "tree_topk", "tree_size", "expand_by", "no_rerank", "children", "sharpness",
)  # fmt: skip


def option(default: Any, help: str, choices: tuple[str, ...] | None = None, **extra: Any) -> Any:
    """A dataclass field that is also a flag."""
    return field(default=default, metadata={"help": help, "choices": choices, **extra})


@dataclass(frozen=True)
class GenerateConfig:
    """Options of a run. Units and effects are in the help texts."""

    checkpoint: str = option(DEMO, "Hugging Face directory of the target model")
    inflate: str = option("", "run a stand-in: checkpoint and head as the same function in this shape, as llama2-7b")
    random_twin: bool = option(False, "random weights instead of the function, in the shape of --inflate")
    draft: str = option(
        "",
        "who drafts: a head, a lookup in the text so far, another model; default: eagle when a head is given or "
        "bundled, else none",
        ("none", "eagle", "ngram", "model", "eagle+ngram"),
    )
    eagle: str = option("", "directory of the EAGLE head; default: the checkpoint's name with -eagle, if it exists")
    draft_vocab: int = option(0, "the head drafts only this many tokens, the most frequent ones; 0: all")
    token_ranks: str = option(
        "", "for --draft_vocab, a list of token ids by frequency; default: the head's token_ranks.json"
    )
    draft_checkpoint: str = option("", "Hugging Face directory of the draft model (--draft model)")
    ngram_tokens: int = option(10, "tokens copied per continuation (ngram)")
    ngram_branches: int = option(2, "different continuations at most (ngram)")
    ngram_max: int = option(3, "a match in the text counts up to this many tokens (ngram)")
    ngram_min: int = option(1, "and from this many on (ngram)")
    tree: str = option(
        "",
        "shape of the draft tree; auto picks among several, and none, while decoding: what is fastest here; default: "
        "auto for a head, chain for a draft model, dynamic where only that can do what is asked for",
        ("auto", "dynamic", "static", "chain"),
    )
    tree_file: str = option("", "static tree: JSON list of rank paths, as [[0], [1], [0, 0]]")
    tree_depth: int = option(6, "drafted levels (dynamic, chain; auto: at most)")
    tree_topk: int = option(10, "children kept per node, and nodes expanded per level (dynamic; auto: at most)")
    tree_size: int = option(60, "verified nodes, root included (dynamic; auto: at most)")
    expand_by: str = option("value", "what picks the nodes to expand (dynamic)", ("value", "confidence"))
    no_rerank: bool = option(False, "verify the first levels whole instead of the best nodes (dynamic)")
    children: str = option(
        "",
        "how children are picked when sampling: top-k of the head's logits, top-k with the shared noise, or sampled "
        "without replacement; default: noise, and with --accept residual sampled (topk on dynamic trees)",
        ("topk", "noise", "sampled"),
    )
    sharpness: float = option(0.0, "c in a child's score log softmax(c z); 0: what the head was fitted with")
    accept: str = option(
        "exact", "exact: the same tokens as vanilla; residual: the papers' rule", ("exact", "residual")
    )
    prompt: str | None = option(None, "text to continue; the demo has a default")
    prompt_file: str = option("", "prompts: a text file, or JSONL with `turns`")
    prompt_ids: str | None = option(None, "token ids to continue, as 5,17,3; needs no tokenizer")
    interactive: bool = option(False, "chat on the terminal")
    chat: str | None = option(None, "apply a chat template: the model's, or the one named", optional=True)
    max_new_tokens: int = option(128, "tokens to generate per prompt")
    temperature: float = option(0.0, "0 is greedy")
    top_k: int = option(0, "sample among the k most likely tokens; 0: all")
    top_p: float = option(1.0, "sample among the most likely tokens that hold this mass")
    seed: int = option(0, "of the sampling noise; the same seed gives the same tokens for every drafter and tree")
    ignore_eos: bool = option(False, "go on after an end-of-sequence token")
    num_samples: int = option(1, "continuations per prompt")
    batch_size: int = option(1, "sequences decoded together")
    context: int = option(0, "KV capacity in tokens; 0: what the model was trained for, at most 4096")
    quant: str = option("none", "round the target's weights while loading", ("none", "int8", "int4"))
    group_size: int = option(128, "inputs that share a scale (int4): 32, 64 or 128")
    quant_draft: str = option("", "the same for the draft; default: as the target", ("none", "int8", "int4"))
    compile: bool = option(False, "compile the steps of a cycle")
    device: str = option("", "cpu or cuda; default: cuda if there is one")
    dtype: str = option("", "default: the checkpoint's", ("float32", "bfloat16", "float16"))
    compare: bool = option(False, "also decode without drafting, check that the tokens agree, print the speedup")
    json: str = option("", "write results to this file; - is standard output")
    trace: str = option("", "write one JSON line per cycle and row; - is standard output")
    profile: str = option("", "write a profiler trace of the decoding (chrome://tracing)")

    @property
    def sampling(self) -> Sampling:
        """How logits become a distribution."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def tree_shape(self) -> str:
        """What `--tree` comes to."""
        if self.tree or self.tree_file:
            return "static" if self.tree_file else self.tree
        if self.draft == "model":
            return "chain"
        grown = self.draft == "eagle+ngram" or self.expand_by != "value" or self.no_rerank or self.accept != "exact"
        return "dynamic" if grown else "auto"

    def check(self) -> None:
        """Raises: ValueError for a value or a combination that cannot work."""
        for name in (
            "tree_depth", "tree_topk", "max_new_tokens", "num_samples", "batch_size",
            "ngram_tokens", "ngram_branches", "ngram_max", "ngram_min",
        ):  # fmt: skip
            _rule(getattr(self, name) >= 1, f"--{name} must be at least 1; it is {getattr(self, name)}")
        _rule(
            2 <= self.tree_size <= MAX_NODES,
            f"--tree_size must be 2 to {MAX_NODES}, root included; it is {self.tree_size}",
        )
        _rule(self.tree_depth < MAX_NODES, f"--tree_depth must be below {MAX_NODES}; it is {self.tree_depth}")
        _rule(self.temperature >= 0, f"--temperature must not be negative; it is {self.temperature}")
        _rule(0 < self.top_p <= 1, f"--top_p must be in (0, 1]; it is {self.top_p}")
        _rule(self.top_k >= 0, f"--top_k must not be negative; it is {self.top_k}")
        _rule(0 <= self.seed < 2**64, f"--seed must be in [0, 2^64); it is {self.seed}")
        _rule(self.context >= 0, f"--context must be positive, or 0 for the model's own; it is {self.context}")
        _rule(self.draft_vocab >= 0, f"--draft_vocab must be positive, or 0 for all tokens; it is {self.draft_vocab}")
        _rule(not self.token_ranks or self.draft_vocab > 0, "--token_ranks has no effect alone; add --draft_vocab N")
        _rule(self.sharpness >= 0, f"--sharpness must not be negative; it is {self.sharpness}")
        _rule(not self.random_twin or self.inflate, "--random_twin needs a shape; name one with --inflate")
        sources = ("prompt", "prompt_file", "prompt_ids", "interactive")
        given = [f"--{s}" for s in sources if getattr(self, s) not in (None, False, "")]
        _rule(len(given) <= 1, f"prompts come from one place; {' and '.join(given)} were given")
        _rule(self.prompt is None or self.prompt.strip() != "", "--prompt is empty; give it some text")
        _rule(
            not (self.chat is not None and self.prompt_ids is not None),
            "--chat renders text; it cannot go with --prompt_ids",
        )
        for name in ("json", "trace", "profile"):  # before anything is computed, so that nothing is lost
            parent = Path(getattr(self, name)).parent
            _rule(parent.is_dir(), f"--{name}: cannot write {getattr(self, name)}; there is no directory {parent}")
            whole = not getattr(self, name) or not Path(getattr(self, name)).is_dir()
            _rule(whole, f"--{name}: {getattr(self, name)} is a directory; name a file")
        one = "--interactive is one conversation; it cannot go with"
        for name, plain in (
            ("batch_size", 1),
            ("num_samples", 1),
            ("json", ""),
            ("trace", ""),
            ("profile", ""),
            ("compare", False),
        ):
            _rule(not self.interactive or getattr(self, name) == plain, f"{one} --{name}")
        _rule(self.group_size in GROUP_SIZES, f"--group_size must be one of {GROUP_SIZES}; it is {self.group_size}")
        int4 = "int4" in (self.quant, self.quant_draft)
        _rule(int4 or self.group_size == 128, "--group_size belongs to int4; add --quant int4")
        greedy = "has no effect at temperature 0; set --temperature"
        for name in ("top_k", "top_p", "children"):
            _rule(self.temperature > 0 or getattr(self, name) == default_of(name), f"--{name} {greedy}")
        _rule(self.temperature > 0 or self.accept == "exact", f"--accept residual {greedy}")
        if self.draft == "none":
            self.check_undrafted()
        self._check_drafter()
        self._check_tree()

    def check_undrafted(self) -> None:
        """Raises: ValueError for options of a draft, when nothing drafts."""
        for name in (*HEAD, "draft_checkpoint", "quant_draft", *NGRAM, *TREE, "accept"):
            _rule(getattr(self, name) == default_of(name), f"--{name} needs a draft; there is none, or --draft none")

    def _check_drafter(self) -> None:
        model, ngram = self.draft == "model", self.draft.endswith("ngram")
        _rule(not model or self.draft_checkpoint != "", "--draft model needs --draft_checkpoint DIR")
        _rule(model or not self.draft_checkpoint, "--draft_checkpoint belongs to --draft model; add that")
        for name in HEAD if self.draft in ("model", "ngram") else ():
            _rule(getattr(self, name) == default_of(name), f"--{name} does nothing with --draft {self.draft}")
        for name in () if ngram else NGRAM:
            _rule(getattr(self, name) == default_of(name), f"--{name} belongs to --draft ngram and eagle+ngram")
        for name in (*TREE, "quant_draft") if self.draft == "ngram" else ():
            _rule(getattr(self, name) == default_of(name), f"--{name} does nothing with --draft ngram; see --ngram_*")
        if self.draft == "eagle+ngram":
            whole = self.tree in ("", "dynamic") and not self.tree_file and not self.no_rerank
            _rule(whole, "--draft eagle+ngram grafts onto a re-ranked dynamic tree; drop the other tree's flag")

    def _check_tree(self) -> None:
        _rule(not self.tree_file or self.tree in ("", "static"), f"--tree_file is a static tree, not {self.tree}")
        for name, plain in (("expand_by", "value"), ("no_rerank", False), ("accept", "exact")):
            same = self.tree != "auto" or getattr(self, name) == plain
            _rule(same, f"--{name} needs a tree of one size, and --tree auto changes it; use --tree dynamic")
        dynamic = self.tree_shape in ("dynamic", "auto")
        shape = "--tree static" if self.tree == "static" else "--tree_file"
        fixed = bool(self.tree_file) or self.tree == "static"
        _rule(not fixed or self.tree_depth == 6, f"--tree_depth belongs to dynamic trees and chains, not to {shape}")
        if dynamic:
            _rule(self.children != "sampled", "--children sampled would make a dynamic tree lossy; use --tree static")
        else:
            for name in ("expand_by", "no_rerank", "tree_topk", "tree_size", "sharpness"):
                _rule(getattr(self, name) == default_of(name), f"--{name} belongs to --tree dynamic")
        if self.accept == "residual":
            lossy = "--accept residual needs a draft that does not read the target's noise; use"
            _rule(self.children != "noise", f"{lossy} --children {'topk' if dynamic else 'sampled'}")
            sampled = dynamic or self.children != "topk"
            _rule(sampled, "--accept residual samples the children of static trees; drop --children topk")


def default_of(name: str) -> Any:
    """The default of an option."""
    return next(f.default for f in fields(GenerateConfig) if f.name == name)


def _rule(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # one line, no usage block
        fail(self.prog, f"{message}; see --help")


def fail(program: str, message: str) -> NoReturn:
    """End the program on a user's mistake: one line, exit status 2."""
    print(f"{program}: {message}", file=sys.stderr)
    sys.exit(2)


def parse(options: type, program: str, description: str, argv: list[str] | None = None) -> Any:
    """Read the command line into a dataclass whose fields are made by `option`. Exits with status 2 on a mistake."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog=program, description=description, allow_abbrev=False, formatter_class=raw)
    kinds = {"int": int, "float": float}
    for f in fields(options):
        assert f.default is not MISSING, f.name
        shown = "" if f.default in ("", None, False) else f" (default: {f.default})"
        extra: dict[str, Any] = {"help": (f.metadata["help"] + shown).replace("%", "%%"), "default": f.default}
        if f.type == "bool":
            extra["action"] = "store_true"
        else:
            extra |= {"type": kinds.get(str(f.type), str), "choices": f.metadata["choices"]}
        if f.metadata.get("optional"):
            extra |= {"nargs": "?", "const": "", "metavar": "NAME"}
        if f.metadata.get("positional"):  # may be left out, as every option
            extra |= {"nargs": "?"}
        parser.add_argument(f.name if f.metadata.get("positional") else f"--{f.name}", **extra)
    return options(**vars(parser.parse_args(argv)))


def run_or_fail(program: str, body: Callable[[], None]) -> None:
    """Run a program's body; a user's mistake becomes one line and exit status 2, Ctrl-C or a closed pipe none."""
    try:
        body()
    except ValueError as error:
        fail(program, str(error))
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell reports it
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def read_jsonl(path: Path, what: str, check: Callable[[dict], str] = lambda row: "") -> list[dict]:
    """Read one JSON object a line (or a JSON array of them).

    what: the flag that named the file
    check: says what is wrong with an object; "" when nothing is
    Raises: ValueError that names the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{what}: cannot read {path} ({type(error).__name__})") from None
    rows = []
    try:
        lines = [(1, text)] if text.lstrip().startswith("[") else list(enumerate(text.split("\n"), 1))
        for number, line in lines:  # noqa: B007  (the message needs the number)
            if line.strip():
                value = json.loads(line)
                found = value if isinstance(value, list) else [value]
                wrong = next(filter(None, (check(row) for row in found if isinstance(row, dict))), "")
                _rule(not wrong, f"{what}: {path} line {number}: {wrong}")
                rows += found
    except json.JSONDecodeError as error:
        raise ValueError(f"{what}: {path} line {number} is not valid JSON: {error}") from None
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{what}: {path} must hold one JSON object a line")
    return rows


def pick_device(name: str) -> str:
    """Check a device name, or choose one. Raises: ValueError when it is not to be had."""
    if not name:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    _rule(kind in ("cpu", "cuda"), f"--device must be cpu or cuda; it is {name}")
    _rule(
        kind == "cpu" or torch.cuda.is_available(),
        f"--device {name}: this machine or this torch has no CUDA device",
    )
    index, count = torch.device(name).index or 0, torch.cuda.device_count()
    _rule(kind == "cpu" or index < count, f"--device {name}: there are {count} CUDA devices, counted from 0")
    return name
