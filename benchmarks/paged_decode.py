"""Decode from pages against decode from a uniform cache of the same mean size, and the bytes that the pages take.

    python -m benchmarks.paged_decode [--quick] [--out FILE]

The bundled model in float32, one row. Pages: DMS with a gate drawn at random, which is computed in full; its decisions
are then replaced by drawn ones, so that heads differ in length as much as is asked for and the mean is known. Uniform:
`random` with that mean as its budget. The arms take one step in turn; medians over the steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.__main__ import build, tokens_for
from evictbench.generation.runner import Feeder
from evictbench.models.load import load_model, resolve
from evictbench.models.policy_weights import Weights
from evictbench.policies.dms import DMS, Settings
from evictbench.policy import Arriving, ModelShape
from evictbench.policy.budget import Budget

WINDOW = 32
GOALS = {"decode time, pages / uniform": 1.5, "bytes, held / kept entries": 1.15}


class Drawn(DMS):
    """DMS whose gate is computed and then overruled: each KV head marks a share of its own of the tokens."""

    def __init__(self, shape: ModelShape, hidden: int, kept: float) -> None:
        super().__init__(Settings(window=WINDOW))
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn((shape.layers, shape.kv_heads, hidden), generator=generator) * 0.01
        bias = torch.zeros((shape.layers, shape.kv_heads))
        self.use(Weights({"weight": weight, "bias": bias}, {}, "drawn", "0"), shape)
        # A few heads keep nearly all, most keep little: shares between 0 and 1 with the mean `kept`.
        drawn = torch.rand((shape.layers, shape.kv_heads), generator=generator)
        self.kept = drawn ** (1 / kept - 1)

    def allot(self, share: float, length: int) -> float:
        return 0.0

    def expiry(self, arriving: Arriving) -> torch.Tensor:
        assert arriving.read is not None
        turn = (arriving.positions.float() * 0.6180339887).frac()[:, None]
        marks = turn > self.kept[arriving.layer][None, :, None]
        return super().expiry(replace(arriving, read=torch.where(marks, 1.0, 0.0 * arriving.read - 1.0)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paged_decode", description=__doc__)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--kept", type=float, default=0.25, help="share of the tokens that heads keep, on average")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60, help="decode steps of each arm")
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    if options.quick:
        options.prompt, options.steps = 1024, 15
    torch.set_grad_enabled(False)
    console = Console()
    model = load_model(resolve("smollm2"), device="cpu", dtype="float32")
    shape = ModelShape.of(model.config)
    prompt = tokens_for(options.prompt)[0].tolist()

    feeders: dict[str, Feeder] = {}
    caches: dict[str, Any] = {}
    feeders["pages"] = Feeder(
        model, Drawn(shape, model.config.hidden_size, options.kept), Budget(share=options.kept), chunk=options.chunk
    )
    caches["pages"], _ = feeders["pages"].read(prompt)
    sizes = [(caches["pages"].kept(layer) >= 0).sum(-1).double() for layer in range(shape.layers)]
    mean = round(float(torch.cat(sizes).mean()))
    feeders["uniform"] = Feeder(model, build("random"), Budget(tokens=mean + 1), prefill="bounded", chunk=options.chunk)
    caches["uniform"], _ = feeders["uniform"].read(prompt)

    times: dict[str, list[float]] = {"pages": [], "uniform": []}
    ratios: dict[str, float] = {"bytes, held / kept entries": 0.0}
    for step in range(options.steps):
        for arm, feeder in feeders.items():
            started = time.perf_counter()
            feeder.feed(caches[arm], [[1000 + step]], caches[arm].seen)
            times[arm].append(time.perf_counter() - started)
        entries = sum(int((caches["pages"].kept(layer) >= 0).sum()) for layer in range(shape.layers))
        held = caches["pages"].nbytes() / (entries * 2 * shape.head_dim * 4)
        ratios["bytes, held / kept entries"] = max(ratios["bytes, held / kept entries"], held)
    medians = {arm: float(torch.tensor(taken[3:]).median()) for arm, taken in times.items()}
    ratios["decode time, pages / uniform"] = medians["pages"] / medians["uniform"]

    largest = int(torch.cat(sizes).max())
    console.print(
        f"SmolLM2-135M, float32, {torch.get_num_threads()} threads, torch {torch.__version__}, {platform.machine()}; "
        f"prompt {options.prompt}, {mean} entries a head on average, {largest} in the longest; "
        f"pages {medians['pages'] * 1e3:.1f} ms, uniform {medians['uniform'] * 1e3:.1f} ms a token"
    )
    table = Table("ratio", "measured", "goal", "met")
    for name, goal in GOALS.items():
        table.add_row(name, f"{ratios[name]:.3f}", f"<= {goal}", "yes" if ratios[name] <= goal else "no")
    console.print(table)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {name: str(value) for name, value in vars(options).items()}
        found = {"settings": settings, "mean_entries": mean, "seconds": medians, "ratios": ratios}
        options.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
