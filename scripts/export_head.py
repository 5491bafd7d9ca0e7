"""Write a trained head for another runtime: llama.cpp, vLLM or SGLang.

    python scripts/export_head.py --checkpoint MODEL --head HEAD --out head.gguf --type q8_0
    python scripts/export_head.py --checkpoint MODEL --head HEAD --out DIR --layout vllm \\
        --verifier OWNER/NAME
    python scripts/export_head.py --checkpoint MODEL --head HEAD --out DIR --layout sglang

1. The head is read as `--head` of generate.py reads it, and checked against its target. What a
   runtime cannot compute is refused: it would draft worse than it was trained to.
2. `vllm` is the layout of the package speculators, which vLLM serves; `sglang` SpecForge's of
   EAGLE-3 and z-lab's of DFlash. Weights are 16 bits, under the official layout's names but for
   the first layer's. Heads are of EAGLE-3, DFlash or DFlash2.
3. `llama.cpp` is a GGUF file, architecture `eagle3`, in one type of FORMATS. Rows that blocks do
   not divide are F16, as in llama.cpp's own tool. The tokenizer is the target's, from its GGUF
   file; of a directory none is written, and llama.cpp runs the head all the same.
4. The command that serves target and head is printed.

Sources: llama.cpp's model `eagle3`; the package speculators 0.9.0, models/eagle3, dflash and
dflash2; SpecForge @a6b6b02; z-lab/dflash @10129599.
Package: gguf. Not here: reading such files (files/heads.py, files/gguf_heads.py,
drafts/block_heads.py).
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while torch is imported

import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's root

from files.gguf_header import read_header
from files.io import check_output, is_gguf, is_model_name, replace_file
from options import log_note, require
from run.options import DEFAULT
from run.parsing import one_line_errors, option, parse

LAYOUTS = ("llama.cpp", "vllm", "sglang")
FORMATS = ("f16", "q8_0")


@dataclass(frozen=True)
class ExportConfig:
    """Options."""

    head: str = option("", "the head: a directory, or a GGUF file")
    checkpoint: str = option(DEFAULT, "its target: a Hugging Face directory or a GGUF file")
    out: str = option("", "what to write: a file that ends in .gguf, or a directory")
    layout: str = option("llama.cpp", "the engine that is to serve the head", LAYOUTS)
    type: str = option(
        "", "of the weights in GGUF (default: q8_0); directories have 16 bits", ("", *FORMATS)
    )
    verifier: str = option(
        "", "in the layout vllm: the target's name on a hub; default: --checkpoint"
    )
    overwrite: bool = option(False, "replace what is there")

    def check(self) -> None:
        """Check the options. Raises: ValueError."""
        fault = "--head and --out are needed: the head to read, the file to write"
        require(bool(self.head and self.out), fault)
        out = Path(self.out)
        fault = "--verifier belongs to --layout vllm; drop it"
        require(self.layout == "vllm" or not self.verifier, fault)
        fault = f"--type belongs to --layout llama.cpp, and {self.layout} has 16 bits; drop it"
        require(self.layout == "llama.cpp" or not self.type, fault)
        if self.layout == "llama.cpp":
            require(out.suffix.lower() == ".gguf", f"--out: {out} must end in .gguf")
            check_output(out, "--out")
        fault = f"--out: {out} exists; give --overwrite to replace it, or name another"
        require(self.overwrite or not out.exists(), fault)


def read_command(argv: list[str] | None = None) -> ExportConfig:
    """Read the command line. Exit with status 2 on a mistake."""
    config = parse(ExportConfig, "export_head.py", __doc__, argv)
    with one_line_errors("export_head.py"):
        config.check()
    return config


# --help and mistakes are answered before the imports below, which take seconds
COMMAND = read_command() if __name__ == "__main__" else None

import numpy as np
import torch
from torch import Tensor

from drafts.block_draft import BlockHead
from drafts.block_heads import BlockConfig, name_in_files, read_block_head, read_vocab
from eagle_draft import EagleConfig
from files.config import open_source, read_config, read_raw
from files.fetch import fetched, title_of
from files.gguf_heads import D2T, EAGLE3, SHARPNESS
from files.head_kinds import head_kind
from files.heads import HeadFiles, draft_vocab, head_files, make_head, read_head
from files.writing import write_checkpoint
from model import ModelConfig, rope_frequencies
from models.mixtures import has_head_norms
from scripts.gguf_file import gguf_name, keys_of, rotated_as_in_llama_cpp, stored, write
from scripts.train import train_block
from scripts.train.training import shape_keys

# ------------------------------------------------------------------------------------------- heads


@dataclass(frozen=True)
class Head:
    """A head to write."""

    path: Path
    kind: str
    config: EagleConfig | BlockConfig
    target: Path
    ids: Tensor | None  # [Vd] int64, the tokens that it drafts; None: all
    # official name -> reader; an LM head's rows are in the order of `ids`
    tensors: dict[str, Callable[[], Tensor]]


def read(head: Path, target: Path) -> Head:
    """Read a head. Raises: ValueError for one that no layout has, or one of another target."""
    kind = head_kind(head)
    fault = f"{head} is a head of the kind {kind}; EAGLE-3, DFlash and DFlash2 can be exported"
    require(kind in ("eagle", "block"), fault)
    files = HeadFiles(head, head_files(head, "none"), kind)
    if kind == "block":
        config = read_block_head(files, read_config(target))
        vocab = read_vocab(files, config)
    else:
        config = read_head(files, read_config(target))
        if config.eagle3 is None:
            raise ValueError(
                f"{head} is a head of version 1 or 2, and other runtimes are served version 3; "
                "train one with --version 3"
            )
        drafted = config.eagle3.draft_vocab
        vocab = draft_vocab(files, config.model.vocab_size, [config.eagle3.lm_head], drafted)
    with torch.device("meta"):
        module = BlockHead(config) if kind == "block" else make_head(config)
    names = [theirs for parts in module.weight_names().values() for theirs in parts]
    missing = [name for name in names if name not in files.readers]
    require(not missing, f"{head}: the weights {', '.join(missing)} are missing")
    tensors = {name: files.readers[name] for name in names}
    return Head(head, kind, config, target, vocab.ids if vocab else None, tensors)


# ------------------------------------------------------------------------------ what a layout holds

# layout -> tensors that its runtime does not read, by the official names
UNREAD = {
    "llama.cpp": r".*\.bias|mask_hidden|fc_norm\..*|layers\..*|midlayer\.self_attn\.[qk]_norm\..*",
    "sglang": (
        r".*\.bias|mask_hidden|confidence_head.*|input_norm\..*|fc_norm\..*|"
        r"midlayer\.self_attn\.[qk]_norm\..*"
    ),
    "vllm": r".*\.bias|mask_hidden|confidence_head.*",
}
# fields that a head has of its target, or that layouts have their own ways to say
FREE = {"model", "eagle3", "dtype", "eos_ids", "tie_embeddings", "embedding", "window_from_root"}


def check_tensors(head: Head, layout: str) -> str:
    """Check that a runtime reads what a head is made of. Raises: ValueError.

    Returns: the begin of a message on what the layout cannot say.
    """
    where = f"{head.path}: the layout {layout} has no place for a head"
    require(head.kind == "eagle" or layout != "llama.cpp", f"{where} that is a block drafter")
    unread = [name for name in head.tensors if re.fullmatch(UNREAD[layout], name)]
    require(not unread, f"{where} with the weights {', '.join(unread[:3])}")
    require("norm.weight" in head.tensors, f"{where} that has no last norm")
    if layout == "llama.cpp":
        taps = len(head.config.eagle3.aux_layers)
        require(taps == 3, f"{where} that takes {taps} layers' hidden states, not 3")
    return where


def check_read_back(head: Head, where: str, written: Path) -> None:
    """Check that what was written is read as the same head. where: from `check_tensors`

    Raises: ValueError.
    """
    try:
        again = facts(read(written, head.target).config)
    except ValueError as error:
        raise ValueError(f"{where} like this, which would be wrong: {error}") from None
    for name, ours in facts(head.config).items():
        fault = f"{where} whose {name} is {ours}; it would be read as {again[name]}"
        require(is_same(ours, again[name]), fault)


def facts(config: EagleConfig | BlockConfig) -> dict[str, Any]:
    """Return the fields of a config, of its layers and of its parts beside them."""
    parts = vars(config) | vars(config.model)
    if isinstance(config, EagleConfig):
        parts |= vars(config.eagle3)
    return {name: value for name, value in parts.items() if name not in FREE}


def is_same(ours: Any, theirs: Any) -> bool:
    """Return whether two values are equal, numbers but for the rounding of 32 bits."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(is_same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-5)
    return ours == theirs


