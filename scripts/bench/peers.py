"""Our runtime beside other runtimes: same weights, prompts, tokens and threads, in one process.

    python scripts/bench/peers.py --threads 4
    python scripts/bench/peers.py --checkpoint DIR --methods none,eagle:chain:tree_depth=5 \\
        --peers llama.cpp:q4_0
    python scripts/bench/peers.py --methods none,eagle --peers transformers --limit 24 \\
        --batch_sizes 1,2,4,16

1. Ours are methods as in papers.py. Peers: `transformers` (`generate`), `transformers:lookup`
   (prompt lookup), and llama.cpp on GGUF files written from the same weights: `llama.cpp:f16`,
   `bf16`, `q8_0`, `q4_0`; `llama.cpp:file` is the checkpoint itself, a GGUF file. `:lookup2`
   behind it drafts by llama-cpp-python's prompt lookup of two tokens, its advice for CPUs;
   `:eagle3` by the same EAGLE-3 head as ours, in chains of three, its default. The tokens must be
   those without.
2. Speed: greedy, end of sequence ignored, all prompts, all contestants in turn (`measure_speed`).
3. `--widths` times one pass over 1 to 64 new tokens behind the first prompt: all logits, argmax.

Quantized peers compute another function than the float one: compare their speed, not their tokens.
Not here: quality (fidelity.py), sampling, batches of llama.cpp, GPUs for it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from files.io import bundled_head, check_outputs, is_gguf, write_text
from run.options import DEMO, GenerateConfig, pick_device
from run.parsing import one_line_errors, option, parse

# of llama.cpp: weights, and drafts by lookup, of two tokens, the package's advice for CPUs
FORMATS = ("bf16", "f16", "q8_0", "q4_0")
LOOKUP = "lookup2"
EAGLE3 = "eagle3"
DRAFTS = ("", f":{LOOKUP}", f":{EAGLE3}")
PEERS = (
    "transformers",
    "transformers:lookup",
    *(f"llama.cpp:{kind}{draft}" for kind in ("file", *FORMATS) for draft in DRAFTS),
)


@dataclass(frozen=True)
class PeersConfig:
    """Options. Units and effects are in the help texts; those of papers.py mean the same here."""

    checkpoint: str = option(DEMO, "the target: a Hugging Face directory or a GGUF file")
    eagle: str = option(
        "", "the EAGLE head, a directory or GGUF file; default: the one next to the target"
    )
    methods: str = option(
        "none,eagle:chain:tree_depth=5", "ours, as in papers.py; the first is what ratios refer to"
    )
    formats: str = option("none", "weights of ours, of none, int8 and int4: every method with each")
    peers: str = option(
        "transformers,transformers:lookup", f"whom to compare with: none, or of {', '.join(PEERS)}"
    )
    tasks: str = option(
        "demo", "names in data/eval, or JSONL files of id, task and turns; first turns are used"
    )
    limit: int = option(5, "prompts per task", least=1)
    max_new_tokens: int = option(64, "tokens per prompt, the first one included", least=2)
    rounds: int = option(
        1,
        "timed rounds over all prompts, at least; more where they make fewer than 5 runs",
        least=1,
    )
    batch_sizes: str = option(
        "1", "prompts decoded side by side, a list; beyond 1 with the peer transformers alone"
    )
    widths: bool = option(False, "also measure the cost of verifying 1 to 64 tokens")
    options: str = option("", "further options of generate.py for our methods")
    chat: str | None = option(
        None, "apply a chat template: the model's, or the one named", optional=True
    )
    compile: bool | None = option(None, "on CUDA, compile our steps")
    device: str = option("", "cpu or cuda; default: cuda if there is one")
    dtype: str = option("", "default: the checkpoint's", ("float32", "bfloat16", "float16"))
    threads: int = option(0, "CPU threads of everybody; 0 leaves torch's default", least=0)
    json: str = option("", "write the result to this file")

    def check(self) -> None:
        """Check the options. Raises: ValueError, also for a peer that is not installed."""
        for peer in self.peer_list:
            if peer not in PEERS:
                raise ValueError(f"--peers: there is no {peer}; use none, or of {', '.join(PEERS)}")
            check_packages(peer)
        for quant in self.formats.split(","):
            if quant not in ("none", "int8", "int4"):
                raise ValueError(f"--formats: there is no {quant}; use none, int8 or int4")
        sizes = self.sizes
        for peer in self.peer_list:
            if peer != "transformers" and sizes != [1]:
                raise ValueError(
                    f"--batch_sizes: {peer} decodes one prompt at a time; use 1, "
                    "or leave it out of --peers"
                )
        reads_file = any(peer.startswith("llama.cpp:file") for peer in self.peer_list)
        if reads_file and not is_gguf(Path(self.checkpoint)):
            raise ValueError(
                f"--peers llama.cpp:file needs a GGUF file as checkpoint; {self.checkpoint} is none"
            )
        stand_in = any(one.startswith("inflate=") for one in self.options.split(","))
        if stand_in and self.peer_list:
            raise ValueError(
                f"--options inflate= makes a stand-in that {self.peer_list[0]} does not have: it "
                "would run the small checkpoint; use --peers none and scripts/gpu/beside.py"
            )
        check_outputs({"--json": self.json})

    @property
    def sizes(self) -> list[int]:
        """The batch sizes. Raises: ValueError for a text that is no list of numbers."""
        parts = self.batch_sizes.split(",")
        numbers = all(part.isdecimal() and int(part) for part in parts)
        if not numbers or len(set(parts)) < len(parts):
            raise ValueError(
                "--batch_sizes must be different whole numbers from 1 on, as 1,4; "
                f"it is {self.batch_sizes!r}"
            )
        return [int(part) for part in parts]

    @property
    def peer_list(self) -> list[str]:
        """The peers' names."""
        return [] if self.peers == "none" else self.peers.split(",")


