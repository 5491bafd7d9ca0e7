"""scripts/download.py without a network: the file filter, the errors, and the whole run against a fake hub."""

import re
import sys
import types

import pytest

import download
from download import DownloadConfig, explain, next_command, wanted

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
    assert "model.safetensors.index.json" not in names  # it would point to shards that are not there
    assert set(wanted(REPO, ["config.json", "pytorch_model.bin", "training_args.bin", "optimizer.bin"])) == {
        "config.json",
        "pytorch_model.bin",
    }


def test_wanted_leaves_out_second_copies():
    names = ["config.json", "chat_template.jinja", "model.safetensors", "consolidated.safetensors"]
    names += ["original/tokenizer.model", "original/params.json", "onnx/model.safetensors", "model.gguf"]
    assert set(wanted(REPO, names)) == {"config.json", "chat_template.jinja", "model.safetensors"}


@pytest.mark.parametrize("names", [[], ["config.json", "model.gguf"], ["original/model.safetensors"]])
def test_wanted_needs_weights(names):
    with pytest.raises(ValueError, match="neither model.*safetensors nor pytorch_model"):
        wanted(REPO, names)


def test_next_command(tmp_path):
    command = next_command(tmp_path, wanted(REPO, LLAMA2))
    assert command == f'python generate.py --checkpoint {tmp_path} --prompt "..."'
    head = next_command(tmp_path, ["config.json", "pytorch_model.bin"])
    assert head == f'python generate.py --checkpoint TARGET --eagle {tmp_path} --prompt "..."'


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
    (ConnectionError("name resolution failed\nfor url"), "name resolution failed\\); check the net"),
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
        self.names, self.list_error, self.fetch_error, self.calls = names, list_error, fetch_error, []

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
    assert {file.name for file in (tmp_path / "checkpoints/owner/name").iterdir()} == set(wanted(REPO, LLAMA2))
    assert hub.calls == [(REPO, "v1"), (REPO, "c0ffee")]  # both at one commit
    assert out.splitlines() == [
        "wrote 9 files to checkpoints/owner/name",
        'next: python generate.py --checkpoint checkpoints/owner/name --prompt "..."',
    ]
    status, out, _ = run(monkeypatch, capsys, REPO, "--out", str(tmp_path / "elsewhere"))
    assert status == 0 and (tmp_path / "elsewhere/config.json").is_file() and "elsewhere" in out


def fails(monkeypatch, capsys, *arguments):
    status, out, err = run(monkeypatch, capsys, *arguments)
    assert (status, out) == (2, "") and err.count("\n") == 1 and err.startswith("download.py: "), err
    return err


@pytest.mark.parametrize("repo", ["gpt2", "a/b/c", "", "/name", "owner/", "../name", "owner/na me", "-x/y/"])
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
    assert "is a file; name a directory" in fails(monkeypatch, capsys, "a/b", "--out", str(tmp_path / "file"))


def test_missing_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it raises ImportError
    assert "pip install huggingface_hub" in fails(monkeypatch, capsys, REPO)
