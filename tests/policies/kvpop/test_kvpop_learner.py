"""The trainable side: features as defined, gradients where they belong, a student that sees what the cache holds."""

from __future__ import annotations

from itertools import product
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
from evictbench.policies.kvpop.features import label_name
from evictbench.policies.kvpop.learner import ScorerLearner
from evictbench.policies.kvpop.ranking import sequence_expiry
from evictbench.policy import ModelShape, Policy
from evictbench.policy.budget import Budget
from evictbench.policy.future_attention import LABELS, Label
from evictbench.policy.learner import Batch, Training, Visible
from evictbench.train.sparse_attention import StudentAttention
from twin import dense_forward, tiny_model
from twin import future as future_twin
from twin import kvpop as twin
from twin.model import DenseModel
from twin.tiny import random_tokens

BOTH = pytest.mark.parametrize("cls", [KVpop, KVpopMLP])
SINKS, WINDOW, LENGTH = 2, 4, 48


def training(model: Any, budgets: tuple[int, ...] = (32,), recent: float = 0.0) -> Training:
    return Training(
        window=WINDOW,
        budgets=budgets,
        length=LENGTH,
        steps=1,
        seed=0,
        recipe=KVpop.Recipe(hidden=8, sinks=SINKS, recent=recent),
        model=model.config,
    )


def made(
    cls: type[Policy], label: str = "mean", budgets: tuple[int, ...] = (32,), recent: float = 0.0
) -> ScorerLearner:
    model = tiny_model()
    torch.manual_seed(0)
    policy = cls(cls.Config(label=label))
    found = policy.learner(ModelShape.of(model.config), training(model, budgets, recent))
    assert isinstance(found, ScorerLearner)
    return found


def batch(learner: ScorerLearner, tokens: Tensor, **more: Any) -> Batch:
    return Batch(tokens=tokens, step=0, steps=1, budget=32, window=WINDOW, generator=torch.Generator(), **more)


def blocks(rows: int = 2) -> Tensor:
    return torch.tensor([random_tokens(LENGTH, seed) for seed in range(rows)])


def test_features_are_what_the_definition_says() -> None:
    model, tokens = tiny_model(), blocks()
    learner = made(KVpop, budgets=(24, 40), recent=0.5)
    assert learner.windows == (8, 16)  # half of what is left beside the memory
    found = learner.features(model, tokens)
    dense = DenseModel(model)
    for row, text in enumerate(tokens.tolist()):
        run = dense_forward(model, text)
        for layer in range(dense.layers):
            keys = dense.rotate(run.keys[layer], [-t for t in range(LENGTH)]).transpose(0, 1)
            values = run.values[layer].transpose(0, 1)
            torch.testing.assert_close(found["keys"][row, layer].double(), keys, atol=2e-3, rtol=1e-3)
            torch.testing.assert_close(found["values"][row, layer].double(), values, atol=2e-3, rtol=1e-3)
            for label, window in product(LABELS, learner.windows):
                wanted = future_twin.future_labels(
                    run.queries[layer].transpose(0, 1),
                    run.keys[layer].transpose(0, 1),
                    window=window,
                    scaling=model.model.layers[layer].self_attn.scaling,
                    label=label,
                    eps=1e-9,
                )
                recorded = found[label_name(label, window)][row, layer]
                torch.testing.assert_close(recorded.double(), wanted, atol=1e-2, rtol=1e-3)


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
    assert exported.keys() == random_tensors(cls.name, learner.shape, normed=True).keys()


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


def trained_policy(cls: type[Policy], learner: ScorerLearner, **settings: Any) -> Policy:
    """A policy with what the learner saves."""
    policy = cls(cls.Config(**settings))
    policy.use(
        Weights(learner.export(), {"variant": policy.variant, **learner.card()}, "a learner", "0"), learner.shape
    )
    return policy


@BOTH
@pytest.mark.parametrize("recent", [0.0, 0.5])
def test_the_students_first_layer_sees_what_the_cache_holds(cls: type[Policy], recent: float) -> None:
    """Its keys are the cache's, so that every query sees what a cache with the same weights would show it."""
    model, tokens = tiny_model(), blocks(1)
    learner = made(cls, recent=recent)
    with torch.no_grad():
        learner.scorer.w2 *= 20
    attention = StudentAttention(learner.attention(batch(learner, tokens, model=model)))
    use(model)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False, dense_attention=attention)
    expiry = attention.visible[0].expiry[0]
    cache = new_cache(model, trained_policy(cls, learner), 32, prompt_length=LENGTH)
    for token in tokens[0].tolist():
        position = torch.tensor([[cache.seen[0] if cache.seen else 0]])
        with torch.no_grad():
            model(input_ids=torch.tensor([[token]]), position_ids=position, past_key_values=cache)
        q = cache.seen[0]
        for head, kept in enumerate(cache.kept(0).tolist()):
            assert kept == [t for t in range(q) if expiry[head, t] > q], (head, q)
    assert attention.features() is not None


