"""Time other runtimes at the shape of Llama-2-7B with random weights: transformers and gpt-fast.

    python3 scripts/gpu/beside.py --what transformers,gptfast-int4 --gpt_fast brought/gpt-fast

1. `transformers`: `generate` in bf16, with the default cache.
2. `gptfast-bf16`, `gptfast-int8`, `gptfast-int4`, `gptfast-int4-128`: its own compiled step; int4
   in its default groups of 32 weights, or in our default of 128. Its files (`FILES`, from
   https://github.com/pytorch-labs/gpt-fast) are brought along by hand, unchanged, in a folder that
   git ignores; they are never committed. Its int4 packing fails in torch 2.11 ("expected w to be
   uint8"); the packed layout is the same, and random words fill it.
3. The rate is that of decoding: the time of 200 new tokens less that of 2. One run of 200 warms up:
   it compiles for the largest cache, which serves both.

Trade-off: gpt-fast has inductor tune every kernel by trying its variants one after the other, 23
kernels in int4 and 29 in bf16. That stays, since its rate depends on it, although its warm-up took
63 s in int4 on an H200 and takes longer in bf16.

Each runtime is tried once; one that fails, hangs or loses the device ends alone (attempts.py).
Speed only: random weights say nothing. Not here: our own rates (ladder.py).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
# without this folder: transformers would take kernels.py for a package of that name
sys.path[:] = [str(ROOT), *(x for x in sys.path if Path(x).resolve() != FOLDER)]

# nothing else of ours: gpt-fast's modules are named model, quantize and generate, too
from run.parsing import one_line_errors, option, parse
from scripts.bench.row_log import Log
from scripts.gpu.attempts import Attempts

PROMPT = 24  # tokens
SHORT = 2  # new tokens of the run whose time is taken off
RUNS = 3
FILES = ("model.py", "quantize.py", "generate.py", "LICENSE")
RUNTIMES = (
    "transformers",
    "gptfast-bf16",
    "gptfast-int8",
    "gptfast-int4",
    "gptfast-int4-128",
)
GROUP = 32  # gpt-fast's default for int4
SHAPE = {"dim": 4096, "hidden": 11008, "layers": 32, "heads": 32, "vocabulary": 32000}
SMALL = {"dim": 256, "hidden": 768, "layers": 2, "heads": 4, "vocabulary": 320}


@dataclass(frozen=True)
class BesideConfig:
    """Options. Units and effects are in the help texts."""

    what: str = option("transformers", f"a list of {', '.join(RUNTIMES)}")
    gpt_fast: str = option(str(ROOT / "brought" / "gpt-fast"), "folder of gpt-fast's files")
    device: str = option("cuda", "cpu or cuda", ("cpu", "cuda"))
    new: int = option(200, "tokens of a timed run", least=SHORT + 1)
    seconds: float = option(180.0, "for one runtime, then the process is ended", least=1)
    small: bool = option(False, "two small layers, to rehearse")
    json: str = option("beside.jsonl", "file to append to; the runtimes in it are not run again")

    def check(self) -> None:
        """Check the options. Raises: ValueError, also for files of gpt-fast that are missing."""
        for runtime in self.what.split(","):
            if runtime not in RUNTIMES:
                raise ValueError(f"--what: there is no {runtime}; use of {', '.join(RUNTIMES)}")
        if "gptfast" not in self.what:
            return
        missing = [name for name in FILES if not Path(self.gpt_fast, name).is_file()]
        if missing:
            raise ValueError(
                f"--gpt_fast: {self.gpt_fast} has no {', '.join(missing)}; copy them, unchanged, "
                "from gpt-fast's repository"
            )

    @property
    def shape(self) -> dict[str, int]:
        """The sizes of the model."""
        return SMALL if self.small else SHAPE


# --help and mistakes are answered before the imports below, which take seconds
COMMAND = parse(BesideConfig, "beside.py", __doc__) if __name__ == "__main__" else None

import torch
from torch import Tensor, nn


def timed_s(run: Callable[[int], Any], new: int, device: str) -> float:
    """Return the seconds of a run until the device has done its work."""
    use_device(device)
    began = time.perf_counter()
    run(new)
    use_device(device)
    return time.perf_counter() - began


def use_device(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def rates(run: Callable[[int], Any], config: BesideConfig) -> dict[str, Any]:
    """Warm up, then time. run: continues the prompt by so many tokens"""
    warm_s = timed_s(run, config.new, config.device)
    tokens_per_s = []
    for _ in range(RUNS):
        less_s = timed_s(run, SHORT, config.device)
        tokens_per_s.append(
            (config.new - SHORT) / (timed_s(run, config.new, config.device) - less_s)
        )
    return {"tokens_per_s": statistics.median(tokens_per_s), "all": tokens_per_s, "warm_s": warm_s}


# ------------------------------------------------------------------------------ transformers


def transformers_model(config: BesideConfig) -> Any:
    """Make a Llama with random weights on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = config.shape
    made = LlamaConfig(
        hidden_size=shape["dim"],
        intermediate_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["heads"],
        vocab_size=shape["vocabulary"],
        max_position_embeddings=4096,
    )
    made.eos_token_id = None
    made.bos_token_id = None
    made.pad_token_id = None
    with torch.device("meta"):
        model = LlamaForCausalLM(made)
    model = model.to(torch.bfloat16).to_empty(device=config.device).eval()
    for weight in model.parameters():
        weight.data.normal_(0, 0.02)
    with torch.device(config.device):  # its angles are no parameter
        model.model.rotary_emb = type(model.model.rotary_emb)(made)
    return model


