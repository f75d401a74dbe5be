"""The supervised ranker of DistillCache's ablation: it learns what a dense run will attend to.

Althoubi (arXiv 2608.08878, appendix F.6) regresses "teacher-derived importance" on the same five numbers, and says no
more. Here an entry's importance is the attention that it gets in the dense run from the tokens of the text after the
choice, the mean over layers, query heads and those tokens, which are discounted as rewards are. The choices are a
prompt's cut and later ones, of a student that draws its sets by that same attention (Gumbel top-B), so that both kinds
are learned on sets worth holding.

Episodes are made once a text and kept on the disk. `target=importance`: the squared error of the score against the
logarithm of the importance, both about their mean over the entries of a choice, since only differences rank.
`target=set`: minus the log-probability of the set of the most important entries under the law of subsets of its size,
divided by the entries that it keeps or drops, whichever are fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from evictbench.policy.learner import Batch, Features, Losses
from evictbench.train.plan import seed_of

from .learner import RankerLearner
from .rollout import Moment, Reading, later_attention, numbers_of
from .subset import gumbel_top, log_probability

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEAST_ATTENTION = 1e-9
"""Added to the importance before its logarithm."""

TRAINED_BY = {
    "importance": "Trained by regression of the logarithm of later attention in the dense run, and not by reward.",
    "set": "Trained by the likelihood of the entries that the dense run attends to most later, and not by reward.",
}


class SupervisedLearner(RankerLearner):
    """The ranker, trained from stored episodes."""

    stored: ClassVar[bool] = True

    def feature_settings(self) -> Mapping[str, Any]:
        """All that an episode depends on besides its text."""
        shares = [str(self.share(budget)) for budget in self.budgets]
        recipe = {name: getattr(self.recipe, name) for name in ("horizon", "cuts", "every", "gamma")}
        return {"learner": "distillcache", "version": 1, "shares": shares, **recipe}

    def features(self, model: PreTrainedModel, tokens: Tensor) -> dict[str, Tensor]:
        """Of each choice: `numbers` `[1, choices, S, 5]`, the features' float32 written as int32, so that they are kept
        as they are; `later` `[1, choices, S]`, the logarithm of the importance; `held` and `size` `[1, choices]`."""
        ids = numbers_of(tokens[0])
        generator = torch.Generator().manual_seed(seed_of("distillcache", ids))
        most, length = self.recipe.cuts * (1 + self.recipe.horizon // self.recipe.every), len(ids)
        numbers, later = torch.zeros(most, length, 5), torch.zeros(most, length)
        held, size = torch.zeros(most, dtype=torch.int64), torch.zeros(most, dtype=torch.int64)
        choices = (found for _ in range(self.recipe.cuts) for found in self._choices(model, ids, generator))
        for place, (moment, importance) in enumerate(choices):
            held[place], size[place] = moment.positions.shape[-1], moment.size
            numbers[place, : held[place]] = moment.features[0].cpu()
            later[place, : held[place]] = importance[0].cpu()
        found = {"numbers": numbers.view(torch.int32), "later": later, "held": held, "size": size}
        return {name: tensor[None] for name, tensor in found.items()}

    def _choices(
        self, model: PreTrainedModel, ids: list[int], generator: torch.Generator
    ) -> Iterator[tuple[Moment, Tensor]]:
        """A prompt's cut, somewhere in the middle half of the text, and every so many of the following choices, with
        the logarithm of the importance of their entries."""
        length = len(ids)
        first, last = max(1, length // 4), max(1, length - length // 4 - 1)
        prompt = int(torch.randint(first, last + 1, (1,), generator=generator))
        budget = self.budgets[int(torch.randint(len(self.budgets), (1,), generator=generator))]
        reading = Reading(model, ids, prompt, self.share(budget))
        logits, attention = reading.read_on(length)
        horizon = min(self.recipe.horizon, len(attention) - 1)

        def importance(moment: Moment) -> Tensor:
            found = later_attention(attention, moment.first, moment.positions, self.recipe.gamma)
            return (found + LEAST_ATTENTION).log()

        def choose(moment: Moment) -> Tensor:
            return gumbel_top(importance(moment).cpu(), moment.size, generator).to(moment.features.device)

        for decision in reading.decode(logits[:horizon], 1, choose).decisions:
            if decision.moment.first % self.recipe.every == 0:
                yield decision.moment, importance(decision.moment)

    def measure(self, samples: Iterable[Features]) -> None:
        """Set the standardisation of fresh weights."""
        if self.fresh:
            self.ranker.measure(torch.cat([_entries(one["numbers"], _real(one)) for one in samples]))

    def loss(self, batch: Batch) -> Losses:
        """The error or the likelihood, a mean over choices.

        Parts: `recall`, the share of the most important entries of a prompt's cut that the ranker ranks so; `kept`, the
        importance of those that it keeps in all, of what the best would have had; `last`, how often it drops the least
        important entry of a later choice, or one of the least eighth.
        """
        assert batch.features is not None
        real, found = _real(batch.features), batch.features
        scored = self.ranker(_entries(found["numbers"], real).to(self.device))
        used = found["held"] > 0
        if not used.any():  # texts so short that nothing had to go
            return Losses(torch.stack([0 * each.sum() for each in self.ranker.parameters()]).sum(), {})
        real, later, held, size = (
            tensor[used].to(self.device) for tensor in (real, found["later"].float(), found["held"], found["size"])
        )
        scores = scored.new_full(real.shape, -torch.inf).masked_scatter(real, scored)
        later = later.masked_fill(~real, -torch.inf)
        if self.recipe.target == "set":
            fewer = torch.minimum(size, held - size).clamp(min=1)
            each = -log_probability(scores, _top(later, size)) / fewer
        else:
            each = _squared_error(scores, later, real)
        with torch.no_grad():
            parts = _measured(scores, later, held, size)
        return Losses(each.mean(), parts)

    def notes(self) -> list[str]:
        """What it was trained by."""
        return [TRAINED_BY[self.recipe.target]]


def _real(features: Features) -> Tensor:
    """Where there are entries, `[rows, choices, S]` bool."""
    return torch.arange(features["numbers"].shape[2]) < features["held"][..., None]


def _entries(numbers: Tensor, real: Tensor) -> Tensor:
    """The five numbers of all entries, `[entries, 5]`."""
    return numbers.contiguous().view(torch.float32)[real]


def _top(values: Tensor, size: Tensor) -> Tensor:
    """The `size` largest of each row, `[choices, S]` bool."""
    order = values.argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1)
    return (rank < size[:, None]) & (values > -torch.inf)


def _squared_error(scores: Tensor, later: Tensor, real: Tensor) -> Tensor:
    """`[choices]`: the mean over entries, both about their means."""
    count = real.sum(-1)
    difference = (scores - later).masked_fill(~real, 0.0)
    difference = (difference - difference.sum(-1, keepdim=True) / count[:, None]).masked_fill(~real, 0.0)
    return difference.square().sum(-1) / count


def _measured(scores: Tensor, later: Tensor, held: Tensor, size: Tensor) -> dict[str, float]:
    best, own = _top(later, size), _top(scores, size)
    importance = later.exp()
    cut = held - size > 1
    recall = (best & own).sum(-1) / size
    kept = (importance * own).sum(-1) / (importance * best).sum(-1)
    padding = later == -torch.inf
    dropped = later.masked_fill(own | padding, torch.inf).amin(-1)
    rank = ((later < dropped[:, None]) & ~padding).sum(-1)
    least = (rank < (held / 8).clamp(min=1)).float()
    return {
        "recall": float(recall[cut].mean()),
        "kept": float(kept[cut].mean()),
        "last": float(least[~cut].mean()),
    }
