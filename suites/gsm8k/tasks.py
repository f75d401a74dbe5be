"""The tasks of GSM8K and the protocols that run them. Data only."""

from __future__ import annotations

from evictbench.suite import Protocol

TASKS = ("gsm8k", "gsm8k_cot8")

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
