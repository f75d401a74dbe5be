"""`evictbench sweep`: plan the cells, show what they would take, and run them on the terminal."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench.cli.progress import LOOKING
from evictbench.errors import UserError, unknown
from evictbench.sweep.grid import grid_cells, parse_grid, read_sweep_file
from evictbench.terminal.console import command, console_for, describe, output_consoles, say, silence_libraries
from evictbench.terminal.waiting import Waiting

if TYPE_CHECKING:
    from rich.console import Console

    from evictbench.evaluation.settings import RunSettings
    from evictbench.sweep.plan import Executor, ImpossibleCell
    from evictbench.sweep.progress import SweepCell

EXECUTORS = ("local", "ray")


@dataclass(frozen=True)
class SweepOptions:
    """The options of a sweep beside its cells.

    executor: "local" or "ray". shards: jobs for each cell. gpus_per_cell: None for one GPU where there are any.
    quiet: no progress, no hints.
    """

    executor: str = "local"
    shards: int = 1
    gpus_per_cell: float | None = None
    skip_impossible: bool = False
    dry_run: bool = False
    quiet: bool = False
    debug: bool = False


def sweep_and_show(file: Path | None, given: Mapping[str, Any], options: SweepOptions, as_json: bool) -> int:
    """Run a sweep on the terminal. Returns the exit code.

    file: YAML with options of the grid. given: options of the command line, which override those of the file.
    """
    silence_libraries()
    settings = grid_cells(parse_grid({**(read_sweep_file(file) if file else {}), **given}))
    try:
        with Waiting(console_for(stderr=True, quiet=options.quiet)) as waiting:
            waiting.begin(LOOKING)
            executor, settings = _executor(settings, options)
            from evictbench.sweep.plan import plan_cells

            cells, impossible = plan_cells(settings, waiting.begin)
    except KeyboardInterrupt:
        print(f"Stopped before the first sample. To go on: {command()}", file=sys.stderr)
        return 130
    report, hints = output_consoles(as_json, options.quiet)
    describe(hints, "sweep", _description(cells, options, executor))
    if options.dry_run:
        _show_dry_run(cells, impossible, report, hints, as_json)
    if impossible and not options.skip_impossible:
        raise UserError(_refusal(impossible, len(cells) + len(impossible)))
    return 0 if options.dry_run else _run(cells, impossible, executor, options, as_json)


def _run(
    cells: Sequence[SweepCell],
    impossible: Sequence[ImpossibleCell],
    executor: Executor,
    options: SweepOptions,
    as_json: bool,
) -> int:
    """Run the planned cells and show their results. Returns the exit code."""
    from evictbench.cli.sweep_output import SweepTable, cell_record, result_table
    from evictbench.sweep.plan import FAILURE, sweep

    stopped = False
    with SweepTable(console_for(stderr=True, quiet=options.quiet)) as table:
        for cell_left_out in impossible:
            table.warn(f"left out: {cell_left_out.title}: {cell_left_out.sentence}")
        table.phase("starting the workers")
        try:
            sweep(cells, executor, table, options.shards)
        except KeyboardInterrupt:
            stopped = True
    report, hints = output_consoles(as_json, options.quiet)
    report.print(result_table(cells))
    if as_json:
        print(json.dumps([cell_record(cell) for cell in cells], indent=2, ensure_ascii=False))
    for cell in cells:
        if cell.state == "failed":
            print(f"failed: {cell.title}: {cell.sentence} ({cell.plan.folder / FAILURE})", file=sys.stderr)
            if options.debug and cell.trace:
                print(cell.trace, file=sys.stderr)
    if stopped:
        kept = sum(cell.done for cell in cells)
        print(f"Stopped; {kept} finished samples are kept. To go on: {command()}", file=sys.stderr)
        return 130
    failed = sum(cell.state == "failed" for cell in cells)
    if failed:
        print(f"{failed} of {len(cells)} cells failed. To try them again: {command()}", file=sys.stderr)
        return 1
    folder = cells[0].plan.settings.out
    say(hints, f"written to {folder}")
    say(hints, f"next: evictbench plot {shlex.quote(str(folder))}")
    return 0


def _description(
    cells: Sequence[SweepCell], options: SweepOptions, executor: Executor
) -> list[tuple[str, Sequence[str]]]:
    """What is about to run, defaults spelled out: the descriptions of all cells' runs, each text once."""
    from evictbench.cli.run import describe_plan
    from evictbench.cli.sweep_output import sort_key

    rows: dict[str, dict[str, None]] = {}
    for cell in sorted(cells, key=sort_key):
        for heading, text in describe_plan(cell.plan, 0):
            rows.setdefault(heading, {})[text] = None
    samples, finished = sum(cell.total for cell in cells), sum(cell.done for cell in cells)
    rows["folder"] = {str(cells[0].plan.settings.out): None}
    rows["cells"] = {f"{len(cells)}, {samples:,} samples" + f", {finished:,} there from before" * bool(finished): None}
    rows["workers"] = {_workers(options, executor): None}
    return [(heading, tuple(texts)) for heading, texts in rows.items()]


