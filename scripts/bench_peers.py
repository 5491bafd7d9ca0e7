"""Our runtime beside its peers: same weights, prompts, number of tokens and threads, in turn, in one process.

    python scripts/bench_peers.py --compile --threads 4
    python scripts/bench_peers.py --checkpoint DIR --methods none,eagle:chain:tree_depth=5 --peers llama.cpp:q4_0

How it works:
1. Ours are methods as bench.py names them. Peers: `transformers` (`generate`), `transformers:lookup` (prompt lookup),
   `transformers:assistant` (a draft model, named by --assistant), and llama.cpp on GGUF files that are written from
   the same weights: `llama.cpp:f16`, `bf16`, `q8_0`, `q4_0`; `llama.cpp:file` is the checkpoint itself, a GGUF file.
   A peer whose package is missing is refused by name.
2. Before anything is timed, every peer's logits are compared with ours on the first prompt.
3. Speed: greedy, end-of-sequence ignored, all prompts, everybody in turn per prompt. The first token (prefill) is timed
   apart; a rate is taken over the tokens after it, and a ratio between neighbours in time.
4. The cost of verifying: one pass over 1 to 64 new tokens behind the first prompt, logits of all of them, argmax.

Quantized peers compute another function than the float one: their speed compares, their tokens need not agree.
Not here: quality, batches, sampling, GPUs for llama.cpp.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

import _path  # noqa: F401  (finds the project)
from bench import Setting, method_config, read_tasks
from checkpoint import is_gguf
from decode import Engine, Session, common_prefix
from generate import encode, load
from llama_cpp_peer import FORMATS, LlamaCpp, decode, write_gguf
from measure import (
    Outcome,
    Series,
    environment,
    in_turn,
    pass_bytes,
    read_bandwidth,
    run_session,
    shown_path,
    with_config,
)
from model import DTYPES, KVCache, causal_window
from options import DEMO, one_line_errors, option, parse, pick_device, write_text
from runtime import compiled
from stats import peak_memory_bytes

PEERS = (
    "transformers", "transformers:lookup", "transformers:assistant", "llama.cpp:file",
    *(f"llama.cpp:{kind}" for kind in FORMATS),
)  # fmt: skip
PACKAGES = {"transformers": ("transformers",), "llama.cpp": ("llama_cpp", "gguf")}
WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # tokens of a verifying pass
PREFILL_ROWS = 512  # tokens of a pass of llama.cpp
LOOKUP_TOKENS = 10  # drafted by prompt lookup
PATHS = ("checkpoint", "eagle", "assistant", "gguf", "json")


@dataclass(frozen=True)
class PeersConfig:
    """Options. Units and effects are in the help texts; those of bench.py mean the same here."""

    checkpoint: str = option(DEMO, "the target: a Hugging Face directory or a GGUF file")
    eagle: str = option("", "directory of the EAGLE head; default: the one next to the target")
    methods: str = option("none,eagle:chain:tree_depth=5", "ours, as in bench.py; the first is what ratios refer to")
    formats: str = option("none", "weights of ours, of none, int8 and int4: every method with each")
    peers: str = option("transformers,transformers:lookup", f"whom to compare with: none, or of {', '.join(PEERS)}")
    assistant: str = option("", "Hugging Face directory of the draft model of transformers:assistant")
    tasks: str = option("demo", "names in data/eval, or JSONL files of id, task and turns; first turns are used")
    limit: int = option(5, "prompts per task", least=1)
    max_new_tokens: int = option(64, "tokens per prompt, the first one included", least=2)
    rounds: int = option(1, "timed rounds over all prompts; with the prompts they must make 5 runs or more", least=1)
    widths: bool = option(False, "also measure the cost of verifying 1 to 64 tokens")
    gguf: str = option("", "directory that keeps the GGUF files; default: a temporary one")
    options: str = option("", "further options of generate.py for our methods")
    chat: str | None = option(None, "apply a chat template: the model's, or the one named", optional=True)
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
                    file = "scripts/requirements-peers.txt"
                    raise ValueError(f"--peers {peer} needs the package {package}; pip install -r {file}") from None
        for quant in self.formats.split(","):
            if quant not in ("none", "int8", "int4"):
                raise ValueError(f"--formats: there is no {quant}; use none, int8 or int4")
        if "llama.cpp:file" in self.peer_list and not is_gguf(Path(self.checkpoint)):
            raise ValueError(f"--peers llama.cpp:file needs a GGUF file as checkpoint; {self.checkpoint} is none")
        if ("transformers:assistant" in self.peer_list) != bool(self.assistant):
            raise ValueError("--assistant names the draft model of the peer transformers:assistant; give both or none")
        if self.gguf and not Path(self.gguf).is_dir():
            raise ValueError(f"--gguf: there is no directory {self.gguf}; make it first")
        if not Path(self.json).parent.is_dir():
            raise ValueError(f"--json: cannot write {self.json}; its directory does not exist")

    @property
    def peer_list(self) -> list[str]:
        """The peers' names."""
        return [] if self.peers == "none" else self.peers.split(",")


