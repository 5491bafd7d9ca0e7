"""Options: the help and the page, forms of `--tree`, and every kind of user's mistake as one line.

What a program refuses is a row: a command line, or settings from Python, and words of the answer.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from test_generate import HEAD, OF_IDS, ON_DEMO, TARGET, failure

from draft_tree import parse_tree
from run import parsing
from run.generate import main
from run.load import load
from run.options import DEMO, ROOT, GenerateConfig
from run.parsing import parse, processors

FIELDS = {f.name: f for f in fields(GenerateConfig)}
WITH_HEAD = f"{OF_IDS} --eagle {HEAD}"
OF_MODEL = f"{OF_IDS} --draft model --draft_checkpoint"
SAMPLED = {"temperature": 1.0}
RESIDUAL = {"accept": "residual", "temperature": 1.0}
NO_TREES = ["large", "nowhere.json", "chain:", "chain:,", "chain:a", "chain:0", "chain:-1", "chain: 3", "chain:3,4", "static:3", "auto:1,2,3,4",
            "dynamic:²", "dynamic:" + "9" * 5000, "chain;3", "Chain:3", ":3"]  # fmt: skip


def read(line: str, options: type = GenerateConfig) -> GenerateConfig:
    return parse(options, "generate.py", "", shlex.split(line))


# ------------------------------------------------------------------------------------ help and page


def tables() -> str:
    """The tables of the options as docs/USAGE.md has them: the groups of --help, a row an option."""
    parts = []
    for title, names in GenerateConfig.GROUPS.items():
        rows = []
        for f in (FIELDS[name] for name in names):
            letters = [f"-{f.metadata['short']}"] if f.metadata["short"] else []
            others = [f"--{f.metadata['alias']}"] if f.metadata["alias"] else []
            flags = ", ".join(f"`{flag}`" for flag in (f"--{f.name}", *others, *letters))
            help = f.metadata["help"].replace("|", "\\|").replace("<", "\\<")
            if f.metadata["choices"] and f.name not in ("tree", "draft"):
                help += f" ({', '.join(f.metadata['choices'])})"
            if f.default not in ("", None, False, (), GenerateConfig.checkpoint):
                help += f" (default: {f.default})"
            rows.append(f"| {flags} | {help} |\n")
        parts.append(f"| {title} | |\n|---|---|\n{''.join(rows)}")
    return "\n".join(parts)


def test_the_help_and_the_page_have_every_option(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    text = capsys.readouterr().out
    shown = " ".join(text.split())
    flags = [f for f in FIELDS.values() if f.metadata["flag"]]
    assert stop.value.code == 0 and len(flags) <= 45
    for f in flags:
        assert f"--{f.name} " in shown and " ".join(f.metadata["help"].split()) in shown, f.name
    grouped = [name for names in GenerateConfig.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(f.name for f in flags)
    page = (ROOT / "docs" / "USAGE.md").read_text(encoding="utf-8")
    assert tables() in page, f"put this into docs/USAGE.md:\n{tables()}"
    others = {f.name for f in FIELDS.values() if not f.metadata["flag"]}
    assert others <= set(re.findall(r"`(\w+)`", page))


# -------------------------------------------------------------------------------------------- forms


@pytest.mark.parametrize("text, options", [
    ("", {"tree": ""}), ("auto", {"tree": "auto"}), ("static", {"tree": "static"}),
    ("auto:6,8,32", {"tree": "auto", "tree_depth": 6, "tree_topk": 8, "tree_size": 32}),
    ("chain:3", {"tree": "chain", "tree_depth": 3}), ("dynamic:,8", {"tree": "dynamic", "tree_topk": 8}),
    ("dynamic:6,,32", {"tree": "dynamic", "tree_depth": 6, "tree_size": 32}),
    (HEAD + "/config.json", {"tree_file": HEAD + "/config.json"}),
])  # fmt: skip
def test_a_tree_is_one_text(text, options):
    """From the command line and from Python."""
    assert parse_tree(text) == options
    assert read(f"--tree '{text}'") == GenerateConfig(**options)
    assert parsing.by_names(GenerateConfig, {"tree": text}) == options


def test_values_as_texts_have_the_types_of_their_fields():
    """As `/set` of a chat and the methods of benchmarks give them."""
    texts = ["ignore_eos=False", "num-samples=3", "typical_p=0.5", "stop=a", "json=a=b"]
    given = parsing.read_settings(GenerateConfig, [*texts, "eagle=there"])
    given = parsing.by_names(GenerateConfig, given)
    want = {"ignore_eos": False, "num_samples": 3, "typical_p": 0.5}
    assert given == want | {"stop": ("a",), "json": "a=b", "head": "there"}
    for text, said in (
        ("dtype", "name=value, as seed=1; it is 'dtype'"),
        ("dtyp=a", "no option dtyp; did you mean dtype?"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            parsing.read_settings(GenerateConfig, [text])


# ----------------------------------------------------------------------------------------- mistakes


class Ran(NamedTuple):
    """How a program ended."""

    status: int
    out: str
    err: str


RUN = """
import contextlib, io, json, runpy, sys
missing, lines = json.loads(sys.argv[1])
sys.modules |= dict.fromkeys(missing)
ran = []
for program, *argv in lines:
    sys.argv = [program, *argv]
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(program, run_name="__main__")
        except SystemExit as stop:
            status = stop.code or 0
    ran.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(ran))
