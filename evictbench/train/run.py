"""`evictbench train`: from options to a folder of weights with its card, log and curves."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError, WriteFailed
from evictbench.models import load, machine, policy_weights
from evictbench.models.fine_tuned import record_base
from evictbench.store.files import saving, write_json
from evictbench.train import checkpoint
from evictbench.train.loop import Trained, Trainer, Watcher
from evictbench.train.plan import TrainPlan, make_plan
from evictbench.train.settings import RECORD, TrainSettings, check

if TYPE_CHECKING:
    from accelerate import Accelerator

CURVES = "curves.png"

MODEL = "model"
"""The folder of the fine-tuned model, inside the training's own."""

_NOT_CURVES = ("step", "tokens", "seconds", "budget")
"""Entries of the log that are not drawn, and whose first and last values the card does not state."""

_SMOOTHED_FROM = 50
"""Steps up to which a curve is drawn as it is; a longer one gets its running mean on top."""

_ENDS = 0.05
"""The share of the steps at each end over which the card averages the losses."""


@dataclass(frozen=True)
class Outcome:
    """The result of a training.

    record: the card's data, empty in all processes but the first. learned: whether the policy takes weights. before:
    whether the training was finished already, so that nothing was done.
    """

    folder: Path
    record: Mapping[str, Any]
    learned: bool
    before: bool = False


def train(settings: TrainSettings, watch: Watcher) -> Outcome:
    """Train, from the folder's last checkpoint if it has one, and save the weights; a finished training is left alone.

    Raises UserError for bad input, RunFailed for a loss that is not a number.
    """
    check(settings)
    accelerator = _accelerator(settings)
    watch = watch if accelerator.is_main_process else _NoWatcher()
    with _held(settings.out, accelerator):
        # One process cuts the texts into blocks, and the others find them there.
        with accelerator.main_process_first():
            plan = make_plan(settings, accelerator.num_processes, watch.phase)
        finished = _claim(settings.out, plan, accelerator)
        accelerator.wait_for_everyone()
        watch.planned(plan)
        if finished is not None:
            return Outcome(settings.out, finished, plan.checked.policy.learned, before=True)
        trainer = Trainer(plan, accelerator, watch)
        record: Mapping[str, Any] = {}
        try:
            trained = trainer.run()
            if accelerator.is_main_process:
                watch.phase("saving")
                record = _save(plan, trained, machine.device_names(trainer.model) if trainer.has_model else "cpu")
        except WriteFailed as error:
            kept = checkpoint.kept_steps(settings.out)
            raise WriteFailed(f"{error} {kept} of {settings.steps} steps are in {settings.out}.") from error
        accelerator.wait_for_everyone()
        return Outcome(settings.out, record, plan.checked.policy.learned)


def plot_curves(lines: Sequence[Mapping[str, Any]], file: Path, title: str) -> None:
    """Draw each number of the log over the steps, in a panel of its own. lines: of the log."""
    os.environ["MPLBACKEND"] = "agg"  # whatever the environment says: another backend may not even be there
    import matplotlib.pyplot as plt
    import numpy as np

    names = [name for name in dict.fromkeys(name for line in lines for name in line) if name not in _NOT_CURVES]
    if not names:
        return
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 2.6 * rows), squeeze=False)
    for name, axis in zip(names, axes.flat, strict=False):
        points = [(line["step"], line[name]) for line in lines if name in line]
        steps, numbers = np.array([step for step, _ in points]), np.array([number for _, number in points])
        window = len(numbers) // _SMOOTHED_FROM
        axis.plot(steps, numbers, linewidth=0.8, alpha=0.35 if window > 1 else 1.0, color="tab:blue")
        if window > 1:
            mean = np.convolve(numbers, np.ones(window) / window, mode="valid")
            axis.plot(steps[window - 1 :], mean, linewidth=1.5, color="tab:blue")
        axis.set_title(name.replace("_", " "), fontsize=10)
        axis.tick_params(labelsize=8)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel("step", fontsize=9)
    figure.tight_layout()
    unfinished = file.with_name(f".{file.name}-unfinished.png")
    with saving(file):
        figure.savefig(unfinished, dpi=120)
        unfinished.replace(file)
    plt.close(figure)


class _NoWatcher:
    """The watcher of all processes but the first: it shows nothing."""

    def phase(self, text: str) -> None:
        """Show nothing."""

    planned = collected = step = lambda self, *_: None


def _accelerator(settings: TrainSettings) -> Accelerator:
    import torch
    from accelerate import Accelerator

    on_cpu = settings.device == "cpu" or not torch.cuda.is_available()
    accelerator = Accelerator(mixed_precision="no" if on_cpu else "bf16", cpu=on_cpu)
    if accelerator.num_processes > 1 and settings.device not in ("auto", "cpu"):
        raise UserError(f"Several processes each have a device of their own: leave out --device {settings.device}.")
    return accelerator


@contextlib.contextmanager
def _held(out: Path, accelerator: Accelerator) -> Iterator[None]:
    """Hold the folder: another training cannot write to it meanwhile."""
    if not accelerator.is_main_process:
        yield
        return
    from filelock import FileLock, Timeout

    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"Another training is writing to {out}: wait for it to end, or stop it.") from None
    try:
        yield
    finally:
        lock.release()


