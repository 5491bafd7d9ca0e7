"""Drafting some tokens only: against whole scores with the others masked, LM heads of fewer rows, lists, the script.

That the output stays vanilla's is tested in test_lossless.py.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cli.tree_paths import EAGLE1_PATHS
from draft_tree import DynamicTree, StaticTree
from drafters import DraftVocab
from eagle_draft import EagleDrafter
from extras.draft_vocab import RANKS, read_ranks, vocab_from
from generate import generate, load
from helpers import GOLDEN, decode, engine_for, golden_head, golden_target, slow, with_children
from hf.checkpoint import Quantization
from hf.heads import draft_lm_head, rows_of
from hf.tokenizer import Tokenizer
from hf.weights import load_model
from model import ModelConfig, Transformer
from options import DEMO, GenerateConfig
from quantize import FORMATS, quantize_directory
from sampling import Sampling
from scripts.train import rank_tokens

PROMPTS = [[5, 17, 3, 40, 8, 22, 61], [9, 33, 2, 71, 54, 90, 12, 6, 28, 77, 1, 45]]
TREES = {
    "chain": StaticTree.chain(5),
    "static": StaticTree(EAGLE1_PATHS),
    "dynamic": DynamicTree(depth=4, topk=6, size=30),
}
KEPT = torch.tensor(
    sorted(torch.randperm(97, generator=torch.Generator().manual_seed(0))[:40].tolist())
)
SMALL = [Quantization("int8"), Quantization("int4", 32)]  # formats that fit the golden target


# ----------------------------------------------------------------------------------------- drafting


class Masked(nn.Module):
    """The plain way to trim: score every token, then forbid those that are not kept."""

    def __init__(self, lm_head: nn.Module):
        super().__init__()
        self.lm_head = lm_head

    def forward(self, x: Tensor) -> Tensor:
        z = self.lm_head(x).float()
        return torch.full_like(z, float("-inf")).index_copy(-1, KEPT, z[..., KEPT])


def run(tree: str, rule: Sampling, children: str, lm_head: nn.Module, vocab: DraftVocab | None):
    target, accept = golden_target(), "residual" if children == "sampled" else "exact"
    drafter = EagleDrafter(golden_head(), target, TREES[tree], lm_head, vocab=vocab)
    drafter = with_children(drafter, children)
    options = rule._asdict() | {
        "accept": accept,
        "max_new_tokens": 20,
        "ignore_eos": True,
        "batch_size": 2,
        "seed": 3,
    }
    return decode(engine_for(target, drafter, **options), *PROMPTS)


def drafted(session) -> tuple[list[dict], list[float]]:
    """The trace with the tokens of real nodes only, and the values of these apart: padding is any token."""
    values = [line["values"] for line in session.trace]
    for line, known in zip(session.trace, values):
        line["draft_tokens"] = [t for t, v in zip(line["draft_tokens"], known) if v is not None]
    lines = [{k: v for k, v in line.items() if k != "values"} for line in session.trace]
    return lines, [v for known in values for v in known if v is not None]


RULES = [Sampling(), Sampling(1.0), Sampling(0.6, top_k=12, top_p=0.9)]


CASES = [(tree, "noise", RULES[0]) for tree in TREES]  # every pair of two arguments
CASES += [("dynamic", "noise", rule) for rule in RULES[1:]]
CASES += [(tree, "sampled", rule) for tree in ("static", "chain") for rule in RULES[1:]]
CASES += slow((tree, "noise", rule) for tree in ("static", "chain") for rule in RULES[1:])


@pytest.mark.parametrize(("tree", "children", "rule"), CASES, ids=str)
def test_trimmed_drafts_are_the_masked_ones(tree, children, rule):
    """Tokens, parents and values of every node of every cycle: the noise that each token gets is its own."""
    plain = run(tree, rule, children, Masked(golden_target().lm_head), None)
    vocab = DraftVocab(97, KEPT)
    trimmed = run(tree, rule, children, draft_lm_head(golden_target(), None, KEPT), vocab)
    assert trimmed.history == plain.history and sum(trimmed.stats.accept_lengths) > 0
    (ours, our_values), (theirs, their_values) = drafted(trimmed), drafted(plain)
    assert ours == theirs and our_values == pytest.approx(their_values, abs=1e-4)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("rule", RULES[:2], ids=str)
def test_keeping_every_token_changes_nothing(tree, rule):
    every = torch.arange(97)
    whole = run(tree, rule, "noise", golden_target().lm_head, None)
    kept = run(
        tree, rule, "noise", draft_lm_head(golden_target(), None, every), DraftVocab(97, every)
    )
    assert kept.trace == whole.trace


def test_columns_tokens_and_spread():
    vocab, x = DraftVocab(6, torch.tensor([1, 2, 5])), torch.arange(12.0).view(2, 6)
    assert vocab.drafted == 3
    assert vocab.columns(x).tolist() == [[1, 2, 5], [7, 8, 11]]
    assert vocab.tokens(torch.tensor([[2, 0]])).tolist() == [[5, 1]]
    assert vocab.spread(torch.tensor([[0.5, 0.3, 0.2]])).tolist() == [
        [0, 0.5, pytest.approx(0.3), 0, 0, pytest.approx(0.2)]
    ]
    every = DraftVocab(6)
    assert every.drafted == 6 and every.columns(x) is every.tokens(x) is every.spread(x) is x


# ----------------------------------------------------------------------------------------- LM heads


def test_rows_of_a_float_lm_head():
    own = golden_target().lm_head
    rows = rows_of(own, KEPT)
    assert torch.equal(rows.weight, own.weight[KEPT]) and not rows.weight.requires_grad
    assert (rows.in_features, rows.out_features) == (64, 40)
    assert rows.weight.data_ptr() != own.weight.data_ptr() and own.out_features == 97


@pytest.mark.parametrize("quant", SMALL, ids=lambda q: q.format)
@pytest.mark.parametrize("held", [None, *SMALL], ids=lambda q: q.format if q else "float")
def test_trimming_and_rounding_combine(held, quant):
    """Trimmed and rounded, in whatever order: the codes are rows of the whole copy's."""
    target = load_model(GOLDEN / "models/target_llama_mha", quant=held)
    trimmed, whole = (draft_lm_head(target, quant, ids) for ids in (KEPT, None))
    assert trimmed.format == quant.format and trimmed.fp32_out
    for some, all in zip(trimmed.codes_and_scale(), whole.codes_and_scale()):
        assert torch.equal(some, all[KEPT])
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(trimmed(x), whole(x)[:, KEPT])