"""


def run_without(modules: tuple[str, ...], lines: list[str]) -> list[Ran]:
    """Run command lines, one after the other in one process in which imports of some modules fail."""
    given = json.dumps([modules, [shlex.split(line) for line in lines]])
    command = [sys.executable, "-c", RUN, given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Ran(*each) for each in json.loads(done.stdout)]


SMOLLM2_HEAD = "checkpoints/SmolLM2-135M-Instruct.Q4_1-eagle"
# a command line and words of its answer, before torch is imported; {odd} is the folder of `odd`
MISTAKES = [
    # names, files and folders
    ("--checkpoint tests/Llama-2-7b --prompt a", "no such directory: tests/Llama-2-7b; a model of a hub is named hf:OWNER/NAME, one of ollama ollama:NAME"),
    (f"{OF_IDS} --eagle nowhere", "no such directory: nowhere"),
    (f"{OF_IDS} --json a.txt --trace ./a.txt", "--json and --trace both write a.txt; name another file for one"),
    (f"{OF_IDS} --json no/such/dir/out.json", "cannot write no/such/dir/out.json; there is no directory"),
    # prompts
    (f"{OF_IDS} --prompt a", "prompts come from one place; --prompt and --prompt_ids were given"),
    (f"--checkpoint {TARGET}", "no prompt"),
    ("--prompt_file nowhere.txt", "cannot read nowhere.txt"),
    (f"--checkpoint {TARGET} --prompt_ids 5,x", "numbers like 5,17,3"),
    # kinds, choices and ranges
    (f"{OF_IDS} --no_such_flag", "--no_such_flag"),
    (f"{OF_IDS} --max_new_tokens 0", "--max_new_tokens must be at least 1"),
    (f"{OF_IDS} --threads 9999", f"--threads must be at most {processors()}; it is 9999"),
    (f"{OF_IDS} --top_p 0", "--top_p must be in (0, 1]; it is 0.0"),
    (f"{OF_IDS} --device tpu", "--device must be cpu or cuda; it is tpu"),
    (f"{WITH_HEAD} --tree dynamic:,,65", "NODES of --tree (tree_size) must be at most 64; it is 65"),
    (f"{WITH_HEAD} --tree dynamic:1,4,9", "lower NODES of --tree"),
    # needs: of sampling, of a draft, of a tree, of a run
    (f"{OF_IDS} --draft none --eagle {HEAD}", "--head does nothing with --draft none"),
    (f"{OF_IDS} --draft_checkpoint {TARGET}", "--draft_checkpoint belongs to --draft model"),
    (f"{OF_IDS} --draft model", "--draft model needs --draft_checkpoint"),
    (f"{OF_MODEL} {TARGET} --tree chain:,,9", "is none of them"),
    (f"{WITH_HEAD} --draft eagle+ngram --tree chain", "--tree cannot be chain with --draft eagle+ngram; use dynamic"),
    (f"{OF_IDS} --random llama2-7b --temperature 1 --tree chain --accept residual", "--random takes no --accept residual; drop one of them"),
    ("--interactive --batch_size 2", "--batch_size cannot go with --interactive"),
    (f"{OF_IDS} --compile --plain", "--plain is the opposite of --compile; drop one of them"),
    # chat templates
    (f"{ON_DEMO} --chat --prompt a", "--chat NAME"),
    (f"{ON_DEMO} --prompt a --system b", "demo has none; add --chat NAME with one of llama3"),
    (f"{ON_DEMO} --prompt a --chat mistral --system b", "mistral takes no system message (raises: there is no place for one); drop --system"),
    (f"{OF_IDS} --dtyp float32", "unrecognized arguments: --dtyp float32; did you mean --dtype?"),
    (f"{OF_IDS} --dtype int3", "invalid choice: 'int3'"),
    *[(f"{WITH_HEAD} --tree '{text}'", "numbers from 1 on") for text in NO_TREES],
]  # fmt: skip
# those that need the header of a file, without torch
OF_HEADERS = [
    ("generate.py --checkpoint {odd} --prompt a", "architecture PhiForCausalLM is not supported"),
    (f"generate.py --checkpoint {DEMO} --head {SMOLLM2_HEAD} --prompt a",
     "hidden_size is 576, the target's is 256; use the head made for this target"),
    (f"generate.py --checkpoint {DEMO} --grammar {{odd}}/bad.lark --prompt a",
     "the grammar is refused: 1(10): lexer error"),
    (f"generate.py --checkpoint {DEMO} --grammar {{odd}}/bad.json --prompt a",
     "the grammar is refused: Invalid type: strin; correct it"),
    (f"quantize.py --checkpoint {DEMO} --out {{odd}}", "exists; give --overwrite"),
    ("quantize.py --checkpoint nowhere --out {odd}/new", "no such directory: nowhere"),
    ("scripts/train_head.py --checkpoint {odd} --out {odd}/new",
     "architecture PhiForCausalLM is not supported"),
    (f"scripts/train_head.py --checkpoint {DEMO} --out {{odd}}/new", "has no chat template"),
    (f"scripts/train_head.py --checkpoint {DEMO} --chat vicuna --out {{odd}}",
     "holds something else than a run of train_head.py"),
]  # fmt: skip
DEMO_LINE = f"generate.py --checkpoint {DEMO}"
# modules whose imports fail -> rows; torch takes seconds
REFUSED = {
    ("torch", "numpy", "safetensors"): [
        *[(f"generate.py {line}", message) for line, message in MISTAKES],
        (f"{DEMO_LINE} --chat", "has no chat template"),
        (DEMO_LINE, "generate.py: torch is not installed; run: pip install -r requirements.txt"),
        (f"scripts/serve.py --checkpoint {DEMO}", "serve.py: torch is not installed; run: pip install"),
    ],
    ("torch", "safetensors"): OF_HEADERS,
    ("sentencepiece",): [(DEMO_LINE, "generate.py: sentencepiece is not installed; run: pip install")],
    ("uvicorn",): [("scripts/serve.py", "uvicorn is missing; pip install -r scripts/requirements-")],
}  # fmt: skip


@pytest.fixture
def odd(tmp_path) -> Path:
    """The demo with an architecture that nobody serves, and grammars that are none."""
    for file in Path(DEMO).iterdir():
        (tmp_path / file.name).symlink_to(file)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    raw |= {"architectures": ["PhiForCausalLM"], "model_type": "phi"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "bad.lark").write_text('start: "a')
    (tmp_path / "bad.json").write_text('{"type": "strin"}')
    return tmp_path


@pytest.mark.parametrize("missing", REFUSED, ids=" ".join)
def test_mistakes_are_one_line(odd, missing):
    """With status 2. In one process a group, in which some imports fail. No folder is left behind."""
    if missing == ("torch", "safetensors"):
        pytest.importorskip("llguidance")
    rows = [(line.replace("{odd}", str(odd)), words) for line, words in REFUSED[missing]]
    for ran, row in zip(run_without(missing, [line for line, _ in rows]), rows):
        assert ran.status == 2 and row[1] in ran.err and len(ran.err.splitlines()) == 1, (row, ran)
    assert not (odd / "new").exists()


@pytest.mark.parametrize(
    "line, message",
    [
        (f"--checkpoint {TARGET} --prompt a", "--prompt_ids"),  # no tokenizer
        (f"--checkpoint {TARGET} --prompt_ids 5,97", "0..96"),
        (f"{OF_IDS} --context 4", "prompt has 4 tokens, the context holds 4"),
        (f"{OF_IDS} --draft eagle", "name its directory with --head"),
        (f"{WITH_HEAD} --draft eagle+ngram --tree dynamic:,,5", "do not fit a tree"),
        ("--random 7b --prompt a", "--random takes one of tiny-0.5b, llama2-7b, llama2-13b, llama2-70b, llama3-8b, llama3-70b, or a config.json; it is 7b"),
        (f"{OF_MODEL} {DEMO}", "vocab_size is 97 in"),
        (f"{OF_MODEL} {HEAD}", "holds a head of the kind eagle, and no draft model; use --head"),
    ],
)  # fmt: skip
def test_mistakes_that_only_the_files_tell_are_one_line(capsys, line, message):
    assert message in failure(capsys, line)


@pytest.mark.parametrize(
    "settings, message",
    [
        # kinds
        ({"sharpness": 2}, "there is no option sharpness"),
        ({"ignore_eos": 1}, "--ignore_eos must be True or False; it is 1"),
        ({"quant": "int3"}, "--quant must be one of none, int8, int4; it is 'int3'"),
        ({"eagle": 5}, "--head must be a text; it is 5"),
        ({"tree": "dynamic:,,8", "tree_size": 9}, "--tree has tree_size already; give it once"),
        ({"logit_bias": "5+1"}, """logit_bias must be {"token id": number, ...}; it is '5+1'"""),
        ({"logit_bias": '{"97": 1}'}, "logit_bias: token ids must be in 0..96; one is 97"),
        ({"dry_sequence_breakers": ["a"] * 65, "dry_multiplier": 1.0}, "dry_sequence_breakers may have 64 texts, not 65"),
        # needs
        ({"tree": "chain", "tree_file": "x"}, "--tree x is a static tree, not chain"),
        # rules of acceptance
        ({"children": "sampled"} | SAMPLED, "--children sampled would make a dynamic tree lossy; use --tree static"),
        ({"children": "noise"} | RESIDUAL, "does not read the target's noise"),
        ({"children": "topk", "tree": "static"} | RESIDUAL, "drop --children topk"),
        ({"tree": "auto"} | RESIDUAL, "--accept needs a tree of one size; --tree auto changes it"),
        ({"tree": "static", "typical_p": 0.9, "dry_multiplier": 1.0} | RESIDUAL, "typical_p, dry_multiplier cannot go with --accept residual; drop that"),
        ({"draft": "none", "eagle": ""} | RESIDUAL, "--accept belongs to heads, draft models and --draft ngram"),
        # drafters without a model
        ({"draft": "recycling", "eagle": "", "tree": "dynamic"}, "--tree cannot be dynamic with --draft recycling; use auto or static"),
        ({"draft": "rest", "eagle": ""}, "--draft rest needs its texts; add --datastore FILE"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work(settings, message):
    """From Python."""
    with pytest.raises(ValueError, match=re.escape(message)):
        load(**{"checkpoint": TARGET, "eagle": HEAD, "device": "cpu"} | settings)


def test_a_full_gpu_is_one_line(capsys):
    """As torch words it, with the bytes that were asked for and those that are free."""
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 9.50 GiB of "
        "which 1.20 GiB is free. Including non-PyTorch memory, this process has 8.3 GiB in use."
    )
    with pytest.raises(SystemExit) as raised, parsing.one_line_errors("generate.py"):
        raise error
    told = capsys.readouterr().err
    assert raised.value.code == 2 and told.count("\n") == 1
    assert "allocate 2.00 GiB" in told and "of which 1.20 GiB is free; lower --batch_size" in told


def test_an_output_without_permission_is_refused_first(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    assert "no permission" in failure(capsys, f"{OF_IDS} --json {tmp_path}/out.json")