# ------------------------------------------------------------------------------------- directories


def write_directory(head: Head, out: Path, layout: str, verifier: str) -> None:
    """Write a head in the layout vllm or sglang. Writes: the directory `out`.

    verifier: the target's name on a hub, or its directory, which vLLM's layout names
    Raises: ValueError for a head that the layout has no place for, or where it cannot be written.
    """
    where = check_tensors(head, layout)
    if layout == "vllm":
        keys = _speculators(head, verifier)
    else:
        keys = _sglang_eagle(head) if head.kind == "eagle" else _sglang_block(head)
    keys |= {"torch_dtype": "bfloat16"}
    tensors = {name_in_files(name): _in_16_bits(x()) for name, x in head.tensors.items()}
    if layout == "vllm" and head.kind == "eagle":
        # the package reads no other embedding, and its published heads have the target's
        embedding = open_source(head.target).readers["model.embed_tokens.weight"]
        tensors.setdefault("embed_tokens.weight", _in_16_bits(embedding()))
        tensors = {name.replace("midlayer.", "layers.0.", 1): x for name, x in tensors.items()}
    if head.ids is not None:
        reached = torch.zeros(head.config.model.vocab_size, dtype=torch.bool)
        tensors["d2t"] = head.ids - torch.arange(len(head.ids))
        tensors["t2d"] = reached.index_fill(0, head.ids, True)
    check = partial(check_read_back, head, where)
    write_checkpoint(out, tensors.items(), keys, overwrite=True, check=check)


