"""The moving picture of a race: what it shows, and when."""

import json
import xml.etree.ElementTree as ET

import pytest

from run.options import DEMO
from scripts.bench.race import COLUMNS, Side, chunks, main, picture

SVG = "{http://www.w3.org/2000/svg}"
WORDS = "Words that fill more than one line, " * 4
PIECES = [[0.1, "def f(x):\n"], [0.4, "    return <x> & "], [0.7, WORDS], [0.9, "x" * 70]]
RACE = {
    "prompt": "Is 1 < 2?",
    "checkpoint": "a.gguf",
    "machine": "a processor",
    "date": "2026-11-28",
    "sides": [
        {"pieces": [[2 * seconds, text] for seconds, text in PIECES], "tokens": 90},
        {"pieces": PIECES, "tokens": 90},
    ],
}


def test_parts_hold_the_whole_text_in_lines_that_fit():
    side = Side(**RACE["sides"][1])
    found = [*chunks(side)]
    assert "".join(text for *_, text in found) == side.text.replace("\n", " ")
    assert max(column + len(text.rstrip()) for _, _, column, text in found) == COLUMNS
    assert [part[:3] for part in found[:2]] == [(0.1, 0, 0), (0.4, 1, 0)]
    starts = [(line, column) for _, line, column, _ in found]
    assert starts == sorted(set(starts))


def test_a_piece_is_hidden_until_its_time_and_each_clock_ends_with_its_rate():
    root = ET.fromstring(picture(RACE))
    texts = [*root.iter(f"{SVG}text")]
    ends = {
        text.text: [s.get("end") for s in text.iter(f"{SVG}set") if s.get("to") == "hidden"]
        for text in texts
    }
    assert ends["def f(x): "] == ["loop.begin+0.400s"]  # of the faster side, played 4 times slower
    assert ends["1.80 s, 50 tokens/s"] == ["loop.begin+7.200s"]
    assert ends["0.90 s, 100 tokens/s"] == ["loop.begin+3.600s"]
    assert "> Is 1 < 2?" in ends
    shown = [text for text in texts if text.get("visibility") != "hidden"]
    assert sum(text.text == "def f(x): " for text in shown) == 2  # without an animation, too
    assert texts[-1].text.startswith("played 4 times slower; one text; a.gguf; a processor")


def test_another_file_is_refused(tmp_path, capsys):
    file = tmp_path / "race.json"
    file.write_text(json.dumps({"sides": []}))
    with pytest.raises(SystemExit) as ended:
        main(["--recorded", str(file), "--out", str(tmp_path / "race.svg")])
    assert ended.value.code == 2
    assert "name what --json wrote" in capsys.readouterr().err
    assert not (tmp_path / "race.svg").exists()


def test_a_model_without_a_chat_template_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--checkpoint", DEMO, "--out", str(tmp_path / "race.svg")])
    assert stop.value.code == 2
    assert f"{DEMO} has no chat template; name another --checkpoint" in capsys.readouterr().err
