"""Train a block drafter for any target, on the data and features of train_eagle.py.

    python scripts/train/train_block.py --checkpoint DIR --data A.jsonl --out HEAD
    python scripts/train/train_block.py --causal --out HEAD ...             # JetSpec's
    python scripts/train/train_block.py --markov_rank 64 --out HEAD ...     # DSpark's
    python scripts/train/train_block.py --selector_rank 64 --out HEAD ...   # DFlash2's

Data, features, optimizers, evaluation and `--resume` are those of train_eagle.py; the loss is in
losses.py. The files are in the official layouts (drafts/block_heads.py).
Differences from the official code: `fc` is trained over inputs of equal scale, the last norm starts
as the target's, and a level's loss is a mean over the blocks that reach it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from options import require
from run.parsing import option, parse
from scripts.train.train_options import TrainOptions


@dataclass
class BlockTrainConfig(TrainOptions):
    """Options of training a block drafter."""

    block_size: int = option(8, "positions of a block, the root's included", least=2, most=256)
    causal: bool = option(False, "a position sees those before it only, as in JetSpec")
    markov_rank: int = option(
        0,
        "of DSpark's bias for the token before; each position then predicts the next",
        least=0,
        most=2**16,
    )
    selector_rank: int = option(
        0,
        "of DFlash2's choice among a level's best tokens, by the token before; its layers then "
        "convolve along the block",
        least=0,
        most=2**16,
    )
    layers: int = option(2, "of the drafter", least=1)
    ffn_dim: int = option(0, "of its layers; 0: the target's", least=0)
    anchors: int = option(32, "blocks per sequence and step", least=1)
    decay: float = option(4.0, "levels over which the weight of a loss falls to 1 / e")

    def check(self) -> None:
        """Check the options. Raises: ValueError for one that is out of its range, too."""
        super().check()
        require(self.decay > 0, f"--decay must be above 0; it is {self.decay}")
        both = self.markov_rank > 0 and self.selector_rank > 0
        require(not both, "--markov_rank is DSpark's and --selector_rank DFlash2's; drop one")
        room = self.seq_len > self.block_size
        require(room, f"--seq_len must be above --block_size; it is {self.seq_len}")

    @property
    def losses(self) -> dict[str, float]:
        """The names of the losses in the curve, and their weights, which add up to 1."""
        levels = self.block_size - (not self.markov_rank)
        weights = [math.exp(-level / self.decay) for level in range(levels)]
        return {f"entropy {level}": weight / sum(weights) for level, weight in enumerate(weights)}


# --help and mistakes are answered before the imports below, which take seconds
COMMAND = parse(BlockTrainConfig, "train_block.py", __doc__) if __name__ == "__main__" else None

import torch
from torch import Tensor

from drafters import DraftVocab
from drafts.block_draft import BlockHead
from drafts.block_heads import BlockConfig, name_in_files
from drafts.block_layers import BlockModel
from files.weights import export_weights
from model import DTYPES, Transformer
from models.mixtures import with_head_norms
from reference import TORCH, use_backend
from scripts.train import losses, training
from scripts.train.acceptance import DraftedChains
from scripts.train.data import Example

TAPS = 5  # layers of the target whose outputs a drafter reads, as in the papers
CONVOLVED = 3  # positions that a convolution of DFlash2 mixes
GROUP = 32  # numbers of a row that share its dynamic weights, at most
CHOICE = 16  # tokens of a level that DFlash2 chooses among


def tapped_layers(layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs a new drafter takes: five, evenly from 2 to the last but two.

    Source: the official code, which counts outputs.
    """
    span = max(layers - 4, 0)
    inputs = {min(2 + round(i * span / (TAPS - 1)), layers - 1) for i in range(TAPS)}
    return tuple(sorted(inputs))


def make_head(config: BlockTrainConfig, target: Transformer, examples: list[Example]) -> BlockHead:
    """Make a drafter, whose mask is the rarest token of the data."""
    c = target.config
    every = torch.tensor([i for e in examples for i in e.ids])
    counts = every.bincount(minlength=c.vocab_size)
    rarest = c.vocab_size - 1 - int(counts.flip(0).argmin())  # of equally rare ones the last
    plain = training.plain_layers(target, config.layers, config.ffn_dim)
    model = with_head_norms(replace(plain, tie_embeddings=False))
    if config.selector_rank:
        model = BlockModel(**vars(model), conv_taps=CONVOLVED, conv_group=math.gcd(c.dim, GROUP))
    head = BlockHead(
        BlockConfig(
            model,
            aux_layers=tapped_layers(c.n_layers),
            block_size=config.block_size,
            mask_token=rarest,
            causal=config.causal,
            predicts_next=config.markov_rank > 0,
            markov_rank=config.markov_rank,
            selector_rank=config.selector_rank,
            selector_top=min(CHOICE, c.vocab_size) if config.selector_rank else 0,
        )
    )
    with torch.no_grad():
        head.norm.weight.copy_(target.norm.weight)
        if config.markov_rank:
            head.markov_head.markov_w1.weight.normal_(std=0.02)
        if config.selector_rank:
            start_as_dflash(head)
    return head.to(target.norm.weight.device)


