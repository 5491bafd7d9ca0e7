"""Generate text with a target model and a drafter, by speculative decoding.

    python generate.py --prompt "Why is the sky blue?"

From Python:
    engine = load(checkpoint="checkpoints/demo")
    result = generate(engine, ["def f():"])  # .text, .tokens, .finish_reason, .stats
    for piece in stream(engine, "def f():"): print(piece, end="")

`load` reads the target, the drafter and the tokenizer, and warms the steps. `generate` decodes any
number of prompts, `batch_size` sequences at a time. `stream` yields text as it is decided.
The cycle is in decode.py, its loop in session.py, the options are in options.py.
"""

from __future__ import annotations

import gc
import os
import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while torch is imported
    gc.disable()  # a collection would visit torch's 180,000 objects, which stay

import json
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cli.io import StatusLine, log_note, write_text
from cli.parsing import one_line_errors, require
from cli.prompts import Conversation, as_conversation, check_ids, with_options

if TYPE_CHECKING:
    from cli.start import Command
    from hf.tokenizer import StreamDecoder

# The imports below take seconds: --help and mistakes are answered before. torchrun's ranks answer
# together (parallel/ranks.py).
COMMAND = None
if __name__ == "__main__" and os.environ.get("WORLD_SIZE", "1") == "1":
    from cli.start import read_command, with_text

    COMMAND = with_text(read_command())

import torch

from decode import Engine
from load import load, undrafted
from parallel import ranks
from runtime import replace_fields
from session import Session
from stats import Stats, environment, share_of_equal, stats_line, summary


class Turn(NamedTuple):
    """One decoded turn."""

    index: tuple[int, int, int]  # (prompt, sample, turn)
    prompt: list[int]
    new: list[int]
    decoder: StreamDecoder | None = None  # looks for stop strings; None: there are none
    fault: str = ""  # of its guide, where that allows nothing


@dataclass
class Result:
    """The decoded turns, in the order of prompts, samples and turns; `stats` of the whole run."""

    index: list[tuple[int, int, int]]  # (prompt, sample, turn)
    tokens: list[list[int]]  # new tokens only, the one that ended them included
    text: list[str]
    finish_reason: list[str]  # "stop", "length", "context", or "grammar", which allowed nothing
    prompt_tokens: list[int]
    stats: dict[str, Any]
    trace: list[dict]


def ignore(_: list) -> None:
    """Do nothing. The default of the callbacks `on_tokens` and `on_finished`."""


# ----------------------------------------------------------------------------------------- generate


def need_tokenizer(engine: Engine) -> None:
    """Check that there is a tokenizer. Raises: ValueError that names the missing file."""
    if engine.tokenizer is None:
        from hf.tokenizer import Tokenizer

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
    return engine.tokenizer.encode(text + turns[-1], bos=True)


def first_ids(engine: Engine, conversation: Conversation) -> list[int]:
    """Return the token ids of the first turn.

    Raises: ValueError for a prompt that cannot be decoded.
    """
    ids = conversation
    if conversation and not isinstance(conversation[0], int):
        ids = encode(engine, conversation[:1], [])
    return check_ids(ids, engine.target.config, engine.context)


def with_messages(engine: Engine, prompts: list) -> list:
    """Return prompts with the token ids of those that are messages, {"role": ..., "content": ...}.

    A list of messages alone is one prompt.
    Raises: ValueError without a chat template, and for messages that it has no place for.
    """
    if prompts and all(isinstance(prompt, dict) for prompt in prompts):
        prompts = [prompts]
    found = []
    for prompt in prompts:
        of_messages = isinstance(prompt, (list, tuple)) and len(prompt) > 0
        if of_messages and all(isinstance(each, dict) for each in prompt):
            fault = "messages need a chat template; load with chat=NAME, or give texts"
            require(engine.template is not None, fault)
            prompt = engine.template.encode_messages(engine.tokenizer, list(prompt))
        found.append(prompt)
    return found


