"""Training of heads: the official loss and gradients, chains fed one token at a time, answer masks, the official layout,
the best head, resume, and features kept on disk. Block drafters are in tests/core/test_block_heads.py.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_tree import StaticTree
from drafters import DraftVocab, RootOnly
from eagle_draft import EagleConfig, EagleDrafter, EagleHead, load_head
from files.chat import chat_template
from files.jinja import Template
from files.tokenizer import Tokenizer
from helpers import (
    GOLDEN,
    decode,
    engine_for,
    golden_case,
    golden_head,
    golden_target,
)
from kv_cache import KVCache, causal_window
from models.steps import HeadNorm
from reference import TORCH, use_backend
from run.heads import load_method, rows_of
from run.options import DEMO, GenerateConfig
from scripts.train import data, train_eagle, training
from scripts.train.acceptance import ALPHAS, chains, evaluate
from scripts.train.data import Dialogue, Example, best_tokens, default_aux_layers, marked_tokens
from scripts.train.losses import DECAY, STEPS, LossOptions, unrolled_losses
from scripts.train.train_eagle import EAGLE, TrainConfig, frequent_tokens
from steps import add_modules

UNROLLED = STEPS[3]
TARGET = "models/target_llama31_gqa8"
HEAD = "models/head_eagle3"
CASES = {3: (TARGET, HEAD), 1: ("models/target_llama_mha", "models/head_eagle12_mha")}  # by version


def target():
    return golden_target(TARGET)


# ----------------------------------------------------------------------------------------- losses


def official_losses(head):
    """The losses of the golden training case, sequence by sequence, weighted as in its batch."""
    case, target = golden_case("train_eagle12"), golden_target()
    regression = entropy = count = 0.0
    for ids, raw in zip(case["sequences"], case["raw_loss_mask"]):
        tokens, mask = torch.tensor([ids]), torch.tensor([raw])
        features = target(tokens, torch.arange(len(ids))[None])
        n = mask[:, :-1].sum()
        options = LossOptions(target.embedding, target.lm_head, target.lm_head, 1)
        e, r = unrolled_losses(head, target, (tokens, mask, features, None), options, 0.0)
        regression, entropy, count = regression + r * n, entropy + e * n, count + n
    return regression / count, entropy / count


def test_official_loss_and_gradients():
    case = golden_case("train_eagle12")
    tensors = load_file(GOLDEN / "train_eagle12" / "tensors.safetensors")
    head = golden_head().requires_grad_(True)
    use_backend(head, TORCH)
    regression, entropy = official_losses(head)
    assert float(regression) == pytest.approx(case["vloss"], abs=1e-5)
    assert float(entropy) == pytest.approx(case["ploss"], abs=1e-4)
    (regression + 0.1 * entropy).backward()
    name = next(n for n in tensors if "fc.weight" in n)
    torch.testing.assert_close(head.fc.weight.grad, tensors[name], atol=1e-5, rtol=1e-3)
    for ours, theirs in head.weight_names().items():
        norm = sum(case["grad_l2_norms"][n] ** 2 for n in theirs) ** 0.5
        assert float(head.get_parameter(ours).grad.norm()) == pytest.approx(norm, rel=1e-3), ours


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
    options = LossOptions(target.embedding, lm_head, rows, UNROLLED)
    best = best_tokens(target, features) if three else None
    losses = unrolled_losses(head, target, (tokens, mask, features, best), options, 0)
    expected, counts = [0.0] * UNROLLED, [0] * UNROLLED
    for b in range(2):
        z = target.logits(features[b])  # [T, V]
        for t in range(T - 1):
            outs = chain_outputs(head, target, features[b : b + 1], tokens[b : b + 1], t)
            for s, out in enumerate(outs):
                p = z[t + 1 + s, drafted].softmax(-1)
                log_q = lm_head(head.output_norm(out)).log_softmax(-1)
                if mask[b, t + s] and (not three or int(z[t + 1 + s].argmax()) in drafted):
                    expected[s] -= float(p @ log_q)
                    far[s] += float(F.smooth_l1_loss(out, features[b, t + 1 + s, : len(out)]))
                    counts[s] += 1
    assert 0 < sum(counts) < 2 * sum(T - 1 - s for s in range(UNROLLED)), "some rows count"
    totals = [2 * T] * UNROLLED if three else counts
    expected = [e / total for e, total in zip(expected, totals)]
    expected += [f / c for f, c in zip(far, counts) if not three]
    assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-5)
    assert UNROLLED == 7 and DECAY == 0.8
    if normed:
        assert all(grad.all() for grad in torch.autograd.grad(sum(losses), norms))


def test_chains_from_every_start_agree_with_the_loop():
    """The vectorised evaluator and the decode loop draft the same tokens and accept the same lengths."""
    target, head = golden_target(), golden_head()
    prompt = [5, 17, 3, 40, 8]
    drafter = EagleDrafter(head, target, StaticTree.chain(ALPHAS), sharpness=1.0)
    session = decode(engine_for(target, drafter, max_new_tokens=60, ignore_eos=True), prompt)
    ok = chains(head, target, torch.tensor([session.history[0]])).ok
    lengths = ok.long().cumprod(1).sum(1).tolist()
    # the head's row that pairs f_{pos-1} with the root
    starts = [(row["pos"] - 1, row["accept_length"]) for row in session.trace]
    starts = [(start, length) for start, length in starts if start < len(lengths)]
    assert len(starts) >= 10 and all(lengths[start] == length for start, length in starts)
    result = evaluate(head, target, [(len(prompt), session.history[0])])
    assert result["tau"] == pytest.approx(1 + sum(lengths[3:]) / len(lengths[3:]))
    assert result["alpha"][0] == pytest.approx(ok[3:, 0].float().mean().item())
    narrow = copy.deepcopy(target).bfloat16()  # on CUDA it stays so while the head is in fp32
    narrow.ropes = target.ropes
    drafted = chains(head, narrow, torch.tensor([session.history[0]]))
    assert drafted.logits[0].dtype == torch.float32


# ----------------------------------------------------------------------------------------- data


OWN = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} ASSISTANT:{% else %}"
    " {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("kind", ["fixed", "own"])
def test_every_answers_span_is_marked_whatever_surrounds_it(kind, tmp_path):
    """Answers of a file begin with spaces or newlines; a template may keep them."""
    tokenizer = Tokenizer.load(Path(DEMO))
    template = chat_template(Path(DEMO), tokenizer, "vicuna", "")
    if kind == "own":
        template = replace(template, name="", program=Template(OWN), system=None)
    turns = ["What is 2 + 2?", "And 3 + 3?", "And 4 + 4?"]
    plain, spaced = ["four", "six\nor so", "eight"], [" four\n", "\n\nsix\nor so ", "\teight "]
    rows = [json.dumps({"turns": turns, "answers": answers}) for answers in (plain, spaced)]
    (tmp_path / "d.jsonl").write_text("\n".join(rows))
    dialogues = data.read_dialogues(tmp_path / "d.jsonl")
    one, other = (marked_tokens(d, tokenizer, template) for d in dialogues)
    assert one == other
    spans = "".join(tokenizer.decode([i]) if m else "|" for i, m in zip(*other))
    assert all(answer in spans for answer in plain)
    assert "What" not in spans and "And" not in spans and "USER" not in spans
    cut = marked_tokens(Dialogue(turns, plain, ended=False), tokenizer, template)
    assert cut[0] == one[0][:-1]


def said(*messages: tuple, keys=("from", "value")) -> list[dict]:
    return [dict(zip(keys, message)) for message in messages]


PARTS = [{"type": "text", "text": "q"}]
FORMS = [  # a row, and its turns and answers; None: it is left out; "": it is refused
    ({"turns": ["x", "y"], "answers": ["z"]}, (["x"], ["z"])),
    ({"text": "plain\u2028text"}, ([], ["plain\u2028text"])),
    ({"conversations": said(("system", "s"), ("human", "q"), ("gpt", "a"), ("human", "left over"))}, (["q"], ["a"])),
    ({"conversations": said(("user", "q"), ("assistant", " a"), keys=("role", "content"))}, (["q"], ["a"])),
    ({"messages": said(("user", PARTS), ("assistant", "a"), keys=("role", "content"))}, (["q"], ["a"])),
    ({"conversations": said(("human", "first"), ("human", "second"), ("gpt", "whose answer?"))}, None),
    ({"conversations": said(("human", "q"), ("tool", "a"))}, None),
    ({"conversations": []}, None),
    # rows of a table that has the columns of several forms
    ({"text": None, "messages": None, "conversations": said(("human", "q"), ("gpt", "a"))}, (["q"], ["a"])),
    ({"conversations": [each | {"role": None, "content": None} for each in said(("human", "q"), ("gpt", "a"))]}, (["q"], ["a"])),
    ({"question": "c"}, ""),
    ({"turns": "ab", "answers": "cd"}, ""),
    ({"turns": ["q"], "answers": ["a"], "ended": "no"}, ""),
    ({"turns": ["q"], "answers": ["a"], "answer_ids": [1.5]}, ""),
    ({"text": "\ud800"}, ""),
    ({"turns": ["q"], "answers": [None]}, ""),
    ({"text": 5}, ""),
    ({"conversations": said(("human", "a"), ("gpt", 5))}, ""),
    ({"conversations": ["a", "b"]}, ""),
]  # fmt: skip


def test_every_form_of_a_row(tmp_path, capsys):
    good = [row for row, found in FORMS if found != ""]
    want = [Dialogue(*found) for _, found in FORMS if found]
    lines, array = tmp_path / "data.jsonl", tmp_path / "data.json"
    lines.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in good))
    array.write_text(json.dumps(good))
    for file in (lines, array):
        assert data.read_dialogues(file) == want
        assert f"{len(want)} dialogues or texts, 3 left out" in capsys.readouterr().out
    for row in [row for row, found in FORMS if found == ""]:
        lines.write_text(f"{json.dumps(good[0])}\n{json.dumps(row)}\n")
        with pytest.raises(ValueError, match="row 2 must have texts: `turns` and `answers`"):
            data.read_dialogues(lines)
    with pytest.raises(ValueError, match="cannot read"):
        data.read_dialogues(tmp_path / "none")
    lines.write_text(f"\ufeff{json.dumps(good[0])}\nnull\n")
    with pytest.raises(ValueError, match="line 2: it must be a JSON object"):
        data.read_dialogues(lines)
    lines.write_text(json.dumps(good[0]))
    with pytest.raises(ValueError, match="--data: one dialogue is held out"):
        data.read_data(TrainConfig(data=str(lines)))


def test_the_draft_vocabulary_is_what_is_trained_on_most():
    ids = torch.tensor([5, 5, 5, 2, 2, 9, 9, 7, 0])
    assert frequent_tokens(ids, 12, 3).ids.tolist() == [2, 5, 9]
    assert frequent_tokens(ids, 12, 5).ids.tolist() == [0, 2, 5, 7, 9], "of equals the lowest"
    assert frequent_tokens(ids, 12, 12) is None
    model = golden_head(HEAD, target()).config.model
    head = train_eagle.new_head(model, target(), DraftVocab(128, ids[[3, 5]]), True)
    keys, mapping = train_eagle.keys_of(head), train_eagle.vocab_layout(head)
    assert keys == {"draft_vocab_size": 2, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    assert mapping["d2t"].tolist() == [2, 8]
    assert mapping["t2d"].nonzero().flatten().tolist() == [2, 9]
    assert torch.equal(head.lm_head.weight, target().lm_head.weight[[2, 9]])
    layers = {32: (2, 16, 29), 8: (2, 4, 5), 6: (2, 3), 2: (1, 2)}  # a small target has fewer
    assert {n: default_aux_layers(n) for n in layers} == layers


# ----------------------------------------------------------------------------------------- training


COMMON = {
    "checkpoint": str(GOLDEN / TARGET), "version": 3, "batch_size": 4, "seq_len": 24, "lr": 3e-3, "warmup": 2,
    "steps": 1, "draft_vocab": 100, "init": "feature", "dtype": "float32", "device": "cpu",
}  # fmt: skip


@cache
def written() -> tuple[list[Example], list[tuple[int, list[int]]]]:
    """Texts generated by the target: examples at T = 1, sequences to evaluate with at T = 0."""
    prompts = [[5 + i, 17, 3] for i in range(16)]
    options = {"batch_size": 16, "temperature": 1.0, "max_new_tokens": 60}
    sampled = decode(engine_for(target(), RootOnly(), **options), *prompts)
    greedy = decode(engine_for(target(), RootOnly(), batch_size=2, max_new_tokens=40), *prompts[:2])
    examples = [Example.of(ids, [i > 2 for i in range(len(ids))]) for ids in sampled.history]
    return examples, [(3, ids) for ids in greedy.history]


@pytest.fixture
def quick(monkeypatch):
    """No compilation, and no corpus to read."""
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    monkeypatch.setattr(data, "read_data", lambda config: ([], []))
    monkeypatch.setattr(training, "prepare", lambda *of: written())


def config_in(folder: Path, **options) -> TrainConfig:
    return TrainConfig(**COMMON | {"out": str(folder)} | options)


def train(config: TrainConfig) -> None:
    training.train(training.ready(config, EAGLE))


def as_vanilla(drafter, **options):
    """Compare the texts of a drafter and of none. Returns: the session with the drafter."""
    drafted, plain = (
        decode(engine_for(target(), d, max_new_tokens=40, **options), [5, 17, 3])
        for d in (drafter, RootOnly())
    )
    assert drafted.history == plain.history
    return drafted


def test_a_trained_head_drafts_better_and_has_the_official_layout(quick, tmp_path):
    config = config_in(tmp_path, steps=80, eval_every=40)
    torch.manual_seed(0)
    fresh = train_eagle.make_head(config, target(), written()[0])
    before = evaluate(fresh, target(), written()[1])["tau"]
    train(config)
    info = json.loads((tmp_path / "training.json").read_text())
    raw = json.loads((tmp_path / "config.json").read_text())
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
    as_vanilla(EagleDrafter(head, target(), StaticTree.chain(5)))
    again = train_eagle.make_head(replace(config, init=str(tmp_path), draft_vocab=0), target(), [])
    for name, value in head.named_parameters():
        own = again.get_parameter(name)
        assert torch.equal(own, value) and own.requires_grad, name


def test_a_head_of_version_1_may_have_a_draft_vocabulary(tmp_path, quick):
    """It is written as in version 3, and loads, drafts only those tokens, and has the target's rows for them."""
    config = config_in(tmp_path, version=1, lr=3e-5)
    head = train_eagle.make_head(config, target(), written()[0])
    train_eagle.save_head(head, config, {"curve": []})
    options = GenerateConfig(
        checkpoint=config.checkpoint, head=str(tmp_path), draft="eagle", quant_draft="none"
    )
    (drafter,) = load_method(target(), options, None).presets
    kept = drafter.vocab.ids
    assert torch.equal(kept, head.vocab.ids) and len(kept) == 100
    assert torch.equal(drafter.lm_head.weight, target().lm_head.weight[kept])
    drafted = as_vanilla(drafter, trace="t")
    assert {i for row in drafted.trace for i in row["draft_tokens"]} <= set(kept.tolist())


