"""`evictbench run`: show a run's progress and its tables, where its results are, and what to type next."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evictbench import registry
from evictbench.cli.progress import LOOKING, ProgressLine
from evictbench.errors import UserError
from evictbench.evaluation import protocol, tasks
from evictbench.evaluation.plan import RunPlan
from evictbench.evaluation.run import run
from evictbench.evaluation.settings import RunSettings
from evictbench.gate.tolerances import TOLERANCE
from evictbench.policy.budget import LEAST_FROM_SHARE
from evictbench.policy.ragged import RaggedPolicy
from evictbench.stats import power
from evictbench.store.select import reading_words
from evictbench.suite.chat_template import DEFAULT
from evictbench.terminal.console import command, console_for, describe, output_consoles, say, silence_libraries
from evictbench.terminal.units import human_bytes, percent, percent_interval

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


Column = tuple[str, Callable[[Mapping[str, Any]], str]]
"""A table's column: its heading, and the text for a row of the summary."""

SCORES: tuple[Column, ...] = (
    ("n", lambda row: _count(row)),
    ("tokens\nout", lambda row: _short(row["output_tokens"])),
    ("cut\noff", lambda row: f"{100 * row['truncated']:.0f}%"),
    ("in a\nloop", lambda row: f"{100 * row['repetition']:.0f}%"),
)
COSTS: tuple[Column, ...] = (
    ("seen\nmax", lambda row: str(row["occupancy_max"])),
    ("seen\nmean", lambda row: _short(row["occupancy_mean"])),
    ("cache", lambda row: human_bytes(row["cache_bytes"])),
    ("prefill\npeak", lambda row: human_bytes(row["prefill_peak_bytes"])),
    ("prefill\ns", lambda row: _short(row["prefill_seconds"])),
    ("decode\ns", lambda row: _short(row["decode_seconds"])),
    ("decode\ntok/s", lambda row: _short(row["decode_tokens_per_second"])),
)

PERPLEXITY: Column = ("perplexity", lambda row: _perplexity(row.get("perplexity")))

LEGEND = (
    "seen: cache entries per KV head that a decode query saw; tokens, cache, peak and seconds: per sample; "
    "cut off: answers stopped by the token limit or inside their thought; in a loop: answers that end in one; "
    "tok/s: all rows together."
)

MOST_METRICS = 3
"""How many metrics beside the score are shown, the first of each task; the summary file has all."""


def run_and_show(settings: RunSettings, as_json: bool, quiet: bool = False) -> int:
    """Run a model on a suite on the terminal. Returns the exit code.

    Results go to stdout, progress and warnings to stderr. quiet: neither progress nor hints.
    """
    silence_libraries()
    report, hints = output_consoles(as_json, quiet)

    def planned(plan: RunPlan, finished: int) -> None:
        describe(hints, "run", [(heading, (text,)) for heading, text in describe_plan(plan, finished)])

    try:
        with ProgressLine(console_for(stderr=True, quiet=quiet), planned) as progress:
            progress.phase(LOOKING)
            outcome = run(settings, progress)
    except KeyboardInterrupt:
        print(f"Stopped before the first sample. To go on: {command()}", file=sys.stderr)
        return 130
    summary = outcome.summary
    if summary["tasks"]:
        report.print(*result_tables(summary, report))
        say(hints, LEGEND)
    if as_json:
        print(json.dumps(summary, indent=2, ensure_ascii=False))
    say(hints, f"written to {outcome.plan.folder}")
    if outcome.interrupted:
        kept = summary["mean"]["samples"] if summary["mean"] else 0
        print(f"Stopped; {kept} finished samples are kept. To go on: {command()}", file=sys.stderr)
        return 130
    say(hints, f"next: {_next(outcome.plan)}")
    return 0


def _next(plan: RunPlan) -> str:
    """The command to type next: the full cache's run to compare this one with, or after that, the other policies'."""
    if plan.checked.budget is None:
        return "evictbench list policies, then the same command with --policy NAME --budget 25%"
    try:
        reference = registry.reference_policy().name
    except UserError:
        return "evictbench list policies"
    return plan.settings.command(policy=reference, budget=None, weights=None)


