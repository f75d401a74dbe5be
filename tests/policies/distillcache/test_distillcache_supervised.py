"""DistillCache's supervised ranker, beginning with saved weights, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_on_tiny_model import LENGTH, batch, learner_for, probabilities, reinforced, supervised, text, training

from evictbench.errors import UserError
from evictbench.models import policy_weights
from evictbench.policies.distillcache.learner import RankerLearner
from evictbench.policies.distillcache.recipe import Recipe
from evictbench.policies.distillcache.supervised import ranking_parts

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


def test_a_text_from_which_nothing_has_to_go(model: Any) -> None:
    """Shorter than the least budget: no choice, and a loss of zero that a step can be taken from."""
    learner = supervised(model)
    with torch.no_grad():
        features = learner.features(model, torch.tensor([text(length=24)]))
    assert not features["held"].any()
    losses = learner.loss(replace(batch(None), features=features))
    losses.total.backward()
    assert float(losses.total.detach()) == 0
    assert all(not parameter.grad.any() for parameter in learner.parameters())


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


def test_what_isranking_parts() -> None:
    """By hand: two cuts of five, the second padded, and a later choice that drops the third least of eight."""
    later = torch.tensor(
        [[0.4, 0.3, 0.2, 0.1, 0.0, 0, 0, 0], [0.5, 0.4, 0.1, 0, 0, 0, 0, 0], [8.0, 7, 6, 5, 4, 3, 2, 1]]
    )
    held = torch.tensor([5, 3, 8])
    padding = torch.arange(8) >= held[:, None]
    later = later.log().masked_fill(padding, -torch.inf).clamp(min=-90).masked_fill(padding, -torch.inf)
    scores = torch.tensor([[5.0, 1, 4, 2, 3, 9, 9, 9], [1.0, 2, 3, 9, 9, 9, 9, 9], [8.0, 7, 6, 5, 4, 0, 2, 1]])
    found = ranking_parts(scores.masked_fill(padding, -torch.inf), later, held, torch.tensor([2, 1, 7]))
    assert found["recall"] == pytest.approx((1 / 2 + 0) / 2)
    assert found["kept"] == pytest.approx((0.6 / 0.7 + 0.1 / 0.5) / 2)
    assert found["last"] == 0
    scores[2, [5, 7]] = torch.tensor([1.0, 0.0])
    found = ranking_parts(scores.masked_fill(padding, -torch.inf), later, held, torch.tensor([2, 1, 7]))
    assert found["last"] == 1


def test_start_from_weights(model: Any, tmp_path: Path) -> None:
    """Reinforcement begins with the supervised ranker, standardisation included, and says with which."""
    first = supervised(model)
    with torch.no_grad():
        first.ranker.layers[0].weight.add_(1)
        first.ranker.shift.fill_(3)
    base = {"name": "m", "sha256": "0", "shape": {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}}
    card = {"base_model": base, "settings": {}, "transferable": True, "training": {}, "calibration": {}, "notes": []}
    policy_weights.save(tmp_path, "distillcache", "", first.export(), card)
    learner = reinforced(model, start=str(tmp_path))
    learner.begin(model, [torch.tensor([text()])])
    for name, tensor in first.export().items():
        assert torch.equal(tensor, learner.export()[name])
    settings = learner.card()["settings"]
    assert str(tmp_path) not in str(settings)
    assert settings["start"] == policy_weights.load(str(tmp_path)).sha256


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
    policy_weights.save(tmp_path, "kvpop", "", {"a": torch.zeros(1)}, {"base_model": base})
    with pytest.raises(UserError, match="no ranker"):
        learner_for(training(model, start=str(tmp_path)))


def test_methods() -> None:
    """Each method has its learner, both with the ranker alone to train."""
    for method, stored in (("reinforce", False), ("supervised", True)):
        learner = learner_for(training(None, method=method))
        assert isinstance(learner, RankerLearner)
        assert learner.stored is stored
        assert sum(parameter.numel() for parameter in learner.parameters()) == learner.card()["parameters"]
