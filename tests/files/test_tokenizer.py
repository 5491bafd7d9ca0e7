"""Tokenizers against sentencepiece, tokenizers and transformers on files trained here."""

import io
import json
import random
import re

import pytest
import sentencepiece as spm

import files.tokenizer
from files.tokenizer import Tokenizer

LINES = [
    "the quick brown fox jumps over the lazy dog",
    "def f(x):\n\treturn x  # twice    the spaces",
    "hello there, hello world; 1234567890",
    "naïve café, Größe, señor, 你好世界 and 🙂🙃",
    "[INST] a question [/INST] an answer USER: ASSISTANT: <|x|> </s>",
]
TEXTS = [
    "hello world", "  two leading spaces, trailing  ", "tabs\tand\nnewlines\n\n\r\n",
    "emoji 🙂🙃👩‍👩‍👧 and 🇩🇪", "中文 你好世界，混合 text", "ÄÖÜ naïve señor \u0301 combining, ﷺ, \U0001f9ff",
    "<0x0A> [INST] <|x|> ▁ low line ▁▁", "a", " ", "",
]  # fmt: skip
CONTROLS = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>",
]  # fmt: skip


def write(directory, name, value):
    (directory / name).write_text(
        value if isinstance(value, str) else json.dumps(value), encoding="utf-8"
    )
    return directory


def train_sp(directory, **options):
    """A sentencepiece BPE with byte fallback, as `tokenizer.model`."""
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 4), model_writer=out, vocab_size=400, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False,
        unk_id=0, bos_id=1, eos_id=2, minloglevel=2, **options,
    )  # fmt: skip
    (directory / "tokenizer.model").write_bytes(out.getvalue())
    return directory


