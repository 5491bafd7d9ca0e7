"""What a decode cycle should take on a GPU: a model of launches, bytes and waves. Nothing here is measured.

    python scripts/gpu/time_model.py                                          # 7B on an H100, and how far the aims are
    python scripts/gpu/time_model.py --shape llama3-8b --gpu a100 --formats int4 --trees "vanilla,dynamic 6/8/32"
    python scripts/gpu/time_model.py --formats int4 --trees "dynamic 6/8/32" --kernels      # every launch of the cycle
    python scripts/gpu/time_model.py --shape llama2-70b --gpu a100 --tp 4                   # split as tp.py does it

1. `cycle` lists the launches: kernel, time, how often. Each also costs the boundary between two dependent launches.
   The `DESIGNS` are cumulative; `CODE` is the one that the code follows.
2. waves.py gives the time of int4 and int8 products and of attention, and holds all constants.
3. `--measured FILE` replaces constants, and kernels by the names that `--kernels` prints (rows: 1, or padded to 16, 32,
   64..). Microseconds are a kernel's own, as a profiler has them: without the boundary, and without dependent launch.
   {"constants": {"boundary_us": 1.1, "bandwidth_tb_s": 4.2}, "kernels_us": {"w13 int4 32": 21.5, "norm": 2.4}}

Expect errors of 15 % (bf16) and 25 % (int4). The last design launches what scripts/gpu/cycle_offline.py counts, to 2 %.
Batch 1, int4 in groups of 128, a head of one layer. Not here: mixtures of experts, prefill.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, fields, replace
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

BYTES = {"bf16": 2, "int8": 1, "int4": 0.5 + 2 / 128}  # of a weight
FORMATS = {
    "bf16": ("bf16", "bf16"),
    "bf16+int4": ("bf16", "int4"),
    "int8": ("int8",) * 2,
    "int4": ("int4",) * 2,
}
AIMS = {
    "bf16": (190, 770),
    "bf16+int4": (190, 770),
    "int4": (515, 1600),
}  # tokens/s, 7B on an H100: vanilla, a tree


class Design(NamedTuple):
    """What has been done to launch less, and closer together."""

    fused: bool = False  # sums with the norm, SiLU in w13 (not in bf16), combine in attention
    pdl: bool = False  # programmatic dependent launch of our kernels, from sm_90 on
    level_kernel: bool = False  # one kernel for each grown level, two for the tree


DESIGNS = {
    "before": Design(),  # commit c495e77
    "8 or 9 launches a layer": Design(fused=True),
    "+ dependent launch": Design(fused=True, pdl=True),
    "+ a kernel per level": Design(fused=True, pdl=True, level_kernel=True),
}
CODE = "+ a kernel per level"  # where the code is: to be changed with the code


class Tree(NamedTuple):
    """What is drafted and verified."""

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
                f"--trees: {name} is no tree; write vanilla, chain 5 or dynamic 6/8/32 (depth/top-k/size)"
            )
        chain, *sizes = (int(size) for size in found.groups(0))
        if sizes[0]:
            DynamicTree(*sizes)  # refuses what cannot be
            return Tree(name, *sizes)
        return Tree(name, chain, 1, chain + 1) if chain else Tree(name)


class Kernel(NamedTuple):
    name: str
    us: float  # alone, without the boundary
    count: int
    ours: bool = False  # and so may start before the kernel in front of it is over
    received: float = 0.0  # bytes from other ranks


@dataclass(frozen=True)
class Case:
    """What is decoded with what."""

    shape: Shape | ModelConfig
    gpu: Gpu
    measured: dict[str, float]  # microseconds of kernels
    form: str  # a key of FORMATS
    tree: Tree
    slots: int  # of the prefix
    design: Design
    ranks: int = 1  # GPUs that share the target

    @property
    def share(self) -> Case:
        """The case of what a rank has of the target."""
        s, n = self.shape, self.ranks
        heads = {"n_heads": s.n_heads // n, "n_kv_heads": max(s.n_kv_heads // n, 1)}
        return replace(
            self,
            shape=replace(s, **heads, ffn_dim=s.ffn_dim // n, vocab_size=-(-s.vocab_size // n)),
        )

    @property
    def drafts_with(self) -> Case:
        """The case of the LM head that drafts: the target's, or a whole one in another format."""
        return self.share if len(set(FORMATS[self.form])) == 1 else replace(self, ranks=1)

    @property
    def pdl(self) -> bool:
        return self.design.pdl and self.gpu.device.capability >= 90


