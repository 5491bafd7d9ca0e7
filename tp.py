"""Tensor parallelism: one model over N devices, with a process for each, which torchrun starts.

    torchrun --nproc_per_node 4 generate.py --checkpoint DIR --compile --prompt "The capital of France is"
    torchrun --nproc_per_node 2 generate.py --checkpoint checkpoints/demo --device cpu

1. A rank loads its `ShardedFiles`, the heads and the columns of each feed-forward that are its own: cut first, then rounded.
   int4 has one device's codes; in int8 o and down get a scale per output and rank, so that tokens may be others.
2. `RowParallel` adds the ranks' results behind attention and behind the feed-forward: on CPUs in fp32, in the order of the
   ranks; on CUDA as NCCL does, whose order may vary with the number of rows from 3 ranks on (near ties may differ).
3. `VocabParallelHead` is an LM head of which a rank has some tokens' rows. The target's own tokens are the best of each rank's
   (`choose`, 16 bytes a node); who needs all scores gets them: top-k, top-p, the residual rule, some draft heads.
4. The rest is on every rank, the draft and the noise that it reads too. All see the same bits and decide the same, so
   nothing else is sent; no tree is chosen by speed, as clocks differ.
5. `ranks` lets rank 0 alone print, and ends all with one line when one fails; `check_same_on_all_ranks` compares what they have.

Trade-off: a draft that is not split costs every rank its whole time. Not here: serving. CUDA and several machines
follow the same path and were not run.
"""

from __future__ import annotations

import io
import os
import reprlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf.weights
import sampling
from checkpoint import Codes, Quantization, TensorSource, fit_group, saved_quantization, scale_name
from drafters import Drafter
from files import one_line
from hf.config import open_source, read_config
from hf.heads import rows_of
from model import ModelConfig, MoEFeedForward, Transformer
from ops.library import has_cpu_operators, lib
from ops.topk import best
from options import GenerateConfig, one_line_errors, pick_device
from runtime import use
from sampling import Sampling

TIMEOUT_S = 600  # to wait for the others: one may compile, or read from a slow disk
WAIT_FOR_RANK_0_S = 3  # seconds that another rank waits for rank 0 to report the same failure
FILES = ("json", "trace", "profile")  # options that only rank 0 obeys
ROWS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "w1",
    "w3",
)  # layers whose outputs are split
COLUMNS = ("o_proj", "down_proj", "w2")  # whose inputs are


# ------------------------------------------------------------------------------------------------- ranks


class RankLost(RuntimeError):
    """Another rank has ended, or cannot be reached."""


class Rank(NamedTuple):
    """Which of the processes this is."""

    rank: int = 0
    world_size: int = 1  # processes
    local: int = 0  # the rank on this machine


