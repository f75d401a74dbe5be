"""From what was asked to what will run: everything that can be checked, checked before a weight is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictbench import devices, models, records, tasks
from evictbench.errors import UserError
from evictbench.policy import ModelShape
from evictbench.settings import Checked, Settings, check

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from evictbench.policy import Policy
    from evictbench.suite import PreparedSuite


@dataclass(frozen=True)
class Planned:
    """One prompt and how many tokens may answer it."""

    prompt: tasks.Prompt
    max_new_tokens: int

    @property
    def key(self) -> records.Key:
        """Task, document, repeat."""
        return self.prompt.task, self.prompt.doc_id, 0

    @property
    def compressible(self) -> int:
        """The tokens that a budget's share is of: the context if the question is unseen, else the prompt."""
        return len(self.prompt.ids) if self.prompt.border is None else self.prompt.border


@dataclass(frozen=True)
class Plan:
    """One cell, ready to run: nothing is left to check, and no weight is loaded.

    model: the name in results. chat: whether prompts are in the chat template.
    prompts go round the tasks, so that a run stopped early has some of each.
    identity: what the fingerprint, and with it the folder, is made of.
    cut: task to how many of its answers have less room in the window than its card gives.
    """

    settings: Settings
    checked: Checked
    policy: Policy
    source: models.Source
    model: str
    dtype: str
    chat: bool
    tokenizer: PreTrainedTokenizerBase
    prepared: PreparedSuite
    tasks: Mapping[str, ConfigurableTask]
    prompts: tuple[Planned, ...]
    identity: Mapping[str, Any]
    folder: Path
    cut: Mapping[str, int]

    @property
    def asked(self) -> dict[str, int]:
        """Task to the samples asked for."""
        counts = dict.fromkeys(self.tasks, 0)
        for planned in self.prompts:
            counts[planned.prompt.task] += 1
        return counts


def make_plan(settings: Settings, phase: Callable[[str], None] = lambda _: None) -> Plan:
    """Check everything and make the prompts; UserError says what cannot be. `phase` hears what takes a while.

    In this order: names, numbers, budget, folders; the model's tokenizer and config; the suite's data; its prompts.
    """
    checked = check(settings)
    source = models.resolve(settings.model)
    model = Path(source.name).expanduser().resolve().name if source.kind == "local" else source.name

    phase("reading the model's config and tokenizer")
    devices.check_device(settings.device)
    config = models.load_config(source, settings.trust_remote_code)
    tokenizer = models.load_tokenizer(source, settings.trust_remote_code)
    chat = _chat(settings, tokenizer)
    policy = checked.chosen.policy(checked.chosen.config)
    least = policy.minimum_budget(ModelShape.of(config))
    if checked.budget is not None and checked.budget.tokens is not None:
        _check_least(checked, checked.budget.tokens, least, model)
    window = models.context_window(config)
    if checked.context is not None and checked.context > window:
        raise UserError(f"A context of {checked.context} tokens is longer than the window of {model}, {window} tokens.")
    models.check_supported(config)

    phase("making the prompts")
    prepared = _prepare(settings, checked, tokenizer, chat)
    loaded = tasks.load_tasks(checked.suite, prepared)
    prompts, cut = _prompts(settings, checked, loaded, tokenizer, chat, window, model)
    if checked.budget is not None:
        shortest = min(planned.compressible for planned in prompts)
        _check_least(checked, checked.budget.at(shortest, shortest), least, model)

    phase("identifying the weights")
    dtype = settings.dtype if settings.dtype != "auto" else _own_dtype(config)
    identity = _identity(settings, checked, prepared, loaded, policy, chat) | {
        "model": model,
        "weights": models.weights_hash(source),
        "dtype": dtype,
    }
    folder = records.run_folder(
        settings.out,
        checked.suite.name,
        model,
        checked.chosen.label,
        identity["budget"],
        records.fingerprint(identity),
    )
    return Plan(
        settings=settings,
        checked=checked,
        policy=policy,
        source=source,
        model=model,
        dtype=dtype,
        chat=chat,
        tokenizer=tokenizer,
        prepared=prepared,
        tasks=loaded,
        prompts=prompts,
        identity=identity,
        folder=folder,
        cut=cut,
    )


