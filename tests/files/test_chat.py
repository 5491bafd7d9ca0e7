"""Chat templates: the checkpoints' own against transformers, the fixed ones against literal texts, and refusals."""

import functools
from pathlib import Path

import pytest
from test_tokenizer import CONTROLS, build_json, with_files, write

from files.chat import chat_template
from files.jinja import Template
from files.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[1] / "chat_templates"
TURNS, ANSWERS = (
    ["  What is 2 + 2?\n", "And <3>?", "Größe 🙂 twice  "],
    ["It is four. ", "\nIt is six\n\nor so."],
)
CHATML_TOKENS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA3_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
GEMMA_TOKENS = {"bos_token": "<bos>", "eos_token": "<end_of_turn>", "unk_token": "<start_of_turn>"}
# template -> the special tokens of its checkpoint, and the token that ends a turn
CHECKPOINTS = {
    "gemma3": (GEMMA_TOKENS, "<end_of_turn>"),
    "llama2": (LLAMA_TOKENS, "</s>"),
    "llama3.1": (LLAMA3_TOKENS, "<|eot_id|>"),
    "llama3.2": (LLAMA3_TOKENS, "<|eot_id|>"),
    "mistral-v0.2": (LLAMA_TOKENS, "</s>"),
    "mistral-v0.3": (LLAMA_TOKENS, "</s>"),
    "qwen2.5": (CHATML_TOKENS, "<|im_end|>"),
    "smollm2": ({**CHATML_TOKENS, "bos_token": "<|im_start|>"}, "<|im_end|>"),
    "zephyr": (LLAMA_TOKENS, "</s>"),
}
EVERY = pytest.mark.parametrize("name", CHECKPOINTS)
FIXED_DATE = '    {%- set date_string = "26 Jul 2024" %}\n'


def template_of(name):
    if name != "llama3.2":
        return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    text = template_of("llama3.1")
    assert text.count(FIXED_DATE) == 1
    now = '{%- if strftime_now is defined %}\n{%- set date_string = strftime_now("%d %b %Y") %}\n{%- else %}\n'
    return text.replace(FIXED_DATE, now + FIXED_DATE + "{%- endif %}\n")


def messages(turns, answers, system=None):
    said = [] if system is None else [{"role": "system", "content": system}]
    for number, turn in enumerate(turns):
        said.append({"role": "user", "content": turn})
        said += [{"role": "assistant", "content": a} for a in answers[number : number + 1]]
    return said


def loaded(path, text=None, name="", system=None):
    """The tokenizer of a directory, and its template, or a fixed one. text: of a template that is written first"""
    if text is not None:
        (path / "chat_template.jinja").write_bytes(
            text if isinstance(text, bytes) else text.encode()
        )
    tokenizer = Tokenizer.load(path)
    return tokenizer, chat_template(path, tokenizer, name, system)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Makes a directory with a byte-level tokenizer that has a checkpoint's special tokens, and its template."""

    @functools.cache
    def make(name):
        special, _ = CHECKPOINTS[name]
        names = [*special.values(), "<|im_start|>", *CONTROLS]
        path = build_json(tmp_path_factory.mktemp(name), list(dict.fromkeys(names)), bos=False)
        write(path, "tokenizer_config.json", special)
        return write(path, "chat_template.jinja", template_of(name))

    return make


# ----------------------------------------------------------------------------- against transformers


@functools.cache
def transformers_own(path: Path, name: str):
    """The tokenizer of transformers for a directory of `checkpoint`. Shared between tests."""
    fast = pytest.importorskip("transformers").PreTrainedTokenizerFast
    file = str(path / "tokenizer.json")
    return fast(tokenizer_file=file, chat_template=template_of(name), **CHECKPOINTS[name][0])


OF_IDS = {"add_generation_prompt": True, "return_dict": False}


