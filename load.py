"""Load everything that a config names: the target, the drafter and the tokenizer, as a warm engine.

`make_drafter` is the one place that knows every drafter. On a CPU an engine is ready when its
weights are. On CUDA `warm_up` runs the cycles until they are compiled and captured.
Not here: the formats of files (hf/), the loop (decode.py, session.py), prompts and results
(generate.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import eagle_draft
import ranks
import tp
from buffers import PREFILL_WIDTHS
from checkpoint import BLOCKS, Quantization, saved_quantization
from command_line import by_names, require
from decode import Engine, pick_tokens, with_cycles
from drafters import Drafter, RootOnly, TreeDrafter
from hf.blocks import keeps_blocks
from hf.chat import TextFiles, read_text_files
from hf.config import read_raw, resolve_draft
from hf.fetch import fetched
from hf.weights import int4_group
from model import DTYPES, Transformer
from not_finite import check_small_weights
from ops import switches
from ops.library import FAMILIES, on_cpp_device, set_plain
from options import HEAD_KINDS, GenerateConfig, pick_device
from prompts import read_grammar
from runtime import WARM_UPS, copy_into, say_what_compiles, time_presets, use, why_not_compiled
from session import Session
from stats import sequence_memory

TIMED_BEHIND = 200  # tokens of prefix when cycles are timed, so that attention has work to do
# tokens; models trained for 128k would otherwise fill the memory with cache
MAX_DEFAULT_CONTEXT = 4096


def load(
    config: GenerateConfig | None = None, text: TextFiles | None = None, **options: Any
) -> Engine:
    """Load everything that `config` names, and compile.

    text: the tokenizer and the template, where they are read already
    options: fields of `GenerateConfig`, when no config is given
    Raises: ValueError for anything wrong with options or files.
    """
    if config is not None and options:
        raise ValueError("load() takes a config or options; use dataclasses.replace(config, ...)")
    config = config or GenerateConfig(**by_names(GenerateConfig, options))
    config.check()
    began = time.perf_counter()
    config = _with_device(config)
    path = fetched(config.checkpoint)
    target = _load_target(config, path)
    saved = saved_quantization(read_raw(path))
    if saved is not None:  # the checkpoint holds codes
        config = replace(config, quant=saved.format)
    formats = {getattr(layer, "format", "") for layer in target.modules()}
    for kept in (BLOCKS, "int4"):  # of a GGUF file on a CPU, on CUDA
        if kept in formats and config.quant == "none":
            config = replace(config, quant=kept)
    dtype = str(target.norm.weight.dtype).removeprefix("torch.")
    check_small_weights(target, path)
    tokenizer, template = text or read_text_files(path, config)
    _note_attention(target, dtype)
    eos_ids = _eos_ids(target, tokenizer, template)
    context = _context(config, target)
    without_head = "ngram" if _looks_up(config) else "none"
    config = resolve_draft(config, path, dtype, without_head)
    # in int4, with the group given or its own
    drafter = make_drafter(target, config, kept_texts(config, target, tokenizer))
    drafter = tp.split_lm_head(target, drafter)
    if config.quant == "int4":
        config = replace(config, group_size=int4_group(target))
    pick = tp.pick_tokens if ranks.this_rank().world_size > 1 else pick_tokens
    engine = Engine(
        config,
        target,
        drafter,
        context,
        eos_ids=eos_ids,
        tokenizer=tokenizer,
        template=template,
        load_s=time.perf_counter() - began,
        pick_tokens=pick,
        accept_rule=accept_rule(config),
    )
    (grammar,) = compile_grammars(engine, read_grammar(config), 1)
    engine = replace(engine, grammar=grammar)
    if config.batch_size > 1:
        print(f"note: {sequence_memory(engine)}", file=sys.stderr)
    return warm_up(with_cycles(engine))


def _with_device(config: GenerateConfig) -> GenerateConfig:
    """Choose the device and its operators. Writes: the process's device, and `PLAIN`."""
    config = replace(config, device=pick_device(config.device))
    use(config.device)
    if config.plain:
        set_plain(FAMILIES)
    unused = ", ".join(switches.without_effect(config.device))
    if unused:
        note = f"{unused}: only CUDA reads this, and the device is {config.device}; unset it"
        print(f"note: {note}", file=sys.stderr)
    return config


def compile_grammars(engine: Engine, grammar: Any, count: int) -> list[Any]:
    """Compile the grammars of some prompts.

    grammar: None, a text in Lark or GBNF, or a JSON schema (a dict); a list gives each its own
    count: prompts
    Returns: an extras.grammar.Grammar or None per prompt. Raises: ValueError.
    """
    each = grammar if isinstance(grammar, list) else [grammar]
    fault = f"grammar has {len(each)} values, and there are {count} prompts; give one for each"
    require(len(each) == count or each is not grammar, fault)
    compiled = []
    for source in each:
        if source is not None:
            from extras.grammar import Grammar

            source = Grammar(engine, source)
        compiled.append(source)
    return compiled if each is grammar else compiled * count


