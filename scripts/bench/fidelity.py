"""The fidelity of every weight format: how close its logits lie to those of the file's own weights.

1. The reference is the checkpoint's weights in fp32, with PyTorch's operators. Every other row is
   loaded as a user loads it, and reads a whole prompt in one pass over a cache. llama.cpp reads the
   same GGUF file, where its Python package is installed. `--also` adds directories that others
   quantized.
2. Logits are centred, as a constant changes no choice. `rms` is the root mean square of the
   difference, `best` the share of positions with the same best token, `KL` the mean of
   KL(reference || row) in nats, `ppl` the perplexity of the prompts themselves.
3. `--questions` counts right answers of greedy decoding with the model's own chat template.

Prompts: the first turns of bundled texts, or pieces of `--text`, up to TOKENS each, all positions.
Not here: the change of tau (speed.py, as `--methods eagle:dynamic:quant_draft=int4`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from files.config import read_config
from files.fetch import fetched
from files.io import is_gguf
from files.tokenizer import Tokenizer
from files.weights import load_model
from kv_cache import KVCache, causal_window
from model import Transformer
from run.engine import Engine
from run.library import generate
from run.load import load
from run.options import ROOT
from scripts.bench.cases import FidelityOptions, shown_path
from scripts.bench.common import Report, pivot
from scripts.bench.llama_peer import LlamaCpp

TASKS = ("gsm8k", "humaneval", "mt_bench", "edit")
TOKENS = 200  # of a prompt, at most
QUESTIONS = ROOT / "data/eval/questions.jsonl"
ANSWER_TOKENS = 40
ANSWERS = {"right answers": "{right} of {of}"}
SHOWN = {  # against the weights in fp32
    "rms": "{rms:.3f}",
    "best token equal": "{best:.1%}",
    "KL": "{kl:.5f}",
    "perplexity": "{ppl:.3f}",
}


def read_prompts(tokenizer: Tokenizer, each: int, text: str) -> list[list[int]]:
    """Return the ids of `each` prompts of every task, or pieces of every file.

    text: names of files, or ""; Raises: ValueError for one that cannot be read or is too short.
    """
    prompts = []
    for name in text.split(",") if text else ():
        try:
            ids = tokenizer.encode(Path(name).read_text(encoding="utf-8"), bos=True)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--text: cannot read {name} ({type(error).__name__})") from None
        if len(ids) < TOKENS:
            raise ValueError(f"--text: {name} has {len(ids)} tokens; give it {TOKENS} or more")
        ends = range(TOKENS, len(ids) + 1, TOKENS)
        prompts += [ids[end - TOKENS : end] for end in ends[:each]]
    if text:
        return prompts
    for task in TASKS:
        lines = (ROOT / f"data/eval/{task}.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["turns"][0] for line in lines[5 : 5 + each]]
        prompts += [tokenizer.encode(text, bos=True)[:TOKENS] for text in texts]
    return prompts


def logits_of(model: Transformer, prompts: list[list[int]], dtype: torch.dtype) -> list[Tensor]:
    """Return the logits of every prompt, [T, V] fp32 each, by one pass over a cache of a dtype."""
    logits = []
    for prompt in prompts:
        cache = KVCache.empty(model.config, 1, len(prompt), dtype, "cpu")
        window = causal_window(torch.zeros(1, dtype=torch.long), len(prompt))
        features = model(torch.tensor([prompt]), window.slots, cache, window)
        logits.append(model.logits(features)[0])
    return logits


def llama_logits(file: Path, prompts: list[list[int]], kv: str = "") -> list[Tensor]:
    """Return llama.cpp's logits of every prompt, [T, V] fp32 each. kv: of `LlamaCpp`"""
    peer = LlamaCpp(file, TOKENS, torch.get_num_threads(), TOKENS, kv=kv)
    logits = [torch.from_numpy(peer.feed(prompt, 0, every=True).copy()) for prompt in prompts]
    peer.close()
    return logits


