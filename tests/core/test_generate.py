"""The command line and the Python interface: inputs, outputs, and every user's mistake."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import hf.config
import runtime
from cli import parsing
from cli.parsing import parse
from cli.prompts import read_prompts
from extras.autosize import Autosizer
from generate import generate, load, main, stream
from helpers import GOLDEN, slow
from hf.config import resolve_draft
from ops.library import has_cpu_operators
from options import DEMO, ROOT, GenerateConfig
from stats import explain, share_of_equal

TARGET, HEAD = str(GOLDEN / "models/target_llama_mha"), str(GOLDEN / "models/head_eagle12_mha")
IDS = [
    "--checkpoint",
    TARGET,
    "--prompt_ids",
    "5,17,3,40",
    "--max_new_tokens",
    "20",
    "--ignore_eos",
    "--device",
    "cpu",
]
PROMPT = "def read_lines(path):"
ON_DEMO = ["--checkpoint", DEMO, "--device", "cpu"]
EIGHT_AS_JSON = [*ON_DEMO, "--max_new_tokens", "8", "--json", "-"]  # tokens


def run(capsys, *argv: str) -> tuple[str, str]:
    main(list(argv))
    return capsys.readouterr()


def failure(capsys, *argv: str) -> str:
    """Run the command line; it must end with status 2 and one line on standard error."""
    with pytest.raises(SystemExit) as stop:
        main(list(argv))
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert err.count("\n") == 1 and err.startswith("generate.py: "), err
    assert "Traceback" not in err and out == ""
    return err


# ----------------------------------------------------------------------------------- what comes out


def test_json_contract(capsys, tmp_path):
    file = tmp_path / "out.json"
    out, err = run(
        capsys,
        *IDS,
        "--eagle",
        HEAD,
        "--num_samples",
        "3",
        "--batch_size",
        "2",
        "--json",
        str(file),
    )
    got = json.loads(file.read_text())
    assert got["index"] == [[0, 0, 0], [0, 1, 0], [0, 2, 0]]
    assert (
        got["config"]["tree"] == "auto"
        and got["config"]["context"] == 512
        and got["config"]["sharpness"] == 1
    )
    assert set(got) == {
        "index",
        "tokens",
        "text",
        "finish_reason",
        "prompt_tokens",
        "stats",
        "config",
        "environment",
    }
    assert [len(t) for t in got["tokens"]] == [20] * 3
    assert got["finish_reason"] == ["length"] * 3 and got["prompt_tokens"] == [4] * 3
    stats = got["stats"]
    assert {
        "tau", "accept_lengths", "cycles", "tokens_per_s", "decode_s", "prefill_s", "compile_s", "load_s", "draft_s",
        "verify_s", "peak_memory_bytes",
    } <= set(stats)  # fmt: skip
    assert stats["cycles"] == len(stats["accept_lengths"])
    assert stats["tau"] == pytest.approx(sum(stats["accept_lengths"]) / stats["cycles"] + 1)
    assert stats["tokens_per_s"] == pytest.approx(3 * 19 / stats["decode_s"])
    assert stats["draft_s"] + stats["verify_s"] <= stats["decode_s"]
    assert got["config"]["head"] == HEAD and got["config"]["dtype"] == "float32"
    assert f"; {stats['tau']:.1f} tokens a pass" in out
    assert "[3 of 3 answers cut at 20 tokens: --max_new_tokens]" in out
    assert not list(tmp_path.glob("*.tmp"))


def test_json_to_standard_output_is_alone_there(capsys):
    out, err = run(capsys, *IDS, "--json", "-")
    assert json.loads(out)["stats"]["tau"] == 1.0
    assert "tokens/s" in err


def test_trace_contract(capsys, tmp_path):
    file = tmp_path / "trace.jsonl"
    out, _ = run(
        capsys,
        *IDS,
        "--eagle",
        HEAD,
        "--tree",
        "static",
        "--trace",
        str(file),
        "--json",
        str(tmp_path / "j"),
    )
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    tokens = json.loads((tmp_path / "j").read_text())["tokens"][0]
    assert [r["pos"] for r in rows][0] == 4
    decided = [rows[0]["root"]]
    for row in rows:
        assert set(row) == {
            "row", "pos", "root", "draft_tokens", "parents", "depths", "accept_length", "path", "emitted", "values"
        }  # fmt: skip
        assert len(row["draft_tokens"]) == len(row["parents"]) == len(row["depths"]) == 25
        assert len(row["emitted"]) == row["accept_length"] + 1 == len(row["path"]) + 1
        assert [row["draft_tokens"][n - 1] for n in row["path"]] == row["emitted"][:-1]
        assert row["root"] == decided[-1]
        decided += row["emitted"]
    assert decided[:20] == tokens


def test_compare_prints_a_speedup_and_identity(capsys):
    out, _ = run(capsys, *IDS, "--eagle", HEAD, "--compare")
    assert "x of vanilla" in out and "100 % of sequences identical" in out


def test_compare_explains_the_speedup(capsys):
    """The last line: tau over the cost of a cycle is the speedup of the line before."""
    out, _ = run(capsys, *IDS, "--eagle", HEAD, "--compare", "--max_new_tokens", "40")
    line, last = out.splitlines()[-2:]
    assert last.split(" = ")[0] == line.split("; ")[-1].partition("x of vanilla")[0]
    assert "of a vanilla pass); bound by" in last


@pytest.mark.parametrize(
    "draft_s, verify_s, host_s, expected",
    [
        (1.0, 11.2, 0.0, "1.39 = tau 1.690 / (verify 1.120 + draft 0.100 of a vanilla pass); "
                         "bound by acceptance"),
        (2.0, 16.0, 0.5, "0.91 = tau 1.690 / (verify 1.600 + draft 0.200 + host 0.050 of a vanilla "
                         "pass); bound by arithmetic"),
        (4.0, 10.0, 0.0, "1.21 = tau 1.690 / (verify 1.000 + draft 0.400 of a vanilla pass); "
                         "bound by memory"),
        (1.0, 10.0, 5.0, "1.06 = tau 1.690 / (verify 1.000 + draft 0.100 + host 0.500 of a vanilla "
                         "pass); bound by the host"),
    ],
)  # fmt: skip
def test_a_speedup_is_explained(draft_s, verify_s, host_s, expected):
    """100 cycles that emit 169 tokens, against passes of 0.1 s, one or two tokens each."""
    decode_s = draft_s + verify_s + host_s
    drafted = {"tokens_per_s": 169 / decode_s, "cycles": 100, "decode_s": decode_s}
    drafted |= {"draft_s": draft_s, "verify_s": verify_s}
    assert explain(drafted, 0.1).startswith(expected)
    half = explain(drafted, 0.1, vanilla_tokens=2.0)
    assert "tau 0.845 / " in half


def test_the_printed_parts_of_a_speedup_make_it_up():
    """To the last digit that is printed, for any run."""
    draw = random.Random(0)
    for _ in range(200):
        parts = [draw.uniform(0.0, 5.0), draw.uniform(9.0, 40.0), draw.uniform(0.0, 2.0)]
        drafted = {"draft_s": parts[0], "verify_s": parts[1], "decode_s": sum(parts)}
        tokens = draw.randint(100, 500)
        line = explain(drafted | {"cycles": 100, "tokens_per_s": tokens / sum(parts)}, 0.1)
        speedup, tau, *costs = map(float, re.findall(r"\d+\.\d+", line))
        assert tau / sum(costs) == pytest.approx(speedup, abs=0.0085), line
        assert speedup == pytest.approx(tokens / 10 / sum(parts), abs=0.005)


def test_a_turn_that_one_run_lacks_is_not_identical():
    """Where tokens differ, a later turn may fit the context in one run only."""
    first, second, other = (0, 0, 0), (0, 0, 1), (1, 0, 0)
    both = SimpleNamespace(index=[first, second, other], tokens=[[1, 2], [3], [4]])
    fewer = SimpleNamespace(index=[first, other], tokens=[[1, 2], [4]])
    assert share_of_equal(both, both) == 1.0
    assert share_of_equal(both, fewer) == share_of_equal(fewer, both) == 2 / 3


def test_profile_writes_a_trace(capsys, tmp_path):
    file = tmp_path / "profile.json"
    run(capsys, *IDS, "--profile", str(file))
    assert json.loads(file.read_text())["traceEvents"]


def test_finish_reasons(capsys):
    out, _ = run(capsys, *IDS, "--context", "10", "--json", "-")
    assert (
        json.loads(out)["finish_reason"] == ["context"] and len(json.loads(out)["tokens"][0]) == 6
    )


def test_demo_streams_text_and_ends_with_statistics(capsys):
    out, _ = run(capsys, *ON_DEMO, "--max_new_tokens", "12")
    *_, last = out.strip().splitlines()
    assert "tokens/s" in last and "tokens a pass" in last
    result = generate(load(checkpoint=DEMO, max_new_tokens=12, device="cpu"), [PROMPT])
    assert out.startswith(result.text[0])


@pytest.mark.parametrize(
    "argv",
    [
        ("--draft", "ngram"),
        ("--draft", "model", "--draft_checkpoint", TARGET),
        (
            "--draft",
            "model",
            "--draft_checkpoint",
            TARGET,
            "--tree",
            "dynamic",
            "--tree_size",
            "8",
            "--tree_topk",
            "4",
        ),
        ("--draft", "eagle+ngram", "--eagle", HEAD),
    ],
)
def test_other_drafters(capsys, tmp_path, argv):
    """The same tokens as without a draft, and a record of what the options came to."""
    file = str(tmp_path / "out.json")
    run(capsys, *IDS, *argv, "--temperature", "1", "--json", file)
    drafted = json.loads(Path(file).read_text())
    run(capsys, *IDS, "--draft", "none", "--temperature", "1", "--json", file)
    assert drafted["tokens"] == json.loads(Path(file).read_text())["tokens"]
    config = drafted["config"]
    assert config["draft"] == argv[1]
    assert config.get("ngram_branches") == {"ngram": 4, "eagle+ngram": 1}.get(argv[1])
    if argv[1] == "model":
        assert (
            config["tree"] == ("dynamic" if "--tree" in argv else "chain")
            and drafted["stats"]["tau"] > 4
        )


def test_python_interface():
    engine = load(checkpoint=DEMO, max_new_tokens=16, device="cpu")
    assert engine.option("draft") == "eagle", "the bundled head is the default"
    result = generate(engine, [PROMPT])
    assert "".join(stream(engine, PROMPT)) == result.text[0]
    assert len(generate(engine, [PROMPT], max_new_tokens=5).tokens[0]) <= 5
    with pytest.raises(ValueError, match="quant, tree cannot change after load"):
        generate(engine, [PROMPT], tree="chain", quant="int8")
    with pytest.raises(ValueError, match="--max_new_tokens must be at least 1"):
        generate(engine, [PROMPT], max_new_tokens=0)
    with pytest.raises(ValueError, match="one text or one list of token ids"):
        list(stream(engine, ["a", "b"]))


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7, "seed": 3}, {"temperature": 1, "top_k": 5, "top_p": 0.8}],
    ids=str,
)
def test_a_stream_has_its_own_parameters(options):
    engine = load(checkpoint=DEMO, max_new_tokens=30, device="cpu")
    want = generate(engine, [PROMPT], **options, max_new_tokens=12).text[0]
    assert "".join(stream(engine, PROMPT, **options, max_new_tokens=12)) == want
    assert "".join(stream(engine, PROMPT)) == generate(engine, [PROMPT]).text[0]


def test_options_that_a_stream_cannot_have():
    engine = load(checkpoint=DEMO, device="cpu")
    for options, message in (
        ({"num_samples": 2}, r"use generate\(\) for num_samples"),
        ({"quant": "int8"}, "quant cannot change after load"),
        ({"temperature": -1}, "--temperature must be"),
    ):
        with pytest.raises(ValueError, match=message):
            list(stream(engine, PROMPT, **options))


def test_python_interface_without_a_tokenizer():
    engine = load(checkpoint=TARGET, max_new_tokens=5, device="cpu")
    assert len(generate(engine, [[5, 17, 3]]).tokens[0]) == 5
    with pytest.raises(ValueError, match="has neither tokenizer.model nor tokenizer.json"):
        generate(engine, ["text"])
    with pytest.raises(ValueError, match="has neither tokenizer.model nor tokenizer.json"):
        list(stream(engine, [5, 17, 3]))


def test_a_broken_tokenizer_does_not_matter_to_ids(capsys, tmp_path):
    shutil.copytree(TARGET, tmp_path / "target")
    (tmp_path / "target" / "tokenizer.model").write_bytes(b"junk")
    base = [
        "--checkpoint",
        str(tmp_path / "target"),
        "--max_new_tokens",
        "5",
        "--device",
        "cpu",
        "--json",
        "-",
    ]
    out, err = run(capsys, *base, "--prompt_ids", "5,17,3")
    assert "note: no text will be shown" in err and json.loads(out)["text"] == [""]
    assert "is not a sentencepiece model" in failure(capsys, *base, "--prompt", "a")


def test_a_later_turn_that_does_not_fit_ends_its_conversation(capsys, tmp_path):
    file = tmp_path / "p.jsonl"
    rows = [{"turns": ["import os", " x" * 100, "y"]}, {"turns": ["def f():", "return", "a"]}]
    file.write_text("\n".join(map(json.dumps, rows)))
    base = [*EIGHT_AS_JSON, "--prompt_file", str(file), "--ignore_eos"]
    out, err = run(capsys, *base, "--context", "60", "--batch_size", "2")
    assert json.loads(out)["index"] == [[0, 0, 0], [1, 0, 0], [1, 0, 1], [1, 0, 2]]
    assert err.count("turn 2 of prompt 1 no longer fits the context of 60") == 1, err
    file.write_text("\n".join(map(json.dumps, [rows[1], {"turns": [" x" * 100]}])))
    assert "the context holds 60" in failure(capsys, *base, "--context", "60"), (
        "before anything is decoded"
    )


def test_a_cuda_device_is_chosen_by_its_number(monkeypatch, tmp_path):
    """torch.cuda.set_device refuses a name without one."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    whole = SimpleNamespace(name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: whole)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda d: chosen.append(torch.cuda._utils._get_device_index(d))
    )
    for device in ("", "cuda", "cuda:1"):
        with pytest.raises(ValueError, match="has no config.json"):
            load(checkpoint=str(tmp_path), device=device)
    assert chosen == [0, 0, 1]


