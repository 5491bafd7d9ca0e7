"""docs/VERIFIED.md, made of the tables that the tests run by: what others report, and what was compared with what.

PYTHONPATH=.:tests:tests/cases:tests/core:tests/cuda python tests/cases/verified.py > docs/VERIFIED.md
"""

from __future__ import annotations

import re

import test_gpu
from test_lossless import FORMATS, KINDS, MODELS

from families import FAMILIES
from family_checks import DRAFTERS, FORMS
from run.methods import known_drafters
from run.options import ROOT
from scripts.bench.common import markdown

REPOSITORIES = {
    "1Cat-vLLM": "1CatAI/1Cat-vLLM", "ArcticInference": "snowflakedb/ArcticInference", "SpecForge": "sgl-project/SpecForge",
    "ik_llama.cpp": "ikawrakow/ik_llama.cpp", "llama.cpp": "ggml-org/llama.cpp", "mlx-lm": "ml-explore/mlx-lm",
    "sglang": "sgl-project/sglang", "sglang-jax": "sgl-project/sglang-jax", "vllm": "vllm-project/vllm",
}  # fmt: skip
# what is reported, its threads, what happens here, the tests
REPORTED = [
    ("Drafts change the greedy text", "mlx-lm#1423 llama.cpp#23335 sglang-jax#1103 ArcticInference#143 vllm#5313",
     "Tokens are vanilla's, with every drafter, tree and format: always where C++ operators run, and on the H200 in what ran there", "core/test_lossless.py::test_every_drafter_gives_vanillas_tokens"),
    ("A rejected draft stays in the state of recurrent layers", "mlx-lm#846 mlx-lm#1446 vllm#39273 llama.cpp#20039",
     "Each node of a tree has a state, made of its parent's; the accepted one is kept", "files/test_states.py::test_a_node_has_the_bits_of_its_own_path files/test_states.py::test_no_drafter_changes_a_token"),
    ("Acceptance collapses, and no error says so", "vllm#51009 vllm#49559 ik_llama.cpp#1815 llama.cpp#23544",
     "Where a head accepts less than half of what was published of it ([HEADS.md](../files/HEADS.md#published-heads-by-target)), one line asks whether it fits", "files/test_hub.py::test_a_head_that_accepts_too_little_says_so"),
    ("Drawn drafts bias or spoil a sampled text", "1Cat-vLLM#656 vllm#47386 vllm#54282",
     "A token is a function of the seed, the place and the scores: one text for all drafters. The papers' own rule (`--accept residual`) is tested by its distribution", "core/test_lossless.py::test_every_drafter_gives_vanillas_tokens core/test_sampling.py::test_every_rule_draws_from_p_and_a_favour_is_caught"),
    ("Grammars, tools and thinking break under drafts", "vllm#44006 sglang#30096",
     "A grammar masks every node by its own path, and the text is the same with and without drafts", "core/test_grammar.py::test_outputs_of_schemas_parse_and_validate tools/test_replies.py::test_a_server_tells_thinking_and_calls_apart"),
    ("A cache in 8 bits, or a shared prefix, and drafts", "vllm#40831 vllm#54360",
     "No token changes", "core/test_lossless.py::test_demo_trees_equal_vanilla core/test_prefixes.py::test_a_copied_prefix_changes_no_token"),
    ("A quantized target gains nothing", "llama.cpp#10594 llama.cpp#10664",
     "A pass over 2 or 4 rows costs about one over a row ([figures](../benchmarks/RESULTS.md#what-does-a-pass-over-n-rows-cost)), and the tokens are vanilla's in every format", "files/test_gguf_blocks.py::test_drafting_changes_no_token"),
    ("Drafts are slower than none, and no switch learns it", "llama.cpp#28196 mlx-lm#1211",
     "`--tree auto` drafts by what a token costs here; where nothing pays, it tries now and then", "core/test_by_value.py::test_where_no_tree_pays_trials_are_rare"),
    ("Drafts lose from two requests on", "llama.cpp#27342 sglang#6949",
     "They do here, too: 1.36, 1.03, 0.94, 0.96 of vanilla for 1, 2, 4, 8 requests on two cores ([date](../benchmarks/RESULTS.md#smaller-questions)); the text stays the same", "tools/test_batcher.py::test_texts_do_not_change"),
    ("A head of one maker does not load elsewhere", "vllm#49646 SpecForge#307",
     "[HEADS.md](../files/HEADS.md#layouts) has the layouts that are read, each with its comparison; others are refused in one line", "files/test_heads.py core/test_block_heads.py"),
    ("Flags are taken and ignored", "mlx-lm#1297 llama.cpp#12968", "An option that is unknown or has no effect is refused in one line", "core/test_options.py::test_mistakes_are_one_line"),
]  # fmt: skip
WRITTEN = "written; llama.cpp computes the same logits"
# of a family: the published models, its GGUF file, what is not known or not served
SERVED = {
    "LLaMA": ("LLaMA 1 to 3.2; RoPE linear, llama3, yarn", "real (SmolLM2), written", ""),
    "Mistral": ("Mistral", "LLaMA's", ""), "Qwen2": ("Qwen2, Qwen2.5", "real (Coder 0.5B), written", ""), "Qwen3": ("Qwen3", "written", ""),
    "Mixtral": ("Mixtral", "written", ""), "Qwen3-MoE": ("Qwen3-MoE", "written", ""), "Qwen2-MoE": ("Qwen2-MoE", WRITTEN, ""),
    "SmolLM3": ("SmolLM3", "written", ""), "Phi-3": ("Phi-3, Phi-4", "written", "longrope, the scaling of the variants of 128k tokens"),
    "OLMo-2": ("OLMo-2", "written", "with fewer heads of keys than of queries (32B) PyTorch runs, slower, and says so"),
    "OLMo-3": ("OLMo-3", "written", ""),
    "Granite 3": ("Granite 3 (dense)", "written", ""),
    "Granite 4": ("Granite 4 (dense: micro, 1b, 350m)", "as Granite 3", "mixtures and recurrent layers (h)"),
    "GLM-4": ("GLM-4 9B and 32B (of 2025)", WRITTEN, ""),
    "GLM-4.5": ("GLM-4.5, 4.6 and 4.7, also Air", WRITTEN, "its MTP layer drafts; groups of experts; the Flash models, which have MLA"),
    "Qwen3.5": ("Qwen3.5, dense or with experts", WRITTEN, "its MTP layer drafts; pictures"), "Qwen3-Next": ("Qwen3-Next", WRITTEN, "its MTP layer"),
    "LFM2": ("LFM2 and LFM2.5, dense or with experts", f"{WRITTEN} (but for a `routed_scaling_factor` other than 1)", "pictures, sound"),
    "gpt-oss": ("gpt-oss", "written", ""), "Gemma 3": ("Gemma 3", "real (270M), written", "pictures"),
    "Gemma 4": ("Gemma 4: E2B, E4B, 31B and 26B-A4B", WRITTEN, "its assistants draft (`--head`); pictures, sound"),
}  # fmt: skip
OFFICIAL = {  # of a value of --draft: with what its drafts were compared
    "eagle": "drafts and texts of the official code (test_golden.py)",
    "medusa": "a plain reference by the official code (test_token_heads.py)",
    "hydra": "a plain reference by the official code (test_token_heads.py)",
    "block": "scores of the official modules (test_block_heads.py)",
    "mtp": "transformers' layers in the makers' formula (test_mtp.py)",
    "assistant": "transformers' own module (test_gemma4_assistant.py)",
}
PAGE = """# What was compared with what

For those who want to know what to rely on. The tests make this page of their own tables (tests/cases/verified.py),
and fail where it says something else.

## What others report, and what happens here

{reported}

## Models

Small models of random weights, each in so many forms of its configuration: logits of all positions in fp32, with a
cache and without, are those of transformers 5.24 to 1e-4, and 64 greedy tokens are its own. An EAGLE head and drafters that
know the text ({drafters}) draft for two prompts, greedily and sampled, and no token changes. In bf16,
int8, int4 and a file's own bits (blocks) whole passes run in C++. Where no real file is named, no published file was
read.

{models}

MiMo-7B was compared with transformers' Qwen2, whose layers it has; its MTP layer drafts, and MiMo-V2 is refused.

## Ways to draft

Each drafts for small models ({targets}) in {formats}, with C++, with compiled steps, and in fp32 by
definitions, greedily and sampled, one sequence and two: the text is vanilla's (test_lossless.py). Published heads were not
run.

{ways}
"""


