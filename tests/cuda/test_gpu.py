"""Checks that need a CUDA device: token identity of whole decodings, its operators, their bits.

pytest -m smoke -n 8 --maxprocesses 8 tests/cuda/test_gpu.py     # the most telling ones, in a minute or so
pytest -m gpu -n 8 --maxprocesses 8 tests/cuda/test_gpu.py

Whole decodings take longest, and stand first. Properties of the kernels are those of cases/kernels.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

import lost_device
import sampling
from decode import build_cycles
from draft_tree import EAGLE1_PATHS, DynamicTree, StaticTree
from drafter_files import write_drafter
from drafters import RootOnly
from drafts.by_value import ByValue, beside
from drafts.noise import uniforms
from eagle_draft import EagleDrafter, EagleHead, load_head
from files.config import read_config
from files.weights import load_model
from helpers import GOLDEN, decode
from kernels import BF16, FP32, rows
from model import RotaryEmbeddings, Transformer
from reference import choose, use_backend
from run.engine import Engine
from run.library import generate
from run.load import load
from run.options import DEMO, GenerateConfig
from run.session import Session
from run.warm_up import warm_up
from runtime import WARM_UPS
from scripts.train import train_eagle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"
    ),
]
ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 17, 3, 40, 8, 22, 61], [9, 33, 2, 71, 54, 90, 12, 6, 28, 77, 1, 45]]
SMALL = {  # keys of config.json: of every family below
    "vocab_size": 32, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
FAMILIES = {  # by model_type: steps that no golden model has
    "qwen3_5_text": {  # states, an output gate
        "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": {  # sinks, windows, a clamped gate of experts with biases
        "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
        "num_local_experts": 6, "num_experts_per_tok": 2,
    },
    "gemma4_text": {  # heads of 512, a shared cache, embeddings by layer
        "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8, "global_head_dim": 512,
        "vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "qwen2_moe": {  # a shared expert
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "glm4_moe": {  # experts by sigmoids, half of a head turned
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "use_qk_norm": True,
    },
    "glm4": {},  # half of a head turned, four norms a layer
}  # fmt: skip
TREES = {"chain": StaticTree.chain(5), "static": StaticTree(EAGLE1_PATHS), "dynamic": DynamicTree()}
# of a test, among several processes; the longest compile a dozen kernels or three steps
LIMIT_S = 180


@pytest.fixture(autouse=True)
def _device_watched():
    with lost_device.watched(torch.cuda.synchronize, LIMIT_S):
        yield


# ----------------------------------------------------------------------------------- whole decoding


def golden_config(temperature: float, **options) -> GenerateConfig:
    """Options on the golden models, whose prompts and answers are ids."""
    same = {"device": "cuda", "ignore_eos": True, "seed": 7, "compile": False}
    return GenerateConfig(temperature=temperature, **same | options)


Models = tuple[Transformer, EagleHead]


def golden_models(model: str = "llama_mha") -> Models:
    """A golden target and its head, in fp32 without rounding to tf32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    target = load_model(GOLDEN / f"models/target_{model}", FP32, "cuda")
    name = f"models/head_eagle12_{model.removeprefix('llama_')}"
    return target, load_head(GOLDEN / name, target)


def engines(
    config: GenerateConfig,
    models: Models,
    tree: StaticTree | DynamicTree,
    context: int = 256,
    **changes,
) -> tuple[Engine, Engine]:
    """Vanilla, and one that drafts with some options changed."""
    target, head = models
    vanilla = build_cycles(Engine(target, (RootOnly(),), context, config=config))
    config, drafter = replace(config, **changes), EagleDrafter(head, target, tree)
    return vanilla, build_cycles(Engine(target, (drafter,), context, config=config))


@rows("batch, temperature", product((1, 2), (0.0, 1.0)), (), smoke=[(1, 0.0), (2, 1.0)])
def test_captured_cycles_equal_vanilla_and_never_wait(batch, temperature):
    """Graphs of every preset, in turn; after the warm-up nothing in a cycle may stop the host."""
    target, head = golden_models()
    config = golden_config(temperature, max_new_tokens=100, batch_size=batch)
    drafter = beside(EagleDrafter(head, target, DynamicTree(4, 5, 20)))
    vanilla = build_cycles(Engine(target, (RootOnly(),), 256, config=config))
    options = {"config": replace(config, compile=True), "policy": ByValue()}
    engine = warm_up(build_cycles(Engine(target, drafter.presets, 256, **options)))
    assert engine.captured and engine.policy.costs is not None
    want = decode(vanilla, *PROMPTS[:batch]).history
    for _ in range(2):
        session = Session(engine, [(i, 0) for i in range(batch)])
        decoding = session.decode_turn(list(PROMPTS[:batch]))
        next(decoding)
        for preset in range(len(engine.presets)):
            for _ in range(1 + WARM_UPS):
                session.time_cycle(preset)  # captured by now, whichever the tree policy preferred
        del session, decoding  # the next session takes over the buffers
        session = Session(engine, [(i, 0) for i in range(batch)])
        decoding = session.decode_turn(list(PROMPTS[:batch]))
        next(decoding)
        torch.cuda.set_sync_debug_mode("error")
        try:
            list(decoding)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert session.history == want
        assert all(replay.graph is not None for replay in session.buffers.replays.values())


