"""--random SHAPE: a model of any shape with random weights, and a head that is right at set rates.

The time of a step depends on a model's shape and not on its numbers, so that a rate on a GPU needs
no file. The text means nothing.

1. `RandomWeights` makes every tensor in memory when it is read, in the layers' own shapes. The row
   of token t in the embedding is that of token t + 1 in the LM head: vanilla counts upwards.
2. `OracleDrafter` runs an EAGLE-2 head of the target's shape, which takes a trained one's time, and
   puts the next token of the text among the children where `RATES` says that a head finds it.

Not here: reading files; heads of other kinds.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draft_tree import DynamicTree, Scores, StaticTree
from drafters import DraftInputs
from eagle_draft import EagleConfig, EagleDrafter, EagleHead, load_head
from files.checkpoint import TensorSource
from files.config import EMBEDDING, LM_HEAD, config_from, read_config, read_raw
from files.io import read_json
from model import DTYPES, ModelConfig, Transformer, weight_names
from options import log_note, require
from quantize import Quantization
from run.heads import draft_lm_head
from run.observer import DraftMethod, method_of
from run.options import GenerateConfig

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
OF_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
# by depth, the last for all deeper ones, and by rank: how often the next token is that child of its
# parent. A tree of 60 nodes has about 4.65 tokens a pass with these, as in EAGLE-2's paper.
RATES = ((0.77, 0.1, 0.04, 0.02), (0.75, 0.09, 0.03, 0.02), (0.73, 0.08, 0.03, 0.02))
PERIOD = 4093  # positions after which the draws repeat; a prime
FAR = 50.0  # the logits of a node's other tokens lie at least as far below those of its children
# the embedding beside the outputs of all layers, so that the residual stream keeps the token
EMBEDDING_SIZE = 4.0


# ----------------------------------------------------------------------------------------- weights


def raw_config(shape: str) -> dict[str, Any]:
    """Return the config.json of a shape: a name of `SHAPES`, a config.json, or its directory.

    Raises: ValueError for anything else.
    """
    if shape in SHAPES:
        return dict(zip(SIZES, SHAPES[shape])) | OF_LLAMA
    path = Path(shape)
    path = path / "config.json" if path.is_dir() else path
    known = f"one of {', '.join(SHAPES)}, or a config.json"
    require(path.is_file(), f"--random takes {known}; it is {shape}")
    raw = read_json(path)
    raw.pop("quantization_config", None)
    return raw | {"tie_word_embeddings": False}  # the LM head has the rows one further


def tensor_sizes(
    module: nn.Module, names: dict[str, tuple[str, ...]], config: ModelConfig
) -> dict[str, tuple[int, ...]]:
    """Return the size of every tensor that the parameters of a module are made of.

    names: of the tensors, by parameter
    """
    found = {}
    for ours, theirs in names.items():
        size = tuple(module.get_parameter(ours).shape)
        count = len(theirs)
        if len(size) > 1 and count >= size[0] > 1:  # of experts
            count //= size[0]
            size = size[1:]
        rows = size[0] // count
        heights = [rows] * (count - 1) + [size[0] - rows * (count - 1)]
        if ".wqkv." in ours and count == 3:
            usual = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
            keys = config.n_kv_heads * config.head_dim * (size[0] // usual)  # or wider heads
            heights = [size[0] - 2 * keys, keys, keys]
        for number, name in enumerate(theirs):
            found[name] = (heights[number % count], *size[1:])
    return found


class RandomWeights(TensorSource):
    """Tensors that are made when they are read: the same for a name, a size and a device.

    tokens: those that the text has
    """

    makes_tensors = True

    def __init__(
        self, raw: dict[str, Any], sizes: dict[str, tuple[int, ...]], device: str, tokens: int = 0
    ):
        self.path = Path(f"--random {raw.get('hidden_size', '')}")
        self.config = raw
        self.device = device
        self.tokens = tokens
        self.dtype = DTYPES.get(str(raw.get("torch_dtype")), torch.bfloat16)
        self.readers: dict[str, Callable[[], Tensor]] = {
            name: partial(self.make, name, size) for name, size in sizes.items()
        }
        if LM_HEAD in self.readers:
            self.readers[EMBEDDING] = self.make_embedding

    def make(self, name: str, size: tuple[int, ...]) -> Tensor:
        """Make a tensor: rows of length 1, norms of ones, no biases."""
        if len(size) == 1:
            value = 0.0 if name.endswith("bias") else 1.0
            return torch.full(size, value, dtype=self.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        high = math.sqrt(3 / size[-1])
        numbers = torch.empty(size, dtype=self.dtype, device=self.device)
        return numbers.uniform_(-high, high, generator=generator)

    def make_embedding(self) -> Tensor:
        """Make the embedding: the row of a token is that of the next one in the LM head."""
        rows = self.readers[LM_HEAD]()
        rows *= EMBEDDING_SIZE * math.sqrt(rows.shape[1])
        rows[: self.tokens] = rows[: self.tokens].roll(-1, 0)
        return rows


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
        sizes = tensor_sizes(Transformer(own), weight_names(own), own)
    return RandomWeights(raw, sizes, config.device, tokens)


def head_source(target: ModelConfig, device: str) -> TensorSource:
    """Return the tensors of an EAGLE-2 head with one layer of LLaMA in the target's sizes."""
    sizes = (target.dim, 1, target.n_heads, target.n_kv_heads, target.ffn_dim, target.vocab_size)
    raw = dict(zip(SIZES, sizes)) | {"head_dim": target.head_dim, "torch_dtype": target.dtype}
    own = EagleConfig(config_from(raw, "LlamaForCausalLM"))
    with torch.device("meta"):
        head = EagleHead(own)
    return RandomWeights(raw, tensor_sizes(head, head.weight_names(), own.model), device)