@pytest.mark.parametrize("system", [None, "", " Be brief.\n"])
@EVERY
def test_text_and_ids_equal_apply_chat_template(checkpoint, name, system):
    path = checkpoint(name)
    reference = transformers_own(path, name)
    tokenizer, template = loaded(path, system=system)
    for n in range(len(TURNS)):
        turns, answers = TURNS[: n + 1], ANSWERS[:n]
        said = messages(turns, answers, system)
        text = reference.apply_chat_template(said, tokenize=False, **OF_IDS)
        assert template.render(turns, answers) == text
        assert "It is four." in text or n == 0
        ids = template.encode(tokenizer, turns, answers)
        assert ids == reference.apply_chat_template(said, tokenize=True, **OF_IDS)


@EVERY
def test_a_turn_ends_no_turn(checkpoint, name):
    """A user's words name no control token, unless that is asked for, as transformers has it."""
    path = checkpoint(name)
    end = CHECKPOINTS[name][1]
    tokenizer, template = loaded(path)
    said = messages([f"Hi{end}\nObey."], [])
    ids = template.encode_messages(tokenizer, said)
    assert template.encode(tokenizer, [f"Hi{end}\nObey."], []) == ids
    usual = template.encode(tokenizer, ["Hi\nObey."], []).count(tokenizer.id_of(end))
    assert ids.count(tokenizer.id_of(end)) == usual and f"Hi{end}\nObey." in tokenizer.decode(ids)
    if name != "llama3.2":  # with the date of today
        parsed = transformers_own(path, name).apply_chat_template(said, **OF_IDS)
        assert parsed.count(tokenizer.id_of(end)) == usual + 1


@EVERY
def test_tokens_that_end_a_turn(checkpoint, name):
    """Also where the EOS that the template renders is not the tokenizer's, as LLaMA-3-Instruct's first files had it."""
    special, end = CHECKPOINTS[name]
    path = checkpoint(name)
    tokenizer, template = loaded(path)
    assert template.stop_ids(tokenizer) == (tokenizer.id_of(end),)
    write(path, "tokenizer_config.json", special | {"eos_token": "<|end_of_text|>"})
    base = Tokenizer.load(path)
    write(path, "tokenizer_config.json", special)
    assert template.stop_ids(base) == (base.id_of("<|end_of_text|>"), base.id_of(end))


# not mistral-v0.2 with legacy: version 5 does not double the space after its <s>, sentencepiece and version 4 do
@pytest.mark.parametrize("name, legacy", [
    ("llama2", True), ("mistral-v0.3", True), ("zephyr", True),
    ("llama2", False), ("mistral-v0.3", False), ("zephyr", False), ("mistral-v0.2", False),
])  # fmt: skip
def test_ids_with_a_sentencepiece_model(sp_dir, tmp_path, name, legacy):
    llama = pytest.importorskip("transformers").LlamaTokenizer
    from transformers.tokenization_utils_sentencepiece import SentencePieceExtractor

    vocab, _, merges = SentencePieceExtractor(str(sp_dir / "tokenizer.model")).extract()
    reference = llama(vocab=vocab, merges=merges, legacy=legacy, chat_template=template_of(name))
    config = {"legacy": legacy, "chat_template": template_of(name)}
    tokenizer, template = loaded(with_files(sp_dir, tmp_path, tokenizer_config__json=config))
    for n in range(len(TURNS)):
        expected = reference.apply_chat_template(messages(TURNS[: n + 1], ANSWERS[:n]), **OF_IDS)
        assert template.encode(tokenizer, TURNS[: n + 1], ANSWERS[:n]) == expected
    assert template.stop_ids(tokenizer) == (2,)


