"""MTP layers as drafters: their scores against transformers' own layers in the published formula, texts against vanilla."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_qwen3_5 import EXPERTS, SIZES, randomize
from torch import nn
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen35
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen35_moe

from generate import generate, load

IDS = torch.randint(3, 96, (29,), generator=torch.Generator().manual_seed(1))
PROMPTS = [IDS[:5].tolist() * 3, IDS.tolist()]
MIMO = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
# kind -> architecture, transformers' module, the names of its classes, options of the model
KINDS = {
    "mimo": ("MiMoForCausalLM", qwen2, "Qwen2", MIMO | {"head_dim": 32}),
    "qwen": ("Qwen3_5ForCausalLM", qwen35, "Qwen3_5", SIZES),
    "tied": ("Qwen3_5ForCausalLM", qwen35, "Qwen3_5", SIZES | {"tie_word_embeddings": True}),
    "experts": ("Qwen3_5MoeForCausalLM", qwen35_moe, "Qwen3_5Moe", SIZES | EXPERTS),
}
# ours -> MiMo's names and Qwen3.5's
NAMES = {
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", ""),
    "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."),
}


class Reference(nn.Module):
    """An MTP layer as vLLM and MiMo's own code compute it, of transformers' modules."""

    def __init__(self, kind: str, model):
        super().__init__()
        _, module, name, _ = KINDS[kind]
        self.kind, self.model = kind, [model]
        config = deepcopy(model.config)
        config.layer_types = ["full_attention"]
        norm = getattr(module, f"{name}RMSNorm")
        norms = [norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)]
        self.embedding_norm, self.hidden_norm, self.norm = norms
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = getattr(module, f"{name}DecoderLayer")(config, 0)

    def forward(self, tokens, features):
        """tokens, features: [B, T] and [B, T, F], of the next position. Returns: [B, T, F]"""
        model = self.model[0].model
        sides = [self.embedding_norm(model.embed_tokens(tokens)), self.hidden_norm(features)]
        x = self.fc(torch.cat(sides[::-1] if self.kind == "mimo" else sides, -1))
        positions = torch.arange(tokens.shape[1])[None]
        angles = model.rotary_emb(x, positions)
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        y = self.layer(x, position_embeddings=angles, attention_mask=mask, position_ids=positions)
        return self.norm(y[0] if isinstance(y, tuple) else y)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors as the files name them."""
        prefix = "model.mtp_layers.0." if self.kind == "mimo" else "mtp."
        *own, layer = NAMES["mimo" if self.kind == "mimo" else "qwen"]
        ours = dict(zip(("embedding_norm", "hidden_norm", "fc", "norm", "layer"), [*own, ""]))
        named = {}
        for name, value in self.state_dict().items():
            part, _, rest = name.partition(".")
            named[f"{prefix}{layer if part == 'layer' else ours[part] + '.'}{rest}"] = value
        return {name: value.contiguous() for name, value in named.items()}


@torch.no_grad()
def made(kind: str, path: Path | None = None, hits: bool = False) -> tuple:
    """A random model and its MTP layer, written to `path`.

    hits: one whose layers do little, so that a token follows from the one before it, in both
    """
    torch.manual_seed(0)
    architecture, _, name, options = KINDS[kind]
    config = getattr(transformers, f"{name}TextConfig" if name != "Qwen2" else "Qwen2Config")(
        **options
    )
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(
        config, attn_implementation="eager"
    )
    mtp = Reference(kind, model)
    for part in (model, mtp):
        randomize(part)
    for name, p in [*model.named_parameters(), *mtp.named_parameters()]:
        if kind == "mimo" and "norm" in name:
            p.add_(1)
        if hits and name.endswith(
            ("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")
        ):
            p.mul_(0.2)
    if hits:
        dim = config.hidden_size
        first = dim if kind == "mimo" else 0
        mtp.fc.weight.mul_(0.1)[:, first : first + dim] += torch.eye(dim)
        mtp.embedding_norm.weight.fill_(kind == "mimo")  # the others count from one
        mtp.norm.weight.copy_(model.model.norm.weight)
        model.model.embed_tokens.weight.mul_(10)
    if path:
        model.eval().save_pretrained(path)
        add(path, mtp.tensors())
        raw = json.loads((path / "config.json").read_text())
        raw |= {"architectures": [architecture], "dtype": "float32"}
        raw |= {"model_type": "mimo", "num_nextn_predict_layers": 1} if kind == "mimo" else {}
        (path / "config.json").write_text(json.dumps(raw))
    return model.eval(), mtp.eval()