def test_residual_children_are_draws_without_gaps(capsys, tmp_path):
    file = tmp_path / "tree.json"
    file.write_text("[[0], [1], [1, 1]]")
    argv = (*ON_DEMO, "--accept", "residual", "--temperature", "1", "--tree_file", str(file))
    assert "ranks without gaps; before (1, 1) another" in failure(capsys, *argv)
    file.write_text("[[0], [1], [1, 0]]")
    assert run(capsys, *argv, "--max_new_tokens", "4")[0]


def test_prompt_file_with_turns(capsys, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"turns": ["Question: What is 2+3?\\nAnswer:", "\\nQuestion: And 4+4?\\nAnswer:"]}\n{"turns": ["import "]}\n'
    )
    base = [*EIGHT_AS_JSON, "--prompt_file", str(file), "--dtype", "float32"]
    alone, _ = run(capsys, *base)
    together, _ = run(capsys, *base, "--batch_size", "2")
    alone, together = json.loads(alone), json.loads(together)
    assert len(alone["tokens"]) == 3 and alone["prompt_tokens"][1] > alone["prompt_tokens"][0]
    assert alone["tokens"] == together["tokens"]


def test_text_prompt_file(capsys, tmp_path):
    (tmp_path / "p.txt").write_text(PROMPT)
    a, _ = run(capsys, *EIGHT_AS_JSON, "--prompt_file", str(tmp_path / "p.txt"))
    b, _ = run(capsys, *EIGHT_AS_JSON, "--prompt", PROMPT)
    assert json.loads(a)["tokens"] == json.loads(b)["tokens"]
    for name in ("p.JSONL", "p.json"):  # by its suffix, or by its first key
        (tmp_path / name).write_text(json.dumps({"turns": [PROMPT]}))
        c, _ = run(capsys, *EIGHT_AS_JSON, "--prompt_file", str(tmp_path / name))
        assert json.loads(c)["tokens"] == json.loads(b)["tokens"]


