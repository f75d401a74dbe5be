"""What a row's budget comes to where its entries compete for places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.cache.paged.centroids import absorb
from evictbench.errors import UserError

if TYPE_CHECKING:
    from evictbench.cache.paged.stack import Board
    from evictbench.policy.base import Policy
    from evictbench.policy.budget import Budget


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


def decide(
    policy: Policy,
    board: Board,
    following: Tensor,
    grown: Tensor,
    *,
    window: int,
    states: tuple[str, ...],
    owners: Tensor | None,
    rows: int,
) -> None:
    """Find what leaves before the next queries come: its slot becomes reusable, and it joins its owner's means.

    following: `[owners of a pool]` int32, the position of the next query; grown: likewise, places that each pool has
    more of than at its prompt's end. owners: for whom it is decided; None: the first `rows` of them, who have pages.
    states: the policy's slot tensors.
    """
    board.refresh()
    count, size = len(board.pools), following.shape[0]
    owner, positions, of = board.owner, board.slots["positions"], board.of_owners
    age = following.repeat(count).index_select(0, owner)[:, None] - positions
    protected = (positions < policy.sinks) | (age < window)
    worth = policy.worth({name: board.slots[name] for name in states}, age).masked_fill_(protected, torch.inf)
    least = worth.new_full((count * size,), torch.inf)
    least.scatter_reduce_(0, owner, worth.amin(-1), "amin")
    # The later of equals: position and number in one.
    named = (positions.long() << 32) + board.numbers
    named.masked_fill_((worth > least.index_select(0, owner)[:, None]) | protected, -1)
    latest = named.new_full((count * size,), -1).scatter_reduce_(0, owner, named.amax(-1), "amax")
    rivals = torch.zeros_like(latest).index_add_(0, owner, (~protected).sum(-1))
    leaves = rivals.view(count, size) > of["places"] + grown
    victims = torch.where(leaves, (latest & 0xFFFFFFFF).view(count, size) - board.base, 0)
    reusable = torch.where(leaves, victims, -1)
    chosen: Tensor | slice = slice(0, rows)
    if owners is not None:
        chosen = owners
        mine = torch.zeros(size, dtype=torch.bool, device=owner.device)
        mine[owners] = True
        reusable = torch.where(mine, reusable, of["reusable"])
    of["reusable"].copy_(reusable)
    absorb(policy, board, chosen, victims[:, chosen], leaves[:, chosen])
    # What the next queries see: what is filled, but for what leaves and for means that are not yet.
    seen = of["length"] - (reusable >= 0).long() - of["room"] + of["counts"].count_nonzero(-1)
    of["visible"].copy_(seen)
