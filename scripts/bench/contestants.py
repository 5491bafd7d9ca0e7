"""The contestants: our runtime with a method, transformers, llama.cpp, and gpt-fast.

1. A contestant takes prompts and decodes them one group at a time (`Contestant.start`). An
   `Outcome` says the same of each: new tokens, seconds, and what every cycle accepted.
2. transformers runs the checkpoint, or random weights in the shape of LLaMA-2 7B; so does gpt-fast,
   in its own compiled step, with the files of its repository in a folder that git ignores.
3. llama.cpp reads GGUF files that are written of the same weights (llama_peer.py).

Greedy peers decode the first turn of each prompt and do not stop at an end of sequence.
Random weights say nothing but the rate; those contestants have no tokens to compare.
Not here: in which order they run, and the tables (speed.py, table.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drafts.random_model import raw_config
from files.io import bundled_head, is_gguf
from model import DTYPES
from run.engine import Engine
from run.generate import Batch, encode
from run.stats import Stats
from scripts import export_head
from scripts.bench.cases import EAGLE3, GPT_FAST_FOLDER, LOOKUP, SpeedOptions
from scripts.bench.common import repeated
from scripts.bench.llama_peer import Eagle3, LlamaCpp, decode, lookup, write_gguf

LOOKUP_TOKENS = 10  # drafted by prompt lookup of transformers
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

    texts: list[list[int]]  # new tokens of each answer
    tokens: int  # after the first ones
    prefill_s: float
    decode_s: float
    cycles: int
    accept_lengths: list[list[int]]  # of every cycle, by sequence; the bonus is not counted
    verify_s: float = 0.0  # 0: unknown
    draft_s: float = 0.0
    identical: tuple[bool, ...] = ()  # by answer, where another contestant's tokens are due

    @property
    def rate(self) -> float:
        """Tokens per second; 0 where the first token was the last one."""
        return self.tokens / self.decode_s if self.decode_s else 0.0

    @property
    def repeated(self) -> list[float]:
        """The share of repeated 8-grams, by answer."""
        return [repeated(text) for text in self.texts]


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
            lengths: dict[int, list[int]] = {}  # accept lengths by sequence
            sequences = (seq for live in stats.live_sequences for seq in live)
            for seq, length in zip(sequences, stats.accept_lengths):
                lengths.setdefault(seq, []).append(length)
            return Outcome(
                texts=[entry.tokens for entry in batch.entries[known:]],
                tokens=stats.tokens,
                prefill_s=stats.prefill_s,
                decode_s=stats.decode_s,
                verify_s=stats.verify_s,
                draft_s=stats.draft_s,
                cycles=len(stats.live_sequences),
                accept_lengths=list(lengths.values()),
            )

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
        decode_s = later[-1][0] - first if later else 0.0
        accepted = [n // len(texts) - 1 for _, n in later]
        lengths = [accepted] * len(texts)
        return Outcome(texts, tokens, first - self.began, decode_s, len(later), lengths)


class Peers:
    """The other runtimes of a setting, each loaded once. Writes: GGUF files to `folder`."""

    def __init__(self, config: SpeedOptions, target: Engine, size: int, folder: Path):
        """target: ours, whose tokenizer and dtype hold; size: prompts of a group"""
        self.config = config
        self.target = target
        self.size = size
        self.folder = folder
        self.llama: dict[tuple[str, bool], LlamaCpp] = {}  # by format, and whether with a head
        self.model: Any = None  # of transformers

    def make(self, name: str) -> Contestant:
        """Return a contestant. Raises: ValueError where its files do not fit."""
        runtime, _, variant = name.partition(":")
        same_as = ""  # random weights have no tokens to compare
        if runtime == "gpt-fast":
            decode_group = run_gpt_fast(variant, self.config)
        elif runtime == "llama.cpp":
            form, _, how = variant.partition(":")
            decode_group = self._llama_cpp(form, how)
            same_as = f"llama.cpp:{form}"
        elif variant == "7b":
            decode_group = run_transformers(random_transformers(self.config.device), self.config)
        else:
            self.model = self.model or load_transformers(self.config, self.target)
            drafting = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if variant else {}
            decode_group = run_transformers(self.model, self.config, **drafting)
            same_as = "transformers"

        def start(prompts: list[list[str]]) -> Run:
            encoded = [encode(self.target, turns[:1], []) for turns in prompts]

            def run(number: int) -> Outcome:
                first = number * self.size
                return decode_group(encoded[first : first + self.size])

            return run

        return Contestant(start, same_as)

    def _llama_cpp(self, form: str, how: str) -> DecodeGroup:
        """Load llama.cpp on the same weights. how: "", LOOKUP or EAGLE3"""
        config = self.config
        threads = torch.get_num_threads()
        key = (form, how == EAGLE3)  # beside a head its target also hands out layers' inputs
        if key not in self.llama:
            file = gguf_of(Path(config.checkpoint), form, self.folder)
            self.llama[key] = LlamaCpp(file, self.target.context, threads, PREFILL_ROWS)
        peer = self.llama[key]
        draft = lookup() if how == LOOKUP else None
        head = None
        if how == EAGLE3:
            head = Eagle3(peer, eagle3_file(config, self.folder), threads)
            draft = head.draft

        def run(prompts: list[list[int]]) -> Outcome:
            (prompt,) = prompts
            if head:
                head.begin()
            clock = TokenClock()
            return clock.outcome([decode(peer, prompt, config.max_new_tokens, clock, draft)])

        return run


def gguf_of(checkpoint: Path, form: str, folder: Path) -> Path:
    """Return a GGUF file of a checkpoint's weights. Writes: the file, if missing."""
    if form == "file":
        return checkpoint
    file = folder / f"{checkpoint.resolve().name}-{form}.gguf"
    if not file.exists():
        write_gguf(checkpoint, file, form)
    return file


