"""Read a head, and write it as a directory that other runtimes serve: speculators' or SGLang's.

- `speculators`: the package of that name trains from it, and vLLM serves it.
- `sglang`: SpecForge's layout of EAGLE-3 and z-lab's of DFlash, which SGLang serves.

Heads are of EAGLE-3, DFlash or DFlash2.

Weights are 16 bits; the tensors are those of the official layout, with the first layer named as
each has it. What a runtime cannot compute is refused: it would draft worse than it was trained to.
Sources: the package speculators 0.9.0, models/eagle3, dflash and dflash2; SpecForge @a6b6b02;
z-lab/dflash @10129599.
Not here: GGUF (export_head.py), reading these layouts (files/heads.py, drafts/block_heads.py).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafts.block_heads import BlockConfig, block_names, in_files, read_block_head, read_vocab
from eagle_draft import EagleConfig
from files.checkpoint import TensorSource
from files.config import open_source, read_config, read_raw
from files.eagle_variants import head_names
from files.head_kinds import head_kind
from files.heads import HeadFiles, draft_vocab, head_files, read_head
from model import ModelConfig
from models.mixtures import has_head_norms
from options import require
from scripts.train.train_block import keys_of, selector_keys
from scripts.train.training import shape_keys


@dataclass(frozen=True)
class Head:
    """A head to write."""

    files: TensorSource  # official names; an LM head's rows are in the order of `ids`
    config: EagleConfig | BlockConfig
    target: Path
    ids: Tensor | None  # [Vd] int64, the tokens that it drafts; None: all

    def names(self) -> list[str]:
        """Return the official names of the tensors that the head uses."""
        of_kind = head_names if isinstance(self.config, EagleConfig) else block_names
        return [theirs for parts in of_kind(self.config).values() for theirs in parts]

    def tensors(self) -> dict[str, Callable[[], Tensor]]:
        """Return the official tensors that the head uses, each with its reader."""
        return {name: self.files.readers[name] for name in self.names()}


def read(head: Path, target: Path) -> Head:
    """Read a head. Raises: ValueError for one that no layout has, or one of another target."""
    kind = head_kind(head)
    fault = f"{head} is a head of the kind {kind}; EAGLE-3, DFlash and DFlash2 can be exported"
    require(kind in ("eagle", "block"), fault)
    if kind == "block":
        files = head_files(head, "none")
        config = read_block_head(files, read_config(target))
        vocab = read_vocab(files, config, torch.device("cpu"))
        ids = vocab.ids if vocab else None
    else:
        files = HeadFiles(head, head_files(head, "none"))
        config = read_head(files, read_config(target))
        if config.eagle3 is None:
            raise ValueError(
                f"{head} is a head of version 1 or 2, and other runtimes are served version 3; "
                "train one with --version 3"
            )
        ids = draft_vocab(files, config)
    read = Head(files, config, target, ids)
    missing = [name for name in read.names() if name not in files.readers]
    if missing:
        raise ValueError(f"{head}: the weights {', '.join(missing)} are missing")
    return read


def write_directory(head: Head, out: Path, layout: str, verifier: str) -> None:
    """Write a head in the layout speculators or sglang. Writes: the directory `out`.

    verifier: the target's name on a hub, or its directory, which speculators' layout names
    Raises: ValueError for a head that the layout has no place for, or where it cannot be written.
    """
    write = {
        ("speculators", True): _speculators_eagle,
        ("speculators", False): _speculators_block,
        ("sglang", True): _sglang_eagle,
        ("sglang", False): _sglang_block,
    }[layout, isinstance(head.config, EagleConfig)]
    where = f"{head.files.path}: the layout {layout} has no place for a head that"
    for fault, holds in faults(head.config, layout).items():
        require(not holds, f"{where} {fault}")
    keys = write(head, verifier) | {"torch_dtype": "bfloat16"}
    tensors = {name: in_files(name, _in_16_bits(x())) for name, x in head.tensors().items()}
    if layout == "speculators" and isinstance(head.config, EagleConfig):
        # the package reads no other embedding, and its published heads have the target's
        embedding = open_source(head.target).readers["model.embed_tokens.weight"]
        tensors.setdefault("embed_tokens.weight", _in_16_bits(embedding()))
        tensors = {name.replace("midlayer.", "layers.0.", 1): x for name, x in tensors.items()}
    if head.ids is not None:
        reached = torch.zeros(head.config.model.vocab_size, dtype=torch.bool)
        tensors["d2t"] = head.ids - torch.arange(len(head.ids))
        tensors["t2d"] = reached.index_fill(0, head.ids, True)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{out.name}.", dir=out.parent) as temporary:
            made = Path(temporary, out.name)
            made.mkdir()
            save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
            (made / "config.json").write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
            if out.is_dir():
                shutil.rmtree(out)
            made.rename(out)
    except OSError as error:
        raise ValueError(
            f"cannot write {out} ({error.strerror}); free some space or name another directory"
        ) from None


def _in_16_bits(weight: Tensor) -> Tensor:
    """Return numbers of 16 bits as they are, wider ones as bf16."""
    return weight if weight.dtype.itemsize == 2 else weight.to(torch.bfloat16)


def faults(config: EagleConfig | BlockConfig, layout: str) -> dict[str, bool]:
    """Return what may be wrong with a head for a layout, each with whether it is."""
    model = config.model
    both = {
        "has biases": model.qkv_bias or model.o_bias or model.mlp_bias,
        "has RoPE of a kind of its own": model.rope_scaling is not None,
    }
    if isinstance(config, BlockConfig):
        return both | {
            "is no DFlash or DFlash2 (a bias of tokens, codes, a confidence, a correlator)": any(
                (config.markov_rank, config.transfer_rank, config.confidence, config.predicts_next)
            )
            or config.correlator is not None,
            "is causal (JetSpec)": config.causal,
            "has windows": bool(model.sliding_layers),
            "has convolutions or a selector, and not both": (
                bool(model.conv_taps) != bool(config.selector_rank)
            ),
            "scales its inputs or scores": (
                model.input_scale != 1 or config.score_factor != 1 or config.score_cap != 0
            ),
            "drafts a part of the vocabulary": layout == "sglang" and config.draft_vocab > 0,
        }
    eagle3 = config.eagle3
    plain = eagle3.last_norm == "logits" and not eagle3.norm_before_residual
    return both | {
        "has a bias behind fc": config.fc_bias,
        "drafts all levels at once (P-EAGLE)": eagle3.mask_token is not None,
        "takes the target's last features": not eagle3.aux_layers,
        "has no last norm": eagle3.last_norm == "none",
        "has further norms": layout == "sglang"
        and (not plain or has_head_norms(model) or eagle3.norm_before_fc or eagle3.fc_norm),
        "is of another width than its target": eagle3.target_dim != model.dim,
    }


# ----------------------------------------------------------------------------- config.json


def _speculators_eagle(head: Head, verifier: str) -> dict[str, Any]:
    config = head.config
    eagle3 = config.eagle3
    return _speculators(head, "eagle3", "Eagle3Speculator", 3, verifier) | {
        "draft_vocab_size": eagle3.draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(eagle3.aux_layers),
        "norm_before_residual": eagle3.norm_before_residual,
        "norm_before_fc": eagle3.norm_before_fc,
        "fc_norm": eagle3.fc_norm,
        "norm_output": eagle3.last_norm == "fed",
        "target_hidden_size": None,
    }


def _speculators_block(head: Head, verifier: str) -> dict[str, Any]:
    config = head.config
    levels = config.block_size - 1
    kind = ("dflash", "DFlashDraftModel")
    further = {}
    if config.selector_rank:
        kind = ("dflash2", "DFlash2DraftModel")
        further = selector_keys(config)
    return (
        _speculators(head, *kind, levels, verifier)
        | further
        | {
            "draft_vocab_size": config.draft_vocab or config.model.vocab_size,
            "aux_hidden_state_layer_ids": list(config.aux_layers),
            "block_size": config.block_size,
            "mask_token_id": config.mask_token,
            "sample_from_anchor": False,
            "sliding_window_non_causal": False,
        }
    )


def _speculators(
    head: Head, algorithm: str, architecture: str, tokens: int, verifier: str
) -> dict[str, Any]:
    """Return the keys that speculators' heads share. tokens: of a chain, by default"""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    named = {
        "name_or_path": verifier,
        "architectures": read_raw(head.target).get("architectures"),
    }
    return {
        "architectures": [architecture],
        "model_type": "speculators",
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": named,
        },
        "transformer_layer_config": layer_keys(head.config.model) | {"attention_bias": False},
        "tie_word_embeddings": False,
        "draft_sharpness": head.config.sharpness,
    }


def _sglang_eagle(head: Head, _: str) -> dict[str, Any]:
    config = head.config
    outputs = [layer - 1 for layer in config.eagle3.aux_layers]  # SGLang counts layers' outputs
    return layer_keys(config.model) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.eagle3.draft_vocab,
        "draft_sharpness": config.sharpness,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": outputs,
            "use_aux_hidden_state": True,
        },
    }


def _sglang_block(head: Head, _: str) -> dict[str, Any]:
    return keys_of(head.config, "bfloat16") | layer_keys(head.config.model)


def layer_keys(model: ModelConfig) -> dict[str, Any]:
    """Return the keys that name the kind and the shape of a head's layers."""
    return {"model_type": "qwen3" if has_head_norms(model) else "llama"} | shape_keys(model)
