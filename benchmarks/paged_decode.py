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

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PretrainedConfig

from benchmarks.arms import WARM_STEPS, bundled_policy, random_tokens
from evictbench.cache.base import KVCache
from evictbench.generation.runner import ModelRunner
from evictbench.models.load import load_model, resolve
from evictbench.models.policy_weights import Weights
from evictbench.models.ready import ready_policy
from evictbench.policies.dms import DMS, Settings
from evictbench.policy import BasePolicy, ModelShape, NewEntries
from evictbench.policy.budget import Budget

WINDOW = 32
GOALS = {"decode time, pages / uniform": 1.5, "bytes, held / kept entries": 1.15}


class DrawnDMS(DMS):  # type: ignore[misc]
    """DMS whose gate is computed and then overruled: each KV head marks a share of its own of the tokens.

    kept: the share that each head keeps, `[layers, kv_heads]`.
    """

    def __init__(self, kept: Tensor) -> None:
        super().__init__(Settings(window=WINDOW))
        self.kept = kept

    def allot(self, share: float, length: int) -> float:
        """A logit above 0 marks, whatever the budget."""
        return 0.0

    def expiry(self, entries: NewEntries) -> Tensor:
        """As of `DMS.expiry`, with logits of 1 and -1."""
        assert entries.activation is not None
        order = (entries.positions.float() * 0.6180339887).frac()[:, None]
        marks = order > self.kept[entries.layer][None, :, None]
        logits = torch.where(marks, 1.0, 0.0 * entries.activation - 1.0)
        expiry: Tensor = super().expiry(replace(entries, activation=logits))
        return expiry


def drawn_dms(config: PretrainedConfig, kept: float) -> BasePolicy:
    """A `DrawnDMS` with a gate drawn at random. kept: the mean of the shares that heads keep."""
    shape, generator = ModelShape.of(config), torch.Generator().manual_seed(0)
    heads = (shape.layers, shape.kv_heads)
    weight = torch.randn((*heads, shape.hidden_size), generator=generator) * 0.01
    # A few heads keep nearly all, most keep little: shares between 0 and 1 with the mean `kept`.
    shares = torch.rand(heads, generator=generator) ** (1 / kept - 1)
    weights = Weights({"weight": weight, "bias": torch.zeros(heads)}, {}, "drawn", "0")
    return ready_policy(DrawnDMS(shares), config, weights=weights).policy


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
    prompt = random_tokens(options.prompt)[0].tolist()

    runners: dict[str, ModelRunner] = {}
    caches: dict[str, KVCache] = {}
    runners["pages"] = ModelRunner(
        model, drawn_dms(model.config, options.kept), Budget(share=options.kept), chunk=options.chunk
    )
    caches["pages"], _ = runners["pages"].prefill(prompt)
    sizes = [(caches["pages"].kept(layer) >= 0).sum(-1).double() for layer in range(shape.layers)]
    mean = round(float(torch.cat(sizes).mean()))
    runners["uniform"] = ModelRunner(
        model, bundled_policy("random", model), Budget(tokens=mean + 1), prefill="bounded", chunk=options.chunk
    )
    caches["uniform"], _ = runners["uniform"].prefill(prompt)

    times: dict[str, list[float]] = {"pages": [], "uniform": []}
    ratios: dict[str, float] = {"bytes, held / kept entries": 0.0}
    for step in range(options.steps):
        for arm, runner in runners.items():
            started = time.perf_counter()
            runner.forward(caches[arm], [[1000 + step]], caches[arm].seen)
            times[arm].append(time.perf_counter() - started)
        entries = sum(int((caches["pages"].kept(layer) >= 0).sum()) for layer in range(shape.layers))
        held = caches["pages"].nbytes() / (entries * 2 * shape.head_dim * 4)
        ratios["bytes, held / kept entries"] = max(ratios["bytes, held / kept entries"], held)
    medians = {arm: float(torch.tensor(seconds[WARM_STEPS:]).median()) for arm, seconds in times.items()}
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
        numbers = {"settings": settings, "mean_entries": mean, "seconds": medians, "ratios": ratios}
        options.out.write_text(json.dumps(numbers, indent=2))


if __name__ == "__main__":
    main()
