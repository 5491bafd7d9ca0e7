"""Our runtime beside its peers: same weights, prompts, number of tokens and threads, in turn, in one process.

    python scripts/bench/peers.py --compile --threads 4
    python scripts/bench/peers.py --checkpoint DIR --methods none,eagle:chain:tree_depth=5 --peers llama.cpp:q4_0
    python scripts/bench/peers.py --compile --methods none,eagle --peers transformers --limit 24 --batch_sizes 1,2,4,16

How it works:
1. Ours are methods as papers.py names them. Peers: `transformers` (`generate`), `transformers:lookup` (prompt lookup),
   `transformers:assistant` (a draft model, named by --assistant), and llama.cpp on GGUF files that are written from
   the same weights: `llama.cpp:f16`, `bf16`, `q8_0`, `q4_0`; `llama.cpp:file` is the checkpoint itself, a GGUF file.
   With `:lookup` behind it, it drafts by llama-cpp-python's prompt lookup, with `:lookup2` only two tokens, as that
   advises for CPUs; its tokens must be those without. A peer whose package is missing is refused by name.
2. Before anything is timed, every peer's logits are compared with ours on the first prompt.
3. Speed: greedy, end-of-sequence ignored, all prompts, everybody in turn per prompt. The first token (prefill) is timed
   apart; a rate is taken over the tokens after it, and a ratio between neighbours in time. With --batch_sizes, groups
   of so many prompts are decoded side by side (EAGLE-1, table 7), and a rate counts the tokens of all rows. A group
   runs until its last row ends: rows that end earlier wait, which only drafting pays for. With --prompts_per_row N a
   group has N times as many prompts: a row of ours takes the next when it has ended, transformers' batches follow one
   another, and a rate counts all tokens and all time, that of reading prompts too.
4. The cost of verifying: one pass over 1 to 64 new tokens behind the first prompt, logits of all of them, argmax.

Quantized peers compute another function than the float one: their speed compares, their tokens need not agree.
Not here: quality, sampling, batches of llama.cpp, GPUs for it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from command_line import one_line_errors, option, parse
from decode import Engine
from files import is_gguf, write_text
from generate import encode, load
from kv_cache import KVCache, causal_window
from model import DTYPES
from options import DEMO, pick_device
from runtime import compiled
from scripts.bench.llama_cpp import (
    FORMATS,
    LOOKUPS,
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
    run_stream,
    shown_path,
    with_config,
)
from scripts.bench.papers import Setting, method_config, read_tasks
from session import Session, common_prefix
from stats import peak_memory_bytes

PEERS = (
    "transformers", "transformers:lookup", "transformers:assistant",
    *(f"llama.cpp:{kind}{how}" for kind in ("file", *FORMATS) for how in ("", *(f":{name}" for name in LOOKUPS))),
)  # fmt: skip
PACKAGES = {"transformers": ("transformers",), "llama.cpp": ("llama_cpp", "gguf")}
WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # tokens of a verifying pass
PREFILL_ROWS = 512  # tokens of a pass of llama.cpp
LOOKUP_TOKENS = 10  # drafted by prompt lookup of transformers
LEAST_RUNS = 5
PATHS = ("checkpoint", "eagle", "assistant", "gguf", "json")


@dataclass(frozen=True)
class PeersConfig:
    """Options. Units and effects are in the help texts; those of papers.py mean the same here."""

    checkpoint: str = option(DEMO, "the target: a Hugging Face directory or a GGUF file")
    eagle: str = option("", "directory of the EAGLE head; default: the one next to the target")
    methods: str = option(
        "none,eagle:chain:tree_depth=5", "ours, as in papers.py; the first is what ratios refer to"
    )
    formats: str = option("none", "weights of ours, of none, int8 and int4: every method with each")
    peers: str = option(
        "transformers,transformers:lookup", f"whom to compare with: none, or of {', '.join(PEERS)}"
    )
    assistant: str = option(
        "", "Hugging Face directory of the draft model of transformers:assistant"
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
    prompts_per_row: int = option(
        1, "prompts of each row in a run; beyond 1 reading them is timed too", least=1
    )
    widths: bool = option(False, "also measure the cost of verifying 1 to 64 tokens")
    gguf: str = option("", "directory that keeps the GGUF files; default: a temporary one")
    options: str = option("", "further options of generate.py for our methods")
    chat: str | None = option(
        None, "apply a chat template: the model's, or the one named", optional=True
    )
    compile: bool = option(False, "compile our steps")
    device: str = option("", "cpu or cuda; default: cuda if there is one")
    dtype: str = option("", "default: the checkpoint's", ("float32", "bfloat16", "float16"))
    threads: int = option(0, "CPU threads of everybody; 0 leaves torch's default", least=0)
    seed: int = option(0, "of nothing here but our engine's noise")
    json: str = option("", "write the result to this file")

    def check(self) -> None:
        """Raises: ValueError for a value that cannot work, or a peer that is not installed."""
        for peer in self.peer_list:
            if peer not in PEERS:
                raise ValueError(f"--peers: there is no {peer}; use none, or of {', '.join(PEERS)}")
            for package in PACKAGES[peer.partition(":")[0]]:
                try:
                    __import__(package)
                except ImportError:
                    file = "scripts/bench/requirements-peers.txt"
                    raise ValueError(
                        f"--peers {peer} needs the package {package}; pip install -r {file}"
                    ) from None
        for quant in self.formats.split(","):
            if quant not in ("none", "int8", "int4"):
                raise ValueError(f"--formats: there is no {quant}; use none, int8 or int4")
        sizes = self.sizes
        for peer in self.peer_list:
            if peer != "transformers" and sizes != [1]:
                raise ValueError(
                    f"--batch_sizes: {peer} decodes one prompt at a time; use 1, or leave it out of --peers"
                )
        if any(peer.startswith("llama.cpp:file") for peer in self.peer_list) and not is_gguf(
            Path(self.checkpoint)
        ):
            raise ValueError(
                f"--peers llama.cpp:file needs a GGUF file as checkpoint; {self.checkpoint} is none"
            )
        if ("transformers:assistant" in self.peer_list) != bool(self.assistant):
            raise ValueError(
                "--assistant names the draft model of the peer transformers:assistant; give both or none"
            )
        if self.gguf and not Path(self.gguf).is_dir():
            raise ValueError(f"--gguf: there is no directory {self.gguf}; make it first")
        if not Path(self.json).parent.is_dir():
            raise ValueError(f"--json: cannot write {self.json}; its directory does not exist")

    @property
    def sizes(self) -> list[int]:
        """The batch sizes. Raises: ValueError for what is no list of numbers."""
        parts = self.batch_sizes.split(",")
        if not all(part.isdecimal() and int(part) for part in parts) or len(set(parts)) < len(
            parts
        ):
            raise ValueError(
                f"--batch_sizes must be different whole numbers from 1 on, as 1,4; it is {self.batch_sizes!r}"
            )
        return [int(part) for part in parts]

    @property
    def peer_list(self) -> list[str]:
        """The peers' names."""
        return [] if self.peers == "none" else self.peers.split(",")


