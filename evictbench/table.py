"""A run in words and as a table: what is about to run, what came out, where it is, what to type next."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from evictbench.plan import Plan


def describe(plan: Plan, finished: int) -> list[tuple[str, str]]:
    """What is about to run, defaults spelled out: pairs of a heading and its text."""
    settings, checked, protocol = plan.settings, plan.checked, plan.identity["protocol"]
    policy = ", ".join(f"{name}={value}" for name, value in checked.chosen.settings.items())
    mode: str = settings.prefill
    if mode == "native":
        mode = f"native ({plan.policy.prefill})" if checked.budget is not None else "native (nothing is cut)"
    lengths = [len(planned.prompt.ids) for planned in plan.prompts]
    answers = sorted({planned.max_new_tokens for planned in plan.prompts})
    context = "" if checked.context is None else f" in {checked.context} tokens"
    rows = [
        ("model", f"{plan.model}, {plan.dtype}, device {settings.device}, {settings.batch_size} rows"),
        ("policy", f"{checked.chosen.name} ({policy})" if policy else checked.chosen.name),
        ("budget", "none" if checked.budget is None else _budget(str(checked.budget))),
        ("suite", f"{checked.suite.name}{context}, seed {settings.seed}: {_counts(plan.asked)}"),
        ("prompts", f"{_span(lengths)} tokens, {'chat template' if plan.chat else 'plain text'}"),
        (
            "question",
            f"{checked.question} while the context is compressed" if checked.budget else "seen whole",
        ),
        ("prefill", f"{mode}, chunks of {settings.chunk} tokens"),
        ("answers", f"at most {_span(answers)} tokens ({protocol['max_new_tokens']}), greedy"),
    ]
    rows += [("data", ", ".join(f"{name} {_short_hash(value)}" for name, value in plan.prepared.data.items()))]
    rows += [("skipped", f"{name}: {reason}") for name, reason in plan.prepared.skipped.items()]
    rows += [("folder", str(plan.folder))]
    if finished:
        rows.append(("finished", f"{finished} of {len(plan.prompts)} samples are there from before"))
    return [(heading, text) for heading, text in rows if text]


COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("score", lambda row: f"{100 * row['score']:.1f}"),
    ("95%\ninterval", lambda row: _interval(row["interval"])),
    ("n", lambda row: _count(row["samples"], row["asked"])),
    ("entries\nmax", lambda row: str(row["occupancy_max"])),
    ("entries\nmean", lambda row: _short(row["occupancy_mean"])),
    ("tokens\nout", lambda row: _short(row["output_tokens"])),
    ("cut\noff", lambda row: f"{100 * row['truncated']:.0f}%"),
    ("cache", lambda row: human_bytes(row["cache_bytes"])),
    ("prefill\npeak", lambda row: human_bytes(row["prefill_peak_bytes"])),
    ("prefill\ns", lambda row: _short(row["prefill_seconds"])),
    ("decode\ns", lambda row: _short(row["decode_seconds"])),
    ("decode\ntok/s", lambda row: _short(row["decode_tokens_per_second"])),
)
"""What a result's table shows of a row of its summary."""

COSTS = 7
"""The first column that is about memory and time: where the table is cut in two on a narrow terminal."""


def result_tables(summary: Mapping[str, Any], console: Console) -> list[Table]:
    """Scores and costs, one row per task and, where there are several, one for their mean: one table, or two below
    each other where the console is too narrow for one."""
    whole = _table(summary, COLUMNS)
    if console.measure(whole, options=console.options.update(width=1000)).maximum <= console.width:
        return [whole]
    return [_table(summary, COLUMNS[:COSTS]), _table(summary, COLUMNS[COSTS:])]


def _table(summary: Mapping[str, Any], columns: Sequence[tuple[str, Callable[[Mapping[str, Any]], str]]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("task", no_wrap=True)
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in summary["tasks"].items():
        table.add_row(name, *(cell(row) for _, cell in columns))
    if len(summary["tasks"]) > 1:
        table.add_section()
        table.add_row("mean", *(cell(summary["mean"]) for _, cell in columns), style="bold")
    return table


LEGEND = (
    "entries: cache entries per KV head that a decode query saw; tokens, cache, peak and seconds: per sample; "
    "cut off: answers stopped by the token limit; tok/s: all rows together."
)


def human_bytes(size: float) -> str:
    """ "512 B", "1.5 MB", in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _interval(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else f"{100 * interval[0]:.1f}-{100 * interval[1]:.1f}"


def _count(samples: int, asked: int) -> str:
    return str(samples) if samples == asked else f"{samples}/{asked}"


def _short_hash(text: str) -> str:
    """Hashes cut to twelve digits; the result holds them whole."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b", r"\1", text)


def _short(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number:.0f}" if number >= 99.5 else f"{number:.3g}"


def _budget(text: str) -> str:
    what = "of the text, at least 32 entries" if text.endswith("%") else "entries"
    return f"{text} {what} per KV head"


def _span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _counts(asked: Mapping[str, int]) -> str:
    """ "niah_single_1, vt (100 samples each)"."""
    names, counts = ", ".join(asked), set(asked.values())
    if len(counts) > 1:
        return ", ".join(f"{name} ({count})" for name, count in asked.items())
    count = counts.pop()
    return f"{names} ({count} sample{'s' if count > 1 else ''}{' each' if len(asked) > 1 else ''})"
