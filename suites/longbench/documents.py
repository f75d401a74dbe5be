"""The records of a task as lm-eval documents. Prompts are rendered on access, and cut where they are too long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evictbench.suite.tasks import prepared_documents

from .cut import Cutter, Text

Record = Mapping[str, Any]
Document = dict[str, Any]

_BATCH = 16  # records measured at a time, over all cores


class Samples(Sequence[Document]):
    """A task's documents: `index`, `input`, `context`, `gen_prefix`, `answers`, `all_classes`, `words`, `cut`.

    `input` is the user's text, and `context` its beginning, up to the end of the template's {context}. A record is
    measured on first use. Only texts that were cut are kept in memory.
    """

    # lm-eval asks a data set for its columns
    features: Mapping[str, None] = dict.fromkeys(
        ("index", "input", "context", "gen_prefix", "answers", "all_classes", "words", "cut")
    )

    def __init__(self, task: str, template: str, records: Sequence[Record], cutter: Cutter):
        self.task = task
        self._before, self._after = template.split("{context}")
        self._records = records
        self._cutter = cutter
        self._fits: dict[int, Text | None] = {}  # None: as it is

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        record, text = self._records[index], self._text(index)
        return {
            "index": index,
            "input": text.whole,
            "context": text.whole[: text.border],
            "gen_prefix": "",
            "answers": list(record["answers"]),
            "all_classes": list(record.get("all_classes") or ()),
            "words": int(record.get("length") or 0),
            "cut": text.cut,
        }

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    def __deepcopy__(self, memo: object) -> Samples:
        return self  # lm-eval copies a task's settings, these among them

    def __repr__(self) -> str:
        return f"{len(self)} samples of {self.task}"

    def _text(self, index: int) -> Text:
        if index not in self._fits:
            start = index - index % _BATCH
            batch = range(len(self))[start : start + _BATCH]
            for i, fitted in zip(batch, self._cutter.fit([self._render(i) for i in batch]), strict=True):
                self._fits[i] = fitted if fitted.cut else None
        return self._fits[index] or self._render(index)

    def _render(self, index: int) -> Text:
        record = self._records[index]
        context = self._before + record["context"]
        return Text(context + self._after.replace("{input}", record["input"]), len(context))


def documents(task: str, longbench_samples: Mapping[str, Samples] | None = None, **metadata: Any) -> dict[str, Samples]:
    """lm-eval `custom_dataset` of every task: the samples that `prepare` put into the metadata."""
    return prepared_documents(task, longbench_samples)
