"""Cells that share dense runs are ordinary runs' generators, fed from recordings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from evictbench.errors import UserError
from evictbench.generation.generator import Generator
from evictbench.policies.h2o import H2O
from evictbench.policy.budget import Budget
from evictbench.suites.fidelity.generator import TeacherForced
from studies import cells
from studies.replay import DenseRuns, ReplayingRunner
from twin.tiny import tiny_model


class NoText:
    eos_token_id = 0


def plan_of(own: Any = None) -> Any:
    return SimpleNamespace(
        end_tokens=SimpleNamespace(ids=frozenset()),
        settings=SimpleNamespace(prefill="native", chunk=16, batch_size=3, seed=5, device="cpu"),
        checked=SimpleNamespace(
            budget=Budget.parse("12"),
            suite=SimpleNamespace(name="toy", generator=own),
            recency=None,
            chosen=SimpleNamespace(label="h2o"),
        ),
        policy=H2O(),
        tokenizer=NoText(),
        tasks={},
    )


def test_answers_are_fed_from_recordings() -> None:
    model = tiny_model()
    runs = DenseRuns(model, 2)
    generator, device = cells.replaying_generator(plan_of(), model, runs)
    assert isinstance(generator, Generator)
    assert isinstance(generator.runner, ReplayingRunner)
    assert generator.runner.runs is runs
    assert (generator.batch_size, generator.seed, generator.runner.chunk) == (3, 5, 16)
    assert device.startswith("cpu")


def test_forced_texts_are_fed_from_recordings() -> None:
    model = tiny_model()
    runs = DenseRuns(model, 2)
    generator, _ = cells.replaying_generator(plan_of(lambda plan, load: TeacherForced(plan, load(plan))), model, runs)
    assert isinstance(generator, TeacherForced)
    assert isinstance(generator.comparison.runner, ReplayingRunner)
    assert generator.comparison.dense_passes is runs.dense_passes


def test_what_cannot_be_fed_from_recordings_is_refused() -> None:
    model = tiny_model()
    with pytest.raises(UserError, match="Cells of toy cannot share dense runs"):
        cells.replaying_generator(plan_of(lambda plan, load: object()), model, DenseRuns(model, 2))
