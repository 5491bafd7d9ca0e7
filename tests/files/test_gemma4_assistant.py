"""Gemma 4's assistants: their drafts against transformers' own module over the target's cache, texts against vanilla."""

from __future__ import annotations

import pytest
import torch
import transformers

from families import GEMMA4
from families import GEMMA4_SIZES as SIZES
from families import SLIDING_OR_FULL as KINDS
from families import random_gemma4 as random_model
from families import randomized_gemma4 as randomized
from heads import assert_vanillas_tokens
from helpers import slow
from run.library import generate
from run.load import load
from run.options import DEMO
from tiny_models import IDS, refused, saved

CASES = GEMMA4.cases
PROMPTS = [IDS[:5].tolist() * 3, IDS.tolist()]  # longer than the window, which is of 8 tokens
LAYERS = {
    "hidden_size": 32, "num_hidden_layers": 3, "layer_types": [KINDS[0], *KINDS], "num_kv_shared_layers": 3,
    "vocab_size_per_layer_input": 0, "final_logit_softcapping": None,
}  # fmt: skip
CENTROIDS = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 3}


def random_assistant(case: str, options: dict | None = None, **keys):
    """keys: of its layers; options: further ones"""
    torch.manual_seed(1)
    heads = {name: v for name, v in CASES[case].items() if name.startswith(("att", "num_glob"))}
    text = transformers.Gemma4TextConfig(**SIZES | heads | LAYERS | keys)
    options = {"backbone_hidden_size": 64} | (options or {})
    config = transformers.Gemma4AssistantConfig(text_config=text, **options)
    model = randomized(transformers.Gemma4AssistantForCausalLM, config)
    if config.use_ordered_embeddings:
        model.masked_embedding.token_ordering = torch.randperm(96)
    return model


@torch.no_grad()
def official(assistant, model, prompt: list[int], depth: int) -> tuple[list[int], list]:
    """The first chain behind a prompt and its logits, as `SinglePositionMultiTokenCandidateGenerator` has them."""
    out = model(torch.tensor([prompt]), output_hidden_states=True, return_shared_kv_states=True)
    token = out.logits[:, -1:].argmax(-1)  # the root
    hidden = out.hidden_states[-1][:, -1:]
    tokens, logits = [], []
    for _ in range(depth):
        found = assistant(
            inputs_embeds=torch.cat((model.get_input_embeddings()(token), hidden), -1),
            position_ids=torch.tensor([[len(prompt)]]),
            shared_kv_states=out.shared_kv_states,
        )
        token, hidden = found.logits.argmax(-1), found.last_hidden_state
        tokens.append(token.item())
        logits.append(found.logits)
    return tokens, logits


@pytest.mark.parametrize("case, options", [("E2B", CENTROIDS), ("31B", {})])
def test_drafts_are_those_of_the_official_module(tmp_path, monkeypatch, case, options):
    model, assistant = random_model(**CASES[case]), random_assistant(case, options)
    model.save_pretrained(tmp_path / "m")
    assistant.save_pretrained(tmp_path / "a")
    files = {"checkpoint": str(tmp_path / "m"), "head": str(tmp_path / "a")}
    engine = load(**files, tree="chain:4", max_new_tokens=8, trace="-", device="cpu")
    assert engine.option("draft") == "assistant"
    drafter, seen = engine.drafter, []
    monkeypatch.setattr(
        drafter, "logits", lambda out, level: seen.append(drafter.head.score(out)) or seen[-1]
    )
    for prompt in PROMPTS:
        seen.clear()
        tokens, logits = official(assistant, model, prompt, 4)
        assert generate(engine, [prompt]).trace[0]["draft_tokens"] == tokens
        for ours, theirs in zip(seen, logits):
            scored = ours.isfinite()  # theirs are lower than all others elsewhere
            assert scored.sum() == (36 if options else 96) and theirs.std() > 0.3
            torch.testing.assert_close(ours[scored], theirs[scored], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def hitting(case: str) -> tuple:
    """A model whose next token mostly follows from the one before it, and an assistant that knows that."""
    model = random_model(**CASES[case], final_logit_softcapping=None, tie_word_embeddings=False)
    centroids = CENTROIDS | {"centroid_intermediate_top_k": 7}
    assistant = random_assistant(case, centroids if case == "E2B" else {}, hidden_size=64)
    for name, p in [*model.named_parameters(), *assistant.named_parameters()]:
        if "post_" in name and "layernorm" in name or "per_layer_input_norm" in name:
            p.mul_(0.4)
    model.lm_head.weight.copy_(model.model.embed_tokens.weight[torch.randperm(96)])
    assistant.model.embed_tokens.weight.copy_(model.lm_head.weight)
    assistant.model.norm.weight.copy_(model.model.norm.weight)
    assistant.pre_projection.weight.mul_(0.02)[:, :64] += torch.eye(64)
    return model, assistant


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Directories of models and assistants that hit, by case."""
    root = tmp_path_factory.mktemp("assistants")
    for case in ("E2B", "31B"):
        for part, name in zip(hitting(case), ("m", "a")):
            part.save_pretrained(root / case / name)
    return root


MATRIX = [  # case, tree, format, temperature, batch
    ("E2B", "chain:4", "fp32", 0.0, 1), ("31B", "dynamic:4,3,12", "fp32", 1.0, 2), ("31B", "chain:4", "bf16", 1.0, 1),
    ("E2B", "auto", "bf16", 0.0, 2), ("E2B", "dynamic:4,3,12", "int8", 1.0, 2),
    *slow([("31B", "static", "int4", 0.0, 2), ("E2B", "chain:2", "fp32", 1.0, 2), ("31B", "auto", "int8", 1.0, 1)]),
]  # fmt: skip


@pytest.mark.parametrize("case, tree, form, temperature, batch", MATRIX)
def test_every_tree_gives_vanillas_tokens(pairs, case, tree, form, temperature, batch):
    files = {"checkpoint": str(pairs / case / "m"), "head": str(pairs / case / "a"), "tree": tree}
    assert_vanillas_tokens(files, PROMPTS[:batch], form, temperature, 1.5)


ORDER = "masked_embedding.token_ordering"
REFUSED = [  # keys of the assistant's layers, of its config, the token order (None: left out), what is said
    ({}, {}, ..., "is an assistant of Gemma 4, of no other"),  # of the demo
    ({}, {"backbone_hidden_size": 128}, ..., "backbone_hidden_size is 128, the target's is 64"),
    ({}, {"num_centroids": 7}, ..., "num_centroids (7) must divide vocab_size (96)"),
    ({}, {}, None, f"{ORDER} must name every token once"),
    ({}, {}, torch.zeros(96).long(), f"{ORDER} must name every token once"),
    ({"global_head_dim": 64}, {}, ..., "layer 2 reads heads of keys (number, width) (2, 64), and the target's"),
    ({"num_key_value_heads": 4}, {}, ..., "layer 0 reads heads of keys (number, width) (4, 16), and the target's"),
]  # fmt: skip


@pytest.mark.parametrize("layers, config, order, says", REFUSED)
def test_another_target_is_refused(tmp_path, capsys, layers, config, order, says):
    def ordered(held: dict) -> dict:
        found = held if order is ... else held | {ORDER: order}
        return {name: value for name, value in found.items() if value is not None}

    path = saved(random_assistant("E2B", CENTROIDS, **layers), tmp_path / "a", config, ordered)
    random_model().save_pretrained(tmp_path / "m")
    capsys.readouterr()
    model = DEMO if "no other" in says else str(tmp_path / "m")
    assert says in refused(capsys, "--checkpoint", model, "--head", str(path))
