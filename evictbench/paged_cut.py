"""From a prompt to pages: what stays of it, behind the means of what does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.paged_means import MEAN, RESTS, rounded, run_through
from evictbench.pages import NEVER, PAGE, PagePool

if TYPE_CHECKING:
    from evictbench.paged_prompt import Prompt
    from evictbench.policy import Policy


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
