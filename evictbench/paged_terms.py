"""What a row's budget comes to where its entries compete for places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evictbench.errors import UserError

if TYPE_CHECKING:
    from evictbench.budget import Budget
    from evictbench.policy import Policy


@dataclass(frozen=True)
class Terms:
    """Of one row. budget: as given; prompt: its length; entries: the budget of its prompt's queries; protected: sinks
    and window; room: means of each head; places: of each pool, before they are divided. sparse: a prompt's query does
    not see what a pool of that size would have lost; bounded: and that is dropped."""

    budget: Budget
    prompt: int
    entries: int
    protected: int
    room: int
    sparse: bool
    bounded: bool

    @classmethod
    def of(cls, policy: Policy, budget: Budget, minimum: int, mode: str, prompt: int) -> Terms:
        """mode: "dense", "sparse" or "bounded". Raises UserError for an impossible budget."""
        entries = budget.at(prompt, prompt)
        if entries < minimum:
            raise UserError(
                f"{policy.name} needs a budget of at least {minimum} entries on this model ({minimum - 1} are "
                f"protected), not {entries}."
            )
        sparse = mode != "dense" and prompt > entries
        return cls(
            budget=budget,
            prompt=prompt,
            entries=entries,
            protected=policy.sinks + int(policy.recent(entries)),
            room=policy.summaries(entries),
            sparse=sparse,
            bounded=sparse and mode == "bounded",
        )

    @property
    def places(self) -> int:
        """Of each pool, before they are divided."""
        return self.entries - self.protected - self.room

    @property
    def crowded(self) -> bool:
        """More is stored at the prompt's end than its budget holds."""
        return self.prompt > self.entries and not self.bounded

    def gone(self, query: int) -> int:
        """How many entries of each head a query of the prompt does not see."""
        return max(0, query + 1 - self.protected - self.places) if self.sparse else 0

    def dropped(self, query: int) -> int:
        """How many of those are not held either, once this query is next."""
        return self.gone(query) if self.bounded else 0

    def allowed(self, query: int) -> int:
        """The budget of a query, after the prompt."""
        return self.budget.at(self.prompt, query + 1)

    def check(self, policy: Policy, query: int, mean: float) -> None:
        """The guard: a query sees so many entries, mean over heads; RuntimeError if that is more than its budget."""
        if mean > self.allowed(query) + 1e-6:
            raise RuntimeError(
                f"{policy.name} let a query see {mean:.2f} entries a head, where the budget is {self.allowed(query)}."
            )
