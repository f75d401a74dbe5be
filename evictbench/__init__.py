"""evictbench: what a KV-cache eviction policy costs in accuracy and saves in memory and time."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["EvictionCache", "__version__", "results"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`EvictionCache`, imported when it is asked for: it loads torch."""
    if name != "EvictionCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return importlib.import_module("evictbench.models.eviction_cache").EvictionCache


# The data folder results/ is installed as the package evictbench.results. Importing that package would put it in this
# function's place: find its folder with importlib.util.find_spec("evictbench.results"), which does not import it.
def results(folder: str | PathLike[str] = "results/runs", *, text: bool = True) -> pd.DataFrame:
    """Every finished sample under a folder of results, one row per sample and repeat.

    The columns are in `evictbench.store.frame.COLUMNS`, and `evictbench.store.frame.cells` makes one row per run
    and task of them. text: with the answers' text. Raises UserError for a folder that holds no results.
    """
    from pathlib import Path

    from evictbench.store.frame import read_results

    return read_results(Path(folder), text=text)
