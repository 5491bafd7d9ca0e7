"""Generate text with a target model and an EAGLE head: checkpoints and a prompt in, text out.

    python generate.py --checkpoint DIR --head HEAD --prompt "def f("

1. `load_engine` reads the target, the head and the tokenizer from Hugging Face directories.
2. `decode` runs the loop (decode.py) over one prompt. With or without a head, greedily or sampled,
   its tokens are the same.
3. `main` prints the text and the rate; `--json` writes the tokens.

Where the folder run/ is present, its program answers the command: the same engine and loop with all
options, many prompts, chats. Its library, `load`, `generate` and `stream`, is found here, too.
"""

from __future__ import annotations

from options import DEMO, Options, has_part, load_part, one_line_errors, read_options, run_program

if __name__ == "__main__":
    run_program("generate")  # before torch, whose import takes seconds, so that mistakes are told

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as TokenizersFile

from decode import CycleResult, Engine, Loop, build_cycles
from draft_tree import EAGLE1_PATHS, DynamicTree, StaticTree, parse_tree
from drafters import Drafter, RootOnly
from eagle_draft import EagleDrafter, load_head
from model import DTYPES, RotaryEmbeddings, Transformer, read_config, weight_names
from options import parse_prompt_ids, part_or, require
from quantize import Quantization, Storage, WeightFiles, load_weights
from runtime import pick_device

DEMO_PROMPT = "def read_lines(path):"
CPU_TREE = StaticTree.chain(3)  # a pass over many rows costs more there
CUDA_TREE = DynamicTree()


def __getattr__(name: str) -> Any:
    """Return a function of the library, which the folder run/ has."""
    if has_part("library", name):
        return load_part("library", name)
    raise AttributeError(f"generate.py has no {name}; load, generate and stream are in run/")


# ---------------------------------------------------------------------- text


