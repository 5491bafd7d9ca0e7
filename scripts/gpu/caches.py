"""Carry compiled kernels from one machine to the next: the caches of Triton and of inductor.

    python3 scripts/gpu/caches.py --load brought         # before anything compiles
    python3 scripts/gpu/caches.py --save FOLDER          # when all has run

A folder has `triton.tgz` and `inductor.tgz`, or a folder `triton_cache` as cycle_offline.py leaves
one. The caches are where TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR say. A kernel is found again
only by the same build of Triton in the same version of Python; others compile as without it.
This program imports no torch: it answers at once.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from command_line import one_line_errors, option, parse

MOST_BYTES = 16e6  # of an archive; a larger one would not travel
# files of Triton that no launch reads
SOURCES = (".ttir", ".ttgir", ".llir", ".ptx", ".source")
CACHES = {"triton": "TRITON_CACHE_DIR", "inductor": "TORCHINDUCTOR_CACHE_DIR"}


@dataclass(frozen=True)
class CachesConfig:
    load: str = option("", "folder to take caches from, as far as it has some")
    save: str = option("", "folder to write triton.tgz and inductor.tgz to")


def cache_of(name: str) -> Path:
    """Return the folder of a cache. Raises: ValueError where none is named."""
    folder = os.environ.get(CACHES[name], "")
    if not folder:
        raise ValueError(f"{CACHES[name]} is not set; set it to the folder of {name}'s cache")
    return Path(folder)


def load(folder: Path) -> int:
    """Fill the caches. Returns: kernels of Triton that are there now. Writes: the caches."""
    triton = cache_of("triton")
    if (folder / "triton_cache").is_dir():
        shutil.copytree(folder / "triton_cache", triton, dirs_exist_ok=True)
    for name in CACHES:
        archive = folder / f"{name}.tgz"
        if archive.is_file():
            with tarfile.open(archive) as files:
                files.extractall(cache_of(name), filter="data")
    # Triton 3.6 lists a kernel's files by their paths on the machine that compiled it
    for listing in triton.glob("*/__grp__*.json"):
        names = [file.name for file in listing.parent.iterdir() if file != listing]
        paths = {name: str(listing.parent / name) for name in names}
        listing.write_text(json.dumps({"child_paths": paths}), encoding="utf-8")
    return len(list(triton.glob("*/*.cubin")))


def save(folder: Path) -> None:
    """Write the caches' archives; one that is too large is left out, and named."""
    for name in CACHES:
        cache = cache_of(name)
        archive = folder / f"{name}.tgz"
        with tarfile.open(archive, "w:gz") as files:
            for file in sorted(cache.rglob("*")):
                if file.is_file() and not (name == "triton" and file.suffix in SOURCES):
                    files.add(file, file.relative_to(cache))
        size = archive.stat().st_size
        if size > MOST_BYTES:
            archive.unlink()
            print(f"note: {name}'s cache has {size / 1e6:.1f} MB and is left out", file=sys.stderr)


def main() -> None:
    config = parse(CachesConfig, "caches.py", __doc__)
    with one_line_errors("caches.py"):
        if not config.load and not config.save:
            raise ValueError("name a folder with --load or --save")
        if config.load:
            print(f"{load(Path(config.load))} compiled kernels of Triton are here")
        if config.save:
            save(Path(config.save))


if __name__ == "__main__":
    main()
