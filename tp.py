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
5. `report_from_rank_0` lets rank 0 alone print, and ends all with one line when one fails; `check_same_on_all_ranks` compares what they have.

Trade-off: a draft that is not split costs every rank its whole time. Not here: serving. CUDA and several machines
follow the same path and were not run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from math import gcd
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf.weights
import sampling
from checkpoint import Codes, Quantization, TensorSource, fit_group, saved_quantization, scale_name
from drafters import Drafter
from hf.config import open_source, read_config
from hf.heads import rows_of
from model import ModelConfig, MoEFeedForward, Transformer
from ops.library import lib
from ops.topk import best
from ranks import (
    Rank,
    collective_errors,
    refuse_torchrun,
    this_rank,
)
from sampling import Sampling

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