def this_rank() -> Rank:
    """Where torchrun has put this process. Raises: ValueError where it has set a part of the environment only."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return Rank()
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        value = os.environ.get(name, "")
        if not value or (name != "MASTER_ADDR" and not value.isdecimal()):
            rule = f"WORLD_SIZE is set in the environment, and {name} is {value!r}"
            raise ValueError(
                f"{rule}; start the ranks with torchrun --nproc_per_node N, or unset WORLD_SIZE"
            )
    return Rank(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))


def refuse_torchrun() -> None:
    """Check that torchrun has not started several of a program that splits nothing. Raises: ValueError, on rank 0."""
    here = this_rank()
    if here.rank:
        sys.exit(2)
    if here.world_size > 1:
        raise ValueError(
            "torchrun splits what generate.py loads, and nothing else; start this program without it"
        )


@contextmanager
def ranks(program: str) -> Iterator[None]:
    """Let rank 0 alone print, and one rank say why all end. Without torchrun it does nothing."""
    with one_line_errors(program):
        here = this_rank()
    if here.world_size == 1:
        yield
        return
    said, silent = io.StringIO(), here.rank > 0
    try:
        with (
            redirect_stdout(io.StringIO() if silent else sys.stdout),
            redirect_stderr(said if silent else sys.stderr),
        ):
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


def _says_why(here: Rank) -> bool:
    """Whether this rank, which fails, is to say why: rank 0 is where it fails soon too, else the first that asks."""
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=30)
        )
        if here.rank == 0:
            store.set("gpt_eagle/rank 0", "failed")
        for _ in range(10 * WAIT_FOR_RANK_0_S if here.rank else 0):
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
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        why = one_line(error).partition(". ")[0]
        raise RankLost(f"a collective failed; another rank has probably ended: {why}") from None


def check(config: GenerateConfig) -> None:
    """Check the options, before prompts are read. Raises: ValueError for one that cannot be, or not with torchrun."""
    config.check()
    file = config.prompt_file
    for flag, given, reason in (
        (
            "--tree auto",
            config.tree == "auto",
            "it goes by the ranks' clocks, which differ: use --tree dynamic",
        ),
        ("--results", config.results, "one process may read and write it: use --json"),
        (
            "--interactive",
            config.interactive,
            "there is one keyboard: use --prompt_file with turns",
        ),
        (
            f"--prompt_file {file}",
            os.path.exists(file) and not os.path.isfile(file),
            "all ranks read it: use a file",
        ),
    ):
        if given and this_rank().world_size > 1:
            raise ValueError(f"{flag} cannot go with torchrun: {reason}")


def init_ranks(config: GenerateConfig, prompts: list) -> GenerateConfig:
    """Meet the other ranks, if torchrun has started any.

    Returns: the options of this rank: with its device, and files for rank 0 only.
    Raises: ValueError where a rank has no device, or where they have different options, prompts or software.
    """
    here = this_rank()
    if here.world_size == 1:
        return config
    device, wait = _device(config, here), timedelta(seconds=TIMEOUT_S)
    with _with_the_others():
        if not dist.is_initialized():
            store, *_ = next(dist.rendezvous("env://", timeout=wait))
            check_devices(store, torch.device(device).type, here)
            backend = "gloo" if device == "cpu" else "nccl"
            dist.init_process_group(
                backend, store=store, rank=here.rank, world_size=here.world_size, timeout=wait
            )
    use(device)
    kind = f"CPU with {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    kind = kind if device == "cpu" else torch.cuda.get_device_name()
    software = {"torch": torch.__version__, "C++ operators": has_cpu_operators(), "processor": kind}
    check_same_on_all_ranks(config, prompts=prompts, **software)
    return replace(config, device=device, **(dict.fromkeys(FILES, "") if here.rank else {}))


def check_devices(store: dist.Store, kind: str, here: Rank) -> None:
    """Check that all ranks have the same kind of device, before they need it to talk. Raises: ValueError."""
    store.set(f"gpt_eagle/device of {here.rank}", kind)
    kinds = [
        store.get(f"gpt_eagle/device of {rank}").decode() for rank in range(here.world_size)
    ]  # waits for each
    check_same("device", kinds)


def check_same_on_all_ranks(config: GenerateConfig, **facts: Any) -> None:
    """Check that all ranks have the same options, and the same other facts. Raises: ValueError with what differs."""
    world = this_rank().world_size
    if world == 1:
        return
    mine, theirs = asdict(config) | dict.fromkeys((*FILES, "device")) | facts, [{}] * world
    with _with_the_others():
        dist.all_gather_object(theirs, mine)
    for name in {name: None for other in theirs for name in other}:
        check_same(name, [other.get(name) for other in theirs])


def check_same(name: str, values: list) -> None:
    """Check that a fact is the same on all ranks. Raises: ValueError with what two of them have."""
    for rank, value in enumerate(values):
        if value != values[0]:
            both = f"{reprlib.repr(values[0])} on rank 0 and {reprlib.repr(value)} on rank {rank}"
            raise ValueError(f"all ranks need the same {name}; it is {both}: start them alike")


def _device(config: GenerateConfig, here: Rank) -> str:
    """The device of a rank. Raises: ValueError where there is none."""
    name = pick_device(config.device)
    if name == "cpu":
        return name
    if torch.device(name).index is not None:
        raise ValueError(
            f"--device {name} is one GPU, and every rank needs its own; use --device cuda"
        )
    return pick_device(f"cuda:{here.local}")


# ------------------------------------------------------------------------------------------------ shares


class ShardedFiles(TensorSource):
    """One rank's part of a checkpoint: the files of a smaller model.

    A part is a view of what is read. A weight that must be decoded (GGUF, others' codes) is whole in memory meanwhile.
    """

    def __init__(self, files: TensorSource, here: Rank):
        """Raises: ValueError where the model cannot be split into so many parts."""
        self.path, self.note, self.here = files.path, files.note, here
        config = self.whole = read_config(files.path, files.config)
        check_parts(config, here.world_size, files.path)
        self.kv_parts = min(here.world_size, config.n_kv_heads)
        split = {"num_attention_heads": config.n_heads, "intermediate_size": config.ffn_dim}
        split |= {"moe_intermediate_size": config.expert_dim} if config.expert_dim else {}
        self.config = files.config | {name: size // here.world_size for name, size in split.items()}
        self.config |= {
            "num_key_value_heads": config.n_kv_heads // self.kv_parts,
            "head_dim": config.head_dim,
        }
        self.readers = {
            name: lambda n=name, read=read: self._cut(n, read())
            for name, read in files.readers.items()
        }
        self.quantized = {
            name: partial(self._codes, name, read) for name, read in files.quantized.items()
        }

    def _codes(self, name: str, read: Callable[[], Codes]) -> Codes:
        codes, *scales = read()
        if (
            name.split(".")[-2] in COLUMNS and scales[0].shape[-1] > 1 < scales[0].dim()
        ):  # groups; ours may be parts
            check_parts(
                self.whole, self.here.world_size, self.path, codes.shape[1] // scales[0].shape[1]
            )
        return Codes(
            self._cut(name, codes),
            *(t if t is None else self._cut(scale_name(name), t) for t in scales),
        )

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part, of codes, scales and biases too. A wrong shape stays wrong, which the loader says."""
        layer, parts, part = (
            name.rpartition(".")[0].rpartition(".")[2],
            self.here.world_size,
            self.here.rank,
        )
        dim = int(layer in COLUMNS)
        if (
            layer not in (*ROWS, *COLUMNS) or whole.dim() <= dim or whole.shape[dim] == 1
        ):  # a bias, scales of outputs
            return whole
        if layer in ("k_proj", "v_proj"):
            parts, part = self.kv_parts, part * self.kv_parts // parts
        size, rest = divmod(whole.shape[dim], parts)
        return whole if rest else whole.narrow(dim, part * size, size)


def split_inputs(config: ModelConfig) -> list[int]:
    """The inputs of the layers whose inputs are split: of o, and of down in experts, dense feed-forwards, or both."""
    dense = [config.ffn_dim] if not config.n_experts or config.dense_layers else []
    experts = [config.expert_dim or config.ffn_dim] if config.n_experts else []
    return [config.n_heads * config.head_dim, *experts, *dense]


def check_parts(
    config: ModelConfig, world: int, path: Path, group: int = 1, smaller: bool = False
) -> None:
    """Check that so many ranks can have equal parts of a model. Raises: ValueError.

    group: inputs that share a scale, and must be on one rank; smaller: whether --group_size can change it
    """
    inputs, kv_heads = split_inputs(config), config.n_kv_heads

    def fits(n: int) -> bool:
        parts = not config.n_heads % n and not any(size % (n * group) for size in inputs)
        return parts and (kv_heads % n == 0 or n % kv_heads == 0)

    if not fits(world):
        whole = f" in whole int4 groups of {group}" if group > 1 else ""
        sizes = f"{config.n_heads} heads and {' and '.join(map(str, inputs[1:]))} columns of the feed-forward{whole}"
        rule = f"the number of ranks must divide {sizes}, and divide {kv_heads} KV heads or be a multiple of them"
        remedy = f"make it {' or '.join(str(n) for n in range(1, 65) if n == 1 or fits(n))}"
        group = gcd(group, *(size // world for size in inputs))
        remedy += (
            f", or use --group_size {group}" if smaller and group >= 32 and fits(world) else ""
        )
        raise ValueError(f"{path}: {rule}; it is {world}: {remedy}")


def load_model(
    path: Path,
    dtype: torch.dtype | None,
    device: str,
    quant: Quantization | None,
    source: TensorSource | None,
) -> Transformer:
    """`hf.weights.load_model`, of this rank's share where there are several. Raises: ValueError, as both do."""
    here = this_rank()
    if here.world_size == 1:
        return hf.weights.load_model(path, dtype, device, quant, source)
    if not dist.is_initialized():
        refuse_torchrun()
    share = ShardedFiles(source or open_source(path), here)
    if quant is not None:  # the groups of one device
        sizes = (share.whole.dim, *split_inputs(share.whole))
        quant = fit_group(quant, {f"a layer with {size} inputs": size for size in sizes})
    form = saved_quantization(share.config) or quant
    if form is not None and form.format == "int4":
        check_parts(share.whole, here.world_size, path, max(form.group_size, 1), not form.saved)
    model = hf.weights.load_model(path, dtype, device, quant, share)
    for block in model.layers:
        last = (block, "ffn") if isinstance(block.ffn, MoEFeedForward) else (block.ffn, "w2")
        for owner, name in ((block.attention, "wo"), last):
            part = getattr(owner, name)
            if owner is not block:  # one rank adds the bias
                part.fp32_out, part.bias = device == "cpu", None if here.rank else part.bias
            setattr(owner, name, RowParallel(part))
    return model


def split_lm_head(target: Transformer, drafter: Drafter) -> Drafter:
    """Leave this rank its rows of the target's LM head, which the drafter may use too, or have taken copies of.

    Writes: `lm_head` of both; `timed` of the drafter, as ranks have different clocks. Returns: the drafter.
    """
    if this_rank().world_size > 1:
        drafter.timed = False
        whole, target.lm_head = target.lm_head, VocabParallelHead(target.lm_head)
        for preset in drafter.presets:
            if getattr(preset, "lm_head", None) is whole:
                preset.lm_head = target.lm_head
    return drafter


# ------------------------------------------------------------------------------------------- collectives

lib.define(
    "gather_ranks(Tensor x) -> Tensor"
)  # [...] -> [N, ...], what every rank has, in their order
lib.define(
    "sum_ranks(Tensor x) -> Tensor"
)  # the sum of what they have, in x's dtype; the same bits on every rank


class RowParallel(nn.Module):
    """A layer, or a mixture of experts, of which each rank has some inputs: its outputs are summed over the ranks."""

    format = "split"  # which no call of all layers takes (ops/cpu/layers.py)

    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> what `RMSNorm.add` takes
        y = self.part(x)
        return (
            torch.ops.gpt_eagle.sum_ranks(y)
            if y.is_cuda
            else torch.ops.gpt_eagle.gather_ranks(y.float())
        )

    forward_split_k = forward


class VocabParallelHead(nn.Module):
    """An LM head of which each rank has some rows, as many as the others: the last row is repeated to fill up."""

    def __init__(self, whole: nn.Module):
        super().__init__()
        self.vocab, each = whole.out_features, -(-whole.out_features // dist.get_world_size())
        first = dist.get_rank() * each
        ids = torch.arange(first, first + each).clamp(max=self.vocab - 1)
        self.part = rows_of(whole, ids)
        device = next(chain(whole.parameters(), whole.buffers())).device
        self.register_buffer("ids", ids.to(device))  # [ceil(V / N)] int64, the token of each output

    def forward(self, x: Tensor) -> Tensor:  # [..., F] -> [..., V] fp32
        scores = (
            torch.ops.gpt_eagle.gather_ranks(self.part(x)).movedim(0, -2).flatten(-2)
        )  # [..., N ceil(V / N)]
        return scores[..., : self.vocab].contiguous()

    def best(self, x: Tensor, rule: Sampling, noise: Tensor | None, row: Tensor) -> Tensor:
        """What this rank would choose of its own tokens. x: [B, N, F], the rest as for `choose`, with no cuts.

        Returns: [B, N, 2] fp64, the token's score and its id.
        """
        scores = self.part(x)  # [B, N, ceil(V / N)]
        if noise is not None:
            scores, noise = sampling.process(scores, rule), noise.index_select(2, self.ids)
        token = best(scores, noise, row)
        score = scores.gather(2, token[..., None])[..., 0]
        if noise is not None:
            score = score + noise.flatten(1).gather(1, row * noise.shape[2] + token)
        return torch.stack((score.double(), self.ids[token].double()), -1)


def pick_tokens(
    target: Transformer, features: Tensor, rule: Sampling, noise: Tensor | None, row: Tensor
) -> Tensor:
    """`decode.pick_tokens` with a split LM head: the best of what the ranks would choose. Cuts need all scores."""
    if noise is not None and (rule.top_k > 0 or rule.top_p < 1):
        return best(sampling.process(target.logits(features), rule), noise, row)
    own = target.lm_head.best(features[..., : target.config.dim], rule, noise, row)
    score, token = torch.ops.gpt_eagle.gather_ranks(own).unbind(-1)  # [ranks, B, N]
    first = score.argmax(
        0, keepdim=True
    )  # of equal scores the first rank's, which is the lowest token's
    return token.gather(0, first)[0].long()


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


for _device_type in ("CPU", "CUDA"):
    lib.impl("gather_ranks", _gather_ranks, _device_type)
lib.impl("sum_ranks", _sum_ranks, "CUDA")
fake = partial(torch.library.register_fake, lib=lib)
fake("gpt_eagle::gather_ranks", lambda x: x.new_empty(dist.get_world_size(), *x.shape))
fake("gpt_eagle::sum_ranks", lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
