"""The log-probability of given continuations under a policy: a prompt is prefilled once, and each of its
continuations is fed token by token from a copy of that cache."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evictbench.cache.base import KVCache
from evictbench.errors import NotFinite, UserError
from evictbench.generation.batching import continuous_batching
from evictbench.generation.runner import Costs, ModelRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.policy.base import BasePolicy
    from evictbench.policy.budget import Budget
    from evictbench.policy.declarations import Prefill


@dataclass(frozen=True)
class Choice:
    """A prompt and one continuation of it, both of at least one token. Choices of one prompt stand side by side."""

    key: Hashable
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class ScoredChoice:
    """logprob: of the whole continuation, in nats. greedy: each of its tokens is the most likely one.

    The costs are those of a completion; a prompt that several choices have is counted with the first of them.
    """

    key: Hashable
    logprob: float
    greedy: bool
    occupancy_max: int
    occupancy_mean: float
    cache_bytes: int
    prefill_peak_bytes: int
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int


@dataclass
class _Prompt:
    """A prefilled prompt: its cache, and the log-probabilities `[vocabulary]` of what follows."""

    tokens: tuple[int, ...]
    cache: KVCache
    following: Tensor
    likeliest: int


@dataclass
class _Row:
    item: Choice
    logprob: float
    greedy: bool
    peak: int
    prefill_seconds: float
    fed: int = 0
    decode_seconds: float = 0.0

    @property
    def ended(self) -> bool:
        """The last token of a continuation is scored, and never fed."""
        return self.fed == len(self.item.continuation) - 1


class ChoiceScorer:
    """Scores choices under a policy; arguments as of `evictbench.generation.generator.Generator`.

    A policy that `needs_labels` gets them from the prompt and the model's own answer to it, as in generation.

    Raises UserError for an impossible budget and for a choice without tokens, NotFinite for logits that are NaN.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: BasePolicy,
        budget: Budget | None,
        *,
        prefill: Prefill = "native",
        chunk: int = 512,
        batch_size: int = 8,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"A batch has 1 row or more, not {batch_size}.")
        self.runner = ModelRunner(model, policy, budget, prefill=prefill, chunk=chunk)
        self.batch_size = batch_size
        self._prompt: _Prompt | None = None

    def run(self, choices: Iterable[Choice]) -> Iterator[ScoredChoice]:
        """Score every choice; results come as they finish, in any order."""
        try:
            yield from continuous_batching(self, choices)
        finally:
            self._prompt = None

    def new_cache(self, *, rows: int) -> KVCache:
        """The decode cache."""
        return self.runner.new_cache(rows=rows)

    def start(self, choice: Choice) -> tuple[_Row, KVCache]:
        """Read a choice's prompt, unless the one before had the same, and score the first token."""
        if not choice.prompt or not choice.continuation:
            raise UserError("A context and each of its continuations have at least one token.")
        started = time.perf_counter()
        if self._prompt is None or self._prompt.tokens != choice.prompt:
            self._prompt = None
            cache, logits = self.runner.prefill(choice.prompt)
            following = logits.float().log_softmax(-1)
            self._prompt = _Prompt(choice.prompt, cache, following, int(following.argmax()))
        prompt, first = self._prompt, choice.continuation[0]
        row = _Row(
            choice,
            logprob=_number(float(prompt.following[first]), choice, 0),
            greedy=first == prompt.likeliest,
            peak=prompt.cache.bytes_peak,
            prefill_seconds=time.perf_counter() - started,
        )
        return row, prompt.cache

    def step(self, active: list[_Row], cache: KVCache) -> None:
        """Feed every row the next token of its continuation, and read how likely the one after it is."""
        started = time.perf_counter()
        logits = self.runner.forward(cache, [[row.item.continuation[row.fed]] for row in active], cache.seen)[:, -1]
        wanted = torch.tensor([row.item.continuation[row.fed + 1] for row in active], device=logits.device)
        logprobs = logits.float().log_softmax(-1).gather(-1, wanted[:, None])[:, 0].tolist()
        greedy = (logits.argmax(-1) == wanted).tolist()
        share = (time.perf_counter() - started) / len(active)
        for row, logprob, likeliest in zip(active, logprobs, greedy, strict=True):
            row.fed += 1
            row.logprob += _number(logprob, row.item, row.fed)
            row.greedy = row.greedy and likeliest
            row.decode_seconds += share

    def finish(self, row: _Row, cache: KVCache | None, index: int) -> ScoredChoice:
        """The score of a choice that has ended."""
        costs = Costs.of(cache, index)
        return ScoredChoice(
            key=row.item.key,
            logprob=row.logprob,
            greedy=row.greedy,
            occupancy_max=costs.occupancy_max,
            occupancy_mean=costs.occupancy_mean,
            cache_bytes=costs.cache_bytes,
            prefill_peak_bytes=row.peak,
            prefill_seconds=row.prefill_seconds,
            decode_seconds=row.decode_seconds,
            decode_steps=row.fed,
        )


def _number(logprob: float, choice: Choice, tokens: int) -> float:
    """A log-probability, which is NaN where any logit was NaN or infinite."""
    if math.isnan(logprob):
        raise NotFinite(choice.key, tokens)
    return logprob
