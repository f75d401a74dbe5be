"""The supervised ranker of DistillCache's ablation: it learns what a dense run will attend to.

Althoubi (arXiv 2608.08878, appendix F.6) regresses "teacher-derived importance" on the same five features, and says no
more. Here an entry's importance is the attention that it gets in the dense run from the tokens after the choice: the
mean over layers, query heads and those tokens, which are discounted as rewards are. The choices are a prompt's cut and
later ones, of a student that draws its sets by that attention (Gumbel top-B), so that both kinds of choice are learned
on sets worth holding.

Episodes are made once a text and stored. With `target=importance` the loss is the squared error of the score against
the logarithm of the importance, both less their mean over the entries of a choice, since only differences rank. With
`target=set` it is minus the log-probability of the set of the most important entries, among subsets of its size,
divided by the number of entries that it keeps or drops, whichever is smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from evictbench.policy.learner import Batch, Features, Losses
from evictbench.train.plan import derive_seed

from .learner import RankerLearner
from .rollout import Choice, TeacherRun, later_attention, token_list
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
        """The settings that an episode depends on, besides its text."""
        shares = [str(self.share(budget)) for budget in self.budgets]
        recipe = {name: getattr(self.recipe, name) for name in ("horizon", "cuts", "every", "gamma")}
        return {"learner": "distillcache", "version": 1, "shares": shares, **recipe}

    def features(self, model: PreTrainedModel, tokens: Tensor) -> dict[str, Tensor]:
        """The choices of one text.

        `numbers` `[1, choices, S, 5]`: the entries' features, float32 viewed as int32 so that they are stored exactly.
        `later` `[1, choices, S]`: the logarithm of the importance. `held` and `size` `[1, choices]`: entries before and
        after the choice.
        """
        ids = token_list(tokens[0])
        generator = torch.Generator().manual_seed(derive_seed("distillcache", ids))
        most, length = self.recipe.cuts * (1 + self.recipe.horizon // self.recipe.every), len(ids)
        numbers, later = torch.zeros(most, length, 5), torch.zeros(most, length)
        held, size = torch.zeros(most, dtype=torch.int64), torch.zeros(most, dtype=torch.int64)
        choices = (pair for _ in range(self.recipe.cuts) for pair in self._choices(model, ids, generator))
        for index, (choice, importance) in enumerate(choices):
            held[index], size[index] = choice.positions.shape[-1], choice.size
            numbers[index, : held[index]] = choice.features[0].cpu()
            later[index, : held[index]] = importance[0].cpu()
        features = {"numbers": numbers.view(torch.int32), "later": later, "held": held, "size": size}
        return {name: tensor[None] for name, tensor in features.items()}

    def _choices(
        self, model: PreTrainedModel, ids: list[int], generator: torch.Generator
    ) -> Iterator[tuple[Choice, Tensor]]:
        """A prompt's cut, somewhere in the middle half of the text, and every `every`-th later choice; each with the
        logarithm of the importance of its entries."""
        length = len(ids)
        first, last = max(1, length // 4), max(1, length - length // 4 - 1)
        prompt = int(torch.randint(first, last + 1, (1,), generator=generator))
        budget = self.budgets[int(torch.randint(len(self.budgets), (1,), generator=generator))]
        run = TeacherRun(model, ids, prompt, self.share(budget))
        logits, attention = run.read_on(length)
        horizon = min(self.recipe.horizon, len(attention) - 1)

        def importance(choice: Choice) -> Tensor:
            later = later_attention(attention, choice.first, choice.positions, self.recipe.gamma)
            return (later + LEAST_ATTENTION).log()

        def choose(choice: Choice) -> Tensor:
            return gumbel_top(importance(choice).cpu(), choice.size, generator).to(choice.features.device)

        for decision in run.decode(logits[:horizon], 1, choose).decisions:
            if decision.choice.first % self.recipe.every == 0:
                yield decision.choice, importance(decision.choice)

    def measure(self, samples: Iterable[Features]) -> None:
        """Set the standardisation of fresh weights."""
        if self.fresh:
            self.ranker.measure(torch.cat([_entries(sample["numbers"], _real(sample)) for sample in samples]))

    def loss(self, batch: Batch) -> Losses:
        """The squared error or minus the log-likelihood, a mean over choices.

        Parts: `recall`, the share of a prompt cut's most important entries that the ranker keeps; `kept`, the
        importance of the entries that it keeps, as a share of the largest possible; `last`, how often it drops the
        least important entry of a later choice, or one of the least important eighth.
        """
        assert batch.features is not None
        features, real = batch.features, _real(batch.features)
        scored = self.ranker(_entries(features["numbers"], real).to(self.device))
        used = features["held"] > 0
        if not used.any():  # texts so short that nothing had to go
            return Losses(torch.stack([0 * parameter.sum() for parameter in self.ranker.parameters()]).sum(), {})
        real, later, held, size = (
            tensor[used].to(self.device)
            for tensor in (real, features["later"].float(), features["held"], features["size"])
        )
        scores = scored.new_full(real.shape, -torch.inf).masked_scatter(real, scored)
        later = later.masked_fill(~real, -torch.inf)
        if self.recipe.target == "set":
            fewer = torch.minimum(size, held - size).clamp(min=1)
            losses = -log_probability(scores, _top(later, size)) / fewer
        else:
            losses = _squared_error(scores, later, real)
        with torch.no_grad():
            parts = ranking_parts(scores, later, held, size)
        return Losses(losses.mean(), parts)

    def notes(self) -> list[str]:
        """One sentence that says which loss it was trained by."""
        return [TRAINED_BY[self.recipe.target]]


def _real(features: Features) -> Tensor:
    """Which slots hold entries and no padding, `[rows, choices, S]` bool."""
    return torch.arange(features["numbers"].shape[2]) < features["held"][..., None]


def _entries(numbers: Tensor, real: Tensor) -> Tensor:
    """The features of all entries, `[entries, 5]` float32."""
    return numbers.contiguous().view(torch.float32)[real]


def _top(values: Tensor, size: Tensor) -> Tensor:
    """The `size` `[choices]` largest values of each row of `[choices, S]`, as bool."""
    order = values.argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1)
    return (rank < size[:, None]) & (values > -torch.inf)


def _squared_error(scores: Tensor, later: Tensor, real: Tensor) -> Tensor:
    """The mean squared difference over entries, `[choices]`; scores and later less their means first."""
    count = real.sum(-1)
    difference = (scores - later).masked_fill(~real, 0.0)
    difference = (difference - difference.sum(-1, keepdim=True) / count[:, None]).masked_fill(~real, 0.0)
    return difference.square().sum(-1) / count


def ranking_parts(scores: Tensor, later: Tensor, held: Tensor, size: Tensor) -> dict[str, float]:
    """The parts of `SupervisedLearner.loss`, of scores and later `[choices, S]` and of held and size `[choices]`."""
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
