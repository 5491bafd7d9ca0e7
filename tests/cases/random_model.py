"""Random models in Hugging Face layout, and the memory that loading one takes: run in a process of its own (Linux)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import torch
from safetensors.torch import save_file

from extras.stand_in import Shape
from hf.checkpoint import Quantization
from hf.weights import load_model
from options import ROOT

SAMPLE_S = 0.001  # between two looks at the memory of a process that loads
SHAPE = Shape(  # of 1.1 billion parameters, embedding and LM head included
    "1.1b", dim=2048, n_layers=22, n_heads=32, n_kv_heads=4, head_dim=64, ffn_dim=5632, vocab_size=32000
)  # fmt: skip


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
        save_file(
            {n: _random_weight(n, sizes[n], dtype, generator) for n in names},
            path / file,
            {"format": "pt"},
        )
        index |= dict.fromkeys(names, file)
    total = sum(size.numel() for size in sizes.values()) * dtype.itemsize
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (path / "model.safetensors.index.json").write_text(text)
    return total


def _random_weight(
    name: str, size: torch.Size, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    if len(size) == 1:  # norms
        return torch.ones(size, dtype=dtype)
    return torch.empty(size, dtype=dtype).normal_(
        0, 0.02, generator=generator
    )  # the usual initialization


def loading_memory(path: Path, quant: str = "none") -> tuple[int, int]:
    """Load a model in a fresh process and watch its anonymous memory (what is not backed by the files). Linux only.

    quant: format that it is quantized to while loading, or none
    Returns: peak growth in bytes; bytes of the model.
    Raises: ValueError when the process fails.
    """
    command = [sys.executable, __file__, str(path), quant]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
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


if __name__ == "__main__":
    print(*_watch_loading(*sys.argv[1:]))
