"""Prefill alone, decode together: each prompt in its own row without padding, rows decode as one batch, and a
finished row is replaced at once by the next prompt."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from evictbench.errors import NotFinite, UserError
from evictbench.generation.batching import continuous_batching
from evictbench.generation.end_tokens import end_tokens
from evictbench.generation.runner import Costs, ModelRunner, write_on
from evictbench.generation.sampling import NO_TOKEN, choose, uniform
from evictbench.suite.spec import GREEDY, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from evictbench.cache.base import KVCache
    from evictbench.cache.rows import RecencyCount
    from evictbench.generation.recency import RecencyWindow
    from evictbench.policy.base import BasePolicy
    from evictbench.policy.budget import Budget
    from evictbench.policy.declarations import Prefill

THINK, THINK_END = "<think>", "</think>"


@dataclass(frozen=True)
class Request:
    """One prompt to answer.

    prompt: token ids, never encoded again. border: index of the first question token, where the context alone is
    compressed; None: the whole prompt is. stop: strings that end the answer and are cut from it. ends: tokens that end
    it beside the model's. min_new_tokens: so many tokens come before an end token can. draw: the sample, as a number,
    and its repeat, from which random numbers are made. thinking: a <think> may be open, in the prompt or in the answer;
    inside it no stop string ends anything.
    """

    key: Hashable
    prompt: tuple[int, ...]
    border: int | None
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()
    min_new_tokens: int = 0
    sampling: Sampling = GREEDY
    draw: tuple[int, int] = (0, 0)
    thinking: bool = False


@dataclass(frozen=True)
class Completion:
    """One answer, and what it cost.

    tokens: generated ids, the end-of-sequence token left out. truncated: `max_new_tokens` came before an end.
    occupancy: entries per KV head that its decode queries saw, charged state included, 0 where there was none.
    cache_bytes: its row of the decode cache; prefill_peak_bytes: the cache at the fullest moment of its prompt.
    decode_seconds: its share of the steps it took part in (a step's wall time over its rows), the first token
    excluded, which first_token_seconds counts from the start of its prefill. recency: how recent what it kept was.
    """

    key: Hashable
    tokens: tuple[int, ...]
    text: str
    truncated: bool
    occupancy_max: int
    occupancy_mean: float
    cache_bytes: int
    prefill_peak_bytes: int
    prefill_seconds: float
    first_token_seconds: float
    decode_seconds: float
    decode_steps: int
    recency: RecencyCount | None = field(default=None, kw_only=True)


@dataclass
class _Row:
    """A sequence being decoded; the last of `tokens` has not been fed yet.

    thought_opened: the prompt ends with an open <think>.
    """

    item: Request
    thought_opened: bool = False
    tokens: list[int] = field(default_factory=list)
    prefill_peak_bytes: int = 0
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    ended: bool = False


class Generator:
    """Generation under a policy.

    budget: None for a policy without one. prefill: "native", "dense" or "bounded", in chunks of `chunk` tokens.
    batch_size: rows decoded together; halved when the device runs out of memory, and the rows started again.
    seed: of all random numbers. ends: tokens that end an answer; None: those of the model and the tokenizer. recency:
    as of `ModelRunner`.
    Nothing lives between two calls of `run`. Raises UserError for an impossible budget; `run` raises NotFinite for a
    model or a policy that makes logits NaN.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy: BasePolicy,
        budget: Budget | None,
        *,
        prefill: Prefill = "native",
        chunk: int = 512,
        batch_size: int = 8,
        seed: int = 0,
        ends: Collection[int] | None = None,
        recency: RecencyWindow | None = None,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"A batch has 1 row or more, not {batch_size}.")
        self.runner = ModelRunner(model, policy, budget, prefill=prefill, chunk=chunk, recency=recency)
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.seed = seed
        if ends is None:
            ends = end_tokens(getattr(model.generation_config, "eos_token_id", None), tokenizer).ids
        self._ends = frozenset(ends)
        self.runner.write_on = partial(write_on, model, ends=self._ends)

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Answer every request; completions come as they finish, in any order."""
        return continuous_batching(self, requests)

    def new_cache(self, *, rows: int) -> KVCache:
        """The decode cache."""
        return self.runner.new_cache(rows=rows)

    def start(self, request: Request) -> tuple[_Row, KVCache]:
        """Read a prompt, and choose the first token."""
        started = time.perf_counter()
        cache, logits = self.runner.prefill(request.prompt, request.border)
        row = _Row(request, prefill_peak_bytes=cache.bytes_peak)
        if request.thinking:
            row.thought_opened = self._decode(list(request.prompt[-8:])).rstrip().endswith(THINK)
        (token,) = self._choose(logits[None], [row])
        row.prefill_seconds = row.first_token_seconds = time.perf_counter() - started
        self._take(row, token)
        return row, cache

    def step(self, active: list[_Row], cache: KVCache) -> None:
        """Feed every row's last token, and take the next."""
        started = time.perf_counter()
        logits = self.runner.forward(cache, [[row.tokens[-1]] for row in active], cache.seen)
        tokens = self._choose(logits[:, -1], active)
        share = (time.perf_counter() - started) / len(active)
        for row, token in zip(active, tokens, strict=True):
            row.decode_seconds += share
            row.decode_steps += 1
            self._take(row, token)

    def _choose(self, logits: Any, rows: list[_Row]) -> list[int]:
        """The next token of each row; no end token where a row is not to end yet."""
        banned = [
            (index, sorted(self._ends.union(row.item.ends)))
            for index, row in enumerate(rows)
            if len(row.tokens) < row.item.min_new_tokens
        ]
        if banned:
            logits = logits.clone()
            for index, ends in banned:
                logits[index, ends] = float("-inf")
        numbers = [uniform(self.seed, *row.item.draw, len(row.tokens)) for row in rows]
        return choose(logits, [row.item.sampling for row in rows], numbers)

    def _take(self, row: _Row, token: int) -> None:
        """Add a chosen token to a row, or end it. Raises NotFinite where none could be chosen."""
        if token == NO_TOKEN:
            raise NotFinite(row.item.key, len(row.tokens))
        if token in self._ends or token in row.item.ends:
            row.ended = True
            return
        row.tokens.append(token)
        row.ended = len(row.tokens) >= row.item.max_new_tokens or self._stopped(row)

    def _stopped(self, row: _Row) -> bool:
        """A stop string has come. Only the tail that can hold one is decoded: a character has at most four tokens."""
        if not row.item.stop:
            return False
        tail = 4 * max(len(stop) for stop in row.item.stop) + 4
        text = self._decode(row.tokens[-tail:])
        return any(stop in text for stop in row.item.stop) and self._cut(row) is not None

    def _cut(self, row: _Row) -> str | None:
        """The text before the first stop string, None where there is none; a thought cannot be cut."""
        text = self._decode(row.tokens)
        start = 0
        if row.item.thinking and (row.thought_opened or THINK in text):
            closed = text.rfind(THINK_END)
            if closed < 0:
                return None
            answer = text[closed + len(THINK_END) :]
            start = len(text) - len(answer.lstrip())
        found = [at for stop in row.item.stop if (at := text.find(stop, start)) >= 0]
        return text[: min(found)] if found else None

    def _decode(self, tokens: list[int]) -> str:
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text if isinstance(text, str) else "".join(text)

    def finish(self, row: _Row, cache: KVCache | None, index: int) -> Completion:
        """The answer of a row that has ended."""
        cut = self._cut(row) if row.item.stop else None
        costs = Costs.of(cache, index)
        full = len(row.tokens) >= row.item.max_new_tokens
        return Completion(
            key=row.item.key,
            tokens=tuple(row.tokens),
            text=self._decode(row.tokens) if cut is None else cut,
            truncated=full and cut is None,
            occupancy_max=costs.occupancy_max,
            occupancy_mean=costs.occupancy_mean,
            cache_bytes=costs.cache_bytes,
            prefill_peak_bytes=row.prefill_peak_bytes,
            prefill_seconds=row.prefill_seconds,
            first_token_seconds=row.first_token_seconds,
            decode_seconds=row.decode_seconds,
            decode_steps=row.decode_steps,
            recency=costs.recency,
        )
