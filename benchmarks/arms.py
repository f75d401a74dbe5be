"""Caches that decode beside each other in one process, and the bundled model's policies that they live under."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from evictbench.cache.probe import cache_argument
from evictbench.generation.runner import ModelRunner
from evictbench.models.load import resolve, weights_hash
from evictbench.models.ready import ready_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.cache.base import KVCache
    from evictbench.policy import BasePolicy

WARM_STEPS = 3
"""Steps of each arm that are not counted."""

Result = TypeVar("Result")


def bundled_policy(name: str, model: PreTrainedModel, weights: str | None = None) -> BasePolicy:
    """A policy that is ready for the bundled model. weights: a folder; None: those that come with the policy.

    Raises UserError as `ready_policy` does.
    """
    source = resolve("smollm2")
    return ready_policy(
        name, model.config, model=source.name, model_sha256=lambda: weights_hash(source), weights=weights
    ).policy


def random_tokens(length: int, rows: int = 1) -> Tensor:
    """Token ids `[rows, length]`, always the same."""
    return torch.randint(1000, 40_000, (rows, length), generator=torch.Generator().manual_seed(0))


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds that some work takes, and its result."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def admitted(runner: ModelRunner, prompt: KVCache, rows: int) -> KVCache:
    """A decode cache whose rows all hold what is kept of one prompt."""
    cache = runner.new_cache(rows=rows)
    for _ in range(rows):
        cache.admit(prompt)
    return cache


class Arm:
    """A cache that decodes one token of each row a call.

    cache: any transformers cache whose rows have seen `seen` tokens. attention: the implementation that belongs to it.
    times: seconds of each step.
    """

    def __init__(self, model: PreTrainedModel, cache: Any, attention: str, seen: int, rows: int = 1) -> None:
        self.model, self.cache, self.attention, self.seen, self.rows = model, cache, attention, seen, rows
        self.times: list[float] = []
        self._cache_argument = cache_argument(model)

    def step(self) -> None:
        """Decode the next token, and add its time."""
        if self.model.config._attn_implementation != self.attention:
            self.model.set_attn_implementation(self.attention)
        ids = torch.full((self.rows, 1), 1000 + self.seen % 1000)
        seconds, _ = timed(lambda: self.forward(ids))
        self.times.append(seconds)

    def forward(self, ids: Tensor) -> Tensor:
        """One forward pass over `[rows, new]`; the last token's logits `[rows, vocabulary]`."""
        positions = torch.arange(self.seen, self.seen + ids.shape[1]).expand(self.rows, -1)
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self.cache},
        )
        self.seen += ids.shape[1]
        logits: Tensor = output.logits[:, -1]
        return logits

    @property
    def seconds(self) -> float:
        """The median of the steps that count."""
        return statistics.median(self.times[WARM_STEPS:])


def take_turns(arms: dict[str, Arm], steps: int) -> None:
    """Let every arm take one step, then every arm the next."""
    for _ in range(steps):
        for arm in arms.values():
            arm.step()