def compare_logits(
    reference: list[Tensor], logits: list[Tensor], prompts: list[list[int]]
) -> dict[str, float]:
    """Compare logits with the reference's, [T, V] of every prompt, over all positions."""
    squares = best = divergence = loss = 0.0
    positions = sum(map(len, prompts))
    for want, got, prompt in zip(reference, logits, prompts):
        off = got - want
        squares += (off - off.mean(-1, keepdim=True)).square().mean(-1).sum().item()
        p = want.log_softmax(-1)
        q = got.log_softmax(-1)
        divergence += (p.exp() * (p - q)).sum().item()
        best += (p.argmax(-1) == q.argmax(-1)).sum().item()
        loss -= q[:-1].gather(1, torch.tensor(prompt[1:])[:, None]).sum().item()
    return {
        "rms": math.sqrt(squares / positions),
        "best": best / positions,
        "kl": divergence / positions,
        "ppl": math.exp(loss / (positions - len(prompts))),
    }


# ------------------------------------------------------------------------------------------ formats


def formats(path: Path, also: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the formats of a checkpoint: names, and the options that give them.

    Raises: ValueError for a directory of `also` that is of another model.
    """
    own = {"checkpoint": str(path)}
    if is_gguf(path):
        yield "the file's own bits", own
        yield "the file's own bits, --kv int8", own | {"kv": "int8"}
    yield "bfloat16", own | {"dtype": "bfloat16"}
    yield "bfloat16, --kv int8", own | {"dtype": "bfloat16", "kv": "int8"}
    for quant in ("int8", "int4"):
        yield f"--quant {quant}", own | {"quant": quant}
    for each in filter(None, also.split(",")):
        sizes = [read_config(of).vocab_size for of in (Path(each), path)]
        if sizes[0] != sizes[1]:
            tokens = f"has {sizes[0]} tokens and {path} has {sizes[1]}"
            raise ValueError(f"--also {each} {tokens}; name a copy of it")
        yield Path(each).resolve().name, {"checkpoint": each}


@torch.inference_mode()
def of_logits(path: Path, config: FidelityOptions) -> Iterator[tuple[str, dict]]:
    """Yield every format, and llama.cpp where it can run, with its distance from fp32."""
    prompts = read_prompts(Tokenizer.load(path), config.prompts, config.text)
    reference = logits_of(load_model(path, torch.float32), prompts, torch.float32)
    for name, engine in engines(path, config.also):
        logits = logits_of(engine.target, prompts, engine.kv_dtype)
        yield name, compare_logits(reference, logits, prompts)
    if is_gguf(path):
        try:
            for name, kv in (("llama.cpp", ""), ("llama.cpp, -ctk q8_0 -ctv q8_0", "q8_0")):
                yield name, compare_logits(reference, llama_logits(path, prompts, kv), prompts)
        except ImportError:
            print("note: llama-cpp-python is not installed; no row of llama.cpp")


def engines(path: Path, also: str) -> Iterator[tuple[str, Engine]]:
    """Yield the formats of a checkpoint, loaded one after the other."""
    for name, options in tqdm(list(formats(path, also)), unit="format"):
        yield name, load(draft="none", device="cpu", max_new_tokens=ANSWER_TOKENS, **options)


# ---------------------------------------------------------------------------------------- questions


def is_right(text: str, accepted: list[str]) -> bool:
    """Return whether an answer holds one of the accepted ones as whole words, in any case."""
    words = re.sub(r"[^\w\s.]", " ", text.lower())
    return any(re.search(rf"(?<!\w){re.escape(a.lower())}(?!\w)", words) for a in accepted)


def of_questions(path: Path, config: FidelityOptions) -> Iterator[tuple[str, dict]]:
    """Yield every format with its right answers."""
    lines = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    for name, engine in engines(path, config.also):
        texts = [generate(engine, [line["turns"][0]]).text[0] for line in lines]
        right = [is_right(text, line["accepted"]) for text, line in zip(texts, lines)]
        answers = dict(zip((line["id"] for line in lines), texts))
        yield name, {"right": sum(right), "of": len(lines), "texts": answers}


def run(config: FidelityOptions) -> None:
    """Measure and print everything."""
    path = fetched(config.checkpoint)
    report = Report(config.json, threads=config.threads, checkpoint=shown_path(str(path)))
    measure, shown = (of_questions, ANSWERS) if config.questions else (of_logits, SHOWN)
    cells = {}
    for name, row in measure(path, config):
        report.add({"row": name} | row)
        cells |= {(name, what): form.format(**row) for what, form in shown.items()}
    print(pivot("format", cells))
