"""`evictbench train`: show a training's progress and its result, where its weights are, and what to type next."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any

from evictbench.cli.progress import LOOKING
from evictbench.terminal import waiting
from evictbench.terminal.console import command, console_for, describe, output_consoles, say, silence_libraries
from evictbench.terminal.waiting import Waiting, duration
from evictbench.train.checkpoint import kept_steps
from evictbench.train.settings import STORE, check

if TYPE_CHECKING:
    from rich.console import Console

    from evictbench.train.checkpoint import kept_steps
    from evictbench.train.plan import TrainPlan
from evictbench.train.settings import TrainSettings

_SHOWN = 4
"""How many numbers of a step the line shows: the first ones that the learner gives."""

_NOT_SHOWN = ("step", "tokens", "seconds", "budget", "lr", "grad_norm", "model_grad_norm")


def train_and_show(settings: TrainSettings, as_json: bool, quiet: bool = False) -> int:
    """Train on the terminal. Returns the exit code.

    Results go to stdout, progress to stderr. quiet: neither progress nor hints.
    """
    silence_libraries()
    report, hints = output_consoles(as_json, quiet)
    try:
        with TrainingLine(console_for(stderr=True, quiet=quiet)) as progress:
            progress.phase(LOOKING)
            check(settings)  # before anything heavy is imported
            from evictbench.train.run import MODEL, train

            outcome = train(settings, progress)
    except KeyboardInterrupt:
        kept = kept_steps(settings.out)
        print(
            f"Stopped; {kept} of {settings.steps} steps are kept in {settings.out}. To go on: {command()}",
            file=sys.stderr,
        )
        return 130
    if not outcome.record:  # another process of this training reports
        return 0
    if as_json:
        print(json.dumps(outcome.record, indent=2, ensure_ascii=False))
    if outcome.before:
        say(hints, f"{outcome.folder} was finished before: nothing to do.")
    training = outcome.record["training"]
    for heading, numbers in (("last steps", training["last"]), ("held out", training["held_out"])):
        if numbers:
            say(report, f"{heading}: {_numbers(numbers)}")
    say(hints, f"written to {outcome.folder}")
    model = str(outcome.folder / MODEL) if "finetuned" in outcome.record else settings.model
    next_command = ["evictbench", "run", "--policy", settings.policy, "--budget", settings.budget.split(",")[0]]
    next_command += ["--model", model, "--suite", "fidelity"]
    if outcome.learned:
        next_command += ["--weights", str(outcome.folder)]
    say(hints, f"next: {shlex.join(next_command)}")
    return 0


class TrainingLine:
    """Follows a training (`evictbench.train.loop.Watcher`): a live line on a terminal, a plain line now and then in a
    file or a pipe. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.waiting = Waiting(console)
        self.began: float | None = None
        self.first = 0
        self.written = time.monotonic()

    def __enter__(self) -> TrainingLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.waiting.end()

    def phase(self, text: str) -> None:
        """A step begins that takes a while."""
        self.waiting.begin(text)

    def planned(self, plan: TrainPlan) -> None:
        """Write what is about to be trained."""
        self.waiting.end()
        settings, checked = plan.settings, plan.checked
        budgets = ", ".join(map(str, checked.budgets))
        trained = "scorer and model" if settings.finetune else "scorer, the model frozen"
        if plan.learner.finetune_only:
            trained = "the model"
        packing = "one text each" if settings.no_pack else "packed"
        rate = f"{settings.lr:g}" + (f", of the model {settings.model_lr:g}" if settings.finetune else "")
        rows = (
            ("policy", f"{checked.chosen.label} ({trained})"),
            ("recipe", ", ".join(f"{name}={value}" for name, value in asdict(checked.recipe).items())),
            ("model", f"{plan.model}, {plan.dtype}, device {settings.device}"),
            ("data", f"{', '.join(plan.names)}: {plan.blocks.documents} texts"),
            (
                "blocks",
                f"{plan.train_blocks} of up to {settings.length} tokens ({packing}), {len(plan.held_out)} held out",
            ),
            ("steps", f"{settings.steps}, budget {budgets}, window {settings.window}, seed {settings.seed}"),
            ("batch", f"{settings.batch_size} blocks a pass, {settings.accumulate} passes a step, rate {rate}"),
            ("saved", f"every {settings.save_every} steps, weights in {settings.weights_dtype}"),
            ("store", str(settings.store or settings.out / STORE)),
            ("folder", str(settings.out)),
        )
        describe(self.console, "train", [(heading, (text,)) for heading, text in rows])

    def collected(self, done: int, total: int) -> None:
        """The features of `done` of `total` blocks are on the disk."""
        self._show(f"features of {done} of {total} blocks", done, total, now=done == total)

    def step(self, line: Mapping[str, Any], steps: int) -> None:
        """A step is done. line: its number, seconds and losses. steps: how many there are in all."""
        now = time.monotonic()
        if self.began is None:
            self.began, self.first = now - line["seconds"], line["step"] - 1
        pace = (now - self.began) / (line["step"] - self.first)
        left = duration(pace * (steps - line["step"]))
        shown = {name: number for name, number in line.items() if name not in _NOT_SHOWN}
        text = f"step {line['step']} of {steps}  {_numbers(dict(list(shown.items())[:_SHOWN]))}  {left} left"
        self._show(text, line["step"], steps, now=line["step"] == steps)

    def _show(self, text: str, done: int, total: int, now: bool) -> None:
        self.waiting.count(text, done, total)
        if not self.waiting.on_screen and (now or time.monotonic() - self.written >= waiting.EVERY):
            self.written = time.monotonic()
            say(self.console, text)


def _numbers(numbers: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if isinstance(value, (int, float)))
