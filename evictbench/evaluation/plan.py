"""The plan of a run: everything that can be checked is checked, and the prompts are made, before a weight is loaded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from evictbench.errors import UserError
from evictbench.evaluation import tasks, thinking
from evictbench.evaluation.chat import choose as choose_chat
from evictbench.evaluation.checks import Checked, check
from evictbench.evaluation.fingerprint import fingerprint_of
from evictbench.evaluation.prompts import PlannedSample, Prompts
from evictbench.evaluation.protocol import Differences
from evictbench.evaluation.settings import RunSettings
from evictbench.generation.end_tokens import EndTokens, end_tokens
from evictbench.models import devices, load
from evictbench.models.fine_tuned import base_of
from evictbench.models.policy_weights import Weights
from evictbench.models.ready import ready_policy
from evictbench.policy.base import BasePolicy
from evictbench.store import run_folder
from evictbench.suite.chat_template import ChatTemplate
from evictbench.suite.spec import PreparedSuite, SuiteRequest

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

SharedInputs = dict[Hashable, Any]
"""What the plans of one process share, each made once: configs, tokenizers, prompts."""


@dataclass(frozen=True)
class RunPlan:
    """A run that is ready to start: nothing is left to check, and no weight is loaded.

    weights: a learned policy's own; None for others. model: the name in results. dtype: the one that "auto" stands for.
    chat: whether prompts are in the chat template, where the task allows it. template: which; None without one.
    end_tokens: what ends an answer.
    prompts: the samples asked for. Tasks take turns, and the next repeat begins when every document has had this one,
    so that a run stopped early has some of each.
    fingerprint: everything that may move a score; its hash is in the name of the folder.
    differs: what is not as the named protocol has it, the number of repeats included.
    answers_cut: task to the number of documents whose answers may have fewer tokens than the task's card gives.
    overlong: task to the documents left out because they do not fit the window.
    template_warnings: sentences about what the chat template cannot do of the protocol.
    """

    settings: RunSettings
    checked: Checked
    policy: BasePolicy
    weights: Weights | None
    source: load.Source
    model: str
    dtype: str
    chat: bool
    template: ChatTemplate | None
    thinking: thinking.Thinking
    end_tokens: EndTokens
    tokenizer: PreTrainedTokenizerBase
    prepared: PreparedSuite
    tasks: Mapping[str, ConfigurableTask]
    prompts: tuple[PlannedSample, ...]
    fingerprint: Mapping[str, Any]
    folder: Path
    differs: Differences
    answers_cut: Mapping[str, int]
    overlong: Mapping[str, tuple[int, ...]]
    template_warnings: tuple[str, ...] = ()

    @cached_property
    def documents(self) -> dict[str, int]:
        """Task to the number of documents asked for."""
        counts = dict.fromkeys(self.tasks, 0)
        for name, _ in {planned.key[:2] for planned in self.prompts}:
            counts[name] += 1
        return counts

    @property
    def asked(self) -> dict[str, int]:
        """Task to the number of samples asked for."""
        counts = dict.fromkeys(self.tasks, 0)
        for planned in self.prompts:
            counts[planned.prompt.task] += 1
        return counts


def make_plan(
    settings: RunSettings, phase: Callable[[str], None] = lambda _: None, shared: SharedInputs | None = None
) -> RunPlan:
    """Check everything and make the prompts. Raises UserError for the first thing that is wrong.

    phase: called with a description of each step that takes a while.
    shared: inputs made by earlier plans of this process. They are used again, and new ones are added: cells that differ
    in policy and budget alone read the same prompts.
    The order is: names, numbers, budget, folders; the model's tokenizer and config; the suite's data; its prompts.
    """
    shared = {} if shared is None else shared
    checked = check(settings)
    source = load.resolve(settings.model)
    model = source.result_name

    phase("reading the model's config and tokenizer")
    devices.check_device(settings.device)
    code = settings.trust_remote_code
    config = _once(shared, ("config", source, code), lambda: load.load_config(source, code))
    brought = _once(shared, ("tokenizer", source, code), lambda: load.load_tokenizer(source, code))
    load.check_vocabulary(brought, config, model)
    # Each way to use the template has a tokenizer of its own, because its template is changed.
    chat = _once(
        shared,
        ("chat", source, code, *_chat_settings(settings, checked)),
        lambda: choose_chat(settings, checked.protocol, brought, model),
    )
    tokenizer = chat.tokenizer
    ends = end_tokens(load.stated_end_tokens(source, config), tokenizer)
    if checked.chosen.policy.learned:
        phase("identifying the weights")
    ready = ready_policy(
        checked.chosen,
        config,
        model=model,
        model_sha256=lambda: load.weights_hash(source, code),
        weights=settings.weights,
        stated_length=checked.suite.stated_length or checked.context,
        model_argument=settings.model,
        model_folder=lambda: load.whole_folder(source, code),
    )
    ready.check_budget(checked.budget)
    window = load.context_window(config)
    if checked.context is not None and checked.context > window:
        raise UserError(f"A context of {checked.context} tokens is longer than the window of {model}, {window} tokens.")
    load.check_supported(config)

    phase("making the prompts")

    def make_prompts() -> tuple[PreparedSuite, dict[str, ConfigurableTask], Prompts]:
        prepared = _prepare(settings, checked, tokenizer, chat.used, window)
        loaded = tasks.load_tasks(checked.suite, prepared)
        prompts = Prompts(settings, checked, tokenizer, chat.template, chat.thinking, window, model)
        prompts.make(loaded)
        return prepared, loaded, prompts

    prepared, loaded, prompts = _once(shared, ("prompts", _prompt_settings(settings)), make_prompts)
    ready.check_budget(checked.budget, *(planned.compressible for planned in prompts.planned))
    load.check_ids((planned.prompt.ids for planned in prompts.planned), config, model)

    phase("identifying the weights")
    dtype = load.resolve_dtype(config, settings.dtype)
    differs = {
        **checked.protocol.differs,
        **chat.differs,
        **_limit_differs(checked, loaded),
    }
    fingerprint = fingerprint_of(
        settings,
        checked,
        ready.policy,
        ready.weights,
        suite_tasks={name: tasks.version_of(task) for name, task in loaded.items()},
        data=prepared.data,
        model=model,
        model_weights=load.weights_hash(source, code),
        base=base_of(config, model),
        dtype=dtype,
        chat=chat,
        ends=ends,
        differs=differs,
    )
    folder = run_folder.run_folder(
        settings.out,
        checked.suite.name,
        model,
        checked.chosen.label,
        fingerprint["budget"],
        run_folder.fingerprint_hash(fingerprint),
    )
    return RunPlan(
        settings=settings,
        checked=checked,
        policy=ready.policy,
        weights=ready.weights,
        source=source,
        model=model,
        dtype=dtype,
        chat=chat.used,
        template=chat.template,
        thinking=chat.thinking,
        end_tokens=ends,
        tokenizer=tokenizer,
        prepared=prepared,
        tasks=loaded,
        prompts=prompts.in_order(checked.protocol.repeats),
        fingerprint=fingerprint,
        folder=folder,
        differs=differs,
        answers_cut=prompts.answers_cut,
        overlong={name: tuple(ids) for name, ids in prompts.overlong.items()},
        template_warnings=chat.warnings,
    )


def _once(shared: SharedInputs, key: Hashable, make: Callable[[], T]) -> T:
    if key not in shared:
        shared[key] = make()
    value: T = shared[key]
    return value


def _prompt_settings(settings: RunSettings) -> RunSettings:
    """The settings with every option blanked that no prompt depends on."""
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


def _chat_settings(settings: RunSettings, checked: Checked) -> tuple[Hashable, ...]:
    """All that decides how the chat template is used."""
    preset = checked.protocol.preset
    return (
        *(settings.chat, settings.chat_template, settings.thinking),
        *(checked.protocol.name, checked.protocol.system_prompt),
        *(preset.chat, preset.thinking, preset.system_prompt),
    )


def _limit_differs(checked: Checked, loaded: Mapping[str, ConfigurableTask]) -> Differences:
    limit = checked.protocol.answer_limit
    if limit.fixed is None:
        return {}
    cards = {limit.by_card(tasks.token_limit(task)) for task in loaded.values()}
    return {} if cards == {limit.fixed} else {"max_new_tokens": (limit.fixed, ", ".join(map(str, sorted(cards))))}


def _prepare(
    settings: RunSettings, checked: Checked, tokenizer: PreTrainedTokenizerBase, chat: bool, window: int
) -> PreparedSuite:
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
        max_new_tokens=checked.protocol.answer_limit.common,
        version=settings.suite_version,
    )
    prepared = checked.suite.prepare(request)
    if not prepared.tasks:
        reasons = " ".join(prepared.skipped.values())
        raise UserError(f"No task of {checked.suite.name} can be run. {reasons}".strip())
    return prepared
