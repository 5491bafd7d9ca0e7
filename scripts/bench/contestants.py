"""The contestants: our runtime with a method, transformers, llama.cpp, and gpt-fast.

1. A contestant takes prompts and decodes them one group at a time (`Contestant.start`). An
   `Outcome` says the same of each: new tokens, seconds, and what every cycle accepted.
2. transformers runs the checkpoint, or random weights in the shape of LLaMA-2 7B; so does gpt-fast,
   in its own compiled step, with the files of its repository in a folder that git ignores.
3. llama.cpp reads GGUF files that are written of the same weights (llama_peer.py).

Greedy peers decode the first turn of each prompt and do not stop at an end of sequence.
Random weights say nothing but the rate; those contestants have no tokens to compare.
Not here: in which order they run, and the tables (speed.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from decode import build_cycles
from drafts.by_value import ByValue
from drafts.random_model import raw_config
from model import DTYPES
from run.engine import Engine
from run.generate import Batch, encode
from run.load import with_draft
from run.options import GenerateConfig
from run.stats import Stats, repeated
from run.warm_up import warm_up
from scripts.bench.cases import GPT_FAST_FOLDER, LOOKUP, SpeedOptions
from scripts.bench.common import seconds_of
from scripts.bench.llama_peer import LlamaCpp, decode, gguf_of, lookup

PREFILL_ROWS = 512  # tokens of a pass of llama.cpp
SHAPE = "llama2-7b"  # of random weights
GPT_FAST_SIZES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "dim": "hidden_size",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
GROUP = 32  # gpt-fast's default for int4
ROOM = 512  # tokens that its caches grow by
SHORT = 2  # new tokens of the run of gpt-fast whose time is taken off


@dataclass
class Outcome:
    """One group of prompts, decoded."""

    stats: Stats  # of another runtime: no times of drafting and verifying
    texts: list[list[int]]  # new tokens of each answer
    identical: tuple[bool, ...] = ()  # by answer, where another contestant's tokens are due

    @property
    def rate(self) -> float:
        """Tokens per second; 0 where the first token was the last one."""
        return self.stats.tokens / self.stats.decode_s if self.stats.decode_s else 0.0

    @property
    def accept_lengths(self) -> list[list[int]]:
        """The accepted drafts of every cycle, by sequence; the bonus is not counted."""
        found: dict[int, list[int]] = {}
        sequences = (seq for live in self.stats.live_sequences for seq in live)
        for seq, length in zip(sequences, self.stats.accept_lengths):
            found.setdefault(seq, []).append(length)
        return list(found.values())

    @property
    def repeated(self) -> list[float]:
        """The share of repeated 8-grams, by answer."""
        return [repeated(text) for text in self.texts]


def with_config(engine: Engine, config: GenerateConfig) -> Engine:
    """Return an engine over the same target with other options of drafting, sampling and batching.

    config: checked, with the engine's checkpoint, device and context, and dtype as it was given
    Returns: the engine, warmed up. Raises: ValueError for a draft that does not fit.
    """
    if engine.option("quant") != "none":  # as it was loaded
        config = replace(config, quant=engine.option("quant"))
    engine = with_draft(engine, config, str(engine.device))
    if isinstance(engine.policy, ByValue):
        engine.policy.kept = None  # every prompt is the first request
    return warm_up(build_cycles(engine))


Run = Callable[[int], Outcome]  # decodes a group, by its number
DecodeGroup = Callable[[list[list[int]]], Outcome]  # of prompts as ids


class Contestant(NamedTuple):
    """A runtime with one method."""

    start: Callable[[list[list[str]]], Run]  # takes prompts, as lists of turns
    same_as: str  # the method whose tokens are due; "": none
    engine: Engine | None = None  # of our runtime


def ours(engine: Engine) -> Contestant:
    """Return our runtime with one method."""

    def start(prompts: list[list[str]]) -> Run:
        batch = Batch(engine, prompts)

        def run(number: int) -> Outcome:
            stats = Stats()
            batch.stats = stats
            known = len(batch.entries)
            batch.decode_all(batch.groups[number])
            return Outcome(stats, [entry.tokens for entry in batch.entries[known:]])

        return run

    exact = engine.config.accept == "exact"  # the residual rule draws other tokens
    return Contestant(start, "none" if exact else "", engine)


# ---------------------------------------------------------------------------------- other runtimes


class TokenClock:
    """Notes when tokens reach the host; a streamer of transformers' `generate`."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.puts: list[tuple[float, int]] = []  # (time, tokens)

    def put(self, value: Any) -> None:
        """Note new tokens."""
        now = time.perf_counter()
        count = value.numel() if isinstance(value, Tensor) else len(value)
        self.puts.append((now, count))

    def end(self) -> None:
        """Do nothing: no token is held back."""

    def outcome(self, texts: list[list[int]], skip: int = 0) -> Outcome:
        """Return the times of a run. texts: new tokens; skip: leading calls with the prompts"""
        (first, count), *later = self.puts[skip:]
        tokens = sum(n for _, n in later)
        assert tokens + count == sum(map(len, texts)), (self.puts, texts)
        stats = Stats(
            accept_lengths=[n // len(texts) - 1 for _, n in later for _ in texts],
            live_sequences=[list(range(len(texts)))] * len(later),
            tokens=tokens,
            prefill_s=first - self.began,
            decode_s=later[-1][0] - first if later else 0.0,
        )
        return Outcome(stats, texts)


class Peers:
    """The other runtimes of a setting, each loaded once. Writes: GGUF files to `folder`."""

    def __init__(self, config: SpeedOptions, target: Engine, size: int, folder: Path):
        """target: ours, whose tokenizer and dtype hold; size: prompts of a group"""
        self.config = config
        self.target = target
        self.size = size
        self.folder = folder
        self.llama: dict[str, LlamaCpp] = {}  # by format

    def make(self, name: str) -> Contestant:
        """Return a contestant. Raises: ValueError where its files do not fit."""
        runtime, _, variant = name.partition(":")
        same_as = ""  # random weights have no tokens to compare
        if runtime == "gpt-fast":
            decode_group = run_gpt_fast(self.config)
        elif runtime == "llama.cpp":
            form, _, how = variant.partition(":")
            decode_group = self._llama_cpp(form, how)
            same_as = f"llama.cpp:{form}"
        elif variant == "7b":
            decode_group = run_transformers(random_transformers(self.config.device), self.config)
        else:
            model = load_transformers(self.config, self.target)
            decode_group = run_transformers(model, self.config)
            same_as = "transformers"

        def start(prompts: list[list[str]]) -> Run:
            encoded = [encode(self.target, turns[:1], []) for turns in prompts]

            def run(number: int) -> Outcome:
                first = number * self.size
                return decode_group(encoded[first : first + self.size])

            return run

        return Contestant(start, same_as)

    def _llama_cpp(self, form: str, how: str) -> DecodeGroup:
        """Load llama.cpp on the same weights. how: "" or LOOKUP"""
        config = self.config
        if form not in self.llama:
            file = gguf_of(Path(config.checkpoint), form, self.folder)
            threads = torch.get_num_threads()
            self.llama[form] = LlamaCpp(file, self.target.context, threads, PREFILL_ROWS)
        peer = self.llama[form]
        draft = lookup() if how == LOOKUP else None

        def run(prompts: list[list[int]]) -> Outcome:
            (prompt,) = prompts
            clock = TokenClock()
            return clock.outcome([decode(peer, prompt, config.max_new_tokens, clock, draft)])

        return run


# ------------------------------------------------------------------------------------ transformers


def load_transformers(config: SpeedOptions, target: Engine) -> Any:
    """Load the checkpoint in the target's dtype, so that it stops at no end of sequence."""
    from transformers import AutoModelForCausalLM

    dtype = DTYPES[target.option("dtype")]
    path = Path(config.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(config.device).eval()
    model.generation_config.eos_token_id = None
    return model


def random_transformers(device: str) -> Any:
    """Make a LLaMA of SHAPE with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    raw = raw_config(SHAPE) | dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**raw), dtype=torch.bfloat16)
    return model.eval()


def run_transformers(model: Any, config: SpeedOptions) -> DecodeGroup:
    """Return a function that continues groups of prompts, greedily, with the default cache.

    Shorter prompts are padded on the left, and the padding is masked.
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
            ids % model.config.vocab_size,
            attention_mask=mask,
            max_new_tokens=config.max_new_tokens,
            do_sample=False,
            streamer=clock,
            pad_token_id=0,
        )
        return clock.outcome(out[:, width:].tolist(), skip=1)  # the first call brings the prompts

    return run


# ---------------------------------------------------------------------------------------- gpt-fast


def gpt_fast_modules(folder: str) -> list[ModuleType]:
    """Import gpt-fast's model, quantize and generate, whose names are those of files of ours."""
    names = ("model", "quantize", "generate")
    hidden = {name: sys.modules.pop(name, None) for name in (*names, "tokenizer")}
    tokenizer = ModuleType("tokenizer")  # its own needs tiktoken; the prompts are ids
    tokenizer.get_tokenizer = None
    sys.modules["tokenizer"] = tokenizer
    path = list(sys.path)
    sys.path.insert(0, folder)
    try:
        return [import_module(name) for name in names]
    finally:
        sys.path[:] = path
        for name, module in hidden.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def gpt_fast_model(model: ModuleType, quantize: ModuleType, device: str) -> nn.Module:
    """Make its transformer in int4 with random weights: the time does not depend on them."""
    raw = raw_config(SHAPE)
    sizes = {ours: raw[theirs] for ours, theirs in GPT_FAST_SIZES.items()}
    with torch.device("meta"):
        made = model.Transformer(model.ModelArgs(**sizes))
        made = quantize.WeightOnlyInt4QuantHandler(made, GROUP).convert_for_runtime()
    made = made.to(torch.bfloat16).to_empty(device=device)
    for tensor in (*made.parameters(), *made.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_(0, 0.02)
        else:
            tensor.random_(0, torch.iinfo(tensor.dtype).max)
    return made.eval()


def run_gpt_fast(config: SpeedOptions) -> DecodeGroup:
    """Return its compiled step, sampling as its own benchmark does.

    The time of decoding is that of all new tokens less that of SHORT. inductor tunes its kernels by
    trying their variants: the first run takes minutes.
    """
    model, quantize, generate = gpt_fast_modules(str(GPT_FAST_FOLDER))
    made = gpt_fast_model(model, quantize, config.device)
    if config.device != "cpu":
        step = generate.decode_one_token
        options = {"mode": "reduce-overhead", "fullgraph": True}
        generate.decode_one_token = torch.compile(step, **options)
    vocabulary = raw_config(SHAPE)["vocab_size"]
    options = {"interactive": False, "draft_model": None, "speculate_k": 0}
    options |= {"temperature": 0.8, "top_k": 200}

    room = 0  # of its caches, in tokens

    def seconds(prompt: Tensor, new: int) -> float:
        nonlocal room
        needed = len(prompt) + config.max_new_tokens
        if needed > room:  # its step compiles for each size again
            room = -(-needed // ROOM) * ROOM
            with torch.no_grad(), torch.device(config.device):
                made.setup_caches(max_batch_size=1, max_seq_length=room)

        def run() -> None:
            out, _ = generate.generate(made, prompt, new, 1, **options)
            assert out.shape[1] == len(prompt) + new, out.shape

        return seconds_of(run, config.device)

    def run(prompts: list[list[int]]) -> Outcome:
        (ids,) = prompts
        prompt = torch.tensor(ids, device=config.device, dtype=torch.int) % vocabulary
        first_s = seconds(prompt, SHORT)
        decode_s = seconds(prompt, config.max_new_tokens) - first_s
        tokens = config.max_new_tokens - SHORT
        steps = Stats(accept_lengths=[0] * tokens, live_sequences=[[0]] * tokens)
        return Outcome(replace(steps, tokens=tokens, prefill_s=first_s, decode_s=decode_s), [[]])

    return run
