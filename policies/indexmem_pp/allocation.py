"""What each head has beside protected entries: by the attention mass that it would retain, or by a stored table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.errors import UserError

if TYPE_CHECKING:
    from evictbench.policy import ModelShape


def mass_budgets(mass: Tensor, scores: Tensor, kept: Tensor, *, total: int, floor: int) -> Tensor:
    """The capacity of each head, `[kv_heads]` int64, with which all retain one mass, as nearly as whole entries allow.

    mass: `[kv_heads, slots]`, the last query's softmax. scores: `[kv_heads, slots]`, the ranking by which entries are
    kept (higher first, of equals the earlier slot). kept: `[kv_heads, slots]` bool, the entries that stay anyway. A
    head retains the mass of these and of its best others. Capacities sum to `total`, or to all entries that compete
    where those are fewer. Each head gets `floor` first, where that is possible, and never more than it has. Where no
    mass is on the entries that compete, capacities are equal.

    The authors bisect for the common mass and give the rest by marginal mass. Here it is found exactly: each entry of
    capacity goes to the head that retains least so far, which takes the `total` lowest of all partial sums.
    """
    heads, slots = mass.shape
    wide = mass.dtype if mass.device.type == "mps" else torch.float64
    competes = ~kept
    available = competes.sum(-1)
    total = min(total, int(available.sum()))
    floor = min(floor, total // heads)
    rank = torch.arange(slots, device=mass.device)
    if bool((mass * competes).sum() > 0):
        order = scores.masked_fill(kept, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        ranked = (mass * competes).to(wide).gather(1, order)
        retained = (mass * kept).to(wide).sum(-1, keepdim=True) + ranked.cumsum(-1) - ranked
    else:
        retained = rank.to(wide).expand(heads, -1)
    retained = retained.masked_fill(rank < floor, -torch.inf).masked_fill(rank >= available[:, None], torch.inf)
    # Among equal sums the head with less capacity is first, then the first head.
    chosen = retained.T.flatten().argsort(stable=True)[:total]
    return torch.bincount(chosen % heads, minlength=heads)


def table_budgets(budgets: Tensor, *, places: int, protected: int, floor: int) -> Tensor:
    """What each head has beside protected entries by a stored table, `[kv_heads]` int64, `places` on average.

    budgets: `[kv_heads]`, of the heads with their `protected` entries, of any sum: they are brought to the budget in
    proportion, by largest remainder. A head gets `floor` at least, and the others that much less, in proportion to what
    they have above it.
    """
    heads = budgets.shape[0]
    whole = budgets.double() / budgets.double().sum() * (places + protected) * heads - protected
    above = (whole - floor).clamp(min=0)
    rest = (places - floor) * heads
    exact = above / above.sum().clamp(min=1e-9) * rest
    # What is whole but for rounding is whole.
    exact = torch.where((exact - exact.round()).abs() < 1e-6, exact.round(), exact)
    capacity = exact.floor().long()
    left = rest - int(capacity.sum())
    capacity[(capacity - exact).argsort(stable=True)[:left]] += 1
    return capacity + floor


def read_table(data: object, shape: ModelShape, origin: str) -> Tensor:
    """A table `[layers, kv_heads]` of head budgets or shares. data: nested lists or a tensor.

    Raises UserError, which names `origin`, for what is no such table.
    """
    try:
        table = torch.as_tensor(data, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"The table of head budgets in {origin} is not a table of numbers.") from error
    expected = (shape.layers, shape.kv_heads)
    if tuple(table.shape) != expected or not bool((table >= 0).all()) or not bool((table.sum(-1) > 0).all()):
        raise UserError(
            f"The table of head budgets in {origin} is not one of shares for {shape.layers} layers with "
            f"{shape.kv_heads} KV heads each."
        )
    return table
