"""DistillCache's own training: the ranker learns from what its choices cost.

After Althoubi (arXiv 2608.08878, section 3, appendices C and D): students, rows of one cache, sample their sets, and
the reward of a step is minus the divergence of its prediction from the teacher's, KL(teacher ‖ student). Only the
ranker has gradients, those of the log-probability of each choice under the law of subsets of a fixed size (`subset`).

Deviations:
- The students are fed the text's own next tokens and not their generation (`rollout`).
- A choice is rewarded from the first prediction that it changes, the one after the next token.
- The entropy's single-sample estimate is a reward of the choice, `-entropy · log P`; as a term of the loss its gradient
  would be zero in the mean.
- The baseline of a return is the mean of the other samples', and a moving average of what that leaves. With two samples
  or more that is nothing, whatever the returns; with one, the moving average is all there is.
- The optimiser and its schedule are those of all trainings here; 3e-4, as published, is `--lr 3e-4`.
- As published, the samples (Gumbel top-B) are not of the law that the gradient is of; with `sampler=poisson` they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from evictbench.policy.learner import Batch, Losses, Training

from .learner import RankerLearner
from .rollout import Choose, Decision, Episode, Moment, Reading, numbers_of
from .subset import conditional_poisson, gumbel_top, log_partition

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.policy.budget import Budget

ENTRIES_AT_ONCE = 2**18
"""Entries that are scored at a time; what the backward pass needs of the others is computed again."""

MEASURED = 4
"""Texts whose features standardise the inputs; each takes an episode."""

DRAWN_BY = {
    "gumbel": "Sets were drawn by Gumbel top-B, as published, whose law is not the one that the gradient is of.",
    "poisson": "Sets were drawn by conditional Poisson sampling, from the law that the gradient is of.",
}


class ReinforceLearner(RankerLearner):
    """The ranker, trained by REINFORCE.

    residual: `[horizon]`, the moving average of what the baseline leaves of the returns, by the step whose prediction a
    choice is the first to change.
    """

    residual: Tensor

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.register_buffer("residual", torch.zeros(self.recipe.horizon))

    @torch.no_grad()
    def begin(self, model: PreTrainedModel, blocks: Sequence[Tensor]) -> None:
        """Set the standardisation of fresh weights from the features that they meet on a few texts."""
        if not self.fresh:
            return
        met = []
        for number, tokens in enumerate(blocks[:MEASURED]):
            generator = torch.Generator(self.device).manual_seed(number)
            budget = self.share(self.budgets[number % len(self.budgets)])
            episode = self._episode(model, tokens[0], budget, generator, self._drawing(generator), rows=1)
            met += [decision.moment.features.reshape(-1, 5).to(self.device) for decision in episode.decisions]
        if met:
            self.ranker.measure(torch.cat(met))

    def loss(self, batch: Batch) -> Losses:
        """The surrogate whose gradient is REINFORCE's: a sum over choices, a mean over samples and texts.

        Parts: `kl`, nats a token, the mean over samples and steps; `spread`, the samples' deviation from one another in
        it; `surprise`, minus the log-probability of what was chosen, for each entry that went. Without gradients (texts
        that are held out): the divergence of one student that chooses greedily, as in use.
        """
        assert batch.model is not None
        budget, learns = self.share(batch.budget), torch.is_grad_enabled()
        choose = self._drawing(batch.generator) if learns else self._greedily
        rows = self.recipe.samples if learns else 1
        total, sums = torch.zeros((), device=self.device), dict[str, float]()
        for tokens in batch.tokens:
            with torch.no_grad():
                episode = self._episode(batch.model, tokens, budget, batch.generator, choose, rows=rows)
            kl = episode.kl.mean(1)
            parts = {"kl": float(kl.mean())}
            if learns:
                surrogate, surprise = self.surrogate(episode)
                parts |= {"spread": float(kl.std(correction=0)), "surprise": surprise}
            else:
                surrogate = kl.mean().to(self.device)
            total = total + surrogate / len(batch.tokens)
            for name, number in parts.items():
                sums[name] = sums.get(name, 0.0) + number / len(batch.tokens)
        return Losses(total, sums)

    def _episode(
        self,
        model: PreTrainedModel,
        tokens: Tensor,
        budget: Budget,
        generator: torch.Generator,
        choose: Choose,
        *,
        rows: int,
    ) -> Episode:
        """One text, `[S]`: its prompt, at least half of it, ends where the generator says."""
        length = len(tokens)
        horizon = min(self.recipe.horizon, max(1, length // 4))
        ends = torch.randint(length // 2, length - horizon + 1, (1,), generator=generator, device=generator.device)
        prompt = max(1, int(ends))
        reading = Reading(model, numbers_of(tokens[: prompt + horizon]), prompt, budget)
        logits, _ = reading.read_on(prompt + horizon)
        return reading.decode(logits, rows, choose)

    def _greedily(self, moment: Moment) -> Tensor:
        scores = self.ranker(moment.features.to(self.device))
        best = torch.zeros_like(scores, dtype=torch.bool)
        best = best.scatter(-1, scores.topk(moment.size, dim=-1).indices, True)
        return best.expand(moment.rows, -1).to(moment.features.device)

    def _drawing(self, generator: torch.Generator) -> Choose:
        sample = gumbel_top if self.recipe.sampler == "gumbel" else conditional_poisson

        def choose(moment: Moment) -> Tensor:
            scores = self.ranker(moment.features.to(self.device)) / self.recipe.temperature
            return sample(scores.expand(moment.rows, -1), moment.size, generator).to(moment.features.device)

        return choose

    def surrogate(self, episode: Episode) -> tuple[Tensor, float]:
        """The loss of one episode, and the surprise; the moving average takes note of it."""
        rewards = -episode.kl.to(self.residual)
        decisions = [decision for decision in episode.decisions if decision.moment.first < rewards.shape[1]]
        if not decisions:
            return rewards.new_zeros(()), torch.nan
        logs = self.log_probabilities(decisions)
        first = torch.tensor([decision.moment.first for decision in decisions], device=self.device)
        worth = returns(rewards, self.recipe.gamma)[:, first] - self.recipe.entropy * logs.detach()
        samples, forget = len(worth), self.recipe.average
        left = worth - (worth.sum(0) - worth) / (samples - 1) if samples > 1 else worth
        advantage = left - self.residual[first]
        self.residual[first] = forget * self.residual[first] + (1 - forget) * left.mean(0)
        if self.recipe.normalise:
            advantage = advantage / advantage.std(correction=0).clamp(min=1e-8)
        gone = sum(decision.moment.positions.shape[-1] - decision.moment.size for decision in decisions)
        surprise = -float(logs.detach().mean(0).sum()) / gone
        return -(logs * advantage).mean(0).sum(), surprise

    def log_probabilities(self, decisions: Sequence[Decision]) -> Tensor:
        """Of what was chosen, `[rows, decisions]`, with the ranker's graph."""
        found = []
        for some in _together(decisions):
            moments = [decision.moment for decision in some]
            width = max(moment.positions.shape[-1] for moment in moments)
            features = torch.stack([_padded(moment.features, width) for moment in moments]).to(self.device)
            chosen = torch.stack([_padded(decision.chosen[..., None], width)[..., 0] for decision in some])
            held = torch.tensor([moment.positions.shape[-1] for moment in moments], device=self.device)
            size = torch.tensor([moment.size for moment in moments], device=self.device)
            arguments = (features, chosen.to(self.device), held[:, None, None], size[:, None])
            found.append(checkpoint(self._log_probabilities, *arguments, use_reentrant=False))
        return torch.cat(found).mT

    def _log_probabilities(self, features: Tensor, chosen: Tensor, held: Tensor, size: Tensor) -> Tensor:
        """features `[decisions, rows or 1, slots, 5]`, chosen `[decisions, rows, slots]`, held `[decisions, 1, 1]` and
        size `[decisions, 1]` to `[decisions, rows]`. What rows have in common is computed once."""
        scores = self.ranker(features) / self.recipe.temperature
        real = torch.arange(scores.shape[-1], device=scores.device) < held
        partition = log_partition(scores.masked_fill(~real, -torch.inf), size)
        return torch.where(chosen, scores, 0.0).sum(-1) - partition

    def notes(self) -> list[str]:
        """How the samples were drawn."""
        return [DRAWN_BY[self.recipe.sampler]]


def returns(rewards: Tensor, gamma: float) -> Tensor:
    """Discounted sums of the rewards from each step on, both `[rows, steps]`."""
    found, ahead = [], torch.zeros_like(rewards[:, 0])
    for reward in rewards.flip(1).unbind(1):
        ahead = reward + gamma * ahead
        found.append(ahead)
    return torch.stack(found[::-1], dim=1)


def _together(decisions: Sequence[Decision]) -> Iterator[list[Decision]]:
    """Neighbours of as many rows, not too many entries at once."""
    group: list[Decision] = []
    for decision in decisions:
        size = (len(group) + 1) * decision.moment.features[..., 0].numel()
        if group and (size > ENTRIES_AT_ONCE or len(group[0].moment.features) != len(decision.moment.features)):
            yield group
            group = []
        group.append(decision)
    if group:
        yield group


def _padded(tensor: Tensor, width: int) -> Tensor:
    """`[rows, slots, n]` with zeros behind its slots."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, width - tensor.shape[1]))
