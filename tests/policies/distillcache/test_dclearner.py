"""DistillCache's training: episodes against explicit masks, the surrogate's gradient against enumeration, labels."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evictbench import attention, weights
from evictbench.budget import Budget
from evictbench.errors import UserError
from evictbench.learner import Batch, Learner, Training
from evictbench.policies.distillcache.learner import RankerLearner, learner_for
from evictbench.policies.distillcache.recipe import Recipe
from evictbench.policies.distillcache.reinforce import ReinforceLearner, returns
from evictbench.policies.distillcache.rollout import Decision, Episode, Moment, Reading, later_attention
from evictbench.policies.distillcache.subset import gumbel_top
from evictbench.policies.distillcache.supervised import SupervisedLearner, _measured

LENGTH, PROMPT, STEPS = 72, 50, 12
SHARE = Budget(share=0.6)


@pytest.fixture
def model(tiny_llama: Any) -> Any:
    model = tiny_llama(dtype="float64").requires_grad_(False)
    attention.use(model)
    return model


def text(seed: int = 0, length: int = LENGTH) -> list[int]:
    found: list[int] = torch.randint(97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def training(model: Any, budgets: tuple[int, ...] = (43,), length: int = LENGTH, **recipe: Any) -> Training:
    chosen = Recipe(**{"horizon": STEPS, "samples": 3} | recipe)
    config: Any = getattr(model, "config", None)
    return Training(window=8, budgets=budgets, length=length, steps=10, seed=0, recipe=chosen, model=config)


def reinforced(model: Any = None, **recipe: Any) -> ReinforceLearner:
    torch.manual_seed(0)
    learner = learner_for(training(model, **recipe))
    assert isinstance(learner, ReinforceLearner)
    return learner


def supervised(model: Any, **recipe: Any) -> SupervisedLearner:
    torch.manual_seed(0)
    learner = learner_for(training(model, method="supervised", every=3, **recipe))
    assert isinstance(learner, SupervisedLearner)
    return learner


def batch(model: Any, rows: int = 1, seed: int = 0) -> Batch:
    return Batch(
        tokens=torch.tensor([text(seed + row) for row in range(rows)]),
        step=0,
        steps=10,
        budget=43,
        window=8,
        generator=torch.Generator().manual_seed(seed),
        model=model,
    )


def drawing(seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return lambda moment: gumbel_top(torch.zeros(moment.rows, moment.positions.shape[-1]), moment.size, generator)


# Episodes.


def masked_logits(model: Any, tokens: list[int], visible: Tensor) -> Tensor:
    """Logits `[tokens, vocabulary]` of one pass in which query u sees the keys `visible[u]`."""

    def attend(layer: int, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        return (query @ key.mT * scaling).masked_fill(~visible, -torch.inf).softmax(-1) @ value

    with torch.no_grad():
        found: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False, dense_attention=attend).logits[0]
    return found


def probabilities(model: Any, tokens: list[int]) -> Tensor:
    """Of plain causal attention, `[layers, heads, tokens, tokens]`."""
    found = []

    def attend(layer: int, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        found.append((query @ key.mT * scaling).masked_fill(~causal, -torch.inf).softmax(-1)[0])

    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), use_cache=False, dense_attention=attend)
    return torch.stack(found)


def test_divergence_against_masks(model: Any) -> None:
    """Each student's divergence is that of one pass in which its queries see what it had chosen and themselves."""
    tokens, rows = text(), 3
    with torch.no_grad():
        reading = Reading(model, tokens, PROMPT, SHARE)
        logits, _ = reading.read_on(PROMPT + STEPS)
        episode = reading.decode(logits, rows, drawing())
    whole = tokens[: PROMPT + STEPS]
    causal = torch.ones(len(whole), len(whole), dtype=torch.bool).tril()
    dense = masked_logits(model, whole, causal)[PROMPT:].log_softmax(-1)
    torch.testing.assert_close(logits.log_softmax(-1), dense, rtol=0, atol=1e-9)
    by_first = {decision.moment.first: decision for decision in episode.decisions}
    assert next(iter(by_first)) == 0
    assert 0 < len(by_first) < STEPS + 1  # a share that grows: not every step evicts
    for row in range(rows):
        visible, held = causal.clone(), set(range(PROMPT))
        for step in range(STEPS):
            if step in by_first:
                decision = by_first[step]
                positions = decision.moment.positions.expand(rows, -1)[row]
                assert set(positions.tolist()) == held
                held = set(positions[decision.chosen[row]].tolist())
                assert len(held) == decision.moment.size == SHARE.at(PROMPT, PROMPT + step + 1) - 1
            held.add(PROMPT + step)
            visible[PROMPT + step] = torch.tensor([key in held for key in range(len(whole))])
        student = masked_logits(model, whole, visible)[PROMPT:].log_softmax(-1)
        expected = (dense.exp() * (dense - student)).sum(-1)
        torch.testing.assert_close(episode.kl[row], expected, rtol=0, atol=1e-9)
    assert episode.kl.min() > 1e-4


