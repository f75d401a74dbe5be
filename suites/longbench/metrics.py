"""LongBench's metrics: the score of one response against one reference, 0 to 1. Defined as in upstream's metrics.py."""

from __future__ import annotations

import logging
import re
import string
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

# THUDM/LongBench (MIT), metrics.py: what counts as punctuation in Chinese text.
CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝"
    "～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"\d+")
PARAGRAPH = re.compile(r"(?:Paragraph |段落)(\d+)")
_NO_ENGLISH_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation + CHINESE_PUNCTUATION)
_NOT_CODE = ("`", "#", "//")


def f1(response: str, reference: str) -> float:
    """F1 of the words, ignoring case, punctuation and articles, as in SQuAD."""
    return _f1(_words(response), _words(reference))


def f1_zh(response: str, reference: str) -> float:
    """F1 of the Chinese words that jieba finds, without punctuation."""
    return _f1(_words_zh(response), _words_zh(reference))


def rouge_l(response: str, reference: str) -> float:
    """F of summary-level ROUGE-L, as the library `rouge` computes it: sentences end at full stops."""
    try:
        with _room_to_recurse(len(response.split()) + len(reference.split())):
            scores = _rouge().get_scores(response, reference)
    except ValueError:  # a text with nothing but full stops, or nothing at all
        return 0.0
    return float(scores[0]["rouge-l"]["f"])


def rouge_l_zh(response: str, reference: str) -> float:
    """ROUGE-L of the Chinese words that jieba finds."""
    return rouge_l(" ".join(_jieba().cut(response)), " ".join(_jieba().cut(reference)))


def classification(response: str, reference: str, classes: Sequence[str]) -> float:
    """One over the number of classes that the response names, if the right one is among them; else 0.

    A class whose name is part of the right one's name does not count.
    """
    named = [name for name in classes if name in response and (name == reference or name not in reference)]
    return 1 / len(named) if reference in named else 0.0


def retrieval(response: str, reference: str) -> float:
    """The fraction of the response's numbers that are the reference's paragraph ("Paragraph 3", "段落3")."""
    match = PARAGRAPH.search(reference)
    if match is None:
        raise ValueError(f"the reference {reference!r} names no paragraph")
    return count(response, match[1])


def count(response: str, reference: str) -> float:
    """The fraction of the response's numbers that are the reference."""
    numbers = _NUMBER.findall(response)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def code(response: str, reference: str) -> float:
    """Edit similarity of the reference and the response's first line of code, rounded to hundredths.

    It is 1 - d / (a + b), where d counts the insertions and deletions that turn one line into the other, and a and b
    are their lengths: fuzzywuzzy's ratio where python-Levenshtein is installed.
    """
    from rapidfuzz.distance import Indel

    line = _code_line(response)
    both = len(line) + len(reference)
    return round(100 * ((both - Indel.distance(line, reference)) / both)) / 100 if both else 1.0


def code_difflib(response: str, reference: str) -> float:
    """Edit similarity by difflib's matching blocks, which need not be optimal: fuzzywuzzy's ratio by itself."""
    from difflib import SequenceMatcher

    line = _code_line(response)
    if not line or not reference:
        return float(line == reference)
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100


def first_line(response: str) -> str:
    """The first line after any empty ones."""
    return response.lstrip("\n").split("\n", 1)[0]


def _code_line(response: str) -> str:
    """The first line without a backquote, # or //, after leading empty lines. Blanks are kept."""
    lines = response.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in _NOT_CODE)), "")


def _f1(response: Sequence[str], reference: Sequence[str]) -> float:
    same = (Counter(response) & Counter(reference)).total()
    return 2 * same / (len(response) + len(reference)) if same else 0.0


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_ENGLISH_PUNCTUATION)).split()


def _words_zh(text: str) -> list[str]:
    bare = ("".join(word.lower().translate(_NO_PUNCTUATION).split()) for word in _jieba().cut(text))
    return [word for word in bare if word]


@cache
def _rouge() -> Any:
    from rouge import Rouge

    return Rouge(metrics=["rouge-l"])


@cache
def _jieba() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its regular expressions and of pkg_resources
        import jieba

        jieba.setLogLevel(logging.WARNING)
        jieba.initialize()
    return jieba


@contextmanager
def _room_to_recurse(words: int) -> Iterator[None]:
    """Raise the recursion limit: `rouge` recurses once per word of two sentences, and upstream scores 0 beyond it."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + words)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