def run_transformers(runtime: str, config: BesideConfig) -> dict[str, Any]:
    """Time `generate`."""
    import transformers

    model = transformers_model(config)
    ids = torch.randint(5, 300, (1, PROMPT), device=config.device)  # [1, T]
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}

    @torch.inference_mode()
    def run(new: int) -> None:
        out = model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options)
        assert out.shape[1] == PROMPT + new, out.shape

    return {"version": transformers.__version__} | rates(run, config)


# ------------------------------------------------------------------------------ gpt-fast


def random_values(name: str, like: Tensor, device: str) -> Tensor:
    """Make values for a tensor of gpt-fast's: scales are small, norms 1, words any."""
    if not like.dtype.is_floating_point:
        bits = torch.iinfo(like.dtype)
        return torch.empty(like.shape, dtype=like.dtype, device=device).random_(0, bits.max)
    values = torch.empty(like.shape, dtype=torch.bfloat16, device=device)
    if name == "weight" and like.dim() == 1:
        return values.fill_(1)
    values.normal_(0, 0.02)
    return values.abs_().mul_(0.1) if "scale" in name else values


def gptfast_model(form: str, config: BesideConfig) -> nn.Module:
    """Make its transformer with random weights on the device. form: behind `gptfast-`"""
    import model as gptfast
    import quantize

    shape = config.shape
    sizes = {"n_layer": shape["layers"], "n_head": shape["heads"], "dim": shape["dim"]}
    sizes |= {"intermediate_size": shape["hidden"], "vocab_size": shape["vocabulary"]}
    with torch.device("meta"):
        made = gptfast.Transformer(gptfast.ModelArgs(**sizes))
        if form == "int8":
            made = quantize.WeightOnlyInt8QuantHandler(made).convert_for_runtime()
        bits, _, group = form.partition("-")
        if bits == "int4":
            group_size = int(group or GROUP)
            made = quantize.WeightOnlyInt4QuantHandler(made, group_size).convert_for_runtime()
    for module in made.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            values = random_values(name, weight, config.device)
            setattr(module, name, nn.Parameter(values, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, random_values(name, buffer, config.device))
    return made.eval()


def run_gptfast(runtime: str, config: BesideConfig) -> dict[str, Any]:
    """Time its compiled step, sampling as its own benchmark does."""
    sys.path.insert(0, config.gpt_fast)
    # its tokenizer needs tiktoken, and the prompt is random
    tokenizer = ModuleType("tokenizer")
    tokenizer.get_tokenizer = None
    sys.modules["tokenizer"] = tokenizer
    made = gptfast_model(runtime.partition("-")[2], config)
    from run import generate

    compiled = torch.compile(generate.decode_one_token, mode="reduce-overhead", fullgraph=True)
    generate.decode_one_token = compiled
    vocabulary = config.shape["vocabulary"]
    prompt = torch.randint(0, 300, (PROMPT,), device=config.device, dtype=torch.int)
    # one size of the cache, or every length would compile again
    with torch.no_grad(), torch.device(config.device):
        made.setup_caches(max_batch_size=1, max_seq_length=PROMPT + config.new)
    sampling = {"temperature": 0.8, "top_k": min(200, vocabulary)}

    def run(new: int) -> None:
        options = {"interactive": False, "draft_model": None, "speculate_k": 0} | sampling
        out, _ = generate.generate(made, prompt, new, 1, **options)
        assert out.shape[1] == PROMPT + new, out.shape

    return rates(run, config)


def beside(config: BesideConfig) -> None:
    """Time all runtimes. Exits with a status of attempts.py."""
    config.check()
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no CUDA device; use --device cpu --small")
    label = {"part": "beside", "shape": "small" if config.small else "llama2-7b"}
    waits = partial(use_device, config.device)
    attempts = Attempts(Log(config.json, "--json"), label, config.seconds, waits)
    for runtime in attempts.left(config.what.split(",")):
        run = run_transformers if runtime == "transformers" else run_gptfast
        attempts.run(runtime, runtime, partial(run, runtime, config))
        torch.compiler.reset()  # the next runtime has steps of its own
        if config.device == "cuda":
            torch.cuda.empty_cache()
    attempts.finish()


def main() -> None:
    config = COMMAND or parse(BesideConfig, "beside.py", __doc__)
    with one_line_errors("beside.py"):
        beside(config)


if __name__ == "__main__":
    main()