class Contestant(NamedTuple):
    """Somebody who continues prompts."""

    run: Callable[[list[int]], Outcome]
    logits: Callable[[list[int]], torch.Tensor]  # of every token of a prompt, [T, V] on the CPU
    verify: Callable[[int], Callable[[], None]] | None  # a pass over so many tokens behind the first prompt


class TokenClock:
    """Notes when tokens reach the host, a few at a time."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.puts: list[tuple[float, int]] = []  # (time, tokens)

    def put(self, value: Any) -> None:
        """Take in new tokens."""
        self.puts.append((time.perf_counter(), value.numel() if isinstance(value, torch.Tensor) else len(value)))

    def end(self) -> None:
        """Nothing is held back."""

    def outcome(self, new: list[int], skip: int = 0) -> Outcome:
        """Times of a run. skip: leading calls that brought the prompt."""
        (first, count), (last, _) = self.puts[skip], self.puts[-1]
        later = sum(n for _, n in self.puts[skip:]) - count
        assert later + count == len(new), (self.puts, len(new))
        return Outcome(new, first - self.began, (last - first) / max(later, 1))


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
        run = compiled(step) if engine.config.compile else step
        tokens = torch.tensor([prompt[:1] * width], device=device)

        @torch.inference_mode()
        def once() -> None:
            run(tokens, start).tolist()

        return once

    plain = engine.drafter.size == 1
    return Contestant(lambda ids: run_session(Session(engine, [(0, 0)]), ids), logits, verify if plain else None)


def make_transformers(
    path: Path, dtype: str, device: str, tokens: int, **options: Any
) -> Callable[[list[int]], Outcome]:
    """`generate` of transformers, greedy, with its default cache. options: further ones of `generate`."""
    return transformers_runner(load_transformers(path, dtype, device), tokens, **options)


def load_transformers(path: Path, dtype: str, device: str) -> Any:
    """The model, which will not stop at an end of sequence."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype]).to(device).eval()
    model.generation_config.eos_token_id = None
    return model


def transformers_runner(model: Any, tokens: int, **options: Any) -> Callable[[list[int]], Outcome]:
    """Continue prompts with a loaded model."""

    @torch.inference_mode()
    def run(prompt: list[int]) -> Outcome:
        ids, clock = torch.tensor([prompt], device=model.device), TokenClock()
        mask = torch.ones_like(ids)
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, streamer=clock, pad_token_id=0, **options
        )
        return clock.outcome(out[0, len(prompt) :].tolist(), skip=1)  # the first call brings the prompt

    return run


def transformers_peer(name: str, config: PeersConfig, model: Any, prompt: list[int]) -> Contestant:
    """One way to use `generate`. model: shared by all of them."""
    options: dict[str, Any] = {}
    if name.endswith(":lookup"):
        options = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    elif name.endswith(":assistant"):
        options = {"assistant_model": load_transformers(Path(config.assistant), config.dtype, config.device)}

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
    return Contestant(transformers_runner(model, config.max_new_tokens, **options), logits, verify if plain else None)


def llama_cpp_peer(kind: str, config: PeersConfig, folder: Path, prompts: list[list[int]]) -> Contestant:
    """llama.cpp on the same weights in one of its formats."""
    whole = Path(config.checkpoint)
    file = whole if kind == "file" else folder / f"{whole.resolve().name}-{kind}.gguf"
    if not file.exists():
        write_gguf(Path(config.checkpoint), file, kind)
    context = max(map(len, prompts)) + max(config.max_new_tokens, WIDTHS[-1])
    peer = LlamaCpp(file, context, torch.get_num_threads(), PREFILL_ROWS)

    def run(prompt: list[int]) -> Outcome:
        clock = TokenClock()
        return clock.outcome(decode(peer, prompt, config.max_new_tokens, clock))

    def logits(ids: list[int]) -> torch.Tensor:
        return torch.from_numpy(peer.feed(ids[:PREFILL_ROWS], 0, every=True).copy())  # [T, V]

    def verify(width: int) -> Callable[[], None]:
        prompt = prompts[0]
        peer.prefill(prompt)
        return lambda: peer.feed(prompt[:1] * width, len(prompt), every=True).argmax(-1).tolist()

    return Contestant(run, logits, verify)


def make_contestants(config: PeersConfig, base: Engine, prompts: list[list[int]], folder: Path) -> dict:
    """Everybody, loaded. The target is loaded once for ours, once for transformers, once per GGUF file."""
    contestants, model = {}, None
    for quant in config.formats.split(","):
        plain = replace(method_config("none", Setting("none", 0.0, 1), config), compile=False, dtype=base.config.dtype)
        loaded = base if quant == "none" else load(replace(plain, quant=quant))
        for method in config.methods.split(","):
            chosen = method_config(method, Setting(quant, 0.0, 1), config)
            engine = with_config(loaded, replace(chosen, dtype=base.config.dtype, ignore_eos=True))
            contestants[f"ours {'' if quant == 'none' else quant + ' '}{method}"] = ours(engine, prompts[0])
    for name in config.peer_list:
        kind, _, variant = name.partition(":")
        if kind == "transformers":
            model = model or load_transformers(Path(config.checkpoint), config.dtype, config.device)
            contestants[name] = transformers_peer(name, config, model, prompts[0])
        else:
            contestants[name] = llama_cpp_peer(variant, config, folder, prompts)
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
        rows[name] = {"rms": float(off.square().mean().sqrt()), "max": float(off.abs().max()), "same": float(same)}
    return rows | {"scale": {"rms": float(reference.square().mean().sqrt())}}


