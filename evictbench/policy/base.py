"""The policy interface: what a KV-cache eviction method declares, what the engine shows it, what it answers.

`Policy` is the family of scored methods: the engine asks for a score of every entry, keeps the best, and frees the
rest. Methods whose heads keep different numbers of entries are in `evictbench.policy.ragged`. A policy never touches
keys or values in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

from evictbench.errors import UserError
from evictbench.policy.budget import Budget
from evictbench.policy.charge import Charge, charge
from evictbench.policy.declarations import RENAMED, Granularity, Phase, Prefill, PrefillMode, Signal, check_class
from evictbench.policy.guard import GUARDED, guarded
from evictbench.policy.plot_style import PlotStyle

if TYPE_CHECKING:
    from torch import Tensor

    from evictbench.policy.step import DenseRun, MemoryTensor, ModelShape, NewEntries, SlotTensor, Step


@dataclass(frozen=True)
class NoSettings:
    """The settings of a policy that has none."""


class BasePolicy:
    """What all eviction methods have in common. Subclass `Policy`, `RaggedPolicy` or `HeadBudgetPolicy` instead.

    A policy holds no state between sequences: state lives in the cache (`slot_state`).

    name, summary, paper: how the policy is called, what it does in one line, and where it is published.
    Config: a frozen dataclass of the policy's settings; `config` is an instance of it.
    needs_budget: whether the policy works under a budget.
    prefill: the method's own prompt mode. "dense": the prompt is attended to whole and cut once at its end. "bounded":
    the cache never holds more than the budget and one chunk. "sparse" (`HeadBudgetPolicy` only): the whole prompt is
    held until its end, but a query does not see what has been evicted for it.
    learned: the policy needs trained weights, which its method `use` takes. has_weights: it has taken some.
    weights_in_model: they lie in the model's own checkpoint, among its tensors.
    transferable: the weights' shapes do not depend on the model.
    plot_style: the policy's colour, marker and line in figures; None: those that the hash of its name gives.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    Config: ClassVar[type[Any]] = NoSettings
    needs_budget: ClassVar[bool] = True
    prefill: ClassVar[PrefillMode] = "dense"
    learned: bool = False
    has_weights: bool = False
    weights_in_model: bool = False
    renamed: ClassVar[Mapping[str, str]] = RENAMED
    transferable: ClassVar[bool] = False
    plot_style: ClassVar[PlotStyle | None] = None

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config

    def __init_subclass__(cls, family: bool = False, **named: Any) -> None:
        """Check the class, and guard the methods that the engine calls. family: the class is one of ours to subclass.

        Raises TypeError for a member that the engine does not know, or for members that do not go together.
        """
        super().__init_subclass__(**named)
        if family:
            return
        check_class(cls)
        for name in GUARDED & set(vars(cls)):
            if isinstance(method := vars(cls)[name], FunctionType):
                setattr(cls, name, guarded(name, method))
        if "use" in vars(cls):
            cls.use = _noting_weights(vars(cls)["use"])  # type: ignore[attr-defined]

    @property
    def sinks(self) -> int:
        """How many first positions are never evicted. They are part of the budget."""
        return 0

    def recent(self, budget: Tensor | int) -> Tensor | int:
        """How many last positions are never evicted, the next query's own included. They are part of the budget."""
        return 0

    @property
    def enforces_budget(self) -> bool:
        """Whether the budget holds at every decode step. Then a run in which a query sees more entries fails."""
        return True

    @classmethod
    def prefill_mode(cls, given: Prefill) -> PrefillMode:
        """The prompt mode of a run. given: "native" for the policy's own, else "dense" or "bounded"."""
        return cls.prefill if given == "native" else given

    def reads_whole(self, given: Prefill) -> bool:
        """Whether a prompt has to come in one forward pass, whatever the chunk. given: as of `prefill_mode`."""
        return False

    @final
    def charge(self, shape: ModelShape) -> Charge:
        """What the engine charges the policy for its state, by the one rule in `evictbench.policy.charge`."""
        return charge(shape, self.held_state(shape), self.held_queries(shape))

    def held_state(self, shape: ModelShape) -> list[tuple[SlotTensor | MemoryTensor, int]]:
        """Every tensor that is held for the policy, with the number of KV heads that hold it together."""
        return [(tensor, 1) for tensor in self.slot_state(shape).values()]

    def held_queries(self, shape: ModelShape) -> int:
        """How many numbers of queries are held in decode for each KV head of a layer."""
        return 0

    def minimum_budget(self, shape: ModelShape) -> int:
        """The smallest budget that leaves one entry to choose: what is protected, what is charged, and one."""
        return self.charge(shape).cost(self.sinks + int(self.recent(0)) + 1)

    def check_budget(self, budget: Budget) -> None:
        """Raise UserError for a budget that the policy cannot work with on any text."""

    def doubts(self, budget: Budget) -> Iterable[str]:
        """Sentences that a run under this budget warns with, such as how its weights were trained otherwise."""
        return ()

    @classmethod
    def named_settings(cls, recorded: Mapping[str, Any]) -> Mapping[str, Any]:
        """The settings of a result, with a value for each that the version which made it did not have.

        recorded: as the result holds them. A policy that gains a setting, and no longer does by default what it did
        without it, says here what that was. Then its earlier results have another label, and stand in no row of a new
        one.
        """
        return recorded

    @classmethod
    def undefined_methods(cls) -> list[str]:
        """The methods that the policy's family calls, and that neither the class nor a base of its own defines."""
        return []

    @classmethod
    def read_budget(cls, given: Budget | int | str | None) -> Budget | None:
        """The budget of a run. Raises UserError for one that is missing, not wanted, or no budget."""
        if not cls.needs_budget:
            if given is not None:
                raise UserError(f"{cls.name} takes no budget: leave out {given}.")
            return None
        if given is None:
            raise UserError(f"{cls.name} needs a budget: a number of entries such as 256, or a share such as 25%.")
        return Budget.parse(str(given))

    def check_entries(
        self,
        entries: int,
        shape: ModelShape,
        *,
        label: str | None = None,
        model: str = "this model",
        given: str | None = None,
    ) -> None:
        """Raise UserError if a budget of so many entries is below the policy's minimum on a model.

        label, model, given: for the sentence, the policy's name with settings, the model's name, and the budget in
        words.
        """
        least = self.minimum_budget(shape)
        if entries < least:
            raise UserError(
                f"{label or self.name} needs a budget of at least {least} entries on {model} (what it protects, the "
                f"state it is charged for, and one more), not {given or entries}."
            )

    def slot_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        """The tensors that travel with the entries, by name."""
        return {}


