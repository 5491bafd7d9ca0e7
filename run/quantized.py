"""Round a directory for the command of quantize.py, and say how to run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from files.calibrate import moments_of
from files.checkpoint import WeightFiles
from files.io import bundled_head
from files.rounding import quantize_directory
from quantize import Quantization
from run.options import pick_device


def write_quantized(config: Any) -> None:
    """Write the directory that a `run.quantize.QuantizeConfig` asks for. Raises: ValueError."""
    quant = Quantization(config.quant, config.group_size)
    out = Path(config.out)
    device = pick_device(config.device)
    path = Path(config.checkpoint)
    moments = ()
    if config.quant == "int4":
        moments = moments_of(path)
    quantize_directory(path, out, quant, device, config.overwrite, moments)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    head = bundled_head(Path(config.checkpoint))
    given = f"--checkpoint {config.out}" + (f" --head {head}" if head.is_dir() else "")
    if not any(name.startswith("model.") for name in WeightFiles(out).readers):
        given = f"--checkpoint MODEL --head {config.out}"
    print(
        f"wrote {config.out}, {size / 1e9:.3f} GB of weights; run: "
        f'python generate.py {given} --prompt "Once upon a time"'
    )
