"""How a run uses the chat template: whether at all, which one, with what system prompt, with thoughts or without."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from evictbench.errors import UserError
from evictbench.evaluation import thinking
from evictbench.evaluation.tasks import NO_THOUGHT
from evictbench.evaluation.thinking import Thinking
from evictbench.suite import chat_template
from evictbench.suite.chat_template import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from evictbench.evaluation.protocol import ChosenProtocol
    from evictbench.evaluation.settings import RunSettings


@dataclass(frozen=True)
class Chat:
    """The template of a run, and what differs in it from the protocol.

    tokenizer: with the template as this run uses it; everyone who renders with it gets the same prompt. template: None
    for plain text. system_prompt: what the system says, None for nothing of ours. differs: name to the value that is
    used and the protocol's own. warnings: sentences about what the template cannot do of the protocol.
    """

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate | None
    thinking: Thinking = NO_THOUGHT
    system_prompt: str | None = None
    differs: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def used(self) -> bool:
        """Whether prompts are in the chat template, where the task allows it."""
        return self.template is not None


def choose(settings: RunSettings, protocol: ChosenProtocol, brought: PreTrainedTokenizerBase, model: str) -> Chat:
    """The chat template as the options and the protocol ask for it. brought: the tokenizer as it was loaded; it is left
    as it is. model: its name, for sentences.

    Raises UserError for what the options ask for and the tokenizer or its template cannot do.
    """
    available = chat_template.has_chat_template(brought)
    preset = protocol.preset
    if not available and (settings.chat == "on" or (settings.chat == "auto" and preset.chat)):
        raise UserError(f"The tokenizer of {model} has no chat template: use --chat off.")
    own = available if preset.chat is None else preset.chat
    used = own if settings.chat == "auto" else settings.chat == "on"
    differs: dict[str, tuple[Any, Any]] = {"chat": (used, own)}
    if not used:
        _refuse_without_template(settings)
        chosen = Chat(brought, None)
        differs["thinking"] = (False, bool(preset.thinking))
    else:
        chosen, by_itself = _in_template(settings, protocol, brought, model)
        differs["thinking"] = (chosen.thinking.on, by_itself if preset.thinking is None else preset.thinking)
    differs["system_prompt"] = (chosen.system_prompt, preset.system_prompt)
    return replace(chosen, differs={name: pair for name, pair in differs.items() if pair[0] != pair[1]})


def _refuse_without_template(settings: RunSettings) -> None:
    """Raise UserError for an option that is about the chat template, where none is used."""
    if settings.thinking == "on":
        raise UserError("Thinking is switched on in the chat template, and this run uses none (--chat off).")
    if settings.chat_template is not None:
        raise UserError(
            f"This run uses no chat template, so there is none to choose: leave out --chat-template "
            f"{settings.chat_template}, or use --chat on."
        )
    if settings.system_prompt and settings.system_prompt.strip():
        raise UserError(
            "A system prompt stands in the chat template, and this run uses none: leave out --system-prompt, or use "
            "--chat on."
        )


def _in_template(
    settings: RunSettings, protocol: ChosenProtocol, brought: PreTrainedTokenizerBase, model: str
) -> tuple[Chat, bool]:
    """The tokenizer with the chosen template as this run uses it, and whether that template lets the model think by its
    own default."""
    tokenizer = copy.copy(brought)
    template = chat_template.choose(tokenizer, settings.chat_template, model)
    by_itself = thinking.template_default(tokenizer).on
    stated, warning = protocol.preset.thinking, None
    if settings.thinking == "auto" and stated is not None:
        thoughts, warning = thinking.follow(tokenizer, stated, protocol.name, model)
    else:
        thoughts = thinking.set_switch(tokenizer, settings.thinking, model)
    if protocol.system_prompt is not None:
        chat_template.say(tokenizer, protocol.system_prompt, template)
    warnings = () if warning is None else (warning,)
    return Chat(tokenizer, template, thoughts, protocol.system_prompt, warnings=warnings), by_itself
