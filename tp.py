"""Tensor parallelism: one model over N devices, with a process for each, which torchrun starts.

    torchrun --nproc_per_node 4 generate.py --checkpoint DIR --compile --prompt "The capital of France is"

1. A rank loads its `Share` of the files: the rows of q, k, v, gate and up and the columns of o and down that belong to
   its heads and to its part of the feed-forward, of every expert too. To model.py that is a smaller model, with a
   smaller cache. Weights are cut first and rounded then, in the groups of one device; where there are fewer KV heads
   than ranks, some ranks have the same one.
2. `Summed` adds what the ranks computed, once behind attention and once behind the feed-forward. On a CPU every rank
   gathers the partial sums in fp32, and the norm behind adds them in the order of the ranks, whatever the number of
   rows. On CUDA it is NCCL's all-reduce in the model's dtype, which a graph captures.
3. `Gathered` is an LM head of which a rank has some tokens' rows; every rank gets the scores of all.
4. The rest is on every rank: embedding, norms, routers, the draft, the loop. All ranks see the same bits and take the
   same decisions, so nothing else is sent. None may go by a clock: a tree is chosen by the text, or not at all.
5. `ranks` lets rank 0 alone print, and ends all with one line when one fails; `join` checks that all agree.

Trade-off: scores are gathered (4 V bytes a node) instead of each rank's best token: top-p, the residual rule and heads
that draft with the target's LM head need all of them, and no other file has to know that there are ranks.
Not here: serving; a split draft. CUDA and several machines follow the same path and were not run.
"""

from __future__ import annotations

import io
import os
import platform
import reprlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf.weights
from checkpoint import Codes, Quantization, TensorSource, fit_group, one_line, scale_name
from drafters import Drafter
from hf.config import open_source, read_config
from hf.heads import rows_of
from model import ModelConfig, MoEFeedForward, Transformer
from ops.library import has_cpu_operators, lib
from options import GenerateConfig, one_line_errors, pick_device

TIMEOUT_S = 600  # to wait for the others: one may compile, or read from a slow disk
PATIENCE_S = 3  # for rank 0 to fail of the same
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3")  # layers whose outputs are split
COLUMNS = ("o_proj", "down_proj", "w2")  # whose inputs are


# ------------------------------------------------------------------------------------------------- ranks


class RankLost(RuntimeError):
    """Another rank has ended, or cannot be reached."""


class Place(NamedTuple):
    """Which of the processes this is."""

    rank: int = 0
    world: int = 1  # processes
    local: int = 0  # the rank on this machine


def place() -> Place:
    """Where torchrun has put this process. Raises: ValueError where it has set a part of the environment only."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return Place()
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        value = os.environ.get(name, "")
        if not value or (name != "MASTER_ADDR" and not value.isdecimal()):
            rule = f"WORLD_SIZE is set in the environment, and {name} is {value!r}"
            raise ValueError(f"{rule}; start the ranks with torchrun --nproc_per_node N, or unset WORLD_SIZE")
    return Place(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))


def alone() -> None:
    """Check that torchrun has not started several of a program that splits nothing. Raises: ValueError, on rank 0."""
    here = place()
    if here.rank:
        sys.exit(2)
    if here.world > 1:
        raise ValueError("torchrun splits what generate.py loads, and nothing else; start this program without it")


def world() -> int:
    """How many ranks have joined; 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def ranks(program: str) -> Iterator[None]:
    """Let rank 0 alone print, and one rank say why all end. Without torchrun it does nothing."""
    with one_line_errors(program):
        here = place()
    if here.world == 1:
        yield
        return
    said, silent = io.StringIO(), here.rank > 0
    try:
        with redirect_stdout(io.StringIO() if silent else sys.stdout), redirect_stderr(said if silent else sys.stderr):
            yield
    except BaseException as error:
        status = error.code if isinstance(error, SystemExit) else 1
        if status and not _says_why(here):
            raise SystemExit(status) from None
        if isinstance(error, RankLost):
            print(f"{program}: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        if silent and status == 2:  # a user's mistake, which was said last
            print(said.getvalue().splitlines()[-1], file=sys.stderr)
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def _says_why(here: Place) -> bool:
    """Whether this rank, which fails, is to say why: rank 0 is where it fails soon too, else the first that asks."""
    try:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=30))
        if here.rank == 0:
            store.set("gpt_eagle/rank 0", "failed")
        for _ in range(10 * PATIENCE_S if here.rank else 0):
            if store.check(["gpt_eagle/rank 0"]):
                return False
            time.sleep(0.1)
        return store.add("gpt_eagle/failed", 1) == 1
    except RuntimeError:  # the process that holds the store has ended
        return here.rank == 0


@contextmanager
def _with_the_others() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"another rank has ended, or cannot be reached: {one_line(error).partition('. ')[0]}") from None


