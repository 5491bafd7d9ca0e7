"""The sampling that a model's files name, which the server uses where none is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from files.fetch import fetched
from files.gguf_header import read_header
from files.io import is_gguf, read_json
from run.options import OF_DRAWS, Sampling
from server.options import ServeConfig

# fields of `Sampling` with another name in the keys of llama.cpp
GGUF_SAMPLING = {
    "temperature": "temp",
    "repetition_penalty": "penalty_repeat",
    "repeat_last_n": "penalty_last_n",
}


def recommended_sampling(path: Path) -> dict[str, Any]:
    """Return the sampling that a model names, by the fields of `options.Sampling`.

    A directory names it in generation_config.json, a GGUF file in its metadata. As in transformers,
    a model that is sampled has a temperature of 1 where none is named, and one that asks for no
    draw, or has `do_sample` false, is decoded greedily: its penalties alone are returned.
    Raises: ValueError for a broken file.
    """
    samples = None
    if is_gguf(path):
        metadata = read_header(path).metadata
        keys = {name: GGUF_SAMPLING.get(name, name) for name in Sampling._fields}
        found = {name: metadata.get(f"general.sampling.{key}") for name, key in keys.items()}
    else:
        file = path / "generation_config.json"
        generation = read_json(file) if file.exists() else {}
        found = {name: generation.get(name) for name in Sampling._fields}
        samples = generation.get("do_sample")
    found = {name: value for name, value in found.items() if value is not None}
    if samples is None:
        samples = any(name in found for name in OF_DRAWS)
    if samples:
        return {"temperature": 1.0} | found
    return {name: value for name, value in found.items() if name not in OF_DRAWS}


def with_recommended_sampling(config: ServeConfig, given: set[str]) -> ServeConfig:
    """Return the options with the sampling that the model names, where none was given.

    given: names of options
    Raises: ValueError for a value that cannot be used.
    """
    path = fetched(config.checkpoint)
    found = recommended_sampling(path)
    greedy = config.temperature == 0 and "temperature" in given
    left_out = given | {*OF_DRAWS} if greedy else given
    own = replace(config, **{name: value for name, value in found.items() if name not in left_out})
    try:
        own.check()
    except ValueError as error:
        raise ValueError(f"{path} names a sampling that cannot be used: {error}") from None
    return own
