"""Fetch a model that is named as on a hub, hf:OWNER/NAME or hf:OWNER/NAME:Q4_K_M, into its cache.

1. The hub lists the files of the newest commit. Where it cannot be reached, the cache does.
2. `chosen` picks the files: weights in Hugging Face layout, or one GGUF file by its quantization.
3. huggingface_hub fetches those that the cache lacks. It writes each under another name first, so
   that a file under its own name is complete; the next run goes on where this one was stopped.

The choice is llama.cpp's: Q4_K_M, else the first file; here the first of a type that runs.
Not here: the repositories that hold a head for a model (files/known_heads.py).
"""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from files.gguf_header import PART
from files.io import HUB_NAME
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
QUANTIZATION = re.compile(r"(?<![^-._/])(UD-)?(I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|FP?16|FP?32)$", re.I)
REFUSED = re.compile(r"(IQ|TQ)\d", re.I)  # types that do not run here
OF_OTHERS = re.compile(r"mmproj|imatrix")  # files beside a model
LISTED = 20  # names in a message


class HubModel(NamedTuple):
    """A model in the hub's cache."""

    path: Path  # a directory or a GGUF file
    names: tuple[str, ...]  # the repository's, and those of the models that it is made of


class Listing(NamedTuple):
    """The files of a repository: those on the hub, or in its cache where it cannot be reached."""

    files: dict[str, int | None]  # with their sizes, in bytes
    names: tuple[str, ...] = ()  # of the models that it is made of
    commit: str = ""
    folder: Path | None = None  # of the files, where the hub cannot be reached


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
    fault = f"{name} needs the package huggingface_hub; run: pip install huggingface_hub"
    require(find_spec("huggingface_hub") is not None, fault)
    repo = parts["repo"]
    listing = listed(repo)
    files = chosen(repo, list(listing.files), parts["kind"] or "")
    folder = listing.folder or _in_cache(repo, files, listing.commit)
    if folder is None:
        if not is_head and "config.json" in files:
            check_architecture(_fetch(repo, ["config.json"], listing.commit))
        size_gb = sum(listing.files[file] or 0 for file in files) / 1e9
        log_note(f"fetching {repo} into the hub's cache: {len(files)} file(s), {size_gb:.2f} GB")
        folder = _fetch(repo, files, listing.commit)
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
    Raises: ValueError where there is none, or only a part of one.
    """
    directory = [] if quantization else wanted(files)
    if directory:
        _check_parts(repo, directory)
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
    _check_parts(repo, parts)
    if len(fitting) > 1 or (not quantization and len(models) > 1):
        log_note(f"{repo}: {parts[0]} runs; {repo}:QUANTIZATION names another, of {there}")
    return parts


def _ends_with(stem: str, quantization: str) -> bool:
    return re.search(rf"(^|[-._/]){re.escape(quantization)}$", stem, re.I) is not None


def _check_parts(repo: str, files: list[str]) -> None:
    """Check that no part of several is missing. Raises: ValueError."""
    for file in files:
        part = re.search(r"-\d{5}-of-(\d{5})\.\w+$", file)
        if part:
            begin = file[: part.start()]
            count = sum(other.startswith(f"{begin}-") for other in files)
            fault = f"{repo} has {count} of the {int(part[1])} parts of {begin}; fetch it anew"
            require(count == int(part[1]), fault)


# ---------------------------------------------------------------------------------- the hub


def listed(repo: str) -> Listing:
    """List a repository's files: the hub's, or those in the cache where it cannot be reached.

    Raises: ValueError for a repository that the hub does not know, or the cache without the hub.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import (
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        info = HfApi().model_info(repo, files_metadata=True, timeout=10)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise refusal(repo, error) from None
    except Exception as error:  # the package's transport, and so its errors, differ by version
        cached = _cached_models()
        offline = isinstance(error, OfflineModeIsEnabled)
        reason = "HF_HUB_OFFLINE is set" if offline else one_line(error, 200)
        if repo not in cached:
            there = ", ".join(_shown(cached))
            remedy = "unset that" if offline else "check the network"
            other = f", or name one that is cached: {there}" if there else ""
            raise ValueError(
                f"{repo} is not cached, and the hub cannot be reached ({reason}); {remedy}{other}"
            ) from None
        log_note(f"the hub cannot be reached ({reason}): {repo} is the copy in the cache")
        folder = cached[repo]
        return Listing(dict.fromkeys(_files_of(folder)), folder=folder)
    sizes = {file.rfilename: file.size for file in info.siblings}
    card = getattr(info, "card_data", None)
    bases = card.get("base_model") if card else None
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


def _in_cache(repo: str, files: list[str], commit: str) -> Path | None:
    """Return the folder of a commit's files where the cache has them all."""
    from huggingface_hub import try_to_load_from_cache

    for file in files:
        place = try_to_load_from_cache(repo, file, revision=commit)
        if not isinstance(place, str):
            return None
    return Path(place.removesuffix(file))


def _fetch(repo: str, files: list[str], commit: str) -> Path:
    """Download files of a commit, with progress on a terminal. Returns: their folder.

    Raises: ValueError where that fails.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        # one after the other: each has its line of progress
        folders = {Path(hf_hub_download(repo, file).removesuffix(file)) for file in files}
    except Exception as error:
        raise refusal(repo, error) from None
    folder = folders.pop()
    fault = f"{repo} changed, or the network failed, while it was fetched; run it again"
    require(not folders and folder.name == commit, fault)  # else a file is an earlier commit's
    return folder


# -------------------------------------------------------------------------------- the cache


def _cached_models() -> dict[str, Path]:
    """Return the folder of every model in the cache, of its newest commit there, by its name."""
    from huggingface_hub import scan_cache_dir

    try:
        repos = scan_cache_dir().repos
    except Exception:  # there is no cache
        return {}
    found = {}
    for repo in repos:
        commits = sorted(repo.revisions, key=lambda each: ("main" in each.refs, each.last_modified))
        if repo.repo_type == "model" and commits:
            found[repo.repo_id] = commits[-1].snapshot_path
    return dict(sorted(found.items()))


def _files_of(folder: Path) -> list[str]:
    """Return the complete files of a folder in the cache, whose entries are links."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _shown(models: dict[str, Path]) -> list[str]:
    """Return the names of models in the cache, as a user would write them."""
    names = []
    for repo, folder in models.items():
        files = _files_of(folder)
        if wanted(files):
            names.append(repo)
        stems = {PART.sub("", file) for file in files if file.lower().endswith(".gguf")}
        names += [f"{repo}:{quantization_of(stem)}" for stem in sorted(stems)]
    return [*names[:LISTED], "..."] if len(names) > LISTED else names
