"""Every option of generate.py, once: its default, help text, flag and range.

From the fields of `GenerateConfig` come the parser, the checks and the tables of docs/USAGE.md;
`check` refuses what cannot work, so that Python callers and the command line get the same messages.
The parts of `--tree` and the rarer parameters of sampling come last: they are options of a call
from Python, of `/set` in a chat, and of requests. Options that contradict each other are refused
(`NEEDS`); one that another makes idle, as a top-k at temperature 0, is accepted.
No torch is imported, so that a mistake is reported before it is.
Not here: reading a command line (run/parsing.py); reading prompts (run/prompts.py).
"""

from __future__ import annotations

import json
import re
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from draft_tree import (
    EAGLE1_PATHS,
    MAX_NODES,
    SHAPES,
    DynamicTree,
    StaticTree,
    candidates,
    parse_tree,
)
from files.io import DEFAULT as DEFAULT
from files.io import (
    check_directory,
    check_outputs,
    is_gguf,
    is_model_name,
)
from options import DEMO as DEMO
from options import FORMAT_NAMES as FORMAT_NAMES
from options import ROOT as ROOT
from options import Options, load_part, part_or, require
from options import option as option
from run.methods import OUTSIDE, has_drafts, known_drafters, spec_of
from run.parsing import check_values, flag_of, processors

DEPTH = 6  # levels of a tree by default
GROUP_SIZES = (32, 64, 128)  # of int4: inputs that share a scale
BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's; repeats end at them
MOST_BIAS = 100  # as OpenAI's
MOST_BIASES = 1024  # tokens of a request with a bias
MOST_BAD_WORDS = 64

parameter = partial(option, flag=False)  # of a call, and not of the command line