def _in_16_bits(weight: Tensor) -> Tensor:
    """Return numbers of 16 bits as they are, wider ones as bf16."""
    return weight if weight.dtype.itemsize == 2 else weight.to(torch.bfloat16)


def _speculators(head: Head, verifier: str) -> dict[str, Any]:
    config = head.config
    if head.kind == "eagle":
        eagle3 = config.eagle3
        algorithm, architecture = "eagle3", "Eagle3Speculator"
        own = {
            "draft_vocab_size": eagle3.draft_vocab,
            "eagle_aux_hidden_state_layer_ids": list(eagle3.aux_layers),
            "norm_before_residual": eagle3.norm_before_residual,
            "norm_before_fc": eagle3.norm_before_fc,
            "fc_norm": eagle3.fc_norm,
            "norm_output": eagle3.last_norm == "fed",
            "target_hidden_size": None,
        }
    else:
        algorithm, architecture = "dflash", "DFlashDraftModel"
        own = {
            "draft_vocab_size": config.draft_vocab or config.model.vocab_size,
            "aux_hidden_state_layer_ids": list(config.aux_layers),
            "block_size": config.block_size,
            "mask_token_id": config.mask_token,
            "sample_from_anchor": False,
            "sliding_window_non_causal": False,
        }
        if config.selector_rank:
            algorithm, architecture = "dflash2", "DFlash2DraftModel"
            own |= train_block.selector_keys(config)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": levels_of(head),  # of a chain, by default
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    named = {
        "name_or_path": verifier,
        "architectures": read_raw(head.target).get("architectures"),
    }
    return own | {
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
        "transformer_layer_config": layer_keys(config.model) | {"attention_bias": False},
        "tie_word_embeddings": False,
        "draft_sharpness": config.sharpness,
    }


def _sglang_eagle(head: Head) -> dict[str, Any]:
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


def _sglang_block(head: Head) -> dict[str, Any]:
    plain = replace(head.config, causal=False)  # it has no JetSpec
    return train_block.keys_of(plain, "bfloat16") | layer_keys(plain.model)


def layer_keys(model: ModelConfig) -> dict[str, Any]:
    """Return the keys that name the kind and the shape of a head's layers."""
    return {"model_type": "qwen3" if has_head_norms(model) else "llama"} | shape_keys(model)


# ------------------------------------------------------------------------------------------- GGUF


def metadata_of(head: Head, name: str) -> dict[str, Any]:
    """Return the keys of the file, and the target's tokenizer. name: the file's"""
    model = head.config.model
    eagle3 = head.config.eagle3
    keys = keys_of(model) | {
        "target_layers": list(eagle3.aux_layers),
        "target_hidden_size": eagle3.target_dim,
        "norm_before_residual": eagle3.norm_before_residual,
        "norm_before_fc": eagle3.norm_before_fc,
    }
    if (model.rope_scaling or {}).get("rope_type") == "linear":
        keys["rope.scaling.type"] = "linear"
        keys["rope.scaling.factor"] = float(model.rope_scaling["factor"])
    metadata = {"general.name": name, SHARPNESS: float(head.config.sharpness)}
    metadata |= {f"{EAGLE3}.{key}": value for key, value in keys.items()}
    tokenizer = {"tokenizer.ggml.model": "no_vocab"}
    if is_gguf(head.target):
        theirs = read_header(head.target).metadata
        tokenizer = {k: v for k, v in theirs.items() if k.startswith("tokenizer.") and v != []}
    else:
        log_note(f"{head.target} is no GGUF file, so the head's file has no tokenizer")
    return metadata | tokenizer