def test_attention_of_pytorch_is_told(capsys):
    """And with our own nothing is."""
    load(checkpoint=TARGET, eagle="", device="cpu", dtype="float16")
    said = "note: attention in float16 is PyTorch's: slower, and a draft may change a token where the best two are nearly equal"
    assert f"{said}; use --dtype bfloat16" in capsys.readouterr().err
    load(checkpoint=TARGET, eagle="", device="cpu", dtype="bfloat16")
    assert "attention" not in capsys.readouterr().err


def test_what_a_model_without_a_head_may_be_given(tmp_path):
    """The lookup drafts by itself, and keeps its texts where they are named."""
    store = str(tmp_path / "store")
    engine = load(checkpoint=TARGET, device="cpu", draft_store=store)
    assert engine.option("draft") == "ngram" and engine.policy.kept is not None


def test_no_clock_decides_under_the_residual_rule():
    """Its tokens follow the tree, so that the same command must verify the same trees."""
    options = {"checkpoint": TARGET, "device": "cpu", "draft": "ngram", "compile": True}
    assert isinstance(load(**options).policy.sizer, Autosizer)
    residual = load(**options, accept="residual", temperature=1.0)
    assert residual.policy.sizer is None


def test_interactive_keeps_history_and_drops_the_oldest_turns(capsys, monkeypatch):
    lines = "\n".join(["def a():", "", "x = 1\n" * 8, "y = 2\n" * 3, "z = 3 " * 200, "pass"])
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    main([*ON_DEMO, "--interactive", "--context", "120", "--max_new_tokens", "20"])
    out, _ = capsys.readouterr()
    assert "oldest turn(s) dropped" in out
    assert "the context holds 120" in out, "a turn that never fits is refused, and the chat goes on"
    assert out.count("tokens/s") >= 5


