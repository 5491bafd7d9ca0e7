"""Let the target write answers to train a draft head with, and a third of the prompts.

1. Prompts are those of prompts.py, and texts that the model itself writes behind the opening of a
   user turn, at T = 1.
2. The further turns of a given prompt follow, while answers are good and the text fits. Answers
   that loop, or share 13 words in a row with an evaluation prompt, are dropped, and counted.
3. Half of the prompts, chosen by hash, are answered greedily, the others at T = 1.
4. The scheduler decodes them side by side: a free place takes the next prompt of the source that
   is furthest behind, so any part of the file, from its start, is a mixture by equal tokens.
5. Finished answers are lines of `answers.jsonl`. Noise depends on the seed and the prompt alone. A
   killed run goes on with the prompts that have no line.
6. With `--answers_from` servers decode instead (answer_servers.py); the rest is the same.
Sources: Magpie (arXiv 2406.08464); EAGLE (arXiv 2401.15077), table 6, compares with a fixed set.
Not here: the command (scripts/train_head.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm

from files.chat import PROBE
from files.checkpoint import saved_quantization
from files.config import read_config, read_raw
from files.io import is_gguf
from files.texts import read_text_files
from run.engine import Engine
from run.generate import text_of
from run.load import load
from run.options import ROOT, GenerateConfig
from run.scheduler import Request, Scheduler
from run.stats import LOOP, repeated
from scripts.bench.common import Log
from scripts.train import prompts
from scripts.train.answer_servers import WRONG, AnswerServers
from scripts.train.data import hashed
from scripts.train.prompts import GIVEN, OWN, SHARES, Filter
from scripts.train.train_options import HeadConfig

EVAL = ROOT / "data/eval"  # prompts to keep clear of
ANSWER_TOKENS = 400  # longest answer; one that is cut is marked so
PROMPT_TOKENS = 600  # longest prompt, template and earlier turns included
QUANT = "int8"  # of 16-bit weights; quantized ones stay as they are
SEED = 0  # of the sampling noise and of the order
OWN_TOKENS = 128  # longest prompt that the model writes; a longer one is dropped
LOOP_TOKENS = 64  # of the end of an answer, said once more: it is cut
LOOKS = 32  # tokens between two looks for that
TOKENS_OF_A_WORD = 2  # of long texts
MOST_WRONG = 20  # wrong answers of servers in a row, which end the run


def decoding(config: HeadConfig) -> GenerateConfig:
    """Return the options of decoding without a draft."""
    path = Path(config.checkpoint)
    is_quantized = is_gguf(path) or saved_quantization(read_raw(path), path) is not None
    return GenerateConfig(
        checkpoint=config.checkpoint,
        draft="none",
        chat=config.chat,
        quant="none" if is_quantized else QUANT,
        device=config.device,
        temperature=1.0,
        batch_size=config.answers,
        context=PROMPT_TOKENS + ANSWER_TOKENS,
    )


def text_engine(config: HeadConfig) -> Engine:
    """Return an engine of a target's texts alone, whose weights are on servers."""
    path = Path(config.checkpoint)
    options = decoding(config)
    tokenizer, template = read_text_files(path, options)
    ends = (*read_config(path).eos_ids, *template.stop_ids(tokenizer))
    parts = {"config": options, "tokenizer": tokenizer, "template": template}
    return Engine(None, (), options.context, ends, **parts)


def shares(given: float) -> dict[str, float]:
    """Return the tokens of each source's answers, relative to the others'.

    given: the share of the given prompts, which the others leave; 0: by SHARES
    """
    if not given:
        return SHARES
    others = sum(SHARES.values()) - SHARES[GIVEN]
    rest = {source: (1 - given) * share / others for source, share in SHARES.items()}
    return rest | {GIVEN: given}


@dataclass(eq=False)
class PendingDialogue:
    """A prompt of one or more turns, and its answers so far."""

    source: str
    turns: list[str]  # none yet where the model is to write the first
    number: int = 0  # of a prompt of the model's own
    answers: list[str] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)  # of all answers
    ended: bool = True  # the last answer is complete

    @property
    def temperature(self) -> float:
        """The temperature of its answers: 0 for half of all, by hash."""
        return float(hashed(f"greedy {self.turns[0]}") >= 2**31)

    @property
    def asked(self) -> list[str]:
        """The turns up to the one that waits for an answer."""
        return self.turns[: len(self.answers) + 1]

    def row(self) -> dict:
        """Return the line of the file."""
        answered = self.turns[: len(self.answers) or 1]
        return asdict(self) | {"turns": answered, "temperature": self.temperature}


