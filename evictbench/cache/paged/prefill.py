"""Reading a prompt whose entries compete: chunk by chunk, what a bounded one lets go of, and the cut at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.cache.clock import ATTENTION, POLICY, SIGNALS
from evictbench.cache.paged.centroids import MEAN, RESTS, rounded, run_through
from evictbench.cache.paged.pool import NEVER, PAGE, PagePool
from evictbench.cache.paged.prompt import Prompt, attend_prompt, last_mass, taken
from evictbench.cache.selection import in_slot_order
from evictbench.policy.base import Policy
from evictbench.policy.deadlines import rank_by_score
from evictbench.policy.step import Division, Rivals

if TYPE_CHECKING:
    from evictbench.cache.clock import Clock
    from evictbench.cache.paged.cache import PagedLayer
    from evictbench.cache.paged.head_budget import Terms
    from evictbench.cache.paged.prompt import Prompt
    from evictbench.policy.base import Policy


def read_chunk(
    policy: Policy,
    prompt: Prompt,
    terms: Terms,
    query: Tensor,
    entries: Mapping[str, Tensor],
    first: int,
    scaling: float,
    ends: bool,
    clock: Clock | None = None,
) -> Tensor:
    """The new tokens of one row in one layer, from position `first` on: written, and what they see, `[heads, new,
    head_dim]`, like query.

    entries: `[kv_heads, new, ...]`: keys, values, positions and the policy's slot tensors; ends: the prompt does.
    """
    count = query.shape[1]
    deadlines = torch.full_like(entries["positions"], NEVER)
    prompt.append({**entries, "deadlines": deadlines}, 0 if terms.bounded else terms.prompt)
    hidden = terms.gone(first) - terms.dropped(first)
    index = prompt.seen(first, prompt.length - hidden)
    dies = terms.gone(first + count) > terms.gone(first)
    if dies:
        names = [name for name in entries if name not in ("keys", "values", "positions")]
        state = {name: taken(prompt.held(name), index) for name in names}
        positions = taken(prompt.held("positions"), index)
        found = policy.leaving(Rivals(state, positions, first, count, terms.places)).to(torch.int32)
        held = prompt.held("deadlines")
        if index is None:
            held.copy_(found)
        else:
            held.scatter_(1, index, found)
    if clock is not None:
        clock.lap(POLICY, query.device)
    output = attend_prompt(prompt, index, query, first, scaling, dies)
    if clock is not None:
        clock.lap(ATTENTION, query.device)
    if ends:
        prompt.mass = last_mass(prompt, query[:, -1:], scaling)
        if clock is not None:
            clock.lap(SIGNALS, query.device)
    return output


def let_go(policy: Policy, prompts: Sequence[Prompt], gone: int, query: int, room: int) -> None:
    """Of one row's bounded prompts in several layers: drop the `gone` entries of each head that this query does not
    see, which join its means in the order in which they left."""
    if room:
        _join(policy, prompts, gone, room)
    for prompt in prompts:
        prompt.keep(in_slot_order(prompt.held("deadlines") > query, prompt.length - gone))


def _join(policy: Policy, prompts: Sequence[Prompt], gone: int, room: int) -> None:
    leaving: dict[str, list[Tensor]] = {"keys": [], "values": []}
    for prompt in prompts:
        index = prompt.held("deadlines").argsort(dim=-1, stable=True)[:, :gone]
        for name, found in leaving.items():
            found.append(taken(prompt.held(name), index))
        if prompt.means is None:
            keys = prompt.held("keys")
            wide = torch.promote_types(keys.dtype, torch.float32)
            made = keys.new_zeros((keys.shape[0], room, keys.shape[2]), dtype=wide)
            prompt.set_means((made, made.clone(), made.new_zeros(made.shape[:2])))
    parts = zip(*(prompt.means for prompt in prompts if prompt.means is not None), strict=True)
    means = tuple(torch.cat(part) for part in parts)
    assert len(means) == 3
    run_through(policy, means, torch.cat(leaving["keys"]), torch.cat(leaving["values"]))
    heads = means[0].shape[0] // len(prompts)
    for i, prompt in enumerate(prompts):
        keys, values, counts = (part[i * heads : (i + 1) * heads].clone() for part in means)
        prompt.set_means((keys, values, counts))


def cut(policy: Policy, layer: PagedLayer, terms: Sequence[Terms], states: Sequence[str]) -> None:
    """At the end of prompts: divide the places of a layer among its heads, and move what stays into its pages."""
    assert layer.pool is not None
    for row, own in enumerate(terms):
        prompt = layer.prompts.pop(row, None)
        chosen = _chosen(policy, layer, prompt, own, states)
        into_pages(layer.pool, layer.cache.owners(row), chosen, prompt, policy)
        if prompt is not None:
            prompt.free()


def _chosen(policy: Policy, layer: PagedLayer, prompt: Prompt | None, terms: Terms, states: Sequence[str]) -> Cut:
    if prompt is None:
        return Cut(torch.full((layer.cache.shape.kv_heads,), terms.places), terms.room, None)
    assert prompt.mass is not None
    last, positions = terms.prompt - 1, prompt.held("positions")
    competes = (positions >= policy.sinks) & (positions <= last - int(policy.recent(terms.entries)))
    worth = policy.worth({name: prompt.held(name) for name in states}, last - positions)
    division = Division(layer.index, prompt.mass, worth, competes, terms.places, terms.crowded)
    places = policy.divide(division).to(worth.device)
    rank = rank_by_score(worth.masked_fill(~competes, -torch.inf), positions)
    return Cut(places, terms.room, ~competes | (rank < places[:, None]))


@dataclass(frozen=True)
class Cut:
    """Of one row in one layer. places: of each head's pool, `[kv_heads]`; room: means of each head; stays: which of the
    prompt's entries, `[kv_heads, slots]` bool, None where it has none."""

    places: Tensor
    room: int
    stays: Tensor | None


