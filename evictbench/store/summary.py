"""From sample lines to one row per task and one for the suite: scores with intervals, memory, time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from evictbench.stats.intervals import (
    Interval,
    best_of,
    majority,
    mean_interval,
    mean_of_means,
    mean_of_tasks,
    spread_interval,
)
from evictbench.stats.ratios import perplexity

Line = Mapping[str, Any]

MEANS = (
    "occupancy_mean",
    "cache_bytes",
    "prefill_peak_bytes",
    "prefill_seconds",
    "first_token_seconds",
    "decode_seconds",
    "prompt_tokens",
    "output_tokens",
)
"""Columns that are the mean over samples of the lines' values of that name."""

SHARES = ("truncated", "repetition")
"""Columns that are the share of samples whose line has a true value of that name."""


def summarise(lines: Iterable[Line], asked: Mapping[str, int], at: int | None = None) -> dict[str, Any]:
    """One row per task of `asked` (task: samples asked for) and, under "mean", the unweighted mean over tasks.

    `score` is the mean over documents of each one's mean over its repeats, and its interval takes documents as the
    independent samples. `repeats`: answers that every document has, the n of avg@n. Where that is more than one, `k`
    is `at` or all of them, and `pass_at_k` and `maj_at_k` (None where the task names no answers) have intervals too.
    `metrics`: the mean of each of the task's metrics, and its interval. `perplexity`: where there are log-likelihoods,
    exp of their mean over all tokens of all documents, `full`, the full cache's on the same tokens, and its interval;
    that of the mean row is over all tokens of all tasks. None elsewhere.
    Scores are in [0, 1], sizes in bytes per sample, times in seconds per sample, `decode_tokens_per_second` over all
    rows together and without the first token. Shares (`truncated`, `repetition`, `unclosed`: of thoughts) are in
    [0, 1].
    """
    by_task: dict[str, list[Line]] = {}
    for line in lines:
        by_task.setdefault(line["task"], []).append(line)
    documents_of = {name: _Documents(by_task[name], at) for name in asked if name in by_task}
    if not documents_of:
        return {"tasks": {}, "mean": None}
    rows = {name: _row(of_task, asked[name]) for name, of_task in documents_of.items()}
    every = [line for of_task in documents_of.values() for line in of_task.lines]
    return {"tasks": rows, "mean": _mean(list(documents_of.values()), list(rows.values()), every, _asked(asked, rows))}


def tokens_per_second(lines: Iterable[Line]) -> float | None:
    """Tokens decoded per second of decoding, the first token of each answer (prefill made it) left out."""
    steps = seconds = 0.0
    for line in lines:
        steps += line["decode_steps"]
        seconds += line["decode_seconds"]
    return steps / seconds if seconds > 0 else None


def repeats_itself(tokens: Sequence[int], longest: int = 64) -> bool:
    """Whether an answer ends in a loop: its last 32 tokens or more are at least four turns of one block."""
    for block in range(1, longest + 1):
        tail = max(32, 4 * block)
        if tail > len(tokens):
            return False
        end = tokens[-tail:]
        if all(end[i] == end[i - block] for i in range(block, tail)):
            return True
    return False


def _asked(asked: Mapping[str, int], rows: Mapping[str, Mapping[str, Any]]) -> int:
    """Samples asked for over all tasks, and never fewer than there are."""
    return sum(rows[name]["asked"] if name in rows else wanted for name, wanted in asked.items())


class _Documents:
    """The samples of one task by document, and each document's score over its repeats."""

    def __init__(self, lines: Sequence[Line], at: int | None) -> None:
        self.lines = sorted(lines, key=lambda line: (line["doc_id"], line["repeat"]))
        grouped: dict[int, list[Line]] = {}
        for line in self.lines:
            grouped.setdefault(line["doc_id"], []).append(line)
        self.documents = list(grouped.values())
        self.repeats = min(map(len, self.documents))
        several = max(map(len, self.documents)) > 1
        self.k = (at or self.repeats) if several else None
        self.scores = [fmean(_scores(lines)) for lines in self.documents]

    def passing(self) -> list[float]:
        """Each document's pass@k; documents that have fewer answers than k so far are left out."""
        k = self.k
        return [] if k is None else [best_of(_scores(lines), k) for lines in self.documents if len(lines) >= k]

    def agreed(self) -> list[float]:
        """Each document's maj@k over its first k answers; empty where the task names no answers."""
        k = self.k
        if k is None or all(line.get("answer") is None for line in self.lines):
            return []
        return [
            majority([line.get("answer") for line in lines[:k]], _scores(lines[:k]))
            for lines in self.documents
            if len(lines) >= k
        ]

    def metrics(self) -> dict[str, dict[str, Any]]:
        """The mean of each metric that every line has, and its interval."""
        names = [
            name for name in self.lines[0].get("metrics", ()) if all(name in line["metrics"] for line in self.lines)
        ]
        means = {name: [fmean(line["metrics"][name] for line in lines) for lines in self.documents] for name in names}
        return {name: {"mean": fmean(values), "interval": _free_interval(values)} for name, values in means.items()}