class Run:
    """The waiting prompts, the answers that are being decoded, their counts, and the file."""

    def __init__(self, config: HeadConfig, given: dict[str, list[list[str]]], filter: Filter):
        """Read the file of an earlier run, and load the target. Raises: ValueError.

        given: the turns of the prompts, by source
        """
        self.config = config
        self.filter = filter
        self.log = Log(str(Path(config.out, "answers", "answers.jsonl")), "--out")
        self.shares = shares(config.given)
        if config.answers_from:
            self.engine = text_engine(config)
            self.scheduler = AnswerServers(config.answers_from, config.answer_model, self.engine)
        else:
            self.engine = load(decoding(config))
            self.scheduler = Scheduler(self.engine)
        self.wrong = 0  # of a server's answers, the last ones in a row
        self.decoding: dict[Request, PendingDialogue] = {}
        template = self.engine.template
        opening = template.render(list(PROBE[:1]), []).partition(PROBE[0])[0]
        self.opening = self.engine.tokenizer.encode(opening, bos=template.bos, special=True)
        self.tokens: Counter = Counter()  # answer tokens by source
        self.cut: Counter = Counter()  # answers that were cut, by source
        self.done: set[str] = set()  # first turns with a line
        self.attempts = 0  # prompts that the model has written
        self.misses = 0  # of those, the last ones in a row that were not used
        for row in self.log.rows:
            self._count(row)
            self.done.add(row["turns"][0])
            if row["source"] == OWN:
                self.filter.accepts(OWN, row["turns"], True)
                self.attempts = max(self.attempts, row["number"])
        self.waiting = {source: iter(self._mixed(texts)) for source, texts in given.items()}
        # sources with a further prompt
        self.left = [source for source, share in self.shares.items() if share]

    def _mixed(self, texts: list[list[str]]) -> list[list[str]]:
        """Return prompts in an order that depends on their texts and the seed alone."""
        return sorted(texts, key=lambda turns: hashed(f"order {SEED} {turns[0]}"))

    def _write(self, dialogue: PendingDialogue) -> None:
        """Write a finished dialogue. Writes: the file, the counts."""
        row = dialogue.row()
        self._count(row)
        self.log.add([row])

    def _count(self, row: dict) -> None:
        fate = "empty or like an evaluation prompt"
        if not row["answers"] and repeated(row["answer_ids"]) > LOOP:
            fate = "looping"
        if row["answers"]:
            fate = "used"
            self.tokens[row["source"]] += len(row["answer_ids"])
        self.filter.counts["answers", fate] += 1
        self.cut[row["source"]] += not row["ended"]

    def total(self) -> int:
        """Return the number of answer tokens so far, of unfinished answers too."""
        unfinished = sum(len(request.tokens) for request, d in self.decoding.items() if d.turns)
        return sum(self.tokens.values()) + unfinished

    def step(self) -> bool:
        """Fill the free places, and decode a step. Writes: the file.

        Returns: whether there was anything left to decode.
        """
        while self.left and len(self.decoding) < self.config.answers:
            self._start(self._furthest_behind())
        if not self.decoding:
            return False
        for request in [piece.request for piece in self.scheduler.step()]:
            is_cut = not request.reason and is_looping(request.tokens)
            if is_cut:
                self.scheduler.cancel(request)
            if is_cut or request.reason:
                self._take(request)
        return True

    def stop(self) -> None:
        """Take the unfinished answers as they are, cut. Writes: the file."""
        for request, dialogue in self.decoding.items():
            if request.tokens and dialogue.turns:
                self._add_answer(dialogue, request.tokens)
                self._write(dialogue)
        self.decoding.clear()
        self.scheduler.close()

    def lines(self) -> str:
        """Return the counts of every kind as text."""
        cut = ", ".join(f"{self.cut[source]} {source}" for source in SHARES)
        kinds = (*SHARES, "answers")
        return "\n".join([*map(self.filter.line, kinds), f"answers that were cut: {cut}"])

    # --------------------------------------------------------------------------- prompts

    def _furthest_behind(self) -> str:
        """Return the source whose prompt is next."""
        expected = Counter(dialogue.source for dialogue in self.decoding.values())

        def behind(source: str) -> float:
            coming = expected[source] * ANSWER_TOKENS / 2
            return (self.tokens[source] + coming) / self.shares[source]

        return min(self.left, key=behind)

    def _start(self, source: str) -> None:
        """Begin with the next prompt of a source. Writes: `left`, if there is none."""
        if source == OWN:
            self.attempts += 1
            self._ask(PendingDialogue(OWN, [], self.attempts))
            return
        for turns in self.waiting.get(source, ()):
            fits = len(self._encoded(turns[:1], [])) <= PROMPT_TOKENS
            if self.filter.accepts(source, turns, fits) and turns[0] not in self.done:
                self._ask(PendingDialogue(source, turns))
                return
        self.left.remove(source)

    def _encoded(self, turns: list[str], answers: list[str]) -> list[int]:
        return self.engine.template.encode(self.engine.tokenizer, turns, answers)

    # --------------------------------------------------------------------------- answers

    def _ask(self, dialogue: PendingDialogue) -> None:
        """Queue the next turn of a dialogue; of the model's own, first that it writes it."""
        sampling = self.engine.config.sampling
        if dialogue.turns:
            ids = self._encoded(dialogue.asked, dialogue.answers)
            noise_id = (hashed("\n".join(dialogue.asked)), 0)
            sampling = sampling._replace(temperature=dialogue.temperature)
            limit = ANSWER_TOKENS
        else:
            ids = self.opening
            noise_id = (dialogue.number, 1)
            limit = OWN_TOKENS
        request = Request(ids, sampling, SEED, limit, noise_id)
        self.decoding[request] = dialogue
        self.scheduler.submit(request)

    def _take(self, request: Request) -> None:
        """Take a finished text, and go on with its dialogue. Writes: the file."""
        dialogue = self.decoding.pop(request)
        self.wrong = self.wrong + 1 if request.reason == WRONG else 0
        if self.wrong:
            self._drop(request, dialogue)
        elif not dialogue.turns:
            self._take_prompt(request, dialogue)
        elif self._add_answer(dialogue, request.tokens):
            self._ask(dialogue)
        else:
            self._write(dialogue)

    def _drop(self, request: Request, dialogue: PendingDialogue) -> None:
        """Count a server's wrong answer; the turns before it are kept. Writes: the file.

        Raises: ValueError where there were only such for a while.
        """
        self.filter.counts["answers", request.fault] += 1
        if dialogue.answers:
            self._write(dialogue)
        if self.wrong == MOST_WRONG:
            self.scheduler.close()
            raise ValueError(
                f"--answers_from: {MOST_WRONG} answers in a row were wrong, the last one "
                f"{request.fault}; serve the model of --checkpoint"
            )

    def _take_prompt(self, request: Request, dialogue: PendingDialogue) -> None:
        """Take a prompt that the model wrote, and ask it. Writes: `left`, where none is good."""
        text = text_of(self.engine, request.tokens).strip()
        if self.filter.accepts(OWN, [text], self._has_ended(request.tokens)):
            self.misses = 0
            dialogue.turns = [text]
            self._ask(dialogue)
            return
        self.misses += 1
        if self.misses >= self.config.answers and OWN in self.left:
            self.left.remove(OWN)
            print(f"note: none of {self.misses} prompts that the model wrote was good", flush=True)

    def _has_ended(self, tokens: list[int]) -> bool:
        return bool(tokens) and tokens[-1] in self.engine.eos_ids

    def _add_answer(self, dialogue: PendingDialogue, new: list[int]) -> bool:
        """Add an answer to a dialogue if it is good. Returns: whether a further turn follows."""
        answer = text_of(self.engine, new)
        good = answer.strip() and repeated(new) <= LOOP and not self.filter.touches(answer)
        if dialogue.answers and not good:
            return False  # the dialogue is what came before
        dialogue.answer_ids += new
        dialogue.ended = self._has_ended(new)
        if not good:
            return False
        dialogue.answers.append(answer)
        if not dialogue.ended or len(dialogue.answers) == len(dialogue.turns):
            return False
        return len(self._encoded(dialogue.asked, dialogue.answers)) <= PROMPT_TOKENS


