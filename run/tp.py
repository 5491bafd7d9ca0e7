"""Tensor parallelism: one model over N devices, one process (rank) per device, started by torchrun.

    torchrun --nproc_per_node 4 generate.py --checkpoint DIR --prompt "The capital of"
    torchrun --nproc_per_node 2 generate.py --checkpoint checkpoints/demo --device cpu

1. Every `Project` is split by a rule: by its outputs, or by its inputs where it is row-parallel. A
   rank loads its `Cut` of each weight, cut first, then quantized. int4 has the codes of one device.
   In int8, o and down get a scale per output and rank, so tokens may differ from one device's.
2. `SumRanks`, a step behind row-parallel projections, sums the ranks' outputs. CPUs add in fp32, in
   the order of the ranks. NCCL's order may vary with the number of rows from 3 ranks on, so near
   ties may differ.
3. `VocabParallelHead` holds some tokens' rows of the LM head. The ranks gather all scores.
4. Everything else, the draft and its noise included, is on every rank. All ranks see the same bits
   and decide the same, so nothing else is sent. No tree is chosen by speed, as clocks differ.

Trade-off: a draft that is not split costs every rank its whole time. Not here: serving; the
processes themselves (ranks.py). CUDA and several machines follow the same path and were not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import files.weights
from drafters import Drafter
from files.checkpoint import Codes, TensorSource
from files.config import open_source, read_config
from files.rank import Rank, this_rank
from model import ModelConfig, Transformer
from quantize import Quantization, fit_group
from run.heads import rows_of
from run.ranks import collective_errors, refuse_torchrun
from steps import Merge, Project, Rows, Step, parameters_of

# sizes of a `ModelConfig` of which every rank has an equal part
SHARED_SIZES = ("n_heads", "ffn_dim", "expert_dim", "shared_dim")

# ------------------------------------------------------------------------------------------- shares


class Cut(NamedTuple):
    """A rank's part of the weights of one name."""

    dim: int  # 0: some of the outputs; 1: some of the inputs
    parts: int
    own: int  # the number of the part

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """View this part of a weight, its codes, scales or bias.

        Raises: ValueError where it has no equal parts.
        """
        if tensor.dim() <= self.dim or tensor.shape[self.dim] == 1:
            return tensor  # a bias, scales of outputs
        size, rest = divmod(tensor.shape[self.dim], self.parts)
        if rest:
            raise ValueError(
                f"{name} has shape {[*tensor.shape]}, and {self.parts} ranks do not divide "
                f"{tensor.shape[self.dim]}; start fewer, or use another file"
            )
        return tensor.narrow(self.dim, self.own * size, size)