class Batch:
    """Conversations to decode, and their turns. Each takes a free sequence of a session in turn.

    A stream is a (prompt, sample), the key of a conversation and of its noise.
    """

    def __init__(self, engine: Engine, prompts: list, draws: list = (), guides: list = ()):
        """Encode and check all first turns before decoding starts, so that no result is lost.

        draws: the `Sampling` and the seed of each prompt; default: the engine's
        guides: masks of each prompt's answers (`Session.admit`), None for the engine's
        """
        self.engine = engine
        config = engine.config
        self.draws = draws or [(config.sampling, config.seed)] * len(prompts)
        self.guides = guides or [None] * len(prompts)
        if config.stop:
            need_tokenizer(engine)
        self.stats = Stats()
        self.entries: list[Turn] = []
        self.reading = ""  # how far prompts are read, for a person
        self.trace: list[dict] = []
        self.conversations = [as_conversation(prompt) for prompt in prompts]
        self.prompt_ids = [first_ids(engine, c) for c in self.conversations]
        samples = range(engine.config.num_samples)
        self.streams = [(prompt, sample) for prompt in range(len(prompts)) for sample in samples]
        size = engine.config.batch_size
        firsts = range(0, len(self.streams), size)
        self.groups = [self.streams[first : first + size] for first in firsts]

    def decode_all(
        self,
        streams: list[tuple[int, int]],
        on_tokens: Callable = ignore,
        on_finished: Callable = ignore,
    ) -> None:
        """Decode some of `streams`, in order. A finished conversation makes way for the next one.

        on_tokens: called after every step with the new tokens of each sequence, a list of lists
        on_finished: called with the turns of every finished conversation, a list of `Turn`
        """
        session = Session(self.engine)
        queue = iter(streams)
        finished: list[Turn] = []
        # the turns of each sequence's conversation
        running: list[list[Turn]] = [[] for _ in session.live]
        while True:
            for seq, turns in enumerate(running):
                if session.busy(seq) or self._next_turn(session, seq, turns):
                    continue
                if turns:
                    finished += turns
                    on_finished(turns)
                running[seq] = self._first_turn(session, seq, next(queue, None))
            if not any(running):
                break
            new = session.step()
            for seq, turns in enumerate(running):
                if new[seq]:
                    new[seq] = self._until_stop(session, seq, turns[-1], new[seq])
                    turns[-1].new.extend(new[seq])
                require(seq not in session.broken, session.broken.get(seq))
                if turns and seq in session.faults:
                    turns[-1] = replace_fields(turns[-1], fault=session.faults[seq])
            for line in session.trace:
                prompt, sample, _ = running[line["row"]][0].index
                self.trace.append(line | {"row": prompt * self.engine.config.num_samples + sample})
            session.trace.clear()
            self.reading = session.told_reading()
            on_tokens(new)
        self.entries += sorted(finished)
        self.stats.add(session.stats)

    def _first_turn(self, session: Session, seq: int, stream: tuple[int, int] | None) -> list[Turn]:
        """Admit the first turn of a conversation, if there is one. Returns: its turns."""
        if stream is None:
            return []
        ids = self.prompt_ids[stream[0]]
        session.configure(seq, *self.draws[stream[0]])
        session.admit(seq, ids, stream, guide=self.guides[stream[0]])
        return [Turn((*stream, 0), ids, [], self._decoder())]

    def _next_turn(self, session: Session, seq: int, turns: list[Turn]) -> bool:
        """Admit the next turn of a conversation. A turn that does not fit ends the conversation.

        Returns: whether there is a next turn. Writes: `turns`.
        """
        if not turns or turns[-1].fault:
            return False
        prompt, sample, number = turns[-1].index
        texts = self.conversations[prompt]
        if len(turns) == len(texts) or isinstance(texts[0], int):  # ids are a single turn
            return False
        answers = [text_of(self.engine, turn.new) for turn in turns]
        ids = encode(self.engine, texts[: len(turns) + 1], answers)
        if len(ids) >= self.engine.context:
            where = f"turn {number + 2} of prompt {prompt + 1}"
            limit = f"the context of {self.engine.context} tokens"
            log_note(f"{where} no longer fits {limit}")
            return False
        session.admit(seq, ids, guide=self.guides[prompt])
        turns.append(Turn((prompt, sample, number + 1), ids, [], self._decoder()))
        return True

    def _decoder(self) -> StreamDecoder | None:
        return answer_decoder(self.engine) if self.engine.config.stop else None

    def _until_stop(self, session: Session, seq: int, turn: Turn, new: list[int]) -> list[int]:
        """Return a turn's new tokens up to a stop string, which ends the turn."""
        for count, id in enumerate(new if turn.decoder else [], 1):
            turn.decoder.push([id])
            if turn.decoder.stopped:
                session.cut(seq, len(new) - count)
                return new[:count]
        return new

    def result(self) -> Result:
        """Return the turns decoded so far."""
        turns = [turn_fields(self.engine, turn) for turn in self.entries]
        return Result(
            index=[turn["index"] for turn in turns],
            tokens=[turn["tokens"] for turn in turns],
            text=[turn["text"] for turn in turns],
            finish_reason=[turn["finish_reason"] for turn in turns],
            prompt_tokens=[turn["prompt_tokens"] for turn in turns],
            stats=summary(self.engine, self.stats),
            trace=self.trace,
        )


