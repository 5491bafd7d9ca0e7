"""Files of draft heads in every layout: damaged ones are refused in one line, which names the file, and quantized copies are
the head that is quantized while it loads.

A case is a head in a published layout; a row says what is changed in its config.json or metadata and in its tensors.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import test_block_draft
import test_gguf_heads
import test_token_heads
import torch
from safetensors.torch import load_file, save_file
from test_block_layouts import WRITERS
from test_heads import HEAD, IDS, TARGET, fresh, official

from block_files import write_files
from drafts import block_draft, token_draft
from eagle_draft import load_head
from files.gguf_header import read_header
from files.head_kinds import head_kind
from files.rounding import quantize_directory
from files.weights import load_model
from helpers import golden_target
from quantize import Quantization
from run.options import DEMO
from tiny_models import Kind
from tiny_models import write as write_gguf

EAGLE1 = HEAD.with_name("head_eagle12_mha")
TARGET_OF = {
    "eagle1": TARGET.with_name("target_llama_mha"),
    "gguf eagle3": Path(DEMO),
    "medusa": test_token_heads.TARGET,
    "hydra": test_token_heads.TARGET,
}


def write_case(case: str, path: Path) -> Path:
    """Write the head of a case below a folder."""
    out = path / ("head.gguf" if case.startswith("gguf") else "head")
    if case == "eagle3":
        return write_files(out, *official())
    if case == "eagle1":
        return shutil.copytree(EAGLE1, out)
    if case in ("medusa", "hydra"):
        test_token_heads.made(case, out)
    elif case == "DeepSpec":
        test_block_draft.write_head(out, "dspark")
    elif case == "gguf eagle3":
        test_gguf_heads.export(test_gguf_heads.write_head(path / "plain"), out, "--type", "f16")
    else:
        WRITERS[case](out)
    return out


def load(path: Path, target: Path, *quant: Quantization) -> Any:
    """Load a head of any kind."""
    model = load_model(target) if target == Path(DEMO) else golden_target(f"models/{target.name}")
    kind = head_kind(path)
    loaders = {"eagle": load_head, "block": block_draft.load_head}
    return loaders.get(kind, token_draft.load_heads)(path, model, *quant)


def merged(held: dict, changes: dict) -> dict:
    """Objects are merged, and None takes a key away."""
    found = held | changes
    for name, value in changes.items():
        if isinstance(value, dict) and name in held:
            found[name] = merged(held[name], value)
    return {name: value for name, value in found.items() if value is not None}


def damage(path: Path, keys: dict, tensors: dict) -> None:
    """Change the files of a head. keys, tensors: None: left out"""
    if path.is_dir():
        file = next(f for f in path.iterdir() if f.suffix in (".safetensors", ".pt"))
        raw = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(merged(raw, keys)))
        if file.suffix == ".pt":
            torch.save(merged(torch.load(file), tensors), file)
        else:
            save_file(merged(load_file(file), tensors), file)
        return
    metadata = read_header(path).metadata
    prefix = f"{metadata['general.architecture']}."
    keys = {prefix + name: value for name, value in keys.items()}
    held = {t.name: (t.tensor_type, t.data.copy()) for t in gguf.GGUFReader(path).tensors}
    tensors = {n: t.numpy() if isinstance(t, torch.Tensor) else t for n, t in tensors.items()}
    whole = merged(metadata, keys | {"general.alignment": None})
    path.unlink()
    write_gguf(path, whole, merged(held, tensors))


D2T = official()[1]["d2t"]


DAMAGE = {  # case -> keys, tensors, what is said
    "eagle1": [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, {}, "mixes versions: an EAGLE-3 config"),
        ({}, {"fc.weight": None}, "is in no layout of the kind eagle that is known: its tensors are"),
    ],
    "eagle3": [
        ({IDS: [2, 4, 9]}, {}, "takes the inputs of the target's layers 2, 4, 9, which must ascend from 0 to 8"),
        ({IDS: ["2"]}, {}, f"{IDS} must be a list of whole numbers"),
        ({IDS: [2, 4, 5], "target_layer_ids": [2, 4, 5]}, {}, "the target's layers are named twice, as inputs"),
        ({IDS: [2, 4]}, {}, "fc.weight has shape [64, 192], but its config asks for [64, 128]"),
        ({"fc_norm": True, "use_aux_hidden_state": False}, {}, "fc_norm norms what fc takes, and use_aux_hidden_state is"),
        ({"draft_inputs": "token"}, {}, "draft_inputs must be feature&shifted; it is 'token'"),
        ({}, {"norm.weight": None}, "1 missing weight(s): norm.weight"),
        ({}, {"model.norm.weight": fresh(64)}, "mixes versions: it has tensors of two layouts"),
        ({}, {"d2t": D2T + 1}, "d2t reaches the token 128, the target has 0..127; a token is its index plus d2t"),
        ({}, {"d2t": torch.cat((D2T[:1], D2T[:1] - 1, D2T[2:]))}, "d2t reaches the token 1 twice"),
        ({}, {"d2t": D2T.float()}, "d2t must hold draft_vocab_size (80) whole numbers; it is torch.float32 of shape [80]"),
        ({"draft_vocab_size": 129}, {}, "draft_vocab_size, or the length of d2t, is 129, and vocab_size 128; it must"),
        ({"target_hidden_size": 96}, {}, "target_hidden_size is 96, the target's is 64"),
        ({"hidden_size": 32, "target_hidden_size": 64}, {}, "needs its own embed_tokens, fc and lm_head"),
        ({"vocab_size": 100}, {}, "vocab_size is 100, the target's is 128"),
        ({"eagle_config": {"vocab_size": 9}}, {}, "vocab_size is 128, and 9 in another place; keep one"),
        ({}, {"mask_hidden": fresh(192)}, "needs a mask_token_id below vocab_size (128); it is None"),
    ],
    "peagle": [
        ({"mask_token_id": 128}, {}, "below vocab_size (128); it is 128"),
        ({}, {"mask_hidden": torch.zeros(1, 1, 64)}, "mask_hidden"),
    ],
    "DeepSpec": [
        ({"target_layer_ids": [0, 1, 3, 4]}, {}, "fc takes 320 inputs, and target_layer_ids names 4 layers of width 64"),
        ({"target_layer_ids": None}, {}, "the key 'target_layer_ids' is missing"),
        ({"mask_token_id": 128}, {}, "mask_token_id must be below the target's vocab_size (128); it is 128"),
        ({"markov_rank": 4}, {}, "markov_rank is 4, and the weights have rank 8"),
        ({"markov_head_type": "rnn"}, {}, "markov_head_type must be vanilla or gated; it is 'rnn'"),
        ({}, {"confidence_head.proj.weight": torch.zeros(1, 60)}, "confidence_head takes 60 inputs"),
        ({}, {"fc.weight": None}, "fc takes 0 inputs"),
        ({}, {"hidden_norm.weight": None}, "is in no layout of the kind block that is known"),
    ],
    "dflash": [
        ({"speculators_model_type": "xpress"}, {}, "speculators_model_type must be dflash or dspark or dflash2; it is 'xpress'"),
        ({"transformer_layer_config": {"sliding_window": None}}, {}, "layer_types has sliding_attention, and there is no window"),
        ({"transformer_layer_config": {"layer_types": ["linear_attention"] * 2}}, {}, "layer_types must be a list of sliding_attention and full_attention"),
        ({"aux_hidden_state_layer_ids": [1, 2, 4, 5, 8]}, {}, "layers 1, 2, 4, 5, 8, which must ascend from 0 to 7"),
    ],
    "dflash2": [
        ({"conv_group_size": 7}, {}, "conv_group_size must divide hidden_size (64); it is 7"),
        ({"conv_kernel_size": 2}, {}, "attention_conv"),
        ({"selector_top_k": 129}, {}, "selector_top_k must be 1 to the number of drafted tokens (128); it is 129"),
        ({"selector_rank": None}, {}, "3 unexpected weight(s): candidate_selector"),
        ({"projector_type": "domino"}, {}, "projector_type must be dspark or dflash2 or lilicorr; it is 'domino'"),
        ({"use_swa": True}, {}, "use_swa must be false"),
    ],
    "dspine": [
        ({"dspine_config": None}, {}, "unexpected weight"),
        ({"dspine_config": {"transfer_rank": 16}}, {}, "injection.readouts.weight has shape [32, 64], but its config asks"),
        ({}, {"injection.message.weight": None}, "2 missing weight(s): layers.0.injection.message.weight"),
    ],
    "lilicorr": [
        ({"dflash_config": {"lilicorr_vector_eps": None}}, {}, "the key 'lilicorr_vector_eps' is missing"),
        ({"dflash_config": {"lilicorr_num_heads": 3}}, {}, "must divide lilicorr_hidden_size (32); it is 3"),
        ({"dflash_config": {"lilicorr_candidate_topk": 129}}, {}, "at most vocab_size (128); it is 129"),
        ({"dflash_config": {"block_size": 8}}, {}, "block_size is 6, and 8 in another place; keep one"),
        ({}, {"lilicorr.same_slot_bias": None}, "1 missing weight(s): lilicorr.same_slot_bias"),
        ({}, {"lm_head.weight": torch.zeros(128, 64)}, "this head has tables, a bias or a selector of its own"),
    ],
    "gguf eagle3": [
        ({"target_layers": None}, {}, "metadata eagle3.target_layers is missing"),
        ({"attention.head_count": 7}, {}, "head_count_kv must divide head_count"),
        ({"norm_before_residual": 7}, {}, "norm_before_residual must be true or false; it is 7"),
        ({"logit_scale": 2.0}, {}, "eagle3.logit_scale is 2.0, which is not supported"),
        ({}, {"d2t": (Kind.I64, np.full(512, 10))}, "d2t reaches the token 10 twice"),
        ({}, {"d2t": (Kind.I64, np.arange(500))}, "lm_head.weight has shape [512, 256], but its config asks for [500, 256]"),
        ({}, {"blk.0.sinks.weight": (Kind.F32, np.zeros(8, np.float32))}, "1 unexpected weight(s)"),
    ],
    "gguf dflash": [
        ({"attention.sliding_window_pattern": None}, {}, "sliding_window_pattern is missing"),
        ({"attention.sliding_window_pattern": [True]}, {}, "layer_types must name 2 layers; it names 1"),
        ({}, {"lilicorr.same_slot_bias": torch.zeros(4)}, "1 unexpected weight(s): lilicorr.same_slot_bias"),
    ],
    "gguf dflash2": [
        ({"selector_top_k": None}, {}, "selector_top_k must be 1 to"),
    ],
    "gguf dspark": [({}, {"layer_fusion": torch.zeros(2, 5)}, "1 unexpected weight(s)")],
    "medusa": [
        ({}, {"0.0.linear.weight": torch.zeros(32, 32)}, "hidden_size is 32, the target's is 64; use the head made"),
        ({}, {f"{i}.2.weight": None for i in range(4)}, "LM heads 0.2.weight, 1.2.weight, 2.2.weight, 3.2.weight are missing"),
        ({}, {"0.0.linear.weight": torch.zeros(())}, "linear.weight is a single number; use a model's own weights"),
        ({"block_size": 6}, {}, "heads of several kinds: medusa_lm_head.pt (medusa), the key block_size (block); give each"),
    ],
    "hydra": [
        ({}, {"hydra_lm_head.0.weight": torch.zeros(50, 64)}, "vocab_size is 50, the target's is 97; use the head made"),
        ({"hydra_num_heads": 6}, {}, "config.json says hydra_num_heads 6, and the weights hold 4 heads"),
        ({"grounded_heads": None}, {}, "the key 'grounded_heads' is missing"),
        ({"hydra_head_arch": "cross-attn"}, {}, "hydra_head_arch must be mlp or prefix-mlp; it is 'cross-attn'"),
    ],
}  # fmt: skip
ROWS = [(case, *row) for case, rows in DAMAGE.items() for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The head of every case, undamaged: a function of the case, which writes it once."""
    found = {}

    def of(case: str) -> Path:
        if case not in found:
            found[case] = write_case(case, tmp_path_factory.mktemp("whole"))
        return found[case]

    return of


