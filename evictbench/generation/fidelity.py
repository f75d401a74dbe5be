"""What eviction does to the model's distribution: teacher-forced over a text, against the full cache.

A text is a prompt and a continuation. One dense pass reads all of it with everything in the cache. One evicted pass
reads the prompt under the policy and is then fed the continuation token by token, several texts as rows of one decode
batch, so that eviction acts at every step exactly as in generation. Before each token of the continuation, the two
next-token distributions are compared over the whole vocabulary.

Of the dense pass only the hidden states before the output head are kept, one vector a token; the head sees them
beside those of the evicted pass, so that logits never take more than two vectors of the vocabulary's size a row.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from evictbench.cache.base import KVCache
from evictbench.errors import NotFinite, UserError
from evictbench.generation.batching import continuous_batching
from evictbench.generation.dense_run import Everything
from evictbench.generation.generator import Completion
from evictbench.generation.runner import Costs, ModelRunner
from evictbench.policy.base import BasePolicy
from evictbench.policy.declarations import Prefill

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.generation.recency import RecencyWindow
    from evictbench.policy.budget import Budget

BUCKET = 32
"""Tokens of the continuation that one number by position stands for."""

QUARTERS = 4

DensePasses = MutableMapping[tuple[tuple[int, ...], tuple[int, ...]], Tensor]
"""Prompt and continuation to the hidden states `[continuation, hidden]` that the dense pass gives the output head."""


@dataclass(frozen=True)
class Text:
    """A text to compare on: token ids of the prompt and of its continuation, each at least one.

    border: index of the first prompt token after the context, where the context alone is compressed; None: the whole
    prompt is.
    """

    key: Hashable
    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    border: int | None = None


class TokenDivergence(NamedTuple):
    """Before one token of a continuation. kl: KL(full ‖ evicted) in nats over the whole vocabulary. agrees: 1 where
    both put the same token first. nll_full, nll: minus the log-probability of the text's token, in nats."""

    kl: float
    agrees: float
    nll_full: float
    nll: float


@dataclass(frozen=True, kw_only=True)
class Measured(Completion):
    """A text's comparison, with the costs that a completion has; `tokens` is the continuation that was fed.

    score: the share of its tokens before which both distributions have the same first token.
    metrics: kl, agreement, ppl_ratio = exp(nll - nll_full), nll, nll_full, and kl_q1 to kl_q4, the mean KL of each
    quarter of the continuation (those that have a token). divergence: one item a token.
    """

    score: float
    metrics: dict[str, float]
    divergence: tuple[TokenDivergence, ...] = field(repr=False)

    @property
    def by_position(self) -> dict[str, list[float]]:
        """Mean KL and agreement of every 32 tokens of the continuation."""
        parts = [self.divergence[start : start + BUCKET] for start in range(0, len(self.divergence), BUCKET)]
        return {
            "kl": [fmean(token.kl for token in part) for part in parts],
            "agreement": [fmean(token.agrees for token in part) for part in parts],
        }


@dataclass
class _Row:
    """A text in the decode batch: the dense pass's hidden states `[tokens, hidden]`, and what was found so far."""

    item: Text
    dense: Tensor
    divergence: list[TokenDivergence] = field(default_factory=list)
    prefill_peak_bytes: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def ended(self) -> bool:
        """Every token of the continuation has been compared."""
        return len(self.divergence) == len(self.item.continuation)


