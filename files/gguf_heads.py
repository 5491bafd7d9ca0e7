"""Read a GGUF file that holds a draft head, under the names of the official layouts.

`GgufHead` is a `TensorSource` of two of llama.cpp's architectures: `eagle3` gets the names and keys
of SafeAILab's layout (files/heads.py), `dflash` those of DFlash's (drafts/block_heads.py). As in a
model's file, matrices can stay in their blocks. A `dflash` file is DSpark's or DFlash2's by its
tensors.

llama.cpp's `d2t` lists token ids, where the layouts hold their distances to the index. Its
`target_layers` name the layers of the target whose inputs fc takes, in both architectures.
Sources: llama.cpp's models `eagle3` and `dflash` (ggml-org/llama.cpp @01b78a1), and its conversion
of LLaMA and Qwen. Not here: writing such a file (scripts/export_head.py).
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from files.gguf import NAMES, GgufFile, config_of, embedding_shape
from files.gguf_header import Header, read_header
from files.keys import FULL, SLIDING

EAGLE3 = "eagle3"
DFLASH = "dflash"
D2T = "d2t"
I64 = 27  # the type of d2t, by its number in the file
SHARPNESS = "gpt_eagle.draft_sharpness"  # ours: llama.cpp reads no such key
# keys that change the function, and the values with which they do not
NEUTRAL_VALUES = {"attention.scale": 0.0, "attention.value_scale": 1.0}
NEUTRAL_OF_EAGLE3 = {
    "attention.sliding_window": 0,
    "embedding_scale": 1.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
}
# llama.cpp's names of what is not in every block drafter -> those of the official layouts
DFLASH_NAMES = {
    "conf_proj": "confidence_head.proj",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "selector_hidden": "candidate_selector.hidden_projection",
    "selector_predecessor": "candidate_selector.predecessor_codebook",
    "selector_successor": "candidate_selector.successor_codebook",
}
CONVOLUTIONS = {"attn": "attention_conv", "ffn": "mlp_conv"}


class GgufHead(GgufFile):
    """The tensors of a head: as numbers, or after `keep_blocks` in their blocks."""

    architectures = (EAGLE3, DFLASH)
    further_names = {"attn_norm_2": "hidden_norm"} | {
        f"{theirs}_conv_proj": f"{ours}.kernel_projection" for theirs, ours in CONVOLUTIONS.items()
    }

    def __init__(self, path: Path):
        """Read the header. Raises: ValueError as for a model, and for ids that are not whole."""
        super().__init__(path)
        if self.d2t:
            self.readers[D2T] = self._distances().clone

    def _read_header(self) -> Header:
        """Read the header, and leave out `d2t`, which is no weight. Writes: d2t, names."""
        header = read_header(self.path)
        self.is_eagle3 = header.metadata.get("general.architecture") == EAGLE3
        further = {"enc.output_norm": "hidden_norm"} | DFLASH_NAMES
        self.names = NAMES | ({"enc.output_norm": "input_norm"} if self.is_eagle3 else further)
        self.d2t = header.tensors.get(D2T)
        weights = {name: info for name, info in header.tensors.items() if name != D2T}
        return header._replace(tensors=weights)

    def _distances(self) -> Tensor:
        """Read `d2t` as the layouts hold it, [Vd] int64. Raises: ValueError."""
        info = self.d2t
        file = info.file
        start = info.offset
        if info.type_id != I64 or len(info.shape) != 1:
            raise ValueError(
                f"{self.path}: d2t must be a list of token ids, of the type I64; it has the shape "
                f"{list(info.shape)} and the type {info.type_id}; convert the head again"
            )
        (count,) = info.shape
        if start + 8 * count > len(file):
            raise ValueError(
                f"{self.path} is truncated: d2t ends at byte {start + 8 * count} of {len(file)}; "
                "download it again"
            )
        ids = torch.from_numpy(np.frombuffer(file, np.int64, count, start).copy())
        return ids - torch.arange(count)

    def _readers(self, name: str) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Yield the tensors as for a model; a head's names have no prefix."""
        kernel = re.fullmatch(r"blk\.(\d+)\.(attn|ffn)_conv_base", name)
        if kernel:
            official = f"layers.{kernel[1]}.{CONVOLUTIONS[kernel[2]]}.base_kernel"
            yield official, partial(self._tensor, name)
            return
        for official, read in super()._readers(name):
            yield official.removeprefix("model."), read

    def _read_config(self, type_names: dict[str, str]) -> dict:
        """Return the content of a config.json. Raises: ValueError for an unsupported key."""
        header = self._header
        metadata = header.metadata
        architecture = metadata["general.architecture"]

        def key(name: str) -> str:
            return f"{architecture}.{name}"

        neutral_values = NEUTRAL_VALUES | (NEUTRAL_OF_EAGLE3 if self.is_eagle3 else {})
        for name, neutral in neutral_values.items():
            value = metadata.get(key(name), neutral)
            if value != neutral:
                raise ValueError(
                    f"{self.path}: {key(name)} is {reprlib.repr(value)}, which is not supported; "
                    "use another head"
                )
        embedding = embedding_shape(header)
        if not embedding:  # it is the target's
            tokens = metadata.read("tokenizer.ggml.tokens", list, [])
            vocab_size = metadata.size(key("vocab_size"), len(tokens) or ...)
            embedding = (vocab_size, metadata.size(key("embedding_length")))
        config = config_of(header, type_names, embedding)
        config |= {"tie_word_embeddings": False, "use_sliding_window": False}
        further = self._eagle3_keys if self.is_eagle3 else self._dflash_keys
        return config | further(key)

    def _eagle3_keys(self, key: Callable[[str], str]) -> dict:
        """Return the further keys of `files.eagle3_heads.HFEagle3Head`."""
        metadata = self._header.metadata
        keys = {
            "target_hidden_size": metadata.size(key("target_hidden_size")),
            "norm_before_residual": metadata.read(key("norm_before_residual"), bool, False),
            "norm_before_fc": metadata.read(key("norm_before_fc"), bool, False),
            "draft_sharpness": metadata.positive(SHARPNESS, 1.0),
            "eagle_aux_hidden_state_layer_ids": self._target_layers(key),
        }
        if self.d2t:
            keys["draft_vocab_size"] = self.d2t.shape[0]
        return keys

    def _dflash_keys(self, key: Callable[[str], str]) -> dict:
        """Return the further keys of `files.block_heads.HFBlockHead`."""
        metadata = self._header.metadata
        keys = {
            "architectures": ["Qwen3ForCausalLM"],  # its layers; their queries are not interleaved
            "block_size": metadata.size(key("block_size"), 16),
            "mask_token_id": metadata.read("tokenizer.ggml.mask_token_id", int),
            "target_layer_ids": [layer - 1 for layer in self._target_layers(key)],
            "is_causal": metadata.read(key("attention.causal"), bool, False),
            "input_embedding_scale": metadata.positive(key("embedding_scale"), 1.0),
            "output_multiplier": metadata.read(key("logit_scale"), float, 0.0) or 1.0,
            "final_logit_softcapping": metadata.read(key("final_logit_softcapping"), float, 0.0),
        }
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            if key(name) in metadata:
                keys[name] = metadata.size(key(name))
        if self.d2t:
            keys["draft_vocab_size"] = self.d2t.shape[0]
        markov = self._header.tensors.get("markov_w1.weight")
        if markov:
            keys["markov_rank"] = markov.shape[-1]
            keys["sample_from_anchor"] = metadata.read(key("sample_from_anchor"), bool, True)
        window = metadata.read(key("attention.sliding_window"), int, 0)
        if window:
            slides = metadata.read(key("attention.sliding_window_pattern"), list)
            keys |= {"use_sliding_window": True, "sliding_window": window}
            keys["layer_types"] = [SLIDING if each else FULL for each in slides]
        return keys

    def _target_layers(self, key: Callable[[str], str]) -> list[int]:
        """Return the layers of the target whose inputs fc takes. Raises: ValueError."""
        metadata = self._header.metadata
        name = key("target_layers")
        older = key("extract_layers")
        if older in metadata and name not in metadata:
            name = older
        layers = metadata.read(name, list)
        if not layers or any(type(layer) is not int for layer in layers):
            raise ValueError(
                f"{self.path}: the metadata {name} must list layers; it is {reprlib.repr(layers)}; "
                "convert the head again"
            )
        return layers