def _perplexity(lines: Sequence[Line]) -> dict[str, Any] | None:
    """The perplexity over all tokens of the lines, of each document's repeats together; None if one has none."""
    documents: dict[tuple[str, int], list[float]] = {}
    for line in lines:
        metrics, tokens = line.get("metrics", {}), line["output_tokens"]
        if "nll" not in metrics or "nll_full" not in metrics or not tokens:
            return None
        sums = documents.setdefault((line["task"], line["doc_id"]), [0.0, 0.0, 0.0])
        for place, value in enumerate((metrics["nll"] * tokens, metrics["nll_full"] * tokens, tokens)):
            sums[place] += value
    counts = [tokens for _, _, tokens in documents.values()]
    value, interval = perplexity([nll / tokens for nll, _, tokens in documents.values()], counts)
    full, _ = perplexity([nll / tokens for _, nll, tokens in documents.values()], counts)
    return {"value": value, "interval": interval, "full": full}


def _free_interval(values: Sequence[float]) -> Interval | None:
    """The interval of a metric's mean: as for scores if all values are 0 or 1, else without bounds."""
    return mean_interval(values) if all(value in (0, 1) for value in values) else spread_interval(values)


def _scores(lines: Sequence[Line]) -> list[float]:
    return [line["score"] for line in lines]


def _row(documents: _Documents, asked: int) -> dict[str, Any]:
    lines, passing, agreed = documents.lines, documents.passing(), documents.agreed()
    return {
        "score": fmean(documents.scores),
        "interval": mean_interval(documents.scores),
        "samples": len(lines),
        "asked": max(asked, len(lines)),
        "documents": len(documents.documents),
        "repeats": documents.repeats,
        "k": documents.k,
        "pass_at_k": fmean(passing) if passing else None,
        "pass_interval": mean_interval(passing),
        "maj_at_k": fmean(agreed) if agreed else None,
        "maj_interval": mean_interval(agreed),
        "metrics": documents.metrics(),
        "perplexity": _perplexity(lines),
        "occupancy_max": max(line["occupancy_max"] for line in lines),
        **{name: fmean(line[name] for line in lines) for name in (*MEANS, *SHARES)},
        "unclosed": fmean(line.get("thinking") == "unclosed" for line in lines),
        "decode_tokens_per_second": tokens_per_second(lines),
    }


def _mean(
    tasks: Sequence[_Documents], rows: Sequence[Mapping[str, Any]], every: Sequence[Line], asked: int
) -> dict[str, Any]:
    """The row of the mean over tasks, which weigh alike. Values that some tasks lack or have at another k are None."""
    score, interval = _over_tasks([documents.scores for documents in tasks])
    passing: list[list[float]] = [[]]
    agreed: list[list[float]] = [[]]
    if len({row["k"] for row in rows}) == 1:
        passing = [documents.passing() for documents in tasks]
        agreed = [documents.agreed() for documents in tasks]
    pass_at_k, pass_interval = _over_tasks(passing)
    maj_at_k, maj_interval = _over_tasks(agreed)
    return {
        "score": score,
        "interval": interval,
        "samples": len(every),
        "asked": asked,
        "documents": sum(row["documents"] for row in rows),
        "repeats": min(row["repeats"] for row in rows),
        "k": rows[0]["k"] if len({row["k"] for row in rows}) == 1 else None,
        "pass_at_k": pass_at_k,
        "pass_interval": pass_interval,
        "maj_at_k": maj_at_k,
        "maj_interval": maj_interval,
        "metrics": _shared_metrics(rows),
        "perplexity": _perplexity(every),
        "occupancy_max": max(row["occupancy_max"] for row in rows),
        **{name: fmean(row[name] for row in rows) for name in (*MEANS, *SHARES, "unclosed")},
        "decode_tokens_per_second": tokens_per_second(every),
    }


def _shared_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The mean of each metric that every task has, and its interval."""
    shared = {}
    for name in rows[0]["metrics"]:
        if all(name in row["metrics"] for row in rows):
            values = [row["metrics"][name] for row in rows]
            mean, interval = mean_of_means([(value["mean"], value["interval"]) for value in values])
            shared[name] = {"mean": mean, "interval": interval}
    return shared


def _over_tasks(scores: Sequence[Sequence[float]]) -> tuple[float | None, Interval | None]:
    if not all(scores):
        return None, None
    return mean_of_tasks({str(number): values for number, values in enumerate(scores)})
