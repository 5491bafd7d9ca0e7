"""Write a trained head for another runtime: llama.cpp, vLLM or SGLang.

    python scripts/export_head.py --checkpoint MODEL --head HEAD --out head.gguf --type q8_0
    python scripts/export_head.py --checkpoint MODEL --head HEAD --out DIR --layout speculators \\
        --verifier OWNER/NAME    # vLLM's
    python scripts/export_head.py --checkpoint MODEL --head HEAD --out DIR --layout sglang

1. The head is read as `--head` of generate.py reads it, and checked against its target.
2. The directories are described in head_layouts.py.
3. `write_gguf` writes llama.cpp's architecture `eagle3` in one type of FORMATS. Rows that blocks
   do not divide are F16, as in llama.cpp's own tool. The tokenizer is the target's, from its GGUF
   file; of a directory none is written, and llama.cpp runs the head all the same.

llama.cpp runs EAGLE-3 heads with three layers' hidden states, one layer, and no bias; others are
refused.
Package: gguf. Not here: reading such a file (files/gguf_heads.py).
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while torch is imported

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's root

from files.gguf_header import read_header
from files.io import check_output, is_gguf, is_model_name, replace_file
from options import log_note, require
from run.options import DEFAULT
from run.parsing import one_line_errors, option, parse

LAYOUTS = ("gguf", "speculators", "sglang")
FORMATS = ("f16", "q8_0")


@dataclass(frozen=True)
class ExportConfig:
    """Options."""

    head: str = option("", "the head: a directory, or a GGUF file")
    checkpoint: str = option(DEFAULT, "its target: a Hugging Face directory or a GGUF file")
    out: str = option("", "what to write: a file that ends in .gguf, or a directory")
    layout: str = option("gguf", "whose: llama.cpp's, vLLM's or SGLang's", LAYOUTS)
    type: str = option(
        "", "of the weights in GGUF (default: q8_0); directories have 16 bits", ("", *FORMATS)
    )
    verifier: str = option(
        "", "in the layout speculators: the target's name on a hub; default: --checkpoint"
    )
    overwrite: bool = option(False, "replace what is there")

    def check(self) -> None:
        """Check the options. Raises: ValueError."""
        fault = "--head and --out are needed: the head to read, the file to write"
        require(bool(self.head and self.out), fault)
        out = Path(self.out)
        fault = "--verifier belongs to --layout speculators; drop it"
        require(self.layout == "speculators" or not self.verifier, fault)
        fault = f"--type belongs to --layout gguf, and {self.layout} has 16 bits; drop it"
        require(self.layout == "gguf" or not self.type, fault)
        if self.layout == "gguf":
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

from eagle_draft import EagleConfig
from files.fetch import fetched, title_of
from files.gguf_heads import D2T, EAGLE3, SHARPNESS
from model import rope_frequencies
from models.mixtures import has_head_norms
from scripts.gguf_file import gguf_name, keys_of, rotated_as_in_llama_cpp, stored, write
from scripts.head_layouts import Head, read, write_directory

# ------------------------------------------------------------------------------------------- GGUF


def check_fits_llama_cpp(head: Head) -> None:
    """Check that llama.cpp has all that the head is made of. Raises: ValueError.

    Source: its model `eagle3`.
    """
    fault = f"{head.files.path}: block drafters are not written as GGUF; name another --layout"
    require(isinstance(head.config, EagleConfig), fault)
    model = head.config.model
    eagle3 = head.config.eagle3
    rope = (model.rope_scaling or {}).get("rope_type", "none")
    rules = {
        f"takes {len(eagle3.aux_layers)} layers' hidden states, not 3": len(eagle3.aux_layers) != 3,
        f"has {model.n_layers} layers, not 1": model.n_layers != 1,
        "has biases": head.config.fc_bias or model.qkv_bias or model.o_bias or model.mlp_bias,
        "has norms of queries and keys": has_head_norms(model),
        "drafts all levels at once (P-EAGLE)": eagle3.mask_token is not None,
        "has a norm of every hidden state (fc_norm)": eagle3.fc_norm,
        f"uses its last norm otherwise ({eagle3.last_norm})": eagle3.last_norm != "logits",
        f"has RoPE of the kind {rope}": rope not in ("none", "linear", "llama3"),
    }
    for fault, holds in rules.items():
        if holds:
            raise ValueError(f"{head.files.path}: llama.cpp cannot run this head, which {fault}")


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
    for official, read_tensor in head.tensors().items():
        name = gguf_name(official)
        weight = read_tensor().float()
        if not weight.isfinite().all() or weight.abs().max() > torch.finfo(torch.float16).max:
            raise ValueError(f"{head.files.path}: {official} has numbers beyond 16 bits")
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
    check_fits_llama_cpp(head)
    metadata = metadata_of(head, out.stem)
    try:
        replace_file(out, lambda path: write(path, EAGLE3, metadata, tensors_of(head, kind)))
    except OSError as error:
        raise ValueError(
            f"cannot write {out} ({error.strerror}); free some space or name another file"
        ) from None


# ------------------------------------------------------------------------------------------- main


def run(config: ExportConfig) -> None:
    """Write the head. Raises: ValueError."""
    out = Path(config.out)
    head = read(Path(config.head), fetched(config.checkpoint))
    if config.layout == "gguf":
        write_gguf(head, out, config.type or "q8_0")
        print(f"wrote {out}, {out.stat().st_size / 1e6:.1f} MB")
        return
    of_hub = is_model_name(config.checkpoint)
    target = title_of(head.target) if of_hub else str(head.target)
    write_directory(head, out, config.layout, config.verifier or target)
    size_mb = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    print(f"wrote {out}, {size_mb:.1f} MB")


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    config = COMMAND or read_command(argv)
    with one_line_errors("export_head.py"):
        run(config)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
