"""Training of heads: the official loss and gradients, answer masks, resume, the official layout."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draft_tree import StaticTree
from eagle_draft import EagleConfig, EagleDrafter, EagleHead, load_head
from files.chat import CHAT_TEMPLATES
from files.eagle_variants import head_names
from files.jinja import JinjaTemplate
from files.sandbox import Template
from files.tokenizer import Tokenizer
from files.weights import load_model
from helpers import (
    GOLDEN,
    OPERATORS,
    decode,
    engine_for,
    golden_case,
    golden_head,
    golden_target,
    refused,
)
from reference import TORCH, use_backend
from run.options import DEMO
from run.parsing import one_line_errors
from scripts.train import train_block, train_eagle, training
from scripts.train.acceptance import Chains, evaluate
from scripts.train.losses import LossOptions, unrolled_losses
from scripts.train.train_eagle import Dialogue, Example, TrainConfig, marked_tokens


def official_losses(head):
    """The losses of the golden training case, sequence by sequence, weighted as in its batch."""
    case, target = golden_case("train_eagle12"), golden_target()
    regression = entropy = count = 0.0
    for ids, raw in zip(case["sequences"], case["raw_loss_mask"]):
        tokens, mask = torch.tensor([ids]), torch.tensor([raw])
        features = target(tokens, torch.arange(len(ids))[None])
        n = mask[:, :-1].sum()
        recipe = LossOptions(target.embedding, target.lm_head, target.lm_head, 1)
        e, r = unrolled_losses(head, target, (tokens, mask, features, None), recipe, 0.0)
        regression, entropy, count = regression + r * n, entropy + e * n, count + n
    return regression / count, entropy / count


def test_official_loss_and_gradients():
    case, tensors = (
        golden_case("train_eagle12"),
        load_file(GOLDEN / "train_eagle12" / "tensors.safetensors"),
    )
    head = golden_head().requires_grad_(True)
    use_backend(head, TORCH)
    regression, entropy = official_losses(head)
    assert float(regression) == pytest.approx(case["vloss"], abs=1e-5)
    assert float(entropy) == pytest.approx(case["ploss"], abs=1e-4)
    (regression + 0.1 * entropy).backward()
    name = next(n for n in tensors if "fc.weight" in n)
    torch.testing.assert_close(head.fc.weight.grad, tensors[name], atol=1e-5, rtol=1e-3)
    for ours, theirs in head_names(head.config).items():
        norm = sum(case["grad_l2_norms"][n] ** 2 for n in theirs) ** 0.5
        assert float(head.get_parameter(ours).grad.norm()) == pytest.approx(norm, rel=1e-3), ours


@OPERATORS
def test_what_learns_must_not_run_our_operators():
    """The head itself, and the target's LM head in bf16, of which training takes a copy."""
    head = golden_head().requires_grad_(True)
    with pytest.raises(RuntimeError, match="has no gradients"):
        official_losses(head)
    use_backend(head, TORCH)
    target = load_model(GOLDEN / "models/target_llama_mha", torch.bfloat16)
    losses = train_eagle.losses_of(train_eagle.TrainConfig(device="cpu"), head, target)
    tokens = torch.arange(7)[None]
    features = target(tokens, tokens).float()
    with torch.compiler.set_stance("force_eager"):
        sum(losses((tokens, tokens >= 0, features, None), 0)).backward()
    assert head.fc.weight.grad.isfinite().all() and head.fc.weight.grad.any()
    with pytest.raises(RuntimeError, match="gpt_eagle::matmul has no gradients"):
        target.lm_head(features.requires_grad_())


