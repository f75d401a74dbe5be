"""How many places each head's pool gets: by the attention mass that it would retain, equally, or by a stored table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.errors import UserError

if TYPE_CHECKING:
    from evictbench.policy import ModelShape


def mass_budgets(mass: Tensor, worth: Tensor, kept: Tensor, *, total: int, floor: int) -> Tensor:
    """Places of each head, `[kv_heads]` int64: such that all retain one mass, as nearly as whole entries can.

    mass: `[kv_heads, slots]`, the last query's softmax; worth: likewise, the ranking along which mass is retained
    (higher first, of equals the earlier slot); kept: likewise, bool, what stays anyway. A head's retained mass is that
    of what stays and of its best entries.
    They sum to `total`, or to all that compete where those are fewer; a head gets `floor` first, where that can be, and
    never more than it has. Nothing to divide (no mass on what competes): equal shares.

    The authors bisect for the common mass and give what is left by marginal mass. Here it is found exactly: each place
    goes to the head that has retained least so far, which is to take the `total` lowest of all partial sums.
    """
    heads, slots = mass.shape
    wide = mass.dtype if mass.device.type == "mps" else torch.float64
    competes = ~kept
    has = competes.sum(-1)
    total = min(total, int(has.sum()))
    floor = min(floor, total // heads)
    place = torch.arange(slots, device=mass.device)
    if bool((mass * competes).sum() > 0):
        order = worth.masked_fill(kept, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        ranked = (mass * competes).to(wide).gather(1, order)
        retained = (mass * kept).to(wide).sum(-1, keepdim=True) + ranked.cumsum(-1) - ranked
    else:
        retained = place.to(wide).expand(heads, -1)
    retained = retained.masked_fill(place < floor, -torch.inf).masked_fill(place >= has[:, None], torch.inf)
    # Of equal sums the head with fewer places is first, then the first head.
    chosen = retained.T.flatten().argsort(stable=True)[:total]
    return torch.bincount(chosen % heads, minlength=heads)


def table_budgets(shares: Tensor, *, total: int, floor: int) -> Tensor:
    """Places of each head by stored shares `[kv_heads]`, which need not sum to anything: `[kv_heads]` int64.

    They sum to `total`; each has `floor` first, and the rest is divided as shares say, by largest remainder.
    """
    heads = shares.shape[0]
    floor = min(floor, total // heads)
    rest = total - floor * heads
    wanted = shares.double() / shares.double().sum() * rest
    places = wanted.floor().long()
    left = rest - int(places.sum())
    places[(places - wanted).argsort(stable=True)[:left]] += 1
    return places + floor


def read_table(data: object, shape: ModelShape, origin: str) -> Tensor:
    """A table `[layers, kv_heads]` of shares, from nested lists or a tensor; UserError where it is another."""
    try:
        table = torch.as_tensor(data, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"The table of head budgets in {origin} is not a table of numbers.") from error
    wanted = (shape.layers, shape.kv_heads)
    if tuple(table.shape) != wanted or not bool((table >= 0).all()) or not bool((table.sum(-1) > 0).all()):
        raise UserError(
            f"The table of head budgets in {origin} is not one of shares for {shape.layers} layers with "
            f"{shape.kv_heads} KV heads each."
        )
    return table
