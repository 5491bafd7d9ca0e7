"""Tensor parallelism: one model over N devices, one process (rank) per device, started by torchrun.

    torchrun --nproc_per_node 4 generate.py --checkpoint DIR --prompt "The capital of"
    torchrun --nproc_per_node 2 generate.py --checkpoint checkpoints/demo --device cpu

1. A rank loads its `ShardedFiles`: its heads and its columns of each feed-forward, cut first, then
   quantized. int4 has the codes of one device. In int8, o and down get a scale per output and rank,
   so tokens may differ from those of one device.
2. `SumRanks`, a step behind row-parallel projections, sums the ranks' outputs. CPUs add in fp32, in
   the order of the ranks. NCCL's order may vary with the number of rows from 3 ranks on, so near
   ties may differ.
3. `VocabParallelHead` holds some tokens' rows of the LM head. The target's own token is the best of
   the ranks' best (`pick_tokens`, 16 bytes a node). Top-k, top-p, the residual rule and some draft
   heads gather all scores.
4. Everything else, the draft and its noise included, is on every rank. All ranks see the same bits
   and decide the same, so nothing else is sent. No tree is chosen by speed, as clocks differ.

Trade-off: a draft that is not split costs every rank its whole time. Not here: serving; the
processes themselves (ranks.py). CUDA and several machines follow the same path and were not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import gcd
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import files.weights
import sampling
from files.checkpoint import Codes, TensorSource, saved_quantization, scale_name
from files.config import open_source, read_config
from files.rank import Rank, this_rank
from model import ModelConfig, Transformer
from quantize import Quantization, fit_group
from reference import Backend
from run.draft_method import DraftMethod
from run.heads import rows_of
from run.ranks import collective_errors, refuse_torchrun
from sampling import SamplingTensors
from steps import Merge, Project, Rows, Step, parameters_of

# ------------------------------------------------------------------------------------------- shares


class ShardedFiles(TensorSource):
    """One rank's part of a checkpoint: the files of a smaller model.

    A part is a view of the tensor in the file. A weight that must be decoded (GGUF, codes of other
    projects) is complete in memory meanwhile; of one that a source makes anew a part is a copy.
    """

    def __init__(self, files: TensorSource, here: Rank):
        """Raises: ValueError where the model cannot be split into so many parts."""
        self.path = files.path
        self.note = files.note
        self.block_types = files.block_types
        self.type_of = files.type_of
        self.makes_tensors = files.makes_tensors
        self.has_groups_of_int8 = files.has_groups_of_int8
        self.here = here
        config = read_config(files.path, files.config)
        self.full_config = config
        check_parts(config, here.world_size, files.path)
        self.kv_parts = min(here.world_size, config.n_kv_heads)
        self.split_dims = split_dims(config)
        self.config = files.config | {
            "num_attention_heads": config.n_heads // here.world_size,
            "intermediate_size": config.ffn_dim // here.world_size,
            "num_key_value_heads": config.n_kv_heads // self.kv_parts,
            "head_dim": config.head_dim,
        }
        # of the architectures that have them
        parts = {"moe_intermediate_size": "w2", "shared_expert_intermediate_size": "shared_w2"}
        for step in {step for i in range(config.n_layers) for step in config.layer(i)}:
            for name, of_step in parts.items():
                is_expert = isinstance(step, Project) and step.name == of_step
                if is_expert and (step.experts or name != "moe_intermediate_size"):
                    self.config[name] = step.inputs // here.world_size
        self.readers = {
            name: partial(self._read_part, name, read) for name, read in files.readers.items()
        }
        self.quantized = {
            name: partial(self._codes, name, read) for name, read in files.quantized.items()
        }

    def _read_part(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        tensor = read()
        part = self._cut(name, tensor)
        if self.makes_tensors and part is not tensor:
            return part.clone()  # the complete tensor is freed
        return part

    def _codes(self, name: str, read: Callable[[], Codes]) -> Codes:
        codes, *scales = read()
        scale = scales[0]
        grouped = scale.dim() > 1 and scale.shape[-1] > 1
        if grouped and self.split_dims.get(name.split(".")[-2]) == 1:
            # a group of the files may be several of ours
            group = codes.shape[1] // scale.shape[1]
            check_parts(self.full_config, self.here.world_size, self.path, group)
        parts = [self._cut(name, codes)]
        for tensor in scales:
            parts.append(tensor if tensor is None else self._cut(scale_name(name), tensor))
        return Codes(*parts)

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part, also of codes, scales and biases.

        A tensor of a wrong shape stays complete: the loader reports it.
        """
        layer = name.split(".")[-2] if "." in name else ""
        dim = self.split_dims.get(layer)
        if dim is None:
            return tensor
        if tensor.dim() <= dim or tensor.shape[dim] == 1:  # a bias, scales of outputs
            return tensor
        parts = self.here.world_size
        part = self.here.rank
        if layer in ("k_proj", "v_proj"):
            part = part * self.kv_parts // parts
            parts = self.kv_parts
        size, rest = divmod(tensor.shape[dim], parts)
        if rest:
            return tensor
        return tensor.narrow(dim, part * size, size)


