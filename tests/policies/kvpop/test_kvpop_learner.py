"""The trainable side: features as defined, gradients where they belong, a student that sees what the cache holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_kvpop_weights import random_tensors
from torch import Tensor

from evictbench.cache.attention import use
from evictbench.cache.new_cache import new_cache
from evictbench.errors import UserError
from evictbench.models.policy_weights import Weights
from evictbench.policies.kvpop import KVpop, KVpopMLP
from evictbench.policies.kvpop.learner import ScorerLearner
from evictbench.policies.kvpop.ranking import sequence_expiry
from evictbench.policy import ModelShape, Policy
from evictbench.policy.learner import Batch, Training
from evictbench.train.sparse_attention import StudentAttention
from twin import dense_forward, tiny_model
from twin import future as future_twin
from twin import kvpop as twin
from twin.model import DenseModel
from twin.tiny import random_tokens

BOTH = pytest.mark.parametrize("cls", [KVpop, KVpopMLP])
SINKS, WINDOW, LENGTH = 2, 4, 48


def training(model: Any, budgets: tuple[int, ...] = (32,)) -> Training:
    return Training(
        window=WINDOW,
        budgets=budgets,
        length=LENGTH,
        steps=1,
        seed=0,
        recipe=KVpop.Recipe(hidden=8, sinks=SINKS),
        model=model.config,
    )


def made(cls: type[Policy], label: str = "mean", budgets: tuple[int, ...] = (32,)) -> ScorerLearner:
    model = tiny_model()
    torch.manual_seed(0)
    policy = cls(cls.Config(label=label))
    found = policy.learner(ModelShape.of(model.config), training(model, budgets))
    assert isinstance(found, ScorerLearner)
    return found


def batch(learner: ScorerLearner, tokens: Tensor, **more: Any) -> Batch:
    return Batch(tokens=tokens, step=0, steps=1, budget=32, window=WINDOW, generator=torch.Generator(), **more)


def blocks(rows: int = 2) -> Tensor:
    return torch.tensor([random_tokens(LENGTH, seed) for seed in range(rows)])


def test_features_are_what_the_definition_says() -> None:
    model, tokens = tiny_model(), blocks()
    found = made(KVpop).features(model, tokens)
    dense = DenseModel(model)
    for row, text in enumerate(tokens.tolist()):
        run = dense_forward(model, text)
        for layer in range(dense.layers):
            keys = dense.rotate(run.keys[layer], [-t for t in range(LENGTH)]).transpose(0, 1)
            values = run.values[layer].transpose(0, 1)
            torch.testing.assert_close(found["keys"][row, layer].double(), keys, atol=2e-3, rtol=1e-3)
            torch.testing.assert_close(found["values"][row, layer].double(), values, atol=2e-3, rtol=1e-3)
            for label in ("mean", "max"):
                wanted = future_twin.future_labels(
                    run.queries[layer].transpose(0, 1),
                    run.keys[layer].transpose(0, 1),
                    window=WINDOW,
                    scaling=model.model.layers[layer].self_attn.scaling,
                    label=label,  # type: ignore[arg-type]
                    eps=1e-9,
                )
                torch.testing.assert_close(found[label][row, layer].double(), wanted, atol=1e-2, rtol=1e-3)


@BOTH
@pytest.mark.parametrize("label", ["mean", "max"])
def test_gradients_reach_scorer_and_decay_and_nothing_else(cls: type[Policy], label: str) -> None:
    model, tokens = tiny_model(), blocks()
    learner = made(cls, label)
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    features = learner.features(model, tokens)
    assert not any(tensor.requires_grad for tensor in features.values())
    inputs = {name: tensor.float().requires_grad_() for name, tensor in features.items()}
    losses = learner.loss(batch(learner, tokens, features=inputs))
    assert 0 < losses.parts["recall"] <= 1
    losses.total.backward()
    for name, parameter in learner.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert name.endswith("b2") or parameter.grad.any(), name
    assert all(tensor.grad is None for tensor in inputs.values())
    assert all(parameter.grad is None for parameter in model.parameters())
    exported = learner.export()
    assert not any(tensor.requires_grad for tensor in exported.values())
    assert exported.keys() == random_tensors(cls.name, learner.shape).keys()


@BOTH
def test_heads_some_at_a_time_are_all_heads_at_once(cls: type[Policy], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, learner = blocks(), made(cls)
    features = learner.features(tiny_model(), tokens)
    found = []
    for size in (2**27, 2 * LENGTH * 32 * 3, 1):
        monkeypatch.setattr("evictbench.policies.kvpop.learner.ELEMENTS_AT_ONCE", size)
        learner.zero_grad()
        losses = learner.loss(batch(learner, tokens, features=features))
        losses.total.backward()
        found.append([losses.total.detach(), *(parameter.grad for parameter in learner.parameters())])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-6, rtol=1e-5)


@BOTH
def test_inputs_are_standardised_by_the_texts(cls: type[Policy]) -> None:
    learner = made(cls)
    samples = [learner.features(tiny_model(), block[None]) for block in blocks(3)]
    learner.measure(iter(samples))
    seen = [
        learner.scorer.standardise(*(sample[name].flatten(1, 2).float() for name in ("keys", "values")))
        for sample in samples
    ]
    z = torch.cat(seen)
    torch.testing.assert_close(z.mean((0, 2)), torch.zeros_like(z[0, :, 0]), atol=1e-3, rtol=0)
    torch.testing.assert_close(z.square().mean((0, 2)), torch.ones_like(z[0, :, 0]), atol=1e-2, rtol=0)


@BOTH
def test_the_students_first_layer_sees_what_the_cache_holds(cls: type[Policy]) -> None:
    """Its keys are the cache's, so that every query sees what a cache with the same weights would show it."""
    model, tokens = tiny_model(), blocks(1)
    learner = made(cls)
    with torch.no_grad():
        learner.scorer.w2 *= 20
    attention = StudentAttention(learner.attention(batch(learner, tokens, model=model)))
    use(model)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False, dense_attention=attention)
    expiry = attention.visible[0].expiry[0]
    policy = cls(cls.Config(sinks=SINKS, window=WINDOW))
    policy.use(Weights(learner.export(), {"variant": policy.variant}, "a learner", "0"), learner.shape)
    cache = new_cache(model, policy, 32, prompt_length=LENGTH)
    for token in tokens[0].tolist():
        position = torch.tensor([[cache.seen[0] if cache.seen else 0]])
        with torch.no_grad():
            model(input_ids=torch.tensor([[token]]), position_ids=position, past_key_values=cache)
        q = cache.seen[0]
        for head, kept in enumerate(cache.kept(0).tolist()):
            assert kept == [t for t in range(q) if expiry[head, t] > q], (head, q)
    assert attention.features() is not None


@pytest.mark.parametrize(("sinks", "window", "pool"), [(0, 1, 1), (4, 8, 10), (2, 3, 30), (1, 50, 2)])
def test_expiry_of_a_whole_text_equals_the_recursion(sinks: int, window: int, pool: int) -> None:
    priority = torch.randint(0, 6, (2, 2, 40), generator=torch.Generator().manual_seed(pool)).float()
    found = sequence_expiry(priority, sinks=sinks, window=window, pool=pool)
    for row in range(2):
        for head in range(2):
            pools = twin.pools_by_recursion(priority[row, head].tolist(), sinks, window, pool)
            for t in range(40):
                lost = [q for q in range(40) if sinks <= t <= q - window and t not in pools[q]]
                expires = int(found[row, head, t])
                assert expires == lost[0] if lost else expires >= 40, (row, head, t)


@BOTH
def test_a_budget_that_protects_everything_is_refused(cls: type[Policy]) -> None:
    charged = cls().charge(ModelShape.of(tiny_model().config)).fixed
    least = SINKS + WINDOW + charged + 1
    assert made(cls, budgets=(least, 64)).pool(least) == 1
    with pytest.raises(UserError, match=f"at least {least} entries"):
        made(cls, budgets=(64, least - 1))
