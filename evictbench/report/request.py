"""What `evictbench report` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evictbench.store.select import ALL, Filters


@dataclass(frozen=True)
class ReportRequest:
    """The options of `evictbench report`, as given.

    folder: of runs. traces: folders of traces whose figures go in too. out: the HTML file. documents: how many of each
    task are in the sample browser, evenly chosen; None for all that fit, 0 for none. tokenizer: a folder with
    tokenizer.json, where the model's own tokenizer is not on this machine. trainings: as of `PlotRequest`, for the
    figures and their numbers; the leaderboard has a row for each run.
    """

    folder: Path
    traces: tuple[Path, ...] = ()
    out: Path = Path("results/report.html")
    title: str = "evictbench report"
    filters: Filters = ALL
    documents: int | None = None
    tokenizer: Path | None = None
    trainings: bool = False
