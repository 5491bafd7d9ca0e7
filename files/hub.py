"""Fetch a model that is named as on a hub, hf:OWNER/NAME or hf:OWNER/NAME:Q4_K_M, into its cache.

1. The hub lists the files of the newest commit. Where it cannot be reached, the cache does.
2. `chosen` picks the files: weights in Hugging Face layout, or one GGUF file by its quantization.
3. huggingface_hub fetches those that the cache lacks, and goes on where an earlier run was stopped.

The choice is llama.cpp's: Q4_K_M, else the first file; here the first of a type that runs.
Not here: the repositories that hold a head for a model (files/known_heads.py).
"""

from __future__ import annotations

import logging
import re
import sys
from functools import cache
from glob import escape
from pathlib import Path
from typing import NamedTuple

from files.gguf_header import PART
from files.io import HUB_NAME
from files.published import QUANTIZATION
from files.registry import check_architecture
from options import log_note, one_line, require

# the weights of a model or of an EAGLE or block head, in the order of choice; Medusa's and Hydra's
WEIGHTS = (
    r"model.*\.safetensors",
    r"pytorch_model.*\.bin",
    r"(medusa|hydra)_lm_head\.safetensors",
    r"(medusa|hydra)_lm_head\.pt",
)
TEXTS = r"[^/]*\.(json|jinja)|tokenizer\.model|additional_chat_templates/.*"
USUAL = "Q4_K_M"
REFUSED = re.compile(r"(IQ|TQ)\d", re.I)  # types that do not run here
OF_OTHERS = re.compile(r"mmproj|imatrix")  # files beside a model


class HubModel(NamedTuple):
    """A model in the hub's cache."""

    path: Path  # a directory or a GGUF file
    names: tuple[str, ...]  # the repository's, and those of the models that it is made of


class Listing(NamedTuple):
    """The files of a repository: those on the hub, or in its cache where it cannot be reached."""

    files: dict[str, int | None]  # with their sizes, in bytes
    names: tuple[str, ...] = ()  # of the models that it is made of
    commit: str = "main"  # without the hub: that of the copy


@cache  # the hub is asked once
def hub_model(name: str, is_head: bool) -> HubModel:
    """Return the files of a model or a head, and fetch those that are missing, with a note.

    A model of an architecture that is not served is refused before its weights are fetched.

    name: OWNER/NAME, also with hf: before it and :QUANTIZATION behind it
    Raises: ValueError that names the cause and the remedy.
    """
    parts = HUB_NAME.fullmatch(name.removeprefix("hf:"))
    fault = f"a model of a hub is named hf:OWNER/NAME or hf:OWNER/NAME:{USUAL}; it is {name}"
    require(parts is not None, fault)
    repo = parts["repo"]
    listing = listed(repo)
    files = chosen(repo, list(listing.files), parts["kind"] or "")
    folder = _cached(repo, files, listing.commit)
    if folder is None:
        if not is_head and "config.json" in files:
            check_architecture(fetch(repo, ["config.json"]))
        size_gb = sum(listing.files[file] or 0 for file in files) / 1e9
        log_note(
            f"fetching {repo} into the hub's cache: {len(files)} file(s), {size_gb:.2f} GB",
            logging.INFO,
        )
        folder = fetch(repo, files)
    is_file = files[0].lower().endswith(".gguf")
    return HubModel(folder / files[0] if is_file else folder, (repo, *listing.names))


# ---------------------------------------------------------------------------------- choosing


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


def quantization_of(stem: str) -> str:
    """Return the quantization that a GGUF file's name, without .gguf, ends with, else the name."""
    found = QUANTIZATION.search(stem)
    return found[0] if found else stem


