"""What is counted on real text, on rows that are made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from studies.authors.on_real_text import KERNEL, WINDOW, counts, main

BUDGET = WINDOW + KERNEL


def rows(*peaks: int, newest: float = 1.0) -> torch.Tensor:
    """Rows of one KV head with a query head for each peak, to which all its queries look; the rest is spread evenly."""
    window = torch.full((1, len(peaks), WINDOW, 30 + WINDOW), 1e-4)
    window += 1e-7 * torch.arange(30 + WINDOW, 0, -1)
    for head, peak in enumerate(peaks):
        window[0, head, :, peak] += 1.0
    window[..., -1] = newest
    return window


def test_one_head_takes_the_pool_around_its_peak_and_shares_it_with_none() -> None:
    found = counts(rows(10), BUDGET)
    assert found == {"newest dropped": 0, "tied": 0.0, "lacking": 0.0, "together": BUDGET}


def test_a_pool_that_is_cut_in_two_is_a_tie() -> None:
    assert counts(rows(10), BUDGET - 1)["tied"] == 1.0


def test_heads_that_look_elsewhere_lack_and_hold_more_together() -> None:
    found = counts(rows(5, 20), BUDGET)
    assert found["lacking"] == pytest.approx(0.5)
    assert found["together"] == WINDOW + 2 * KERNEL


def test_the_newest_entry_goes_where_the_last_query_looks_elsewhere() -> None:
    assert counts(rows(10, newest=0.0), BUDGET)["newest dropped"] == 1


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "There is no "),
        (["--budgets", "32,64"], "A budget is above 32 entries and below 768 tokens, not 32."),
        (["--budgets", "many"], "--budgets are whole numbers by commas, not many."),
    ],
)
def test_bad_input_is_a_sentence(
    given: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--data-dir", str(tmp_path), *given]) == 2
    assert sentence in capsys.readouterr().err