# --help and mistakes are answered before the imports below, which take seconds
COMMAND = parse(PeersConfig, "peers.py", __doc__) if __name__ == "__main__" else None

import torch
from tqdm import tqdm

from kv_cache import KVCache, causal_window
from model import DTYPES
from run.engine import Engine
from run.generate import encode, load
from run.session import common_prefix
from run.stats import peak_memory_bytes
from runtime import compiled
from scripts import export_head
from scripts.bench.llama_peer import (
    Eagle3,
    LlamaCpp,
    check_drafted,
    decode,
    lookup,
    write_gguf,
)
from scripts.bench.measure import (
    Outcome,
    Series,
    environment,
    in_turn,
    pass_bytes,
    read_bandwidth,
    run_rows,
    shown_path,
    with_config,
)
from scripts.bench.papers import Setting, method_config, read_tasks

PACKAGES = {"transformers": ("transformers",), "llama.cpp": ("llama_cpp", "gguf")}
WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # tokens of a verifying pass
SETTLE_S = 0.05  # the threads of OpenMP spin for so long behind another contestant's pass
PREFILL_ROWS = 512  # tokens of a pass of llama.cpp
LOOKUP_TOKENS = 10  # drafted by prompt lookup of transformers
LEAST_RUNS = 5
PATHS = ("checkpoint", "eagle", "json")


def packages_of(peer: str) -> tuple[str, ...]:
    """Return the packages that a peer needs."""
    return PACKAGES[peer.partition(":")[0]]


def check_packages(peer: str) -> None:
    """Check that a peer is installed. Raises: ValueError."""
    for package in packages_of(peer):
        try:
            __import__(package)
        except ImportError:
            file = "scripts/bench/requirements-peers.txt"
            raise ValueError(
                f"--peers {peer} needs the package {package}; pip install -r {file}"
            ) from None


class Contestant(NamedTuple):
    """A runtime with one method."""

    run: Callable[[list[list[int]]], Outcome]  # of a group of prompts
    verify: Callable[[int], Callable[[], None]] | None  # a pass behind the first prompt, by width


