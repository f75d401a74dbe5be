"""`python -m benchmarks [--quick] [--out FILE]`: prefill, decode and memory against plain transformers, as ratios.

One run, one process, the bundled model in float32. Prefill: the better of three. Decode: every arm takes one step in
turn, so that a slow moment of the machine falls on all of them alike; medians over the steps.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

from benchmarks.arms import Arm, admitted, bundled_policy, random_tokens, take_turns, timed
from evictbench.cache.base import KVCache
from evictbench.generation.runner import ModelRunner
from evictbench.models.load import load_model, resolve
from evictbench.policy import Prefill

EVICTING = ("streaming_llm", "tova", "h2o", "snapkv", "random")
GOALS = {
    "streaming_llm prefill / plain": ("<=", 0.75),
    "tova prefill / plain": ("<=", 0.75),
    "h2o prefill / plain": ("<=", 0.85),
    "streaming_llm decode tokens/s / plain": (">=", 1.5),
    "tova decode tokens/s / plain": (">=", 1.5),
    "h2o decode tokens/s / plain": (">=", 1.5),
    "snapkv decode tokens/s / plain": (">=", 1.5),
    "random decode tokens/s / plain": (">=", 1.5),
    "tova decode time / streaming_llm": ("<=", 1.10),
    "h2o decode time / streaming_llm": ("<=", 1.10),
    "full decode time / plain": ("<=", 1.05),
    "8 rows tokens/s / 1 row": (">=", 3.0),
}


def dense_prefill(model: PreTrainedModel, ids: torch.Tensor) -> DynamicCache:
    """Plain transformers: one pass over the prompt."""
    model.set_attn_implementation("sdpa")
    cache = DynamicCache(config=model.config)
    Arm(model, cache, "sdpa", 0).forward(ids)
    return cache


def our_runner(model: PreTrainedModel, name: str, budget: int, mode: Prefill, chunk: int) -> ModelRunner:
    """A runner under a policy. mode: "native" or "bounded"."""
    policy = bundled_policy(name, model)
    return ModelRunner(
        model, policy, policy.read_budget(budget if policy.needs_budget else None), prefill=mode, chunk=chunk
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--prompt", type=int, default=6144, help="tokens of the prompt")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60, help="decode steps of every arm")
    parser.add_argument("--repeats", type=int, default=3, help="prefills of every arm")
    parser.add_argument("--quick", action="store_true", help="a short prompt and few steps, to see that it runs")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    if options.quick:
        options.prompt, options.steps, options.repeats = 1024, 10, 1
    torch.set_grad_enabled(False)
    console = Console()
    model = load_model(resolve("smollm2"), device="cpu", dtype="float32")
    ids = random_tokens(options.prompt)
    tokens = ids[0].tolist()

    def read(name: str, mode: Prefill = "native", chunk: int = 512) -> tuple[float, KVCache]:
        runner = our_runner(model, name, options.budget, mode, chunk)
        seconds, (cache, _) = timed(lambda: runner.prefill(tokens))
        return seconds, cache

    console.print(
        f"SmolLM2-135M, float32, {torch.get_num_threads()} threads, torch {torch.__version__}, {platform.machine()}; "
        f"prompt {options.prompt}, budget {options.budget}, bounded, chunk {options.chunk}"
    )

    seconds: dict[str, float] = {}
    caches: dict[str, Any] = {}
    for _ in range(options.repeats):
        took, caches["plain"] = timed(lambda: dense_prefill(model, ids))
        seconds["plain"] = min(took, seconds.get("plain", took))
        for name in EVICTING:
            took, caches[name] = read(name, "bounded", options.chunk)
            seconds[name] = min(took, seconds.get(name, took))
        took, _ = read("h2o")
        seconds["h2o native"] = min(took, seconds.get("h2o native", took))
    seconds["full"], caches["full"] = read("full")

    length = options.prompt
    arms = {
        "plain": Arm(model, caches["plain"], "sdpa", length),
        "full": Arm(model, caches["full"], "evictbench", length),
    }
    take_turns(arms, options.steps)
    runner = our_runner(model, "streaming_llm", options.budget, "bounded", options.chunk)
    eight = admitted(runner, caches["streaming_llm"], 8)
    budgeted = {name: Arm(model, caches[name], "evictbench", length) for name in EVICTING}
    budgeted["8 rows"] = Arm(model, eight, "evictbench", length, rows=8)
    take_turns(budgeted, options.steps)
    arms |= budgeted

    table = Table("arm", "prefill s", "decode ms", "tokens/s", "cache MB", "prefill peak MB", title="Measured")
    for name, arm in arms.items():
        if name == "plain":
            nbytes = peak = sum(layer.keys.nbytes + layer.values.nbytes for layer in arm.cache.layers)
        else:
            nbytes, peak = arm.cache.nbytes(), arm.cache.bytes_peak
        prefill = f"{seconds[name]:.2f}" if name in seconds else "-"
        table.add_row(
            *(name, prefill, f"{arm.seconds * 1e3:.1f}", f"{arm.rows / arm.seconds:.1f}"),
            *(f"{nbytes / 1e6:.1f}", f"{peak / 1e6:.1f}"),
        )
    table.add_row("h2o native", f"{seconds['h2o native']:.2f}", "-", "-", "-", "-")
    console.print(table)

    one = arms["streaming_llm"].seconds
    ratios = {f"{name} prefill / plain": seconds[name] / seconds["plain"] for name in (*EVICTING, "h2o native", "full")}
    ratios |= {f"{name} decode tokens/s / plain": arms["plain"].seconds / arms[name].seconds for name in EVICTING}
    ratios |= {f"{name} decode time / streaming_llm": arms[name].seconds / one for name in EVICTING[1:]}
    ratios["full decode time / plain"] = arms["full"].seconds / arms["plain"].seconds
    ratios["8 rows tokens/s / 1 row"] = 8 * one / arms["8 rows"].seconds
    table = Table("ratio", "measured", "goal", "met", title="Ratios")
    for name, value in ratios.items():
        sign, goal = GOALS.get(name, ("", 0.0))
        met = "" if not sign else "yes" if (value <= goal if sign == "<=" else value >= goal) else "no"
        table.add_row(name, f"{value:.2f}", f"{sign} {goal}" if sign else "reported", met)
    console.print(table)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {name: str(value) for name, value in vars(options).items()}
        options.out.write_text(
            json.dumps({"settings": settings, "prefill_seconds": seconds, "ratios": ratios}, indent=2)
        )


if __name__ == "__main__":
    main()