class Contestant(NamedTuple):
    """Somebody who continues prompts."""

    run: Callable[[list[list[int]]], Outcome]  # of a group of prompts
    logits: Callable[[list[int]], torch.Tensor]  # of every token of a prompt, [T, V] on the CPU
    verify: (
        Callable[[int], Callable[[], None]] | None
    )  # a pass over so many tokens behind the first prompt
    trees: Callable[[Sequence[tuple[int, float]]], list[dict]] = (
        lambda ran: []
    )  # how often each of several ran


class TokenClock:
    """Notes when tokens reach the host, a few at a time."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.puts: list[tuple[float, int]] = []  # (time, tokens)

    def put(self, value: Any) -> None:
        """Take in new tokens."""
        self.puts.append(
            (time.perf_counter(), value.numel() if isinstance(value, torch.Tensor) else len(value))
        )

    def end(self) -> None:
        """Nothing is held back."""

    def outcome(self, rows: list[list[int]], skip: int = 0) -> Outcome:
        """Times of a run. rows: new tokens; skip: leading calls that brought the prompts."""
        (first, count), *later = self.puts[skip:]
        tokens = sum(n for _, n in later)
        assert tokens + count == sum(map(len, rows)), (self.puts, rows)
        last, passes = later[-1][0] if later else first, max(len(later), 1) * len(rows)
        return Outcome(rows, first - self.began, (last - first) / max(tokens, 1), tokens / passes)


# ------------------------------------------------------------------------------------------ contestants


def ours(engine: Engine, prompt: list[int]) -> Contestant:
    """Our runtime with one of its methods. The pass is the same for all of them; vanilla decoding stands for it."""
    target, device = engine.target, engine.config.device

    @torch.inference_mode()
    def logits(ids: list[int]) -> torch.Tensor:
        tokens = torch.tensor([ids], device=device)
        features = target(tokens, torch.arange(len(ids), device=device)[None])
        return target.logits(features)[0].cpu()  # [T, V]

    def verify(width: int) -> Callable[[], None]:
        slots = len(prompt) + width
        cache = KVCache.empty(target.config, 1, slots, target.embedding.weight.dtype, device)
        start = torch.tensor([len(prompt)], device=device)

        def step(tokens: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
            window = causal_window(start, tokens.shape[1])
            features = target(tokens, window.slots, cache, window)
            return target.logits(features).argmax(-1)  # [1, M]

        with torch.inference_mode():
            window = causal_window(start * 0, len(prompt))
            target(torch.tensor([prompt], device=device), window.slots, cache, window)
        run = compiled(step) if engine.captured else step  # on a CPU its passes are fused
        tokens = torch.tensor([prompt[:1] * width], device=device)

        @torch.inference_mode()
        def once() -> None:
            run(tokens, start).tolist()

        return once

    def run(prompts: list[list[int]]) -> Outcome:
        if len(prompts) > engine.config.batch_size:
            return run_stream(engine, prompts)
        return run_rows(Session(engine, [(row, 0) for row in range(len(prompts))]), prompts)

    plain = engine.drafter.size == 1
    return Contestant(run, logits, verify if plain else None, engine.tree_policy.table)


def in_batches(contestant: Contestant, size: int) -> Contestant:
    """Who continues any number of prompts, `size` side by side, one batch after the other."""

    def run(prompts: list[list[int]]) -> Outcome:
        done = [
            contestant.run(prompts[first : first + size]) for first in range(0, len(prompts), size)
        ]
        if len(done) == 1:
            return done[0]
        rows = [row for outcome in done for row in outcome.rows]
        seconds = sum(o.first_s + o.step_s * sum(len(row) - 1 for row in o.rows) for o in done)
        return Outcome(
            rows,
            sum(o.first_s for o in done),
            seconds / sum(map(len, rows)),
            statistics.mean(o.tau for o in done),
        )

    return contestant._replace(run=run)


def make_transformers(
    path: Path, dtype: str, device: str, tokens: int, **options: Any
) -> Callable[[list[list[int]]], Outcome]:
    """`generate` of transformers, greedy, with its default cache. options: further ones of `generate`."""
    return transformers_runner(load_transformers(path, dtype, device), tokens, **options)


def load_transformers(path: Path, dtype: str, device: str) -> Any:
    """The model, which will not stop at an end of sequence."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype]).to(device).eval()
    model.generation_config.eos_token_id = None
    return model


