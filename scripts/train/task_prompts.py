"""Make prompts of many kinds from templates: tasks over topics, and long texts with a question.

1. `tasks`: writing, roles, reasoning, sums, code, editing, extraction, science, humanities, facts
   and translation, in turn, each with a topic of its own list, and half of them with a second turn.
2. `long_texts`: parts of the language reference that Python carries as `pydoc_data` (PSF licence),
   of 100 words to the length asked for, with a question or to summarize.
3. `modules`: the standard library, for the headers of its functions.
Every prompt follows from its number, so the first ones are a mixture of all kinds.
Trade-off: a template is poorer than a user's question. It costs nothing, and may be redistributed.
"""

from __future__ import annotations

import itertools
import pydoc_data.topics
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

THINGS = (
    "a lighthouse", "a bakery", "night trains", "bees", "the first day of school", "a long hike",
    "coffee", "an old map", "city parks", "learning to swim", "a broken clock", "rain",
    "a chess club", "public libraries", "growing tomatoes", "a lost dog", "working from home",
    "winter in the mountains", "a street market", "recycling", "a power cut", "a jazz concert",
    "moving to a new town", "bicycles", "a spelling contest", "sleep", "an empty theatre",
    "volunteering", "a fishing village", "video calls", "a museum of toys", "electric cars",
)  # fmt: skip
SCIENCE = (
    "photosynthesis", "tides", "vaccines", "black holes", "plate tectonics", "batteries",
    "DNA", "the greenhouse effect", "antibiotics", "friction", "the water cycle", "semiconductors",
    "evolution", "sound", "lightning", "the immune system", "nuclear fusion", "magnets",
    "supply and demand", "inflation", "probability", "prime numbers", "entropy", "catalysts",
)  # fmt: skip
HISTORY = (
    "the Roman Republic", "the printing press", "the Silk Road", "the Industrial Revolution",
    "the French Revolution", "the Renaissance", "ancient Egypt", "the Cold War", "the moon landing",
    "the Magna Carta", "utilitarianism", "Stoicism", "the Enlightenment", "the Black Death",
    "Gothic architecture", "free trade", "the United Nations", "the Ottoman Empire",
)  # fmt: skip
PLACES = (
    "Norway", "Brazil", "Kenya", "Japan", "Canada", "Portugal", "India", "Mexico", "Egypt",
    "New Zealand", "Iceland", "Vietnam", "Peru", "Greece", "Morocco", "Chile", "Poland",
)  # fmt: skip
ROLES = (
    "a ship's captain", "a chef", "a detective", "a maths teacher", "a travel guide", "a nurse",
    "a space engineer", "a gardener", "a medieval knight", "a sports coach", "a librarian",
)  # fmt: skip
NAMES = ("Ana", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jack", "Kim")
CODE = (
    "reverses a linked list", "checks whether a string is a palindrome", "merges two sorted lists",
    "counts the words of a file", "finds the longest common prefix of strings", "sorts by bubbles",
    "removes duplicates and keeps the order", "computes the n-th Fibonacci number",
    "parses a date such as 2024-05-17", "validates an email address", "rotates a matrix",
    "groups words that are anagrams", "converts Roman numerals", "finds the median of a list",
    "searches a sorted list by halving", "flattens nested lists", "implements a stack",
)  # fmt: skip
LANGUAGES = ("Python", "JavaScript", "C++", "Java", "Go", "Rust")
WORDS = ("total", "values", "result", "items", "index", "count", "name", "data")
SENTENCES = (
    "Das Haus am See ist seit vielen Jahren leer.", "Morgen beginnt der Markt um acht Uhr.",
    "Die Kinder spielen im Garten, obwohl es regnet.", "Le train pour Lyon part dans dix minutes.",
    "Elle a perdu ses clés pendant la fête.", "El museo cierra los lunes por la tarde.",
    "Mi hermana trabaja en un hospital pequeño.", "Der Zug nach Berlin hat heute Verspätung.",
    "Wir haben den Brief erst gestern erhalten.", "Nous cherchons un appartement près du parc.",
)  # fmt: skip
EDITED = """def average({0}):
    {1} = 0
    for number in {0}:
        {1} += number
    return {1} / len({0})


def spread({0}):
    middle = average({0})
    {1} = 0
    for number in {0}:
        {1} += (number - middle) ** 2
    return ({1} / len({0})) ** 0.5"""

# (kind, first turn, second turn); the fields name a list of WHERE each
TEMPLATES = (
    ("writing", "Write a short story about {thing}.", "Now write a different ending for it."),
    ("role", "You are {role}. A guest asks you about {thing}. Answer in your role.",
     "The guest does not believe you. Convince them in three sentences."),
    ("reasoning", "{name} is older than {other}, and {other} is older than {third}. Who is the "
     "youngest? Explain.", "If {third} is {number} years old, how old can {name} be?"),
    ("sum", "{name} buys {number} apples for {small} dollars each and gives {small} of them to "
     "{other}. What do the apples cost, and how many are left?",
     "What would {name} pay with a discount of 10 percent?"),
    ("code", "Write a function in {language} that {code}.", "Add tests for it."),
    ("science", "Explain {science} to a student of fifteen years.",
     "Name two common misunderstandings about it."),
    ("humanities", "Discuss the causes and effects of {history}.",
     "Summarize your answer in five bullet points."),
    ("email", "Write a polite email to a colleague about {thing}.", "Make it half as long."),
    ("edit", "Rename the variable `{word}` to `{word}_new` in this file. Answer with the whole "
     "file only.\n\n```python\n{edited}\n```", ""),
    ("extraction", "Give the names, the places and the numbers of this text as a JSON object: "
     "{name} and {other} drove {number} miles through {place}, where they met {third} and stayed "
     "for {small} days.", "Give the same as a table in Markdown."),
    ("plan", "Plan a trip of {small} days to {place} for a family.",
     "Change the plan for a rainy week."),
    ("comparison", "Compare {science} with {science2}. What do they have in common?", ""),
    ("opinion", "What are the advantages and disadvantages of {thing}?",
     "Which of them matters most, and why?"),
    ("facts", "What is the capital of {place}, and what is the country known for?", ""),
    ("article", "Write a news article of four paragraphs about {thing} in {place}.",
     "Write a headline and a summary of one sentence for it."),
    ("poem", "Write a poem about {thing}, in four stanzas.", ""),
    ("howto", "Give me step by step instructions: how does a beginner start with {thing}?", ""),
    ("translation", "Translate to English: {sentence}", ""),
    ("review", "Write a review of a book about {history}, for a newspaper.", ""),
    ("list", "List ten ideas for a blog about {thing} and {science}.",
     "Write the first paragraph for the third idea."),
)  # fmt: skip
WHERE = {
    "thing": THINGS, "science": SCIENCE, "science2": SCIENCE[5:] + SCIENCE[:5], "history": HISTORY,
    "place": PLACES, "role": ROLES, "name": NAMES, "other": NAMES[3:] + NAMES[:3],
    "third": NAMES[6:] + NAMES[:6], "language": LANGUAGES, "code": CODE, "word": WORDS,
    "sentence": SENTENCES, "number": tuple(range(12, 75, 7)), "small": tuple(range(3, 10)),
}  # fmt: skip
QUESTIONS = (
    "Summarize: {}",
    "{}\n\nSummarize the text above in three sentences.",
    "Read this text and answer: what is it about, and what are its main rules?\n\n{}",
    "{}\n\nList the most important points of the text above.",
    "Explain the following text to a beginner:\n\n{}",
)
FEWEST_WORDS = 100  # of a long text
PASSES = 4  # over the reference


def tasks() -> Iterator[list[str]]:
    """Yield the turns of every prompt of the templates once, the kinds in turn."""
    rounds = max(len(values) for values in WHERE.values())
    seen = set()
    for number, (kind, (_, first, second)) in itertools.product(
        range(rounds), enumerate(TEMPLATES)
    ):
        fields = {key: values[(number + kind) % len(values)] for key, values in WHERE.items()}
        other = WORDS[(number + kind + 3) % len(WORDS)]
        fields["edited"] = EDITED.format(fields["word"], other)
        turns = [first.format(**fields)]
        if second and (number + kind) % 2 == 0:
            turns.append(second.format(**fields))
        if turns[0] not in seen:
            yield turns
        seen.add(turns[0])


def long_texts(most_words: int) -> Iterator[list[str]]:
    """Yield parts of Python's language reference with a question, of all lengths in turn.

    The reference is cut PASSES times, at other words each time.
    most_words: of a part; the lengths go in eight steps from FEWEST_WORDS up to it
    """
    texts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    words = [piece for text in texts for piece in re.findall(r"\S+\s*", text)]
    number = 0
    for begin in range(0, PASSES * FEWEST_WORDS, FEWEST_WORDS):
        while True:
            share = (5 * number % 8 + 1) / 8  # the steps in another order: 1, 6, 3, 8, ...
            size = round(FEWEST_WORDS + share * max(most_words - FEWEST_WORDS, 0))
            if begin + size > len(words):
                break
            text = "".join(words[begin : begin + size]).strip()
            yield [QUESTIONS[number % len(QUESTIONS)].format(text)]
            begin += size
            number += 1


def modules() -> Iterator[str]:
    """Yield the texts of Python's standard library, without its tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "encodings", "pydoc_data"}
    skip |= {"site-packages", "__pycache__", "lib2to3"}
    for file in sorted(root.rglob("*.py")):
        if skip & set(file.relative_to(root).parts):
            continue
        try:
            yield file.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few files declare another encoding
            continue
