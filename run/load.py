"""Load everything that a config names: the target, the drafter and the tokenizer, as a warm engine.

On a CPU an engine is ready when its weights are. On CUDA `warm_up` runs the cycles until they are
captured, and with --compile compiled.
Not here: the ways to draft (run/methods.py), the formats of files (files/), the loop (decode.py,
run/session.py), prompts and results (generate.py).
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from decode import build_cycles
from drafters import RootOnly
from files.checkpoint import saved_quantization
from files.config import open_source, read_raw
from files.fetch import with_files
from files.machine import has_cpu_operators
from files.memory import free_bytes
from files.not_finite import check_small_weights
from files.rank import of_ranks, this_rank
from files.texts import NO_TEMPLATE, read_text_files, template_name
from files.weights import int4_group, keeps_blocks, load_model
from model import DTYPES, Transformer
from options import load_part, log_note, part_or, require
from quantize import BLOCKS, Quantization
from run.engine import Engine, cache_dtype
from run.methods import MTP, has_drafts, loader_of, spec_of
from run.observer import DraftMethod
from run.options import GenerateConfig, pick_device
from run.parsing import by_names
from run.prompts import read_grammar
from run.resolved import resolve_draft, tree_options
from run.stats import sequence_memory, slot_bytes
from run.warm_up import warm_up

if TYPE_CHECKING:
    from files.texts import TextFiles

CACHE_SHARE = 0.5  # of the free memory, for the target's cache; drafts and scores need some, too
ROUND_TO = 256  # tokens
OLDEST = (8, 0)  # compute capability: bf16 on tensor cores, asynchronous copies
# prompts are given to generate(), and its answers have what the files have
OF_COMMANDS = {"prompt", "prompt_file", "interactive", "compare", "json", "profile"}
CUDA_CONTEXT = 4096  # tokens; attention starts blocks for every slot, which is measured up to here


def load(
    config: GenerateConfig | str | Path | None = None,
    text: TextFiles | None = None,
    shapes: bool = True,
    **options: Any,
) -> Engine:
    """Load everything that `config` names, and make the engine ready.

    config: options, or the path of the checkpoint
    text: the tokenizer and the template, where they are read already
    shapes: a request may bring cuts and penalties that `config` has not (drafts/shaping.py)
    options: fields of `GenerateConfig`, when no config is given; chat may be True or False, too
    Raises: ValueError for anything wrong with options or files.
    """
    asked = _asked(config, options)
    asked.check()
    began = time.perf_counter()
    device = _pick_device(asked)
    if asked.threads:
        torch.set_num_threads(asked.threads)
    asked = with_files(asked)
    path = Path(asked.checkpoint)
    if template_name(path, asked) == "":
        asked = replace(asked, chat="")
    if asked.draft == MTP and not asked.head:
        load_part("reader", "mtp").need_mtp(path, open_source(path))  # before the weights are read
    target = _load_target(replace(asked, device=device), path)
    check_small_weights(target, path)
    tokenizer, template = text or read_text_files(path, asked)
    _note_attention(target)
    eos_ids = _eos_ids(target, tokenizer, template)
    engine = Engine(
        target,
        (RootOnly(),),
        _context(asked, target),
        eos_ids,
        config=asked,
        shaping=_shaping(asked, target, tokenizer, eos_ids, shapes),
        tokenizer=tokenizer,
        template=template,
    )
    engine = with_draft(engine, asked, device)
    engine = replace(engine, load_s=time.perf_counter() - began)
    source = read_grammar(asked)
    if source is not None:
        grammar = load_part("extension", "grammar")
        engine = replace(engine, guide=grammar.Grammar(engine, source))
    if asked.batch_size > 1:
        log_note(sequence_memory(engine), logging.INFO)
    return warm_up(build_cycles(engine))


def _asked(config: GenerateConfig | str | Path | None, options: dict[str, Any]) -> GenerateConfig:
    """Return the options of a call of `load`. Raises: ValueError for a name that is not there."""
    if isinstance(config, (str, Path)):
        options = {"checkpoint": config, **options}
        config = None
    if isinstance(options.get("chat"), bool):
        options["chat"] = "" if options["chat"] else NO_TEMPLATE
    of_commands = ", ".join(sorted(options.keys() & OF_COMMANDS))
    fault = f"{of_commands}: an option of commands alone, which load() does not take; leave it out"
    require(not of_commands, fault)
    if config is not None and options:
        raise ValueError("load() takes a config or options; use dataclasses.replace(config, ...)")
    return config or GenerateConfig(**by_names(GenerateConfig, options))


def _shaping(
    config: GenerateConfig,
    target: Transformer,
    tokenizer: Any,
    eos_ids: tuple[int, ...],
    shapes: bool,
) -> Any:
    """Return the cuts and penalties that requests may ask for; None where none can.

    Raises: ValueError for no token's id.
    """
    if not has_drafts() or not (shapes or config.sampling.is_shaped):
        return None
    device = target.norm.weight.device
    vocab = target.config.vocab_size
    shaping = load_part("extension", "shaping")(vocab, device, tokenizer, eos_ids)
    shaping.check(config.sampling)
    return shaping


def _pick_device(config: GenerateConfig) -> str:
    """Choose the device and its operators. Writes: the process's device; `set_plain`'s choice."""
    device = pick_device(config.device)
    fault = f"--kv {config.kv} is for CPUs, and the device is {device}; drop it"
    require(not config.kv or device == "cpu", fault)
    set_cuda_device(device)
    if config.plain:
        part_or("machine", "set_plain", lambda: None)()
    return device


def set_cuda_device(device: str) -> None:
    """Select a CUDA device, and let its 16-bit products add partial sums in fp32.

    So a row of a tree rounds as a single token does.

    Raises: ValueError for a GPU that the kernels do not serve.
    """
    if device.startswith("cuda"):
        index = torch.device(device).index or 0
        level = torch.cuda.get_device_capability(index)
        if level < OLDEST:
            raise ValueError(
                f"--device {device} has compute capability {level[0]}.{level[1]}, and the kernels "
                f"need {OLDEST[0]}.{OLDEST[1]} or later; use another GPU, or --device cpu"
            )
        torch.cuda.set_device(index)
        products = torch.backends.cuda.matmul
        products.allow_bf16_reduced_precision_reduction = False
        products.allow_fp16_reduced_precision_reduction = False


def with_draft(engine: Engine, asked: GenerateConfig, device: str) -> Engine:
    """Return the engine with its target, and with the draft and the options that are asked for.

    The cycles are still to be made (`build_cycles`).
    Raises: ValueError for a draft that does not fit.
    """
    target = engine.target
    asked = with_files(asked)
    config = _resolved(asked, target, Path(asked.checkpoint), device)
    method = load_method(target, config, engine.tokenizer)
    if config.quant == "int4":  # for the record: the group that was asked for, or the file's own
        config = replace(config, group_size=int4_group(target))
    used = method.resolved or tree_options(method.presets[-1])
    return replace(
        engine.with_method(method),
        config=asked,
        published_tau=load_part("reader", "published tau")(config.head) if config.head else 0.0,
        resolved=_changes(asked, config) | {"context": engine.context} | used,
    )


def skips_requantization(config: GenerateConfig, path: Path) -> bool:
    """Return whether --quant leaves blocks as they are: most weights have as few bits already.

    A second rounding would cost answers and save nothing. Prints a line about it. On CUDA int4 in
    groups of 128 takes fewer instructions, so that they are rounded where that is asked for.
    """
    if config.quant == "none" or config.device != "cpu":
        return False
    if not keeps_blocks(config, path):
        return False
    if not open_source(path).mostly_has(int(config.quant.removeprefix("int"))):
        return False
    log_note(
        f"{path} has no more bits than --quant {config.quant}: it is not rounded again",
        logging.INFO,
    )
    return True


def _load_target(config: GenerateConfig, path: Path) -> Transformer:
    """Load the weights, in the format that the options and the files ask for."""
    source = None
    if config.random:
        source = load_part("extension", "random model")(config)
    quant = Quantization.of(config.quant, config.group_size)
    if skips_requantization(config, path):
        quant = None
    if quant is None and keeps_blocks(config, path):
        quant = Quantization(BLOCKS, saved=True, every_type=config.keep_blocks)
    if config.quant == "int4" and quant is not None and source is None:
        rounding = load_part("reader", "rounding")
        if rounding.is_calibrated(quant, path):
            source = rounding.calibrated(path, quant)
            quant = None  # the source has the format
    load = of_ranks("load_model", load_model)
    return load(path, DTYPES.get(config.dtype), config.device, quant, source)


def _resolved(
    config: GenerateConfig, target: Transformer, path: Path, device: str
) -> GenerateConfig:
    """Fill in what loading chooses: the device, the formats as they were loaded, and the draft."""
    config = replace(config, device=device, compile=how_to_run(config, device))
    saved = saved_quantization(read_raw(path), path)
    if saved is not None:  # the checkpoint holds codes
        config = replace(config, quant=saved.format)
    formats = {getattr(layer, "format", "") for layer in target.modules()}
    if BLOCKS in formats:  # of a GGUF file, whatever --quant asked for
        config = replace(config, quant=BLOCKS, group_size=0)
    dtype = str(target.norm.weight.dtype).removeprefix("torch.")
    return resolve_draft(config, path, dtype, _without_head(config, target, path))


def how_to_run(config: GenerateConfig, device: str) -> bool | None:
    """Choose `compile` where the options leave it open.

    Returns: True: C++ operators on a CPU, torch.compile on CUDA; None: cycles on CUDA are captured
        as they are; False: PyTorch's modules, step by step.

    A captured cycle without torch.compile has 90 to 96 % of the rate with it (7B on an H200, bf16
    and int4; benchmarks/results/2026-11-26-h200/ladder.jsonl), and is ready in seconds: each method
    compiles for 2 to 19 s in every process, and for minutes in the first one.
    """
    if config.plain:
        return False
    if config.compile is not False and device.startswith("cpu"):
        return has_cpu_operators()
    return config.compile


def _changes(asked: GenerateConfig, config: GenerateConfig) -> dict[str, Any]:
    """Return the options of `config` that differ from those asked for, by name."""
    before = asdict(asked)
    return {
        f.name: value
        for f in fields(config)
        if (value := getattr(config, f.name)) != before[f.name]
    }


def _note_attention(target: Transformer) -> None:
    """Print a note where a CPU runs PyTorch's attention, whose rows may depend on each other."""
    weight = target.norm.weight
    if weight.device.type != "cpu" or not has_cpu_operators():
        return
    width = target.config.head_dim
    theirs = (
        "is PyTorch's: slower, and a draft may change a token where the best two are nearly equal"
    )
    if width % 16:
        log_note(f"attention with heads of width {width} {theirs}")
    elif weight.dtype == DTYPES["float16"]:
        log_note(f"attention in float16 {theirs}; use --dtype bfloat16")


