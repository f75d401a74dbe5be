"""DistillCache's reinforcement: the surrogate's gradient against enumeration, returns, baselines."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from training_on_tiny_model import batch, reinforced, text

from evictbench.cache import attention
from evictbench.errors import UserError
from evictbench.policies.distillcache.reinforce import returns
from evictbench.policies.distillcache.rollout import Choice, Decision, Episode
from evictbench.policies.distillcache.subset import gumbel_top
from evictbench.policy.learner import Learner

# The surrogate.


def moment(rows: int, slots: int, size: int, first: int, seed: int = 0) -> Choice:
    generator = torch.Generator().manual_seed(seed)
    features = torch.rand(rows, slots, 5, generator=generator)
    return Choice(features, torch.arange(slots).expand(rows, -1), size, rows, first)


def sets(slots: int, size: int) -> Tensor:
    found = torch.zeros(len(list(itertools.combinations(range(slots), size))), slots, dtype=torch.bool)
    for number, members in enumerate(itertools.combinations(range(slots), size)):
        found[number, list(members)] = True
    return found


def gradient(value: Tensor, learner: Learner) -> Tensor:
    parameters = list(learner.parameters())
    slopes = torch.autograd.grad(value, parameters, allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(parameter) if slope is None else slope).flatten()
            for slope, parameter in zip(slopes, parameters, strict=True)
        ]
    )


@pytest.mark.parametrize("entropy", [0.0, 0.3])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_gradient_is_that_of_the_reward(entropy: float, temperature: float) -> None:
    """Over all pairs of samples, weighted by their chance, the surrogate's gradient is minus that of the expected
    reward and of the law's entropy: exactly, baseline and all."""
    learner = reinforced(samples=2, entropy=entropy, temperature=temperature).double()
    choice = moment(1, 5, 2, 0)
    choice = replace(choice, features=choice.features.double(), rows=2)
    every = sets(5, 2)
    cost = torch.rand(len(every), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores = learner.ranker(choice.features)[0] / temperature
    logs = torch.where(every, scores, 0.0).sum(-1).log_softmax(0)
    expected = gradient((logs.exp() * (-cost - entropy * logs)).sum(), learner)
    found = torch.zeros_like(expected)
    for one, other in itertools.product(range(len(every)), repeat=2):
        episode = Episode([Decision(choice, every[[one, other]])], cost[[one, other], None])
        surrogate, _ = learner.surrogate(episode)
        found -= (logs[one] + logs[other]).exp().detach() * gradient(surrogate, learner)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10)
    assert expected.abs().max() > 1e-4


def episode_of(sizes: list[tuple[int, int, int]], samples: int, steps: int = 4, seed: int = 0) -> Episode:
    """Choices of (slots, size, first) at random; the first of them has the same entries in all rows."""
    generator = torch.Generator().manual_seed(seed)
    decisions = []
    for number, (slots, size, first) in enumerate(sizes):
        choice = replace(moment(1 if number == 0 else samples, slots, size, first, seed + number), rows=samples)
        decisions.append(Decision(choice, gumbel_top(torch.zeros(samples, slots), size, generator)))
    return Episode(decisions, torch.rand(samples, steps, generator=generator))


SIZES = [(9, 3, 0), (4, 3, 1), (5, 4, 3), (5, 4, 4)]
"""The last choice comes after the last prediction."""


def test_surrogate_against_loops() -> None:
    """Several choices of unequal sizes: returns from the first prediction that each changes, the others' mean, minus
    the log-probability by enumeration; what is chosen last changes nothing and is left out."""
    learner = reinforced(samples=3, gamma=0.7, entropy=0.05)
    episode = episode_of(SIZES, 3)
    found, surprise = learner.surrogate(episode)
    expected, surprises, gone = torch.zeros(()), 0.0, 0
    for decision in episode.decisions[:-1]:
        scores = learner.ranker(decision.choice.features).expand(3, -1)
        every = sets(scores.shape[1], decision.choice.size)
        logs, worth = [], []
        for row in range(3):
            sums = torch.where(every, scores[row], 0.0).sum(-1)
            logs.append(scores[row][decision.chosen[row]].sum() - sums.logsumexp(0))
            ahead = episode.kl[row, decision.choice.first :]
            worth.append(-sum(0.7**wait * float(kl) for wait, kl in enumerate(ahead)) - 0.05 * float(logs[-1].detach()))
        for row in range(3):
            others = sum(worth[other] for other in range(3) if other != row) / 2
            expected = expected - logs[row] * (worth[row] - others) / 3
        surprises -= sum(float(log.detach()) for log in logs) / 3
        gone += scores.shape[1] - decision.choice.size
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient(found, learner), gradient(expected, learner), rtol=1e-3, atol=1e-5)
    assert surprise == pytest.approx(surprises / gone, rel=1e-5)