def cuts_of(config: ModelConfig, here: Rank) -> dict[str, Cut]:
    """Return the last part of the name of every split weight -> its cut.

    KV heads that are fewer than ranks are each on several of them.
    """
    kv_parts = min(here.world_size, config.n_kv_heads)
    of_kv = Cut(0, kv_parts, here.rank * kv_parts // here.world_size)
    cuts = {}
    for step in _steps_of(config):
        names = ()
        if isinstance(step, Project):
            names = config.names[f"experts.{step.name}" if step.experts else step.name]
        elif "sinks.weight" in parameters_of(step):
            names = config.names["sinks"]
        for name in (name.rpartition(".")[2] for name in names):
            dim = int(isinstance(step, Project) and step.row_parallel)
            is_kv = name in ("k_proj", "v_proj")
            cuts[name] = of_kv if is_kv else Cut(dim, here.world_size, here.rank)
    return cuts


def _steps_of(config: ModelConfig) -> set[Step]:
    return {step for i in range(config.n_layers) for step in config.layer(i)}


def share_of(files: TensorSource, config: ModelConfig, here: Rank) -> TensorSource:
    """Return one rank's part of the tensors of a checkpoint.

    A part is a view of the tensor in the file. A weight that must be decoded (GGUF, codes of other
    projects) is complete in memory meanwhile; of one that a source makes anew a part is a copy.
    """
    cuts = cuts_of(config, here)

    def cut_of(name: str) -> Cut | None:
        return cuts.get(name.split(".")[-2]) if "." in name else None

    def read_part(name: str, read: Callable[[], Tensor | Codes]) -> Tensor | Codes:
        whole = read()
        cut = cut_of(name)
        if cut is None:
            return whole
        if isinstance(whole, Codes):
            codes, *scales = whole
            parts = [None if each is None else cut.of(f"{name}_scale", each) for each in scales]
            return Codes(cut.of(name, codes), *parts)
        part = cut.of(name, whole)
        return part.clone() if files.makes_tensors else part  # the complete tensor is freed

    share = copy(files)
    share.readers = {name: partial(read_part, name, read) for name, read in files.readers.items()}
    share.quantized = {
        name: partial(read_part, name, read) for name, read in files.quantized.items()
    }
    return share


def config_of_share(config: ModelConfig, world: int) -> ModelConfig:
    """Return the settings of the model that one of so many ranks has."""
    sizes = {name: getattr(config, name) for name in SHARED_SIZES if hasattr(config, name)}
    parts = {name: size // world for name, size in sizes.items()}
    return replace(config, **parts, n_kv_heads=max(1, config.n_kv_heads // world))


def split_inputs(config: ModelConfig) -> set[int]:
    """Return the sizes of inputs that ranks share."""
    return {s.inputs for s in _steps_of(config) if isinstance(s, Project) and s.row_parallel}


def check_parts(config: ModelConfig, world: int, path: Path) -> None:
    """Check that so many ranks can have equal parts of a model. Raises: ValueError."""
    if config.state_shapes is not None:
        raise ValueError(f"{path}: a model with recurrent layers runs on one rank; start one")
    if len(set(map(config.kv_shape, range(config.n_layers)))) > 1:
        raise ValueError(f"{path}: a model with heads of two widths runs on one rank; start one")
    names = config.names
    if len(names["wqkv"]) == 1 or (not config.n_experts and len(names["w13"]) == 1):
        raise ValueError(f"{path}: a model with fused projections runs on one rank; start one")
    if any(getattr(step, "of_whole_rows", False) for step in config.layer(0)):
        raise ValueError(
            f"{path}: a model that norms all heads together runs on one rank; start one"
        )
    kv_heads = config.n_kv_heads
    inputs = sorted(split_inputs(config))

    def fits(n: int) -> bool:
        has_parts = not any(size % n for size in (config.n_heads, *inputs))
        return has_parts and (kv_heads % n == 0 or n % kv_heads == 0)

    if not fits(world):
        numbers = " or ".join(str(n) for n in range(1, 65) if fits(n))
        raise ValueError(
            f"{path}: the number of ranks must divide {config.n_heads} heads and weights of "
            f"{' and '.join(map(str, inputs))} inputs, and divide {kv_heads} KV heads or be a "
            f"multiple of them; it is {world}: make it {numbers}"
        )


def load_model(
    path: Path,
    dtype: torch.dtype | None,
    device: str,
    quant: Quantization | None,
    source: TensorSource | None,
) -> Transformer:
    """Load a model as `files.weights.load_model` does, but only this rank's share of it.

    Raises: ValueError for files that are wrong or cannot be split.
    """
    here = this_rank()
    if not dist.is_initialized():
        refuse_torchrun()
    whole = source or open_source(path)
    config = read_config(path, whole.config)
    check_parts(config, here.world_size, path)
    if quant is not None:  # the groups of one device
        sizes = (config.dim, *split_inputs(config))
        quant = fit_group(quant, {f"a layer with {size} inputs": size for size in sizes})
    share = share_of(whole, config, here)
    part = config_of_share(config, here.world_size)
    model = files.weights.load_model(path, dtype, device, quant, share, part)
    for layer in model.layers:
        layer.steps = with_sums(layer.steps)
        for step in layer.steps:
            if isinstance(step, Project) and step.row_parallel:
                linear = getattr(layer, step.name)
                linear.fp32_out |= _is_summed(step) and device == "cpu"
                if here.rank:  # rank 0 adds the bias
                    linear.bias = None
    return model


def _is_summed(step: Step) -> bool:
    """Return whether ranks sum the outputs of a step; those of experts are merged first."""
    is_split = isinstance(step, Project) and step.row_parallel and not step.experts
    return is_split or isinstance(step, Merge)


def with_sums(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Add the sums over the ranks to the steps of a layer."""
    each = ((step, SumRanks()) if _is_summed(step) else (step,) for step in steps)
    return tuple(chain.from_iterable(each))


def split_lm_head(target: Transformer, presets: Sequence[Drafter]) -> None:
    """Leave this rank its rows of the target's LM head, which the drafters may share.

    A drafter that has taken copies of rows keeps them.
    Writes: `lm_head` of target and drafters.
    """
    whole = target.lm_head
    target.lm_head = VocabParallelHead(whole)
    for preset in presets:
        if getattr(preset, "lm_head", None) is whole:
            preset.lm_head = target.lm_head


# -------------------------------------------------------------------------------------- collectives

# the library of the operators in backends/, if that folder is here
lib = torch.library.Library("gpt_eagle", "FRAGMENT")
# [...] -> [N, ...], the tensors of all ranks, in the order of the ranks
lib.define("gather_ranks(Tensor x) -> Tensor")
# the sum of the ranks' tensors, in x's dtype, on CPUs in fp32; the same bits on every rank
lib.define("sum_ranks(Tensor x) -> Tensor")


@dataclass(frozen=True)
class SumRanks(Step):
    """Add up the results of all ranks, each of which had some of the inputs.

    C++ does not know this step, so that PyTorch runs the layers of several ranks.
    """

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        return rows.put("h", torch.ops.gpt_eagle.sum_ranks(rows.h))


class VocabParallelHead(nn.Module):
    """An LM head split by tokens, with equally many rows per rank.

    The last row is repeated to fill up.
    """

    def __init__(self, whole: nn.Module):
        super().__init__()
        self.vocab = whole.out_features
        count = -(-self.vocab // dist.get_world_size())
        first = dist.get_rank() * count
        ids = torch.arange(first, first + count).clamp(max=self.vocab - 1)
        self.part = rows_of(whole, ids)

    def forward(self, x: Tensor) -> Tensor:  # [..., F] -> [..., V] fp32
        every = torch.ops.gpt_eagle.gather_ranks(self.part(x))  # [N, ..., ceil(V / N)]
        scores = every.movedim(0, -2).flatten(-2)  # [..., N ceil(V / N)]
        return scores[..., : self.vocab].contiguous()


def _gather_ranks(x: Tensor) -> Tensor:
    every = x.new_empty(dist.get_world_size(), *x.shape)
    with collective_errors():
        dist.all_gather(list(every), x.contiguous())
    return every


def _sum_in_order(x: Tensor) -> Tensor:
    return _gather_ranks(x.float()).sum(0)


def _sum_by_nccl(x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    with collective_errors():
        dist.all_reduce(total)
    return total


for _device_type in ("CPU", "CUDA"):
    lib.impl("gather_ranks", _gather_ranks, _device_type)
lib.impl("sum_ranks", _sum_in_order, "CPU")
lib.impl("sum_ranks", _sum_by_nccl, "CUDA")
fake = partial(torch.library.register_fake, lib=lib)
fake("gpt_eagle::gather_ranks", lambda x: x.new_empty(dist.get_world_size(), *x.shape))
fake("gpt_eagle::sum_ranks", lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
