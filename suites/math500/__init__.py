"""MATH-500: five hundred competition problems of the MATH test set (see README.md, the protocol card)."""

from __future__ import annotations

from pathlib import Path

from evictbench.suite import PreparedSuite, Protocol, Sampling, Suite, SuiteRequest

__all__ = ["SUITE"]

TASKS = ("math500",)
THINKING = Sampling(temperature=0.6, top_p=0.95, top_k=20, min_p=0.0)

PROTOCOLS = {
    "default": Protocol(
        source="Qwen3's model card for thinking (temperature 0.6, top-p 0.95, top-k 20, min-p 0, 32,768 tokens)",
        tasks=TASKS,
        sampling=THINKING,
    ),
    "indexmem_pp": Protocol(
        source="IndexMem++ (Chooovy/kvpress 5a5826ed, docs/paper_protocols.md): 2 rollouts, thinking on, "
        "at most 16,384 tokens (its baselines 32,768)",
        tasks=TASKS,
        sampling=THINKING,
        repeats=2,
        max_new_tokens=16_384,
    ),
    "greedy": Protocol(
        source="lm-eval 0.4.13, hendrycks_math500 and minerva_math500: greedy, once (Qwen advises against it for "
        "thinking)",
        tasks=TASKS,
    ),
}


def _prepare(request: SuiteRequest) -> PreparedSuite:
    from .problems import prepare

    return prepare(request)


SUITE = Suite(
    name="math500",
    summary="MATH-500: competition mathematics, answers compared as mathematics",
    folder=Path(__file__).parent,
    tasks=TASKS,
    question="seen",
    context_field=None,
    default_context=None,
    default_limit=None,
    prepare=_prepare,
    protocols=PROTOCOLS,
    stated_length=16_384,
)