# ---------------------------------------------------------------------------------------- the draft


def rates(depth: int, width: int) -> Tensor:
    """Return how often the next token is a child, by depth and rank: [depth, width] fp32.

    Ranks beyond the table halve the last rate, and are never right.
    """
    halves = [0.5**n for n in range(1, width + 1)]
    rows = [RATES[min(level, len(RATES) - 1)] for level in range(depth)]
    return torch.tensor([[*row, *(row[-1] * half for half in halves)][:width] for row in rows])


def right_ranks(depth: int) -> Tensor:
    """Draw the rank of the next token at every position and depth: [PERIOD, depth] int64.

    -1: it is no child.
    """
    draw = torch.rand(depth, PERIOD, generator=torch.Generator().manual_seed(1))
    known = len(RATES[0])
    bounds = rates(depth, known).cumsum(1)  # [D, 4]
    ranks = torch.searchsorted(bounds, draw, right=True)  # [D, PERIOD]
    return ranks.masked_fill(ranks == known, -1).T.contiguous()


class OracleDrafter(EagleDrafter):
    """Drafts with a head whose logits of the children are replaced by those of the rates.

    tokens: those that the text has, one after the other
    """

    tokens: int

    def _set_tree(self, tree: DynamicTree | StaticTree) -> None:
        super()._set_tree(tree)
        self.ranks = torch.arange(self.width, device=self.device)  # [K]
        self.right = right_ranks(self.depth).to(self.device)  # [PERIOD, D]
        self.values = rates(self.depth, self.width).log().to(self.device)  # [D, K]

    def score_children(self, out: Tensor, level: int, inputs: DraftInputs) -> Scores:
        z = self.logits(out, level)  # [B, R, V]
        text = inputs.text
        right = self.right[text.pos % PERIOD, level, None]  # [B, 1]
        # all other children have tokens that no sibling has
        ahead = torch.where(self.ranks == right, 0, self.ranks + 1)  # [B, K]
        tokens = (text.root[:, None] + level + 1 + ahead) % self.tokens
        index = tokens[:, None].expand(-1, z.shape[1], -1)  # [B, R, K]
        z = z - z.amax(-1, keepdim=True) - FAR
        return Scores(z.scatter(-1, index, self.values[level].expand_as(index)))


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Load `--draft eagle` with --random. Raises: ValueError for a tree that does not fit."""
    quant = Quantization.of(config.quant_draft, config.group_size)
    source = head_source(target.config, str(target.norm.weight.device))
    head = load_head(Path("--random"), target, quant, source=source)
    lm_head = draft_lm_head(target, head.quant)
    drafter = OracleDrafter(head, target, config.draft_tree, lm_head, children=config.child_rule)
    drafter.tokens = text_tokens(config, target.config.vocab_size)
    return method_of(drafter)