@dataclass(frozen=True)
class GenerateConfig(Options):
    """Options of a run. Units and effects are in the help texts."""

    # titles of the help and their options
    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "the model": (
            "checkpoint", "quant", "group_size", "keep_blocks", "random", "context", "kv", "device",
            "dtype", "threads", "compile", "plain",
        ),
        "the draft (the text is the same with any of it)": (
            "draft", "head", "draft_checkpoint", "datastore", "tree", "quant_draft", "children",
        ),
        "the prompt": ("prompt", "prompt_file", "prompt_ids", "interactive", "chat", "system"),
        "the answer": (
            "max_new_tokens", "ignore_eos", "stop", "grammar", "num_samples", "batch_size",
        ),
        "sampling": (
            "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "dry_multiplier", "seed", "accept",
        ),
        "the output": ("compare", "json", "trace", "profile"),
    }  # fmt: skip

    checkpoint: str = option(
        DEFAULT,
        "the target: a Hugging Face directory, a GGUF file, or a name, as OWNER/NAME or "
        "hf:OWNER/NAME:Q4_K_M on a hub and ollama:NAME; the default is fetched once (93 MB)",
        short="m",
    )
    context: int = option(
        0,
        "KV capacity in tokens; 0: what the model was trained for, if half of the free memory "
        "holds it, and on CUDA at most 4096",
        least=0,
        short="c",
    )
    kv: str = option(
        "",
        "on a CPU, round the cache's keys and values to 8 bits: int8 takes 53 % of the memory of "
        "16 bits; default: the weights' dtype",
        ("int8",),
    )
    group_size: int = option(
        0,
        "inputs that share a scale in int4: 32, 64 or 128; default: 64, or 32 where 64 does not "
        "fit",
    )
    keep_blocks: bool = option(
        False,
        "keep every type of a GGUF file in its own bits on CUDA, in a third of the memory; "
        "default: Q4_0 alone, as others were not timed",
    )
    threads: int = option(0, "CPU threads; default: as many as cores", least=0, most=processors())
    random: str = option(
        "",
        "random weights in this shape, as llama2-7b or a config.json, and a head of it: for rates "
        "alone, as the text means nothing; by default the tokenizer is that of checkpoints/demo",
    )
    draft: str = option(
        "",
        "source of drafts; default: as the files of the head say, if one is given or bundled, else "
        "mtp, if the checkpoint holds such a layer, else ngram, a lookup in the text so far, on a "
        "CPU and none elsewhere",
        (*known_drafters(), OUTSIDE),
    )
    head: str = option(
        "",
        "a trained head of any kind, a directory or a GGUF file; default: the checkpoint's name "
        "with -eagle, or with another --draft behind it, if it exists",
        alias="eagle",
    )
    draft_checkpoint: str = option("", "the model of --draft model: a directory or a GGUF file")
    datastore: str = option("", "texts of --draft rest, from scripts/build_datastore.py")
    tree: str = option(
        "",
        "shape of the draft tree: auto, chain:3, dynamic:6,8,32 (levels, children of a node, nodes "
        "in all; what is left out has its default), static, or a JSON list of rank paths, as "
        "[[0], [1], [0, 0]], in a file. auto, which takes such numbers as bounds, picks the "
        "fastest of several, and none, while decoding, and stores what it learns in "
        "~/.cache/gpt-eagle/trees; default: auto for a head, chain for a draft model, dynamic "
        "where only that can do what is asked for and with torchrun; without the folder drafts/ "
        "dynamic on CUDA, chain on a CPU",
        tuple(SHAPES),
        parts=parse_tree,
    )
    quant_draft: str = option(
        "",
        "round the draft's weights; default: as its files in 8 or 4 bits, else as the target; "
        "beside a 16-bit target int8 on a CPU, on CUDA int4 for a head",
        ("none", *FORMAT_NAMES),
    )
    children: str = option(
        "",
        "how children are picked when sampling: top-k of the head's logits, top-k with the shared "
        "noise, or sampled without replacement; default: noise, and with --accept residual sampled "
        "(topk on dynamic trees)",
        ("topk", "noise", "sampled"),
    )
    accept: str = option(
        "exact",
        "exact: the same tokens as vanilla; residual: the papers' rule, other tokens of the same "
        "distribution",
        ("exact", "residual"),
    )
    prompt: str | None = option(
        None,
        "text to answer or continue, - for standard input; the default model and the demo have one",
        short="p",
    )
    prompt_file: str = option(
        "", "prompts: a text file, or JSONL with `turns`; - for standard input"
    )
    interactive: bool = option(False, "chat on the terminal")
    chat: str | None = option(
        None,
        "chat template: the built-in one named, or none for plain continuation; default, and "
        "without a name: the checkpoint's own, if it has one",
        optional=True,
    )
    system: str | None = option(
        None,
        "system message of the chat, '' for an empty one; default: the template's own",
    )
    grammar: str = option(
        "",
        "texts follow this Lark, GBNF, or JSON schema (.json); on CUDA no cycle is captured then",
    )
    max_new_tokens: int = option(
        128,
        "tokens to generate per prompt; a chat of --prompt or --interactive goes on to its end "
        "where this is not given",
        least=1,
        short="n",
    )
    stop: tuple[str, ...] = option(
        (), "text that ends an answer and is left out; it may be given several times"
    )
    num_samples: int = option(1, "answers to each prompt", least=1, most=10**6)
    batch_size: int = option(1, "sequences decoded together", least=1)
    min_p: float = option(0.0, "drop tokens below this share of the likeliest", least=0, most=1)
    repetition_penalty: float = option(
        1.0,
        "divide the scores of tokens that the text has already by this; 1.1 to 1.2 end most loops",
        least=0.01,
        most=100,
        alias="repeat_penalty",
    )
    presence_penalty: float = option(
        0.0, "subtract this from the scores of tokens that the answer has", least=-100, most=100
    )
    frequency_penalty: float = option(
        0.0, "subtract this once for each time that the answer has a token", least=-100, most=100
    )
    dry_multiplier: float = option(
        0.0,
        "DRY: subtract this * dry_base ^ (length of the repeat - dry_allowed_length) from the "
        "scores of tokens that would prolong a repeat",
        least=0,
        most=100,
    )
    seed: int = option(
        0,
        "of the sampling noise; the same seed gives the same tokens for every drafter and tree; "
        "--interactive draws one where none is given",
        least=0,
        most=2**64 - 1,
    )
    trace: str = option("", "write one JSON line per cycle and sequence; - is standard output")

    profile: str = option("", "write a profiler trace (chrome://tracing)")

    # what --tree stands for
    tree_file: str = parameter("", "the file of --tree", spelled="--tree")
    tree_depth: int = parameter(
        0,
        "levels (auto: at most); default: 6, or as many as the head has",
        least=1,
        most=MAX_NODES - 1,
        spelled="LEVELS of --tree (tree_depth)",
    )
    tree_topk: int = parameter(
        0,
        "children of a node, and nodes expanded per level (auto: at most); default: 10, on a CPU "
        "4, in bf16 on AMX tiles 8",
        least=1,
        spelled="CHILDREN of --tree (tree_topk)",
    )
    tree_size: int = parameter(
        0,
        "nodes, verified ones, root included (auto: at most); default: 60, with int4 on CUDA 32, "
        "on a CPU 16, in bf16 on AMX tiles 32",
        least=2,
        most=MAX_NODES,
        spelled="NODES of --tree (tree_size)",
    )

    # of sampling
    repeat_last_n: int = parameter(
        -1,
        "tokens that repetition, presence and frequency penalties look back at; -1: all",
        least=-1,
    )
    logit_bias: str = parameter("", 'add to the scores of tokens, as {"15043": -100, "29991": 5}')
    min_tokens: int = parameter(0, "tokens of an answer before it may end", least=0)
    bad_words: tuple[str, ...] = parameter((), "texts that no answer may have", most=MOST_BAD_WORDS)
    allowed_token_ids: str = parameter("", "the only tokens of answers, as 5,17,3")
    top_n_sigma: float = parameter(
        -1.0,
        "keep tokens within so many standard deviations of the best score; -1: all",
        least=-1,
    )
    typical_p: float = parameter(
        1.0,
        "sample among the tokens of the most usual information whose probabilities add up to this",
        above=0,
        most=1,
    )
    xtc_probability: float = parameter(
        0.0,
        "XTC: at so many of the tokens, drop all but the least likely of those above xtc_threshold",
        least=0,
        most=1,
    )
    xtc_threshold: float = parameter(
        0.1, "probability of tokens that XTC may drop", least=0, most=1
    )
    dry_base: float = parameter(1.75, "of DRY", least=1, most=4)
    dry_allowed_length: int = parameter(2, "shortest repeat that DRY acts on, in tokens", least=1)
    dry_penalty_last_n: int = parameter(-1, "tokens that DRY looks back at; -1: all", least=-1)
    dry_sequence_breakers: tuple[str, ...] = parameter(
        BREAKERS, "texts at which DRY's repeats end", most=64
    )

    def __post_init__(self):
        """Let the bundled demo read and write the text of random weights, by default."""
        if self.random and self.checkpoint == DEFAULT:
            object.__setattr__(self, "checkpoint", DEMO)

    @property
    def sampling(self) -> Sampling:
        """The parameters of the target's distribution."""
        return Sampling(*(getattr(self, name) for name in SAMPLING))

    @property
    def has_schema(self) -> bool:
        """Return whether every answer follows a JSON schema."""
        return self.grammar.endswith(".json")

    @property
    def tree_shape(self) -> str:
        """The value of `--tree`, or its default."""
        if self.tree_file:
            return "static"
        if self.tree:
            return self.tree
        default = (*spec_of(self).trees, "auto")[0]
        if default == "auto" and self.accept != "exact":
            return "dynamic"
        if default == "auto" and not has_drafts():
            # arithmetic bounds a CPU's passes: a chain has the fewest rows
            device = self.device or pick_device("")
            return "dynamic" if device.startswith("cuda") else "chain"
        return default

    @property
    def static_paths(self) -> tuple[tuple[int, ...], ...]:
        """The rank paths of a chain or a static tree. Raises: ValueError for a file."""
        if self.tree_shape == "chain":
            return StaticTree.chain(self.tree_depth or DEPTH).paths
        if self.tree_file:
            return load_part("trees", "of a file")(Path(self.tree_file))
        if self.draft in ("medusa", "hydra"):
            return load_part("trees", "of Medusa")
        return EAGLE1_PATHS

    @property
    def draft_tree(self) -> DynamicTree | StaticTree:
        """The tree of these options; with `--tree auto` the largest.

        Raises: ValueError for a tree that cannot be.
        """
        if self.tree_shape in ("chain", "static"):
            return StaticTree(self.static_paths)
        depth = self.tree_depth or DEPTH
        topk = self.tree_topk
        size = self.tree_size
        if not topk or not size:
            on_cuda = (self.device or pick_device("")).startswith("cuda")
            usual = part_or("machine", "usual_topk_and_size", _usual_topk_and_size)
            default_topk, default_size = usual(on_cuda, self.quant, self.dtype)
            topk = topk or default_topk
            size = size or min(default_size, 1 + candidates(depth, topk))
        return DynamicTree(depth, topk, size)

    @property
    def child_rule(self) -> str:
        """The rule by which children are picked: the one asked for, or that of `accept`."""
        if self.children:
            return self.children
        if self.accept != "residual":
            return "noise"
        return "topk" if self.grows else "sampled"

    @property
    def grows(self) -> bool:
        """Return whether the tree is grown, so that it has CHILDREN and NODES of its own."""
        is_sized = spec_of(self).static_size_option and not self.tree_file
        return is_sized or self.tree_shape in ("dynamic", "auto")

    def check(self) -> None:
        """Check every option. Raises: ValueError for a value or combination that cannot work."""
        check_values(self)
        self._check_texts()
        check_needs(self)
        self._check_files()
        self._check_tree()
        self._check_acceptance()

    def check_request(self) -> None:
        """Check what a request may change.

        Raises: ValueError for a value that cannot be, and where `accept` does not allow it.
        """
        check_values(self)
        self._check_texts()
        self._check_acceptance()

    def _check_texts(self) -> None:
        parse_biases(self.logit_bias)
        parse_ids(self.allowed_token_ids)
        fault = "penalties and rarer cuts are in the folder drafts/, which is not here; restore it"
        require(not self.sampling.is_shaped or has_drafts(), fault)

    def _check_acceptance(self) -> None:
        """Check that the rule of acceptance allows these parameters of sampling."""
        if self.accept == "exact":
            return
        rule = f"--accept {self.accept}"
        require(self.temperature > 0, f"{rule} needs a temperature above 0; raise it")
        usual = Sampling()
        others = [name for name in SAMPLING[4:] if getattr(self, name) != getattr(usual, name)]
        fault = f"{', '.join(others)} cannot go with {rule}; drop that"
        require(not others, fault)

    def _check_files(self) -> None:
        """Check files and folders before anything is computed, so that no result is lost."""
        for name in (self.checkpoint, self.head, self.draft_checkpoint):
            if name and not is_gguf(Path(name)) and not is_model_name(name):
                check_directory(Path(name))
        sources = ("prompt", "prompt_file", "prompt_ids", "interactive")
        given = [flag for flag, value in self._flags(sources) if value not in (None, False, "")]
        require(len(given) <= 1, f"prompts come from one place; {' and '.join(given)} were given")
        check_outputs(dict(self._flags(("json", "trace", "profile"))))

    def _flags(self, names: tuple[str, ...]) -> list[tuple[str, Any]]:
        """Return options as a user writes them, and their values."""
        return [(flag_of(f), getattr(self, f.name)) for f in fields(self) if f.name in names]

    def _check_tree(self) -> None:
        """Check that the nodes of a tree are enough for its shape, and for `accept`."""
        if self.grows:
            if self.tree_topk and self.tree_size:  # which refuses too few candidates
                DynamicTree(self.tree_depth or DEPTH, self.tree_topk, self.tree_size)
        elif self.accept == "residual":
            paths = self.static_paths
            for path in sorted(paths):  # the rule takes the k-th child for the k-th draw
                complete = path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths
                gap = f"ranks without gaps; before {path} another is missing: add it"
                require(complete, f"--accept residual needs {gap}")


