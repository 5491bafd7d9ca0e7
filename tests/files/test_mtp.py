"""MTP layers as drafters: their scores against transformers' own layers in the published formula, texts against vanilla."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen35
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen35_moe

from backends.fusions import MergedHead
from eagle_draft import HeadPasses
from families import GLM_NAMES, GLM_SIZES, metadata_of_glm
from families import QWEN35_NAMES as GGUF_NAMES
from families import QWEN35_SIZES as SIZES
from families import QWEN_EXPERTS as EXPERTS
from families import file_of_qwen35 as file_of
from families import randomize_qwen as randomize
from files.texts import TextFiles
from heads import assert_vanillas_tokens
from helpers import slow
from kv_cache import KVCache, causal_window
from run.library import generate
from run.load import load
from run.options import DEMO
from tiny_models import IDS, gguf_name, gguf_tensors, of_experts, refused, write

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
    "glm": ("Glm4MoeForCausalLM", glm, "Glm4Moe", GLM_SIZES | {"num_hidden_layers": 2, "use_qk_norm": True}),
}  # fmt: skip
# the beginning of all names, then ours -> MiMo's names, GLM's, and by default Qwen3.5's
QWEN_NAMES = ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.")
NAMES = {
    "mimo": (
        "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "",
    ),
    "glm": ("model.layers.2.", "enorm", "hnorm", "eh_proj", "shared_head.norm", ""),
}  # fmt: skip
PLAIN_NORMS = ("mimo", "glm")  # the others' weights count from one


class Reference(nn.Module):
    """An MTP layer as vLLM, MiMo's own code and transformers' `MtpLayer` compute it, of transformers' modules."""

    def __init__(self, kind: str, model):
        super().__init__()
        _, module, name, _ = KINDS[kind]
        self.kind, self.model = kind, [model]
        config = deepcopy(model.config)
        config.layer_types = ["full_attention"]
        config.first_k_dense_replace = 0  # GLM's has experts
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
        prefix, *own, layer = NAMES.get(self.kind, QWEN_NAMES)
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
    of_text = getattr(transformers, f"{name}TextConfig", None)
    config = (of_text or getattr(transformers, f"{name}Config"))(**options)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(
        config, attn_implementation="eager"
    )
    mtp = Reference(kind, model)
    for part in (model, mtp):
        randomize(part)
    for name, p in [*model.named_parameters(), *mtp.named_parameters()]:
        if kind in PLAIN_NORMS and "norm" in name:
            p.add_(1)
        if hits and name.endswith(
            ("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")
        ):
            p.mul_(0.2)
    if hits:
        dim = config.hidden_size
        first = dim if kind == "mimo" else 0
        mtp.fc.weight.mul_(0.1)[:, first : first + dim] += torch.eye(dim)
        mtp.embedding_norm.weight.fill_(kind in PLAIN_NORMS)
        mtp.norm.weight.copy_(model.model.norm.weight)
        model.model.embed_tokens.weight.mul_(10)
    if path:
        model.eval().save_pretrained(path)
        edit(path, mtp.tensors())
        raw = json.loads((path / "config.json").read_text())
        raw |= {"architectures": [architecture], "dtype": "float32"}
        raw |= {"model_type": "mimo", "num_nextn_predict_layers": 1} if kind == "mimo" else {}
        (path / "config.json").write_text(json.dumps(raw))
    return model.eval(), mtp.eval()


def edit(path: Path, tensors: dict[str, torch.Tensor], *gone: str) -> None:
    """Add tensors to a directory, and remove others by the beginnings of their names."""
    held = load_file(path / "model.safetensors")
    kept = {name: value for name, value in held.items() if not name.startswith(gone)}
    save_file(kept | tensors, path / "model.safetensors", {"format": "pt"})


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


TRACED = {"tree": "chain:4", "max_new_tokens": 8, "trace": "-", "device": "cpu"}


def assert_first_chain(engine, mtp, model, prompt: list[int]) -> None:
    assert engine.option("draft") == "mtp"
    first = generate(engine, [prompt]).trace[0]
    assert first["draft_tokens"] == drafted_by(mtp, model, prompt, 4)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_scores_and_chains_are_those_of_the_formula(tmp_path, kind):
    model, mtp = made(kind, tmp_path)
    engine = load(str(tmp_path), **TRACED)
    head = engine.drafter.head
    features = model.model(IDS[None]).last_hidden_state[:, :-1]
    embedded = engine.target.embedding(IDS[None, 1:])
    want = mtp(IDS[None, 1:], features)
    got = head(embedded, head.project(features), torch.arange(28)[None])
    assert want.std() > 0.3  # else the bound would hold for anything
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    for prompt in PROMPTS:
        assert_first_chain(engine, mtp, model, prompt)


