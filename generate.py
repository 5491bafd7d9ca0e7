"""Generate text with a LLaMA target and whatever drafts for it.

    python generate.py --compile --prompt "def read_lines(path):"

From Python:
    engine = load(checkpoint="checkpoints/demo", compile=True)
    result = generate(engine, ["def read_lines(path):"])          # .text, .tokens, .finish_reason, .stats
    for piece in stream(engine, "def read_lines(path):"): print(piece, end="")

`load` reads the target, the drafter and the tokenizer and warms the compiled steps; `generate` decodes any number of
prompts, `batch_size` at a time; `stream` yields text as it is decided. The loop itself is in decode.py, the
options are in config.py. `python generate.py --help` lists them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import eagle_draft  # noqa: F401  (these three enter their drafters in DRAFTERS)
import model_draft  # noqa: F401
import ngram_draft  # noqa: F401
from autosize import Autosizer
from capture import WARM_UPS
from config import DEMO, GenerateConfig, default_of, parse, pick_device, read_jsonl, run_or_fail
from decode import Engine, with_cycles
from drafters import DRAFTERS, RootOnly
from model import DTYPES, Transformer, read_json
from quantize import Quantization, saved_quantization
from session import Session
from stand_in import Shape, inflate_target
from stats import Stats
from tokenizer import Tokenizer, chat_template, has_tokenizer
from weights import load_model

DEMO_PROMPT = "def read_lines(path):"
REHEARSED = 200  # tokens behind which cycles are timed: attention has something to do
MAX_DEFAULT_CONTEXT = 4096  # tokens; models trained for 128k would otherwise fill the memory with cache

Watcher = Callable[[list[list[int]]], None]
Conversation = list[str] | list[int]  # turns of text, or the token ids of a single prompt


class Entry(NamedTuple):
    """One turn that was decoded."""

    index: tuple[int, int, int]  # (prompt, sample, turn)
    prompt: list[int]
    new: list[int]


@dataclass
class Result:
    """One entry per prompt, sample and turn, in this order; `stats` of the whole run."""

    index: list[tuple[int, int, int]]  # (prompt, sample, turn)
    tokens: list[list[int]]  # new tokens only, the one that ended them included
    text: list[str]
    finish_reason: list[str]  # "stop", "length" or "context"
    prompt_tokens: list[int]
    stats: dict[str, Any]
    trace: list[dict]


# -------------------------------------------------------------------------------------------------- load


def load(config: GenerateConfig | None = None, **options: Any) -> Engine:
    """Load everything that `config` names, and compile.

    options: fields of `GenerateConfig`, when no config is given
    Raises: ValueError for anything wrong with options or files.
    """
    config = config or GenerateConfig(**options)
    config.check()
    began = time.perf_counter()
    config = replace(config, device=pick_device(config.device))
    if config.device.startswith("cuda"):
        torch.cuda.set_device(config.device)
    path = Path(config.checkpoint)
    target = _load_target(config, path)
    held = target.config.quant
    if held is not None:  # the checkpoint holds codes; another group size is what --quant_draft asks for
        own = config.group_size == default_of("group_size")
        config = replace(config, quant=held.format, group_size=held.group_size if own else config.group_size)
    config = replace(config, dtype=str(target.embedding.weight.dtype).removeprefix("torch."))
    tokenizer = _load_tokenizer(config, path)
    template = chat_template(path, config.chat or None) if config.chat is not None else None
    stop_ids = template.stop_ids(tokenizer) if template else ()
    own_eos = tokenizer.eos_ids if tokenizer else ()
    context = config.context or min(target.config.max_context, MAX_DEFAULT_CONTEXT)
    if context > target.config.max_context:
        raise ValueError(f"--context {context} is beyond the model's {target.config.max_context} positions; lower it")
    config = _resolve_draft(config, path)
    engine = Engine(
        config, target, DRAFTERS[config.draft](target, config), context,
        eos_ids=tuple(dict.fromkeys((*(target.config.eos_ids or own_eos), *stop_ids))),
        tokenizer=tokenizer, template=template,
        load_s=time.perf_counter() - began,
    )  # fmt: skip
    return warm_up(with_cycles(engine))


def _load_target(config: GenerateConfig, path: Path) -> Transformer:
    dtype, files = DTYPES.get(config.dtype), None
    if config.inflate:
        files = inflate_target(path, Shape.parse(config.inflate), dtype, config.device, config.random_twin)
    quant = None if config.quant == "none" else Quantization(config.quant, config.group_size)
    return load_model(path, dtype, config.device, quant, files)


def _load_tokenizer(config: GenerateConfig, path: Path) -> Tokenizer | None:
    """The checkpoint's tokenizer; none is needed where only ids go in and out."""
    if not has_tokenizer(path):
        return Tokenizer.load(path) if config.chat is not None else None  # load says what is missing
    try:
        return Tokenizer.load(path)
    except ValueError as error:
        if config.prompt_ids is None:
            raise
        print(f"note: no text will be shown ({error})", file=sys.stderr)
        return None