@rows(
    "model, tree, temperature, compiled", product(("llama_mha", "mixtral"), TREES, (0.0, 1.0), (False, True)), (),
    smoke=[("llama_mha", "dynamic", 0.0, True), ("llama_mha", "chain", 1.0, False)],
)  # fmt: skip
def test_trees_equal_vanilla(model, tree, temperature, compiled):
    """fp32 on the golden models; near ties are reported by the assertion's message."""
    config = golden_config(temperature, max_new_tokens=60, batch_size=2)
    vanilla, drafted = engines(config, golden_models(model), TREES[tree], compile=compiled)
    assert decode(drafted, *PROMPTS).history == decode(vanilla, *PROMPTS).history


def random_target(family: str, dtype: torch.dtype) -> Transformer:
    """A model of the family with random weights, on the GPU."""
    target = Transformer(
        read_config(Path(family), SMALL | FAMILIES[family] | {"model_type": family})
    )
    draw = torch.Generator().manual_seed(0)
    for name, weight in target.named_parameters():
        weight.requires_grad_(False).normal_(float("norm" in name), 0.1, generator=draw)
    target = target.to("cuda", dtype).eval()
    target.ropes = RotaryEmbeddings(target.config.ropes, "cuda")  # which stay in fp32
    use_backend(target, choose(torch.device("cuda"), dtype))
    return target


@rows(
    "family, dtype, temperature", product(FAMILIES, (FP32, BF16), (0.0, 1.0)), (),
    smoke=[(family, BF16, 1.0) for family in ("qwen3_5_text", "gpt_oss", "gemma4_text", "lfm2")],
)  # fmt: skip
def test_a_tree_over_every_kind_of_layer_equals_vanilla(family, dtype, temperature):
    """The head is random, too: ten of 32 tokens a node are right now and then."""
    torch.backends.cuda.matmul.allow_tf32 = False
    target = random_target(family, dtype)
    torch.manual_seed(0)
    head = train_eagle.make_head(train_eagle.TrainConfig(init="feature"), target, [])
    head = head.to("cuda", dtype).requires_grad_(False)
    head.ropes = RotaryEmbeddings(head.config.model.ropes, "cuda")
    config = golden_config(temperature, max_new_tokens=60, batch_size=2)
    prompts = [[token % 32 for token in prompt] for prompt in PROMPTS]
    tree = DynamicTree(depth=3, topk=10, size=40)
    vanilla, engine = engines(config, (target, head), tree)
    drafted = decode(engine, *prompts)
    assert drafted.history == decode(vanilla, *prompts).history
    assert sum(drafted.stats.accept_lengths) > 5


