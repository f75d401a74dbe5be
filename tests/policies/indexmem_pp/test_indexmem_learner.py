"""IndexMem++'s training: its loss against a pass written out, where gradients go, trainings of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugin_fixtures import SITE
from torch import Tensor, nn
from trainings import TrainingWatcher, break_off, write_texts

from evictbench.cache import attention
from evictbench.cache.hooks import hooked
from evictbench.errors import UserError
from evictbench.models import policy_weights
from evictbench.policies.indexmem_pp import IndexMem
from evictbench.policies.indexmem_pp.learner import IndexMemLearner
from evictbench.policies.indexmem_pp.recipe import Recipe
from evictbench.policies.indexmem_pp.scorer import scorers
from evictbench.policy import ModelShape
from evictbench.policy.learner import Batch, Training
from evictbench.train.run import Outcome, train
from evictbench.train.settings import TrainSettings

SINKS, WINDOW, BETA, LENGTH = 2, 5, 4, 28
FIRST = SINKS + WINDOW + BETA


@pytest.fixture
def model(tiny_llama: Any) -> Any:
    model = tiny_llama(dtype="float64").requires_grad_(False)
    attention.use(model)
    return model


def make(model: Any, length: int = LENGTH, **recipe: Any) -> IndexMemLearner:
    """A learner in float64 whose every parameter matters."""
    training = Training(
        window=WINDOW,
        budgets=(16,),
        length=length,
        steps=10,
        seed=0,
        recipe=Recipe(**{"sinks": SINKS, "beta": float(BETA), "width": 8} | recipe),
        model=model.config,
    )
    torch.manual_seed(3)
    learner = IndexMemLearner(ModelShape.of(model.config), training).double()
    with torch.no_grad():
        for scorer in learner.scorers:
            scorer.to_score.weight.mul_(3)
            scorer.to_rate.weight.add_(torch.randn(scorer.to_rate.weight.shape))
            scorer.to_rate.bias.add_(4_000)  # so that it matters within a short text
            scorer.gate_scale.mul_(1.3)
    return learner


def tokens(length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(97, (1, length), generator=torch.Generator().manual_seed(seed))


def batch(model: Any, text: Tensor | None = None) -> Batch:
    return Batch(
        tokens=tokens() if text is None else text,
        step=0,
        steps=10,
        budget=16,
        window=WINDOW,
        generator=torch.Generator(),
        model=model,
    )


def written_out(learner: IndexMemLearner, model: Any, text: Tensor, plain: bool = False) -> tuple[Tensor, list[float]]:
    """The student's logits with every factor of every key computed by itself, and the shares of the mass that is
    shared, query by query."""
    inputs: dict[int, Tensor] = {}
    shares: list[float] = []

    def attend(layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        scorer = learner.scorers[layer]
        score, rate = scorer(inputs[layer])
        output = torch.zeros_like(query)
        for head in range(query.shape[1]):
            group = head // 2
            for i in range(query.shape[2]):
                ages = torch.arange(i, -1, -1, dtype=torch.float64)
                scores = scorer.gate_scale * (score[0, group, : i + 1] + rate[0, group, : i + 1] * ages / 16384)
                ours = [j for j in range(SINKS, i + 1) if i - j >= WINDOW]
                log_gate = torch.zeros(i + 1, dtype=torch.float64)
                if plain:
                    log_gate = scores
                elif len(ours) > BETA:
                    log_gate[ours] = (BETA * scores[ours].exp() / scores[ours].exp().sum()).log()
                logits = query[0, head, i] @ key[0, group, : i + 1].T * scaling + log_gate
                probs = logits.softmax(-1)
                if len(ours) > BETA:
                    shares.append(float(probs[ours].sum().detach()))
                output[0, head, i] = probs @ value[0, group, : i + 1]
        return output

    def take(layer: int, name: str, hidden: Tensor) -> None:
        inputs[layer] = hidden

    with torch.no_grad(), hooked(model, {"normed_hidden"}, take):
        return model(input_ids=text, use_cache=False, dense_attention=attend).logits, shares


# The loss.


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_the_whole_loss_against_a_pass_written_out(model: Any, divergence: str, plain: bool) -> None:
    """The scorers read the student's own hidden states: the second layer's depend on the first layer's gate."""
    learner = make(model, divergence=divergence, gate="plain" if plain else "mass")
    losses = learner.loss(batch(model))
    student, shares = written_out(learner, model, tokens(), plain)
    teacher = model(input_ids=tokens(), use_cache=False).logits
    first = 0 if plain else FIRST
    q, p = (logits[0].log_softmax(-1) for logits in (student, teacher))
    if divergence == "forward":
        p, q = q, p
    kl = (q.exp() * (q - p)).sum(-1)
    assert kl[first:].mean() > 1e-3
    torch.testing.assert_close(kl[:first], torch.zeros_like(kl[:first]), atol=1e-12, rtol=0)
    assert losses.parts["kl"] == pytest.approx(float(kl[first:].mean()), rel=1e-5)
    assert float(losses.total.detach()) == losses.parts["kl"]
    if not plain:
        assert losses.parts["gated"] == pytest.approx(sum(shares) / len(shares), rel=1e-6)