def _resolve_draft(config: GenerateConfig, path: Path) -> GenerateConfig:
    """Fill in `draft` and `eagle`: a head next to the target is used unless told otherwise."""
    bundled = path.with_name(path.name + "-eagle")
    takes_head = config.draft in ("", "eagle", "eagle+ngram")
    eagle = config.eagle or (str(bundled) if bundled.is_dir() and takes_head else "")
    draft = config.draft or ("eagle" if eagle else "none")
    if draft.startswith("eagle") and not eagle:
        raise ValueError(f"--draft {draft} needs a head; name its directory with --eagle (there is no {bundled})")
    if draft == "none":
        config.check_undrafted()
    eagle = eagle if draft.startswith("eagle") else ""
    reads = eagle or config.draft_checkpoint  # what a draft loads
    quant = _draft_format(config, Path(reads)) if reads else "none"
    return replace(config, draft=draft, eagle=eagle, quant_draft=quant)


def _draft_format(config: GenerateConfig, path: Path) -> str:
    """What `--quant_draft` comes to: the format of the draft's files, or what is asked for, or as the target."""
    held = saved_quantization(read_json(path / "config.json"))
    if held is None:
        return config.quant_draft or config.quant
    if config.quant_draft not in ("", held.format):
        raise ValueError(f"{path} is quantized already ({held.format}); drop --quant_draft")
    return held.format


def warm_up(engine: Engine) -> Engine:
    """Run a few cycles, so that everything is compiled before the first prompt; fall back to eager aloud."""
    began = time.perf_counter()
    if engine.config.compile:
        try:
            torch.compile(_probe, fullgraph=True)(torch.ones(2, device=engine.config.device))
        except Exception as error:  # whatever a missing or broken compiler raises, it is told and not hidden
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:120]
            print(f"note: torch.compile does not work here ({reason}); running eagerly", file=sys.stderr)
            return warm_up(with_cycles(replace(engine, config=replace(engine.config, compile=False))))
    for _ in range(1 + WARM_UPS if engine.captured else 1):
        _rehearse(engine)
    engine = replace(engine, compile_s=time.perf_counter() - began if engine.config.compile else 0.0)
    if not engine.drafter.sized:
        return engine
    began, rounds = time.perf_counter(), []
    # as often as 2 s allow
    while not rounds or (len(rounds) < 9 and (time.perf_counter() - began) * (1 + 1 / len(rounds)) < 2):
        rounds.append(_rehearse(engine))
    costs = [statistics.median(times) for times in zip(*rounds)]
    return replace(engine, sizer=Autosizer([preset.shape for preset in engine.drafter.presets], costs))


