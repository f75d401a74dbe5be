"""H2O and SnapKV with one kept set for a layer or for the whole model: the twins, and what must hold of any sharing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from twin_comparison import assert_found, check, examples, generate_padded

from evictbench.cache.new_cache import new_cache
from evictbench.errors import UserError
from evictbench.generation.fidelity import Text, evaluate
from evictbench.policies.h2o import H2O
from evictbench.policies.snapkv import SnapKV
from evictbench.policy import Policy, Step
from evictbench.policy.budget import Budget
from twin.cases import Case, cases
from twin.model import dense_forward
from twin.tiny import random_tokens, tiny_model

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (H2O, SnapKV)}
ROUNDING = 1e-6
"""Sums over heads and layers are kept in float32: closer ones may be ordered either way."""


def policy_of(case: Case, cls: type[Policy]) -> Policy:
    return cls(cls.Config(**case.settings))


@pytest.mark.engine
@pytest.mark.parametrize("shares", ["layer", "model"])
@pytest.mark.parametrize("name", POLICIES)
def test_policy_equals_its_twin(name: str, shares: Any) -> None:
    @examples(40)
    @given(case=cases(name, shares=(shares,)))
    def run(case: Case) -> None:
        check(case, policy_of(case, POLICIES[name]), exact=ROUNDING)

    run()


@pytest.mark.parametrize("name", POLICIES)
@examples(12)
@given(data=st.data())
def test_the_twin_shares_what_it_says(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name, shares=("layer", "model")))
    for heads in case.trace().kept.values():
        for layer in range(case.layers):
            whole = case.rule.shares == "model"
            sharing = [kept for (where, _), kept in heads.items() if whole or where == layer]
            assert all(kept == sharing[0] for kept in sharing)


@pytest.mark.parametrize("shares", ["layer", "model"])
def test_h2o_s_first_cut_is_that_of_the_summed_attention(shares: Any) -> None:
    """From one dense forward, without the simulation."""
    model, prompt = tiny_model("qwen3", 3, layers=3, kv_heads=2, groups=3), random_tokens(30, 4)
    probs = dense_forward(model, prompt).probs
    ours = new_cache(model, H2O(H2O.Config(shares=shares)), 13)
    model(input_ids=torch.tensor([prompt]), past_key_values=ours, use_cache=True)
    for layer in range(3):
        whole = torch.stack(probs) if shares == "model" else probs[layer][None]
        received = whole.sum((0, 1, 2))
        heavy = received[:25].argsort(descending=True)[:7]
        # Of 13 places 6 are recent, and the next query takes one of those: the last 5 of 30.
        assert ours.kept(layer).tolist() == [sorted(heavy.tolist()) + list(range(25, 30))]


@pytest.mark.parametrize("name", POLICIES)
def test_a_layer_of_one_head_is_that_head(name: str) -> None:
    model, prompt = tiny_model(layers=2, kv_heads=1, groups=4), random_tokens(40, 2)
    kept = []
    for shares in ("head", "layer"):
        config: dict[str, Any] = {"shares": shares}
        if name == "snapkv":
            config |= {"window": 3, "kernel": 3}
        policy = POLICIES[name](POLICIES[name].Config(**config))
        cache = new_cache(model, policy, 26)
        out = model.generate(torch.tensor([prompt]), past_key_values=cache, max_new_tokens=15, do_sample=False)
        kept.append((out.tolist(), [cache.kept(layer).tolist() for layer in range(2)]))
    assert kept[0] == kept[1]


@pytest.mark.parametrize("shares", ["layer", "model"])
@pytest.mark.parametrize("name", POLICIES)
def test_rows_together_keep_what_each_keeps_alone(name: str, shares: Any) -> None:
    model = tiny_model(kv_heads=2, groups=2)
    texts = [
        Text(row, tuple(random_tokens(24 + 7 * row, row)), tuple(random_tokens(6 + 3 * row, 100 + row)))
        for row in range(5)
    ]
    small = {"window": 4, "kernel": 3} if name == "snapkv" else {}
    policy = POLICIES[name](POLICIES[name].Config(shares=shares, **small))
    alone = evaluate(model, policy, Budget.parse("18"), texts, batch_size=1)
    together = evaluate(model, policy, Budget.parse("18"), texts, batch_size=3, chunk=7)
    for one, other in zip(alone, together, strict=True):
        assert one.metrics["kl"] > 1e-4
        assert [token.kl for token in one.divergence] == pytest.approx(
            [token.kl for token in other.divergence], abs=1e-9
        )


@pytest.mark.parametrize("shares", ["layer", "model"])
@pytest.mark.parametrize("name", POLICIES)
def test_padding_on_the_left_changes_nothing(name: str, shares: Any) -> None:
    model = tiny_model("qwen3", 1, kv_heads=2, groups=2)
    prompts = [random_tokens(length, length) for length in (30, 1, 17)]
    small = {"window": 4, "kernel": 3} if name == "snapkv" else {}

    def answers(some: list[list[int]]) -> list[list[int]]:
        policy = POLICIES[name](POLICIES[name].Config(shares=shares, **small))
        return generate_padded(model, new_cache(model, policy, 18), some)

    assert answers(prompts) == [answers([prompt])[0] for prompt in prompts]


def test_what_is_shared_is_held_once() -> None:
    """Positions and sums of attention, 4 bytes each a slot, and where the next entry goes, 8 bytes."""
    model, held = tiny_model(layers=3, kv_heads=2), []
    for shares, sets in (("head", 6), ("layer", 3), ("model", 1)):
        cache = new_cache(model, H2O(H2O.Config(shares=shares)), 16)  # type: ignore[arg-type]
        model(input_ids=torch.tensor([random_tokens(30)]), past_key_values=cache)
        held.append(cache.nbytes() - sets * (cache.layers[0].capacity * 8 + 8))
    assert held == [held[0]] * 3


@pytest.mark.parametrize("cls", POLICIES.values(), ids=POLICIES)
def test_sharing_with_nobody_known_is_refused(cls: type[Policy]) -> None:
    with pytest.raises(UserError, match=f"{cls.name}: shares is head, layer, model, not 'row'"):
        cls.Config(shares="row")


class FirstHead(H2O):
    """What the layer's first KV head receives decides for all."""

    def observe(self, step: Step) -> None:
        mass = step.signals.mass
        assert mass is not None
        first = torch.zeros_like(mass)
        first[:, 0] = mass[:, 0]
        step.signals.mass = first
        super().observe(step)