MATRIX = [  # kind, tree, format, temperature, batch
    ("mimo", "chain:4", "fp32", 0.0, 1), ("mimo", "dynamic:4,3,12", "int8", 1.0, 2), ("mimo", "static", "bf16", 0.0, 2),
    ("qwen", "chain:4", "bf16", 1.0, 2), ("qwen", "dynamic:4,3,12", "fp32", 0.0, 2), ("qwen", "auto", "bf16", 0.0, 1),
    ("experts", "dynamic:4,3,12", "bf16", 0.0, 2), ("tied", "chain:2", "int4", 0.0, 1),
    ("glm", "chain:4", "fp32", 1.0, 1), ("glm", "dynamic:4,3,12", "bf16", 0.0, 2),
    *slow([
        ("mimo", "auto", "int4", 1.0, 1), ("qwen", "static", "int8", 1.0, 1), ("glm", "static", "int4", 1.0, 2),
        ("glm", "auto", "bf16", 0.0, 1),
    ]),
]  # fmt: skip


@pytest.mark.parametrize("kind, tree, form, temperature, batch", MATRIX)
def test_every_tree_gives_vanillas_tokens(hitting, kind, tree, form, temperature, batch):
    files = {"checkpoint": str(hitting[kind]), "tree": tree}
    engine = assert_vanillas_tokens(files, PROMPTS[:batch], form, temperature, 1.5)
    drafter = getattr(engine.drafter, "drafter", engine.drafter)
    assert engine.option("draft") == "mtp"
    assert (not drafter.head.program.in_cpp) == (form == "fp32")


def test_fused_segments_compute_what_the_layer_does(hitting):
    """As on CUDA: the norm before the layer runs before the first segment."""
    for kind in ("mimo", "qwen"):
        head = load(str(hitting[kind]), tree="chain:2", device="cpu").drafter.head
        x = torch.randn(2, 1, 7, 64, generator=torch.Generator().manual_seed(3))
        window = causal_window(torch.zeros(1).long(), 7)
        found = []
        for passes in (HeadPasses(head, None), MergedHead(head, None)):
            cache = KVCache.empty(head.config.model, 1, 7, torch.float32, "cpu")
            found.append(passes.forward(*x, window.slots, cache, window))
        torch.testing.assert_close(*found)


# --------------------------------------------------------------------------------------- GGUF files

NO_TEXT = TextFiles(None, None)  # the files have no tokenizer
NEXTN = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm",
}  # fmt: skip


def gguf_parts(model, mtp) -> tuple[dict, dict]:
    """The tensors of a model and of its MTP layer, as the converter writes them: norms with one added."""
    number = model.config.num_hidden_layers
    layer = {}
    for name, value in mtp.tensors().items():
        stem = name.removeprefix("mtp.").removesuffix(".weight")
        if stem in NEXTN:
            theirs = f"nextn.{NEXTN[stem]}"
        else:
            theirs = GGUF_NAMES[stem.removeprefix("layers.0.")]
        layer[f"blk.{number}.{theirs}.weight"] = (value + ("norm" in name)).numpy()
    return file_of(model)[1], layer


def with_layer(model) -> dict:
    layers = model.config.num_hidden_layers + 1
    return file_of(model, {"block_count": layers, "nextn_predict_layers": 1})[0]


@torch.no_grad()
def test_files_of_llama_cpp(tmp_path):
    """In one file with the model, and alone, beside a file without it."""
    model, mtp = made("qwen")
    own, layer = gguf_parts(model, mtp)
    both = write(tmp_path / "both.gguf", with_layer(model), own | layer)
    plain = write(tmp_path / "plain.gguf", *file_of(model))
    tables = {
        name: own[name] for name in ("token_embd.weight", "output_norm.weight", "output.weight")
    }
    alone = write(tmp_path / "mtp.gguf", with_layer(model), tables | layer)
    for path, head in ((both, ""), (plain, str(alone))):
        engine = load(str(path), NO_TEXT, head=head, **TRACED)
        assert_first_chain(engine, mtp, model, PROMPTS[1])