def split_dims(config: ModelConfig) -> dict[str, int]:
    """Return the last part of the name of every split weight -> 0: by outputs; 1: by inputs."""
    dims = {}
    for step in {step for i in range(config.n_layers) for step in config.layer(i)}:
        if isinstance(step, Project):
            names = config.names[f"experts.{step.name}" if step.experts else step.name]
            dims |= {name.rpartition(".")[2]: int(step.row_parallel) for name in names}
        elif "sinks.weight" in parameters_of(step):
            dims |= {name.rpartition(".")[2]: 0 for name in config.names["sinks"]}
    return dims


def split_inputs(config: ModelConfig) -> list[int]:
    """Return the numbers of split inputs: of o, and of down in experts, dense layers or both."""
    steps = {step for i in range(config.n_layers) for step in config.layer(i)}
    split = [step for step in steps if isinstance(step, Project) and step.row_parallel]
    # o, experts, the shared one, the dense feed-forward
    split.sort(key=lambda step: (step.name != "wo", not step.experts, step.name != "shared_w2"))
    return [step.inputs for step in split]


def check_parts(
    config: ModelConfig, world: int, path: Path, group: int = 1, smaller: bool = False
) -> None:
    """Check that so many ranks can have equal parts of a model. Raises: ValueError.

    group: inputs that share a scale, and must be on one rank
    smaller: whether group_size can change it
    """
    if config.state_shapes is not None:
        raise ValueError(f"{path}: a model with recurrent layers runs on one rank; start one")
    if len(set(map(config.kv_shape, range(config.n_layers)))) > 1:
        raise ValueError(f"{path}: a model with heads of two widths runs on one rank; start one")
    inputs = split_inputs(config)
    kv_heads = config.n_kv_heads

    def fits(n: int, group: int) -> bool:
        if config.n_heads % n or any(size % (n * group) for size in inputs):
            return False
        return kv_heads % n == 0 or n % kv_heads == 0

    if fits(world, group):
        return
    columns = " and ".join(str(size) for size in inputs[1:])
    sizes = f"{config.n_heads} heads and {columns} columns of the feed-forward"
    if group > 1:
        sizes += f" in whole groups of {group}"
    rule = (
        f"the number of ranks must divide {sizes}, "
        f"and divide {kv_heads} KV heads or be a multiple of them"
    )
    numbers = [n for n in range(1, 65) if n == 1 or fits(n, group)]
    remedy = f"make it {' or '.join(str(n) for n in numbers)}"
    smaller_group = gcd(group, *(size // world for size in inputs))
    if smaller and smaller_group >= 32 and fits(world, smaller_group):
        remedy += f", or use group_size={smaller_group}"
    raise ValueError(f"{path}: {rule}; it is {world}: {remedy}")


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
    share = ShardedFiles(source or open_source(path), here)
    if quant is not None:  # the groups of one device
        sizes = (share.full_config.dim, *split_inputs(share.full_config))
        quant = fit_group(quant, {f"a layer with {size} inputs": size for size in sizes})
    form = saved_quantization(share.config) or quant
    if form is not None and (form.saved or form.format == "int4"):
        check_parts(
            share.full_config, here.world_size, path, max(form.group_size, 1), not form.saved
        )
    model = files.weights.load_model(path, dtype, device, quant, share)
    for layer in model.layers:
        layer.steps = with_sums(layer.steps)
        for step in layer.steps:
            if not isinstance(step, Project) or not step.row_parallel:
                continue
            part = getattr(layer, step.name)
            if _is_split(step):
                part.fp32_out = device == "cpu"
            if here.rank:  # rank 0 adds the bias
                part.bias = None
    return model


def _is_split(step: Step) -> bool:
    """Return whether ranks sum the outputs of a step; those of experts are merged first."""
    return isinstance(step, Project) and step.row_parallel and not step.experts


def with_sums(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Add the sums over the ranks to the steps of a layer."""
    split = []
    for step in steps:
        split.append(step)
        if isinstance(step, Merge) or _is_split(step):
            split.append(SumRanks())
    return tuple(split)


def split_lm_head(target: Transformer, method: DraftMethod) -> DraftMethod:
    """Leave this rank its rows of the target's LM head, which the drafters may share.

    A drafter that has taken copies of rows keeps them.
    Writes: `lm_head` of target and drafters.
    Returns: the method, with this rank's part of the choice of tokens.
    """
    whole = target.lm_head
    target.lm_head = VocabParallelHead(whole)
    for preset in method.presets:
        if getattr(preset, "lm_head", None) is whole:
            preset.lm_head = target.lm_head
    return replace(method, pick_tokens=pick_tokens)


# -------------------------------------------------------------------------------------- collectives

# the library of the operators in backends/, if that folder is here
lib = torch.library.Library("gpt_eagle", "FRAGMENT")
# [...] -> [N, ...], the tensors of all ranks, in the order of the ranks
lib.define("gather_ranks(Tensor x) -> Tensor")
# the sum of the ranks' tensors, in x's dtype; the same bits on every rank
lib.define("sum_ranks(Tensor x) -> Tensor")


@dataclass(frozen=True)
class SumRanks(Step):
    """Add up the results of all ranks, each of which had some of the inputs.

    C++ does not know this step, so that PyTorch runs the layers of several ranks.
    """

    def run(self, layer: nn.Module, rows: Rows) -> Rows:
        if rows.h.is_cuda:
            return rows.put("h", torch.ops.gpt_eagle.sum_ranks(rows.h))
        every = torch.ops.gpt_eagle.gather_ranks(rows.h.float())  # [ranks, B, T, F]
        return rows.put("h", every.sum(0))


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
        device = next(chain(whole.parameters(), whole.buffers())).device
        self.register_buffer("ids", ids.to(device))  # [ceil(V / N)] int64, the token of each output

    def forward(self, x: Tensor) -> Tensor:  # [..., F] -> [..., V] fp32
        every = torch.ops.gpt_eagle.gather_ranks(self.part(x))  # [N, ..., ceil(V / N)]
        scores = every.movedim(0, -2).flatten(-2)  # [..., N ceil(V / N)]
        return scores[..., : self.vocab].contiguous()

    def best(
        self,
        x: Tensor,
        rule: SamplingTensors | None,
        noise: Tensor | None,
        row: Tensor,
        backend: Backend,
    ) -> Tensor:
        """Choose the best of this rank's own tokens, without top-k or top-p.

        x: [B, N, F]; rule, noise, row: as for `decode.pick_tokens`
        Returns: [B, N, 2] fp64, the token's score and its id.
        """
        scores = self.part(x)  # [B, N, ceil(V / N)]
        if noise is not None:
            scores = sampling.process(scores, rule, backend)
            noise = noise.index_select(2, self.ids)
        token = backend.best(scores, noise, row)
        score = scores.gather(2, token[..., None])[..., 0]
        if noise is not None:
            score = score + noise.flatten(1).gather(1, row * noise.shape[2] + token)
        return torch.stack((score.double(), self.ids[token].double()), -1)


def pick_tokens(
    target: Transformer,
    features: Tensor,
    rule: SamplingTensors | None,
    noise: Tensor | None,
    row: Tensor,
    allowed: None = None,
) -> tuple[Tensor, None]:
    """Do as `decode.pick_tokens` with a split LM head: choose the best of the ranks' best tokens.

    Top-k and top-p need all scores. Several ranks mask no tokens, hence no `allowed`.
    """
    backend = target.backend
    if rule is not None and rule.top_k is not None:
        return sampling.choose(target.logits(features), rule, noise, row, None, backend), None
    own = target.lm_head.best(features[..., : target.config.dim], rule, noise, row, backend)
    score, token = torch.ops.gpt_eagle.gather_ranks(own).unbind(-1)  # [ranks, B, N]
    # of equal scores the first rank's, which is the lowest token's
    first = score.argmax(0, keepdim=True)
    return token.gather(0, first)[0].long(), None


def _gather_ranks(x: Tensor) -> Tensor:
    every = x.new_empty(dist.get_world_size(), *x.shape)
    with collective_errors():
        dist.all_gather(list(every), x.contiguous())
    return every


def _sum_ranks(x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    with collective_errors():
        dist.all_reduce(total)
    return total


for _device_type in ("CPU", "CUDA"):
    lib.impl("gather_ranks", _gather_ranks, _device_type)
lib.impl("sum_ranks", _sum_ranks, "CUDA")
fake = partial(torch.library.register_fake, lib=lib)
fake("gpt_eagle::gather_ranks", lambda x: x.new_empty(dist.get_world_size(), *x.shape))
fake("gpt_eagle::sum_ranks", lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