def eagle3_file(config: SpeedOptions, folder: Path) -> Path:
    """Return our head as a GGUF file, one of a directory in q8_0. Writes: that file.

    Raises: ValueError where there is no head.
    """
    target = Path(config.checkpoint)
    head = Path(config.head) if config.head else bundled_head(target)
    if is_gguf(head):
        return head
    if not head.is_dir():
        raise ValueError(f"llama.cpp:...:{EAGLE3} needs a head; name it with --head")
    file = folder / f"{head.resolve().name}-q8_0.gguf"
    if not file.exists():
        export_head.write_gguf(export_head.read(head, target), file, "q8_0")
    return file


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


def run_transformers(model: Any, config: SpeedOptions, **options: Any) -> DecodeGroup:
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
            ids % model.config.vocab_size,
            attention_mask=mask,
            max_new_tokens=config.max_new_tokens,
            do_sample=False,
            streamer=clock,
            pad_token_id=0,
            **options,
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


def random_values(name: str, like: Tensor, device: str) -> Tensor:
    """Make values for a tensor of gpt-fast's: scales are small, norms 1, words any."""
    if not like.dtype.is_floating_point:
        bits = torch.iinfo(like.dtype)
        return torch.empty(like.shape, dtype=like.dtype, device=device).random_(0, bits.max)
    values = torch.empty(like.shape, dtype=torch.bfloat16, device=device)
    if name == "weight" and like.dim() == 1:
        return values.fill_(1)
    values.normal_(0, 0.02)
    return values.abs_().mul_(0.1) if "scale" in name else values


def gpt_fast_model(model: ModuleType, quantize: ModuleType, form: str, device: str) -> nn.Module:
    """Make its transformer with random weights. form: bf16, int8, int4 or int4-GROUP"""
    raw = raw_config(SHAPE)
    sizes = {ours: raw[theirs] for ours, theirs in GPT_FAST_SIZES.items()}
    with torch.device("meta"):
        made = model.Transformer(model.ModelArgs(**sizes))
        bits, _, group = form.partition("-")
        if bits == "int8":
            made = quantize.WeightOnlyInt8QuantHandler(made).convert_for_runtime()
        if bits == "int4":
            handler = quantize.WeightOnlyInt4QuantHandler(made, int(group or GROUP))
            made = handler.convert_for_runtime()
    for module in made.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            values = random_values(name, weight, device)
            setattr(module, name, nn.Parameter(values, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, random_values(name, buffer, device))
    return made.eval()


def run_gpt_fast(form: str, config: SpeedOptions) -> DecodeGroup:
    """Return its compiled step, sampling as its own benchmark does.

    The time of decoding is that of all new tokens less that of SHORT. inductor tunes its kernels by
    trying their variants: the first run takes minutes.
    """
    model, quantize, generate = gpt_fast_modules(str(GPT_FAST_FOLDER))
    made = gpt_fast_model(model, quantize, form, config.device)
    if config.device != "cpu":
        step = generate.decode_one_token
        options = {"mode": "reduce-overhead", "fullgraph": True}
        generate.decode_one_token = torch.compile(step, **options)
    vocabulary = raw_config(SHAPE)["vocab_size"]
    options = {"interactive": False, "draft_model": None, "speculate_k": 0}
    options |= {"temperature": 0.8, "top_k": min(200, vocabulary)}
    room = 0  # of its caches, in tokens

    def seconds(prompt: Tensor, new: int) -> float:
        nonlocal room
        needed = len(prompt) + config.max_new_tokens
        if needed > room:  # its step compiles for each size again
            room = -(-needed // ROOM) * ROOM
            with torch.no_grad(), torch.device(config.device):
                made.setup_caches(max_batch_size=1, max_seq_length=room)
        wait_for(config.device)
        began = time.perf_counter()
        out, _ = generate.generate(made, prompt, new, 1, **options)
        wait_for(config.device)
        assert out.shape[1] == len(prompt) + new, out.shape
        return time.perf_counter() - began

    def run(prompts: list[list[int]]) -> Outcome:
        (ids,) = prompts
        prompt = torch.tensor(ids, device=config.device, dtype=torch.int) % vocabulary
        first_s = seconds(prompt, SHORT)
        decode_s = seconds(prompt, config.max_new_tokens) - first_s
        tokens = config.max_new_tokens - SHORT
        return Outcome([[]], tokens, first_s, decode_s, tokens, [[0] * tokens])

    return run


def wait_for(device: str) -> None:
    """Wait until a device has done its work."""
    if device != "cpu":
        torch.cuda.synchronize()