def test_ctrl_c_at_the_prompt_asks_once(capsys, monkeypatch):
    """A second one in a row ends the conversation, as the end of input does."""
    keys = iter(
        [KeyboardInterrupt, "def a():", KeyboardInterrupt, "x = 1", *[KeyboardInterrupt] * 2]
    )

    def typed(_: str) -> str:
        key = next(keys)
        if key is KeyboardInterrupt:
            raise key
        return key

    monkeypatch.setattr("builtins.input", typed)
    main([*ON_DEMO, "--interactive", "--max_new_tokens", "2"])
    out, _ = capsys.readouterr()
    assert out.count("Ctrl-C again, or Ctrl-D, ends") == 3 and out.count("tokens/s") == 2
    assert next(keys, None) is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "argv",
    [["--help"], [*IDS, "--json", "-"], *slow([[*ON_DEMO, "--max_new_tokens", "3"]])],
    ids=len,
)
def test_a_full_standard_output_is_one_line(argv):
    """Where all of it is in the buffer until the end; at the first text, too."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, str(ROOT / "generate.py"), *argv]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("generate.py: cannot write standard output: ")
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_arguments_are_read_where_a_stream_is_memory(monkeypatch):
    """As standard output is on all ranks but the first."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "argv", ["generate.py", "--prompt", "ä"])
    assert parse(GenerateConfig, "generate.py", "").prompt == "ä"


def test_a_head_of_one_level_has_a_default_tree():
    config = GenerateConfig(draft="medusa", tree_depth=1, device="cpu")
    assert (config.draft_tree.depth, config.draft_tree.size) == (1, 5)


def test_text_is_utf8_in_every_locale():
    """Of standard input and the output, and of the command line in a message."""
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    text = "# \u00e9 \u20ac \u4e2d"
    command = [sys.executable, str(ROOT / "generate.py"), *ON_DEMO, "--max_new_tokens", "2"]
    done = subprocess.run(
        [*command, "--interactive"], input=f"{text}\n".encode(), env=env, capture_output=True
    )
    assert done.returncode == 0 and b"tokens/s" in done.stdout, done.stderr
    done = subprocess.run(
        [*command, "--interactive"],
        input=b"x = 1\n\xff\xfe\ny = 2\n",
        env=env | {"PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
    )
    assert done.returncode == 0 and done.stdout.count(b"tokens/s") == 2, done.stderr
    assert b"> [the text has half a character" in done.stdout
    done = subprocess.run([*command, "--draft", text], env=env, capture_output=True)
    assert done.returncode == 2 and text in done.stderr.decode("utf-8")


CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('such words') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}{% endfor %}"
)


def test_chat_with_the_checkpoints_own_template(capsys, monkeypatch, tmp_path):
    for file in Path(DEMO).iterdir():
        (tmp_path / file.name).symlink_to(file)
    base = [
        "--checkpoint",
        str(tmp_path),
        "--draft",
        "none",
        "--max_new_tokens",
        "8",
        "--device",
        "cpu",
        "--chat",
    ]
    (tmp_path / "chat_template.jinja").write_text(CHAT)
    chat, _ = run(capsys, *base, "--system", "b", "--prompt", "c", "--json", "-")
    plain, _ = run(capsys, *base, "none", "--prompt", "system: buser: c", "--json", "-")
    assert json.loads(chat)["tokens"] == json.loads(plain)["tokens"]
    default, _ = run(capsys, *base[:-1], "--system", "b", "--prompt", "c", "--json", "-")
    assert json.loads(default)["tokens"] == json.loads(chat)["tokens"], "the default is a chat"
    ids, _ = run(capsys, *base[:-1], "--prompt_ids", "1,5", "--json", "-")
    assert json.loads(ids)["config"]["chat"] is None, "ids are no chat"
    assert "drop --chat none" in failure(capsys, *base, "none", "--system", "b")
    assert "takes no system message (raises: such words); drop --system" in failure(
        capsys, *base, "--system", "bad", "--prompt", "c"
    )
    assert "raises: such words; use --chat NAME" in failure(capsys, *base, "--prompt", "bad")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\nbad\ntwo"))
    out, _ = run(capsys, *base, "--interactive")
    assert out.count("tokens/s") == 2 and out.count("raises: such words") == 1, (
        "a turn is refused, the chat goes on"
    )


