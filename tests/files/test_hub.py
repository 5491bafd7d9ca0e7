"""Models by their names: a hub of our own behind the real huggingface_hub, its cache, ollama's folder, heads.

No test goes further than this machine.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from files import hub, known_heads, published
from files.fetch import fetched, title_of, with_files
from files.head_kinds import own_head
from files.io import bundled_head, is_gguf, is_model_name
from files.ollama import ollama_model
from files.published import plain_name, published_heads, published_tau
from run.library import generate
from run.load import load
from run.options import DEMO, GenerateConfig
from run.start import read_command, with_text

NOWHERE = "http://127.0.0.1:9"  # where nobody listens


class Hub(ThreadingHTTPServer):
    """Repositories and their files, by HTTP as the real hub has them."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, dict[str, bytes]] = {}
        self.bases: dict[str, str] = {}
        self.gated: set[str] = set()
        self.breaks = False  # within the next file
        self.sent: list[str] = []  # files

    def commit(self, repo: str) -> str:
        return hashlib.sha1("".join(sorted(self.repos[repo])).encode()).hexdigest()


class Answer(BaseHTTPRequestHandler):
    """An answer of `Hub`."""

    server: Hub

    def log_message(self, *_) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        about = re.fullmatch(r"/api/models/(\w+/[^/]+)(/revision/main|/(tree)/\w+)?", path)
        file = re.fullmatch(r"/(\w+/[^/]+)/resolve/\w+/(.+)", path)
        if not about and not file:
            return self.answer(404, b"")
        repo = (about or file)[1]
        content = self.server.repos.get(repo)
        if content is None:
            self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif about and about[3]:
            tree = [{"type": "file", "oid": oid(c), "size": len(c), "path": name} for name, c in content.items()]  # fmt: skip
            self.answer(200, json.dumps(tree).encode())
        elif about:
            siblings = [{"rfilename": name, "size": len(c), "blobId": oid(c)} for name, c in content.items()]  # fmt: skip
            known = {"id": repo, "sha": self.server.commit(repo), "siblings": siblings, "tags": []}
            if repo in self.server.bases:
                known["cardData"] = {"base_model": self.server.bases[repo]}
            self.answer(200, json.dumps(known).encode())
        elif repo in self.server.gated:
            self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        else:
            self.send(repo, file[2], content[file[2]])

    def send(self, repo: str, name: str, content: bytes) -> None:
        begin = int(re.sub(r"\D", "", self.headers.get("Range", "0")) or 0)
        further = {"ETag": f'"{oid(content)}"', "X-Repo-Commit": self.server.commit(repo)}
        if self.command == "GET":
            self.server.sent.append(name)
        if self.command == "GET" and self.server.breaks:
            further["Content-Length"] = str(len(content))
            content = content[: len(content) // 2]
        self.answer(206 if begin else 200, content[begin:], further)

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


QUANTS = {f"tiny-{kind}.gguf": f"GGUF {kind}".encode() for kind in ("BF16", "IQ4_XS", "Q4_K_M", "q8_0")}  # fmt: skip
BESIDE = {"mmproj-tiny-f16.gguf": b"GGUF", "config.json": b"{}", "README.md": b"", "imatrix.gguf": b"GGUF"}  # fmt: skip
REPOS = {
    "tiny/quants": QUANTS | BESIDE,
    "tiny/texts": {"README.md": b""},
    "tiny/closed": {"config.json": b"{}", "model.safetensors": b"1"},
    "tiny/strange": {"config.json": b'{"architectures": ["Strange"]}', "model.safetensors": b"1"},
}


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The hub, reached by the package, whose cache is a folder of the test."""
    hub.hub_model.cache_clear()
    server = Hub()
    server.repos |= REPOS
    server.gated = {"tiny/closed"}
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    go_to(monkeypatch, server.url)
    yield server
    server.shutdown()
    server.server_close()


def go_to(monkeypatch, url: str) -> None:
    hub.hub_model.cache_clear()
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def refusal(name: str) -> str:
    with pytest.raises(ValueError) as error:
        fetched(name)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---------------------------------------------------------------------------------- names, choosing


@pytest.mark.parametrize("text, named", [
    ("hf:owner/name", True), ("ollama:llama3", True), ("owner/name", True), ("owner/name:Q4_K_M", True),
    ("checkpoints/nowhere", False), ("owner/name/more", False), ("owner/name.gguf", False), ("./owner/name", False),
    ("../name", False), ("/owner/name", False), ("name", False), ("", False), (DEMO, False),
])  # fmt: skip
def test_names_and_paths(text, named):
    assert is_model_name(text) == named


TEXTS = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"}  # fmt: skip
SAFETENSORS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"}  # fmt: skip
BIN = {"pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json"}  # fmt: skip
TOOLS = {"additional_chat_templates/tool_use.jinja"}
UNUSED = {
    "README.md", ".gitattributes", "training_args.bin", "optimizer.bin", "consolidated.safetensors", "model.gguf",
    "original/tokenizer.model", "original/params.json", "original/model.safetensors", "onnx/model.safetensors",
}  # fmt: skip


@pytest.mark.parametrize("files, unused", [
    (TEXTS | SAFETENSORS, UNUSED | BIN), (TEXTS | TOOLS | BIN, UNUSED | {"model.safetensors.index.json"}),
    ({"config.json", "medusa_lm_head.safetensors"}, {"medusa_lm_head.pt"}), ({"config.json", "hydra_lm_head.pt"}, set()),
])  # fmt: skip
def test_one_copy_of_the_weights_is_wanted(files, unused):
    names = hub.wanted([*files, *unused])
    assert set(names) == files and len(names) == len(files)


@pytest.mark.parametrize("names, asked, picked", [
    ("a-Q8_0 a-Q4_K_M a-Q2_K", "", "a-Q4_K_M"), ("a-Q8_0 a-Q4_K_M", "q8_0", "a-Q8_0"),
    ("a.i1-IQ1_S a.Q6_K a.Q8_0", "", "a.Q6_K"), ("a-UD-Q4_K_XL a-Q4_K_S", "Q4_K_XL", "a-UD-Q4_K_XL"),
    ("a-Q4_K_S a-Q4_K_M", "Q4_K", ""), ("a-IQ2_XXS a-TQ1_0", "", ""), ("model only-this", "", "model"),
    ("big/a-Q4_K_M-00002-of-00002 big/a-Q4_K_M-00001-of-00002 a-Q8_0", "", "big/a-Q4_K_M-00001-of-00002"),
])  # fmt: skip
def test_the_quantization_is_the_end_of_a_name(names, asked, picked):
    files = [f"{name}.gguf" for name in names.split()]
    if picked:
        assert hub.chosen("o/r", files, asked)[0] == f"{picked}.gguf"
    else:
        with pytest.raises(ValueError, match="o/r has no GGUF file of"):
            hub.chosen("o/r", files, asked)


def test_a_gguf_file_of_a_repository(server, capsys):
    """Q4_K_M where nothing is asked for; each choice is said, and a file is fetched once."""
    path = fetched("tiny/quants")
    assert path.read_bytes() == b"GGUF Q4_K_M" and is_gguf(path)
    choice, note = capsys.readouterr().err.splitlines()
    assert choice == (
        "note: tiny/quants: tiny-Q4_K_M.gguf runs; tiny/quants:QUANTIZATION names another, of "
        "BF16, IQ4_XS, Q4_K_M, q8_0"
    )
    assert note.startswith("note: fetching tiny/quants into the hub's cache: 1 file(s), ")
    assert fetched("hf:tiny/quants:Q8_0").name == "tiny-q8_0.gguf"
    hub.hub_model.cache_clear()
    capsys.readouterr()
    assert with_files(GenerateConfig(checkpoint="tiny/quants")).checkpoint == str(path)
    assert capsys.readouterr().err == f"{choice}\n", "once"
    assert server.sent == ["tiny-Q4_K_M.gguf", "tiny-q8_0.gguf"]


# name -> words of the refusal; {url} is the hub's
REFUSED = {
    "tiny/nothing": "neither a directory tiny/nothing here nor a model {url}/tiny/nothing",
    "tiny/texts": "neither model*.safetensors nor pytorch_model*.bin nor GGUF",
    "tiny/closed": "is gated: accept its terms on {url}/tiny/closed, then run: hf",
    "tiny/strange": "architecture Strange is not supported",
    "tiny/quants:Q5_K_M": "no GGUF file of the quantization Q5_K_M; it has BF16, IQ4_XS, Q4_K_M, q8_0",
    "hf:tiny/closed:Q4_K_M": "tiny/closed has no GGUF file; drop :Q4_K_M",
    "hf:tiny": "is named hf:OWNER/NAME", "hf:a/b/c": "is named hf:OWNER/NAME",
    "checkpoints/nowhere": "no such directory: checkpoints/nowhere",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_are_refused(server, capsys, name):
    """In one line, and before any weights come."""
    with pytest.raises(SystemExit) as stop:
        with_text(read_command(["--checkpoint", name, "--prompt", "hi"]))
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and line.startswith("generate.py: ")
    assert REFUSED[name].format(url=server.url) in line
    assert {*server.sent} <= {"config.json"}


def test_half_a_download_is_no_file(server, tmp_path, monkeypatch):
    """A connection that breaks leaves nothing under a file's name; the next run goes on."""
    server.repos["tiny/quants"] = QUANTS | {"tiny-Q4_K_M.gguf": b"GGUF" * 1000}
    server.breaks = True
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # of the package, before it tries again
    assert "could not download tiny/quants" in refusal("tiny/quants")
    assert not list((tmp_path / "cache").rglob("*.gguf"))
    server.breaks = False
    assert fetched("tiny/quants").read_bytes() == b"GGUF" * 1000


def test_without_a_network_the_cache_is_asked(server, monkeypatch, capsys):
    """A model that is in it runs, with a note; for another, what is there is listed."""
    path = fetched("tiny/quants:Q8_0")
    go_to(monkeypatch, NOWHERE)
    capsys.readouterr()
    assert fetched("tiny/quants") == path
    assert "cannot be reached" in capsys.readouterr().err
    assert "no GGUF file of the quantization Q4_K_M; it has q8_0" in refusal("tiny/quants:Q4_K_M")
    said = refusal("tiny/other")
    assert said.startswith("tiny/other is not cached, and the hub cannot be reached (")
    assert said.endswith("); check the network, or name a model that the command hf cache ls lists")


# ------------------------------------------------------------------------------------------- heads

TABLE = """
| target | head | layout | Vd | tau | licence |
|---|---|---|---|---|---|
| official/Demo-1M | tiny/away | Medusa, 2 heads | all | ? | ? |
| | tiny/demo-head | EAGLE-3, SafeAILab's | all | 9.5 | MIT |
| official/Other | tiny/other | DFlash | all | ? | ? |

Text behind it.
"""


@pytest.fixture
def table(monkeypatch, tmp_path):
    path = tmp_path / "README.md"
    path.write_text(TABLE)
    monkeypatch.setattr(published, "TABLE", path)
    return path


def files_of(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_a_model_by_name_brings_its_head(server, table, capsys):
    """The text is that of the same files in directories. Its head comes by the base model's name."""
    server.repos["tiny/demo"] = files_of(DEMO)
    server.bases["tiny/demo"] = "official/Demo-1M"
    server.repos["tiny/demo-head"] = files_of(f"{DEMO}-eagle")
    options = {"device": "cpu", "max_new_tokens": 16, "draft": "eagle", "tree": "dynamic"}
    engine = load("tiny/demo", **options)
    assert "drafts come from tiny/demo-head, which files/HEADS.md lists" in capsys.readouterr().err
    assert title_of(Path(engine.config.checkpoint)) == "tiny/demo"
    result = generate(engine, ["def f():"])
    usual = generate(load(DEMO, **options), ["def f():"])
    assert result.tokens == usual.tokens and result.stats["tau"] == usual.stats["tau"] > 1
    assert with_files(GenerateConfig(checkpoint="tiny/demo", draft="ngram")).head == ""
    asked = GenerateConfig(checkpoint="tiny/demo")
    capsys.readouterr()
    assert with_files(asked).head == "" and "without tiny/away, which" in capsys.readouterr().err
    assert with_files(replace(asked, head="tiny/demo-head")).head == engine.config.head


@pytest.mark.parametrize("tau, says", [(3.0, False), (900.0, True), (0.0, False)])
def test_a_head_that_accepts_too_little_says_so(monkeypatch, capsys, tau, says):
    """Once, after some of its cycles, at the end of an answer; a tau is for the trees that it drafts here."""
    monkeypatch.setattr("run.published.CYCLES", 20)
    options = {"draft": "eagle", "tree": "chain:12", "ignore_eos": True, "max_new_tokens": 250}
    engine = replace(load(DEMO, device="cpu", **options), published_tau=tau)
    capsys.readouterr()
    generate(engine, ["def f():", "import os"], temperature=1.0)
    said = capsys.readouterr().err
    assert said.count("does the head fit this model, its template, its bits?") == says
    assert not says or re.search(
        r"note: tau \d\.\d, published 900\.0, which is 1[23]\.\d in trees like these: ", said
    )


def test_a_published_tau_is_known_by_the_heads_name(table):
    for path in ("heads/demo-head", "hub/models--tiny--demo-head/snapshots/abc"):
        assert published_tau(path) == 9.5
    assert published_tau("heads/away") == published_tau("heads/mine") == 0


def test_the_table_of_heads_is_whole():
    """Every row of files/HEADS.md names one target, one head and a layout whose kind is known."""
    heads = published_heads()
    assert len({(head.target, head.name) for head in heads}) == len(heads) > 40
    for head in heads:
        assert re.fullmatch(r"([\w-]+/[\w.-]+ ?){2}", f"{head.target} {head.name}"), head
        assert head.tau == "?" or 1 < float(head.tau) < 12
    assert [head.kind for head in published_heads("vicuna-7b-v1.3")] == ["eagle", "medusa", "hydra"]


@pytest.mark.parametrize("name, plain", [
    ("Qwen/Qwen3-8B-GGUF", "qwen3-8b"), ("Qwen3-8B-Q4_K_M", "qwen3-8b"), ("qwen3-8b.Q8_0", "qwen3-8b"),
    ("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "llama-3.1-8b-instruct"), ("/models/Qwen3-8B/", "qwen3-8b"),
    ("Meta Llama 3.1 8B Instruct", "llama-3.1-8b-instruct"), ("Qwen3-8B-FP8", "qwen3-8b-fp8"),
])  # fmt: skip
def test_forms_of_a_model_have_one_name(name, plain):
    assert plain_name(name) == plain


def change(folder: Path, *, without: str = "", behind: str = "", **changes: object) -> None:
    """Change keys of a config.json. behind: a text that breaks it"""
    config = folder / "config.json"
    raw = json.loads(config.read_text()) | changes
    raw.pop(without, None)
    config.write_text(json.dumps(raw) + behind)


def test_a_head_beside_a_model_is_found_by_its_config(tmp_path, capsys):
    """By each key that names a target. A whole model, another's head and a broken config are passed over."""
    model, head = tmp_path / "Demo-1M", tmp_path / "c-head"
    model.symlink_to(DEMO)
    for name in ("a-broken", "b-other", "c-head", "a-model"):
        shutil.copytree(DEMO if name == "a-model" else f"{DEMO}-eagle", tmp_path / name)
    change(tmp_path / "a-broken", behind="x")
    change(tmp_path / "b-other", base_model="official/Demo-2M")
    change(tmp_path / "a-model", base_model="official/Demo-1M")
    change(head, base_model="official/Demo-1M")
    assert own_head(model) == own_head(model, "eagle") == str(head)
    note = f"note: drafts come from {head}, whose config names official/Demo-1M; "
    assert capsys.readouterr().err.startswith(note)
    assert own_head(model, "medusa") == ""
    engine = load(str(model), device="cpu", max_new_tokens=8, tree="dynamic")
    assert engine.option("draft") == "eagle" and engine.option("head") == str(head)
    known_heads.head_beside.cache_clear()
    verifier = {"verifier": {"name_or_path": "official/Demo-1M"}}
    change(head, without="base_model", speculators_config=verifier)
    assert own_head(model) == str(head)
    bundled_head(model).symlink_to(f"{DEMO}-eagle")
    assert own_head(model) == f"{model}-eagle", "the one that has its name comes first"


# ------------------------------------------------------------------------------------------ ollama


def write_ollama(folder: Path, name: str, blob: Path, **layers: str) -> str:
    """Write a manifest as ollama does. name: OWNER/NAME/TAG; layers: further ones. Returns: the blob's name."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    kinds = {"model": f"sha256:{digest}"} | layers
    kind = "application/vnd.ollama.image."
    manifest = {
        "layers": [{"mediaType": kind + each, "digest": value} for each, value in kinds.items()]
    }
    path = folder / "manifests" / "registry.ollama.ai" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(manifest))
    (folder / "blobs").mkdir(exist_ok=True)
    (folder / "blobs" / f"sha256-{digest}").symlink_to(blob)
    return f"sha256-{digest}"


def test_ollamas_models(tmp_path, monkeypatch):
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    (tmp_path / "weights").write_bytes(b"GGUF")
    blob = write_ollama(tmp_path, "library/tiny/latest", tmp_path / "weights", template="sha256:1")
    write_ollama(tmp_path, "library/tiny/1b", tmp_path / "weights")
    write_ollama(tmp_path, "me/mine/v1.0", tmp_path / "weights", adapter="sha256:2")
    write_ollama(tmp_path, "library/gone/latest", tmp_path / "nowhere")
    write_ollama(tmp_path, "library/bad/latest", tmp_path / "weights", model="sha256:../../weights")
    for name in ("ollama:tiny", "ollama:tiny:latest", "ollama:registry.ollama.ai/library/tiny"):
        assert fetched(name) == tmp_path / "blobs" / blob
    assert is_gguf(ollama_model("ollama:tiny:1b"))
    for name, says in (
        ("ollama:none", f"is not in {tmp_path}; run: ollama pull none"),
        ("ollama:me/mine:v1.0", "is a model with an adapter, which is not supported"),
        ("ollama:gone", "the weights of ollama:gone, is missing; pull it again"),
        ("ollama:bad", "names no file of weights; pull it again"),
        ("ollama:../tiny", "is named ollama:NAME or ollama:NAME:TAG; it is ollama:../tiny"),
    ):  # fmt: skip
        assert says in refusal(name)
