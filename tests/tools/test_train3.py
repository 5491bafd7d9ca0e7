"""Training of heads of version 3: training-time test against chains fed one token at a time, its loss against the plain
formula, the draft vocabulary, the official layout, resume, and features kept on disk.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_tree import StaticTree
from drafters import DraftVocab, RootOnly
from eagle_draft import EagleDrafter, load_head
from helpers import GOLDEN, decode, engine_for, golden_head, golden_target
from kv_cache import KVCache, causal_window
from models.steps import HeadNorm
from reference import TORCH, use_backend
from run.heads import load_drafter, rows_of
from run.options import GenerateConfig
from scripts.train import feature_cache as features
from scripts.train import losses as head_training
from scripts.train import train_eagle
from scripts.train.acceptance import evaluate
from scripts.train.feature_cache import best_tokens
from scripts.train.losses import (
    DECAY,
    STEPS,
    LossOptions,
    default_aux_layers,
    frequent_tokens,
    unrolled_losses,
)
from scripts.train.train_eagle import Example, TrainConfig
from steps import add_modules

UNROLLED = STEPS[3]
TARGET = "models/target_llama31_gqa8"
HEAD = "models/head_eagle3"


def target():
    return golden_target(TARGET)


@torch.no_grad()
def chain_outputs(head, target, features: Tensor, tokens: Tensor, t: int) -> list[Tensor]:
    """Outputs of the head at the nodes of a chain from row t that drafts the text itself.

    It runs one token at a time, as in decoding: [F] for every step.
    features: [1, T, (1 + aux_layers) F]; tokens: [1, T].
    """
    cache, outs = KVCache.empty(head.config.model, 1, t + 1 + UNROLLED, torch.float32, "cpu"), []
    fused = head.project(features)
    for j in range(min(t + UNROLLED, tokens.shape[1] - 1)):
        hidden = fused[:, j : j + 1] if j <= t else outs[-1]
        row = head(target.embedding(tokens[:, j + 1 : j + 2]), hidden, torch.tensor([[j]]), cache,
                   causal_window(torch.tensor([j]), 1))  # fmt: skip
        outs += [row] if j >= t else []
    return [out[0, 0] for out in outs]


CASES = {3: (TARGET, HEAD), 1: ("models/target_llama_mha", "models/head_eagle12_mha")}  # by version


@pytest.mark.parametrize("version, normed", [(3, False), (3, True), (1, False)])
def test_training_time_test_is_chains_fed_one_token_at_a_time(version, normed):
    """Masks and positions: every step of every row is what decoding computes there. The losses: the plain formulas.

    normed: with norms of queries and keys, which learn
    """
    target = golden_target(CASES[version][0])
    head, T = golden_head(CASES[version][1], target), 12
    use_backend(head, TORCH)
    layer = head.layers[0]
    if normed:
        config = head.config.model
        norm = HeadNorm(config.n_heads, config.n_kv_heads, config.head_dim, 1e-6)
        layer.steps = (layer.steps[0], norm, *layer.steps[1:])
        add_modules(layer, [norm])
        norms = [layer.q_norm.weight, layer.k_norm.weight]
        for i, weight in enumerate(norms):
            weight.data += torch.linspace(-0.5, 0.5, len(weight)) * (-1) ** i
    g, V = torch.Generator().manual_seed(0), target.config.vocab_size
    tokens, mask = torch.randint(0, V, (2, T), generator=g), torch.rand(2, T, generator=g) < 0.7
    features = target(tokens, torch.arange(T).expand(2, -1), aux_layers=head.aux_layers)
    if version == 1:
        head.vocab = DraftVocab(V, torch.arange(3, V, 2))
    drafted, three, far = head.vocab.ids.tolist(), version == 3, [0.0] * UNROLLED
    lm_head = head.lm_head or rows_of(target.lm_head, head.vocab.ids)
    rows = rows_of(target.lm_head, head.vocab.ids)
    recipe = LossOptions(target.embedding, lm_head, rows, UNROLLED)
    best = best_tokens(target, features) if three else None
    losses = unrolled_losses(head, target, (tokens, mask, features, best), recipe, 0)
    expected, counts = [0.0] * UNROLLED, [0] * UNROLLED
    for b in range(2):
        z = target.logits(features[b])  # [T, V]
        for t in range(T - 1):
            for s, out in enumerate(
                chain_outputs(head, target, features[b : b + 1], tokens[b : b + 1], t)
            ):
                p, log_q = (
                    z[t + 1 + s, drafted].softmax(-1),
                    lm_head(head.output_norm(out)).log_softmax(-1),
                )
                if mask[b, t + s] and (not three or int(z[t + 1 + s].argmax()) in drafted):
                    expected[s] -= float(p @ log_q)
                    far[s] += float(F.smooth_l1_loss(out, features[b, t + 1 + s, : len(out)]))
                    counts[s] += 1
    assert 0 < sum(counts) < 2 * sum(T - 1 - s for s in range(UNROLLED)), (
        "some rows count and some do not"
    )
    totals = [2 * T] * UNROLLED if three else counts
    expected = [e / total for e, total in zip(expected, totals)] + [
        f / c for f, c in zip(far, counts) if not three
    ]
    assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-5)
    assert UNROLLED == 7 and DECAY == 0.8
    if normed:
        assert all(grad.all() for grad in torch.autograd.grad(sum(losses), norms))


def test_the_draft_vocabulary_is_what_is_trained_on_most():
    ids = torch.tensor([5, 5, 5, 2, 2, 9, 9, 7, 0])
    assert frequent_tokens(ids, 12, 3).ids.tolist() == [2, 5, 9]
    assert frequent_tokens(ids, 12, 5).ids.tolist() == [0, 2, 5, 7, 9], "of equals the lowest"
    assert frequent_tokens(ids, 12, 12) is None
    head = head_training.new_head(
        golden_head(HEAD, target()).config.model, target(), DraftVocab(128, ids[[3, 5]]), True
    )
    keys, mapping = head_training.keys_of(head), head_training.vocab_layout(head)
    assert keys == {"draft_vocab_size": 2, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    assert mapping["d2t"].tolist() == [2, 8] and mapping["t2d"].nonzero().flatten().tolist() == [
        2,
        9,
    ]
    assert torch.equal(head.lm_head.weight, target().lm_head.weight[[2, 9]])


def test_taps_of_a_new_head():
    assert default_aux_layers(32) == (2, 16, 29) and default_aux_layers(8) == (2, 4, 5)
    assert default_aux_layers(6) == (2, 3) and default_aux_layers(2) == (1, 2), (
        "a small target has fewer"
    )


# ----------------------------------------------------------------------------------------- training


COMMON = {
    "checkpoint": str(GOLDEN / TARGET), "version": 3, "batch_size": 4, "seq_len": 24, "lr": 3e-3, "warmup": 2,
    "steps": 1, "draft_vocab": 100, "init": "feature", "weight_decay": 0.0, "dtype": "float32", "device": "cpu",
}  # fmt: skip


@cache
def written() -> tuple[list[Example], list[tuple[int, list[int]]]]:
    """Texts generated by the target: examples at T = 1, sequences to evaluate with at T = 0."""
    prompts = [[5 + i, 17, 3] for i in range(16)]
    sampled = decode(
        engine_for(target(), RootOnly(), batch_size=16, temperature=1.0, max_new_tokens=60),
        *prompts,
    )
    greedy = decode(engine_for(target(), RootOnly(), batch_size=2, max_new_tokens=40), *prompts[:2])
    examples = [Example.of(ids, [i > 2 for i in range(len(ids))]) for ids in sampled.history]
    return examples, [(3, ids) for ids in greedy.history]


@pytest.fixture
def quick(monkeypatch):
    """No compilation, and no corpus to read."""
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    monkeypatch.setattr(train_eagle, "prepare", prepared)


def prepared(config, target):
    train_eagle.Path(config.out).mkdir(parents=True, exist_ok=True)
    return written()


def test_a_trained_head_drafts_better_and_has_the_official_layout(quick, tmp_path):
    config = TrainConfig(**COMMON | {"out": str(tmp_path), "steps": 80, "eval_every": 40})
    torch.manual_seed(0)
    fresh = train_eagle.make_head(config, target(), written()[0])
    before = evaluate(fresh, target(), written()[1])["tau"]
    train_eagle.train(config)
    info, raw = (
        json.loads((tmp_path / name).read_text()) for name in ("training.json", "config.json")
    )
    assert [row["step"] for row in info["curve"]] == [40, 80]
    first, last = info["curve"]
    assert all(last[f"entropy {s}"] < first[f"entropy {s}"] for s in range(UNROLLED))
    assert last["tau"] > before + 0.5
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == set(load_file(GOLDEN / HEAD / "model.safetensors"))
    assert torch.equal(torch.arange(100) + tensors["d2t"], tensors["t2d"].nonzero().flatten())
    assert raw["draft_vocab_size"] == 100
    head = load_head(tmp_path, target())
    assert head.aux_layers == (2, 4, 5) and head.vocab.drafted == 100 and head.config.sharpness >= 1
    tau = evaluate(head, target(), written()[1])["tau"]
    assert tau == pytest.approx(last["tau"], abs=1e-3)
    drafter = EagleDrafter(head, target(), StaticTree.chain(5))
    drafted, plain = (
        decode(engine_for(target(), d, max_new_tokens=40), [5, 17, 3])
        for d in (drafter, RootOnly())
    )
    assert drafted.history == plain.history
    again = train_eagle.make_head(replace(config, init=str(tmp_path), draft_vocab=0), target(), [])
    for name, value in head.named_parameters():
        assert (
            torch.equal(again.get_parameter(name), value)
            and again.get_parameter(name).requires_grad
        ), name


def test_a_head_of_version_1_may_have_a_draft_vocabulary(tmp_path, quick):
    """It is written as in version 3, and loads, drafts only those tokens, and has the target's rows for them."""
    config = TrainConfig(**COMMON | {"version": 1, "out": str(tmp_path), "lr": 3e-5})
    head = train_eagle.make_head(config, target(), written()[0])
    train_eagle.save_head(head, config, {"curve": []})
    options = GenerateConfig(
        checkpoint=config.checkpoint, head=str(tmp_path), draft="eagle", quant_draft="none"
    )
    drafter = load_drafter(target(), options.head, options.draft_tree, options.quant_draft)
    kept = drafter.vocab.ids
    assert torch.equal(kept, head.vocab.ids) and len(kept) == 100
    assert torch.equal(drafter.lm_head.weight, target().lm_head.weight[kept])
    drafted, plain = (
        decode(engine_for(target(), d, max_new_tokens=40, trace="t"), [5, 17, 3])
        for d in (drafter, RootOnly())
    )
    assert drafted.history == plain.history
    assert {i for row in drafted.trace for i in row["draft_tokens"]} <= set(kept.tolist())


