"""DMS through the engine's own loop: texts of different lengths as rows of one batch, hooks set and removed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evictbench.generation.fidelity import Text, evaluate
from evictbench.models.policy_weights import Weights
from evictbench.policies.dms import DMS, Settings
from evictbench.policy import ModelShape
from evictbench.policy.budget import Budget
from twin.dms import sees, separate_marks
from twin.model import dense_forward
from twin.tiny import random_tokens, tiny_model

WINDOW, SINKS = 6, 2


@pytest.fixture
def model() -> Any:
    return tiny_model("qwen3")


@pytest.fixture
def weights(model: Any) -> Weights:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn((2, 2, model.config.hidden_size), generator=generator) * 0.05
    calibration = {"thresholds": [20.0, 0.0, -20.0], "beyond": [0.9, 0.5, 0.1]}
    card = {"window": WINDOW, "sinks": SINKS, "epsilon": 1e-5, "calibration": calibration}
    return Weights({"weight": weight, "bias": torch.full((2, 2), 0.05)}, card, "a test", "0")


def dms(weights: Weights, model: Any, **settings: Any) -> DMS:
    policy = DMS(Settings(**settings))
    policy.use(weights, ModelShape.of(model.config))
    return policy


def texts() -> list[Text]:
    """Prompts and what follows; read in chunks of 17 the last prompt has one token left over."""
    made = []
    for key, (prompt, following) in enumerate([(40, 30), (64, 5), (80, 50), (50, 1), (52, 20)]):
        tokens = tuple(random_tokens(prompt + following, seed=key))
        made.append(Text(key, tokens[:prompt], tokens[prompt:]))
    return made


def test_rows_measure_as_the_twin_says(model: Any, weights: Weights) -> None:
    policy = dms(weights, model)
    measured = evaluate(model, policy, Budget(share=0.5), texts(), batch_size=2, chunk=17)
    for text, found in zip(texts(), measured, strict=True):
        tokens = [*text.prompt, *text.continuation]
        marks = separate_marks(
            model,
            tokens,
            weights.tensors["weight"].double(),
            weights.tensors["bias"].double(),
            threshold=policy.allot(0.5, len(text.prompt)),
            window=WINDOW,
            sinks=SINKS,
            epsilon=1e-5,
        )

        def told(*at: int, marks: dict[Any, bool] = marks) -> bool:
            return marks[at]

        def visible(layer: int, head: int, query: int, told: Any = told) -> list[int]:
            return sees(told, layer, head, query, WINDOW, SINKS)

        logits = dense_forward(model, tokens, visible).logits.log_softmax(-1)
        nll = [-float(logits[position - 1, tokens[position]]) for position in range(len(text.prompt), len(tokens))]
        assert [one.nll for one in found.divergence] == pytest.approx(nll, abs=1e-4)
        counts = [
            [len(visible(layer, head, query)) for layer in range(2) for head in range(2)]
            for query in range(len(text.prompt), len(tokens) - 1)
        ]
        assert found.occupancy_max == max(map(max, counts), default=0)
        mean = sum(sum(heads) / 4 for heads in counts) / len(counts) if counts else 0
        assert found.occupancy_mean == pytest.approx(mean)
        assert (found.cache_bytes > 0) == bool(counts)


def test_a_budget_of_everything_is_the_full_cache(model: Any, weights: Weights) -> None:
    for budget in (Budget(share=1.0), Budget(tokens=80)):
        for found in evaluate(model, dms(weights, model), budget, texts(), batch_size=3, chunk=17):
            assert found.metrics["kl"] < 1e-9
    cut = evaluate(model, dms(weights, model), Budget(share=0.5), texts(), batch_size=3, chunk=17)
    assert all(found.metrics["kl"] > 1e-5 for found in cut)


def test_no_hook_is_left_behind(model: Any, weights: Weights) -> None:
    def hooks() -> list[int]:
        return [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]

    before = hooks()
    evaluate(model, dms(weights, model), Budget(share=0.5), texts()[:1], chunk=17)
    assert hooks() == before


def test_rows_take_the_bytes_of_their_pages(model: Any, weights: Weights) -> None:
    long, short = random_tokens(200, 1), random_tokens(50, 2)
    both = [Text(0, tuple(long[:190]), tuple(long[190:])), Text(1, tuple(short[:40]), tuple(short[40:]))]
    first, second = evaluate(model, dms(weights, model), Budget(share=1.0), both, batch_size=2, chunk=64)
    assert first.cache_bytes > 3 * second.cache_bytes
