"""What every architecture must hold: the texts of transformers, and of vanilla decoding whatever drafts.

A test of an architecture gives a directory, and a GGUF file in blocks beside it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from test_qwen3_5 import DRAFTERS, OPTIONS, PROMPTS

from draft_tree import DynamicTree
from drafters import RootOnly
from eagle_draft import EagleDrafter
from files.weights import load_model
from helpers import decode, engine_for
from model import RotaryEmbeddings, Transformer
from quantize import BLOCKS, Quantization
from scripts.train import train_eagle
from tiny_models import GREEDY, IDS, assert_same_config, assert_same_logits, by_passes

FORMS = {
    "float32": lambda path: load_model(path, torch.float32),
    "bfloat16": lambda path: load_model(path, torch.bfloat16),
    "int8": lambda path: load_model(path, torch.bfloat16, quant=Quantization("int8")),
    "int4": lambda path: load_model(path, torch.bfloat16, quant=Quantization("int4", 32)),
    "blocks": lambda path: load_model(path / "m.gguf", quant=Quantization(BLOCKS, saved=True)),
}


def assert_same_file(path: Path, reference, *left_out: str) -> None:
    """Compare the logits and the config of a GGUF file in fp32 with those of its reference. left_out: keys that differ"""
    assert_same_logits(load_model(path), reference)
    assert_same_config(path, reference, {"norm_eps", *left_out})  # fp32 in the file


def assert_same_greedy_text(path: Path, reference) -> None:
    """Compare 64 tokens with those of transformers. Writes: the model into the directory."""
    reference.save_pretrained(path)
    target = load_model(path, torch.float32)
    ours = decode(engine_for(target, RootOnly(), max_new_tokens=64, ignore_eos=True), IDS.tolist())
    theirs = reference.generate(IDS[None], max_new_tokens=64, **GREEDY)
    assert ours.history[0] == theirs[0].tolist()


def assert_same_rows(target: Transformer, in_cpp: bool, bound: float = 0.0) -> None:
    """Compare the logits of passes in C++, of several widths, with those of the steps one by one."""
    for width in (1, 6, len(IDS)):
        target.fuse(False)
        want = by_passes(target, IDS, width)
        target.fuse(True)
        assert (target.program is not None) == in_cpp
        torch.testing.assert_close(by_passes(target, IDS, width), want, atol=bound, rtol=0)
    target.fuse(False)


def random_head(target: Transformer) -> EagleDrafter:
    """An EAGLE head that is not trained; its layer is LLaMA's."""
    head = train_eagle.make_head(train_eagle.TrainConfig(init="feature"), target, [])
    head = head.to(target.norm.weight.dtype).requires_grad_(False)
    head.ropes = RotaryEmbeddings(head.config.model.ropes)  # which stay in fp32
    return EagleDrafter(head, target, DynamicTree(depth=2, topk=4, size=10))


def assert_drafts_as_vanilla(target: Transformer, in_cpp: bool, temperature: float) -> None:
    """Compare the texts of two prompts: of every drafter, and at temperature 0 of each prompt alone.

    in_cpp: whether passes over a cache must run in C++
    """
    options = OPTIONS | {"temperature": temperature, "compile": True}
    vanilla = decode(engine_for(target, RootOnly(), **options), *PROMPTS).history[:2]
    assert (target.program is not None) == in_cpp
    drafters = {name: make(vanilla) for name, make in DRAFTERS.items()}
    for name, drafter in (drafters | {"head": random_head(target)}).items():
        drafted = decode(engine_for(target, drafter, **options), *PROMPTS)
        assert drafted.history[:2] == vanilla, name
        assert name in ("lookup", "head") or max(drafted.stats.accept_lengths) > 1
    if temperature == 0:
        for prompt, text in zip(PROMPTS, vanilla):
            alone = options | {"batch_size": 1}
            assert decode(engine_for(target, RootOnly(), **alone), prompt).history[0] == text
