"""Reading a prompt under a `HeadBudgetPolicy`: whole or chunk by chunk, then the cut at its end, which makes pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.cache.clock import ATTENTION, POLICY, SIGNALS
from evictbench.cache.paged.centroids import CENTROID, RESIDUALS, Means, merge_in_order, rounded
from evictbench.cache.paged.pool import PAGE, PagePool
from evictbench.cache.paged.prompt import Prompt, attend_prompt, last_mass, select
from evictbench.cache.selection import in_slot_order
from evictbench.policy.expiry import rank_by_score
from evictbench.policy.step import NEVER, HeadBudgets, PrefillChunk

if TYPE_CHECKING:
    from evictbench.cache.clock import Clock
    from evictbench.cache.paged.layer import PagedLayer
    from evictbench.cache.rows import RowBudget
    from evictbench.policy.ragged import HeadBudgetPolicy


def read_chunk(
    policy: HeadBudgetPolicy,
    layer: int,
    prompt: Prompt,
    budget: RowBudget,
    query: Tensor,
    entries: Mapping[str, Tensor],
    first: int,
    scaling: float,
    ends: bool,
    clock: Clock,
) -> Tensor:
    """Write the new tokens of one row in one layer, and return their attention `[heads, new, head_dim]`, like query.

    entries: `[kv_heads, new, ...]` by name: keys, values, positions and the policy's slot tensors. first: the position
    of the first new token. ends: the prompt ends with the last one.
    """
    count = query.shape[1]
    states = [name for name in entries if name not in ("keys", "values", "positions")]
    expiry = torch.full_like(entries["positions"], NEVER)
    prompt.append({**entries, "expiry": expiry}, 0 if budget.bounded else budget.prompt)
    if ends:
        clock.lap(POLICY, query.device)
        prompt.mass = last_mass(prompt, query[:, -1:], scaling)
        clock.lap(SIGNALS, query.device)
    if budget.divided:
        prompt.places = _divide(policy, layer, prompt, budget, states)
    hidden = budget.hidden(first) - budget.dropped(first)
    index = prompt.visible(first, prompt.length - hidden)
    expires = budget.divided or budget.hidden(first + count) > budget.hidden(first)
    if expires:
        state = {name: select(prompt.held(name), index) for name in states}
        positions = select(prompt.held("positions"), index)
        capacity = budget.capacity if prompt.places is None else prompt.places
        chunk = PrefillChunk(state, positions, first, count, capacity)
        expiry = policy.evicted_in_chunk(chunk).to(torch.int32)
        held = prompt.held("expiry")
        if index is None:
            held.copy_(expiry)
        else:
            held.scatter_(1, index, expiry)
    clock.lap(POLICY, query.device)
    output = attend_prompt(prompt, index, query, first, scaling, expires)
    clock.lap(ATTENTION, query.device)
    return output


def _divide(policy: HeadBudgetPolicy, layer: int, prompt: Prompt, budget: RowBudget, states: Sequence[str]) -> Tensor:
    """The places of each head, `[kv_heads]` int64, from all that is stored and the prompt's last query."""
    assert prompt.mass is not None
    positions = prompt.held("positions")
    age = policy.ranking_query(budget.prompt) - positions
    scores = policy.score_at({name: prompt.held(name) for name in states}, age)
    division = HeadBudgets(
        layer,
        prompt.mass,
        scores,
        _competes(policy, prompt, budget),
        budget.places,
        budget.centroids,
        budget.over_budget,
    )
    return policy.head_budgets(division).to(scores.device)


def _competes(policy: HeadBudgetPolicy, prompt: Prompt, budget: RowBudget) -> Tensor:
    """The entries that are not protected from the prompt's last query on, `[kv_heads, slots]` bool."""
    positions = prompt.held("positions")
    return (positions >= policy.sinks) & (positions < budget.prompt - int(policy.recent(budget.entries)))


def drop_hidden(policy: HeadBudgetPolicy, prompts: Sequence[Prompt], dropped: int, query: int, centroids: int) -> None:
    """Let one row's bounded prompts in several layers drop what the query at this position does not see.

    dropped: entries of each head. centroids: of each head; the dropped entries join them in the order in which they
    were evicted.
    """
    if centroids:
        _join_centroids(policy, prompts, dropped, centroids)
    for prompt in prompts:
        prompt.keep(in_slot_order(prompt.held("expiry") > query, prompt.length - dropped))


def _join_centroids(policy: HeadBudgetPolicy, prompts: Sequence[Prompt], dropped: int, centroids: int) -> None:
    leaving: dict[str, list[Tensor]] = {"keys": [], "values": []}
    for prompt in prompts:
        index = prompt.held("expiry").argsort(dim=-1, stable=True)[:, :dropped]
        for name, parts in leaving.items():
            parts.append(select(prompt.held(name), index))
        if prompt.means is None:
            keys = prompt.held("keys")
            wide = torch.promote_types(keys.dtype, torch.float32)
            empty = keys.new_zeros((keys.shape[0], centroids, keys.shape[2]), dtype=wide)
            prompt.set_means((empty, empty.clone(), empty.new_zeros(empty.shape[:2])))
    by_kind = zip(*(prompt.means for prompt in prompts if prompt.means is not None), strict=True)
    keys, values, counts = (torch.cat(parts) for parts in by_kind)
    means = merge_in_order(policy, (keys, values, counts), torch.cat(leaving["keys"]), torch.cat(leaving["values"]))
    heads = keys.shape[0] // len(prompts)
    for i, prompt in enumerate(prompts):
        own_keys, own_values, own_counts = (part[i * heads : (i + 1) * heads].clone() for part in means)
        prompt.set_means((own_keys, own_values, own_counts))