def is_looping(tokens: list[int]) -> bool:
    """Return whether the last LOOP_TOKENS tokens are the same a little earlier, now and then.

    A greedy loop has no end. The look is taken every LOOKS tokens.
    """
    if len(tokens) % LOOKS or len(tokens) < 2 * LOOP_TOKENS:
        return False
    end = tokens[-LOOP_TOKENS:]
    last = len(tokens) - LOOP_TOKENS  # where the end begins
    return any(tokens[i : i + LOOP_TOKENS] == end for i in range(last - LOOP_TOKENS, last))


def answer(config: HeadConfig, is_over: Callable[[int], bool]) -> Run:
    """Write answers until there are enough or no prompt is left. Writes: OUT/answers.

    is_over: of the number of answer tokens, asked before every step
    Raises: ValueError for files that cannot be read, and for prompts of which none can be used.
    """
    Path(config.out, "answers").mkdir(parents=True, exist_ok=True)
    given = prompts.sources(config.prompts, PROMPT_TOKENS // TOKENS_OF_A_WORD)
    run = Run(config, given, Filter.against(prompts.eval_texts(EVAL)))
    run._start(GIVEN)
    if not run.filter.counts[GIVEN, "used"]:
        raise ValueError(
            f"--prompts: nothing in {config.prompts} can be used ({run.filter.line(GIVEN)}; at "
            f"most {PROMPT_TOKENS} tokens); name another file"
        )
    with tqdm(initial=run.total(), unit="token", desc="answers", disable=None) as bar:
        while not is_over(run.total()) and run.step():
            bar.update(run.total() - bar.n)
    run.stop()
    print(run.lines(), flush=True)
    return run
