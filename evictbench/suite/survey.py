"""What of a suite's data lies in a folder, for `evictbench doctor --data-dir`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from evictbench.errors import UserError
from evictbench.suite.datasets import Dataset, Unavailable, load


@dataclass(frozen=True)
class DataFound:
    """One data set of a suite. name: its task or its own. where: its files under the folder, "" where there is none.

    documents: how many it has there. known: how many it has in all, None where that is not known. problem: the sentence
    about files that are there and cannot be used, else "".
    """

    name: str
    where: str = ""
    documents: int = 0
    known: int | None = None
    problem: str = ""


def survey(datasets: Mapping[str, Dataset], data_dir: Path) -> list[DataFound]:
    """What a folder has of data sets, in their order. datasets: by name. Every file is read and checked."""

    def look(name: str, dataset: Dataset) -> DataFound:
        def read() -> tuple[str, int]:
            loaded = load(dataset, data_dir)
            return loaded.origin, len(loaded.records)

        return look_for(name, read, dataset.documents)

    return [look(name, dataset) for name, dataset in datasets.items()]


def look_for(name: str, read: Callable[[], tuple[str, int]], known: int | None = None) -> DataFound:
    """One data set by what reads it. read: returns its files and the number of its documents, or raises UserError:
    Unavailable where there is none."""
    try:
        where, documents = read()
    except Unavailable:
        return DataFound(name, known=known)
    except UserError as error:
        return DataFound(name, known=known, problem=str(error))
    return DataFound(name, where, documents, known)