def _noting_weights(use: Callable[..., None]) -> Callable[..., None]:
    """A policy's `use` that also sets `has_weights`."""

    @wraps(use)
    def noting(self: BasePolicy, *arguments: Any, **named: Any) -> None:
        use(self, *arguments, **named)
        self.has_weights = True

    return noting


class Policy(BasePolicy, family=True):
    """A scored eviction method: every kept set of a layer holds equally many entries, the ones with the best scores.

    signals: what the engine computes for the policy. Without signals the fast attention kernel is used.
    granularity: who shares one kept set: "head" (each KV head has its own), "layer", or "model".
    share_of: what a budget in percent is a share of. "seen": the tokens seen, or the prompt if that is longer.
    "cache": the entries in the cache after the pass.
    static: the score of an entry does not depend on queries or attention. Then expiries decide what the queries of a
    chunk see, and every chunk size gives the result of reading token by token.
    needs_rope: the policy undoes the rotation of keys and needs the model's rotary frequencies.
    needs_labels: the policy needs a label of every entry from a dense run over the same text (`labels`).
    masks_heads: entries may be held that some heads do not see (`head_mask`). Memory is that of all held entries.
    """

    signals: ClassVar[frozenset[Signal]] = frozenset()
    granularity: Granularity = "head"
    share_of: Literal["seen", "cache"] = "seen"
    static: ClassVar[bool] = False
    needs_rope: ClassVar[bool] = False
    needs_labels: ClassVar[bool] = False
    masks_heads: bool = False

    @property
    def window(self) -> int:
        """How many last queries `window_probs` shows."""
        return 0

    @property
    def window_in_decode(self) -> bool:
        """Whether `window_probs` are shown in decode too. Then the last queries are held there, and charged."""
        return self.enforces_budget

    @final
    def held_state(self, shape: ModelShape) -> list[tuple[SlotTensor | MemoryTensor, int]]:
        """As of `BasePolicy`: slot tensors and memories of each KV head, and what the sharers of a kept set hold."""
        sharing = {"head": 1, "layer": shape.kv_heads, "model": shape.layers * shape.kv_heads}[self.granularity]
        own: list[SlotTensor | MemoryTensor] = [*self.slot_state(shape).values(), *self.memory(shape).values()]
        return [(tensor, 1) for tensor in own] + [(tensor, sharing) for tensor in self.shared_state(shape).values()]

    @final
    def held_queries(self, shape: ModelShape) -> int:
        """As of `BasePolicy`: the last queries, where `window_probs` are shown in decode."""
        shown = "window_probs" in self.signals and self.window_in_decode
        return shape.group * self.window * shape.head_dim if shown else 0

    @property
    def reindexed_sinks(self) -> bool:
        """Whether sinks are seen at their distance in the cache, and not in the text (StreamingLLM)."""
        return False

    def keep(self, budget: int, phase: Phase) -> int | None:
        """How many entries to keep when one more would exceed `budget`. None: nothing is evicted."""
        return budget - 1

    def shared_state(self, shape: ModelShape) -> Mapping[str, SlotTensor | MemoryTensor]:
        """State that all who share a kept set hold once, by name.

        A SlotTensor is `[rows, sets, slots(, width)]` and travels with the entries; a MemoryTensor is `[rows, sets,
        *size]` and does not. `sets` is kv_heads if each head has its own kept set, else 1.
        """
        return {}

    def memory(self, shape: ModelShape) -> Mapping[str, MemoryTensor]:
        """The state that each sequence carries through a layer, by name."""
        return {}

    def enter(self, entering: NewEntries) -> Mapping[str, Tensor]:
        """The first values of slot tensors for new entries: `[rows, kv_heads, new(, width)]` by name.

        A name that is left out starts with the `fill` of its SlotTensor.
        """
        return {}

    def prepare(self, step: Step) -> None:
        """Update slot and sequence tensors after the new entries are written and before anything attends."""

    def prepare_layers(self, steps: Sequence[Step]) -> None:
        """Update slot and sequence tensors of several layers of one device, one new token a row.

        The engine calls it instead of `prepare`, once after all layers have attended, when a static policy with a kept
        set for each head decodes.
        """
        for step in steps:
            self.prepare(step)

    def observe(self, step: Step) -> None:
        """Update slot and sequence tensors after a layer has attended, before anything is evicted."""

    @classmethod
    def undefined_methods(cls) -> list[str]:
        """`score`, unless the policy evicts nothing or says each entry's `expiry` itself; what its flags call for."""
        scores = not cls.needs_budget or cls.score is not Policy.score or cls.expiry is not Policy.expiry
        labels = not cls.needs_labels or cls.labels is not Policy.labels
        return [name for name, defined in (("score", scores), ("labels", labels)) if not defined]

    def score(self, step: Step) -> Tensor:
        """The score of each entry, `[rows, sets, slots]`. Higher is kept; equal scores keep the earlier position."""
        raise NotImplementedError(f"{type(self).__name__} does not evict")

    def expiry(self, step: Step) -> Tensor:
        """The first query position that may no longer see each entry, `[rows, sets, slots]` int32 (`static` only)."""
        from evictbench.policy.expiry import static_expiry

        return static_expiry(
            self.score(step),
            step.positions,
            step.query_positions,
            step.budgets,
            sinks=self.sinks,
            recent=self.recent(step.budgets),
            steady=step.steady,
        )

    @property
    def lookahead(self) -> int:
        """How many tokens of its own greedy answer a dense run reads after a prompt, at most (`needs_labels` only)."""
        return 0

    def labels(self, run: DenseRun) -> list[Tensor]:
        """Labels of a text's tokens from a dense run, `[kv_heads, tokens]` float32 a layer (`needs_labels` only)."""
        raise NotImplementedError(f"{type(self).__name__} has no labels")

    def head_mask(self, step: Step) -> Tensor:
        """The entries that this layer's heads do not see in this pass, `[rows, kv_heads, slots]` bool (`masks_heads`
        only)."""
        raise NotImplementedError(f"{type(self).__name__} masks no heads")

    def visible_entries(self, held: int, budget: int, shape: ModelShape) -> float:
        """How many of `held` entries a decode query sees under a budget, mean over heads (`masks_heads` only)."""
        return held
