"""--random SHAPE: a model of any shape with random weights, and a head that is right at set rates.

The time of a step depends on a model's shape and not on its numbers, so that a rate on a GPU needs
no file. The text means nothing.

1. `RandomLoader` makes every weight in its layer's own shape, on its device. The row of token t in
   the embedding is that of token t + 1 in the LM head: vanilla counts upwards.
2. `OracleDrafter` runs an EAGLE-2 head of the target's shape, which takes a trained one's time, and
   puts the next token of the text among the children where `RATES` says that a head finds it.

Not here: reading files; heads of other kinds.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_tree import DynamicTree, Scores, StaticTree
from drafters import DraftInputs
from eagle_draft import EagleConfig, EagleDrafter, EagleHead, fill
from files.checkpoint import TensorSource
from files.config import EMBEDDING, LM_HEAD, config_from, read_config, read_raw
from files.io import read_json
from files.weights import CheckpointLoader
from model import DTYPES, Transformer
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


class RandomLoader(CheckpointLoader):
    """Makes every weight in its shape: the same for a name, a shape and a device."""

    files: RandomWeights

    def check_names(self, wanted: set[str], ignored: Callable[[str], bool]) -> None:
        """Do nothing: every tensor can be made."""

    def join(
        self,
        names: tuple[str, ...],
        shape: torch.Size,
        dtype: torch.dtype | None,
        value: Tensor | None = None,
    ) -> Tensor:
        """Make a weight, in place of the parts of a file. value: write and return this one"""
        made = self.make(names[0], shape, dtype or self.files.dtype)
        return made if value is None else value.copy_(made)

    def make(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Make a tensor: rows of length 1, norms of ones, no biases.

        The row of a token in the embedding is that of the next one in the LM head.
        """
        numbers = torch.empty(shape, dtype=dtype, device=self.storage.device)
        if name.endswith("bias"):
            return numbers.zero_()
        if len(shape) == 1:
            return numbers.fill_(1.0)
        if name == EMBEDDING:
            numbers = self.make(LM_HEAD, shape, dtype)
            numbers *= EMBEDDING_SIZE * math.sqrt(shape[1])
            tokens = self.files.tokens
            numbers[:tokens] = numbers[:tokens].roll(-1, 0)
            return numbers
        generator = torch.Generator(numbers.device).manual_seed(zlib.crc32(name.encode()))
        high = math.sqrt(3 / shape[-1])
        return numbers.uniform_(-high, high, generator=generator)


class RandomWeights(TensorSource):
    """The weights of a config.json, none of which is anywhere yet.

    tokens: those that the text has
    """

    loader = RandomLoader

    def __init__(self, raw: dict[str, Any], layers: int, tokens: int = 0):
        self.path = Path(f"--random {raw['hidden_size']}")
        self.config = raw
        self.tokens = tokens
        self.dtype = DTYPES.get(str(raw.get("torch_dtype")), torch.bfloat16)
        self.readers = dict.fromkeys(map(str, range(layers)))  # which are counted, and not read


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
    return RandomWeights(raw, own.n_layers, tokens)


def random_head(target: Transformer, quant: Quantization | None) -> EagleHead:
    """Make an EAGLE-2 head with one layer of LLaMA in the target's sizes."""
    c = target.config
    sizes = (c.dim, 1, c.n_heads, c.n_kv_heads, c.ffn_dim, c.vocab_size)
    raw = dict(zip(SIZES, sizes)) | {"head_dim": c.head_dim, "torch_dtype": c.dtype}
    with torch.device("meta"):
        head = EagleHead(EagleConfig(config_from(raw, "LlamaForCausalLM")))
    fill(head, target, RandomWeights(raw, 1), head.weight_names(), quant, lambda name: False)
    return head


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
    head = random_head(target, quant)
    lm_head = draft_lm_head(target, head.quant)
    drafter = OracleDrafter(head, target, config.draft_tree, lm_head, children=config.child_rule)
    drafter.tokens = text_tokens(config, target.config.vocab_size)
    return method_of(drafter)
