"""Grammars: masks, forced tokens, ends and schemas; refusals. Texts by their definition: test_requests.py."""

from __future__ import annotations

import json
import random
from functools import partial

import pytest

jsonschema = pytest.importorskip("jsonschema")

from test_requests import LARK, OTHER, PERSON, PROMPT  # noqa: E402
from test_tokenizer import CONTROLS, build_json, write  # noqa: E402

import demo_drafts  # noqa: E402
import run.generate as program  # noqa: E402
from drafts.grammar import MOST_BYTES, Grammar  # noqa: E402
from files.tokenizer import Tokenizer  # noqa: E402
from helpers import (  # noqa: E402
    slow,
    write_random_llama,
)
from run.library import generate  # noqa: E402
from run.load import load  # noqa: E402
from run.options import DEMO  # noqa: E402
from run.session import Session  # noqa: E402

GBNF = 'root ::= "yes" | "no" " " [a-z]+ "!"\n'
FORCED = "The quick brown fox jumps over the lazy dog, and then it runs into the dark forest."
DEAD = 'start: "abc" X\nX: /[a-z]+/ & /[0-9]+/'
engine_of = partial(demo_drafts.engine_of, max_new_tokens=60)


@pytest.mark.parametrize("draft", ["none", "dynamic", "ngram", "auto", "model"])
def test_forced_tokens_cost_no_pass_of_their_own(draft):
    engine = engine_of(draft)
    result = generate(engine, [PROMPT], grammar=f'start: "{FORCED}"')
    assert result.text == [FORCED] and result.finish_reason == ["stop"]
    count = len(result.tokens[0])
    assert count > 20
    cycles = result.stats["cycles"]  # the first token comes with the prompt
    assert cycles == {"none": count - 1, "model": -(-(count - 1) // 4)}.get(draft, 1)


def test_a_run_longer_than_a_tree():
    text = " ".join(["forest"] * 70)
    result = generate(engine_of("ngram", max_new_tokens=400), [PROMPT], grammar=f'start: "{text}"')
    assert result.text == [text] and result.stats["cycles"] <= len(result.tokens[0]) // 60 + 1


def random_schema(rng: random.Random, depth: int = 0) -> dict:
    """A bounded schema, at the top an object."""
    if depth == 0 or depth < 3 and rng.random() < 0.33:
        names = rng.sample(["name", "size", "kind", "value", "x y", "Übung"], rng.randint(1, 4))
        below = {name: random_schema(rng, depth + 1) for name in names}
        required = [name for name in names if rng.random() < 0.7]
        closed = {"additionalProperties": False, "required": required}
        return {"type": "object", "properties": below, **closed}
    least, most = rng.randint(0, 2), rng.randint(0, 5000)
    kinds = [
        {"type": "boolean"}, {"type": "null"}, {"type": "integer", "minimum": -5, "maximum": most},
        {"type": "string", "maxLength": 8}, {"type": "string", "format": "date"},
        {"type": "string", "pattern": "^[a-z]{1,4}(-[0-9]+)?$", "maxLength": 8},
        {"enum": rng.sample(["red", "green", "dark blue", 7, None, True], 3)},
        {"const": rng.choice(["fixed text", 12, {"a": [1, 2]}])},
    ]  # fmt: skip
    if depth < 3:
        item = random_schema(rng, depth + 2)
        kinds.append({"type": "array", "items": item, "minItems": least, "maxItems": least + 1})
        kinds.append({"anyOf": [item, {"type": "null"}]})
    return rng.choice(kinds)


@pytest.mark.parametrize("first, count", [(0, 5), *slow([(5, 95)])])
def test_outputs_of_schemas_parse_and_validate(first, count):
    """Equal with and without drafting, greedy and sampled."""
    schemas = [random_schema(random.Random(seed)) for seed in range(first, first + count)]
    assert len({json.dumps(schema) for schema in schemas}) > 0.9 * count
    options = {"max_new_tokens": 300, "compile": True, "batch_size": 4}
    plain = engine_of("none", **options)
    drafted = engine_of("dynamic", **options)
    for temperature in (0.0, 1.0):
        asked = {"grammar": schemas, "temperature": temperature, "seed": 11}
        want = generate(plain, [PROMPT] * count, **asked)
        got = generate(drafted, [PROMPT] * count, **asked)
        assert got.tokens == want.tokens
        assert got.stats["cycles"] < 0.6 * want.stats["cycles"]
        for schema, text, reason in zip(schemas, got.text, got.finish_reason):
            assert reason == "stop", (schema, text)
            value = json.loads(text)
            jsonschema.validate(value, schema)
            assert json.loads(json.dumps(value)) == value


@pytest.mark.parametrize("draft", ["none", "ngram"])
@pytest.mark.parametrize("further", [1, 40])
def test_a_tokenizer_with_more_tokens_than_the_model(draft, further, tmp_path):
    """As Gemma's, or that of a fine-tune with a [PAD] of its own; one would spell a forced text."""
    names = [*CONTROLS[1:], '"name"', *(f"<pad {n}>" for n in range(further))]
    build_json(tmp_path, [CONTROLS[0]], bos=False)
    tokenizer = Tokenizer.load(tmp_path)
    vocab = tokenizer.vocab_size
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    added = content["added_tokens"]
    added += [added[0] | {"id": vocab + n, "content": name, "special": name != '"name"'} for n, name in enumerate(names)]  # fmt: skip
    write(tmp_path, "tokenizer.json", content)
    model = tmp_path / "model"
    model.mkdir()
    write_random_llama(model, vocab_size=vocab)
    (tmp_path / "tokenizer.json").rename(model / "tokenizer.json")
    write(model, "generation_config.json", {"eos_token_id": tokenizer.id_of(CONTROLS[0])})
    engine = load(checkpoint=str(model), device="cpu", draft=draft, max_new_tokens=200)
    assert engine.tokenizer.vocab_size == vocab + len(names) > engine.target.config.vocab_size
    (tokens,) = generate(engine, ["A person: "], grammar=PERSON).tokens
    text = engine.tokenizer.decode(tokens)
    assert max(tokens) < vocab and text.startswith('{"name": "')
    jsonschema.validate(json.loads(text), PERSON)
    (free,) = generate(engine, ["A person: "]).tokens
    assert free != tokens


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("source, message", [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"enum": ["x" * MOST_BYTES]}, f"may have {MOST_BYTES} bytes"),
    ('start: "a', "lexer error"),
    ("start: /[a-z]/ & /[0-9]/", "refused"),
])  # fmt: skip
def test_refused_grammars_end_in_one_line(source, message):
    with pytest.raises(ValueError, match="grammar") as caught:
        generate(engine_of(), [PROMPT], grammar=source)
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("draft", ["none", "dynamic", "ngram"])
def test_a_grammar_that_allows_nothing_at_some_point(draft):
    """The text up to there is the same; the other sequences go on, and no result is lost."""
    engine = engine_of(draft, batch_size=2)
    whole = generate(engine, [PROMPT, OTHER], grammar=[DEAD, None])
    assert (whole.text[0], whole.finish_reason) == ("abc", ["grammar", "length"])
    assert whole.tokens[1] == generate(engine, [PROMPT, OTHER]).tokens[1]
    several = generate(engine, [["a", "b"], PROMPT], grammar=[DEAD, None], max_new_tokens=4)
    assert several.index == [(0, 0, 0), (1, 0, 0)], "a conversation ends there"
    session = Session(engine, [(0, 0), (1, 0)])
    ids = [engine.tokenizer.encode(text) for text in (PROMPT, OTHER)]
    session.admit(0, ids[0], (0, 0), 60, guide=Grammar(engine, DEAD))
    session.admit(1, ids[1], (1, 0), 60)
    new = [[], []]
    while session.busy(0) or session.busy(1):
        for have, more in zip(new, session.step()):
            have += more
    assert engine.tokenizer.decode(new[0]) == "abc" and list(session.guide_errors) == [0]
    assert new[1] == generate(engine, [PROMPT, OTHER]).tokens[1]
    session.admit(0, ids[0], (0, 0), 4)
    assert not session.guide_errors


@pytest.mark.parametrize("options", [
    {"ignore_eos": True}, {"accept": "residual", "temperature": 1.0, "tree": "dynamic"},
], ids=str)  # fmt: skip
def test_engines_that_follow_no_grammar(options):
    with pytest.raises(ValueError, match="ignore_eos or accept=residual"):
        generate(engine_of(**options), [PROMPT], grammar=LARK)


@pytest.mark.parametrize("name, text, begin", [
    ("a.lark", LARK, "The answer is "), ("a.gbnf", GBNF, ("yes", "no ")),
    ("a.json", json.dumps(PERSON), '{"name": "'),
])  # fmt: skip
def test_the_command_line(name, text, begin, tmp_path, capsys):
    file = tmp_path / name
    file.write_text(text)
    argv = ["--checkpoint", DEMO, "--device", "cpu", "--grammar", str(file), "--prompt", PROMPT]
    program.main([*argv, "--compare", "--max_new_tokens", "60"])
    shown, err = capsys.readouterr()
    assert shown.startswith(begin) and "100 % of sequences identical" in err