def linked(threads: str) -> str:
    """The links of threads, as repository#number."""
    found = (thread.partition("#") for thread in threads.split())
    return ", ".join(
        f"[{name} {number}](https://github.com/{REPOSITORIES[name]}/issues/{number})"
        for name, _, number in found
    )


def named_tests(tests: str) -> str:
    """Tests as a page has them: the file, and what the test says."""
    files: dict[str, list[str]] = {}
    for test in tests.split():
        file, _, name = test.partition("::")
        files.setdefault(file, []).append(name.removeprefix("test_").replace("_", " "))
    return "; ".join(f"{file}: {', '.join(names)}".rstrip(": ") for file, names in files.items())


def model_row(name: str) -> list[str]:
    """A family's row."""
    family = FAMILIES[name]
    title, file, remark = SERVED[name]
    config = family.of(next(iter(family.cases))).config
    forms = [form for form in FORMS if family.file_of or form != "blocks"]
    on_cuda = {"LLaMA": "in that shape on an H200"}.get(name, "no")
    if config.model_type in (*test_gpu.FAMILIES, "mixtral"):
        on_cuda = "a test waits"
    return [
        title, str(len(family.cases) + len(family.rewritten)), file,
        ", ".join(forms) if family.runs else "below", "one" if family.one_rank else "several", on_cuda, remark,
    ]  # fmt: skip


def way_row(draft: str) -> list[str]:
    """The row of a value of --draft."""
    kinds = [kind for kind, of in KINDS.items() if of == draft]
    trees = ", ".join(known_drafters()[draft].trees) or "its own"
    text = "as above" if kinds else "in tests of its own"
    return [f"`{draft}`", ", ".join(kinds), trees, text, OFFICIAL.get(draft, "")]


def page() -> str:
    """The page."""
    reported = [[what, linked(threads), here, named_tests(tests)] for what, threads, here, tests in REPORTED]  # fmt: skip
    columns = ["model", "forms", "GGUF file", "drafts in", "CPU ranks", "CUDA", "not known or not served"]  # fmt: skip
    ways = ["`--draft`", "heads and files", "trees", "text", "drafts compared with"]
    return PAGE.format(
        reported=markdown(["reported", "where", "here", "tests"], reported),
        models=markdown(columns, map(model_row, SERVED)),
        ways=markdown(ways, map(way_row, known_drafters())),
        drafters=", ".join(DRAFTERS),
        targets=", ".join(MODELS),
        formats=", ".join(FORMATS),
    )


def missing_tests() -> list[str]:
    """Tests of REPORTED that are not there."""
    wanted = [test.partition("::") for *_, tests in REPORTED for test in tests.split()]
    texts = {file: (ROOT / "tests" / file).read_text(encoding="utf-8") for file, *_ in wanted}
    return [name for file, _, name in wanted if not re.search(rf"^def {name}\(" if name else "", texts[file], re.MULTILINE)]  # fmt: skip


if __name__ == "__main__":
    print(page(), end="")