# ------------------------------------------------------------------------------------------- launches


def matrices(shape: Shape | ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every product: a layer's four, the LM head, and the draft head's first."""
    dim, heads, kv_heads = (
        shape.dim,
        shape.n_heads * shape.head_dim,
        shape.n_kv_heads * shape.head_dim,
    )
    layer = {
        "wqkv": (heads + 2 * kv_heads, dim),
        "wo": (dim, heads),
        "w13": (2 * shape.ffn_dim, dim),
    }
    return layer | {
        "w2": (dim, shape.ffn_dim),
        "head": (shape.vocab_size, dim),
        "fc": (dim, 2 * dim),
    }


def padded(rows: int) -> int:
    """A lone row, or as many as tiles hold."""
    return (
        rows if rows == 1 else 16 if rows <= 16 else 32 if rows <= 32 else math.ceil(rows / 64) * 64
    )


def product(case: Case, name: str, form: str, rows: int, count: int) -> list[Kernel]:
    """A product, and the sum of its splits where that is a launch of its own."""
    (N, K), c, label = (
        matrices(case.shape)[name],
        case.gpu.constants,
        f"{name} {form} {padded(rows)}",
    )
    if form == "bf16":
        us = max(2 * N * K / c.vendor_tb_s, 2 * N * K * rows / c.tensor_tflops) / 1e6
        return [Kernel(label, us + c.vendor_ramp_us, count)]
    kind = (
        {"w13": "swiglu", "wo": "split_k", "w2": "split_k", "fc": "split_k"}.get(name)
        if case.design.fused
        else None
    )
    kind = None if case.ranks > 1 and kind == "split_k" else kind  # NCCL takes one sum
    us, splits = product_us(rows, N, K, {"int8": 8, "int4": 4}[form], case.gpu, kind or "none")
    sum_us = c.small_us + (4 * splits + 2) * rows * N / c.partials_tb_s / 1e6
    summed = [Kernel(f"sum {label}", sum_us, count, ours=True)] * (splits > 1 and kind != "split_k")
    return [Kernel(label, us, count, ours=True), *summed]


def attention(case: Case, rows: int, count: int) -> list[Kernel]:
    """Attention over the prefix and the rows themselves, and what combines its chunks."""
    c, shape, label = case.gpu.constants, case.shape, padded(rows)
    us, chunks = attention_us(rows, case.slots, shape, case.gpu)
    sums_us = (
        4 * chunks * rows * shape.n_heads * shape.head_dim / c.partials_tb_s / 1e6
    )  # to write or to read them
    if chunks == 1:
        return [Kernel(f"attention {label}", us, count, ours=True)]
    if case.design.fused:
        return [
            Kernel(f"attention {label}", us + 2 * sums_us + c.last_combine_us, count, ours=True)
        ]
    combine = Kernel(f"combine {label}", c.combine_us + sums_us, count)
    return [Kernel(f"attention {label}", us + sums_us, count), combine]


def collective(case: Case, name: str, received: float, count: int) -> list[Kernel]:
    """What the ranks do together. received: bytes, by a rank"""
    c = case.gpu.constants
    us = c.collective_us + received / c.link_tb_s / 1e6
    return [Kernel(name, us, count, received=received)] * (case.ranks > 1)


def lm_head(case: Case, form: str, rows: int, count: int, best: bool = False) -> list[Kernel]:
    """The LM head, of which a rank has some rows, and what the other ranks send.

    best: a score and a token for each row; False: all their scores
    """
    received = rows * (16 if best else 4 * matrices(case.shape)["head"][0]) * (case.ranks - 1)
    return product(case, "head", form, rows, count) + collective(
        case, f"gather {padded(rows)}", received, count
    )


def layer(case: Case, rows: int, form: str, count: int, fc: bool = False) -> list[Kernel]:
    """The launches of a layer, or of the draft head's: with fc, and before `Design.fused` without its small kernels."""
    c, fused = case.gpu.constants, case.design.fused
    names = ("fc", "wqkv", "wo", "w13", "w2") if fc else ("wqkv", "wo", "w13", "w2")
    found = [k for name in names for k in product(case, name, form, rows, count)] + attention(
        case, rows, count
    )
    received = (
        2 * rows * case.shape.dim * 2 * (case.ranks - 1) / case.ranks
    )  # there and back in a ring, 2 bytes each
    found += collective(case, f"all-reduce {padded(rows)}", received, 2 * count)
    silu, add = (Kernel(name, c.small_us, count) for name in ("silu", "add"))
    if fused:
        norm = Kernel("add+sum+norm", c.norm_us + c.sum_in_norm_us, 2 * count, ours=True)
        return [
            *found,
            norm,
            Kernel("rope+cache", c.small_us, count, ours=True),
            *[silu] * (form == "bf16"),
        ]
    if fc:
        return found
    rope = Kernel("rope+cache", c.small_us, count * (2 if rows == 1 else 1))
    return [
        *found,
        Kernel("norm", c.norm_us, 2 * count),
        rope,
        silu,
        add,
    ]  # the second norm adds, too


def verify(case: Case) -> list[Kernel]:
    """The target over the tree, the choice of its tokens, and what is accepted."""
    c, (form, _), rows = case.gpu.constants, FORMATS[case.form], case.tree.nodes
    found = layer(case.share, rows, form, case.shape.n_layers) + lm_head(
        case.share, form, rows, 1, best=True
    )
    small = 14 if case.design.fused else 27  # 16 of them eager: the last norm, clocks
    found += [Kernel("argmax", c.argmax_us, 1), Kernel("small", c.small_us, small)]
    return found + [Kernel("accept", c.accept_us, 1)] * (case.tree.depth > 0)


def draft(case: Case) -> list[Kernel]:
    """Grow the tree: the LM head for every level, the head's layer between them."""
    c, (_, depth, rows, _), (_, form), design = (
        case.gpu.constants,
        case.tree,
        FORMATS[case.form],
        case.design,
    )
    found = lm_head(case.drafts_with, form, rows, depth) + layer(
        replace(case, ranks=1), rows, form, depth - 1, fc=True
    )
    dynamic = rows > 1
    if design.level_kernel:
        tree = [
            Kernel("level", c.level_us, 2 * depth, ours=True),
            Kernel("small", c.small_us, 4 * depth + 3),
        ]
        return found + tree + [Kernel("rerank", c.level_rerank_us, 1)] * dynamic
    if design.fused:
        return (
            found
            + [Kernel("grow", c.grow_us, 6 * depth)]
            + [Kernel("rerank", c.rerank_us, 1)] * dynamic
        )
    small = (
        (10 + (form != "bf16")) * (depth - 1) + 2 if dynamic else 7 * depth
    )  # study: 52 or 57 of 6 levels; 35 of 5
    found += [Kernel("small", c.small_us, small), Kernel("top-k", c.topk_us, 2 * depth)]
    sorts = [Kernel("sort", c.sort_us, depth - 1), Kernel("sort of all", c.pool_sort_us, 1)]
    return found + [*sorts, Kernel("bmm", c.bmm_us, 3)] * dynamic


def cycle(case: Case) -> dict[str, list[Kernel]]:
    """Every launch of a cycle, by part, with what was measured in the place of what was estimated."""
    c, fused, (_, form) = case.gpu.constants, case.design.fused, FORMATS[case.form]
    parts = {"verify": verify(case), "draft": [], "extend": []}
    if case.tree.depth:
        parts["draft"] = draft(case)
        extend = layer(replace(case, ranks=1), case.tree.depth + 1, form, 1, fc=True)
        parts["extend"] = [*extend, Kernel("small", c.small_us, 6 if fused else 8)]
    parts["rest"] = [Kernel("small", c.small_us, 7 if fused else 15)]
    saved = dict.fromkeys(
        matrices(case.shape), c.pdl_saves_us * case.pdl
    )  # products fetch weights before their turn

    def final(k: Kernel) -> Kernel:
        us = case.measured.get(k.name, k.us) - saved.get(k.name.split()[0], 0) * k.ours
        return k._replace(us=max(0.0, us))

    return {part: [final(k) for k in found] for part, found in parts.items()}


def times_ms(case: Case) -> dict[str, float]:
    """What each part of a cycle takes, boundaries included; the start of a graph belongs to `rest`."""
    c = case.gpu.constants
    gaps = {False: c.boundary_us, True: c.pdl_boundary_us if case.pdl else c.boundary_us}
    parts = {
        part: sum(k.count * (k.us + gaps[k.ours]) for k in found) / 1e3
        for part, found in cycle(case).items()
    }
    return parts | {"rest": parts["rest"] + c.replay_us / 1e3}


def tokens_per_s(case: Case, tau: float) -> float:
    """tau: tokens of a cycle, where there is a tree."""
    return (tau if case.tree.depth else 1) / sum(times_ms(case).values()) * 1e3


def weights_gb(case: Case) -> list[float]:
    """What a rank reads of weights in a cycle: to verify, and to draft."""

    def numbers(of: Case, *names: str) -> int:
        return sum(N * K for name, (N, K) in matrices(of.shape).items() if name in names)

    layer = ("wqkv", "wo", "w13", "w2")
    verified = case.shape.n_layers * numbers(case.share, *layer) + numbers(case.share, "head")
    drafted = case.tree.depth * (numbers(case, *layer, "fc") + numbers(case.drafts_with, "head"))
    return [
        n * BYTES[form] / 1e9
        for n, form in zip((verified, drafted), FORMATS[case.form], strict=True)
    ]


def weights_ms(case: Case) -> float:
    """What reading the cycle's weights alone would take at the bandwidth."""
    return sum(weights_gb(case)) / case.gpu.constants.bandwidth_tb_s


# --------------------------------------------------------------------------------------------- tables


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
    design: str = option(
        CODE, "of the first table and of --kernels; the second table has all", tuple(DESIGNS)
    )
    tp: int = option(1, "GPUs that share the target, as tp.py splits it", least=1)
    measured: str = option(
        "", "JSON file of measured constants and kernels, which replace the estimates"
    )
    kernels: bool = option(False, "also list the launches of every cycle")


def read_measured(name: str, constants: Constants) -> tuple[Constants, dict[str, float]]:
    """Read `--measured`: see the header. Raises: ValueError for what is no such file."""
    if not Path(name).is_file():
        raise ValueError(
            f"--measured: there is no file {name}; name one as the header of this script describes"
        )
    found, known = read_json(Path(name)), [field.name for field in fields(Constants)]
    values, kernels = (found.pop(key, {}) for key in ("constants", "kernels_us"))
    if found or not (isinstance(values, dict) and isinstance(kernels, dict)):
        raise ValueError(
            f'{name} must be {{"constants": {{..}}, "kernels_us": {{..}}}}, names and numbers; correct it'
        )
    for key, value in [*values.items(), *kernels.items()]:
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 < value < math.inf
        ):
            raise ValueError(f"{name}: {key} must be a positive number; it is {value!r}")
    for key in (key for key in values if key not in known):
        raise ValueError(f"{name}: {key} is no constant of the model; they are {', '.join(known)}")
    return replace(constants, **values), kernels