def turn_fields(engine: Engine, turn: Turn) -> dict[str, Any]:
    """Return the fields of one turn, under the names of `Result`."""
    text, stopped = read_answer(engine, turn.new)
    reason = "stop" if stopped else engine.finish_reason(turn.new)
    return {
        "index": turn.index,
        "tokens": turn.new,
        "text": text,
        "finish_reason": "grammar" if turn.fault else reason,
        "prompt_tokens": len(turn.prompt),
    }


def answer_decoder(engine: Engine) -> StreamDecoder:
    """Return a decoder of an answer's tokens. A plain continuation keeps its leading space."""
    return engine.tokenizer.stream(engine.template is None, stops=engine.config.stop)


def read_answer(engine: Engine, ids: list[int]) -> tuple[str, bool]:
    """Return the text of new tokens, empty without a tokenizer; whether a stop string ended it."""
    if engine.tokenizer is None:
        return "", False
    decoder = answer_decoder(engine)
    return decoder.push(ids) + decoder.flush(), decoder.stopped


def text_of(engine: Engine, ids: list[int]) -> str:
    """Return the text of new tokens, as `read_answer`."""
    return read_answer(engine, ids)[0]


def generate(
    engine: Engine,
    prompts: list[str | Conversation],
    on_tokens: Callable = ignore,
    on_finished: Callable = ignore,
    grammar: Any = None,
    **options: Any,
) -> Result:
    """Decode prompts, `num_samples` times each, `batch_size` sequences at a time.

    A finished sequence makes way for the next one.
    prompts: texts, lists of turns, of messages or of token ids; or the messages of one prompt
    on_tokens, on_finished: callbacks, see `Batch.decode_all`
    grammar: a text in Lark or GBNF, or a JSON schema (a dict); a list gives each prompt its own
    options: `max_new_tokens`, `num_samples`, `stop` (a text or several), `temperature`, `top_k`,
        `top_p`, `min_p` or `seed`, where they differ from the engine's; of the last five, a list
        gives each prompt its own
    Raises: ValueError for a prompt, a value or a grammar that cannot be used.
    """
    if isinstance(prompts, str):
        raise ValueError("generate() takes a list of prompts; put a single text into one: [text]")
    prompts = with_messages(engine, prompts)
    config, draws = with_options(engine.config, options, len(prompts))
    guides = []
    if grammar is not None:
        from extras.grammar import compile_grammars

        guides = compile_grammars(engine, grammar, len(prompts))
    batch = Batch(replace(engine, config=config), prompts, draws, guides)
    batch.decode_all(batch.streams, on_tokens, on_finished)
    return batch.result()


def compare(drafted: Batch, on_finished: Callable = ignore) -> tuple[Result, dict[str, Any]]:
    """Decode every group of a batch without and with drafting, in turn, in this process.

    on_finished: callback for the drafted conversations, see `Batch.decode_all`
    Returns: the drafted result; `speedup`, `vanilla_tokens_per_s`, and `identical`, from
        `share_of_equal` (None with the residual rule).
    """
    engine = drafted.engine
    vanilla = Batch(undrafted(engine), drafted.conversations, drafted.draws, drafted.guides)
    for number, group in enumerate(drafted.groups):
        order = (vanilla, drafted) if number % 2 == 0 else (drafted, vanilla)
        for batch in order:
            batch.decode_all(group, on_finished=on_finished if batch is drafted else ignore)
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


def stream(engine: Engine, prompt: str | list, **options: Any) -> Iterator[str]:
    """Decode one prompt, a text, messages or token ids. Yield its text as it is decided.

    No piece ends within a character.
    options: those of `generate`, but for `num_samples`
    Raises: ValueError for a prompt that cannot be decoded, or a value out of its range.
    """
    prompt = with_messages(engine, [prompt])[0]
    if not isinstance(prompt, str) and not all(isinstance(i, int) for i in prompt):
        raise ValueError(
            "stream() takes one text or one list of token ids; use generate() for turns"
        )
    if "num_samples" in options:
        raise ValueError("stream() decodes one answer; use generate() for num_samples")
    config, draws = with_options(engine.config, options, 1)
    session = Session(replace(engine, config=config))
    session.configure(0, *draws[0])
    conversation = [prompt] if isinstance(prompt, str) else prompt
    yield from stream_text(session, first_ids(engine, conversation))


def stream_text(session: Session, ids: list[int]) -> Iterator[str]:
    """Decode the session's first sequence after `ids`. Yield its text as it is decided.

    Raises: ValueError without a tokenizer.
    """
    engine = session.engine
    need_tokenizer(engine)
    decoder = answer_decoder(engine)
    for new in session.decode_turn([ids]):
        for place, id in enumerate(new[0], 1):
            yield decoder.push([id])
            if decoder.stopped:
                session.cut(0, len(new[0]) - place)
                return
    yield decoder.flush()


