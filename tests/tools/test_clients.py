"""Clients as they are, against a server: `llm` and `lm_eval`. Each gets the texts of `generate`.

The official client is in test_serve.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
from helpers import fresh  # noqa: E402
from run.generate import encode, generate  # noqa: E402
from served import Running  # noqa: E402

QUESTIONS = ["Hello", "def f(x):", "Write a class.", "Why?"]


@pytest.fixture(scope="module")
def running():
    running = Running()
    yield running
    running.close()


def answer(running, turns: list[str], answers: list[str] = (), **options) -> str:
    """The text of `generate` for a chat."""
    engine = fresh(running.engine)
    ids = encode(engine, turns, list(answers))
    return generate(engine, [ids], max_new_tokens=12, **options).text[0]


def client_run(command: str, *argv: str, **environment: str) -> str:
    """Run a client's program. Returns: its output."""
    pipes = {"capture_output": True, "text": True, "timeout": 600}
    line = [sys.executable, "-m", *command.split(), *argv]
    done = subprocess.run(line, env=os.environ | environment, **pipes)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_llm(running, tmp_path):
    """The program of that name, with options, streamed and whole, and a conversation that goes on."""
    pytest.importorskip("llm", reason="pip install llm")
    url = f"http://127.0.0.1:{running.port}/v1"
    model = f"- model_id: here\n  model_name: demo\n  api_base: {url}\n"
    Path(tmp_path, "extra-openai-models.yaml").write_text(model)
    home = {"LLM_USER_PATH": str(tmp_path)}
    options = "-o temperature 0.5 -o seed 3 -o max_tokens 12"
    rule = {"temperature": 0.5, "seed": 3}
    first = client_run(f"llm -m here {options}", "Hello", **home)
    want = answer(running, ["Hello"], **rule)
    assert first == want + "\n"
    assert client_run(f"llm -m here --no-stream {options}", "Hello", **home) == first
    second = client_run(f"llm -c {options}", "Bye", **home)
    assert second == answer(running, ["Hello", "Bye"], [want], **rule) + "\n"


TASK = """task: here
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs:
  until: ["###"]
  max_gen_toks: 12
  do_sample: false
metric_list:
  - metric: exact_match
"""


def test_lm_eval(running, tmp_path):
    """Its local-chat-completions, two requests at a time, on a task whose targets are the texts of `generate`."""
    pytest.importorskip("lm_eval", reason="pip install lm_eval[api]")
    data = tmp_path / "questions.jsonl"
    targets = [answer(running, [question], temperature=0) for question in QUESTIONS]
    rows = [{"question": q, "target": t} for q, t in zip(QUESTIONS, targets)]
    data.write_text("\n".join(map(json.dumps, rows)))
    Path(tmp_path, "here.yaml").write_text(TASK.format(data=data))
    url = f"http://127.0.0.1:{running.port}/v1/chat/completions"
    command = "lm_eval --model local-chat-completions --tasks here --apply_chat_template"
    command += f" --include_path {tmp_path} --output_path {tmp_path / 'out'}"
    model = f"model=demo,base_url={url},num_concurrent=2,max_retries=1"
    home = {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    client_run(command, "--model_args", model, **home)
    (results,) = Path(tmp_path, "out").rglob("results*.json")
    found = json.loads(results.read_text())["results"]["here"]
    assert found["exact_match,none"] == 1.0