def test_several_texts_are_a_mean(model: Any) -> None:
    learner = make(model)
    both = learner.loss(batch(model, torch.cat([tokens(seed=1), tokens(seed=2)]))).parts
    each = [learner.loss(batch(model, tokens(seed=seed))).parts for seed in (1, 2)]
    for name in ("kl", "gated"):
        assert both[name] == pytest.approx((each[0][name] + each[1][name]) / 2, rel=1e-5)


def test_a_short_text_teaches_nothing_and_a_short_length_is_refused(model: Any) -> None:
    learner = make(model)
    reached, short = (learner.loss(batch(model, tokens(length))) for length in (FIRST + 1, FIRST))
    assert reached.total.requires_grad
    assert not short.total.requires_grad
    assert float(short.total) == 0
    with pytest.raises(UserError, match=f"trains on texts of more than {FIRST} tokens .* and --length is {FIRST}"):
        make(model, length=FIRST)


def test_a_model_that_scales_its_logits_is_refused(model: Any) -> None:
    learner = make(model)
    learner.begin(model, [])

    def twice(module: nn.Module, given: Any, output: Any) -> Any:
        output.logits = output.logits * 2
        return output

    model.register_forward_hook(twice)
    with pytest.raises(UserError, match="scales its logits behind the output head"):
        learner.begin(model, [])


@pytest.mark.parametrize("changes", [{"beta": 0.5}, {"width": 0}, {"sinks": -1}, {"centroids": -1}])
def test_a_recipe_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="indexmem_pp trains with"):
        Recipe(**changes)


# Gradients.


@pytest.mark.parametrize("again", [False, True])
def test_gradients_reach_the_scorers_and_nothing_else(model: Any, monkeypatch: Any, again: bool) -> None:
    """Kept or computed again in the backward pass, layer by layer."""
    learner, plain = make(model), make(model)
    plain.loss(batch(model)).total.backward()
    calls = []
    model.model.layers[1].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr("evictbench.policies.indexmem_pp.learner.KEPT_TOKENS", 0 if again else LENGTH)
    losses = learner.loss(batch(model))
    assert len(calls) == 2  # teacher and student
    losses.total.backward()
    assert len(calls) == 2 + again
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, parameter in learner.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 1e-12, name
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


