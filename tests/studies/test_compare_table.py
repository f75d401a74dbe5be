"""The table of a comparison: who is set beside whom, and what counts as better."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from studies.compare import table


def cell(name: str, kind: str, values: list[float], bound: bool = True) -> Any:
    return SimpleNamespace(
        name=name,
        kind=kind,
        budget=None if kind == "full" else "128",
        title=name if kind == "full" else f"{name} at 128",
        plan=SimpleNamespace(
            folder=Path(__file__),
            policy=SimpleNamespace(enforces_budget=bound),
            settings=SimpleNamespace(prefill="dense"),
            checked=SimpleNamespace(protocol=SimpleNamespace(question="seen")),
        ),
        values=lambda metric: {("gsm8k", number, 0): value for number, value in enumerate(values)},
    )


CELLS = [
    cell("full", "full", [0.0, 0.0, 0.0]),
    cell("h2o", "training-free", [0.3, 0.4, 0.5]),
    cell("tova", "training-free", [0.1, 0.1, 0.1]),
    cell("kvpop", "learned", [0.2, 0.2, 0.2]),
    cell("oracle", "oracle", [0.1, 0.1, 0.1, 0.7]),
]


def test_learned_policies_and_oracles_are_set_beside_training_free_ones() -> None:
    lines = table(CELLS, "kl", more_is_better=False)
    against = [line.strip() for line in lines if line.endswith("against")]
    assert against == ["kvpop at 128 against", "oracle at 128 against"]
    start = lines.index("  kvpop at 128 against")
    assert "-0.2000" in lines[start + 1]
    assert lines[start + 1].endswith("better")
    assert "+0.1000" in lines[start + 2]
    assert not lines[start + 2].endswith("better")
    assert lines[start + 3].strip() == "closes 67% of the gap between h2o and oracle"


def test_a_budget_that_is_no_bound_has_what_was_seen_beside_it() -> None:
    lines = table([CELLS[0], CELLS[1], cell("dms", "learned", [70.0, 80.0], bound=False)], "kl", False)
    assert [line for line in lines if "saw" in line] == [line for line in lines if line.startswith("  dms at 128 ")][:1]
    assert lines[4].endswith("n 2  saw 75.0, a head at most 80")


def test_named_policies_alone_are_tested_on_common_samples() -> None:
    lines = table(CELLS, "kl", False, tested=["oracle"])
    start = lines.index("  oracle at 128 against")
    assert "n 3)" in lines[start + 1]
    assert "  kvpop at 128 against" not in lines
