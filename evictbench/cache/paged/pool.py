"""Pages of entries: how one layer keeps heads of different lengths without room for the longest of them.

Sixteen entries make a page; a page belongs to one KV head of one row, its owner (`row · kv_heads + head`). The host
knows which pages an owner has; what lies in them is known to the device alone. An owner's entries fill its pages from
the front, so that no more than the last page of each is partly empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from evictbench.policy.step import SlotTensor

    pass


PAGE = 16
"""Entries of a page."""

NEVER = 2**31 - 1
"""The deadline of an entry that stays."""

EMPTY = -1
"""The position of a slot that holds nothing."""

SPARE = 0.05
"""Pages in stock, as a share of those in use: above it the pool is made smaller. It grows by a little less."""


class PagePool:
    """The pages of one layer. A slot is named by a number: page · 16 + place in the page.

    buffers: "keys" and "values" `[pages, 16, head_dim]`, as cached; "positions" `[pages, 16]` int32, EMPTY where
    nothing lies; "deadlines" likewise, the first query position that may no longer see the entry, 0 where nothing
    lies; and `more` of them, filled where nothing lies. owner: `[pages]` int64, 0 for a page that nobody has.
    length: `[owners]` int64, slots that are filled; newest: the slot of the entry written last; reusable: a slot whose
    entry no later query sees, -1 where there is none; visible: the entries that the next query sees, without its own.
    beside: more of each owner, `[owners, ...]`. tables: each owner's pages, in order. changes: how often pages have
    changed hands. board: what holds these, side by side with those of other pools.
    """

    def __init__(
        self,
        owners: int,
        like: Tensor,
        count_bytes: Callable[[int], None],
        more: Mapping[str, SlotTensor] | None = None,
        beside: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._count_bytes = count_bytes
        device, head_dim = like.device, like.shape[-1]
        self.buffers: dict[str, Tensor] = {
            "keys": like.new_empty((0, PAGE, head_dim)),
            "values": like.new_empty((0, PAGE, head_dim)),
            "positions": torch.empty((0, PAGE), dtype=torch.int32, device=device),
            "deadlines": torch.empty((0, PAGE), dtype=torch.int32, device=device),
        }
        self._fills: dict[str, float] = {"positions": EMPTY, "deadlines": 0}
        for name, tensor in (more or {}).items():
            tail = (tensor.width,) if tensor.width else ()
            self.buffers[name] = torch.empty((0, PAGE, *tail), dtype=tensor.dtype, device=device)
            self._fills[name] = tensor.fill
        self.beside = {name: tensor.to(device).clone() for name, tensor in (beside or {}).items()}
        self.owner = torch.zeros(0, dtype=torch.int64, device=device)
        self.length, self.newest, self.visible, self.tail = (
            torch.zeros(owners, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.reusable = torch.full_like(self.length, -1)
        self.tables: list[list[int]] = [[] for _ in range(owners)]
        self.spare: list[int] = []
        self.changes = 0
        self.board: object = None
        self._on_device: tuple[Tensor, Tensor] | None = None
        self._front: tuple[int, Tensor] | None = None
        self._layout: tuple[int, Tensor, Tensor, Tensor] | None = None
        count_bytes(self.nbytes())

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.owner.device

    @property
    def pages(self) -> int:
        """Pages held, in use or in stock."""
        return self.owner.shape[0]

    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in (*self.buffers.values(), self.owner, *self._by_owner().values()))

    def bytes_of(self, owners: Iterable[int]) -> int:
        """The part of its bytes that falls to some owners, by their pages among those in use."""
        used = self.pages - len(self.spare)
        return self.nbytes() * sum(len(self.tables[owner]) for owner in owners) // max(1, used)

    def _by_owner(self) -> dict[str, Tensor]:
        names = ("length", "newest", "visible", "tail", "reusable")
        return {**{name: getattr(self, name) for name in names}, **self.beside}

    # Pages.

    def take(self, wanted: Mapping[int, int]) -> None:
        """Give owners so many pages more."""
        total = sum(wanted.values())
        if total == 0:
            return
        self.changes += 1
        if total > len(self.spare):
            needed = self.pages - len(self.spare) + total
            self._resize(max(needed, int(needed * (1 + SPARE * 0.8))))
        given: list[tuple[int, int, int]] = []
        for owner, count in wanted.items():
            for _ in range(count):
                given.append((self.spare.pop(), owner, len(self.tables[owner])))
                self.tables[owner].append(given[-1][0])
        pages, owners, places = torch.tensor(given, device=self.device).unbind(-1)
        self.owner[pages] = owners
        if len(given) > len(wanted):
            self._set_tails(wanted)
            return
        # Decode, where this happens at every step: one copy to the device.
        self.tail[owners] = pages
        if self._on_device is not None:
            counts, tables = self._on_device
            if max(place for _, _, place in given) < tables.shape[1] and max(wanted) < tables.shape[0]:
                tables[owners, places] = pages.to(torch.int32)
                counts[owners] = places.to(torch.int32) + 1
            else:
                self._on_device = None

    def give_back(self, kept: Mapping[int, int]) -> None:
        """Leave owners so many of their first pages, and put the others in stock."""
        freed: list[int] = []
        for owner, count in kept.items():
            freed += self.tables[owner][count:]
            del self.tables[owner][count:]
        if freed:
            index = torch.tensor(freed, device=self.device)
            for name, fill in self._fills.items():
                self.buffers[name][index] = fill
            self.owner[index] = 0
            self.spare += freed
            self._set_tails(kept)

    def trim(self, exactly: bool = False) -> None:
        """Make the pool as small as its pages in use, if those in stock are too many (or, exactly, if there are any).

        Pages get new numbers.
        """
        used = self.pages - len(self.spare)
        if len(self.spare) <= (0 if exactly else max(1, int(used * SPARE))):
            return
        kept = torch.tensor([page for table in self.tables for page in table], dtype=torch.int64, device=self.device)
        renumbered = torch.zeros(self.pages, dtype=torch.int64, device=self.device)
        renumbered[kept] = torch.arange(used, device=self.device)
        for name, old in self.buffers.items():
            self._replace(name, old[kept])
        self._count_bytes(-self.owner.nbytes)
        self.owner = self.owner[kept]
        self._count_bytes(self.owner.nbytes)
        self.newest = _moved(self.newest, renumbered)
        self.reusable = torch.where(self.reusable < 0, -1, _moved(self.reusable.clamp(min=0), renumbered))
        start = 0
        for owner, table in enumerate(self.tables):
            self.tables[owner] = list(range(start, start + len(table)))
            start += len(table)
        self.spare = []
        self._set_tails(range(len(self.tables)))

    def _resize(self, pages: int) -> None:
        old = self.pages
        for name, buffer in self.buffers.items():
            new = buffer.new_full((pages, *buffer.shape[1:]), self._fills.get(name, 0))
            new[:old] = buffer
            self._replace(name, new)
        owner = self.owner.new_zeros(pages)
        owner[:old] = self.owner
        self._count_bytes(owner.nbytes - self.owner.nbytes)
        self.owner = owner
        self.spare += range(pages - 1, old - 1, -1)

    def _replace(self, name: str, new: Tensor) -> None:
        self._count_bytes(new.nbytes)
        self._count_bytes(-self.buffers[name].nbytes)
        self.buffers[name] = new

    def _set_tails(self, owners: Iterable[int]) -> None:
        """Tell the device which page is each owner's last; called whenever pages change hands."""
        self.changes += 1
        self._on_device = self._front = None
        having = [owner for owner in owners if self.tables[owner]]
        if having:
            last = torch.tensor([self.tables[owner][-1] for owner in having], device=self.device)
            self.tail[torch.tensor(having, device=self.device)] = last

    # Entries.

    def tables_on_device(self, owners: int) -> tuple[Tensor, Tensor]:
        """How many pages each of the first owners has, `[owners]` int32, and which, `[owners, most]` int32, padded with
        0. Kept until pages change hands."""
        if self._on_device is None or self._on_device[0].shape[0] != owners:
            tables = self.tables[:owners]
            most = 1 << (max(map(len, tables)) - 1).bit_length()
            padded = [table + [0] * (most - len(table)) for table in tables]
            self._on_device = (
                torch.tensor([len(table) for table in tables], dtype=torch.int32, device=self.device),
                torch.tensor(padded, dtype=torch.int32, device=self.device),
            )
        return self._on_device

    def layout(self) -> tuple[Tensor, Tensor, Tensor]:
        """Pages by owner: which, `[owners · most]` int64, padded; where that is padding, `[owners, most, 1, 1]` bool;
        where among those each page is, `[pages]`, on padding for one that nobody has. Kept until pages are moved."""
        if self._layout is None or self._layout[0] != self.changes:
            most = max(map(len, self.tables)) + 1
            table = torch.tensor([pages + [0] * (most - len(pages)) for pages in self.tables])
            held = torch.tensor([len(pages) for pages in self.tables])
            missing = torch.arange(most) >= held[:, None]
            place = torch.full((self.pages,), most - 1)
            place[table[~missing]] = torch.arange(most).expand_as(table)[~missing]
            place += self.owner.cpu() * most
            found = table.flatten().to(self.device), missing[:, :, None, None].to(self.device), place.to(self.device)
            self._layout = self.changes, *found
        return self._layout[1:]

    def table(self, owner: int) -> Tensor:
        """The pages of an owner, in order, int64."""
        return torch.tensor(self.tables[owner], dtype=torch.int64, device=self.device)

    def entries(self, owner: int, name: str) -> Tensor:
        """A copy of what an owner's slots hold in one buffer, in order: `[slots, ...]`, the last page whole."""
        return self.buffers[name][self.table(owner)].flatten(0, 1)

    def front(self, slots: int) -> Tensor:
        """The first slots of each owner, `[owners, slots]` int64; 0 where it has none. Kept until pages are moved."""
        if self._front is None or self._front[0] != slots:
            pages = -(-slots // PAGE)
            tables = [(table[:pages] + [0] * pages)[:pages] for table in self.tables]
            first = torch.tensor(tables, device=self.device)[:, :, None] * PAGE
            found = (first + torch.arange(PAGE, device=self.device)).flatten(1)[:, :slots].contiguous()
            self._front = slots, found
        return self._front[1]

    def clear(self, slots: Tensor) -> None:
        """Leave nothing in these slots, as far as can be seen."""
        for name, fill in self._fills.items():
            self.buffers[name].flatten(0, 1)[slots] = fill

    def alive(self, owner: int, freed: Tensor | None) -> tuple[Tensor, Tensor]:
        """Positions and deadlines of an owner's entries; freed: the slot of each owner that the next entry takes, which
        is left out as are slots that hold no token."""
        positions, deadlines = self.entries(owner, "positions"), self.entries(owner, "deadlines")
        if freed is None:
            return positions, deadlines
        slots = (self.table(owner)[:, None] * PAGE + torch.arange(PAGE, device=self.device)).flatten()
        held = (positions >= 0) & (slots != freed[owner])
        return positions[held], deadlines[held]

    def wants_page(self, owners: int) -> Tensor:
        """`[owners]` bool: whose next entry has no slot to go to."""
        return (self.reusable[:owners] < 0) & (self.length[:owners] % PAGE == 0)

    def set_newest(self, owners: Tensor | slice, deadlines: Tensor) -> None:
        """Decide the deadlines of the entries that these owners wrote last; both `[n]`."""
        self.buffers["deadlines"].view(-1)[self.newest[owners]] = deadlines

    def put(self, owners: int | Tensor, entries: Mapping[str, Tensor]) -> None:
        """One new entry for each of the first owners, or of those that are named, `[owners, ...]` in every buffer, in
        place of one that no query sees any more or behind the others. Who `wants_page` must have got one."""
        if isinstance(owners, Tensor):
            reusable, length, tail = self.reusable[owners], self.length[owners], self.tail[owners]
        else:
            reusable, length, tail = self.reusable[:owners], self.length[:owners], self.tail[:owners]
        target = torch.where(reusable < 0, tail * PAGE + length % PAGE, reusable)
        for name, entry in entries.items():
            self.buffers[name].flatten(0, 1).index_copy_(0, target, entry)
        if isinstance(owners, Tensor):
            self.length[owners] = length + (reusable < 0)
            self.newest[owners] = target
        else:
            length += reusable < 0
            self.newest[:owners] = target

    def look_ahead(self, following: Tensor) -> None:
        """Find what the next queries see and what they free. following: `[owners]` int32, their positions."""
        deadlines, positions = self.buffers["deadlines"], self.buffers["positions"]
        seen = deadlines > following.index_select(0, self.owner)[:, None]
        self.visible.zero_().index_add_(0, self.owner, seen.sum(-1))
        slots = torch.arange(seen.numel(), device=self.device).view(seen.shape)
        dead = slots.masked_fill(seen | (positions == EMPTY), -1).amax(-1)
        self.reusable.fill_(-1).scatter_reduce_(0, self.owner, dead, "amax")

    def settle(self, first: int, entries: Mapping[str, Tensor], following: int) -> None:
        """After a chunk: what no query from `following` on sees gives its place to the chunk's entries that are seen.

        entries: those of the owners from `first` on, one for each item of dimension 0, `[heads, new, ...]` in every
        buffer. The last of them must be seen.
        """
        settle(self, first, entries, following)

    # Rows.

    def copy_from(self, other: PagePool, first: int) -> None:
        """Give the owners from `first` on, who have nothing yet, what the owners of another pool have."""
        self.take({first + owner: len(table) for owner, table in enumerate(other.tables)})
        self._front = None
        renumbered = torch.zeros(other.pages, dtype=torch.int64, device=self.device)
        for owner, table in enumerate(other.tables):
            theirs, mine = torch.tensor(table), torch.tensor(self.tables[first + owner])
            renumbered[theirs.to(self.device)] = mine.to(self.device)
            for name, buffer in self.buffers.items():
                buffer[mine.to(self.device)] = other.buffers[name][theirs.to(other.device)].to(self.device)
        span = slice(first, first + len(other.tables))
        others = other._by_owner()
        for name, mine in self._by_owner().items():
            if name != "tail":
                theirs = others[name].to(self.device)
                if name in ("newest", "reusable"):
                    theirs = torch.where(theirs < 0, -1, _moved(theirs.clamp(min=0), renumbered))
                mine[span] = theirs

    def move_owners(self, source: int, target: int, count: int) -> None:
        """Free what `count` owners from `target` on have, and give them what those from `source` on have."""
        self.give_back({target + i: 0 for i in range(count)})
        if source != target:
            for i in range(count):
                pages = self.table(source + i)
                self.tables[target + i], self.tables[source + i] = self.tables[source + i], []
                self.owner[pages] = target + i
            self._set_tails(range(target, target + count))
            for tensor in self._by_owner().values():
                tensor[target : target + count] = tensor[source : source + count].clone()
        self.length[source : source + count] = 0
        self.reusable[source : source + count] = -1


def _moved(slots: Tensor, renumbered: Tensor) -> Tensor:
    """Slots by the pages' new numbers."""
    if renumbered.numel() == 0:
        return slots
    return renumbered[slots // PAGE] * PAGE + slots % PAGE


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
