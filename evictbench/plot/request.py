"""What can be drawn, what `evictbench plot` was asked for, and a figure that is ready to be drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from evictbench.store.select import ALL, Filters

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

PICTURES = ("png", "svg")
"""Formats of pictures."""

OF_RUNS = {
    "budget": "budget against score",
    "bytes": "bytes held against score",
    "fidelity": "budget against KL and perplexity",
    "errors": "how the answers that lost score ended",
    "perplexity": "budget against perplexity over all tokens",
    "answers": "errors and answer lengths on the documents that the full cache gets right",
    "recency": "how much of what is kept a recency window would keep too",
}
"""The figures of runs, and what each shows."""

OF_TRACES = {
    "latency": "position against milliseconds a step",
    "memory": "position against bytes",
    "retention": "which positions live, over time, and by layer and head",
    "kept": "where kept tokens lie, and how many a recency window would hold too",
}
"""The figures of traces, and what each shows."""


@dataclass(frozen=True)
class PlotRequest:
    """The options of `evictbench plot`, as given. folder: of runs or of one trace; figures: comma-separated names,
    None for all; by: the column that has a panel for each value; allow: columns in which policies may differ.
    each_protocol: a figure for each protocol of the runs, where without it several protocols are an error. trainings:
    runs that differ in a policy's weights alone are one row, mean and standard deviation over its trainings."""

    folder: Path
    figures: str | None = None
    metric: str = "score"
    by: str | None = None
    filters: Filters = ALL
    allow: str | None = None
    paired: bool = False
    format: str = "png,svg"
    out: Path = Path("results/plots")
    each_protocol: bool = False
    trainings: bool = False


@dataclass(frozen=True)
class Drawing:
    """One figure: the name of its files without their endings, its title, its numbers, and the function that draws
    it from them."""

    name: str
    title: str
    numbers: pd.DataFrame
    draw: Callable[[pd.DataFrame], Figure]

    def figure(self) -> Figure:
        """The drawn figure."""
        from evictbench.plot.labels import shortened

        return self.draw(shortened(self.numbers))
