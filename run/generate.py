"""Generate text with a target model and a drafter, by speculative decoding.

    python generate.py --prompt "Why is the sky blue?"

`Batch` decodes any number of prompts, `batch_size` sequences at a time, and gives their `Answers`;
`Screen` prints them. The library for Python is in run/library.py, the cycle in decode.py, its loop
in run/session.py; requests are in run/scheduler.py, the options in run/options.py.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch

from files.io import StatusLine, is_terminal, write_text
from files.rank import of_ranks
from files.tokenizer import Tokenizer
from options import load_part, log_note, require
from run.engine import Engine
from run.load import load, without_draft
from run.parsing import one_line_errors
from run.prompts import (
    Conversation,
    PromptRow,
    as_conversation,
    check_ids,
)
from run.scheduler import Piece, Request, Scheduler, truncation_note
from run.start import Command, read_command
from run.stats import Stats, environment, share_of_equal, stats_line, summary, told


@dataclass(frozen=True)
class Answer:
    """A decoded turn."""

    text: str
    tokens: list[int]  # new tokens only, the one that ended them included
    finish_reason: str  # "stop", "length", "context", or "grammar", which allowed nothing
    prompt_tokens: int
    index: tuple[int, int, int]  # (prompt, sample, turn)
    stats: dict[str, Any]  # of the call, up to the end of this answer
    # of each token, by `drafts.logprobs`, where they were asked for
    logprobs: list[Any] | None = None


class Answers(list[Answer]):
    """The decoded turns, in the order of prompts, samples and turns; a field of all is a list.

    stats: of the whole call; trace: a line of each cycle and sequence
    """

    def __init__(self, answers: list[Answer], stats: dict[str, Any], trace: list[dict]):
        super().__init__(answers)
        self.stats = stats
        self.trace = trace

    @property
    def text(self) -> list[str]:
        return [answer.text for answer in self]

    @property
    def tokens(self) -> list[list[int]]:
        return [answer.tokens for answer in self]

    @property
    def finish_reason(self) -> list[str]:
        return [answer.finish_reason for answer in self]

    @property
    def prompt_tokens(self) -> list[int]:
        return [answer.prompt_tokens for answer in self]

    @property
    def index(self) -> list[tuple[int, int, int]]:
        return [answer.index for answer in self]


# ----------------------------------------------------------------------------------------- generate


def need_tokenizer(engine: Engine) -> None:
    """Check that there is a tokenizer. Raises: ValueError that names the missing file."""
    if engine.tokenizer is None:
        Tokenizer.load(Path(engine.config.checkpoint))


def encode(engine: Engine, turns: list[str], answers: list[str]) -> list[int]:
    """Return the token ids of a conversation whose last turn waits for its answer.

    Raises: ValueError without a tokenizer.
    """
    need_tokenizer(engine)
    if engine.template is not None:
        return engine.template.encode(engine.tokenizer, turns, answers)
    text = ""
    for turn, answer in zip(turns, answers):
        text += turn + answer
    return engine.tokenizer.encode(text + turns[-1], bos=True, special=True)


def first_ids(engine: Engine, conversation: Conversation) -> list[int]:
    """Return the token ids of the first turn.

    Raises: ValueError for a prompt that cannot be decoded.
    """
    ids = conversation
    if conversation and not isinstance(conversation[0], int):
        ids = encode(engine, conversation[:1], [])
    return check_ids(ids, engine.target.config, engine.context)


def nothing(_: list) -> None:
    """Do nothing. The default of callbacks."""


class Batch:
    """Conversations to decode, and their turns.

    A stream is a (prompt, sample), the key of a conversation and of its noise.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: list,
        draws: list = (),
        guides: list = (),
        draft_limit: float = inf,
        likeliest: int | None = None,
    ):
        """Encode and check all first turns before decoding starts, so that no result is lost.

        draws: the `Sampling` and the seed of each prompt; default: the engine's
        guides: masks of each prompt's answers (`Request.guide`), None for the engine's
        draft_limit: drafted tokens of a cycle, of all requests
        likeliest: tokens beside the log-probability of each token; None: no log-probabilities
        """
        self.engine = engine
        self.draft_limit = draft_limit
        self.logprobs: Any = None
        if likeliest is not None:
            self.logprobs = load_part("extension", "logprobs")(engine.target)
        self.likeliest = likeliest
        self.scored: dict[Request, list] = {}  # log-probabilities of the tokens so far
        config = engine.config
        self.draws = draws or [(config.sampling, config.seed)] * len(prompts)
        self.guides = guides or [None] * len(prompts)
        if config.stop:
            need_tokenizer(engine)
        self.stats = Stats()
        self.entries: list[Request] = []  # the decoded turns
        self.reading = ""  # how far prompts are read, for a person
        self.trace: list[dict] = []
        self.conversations = [as_conversation(prompt) for prompt in prompts]
        self.prompt_ids = [first_ids(engine, c) for c in self.conversations]
        samples = range(config.num_samples)
        self.streams = [(prompt, sample) for prompt in range(len(prompts)) for sample in samples]
        firsts = range(0, len(self.streams), config.batch_size)
        self.groups = [self.streams[first : first + config.batch_size] for first in firsts]

    def decode_all(
        self,
        streams: list[tuple[int, int]],
        on_pieces: Callable[[list[Piece]], None] = nothing,
        on_finished: Callable[[list[Request]], None] = nothing,
    ) -> None:
        """Decode some of `streams`, as `steps` does.

        on_pieces: called after every step
        on_finished: called with the turns of every finished conversation
        """
        for pieces in self.steps(streams, on_finished):
            on_pieces(pieces)

    def steps(
        self,
        streams: list[tuple[int, int]],
        on_finished: Callable[[list[Request]], None] = nothing,
    ) -> Iterator[list[Piece]]:
        """Decode some of `streams`, in order. A finished conversation makes way for the next one.

        Yields: what each step brings.
        Raises: ValueError where numbers are not finite.
        """
        turns: dict[tuple[int, int], list[Request]] = {stream: [] for stream in streams}
        firsts = [
            self._turn((*stream, 0), self.prompt_ids[stream[0]], noise_id=stream)
            for stream in streams
        ]
        with closing(Scheduler(self.engine, self._watch)) as scheduler:
            if self.logprobs is not None:
                scheduler.session.observers += [self.logprobs]
            for pieces in scheduler.run(firsts):
                self.reading = scheduler.session.prefill_progress()
                self._take_trace(scheduler.session.trace, pieces)
                for piece in pieces if self.logprobs else ():
                    scored = self.logprobs.take(piece.request.place)[: len(piece.tokens)]
                    self.scored.setdefault(piece.request, []).extend(scored)
                ended = [piece.request for piece in pieces if piece.request.reason]
                if ended:
                    self.stats.add(scheduler.take_stats())
                yield pieces
                for turn in ended:
                    require(turn.reason != "nan", turn.fault)
                    conversation = turns[turn.index[:2]]
                    conversation.append(turn)
                    following = self._next_turn(conversation)
                    if following:
                        scheduler.submit(following)
                    else:
                        on_finished(conversation)
        self.entries += [turn for stream in sorted(turns) for turn in turns[stream]]

    def _watch(self, request: Request) -> None:
        """Ask for the log-probabilities of a request that has its place."""
        if self.logprobs is not None:
            self.logprobs.want(request.place, self.likeliest)

    def _turn(self, index: tuple[int, int, int], ids: list[int], **fields: Any) -> Request:
        sampling, seed = self.draws[index[0]]
        own = {"index": index, "sampling": sampling, "seed": seed, "guide": self.guides[index[0]]}
        return Request.of(self.engine, ids, draft_limit=self.draft_limit, **own | fields)

    def _next_turn(self, turns: list[Request]) -> Request | None:
        """Return the turn that follows; None at the end of a conversation.

        A turn that does not fit ends it, and so does a turn whose guide allowed nothing.
        """
        last = turns[-1]
        prompt, sample, number = last.index
        texts = self.conversations[prompt]
        ended = len(turns) == len(texts) or isinstance(texts[0], int)  # ids are a single turn
        if ended or last.fault:
            return None
        ids = encode(self.engine, texts[: len(turns) + 1], [turn.text for turn in turns])
        if len(ids) >= self.engine.context:
            where = f"turn {number + 2} of prompt {prompt + 1}"
            limit = f"the context of {self.engine.context} tokens"
            log_note(f"{where} no longer fits {limit}")
            return None
        return self._turn((prompt, sample, number + 1), ids, place=last.place, noise_id=None)

    def _take_trace(self, lines: list[dict[str, Any]], pieces: list[Piece]) -> None:
        """Move the lines of a step to the trace, each with the row of its conversation."""
        index_of = {piece.request.place: piece.request.index for piece in pieces}
        for line in lines:
            prompt, sample, _ = index_of[line["row"]]
            self.trace.append(line | {"row": prompt * self.engine.config.num_samples + sample})
        lines.clear()

    def answer(self, turn: Request, stats: dict[str, Any] | None = None) -> Answer:
        """Return a turn that has ended. stats: default: those up to here"""
        stats = stats or summary(self.engine, self.stats)
        facts = (turn.text, turn.tokens, turn.reason, len(turn.prompt), turn.index, stats)
        return Answer(*facts, self.scored.get(turn))

    def result(self) -> Answers:
        """Return the turns decoded so far."""
        stats = summary(self.engine, self.stats)
        return Answers([self.answer(turn, stats) for turn in self.entries], stats, self.trace)


