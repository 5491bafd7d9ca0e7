"""Model the time of a decode cycle on a GPU: launches, bytes and waves. Nothing here is measured.

    python scripts/gpu/time_model.py                   # 7B on an H100, and the distance to the aims
    python scripts/gpu/time_model.py --shape llama3-8b --gpu a100 --formats int4 --trees vanilla
    python scripts/gpu/time_model.py --formats int4 --trees "dynamic 6/8/32" --kernels   # launches
    python scripts/gpu/time_model.py --shape llama2-70b --gpu a100 --tp 4      # split as in tp.py

`cycle` lists the launches: kernel, time, count. Each also costs the boundary between two dependent
launches, a short one where both kernels are ours, so that the second may start early. The counts
are those of cycle_offline.py, to 2 %. waves.py has the times of products and attention, and all
constants. Every time is a range: with the hopeful constants, and with those that a review doubts.
`--measured FILE` replaces constants, and kernels by the names that `--kernels` prints (rows: 1, or
padded to 16, 32, 64..). Microseconds are a kernel's own, as in a profiler: without the boundary,
and without dependent launch.
    {"constants": {"boundary_us": 1.1}, "kernels_us": {"w13 int4 32": 21.5, "norm": 2.4}}
Batch 1, int4 in groups of 128, a head of one layer.
Not here: mixtures of experts, prefill.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from command_line import one_line_errors, option, parse
from draft_tree import DynamicTree
from extras.stand_in import Shape
from files import read_json
from hf.config import read_config
from model import ModelConfig
from scripts.gpu.waves import GPUS, Constants, Gpu, attention_us, product_us
from tp import check_parts

BITS = {"bf16": 16, "int8": 8, "int4": 4}  # of a weight
BYTES = {"bf16": 2, "int8": 1, "int4": 0.5 + 2 / 128}  # of a weight
FORMATS = {
    "bf16": ("bf16", "bf16"),
    "bf16+int4": ("bf16", "int4"),
    "int8": ("int8",) * 2,
    "int4": ("int4",) * 2,
}
# tokens/s of a 7B on an H100, with doubted and with hopeful constants: vanilla, a tree
AIMS = {
    "bf16": ((165, 195), (700, 820)),
    "bf16+int4": ((165, 195), (700, 820)),
    "int4": ((515, 600), (1550, 1800)),
}


class Tree(NamedTuple):
    """The tree that is drafted and verified."""

    name: str
    depth: int = 0  # 0: nothing is drafted
    topk: int = 0  # 1: a chain
    nodes: int = 1

    @staticmethod
    def parse(name: str) -> Tree:
        """Read `vanilla`, `chain N` or `dynamic D/K/N`. Raises: ValueError for anything else."""
        found = re.fullmatch(
            r"vanilla|chain ([1-9]\d*)|dynamic ([1-9]\d*)/([2-9]|[1-9]\d+)/([1-9]\d*)", name
        )
        if not found:
            raise ValueError(
                f"--trees: {name} is no tree; write vanilla, chain 5 or dynamic 6/8/32 "
                "(depth/top-k/size)"
            )
        chain, *sizes = (int(size) for size in found.groups(0))
        if sizes[0]:
            DynamicTree(*sizes)  # refuses what cannot be
            return Tree(name, *sizes)
        return Tree(name, chain, 1, chain + 1) if chain else Tree(name)


class Kernel(NamedTuple):
    """A kernel that a cycle launches `count` times."""

    name: str
    us: float  # alone, without the boundary
    count: int
    # it may start before the kernel in front of it is over: both have dependent launch
    early: bool = False
    received: float = 0.0  # bytes from other ranks


@dataclass(frozen=True)
class Case:
    """A model, a GPU, a format and a tree."""

    shape: Shape | ModelConfig
    gpu: Gpu
    measured: dict[str, float]  # microseconds of kernels
    form: str  # a key of FORMATS
    tree: Tree
    slots: int  # of the prefix
    ranks: int = 1  # GPUs that share the target
    measured_constants: dict[str, float] = field(default_factory=dict)

    @property
    def share(self) -> Case:
        """The case of a rank's part of the target."""
        s = self.shape
        part = replace(
            s,
            n_heads=s.n_heads // self.ranks,
            n_kv_heads=max(s.n_kv_heads // self.ranks, 1),
            ffn_dim=s.ffn_dim // self.ranks,
            vocab_size=-(-s.vocab_size // self.ranks),
        )
        return replace(self, shape=part)

    @property
    def drafts_with(self) -> Case:
        """The case of the LM head that drafts: the target's, or a full one in another format."""
        target, head = FORMATS[self.form]
        return self.share if target == head else replace(self, ranks=1)

    @property
    def doubted(self) -> Case:
        """The case with less hopeful constants; measured ones stay."""
        gpu = self.gpu.doubted()
        constants = replace(gpu.constants, **self.measured_constants)
        return replace(self, gpu=gpu._replace(constants=constants))

    @property
    def pdl(self) -> bool:
        """True where our kernels have programmatic dependent launch."""
        return self.gpu.device.capability >= 90


# ------------------------------------------------------------------------------- launches


def matrices(shape: Shape | ModelConfig) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of all products: a layer's, the LM head's, the draft head's fc."""
    dim = shape.dim
    heads = shape.n_heads * shape.head_dim
    kv_heads = shape.n_kv_heads * shape.head_dim
    return {
        "wqkv": (heads + 2 * kv_heads, dim),
        "wo": (dim, heads),
        "w13": (2 * shape.ffn_dim, dim),
        "w2": (dim, shape.ffn_dim),
        "head": (shape.vocab_size, dim),
        "fc": (dim, 2 * dim),
    }


def padded(rows: int) -> int:
    """Return one row, or the number of rows that the tiles hold."""
    for size in (1, 16, 32):
        if rows <= size:
            return size
    return math.ceil(rows / 64) * 64


def product(
    case: Case, name: str, form: str, rows: int, count: int, early: bool = True
) -> list[Kernel]:
    """List a product, and the sum of its splits where that is a launch of its own.

    early: one of ours may start early; False behind a kernel of the compiler's
    """
    N, K = matrices(case.shape)[name]
    c = case.gpu.constants
    label = f"{name} {form} {padded(rows)}"
    epilogue = "none"
    if name == "w13":
        epilogue = "swiglu"
    if name == "wqkv":
        epilogue = "rotary"
    if case.ranks == 1 and name in ("wo", "w2", "fc"):
        epilogue = "add"  # NCCL takes one sum, so not with ranks
    us, splits = product_us(rows, N, K, BITS[form], case.gpu, epilogue)
    sum_us = (4 * splits + 2) * rows * N / c.partials_tb_s / 1e6
    if epilogue in ("add", "rotary"):
        us += c.tail_us + sum_us
    if epilogue in ("swiglu", "rotary"):
        us += c.rms_us
    kernels = [Kernel(label, us, count, early)]
    if splits > 1 and epilogue == "none":
        kernels.append(Kernel(f"sum {label}", c.small_us + sum_us, count, early=True))
    return kernels


def attention(case: Case, rows: int, count: int) -> list[Kernel]:
    """List attention over the prefix and the rows themselves, and the combination of its chunks."""
    c = case.gpu.constants
    shape = case.shape
    label = f"attention {padded(rows)}"
    us, chunks = attention_us(rows, case.slots, shape, case.gpu)
    if chunks == 1:
        return [Kernel(label, us, count, early=True)]
    # to write or to read the partial sums
    sums_us = 4 * chunks * rows * shape.n_heads * shape.head_dim / c.partials_tb_s / 1e6
    return [Kernel(label, us + 2 * sums_us + chunks * c.combine_us, count, early=True)]


def collective(case: Case, name: str, received: float, count: int) -> list[Kernel]:
    """List a collective of the ranks, if there are several. received: bytes, by a rank"""
    if case.ranks == 1:
        return []
    c = case.gpu.constants
    us = c.collective_us + received / c.link_tb_s / 1e6
    return [Kernel(name, us, count, received=received)]


def lm_head(case: Case, form: str, rows: int, count: int, best: bool) -> list[Kernel]:
    """List the LM head, of which a rank has some rows, and the gather from the other ranks.

    best: the target's, behind a norm of ours; a score and a token are gathered for each row
    False: the drafter's; all scores are gathered
    """
    row_bytes = 16 if best else 4 * matrices(case.shape)["head"][0]
    received = rows * row_bytes * (case.ranks - 1)
    gather = collective(case, f"gather {padded(rows)}", received, count)
    return product(case, "head", form, rows, count, early=best) + gather


def layer(case: Case, rows: int, form: str, count: int, fc: bool = False) -> list[Kernel]:
    """List the launches of a layer, or with `fc` of the draft head's."""
    c = case.gpu.constants
    names = ("wqkv", "wo", "w13", "w2")
    if fc:
        names = ("fc", *names)
    found = []
    for name in names:
        behind_compiled = fc and name in ("fc", "wqkv")
        found += product(case, name, form, rows, count, early=not behind_compiled)
    found += attention(case, rows, count)
    # there and back in a ring, 2 bytes each
    received = 2 * rows * case.shape.dim * 2 * (case.ranks - 1) / case.ranks
    found += collective(case, f"all-reduce {padded(rows)}", received, 2 * count)
    if case.ranks > 1:  # no norm behind a product of its own
        found.append(Kernel("norm", c.norm_us, 2 * count, early=True))
    return found


def verify(case: Case) -> list[Kernel]:
    """List the target over the tree, the choice of its tokens, and the acceptance."""
    c = case.gpu.constants
    form = FORMATS[case.form][0]
    rows = case.tree.nodes
    found = layer(case.share, rows, form, case.shape.n_layers)
    found.append(Kernel("norm", c.norm_us, 2, early=True))  # the first and the last
    found += lm_head(case.share, form, rows, 1, best=True)
    small = 10 if case.tree.depth else 6
    found.append(Kernel("candidates", c.candidates_us, 1, early=True))
    found.append(Kernel("best", c.small_us, 1, early=True))
    found.append(Kernel("small", c.small_us, small))
    if case.tree.depth:
        found.append(Kernel("accept", c.accept_us, 1))
    return found


def draft(case: Case) -> list[Kernel]:
    """List the growth of the tree: the LM head for every level, the head's layer between them."""
    c = case.gpu.constants
    depth = case.tree.depth
    rows = case.tree.topk
    form = FORMATS[case.form][1]
    found = lm_head(case.drafts_with, form, rows, depth, best=False)
    found += layer(replace(case, ranks=1), rows, form, depth - 1, fc=True)
    found.append(Kernel("candidates", c.candidates_us, depth, early=True))
    found.append(Kernel("level", c.level_us, depth, early=True))
    found.append(Kernel("small", c.small_us, 2 * (depth - 1)))
    if rows > 1:
        found.append(Kernel("rerank", c.level_rerank_us, 1))
    return found


def cycle(case: Case) -> dict[str, list[Kernel]]:
    """List every launch of a cycle, by part, with measured times in place of estimates."""
    c = case.gpu.constants
    parts = {"verify": verify(case), "draft": [], "extend": []}
    if case.tree.depth:
        parts["draft"] = draft(case)
        form = FORMATS[case.form][1]
        extend = layer(replace(case, ranks=1), case.tree.depth + 1, form, 1, fc=True)
        parts["extend"] = [*extend, Kernel("small", c.small_us, 3)]
    parts["rest"] = [Kernel("small", c.small_us, 5)]
    products = matrices(case.shape)

    def final(k: Kernel) -> Kernel:
        us = case.measured.get(k.name, k.us)
        if case.pdl and k.early and k.name.split()[0] in products:
            us -= c.pdl_saves_us  # products fetch weights before their turn
        return k._replace(us=max(0.0, us))

    return {part: [final(k) for k in found] for part, found in parts.items()}


def times_ms(case: Case) -> dict[str, float]:
    """Return the time of each part of a cycle, with boundaries; `rest` has the start of a graph."""
    c = case.gpu.constants
    early_us = c.pdl_boundary_us if case.pdl else c.boundary_us
    parts = {}
    for part, kernels in cycle(case).items():
        us = sum(k.count * (k.us + (early_us if k.early else c.boundary_us)) for k in kernels)
        parts[part] = us / 1e3
    parts["rest"] += c.replay_us / 1e3
    return parts


def tokens_per_s(case: Case, tau: float) -> float:
    """Return the speed. tau: tokens of a cycle, where there is a tree"""
    tokens = tau if case.tree.depth else 1
    return tokens / sum(times_ms(case).values()) * 1e3


def weights_gb(case: Case) -> list[float]:
    """Return the weights that a rank reads in a cycle: to verify, and to draft."""

    def numbers(of: Case, *names: str) -> int:
        return sum(N * K for name, (N, K) in matrices(of.shape).items() if name in names)

    layer = ("wqkv", "wo", "w13", "w2")
    verified = case.shape.n_layers * numbers(case.share, *layer) + numbers(case.share, "head")
    drafted = case.tree.depth * (numbers(case, *layer, "fc") + numbers(case.drafts_with, "head"))
    target_form, head_form = FORMATS[case.form]
    return [verified * BYTES[target_form] / 1e9, drafted * BYTES[head_form] / 1e9]


def weights_ms(case: Case) -> float:
    """Return the time of reading the cycle's weights alone, at the bandwidth."""
    return sum(weights_gb(case)) / case.gpu.constants.bandwidth_tb_s


# ------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class ModelOptions:
    """Options. Units and effects are in the help texts."""

    shape: str = option(
        "llama2-7b",
        "a shape of scripts/bench/inflate.py, as llama2-7b,n_layers=16, or a model's directory",
    )
    gpu: str = option("h100", "the GPU", tuple(GPUS))
    formats: str = option(
        "bf16,bf16+int4,int8,int4", "formats; bf16+int4: a bf16 target with an int4 head"
    )
    trees: str = option(
        "vanilla,chain 5,dynamic 6/8/32,dynamic 6/10/60",
        "vanilla, chain N, dynamic depth/top-k/size",
    )
    slots: int = option(512, "tokens in the cache")
    tau: float = option(
        4.65, "tokens per cycle of every tree (EAGLE-2, arXiv 2406.16858, for a 7B)"
    )
    tp: int = option(1, "GPUs that share the target, as tp.py splits it", least=1)
    measured: str = option(
        "", "JSON file of measured constants and kernels, which replace the estimates"
    )
    kernels: bool = option(False, "also list the launches of every cycle")


def read_measured(name: str) -> tuple[dict[str, float], dict[str, float]]:
    """Read `--measured`: see the header. Returns: constants, times of kernels.

    Raises: ValueError for a file of another form.
    """
    if not Path(name).is_file():
        raise ValueError(
            f"--measured: there is no file {name}; name one as the header of this script describes"
        )
    found = read_json(Path(name))
    values = found.pop("constants", {})
    kernels = found.pop("kernels_us", {})
    if found or not (isinstance(values, dict) and isinstance(kernels, dict)):
        raise ValueError(
            f'{name} must be {{"constants": {{..}}, "kernels_us": {{..}}}}, names and numbers; '
            "correct it"
        )
    for key, value in [*values.items(), *kernels.items()]:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise ValueError(f"{name}: {key} must be a positive number; it is {value!r}")
    known = [constant.name for constant in fields(Constants)]
    for key in values:
        if key not in known:
            raise ValueError(
                f"{name}: {key} is no constant of the model; they are {', '.join(known)}"
            )
    return values, kernels


def cases(config: ModelOptions) -> list[Case]:
    """List every format with every tree. Raises: ValueError for a value that cannot work."""
    for name in ("slots", "tau"):
        if not 1 <= getattr(config, name) < math.inf:
            raise ValueError(f"--{name} must be at least 1; it is {getattr(config, name)}")
    forms = config.formats.split(",")
    trees = [Tree.parse(name) for name in config.trees.split(",")]
    for form in forms:
        if form not in FORMATS:
            raise ValueError(f"--formats: {form!r} is no format; use {', '.join(FORMATS)}")
    path = Path(config.shape)
    shape = read_config(path) if path.is_dir() else Shape.parse(config.shape)
    if shape.n_experts:
        raise ValueError(
            f"--shape: {config.shape} is a mixture of experts, which the model cannot do; "
            "use a dense one"
        )
    check_parts(shape, config.tp, path)
    device, constants = GPUS[config.gpu]
    known = {}
    measured = {}
    if config.measured:
        known, measured = read_measured(config.measured)
    gpu = Gpu(device, replace(constants, **known))
    return [
        Case(shape, gpu, measured, form, tree, config.slots, config.tp, known)
        for form in forms
        for tree in trees
    ]


def print_row(case: Case, *cells: object) -> None:
    """Print a row of a table, named by the format and the tree."""
    print(f"| {case.form} {case.tree.name} | {' | '.join(map(str, cells))} |")


def print_tables(config: ModelOptions, found: list[Case]) -> None:
    """Print the cycles, and the distance to the aims where there is one."""
    titles = "launches | verify, ms | draft | extend | rest | cycle | its weights | tokens/s | aim"
    print(f"| | {titles} |\n|" + "---|" * 10)
    known = (config.shape, config.gpu, config.tau) == ("llama2-7b", "h100", 4.65)
    for case in found:
        launches = sum(k.count for kernels in cycle(case).values() for k in kernels)
        ends_ms = [[*times_ms(end).values()] for end in (case, case.doubted)]
        hopeful, doubted = ([*parts_ms, sum(parts_ms)] for parts_ms in ends_ms)
        times = [f"{low:.2f} - {high:.2f}" for low, high in zip(hopeful, doubted, strict=True)]
        speeds = [tokens_per_s(end, config.tau) for end in (case.doubted, case)]
        reached = ""
        if known and case.form in AIMS and case.tree.topk != 1:
            aims = AIMS[case.form][case.tree.depth > 0]
            shares = [f"{speed / aim:.0%}" for speed, aim in zip(speeds, aims, strict=True)]
            reached = f"{aims[0]} - {aims[1]}: {' - '.join(shares)}"
        speed = " - ".join(f"{speed:.0f}" for speed in speeds)
        print_row(case, launches, *times, f"{weights_ms(case):.2f}", speed, reached)


def print_ranks(found: list[Case]) -> None:
    """Print the bytes that a rank reads in a cycle, and those that the ranks send each other."""
    print(
        "\n| a rank | weights to verify, GB | to draft | keys and values, MB | collectives "
        "| received, MB | ms |"
    )
    print("|" + "---|" * 7)
    for case in found:
        shape = case.share.shape
        boundary_us = case.gpu.constants.boundary_us
        # k and v, 2 bytes each
        cache_mb = 4 * shape.n_layers * shape.n_kv_heads * shape.head_dim * case.slots / 1e6
        kernels = [k for part in cycle(case).values() for k in part if k.received]
        count = sum(k.count for k in kernels)
        received_mb = sum(k.count * k.received for k in kernels) / 1e6
        ms = sum(k.count * (k.us + boundary_us) for k in kernels) / 1e3
        sizes = [f"{gb:.2f}" for gb in weights_gb(case)]
        print_row(case, *sizes, f"{cache_mb:.0f}", count, f"{received_mb:.0f}", f"{ms:.2f}")


def print_kernels(case: Case) -> None:
    """Print every launch, by the names that `--measured` takes."""
    print(f"\n| {case.form} {case.tree.name} | kernel | launches | us each |\n|---|---|---|---|")
    for part, kernels in cycle(case).items():
        print("\n".join(f"| {part} | {k.name} | {k.count} | {k.us:.2f} |" for k in kernels))


def run(config: ModelOptions) -> None:
    """Print the tables."""
    found = cases(config)
    gpus = f"{config.tp} x {config.gpu}" if config.tp > 1 else config.gpu
    print(
        f"A model's times, nothing measured here: {config.shape}, {gpus}, {config.slots} slots, "
        f"batch 1, constants {config.measured or 'estimated'}, "
        f"hopeful - doubted; "
        f"{config.tau:g} tokens a cycle (vanilla: 1).\n"
    )
    print_tables(config, found)
    if config.tp > 1:
        print_ranks(found)
    if config.kernels:
        for case in found:
            print_kernels(case)
    used = {k.name for case in found for part in cycle(case).values() for k in part}
    unused = ", ".join(sorted(set(found[0].measured) - used))
    if unused:
        print(f"\nnote: measured kernels that none of these cycles has: {unused}")


def main() -> None:
    config = parse(ModelOptions, "time_model.py", __doc__)
    with one_line_errors("time_model.py"):
        run(config)


if __name__ == "__main__":
    main()
