"""Run llama.cpp on the weights of a checkpoint: a GGUF writer, and a greedy decoder over its C API.

1. `write_gguf` reads one tensor at a time and writes it in one format: bf16, f16, q8_0 or q4_0.
   llama.cpp rotates neighbouring pairs where Hugging Face rotates halves, so the rows of q and k
   are reordered. The file has no vocabulary: ids go in and out.
2. `LlamaCpp` feeds ids at a position and reads logits. It first evicts the cache from that position
   on, which rolls back a rejected draft.
3. `decode` is greedy, without drafts or with those of llama-cpp-python's own prompt lookup.

Every matrix is in the named format, embedding and LM head included; files made by llama.cpp's own
tool keep some in more bits. Packages: scripts/bench/requirements-peers.txt.
Not here: sampling, batches.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from tqdm import tqdm

from hf.config import open_source, read_config
from hf.weights import weight_names
from session import common_prefix

FORMATS = ("bf16", "f16", "q8_0", "q4_0")
LOOKUPS = {"lookup": 10, "lookup2": 2}  # tokens drafted: the package's default, its CPU advice
NEAR_TIE = 0.1  # of logits
Drafter = Callable[[np.ndarray], np.ndarray]  # the text so far, [T] int32 -> drafted tokens
NAMES = {  # of Hugging Face -> of GGUF
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """Translate a name: `model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    layer = ""
    rest = name.removesuffix(".weight")
    if rest.startswith("model.layers."):
        number, rest = rest.removeprefix("model.layers.").split(".", 1)
        layer = f"blk.{number}."
    return f"{layer}{NAMES[rest]}.weight"


def interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of q or k, [H * E, F], from rotated halves to rotated neighbours."""
    halves = weight.view(-1, 2, head_dim // 2, weight.shape[1])  # [H, 2, E/2, F]
    return halves.transpose(1, 2).reshape(weight.shape)


def write_gguf(checkpoint: Path, file: Path, kind: str) -> None:
    """Write a LLaMA in one of FORMATS. Writes: `file`.

    Raises: ValueError for a model that this writer does not know.
    """
    import gguf

    config = read_config(checkpoint)
    files = open_source(checkpoint)
    if config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm or config.rope_scaling:
        kinds = "biases, norms of queries and scaled RoPE"
        raise ValueError(f"{checkpoint}: {kinds} are not written to GGUF; leave llama.cpp out")
    partial = Path(f"{file}.tmp")
    writer = gguf.GGUFWriter(partial, "llama", use_temp_file=True)
    writer.add_context_length(config.max_context)
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.ffn_dim)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_tokenizer_model("no_vocab")
    quantization = gguf.GGMLQuantizationType[kind.upper()]
    names = [theirs for stacked in weight_names(config).values() for theirs in stacked]
    for name in tqdm(names, desc=f"GGUF {kind}", unit="tensor"):
        weight = files.read(name).float()
        if "q_proj" in name or "k_proj" in name:
            weight = interleaved(weight, config.head_dim)
        one = quantization if weight.dim() == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight.numpy(), one), raw_dtype=one)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(file)


class LlamaCpp:
    """One sequence in llama.cpp, on the CPU."""

    def __init__(self, file: Path, context: int, threads: int, rows: int):
        """context: capacity in tokens; rows: tokens of a pass at most

        Raises: ValueError when it cannot load the file.
        """
        import llama_cpp

        self.api = llama_cpp
        self.rows = rows
        # kept, as C calls it later
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p())
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
        if failed:
            raise ValueError(
                f"llama.cpp cannot decode {len(tokens)} tokens at {start} (code {failed})"
            )
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


def lookup(tokens: int) -> Drafter:
    """Return llama-cpp-python's prompt lookup.

    It drafts the continuation of the first occurrence of the last two tokens, or of the last one.
    tokens: at most
    """
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    return LlamaPromptLookupDecoding(num_pred_tokens=tokens)


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


def check_drafted(peer: LlamaCpp, prompt: list[int], plain: list[int], drafted: list[int]) -> None:
    """Check that drafts did not change a peer's tokens.

    Passes of another width sum in another order. At a near tie of logits either token may follow;
    a note reports it. Raises: ValueError for any other difference.
    """
    same = common_prefix(plain, drafted)
    if same == len(plain):
        return
    logits = peer.prefill(prompt + plain[:same])[-1]
    gap = float(abs(logits[plain[same]] - logits[drafted[same]]))
    where = (
        f"llama.cpp with and without a draft part at token {same + 1}, "
        f"whose logits differ by {gap:.4f}"
    )
    if gap > NEAR_TIE:
        raise ValueError(
            f"{where}: more than {NEAR_TIE}, so it is no near tie; drafts are verified wrongly"
        )
    print(f"note: {where}, a near tie", file=sys.stderr)
