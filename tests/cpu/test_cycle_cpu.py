"""Decoding with --compile on a CPU: a cycle is few operators, and gives the tokens of the modules of model.py."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from test_layers_cpu import HEADS, drafter_of, model

from backends.library import has_cpu_operators
from draft_tree import EAGLE1_PATHS, DynamicTree, StaticTree
from drafters import Drafter, RootOnly
from drafts.by_value import beside
from drafts.model_draft import ModelDrafter
from drafts.ngram_draft import Ngram, NgramDrafter
from eagle_draft import EagleDrafter
from helpers import Operators, decode, engine_for, slow
from model import Transformer
from run.engine import Engine
from run.library import generate
from run.options import Sampling
from run.session import Session

pytestmark = pytest.mark.skipif(not has_cpu_operators(), reason="needs the CPU operators")

# operators of a cycle: without a tree; with one, and for each drafted level of it
VANILLA, BASE, LEVEL = 15, 12, 6
TREES = {
    "chain 1": StaticTree.chain(1), "chain 3": StaticTree.chain(3),
    "dynamic 5/3/8": DynamicTree(5, 3, 8), "dynamic 6/4/16": DynamicTree(6, 4, 16),
    "static": StaticTree(EAGLE1_PATHS),
}  # fmt: skip
EAGLES = ("2", "3", "3 normed twice", "3 fed", "3 without aux_layers")  # of HEADS
RULES = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "cut": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
}
LOOP = [5, 6, 7, 8, 9] * 3


MIXED = [Sampling(), Sampling(0.6, top_k=20), Sampling(1.0), Sampling(0.8, top_p=0.7)]


def operators_of(engine: Engine, preset: int, each: list[Sampling] = ()) -> Counter:
    """The operators of a cycle of a preset, behind some others. each: of the sequences that differ"""
    session = Session(engine)
    for seq, own in enumerate(each):
        session.configure(seq, own, 7 + seq)
    decoding = session.decode_turn([LOOP] * engine.config.batch_size)
    for _ in range(3):
        next(decoding)
    for _ in range(2):  # before the second nothing is left to take in
        with Operators() as counted, torch.no_grad():
            session._launch(preset)
    return counted.calls


def eagle(kind: str, tree: str, **options) -> EagleDrafter:
    return EagleDrafter(drafter_of(HEADS[kind]).head, target(), TREES[tree], **options)


@cache
def target() -> Transformer:
    return model()


def compiled_engine(drafter: Drafter, batch: int, rule: dict) -> Engine:
    options = {"compile": True, "ignore_eos": True, "trace": "", **rule}
    return engine_for(target(), drafter, batch_size=batch, **options)


def check_counts(drafter: Drafter, batch: int, rule: dict, each: list[Sampling] = ()) -> None:
    """Every preset of a drafter stays within the bounds."""
    engine = compiled_engine(drafter, batch, rule)
    for number, preset in enumerate(engine.presets):
        met = operators_of(engine, number, each)
        depth = max(preset.depth, 2) if isinstance(preset, NgramDrafter) else preset.depth
        bound = BASE + LEVEL * depth if preset.size > 1 else VANILLA
        if getattr(preset, "growth", None) is not None:  # it makes noise level by level
            bound += 2 * depth
        assert met.total() <= bound, (preset.name, batch, rule, met.total(), met)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
class TestFewOperators:
    """Without a tree, and with every kind of drafter and tree."""

    @pytest.mark.parametrize("kind", EAGLES)
    def test_heads(self, kind, rule, batch):
        for tree in TREES if kind in ("2", "3") else ("chain 1", "dynamic 5/3/8"):
            check_counts(eagle(kind, tree), batch, rule)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_mixed_batch_has_as_few(rule):
    """The engine's own parameters do not matter; where all is greedy, nothing of sampling runs."""
    made = {
        "vanilla": RootOnly(),
        "ngram": NgramDrafter(Ngram(2, 2)),
        "auto": beside(eagle("2", "dynamic 6/4/16")),
        "chain": eagle("3", "chain 3"),
        "model": ModelDrafter(target(), target(), TREES["chain 3"]),
    }
    for drafter in made.values():
        check_counts(drafter, 4, rule, MIXED)
    engine = compiled_engine(made["chain"], 4, rule)
    sampled = {"gumbel", "cut"}
    assert sampled <= operators_of(engine, 0, MIXED).keys()
    assert not sampled & operators_of(engine, 0, [Sampling()] * 4).keys()


