"""DMS's training: its mask, its loss and its calibration against explicit loops, and where gradients go."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from evictbench.cache import attention
from evictbench.errors import UserError
from evictbench.policies.dms import calibration
from evictbench.policies.dms.gate import SeparateGate
from evictbench.policies.dms.learner import DMSLearner, noise
from evictbench.policies.dms.recipe import Recipe
from evictbench.policy import ModelShape
from evictbench.policy.learner import Batch, Training
from evictbench.train.distillation import divergence
from evictbench.train.sparse_attention import attend_visible

WINDOW, LENGTH, SINKS = 5, 24, 2


@pytest.fixture
def model(tiny_llama: Any) -> Any:
    model = tiny_llama(dtype="float64").requires_grad_(False)
    attention.use(model)
    return model


def tokens(seed: int = 0, length: int = LENGTH) -> Tensor:
    return torch.randint(97, (1, length), generator=torch.Generator().manual_seed(seed))


def make(model: Any, *, trained: bool = False, **recipe: Any) -> DMSLearner:
    """A learner in float64; trained: with weights that decide either way."""
    settings = Training(
        window=WINDOW,
        budgets=(16,),
        length=LENGTH,
        steps=10,
        seed=0,
        recipe=Recipe(**{"sinks": SINKS, "ratio": 4.0} | recipe),
        model=model.config,
    )
    learner = DMSLearner(ModelShape.of(model.config), settings).double()
    learner.begin(model, [tokens(100), tokens(101)])
    if trained:
        with torch.no_grad():
            learner.weight.copy_(0.02 * torch.randn(learner.weight.shape, generator=torch.Generator().manual_seed(1)))
            learner.bias.fill_(0.05 / 8)
    return learner


def batch(model: Any, step: int = 0, text: Tensor | None = None, seed: int | None = None) -> Batch:
    return Batch(
        tokens=tokens() if text is None else text,
        step=step,
        steps=10,
        budget=16,
        window=WINDOW,
        generator=torch.Generator().manual_seed(step if seed is None else seed),
        model=model,
    )


# The mask.


def test_soft_mask_against_loops(model: Any) -> None:
    """No penalty up to the window and for sinks; beyond, the log-probability that the next token's decision is no."""
    learner = make(model)
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(1, heads, LENGTH, 16, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    z = torch.randn(1, 2, LENGTH, generator=generator, dtype=torch.float64) * 3
    output = attend_visible(query, key, value, learner.soft_mask(torch.nn.functional.logsigmoid(-z)), 0.25)
    for head in range(4):
        for i in range(LENGTH):
            logits = []
            for j in range(i + 1):
                logit = 0.25 * float(query[0, head, i] @ key[0, head // 2, j])
                if i - j > WINDOW and j >= SINKS:
                    logit -= math.log1p(math.exp(float(z[0, head // 2, j])))
                logits.append(logit)
            weights = torch.tensor(logits, dtype=torch.float64).softmax(-1)
            torch.testing.assert_close(output[0, head, i], weights @ value[0, head // 2, : i + 1])


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_decisions_are_the_next_tokens_with_noise_over_temperature(model: Any, scale: float) -> None:
    learner = make(model, trained=True, temperature=0.5, noise=scale)
    hidden = torch.randn(1, LENGTH, 64, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    soft, share = learner.decisions(1, hidden, seed=11)
    soft, z, drawn = soft.detach(), learner.folded().logits(1, hidden), noise(11, 1, soft)
    for head in range(2):
        closed = []
        for t in range(LENGTH):
            governs = float(z[0, head, t + 1]) if t + 1 < LENGTH else 0.0
            assert float(soft[0, head, t]) == pytest.approx(
                (governs + scale * float(drawn[0, head, t])) / 0.5, abs=1e-6
            )
            if t >= SINKS and any(i - t > WINDOW for i in range(LENGTH)):
                closed.append(float(soft[0, head, t]) > 0)
        assert 0 < sum(closed) < len(closed)
    counted = [
        float(soft[0, head, t]) > 0 for head in range(2) for t in range(SINKS, LENGTH) if LENGTH - 1 - t > WINDOW
    ]
    assert share.item() == pytest.approx(sum(counted) / len(counted))


# The loss.


def test_the_divergence_against_whole_logits_in_both_directions(model: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    teacher, student = (torch.randn(2, 150, 64, generator=generator, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    head = model.get_output_embeddings()
    for direction in ("forward", "reverse"):
        found = divergence(model, teacher, student, direction)
        (slope,) = torch.autograd.grad(found, student)
        p, q = head(teacher).log_softmax(-1), head(student).log_softmax(-1)
        p, q = (p, q) if direction == "forward" else (q, p)
        expected = (p.exp() * (p - q)).sum(-1).mean()
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(slope, torch.autograd.grad(expected, student)[0], rtol=1e-6, atol=1e-9)


def test_the_whole_loss_against_a_pass_with_explicit_masks(model: Any) -> None:
    """The divergence of a student whose attention is written out, layer by layer, head by head."""
    learner = make(model, trained=True)
    losses = learner.loss(batch(model, step=4))
    seed = int(torch.randint(2**48, (1,), generator=torch.Generator().manual_seed(4)))
    inputs: dict[int, Tensor] = {}
    shares = []

    def attend(layer: int, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        z = learner.folded().logits(layer, inputs[layer])
        soft = (torch.cat([z[..., 1:], torch.zeros(1, 2, 1)], dim=-1) + noise(seed, layer, z)) / 0.1
        shares.append((soft[..., SINKS : LENGTH - 1 - WINDOW] > 0).double().mean())
        output = torch.zeros_like(query)
        for head in range(4):
            for i in range(LENGTH):
                logits = query[0, head, i] @ key[0, head // 2, : i + 1].T * scaling
                for j in range(SINKS, i - WINDOW):
                    logits[j] += torch.nn.functional.logsigmoid(-soft[0, head // 2, j])
                output[0, head, i] = logits.softmax(-1) @ value[0, head // 2, : i + 1]
        return output

    from evictbench.cache.hooks import hooked

    with torch.no_grad(), hooked(model, {"residual"}, lambda layer, name, hidden: inputs.__setitem__(layer, hidden)):
        student = model(input_ids=tokens(), use_cache=False, dense_attention=attend).logits
    teacher = model(input_ids=tokens(), use_cache=False).logits
    reached = SINKS + WINDOW + 1
    p, q = (logits[0, reached:].log_softmax(-1) for logits in (teacher, student))
    kl, share = float((p.exp() * (p - q)).sum(-1).mean()), float(torch.stack(shares).mean())
    target = 1 - 1 / (1 + 3 * (5 / 8))
    assert torch.equal(teacher[0, :reached].argmax(-1), student[0, :reached].argmax(-1))
    assert losses.parts["kl"] == pytest.approx(kl, rel=1e-4)
    assert losses.parts["closed"] == pytest.approx(share, rel=1e-6)
    assert losses.parts["target"] == pytest.approx(target)
    assert float(losses.total.detach()) == pytest.approx(kl + max(0.0, target - share), rel=1e-4)


def test_compression_is_one_sided(model: Any) -> None:
    """More closed than asked for costs nothing and pulls nothing; less pulls every gate towards closing."""
    open_gate, closed_gate = make(model), make(model)
    with torch.no_grad():
        closed_gate.bias.fill_(0.15 / 8)
    short, beyond = open_gate.loss(batch(model, step=9)), closed_gate.loss(batch(model, step=9))
    assert short.parts["closed"] < short.parts["target"] < beyond.parts["closed"]
    assert short.parts["compression"] == pytest.approx(short.parts["target"] - short.parts["closed"])
    assert beyond.parts["compression"] == 0
    assert float(beyond.total.detach()) == pytest.approx(beyond.parts["kl"])
    short.total.backward()
    assert open_gate.bias.grad is not None
    assert (open_gate.bias.grad < 0).all()


def test_the_target_rises_with_the_ratio_and_stays() -> None:
    recipe = Recipe(ratio=8, ramp=0.5)
    assert recipe.target(0, 100) == pytest.approx(1 - 1 / (1 + 7 / 50))
    assert recipe.target(49, 100) == recipe.target(99, 100) == pytest.approx(7 / 8)
    ratios = [1 / (1 - recipe.target(step, 100)) for step in range(50)]
    steps = [later - earlier for earlier, later in itertools.pairwise(ratios)]
    assert all(step == pytest.approx(7 / 50) for step in steps)


# Gradients and noise.


@pytest.mark.parametrize("again", [False, True])
def test_gradients_reach_the_gate_and_nothing_else(model: Any, monkeypatch: Any, again: bool) -> None:
    """Kept or computed again in the backward pass, layer by layer."""
    learner, plain = make(model, trained=True), make(model, trained=True)
    plain.loss(batch(model, step=9)).total.backward()
    calls = []
    norm = model.model.layers[1].input_layernorm
    norm.register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr("evictbench.policies.dms.learner.KEPT_TOKENS", 0 if again else LENGTH)
    losses = learner.loss(batch(model, step=9))
    assert len(calls) == 2  # teacher and student
    losses.total.backward()
    assert len(calls) == 2 + again
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, parameter in learner.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad.flatten(1).abs().amax(1) > 0).all(), name
        expected = dict(plain.named_parameters())[name].grad
        assert expected is not None
        torch.testing.assert_close(parameter.grad, expected)
    assert learner.centre.grad is None


def test_gradient_of_the_divergence_by_differences(model: Any) -> None:
    """At a soft temperature, so that differences can follow it; the target is met, so that nothing else pulls."""
    learner = make(model, trained=True, temperature=20.0, ratio=1.0)
    learner.loss(batch(model)).total.backward()
    assert learner.weight.grad is not None
    for at in [(0, 0, 3), (0, 1, 60), (1, 1, 17)]:
        values = []
        for step in (1e-3, -1e-3):
            with torch.no_grad():
                learner.weight[at] += step
                values.append(_exact(learner, model))
                learner.weight[at] -= step
        assert float(learner.weight.grad[at]) == pytest.approx((values[0] - values[1]) / 2e-3, rel=2e-3)


def _exact(learner: DMSLearner, model: Any) -> float:
    """The divergence in float64, which `loss` reports in float32."""
    import evictbench.policies.dms.learner as module

    kept: list[tuple[Tensor, Tensor]] = []

    def spy(model: Any, teacher: Tensor, student: Tensor, direction: Any) -> Tensor:
        kept.append((teacher, student))
        return divergence(model, teacher, student, direction)

    vars(module)["divergence"] = spy
    try:
        learner.loss(batch(model))
    finally:
        vars(module)["divergence"] = divergence
    head = model.get_output_embeddings()
    p, q = (head(states).log_softmax(-1) for states in kept[0])
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_noise_is_logistic_and_drawn_from_the_seed(model: Any) -> None:
    like = torch.zeros(1, 4, 20_000, dtype=torch.float64)
    drawn = noise(5, 3, like)
    assert torch.equal(drawn, noise(5, 3, like))
    assert torch.equal(drawn.float(), noise(5, 3, like.float()))
    assert not torch.equal(drawn, noise(5, 4, like))
    assert not torch.equal(drawn, noise(6, 3, like))
    for at in (-3.0, 0.0, 1.5):
        assert float((drawn < at).double().mean()) == pytest.approx(1 / (1 + math.exp(-at)), abs=0.006)
    learner = make(model, trained=True)
    first, again, other = (learner.loss(batch(model, seed=seed)) for seed in (1, 1, 2))
    assert first.parts == again.parts
    assert first.parts["closed"] != other.parts["closed"]


# What is saved, and the calibration.


def test_standardised_inputs_and_the_folded_gate(model: Any) -> None:
    learner = make(model, trained=True)
    states: dict[int, list[Tensor]] = {}
    for seed in (100, 101):
        hidden = model(input_ids=tokens(seed), use_cache=False, output_hidden_states=True).hidden_states
        for layer in range(2):
            normed = hidden[layer] / (hidden[layer].pow(2).mean(-1, keepdim=True) + learner.epsilon).sqrt()
            states.setdefault(layer, []).append(normed[0, SINKS:])
            torch.testing.assert_close(
                learner.folded().logits(layer, hidden[layer]), learner.logits(layer, hidden[layer])
            )
    for layer, parts in states.items():
        standard = (torch.cat(parts) - learner.centre[layer]) * learner.scale[layer]
        torch.testing.assert_close(standard.mean(0), torch.zeros(64).double(), atol=1e-6, rtol=0)
        torch.testing.assert_close(standard.std(0, correction=0), torch.ones(64).double(), atol=1e-5, rtol=0)
    saved = learner.export()
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {"weight": (2, 2, 64), "bias": (2, 2)}


def test_calibration_against_loops(model: Any) -> None:
    learner = make(model, trained=True)
    texts = [tokens(1), tokens(2)]
    table = learner.calibrate(model, texts)
    assert table["thresholds"] == sorted(table["thresholds"], reverse=True)
    assert len(set(table["beyond"])) > 5
    gate = learner.folded()
    for place in (1, len(table["thresholds"]) // 2, len(table["thresholds"]) - 1):
        found = [_seen(model, gate, text, table["thresholds"][place]) for text in texts]
        shares, beyond, kl = (sum(column) / len(column) for column in zip(*found, strict=True))
        assert table["shares"][place] == pytest.approx(shares, abs=1e-4)
        assert table["beyond"][place] == pytest.approx(beyond, abs=1e-4)
        assert table["kl"][place] == pytest.approx(kl, abs=1e-5)


def _seen(model: Any, gate: SeparateGate, text: Tensor, threshold: float) -> tuple[float, float, float]:
    """Share seen by the queries of the second half, share kept beyond the window, and divergence there."""
    from evictbench.cache.hooks import hooked

    inputs: dict[int, Tensor] = {}
    shares: list[float] = []
    beyond: list[bool] = []

    def attend(layer: int, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        z = gate.logits(layer, inputs[layer])[0]
        output = torch.zeros_like(query)
        for head in range(4):
            marked = [t >= SINKS and t + 1 < LENGTH and float(z[head // 2, t + 1]) > threshold for t in range(LENGTH)]
            for i in range(LENGTH):
                seen = [j for j in range(i + 1) if not (marked[j] and i - j > WINDOW)]
                weights = (query[0, head, i] @ key[0, head // 2, seen].T * scaling).softmax(-1)
                output[0, head, i] = weights @ value[0, head // 2, seen]
                if i >= LENGTH // 2 and head % 2 == 0:
                    shares.append(len(seen) / (i + 1))
            if head % 2 == 0:
                beyond.extend(not marked[t] for t in range(SINKS, LENGTH) if LENGTH - 1 - t > WINDOW)
        return output

    with torch.no_grad(), hooked(model, {"residual"}, lambda layer, name, hidden: inputs.__setitem__(layer, hidden)):
        student = model(input_ids=text, use_cache=False, dense_attention=attend).logits
        teacher = model(input_ids=text, use_cache=False).logits
    p, q = (logits[0, LENGTH // 2 :].log_softmax(-1) for logits in (teacher, student))
    return sum(shares) / len(shares), sum(beyond) / len(beyond), float((p.exp() * (p - q)).sum(-1).mean())


def test_the_table_can_fail(model: Any) -> None:
    """A gate whose decisions govern their own token comes to other shares."""
    learner = make(model, trained=True)
    right = learner.calibrate(model, [tokens(1)])
    original = calibration.gate.governing
    calibration.gate.governing = lambda z: z  # type: ignore[assignment]
    try:
        wrong = learner.calibrate(model, [tokens(1)])
    finally:
        calibration.gate.governing = original
    assert right["kl"] != wrong["kl"]


# Bad input.


def test_texts_within_the_window_and_impossible_recipes_are_refused(model: Any) -> None:
    with pytest.raises(UserError, match="more than 8 tokens"):
        make(model).loss(batch(model, text=tokens(length=SINKS + WINDOW + 1)))
    for wrong in ({"ratio": 0.5}, {"ramp": 0.0}, {"ramp": 1.5}, {"temperature": 0.0}, {"noise": 0}, {"sinks": -1}):
        with pytest.raises(UserError, match="DMS trains"):
            Recipe(**wrong)  # type: ignore[arg-type]
