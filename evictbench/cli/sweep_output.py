"""A sweep on the screen: its estimate, its progress (a live table, or plain lines in a file), its results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from types import TracebackType
from typing import TYPE_CHECKING, Any

from evictbench.stats.trainings import over_trainings
from evictbench.store.select import budget_with_seen, reading_words
from evictbench.sweep.job import ANSWERING
from evictbench.terminal import waiting
from evictbench.terminal.console import say, warn
from evictbench.terminal.units import human_bytes, percent, percent_interval
from evictbench.terminal.waiting import Waiting, duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    from evictbench.sweep.estimate import Estimate
    from evictbench.sweep.plan import ImpossibleCell
    from evictbench.sweep.progress import Progress, SweepCell

COLOURS = {"running": "cyan", "done": "green", "failed": "red", "stopped": "yellow", "waiting": "dim"}


class SweepTable:
    """Follows a sweep (`evictbench.sweep.plan.Watcher`) and writes to `console`: a live table on a terminal, else a
    line for each cell that ends, and now and then one for each that runs. Use as a context manager."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self.clock = clock
        self.live: Live | None = None
        self.written = clock()
        self.warned: set[str] = set()
        self.waiting = Waiting(console)

    def __enter__(self) -> SweepTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.waiting.end()
        if self.live is not None:
            self.live.stop()

    def phase(self, text: str) -> None:
        """Show a step before the first cell."""
        self.waiting.begin(text)

    def warn(self, sentence: str) -> None:
        """Write a warning above the table, once."""
        if sentence not in self.warned:
            self.warned.add(sentence)
            warn(self.console, sentence)

    def show(self, progress: Progress) -> None:
        """Update the table; in a file, now and then write the progress of the running cells."""
        self.waiting.end()
        if self.waiting.on_screen:
            self._live().update(live_table(progress, self.console.height - 4))
        elif self.clock() - self.written >= waiting.EVERY:
            self.written = self.clock()
            say(self.console, status_line(progress))
            for cell in progress.cells:
                if cell.state == "running":
                    say(self.console, f"  {cell.title}: {', '.join(filter(None, _row(cell, progress)[3:]))}")

    def ended(self, cell: SweepCell) -> None:
        """Write that a cell has ended, where there is no table to show it."""
        if not self.waiting.on_screen:
            outcome = f"{cell.done}/{cell.total} samples, score {_score(cell)}"
            say(self.console, f"{cell.state}: {cell.title}: {cell.sentence if cell.state == 'failed' else outcome}")

    def _live(self) -> Live:
        if self.live is None:
            from rich.live import Live

            self.live = Live(console=self.console, transient=True, refresh_per_second=4, redirect_stdout=False)
            self.live.start()
        return self.live


