"""What eviction does to the model's distribution: teacher-forced over a text, against the full cache.

A text is a prompt and a continuation. One dense pass reads all of it with everything in the cache. One evicted pass
reads the prompt under the policy and is then fed the continuation token by token, several texts as rows of one decode
batch, so that eviction acts at every step exactly as in generation. Before each token of the continuation, the two
next-token distributions are compared over the whole vocabulary.

Of the dense pass only the hidden states before the output head are kept, one vector a token; the head sees them
beside those of the evicted pass, so that logits never take more than two vectors of the vocabulary's size a row.
"""

from __future__ import annotations

import inspect
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from evictbench.cache import EvictionCache
from evictbench.errors import UserError
from evictbench.generation import Completion
from evictbench.policy import Policy
from evictbench.rows import admit, release

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evictbench.budget import Budget

BUCKET = 32
"""Tokens of the continuation that one number by position stands for."""

QUARTERS = 4


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


class _Everything(Policy):
    """The full cache, for the dense pass."""

    name = "everything"
    summary = "nothing is evicted"
    paper = "-"
    needs_budget = False
    shares = "model"


@dataclass
class _Row:
    """A text in the decode batch: the dense pass's hidden states `[tokens, hidden]`, and what was found so far."""

    text: Text
    dense: Tensor
    divergence: list[TokenDivergence] = field(default_factory=list)
    prefill_peak_bytes: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def ended(self) -> bool:
        return len(self.divergence) == len(self.text.continuation)


