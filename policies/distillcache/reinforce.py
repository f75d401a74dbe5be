"""DistillCache's own training: the ranker learns from the cost of its choices.

After Althoubi (arXiv 2608.08878, section 3, appendices C and D). Students, rows of one cache, sample their sets; the
reward of a step is minus the divergence of its prediction from the teacher's, KL(teacher ‖ student). Only the ranker
has gradients: those of the log-probability of each choice under the distribution of subsets of a fixed size (`subset`).

Deviations:
- The students are fed the text's own next tokens and not their generation (`rollout`).
- A choice is rewarded from the first prediction that it changes, the one after the next token.
- The entropy's single-sample estimate is a reward of the choice, `-entropy · log P`; as a term of the loss its gradient
  would be zero in the mean. P is of a whole set, as published, so that the bonus grows with the entries that go: a
  prompt's cut evicts 90 to 320, and .01 times its surprise is .8, 1.2 and 1.45 at shares of 12.5, 25 and
  50%, where the returns of a text's samples spread by 1.8, 1.2 and .6. The bonus is then as large as the signal. In the
  bundled weights' training entropy rises and KL rises with it at 12.5 and 25%; the paper (F.1) reports that entropy
  falls. `bonus=mean` divides each choice's surprise by the entries that it evicts: a weight per entry, the same for a
  cut as for a later choice, which evicts one.
  Seen in 40 steps that went on from the bundled weights (25% of 512 tokens, horizon 16, 4 samples, lr 1e-3, one seed,
  the same texts): with `sum`, surprise rises from .41 to .55 an entry (means of the first and last ten steps), with
  `mean` it falls from .34 to .27; KL of the samples in the last ten is .32 and .19, of the greedy choice on six
  held-out texts .233 and .207. One seed and six texts decide nothing, so that the default is as published.
- `features=` trains without some features, for the paper's table 10: their weights in the first layer are 0.
- The bundled weights do not start fresh: `start` were weights of the supervised training with `target=set` (2,000
  steps), of which the paper has nothing. Its rankers begin untrained and have 10,000 steps; ours had 240.
- `reward=attention` stands for the "long-term contribution" of the paper's table 6, an 8-step rollout utility of which
  it says no more: a choice's gain is the share of the teacher's attention of the next 8 tokens, mean over layers and
  heads, that falls on what it keeps of the entries it had. The table's "holistic" ranking is not here.
- The baseline of a return is the mean of the other samples', plus a moving average of what remains. With two samples
  or more nothing remains, whatever the returns; with one, the moving average is the whole baseline.
- The paper starts from new weights. The shipped ones start from the supervised ranker with `target=set` (`supervised`),
  which the paper does not have.
- The bonus's weight, .01, is the published one, on the entropy of a whole choice: a sum over entries, which grows with
  the cache and can be as large as the return's spread. The paper does not say of what its entropy is.
- The optimiser and its schedule are those of all trainings here; 3e-4, as published, is `--lr 3e-4`.
- As published, the samples (Gumbel top-B) are not drawn from the distribution of the gradient; with `sampler=poisson`
  they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from evictbench.policy.learner import Batch, Losses, Training

from .learner import RankerLearner
from .rollout import Choice, Choose, Decision, Episode, TeacherRun, later_attention, token_list
from .subset import conditional_poisson, gumbel_top, log_partition

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.policy.budget import Budget

ENTRIES_AT_ONCE = 2**18
"""Entries that are scored at a time; the backward pass computes the others again."""

REACH = 8
"""Tokens whose attention `reward=attention` counts."""

STATISTICS_TEXTS = 4
"""Texts whose features standardise the inputs; each takes an episode."""

DRAWN_BY = {
    "gumbel": "Sets were drawn by Gumbel top-B, as published, whose law is not the one that the gradient is of.",
    "poisson": "Sets were drawn by conditional Poisson sampling, from the law that the gradient is of.",
}


class ReinforceLearner(RankerLearner):
    """The ranker, trained by REINFORCE.

    residual: `[horizon]`, the moving average of the returns less the other samples' mean, by the first step whose
    prediction a choice changes.
    """

    residual: Tensor

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.register_buffer("residual", torch.zeros(self.recipe.horizon))

    @torch.no_grad()
    def begin(self, model: PreTrainedModel, blocks: Sequence[Tensor]) -> None:
        """Set the standardisation of fresh weights from the features of a few texts."""
        if not self.fresh:
            return
        features = []
        for number, tokens in enumerate(blocks[:STATISTICS_TEXTS]):
            generator = torch.Generator(self.device).manual_seed(number)
            budget = self.share(self.budgets[number % len(self.budgets)])
            episode = self._episode(model, tokens[0], budget, generator, self._sampler(generator), rows=1)
            features += [decision.choice.features.reshape(-1, 5).to(self.device) for decision in episode.decisions]
        if features:
            self.ranker.measure(torch.cat(features))

    def loss(self, batch: Batch) -> Losses:
        """The surrogate whose gradient is REINFORCE's: a sum over choices, a mean over samples and texts.

        Parts: `kl`, nats a token, the mean over samples and steps; `spread`, its standard deviation over samples;
        `surprise`, minus the log-probability of the choices, per evicted entry. Without gradients (held-out texts), the
        loss is the divergence of one student that chooses greedily, as in use.
        """
        assert batch.model is not None
        budget, training = self.share(batch.budget), torch.is_grad_enabled()
        choose = self._sampler(batch.generator) if training else self._greedily
        rows = self.recipe.samples if training else 1
        total, sums = torch.zeros((), device=self.device), dict[str, float]()
        for tokens in batch.tokens:
            with torch.no_grad():
                episode = self._episode(batch.model, tokens, budget, batch.generator, choose, rows=rows)
            kl = episode.kl.mean(1)
            parts = {"kl": float(kl.mean())}
            if training:
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
        """Run one text, `[S]`. Its prompt is at least half of it, and ends where the generator says."""
        length = len(tokens)
        horizon = min(self.recipe.horizon, max(1, length // 4))
        ends = torch.randint(length // 2, length - horizon + 1, (1,), generator=generator, device=generator.device)
        prompt = max(1, int(ends))
        run = TeacherRun(model, token_list(tokens[: prompt + horizon]), prompt, budget)
        logits, attention = run.read_on(prompt + horizon)
        return replace(run.decode(logits, rows, choose), attention=attention)

    def _greedily(self, choice: Choice) -> Tensor:
        scores = self.ranker(choice.features.to(self.device))
        best = torch.zeros_like(scores, dtype=torch.bool)
        best = best.scatter(-1, scores.topk(choice.size, dim=-1).indices, True)
        return best.expand(choice.rows, -1).to(choice.features.device)

    def _sampler(self, generator: torch.Generator) -> Choose:
        sample = gumbel_top if self.recipe.sampler == "gumbel" else conditional_poisson

        def choose(choice: Choice) -> Tensor:
            scores = self.ranker(choice.features.to(self.device)) / self.recipe.temperature
            return sample(scores.expand(choice.rows, -1), choice.size, generator).to(choice.features.device)

        return choose

    def surrogate(self, episode: Episode) -> tuple[Tensor, float]:
        """The loss of one episode, a scalar, and its surprise. Updates the moving average."""
        rewards = -episode.kl.to(self.residual)
        decisions = [decision for decision in episode.decisions if decision.choice.first < rewards.shape[1]]
        if not decisions:
            return rewards.new_zeros(()), torch.nan
        logs = self.log_probabilities(decisions)
        first = torch.tensor([decision.choice.first for decision in decisions], device=self.device)
        evicted = [decision.choice.positions.shape[-1] - decision.choice.size for decision in decisions]
        if self.recipe.reward == "kl":
            gains = returns(rewards, self.recipe.gamma)[:, first]
        else:
            gains = torch.stack([contribution(decision, episode.attention) for decision in decisions], dim=1)
        shared = torch.tensor(evicted if self.recipe.bonus == "mean" else [1] * len(evicted), device=self.device)
        gains = gains.to(logs) - self.recipe.entropy * logs.detach() / shared
        samples, decay = len(gains), self.recipe.average
        centred = gains - (gains.sum(0) - gains) / (samples - 1) if samples > 1 else gains
        advantage = centred - self.residual[first]
        self.residual[first] = decay * self.residual[first] + (1 - decay) * centred.mean(0)
        if self.recipe.normalise:
            advantage = advantage / advantage.std(correction=0).clamp(min=1e-8)
        surprise = -float(logs.detach().mean(0).sum()) / sum(evicted)
        return -(logs * advantage).mean(0).sum(), surprise

    def log_probabilities(self, decisions: Sequence[Decision]) -> Tensor:
        """Log-probabilities of the decisions, `[rows, decisions]`, with the ranker's graph."""
        logs = []
        for group in _groups(decisions):
            choices = [decision.choice for decision in group]
            width = max(choice.positions.shape[-1] for choice in choices)
            features = torch.stack([_padded(choice.features, width) for choice in choices]).to(self.device)
            chosen = torch.stack([_padded(decision.chosen[..., None], width)[..., 0] for decision in group])
            held = torch.tensor([choice.positions.shape[-1] for choice in choices], device=self.device)
            size = torch.tensor([choice.size for choice in choices], device=self.device)
            arguments = (features, chosen.to(self.device), held[:, None, None], size[:, None])
            logs.append(checkpoint(self._log_probabilities, *arguments, use_reentrant=False))
        return torch.cat(logs).mT

    def _log_probabilities(self, features: Tensor, chosen: Tensor, held: Tensor, size: Tensor) -> Tensor:
        """Log-probabilities `[decisions, rows]`. Scores that all rows share are computed once.

        features: `[decisions, rows or 1, slots, 5]`. chosen: `[decisions, rows, slots]`. held: `[decisions, 1, 1]`.
        size: `[decisions, 1]`.
        """
        scores = self.ranker(features) / self.recipe.temperature
        real = torch.arange(scores.shape[-1], device=scores.device) < held
        partition = log_partition(scores.masked_fill(~real, -torch.inf), size)
        return torch.where(chosen, scores, 0.0).sum(-1) - partition

    def notes(self) -> list[str]:
        """How the samples were drawn."""
        return [DRAWN_BY[self.recipe.sampler]]