def test_nothing_evicted(model: Any) -> None:
    """A budget of everything: no choice, no divergence, several rows all the same."""
    with torch.no_grad():
        reading = Reading(model, text(), PROMPT, Budget(share=1.0))
        logits, _ = reading.read_on(PROMPT + STEPS)
        episode = reading.decode(logits, 2, drawing())
    assert not episode.decisions
    assert episode.kl.shape == (2, STEPS)
    assert episode.kl.abs().max() < 1e-9


def test_prompt_is_left_as_it_was(model: Any) -> None:
    """How far the teacher has read on, and who decoded before, changes nothing of an episode."""
    with torch.no_grad():
        reading = Reading(model, text(), PROMPT, SHARE)
        logits, _ = reading.read_on(PROMPT + STEPS)
        first = reading.decode(logits, 2, drawing(3))
        other = Reading(model, text(), PROMPT, SHARE)
        longer, _ = other.read_on(LENGTH)
        other.decode(longer, 2, drawing(8))
        again = other.decode(longer[:STEPS], 2, drawing(3))
    torch.testing.assert_close(again.kl, first.kl, rtol=0, atol=1e-9)
    for mine, theirs in zip(again.decisions, first.decisions, strict=True):
        assert torch.equal(mine.chosen, theirs.chosen)
        assert torch.equal(mine.moment.positions.expand(2, -1), theirs.moment.positions.expand(2, -1))
        torch.testing.assert_close(mine.moment.features, theirs.moment.features, rtol=0, atol=1e-6)


def test_what_the_teacher_attends_to(model: Any) -> None:
    """Rows of attention and their mean from a choice on, against the whole matrix, over more than one ring."""
    tokens = text(length=150)
    with torch.no_grad():
        _, found = Reading(model, tokens, 40, SHARE).read_on(150)
    expected = probabilities(model, tokens).mean((0, 1))[40:]
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=1e-6)
    positions = torch.tensor([[0, 7, 39], [2, 41, 45]])
    later = later_attention(found, 6, positions)
    torch.testing.assert_close(later, expected[6:].mean(0).float()[positions], rtol=0, atol=1e-6)
    discounted = sum(0.5**wait * row for wait, row in enumerate(expected[6:])) / 2
    later = later_attention(found, 6, positions, 0.5)
    torch.testing.assert_close(later, discounted.float()[positions], rtol=0, atol=1e-6)


# The surrogate.


def moment(rows: int, slots: int, size: int, first: int, seed: int = 0) -> Moment:
    generator = torch.Generator().manual_seed(seed)
    features = torch.rand(rows, slots, 5, generator=generator)
    return Moment(features, torch.arange(slots).expand(rows, -1), size, rows, first)


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
        scores = learner.ranker(decision.moment.features).expand(3, -1)
        every = sets(scores.shape[1], decision.moment.size)
        logs, worth = [], []
        for row in range(3):
            sums = torch.where(every, scores[row], 0.0).sum(-1)
            logs.append(scores[row][decision.chosen[row]].sum() - sums.logsumexp(0))
            ahead = episode.kl[row, decision.moment.first :]
            worth.append(-sum(0.7**wait * float(kl) for wait, kl in enumerate(ahead)) - 0.05 * float(logs[-1].detach()))
        for row in range(3):
            others = sum(worth[other] for other in range(3) if other != row) / 2
            expected = expected - logs[row] * (worth[row] - others) / 3
        surprises -= sum(float(log.detach()) for log in logs) / 3
        gone += scores.shape[1] - decision.moment.size
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


# The supervised ranker.


def test_stored_choices(model: Any) -> None:
    """Every choice's entries, their features as floats bit for bit, and the label against the whole matrix."""
    length = 160
    learner = learner_for(training(model, method="supervised", every=3, length=length, budgets=(96,), gamma=1.0))
    tokens = torch.tensor([text(length=length)])
    with torch.no_grad():
        found, again = (learner.features(model, tokens) for _ in range(2))
    for name, tensor in found.items():
        assert torch.equal(tensor, again[name])
    numbers, later = found["numbers"].view(torch.float32)[0], found["later"][0]
    held, size = found["held"][0].tolist(), found["size"][0].tolist()
    attended = probabilities(model, text(length=length)).mean((0, 1))
    cuts = [place for place in range(len(held)) if held[place] - size[place] > 1]
    assert len(cuts) == 2
    for place in cuts:
        prompt = held[place]
        assert length // 4 <= prompt < length - length // 4
        label = (attended[prompt:].mean(0) + 1e-9).log().float()
        torch.testing.assert_close(later[place, :prompt], label[:prompt], rtol=0, atol=1e-4)
        torch.testing.assert_close(numbers[place, :prompt, 4], torch.linspace(0, 1, prompt))
        alpha = attended[:prompt, :prompt].mean(0).float()
        torch.testing.assert_close(numbers[place, :prompt, 0], alpha, rtol=0, atol=1e-6)
        assert not numbers[place, prompt:].any()
    # Between cuts, single entries go, from what the cut before left.
    for place in sorted(set(range(len(held))) - set(cuts)):
        assert held[place] in (0, size[place] + 1)
    assert sum(held[place] > 0 for place in range(len(held))) > 4