def describe_plan(plan: RunPlan, finished: int) -> list[tuple[str, str]]:
    """What is about to run, defaults spelled out: pairs of a heading and its text. finished: samples there already."""
    settings, checked, chosen = plan.settings, plan.checked, plan.checked.protocol
    policy = ", ".join(f"{name}={value}" for name, value in checked.chosen.settings.items())
    mode: str = settings.prefill
    if mode == "native":
        own = plan.policy.prefill_mode(settings.prefill) if checked.budget is not None else "nothing is cut"
        mode = f"native ({own})"
    elif isinstance(plan.policy, RaggedPolicy):
        mode = f"{mode} (without effect: {plan.policy.name} reads a prompt under its eviction)"
    lengths = [len(planned.prompt.ids) for planned in plan.prompts]
    answers = sorted({planned.max_new_tokens for planned in plan.prompts})
    context = "" if checked.context is None else f" in {checked.context} tokens"
    sampling = protocol.in_words(chosen.sampling)
    times = f", {chosen.repeats} per document" if chosen.repeats > 1 else ""
    source = f" ({chosen.preset.source})" if chosen.preset.source else ""
    rows = [
        ("model", f"{plan.model}, {plan.dtype}, device {settings.device}, {settings.batch_size} rows"),
        ("policy", f"{checked.chosen.name} ({policy})" if policy else checked.chosen.name),
        ("weights", "" if plan.weights is None else str(plan.weights)),
        ("budget", "none" if checked.budget is None else _budget(str(checked.budget), plan.policy.enforces_budget)),
        ("suite", f"{checked.suite.name}{context}, seed {settings.seed}: {_counts(plan.documents)}"),
        ("protocol", f"{chosen.name}{source}"),
        (
            "differs",
            "; ".join(f"{name} {_value(used)}, not {_value(own)}" for name, (used, own) in plan.differs.items()),
        ),
        ("prompts", f"{_span(lengths)} tokens, {_wrapping(plan)}"),
        (
            "question",
            f"{chosen.question} while the context is compressed" if checked.budget else "seen whole",
        ),
        ("prefill", f"{mode}, chunks of {settings.chunk} tokens"),
        (
            "answers",
            f"at most {_span(answers)} tokens ({settings.max_new_tokens}), {sampling}{times}",
        ),
        ("ends", f"at {plan.end_tokens.record}"),
    ]
    rows += [("finds", _detectable(plan))]
    rows += [("data", ", ".join(f"{name} {_short_hash(value)}" for name, value in plan.prepared.data.items()))]
    rows += [("skipped", f"{name}: {reason}") for name, reason in plan.prepared.skipped.items()]
    rows += [("folder", str(plan.folder))]
    if finished:
        rows.append(("finished", f"{finished} of {len(plan.prompts)} samples are there from before"))
    return [(heading, text) for heading, text in rows if text]


def _detectable(plan: RunPlan) -> str:
    """The smallest drop in score that this many samples can show, in words."""
    if plan.checked.suite.generator is not None:  # its scores are not those of right and wrong answers
        return ""
    return power.in_words(list(plan.documents.values()), plan.checked.protocol.repeats, TOLERANCE)


