"""Drafters that know the text, the forms of a model, and the checks that several tests of architectures share."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from backends.library import has_cpu_operators
from draft_tree import DynamicTree
from drafters import Drafter, RootOnly
from drafts.ngram_draft import Ngram, NgramDrafter
from eagle_draft import EagleDrafter
from families import FAMILIES
from files.weights import load_model
from helpers import decode, engine_for
from model import RotaryEmbeddings, Transformer
from quantize import BLOCKS, Quantization
from reference import build_tree
from scripts.train import train_eagle
from tiny_models import IDS

OPERATED = has_cpu_operators()  # whether there is a C++ compiler
FORMS = {  # of a directory, with a GGUF file in blocks beside it
    "float32": lambda path: load_model(path, torch.float32),
    "bfloat16": lambda path: load_model(path, torch.bfloat16),
    "int8": lambda path: load_model(path, torch.bfloat16, quant=Quantization("int8")),
    "int4": lambda path: load_model(path, torch.bfloat16, quant=Quantization("int4", 32)),
    "blocks": lambda path: load_model(path / "m.gguf", quant=Quantization(BLOCKS, saved=True)),
}
OPTIONS = {"batch_size": 2, "max_new_tokens": 40, "ignore_eos": True, "seed": 7}
PROMPTS = [IDS[:5].tolist() * 3, IDS.tolist()]  # longer than the windows


def loaded(path: Path, name: str, case: str, form: str) -> Transformer:
    """A case of a family in a form. Writes: its files."""
    family = FAMILIES[name]
    reference = family.of(case)
    reference.save_pretrained(path)
    if form == "blocks":
        family.write(path / "m.gguf", reference, in_blocks=True)
    return FORMS[form](path)


def random_parents(draw: random.Random, size: int, depth: int) -> list[int]:
    """The parents of a tree's nodes, of any form; none is deeper than `depth`."""
    parents, depths = [0], [0]
    for _ in range(1, size):
        inner = [i for i, d in enumerate(depths) if d < depth]
        parents.append(draw.choice(inner))
        depths.append(depths[parents[-1]] + 1)
    return parents


class Oracle(Drafter):
    """Trees of another random form in every cycle; most of their tokens are those that vanilla decodes."""

    width = 9

    def __init__(self, texts: list[list[int]], size: int, depth: int):
        """texts: of the sequences, with their prompts"""
        self.size = size
        self.depth = depth
        longest = max(map(len, texts)) + depth + 1
        self.texts = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        self.draw = random.Random(3)

    def parents(self) -> list[int]:
        return random_parents(self.draw, self.size, self.depth)

    def propose(self, state, inputs):
        pos = inputs.text.pos
        parents = torch.tensor([self.parents() for _ in pos])
        tree = build_tree(parents, parents, torch.ones_like(parents).bool(), self.depth)
        place = (pos[:, None] + tree.depths).clamp(max=self.texts.shape[1] - 1)
        right = self.texts.gather(1, place)
        wrong = [[self.draw.random() < 0.3 for _ in range(self.size)] for _ in pos]
        tokens = torch.where(torch.tensor(wrong), (right + 1) % 96, right)
        tokens[:, 0] = inputs.text.root
        return tree._replace(tokens=tokens)


class Chain(Oracle):
    width = 1

    def parents(self) -> list[int]:
        return [max(0, node - 1) for node in range(self.size)]


DRAFTERS = {
    "tree": lambda texts: Oracle(texts, 16, 5),
    "large tree": lambda texts: Oracle(texts, 60, 8),
    "small tree": lambda texts: Oracle(texts, 3, 5),  # more levels than nodes
    "chain": lambda texts: Chain(texts, 6, 5),
    "lookup": lambda texts: NgramDrafter(Ngram(tokens=5, branches=3)),
}


def random_head(target: Transformer) -> EagleDrafter:
    """An EAGLE head that is not trained; its layer is LLaMA's."""
    head = train_eagle.make_head(train_eagle.TrainConfig(init="feature"), target, [])
    head = head.to(target.norm.weight.dtype).requires_grad_(False)
    head.ropes = RotaryEmbeddings(head.config.model.ropes)  # which stay in fp32
    return EagleDrafter(head, target, DynamicTree(depth=2, topk=4, size=10))


def assert_drafts_as_vanilla(
    target: Transformer, in_cpp: bool, temperature: float, **options: object
) -> None:
    """Compare the texts of two prompts: of every drafter, and at temperature 0 of each prompt alone.

    in_cpp: whether passes over a cache must run in C++
    options: of the engines
    """
    options = OPTIONS | {"temperature": temperature, "compile": True, **options}
    vanilla = decode(engine_for(target, RootOnly(), **options), *PROMPTS).history[:2]
    assert (target.program is not None) == in_cpp
    drafters = {name: make(vanilla) for name, make in DRAFTERS.items()}
    for name, drafter in (drafters | {"head": random_head(target)}).items():
        drafted = decode(engine_for(target, drafter, **options), *PROMPTS)
        assert drafted.history[:2] == vanilla, name
        assert any(line["draft_tokens"] for line in drafted.trace), name
        lengths = drafted.stats.accept_lengths
        if name not in ("lookup", "head"):  # which may miss in a text of a random model
            assert max(lengths) > 1 and sum(lengths) / len(lengths) > 0.5, name
    if temperature == 0:
        for prompt, text in zip(PROMPTS, vanilla):
            alone = options | {"batch_size": 1}
            assert decode(engine_for(target, RootOnly(), **alone), prompt).history[0] == text