def measure_speed(contestants: dict[str, Contestant], prompts: list[list[int]], rounds: int) -> dict[str, Any]:
    """Everybody continues every prompt, in turn, after one run to warm up."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in contestants}
    bar = tqdm(total=len(contestants) * (1 + rounds * len(prompts)), desc="speed", unit="run")
    for number, prompt in enumerate([prompts[0], *prompts * rounds]):
        for name, contestant in contestants.items():
            outcome = contestant.run(prompt)
            outcomes[name] += [outcome] if number else []
            bar.update()
    bar.close()
    first = next(iter(outcomes.values()))
    rows = {}
    for name, done in outcomes.items():
        same = [common_prefix(a.tokens, b.tokens) / len(b.tokens) for a, b in zip(done, first)]
        rows[name] = {
            "tokens_per_s": Series.quartiles([1 / o.step_s for o in done]),
            "ratio": Series.quartiles([b.step_s / a.step_s for a, b in zip(done, first)]),
            "first_s": Series.quartiles([o.first_s for o in done]),
            "same": sum(same) / len(same),
        }
    return rows


def measure_widths(contestants: dict[str, Contestant]) -> dict[str, list[Series]]:
    """Seconds of a pass over each of WIDTHS tokens, everybody in turn."""
    able = {name: contestant.verify for name, contestant in contestants.items() if contestant.verify}
    rows: dict[str, list[Series]] = {name: [] for name in able}
    for width in WIDTHS:
        timed = in_turn({name: _timed(verify(width)) for name, verify in able.items()}, 5, f"{width} tokens")
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
    yield "\nTokens per second after the first token: median (quartiles) over runs; ratios within a round\n"
    yield "| | tokens/s | ratio | first token ms | of ceiling | same tokens | logits rms | equal argmax |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, row in result["speed"].items():
        near = result["parity"][name]
        share = f"{100 * result['pass_bytes'] * row['tokens_per_s'][0] / result['ceiling_bytes_per_s'][0]:.0f} %"
        yield (
            f"| {name} | {Series(*row['tokens_per_s']).text(1, 1)} | {Series(*row['ratio']).text(1, 2)} | "
            f"{Series(*row['first_s']).text(1e3, 0)} | {share if name in ('ours none', 'transformers') else ''} | "
            f"{100 * row['same']:.0f} % | {near['rms']:.4f} | {100 * near['same']:.1f} % |"
        )
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
    yield f"checkpoint {shown_path(config.checkpoint)}, dtype {config.dtype}, B = 1, T = 0, compiled: {config.compile}"
    yield f"tasks {config.tasks}, {config.limit} prompts each, {config.max_new_tokens} tokens, methods {config.methods}"
    yield f"read bandwidth {ceiling.text(1e-9, 1)} GB/s: the ceiling"


def bench(config: PeersConfig) -> None:
    """Measure and print everything."""
    config.check()
    config = replace(config, device=pick_device(config.device))
    if config.threads:
        torch.set_num_threads(config.threads)
    texts = [turns[0] for rows in read_tasks(config).values() for turns in rows]
    if len(texts) * config.rounds < 5:
        raise ValueError(f"{len(texts)} prompts x --rounds {config.rounds} are fewer than 5 runs; raise --rounds")
    base = load(replace(method_config("none", Setting("none", 0.0, 1), config), compile=False))
    config = replace(config, dtype=base.config.dtype)
    prompts = [encode(base, [text], []) for text in texts]
    room = base.context - config.max_new_tokens
    if max(map(len, prompts)) > room:
        raise ValueError(f"a prompt has {max(map(len, prompts))} tokens, the context has room for {room}; raise it")
    packages = [p for peer in config.peer_list for p in PACKAGES[peer.partition(":")[0]] if p != "gguf"]
    machine, ceiling = environment(config.device, *packages), read_bandwidth(config.device, 5)
    print("\n".join(header_lines(config, machine, ceiling)), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        contestants = make_contestants(config, base, prompts, Path(config.gguf or temporary))
        result = {
            "config": {name: shown_path(x) if name in PATHS else x for name, x in asdict(config).items()},
            "environment": machine,
            "ceiling_bytes_per_s": ceiling,
            "pass_bytes": pass_bytes(base.target, len(prompts[0])),
            "parity": parity(contestants, prompts[0]),
            "speed": measure_speed(contestants, prompts, config.rounds),
        }
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
    config = parse(PeersConfig, "bench_peers.py", __doc__)
    with one_line_errors("bench_peers.py"):
        bench(config)


if __name__ == "__main__":
    main()