def test_chains_from_every_start_agree_with_the_loop():
    """The vectorised evaluator and the decode loop draft the same tokens and accept the same lengths."""
    target, head = golden_target(), golden_head()
    prompt = [5, 17, 3, 40, 8]
    drafter = EagleDrafter(head, target, StaticTree.chain(train_eagle.ALPHAS), sharpness=1.0)
    session = decode(engine_for(target, drafter, max_new_tokens=60, ignore_eos=True), prompt)
    ok, _ = Chains(head, target, torch.tensor([session.history[0]])).run()
    lengths = ok.long().cumprod(1).sum(1).tolist()
    compared = 0
    for row in session.trace:
        start = row["pos"] - 1  # the head's row that pairs f_{pos-1} with the root
        if start < len(lengths):
            assert lengths[start] == row["accept_length"]
            compared += 1
    assert compared >= 10
    result = evaluate(head, target, [(len(prompt), session.history[0])])
    assert result["tau"] == pytest.approx(1 + sum(lengths[3:]) / len(lengths[3:]))
    assert result["alpha"][0] == pytest.approx(ok[3:, 0].float().mean().item())


OWN = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} ASSISTANT:{% else %}"
    " {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("kind", ["fixed", "own"])
def test_every_answers_span_is_marked_whatever_surrounds_it(kind, tmp_path):
    """Answers of a file begin with spaces or newlines; a template may keep them."""
    tokenizer, template = Tokenizer.load(train_eagle.Path(DEMO)), CHAT_TEMPLATES["vicuna"]
    if kind == "own":
        template = JinjaTemplate(train_eagle.Path(DEMO), Template(OWN), None, tokenizer.special)
    turns = ["What is 2 + 2?", "And 3 + 3?", "And 4 + 4?"]
    plain, spaced = ["four", "six\nor so", "eight"], [" four\n", "\n\nsix\nor so ", "\teight "]
    (tmp_path / "d.jsonl").write_text(
        "".join(json.dumps({"turns": turns, "answers": a}) + "\n" for a in (plain, spaced))
    )
    one, other = (
        marked_tokens(d, tokenizer, template)
        for d in train_eagle.read_dialogues(tmp_path / "d.jsonl")
    )
    assert one == other
    spans = "".join(tokenizer.decode([i]) if m else "|" for i, m in zip(*other))
    assert all(answer in spans for answer in plain)
    assert "What" not in spans and "And" not in spans and "USER" not in spans
    cut = marked_tokens(Dialogue(turns, plain, ended=False), tokenizer, template)
    assert cut[0] == one[0][:-1]


def test_only_a_checkpoint_without_a_template_has_none(tmp_path):
    """Any other fault of a template is an error, also where the data are texts."""
    copy = shutil.copytree(DEMO, tmp_path / "demo")
    config, target = TrainConfig(checkpoint=str(copy), device="cpu"), golden_target()
    assert train_eagle.make_engine(config, target).template is None
    (copy / "chat_template.jinja").write_text("{% broken")
    with pytest.raises(ValueError, match="its chat template"):
        train_eagle.make_engine(config, target)


@pytest.mark.parametrize("changes", [{"fc_bias": False}, {"n_layers": 2}, {"qkv_bias": True}])
def test_a_saved_head_says_what_it_is(changes, tmp_path):
    """A head that was loaded and trained on keeps its own shape: no bias (LLaMA-3's), more layers, qkv bias."""
    target, config = golden_target(), golden_head().config
    fc_bias = changes.pop("fc_bias", True)
    head = EagleHead(EagleConfig(replace(config.model, **changes), fc_bias=fc_bias))
    row = {"step": 1, "regression 0": 1.0, "entropy 0": 1.0, "alpha": [0.5] * 5, "tau": 1.5}
    info = {"curve": [row]}
    train_eagle.save_head(head, TrainConfig(out=str(tmp_path), dtype="float32"), info)
    loaded = load_head(tmp_path, target)
    assert loaded.config.fc_bias == fc_bias
    for name, value in head.named_parameters():
        assert torch.equal(loaded.get_parameter(name), value), name


def test_a_bad_line_of_data_is_one_line(tmp_path, capsys):
    file = tmp_path / "data.jsonl"
    file.write_text('{"turns": ["a"], "answers": ["b"]}\n{"question": "c"}\n')
    with pytest.raises(SystemExit) as stop, one_line_errors("train_eagle.py"):
        train_eagle.read_dialogues(file)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert "row 2" in err and err.count("\n") == 1
    with pytest.raises(ValueError, match="cannot read"):
        train_eagle.read_dialogues(tmp_path / "none.jsonl")


