"""DistillCache: a small network, trained by reinforcement, ranks all entries at every step, once for the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from evictbench.errors import UserError
from evictbench.policy import GROUP_DIM, MemoryTensor, ModelShape, Phase, Policy, SlotTensor, Step
from evictbench.policy.plot_style import LONG, PlotStyle

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
"""The most probabilities of several layers that are collected in decode before they are summed together."""


@dataclass(frozen=True)
class Settings:
    """length: what a budget in percent is a share of: the tokens "seen", or the entries of the "cache", as algorithm 1
    says literally. heads: "shared", one kept set for all; or "hybrid", a fifth of the KV heads keeps everything and the
    others get the rest of the budget, which must be above 20% of the tokens seen."""

    length: Literal["seen", "cache"] = "seen"
    heads: Literal["shared", "hybrid"] = "shared"

    def __post_init__(self) -> None:
        for name, allowed in (("length", ("seen", "cache")), ("heads", ("shared", "hybrid"))):
            if getattr(self, name) not in allowed:
                raise UserError(f"distillcache: {name} is {' or '.join(allowed)}, not {getattr(self, name)!r}.")
        if self.length == "cache" and self.heads == "hybrid":
            raise UserError("distillcache: heads=hybrid keeps a share of the tokens seen; leave out length=cache.")


class DistillCache(Policy):
    """Althoubi, "DistillCache", arXiv 2608.08878, algorithm 1: after every forward pass, prompt and decode alike, each
    entry is scored from five features and the best stay, the same ones in every layer and head. Nothing is protected.

    This is how we read what the paper leaves open:
    - alpha, "average attention mass received across all heads and layers during the most recent forward pass": the
      mean over layers, query heads and the queries of that pass (those before an entry give it 0). The first pass is
      the whole prompt, in however many chunks it is read; under `bounded` each chunk is a pass.
    - norm: the length of an entry's value vector, the mean over layers and KV heads.
    - sigma, "variance of the attention mass across heads": each (layer, query head) pair has a mean over the pass's
      queries; sigma is the population variance of these means.
    - entropy, `Σ_q a_q(i) H(a_q) / Σ_q a_q(i)` over the last 64 queries of the text, of this pass or of earlier ones: H
      is the mean over layers and query heads of the entropies (nats) of their own rows over the keys that they saw, and
      a_q(i) the mean of those rows. Eviction does not change the rows of earlier queries.
    - place: 0 for the first of the entries held and 1 for the last, evenly between, by position.
    - B: `max(⌊r·L⌋, 32)` with L the tokens seen, because algorithm 1's |C|, the cache that is already pruned, shrinks
      by r at every step until it holds 32; length=cache is that reading. As everywhere, B counts the next query's own
      entry, so that B - 1 are kept. A budget in entries is B itself.
    - the network: see `network.Ranker`. Keys keep their positions; each query head of a group counts separately.

    heads=hybrid (appendix E.3): a fifth of the model's KV heads, rounded down, sees everything. The others see one set,
    of the size at which the mean over KV heads is the budget: r' = (r - .2) / .8 of the tokens seen where a fifth is
    exact. "The most important heads by attention statistics" are read as those whose query heads attend most to the
    entries that the others lose, in the first pass after which an entry is lost, as a rule the whole prompt's (a head's
    total attention does not tell heads apart: it is 1 for every query). The choice holds for the sequence. All heads
    share the slots, so that no slot is freed: entries are hidden from a head. Memory is that of the full cache, and the
    bytes say so; the occupancy is the mean over KV heads, measured and not enforced.

    Training (`reinforce`, which names every deviation): the bundled weights were first trained by supervision
    (`target=set`), of which the paper has nothing, then by reinforcement for 240 steps, where the paper has 10,000 from
    new weights. The entropy bonus, .01 times the surprise of a whole set, is as large as the spread of the returns in
    our short texts; `--recipe bonus=mean` takes it per evicted entry.

    Inference is greedy; of equal scores the earlier position is kept. The five features do not depend on the model's
    sizes, so that trained weights serve other models too (`transferred from`), as in the paper.

    The bytes count the ring of 64 attention rows, 64 float32 for each slot, once for the model. Until the end of a
    prompt that is read whole, they also count one float32 for each slot, layer and query head.
    """

    name = "distillcache"
    summary = "learned: a network ranks entries by five numbers at every step, one kept set for the model"
    paper = "arXiv 2608.08878"
    plot_style = PlotStyle("#5c2465", "p", LONG, place=11)
    Config = Settings
    Recipe: ClassVar[type[Any]] = Recipe
    signals = frozenset({"mass", "recent_probs"})
    granularity = "model"
    prefill = "dense"
    learned = True
    transferable = True

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.share_of = self.config.length
        self.masks_heads = self.config.heads == "hybrid"
        self._ranker: Ranker | None = None
        self._ranker_on: dict[torch.device, Ranker] = {}

    @property
    def enforces_budget(self) -> bool:
        """Whether no query sees more than the budget; with heads=hybrid the budget is the mean over heads."""
        return not self.masks_heads

    def keep(self, budget: int, phase: Phase) -> int | None:
        """Entries that a cut keeps: the budget less the next query's own. None with heads=hybrid."""
        return None if self.masks_heads else budget - 1

    def check_budget(self, budget: Budget) -> None:
        """Raise UserError with heads=hybrid for a budget that is not a share above what the full heads take."""
        from .hybrid import check

        if self.masks_heads:
            check(budget)

    def slot_state(self, shape: ModelShape) -> Mapping[str, SlotTensor]:
        """`mass`, the attention of each query head to each entry; kept while a prompt is read whole."""
        import torch

        return {"mass": SlotTensor(torch.float32, width=shape.group, while_dense=True)}

    def shared_state(self, shape: ModelShape) -> Mapping[str, SlotTensor | MemoryTensor]:
        """`norm`; `attention` of the last 64 queries to each entry; these queries' `entropies`. With heads=hybrid also
        `hidden`, the entries that are hidden, and `full`, the heads that see them all the same."""
        import torch

        from .features import RECENT

        hybrid: dict[str, SlotTensor | MemoryTensor] = {
            "hidden": SlotTensor(torch.bool),
            "full": MemoryTensor(torch.bool, (shape.layers * shape.kv_heads,)),
        }
        return (hybrid if self.masks_heads else {}) | {
            "norm": SlotTensor(torch.float32),
            "attention": SlotTensor(torch.float32, width=RECENT),
            "entropies": MemoryTensor(torch.float32, (RECENT,)),
        }

    def use(self, weights: Weights, shape: ModelShape) -> None:
        """Take a ranker's tensors. UserError: they are not a ranker's."""
        from .network import Ranker

        first = weights.tensors.get("layers.0.weight")
        ranker = Ranker(width=first.shape[0]) if first is not None and first.dim() == 2 else Ranker()
        expected = {name: tensor.shape for name, tensor in ranker.state_dict().items()}
        if {name: tensor.shape for name, tensor in weights.tensors.items()} != expected:
            raise UserError(f"The weights {weights.origin} are not a ranker of five numbers, as distillcache needs.")
        ranker.load_state_dict({name: tensor.float() for name, tensor in weights.tensors.items()})
        self.rank_by(ranker)

    def rank_by(self, ranker: Ranker) -> None:
        """Score with this network from now on, in evaluation mode and without gradients."""
        self._ranker, self._ranker_on = ranker.eval().requires_grad_(False), {}

    def learner(self, shape: ModelShape, training: Training) -> Learner:
        """The trainable side: the ranker, trained by the recipe's method."""
        if training.recipe.method == "supervised":
            from .supervised import SupervisedLearner

            return SupervisedLearner(training)
        from .reinforce import ReinforceLearner

        return ReinforceLearner(training)

    def observe(self, step: Step) -> None:
        """Add a layer to the sums; after the last layer write the queries' attention into the ring."""
        from . import features

        mass, recent_probs = step.signals.mass, step.signals.recent_probs
        assert mass is not None
        assert recent_probs is not None
        last = step.layer == step.shape.layers - 1
        if step.query_positions.shape[1] == 1 and not step.dense:
            # The layers of a decode step are summed together: so small an operation costs more than its work.
            waiting = step.carried.setdefault("waiting", [])
            if waiting and waiting[0][0].device != mass.device:
                self._add_waiting(step)
            waiting.append((mass.flatten(1, 2), step.entered.values))
            if last or (len(waiting) + 1) * mass.numel() > WAITING:
                self._add_waiting(step)
        else:
            queries = (step.query_positions >= 0).sum(-1)
            if step.dense:
                total = step.state["mass"]
                mass = total.add_(mass.transpose(2, 3)).transpose(2, 3).to(mass.dtype)
                queries = step.query_positions.amax(-1) + 1
            masses = (mass / queries.clamp(min=1)[:, None, None, None]).flatten(1, 2)
            recent = min(features.RECENT, step.query_positions.shape[1])
            self._add(step, features.chunk_totals(masses, recent_probs, recent, step.entered.values))
        if self.masks_heads:
            step.carried.setdefault("by_head", []).append(mass.sum(GROUP_DIM))
        if last:
            self._write_ring(step)
            if self.masks_heads and (step.ends_prompt or not step.dense):
                self._hide(step)

    def _add_waiting(self, step: Step) -> None:
        import torch

        from .features import query_totals

        probs, values = (torch.cat(tensors, dim=1) for tensors in zip(*step.carried["waiting"], strict=True))
        self._add(step, query_totals(probs, values))
        step.carried["waiting"].clear()

    def _add(self, step: Step, totals: Any) -> None:
        totals = totals.to(step.shared["norm"].device)
        before = step.carried.get("totals")
        step.carried["totals"] = totals if before is None else before.plus(totals)

    def _write_ring(self, step: Step) -> None:
        """After the last layer: write the new entries' norm, and the last queries' rows and entropies."""
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
        """The five features of each entry, `[rows, slots, 5]` float32, once the last layer has been observed."""
        import torch

        from .features import relative_positions, variance, weighted_entropy

        totals, shared = step.carried["totals"], step.shared
        heads = step.shape.layers * step.shape.heads
        visible = step.positions[:, 0].to(totals.mass.device)
        if self.masks_heads:
            visible = visible.masked_fill(shared["hidden"][:, 0], -1)
        features = (
            totals.mass / heads,
            shared["norm"][:, 0],
            variance(totals.mass, totals.squares, heads),
            weighted_entropy(shared["attention"][:, 0], shared["entropies"][:, 0]),
            relative_positions(visible),
        )
        return torch.stack([feature.float() for feature in features], dim=-1)

    def _hide(self, step: Step) -> None:
        """Hide entries from the heads that do not see everything; the first time, choose the full heads."""
        from .hybrid import hide

        hide(step, self.score(step)[:, 0])

    def head_mask(self, step: Step) -> Tensor:
        """The entries that are hidden from each of this layer's heads, `[rows, kv_heads, slots]` bool."""
        first = step.layer * step.shape.kv_heads
        full = step.shared["full"][:, 0, first : first + step.shape.kv_heads, None]
        return (step.shared["hidden"] & ~full).to(step.keys.device)

    def visible_entries(self, held: int, budget: int, shape: ModelShape) -> float:
        """The mean over KV heads of the entries that a query sees. held, budget: entries, the query's own included."""
        from .hybrid import visible_entries

        return visible_entries(held, budget, shape)

    def score(self, step: Step) -> Tensor:
        """The network's score of each entry, `[rows, 1, slots]`."""
        if self._ranker is None:
            raise UserError("distillcache needs trained weights (--weights), and has none.")
        features = self.features(step)
        if features.device not in self._ranker_on:
            import copy

            self._ranker_on[features.device] = copy.deepcopy(self._ranker).to(features.device)
        score: Tensor = self._ranker_on[features.device](features)
        return score[:, None].to(step.positions.device)