class TokenClock:
    """Notes when tokens reach the host; a streamer of transformers' `generate`."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.puts: list[tuple[float, int]] = []  # (time, tokens)

    def put(self, value: Any) -> None:
        """Note new tokens."""
        now = time.perf_counter()
        count = value.numel() if isinstance(value, torch.Tensor) else len(value)
        self.puts.append((now, count))

    def end(self) -> None:
        """Do nothing: no token is held back."""

    def outcome(self, rows: list[list[int]], skip: int = 0) -> Outcome:
        """Return the times of a run. rows: new tokens; skip: leading calls with the prompts"""
        (first, count), *later = self.puts[skip:]
        tokens = sum(n for _, n in later)
        assert tokens + count == sum(map(len, rows)), (self.puts, rows)
        last = later[-1][0] if later else first
        passes = max(len(later), 1) * len(rows)
        return Outcome(rows, first - self.began, (last - first) / max(tokens, 1), tokens / passes)


# -------------------------------------------------------------------------------------- contestants


def ours(engine: Engine, prompt: list[int]) -> Contestant:
    """Return our runtime with one method. The verifying pass is timed for vanilla decoding only."""
    target = engine.target
    device = engine.device

    def verify(width: int) -> Callable[[], None]:
        slots = len(prompt) + width
        cache = KVCache.empty(target.config, 1, slots, target.norm.weight.dtype, device)
        start = torch.tensor([len(prompt)], device=device)

        def step(tokens: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
            window = causal_window(start, tokens.shape[1], backend=target.backend)
            features = target(tokens, window.slots, cache, window)
            scores = target.logits(features)
            return target.backend.best(
                scores, None, None
            )  # [1, M]; no threads of torch, which would spin

        with torch.inference_mode():
            window = causal_window(start * 0, len(prompt))
            target(torch.tensor([prompt], device=device), window.slots, cache, window)
        run = (
            compiled(step) if engine.captured and engine.compile else step
        )  # on a CPU its passes are fused
        tokens = torch.tensor([prompt[:1] * width], device=device)

        @torch.inference_mode()
        def once() -> None:
            run(tokens, start).tolist()

        return once

    def run(prompts: list[list[int]]) -> Outcome:
        return run_rows(engine, prompts)

    plain = engine.drafter.size == 1
    return Contestant(run, verify if plain else None)


def load_transformers(path: Path, dtype: str, device: str) -> Any:
    """Load a model that does not stop at an end of sequence."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype]).to(device).eval()
    model.generation_config.eos_token_id = None
    return model


def transformers_runner(
    model: Any, tokens: int, **options: Any
) -> Callable[[list[list[int]]], Outcome]:
    """Return a function that continues groups of prompts, greedily, with the default cache.

    Shorter prompts are padded on the left, and the padding is masked.
    options: further ones of `generate`
    """

    @torch.inference_mode()
    def run(prompts: list[list[int]]) -> Outcome:
        width = max(map(len, prompts))
        padded = [[0] * (width - len(p)) + p for p in prompts]
        valid = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        ids = torch.tensor(padded, device=model.device)  # [B, T]
        mask = torch.tensor(valid, device=model.device)  # [B, T]
        clock = TokenClock()
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            do_sample=False,
            streamer=clock,
            pad_token_id=0,
            **options,
        )
        return clock.outcome(out[:, width:].tolist(), skip=1)  # the first call brings the prompts

    return run


def transformers_peer(name: str, config: PeersConfig, model: Any, prompt: list[int]) -> Contestant:
    """Return one way to use `generate`. model: shared by all of them"""
    options: dict[str, Any] = {}
    if name.endswith(":lookup"):
        options = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}

    @torch.inference_mode()
    def verify(width: int) -> Callable[[], None]:
        cache = model(torch.tensor([prompt], device=model.device), use_cache=True).past_key_values
        tokens = torch.tensor([prompt[:1] * width], device=model.device)

        @torch.inference_mode()
        def once() -> None:
            model(tokens, past_key_values=cache, use_cache=True).logits.argmax(-1).tolist()
            cache.crop(-width)

        return once

    run = transformers_runner(model, config.max_new_tokens, **options)
    return Contestant(run, verify if name == "transformers" else None)