@BOTH
def test_training_and_use_protect_the_same(cls: type[Policy]) -> None:
    budgets = (24, 32, 40, 64)
    learner = made(cls, budgets=budgets, recent=0.5)
    policy = trained_policy(cls, learner)
    charged = policy.charge(learner.shape).fixed
    for budget in budgets:
        cut = learner.cut(budget)
        assert cut["window"] == policy.recent(budget - charged) == (budget - charged) // 2
        assert sum(cut.values()) == budget - charged
        assert not list(policy.doubts(Budget(budget)))
    assert learner.card()["protected"] == {str(budget): (budget - charged) // 2 for budget in budgets}


@BOTH
def test_a_use_that_was_not_trained_is_told(cls: type[Policy]) -> None:
    learner = made(cls, recent=0.5)
    charged = learner.charged
    other = trained_policy(cls, learner, recent=0.0)
    (sentence,) = other.doubts(Budget(32 + charged))
    assert sentence == (
        f"{cls.name} protects the last 4 positions at {32 + charged} entries, and its weights were trained for 16."
    )
    (sentence,) = other.doubts(Budget(share=0.5))
    assert "a window of 4, and its weights were trained for a window of 4, and 50% of the entries" in sentence
    # Weights of before the share was trained with say nothing of it: what they count is the window.
    policy = cls()
    older = {"settings": {"sinks": 4, "window": 4, "recent": 0.5}, "variant": policy.variant}
    policy.use(Weights(learner.export(), older, "before", "0"), learner.shape)
    (sentence,) = policy.doubts(Budget(32 + charged))
    assert "protects the last 16 positions" in sentence
    assert "trained for 4." in sentence


def test_a_delay_that_would_change_with_the_text_is_refused() -> None:
    learner = made(KVpop, recent=0.5)
    with pytest.raises(UserError, match=r"leaves the 50% of the entries.*give a number of entries, or recent=0\.$"):
        new_cache(tiny_model(), trained_policy(KVpop, learner), "50%", prompt_length=LENGTH)
    new_cache(tiny_model(), trained_policy(KVpop, learner, recent=0.0), "50%", prompt_length=LENGTH)
    new_cache(tiny_model(), trained_policy(KVpopMLP, made(KVpopMLP, recent=0.5)), "50%", prompt_length=LENGTH)


@pytest.mark.parametrize(("setting", "option"), [("window", "--window"), ("recent", "--recipe recent")])
def test_two_answers_to_what_is_protected_are_refused(setting: str, option: str) -> None:
    model = tiny_model()
    policy = KVpop(KVpop.Config(**{setting: 0.75 if setting == "recent" else 9}))
    with pytest.raises(UserError, match=f"say {option}="):
        policy.learner(ModelShape.of(model.config), training(model))


@BOTH
@pytest.mark.parametrize("label", LABELS)
def test_labels_of_fine_tuning_have_the_sparse_normalisers(cls: type[Policy], label: Label) -> None:
    """Each layer's labels against their definition, by what the pass itself computed and showed."""
    model, tokens = tiny_model(), blocks(1)
    learner = made(cls, label, recent=0.5)
    with torch.no_grad():
        learner.scorer.w2 *= 20
    window = learner.cut(32)["window"]
    sparse = learner.attention(batch(learner, tokens, model=model))
    seen: list[tuple[Tensor, Tensor, float, Visible]] = []

    class Watched(StudentAttention):
        def __call__(
            self, layer: int, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float
        ) -> Tensor:
            output = super().__call__(layer, module, query, key, value, scaling)
            seen.append((query[0], key[0], scaling, self.visible[layer]))
            return output

    use(model)
    attention = Watched(sparse)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False, dense_attention=attention)
    found = attention.features()
    assert found is not None
    assert len(seen) == learner.shape.layers
    for layer, (query, key, scaling, visible) in enumerate(seen):
        logits = future_twin.causal_logits(query, key, scaling)
        group = query.shape[0] // key.shape[0]
        hidden = 0
        for head in range(query.shape[0]):
            for u in range(LENGTH):
                for t in range(u):
                    if u >= visible.expiry[0, head // group, t]:
                        logits[head, u, t] = -torch.inf
                        hidden += 1
        assert hidden
        expected = future_twin.future_labels(
            query, key, window=window, scaling=scaling, label=label, eps=1e-9, given=logits.logsumexp(-1)
        )
        torch.testing.assert_close(found[label_name(label, window)][0, layer].double(), expected, atol=1e-4, rtol=1e-4)
        dense = future_twin.future_labels(query, key, window=window, scaling=scaling, label=label, eps=1e-9)
        assert (expected - dense).abs().max() > 0.01


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
    assert made(cls, budgets=(least, 64)).cut(least)["pool"] == 1
    with pytest.raises(UserError, match=f"at least {least} entries"):
        made(cls, budgets=(64, least - 1))