def cases(config: ModelOptions) -> list[Case]:
    """Every format with every tree. Raises: ValueError for a value that cannot work."""
    for name in ("slots", "tau"):
        if not 1 <= getattr(config, name) < math.inf:
            raise ValueError(f"--{name} must be at least 1; it is {getattr(config, name)}")
    forms, trees = config.formats.split(","), [Tree.parse(name) for name in config.trees.split(",")]
    for form in forms:
        if form not in FORMATS:
            raise ValueError(f"--formats: {form!r} is no format; use {', '.join(FORMATS)}")
    shape = (
        read_config(Path(config.shape))
        if Path(config.shape).is_dir()
        else Shape.parse(config.shape)
    )
    if shape.n_experts:
        raise ValueError(
            f"--shape: {config.shape} is a mixture of experts, which the model cannot do; use a dense one"
        )
    check_parts(shape, config.tp, Path(config.shape))
    (device, constants), measured = GPUS[config.gpu], {}
    if config.measured:
        constants, measured = read_measured(config.measured, constants)
    rest = config.slots, DESIGNS[config.design], config.tp
    return [
        Case(shape, Gpu(device, constants), measured, form, tree, *rest)
        for form in forms
        for tree in trees
    ]


def print_tables(config: ModelOptions, found: list[Case]) -> None:
    """The cycles of the chosen design; then tokens/s of all designs, and the aims where there are any."""
    print(
        "| | launches | verify, ms | draft | extend | rest | cycle | its weights | tokens/s |\n|"
        + "---|" * 9
    )
    for case in found:
        parts, launches = (
            times_ms(case),
            sum(k.count for found in cycle(case).values() for k in found),
        )
        numbers = " | ".join(
            f"{ms:.2f}" for ms in [*parts.values(), sum(parts.values()), weights_ms(case)]
        )
        print(
            f"| {case.form} {case.tree.name} | {launches} | {numbers} | {tokens_per_s(case, config.tau):.0f} |"
        )
    known = (config.shape, config.gpu, config.tau) == ("llama2-7b", "h100", 4.65)
    print(f"\n| tokens/s | {' | '.join(DESIGNS)} | aim |\n|" + "---|" * (len(DESIGNS) + 2))
    for case in found:
        speeds = {
            name: tokens_per_s(replace(case, design=design), config.tau)
            for name, design in DESIGNS.items()
        }
        aim = (
            AIMS[case.form][case.tree.depth > 0]
            if known and case.form in AIMS and case.tree.topk != 1
            else 0
        )
        far = f"{aim}: {config.design} reaches {speeds[config.design] / aim:.0%}" if aim else ""
        print(
            f"| {case.form} {case.tree.name} | {' | '.join(f'{v:.0f}' for v in speeds.values())} | {far} |"
        )