def tensors_of(head: Head, kind: str) -> Iterator[tuple[str, np.ndarray, str | None]]:
    """Yield the tensors of the file, as `gguf_file.write` takes them. kind: of FORMATS"""
    model = head.config.model
    for official, read_tensor in head.tensors.items():
        name = gguf_name(official)
        weight = read_tensor().float()
        if not weight.isfinite().all() or weight.abs().max() > torch.finfo(torch.float16).max:
            raise ValueError(f"{head.path}: {official} has numbers beyond 16 bits")
        if weight.dim() == 1:
            yield name, weight.numpy(), None
            continue
        yield name, *stored(rotated_as_in_llama_cpp(weight, name, model), kind)
    if head.ids is not None:
        yield D2T, head.ids.numpy(), None
    if (model.rope_scaling or {}).get("rope_type") == "llama3":
        (rope,) = model.ropes
        plain = rope_frequencies(rope._replace(scaling=None))
        yield "rope_freqs.weight", (plain / rope_frequencies(rope)).numpy(), None


def write_gguf(head: Head, out: Path, kind: str) -> None:
    """Write a head in a type of FORMATS. Writes: `out`.

    Raises: ValueError for a head that llama.cpp does not run, or where it cannot be written.
    """
    where = check_tensors(head, "llama.cpp")
    metadata = metadata_of(head, out.stem)

    def write_and_check(path: Path) -> None:
        write(path, EAGLE3, metadata, tensors_of(head, kind))
        check_read_back(head, where, path)

    try:
        replace_file(out, write_and_check)
    except OSError as error:
        raise ValueError(
            f"cannot write {out} ({error.strerror}); free some space or name another file"
        ) from None


# ------------------------------------------------------------------------------------------- main


def levels_of(head: Head) -> int:
    """Return the tokens that a head drafts in a cycle, by default."""
    return 3 if head.kind == "eagle" else head.config.block_size - 1


def command(head: Head, out: Path, layout: str, target: str) -> str:
    """Return the command by which an engine serves a target with its head. out: the written one"""
    levels = levels_of(head)
    if layout == "llama.cpp":
        model = target if is_gguf(Path(target)) else "MODEL.gguf"  # it reads no other files
        flags = ["-m", model, "-md", str(out), "--spec-type", "draft-eagle3"]
        flags += ["--spec-draft-n-max", str(levels)]
        return shlex.join(["llama-server", *flags])
    if layout == "vllm":
        speculation = {"model": str(out), "num_speculative_tokens": levels}
        return shlex.join(
            ["vllm", "serve", target, "--speculative-config", json.dumps(speculation)]
        )
    flags = ["--model", target, "--speculative-draft-model-path", str(out)]
    if head.kind == "eagle":
        flags += ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", str(levels)]
        flags += ["--speculative-eagle-topk", "1"]
        flags += ["--speculative-num-draft-tokens", str(levels + 1)]
    else:
        flags += ["--speculative-algorithm", "DFLASH"]
    return shlex.join(["python", "-m", "sglang.launch_server", *flags])


def run(config: ExportConfig) -> None:
    """Write the head, and print how to serve it. Raises: ValueError."""
    out = Path(config.out)
    head = read(Path(config.head), fetched(config.checkpoint))
    of_hub = is_model_name(config.checkpoint)
    target = config.verifier or (title_of(head.target) if of_hub else str(head.target))
    files = [out]
    if config.layout == "llama.cpp":
        write_gguf(head, out, config.type or "q8_0")
    else:
        write_directory(head, out, config.layout, target)
        files = [*out.iterdir()]
    size_mb = sum(file.stat().st_size for file in files) / 1e6
    print(f"wrote {out}, {size_mb:.1f} MB\n{command(head, out, config.layout, target)}")


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    config = COMMAND or read_command(argv)
    with one_line_errors("export_head.py"):
        run(config)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
