"""What a learned policy costs: its target beside a forward pass, and its scorer in every decode step.

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

from benchmarks.__main__ import Arm, plain, take_turns, timed, tokens_for
from evictbench.cache.paged.cache import PagedCache
from evictbench.cache.slots.cache import EvictionCache
from evictbench.errors import UserError
from evictbench.generation.dense_run import watch_dense_run
from evictbench.models import load, policy_weights
from evictbench.policy import ModelShape, Policy
from evictbench.policy.future_attention import future_labels
from evictbench.registry import parse_policy

LABELS = ("mean", "max")
WINDOW = 32
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
    tokens = tokens_for(length)[0].tolist()

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
    """The most bytes that the results of operations held at once, on this process's books alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

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
    with LiveBytes() as live:
        live._known |= {tensor.untyped_storage().data_ptr() for tensor in (query, key)}
        future_labels(query, key, window=WINDOW, scaling=shape.head_dim**-0.5, label=label)
    return live.peak


def fitted(name: str, where: str | None, random: bool, model: PreTrainedModel, source: load.Source) -> Policy:
    """A policy with its weights: given, bundled or random."""
    chosen = parse_policy(name)
    policy: Policy = chosen.policy(chosen.config)
    if not policy.learned:
        return policy
    shape = ModelShape.of(model.config)
    if random:
        found = policy_weights.Weights(
            random_tensors(policy, model, shape), {"settings": {"window": WINDOW}}, "random", ""
        )
    else:
        found = policy_weights.find(policy, where, source.name, load.weights_hash(source), shape)
    policy.use(found, shape)
    return policy


def random_tensors(policy: Policy, model: PreTrainedModel, shape: ModelShape) -> dict[str, torch.Tensor]:
    """What an untrained learner would save."""
    from evictbench.policy.learner import Training

    training = Training(
        window=WINDOW, budgets=(512,), length=2048, steps=1, seed=0, recipe=policy.Recipe(), model=model.config
    )
    tensors: dict[str, torch.Tensor] = policy.learner(shape, training).export()
    return tensors


def decode_arms(model: PreTrainedModel, policies: dict[str, Policy], options: argparse.Namespace) -> dict[str, Arm]:
    """Every policy with a prompt read and its budget full."""
    ids = tokens_for(options.prompt)
    arms = {}
    for name, policy in policies.items():
        kind = PagedCache if policy.ragged else EvictionCache
        cache = kind(model, policy, options.budget, prompt_length=options.prompt)
        for start in range(0, options.prompt, options.chunk):
            plain(model, cache, ids[:, start : start + options.chunk], start)
        arms[name] = Arm(model, cache, "evictbench", options.prompt)
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
    source = load.resolve("smollm2")
    model = load.load_model(source, device="cpu", dtype="float32")
    shape = ModelShape.of(model.config)
    given = dict(item.split("=", 1) for item in options.weights)
    try:
        policies = {
            name: fitted(name, given.get(name), options.random, model, source)
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
        paired = [ours / theirs for ours, theirs in zip(arms[name].times[3:], base.times[3:], strict=True)]
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
