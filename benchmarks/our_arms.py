"""Our side of `benchmarks.against_kvpress`, with the same commands as `benchmarks.kvpress_arms`.

python -m benchmarks.our_arms --policy tova --budget 512 --prefill bounded
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.arms import bundled_policy
from benchmarks.serving import Answer, PeakMemory, serve
from evictbench.generation.generator import Generator, Request
from evictbench.generation.runner import ModelRunner
from evictbench.models.load import load_model, load_tokenizer, resolve
from evictbench.policy.budget import Budget


class Ours:
    """The bundled model under a policy."""

    def __init__(
        self,
        policy: str,
        budget: int,
        interval: int,
        prefill: Literal["native", "bounded"],
        chunk: int,
        rows: int,
    ) -> None:
        self.source = resolve("smollm2")
        self.budget = budget
        self.interval = interval
        self.rows = rows
        self.model = load_model(self.source, device="cpu", dtype="float32")
        self.policy = bundled_policy(policy, self.model)
        self.runner = ModelRunner(self.model, self.policy, Budget(tokens=budget), prefill=prefill, chunk=chunk)
        self.cache: Any = None
        with torch.inference_mode():
            self.runner.prefill(list(range(1000, 1064)))

    @torch.inference_mode()
    def prefill(self, ids: str) -> Answer:
        """Read the prompt in chunks."""
        tokens = json.loads(Path(ids).read_text())
        self.cache = None
        with PeakMemory() as peak:
            started = time.perf_counter()
            self.cache, _ = self.runner.prefill(tokens)
            seconds = time.perf_counter() - started
        return {"seconds": seconds, "peak_bytes": peak.nbytes}

    @torch.inference_mode()
    def prepare(self, ids: str) -> Answer:
        """Read the prompt and decode one interval, so that both sides are as far."""
        tokens = json.loads(Path(ids).read_text())
        with PeakMemory() as peak:
            self.cache, logits = self.runner.prefill(tokens)
            self.token = int(logits.argmax())
            self.position = len(tokens)
            self.decode()
        return {"peak_bytes": peak.nbytes}

    @torch.inference_mode()
    def decode(self) -> Answer:
        """Take as many steps as the other side does from cut to cut; each evicts something."""
        started = time.perf_counter()
        for _ in range(self.interval):
            logits = self.runner.forward(self.cache, [[self.token]], [self.position])
            self.token = int(logits[0, -1].argmax())
            self.position += 1
        seconds = time.perf_counter() - started
        entries = self.cache.rows[0].occupancy.largest
        assert entries == self.budget, f"{entries} entries, not {self.budget}"
        return {"seconds": seconds, "steps": self.interval, "entries": entries}

    def evaluate(self, prompts: str, new_tokens: int) -> Answer:
        """Answer all prompts, rows decoded together."""
        samples = json.loads(Path(prompts).read_text())
        generator = Generator(
            self.model,
            load_tokenizer(self.source),
            self.policy,
            self.runner.budget,
            prefill=self.runner.prefill_mode,
            chunk=self.runner.chunk,
            batch_size=self.rows,
        )
        generator._ends = frozenset()
        requests = [
            Request(index, tuple(sample["ids"]), sample["border"], new_tokens) for index, sample in enumerate(samples)
        ]
        started = time.perf_counter()
        made = sum(len(completion.tokens) for completion in generator.run(requests))
        return {"seconds": time.perf_counter() - started, "tokens": made}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.our_arms", description=__doc__)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--budget", type=int, required=True)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--prefill", choices=["native", "bounded"], default="native")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rows", type=int, default=16)
    options = parser.parse_args()
    arm = Ours(options.policy, options.budget, options.interval, options.prefill, options.chunk, options.rows)
    serve({do: getattr(arm, do) for do in ("prefill", "prepare", "decode", "evaluate")})


if __name__ == "__main__":
    main()
