"""Generate text with a LLaMA target and an EAGLE draft head.

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
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import eagle_draft  # noqa: F401  (enters its drafter in DRAFTERS)
from config import DEMO, GenerateConfig, fail, parse, pick_device
from decode import Engine, Session, Stats, with_steps
from drafters import DRAFTERS, RootOnly
from model import DTYPES, load_model
from tokenizer import Tokenizer, chat_template

DEMO_PROMPT = "def read_lines(path):"
MAX_DEFAULT_CONTEXT = 4096  # tokens; models trained for 128k would otherwise fill the memory with cache

Watcher = Callable[[list[list[int]]], None]
Conversation = list[str] | list[int]  # turns of text, or the token ids of a single prompt


@dataclass
class Result:
    """One entry per prompt, sample and turn, in this order; `stats` of the whole run."""

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
    path = Path(config.checkpoint)
    target = load_model(path, DTYPES.get(config.dtype), config.device)
    config = replace(config, dtype=str(target.embedding.weight.dtype).removeprefix("torch."))
    needs_text = not config.prompt_ids
    tokenizer = Tokenizer.load(path) if needs_text or _has_tokenizer(path) else None
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
    return warm_up(with_steps(engine))


def _has_tokenizer(path: Path) -> bool:
    return (path / "tokenizer.model").is_file() or (path / "tokenizer.json").is_file()


def _resolve_draft(config: GenerateConfig, path: Path) -> GenerateConfig:
    """Fill in `draft` and `eagle`: a head next to the target is used unless told otherwise."""
    bundled = path.with_name(path.name + "-eagle")
    eagle = config.eagle or (str(bundled) if bundled.is_dir() and config.draft != "none" else "")
    draft = config.draft or ("eagle" if eagle else "none")
    if draft == "eagle" and not eagle:
        raise ValueError(f"--draft eagle needs a head; name its directory with --eagle (there is no {bundled})")
    return replace(config, draft=draft, eagle=eagle if draft == "eagle" else "")


def warm_up(engine: Engine) -> Engine:
    """Run a few cycles, so that everything is compiled before the first prompt; fall back to eager aloud."""
    if not engine.config.compile:
        return engine
    began = time.perf_counter()
    try:
        torch.compile(_probe, fullgraph=True)(torch.ones(2))
    except Exception as error:  # whatever a missing or broken compiler raises, it is told and not hidden
        reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        print(f"note: torch.compile does not work here ({reason}); running eagerly", file=sys.stderr)
        return with_steps(replace(engine, config=replace(engine.config, compile=False)))
    quiet = replace(engine, config=replace(engine.config, max_new_tokens=3, ignore_eos=True, trace=""))
    for _ in Session(quiet, [(0, 0)]).run([[0, 0]]):
        pass
    return replace(engine, compile_s=time.perf_counter() - began)


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


# ---------------------------------------------------------------------------------------------- generate


def encode(engine: Engine, turns: list[str], answers: list[str]) -> list[int]:
    """Token ids of a conversation whose last turn waits for its answer."""
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


class Collector:
    """Decodes conversations group by group and gathers what comes out."""

    def __init__(self, engine: Engine, prompts: list[str | Conversation]):
        self.engine, self.stats = engine, Stats()
        self.entries: list[tuple[list[int], list[int]]] = []  # (prompt ids, new ids) per sample and turn
        self.trace: list[dict] = []
        self.conversations = [[p] if isinstance(p, str) else p for p in prompts]
        samples, size = engine.config.num_samples, engine.config.batch_size
        streams = [(p, s) for p in range(len(prompts)) for s in range(samples)]
        self.groups = [streams[first : first + size] for first in range(0, len(streams), size)]

    def run(self, group: list[tuple[int, int]], watch: Watcher | None = None) -> None:
        """Decode one of `groups`. watch: told the new tokens of every row, cycle by cycle."""
        session = Session(self.engine, group)
        first = self.groups.index(group) * self.engine.config.batch_size
        self.entries += _run_group(session, [self.conversations[p] for p, _ in group], watch)
        self.trace += [{**row, "row": first + row["row"]} for row in session.trace]
        self.stats.add(session.stats)

    def result(self) -> Result:
        """Everything so far."""
        engine = self.engine
        decode = engine.tokenizer.decode if engine.tokenizer else lambda ids: ""
        return Result(
            tokens=[new for _, new in self.entries],
            text=[decode(new) for _, new in self.entries],
            finish_reason=[finish_reason(engine, new) for _, new in self.entries],
            prompt_tokens=[len(ids) for ids, _ in self.entries],
            stats=self.stats.summary(engine),
            trace=self.trace,
        )


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
        engine = replace(engine, config=replace(engine.config, **options))
    collector = Collector(engine, prompts)
    for group in collector.groups:
        collector.run(group, watch)
    return collector.result()


def compare(engine: Engine, prompts: list[Conversation]) -> tuple[Result, dict[str, Any]]:
    """Decode every group of prompts without and with drafting, in turn, in this process.

    Returns: the drafted result; `speedup`, `identical` (share of equal sequences), `vanilla_tokens_per_s`.
    """
    vanilla = replace(engine, drafter=RootOnly(), config=replace(engine.config, accept="exact", trace=""))
    plain, drafted = Collector(warm_up(with_steps(vanilla)), prompts), Collector(engine, prompts)
    for group in drafted.groups:
        plain.run(group)
        drafted.run(group)
    a, b = plain.result(), drafted.result()
    same = [x == y for x, y in zip(a.tokens, b.tokens)]
    rate = a.stats["tokens_per_s"]
    speedup = b.stats["tokens_per_s"] / rate if rate else 0.0
    return b, {"speedup": speedup, "identical": sum(same) / len(same), "vanilla_tokens_per_s": rate}


def _run_group(
    session: Session, conversations: list[Conversation], watch: Watcher | None
) -> list[tuple[list[int], list[int]]]:
    """All turns of some conversations, side by side. Returns: (prompt ids, new ids) per conversation and turn."""
    engine = session.engine
    answers: list[list[str]] = [[] for _ in conversations]
    entries: list[list[tuple[list[int], list[int]]]] = [[] for _ in conversations]
    turns = [[c] if not c or isinstance(c[0], int) else c for c in conversations]  # ids are a single turn
    for t in range(max(map(len, turns))):
        prompts: list[list[int] | None] = []
        for row, conversation in enumerate(turns):
            if t >= len(conversation):
                prompts.append(None)
            elif isinstance(conversation[t], str):
                prompts.append(check_prompt(engine, encode(engine, conversation[: t + 1], answers[row])))
            else:
                prompts.append(check_prompt(engine, conversation[t]))
        for new in session.run(prompts):
            if watch is not None:
                watch(new)
        for row, ids in enumerate(prompts):
            if ids is not None:
                new = session.history[row][len(ids) :]
                entries[row].append((ids, new))
                answers[row].append(engine.tokenizer.decode(new) if engine.tokenizer else "")
    return [entry for row in entries for entry in row]


def finish_reason(engine: Engine, new: list[int]) -> str:
    """Why a row ended: at an end of sequence, at `max_new_tokens`, or at the end of the context."""
    if new[-1] in engine.eos_ids and not engine.config.ignore_eos:
        return "stop"
    return "length" if len(new) >= engine.config.max_new_tokens else "context"


def stream(engine: Engine, prompt: str | Conversation, session: Session | None = None) -> Iterator[str]:
    """Decode one prompt and yield its text as it is decided, never half a character."""
    session = session or Session(engine, [(0, 0)])
    conversation = [prompt] if isinstance(prompt, str) else prompt
    ids = conversation if conversation and isinstance(conversation[0], int) else encode(engine, conversation, [])
    yield from _stream_ids(session, check_prompt(engine, ids))


def _stream_ids(session: Session, ids: list[int]) -> Iterator[str]:
    decoder = session.engine.tokenizer.stream()
    for new in session.run([ids]):
        yield decoder.push(new[0])
    yield decoder.flush()


# -------------------------------------------------------------------------------------------------- main


def read_prompts(config: GenerateConfig) -> list[Conversation]:
    """The conversations to decode. Raises: ValueError for a file that cannot be read or holds no prompt."""
    if config.prompt_ids:
        parts = config.prompt_ids.replace(" ", "").split(",")
        if not all(p.lstrip("-").isdigit() for p in parts):
            raise ValueError(f"--prompt_ids must be numbers like 5,17,3; it is {config.prompt_ids}")
        return [[int(p) for p in parts]]
    if config.prompt is not None:
        return [[config.prompt]]
    if not config.prompt_file:
        if config.checkpoint != DEMO:
            raise ValueError("no prompt; give one with --prompt, --prompt_file, --prompt_ids or --interactive")
        return [[DEMO_PROMPT]]
    path = Path(config.prompt_file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompt_file: cannot read {path} ({type(error).__name__})") from None
    if not text.strip():
        raise ValueError(f"--prompt_file: {path} is empty")
    if path.suffix != ".jsonl":
        return [[text]]
    conversations = []
    for number, line in enumerate(filter(str.strip, text.splitlines()), 1):
        try:
            turns = json.loads(line)["turns"]
            assert turns and all(isinstance(t, str) and t for t in turns)
        except (json.JSONDecodeError, KeyError, TypeError, AssertionError):
            raise ValueError(f'--prompt_file: {path} line {number} must be like {{"turns": ["text", ...]}}') from None
        conversations.append(turns)
    return conversations


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
        turns.append(turn)
        ids, dropped = encode(engine, turns, answers), 0
        while len(ids) + reserve > engine.context and len(turns) > 1:
            turns, answers, dropped = turns[1:], answers[1:], dropped + 1
            ids = encode(engine, turns, answers)
        if dropped:
            print(f"[the context of {engine.context} tokens is full: {dropped} oldest turn(s) dropped]")
        try:
            check_prompt(engine, ids)
        except ValueError as error:
            turns.pop()
            print(f"[{error}]")
            continue
        session.stats, answer = Stats(), ""
        for piece in _stream_ids(session, ids):
            answer += piece
            print(piece, end="", flush=True)
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
    if "speedup" in stats:
        line += (
            f"; {stats['speedup']:.2f}x of vanilla ({stats['vanilla_tokens_per_s']:.1f} tokens/s), "
            f"{100 * stats['identical']:.0f} % of sequences identical"
        )
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
    quiet = "-" in (config.json, config.trace)
    one_turn = len(prompts) == config.num_samples == 1 and (isinstance(prompts[0][0], int) or len(prompts[0]) == 1)
    live = one_turn and not quiet and not config.compare and engine.tokenizer is not None
    decoder = engine.tokenizer.stream() if live else None
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
        profiler.export_chrome_trace(config.profile)
    if config.trace:
        write_text(config.trace, "\n".join(json.dumps(row) for row in result.trace))
    if config.json:
        document = {k: v for k, v in asdict(result).items() if k != "trace"}
        write_text(config.json, json.dumps(document | {"config": asdict(config), "environment": environment(engine)}))


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config = parse(argv)
    try:
        config.check()
        prompts = [] if config.interactive else read_prompts(config)
        engine = load(config)
        chat(engine) if config.interactive else run(engine, prompts)
    except ValueError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
