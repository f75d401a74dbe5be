"""The commands that read results or look at this machine: plot, report, gate, list, doctor. None imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from evictbench.cli import options
from evictbench.gate.tolerances import LATENCY_TOLERANCE, TOLERANCE

PLOT_EXAMPLE = "evictbench plot results/runs --suite ruler --by task"
REPORT_EXAMPLE = "evictbench report results/runs --trace results/traces/NAME --out report.html"
GATE_EXAMPLE = "evictbench gate results/runs --baseline results/main --junit gate.xml"
LIST_EXAMPLE = "evictbench list policies"
DOCTOR_EXAMPLE = "evictbench doctor"

Names = Annotated[bool, typer.Option("--quiet", help="The names alone, one a line.")]

listing = typer.Typer(
    help="What can be named on the command line: policies, suites, models; and the published numbers.",
    epilog=f"Example: {LIST_EXAMPLE}",
    no_args_is_help=True,
)


def plot(
    folder: Annotated[Path, typer.Argument(help="Folder of runs, or of one trace.")] = Path("results/runs"),
    figures: Annotated[
        str | None,
        typer.Option(
            help="Of runs: budget, bytes, fidelity, errors, perplexity, answers, recency; of a trace: latency, memory, "
            "retention, kept. Default: all that there is data for."
        ),
    ] = None,
    metric: Annotated[str, typer.Option(help="score, or another metric of the tasks (kl, agreement, ...).")] = "score",
    by: Annotated[
        str | None, typer.Option(help="A panel for each value of a column: task, context, question, prefill, ...")
    ] = None,
    suite: options.OnlySuites = None,
    model: options.OnlyModels = None,
    task: options.OnlyTasks = None,
    policy: options.OnlyPolicies = None,
    budget: options.OnlyBudgets = None,
    where: options.Where = None,
    allow: Annotated[
        str | None, typer.Option(help="Columns in which policies may differ in one plot, where it is meant: prefill.")
    ] = None,
    paired: Annotated[
        bool, typer.Option("--paired", help="Only documents that every policy and budget has answered.")
    ] = False,
    trainings: options.Trainings = False,
    form: Annotated[
        str, typer.Option("--format", help="Pictures: png, svg; the same numbers as text: table, csv, latex, markdown.")
    ] = "png,svg",
    out: Annotated[Path, typer.Option(help="Folder for pictures.")] = Path("results/plots"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON, and draw nothing.")] = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Draw results and traces, or print the numbers that the pictures show."""
    given = _given(locals())
    from evictbench.cli.plot import plot_and_show
    from evictbench.plot.request import PlotRequest

    given["format"] = given.pop("form")
    raise typer.Exit(plot_and_show(PlotRequest(**given, each_protocol=True), as_json, quiet))


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of runs.")] = Path("results/runs"),
    trace: Annotated[
        list[Path] | None, typer.Option(help="Folder of a trace whose figures go in too. Repeatable.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The HTML file.")] = Path("results/report.html"),
    title: Annotated[str, typer.Option(help="Its title.")] = "evictbench report",
    suite: options.OnlySuites = None,
    model: options.OnlyModels = None,
    task: options.OnlyTasks = None,
    policy: options.OnlyPolicies = None,
    budget: options.OnlyBudgets = None,
    where: options.Where = None,
    documents: Annotated[
        int | None,
        options.whole(help="Prompts and answers of so many documents a task; 0 for none. Default: all that fit."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of tokenizer.json, to show prompts of a model that is not here.")
    ] = None,
    trainings: options.Trainings = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Write results into one HTML file that opens from the disk: leaderboard, plots, samples, protocols, warnings."""
    given = _given(locals())
    from evictbench.report.build import report_and_show
    from evictbench.report.request import ReportRequest

    given["traces"] = tuple(given.pop("trace") or ())
    raise typer.Exit(report_and_show(ReportRequest(**given), quiet))


def gate(
    folder: Annotated[Path, typer.Argument(help="Folder of runs; traces in it are looked at too.")] = Path(
        "results/runs"
    ),
    published: Annotated[
        bool,
        typer.Option("--published", help="Against what papers report, as shares of the full cache's score."),
    ] = False,
    baseline: Annotated[
        Path | None,
        typer.Option(help="Against these runs on the same samples: fails on a drop in score or a rise in cost."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="With --baseline: fails on any change (for runs in float32).")
    ] = False,
    paired: Annotated[
        bool, typer.Option("--paired", help="Take the samples that both have, where they are not the same.")
    ] = False,
    trainings: Annotated[
        bool,
        typer.Option("--trainings", help="Runs that differ in trained weights alone are one row, their mean."),
    ] = False,
    base: Annotated[
        list[str] | None,
        typer.Option(help="MODEL=BASE: a model fine-tuned elsewhere, held against its base's full cache. Repeatable."),
    ] = None,
    tolerance: Annotated[float, options.real(help="A drop in score that is let pass, from 0 to 1.")] = TOLERANCE,
    latency_tolerance: Annotated[
        float,
        options.real(help="A rise in a step's time over the full cache's that is let pass, as a share."),
    ] = LATENCY_TOLERANCE,
    trace: Annotated[
        list[Path] | None, typer.Option(help="Folder of a trace. Repeatable. Default: those among the runs.")
    ] = None,
    baseline_trace: Annotated[
        list[Path] | None, typer.Option(help="Its counterpart. Repeatable. Default: those in the baseline.")
    ] = None,
    suite: options.OnlySuites = None,
    model: options.OnlyModels = None,
    task: options.OnlyTasks = None,
    policy: options.OnlyPolicies = None,
    budget: options.OnlyBudgets = None,
    where: options.Where = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit's XML to this file.")] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write Markdown to this file; on GitHub the step summary gets it too.")
    ] = None,
    as_json: options.Json = False,
    whole: Annotated[bool, typer.Option("--all", help="List in the table what passed too.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No table: the verdict, and what fails.")] = False,
    debug: options.Debug = False,
) -> None:
    """Fail where a policy got worse, a result changed, or a paper's number is not reached. Exit code 1: it fails; 2:
    the runs cannot be used for it."""
    given = _given(locals())
    from evictbench.cli.gate import gate_and_show
    from evictbench.gate.finding import GateRequest

    given["base"] = tuple(given["base"] or ())
    given["traces"] = tuple(given.pop("trace") or ())
    given["baseline_traces"] = tuple(given.pop("baseline_trace") or ())
    raise typer.Exit(gate_and_show(GateRequest(**given), as_json, quiet, whole))


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """A command's options as its request takes them: those that choose samples as `filters`, none about output."""
    from evictbench.store.select import Filters

    given = {name: value for name, value in options.items() if name not in ("as_json", "quiet", "whole", "debug")}
    chosen = {name: given.pop(name) for name in Filters.__dataclass_fields__}
    return {**given, "filters": Filters(**{**chosen, "where": tuple(chosen["where"] or ())})}


@listing.command("policies", epilog=f"Example: {LIST_EXAMPLE}")
def list_policies(as_json: options.Json = False, quiet: Names = False, debug: options.Debug = False) -> None:
    """The eviction policies, with their settings."""
    from evictbench.cli import listing

    listing.show(listing.policies(), as_json, quiet)


@listing.command("suites", epilog="Example: evictbench list suites --json")
def list_suites(as_json: options.Json = False, quiet: Names = False, debug: options.Debug = False) -> None:
    """The suites, with their tasks."""
    from evictbench.cli import listing

    listing.show(listing.suites(), as_json, quiet)


@listing.command("models", epilog="Example: evictbench list models")
def list_models(as_json: options.Json = False, quiet: Names = False, debug: options.Debug = False) -> None:
    """Models to start with; any other may be named by its folder or hub id."""
    from evictbench.cli import listing

    listing.show(listing.models(), as_json, quiet)


@listing.command("published", epilog="Example: evictbench list published --policy kvpop --suite aime")
def list_published(
    policy: Annotated[
        str | None, typer.Option(help="Of these policies alone, comma-separated; by name, or with settings.")
    ] = None,
    paper: Annotated[str | None, typer.Option(help="From these papers alone, by arXiv id.")] = None,
    suite: options.OnlySuites = None,
    unmatched: Annotated[
        bool, typer.Option("--unmatched", help="Those that no run here can match, and what is missing.")
    ] = False,
    as_json: options.Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="One number a line, tabs between, no headings.")] = False,
    debug: options.Debug = False,
) -> None:
    """What papers say that policies reach, with the table and how sure it is; --json adds protocol and notes."""
    from evictbench.cli import listing
    from evictbench.terminal.console import console_for, say

    rows = listing.unmatched if unmatched else listing.published
    listing.show(rows(policy, paper, suite, whole=as_json), as_json, quiet)
    if unmatched:
        say(console_for(stderr=True, quiet=quiet), listing.reach(policy, paper, suite))


def doctor(
    as_json: options.Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only what is not in order.")] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="Say instead which suites' data this folder holds, and what of it is missing.")
    ] = None,
    debug: options.Debug = False,
) -> None:
    """Say what is there and what is not, and what to do about it. Exit code 1 if something is missing."""
    from evictbench.cli import data_report, listing
    from evictbench.terminal.console import console_for
    from evictbench.terminal.waiting import Waiting

    if data_dir is not None:
        with Waiting(console_for(stderr=True, quiet=quiet)) as waiting:
            waiting.begin("reading the data")
            entries = data_report.look(data_dir)
        data_report.show(entries, as_json, quiet)
        return
    with Waiting(console_for(stderr=True, quiet=quiet)) as waiting:
        waiting.begin("looking at libraries, devices and the model hub")
        checks = listing.checks()
    listing.show_checks(checks, as_json, quiet)
    if any(check["status"] == "missing" for check in checks):
        raise typer.Exit(1)