def text_of(engine: Engine, ids: list[int]) -> str:
    """Return the text of an answer's tokens, whatever stop strings are in it."""
    return engine.tokenizer.decode(ids, continuation=engine.template is None)


def compare(drafted: Batch, on_finished: Callable = nothing) -> tuple[Answers, dict[str, Any]]:
    """Decode every group of a batch without and with drafting, in turn, in this process.

    on_finished: callback for the drafted conversations, see `Batch.decode_all`
    Returns: the drafted result; `speedup`, `vanilla_tokens_per_s`, and `identical`, from
        `share_of_equal` (None with the residual rule).
    """
    engine = drafted.engine
    vanilla = Batch(without_draft(engine), drafted.conversations, drafted.draws, drafted.guides)
    for number, group in enumerate(drafted.groups):
        order = (vanilla, drafted) if number % 2 == 0 else (drafted, vanilla)
        for batch in order:
            batch.decode_all(group, on_finished=on_finished if batch is drafted else nothing)
    expected = vanilla.result()
    result = drafted.result()
    rate = expected.stats["tokens_per_s"]
    speedup = 0.0
    if rate:
        speedup = result.stats["tokens_per_s"] / rate
    identical = None  # the residual rule draws other tokens from the same distribution
    if engine.config.accept == "exact":
        identical = share_of_equal(expected, result)
    return result, {"speedup": speedup, "identical": identical, "vanilla_tokens_per_s": rate}


