"""A step that is recorded once gives, repeated, what ordinary steps give: nothing of it was the host's."""

from __future__ import annotations

import pytest
import torch
from graph_recording import on_tape

from benchmarks.gpu_equality import VOCABULARY, small_model
from benchmarks.random_policies import policy_for
from benchmarks.recorded_step import WARM_STEPS, RecordedStep
from benchmarks.steps import Oldest
from evictbench.errors import UserError
from evictbench.generation.runner import ModelRunner
from evictbench.policy.budget import Budget

STEPS = 8
SLOTS = ("no policy", "streaming_llm", "tova", "h2o", "random", "kvpop", "kvpop_mlp", "distillcache")


@pytest.fixture(scope="module")
def model():
    return small_model()


def read(model, name, budget=Budget(tokens=128)):  # noqa: B008
    """Two rows that have read prompts of different lengths, both longer than the budget."""
    policy = Oldest() if name == "no policy" else policy_for(name, model.config, 16)
    runner = ModelRunner(model, policy, budget if policy.needs_budget else None, chunk=64)
    cache = runner.new_cache(rows=2)
    for length in (170, 140):
        prompt, _ = runner.prefill([(7 * place + length) % VOCABULARY for place in range(length)])
        cache.admit(prompt)
    return runner, cache


def tokens(step):
    return torch.tensor([(11 * step + 3) % VOCABULARY, (5 * step + 1) % VOCABULARY])


@pytest.mark.parametrize("name", SLOTS)
@torch.no_grad()
def test_repetitions_are_the_next_steps(model, name):
    runner, ordinary = read(model, name)
    other, cache = read(model, name)
    for step in range(WARM_STEPS):
        runner.forward(ordinary, tokens(step)[:, None].tolist(), list(ordinary.seen))
        other.forward(cache, tokens(step)[:, None].tolist(), list(cache.seen))
    tapes = []
    recorded = None
    for step in range(WARM_STEPS, WARM_STEPS + STEPS):
        expected = runner.forward(ordinary, tokens(step)[:, None].tolist(), list(ordinary.seen))[:, -1]
        if recorded is None:
            recorded = RecordedStep(other, cache, tokens(step), on_tape(tapes))
            found = recorded.logits
        else:
            found = recorded.step(tokens(step))
        torch.testing.assert_close(found, expected)
        for layer in range(cache.shape.layers):
            for row in range(2):
                assert torch.equal(cache.kept(layer, row), ordinary.kept(layer, row))
        assert cache.rows == ordinary.rows
    assert tapes[0].illegal() == set()
    assert cache.nbytes() == cache.bytes_held == ordinary.nbytes()
    # Goes on by itself: the recording has left nothing behind.
    runner.forward(ordinary, [[1], [2]], list(ordinary.seen))
    other.forward(cache, [[1], [2]], list(cache.seen))
    assert torch.equal(cache.kept(0, 1), ordinary.kept(0, 1))


@torch.no_grad()
def test_the_full_cache_repeats_one_step(model):
    runner, cache = read(model, "full")
    recorded = RecordedStep(runner, cache, tokens(0), on_tape([]), moves=False)
    first, seen = recorded.logits.clone(), list(cache.seen)
    assert torch.equal(recorded.step(tokens(5)), first)
    assert cache.seen == seen


@torch.no_grad()
def test_a_step_unlike_the_next_is_refused(model):
    runner, cache = read(model, "h2o", Budget(tokens=512))
    with pytest.raises(UserError, match="not full"):
        RecordedStep(runner, cache, tokens(0), on_tape([]))
    runner.forward(cache, [[1], [2]], list(cache.seen))
    runner, cache = read(model, "dms")
    with pytest.raises(UserError, match="pages"):
        RecordedStep(runner, cache, tokens(0), on_tape([]))
