"""The prompts of a problem: boxed and zero-shot, or after worked examples."""

from __future__ import annotations

import functools
from pathlib import Path

from ..boxed import prompt as boxed

__all__ = ["after", "boxed", "chain_of_thought", "example", "examples"]


def chain_of_thought(question: str) -> str:
    """The prompt after the examples of Wei et al.: exactly that of lm-eval's gsm8k_cot."""
    return after(examples(), question)


def after(shown: str, question: str) -> str:
    """Worked examples, then the question in their form. shown: the examples, each with its blank line."""
    return f"{shown}Q: {question}\nA:"


def example(question: str, reasoning: str, answer: str) -> str:
    """A worked example in the form of those of Wei et al., with the blank line after it."""
    return f"Q: {question}\nA: {reasoning}\nThe answer is {answer}.\n\n"


@functools.cache
def examples() -> str:
    """The eight examples of Wei et al. 2022 (arXiv:2201.11903, appendix), in lm-eval's wording, each with the blank
    line after it."""
    return (Path(__file__).parent / "cot8.txt").read_text(encoding="utf-8").rstrip("\n") + "\n\n"
