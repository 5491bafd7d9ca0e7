"""How the C++ operators are built, and that builds for other processors decode without changing a token."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from backends.cpp import build, fetching
from draft_tree import DynamicTree, StaticTree
from drafters import RootOnly
from eagle_draft import EagleDrafter, load_head
from files.weights import load_model
from helpers import decode, engine_for, slow
from quantize import Quantization
from run.options import DEMO

ROOT = Path(build.__file__).parents[2]


def other(march: str) -> pytest.ParameterSet:
    """A parameter: skipped where this processor cannot run such a build; slow, as it is built first (40 s)."""
    features = {"avx2", "fma", "bmi2"} if march == "x86-64-v3" else set()
    runs = platform.machine() == "x86_64" and features <= set(build.processor().split())
    lacks = pytest.mark.skipif(not runs, reason=f"this processor is no {march}")
    return pytest.param(march, marks=[lacks, pytest.mark.slow])


OTHERS = [other("x86-64-v3"), other("x86-64")]  # AVX2, and plain loops


@functools.cache
def built(march: str) -> str:
    """Build and load the operators of another processor. Returns: their namespace."""
    namespace = "gpt_eagle_" + march.replace("-", "_")
    build.register(namespace, build.build(march))
    return namespace


# ----------------------------------------------------------------------------------------- decoding

PROMPT = [3, 1, 4, 1, 5, 92, 65, 35]
FORMATS = {"bf16": None, "int8": Quantization("int8"), "int4": Quantization("int4")}
TREES = {"chain": StaticTree.chain(5), "dynamic": DynamicTree()}


def decode_all() -> dict[str, list]:
    """The tokens of the demo in every format, by its modules and by few operators: vanilla, chain and dynamic."""
    options, found = {"max_new_tokens": 8, "ignore_eos": True}, {}
    for name, quant in FORMATS.items():
        target = load_model(Path(DEMO), torch.bfloat16, quant=quant)
        head = load_head(Path(DEMO + "-eagle"), target, quant)
        drafters = [RootOnly(), *(EagleDrafter(head, target, tree) for tree in TREES.values())]
        for compile in (False, True):
            engines = [engine_for(target, each, compile=compile, **options) for each in drafters]
            tokens = [decode(engine, PROMPT).history[0] for engine in engines]
            found[f"{name} {'fused' if compile else 'eager'}"] = tokens
            assert (target.program is not None) == (head.program.in_cpp) == compile
    return found


# all slow: matmuls of every build, and on emulated tiles, have their bits in test_weights.py
@pytest.mark.parametrize("march", [*OTHERS, *slow(["native"])])
def test_other_processors_decode_the_same_tokens_with_trees(march):
    """In a process of its own, where `GPT_EAGLE_MARCH` says what to build for.

    This processor, "native", with emulated tiles.
    """
    child = (
        "import json, test_builds as t; print(json.dumps([str(t.build.build()), t.decode_all()]))"
    )
    tiles = "emulation" if march == "native" else "none"
    path = f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests/cpu'}"
    env = {"GPT_EAGLE_MARCH": march, "GPT_EAGLE_TILES": tiles, "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": path}
    command = [sys.executable, "-c", child]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    library, found = json.loads(done.stdout)
    assert Path(library).name.startswith(f"{march}-") and "slow" not in done.stderr, done.stderr
    assert len(found) == 6
    for name, (vanilla, *drafted) in found.items():
        assert len(vanilla) == len(PROMPT) + 8 and drafted == [vanilla, vanilla], name


# ----------------------------------------------------------------------------------------- building


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """A compiler that takes $TAKES_S seconds, or none, and makes empty files, for an empty cache.

    Returns: a function; it lists the compiler's arguments for the first unit of each build so far.
    """
    compiler, log = tmp_path / "c++", tmp_path / "log"
    compiler.write_text(
        f'#!/bin/sh\nsleep ${{TAKES_S:-0}}\necho "$@" >> {log}\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n'
    )
    compiler.chmod(0o755)
    log.touch()
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GPT_EAGLE_MARCH", raising=False)
    return lambda: [line for line in log.read_text().splitlines() if "unit0.cpp" in line]


def test_nothing_is_built_twice(calls, tmp_path, monkeypatch):
    library = build.build("x86-64-v3")
    assert build.build("x86-64-v3") == library
    assert len(calls()) == 1 and "-march=x86-64-v3" in calls()[0]
    assert list((tmp_path / "cache/gpt-eagle").glob("[!.]*")) == [library], "nothing else is left"
    monkeypatch.setenv("GPT_EAGLE_MARCH", "x86-64-v3")
    assert build.build() == library and len(calls()) == 1
    native = build.build("native")
    monkeypatch.delenv("GPT_EAGLE_MARCH")
    assert build.build() == native != library
    assert len(calls()) == 2 and "-march=native" in calls()[1]


def test_what_a_library_depends_on(calls, tmp_path, monkeypatch):
    """Sources, and for the native one the processor; not where the sources lie."""
    native, other = build.build(), build.build("x86-64")
    copy = tmp_path / "copy"
    copy.mkdir()
    sources = sorted(f.name for f in build.HERE.iterdir() if f.suffix in (".cpp", ".h"))
    for name in sources:
        (copy / name).write_bytes((build.HERE / name).read_bytes())
    monkeypatch.setattr(build, "HERE", copy)
    assert (build.build(), build.build("x86-64")) == (native, other) and len(calls()) == 2
    with monkeypatch.context() as patch:
        patch.setattr(build, "processor", lambda: "flags: avx1024")
        assert build.build() != native and build.build("x86-64") == other
    for name in sources:
        source = (copy / name).read_text()
        (copy / name).write_text(source + "// edited\n")
        assert build.build("x86-64") != other
        (copy / name).write_text(source)
    assert build.build("x86-64") == other
    assert sorted(sum(build.UNITS, ())) == [name for name in sources if name.endswith(".cpp")]


def test_an_assembler_that_does_not_know_tiles(calls, tmp_path):
    assert build.build("x86-64") and "-DNO_TILES" not in calls()[0]
    compiler = tmp_path / "c++"
    refuses = 'case "$*" in *probe*) exit 1;; esac'
    compiler.write_text(compiler.read_text().replace("\n", f"\n{refuses}\n", 1))
    build.build("x86-64-v2")
    assert len(calls()) == 2 and "-DNO_TILES" in calls()[1]


def test_two_who_build_at_once_build_once(calls, monkeypatch, capsys):
    """The second one says why it waits."""
    monkeypatch.setenv("TAKES_S", "0.5")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(build.build, ["x86-64", "x86-64"])
    assert first == second and len(calls()) == 1
    said = sorted(capsys.readouterr().err.splitlines())
    assert len(said) == 2 and "building" in said[0] and said[1] == f"note: {build.WAITING}"


# ------------------------------------------------------------------------ where there is no library


def why(capsys) -> str:
    """The reason that `load_operators` returns and prints."""
    reason, said = build._load.__wrapped__(), capsys.readouterr().err
    assert said.splitlines()[-1].startswith("note: no C++ operators: PyTorch's run")
    assert said.endswith(f" ({reason})\n")
    return reason


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"CXX": "/nonexistent/g++"}, "no C++ compiler: CXX is /nonexistent/g++"),  # another one is not what was asked
        ({"CXX": "", "PATH": ""}, "no C++ compiler; install g++ or set CXX"),
        ({"CXX": "/bin/false"}, "/bin/false failed: it gave no reason"),
    ],
)  # fmt: skip
def test_why_there_are_no_operators(calls, tmp_path, monkeypatch, capsys, environment, says):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert says in why(capsys)
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize("made", [
    pytest.param(lambda cache: cache.mkdir(0o500), marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")),
    Path.touch,
], ids=["read only", "a file"])  # fmt: skip
def test_a_cache_that_cannot_be_written(calls, tmp_path, capsys, made):
    made(tmp_path / "cache")
    assert "cannot write" in why(capsys)


def test_a_build_that_was_killed_is_cleaned_up(calls, tmp_path):
    folder = tmp_path / "cache/gpt-eagle"
    (folder / "build.killed").mkdir(parents=True)
    assert list(folder.glob("[!.]*")) == [folder / "build.killed"]
    library = build.build()
    assert list(folder.glob("[!.]*")) == [library] and len(calls()) == 1


def test_the_cache_is_the_users_own(calls, tmp_path, capsys, monkeypatch):
    library = build.build()
    folder = library.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    for mode in (0o770, 0o707, 0o720, 0o702):
        folder.chmod(mode)
        said = f"run from {folder}, and others may write to it (mode {mode:o}); remove it"
        assert said in why(capsys)
    folder.chmod(0o755)
    assert build.build() == library
    moved = folder.rename(folder.with_name("moved"))
    folder.symlink_to(moved)
    assert f"run from {folder}, and it is a link; remove it" in why(capsys)
    folder.unlink()
    moved.rename(folder)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert f"{folder}, and it belongs to another user ({owner}); remove it" in why(capsys)
    assert len(calls()) == 1


CONTENTS = {  # of a damaged library
    "cut": lambda whole: whole[:-5], "empty": lambda whole: b"", "changed": lambda whole: b"x" + whole[1:],
    "of others": lambda whole: b"\x7fELF" * 1000,
}  # fmt: skip


@pytest.mark.parametrize("harm", [*CONTENTS, "writable", "another's", "link"])
def test_a_library_that_was_damaged_or_planted_is_built_again(calls, harm, monkeypatch):
    """A cut one would crash the process that loads it. In a folder open to others a SHA-256 is no proof of origin."""
    library = build.build()
    whole = library.read_bytes()
    if harm in CONTENTS:
        library.write_bytes(CONTENTS[harm](whole))
    if harm == "writable":
        library.chmod(0o720)
    if harm == "link":
        library.symlink_to(library.rename(library.with_suffix(".elsewhere")))
    facts, plant = library.lstat(), Path.lstat
    if harm == "another's":
        there = os.stat_result([*facts[:4], facts.st_uid + 1, *facts[5:]])
        lstat = lambda p: there if plant(p).st_ino == facts.st_ino else plant(p)  # noqa: E731
        monkeypatch.setattr(Path, "lstat", lstat)
    for _ in range(2):
        assert build.build() == library and library.read_bytes() == whole and len(calls()) == 2
    made = plant(library)
    assert harm in CONTENTS or made.st_ino != facts.st_ino
    assert made.st_uid == os.geteuid() and made.st_mode & 0o777 == 0o700


def test_a_library_that_does_not_load_is_not_fatal(calls, capsys):
    assert build.build().name in why(capsys) and len(calls()) == 1


# ------------------------------------------------------------------------ fetches of few rows' weights


@pytest.mark.parametrize("content", [None, "", "no number", "1.310\n", "0.990\n"])
def test_the_fetches_of_few_rows_are_measured_once(tmp_path, monkeypatch, content):
    """A file that is whole is believed; another one is measured and written anew, or not kept."""
    chosen, measured = [], []
    monkeypatch.setattr(torch.ops.gpt_eagle, "fetch_for_few", chosen.append)
    monkeypatch.setattr(fetching, "gain_of_fetching", lambda: measured.append(1) or 1.2)
    kept = tmp_path / "library.fetching"
    if content is not None:
        kept.write_text(content)
    whole = bool(content) and content[0].isdigit()
    for _ in range(2):
        build.choose_fetching(kept)
    assert len(measured) == (not whole)
    assert chosen == [content != "0.990\n"] * 2
    assert kept.read_text() == (content if whole else "1.200\n")
    build.choose_fetching(tmp_path / "missing" / "library.fetching")
    assert chosen[2:] == [True] and list(tmp_path.iterdir()) == [kept]
