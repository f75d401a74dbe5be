"""What `run` and `sweep` both take is one option: the same words, the same default, the same type."""

import inspect
from dataclasses import fields

from evictbench.cli.app import run, sweep
from evictbench.evaluation.settings import RunSettings

PLURALS = {"policy": "policies", "budget": "budgets", "suite": "suites"}


def test_a_sweep_takes_every_option_of_a_run():
    of_run, of_sweep = inspect.signature(run).parameters, inspect.signature(sweep).parameters
    for field in fields(RunSettings):
        assert PLURALS.get(field.name, field.name) in of_sweep, field.name
        assert field.name in of_run, field.name


def test_what_both_take_is_the_same():
    of_run, of_sweep = inspect.signature(run).parameters, inspect.signature(sweep).parameters
    shared = of_run.keys() & of_sweep.keys()
    assert len(shared) > 20
    for name in shared:
        assert of_run[name].default == of_sweep[name].default, name
        if name not in ("device", "weights"):  # a sweep takes several
            assert of_run[name].annotation == of_sweep[name].annotation, name