def _rehearse(engine: Engine) -> list[float]:
    """Run some cycles of every preset. Returns: the time of one (s); the first two after a change do not count."""
    session, times = Session(engine, [(0, 0)]), []
    next(session.run([[0] * min(REHEARSED, engine.context - 1)]))
    for preset in range(len(engine.cycles)):
        times.append(statistics.mean([session.rehearse(preset) for _ in range(4)][2:]))
        session.catch_up()
    return times


def with_config(engine: Engine, config: GenerateConfig) -> Engine:
    """The loaded target under other options of drafting, sampling and batching, warmed up. The target is shared.

    config: checked, with the engine's checkpoint, device, dtype and context
    Raises: ValueError for a draft that does not fit.
    """
    if engine.config.quant != "none":  # as it was loaded
        config = replace(config, quant=engine.config.quant, group_size=engine.config.group_size)
    config = _resolve_draft(config, Path(config.checkpoint))
    drafter = DRAFTERS[config.draft](engine.target, config)
    return warm_up(with_cycles(replace(engine, config=config, drafter=drafter)))


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


# ---------------------------------------------------------------------------------------------- generate


def encode(engine: Engine, turns: list[str], answers: list[str]) -> list[int]:
    """Token ids of a conversation whose last turn waits for its answer. Raises: ValueError without a tokenizer."""
    if engine.tokenizer is None:
        Tokenizer.load(Path(engine.config.checkpoint))  # says what is missing
    if engine.template is not None:
        return engine.template.encode(engine.tokenizer, turns, answers)
    text = "".join(part for pair in zip(turns, answers) for part in pair) + turns[-1]
    return engine.tokenizer.encode(text, bos=True)


def check_prompt(engine: Engine, ids: list[int]) -> list[int]:
    """Raises: ValueError for a prompt that is empty, out of range or does not fit."""
    vocab = engine.target.config.vocab_size
    if not ids:
        raise ValueError("the prompt is empty; give it at least one token")
    bad = next((i for i in ids if not 0 <= i < vocab), None)
    if bad is not None:
        raise ValueError(f"token ids must be in 0..{vocab - 1}; the prompt has {bad}")
    if len(ids) >= engine.context:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, the context holds {engine.context} with at least one new token; "
            "shorten it or raise --context"
        )
    return ids


def first_ids(engine: Engine, conversation: Conversation) -> list[int]:
    """Token ids of the first turn."""
    if not conversation or isinstance(conversation[0], int):
        return conversation
    return encode(engine, conversation[:1], [])


class Collector:
    """Decodes conversations group by group and gathers what comes out."""

    def __init__(self, engine: Engine, prompts: list[str | Conversation]):
        self.engine, self.stats = engine, Stats()
        self.entries: list[Entry] = []
        self.trace: list[dict] = []
        self.conversations = [[p] if isinstance(p, str) else list(p) for p in prompts]
        for conversation in self.conversations:  # before anything is decoded, so that nothing is lost
            check_prompt(engine, first_ids(engine, conversation))
        samples, size = engine.config.num_samples, engine.config.batch_size
        streams = [(p, s) for p in range(len(prompts)) for s in range(samples)]
        self.groups = [streams[first : first + size] for first in range(0, len(streams), size)]

    def run(self, group: list[tuple[int, int]], watch: Watcher | None = None) -> None:
        """Decode one of `groups`. watch: told the new tokens of every row, cycle by cycle."""
        session = Session(self.engine, group)
        first = self.groups.index(group) * self.engine.config.batch_size
        self.entries += _run_group(session, group, self.conversations, watch)
        self.trace += [{**row, "row": first + row["row"]} for row in session.trace]
        self.stats.add(session.stats)

    def result(self) -> Result:
        """Everything so far."""
        engine = self.engine
        return Result(
            index=[e.index for e in self.entries],
            tokens=[e.new for e in self.entries],
            text=[text_of(engine, e.new) for e in self.entries],
            finish_reason=[finish_reason(engine, e.new) for e in self.entries],
            prompt_tokens=[len(e.prompt) for e in self.entries],
            stats=self.stats.summary(engine),
            trace=self.trace,
        )