def test_groups_of_entries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, episode = reinforced(), episode_of(SIZES, 3)
    whole = learner.log_probabilities(episode.decisions)
    monkeypatch.setattr("evictbench.policies.distillcache.reinforce.ENTRIES_AT_ONCE", 16)
    parts = learner.log_probabilities(episode.decisions)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)
    both = (gradient(logs.square().sum(), learner) for logs in (whole, parts))
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5)


def test_baseline() -> None:
    """What all samples suffer alike moves nothing; with one sample the moving average takes it up."""
    episode = episode_of(SIZES, 3)
    worse = replace(episode, kl=episode.kl + 5)
    slopes = []
    for one in (episode, worse):
        learner = reinforced(entropy=0.0)
        slopes.append(gradient(learner.surrogate(one)[0], learner))
        assert learner.residual.abs().max() < 1e-5
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-3, atol=1e-4)
    learner = reinforced(samples=1, entropy=0.0, average=0.5)
    alone = episode_of(SIZES, 1)
    sizes = []
    for _ in range(12):
        sizes.append(float(gradient(learner.surrogate(alone)[0], learner).abs().max()))
    assert sizes[-1] < sizes[0] * 1e-2
    assert learner.residual[0] == pytest.approx(float(returns(-alone.kl, learner.recipe.gamma)[0, 0]), rel=1e-2)


def test_normalised_advantages() -> None:
    """Only their size changes: ten times the divergence is the same loss."""
    episode = episode_of(SIZES, 3)
    learner = reinforced(entropy=0.0, normalise=True)
    first = learner.surrogate(episode)[0]
    torch.testing.assert_close(learner.surrogate(replace(episode, kl=episode.kl * 10))[0], first, rtol=1e-4, atol=1e-5)


def test_a_bonus_per_evicted_entry() -> None:
    """A choice that evicts one is rewarded as before, one that evicts six a sixth as much."""
    for choice, evicted in (((5, 4, 0), 1), ((9, 3, 0), 6)):
        episode = replace(episode_of([choice], 3), kl=torch.zeros(3, 4))
        slopes = []
        for bonus in ("sum", "mean"):
            learner = reinforced(samples=3, entropy=0.4, bonus=bonus)
            slopes.append(gradient(learner.surrogate(episode)[0], learner))
        torch.testing.assert_close(slopes[1] * evicted, slopes[0], rtol=1e-4, atol=1e-6)
        assert slopes[0].abs().max() > 1e-3


def test_the_reward_of_later_attention_against_loops() -> None:
    """Of the attention of the next 8 tokens, what falls on the entries that stay, of what falls on those held."""
    learner = reinforced(samples=3, entropy=0.0, reward="attention")
    sizes = [(9, 3, 0), (9, 4, 2)]
    attention = torch.rand(12, 20, generator=torch.Generator().manual_seed(3))
    episode = replace(episode_of(sizes, 3, steps=12), attention=attention)
    found, _ = learner.surrogate(episode)
    expected = torch.zeros(())
    logs = learner.log_probabilities(episode.decisions)
    for number, decision in enumerate(episode.decisions):
        first, places = decision.choice.first, decision.choice.positions.expand(3, -1)
        worth = []
        for row in range(3):
            later = [float(attention[first : first + 8, place].sum()) for place in places[row].tolist()]
            stays = decision.chosen[row].tolist()
            worth.append(sum(one for one, kept in zip(later, stays, strict=True) if kept) / sum(later))
        for row in range(3):
            others = sum(worth[other] for other in range(3) if other != row) / 2
            expected = expected - logs[row, number] * (worth[row] - others) / 3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert found.abs() > 1e-3