def print_ranks(found: list[Case]) -> None:
    """What a rank reads in a cycle, and what the ranks send each other."""
    print(
        "\n| a rank | weights to verify, GB | to draft | keys and values, MB | collectives | received, MB | ms |"
    )
    print("|" + "---|" * 7)
    for case in found:
        shape, c = case.share.shape, case.gpu.constants
        cache_mb = (
            4 * shape.n_layers * shape.n_kv_heads * shape.head_dim * case.slots / 1e6
        )  # k and v, 2 bytes each
        kernels = [k for part in cycle(case).values() for k in part if k.received]
        count = sum(k.count for k in kernels)
        received_mb = sum(k.count * k.received for k in kernels) / 1e6
        ms = sum(k.count * (k.us + c.boundary_us) for k in kernels) / 1e3
        sizes = " | ".join(f"{gb:.2f}" for gb in weights_gb(case))
        print(
            f"| {case.form} {case.tree.name} | {sizes} | {cache_mb:.0f} | {count} | {received_mb:.0f} | {ms:.2f} |"
        )


def print_kernels(case: Case) -> None:
    """Every launch, by the names that `--measured` takes."""
    print(f"\n| {case.form} {case.tree.name} | kernel | launches | us each |\n|---|---|---|---|")
    for part, kernels in cycle(case).items():
        print("\n".join(f"| {part} | {k.name} | {k.count} | {k.us:.2f} |" for k in kernels))


def run(config: ModelOptions) -> None:
    """Print what was asked for."""
    found = cases(config)
    gpus = f"{config.tp} x {config.gpu}" if config.tp > 1 else config.gpu
    print(f"A model's times, nothing measured here: {config.shape}, {gpus}, {config.slots} slots, batch 1, "
          f"constants {config.measured or 'estimated'}; design `{config.design}`; {config.tau:g} tokens a cycle "
          "(vanilla: 1).\n")  # fmt: skip
    print_tables(config, found)
    if config.tp > 1:
        print_ranks(found)
    for case in found if config.kernels else []:
        print_kernels(case)
    unused = set(found[0].measured) - {
        k.name for case in found for part in cycle(case).values() for k in part
    }
    if unused:
        print(
            f"\nnote: measured kernels that none of these cycles has: {', '.join(sorted(unused))}"
        )


def main() -> None:
    config = parse(ModelOptions, "time_model.py", __doc__)
    with one_line_errors("time_model.py"):
        run(config)


if __name__ == "__main__":
    main()
