"""`python -m benchmarks.limit [--quick]`: a decode step against its own matrix-vector products.

Products: every weight of a step through torch's linear, in order. Read bandwidth: a sum over
a buffer much larger than a processor's caches. Beside the step, what candidates would give: q, k, v and gate, up as
one product each; torch.compile of the MLPs. StreamingLLM, budget 512, arms in turns, the median of five runs.
bfloat16 is another model, not a faster float32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.__main__ import Arm
from benchmarks.sections import RESULTS, goal, replace_section, table
from benchmarks.steps import build, filled
from evictbench.models import load_model, resolve
from evictbench.trace_cell import read_weights


def product_weights(model: PreTrainedModel, packed: bool) -> list[torch.Tensor]:
    """The weights of every linear of a step; packed: those of one input as one matrix."""
    found: list[torch.Tensor] = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        inputs = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        gates = [mlp.gate_proj.weight, mlp.up_proj.weight]
        found += [torch.cat(inputs)] if packed else inputs
        found.append(attention.o_proj.weight)
        found += [torch.cat(gates)] if packed else gates
        found.append(mlp.down_proj.weight)
    return [*found, model.get_output_embeddings().weight]


def products(matrices: list[torch.Tensor], rows: int) -> Callable[[], None]:
    """One pass over them."""
    inputs = {m.shape[1]: torch.randn(rows, 1, m.shape[1]).to(m.dtype) for m in matrices}

    def work() -> None:
        for matrix in matrices:
            nn.functional.linear(inputs[matrix.shape[1]], matrix)

    return work


def in_turns(arms: dict[str, Callable[[], Any]], runs: int, steps: int) -> dict[str, float]:
    """Median over runs of each arm's median seconds."""
    found: dict[str, list[float]] = {name: [] for name in arms}
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
            found[name].append(statistics.median(times[name]))
    return {name: statistics.median(values) for name, values in found.items()}


def compiled_step(arm: Arm, model: PreTrainedModel) -> Callable[[], None]:
    """The arm's step with compiled MLPs; raises where this machine cannot compile."""
    plain = [layer.mlp.forward for layer in model.model.layers]
    fast = [torch.compile(forward, dynamic=False) for forward in plain]
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(plain))

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
    seen, budget = (96, 64) if quick else (640, 512)
    arm = Arm(model, filled(model, build(model, "streaming_llm"), budget, seen, rows), "evictbench", seen, rows)
    buffer = torch.ones(2**24 if quick else 2**27)
    separate, packed = product_weights(model, False), product_weights(model, True)
    arms: dict[str, Callable[[], Any]] = {
        "step": arm.step,
        "products": products(separate, rows),
        "packed": products(packed, rows),
        "read": buffer.sum,
    }
    why = "not tried"
    if compile_too:
        try:
            step = compiled_step(arm, model)
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
        f"{read_weights(model) / bandwidth * 1e3:.1f} ({bandwidth / 1e9:.1f} GB/s)",
        f"{(seconds['products'] - seconds['packed']) * 1e3:+.1f}",
        f"{(seconds['step'] - seconds['compiled']) * 1e3:+.1f}" if "compiled" in seconds else why,
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
    head = ["dtype", "rows", "step ms", "products ms", "ratio", "goal", "weights ÷ bandwidth, ms"]
    text = table([*head, "packed products save, ms", "compiled MLPs save, ms"], lines)
    print(text)
    if out := options.out or (None if options.quick else RESULTS):
        replace_section(out, "A step against its own products", "python -m benchmarks.limit", text)


if __name__ == "__main__":
    main()