@pytest.mark.parametrize("changes", [{"fc_bias": False}, {"n_layers": 2}, {"qkv_bias": True}])
def test_a_saved_head_says_what_it_is(changes, tmp_path):
    """A head that was loaded and trained on keeps its own shape: no bias (LLaMA-3's), more layers, qkv bias."""
    target, config = golden_target(), golden_head().config
    fc_bias = changes.pop("fc_bias", True)
    head = EagleHead(EagleConfig(replace(config.model, **changes), fc_bias=fc_bias))
    train_eagle.save_head(head, TrainConfig(out=str(tmp_path), dtype="float32"), {})
    loaded = load_head(tmp_path, target)
    assert loaded.config.fc_bias == fc_bias
    for name, value in head.named_parameters():
        assert torch.equal(loaded.get_parameter(name), value), name


@pytest.mark.parametrize("embedding", ["target's", "own", "tied"])
def test_a_head_with_an_embedding_is_gone_on_with(embedding, tmp_path, quick):
    """It is written again if it is another than the target's, and it is not trained."""
    raw = json.loads((GOLDEN / HEAD / "config.json").read_text())
    tensors = load_file(GOLDEN / HEAD / "model.safetensors")
    table = target().embedding.weight * (1 if embedding == "target's" else 1.5)
    tensors["embed_tokens.weight"] = table
    if embedding == "tied":
        raw |= {"draft_vocab_size": 128, "tie_word_embeddings": True}
        for name in ("lm_head.weight", "d2t", "t2d"):
            del tensors[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors")
    config = config_in(tmp_path / "new", init=str(tmp_path), draft_vocab=0)
    head = train_eagle.make_head(config, target(), [])
    (tmp_path / "new").mkdir()
    train_eagle.save_head(head, config, {"curve": []})
    again = load_head(tmp_path / "new", target())
    assert (again.embedding is None) == (embedding == "target's")
    for name, value in head.named_parameters():
        assert torch.equal(again.get_parameter(name), value), name
        assert value.requires_grad == (name != "embedding.weight"), name


@pytest.mark.parametrize("taus, patience, steps, best, killed, minutes", [
    ([1.5, 2.0, 1.9, 1.8, 2.5], 2, 8, 4, True, 0.0),  # two in a row without a higher one
    ([1.5, 2.0, 1.9, 2.1, 2.05], 2, 10, 8, False, 0.5),  # one is not enough
    ([1.5, 2.0, 1.9, 1.8, 1.7], 0, 10, 4, False, 0.0),  # no patience is asked for
    ([1.5, 1.6, 1.7, 1.7, 1.7], 1, 10, 10, True, 0.5),  # of equal ones the last
])  # fmt: skip
def test_training_ends_when_tau_no_longer_rises(
    taus, patience, steps, best, killed, minutes, quick, tmp_path, monkeypatch
):
    """By made-up tau, also after a kill: the head written is that of the highest one.

    By a clock a process's first step, which compiles, does not count, and each other one takes 3 s, a tenth.
    """
    seen: list[Tensor] = []  # weights that were evaluated

    def evaluated(head, target, sequences, draft):
        seen.append(head.layers[0].wo.weight.detach().clone())
        return {"alpha": [0.5], "tau": taus[len(seen) - 1]}

    monkeypatch.setattr(training, "evaluate", evaluated)
    clock = SimpleNamespace(perf_counter=partial(next, count(0, 3.0)))
    monkeypatch.setattr(training, "time", clock)
    stops = {"patience": patience, "minutes": minutes}
    config = config_in(tmp_path, steps=10, eval_every=2, **stops)
    save = training.Training.save

    def killing(self):
        save(self)
        if self.position == 6:
            monkeypatch.setattr(training.Training, "save", save)
            raise KeyboardInterrupt

    if killed:
        monkeypatch.setattr(training.Training, "save", killing)
        with pytest.raises(KeyboardInterrupt):
            train(config)
        assert len(seen) == 3
        config = replace(config, resume=True)
    train(config)
    info = json.loads((tmp_path / "training.json").read_text())
    uncounted = (1 + killed) * bool(minutes)
    assert info["curve"][-1]["step"] == info["config"]["steps"] == steps + uncounted
    assert info["curve"][-1]["seconds"] == 3 * (steps - (0 if minutes else 1 + killed))
    assert info["curve"].index(info["best"]) == best // 2 - 1
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".safetensors"}
    head = train_eagle.make_head(replace(config, init=str(tmp_path), draft_vocab=0), target(), [])
    same = [torch.equal(head.layers[0].wo.weight, weight) for weight in seen]
    assert same.index(True) == best // 2 - 1 and sum(same) == 1