def returns(rewards: Tensor, gamma: float) -> Tensor:
    """The discounted sum of the rewards from each step on; rewards and returns `[rows, steps]`."""
    sums, following = [], torch.zeros_like(rewards[:, 0])
    for reward in rewards.flip(1).unbind(1):
        following = reward + gamma * following
        sums.append(following)
    return torch.stack(sums[::-1], dim=1)


def contribution(decision: Decision, attention: Tensor | None) -> Tensor:
    """The share of the attention of the next `REACH` tokens that falls on what a choice keeps, `[rows]`, of what falls
    on the entries that it had. attention: the teacher's, `[tokens, stop]`, as of `TeacherRun.read_on`."""
    assert attention is not None
    choice = decision.choice
    rows = attention[: choice.first + REACH]
    later = later_attention(rows, choice.first, choice.positions.to(rows.device))
    kept = (later * decision.chosen.to(rows.device)).sum(-1)
    return kept / later.sum(-1).clamp(min=torch.finfo(later.dtype).tiny)


def _groups(decisions: Sequence[Decision]) -> Iterator[list[Decision]]:
    """Neighbouring decisions of equally many rows, in groups of at most about `ENTRIES_AT_ONCE` entries."""
    group: list[Decision] = []
    for decision in decisions:
        size = (len(group) + 1) * decision.choice.features[..., 0].numel()
        if group and (size > ENTRIES_AT_ONCE or len(group[0].choice.features) != len(decision.choice.features)):
            yield group
            group = []
        group.append(decision)
    if group:
        yield group


def _padded(tensor: Tensor, width: int) -> Tensor:
    """A tensor `[rows, slots, n]` with zeros behind its slots, up to `width`."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, width - tensor.shape[1]))
