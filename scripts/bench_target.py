"""Measure plain decoding on a random model: compiled, eager, and `generate` of Hugging Face transformers.

    python scripts/bench_target.py --shape 0.8b
    python scripts/bench_target.py --shape 0.8b --memory --peers none --threads 4

How it works:
1. The read bandwidth of the device is measured first: it is the ceiling, since every step reads every weight once.
2. A model of random weights is written to a temporary directory in Hugging Face layout, shard by shard; everybody
   loads the same files. With `--memory` a fresh process loads them and its anonymous memory is sampled.
3. Speed: the contestants continue the same prompt by the same number of tokens, in turn, run after run. A step is
   the mean time of a token after the first; ratios are taken within a run, between neighbours in time.
4. Capacity: the compiled step with a small cache, with a large one and the same text, and with a large one almost
   full. Where a step reads only the used part of the cache, only the last costs more.

Random weights cost the same time per step as trained ones, since nothing in a plain step depends on their values;
their text is no text, and ties are near, so bf16 contestants soon part ways (`same tokens` counts until then).
Not here: drafting, quantization, batches, prompts of text.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import _path
from bench_peers import make_transformers
from checkpoint import Quantization
from decode import Engine, with_cycles
from drafters import RootOnly
from extras.stand_in import Shape
from hf.weights import load_model
from load import warm_up
from measure import Series, environment, in_turn, pass_bytes, read_bandwidth, run_rows
from model import DTYPES, Transformer
from options import GenerateConfig, common_prefix, one_line_errors, option, parse, pick_device
from session import Session
from stats import peak_memory_bytes

SAMPLE_S = 0.001  # between two looks at the memory of a process that loads


SHAPES = {  # parameters, embedding and LM head included
    shape.name: shape
    for shape in (
        Shape("tiny", dim=128, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, ffn_dim=256, vocab_size=512),  # 0.4 M
        Shape("0.5b", dim=1536, n_layers=16, n_heads=24, n_kv_heads=8, head_dim=64, ffn_dim=4096, vocab_size=32000),
        Shape("0.8b", dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64, ffn_dim=5632, vocab_size=32000),
        Shape("1.1b", dim=2048, n_layers=22, n_heads=32, n_kv_heads=4, head_dim=64, ffn_dim=5632, vocab_size=32000),
    )
}


@dataclass(frozen=True)
class BenchConfig:
    """Options. Units and effects are in the help texts."""

    shape: str = option("0.8b", "size of the random model, by parameters", tuple(SHAPES))
    dtype: str = option("bfloat16", "of weights, activations and cache", tuple(DTYPES))
    tokens: int = option(48, "new tokens per run, the first (from prefill, not counted in a step) included")
    runs: int = option(5, "measured runs per contestant, after one to warm up; at least 5")
    capacity: int = option(4096, "slots of the key-value cache in tokens")
    used: int = option(300, "prompt tokens")
    long_used: int = option(3500, "prompt tokens of the run that almost fills the capacity")
    peers: str = option("transformers", "whom to compare with", ("transformers", "none"))
    memory: bool = option(False, "measure the peak of anonymous memory while loading (Linux)")
    threads: int = option(0, "CPU threads; 0 leaves torch's default")
    device: str = option("", "cpu or cuda; default: cuda if there is one")
    seed: int = option(0, "of weights and prompts")

    def check(self) -> None:
        """Raises: ValueError for a value that cannot work."""
        if self.runs < 5:
            raise ValueError(f"--runs must be at least 5, for a median with a spread; it is {self.runs}")
        if self.tokens < 2:
            raise ValueError(f"--tokens must be at least 2: a step is timed after the first; it is {self.tokens}")
        for name in ("used", "long_used"):
            if not 1 <= getattr(self, name) <= self.capacity - self.tokens:
                raise ValueError(
                    f"--{name} and --tokens must fit --capacity {self.capacity}: 1 to {self.capacity - self.tokens} "
                    f"with {self.tokens} tokens; it is {getattr(self, name)}"
                )

    @property
    def points(self) -> list[tuple[int, int]]:
        """(capacity, prompt tokens) of the capacity section; the first is the smallest power of two that fits."""
        small = 1 << (self.used + self.tokens - 1).bit_length()
        return [(min(small, self.capacity), self.used), (self.capacity, self.used), (self.capacity, self.long_used)]


# ------------------------------------------------------------------------------------- model and memory


def write_random_model(
    path: Path, shape: Shape, dtype: torch.dtype, shard_bytes: int = 500_000_000, seed: int = 0
) -> int:
    """Write a LLaMA of random weights in Hugging Face layout. Never more than one shard is in memory.

    shard_bytes: a shard is closed before it would grow beyond this
    Returns: the bytes of its parameters. Writes: `path`.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.dim, intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.n_layers, num_attention_heads=shape.n_heads, num_key_value_heads=shape.n_kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=2**17, bos_token_id=None, eos_token_id=None,
        architectures=["LlamaForCausalLM"], dtype=str(dtype).removeprefix("torch."),
    )  # fmt: skip
    config.save_pretrained(path)
    with torch.device("meta"):
        sizes = {name: p.shape for name, p in LlamaForCausalLM(config).state_dict().items()}
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, size in sizes.items():
        need = size.numel() * dtype.itemsize
        if need > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= need
    generator, index = torch.Generator().manual_seed(seed), {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({n: _random_weight(n, sizes[n], dtype, generator) for n in names}, path / file, {"format": "pt"})
        index |= dict.fromkeys(names, file)
    total = sum(size.numel() for size in sizes.values()) * dtype.itemsize
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (path / "model.safetensors.index.json").write_text(text)
    return total


def _random_weight(name: str, size: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if len(size) == 1:  # norms
        return torch.ones(size, dtype=dtype)
    return torch.empty(size, dtype=dtype).normal_(0, 0.02, generator=generator)  # the usual initialization


def loading_memory(path: Path, quant: str = "none") -> tuple[int, int]:
    """Load a model in a fresh process and watch its anonymous memory (what is not backed by the files). Linux only.

    quant: format that it is quantized to while loading, or none
    Returns: peak growth in bytes; bytes of the model.
    Raises: ValueError when the process fails.
    """
    child = "import sys, bench_target; print(*bench_target._watch_loading(*sys.argv[1:]))"
    command = [sys.executable, "-c", child, str(path), quant]
    done = subprocess.run(command, cwd=_path.ROOT / "scripts", capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"loading {path} failed: {done.stderr.strip().splitlines()[-1]}")
    peak_bytes, model_bytes = map(int, done.stdout.split())
    return peak_bytes, model_bytes


def _watch_loading(path: str, quant: str) -> tuple[int, int]:
    before = _anonymous_bytes()
    peak, loaded = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not loaded.wait(SAMPLE_S):
            peak = max(peak, _anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    model = load_model(Path(path), quant=Quantization(quant) if quant != "none" else None)
    loaded.set()
    thread.join()
    peak = max(peak, _anonymous_bytes())
    return peak - before, sum(t.nbytes for t in model.state_dict().values())


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/self/status has no RssAnon; --memory needs Linux 4.5 or later")


# ------------------------------------------------------------------------------------------ contestants


def make_engine(config: BenchConfig, target: Transformer, capacity: int, compile: bool) -> Engine:
    """Our runtime, warmed up. Raises: ValueError when it cannot compile."""
    options = GenerateConfig(
        draft="none", max_new_tokens=config.tokens, ignore_eos=True, context=capacity, compile=compile,
        device=config.device, dtype=config.dtype,
    )  # fmt: skip
    engine = warm_up(with_cycles(Engine(options, target, RootOnly(), capacity, eos_ids=())))
    if engine.config.compile != compile:
        raise ValueError("--compile does not work here; see the note above")
    return engine


# ------------------------------------------------------------------------------------------ measurement


def measure_speed(config: BenchConfig, target: Transformer, path: Path, prompt: list[int]) -> dict[str, Any]:
    """Time the contestants in turn. Returns: what is known of each; `ratios` of step times; `compile_s`."""
    engines = {name: make_engine(config, target, config.capacity, name == "compiled") for name in ("eager", "compiled")}
    contestants = {n: lambda e=engine: run_rows(Session(e, [(0, 0)]), [prompt]) for n, engine in engines.items()}
    if config.peers == "transformers":
        peer = make_transformers(path, config.dtype, config.device, config.tokens)
        contestants["transformers"] = lambda: peer([prompt])
    outcomes = in_turn(contestants, config.runs, "speed")
    steps = {name: [o.step_s for o in done] for name, done in outcomes.items()}
    reference = outcomes["eager"][0].rows[0]
    rows = {
        name: {
            "step_s": Series.of(steps[name])._asdict(),
            "first_s": Series.of([o.first_s for o in done])._asdict(),
            "tokens_per_s": Series.of([1 / s for s in steps[name]])._asdict(),
            "same_tokens": common_prefix(reference, done[0].rows[0]),
        }
        for name, done in outcomes.items()
    }
    ratios = {
        name: Series.of([s / ours for s, ours in zip(steps[name], steps["compiled"])])._asdict()
        for name in steps
        if name != "compiled"
    }
    return {"rows": rows, "compiled_is_faster_by": ratios, "compile_s": engines["compiled"].compile_s}


def measure_capacity(config: BenchConfig, target: Transformer, prompt: list[int]) -> list[dict[str, Any]]:
    """Time the compiled step per point of `config.points`; prompts stay cached from run to run."""
    torch.compiler.reset()  # else every step would first try the graphs of other engines
    capacities = dict.fromkeys(capacity for capacity, _ in config.points)
    engines = {capacity: make_engine(config, target, capacity, True) for capacity in capacities}
    contestants = {}
    for capacity, used in config.points:
        session = Session(engines[capacity], [(0, 0)])
        contestants[f"{capacity}/{used}"] = lambda s=session, n=used: run_rows(s, [prompt[:n]])
    outcomes = in_turn(contestants, config.runs, "capacity")
    return [
        {"capacity": capacity, "used": used, "step_s": Series.of([o.step_s for o in done])._asdict()}
        for (capacity, used), done in zip(config.points, outcomes.values())
    ]


# ----------------------------------------------------------------------------------------------- report


def report_lines(result: dict[str, Any]) -> Iterator[str]:
    """The tables. Times are medians with their range."""
    speed = result["speed"]
    yield f"{'':14}{'ms per token':>24}{'tokens/s':>10}{'of ceiling':>12}{'first token ms':>28}{'same tokens':>13}"
    for name, row in speed["rows"].items():
        step, first, rate = Series(**row["step_s"]), Series(**row["first_s"]), Series(**row["tokens_per_s"]).median
        share = f"{100 * result['step_bytes'] * rate / result['ceiling_bytes_per_s']['median']:.0f} %"
        same = f"{row['same_tokens']}/{result['config']['tokens']}"
        yield f"{name:14}{step.text(1e3, 2):>24}{rate:>10.1f}{share:>12}{first.text(1e3, 0):>28}{same:>13}"
    for name, ratio in speed["compiled_is_faster_by"].items():
        yield f"compiled is {Series(**ratio).text(1, 2)} times as fast as {name}"
    yield f"compile {speed['compile_s']:.1f} s, not counted above"
    yield ""
    yield f"{'capacity':>8}{'used':>8}{'ms per token':>24}"
    for row in result["capacity"]:
        yield f"{row['capacity']:>8}{row['used']:>8}{Series(**row['step_s']).text(1e3, 2):>24}"
    if "loading" in result:
        yield ""
        yield "loading: peak anonymous memory {peak_bytes:,} bytes, {ratio:.3f} of the model".format(
            **result["loading"]
        )
    yield f"peak memory of the whole benchmark {result['peak_memory_bytes'] / 1e9:.2f} GB"


def header_lines(config: BenchConfig, machine: dict[str, Any], ceiling: Series) -> Iterator[str]:
    """What must be known before any number is read."""
    yield ", ".join(f"{key} {value}" for key, value in machine.items())
    yield f"dtype {config.dtype}, quantization none, random prompts, B = 1, T = 0, greedy, no drafting"
    yield f"read bandwidth {ceiling.text(1e-9, 1)} GB/s: the ceiling"


def bench(config: BenchConfig) -> None:
    """Measure and print everything."""
    config.check()
    config = BenchConfig(**(asdict(config) | {"device": pick_device(config.device)}))
    if config.threads:
        torch.set_num_threads(config.threads)
    packages = ["transformers"] if config.peers == "transformers" else []
    machine, ceiling = environment(config.device, *packages), read_bandwidth(config.device, config.runs)
    print("\n".join(header_lines(config, machine, ceiling)), flush=True)
    generator = torch.Generator().manual_seed(config.seed)
    longest = max(config.used, config.long_used)
    prompt = torch.randint(0, SHAPES[config.shape].vocab_size, (longest,), generator=generator).tolist()
    result: dict[str, Any] = {"config": asdict(config), "environment": machine}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        size = write_random_model(path, SHAPES[config.shape], DTYPES[config.dtype], seed=config.seed)
        print(f"model {config.shape}: {size:,} bytes of random weights\n", flush=True)
        if config.memory:
            peak_bytes, model_bytes = loading_memory(path)
            result["loading"] = {"peak_bytes": peak_bytes, "ratio": peak_bytes / model_bytes}
        target = load_model(path, device=config.device)
        result |= {
            "model_bytes": size,
            "ceiling_bytes_per_s": ceiling._asdict(),
            "step_bytes": pass_bytes(target, config.used + config.tokens / 2),
            "speed": measure_speed(config, target, path, prompt[: config.used]),
            "capacity": measure_capacity(config, target, prompt),
            "peak_memory_bytes": peak_memory_bytes(config.device),
        }
    print("\n".join(report_lines(result)))
    print(json.dumps(result))


def main() -> None:
    """The command line."""
    config = parse(BenchConfig, "bench_target.py", __doc__)
    with one_line_errors("bench_target.py"):
        bench(config)


if __name__ == "__main__":
    main()
