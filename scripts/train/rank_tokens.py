"""Rank a tokenizer's tokens by frequency, for a draft head that drafts only the most frequent ones.

    python scripts/train/rank_tokens.py --checkpoint DIR --data FILES --out HEAD/token_ranks.json
    python scripts/train/rank_tokens.py                  # the demo's, from its training text
    python generate.py --checkpoint DIR --eagle HEAD --set draft_vocab=32768    # uses the list

Data are texts like those that the model will write, in the forms of scripts/train/train_eagle.py,
or plain text files. Of dialogues only the answers count, because only they are drafted. Rank no
prompts that you evaluate on. The list is JSON: ids, the most frequent first; ids of equal counts,
and ids that do not occur, in ascending order. The ids that end a text come first: no document shows
how often they occur, and a head without them never drafts an end.
Source: FR-Spec (arXiv 2502.14856), which counts a million texts of SlimPajama.
Trade-off: tokens that are frequent in one language or in code are rare in another, and there is one
list for everything: rank the texts that you serve.
Not here: keeping N of them (extras/draft_vocab.py), and the cost in tau (scripts/bench/papers.py,
as `--methods eagle:dynamic,eagle:dynamic:draft_vocab=1024`).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from cli.io import write_text
from cli.parsing import one_line_errors, option, parse
from extras.draft_vocab import RANKS
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
        f"file to write; default: {RANKS} in the checkpoint's directory with -eagle, "
        "if that exists",
    )

    def target_file(self) -> Path:
        """Return the file of the list. Raises: ValueError when it is unknown or not writable."""
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
    """Return the texts to count, one a document. Raises: ValueError for an unreadable file."""
    if not config.data:
        if Path(config.checkpoint).resolve() != Path(DEMO).resolve():
            raise ValueError("--data is missing; only the demo has training text of its own")
        return read_python()["train"] + read_sums(ROOT / TrainConfig.sums)["train"]
    texts = []
    for name in config.data.split(","):
        if name.endswith(".jsonl"):
            for dialogue in read_dialogues(Path(name)):
                texts += dialogue.answers
            continue
        try:
            texts.append(Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--data: cannot read {name} ({type(error).__name__})") from None
    return texts


def rank(counts: Counter[int], vocab_size: int, first: tuple[int, ...]) -> list[int]:
    """Return every id once: those of `first`, then by falling count, then by id."""
    rest = sorted(set(range(vocab_size)) - set(first), key=lambda i: (-counts[i], i))
    return [*first, *rest]


def coverage(ranks: list[int], counts: Counter[int]) -> dict[int, float]:
    """Return the share of the text that the first N tokens cover, for N halved up to five times."""
    sizes = [len(ranks) >> halved for halved in range(6) if len(ranks) >> halved]
    return {size: sum(counts[i] for i in ranks[:size]) / counts.total() for size in sizes}


def run(config: RankConfig) -> None:
    """Count the tokens, write the list, and print how much of the text it covers."""
    out = config.target_file()
    path = Path(config.checkpoint)
    model = read_config(path)
    tokenizer = Tokenizer.load(path)
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
    """Run the command line."""
    config = parse(RankConfig, "rank_tokens.py", __doc__, argv)
    with one_line_errors("rank_tokens.py"):
        run(config)


if __name__ == "__main__":
    main()