def transformers_runner(
    model: Any, tokens: int, **options: Any
) -> Callable[[list[list[int]]], Outcome]:
    """Continue groups of prompts with a loaded model; shorter ones are padded on the left, and the padding masked."""

    @torch.inference_mode()
    def run(prompts: list[list[int]]) -> Outcome:
        width = max(map(len, prompts))
        ids = torch.tensor(
            [[0] * (width - len(p)) + p for p in prompts], device=model.device
        )  # [B, T]
        mask = torch.tensor(
            [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device
        )
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
    """One way to use `generate`. model: shared by all of them."""
    options: dict[str, Any] = {}
    if name.endswith(":lookup"):
        options = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    elif name.endswith(":assistant"):
        options = {
            "assistant_model": load_transformers(
                Path(config.assistant), config.dtype, config.device
            )
        }

    @torch.inference_mode()
    def logits(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids], device=model.device)).logits[0].float().cpu()  # [T, V]

    @torch.inference_mode()
    def verify(width: int) -> Callable[[], None]:
        cache = model(torch.tensor([prompt], device=model.device), use_cache=True).past_key_values
        tokens = torch.tensor([prompt[:1] * width], device=model.device)

        @torch.inference_mode()
        def once() -> None:
            model(tokens, past_key_values=cache, use_cache=True).logits.argmax(-1).tolist()
            cache.crop(-width)

        return once

    plain = name == "transformers"
    return Contestant(
        transformers_runner(model, config.max_new_tokens, **options),
        logits,
        verify if plain else None,
    )