def _claim(out: Path, plan: TrainPlan, accelerator: Accelerator) -> dict[str, Any] | None:
    """Write the folder's record, or check that its training is the same; returns the card's data of a finished one.

    Raises UserError where the folder holds another training.
    """
    file = out / RECORD
    identity = json.loads(json.dumps(plan.identity, default=str))
    if file.is_file():
        before = json.loads(file.read_text(encoding="utf-8"))["identity"]
        differ = sorted(name for name in {*before, *identity} if before.get(name) != identity.get(name))
        if differ:
            raise UserError(
                f"{out} holds a training that differs in {', '.join(differ)}: give the same options to go on with it, "
                "or name another folder."
            )
    elif accelerator.is_main_process:
        write_json(file, {"identity": identity, "commit": machine.commit(), **machine.versions()})
    if not (out / policy_weights.CONFIG).is_file():
        return None
    card: dict[str, Any] = json.loads((out / policy_weights.CONFIG).read_text(encoding="utf-8"))
    return card


def _save(plan: TrainPlan, trained: Trained, device: str) -> dict[str, Any]:
    """Write weights, card, curves, and the fine-tuned model where there is one; returns the card's data."""
    settings, learner, checked = plan.settings, plan.learner, plan.checked
    out = settings.out
    lines = checkpoint.read_log(out)
    plot_curves(lines, out / CURVES, f"{checked.chosen.label} on {plan.model}")
    finetuned = {}
    if trained.student is not None:
        finetuned = {"finetuned": {"sha256": _save_model(plan, trained), "folder": MODEL}}
    learner_card = dict(learner.card())
    notes = list(learner_card.pop("notes", []))
    card = {
        "settings": checked.chosen.settings | {"window": settings.window} | asdict(checked.recipe),
        "changed_settings": checked.chosen.changed_settings,
        "transferable": bool(checked.policy.transferable),
        "base_model": {"name": plan.model, "sha256": plan.sha256, "shape": policy_weights.shape_data(plan.shape)},
        **finetuned,
        "training": _training_record(plan, trained, lines, device),
        "calibration": dict(trained.calibration),
        **learner_card,
        "notes": notes,
    }
    half = settings.weights_dtype == "float16"
    name, variant = checked.chosen.name, policy_weights.variant_of(checked.policy)
    policy_weights.save(out, name, variant, learner.export(), card, half=half)
    checkpoint.clear(out)
    return {"policy": name, "variant": variant, **card}


def _training_record(plan: TrainPlan, trained: Trained, lines: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """The card's part about the training: how the weights were made, and the log's first and last numbers."""
    settings = plan.settings
    ends = max(1, round(_ENDS * len(lines)))
    averaged = [name for name in lines[-1] if name not in (*_NOT_CURVES, "lr")] if lines else []
    processes = plan.identity["processes"]
    return {
        "data": list(plan.names),
        "data_sha256": plan.blocks.sha256,
        "documents": plan.blocks.documents,
        "blocks": plan.train_blocks,
        "held_out_blocks": len(plan.held_out),
        "length": settings.length,
        "packed": not settings.no_pack,
        "steps": settings.steps,
        "blocks_per_step": settings.batch_size * settings.accumulate * processes,
        "tokens": trained.tokens,
        "seconds": round(sum(line["seconds"] for line in lines), 1),
        "budgets": list(plan.checked.budgets),
        "window": settings.window,
        "finetune": settings.finetune,
        "lr": settings.lr,
        "model_lr": settings.model_lr if settings.finetune else None,
        "optimiser": "AdamW, betas 0.9 and 0.95, weight decay 1e-4, gradients clipped to norm 1",
        "seed": settings.seed,
        "dtype": settings.dtype,
        "device": device,
        "processes": processes,
        "first": {name: _mean(lines[:ends], name) for name in averaged},
        "last": {name: _mean(lines[-ends:], name) for name in averaged},
        "held_out": dict(trained.held_out),
        "finished": time.strftime("%Y-%m-%d", time.gmtime()),
        **machine.versions(),
        "commit": machine.commit(),
    }


def _mean(lines: list[dict[str, Any]], name: str) -> float | None:
    numbers = [line[name] for line in lines if name in line]
    return fmean(numbers) if numbers else None


def _save_model(plan: TrainPlan, trained: Trained) -> str:
    """Write the fine-tuned model beside the weights, in the base model's dtype; returns its `weights_hash`."""
    from transformers.utils import logging

    assert trained.student is not None
    assert trained.state is not None
    folder = plan.settings.out / MODEL
    model = trained.student.model
    base = load.load_config(plan.source, plan.settings.trust_remote_code)
    dtype = getattr(base, "dtype", None) or model.dtype
    state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in trained.state.items()}
    model.config.dtype = dtype
    record_base(model.config, plan.model, plan.sha256, plan.checked.chosen.label)
    logging.disable_progress_bar()
    with saving(folder):
        model.save_pretrained(folder, state_dict=state)
        plan.tokenizer.save_pretrained(folder)
    logging.enable_progress_bar()
    return load.weights_hash(load.resolve(str(folder.absolute())), plan.settings.trust_remote_code)
