"""IndexMem++: a learned score that fades with distance decides what stays, and means stand for what went."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from evictbench.errors import UserError
from evictbench.policy import Arriving, Division, ModelShape, Policy, Rivals, SlotTensor

from .hub import RELEASED
from .recipe import Recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from evictbench.models.policy_weights import Weights
    from evictbench.policy import Tap
    from evictbench.policy.learner import Learner, Training

    from .scorer import Scorer

SINKS, WINDOW, CENTROIDS = 4, 128, 64
"""The authors', where neither settings nor weights say else."""

FLOOR = 4
"""A head has at least one part in four of an equal share, as published (512 of 2,048)."""


@dataclass(frozen=True)
class Settings:
    """sinks, window (the query's own entry included): protected; centroids: means of evicted entries, of each head;
    None: as the weights' card has it.

    budgets: of heads, decided at the end of the prompt by the "mass" of attention that they would retain, "uniform", or
    by a "table" `[layers, kv_heads]` of shares, from a JSON file (`table`) or the weights. floor: places of its pool
    that each head has at least; None: a quarter of an equal share. deadlines: of what a prompt's queries see, "exact",
    or "chunk_middle", where a chunk is ranked as its middle query has it.
    """

    sinks: int | None = None
    window: int | None = None
    centroids: int | None = None
    budgets: Literal["mass", "uniform", "table"] = "mass"
    floor: int | None = None
    deadlines: Literal["exact", "chunk_middle"] = "exact"
    table: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("window", 1), ("centroids", 0), ("floor", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"indexmem_pp: {name} must be {least} or more, not {value}.")
        for name, known in (("budgets", ("mass", "uniform", "table")), ("deadlines", ("exact", "chunk_middle"))):
            if getattr(self, name) not in known:
                raise UserError(f"indexmem_pp: {name} is {' or '.join(known)}, not {getattr(self, name)!r}.")
        if self.table is not None and self.budgets != "table":
            raise UserError("indexmem_pp: a table of head budgets is used with budgets=table only.")