def text_of(engine: Engine, ids: list[int]) -> str:
    """The text of new tokens; a plain continuation keeps its leading space."""
    return engine.tokenizer.decode(ids, continuation=engine.template is None) if engine.tokenizer else ""


def generate(engine: Engine, prompts: list[str | Conversation], watch: Watcher | None = None, **options: Any) -> Result:
    """Decode prompts, `batch_size` rows at a time, `num_samples` times each.

    prompts: texts, lists of turns, or lists of token ids
    watch: told the new tokens of every row in the batch, cycle by cycle
    options: `max_new_tokens`, `num_samples` or `seed`, where they differ from the engine's
    Raises: ValueError for a prompt that cannot be decoded.
    """
    if options:
        bad = options.keys() - {"max_new_tokens", "num_samples", "seed"}
        if bad:
            raise ValueError(f"{', '.join(sorted(bad))} cannot change after load(); load another engine")
        GenerateConfig(**options).check()
        engine = replace(engine, config=replace(engine.config, **options))
    collector = Collector(engine, prompts)
    for group in collector.groups:
        collector.run(group, watch)
    return collector.result()


def compare(engine: Engine, prompts: list[Conversation]) -> tuple[Result, dict[str, Any]]:
    """Decode every group of prompts without and with drafting, in turn, in this process.

    Returns: the drafted result; `speedup`, `vanilla_tokens_per_s`, and `identical`, the share of equal sequences
    (None with the residual rule).
    """
    vanilla = replace(engine, drafter=RootOnly(), config=replace(engine.config, accept="exact", trace=""))
    plain, drafted = Collector(warm_up(with_cycles(vanilla)), prompts), Collector(engine, prompts)
    for number, group in enumerate(drafted.groups):
        for side in (plain, drafted) if number % 2 == 0 else (drafted, plain):
            side.run(group)
    a, b = plain.result(), drafted.result()
    same = [x == y for x, y in zip(a.tokens, b.tokens)]
    rate = a.stats["tokens_per_s"]
    speedup = b.stats["tokens_per_s"] / rate if rate else 0.0
    exact = engine.config.accept == "exact"  # the residual rule draws other tokens from the same distribution
    identical = sum(same) / len(same) if exact else None
    return b, {"speedup": speedup, "identical": identical, "vanilla_tokens_per_s": rate}


def _run_group(
    session: Session, streams: list[tuple[int, int]], conversations: list[Conversation], watch: Watcher | None
) -> list[Entry]:
    """All turns of the conversations in `streams`, side by side. A turn that no longer fits ends its conversation."""
    engine = session.engine
    answers: list[list[str]] = [[] for _ in streams]
    entries: list[list[Entry]] = [[] for _ in streams]
    # ids are a single turn
    turns = [[c] if isinstance(c[0], int) else c for c in (conversations[p] for p, _ in streams)]
    for t in range(max(map(len, turns))):
        prompts: list[list[int] | None] = [None] * len(streams)
        for row, conversation in enumerate(turns):
            if t == len(answers[row]) < len(conversation):
                said = conversation[t]
                ids = said if isinstance(said, list) else encode(engine, conversation[: t + 1], answers[row])
                if t == 0 or len(ids) < engine.context:
                    prompts[row] = ids
                else:
                    where = f"turn {t + 1} of prompt {streams[row][0] + 1}"
                    print(f"note: {where} no longer fits the context of {engine.context} tokens", file=sys.stderr)
        if not any(prompts):
            break
        for new in session.run(prompts):
            if watch is not None:
                watch(new)
        for row, ids in enumerate(prompts):
            if ids is not None:
                entries[row].append(Entry((*streams[row], t), ids, session.history[row][len(ids) :]))
                answers[row].append(text_of(engine, entries[row][-1].new))
    return [entry for row in entries for entry in row]