def into_pages(pool: PagePool, owners: Sequence[int], cut: Cut, prompt: Prompt | None, policy: Policy) -> None:
    """Give the owners, who have nothing yet, pages with the entries that stay. The host waits once for the device."""
    kept = [0] * len(owners) if cut.stays is None else cut.stays.sum(-1).tolist()
    lengths = [cut.room + count for count in kept]
    pool.take({owner: -(-length // PAGE) for owner, length in zip(owners, lengths, strict=True) if length})
    span = slice(owners[0], owners[-1] + 1)
    for head, (owner, length) in enumerate(zip(owners, lengths, strict=True)):
        if length == 0:
            continue
        slots = (pool.table(owner)[:, None] * PAGE + torch.arange(PAGE, device=pool.device)).flatten()[:length]
        means, entries = slots[: cut.room], slots[cut.room :]
        pool.buffers["positions"].view(-1)[means] = MEAN
        pool.buffers["deadlines"].view(-1)[slots] = NEVER
        if prompt is not None and cut.stays is not None:
            stays = cut.stays[head].nonzero()[:, 0]
            for name in prompt.buffers:
                if name != "deadlines":
                    pool.buffers[name].flatten(0, 1)[entries] = prompt.held(name)[head, stays]
            pool.buffers["bias"].view(-1)[entries] = 0
            _write_means(pool, owner, means, _means(policy, prompt, head, cut))
        pool.newest[owner] = slots[-1]
    pool.beside["places"][span] = cut.places.to(pool.device)
    pool.beside["room"][span] = cut.room
    pool.length[span] = torch.tensor(lengths, device=pool.device)
    pool.reusable[span] = -1


def _means(policy: Policy, prompt: Prompt, head: int, cut: Cut) -> tuple[Tensor, Tensor, Tensor] | None:
    """Keys, values and counts of one head's means: of what goes now, behind what has gone before, if any has."""
    if cut.room == 0 or cut.stays is None:
        return None
    gone = (~cut.stays[head]).nonzero()[:, 0]
    keys, values = prompt.held("keys")[head, gone], prompt.held("values")[head, gone]
    if prompt.means is None:
        return policy.summarise(keys, values, cut.room) if gone.shape[0] else None
    before = prompt.means[0][head, None], prompt.means[1][head, None], prompt.means[2][head, None]
    mean_keys, mean_values, counts = run_through(policy, before, keys[None], values[None])
    some = counts[0] > 0
    return mean_keys[0, some], mean_values[0, some], counts[0, some]


def _write_means(pool: PagePool, owner: int, slots: Tensor, means: tuple[Tensor, Tensor, Tensor] | None) -> None:
    if means is None:
        return
    keys, values, counts = means
    slots = slots[: counts.shape[0]]
    for name, mean in (("keys", keys), ("values", values)):
        buffer = pool.buffers[name].flatten(0, 1)
        buffer[slots], rest = rounded(mean, buffer.dtype)
        if RESTS[name] in pool.beside:
            pool.beside[RESTS[name]][owner, : counts.shape[0]] = rest
    pool.buffers["bias"].view(-1)[slots] = counts.log().to(pool.buffers["bias"].dtype)
    pool.beside["counts"][owner, : counts.shape[0]] = counts.to(pool.beside["counts"].dtype)
