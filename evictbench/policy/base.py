"""The policy interface: what a KV-cache eviction method declares, what the engine shows it, what it answers.

A policy never touches keys or values in the cache. It declares what it must see (`signals`), who shares one kept
set (`shares`) and what travels with each entry (`slot_state`); after each forward pass the engine asks it for a
score per slot, keeps the best, and frees the rest. A new score-based policy is about 40 lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from evictbench.policy.step import (
    Arriving,
    Division,
    Entering,
    MemoryTensor,
    ModelShape,
    Rivals,
    SlotTensor,
    Step,
)

if TYPE_CHECKING:
    from torch import Tensor

    from evictbench.policy.budget import Budget
    from evictbench.policy.step import DenseRun, Tap

Signal = Literal["last_query_probs", "window_probs", "mass", "recent_probs"]
Shares = Literal["head", "layer", "model"]
PrefillMode = Literal["dense", "bounded", "sparse"]
Phase = Literal["prompt", "decode"]


@dataclass(frozen=True)
class NoSettings:
    """The settings of a policy that has none."""


class Policy:
    """An eviction method. Subclasses override the class attributes and the methods that apply to them.

    A policy holds no state between sequences; what must be remembered lives in the cache (`slot_state`).

    signals: what the engine must compute; nothing declared, nothing computed, and the fast kernel is used.
    shares: who shares one kept set: each KV head has its own, a layer's heads share one, or the whole model does; where
    a setting decides, set in `__init__`.
    prefill: the method's native prompt mode. "dense": the prompt is attended whole and cut once at its end;
    "bounded": never more than the budget and one chunk is held; "sparse": all of it is held and cut once at its end,
    but what a bounded prompt would have evicted is not seen (where entries are `contested`).
    static: the score of an entry never depends on queries or on attention. Then visibility inside a chunk is decided
    by deadlines, and any chunk size gives the token-at-a-time result.
    reindexed_sinks: the sinks are seen at their in-cache distance (StreamingLLM's position shift).
    guarded: the budget holds at every decode step; a run that sees more fails.
    rotary: it turns keys back to before their rotation, and needs the model's rotary frequencies.
    foresees: it needs a label of every entry from a dense run over the same text.
    ragged: each head keeps as many entries as it wants, in pages; `expiry` decides, and `taps` names what it reads.
    share_of: what a budget in percent is a share of: the tokens "seen" (the prompt's, where those are more), or the
    entries in the "cache" after the pass, which earlier cuts have made fewer.
    hides: entries may be held that some heads do not see (`hidden`), so that memory is that of all that is held.
    decides_late: (of a ragged policy with at most one tap) what `expiry` says in a pass of one token a row can first
    matter to the next pass, and the new entry's own deadline is said there.
    contested: (of a ragged policy) what has left the recent window competes for a fixed number of places of its head,
    and the worst of them leaves as one more comes; its share of the budget is decided at the end of the prompt.
    chunked: what it decides depends on how a prompt is cut into chunks, even where nothing is bounded.
    stated_length: tokens of text that a budget is meant for, where the suite states it; else each prompt's own.
    learned: it needs trained weights, which `use` takes (`fit` may find that a model brings its own);
    transferable: their shapes do not depend on the model.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    Config: ClassVar[type[Any]] = NoSettings
    needs_budget: ClassVar[bool] = True
    signals: ClassVar[frozenset[Signal]] = frozenset()
    shares: Shares = "head"
    share_of: Literal["seen", "cache"] = "seen"
    prefill: ClassVar[PrefillMode] = "dense"
    static: ClassVar[bool] = False
    rotary: ClassVar[bool] = False
    foresees: ClassVar[bool] = False
    ragged: ClassVar[bool] = False
    hides: bool = False
    decides_late: ClassVar[bool] = False
    contested: ClassVar[bool] = False
    chunked: bool = False
    learned: bool = False
    transferable: ClassVar[bool] = False
    stated_length: int | None = None

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        # What a class says anew of one layer holds for several together, unless it says that anew too.
        for one in ("read", "expiry", "judge"):
            if one in vars(cls) and f"{one}_together" not in vars(cls):
                setattr(cls, f"{one}_together", getattr(Policy, f"{one}_together"))

    @property
    def sinks(self) -> int:
        """How many first positions are never evicted. Part of the budget."""
        return 0

    @property
    def window(self) -> int:
        """How many last queries `window_probs` shows."""
        return 0

    @property
    def reindexed_sinks(self) -> bool:
        """Whether sinks are seen at their in-cache distance."""
        return False

    @property
    def guarded(self) -> bool:
        """Whether the budget holds at every decode step."""
        return True

    def recent(self, budget: Tensor | int) -> Tensor | int:
        """How many last positions, the next query's own included, are never evicted. Part of the budget."""
        return 0

    def keep(self, budget: int, phase: Phase) -> int | None:
        """How many entries to keep when one more would exceed `budget`; None: evict nothing."""
        return budget - 1

    def charged_state(self, shape: ModelShape) -> int:
        """State that does not scale with slots, as entries per KV head: elements ÷ (2 · head_dim), rounded up."""
        return 0

    def minimum_budget(self, shape: ModelShape) -> int:
        """The smallest budget that leaves one entry to choose: what is protected, what is charged, and one."""
        return self.sinks + int(self.recent(0)) + self.charged_state(shape) + 1

    def check_budget(self, budget: Budget) -> None:
        """Raise UserError for a budget that the policy cannot work with, whatever the text."""

    def slot_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        """The tensors that travel with the entries, by name."""
        return {}

    def shared_state(self, shape: ModelShape) -> Mapping[str, SlotTensor | MemoryTensor]:
        """State held once for all that share a kept set, by name: `[rows, sets, slots(, width)]` that travels with the
        entries, or `[rows, sets, *size]` that does not; `sets` is kv_heads where each head has its own, else 1."""
        return {}

    def hidden(self, step: Step) -> Tensor:
        """`[rows, kv_heads, slots]` bool: entries that this layer's heads do not see in this pass (if it `hides`)."""
        raise NotImplementedError(f"{type(self).__name__} hides nothing")

    def seen_of(self, held: int, budget: int, shape: ModelShape) -> float:
        """Of so many entries held, how many a decode query sees under a budget, mean over heads (if it `hides`)."""
        return held

    @property
    def ahead(self) -> int:
        """Where a text's continuation is not given: how many tokens of it the dense run writes itself, at most."""
        return 0

    def foresee(self, run: DenseRun) -> list[Tensor]:
        """What a dense run over a text says of its tokens, `[kv_heads, tokens]` float32 a layer (if it foresees)."""
        raise NotImplementedError(f"{type(self).__name__} does not foresee")

    def memory(self, shape: ModelShape) -> Mapping[str, MemoryTensor]:
        """The state that each sequence carries through a layer, by name."""
        return {}

    def enter(self, entering: Entering) -> Mapping[str, Tensor]:
        """First values of slot tensors for new entries; absent names start at `fill`.

        Each value is `[rows, kv_heads, new]`, with the width appended where there is one.
        """
        return {}

    def prepare(self, step: Step) -> None:
        """Update the slot and sequence tensors once new entries are written, before anything attends."""

    def settle(self, steps: Sequence[Step]) -> None:
        """In place of `prepare` where a static policy decodes, one token a row and a kept set for each head: called
        once a pass, after all layers have attended, with several layers' views (all of one device)."""
        for step in steps:
            self.prepare(step)

    def observe(self, step: Step) -> None:
        """Update the slot tensors after a forward pass, before anything is evicted."""

    def score(self, step: Step) -> Tensor:
        """`[rows, sets, slots]`: higher is kept; equal scores keep the earlier position."""
        raise NotImplementedError(f"{type(self).__name__} does not evict")

    def deadlines(self, step: Step) -> Tensor:
        """`[rows, sets, slots]` int64: the first query position that may no longer see each entry (static only)."""
        from evictbench.policy.deadlines import static_deadlines

        return static_deadlines(
            self.score(step),
            step.positions,
            step.query_positions,
            step.budgets,
            sinks=self.sinks,
            recent=self.recent(step.budgets),
            steady=step.steady,
        )

    # Of a policy whose heads keep different numbers of entries (`ragged`). `signals`, `slot_state` and `memory`
    # are for slots, and it is not asked for them.

    @property
    def taps(self) -> frozenset[Tap]:
        """What it reads of each layer besides keys and values."""
        return frozenset()

    def fit(self, config: Any) -> None:
        """Take from a model's config what is not set."""

    def allot(self, share: float, length: int) -> float:
        """What a budget of this share of a text of `length` tokens comes to, a number of the policy's own.

        Raises UserError for a share that cannot be had.
        """
        return share

    def read(self, layer: int, name: Tap, tensor: Tensor) -> Tensor:
        """What to remember of a tensor it declared, until the layer attends."""
        raise NotImplementedError(f"{type(self).__name__} reads nothing")

    def read_together(self, layers: Sequence[int], name: Tap, tensors: Sequence[Tensor]) -> Tensor:
        """The same of one token of each row and several layers of one device, `[layers, ...]`. Called once a pass where
        a model decodes and the policy `decides_late`, after all layers have attended."""
        import torch

        return torch.stack(
            [self.read(*of, tensor) for of, tensor in zip(((i, name) for i in layers), tensors, strict=True)]
        )

    def before_rotation(self, queries: Tensor) -> Tensor | None:
        """The queries `[rows, queries, heads, head_dim]` that the model goes on with; None: as they are."""
        return None

    def after_rotation(self, queries: Tensor) -> Tensor:
        """The queries `[rows, heads, queries, head_dim]` that attend."""
        return queries

    def expiry(self, arriving: Arriving) -> Tensor:
        """The first query position that may no longer see an entry, `pages.NEVER` if none: `[rows, kv_heads, 1 + new]`
        whole numbers. First that of the last entry before this pass, which can be decided here; then of the new ones,
        the last of which the next query sees.
        """
        raise NotImplementedError(f"{type(self).__name__} is not ragged")

    def expiry_together(self, arriving: Sequence[Arriving]) -> Tensor:
        """The same, as of `read_together`: `[layers, rows, kv_heads, 2]`."""
        import torch

        return torch.stack([self.expiry(one) for one in arriving])

    # Of a ragged policy whose entries are `contested`. Its `slot_state` travels with them; it is not asked for
    # `expiry`, nor `allot`. Sinks, `recent(budget)` and a pool: the token that leaves the recent window joins the pool
    # of its head, and if that is one too many, what is worth least to the query that comes next leaves for good.

    def summaries(self, budget: int) -> int:
        """How many entries of each head, at most, are means of what was evicted. Part of the budget, and fixed for a
        row by the budget of its prompt."""
        return 0

    def judge(self, arriving: Arriving) -> Mapping[str, Tensor]:
        """The slot tensors of new entries, `[rows, kv_heads, new(, width)]`."""
        raise NotImplementedError(f"{type(self).__name__} judges nothing")

    def judge_together(self, arriving: Sequence[Arriving]) -> Mapping[str, Tensor]:
        """The same for one token of each row and several layers of one device: `[layers, rows, kv_heads, 1(, width)]`.
        Called once a pass where a model decodes, after all layers have attended."""
        import torch

        judged = [self.judge(one) for one in arriving]
        return {name: torch.stack([one[name] for one in judged]) for name in judged[0]}

    def worth(self, state: Mapping[str, Tensor], age: Tensor) -> Tensor:
        """What entries are worth to a query `age` positions after them, shaped like age, floating. The least leaves;
        of equals the later."""
        raise NotImplementedError(f"{type(self).__name__} judges nothing")

    def leaving(self, rivals: Rivals) -> Tensor:
        """The first query position that may not see an entry, `pages.NEVER` if that comes after the query that follows
        the pass: `[kv_heads, slots]` int32. One entry of each head's pool leaves for each that is too many."""
        raise NotImplementedError(f"{type(self).__name__} judges nothing")

    def divide(self, division: Division) -> Tensor:
        """The places of each head's pool from the end of the prompt on: `[kv_heads]` int64, `places` on average."""
        import torch

        return torch.full(division.mass.shape[:1], division.places)

    def summarise(self, keys: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """At most `count` means of entries `[entries, head_dim]`: keys and values `[means, head_dim]`, float32 or
        wider, and how many entries each stands for, `[means]`."""
        raise NotImplementedError(f"{type(self).__name__} has no means")

    def joins(self, keys: Tensor, counts: Tensor, room: Tensor, entering: Tensor) -> Tensor:
        """Which mean an evicted entry joins, `[...]` int64. keys: `[..., means, head_dim]`; counts: `[..., means]`, 0
        where there is none yet; room: `[...]`, how many there may be; entering: the entry's key, `[..., head_dim]`."""
        raise NotImplementedError(f"{type(self).__name__} has no means")