def test_every_field_has_a_flag_and_a_help_text(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    shown = " ".join(text.split())
    for f in fields(GenerateConfig):
        there = f"--{f.name} " in shown and " ".join(f.metadata["help"].split()) in shown
        assert there == f.metadata["flag"], f.name
    flags = [f.name for f in fields(GenerateConfig) if f.metadata["flag"]]
    grouped = [name for names in GenerateConfig.GROUPS.values() for name in names]
    assert len(flags) == 46 and sorted(grouped) == sorted(flags)
    assert text.index("\nrare:") > text.index("\nsampling:") > text.index("--checkpoint ")


def test_without_a_compiler_it_says_so_and_runs(capsys, monkeypatch):
    modules, _ = run(capsys, *IDS, "--json", "-")
    monkeypatch.setattr("ops.library._cpp_available", [False])
    out, err = run(capsys, *IDS, "--compile", "--json", "-")
    assert err.startswith(
        "note: --compile does not work here (it needs the CPU operators); running without it\n"
    )
    assert (
        json.loads(out)["tokens"] == json.loads(modules)["tokens"]
        and len(json.loads(out)["tokens"][0]) == 20
    )
    assert not json.loads(out)["config"]["compile"]


def test_without_a_compiler_for_cuda_it_says_so(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no C++ compiler found\nlong story")

    monkeypatch.setattr(torch, "compile", broken)
    assert runtime.why_not_compiled("cuda") == "no C++ compiler found"


def test_compiling_for_another_device_builds_no_cpu_operators(monkeypatch):
    """A machine with a GPU may have no C++ compiler, and need none."""
    monkeypatch.setattr("ops.library._cpp_available", [])
    monkeypatch.setattr(
        "ops.cpu.build.load_operators", lambda: pytest.fail("built the CPU operators")
    )
    assert callable(runtime.compiled(lambda x: x))


# ---------------------------------------------------------------------------------- users' mistakes


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--checkpoint", "no/such/dir", "--prompt", "a"], "no such directory: no/such/dir"),
        (["--checkpoint", "meta-llama/Llama-2-7b-hf", "--prompt", "a"], "python scripts/download.py meta-llama/Llama-2-7b-hf"),
        (["--checkpoint", TARGET, "--prompt", "a"], "--prompt_ids"),  # no tokenizer
        ([*IDS, "--prompt", "a"], "--prompt and --prompt_ids"),
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", "  "], "--prompt is empty"),
        (["--checkpoint", TARGET], "no prompt"),
        (["--prompt_file", "nowhere.txt"], "cannot read nowhere.txt"),
        ([*IDS[:2], "--prompt_ids", "5,97"], "0..96"),
        ([*IDS[:2], "--prompt_ids=-1"], "0..96"),
        ([*IDS[:2], "--prompt_ids", "5,x"], "numbers like 5,17,3"),
        ([*IDS, "--context", "4"], "prompt has 4 tokens, the context holds 4"),
        ([*IDS, "--context", "100000"], "beyond the model's 512"),
        ([*IDS, "--max_new_tokens", "0"], "--max_new_tokens must be at least 1"),
        ([*IDS, "--tree_depth", "0"], "--tree_depth must be at least 1; it is 0"),
        ([*IDS, "--tree_topk", "0"], "--tree_topk must be at least 1; it is 0"),
        ([*IDS, "--tree_size", "0"], "--tree_size must be at least 2; it is 0"),
        ([*IDS, "--batch_size", "-2"], "--batch_size must be at least 1; it is -2"),
        ([*IDS, "--num_samples", "0"], "--num_samples"),
        ([*IDS, "--temperature", "-1"], "--temperature"),
        ([*IDS, "--top_p", "0"], "--top_p"),
        ([*IDS, "--top_k", "-1"], "--top_k"),
        ([*IDS, "--seed", "-1"], "--seed"),
        ([*IDS, "--device", "tpu"], "--device must be cpu or cuda; it is tpu"),
        ([*IDS, "--dtype", "int3"], "--dtype"),
        ([*IDS, "--no_such_flag"], "--no_such_flag"),
        ([*IDS, "--max_new_tokens", "many"], "--max_new_tokens"),
        ([*IDS, "--draft", "oracle"], "--draft"),
        ([*IDS, "--draft", "eagle"], "name its directory with --head"),
        ([*IDS, "--draft", "none", "--eagle", HEAD], "--head needs a draft"),
        ([*IDS, "--eagle", "nowhere"], "no such directory: nowhere"),
        ([*IDS, "--eagle", HEAD, "--tree_depth", "1", "--tree_topk", "4", "--tree_size", "9"], "lower --tree_size"),
        ([*IDS, "--eagle", HEAD, "--tree_size", "65"], "--tree_size must be 2 to 64"),
        ([*IDS, "--eagle", HEAD, "--tree", "static", "--tree_topk", "3"], "--tree_topk belongs to --tree dynamic"),
        ([*IDS, "--eagle", HEAD, "--tree", "static", "--tree_depth", "3"], "--tree_depth"),
        ([*IDS, "--eagle", HEAD, "--tree_file", "nowhere.json"], "cannot read nowhere.json"),
        ([*IDS, "--draft", "model"], "--draft model needs --draft_checkpoint"),
        ([*IDS, "--draft_checkpoint", TARGET], "--draft_checkpoint belongs to --draft model"),
        ([*IDS, "--draft", "none", "--draft_checkpoint", TARGET], "--draft_checkpoint needs a draft"),
        ([*IDS, "--draft", "model", "--draft_checkpoint", "nowhere"], "no such directory: nowhere"),
        ([*IDS, "--draft", "model", "--draft_checkpoint", DEMO], "vocab_size is 97 in"),
        ([*IDS, "--draft", "model", "--draft_checkpoint", HEAD], "holds a head of the kind eagle, and no draft model; use --head"),
        ([*IDS, "--draft", "model", "--draft_checkpoint", TARGET, "--tree_size", "9"], "--tree_size belongs to --tree dynamic"),
        ([*IDS, "--draft", "model", "--draft_checkpoint", TARGET, "--eagle", HEAD], "--head does nothing with --draft model"),
        ([*IDS, "--draft", "ngram", "--eagle", HEAD], "--head does nothing with --draft ngram"),
        ([*IDS, "--draft", "ngram", "--tree", "chain"], "--tree does nothing with --draft ngram"),
        ([*IDS, "--draft", "ngram", "--tree_size", "9"], "--tree_size does nothing with --draft ngram"),
        ([*IDS, "--draft", "eagle+ngram"], "--draft eagle+ngram needs a head"),
        ([*IDS, "--draft", "eagle+ngram", "--eagle", HEAD, "--tree", "chain"], "grafts onto a re-ranked dynamic tree"),
        ([*IDS, "--draft", "eagle+ngram", "--eagle", HEAD, "--tree_size", "5"], "do not fit a tree"),
        (["--inflate", "tiny-0.5b"], "--inflate takes a Hugging Face directory, as --checkpoint checkpoints/demo; name one"),
        (["--interactive", "--batch_size", "2"], "--interactive"),
        (["--interactive", "--trace", "t"], "--interactive"),
        ([*IDS, "--tree", "static"], "--tree does nothing with --draft ngram, which picks its trees itself; drop it"),
        ([*IDS, "--draft", "none", "--tree_file", "x"], "--tree_file needs a draft"),
        ([*IDS, "--top_p", "0.9"], "--top_p has no effect at temperature 0"),
        ([*IDS, "--eagle", HEAD, "--tree", "chain", "--tree_depth", "64"], "--tree_depth must be below 64"),
        ([*IDS[:2], "--prompt_ids", ""], "numbers like 5,17,3"),
        ([*IDS[:2], "--prompt_ids=--5"], "numbers like 5,17,3"),
        ([*IDS, "--json", "."], "is a directory"),
        ([*IDS, "--json", "a.txt", "--trace", "./a.txt"], "--json and --trace both write a.txt; name another file for one"),
        ([*ON_DEMO, "--chat", "--prompt", "a"], "--chat NAME"),
        ([*ON_DEMO, "--chat", "alpaca", "--prompt", "a"], "alpaca"),
        ([*IDS, "--chat", "vicuna"], "--prompt_ids"),
        ([*ON_DEMO, "--prompt", "a", "--system", "b"], "demo has none; add --chat NAME with one of llama3"),
        ([*IDS, "--system", "b"], "--system belongs to a chat template; drop --chat none or --prompt_ids"),
        ([*ON_DEMO, "--prompt", "a", "--chat", "mistral", "--system", "b"], "mistral has no place for a system message; drop --system"),
        ([*IDS, "--json", "no/such/dir/out.json"], "cannot write no/such/dir/out.json; there is no directory"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(capsys, argv, message):
    assert message in failure(capsys, *argv)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"ablation": {"children": "sampled"}, "temperature": 1.0}, "lossy"),
        (
            {"ablation": {"children": "sampled"}, "accept": "residual", "temperature": 1.0},
            "lossy; use --tree static",
        ),
        (
            {"ablation": {"children": "noise"}, "accept": "residual", "temperature": 1.0},
            "does not read the target's noise",
        ),
        ({"ablation": {"children": "topk"}}, "--children has no effect at temperature 0"),
        (
            {"ablation": {"sharpness": 2}},
            "ablation must be a dict of children, expand_by, lookahead",
        ),
        ({"ablation": "topk"}, "ablation must be a dict of children, expand_by, lookahead"),
        ({"ablation": {"children": "best"}}, "--children must be one of topk, noise, sampled"),
        ({"ablation": {"no_rerank": 1}}, "--no_rerank must be True or False; it is 1"),
        (
            {"draft": "eagle+ngram", "ablation": {"no_rerank": True}},
            "grafts onto a re-ranked dynamic tree",
        ),
        ({"tree": "auto", "ablation": {"no_rerank": True}}, "--no_rerank needs a tree of one size"),
        (
            {"tree": "auto", "ablation": {"expand_by": "confidence"}},
            "--expand_by needs a tree of one size",
        ),
        ({"dtype": "int8"}, "--dtype must be one of float32, bfloat16, float16; it is 'int8'"),
        ({"quant": "int3"}, "--quant must be one of none, int8, int4; it is 'int3'"),
        ({"tree": "large"}, "--tree must be one of"),
        ({"eagle": 5}, "--head must be a text; it is 5"),
        ({"compile": "yes"}, "--compile must be True or False; it is 'yes'"),
        ({"tree_size": float("nan")}, "--tree_size must be a whole number; it is nan"),
        ({"top_p": float("nan")}, "--top_p must be a number; it is nan"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    """From Python; those of an ablation, too."""
    with pytest.raises(ValueError, match=re.escape(message)):
        load(**{"checkpoint": TARGET, "eagle": HEAD, "device": "cpu"} | settings)


@pytest.mark.parametrize("prompt", [None, 5, ["a", 5], [5, "a"], [None], [True, 5]], ids=repr)
def test_a_prompt_of_another_kind(prompt):
    engine = load(checkpoint=Path(TARGET), eagle="", device="cpu")
    with pytest.raises(ValueError, match="a prompt is a text, a list of texts or a list of token"):
        generate(engine, [prompt])


def test_a_grammar_from_a_pipe_is_one_line(capsys, tmp_path):
    """It is read more than once: a second time there is nothing left."""
    os.mkfifo(tmp_path / "pipe")
    said = failure(capsys, *ON_DEMO, "--prompt", "a", "--grammar", str(tmp_path / "pipe"))
    assert "--grammar is read more than once, and" in said and "name a file" in said


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_device(capsys):
    assert "no CUDA device" in failure(capsys, *IDS[:-2], "--device", "cuda")


@pytest.fixture
def copy(tmp_path):
    """A checkpoint and a head to damage."""
    for name, source in (("target", TARGET), ("head", HEAD)):
        shutil.copytree(source, tmp_path / name)
    return tmp_path


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def with_copy(copy: Path, *more: str) -> list[str]:
    return ["--checkpoint", str(copy / "target"), "--eagle", str(copy / "head"), *IDS[2:], *more]


def test_damaged_checkpoints(capsys, copy):
    weights, config = copy / "target" / "model.safetensors", copy / "target" / "config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "corrupt, truncated" in failure(capsys, *with_copy(copy))
    weights.write_bytes(whole)
    text = config.read_text()
    config.write_text(text[:-5])
    assert "is not valid JSON" in failure(capsys, *with_copy(copy))
    config.write_text(text)
    edit(config, architectures=["GPTNeoXForCausalLM"])
    assert "GPTNeoXForCausalLM is not supported" in failure(capsys, *with_copy(copy))


def test_a_head_trained_on_other_inputs(capsys, copy):
    edit(copy / "head" / "config.json", draft_inputs="token")
    assert "the head was trained on token" in failure(capsys, *with_copy(copy))


def test_heads_of_another_target(capsys, copy):
    config = copy / "head" / "config.json"
    text = config.read_text()
    for key, message in (("hidden_size", "hidden_size is 32"), ("vocab_size", "vocab_size is 32")):
        edit(config, **{key: 32})
        assert message in failure(capsys, *with_copy(copy))
        config.write_text(text)


def test_tensors_of_two_heads(capsys, copy):
    file = copy / "head" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "midlayer.hidden_norm.weight": torch.ones(64)}, file)
    assert "mixes versions" in failure(capsys, *with_copy(copy))


