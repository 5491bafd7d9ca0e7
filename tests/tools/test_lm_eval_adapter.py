"""The adapter for lm-evaluation-harness: its numbers against those of transformers, without lm_eval itself.

Where lm_eval is installed, the last test runs it. Against its own `hf` backend the adapter was compared by hand.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers

from drafters import RootOnly
from extras.ngram_draft import Ngram, NgramDrafter
from generate import load
from helpers import GOLDEN, engine_for, golden_target
from hf.chat import CHAT_TEMPLATES, JinjaTemplate
from options import DEMO
from scripts.bench import lm_eval_adapter
from scripts.bench.lm_eval_adapter import EvalConfig, Scorer, check_generation, cut, rendered, stops

TARGET = "models/target_llama_mha"
CONTEXT = 24


@pytest.fixture(scope="module")
def theirs():
    return transformers.AutoModelForCausalLM.from_pretrained(
        GOLDEN / TARGET, dtype="float32"
    ).eval()


@pytest.fixture
def scorer(monkeypatch):
    monkeypatch.setattr(lm_eval_adapter, "PREFILL_CHUNK", 5)  # several chunks to a request
    return Scorer(engine_for(golden_target(TARGET), RootOnly(), context=CONTEXT))


@torch.no_grad()
def expected(model, before, after):
    """As lm_eval defines it: a long text is cut on the left. The last token predicts nothing."""
    ids = torch.tensor((before + after)[-CONTEXT - 1 :])
    scores = model(ids[None, :-1]).logits[0, -len(after) :].log_softmax(-1)
    wanted = ids[-len(after) :]
    return float(scores.gather(1, wanted[:, None]).sum()), bool((scores.argmax(-1) == wanted).all())


def tokens(seed: int, count: int) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_log_likelihoods_are_those_of_transformers(scorer, theirs):
    """Of one token and many, behind one and many, too long, and one after another with every shared beginning."""
    question, other = tokens(0, 13), tokens(1, 40)
    likeliest = int(theirs(torch.tensor([question])).logits[0, -1].argmax())
    requests = [
        (question, tokens(2, 1)), (question, [likeliest]), (question, tokens(3, 9)), (question + [5], tokens(4, 3)),
        (question[:1], question[1:]), (question[:7], tokens(5, 4)), (other, tokens(6, 6)), (other[1:], other[:3]),
        ([7], tokens(7, CONTEXT)), (question, tokens(8, 20)),
    ]  # fmt: skip
    wanted = [expected(theirs, *request) for request in requests]
    assert [greedy for _, greedy in wanted].count(True) == 1
    for order in (range(10), range(9, -1, -1), [0, 0, 5, 2, 4, 2, 7, 6, 1, 3, 9, 8]):
        for i in order:
            total, greedy = scorer.score(*requests[i])
            assert total == pytest.approx(wanted[i][0], abs=1e-4) and greedy == wanted[i][1], (
                i,
                order,
            )


def test_what_is_cached_is_not_computed_again(scorer, monkeypatch):
    question, seen = tokens(0, 13), []
    real = type(scorer.engine.target).forward
    monkeypatch.setattr(
        type(scorer.engine.target),
        "forward",
        lambda self, ids, *rest: seen.append(ids.shape[1]) or real(self, ids, *rest),
    )
    for after in ([3], [4], [3, 9, 8]):
        scorer.score(question, after)
    assert seen == [5, 5, 3, 1, 3]


@pytest.mark.parametrize("before, after, words", [
    ([1, 2], [], "a request has 2 tokens and scores 0"),
    ([], [1], "a request has 0 tokens and scores 1"),
    ([1], [2] * 25, "it must be 1 to 24 behind 1 or more; raise --context"),
    ([97], [2], "token ids must be in 0..96; the prompt has 97"),
])  # fmt: skip
def test_requests_that_cannot_be_scored(scorer, before, after, words):
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        scorer.score(before, after)


def test_texts_end_at_stop_strings_whoever_drafts():
    engine = load(checkpoint=DEMO, dtype="float32", draft="none", context=256, device="cpu")
    encode = engine.tokenizer.encode
    prompts = [encode(text) for text in ("def read_lines(path):", "import os\n", "x = [")]
    plain = list(Scorer(engine).texts(prompts, [], 16))
    long = prompts[0] * 40
    assert list(Scorer(engine).texts([long], [], 2)) == list(
        Scorer(engine).texts([long[-254:]], [], 2)
    )
    until = ["zzz", plain[0][7:9], plain[1][3:8], "\n\n"]
    want = [cut(text, until) for text in plain]
    assert want[0] != plain[0] and want[1] != plain[1]
    for size, drafter in itertools.product(
        (1, 3), (RootOnly(), NgramDrafter(Ngram(tokens=4, branches=1)))
    ):
        options = {"context": 256, "batch_size": size, "dtype": "float32"}
        other = lm_eval_adapter.replace(
            engine_for(engine.target, drafter, **options), tokenizer=engine.tokenizer
        )
        assert list(Scorer(other).texts(prompts, until, 16)) == want
    with pytest.raises(
        ValueError, match="asks for 256 tokens, and the context holds 256; raise --context"
    ):
        list(Scorer(engine).texts(prompts, [], 256))


def test_cut():
    assert stops(["", "\n", ""]) == ["\n"] and stops([None]) == []
    assert (
        cut("a b c", []) == "a b c"
        and cut("a b c", ["c", "b", "x"]) == "a "
        and cut("ab", ["a"]) == ""
    )


def test_what_tasks_may_ask_for():
    said = {"until": ["\n"], "max_gen_toks": 5, "do_sample": False, "temperature": 0.0}
    check_generation(said)
    check_generation(said | {"top_p": 0.95, "top_k": 20, "min_p": 0.0, "temperature": 0.7})
    for change, words in (
        ({"do_sample": True}, "sampling"),
        ({"num_beams": 4}, "the generation arguments num_beams"),
    ):
        with pytest.raises(ValueError, match=f"a task asks for {words}"):
            check_generation(said | change)


def test_chats():
    template = CHAT_TEMPLATES["vicuna"]
    engine = lm_eval_adapter.replace(
        engine_for(golden_target(TARGET), RootOnly()), template=template
    )
    user, assistant = ({"role": role, "content": role[0]} for role in ("user", "assistant"))
    assert rendered(engine, [user], True) == template.render(["u"], [])
    assert rendered(engine, [user, assistant, user], True) == template.render(["u", "u"], ["a"])
    system = {"role": "system", "content": "s"}
    for messages, asks in (
        ([user, assistant, system], True),
        ([user, system, assistant, user], True),
        ([user, assistant], False),
    ):
        with pytest.raises(
            ValueError, match="a later system message or the start of an answer; use other tasks"
        ):
            rendered(engine, messages, asks)


class Program:
    """In the place of a template's program."""

    def __init__(self, takes: bool, fails: bool = False):
        self.takes, self.fails = takes, fails

    def render(self, messages: list[dict], **_) -> str:
        roles = [m["role"] for m in messages]
        if self.fails and "system" in roles:
            raise ValueError("raises: no system message")
        return "|".join(m["content"] for m in messages if self.takes or m["role"] != "system")