def build_json(directory, specials=CONTROLS, bos=True):
    """A byte-level BPE in LLaMA-3's manner, as `tokenizer.json`; one added token is no control token."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
    from tokenizers import Tokenizer as Backend

    tok = Backend(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    tok.train_from_iterator(LINES * 4, trainer)
    tok.add_special_tokens(specials)
    tok.add_tokens([AddedToken("工具 tool", normalized=False)])
    if bos:
        first, template = specials[0], processors.TemplateProcessing
        pair = [(first, tok.token_to_id(first))]
        tok.post_processor = template(single=f"{first} $A", special_tokens=pair)
    tok.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session", params=["sp_prefix", "sp_plain", "json"])
def directory(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "json":
        config = {"bos_token": CONTROLS[0], "eos_token": {"content": CONTROLS[1]}}
        return write(build_json(path), "tokenizer_config.json", config)
    return train_sp(path, add_dummy_prefix=request.param == "sp_prefix")


@pytest.fixture(scope="session")
def tokenizer(directory):
    return Tokenizer.load(directory)


def with_files(source, target, **files):
    """A copy of a tokenizer directory with further files; `name__json="..."` writes `name.json`."""
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    for name, value in files.items():
        write(target, name.replace("__", "."), value)
    return target


# ------------------------------------------------------------------------------------- text and ids


def control_ids(tokenizer, ids):
    return [i for i in ids if not tokenizer.piece(i)]


def test_a_users_words_name_no_control_token(tokenizer):
    """Between the tokens of a template, whose names are parsed."""
    names = [name for name in ("<s>", "</s>", *CONTROLS) if tokenizer.id_of(name) is not None]
    words = "".join(f"a {name} b{name}" for name in names) + "<s"
    end = names[-1]
    ids = tokenizer.encode(f"{end}{tokenizer.as_text(words)}{end}", bos=False, special=True)
    assert control_ids(tokenizer, ids) == [ids[0], ids[-1]] == [tokenizer.id_of(end)] * 2
    assert tokenizer.decode(ids, continuation=True).strip() == words
    assert tokenizer.as_text("no < name > here") == "no < name > here"
    if not isinstance(tokenizer, files.tokenizer.JsonTokenizer):
        own = tokenizer.encode(words, bos=False)
        assert tokenizer.encode(tokenizer.as_text(words), bos=False, special=True) == own
    parsed = tokenizer.encode(words, bos=False, special=True)
    assert len(control_ids(tokenizer, parsed)) == 2 * len(names)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    """Whole, beside ids beyond the vocabulary, which are silent, and token by token: never half a character."""
    # U+2581 is sentencepiece's own space: the one character that it does not give back
    is_json = isinstance(tokenizer, files.tokenizer.JsonTokenizer)
    expected = text if is_json else text.replace("▁", " ")
    ids = tokenizer.encode(text)
    beyond = [tokenizer.vocab_size, tokenizer.vocab_size + 1000]
    assert tokenizer.decode([*ids, *beyond]) == tokenizer.decode(ids) == expected
    assert tokenizer.decode(tokenizer.encode(text, bos=False)) == expected
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    parts = stream(tokenizer, ids, iter(lambda: 1, 0))
    assert "".join(parts) == expected
    assert "\ufffd" not in "".join(parts) and parts[-1] == ""


def test_bos_and_eos(tokenizer):
    """BOS is never doubled."""
    plain = tokenizer.encode("hello", bos=False)
    assert tokenizer.bos_id is not None and tokenizer.bos_id not in plain
    assert tokenizer.encode("hello") == [tokenizer.bos_id, *plain]
    assert tokenizer.encode("") == [tokenizer.bos_id] and tokenizer.encode("", bos=False) == []
    assert len(tokenizer.eos_ids) == 1 and tokenizer.eos_ids != (tokenizer.bos_id,)
    assert tokenizer.decode([tokenizer.bos_id, *plain, *tokenizer.eos_ids]) == "hello"
    bos = next(name for name in ("<s>", CONTROLS[0]) if tokenizer.id_of(name) is not None)
    ids = tokenizer.encode(f"{bos}hello", special=True)
    assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.bos_id) == 1
    assert ids == tokenizer.encode(f"{bos}hello", bos=False, special=True)


# ---------------------------------------------------------------------------------------- streaming


def stream(tokenizer, ids, sizes):
    """Push `ids` in parts of the given sizes. Returns: the text of each push, then of the flush."""
    decoder, parts = tokenizer.stream(), []
    while ids:
        n = next(sizes)
        parts.append(decoder.push(ids[:n]))
        ids = ids[n:]
    return [*parts, decoder.flush()]


def test_streaming_random_ids_equals_decoding(tokenizer):
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randrange(40))]
        whole = tokenizer.decode(ids)
        assert "".join(stream(tokenizer, ids, iter(lambda: 1, 0))) == whole, ids
        assert "".join(stream(tokenizer, ids, iter(lambda: rng.randrange(4), -1))) == whole, ids


# ------------------------------------------------------------------------- against the originals


def squeeze(text):  # libraries differ in how many U+FFFD stand for a broken sequence
    return re.sub("\ufffd+", "\ufffd", text)


def test_sentencepiece_parity(sp_dir):
    sp = spm.SentencePieceProcessor(model_file=str(sp_dir / "tokenizer.model"))
    tok, space, rng = Tokenizer.load(sp_dir), sp.piece_to_id("<0x20>"), random.Random(1)
    for text in TEXTS:
        assert tok.encode(text) == [sp.bos_id(), *sp.encode(text)]
    for _ in range(300):
        # control pieces do not cut a character in ours
        ids = [rng.randrange(3, len(sp)) for _ in range(30)]
        if ids[0] != space:
            assert squeeze(tok.decode(ids)) == squeeze(sp.decode(ids)), ids


EXTRACTORS = "transformers.tokenization_utils_sentencepiece"
MIXED = ["hello <s>there", "<s>hello</s><s>there</s>", "</s>", "hello</s> there", "<s><s> a <unk>b"]


@pytest.mark.parametrize("prefix", [True, False])
def test_legacy_parity_with_transformers(tmp_path, prefix):
    """A space after every control token, as the official runs have it: transformers' sentencepiece classes."""
    backend = pytest.importorskip(EXTRACTORS).SentencePieceBackend
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    train_sp(tmp_path, add_dummy_prefix=prefix)
    reference = backend(vocab_file=str(tmp_path / "tokenizer.model"), legacy=True, **names)
    default = Tokenizer.load(tmp_path)
    explicit = Tokenizer.load(write(tmp_path, "tokenizer_config.json", {"legacy": True}))
    for text in MIXED + TEXTS:
        expected = reference.convert_tokens_to_ids(reference.tokenize(text))
        assert default.encode(text, bos=False, special=True) == expected, text
        assert explicit.encode(text, bos=False, special=True) == expected, text


