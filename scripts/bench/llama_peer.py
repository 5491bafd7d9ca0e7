"""Run llama.cpp on the weights of a checkpoint: a GGUF writer, and a greedy decoder over its C API.

1. `write_gguf` reads one tensor at a time and writes it in one format: bf16, f16, q8_0 or q4_0.
   The file has no vocabulary: ids go in and out.
2. `LlamaCpp` feeds ids at a position and reads logits. It first evicts the cache from that position
   on, which rolls back a rejected draft.
3. `decode` is greedy, without drafts, with those of llama-cpp-python's own prompt lookup, or with
   those of an EAGLE-3 head in a GGUF file, which llama.cpp computes too (`Eagle3`).

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
from run.session import common_prefix
from scripts import gguf_file

EAGLE3_TOKENS = 3  # drafted in a chain: llama.cpp's default (--spec-draft-n-max)
# architectures of ours that hand out the inputs of their layers in it; beside others it aborts
EAGLE3_TARGETS = ("llama", "qwen3", "qwen3moe")
Drafter = Callable[[np.ndarray], np.ndarray]  # the text so far, [T] int32 -> drafted tokens


def write_gguf(checkpoint: Path, file: Path, kind: str) -> None:
    """Write a LLaMA. kind: of the weights, one of cases.FORMATS. Writes: `file`.

    Raises: ValueError for a model that this writer does not know.
    """
    config = read_config(checkpoint)
    files = open_source(checkpoint)
    biases = config.qkv_bias or config.o_bias or config.mlp_bias
    if biases or has_head_norms(config) or config.rope_scaling:
        kinds = "biases, norms of queries and scaled RoPE"
        raise ValueError(f"{checkpoint}: {kinds} are not written to GGUF; leave llama.cpp out")
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


@functools.cache  # one for the whole process, since C calls it until the end
def quiet() -> Any:
    """Return a log of llama.cpp that writes nothing."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda level, text, data: None)


# functions beside llama.cpp's C API, which the library exports under their C++ names
SET_LAYER_INPUT = "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"
LAYER_INPUT = "_Z30llama_get_embeddings_layer_inpP13llama_contextj"
SET_HIDDEN = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
HIDDEN = "_Z26llama_get_embeddings_nextnP13llama_context"
TARGET_LAYERS = "_Z28llama_model_target_layer_idsPK11llama_model"
TARGET_LAYER_COUNT = "_Z30llama_model_target_layer_ids_nPK11llama_model"


def function(api: Any, name: str, result: Any, *arguments: Any) -> Callable:
    """Return a function of llama.cpp's library. Raises: ValueError where it has none such."""
    try:
        entry_point = getattr(api.llama_cpp._lib, name)
    except AttributeError:
        raise ValueError(f"this llama.cpp has no {name}; install llama-cpp-python 0.3.36") from None
    entry_point.restype = result
    entry_point.argtypes = arguments
    return entry_point


class LlamaCpp:
    """One sequence in llama.cpp, on the CPU."""

    def __init__(
        self,
        file: Path,
        context: int,
        threads: int,
        rows: int,
        other: LlamaCpp | None = None,
        kv: str = "",
    ):
        """context: capacity in tokens; rows: tokens of a pass at most; other: a head's target

        kv: q8_0 keeps keys and values in it; default: f16
        Raises: ValueError when it cannot load the file.
        """
        import llama_cpp

        self.api = llama_cpp
        self.rows = rows
        self.layers: list[int] = []  # whose inputs `feed` notes
        self.features = np.empty((context, 0), np.float32)  # [T, layers F], by position
        llama_cpp.llama_log_set(quiet(), ctypes.c_void_p())
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), options)
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {file}")
        shape = llama_cpp.llama_context_default_params()
        shape.n_ctx = context
        shape.n_batch = rows
        shape.n_ubatch = rows
        shape.n_threads = threads
        shape.n_threads_batch = threads
        if kv == "q8_0":
            shape.type_k = llama_cpp.GGML_TYPE_Q8_0
            shape.type_v = llama_cpp.GGML_TYPE_Q8_0
        if other:
            shape.ctx_other = other.context
        self.context = llama_cpp.llama_init_from_model(self.model, shape)
        self.batch = llama_cpp.llama_batch_init(rows, 0, 1)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        name = ctypes.create_string_buffer(64)
        llama_cpp.llama_model_meta_val_str(self.model, b"general.architecture", name, len(name))
        self.architecture = name.value.decode()

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
        if failed:
            raise ValueError(
                f"llama.cpp cannot decode {len(tokens)} tokens at {start} (code {failed})"
            )
        for number, layer in enumerate(self.layers):
            features = np.ctypeslib.as_array(
                self.layer_input(self.context, layer), (len(tokens), self.dim)
            )
            columns = slice(number * self.dim, (number + 1) * self.dim)
            self.features[start : start + len(tokens), columns] = features
        wanted = len(tokens) if every else 1
        return np.ctypeslib.as_array(api.llama_get_logits(self.context), (wanted, self.vocab_size))

    def note_inputs(self, layers: list[int]) -> None:
        """Let `feed` note the inputs of some layers. Writes: layers, features."""
        numbers = (ctypes.c_void_p, ctypes.c_uint32)
        switch = function(self.api, SET_LAYER_INPUT, None, *numbers, ctypes.c_bool)
        for layer in layers:
            switch(self.context, layer, True)
        floats = ctypes.POINTER(ctypes.c_float)
        self.layer_input = function(self.api, LAYER_INPUT, floats, *numbers)
        self.dim = self.api.llama_model_n_embd(self.model)
        self.layers = layers
        self.features = np.empty((len(self.features), len(layers) * self.dim), np.float32)

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


