"""Mistakes of the programs: a row has the program, its arguments, and words of the one line that it prints.

The exit status is 2. Refusals of generate.py and serve.py are in tests/core/test_options.py and test_serve.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from examples import eagle_one_file
from helpers import GOLDEN, refused, write_random_llama
from run.options import DEMO, ROOT
from scripts import measure, train_head
from scripts.bench.tasks import UNRESOLVED
from scripts.train import data, train_block, train_eagle, training

TASK = '{"id": "y", "task": "a", "turns": ["t"]}\n'
FILES = {  # of the folder F
    "short.txt": "x", "empty/none": "", "other/config.json": "{}", "medusa/config.json": '{"medusa_num_heads": 3}',
    "given.jsonl": '{"turns": ["a"]}', "one.jsonl": '{"turns": ["a"]}\n{"q": 1}\n', "blank.jsonl": '{"turns": [" "]}',
}  # fmt: skip
TASKS = {  # line 3 of a file of tasks
    '{"id": "x", "task": "a", "turns": ["t"]': "line 3 is not valid JSON",
    '{"id": "x", "task": "a", "turns": []}': "line 3: a row must be like",
    '{"question_id": 1, "category": "a", "messages": [{"role": "system", "content": "t"}]}': "line 3: a row must be like",
    '{"task_id": 1, "test_list": ["assert f()"]}': "line 3: a row must be like",
    json.dumps({"question_id": 1, "category": "a", "turns": [UNRESOLVED]}): "has no prompt yet",
}  # fmt: skip
TARGETS = {1: GOLDEN / "models/target_llama_mha", 3: GOLDEN / "models/target_llama31_gqa8"}
HEADS = {1: GOLDEN / "models/head_eagle12_mha", 3: GOLDEN / "models/head_eagle3"}
MEASURE = [
    ("sped", "measure.py: there is no case sped; did you mean speed?"),
    *((f"speed --checkpoint {DEMO} {flags}", words) for flags, words in [
        ("--heads nowhere", "--heads goes with --methods all; --methods is none,eagle:auto"), ("--heads F/heads/a:b --methods all", "a method is divided by : and ,; give it another"),
        ("--heads F/empty --methods all", "has no head, draft model or datastore to measure"), ("--methods none,telepathy", "'telepathy'"),
        ("--methods eagle:ring", "--methods: eagle:ring: ring is no tree"), ("--methods none,none", "--methods must be a list of different values"),
        ("--options speed=9", "there is no option speed"), ("--temperatures warm", "must be a list of numbers"), ("--batch_sizes 1,x", "from 1 on, as 1,4; it is '1,x'"),
        ("--tasks riddles", "there is no riddles; name a file, or one of copy, demo, edit, gsm8k"), ("--json nowhere/log.jsonl", "--json: cannot write nowhere/log.jsonl"),
        ("--report nowhere.jsonl", "the log holds no measurement"), ("--report a.jsonl --json b.jsonl", "--report measures nothing"),
        ("--quant int5", "--quant must be among none, int8, int4; 'int5' is not"), ("--methods none,llama.cpp:q9", "there is no llama.cpp:q9; use one of transformers"),
        ("--methods transformers:7b --batch_sizes 2", "transformers:7b decodes one prompt at a time; use 1, or leave it out"),
        ("--methods transformers --temperatures 1", "transformers decodes greedily; use 0, or leave it out"),
        ("--methods llama.cpp:f16", "needs the package llama_cpp; pip install -r scripts/bench/requirements-peers.txt"),
        ("--methods gpt-fast:int4", "brought/gpt-fast has no model.py, quantize.py, generate.py; copy"),
        *((f"--tasks F/task{number}.jsonl", words) for number, words in enumerate(TASKS.values()))]),
    (f"fidelity --checkpoint {DEMO} --text nowhere.txt", "--text: cannot read nowhere.txt (FileNotFoundError)"), (f"fidelity --checkpoint {DEMO} --text F/short.txt", "short.txt has 2 tokens; give it 200 or more"),
    (f"fidelity --checkpoint {DEMO} --also {TARGETS[1]}", "has 97 tokens and checkpoints/demo has 4096; name a copy of it"), ("passes --rows 1,x", "--rows must be different whole numbers from 1 on, as 1,4; it is '1,x'"),
    ("linear --units none,all", "--units must be among none, hardware, emulation; 'all' is not"), ("linear --shapes 64x576 --kinds Q4_1,Q4_K", "--kinds Q4_K needs inputs in multiples of 256; --shapes has 64x576"),
    ("race --recorded F/short.txt --out F/race.svg", "name what --json wrote"),
    (f"race --checkpoint {DEMO} --out F/race.svg", "checkpoints/demo has no chat template; name another"), ("start --lengths 5,x", "--lengths must be different whole numbers"),
    ("attention", "no CUDA device; run it on one that has"), ("plans --out nowhere/x.json", "--out: cannot write nowhere/x.json"),
]  # fmt: skip
TRAIN = [  # of both kinds, before the target is loaded
    ("--resume", "holds no unfinished run; leave --resume out to start one"), ("--data=demo.jsonl", "--data: there is no file demo.jsonl; name another"),
    ("--features=nowhere/f.bin", "nowhere/f.bin"), ("--threads=-1", "--threads must be at least 0; it is -1"),
]  # fmt: skip
TRAIN_EAGLE = [
    ("--init=nowhere", "no such"), ("--init=F/medusa", "a head of the kind medusa"), ("--version=3 --token_weight=0.2", "--token_weight belongs to heads of version 1"),
    (f"--checkpoint={TARGETS[1]} --version=3 --init={HEADS[1]} --draft_vocab=0", "is a head of version 1; train it with --version 1"),
    (f"--checkpoint={TARGETS[3]} --init={HEADS[3]} --draft_vocab=0", "is a head of version 3; train it with --version 3"),
    (f"--checkpoint={TARGETS[3]} --version=3 --init={HEADS[3]} --draft_vocab=50", "has a draft vocabulary already"),
]  # fmt: skip
TRAIN_HEAD = [
    ("--checkpoint=nowhere", "no such directory: nowhere"), ("--chat=", "has no chat template; use --chat NAME"), ("--prompts=none.jsonl", "--prompts: cannot read none.jsonl"),
    ("--prompts=F/one.jsonl", "one.jsonl line 2: it must be like"), ("--prompts=F/blank.jsonl", "blank.jsonl line 1: it must be like"), ("--given=1.5", "--given must be"),
    ("--out=F/other", "holds something else than a run"), ("--out=F/short.txt", "is a file; name a directory"), ("--tokens=9000", "drop --hours"),
    ("--kind=dflash2 --init=a", "--init goes on with an EAGLE-3 head"),
]  # fmt: skip
EXAMPLE = [
    ("--checkpoint nowhere", "nowhere/config.json"), ("--head nowhere", "nowhere/config.json"), (f"--head {DEMO}", "do not fit"), (f"--head {HEADS[3]}", "do not fit"),
    (f"--checkpoint {ROOT}/checkpoints/SmolLM2-135M-Instruct.Q4_1-eagle", "is of no LLaMA"), ("--checkpoint a.gguf", "is a GGUF file"), ("--nodes many", "many"),
    ("--prompt_ids 1", "2 to 2047 ids"), ("--context 4 --prompt_ids 1,2,3,4,5", "2 to 3 ids"), ("--prompt_ids 1,4096", "each below 4096"), ("--prompt_ids 1,x", "'x'"),
    ("--depth 2 --topk 3 --nodes 14", "2 to 13"), ("--bits 5", "4, 8 or 16"), (f"--checkpoint {TARGETS[1]} --prompt hello", "tokenizer.json"),
]  # fmt: skip
QUICK = "--device=cpu --out=F/out"
PROGRAMS = [  # the program, the arguments before those of a row, the rows
    ("measure.py", measure.main, "", MEASURE),
    ("train_eagle.py", train_eagle.main, QUICK, TRAIN),
    ("train_block.py", train_block.main, QUICK, TRAIN),
    ("train_eagle.py", train_eagle.main, f"{QUICK} --dtype=float32", TRAIN_EAGLE),
    ("train_head.py", train_head.main, f"{QUICK} --hours=1 --chat=vicuna --checkpoint=F/model --prompts=F/given.jsonl", TRAIN_HEAD),
    ("eagle_one_file.py", eagle_one_file.main, f"--device cpu --checkpoint {DEMO} --prompt_ids 1,2", EXAMPLE),
]  # fmt: skip
ROWS = [(name, main, f"{before} {flags}", words) for name, main, before, rows in PROGRAMS for flags, words in rows]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Files that rows name, and a model without a chat template."""
    root = tmp_path_factory.mktemp("files")
    tasks = {f"task{n}.jsonl": f"{TASK}\n{row}\n{TASK}" for n, row in enumerate(TASKS)}
    for name, text in (FILES | tasks).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "empty/none").unlink()
    (root / "heads").mkdir()
    (root / "heads/a:b").symlink_to(Path(f"{DEMO}-eagle").resolve())
    (root / "model").mkdir()
    write_random_llama(root / "model")
    (root / "model/tokenizer.model").symlink_to(Path(DEMO, "tokenizer.model").resolve())
    return root


@pytest.mark.parametrize("name, main, line, words", ROWS, ids=[f"{row[0]} {row[2].split()[-1][:60]}" for row in ROWS])  # fmt: skip
def test_mistakes_are_one_line(name, main, line, words, folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # as if it were not installed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(eagle_one_file.PARSER, "prog", "eagle_one_file.py")
    if words in dict(TRAIN).values():
        monkeypatch.setattr(training, "load_target", None)
    if words in dict(TRAIN_EAGLE).values():  # golden targets have no tokenizer for a corpus
        for owner, name_of in ((data, "read_data"), (training, "prepare")):
            monkeypatch.setattr(owner, name_of, lambda *given: ([], []))
    monkeypatch.setattr(sys, "argv", [name, *line.replace("F/", f"{folder}/").split()])
    said = refused(capsys, main, prints=True)
    assert words in said.replace(f"{ROOT}/", "")
    assert not (folder / "out").exists() or not any((folder / "out").iterdir())