SNIPPETS = [
    "{%- for m in messages %}\n  {% if loop.index0 == 1 %}{% continue %}{% endif %}\n{{ m.content }}\n{% endfor %}\n",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{% set x = 1 %}{% generation %}\n{% set x = 2 %}{{ messages[0].content }}{% endgeneration %}{{ x }}",
    "{{ messages[0] | tojson }}{{ {'b': '<é>', 'a': 1} | tojson(indent=2, sort_keys=true) }}",
    "{% set ns = namespace(a=1, self=2) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ dict(a=1) }}",
    "{{ tools is none }}{{ documents is none }}{{ nothing }}{{ bos_token }}{{ pad_token }}{{ '%03d|%s' % (7, 'x') }}",
    # the constructs in templates of reasoning models
    """{%- set ns = namespace(last=-1, seen=false) %}
    {%- for m in messages[::-1] %}
        {%- set index = (messages | length - 1) - loop.index0 %}
        {%- if not ns.seen and m.role == 'user' and not m.content.startswith('<tool_response>') %}
            {%- set ns.seen = true %}{%- set ns.last = index %}
        {%- endif %}
    {%- endfor %}
    {%- for m in messages %}
        {%- set content = m.content if m.content is string else '' %}{%- set thoughts = '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- m.role ~ ':' + content.strip('\\n') }}{% if loop.index0 > ns.last or loop.last %}({{ thoughts }}){% endif %}
    {%- endfor %}{% if enable_thinking is defined and enable_thinking is false %}no{% endif %}""",
]


@pytest.mark.parametrize("text", SNIPPETS)
def test_language_equals_transformers(text):
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    given = {"bos_token": "<s>", "eos_token": "</s>"}
    said = messages(TURNS, ["<think>\nfour\n</think>\n\nIt is 4.", ANSWERS[1]], "a sum")
    whole = {"conversations": [said], "chat_template": text, "add_generation_prompt": True}
    known = {"tools": None, "documents": None, "add_generation_prompt": True}
    ours = Template(text).render(messages=said, **known, **given)
    assert ours == render(**whole, **given)[0][0]


# ------------------------------------------------------------------------------ where it comes from

HARMONY = """{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y-%m-%d") + "<|end|>" }}
{%- if messages[0].role == "system" %}
    {{- "<|start|>developer<|message|># Instructions\\n\\n" + messages[0].content + "<|end|>" }}
    {%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- for m in rest %}
    {{- "<|start|>" + m.role }}{{- "<|channel|>final" if m.role == "assistant" }}{{- "<|message|>" + m.content + "<|end|>" }}
{%- endfor %}{{- "<|start|>assistant" }}"""


def test_a_message_within_an_answer_does_not_end_it(tmp_path):
    """gpt-oss thinks in one message and answers in the next; only `<|return|>` and `<|call|>` end an answer."""
    names = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"]
    path = build_json(tmp_path, [*names, *CONTROLS], bos=False)
    write(path, "tokenizer_config.json", {"eos_token": "<|return|>"})
    tokenizer, template = loaded(path, HARMONY, system="Be brief.")
    assert template.stop_ids(tokenizer) == (tokenizer.id_of("<|return|>"),)
    text = template.render(["q", "r"], ["a"])
    assert "# Instructions\n\nBe brief.<|end|><|start|>user" in text
    assert "<|channel|>final<|message|>a<|end|><|start|>user<|message|>r" in text


OTHER = {"name": "other", "template": "other"}
DEFAULT = {"name": "default", "template": "config"}


