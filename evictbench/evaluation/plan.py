"""From what was asked to what will run: everything that can be checked, checked before a weight is loaded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from evictbench.errors import UserError
from evictbench.evaluation import tasks, thinking
from evictbench.evaluation.checks import Checked, check
from evictbench.evaluation.fingerprint import identity_of
from evictbench.evaluation.prompts import Planned, Prompts
from evictbench.evaluation.settings import Settings
from evictbench.models import devices, load
from evictbench.models.policy_weights import Weights, equip
from evictbench.policy.step import ModelShape
from evictbench.store import run_folder

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from transformers import PreTrainedTokenizerBase

    from evictbench.evaluation.protocol import Differences
    from evictbench.policy.base import Policy
    from evictbench.suite.spec import PreparedSuite


Made = TypeVar("Made")

Kept = dict[Hashable, Any]
"""What plans of one process have in common, made once: configs, tokenizers, prompts."""


@dataclass(frozen=True)
class Plan:
    """One cell, ready to run: nothing is left to check, and no weight is loaded.

    weights: what a learned policy has been given. model: the name in results. chat: whether prompts are in the chat
    template, where the task allows it.
    prompts go round the tasks, and come to the next repeat when every document has had this one, so that a run
    stopped early has some of each.
    identity: what the fingerprint, and with it the folder, is made of.
    differs: what is not as the named protocol has it, the number of repeats included.
    cut: task to how many of its documents have less room for an answer than its card gives.
    overlong: task to the documents left out because they do not fit the window.
    """

    settings: Settings
    checked: Checked
    policy: Policy
    weights: Weights | None
    source: load.Source
    model: str
    dtype: str
    chat: bool
    thinking: thinking.Thinking
    tokenizer: PreTrainedTokenizerBase
    prepared: PreparedSuite
    tasks: Mapping[str, ConfigurableTask]
    prompts: tuple[Planned, ...]
    identity: Mapping[str, Any]
    folder: Path
    differs: Differences
    cut: Mapping[str, int]
    overlong: Mapping[str, tuple[int, ...]]

    @cached_property
    def documents(self) -> dict[str, int]:
        """Task to the documents asked for."""
        counts = dict.fromkeys(self.tasks, 0)
        for name, _ in {planned.key[:2] for planned in self.prompts}:
            counts[name] += 1
        return counts

    @property
    def asked(self) -> dict[str, int]:
        """Task to the samples asked for."""
        counts = dict.fromkeys(self.tasks, 0)
        for planned in self.prompts:
            counts[planned.prompt.task] += 1
        return counts


def make_plan(settings: Settings, phase: Callable[[str], None] = lambda _: None, kept: Kept | None = None) -> Plan:
    """Check everything and make the prompts; UserError says what cannot be. `phase` hears what takes a while.

    kept: what earlier plans have left there is taken, and what this one makes is added: cells that differ in policy
    and budget alone read the same prompts.
    In this order: names, numbers, budget, folders; the model's tokenizer and config; the suite's data; its prompts.
    """
    kept = {} if kept is None else kept
    checked = check(settings)
    source = load.resolve(settings.model)
    model = Path(source.name).expanduser().resolve().name if source.kind == "local" else source.name

    phase("reading the model's config and tokenizer")
    devices.check_device(settings.device)
    code = settings.trust_remote_code
    config = _once(kept, ("config", source, code), lambda: load.load_config(source, code))
    tokenizer = _once(kept, ("tokenizer", source, code), lambda: load.load_tokenizer(source, code))
    chat, own_chat = _chat(settings, checked, tokenizer, model)
    thoughts, own_thinking = _thinking(settings, tokenizer, chat, model)
    policy = checked.chosen.policy(checked.chosen.config)
    policy.fit(config)
    if checked.budget is not None:
        policy.check_budget(checked.budget)
    policy.stated_length = checked.suite.stated_length or checked.context
    if policy.learned:
        phase("identifying the weights")
    trained = equip(policy, settings.weights, source, model, ModelShape.of(config))
    least = policy.minimum_budget(ModelShape.of(config))
    if checked.budget is not None and checked.budget.tokens is not None:
        _check_least(checked, checked.budget.tokens, least, model)
    window = load.context_window(config)
    if checked.context is not None and checked.context > window:
        raise UserError(f"A context of {checked.context} tokens is longer than the window of {model}, {window} tokens.")
    load.check_supported(config)

    phase("making the prompts")

    def make_prompts() -> tuple[PreparedSuite, dict[str, ConfigurableTask], Prompts]:
        prepared = _prepare(settings, checked, tokenizer, chat, window)
        loaded = tasks.load_tasks(checked.suite, prepared)
        prompts = Prompts(settings, checked, tokenizer, chat, thoughts, window, model)
        prompts.make(loaded)
        return prepared, loaded, prompts

    prepared, loaded, prompts = _once(kept, ("prompts", _texts_of(settings)), make_prompts)
    if checked.budget is not None:
        shortest = min(planned.compressible for planned in prompts.planned)
        _check_least(checked, checked.budget.at(shortest, shortest), least, model)
    if policy.ragged:
        from evictbench.cache.paged.cache import allotted

        for length in sorted({planned.compressible for planned in prompts.planned}):
            allotted(policy, checked.budget, length)

    phase("identifying the weights")
    dtype = settings.dtype if settings.dtype != "auto" else load.own_dtype(config)
    differs = {
        **checked.protocol.differs,
        **({"chat": (chat, own_chat)} if chat != own_chat else {}),
        **({"thinking": (thoughts.on, own_thinking)} if thoughts.on != own_thinking else {}),
        **_limit_differs(settings, checked, loaded),
    }
    identity = identity_of(
        settings,
        checked,
        policy,
        trained,
        suite_tasks={name: tasks.version_of(task) for name, task in loaded.items()},
        data=prepared.data,
        model=model,
        model_weights=load.weights_hash(source),
        dtype=dtype,
        chat=chat,
        thoughts=thoughts.on,
        differs=differs,
    )
    folder = run_folder.run_folder(
        settings.out,
        checked.suite.name,
        model,
        checked.chosen.label,
        identity["budget"],
        run_folder.fingerprint(identity),
    )
    return Plan(
        settings=settings,
        checked=checked,
        policy=policy,
        weights=trained,
        source=source,
        model=model,
        dtype=dtype,
        chat=chat,
        thinking=thoughts,
        tokenizer=tokenizer,
        prepared=prepared,
        tasks=loaded,
        prompts=prompts.in_order(checked.protocol.repeats),
        identity=identity,
        folder=folder,
        differs=differs,
        cut=prompts.cut,
        overlong={name: tuple(ids) for name, ids in prompts.overlong.items()},
    )


def _once(kept: Kept, key: Hashable, make: Callable[[], Made]) -> Made:
    if key not in kept:
        kept[key] = make()
    made: Made = kept[key]
    return made


def _texts_of(settings: Settings) -> Settings:
    """The settings without those that no prompt depends on."""
    return replace(
        settings,
        policy="",
        budget=None,
        weights=None,
        prefill="native",
        chunk=1,
        batch_size=1,
        device="",
        dtype="",
        repeats=None,
        at=None,
        out=Path(),
    )


def _chat(settings: Settings, checked: Checked, tokenizer: PreTrainedTokenizerBase, model: str) -> tuple[bool, bool]:
    """Whether the chat template is used, and whether the protocol by itself would use it."""
    found = tasks.has_chat_template(tokenizer)
    preset = checked.protocol.preset.chat
    if not found and (settings.chat == "on" or (settings.chat == "auto" and preset)):
        raise UserError(f"The tokenizer of {model} has no chat template: use --chat off.")
    own = found if preset is None else preset
    return (own if settings.chat == "auto" else settings.chat == "on"), own


def _thinking(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, chat: bool, model: str
) -> tuple[thinking.Thinking, bool]:
    """What the chat template does about thoughts, and whether by itself it would let the model think."""
    if not chat:
        if settings.thinking == "on":
            raise UserError("Thinking is switched on in the chat template, and this run uses none (--chat off).")
        return thinking.Thinking(), False
    own = thinking.default(tokenizer)
    return thinking.settle(tokenizer, settings.thinking, model), own.on


def _limit_differs(settings: Settings, checked: Checked, loaded: Mapping[str, ConfigurableTask]) -> Differences:
    if not settings.max_new_tokens.isdigit():
        return {}
    limit = int(settings.max_new_tokens)
    cards = {checked.protocol.preset.max_new_tokens or tasks.token_limit(task) for task in loaded.values()}
    return {} if cards == {limit} else {"max_new_tokens": (limit, ", ".join(map(str, sorted(cards))))}


def _check_least(checked: Checked, entries: int, least: int, model: str) -> None:
    if entries < least:
        budget = checked.budget
        given = f"{budget} is given" if budget and budget.tokens else f"{budget} of the shortest text is {entries}"
        raise UserError(
            f"{checked.chosen.label} needs a budget of at least {least} entries on {model} (what it protects, "
            f"the state it is charged for, and one more), and {given}."
        )


def _prepare(
    settings: Settings, checked: Checked, tokenizer: PreTrainedTokenizerBase, chat: bool, window: int
) -> PreparedSuite:
    from evictbench.suite.spec import SuiteRequest

    number = settings.max_new_tokens

    request = SuiteRequest(
        tokenizer=tokenizer,
        chat=chat,
        tasks=checked.protocol.tasks,
        named=settings.tasks is not None,
        context=checked.context,
        limit=checked.limit,
        seed=settings.seed,
        data_dir=settings.data_dir,
        haystack=settings.haystack,
        window=window,
        max_new_tokens=int(number) if number.isdigit() else checked.protocol.preset.max_new_tokens,
    )
    prepared = checked.suite.prepare(request)
    if not prepared.tasks:
        reasons = " ".join(prepared.skipped.values())
        raise UserError(f"No task of {checked.suite.name} can be run. {reasons}".strip())
    return prepared