def live_table(progress: Progress, height: int) -> Table:
    """One row for each cell. If not all fit: those that run or failed, the last done, the next, and counts."""
    table = _new_table("policy", "budget", "suite", "", "samples", "score", "rate", "left")
    table.title = status_line(progress)
    table.title_justify = "left"
    rows = list(progress.cells)
    room = max(4, height - 5)
    if len(rows) > room:
        first = [cell for cell in rows if cell.state in ("running", "failed", "stopped")]
        done = [cell for cell in rows if cell.state == "done"]
        waiting = [cell for cell in rows if cell.state == "waiting"]
        space = max(0, room - len(first))
        latest = done[-(space - space // 3) :] if space > space // 3 else []
        shown = {id(cell) for cell in [*first[:room], *latest, *waiting[: space // 3]]}
        table.caption = f"{len(rows) - len(shown)} cells more, {len(waiting)} waiting in all"
        rows = [cell for cell in rows if id(cell) in shown]
    for cell in rows:
        table.add_row(*_row(cell, progress), style=COLOURS[cell.state])
    return table


def status_line(progress: Progress) -> str:
    """ "3/10 cells, 34/100 samples, 1 failed, 2:04 left"."""
    cells = progress.cells
    cells_done = sum(cell.state == "done" for cell in cells)
    failed = sum(cell.state == "failed" for cell in cells)
    done, total = sum(cell.done for cell in cells), sum(cell.total for cell in cells)
    parts = [f"{cells_done}/{len(cells)} cells", f"{done}/{total} samples"]
    if failed:
        parts.append(f"{failed} failed")
    left = progress.whole_left()
    if left:
        parts.append(f"{duration(left)} left")
    return ", ".join(parts)


def result_table(cells: Sequence[SweepCell]) -> Table:
    """Every cell's score with its interval, and its cache sizes; in the order of suite, policy, budget. Behind cells
    that differ in their weights alone comes a row of the mean and the standard deviation over these trainings."""
    table = _new_table("suite", "policy", "budget", "score", "95% interval", "n", "seen mean", "cache", "")
    table.title = reading(cells)
    table.title_justify = "left"
    ordered = sorted(cells, key=sort_key)
    for cell in ordered:
        mean = cell.summary.get("mean")
        values, budget = ("-", "-", f"{cell.done}/{cell.total}", "-", "-"), cell.budget
        if mean:
            seen = mean["occupancy_mean"], mean["occupancy_max"]
            budget = budget and budget_with_seen(budget, cell.plan.policy.enforces_budget, *seen)
            count = str(cell.total) if cell.done == cell.total else f"{cell.done}/{cell.total}"
            values = (
                percent(mean["score"]),
                percent_interval(mean["interval"]),
                count,
                f"{mean['occupancy_mean']:.0f}",
                human_bytes(mean["cache_bytes"]),
            )
        trained_on = cell.summary.get("transferred_from")
        note = f"weights of {trained_on}" if trained_on and cell.state == "done" else cell.state
        trainings = [other for other in ordered if _row_of(other) == _row_of(cell)]
        notes = ["" if note == "done" else note, str(cell.plan.settings.weights) if len(trainings) > 1 else ""]
        table.add_row(cell.suite, cell.policy, budget, *values, ", ".join(filter(None, notes)), style=None)
        if len(trainings) > 1 and cell is trainings[-1]:
            table.add_row(cell.suite, cell.policy, cell.budget, *_over_trainings(trainings), style="bold")
    return table


def _row_of(cell: SweepCell) -> tuple[Any, ...]:
    """What the cells of several trainings have in common: everything but the weights."""
    return cell.suite, cell.policy, cell.budget, replace(cell.plan.settings, weights=None)


def _over_trainings(cells: Sequence[SweepCell]) -> tuple[str, ...]:
    """Score, interval, n, mean seen, cache, and a note, of several trainings that are done."""
    means = [cell.summary["mean"] for cell in cells if cell.summary.get("mean")]
    if len(means) < 2:
        return ("-", "-", f"{len(means)} trainings", "-", "-", "")
    found = over_trainings([mean["score"] for mean in means])
    assert found.interval is not None
    inside = max(0.0, found.interval[0]), min(1.0, found.interval[1])
    return (
        f"{percent(found.mean)} ± {percent(found.deviation)}",
        percent_interval(inside),
        f"{found.count} trainings",
        f"{fmean(mean['occupancy_mean'] for mean in means):.0f}",
        human_bytes(fmean(mean["cache_bytes"] for mean in means)),
        "mean ± sd, trainings as units",
    )


def reading(cells: Sequence[SweepCell]) -> str:
    """How prompts were read, by suite where suites differ in it."""
    modes = {cell.plan.settings.prefill for cell in cells if cell.plan.checked.budget is not None}
    questions: dict[str, set[str]] = {}
    for cell in cells:
        questions.setdefault(cell.suite, set()).add(cell.plan.checked.protocol.question)
    words = {suite: reading_words(modes, seen) for suite, seen in questions.items()}
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return "; ".join(f"{suite}: {text}" for suite, text in words.items())


def estimate_table(
    cells: Sequence[SweepCell], estimates: Sequence[Estimate], impossible: Sequence[ImpossibleCell]
) -> Table:
    """Every cell in the order in which it would run, with its estimate."""
    table = _new_table(
        "", "policy", "budget", "suite", "samples", "prompt tokens", "answer tokens", "cache", "prompt peak", "time"
    )
    for number, (cell, estimate) in enumerate(zip(cells, estimates, strict=True), start=1):
        if estimate.samples:
            takes = (
                f"{estimate.prompt_tokens:,}",
                f"{estimate.answer_tokens:,}",
                human_bytes(estimate.cache_bytes),
                human_bytes(estimate.prompt_bytes),
                duration(estimate.seconds),
            )
        else:
            takes = ("finished", "", "", "", "")
        samples = f"{estimate.samples}/{cell.total}"
        table.add_row(str(number), cell.policy, cell.budget, cell.suite, samples, *takes)
    for settings in (cell.settings for cell in impossible):
        table.add_row("", settings.policy, settings.budget or "", settings.suite, "impossible", *[""] * 5, style="red")
    return table


def cell_record(cell: SweepCell) -> dict[str, Any]:
    """A cell as `--json` prints it."""
    return {
        "policy": cell.policy,
        "budget": cell.budget or None,
        "suite": cell.suite,
        "model": cell.plan.model,
        "state": cell.state,
        "samples": cell.done,
        "asked": cell.total,
        "folder": str(cell.plan.folder),
        "failure": cell.sentence or None,
        "summary": cell.summary or None,
    }


def sort_key(cell: SweepCell) -> tuple[Any, ...]:
    """Orders cells by suite, policy and budget, the full cache first."""
    budget = cell.plan.checked.budget
    size = (0, 0.0) if budget is None else (1, float(budget.tokens or 0)) if budget.tokens else (2, budget.share or 0.0)
    return cell.suite, budget is not None, cell.policy, size


def _row(cell: SweepCell, progress: Progress) -> tuple[str, ...]:
    """Policy, budget, suite, state, samples, score, rate, time left."""
    rate = cell.rate(progress.clock())
    left = progress.left(cell)
    running = cell.state == "running"
    phase = next((phase for phase in cell.phases.values() if phase != ANSWERING), "") if running else ""
    if running and ANSWERING in cell.phases.values():
        phase = ""
    return (
        cell.policy,
        cell.budget,
        cell.suite,
        phase or cell.state,
        f"{cell.done}/{cell.total}",
        _score(cell),
        f"{60 * rate:.3g}/min" if running and rate else "",
        duration(left) if running and left is not None else "",
    )


def _score(cell: SweepCell) -> str:
    """ "41.7 (22.0-61.4)" of a cell that has ended, the mean so far of another."""
    mean = cell.summary.get("mean")
    if mean:
        interval = mean["interval"]
        return percent(mean["score"]) + ("" if interval is None else f" ({percent_interval(interval)})")
    return percent(cell.score())


def _new_table(*headings: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in headings:
        is_text = heading in ("policy", "suite", "")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    return table
