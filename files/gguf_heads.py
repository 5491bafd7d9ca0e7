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

import torch
from torch import Tensor

from files.gguf import NAMES, GgufFile, config_of, embedding_shape
from files.head_kinds import AUX
from files.keys import FULL, SLIDING

EAGLE3 = "eagle3"
DFLASH = "dflash"
D2T = "d2t"
# llama.cpp's keys -> those of the layouts (files/heads.py, drafts/block_heads.py)
KEYS = {
    "target_layers": AUX,
    "target_hidden_size": "target_hidden_size",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
    "attention.causal": "causal",
    "embedding_scale": "input_embedding_scale",
    "final_logit_softcapping": "final_logit_softcapping",
    "conv_kernel_size": "conv_kernel_size",
    "conv_group_size": "conv_group_size",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
}
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

    def _readers(self, name: str) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Yield the tensors as for a model; a head's names have no prefix."""
        if name == D2T:
            yield D2T, self._distances
            return
        kernel = re.fullmatch(r"blk\.(\d+)\.(attn|ffn)_conv_base", name)
        if kernel:
            official = f"layers.{kernel[1]}.{CONVOLUTIONS[kernel[2]]}.base_kernel"
            yield official, lambda: self._tensor(name).flatten(0, -2).unflatten(0, (2, -1))
            return
        for official, read in super()._readers(name):
            yield official.removeprefix("model."), read

    def _distances(self) -> Tensor:
        """Read `d2t` as the layouts hold it, [Vd] int64."""
        ids = self._tensor(D2T)
        return ids - torch.arange(ids.numel()).view(ids.shape)

    def _read_config(self, type_names: dict[str, str]) -> dict:
        """Return the content of a config.json. Raises: ValueError for an unsupported key."""
        header = self._header
        metadata = header.metadata
        architecture = metadata["general.architecture"]
        is_eagle3 = architecture == EAGLE3
        further = {"enc.output_norm": "input_norm" if is_eagle3 else "hidden_norm"}
        self.names = NAMES | DFLASH_NAMES | further

        def key(name: str) -> str:
            return f"{architecture}.{name}"

        neutral_values = NEUTRAL_VALUES | (NEUTRAL_OF_EAGLE3 if is_eagle3 else {})
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
        config |= {
            ours: metadata[key(name)] for name, ours in KEYS.items() if key(name) in metadata
        }
        config["draft_sharpness"] = metadata.positive(SHARPNESS, 1.0)
        if AUX not in config:
            older = "extract_layers" if key("extract_layers") in metadata else "target_layers"
            config[AUX] = metadata.read(key(older), list)
        if D2T in header.tensors:
            config["draft_vocab_size"] = header.tensors[D2T].shape[0]
        return config if is_eagle3 else config | self._dflash_keys(key)

    def _dflash_keys(self, key: Callable[[str], str]) -> dict:
        """Return the keys of a block drafter that are not under one name in both."""
        metadata = self._header.metadata
        keys = {
            "architectures": ["Qwen3ForCausalLM"],  # its layers; their queries are not interleaved
            "block_size": metadata.get(key("block_size"), 16),
            "mask_token_id": metadata.read("tokenizer.ggml.mask_token_id", int),
            "output_multiplier": metadata.get(key("logit_scale")) or 1.0,
        }
        markov = self._header.tensors.get("markov_w1.weight")
        if markov:
            keys["markov_rank"] = markov.shape[-1]
            keys["sample_from_anchor"] = metadata.get(key("sample_from_anchor"), True)
        window = metadata.read(key("attention.sliding_window"), int, 0)
        if window:
            slides = metadata.read(key("attention.sliding_window_pattern"), list)
            keys |= {"use_sliding_window": True, "sliding_window": window}
            keys["layer_types"] = [SLIDING if each else FULL for each in slides]
        return keys