def _load_target(config: GenerateConfig, path: Path) -> Transformer:
    source = None
    if config.inflate:
        from extras.stand_in import target_source

        source = target_source(config)
    quant = Quantization.of(config.quant, config.group_size)
    if quant is None and keeps_blocks(config, path):
        quant = Quantization(BLOCKS, saved=True)
    return tp.load_model(path, DTYPES.get(config.dtype), config.device, quant, source)


def _note_attention(target: Transformer, dtype: str) -> None:
    """Tell where a CPU's attention is not our own, whose rows do not depend on each other."""
    if not on_cpp_device(target.norm.weight, "attention"):
        return
    width = target.config.head_dim
    theirs = "is PyTorch's: slower, and beside a draft near ties may differ"
    if width % 16:
        print(f"note: attention with heads of width {width} {theirs}", file=sys.stderr)
    elif dtype == "float16":
        print(f"note: attention in float16 {theirs}; use --dtype bfloat16", file=sys.stderr)


def _looks_up(config: GenerateConfig) -> bool:
    """Check whether a model without a head drafts by lookup: on one CPU, where it was measured."""
    one_cpu = config.device == "cpu" and ranks.this_rank().world_size == 1
    return one_cpu and config.accept == "exact"


def _eos_ids(target: Transformer, tokenizer: Any, template: Any) -> tuple[int, ...]:
    """Return the ids that end a sequence: the model's, else the tokenizer's, and the template's."""
    stop_ids = template.stop_ids(tokenizer) if template else ()
    eos_ids = target.config.eos_ids
    if not eos_ids and tokenizer:
        eos_ids = tokenizer.eos_ids
    return tuple(dict.fromkeys((*eos_ids, *stop_ids)))


def _context(config: GenerateConfig, target: Transformer) -> int:
    """Return the KV capacity in tokens. Raises: ValueError beyond the model's positions."""
    most = target.config.max_context
    context = config.context or min(most, MAX_DEFAULT_CONTEXT)
    if context > most:
        raise ValueError(f"--context {context} is beyond the model's {most} positions; lower it")
    return context


def accept_rule(config: GenerateConfig) -> Callable | None:
    """Return the rule of acceptance, or None for the exact one."""
    if config.accept == "exact":
        return None
    from extras.residual import accept_residual

    return accept_residual


def kept_texts(config: GenerateConfig, target: Transformer, tokenizer: Any) -> Any:
    """Make what is kept of past requests, --draft_store included, for lookups and recycling.

    Returns: an extras.kept_texts.KeptTexts, with --draft rest an extras.datastore.Datastore; None
        where none is used.
    Raises: ValueError for --draft_store with another drafter, and for a file that is no store.
    """
    size = target.config.vocab_size
    if config.draft == "rest":
        require(config.datastore, "--draft rest needs --datastore; name its file")
        from extras.datastore import Datastore
        from extras.kept_texts import vocabulary_of

        return Datastore(Path(config.datastore), vocabulary_of(tokenizer, size), size)
    presets = config.draft in HEAD_KINDS and config.tree_shape == "auto" and config.device == "cpu"
    # under the residual rule the drafts of past requests would change the tokens
    recycles = config.draft == "recycling"
    keeps = (config.draft.endswith("ngram") or presets or recycles) and config.accept == "exact"
    fault = "--draft_store belongs to lookups and recycling with --accept exact; use --draft ngram"
    require(keeps or not config.draft_store, fault)
    if not keeps or (recycles and not config.draft_store):
        return None
    from extras.kept_texts import KeptTexts, vocabulary_of
    from extras.recycling_draft import empty_matrix

    device = target.norm.weight.device
    kept = KeptTexts(device, successors=empty_matrix(size, device) if recycles else None)
    if config.draft_store:
        kept.keep_in(Path(config.draft_store), vocabulary_of(tokenizer, size), size)
    return kept


def make_drafter(target: Transformer, config: GenerateConfig, kept: Any = None) -> Drafter:
    """Make the drafter that `config` names.

    kept: of `kept_texts`, which lookups search, too; None: only the text so far
    Raises: ValueError for files or a tree that do not fit.
    """
    match config.draft:
        case "none":
            return RootOnly()
        case "ngram":
            from extras.ngram_draft import Ngram, NgramDrafter

            return NgramDrafter(Ngram.from_config(config, kept), target.norm.weight.device)
        case "recycling" | "lookahead" | "rest":
            return _make_source(target, config, kept)
        case "model" | "medusa" | "hydra" | "block":
            drafter = import_module(f"extras.{config.draft}_draft").load_drafter(target, config)
        case _:  # eagle, eagle+ngram
            added = {}
            if config.inflate or config.draft_vocab or config.draft == "eagle+ngram":
                from extras.heads import head_extras

                added = head_extras(target, config, kept)
            drafter = eagle_draft.load_drafter(target, config, **added)
    if config.child_rule == "sampled" and isinstance(drafter, TreeDrafter):
        from extras.residual import sample_children

        drafter = sample_children(drafter)
    if config.tree_shape == "auto" and ranks.this_rank().world_size > 1:
        reason = "--tree auto goes by the ranks' clocks, which differ"
        print(f"note: the tree is dynamic, as {reason}", file=sys.stderr)
    elif config.tree_shape == "auto" and isinstance(drafter, TreeDrafter):
        from extras.autosize import with_smaller_trees
        from extras.ngram_draft import Ngram, NgramDrafter

        lookup = None
        if config.draft in HEAD_KINDS and config.device == "cpu":
            lookup = NgramDrafter(Ngram(kept=kept))
        drafter = with_smaller_trees(drafter, target, lookup)
    return drafter