def test_resume_with_features_on_disk_gives_the_same_head(quick, tmp_path, monkeypatch):
    """Killed in the second epoch and resumed, with and without files, as an unbroken run: 8 batches, 14 steps."""
    computed: list[int] = []  # batches, by the target's best tokens

    def config(name: str, kept: str, **options) -> TrainConfig:
        kept = str(tmp_path / kept) if kept else ""
        return config_in(tmp_path / name, features=kept, steps=14, eval_every=11, **options)

    def counted(target, features):
        computed.append(len(features))
        return best_tokens(target, features)

    monkeypatch.setattr(data, "best_tokens", counted)
    train(config("whole", "kept"))
    assert len(computed) == 8, "each batch once"
    for name, kept in (("cut", "cut.features"), ("none", "")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(training.Training, "finish", kill)
            train(config(name, kept))
        computed.clear()
        train(config(name, kept, resume=True))
        assert len(computed) == (0 if kept else 4), "the one for the scales, and steps 12 to 14"
    computed.clear()
    train(config("again", "kept"))
    assert not computed, "a later run reads what the first one wrote"
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    for name in ("cut", "again"):
        torch.testing.assert_close(load_file(tmp_path / name / "model.safetensors"), whole)
    files = {file.name for file in (tmp_path / "cut").iterdir()}
    assert files == {"config.json", "model.safetensors", "training.json"}


def kill(self):
    raise KeyboardInterrupt


def test_features_on_disk_are_those_of_the_target(quick, tmp_path, monkeypatch):
    """Those of both versions, in every epoch and for every seed."""
    config = config_in(tmp_path, features=str(tmp_path / "kept"))
    ids, head = data.laid_out(written()[0], 0)[0], golden_head(HEAD, target())
    old = replace(config, version=1)
    three = data.Features(config, target(), head.aux_layers, ids)
    one = data.Features(old, target(), (), ids)
    feeds = [data.batches(written()[0], replace(config, seed=seed)) for seed in (0, 1)]
    seen: dict[int, Tensor] = {}
    for feed in feeds:
        epochs = [[next(feed) for _ in range(8)] for _ in range(2)]
        orders = [[batch.number for batch in epoch] for epoch in epochs]
        assert sorted(orders[0]) == sorted(orders[1]) == list(range(8)) and orders[0] != orders[1]
        for batch in (*epochs[0], *epochs[1]):
            tokens = batch.tokens
            assert torch.equal(tokens, seen.setdefault(batch.number, tokens))
            computed = target()(tokens, torch.arange(24).expand(4, -1), aux_layers=head.aux_layers)
            # a file of version 1 has no best tokens yet
            first = one.of(batch)[0]
            features, best = three.of(batch)
            assert torch.equal(first, computed[..., :64]) and torch.equal(features, computed)
            assert torch.equal(best, target().logits(computed).argmax(-1))
    message = "has features of other data or weights; name another folder"
    for layers, tokens in (((), ids.flip(0)), ((1,), ids)):  # other data, other layers
        with pytest.raises(ValueError, match=message):
            data.Features(config, target(), layers, tokens)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=message):
        patch.setattr(data, "weights_hash", lambda checkpoint: "of other weights")
        data.Features(config, target(), (), ids)
    free = type("Usage", (), {"free": 1_000_100_000})
    monkeypatch.setattr(data.shutil, "disk_usage", lambda path: free)
    with pytest.raises(ValueError, match="0.00 GB do not fit .* 1.00 GB are free"):
        train(replace(config, features=str(tmp_path / "more")))
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_muon_in_fp32_is_torchs(shape):
    """Torch's multiplies in bf16: the difference is its rounding, 1 % of the update."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, *shape, generator=generator)
    ends = []
    for kind in (torch.optim.Muon, training.Fp32Muon):
        p = torch.nn.Parameter(start.clone())
        optimizer = kind([p], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for gradient in gradients:
            p.grad = gradient.clone()
            optimizer.step()
        ends.append(p.detach())
    update = (ends[0] - start).abs().max()
    assert update > 0.1 and (ends[0] - ends[1]).abs().max() < 0.02 * update
