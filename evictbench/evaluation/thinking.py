"""Thinking models: the chat template's own switch, and the answer apart from the thought before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from evictbench.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<think>", "</think>"

SWITCHES = ("enable_thinking", "thinking")
"""What templates call their switch: Qwen3, SmolLM3 and GLM the first, DeepSeek and Granite the second."""

PROBE = "A question."


@dataclass(frozen=True)
class Thinking:
    """Whether answers may begin with a thought, and whether the prompt itself opens it."""

    on: bool = False
    opened: bool = False


@dataclass(frozen=True)
class Answer:
    """What is graded of a completion, and what became of its thought; of an unclosed one, nothing is graded."""

    text: str
    thought: Literal["none", "closed", "unclosed"]


def answer_of(text: str, opened: bool) -> Answer:
    """What follows the last </think>, without the blanks before it. A thought opened after that, or by the prompt
    (`opened`) and never closed, leaves no answer."""
    close, start = text.rfind(CLOSE), text.rfind(OPEN)
    if start > close or (close < 0 and opened):
        return Answer("", "unclosed")
    if close < 0:
        return Answer(text, "none")
    return Answer(text[close + len(CLOSE) :].lstrip(), "closed")


def default(tokenizer: PreTrainedTokenizerBase) -> Thinking:
    """What the tokenizer's chat template does when nothing is said."""
    template = str(tokenizer.get_chat_template())
    return _state(tokenizer, template, _switch(tokenizer, template))


def settle(tokenizer: PreTrainedTokenizerBase, wanted: str, model: str) -> Thinking:
    """Set the switch of the tokenizer's chat template as `wanted` ("on", "off"; "auto" leaves the template's default)
    and say what its prompts then do. UserError where the template cannot do it.

    The switch is set inside the template, so that whoever measures or renders a prompt with this tokenizer gets the
    same one.
    """
    template = str(tokenizer.get_chat_template())
    switch = _switch(tokenizer, template)
    default = _state(tokenizer, template, switch)
    if wanted == "auto":
        found = default
    elif switch is not None:
        value = "true" if wanted == "on" else "false"
        # The plus keeps the template's own first line break.
        tokenizer.chat_template = f"{{% set {switch} = {value} +%}}{template}"
        found = Thinking(wanted == "on", opened=_opens(_tail(tokenizer)))
    elif wanted == "on" and not default.on:
        raise UserError(f"The chat template of {model} has no switch for thinking: leave out --thinking on.")
    elif wanted == "off" and default.opened:
        raise UserError(f"The chat template of {model} opens a thought and has no switch: leave out --thinking off.")
    else:
        found = Thinking(wanted == "on", default.opened)
    if found.on and CLOSE in tokenizer.all_special_tokens:
        raise UserError(
            f"The tokenizer of {model} leaves {CLOSE} out of its text, so answers cannot be told from thoughts: "
            "use --thinking off."
        )
    return found


def _state(tokenizer: PreTrainedTokenizerBase, template: str, switch: str | None) -> Thinking:
    """What the template does when nothing is said."""
    tail = _tail(tokenizer)
    if _opens(tail):
        return Thinking(on=True, opened=True)
    if CLOSE in tail:  # an empty thought: none is wanted
        return Thinking()
    if switch is not None:
        return Thinking(on=_render(tokenizer) == _render(tokenizer, **{switch: True}))
    return Thinking(on=CLOSE in template)  # it takes thoughts out of earlier turns: its model has them


def _switch(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    for name in SWITCHES:
        if name in template and _render(tokenizer, **{name: True}) != _render(tokenizer, **{name: False}):
            return name
    return None


def _opens(tail: str) -> bool:
    return tail.rfind(OPEN) > tail.rfind(CLOSE)


def _tail(tokenizer: PreTrainedTokenizerBase) -> str:
    """What a prompt has after the user's text."""
    return _render(tokenizer).rpartition(PROBE)[2]


def _render(tokenizer: PreTrainedTokenizerBase, **switch: Any) -> str:
    turns = [{"role": "user", "content": PROBE}]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **switch))
