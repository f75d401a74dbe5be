"""`python -m benchmarks [--quick] [--out FILE]`: prefill, decode and memory against plain transformers, as ratios.

One run, one process, the bundled model in float32. Prefill: the better of three. Decode: every arm takes one step in
turn, so that a slow moment of the machine falls on all of them alike; medians over the steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

from evictbench.cache.paged.cache import PagedCache
from evictbench.cache.slots.cache import EvictionCache
from evictbench.generation.batching import admit
from evictbench.models.load import load_model, resolve
from evictbench.registry import parse_policy

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


def build(name: str) -> Any:
    chosen = parse_policy(name)
    return chosen.policy(chosen.config)


def tokens_for(length: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(1000, 40_000, (rows, length), generator=torch.Generator().manual_seed(0))


def plain(model: PreTrainedModel, cache: Any, ids: torch.Tensor, start: int) -> torch.Tensor:
    positions = torch.arange(start, start + ids.shape[1]).expand(ids.shape[0], -1)
    with cache.listening() if isinstance(cache, PagedCache) else nullcontext():
        output = model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return output.logits[:, -1]


def dense_prefill(model: PreTrainedModel, ids: torch.Tensor) -> DynamicCache:
    model.set_attn_implementation("sdpa")
    cache = DynamicCache(config=model.config)
    plain(model, cache, ids, 0)
    return cache


def our_prefill(
    model: PreTrainedModel, name: str, ids: torch.Tensor, budget: int, mode: Any, chunk: int
) -> EvictionCache:
    policy = build(name)
    length = ids.shape[1]
    cache = EvictionCache(model, policy, budget if policy.needs_budget else None, prefill=mode, prompt_length=length)
    for start in range(0, length, chunk):
        plain(model, cache, ids[:, start : start + chunk], start)
    return cache


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


class Arm:
    """A prepared cache that decodes one token a call, with the attention implementation that belongs to it."""

    def __init__(self, model: PreTrainedModel, cache: Any, attention: str, seen: int, rows: int = 1) -> None:
        self.model, self.cache, self.attention, self.seen, self.rows = model, cache, attention, seen, rows
        self.times: list[float] = []

    def step(self) -> None:
        if self.model.config._attn_implementation != self.attention:
            self.model.set_attn_implementation(self.attention)
        ids = torch.full((self.rows, 1), 1000 + self.seen % 1000)
        seconds, _ = timed(lambda: plain(self.model, self.cache, ids, self.seen))
        self.times.append(seconds)
        self.seen += 1

    @property
    def seconds(self) -> float:
        return statistics.median(self.times[3:])


def take_turns(arms: dict[str, Arm], steps: int) -> None:
    for _ in range(steps):
        for arm in arms.values():
            arm.step()


def many_rows(model: PreTrainedModel, prompt: EvictionCache, name: str, budget: int, rows: int) -> EvictionCache:
    """One prompt's survivors, admitted `rows` times."""
    cache = EvictionCache(model, build(name), budget, prefill="bounded", rows=rows)
    for _ in range(rows):
        admit(cache, prompt)
    return cache


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
    ids = tokens_for(options.prompt)
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
            took, caches[name] = timed(
                lambda name=name: our_prefill(model, name, ids, options.budget, "bounded", options.chunk)
            )
            seconds[name] = min(took, seconds.get(name, took))
        took, _ = timed(lambda: our_prefill(model, "h2o", ids, options.budget, "native", 512))
        seconds["h2o native"] = min(took, seconds.get("h2o native", took))
    took, caches["full"] = timed(lambda: our_prefill(model, "full", ids, options.budget, "native", 512))
    seconds["full"] = took

    length = options.prompt
    arms = {
        "plain": Arm(model, caches["plain"], "sdpa", length),
        "full": Arm(model, caches["full"], "evictbench", length),
    }
    take_turns(arms, options.steps)
    eight = many_rows(model, caches["streaming_llm"], "streaming_llm", options.budget, 8)
    budgeted = {name: Arm(model, caches[name], "evictbench", length) for name in EVICTING}
    budgeted["8 rows"] = Arm(model, eight, "evictbench", length, rows=8)
    take_turns(budgeted, options.steps)
    arms |= budgeted

    table = Table("arm", "prefill s", "decode ms", "tokens/s", "cache MB", "prefill peak MB", title="Measured")
    for name, arm in arms.items():
        nbytes = arm.cache.nbytes() if isinstance(arm.cache, EvictionCache) else _dynamic_bytes(arm.cache)
        peak = f"{arm.cache.bytes_peak / 1e6:.1f}" if isinstance(arm.cache, EvictionCache) else f"{nbytes / 1e6:.1f}"
        prefill = f"{seconds[name]:.2f}" if name in seconds else "-"
        table.add_row(
            name, prefill, f"{arm.seconds * 1e3:.1f}", f"{arm.rows / arm.seconds:.1f}", f"{nbytes / 1e6:.1f}", peak
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


def _dynamic_bytes(cache: DynamicCache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


if __name__ == "__main__":
    main()