class Comparison:
    """Full cache against evicted cache, text by text.

    budget: None for a policy without one. prefill: "native", "dense" or "bounded", in chunks of `chunk` tokens.
    batch_size: rows decoded together; halved when the device runs out of memory, and the rows started again.
    Raises UserError for an impossible budget, and for a model without an output head to read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy,
        budget: Budget | None,
        *,
        prefill: Literal["native", "dense", "bounded"] = "native",
        chunk: int = 512,
        batch_size: int = 8,
    ) -> None:
        if chunk < 1 or batch_size < 1:
            raise UserError(f"A chunk and a batch have 1 or more, not {min(chunk, batch_size)}.")
        if model.get_output_embeddings() is None:
            raise UserError(f"{type(model).__name__} has no output head, so its distributions cannot be compared.")
        self.model = model
        self.policy = policy
        self.budget = budget
        self.prefill = prefill
        self.chunk = chunk
        self.batch_size = batch_size
        # The argument was renamed in transformers 5.24.
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @torch.inference_mode()
    def run(self, texts: Iterable[Text]) -> Iterator[Measured]:
        """Compare on every text; results come as they finish, in any order."""
        coming = iter(texts)
        again: deque[Text] = deque()
        active: list[_Row] = []
        cache: EvictionCache | None = None
        text: Text | None = None
        while True:
            try:
                while len(active) < self.batch_size:
                    text = again.popleft() if again else next(coming, None)
                    if text is None:
                        break
                    row, prompt = self._prefill(text)
                    if row.ended:
                        yield self._measured(row, None, 0)
                        continue
                    if cache is None:
                        cache = self._new_cache(rows=self.batch_size)
                    admit(cache, prompt)
                    active.append(row)
                    text = None
                if not active or cache is None:
                    return
                self._step(active, cache)
            except torch.OutOfMemoryError:
                if not active:
                    raise
                # A step that failed half-way has left some layers ahead of others: start these rows again.
                again.extendleft(row.text for row in reversed(active))
                if text is not None:
                    again.append(text)
                self.batch_size = max(1, len(active) // 2)
                active, cache, text = [], None, None
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                continue
            for index in range(len(active) - 1, -1, -1):
                if active[index].ended:
                    yield self._measured(active[index], cache, index)
                    release(cache, index)
                    active[index] = active[-1]
                    active.pop()

    def _new_cache(self, *, prompt_length: int | None = None, rows: int | None = None) -> EvictionCache:
        return EvictionCache(
            self.model, self.policy, self.budget, prefill=self.prefill, prompt_length=prompt_length, rows=rows
        )

    def _prefill(self, text: Text) -> tuple[_Row, EvictionCache]:
        """The dense pass over all of a text, then its prompt under the policy, the question as one more chunk."""
        if not text.prompt or not text.continuation:
            raise UserError("A text to compare on has a prompt and a continuation of at least one token each.")
        dense = self._dense_hidden(text)
        started = time.perf_counter()
        length = len(text.prompt)
        border = text.border if text.border and text.border < length else length
        cache = self._new_cache(prompt_length=border)
        bounds = [*range(0, border, self.chunk), border, *([length] if border < length else [])]
        row = _Row(text, dense)
        for start, stop in itertools.pairwise(bounds):
            tokens = [list(text.prompt[start:stop])]
            if stop < length:
                self._forward(cache, tokens, [start], keep=1)
            else:
                self._compare([row], cache, tokens, [start])
        row.prefill_peak_bytes = cache.bytes_peak
        row.prefill_seconds = time.perf_counter() - started
        return row, cache

    def _dense_hidden(self, text: Text) -> Tensor:
        """`[continuation, hidden]`: what the output head reads before each token of the continuation."""
        tokens = [*text.prompt, *text.continuation[:-1]]
        first = len(text.prompt) - 1
        cache = EvictionCache(self.model, _Everything(), prompt_length=len(tokens))
        found: list[Tensor] = []
        for start in range(0, len(tokens), self.chunk):

            def keep(hidden: Tensor, start: int = start) -> Tensor:
                found.append(hidden[0, max(0, first - start) :].clone())
                return hidden[:, -1:]

            with _before_head(self.model, keep):
                self._forward(cache, [tokens[start : start + self.chunk]], [start], keep=0)
        return torch.cat(found)

    def _step(self, active: Sequence[_Row], cache: EvictionCache) -> None:
        """Feed every row the next token of its text."""
        started = time.perf_counter()
        tokens = [[row.text.continuation[len(row.divergence) - 1]] for row in active]
        self._compare(active, cache, tokens, cache.seen)
        share = (time.perf_counter() - started) / len(active)
        for row in active:
            row.decode_seconds += share

    def _compare(
        self, rows: Sequence[_Row], cache: EvictionCache, tokens: list[list[int]], starts: Sequence[int]
    ) -> None:
        """Feed tokens and compare what follows them with what follows them in the dense pass."""
        dense = torch.stack([row.dense[len(row.divergence)] for row in rows])

        def beside(hidden: Tensor) -> Tensor:
            return torch.cat((dense.to(hidden.device)[:, None], hidden), dim=1)

        with _before_head(self.model, beside):
            logits = self._forward(cache, tokens, starts, keep=1)
        following = [row.text.continuation[len(row.divergence)] for row in rows]
        for row, values in zip(rows, divergence(logits[:, 0], logits[:, 1], following), strict=True):
            row.divergence.append(values)

    def _forward(self, cache: EvictionCache, tokens: list[list[int]], starts: Sequence[int], keep: int) -> Tensor:
        """Logits `[rows, what the head was shown, vocabulary]`; keep 0 shows it every token, 1 the last."""
        device = self.model.device
        input_ids = torch.tensor(tokens, device=device)
        position_ids = torch.tensor(starts, device=device)[:, None] + torch.arange(input_ids.shape[1], device=device)
        output = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=True,
            logits_to_keep=keep,
            **{self._cache_argument: cache},
        )
        logits: Tensor = output.logits
        return logits

    def _measured(self, row: _Row, cache: EvictionCache | None, index: int) -> Measured:
        occupancy = cache.occupancy[index] if cache is not None else None
        metrics = summarise(row.divergence)
        return Measured(
            key=row.text.key,
            tokens=row.text.continuation,
            text="",
            truncated=False,
            occupancy_max=occupancy.largest if occupancy else 0,
            occupancy_mean=occupancy.total / occupancy.steps if occupancy and occupancy.steps else 0.0,
            cache_bytes=cache.nbytes() // self.batch_size if cache is not None else 0,
            prefill_peak_bytes=row.prefill_peak_bytes,
            prefill_seconds=row.prefill_seconds,
            first_token_seconds=row.prefill_seconds,
            decode_seconds=row.decode_seconds,
            decode_steps=len(row.divergence) - 1,
            score=metrics["agreement"],
            metrics=metrics,
            divergence=tuple(row.divergence),
        )


def evaluate(
    model: PreTrainedModel, policy: Policy, budget: Budget | None, texts: Iterable[Text], **settings: Any
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