def test_sharegpt_and_text_lines(tmp_path, capsys):
    def said(*who_and_what):
        return {"conversations": [{"from": who, "value": what} for who, what in who_and_what]}

    rows = [
        said(("system", "s"), ("human", "q"), ("gpt", "a"), ("human", "left over")),
        said(("human", "first"), ("human", "second"), ("gpt", "whose answer?")),
        said(),
        {"text": "plain\u2028text"},
        {"turns": ["x", "y"], "answers": ["z"]},
    ]
    want = [Dialogue(["q"], ["a"]), Dialogue([], ["plain\u2028text"]), Dialogue(["x"], ["z"])]
    lines, array = tmp_path / "data.jsonl", tmp_path / "data.json"
    lines.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    array.write_text(json.dumps(rows))
    for file in (lines, array):
        assert train_eagle.read_dialogues(file) == want
        assert "3 dialogues or texts, 2 left out" in capsys.readouterr().out


def test_chains_with_a_target_of_another_dtype():
    """On CUDA the target stays in bf16 while the head is trained in fp32."""
    target = copy.deepcopy(golden_target()).bfloat16()
    target.ropes = golden_target().ropes
    ok, logits = Chains(
        golden_head(), target, torch.tensor([[5, 17, 3, 40, 8, 22, 61, 9, 33, 2]])
    ).run()
    assert ok.shape[1] == train_eagle.ALPHAS and logits[0].dtype == torch.float32


@pytest.mark.parametrize("program", [train_eagle, train_block])
@pytest.mark.parametrize(
    "flags, message",
    [
        (["--resume"], "holds no unfinished run; leave --resume out to start one"),
        (["--data=demo.jsonl"], "--data: there is no file demo.jsonl; name another"),
        (["--features=nowhere/f.bin"], "nowhere/f.bin"),
        (["--threads=-1"], "--threads must be at least 0; it is -1"),
    ],
)
def test_programs_refuse_mistakes_before_they_load(
    program, flags, message, tmp_path, monkeypatch, capsys
):
    def load_target(config):
        raise AssertionError("the target was loaded first")

    monkeypatch.setattr(train_eagle, "load_target", load_target)
    name = Path(program.__file__).name
    monkeypatch.setattr(sys, "argv", [name, f"--out={tmp_path}", "--device=cpu", *flags])
    assert message in refused(capsys, program.main)


def test_another_kind_of_head_is_no_start(tmp_path):
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3}')
    for init, message in ((str(tmp_path), "a head of the kind medusa"), ("nowhere", "no such")):
        with pytest.raises(ValueError, match=message):
            TrainConfig(init=init, out=str(tmp_path)).check()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_budget_of_minutes_ends_the_command(keeps, tmp_path, monkeypatch):
    """Long before its steps, behind a file of features, if there is one, that is filled first."""
    ids = [i % 90 for i in range(5, 800)]
    prepared = ([Example.of(ids, [True] * len(ids))], [(3, ids[:60])])
    monkeypatch.setattr(train_eagle, "prepare", lambda *_: prepared)
    flags = {
        "checkpoint": GOLDEN / "models/target_llama_mha", "out": tmp_path, "features": tmp_path / "f.bin" if keeps else "", "device": "cpu", "dtype": "float32",
        "seq_len": 32, "batch_size": 2, "layers": 1, "anchors": 4, "steps": 10**6, "warmup": 2, "minutes": 0.005,
    }  # fmt: skip
    argv = [f"--{name}={value}" for name, value in flags.items()]
    monkeypatch.setattr(sys, "argv", ["train_block.py", *argv])
    train_block.main()
    made = json.loads((tmp_path / "training.json").read_text())
    assert 2 <= made["config"]["steps"] < 10**4
    assert (tmp_path / "model.safetensors").is_file()


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