def test_descriptions_are_system_messages():
    system, user = {"role": "system", "content": "Do it."}, {"role": "user", "content": "u"}
    vicuna = CHAT_TEMPLATES["vicuna"]
    own = {
        f: JinjaTemplate(Path("m"), Program(*f), None, {})
        for f in ((True, False), (False, False), (True, True))
    }
    for template, begin in ((vicuna, "{} USER: u"), (own[True, False], "{}|u")):
        for said, joined in (
            (None, "Do it."),
            ("", "Do it."),
            ("Be brief.", "Be brief.\n\nDo it."),
        ):
            engine = engine_for(golden_target(TARGET), RootOnly(), system=said, chat="")
            engine = lm_eval_adapter.replace(engine, template=template)
            assert rendered(engine, [system, user], True).startswith(begin.format(joined))
    for template in (CHAT_TEMPLATES["mistral"], own[False, False], own[True, True]):
        engine = lm_eval_adapter.replace(
            engine_for(golden_target(TARGET), RootOnly()), template=template
        )
        with pytest.raises(
            ValueError, match="a task gives a system message, and the chat template takes none"
        ):
            rendered(engine, [system, user], True)


def told(monkeypatch, capsys, *argv: str) -> str:
    monkeypatch.setattr(sys, "argv", ["lm_eval_adapter.py", *argv])
    with pytest.raises(SystemExit) as stop:
        lm_eval_adapter.main()
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("argv, words", [
    ([], "nothing to do; name tasks with --tasks"),
    (["--tasks", "x", "--json", "nowhere/x.json"], "cannot write nowhere/x.json"),
    (["--tasks", "x", "--checkpoint", "nowhere"], "no such directory: nowhere"),
    (["--tasks", "x", "--checkpoint", DEMO, "--draft", "none"], "run: pip install -r scripts/bench/requirements-evals.txt"),
])  # fmt: skip
def test_mistakes_are_one_line(monkeypatch, capsys, argv, words):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    assert words in told(monkeypatch, capsys, *argv)


@pytest.mark.slow
def test_a_task_of_lm_eval(tmp_path, monkeypatch, capsys):
    """Whole, where lm_eval is installed: a task of one's own, without a network. Slow: it reads thousands of task files."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"q": "import os\nimport", "choices": [" sys", " zebra"]}) + "\n"
    )
    (tmp_path / "own.yaml").write_text(
        f"task: own\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: '0'\ntarget_delimiter: ''\nmetric_list: [{metric: acc}]\n"
    )
    config = EvalConfig(
        checkpoint=DEMO, tasks="own", include_path=str(tmp_path), json=str(tmp_path / "out.json")
    )
    assert lm_eval_adapter.run(config)["own"]["acc,none"] == 1.0
    assert json.loads((tmp_path / "out.json").read_text())["results"]["own"]["acc,none"] == 1.0
    capsys.readouterr()
    assert "lm_eval has no task nothing" in told(
        monkeypatch, capsys, "--checkpoint", DEMO, "--tasks", "nothing"
    )
