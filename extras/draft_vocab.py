"""`--draft_vocab N`: a draft head that can draft only the N most frequent tokens.

    python scripts/train/rank_tokens.py --checkpoint DIR --data FILES --out HEAD/token_ranks.json    # once per tokenizer
    python generate.py --checkpoint DIR --eagle HEAD --draft_vocab 32768

1. `vocab_from` reads a list of token ids by frequency. It sorts the first N by id: of equal scores the lowest id wins,
   as elsewhere.
2. The draft's LM head has these N rows only (`hf.heads.rows_of`). Column i of its scores is the token ids[i]. When
   sampling, a score still gets the noise of its token, by which the target will judge it.
   A head that has such a vocabulary already drafts that; the option is for the others.
3. The output does not change. A token outside the list is never drafted. The target decides it with its whole LM head.

Source: FR-Spec (arXiv 2502.14856); its published lists can be read.
Trade-off: the draft's LM head is a copy of N * F weights (N = 32768, F = 4096: 268 MB in bf16, 69 MB in int4), where an
untrimmed one is the target's own. To take its rows, a quantized LM head is unpacked for a moment.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from checkpoint import WeightFiles
from drafters import DraftVocab
from files import load_pickle, parse_json, read_text, read_untrusted
from hf.heads import HeadFiles, draft_vocab, read_head
from model import Transformer
from options import GenerateConfig

RANKS = "token_ranks.json"  # beside a head's weights


def vocab_from(config: GenerateConfig, target: Transformer) -> DraftVocab:
    """The tokens that `--draft_vocab` and `token_ranks` select.

    Raises: ValueError for a head that has tokens of its own, more tokens than there are, or a list that is missing, too
    short or of another vocabulary.
    """
    count, size, head = config.draft_vocab, target.config.vocab_size, Path(config.eagle)
    files = HeadFiles(head, WeightFiles(head))
    if "d2t" in files.readers and draft_vocab(
        files, read_head(files, target.config), target.embedding.weight.device
    ):
        raise ValueError(f"{head} drafts tokens of its own choice (d2t); drop --draft_vocab")
    if count > size:
        raise ValueError(
            f"--draft_vocab must be at most the {size} tokens of the vocabulary; it is {count}; lower it"
        )
    path = Path(config.token_ranks or head / RANKS)
    if not path.is_file():
        command = f"python scripts/train/rank_tokens.py --checkpoint {config.checkpoint} --data FILES --out {path}"
        raise ValueError(
            f"--draft_vocab needs the tokens in order of frequency; there is no {path}; make it: {command}"
        )
    ids = read_ranks(path, size)
    if count > len(ids):
        raise ValueError(
            f"--draft_vocab {count} is more than the {len(ids)} tokens that {path} ranks; lower it"
        )
    return DraftVocab(
        size, torch.tensor(sorted(ids[:count]), device=target.embedding.weight.device)
    )


def read_ranks(path: Path, size: int) -> list[int]:
    """Read token ids by frequency: a JSON list, or a list saved by torch (FR-Spec's freq_*.pt).

    Raises: ValueError for a file with anything else than distinct ids below `size`.
    """
    if path.suffix == ".pt":
        with read_untrusted(path, "make it again"):
            ids = load_pickle(path, mmap=False)
            ids = ids.tolist() if isinstance(ids, Tensor) else ids
    else:
        ids = parse_json(read_text(path), path)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        form = "a list of token ids, the most frequent first"
        raise ValueError(f"{path} must be {form}; write it as [13, 29871, 29892]")
    bad = next((i for i in ids if not 0 <= i < size), None)
    if bad is not None:
        raise ValueError(
            f"{path} ranks the token {bad}, the target has 0..{size - 1}; use ranks of its own tokenizer"
        )
    if len(set(ids)) < len(ids):
        raise ValueError(
            f"{path} lists a token twice; make it again with scripts/train/rank_tokens.py"
        )
    return ids