def load_llama_cpp(
    kind: str, config: PeersConfig, folder: Path, prompts: list[list[int]]
) -> LlamaCpp:
    """Load llama.cpp on the same weights in one of its formats. Writes: the file, if missing."""
    checkpoint = Path(config.checkpoint)
    file = folder / f"{checkpoint.resolve().name}-{kind}.gguf"
    if kind == "file":
        file = checkpoint
    if not file.exists():
        write_gguf(checkpoint, file, kind)
    context = max(map(len, prompts)) + max(config.max_new_tokens, WIDTHS[-1])
    return LlamaCpp(file, context, torch.get_num_threads(), PREFILL_ROWS)


def load_eagle3(peer: LlamaCpp, config: PeersConfig, folder: Path) -> Eagle3:
    """Load our head in llama.cpp: a GGUF file, or one in q8_0 that is written of a directory.

    Raises: ValueError where there is no head, or llama.cpp does not run it. Writes: the file.
    """
    target = Path(config.checkpoint)
    head = Path(config.eagle) if config.eagle else bundled_head(target)
    file = head
    if not is_gguf(head):
        if not head.is_dir():
            raise ValueError(f"--peers llama.cpp:...:{EAGLE3} needs a head; name it with --eagle")
        file = folder / f"{head.resolve().name}-q8_0.gguf"
        if not file.exists():
            export_head.write_gguf(export_head.read(head, target), file, "q8_0")
    return Eagle3(peer, file, torch.get_num_threads())


def llama_cpp_peer(
    peer: LlamaCpp, how: str, tokens: int, prompt: list[int], head: Eagle3 | None = None
) -> Contestant:
    """Return llama.cpp, plain (how: ""), with its LOOKUP, or with a head.

    The tokens of a draft are checked, untimed.
    """
    draft = lookup() if how == LOOKUP else None
    if head:
        draft = head.draft
    plain = {}

    def run(prompts: list[list[int]]) -> Outcome:
        (prompt,) = prompts
        if head:
            head.begin()
        clock = TokenClock()
        new = decode(peer, prompt, tokens, clock, draft)
        if draft:
            key = tuple(prompt)
            plain[key] = plain.get(key) or decode(peer, prompt, tokens, TokenClock())
            check_drafted(peer, prompt, plain[key], new)
        return clock.outcome([new])

    def verify(width: int) -> Callable[[], None]:
        peer.prefill(prompt)
        return lambda: peer.feed(prompt[:1] * width, len(prompt), every=True).argmax(-1).tolist()

    return Contestant(run, None if draft else verify)


def make_peers(
    config: PeersConfig, prompts: list[list[int]], folder: Path
) -> dict[str, Contestant]:
    """Load the peers: the target once for transformers, once per GGUF file and once for a head.

    Beside a head llama.cpp's target also hands out the inputs of layers.
    """
    contestants = {}
    model = None
    files = {}
    for name in config.peer_list:
        kind, _, variant = name.partition(":")
        if kind == "transformers":
            model = model or load_transformers(Path(config.checkpoint), config.dtype, config.device)
            contestants[name] = transformers_peer(name, config, model, prompts[0])
            continue
        form, _, how = variant.partition(":")
        place = variant if how == EAGLE3 else form
        files[place] = files.get(place) or load_llama_cpp(form, config, folder, prompts)
        peer = files[place]
        head = load_eagle3(peer, config, folder) if how == EAGLE3 else None
        contestants[name] = llama_cpp_peer(peer, how, config.max_new_tokens, prompts[0], head)
    return contestants


def plain_config(config: PeersConfig) -> GenerateConfig:
    """Return the options of our target without drafts, compilation and quantization."""
    return replace(method_config("none", Setting("none", 0.0, 1), config), compile=False)


def load_formats(config: PeersConfig, base: Engine) -> dict[str, Engine]:
    """Load our target in every format."""
    plain = replace(plain_config(config), dtype=base.option("dtype"))
    engines = {}
    for quant in config.formats.split(","):
        engines[quant] = base if quant == "none" else load(replace(plain, quant=quant))
    return engines


def make_ours(
    config: PeersConfig, loaded: dict[str, Engine], prompt: list[int], size: int
) -> dict[str, Contestant]:
    """Return every method with every format, for a batch size. config: `dtype` as it was given"""
    torch.compiler.reset()  # else these steps would first try the graphs of another size
    contestants = {}
    for quant, engine in loaded.items():
        for method in config.methods.split(","):
            chosen = method_config(method, Setting(quant, 0.0, size), config)
            chosen = replace(chosen, ignore_eos=True)
            name = f"ours {method}" if quant == "none" else f"ours {quant} {method}"
            contestants[name] = ours(with_config(engine, chosen), prompt)
    return contestants


