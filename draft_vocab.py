"""Which tokens a draft head may draft: every token, or the most frequent ones.

    python scripts/rank_tokens.py --checkpoint DIR --data FILES --out HEAD/token_ranks.json    # once per tokenizer
    python generate.py --checkpoint DIR --eagle HEAD --draft_vocab 32768

Most of what a model writes is a small part of its vocabulary, and a head's LM head reads a row per token it may draft.

How it works:
1. A list names token ids, the most frequent first. Its first N are kept, in the order of their ids, so that equal
   scores still go to the lowest id.
2. The draft's LM head keeps these N rows: its product, its top-k and its normalizer cost N instead of V.
   Column i of its scores stands for token ids[i].
3. The shared noise is gathered at the kept ids, so that each of them meets the noise by which the target will judge
   it. Temperature, top-k and top-p cut the N scores, elsewhere than they cut the target's V: the draft's own business.
4. The output does not change. A token that is not kept is never drafted, and the target, whose own LM head stays
   whole, decides it as the bonus token. The residual rule gets q with zeros for what cannot be drafted.

Source: FR-Spec (arXiv 2502.14856), whose published lists can be read.
Trade-off: the rows are a copy of N * F weights in the LM head's format (N = 32768, F = 4096: 268 MB in bf16, 69 MB in
int4), where a whole vocabulary shares the target's; a quantized LM head is unpacked for a moment to take its rows.
Not here: counting tokens (scripts/rank_tokens.py). An EAGLE-3 head brings its own table: ids[i] = i + d2t[i].
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from config import GenerateConfig
from quantize import QuantLinear

RANKS = "token_ranks.json"  # beside a head's weights


class DraftVocab(NamedTuple):
    """What the columns of a drafter's scores stand for."""

    size: int  # V, tokens of the target
    ids: Tensor | None = None  # [N] int64, ascending, the token of each column; None: every token, N = V

    @property
    def kept(self) -> int:
        """N, tokens that can be drafted."""
        return self.size if self.ids is None else len(self.ids)

    def columns(self, x: Tensor | None) -> Tensor | None:
        """What belongs to the tokens that are kept: [..., V] -> [..., N]. None stays None."""
        return x if self.ids is None or x is None else x.index_select(-1, self.ids)

    def tokens(self, column: Tensor) -> Tensor:
        """Token ids of columns, int64 of any shape."""
        return column if self.ids is None else self.ids[column]

    def spread(self, q: Tensor) -> Tensor:
        """Probabilities of all tokens, 0 for those that cannot be drafted: [..., N] -> [..., V]."""
        if self.ids is None:
            return q
        return q.new_zeros(*q.shape[:-1], self.size).index_copy(-1, self.ids, q)


def rows_of(linear: nn.Linear | QuantLinear, ids: Tensor) -> nn.Linear | QuantLinear:
    """A copy of an LM head that has only the outputs `ids`: the same weights, or codes and scales. ids: [N] int64."""
    if isinstance(linear, QuantLinear):
        return linear.rows(ids)
    rows = type(linear)(linear.in_features, len(ids), bias=False, device="meta")
    rows.weight = nn.Parameter(linear.weight.detach()[ids], requires_grad=False)  # [N, F]
    return rows


def vocab_from(config: GenerateConfig, size: int, device: torch.device) -> DraftVocab:
    """What `--draft_vocab` and `--token_ranks` come to. size: the target's vocabulary.

    Raises: ValueError for more tokens than there are, or a list that is missing, too short or of another vocabulary.
    """
    count = config.draft_vocab
    if not count:
        return DraftVocab(size)
    if count > size:
        raise ValueError(f"--draft_vocab must be at most the {size} tokens of the vocabulary; it is {count}; lower it")
    path = Path(config.token_ranks or Path(config.eagle, RANKS))
    if not path.is_file():
        command = f"python scripts/rank_tokens.py --checkpoint {config.checkpoint} --data FILES --out {path}"
        raise ValueError(
            f"--draft_vocab needs the tokens in order of frequency; there is no {path}; make it: {command}"
        )
    ids = read_ranks(path, size)
    if count > len(ids):
        raise ValueError(f"--draft_vocab {count} is more than the {len(ids)} tokens that {path} ranks; lower it")
    return DraftVocab(size, torch.tensor(sorted(ids[:count]), device=device))


def read_ranks(path: Path, size: int) -> list[int]:
    """Token ids by frequency: a JSON list, or a list saved by torch (FR-Spec's freq_*.pt).

    Raises: ValueError for a file that holds anything else than different ids below `size`.
    """
    try:
        if path.suffix == ".pt":
            ids = torch.load(path, map_location="cpu", weights_only=True)
            ids = ids.tolist() if isinstance(ids, Tensor) else ids
        else:
            ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path}: cannot read a list of token ids ({type(error).__name__}); make it again") from None
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ValueError(f"{path} must be a list of token ids, the most frequent first, such as [13, 29871, 29892]")
    bad = next((i for i in ids if not 0 <= i < size), None)
    if bad is not None:
        raise ValueError(f"{path} ranks the token {bad}, the target has 0..{size - 1}; use ranks of its own tokenizer")
    if len(set(ids)) < len(ids):
        raise ValueError(f"{path} lists a token twice; make it again with scripts/rank_tokens.py")
    return ids