def _without_head(config: GenerateConfig, target: Transformer, path: Path) -> str:
    """Return the draft of a model without a head: its MTP layer, if the checkpoint holds one.

    Else it is a lookup on one CPU, where that was measured.
    """
    # most models have no such layer, and their files are not opened a second time
    may_draft = target.config.mtp and has_drafts() and not config.random
    if may_draft and load_part("reader", "mtp").find_mtp(path):
        return MTP
    one_cpu = config.device == "cpu" and this_rank().world_size == 1
    return "ngram" if one_cpu and config.accept == "exact" and has_drafts() else "none"


def _eos_ids(target: Transformer, tokenizer: Any, template: Any) -> tuple[int, ...]:
    """Return the ids that end a sequence: the model's, else the tokenizer's, and the template's."""
    stop_ids = template.stop_ids(tokenizer) if template else ()
    eos_ids = target.config.eos_ids
    if not eos_ids and tokenizer:
        eos_ids = tokenizer.eos_ids
    return tuple(dict.fromkeys((*eos_ids, *stop_ids)))


def _context(config: GenerateConfig, target: Transformer) -> int:
    """Return the KV capacity in tokens: what is asked for, or what the model was trained for.

    By default a share of the free memory bounds it, and a note says so, or on CUDA a fixed number.
    Raises: ValueError beyond the model's positions.
    """
    most = target.config.max_context
    if config.context > most:
        fault = f"--context {config.context} is beyond the model's {most} positions; lower it"
        raise ValueError(fault)
    if config.context:
        return config.context
    weight = target.norm.weight
    if weight.is_cuda:
        return min(most, CUDA_CONTEXT)
    dtype = cache_dtype(config, weight.dtype)
    caches = config.batch_size * (2 if config.compare else 1)
    room = CACHE_SHARE * free_bytes(str(weight.device))
    fits = int(room / (caches * max(slot_bytes(target.layers, dtype), 1)))
    fits = of_ranks("smallest", int)(fits // ROUND_TO * ROUND_TO)
    if fits >= most or not fits:  # where nothing fits, the session refuses, and says why
        return most
    log_note(
        f"the context is {fits} tokens, whose cache takes half of the free memory; the model was "
        f"trained for {most}: --context asks for more"
    )
    return fits


def load_method(target: Transformer, config: GenerateConfig, tokenizer: Any) -> DraftMethod:
    """Load the way to draft that `config` names.

    tokenizer: None where only ids go in and out
    Raises: ValueError for files or a tree that do not fit.
    """
    spec = spec_of(config)
    count = this_rank().world_size
    fault = f"--draft {config.draft} runs in one process; drop torchrun, or use ngram"
    require(count == 1 or spec.many_ranks, fault)
    extended = config.random and spec.extended
    make = loader_of(spec.extended if extended else spec.module)
    method = make(target, config, tokenizer)
    if config.child_rule == "sampled" and spec.residual:
        rule = load_part("extension", "residual")
        for preset in method.presets:
            rule.sample_children(preset)
    if count > 1:
        if spec.scores_children and config.tree_shape == "auto":
            reason = "--tree auto goes by the ranks' clocks, which differ"
            log_note(f"the tree is dynamic, as {reason}")
        load_part("ranks", "split_lm_head")(target, method.presets)
        return method
    if spec.scores_children and config.tree_shape == "auto" and config.draft != "none":
        return load_part("extension", "auto").with_trees(method, target, config)
    return method


def without_draft(engine: Engine) -> Engine:
    """Return an engine that decodes as this one does, without a draft."""
    config = replace(engine.config, accept="exact", trace="", compare=False)
    plain = engine.with_method(DraftMethod((RootOnly(),)))
    return warm_up(build_cycles(replace(plain, config=config)))
