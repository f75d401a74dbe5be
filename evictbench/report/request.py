"""What a report is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from evictbench.plot.request import Request as PlotRequest
from evictbench.store.select import ALL, Filters

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Request:
    """The options of `evictbench report`, as given.

    documents: of each task, so many are in the sample browser, evenly chosen; None is all that fit, 0 none. tokenizer:
    a folder, where the model's own tokenizer is not on this machine.
    """

    folder: Path
    traces: tuple[Path, ...] = ()
    out: Path = Path("results/report.html")
    title: str = "evictbench report"
    filters: Filters = ALL
    documents: int | None = None
    tokenizer: Path | None = None

    def of_runs(self) -> PlotRequest:
        """The same filters for figures of runs."""
        return PlotRequest(self.folder, filters=self.filters)
