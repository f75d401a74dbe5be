"""`evictbench train`: watch a training, say what it reached, where it is and what to type next."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from evictbench.catalogue import console_for
from evictbench.progress import EVERY, duration
from evictbench.run_command import quieten
from evictbench.train_settings import check

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from evictbench.train_plan import Plan
    from evictbench.train_settings import Settings

_SHOWN = 4
"""Numbers of a step that the line shows, the first that the learner gives."""
_NOT_SHOWN = ("step", "tokens", "seconds", "budget", "lr", "grad_norm", "model_grad_norm")


def train_and_show(settings: Settings, as_json: bool, quiet: bool = False) -> int:
    """Train on the terminal; the exit code. Results go to stdout, progress to stderr; quiet: no progress, no hints."""
    quieten()
    check(settings)  # before anything heavy is imported
    from evictbench.train import MODEL, train

    report = console_for(stderr=as_json, quiet=quiet and as_json)
    words = console_for(stderr=as_json, quiet=quiet)

    def say(text: str) -> None:
        words.print(text, markup=False, highlight=False, soft_wrap=True)

    try:
        with TrainingLine(console_for(stderr=True, quiet=quiet)) as progress:
            outcome = train(settings, progress)
    except KeyboardInterrupt:
        again = shlex.join(["evictbench", *sys.argv[1:]])
        print(f"Stopped; to go on from the last checkpoint: {again}", file=sys.stderr)
        return 130
    if not outcome.record:  # another process tells
        return 0
    if as_json:
        print(json.dumps(outcome.record, indent=2, ensure_ascii=False))
    if outcome.before:
        say(f"{outcome.folder} was finished before: nothing to do.")
    training = outcome.record["training"]
    for heading, numbers in (("last steps", training["last"]), ("held out", training["held_out"])):
        if numbers:
            report.print(f"{heading}: {_numbers(numbers)}", markup=False, highlight=False, soft_wrap=True)
    say(f"written to {outcome.folder}")
    model = str(outcome.folder / MODEL) if "finetuned" in outcome.record else settings.model
    command = ["evictbench", "run", "--policy", settings.policy, "--budget", settings.budget.split(",")[0]]
    command += ["--model", model, "--suite", "fidelity"]
    if outcome.learned:
        command += ["--weights", str(outcome.folder)]
    say(f"next: {shlex.join(command)}")
    return 0


class TrainingLine:
    """Watches a training (`evictbench.train_loop.Watcher`): a live line on a terminal, plain lines now and then in a
    file or a pipe. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live: Progress | None = None
        self.bar: TaskID | None = None
        self.began: float | None = None
        self.first = 0
        self.written = time.monotonic()

    def __enter__(self) -> TrainingLine:
        if self.console.is_terminal and not self.console.quiet:
            from rich.progress import BarColumn, Progress, TextColumn

            self.live = Progress(
                BarColumn(bar_width=20), TextColumn("{task.description}"), console=self.console, transient=True
            )
            self.bar = self.live.add_task("starting", total=None)
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def phase(self, text: str) -> None:
        """Something begins that takes a while."""
        self._show(text, None, None, now=False)

    def planned(self, plan: Plan) -> None:
        """Say what is about to be trained."""
        if self.live is not None:
            self.live.stop()
        settings, checked = plan.settings, plan.checked
        budgets = ", ".join(map(str, checked.budgets))
        what = "scorer and model" if settings.finetune else "scorer, the model frozen"
        if plan.learner.finetune_only:
            what = "the model"
        cut = "one text each" if settings.no_pack else "packed"
        rows = (
            ("policy", f"{checked.chosen.label} ({what})"),
            ("model", f"{plan.model}, {settings.dtype}, device {settings.device}"),
            ("data", f"{', '.join(plan.names)}: {plan.blocks.documents} texts"),
            ("blocks", f"{plan.train_blocks} of up to {settings.length} tokens ({cut}), {len(plan.held_out)} held out"),
            ("steps", f"{settings.steps}, budget {budgets}, window {settings.window}, seed {settings.seed}"),
            ("folder", str(settings.out)),
        )
        self.console.print("train:", highlight=False)
        for heading, text in rows:
            self.console.print(f"  {heading:<7} {text}", markup=False, highlight=False, soft_wrap=True)
        if self.live is not None:
            self.live.start()

    def collected(self, done: int, total: int) -> None:
        """Features of so many blocks are on the disk."""
        self._show(f"features of {done} of {total} blocks", done, total, now=done == total)

    def step(self, line: Mapping[str, Any], steps: int) -> None:
        """A step is done."""
        now = time.monotonic()
        if self.began is None:
            self.began, self.first = now - line["seconds"], line["step"] - 1
        pace = (now - self.began) / (line["step"] - self.first)
        left = duration(pace * (steps - line["step"]))
        shown = {name: number for name, number in line.items() if name not in _NOT_SHOWN}
        text = f"step {line['step']} of {steps}  {_numbers(dict(list(shown.items())[:_SHOWN]))}  {left} left"
        self._show(text, line["step"], steps, now=line["step"] == steps)

    def _show(self, text: str, done: int | None, total: int | None, now: bool) -> None:
        if self.live is not None and self.bar is not None:
            self.live.update(self.bar, total=total, completed=done or 0, description=text)
        elif now or time.monotonic() - self.written >= EVERY:
            self.written = time.monotonic()
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _numbers(numbers: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if isinstance(value, (int, float)))