def in_order(keys: Iterable[Any], take: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    """Return a function of (key, item) that passes the items to `take` in the order of `keys`.

    An item is held back until the items of all keys before it have come.
    """
    queue = deque(keys)
    ready = {}

    def put(key: Any, item: Any) -> None:
        ready[key] = item
        while queue and queue[0] in ready:
            take(ready.pop(queue.popleft()))

    return put


# --------------------------------------------------------------------------------------------- main


def main_loop(engine: Engine, prompts: list[Conversation]) -> None:
    """Decode all conversations, print each when it is finished, and write the files."""
    config = engine.config
    batch = Batch(engine, prompts)
    streams = batch.streams
    results = None
    if config.results:
        from cli.results import Results

        results = Results(engine, prompts)
        streams = [stream for stream in streams if stream not in results.done]
    quiet = "-" in (config.json, config.trace, config.profile)
    live = bool(streams) and not quiet and engine.tokenizer is not None and is_one_turn(batch)
    if live:  # it is printed as it is decoded
        decoder = answer_decoder(engine)
    separators = chain([""], repeat("\n"))  # a blank line between conversations
    titled = sys.stdout.isatty() and len(streams) > 1
    status = StatusLine()
    count = Counter()  # of tokens and of finished conversations

    def print_texts(texts: list[str]) -> None:
        status.show("")
        print(next(separators) + "\n\n".join(texts), flush=True)

    show = in_order(streams, print_texts)

    def on_tokens(new: list[list[int]]) -> None:
        count["tokens"] += sum(map(len, new))
        done = f"{count['finished']} of {len(streams)} answers, {count['tokens']} tokens"
        status.show(batch.reading if live else f"[{done}] {batch.reading}".rstrip())
        if live:
            print(decoder.push(new[0]), end="", flush=True)

    def on_finished(turns: list[Turn]) -> None:
        count["finished"] += 1
        decoded = [turn_fields(engine, turn) for turn in turns]
        if results is not None:
            results.add(decoded)
        if not quiet and not live:
            field = "text" if engine.tokenizer else "tokens"
            title = [f"[prompt {turns[0].index[0] + 1}]"] if titled else []
            show(turns[0].index[:2], title + [str(turn[field]) for turn in decoded])

    profile = torch.profiler.profile() if config.profile else nullcontext()
    with status, profile as profiler:
        if config.compare:
            result, outcome = compare(batch, on_finished)
            result.stats |= outcome
        else:
            batch.decode_all(streams, on_tokens, on_finished)
            result = batch.result()
    if live:
        print(decoder.flush())
    line = stats_line(result.stats, config.verbose, told_cuts(engine, result))
    print(line, file=sys.stderr if quiet else sys.stdout)
    write_files(engine, result, profiler)
    for turn in batch.entries:
        require(not turn.fault, f"prompt {turn.index[0] + 1}: {turn.fault}")  # nothing is lost


def is_one_turn(batch: Batch) -> bool:
    """Return whether a run is one answer to one turn, decoded once."""
    if len(batch.streams) > 1 or batch.engine.config.compare:
        return False
    return isinstance(batch.conversations[0][0], int) or len(batch.conversations[0]) == 1


def told_cuts(engine: Engine, result: Result) -> str:
    """Describe the answers that were cut; "" where all ended by themselves."""
    parts = []
    for reason, count in Counter(result.finish_reason).items():
        cut = engine.told_cut(reason)
        of_all = f"{count} of {len(result.text)} answers " if len(result.text) > 1 else ""
        if cut:
            parts.append(of_all + cut)
    return ", ".join(parts)


def write_files(engine: Engine, result: Result, profiler: Any) -> None:
    """Write the result, and behind it the profile and the trace, where there is a file for them."""
    config = engine.config
    if config.json:
        document = asdict(result)
        del document["trace"]
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
    """Run the command line. command: the result of `read_command`, where it is there already"""
    from cli.start import read_command

    config, prompts, text, to_end = command or read_command(argv, ranks.check)
    with one_line_errors("generate.py"):
        engine = load(ranks.init_ranks(config, prompts), text)
        if to_end and engine.template is not None:
            engine = replace(engine, config=replace(engine.config, max_new_tokens=engine.context))
        if not config.interactive:
            return main_loop(engine, prompts)
        from extras.repl import chat

        chat(engine, encode)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # later collections, and those at the end, leave the imports' objects out
    gc.enable()
    try:
        with ranks.report_from_rank_0("generate.py"):
            main(command=COMMAND)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
