"""lm-eval `process_results` of each metric: the best score over a document's references, and facts about the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import metrics

Document = Mapping[str, Any]
Results = Sequence[str]
Grade = dict[str, float]


def f1(doc: Document, results: Results) -> Grade:
    """Word F1."""
    return _best(doc, results[0], metrics.f1)


def f1_zh(doc: Document, results: Results) -> Grade:
    """Word F1 of Chinese text."""
    return _best(doc, results[0], metrics.f1_zh)


def first_line_f1(doc: Document, results: Results) -> Grade:
    """Word F1 of the response's first line."""
    return _best(doc, metrics.first_line(results[0]), metrics.f1)


def rouge_l(doc: Document, results: Results) -> Grade:
    """ROUGE-L."""
    return _best(doc, results[0], metrics.rouge_l)


def rouge_l_zh(doc: Document, results: Results) -> Grade:
    """ROUGE-L of Chinese text."""
    return _best(doc, results[0], metrics.rouge_l_zh)


def first_line_rouge_l(doc: Document, results: Results) -> Grade:
    """ROUGE-L of the response's first line."""
    return _best(doc, metrics.first_line(results[0]), metrics.rouge_l)


def classification(doc: Document, results: Results) -> Grade:
    """The class named in the response's first line."""

    def named(response: str, reference: str) -> float:
        return metrics.classification(response, reference, doc["all_classes"])

    return _best(doc, metrics.first_line(results[0]), named)


def retrieval(doc: Document, results: Results) -> Grade:
    """The number of the right paragraph."""
    return _best(doc, results[0], metrics.retrieval)


def count(doc: Document, results: Results) -> Grade:
    """The right number."""
    return _best(doc, results[0], metrics.count)


def code(doc: Document, results: Results) -> Grade:
    """Edit similarity of the next line of code. score_difflib: by difflib, the other measure in use."""
    other = _best(doc, results[0], metrics.code_difflib)["score"]
    return {**_best(doc, results[0], metrics.code), "score_difflib": other}


def _best(doc: Document, response: str, metric: Callable[[str, str], float]) -> Grade:
    """score: in [0, 1]. cut: 1 where the prompt was cut in the middle. words: the record's own length."""
    score = max(metric(response, reference) for reference in doc["answers"])
    return {"score": score, "cut": float(doc["cut"]), "words": float(doc["words"])}