def join(config: GenerateConfig, prompts: list) -> GenerateConfig:
    """Meet the other ranks, if torchrun has started any.

    Returns: the options of this rank: with its device, and files for rank 0 only.
    Raises: ValueError for what ranks cannot do, or where they have different options, prompts or software.
    """
    here = place()
    if here.world == 1:
        return config
    for flag, given, reason in (
        ("--tree auto", config.tree == "auto", "it goes by the ranks' clocks, which differ: use --tree dynamic"),
        ("--results", config.results, "one process may read and write it: use --json"),
        ("--interactive", config.interactive, "there is one keyboard: use --prompt_file with turns"),
    ):
        if given:
            raise ValueError(f"{flag} cannot go with torchrun: {reason}")
    device = _device(config, here)
    if device != "cpu":
        torch.cuda.set_device(device)
    machine = platform.machine() if device == "cpu" else torch.cuda.get_device_name()
    software = {"torch": torch.__version__, "C++ operators": has_cpu_operators(), "device": machine}
    mine, theirs = asdict(config) | {"prompts": prompts} | software, [{}] * here.world
    with _with_the_others():
        if not dist.is_initialized():
            dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=timedelta(seconds=TIMEOUT_S))
        dist.all_gather_object(theirs, mine)
    for rank, other in enumerate(theirs):
        for name in (name for name in mine if other[name] != theirs[0][name]):
            values = f"{reprlib.repr(theirs[0][name])} on rank 0 and {reprlib.repr(other[name])} on rank {rank}"
            raise ValueError(f"all ranks need the same {name}; it is {values}: start them alike")
    return replace(config, device=device, **(dict.fromkeys(("json", "trace", "profile"), "") if here.rank else {}))


def _device(config: GenerateConfig, here: Place) -> str:
    """The device of a rank. Raises: ValueError where there is none."""
    name = pick_device(config.device)
    if name == "cpu":
        return name
    if torch.device(name).index is not None:
        raise ValueError(f"--device {name} is one GPU, and every rank needs its own; use --device cuda")
    count = torch.cuda.device_count()
    if here.local >= count:
        rule = f"every rank needs a GPU of its own, and rank {here.rank} finds {count}"
        raise ValueError(f"{rule}; use --nproc_per_node {count}, or --device cpu")
    return f"cuda:{here.local}"


# ------------------------------------------------------------------------------------------------ shares


