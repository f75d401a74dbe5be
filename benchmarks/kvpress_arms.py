"""kvpress' side of `benchmarks.against_kvpress`: runs in an environment of its own, and imports nothing of evictbench.

    .venv-kvpress/bin/python -m benchmarks.kvpress_arms --model FOLDER --policy tova --budget 512

Every pass is made as kvpress' own pipeline makes it: the prompt in one pass without logits, explicit positions that
count from the whole prompt, greedy tokens one by one; the whole evaluation is the pipeline itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from kvpress import DecodingPress, ObservedAttentionPress, StreamingLLMPress, TOVAPress
from kvpress.pipeline import KVPressTextGenerationPipeline
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.serving import Answer, PeakMemory, serve

PRESSES = {"streaming_llm": StreamingLLMPress, "tova": TOVAPress, "h2o": ObservedAttentionPress}

EAGER = {"h2o"}
"""Presses that need the attention weights."""


class KVPress:
    """A model under a press."""

    def __init__(self, folder: str, policy: str, budget: int, interval: int) -> None:
        attention = "eager" if policy in EAGER else "sdpa"
        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention
        ).eval()
        self.press = PRESSES[policy]()
        # No states are buffered: both presses look at the last one alone.
        self.decoding = DecodingPress(
            base_press=PRESSES[policy](),
            compression_interval=interval,
            target_size=budget,
            hidden_states_buffer_size=0,
        )
        self.budget = budget
        self.interval = interval
        self.cache: Any = None
        self.stack = contextlib.ExitStack()
        with torch.inference_mode():
            self.model(input_ids=torch.arange(1000, 1064)[None])

    def _read(self, ids: list[int]) -> tuple[Any, torch.Tensor]:
        cache = DynamicCache()
        output = self.model.model(input_ids=torch.tensor([ids]), past_key_values=cache)
        return cache, output.last_hidden_state[:, -1:]

    def _ratio_for(self, length: int) -> None:
        self.press.compression_ratio = self.decoding._find_target_compression_ratio(length, self.budget)

    def _check(self, cache: Any) -> None:
        kept = {layer.keys.shape[2] for layer in cache.layers}
        assert kept == {self.budget}, f"kept {kept}, not {self.budget}"

    def versions(self) -> Answer:
        from importlib.metadata import version

        import kvpress
        import transformers

        return {
            "kvpress": version(kvpress.__name__),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
        }

    @torch.inference_mode()
    def prefill(self, ids: str) -> Answer:
        """Read the prompt and cut it at its end."""
        tokens = json.loads(Path(ids).read_text())
        self.cache = None
        self._ratio_for(len(tokens))
        with PeakMemory() as peak:
            started = time.perf_counter()
            with self.press(self.model):
                self.cache, _ = self._read(tokens)
            seconds = time.perf_counter() - started
        self._check(self.cache)
        return {"seconds": seconds, "peak_bytes": peak.nbytes}

    @torch.inference_mode()
    def prepare(self, ids: str) -> Answer:
        """Read the prompt, which DecodingPress leaves whole, and decode up to its first cut."""
        tokens = json.loads(Path(ids).read_text())
        with PeakMemory() as peak:
            self.cache, last = self._read(tokens)
            self.token = int(self.model.lm_head(last)[0, -1].argmax())
            self.position = len(tokens)
            self.stack.enter_context(self.decoding(self.model))
            self.decode()
        return {"peak_bytes": peak.nbytes}

    @torch.inference_mode()
    def decode(self) -> Answer:
        """One interval, at whose end the cache is cut."""
        started = time.perf_counter()
        for _ in range(self.interval):
            output = self.model(
                input_ids=torch.tensor([[self.token]]),
                past_key_values=self.cache,
                position_ids=torch.tensor([[self.position]]),
            )
            self.token = int(output.logits[0, -1].argmax())
            self.position += 1
        seconds = time.perf_counter() - started
        self._check(self.cache)
        return {"seconds": seconds, "steps": self.interval, "entries": self.budget + self.interval - 1}

    @torch.inference_mode()
    def evaluate(self, prompts: str, new_tokens: int) -> Answer:
        """All prompts through the pipeline, the context cut by the press."""
        samples = json.loads(Path(prompts).read_text())
        pipeline = KVPressTextGenerationPipeline(
            model=self.model, tokenizer=AutoTokenizer.from_pretrained(self.folder), device="cpu"
        )
        self.model.generation_config.eos_token_id = None
        made = 0

        def count(*_: Any) -> None:
            nonlocal made
            made += 1

        counting = self.model.lm_head.register_forward_pre_hook(count)
        started = time.perf_counter()
        for sample in samples:
            context, question = sample["ids"][: sample["border"]], sample["ids"][sample["border"] :]
            self._ratio_for(len(context))
            cache = DynamicCache()
            pipeline._forward(
                {"context_ids": torch.tensor([context]), "questions_ids": [torch.tensor([question])]},
                max_new_tokens=new_tokens,
                press=self.press,
                cache=cache,
            )
            self._check(cache)
        seconds = time.perf_counter() - started
        counting.remove()
        return {"seconds": seconds, "tokens": made}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kvpress_arms", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--policy", choices=list(PRESSES), required=True)
    parser.add_argument("--budget", type=int, required=True)
    parser.add_argument("--interval", type=int, default=128)
    options = parser.parse_args()
    arm = KVPress(options.model, options.policy, options.budget, options.interval)
    serve({do: getattr(arm, do) for do in ("versions", "prefill", "prepare", "decode", "evaluate")})


if __name__ == "__main__":
    main()