def finish_reason(engine: Engine, new: list[int]) -> str:
    """Why a row ended: at an end of sequence, at `max_new_tokens`, or at the end of the context."""
    if new[-1] in engine.eos_ids and not engine.config.ignore_eos:
        return "stop"
    return "length" if len(new) >= engine.config.max_new_tokens else "context"


def stream(engine: Engine, prompt: str | list[int]) -> Iterator[str]:
    """Decode one prompt, a text or token ids, and yield its text as it is decided, never half a character."""
    if not isinstance(prompt, str) and not all(isinstance(i, int) for i in prompt):
        raise ValueError("stream() takes one text or one list of token ids; use generate() for turns")
    conversation = [prompt] if isinstance(prompt, str) else prompt
    yield from _stream_ids(Session(engine, [(0, 0)]), check_prompt(engine, first_ids(engine, conversation)))


def _stream_ids(session: Session, ids: list[int]) -> Iterator[str]:
    engine = session.engine
    if engine.tokenizer is None:
        Tokenizer.load(Path(engine.config.checkpoint))  # says what is missing
    decoder = engine.tokenizer.stream(continuation=engine.template is None)
    for new in session.run([ids]):
        yield decoder.push(new[0])
    yield decoder.flush()


# -------------------------------------------------------------------------------------------------- main


def read_prompts(config: GenerateConfig) -> list[Conversation]:
    """The conversations to decode. Raises: ValueError for a file that cannot be read or holds no prompt."""
    if config.prompt_ids is not None:
        parts = config.prompt_ids.replace(" ", "").split(",")
        if not all(re.fullmatch(r"-?\d+", p) for p in parts):
            raise ValueError(f"--prompt_ids must be numbers like 5,17,3; it is {config.prompt_ids!r}")
        return [[int(p) for p in parts]]
    if config.prompt is not None:
        return [[config.prompt]]
    if not config.prompt_file:
        if config.checkpoint != DEMO:
            raise ValueError("no prompt; give one with --prompt, --prompt_file, --prompt_ids or --interactive")
        return [[DEMO_PROMPT]]
    path = Path(config.prompt_file)
    if path.suffix == ".jsonl":
        turns = [row.get("turns") for row in read_jsonl(path, "--prompt_file")]
        for number, each in enumerate(turns, 1):
            if not isinstance(each, list) or not each or not all(isinstance(t, str) and t for t in each):
                raise ValueError(f'--prompt_file: {path} row {number} must be like {{"turns": ["text", ...]}}')
        return turns
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompt_file: cannot read {path} ({type(error).__name__})") from None
    if not text.strip():
        raise ValueError(f"--prompt_file: {path} is empty")
    return [[text]]