# ------------------------------------------------------------------------------------------- tokens


def drafters() -> dict[str, Drafter]:
    made = {f"{kind} {tree}": eagle(kind, tree) for kind in ("2", "3") for tree in TREES}
    made |= {kind: eagle(kind, "dynamic 5/3/8") for kind in EAGLES[2:]}
    made["ngram"] = NgramDrafter(Ngram(3, 2))
    made["eagle+ngram"] = Ngram(4, 1).graft_on(eagle("2", "dynamic 5/3/8"))
    made["auto"] = beside(eagle("2", "dynamic 5/3/8"))
    made["topk"] = eagle("3", "static", children="topk", sharpness=1.7)
    return made | {"model": ModelDrafter(target(), target(), TREES["static"])}


@pytest.mark.parametrize("rule, batch", [("greedy", 1), ("sampled", 3), ("cut", 1)])
def test_every_cycle_is_the_modules(rule, batch):
    """The trees, what is accepted of them, and the tokens, which are vanilla's; in bf16, where all is bit for bit."""
    options = {
        "batch_size": batch,
        "max_new_tokens": 8,
        "ignore_eos": True,
        "seed": 5,
        **RULES[rule],
    }
    prompts = [LOOP, [3, 1, 4], [0]][:batch]
    want = decode(engine_for(target(), RootOnly(), **options), *prompts).history
    for name, drafter in {"vanilla": RootOnly(), **drafters()}.items():
        engines = (engine_for(target(), drafter, compile=c, **options) for c in (False, True))
        plain, ours = (decode(engine, *prompts) for engine in engines)
        assert plain.history == ours.history == want, name
        traces = [[without_time(line) for line in each.trace] for each in (plain, ours)]
        assert traces[0] == traces[1], name


@pytest.mark.parametrize("batch", [3, *slow([2, 4])])
def test_a_mixed_batch_is_each_alone(batch):
    """In bf16, where all is bit for bit; the modules of a few drafters, as cycles are theirs (above)."""
    prompts = [LOOP, [3, 1, 4], [0], [9, 9, 2], LOOP[:7], [5]]
    each = [*MIXED, Sampling(), Sampling(1.3)]
    options = {"max_new_tokens": 10, "ignore_eos": True}
    names = ("temperature", "top_k", "top_p")
    mixed = {name: [getattr(own, name) for own in each] for name in names}
    mixed["seed"] = list(range(6))
    want = []
    for number, own in enumerate(each):
        engine = engine_for(target(), RootOnly(), seed=number, **own._asdict(), **options)
        session = Session(engine, [(number, 0)])
        list(session.decode_turn([prompts[number]]))
        want.append(session.history[0][len(prompts[number]) :])
    for name, drafter in {"vanilla": RootOnly(), **drafters()}.items():
        for compile in (False, True) if name in ("vanilla", "3 chain 3", "ngram") else (True,):
            engine = engine_for(target(), drafter, compile=compile, batch_size=batch, **options)
            assert generate(engine, prompts, **mixed).tokens == want, (name, compile)


def without_time(line: dict) -> dict:
    """A line of a trace without its floats, which may differ in the last bit where plain operations add up."""
    left_out = ("values", "times")
    return {k: v for k, v in line.items() if not k.endswith("_s") and k not in left_out}