class Eagle3:
    """An EAGLE-3 head of a target, in llama.cpp: drafts chains.

    It computes as `draft-eagle3` of llama.cpp does: the encoder (fc) makes one row of the target's
    layer inputs at a position, the decoder reads it with the next token, and its output is the next
    row of the chain. Their program runs the decoder over rejected tokens too, and then over the
    last decided one; here one pass reads all that were decided, so it is not slower.
    """

    def __init__(self, target: LlamaCpp, file: Path, threads: int, tokens: int = EAGLE3_TOKENS):
        """Load a head. tokens: of a chain.

        Raises: ValueError for a file that is no such head, or a target that llama.cpp has none for.
        """
        api = target.api
        if target.architecture not in EAGLE3_TARGETS:
            raise ValueError(
                f"llama.cpp 0.3.36 runs no EAGLE-3 head beside {target.architecture}, only beside "
                f"{', '.join(EAGLE3_TARGETS)}; leave this peer out"
            )
        self.target = target
        self.tokens = tokens
        self.head = LlamaCpp(file, len(target.features) + tokens, threads, target.rows, target)
        if not self.head.context:
            raise ValueError(f"llama.cpp cannot run {file} beside its target")
        model = (self.head.model,)
        count = function(api, TARGET_LAYER_COUNT, ctypes.c_uint32, ctypes.c_void_p)(*model)
        ids = function(api, TARGET_LAYERS, ctypes.POINTER(ctypes.c_int32), ctypes.c_void_p)(*model)
        if not count:
            raise ValueError(f"{file} is no EAGLE-3 head")
        target.note_inputs([ids[i] for i in range(count)])
        switch = function(api, SET_HIDDEN, None, ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool)
        switch(self.head.context, True, True)
        floats = ctypes.POINTER(ctypes.c_float)
        self.hidden = function(api, HIDDEN, floats, ctypes.c_void_p)
        self.dim = api.llama_model_n_embd(self.head.model)
        self.length = 0  # tokens in the head's cache

    def begin(self) -> None:
        """Forget the text. Writes: the head's cache."""
        self.length = 0

    def draft(self, text: np.ndarray) -> np.ndarray:
        """Draft a chain behind a text, [T] int32, of which the target has read all but the last.

        Returns: [tokens] int32. Writes: the head's cache.
        """
        api = self.target.api
        api.llama_memory_seq_rm(api.llama_get_memory(self.head.context), 0, self.length, -1)
        rows = self.encode(self.target.features[self.length : len(text) - 1])  # [R, F]
        next_tokens = text[self.length + 1 :]
        chain = []
        start = self.length
        self.length = len(text) - 1
        for _ in range(self.tokens):
            logits, hidden = self.decode(next_tokens, rows, start)
            chain.append(int(logits.argmax()))
            start += len(rows)
            rows = hidden
            next_tokens = np.array(chain[-1:], np.int32)
        return np.array(chain, np.int32)

    def encode(self, features: np.ndarray) -> np.ndarray:
        """Return the rows of the decoder: [R, layers F] -> [R, F] fp32."""
        parts = []
        for first in range(0, len(features), self.head.rows):
            part = np.ascontiguousarray(features[first : first + self.head.rows])
            self.run(self.target.api.llama_encode, part, self.length)
            parts.append(self.outputs(len(part)))
        return np.concatenate(parts)

    def decode(
        self, tokens: np.ndarray, rows: np.ndarray, start: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run pairs of a token and a row at the positions from `start` on.

        Returns: logits [V] and output [1, F] of the last pair, fp32.
        """
        for first in range(0, len(rows), self.head.rows):
            part = np.ascontiguousarray(rows[first : first + self.head.rows])
            ids = np.ascontiguousarray(tokens[first : first + self.head.rows], np.int32)
            self.run(self.target.api.llama_decode, part, start + first, ids)
        logits = self.target.api.llama_get_logits(self.head.context)
        every = np.ctypeslib.as_array(logits, (len(part), self.head.vocab_size))
        return every[-1], self.outputs(len(part))[-1:]

    def run(
        self, call: Any, rows: np.ndarray, start: int, tokens: np.ndarray | None = None
    ) -> None:
        """Make one pass, at the positions from `start` on. Raises: ValueError where it fails."""
        places = np.arange(start, start + len(rows), dtype=np.int32)
        wanted = np.ones(
            len(rows), np.int8
        )  # its graph returns the first rows, whichever are wanted
        fields = {"embd": rows, "pos": places, "logits": wanted}
        if tokens is not None:
            fields["token"] = tokens
        batch = self.target.api.llama_batch(n_tokens=len(rows))
        for name, value in fields.items():
            kind = type(getattr(batch, name))
            setattr(batch, name, value.ctypes.data_as(kind))
        failed = call(self.head.context, batch)
        if failed:
            raise ValueError(f"llama.cpp cannot run {len(rows)} rows of the head (code {failed})")

    def outputs(self, count: int) -> np.ndarray:
        """Return a copy of the last pass's outputs, [count, F] fp32."""
        address = self.hidden(self.head.context)
        return np.ctypeslib.as_array(address, (count, self.dim)).copy()

    def close(self) -> None:
        """Free the memory of the C library; before the target's."""
        self.head.close()


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
