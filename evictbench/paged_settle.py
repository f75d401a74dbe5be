"""After a chunk: which entries stay, and where the new ones go, so that an owner's pages are filled from the front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from evictbench.pages import PagePool


def settle(pool: PagePool, first: int, entries: Mapping[str, Tensor], following: int) -> None:
    """As of `PagePool.settle`."""
    page = pool.buffers["positions"].shape[1]
    heads = range(first, first + entries["deadlines"].shape[0])
    stays = [pool.entries(owner, "deadlines") > following for owner in heads]
    enters = entries["deadlines"] > following
    lengths = (torch.stack([stay.sum() for stay in stays]) + enters.sum(-1)).tolist()
    moves: list[tuple[Tensor, dict[str, Tensor]]] = []
    for head, (owner, stay, length) in enumerate(zip(heads, stays, lengths, strict=True)):
        late = stay[length:].nonzero()[:, 0] + length
        coming = enters[head].nonzero()[:, 0]
        filled = torch.zeros(length, dtype=torch.bool, device=pool.device)
        filled[: stay.shape[0]] = stay[:length]
        table = pool.table(owner)
        late = table[late // page] * page + late % page
        moved = {
            name: torch.cat((pool.buffers[name].flatten(0, 1)[late], new[head, coming]))
            for name, new in entries.items()
        }
        moves.append(((~filled).nonzero()[:, 0], moved))
    sizes = {owner: -(-length // page) for owner, length in zip(heads, lengths, strict=True)}
    pool.give_back({owner: size for owner, size in sizes.items() if size < len(pool.tables[owner])})
    pool.take({owner: size - len(pool.tables[owner]) for owner, size in sizes.items()})
    for owner, length, (places, moved) in zip(heads, lengths, moves, strict=True):
        slots = (pool.table(owner)[:, None] * page + torch.arange(page, device=pool.device)).flatten()
        for name, values in moved.items():
            pool.buffers[name].flatten(0, 1)[slots[places]] = values
        pool.clear(slots[length:])
        pool.newest[owner] = slots[places[-1]]
    span = slice(heads.start, heads.stop)
    pool.length[span] = torch.tensor(lengths, device=pool.device)
    pool.visible[span] = pool.length[span]
    pool.reusable[span] = -1