@pytest.mark.parametrize("target", ["importance", "set"])
def test_supervised_learns(model: Any, target: str) -> None:
    """Fitted to the choices of a text, the ranker ranks them as later attention does."""
    learner = supervised(model, target=target)
    with torch.no_grad():
        features = learner.features(model, torch.tensor([text()]))
    learner.measure([features])
    one = replace(batch(None), features=features)
    optimiser = torch.optim.Adam(learner.parameters(), lr=1e-2)
    first = learner.loss(one)
    for _ in range(150):
        losses = learner.loss(one)
        optimiser.zero_grad()
        losses.total.backward()
        optimiser.step()
    assert float(losses.total.detach()) < 0.6 * float(first.total.detach())
    assert losses.parts["recall"] > max(0.85, first.parts["recall"])
    assert losses.parts["kept"] > first.parts["kept"]


def test_squared_error_against_loops(model: Any) -> None:
    learner = supervised(model)
    with torch.no_grad():
        features = learner.features(model, torch.tensor([text()]))
        found = float(learner.loss(replace(batch(None), features=features)).total)
        expected = []
        for numbers, later, held in zip(
            features["numbers"].view(torch.float32)[0], features["later"][0], features["held"][0], strict=True
        ):
            if held:
                scores, label = learner.ranker(numbers[:held]), later[:held]
                expected.append(float(((scores - scores.mean()) - (label - label.mean())).square().mean()))
    assert found == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_what_is_measured() -> None:
    """By hand: two cuts of five, the second padded, and a later choice that drops the third least of eight."""
    later = torch.tensor(
        [[0.4, 0.3, 0.2, 0.1, 0.0, 0, 0, 0], [0.5, 0.4, 0.1, 0, 0, 0, 0, 0], [8.0, 7, 6, 5, 4, 3, 2, 1]]
    )
    held = torch.tensor([5, 3, 8])
    padding = torch.arange(8) >= held[:, None]
    later = later.log().masked_fill(padding, -torch.inf).clamp(min=-90).masked_fill(padding, -torch.inf)
    scores = torch.tensor([[5.0, 1, 4, 2, 3, 9, 9, 9], [1.0, 2, 3, 9, 9, 9, 9, 9], [8.0, 7, 6, 5, 4, 0, 2, 1]])
    found = _measured(scores.masked_fill(padding, -torch.inf), later, held, torch.tensor([2, 1, 7]))
    assert found["recall"] == pytest.approx((1 / 2 + 0) / 2)
    assert found["kept"] == pytest.approx((0.6 / 0.7 + 0.1 / 0.5) / 2)
    assert found["last"] == 0
    scores[2, [5, 7]] = torch.tensor([1.0, 0.0])
    found = _measured(scores.masked_fill(padding, -torch.inf), later, held, torch.tensor([2, 1, 7]))
    assert found["last"] == 1


def test_start_from_weights(model: Any, tmp_path: Path) -> None:
    """Reinforcement begins with the supervised ranker, standardisation included, and says with which."""
    first = supervised(model)
    with torch.no_grad():
        first.ranker.layers[0].weight.add_(1)
        first.ranker.shift.fill_(3)
    base = {"name": "m", "sha256": "0", "shape": {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}}
    card = {"base_model": base, "settings": {}, "transferable": True, "training": {}, "calibration": {}, "notes": []}
    weights.save(tmp_path, "distillcache", "", first.export(), card)
    learner = reinforced(model, start=str(tmp_path))
    learner.begin(model, [torch.tensor([text()])])
    for name, tensor in first.export().items():
        assert torch.equal(tensor, learner.export()[name])
    settings = learner.card()["settings"]
    assert str(tmp_path) not in str(settings)
    assert settings["start"] == weights.load(str(tmp_path)).sha256


# What cannot be.


def test_refusals(model: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing would be evicted"):
        learner_for(training(model, budgets=(LENGTH,)))
    with pytest.raises(UserError, match="more than a quarter"):
        learner_for(training(model, horizon=19))
    with pytest.raises(UserError, match="no folder"):
        Recipe(start="nowhere/at/all")
    with pytest.raises(UserError, match="samples of 1 or more"):
        Recipe(samples=0)
    with pytest.raises(UserError, match="temperature above 0"):
        Recipe(temperature=0.0)
    base = {"name": "m", "sha256": "0", "shape": {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}}
    weights.save(tmp_path, "kvpop", "", {"a": torch.zeros(1)}, {"base_model": base})
    with pytest.raises(UserError, match="no ranker"):
        learner_for(training(model, start=str(tmp_path)))


def test_methods() -> None:
    """Each method has its learner, both with the ranker alone to train."""
    for method, stored in (("reinforce", False), ("supervised", True)):
        learner = learner_for(training(None, method=method))
        assert isinstance(learner, RankerLearner)
        assert learner.stored is stored
        assert sum(parameter.numel() for parameter in learner.parameters()) == learner.card()["parameters"]
