"""Record answers of a model for count_sources.py: tokens, and the likeliest successors of each.

    python scripts/bench/record_answers.py --records DIR --checkpoint F.gguf --chat --tasks edit
    python scripts/bench/record_answers.py --records DIR --checkpoint F.gguf --windows
    python scripts/bench/record_answers.py --corpus OUT.npz --checkpoint F.gguf --texts A,B

1. The model decodes first turns without drafting. A pass over every answer then gives the
   likeliest successors of all tokens. A file per answer: the same command goes on where it stopped.
2. `--windows` adds Lookahead's Jacobi window (arXiv 2402.02057) to greedy answers: one pass per
   token of the answer, whatever a decoder with that window would have accepted.
3. `--corpus` encodes texts for REST (arXiv 2311.08252) and sorts their suffixes by 32 tokens.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from command_line import one_line_errors, option, parse
from decode import PREFILL_CHUNK, Engine
from files import replace_file
from generate import Batch, Turn, load
from kv_cache import KVCache, Window
from options import DEMO
from scripts.bench.papers import BenchConfig, fitting, read_tasks
from scripts.bench.sources import TOP, Row

LOGIT_ROWS = 64  # positions whose logits are in memory at a time
WINDOW = 10  # W, columns of a Jacobi window
GRAM = 4  # N, tokens of its n-grams
SORTED = 32  # tokens by which suffixes of a corpus are sorted: a match and a continuation


@dataclass(frozen=True)
class RecordConfig:
    """Options. Units and effects are in the help texts."""

    checkpoint: str = option(DEMO, "the model: a Hugging Face directory or a GGUF file")
    records: str = option("", "directory of the answers")
    tasks: str = option("edit", "as in papers.py")
    limit: int = option(12, "prompts per task; 0: all", least=0)
    chat: str | None = option(
        None, "apply a chat template: the model's, or the one named", optional=True
    )
    temperature: float = option(0.0, "0 is greedy", least=0)
    batch_size: int = option(4, "sequences decoded together", least=1)
    max_new_tokens: int = option(192, "tokens per answer", least=2)
    windows: bool = option(False, "add Jacobi windows to the answers at hand, and record none")
    corpus: str = option("", "write a corpus to this file, and record no answers")
    texts: str = option("", "text files of the corpus, a list")

    def check(self) -> None:
        """Check the options. Raises: ValueError."""
        if bool(self.records) == bool(self.corpus):
            raise ValueError("name one output: --records DIR or --corpus FILE")
        if self.records and not Path(self.records).is_dir():
            raise ValueError(f"--records: there is no directory {self.records}; make it")


class Record(NamedTuple):
    """A recorded answer of S tokens, prompt included."""

    task: str
    temperature: float
    number: int  # of the prompt in its task, and of its noise
    start: int  # tokens of the prompt
    tokens: np.ndarray  # [S]
    top: np.ndarray  # [S, 8] the likeliest successors of every token, best first
    logp: np.ndarray  # [S, 8] their log probabilities
    vocab: int
    grams: np.ndarray  # [S, W, N] n-grams of a window behind every token, empty without one

    @staticmethod
    def load(path: Path) -> Record:
        """Read a file of `save`."""
        with np.load(path) as saved:
            fields = {name: saved[name] for name in saved}
        fields.setdefault("grams", np.zeros((len(fields["tokens"]), 0, 0), np.int32))
        for name in ("task", "temperature", "number", "start", "vocab"):
            fields[name] = fields[name].item()
        return Record(**fields)

    def rows(self, begin: int, end: int) -> list[Row]:
        """Return what passes over some tokens leave; the first of them was a root."""
        none: list = []
        out = []
        for i in range(begin, end):
            grams = self.grams[i].tolist() if i == begin else none
            out.append(Row(int(self.tokens[i]), self.top[i].tolist(), self.logp[i].tolist(), grams))
        return out


class Reader:
    """The target over one text, with rows behind it that are not kept."""

    def __init__(self, engine: Engine, slots: int):
        self.engine = engine
        self.scale = engine.config.temperature or 1.0
        config = engine.target.config
        dtype = engine.target.norm.weight.dtype
        self.cache = KVCache.empty(config, 1, slots, dtype, "cpu")
        self.cached = 0  # tokens

    @torch.inference_mode()
    def read(
        self, text: list[int], nodes: list[int], depths: list[int], seen: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read the tokens of a text that are not cached yet, then nodes behind it.

        depths: of the nodes below the last token; seen: [M, M] bool, nodes that each node sees
        Returns: the likeliest successors of all of them and their log probabilities, [T, TOP].
        """
        begin = self.cached
        T = len(text) - begin + len(nodes)
        mask = np.tri(T, dtype=bool)
        fresh = len(text) - begin
        mask[fresh:, fresh:] = seen
        positions = [*range(begin, len(text)), *(len(text) - 1 + d for d in depths)]
        slots = torch.arange(begin, begin + T)[None]
        window = Window(slots, torch.tensor([begin]), torch.from_numpy(mask)[None])
        ids = torch.tensor([[*text[begin:], *nodes]])
        target = self.engine.target
        features = target(ids, torch.tensor([positions]), self.cache, window)  # [1, T, F]
        self.cached = len(text)
        top = []
        logp = []
        for rows in features.split(LOGIT_ROWS, 1):
            best = (target.logits(rows)[0].float() / self.scale).log_softmax(-1).topk(TOP)
            top.append(best.indices.numpy())
            logp.append(best.values.numpy())
        return np.concatenate(top).astype(np.int32), np.concatenate(logp).astype(np.float16)

    def read_text(self, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the likeliest successors of all tokens of a text, [S, TOP]."""
        parts = []
        while self.cached < len(ids):
            text = ids[: self.cached + PREFILL_CHUNK]
            parts.append(self.read(text, [], [], np.zeros((0, 0), bool)))
        top, logp = zip(*parts)
        return np.concatenate(top), np.concatenate(logp)


def save(path: Path, arrays: dict) -> None:
    """Write arrays to an .npz file, whole or not at all."""

    def write(file: Path) -> None:
        with file.open("wb") as out:
            np.savez_compressed(out, **arrays)

    replace_file(path, write)


def engine_of(config: RecordConfig) -> Engine:
    """Load the model as generate.py would run it, without drafting."""
    return load(
        checkpoint=config.checkpoint,
        chat=config.chat,
        draft="none",
        compile=True,
        temperature=config.temperature,
        batch_size=config.batch_size,
        max_new_tokens=config.max_new_tokens,
    )


def record(config: RecordConfig) -> None:
    """Decode the answers that are lacking. Writes: a file each."""
    engine = engine_of(config)
    chosen = {"tasks": config.tasks, "limit": config.limit, "chat": config.chat}
    plan = BenchConfig(max_new_tokens=config.max_new_tokens, **chosen)
    for name, prompts in read_tasks(plan).items():
        task = fitting(engine, name, prompts, plan)
        batch = Batch(engine, [turns[:1] for turns in task.prompts])
        stem = f"{config.records}/{name}-T{config.temperature:g}"
        lacking = [s for s in batch.streams if not Path(f"{stem}-{s[0]}.npz").is_file()]
        bar = tqdm(total=len(lacking), desc=Path(stem).name, unit="answer")
        batch.run(lacking, on_finished=partial(save_answers, engine, name, stem, bar))
        bar.close()


def save_answers(engine: Engine, task: str, stem: str, bar: tqdm, turns: list[Turn]) -> None:
    """Read finished answers once more for their successors. Writes: their files."""
    for turn in turns:
        number = turn.index[0]
        ids = turn.prompt + turn.new
        top, logp = Reader(engine, len(ids)).read_text(ids)
        numbers = {"number": number, "start": len(turn.prompt)}
        numbers |= {"temperature": engine.config.temperature}
        numbers |= {"vocab": engine.target.config.vocab_size}
        arrays = {"task": task, "tokens": np.array(ids), "top": top, "logp": logp}
        save(Path(f"{stem}-{number}.npz"), numbers | arrays)
        bar.update()


# ----------------------------------------------------------------------------------------- windows


def window_mask() -> np.ndarray:
    """Return the columns and levels that a window's nodes see, level by level: [M, M] bool.

    Level 0 is a text behind the root's; its first column is the root and no node. A node of a
    later level sees level 0 up to its column, and the levels before it in its column.
    """
    level, column = np.divmod(np.arange(1, WINDOW * (GRAM - 1)), WINDOW)
    in_text = (level == 0) & (column <= column[:, None])
    in_column = (column == column[:, None]) & (level <= level[:, None])
    return in_text | in_column


def windows(reader: Reader, made: Record) -> np.ndarray:
    """Return the n-grams of a window behind every token of an answer, [S, WINDOW, GRAM]."""
    tokens = made.tokens.tolist()
    reader.read_text(tokens[: made.start])
    seen = window_mask()
    level, column = np.divmod(np.arange(1, WINDOW * (GRAM - 1)), WINDOW)
    grams = np.zeros((len(tokens), WINDOW, GRAM), np.int32)
    random = np.random.default_rng(made.number)
    rows = random.choice(made.tokens[: made.start], (GRAM - 1, WINDOW))  # as the paper starts
    for root in range(made.start, len(tokens) - 1):
        rows[0, 0] = tokens[root]
        nodes = rows.reshape(-1)[1:].tolist()
        top, _ = reader.read(tokens[: root + 1], nodes, (level + column).tolist(), seen)
        new = top[-WINDOW:, 0]  # behind the last level
        grams[root] = np.concatenate((rows, new[None])).T
        rows = np.concatenate((rows[1:], new[None]))
    return grams


def add_windows(config: RecordConfig) -> None:
    """Add windows to the greedy answers that lack them. Writes: their files."""
    engine = engine_of(config)
    files = sorted(Path(config.records).glob("*-T0-*.npz"))
    for file in tqdm(files, unit="answer"):
        made = Record.load(file)
        if made.number < config.limit and made.grams.size == 0:
            slots = len(made.tokens) + WINDOW * GRAM
            grams = windows(Reader(engine, slots), made)
            save(file, made._asdict() | {"grams": grams})


# ------------------------------------------------------------------------------------------ corpus


def sort_suffixes(corpus: np.ndarray) -> np.ndarray:
    """Return the places of a corpus in the order of their next SORTED tokens, by doubling."""
    size = len(corpus)
    rank = np.unique(corpus, return_inverse=True)[1].astype(np.int64) + 1
    width = 1
    while width < SORTED:
        behind = np.zeros(size, np.int64)  # past the end: before every token
        behind[:-width] = rank[width:]
        rank = np.unique(rank * (size + 2) + behind, return_inverse=True)[1] + 1
        width *= 2
    return np.argsort(rank, kind="stable").astype(np.int32)


def write_corpus(config: RecordConfig) -> None:
    """Encode texts and sort their suffixes. Writes: the corpus."""
    engine = engine_of(config)
    parts = []
    for name in config.texts.split(","):
        parts.append([*engine.tokenizer.encode(Path(name).read_text(), bos=False), -1])
    corpus = np.concatenate(parts).astype(np.int32)
    save(Path(config.corpus), {"corpus": corpus, "order": sort_suffixes(corpus)})
    print(f"{len(corpus)} tokens")


def main() -> None:
    """Run the command line."""
    config = parse(RecordConfig, "record_answers.py", __doc__)
    with one_line_errors("record_answers.py"):
        config.check()
        if config.corpus:
            write_corpus(config)
        elif config.windows:
            add_windows(config)
        else:
            record(config)


if __name__ == "__main__":
    main()