def test_a_trimmed_lm_head_is_smaller():
    layer = FORMATS["int4"].from_float(torch.randn(512, 256))
    sizes = [sum(part.nbytes for part in layer.rows(torch.arange(n)).buffers()) for n in (512, 128)]
    assert sizes[1] * 4 == sizes[0]


# -------------------------------------------------------------------------------------------- lists


def kept_of_8(path: Path, count: int) -> DraftVocab:
    """The draft vocabulary that a list gives for a target of 8 tokens."""
    target = Transformer(ModelConfig(4, 1, 1, 1, 4, 4, vocab_size=8))
    head = path.parent
    ranks = "" if path.name == RANKS else str(path)
    (head / "config.json").write_text("{}")
    save_file({"fc.weight": torch.zeros(4, 8)}, head / "model.safetensors")
    return vocab_from(
        GenerateConfig(head=str(path.parent), token_ranks=ranks, draft_vocab=count), target
    )


def test_the_most_frequent_are_kept_in_the_order_of_their_ids(tmp_path):
    (tmp_path / RANKS).write_text("[7, 0, 3, 5]")
    torch.save([7, 0, 3, 5], tmp_path / "freq_4.pt")
    torch.save(torch.tensor([7, 0, 3, 5]), tmp_path / "tensor.pt")
    for name in (RANKS, "freq_4.pt", "tensor.pt"):
        assert kept_of_8(tmp_path / name, 3).ids.tolist() == [0, 3, 7]
        assert kept_of_8(tmp_path / name, 4).ids.tolist() == [0, 3, 5, 7]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[7, 0, 3]",
            "--set draft_vocab=4 is more than the 3 tokens that .*ranks.json ranks; lower it",
        ),
        ("[7, 0, 3, 8]", r"ranks the token 8, the target has 0..7; use ranks of its own tokenizer"),
        ("[7, 0, 3, -1]", r"ranks the token -1, the target has 0..7"),
        ("[7, 0, 3, 7]", "lists a token twice"),
        ("[7, 0, 3, 1.0]", "must be a list of token ids, the most frequent first"),
        ("[7, 0, 3, true]", "must be a list of token ids"),
        ("[]", "must be a list of token ids"),
        ('{"ids": [7]}', "must be a list of token ids"),
        ("[7, 0,", "ranks.json is not valid JSON"),
    ],
)
def test_lists_that_cannot_be_used(tmp_path, text, message):
    (tmp_path / "ranks.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        kept_of_8(tmp_path / "ranks.json", 4)


@pytest.mark.parametrize("content", [b"", b"no pickle", b"\x80\x02}q\x00."])
def test_a_saved_list_that_cannot_be_read(tmp_path, content):
    (tmp_path / "ranks.pt").write_bytes(content)
    with pytest.raises(ValueError, match="ranks.pt"):
        read_ranks(tmp_path / "ranks.pt", 8)


# --------------------------------------------------------------------------------------------- demo


def test_the_demos_list_ranks_every_token():
    ids = read_ranks(Path(DEMO + "-eagle", RANKS), 4096)
    assert sorted(ids) == list(range(4096)) and ids[0] == Tokenizer.load(Path(DEMO)).eos_ids[0]


@pytest.mark.parametrize("quant", ["none", "int4"])
def test_the_demo_with_a_quarter_of_its_vocabulary(quant):
    options = {
        "checkpoint": DEMO,
        "quant": quant,
        "dtype": "float32",
        "device": "cpu",
        "max_new_tokens": 24,
    }
    prompt, taus = ["def read_lines(path):"], []
    vanilla = generate(load(draft="none", **options), prompt)
    for count in (0, 1024):
        engine = load(draft_vocab=count, tree="dynamic", **options)
        assert engine.drafter.lm_head.out_features == (count or 4096)
        assert (
            engine.drafter.vocab == DraftVocab(4096)
            if count == 0
            else len(engine.drafter.vocab.ids) == count
        )
        result = generate(engine, prompt)
        assert result.tokens == vanilla.tokens
        taus.append(result.stats["tau"])
    assert 2 < taus[1] <= taus[0]


def test_a_stand_in_uses_the_small_models_list():
    shape = "tiny-0.5b,dim=288,n_layers=8,head_dim=32,ffn_dim=1537,vocab_size=4224"
    options = {"checkpoint": DEMO, "draft_vocab": 1024, "device": "cpu", "max_new_tokens": 16}
    options |= {"ignore_eos": True, "tree": "dynamic", "dtype": "float32"}
    small, large = load(**options), load(inflate=shape, **options)
    assert (
        torch.equal(small.drafter.vocab.ids, large.drafter.vocab.ids)
        and large.drafter.vocab.size == 4224
    )
    runs = [generate(engine, ["def read_lines(path):"]) for engine in (small, large)]
    assert runs[0].tokens == runs[1].tokens and runs[1].stats["tau"] > 2
    with pytest.raises(
        ValueError, match="--set draft_vocab=4100 is more than the 4096 tokens that .* ranks"
    ):
        load(inflate=shape, **options | {"draft_vocab": 4100})


def test_a_quantized_head_takes_its_list_along(tmp_path):
    quantize_directory(Path(DEMO + "-eagle"), tmp_path / "head", Quantization("int8"))
    assert (tmp_path / "head" / RANKS).read_text() == Path(DEMO + "-eagle", RANKS).read_text()


# ------------------------------------------------------------------------------------------- script


def ranked(capsys, tmp_path: Path, *data: str) -> list[int]:
    rank_tokens.main(["--data", ",".join(data), "--out", str(tmp_path / "ranks.json")])
    assert "wrote" in capsys.readouterr().out
    return read_ranks(tmp_path / "ranks.json", 4096)


def test_tokens_are_counted_in_texts_and_answers(capsys, tmp_path):
    (tmp_path / "a.txt").write_text("return x\nreturn x\nreturn")
    rows = [{"turns": ["import import import import"], "answers": ["def def"]}, {"text": "return"}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ids = ranked(capsys, tmp_path, str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl"))
    tokenizer, counts = Tokenizer.load(Path(DEMO)), Counter()
    for text in ("return x\nreturn x\nreturn", "def def", "return"):
        counts.update(tokenizer.encode(text, bos=False))
    assert ids[0] == tokenizer.eos_ids[0], "the end of a text is kept whatever N"
    seen = ids[1 : len(counts) + 1]
    assert set(seen) == set(counts), "questions are not drafted, so they do not count"
    assert [counts[i] for i in seen] == sorted(counts.values(), reverse=True)
    assert ids[len(counts) + 1 :] == sorted(ids[len(counts) + 1 :]) and len(ids) == 4096
    assert not (tmp_path / "ranks.json.tmp").exists()


def test_ranks_and_coverage_by_hand():
    counts = Counter({3: 5, 1: 5, 6: 9, 2: 1})
    ids = rank_tokens.rank(counts, 8, (2, 7))
    assert ids == [2, 7, 6, 1, 3, 0, 4, 5]
    assert rank_tokens.coverage(ids, counts) == {8: 1.0, 4: 0.75, 2: 0.05, 1: 0.05}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "nowhere.txt", "--out", "OUT/r"], "--data: cannot read nowhere.txt"),
        (["--data", "OUT/empty.txt", "--out", "OUT/r"], "--data: there is no text in "),
        (["--data", "OUT/prompts.jsonl", "--out", "OUT/r"], "must have `turns` and `answers`"),
        (["--checkpoint", "OUT/x", "--data", "a"], "--out is missing, and there is no "),
        (["--data", "a", "--out", "OUT"], "must be a file in a directory that exists"),
        (["--data", "a", "--out", "OUT/no/r"], "must be a file in a directory that exists"),
        (["--checkpoint", "OUT/x", "--data", "a", "--out", "OUT/r"], "no such directory"),
        (
            [
                "--checkpoint",
                str(GOLDEN / "models/target_llama_mha"),
                "--data",
                "a",
                "--out",
                "OUT/r",
            ],
            "has neither",
        ),
    ],
)
def test_mistakes_are_one_line(capsys, tmp_path, argv, message):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["a question"]}')
    with pytest.raises(SystemExit) as stop:
        rank_tokens.main([part.replace("OUT", str(tmp_path)) for part in argv])
    error = capsys.readouterr().err.strip().split("\r")[-1].strip().splitlines()[-1]
    assert stop.value.code == 2 and error.startswith("rank_tokens.py: ") and message in error
