"""The cost of a learned policy: its target beside a forward pass, and its scorer in every decode step.

    python -m benchmarks.learned                       # the bundled model, its bundled weights
    python -m benchmarks.learned --weights kvpop=FOLDER --weights kvpop_mlp=FOLDER
    python -m benchmarks.learned --random              # weights drawn at random: the time is the same

Float32. The target: a plain forward pass, and what the labels of every layer take within one, in turn, the best of
some; the most bytes that one layer's labels hold at once, for texts of doubled length. Decode: every arm takes one step
in turn, medians over the steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import weakref
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from benchmarks.arms import WARM_STEPS, Arm, bundled_policy, random_tokens, take_turns, timed
from evictbench.errors import UserError
from evictbench.generation.dense_run import watch_dense_run
from evictbench.generation.runner import ModelRunner
from evictbench.models.load import load_model, resolve
from evictbench.models.ready import ready_policy
from evictbench.policy import BasePolicy, ModelShape
from evictbench.policy.budget import Budget
from evictbench.policy.future_attention import future_labels
from evictbench.registry import parse_policy
from evictbench.trace.random_weights import WINDOW, random_weights

LABELS = ("mean", "max")
GOALS = {
    **{f"{label} target / forward": ("<=", 1.3) for label in LABELS},
    **{f"{label} memory, twice the text": ("<=", 2.2) for label in LABELS},
    "kvpop decode time / streaming_llm": ("<=", 1.15),
    "kvpop_mlp decode time / streaming_llm": ("<=", 1.15),
    "indexmem_pp decode time / streaming_llm": ("<=", 1.2),
    "distillcache decode time / streaming_llm": ("<=", 1.2),
}


def target_seconds(model: PreTrainedModel, length: int, repeats: int) -> tuple[float, dict[str, float]]:
    """A plain forward pass, and what each label's pass takes beside it: the best of `repeats`, in turn."""
    tokens = random_tokens(length)[0].tolist()

    def label_pass(label: Any) -> float:
        inside = 0.0

        def watch(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> None:
            nonlocal inside
            seconds, _ = timed(lambda: future_labels(query, key, window=WINDOW, scaling=scaling, label=label))
            inside += seconds

        watch_dense_run(model, tokens, watch)
        return inside

    forward, targets = float("inf"), dict.fromkeys(LABELS, float("inf"))
    for _ in range(repeats):
        seconds, _ = timed(lambda: watch_dense_run(model, tokens, lambda *_: None))
        forward = min(forward, seconds)
        for label in LABELS:
            targets[label] = min(targets[label], label_pass(label))
    return forward, targets


class LiveBytes(TorchDispatchMode):
    """Counts the most bytes that the results of operations held at once, beside those of the tensors that are given."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if nbytes and address not in self._known:
            self._known.add(address)
            self.now += nbytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, address, nbytes)

    def _freed(self, address: int, nbytes: int) -> None:
        self._known.discard(address)
        self.now -= nbytes


def target_bytes(shape: ModelShape, length: int, label: Any) -> int:
    """The most bytes that one layer's labels take beside its queries and keys."""
    query = torch.randn(1, shape.heads, length, shape.head_dim)
    key = torch.randn(1, shape.kv_heads, length, shape.head_dim)
    live = LiveBytes(query, key)
    with live:
        future_labels(query, key, window=WINDOW, scaling=shape.head_dim**-0.5, label=label)
    return live.peak


def learned_policy(name: str, weights: str | None, random: bool, model: PreTrainedModel) -> BasePolicy:
    """A policy with its weights. weights: a folder; None: the bundled ones, or random ones if `random` says so."""
    if not random:
        return bundled_policy(name, model, weights)
    chosen = parse_policy(name)
    drawn = random_weights(chosen.policy(chosen.config), model.config) if chosen.policy.learned else None
    return ready_policy(chosen, model.config, weights=drawn).policy


def decode_arms(model: PreTrainedModel, policies: dict[str, BasePolicy], options: argparse.Namespace) -> dict[str, Arm]:
    """Every policy's cache after the same prompt, and its decode steps in turns."""
    prompt = random_tokens(options.prompt)[0].tolist()
    arms: dict[str, Arm] = {}
    for name, policy in policies.items():
        runner = ModelRunner(model, policy, Budget(tokens=options.budget), chunk=options.chunk)
        arms[name] = Arm(model, runner.prefill(prompt)[0], "evictbench", options.prompt)
    take_turns(arms, options.steps)
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learned", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", nargs="+", default=["kvpop", "kvpop_mlp", "indexmem_pp", "distillcache"])
    parser.add_argument("--weights", action="append", default=[], metavar="POLICY=FOLDER")
    parser.add_argument("--random", action="store_true", help="weights drawn at random")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the target's text")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens read before decoding")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="short texts and few steps, to see that it runs")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    if options.quick:
        options.length, options.prompt, options.budget, options.steps, options.repeats = 512, 256, 128, 10, 1
    torch.set_grad_enabled(False)
    console = Console()
    model = load_model(resolve("smollm2"), device="cpu", dtype="float32")
    shape = ModelShape.of(model.config)
    given = dict(item.split("=", 1) for item in options.weights)
    try:
        policies = {
            name: learned_policy(name, given.get(name), options.random, model)
            for name in ("streaming_llm", *options.policies)
        }
    except UserError as error:
        raise SystemExit(f"{error} (--random needs none.)") from error
    console.print(
        f"SmolLM2-135M, float32, {torch.get_num_threads()} threads, torch {torch.__version__}, {platform.machine()}; "
        f"target over {options.length} tokens, window {WINDOW}; decode after {options.prompt}, budget {options.budget}"
    )

    forward, targets = target_seconds(model, options.length, options.repeats)
    lengths = (options.length, 2 * options.length, 4 * options.length)
    memory = {label: [target_bytes(shape, length, label) for length in lengths] for label in LABELS}
    table = Table("target", "s", *(f"MB at {length}" for length in lengths), title="Target")
    table.add_row("a forward pass", f"{forward:.2f}", *("-" for _ in lengths))
    for label in LABELS:
        table.add_row(label, f"{targets[label]:.2f}", *(f"{grown / 1e6:.1f}" for grown in memory[label]))
    console.print(table)

    arms = decode_arms(model, policies, options)
    table = Table("arm", "decode ms", "cache MB", title="Decode")
    for name, arm in arms.items():
        table.add_row(name, f"{arm.seconds * 1e3:.2f}", f"{arm.cache.nbytes() / 1e6:.2f}")
    console.print(table)

    ratios = {f"{label} target / forward": targets[label] / forward for label in LABELS}
    for label in LABELS:
        pairs = zip(memory[label][1:], memory[label], strict=False)
        ratios[f"{label} memory, twice the text"] = max(more / max(1, less) for more, less in pairs)
    base = arms["streaming_llm"]
    ratios |= {f"{name} decode time / streaming_llm": arms[name].seconds / base.seconds for name in options.policies}
    for name in options.policies:
        # Arms take their steps in turn, so the same moment is compared with itself.
        paired = [
            ours / theirs for ours, theirs in zip(arms[name].times[WARM_STEPS:], base.times[WARM_STEPS:], strict=True)
        ]
        ratios[f"{name} decode time / streaming_llm, step by step"] = statistics.median(paired)
    table = Table("ratio", "measured", "goal", "met", title="Ratios")
    for ratio, value in ratios.items():
        sign, goal = GOALS.get(ratio, ("", 0.0))
        table.add_row(
            ratio, f"{value:.3f}", f"{sign} {goal}" if sign else "-", ("yes" if value <= goal else "no") if sign else ""
        )
    console.print(table)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {name: str(value) for name, value in vars(options).items()}
        numbers = {"settings": settings, "forward_seconds": forward, "memory": memory, "ratios": ratios}
        options.out.write_text(json.dumps(numbers, indent=2))


if __name__ == "__main__":
    main()
