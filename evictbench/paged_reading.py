"""Reading a prompt whose entries compete: chunk by chunk, what a bounded one lets go of, and the cut at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.clock import ATTENTION, POLICY, SIGNALS
from evictbench.deadlines import rank_by_score
from evictbench.paged_cut import Cut, into_pages
from evictbench.paged_means import run_through
from evictbench.paged_prompt import Prompt, attend_prompt, last_mass, taken
from evictbench.pages import NEVER
from evictbench.placement import in_slot_order
from evictbench.policy import Division, Policy, Rivals

if TYPE_CHECKING:
    from evictbench.clock import Clock
    from evictbench.paged import PagedLayer
    from evictbench.paged_terms import Terms


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
