"""`--set draft_vocab=COUNT`: a draft head that can draft only the most frequent tokens.

    python scripts/train/rank_tokens.py --checkpoint DIR --data FILES --out HEAD/token_ranks.json
    python generate.py --checkpoint DIR --eagle HEAD --set draft_vocab=32768

The first command runs once per tokenizer.
1. `vocab_from` reads a list of token ids by frequency. It sorts the first Vd by id, because the
   lowest id wins among equal scores, as elsewhere.
2. The draft's LM head has only these Vd rows (`hf.heads.rows_of`). Column i of its scores belongs
   to token ids[i]. When sampling, each score gets the noise of its token, as in the target.
   The option is refused for a head that has a draft vocabulary of its own.
3. The output does not change: the target still decides a token outside the list, with its whole
   LM head. Such a token is never drafted.

Source: FR-Spec (arXiv 2502.14856); its published lists can be read.
Trade-off: the draft's LM head is a copy of Vd * F weights (Vd = 32768, F = 4096: 268 MB in bf16, 69
MB in int4), while an untrimmed one is the target's own. A quantized LM head is unpacked briefly.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from cli.io import parse_json, read_text
from drafters import DraftVocab
from hf.heads import HeadFiles, draft_vocab, head_files, read_head
from hf.untrusted import load_pickle, read_untrusted
from model import Transformer
from options import GenerateConfig

RANKS = "token_ranks.json"  # beside a head's weights


def vocab_from(config: GenerateConfig, target: Transformer) -> DraftVocab:
    """Return the tokens that `draft_vocab` and `token_ranks` select.

    Raises: ValueError for a head with a draft vocabulary of its own, more tokens than the target
    has, or a list that is missing, too short or of another vocabulary.
    """
    count = config.draft_vocab
    size = target.config.vocab_size
    head = Path(config.head)
    device = target.norm.weight.device
    files = HeadFiles(head, head_files(head, "none"))
    has_vocab = config.draft.startswith("eagle") and "d2t" in files.readers
    if has_vocab and draft_vocab(files, read_head(files, target.config), device):
        raise ValueError(f"{head} drafts tokens of its own choice (d2t); drop draft_vocab")
    if count > size:
        raise ValueError(
            f"--set draft_vocab must be at most the {size} tokens of the vocabulary; "
            f"it is {count}; lower it"
        )
    path = Path(config.token_ranks or head / RANKS)
    if not path.is_file():
        script = "python scripts/train/rank_tokens.py"
        command = f"{script} --checkpoint {config.checkpoint} --data FILES --out {path}"
        raise ValueError(
            "--set draft_vocab needs the tokens in order of frequency; "
            f"there is no {path}; make it: {command}"
        )
    ids = read_ranks(path, size)
    if count > len(ids):
        raise ValueError(
            f"--set draft_vocab={count} is more than the {len(ids)} tokens that {path} ranks; "
            "lower it"
        )
    return DraftVocab(size, torch.tensor(sorted(ids[:count]), device=device))


def read_ranks(path: Path, size: int) -> list[int]:
    """Read token ids by frequency: a JSON list, or a list saved by torch (FR-Spec's freq_*.pt).

    Raises: ValueError for a file of anything else than distinct ids below `size`.
    """
    if path.suffix == ".pt":
        with read_untrusted(path, "make it again"):
            ids = load_pickle(path, mmap=False)
            if isinstance(ids, Tensor):
                ids = ids.tolist()
    else:
        ids = parse_json(read_text(path), path)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        form = "a list of token ids, the most frequent first"
        raise ValueError(f"{path} must be {form}; write it as [13, 29871, 29892]")
    bad = next((i for i in ids if not 0 <= i < size), None)
    if bad is not None:
        raise ValueError(
            f"{path} ranks the token {bad}, the target has 0..{size - 1}; "
            "use ranks of its own tokenizer"
        )
    if len(set(ids)) < len(ids):
        raise ValueError(
            f"{path} lists a token twice; make it again with scripts/train/rank_tokens.py"
        )
    return ids