# --------------------------------------------------------------------------------------------- main


def print_piece(text: str) -> None:
    """Print a piece of a text."""
    print(text, end="", flush=True)


class Screen:
    """Prints a run: a single answer as it comes, several when they are finished, in order."""

    def __init__(self, batch: Batch, prompts: list[Conversation]):
        engine = batch.engine
        config = engine.config
        self.batch = batch
        self.prompts = prompts
        self.has_text = engine.tokenizer is not None
        self.several = len(batch.streams) > 1 or has_turns(batch.conversations[0])
        self.quiet = "-" in (config.json, config.trace, config.profile)
        # whether the answer is printed as it comes
        self.live = self.has_text and not (self.quiet or self.several or config.compare)
        self.status = StatusLine()
        self.show = print_piece
        if is_terminal(sys.stdout):
            self.show = load_part("command", "printer")(sys.stdout)
        self.shown = engine.template.on_terminal() if engine.template else None
        self.tokens = 0
        self.finished: dict[tuple[int, int], list[Request]] = {}
        self.waiting = deque(batch.streams)  # to be printed

    def on_pieces(self, pieces: list[Piece]) -> None:
        """Show how far the run is, or the answer."""
        reading = self.batch.reading
        self.tokens += sum(len(piece.tokens) for piece in pieces)
        if self.live:
            self.status.show(reading)
            for piece in pieces:
                text = piece.text
                if self.shown is not None:
                    thought, answer, _ = self.shown.push(text, piece.request.reason != "")
                    text = thought + answer
                self.show(text)
            return
        done = f"{len(self.finished)} of {len(self.batch.streams)} answers, {self.tokens} tokens"
        self.status.show(f"[{done}] {reading}".rstrip())

    def on_finished(self, turns: list[Request]) -> None:
        """Print the conversations that are finished, up to the first one that is not."""
        self.finished[turns[0].index[:2]] = turns
        if self.quiet or self.live:
            return
        self.status.show("")
        while self.waiting and self.waiting[0] in self.finished:
            if len(self.waiting) < len(self.batch.streams):
                print()  # between answers
            answers = self.finished[self.waiting.popleft()]
            print("\n\n".join(map(self._titled, answers)), flush=True)

    def _titled(self, turn: Request) -> str:
        """Return a turn's text. One of several has a title above it.

        That is the id of the prompt's row, or its number, then the sample and the turn.
        """
        text = turn.text if self.has_text else str(turn.tokens)
        if not self.several:
            return text
        prompt, sample, number = turn.index
        conversation = self.prompts[prompt]
        parts = [f"prompt {prompt + 1}"]
        if isinstance(conversation, PromptRow) and conversation.keys:
            parts = [str(next(iter(conversation.keys.values())))]
        if self.batch.engine.config.num_samples > 1:
            parts.append(f"sample {sample + 1}")
        if has_turns(conversation):
            parts.append(f"turn {number + 1}")
        return f"== {', '.join(parts)} ==\n{text}"


