"""`python -m benchmarks.limit [--quick]`: a decode step against its own matrix-vector products.

Products: every weight of a step in order, through torch's linear, and through the packed layers that a step uses
(`evictbench.models.packed_linear`). Read bandwidth: a sum over a buffer much larger than a processor's caches. Beside
the step: the same step with torch's linear, and that with its MLPs compiled by torch.compile. StreamingLLM, budget 512,
arms in turns, the median of five runs. bfloat16 is another model, not a faster float32.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.arms import Arm
from benchmarks.sections import RESULTS, goal, replace_section, table
from benchmarks.steps import decode_cache
from evictbench.models.load import load_model, resolve
from evictbench.trace.cell import read_weight_bytes


def linears(model: PreTrainedModel) -> list[nn.Linear]:
    """The linear layers of a step, in order."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def products(layers: list[nn.Linear], rows: int, packed: bool) -> Callable[[], None]:
    """A function that makes one pass over the layers. packed: as they are, and not through torch's linear."""
    inputs = {layer: torch.randn(rows, 1, layer.in_features).to(layer.weight.dtype) for layer in layers}

    def as_they_are() -> None:
        for layer, given in inputs.items():
            layer(given)

    def by_torch() -> None:
        for layer, given in inputs.items():
            nn.functional.linear(given, layer.weight)

    return as_they_are if packed else by_torch


def in_turns(arms: dict[str, Callable[[], Any]], runs: int, steps: int) -> dict[str, float]:
    """Median over runs of each arm's median seconds."""
    medians: dict[str, list[float]] = {name: [] for name in arms}
    for work in arms.values():
        work()
        work()
    for _ in range(runs):
        times: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(steps):
            for name, work in arms.items():
                began = time.perf_counter()
                work()
                times[name].append(time.perf_counter() - began)
        for name in arms:
            medians[name].append(statistics.median(times[name]))
    return {name: statistics.median(values) for name, values in medians.items()}


def compiled_step(arm: Arm, model: PreTrainedModel) -> Callable[[], None]:
    """The arm's step with compiled MLPs; raises where this machine cannot compile."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(model.model.layers))
    plain = [layer.mlp.forward for layer in model.model.layers]
    fast = [torch.compile(forward, dynamic=False) for forward in plain]

    def work() -> None:
        for layer, forward in zip(model.model.layers, fast, strict=True):
            layer.mlp.forward = forward
        try:
            arm.step()
        finally:
            for layer in model.model.layers:
                del layer.mlp.forward

    return work


def measure(dtype: str, rows: int, quick: bool, compile_too: bool) -> list[str]:
    """A row of the table."""
    model = load_model(resolve("smollm2"), device="cpu", dtype=dtype)
    unpacked = copy.deepcopy(model)  # a copy goes on with torch's linear
    seen, budget = (96, 64) if quick else (640, 512)

    def arm_of(model: PreTrainedModel) -> Arm:
        return Arm(model, decode_cache(model, "streaming_llm", budget, seen, rows), "evictbench", seen, rows)

    buffer = torch.ones(2**24 if quick else 2**27)
    plain = arm_of(unpacked)
    arms: dict[str, Callable[[], Any]] = {
        "step": arm_of(model).step,
        "products": products(linears(model), rows, packed=False),
        "packed": products(linears(model), rows, packed=True),
        "plain": plain.step,
        "read": buffer.sum,
    }
    why = "not tried"
    if compile_too:
        try:
            step = compiled_step(arm_of(unpacked), unpacked)
            step()
            arms["compiled"] = step
        except Exception as error:  # whatever a compiler fails with is the result
            why = f"fails: {type(error).__name__}"
    seconds = in_turns(arms, 1 if quick else 5, 2 if quick else 8)
    bandwidth = buffer.nbytes / seconds["read"]
    ratio = seconds["step"] / seconds["products"]
    wanted = {("float32", 1): 1.2, ("float32", 8): 1.25}.get((dtype, rows))
    return [
        dtype,
        str(rows),
        f"{seconds['step'] * 1e3:.1f}",
        f"{seconds['products'] * 1e3:.1f}",
        f"{ratio:.3f}",
        "reported" if wanted is None else goal(ratio, "<=", wanted),
        f"{seconds['packed'] * 1e3:.1f}",
        f"{seconds['step'] / seconds['packed']:.3f}",
        f"{read_weight_bytes(model) / bandwidth * 1e3:.1f} ({bandwidth / 1e9:.1f} GB/s)",
        f"{seconds['plain'] * 1e3:.1f}",
        f"{seconds['compiled'] * 1e3:.1f}" if "compiled" in seconds else why,
    ]


def main() -> None:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limit", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, nothing compiled: only that it runs")
    parser.add_argument("--out", type=Path, help="file of results; RESULTS.md, or none with --quick")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    cells = [("float32", 1)] if options.quick else [(d, r) for d in ("float32", "bfloat16") for r in (1, 8)]
    lines = [measure(d, r, options.quick, not options.quick and d == "float32") for d, r in cells]
    head = ["dtype", "rows", "step ms", "products ms", "ratio", "goal", "packed products ms", "ratio"]
    beside = ["weights ÷ bandwidth, ms", "step with torch's linear, ms", "and compiled MLPs, ms"]
    text = table([*head, *beside], lines)
    print(text)
    if out := options.out or (None if options.quick else RESULTS):
        replace_section(out, "A step against its own products", "python -m benchmarks.limit", text)


if __name__ == "__main__":
    main()
