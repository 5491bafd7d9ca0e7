"""Rank a tokenizer's tokens by how often text uses them, for a draft head that drafts only the most frequent ones.

    python scripts/train/rank_tokens.py --checkpoint DIR --data chats.jsonl,prose.txt --out HEAD/token_ranks.json
    python scripts/train/rank_tokens.py                     # the demo's, from its training text
    python generate.py --checkpoint DIR --eagle HEAD --draft_vocab 32768                      # what it is for

How it works:
1. Data are texts like those that the model will write: JSONL with dialogues or `text` (as scripts/train/train_eagle.py reads
   it; of dialogues only the answers count, for only they are drafted), or plain text files.
2. Tokens are counted with the target's tokenizer, and written as a JSON list of ids, the most frequent first; equal
   counts and tokens that do not occur are in the order of their ids.
3. The ids that end a text come first: no document says how often, and a head without them never drafts an end.

Source: FR-Spec (arXiv 2502.14856), which counts a million texts of SlimPajama.
Trade-off: one list for everything. What is frequent in one language or in code is rare in another: rank what you serve.
Not here: keeping N of them (extras/draft_vocab.py), and what that costs in tau (papers.py, as
`--methods eagle:dynamic,eagle:dynamic:draft_vocab=1024`). Rank no prompts that you evaluate on.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from command_line import one_line_errors, option, parse
from extras.draft_vocab import RANKS
from files import write_text
from hf.config import read_config
from hf.tokenizer import Tokenizer
from options import DEMO, ROOT
from scripts.train.train_demo import TrainConfig, read_python, read_sums
from scripts.train.train_eagle import read_dialogues


@dataclass(frozen=True)
class RankConfig:
    """Options. Units and effects are in the help texts."""

    checkpoint: str = option(
        DEMO, "Hugging Face directory of the target, for its tokenizer and vocabulary"
    )
    data: str = option(
        "", "JSONL or text files, separated by commas; default: the demo's training text"
    )
    out: str = option(
        "",
        f"file to write; default: {RANKS} in the checkpoint's directory with -eagle, if that exists",
    )

    def target_file(self) -> Path:
        """Where the list goes. Raises: ValueError when that is unknown or cannot be."""
        path = Path(self.checkpoint)
        bundled = path.with_name(path.name + "-eagle")
        if not self.out and not bundled.is_dir():
            raise ValueError(
                f"--out is missing, and there is no {bundled}; name the file, as HEAD/{RANKS}"
            )
        out = Path(self.out or bundled / RANKS)
        if not out.parent.is_dir() or out.is_dir():
            raise ValueError(
                f"--out: {out} must be a file in a directory that exists; name another"
            )
        return out


def read_texts(config: RankConfig) -> list[str]:
    """What is counted, document by document. Raises: ValueError for a file that cannot be read."""
    if not config.data:
        if Path(config.checkpoint).resolve() != Path(DEMO).resolve():
            raise ValueError("--data is missing; only the demo has training text of its own")
        return read_python()["train"] + read_sums(ROOT / TrainConfig.sums)["train"]
    texts = []
    for name in config.data.split(","):
        if name.endswith(".jsonl"):
            texts += [
                answer for dialogue in read_dialogues(Path(name)) for answer in dialogue.answers
            ]
            continue
        try:
            texts.append(Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--data: cannot read {name} ({type(error).__name__})") from None
    return texts


def rank(counts: Counter[int], vocab_size: int, first: tuple[int, ...]) -> list[int]:
    """Every id once: those of `first`, then by falling count, then by id."""
    rest = sorted(set(range(vocab_size)) - set(first), key=lambda i: (-counts[i], i))
    return [*first, *rest]


def coverage(ranks: list[int], counts: Counter[int]) -> dict[int, float]:
    """The share of the text that the first N tokens make up, for N halved again and again."""
    sizes = [len(ranks) >> halved for halved in range(6) if len(ranks) >> halved]
    return {size: sum(counts[i] for i in ranks[:size]) / counts.total() for size in sizes}


def run(config: RankConfig) -> None:
    """Count, write, and say what the list covers."""
    out, path = config.target_file(), Path(config.checkpoint)
    model, tokenizer = read_config(path), Tokenizer.load(path)
    counts: Counter[int] = Counter()
    for text in tqdm(read_texts(config), unit="text"):
        counts.update(tokenizer.encode(text, bos=False))
    if not counts:
        raise ValueError(f"--data: there is no text in {config.data}; name other files")
    ranks = rank(counts, model.vocab_size, model.eos_ids or tokenizer.eos_ids)
    write_text(str(out), json.dumps(ranks))
    print(
        f"{counts.total()} tokens, {len(counts)} of {model.vocab_size} different ones; wrote {out}"
    )
    for size, share in coverage(ranks, counts).items():
        print(f"--draft_vocab {size}: {100 * share:.2f} % of the text")


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config = parse(RankConfig, "rank_tokens.py", __doc__, argv)
    with one_line_errors("rank_tokens.py"):
        run(config)


if __name__ == "__main__":
    main()