def has_turns(conversation: Conversation) -> bool:
    """Return whether a conversation has several turns; ids are one turn."""
    return len(conversation) > 1 and isinstance(conversation[0], str)


def main_loop(engine: Engine, prompts: list[Conversation]) -> None:
    """Decode all conversations, print each when it is finished, and write the files."""
    config = engine.config
    if config.prompt is None and not (config.prompt_file or config.prompt_ids):
        log_note(f"the prompt is {prompts[0][0]!r}; --prompt gives another", logging.INFO)
    batch = Batch(engine, prompts)
    screen = Screen(batch, prompts)
    profile = torch.profiler.profile() if config.profile else nullcontext()
    with screen.status, profile as profiler:
        if config.compare:
            result, outcome = compare(batch, screen.on_finished)
            result.stats |= outcome
        else:
            batch.decode_all(batch.streams, screen.on_pieces, screen.on_finished)
            result = batch.result()
    if screen.live:
        print()
    cut = truncation_notes(engine, result)
    if config.compare:  # what a figure needs to be quoted
        made_on = {"model": Path(config.checkpoint).name} | environment(engine.device.type)
        print(told(made_on), file=sys.stderr)
    print(stats_line(result.stats, cut, " (--compare measures it)"), file=sys.stderr)
    write_files(engine, result, profiler)
    for turn in batch.entries:
        require(not turn.fault, f"prompt {turn.index[0] + 1}: {turn.fault}")  # nothing is lost


def truncation_notes(engine: Engine, result: Answers) -> str:
    """Describe the answers that were cut; "" where all ended by themselves."""
    parts = []
    for reason, count in Counter(result.finish_reason).items():
        cut = truncation_note(engine, reason)
        of_all = f"{count} of {len(result.text)} answers " if len(result.text) > 1 else ""
        if cut:
            parts.append(of_all + cut)
    return ", ".join(parts)


def write_files(engine: Engine, result: Answers, profiler: Any) -> None:
    """Write the result, and behind it the profile and the trace, where there is a file for them."""
    config = engine.config
    if config.json:
        names = ("index", "tokens", "text", "finish_reason", "prompt_tokens", "stats")
        document: dict[str, Any] = {name: getattr(result, name) for name in names}
        document["config"] = asdict(config) | engine.resolved  # the values behind the defaults
        document["environment"] = environment(engine.device.type)
        write_text(config.json, json.dumps(document))
    if config.profile:
        with tempfile.TemporaryDirectory() as folder:
            profiler.export_chrome_trace(f"{folder}/trace.json")
            write_text(config.profile, Path(folder, "trace.json").read_text())
    if config.trace:
        write_text(config.trace, "\n".join(json.dumps(line) for line in result.trace))


def main(argv: list[str] | None = None, command: Command | None = None) -> None:
    """Run the command line in this process, which may be one of torchrun's ranks.

    command: the result of `read_command`, where it is there already
    """
    with one_line_errors("generate.py"):
        report = of_ranks("report_from_rank_0", nullcontext)
    with report("generate.py"):
        config, prompts, text, to_end, keys = command or read_command(argv)
        with one_line_errors("generate.py"):
            config = of_ranks("init_ranks", lambda config, prompts: config)(config, prompts)
            # prompts of a file have the options of the command; a chat may set others
            engine = load(config, text, shapes=config.interactive)
            if to_end and engine.template is not None:
                own = replace(engine.config, max_new_tokens=engine.context)
                engine = replace(engine, config=own)
            if not config.interactive:
                return main_loop(engine, prompts)
            try:
                load_part("command", "chat")(engine, encode, keys)
            finally:
                if keys is not None:
                    keys.close()