class Comparison:
    """Full cache against evicted cache, text by text.

    budget: None for a policy without one. prefill: "native", "dense" or "bounded", in chunks of `chunk` tokens.
    batch_size: rows decoded together; halved when the device runs out of memory, and the rows started again.
    dense_passes: where to keep what the dense pass of a text found, for other comparisons on the same model and texts.
    recency: as of `ModelRunner`.
    Raises UserError for an impossible budget, and for a model without an output head to read.
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
        dense_passes: DensePasses | None = None,
        recency: RecencyWindow | None = None,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"A batch has 1 row or more, not {batch_size}.")
        if model.get_output_embeddings() is None:
            raise UserError(f"{type(model).__name__} has no output head, so its distributions cannot be compared.")
        self.runner = ModelRunner(model, policy, budget, prefill=prefill, chunk=chunk, recency=recency)
        self.dense = ModelRunner(model, Everything(), None, chunk=chunk)
        self.batch_size = batch_size
        self.dense_passes = dense_passes

    def run(self, texts: Iterable[Text]) -> Iterator[Measured]:
        """Compare on every text; results come as they finish, in any order."""
        return continuous_batching(self, texts)

    def new_cache(self, *, rows: int) -> KVCache:
        """The decode cache."""
        return self.runner.new_cache(rows=rows)

    def start(self, text: Text) -> tuple[_Row, KVCache]:
        """The dense pass over all of a text, then its prompt under the policy, the question as one more chunk."""
        if not text.prompt or not text.continuation:
            raise UserError("A text to compare on has a prompt and a continuation of at least one token each.")
        row = _Row(text, self._dense_once(text))
        started = time.perf_counter()
        length = len(text.prompt)
        cache = self.runner.prompt_cache(text.prompt, text.border, text.continuation[:-1])
        for start, stop in self.runner.chunks(length, text.border):
            tokens = [list(text.prompt[start:stop])]
            if stop < length:
                self.runner.forward(cache, tokens, [start])
            else:
                self._compare([row], cache, tokens, [start])
        row.prefill_peak_bytes = cache.bytes_peak
        row.prefill_seconds = time.perf_counter() - started
        return row, cache

    def _dense_once(self, text: Text) -> Tensor:
        """The dense pass, unless it has been kept."""
        if self.dense_passes is None:
            return self._dense_hidden(text)
        tokens = text.prompt, text.continuation
        if tokens not in self.dense_passes:
            self.dense_passes[tokens] = self._dense_hidden(text)
        return self.dense_passes[tokens]

    def _dense_hidden(self, text: Text) -> Tensor:
        """`[continuation, hidden]`: what the output head reads before each token of the continuation."""
        tokens = [*text.prompt, *text.continuation[:-1]]
        first = len(text.prompt) - 1
        cache = self.dense.new_cache(prompt_length=len(tokens))
        found: list[Tensor] = []
        for start, stop in self.dense.chunks(len(tokens), None):

            def keep(hidden: Tensor, start: int = start) -> Tensor:
                found.append(hidden[0, max(0, first - start) :].clone())
                return hidden[:, -1:]

            with _before_head(self.dense.model, keep):
                self.dense.forward(cache, [tokens[start:stop]], [start], keep=0)
        return torch.cat(found)

    def step(self, active: list[_Row], cache: KVCache) -> None:
        """Feed every row the next token of its text."""
        started = time.perf_counter()
        tokens = [[row.item.continuation[len(row.divergence) - 1]] for row in active]
        self._compare(active, cache, tokens, cache.seen)
        share = (time.perf_counter() - started) / len(active)
        for row in active:
            row.decode_seconds += share

    def _compare(self, rows: Sequence[_Row], cache: KVCache, tokens: list[list[int]], starts: Sequence[int]) -> None:
        """Feed tokens and compare what follows them with what follows them in the dense pass."""
        dense = torch.stack([row.dense[len(row.divergence)] for row in rows])

        def beside(hidden: Tensor) -> Tensor:
            return torch.cat((dense.to(hidden.device)[:, None], hidden), dim=1)

        with _before_head(self.runner.model, beside):
            logits = self.runner.forward(cache, tokens, starts)
        following = [row.item.continuation[len(row.divergence)] for row in rows]
        for row, values in zip(rows, divergence(logits[:, 0], logits[:, 1], following), strict=True):
            if not all(map(math.isfinite, values)):
                raise NotFinite(row.item.key, len(row.divergence))
            row.divergence.append(values)

    def finish(self, row: _Row, cache: KVCache | None, index: int) -> Measured:
        """The comparison of a text that has ended."""
        costs = Costs.of(cache, index)
        metrics = summarise(row.divergence)
        return Measured(
            key=row.item.key,
            tokens=row.item.continuation,
            text="",
            truncated=False,
            occupancy_max=costs.occupancy_max,
            occupancy_mean=costs.occupancy_mean,
            cache_bytes=costs.cache_bytes,
            prefill_peak_bytes=row.prefill_peak_bytes,
            prefill_seconds=row.prefill_seconds,
            first_token_seconds=row.prefill_seconds,
            decode_seconds=row.decode_seconds,
            decode_steps=len(row.divergence) - 1,
            recency=costs.recency,
            score=metrics["agreement"],
            metrics=metrics,
            divergence=tuple(row.divergence),
        )


def evaluate(
    model: PreTrainedModel, policy: BasePolicy, budget: Budget | None, texts: Iterable[Text], **settings: Any
) -> list[Measured]:
    """Compare on every text, results in the texts' order. settings: those of `Comparison`."""
    texts = list(texts)
    found = {result.key: result for result in Comparison(model, policy, budget, **settings).run(texts)}
    return [found[text.key] for text in texts]


def divergence(full: Tensor, evicted: Tensor, following: Sequence[int]) -> list[TokenDivergence]:
    """Compare logits `[rows, vocabulary]` row by row, in float64 (float32 where the device has no other).

    following: the text's next token in each row.
    """
    dtype = torch.float32 if full.device.type == "mps" else torch.float64
    found: list[Tensor] = []
    for row, token in enumerate(following):  # one row at a time: a large vocabulary in float64 is a megabyte
        p, q = full[row].to(dtype).log_softmax(-1), evicted[row].to(dtype).log_softmax(-1)
        terms = (p.exp() * (p - q)).masked_fill(p == -math.inf, 0.0)
        agrees = (full[row].argmax() == evicted[row].argmax()).to(dtype)
        found.append(torch.stack([terms.sum().clamp(min=0), agrees, -p[token], -q[token]]))
    return [TokenDivergence(*values) for values in torch.stack(found).tolist()]


def summarise(tokens: Sequence[TokenDivergence]) -> dict[str, float]:
    """A text's metrics; see `Measured`."""
    nll, nll_full = fmean(token.nll for token in tokens), fmean(token.nll_full for token in tokens)
    metrics = {
        "kl": fmean(token.kl for token in tokens),
        "agreement": fmean(token.agrees for token in tokens),
        "ppl_ratio": math.exp(nll - nll_full),
        "nll": nll,
        "nll_full": nll_full,
    }
    bounds = [round(len(tokens) * quarter / QUARTERS) for quarter in range(QUARTERS + 1)]
    for quarter, (start, stop) in enumerate(itertools.pairwise(bounds), start=1):
        if start < stop:
            metrics[f"kl_q{quarter}"] = fmean(token.kl for token in tokens[start:stop])
    return metrics


@contextmanager
def _before_head(model: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change what the output head reads, `[rows, tokens, hidden]`; what the model does with its output still holds."""
    head = model.get_output_embeddings()
    assert head is not None

    def hook(module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (change(arguments[0]), *arguments[1:])

    handle = head.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