def exact_options(temperature: float, new: int, checkpoint: str = DEMO) -> dict:
    """Options of `load` on the GPU, in fp32 without rounding to tf32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    sizes = {"temperature": temperature, "max_new_tokens": new}
    return {"checkpoint": checkpoint, "device": "cuda", "dtype": "float32"} | sizes


PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
STOP = {"stop": ["re", "s", "("]}
CHATS = [["def read_lines(path):", "def g(b):\n", "# "], ["class A:", "\n x"]]
TEXTS = ["import os\n", "Question: What is 2 + 3?\nAnswer:"]


@rows(
    "temperature, rules", product((0.0, 1.0), ({}, PENALTIES, STOP)), (), smoke=[(0.0, {}), (1.0, PENALTIES)],
)  # fmt: skip
def test_the_demo_with_grouped_queries_equals_vanilla(temperature, rules):
    """The demo has two query heads per key head; the golden models have one.

    Cycles that run already when a stop string is found change nothing in the next turn.
    """
    options = exact_options(temperature, 64) | rules
    prompts = [*CHATS, *TEXTS]
    plain = generate(load(draft="none", **options), prompts)
    for tree in ("chain", "dynamic"):
        drafted = generate(load(tree=tree, batch_size=2, **options), prompts)
        assert (drafted.tokens, drafted.text) == (plain.tokens, plain.text)
    assert rules != STOP or "stop" in plain.finish_reason


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["eagle3", "medusa", "hydra", "hydra++", "dflash", "jetspec"])
def test_trained_drafters_equal_vanilla(kind, temperature, tmp_path):
    """Files on disk, compiled and captured, in fp32; Medusa and Hydra with LM heads of their own."""
    write_drafter(tmp_path / kind, kind)
    target = str(GOLDEN / "models/target_llama_mha")
    options = exact_options(temperature, 24, target) | {"ignore_eos": True}
    plain = generate(load(draft="none", **options), PROMPTS[:1])
    drafted = load(head=str(tmp_path / kind), tree="dynamic", compile=True, **options)
    assert generate(drafted, PROMPTS[:1]).tokens == plain.tokens


def warm_engines(config: GenerateConfig, context: int, **changes) -> tuple[Engine, Engine]:
    """Vanilla, and warm with a dynamic tree and some options changed, on golden models."""
    tree = DynamicTree(4, 5, 20)
    vanilla, drafted = engines(config, golden_models(), tree, context, **changes)
    return vanilla, warm_up(drafted)


@rows("compiled, temperature", product((False, True), (0.0, 1.0)), ())
def test_rows_that_take_one_prompt_after_the_other(compiled, temperature):
    """Prompts of one pass and of several are cached by graphs of each row, while the other rows decode."""
    config = golden_config(temperature, max_new_tokens=30, draft="none")
    prompts = [[(7 * i + i * i * k) % 97 for i in range(5 + 137 * k % 400)] for k in range(1, 9)]
    vanilla, drafted = warm_engines(config, 512, compile=compiled, batch_size=3)
    want = generate(vanilla, prompts).tokens
    for _ in range(2):
        assert generate(drafted, prompts).tokens == want


@rows("compiled, temperature", product((False, True), (0.0, 1.0)), (), smoke=[(True, 0.0)])
def test_four_rows_that_come_and_go(compiled, temperature):
    """As a server drives a session: one row is released in the middle of its text, others take the next prompt."""
    config = golden_config(temperature, max_new_tokens=40, draft="none")
    prompts = [[(7 * i + i * i * k) % 97 for i in range(5 + 37 * k % 60)] for k in range(1, 8)]
    vanilla, drafted = warm_engines(config, 256, compile=compiled, batch_size=4)
    want = generate(vanilla, prompts).tokens
    session = Session(drafted)
    said, coming, rows = [[] for _ in prompts], iter(range(len(prompts))), [-1] * 4
    for steps in range(200):
        if steps == 5:
            session.release(1)  # its prompt is 1
        for row in range(4):
            if not session.busy(row) and (number := next(coming, None)) is not None:
                rows[row] = number
                session.admit(row, prompts[number], (number, 0))
        for row, new in enumerate(session.step()):
            said[rows[row]] += new
    assert 0 < len(said[1]) < 40 and said[1] == want[1][: len(said[1])]
    assert said[0] == want[0] and said[2:] == want[2:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("compile", [[], ["--compile"]], ids=["captured", "compiled"])
def test_two_gpus_decode_what_one_does(tmp_path, compile):
    """The demo in fp32, sampled, with NCCL's collectives in the graphs."""
    runs = []
    for number, start in enumerate(([], ["-m", "torch.distributed.run", "--nproc_per_node", "2"])):
        out = tmp_path / f"{number}.json"
        command = [sys.executable, *start, "generate.py", "--checkpoint", DEMO, *compile]
        command += (
            f"--json {out} --device cuda --dtype float32 --temperature 1 --tree dynamic".split()
        )
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0 and "not captured" not in done.stderr, done.stderr
        runs.append(json.loads(out.read_text())["tokens"])
    assert runs[0] == runs[1]


# -------------------------------------------------------------------------- kernels: shapes of a GPU, graphs


def test_noise_is_the_same_on_both_devices():
    draws = torch.arange(5)[None]
    rows = []
    for device in ("cpu", "cuda"):
        one = torch.ones(1, dtype=torch.long, device=device)
        key = sampling.SamplingTensors(torch.tensor([7, 1], device=device), one, one)
        rows.append(uniforms(key, draws.to(device), 1000).cpu())
    assert torch.equal(*rows)


from kernels import (  # noqa: E402, F401
    test_a_function_is_its_definition,
    test_a_layers_kernels_one_after_the_other,
    test_a_row_has_the_same_bits_beside_any_others,
    test_a_row_has_the_same_bits_beside_any_others_of_its_expert,
    test_a_tree_has_the_bits_of_vanilla_decoding,
    test_any_number_of_experts,
    test_grow_level,
    test_nodes_of_a_tree,
    test_product,
    test_product_with_experts,
    test_rotary_cache,
    test_rows_of_a_packed_embedding,
    test_sliding_windows,
    test_tree_attention,
)
