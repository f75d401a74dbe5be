"""`python -m benchmarks.steps [--quick]`: the time that a policy adds to a decode step, and whether it grows.

Every arm is the same cache of the same slots; "no policy" frees the oldest slot, one for the whole model, and reads no
signals. Arms take turns step by step in one process. A run's overhead is the median of its steps over that of no
policy; the overhead is the median of five runs. Flatness: one policy reads 32,768 tokens, chunk by chunk, and decodes
in turns with a cache that has read 1,024. Entries held: the mean of a KV head; DMS holds as
many as its threshold leaves, not a budget. Bundled model, float32. Learned policies take the bundled weights where they
fit the budget; one that cannot run is named with its reason, and its goal is not met.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks.arms import WARM_STEPS, Arm, admitted, bundled_policy, random_tokens
from benchmarks.sections import RESULTS, goal, replace_section, table
from evictbench.cache.base import KVCache
from evictbench.errors import UserError
from evictbench.generation.runner import ModelRunner
from evictbench.models.load import load_model, resolve
from evictbench.policy import BasePolicy, Policy, Step
from evictbench.policy.budget import Budget

RUNS = 5
GOALS = {
    "streaming_llm": 0.02,
    "kvpop": 0.10,
    "kvpop_mlp": 0.10,
    "dms": 0.10,
    "tova": 0.08,
    "h2o": 0.08,
    "indexmem_pp": 0.15,
    "distillcache": 0.15,
}
NONE = "no policy"


class Oldest(Policy):
    """No policy: the oldest entry's slot is the next one's, the same in all heads and layers."""

    name = "oldest"
    summary = "the oldest slot is overwritten"
    paper = "-"
    prefill = "bounded"
    granularity = "model"
    static = True

    def score(self, step: Step) -> torch.Tensor:
        """The position, `[rows, 1, slots]`."""
        return step.positions


def decode_cache(model: PreTrainedModel, name: str, budget: int, seen: int, rows: int) -> KVCache:
    """A decode cache whose rows have all read the same `seen` tokens, bounded. name: of a policy, or NONE."""
    policy: BasePolicy = Oldest() if name == NONE else bundled_policy(name, model)
    runner = ModelRunner(model, policy, Budget(tokens=budget), prefill="bounded")
    prompt, _ = runner.prefill(random_tokens(seen)[0].tolist())
    return admitted(runner, prompt, rows)


def medians_of_runs(arms: dict[str, Arm], base: str, runs: int, steps: int) -> dict[str, float]:
    """For each arm its time over the base's, the median over runs of a ratio of medians."""
    ratios: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        for _ in range(WARM_STEPS):
            arm.step()
    for _ in range(runs):
        for arm in arms.values():
            arm.times.clear()
        order = list(arms.values())
        for step in range(steps):
            for arm in order if step % 2 == 0 else reversed(order):
                arm.step()
        medians = {name: statistics.median(arm.times) for name, arm in arms.items()}
        for name, seconds in medians.items():
            ratios[name].append(seconds / medians[base])
    return {name: statistics.median(values) for name, values in ratios.items()}


def overheads(model: PreTrainedModel, budget: int, rows: int, runs: int, steps: int, seen: int) -> list[list[str]]:
    """Rows of the table: every policy at this budget and these rows."""
    arms: dict[str, Arm] = {}
    lines: list[list[str]] = []
    for name in (NONE, *GOALS):
        try:
            cache = decode_cache(model, name, budget, seen, rows)
        except UserError as error:
            lines.append([name, str(budget), str(rows), "-", "-", f"not run: {error}"])
            continue
        arms[name] = Arm(model, cache, "evictbench", seen, rows)
    ratios = medians_of_runs(arms, NONE, runs, steps)
    for name in arms:
        if name != NONE:
            over = ratios[name] - 1
            held = f"{float(arms[name].cache.entries_held()[1]):.0f}"
            lines.append([name, str(budget), str(rows), held, f"{over:+.1%}", goal(over, "<=", GOALS[name])])
    return lines


def flatness(
    model: PreTrainedModel, name: str, budget: int, lengths: tuple[int, int], runs: int, steps: int
) -> tuple[float, list[int]]:
    """Time of a step at the longer length over that at the shorter, and the bytes of both caches."""
    caches = [decode_cache(model, name, budget, length, 1) for length in lengths]
    arms = {str(n): Arm(model, cache, "evictbench", n) for n, cache in zip(lengths, caches, strict=True)}
    ratios = medians_of_runs(arms, str(lengths[0]), runs, steps)
    return ratios[str(lengths[1])], [cache.nbytes() for cache in caches]


def main() -> None:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short texts, few steps: only that it runs")
    parser.add_argument("--flat", default="streaming_llm", help="the policy whose flatness is measured")
    parser.add_argument("--out", type=Path, help="file of results; RESULTS.md, or none with --quick")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    model = load_model(resolve("smollm2"), device="cpu", dtype="float32")
    quick = options.quick
    cells = [(128, 1)] if quick else [(128, 1), (512, 1), (128, 16), (512, 16)]
    lines: list[list[str]] = []
    for budget, rows in cells:
        steps = 2 if quick else 12 if rows == 1 else 4
        lines += overheads(model, budget, rows, 1 if quick else RUNS, steps, 192 if quick else 640)
    lengths = (192, 384) if quick else (1024, 32_768)
    ratio, nbytes = flatness(model, options.flat, 128, lengths, 1 if quick else RUNS, 2 if quick else 12)
    equal = "equal" if nbytes[0] == nbytes[1] else "not equal: missed"
    text = table(["policy", "budget", "rows", "entries held", "over no policy", "goal"], lines) + (
        f"\n\nFlatness, {options.flat}, budget 128: a step at {lengths[1]:,} tokens seen takes {ratio:.3f} of one at "
        f"{lengths[0]:,} ({goal(ratio, '<=', 1.05)}); cache bytes {nbytes[0]:,} and {nbytes[1]:,}, {equal}."
    )
    print(text)
    if out := options.out or (None if quick else RESULTS):
        replace_section(out, "Per-step overhead and flatness", "python -m benchmarks.steps", text)


if __name__ == "__main__":
    main()