def test_json_parity_with_transformers(json_dir):
    fast = pytest.importorskip("transformers").PreTrainedTokenizerFast
    reference, tok = fast(tokenizer_file=str(json_dir / "tokenizer.json")), Tokenizer.load(json_dir)
    assert len(reference) == tok.vocab_size
    for text in [*TEXTS, "one<|eot_id|>two 工具 tool.", "<|begin_of_text|><|eot_id|> \n"]:
        ids = tok.encode(text, bos=False, special=True)
        assert ids == reference(text, add_special_tokens=False).input_ids, text
        if not text.startswith(CONTROLS[0]):
            assert tok.encode(text, special=True) == reference(text).input_ids, text
    rng = random.Random(2)
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    for _ in range(300):
        ids = [rng.randrange(tok.vocab_size) for _ in range(30)]
        assert tok.decode(ids) == reference.decode(ids, **options)


# ------------------------------------------------------------------------------ configuration files


@pytest.mark.parametrize("kind", ["sp_dir", "json_dir"])
@pytest.mark.parametrize("add", [True, False, None])
def test_add_bos_token(request, tmp_path, kind, add):
    files = {"tokenizer_config__json": {"add_bos_token": add}}
    tok = Tokenizer.load(with_files(request.getfixturevalue(kind), tmp_path, **files))
    assert (tok.encode("a")[0] == tok.bos_id) == (add is not False)


@pytest.mark.parametrize("config, adds", [
    ({}, False), ({"bos_token": CONTROLS[0]}, False), ({"bos_token": CONTROLS[0], "add_bos_token": True}, True),
])  # fmt: skip
def test_json_without_bos(tmp_path, config, adds):
    """Qwen-2's manner: nothing is put before the text, whatever `bos` says, until the config asks for it."""
    tok = Tokenizer.load(write(build_json(tmp_path, bos=False), "tokenizer_config.json", config))
    assert (tok.bos_id is not None) == bool(config) and tok.eos_ids == ()
    assert tok.encode("a") == [tok.bos_id] * adds + tok.encode("a", bos=False)


def test_limits_saved_in_the_file_do_not_cut_the_prompt(tmp_path):
    from tokenizers import Tokenizer as Backend

    file = build_json(tmp_path) / "tokenizer.json"
    backend = Backend.from_file(str(file))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(file))
    text = "hello there " * 20
    assert Tokenizer.load(tmp_path).decode(Tokenizer.load(tmp_path).encode(text)) == text
    assert len(Tokenizer.load(tmp_path).encode("a")) == 2


def test_tokenizer_json_comes_first(sp_dir, tmp_path, capsys):
    build_json(with_files(sp_dir, tmp_path))
    assert isinstance(Tokenizer.load(tmp_path), files.tokenizer.JsonTokenizer)
    assert capsys.readouterr().err == ""
    # tiktoken's format, as LLaMA-3's
    write(tmp_path, "tokenizer.model", "IQ== 0\nIg== 1\nIw== 2\n")
    assert isinstance(Tokenizer.load(tmp_path), files.tokenizer.JsonTokenizer)
    assert capsys.readouterr().err == ""
    write(with_files(sp_dir, tmp_path), "tokenizer.json", "version https://git-lfs")
    assert isinstance(Tokenizer.load(tmp_path), files.tokenizer.SentencePieceTokenizer)
    said = capsys.readouterr().err  # and it says so
    assert said.startswith("note: ") and "tokenizer.json is corrupt" in said
    assert said.endswith("; tokenizer.model is used\n") and said.count("\n") == 1


# ------------------------------------------------------------------------------------------- errors


def assert_refused(path, says):
    with pytest.raises(ValueError, match=says) as caught:
        Tokenizer.load(path)
    assert "\n" not in str(caught.value)


def test_no_tokenizer(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        assert_refused(path, "neither tokenizer.model nor tokenizer.json.*--prompt_ids")


def test_unknown_decoder(tmp_path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders

    file = build_json(tmp_path) / "tokenizer.json"
    for decoder in (decoders.WordPiece(), None):
        backend = Backend.from_file(str(file))
        backend.decoder = decoder
        backend.save(str(file))
        assert_refused(tmp_path, "decoder must be ByteLevel.*not (WordPiece|none)")
