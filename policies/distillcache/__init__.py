"""DistillCache: a small network, trained by reinforcement, chooses one kept set for the whole model at every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from evictbench.errors import UserError
from evictbench.policy import GROUP_DIM, MemoryTensor, ModelShape, Phase, Policy, SlotTensor, Step

from .recipe import Recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from evictbench.models.policy_weights import Weights
    from evictbench.policy.budget import Budget
    from evictbench.policy.learner import Learner, Training

    from .network import Ranker

__all__ = ["DistillCache"]

WAITING = 2**24
"""Probabilities of one query, of several layers, that wait to be looked at together in decode."""


@dataclass(frozen=True)
class Settings:
    """length: what a budget in percent is a share of, the tokens "seen" or the entries of the "cache", as algorithm 1
    has it when read to the letter. heads: "shared", one kept set for all; "hybrid", a fifth of the KV heads keeps
    everything and the others get what is left of the budget, a share above 20% of the tokens seen."""

    length: Literal["seen", "cache"] = "seen"
    heads: Literal["shared", "hybrid"] = "shared"

    def __post_init__(self) -> None:
        for name, words in (("length", ("seen", "cache")), ("heads", ("shared", "hybrid"))):
            if getattr(self, name) not in words:
                raise UserError(f"distillcache: {name} is {' or '.join(words)}, not {getattr(self, name)!r}.")
        if self.length == "cache" and self.heads == "hybrid":
            raise UserError("distillcache: heads=hybrid keeps a share of the tokens seen; leave out length=cache.")


class DistillCache(Policy):
    """Althoubi, "DistillCache", arXiv 2608.08878, algorithm 1: after every forward pass, prompt and decode alike, each
    entry is scored from five numbers and the best stay, the same ones in every layer and head. Nothing is protected.

    What the paper leaves open is read like this:
    - alpha, "average attention mass received across all heads and layers during the most recent forward pass": the
      mean over layers, query heads and the queries of that pass (those before an entry give it 0). The first pass is
      the whole prompt, in however many chunks it is read; under `bounded` each chunk is a pass.
    - norm, of an entry's value vector: the mean of its length over layers and KV heads.
    - sigma, "variance of the attention mass across heads": the population variance over all (layer, query head) pairs
      of each one's mean over the pass's queries.
    - entropy, `Σ_q a_q(i) H(a_q) / Σ_q a_q(i)` over the last 64 queries of the text, of this pass or of earlier ones: H
      is the mean over layers and query heads of the entropies (nats) of their own rows over the keys that they saw, and
      a_q(i) the mean of those rows. The rows of earlier queries stay as they were when entries are evicted.
    - place: 0 for the first of the entries held and 1 for the last, by position.
    - B: `max(⌊r·L⌋, 32)` with L the tokens seen, because algorithm 1's |C|, the cache that is already pruned, shrinks
      by r at every step until it holds 32; length=cache is that reading. As everywhere, B counts the next query's own
      entry, so that B - 1 are kept. A budget in entries is B itself.
    - the network: see `network.Ranker`. Keys keep their positions; grouped queries count each for itself.

    heads=hybrid (appendix E.3): a fifth of the model's KV heads, rounded down, sees everything, the others one set of
    the size that makes the mean over KV heads the budget: r' = (r - .2) / .8 of the tokens seen where a fifth is exact.
    "The most important heads by attention statistics" are read as those that give most to what the others lose, in
    their query heads' attention of the first pass after which something is lost, the whole prompt's as a rule (a head's
    attention as a whole says nothing: it is 1 for every query). They stay the same for the sequence. The slots of all
    heads lie together, so that nothing is freed: what a head does not see is hidden from it. Memory is that of the full
    cache, bytes say so, and the occupancy is the mean over KV heads, measured and not guarded.

    Greedy at inference; of equal scores the earlier position is kept. The five numbers do not depend on the model's
    sizes, so that trained weights serve other models too (`transferred from`), as in the paper.

    The ring of 64 attention rows is 64 float32 a slot, once for the model, and counts in bytes; so do, until the prompt
    ends, one float32 a slot, layer and query head, where the prompt is read whole.
    """

    name = "distillcache"
    summary = "learned: a network ranks entries by five numbers at every step, one kept set for the model"
    paper = "arXiv 2608.08878"
    Config = Settings
    Recipe: ClassVar[type[Any]] = Recipe
    signals = frozenset({"mass", "recent_probs"})
    shares = "model"
    prefill = "dense"
    learned = True
    transferable = True

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.share_of = self.config.length
        self.hides = self.config.heads == "hybrid"
        self._ranker: Ranker | None = None
        self._on: dict[torch.device, Ranker] = {}

    @property
    def guarded(self) -> bool:
        """Where heads differ, the budget is their mean and not the most that one sees."""
        return not self.hides

    def keep(self, budget: int, phase: Phase) -> int | None:
        """All of it where entries are hidden."""
        return None if self.hides else budget - 1

    def check_budget(self, budget: Budget) -> None:
        """heads=hybrid needs a share above what the heads keep that keep everything."""
        from .hybrid import check

        if self.hides:
            check(budget)

    def slot_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        """Attention received by each query head while a prompt is read whole."""
        import torch

        return {"mass": SlotTensor(torch.float32, width=shape.group, while_dense=True)}

    def shared_state(self, shape: ModelShape) -> Mapping[str, SlotTensor | MemoryTensor]:
        """norm; what each of the last 64 queries gave an entry; those queries' entropies. Where entries are hidden:
        which, and which heads see them all the same."""
        import torch

        from .features import RECENT

        hiding: dict[str, SlotTensor | MemoryTensor] = {
            "hidden": SlotTensor(torch.bool),
            "full": MemoryTensor(torch.bool, (shape.layers * shape.kv_heads,)),
        }
        return (hiding if self.hides else {}) | {
            "norm": SlotTensor(torch.float32),
            "attention": SlotTensor(torch.float32, width=RECENT),
            "entropies": MemoryTensor(torch.float32, (RECENT,)),
        }

    def use(self, weights: Weights, shape: ModelShape) -> None:
        """Take a ranker's tensors."""
        from .network import Ranker

        first = weights.tensors.get("layers.0.weight")
        ranker = Ranker(width=first.shape[0]) if first is not None and first.dim() == 2 else Ranker()
        own = {name: tensor.shape for name, tensor in ranker.state_dict().items()}
        if {name: tensor.shape for name, tensor in weights.tensors.items()} != own:
            raise UserError(f"The weights {weights.origin} are not a ranker of five numbers, as distillcache needs.")
        ranker.load_state_dict({name: tensor.float() for name, tensor in weights.tensors.items()})
        self.rank_by(ranker)

    def rank_by(self, ranker: Ranker) -> None:
        """Score with this network from now on; it is not trained here."""
        self._ranker, self._on = ranker.eval().requires_grad_(False), {}

    def learner(self, shape: ModelShape, training: Training) -> Learner:
        """Its trainable side, the ranker."""
        if training.recipe.method == "supervised":
            from .supervised import SupervisedLearner

            return SupervisedLearner(training)
        from .reinforce import ReinforceLearner

        return ReinforceLearner(training)

    def observe(self, step: Step) -> None:
        """Add a layer to the sums; after the last one, write what the queries gave into the ring."""
        from . import features

        mass, recent_probs = step.signals.mass, step.signals.recent_probs
        assert mass is not None
        assert recent_probs is not None
        last = step.layer == step.shape.layers - 1
        if step.query_positions.shape[1] == 1 and not step.dense:
            # The layers of a decode step are looked at together: an operation costs more than what it works on.
            waiting = step.carried.setdefault("waiting", [])
            if waiting and waiting[0][0].device != mass.device:
                self._look_at_waiting(step)
            waiting.append((mass.flatten(1, 2), step.entered.values))
            if last or (len(waiting) + 1) * mass.numel() > WAITING:
                self._look_at_waiting(step)
        else:
            queries = (step.query_positions >= 0).sum(-1)
            if step.dense:
                received = step.state["mass"]
                mass = received.add_(mass.transpose(2, 3)).transpose(2, 3).to(mass.dtype)
                queries = step.query_positions.amax(-1) + 1
            masses = (mass / queries.clamp(min=1)[:, None, None, None]).flatten(1, 2)
            recent = min(features.RECENT, step.query_positions.shape[1])
            self._add(step, features.of_chunk(masses, recent_probs, recent, step.entered.values))
        if self.hides:
            step.carried.setdefault("by_head", []).append(mass.sum(GROUP_DIM))
        if last:
            self._remember(step)
            if self.hides and (step.ends_prompt or not step.dense):
                self._hide(step)

    def _look_at_waiting(self, step: Step) -> None:
        import torch

        from .features import of_one_query

        probs, values = (torch.cat(tensors, dim=1) for tensors in zip(*step.carried["waiting"], strict=True))
        self._add(step, of_one_query(probs, values))
        step.carried["waiting"].clear()

    def _add(self, step: Step, found: Any) -> None:
        found = found.to(step.shared["norm"].device)
        total = step.carried.get("totals")
        step.carried["totals"] = found if total is None else total.plus(found)

    def _remember(self, step: Step) -> None:
        """All layers are in: the new entries' norm, and the last queries' rows and entropies."""
        from .features import columns

        totals, shape, shared = step.carried["totals"], step.shape, step.shared
        heads = shape.layers * shape.heads
        step.place("norm", (totals.norm / (shape.layers * shape.kv_heads))[:, None].to(shared["norm"].dtype))
        ring = shared["attention"]
        recent = totals.attention.shape[-1]
        column = columns(step.query_positions.to(ring.device), recent)[:, None]
        row = (totals.attention / heads)[:, None].to(ring.dtype)
        ring.scatter_(3, column[:, :, None].expand(-1, 1, ring.shape[2], -1), row)
        shared["entropies"].scatter_(2, column, (totals.entropy / heads)[:, None].to(ring.dtype))

    def features(self, step: Step) -> Tensor:
        """The five numbers of each entry after the last layer has been observed: `[rows, slots, 5]` float32."""
        import torch

        from .features import places, variance, weighted_entropy

        totals, shared = step.carried["totals"], step.shared
        heads = step.shape.layers * step.shape.heads
        visible = step.positions[:, 0].to(totals.mass.device)
        if self.hides:
            visible = visible.masked_fill(shared["hidden"][:, 0], -1)
        numbers = (
            totals.mass / heads,
            shared["norm"][:, 0],
            variance(totals.mass, totals.squares, heads),
            weighted_entropy(shared["attention"][:, 0], shared["entropies"][:, 0]),
            places(visible),
        )
        return torch.stack([number.float() for number in numbers], dim=-1)

    def _hide(self, step: Step) -> None:
        """Choose what the heads go on to see that do not see everything; the first time, choose the heads."""
        from .hybrid import hide

        hide(step, self.score(step)[:, 0])

    def hidden(self, step: Step) -> Tensor:
        """What was hidden after the last pass, from this layer's heads: `[rows, kv_heads, slots]` bool."""
        first = step.layer * step.shape.kv_heads
        full = step.shared["full"][:, 0, first : first + step.shape.kv_heads, None]
        return (step.shared["hidden"] & ~full).to(step.keys.device)

    def seen_of(self, held: int, budget: int, shape: ModelShape) -> float:
        """All of it by a fifth of the KV heads, their own set by the others."""
        from .hybrid import seen_of

        return seen_of(held, budget, shape)

    def score(self, step: Step) -> Tensor:
        """The network's score of each entry, `[rows, 1, slots]`."""
        if self._ranker is None:
            raise UserError("distillcache needs trained weights (--weights), and has none.")
        numbers = self.features(step)
        if numbers.device not in self._on:
            import copy

            self._on[numbers.device] = copy.deepcopy(self._ranker).to(numbers.device)
        score: Tensor = self._on[numbers.device](numbers)
        return score[:, None].to(step.positions.device)