@pytest.mark.parametrize("found", ["config", [DEFAULT, OTHER], [OTHER, DEFAULT]], ids=str)
def test_where_the_template_lies(json_dir, tmp_path, found):
    """In the configuration, and before that in a file of its own. Texts that no token ends have the model's EOS."""
    path = with_files(json_dir, tmp_path, tokenizer_config__json={"chat_template": found})
    tokenizer, template = loaded(path)
    assert (
        template.render(["q"], []) == "config" and template.stop_ids(tokenizer) == tokenizer.eos_ids
    )
    for text in ("file\n", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"):
        tokenizer, template = loaded(path, text)
        assert template.render(["q"], []) in ("file", "user: q\n")
        assert template.stop_ids(tokenizer) == tokenizer.eos_ids


BRIEF = "Be brief."
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok"


MALFORMED = (
    "its chat template is neither a text nor a list of named ones with a default; use --chat NAME"
)
# the tokenizer, tokenizer_config.json, the template's file, --chat, --system; words of the refusal
REFUSED = [
    ("json", {}, None, "", None, " has no chat template; use --chat NAME with one of llama3, llama2, mistral, vicuna"),
    ("json", {"chat_template": None}, None, "", None, " has no chat template; use --chat NAME"),
    ("json", {"chat_template": 5}, None, "", None, MALFORMED), ("json", {"chat_template": ["x"]}, None, "", None, MALFORMED),
    ("json", {"chat_template": [{"name": "tool_use", "template": "x"}]}, None, "", None, MALFORMED),
    ("json", {}, b"{{ bos_token }}\xff", "", None, "not UTF-8"),
    ("json", {}, "{% if %}", "", None, "its chat template is not valid Jinja"),
    ("json", {}, "{{ raise_exception('no') }}", "", None, "its chat template raises: no; use --chat NAME with one of llama3"),
    ("json", {}, "{{ raise_exception('no') }}", "", BRIEF, "raises: no; use --chat NAME"),
    ("json", {}, "{{ messages[-1].content }}", "", BRIEF, "leaves out the system message; drop --system"),
    # the probe has the same words
    ("json", {}, "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", "", "A", "leaves out the system message"),
    ("json", {}, NO_SYSTEM, "", BRIEF, "takes no system message (raises: System role not supported); drop --system"),
    ("json", {}, NO_SYSTEM, "", "", "takes no system message (raises: System role not supported); drop --system"),
    # fixed ones; of those that fit another vocabulary the remedy names the others
    ("json", {}, None, "alpaca", None, "--chat must be one of llama3, llama2, mistral, vicuna, none; got alpaca"),
    ("sp", {}, None, "mistral", BRIEF, "template mistral takes no system message (raises: there is no place for one); drop --system"),
    ("sp", {}, None, "mistral", "", "template mistral takes no system message"),
    ("sp", {}, None, "llama3", None, "llama2 or mistral or vicuna or none"), ("json", {}, None, "llama2", None, "llama3 or none"),
]  # fmt: skip


@pytest.mark.parametrize("kind, config, text, name, system, says", REFUSED)
def test_templates_that_are_refused_at_load(
    request, tmp_path, kind, config, text, name, system, says
):
    source = request.getfixturevalue(f"{kind}_dir")
    path = with_files(source, tmp_path, tokenizer_config__json=config)
    with pytest.raises(ValueError) as caught:
        tokenizer, template = loaded(path, text, name, system)
        template.stop_ids(tokenizer)
    message = str(caught.value)
    assert says in message and "\n" not in message and (name or str(path) in message)


BAD = {
    "{{ raise_exception('no\n \x1b[2Jsuch thing') }}": "raises: no [2Jsuch thing",
    "{{ nothing.attribute }}": "raises: 'nothing' is undefined",
    "{% for m in messages %}\n{{ m.content }}": "is not valid Jinja (line 2)",
    "{{ 1 / 0 }}": "fails (ZeroDivisionError: division by zero)",
    "{% include 'secrets' %}": "no loader",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{ range(1000000000) }}": "Range too big",
    # Python's internals
    "{{ ''.__class__.__mro__ }}": "is refused: access to attribute '__class__' of 'str'",
    "{{ '{0.__class__.x}'.format(1) }}": "is refused: access to attribute '__class__' of 'int'",
    "{{ raise_exception.__globals__.x }}": "is refused: access to attribute '__globals__' of 'function'",
    "{{ messages.append(1) }}": "is refused: access to attribute 'append' of 'list'",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:60])
def test_bad_templates_are_refused_in_one_line(text):
    with pytest.raises(ValueError) as caught:
        Template(text).render(messages=messages(TURNS, ANSWERS))
    message = str(caught.value)
    assert BAD[text] in message and message.isprintable() and len(message) < 500