@torch.no_grad()
def test_a_file_of_glm(tmp_path, capsys):
    """Its published checkpoints repeat the model's embedding and LM head in the layer."""
    model, mtp = made("glm")
    own = gguf_tensors(model, GLM_NAMES, of_experts)
    names = ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.norm", "shared_head.head")
    names = GLM_NAMES | {name: f"nextn.{name.replace('.', '_')}" for name in names}
    begin = NAMES["glm"][0]
    repeated = {
        f"{begin}embed_tokens.weight": model.model.embed_tokens.weight,
        f"{begin}shared_head.head.weight": model.lm_head.weight,
    }
    layer = {}
    for name, value in (mtp.tensors() | repeated).items():
        for part, tensor in of_experts(name, value).items():
            layer[gguf_name(part, names)] = tensor.contiguous().numpy()
    metadata = metadata_of_glm(model, {"block_count": 3, "nextn_predict_layers": 1})
    path = write(tmp_path / "glm.gguf", metadata, own | layer)
    assert_first_chain(load(str(path), NO_TEXT, **TRACED), mtp, model, PROMPTS[1])
    layer["blk.2.nextn.shared_head_head.weight"] = -own["output.weight"]
    path = write(tmp_path / "other.gguf", metadata, own | layer)
    says = "model.layers.2.shared_head.head.weight differs from the model's lm_head.weight"
    assert says in refused(capsys, "--checkpoint", str(path), "--draft", "mtp")


# ----------------------------------------------------------------------------------------- bad input


BAD = [  # tensors that are added, the beginnings of those that are removed, what is said
    ({}, ["mtp."], "holds no MTP layer (no tensor mtp.*); drop --draft mtp"),
    ({}, ["mtp.fc", "mtp.layers.0.mlp.up"], "2 missing weight(s): mtp.fc.weight, mtp.layers.0"),
    ({"mtp.strange.weight": torch.zeros(4)}, [], "1 unexpected weight(s): mtp.strange.weight"),
    ({"mtp.fc.weight": torch.zeros(64, 64)}, [], "asks for [64, 128] in all"),
    ({"mtp.embed_tokens.weight": torch.zeros(96, 64)}, [], "mtp.embed_tokens.weight differs from the model's model.embed_tokens.weight"),
]  # fmt: skip


@pytest.mark.parametrize("tensors, gone, says", BAD)
def test_a_damaged_layer_is_one_line(hitting, tmp_path, capsys, tensors, gone, says):
    path = shutil.copytree(hitting["qwen"], tmp_path / "m")
    edit(path, tensors, *gone)
    assert says in refused(capsys, "--checkpoint", str(path), "--draft", "mtp")


def test_what_has_no_such_layer_is_one_line(hitting, tmp_path, capsys):
    demo = ["--checkpoint", DEMO, "--draft", "mtp"]
    assert "holds no MTP layer (its architecture has none that is read)" in refused(capsys, *demo)
    model, mtp = made("tied")
    _, layer = gguf_parts(model, mtp)
    tables = {"token_embd.weight": torch.zeros(97, 64).numpy()}
    metadata = with_layer(model) | {"qwen35.vocab_size": 97}
    alone = str(write(tmp_path / "mtp.gguf", metadata, tables | layer))
    told = ["--checkpoint", str(hitting["qwen"]), "--head", alone]
    assert "vocab_size is 97, the target's is 96; use the head made for" in refused(capsys, *told)
    stripped = shutil.copytree(hitting["qwen"], tmp_path / "stripped")
    edit(stripped, {}, "mtp.")  # as fine-tuning leaves it: the key stays
    assert load(str(stripped), device="cpu").option("draft") == "ngram"


def test_a_repeated_embedding_and_further_layers(hitting, tmp_path, capsys):
    """The first are not read twice; the others are named, and the first layer drafts."""
    path = shutil.copytree(hitting["mimo"], tmp_path / "m")
    held = load_file(path / "model.safetensors")
    second = {
        name.replace("mtp_layers.0.", "mtp_layers.1."): torch.zeros_like(value)
        for name, value in held.items()
        if "mtp_layers" in name
    }
    shared = {"model.mtp_layers.lm_head.weight": held["lm_head.weight"]}
    edit(path, second | shared)
    options = {"tree": "chain:4", "max_new_tokens": 16, "device": "cpu"}
    capsys.readouterr()
    engine = load(str(path), **options)
    assert "holds several MTP layers; the first one drafts all levels" in capsys.readouterr().err
    plain = load(str(hitting["mimo"]), **options)
    taus = [generate(each, PROMPTS[1:]).stats["tau"] for each in (engine, plain)]
    assert taus[0] == taus[1]
