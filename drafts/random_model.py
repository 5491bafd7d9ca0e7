"""--random SHAPE: a model of any shape with random weights, and a head that is right at set rates.

The time of a step depends on a model's shape and not on its numbers, so that a rate on a GPU needs
no file. The text means nothing.

1. `RandomWeights` makes every tensor in memory when it is read, in the layers' own shapes. The row
   of token t in the embedding is that of token t + 1 in the LM head: vanilla counts upwards.
2. `OracleDrafter` runs an EAGLE-2 head of the target's shape, which takes a trained one's time, and
   then puts the next tokens in the places of a tree where `RATES` says that a head finds them.

Trade-off: the tree's shape is always the best one for these rates, and a trained head's follows
the text. Not here: reading files; heads of other kinds.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_tree import DraftTree, DynamicTree, StaticTree
from drafters import DraftInputs
from eagle_draft import EagleConfig, EagleDrafter, EagleHead, load_head
from files.checkpoint import TensorSource
from files.config import EMBEDDING, LM_HEAD, config_from, read_config, read_raw
from files.io import read_json
from model import DTYPES, ModelConfig, Transformer, weight_names
from options import log_note, require
from quantize import Quantization
from reference import ancestors
from run.draft_method import DraftMethod, method_of
from run.heads import draft_lm_head
from run.options import GenerateConfig
from runtime import replace_fields

# name -> width, layers, heads of 128, KV heads, width of the feed-forward, vocabulary
SHAPES = {
    "tiny-0.5b": (1024, 24, 8, 4, 5376, 32000),
    "llama2-7b": (4096, 32, 32, 32, 11008, 32000),
    "llama2-13b": (5120, 40, 40, 40, 13824, 32000),
    "llama2-70b": (8192, 80, 64, 8, 28672, 32000),
    "llama3-8b": (4096, 32, 32, 8, 14336, 128256),
    "llama3-70b": (8192, 80, 64, 8, 28672, 128256),
}
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
# by depth, the last for all deeper ones, and by rank: how often the next token is that child of its
# parent. A tree of 60 nodes has about 4.65 tokens a pass with these, as in EAGLE-2's paper.
RATES = ((0.77, 0.1, 0.04, 0.02), (0.75, 0.09, 0.03, 0.02), (0.73, 0.08, 0.03, 0.02))
PERIOD = 4093  # positions after which the draws repeat; a prime
# the embedding beside the outputs of all layers, so that the residual stream keeps the token
EMBEDDING_SIZE = 4.0


# ----------------------------------------------------------------------------------------- weights


def raw_config(shape: str) -> dict[str, Any]:
    """Return the config.json of a shape: a name of `SHAPES`, a config.json, or its directory.

    Raises: ValueError for anything else.
    """
    if shape in SHAPES:
        sizes = dict(zip(SIZES, SHAPES[shape]))
        return sizes | {"architectures": ["LlamaForCausalLM"], "head_dim": 128,
                        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
                        "torch_dtype": "bfloat16"}  # fmt: skip
    path = Path(shape)
    path = path / "config.json" if path.is_dir() else path
    known = f"one of {', '.join(SHAPES)}, or a config.json"
    require(path.is_file(), f"--random takes {known}; it is {shape}")
    raw = read_json(path)
    raw.pop("quantization_config", None)
    return raw | {"tie_word_embeddings": False}  # the LM head has the rows one further


class RandomWeights(TensorSource):
    """Tensors that are made when they are read: the same for a name, a shape and a device."""

    makes_tensors = True

    def __init__(
        self,
        raw: dict[str, Any],
        sizes: dict[str, tuple[int, ...]],
        names: dict[str, tuple[str, ...]],
        qkv: tuple[int, ...],
        device: str,
        tokens: int = 0,
    ):
        """Name the tensors.

        sizes, names: of our parameters, and the tensors that each is made of
        qkv: rows of queries, keys and values; tokens: those that the text has
        """
        self.path = Path(f"--random {raw.get('hidden_size', '')}")
        self.config = raw
        self.device = device
        self.tokens = tokens
        self.dtype = DTYPES.get(str(raw.get("torch_dtype")), torch.bfloat16)
        self.readers: dict[str, Callable[[], Tensor]] = {}
        for ours, theirs in names.items():
            for name, size in zip(theirs, part_sizes(sizes[ours], len(theirs), qkv)):
                self.readers[name] = partial(self.make, name, size)
        if LM_HEAD in self.readers:
            self.readers[EMBEDDING] = partial(self.make_embedding, sizes["embedding.weight"])

    def make(self, name: str, size: tuple[int, ...]) -> Tensor:
        """Make a tensor: rows of length 1, norms of ones, no biases."""
        if len(size) == 1:
            value = 0.0 if name.endswith("bias") else 1.0
            return torch.full(size, value, dtype=self.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        high = math.sqrt(3 / size[-1])
        numbers = torch.empty(size, dtype=self.dtype, device=self.device)
        return numbers.uniform_(-high, high, generator=generator)

    def make_embedding(self, size: tuple[int, ...]) -> Tensor:
        """Make the embedding: the row of a token is that of the next one in the LM head."""
        rows = self.readers[LM_HEAD]().mul_(EMBEDDING_SIZE * math.sqrt(size[1]))
        rows[: self.tokens] = rows[: self.tokens].roll(-1, 0)
        return rows


def part_sizes(size: tuple[int, ...], count: int, qkv: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the sizes of the tensors that a parameter is made of, one below the other."""
    if len(size) == 3 or (len(size) == 2 and count >= size[0]):  # of experts
        each = part_sizes(size[1:], count // size[0], qkv)
        return each * size[0]
    rows = size[0] // count
    heights = [rows] * (count - 1) + [size[0] - rows * (count - 1)]
    if count == len(qkv) and sum(qkv) == size[0]:
        heights = [*qkv]
    return [(height, *size[1:]) for height in heights]


def sizes_of(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in module.named_parameters()}


def qkv_of(config: ModelConfig) -> tuple[int, ...]:
    heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
    return tuple(config.head_dim * count for count in heads)


def text_tokens(config: GenerateConfig, vocab_size: int) -> int:
    """Return the number of tokens of the checkpoint's tokenizer, which the text goes through.

    Raises: ValueError where the shape has fewer.
    """
    path = Path(config.checkpoint)
    count = read_config(path, read_raw(path)).vocab_size
    fault = f"--random {config.random} has {vocab_size} tokens, and {path} has {count}"
    require(count <= vocab_size, f"{fault}; use a larger shape, or another --checkpoint")
    return count


def target_source(config: GenerateConfig) -> TensorSource:
    """Return the tensors of the target. Prints a note. Raises: ValueError for a shape."""
    raw = raw_config(config.random)
    path = Path(config.random)
    own = read_config(path.parent if path.is_file() else path, raw)
    tokens = text_tokens(config, own.vocab_size)
    log_note(
        f"the weights are random, in the shape {config.random}: the text means nothing, and the "
        "head is right at the rates of drafts/random_model.py"
    )
    with torch.device("meta"):
        sizes = sizes_of(Transformer(own))
    return RandomWeights(raw, sizes, weight_names(own), qkv_of(own), config.device, tokens)


def head_source(target: ModelConfig, device: str) -> TensorSource:
    """Return the tensors of an EAGLE-2 head with one layer of LLaMA in the target's sizes."""
    sizes = (target.dim, 1, target.n_heads, target.n_kv_heads, target.ffn_dim, target.vocab_size)
    raw = dict(zip(SIZES, sizes)) | {"head_dim": target.head_dim, "torch_dtype": target.dtype}
    own = EagleConfig(config_from(raw, "LlamaForCausalLM"))
    with torch.device("meta"):
        head = EagleHead(own)
    return RandomWeights(raw, sizes_of(head), head.weight_names(), qkv_of(own.model), device)


# ---------------------------------------------------------------------------------------- the draft


def rate_of(depth: int, rank: int) -> float:
    """Return the rate of a child of a node at a depth; ranks beyond the table halve the last."""
    rates = RATES[min(depth, len(RATES) - 1)]
    last = len(rates) - 1
    return rates[min(rank, last)] / 2 ** max(rank - last, 0)


def path_value(path: tuple[int, ...]) -> float:
    """Return the log-probability of a rank path."""
    return sum(math.log(rate_of(depth, rank)) for depth, rank in enumerate(path))


def best_paths(tree: DynamicTree) -> tuple[tuple[int, ...], ...]:
    """Return the rank paths of a dynamic tree whose head scores children by their rates."""
    paths: list[tuple[int, ...]] = []
    queue: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    while len(paths) < tree.size:
        _, path = heapq.heappop(queue)
        paths.append(path)
        if len(path) < tree.depth:
            children = [(*path, rank) for rank in range(tree.topk)]
            for child in children:
                heapq.heappush(queue, (-path_value(child), child))
    return tuple(paths[1:])


def right_ranks(depth: int) -> Tensor:
    """Draw the rank of the next token at every position and depth: [PERIOD, depth] int64.

    A rank beyond the table's is that of no child.
    """
    draw = torch.rand(depth, PERIOD, generator=torch.Generator().manual_seed(1))
    ranks = []
    for level in range(depth):
        bounds = torch.tensor(RATES[min(level, len(RATES) - 1)]).cumsum(0)
        missed = draw[level] >= bounds[-1]
        ranks.append(torch.bucketize(draw[level], bounds, right=True).masked_fill(missed, -1))
    return torch.stack(ranks, 1)


class OracleDrafter(EagleDrafter):
    """Drafts with a head, and then puts the next tokens where its rates say.

    tokens: those that the text has, one after the other
    """

    tokens: int

    def _set_tree(self, tree: DynamicTree | StaticTree) -> None:
        super()._set_tree(tree)
        shape = tree
        if isinstance(tree, DynamicTree):
            shape = StaticTree(best_paths(tree))
        order = [path for level in shape.levels for path in level]
        parents = torch.tensor([[order.index(path[:-1]) for path in order]])  # [1, N]
        ranks = right_ranks(shape.depth)
        right = torch.ones(PERIOD, len(order), dtype=torch.bool)
        for node, path in enumerate(order):
            right[:, node] = (ranks[:, : len(path)] == torch.tensor(path)).all(1)
        self.right = right.to(self.device)  # [PERIOD, N]: the node has the text's token
        self.parents = parents.to(self.device)
        self.values = torch.tensor([list(map(path_value, order))], device=self.device)  # [1, N]
        self.others = torch.arange(len(order), device=self.device)  # [N]
        self.depths, self.mask = ancestors(self.parents, shape.depth)

    def propose(self, state: Any, inputs: DraftInputs) -> DraftTree:
        drafted = super().propose(state, inputs)
        text = inputs.text
        known = text.root[:, None] + self.depths  # [B, N]
        # all other nodes have tokens that no node beside them has
        tokens = torch.where(self.right[text.pos % PERIOD], known, known + self.others)
        tokens = torch.where(self.depths > 0, tokens % self.tokens, drafted.tokens)
        B = len(tokens)
        return replace_fields(
            drafted,
            tokens=tokens,
            parents=self.parents.expand(B, -1),
            depths=self.depths.expand(B, -1),
            mask=self.mask.expand(B, -1, -1),
            values=self.values.expand(B, -1),
        )


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Load `--draft eagle` with --random. Raises: ValueError for a tree that does not fit."""
    quant = Quantization.of(config.quant_draft, config.group_size)
    source = head_source(target.config, str(target.norm.weight.device))
    head = load_head(Path("--random"), target, quant, source=source)
    lm_head = draft_lm_head(target, head.quant)
    drafter = OracleDrafter(head, target, config.draft_tree, lm_head, children=config.child_rule)
    drafter.tokens = text_tokens(config, target.config.vocab_size)
    return method_of(drafter)