class Share(TensorSource):
    """One rank's part of a checkpoint: the files of a smaller model. Of mapped files it reads views, so that no weight
    that is split is ever whole in memory."""

    def __init__(self, files: TensorSource, here: Place):
        """Raises: ValueError where the model cannot be split into so many parts."""
        config, self.path, self.note, self.here = read_config(files.path, files.config), files.path, files.note, here
        check_parts(config, here.world, files.path)
        self.whole = config
        self.kv_parts = min(here.world, config.n_kv_heads)
        split = {"num_attention_heads": config.n_heads, "intermediate_size": config.ffn_dim}
        split |= {"moe_intermediate_size": config.expert_dim} if config.expert_dim else {}
        self.config = files.config | {name: size // here.world for name, size in split.items()}
        self.config |= {"num_key_value_heads": config.n_kv_heads // self.kv_parts, "head_dim": config.head_dim}
        self.readers = {name: partial(self._tensor, name, read) for name, read in files.readers.items()}
        self.quantized = {name: partial(self._codes, name, read) for name, read in files.quantized.items()}

    def _tensor(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        return self._cut(name, read())

    def _codes(self, name: str, read: Callable[[], Codes]) -> Codes:
        codes, *scales = read()
        return Codes(self._cut(name, codes), *(t if t is None else self._cut(scale_name(name), t) for t in scales))

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part, of codes, scales and biases too. A wrong shape stays wrong, which the loader says."""
        layer, parts, part = name.rpartition(".")[0].rpartition(".")[2], self.here.world, self.here.rank
        dim = int(layer in COLUMNS)
        if layer not in (*ROWS, *COLUMNS) or whole.dim() <= dim or whole.shape[dim] == 1:  # a bias, scales of outputs
            return whole
        if layer in ("k_proj", "v_proj"):
            parts, part = self.kv_parts, part * self.kv_parts // parts
        size, rest = divmod(whole.shape[dim], parts)
        if rest and dim:
            rule = f"{parts} ranks must divide the {whole.shape[1]} columns of {name} (of scales: groups of inputs)"
            raise ValueError(f"{self.path}: {rule}; use fewer ranks, or the original checkpoint")
        return whole.narrow(dim, part * size, size)


def inner_sizes(config: ModelConfig) -> list[int]:
    """The widths of a model's feed-forwards: of an expert, of a dense one, or both."""
    dense = config.dense_layers or not config.n_experts
    return [config.expert_dim or config.ffn_dim] * (config.n_experts > 0) + [config.ffn_dim] * bool(dense)


def check_parts(config: ModelConfig, world: int, path: Path) -> None:
    """Check that so many ranks can have equal parts of a model. Raises: ValueError."""
    inner = inner_sizes(config)

    def fits(n: int) -> bool:
        kv_heads = config.n_kv_heads
        return not any(size % n for size in (config.n_heads, *inner)) and (kv_heads % n == 0 or n % kv_heads == 0)

    if not fits(world):
        sizes = f"{config.n_heads} heads and {' and '.join(map(str, inner))} columns of the feed-forward"
        able = [str(n) for n in range(2, 65) if fits(n)][:4]
        remedy = f"use --nproc_per_node {' or '.join(able)}" if able else "start it without torchrun"
        rule = f"{sizes}, and divide {config.n_kv_heads} KV heads or be a multiple of them"
        raise ValueError(f"{path}: the number of ranks must divide {rule}; it is {world}: {remedy}")


def load_model(
    path: Path, dtype: torch.dtype | None, device: str, quant: Quantization | None, source: TensorSource | None
) -> Transformer:
    """`hf.weights.load_model`, of this rank's share where there are several. Raises: ValueError, as both do."""
    here = place()
    if here.world == 1:
        return hf.weights.load_model(path, dtype, device, quant, source)
    if not dist.is_initialized():
        alone()
    share = Share(source or open_source(path), here)
    if quant is not None:  # the groups of one device, which a share's inputs may be too few for
        whole = share.whole
        sizes = (whole.dim, whole.n_heads * whole.head_dim, *inner_sizes(whole))
        quant = fit_group(quant, {f"a layer with {size} inputs": size for size in sizes})
    model = hf.weights.load_model(path, dtype, device, quant, share)
    for block in model.layers:
        dense = not isinstance(block.ffn, MoEFeedForward)
        for layer in (block.attention.wo, *([block.ffn.w2] if dense else [])):
            layer.wide, layer.bias = device == "cpu", None if here.rank else layer.bias  # one rank adds the bias
        block.attention.wo = Summed(block.attention.wo)
        if dense:
            block.ffn.w2 = Summed(block.ffn.w2)
        else:
            block.ffn = Summed(block.ffn)
    return model


def split_lm_head(target: Transformer, drafter: Drafter) -> Drafter:
    """Leave this rank its rows of the target's LM head, which the drafter may use too, or have taken copies of.

    Writes: `lm_head` of both. Returns: the drafter.
    """
    if world() > 1:
        whole, target.lm_head = target.lm_head, Gathered(target.lm_head)
        for preset in drafter.presets:
            if getattr(preset, "lm_head", None) is whole:
                preset.lm_head = target.lm_head
    return drafter


# ------------------------------------------------------------------------------------------- collectives

lib.define("gather_ranks(Tensor x) -> Tensor")  # [...] -> [N, ...], what every rank has, in their order
lib.define("sum_ranks(Tensor x) -> Tensor")  # the sum of what they have, in x's dtype; the same bits on every rank


class Summed(nn.Module):
    """A layer, or a mixture of experts, of which each rank has some inputs: its outputs are summed over the ranks."""

    format = "split"  # which no call of all layers takes (ops/cpu/layers.py)

    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> what `RMSNorm.add` takes
        y = self.part(x)
        return torch.ops.gpt_eagle.sum_ranks(y) if y.is_cuda else torch.ops.gpt_eagle.gather_ranks(y.float())

    partial = forward


class Gathered(nn.Module):
    """An LM head of which each rank has some rows, as many as the others: the last row is repeated to fill up."""

    def __init__(self, whole: nn.Module):
        super().__init__()
        self.vocab, each = whole.out_features, -(-whole.out_features // dist.get_world_size())
        first = dist.get_rank() * each
        self.part = rows_of(whole, torch.arange(first, first + each).clamp(max=self.vocab - 1))

    def forward(self, x: Tensor) -> Tensor:  # [..., F] -> [..., V] fp32
        scores = torch.ops.gpt_eagle.gather_ranks(self.part(x)).movedim(0, -2).flatten(-2)  # [..., N ceil(V / N)]
        return scores[..., : self.vocab].contiguous()


def _gather_ranks(x: Tensor) -> Tensor:
    every = x.new_empty(dist.get_world_size(), *x.shape)
    with _with_the_others():
        dist.all_gather(list(every), x.contiguous())
    return every


def _sum_ranks(x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    with _with_the_others():
        dist.all_reduce(total)
    return total


for _operator, _collective in (("gather_ranks", _gather_ranks), ("sum_ranks", _sum_ranks)):
    for _device_type in ("CPU", "CUDA"):
        lib.impl(_operator, _collective, _device_type)


@torch.library.register_fake("gpt_eagle::gather_ranks", lib=lib)
def _(x):
    return x.new_empty(dist.get_world_size(), *x.shape)


@torch.library.register_fake("gpt_eagle::sum_ranks", lib=lib)
def _(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)