def test_gradients_by_differences(model: Any) -> None:
    """Through the gate, and through the hidden states that the later layer's scorer reads. The model's norms are in
    float32: steps are wide enough for that."""
    learner = make(model)
    learner.loss(batch(model)).total.backward()
    teacher = model(input_ids=tokens(), use_cache=False).logits[0, FIRST:].log_softmax(-1)

    def exact() -> float:
        student = written_out(learner, model, tokens())[0][0, FIRST:].log_softmax(-1)
        return float((student.exp() * (student - teacher)).sum(-1).mean())

    for layer in (0, 1):
        scorer = learner.scorers[layer]
        for parameter, step in (
            (scorer.narrow.weight, 1e-3),
            (scorer.to_score.weight, 1e-3),
            (scorer.to_rate.bias, 30.0),
            (scorer.gate_scale, 1e-3),
        ):
            assert parameter.grad is not None
            at = int(parameter.grad.abs().argmax())
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter.view(-1)[at] += sign * step
                    values.append(exact())
                    parameter.view(-1)[at] -= sign * step
            assert float(parameter.grad.view(-1)[at]) == pytest.approx((values[0] - values[1]) / (2 * step), rel=3e-3)


# Whole trainings.


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: 2 layers, 4 heads over 2 KV heads of 8, with clear favourites in its attention."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SITE))
        from fake_plugins import make_model

        folder: Path = make_model(tmp_path_factory.mktemp("models") / "tiny", initializer_range=0.3)
    return folder


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl")


@pytest.fixture
def trained(tiny: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("EVICTBENCH_CACHE", str(tmp_path / "cache"))

    def call(**given: Any) -> tuple[Outcome, list[dict[str, Any]]]:
        watch = TrainingWatcher()
        options: dict[str, Any] = {
            "policy": "indexmem_pp",
            "data": (str(texts),),
            "out": tmp_path / "out",
            "model": str(tiny),
            "steps": 6,
            "budget": "24",
            "window": 4,
            "length": 40,
            "held_out": 2,
            "recipe": "beta=4,width=8,sinks=2,centroids=3",
            "save_every": 2,
            "device": "cpu",
        }
        return train(TrainSettings(**options | given), watch), watch.lines

    return call


def test_a_training_learns_and_its_weights_are_the_policys(trained: Any, tiny: Path) -> None:
    """On one text, again and again: what it is asked for falls."""
    outcome, lines = trained(steps=40, lr=1e-2, blocks=1, weights_dtype="float16")
    assert lines[-1]["kl"] < 0.7 * lines[0]["kl"]
    assert {"loss", "kl", "gated", "grad_norm"} <= lines[0].keys()
    assert 0 < lines[0]["gated"] < 1
    card = json.loads((outcome.folder / "config.json").read_text())
    expected = {"sinks": 2, "window": 4, "centroids": 3, "beta": 4.0, "width": 8}
    assert expected.items() <= card["settings"].items()
    config = json.loads((tiny / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (2, 32)
    shape = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=8, hidden_size=32)
    policy = IndexMem()
    found = policy_weights.find(policy, str(outcome.folder), "tiny", lambda: card["base_model"]["sha256"], shape)
    assert {tensor.dtype for tensor in found.tensors.values()} == {torch.float16}
    assert len(scorers(found.tensors, shape)) == 2
    policy.use(found, shape)
    assert (policy.sinks, policy.window) == (2, 4)


def test_a_stopped_training_goes_on_to_the_same_weights(trained: Any, tmp_path: Path) -> None:
    whole, _ = trained(out=tmp_path / "whole", steps=5)
    break_off(lambda: trained(out=tmp_path / "broken", steps=5), step=3)
    broken, lines = trained(out=tmp_path / "broken", steps=5)
    assert [line["step"] for line in lines] == [3, 4, 5]
    first, second = (policy_weights.load(str(outcome.folder)).tensors for outcome in (whole, broken))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_cannot_be_trained_is_a_sentence(trained: Any) -> None:
    with pytest.raises(UserError, match="trains on texts of more than 262 tokens"):
        trained(recipe="sinks=2")
    with pytest.raises(UserError, match="trains its own part alone"):
        trained(finetune=True)