@pytest.mark.parametrize(
    "text, message",
    [
        ("[[0], [0, 0]", "not valid JSON"),
        ("[]", "list of rank paths"),
        ('{"a": 1}', "list of rank paths"),
        ("[[0], [-1]]", "list of rank paths"),
        ("[[0], [1, 0]]", "without its parent [1]"),
        ("[[0], [0]]", "twice"),
        (json.dumps([[i] for i in range(64)]), "at most 63"),
        ("[[97]]", "98 ranked children of 97 tokens"),
    ],
)
def test_malformed_tree_files(capsys, tmp_path, text, message):
    (tmp_path / "tree.json").write_text(text)
    assert message in failure(
        capsys, *IDS, "--eagle", HEAD, "--tree_file", str(tmp_path / "tree.json")
    )


def test_a_tree_file_is_used(capsys, tmp_path):
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0]]")
    trace = tmp_path / "t"
    run(
        capsys,
        *IDS,
        "--eagle",
        HEAD,
        "--tree_file",
        str(tmp_path / "tree.json"),
        "--trace",
        str(trace),
    )
    assert json.loads(trace.read_text().splitlines()[0])["parents"] == [0, 0, 1]


def test_the_demo_is_where_the_code_is():
    assert (Path(DEMO) / "config.json").is_file() and (
        Path(DEMO + "-eagle") / "config.json"
    ).is_file()