def start_as_dflash(head: BlockHead) -> None:
    """Let DFlash2's convolutions and selector change nothing yet. Writes: their weights."""
    for layer in head.layers:
        for name in ("attention", "mlp"):
            layer.get_parameter(f"{name}_conv.base_kernel")[:, 0] = 1  # of a row itself
            layer.get_parameter(f"{name}_kernel.weight").zero_()
    head.candidate_selector.predecessor_codebook.weight.normal_()
    head.candidate_selector.successor_codebook.weight.zero_()


@torch.no_grad()
def scale_inputs(head: BlockHead, embedded: Tensor, features: Tensor) -> None:
    """Train `fc` over inputs of equal scale. Writes: head.fc."""
    scale = losses.scale_of(features[..., head.config.model.dim :])
    head.fc.weight /= scale
    head.fc = losses.ScaledLinear(head.fc, scale)


def losses_of(
    config: BlockTrainConfig, head: BlockHead, target: Transformer
) -> Callable[[training.Inputs, int], tuple[Tensor, ...]]:
    """Return a function of the inputs and the step's number -> `config.losses`."""
    use_backend(target.lm_head, TORCH)  # gradients pass through it
    generator = torch.Generator(config.device)

    def of_step(inputs: training.Inputs, step: int) -> tuple[Tensor, ...]:
        generator.manual_seed(config.seed * 1_000_003 + step)  # the same in a resumed run
        anchors = losses.pick_anchors(inputs.mask, config.anchors, generator)
        return losses.block_losses(head, target, inputs[:3], anchors)

    return of_step


def draft_blocks(head: BlockHead, target: Transformer, tokens: Tensor) -> DraftedChains:
    """Draft a chain from every position of a sequence, as `acceptance.chains`.

    A bias reads the true tokens: a level counts only behind levels that drafted them.
    tokens: [1, T]
    """
    T = tokens.shape[1]
    steps = torch.arange(T, device=tokens.device)
    features = target(tokens, steps[None], aux_layers=head.aux_layers)
    levels = head.config.levels
    roots = steps[1 : max(T - levels, 1)]  # [R]
    batch = (tokens, features.to(head.norm.weight.dtype), roots[None])
    hidden = losses.run_blocks(head, target, batch)[0]  # [R, D, F]
    ok = []
    logits = []
    for level in range(levels):
        z = losses.logits_of(head, target, hidden[:, level], tokens[0, roots + level])
        logits.append(z)
        ok.append(z.argmax(-1) == tokens[0, roots + level + 1])
    return DraftedChains(torch.stack(ok, 1), logits, features, DraftVocab(target.config.vocab_size))


def write_files(head: BlockHead, out: Path, dtype: str, info: dict) -> None:
    """Write the weights and config.json of a drafter. info: of its training"""
    config = head.config
    names = head.weight_names()
    tensors = export_weights(losses.plain_copy(head), names, config.model, DTYPES[dtype])
    tensors = {name_in_files(name): value for name, value in tensors.items()}
    training.write_checkpoint(out, tensors, keys_of(config, dtype), info)


def keys_of(config: BlockConfig, dtype: str) -> dict:
    """Return the content of config.json in the official layout."""
    flags = {
        "mask_token_id": config.mask_token,
        "target_layer_ids": [layer - 1 for layer in config.aux_layers],
    }
    keys = training.shape_keys(config.model) | {
        "model_type": "qwen3",
        "layer_types": ["full_attention"] * config.model.n_layers,
        "block_size": config.block_size,
        "torch_dtype": dtype,
        "draft_sharpness": config.sharpness,
    }
    if config.causal:
        flags["causal_head"] = True
    if config.predicts_next:
        flags["markov_rank"] = config.markov_rank
        flags["markov_head_type"] = "vanilla"
        flags["enable_confidence_head"] = False
        return keys | flags | {"architectures": ["Qwen3DSparkModel"]}
    if config.selector_rank:
        flags |= {"block_size": config.block_size} | selector_keys(config)
        return keys | {"architectures": ["DFlash2DraftModel"], "dflash_config": flags}
    return keys | {"architectures": ["DFlashDraftModel"], "dflash_config": flags}


def selector_keys(config: BlockConfig) -> dict:
    """Return the keys of DFlash2's convolutions and selector."""
    return {
        "conv_kernel_size": config.model.conv_taps,
        "conv_group_size": config.model.conv_group,
        "selector_rank": config.selector_rank,
        "selector_top_k": config.selector_top,
    }


def save_head(head: BlockHead, config: BlockTrainConfig, info: dict) -> None:
    """Write the official layout."""
    write_files(head, Path(config.out), config.dtype, info)


BLOCK = training.Recipe(
    "train_block.py", BlockTrainConfig, make_head, scale_inputs, losses_of, draft_blocks, save_head
)


def main() -> None:
    training.run(BLOCK, COMMAND or parse(BlockTrainConfig, BLOCK.program, __doc__))


if __name__ == "__main__":
    main()