# ---------------------------------------------------------------------- needs


class Need(NamedTuple):
    """A condition for options to work."""

    names: tuple[str, ...]
    # follows the option's name in the message; {0} is the options, {1} the trees of their draft
    text: str
    met: Callable[[GenerateConfig], Any]


ABSENT = "is in the folder drafts/, which is not here; restore it, or drop that"
# of several needs of an option the first that it misses is reported
NEEDS = (
    Need(("device",), "must be cpu or cuda; it is {0.device}",
         lambda o: re.fullmatch(r"(cpu|cuda)(:\d+)?", o.device)),
    Need(("group_size",), f"must be one of {(0, *GROUP_SIZES)}; it is {{0.group_size}}",
         lambda o: o.group_size in GROUP_SIZES),
    Need(("random",), "takes no --accept residual; drop one of them",
         lambda o: o.accept == "exact"),
    Need(("plain",), "is the opposite of --compile; drop one of them", lambda o: not o.compile),
    Need(("draft",), "model needs --draft_checkpoint; name its directory",
         lambda o: o.draft != "model" or o.draft_checkpoint),
    Need(("head",), "does nothing with --draft {0.draft}; drop it", lambda o: spec_of(o).head),
    Need(("draft_checkpoint",), "belongs to --draft model; add that", lambda o: o.draft == "model"),
    Need(("datastore",), "belongs to --draft rest; add that", lambda o: o.draft == "rest"),
    Need(("tree", "tree_file"),
         "does nothing with --draft {0.draft}, which has no choice of trees; drop it",
         lambda o: spec_of(o).trees != ()),
    Need(("tree", "tree_file"), "cannot be {0.tree_shape} with --draft {0.draft}; use {1}",
         lambda o: o.tree_shape in spec_of(o).trees),
    Need(("tree",), f"auto {ABSENT}", lambda o: o.tree != "auto" or has_drafts()),
    Need(("tree_file",), "{0.tree_file} is a static tree, not {0.tree}",
         lambda o: o.tree in ("", "static")),
    Need(("children",), "sampled would make a dynamic tree lossy; use --tree static",
         lambda o: o.children != "sampled" or not o.grows),
    Need(("accept",), "belongs to heads, draft models and --draft ngram; drop it",
         lambda o: spec_of(o).residual),
    # its tokens follow the tree, and --tree auto goes by a clock
    Need(("accept",), "needs a tree of one size; --tree auto changes it: use --tree dynamic",
         lambda o: o.tree != "auto"),
    Need(("accept",), "residual needs a draft that does not read the target's noise; "
         "drop --children noise", lambda o: o.children != "noise"),
    Need(("accept",), "residual samples the children of static trees; drop --children topk",
         lambda o: o.children != "topk" or o.grows),
    Need(("prompt",), "is empty; give it some text", lambda o: o.prompt.strip()),
    Need(("grammar",), ABSENT, lambda o: has_drafts()),
    Need(("chat",), "renders text; it cannot go with prompt_ids",
         lambda o: o.prompt_ids is None or o.chat == "none"),
    Need(("system",), "belongs to a chat template; drop --chat none or prompt_ids",
         lambda o: o.chat != "none" and o.prompt_ids is None),
    Need(("num_samples", "batch_size", "compare", "json", "trace", "profile"),
         "cannot go with --interactive, which is one conversation", lambda o: not o.interactive),
)  # fmt: skip


