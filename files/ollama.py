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
    pulled = name.removeprefix("ollama:")
    require(manifest.is_file(), f"{name} is not in {where}; run: ollama pull {pulled}")
    layers = read_json(manifest).get("layers")
    layers = [layer for layer in layers or () if isinstance(layer, dict)]
    digests = {str(layer.get("mediaType")): str(layer.get("digest")) for layer in layers}
    adapted = f"{name} is a model with an adapter, which is not supported; use the model without it"
    require(ADAPTER not in digests, adapted)
    digest = re.fullmatch(r"sha256:([0-9a-f]{64})", digests.get(WEIGHTS, ""))
    require(digest is not None, f"{manifest} names no file of weights; pull it again")
    blob = where / "blobs" / f"sha256-{digest[1]}"
    require(blob.is_file(), f"{blob}, the weights of {name}, is missing; pull it again")
    return blob
