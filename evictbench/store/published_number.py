"""One number from a paper, with its units and the fields of its protocol."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Confidence = Literal["primary", "secondary", "plot"]
"""primary: the paper's own text, or its authors' code and notes; secondary: a report by somebody else of what the
paper says; plot: read off a figure."""

Trained = Literal["none", "scorer", "model"]
"""none: nothing was trained for the policy; scorer: a part of its own, beside a frozen model; model: the model itself,
with or without a scorer."""

Weighting = Literal["tasks", "documents"]
"""How the tasks of a mean weigh: alike, or by their number of documents."""

ShareOf = Literal["text", "length"]
"""What a budget in percent is a share of. text: the prompt, or what has been seen; length: the length that the suite is
made to, so that the budget is a fixed number of entries."""

UNITS: dict[str, tuple[float, float]] = {
    "percent": (0, 100),
    "share": (0, 1),
    "points": (-100, 100),
    "percent change": (-100, math.inf),
    "of 10": (0, 10),
    "perplexity": (1, math.inf),
    "difference of perplexity": (-math.inf, math.inf),
    "nats": (0, math.inf),
    "logits": (0, math.inf),
    "tokens": (0, math.inf),
    "tokens/s": (0, math.inf),
    "ms": (0, math.inf),
    "s": (0, math.inf),
    "GB": (0, math.inf),
    "GiB": (0, math.inf),
    "times": (0, math.inf),
    "rows": (0, math.inf),
    "count": (0, math.inf),
    "GPU-hours": (0, math.inf),
    "hours": (0, math.inf),
    "parameters": (0, math.inf),
}
"""Unit to its least and largest value. points: a difference of two percentages; times: a ratio."""

PROTOCOL = {
    "context": "tokens per sample, where the suite is made to a length or cut to it",
    "question": "seen or unseen while the context is compressed",
    "chat": "whether the chat template is used",
    "thinking": "whether the template lets the model think",
    "temperature": "0 is greedy",
    "top_p": "sampling",
    "top_k": "sampling",
    "min_p": "sampling",
    "max_new_tokens": "tokens allowed an answer",
    "prefill": "native, dense, bounded; masked: what is evicted is only hidden, and may return",
    "chunk": "prompt tokens per forward pass",
    "shots": "worked examples before the question",
    "samples": "documents, where they are fewer than the suite has",
    "dtype": "dtype of the model",
    "batch_size": "rows decoded together",
    "prompt_tokens": "of a measurement of speed",
    "output_tokens": "of a measurement of speed",
    "hardware": "of a measurement of speed",
}
"""Fields of a published protocol and what each holds. Those that a run has too have the run's names. A text may name
several values that the paper holds to be alike: "masked or native"."""


OPTIONAL: dict[str, Any] = {
    "version": "",
    "runs_as": "",
    "tasks": (),
    "weighting": "tasks",
    "share_of": "text",
    "repeats": None,
    "spread": None,
    "full": None,
    "retention": None,
    "protocol": {},
    "note": "",
    "contradiction": None,
}
"""Fields that need not be written, and what they then are."""


@dataclass(frozen=True)
class Published:
    """One number that a paper states, with what is known about how it was made.

    paper: arXiv id, or a name where there is none. version: of the paper, "" where it is not known. source: where in
    the paper, "Table 2, row H2O". model: hub id, or the paper's name where it fits several. policy: the label that
    --policy takes where the policy is one of ours, otherwise the paper's own name for it. runs_as: the label that makes
    that row here where the name is the paper's own ("StreamingLLM+" runs as streaming_llm), "" for others. trained:
    what was trained for the row. budget: as --budget takes it ("2048", "25%"), None for the full cache and for what has
    none; budget_meaning: what the paper counts in it; share_of: what it is a share of. suite and task: our names where
    we have them ("mean" for an average over the suite; "gsm8k+bbh" for one over suites, which weigh alike), otherwise
    the paper's. tasks: those that an average is over, () for those of the suite's protocol; weighting: how they weigh.
    metric: "accuracy", "perplexity", ... repeats: answers per document, None where it is not stated.
    value, spread and full: in `unit`, as printed; spread as the note says; full is the full cache's value of the same
    column, None where the paper has none and for the full cache itself. retention: value over full in percent, where
    the paper prints it. protocol: the fields of `PROTOCOL` that the paper states. contradiction: a name that numbers
    share which the paper states twice, and not the same.
    """

    paper: str
    title: str
    version: str
    source: str
    model: str
    policy: str
    runs_as: str
    trained: Trained
    budget: str | None
    budget_meaning: str
    share_of: ShareOf
    suite: str
    task: str
    tasks: tuple[str, ...]
    weighting: Weighting
    metric: str
    unit: str
    repeats: int | None
    value: float
    spread: float | None
    full: float | None
    retention: float | None
    protocol: Mapping[str, Any]
    confidence: Confidence
    note: str
    contradiction: str | None = None

    @property
    def identity(self) -> tuple[Any, ...]:
        """The fields that together tell a number from all others."""
        protocol = tuple(sorted((name, str(value)) for name, value in self.protocol.items()))
        names = ("paper", "version", "source", "model", "policy", "budget", "suite", "task", "metric", "unit")
        return (*(getattr(self, name) for name in names), protocol)
