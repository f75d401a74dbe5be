"""From sample lines to rows: means, shares, rates, loops."""

import io
import itertools

import pytest
from rich.console import Console

from evictbench import table
from evictbench.summary import MEANS, repeats_itself, summarise, tokens_per_second

NUMBERS = itertools.count()


def line(task, score, **more):
    """A sample of a document of its own, unless `more` says which."""
    known = (
        {"doc_id": next(NUMBERS), "repeat": 0}
        | dict.fromkeys(MEANS, 1.0)
        | {"occupancy_max": 8, "truncated": False, "repetition": False}
    )
    return known | {"task": task, "score": score, "decode_steps": 10, "decode_seconds": 2.0} | more


def test_the_mean_weighs_tasks_alike():
    lines = [line("a", 1.0), line("a", 1.0), line("a", 0.0), line("b", 0.5)]
    summary = summarise(lines, {"a": 3, "b": 3})
    assert summary["tasks"]["a"]["score"] == pytest.approx(2 / 3)
    assert summary["mean"]["score"] == pytest.approx((2 / 3 + 0.5) / 2)
    assert summary["mean"]["interval"] is None  # b has one sample
    assert (summary["tasks"]["b"]["samples"], summary["tasks"]["b"]["asked"]) == (1, 3)


def test_what_is_asked_for_is_never_less_than_what_is_there():
    summary = summarise([line("a", 1.0), line("a", 1.0)], {"a": 1, "b": 5})
    assert summary["tasks"]["a"]["asked"] == 2
    assert summary["mean"]["asked"] == 7


def test_the_maximum_is_the_maximum_and_shares_are_shares():
    lines = [line("a", 1, occupancy_max=9), line("a", 1, truncated=True), line("b", 0, occupancy_max=7), line("b", 0)]
    summary = summarise(lines, {"a": 2, "b": 2})
    assert [row["occupancy_max"] for row in summary["tasks"].values()] == [9, 8]
    assert summary["mean"]["occupancy_max"] == 9
    assert summary["tasks"]["a"]["truncated"] == 0.5
    assert summary["mean"]["truncated"] == 0.25


def test_tokens_per_second_is_all_steps_over_all_seconds():
    assert tokens_per_second([line("a", 1), line("a", 1, decode_steps=50, decode_seconds=3.0)]) == 12.0
    assert tokens_per_second([]) is None


def test_no_samples_is_no_table():
    assert summarise([], {"a": 3}) == {"tasks": {}, "mean": None}


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([7] * 32, True),
        ([7] * 31, False),
        ([1, 2, 3] + [4, 5] * 16, True),
        (list(range(64)), False),
        ([9, 8, *list(range(20)) * 4], True),
        ([9, 8, *list(range(20)) * 3], False),
        ([7] * 32 + [1], False),
        ([], False),
    ],
)
def test_a_loop_at_the_end_is_seen(tokens, loops):
    assert repeats_itself(tokens) is loops


def shown(width):
    lines = [line("niah_multiquery", 1.0, decode_seconds=1e3), line("niah_multiquery", 0.25), line("vt", 0.5)]
    summary = summarise(lines, {"niah_multiquery": 2, "vt": 2})
    console = Console(file=io.StringIO(), width=width)
    console.print(*table.result_tables(summary, console))
    return console.file.getvalue()


def test_a_wide_console_gets_one_table_and_a_narrow_one_two():
    assert shown(160).count("niah_multiquery") == 1
    assert shown(80).count("niah_multiquery") == 2


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_number_is_cut_off_at_any_usual_width(width):
    text = shown(width)
    assert "…" not in text
    for said in ("62.5", "50.0", "1/2", "-", "0%"):
        assert said in text
