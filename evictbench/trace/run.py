"""`evictbench trace`: speed and memory of policies side by side on one model, step by step.

Everything that can be refused is refused before weights are loaded. A finished cell is written at once, and the same
command goes on with the others.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from evictbench.errors import UserError
from evictbench.models import devices, load, machine, random_models
from evictbench.store.trace_files import MADE_BY
from evictbench.trace.random_weights import RANDOM, equip
from evictbench.trace.settings import Cell, Checked, Settings, check
from evictbench.trace.store import opened, read_finished

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from evictbench.policy.base import Policy
    from evictbench.policy.step import ModelShape
    from evictbench.trace.cell import Text


class Watcher(Protocol):
    """Whoever shows a trace while it goes on."""

    def phase(self, text: str) -> None:
        """Something begins that takes a while."""

    def timed(self, text: str) -> None:
        """Something begins whose time is taken: nothing else should run meanwhile."""

    def cell_done(self, number: int, of: int, cell: Cell, found: Mapping[str, Any]) -> None:
        """A cell is measured and on the disk: its number, of how many, which, and what was found."""


@dataclass(frozen=True)
class Plan:
    """A trace, ready to run. policies: by label, with their weights; origins: what those are, in words.

    tokens: of the text, if one was given. model: the name in results.
    """

    settings: Settings
    checked: Checked
    model: str
    source: load.Source | None
    device: str
    dtype: str
    config: PretrainedConfig
    policies: Mapping[str, Policy]
    origins: Mapping[str, str | None]
    tokens: Sequence[int] | None
    made_by: Mapping[str, Any]


def make_plan(settings: Settings, phase: Callable[[str], None] = lambda _: None) -> Plan:
    """Check everything; UserError says what cannot be. `phase` hears what takes a while."""
    from evictbench.policy.step import ModelShape

    checked = check(settings)
    on_shape = random_models.is_shape(settings.model)
    source = None if on_shape else load.resolve(settings.model)
    phase("reading the model's config")
    if source is None:
        model, device = settings.model.lower(), random_models.device_for(settings.device)
        config = random_models.named(settings.model).config()
    else:
        devices.check_device(settings.device)
        model, device = source.name, settings.device
        if source.kind == "local":
            model = Path(source.name).expanduser().resolve().name
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
    dtype = load.own_dtype(config) if settings.dtype == "auto" else settings.dtype
    if on_shape:
        random_models.check_room(random_models.named(settings.model), model, device, dtype)
    policies, origins = {}, {}
    for label, chosen in checked.chosen.items():
        phase(f"making the policy {label}")
        policies[label], origins[label] = equip(chosen, checked.weights.get(chosen.name), source, model, config)
        _check_budgets(label, policies[label], origins[label], checked.cells, ModelShape.of(config), model)
    phase("reading the text")
    tokens = None if settings.text is None or source is None else _tokens(settings, checked, source)
    phase("identifying the weights")
    made_by = {
        "model": model,
        "weights": f"random, seed {settings.seed}" if source is None else load.weights_hash(source),
        "dtype": dtype,
        "prefill": settings.prefill,
        "chunk": settings.chunk,
        "new_tokens": settings.new_tokens,
        "retention": settings.retention,
        "seed": settings.seed,
        "text": None if settings.text is None else hashlib.sha256(settings.text.read_bytes()).hexdigest(),
        "versions": machine.versions(),
    }
    return Plan(settings, checked, model, source, device, dtype, config, policies, origins, tokens, made_by)


def finished_cells(plan: Plan) -> int:
    """How many of its cells are there from before; UserError for a folder of another trace."""
    before = read_finished(plan.settings.folder, plan.made_by)
    return 0 if before is None else len(plan.checked.cells) - len(_missing(plan, before["cells"]))


def trace(plan: Plan, watch: Watcher) -> Mapping[str, Any]:
    """Measure every cell that is not there yet; what trace.json says afterwards."""
    from evictbench.models.machine import Memory, copy_bandwidth, describe, devices_of
    from evictbench.trace.cell import Measuring

    before = read_finished(plan.settings.folder, plan.made_by)
    if before is not None and not _missing(plan, before["cells"]):
        return before
    watch.phase("loading the model")
    model = _load(plan)
    home = model.device
    device = machine.device_of(model)
    about = {
        "model": plan.model,
        "device": device,
        "commit": machine.commit(),
        "machine": describe(home),
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
        folder.about["copy_bandwidth"] = copy_bandwidth(home)
        measuring = Measuring(model, Memory(devices_of(model)))
        folder.about["read_weight_bytes"] = measuring.weight_bytes
        text = _text(plan)
        warmed: set[Any] = set()
        number_done = len(plan.checked.cells) - len(missing)
        for cell in missing:
            watch.timed(f"measuring {number_done + 1}/{len(plan.checked.cells)} {cell}")
            feeder = _feeder(plan, model, cell)
            began = time.perf_counter()
            kind = (cell.policy, cell.budget, measuring.evicts_prompt(feeder, cell))
            if kind not in warmed:
                warmed.add(kind)
                measuring.warm(feeder, cell, text)
            found = measuring.measure(feeder, cell, text, _looks_at(plan, cell))
            number = 1 + max((int(done["cell"]) for done in folder.cells), default=-1)
            line = {
                "cell": number,
                **cell._asdict(),
                **found.about,
                "wall_seconds": time.perf_counter() - began,
                "copy_bandwidth": folder.about["copy_bandwidth"],
                "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            same = {"cell": number, "policy": cell.policy, "budget": cell.budget}
            folder.add(line, [same | row for row in found.steps], [same | row for row in found.looks])
            number_done += 1
            watch.cell_done(number_done, len(plan.checked.cells), cell, line)
        return folder.about


def _missing(plan: Plan, cells: Sequence[Mapping[str, Any]]) -> list[Cell]:
    done = {tuple(cell[name] for name in Cell._fields) for cell in cells}
    return [cell for cell in plan.checked.cells if tuple(cell) not in done]


def _load(plan: Plan) -> PreTrainedModel:
    if plan.source is None:
        return random_models.build(
            random_models.named(plan.settings.model), plan.device, plan.dtype, plan.settings.seed
        )
    return load.load_model(plan.source, plan.device, plan.dtype, plan.settings.trust_remote_code)


def _feeder(plan: Plan, model: PreTrainedModel, cell: Cell) -> Any:
    from evictbench.generation.runner import Feeder
    from evictbench.policy.budget import Budget

    budget = None if cell.budget is None else Budget.parse(cell.budget)
    policy = plan.policies[cell.policy]
    return Feeder(model, policy, budget, prefill=plan.settings.prefill, chunk=plan.settings.chunk)


def _looks_at(plan: Plan, cell: Cell) -> int | None:
    """Retention is looked at in one cell of each policy and budget: the longest context, the fewest rows."""
    here = cell.context == plan.checked.longest and cell.rows == plan.checked.fewest and cell.budget is not None
    return plan.settings.retention if here else None


def _text(plan: Plan) -> Text:
    """The text's own tokens, or tokens drawn from the seed: the same ones whatever the policy and context."""
    import torch

    from evictbench.trace.cell import Text

    new = plan.settings.new_tokens
    if plan.tokens is not None:
        own = plan.tokens
        return Text(own, lambda context, rows: [[token] * rows for token in own[context : context + new]])
    vocabulary = plan.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(plan.settings.seed)
    prompt = torch.randint(vocabulary, (plan.checked.longest,), generator=generator).tolist()

    def following(context: int, rows: int) -> list[list[int]]:
        drawn = torch.Generator().manual_seed(plan.settings.seed + 1)
        found: list[list[int]] = torch.randint(vocabulary, (new, rows), generator=drawn).tolist()
        return found

    return Text(prompt, following)


