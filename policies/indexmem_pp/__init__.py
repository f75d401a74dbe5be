"""IndexMem++: entries are ranked by a learned score that falls with distance; means represent the evicted ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from evictbench.errors import UserError
from evictbench.policy import HeadBudgetPolicy, HeadBudgets, ModelShape, NewEntries, PrefillChunk, SlotTensor
from evictbench.policy.plot_style import DASH_DOT, PlotStyle

from .hub import RELEASED
from .recipe import Recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from evictbench.models.policy_weights import Weights
    from evictbench.policy import Activation
    from evictbench.policy.learner import Learner, Training

    from .scorer import Scorer

SINKS, WINDOW, CENTROIDS = 4, 128, 64
"""The authors' values, used where neither the settings nor the weights give others."""

FLOOR = 4
"""A head gets at least a budget divided by this beside what is protected, as in all recorded runs (512 of 2,048)."""


@dataclass(frozen=True)
class Settings:
    """sinks, window: protected first and last positions (window counts the query's own entry). centroids: means of
    evicted entries in each head. None: the value of the weights' card.

    budgets: how heads get their budgets: by the "mass" of attention that they would retain, "uniform", or by a "table"
    `[layers, kv_heads]` of the heads' budgets, or of shares (`table`: a JSON file, or a .pt file of the authors'; else
    the weights'). floor: the least that a head has beside protected entries; None: a quarter of the budget, at most
    half of what is not protected, or with a table nothing. prompt: what limits the prompt's queries natively: budgets
    "divided" before each layer attends, or an "equal_share" less the centroids, with budgets divided at the prompt's
    end. deadlines: whose ranks decide what a prompt's queries see, "middle", those of the middle query of a pass, or
    "exact", each query's own; None: middle where budgets are divided first, else exact.
    """

    sinks: int | None = None
    window: int | None = None
    centroids: int | None = None
    budgets: Literal["mass", "uniform", "table"] = "mass"
    floor: int | None = None
    prompt: Literal["divided", "equal_share"] = "divided"
    deadlines: Literal["middle", "exact"] | None = None
    table: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("window", 1), ("centroids", 0), ("floor", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"indexmem_pp: {name} must be {least} or more, not {value}.")
        words = {
            "budgets": ("mass", "uniform", "table"),
            "prompt": ("divided", "equal_share"),
            "deadlines": (None, "middle", "exact"),
        }
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                known = " or ".join(word for word in allowed if word is not None)
                raise UserError(f"indexmem_pp: {name} is {known}, not {getattr(self, name)!r}.")
        if self.table is not None and self.budgets != "table":
            raise UserError("indexmem_pp: a table of head budgets is used with budgets=table only.")


