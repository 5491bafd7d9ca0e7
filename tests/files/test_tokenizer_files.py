"""One tokenizer in every set of files that transformers 3 to 5 write.

The ids are those of the package `tokenizers`, whichever files there are.
"""

import json
from pathlib import Path

import pytest
import transformers
from test_tokenizer import TEXTS as PLAIN
from test_tokenizer import train_sp, write
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers.tokenization_utils_sentencepiece import SentencePieceExtractor

from files.texts import template_text
from files.tokenizer import JsonTokenizer, Tokenizer

# text -> (special, lstrip, rstrip)
ADDED = {
    "<|im_end|>": (True, False, False),
    "<|im_start|>": (True, False, False),
    "<|end|>": (True, False, True),
    "<|user|>": (True, True, True),
    "<tool>": (False, True, False),
    "<tool>+": (False, False, True),
}
NAMES = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
TEXTS = [
    "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n",
    "<|user|>\nHello <|end|>\n\n<|user|>\n two  spaces \t<|user|>",
    "a <tool> b<tool>+ \n c <tool><tool>+", "hello</s> there <s>", "hello there", "",
]  # fmt: skip
# a set of files, by its writer -> the files in it
LAYOUTS = {
    "3": ("model", "map", "added_tokens.json"),
    "4, slow": ("model", "map", "added_tokens.json", "decoder"),
    "4, fast": ("model", "json", "map", "decoder"),
    "4, fast, no model": ("json", "map", "decoder"),
    "5": ("json",),
    "5 over 4": ("model", "json", "added_tokens.json"),
    "5 over 3": ("model", "json", "map", "added_tokens.json"),
    "an empty decoder": ("model", "json", "empty decoder"),
    "a json without the tokens": ("plain json", "decoder"),
    "a json without the tokens, and a list": ("plain json", "added_tokens.json"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return train_sp(tmp_path_factory.mktemp("sp"))


def convert(base: Path, legacy: bool, prefix: bool = True) -> Backend:
    """The base model as transformers converts it."""
    vocab, _, merges = SentencePieceExtractor(str(base / "tokenizer.model")).extract()
    options = {"fuse_unk": True, "byte_fallback": True, "unk_token": "<unk>"}
    tok = Backend(models.BPE(vocab=vocab, merges=merges, **options))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tok.decoder = decoders.Sequence(steps + [decoders.Strip(content=" ", left=1)] * prefix)
    if legacy:
        first = [normalizers.Prepend("▁")] * prefix
        tok.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    else:
        scheme = "first" if prefix else "never"
        tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tok.add_special_tokens(["<unk>", "<s>", "</s>"])
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tok


def add_tokens(tok: Backend, strips: bool = True) -> Backend:
    for text, (special, lstrip, rstrip) in ADDED.items():
        sides = {"lstrip": lstrip and strips, "rstrip": rstrip and strips}
        token = AddedToken(text, special=special, normalized=False, **sides)
        (tok.add_special_tokens if special else tok.add_tokens)([token])
    return tok


def write_layout(directory: Path, base: Path, layout: str, legacy: bool) -> Backend:
    """Write the files of a layout. Returns: the tokenizer that they hold."""
    files = LAYOUTS[layout]
    strips = "json" in files or "decoder" in files  # the list of texts cannot say it
    tok = add_tokens(convert(base, legacy), strips)
    if "model" in files:
        (directory / "tokenizer.model").write_bytes((base / "tokenizer.model").read_bytes())
    if "json" in files:
        tok.save(str(directory / "tokenizer.json"))
    if "plain json" in files:
        convert(base, legacy).save(str(directory / "tokenizer.json"))
    size = tok.get_vocab_size() - len(ADDED)
    config = {"legacy": legacy, "add_prefix_space": None}
    special = [text for text, (special, *_) in ADDED.items() if special]
    if "map" in files:  # its names hold
        write(directory, "special_tokens_map.json", NAMES | {"additional_special_tokens": special})
    else:
        config |= NAMES | {"extra_special_tokens": special}
    if "added_tokens.json" in files:
        write(directory, "added_tokens.json", {text: size + n for n, text in enumerate(ADDED)})
    if "decoder" in files:
        config |= NAMES
        config["added_tokens_decoder"] = {
            str(size + n): {"content": text, "special": special, "lstrip": lstrip, "rstrip": rstrip}
            for n, (text, (special, lstrip, rstrip)) in enumerate(ADDED.items())
        }
    if "empty decoder" in files:
        config["added_tokens_decoder"] = {}
    write(directory, "tokenizer_config.json", config)
    return tok


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(capsys, tmp_path, base, layout, legacy):
    reference = write_layout(tmp_path, base, layout, legacy)
    ours = Tokenizer.load(tmp_path)
    assert capsys.readouterr().err == ""
    assert isinstance(ours, JsonTokenizer) == (tmp_path / "tokenizer.json").is_file()
    end = reference.token_to_id("<|im_end|>")
    assert (ours.bos_id, ours.eos_ids, ours.adds_bos) == (1, (end,), True)
    assert ours.vocab_size == reference.get_vocab_size()
    for text in [*TEXTS, *(text for text in PLAIN if not text.startswith(" "))]:
        reference.encode_special_tokens = False
        expected = reference.encode(text).ids
        assert ours.encode(text, special=True) == expected, text
        assert ours.decode(expected).split() == reference.decode(expected).split(), text
        reference.encode_special_tokens = True
        assert ours.encode(text) == [1, *reference.encode(text, add_special_tokens=False).ids], text


@pytest.mark.parametrize("files", ["model", "json", "model and json"])
@pytest.mark.parametrize("wanted, legacy", [(False, False), (True, False), (False, True)])
def test_add_prefix_space(tmp_path, base, files, wanted, legacy):
    vocab, _, merges = SentencePieceExtractor(str(base / "tokenizer.model")).extract()
    config = {"add_prefix_space": wanted, "legacy": legacy}
    reference = transformers.LlamaTokenizer(vocab=vocab, merges=merges, **config)
    if "model" in files:
        (tmp_path / "tokenizer.model").write_bytes((base / "tokenizer.model").read_bytes())
    if "json" in files:  # the file has it the other way
        convert(base, legacy, prefix=not wanted).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", config)
    ours = Tokenizer.load(tmp_path)
    for text in ["hello", "hello<s>there", "<s>hello"]:
        ids = reference(text, add_special_tokens=False).input_ids
        assert ours.encode(text, bos=False, special=True) == ids, text
    ids = ours.encode("hello", bos=False)
    assert ours.decode(ids) == reference.decode(ids) == "hello"


def test_named_templates_of_a_directory_come_first(tmp_path):
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert (template_text(tmp_path), template_text(tmp_path, "tool_use")) == ("a", "b")
    (tmp_path / "additional_chat_templates").mkdir()
    write(tmp_path / "additional_chat_templates", "tool_use.jinja", "c")
    write(tmp_path, "chat_template.jinja", "d")
    assert (template_text(tmp_path), template_text(tmp_path, "tool_use")) == ("d", "c")


def test_a_token_with_another_place_is_refused(tmp_path, base):
    convert(base, legacy=True).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "added_tokens.json", {"<|im_end|>": 9000})
    with pytest.raises(ValueError, match="the token <|im_end|> has the id 9000 beside") as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


def test_named_tokens_keep_what_the_file_says_of_them(tmp_path, base):
    """A name in tokenizer_config.json makes a token special, and changes nothing else of it."""
    tok = convert(base, legacy=True)
    tok.add_tokens([AddedToken("<|end|>", rstrip=True, normalized=False)])
    tok.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"eos_token": {"content": "<|end|>"}})
    ours = Tokenizer.load(tmp_path)
    end = tok.token_to_id("<|end|>")
    assert ours.encode("a<|end|>  \n", bos=False, special=True)[-1] == end
    assert end not in ours.encode("a<|end|>") and ours.decode([end]) == ""
    assert json.loads(ours.json())["added_tokens"][-1]["rstrip"] is True