def _make_source(target: Transformer, config: GenerateConfig, kept: Any) -> Drafter:
    """Make a drafter that reads the target's scores, or a datastore. Raises: ValueError."""
    one = ranks.this_rank().world_size == 1
    require(one, f"--draft {config.draft} runs in one process; drop torchrun, or use ngram")
    takes = "auto or dynamic" if config.draft == "rest" else "auto or static"
    fault = f"--draft {config.draft} takes --tree {takes}; it is {config.tree_shape}"
    require(config.tree_shape in takes.split(" or "), fault)
    device = target.norm.weight.device
    if config.draft == "recycling":
        from extras.recycling_draft import load_drafter

        return load_drafter(target, config, kept)
    if config.draft == "rest":
        from extras.rest_draft import load_drafter

        return load_drafter(config, kept)
    from extras.lookahead_draft import LookaheadDrafter

    return LookaheadDrafter.from_config(config, device)


def warm_up(engine: Engine) -> Engine:
    """Make the engine ready for its first prompt.

    On a CPU nothing is left to do. On CUDA the cycles run until they are compiled and captured.
    Where --compile does not work, a note says so: on CUDA cycles are captured as they are, on a CPU
    the engine runs without it.
    """
    tries = engine.compiles if engine.captured else engine.config.compile
    reason = why_not_compiled(engine.config.device) if tries else ""
    ranks.check_same_on_all_ranks(
        engine.config,
        compile=tries and not reason,
        **engine.drafter.resolved_options(),
    )
    if reason and engine.captured:
        note = f"the compiler does not work here ({reason}); cycles are captured without it"
        print(f"note: {note}", file=sys.stderr)
        return warm_up(with_cycles(replace(engine, compiler_fails=True)))
    if reason:
        print(f"note: --compile does not work here ({reason}); running without it", file=sys.stderr)
        config = replace(engine.config, compile=False)
        return warm_up(with_cycles(replace(engine, config=config)))
    compile_s = 0.0
    if engine.captured:
        began = time.perf_counter()
        for _ in range(1 + WARM_UPS):
            _prefill_each_width(engine)
            time_cycles(engine, say_what_compiles)
        compile_s = time.perf_counter() - began
    return with_tree_policy(replace(engine, compile_s=compile_s))


def _prefill_each_width(engine: Engine) -> None:
    """Decode one token after a prompt of every prefill width, in every sequence of the batch."""
    drafter = copy(engine.drafter)
    drafter.kept = None  # these prompts are no requests
    config = replace(engine.config, max_new_tokens=1)
    engine = replace(engine, config=config, drafter=drafter)
    for width in PREFILL_WIDTHS:
        prompt = [0] * min(width, engine.context - 1)
        for _ in Session(engine).run([prompt] * engine.config.batch_size):
            pass


def with_tree_policy(engine: Engine) -> Engine:
    """Give the engine a policy that chooses among its trees, if it has several.

    Only captured cycles are timed. Under the residual rule the tokens follow the tree, and the
    clocks of ranks differ: neither may depend on a time.
    """
    by_clock = engine.config.accept == "exact" and ranks.this_rank().world_size == 1
    if not (engine.drafter.timed and by_clock):
        return engine
    from extras.autosize import sizer_of

    times = time_cycles(engine) if engine.captured else ()
    return replace(engine, tree_policy=sizer_of(engine, times))


def time_cycles(engine: Engine, progress: Callable | None = None) -> list[float]:
    """Time a cycle of every preset, with sequences that decode behind some tokens.

    progress: callback, as `time_presets` takes it
    Returns: seconds of a cycle, per preset.
    """
    session = Session(engine)
    state = session.state
    state.pos.fill_(min(TIMED_BEHIND, engine.context // 2))
    state.limit.fill_(engine.context - 1)
    state.done.fill_(False)
    rewound = engine.drafter.rewind(state.drafter_state, state.pos)
    copy_into(state.drafter_state, rewound)
    return time_presets(session.time_cycle, engine.drafter.presets, progress)