# -------------------------------------------------------------------------------------- measurement


def groups_of(prompts: list, size: int) -> list[list]:
    """Return groups of `size` prompts. Raises: ValueError where some would be left over."""
    if len(prompts) % size:
        raise ValueError(
            f"--batch_sizes must divide the {len(prompts)} prompts; {size} does not: change --limit"
        )
    return [prompts[first : first + size] for first in range(0, len(prompts), size)]


def runtime_of(name: str) -> str:
    """Return a contestant's name without its way to draft: one runtime on one set of weights."""
    if name.startswith("ours "):
        return name.rpartition(" ")[0]
    for draft in filter(None, DRAFTS):
        name = name.removesuffix(draft)
    return name


def measure_speed(
    contestants: dict[str, Contestant], groups: list[list[list[int]]], rounds: int
) -> dict[str, Any]:
    """Continue every group of prompts with all contestants in turn, after one run to warm up.

    The first token (prefill) is timed apart: a rate is taken over later tokens, a ratio between
    neighbours in time. A rate of a batch counts the tokens of all its sequences (EAGLE-1, table 7).
    A group runs until its last sequence ends. Others wait for it, which only drafting pays for.
    """
    outcomes: dict[str, list[Outcome]] = {name: [] for name in contestants}
    runs = [groups[0], *groups * max(rounds, -(-LEAST_RUNS // len(groups)))]
    title = f"speed, groups of {len(groups[0])}"
    bar = tqdm(total=len(contestants) * len(runs), desc=title, unit="run", disable=None)
    for number, group in enumerate(runs):
        for name, contestant in contestants.items():
            outcome = contestant.run(group)
            if number:
                outcomes[name].append(outcome)
            bar.update()
    bar.close()
    first = next(iter(outcomes.values()))
    own: dict[str, list[Outcome]] = {}  # of every runtime, its first contestant's
    rows = {}
    for name, done in outcomes.items():
        plain = own.setdefault(runtime_of(name), done)
        pairs = [pair for a, b in zip(done, first) for pair in zip(a.rows, b.rows, strict=True)]
        rows[name] = {
            "tokens_per_s": Series.quartiles([1 / o.step_s for o in done]),
            "ratio": Series.quartiles([b.step_s / a.step_s for a, b in zip(done, first)]),
            "first_s": Series.quartiles([o.first_s for o in done]),
            "tau": statistics.mean(o.tau for o in done),
            "same": statistics.mean(common_prefix(a, b) / len(b) for a, b in pairs),
            "identical": statistics.mean(a.rows == b.rows for a, b in zip(done, plain)),
        }
    return rows


def measure_widths(contestants: dict[str, Contestant]) -> dict[str, list[Series]]:
    """Time a pass over each of WIDTHS tokens, all contestants in turn. Returns: seconds."""
    able = {
        name: contestant.verify for name, contestant in contestants.items() if contestant.verify
    }
    rows: dict[str, list[Series]] = {name: [] for name in able}
    for width in WIDTHS:
        passes = {name: _timed(verify(width)) for name, verify in able.items()}
        for name, seconds in in_turn(passes, 5, f"{width} tokens").items():
            rows[name].append(Series.of(seconds))
    return rows


def _timed(run: Callable[[], None]) -> Callable[[], float]:
    run()  # compiles

    def once() -> float:
        time.sleep(SETTLE_S)
        run()  # as in decoding, a pass before
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    return once


# ------------------------------------------------------------------------------------------- report


def report_lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the tables, in Markdown."""
    yield (
        "\nTokens per second after the first tokens: median (quartiles) over runs; "
        "ratios within a round\n"
    )
    yield (
        "| B | | tokens/s | ratio | tau | first tokens ms | of ceiling | identical | same tokens |"
    )
    yield "|" + "---|" * 9
    rows = [
        (size, name, row) for size, rows in result["speed"].items() for name, row in rows.items()
    ]
    for size, name, row in rows:
        share = ""
        if size == "1" and name in ("ours none", "transformers"):
            rate = result["pass_bytes"] * row["tokens_per_s"][0]
            share = f"{100 * rate / result['ceiling_bytes_per_s'][0]:.0f} %"
        cells = [
            size,
            name,
            Series(*row["tokens_per_s"]).text(1, 1),
            Series(*row["ratio"]).text(1, 2),
            f"{row['tau']:.2f}",
            Series(*row["first_s"]).text(1e3, 0),
            share,
            f"{100 * row['identical']:.0f} %",
            f"{100 * row['same']:.0f} %",
        ]
        yield f"| {' | '.join(cells)} |"
    if "widths" in result:
        yield "\nMilliseconds of verifying so many tokens, and in brackets over the time of one\n"
        yield f"| tokens | {' | '.join(map(str, WIDTHS))} |"
        yield "|---|" + "---|" * len(WIDTHS)
        for name, row in result["widths"].items():
            cells = [f"{series[0] * 1e3:.2f} ({series[0] / row[0][0]:.2f})" for series in row]
            yield f"| {name} | {' | '.join(cells)} |"
    yield f"\npeak memory of the process {result['peak_memory_bytes'] / 1e9:.2f} GB"


def header_lines(config: PeersConfig, machine: dict[str, Any], ceiling: Series) -> Iterator[str]:
    """Yield the conditions of the measurement."""
    yield ", ".join(f"{key} {value}" for key, value in machine.items())
    yield (
        f"checkpoint {shown_path(config.checkpoint)}, dtype {config.dtype}, T = 0, "
        f"compiled: {config.compile}"
    )
    yield f"B = {config.batch_sizes}, methods {config.methods}, peers {config.peers}"
    yield f"tasks {config.tasks}, {config.limit} prompts each, {config.max_new_tokens} tokens"
    yield f"read bandwidth {ceiling.text(1e-9, 1)} GB/s: the ceiling"


def bench(config: PeersConfig) -> None:
    """Measure and print everything."""
    config.check()
    config = replace(config, device=pick_device(config.device))
    if config.threads:
        torch.set_num_threads(config.threads)
    texts = [turns[0] for rows in read_tasks(config).values() for turns in rows]
    for size in config.sizes:  # or an error, before anything is loaded
        groups_of(texts, size)
    base = load(plain_config(config))
    given = config
    config = replace(config, dtype=base.option("dtype"))
    prompts = [encode(base, [text], []) for text in texts]
    longest = max(map(len, prompts))
    room = base.context - config.max_new_tokens
    if longest > room:
        raise ValueError(
            f"a prompt has {longest} tokens, the context has room for {room}; raise it"
        )
    packages = [p for peer in config.peer_list for p in packages_of(peer) if p != "gguf"]
    machine = environment(config.device, *packages)
    ceiling = read_bandwidth(config.device, 5)
    print("\n".join(header_lines(config, machine, ceiling)), flush=True)
    options = asdict(config)
    for name in PATHS:
        options[name] = shown_path(options[name])
    result = {
        "config": options,
        "environment": machine,
        "ceiling_bytes_per_s": ceiling,
        "pass_bytes": pass_bytes(base.target, len(prompts[0])),
        "speed": {},  # by batch size
    }
    with tempfile.TemporaryDirectory() as folder:
        peers = make_peers(config, prompts, Path(folder))
        loaded = load_formats(config, base)
        for size in config.sizes:
            contestants = make_ours(given, loaded, prompts[0], size) | peers
            groups = groups_of(prompts, size)
            result["speed"][str(size)] = measure_speed(contestants, groups, config.rounds)
        if config.widths:
            result["widths"] = measure_widths(contestants)
    result["peak_memory_bytes"] = peak_memory_bytes(config.device)
    print("\n".join(report_lines(result)))
    text = json.dumps(result)
    if config.json:
        write_text(config.json, text)
    print(text)


def main() -> None:
    """Run the command line."""
    config = COMMAND or parse(PeersConfig, "peers.py", __doc__)
    with one_line_errors("peers.py"):
        bench(config)


if __name__ == "__main__":
    main()
