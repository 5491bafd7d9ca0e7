"""Run llama.cpp on the weights of a checkpoint: a GGUF writer, and a greedy decoder over its C API.

1. `write_gguf` reads one tensor at a time and writes it in one format: bf16, f16, q8_0 or q4_0.
   The file has no vocabulary: ids go in and out.
2. `LlamaCpp` feeds ids at a position and reads logits. It first evicts the cache from that position
   on, which rolls back a rejected draft.
3. `decode` is greedy, without drafts or with those of llama-cpp-python's own prompt lookup.

Every matrix is in the named format, embedding and LM head included; files made by llama.cpp's own
tool keep some in more bits. Packages: scripts/bench/requirements-peers.txt.
Not here: sampling, batches.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from files.config import open_source, read_config
from model import weight_names
from models.mixtures import has_head_norms
from options import require
from run.session import common_prefix
from scripts import gguf_file

Drafter = Callable[[np.ndarray], np.ndarray]  # the text so far, [T] int32 -> drafted tokens


def write_gguf(checkpoint: Path, file: Path, kind: str) -> None:
    """Write a LLaMA. kind: of the weights, one of cases.FORMATS. Writes: `file`.

    Raises: ValueError for a model that this writer does not know.
    """
    config = read_config(checkpoint)
    files = open_source(checkpoint)
    biases = config.qkv_bias or config.o_bias or config.mlp_bias
    is_plain = not (biases or has_head_norms(config) or config.rope_scaling)
    kinds = "biases, norms of queries and scaled RoPE"
    require(is_plain, f"{checkpoint}: {kinds} are not written to GGUF; leave llama.cpp out")
    names = [theirs for stacked in weight_names(config).values() for theirs in stacked]

    def tensors() -> Iterator[tuple[str, np.ndarray, str | None]]:
        for official in tqdm(names, desc=f"GGUF {kind}", unit="tensor"):
            name = gguf_file.gguf_name(official)
            weight = files.read(official).float()
            if weight.dim() == 1:
                yield name, weight.numpy(), None
                continue
            weight = gguf_file.rotated_as_in_llama_cpp(weight, name, config)
            yield name, *gguf_file.stored(weight, kind)

    keys = {f"llama.{key}": value for key, value in gguf_file.keys_of(config).items()}
    partial = Path(f"{file}.tmp")
    gguf_file.write(partial, "llama", keys | {"tokenizer.ggml.model": "no_vocab"}, tensors())
    partial.replace(file)


def gguf_of(checkpoint: Path, form: str, folder: Path) -> Path:
    """Return a GGUF file of a checkpoint's weights. Writes: the file, if missing."""
    if form == "file":
        return checkpoint
    file = folder / f"{checkpoint.resolve().name}-{form}.gguf"
    if not file.exists():
        write_gguf(checkpoint, file, form)
    return file


@functools.cache  # one for the whole process, since C calls it until the end
def quiet() -> Any:
    """Return a log of llama.cpp that writes nothing."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda level, text, data: None)


class LlamaCpp:
    """One sequence in llama.cpp, on the CPU."""

    def __init__(self, file: Path, context: int, threads: int, rows: int, kv: str = ""):
        """context: capacity in tokens; rows: tokens of a pass at most

        kv: q8_0 keeps keys and values in it; default: f16
        Raises: ValueError when it cannot load the file.
        """
        import llama_cpp

        self.api = llama_cpp
        self.rows = rows
        llama_cpp.llama_log_set(quiet(), ctypes.c_void_p())
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), options)
        require(bool(self.model), f"llama.cpp cannot load {file}")
        shape = llama_cpp.llama_context_default_params()
        shape.n_ctx = context
        shape.n_batch = rows
        shape.n_ubatch = rows
        shape.n_threads = threads
        shape.n_threads_batch = threads
        if kv == "q8_0":
            shape.type_k = llama_cpp.GGML_TYPE_Q8_0
            shape.type_v = llama_cpp.GGML_TYPE_Q8_0
        self.context = llama_cpp.llama_init_from_model(self.model, shape)
        self.batch = llama_cpp.llama_batch_init(rows, 0, 1)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def feed(self, tokens: list[int], start: int, every: bool = False) -> np.ndarray:
        """Run tokens at the positions from `start` on, in place of the cached ones.

        every: return the logits of all tokens, not of the last one only
        Returns: [T or 1, V] fp32, valid until the next call.
        """
        api = self.api
        assert 0 < len(tokens) <= self.rows, (len(tokens), self.rows)
        api.llama_memory_seq_rm(api.llama_get_memory(self.context), 0, start, -1)
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = start + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = every or i == len(tokens) - 1
        failed = api.llama_decode(self.context, batch)
        require(not failed, f"llama.cpp cannot decode {len(tokens)} tokens at {start} ({failed})")
        wanted = len(tokens) if every else 1
        return np.ctypeslib.as_array(api.llama_get_logits(self.context), (wanted, self.vocab_size))

    def prefill(self, prompt: list[int]) -> np.ndarray:
        """Cache a prompt. Returns: logits of its last token, [1, V]."""
        for start in range(0, len(prompt), self.rows):
            logits = self.feed(prompt[start : start + self.rows], start)
        return logits

    def close(self) -> None:
        """Free the memory of the C library."""
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)


def lookup() -> Drafter:
    """Return llama-cpp-python's prompt lookup.

    It drafts two tokens: the continuation of the first occurrence of the last two, or of the last.
    """
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    return LlamaPromptLookupDecoding(num_pred_tokens=2)


def decode(
    peer: LlamaCpp, prompt: list[int], tokens: int, clock: Any, draft: Drafter | None = None
) -> list[int]:
    """Continue a prompt greedily. One pass verifies a draft, with the last decided token before it.

    clock: its `put` receives the new tokens of every pass as they are decided
    """
    text = np.array(prompt + [0] * tokens, np.intc)
    known = len(prompt)
    new = peer.prefill(prompt)[-1:].argmax(-1).tolist()
    while True:
        clock.put(new)
        text[known : known + len(new)] = new
        known += len(new)
        left = len(text) - known
        if not left:
            return text[len(prompt) :].tolist()
        drafted = [] if draft is None else draft(text[:known])[: left - 1].tolist()
        logits = peer.feed([int(text[known - 1]), *drafted], known - 1, every=True)
        own = logits.argmax(-1).tolist()
        new = own[: common_prefix(drafted, own) + 1]