def check_needs(options: GenerateConfig) -> None:
    """Check that every given option has what it needs. Raises: ValueError for one that has not."""
    given = {f.name: f for f in fields(options) if getattr(options, f.name) != f.default}
    for need in NEEDS:
        for name in need.names:
            if name in given:
                trees = " or ".join(spec_of(options).trees)
                fault = f"{flag_of(given[name])} {need.text.format(options, trees)}"
                require(bool(need.met(options)), fault)


# ---------------------------------------------------------------------- sampling

SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "top_n_sigma", "typical_p", "xtc_probability",
    "xtc_threshold", "repetition_penalty", "presence_penalty", "frequency_penalty", "repeat_last_n",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "logit_bias", "min_tokens", "bad_words", "allowed_token_ids",
)  # fmt: skip
# of these, what has no effect at temperature 0
OF_DRAWS = SAMPLING[: SAMPLING.index("repetition_penalty")]


class Sampling(
    namedtuple("Sampling", SAMPLING, defaults=[getattr(GenerateConfig, name) for name in SAMPLING])
):
    """The parameters that turn the target's logits into a distribution (sampling.py).

    Their types, defaults and meanings are those of `GenerateConfig`.
    """

    __slots__ = ()

    @property
    def rescores(self) -> bool:
        """Return whether scores change by biases and masks, or by the text before them."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        masks = (self.min_tokens, self.bad_words, self.allowed_token_ids)
        return any((*penalties, self.dry_multiplier > 0, self.logit_bias, *masks))

    @property
    def is_shaped(self) -> bool:
        """Return whether more than the parameters of the flat files changes the distribution."""
        cuts = (self.top_n_sigma > 0, self.typical_p < 1, self.xtc_probability > 0)
        return self.rescores or (self.temperature > 0 and any(cuts))


def parse_biases(text: str) -> dict[int, float]:
    """Read `logit_bias`: numbers to add to scores, by token id.

    Raises: ValueError for another text, too many tokens, or a number out of its range.
    """
    form = 'logit_bias must be {"token id": number, ...}'
    try:
        raw = json.loads(text or "{}")
    except ValueError:
        raise ValueError(f"{form}; it is {text[:50]!r}") from None
    require(isinstance(raw, dict), f"{form}; it is {text[:50]!r}")
    fault = f"logit_bias may name {MOST_BIASES} tokens; it names {len(raw)}"
    require(len(raw) <= MOST_BIASES, fault)
    biases = {}
    for token, bias in raw.items():
        is_id = re.fullmatch(r"\d{1,9}", token)
        require(is_id is not None, f"{form}; {token[:50]!r} is no token id")
        in_range = type(bias) in (int, float) and -MOST_BIAS <= bias <= MOST_BIAS
        fault = f"a logit_bias must be from -{MOST_BIAS} to {MOST_BIAS}; that of {token} is {bias}"
        require(in_range, fault)
        biases[int(token)] = bias
    return biases


def parse_ids(text: str) -> list[int]:
    """Read `allowed_token_ids`. Raises: ValueError for another text."""
    ids = text.split(",") if text else []
    fault = f"allowed_token_ids must be token ids, as 5,17,3; it is {text[:50]!r}"
    require(all(re.fullmatch(r"\d{1,9}", id) for id in ids), fault)
    return list(map(int, ids))


def _usual_topk_and_size(on_cuda: bool, quant: str, dtype: str) -> tuple[int, int]:
    """Return the top-k and the nodes of a dynamic tree by default: the paper's."""
    return DynamicTree.topk, DynamicTree.size


def pick_device(name: str) -> str:
    """Call `pick_device` of runtime.py, which imports torch. Raises: as it does."""
    from runtime import pick_device as pick

    return pick(name)