def _tokens(settings: Settings, checked: Checked, source: load.Source) -> list[int]:
    assert settings.text is not None
    try:
        text = settings.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{settings.text} (--text) cannot be read as UTF-8 text.") from None
    tokenizer = load.load_tokenizer(source, settings.trust_remote_code)
    tokens: list[int] = tokenizer(text)["input_ids"]
    wanted = checked.longest + settings.new_tokens
    if len(tokens) < wanted:
        raise UserError(
            f"{settings.text} has {len(tokens)} tokens, and the longest context with the new ones takes {wanted}: give "
            "a longer text, or smaller --contexts."
        )
    return tokens


def _check_budgets(
    label: str, policy: Policy, origin: str | None, cells: Sequence[Cell], shape: ModelShape, model: str
) -> None:
    from evictbench.cache.paged.cache import allotted
    from evictbench.policy.budget import Budget

    for cell in cells:
        if cell.policy != label or cell.budget is None:
            continue
        budget = Budget.parse(cell.budget)
        policy.check_budget(budget)
        least = policy.minimum_budget(shape)
        if budget.at(cell.context, cell.context) < least:
            raise UserError(
                f"{label} needs a budget of at least {least} entries on {model} (what it protects, the state it is "
                f"charged for, and one more), and {budget} of {cell.context} tokens is less."
            )
        if not policy.ragged:
            continue
        try:
            allotted(policy, budget, cell.context)
        except UserError as error:
            if origin != RANDOM:
                raise
            raise UserError(
                f"{label} cannot be traced with random weights, as what it keeps is what its training made of it: give "
                f"--weights {policy.name}=FOLDER, or leave it out."
            ) from error
