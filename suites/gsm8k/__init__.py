"""GSM8K: 1,319 grade-school word problems whose answers are numbers (see README.md, the protocol card)."""

from __future__ import annotations

from pathlib import Path

from evictbench.suite import PreparedSuite, Protocol, Suite, SuiteRequest

__all__ = ["SUITE"]

PROTOCOLS = {
    "default": Protocol(
        source="zero-shot, boxed, after Hold Onto That Thought (arXiv:2512.12008); greedy, 512 tokens: our choice",
        tasks=("gsm8k",),
    ),
    "cot8": Protocol(
        source="lm-eval 0.4.13, gsm8k_cot: the 8 examples of Wei et al. (arXiv:2201.11903), no chat template, greedy, "
        "256 tokens",
        tasks=("gsm8k_cot8",),
        chat=False,
    ),
    "distillcache": Protocol(
        source="DistillCache (arXiv:2608.08878): GSM8K with 8-shot chain of thought, greedy, 512 new tokens",
        tasks=("gsm8k_cot8",),
        chat=False,
        max_new_tokens=512,
    ),
}


def _prepare(request: SuiteRequest) -> PreparedSuite:
    from .prepare import prepare

    return prepare(request)


SUITE = Suite(
    name="gsm8k",
    summary="GSM8K: 1,319 word problems with a number as the answer, zero-shot or after 8 worked examples",
    folder=Path(__file__).parent,
    tasks=("gsm8k", "gsm8k_cot8"),
    question="seen",
    context_field=None,
    default_context=None,
    default_limit=None,
    prepare=_prepare,
    protocols=PROTOCOLS,
)