def _chat(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> bool:
    found = tasks.has_chat_template(tokenizer)
    if settings.chat == "on" and not found:
        raise UserError(f"The tokenizer of {settings.model} has no chat template: use --chat off.")
    return found and settings.chat != "off"


def _check_least(checked: Checked, entries: int, least: int, model: str) -> None:
    if entries < least:
        budget = checked.budget
        given = f"{budget} is given" if budget and budget.tokens else f"{budget} of the shortest text is {entries}"
        raise UserError(
            f"{checked.chosen.label} needs a budget of at least {least} entries on {model} (what it protects, "
            f"the state it is charged for, and one more), and {given}."
        )


def _prepare(settings: Settings, checked: Checked, tokenizer: PreTrainedTokenizerBase, chat: bool) -> PreparedSuite:
    from evictbench.suite import SuiteRequest

    request = SuiteRequest(
        tokenizer=tokenizer,
        chat=chat,
        tasks=checked.tasks,
        context=checked.context,
        limit=checked.limit,
        seed=settings.seed,
        data_dir=settings.data_dir,
        haystack=settings.haystack,
    )
    prepared = checked.suite.prepare(request)
    if not prepared.tasks:
        reasons = " ".join(prepared.skipped.values())
        raise UserError(f"No task of {checked.suite.name} can be run. {reasons}".strip())
    return prepared


def _prompts(
    settings: Settings,
    checked: Checked,
    loaded: Mapping[str, ConfigurableTask],
    tokenizer: PreTrainedTokenizerBase,
    chat: bool,
    window: int,
    model: str,
) -> tuple[tuple[Planned, ...], dict[str, int]]:
    """Every prompt with the room for its answer, and the answers that have less room than the card gives."""
    context_field = checked.suite.context_field if checked.question == "unseen" else None
    limit = settings.max_new_tokens
    planned: list[Planned] = []
    cut: dict[str, int] = {}
    for name, task in loaded.items():
        for prompt in tasks.prompts(task, tokenizer, chat=chat, context_field=context_field, limit=checked.limit):
            room = window - len(prompt.ids)
            wanted = int(limit) if limit.isdigit() else prompt.max_new_tokens
            allowed = min(wanted, room) if limit == "auto" else wanted
            if not 1 <= allowed <= room:
                raise UserError(
                    f"The prompt of {name}, sample {prompt.doc_id}, has {len(prompt.ids)} tokens; with {wanted} "
                    f"for the answer that is more than the window of {model}, {window} tokens."
                )
            if allowed < prompt.max_new_tokens:
                cut[name] = cut.get(name, 0) + 1
            planned.append(Planned(prompt, allowed))
    planned.sort(key=lambda one: one.prompt.doc_id)
    return tuple(planned), cut


def _identity(
    settings: Settings,
    checked: Checked,
    prepared: PreparedSuite,
    loaded: Mapping[str, ConfigurableTask],
    policy: Policy,
    chat: bool,
) -> dict[str, Any]:
    mode = policy.prefill if settings.prefill == "native" else settings.prefill
    return {
        "suite": checked.suite.name,
        "tasks": {name: tasks.version_of(task) for name, task in loaded.items()},
        "data": dict(prepared.data),
        "policy": {
            "name": checked.chosen.name,
            "label": checked.chosen.label,
            "settings": checked.chosen.settings,
            "source": checked.chosen.source,
        },
        "budget": None if checked.budget is None else str(checked.budget),
        "protocol": {
            "context": checked.context,
            "question": checked.question,
            "chat": chat,
            "max_new_tokens": settings.max_new_tokens,
            "prefill": settings.prefill,
            # The chunk changes what a bounded prefill evicts, and nothing else.
            "chunk": settings.chunk if mode == "bounded" and checked.budget is not None else None,
        },
        "seed": settings.seed,
    }


def _own_dtype(config: PretrainedConfig) -> str:
    text = config.get_text_config(decoder=True)
    dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None) or "float32"
    return str(dtype).removeprefix("torch.")
