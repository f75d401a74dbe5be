"""What can be drawn, and what was asked for."""

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
OF_RUNS = {
    "budget": "budget against score",
    "bytes": "bytes held against score",
    "fidelity": "budget against KL and perplexity",
    "errors": "how the answers that lost score ended",
}
OF_TRACES = {
    "latency": "position against milliseconds a step",
    "memory": "position against bytes",
    "retention": "which positions live, over time, and by layer and head",
    "kept": "where kept tokens lie, and how many a recency window would hold too",
}
"""What can be drawn of runs, and of traces."""


@dataclass(frozen=True)
class Request:
    """The options of `evictbench plot`, as given."""

    folder: Path
    figures: str | None = None
    metric: str = "score"
    by: str | None = None
    filters: Filters = ALL
    allow: str | None = None
    paired: bool = False
    format: str = "png,svg"
    out: Path = Path("results/plots")


@dataclass(frozen=True)
class Drawing:
    """One figure: the name of its files, its title, its numbers, and how it is drawn from them."""

    name: str
    title: str
    numbers: pd.DataFrame
    draw: Callable[[pd.DataFrame], Figure]

    def figure(self) -> Figure:
        """The drawn figure."""
        from evictbench.plot.labels import shortened

        return self.draw(shortened(self.numbers))