class IndexMem(Policy):
    """IndexMem++ (successor of Yang et al., arXiv 2605.25475; no number of its own), and the authors' code
    (Chooovy/kvpress).

    Each key gets a score and a rate when it enters, from what its layer's attention receives: to the query at q a key
    at j is worth `score + rate · (q - j) / 16,384`, rate at most 0. Sinks and the last `window` positions are
    protected; the token that leaves the window competes for a place in the pool of its head. Of a budget, sinks, window
    and centroids are taken off, and the rest is the pool's; where the centroids leave it nothing, they are half of what
    there is.

    The prompt is held whole, and a query sees what a pool of an equal share would have left it (native; `dense`: all).
    At its last query each layer's places are divided among its heads by the attention mass that they would retain, over
    the whole prompt; each head keeps its best, and k-means over the keys of the others makes its centroids. From then
    on an entry that leaves joins the nearest centroid, or the first that is still empty. `bounded`: heads store equally
    much, so that there is nothing to divide, and centroids are running means from the start, which the prompt's queries
    do not see. The context's end stands for the prompt's where the question is unseen.

    Deviations and what the paper leaves open. A prompt that fits the budget is seen whole and divided equally, so that
    a budget of the whole text is the full cache (but for budgets=table, whose small heads evict all the same). The
    common mass is found exactly and not by 60 bisections. A head's pool of P places is P from the prompt's end on; a
    budget in percent that grows gives each head one more per entry. What follows the prompt is read token by token,
    even where it comes as one chunk. A mean is computed and held in float32 and read in the cache's dtype; what is held
    beside a narrower one is counted in the bytes, 8 · head_dim for each mean. The floor is of the pool. Clusters start
    at entries drawn by one seed for all heads.
    """

    name = "indexmem_pp"
    summary = "learned: a score that fades with distance; head budgets by attention mass; means of what was evicted"
    paper = "arXiv 2605.25475 (successor)"
    Config = Settings
    Recipe: ClassVar[type[Any]] = Recipe
    foreign = RELEASED
    prefill = "sparse"
    ragged = True
    contested = True
    learned = True

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._trained: Mapping[str, Any] = {}
        self._scorers: list[Scorer] = []
        self._on: dict[tuple[int, torch.device], Scorer] = {}
        self._together: dict[tuple[tuple[int, ...], torch.device], dict[str, Tensor]] = {}
        self._table: Tensor | None = None

    def _setting(self, name: str, default: int) -> int:
        own = getattr(self.config, name)
        found = self._trained.get(name) if own is None else own
        return default if found is None else int(found)

    @property
    def sinks(self) -> int:
        """The first positions, never evicted."""
        return self._setting("sinks", SINKS)

    @property
    def window(self) -> int:
        """The last positions, never evicted, the query's own among them."""
        return self._setting("window", WINDOW)

    @property
    def chunked(self) -> bool:  # type: ignore[override]
        """Ranks of a chunk's middle depend on the chunk."""
        return bool(self.config.deadlines == "chunk_middle")

    @property
    def taps(self) -> frozenset[Tap]:
        """What a layer's attention receives."""
        return frozenset({"normed_hidden"})

    def recent(self, budget: Tensor | int) -> Tensor | int:
        """The window, whatever the budget."""
        return self.window

    def summaries(self, budget: int) -> int:
        """The centroids, or, where they leave the pool no place, half of what is not protected."""
        evictable, wanted = budget - self.sinks - self.window, self._setting("centroids", CENTROIDS)
        return wanted if wanted < evictable else max(0, (evictable - 1) // 2)

    def use(self, weights: Weights, shape: ModelShape) -> None:
        """Take the scorers' tensors `[layers, ...]`, the card's sinks, window and centroids where no setting says
        otherwise, and a table of head budgets, if one is asked for: tensor or card entry `head_budgets`."""
        from .allocation import read_table
        from .scorer import scorers

        tensors = dict(weights.tensors)
        table: Any = tensors.pop("head_budgets", weights.card.get("head_budgets"))
        self._trained = {**weights.card, **(weights.card.get("settings") or {})}
        self._scorers = scorers(tensors, shape, weights.origin)
        self._on, self._together = {}, {}
        if self.config.budgets == "table":
            origin = weights.origin
            if self.config.table is not None:
                table, origin = _from_file(self.config.table), self.config.table
            if table is None:
                raise UserError(
                    f"The weights {weights.origin} have no table of head budgets: give a JSON file, as in "
                    "indexmem_pp:budgets=table,table=heads.json."
                )
            self._table = read_table(table, shape, origin)

    def learner(self, shape: ModelShape, training: Training) -> Learner:
        """Its trainable side, the scorers."""
        from .learner import IndexMemLearner

        return IndexMemLearner(shape, training)

    def slot_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        """Score and rate of each entry."""
        import torch

        return {"score": SlotTensor(torch.float32, width=2)}

    def read(self, layer: int, name: Tap, tensor: Tensor) -> Tensor:
        """The hidden states as they are, `[rows, new, hidden]`."""
        return tensor

    def judge(self, arriving: Arriving) -> Mapping[str, Tensor]:
        """Score and rate of new entries, `[rows, kv_heads, new, 2]` float32."""
        import torch

        assert arriving.read is not None
        score, rate = self._scorer(arriving.layer, arriving.read.device)(arriving.read, arriving.positions)
        return {"score": torch.stack((score, rate), dim=-1)}

    def judge_together(self, arriving: Sequence[Arriving]) -> Mapping[str, Tensor]:
        """The same for several layers, in a few products for all of them."""
        import torch

        from .together import of_layers

        layers, reads = tuple(one.layer for one in arriving), [one.read for one in arriving if one.read is not None]
        key = layers, reads[0].device
        if key not in self._together:
            scorers = [self._scorer(layer, reads[0].device) for layer in layers]
            self._together[key] = {
                name: torch.stack([scorer.get_parameter(name).data for scorer in scorers])
                for name, _ in scorers[0].named_parameters()
            }
            for at, scorer in enumerate(scorers):  # one copy on the device
                for name, parameter in scorer.named_parameters():
                    parameter.data = self._together[key][name][at]
        score, rate = of_layers(self._together[key], torch.stack(reads), arriving[0].positions)
        return {"score": torch.stack((score, rate), dim=-1)}

    def _scorer(self, layer: int, device: torch.device) -> Scorer:
        if not self._scorers:
            raise RuntimeError(f"{self.name} has no weights yet: give it some with use().")
        if (layer, device) not in self._on:
            self._on[layer, device] = self._scorers[layer].to(device)
        return self._on[layer, device]

    def worth(self, state: Mapping[str, Tensor], age: Tensor) -> Tensor:
        """The score, faded."""
        from .scorer import effective

        return effective(state["score"][..., 0], state["score"][..., 1], age)

    def leaving(self, rivals: Rivals) -> Tensor:
        """The recursion over a chunk of the prompt."""
        from .recursion import deadlines

        return deadlines(
            rivals.state["score"][..., 0],
            rivals.state["score"][..., 1],
            rivals.positions,
            first=rivals.first,
            new=rivals.new,
            places=rivals.places,
            sinks=self.sinks,
            window=self.window,
            how=self.config.deadlines,
        )

    def divide(self, division: Division) -> Tensor:
        """By retained mass, equally, or by the table."""
        from .allocation import mass_budgets, table_budgets

        places, heads = division.places, division.mass.shape[0]
        floor = places // FLOOR if self.config.floor is None else min(int(self.config.floor), places)
        if self.config.budgets == "mass" and division.crowded:
            return mass_budgets(division.mass, division.worth, ~division.competes, total=places * heads, floor=floor)
        if self.config.budgets == "table":
            assert self._table is not None
            return table_budgets(self._table[division.layer], total=places * heads, floor=floor)
        return super().divide(division)

    def summarise(self, keys: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """k-means."""
        from .centroids import cluster

        return cluster(keys, values, count)

    def joins(self, keys: Tensor, counts: Tensor, room: Tensor, entering: Tensor) -> Tensor:
        """The first empty centroid, else the nearest."""
        from .centroids import choose

        return choose(keys, counts, room, entering)


def _from_file(name: str) -> Any:
    file = Path(name).expanduser()
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"There is no table of head budgets at {name}.") from error
    except ValueError as error:
        raise UserError(f"The table of head budgets {name} is not JSON.") from error