def _workers(options: SweepOptions, executor: Executor) -> str:
    """ "local: 2, on cuda:0; cuda:2", with the number of shards if there are several."""
    from evictbench.sweep.local import LocalWorkers

    shards = f"; each cell in {options.shards} shards" if options.shards > 1 else ""
    if isinstance(executor, LocalWorkers):
        devices = [worker.environment.get("CUDA_VISIBLE_DEVICES", worker.device) for worker in executor.devices]
        return f"{options.executor}: {len(devices)}, on {'; '.join(devices)}{shards}"
    gpus = "one GPU, if there are any" if options.gpus_per_cell is None else f"{options.gpus_per_cell:g} GPUs"
    return f"{options.executor}: a task a job, with {gpus}{shards}"


def _executor(settings: Sequence[RunSettings], options: SweepOptions) -> tuple[Executor, list[RunSettings]]:
    """The executor, and the settings with the device that its workers use. UserError for options that do not fit."""
    if options.executor not in EXECUTORS:
        raise unknown("executor", options.executor, EXECUTORS)
    if options.shards < 1:
        raise UserError(f"--shards is {options.shards}; it has to be at least 1.")
    gpus = options.gpus_per_cell
    if gpus is not None and gpus < 0:
        raise UserError(f"--gpus-per-cell is {gpus:g}; it has to be 0 or more.")
    devices = sorted({cell_settings.device for cell_settings in settings})
    if options.executor == "ray":
        from evictbench.sweep.ray import RayTasks

        if devices != ["auto"]:
            raise UserError("--executor ray gives each cell its GPUs: leave out --device; --gpus-per-cell counts them.")
        return RayTasks(gpus), list(settings)
    if len(devices) > 1:
        raise UserError(f"A sweep has one --device for all cells, and overrides name {' and '.join(devices)}.")
    if gpus is not None and (gpus < 1 or gpus != int(gpus)):
        raise UserError(f"--gpus-per-cell {gpus:g}: on this machine a worker has one GPU or several, whole.")
    from evictbench.sweep.local import LocalWorkers, worker_devices

    workers = worker_devices(devices[0], int(gpus or 1))
    return LocalWorkers(workers), [replace(cell_settings, device=workers[0].device) for cell_settings in settings]


def _show_dry_run(
    cells: Sequence[SweepCell], impossible: Sequence[ImpossibleCell], report: Console, hints: Console, as_json: bool
) -> None:
    """Print the estimates, as a table with hints or as JSON."""
    from evictbench.cli.sweep_output import cell_record, estimate_table
    from evictbench.sweep.estimate import estimate
    from evictbench.terminal.waiting import duration

    estimates = estimate(cells, cells[0].plan.settings.out)
    if as_json:
        records = [{**cell_record(cell), "estimate": asdict(each)} for cell, each in zip(cells, estimates, strict=True)]
        records += [{"title": cell.title, "state": "impossible", "failure": cell.sentence} for cell in impossible]
        print(json.dumps(records, indent=2, ensure_ascii=False))
        return
    report.print(estimate_table(cells, estimates, impossible))
    samples = sum(each.samples for each in estimates)
    prompt_tokens = sum(each.prompt_tokens for each in estimates)
    answer_tokens = sum(each.answer_tokens for each in estimates)
    seconds = sum(each.seconds for each in estimates)
    say(
        hints,
        f"{len(cells)} cells, {samples:,} samples to make, {prompt_tokens:,} prompt tokens, at most {answer_tokens:,} "
        f"answer tokens, about {duration(seconds)} for one worker, loading not counted",
    )
    for source, count in Counter(each.timed_by for each in estimates if each.samples).items():
        say(hints, f"  time of {count} cell{'s' if count > 1 else ''} from {source}")
    say(hints, "  cache: all rows filled; prompt peak: one prompt at its fullest; both without the weights")
    for cell in impossible:
        say(hints, f"  impossible: {cell.title}: {cell.sentence}")
    if not impossible:
        say(hints, f"next: {shlex.join(word for word in ['evictbench', *sys.argv[1:]] if word != '--dry-run')}")


def _refusal(impossible: Sequence[ImpossibleCell], total: int) -> str:
    """The sentence that refuses a sweep with impossible cells. total: all cells."""
    named = " ".join(f"{cell.title}: {cell.sentence}" for cell in impossible[:3])
    more = f" (and {len(impossible) - 3} more)" if len(impossible) > 3 else ""
    return f"{len(impossible)} of {total} cells cannot be{more}; --skip-impossible leaves them out. {named}"
