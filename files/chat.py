"""Chat templates: the checkpoint's own, and those of fixed strings.

A template is a Jinja program, which files/jinja.py renders. By default it is the checkpoint's own,
which writes BOS itself. `--chat NAME` takes one of `FIXED`: for checkpoints without a template, and
to repeat the official EAGLE's runs (sources: its evaluation scripts, FastChat's conversation
templates).

`--system TEXT` takes the place of a template's own system message. An empty text leaves it out of a
fixed template; the checkpoint's own gets an empty message. Loaded where there is a template; its
text is read in files/texts.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from files.io import LocalError
from files.texts import NO_TEMPLATE, template_text
from files.tokenizer import Tokenizer
from options import load_part

PROBE = ("A question.", "The answer of the probe.", "Another question.")


# ----------------------------------------------------------------------------------------- fixed

# LLaMA-2's default; the two spaces after "safe." are Meta's
SYSTEM = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, "
    "while being safe.  Your answers should not include any harmful, unethical, racist, sexist, "
    "toxic, dangerous, or illegal content. Please ensure that your responses are socially unbiased "
    "and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of "
    "answering something not correct. If you don't know the answer to a question, please don't "
    "share false information."
)
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


class Fixed(NamedTuple):
    """A template of `--chat NAME`."""

    program: str  # Jinja
    system: str | None = None  # the system message by default


# before each program
ORDER = r"""
{%- for m in messages if m.role != 'system' %}
    {%- if m.role != ['user', 'assistant'][loop.index0 % 2] or loop.last and m.role != 'user' %}
        {{- raise_exception('messages must go user, assistant, ..., user') }}
    {%- endif %}
{%- endfor %}"""
# its text begins with BOS; `encode` adds it to the others. LLaMA-3.1's own has two more lines, with
# dates, before the system message
LLAMA3 = r"""
{{- '<|begin_of_text|>' }}
{%- for m in messages if m.content or m.role != 'system' %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
    {{- m.content if m.role == 'system' else m.content | trim }}
    {{- '<|eot_id|>' }}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"""
LLAMA2 = r"""
{{- '[INST] ' }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ m.content + ' [/INST] ' }}
    {%- elif m.role == 'assistant' %}{{ m.content | trim + ' </s><s>[INST] ' }}
    {%- elif m.content %}{{ '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' }}
    {%- endif %}
{%- endfor %}"""
# Mixtral uses it too
MISTRAL = r"""
{{- '[INST] ' }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ m.content + ' [/INST]' }}
    {%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + '</s>[INST] ' }}
    {%- else %}{{ raise_exception('there is no place for one') }}
    {%- endif %}
{%- endfor %}"""
VICUNA = r"""
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ 'USER: ' + m.content + ' ASSISTANT:' }}
    {%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + '</s>' }}
    {%- elif m.content %}{{ m.content + ' ' }}
    {%- endif %}
{%- endfor %}"""
FIXED = {
    "llama3": Fixed(LLAMA3, SYSTEM),
    "llama2": Fixed(LLAMA2, SYSTEM),
    "mistral": Fixed(MISTRAL),
    "vicuna": Fixed(VICUNA, VICUNA_SYSTEM),
}
CONTROL = re.compile(r"</?s>|<\|\w+\|>")  # the control tokens in these texts


def lacking(name: str, tokenizer: Tokenizer) -> str:
    """Return a control token of a fixed template that a tokenizer lacks; "": it has all."""
    tokens = CONTROL.findall(FIXED[name].program)
    return next((token for token in tokens if tokenizer.id_of(token) is None), "")


# ---------------------------------------------------------------------------------------- reading


def refusal(template: str, reason: Any) -> LocalError:
    """Return the error about a template that cannot be used, one line. template: its title"""
    return LocalError(
        f"{template} {reason}; "
        f"use --chat NAME with one of {', '.join(FIXED)}, or {NO_TEMPLATE} for no chat",
        f"the model's chat template {reason}",
    )


def chat_template(
    path: Path,
    tokenizer: Tokenizer,
    name: str = "",
    system: str | None = None,
    closes: bool = False,
) -> Any:
    """Make the fixed chat template called `name`, or for "" the checkpoint's own.

    path: the checkpoint
    system: the system message; None: the template's own
    closes: the thinking that it opens is closed, as every answer begins with a schema
    Returns: a `files.jinja.ChatTemplate`.
    Raises: ValueError for an unknown name, and when the template is missing or broken.
    """
    if name and name not in FIXED:
        known = ", ".join((*FIXED, NO_TEMPLATE))
        raise ValueError(f"--chat must be one of {known}; got {name}")
    of_tools = None
    if name:
        text = ORDER + FIXED[name].program
        system = FIXED[name].system if system is None else system
    else:
        text = template_text(path)
        of_tools = template_text(path, "tool_use")
    if text is None:
        raise ValueError(
            f"{path} has no chat template; use --chat NAME with one of {', '.join(FIXED)}"
        )
    jinja = load_part("reader", "jinja")  # it needs jinja2, which other checkpoints do without
    try:
        of_tools = None if of_tools is None else jinja.Template(of_tools)
        return jinja.ChatTemplate(
            path, name, jinja.Template(text), of_tools, tokenizer.special, system, closes
        )
    except ValueError as error:
        raise refusal(f"{path}: its chat template", error) from None
