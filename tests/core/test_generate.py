"""The command line and the Python interface: inputs and outputs. Mistakes are in test_options.py."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import GOLDEN, refused, slow
from run.generate import encode, main
from run.library import generate, stream
from run.load import load
from run.options import DEMO, ROOT, GenerateConfig
from run.parsing import VERSION
from run.prompts import read_prompts
from run.resolved import resolve_draft
from run.stats import explain

TARGET, HEAD = str(GOLDEN / "models/target_llama_mha"), str(GOLDEN / "models/head_eagle12_mha")
PROMPT = "def read_lines(path):"
# command lines
OF_IDS = (
    f"--checkpoint {TARGET} --device cpu --max_new_tokens 20 --prompt_ids 5,17,3,40 --ignore_eos"
)
ON_DEMO = f"--checkpoint {DEMO} --device cpu"
EIGHT_AS_JSON = f"{ON_DEMO} --max_new_tokens 8 --json -"  # tokens
CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('such words') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}{% endfor %}"
)


def run(capsys, line: str) -> tuple[str, str]:
    main(shlex.split(line))
    return capsys.readouterr()


def as_json(capsys, line: str) -> dict:
    return json.loads(run(capsys, line)[0])


def failure(capsys, line: str) -> str:
    return refused(capsys, main, shlex.split(line))


def program(line: str, **options) -> subprocess.CompletedProcess:
    """Run a command line in a process of its own."""
    command = [sys.executable, str(ROOT / "generate.py"), *shlex.split(line)]
    return subprocess.run(command, **options)


def with_template(folder: Path) -> Path:
    """The demo in a folder, with a chat template of its own."""
    for file in Path(DEMO).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(CHAT)
    return folder


# ----------------------------------------------------------------------------------- what comes out


def test_json_contract(capsys, tmp_path):
    file = tmp_path / "out.json"
    three = "--temperature 1 --num_samples 3 --batch_size 2"
    out, err = run(capsys, f"{OF_IDS} --eagle {HEAD} {three} --json {file}")
    got = json.loads(file.read_text())
    fields = "index tokens text finish_reason prompt_tokens stats config environment"
    assert set(got) == set(fields.split())
    assert got["index"] == [[0, 0, 0], [0, 1, 0], [0, 2, 0]]
    assert [len(t) for t in got["tokens"]] == [20] * 3
    assert got["finish_reason"] == ["length"] * 3 and got["prompt_tokens"] == [4] * 3
    want = {"tree": "auto", "context": 512, "sharpness": 1, "head": HEAD, "dtype": "float32"}
    assert {name: got["config"][name] for name in want} == want
    stats = got["stats"]
    assert {"peak_memory_bytes", "compile_s", "load_s"} <= set(stats)
    assert stats["cycles"] == len(stats["accept_lengths"])
    assert stats["tokens"] == 3 * 20
    assert stats["tau"] == pytest.approx(3 * 19 / stats["cycles"])
    # the lengths count accepted tokens behind the end of an answer, too
    assert stats["tau"] <= sum(stats["accept_lengths"]) / stats["cycles"] + 1
    assert stats["tokens_per_s"] == pytest.approx(3 * 19 / stats["decode_s"])
    assert stats["prefill_s"] > 0
    assert stats["draft_s"] + stats["verify_s"] <= stats["decode_s"]
    assert "\n60 tokens, " in err and f"; tau {stats['tau']:.2f}" in err
    assert "[3 of 3 answers cut at 20 tokens: --max_new_tokens]" in err
    names = re.findall("^== (.*) ==$", out, re.MULTILINE)
    assert names == [f"prompt 1, sample {n}" for n in (1, 2, 3)]
    assert not list(tmp_path.glob("*.tmp"))


def test_json_to_standard_output_is_alone_there(capsys):
    out, err = run(capsys, f"{OF_IDS} --context 10 --json -")
    got = json.loads(out)
    assert got["stats"]["tau"] == 1.0 and "tokens/s" in err
    assert got["finish_reason"] == ["context"] and len(got["tokens"][0]) == 6


def test_trace_contract(capsys, tmp_path):
    trace, result = tmp_path / "trace.jsonl", tmp_path / "j"
    run(capsys, f"{OF_IDS} --eagle {HEAD} --tree static --trace {trace} --json {result}")
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    keys = "row pos root draft_tokens parents depths accept_length path emitted values"
    assert rows[0]["pos"] == 4
    decided = [rows[0]["root"]]
    for row in rows:
        assert set(row) == set(keys.split())
        assert len(row["draft_tokens"]) == len(row["parents"]) == len(row["depths"]) == 25
        assert len(row["emitted"]) == row["accept_length"] + 1 == len(row["path"]) + 1
        assert [row["draft_tokens"][n - 1] for n in row["path"]] == row["emitted"][:-1]
        assert row["root"] == decided[-1]
        decided += row["emitted"]
    assert decided[:20] == json.loads(result.read_text())["tokens"][0]


def test_compare_prints_a_speedup_and_identity_and_explains_it(capsys):
    """The last line: tau over the cost of a cycle is the speedup of the line before."""
    _, err = run(capsys, f"{OF_IDS} --eagle {HEAD} --tree dynamic --compare --max_new_tokens 40")
    assert "x of vanilla" in err and "100 % of sequences identical" in err
    line, details, last = err.splitlines()[-3:]
    assert line.startswith("40 tokens, ") and re.match(r"decode \S+ s, tau .* GB", details)
    assert last.split(" = ")[0] == line.split("; ")[-1].partition("x of vanilla")[0]
    assert re.search(r"of a vanilla pass\); (bound by|noisy: )", last)
    tau = float(re.search(r"; tau (\S+), drafts by head", line)[1])
    assert float(re.search(r" = tau (\S+) ", last)[1]) == pytest.approx(tau, abs=0.006)


OF_VANILLA = "of a vanilla pass); "
NOISE = "noisy: the machine's speed changed between the two runs"


@pytest.mark.parametrize("draft_s, verify_s, host_s, drafted_by, expected", [
    (1.0, 11.2, 0.0, None, f"1.39 = tau 1.690 / (verify 1.120 + draft 0.100 {OF_VANILLA}bound by acceptance"),
    (2.0, 16.0, 0.5, None, f"0.91 = tau 1.690 / (verify 1.600 + draft 0.200 + host 0.050 {OF_VANILLA}bound by arithmetic"),
    (4.0, 10.0, 0.0, ["head"], f"1.21 = tau 1.690 / (verify 1.000 + draft 0.400 {OF_VANILLA}bound by memory"),
    (1.0, 10.0, 5.0, None, f"1.06 = tau 1.690 / (verify 1.000 + draft 0.100 + host 0.500 {OF_VANILLA}bound by the host"),
    (0.0, 9.0, 0.4, [], f"1.80 = tau 1.690 / (verify 0.900 + draft 0.000 + host 0.040 {OF_VANILLA}{NOISE}"),
    (0.0, 9.6, 0.4, [], f"1.69 = tau 1.690 / (verify 0.960 + draft 0.000 + host 0.040 {OF_VANILLA}nothing was drafted"),
])  # fmt: skip
def test_a_speedup_is_explained(draft_s, verify_s, host_s, drafted_by, expected):
    """100 cycles that emit 169 tokens, against passes of 0.1 s, one or two tokens each."""
    decode_s = draft_s + verify_s + host_s
    drafted = {"tokens_per_s": 169 / decode_s, "cycles": 100, "decode_s": decode_s}
    drafted |= {"draft_s": draft_s, "verify_s": verify_s, "drafted_by": drafted_by}
    assert explain(drafted, 0.1).startswith(expected)
    assert "tau 0.845 / " in explain(drafted, 0.1, vanilla_tokens=2.0)


# ------------------------------------------------------------------------------ lines with equal tokens

TURNS = json.dumps({"turns": [PROMPT]})
# a prompt in other forms, names of options as others have them; what standard input has
EQUAL = [
    ("", ""),  # the demo's own prompt
    ("--prompt_file {0}/p.txt", ""), ("--prompt_file {0}/p.JSONL", ""), ("--prompt-file=-", f"{TURNS}\n"),
    (f"-m {DEMO} --max-new-tokens=8 -p -", f"{PROMPT}\n"),
]  # fmt: skip


@pytest.mark.parametrize("line, typed", EQUAL)
def test_prompts_and_options_in_other_words(capsys, monkeypatch, tmp_path, line, typed):
    """A file of prompts is JSONL by its suffix, or by its first key."""
    want = generate(load(DEMO, device="cpu", max_new_tokens=8), [PROMPT])
    for name, content in (("p.txt", PROMPT), ("p.JSONL", TURNS)):
        (tmp_path / name).write_text(content)
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert as_json(capsys, f"{EIGHT_AS_JSON} {line.format(tmp_path)}")["tokens"] == want.tokens


# --------------------------------------------------------------------------------- from Python


@pytest.mark.parametrize("options", [{}, {"temperature": 1, "top_k": 5, "top_p": 0.8}], ids=str)
def test_a_stream_is_the_text_of_its_own_parameters(capsys, options):
    """And standard output is that text alone, before the statistics."""
    engine = load(checkpoint=DEMO, max_new_tokens=30, device="cpu")
    assert engine.option("draft") == "eagle", "the bundled head is the default"
    want = generate(engine, [PROMPT], **options, max_new_tokens=12).text[0]
    assert "".join(stream(engine, PROMPT, **options, max_new_tokens=12)) == want
    assert "".join(stream(engine, PROMPT)) == generate(engine, [PROMPT]).text[0]
    flags = " ".join(f"--{name} {value}" for name, value in options.items())
    out, err = run(capsys, f"{ON_DEMO} --max_new_tokens 12 {flags}")
    assert out == want + "\n" and re.search(r"^12 tokens, \S+ tokens/s; tau ", err, re.MULTILINE)


def test_messages(tmp_path):
    """As OpenAI clients send them: they are rendered, never their keys."""
    folder = with_template(tmp_path)
    engine = load(folder, draft="none", device="cpu", max_new_tokens=6)
    question = {"role": "user", "content": "x = 1"}
    want = generate(engine, ["x = 1"])
    for prompt in ("x = 1", [question]):
        assert (
            generate(engine, prompt).tokens
            == generate(engine, [prompt]).tokens[0]
            == want.tokens[0]
        )
    assert "".join(stream(engine, [question])) == want.text[0]
    told = [{"role": "system", "content": "b"}, question, {"role": "assistant", "content": "c"}]
    found = generate(engine, [[*told, question], "x = 1"])
    rendered = engine.tokenizer.encode("system: buser: x = 1assistant: cuser: x = 1", bos=True)
    assert found.prompt_tokens == [len(rendered), want.prompt_tokens[0]]
    assert found.tokens[0] == generate(engine, [rendered]).tokens[0]
    plain = load(folder, chat=False, draft="none", device="cpu", max_new_tokens=6)
    assert plain.template is None
    wrong = [
        (engine, told, "end with one of the user"),
        (engine, [{"role": "user"}], 'a message is {"role"'),
        (engine, [{"role": "user", "content": "bad"}], "such words"),
        (plain, [question], "need a chat template"),
    ]
    for asked, prompts, fault in wrong:
        with pytest.raises(ValueError, match=fault):
            generate(asked, prompts)


# ----------------------------------------------------------------------------------- what is told, devices


def test_a_broken_tokenizer_does_not_matter_to_ids(capsys, tmp_path):
    shutil.copytree(TARGET, tmp_path / "target")
    (tmp_path / "target" / "tokenizer.model").write_bytes(b"junk")
    line = f"--checkpoint {tmp_path}/target --max_new_tokens 5 --device cpu --json -"
    out, err = run(capsys, f"{line} --prompt_ids 5,17,3")
    assert "note: no text will be shown" in err and json.loads(out)["text"] == [""]
    assert "is not a sentencepiece model" in failure(capsys, f"{line} --prompt a")


def test_a_later_turn_that_does_not_fit_ends_its_conversation(capsys, tmp_path):
    file = tmp_path / "p.jsonl"
    rows = [{"turns": ["import os", " x" * 100, "y"]}, {"turns": ["def f():", "return", "a"]}]
    file.write_text("\n".join(map(json.dumps, rows)))
    line = f"{EIGHT_AS_JSON} --prompt_file {file} --ignore_eos --context 60"
    out, err = run(capsys, f"{line} --batch_size 2")
    assert json.loads(out)["index"] == [[0, 0, 0], [1, 0, 0], [1, 0, 1], [1, 0, 2]]
    assert err.count("turn 2 of prompt 1 no longer fits the context of 60") == 1, err
    file.write_text("\n".join(map(json.dumps, [rows[1], {"turns": [" x" * 100]}])))
    assert "the context holds 60" in failure(capsys, line), "before anything is decoded"


def test_a_cuda_device_is_chosen_by_its_number(monkeypatch, tmp_path):
    """torch.cuda.set_device refuses a name without one."""
    chosen = []
    index_of = torch.cuda._utils._get_device_index
    for name, fake in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_capability": lambda index: (9, 0),
        "set_device": lambda device: chosen.append(index_of(device)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for device in ("", "cuda", "cuda:1"):
        with pytest.raises(ValueError, match="has no config.json"):
            load(checkpoint=str(tmp_path), device=device)
    assert chosen == [0, 0, 1]


def test_no_clock_decides_under_the_residual_rule():
    """Its tokens follow the tree, so that the same command must verify the same trees."""
    options = {"checkpoint": TARGET, "device": "cpu", "draft": "ngram", "compile": True}
    assert load(**options).policy.costs is not None
    assert load(**options, accept="residual", temperature=1.0).policy.costs is None


def test_a_tree_file_is_used(capsys, tmp_path):
    """With sampled children their ranks have no gaps."""
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0]]")
    tree = f"--tree {tmp_path}/tree.json --trace {tmp_path}/t"
    run(capsys, f"{OF_IDS} --eagle {HEAD} {tree}")
    assert json.loads((tmp_path / "t").read_text().splitlines()[0])["parents"] == [0, 0, 1]
    residual = f"{ON_DEMO} --accept residual --temperature 1 --max_new_tokens 4 {tree}"
    assert run(capsys, residual)[0]
    (tmp_path / "tree.json").write_text("[[0], [1], [1, 1]]")
    assert "ranks without gaps; before (1, 1) another" in failure(capsys, residual)


def test_profile_version_and_an_empty_input(capsys, monkeypatch, tmp_path):
    run(capsys, f"{OF_IDS} --profile {tmp_path / 'profile.json'}")
    assert json.loads((tmp_path / "profile.json").read_text())["traceEvents"]
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert capsys.readouterr().out == f"gpt-eagle {VERSION}\n" and stop.value.code == 0
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    assert "standard input is empty" in failure(capsys, f"{ON_DEMO} -p -")


# ----------------------------------------------------------------------------------------- a chat


def test_interactive_keeps_history_and_drops_the_oldest_turns(capsys, monkeypatch):
    lines = "\n".join(["def a():", "", "x = 1\n" * 8, "y = 2\n" * 3, "z = 3 " * 200, "pass"])
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    out, err = run(capsys, f"{ON_DEMO} --interactive --context 120 --max_new_tokens 20")
    assert "oldest turn(s) dropped" in err
    assert "the context holds 120" in err, "a turn that never fits is refused, and the chat goes on"
    assert err.count("tokens/s") >= 5
    assert "[" not in out.splitlines()[0] and "tokens/s" not in out and "> " not in out


def test_set_changes_a_chat_that_goes_on(capsys, monkeypatch, tmp_path):
    """The text is that of a call with these options."""
    file = tmp_path / "c.json"
    lines = [
        "/set temperature 0.8", "/set seed=7", "def a():", "/set top_k = 1", "/set top_p 3", "/set top_l 1", "/sett seed 1",
        "/set repeat_penalty 1.5", "/set repetition_penalty default",
        "/set num_samples 3", "/set stop def", "/set stop default", "/set temperature default", "/set seed default",
        "/set top_k", "/set min_p x", "/set",
        "x = 1", "/help me", f"/save {file}",
    ]  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    _, err = run(capsys, f"{ON_DEMO} --interactive --max_new_tokens 12")
    said = [line for line in err.splitlines() if line.startswith("[") and "tokens" not in line]
    assert re.search(r"\[max_new_tokens 12, .*; unchanged: .*dry_base", err, re.DOTALL)
    assert re.fullmatch(r"\[seed is \d+\]", said.pop(14))
    assert said[2:] == [
        "[temperature is 0.8]", "[seed is 7]", "[top_k is 1]", "[--top_p must be in (0, 1]; it is 3.0]",
        "[there is no option top_l in a chat; did you mean top_p?; /set lists them]",
        "[there is no /sett; did you mean set?]",
        "[repetition_penalty is 1.5]", "[repetition_penalty is 1.0]",
        "[there is no option num_samples in a chat; /set lists them]", "[stop is 'def']", "[stop is none]",
        "[temperature is 0.0]", "[top_k is 1]",
        "[--min_p must be a number; it is 'x']", f"[3 turn(s) in {file}]",
    ]  # fmt: skip
    turns = json.loads(file.read_text())["messages"][::2]
    answers = [message["content"] for message in json.loads(file.read_text())["messages"][1::2]]
    assert [turn["content"] for turn in turns] == ["def a():", "x = 1", "/help me"]
    engine = load(checkpoint=DEMO, device="cpu", max_new_tokens=12)
    sampled = generate(engine, ["def a():"], temperature=0.8, seed=7)
    assert answers[0] == sampled.text[0] != generate(engine, ["def a():"]).text[0]
    history = encode(engine, ["def a():", "x = 1"], answers[:1])
    assert answers[1] == generate(engine, [history]).text[0]


def test_ctrl_c_at_the_prompt_asks_once(capsys, monkeypatch):
    """A second one in a row ends the conversation, as the end of input does."""
    stop = KeyboardInterrupt
    keys = iter([stop, "def a():", stop, "x = 1", stop, stop])

    def typed(_: str) -> str:
        key = next(keys)
        if key is stop:
            raise key
        return key

    monkeypatch.setattr("builtins.input", typed)
    _, err = run(capsys, f"{ON_DEMO} --interactive --max_new_tokens 2")
    assert err.count("Ctrl-C again, or Ctrl-D, ends") == 3 and err.count("tokens/s") == 2
    assert next(keys, None) is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "line", ["--help", f"{OF_IDS} --json -", *slow([f"{ON_DEMO} --max_new_tokens 3"])], ids=len
)
def test_a_full_standard_output_is_one_line(line):
    """Where all of it is in the buffer until the end; at the first text, too."""
    with open("/dev/full", "w") as full:
        done = program(line, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("generate.py: cannot write standard output: ")
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_text_is_utf8_in_every_locale():
    """Of standard input and the output, and of the command line in a message."""
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    text = "# \u00e9 \u20ac \u4e2d"
    line = f"{ON_DEMO} --max_new_tokens 2"
    options = {"env": env, "capture_output": True}
    done = program(f"{line} --interactive", input=f"{text}\n".encode(), **options)
    assert done.returncode == 0 and b"tokens/s" in done.stderr, done.stderr
    options["env"] = env | {"PYTHONIOENCODING": "utf-8:strict"}
    done = program(f"{line} --interactive", input=b"x = 1\n\xff\xfe\ny = 2\n", **options)
    assert done.returncode == 0 and done.stderr.count(b"tokens/s") == 2, done.stderr
    assert b"[the text has half a character" in done.stderr
    done = program(f"{line} --draft '{text}'", env=env, capture_output=True)
    assert done.returncode == 2 and text in done.stderr.decode("utf-8")


def test_chat_with_the_checkpoints_own_template(capsys, monkeypatch, tmp_path):
    line = f"--checkpoint {with_template(tmp_path)} --draft none --max_new_tokens 8 --device cpu"
    chat = as_json(capsys, f"{line} --chat --system b --prompt c --json -")
    plain = as_json(capsys, f"{line} --chat none --prompt 'system: buser: c' --json -")
    default = as_json(capsys, f"{line} --system b --prompt c --json -")
    assert chat["tokens"] == plain["tokens"] == default["tokens"], "the default is a chat"
    ids = as_json(capsys, f"{line} --prompt_ids 1,5 --json -")
    assert ids["config"]["chat"] is None, "ids are no chat"
    for more, message in {
        "none --system b": "drop --chat none",
        "--system bad --prompt c": "takes no system message (raises: such words); drop --system",
        "--prompt bad": "raises: such words; use --chat NAME",
    }.items():
        assert message in failure(capsys, f"{line} --chat {more}")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\nbad\ntwo"))
    _, err = run(capsys, f"{line} --chat --interactive")
    assert err.count("tokens/s") == 2, "a turn is refused, the chat goes on"
    assert err.count("raises: such words") == 1


# --------------------------------------------------------------------------------- what is resolved


def test_the_demo_has_a_prompt_however_it_is_named(monkeypatch, tmp_path):
    (tmp_path / "link").symlink_to(DEMO)
    monkeypatch.chdir(tmp_path)
    for name in (DEMO, f"{DEMO}/", "link"):
        assert read_prompts(GenerateConfig(checkpoint=name)) == [[PROMPT]]
    with pytest.raises(ValueError, match="no prompt"):
        read_prompts(GenerateConfig(checkpoint="checkpoints/demo"))


@pytest.mark.parametrize("device, quant, dtype, tiles, nodes, children", [
    ("cuda", "int4", "bfloat16", "none", 32, 10),  # by an estimate
    ("cuda", "none", "bfloat16", "none", 60, 10), ("cuda", "int8", "bfloat16", "none", 60, 10),
    *(("cpu", quant, "bfloat16", "none", 16, 4) for quant in ("int4", "none", "int8")),
    ("cpu", "none", "bfloat16", "hardware", 32, 8),  # AMX
    ("cpu", "none", "float32", "hardware", 16, 4), ("cpu", "int8", "bfloat16", "hardware", 16, 4),
])  # fmt: skip
def test_trees_by_device(monkeypatch, device, quant, dtype, tiles, nodes, children):
    monkeypatch.setattr("backends.library.tiles_in_use", lambda: tiles)
    config = GenerateConfig(checkpoint=DEMO, device=device, quant=quant, dtype=dtype)
    for draft in ("", "eagle+ngram"):
        tree = replace(config, draft=draft).draft_tree
        assert (tree.size, tree.width) == (nodes, children)
    assert replace(config, tree_size=50, tree_topk=9).draft_tree.size == 50


OF_MODEL = {"draft": "model", "draft_checkpoint": DEMO}


@pytest.mark.parametrize("draft, device, target, asked, form, wide", [
    ({}, "cuda", "int4", "", "int4", "int4"), ({}, "cpu", "int4", "", "int4", "int4"),
    ({}, "cuda", "int8", "", "int8", "int8"), ({}, "cpu", "int8", "", "int8", "int8"),
    ({}, "cuda", "none", "", "int4", "none"), ({}, "cpu", "none", "", "int8", "none"),
    ({}, "cuda", "none", "none", "none", "none"), (OF_MODEL, "cuda", "none", "", "none", "none"),
    (OF_MODEL, "cpu", "none", "", "int8", "none"), (OF_MODEL, "cpu", "blocks", "", "int8", "none"),
    (OF_MODEL, "cpu", "int4", "", "int4", "int4"), (OF_MODEL, "cpu", "none", "none", "none", "none"),
])  # fmt: skip
def test_the_format_of_a_draft(monkeypatch, draft, device, target, asked, form, wide):
    """A head or a draft model beside a target in 16 bits, and one in 32, where C++ multiplies."""
    monkeypatch.setattr("run.resolved.has_cpu_operators", lambda: True)
    options = {"checkpoint": DEMO, "device": device, "quant": target, "quant_draft": asked}
    for dtype, want in (("bfloat16", form), ("float32", wide)):
        config = GenerateConfig(**options, **draft, dtype=dtype)
        assert resolve_draft(config, Path(DEMO)).quant_draft == want
    monkeypatch.setattr("run.resolved.has_cpu_operators", lambda: False)
    if device == "cpu" and target == "none":
        slow_here = GenerateConfig(**options, **draft, dtype="bfloat16")
        assert resolve_draft(slow_here, Path(DEMO)).quant_draft == "none"
