"""A prompt replayed from a recording is the prompt read by the model: same kept sets, same logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evictbench.generation.runner import ModelRunner
from evictbench.policies.full import Full
from evictbench.policies.h2o import H2O
from evictbench.policies.oracle import Oracle
from evictbench.policies.snapkv import SnapKV
from evictbench.policies.streaming_llm import StreamingLLM
from evictbench.policies.tova import TOVA
from evictbench.policy import Policy
from evictbench.policy.budget import Budget
from studies.replay import FED, DenseRuns, ReplayingRunner
from twin.tiny import random_tokens, tiny_model

POLICIES: list[tuple[Policy, str | None]] = [
    (Full(), None),
    (TOVA(), "12"),
    (H2O(), "12"),
    (SnapKV(SnapKV.Config(window=4)), "24"),
    (StreamingLLM(), "12"),
    (Oracle(Oracle.Config(window=4)), "12"),
]


@pytest.mark.parametrize("border", [None, 5, 30])
@pytest.mark.parametrize(("policy", "budget"), POLICIES, ids=lambda value: getattr(value, "name", value))
def test_a_replayed_prompt_is_the_prompt_read(policy: Policy, budget: str | None, border: int | None) -> None:
    model, prompt = tiny_model(), random_tokens(40, 3)
    parsed = None if budget is None else Budget.parse(budget)
    settings: dict[str, Any] = {"prefill": "native", "chunk": 16}
    cache, logits = ModelRunner(model, policy, parsed, **settings).prefill(prompt, border)
    runner = ReplayingRunner(model, policy, parsed, **settings, runs=DenseRuns(model, 2), label=policy.name)
    again, replayed = runner.prefill(prompt, border)
    torch.testing.assert_close(replayed, logits, atol=1e-9, rtol=0)
    for layer in range(cache.shape.layers):
        assert torch.equal(again.kept(layer), cache.kept(layer))
    assert runner.forward(again, [[1]], [40]).shape == (1, 1, 97)


def test_a_dense_prompt_costs_the_model_its_end_only() -> None:
    model, prompt = tiny_model(), random_tokens(40, 3)
    runs = DenseRuns(model, 2)
    widths: list[int] = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    try:
        for budget in ("12", "16"):
            ReplayingRunner(
                model, H2O(), Budget.parse(budget), prefill="native", chunk=16, runs=runs, label="h2o"
            ).prefill(prompt)
        oracle = Oracle(Oracle.Config(window=4))
        first, again = runs.labels_by("oracle")(oracle, prompt), runs.labels_by("oracle")(oracle, prompt)
        assert runs.write_on(prompt, 2) is runs.write_on(prompt, 2)
    finally:
        hook.remove()
    assert widths == [40, FED, FED, FED, 1]
    assert first is again


def test_only_the_last_texts_are_kept() -> None:
    runs = DenseRuns(tiny_model(), 1)
    recordings = [runs.recording(tuple(random_tokens(9, seed))) for seed in range(3)]
    assert runs.recording(tuple(random_tokens(9, 2))) is recordings[2]
    assert runs.recording(tuple(random_tokens(9, 0))) is not recordings[0]
