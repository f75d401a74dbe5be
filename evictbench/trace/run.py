"""`evictbench trace`: speed and memory of policies side by side on one model, step by step.

Bad input is refused before weights are loaded. A finished cell is written at once, and the same command goes on with
the others.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import torch

from evictbench.errors import UserError, WriteFailed
from evictbench.generation.runner import ModelRunner
from evictbench.models import devices, load, machine, random_models
from evictbench.models.policy_weights import Weights
from evictbench.models.ready import ReadyPolicy, ready_policy
from evictbench.policy.budget import Budget
from evictbench.policy.ragged import RaggedPolicy
from evictbench.store.trace_files import MADE_BY
from evictbench.trace.cell import CellRunner, TraceText
from evictbench.trace.random_weights import RANDOM, random_weights
from evictbench.trace.settings import Checked, TraceCell, TraceSettings, check
from evictbench.trace.store import opened, read_finished

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from evictbench.policy.base import BasePolicy
    from evictbench.registry import ChosenPolicy


class Watcher(Protocol):
    """Shows a trace while it goes on."""

    def phase(self, text: str) -> None:
        """Something begins that takes a while."""

    def timed(self, text: str) -> None:
        """Something begins whose time is taken: nothing else should run meanwhile."""

    def cell_done(self, number: int, total: int, cell: TraceCell, line: Mapping[str, Any]) -> None:
        """A cell is measured and written. number: its own, from 1; line: its line of trace.json."""


@dataclass(frozen=True)
class TracePlan:
    """A trace, ready to run.

    model: the name in results. source: None for a model of random weights. policies: by label, with their weights;
    origins: by label, where those come from, in words. tokens: of the text, if one was given. made_by: what must be
    equal for a folder's trace to go on.
    """

    settings: TraceSettings
    checked: Checked
    model: str
    source: load.Source | None
    device: str
    dtype: str
    config: PretrainedConfig
    policies: Mapping[str, BasePolicy]
    origins: Mapping[str, str | None]
    tokens: Sequence[int] | None
    made_by: Mapping[str, Any]


def make_plan(settings: TraceSettings, phase: Callable[[str], None] = lambda _: None) -> TracePlan:
    """Check everything, and make the policies; raises UserError for what cannot be. phase: is told what takes long."""
    checked = check(settings)
    on_shape = random_models.is_shape(settings.model)
    source = None if on_shape else load.resolve(settings.model)
    phase("reading the model's config")
    if source is None:
        model, device = settings.model.lower(), random_models.resolve_device(settings.device)
        config = random_models.find_shape(settings.model).config()
    else:
        devices.check_device(settings.device)
        model, device = source.result_name, settings.device
        config = load.load_config(source, settings.trust_remote_code)
        load.check_supported(config)
        window, longest = load.context_window(config), checked.longest + settings.new_tokens
        if longest > window:
            raise UserError(
                f"A context of {checked.longest} tokens and {settings.new_tokens} new ones are longer than the window "
                f"of {model}, {window} tokens."
            )
    if settings.device == "mps":
        raise UserError("Traces are made on CUDA GPUs and on the CPU: there is no clock for --device mps.")
    dtype = load.resolve_dtype(config, settings.dtype)
    if on_shape:
        random_models.check_room(random_models.find_shape(settings.model), model, device, dtype)
    policies: dict[str, BasePolicy] = {}
    origins: dict[str, str | None] = {}
    for label, chosen in checked.chosen.items():
        phase(f"making the policy {label}")
        ready = _ready(settings, chosen, checked.weights.get(chosen.name), source, model, config)
        policies[label] = ready.policy
        origins[label] = _origin(ready.weights)
        _check_budgets(ready, checked.cells)
    phase("reading the text")
    tokens = None if settings.text is None or source is None else _tokens(settings, checked, source)
    phase("identifying the weights")
    made_by = {
        "model": model,
        "weights": f"random, seed {settings.seed}"
        if source is None
        else load.weights_hash(source, settings.trust_remote_code),
        "dtype": dtype,
        "prefill": settings.prefill,
        "chunk": settings.chunk,
        "new_tokens": settings.new_tokens,
        "retention": settings.retention,
        "seed": settings.seed,
        "text": None if settings.text is None else hashlib.sha256(settings.text.read_bytes()).hexdigest(),
        "versions": machine.versions(),
    }
    return TracePlan(settings, checked, model, source, device, dtype, config, policies, origins, tokens, made_by)


def finished_cells(plan: TracePlan) -> int:
    """How many cells of the plan the folder has already; raises UserError if it holds another trace."""
    before = read_finished(plan.settings.folder, plan.made_by)
    return 0 if before is None else len(plan.checked.cells) - len(_missing(plan, before["cells"]))


def trace(plan: TracePlan, watch: Watcher) -> Mapping[str, Any]:
    """Measure every cell that is not there yet; returns the content of trace.json afterwards."""
    before = read_finished(plan.settings.folder, plan.made_by)
    if before is not None and not _missing(plan, before["cells"]):
        return before
    watch.phase("loading the model")
    model = _load(plan)
    device = machine.device_names(model)
    about = {
        "model": plan.model,
        "device": device,
        "commit": machine.commit(),
        "machine": machine.hardware(model.device),
        MADE_BY: {**plan.made_by, "device": device},
        "policies": {
            label: {"settings": chosen.settings, "weights": plan.origins[label]}
            for label, chosen in plan.checked.chosen.items()
        },
    }
    with opened(plan.settings.folder, about) as folder:
        missing = _missing(plan, folder.cells)
        if not missing:
            return folder.about
        watch.timed("measuring the copy bandwidth")
        folder.about["copy_bandwidth"] = machine.copy_bandwidth(model.device)
        cell_runner = CellRunner(model, machine.MemoryUsage(machine.model_devices(model)))
        folder.about["read_weight_bytes"] = cell_runner.weight_bytes
        text = _text(plan)
        warmed: set[Any] = set()
        finished, total = len(plan.checked.cells) - len(missing), len(plan.checked.cells)
        for cell in missing:
            watch.timed(f"measuring {finished + 1}/{total} {cell}")
            runner = _model_runner(plan, model, cell)
            began = time.perf_counter()
            kind = (cell.policy, cell.budget, cell_runner.evicts_prompt(runner, cell))
            if kind not in warmed:
                warmed.add(kind)
                cell_runner.warm_up(runner, cell, text)
            result = cell_runner.run(runner, cell, text, _snapshot_every(plan, cell))
            number = 1 + max((int(done["cell"]) for done in folder.cells), default=-1)
            line = {
                "cell": number,
                **cell._asdict(),
                **result.summary,
                "wall_seconds": time.perf_counter() - began,
                "copy_bandwidth": folder.about["copy_bandwidth"],
                "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            common = {"cell": number, "policy": cell.policy, "budget": cell.budget}
            try:
                folder.add(line, [common | row for row in result.steps], [common | row for row in result.snapshots])
            except WriteFailed as error:
                raise WriteFailed(f"{error} {finished} finished cells are in {plan.settings.folder}.") from error
            finished += 1
            watch.cell_done(finished, total, cell, line)
        return folder.about


def _missing(plan: TracePlan, cells: Sequence[Mapping[str, Any]]) -> list[TraceCell]:
    done = {tuple(cell[name] for name in TraceCell._fields) for cell in cells}
    return [cell for cell in plan.checked.cells if tuple(cell) not in done]


def _load(plan: TracePlan) -> PreTrainedModel:
    if plan.source is None:
        return random_models.build(
            random_models.find_shape(plan.settings.model), plan.device, plan.dtype, plan.settings.seed
        )
    return load.load_model(plan.source, plan.device, plan.dtype, plan.settings.trust_remote_code)


def _model_runner(plan: TracePlan, model: PreTrainedModel, cell: TraceCell) -> ModelRunner:
    budget = None if cell.budget is None else Budget.parse(cell.budget)
    policy = plan.policies[cell.policy]
    return ModelRunner(model, policy, budget, prefill=plan.settings.prefill, chunk=plan.settings.chunk)


def _snapshot_every(plan: TracePlan, cell: TraceCell) -> int | None:
    """Tokens between two snapshots; None but in one cell of each policy and budget: longest context, fewest rows."""
    wanted = cell.context == plan.checked.longest and cell.rows == plan.checked.fewest and cell.budget is not None
    return plan.settings.retention if wanted else None


def _text(plan: TracePlan) -> TraceText:
    """The text's own tokens, or tokens drawn from the seed alone, whatever the policy and context."""
    new = plan.settings.new_tokens
    if plan.tokens is not None:
        tokens = plan.tokens
        return TraceText(tokens, lambda context, rows: [[token] * rows for token in tokens[context : context + new]])
    vocabulary = plan.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(plan.settings.seed)
    prompt = torch.randint(vocabulary, (plan.checked.longest,), generator=generator).tolist()

    def decoded(context: int, rows: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(plan.settings.seed + 1)
        tokens: list[list[int]] = torch.randint(vocabulary, (new, rows), generator=generator).tolist()
        return tokens

    return TraceText(prompt, decoded)


def _tokens(settings: TraceSettings, checked: Checked, source: load.Source) -> list[int]:
    assert settings.text is not None
    try:
        text = settings.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{settings.text} (--text) cannot be read as UTF-8 text.") from None
    tokenizer = load.load_tokenizer(source, settings.trust_remote_code)
    tokens: list[int] = tokenizer(text)["input_ids"]
    needed = checked.longest + settings.new_tokens
    if len(tokens) < needed:
        raise UserError(
            f"{settings.text} has {len(tokens)} tokens, and the longest context with the new ones takes {needed}: give "
            "a longer text, or smaller --contexts."
        )
    return tokens


def _ready(
    settings: TraceSettings,
    chosen: ChosenPolicy,
    where: str | None,
    source: load.Source | None,
    model: str,
    config: PretrainedConfig,
) -> ReadyPolicy:
    """A policy that can run on the model. A learned one has random weights on a model of random weights, unless `where`
    names some."""
    weights: str | Weights | None = where
    if source is None and where is None and chosen.policy.learned:
        weights = random_weights(chosen.policy(chosen.config), config)
    return ready_policy(
        chosen,
        config,
        model=model,
        model_sha256=lambda: model if source is None else load.weights_hash(source, settings.trust_remote_code),
        weights=weights,
        model_argument=settings.model,
        model_folder=lambda: None if source is None else load.whole_folder(source, settings.trust_remote_code),
    )


def _origin(weights: Weights | None) -> str | None:
    """Where weights come from, in words."""
    return None if weights is None else RANDOM if weights.origin == RANDOM else str(weights)


def _check_budgets(ready: ReadyPolicy, cells: Sequence[TraceCell]) -> None:
    for cell in cells:
        if cell.policy != ready.label or cell.budget is None:
            continue
        try:
            ready.check_budget(Budget.parse(cell.budget), cell.context)
        except UserError as error:
            if ready.weights is None or ready.weights.origin != RANDOM or not isinstance(ready.policy, RaggedPolicy):
                raise
            raise UserError(
                f"{ready.label} cannot be traced with random weights, as what it keeps is what its training made of "
                f"it: give --weights {ready.policy.name}=FOLDER, or leave it out."
            ) from error
