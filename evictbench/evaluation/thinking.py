"""Thinking models: the chat template's switch for thoughts, and the answer without the thought before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from evictbench.errors import UserError
from evictbench.suite.chat_template import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<think>", "</think>"

SWITCHES = ("enable_thinking", "thinking")
"""The variables that templates switch by: Qwen3, SmolLM3 and GLM the first, DeepSeek and Granite the second."""

PROBE = "A question."
"""A user's turn to render a template with, to see what the template puts around it."""


@dataclass(frozen=True)
class Thinking:
    """on: whether answers may begin with a thought. opened: whether the prompt itself opens that thought."""

    on: bool = False
    opened: bool = False


@dataclass(frozen=True)
class Answer:
    """The text of a completion that is graded, and the state of its thought. An unclosed thought leaves no text."""

    text: str
    thought: Literal["none", "closed", "unclosed"]


def strip_thought(text: str, opened: bool) -> Answer:
    """The answer: what follows the last </think>, without leading blanks.

    opened: whether the prompt has opened a thought. A thought that never closes leaves no answer.
    """
    close, start = text.rfind(CLOSE), text.rfind(OPEN)
    if start > close or (close < 0 and opened):
        return Answer("", "unclosed")
    if close < 0:
        return Answer(text, "none")
    return Answer(text[close + len(CLOSE) :].lstrip(), "closed")


def template_default(tokenizer: PreTrainedTokenizerBase) -> Thinking:
    """How the tokenizer's chat template treats thoughts by its own default."""
    template = str(tokenizer.get_chat_template())
    return _state(tokenizer, template, _switch(tokenizer, template))


def set_switch(tokenizer: PreTrainedTokenizerBase, wanted: str, model: str) -> Thinking:
    """Set the switch in the tokenizer's chat template, and return how the template then treats thoughts.

    wanted: "on", "off", or "auto" for the template's default. model: its name, for sentences.
    The template itself is changed, so that everyone who measures or renders a prompt with this tokenizer gets the same
    prompt. Raises UserError where the template has no such switch, or the tokenizer drops </think> from its text.
    """
    template = str(tokenizer.get_chat_template())
    switch = _switch(tokenizer, template)
    default = _state(tokenizer, template, switch)
    if wanted == "auto":
        thinking = default
    elif switch is not None:
        value = "true" if wanted == "on" else "false"
        # The plus keeps the template's own first line break.
        tokenizer.chat_template = f"{{% set {switch} = {value} +%}}{template}"
        thinking = Thinking(wanted == "on", opened=_opens(_tail(tokenizer)))
    elif wanted == "on" and not default.on:
        raise UserError(f"The chat template of {model} has no switch for thinking: leave out --thinking on.")
    elif wanted == "off" and default.opened:
        raise UserError(f"The chat template of {model} opens a thought and has no switch: leave out --thinking off.")
    else:
        thinking = Thinking(wanted == "on", default.opened)
    if thinking.on and CLOSE in tokenizer.all_special_tokens:
        raise UserError(
            f"The tokenizer of {model} leaves {CLOSE} out of its text, so answers cannot be told from thoughts: "
            "use --thinking off."
        )
    return thinking


def follow(tokenizer: PreTrainedTokenizerBase, wanted: bool, protocol: str, model: str) -> tuple[Thinking, str | None]:
    """Set the switch as a protocol has it, and return how the template then treats thoughts. protocol, model: names.

    The second is a sentence where the template has no switch, so that the model does as it does by itself.
    Raises UserError where thoughts are off in the protocol, and the template opens one and has no switch.
    """
    default = template_default(tokenizer)
    if has_switch(tokenizer) or default.on == wanted:
        return set_switch(tokenizer, "on" if wanted else "off", model), None
    if wanted:
        return default, (
            f"The protocol {protocol} lets the model think, and the chat template of {model} has no switch for it: the "
            "answers are as the template has them, and the result names the difference."
        )
    if default.opened:
        raise UserError(
            f"In the protocol {protocol} the model does not think, and the chat template of {model} opens a thought "
            "and has no switch: use --thinking on, which the result names as a difference, or another model."
        )
    return set_switch(tokenizer, "off", model), (
        f"In the protocol {protocol} the model does not think, and the chat template of {model} has no switch for it: "
        "answers may begin with a thought all the same, and end inside it."
    )


def has_switch(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's chat template can switch thoughts on and off."""
    return _switch(tokenizer, str(tokenizer.get_chat_template())) is not None


def _state(tokenizer: PreTrainedTokenizerBase, template: str, switch: str | None) -> Thinking:
    """How the template treats thoughts by its own default. switch: its variable, None where it has none."""
    tail = _tail(tokenizer)
    if _opens(tail):
        return Thinking(on=True, opened=True)
    if CLOSE in tail:  # an empty thought: the model is told not to think
        return Thinking()
    if switch is not None:
        return Thinking(on=_render(tokenizer) == _render(tokenizer, **{switch: True}))
    return Thinking(on=CLOSE in template)  # a template that removes thoughts from earlier turns is a thinking model's


def _switch(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    """The template's variable that switches thoughts; None where it has none."""
    for name in SWITCHES:
        if name in template and _render(tokenizer, **{name: True}) != _render(tokenizer, **{name: False}):
            return name
    return None


def _opens(tail: str) -> bool:
    """Whether a prompt's end leaves a thought open."""
    return tail.rfind(OPEN) > tail.rfind(CLOSE)


def _tail(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the template puts behind the user's text."""
    return _render(tokenizer).rpartition(PROBE)[2]


def _render(tokenizer: PreTrainedTokenizerBase, **switch: Any) -> str:
    turns = [{"role": "user", "content": PROBE}]
    return render(tokenizer, turns, add_generation_prompt=True, **switch)