def test_features_that_are_not_used_say_nothing(model: Any) -> None:
    """Their weights are 0 after training as before it, and whatever they are, the scores stay."""
    learner = reinforced(model, features="alpha+entropy")
    optimiser = torch.optim.AdamW(learner.parameters(), lr=1e-2, weight_decay=1e-2)
    for seed in range(2):
        optimiser.zero_grad()
        learner.loss(batch(model, seed=seed)).total.backward()
        optimiser.step()
    weight = learner.export()["layers.0.weight"]
    assert (weight.abs().amax(0) > 0).tolist() == [True, False, False, True, False]
    features = torch.rand(7, 5, generator=torch.Generator().manual_seed(0))
    other = features.clone()
    other[:, [1, 2, 4]] = 0.9
    torch.testing.assert_close(learner.ranker(other), learner.ranker(features))
    other[:, 3] = 0.9
    assert not torch.allclose(learner.ranker(other), learner.ranker(features))


@pytest.mark.parametrize("features", ["alpha+", "alpha+alpha", "attention", ""])
def test_unknown_features_are_a_sentence(features: str) -> None:
    with pytest.raises(UserError, match="name some, each once, joined by plus signs"):
        reinforced(features=features)


def test_returns() -> None:
    rewards = torch.tensor([[-1.0, -2.0, -4.0], [0.0, 0.0, -1.0]])
    torch.testing.assert_close(returns(rewards, 0.5), torch.tensor([[-3.0, -4.0, -4.0], [-0.25, -0.5, -1.0]]))


# A batch.


@pytest.mark.parametrize("sampler", ["gumbel", "poisson"])
def test_a_batch(model: Any, sampler: str) -> None:
    """Gradients for the ranker alone; the same noise, the same loss; numbers that can be read."""
    learner = reinforced(model, sampler=sampler)
    learner.begin(model, [torch.tensor([text(9)])])
    assert (learner.ranker.scale != 1).all()
    losses = learner.loss(batch(model, rows=2))
    losses.total.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in learner.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert losses.parts["kl"] > 0
    assert losses.parts["spread"] > 0
    assert losses.parts["surprise"] > 0
    again = reinforced(model, sampler=sampler)
    again.ranker.load_state_dict(learner.ranker.state_dict())
    assert float(again.loss(batch(model, rows=2)).total.detach()) == float(losses.total.detach())


def test_held_out_is_greedy(model: Any) -> None:
    """Without gradients one student chooses as in use: no noise, no moving average, and the divergence as the loss."""
    learner = reinforced(model)
    learner.begin(model, [torch.tensor([text(9)])])
    with torch.no_grad():
        first, again = (learner.loss(batch(model)) for _ in range(2))
    assert float(first.total) == pytest.approx(first.parts["kl"])
    assert first.parts == again.parts
    assert set(first.parts) == {"kl"}
    assert not learner.residual.any()


def test_what_is_saved() -> None:
    """The moving average goes into a checkpoint, and not into the weights."""
    learner = reinforced()
    assert "residual" in learner.state_dict()
    assert set(learner.export()) == set(learner.ranker.state_dict())
    assert "conditional Poisson" in str(reinforced(sampler="poisson").card()["notes"])
    assert "not the one" in str(learner.card()["notes"])
    assert "59.7222%" in str(learner.card()["notes"])


def test_it_learns(tiny_llama: Any) -> None:
    """On one text again and again, what is drawn diverges less than it did."""
    model = tiny_llama().requires_grad_(False)
    attention.use(model)
    learner = reinforced(model, samples=8, entropy=0.0, horizon=6, normalise=True)
    learner.begin(model, [torch.tensor([text()])])
    optimiser = torch.optim.Adam(learner.parameters(), lr=1e-2)
    found = []
    for step in range(25):
        losses = learner.loss(replace(batch(model), generator=torch.Generator().manual_seed(step % 2)))
        optimiser.zero_grad()
        losses.total.backward()
        optimiser.step()
        found.append(losses.parts["kl"])
    assert sum(found[-6:]) < 0.8 * sum(found[:6])
