"""The samples of a task as lm-eval documents, made on access."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from evictbench.errors import UserError
from evictbench.suite.tasks import prepared_documents

from .fit import Draft, Meter, Prompt, fit
from .seeds import Draws, draws

Document = dict[str, Any]

_ATTEMPTS = 20
_BATCH_TOKENS = 131_072  # tokens of documents made at a time
_KEPT_TOKENS = 32_000_000  # tokens of documents kept, about 300 MB of text


class Maker(Protocol):
    """Makes the drafts of one task."""

    def draft(self, sample: int, draws: Draws) -> Draft:
        """The draft of a sample. All its random numbers come from `draws`."""


class Samples(Sequence[Document]):
    """A task's documents: `index`, `input`, `context`, `outputs`, `gen_prefix`, `prompt_tokens`.

    They are made in small batches on first use, so that a run of any length starts at once. Document i is the same
    whatever was asked for before; `numbers[i]` is the sample that the maker drafts for it.
    """

    def __init__(
        self,
        task: str,
        maker: Maker,
        meter: Meter,
        context: int,
        answer_tokens: int,
        base: float,
        seed: int,
        numbers: Sequence[int],
    ):
        self.task = task
        self.context = context
        self._maker = maker
        self._meter = meter
        self._room = context - answer_tokens
        self._base = base
        self._seed = seed
        self._numbers = numbers
        self._batch = max(1, min(32, _BATCH_TOKENS // context))
        self._kept: OrderedDict[int, list[Document]] = OrderedDict()

    # lm-eval asks a data set for its columns
    features: Mapping[str, None] = dict.fromkeys(
        ("index", "input", "context", "outputs", "gen_prefix", "prompt_tokens")
    )

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        batch, offset = divmod(index, self._batch)
        if batch not in self._kept:
            self._kept[batch] = self._make(range(len(self))[batch * self._batch : (batch + 1) * self._batch])
            while len(self._kept) > max(1, _KEPT_TOKENS // (self._batch * self.context)):
                self._kept.popitem(last=False)
        self._kept.move_to_end(batch)
        return self._kept[batch][offset]

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    def __deepcopy__(self, memo: object) -> Samples:
        return self  # lm-eval copies a task's settings, these among them

    def __repr__(self) -> str:
        return f"{len(self)} samples of {self.task} at {self.context} tokens, seed {self._seed}"

    def _make(self, indices: range) -> list[Document]:
        made: dict[int, tuple[Prompt, int]] = {}
        for attempt in range(_ATTEMPTS):
            missing = [index for index in indices if index not in made]
            if not missing:
                break
            drafts = [self._draft(self._numbers[index], attempt) for index in missing]
            for index, fitted in zip(missing, fit(drafts, self._meter, self._base, self._room), strict=True):
                if fitted:
                    made[index] = fitted
        if missing := [index for index in indices if index not in made]:
            raise UserError(f"{self.task}: sample {missing[0]} does not fit into {self.context} tokens.")
        return [
            {
                "index": index,
                "input": prompt.input,
                "context": prompt.context,
                "outputs": list(prompt.outputs),
                "gen_prefix": prompt.gen_prefix,
                "prompt_tokens": tokens,
            }
            for index, (prompt, tokens) in sorted(made.items())
        ]

    def _draft(self, number: int, attempt: int) -> Draft:
        return self._maker.draft(number, draws(self.task, self._seed, number, attempt))


def documents(task: str, ruler_samples: Mapping[str, Samples] | None = None, **metadata: Any) -> dict[str, Samples]:
    """lm-eval `custom_dataset` of every task: the samples that `prepare` put into the metadata."""
    return prepared_documents(task, ruler_samples)