def load_llama_cpp(
    kind: str, config: PeersConfig, folder: Path, prompts: list[list[int]]
) -> LlamaCpp:
    """llama.cpp on the same weights in one of its formats."""
    whole = Path(config.checkpoint)
    file = whole if kind == "file" else folder / f"{whole.resolve().name}-{kind}.gguf"
    if not file.exists():
        write_gguf(Path(config.checkpoint), file, kind)
    context = max(map(len, prompts)) + max(config.max_new_tokens, WIDTHS[-1])
    return LlamaCpp(file, context, torch.get_num_threads(), PREFILL_ROWS)


def llama_cpp_peer(peer: LlamaCpp, how: str, tokens: int, prompt: list[int]) -> Contestant:
    """llama.cpp, plainly (how: "") or with one of its LOOKUPS. Where it drafts, its tokens are checked, untimed."""
    draft, plain = lookup(LOOKUPS[how]) if how else None, {}

    def run(prompts: list[list[int]]) -> Outcome:
        (prompt,) = prompts
        clock = TokenClock()
        new = decode(peer, prompt, tokens, clock, draft)
        if draft:
            key = tuple(prompt)
            plain[key] = plain.get(key) or decode(peer, prompt, tokens, TokenClock())
            check_drafted(peer, prompt, plain[key], new)
        return clock.outcome([new])

    def logits(ids: list[int]) -> torch.Tensor:
        return torch.from_numpy(peer.feed(ids[:PREFILL_ROWS], 0, every=True).copy())  # [T, V]

    def verify(width: int) -> Callable[[], None]:
        peer.prefill(prompt)
        return lambda: peer.feed(prompt[:1] * width, len(prompt), every=True).argmax(-1).tolist()

    return Contestant(run, logits, None if draft else verify)


def make_peers(
    config: PeersConfig, prompts: list[list[int]], folder: Path
) -> dict[str, Contestant]:
    """The peers, loaded: the target once for transformers, once per GGUF file."""
    contestants, model, files = {}, None, {}
    for name in config.peer_list:
        kind, _, variant = name.partition(":")
        if kind == "transformers":
            model = model or load_transformers(Path(config.checkpoint), config.dtype, config.device)
            contestants[name] = transformers_peer(name, config, model, prompts[0])
            continue
        form, _, how = variant.partition(":")
        files[form] = files.get(form) or load_llama_cpp(form, config, folder, prompts)
        contestants[name] = llama_cpp_peer(files[form], how, config.max_new_tokens, prompts[0])
    return contestants


def load_formats(config: PeersConfig, base: Engine) -> dict[str, Engine]:
    """Our target in every format."""
    plain = replace(
        method_config("none", Setting("none", 0.0, 1), config),
        compile=False,
        dtype=base.config.dtype,
    )
    return {
        q: base if q == "none" else load(replace(plain, quant=q)) for q in config.formats.split(",")
    }


def make_ours(
    config: PeersConfig, loaded: dict[str, Engine], prompt: list[int], size: int
) -> dict[str, Contestant]:
    """Every method with every format, for a batch size."""
    torch.compiler.reset()  # else these steps would first try the graphs of another size
    contestants = {}
    for quant, engine in loaded.items():
        for method in config.methods.split(","):
            chosen = replace(
                method_config(method, Setting(quant, 0.0, size), config), ignore_eos=True
            )
            made = with_config(engine, replace(chosen, dtype=engine.config.dtype))
            contestants[f"ours {'' if quant == 'none' else quant + ' '}{method}"] = ours(
                made, prompt
            )
    return contestants


