"""`evictbench sweep`: from words to cells, what they would take, and the sweep on the terminal."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench import registry
from evictbench.cli.progress import LOOKING
from evictbench.errors import UserError
from evictbench.sweep.grid import cells_of, grid_of, read_file
from evictbench.terminal.console import command, console_for, describe, quieten, say
from evictbench.terminal.waiting import Waiting

if TYPE_CHECKING:
    from rich.console import Console

    from evictbench.evaluation.settings import Settings
    from evictbench.sweep.plan import Executor, Impossible
    from evictbench.sweep.progress import Cell

EXECUTORS = ("local", "ray")


@dataclass(frozen=True)
class How:
    """How a sweep is run. gpus_per_cell: None for one where there are any. quiet: no progress, no hints."""

    executor: str = "local"
    shards: int = 1
    gpus_per_cell: float | None = None
    skip_impossible: bool = False
    dry_run: bool = False
    quiet: bool = False
    debug: bool = False


def sweep_and_show(file: Path | None, words: Mapping[str, Any], how: How, as_json: bool) -> int:
    """Run a sweep on the terminal; the exit code. `words` of the command line go before those of the file."""
    quieten()
    settings = cells_of(grid_of({**(read_file(file) if file else {}), **words}))
    try:
        with Waiting(console_for(stderr=True, quiet=how.quiet)) as waiting:
            waiting.begin(LOOKING)
            executor, settings = _executor(settings, how)
            from evictbench.sweep.plan import plan_cells

            cells, impossible = plan_cells(settings, waiting.begin)
    except KeyboardInterrupt:
        print("Stopped before the first sample.", file=sys.stderr)
        return 130
    report = console_for(stderr=as_json, quiet=how.quiet and as_json)
    describe(console_for(stderr=as_json, quiet=how.quiet), "sweep", _rows(cells, how, executor))
    if how.dry_run:
        _show_dry_run(cells, impossible, report, as_json, how.quiet)
    if impossible and not how.skip_impossible:
        raise UserError(_refusal(impossible, len(cells) + len(impossible)))
    return 0 if how.dry_run else _run(cells, impossible, executor, how, report, as_json)


def _run(
    cells: Sequence[Cell],
    impossible: Sequence[Impossible],
    executor: Executor,
    how: How,
    report: Console,
    as_json: bool,
) -> int:
    from evictbench.cli.sweep_output import SweepTable, as_data, result_table
    from evictbench.sweep.plan import FAILURE, sweep

    stopped = False
    with SweepTable(console_for(stderr=True, quiet=how.quiet)) as table:
        for one in impossible:
            table.warn(f"left out: {one.title}: {one.sentence}")
        table.phase("starting the workers")
        try:
            sweep(cells, executor, table, how.shards)
        except KeyboardInterrupt:
            stopped = True
    report.print(result_table(cells))
    if as_json:
        print(json.dumps([as_data(cell) for cell in cells], indent=2, ensure_ascii=False))
    for cell in cells:
        if cell.state == "failed":
            print(f"failed: {cell.title}: {cell.sentence} ({cell.plan.folder / FAILURE})", file=sys.stderr)
            if how.debug and cell.trace:
                print(cell.trace, file=sys.stderr)
    if stopped:
        kept = sum(cell.done for cell in cells)
        print(f"Stopped; {kept} finished samples are kept. To go on: {command()}", file=sys.stderr)
        return 130
    failed = sum(cell.state == "failed" for cell in cells)
    if failed:
        print(f"{failed} of {len(cells)} cells failed. To try them again: {command()}", file=sys.stderr)
        return 1
    if not how.quiet:
        folder = cells[0].plan.settings.out
        say(report, f"written to {folder}")
        say(report, f"next: evictbench plot {shlex.quote(str(folder))}")
    return 0


def _rows(cells: Sequence[Cell], how: How, executor: Executor) -> list[tuple[str, Sequence[str]]]:
    """What is about to run, defaults spelled out: what a run says of itself, of all cells together."""
    from evictbench.cli.run import describe_plan
    from evictbench.cli.sweep_output import place

    found: dict[str, dict[str, None]] = {}
    for cell in sorted(cells, key=place):
        for heading, text in describe_plan(cell.plan, 0):
            found.setdefault(heading, {})[text] = None
    samples, finished = sum(cell.total for cell in cells), sum(cell.done for cell in cells)
    found["folder"] = {str(cells[0].plan.settings.out): None}
    found["cells"] = {f"{len(cells)}, {samples:,} samples" + f", {finished:,} there from before" * bool(finished): None}
    found["workers"] = {_workers(how, executor): None}
    return [(heading, tuple(texts)) for heading, texts in found.items()]


def _workers(how: How, executor: Executor) -> str:
    """ "local: 2, on cuda:0, cuda:2", and what each cell is dealt to."""
    from evictbench.sweep.local import LocalWorkers

    shards = f"; each cell in {how.shards} shards" if how.shards > 1 else ""
    if isinstance(executor, LocalWorkers):
        devices = [place.environment.get("CUDA_VISIBLE_DEVICES", place.device) for place in executor.places]
        return f"{how.executor}: {len(devices)}, on {'; '.join(devices)}{shards}"
    gpus = "one GPU, if there are any" if how.gpus_per_cell is None else f"{how.gpus_per_cell:g} GPUs"
    return f"{how.executor}: a task a job, with {gpus}{shards}"


def _executor(settings: Sequence[Settings], how: How) -> tuple[Executor, list[Settings]]:
    """Who does the jobs, and the settings with what decides that taken from them: the devices."""
    if how.executor not in EXECUTORS:
        raise registry.unknown("executor", how.executor, EXECUTORS)
    if how.shards < 1:
        raise UserError(f"--shards is {how.shards}; it has to be at least 1.")
    gpus = how.gpus_per_cell
    if gpus is not None and gpus < 0:
        raise UserError(f"--gpus-per-cell is {gpus:g}; it has to be 0 or more.")
    devices = sorted({one.device for one in settings})
    if how.executor == "ray":
        from evictbench.sweep.ray import RayTasks

        if devices != ["auto"]:
            raise UserError("--executor ray gives each cell its GPUs: leave out --device; --gpus-per-cell counts them.")
        return RayTasks(gpus), list(settings)
    if len(devices) > 1:
        raise UserError(f"A sweep has one --device for all cells, and overrides name {' and '.join(devices)}.")
    if gpus is not None and (gpus < 1 or gpus != int(gpus)):
        raise UserError(f"--gpus-per-cell {gpus:g}: on this machine a worker has one GPU or several, whole.")
    from evictbench.sweep.local import LocalWorkers, places

    found = places(devices[0], int(gpus or 1))
    return LocalWorkers(found), [replace(one, device=found[0].device) for one in settings]


def _show_dry_run(
    cells: Sequence[Cell], impossible: Sequence[Impossible], report: Console, as_json: bool, quiet: bool
) -> None:
    from evictbench.cli.sweep_output import as_data, dry_table
    from evictbench.sweep.estimate import estimate
    from evictbench.terminal.waiting import duration

    estimates = estimate(cells, cells[0].plan.settings.out)
    if as_json:
        rows = [{**as_data(cell), "estimate": asdict(found)} for cell, found in zip(cells, estimates, strict=True)] + [
            {"title": one.title, "state": "impossible", "failure": one.sentence} for one in impossible
        ]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return

    report.print(dry_table(cells, estimates, impossible))
    if quiet:
        return
    samples = sum(found.samples for found in estimates)
    seconds = sum(found.seconds for found in estimates)
    say(
        report,
        f"{len(cells)} cells, {samples:,} samples to make, {sum(found.prompt_tokens for found in estimates):,} prompt "
        f"tokens, at most {sum(found.answer_tokens for found in estimates):,} answer tokens, about {duration(seconds)} "
        "for one worker, loading not counted",
    )
    sources: dict[str, int] = {}
    for found in estimates:
        if found.samples:
            sources[found.timed_by] = sources.get(found.timed_by, 0) + 1
    for words, count in sources.items():
        say(report, f"  time of {count} cell{'s' if count > 1 else ''} from {words}")
    say(report, "  cache: all rows filled; prompt peak: one prompt at its fullest; both without the weights")
    for one in impossible:
        say(report, f"  impossible: {one.title}: {one.sentence}")
    if not impossible:
        say(report, f"next: {shlex.join(word for word in ['evictbench', *sys.argv[1:]] if word != '--dry-run')}")


def _refusal(impossible: Sequence[Impossible], total: int) -> str:
    named = " ".join(f"{one.title}: {one.sentence}" for one in impossible[:3])
    more = f" (and {len(impossible) - 3} more)" if len(impossible) > 3 else ""
    return f"{len(impossible)} of {total} cells cannot be{more}; --skip-impossible leaves them out. {named}"