@pytest.mark.parametrize(
    ("taus", "patience", "steps", "best", "killed"),
    [
        ([1.5, 2.0, 1.9, 1.8, 2.5], 2, 8, 4, True),  # two in a row without a higher one
        ([1.5, 2.0, 1.9, 2.1, 2.05], 2, 10, 8, False),  # one is not enough
        ([1.5, 2.0, 1.9, 1.8, 1.7], 0, 10, 4, False),  # no patience is asked for
        ([1.5, 1.6, 1.7, 1.7, 1.7], 1, 10, 10, True),  # of equal ones the last
    ],
)
def test_training_ends_when_tau_no_longer_rises(
    taus, patience, steps, best, killed, quick, tmp_path, monkeypatch
):
    """By made-up tau, also after a kill: the head written is that of the highest one."""
    seen: list[Tensor] = []  # weights that were evaluated

    def evaluated(head, target, sequences, draft):
        seen.append(head.layers[0].wo.weight.detach().clone())
        return {"alpha": [0.5], "tau": taus[len(seen) - 1]}

    monkeypatch.setattr(train_eagle, "evaluate", evaluated)
    config = TrainConfig(
        **COMMON | {"out": str(tmp_path), "steps": 10, "eval_every": 2, "patience": patience}
    )
    save_state = train_eagle.training.save_state

    def killing(file, head, optimizers, place):
        save_state(file, head, optimizers, place)
        if place.step == 6:
            monkeypatch.setattr(train_eagle.training, "save_state", save_state)
            raise KeyboardInterrupt

    if killed:
        monkeypatch.setattr(train_eagle.training, "save_state", killing)
        with pytest.raises(KeyboardInterrupt):
            train_eagle.train(config)
        assert len(seen) == 3
        config = replace(config, resume=True)
    train_eagle.train(config)
    info = json.loads((tmp_path / "training.json").read_text())
    assert info["curve"][-1]["step"] == info["config"]["steps"] == steps
    assert info["best"]["step"] == best
    assert not (tmp_path / "best.pt").exists() and not (tmp_path / "resume.pt").exists()
    head = train_eagle.make_head(replace(config, init=str(tmp_path), draft_vocab=0), target(), [])
    same = [torch.equal(head.layers[0].wo.weight, weight) for weight in seen]
    assert same.index(True) == best // 2 - 1 and sum(same) == 1


