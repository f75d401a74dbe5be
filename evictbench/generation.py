"""Prefill alone, decode together: each prompt in its own row without padding, rows decode as one batch, and a
finished row is replaced at once by the next prompt."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from evictbench.errors import UserError
from evictbench.suite import GREEDY, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from evictbench.budget import Budget
    from evictbench.cache import EvictionCache
    from evictbench.policy import Policy

THINK, THINK_END = "<think>", "</think>"


@dataclass(frozen=True)
class Request:
    """One prompt to answer.

    prompt: token ids, never encoded again. border: index of the first question token, where the context alone is
    compressed; None: the whole prompt is. stop: strings that end the answer and are cut from it. draw: the sample, as
    a number, and its repeat, from which random numbers are made. thinking: a <think> may be open, in the prompt or in
    the answer; inside it no stop string ends anything.
    """

    key: Hashable
    prompt: tuple[int, ...]
    border: int | None
    max_new_tokens: int
    stop: tuple[str, ...] = ()
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
    excluded, which first_token_seconds counts from the start of its prefill.
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
    seed: of all random numbers.
    Nothing lives between two calls of `run`. Raises UserError for an impossible budget.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy: Policy,
        budget: Budget | None,
        *,
        prefill: Literal["native", "dense", "bounded"] = "native",
        chunk: int = 512,
        batch_size: int = 8,
        seed: int = 0,
    ) -> None:
        if chunk < 1:
            raise UserError(f"A chunk has 1 token or more, not {chunk}.")
        if batch_size < 1:
            raise UserError(f"A batch has 1 row or more, not {batch_size}.")
        self.model = model
        self.tokenizer = tokenizer
        self.policy = policy
        self.budget = budget
        self.prefill = prefill
        self.chunk = chunk
        self.batch_size = batch_size
        self.seed = seed
        # The argument was renamed in transformers 5.24.
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._ends = _end_tokens(model, tokenizer)

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Answer every request; completions come as they finish, in any order."""
        from evictbench.batching import work_through

        return work_through(self, requests)

    def new_cache(self, *, prompt_length: int | None = None, rows: int | None = None) -> EvictionCache:
        """A cache under this policy and budget."""
        from evictbench.cache import EvictionCache

        return EvictionCache(
            self.model, self.policy, self.budget, prefill=self.prefill, prompt_length=prompt_length, rows=rows
        )

    def start(self, request: Request) -> tuple[_Row, EvictionCache]:
        """Feed a prompt in chunks, the question as one more, and choose the first token."""
        if not request.prompt:
            raise UserError("A prompt has no tokens.")
        started = time.perf_counter()
        length = len(request.prompt)
        border = request.border if request.border and request.border < length else length
        cache = self.new_cache(prompt_length=border)
        bounds = [*range(0, border, self.chunk), border, *([length] if border < length else [])]
        logits: Any = None
        for start, stop in itertools.pairwise(bounds):
            logits = self._forward(cache, [list(request.prompt[start:stop])], [start])
        row = _Row(request, prefill_peak_bytes=cache.bytes_peak)
        if request.thinking:
            row.thought_opened = self._decode(list(request.prompt[-8:])).rstrip().endswith(THINK)
        (token,) = self._choose(logits, [row])
        row.prefill_seconds = row.first_token_seconds = time.perf_counter() - started
        self._take(row, token)
        return row, cache

    def step(self, active: list[_Row], cache: EvictionCache) -> None:
        """Feed every row's last token, and take the next."""
        started = time.perf_counter()
        logits = self._forward(cache, [[row.tokens[-1]] for row in active], cache.seen)
        tokens = self._choose(logits, active)
        share = (time.perf_counter() - started) / len(active)
        for row, token in zip(active, tokens, strict=True):
            row.decode_seconds += share
            row.decode_steps += 1
            self._take(row, token)

    def _forward(self, cache: EvictionCache, tokens: list[list[int]], starts: list[int]) -> Any:
        """Logits `[rows, vocabulary]` after the last token of each row."""
        import torch

        device = self.model.device
        input_ids = torch.tensor(tokens, device=device)
        position_ids = torch.tensor(starts, device=device)[:, None] + torch.arange(input_ids.shape[1], device=device)
        output = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        )
        return output.logits[:, -1]

    def _choose(self, logits: Any, rows: list[_Row]) -> list[int]:
        """The next token of each row."""
        from evictbench.sampling import choose, uniform

        numbers = [uniform(self.seed, *row.item.draw, len(row.tokens)) for row in rows]
        return choose(logits, [row.item.sampling for row in rows], numbers)

    def _take(self, row: _Row, token: int) -> None:
        """Add a chosen token to a row, or end it."""
        if token in self._ends:
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
            start = text.find(THINK_END) + len(THINK_END)
            if start < len(THINK_END):
                return None
        found = [at for stop in row.item.stop if (at := text.find(stop, start)) >= 0]
        return text[: min(found)] if found else None

    def _decode(self, tokens: list[int]) -> str:
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text if isinstance(text, str) else "".join(text)

    def finish(self, row: _Row, cache: EvictionCache | None, index: int) -> Completion:
        """The answer of a row that has ended."""
        cut = self._cut(row) if row.item.stop else None
        occupancy = cache.occupancy[index] if cache is not None else None
        full = len(row.tokens) >= row.item.max_new_tokens
        return Completion(
            key=row.item.key,
            tokens=tuple(row.tokens),
            text=self._decode(row.tokens) if cut is None else cut,
            truncated=full and cut is None,
            occupancy_max=occupancy.largest if occupancy else 0,
            occupancy_mean=occupancy.total / occupancy.steps if occupancy and occupancy.steps else 0.0,
            cache_bytes=cache.nbytes() // self.batch_size if cache is not None else 0,
            prefill_peak_bytes=row.prefill_peak_bytes,
            prefill_seconds=row.prefill_seconds,
            first_token_seconds=row.first_token_seconds,
            decode_seconds=row.decode_seconds,
            decode_steps=row.decode_steps,
        )


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that end a sequence, from the model's generation config, else from the tokenizer."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    ends = tokenizer.eos_token_id if ends is None else ends
    return frozenset([ends] if isinstance(ends, int) else ends or [])
