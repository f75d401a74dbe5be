"""`python -m benchmarks.queue [--quick]`: continuous batching of answers whose lengths differ 10:1.

64 prompts, 8 rows, StreamingLLM at budget 128, EOS ignored, so that each answer has the length that its request names.
The wall time of decode (prefills left out) over the total of tokens at the rate of a full batch, which is measured in
the same run, five times in turn with the queue. Bundled model, float32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from benchmarks.arms import bundled_policy, random_tokens
from benchmarks.sections import RESULTS, goal, replace_section
from evictbench.generation.generator import Generator, Request
from evictbench.models.load import load_model, load_tokenizer, resolve
from evictbench.policy.budget import Budget

ROWS = 8


def shuffled_requests(count: int, shortest: int, longest: int, prompt: int) -> list[Request]:
    """Lengths spread evenly from the shortest to the longest, in a shuffled order that is always the same."""
    spread = torch.linspace(shortest, longest, count).round().long()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    ids = tuple(random_tokens(prompt)[0].tolist())
    return [Request(key=i, prompt=ids, border=None, max_new_tokens=int(spread[order[i]])) for i in range(count)]


def decode_seconds(generator: Generator, requests: list[Request]) -> tuple[float, int]:
    """Wall time without prefills, and the tokens that decode steps made (the first comes from the prefill)."""
    began = time.perf_counter()
    completions = list(generator.run(requests))
    wall = time.perf_counter() - began
    prefills = sum(completion.prefill_seconds for completion in completions)
    return wall - prefills, sum(len(completion.tokens) - 1 for completion in completions)


def main() -> None:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queue", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few and short answers: only that it runs")
    parser.add_argument("--out", type=Path, help="file of results; RESULTS.md, or none with --quick")
    options = parser.parse_args()
    quick = options.quick
    torch.set_grad_enabled(False)
    spec = resolve("smollm2")
    model, tokenizer = load_model(spec, device="cpu", dtype="float32"), load_tokenizer(spec)
    generator = Generator(
        model, tokenizer, bundled_policy("streaming_llm", model), Budget(tokens=128), prefill="bounded", batch_size=ROWS
    )
    generator._ends = frozenset()
    varied = shuffled_requests(12, 2, 20, 32) if quick else shuffled_requests(64, 8, 80, 160)
    full = [Request(i, varied[0].prompt, None, 8 if quick else 32) for i in range(ROWS)]
    ratios = []
    for _ in range(1 if quick else 5):
        rate_seconds, rate_tokens = decode_seconds(generator, full)
        seconds, tokens = decode_seconds(generator, varied)
        ratios.append(seconds / (tokens * rate_seconds / rate_tokens))
    ratio = statistics.median(ratios)
    text = (
        f"{len(varied)} answers of {min(r.max_new_tokens for r in varied)} to {max(r.max_new_tokens for r in varied)} "
        f"tokens in {ROWS} rows: {ratio:.3f} of the time at a full batch's rate ({goal(ratio, '<=', 1.25)}); runs: "
        + ", ".join(f"{value:.3f}" for value in ratios)
        + "."
    )
    print(text)
    if out := options.out or (None if quick else RESULTS):
        replace_section(out, "Continuous batching", "python -m benchmarks.queue", text)


if __name__ == "__main__":
    main()
