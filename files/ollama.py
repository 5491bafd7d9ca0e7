"""Find a model that ollama has fetched, ollama:NAME or ollama:NAME:TAG: a GGUF file in its folder.

A manifest, JSON below manifests/HOST/OWNER/NAME/TAG, names the file of the weights, blobs/sha256-*.
Not read: the template, system message and parameters that ollama keeps beside a model; the chat
template is that of the GGUF file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from files.io import read_json
from options import require

FOLDERS = (
    Path("~/.ollama/models"),
    Path("/usr/share/ollama/.ollama/models"),
)  # a user's; a service's
HOST = "registry.ollama.ai"
OWNER = "library"
WEIGHTS = "application/vnd.ollama.image.model"
ADAPTER = "application/vnd.ollama.image.adapter"


def folder() -> Path:
    """Return the folder of ollama's models; the first of the usual ones where none exists."""
    named = os.environ.get("OLLAMA_MODELS")
    folders = [Path(named)] if named else [path.expanduser() for path in FOLDERS]
    return next((path for path in folders if (path / "manifests").is_dir()), folders[0])


def ollama_model(name: str) -> Path:
    """Return the file of a model's weights. name: as `ollama list` has it, with ollama: before it

    Raises: ValueError for a model that is not there, and for one that has an adapter.
    """
    model, _, tag = name.removeprefix("ollama:").partition(":")
    parts = model.split("/")
    names = all(re.fullmatch(r"\w[\w.-]*", part) for part in (*parts, tag or "latest"))
    fault = f"a model of ollama is named ollama:NAME or ollama:NAME:TAG; it is {name}"
    require(names and len(parts) <= 3, fault)
    place = [HOST, OWNER][: 3 - len(parts)] + parts
    where = folder()
    manifest = where.joinpath("manifests", *place, tag or "latest")
    if not manifest.is_file():
        there = ", ".join(_names(where)) or "nothing"
        pulled = name.removeprefix("ollama:")
        raise ValueError(f"{name} is not in {where}, which has {there}; run: ollama pull {pulled}")
    layers = read_json(manifest).get("layers")
    digests: dict[str, list[str]] = {}  # by kind
    for layer in layers if isinstance(layers, list) else ():
        if isinstance(layer, dict):
            digests.setdefault(str(layer.get("mediaType")), []).append(str(layer.get("digest")))
    adapted = f"{name} is a model with an adapter, which is not supported; use the model without it"
    require(ADAPTER not in digests, adapted)
    weights = digests.get(WEIGHTS, [])
    require(
        len(weights) == 1,
        f"{manifest} names {len(weights)} files of weights, not one; pull it again",
    )
    digest = re.fullmatch(r"sha256:([0-9a-f]{64})", weights[0])
    require(
        digest is not None, f"{manifest} names no file of weights, but {weights[0]}; pull it again"
    )
    blob = where / "blobs" / f"sha256-{digest[1]}"
    require(blob.is_file(), f"{blob}, the weights of {name}, is missing; pull it again")
    return blob


def _names(where: Path) -> list[str]:
    """Return the names of the models in ollama's folder."""
    names = []
    for manifest in sorted(where.glob("manifests/*/*/*/*")):
        host, owner, model, tag = manifest.parts[-4:]
        parts = [host, owner] if host != HOST else [owner] if owner != OWNER else []
        names.append(f"{'/'.join([*parts, model])}:{tag}")
    return names