def result_tables(summary: Mapping[str, Any], console: Console) -> list[Table]:
    """Tables of scores and costs, with a row for each task and, if there are several, one for their mean.

    Scores and costs are one table where the console is wide enough, else two. Another follows if all tasks have metrics
    beside the score.
    """
    scores = [*_score_columns(summary["mean"]), *SCORES]
    whole = _table(summary, [*scores, *COSTS])
    if console.measure(whole, options=console.options.update(width=1000)).maximum <= console.width:
        tables = [whole]
    else:
        tables = [_table(summary, scores), _table(summary, COSTS)]
    names = [name for name in summary["mean"]["metrics"] if name != "score"][:MOST_METRICS]
    if names:
        perplexity = [PERPLEXITY] if summary["mean"].get("perplexity") else []
        tables.append(_table(summary, [*(_metric_column(name) for name in names), *perplexity]))
    if identity := summary.get("identity"):
        protocol = identity["protocol"]
        modes = [] if identity["budget"] is None else [protocol["prefill"]]
        tables[0].title = reading_words(modes, [protocol["question"]])
        tables[0].title_justify = "left"
    if trained_on := summary.get("transferred_from"):
        tables[-1].caption = f"The policy's weights were trained on {trained_on}."
        tables[-1].caption_justify = "left"
    return tables


def _score_columns(mean: Mapping[str, Any]) -> list[Column]:
    """The score and its interval; with several repeats, also pass@k and maj@k."""
    several = mean["repeats"] > 1 or mean["k"] is not None
    columns: list[Column] = [
        (f"score\navg@{mean['repeats']}" if several else "score", lambda row: percent(row["score"])),
        ("95%\ninterval", lambda row: percent_interval(row["interval"])),
    ]
    if not several:
        return columns
    k = "k" if mean["k"] is None else mean["k"]
    columns.append((f"\npass@{k}", lambda row: percent(row["pass_at_k"])))
    if mean["maj_at_k"] is not None:
        columns.append((f"\nmaj@{k}", lambda row: percent(row["maj_at_k"])))
    return columns


def _metric_column(name: str) -> Column:
    def cell(row: Mapping[str, Any]) -> str:
        metric = row["metrics"][name]
        low_high = metric["interval"]
        interval = "" if low_high is None else f" ({low_high[0]:.3g} to {low_high[1]:.3g})"
        return f"{metric['mean']:.4g}{interval}"

    return name, cell


def _perplexity(measured: Mapping[str, Any] | None) -> str:
    """ "2.58 (full 2.57)"; "" where nothing was measured."""
    return f"{measured['value']:.4g} (full {measured['full']:.4g})" if measured else ""


def _table(summary: Mapping[str, Any], columns: Sequence[Column]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("task", overflow="fold")
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in summary["tasks"].items():
        table.add_row(name, *(cell(row) for _, cell in columns))
    if len(summary["tasks"]) > 1:
        table.add_section()
        table.add_row("mean", *(cell(summary["mean"]) for _, cell in columns), style="bold")
    return table


def _count(row: Mapping[str, Any]) -> str:
    """ "100" documents, "30 x 16" with repeats, "7/20" answers as long as some are missing."""
    if row["samples"] != row["asked"]:
        return f"{row['samples']}/{row['asked']}"
    if row["samples"] == row["documents"]:
        return str(row["samples"])
    even = row["samples"] == row["documents"] * row["repeats"]
    return f"{row['documents']} x {row['repeats']}" if even else str(row["samples"])


def _wrapping(plan: RunPlan) -> str:
    """ "chat template (thinking) with a system prompt except trec, lcc", or "plain text"."""
    plain = [name for name, task in plan.tasks.items() if not tasks.uses_chat(task)]
    if not plan.chat or len(plain) == len(plan.tasks):
        return "plain text"
    thinking = " (thinking)" if plan.thinking.on else ""
    named = "" if plan.template is None or plan.template.name == DEFAULT else f" {plan.template.name}"
    system = " with a system prompt" if plan.checked.protocol.system_prompt else ""
    return f"chat template{named}{thinking}{system}{' except ' if plain else ''}{', '.join(plain)}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _short_hash(text: str) -> str:
    """A text with its hashes cut to twelve digits."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b", r"\1", text)


def _short(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number:.0f}" if number >= 99.5 else f"{number:.3g}"


def _budget(text: str, bound: bool) -> str:
    unit = f"of the text, at least {LEAST_FROM_SHARE} entries" if text.endswith("%") else "entries"
    return f"{text} {unit} per KV head{'' if bound else ', a target: what is seen is measured and may be another'}"


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