class Tokenizer:
    """The tokenizer of a directory: tokenizer.json, or else tokenizer.model of sentencepiece."""

    def __init__(self, path: Path):
        """Read the file. Raises: ValueError where there is none."""
        self.fast = None
        if (path / "tokenizer.json").is_file():
            self.fast = TokenizersFile.from_file(str(path / "tokenizer.json"))
            return
        model = path / "tokenizer.model"
        fault = f"{path} has no tokenizer.model and no tokenizer.json; use --prompt_ids"
        require(model.is_file(), fault)
        self.pieces = SentencePieceProcessor(model_file=str(model))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, behind the one that begins a sequence."""
        if self.fast is not None:
            return self.fast.encode(text).ids
        return [self.pieces.bos_id(), *self.pieces.encode(text)]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""
        return self.pieces.decode(ids) if self.fast is None else self.fast.decode(ids)


# ---------------------------------------------------------------------- loading


def tree_of(options: Options, on_cuda: bool) -> StaticTree | DynamicTree:
    """Return the tree of `--tree`. Raises: ValueError for one that cannot be."""
    if not options.tree:
        return CUDA_TREE if on_cuda else CPU_TREE
    own = parse_tree(options.tree)
    require("tree_file" not in own, "--tree: reading a file is in the folder run/; restore it")
    depth = own.get("tree_depth", CUDA_TREE.depth)
    if own["tree"] == "dynamic":
        topk = own.get("tree_topk", CUDA_TREE.topk)
        return DynamicTree(depth, topk, own.get("tree_size", CUDA_TREE.size))
    require(own["tree"] in ("chain", "static"), f"--tree {own['tree']} is in the folder drafts/")
    return StaticTree.chain(depth) if own["tree"] == "chain" else StaticTree(EAGLE1_PATHS)


def load_target(path: Path, options: Options, device: torch.device) -> Transformer:
    """Read the target: by the folder files/, if it is here. Raises: ValueError for wrong files."""
    quant = Quantization.of(options.quant, 0)
    read = part_or("reader", "model", None)
    if read is not None:
        return read(path, DTYPES.get(options.dtype), str(device), quant)
    files = WeightFiles(path)
    config = read_config(files.config)
    dtype = DTYPES[options.dtype or config.dtype]
    with torch.device("meta"):
        target = Transformer(config)
    storage = Storage(dtype, str(device), quant)
    load_weights(target, files, weight_names(config), storage)
    if config.tie_embeddings:
        target.lm_head.weight = target.embedding.weight
    target.ropes = RotaryEmbeddings(config.ropes, device)
    return target.eval()


def load_engine(options: Options) -> Engine:
    """Read the target and the head that the options name.

    Raises: ValueError for anything wrong with options or files.
    """
    device = torch.device(pick_device(options.device))
    if options.plain:
        part_or("machine", "set_plain", lambda: None)()
    path = Path(options.checkpoint)
    target = load_target(path, options, device)
    head = options.head or str(path.with_name(f"{path.name}-eagle"))
    drafter: Drafter = RootOnly()
    if options.draft == "eagle" or (not options.draft and Path(head).is_dir()):
        tree = tree_of(options, device.type == "cuda")
        quant = Quantization.of(options.quant, 0)
        drafter = EagleDrafter(load_head(Path(head), target, quant), target, tree)
    own = target.config
    engine = Engine(target, (drafter,), own.max_context, own.eos_ids, config=options)
    return build_cycles(engine)


# ---------------------------------------------------------------------- decoding


class CountingLoop(Loop):
    """A loop that counts its cycles."""

    cycles = 0

    def after_cycle(self, result: CycleResult) -> None:
        self.cycles += len(result.live)


def decode(engine: Engine, prompt: list[int]) -> tuple[list[int], dict[str, Any]]:
    """Decode what follows a prompt. Raises: ValueError for a prompt that does not fit.

    Returns: the tokens; the measured part of `--json`.
    """
    vocab = engine.target.config.vocab_size
    require(len(prompt) > 0, "the prompt is empty; give it a token")
    require(all(0 <= i < vocab for i in prompt), f"token ids must be below {vocab}; correct them")
    limit = f"the context has {engine.context} tokens, the prompt {len(prompt)}; shorten it"
    require(len(prompt) < engine.context, limit)
    loop = CountingLoop(engine)
    loop.admit(0, prompt, noise_id=(0, 0))
    began = time.perf_counter()
    while loop.prefilling:
        loop.step()
    read = time.perf_counter()
    while loop.busy(0):
        loop.step()
    ended = time.perf_counter()
    loop.close()
    tokens = loop.history[0][len(prompt) :]
    later = len(tokens) - 1  # prefill decides the first one
    return tokens, {
        "tau": later / max(loop.cycles, 1),
        "cycles": loop.cycles,
        "tokens_per_s": later / max(ended - read, 1e-9),
        "prefill_s": read - began,
        "decode_s": ended - read,
    }


def main(argv: list[str] | None = None) -> None:
    """Run the command line of the flat files."""
    with one_line_errors("generate.py"), torch.inference_mode():
        run(read_options(argv))


def run(options: Options) -> None:
    """Answer the prompt of the options. Raises: ValueError for what cannot be answered."""
    path = Path(options.checkpoint)
    fault = f"{path} is no directory; other checkpoints need the folder files/, which is not here"
    require(path.is_dir() or has_part("reader", "model"), f"{fault}; restore it")
    tokenizer = None
    if options.prompt_ids is not None:
        prompt = parse_prompt_ids(options.prompt_ids)
    else:
        text = options.prompt or (DEMO_PROMPT if options.checkpoint == DEMO else None)
        require(text is not None, "there is no prompt; give --prompt or --prompt_ids")
        tokenizer = part_or("reader", "tokenizer", Tokenizer)(path)
        prompt = tokenizer.encode(text)
    engine = load_engine(options)
    tokens, stats = decode(engine, prompt)
    line = f"{len(tokens)} tokens, {stats['tokens_per_s']:.1f} tokens/s; tau {stats['tau']:.2f}"
    if options.compare:
        vanilla, measured = decode(build_cycles(replace(engine, presets=(RootOnly(),))), prompt)
        speedup = stats["tokens_per_s"] / max(measured["tokens_per_s"], 1e-9)
        stats |= {"speedup": speedup, "identical": vanilla == tokens}
        same = "the same" if stats["identical"] else "OTHER"
        line += f"; {speedup:.2f}x of vanilla, {same} tokens"
    text = str(tokens)
    if tokenizer:  # pieces of a text depend on those before them
        text = tokenizer.decode([*prompt, *tokens])[len(tokenizer.decode(prompt)) :]
    if options.json != "-":
        print(text)
    print(line, file=sys.stderr)
    if options.json:
        ended = tokens[-1] in engine.eos_ids and not options.ignore_eos
        short = len(tokens) < options.max_new_tokens
        document = {
            "tokens": [tokens],
            "text": [text],
            "finish_reason": ["stop" if ended else "context" if short else "length"],
            "prompt_tokens": [len(prompt)],
            "stats": stats,
            "config": asdict(options),
        }
        if options.json == "-":
            print(json.dumps(document))
        else:
            Path(options.json).write_text(json.dumps(document) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