def test_training_never_ends_with_a_worse_head_than_its_start(quick, tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    config = TrainConfig(**COMMON | {"out": str(first), "steps": 2, "eval_every": 2})
    train_eagle.train(config)
    taus = iter([2.0, 1.9, 1.8])
    monkeypatch.setattr(train_eagle, "evaluate", lambda *of: {"alpha": [0.5], "tau": next(taus)})
    again = replace(config, out=str(second), steps=4, init=str(first), draft_vocab=0)
    train_eagle.train(again)
    info = json.loads((second / "training.json").read_text())
    assert [row["step"] for row in info["curve"]] == [0, 2, 4] and info["best"]["step"] == 0
    heads = [
        train_eagle.make_head(replace(again, init=str(path)), target(), [])
        for path in (first, second)
    ]
    for a, b in zip(*(head.parameters() for head in heads)):
        assert torch.equal(a, b)


def test_resume_with_features_on_disk_gives_the_same_head(quick, tmp_path, monkeypatch):
    """Killed in the second epoch and resumed, with and without the file, as an unbroken run: 8 batches, 14 steps."""
    common = COMMON | {"steps": 14, "eval_every": 11}
    looks, of = [], features.Features.of

    def counted(self, tokens, number):
        looks.append(self.kept is not None and self.has(number))
        return of(self, tokens, number)

    monkeypatch.setattr(features.Features, "of", counted)
    train_eagle.train(
        TrainConfig(out=str(tmp_path / "whole"), features=str(tmp_path / "kept"), **common)
    )
    # the first batch is read twice: for the scales, and again
    assert looks == [False, True] + [False] * 7 + [True] * 6
    save_head = train_eagle.save_head
    for name, kept in (("cut", str(tmp_path / "cut.bin")), ("none", "")):

        def stop(*args):
            raise KeyboardInterrupt

        monkeypatch.setattr(train_eagle, "save_head", stop)
        with pytest.raises(KeyboardInterrupt):
            train_eagle.train(TrainConfig(out=str(tmp_path / name), features=kept, **common))
        monkeypatch.setattr(train_eagle, "save_head", save_head)
        looks.clear()
        train_eagle.train(
            TrainConfig(out=str(tmp_path / name), features=kept, resume=True, **common)
        )
        assert looks == [bool(kept)] * 4
    train_eagle.train(
        TrainConfig(out=str(tmp_path / "again"), features=str(tmp_path / "kept"), **common)
    )
    assert looks[4:] == [True] * 15, "a later run reads what the first one wrote"
    whole, *others = (
        load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut", "again")
    )
    for tensors in others:
        for name, value in whole.items():
            torch.testing.assert_close(tensors[name], value)
    assert sorted(p.name for p in (tmp_path / "cut").iterdir()) == [
        "config.json",
        "model.safetensors",
        "training.json",
    ]


@pytest.mark.parametrize("embedding", ["target's", "own", "tied"])
def test_a_head_with_an_embedding_is_gone_on_with(embedding, tmp_path, quick):
    """It is written again if it is another than the target's, and it is not trained."""
    raw, tensors = (
        json.loads((GOLDEN / HEAD / "config.json").read_text()),
        load_file(GOLDEN / HEAD / "model.safetensors"),
    )
    table = target().embedding.weight * (1 if embedding == "target's" else 1.5)
    tensors["embed_tokens.weight"] = table
    if embedding == "tied":
        raw |= {"draft_vocab_size": 128, "tie_word_embeddings": True}
        tensors = {
            name: t for name, t in tensors.items() if name not in ("lm_head.weight", "d2t", "t2d")
        }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors")
    config = TrainConfig(
        **COMMON | {"out": str(tmp_path / "new"), "init": str(tmp_path), "draft_vocab": 0}
    )
    head = train_eagle.make_head(config, target(), [])
    (tmp_path / "new").mkdir()
    train_eagle.save_head(head, config, {"curve": []})
    again = load_head(tmp_path / "new", target())
    assert (again.embedding is None) == (embedding == "target's")
    for name, value in head.named_parameters():
        assert torch.equal(again.get_parameter(name), value), name
        assert value.requires_grad == (name != "embedding.weight"), name


def test_features_on_disk_are_those_of_the_target(quick, tmp_path, monkeypatch):
    """Those of both versions, in every epoch and for every seed."""
    config = TrainConfig(**COMMON | {"out": str(tmp_path), "features": str(tmp_path / "kept")})
    ids, head = train_eagle.laid_out(written()[0], 0)[0], golden_head(HEAD, target())
    kept = {
        aux_layers: features.Features(config, target(), aux_layers, ids)
        for aux_layers in (head.aux_layers, ())
    }
    feeds = [train_eagle.batches(written()[0], replace(config, seed=seed), 0) for seed in (0, 1)]
    seen: dict[int, Tensor] = {}
    for feed in feeds:
        epochs = [[next(feed) for _ in range(8)] for _ in range(2)]
        orders = [[number for *_, number in epoch] for epoch in epochs]
        assert sorted(orders[0]) == sorted(orders[1]) == list(range(8)) and orders[0] != orders[1]
        for tokens, _, number in (*epochs[0], *epochs[1]):
            assert torch.equal(tokens, seen.setdefault(number, tokens))
            computed = target()(tokens, torch.arange(24).expand(4, -1), aux_layers=head.aux_layers)
            assert torch.equal(kept[head.aux_layers].of(tokens, number), computed)
            assert torch.equal(kept[()].of(tokens, number), computed[..., :64])
            best = target().logits(computed).argmax(-1)
            assert torch.equal(kept[()].best(computed, number), best)
    message = "has features of other data or weights, or is cut short; name another file"
    with pytest.raises(ValueError, match=message):
        features.Features(config, target(), (), ids.flip(0))
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=message):
        patch.setattr(features, "weights_hash", lambda checkpoint: "of other weights")
        features.Features(config, target(), (), ids)
    with pytest.raises(ValueError, match=message):  # those of other layers
        features.Features(config, target(), (1,), ids)


# ----------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "options, message",
    [
        ({"noise": 0.2}, "--noise belongs to heads of version 1"),
        ({"init": str(GOLDEN / "models/head_eagle12_mha"), "draft_vocab": 0, "checkpoint": str(GOLDEN / "models/target_llama_mha")},
         "is a head of version 1; train it with --version 1"),
        ({"init": str(GOLDEN / HEAD), "draft_vocab": 0, "version": 1}, "is a head of version 3; train it with --version 3"),
        ({"init": str(GOLDEN / HEAD)}, "has a draft vocabulary already"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(options, message, quick, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        train_eagle.train(TrainConfig(**{"out": str(tmp_path), **COMMON, **options}))
    assert "\n" not in str(error.value)


def test_features_that_do_not_fit_are_refused(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(
        features.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1_000_100_000})
    )
    config = TrainConfig(**COMMON | {"out": str(tmp_path), "features": str(tmp_path / "kept")})
    with pytest.raises(ValueError, match="0.00 GB do not fit .* 1.00 GB are free .* leave it out"):
        train_eagle.train(config)
    assert not (tmp_path / "kept").exists()