class IndexMem(HeadBudgetPolicy):
    """IndexMem++ (successor of Yang et al., arXiv 2605.25475; no number of its own), after the authors' code
    (Chooovy/kvpress at 5a5826ed, its physical eviction).

    Each key gets a score and a rate when it enters, from the hidden state that its layer's attention receives. For the
    query at q a key at j has the score `score + rate · (q - j) / 16,384`, with a rate of at most 0. Sinks and the last
    `window` positions are protected; the token that leaves the window competes for the pool of its head.

    The prompt is held whole, and comes in one forward pass. Before a layer attends, its budget is divided among its
    heads by the attention mass of the prompt's last query that they would retain, ranked as the prompt's middle query
    ranks entries. Every query of the prompt sees sinks, window and what a pool of its head's size would have kept by
    those ranks. At the prompt's end the centroids come off each head's pool, which keeps what the last query ranks
    best, and k-means over the keys of the others gives the centroids. After that an evicted entry joins the nearest
    centroid, or the first that is still empty. Where the question is unseen, the end of the context takes the part of
    the prompt's end.

    prompt=equal_share: a query of the prompt sees what a pool of an equal share less the centroids would have kept, by
    its own ranks; budgets are divided at the end, and the prompt may come in chunks. `dense`: it sees all. `bounded`:
    all heads have equal capacity, and centroids are running means from the start, which the prompt's queries do not
    see.

    Deviations, all with their sizes in docs/authors.md. A query of the answer counts as an entry of the budget, where
    theirs sees one entry more, and what leaves is ranked by the query that comes, not by the one before. The text after
    the prompt is read token by token, even where it comes as one chunk. Scores are float32 whatever the model is. The
    common mass is found exactly and not by bisection in float32. Where the centroids would leave a pool nothing, they
    get half of what is not protected, and a head's share is never below the centroids. A budget in percent that grows
    gives each head one more per entry. A mean is held in float32 and read in the cache's dtype; beside a narrower dtype
    the bytes count 8 · head_dim for each mean. Clusters start at entries drawn by one seed for all heads.
    """

    name = "indexmem_pp"
    summary = "learned: a score that fades with distance; head budgets by attention mass; means of what was evicted"
    paper = "arXiv 2605.25475 (successor)"
    plot_style = PlotStyle("#7f2f29", "h", DASH_DOT, place=10)
    Config = Settings
    Recipe: ClassVar[type[Any]] = Recipe
    foreign = RELEASED
    prefill = "sparse"
    learned = True

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._trained: Mapping[str, Any] = {}
        self._scorers: list[Scorer] = []
        self._scorer_on: dict[tuple[int, torch.device], Scorer] = {}
        self._stacked: dict[tuple[tuple[int, ...], torch.device], dict[str, Tensor]] = {}
        self._table: Tensor | None = None

    def _setting(self, name: str, default: int) -> int:
        given = getattr(self.config, name)
        value = self._trained.get(name) if given is None else given
        return default if value is None else int(value)

    @property
    def sinks(self) -> int:
        """How many first positions are never evicted."""
        return self._setting("sinks", SINKS)

    @property
    def window(self) -> int:
        """How many last positions are never evicted, the query's own included."""
        return self._setting("window", WINDOW)

    @property
    def divides_first(self) -> bool:  # type: ignore[override]
        """Whether budgets are divided before a layer attends to the prompt."""
        return bool(self.config.prompt == "divided")

    @property
    def chunk_dependent(self) -> bool:  # type: ignore[override]
        """Whether the result depends on the chunk size: where a prompt in chunks is ranked by the middle of each."""
        return bool(self.config.deadlines == "middle" and self.config.prompt == "equal_share")

    @property
    def hooks(self) -> frozenset[Activation]:
        """The activation that scores are computed from: the input of a layer's attention."""
        return frozenset({"normed_hidden"})

    def recent(self, budget: Tensor | int) -> Tensor | int:
        """How many last positions are never evicted: the window, whatever the budget."""
        return self.window

    def centroids(self, budget: int) -> int:
        """How many centroids each head has; half of the unprotected budget where they would leave the pool nothing."""
        evictable, centroids = budget - self.sinks - self.window, self._setting("centroids", CENTROIDS)
        return centroids if centroids < evictable else max(0, (evictable - 1) // 2)

    def use(self, weights: Weights, shape: ModelShape) -> None:
        """Take the scorers' tensors `[layers, ...]`, the card's sinks, window and centroids where the settings leave
        them open, and with budgets=table the tensor or card entry `head_budgets`. UserError: they do not fit."""
        from .allocation import read_table
        from .scorer import scorers

        tensors = dict(weights.tensors)
        table: Any = tensors.pop("head_budgets", weights.card.get("head_budgets"))
        self._trained = {**weights.card, **(weights.card.get("settings") or {})}
        self._scorers = scorers(tensors, shape, weights.origin)
        self._scorer_on, self._stacked = {}, {}
        if self.config.budgets == "table":
            origin = weights.origin
            if self.config.table is not None:
                table, origin = _read_table(self.config.table), self.config.table
            if table is None:
                raise UserError(
                    f"The weights {weights.origin} have no table of head budgets: give a JSON file, as in "
                    "indexmem_pp:budgets=table,table=heads.json."
                )
            self._table = read_table(table, shape, origin)

    def learner(self, shape: ModelShape, training: Training) -> Learner:
        """The trainable side: the scorers."""
        from .learner import IndexMemLearner

        return IndexMemLearner(shape, training)

    def slot_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        """`score`, the score and the rate of each entry."""
        import torch

        return {"score": SlotTensor(torch.float32, width=2)}

    def read(self, layer: int, name: Activation, tensor: Tensor) -> Tensor:
        """The hidden states `[rows, new, hidden]`, unchanged."""
        return tensor

    def features(self, entries: NewEntries) -> Mapping[str, Tensor]:
        """The score and the rate of new entries, `[rows, kv_heads, new, 2]` float32."""
        import torch

        hidden = entries.activation
        assert hidden is not None
        score, rate = self._scorer(entries.layer, hidden.device)(hidden, entries.positions)
        return {"score": torch.stack((score, rate), dim=-1)}

    def features_of_layers(self, entries: Sequence[NewEntries]) -> Mapping[str, Tensor]:
        """`features` for several layers, `[layers, rows, kv_heads, new, 2]`, in a few products for all of them."""
        import torch

        from .together import score_layers

        layers = tuple(layer.layer for layer in entries)
        hidden = [layer.activation for layer in entries if layer.activation is not None]
        key = layers, hidden[0].device
        if key not in self._stacked:
            scorers = [self._scorer(layer, hidden[0].device) for layer in layers]
            self._stacked[key] = {
                name: torch.stack([scorer.get_parameter(name).data for scorer in scorers])
                for name, _ in scorers[0].named_parameters()
            }
            for index, scorer in enumerate(scorers):  # one copy on the device
                for name, parameter in scorer.named_parameters():
                    parameter.data = self._stacked[key][name][index]
        score, rate = score_layers(self._stacked[key], torch.stack(hidden), entries[0].positions)
        return {"score": torch.stack((score, rate), dim=-1)}

    def _scorer(self, layer: int, device: torch.device) -> Scorer:
        if not self._scorers:
            raise UserError(f"{self.name} has no weights yet: give it some with use().")
        if (layer, device) not in self._scorer_on:
            self._scorer_on[layer, device] = self._scorers[layer].to(device)
        return self._scorer_on[layer, device]

    def score_at(self, state: Mapping[str, Tensor], age: Tensor) -> Tensor:
        """The score of each entry for a query `age` positions after it, by the `score` state `[.., 2]`."""
        from .scorer import effective

        return effective(state["score"][..., 0], state["score"][..., 1], age)

    def evicted_in_chunk(self, chunk: PrefillChunk) -> Tensor:
        """The first query of a chunk of the prompt that no longer sees each entry, `[heads, slots]`."""
        from .recursion import expiry

        return expiry(
            chunk.state["score"][..., 0],
            chunk.state["score"][..., 1],
            chunk.positions,
            first=chunk.first,
            new=chunk.new,
            capacity=chunk.capacity,
            sinks=self.sinks,
            window=self.window,
            how=self.config.deadlines or ("exact" if isinstance(chunk.capacity, int) else "middle"),
        )

    def ranking_query(self, prompt: int) -> int:
        """The middle of the prompt where it is ranked so, else its last query."""
        middle = self.config.deadlines == "middle" or (self.config.deadlines is None and self.divides_first)
        return prompt // 2 if middle else prompt - 1

    def head_budgets(self, budgets: HeadBudgets) -> Tensor:
        """What each head has beside protected entries, `[kv_heads]`: by retained mass, equal, or by the table."""
        from .allocation import mass_budgets, table_budgets

        places, heads = budgets.places, budgets.mass.shape[0]
        protected = self.sinks + self.window
        if self.config.budgets == "table":
            assert self._table is not None
            floor = max(min(self.config.floor or 0, places), budgets.centroids)
            return table_budgets(self._table[budgets.layer], places=places, protected=protected, floor=floor)
        if self.config.budgets == "uniform" or not budgets.over_budget:
            return super().head_budgets(budgets)
        floor = min((places + protected) // FLOOR, places // 2) if self.config.floor is None else self.config.floor
        floor = max(min(floor, places), budgets.centroids)
        # Beyond its floor a head gets one place at least.
        kept = ~budgets.competes
        return mass_budgets(budgets.mass, budgets.scores, kept, total=places * heads, floor=floor + 1)

    def cluster(self, keys: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Mean keys, mean values and sizes of the `count` clusters that k-means finds, see `centroids.cluster`."""
        from .centroids import cluster

        return cluster(keys, values, count)

    def nearest_centroid(self, keys: Tensor, counts: Tensor, capacity: Tensor, evicted: Tensor) -> Tensor:
        """The index of the first empty centroid, else of the nearest, see `centroids.nearest`."""
        from .centroids import nearest

        return nearest(keys, counts, capacity, evicted)


def _read_table(name: str) -> Any:
    """The table in a JSON file, or in a file that the authors' `fit_head_budgets` has saved."""
    file = Path(name).expanduser()
    if not file.is_file():
        raise UserError(f"There is no table of head budgets at {name}.")
    if file.suffix == ".pt":
        import pickle

        import torch

        try:
            return torch.load(file, map_location="cpu", weights_only=True)["table"]
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"The table of head budgets {name} is no file of torch.save with a table.") from error
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"The table of head budgets {name} is not JSON.") from error