def test_the_two_models_of_this_project_have_a_prompt_however_they_are_named(monkeypatch):
    assert read_prompts(GenerateConfig()) == [["What is the capital of Italy?"]]
    monkeypatch.chdir(Path(DEMO).parents[1])
    for name in (DEMO, "checkpoints/demo", "checkpoints/demo/"):
        assert read_prompts(GenerateConfig(checkpoint=name)) == [[PROMPT]]
    monkeypatch.chdir(Path(DEMO).parent)
    with pytest.raises(ValueError, match="no prompt"):
        read_prompts(GenerateConfig(checkpoint="checkpoints/demo"))


def test_defaults_by_device(monkeypatch):
    """On CUDA, by an estimate: 32 nodes with int4, int4 heads. On a CPU 16 nodes, 32 in bf16 on AMX
    tiles, and int8 heads where C++ multiplies them."""
    monkeypatch.setattr("ops.library.tiles_in_use", lambda: "none")
    there = {True}
    monkeypatch.setattr(hf.config, "has_cpu_operators", lambda family: True in there)
    for device, quant, size, draft in (
        ("cuda", "int4", 32, "int4"), ("cuda", "none", 60, "int4"), ("cpu", "int4", 16, "int4"),
        ("cpu", "none", 16, "int8"), ("cuda", "int8", 60, "int8"), ("cpu", "int8", 16, "int8"),
    ):  # fmt: skip
        config = GenerateConfig(checkpoint=DEMO, device=device, quant=quant, dtype="bfloat16")
        assert (config.draft_tree.size, config.draft_tree.width) == (
            size,
            10 if device == "cuda" else 4,
        )
        assert resolve_draft(config, Path(DEMO)).quant_draft == draft
    assert replace(config, device="cuda", quant="int4", tree_size=50).draft_tree.size == 50
    lookups = GenerateConfig(
        checkpoint=DEMO, device="cpu", draft="eagle+ngram", dtype="bfloat16"
    ).draft_tree
    assert (lookups.size, lookups.width) == (16, 4)
    monkeypatch.setattr("ops.library.tiles_in_use", lambda: "hardware")
    for quant, dtype, size in (
        ("none", "bfloat16", (32, 8)), ("none", "float32", (16, 4)), ("int8", "bfloat16", (16, 4)),
    ):  # fmt: skip
        on_tiles = GenerateConfig(checkpoint=DEMO, device="cpu", quant=quant, dtype=dtype)
        assert (on_tiles.draft_tree.size, on_tiles.draft_tree.width) == size
    there.clear()
    slow = GenerateConfig(checkpoint=DEMO, device="cpu", dtype="bfloat16")
    assert resolve_draft(slow, Path(DEMO)).quant_draft == "none"
    for device in ("cuda", "cpu"):
        wide = GenerateConfig(checkpoint=DEMO, device=device, dtype="float32")
        assert resolve_draft(wide, Path(DEMO)).quant_draft == "none"
    asked = GenerateConfig(checkpoint=DEMO, device="cuda", dtype="bfloat16", quant_draft="none")
    assert resolve_draft(asked, Path(DEMO)).quant_draft == "none"


@pytest.mark.parametrize(
    "device, target, asked, form",
    [
        ("cpu", "none", "", "int8"),
        ("cpu", "blocks", "", "int8"),
        ("cpu", "int4", "", "int4"),
        ("cpu", "none", "none", "none"),
        ("cuda", "none", "", "none"),
    ],
)
def test_a_draft_model_beside_a_16_bit_target_is_rounded_on_a_cpu(
    device, target, asked, form, monkeypatch
):
    monkeypatch.setattr("hf.config.has_cpu_operators", lambda family: True)
    config = GenerateConfig(
        checkpoint=DEMO,
        draft="model",
        draft_checkpoint=DEMO,
        device=device,
        dtype="bfloat16",
        quant=target,
        quant_draft=asked,
    )
    assert resolve_draft(config, Path(DEMO)).quant_draft == form
    wide = replace(config, dtype="float32")
    assert resolve_draft(wide, Path(DEMO)).quant_draft == ("none" if form == "int8" else form)