def chosen(repo: str, files: list[str], quantization: str) -> list[str]:
    """Return the files of a model among those of a repository, with a note where it has several.

    quantization: of the GGUF file, whatever its case; "": weights in Hugging Face layout if there
        are any, else the GGUF file of the usual quantization, else the first
    Raises: ValueError where there is none.
    """
    directory = [] if quantization else wanted(files)
    if directory:
        return directory
    models: dict[str, list[str]] = {}  # name without its end -> the parts
    for file in sorted(files):
        if file.lower().endswith(".gguf") and not OF_OTHERS.search(file):
            models.setdefault(PART.sub("", file), []).append(file)
    if not models and quantization:
        raise ValueError(f"{repo} has no GGUF file; drop :{quantization}, and use --quant int4")
    if not models:
        kinds = "model*.safetensors nor pytorch_model*.bin nor GGUF files"
        raise ValueError(f"{repo} has neither {kinds}; name another")
    there = ", ".join(dict.fromkeys(map(quantization_of, models)))
    fitting = [name for name in models if _ends_with(name, quantization or USUAL)]
    if not quantization and not fitting:
        fitting = [name for name in models if not REFUSED.match(quantization_of(name))]
    asked = f"of the quantization {quantization}" if quantization else "of a type that runs here"
    require(bool(fitting), f"{repo} has no GGUF file {asked}; it has {there}")
    parts = models[fitting[0]]
    if len(fitting) > 1 or (not quantization and len(models) > 1):
        log_note(f"{repo}: {parts[0]} runs; {repo}:QUANTIZATION names another, of {there}")
    return parts


def _ends_with(stem: str, quantization: str) -> bool:
    return re.search(rf"(^|[-._/]){re.escape(quantization)}$", stem, re.I) is not None


# ---------------------------------------------------------------------------------- the hub


def listed(repo: str) -> Listing:
    """List a repository's files: the hub's, or those in the cache where it cannot be reached.

    Raises: ValueError for a repository that the hub does not know, or the cache without the hub.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import HFValidationError, RepositoryNotFoundError

    try:
        info = HfApi().model_info(repo, revision="main", files_metadata=True, timeout=10)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise refusal(repo, error) from None
    except Exception as error:  # the package's transport, and so its errors, differ by version
        reason = one_line(error, 200)
        try:
            # no pattern: the copy may lack some files
            folder = Path(snapshot_download(repo, allow_patterns=[], local_files_only=True))
        except Exception:
            raise ValueError(
                f"{repo} is not cached, and the hub cannot be reached ({reason}); check the "
                "network, or name a model that the command hf cache ls lists"
            ) from None
        log_note(f"the hub cannot be reached ({reason}): {repo} is the copy in the cache")
        held = [path for path in folder.rglob("*") if path.is_file()]
        return Listing({path.relative_to(folder).as_posix(): None for path in held})
    sizes = {file.rfilename: file.size for file in info.siblings}
    bases = info.card_data.get("base_model") if info.card_data else None
    bases = [bases] if isinstance(bases, str) else bases or []
    return Listing(sizes, tuple(map(str, bases)), info.sha)


def refusal(repo: str, error: Exception) -> ValueError:
    """Return the error about a repository that cannot be fetched, on one line with the remedy."""
    from huggingface_hub import constants
    from huggingface_hub.utils import GatedRepoError, RepositoryNotFoundError

    page = f"{constants.ENDPOINT}/{repo}"
    if isinstance(error, GatedRepoError):
        return ValueError(
            f"{repo} is gated: accept its terms on {page}, then run: hf auth login, or set HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return ValueError(
            f"there is neither a directory {repo} here nor a model {page}; check the name, or, for "
            "a private one, run: hf auth login"
        )
    return ValueError(
        f"could not download {repo} ({type(error).__name__}: {one_line(error, 500)}); "
        "check the name, the network and the free disk space; the next run goes on with what has "
        "come"
    )


def _cached(repo: str, files: list[str], commit: str) -> Path | None:
    """Return the folder of a commit in the cache; None: it lacks some of the files."""
    from huggingface_hub import try_to_load_from_cache

    places = [try_to_load_from_cache(repo, file, revision=commit) for file in files]
    if not all(isinstance(place, str) for place in places):
        return None
    return Path(places[0].removesuffix(files[0]))


def fetch(repo: str, files: list[str]) -> Path:
    """Download files into the cache, with progress on a terminal; those that are there stay.

    Returns: their folder. Raises: ValueError where that fails.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(snapshot_download(repo, allow_patterns=list(map(escape, files))))
    except Exception as error:  # the package's transport, and so its errors, differ by version
        raise refusal(repo, error) from None
