"""One row of a cache: what is known of its sequence without looking at a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from evictbench.policy.budget import Budget
    from evictbench.policy.ragged import HeadBudgetPolicy


@dataclass
class Occupancy:
    """How many entries the decode queries of one row saw, charged state included.

    largest: the most that any head saw. total: the sum over steps of the mean over heads. steps: decode queries.
    """

    largest: int = 0
    total: float = 0
    steps: int = 0

    def add(self, entries: int, mean: float | None = None) -> None:
        """Count one decode query. entries: the most that a head saw; mean: the mean over heads, if that differs."""
        self.largest = max(self.largest, entries)
        self.total += entries if mean is None else mean
        self.steps += 1


@dataclass
class RecencyCount:
    """How recent what one row keeps is: the share that lies inside a recency window, looked at now and then.

    steps: decode steps so far. moments: how many of them were looked at. inside: `[layers, sets]` float64, the sums
    over moments of the share inside the window. counts: the same shape, the moments at which a head kept any.
    """

    steps: int = 0
    moments: int = 0
    inside: Tensor | None = None
    counts: Tensor | None = None

    def shares(self) -> Tensor:
        """`[layers, sets]` float64, the mean over moments; NaN for a head that never kept anything."""
        assert self.inside is not None
        assert self.counts is not None
        return self.inside / self.counts


@dataclass(frozen=True)
class RowBudget:
    """A row's budget under a `HeadBudgetPolicy`, in numbers.

    budget: as given. prompt: tokens of the prompt. entries: the budget of the prompt's queries. protected: entries that
    are never evicted, sinks and recent window. centroids: of each head. sparse: a query of the prompt does not see what
    its head's pool would have evicted. divided: the pools' sizes are set before a layer attends to the prompt, which
    comes in one pass; else a prompt's pools are equal. bounded: what is not seen is not stored either.
    """

    budget: Budget
    prompt: int
    entries: int
    protected: int
    centroids: int
    sparse: bool
    divided: bool
    bounded: bool

    @classmethod
    def of(cls, policy: HeadBudgetPolicy, budget: Budget, mode: str, prompt: int) -> RowBudget:
        """The budget of a row whose prompt has so many tokens. mode: "dense", "sparse" or "bounded"."""
        entries = budget.at(prompt, prompt)
        sparse = mode != "dense" and prompt > entries
        return cls(
            budget=budget,
            prompt=prompt,
            entries=entries,
            protected=policy.sinks + int(policy.recent(entries)),
            centroids=policy.centroids(entries),
            sparse=sparse,
            divided=sparse and mode == "sparse" and policy.divides_first,
            bounded=sparse and mode == "bounded",
        )

    @property
    def places(self) -> int:
        """Entries of each head beside the protected ones, centroids included, before they are divided among heads."""
        return self.entries - self.protected

    @property
    def capacity(self) -> int:
        """Entries of each head's pool, before the pools are divided."""
        return self.places - self.centroids

    @property
    def over_budget(self) -> bool:
        """More is stored at the prompt's end than the budget holds."""
        return self.prompt > self.entries and not self.bounded

    def hidden(self, query: int) -> int:
        """How many entries of each head a query of the prompt at this position does not see."""
        return max(0, query + 1 - self.protected - self.capacity) if self.sparse else 0

    def dropped(self, query: int) -> int:
        """How many of those are not stored either, once the query at this position comes next."""
        return self.hidden(query) if self.bounded else 0

    def allowed(self, query: int) -> int:
        """The budget of the query at this position, after the prompt."""
        return self.budget.at(self.prompt, query + 1)


@dataclass
class Sequence:
    """One row of a cache.

    seen: tokens that have been read. held: entries of a kept set. prompt: tokens of the prompt, padding left out.
    freed_slot: one of the slots in use is free, because decode has evicted an entry from it; the next token takes it.
    labels: of every layer `[kv_heads, tokens]`, from a dense run; None where the policy needs none.
    occupancy: what its decode queries saw. threshold: what a `RaggedPolicy` allotted to it. budget: under a
    `HeadBudgetPolicy`, what its budget comes to. recency: how recent what it keeps is, where somebody counts.
    """

    seen: int = 0
    held: int = 0
    prompt: int = 0
    freed_slot: bool = False
    labels: list[Tensor] | None = None
    occupancy: Occupancy = field(default_factory=Occupancy)
    threshold: float = 1.0
    budget: RowBudget | None = None
    recency: RecencyCount | None = None