@pytest.mark.parametrize("case, keys, tensors, message", ROWS)
def test_damaged_files_are_refused_in_one_line(whole, case, keys, tensors, message, tmp_path):
    path = tmp_path / whole(case).name
    (shutil.copytree if whole(case).is_dir() else shutil.copy)(whole(case), path)
    damage(path, keys, tensors)
    with pytest.raises(ValueError) as found:
        load(path, TARGET_OF.get(case, TARGET))
    said = str(found.value)
    assert message in said and path.name in said and "\n" not in said


@pytest.mark.parametrize("case", [case for case in DAMAGE if case not in ("medusa", "hydra")])
def test_the_weights_say_how_many_layers_there_are(whole, case, tmp_path):
    """The config of Vicuna's heads counts the target's layers. llama.cpp's count at most the tensors."""
    path = tmp_path / whole(case).name
    (shutil.copytree if whole(case).is_dir() else shutil.copy)(whole(case), path)
    many = {"num_hidden_layers": 6000}
    damage(path, {"block_count": 9} if path.is_file() else many, {})
    if path.is_dir() and "transformer_layer_config" in (path / "config.json").read_text():
        damage(path, {"transformer_layer_config": many}, {})
    found, plain = (load(head, TARGET_OF.get(case, TARGET)) for head in (path, whole(case)))
    assert found.config == plain.config
    assert all(map(torch.equal, found.parameters(), plain.parameters()))


@pytest.mark.parametrize("case", [case for case in DAMAGE if not case.startswith("gguf")])
def test_quantized_copies_have_the_codes_of_loading(whole, case, tmp_path, capsys):
    """As quantize.py writes them: convolutions and tables of tokens stay as they are. Nothing is noted of their keys."""
    quantize_directory(whole(case), tmp_path / "int8", Quantization("int8"))
    ours = load(tmp_path / "int8", TARGET_OF.get(case, TARGET))
    theirs = load(whole(case), TARGET_OF.get(case, TARGET), Quantization("int8"))
    for values in ("named_parameters", "named_buffers"):
        held = dict(getattr(theirs, values)())
        assert all(torch.equal(value, held.pop(name)) for name, value in getattr(ours, values)())
        assert not held
    assert "without effect" not in capsys.readouterr().err