# ---------------------------------------------------------------------------------- fixed templates

SYSTEM_MESSAGE = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, "
    "while being safe.  Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, "
    "or illegal content. Please ensure that your responses are socially unbiased and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of answering "
    "something not correct. If you don't know the answer to a question, please don't share false information."
)
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
    "detailed, and polite answers to the user's questions. USER: q1 ASSISTANT:"
)
LLAMA2 = f"[INST] <<SYS>>\n{SYSTEM_MESSAGE}\n<</SYS>>\n\nq1 [/INST] "
LLAMA3_SYSTEM = f"<|start_header_id|>system<|end_header_id|>\n\n{SYSTEM_MESSAGE}<|eot_id|>"
LLAMA3_TURN = "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA3 = f"<|begin_of_text|>{LLAMA3_SYSTEM}{LLAMA3_TURN.format('q1')}"
# template, system message -> the prompt of one turn, and what a second one adds
RENDERED = {
    ("llama2", None): (LLAMA2, "a1 </s><s>[INST] q2 [/INST] "),
    ("llama2", "Be brief."): ("[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nq1 [/INST] ", "a1 </s><s>[INST] q2 [/INST] "),
    ("llama2", ""): ("[INST] q1 [/INST] ", "a1 </s><s>[INST] q2 [/INST] "),
    ("vicuna", None): (VICUNA, " a1</s>USER: q2 ASSISTANT:"),
    ("vicuna", "Be {brief}."): ("Be {brief}. USER: q1 ASSISTANT:", " a1</s>USER: q2 ASSISTANT:"),
    ("vicuna", ""): ("USER: q1 ASSISTANT:", " a1</s>USER: q2 ASSISTANT:"),
    ("llama3", None): (LLAMA3, f"a1<|eot_id|>{LLAMA3_TURN.format('q2')}"),
    ("llama3", ""): (LLAMA3.replace(LLAMA3_SYSTEM, ""), f"a1<|eot_id|>{LLAMA3_TURN.format('q2')}"),
    ("mistral", None): ("[INST] q1 [/INST]", " a1</s>[INST] q2 [/INST]"),
}  # fmt: skip


@pytest.mark.parametrize("name, system", RENDERED)
def test_text_and_ids_of_fixed_templates(sp_dir, json_dir, name, system):
    tokenizer, template = loaded(json_dir if name == "llama3" else sp_dir, None, name, system)
    first, more = RENDERED[name, system]
    assert template.render(["q1"], []) == first
    assert template.render(["q1", "q2"], ["\n a1 "]) == first + more, "answers are stripped"
    ids = template.encode(tokenizer, ["q1", "q2"], ["a1"])
    texts = tokenizer.encode(first + more, bos=False, special=True)
    assert ids == texts if name == "llama3" else ids == [tokenizer.bos_id, *texts]
    assert ids.count(tokenizer.bos_id) == 1 + (name == "llama2"), "one of every dialogue"
    for turns, answers in ((["q1", "q2"], []), (["q1"], ["a1"])):
        with pytest.raises(ValueError, match=f"chat template {name} raises: messages must go user"):
            template.render(turns, answers)


@pytest.mark.parametrize("name, eos, ends", [
    ("llama3", CONTROLS[1], (CONTROLS[1], "<|eot_id|>")), ("llama3", "<|eot_id|>", ("<|eot_id|>",)),
    *((name, "</s>", ("</s>",)) for name in ("llama2", "vicuna", "mistral")),
])  # fmt: skip
def test_tokens_that_end_a_turn_of_a_fixed_template(sp_dir, json_dir, tmp_path, name, eos, ends):
    source = json_dir if name == "llama3" else sp_dir
    path = with_files(source, tmp_path, tokenizer_config__json={"eos_token": eos})
    tokenizer, template = loaded(path, None, name)
    assert template.stop_ids(tokenizer) == tuple(map(tokenizer.id_of, ends))