def test_a_rounded_draft_model_is_told(capsys):
    """Once, where it is not the target's own format, with the way to keep its numbers."""
    options = {"checkpoint": DEMO, "draft": "model", "draft_checkpoint": DEMO, "device": "cpu"}
    by_default = int(has_cpu_operators())
    for further, notes in (({}, by_default), ({"quant_draft": "none"}, 0), ({"quant": "int8"}, 0)):
        load(**options, **further)
        told = f"note: the draft model {DEMO} is rounded to int8; --quant_draft none leaves it as it is"
        assert capsys.readouterr().err.count(told) == notes


def test_names_as_others_have_them(capsys, monkeypatch):
    """Letters as llama.cpp's, hyphens, standard input; a flag that is nearly there gets a hint."""
    usual, _ = run(capsys, *ON_DEMO, "--prompt", "x = 1", "--max_new_tokens", "3", "--json", "-")
    monkeypatch.setattr("sys.stdin", io.StringIO("x = 1\n"))
    short, _ = run(capsys, "-m", DEMO, "--device=cpu", "-p", "-", "-n", "3", "--json", "-")
    assert json.loads(short)["tokens"] == json.loads(usual)["tokens"]
    monkeypatch.setattr("sys.stdin", io.StringIO('{"turns": ["x = 1"]}\n'))
    file, _ = run(capsys, *ON_DEMO, "--prompt-file=-", "--max-new-tokens", "3", "--json", "-")
    assert json.loads(file)["tokens"] == json.loads(usual)["tokens"]
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    assert "standard input is empty" in failure(capsys, *ON_DEMO, "-p", "-")
    assert "did you mean --max_new_tokens?" in failure(capsys, *IDS, "--max_new_token", "3")
    assert "give one of them" in failure(capsys, *IDS, "-n", "3", "--max_new_tokens", "4")
    with pytest.raises(ValueError, match="no option max_tokens; did you mean max_new_tokens?"):
        load(DEMO, max_tokens=3)
    with pytest.raises(ValueError, match="has no chat template"):
        load(DEMO, chat=True)
    number = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert capsys.readouterr().out == f"gpt-eagle {number}\n" and stop.value.code == 0


@pytest.mark.parametrize("package", ["torch", "sentencepiece"])
def test_a_missing_package_is_one_line(tmp_path, package):
    hide = f"import sys; sys.modules[{package!r}] = None"
    (tmp_path / "sitecustomize.py").write_text(hide)
    options = {"capture_output": True, "text": True, "timeout": 60}
    found = subprocess.run(
        [sys.executable, str(ROOT / "generate.py"), "--checkpoint", DEMO],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        **options,
    )
    told = f"generate.py: {package} is not installed; run: pip install -r requirements.txt\n"
    assert (found.returncode, found.stdout, found.stderr) == (2, "", told)


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable", "build_sdist"])
def test_an_install_is_refused_in_one_line(hook):
    """By the backend that pyproject.toml names, which pip asks."""
    text = (ROOT / "pyproject.toml").read_text()
    folder, module = (
        re.search(rf'^{name} = \[?"(.*)"', text, re.MULTILINE)[1]
        for name in ("backend-path", "build-backend")
    )
    code = f"import {module}; {module}.{hook}('somewhere')"
    options = {"cwd": ROOT / folder, "capture_output": True, "text": True, "timeout": 60}
    found = subprocess.run([sys.executable, "-c", code], **options)
    assert found.returncode and found.stdout == ""
    assert found.stderr.count("\n") == 1 and "pip install -r requirements.txt" in found.stderr


def test_ctrl_c_says_what_is_kept(capsys, monkeypatch, tmp_path):
    """The finished conversations with --results; of a batch without it nothing."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"turns": ["x = 1"]}\n' * 3)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("generate.Batch.decode_all", stop)
    argv = [*ON_DEMO, "--prompt_file", str(file)]
    for more, said in (([], "nothing is kept"), (["--results", str(tmp_path / "r")], "r keeps")):
        with pytest.raises(SystemExit) as ended:
            main([*argv, *more])
        assert ended.value.code == 130 and said in capsys.readouterr().err


def test_an_output_without_permission_is_refused_first(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    assert "no permission" in failure(capsys, *IDS, "--json", str(tmp_path / "out.json"))


def test_messages(tmp_path):
    """As OpenAI clients send them: they are rendered, never their keys."""
    for file in Path(DEMO).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(CHAT)
    engine = load(tmp_path, draft="none", device="cpu", max_new_tokens=6)
    question = {"role": "user", "content": "x = 1"}
    want = generate(engine, ["x = 1"])
    for prompts in ([question], [[question]]):
        assert generate(engine, prompts).tokens == want.tokens
    assert "".join(stream(engine, [question])) == want.text[0]
    told = [{"role": "system", "content": "b"}, question, {"role": "assistant", "content": "c"}]
    found = generate(engine, [[*told, question], "x = 1"])
    rendered = engine.tokenizer.encode("system: buser: x = 1assistant: cuser: x = 1", bos=True)
    assert found.prompt_tokens == [len(rendered), want.prompt_tokens[0]]
    assert found.tokens[0] == generate(engine, [rendered]).tokens[0]
    plain = load(tmp_path, chat=False, draft="none", device="cpu", max_new_tokens=6)
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


def test_choices_that_lose_are_told(capsys):
    """With --compile on a CPU, where they were measured; never the defaults."""
    common = {"checkpoint": DEMO, "device": "cpu"}
    told = {
        "tree": ("static", "--tree static was slower than no drafting wherever both"),
        "draft": ("lookahead", "--draft lookahead was slower than no drafting"),
    }
    for name, (value, note) in told.items():
        load(**common, compile=True, **{name: value})
        assert capsys.readouterr().err.startswith(f"note: {note}")
        load(**common, **{name: value})
        assert capsys.readouterr().err == ""
    for options in ({}, {"tree": "dynamic", "tree_size": 8}, {"tree": "chain"}):
        load(**common, compile=True, **options)
        assert capsys.readouterr().err == "", options
