"""The tasks of GSM8K and the protocols that run them. Data only."""

from __future__ import annotations

from evictbench.suite import Protocol

FROM_TRAIN = "gsm8k_cot8_train"
"""The task whose worked examples are drawn from the train set."""

TASKS = ("gsm8k", "gsm8k_cot8", FROM_TRAIN)

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
        source="DistillCache (arXiv:2608.08878), appendix D: 8-shot chain of thought, exemplars from the train set, "
        "greedy, 512 new tokens; which eight is not said, so ours, drawn with a seed",
        tasks=(FROM_TRAIN,),
        chat=False,
        max_new_tokens=512,
    ),
}