# ------------------------------------------------------------------------------------------ measurement


def parity(contestants: dict[str, Contestant], prompt: list[int]) -> dict[str, dict[str, float]]:
    """Logits against the first contestant's: root mean square and largest difference, share of equal argmax."""
    prompt = prompt[:PREFILL_ROWS]
    reference, rows = next(iter(contestants.values())).logits(prompt), {}  # [T, V]
    for name, contestant in contestants.items():
        other = contestant.logits(prompt)
        off = other - reference
        same = (other.argmax(-1) == reference.argmax(-1)).float().mean()
        rows[name] = {
            "rms": float(off.square().mean().sqrt()),
            "max": float(off.abs().max()),
            "same": float(same),
        }
    return rows | {"scale": {"rms": float(reference.square().mean().sqrt())}}


def groups_of(prompts: list, size: int) -> list[list]:
    """Groups of `size` prompts. Raises: ValueError where some would be left over."""
    if len(prompts) % size:
        rule = f"--batch_sizes, times --prompts_per_row, must divide the {len(prompts)} prompts"
        raise ValueError(f"{rule}; {size} does not: change --limit")
    return [prompts[first : first + size] for first in range(0, len(prompts), size)]


def measure_speed(
    contestants: dict[str, Contestant], groups: list[list[list[int]]], rounds: int
) -> dict[str, Any]:
    """Everybody continues every group of prompts, in turn, after one run to warm up."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in contestants}
    runs = [groups[0], *groups * max(rounds, -(-LEAST_RUNS // len(groups)))]
    bar = tqdm(
        total=len(contestants) * len(runs), desc=f"speed, groups of {len(groups[0])}", unit="run"
    )
    for number, group in enumerate(runs):
        for name, contestant in contestants.items():
            outcome = contestant.run(group)
            outcomes[name] += [outcome] if number else []
            bar.update()
    bar.close()
    first = next(iter(outcomes.values()))
    rows = {}
    for name, done in outcomes.items():
        pairs = [pair for a, b in zip(done, first) for pair in zip(a.rows, b.rows, strict=True)]
        rows[name] = {
            "tokens_per_s": Series.quartiles([1 / o.step_s for o in done]),
            "ratio": Series.quartiles([b.step_s / a.step_s for a, b in zip(done, first)]),
            "first_s": Series.quartiles([o.first_s for o in done]),
            "tau": statistics.mean(o.tau for o in done),
            "same": statistics.mean(common_prefix(a, b) / len(b) for a, b in pairs),
            "trees": contestants[name].trees([ran for o in done for ran in o.presets]),
        }
    return rows


def measure_widths(contestants: dict[str, Contestant]) -> dict[str, list[Series]]:
    """Seconds of a pass over each of WIDTHS tokens, everybody in turn."""
    able = {
        name: contestant.verify for name, contestant in contestants.items() if contestant.verify
    }
    rows: dict[str, list[Series]] = {name: [] for name in able}
    for width in WIDTHS:
        timed = in_turn(
            {name: _timed(verify(width)) for name, verify in able.items()}, 5, f"{width} tokens"
        )
        for name, seconds in timed.items():
            rows[name].append(Series.of(seconds))
    return rows


def _timed(run: Callable[[], None]) -> Callable[[], float]:
    run()  # compiles

    def once() -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    return once


# ----------------------------------------------------------------------------------------------- report


def report_lines(result: dict[str, Any]) -> Iterator[str]:
    """The tables, in Markdown."""
    turns = result["config"]["prompts_per_row"] > 1
    what = "in all, reading prompts included" if turns else "after the first tokens"
    yield f"\nTokens per second {what}: median (quartiles) over runs; ratios within a round\n"
    first = "reading prompts ms" if turns else "first tokens ms"
    yield f"| B | | tokens/s | ratio | tau | {first} | of ceiling | same tokens | logits rms | equal argmax |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    rows = [
        (size, name, row) for size, rows in result["speed"].items() for name, row in rows.items()
    ]
    for size, name, row in rows:
        near = result["parity"][name]
        share = f"{100 * result['pass_bytes'] * row['tokens_per_s'][0] / result['ceiling_bytes_per_s'][0]:.0f} %"
        yield (
            f"| {size} | {name} | {Series(*row['tokens_per_s']).text(1, 1)} | {Series(*row['ratio']).text(1, 2)} | "
            f"{row['tau']:.2f} | {Series(*row['first_s']).text(1e3, 0)} | "
            f"{share if size == '1' and not turns and name in ('ours none', 'transformers') else ''} | "
            f"{100 * row['same']:.0f} % | {near['rms']:.4f} | {100 * near['same']:.1f} % |"
        )
    for size, name, row in rows:
        ran = [f"{tree['tree']} {tree['cycles']}" for tree in row["trees"]]
        if ran:
            yield f"\nB = {size}, {name}: cycles of each tree: {', '.join(ran)}"
    yield f"\nThe reference's logits have a root mean square of {result['parity']['scale']['rms']:.2f}."
    if "widths" in result:
        yield "\nMilliseconds of verifying so many tokens, and in brackets over the time of one\n"
        yield f"| tokens | {' | '.join(map(str, WIDTHS))} |"
        yield "|---|" + "---|" * len(WIDTHS)
        for name, row in result["widths"].items():
            cells = [f"{series[0] * 1e3:.2f} ({series[0] / row[0][0]:.2f})" for series in row]
            yield f"| {name} | {' | '.join(cells)} |"
    yield f"\npeak memory of the process {result['peak_memory_bytes'] / 1e9:.2f} GB"


def header_lines(config: PeersConfig, machine: dict[str, Any], ceiling: Series) -> Iterator[str]:
    """What must be known before any number is read."""
    yield ", ".join(f"{key} {value}" for key, value in machine.items())
    yield f"checkpoint {shown_path(config.checkpoint)}, dtype {config.dtype}, T = 0, compiled: {config.compile}"
    yield f"B = {config.batch_sizes}, prompts per row {config.prompts_per_row}"
    yield f"methods {config.methods}, peers {config.peers}"
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
        groups_of(texts, size * config.prompts_per_row)
    base = load(replace(method_config("none", Setting("none", 0.0, 1), config), compile=False))
    config = replace(config, dtype=base.config.dtype)
    prompts = [encode(base, [text], []) for text in texts]
    room = base.context - config.max_new_tokens
    if max(map(len, prompts)) > room:
        raise ValueError(
            f"a prompt has {max(map(len, prompts))} tokens, the context has room for {room}; raise it"
        )
    packages = [
        p for peer in config.peer_list for p in PACKAGES[peer.partition(":")[0]] if p != "gguf"
    ]
    machine, ceiling = environment(config.device, *packages), read_bandwidth(config.device, 5)
    print("\n".join(header_lines(config, machine, ceiling)), flush=True)
    groups = {size: groups_of(prompts, size * config.prompts_per_row) for size in config.sizes}
    with tempfile.TemporaryDirectory() as temporary:
        peers, loaded = (
            make_peers(config, prompts, Path(config.gguf or temporary)),
            load_formats(config, base),
        )
        result = {
            "config": {
                name: shown_path(x) if name in PATHS else x for name, x in asdict(config).items()
            },
            "environment": machine,
            "ceiling_bytes_per_s": ceiling,
            "pass_bytes": pass_bytes(base.target, len(prompts[0])),
            "speed": {},  # by batch size
        }
        for size in config.sizes:
            batched = {name: in_batches(peer, size) for name, peer in peers.items()}
            contestants = make_ours(config, loaded, prompts[0], size) | batched
            if not result["speed"]:
                result["parity"] = parity(contestants, prompts[0])
            result["speed"][str(size)] = measure_speed(contestants, groups[size], config.rounds)
        if config.widths:
            result["widths"] = measure_widths(contestants)
    result["peak_memory_bytes"] = peak_memory_bytes(config.device)
    print("\n".join(report_lines(result)))
    text = json.dumps(result)
    if config.json:
        write_text(config.json, text)
    print(text)


def main() -> None:
    """The command line."""
    config = parse(PeersConfig, "peers.py", __doc__)
    with one_line_errors("peers.py"):
        bench(config)


if __name__ == "__main__":
    main()