def add(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Add tensors to a directory."""
    held = load_file(path / "model.safetensors")
    save_file(held | tensors, path / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def hitting(tmp_path_factory):
    """Directories of models whose MTP layers hit, by kind."""
    paths = {kind: tmp_path_factory.mktemp("mtp") / kind for kind in KINDS}
    for kind, path in paths.items():
        made(kind, path, hits=True)
    return paths


def drafted_by(reference, model, prompt: list[int], depth: int) -> list[int]:
    """The tokens of the first chain behind a prompt, whose first new token the target has decided: greedily."""
    text = torch.tensor([prompt])
    features = model.model(text).last_hidden_state
    tokens = torch.cat((text[:, 1:], model.lm_head(features[:, -1:]).argmax(-1)), 1)
    found = []
    for _ in range(depth):
        out = reference(tokens, features)
        token = model.lm_head(out[:, -1:]).argmax(-1)
        found.append(token.item())
        tokens = torch.cat((tokens, token), 1)
        features = torch.cat((features, out[:, -1:]), 1)
    return found


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_scores_and_chains_are_those_of_the_formula(tmp_path, kind):
    model, mtp = made(kind, tmp_path)
    engine = load(str(tmp_path), tree="chain:4", max_new_tokens=8, trace="-", device="cpu")
    assert engine.option("draft") == "mtp"
    head = engine.drafter.head
    features = model.model(IDS[None]).last_hidden_state[:, :-1]
    embedded = engine.target.embedding(IDS[None, 1:])
    want = mtp(IDS[None, 1:], features)
    got = head(embedded, head.project(features), torch.arange(28)[None])
    assert want.std() > 0.3  # else the bound would hold for anything
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    for prompt in PROMPTS:
        first = generate(engine, [prompt]).trace[0]
        assert first["draft_tokens"] == drafted_by(mtp, model, prompt, 4)


MATRIX = [  # kind, tree, format, temperature, batch
    ("mimo", "chain:4", "none", 0.0, 1), ("mimo", "dynamic:4,3,12", "int8", 1.0, 2), ("mimo", "static", "bf16", 0.0, 2),
    ("mimo", "auto", "int4", 1.0, 1), ("qwen", "chain:4", "bf16", 1.0, 2), ("qwen", "dynamic:4,3,12", "none", 0.0, 2),
    ("qwen", "static", "int8", 1.0, 1), ("qwen", "auto", "bf16", 0.0, 1), ("experts", "dynamic:4,3,12", "bf16", 0.0, 2),
    ("tied", "chain:2", "int4", 0.0, 1),
]  # fmt: skip


@pytest.mark.parametrize("kind, tree, form, temperature, batch", MATRIX)
def test_every_tree_gives_vanillas_tokens(hitting, kind, tree, form, temperature, batch):
    options = {"temperature": temperature, "batch_size": batch, "max_new_tokens": 40, "seed": 7}
    options |= {"ignore_eos": True, "trace": "-", "device": "cpu"}
    if form != "none":
        options["dtype"] = "bfloat16"
    if form.startswith("int"):
        options |= {"quant": form, "group_size": 32 if form == "int4" else 0}
    path = str(hitting[kind])
    want = generate(load(path, draft="none", **options), PROMPTS[:batch]).tokens
    engine = load(path, tree=tree, **options)
    assert engine.option("draft") == "mtp"
    drafter = getattr(engine.drafter, "drafter", engine.drafter)
    assert (drafter.head.fused is None) == (form == "none")
    found = generate(engine, PROMPTS[:batch])
    assert found.tokens == want
    assert found.stats["tau"] > 2
