"""The thirteen tasks: parameters, token limits, metrics and wordings, as RULER has them. Data only.

Facts from NVIDIA/RULER (Apache-2.0): scripts/synthetic.yaml, scripts/data/synthetic/*.py and
scripts/eval/synthetic/constants.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from evictbench.suite import Protocol

VERSION = 2  # of the prompts: raise it when any of them changes (the task YAML states it too)

UPSTREAM = "NVIDIA/RULER at c3f5e3b"
"""The repository and the commit (c3f5e3b4f87f97e048793bb510a3a6b19a46bf3a, 2026-07-22) whose prompts version 2 has."""

DEFAULT_CONTEXT, DEFAULT_LIMIT = 4096, 100
"""Tokens of a sample, and samples of a task, where a request states none."""

Haystack = Literal["noise", "needles", "essay"]
Kind = Literal["words", "numbers", "uuids"]
Metric = Literal["all", "part"]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kinds} for {key} is: {value}."
DOCUMENT = "Document {number}:\n{text}"


@dataclass(frozen=True)
class Wording:
    """A prompt in three parts: up to the haystack; from the question on; what the answer begins with.

    The haystack stands between `before` and `question`, with `gap` after it.
    """

    before: str
    gap: str
    question: str
    answer: str


ONE_NEEDLE = Wording(
    before="A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n",
    gap="\n",
    question="What is the special magic {kind} for {query} mentioned in the provided text?",
    answer="The special magic {kind} for {query} mentioned in the provided text is",
)
MANY_NEEDLES = Wording(
    before="Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind}s afterwards.\n",
    gap="\n",
    question="What are all the special magic {kind}s for {query} mentioned in the provided text?",
    answer="The special magic {kind}s for {query} mentioned in the provided text are",
)
TRACKING = Wording(
    before="Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
    gap="\n",
    question="Question: Find all variables that are assigned the value {query} in the text above.",
    answer="Answer: According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assigned the value {query}, they are:",
)
COMMON_WORDS = Wording(
    before="Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n",
    gap="\n",
    question="Question: What are the 10 most common words in the above list?",
    answer="Answer: The top 10 words that appear most often in the list are:",
)
FREQUENT_WORDS = Wording(
    before="Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. ",
    gap="\n",
    question="Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?",
    answer="Answer: According to the coded text above, the three most frequently appeared words are:",
)
QA = Wording(
    before="Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\nThe following are given documents.\n\n",
    gap="\n\n",
    question="Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\nQuestion: {query}",
    answer="Answer:",
)


@dataclass(frozen=True)
class Needles:
    """Needles in a haystack: `keys` keys with `values` values each, of which `queries` keys are asked for."""

    haystack: Haystack
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


@dataclass(frozen=True)
class Tracking:
    """One chain of variable assignments, `hops` long, in noise, after an example of `example_tokens` tokens."""

    hops: int = 4
    name_letters: int = 5
    example_name_letters: int = 3
    example_tokens: int = 500
    example_least_noise: int = 5


@dataclass(frozen=True)
class WordList:
    """How often the common and the other words stand in a list, and the same for the example before it."""

    common: int
    other: int
    example_words: int
    example_common: int
    example_other: int


@dataclass(frozen=True)
class CommonWords:
    """A numbered list in which `count` words are common; contexts below `short_below` use the short list."""

    count: int = 10
    long: WordList = WordList(common=30, other=3, example_words=40, example_common=10, example_other=3)
    short: WordList = WordList(common=6, other=1, example_words=20, example_common=3, example_other=1)
    short_below: int = 4096


@dataclass(frozen=True)
class FrequentWords:
    """Coded words with Zipf frequencies rank ** -alpha; rank 1 is noise, ranks 2 to 4 are the answers."""

    alpha: float = 2.0
    letters: int = 6
    answers: int = 3
    noise: str = "..."
    tokens_per_word: int = 50  # the vocabulary has a word for each 50 tokens of the prompt


@dataclass(frozen=True)
class Questions:
    """Questions about documents among other documents."""

    dataset: Literal["squad", "hotpotqa"]


Settings = Needles | Tracking | CommonWords | FrequentWords | Questions


@dataclass(frozen=True)
class Task:
    """One task: what it hides, how many tokens an answer may have, and how an answer is scored."""

    settings: Settings
    answer_tokens: int
    metric: Metric = "all"


TASKS: dict[str, Task] = {
    "niah_single_1": Task(Needles("noise"), 128),
    "niah_single_2": Task(Needles("essay"), 128),
    "niah_single_3": Task(Needles("essay", value="uuids"), 128),
    "niah_multikey_1": Task(Needles("essay", keys=4), 128),
    "niah_multikey_2": Task(Needles("needles"), 128),
    "niah_multikey_3": Task(Needles("needles", key="uuids", value="uuids"), 128),
    "niah_multivalue": Task(Needles("essay", values=4), 128),
    "niah_multiquery": Task(Needles("essay", keys=4, queries=4), 128),
    "vt": Task(Tracking(), 30),
    "cwe": Task(CommonWords(), 120),
    "fwe": Task(FrequentWords(), 50),
    "qa_1": Task(Questions("squad"), 32, "part"),
    "qa_2": Task(Questions("hotpotqa"), 32, "part"),
}


@dataclass(frozen=True)
class Version:
    """What differs between the versions of the generator; all else, the draws included, is the same in all of them.

    name: in a result's data. tracking: the wording of vt. answer_counts: whether the length of which fwe's vocabulary
    is a share has the answer's tokens in it.
    """

    name: str
    tracking: Wording
    answer_counts: bool


VERSIONS: dict[str, Version] = {
    "2": Version(f"generator version 2, {UPSTREAM}", TRACKING, answer_counts=False),
    # Before upstream's corrections of 2025-05-13 (4a216f4, vt) and 2025-06-25 (9f1c84d, fwe).
    "1": Version(
        "generator version 1",
        replace(TRACKING, answer=TRACKING.answer.replace("assigned", "assgined")),
        answer_counts=True,
    ),
}
"""By number, as `--suite-version` takes it; the first is the default."""

PROTOCOLS: dict[str, Protocol] = {
    "default": Protocol(source="", tasks=tuple(TASKS)),
    "indexmem_pp": Protocol(
        source="IndexMem++, Chooovy/kvpress at 5a5826ed (docs/paper_protocols.md, configs/evaluation/ruler.yaml): "
        "8,192 tokens, 500 samples of a task, the context compressed without its question, no thoughts, greedy; at a "
        "compression of c, (1 - c) of the 8,192 tokens are entries",
        tasks=tuple(TASKS),
        thinking=False,
        question="unseen",
        context=8192,
        limit=500,
        share_of="context",
    ),
}