class LastLayer(H2O):
    """What the last layer received decides for the model."""

    def observe(self, step: Step) -> None:
        if step.layer == step.shape.layers - 1:
            super().observe(step)


class Forgets(H2O):
    """The last pass's attention instead of the running sum."""

    def observe(self, step: Step) -> None:
        if self.granularity == "layer" or step.layer == 0:
            step.shared["mass"].zero_()
        super().observe(step)


class FirstVoters(SnapKV):
    """Of a layer's votes those of its first KV head."""

    def _votes(self, step: Step) -> Tensor:
        votes = super()._votes(step)
        return torch.cat((votes[:, :1], torch.zeros_like(votes[:, 1:])), dim=1)


class FirstLayer(SnapKV):
    """The first layer votes for the model."""

    def observe(self, step: Step) -> None:
        if step.layer == 0:
            super().observe(step)


class VotesPileUp(SnapKV):
    """Votes of earlier selections count again."""

    def observe(self, step: Step) -> None:
        before = step.shared["votes"].clone()
        super().observe(step)
        if step.layer == 0:
            step.shared["votes"].add_(before)


WRONG: list[tuple[type[Policy], tuple[Any, ...], dict[str, Any]]] = [
    (FirstHead, ("layer", "model"), {}),
    (LastLayer, ("model",), {}),
    (Forgets, ("layer", "model"), {"group": "mean"}),
    (FirstVoters, ("layer", "model"), {}),
    (FirstLayer, ("model",), {}),
    (VotesPileUp, ("model",), {}),
]


@pytest.mark.parametrize(("wrong", "shares", "only"), WRONG, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_policy_is_found(wrong: type[Policy], shares: tuple[Any, ...], only: dict[str, Any]) -> None:
    def compare(case: Case) -> None:
        case = replace(case, rule=replace(case.rule, **only))  # type: ignore[type-var]
        check(case, policy_of(case, wrong), exact=ROUNDING)

    assert_found(compare, given(case=cases(wrong.name, shares=shares)))
