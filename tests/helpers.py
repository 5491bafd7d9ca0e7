"""Helpers of several test files: engines made from parts, golden traces, weights, recorded calls,
a chi-square test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import backends.experts
import backends.linear
import backends.triton.layout
import backends.weight
from backends.block_planes import planes_of_blocks
from backends.blocks import Blocks, Numbers
from backends.epilogues import HeadNorms
from backends.library import has_cpu_operators
from backends.strips import part_bytes, table_of
from backends.weight import Weight
from decode import build_cycles
from draft_tree import Candidates, DecodedTokens, StaticTree
from drafters import Drafter, TreeDrafter
from drafts.by_value import ByValue
from drafts.residual import sample_children
from drafts.shaping import ShapedRule, Shaping
from eagle_draft import EagleHead, load_head
from files.weights import export_weights, load_model
from model import Layer, ModelConfig, Transformer, weight_names
from options import cache_folder
from quantize import FORMATS, Linear, stack
from reference import TORCH, Backend, choose, rms_norm
from run.engine import Engine
from run.heads import linear_of
from run.observer import DraftMethod, method_of
from run.options import GenerateConfig, Sampling
from run.session import Session
from runtime import compiled_by_layer
from sampling import SamplingTensors
from scripts.train import training
from steps import Rows

GOLDEN = Path(__file__).parent / "golden"
# of the project's code, beside the files of its root
FOLDERS = ("backends", "files", "models", "drafts", "run", "server", "scripts", "examples")
PROMPTS = [[5, 17, 3, 40, 8, 22, 61], [9, 33, 2, 71, 54, 90, 12, 6, 28, 77, 1, 45]]
COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="needs a C++ compiler"
)
OPERATORS = pytest.mark.skipif(not has_cpu_operators(), reason="needs the CPU operators")
LOOP = [5, 17, 3, 40, 8, 5, 17, 3, 40, 8, 5, 17, 3]  # a prompt that repeats itself


class Operators(TorchDispatchMode):
    """Counts the operators that run, by their names; ours without their library's."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.calls[operator.name().removeprefix("gpt_eagle::")] += 1
        return operator(*args, **kwargs or {})


class Mixture(Layer):
    """The feed-forward of a layer with experts."""

    def __init__(self, config: ModelConfig):
        super().__init__(config.mixture())

    def forward(self, x: Tensor) -> Tensor:  # [B, T, F] -> [B, T, F]
        return super().forward(Rows(h=x)).h


def trimmed_head(head: str | Path, out: Path, ids: Tensor) -> str:
    """Write a copy of a head of EAGLE-1 that drafts only some tokens, in ascending order. Returns: its path."""
    shutil.copytree(head, out)
    held = load_file(out / "model.safetensors")
    save_file(held | {"d2t": ids - torch.arange(len(ids))}, out / "model.safetensors")
    return str(out)


