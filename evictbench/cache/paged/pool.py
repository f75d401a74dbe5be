"""Pages of entries: how one layer keeps heads of different lengths without room for the longest of them.

Sixteen entries make a page. A page belongs to one owner, which is one KV head of one row, number `row * kv_heads +
head`. The host knows which pages an owner has; only the device knows what lies in them. An owner's entries fill its
pages from the front, so that only its last page is partly empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.policy.step import EMPTY

if TYPE_CHECKING:
    from evictbench.cache.buffers import ByteCounter
    from evictbench.policy.step import SlotTensor

PAGE = 16
"""Entries of a page."""

SPARE = 0.05
"""Pages in stock, as a share of those in use: above it the pool is made smaller. It grows by a little less."""


class PagePool:
    """The pages of one layer. The number of a slot is page * 16 + its place in the page.

    buffers: "keys" and "values" `[pages, 16, head_dim]`, as cached. "positions" `[pages, 16]` int32, EMPTY where
    nothing lies. "expiry" `[pages, 16]` int32, the first query position that may no longer see the entry, 0 where
    nothing lies. One more for each item of `slot_tensors`, with its fill where nothing lies.
    owner: `[pages]` int64, the owner of each page, 0 for a page that nobody has.
    length: `[owners]` int64, filled slots. newest: the slot that was written last. freed_slot: a slot whose entry no
    later query sees, -1 if there is none. visible: entries that the next query sees, without its own. tail: the last
    page. owner_tensors: more tensors `[owners, ...]` by name.
    tables: each owner's pages in order. changes: how often pages have changed hands. stacked_by: the mark of the
    `StackedPools` whose parts these tensors are now; not itself, so that pages are freed without a garbage collection.
    """

    def __init__(
        self,
        owners: int,
        like: Tensor,
        bytes: ByteCounter,
        slot_tensors: Mapping[str, SlotTensor] | None = None,
        owner_tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._bytes = bytes
        device, head_dim = like.device, like.shape[-1]
        self.buffers: dict[str, Tensor] = {
            "keys": like.new_empty((0, PAGE, head_dim)),
            "values": like.new_empty((0, PAGE, head_dim)),
            "positions": torch.empty((0, PAGE), dtype=torch.int32, device=device),
            "expiry": torch.empty((0, PAGE), dtype=torch.int32, device=device),
        }
        self._fills: dict[str, float] = {"positions": EMPTY, "expiry": 0}
        for name, declared in (slot_tensors or {}).items():
            tail = (declared.width,) if declared.width else ()
            self.buffers[name] = torch.empty((0, PAGE, *tail), dtype=declared.dtype, device=device)
            self._fills[name] = declared.fill
        self.owner_tensors = {name: tensor.to(device).clone() for name, tensor in (owner_tensors or {}).items()}
        self.owner = torch.zeros(0, dtype=torch.int64, device=device)
        self.length, self.newest, self.visible, self.tail = (
            torch.zeros(owners, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.freed_slot = torch.full_like(self.length, -1)
        self.tables: list[list[int]] = [[] for _ in range(owners)]
        self.spare: list[int] = []
        self.changes = 0
        self.stacked_by: object = None
        self._on_device: tuple[Tensor, Tensor] | None = None
        self._front: tuple[int, Tensor] | None = None
        self._layout: tuple[int, Tensor, Tensor, Tensor] | None = None
        self._bytes.add(self.nbytes())

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
        """The part of its bytes that belongs to some owners, in proportion to their pages in use."""
        used = self.pages - len(self.spare)
        return self.nbytes() * sum(len(self.tables[owner]) for owner in owners) // max(1, used)

    def _by_owner(self) -> dict[str, Tensor]:
        names = ("length", "newest", "visible", "tail", "freed_slot")
        return {**{name: getattr(self, name) for name in names}, **self.owner_tensors}

    # Pages.

    def take(self, wanted: Mapping[int, int]) -> None:
        """Give owners more pages. wanted: owner to number of pages."""
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
        """Put owners' last pages in stock. kept: owner to the number of first pages that it keeps."""
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
        self._bytes.add(-self.owner.nbytes)
        self.owner = self.owner[kept]
        self._bytes.add(self.owner.nbytes)
        self.newest = _moved(self.newest, renumbered)
        self.freed_slot = torch.where(self.freed_slot < 0, -1, _moved(self.freed_slot.clamp(min=0), renumbered))
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
        self._bytes.add(owner.nbytes - self.owner.nbytes)
        self.owner = owner
        self.spare += range(pages - 1, old - 1, -1)

    def _replace(self, name: str, new: Tensor) -> None:
        self._bytes.add(new.nbytes)
        self._bytes.add(-self.buffers[name].nbytes)
        self.buffers[name] = new

    def _set_tails(self, owners: Iterable[int]) -> None:
        """Write the last page of these owners to the device; called whenever pages change hands."""
        self.changes += 1
        self._on_device = self._front = None
        having = [owner for owner in owners if self.tables[owner]]
        if having:
            last = torch.tensor([self.tables[owner][-1] for owner in having], device=self.device)
            self.tail[torch.tensor(having, device=self.device)] = last

    # Entries.

    def tables_on_device(self, owners: int) -> tuple[Tensor, Tensor]:
        """The number of pages of each of the first owners, `[owners]` int32, and their numbers, `[owners, most]` int32,
        padded with 0. Kept until pages change hands."""
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
        """Pages side by side for each owner: their numbers, `[owners * most]` int64, padded; where they are padding,
        `[owners, most, 1, 1]` bool; and the index of each page among them, `[pages]` int64, an index of padding for a
        page that nobody has. Kept until pages change hands."""
        if self._layout is None or self._layout[0] != self.changes:
            most = max(map(len, self.tables)) + 1
            table = torch.tensor([pages + [0] * (most - len(pages)) for pages in self.tables])
            held = torch.tensor([len(pages) for pages in self.tables])
            missing = torch.arange(most) >= held[:, None]
            place = torch.full((self.pages,), most - 1)
            place[table[~missing]] = torch.arange(most).expand_as(table)[~missing]
            place += self.owner.cpu() * most
            self._layout = (
                self.changes,
                table.flatten().to(self.device),
                missing[:, :, None, None].to(self.device),
                place.to(self.device),
            )
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
            numbers = (first + torch.arange(PAGE, device=self.device)).flatten(1)[:, :slots].contiguous()
            self._front = slots, numbers
        return self._front[1]

    def _clear(self, slots: Tensor) -> None:
        """Make these slots look as if nothing lay in them."""
        for name, fill in self._fills.items():
            self.buffers[name].flatten(0, 1)[slots] = fill

    def slots_of(self, owner: int) -> Tensor:
        """The numbers of an owner's slots in order, int64, those of the last page whole."""
        return (self.table(owner)[:, None] * PAGE + torch.arange(PAGE, device=self.device)).flatten()

    def set_newest_expiry(self, owners: Tensor | slice, expiry: Tensor) -> None:
        """Set the expiry `[n]` of the entries that these owners wrote last."""
        self.buffers["expiry"].view(-1)[self.newest[owners]] = expiry

    def write_chunk(self, first: int, entries: Mapping[str, Tensor], following: int) -> None:
        """Write a chunk's entries in place of those that no query from position `following` on sees.

        first: the first of the owners that have new entries. entries: `[heads, new, ...]` for every buffer, one item of
        dimension 0 for each of these owners. The last entry of each must be visible.
        """
        heads = range(first, first + entries["expiry"].shape[0])
        stays = [self.entries(owner, "expiry") > following for owner in heads]
        enters = entries["expiry"] > following
        lengths = (torch.stack([stay.sum() for stay in stays]) + enters.sum(-1)).tolist()
        moves: list[tuple[Tensor, dict[str, Tensor]]] = []
        for head, (owner, stay, length) in enumerate(zip(heads, stays, lengths, strict=True)):
            # Entries behind the new length move into the gaps in front of it, and the new ones behind them.
            behind = stay[length:].nonzero()[:, 0] + length
            entering = enters[head].nonzero()[:, 0]
            filled = torch.zeros(length, dtype=torch.bool, device=self.device)
            filled[: stay.shape[0]] = stay[:length]
            table = self.table(owner)
            behind = table[behind // PAGE] * PAGE + behind % PAGE
            moved = {
                name: torch.cat((self.buffers[name].flatten(0, 1)[behind], new[head, entering]))
                for name, new in entries.items()
            }
            moves.append(((~filled).nonzero()[:, 0], moved))
        sizes = {owner: -(-length // PAGE) for owner, length in zip(heads, lengths, strict=True)}
        self.give_back({owner: size for owner, size in sizes.items() if size < len(self.tables[owner])})
        self.take({owner: size - len(self.tables[owner]) for owner, size in sizes.items()})
        for owner, length, (gaps, moved) in zip(heads, lengths, moves, strict=True):
            slots = self.slots_of(owner)
            for name, values in moved.items():
                self.buffers[name].flatten(0, 1)[slots[gaps]] = values
            self._clear(slots[length:])
            self.newest[owner] = slots[gaps[-1]]
        span = slice(heads.start, heads.stop)
        self.length[span] = torch.tensor(lengths, device=self.device)
        self.visible[span] = self.length[span]
        self.freed_slot[span] = -1

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
                if name in ("newest", "freed_slot"):
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
        self.freed_slot[source : source + count] = -1


def _moved(slots: Tensor, renumbered: Tensor) -> Tensor:
    """Slots by the pages' new numbers."""
    if renumbered.numel() == 0:
        return slots
    return renumbered[slots // PAGE] * PAGE + slots % PAGE
