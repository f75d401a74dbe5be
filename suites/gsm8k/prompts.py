"""The two prompts of a problem: boxed and zero-shot, or after eight worked examples."""

from __future__ import annotations

import functools
from pathlib import Path

from ..boxed import prompt as boxed

__all__ = ["boxed", "chain_of_thought", "examples"]


def chain_of_thought(question: str) -> str:
    """The examples, then the question in their form: exactly the prompt of lm-eval's gsm8k_cot."""
    return f"{examples()}Q: {question}\nA:"


@functools.cache
def examples() -> str:
    """The eight examples of Wei et al. 2022 (arXiv:2201.11903, appendix), in lm-eval's wording, each with the blank
    line after it."""
    return (Path(__file__).parent / "cot8.txt").read_text(encoding="utf-8").rstrip("\n") + "\n\n"