def write_random_llama(out: Path, **shape: int) -> Transformer:
    """Write a LLaMA of two layers with random weights for the demo's tokens, or with experts a Mixtral."""
    torch.manual_seed(0)
    c = ModelConfig(64, 2, 2, 1, 32, 64, **{"vocab_size": 4096, "max_context": 2048} | shape)
    model = Transformer(c)
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.02)
    kind = "Mixtral" if c.n_experts else "Llama"
    keys = {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower()}
    keys |= {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"}
    if c.n_experts:
        keys |= {"num_local_experts": c.n_experts, "num_experts_per_tok": c.experts_per_token}
    tensors = export_weights(model, weight_names(c), c, torch.bfloat16)
    training.write_checkpoint(out, tensors, keys | training.shape_keys(c), {})
    return model


# ------------------------------------------------------------------------------------------ engines


def engine_for(
    target: Transformer, drafter: Drafter, method: DraftMethod | None = None, **options: Any
) -> Engine:
    """An engine on the CPU from a model and a drafter in memory; its sessions keep their trace.

    It is warm, and no clock counts.
    method: replaces the drafter's own
    options: fields of GenerateConfig; end-of-sequence ids are the target's own
    """
    config = GenerateConfig(**{"device": "cpu", "trace": "-", **options})
    context = config.context or min(target.config.max_context, 512)
    shaping = Shaping(target.config.vocab_size)
    engine = Engine(target, (), context, target.config.eos_ids, config=config, shaping=shaping)
    engine = engine.with_method(method or method_of(drafter))
    policy = copy(engine.policy)
    policy.warm = True
    return build_cycles(replace(engine, policy=policy))


class Scripted(ByValue):
    """A policy of a test, which gives `pick`. Sessions share it, so that the test can look into it."""

    def __init__(self, kept: Any = None):
        super().__init__(kept=kept)
        self.warm = True

    def for_session(self) -> Scripted:
        self.expected, self.missed = None, []
        return self


class InTurn(Scripted):
    """Every preset that makes sense, one after the other, and the largest between them."""

    cycles = 0

    def pick(self, limit: int) -> int:
        self.cycles += 1
        return limit if self.cycles % 2 else self.cycles // 2 % (limit + 1)


def fresh(engine: Engine, captured: bool | None = None) -> Engine:
    """The engine over buffers that hold nothing. captured: whether cycles run over fixed buffers; None: as before"""
    if captured is None:
        captured = engine.captured
    return replace(engine, captured=captured, free=[])


def compiled_as_on_cuda(engine: Engine) -> Engine:
    """The engine with the cycles that --compile makes on CUDA: compiled by layer, over buffers that stay.

    With the fixture `traced` nothing is written in C++. Where nothing is traced, Inductor compiles for this processor.
    """
    assert not engine.config.compile, "on a CPU that is another thing"
    engine.target.backend.complete()
    cycles = tuple(
        tuple(compiled_by_layer(engine.cycle(preset, mode)) for preset in engine.presets)
        for mode in engine.modes
    )
    return replace(engine, cycles=cycles, captured=True, free=[])


def decode(engine: Engine, *prompts: list[int]) -> Session:
    """Decode one turn of the prompts, row by row, to the end. Row i reads the noise of prompt i."""
    return in_turn(Session(engine, [(i, 0) for i in range(len(prompts))]), *prompts)


def golden_run(drafter: Drafter, *prompts: list[int], **options: Any) -> Session:
    """Decode prompts with the golden target and a drafter, past any end of sequence."""
    options = {"ignore_eos": True, "batch_size": len(prompts), **options}
    return decode(engine_for(golden_target(), drafter, **options), *prompts)


def in_turn(session: Session, *prompts: list[int] | None) -> Session:
    """Decode a turn of each prompt to its end; a row without a prompt is idle. Returns: the session."""
    for _ in session.decode_turn(list(prompts)):
        pass
    return session


# ------------------------------------------------------------------------------------- heads' norms


def with_head_norms(qkv: Tensor, kv_heads: int, norms: HeadNorms | None) -> Tensor:
    """Norm each query and key, in plain operations and as transformers' Qwen3 does. qkv: [B, T, H + 2 Hkv, E]."""
    if norms is None:
        return qkv
    q, k, v = qkv.split((qkv.shape[2] - 2 * kv_heads, kv_heads, kv_heads), dim=2)
    of_q, of_k, eps = norms
    return torch.cat((rms_norm(q, of_q, eps), rms_norm(k, of_k, eps), v), dim=2)


def share_that_differs(got: list[Tensor], want: list[Tensor]) -> float:
    """Of all values the share that has other bits."""
    differ = torch.cat([(ours != theirs).flatten() for ours, theirs in zip(got, want, strict=True)])
    return differ.float().mean().item()


# ------------------------------------------------------------------------------------------- golden


@cache
def golden_case(name: str) -> dict:
    """The discrete trace of a golden case. Shared between tests: do not change it."""
    return json.loads((GOLDEN / name / "golden.json").read_text(encoding="utf-8"))


@cache
def golden_floats(name: str) -> dict[str, Tensor]:
    """The tensors that a golden case recorded in its first run."""
    return load_file(GOLDEN / name / "trace_run0.safetensors")


@cache
def golden_target(name: str = "models/target_llama_mha") -> Transformer:
    """A golden target in fp32. Shared between tests: do not change it."""
    return load_model(GOLDEN / name, torch.float32)


def golden_head(
    name: str = "models/head_eagle12_mha", target: Transformer | None = None
) -> EagleHead:
    """A golden head in fp32, loaded anew."""
    return load_head(GOLDEN / name, target or golden_target())


def slow(cases) -> list:
    """Parameters of cases that run with `-m slow` only."""
    return [
        pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def pairwise(every: tuple[str, ...] = (), fixtures: tuple[str, ...] = (), **values):
    """Parametrize a test so that every pair of values of two arguments occurs; the other combinations are slow.

    every: arguments of which every combination occurs, not only every pair
    fixtures: arguments that are parameters of the fixtures of these names
    """
    names = list(values)
    cases = list(product(*values.values()))

    def covered(case) -> set[tuple]:
        named = tuple(zip(names, case))
        return {*combinations(named, 2), tuple(x for x in named if x[0] in every)}

    missing = set().union(*map(covered, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(missing & covered(case)))
        chosen.append(best)
        missing -= covered(best)
    rest = [case for case in cases if case not in chosen]
    return pytest.mark.parametrize(",".join(names), [*chosen, *slow(rest)], indirect=fixtures)


def run_in_interpreter(cases: list[Path], passed: str) -> None:
    """Run files in a process in which Triton interprets its kernels. passed: pattern of how many must pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *cases]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[1], env=env
    )
    assert result.returncode == 0 and re.search(passed, result.stdout), (
        result.stdout + result.stderr
    )


def noisy_copy(model: Transformer, scale: float) -> Transformer:
    """A copy with noise on every matrix, relative to its own spread: a draft model that is right now and then."""
    copy, generator = deepcopy(model), torch.Generator().manual_seed(0)
    for parameter in copy.parameters():
        if parameter.dim() > 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += scale * float(parameter.std()) * noise
    return copy


# ------------------------------------------------------------------------------------------ weights


class Quantized(NamedTuple):
    """Random weights as a product of CUDA takes them."""

    group: int  # of int4 scales; 0: the others
    packed: Tensor  # or [N, K] floats
    scale: Tensor | None  # None: floats

    def reference(self, x: Tensor) -> Tensor:
        """The product in the plainest way."""
        if self.scale is None:
            return x @ self.packed.to(x.dtype).T
        if self.scale.dtype == torch.float16:
            return backends.planes.blocks_a16_reference(x, self.packed, self.scale)
        product = backends.planes.w4a16_reference if self.group else backends.planes.w8a16_reference
        return product(x, self.packed, self.scale)

    def operator(self, x: Tensor) -> Tensor:
        """The product by the operator."""
        if self.scale is None:
            return backends.linear.halves_product(x, self.packed.to(x.dtype), "none")
        if self.scale.dtype == torch.float16:
            return backends.planes.blocks_a16(x, self.packed, self.scale)
        return (backends.planes.w4a16 if self.group else backends.planes.w8a16)(
            x, self.packed, self.scale
        )


def quantized(form: str, N: int, K: int, device: str = "cpu", seed: int = 0) -> Quantized:
    """Random weights of N outputs and K inputs. form: int8, or int4 and its group, as int4-128; with zero points and
    fp16 scales, int4-128-zeros; or float, exact in 16 bits; or a type of GGUF, as Q4_K."""
    g = torch.Generator(device).manual_seed(seed)
    if form == "float":
        weight = torch.randn(N, K, generator=g, device=device).bfloat16().float()
        return Quantized(0, weight, None)
    if form in backends.triton.layout.BLOCK_FORMS:
        content = torch.from_numpy(gguf_blocks(form, N, K, seed=seed)).to(device)
        return Quantized(0, *planes_of_blocks(form, content))
    group = int(form.split("-")[1]) if form != "int8" else 0
    top = 7 if group else 127
    codes = torch.randint(
        -top - (group > 0), top + 1, (N, K), generator=g, device=device, dtype=torch.int8
    )
    scale = torch.rand(N, K // group if group else 1, generator=g, device=device) * 0.1 + 0.01
    if group:
        zero = torch.randint(-8, 9, scale.shape, generator=g, device=device, dtype=torch.int8)
        scale = (
            backends.weight.join_zeros(scale.half(), zero)
            if form.endswith("zeros")
            else scale.bfloat16()
        )
        return Quantized(
            group,
            backends.triton.layout.pack_int4_planes(codes),
            backends.triton.layout.pack_scales(scale, group),
        )
    return Quantized(0, backends.triton.layout.pack_int8_planes(codes), scale[:, 0])


class QuantizedExperts(NamedTuple):
    """Stacks of random weights as a product with experts takes them."""

    weight: Tensor  # [E, N, K], or packed
    scale: Tensor | None  # None: weight is float
    parts: list[Quantized]  # of each expert, where they are not

    def reference(self, x: Tensor, expert: Tensor) -> Tensor:
        """The product in the plainest way."""
        y = x.new_empty(len(x), self.weight.shape[-2])
        for e, rows in backends.experts.rows_by_expert(expert):
            y[rows] = (
                self.parts[e].reference(x[rows])
                if self.parts
                else x[rows] @ self.weight[e].to(x.dtype).T
            )
        return y

    def operator(self, x: Tensor, routing: Tensor) -> Tensor:
        """The product by the operator."""
        if not self.parts:
            return backends.experts.experts_linear(x, self.weight, routing)
        product = backends.planes.w4a16 if self.parts[0].group else backends.planes.w8a16
        if self.scale.dtype == torch.float16:
            product = backends.planes.blocks_a16
        return product(x, self.weight, self.scale, routing)


def quantized_experts(
    form: str, experts: int, N: int, K: int, device: str = "cpu"
) -> QuantizedExperts:
    """Random weights of each expert. form: float (fp32), or as `quantized` takes it."""
    if form == "float":
        g = torch.Generator(device).manual_seed(0)
        return QuantizedExperts(torch.randn(experts, N, K, generator=g, device=device), None, [])
    parts = [quantized(form, N, K, device, seed) for seed in range(experts)]
    return QuantizedExperts(
        *(torch.stack([getattr(p, name) for p in parts]) for name in ("packed", "scale")), parts
    )


class BlockKind(NamedTuple):
    """A type of GGUF whose weights come in blocks."""

    type_id: int
    elements: int  # of a block
    size: int  # of a block (bytes)
    group: int  # elements that share a scale
    scale_at: int | None  # byte of a block's float16 scale; None: its first byte is a power of two
    least_at: int | None  # byte of its float16 minimum
    least: float  # minimum over scale where random weights have a mean of 0
    spread: float  # their standard deviation where the scale is 1


BLOCK_KINDS = {
    "Q4_0": BlockKind(2, 32, 18, 32, 0, None, 0, 4.6),
    "Q4_1": BlockKind(3, 32, 20, 32, 0, 2, -7.5, 4.6),
    "Q5_0": BlockKind(6, 32, 22, 32, 0, None, 0, 9.2),
    "Q5_1": BlockKind(7, 32, 24, 32, 0, 2, -15.5, 9.2),
    "Q8_0": BlockKind(8, 32, 34, 32, 0, None, 0, 74),
    "Q2_K": BlockKind(10, 256, 84, 16, 80, 82, 1.5, 13.9),
    "Q3_K": BlockKind(11, 256, 110, 16, 108, None, 0, 43),
    "Q4_K": BlockKind(12, 256, 144, 32, 0, 2, 7.5, 259),
    "Q5_K": BlockKind(13, 256, 176, 32, 0, 2, 15.5, 527),
    "Q6_K": BlockKind(14, 256, 210, 16, 208, None, 0, 1364),
    "MXFP4": BlockKind(39, 32, 17, 32, None, None, 0, 5.85),
}


def gguf_blocks(name: str, N: int, K: int, spread: float = 1.0, seed: int = 0) -> numpy.ndarray:
    """Random blocks of N rows of K weights, [N, bytes of a row] uint8: any codes, scales of either sign.

    spread: standard deviation of the weights, roughly
    """
    kind = BLOCK_KINDS[name]
    rng = numpy.random.default_rng(seed)
    blocks = rng.integers(0, 256, (N, K // kind.elements, kind.size), dtype=numpy.uint8)
    scales = rng.uniform(0.5, 1.3, blocks.shape[:2]) * rng.choice((-1, 1), blocks.shape[:2])
    scales *= spread / kind.spread
    if kind.scale_at is None:
        blocks[..., 0] = numpy.log2(abs(scales)).round() + 128
    else:
        set_halves(blocks, kind.scale_at, scales)
    if kind.least_at is not None:
        set_halves(blocks, kind.least_at, scales * kind.least)
    return blocks.reshape(N, -1)


def set_halves(blocks: numpy.ndarray, at: int, value: Any) -> None:
    """Put float16 numbers at a byte of every block. Writes: blocks, [..., bytes of a block]."""
    halves = numpy.broadcast_to(value, blocks.shape[:-1]).astype(numpy.float16)
    blocks[..., at : at + 2] = halves[..., None].view(numpy.uint8)


def random_blocks(name: str, n: int, k: int, seed: int = 0, order: Tensor | None = None) -> Blocks:
    """A weight of random blocks, of the spread that layers have."""
    content = torch.from_numpy(gguf_blocks(name, n, k, k**-0.5, seed))
    return Blocks(name, content, BLOCK_KINDS[name].type_id, k, order)


def weight_of_blocks(*parts: Blocks | Numbers) -> Weight:
    """The weight of a layer whose parts lie in a GGUF file."""
    inputs = parts[0].shape[1]
    kinds = tuple(part.part for part in parts)
    sizes = [part_bytes(kind, inputs) for kind in kinds]
    out = torch.full((sum(sizes),), 255, dtype=torch.uint8)
    for part, strips in zip(parts, out.split(sizes)):
        part.pack(strips, Path("m.gguf"))
    return Weight(out, kinds, inputs, table_of(kinds, inputs, sizes))


def packed_blocks(*parts: Blocks | Numbers) -> tuple[Tensor, Tensor]:
    """The bytes and the table of such a weight."""
    weight = weight_of_blocks(*parts)
    return weight.data, weight.table


def planes_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay out codes for CUDA on every device, so that layers multiply as there."""
    monkeypatch.setattr("backends.strips.pack_on_cpu", backends.planes.pack_on_cuda)


def layer_of(weight: Weight | Tensor, bias: Tensor | None = None, fp32_out: bool = False) -> Linear:
    """A layer of a weight with the backend of this machine."""
    return linear_of(weight, bias, fp32_out, choose(torch.device("cpu")))


def rounded(
    format: str, weight: Tensor, bias: Tensor | None = None, group: int = 128, wide: bool = False
) -> Linear:
    """A layer of a weight, [N, K] or [E, N, K] float, rounded to a format, with its device's backend."""
    kind = FORMATS[format]
    backend = choose(weight.device)
    if weight.dim() == 2:
        return linear_of(kind.round(weight, group), bias, wide, backend)
    stacked = stack((kind.round(each, group) for each in weight), len(weight))
    return linear_of(stacked, backend=backend)


# -------------------------------------------------------------------------------------------- tools


def copy_operators(home: Path) -> None:
    """Copy the built C++ operators to where a program looks for them with XDG_CACHE_HOME=home."""
    (home / "gpt-eagle").mkdir(0o700, exist_ok=True)
    for library in cache_folder().glob("*.so"):
        shutil.copy2(library, home / "gpt-eagle")


def refused(capsys, command: Callable[..., Any], *operands: Any, prints: bool = False) -> str:
    """Run a command that a user's mistake ends: status 2 and, behind its notes, one line on standard error.

    prints: whether it may have printed something before
    Returns: the line.
    """
    capsys.readouterr()  # of what came before
    with pytest.raises(SystemExit) as stop:
        command(*operands)
    out, err = capsys.readouterr()
    *notes, error = err.splitlines()
    assert stop.value.code == 2 and (prints or out == ""), (out, err)
    assert all(line.startswith("note: ") for line in notes), err
    assert re.match(r"\w+\.py( \w+)?: ", error), err
    return error


def order_of(tree: StaticTree) -> list[tuple[int, ...]]:
    """Paths by node number."""
    return [path for level in tree.levels for path in level]


def text_with(root: Tensor) -> DecodedTokens:
    """A text in which `root`, [B] int64, was decided last, between other tokens."""
    return DecodedTokens(torch.stack((root + 1, root, root + 2), 1), torch.ones_like(root))


def token_paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """The tokens from below the root to every node but the root, from those of the nodes."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def drafted_paths(line: dict) -> list[tuple[int, ...]]:
    """`token_paths` of the tree of a line of the trace."""
    return token_paths([0, *line["draft_tokens"]], [0, *line["parents"]])


def parents_of(tree: StaticTree) -> list[int]:
    """Parent's node number per node."""
    order = order_of(tree)
    return [order.index(path[:-1]) for path in order]


class Call(NamedTuple):
    """A recorded call."""

    args: tuple
    kwargs: dict
    result: Any


def record(monkeypatch, owner: Any, name: str) -> list[Call]:
    """Let every call of `owner.name` also be entered in the list that is returned."""
    original, calls = getattr(owner, name), []

    def wrapper(*args, **kwargs):
        calls.append(Call(args, kwargs, original(*args, **kwargs)))
        return calls[-1].result

    monkeypatch.setattr(owner, name, wrapper)
    return calls


def shaped_cut(
    logits: Tensor, each: list[Sampling], draws: Tensor, backend: Backend = TORCH, seed: int = 0
) -> Tensor:
    """All cuts of the tokens of some draws. logits: [B, N, V]; draws: [B, N]."""
    params = SamplingTensors.from_params(each, seed=seed)
    rule = ShapedRule(*params[:8], Shaping(logits.shape[2]).rows(each))
    return rule.cut(logits, backend, rule.xtc_at(draws))


def process(logits: Tensor, rule: Sampling, backend: Backend = TORCH) -> Tensor:
    """`SamplingTensors.cut` of rows with the same parameters. logits: [..., V]."""
    rows = logits.reshape(1, -1, logits.shape[-1])
    rules = SamplingTensors.from_params([rule])
    return rules.cut(rows, backend).view_as(logits)


def chi_square(counts: Tensor, p: Tensor) -> float:
    """The odds of counts at least as far from p as these, if they were drawn from p.

    counts, p: [C]; cells that expect fewer than 5 are pooled, cells with p = 0 must be empty
    Returns: 0 when a cell with p = 0 is not empty.
    """
    counts, p = counts.double().flatten(), p.double().flatten()
    if counts[p == 0].any():
        return 0.0
    expected = p / p.sum() * counts.sum()
    small = expected < 5
    counts = torch.cat((counts[~small], counts[small].sum()[None]))
    expected = torch.cat((expected[~small], expected[small].sum()[None]))
    used = expected > 0
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    freedom = used.sum() - 1
    return (
        float(torch.special.gammaincc(freedom / 2, statistic / 2)) if freedom else 1.0
    )  # tail of chi-square


def no_candidates(batch: int) -> Candidates:
    """No candidates of `batch` trees."""
    empty = torch.empty(batch, 0)
    return Candidates(empty.long(), empty, empty.long())


def with_children(drafter: TreeDrafter, rule: str) -> TreeDrafter:
    """Let a drafter pick its children by a rule: topk, noise or sampled."""
    drafter.children = rule
    return sample_children(drafter) if rule == "sampled" else drafter
