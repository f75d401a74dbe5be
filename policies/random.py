"""Random eviction: the yardstick that any method has to beat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from evictbench.errors import UserError
from evictbench.policy import ModelShape, NewEntries, Policy, SlotTensor, Step
from evictbench.policy.plot_style import PlotStyle

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = 2**64 - 1


def priority(seed: int, layer: int, head: int, position: int) -> float:
    """A number in [0, 1) from a splitmix64 hash of its arguments, equal on every machine."""
    x = (((seed * 1_000_003 + layer) * 1_000_003 + head) * _MIX[0] + (position + 1) * _MIX[1]) & _MASK
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    x ^= x >> 31
    return (x >> 40) / 2**24


def _signed(value: int) -> int:
    """The low 64 bits of a number, read as a signed one, because torch has no unsigned 64-bit arithmetic."""
    value &= _MASK
    return value - 2**64 if value >= 2**63 else value


@lru_cache(maxsize=1024)
def _head_terms(seed: int, layer: int, kv_heads: int, device: torch.device) -> Tensor:
    """The terms of the hash that seed, layer and head add, `[kv_heads, 1]` int64 on the device."""
    import torch

    terms = [_signed(((seed * 1_000_003 + layer) * 1_000_003 + head) * _MIX[0]) for head in range(kv_heads)]
    return torch.tensor(terms, device=device)[:, None]


@dataclass(frozen=True)
class Settings:
    """seed: of the hash. sinks, recent: first and last positions that are protected (recent counts the query's own)."""

    seed: int = 0
    sinks: int = 4
    recent: int = 32

    def __post_init__(self) -> None:
        for name in ("sinks", "recent"):
            if getattr(self, name) < 0:
                raise UserError(f"random: {name} must be 0 or more, not {getattr(self, name)}.")


class Random(Policy):
    """A yardstick of ours: each (layer, KV head, position) has a hashed priority, and the pool keeps the highest.

    Sinks and a recent window are protected, as in the learned policies, so that only the ranking differs from them.
    """

    name = "random"
    summary = "hashed priorities behind sinks and a recent window; a yardstick"
    paper = "-"
    plot_style = PlotStyle("#737373", "x", (0, (2, 2)), yardstick=True, place=2)
    Config = Settings
    prefill = "bounded"
    static = True

    @property
    def sinks(self) -> int:
        """How many first positions are never evicted."""
        return int(self.config.sinks)

    def recent(self, budget: Tensor | int) -> Tensor | int:
        """How many last positions are never evicted, whatever the budget."""
        return int(self.config.recent)

    def slot_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        """`priority`, the hashed number of each entry."""
        import torch

        return {"priority": SlotTensor(torch.float32)}

    def enter(self, entering: NewEntries) -> Mapping[str, Tensor]:
        """The priority of each new entry, as `priority` gives it; the arithmetic wraps at 64 bits as it does there."""
        positions = entering.positions
        x = _head_terms(self.config.seed, entering.layer, entering.shape.kv_heads, positions.device)
        x = x + (positions.long()[:, None] + 1) * _signed(_MIX[1])
        for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
            x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)
        x = x ^ ((x >> 31) & (2**33 - 1))
        return {"priority": ((x >> 40) & (2**24 - 1)).float() / 2**24}

    def score(self, step: Step) -> Tensor:
        """The priority of each entry, `[rows, kv_heads, slots]`."""
        return step.state["priority"]
