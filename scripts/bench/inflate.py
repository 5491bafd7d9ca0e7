"""Write a stand-in of real size: the function of a small target and its head in a larger shape.

    python scripts/bench/inflate.py --shape llama2-7b --out stand-ins/7b
    python generate.py --checkpoint stand-ins/7b --prompt "def read_lines(path):"
    python scripts/bench/inflate.py --shape tiny-0.5b,n_layers=9,vocab_size=4096 --out short
    python scripts/bench/inflate.py --checkpoint checkpoints/demo-moe --shape mixtral-tiny --out moe

1. extras/stand_in.py computes one tensor at a time. Shards are written as they fill, so that memory
   holds one shard at most. The stand-in's name in `config.json` appears in everything printed.
2. hf/checkpoint.py writes the directory atomically. Start a killed run again.

The result is a Hugging Face directory. Without the disk: `generate.py --set inflate=SHAPE`.
Not here: the maths and the uses of a stand-in (extras/stand_in.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's root

from cli.io import read_json
from cli.parsing import one_line_errors, option, parse
from extras.stand_in import SHAPES, InflatedFiles, Shape, head_config, inflate_head, inflate_target
from hf.checkpoint import SHARD_BYTES, check_out, write_checkpoint
from model import DTYPES
from options import DEMO


@dataclass(frozen=True)
class InflateConfig:
    """Options. Units and effects are in the help texts."""

    checkpoint: str = option(DEMO, "Hugging Face directory of the small target")
    eagle: str = option(
        "",
        "directory of its EAGLE-1/2 head; default: the checkpoint's name with -eagle, if it exists",
    )
    shape: str = option(
        "llama2-7b",
        f"shape of the stand-in: {', '.join(SHAPES)}, also with sizes of its own, as "
        "llama2-7b,n_layers=9; tokens beyond the small model's are never chosen",
    )
    out: str = option("", "directory to write the target to")
    eagle_out: str = option(
        "", "directory to write the head to; default: OUT-eagle, where generate.py finds it"
    )
    dtype: str = option("", "default: the checkpoint's", tuple(DTYPES))
    overwrite: bool = option(False, "replace stand-ins that are there already")

    def check(self) -> None:
        """Check the options. Raises: ValueError for a value that cannot work."""
        if not self.out:
            raise ValueError("--out is missing; name the directory to write")
        if self.eagle_out and Path(self.eagle_out).resolve() == Path(self.out).resolve():
            raise ValueError(
                f"--eagle_out must not be the target's directory {self.out}; name another one"
            )


def check(files: InflatedFiles, out: Path, overwrite: bool) -> None:
    """Check that `out` may be written. Raises: ValueError, also when the disk is too small."""
    if out.exists() and overwrite and not _is_stand_in(out / "config.json"):
        raise ValueError(
            f"--overwrite replaces stand-ins only, and {out} is none; choose another directory"
        )
    check_out(out, overwrite, files_bytes(files))


def _is_stand_in(settings: Path) -> bool:
    return settings.is_file() and "stand_in" in read_json(settings)


def write(
    files: InflatedFiles, out: Path, overwrite: bool = False, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a stand-in in Hugging Face layout. Writes: `out`.

    Raises: ValueError when that cannot be done.
    """
    check(files, out, overwrite)
    write_checkpoint(out, _computed(files), files.config, files.path, overwrite, shard_bytes)


def files_bytes(files: InflatedFiles) -> int:
    """Return the size of all tensors."""
    return sum(math.prod(recipe.size) for recipe in files.recipes.values()) * files.dtype.itemsize


def _computed(files: InflatedFiles) -> Iterator[tuple[str, Tensor]]:
    name = files.config["stand_in"]
    with tqdm(total=files_bytes(files), unit="B", unit_scale=True, desc=name) as bar:
        for name in files.recipes:
            tensor = files.read(name)
            yield name, tensor
            bar.update(tensor.nbytes)


def _head_path(config: InflateConfig) -> Path | None:
    """Return the head's directory, or None without one. Raises: ValueError for a missing one."""
    if config.eagle:
        return Path(config.eagle)
    path = Path(config.checkpoint)
    bundled = path.with_name(path.name + "-eagle")
    if bundled.is_dir():
        return bundled
    if config.eagle_out:
        raise ValueError(
            f"--eagle_out needs a head; name its directory with --eagle (there is no {bundled})"
        )
    return None


def run(config: InflateConfig) -> None:
    """Write the target, and the head where there is one."""
    config.check()
    path = Path(config.checkpoint)
    shape = Shape.parse(config.shape)
    dtype = DTYPES.get(config.dtype)
    target_out = Path(config.out)
    jobs = [(inflate_target(path, shape, dtype), target_out)]
    head = _head_path(config)
    if head is not None:
        out = target_out.with_name(target_out.name + "-eagle")
        if config.eagle_out:
            out = Path(config.eagle_out)
        files = inflate_head(head, head_config(head), shape, dtype)
        jobs.append((files, out))
    for files, out in jobs:  # before anything is computed
        check(files, out, config.overwrite)
    for files, out in jobs:
        write(files, out, config.overwrite)
        print(f"wrote {out}, {files_bytes(files) / 1e9:.2f} GB: {files.config['stand_in']}")
    named = f" --eagle {jobs[-1][1]}" if config.eagle_out else ""
    command = f"python generate.py --checkpoint {config.out}{named}"
    print(f'next: {command} --prompt "def read_lines(path):"')


def main() -> None:
    """Run the command line."""
    config = parse(InflateConfig, "inflate.py", __doc__)
    with one_line_errors("inflate.py"):
        run(config)


if __name__ == "__main__":
    main()