def chat(engine: Engine) -> None:
    """Talk on the terminal. When the history no longer fits, the oldest turns are dropped, and a line says so."""
    session, turns, answers = Session(engine, [(0, 0)]), [], []
    reserve = min(engine.config.max_new_tokens, engine.context // 2)
    while True:
        try:
            turn = input("> ")
        except (EOFError, KeyboardInterrupt):
            return print()
        if not turn.strip():
            continue
        kept, past = [*turns, turn], list(answers)
        ids = encode(engine, kept, past)
        while len(ids) + reserve > engine.context and len(kept) > 1:
            kept, past = kept[1:], past[1:]
            ids = encode(engine, kept, past)
        try:
            check_prompt(engine, ids)
        except ValueError as error:  # the conversation so far stays
            print(f"[{error}]")
            continue
        dropped = len(turns) + 1 - len(kept)
        if dropped:
            print(f"[the context of {engine.context} tokens is full: {dropped} oldest turn(s) dropped]")
        turns, answers = kept, past
        session.stats, answer = Stats(), ""
        try:
            for piece in _stream_ids(session, ids):
                answer += piece
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        answers.append(answer)
        print(f"\n[{stats_line(session.stats.summary(engine))}]")


def stats_line(stats: dict[str, Any]) -> str:
    """The line a run ends with."""
    tokens = round(stats["tokens_per_s"] * stats["decode_s"])
    line = (
        f"{tokens} tokens in {stats['decode_s']:.2f} s: {stats['tokens_per_s']:.1f} tokens/s, tau {stats['tau']:.2f} "
        f"({stats['cycles']} cycles); prefill {stats['prefill_s']:.2f} s, compile {stats['compile_s']:.1f} s, "
        f"load {stats['load_s']:.1f} s, peak memory {stats['peak_memory_bytes'] / 1e9:.2f} GB"
    )
    if "stand_in" in stats:
        line = f"stand-in, {stats['stand_in']}: {line}"
    if "tree_auto" in stats:
        most = max(stats["tree_auto"], key=lambda preset: preset["cycles"])
        times = (
            f"{most['measured_ms']:.1f} ms each, {most['predicted_ms']:.1f} predicted" if most["cycles"] else "unused"
        )
        name = "no tree, drafting does not pay here," if most["tree"] == "none" else most["tree"]
        line += f"; tree auto: {name} in {most['cycles']} of {stats['cycles']} cycles ({times})"
    if "speedup" in stats:
        line += f"; {stats['speedup']:.2f}x of vanilla ({stats['vanilla_tokens_per_s']:.1f} tokens/s)"
        if stats["identical"] is not None:
            line += f", {100 * stats['identical']:.0f} % of sequences identical"
    return line


def environment(engine: Engine) -> dict[str, Any]:
    """What a measurement depends on."""
    cuda = engine.config.device.startswith("cuda")
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }


def write_text(where: str, text: str) -> None:
    """Write a whole file under its final name, or to standard output for `-`."""
    if where == "-":
        print(text, flush=True)
        return
    temporary = Path(f"{where}.tmp")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, where)
    except OSError as error:
        raise ValueError(f"cannot write {where}: {error.strerror}") from None


def run(engine: Engine, prompts: list[Conversation]) -> None:
    """Decode, print, and write the files that were asked for."""
    config = engine.config
    quiet = "-" in (config.json, config.trace, config.profile)
    one_turn = len(prompts) == config.num_samples == 1 and (isinstance(prompts[0][0], int) or len(prompts[0]) == 1)
    live = one_turn and not quiet and not config.compare and engine.tokenizer is not None
    decoder = engine.tokenizer.stream(continuation=engine.template is None) if live else None
    with torch.profiler.profile() if config.profile else nullcontext() as profiler:
        if config.compare:
            result, outcome = compare(engine, prompts)
            result.stats |= outcome
        else:
            show = lambda new: print(decoder.push(new[0]), end="", flush=True)  # noqa: E731
            result = generate(engine, prompts, show if live else None)
    if live:
        print(decoder.flush())
    elif not quiet:
        print("\n\n".join(result.text if engine.tokenizer else map(str, result.tokens)))
    print(stats_line(result.stats), file=sys.stderr if quiet else sys.stdout)
    if config.profile:
        with tempfile.TemporaryDirectory() as folder:
            profiler.export_chrome_trace(f"{folder}/trace.json")
            write_text(config.profile, Path(folder, "trace.json").read_text())
    if config.trace:
        write_text(config.trace, "\n".join(json.dumps(row) for row in result.trace))
    if config.json:
        document = {k: v for k, v in asdict(result).items() if k != "trace"}
        ran = asdict(config) | {"context": engine.context} | engine.drafter.facts()  # what the defaults came to
        write_text(config.json, json.dumps(document | {"config": ran, "environment": environment(engine)}))


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config = parse(GenerateConfig, "generate.py", "Generate text, exactly, with draft trees.", argv)

    def body() -> None:
        config.check()
        prompts = [] if config.interactive else read_prompts(config)
        engine = load(config)
        chat(engine) if config.interactive else run(engine, prompts)

    run_or_fail("generate.py", body)


if __name__ == "__main__":
    main()
