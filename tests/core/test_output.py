"""The outputs of a run: a history that is true after Ctrl-C; files, links and devices that
were written.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys

import pytest

import decode
from draft_tree import DynamicTree
from drafters import RootOnly
from eagle_draft import EagleDrafter
from files.io import TEMPORARY, StatusLine, replace_file, write_text
from helpers import engine_for, golden_head, golden_target
from run import session
from run.generate import main
from run.options import DEMO

FIRST, SECOND = list(range(1, 60)), [*range(1, 30), *range(60, 95), *range(30, 60)]


def interrupt(monkeypatch, chunk: int) -> None:
    """Ctrl-C before a chunk of the next prefill, counted from 0; prefills after it go through."""
    run, left = decode.Cycle.read_prompt, [chunk]

    def read_prompt(*inputs):
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        return run(*inputs)

    monkeypatch.setattr(decode.Cycle, "read_prompt", read_prompt)


@pytest.mark.parametrize("chunk", [0, 1, 3])
@pytest.mark.parametrize("drafts", [False, True], ids=["none", "eagle"])
def test_ctrl_c_in_prefill_leaves_what_was_computed(monkeypatch, chunk, drafts):
    """The next turn is decoded as in a session that was never interrupted."""
    monkeypatch.setattr(decode, "PREFILL_CHUNK", 16)
    target = golden_target()
    tree = DynamicTree(depth=3, topk=4, size=12)
    drafter = EagleDrafter(golden_head(), target, tree) if drafts else RootOnly()
    engine = engine_for(
        target, drafter, draft="none", max_new_tokens=12, ignore_eos=True, context=256
    )
    fresh, stopped = (session.Session(engine, [(0, 0)]) for _ in range(2))
    wanted = list(fresh.decode_turn([SECOND]))
    list(stopped.decode_turn([FIRST]))
    with monkeypatch.context() as patch:
        interrupt(patch, chunk)
        with pytest.raises(KeyboardInterrupt):
            list(stopped.decode_turn([SECOND]))
    found = stopped.decode_turn([SECOND])
    assert sum((new[0] for new in found), []) == sum((new[0] for new in wanted), [])


# -------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("written", ["file", "link", "link to nothing"])
def test_a_text_is_written_whole(tmp_path, written):
    """A file keeps its mode and a link stays one; so does a neighbour whose name ends in tmp."""
    file, link, neighbour = (tmp_path / name for name in ("file", "link", "file.tmp"))
    link.symlink_to("file")
    neighbour.write_text("mine")
    there = written != "link to nothing"
    if there:
        file.write_text("old text that is longer")
        file.chmod(0o640)
        before = file.stat().st_ino
    write_text(str(file if written == "file" else link), "new")
    assert file.read_text() == "new\n" and link.is_symlink() and not file.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["file", "file.tmp", "link"]
    assert neighbour.read_text() == "mine"
    if there:
        assert stat.S_IMODE(file.stat().st_mode) == 0o640 and file.stat().st_ino != before


@pytest.mark.parametrize("linked", [True, False], ids=["link", "file"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, linked):
    """As on a full disk; and from its first byte on the new one may be read by those who may read the old one."""
    (tmp_path / "other").mkdir()
    file, link = tmp_path / "other/file", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o600)
    link.symlink_to("other/file")
    modes = []

    def write(path):
        with path.open("w") as out:
            modes.append(stat.S_IMODE(path.stat().st_mode))
            out.write("half of the te")
        raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(OSError, match="no space"):
        replace_file(link if linked else file, write)
    assert file.read_text() == "old" and link.is_symlink()
    assert os.listdir(file.parent) == ["file"] and modes == [0o600]


def test_a_device_stays_a_device(tmp_path, monkeypatch):
    """`--json /dev/null` as root: nothing is renamed over the device."""
    monkeypatch.setattr(os, "replace", lambda *names: pytest.fail(f"{names[1]} is replaced"))
    monkeypatch.setattr(os, "rename", lambda *names: pytest.fail(f"{names[1]} is replaced"))
    write_text("/dev/null", "text")
    assert stat.S_ISCHR(os.lstat("/dev/null").st_mode)
    assert not os.path.exists("/dev/null" + TEMPORARY)


def test_a_terminal_sees_how_far_a_run_is(capsys, monkeypatch, tmp_path):
    """Weights that are loaded, prompts that are read, answers of a batch; no line stays."""
    monkeypatch.setattr(StatusLine, "EVERY_S", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    file = tmp_path / "p.jsonl"
    prompts = [f"def {name}(" + "x, " * 300 for name in "ab"]
    file.write_text("".join(json.dumps({"turns": [prompt]}) + "\n" for prompt in prompts))
    line = ["--checkpoint", DEMO, "--device", "cpu", "--max_new_tokens", "4", "--quant", "int8"]
    main([*line, "--prompt_file", str(file)])
    shown = capsys.readouterr().err
    for text in (
        "[loading: 1 of ", "[0 of 2 answers, 0 tokens] [reading: 256 of ", "[1 of 2 answers, ", "8 tokens, ",
    ):  # fmt: skip
        assert f"\r\x1b[K{text}" in shown