@dataclass(frozen=True)
class Cut:
    """The entries that stay of one row in one layer.

    capacity: `[kv_heads]` int64, the size of each head's pool. centroids: of each head. stays: `[kv_heads, slots]`
    bool, which of the prompt's entries stay; None if the row has no prompt.
    """

    capacity: Tensor
    centroids: int
    stays: Tensor | None


def move_into_pages(
    policy: HeadBudgetPolicy,
    layer: PagedLayer,
    owners: Sequence[range],
    budgets: Sequence[RowBudget],
    states: Sequence[str],
) -> None:
    """At the end of prompts: divide a layer's budget among its heads, if that is not done, and move what stays into
    pages.

    owners: the owners of each row. budgets: one a row. states: names of the policy's slot tensors.
    """
    assert layer.pool is not None
    for row, (mine, budget) in enumerate(zip(owners, budgets, strict=True)):
        prompt = layer.prompts.pop(row, None)
        cut = _cut(policy, layer.index, len(mine), prompt, budget, states)
        _write_pages(layer.pool, mine, cut, prompt, policy)
        if prompt is not None:
            prompt.free()


def _cut(
    policy: HeadBudgetPolicy, layer: int, heads: int, prompt: Prompt | None, budget: RowBudget, states: Sequence[str]
) -> Cut:
    if prompt is None:
        return Cut(torch.full((heads,), budget.capacity), budget.centroids, None)
    positions, competes = prompt.held("positions"), _competes(policy, prompt, budget)
    places = _divide(policy, layer, prompt, budget, states) if prompt.places is None else prompt.places
    capacity = places - budget.centroids
    scores = policy.score_at({name: prompt.held(name) for name in states}, budget.prompt - 1 - positions)
    rank = rank_by_score(scores.masked_fill(~competes, -torch.inf), positions)
    return Cut(capacity, budget.centroids, ~competes | (rank < capacity[:, None]))


def _write_pages(pool: PagePool, owners: range, cut: Cut, prompt: Prompt | None, policy: HeadBudgetPolicy) -> None:
    """Give owners, who have nothing yet, pages with the entries that stay. The host waits once for the device."""
    kept = [0] * len(owners) if cut.stays is None else cut.stays.sum(-1).tolist()
    lengths = [cut.centroids + count for count in kept]
    pool.take({owner: -(-length // PAGE) for owner, length in zip(owners, lengths, strict=True) if length})
    span = slice(owners.start, owners.stop)
    for head, (owner, length) in enumerate(zip(owners, lengths, strict=True)):
        if length == 0:
            continue
        slots = pool.slots_of(owner)[:length]
        centroids, entries = slots[: cut.centroids], slots[cut.centroids :]
        pool.buffers["positions"].view(-1)[centroids] = CENTROID
        pool.buffers["expiry"].view(-1)[slots] = NEVER
        if prompt is not None and cut.stays is not None:
            stays = cut.stays[head].nonzero()[:, 0]
            for name in prompt.buffers:
                if name != "expiry":
                    pool.buffers[name].flatten(0, 1)[entries] = prompt.held(name)[head, stays]
            pool.buffers["bias"].view(-1)[entries] = 0
            _write_centroids(pool, owner, centroids, _centroids(policy, prompt, head, cut))
        pool.newest[owner] = slots[-1]
    pool.owner_tensors["capacity"][span] = cut.capacity.to(pool.device)
    pool.owner_tensors["centroids"][span] = cut.centroids
    pool.length[span] = torch.tensor(lengths, device=pool.device)
    pool.freed_slot[span] = -1


def _centroids(policy: HeadBudgetPolicy, prompt: Prompt, head: int, cut: Cut) -> Means | None:
    """One head's centroids, `[centroids, ...]`: of what leaves now, and of what has left before, if anything has."""
    if cut.centroids == 0 or cut.stays is None:
        return None
    leaving = (~cut.stays[head]).nonzero()[:, 0]
    keys, values = prompt.held("keys")[head, leaving], prompt.held("values")[head, leaving]
    if prompt.means is None:
        return policy.cluster(keys, values, cut.centroids) if leaving.shape[0] else None
    before = prompt.means[0][head, None], prompt.means[1][head, None], prompt.means[2][head, None]
    mean_keys, mean_values, counts = merge_in_order(policy, before, keys[None], values[None])
    used = counts[0] > 0
    return mean_keys[0, used], mean_values[0, used], counts[0, used]


def _write_centroids(pool: PagePool, owner: int, slots: Tensor, means: Means | None) -> None:
    if means is None:
        return
    keys, values, counts = means
    slots = slots[: counts.shape[0]]
    for name, mean in (("keys", keys), ("values", values)):
        buffer = pool.buffers[name].flatten(0, 1)
        buffer[slots], residual = rounded(mean, buffer.dtype)
        if RESIDUALS[name] in pool.owner_tensors:
            pool.owner_tensors[RESIDUALS[name]][owner, : counts.shape[0]] = residual
    pool.buffers["bias"].view(-1)[slots] = counts.log().to(pool.buffers["bias"].dtype)
    pool.owner_tensors["counts"][owner, : counts.shape[0]] = counts.to(pool.owner_tensors["counts"].dtype)
